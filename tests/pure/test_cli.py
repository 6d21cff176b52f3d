"""Errors of commands before they start, and verdicts in tables. No world is started here."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tileweave.bench import prerequisites as beforehand
from tileweave.errors import InputError

pytest.importorskip("typer")
pytest.importorskip("rich")
runner = pytest.importorskip("typer.testing").CliRunner()

from rich.console import Console  # noqa: E402

from tileweave.bench.samples import DemoCase, samples_of  # noqa: E402
from tileweave.bench.subjects import Shape  # noqa: E402
from tileweave.commands.app import app  # noqa: E402
from tileweave.commands.demo import DemoResult, DemoRow, closing, table_of  # noqa: E402


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def refused(*words: str) -> str:
    """Output of a command that exits at once with a nonzero code."""
    done = runner.invoke(app, list(words))
    assert done.exit_code != 0
    return str(done.exception) if isinstance(done.exception, InputError) else done.output


# --- The demo's table ---


def a_result(wrong: int = -1) -> DemoResult:
    cases = [case for op in tw.OPERATORS for case in samples_of(op).demo(False, 4)]
    rows = [
        DemoRow(case, "triton copy_engine 32x64", 1.4e-7, 26800.0, 4, 239600.0, number != wrong)
        for number, case in enumerate(cases)
    ]
    return DemoResult(4, "CPU, interpreted kernels over shared host memory", rows, [])


@pytest.mark.parametrize("width", [80, 100, 120, 190])
def test_every_width_shows_verdicts(width: int) -> None:
    text, result = StringIO(), a_result(wrong=3)
    Console(file=text, width=width, highlight=False).print(table_of(result, width))
    lines = [
        line
        for line in text.getvalue().splitlines()
        if line.split() and line.split()[0] in tw.OPERATORS
    ]
    assert [line.split()[1] for line in lines] == [
        "WRONG" if n == 3 else "ok" for n in range(len(result.rows))
    ]
    assert all("1.4e-07" in line for line in lines)
    assert ("allowed" in text.getvalue().split("no room for")[0]) == (width == 190)


def test_demo_closing_line_counts_cases() -> None:
    assert closing(a_result()) == "26 of 26 right"
    assert (
        closing(a_result(wrong=1))
        == "25 of 26 right; WRONG: all_gather_matmul: random, gathered too"
    )
    one = DemoRow(DemoCase("op", "x", Shape(1, 1, 1), torch.float32), "fused", 0.0, 0, 0, 0, True)
    assert closing(DemoResult(2, "CPU", [one], [])) == "1 of 1 right"


# --- Numbers, and options without effect ---


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("check --calls -3", "--calls"),
        ("check --calls 0", "--calls"),
        ("check --stress --seconds -1", "--seconds"),
        ("fuzz --runs 0", "--runs"),
        ("fuzz --runs -5", "--runs"),
        ("fuzz --workers -1", "--workers"),
        ("fuzz --workers 99999", "--workers"),
        ("fuzz --seconds inf", "asked: inf for an option that is a number"),
        ("check --stress --seconds inf", "asked: inf for an option"),
        ("mutate --most inf", "asked: inf for an option"),
        ("report --seconds inf", "asked: inf for an option"),
        ("bench --smoke --seed -1", "--seed"),
        (f"bench --smoke --random {10**23}", "--random"),
        (f"tune --random {10**6}", "--random"),
        (f"trace --rows {2**31}", "--rows"),
        (f"demo --out {'x' * 300}", "asked: to write into"),
        (f"check --stress --json {'x' * 300}", "asked: to write"),
        ("mutate --sample -1", "--sample"),
        ("mutate --seconds 0", "--seconds"),
        ("bench --smoke --repeats 0", "--repeats"),
        ("bench --smoke --seconds 0", "--seconds"),
        ("trace --depth 0", "--depth"),
        ("trace --rows 1", "--rows 1"),
        ("check --json x --seed 3", "--seed, --json without --stress or --soak"),
        ("check --stress --minutes 3", "--minutes without --soak"),
        ("check --stress --soak", "--stress and --soak"),
        ("check --soak --faults flood --device cpu", "--faults flood"),
        ("bench --smoke --cases zzz", "--smoke with --cases"),
        ("bench --smoke --plot x.txt", "names that end in .png"),
        ("bench --smoke --random -1", "--random"),
        ("bench --random 2 --cases qkv", "asked: a benchmark"),
        ("bench all --smoke --rivals gemm", "all operators with --cases, --rivals"),
        ("bench nothing --random 2", "asked: operator 'nothing'"),
        ("demo --world 9", "remedy: ask for another number of ranks"),
    ],
)
def test_wrong_options_are_refused_before_start(command: str, said: str) -> None:
    assert said in refused(*command.split())


@pytest.mark.parametrize("pattern", ["zzz", "["])
def test_unknown_case_lists_known_names(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileweave.commands.app.default_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "odd-m4084" in refused("bench", "--cases", pattern)


def test_demo_case_rows_match_its_name() -> None:
    for on_gpu in (False, True):
        cases = [
            case for case in samples_of("matmul_all_reduce").demo(on_gpu, 4) if "token" in case.name
        ]
        assert [int(re.findall(r"(\d+) tokens?", case.name)[0]) for case in cases] == [
            case.shape.rows for case in cases
        ]


def test_simulator_options_are_validated() -> None:
    simulator = pytest.importorskip("tileweave.commands.simulate").app
    assert "completion" not in runner.invoke(simulator, ["--help"]).output
    for words, said in (
        (("dlrm", "--nodes", "65537"), "65537 nodes of 8 GPUs"),
        (("dlrm", "--nodes", "1", "--gpus-per-node", "1025"), "1 node of 1025 GPUs"),
        (("train", "--gpus", str(8 * 65537)), "65537 nodes of 8 GPUs"),
    ):
        raised = runner.invoke(simulator, list(words)).exception
        assert isinstance(raised, InputError) and f"{said}; allowed: 1 to 65536 nodes" in str(
            raised
        )


# --- Output paths and packages ---


@pytest.mark.parametrize(
    "command",
    [
        "fuzz --json",
        "mutate --json",
        "check --stress --json",
        "trace --out",
        "demo --out",
        "bench --smoke --json",
    ],
)
def test_output_paths_are_checked_first(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "asked: to write into" in refused(*command.split(), str(tmp_path / "file" / "x"))


def test_output_folders_are_created(tmp_path: Path) -> None:
    assert beforehand.file_for(tmp_path / "a" / "b.json") == tmp_path / "a" / "b.json"
    assert beforehand.folder_for(tmp_path / "c" / "d") == tmp_path / "c" / "d"
    assert (
        (tmp_path / "a").is_dir()
        and (tmp_path / "c" / "d").is_dir()
        and not (tmp_path / "a" / "b.json").exists()
    )
    assert beforehand.file_for(None) is None and beforehand.folder_for(None) is None
    with pytest.raises(InputError, match="a folder; allowed: a file"):
        beforehand.file_for(tmp_path)


@pytest.mark.parametrize(
    ("command", "missing", "said"),
    [
        ("fuzz", "greenlet", "tileweave fuzz needs greenlet: pip install greenlet"),
        ("mutate", "greenlet", "tileweave mutate needs greenlet: pip install greenlet"),
        ("demo", "numpy", "tileweave demo without GPUs needs numpy: pip install numpy"),
        ("check", "triton", "tileweave check needs triton: pip install triton"),
        ("trace", "triton", "tileweave trace needs triton: pip install triton"),
        ("bench --smoke", "numpy", "tileweave bench without GPUs needs numpy: pip install numpy"),
        (
            "bench --smoke --plot x.png",
            "matplotlib",
            "tileweave bench --plot needs matplotlib: pip install matplotlib",
        ),
    ],
)
def test_missing_packages_are_reported_first(
    command: str, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beforehand, "sys", type("sys", (), {"modules": {}}))
    monkeypatch.setattr(beforehand, "find_spec", lambda name: None if name == missing else name)
    assert refused(*command.split()) == said


def test_bad_timeout_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "abc")
    assert "TILEWEAVE_TIMEOUT='abc'" in refused("check", "--device", "cpu")


# --- The axis of the plot ---


@pytest.mark.parametrize(
    ("bounds", "label"),
    [
        ((True, True), "time / co-run bound"),
        ((False, False), "time / matmul"),
        ((True, False), "time / co-run bound (*: matmul)"),
    ],
)
def test_bench_plot_axis_names_its_baseline(bounds: tuple[bool, ...], label: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tileweave.profile.plot import _draw_block

    cases = []
    for number, bound in enumerate(bounds):
        times = {
            name: {"median_us": 10.0} for name in ("tileweave", "gemm", *["co-run bound"] * bound)
        }
        cases.append({"name": f"layer-m{number}", "rows": number, "times": times})
    axes = Figure().subplots()
    _draw_block(axes, "eager", cases)
    assert axes.get_ylabel() == label
    assert [text.get_text().endswith("*") for text in axes.get_xticklabels()] == [
        not bound and label.endswith(")") for bound in bounds
    ]
