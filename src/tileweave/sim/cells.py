"""Measured cells: each is one time that a bench or a component measurement gave.

Cells are read from results files: of ``tileweave bench --json``, of components (``"components"``: a
list of ``{kind, world_size, ..., us}``), or of sweeps (``"sweeps"``: configs of a kernel and its
rivals, of which tileweave uses the fastest). A new file extends both the fitted and the held-out
cells.

A cell is held out if the SHA-256 of its global shape is even, whatever the errors of the model are.
All quantities of a shape (matmul, unfused, fused, of every operator and file) are on the same side,
so a held-out shape was never seen in any form. The shape of a collective alone is its bytes,
whatever operator it was measured for (:func:`alone`). Pushes alone are inputs of the calibration:
they are always fitted and not part of any error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tileweave.errors import InputError, require
from tileweave.files import read_json, short
from tileweave.planning.candidates import PLANNED
from tileweave.planning.costs import is_aligned
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.stored import read_config
from tileweave.sim.modelled import MODELLED
from tileweave.sim.results import ALLOWED, REMEDY, why_not
from tileweave.sim.tables import Tables, read_tables, with_config

RULE = (
    "held out where SHA-256 of the cell's global shape "
    "('8192x28672x8192', or the message's bytes), as a number, is even"
)
# Names of subjects in bench results -> the quantity that the model predicts.
QUANTITIES = {
    "gemm": "compute",
    "nccl+cublas": "unfused",
    "tileweave": "fused",
    "co-run bound": "bound",
}


def _read(path: Path) -> Any:
    return read_json(path, "results in", "JSON of results", "fix the file, or name another")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured time.

    shape : global M, N, K; or bytes.
    graph : whether calls were replayed from a CUDA graph.
    tables : the tables that it was planned with, or its config; None: not known.
    repeats : the times whose median is ``seconds``, if the file has them.
    runs : number of measurements.
    again : calls were repeated with nothing between. (In benches, rivals take turns.)
    rows : of lookups: rows of a table; 0 where the file does not say.
    """

    source: str
    op: str
    quantity: str
    world_size: int
    shape: tuple[int, ...]
    graph: bool
    seconds: float
    itemsize: int = 2
    tables: Tables | None = None
    repeats: tuple[float, ...] = ()
    runs: int = 1
    again: bool = False
    rows: int = 0

    @property
    def key(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def primitive(self) -> bool:
        """Whether it is a measurement of the links alone: an input of the calibration, always
        fitted and not part of any error."""
        return self.op.startswith("push")

    @property
    def in_domain(self) -> bool:
        """Whether the model covers it. It knows cuBLAS on rows that are no multiples of 16 bytes,
        and not our kernels."""
        if self.quantity != "fused" or len(self.shape) != 3 or self.op == "layer":
            return True
        scatters = self.op != "all_gather_matmul"
        cols, depth = self.shape[1], self.shape[2]
        local = (cols, depth // self.world_size) if scatters else (cols // self.world_size, depth)
        return is_aligned(*local, self.itemsize)

    @property
    def held_out(self) -> bool:
        if self.primitive:
            return False
        return int(hashlib.sha256(self.key.encode()).hexdigest(), 16) % 2 == 0

    def __str__(self) -> str:
        graph = ", graph" if self.graph else ""
        return f"{self.op} {self.quantity}, world {self.world_size}, {self.key}{graph}"


def alone(cell: Cell) -> Cell:
    """A collective alone, with its kind and its bytes instead of the operator that it was measured
    for."""
    if cell.quantity != "comm" or cell.primitive:
        return cell
    shape = cell.shape
    if cell.op == "embedding_bag_all_to_all":
        batch, tables, dim, _, itemsize = shape
        nbytes = batch * tables // cell.world_size * dim * itemsize
    elif cell.op == "grouped_matmul_combine":
        nbytes = shape[0] * shape[4] * shape[1] * cell.itemsize
    elif cell.op in MODELLED:
        nbytes = shape[0] * shape[2 if cell.op == "all_gather_matmul" else 1] * cell.itemsize
    else:
        nbytes = shape[0] if len(shape) == 1 else shape[0] * shape[1] * cell.itemsize
    return replace(
        cell, op=MODELLED[cell.op].collective if cell.op in MODELLED else cell.op, shape=(nbytes,)
    )


def holds_cells(path: Path) -> bool:
    """Whether a results file has measured times, and not interleavings or checked calls."""
    data = _read(path)
    return isinstance(data, dict) and bool({"components", "sweeps", "cases"} & set(data))


def read_cells(paths: Iterable[Path]) -> list[Cell]:
    """All cells of results files, in their order."""
    found: list[Cell] = []
    for path in paths:
        try:
            found += _cells_of(path, _read(path))
        except InputError:
            raise
        except _MALFORMED as error:
            said = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f"asked: {path}: {said[:200]}; allowed: results as the benches write them; "
                "remedy: measure again, or leave the file out"
            ) from None
    return found


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _cells_of(path: Path, data: Any) -> list[Cell]:
    """The cells of the contents of one file."""
    allowed = "a file with `cases`, `components` or `sweeps`"
    said = f"{short(path)}, which is no mapping"
    require(isinstance(data, dict), said, allowed, "check which it is")
    why = why_not(data) if "cases" in data else ""
    require(not why, f"{short(path)}, with {why}", ALLOWED, REMEDY)
    tables = read_tables(path.parent / data["tuned"]) if "tuned" in data else None
    if "components" in data:
        found = [_component(path.name, data, entry) for entry in data["components"]]
    elif "sweeps" in data:
        cases = [(sweep, case) for sweep in data["sweeps"] for case in sweep["cases"]]
        found = [
            cell
            for sweep, case in cases
            for cell in _sweep(path.name, data["world_size"], sweep, case)
        ]
    elif "cases" in data:
        found = [cell for case in data["cases"] for cell in _bench(path.name, data, case)]
    else:
        raise InputError(f"asked: {path}; allowed: {allowed}; remedy: see docs/simulator.md")
    for cell in found:
        asked = f"{cell.op}, {cell.quantity}, {cell.shape} of {cell.world_size} ranks, in us: "
        asked += f"{cell.seconds * 1e6}, graph {cell.graph}, repeats {cell.repeats}"
        require(
            _is_possible(cell),
            f"{short(path)}: {short(asked)}",
            "whole sizes and times above 0, graph true or false",
            "measure again",
        )
    return [replace(cell, tables=cell.tables or tables) for cell in found]


def _is_possible(cell: Cell) -> bool:
    """Whether all fields have values that a measurement can have."""
    sizes = (*cell.shape, cell.world_size, cell.itemsize)
    return (
        all(isinstance(name, str) for name in (cell.op, cell.quantity))
        and all(type(size) is int and 0 < size < 2**63 for size in sizes)
        and all(0.0 < seconds < math.inf for seconds in (cell.seconds, *cell.repeats))
        and isinstance(cell.graph, bool)
        and isinstance(cell.again, bool)
    )


def _times(timing: dict[str, Any]) -> dict[str, Any]:
    """The times of a bench as fields of a cell, in seconds."""
    repeats = tuple(us * 1e-6 for us in timing.get("repeats_us", ()))
    return {"seconds": timing["median_us"] * 1e-6, "repeats": repeats}


def _bench(source: str, data: dict[str, Any], case: dict[str, Any]) -> list[Cell]:
    if not case.get("right", True):
        return []
    if "topk" in case and "plan" in case:
        return _experts(source, data, case)
    if data.get("op") == "embedding_bag_all_to_all":
        return _embedding(source, data, case)
    if "rows" not in case or "depth" not in case:
        return []
    shape = (case["rows"], case["cols"], case["depth"])
    config = config_of_plan(data["op"], case.get("path", ""))
    return [
        Cell(
            source,
            data["op"],
            QUANTITIES[name],
            data["world_size"],
            shape,
            case["graph"],
            **_times(timing),
            tables=with_config(data["op"], config) if config and name == "tileweave" else None,
        )
        for name, timing in case["times"].items()
        if name in QUANTITIES
        and timing.get("median_us")
        and (name != "tileweave" or case.get("path", "fused").startswith("fused"))
    ]


def config_of_plan(op: str, plan: str) -> MatmulConfig | None:
    """The config that the text of a plan names, among the candidates of ``op``. None where it names
    none (plans by tables of before 2026-11-28, whose results name the tables), or the path is
    unfused."""
    head = plan.partition("\n")[0]
    cut, _, reason = head.removeprefix("fused, ").partition(": ")
    chosen = reason.startswith(("predicted", "measured here"))
    if not head.startswith("fused, ") or not chosen or op not in PLANNED:
        return None
    return next((config for config in PLANNED[op].configs if str(config) == cut), None)


_EMBEDDING = {
    "tileweave": "fused",
    "lookup": "own",
    "F.embedding_bag": "compute",
    "torch": "unfused",
    "cat": "concat",
    "a2a": "comm",
}


def _embedding(source: str, data: dict[str, Any], case: dict[str, Any]) -> list[Cell]:
    """Lookups of bags of one size; for bags that differ between tables the file has no size."""
    if case["multi_hot"]:
        return []
    world, itemsize = data["world_size"], 4 if case["dtype"] == "float32" else 2
    shape = (case["batch"], case["tables"] * world, case["dim"], case["pooling"], itemsize)
    return [
        Cell(
            source,
            data["op"],
            _EMBEDDING[name],
            world,
            shape,
            case["graph"],
            **_times(timing),
            itemsize=itemsize,
            rows=case["rows"],
        )
        for name, timing in case["times"].items()
        if name in _EMBEDDING and timing.get("median_us")
    ]


def _experts(source: str, data: dict[str, Any], case: dict[str, Any]) -> list[Cell]:
    """A fused expert operator with random routing. (For skewed routing the file does not say which
    experts are busy.)

    ``prototypes`` of a file are its cases with kernels or configs that no longer exist.
    """
    timing = case["times"].get("tileweave", {})
    if case["zipf"] or not timing.get("median_us") or not case["plan"].startswith("fused"):
        return []
    shape = (case["tokens"], case["hidden"], case["width"], case["experts"], case["topk"])
    quantity = "prototype" if case["name"] in data.get("prototypes", ()) else "fused"
    world, graph = data["world_size"], case["graph"]
    return [Cell(source, data["op"], quantity, world, shape, graph, **_times(timing))]


def _sweep(source: str, world_size: int, sweep: dict[str, Any], case: dict[str, Any]) -> list[Cell]:
    """Configs of one kernel and its rivals: tileweave uses the fastest of its own."""
    peers = {"gemm": "compute", "nccl": "unfused", "corun": "bound"}
    times = {peers[name]: us for name, us in case["us"].items() if name in peers}
    own = [us for name, us in case["us"].items() if name not in (*peers, *sweep["others"])]
    shape = (case["M"], case["N"], case["K"])
    return [
        Cell(source, sweep["op"], quantity, world_size, shape, sweep["graph"], us * 1e-6)
        for quantity, us in {**times, "fused": min(own)}.items()
    ]


def _component(source: str, data: dict[str, Any], entry: dict[str, Any]) -> Cell:
    """A measurement of a component; ``config`` is the one measured, if it is known."""
    if "config" in entry:
        config = read_config(entry["config"], source)
        entry = {**entry, "tables": with_config(entry["op"], config)}
    return Cell(
        source,
        entry["op"],
        entry["quantity"],
        entry.get("world_size", data["machine"]["world_size"]),
        tuple(entry["shape"]),
        entry.get("graph", False),
        entry["us"] * 1e-6,
        entry.get("itemsize", 2),
        entry.get("tables"),
        again=data.get("again", False),
    )
