"""Calls whose group is on several nodes: how data reaches the others, and what all of them do.

N nodes of L ranks. Data crosses between ranks with the same index in their nodes, the *rail*;
inside a node operators go on as in a group of its L ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch

from tileweave.errors import CaptureError, RankMismatchError
from tileweave.ops.core.collectives import enter_launch_order_of, leave_launch_order_of
from tileweave.ops.core.registry import workspace_of
from tileweave.transport.interface import Rail, Spanning
from tileweave.transport.nvshmem import rail_asked
from tileweave.transport.workspace import CALL, Workspace


class Ways(NamedTuple):
    """How data reaches the other ranks of a group that is on several nodes.

    nodes, each : number of nodes, and of ranks of each.
    node, local : the node of this rank, and its index there.
    inside : the workspace of the ranks of this node; None if it has one.
    near : the name of the group of the ranks of this node; "" if it has one.
    """

    nodes: int
    each: int
    node: int
    local: int
    rail: Rail
    inside: Workspace | None
    near: str

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.node * self.each + self.local

    @property
    def near_ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node * self.each, (self.node + 1) * self.each)

    @property
    def others(self) -> list[int]:
        """The other nodes, in order."""
        return [node for node in range(self.nodes) if node != self.node]


_FOUND: WeakKeyDictionary[Workspace, Ways] = WeakKeyDictionary()


def _ways(workspace: Workspace) -> Ways:
    """Those of the group of a workspace. Collective the first time."""
    found = _FOUND.get(workspace)
    if found is None:
        transport = cast(Spanning, workspace.transport)
        ranks, rank = transport.topology, transport.rank
        if transport.capturing():
            raise CaptureError(
                f"asked: the first call over {ranks} under CUDA-graph capture; allowed: capture "
                "after a call, in which NCCL connects the ranks; remedy: make a call with these "
                "sizes before, on every rank, or tw.warmup(...)"
            )
        inside, near = None, ""
        if ranks.per_node > 1:
            near = transport.inside()
            inside = workspace_of(near, transport.device)
        node, local = ranks.node_of[rank], rank % ranks.per_node
        workspace.rail = rail = _rail(transport)
        found = Ways(ranks.nodes, ranks.per_node, node, local, rail, inside, near)
        _FOUND[workspace] = found
    return found


def _rail(transport: Spanning) -> Rail:
    """What ``TILEWEAVE_RAIL`` asks for. Collective."""
    if rail_asked() == "nccl":
        return transport.rail()
    from tileweave.ops.core.nvshmem_rail import NvshmemRail

    return NvshmemRail(transport)


@contextmanager
def spanning_call(op: str, group_name: str, x: torch.Tensor, checksum: int) -> Iterator[Ways]:
    """A call: it is compared with those of peers, and is in the launch order of the device.

    ``checksum``: of what ranks must agree on; 0: nothing is compared.
    """
    workspace = workspace_of(group_name, x.device)
    ways, ledger, posted = _ways(workspace), workspace.ledger, False
    if checksum:
        calls = ledger.calls
        try:
            ledger.post(op, checksum)
        finally:
            CALL.posted = posted = ledger.calls > calls
    done = False
    enter_launch_order_of(x)
    try:
        if not ledger.hear(ways.rail.agree(ledger.entry)):
            ledger.compare(op)
            raise RankMismatchError(
                f"asked: {op} where a rank of another node makes another call; allowed: the same "
                "calls in the same order; remedy: look at what the ranks of other nodes call, "
                "then tileweave.close(group), and call again on every rank"
            )
        yield ways
        done = True
    finally:
        CALL.posted = posted and not done  # calls inside the node have set it, too
        ways.rail.join()
        leave_launch_order_of(x)


def add_in_order(own: torch.Tensor, arrived: torch.Tensor, node: int, out: torch.Tensor) -> None:
    """out = the sum over nodes of ``own`` [r, N] and of ``arrived`` [nodes, r, N], whose own part
    is not used; added in the order of nodes in float32 and rounded once."""
    if arrived.shape[0] == 2:  # of two there is one order
        torch.add(own, arrived[1 - node], out=out)
        return
    parts = [own if at == node else part for at, part in enumerate(arrived)]
    total = parts[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
