"""Collectives as flows over a cluster's links: direct, ring, pipelined and hierarchical, whole or
in K slices.

``nbytes`` is the size as in NCCL. All-gather and reduce-scatter: the gathered buffer. All-reduce:
the vector. All-to-all: what one rank has for all ranks, including its own part.

A group is ``inside`` ranks of a node times ``across`` nodes. Steps of a ring overlap (it is
pipelined), so a ring is one flow to the next rank plus a latency for each step. Between nodes NCCL
pipelines chunks through the links of a node and all NICs at once: both are flows of one phase, and
the slower of the two decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import simpy

from tileweave.errors import require
from tileweave.planning.costs import Coefficients
from tileweave.sim.machine import Cluster, Device, published_curve
from tileweave.sim.network import (
    Flow,
    Links,
    View,
    inside_hops,
    node_classes,
    shifted_hops,
    torus_hops,
    view,
)

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Algorithm = Literal["auto", "direct", "ring", "pipelined", "hierarchical"]
Phase = list[Flow]
MEASURED_LINK = 450e9  # bytes/s in one direction, of H200 and H100, which all curves are of
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True)
class Protocol:
    """How NCCL moves bytes: seconds before the first byte, fraction of the line rate inside a node,
    and seconds per ring step."""

    latency: float
    fraction: float
    step: float


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective: ``inside`` ranks of each of ``across`` nodes."""

    inside: int
    across: int = 1

    @property
    def size(self) -> int:
        return self.inside * self.across


def group_of(cluster: Cluster, size: int, inside_used: int = 1) -> Group:
    """``size`` ranks that are ``inside_used`` apart (the ranks between them belong to an inner
    group such as TP)."""
    inside = max(min(cluster.gpus_per_node // inside_used, size), 1)
    require(
        size % inside == 0,
        f"a group of {size}",
        f"a multiple of the {inside} that a node has room for",
        "change the degree",
    )
    return Group(inside, size // inside)


def group_on(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """The group of these ranks on their nodes; the ranks of a node have consecutive numbers."""
    counts = Counter(rank // cluster.gpus_per_node for rank in ranks)
    require(
        len(set(counts.values())) == 1,
        lambda: (
            f"a collective of {len(ranks)} ranks, "
            f"of which nodes have {sorted(set(counts.values()))}"
        ),
        f"as many on each of its nodes, which have {cluster.gpus_per_node} GPUs",
        "another number of GPUs a node",
    )
    return Group(max(counts.values()), len(counts))


def phases(
    kind: Kind, nbytes: float, group: Group, seen: View, c: Protocol, algorithm: Algorithm = "auto"
) -> list[Phase]:
    """The flows of one rank by phase; a phase starts when the one before has arrived at all
    ranks."""
    if group.size == 1 or nbytes <= 0.0:
        return []
    chosen = algorithm if algorithm != "auto" else _usual(kind, group)
    if chosen == "pipelined":
        require(
            kind != "all_to_all", "a pipelined all_to_all", "direct, hierarchical", "choose another"
        )
        return [_pipelined(kind, nbytes, group, seen, c)]
    if kind == "all_reduce":
        if chosen == "ring":
            return [
                _ring(
                    2.0 * nbytes * (group.size - 1) / group.size,
                    2 * (group.size - 1),
                    group,
                    seen,
                    c,
                )
            ]
        scatter = phases("reduce_scatter", nbytes, group, seen, c, chosen)
        return scatter + phases("all_gather", nbytes, group, seen, c, chosen)
    if chosen == "ring":
        require(
            kind != "all_to_all", "a ring all_to_all", "direct, hierarchical", "choose one of these"
        )
        return [_ring(nbytes * (group.size - 1) / group.size, group.size - 1, group, seen, c)]
    if chosen == "direct":
        return [_direct(nbytes / group.size, group, seen, c)]
    inner = _inside(nbytes, group, seen, c)
    # first inside the node, to the rank at the index of the receiver; then one message per node
    if kind == "all_to_all":
        return [flows for flows in (inner, _across(nbytes, group, seen, c)) if flows]
    # every rank of a node has its part of the sum of the node
    outer = _across(nbytes / group.inside, group, seen, c)
    return [
        flows for flows in ((outer, inner) if kind == "all_gather" else (inner, outer)) if flows
    ]


def _usual(kind: Kind, group: Group) -> Algorithm:
    """What NCCL does: rings inside a node; between nodes a ring or a tree for each NIC, with chunks
    pipelined through the node; and direct all-to-all."""
    if kind == "all_to_all":
        return "direct"
    return "pipelined" if group.across > 1 else "ring"


def _pipelined(kind: Kind, nbytes: float, group: Group, seen: View, c: Protocol) -> Phase:
    """Inside the node and between nodes concurrently, chunk by chunk: as many rings as a node has
    NICs, each of which leaves the node once. An all-reduce takes a tree where that has fewer steps
    between nodes."""
    times = 2.0 if kind == "all_reduce" else 1.0
    hops = group.across - 1
    if kind == "all_reduce":
        hops = min(hops, (group.across - 1).bit_length())
    latency = (
        c.latency
        + times * c.step * (group.inside - 1)
        + times * hops * seen.cluster.network.latency
    )
    flows = []
    if group.inside > 1:
        inner = times * nbytes * (group.inside - 1) / group.inside
        flows.append(Flow(inner, _around(seen, group.inside), latency, name="inside"))
    if seen.cluster.network.topology == "torus":  # over all axes at once
        each = times * nbytes / group.size
        return flows + _direct(each, Group(1, group.across), seen, c)
    outer = times * nbytes * (group.size - 1) / group.size / group.inside
    loads = seen.loads(_next_node(seen.cluster, Group(1, group.across)))
    return [*flows, Flow(outer, loads, latency, name="to other nodes")]


def _ring(nbytes: float, steps: int, group: Group, seen: View, c: Protocol) -> Phase:
    cluster = seen.cluster
    if group.across == 1:
        loads = _around(seen, group.inside)
        return [Flow(nbytes, loads, c.latency + c.step * steps, name="ring")]
    # one rank of each node sends to another node, the others to their neighbour: one flow per node
    if group.inside > 1:
        crossing = 1.0 / group.inside
        hops = _next_node(cluster, group)
        loads = {link: load * crossing for link, load in seen.loads(hops).items()}
        loads |= {link: load * (1 - crossing) for link, load in _around(seen, group.inside).items()}
    else:
        loads = seen.loads(_next_node(cluster, group))
    crossing = steps * (group.across - 1) / (group.size - 1)  # of the steps, those between nodes
    latency = c.latency + cluster.network.latency * crossing + c.step * (steps - crossing)
    return [Flow(nbytes, loads, latency, name="ring")]


def _around(seen: View, ranks: int) -> dict[str, float]:
    """The loads of rings among ``ranks`` of a node. In a mesh as many rings as a rank has peers
    share the message, so that every link is used."""
    if seen.cluster.device.inside != "mesh":
        return seen.loads(inside_hops(seen.cluster, 1))
    loads = {"up": 1.0, "down": 1.0}
    return loads | {f"pair{distance}": 1.0 / (ranks - 1) for distance in range(1, ranks)}


def _next_node(cluster: Cluster, group: Group) -> dict[str, float]:
    if cluster.network.topology == "torus":  # a Hamiltonian cycle: each node sends over one link
        axis = max(range(len(cluster.dims)), key=lambda a: cluster.dims[a])
        return torus_hops(
            cluster.dims, tuple(1 if a == axis else 0 for a in range(len(cluster.dims)))
        )
    if cluster.network.leaf % group.across == 0:  # neighbouring nodes of one leaf
        return {"nic_out": 1.0, "nic_in": 1.0}
    return shifted_hops(cluster, 1)


def _direct(each: float, group: Group, seen: View, c: Protocol) -> Phase:
    """Send ``each`` bytes to every other rank of the group at once."""
    flows = _inside(each * group.inside, group, seen, c, "") if group.inside > 1 else []
    if group.across > 1:
        scale = (group.across - 1) / max(seen.cluster.nodes - 1, 1)
        for count, hops, latency in node_classes(seen.cluster):
            flows.append(
                Flow(
                    each,
                    seen.loads(hops, count * scale * group.inside),
                    c.latency + latency,
                    name="to other nodes",
                )
            )
    return flows


def _inside(nbytes: float, group: Group, seen: View, c: Protocol, name: str = "inside") -> Phase:
    """Spread ``nbytes`` evenly over the ranks of the node, including the own one."""
    each = nbytes / group.inside
    return [
        Flow(
            each,
            seen.loads(inside_hops(seen.cluster, distance)),
            c.latency + c.step,
            name=name or "in the node",
        )
        for distance in range(1, group.inside)
    ]


def _across(nbytes: float, group: Group, seen: View, c: Protocol) -> Phase:
    """The same over the ranks of one rail, which has one rank of each node."""
    return (
        _direct(nbytes / group.across, Group(1, group.across), seen, c) if group.across > 1 else []
    )


@lru_cache(maxsize=65536)
def collective_time(
    kind: Kind,
    nbytes: float,
    group: Group,
    cluster: Cluster,
    c: Coefficients,
    algorithm: Algorithm = "auto",
    slices: int = 1,
    graph: bool = False,
) -> float:
    """Seconds until the last rank is done, on idle links, in ``slices`` that are pipelined through
    the phases."""
    if group.size == 1 or nbytes <= 0.0:
        return 0.0
    protocol = protocol_of(c, kind, nbytes / slices, group.inside, graph, cluster.device)
    seen = view(cluster, protocol.fraction)
    share = nbytes / slices
    return time_of(lambda: phases(kind, share, group, seen, protocol, algorithm), seen, slices)


def protocol_of(
    c: Coefficients,
    kind: Kind,
    nbytes: float,
    ranks: int,
    graph: bool = False,
    device: Device | None = None,
) -> Protocol:
    """How NCCL sends ``nbytes`` among ``ranks`` of a node, by the curve of the next larger measured
    world size. Beyond the largest measured one: by a published curve if there is one for such a
    ``device``, otherwise a step costs as much as between the two largest.

    ``device`` brings the rate of its links: what a message takes beyond its time on the wire does
    not depend on that rate, and is that of the links the curve was measured on.
    """
    curves = sorted(
        (curve for curve in c.nccl if curve.kind == kind), key=lambda curve: curve.world
    )
    extra = 0.0 if graph else c.nccl_eager
    link_rate = MEASURED_LINK if device is None else device.link_rate
    if device is not None and ranks > curves[-1].world:
        published = published_curve(kind, ranks, device)
        if published is not None:
            curve = published.curve
            fraction = curve.fraction(nbytes, link_rate / published.link_rate)
            return Protocol(curve.latency + extra, fraction, 0.0)
    curve = next((one for one in curves if one.world >= ranks), curves[-1])
    steps = {
        one.world: 1
        if kind == "all_to_all"
        else (one.world - 1) * (2 if kind == "all_reduce" else 1)
        for one in curves
    }
    step = 0.0
    if len(curves) > 1 and kind != "all_to_all":
        before, last = curves[-2:]
        step = max(last.latency - before.latency, 0.0) / (steps[last.world] - steps[before.world])
    return Protocol(
        max(curve.latency - step * steps[curve.world], 0.0) + extra,
        curve.fraction(nbytes, link_rate / MEASURED_LINK),
        step,
    )


def bulk(c: Coefficients) -> Protocol:
    """The protocol of large messages."""
    return protocol_of(c, "all_gather", float("inf"), 1 << 20)


def time_of(make: Callable[[], list[Phase]], seen: View, slices: int = 1) -> float:
    """Seconds of ``slices`` copies of the phases that ``make`` makes, on idle links."""
    env = simpy.Environment()
    links = Links(env, seen.capacities)
    env.run(env.process(run_sliced(env, links, make, slices)))
    return float(env.now)


def run_sliced(
    env: simpy.Environment, links: Links, make: Callable[[], list[Phase]], slices: int
) -> Generator[simpy.Event, Any, None]:
    """``slices`` copies of the phases as a pipeline: slice i enters phase p after it left p-1 and
    slice i-1 left p."""
    before: list[simpy.Event] = []
    last: simpy.Event = env.timeout(0.0)
    for _ in range(slices):
        done: list[simpy.Event] = []
        previous: simpy.Event | None = None
        for index, flows in enumerate(make()):
            waits = [
                event
                for event in (previous, before[index] if before else None)
                if event is not None
            ]
            previous = env.process(_phase(env, links, flows, waits))
            done.append(previous)
        before, last = done, previous or last
    yield last


def _phase(
    env: simpy.Environment, links: Links, flows: Phase, waits: list[simpy.Event]
) -> Generator[simpy.Event, Any, None]:
    if waits:
        yield env.all_of(waits)
    yield links.send(flows)
