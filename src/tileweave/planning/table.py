"""Measured tables: which config was fastest for which shape. They are data and are checked as
such.

No torch, no triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from functools import cache
from importlib import resources
from typing import Any

from tileweave.errors import InputError, require
from tileweave.planning.problem import FUSED_WORLD_SIZES, MatmulConfig

_POWERS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured shape: ``rows`` of all ranks, local ``cols``, ``depth``, in a world of
    ``world_size``; ``us`` is None where it was not timed itself."""

    rows: int
    cols: int
    depth: int
    us: float | None
    config: MatmulConfig
    world_size: int = 4

    def distance(self, rows: int, cols: int, depth: int, world_size: int) -> float:
        """How far this shape is from another: octaves of rows, columns, depth, ranks. Rows decide
        most: they count double."""
        sizes = ((cols, self.cols), (depth, self.depth), (world_size, self.world_size))
        return math.hypot(
            2 * math.log2(rows / self.rows), *(math.log2(there / here) for there, here in sizes)
        )


@cache
def tuned_entries(op: str) -> tuple[Entry, ...]:
    """The measured table of ``op``, a file of ``planning/tables/``."""
    require(
        op.isidentifier(),
        f"the table of {op!r}",
        "the name of an operator",
        "pass one of tileweave.OPERATORS",
    )
    return read_entries(
        (resources.files("tileweave") / "planning" / "tables" / f"{op}.json").read_text("utf-8"),
        f"tables/{op}.json",
    )


def read_entries(text: str, where: str) -> tuple[Entry, ...]:
    """A measured table from JSON ``text``: data, checked field by field, whoever wrote it.
    ``where``: for messages.

    Raises
    ------
    InputError for anything that is not what :class:`Entry` and :class:`MatmulConfig` say.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"asked: table {where}, which is no JSON ({error}); allowed: JSON; remedy: write it anew"
        ) from None
    entries: Any = data.get("entries") if isinstance(data, dict) else None
    require(
        isinstance(entries, list) and bool(entries),
        f"table {where} without entries",
        '{"entries": [...]}',
        "write it anew",
    )
    return tuple(_entry(raw, f"{where}, entry {number}") for number, raw in enumerate(entries))


def _entry(raw: object, where: str) -> Entry:
    fields = _checked(raw, Entry, where)
    fields["config"] = MatmulConfig(**_checked(fields["config"], MatmulConfig, where))
    return Entry(**fields)


_ALLOWED = {
    "kernel": ("triton", "hopper", "library"),
    "transport": ("copy_engine", "sm"),
    "tile_m": _POWERS,
    "tile_n": _POWERS,
    "tile_k": _POWERS,
    "num_stages": range(1, 17),
    "num_warps": (1, 2, 4, 8, 16),
    "group_m": range(1, 1025),
    "num_slices": (1, 2, 4, 8, 16, 32),
    "num_producers": range(1, 1025),
    "band_sources": range(1, 9),
    "team": range(1, 1025),
    "shots": (1, 2),
}
_SIZES = ("rows", "cols", "depth")


def _checked(raw: object, kind: type, where: str) -> dict[str, Any]:
    """``raw`` as arguments of ``kind``: no unknown field, none missing, each of the type and range
    it must have."""
    known = {field.name: field for field in fields_of(kind)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(raw, dict) or not needed <= set(raw) <= set(known):
        given = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise InputError(
            f"asked: {given} in {where}; allowed: {', '.join(known)}; remedy: write the table anew"
        )
    for name, value in raw.items():
        if name in _ALLOWED:
            good = type(value) in (int, str) and value in _ALLOWED[name]
        elif name in _SIZES:
            good = type(value) is int and 0 < value < 2**31
        elif name == "world_size":
            good = type(value) is int and value in FUSED_WORLD_SIZES
        elif name == "us":
            good = value is None or (type(value) in (int, float) and 0 < value < math.inf)
        else:
            good = name == "config" or type(value) is bool
        require(
            good,
            f"{name} = {value!r} in {where}",
            "what config.MatmulConfig and config.Entry say",
            "write the table anew",
        )
    return dict(raw)


def nearest(
    op: str,
    world_size: int,
    rows: int,
    cols: int,
    depth: int,
    can_run: Callable[[MatmulConfig], bool] = lambda _: True,
    entries: tuple[Entry, ...] | None = None,
) -> Entry:
    """The measured entry of ``op`` nearest to a shape, of those whose configuration ``can_run``.
    ``entries``: another table."""
    known = tuned_entries(op) if entries is None else entries
    return min(
        (e for e in known if can_run(e.config)),
        key=lambda e: e.distance(rows, cols, depth, world_size),
    )
