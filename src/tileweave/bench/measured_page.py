"""docs/measured.md: all cells of the benches in docs/results as Markdown, losses in bold.

A test compares the page with the results.

python -m tileweave.bench.measured_page docs/results > docs/measured.md

python -m tileweave.bench.measured_page docs/results --machine 2xH100 > docs/measured-2xH100.md

``--summary PATTERN`` writes a line for each operator and block instead, of all reports whose names
fit, as docs/performance.md has it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tileweave as tw
from tileweave.bench.report import BLOCKS
from tileweave.bench.samples import samples_of
from tileweave.errors import InputError, require
from tileweave.files import short
from tileweave.launcher import end_with
from tileweave.profile.metrics import geometric_mean
from tileweave.sim.results import ALLOWED, REMEDY, read_report

MACHINE = "4xH200"
RATIOS = {
    "limit_ratio": "of the bound",
    "over_unfused": "over unfused",
    "over_gathered": "over gathered",
    "over_torch": "over torch",
    "over_no_order": "over no order",
    "over_gemm_us": "above the matmul, us",
}
TITLES = {**BLOCKS, "prefill": "prefill, eager", "decode": "decode, in a CUDA graph"}
HEAD = """# Measured

{machine} of one host, NVLink, multicast off, bf16,
torch {torch}, triton {triton}, NCCL {nccl}, {date};
microseconds, slowest rank, median of {repeats} repeats, all rivals of a case interleaved; every
repeat: [results](results). A case is of the last run that had it, with all of its rivals.
M, N, K are global. `of the bound`: the time of a bare matmul that runs concurrently with copies of
the same size, over ours. `unfused`: NCCL and cuBLAS (`torch._grouped_mm` with both permutes for
experts; `no order`: without them, which is faster and gives no right result; `gathered`, where it
was measured: tokens all-gathered, sums reduce-scattered, instead of all-to-alls of choices). Bold:
slower than a rival by half a percent or more.
Written by `python -m tileweave.bench.measured_page docs/results{option}`.
"""
SUMMED = {
    "over_unfused": "over NCCL + cuBLAS",
    "over_best": "over the best rival",
    "limit_ratio": "of the bound",
}
Report = dict[str, Any]
_PATTERN = "a pattern of names such as 'quick-*-4xH200-2026-11-26.json'"
_PLACE = ("devices", "device", "torch", "triton", "nccl", "date")


def markdown(folder: Path, machine: str = MACHINE) -> str:
    """The whole page of one ``machine``, named as in the names of results.

    Raises
    ------
    InputError
        The folder has nothing to show.
    """
    used: dict[str, Report] = {}
    lines = [
        line
        for op in tw.OPERATORS
        if samples_of(op).measured
        for line in _operator(op, folder, machine, used)
    ]
    allowed = (
        "a folder with what `tileweave bench --json` wrote, as "
        f"OPERATOR-{machine}-DATE.json, with all cases of a block"
    )
    require(bool(used), f"a page on {folder}", allowed, "pass docs/results")
    return "\n".join([_head(used.values(), machine), *lines])


def summary(folder: Path, pattern: str) -> str:
    """A line for each operator and block of cases of the reports whose names fit ``pattern``: the
    geometric mean, and in brackets the worst case. A case is of the last report that has it.

    Raises
    ------
    InputError
        No report fits.
    """
    paths = _found(folder, pattern)
    require(bool(paths), f"reports {pattern} in {folder}", _PATTERN, "pass another pattern")
    found: dict[str, dict[str, Report]] = {}
    for path in paths:
        report = read_report(path)
        if "op" in report:  # not of an example
            _require_all(report, path)
            name = path.relative_to(folder).as_posix()
            found.setdefault(report["op"], {})[name] = report
    lines = [
        f"| operator | cases | {' | '.join(SUMMED.values())} |",
        "|" + "---|" * (2 + len(SUMMED)),
    ]
    for op in (name for name in tw.OPERATORS if name in found):
        for block, title in TITLES.items():
            cases = [case for _, case in _last_cases(found[op], block).values()]
            wrong = "" if all(case["right"] for case in cases) else " **WRONG**"
            if cases:
                figures = " | ".join(_mean_and_worst(name, cases) for name in SUMMED)
                lines.append(f"| `{op}`, {title}{wrong} | {len(cases)} | {figures} |")
    return "\n".join([*lines, ""])


def _found(folder: Path, pattern: str) -> list[Path]:
    """The files in ``folder`` whose names fit ``pattern``."""
    try:
        return sorted(path for path in folder.rglob(pattern) if path.is_file())
    except (OSError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"asked: reports {short(pattern)} in {short(folder)} ({short(error)}); "
            f"allowed: {_PATTERN}; remedy: pass another pattern or folder"
        ) from None


def _require_all(
    report: Report, path: Path, of_case: Sequence[str] = (), of_timing: Sequence[str] = ()
) -> None:
    """Refuse a report without what the page shows of all."""
    cases = report.get("cases", [{}])
    timings = [timing for case in cases for timing in case.get("times", {}).values()]
    needed = (
        ("environment.", [report.get("environment", {})], _PLACE if of_case else ("date",)),
        ("", cases, ("block", "name", "right", *of_case)),
        ("", timings, of_timing),
    )
    missing = [
        f"{at}{name}"
        for at, several, names in needed
        for name in names
        if any(each.get(name) is None for each in several)
    ]
    said = f"results in {short(path)} without {', '.join(missing)}"
    require(not missing, said, ALLOWED, REMEDY)


def _mean_and_worst(name: str, cases: list[dict[str, Any]]) -> str:
    values = [value for case in cases if (value := _value(case.get(name))) is not None]
    return f"{_ratio(name, geometric_mean(values))} ({_ratio(name, min(values))})" if values else ""


def _head(reports: Iterable[Report], machine: str) -> str:
    """The head of the page: where and with what versions its runs were made, all of them."""
    places = [report["environment"] for report in reports]
    repeats = {
        len(timing["repeats_us"])
        for report in reports
        for case in report["cases"]
        for timing in case["times"].values()
    }
    said = {
        "machine": _and(f"{place['devices']} {place['device']}" for place in places),
        # the rest is the CUDA version of the build
        "torch": _and(place["torch"].split("+")[0] for place in places),
        "date": _and(place["date"][:10] for place in places),
        "repeats": _and(map(str, repeats)),
        "option": "" if machine == MACHINE else f" --machine {machine}",
        **{name: _and(str(place[name]) for place in places) for name in ("triton", "nccl")},
    }
    return HEAD.format(**said)


def _and(values: Iterable[str]) -> str:
    return " and ".join(sorted(set(values)))


def _operator(op: str, folder: Path, machine: str, used: dict[str, Report]) -> Iterator[str]:
    """The tables of ``op``; the reports that they show are added to ``used``, by name."""
    yield f"## {op}\n"
    for block, reports, cases in runs_of(op, folder, machine):
        title = TITLES[block]
        shown = f"{title[0].upper()}{title[1:]}"
        if reports:
            used.update(reports)
            runs = ", ".join(f"[run](results/{name})" for name in reports)
            yield f"{shown} ({runs}):\n"
            yield from _table(cases)
            yield ""
        else:
            wanted = sum(case.block == block for case in samples_of(op).cases)
            yield f"{shown}: no run had all of its {wanted} cases.\n"


def runs_of(
    op: str, folder: Path, machine: str
) -> Iterator[tuple[str, dict[str, Report], list[dict[str, Any]]]]:
    """For each block of cases that some run has: the block, the runs by name, the last one first,
    and each case of the last run that had it. Both are empty if no run had one of the cases."""
    paths = _found(folder, f"{op}-{machine}-*.json")
    reports = {path.relative_to(folder).as_posix(): read_report(path) for path in paths}
    for name, report in reports.items():
        _require_all(report, folder / name, ("times",), ("repeats_us",))
    for block in TITLES:
        found = _last_cases(reports, block)
        wanted = [case.name for case in samples_of(op).cases if case.block == block]
        if found and found.keys() >= set(wanted):
            named = [found[case] for case in wanted]
            names = dict.fromkeys(name for name, _ in named)
            yield block, {name: reports[name] for name in names}, [case for _, case in named]
        elif found:
            yield block, {}, []


def _last_cases(reports: Mapping[str, Report], block: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The cases of ``block`` by name: of the last report that has each, with the report's name.
    Of reports of one second the last by name counts, of a case that a report has twice the last."""

    def turn(name: str) -> tuple[str, str]:
        return reports[name]["environment"]["date"], name.removesuffix(".json")

    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in sorted(reports, key=turn, reverse=True):
        for case in reversed(reports[name]["cases"]):
            if case["block"] == block:
                found.setdefault(case["name"], (name, case))
    return found


def _table(cases: list[dict[str, Any]]) -> Iterator[str]:
    subjects = list(dict.fromkeys(name for case in cases for name in case["times"]))
    ratios = [name for name in RATIOS if any(_value(case.get(name)) is not None for case in cases)]
    sized = all({"rows", "cols", "depth"} <= set(case) for case in cases)
    heads = ["case", *(["M, N, K"] if sized else []), *subjects, *(RATIOS[name] for name in ratios)]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for case in cases:
        verdict = "" if case["right"] else " **WRONG**"
        cells = [
            case["name"] + verdict,
            *([f"{case['rows']}, {case['cols']}, {case['depth']}"] if sized else []),
        ]
        cells += [_microseconds(case["times"].get(name, {}).get("median_us")) for name in subjects]
        yield f"| {' | '.join([*cells, *(_ratio(name, case.get(name)) for name in ratios)])} |"
    blank = [""] * (len(heads) - len(ratios) - 1)
    for what, of in (("geometric mean", geometric_mean), ("worst", min)):
        found = [
            [v for case in cases if (v := _value(case.get(name))) is not None] for name in ratios
        ]
        figures = [
            _summary(name, what, of, values) for name, values in zip(ratios, found, strict=True)
        ]
        yield f"| {' | '.join([what, *blank, *figures])} |"


def _summary(name: str, what: str, of: Any, values: list[float]) -> str:
    if name == "over_gemm_us":
        return (
            f"{max(values):.1f}" if what == "worst" else f"{sum(values) / len(values):.1f} (mean)"
        )
    return f"{of(values):.3f}" if what == "geometric mean" else _ratio(name, of(values))


def _value(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _microseconds(value: Any) -> str:
    found = _value(value)
    return "" if found is None else f"{found:.1f}" if found < 100 else f"{found:.0f}"


def _ratio(name: str, value: Any) -> str:
    found = _value(value)
    if found is None:
        return ""
    if name == "over_gemm_us":
        return f"{found:.1f}"
    # as HEAD says of bold numbers: below this, two digits show less than 1.00
    lost = name.startswith("over") and found < 0.995
    return f"**{found:.2f}**" if lost else f"{found:.2f}"


def main() -> None:
    """Entry point of ``python -m tileweave.bench.measured_page``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="docs/results")
    parser.add_argument(
        "--machine", default=MACHINE, help=f"as names of results have it; default: {MACHINE}"
    )
    parser.add_argument("--summary", metavar="PATTERN", help="sum up the reports of these names")
    given = parser.parse_args()
    if given.summary:
        sys.stdout.write(summary(given.folder, given.summary))
    else:
        sys.stdout.write(markdown(given.folder, given.machine))


if __name__ == "__main__":
    end_with(main)
