"""The model against figures that others published: ``data/public.yaml``, read, predicted and
judged.

A figure has a value with its unit, a source, a date and a set-up: a workload as in a workload file,
a collective, an exchange of experts' tokens, or a matmul. Half of the figures, by the hash of their
names, are held out: nothing is fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from statistics import median
from typing import Any

import yaml

from tileweave.errors import require
from tileweave.planning.costs import SHORT, Calibration, Costs, load_calibration
from tileweave.sim import serving, token_exchange
from tileweave.sim.collectives import KINDS, Group, Kind, collective_time, group_of
from tileweave.sim.document import (
    REQUIRED,
    Reader,
    Record,
    Spot,
    choice,
    fail,
    fields_of,
    flag,
    integer,
    items,
    number,
    parse_document,
    text,
)
from tileweave.sim.machine import Cluster, Device, cluster_reader, device_reader
from tileweave.sim.operators import Operators
from tileweave.sim.trust import factors_off
from tileweave.sim.workload import (
    Scenario,
    operators_for,
    samples_of,
    scenario_of,
    simulate_with,
)

# group -> (geometric mean, worst) that held-out figures must reach; none for the others
BARS: dict[str, tuple[float, float]] = {
    "training": (0.08, 0.20),
    "collectives": (0.10, 0.25),
    "experts": (0.10, 0.25),
    "serving": (0.15, 0.35),
    "matmuls": (0.10, 0.25),
}
GROUPS = (*BARS, "training, under 64 GPUs")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
UNITS = (
    *_SECONDS,
    "GB/s bus",
    "GB/s RDMA",
    "GB/s NVLink",
    "TFLOP/s",
    "tokens/s",
    "tokens/s/GPU",
    "tokens/s/node",
)


# Operators of training steps that have run, by their cluster apart from the number of nodes.
Known = dict[Any, Operators]


def is_held_out(name: str) -> bool:
    """Whether the SHA-256 of a name begins with an even byte."""
    return sha256(name.encode()).digest()[0] % 2 == 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective among all GPUs of a cluster, alone and repeated."""

    collective: Kind
    bytes: float
    cluster: Cluster

    def seconds(self, calibration: Calibration, known: Known) -> float:
        c = calibration.coefficients
        again = c.nccl_repeat if self.bytes <= SHORT else 0.0
        group = group_of(self.cluster, self.cluster.world_size)
        return again + collective_time(self.collective, self.bytes, group, self.cluster, c)

    def amount(self, unit: str) -> float:
        world = self.cluster.world_size
        ways = 2.0 if self.collective == "all_reduce" else 1.0
        return _if(unit == "GB/s bus", ways * self.bytes * (world - 1) / world / 1e9)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A dispatch or combine of tokens among all GPUs of a cluster."""

    exchange: token_exchange.Way
    mode: token_exchange.Kind
    tokens: int
    hidden: int
    experts: int
    top_k: int
    fp8: bool
    cluster: Cluster
    node_limit: int = 0

    @property
    def _group(self) -> Group:
        return group_of(self.cluster, self.cluster.world_size)

    @property
    def _tokens(self) -> token_exchange.Tokens:
        return token_exchange.Tokens(
            self.tokens, self.hidden, self.experts, self.top_k, self.node_limit
        )

    def seconds(self, calibration: Calibration, known: Known) -> float:
        return token_exchange.exchange_time(
            self.mode, self.exchange, self._tokens, self._group, self.cluster, self.fp8
        )

    def amount(self, unit: str) -> float:
        counted = token_exchange.counted_bytes(
            unit, self.exchange, self._tokens, self._group, self.fp8
        )
        return _if(unit in ("GB/s RDMA", "GB/s NVLink"), counted / 1e9)


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul of one GPU."""

    matmul: tuple[int, int, int]
    device: Device

    def seconds(self, calibration: Calibration, known: Known) -> float:
        return Costs(self.device, calibration.coefficients).matmul(*self.matmul)

    def amount(self, unit: str) -> float:
        return _if(unit == "TFLOP/s", 2.0 * math.prod(self.matmul) / 1e12)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a workload. ``mode`` fused: what was measured overlaps communication itself."""

    scenario: Scenario
    mode: Any = "unfused"

    def seconds(self, calibration: Calibration, known: Known) -> float:
        scenario, cluster = self.scenario, self.scenario.cluster
        kernels = self.mode != "unfused" or scenario.kind not in ("train", "serve")
        key = (scenario.kind, kernels, cluster.device, cluster.network, cluster.gpus_per_node)
        if scenario.kind != "train":
            ops = operators_for(scenario, calibration, kernels)
            return simulate_with(ops, scenario, self.mode).seconds
        if key not in known:
            known[key] = operators_for(scenario, calibration, kernels)
        return simulate_with(known[key].on_nodes(cluster.nodes), scenario, self.mode).seconds

    def amount(self, unit: str) -> float:
        work, cluster = self.scenario.workload, self.scenario.cluster
        gpus = work.gpus if isinstance(work, serving.Serving) else cluster.world_size
        each = {
            "tokens/s": 1.0,
            "tokens/s/GPU": 1.0 / gpus,
            "tokens/s/node": cluster.gpus_per_node / gpus,
        }
        tokens = samples_of(self.scenario)[0]
        return _if(unit in each, tokens * each.get(unit, 0.0))


def _if(fits: bool, amount: float) -> float:
    """``amount``, or not a number where the unit is of another kind of set-up."""
    return amount if fits else math.nan


Setup = Collective | Exchange | Matmul | Step


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure.

    value : the median of the published values, in ``unit``.
    sources : where each of them is, with its date.
    read : whether the source was read for this table.
    assumed : what the source does not say and the set-up needs.
    """

    name: str
    group: str
    value: float
    unit: str
    sources: tuple[tuple[str, str], ...]
    read: bool
    assumed: str
    note: str
    setup: Setup

    def __post_init__(self) -> None:
        asked, allowed = f"unit {self.unit} of figure {self.name!r}", "a unit of its kind of set-up"
        require(math.isfinite(self.seconds), asked, allowed, "change the unit, or the set-up")

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)

    @property
    def complete(self) -> bool:
        """Whether the source was read and says the whole set-up."""
        return self.read and not self.assumed

    @property
    def seconds(self) -> float:
        """The published time, or that of the published rate."""
        if self.unit in _SECONDS:
            return self.value * _SECONDS[self.unit]
        return self.setup.amount(self.unit) / self.value

    def in_unit(self, seconds: float) -> float:
        """A time in the unit of the figure."""
        if self.unit in _SECONDS:
            return seconds / _SECONDS[self.unit]
        return self.setup.amount(self.unit) / seconds


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure and its prediction in seconds."""

    figure: Figure
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the time: 0.05 is 5 % too slow."""
        return self.predicted / self.figure.seconds - 1.0


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of some figures: geometric mean of the factor by which they are off, minus one,
    and the worst."""

    group: str
    what: str
    count: int
    mean: float
    worst: float
    worst_name: str

    @property
    def good(self) -> bool:
        """Whether the bar of the group is reached; True where there is none."""
        mean, worst = BARS.get(self.group, (math.inf, math.inf))
        return self.mean <= mean and self.worst <= worst


def figures() -> tuple[Figure, ...]:
    """All figures of the package, in the order of the file."""
    file = resources.files("tileweave.sim") / "data" / "public.yaml"
    return _read(file.read_text("utf-8"), "public.yaml")


@cache
def _read(contents: str, name: str) -> tuple[Figure, ...]:
    return Record({"figures": (_distinct, REQUIRED)})(parse_document(contents, name))["figures"]


def judge(
    found: Iterable[Figure],
    calibration: Calibration | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> list[Judged]:
    """Each figure with its prediction."""
    used, judged = calibration or load_calibration(), []
    known: Known = {}
    listed = list(found)
    for done, figure in enumerate(listed):
        progress(figure.name, done, len(listed))
        judged.append(Judged(figure, figure.setup.seconds(used, known)))
    return judged


def by_group(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Figures by their group."""
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(one.figure.group, []).append(one)
    return found


def summarise(judged: Sequence[Judged]) -> list[Errors]:
    """By group: held-out figures, those of them whose whole set-up is published, and the others."""
    kinds: tuple[tuple[str, Callable[[Figure], bool]], ...] = (
        ("held out", lambda f: f.held_out and f.complete),
        ("held out, assumed in part or not read again", lambda f: f.held_out and not f.complete),
        ("fit side", lambda f: not f.held_out),
    )
    rows, groups = [], by_group(judged)
    for group in GROUPS:
        for what, belongs in kinds:
            members = [one for one in groups.get(group, ()) if belongs(one.figure)]
            if members:
                rows.append(_errors(group, what, members))
    return rows


def _errors(group: str, what: str, members: Sequence[Judged]) -> Errors:
    worst = max(members, key=lambda one: abs(math.log(1.0 + one.error)))
    off = factors_off(one.error for one in members)
    return Errors(group, what, len(members), *off, worst.figure.name)


# --- Reading ---

_VALUE = {"value": (number(1e-9, 1e12), REQUIRED), "source": (text, REQUIRED)}


def _date(spot: Spot) -> str:
    """A day, as year-month-day."""
    value = text(spot) if spot.node.tag.endswith(":str") else str(getattr(spot.node, "value", ""))
    parts = value.split("-")
    if [len(part) for part in parts] != [4, 2, 2] or not "".join(parts).isdigit():
        raise fail(spot, repr(value), "a day: 2025-06-09", "write year-month-day")
    return value


_OTHER = Record({**_VALUE, "date": (_date, REQUIRED)})


def _setup(spot: Spot) -> Setup:
    """A set-up, by the field that only its kind has."""
    fields = (
        [str(key.value) for key, _ in spot.node.value]
        if isinstance(spot.node, yaml.MappingNode)
        else []
    )
    for name, reader in _SETUPS.items():
        if name in fields:
            return reader(spot)
    raise fail(spot, "a set-up without its kind", ", ".join(_SETUPS), "add one of these fields")


def _step(spot: Spot) -> Step:
    """A workload; with ``mode`` in addition."""
    modes = [item for item in spot.node.value if item[0].value == "mode"]
    mode = choice(("unfused", "fused"))(spot.inside("mode", modes[0][1])) if modes else "unfused"
    rest = [item for item in spot.node.value if item[0].value != "mode"]
    node = yaml.MappingNode(spot.node.tag, rest, spot.node.start_mark, spot.node.end_mark)
    return Step(scenario_of(Spot(spot.file, spot.path, node)), mode)


def _shape(spot: Spot) -> tuple[int, int, int]:
    """M, N and K."""
    sizes = items(integer(1, 1 << 24))(spot)
    if len(sizes) != 3:
        raise fail(spot, f"{len(sizes)} sizes", "three: [m, n, k]", "write all of them")
    return sizes


_SIZE = integer(1, 1 << 24)
_SETUPS: dict[str, Reader] = {
    "workload": _step,
    "collective": Record(
        fields_of(
            Collective,
            collective=choice(KINDS),
            bytes=number(1, 1e13, "bytes"),
            cluster=cluster_reader,
        ),
        Collective,
    ),
    "exchange": Record(
        fields_of(
            Exchange,
            exchange=choice(token_exchange.WAYS),
            mode=choice(("normal", "low_latency")),
            tokens=_SIZE,
            hidden=_SIZE,
            experts=_SIZE,
            top_k=_SIZE,
            node_limit=integer(0, 65536),
            fp8=flag,
            cluster=cluster_reader,
        ),
        Exchange,
    ),
    "matmul": Record(fields_of(Matmul, matmul=_shape, device=device_reader), Matmul),
}


def _make(**fields: Any) -> Figure:
    others = fields.pop("others")
    values = [fields["value"], *(one["value"] for one in others)]
    dated = ((fields.pop("source"), fields.pop("date")),)
    sources = dated + tuple((one["source"], one["date"]) for one in others)
    return Figure(**fields | {"value": median(values)}, sources=sources)


_figure: Reader = Record(
    {
        "name": (text, REQUIRED),
        "group": (choice(GROUPS), REQUIRED),
        **_VALUE,
        "unit": (choice(UNITS), REQUIRED),
        "date": (_date, REQUIRED),
        "others": (items(_OTHER), ()),
        "read": (flag, True),
        "assumed": (text, ""),
        "note": (text, ""),
        "setup": (_setup, REQUIRED),
    },
    _make,
)


def _distinct(spot: Spot) -> tuple[Figure, ...]:
    """Figures, whose names differ."""
    found = items(_figure)(spot)
    names = [figure.name for figure in found]
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise fail(spot, f"figure {twice[0]!r} twice", "names that differ", "rename one")
    return found
