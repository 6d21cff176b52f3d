"""Exchanges of tokens between experts by the kernels of serving engines (DeepEP,
github.com/deepseek-ai/DeepEP), next to NCCL's all-to-all.

normal        a token crosses to a node once, whatever number of its experts are there, and is
              passed on inside the node; for many tokens
low_latency   a row for each token and expert, straight to its rank; for few tokens
nccl          a row for each token and expert by NCCL's all-to-all

Tokens go out in FP8 with a scale per 128 columns, or in bf16, and come back in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tileweave.errors import require
from tileweave.sim.collectives import Group
from tileweave.sim.machine import Cluster

Kind = Literal["nccl", "normal", "low_latency"]
Way = Literal["dispatch", "combine"]
KINDS: tuple[Kind, ...] = ("nccl", "normal", "low_latency")
WAYS: tuple[Way, ...] = ("dispatch", "combine")
BLOCK = 128  # columns that share a scale in FP8


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one kind of exchange reaches. Fitted to the published figures of DeepEP on H800 that are
    not held out (``data/public.yaml``, group experts).

    latency : seconds, whatever the number of tokens.
    link, nic : fractions of the rates of data sheets, inside a node and between nodes.
    """

    latency: float
    link: float
    nic: float


KERNELS: dict[Kind, Kernels] = {
    "normal": Kernels(10e-6, 0.64, 0.88),
    "low_latency": Kernels(10e-6, 0.62, 0.82),
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of each rank and how they choose experts, evenly and at random.

    node_limit : nodes that the experts of a token may be on; 0: all.
    """

    count: float
    hidden: int
    experts: int
    top_k: int
    node_limit: int = 0

    def row(self, way: Way, fp8: bool) -> float:
        """Bytes of a token on its way."""
        return self.hidden * (1.0 + 4.0 / BLOCK if fp8 and way == "dispatch" else 2.0)

    def nodes(self, group: Group) -> float:
        """Nodes that a token goes to on average, its own included."""
        among = self._nodes_allowed(group)
        return _reached(among, self.experts * among / group.across, self.top_k)

    def ranks(self, group: Group) -> float:
        """Ranks that a token goes to on average, its own included."""
        allowed = self._nodes_allowed(group) / group.across
        return _reached(group.size * allowed, self.experts * allowed, self.top_k)

    def _nodes_allowed(self, group: Group) -> int:
        return min(self.node_limit or group.across, group.across)


def _reached(places: float, experts: float, draws: int) -> float:
    """How many of ``places``, which have ``experts`` in equal parts, ``draws`` different experts
    are at on average."""
    each = experts / places
    if experts - each < draws:
        return places
    none = 1.0
    for draw in range(draws):
        none *= (experts - each - draw) / (experts - draw)
    return places * (1.0 - none)


def exchange_time(
    kind: Kind, way: Way, tokens: Tokens, group: Group, cluster: Cluster, fp8: bool
) -> float:
    """Seconds of one dispatch or combine among the ranks of ``group``, by one of DeepEP's kinds."""
    require(kind in KERNELS, f"exchange {kind}", ", ".join(KERNELS), "price NCCL by a collective")
    if group.size == 1 or tokens.count <= 0.0:
        return 0.0
    kernels, row = KERNELS[kind], tokens.row(way, fp8)
    far = (group.across - 1) / group.across
    if kind == "low_latency":
        rows = tokens.count * tokens.top_k
        crossing, inside = rows * far, rows * (group.inside - 1) / group.size
    else:
        crossing = tokens.count * tokens.nodes(group) * far
        inside = tokens.count * tokens.ranks(group) * (group.inside - 1) / group.inside
    nics = cluster.network.nics or cluster.gpus_per_node
    rate = cluster.network.nic_rate * nics / cluster.gpus_per_node
    times = (
        crossing * row / (kernels.nic * rate),
        inside * row / (kernels.link * cluster.device.link_rate),
    )
    return kernels.latency + max(times)


def counted_bytes(unit: str, way: Way, tokens: Tokens, group: Group, fp8: bool) -> float:
    """The bytes that DeepEP's tests divide by a time: for each token one row per node (RDMA) or per
    rank (NVLink), its own included."""
    reached = tokens.nodes(group) if unit == "GB/s RDMA" else tokens.ranks(group)
    return tokens.count * reached * tokens.row(way, fp8)
