"""Machines and clusters as data: devices, their links inside a node, and the network of nodes.

The data is in ``data/machines.yaml`` or in a user's file of the same form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from tileweave.errors import require
from tileweave.planning.costs import Curve
from tileweave.sim.document import (
    REQUIRED,
    Reader,
    Record,
    Spot,
    choice,
    either,
    fields_of,
    flag,
    integer,
    items,
    mapping_of,
    number,
    parse_document,
    text,
)

Inside = Literal["switch", "mesh", "bridge"]
Topology = Literal["fat_tree", "rail", "torus"]
MOST_NODES, MOST_PER_NODE = 65536, 1024


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its data sheet. ``costs.Costs`` scales the peaks by measured fractions.

    flops : dense bf16, flop/s.
    memory_rate : bytes/s.
    memory : bytes.
    link_rate : bytes/s that a device sends inside its node.
    inside : how the devices of a node are connected.
    bridge_rate : bytes/s that all devices of a node share (``"bridge"``; otherwise 0).
    l2 : bytes of L2.
    multicast : whether the switch reduces and multicasts (NVLink SHARP).
    matmul : the fraction of ``flops`` that long matmuls reach, where it is published for this
        device; 0: as on H200.
    """

    name: str
    flops: float
    memory_rate: float
    num_sms: int
    memory: float
    link_rate: float
    inside: Inside
    gpus_per_node: int
    source: str
    bridge_rate: float = 0.0
    l2: float = 50e6
    multicast: bool = False
    matmul: float = 0.0

    def __post_init__(self) -> None:
        require(
            (self.inside == "bridge") == (self.bridge_rate > 0.0),
            f"bridge_rate {self.bridge_rate:g} of a {self.inside}",
            "above 0 for a bridge, 0 for anything else",
            "give the rate of the bridge, or leave bridge_rate out",
        )


@dataclass(frozen=True, slots=True)
class Network:
    """The network between nodes.

    nic_rate : bytes/s in one direction, the line rate of one NIC (torus: of one link of a node).
    fraction : of the line rate that is reached.
    latency : seconds, one way.
    topology : ``fat_tree`` (leaves of ``leaf`` nodes, ``oversubscription``), ``rail`` (GPU i of
        every node on one switch) or ``torus`` of nodes with sides ``dims`` (empty: two sides, as
        equal as possible).
    nics : NICs per node; 0: one per GPU.
    """

    name: str
    nic_rate: float
    fraction: float
    latency: float
    topology: Topology
    nics: int = 0
    leaf: int = 16
    oversubscription: float = 1.0
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    network: Network
    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        fits = 1 <= self.nodes <= MOST_NODES and 1 <= self.gpus_per_node <= MOST_PER_NODE
        asked = f"{self.nodes} node{'s' * (self.nodes != 1)} of {self.gpus_per_node} GPUs"
        require(fits, asked, f"1 to {MOST_NODES} nodes, of 1 to {MOST_PER_NODE}", "change them")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def dims(self) -> tuple[int, ...]:
        """Sides of the torus."""
        return self.network.dims or _square(self.nodes)

    def describe(self) -> str:
        inside = f"{self.gpus_per_node} x {self.device.name}"
        if self.nodes == 1:
            return f"1 node of {inside}"
        sides = f" {'x'.join(map(str, self.dims))}" if self.network.topology == "torus" else ""
        return (
            f"{self.nodes} nodes of {inside}, {self.network.name} ({self.network.topology}{sides})"
        )


def _square(nodes: int) -> tuple[int, ...]:
    """The two sides of a torus, as equal as possible."""
    side = next(a for a in range(math.isqrt(nodes), 0, -1) if nodes % a == 0)
    return (nodes // side, side)


_RATE = number(1e9, 1e14, "bytes/s")
_DEVICE_FIELDS = fields_of(
    Device,
    flops=number(1e12, 1e17, "flop/s"),
    memory_rate=_RATE,
    num_sms=integer(1, 4096),
    memory=number(1e9, 1e13, "bytes"),
    link_rate=_RATE,
    inside=choice(("switch", "mesh", "bridge")),
    bridge_rate=_RATE,
    l2=number(1e5, 1e10),
    multicast=flag,
    matmul=number(0.0, 1.0),
    gpus_per_node=integer(1, MOST_PER_NODE),
    source=text,
)
_NETWORK_FIELDS = fields_of(
    Network,
    nic_rate=number(1e9, 2e11, "bytes/s (400 Gb/s are 50e9)"),
    fraction=number(0.05, 1.0),
    latency=number(0.0, 1e-2, "seconds"),
    topology=choice(("fat_tree", "rail", "torus")),
    nics=integer(0, 64),
    leaf=integer(1, 4096, "nodes"),
    oversubscription=number(1.0, 64.0),
    dims=items(integer(1, 4096), 8),
)


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The ``devices`` and ``networks`` of this package, by name."""
    data = (resources.files("tileweave.sim") / "data" / "machines.yaml").read_text("utf-8")
    fields = {
        "devices": (mapping_of(Record(_DEVICE_FIELDS)), REQUIRED),
        "networks": (mapping_of(Record(_NETWORK_FIELDS)), REQUIRED),
    }
    found = Record(fields)(parse_document(data, "machines.yaml"))
    return {
        "devices": {name: Device(name=name, **values) for name, values in found["devices"].items()},
        "networks": {
            name: Network(name=name, **values) for name, values in found["networks"].items()
        },
    }


@dataclass(frozen=True, slots=True)
class PublishedCurve:
    """A curve of NCCL in a node that others measured, for more ranks than we have, on links of
    ``link_rate``. ``multicast``: only where the switch reduces."""

    curve: Curve
    multicast: bool
    link_rate: float
    source: str


def published_curve(kind: str, ranks: int, device: Device) -> PublishedCurve | None:
    """The curve for ``ranks`` of a node of ``device``: of the most similar links."""
    fitting = [
        one
        for one in published_curves()
        if one.curve.kind == kind and ranks <= one.curve.world and one.multicast <= device.multicast
    ]
    return min(
        fitting,
        key=lambda one: (not one.multicast, abs(math.log(one.link_rate / device.link_rate))),
        default=None,
    )


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """The curves of ``data/collectives.yaml``."""

    def curve(
        kind: str, world: int, multicast: bool, link_rate: float, source: str, **fields: Any
    ) -> PublishedCurve:
        return PublishedCurve(Curve(kind, world, **fields), multicast, link_rate, source)

    positive = items(number(1e-9, 1e13))
    fields: dict[str, tuple[Reader, Any]] = {
        "kind": (choice(("all_gather", "reduce_scatter", "all_reduce", "all_to_all")), REQUIRED),
        "world": (integer(2, MOST_PER_NODE), REQUIRED),
        "multicast": (flag, REQUIRED),
        "link_rate": (_RATE, REQUIRED),
        "latency": (number(0.0, 1.0, "seconds"), REQUIRED),
        "knots": (positive, REQUIRED),
        "fractions": (positive, REQUIRED),
        "source": (text, REQUIRED),
    }
    data = (resources.files("tileweave.sim") / "data" / "collectives.yaml").read_text("utf-8")
    return items(Record(fields, curve))(parse_document(data, "collectives.yaml"))


def device_reader(spot: Spot) -> Device:
    """The name of a preset, or a mapping with the fields of a device."""
    known = presets()["devices"]
    named = choice(tuple(known))
    own = Record(_DEVICE_FIELDS, lambda **fields: Device(name="own device", **fields))
    return either(lambda s: known[named(s)], own)(spot)


def network_reader(spot: Spot) -> Network:
    """The name of a preset, or a mapping with the fields of a network."""
    known = presets()["networks"]
    named = choice(tuple(known))
    own = Record(_NETWORK_FIELDS, lambda **fields: Network(name="own network", **fields))
    return either(lambda s: known[named(s)], own)(spot)


def cluster_reader(spot: Spot) -> Cluster:
    """The ``cluster`` block of a workload file."""
    fields = {
        "device": (device_reader, presets()["devices"]["h200"]),
        "network": (network_reader, presets()["networks"]["ib-400"]),
        "nodes": (integer(1, MOST_NODES), 1),
        "gpus_per_node": (integer(1, MOST_PER_NODE), None),
    }
    return Record(fields, make_cluster)(spot)


def make_cluster(
    device: Device | str = "h200",
    network: Network | str = "ib-400",
    nodes: int = 1,
    gpus_per_node: int | None = None,
) -> Cluster:
    """A cluster from names of presets or own data. ``gpus_per_node`` None is the usual number of
    the device."""
    chosen: Device = _preset("device", device) if isinstance(device, str) else device
    joined: Network = _preset("network", network) if isinstance(network, str) else network
    _require_its_own_fields(joined)
    made = Cluster(chosen, joined, nodes, gpus_per_node or chosen.gpus_per_node)
    per_node = made.gpus_per_node
    require(
        per_node <= chosen.gpus_per_node,
        f"{per_node} GPUs per node of {chosen.name}",
        f"at most the {chosen.gpus_per_node} that its links connect",
        "more nodes, or a device of your own with that gpus_per_node",
    )
    if joined.topology == "torus" and joined.dims:
        sides = math.prod(joined.dims)
        require(
            sides == nodes,
            f"{nodes} nodes on a torus {joined.dims}",
            f"the {sides} of its sides",
            "change dims",
        )
    return made


# Fields that only some topologies use.
_OF_TOPOLOGY: dict[str, tuple[Topology, ...]] = {
    "nics": ("fat_tree", "rail"),
    "leaf": ("fat_tree",),
    "oversubscription": ("fat_tree",),
    "dims": ("torus",),
}


def _require_its_own_fields(network: Network) -> None:
    """Refuse a field that would have no effect, since its author expects one."""
    for name, where in _OF_TOPOLOGY.items():
        default = _NETWORK_FIELDS[name][1]
        fits = network.topology in where or getattr(network, name) == default
        require(
            fits,
            f"{name} of a network that is a {network.topology}",
            f"{name} of {', '.join(where)}",
            f"leave {name} out",
        )


def _preset(kind: str, name: str) -> Any:
    known = presets()[f"{kind}s"]
    require(name in known, f"{kind} {name!r}", ", ".join(known), "pass one of these names")
    return known[name]


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The same machines with ``gpus`` devices in all: whole nodes, or part of one."""
    per_node = min(cluster.gpus_per_node, gpus)
    require(
        gpus % per_node == 0,
        f"{gpus} GPUs",
        f"a multiple of the {per_node} of a node",
        "change --gpus",
    )
    return replace(cluster, nodes=gpus // per_node, gpus_per_node=per_node)
