"""Measured times of all candidates of a problem, and the files that keep them.

The files of this package are in ``planning/measured/``; a tuner writes more of the same form.
Every field is checked. No torch, no triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from tileweave.errors import require
from tileweave.files import parse_json
from tileweave.planning.costs import DEVICES
from tileweave.planning.problem import FUSED_WORLD_SIZES, SCALES, MatmulConfig, Problem
from tileweave.planning.stored import read_config

_REMEDY = "measure again: tileweave tune"
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
_SHAPE = ("world_size", "rows", "cols", "depth", "dtype", "us")
# of FP8 operands; of ranks on several nodes; of times of a device other than the one that plans
_SOMETIMES = {"scales", "nodes", "device"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of one problem.

    op : the operator.
    problem : its sizes, as the operator's planner counts them.
    us : candidate -> microseconds of a call in a CUDA graph; None is the unfused path.
    device : a name in ``planning.costs``, as "H200", of the device that was measured; "": the one
        that plans.
    """

    op: str
    problem: Problem
    us: Mapping[MatmulConfig | None, float]
    device: str = ""

    def fastest(self) -> MatmulConfig | None:
        """The fastest candidate; the unfused path if it is as fast."""
        return min(self.us, key=lambda config: (self.us[config], config is not None))


@cache
def packaged(op: str) -> tuple[Measurement, ...]:
    """What was measured of ``op`` for this package: on two H100, two H200, of a few shapes on four
    H200, and with FP8 operands on two H200."""
    found = resources.files("tileweave.planning") / "measured" / f"{op}.json"
    if not found.is_file():
        return ()
    return read_measurements(found.read_text("utf-8"), f"measured/{op}.json")


def read_measurements(text: str, where: str) -> tuple[Measurement, ...]:
    """Read measurements from JSON ``text`` and check every field. ``where`` names it in errors.

    Raises
    ------
    InputError
        if anything is not as :func:`write_measurements` writes it.
    """
    data = parse_json(text, f"measurements {where}", "JSON", _REMEDY)
    known = isinstance(data, dict) and {"op", "configs", "shapes"} <= set(data)
    lists = known and isinstance(data["configs"], list) and isinstance(data["shapes"], list)
    require(
        lists and isinstance(data["op"], str),
        f"measurements {where}",
        '{"op": ..., "configs": [...], "shapes": [...]}',
        _REMEDY,
    )
    configs: list[MatmulConfig | None] = [None]
    configs += [
        read_config(raw, f"{where}, config {number}") for number, raw in enumerate(data["configs"])
    ]
    return tuple(
        _measurement(data["op"], raw, configs, f"{where}, shape {number}")
        for number, raw in enumerate(data["shapes"])
    )


def _measurement(op: str, raw: Any, configs: list[MatmulConfig | None], where: str) -> Measurement:
    good = (
        isinstance(raw, dict)
        and set(raw) - _SOMETIMES == set(_SHAPE)
        and raw.get("scales", "") in ("", *SCALES)
        and ("scales" in raw) == (raw["dtype"] == "float8_e4m3fn")
        and all(type(raw[name]) is int and 0 < raw[name] < 2**31 for name in _SHAPE[:4])
        and raw["world_size"] in FUSED_WORLD_SIZES
        and raw.get("device", "") in ("", *DEVICES)
        and _may_be_nodes(raw.get("nodes"), raw["world_size"])
        and isinstance(raw["dtype"], str)
        and raw["dtype"] in _ITEMSIZE
        and isinstance(raw["us"], list)
        and len(raw["us"]) == len(configs)
        and all(us is None or (type(us) in (int, float) and 0 < us < math.inf) for us in raw["us"])
        and raw["us"][0] is not None
    )
    require(
        good,
        where,
        f"{', '.join(_SHAPE)}, scales of FP8, nodes if several, device if another: a time or null "
        "for each config",
        _REMEDY,
    )
    world_size, rows, cols, depth = (raw[name] for name in _SHAPE[:4])
    problem = Problem(world_size, rows, cols, depth, _ITEMSIZE[raw["dtype"]], raw["dtype"])
    problem = replace(problem, scales=raw.get("scales", ""), nodes=raw.get("nodes", 1))
    times = {c: float(us) for c, us in zip(configs, raw["us"], strict=True) if us is not None}
    return Measurement(op, problem, times, raw.get("device", ""))


def _may_be_nodes(nodes: Any, world_size: int) -> bool:
    """Whether so many ranks may be on ``nodes``; None: one, which is not written."""
    return nodes is None or (type(nodes) is int and nodes > 1 and world_size % nodes == 0)


def write_measurements(op: str, measurements: Iterable[Measurement]) -> str:
    """The JSON text of measurements of ``op``; one line per config and per shape."""
    found = [one for one in measurements if one.op == op]
    configs = list(dict.fromkeys(c for one in found for c in one.us if c is not None))
    defaults = {f.name: f.default for f in fields(MatmulConfig)}
    lines = [
        {name: value for name, value in asdict(c).items() if value != defaults[name]}
        for c in configs
    ]
    shapes = [
        {
            "world_size": one.problem.world_size,
            "rows": one.problem.rows,
            "cols": one.problem.cols,
            "depth": one.problem.depth,
            "dtype": one.problem.dtype,
            **({"scales": one.problem.scales} if one.problem.fp8 else {}),
            **({"nodes": one.problem.nodes} if one.problem.nodes > 1 else {}),
            **({"device": one.device} if one.device else {}),
            "us": [None if c not in one.us else round(one.us[c], 2) for c in (None, *configs)],
        }
        for one in found
    ]

    def listed(items: list[dict[str, Any]]) -> str:
        return ",\n".join("  " + json.dumps(item) for item in items)

    return (
        f'{{"op": {json.dumps(op)},\n "configs": [\n{listed(lines)}\n ],\n'
        f' "shapes": [\n{listed(shapes)}\n ]}}\n'
    )
