"""Tables of configs that measured runs used: the nearest entry of a table is the config of a shape.

Until 2026-11-27 tileweave planned by such tables, and runs of then name the one that they planned
with. Every field of a table is checked.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tileweave.errors import require
from tileweave.files import parse_json, read_json, short
from tileweave.planning.candidates import takes_rows
from tileweave.planning.problem import FUSED_WORLD_SIZES, MatmulConfig, Problem
from tileweave.planning.stored import checked_fields, read_config


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


Table = tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The table of each operator that a run planned with."""

    entries: dict[str, Table]

    def of(self, op: str) -> Table:
        return self.entries[op]


def with_config(op: str, config: MatmulConfig) -> Tables:
    """A table that has nothing but one config, which every shape then gets."""
    return Tables({op: (Entry(1, 1, 1, None, config),)})


@cache
def read_tables(path: Path) -> Tables:
    """The tables in the folder of the results that were measured with them."""
    allowed = "a file of tables in the folder of the results"
    data = read_json(path, "tables", allowed, "keep it with them")
    named = isinstance(data, dict) and isinstance(data.get("tables"), dict)
    require(named, f"tables {short(path)} without `tables`", allowed, "keep it with them")
    return Tables(
        {
            op: read_entries(json.dumps(table), f"{path.name}, {op}")
            for op, table in data["tables"].items()
        }
    )


def read_entries(text: str, where: str) -> Table:
    """Read a table from JSON ``text`` and check every field. ``where`` names it in errors.

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
    fields = checked_fields(raw, Entry, where, _may_be)
    fields["config"] = read_config(fields["config"], where)
    return Entry(**fields)


def _may_be(name: str, value: Any) -> bool:
    if name == "us":
        return value is None or (type(value) in (int, float) and 0 < value < math.inf)
    if name == "world_size":
        return type(value) is int and value in FUSED_WORLD_SIZES
    return name == "config" or (type(value) is int and 0 < value < 2**31)


def nearest(op: str, p: Problem, known: Table) -> Entry:
    """The entry of a table of ``op`` that is nearest to a problem, among those whose config can run
    it.

    Raises
    ------
    InputError
        if no config of the table can run the problem.
    """

    def can_run(config: MatmulConfig) -> bool:
        # two shots that kernels push themselves: in tables of measurements of an earlier version
        earlier = op == "matmul_all_reduce" and config.shots == 2 and config.transport == "sm"
        return earlier or takes_rows(op, config, p.rows, p.world_size)

    rows = p.rows if op == "matmul_all_reduce" else p.rows * p.world_size
    able = [one for one in known if can_run(one.config)]
    require(
        bool(able),
        f"{op} of {rows} rows, {p.cols} columns and K = {p.depth} on {p.world_size} ranks, by a "
        f"table of {short(', '.join(dict.fromkeys(str(one.config) for one in known)))}",
        "a config that takes so many rows: one shot of a kernel up to tile_m, copy engines at "
        "least tile_m of each rank",
        "name another config, or the shape that was measured with it",
    )
    return min(able, key=lambda one: one.distance(rows, p.cols, p.depth, p.world_size))
