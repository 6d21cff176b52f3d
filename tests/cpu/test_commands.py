"""The launcher and the commands on it, in worlds of two ranks without a GPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tileweave.bench.environment import WITHOUT_GPUS
from tileweave.launcher import Member, RankFailure, launch

pytest.importorskip("typer")
runner = pytest.importorskip("typer.testing").CliRunner()


def add_ranks(me: Member, extra: int) -> tuple[int, str | None]:
    total = torch.tensor([me.rank + extra])
    dist.all_reduce(total)
    return int(total), os.environ.get("TRITON_INTERPRET")


def fail_on_one(me: Member) -> None:
    if me.rank == 1:
        raise ValueError("rank one is unhappy")
    me.barrier()


def exit_on_one(me: Member) -> None:
    if me.rank == 1:
        os._exit(7)
    me.barrier()


def sleep_on_one(me: Member) -> None:
    if me.rank == 1:
        time.sleep(100)
    me.barrier()


def invoke(*words: str, code: int = 0) -> str:
    from tileweave.commands.app import app

    result = runner.invoke(app, list(words))
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.output


def test_a_world_returns_what_rank_0_returned() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    assert launch(add_ranks, 10, world_size=2, device_type="cpu", seconds=60) == (21, "1")
    assert os.environ.get("TRITON_INTERPRET") == before


@pytest.mark.parametrize(
    ("body", "said"), [(fail_on_one, "rank one is unhappy"), (exit_on_one, "exit code 7")]
)
def test_a_failing_rank_fails_the_world(body, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        launch(body, world_size=2, device_type="cpu", seconds=60)


def check_with_a_wrong_rank(me: Member, wrong_rank: int) -> list[object]:
    from tileweave.bench.samples import samples_of
    from tileweave.commands.check import check

    kind, made = type(samples_of("all_gather_matmul").subject), [0]
    call = kind.call

    def lie(self, *args, **named):
        result = call(self, *args, **named)
        made[0] += 1
        if me.rank == wrong_rank and made[0] == 5:
            result[0].view(-1)[-1] += 1000
        return result

    with (
        mock.patch.object(kind, "call", lie),
        mock.patch("tileweave.OPERATORS", ("all_gather_matmul",)),
    ):
        return check(me, 4)


def test_check_reports_a_wrong_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileweave.commands import app as cli

    rows = launch(check_with_a_wrong_rank, 1, world_size=2, device_type="cpu", seconds=60)
    assert [row.right for row in rows] == [False, True, True]
    monkeypatch.setattr(cli, "launch", lambda *_, **__: rows)
    assert invoke("check", "--world", "2", "--device", "cpu", code=1).count("WRONG") == 1


def test_a_stuck_world_is_ended() -> None:
    with pytest.raises(RankFailure, match="were not done after 10 s"):
        launch(sleep_on_one, world_size=2, device_type="cpu", seconds=10)


def test_doctor() -> None:
    assert "what will run" in invoke("doctor")


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = invoke("demo", "--world", "2", "--device", "cpu", "--out", str(tmp_path))
    assert "WRONG" not in output
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "trace0.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_check() -> None:
    assert "WRONG" not in invoke("check", "--world", "2", "--device", "cpu", "--calls", "4")


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.device_count() >= 2, reason="smoke cases are for machines without GPUs"
)
@pytest.mark.parametrize(
    ("op", "world"), [("all_gather_matmul", "3"), ("embedding_bag_all_to_all", "2")]
)
def test_bench(tmp_path: Path, op: str, world: str) -> None:
    path = tmp_path / "report.json"
    invoke("bench", op, "--smoke", "--world", world, "--repeats", "2", "--json", str(path))
    report = json.loads(path.read_text())
    assert all(case["right"] for case in report["cases"])
    assert all(case["times"]["tileweave"]["median_us"] > 0 for case in report["cases"])


@pytest.mark.skipif(
    torch.cuda.device_count() >= 2, reason="smoke cases are for machines without GPUs"
)
@pytest.mark.parametrize(
    ("op", "peers", "strangers", "code"),
    [
        ("matmul_all_reduce", "torch fused", ["torch fused"], 1),
        ("all_to_all_matmul", "gemm,torch one-shot", ["torch one-shot"], 0),
        ("grouped_matmul_combine", "routed,gathered", ["routed"], 0),
        ("dispatch_grouped_matmul", "gathered", [], 0),
        ("embedding_bag_all_to_all", "cat", [], 0),
    ],
)
def test_bench_names_baselines_that_cannot_run(
    op: str, peers: str, strangers: list[str], code: int
) -> None:
    output = invoke(
        "bench", op, "--smoke", "--world", "2", "--repeats", "1", "--rivals", peers, code=code
    )
    told = [line for line in output.splitlines() if "not a rival" in line]
    assert told == [f"{name} is missing: not a rival of {op}" for name in strangers]
    assert ("nothing was timed" in output) == (code == 1)
    assert WITHOUT_GPUS in output


@pytest.mark.skipif(
    torch.cuda.device_count() >= 2, reason="smoke cases are for machines without GPUs"
)
def test_bench_of_random_cases_ends_with_a_summary(tmp_path: Path) -> None:
    words = ("matmul_all_reduce", "--random", "2", "--seed", "3", "--smoke", "--world", "2")
    output = invoke("bench", *words, "--repeats", "1", "--json", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["random"] == {"count": 2, "seed": 3}
    assert [case["right"] for case in report["cases"]] == [True, True]
    summary = report["summary"]
    assert (summary["timed"], summary["wrong"], summary["skipped"]) == (2, [], [])
    assert {row["name"] for row in summary["worst"]} == {case["name"] for case in report["cases"]}
    assert "matmul_all_reduce: 2 of 2 cases timed, 0 wrong, 0 skipped" in output
    assert f"worst {summary['worst'][0]['over_best']:.3f}, {summary['worst'][0]['name']}" in output


def paths_of_a_stress(me: Member) -> dict[str, str]:
    from tileweave.commands.stress import stress

    with mock.patch("tileweave.OPERATORS", ("matmul_all_reduce", "embedding_bag_all_to_all")):
        return stress(me, 2, 1, 60.0).paths


@pytest.mark.parametrize(
    ("interpreted", "path"), [("1", "library sm 16x32, triton sm 16x32"), ("0", "unfused")]
)
def test_stress_reports_its_paths(interpreted: str, path: str) -> None:
    """Where kernels are not interpreted, ranks without GPUs call torch."""
    extra = {"TRITON_INTERPRET": interpreted}
    paths = launch(paths_of_a_stress, world_size=2, device_type="cpu", seconds=60, extra=extra)
    assert paths["matmul_all_reduce"] == path
    assert paths["embedding_bag_all_to_all"] == ("unfused" if interpreted == "0" else "fused")
