"""``tileweave tune`` and ``tw.warmup(tune=True)`` with interpreted kernels: the whole path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tileweave.launcher import Member, launch

pytest.importorskip("rich")
pytest.importorskip("typer")
runner = pytest.importorskip("typer.testing").CliRunner()

from tileweave.commands.app import app  # noqa: E402
from tileweave.ops.core.tuned_choices import key_of  # noqa: E402
from tileweave.planning import cache  # noqa: E402

ON_CPU = ("--device", "cpu", "--world", "2", "--repeats", "1", "--dtype", "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tune(*words: str, code: int = 0) -> str:
    done = runner.invoke(app, ["tune", *words, *ON_CPU])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done.output


def plans_of_calls(me: Member) -> list[str]:
    """Plans before and after calls of a new process, which are right."""
    found, w = [], torch.ones(24, 32)
    for rows in (8, 20, 9):
        x = torch.ones(rows, 32)
        found.append(tw.explain("matmul_all_reduce", x, w).summary)
        assert torch.equal(tw.matmul_all_reduce(x, w), torch.full((rows, 24), 64.0))
        found.append(tw.explain("matmul_all_reduce", x, w).summary)
    return found


def test_shapes_are_measured_kept_and_planned_by(tmp_path: Path, own_cache: Path) -> None:
    found = tmp_path / "found.json"
    (tmp_path / "shapes").write_text("8 24 64\n20 24 64\n8 24 65  # the same after rounding\n")
    said = tune(
        "matmul_all_reduce", "--shapes", str(tmp_path / "shapes"), "--json", str(found), code=0
    )
    assert "2 shapes tuned" in said and "kept in" in said
    rows = json.loads(found.read_text())["rows"]
    assert [row["sizes"] for row in rows] == [[8, 24, 64], [20, 24, 64]]
    for row in rows:
        assert row["us"] <= row["us_unfused"] and row["us"] <= row["us_before"]
        assert row["candidates"] >= 2 and row["wrong"] == []
    (path,) = cache.files()
    measured = cache.read(path)[1]
    assert [one.problem.rows for one in measured] == [8, 20]
    assert all(None in one.us and len(one.us) >= 2 for one in measured)
    assert "matmul_all_reduce" in runner.invoke(app, ["tune", "--show"]).output
    *tuned, _, untuned = launch(plans_of_calls, world_size=2, device_type="cpu", seconds=60)
    assert len(tuned) == 4 and all(plan.endswith(": measured") for plan in tuned), tuned
    assert "interpreted" in untuned


def test_tuning_ends_on_every_rank_where_results_cannot_be_kept(own_cache: Path) -> None:
    own_cache.mkdir()
    sizes = ("--rows", "8", "--cols", "16", "--depth", "32")
    path = cache.path_of(key_of(torch.device("cpu"), 2))
    path.write_text("{}")
    said = runner.invoke(app, ["tune", "matmul_all_reduce", *sizes, *ON_CPU])
    assert said.exit_code != 0 and "tileweave tune --clear" in str(said.exception)
    assert path.read_text() == "{}"
