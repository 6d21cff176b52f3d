"""docs/measured.md: every cell of the benches in docs/results as Markdown, losing ones in bold. A test holds it to them.

python -m tileweave.bench.measured docs/results > docs/measured.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tileweave.bench.report import BLOCKS
from tileweave.profile.metrics import geometric_mean

MACHINE = "4xH200"
OPERATORS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "all_to_all_matmul",
    "dispatch_grouped_matmul", "grouped_matmul_combine",
)  # fmt: skip
RATIOS = {
    "limit_ratio": "limit ratio", "over_unfused": "over unfused", "over_torch": "over torch", "over_no_order": "over no order",
    "over_gemm_us": "above the matmul, us",
}  # fmt: skip
TITLES = {**BLOCKS, "prefill": "prefill, eager", "decode": "decode, in a CUDA graph"}
HEAD = """# Measured

Four NVIDIA H200 of one host, NVLink, multicast off, bf16, torch 2.11.0, triton 3.6.0, NCCL 2.28.9, 2026-11-21 and 22;
microseconds, slowest rank, median of 7 repeats, all peers of a case interleaved; every repeat: [results](results). A table is
one run, the last one that had all of its cases. M, N, K are global.
`limit ratio`: a bare matmul beside copies of the same size, over ours. `unfused`: NCCL and cuBLAS (`torch._grouped_mm` with
both permutes for experts; `no order`: without them, which is faster and gives no right result). Bold: slower than a rival.
Written by `python -m tileweave.bench.measured docs/results`.
"""


def markdown(folder: Path) -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for op in OPERATORS for line in _operator(op, folder))])


def _operator(op: str, folder: Path) -> Iterator[str]:
    reports = {path.name: json.loads(path.read_text("utf-8")) for path in folder.glob(f"{op}-{MACHINE}-*.json")}
    in_turn = sorted(reports, key=lambda name: reports[name]["environment"]["date"], reverse=True)
    yield f"## {op}\n"
    for block, title in TITLES.items():
        for name in in_turn:  # the last run that had the block
            cases = [case for case in reports[name]["cases"] if case["block"] == block]
            if cases:
                yield f"{title[0].upper()}{title[1:]} ([run](results/{name})):\n"
                yield from _table(cases)
                yield ""
                break


def _table(cases: list[dict[str, Any]]) -> Iterator[str]:
    subjects = list(dict.fromkeys(name for case in cases for name in case["times"]))
    ratios = [name for name in RATIOS if any(_value(case.get(name)) is not None for case in cases)]
    sized = "rows" in cases[0]
    heads = ["case", *(["M, N, K"] if sized else []), *subjects, *(RATIOS[name] for name in ratios)]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for case in cases:
        cells = [case["name"], *([f"{case['rows']}, {case['cols']}, {case['depth']}"] if sized else [])]
        cells += [_microseconds(case["times"].get(name, {}).get("median_us")) for name in subjects]
        yield f"| {' | '.join([*cells, *(_ratio(name, case.get(name)) for name in ratios)])} |"
    blank = [""] * (len(heads) - len(ratios) - 1)
    for what, of in (("geometric mean", geometric_mean), ("worst", min)):
        found = [[v for case in cases if (v := _value(case.get(name))) is not None] for name in ratios]
        figures = [_summary(name, what, of, values) for name, values in zip(ratios, found, strict=True)]
        yield f"| {' | '.join([what, *blank, *figures])} |"


def _summary(name: str, what: str, of: Any, values: list[float]) -> str:
    if name == "over_gemm_us":
        return f"{max(values):.1f}" if what == "worst" else f"{sum(values) / len(values):.1f} (mean)"
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
    lost = name.startswith("over") and found < 0.995
    return f"**{found:.2f}**" if lost else f"{found:.2f}"


if __name__ == "__main__":
    sys.stdout.write(markdown(Path(sys.argv[1])))
