"""Compare our network model with SimGrid, an independent and validated simulator.

SimGrid simulates every flow of every rank; here one rank represents all. All-to-all and ring
all-reduce over a switch and over a torus are compared, once with SimGrid's plain max-min fairness
(the same model, so they should agree) and once with its default, which is calibrated for TCP over
Ethernet (a different model, for orientation).

SimGrid is needed only here: `apt install python3-simgrid` (Debian, for the Python of the system),
or `pip install simgrid`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tileweave.errors import UnsupportedError
from tileweave.sim.collectives import Group, Kind, Protocol, phases, time_of
from tileweave.sim.machine import Cluster, Network, make_cluster
from tileweave.sim.network import view

_RATE, _SWITCH_LATENCY, _HOP_LATENCY = 45e9, 5e-6, 1.5e-6
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Comparison:
    """One exchange on ``nodes`` nodes: seconds by our model, by SimGrid with the same fairness, and
    by SimGrid's default."""

    kind: str
    topology: str
    nodes: int
    nbytes: float
    ours: float
    simgrid: float
    simgrid_default: float

    @property
    def error(self) -> float:
        return self.ours / self.simgrid - 1.0


@cache
def interpreter() -> str | None:
    """A Python that has SimGrid: this one or that of the system; None if neither has."""
    for python in (sys.executable, "/usr/bin/python3", shutil.which("python3") or ""):
        if python and Path(python).exists():
            done = subprocess.run(
                [python, "-c", "import simgrid"], capture_output=True, timeout=60, check=False
            )
            if done.returncode == 0:
                return python
    return None


def compare(nodes: int = 128, progress: Callable[[str], None] = lambda _: None) -> list[Comparison]:
    """All exchanges. Raises :class:`UnsupportedError` without SimGrid."""
    python = interpreter()
    if python is None:
        raise UnsupportedError(
            "asked: the comparison with SimGrid; allowed: where Python can import simgrid; "
            "remedy: apt install python3-simgrid, or pip install simgrid"
        )
    found = []
    for topology in ("switch", "torus"):
        for kind, nbytes in (("all_to_all", 128e6), ("all_reduce", 128e6), ("all_to_all", 1e6)):
            progress(f"{kind} of {nbytes / 1e6:g} MB over a {topology}")
            found.append(_compare(python, kind, topology, nodes, nbytes))  # type: ignore[arg-type]
    return found


def cluster_of(topology: str, nodes: int) -> Cluster:
    """Nodes of one GPU each, with links at their full rate."""
    torus = topology == "torus"
    latency = _HOP_LATENCY if torus else _SWITCH_LATENCY
    return make_cluster(
        "h200", Network(topology, _RATE, 1.0, latency, "torus" if torus else "fat_tree"), nodes, 1
    )


def ours(kind: Kind, cluster: Cluster, nbytes: float) -> float:
    """Seconds by our model, without the overhead of NCCL."""
    seen, group, plain = view(cluster, 1.0), Group(1, cluster.nodes), Protocol(0.0, 1.0, 0.0)
    algorithm = "ring" if kind == "all_reduce" else "direct"
    return time_of(lambda: phases(kind, nbytes, group, seen, plain, algorithm), seen)


def _compare(python: str, kind: Kind, topology: str, nodes: int, nbytes: float) -> Comparison:
    cluster = cluster_of(topology, nodes)
    asked: dict[str, Any] = {
        "topology": "torus" if topology == "torus" else "star",
        "dims": list(cluster.dims) if topology == "torus" else [nodes],
        "rate": _RATE,
        "latency": cluster.network.latency,
        "rounds": rounds_of(kind, nodes, nbytes),
    }
    times = [_run(python, {**asked, "model": model}) for model in ("fluid", "default")]
    return Comparison(
        kind, topology, nodes, nbytes, ours(kind, cluster, nbytes), times[0], times[1]
    )


def rounds_of(kind: Kind, nodes: int, nbytes: float) -> list[list[tuple[int, int, float]]]:
    """All flows of all ranks: all at once, or by ring step."""
    piece = nbytes / nodes
    if kind == "all_to_all":
        return [[(a, b, piece) for a in range(nodes) for b in range(nodes) if a != b]]
    return [[(a, (a + 1) % nodes, piece) for a in range(nodes)] for _ in range(2 * (nodes - 1))]


def _run(python: str, asked: dict[str, Any]) -> float:
    script = Path(__file__).with_name("simgrid_run.py")
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode != 0 or not lines:
        raise UnsupportedError(
            "asked: SimGrid; allowed: a run that ends; "
            f"remedy: see its message: {done.stderr[-400:]}"
        )
    return float(lines[-1].split()[1])
