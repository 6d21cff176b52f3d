"""Measured cells that are part of the package, one file per device: what ``tileweave simulate
trust`` judges by default.

A file is an extract of results files: each cell that :func:`cells.read_cells` finds in them, with
its repeats, and the tables that the run planned with. Benches keep much more, and measurements that
newer ones replace are not kept as files. To add or replace the runs of results files:

    python -m tileweave.sim.packaged h200 docs/results/NEW.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tileweave.errors import TileweaveError, require
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.stored import read_config
from tileweave.sim.cells import Cell, read_cells
from tileweave.sim.tables import Tables, read_entries, read_tables, with_config

_FOLDER = resources.files("tileweave.sim") / "data" / "cells"
_COMMA = ",\n"
_DEFAULTS = {"itemsize": 2, "again": False, "rows": 0, "repeats_us": [], "config": None}


def devices() -> list[str]:
    """Devices that have a file of measured cells."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir())


def packaged_cells(device: str) -> list[Cell]:
    """All cells measured on ``device``, by the name of their results file, then in its order.

    Raises
    ------
    InputError for a device without a file.
    """
    allowed = f"cells of {' or '.join(devices())}"
    require(
        device in devices(), f"measured cells of {device}", allowed, "pass --cells FILE or FOLDER"
    )
    data = json.loads((_FOLDER / f"{device}.json").read_text("utf-8"))
    tables = {
        name: Tables(
            {op: read_entries(json.dumps(table), f"{name}, {op}") for op, table in found.items()}
        )
        for name, found in data["tables"].items()
    }
    return [
        _cell(run["source"], entry, tables.get(run["tables"]))
        for run in data["runs"]
        for entry in run["cells"]
    ]


def _cell(source: str, entry: dict[str, Any], tables: Tables | None) -> Cell:
    entry = _DEFAULTS | entry
    if entry["config"]:
        tables = _table_of(entry["op"], json.dumps(entry["config"]))
    return Cell(
        source,
        entry["op"],
        entry["quantity"],
        entry["world"],
        tuple(entry["shape"]),
        entry["graph"],
        entry["us"] * 1e-6,
        entry["itemsize"],
        tables,
        tuple(us * 1e-6 for us in entry["repeats_us"]),
        again=entry["again"],
        rows=entry["rows"],
    )


@cache
def _table_of(op: str, config: str) -> Tables:
    """A table that has nothing but the configuration of one cell."""
    return with_config(op, read_config(json.loads(config), op))


def extract(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run of one results file, and the tables that it names, as a package file has both."""
    cells = read_cells([path])  # which checks the file, and the one that it names
    named = json.loads(path.read_text("utf-8")).get("tuned")
    file = path.parent / named if named else None
    planned_with = read_tables(file) if file else None
    entries = [_entry(cell, planned_with) for cell in cells]
    run = {"source": path.name, "tables": file and file.name, "cells": entries}
    if file is None:
        return run, {}
    return run, {file.name: json.loads(file.read_text("utf-8"))["tables"]}


def _entry(cell: Cell, planned_with: Tables | None) -> dict[str, Any]:
    """Microseconds to eight digits, repeats to six: they say whether a time is steady."""
    # one configuration, see ``cells._component``
    own = cell.tables and cell.tables is not planned_with
    entry = {
        "op": cell.op,
        "quantity": cell.quantity,
        "world": cell.world_size,
        "shape": list(cell.shape),
        "graph": cell.graph,
        "us": float(f"{cell.seconds * 1e6:.8g}"),
        "itemsize": cell.itemsize,
        "repeats_us": [float(f"{seconds * 1e6:.6g}") for seconds in cell.repeats],
        "again": cell.again,
        "rows": cell.rows,
        "config": _short(cell.tables.of(cell.op)[0].config) if cell.tables and own else None,
    }
    return {
        name: value
        for name, value in entry.items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }


def _short(config: MatmulConfig) -> dict[str, Any]:
    """Without the fields that have their default."""
    return {
        field.name: value
        for field in fields(config)
        if (value := getattr(config, field.name)) != field.default
    }


def write(file: Path, results: Iterable[Path]) -> None:
    """Adds the runs of ``results`` to a package file, or replaces those of the same name. One line
    per cell."""
    data = json.loads(file.read_text("utf-8")) if file.is_file() else {"tables": {}, "runs": []}
    runs, tables = {run["source"]: run for run in data["runs"]}, data["tables"]
    for path in results:
        run, named = extract(path)
        tables |= named
        if run["cells"]:
            runs[run["source"]] = run
    listed = [runs[source] for source in sorted(runs)]
    used = {run["tables"] for run in listed}
    head = json.dumps(
        {name: tables[name] for name in sorted(tables) if name in used}, separators=(",", ":")
    )
    texts = [_run_text(run) for run in listed]
    file.write_text(f'{{"tables":{head},\n"runs":[\n{_COMMA.join(texts)}\n]}}\n', "utf-8")


def _run_text(run: dict[str, Any]) -> str:
    source, tables = json.dumps(run["source"]), json.dumps(run["tables"])
    cells = _COMMA.join(json.dumps(cell, separators=(",", ":")) for cell in run["cells"])
    return f'{{"source":{source},"tables":{tables},"cells":[\n{cells}]}}'


def main() -> None:
    """Entry point of ``python -m tileweave.sim.packaged``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("device", help="the one that was measured, for example h200")
    parser.add_argument("results", type=Path, nargs="+", help="results files with cells")
    given = parser.parse_args()
    write(Path(str(_FOLDER)) / f"{given.device}.json", given.results)


if __name__ == "__main__":
    try:
        main()
    except TileweaveError as error:  # as launcher.end_with, which needs torch
        raise SystemExit(f"error: {error}") from None
