"""Measured tables: which config was fastest for which shape. Every field of a table is checked.

No torch, no triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from functools import cache
from importlib import resources
from typing import Any

from tileweave.errors import InputError, require
from tileweave.files import parse_json, short
from tileweave.planning.problem import FUSED_WORLD_SIZES, MatmulConfig

_POWERS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured shape and its fastest config.

    rows, cols, depth : rows of all ranks together, local columns, K.
    us : time in microseconds; None if this shape was not timed itself.
    world_size : number of ranks.
    """

    rows: int
    cols: int
    depth: int
    us: float | None
    config: MatmulConfig
    world_size: int = 4

    def distance(self, rows: int, cols: int, depth: int, world_size: int) -> float:
        """Distance from another shape, in octaves of rows, columns, depth and ranks. Rows matter
        most and count double."""
        sizes = ((cols, self.cols), (depth, self.depth), (world_size, self.world_size))
        return math.hypot(
            2 * math.log2(rows / self.rows), *(math.log2(theirs / own) for theirs, own in sizes)
        )

    def one_row_of_tiles(self, rows: int) -> bool:
        """Whether the Triton kernel of this entry has one row of tiles for ``rows``, too, so that
        it multiplies for as long."""
        return self.config.kernel == "triton" and max(rows, self.rows) <= self.config.tile_m


@cache
def tuned_entries(op: str) -> tuple[Entry, ...]:
    """The measured table of ``op``, from ``planning/tables/``."""
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
    """Read a measured table from JSON ``text`` and check every field. ``where`` names it in errors.

    Raises
    ------
    InputError
        if anything is not as :class:`Entry` and :class:`MatmulConfig` define it.
    """
    data = parse_json(text, f"table {where}", "JSON", "write it again")
    entries: Any = data.get("entries") if isinstance(data, dict) else None
    require(
        isinstance(entries, list) and bool(entries),
        f"table {where} without entries",
        '{"entries": [...]}',
        "write it again",
    )
    return tuple(_entry(raw, f"{where}, entry {number}") for number, raw in enumerate(entries))


def _entry(raw: object, where: str) -> Entry:
    fields = _checked(raw, Entry, where)
    fields["config"] = read_config(fields["config"], where)
    return Entry(**fields)


def read_config(raw: object, where: str) -> MatmulConfig:
    """A config from JSON, every field checked. ``where`` names it in errors."""
    return MatmulConfig(**_checked(raw, MatmulConfig, where))


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
    """``raw`` as arguments of ``kind``, after a check of names, types and ranges of all fields."""
    known = {field.name: field for field in fields_of(kind)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(raw, dict) or not needed <= set(raw) <= set(known):
        given = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise InputError(
            f"asked: {given} in {where}; allowed: {', '.join(known)}; remedy: write the table again"
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
            f"{name} = {short(repr(value), 60)} in {where}",
            "what planning.problem.MatmulConfig and planning.table.Entry define",
            "write the table again",
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
    """The measured entry of ``op`` nearest to a shape, among those whose config ``can_run``.

    ``entries`` replaces the table of ``op``.

    Raises
    ------
    InputError
        if no config of the table can run the shape.
    """
    known = tuned_entries(op) if entries is None else entries
    able = [one for one in known if can_run(one.config)]
    require(
        bool(able),
        f"{op} of {rows} rows, {cols} columns and K = {depth} on {world_size} ranks, by a table of "
        f"{short(', '.join(dict.fromkeys(str(one.config) for one in known)))}",
        "a config that takes so many rows: one shot of a kernel up to tile_m, copy engines at "
        "least tile_m of each rank",
        "name another config, or the shape that was measured with it",
    )
    return min(able, key=lambda one: one.distance(rows, cols, depth, world_size))
