"""Fit coefficients to measured cells: Nelder-Mead on logarithms, a few coefficients at a time, each
from its own cells.

Held-out cells (``cells.RULE``) are not used. A block without a cell to fit keeps its start values,
and the calibration says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tileweave.planning.costs import REFERENCE, Calibration, Coefficients, Curve
from tileweave.sim.cells import Cell
from tileweave.sim.collectives import KINDS
from tileweave.sim.machine import presets
from tileweave.sim.modelled import MODELLED, is_matmul
from tileweave.sim.predict import Predictor

# Not fitted.
_GIVEN = {
    "attention": "not measured by us: arXiv 2407.08608, up to 740 of 989 TFLOP/s forward, "
    "less backwards and for short ones",
    "signal": "not measured by itself: 3.5 us for a barrier of both ways, less its launch",
    "copy_wait": "measured: decision 0013",
    "copy_look": "measured: decision 0013",
    "grouped_trip": "the latency of memory under load, as in planning/predict.py",
}
_FRACTIONS = (
    "matmul_unaligned",
    "matmul_flops",
    "matmul_memory",
    "push_fraction",
    "copy_fraction",
    "copy_one",
    "stream",
    "permute",
    "exchange_fraction",
    "own_memory",
    "reduce_memory",
)
# The knots of the curves of collectives, in bytes: where there are cells to fit. Messages of 3 to
# 4 MB were measured among four ranks only, before and after matmuls; NCCL changes its protocol
# below them.
_MB = float(1 << 20)
_KNOTS = {
    (kind, world): (
        _MB,
        2 * _MB,
        *((4 * _MB,) if world == 4 and kind != "all_to_all" else ()),
        8 * _MB,
        32 * _MB,
        256 * _MB,
    )
    for kind in KINDS
    for world in (2, 4)
}
# Start values: orders of magnitude from the data sheet and from launches on such devices.
START = Coefficients(
    matmul_launch=4e-6,
    matmul_flops=0.85,
    matmul_memory=0.84,
    matmul_feed=9e12,
    matmul_norm=6.0,
    matmul_sustained=3e-4,
    matmul_power=0.05,
    matmul_split=1e-6,
    matmul_tile=5e-7,
    matmul_overlap=0.3,
    matmul_stream=5e10,
    matmul_again=1e-3,
    matmul_limit=1.2,
    matmul_unaligned=0.4,
    fused_launch=5e-6,
    fused_eager=8e-6,
    fused_tile=2e-6,
    fused_part=2e-6,
    fused_rate=1.0,
    fused_feed=1.2e13,
    grouped_rate=0.9,
    grouped_overlap=0.3,
    grouped_step=2e-6,
    grouped_trip=1.2e-6,
    one_shot_launch=4e-6,
    scatter_eager=8e-6,
    scatter_tile=1e-6,
    take=1.5e-6,
    exchange_latency=4e-6,
    exchange_fraction=0.6,
    corun=0.03,
    nccl=tuple(
        Curve(kind, world, 8e-6, knots, (0.4,) * len(knots))
        for (kind, world), knots in _KNOTS.items()
    ),
    nccl_eager=1e-5,
    nccl_repeat=5e-6,
    push_latency=3e-6,
    push_fraction=0.75,
    copy_latency=4e-6,
    copy_fraction=0.8,
    copy_queued=4e-6,
    copy_one=0.6,
    copy_wait=2.5e-6,
    copy_look=6e-6,
    signal=1.5e-6,
    gap=2e-6,
    stream=0.6,
    permute=0.4,
    reduce=4e-12,
    reduce_memory=0.7,
    attention=0.65,
    lookup_made=1e-11,
    lookup_read=1e-12,
    lookup_memory=0.8,
    own_memory=0.8,
    own_bag=1e-10,
    own_l2=1e13,
    own_l2_row=100.0,
    pooled_latency=1e-5,
    pooled_norm=6.0,
    pooled_trip=1.5e-6,
    pooled_host=2e-4,
)

_SCATTERS = ("matmul_reduce_scatter", "matmul_all_reduce")
_MATMULS = ("matmul", *filter(is_matmul, MODELLED))


@dataclass(frozen=True)
class Block:
    """Coefficients that are fitted together, and the cells that they are fitted to."""

    name: str
    coefficients: tuple[str, ...]
    takes: Callable[[Cell], bool]
    steps: int
    rounds: int = 1


def _collective(cell: Cell) -> str | None:
    """The collective of a cell, alone or in turn with a matmul; None without one."""
    if cell.quantity == "comm" and not cell.primitive:
        return cell.op
    if cell.quantity == "unfused" and is_matmul(cell.op):
        return MODELLED[cell.op].collective
    return None


def _collectives() -> list[Block]:
    """A curve for each kind and world size, then what all kinds share."""
    curves = [
        Block(
            f"{curve.kind}, world {curve.world}",
            (
                *(
                    f"{curve.kind}/{curve.world}/{part}"
                    for part in ("latency", *range(len(curve.knots)))
                ),
                # only all-to-alls permute
                *(("permute",) if (curve.kind, curve.world) == ("all_to_all", 4) else ()),
            ),
            lambda cell, curve=curve: (
                _collective(cell) == curve.kind and cell.world_size == curve.world
            ),
            200,
        )
        for curve in START.nccl
    ]
    return [
        *curves,
        Block(
            "launches",
            ("gap", "nccl_eager", "nccl_repeat"),
            lambda cell: _collective(cell) is not None,
            80,
        ),
    ]


BLOCKS = (
    Block(
        "matmul",
        tuple(name for name in Coefficients.__dataclass_fields__ if name.startswith("matmul_")),
        lambda cell: (
            cell.quantity == "compute" and cell.op in (*_MATMULS, "grouped_matmul_combine")
        ),
        500,
        6,
    ),
    Block("stream", ("stream",), lambda cell: cell.quantity == "concat" and _past_l2(cell), 60),
    Block("reduce", ("reduce", "reduce_memory"), lambda cell: cell.quantity == "reduce", 60),
    *_collectives(),
    *_collectives(),  # again, because what they share had start values the first time
    Block("push", ("push_latency", "push_fraction"), lambda cell: cell.op == "push_sm", 60),
    Block(
        "lookup",
        ("lookup_made", "lookup_read", "lookup_memory"),
        lambda cell: _of_lookups(cell, "compute"),
        150,
    ),
    Block("own lookup", ("own_memory", "own_bag"), lambda cell: _of_lookups(cell, "own"), 100),
    Block(
        "lookups from L2",
        ("own_l2", "own_l2_row"),
        lambda cell: _of_lookups(cell, "fused") and cell.rows > 0,
        100,
    ),
    Block(
        "pooled",
        ("pooled_latency", "pooled_norm", "pooled_trip", "pooled_host"),
        lambda cell: _of_lookups(cell, "fused"),
        100,
    ),
    Block("corun", ("corun", "copy_one", "copy_queued"), lambda cell: cell.quantity == "bound", 60),
    Block(
        "copy", ("copy_latency", "copy_fraction"), lambda cell: cell.op == "push_copy_engine", 60
    ),
    Block(
        "exchange",
        ("exchange_latency", "exchange_fraction"),
        lambda cell: cell.quantity == "library",
        60,
    ),
    Block(
        "fused gather",
        ("fused_launch", "fused_eager", "fused_tile", "fused_part", "fused_rate", "fused_feed"),
        lambda cell: (
            cell.op in ("all_gather_matmul", "all_to_all_matmul") and cell.quantity == "fused"
        ),
        110,
    ),
    Block(
        "experts",
        ("grouped_rate", "grouped_overlap", "grouped_step"),
        lambda cell: (
            cell.op in ("dispatch_grouped_matmul", "grouped_matmul_combine")
            and cell.quantity == "fused"
        ),
        80,
    ),
    Block(
        "fused scatter",
        ("one_shot_launch", "scatter_eager", "scatter_tile", "take"),
        lambda cell: cell.op in (*_SCATTERS, "matmul_all_to_all") and cell.quantity == "fused",
        110,
        2,
    ),
)


def _past_l2(cell: Cell) -> bool:
    """Whether a concatenation of pooled vectors moves more bytes than L2 has; only then does it
    depend on the memory rate."""
    batch, tables, dim, _, itemsize = cell.shape
    return (
        2.0 * batch * tables / cell.world_size * dim * itemsize > presets()["devices"][REFERENCE].l2
    )


def _of_lookups(cell: Cell, quantity: str) -> bool:
    return cell.op == "embedding_bag_all_to_all" and cell.quantity == quantity


def _is_fraction(name: str) -> bool:
    return name in _FRACTIONS or name.rpartition("/")[2].isdigit()


def named(c: Coefficients, name: str) -> float:
    """A coefficient by its name. Names of curves are ``kind/world/latency``, and ``kind/world/0``
    for the first fraction."""
    if "/" not in name:
        return float(getattr(c, name))
    kind, world, part = name.split("/")
    (curve,) = (one for one in c.nccl if (one.kind, str(one.world)) == (kind, world))
    return curve.latency if part == "latency" else curve.fractions[int(part)]


def with_named(c: Coefficients, values: dict[str, float]) -> Coefficients:
    """Coefficients with some changed, by the names of :func:`named`."""
    curves = []
    for curve in c.nccl:
        path = f"{curve.kind}/{curve.world}/"
        fractions = tuple(values.get(f"{path}{i}", old) for i, old in enumerate(curve.fractions))
        curves.append(
            replace(curve, latency=values.get(f"{path}latency", curve.latency), fractions=fractions)
        )
    plain = {name: value for name, value in values.items() if "/" not in name}
    return replace(c, nccl=tuple(curves), **plain)


def error_of(predicted: float, measured: float) -> float:
    """The logarithm of predicted over measured: 0.05 is about 5 % too slow."""
    return math.log(predicted / measured)


def fit(
    cells: Sequence[Cell],
    start: Coefficients = START,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Fit coefficients to the ``cells`` that are not held out, block by block."""
    mine = [cell for cell in cells if not cell.held_out and cell.in_domain]
    found, missing, used = start, dict(_GIVEN), []
    for block in BLOCKS:
        chosen = [cell for cell in mine if block.takes(cell)]
        if not chosen:
            missing.update(
                dict.fromkeys(block.coefficients, "no measured cell: a start value, see sim/fit.py")
            )
            continue
        used += [str(cell) for cell in chosen]
        found, loss = _fit_block(found, block, chosen)
        progress(f"{block.name}: {len(chosen)} cells, mean error {loss:.1%}")
    name = "h200"
    about = "Coefficients fitted by `tileweave simulate calibrate`; see docs/simulator.md"
    return Calibration(name, about, found, tuple(dict.fromkeys(used)), missing)


def _fit_block(found: Coefficients, block: Block, cells: list[Cell]) -> tuple[Coefficients, float]:
    def with_values(logs: Sequence[float]) -> Coefficients:
        return with_named(
            found,
            {name: math.exp(value) for name, value in zip(block.coefficients, logs, strict=True)},
        )

    def errors(logs: Sequence[float]) -> list[float]:
        predictor = Predictor(Calibration("fit", "", with_values(logs)))
        predicted = [predictor.seconds(cell) for cell in cells]
        return [
            error_of(p, cell.seconds)
            for p, cell in zip(predicted, cells, strict=True)
            if p is not None
        ]

    def loss(logs: Sequence[float]) -> float:
        far = sum((a - b) ** 2 for a, b in zip(logs, start, strict=True))
        over = sum(
            max(a, 0.0) ** 2
            for a, name in zip(logs, block.coefficients, strict=True)
            if _is_fraction(name)
        )
        return sum(e * e for e in errors(logs)) + 4e-3 * far + 100.0 * over

    start = [math.log(named(found, name)) for name in block.coefficients]
    best = start
    for _ in range(block.rounds):  # a new simplex each time, because it becomes flat
        best = nelder_mead(loss, best, 0.25, block.steps)
    final = errors(best)
    return with_values(best), sum(map(abs, final)) / max(len(final), 1)


def nelder_mead(
    f: Callable[[Sequence[float]], float], start: Sequence[float], size: float, steps: int
) -> list[float]:
    """The simplex method (Nelder and Mead, 1965): the best point after ``steps`` moves."""
    n = len(start)
    simplex = [list(start)] + [[x + size * (i == j) for j, x in enumerate(start)] for i in range(n)]
    ranked = sorted(((f(point), point) for point in simplex), key=lambda pair: pair[0])
    for _ in range(steps):
        worst_value, worst = ranked[-1]
        centre = [sum(point[j] for _, point in ranked[:-1]) / n for j in range(n)]

        def along(
            t: float, centre: list[float] = centre, worst: list[float] = worst
        ) -> tuple[float, list[float]]:
            point = [c + t * (c - w) for c, w in zip(centre, worst, strict=True)]
            return f(point), point

        reflected = along(1.0)
        if reflected[0] < ranked[0][0]:
            ranked[-1] = min(reflected, along(2.0), key=lambda pair: pair[0])
        elif reflected[0] < ranked[-2][0]:
            ranked[-1] = reflected
        else:
            inner = along(-0.5)
            if inner[0] < worst_value:
                ranked[-1] = inner
            else:
                best = ranked[0][1]
                shrunk = [
                    [(x + b) / 2 for x, b in zip(point, best, strict=True)]
                    for _, point in ranked[1:]
                ]
                ranked[1:] = [(f(point), point) for point in shrunk]
        ranked.sort(key=lambda pair: pair[0])
    return ranked[0][1]
