"""Reports of commands: verdicts of the doctor, worlds under torchrun, tables, notes and exit
codes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tileweave import OPERATORS, launcher
from tileweave.commands import doctor
from tileweave.errors import InputError
from tileweave.planning.machine import H200, Machine

pytest.importorskip("typer")
pytest.importorskip("rich")
runner = pytest.importorskip("typer.testing").CliRunner()

from rich.console import Console  # noqa: E402

from tileweave.bench import experts  # noqa: E402
from tileweave.bench import measured_page as measured  # noqa: E402
from tileweave.bench.console import console  # noqa: E402
from tileweave.bench.environment import WITHOUT_GPUS  # noqa: E402
from tileweave.bench.report import notes_of, tables_of, why_nothing  # noqa: E402
from tileweave.commands import app as cli  # noqa: E402
from tileweave.commands import stress  # noqa: E402
from tileweave.commands.check import note_on  # noqa: E402
from tileweave.explore import fuzz as explorer  # noqa: E402

RESULTS = Path(__file__).parents[2] / "docs" / "results"
OTHERS = [
    Machine("A100", "cuda", 80, 108),
    Machine("B200", "cuda", 100, 148),
    Machine("MI300X", "hip", 94, 304),
]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def given(
    launched: object, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, list[Any]]:
    """The exit code of a command whose world returns ``launched``, its output, and the arguments of
    the world."""
    calls: list[Any] = []
    for module in (cli, stress):
        monkeypatch.setattr(
            module,
            "launch",
            lambda function, *args, **named: calls.append((args, named)) or launched,
        )
    done = runner.invoke(cli.app, list(words))
    return done.exit_code, done.output, calls


# --- doctor ---


def verdicts(machine: Machine) -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor._verdicts(4, True, machine)}


@pytest.mark.parametrize("machine", OTHERS, ids=lambda machine: machine.name)
def test_doctor_reports_that_no_matmul_is_fused(machine: Machine) -> None:
    found = verdicts(machine)
    assert found["compiled kernels"].good
    assert (
        "embeddings fused; experts unfused, and matmuls unless `tileweave tune` measured them: "
        "no measurement" in found["compiled kernels"].value
    )
    assert "those for Hopper are not: made for sm_90" in found["kernels in use"].value
    assert all("unfused" in fact.value for name, fact in found.items() if "matmul" in name)


def test_doctor_reports_that_matmuls_are_fused() -> None:
    found = verdicts(H200)
    assert found["compiled kernels"].value.endswith("bf16 and fp16 fused, fp32 unfused")
    assert found["kernels in use"].value.startswith("those for Hopper (Gluon) and the portable")


def test_doctor_reports_which_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_KERNELS", "portable")
    found = verdicts(replace(H200, kernels="portable"))
    assert "those for Hopper are not: TILEWEAVE_KERNELS=portable" in found["kernels in use"].value
    assert "TILEWEAVE_KERNELS=portable leaves out" in found["compiled kernels"].value
    monkeypatch.setenv("TILEWEAVE_KERNELS", "fast")
    fact = verdicts(H200)["kernels in use"]
    assert not fact.good and "TILEWEAVE_KERNELS='fast'; allowed: all, portable" in fact.value


def test_doctor_reports_gpus_without_peer_access() -> None:
    fact = next(f for f in doctor._verdicts(4, False, H200) if f.name == "compiled kernels")
    assert not fact.good and "all calls run unfused" in fact.value and "topo -p2p" in fact.value


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"triton": None}, "no: triton is missing"),
        ({"triton": "3.5.1"}, "no: triton 3.5.1 is older than 3.6"),
    ],
)
def test_doctor_without_triton_reports_no_kernels(
    versions: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = doctor.version_of
    monkeypatch.setattr(
        doctor, "version_of", lambda name: versions[name] if name in versions else known(name)
    )
    found = verdicts(H200)
    assert not found["compiled kernels"].good and found["compiled kernels"].value.startswith(said)
    assert len(found) == 3, "no plans of kernels that are not there"


def test_doctor_reports_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert verdicts(H200)["compiled kernels"].value.startswith(
        "no: torch 2.9.1+cu128 is older than 2.11"
    )


# --- Under torchrun ---


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_torchrun_decides_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.default_world_size("cpu", None) == 4
    under_torchrun(monkeypatch, 0, 3)
    assert launcher.default_world_size("cpu", None) == launcher.default_world_size("cpu", 3) == 3
    for refused in (
        lambda: launcher.default_world_size("cpu", 4),
        lambda: launcher.launch(print, world_size=4, device_type="cpu"),
    ):
        with pytest.raises(
            InputError, match="asked: 4 ranks under torchrun; allowed: 3, its WORLD_SIZE; remedy: "
        ):
            refused()


@pytest.mark.parametrize("size", [1, 9])
def test_torchrun_world_of_wrong_size_is_refused(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, 0, size)
    with pytest.raises(
        InputError, match=f"world size {size} on cpu; allowed: 2 to 8 .*have torchrun start another"
    ):
        launcher.default_world_size("cpu", None)


BAD_VARIABLES = [
    {"WORLD_SIZE": "x"},
    {"WORLD_SIZE": "0"},
    {"WORLD_SIZE": "9" * 5000},
    {"RANK": "2"},
    {"RANK": "-1"},
    {"RANK": "\u0661"},
    {"LOCAL_RANK": "x"},
    {"LOCAL_RANK": "1"},
    {"MASTER_PORT": "x"},
    {"MASTER_PORT": "70000"},
    {"MASTER_PORT": ""},
    {"MASTER_ADDR": ""},
]


@pytest.mark.parametrize("change", BAD_VARIABLES, ids=str)
def test_variables_of_torchrun_that_cannot_be_are_named(
    change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, 0, 2)
    good = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**good, "TRITON_INTERPRET": "1", **change}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "_join", lambda *_: pytest.fail("joined"))
    with pytest.raises(InputError) as caught:
        launcher.launch(print, world_size=2, device_type="cpu")
    said, name = str(caught.value), next(iter(change))
    assert name in said and "; allowed: " in said and "; remedy: " in said and len(said) < 400


def test_other_ranks_of_torchrun_are_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank, quiet in ((0, False), (1, True)):
        under_torchrun(monkeypatch, rank, 2)
        assert console().quiet is quiet
        code, said, _ = given(None, monkeypatch, "demo", "--device", "cpu", "--out", str(tmp_path))
        assert code == 0 and ("2 ranks on the CPU" in said) is not quiet


# --- bench ---


def test_every_all_gather_target_is_shown() -> None:
    report = json.loads((RESULTS / "all_gather_matmul-4xH200-2026-11-22-b.json").read_text("utf-8"))
    text = StringIO()
    Console(file=text, width=220).print(*tables_of(report, 220))
    bars = [
        line.strip() for line in text.getvalue().splitlines() if line.strip().startswith("bar: ")
    ]
    assert len(bars) == 3, "large, odd and small"
    assert [line.split()[3:] for line in bars] == [
        ["0.97", "0.92", "1", "1"],
        ["1"],
        ["1.25", "0.98", "1"],
    ]


# --- trace ---


@pytest.mark.parametrize(
    ("op", "shard", "whole"),
    [
        ("all_gather_matmul", (64, 128, 128), "256, 512, 128"),
        ("matmul_reduce_scatter", (64, 512, 32), "256, 512, 128"),
        ("matmul_all_to_all", (64, 128, 128), "256, 512, 128"),
        ("all_to_all_matmul", (64, 512, 32), "256, 512, 128"),
    ],
)
def test_trace_shards_what_its_operator_shards(
    op: str, shard: tuple[int, ...], whole: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (
        "trace",
        op,
        "--rows",
        "258",
        "--cols",
        "512",
        "--world",
        "4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    )
    code, said, calls = given(None, monkeypatch, *words)
    assert code == 0 and f"{op}, M, N, K: {whole}, over 4 ranks" in said
    assert "rounded" in said
    assert calls[0][0] == (op, *shard, "float16")
    words = (
        "trace",
        op,
        "--rows",
        "256",
        "--cols",
        "512",
        "--world",
        "4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    )
    assert "rounded" not in given(None, monkeypatch, *words)[1]


def test_every_operator_is_traced_by_sizes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for op in OPERATORS:
        words = ("trace", op, "--world", "2", "--device", "cpu", "--out", str(tmp_path))
        code, said, calls = given(None, monkeypatch, *words)
        assert code == 0 and f"{op}, M, N, K: " in said
        assert math.prod(calls[0][0][1:4]) < 1 << 22, "interpreted kernels take small sizes"


def test_dimension_of_one_is_refused_only_where_it_is_sharded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--rows", "1", "--depth", "1", "--device", "cpu", "--out", str(tmp_path))
    assert "--rows 1; allowed: 4 or more" in str(
        runner.invoke(cli.app, ["trace", "matmul_all_to_all", *words]).exception
    )
    code, _, calls = given(
        None, monkeypatch, "trace", "matmul_all_to_all", "--depth", "1", *words[4:]
    )
    assert code == 0 and calls[0][0][3] == 1


# --- bench ---


def a_report(op: str, times: dict[str, Any], **more: Any) -> dict[str, Any]:
    case = {
        "name": "a",
        "block": "smoke",
        "rows": 1,
        "cols": 1,
        "depth": 1,
        "plan": "",
        "error": 0.0,
        "right": True,
        "times": times,
        "missing": {},
        "host_us": math.nan,
        "e_overlap": math.nan,
        "limit_ratio": math.nan,
        "over_unfused": math.nan,
        "over_torch": math.nan,
        "over_best": math.nan,
        "over_gemm_us": math.nan,
    }
    return {
        "op": op,
        "world_size": 2,
        "environment": {},
        "cases": [case | more],
        "skipped": [],
        "device_type": "cuda",
    }


def test_bench_without_timed_cases_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    report = a_report("all_gather_matmul", {})
    code, said, _ = given([report], monkeypatch, "bench", "--smoke")
    assert code == 1 and "nothing was timed: none of the chosen rivals can run here" in said
    report["cases"][0]["times"] = {"gemm": {"median_us": 1.0, "note": ""}}
    assert given([report], monkeypatch, "bench", "--smoke")[0] == 0
    assert why_nothing({"cases": []}) == "no time for any case"
    assert why_nothing(a_report("all_gather_matmul", {}, right=False)) == "", (
        "WRONG is said elsewhere"
    )


def test_bench_without_gpus_warns_about_its_times() -> None:
    report = a_report("grouped_matmul_combine", {})
    assert WITHOUT_GPUS not in notes_of(report)
    assert WITHOUT_GPUS in notes_of(report | {"device_type": "cpu"})


def text_of(*tables: Any) -> str:
    text = StringIO()
    Console(file=text, width=190).print(*tables)
    return text.getvalue()


def row_of(text: str, name: str) -> list[str]:
    return re.split(
        r" {2,}", next(line for line in text.splitlines() if line.strip().startswith(name)).strip()
    )


@pytest.mark.parametrize(
    "name",
    [
        "dispatch_grouped_matmul-4xH200-2026-11-22.json",
        "grouped_matmul_combine-4xH200-2026-11-22-b.json",
    ],
)
def test_report_without_a_rival_shows_a_dash(name: str) -> None:
    report = json.loads((RESULTS / name).read_text("utf-8"))
    text = text_of(*experts.tables_of(report, 190))
    heads, row = row_of(text, "case"), row_of(text, "deepseek-v3-t4096 ")
    assert row[heads.index("/gathered") - len(heads)] == "-"
    case = next(case for case in report["cases"] if case["name"] == "deepseek-v3-t4096")
    case["times"]["gathered"], case["over_gathered"] = case["times"]["tileweave"], 0.5
    text = text_of(*experts.tables_of(report, 190))
    heads, row = row_of(text, "case"), row_of(text, "deepseek-v3-t4096 ")
    assert row[heads.index("/gathered") - len(heads)] == "!0.50" and "gathered" in heads


# --- docs/measured.md ---


def folder_with(tmp_path: Path, op: str, *changes: Any) -> Path:
    """A folder with a run of ``op``, and a later one for each of ``changes`` (to its report)."""
    text = (RESULTS / f"{op}-4xH200-2026-11-21.json").read_text("utf-8")
    for number, change in enumerate((lambda report: None, *changes)):
        report = json.loads(text)
        report["environment"]["date"] = f"2026-12-0{number + 1}T00:00:00+00:00"
        change(report)
        (tmp_path / f"{op}-4xH200-{number}.json").write_text(json.dumps(report), "utf-8")
    return tmp_path


def test_measured_page_needs_all_cases(tmp_path: Path) -> None:
    op = "all_to_all_matmul"
    page = measured.markdown(folder_with(tmp_path, op, lambda report: report["cases"].pop(0)))
    earlier, later = (f"[run](results/{op}-4xH200-{number}.json)" for number in range(2))
    assert f"Large, eager ({earlier}, {later})" in page, "the later run has one of two cases"
    assert f"Small, in a CUDA graph ({later})" in page
    (tmp_path / f"{op}-4xH200-0.json").unlink()
    page = measured.markdown(tmp_path)
    assert "Large, eager: no run had all of its 2 cases." in page and "2026-12-02;" in page


def test_measured_page_shows_failures_and_versions(tmp_path: Path) -> None:
    def wrong(report: dict[str, Any]) -> None:
        report["cases"][0] |= {
            "right": False,
            "times": {},
            "over_unfused": None,
            "limit_ratio": None,
            "over_gemm_us": None,
        }
        report["environment"] |= {"torch": "2.14.0+cu130", "triton": "3.8.0", "nccl": "2.30.1"}

    page = measured.markdown(folder_with(tmp_path, "all_to_all_matmul", wrong))
    assert page.count("**WRONG**") == 1
    assert "torch 2.14.0, triton 3.8.0, NCCL 2.30.1, 2026-12-02;" in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_a_folder_without_results_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"asked: a page on .*remedy: pass docs/results"):
        measured.markdown(tmp_path)
    monkeypatch.setattr("sys.argv", ["measured"])
    with pytest.raises(SystemExit, match="2"):
        measured.main()


# --- check ---


def test_check_reports_unfused_operators() -> None:
    assert (
        note_on(["unfused", "unfused"])
        and not note_on(["triton sm 16x32, unfused", "unfused"])
        and not note_on([])
    )


def test_stress_reports_which_paths_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileweave.commands.stress import Outcome

    for path, noted in (("triton sm 16x32", False), ("unfused", True)):
        outcome = Outcome(
            2, 1, 5, 5, 10, 0, 0, 0, 1.0, 0.5, {"matmul_all_reduce": 5}, {"matmul_all_reduce": path}
        )
        code, said, _ = given(outcome, monkeypatch, "check", "--stress", "--device", "cpu")
        assert code == 0 and f"matmul_all_reduce: 5 on rank 0, by {path}" in said
        assert ("every path taken is unfused" in said) is noted


# --- fuzz ---


def test_counts_do_not_replace_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the counts of an exploration replace those of a moment before."""

    def counts(*_: object, keep: Callable[[explorer.Report], None]) -> explorer.Report:
        keep(explorer.Report(steps=3))
        return explorer.Report(story="a violation")

    monkeypatch.setattr(explorer, "fuzz", counts)
    (tmp_path / "link.json").symlink_to("/dev/null")
    for name in ("counts.json", "link.json"):
        done = runner.invoke(cli.app, ["fuzz", "--json", str(tmp_path / name)])
        assert done.exit_code == 1 and "a violation" in done.output, done.exception
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "counts.json").read_text("utf-8"))["first_seed"] == 0
