"""The form of what ``tileweave bench --json`` writes, for all that read such files.

Fields that are missing are the readers' to name, since each needs others. Those that are there have
the kind that a bench writes; fields of names that are not listed may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tileweave.errors import require
from tileweave.files import read_json, short

ALLOWED = "JSON as `tileweave bench --json` writes it"
REMEDY = "measure again, or name another file"
_Kind = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _is_number(value: Any) -> bool:
    """Results have null in place of what no number is."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_time(value: Any) -> bool:
    return value is None or (_is_number(value) and value >= 0)


_ENVIRONMENT = ("device", "date", "torch", "triton", "nccl", "cuda", "commit", "tileweave")
_TEXTS = ("op", "name", "block", "plan", "path", "scales", "device_type", "note")
_FLAGS = ("right", "graph", "multi_hot", "again")
_SIZES = ("rows", "cols", "depth", "batch", "tables", "dim", "pooling", "tokens", "hidden", "width")
_SIZES += ("experts", "topk", "world_size")
_NUMBERS = ("limit_ratio", "over_unfused", "over_best", "over_torch", "over_gathered")
_NUMBERS += ("over_no_order", "over_gemm_us", "e_overlap", "error", "host_us")
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(_TEXTS, _is_text),
    **dict.fromkeys(_FLAGS, _is_flag),
    **dict.fromkeys(_SIZES, _is_size),
    **dict.fromkeys(_NUMBERS, _is_number),
    "dtype": lambda value: value in ("bfloat16", "float16", "float32"),
    "zipf": lambda value: _is_flag(value) or _is_time(value),  # at first only whether
    "median_us": _is_time,
    "repeats_us": lambda value: isinstance(value, list) and all(map(_is_time, value)),
    "environment": lambda value: isinstance(value, dict),
    "cases": lambda value: isinstance(value, list),
    "times": lambda value: isinstance(value, dict),
}


def read_report(path: Path) -> dict[str, Any]:
    """The report in a file. Raises :class:`InputError` if it has none."""
    found = read_json(path, "results in", ALLOWED, REMEDY)
    why = why_not(found)
    require(not why, f"results in {short(path)}, with {why}", ALLOWED, REMEDY)
    return found


def why_not(report: Any) -> str:
    """Which part of ``report`` has not the form of a bench's; "" if all have."""
    if not isinstance(report, dict):
        return f"{short(repr(report), 60)} in place of a mapping"
    return next(_wrong(report), "")


def _wrong(report: dict[str, Any]) -> Iterator[str]:
    yield from _fields(report, "")
    yield from _fields(report.get("environment", {}), "environment.", _TEXT_OR_NONE)
    for number, case in enumerate(report.get("cases", [])):
        at = f"cases.{number}"
        if not isinstance(case, dict):
            yield f"{at} = {short(repr(case), 60)}"
            return
        yield from _fields(case, f"{at}.")
        for name, timing in case.get("times", {}).items():
            where = f"{at}.times.{short(name, 60)}"
            if not isinstance(timing, dict):
                yield f"{where} = {short(repr(timing), 60)}"
                return
            yield from _fields(timing, f"{where}.")


_TEXT_OR_NONE: dict[str, _Kind] = dict.fromkeys(
    _ENVIRONMENT, lambda value: value is None or isinstance(value, str)
)


def _fields(
    given: Mapping[str, Any], at: str, kinds: Mapping[str, _Kind] = _KINDS
) -> Iterator[str]:
    for name, is_right in kinds.items():
        if name in given and not is_right(given[name]):
            yield f"{at}{name} = {short(repr(given[name]), 60)}"
