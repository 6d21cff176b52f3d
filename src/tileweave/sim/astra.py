"""ASTRA-sim 2's other two inputs: the network as YAML (analytical backend), the system as JSON; and the network back.

Its units: bandwidth in GB/s of 2^30 bytes, latency in nanoseconds, local memory in GB/s, peak in TFLOP/s. Its Switch counts two
hops for a message, so that a latency is written at half its value, as its own validated files do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tileweave.sim.collectives import bulk
from tileweave.sim.costs import Costs
from tileweave.sim.document import REQUIRED, Record, choice, integer, items, number, open_document
from tileweave.sim.machine import Cluster, Device, Network, make_cluster

_GIB = 2.0**30


def network_of(cluster: Cluster, costs: Costs) -> dict[str, list[Any]]:
    """Dimensions from the inside out: the node, then the network (a torus: a Ring a side)."""
    protocol = bulk(costs.c)
    device, network = cluster.device, cluster.network
    found: dict[str, list[Any]] = {"topology": [], "npus_count": [], "bandwidth": [], "latency": []}

    def dimension(topology: str, count: int, rate: float, latency: float) -> None:
        found["topology"].append(topology)
        found["npus_count"].append(count)
        found["bandwidth"].append(round(rate / _GIB, 3))
        found["latency"].append(round(latency * 1e9 / (2 if topology == "Switch" else 1), 2))

    if cluster.gpus_per_node > 1 or cluster.nodes == 1:
        kind = "FullyConnected" if device.inside == "mesh" else "Switch"
        dimension(kind, cluster.gpus_per_node, device.link_rate * protocol.fraction, costs.c.signal)
    if cluster.nodes > 1:
        rate = network.nic_rate * network.fraction * (network.nics or cluster.gpus_per_node) / cluster.gpus_per_node
        if network.topology == "torus":
            for side in cluster.dims:
                if side > 1:
                    dimension("Ring", side, 2 * network.nic_rate * network.fraction / cluster.gpus_per_node, network.latency)
        else:
            dimension("Switch", cluster.nodes, rate / network.oversubscription, network.latency)
    return found


def system_of(cluster: Cluster, costs: Costs, dimensions: int) -> dict[str, Any]:
    """The system file: collectives as this model has them, roofline off (computation has durations)."""
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
    """``network.yml`` and ``system.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    network = network_of(cluster, costs)
    lines = [f"{name}: [ {', '.join(map(str, values))} ]" for name, values in network.items()]
    (folder / "network.yml").write_text("\n".join(lines) + "\n", "utf-8")
    system = system_of(cluster, costs, len(network["topology"]))
    (folder / "system.json").write_text(json.dumps(system, indent=1) + "\n", "utf-8")
    return [folder / "network.yml", folder / "system.json"]


def read_network(path: Path, device: Device) -> Cluster:
    """A network file as a cluster of ``device``: the first dimension is the node, the rest joins nodes."""
    fields = {
        "topology": (items(choice(("Ring", "Switch", "FullyConnected"))), REQUIRED),
        "npus_count": (items(integer(1, 1 << 20)), REQUIRED),
        "bandwidth": (items(number(0.001, 1e6, "GB/s")), REQUIRED),
        "latency": (items(number(0.0, 1e9, "ns")), REQUIRED),
    }
    make: Callable[..., dict[str, Any]] = dict
    found = Record(fields, make)(open_document(path))
    counts = found["npus_count"]
    if len(counts) == 1:
        return make_cluster(device, nodes=1, gpus_per_node=counts[0])
    rings = all(kind == "Ring" for kind in found["topology"][1:])
    latency = found["latency"][1] * 1e-9 * (1 if rings else 2)
    rate = found["bandwidth"][1] * _GIB * (counts[0] / 2 if rings else 1.0)
    network = Network(
        "ASTRA-sim network", rate, 1.0, latency, "torus" if rings else "fat_tree", dims=tuple(counts[1:]) if rings else ()
    )
    return make_cluster(device, network, math.prod(counts[1:]), counts[0])
