"""The other two inputs of ASTRA-sim 2: the network as YAML (analytical backend) and the system as
JSON; and reading such a network.

Units of ASTRA-sim: bandwidth in GB/s of 2^30 bytes, latency in nanoseconds, local memory in GB/s,
peak in TFLOP/s. Its Switch counts two hops per message, so half of the latency is written, as in
its validated files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tileweave.errors import require
from tileweave.planning.costs import Costs
from tileweave.sim.collectives import bulk
from tileweave.sim.document import REQUIRED, Record, choice, integer, items, number, open_document
from tileweave.sim.machine import Cluster, Device, Network, make_cluster
from tileweave.sim.network import has_uplinks

_GIB = 2.0**30


def network_of(cluster: Cluster, costs: Costs) -> dict[str, list[Any]]:
    """Dimensions from the inside out: the node, then the network (a torus: a Ring per side)."""
    protocol = bulk(costs.c)
    device, network = cluster.device, cluster.network
    found: dict[str, list[Any]] = {"topology": [], "npus_count": [], "bandwidth": [], "latency": []}

    def dimension(topology: str, count: int, rate: float, latency: float) -> None:
        found["topology"].append(topology)
        found["npus_count"].append(count)
        found["bandwidth"].append(round(rate / _GIB, 3))
        found["latency"].append(round(latency * 1e9 / (2 if topology == "Switch" else 1), 2))

    if cluster.gpus_per_node > 1 or cluster.nodes == 1:
        mesh = device.inside == "mesh"
        # links per device; a rate is that of one link
        links = max(device.gpus_per_node - 1, 1) if mesh else 1
        rate = device.link_rate * protocol.fraction / links
        dimension(
            "FullyConnected" if mesh else "Switch", cluster.gpus_per_node, rate, costs.c.signal
        )
    if cluster.nodes > 1:
        rate = (
            network.nic_rate
            * network.fraction
            * (network.nics or cluster.gpus_per_node)
            / cluster.gpus_per_node
        )
        if network.topology == "torus":
            for side in cluster.dims:
                if side > 1:
                    dimension(
                        "Ring",
                        side,
                        2 * network.nic_rate * network.fraction / cluster.gpus_per_node,
                        network.latency,
                    )
        else:
            thin = network.oversubscription if has_uplinks(cluster) else 1.0
            dimension("Switch", cluster.nodes, rate / thin, network.latency)
    return found


def system_of(costs: Costs, dimensions: int) -> dict[str, Any]:
    """The system file: collectives as in this model, roofline off, because computation has
    durations."""
    ring, direct = ["ring"] * dimensions, ["direct"] * dimensions
    return {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 4,
        "all-reduce-implementation": ring,
        "all-gather-implementation": ring,
        "reduce-scatter-implementation": ring,
        "all-to-all-implementation": direct,
        "collective-optimization": "localBWAware",
        "local-mem-bw": round(costs.memory_rate / 1e9, 1),
        "peak-perf": round(costs.flops / 1e12, 1),
        "roofline-enabled": 0,
        "boost-mode": 0,
    }


def export(cluster: Cluster, costs: Costs, folder: Path) -> list[Path]:
    """Write ``network.yml`` and ``system.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    network = network_of(cluster, costs)
    lines = [f"{name}: [ {', '.join(map(str, values))} ]" for name, values in network.items()]
    (folder / "network.yml").write_text("\n".join(lines) + "\n", "utf-8")
    system = system_of(costs, len(network["topology"]))
    (folder / "system.json").write_text(json.dumps(system, indent=1) + "\n", "utf-8")
    return [folder / "network.yml", folder / "system.json"]


def read_network(path: Path, device: Device, costs: Costs) -> Cluster:
    """A network file as a cluster of ``device``. The first dimension is the node, unless all are
    rings: a torus of single GPUs.

    Rates are those of the file. The latency inside a node is not read, because ``costs`` has the
    measured one.
    """
    fields = {
        "topology": (items(choice(("Ring", "Switch", "FullyConnected"))), REQUIRED),
        "npus_count": (items(integer(1, 1 << 20)), REQUIRED),
        "bandwidth": (items(number(0.001, 1e6, "GB/s")), REQUIRED),
        "latency": (items(number(0.0, 1e9, "ns")), REQUIRED),
    }
    make: Callable[..., dict[str, Any]] = dict
    found = Record(fields, make)(open_document(path))
    kinds, counts, rates, latencies = (found[name] for name in fields)
    lengths = {len(found[name]) for name in fields}
    asked = f"{path}: lists of {sorted(lengths)} items"
    require(
        len(lengths) == 1 and 0 not in lengths,
        asked,
        "four lists of one length",
        "write one item per dimension",
    )
    begin = 0 if kinds[0] == "Ring" else 1  # the first dimension between nodes
    outer = kinds[begin:]
    require(
        set(outer) == {"Ring"} or (begin == 1 and outer in ((), ("Switch",))),
        f"{path}: {', '.join(kinds)}",
        "Switch or FullyConnected, alone or before one Switch or rings; or rings alone",
        "another network: nothing else is modelled",
    )
    require(
        len(set(rates[begin:])) <= 1 and len(set(latencies[begin:])) <= 1,
        f"{path}: rings of bandwidths {rates[begin:]} and latencies {latencies[begin:]}",
        "one of each for all rings",
        "another network: a torus of unlike sides is not modelled",
    )
    per_node = counts[0] if begin else 1
    if begin:
        device = _device(device, kinds[0], per_node, rates[0] * _GIB / bulk(costs.c).fraction)
    if not outer:
        return make_cluster(device, nodes=1, gpus_per_node=per_node)
    rings = outer[0] == "Ring"
    latency = latencies[-1] * 1e-9 * (1 if rings else 2)
    rate = rates[-1] * _GIB * (per_node / 2 if rings else 1.0)
    dims = tuple(counts[begin:]) if rings else ()
    network = Network(
        "ASTRA-sim network", rate, 1.0, latency, "torus" if rings else "fat_tree", dims=dims
    )
    return make_cluster(device, network, math.prod(counts[begin:]), per_node)


def _device(device: Device, kind: str, count: int, rate: float) -> Device:
    """``device``, connected inside its node as in the file. ``rate`` is that of a link; a mesh has
    one per peer."""
    mesh = kind == "FullyConnected"
    rate *= max(count - 1, 1) if mesh else 1
    return replace(
        device,
        inside="mesh" if mesh else "switch",
        bridge_rate=0.0,
        gpus_per_node=count,
        link_rate=rate,
    )
