"""Which ranks of a group share memory. Integers only: no torch, no triton.

Ranks that share memory are a *node*. Ranks of different nodes with the same index inside their node
are a *rail*: data between nodes travels inside rails, so that each rank sends and receives as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# On GPUs, expert and embedding operators over nodes ran with one rank on each node only. With more
# they are unfused until they have run. Set it to True to try all that is unfused there.
TRY_ALL = False
NOT_ON_GPUS = "on GPUs this has run with one rank on each node only"


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a group.

    node_of : the node of each rank. Nodes are numbered by their lowest ranks.
    """

    node_of: tuple[int, ...]

    @classmethod
    def one_node(cls, size: int) -> Topology:
        """``size`` ranks that all share memory."""
        return _one_node(size)

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> Topology:
        """The topology of ranks, given the identity of the host of each."""
        number = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
        return cls(tuple(number[host] for host in hosts))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.node_of)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return max(self.node_of) + 1

    @property
    def per_node(self) -> int:
        """Ranks of each node; 0 if the nodes differ in that, or if the ranks of a node do not
        follow each other."""
        each, rest = divmod(self.size, self.nodes)
        even = not rest and self.node_of == tuple(rank // each for rank in range(self.size))
        return each if even else 0

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of ``node``, in order."""
        return tuple(rank for rank, at in enumerate(self.node_of) if at == node)

    def near(self, rank: int) -> tuple[int, ...]:
        """The ranks that share memory with ``rank``, itself among them, in order."""
        return self.ranks_of(self.node_of[rank])

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks with the index of ``rank`` inside their nodes, one per node, in order. Needs
        :attr:`per_node`."""
        return tuple(range(rank % self.per_node, self.size, self.per_node))

    def __str__(self) -> str:
        if self.per_node:
            return f"{_counted(self.nodes, 'node')} x {self.per_node}"
        ranks = ", ".join(
            "+".join(map(str, self.ranks_of(node))) for node in range(min(self.nodes, _NAMED))
        )
        more = ", ..." if self.nodes > _NAMED else ""
        return f"{self.nodes} nodes with ranks {ranks}{more}"


_NAMED = 4  # nodes whose ranks a text names


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@lru_cache(maxsize=16)
def _one_node(size: int) -> Topology:
    return Topology((0,) * size)
