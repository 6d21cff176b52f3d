"""Links and flows: a fluid model with max-min fair rates, on SimPy, of one rank that represents all
ranks.

A collective of all ranks of a uniform cluster looks the same from each rank. So one rank is
simulated: a *flow class* represents the flows of all ranks to "the rank d further", and a *link*
all links of its kind. If a class has h hops over links of a kind of which there are ``density`` per
rank, and each rank has ``count`` such flows, a link of that kind carries ``count * h / density`` of
them. That is exact for tori (translations), switches and evenly loaded trees. The cost of an
all-to-all is then the number of classes, not of pairs. Tests compare it with a model without
symmetry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import simpy

from tileweave.sim.machine import Cluster


@dataclass(slots=True)
class Flow:
    """Equal flows of ``nbytes`` each. ``loads``: link -> how many of them that link carries."""

    nbytes: float
    loads: Mapping[str, float]
    latency: float = 0.0
    cap: float = float("inf")
    name: str = ""
    left: float = 0.0
    rate: float = 0.0
    done: Any = field(default=None, repr=False)


class Links:
    """Links with capacities (bytes/s) and the flows on them; rates change whenever a flow starts or
    ends."""

    def __init__(self, env: simpy.Environment, capacities: Mapping[str, float]) -> None:
        self.env, self.capacities = env, dict(capacities)
        self._active: list[Flow] = []
        self._since, self._version = 0.0, 0

    def send(self, flows: Iterable[Flow]) -> simpy.Event:
        """Start flows together. The event is the arrival of their last byte. A flow uses links
        after its latency."""
        flows = list(flows)
        if not flows:
            return self.env.timeout(0.0)
        by_latency: dict[float, list[Flow]] = defaultdict(list)
        for flow in flows:
            flow.left, flow.done = flow.nbytes, self.env.event()
            by_latency[flow.latency].append(flow)
        for latency, group in by_latency.items():
            begin = self.env.timeout(latency)
            begin.callbacks.append(lambda _, group=group: self._begin(group))
        return self.env.all_of([flow.done for flow in flows])

    def _begin(self, flows: list[Flow]) -> None:
        self._advance()
        self._active += flows
        self._reshare()

    def _advance(self) -> None:
        passed = self.env.now - self._since
        self._since = self.env.now
        if passed <= 0.0:
            return
        for flow in self._active:
            flow.left -= flow.rate * passed

    def _reshare(self) -> None:
        """End the flows that have arrived, compute new rates, and wake up when the next flow
        ends."""
        # a shorter wait would not advance the clock, and would hang
        kept, soon = [], 8.0 * math.ulp(self.env.now)
        for flow in self._active:
            if flow.left <= flow.rate * soon or flow.left <= 1e-9 * flow.nbytes:
                flow.done.succeed()
            else:
                kept.append(flow)
        self._active = kept
        self._version += 1
        if kept:
            share(kept, self.capacities)
            wake = self.env.timeout(min(flow.left / flow.rate for flow in kept))
            wake.callbacks.append(lambda _, version=self._version: self._wake(version))

    def _wake(self, version: int) -> None:
        if version == self._version:  # otherwise rates have changed and there is a later wake-up
            self._advance()
            self._reshare()


def share(flows: list[Flow], capacities: Mapping[str, float]) -> None:
    """Max-min fair rates by progressive filling: all rates grow equally until a link is full, whose
    flows then keep theirs."""
    left = {link: capacities[link] for flow in flows for link in flow.loads}
    growing = list(flows)
    level = 0.0
    while growing:
        loads: dict[str, float] = defaultdict(float)
        for flow in growing:
            for link, load in flow.loads.items():
                loads[link] += load
        room = {link: left[link] / load for link, load in loads.items() if load > 0.0}
        step = min([*room.values(), *(flow.cap - level for flow in growing)])
        level += step
        for link, load in loads.items():
            # rounding must not make it negative
            left[link] = max(left[link] - step * load, 0.0)
        full = {link for link, space in room.items() if space <= step * (1.0 + 1e-12)}
        still = []
        for flow in growing:
            flow.rate = level
            if flow.cap > level * (1.0 + 1e-12) and not any(link in full for link in flow.loads):
                still.append(flow)
        growing = still


# --- One rank's view of a cluster ---


@dataclass(frozen=True)
class View:
    """The links of each kind as one rank sees them: ``capacities`` of one link, and ``density``,
    their number per rank."""

    cluster: Cluster
    capacities: dict[str, float]
    density: dict[str, float]

    def loads(self, hops: Mapping[str, float], count: float = 1.0) -> dict[str, float]:
        """Link -> number of flows, if every rank has ``count`` flows with ``hops`` over each
        kind."""
        return {link: count * h / self.density[link] for link, h in hops.items() if h > 0.0}


def view(cluster: Cluster, inside_fraction: float) -> View:
    """The links of ``cluster``. ``inside_fraction``: the fraction of the line rate that transfers
    inside a node reach."""
    device, per_node = cluster.device, cluster.gpus_per_node
    capacities = {
        "up": device.link_rate * inside_fraction,
        "down": device.link_rate * inside_fraction,
    }
    density = {"up": 1.0, "down": 1.0}
    if device.inside == "mesh":
        peers = max(device.gpus_per_node - 1, 1)
        for distance in range(1, per_node):
            capacities[f"pair{distance}"] = device.link_rate * inside_fraction / peers
            density[f"pair{distance}"] = 1.0
    elif device.inside == "bridge":
        capacities["bridge"] = device.bridge_rate * inside_fraction
        density["bridge"] = 1.0 / per_node
    if cluster.nodes > 1:
        _add_network(cluster, capacities, density)
    return View(cluster, capacities, density)


def _add_network(cluster: Cluster, capacities: dict[str, float], density: dict[str, float]) -> None:
    network, per_node = cluster.network, cluster.gpus_per_node
    rate = network.nic_rate * network.fraction
    nics = network.nics or per_node
    if network.topology == "torus":
        for axis, side in enumerate(cluster.dims):
            for way in ("+", "-") if side > 2 else ("+",) if side == 2 else ():
                capacities[f"torus{axis}{way}"], density[f"torus{axis}{way}"] = rate, 1.0 / per_node
        return
    for way in ("nic_out", "nic_in"):
        capacities[way], density[way] = rate, nics / per_node
    if has_uplinks(cluster):
        for way in ("leaf_up", "leaf_down"):
            capacities[way] = network.leaf * nics * rate / network.oversubscription
            density[way] = 1.0 / (network.leaf * per_node)


def has_uplinks(cluster: Cluster) -> bool:
    """Whether links between leaves are oversubscribed; otherwise they limit no flow and are left
    out."""
    network = cluster.network
    return (
        network.topology == "fat_tree"
        and network.oversubscription > 1.0
        and cluster.nodes > network.leaf
    )


def shifted_hops(cluster: Cluster, nodes: int) -> dict[str, float]:
    """Mean hops if every node sends to the node ``nodes`` further: that many nodes of a leaf send
    out of it."""
    hops = {"nic_out": 1.0, "nic_in": 1.0}
    if has_uplinks(cluster):
        share = min(nodes, cluster.network.leaf) / cluster.network.leaf
        hops |= {"leaf_up": share, "leaf_down": share}
    return hops


def message(seen: View, nbytes: float, source: int, target: int, inside_latency: float) -> Flow:
    """A message from rank ``source`` to ``target`` while all ranks send to the same distance.
    ``inside_latency``: seconds, inside a node."""
    cluster = seen.cluster
    here, there = source // cluster.gpus_per_node, target // cluster.gpus_per_node
    if here == there:
        return Flow(
            nbytes,
            seen.loads(inside_hops(cluster, (target - source) % cluster.gpus_per_node)),
            inside_latency,
        )
    if cluster.network.topology == "torus":
        steps = zip(_place(cluster, here), _place(cluster, there), strict=True)
        hops = torus_hops(cluster.dims, tuple(b - a for a, b in steps))
        return Flow(nbytes, seen.loads(hops), cluster.network.latency * sum(hops.values()))
    hops = shifted_hops(cluster, abs(there - here))
    if here // cluster.network.leaf == there // cluster.network.leaf:
        hops = {link: h for link, h in hops.items() if not link.startswith("leaf")}
    return Flow(nbytes, seen.loads(hops), cluster.network.latency)


def alone(seen: View, flow: Flow) -> float:
    """Seconds of a flow on idle links."""
    rate = max((load / seen.capacities[link] for link, load in flow.loads.items()), default=0.0)
    return flow.latency + flow.nbytes * rate


def _place(cluster: Cluster, node: int) -> list[int]:
    """The coordinates of a node of a torus; consecutive nodes are neighbours along the last
    side."""
    found = []
    for side in reversed(cluster.dims):
        found.append(node % side)
        node //= side
    return found[::-1]


def inside_hops(cluster: Cluster, distance: int) -> dict[str, float]:
    """Hops to the GPU ``distance`` further in the same node. Half of the node is at either end of a
    bridge."""
    per_node = cluster.gpus_per_node
    hops = {"up": 1.0, "down": 1.0}
    if cluster.device.inside == "mesh":
        hops[f"pair{distance % per_node}"] = 1.0
    elif cluster.device.inside == "bridge":
        # two hops of a ring through both halves cross it
        hops["bridge"] = 2.0 * min(distance, per_node - distance) / per_node
    return hops


def torus_hops(dims: tuple[int, ...], offset: tuple[int, ...]) -> dict[str, float]:
    """Hops along each axis and direction to the node at ``offset``, with deterministic
    dimension-ordered routing: the shorter way, or forwards if both are equal."""
    hops: dict[str, float] = {}
    for axis, (side, step) in enumerate(zip(dims, offset, strict=True)):
        step %= side
        if 2 * step <= side:
            hops[f"torus{axis}+"] = float(step)
        else:
            hops[f"torus{axis}-"] = float(side - step)
    return {link: h for link, h in hops.items() if h}


def node_classes(cluster: Cluster) -> list[tuple[float, dict[str, float], float]]:
    """The other nodes in classes: (number, mean hops over each kind of link, latency).

    On a torus, flows over the same kinds of links that begin together always have the same rate,
    however many hops they have: max-min fair rates depend on which links are full, not on how often
    a flow crosses them. So offsets are in one class if they use the same kinds of links and have
    the same latency. The number of classes is about the sum of the sides, not their product.
    """
    network = cluster.network
    if network.topology == "torus":
        counts: dict[tuple[frozenset[str], float], float] = defaultdict(float)
        sums: dict[tuple[frozenset[str], float], dict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        for offset in product(*map(range, cluster.dims)):
            if any(offset):
                hops = torus_hops(cluster.dims, offset)
                key = (frozenset(hops), sum(hops.values()))
                counts[key] += 1.0
                for link, h in hops.items():
                    sums[key][link] += h
        return [
            (count, {link: h / count for link, h in sums[key].items()}, network.latency * key[1])
            for key, count in counts.items()
        ]
    hops = {"nic_out": 1.0, "nic_in": 1.0}
    if has_uplinks(cluster):
        far = {**hops, "leaf_up": 1.0, "leaf_down": 1.0}
        near = network.leaf - 1.0
        return [(near, hops, network.latency), (cluster.nodes - 1.0 - near, far, network.latency)]
    return [(cluster.nodes - 1.0, hops, network.latency)]
