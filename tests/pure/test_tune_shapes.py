"""The shapes that ``tileweave tune`` measures: files, models, sizes; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tileweave.errors import InputError

pytest.importorskip("rich")
pytest.importorskip("typer")
runner = pytest.importorskip("typer.testing").CliRunner()

from tileweave.commands import app as cli  # noqa: E402
from tileweave.commands.tune import Asked, cases_for, operators  # noqa: E402
from tileweave.planning.candidates import TUNABLE  # noqa: E402
from tileweave.tune.models import MODELS, ROWS  # noqa: E402
from tileweave.tune.shapes import from_file, of_sizes, without_repeats  # noqa: E402

RS = "matmul_reduce_scatter"


def sizes(cases: list) -> list[tuple[int, int, int]]:
    return [(case.rows, case.cols, case.depth) for case in cases]


@pytest.mark.parametrize(
    "text", ["[[64, 4096, 8192], [1, 2, 3]]", "64 4096 8192\n\n# a comment\n 1, 2,3 # another\n"]
)
def test_files_are_json_or_lines(text: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(text)
    assert sizes(from_file(RS, tmp_path / "shapes", "bfloat16")) == [(64, 4096, 8192), (1, 2, 3)]


MALFORMED = (
    *("", "# none\n", "[[1, 2]]", "[1, 2, 3]", "[[1, 2, 3.5]]", "[[1", "[[true, 2, 2]]"),
    *("64 4096", "64 a 1", "0 1 1", "-1 2 2", f"1 1 {2**31}", "\u0661 2 3"),
    *("[" * 5000, "9" * 5000 + " 1 1", "[[1, 2, " + "9" * 5000 + "]]"),
)


@pytest.mark.parametrize("text", MALFORMED)
def test_broken_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(text)
    with pytest.raises(InputError, match=r"shapes, with.*allowed: a JSON list|which is not JSON"):
        from_file(RS, tmp_path / "shapes", "bfloat16")
    with pytest.raises(InputError, match="cannot be read"):
        from_file(RS, tmp_path / "no such file", "bfloat16")


def test_layers_of_llama3_70b() -> None:
    def layers(op: str) -> set[tuple[int, int]]:
        cases = cases_for((op,), Asked(model="llama3-70b", rows="64,2048"))
        assert {case.rows for case in cases} == {64, 2048}
        return {(case.cols, case.depth) for case in cases}

    assert layers("all_gather_matmul") == {(10240, 8192), (57344, 8192)}
    assert layers(RS) == layers("matmul_all_reduce") == {(8192, 8192), (8192, 28672)}
    assert layers("matmul_all_to_all") == {(10240, 8192)}
    assert layers("all_to_all_matmul") == {(8192, 8192)}


def test_shapes_of_fp8() -> None:
    cases = cases_for(operators("all"), Asked(model="llama3-70b", rows="64", scales="block"))
    assert {case.scales for case in cases} == {"block"}
    assert {case.op for case in cases} == {"all_gather_matmul", RS, "matmul_all_reduce"}
    for case in cases_for((RS,), Asked(random=20, seed=3, scales="row+fast")):
        _, cols, depth = case.shard(8)
        assert cols % 16 == depth % 16 == 0 and case.keeps_sums and case.kind == "row"
    bad = [
        (("matmul_all_to_all",), "row", "bfloat16", "which take FP8"),
        ((RS,), "column", "bfloat16", "tensor, row, block"),
        ((RS,), "row", "float32", "the dtype of the result"),
    ]
    for ops, scales, dtype, text in bad:
        with pytest.raises(InputError, match=text):
            cases_for(ops, Asked(random=2, scales=scales, dtype=dtype))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_shapes_that_ranks_share(name: str) -> None:
    cases = cases_for(TUNABLE, Asked(model=name))
    assert {case.rows for case in cases} == set(ROWS)
    for case in cases:
        # rows are rounded; of columns and K every rank has the same number
        assert case.whole(8)[1:] == (case.cols, case.depth), case.name
        assert min(case.cols, case.depth) > 0


def test_problems_that_ranks_round_to_the_same_are_tuned_once() -> None:
    cases = [of_sizes(RS, rows, 64, 128, "bfloat16") for rows in (8, 9, 10, 8)]
    assert sizes(without_repeats(cases, 2)) == [(8, 64, 128), (10, 64, 128)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tune", "shapes from nowhere; allowed: one of --shapes; --random; --model; --rows"),
        ("tune --random 2 --model llama3-70b", "shapes from --random and --model"),
        ("tune --model llama3-71b", "model 'llama3-71b'; allowed: llama3-8b"),
        ("tune --model llama3-8b --rows 4,x", "--rows 4,x; allowed: positive numbers"),
        ("tune --rows 4 --cols 64", "without one of --rows, --cols and --depth"),
        ("tune --rows 4 --random 3", "--rows with --random"),
        ("tune dispatch_grouped_matmul --random 1", "to tune 'dispatch_grouped_matmul'; allowed"),
        ("tune --shapes /no/such/file", "cannot be read"),
        ("tune --model llama3-8b --tp 4 --world 2", "--tp 4 with --world 2"),
        ("tune --model llama3-8b", "asked: to tune; allowed: on two GPUs or more"),
        ("tune --model llama3-8b --tp 9 --device cpu", "world size 9"),
        ("tune --random -1", "--random"),
    ],
)
def test_what_is_refused_before_ranks_start(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a world was started"))
    done = runner.invoke(cli.app, words.split())
    assert done.exit_code != 0
    assert said in (str(done.exception) if isinstance(done.exception, InputError) else done.output)


def test_operators_that_can_be_tuned() -> None:
    assert operators("all") == TUNABLE and operators(RS) == (RS,)


def test_show_and_clear_name_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path))
    assert f"nothing in {tmp_path}" in runner.invoke(cli.app, ["tune", "--show"]).output
    (tmp_path / "x.json").write_text("{}")
    said = runner.invoke(cli.app, ["tune", "--show"]).output
    assert str(tmp_path / "x.json") in said and "tileweave tune --clear" in said
    assert f"removed {tmp_path / 'x.json'}" in runner.invoke(cli.app, ["tune", "--clear"]).output
    assert not (tmp_path / "x.json").exists()
