"""The routing plan of a mixture of experts: the rows of each expert, their order, and what ranks
send.

Experts are sharded: expert e belongs to rank ``e // E_local``, E_local = E / R. An *entry* is one
choice of one token, ``(src * max_tokens + t) * k + j``: choice j of token t of rank ``src``. A
*row* is an entry whose expert is on this rank. Rows are sorted by expert, without gaps; those of
one expert by rank (rank, rank-1, rank-2, ... mod R), then t, then j. So this rank's own tokens come
first, and then those that arrive first. Over N nodes of L ranks, where tokens arrive through the
rank of this node with the index of their own rank in its node, they are sorted by that index
(index, index-1, ... mod L), then by node.

All of it is one int32 tensor, *table*, since an operator returns tensors; the fields are views of
it. There is no capacity and no dropped token: its size is the bound R * max_tokens * k, since a
token may choose one expert k times, and only the device knows how many rows there are
(``offsets[-1]``). So tensors of rows have the size of the bound: a dispatch takes memory for R *
max_tokens * k rows of y, whatever is routed here, and so does each tensor that follows (an
activation, gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from tileweave.errors import require
from tileweave.ops.core.nodes import machine_in
from tileweave.ops.core.registry import interpreting, machine_of, rank_and_size
from tileweave.planning.machine import Machine
from tileweave.planning.problem import Plan
from tileweave.planning.schedules.grouped import GroupedProblem
from tileweave.planning.topology import Topology

C = TypeVar("C")
_WORDS = 4  # fields begin at multiples of 16 bytes


@dataclass(frozen=True, eq=False)  # comparing tables would wait for the device
class RoutingPlan:
    """The rows of this rank's experts; made by ``dispatch_grouped_matmul`` (or
    :func:`reference_plan`).

    Fields that are tensors are int32 views of ``table``.

    Attributes
    ----------
    tokens : int
        T of this rank, at most ``max_tokens``.

    max_tokens : int
        The largest number of tokens of any rank.

    topk : int
        k, the number of choices per token.

    local_experts : int
        E_local, the number of experts per rank.

    bound : int
        The largest possible number of rows: that of all entries.

    group_name : str
        The group of the ranks that made the plan; "": not known.

    offsets : [E_local + 1]
        First row of each local expert; ``offsets[-1]`` is the number of rows.

    row_entry : [bound]
        The entry of each row; undefined from row ``offsets[-1]`` on.

    entry_row : [R * max_tokens * k]
        The row of each entry; -1 if its expert is on another rank, or if it has none.

    topk_ids : [max_tokens, k]
        Ids of this rank's tokens; -1 from T on.

    send_order : [R, max_tokens]
        For each destination, this rank's tokens with an expert there, each once, sorted by lowest
        expert there, then by t; undefined after the last.

    send_offsets : [R, E_local + 1]
        How many tokens of send_order have a lowest expert there below e; the last: all.

    everyone : [R, max_tokens, k]
        Ids of the tokens of all ranks; undefined in a plan that the ranks of one node made.
    """

    table: torch.Tensor
    tokens: int
    max_tokens: int
    topk: int
    local_experts: int
    rank: int
    world_size: int
    group_name: str = ""

    @property
    def bound(self) -> int:
        return self.entries

    @property
    def entries(self) -> int:
        return self.world_size * self.max_tokens * self.topk

    @property
    def words(self) -> int:
        """Number of int32 words of the table."""
        return words_of(self.world_size, self.max_tokens, self.topk, self.local_experts)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """What kernels over rows take after the fields."""
        return self.local_experts, self.max_tokens, self.topk, self.rank, self.world_size

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """The fields in the order of the table, flat."""
        begins, sizes = layout_of(self.world_size, self.max_tokens, self.topk, self.local_experts)
        return tuple(
            self.table[begin : begin + size] for begin, size in zip(begins[:-1], sizes, strict=True)
        )

    def _field(self, index: int) -> torch.Tensor:
        begins, sizes = layout_of(self.world_size, self.max_tokens, self.topk, self.local_experts)
        return self.table[begins[index] : begins[index] + sizes[index]]

    @property
    def offsets(self) -> torch.Tensor:
        return self._field(0)

    @property
    def row_entry(self) -> torch.Tensor:
        return self._field(1)

    @property
    def entry_row(self) -> torch.Tensor:
        return self._field(2)

    @property
    def topk_ids(self) -> torch.Tensor:
        return self._field(3).view(self.max_tokens, self.topk)

    @property
    def send_order(self) -> torch.Tensor:
        return self._field(4).view(self.world_size, self.max_tokens)

    @property
    def send_offsets(self) -> torch.Tensor:
        return self._field(5).view(self.world_size, self.local_experts + 1)

    @property
    def everyone(self) -> torch.Tensor:
        shape = (self.world_size, self.max_tokens, self.topk)
        begin = layout_of(*shape, self.local_experts)[0][-1]
        return self.table[begin : begin + self.entries].view(shape)


def layout_of(
    world_size: int, max_tokens: int, topk: int, local_experts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(begins, sizes) of the fields that kernels take, in int32 words of the table.

    The last of begins is where they end.
    """
    entries = world_size * max_tokens * topk
    sizes = (
        local_experts + 1,
        entries,
        entries,
        max_tokens * topk,
        world_size * max_tokens,
        world_size * (local_experts + 1),
    )
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + size + -size % _WORDS)
    return tuple(begins), sizes


def words_of(world_size: int, max_tokens: int, topk: int, local_experts: int) -> int:
    """The size of a table in int32 words. It does not depend on nodes, which a compiler does not
    know."""
    everyone = world_size * max_tokens * topk
    begin = layout_of(world_size, max_tokens, topk, local_experts)[0][-1]
    return begin + everyone + -everyone % _WORDS


def routing_plan(
    table: torch.Tensor,
    experts: torch.Tensor,
    tokens: int,
    max_tokens: int,
    topk: int,
    group_name: str,
) -> RoutingPlan:
    """The plan from the arguments of an operator."""
    return RoutingPlan(
        table, tokens, max_tokens, topk, experts.shape[0], *rank_and_size(group_name), group_name
    )


def shape_of(plan: RoutingPlan, weights: torch.Tensor, nodes: int = 1) -> GroupedProblem:
    """The sizes of a call with ``weights`` [E_local, N, K]; the same on every rank."""
    dtype = weights.dtype
    return GroupedProblem(
        plan.world_size,
        plan.max_tokens,
        plan.topk,
        plan.local_experts,
        weights.shape[1],
        weights.shape[2],
        dtype.itemsize,
        str(dtype).removeprefix("torch."),
        nodes,
    )


def plan_grouped(
    planner: Callable[[GroupedProblem, Machine, bool], Plan[C]],
    plan: RoutingPlan,
    weights: torch.Tensor,
    ranks: Topology,
) -> Plan[C]:
    """What ``planner`` plans for a call with ``weights`` in a group of ``ranks``; the same on every
    rank. Nodes of unlike numbers of ranks have no path between them."""
    even = ranks.per_node > 0
    machine = machine_of(weights.device) if even else machine_in(ranks, weights.device)
    return planner(shape_of(plan, weights, ranks.nodes if even else 1), machine, interpreting())


def check_plan(plan: RoutingPlan, experts: torch.Tensor, group_name: str) -> None:
    """Check that ``plan`` is for these experts and this group.

    Its table does not show it, and results would be silently wrong.
    """
    require(
        experts.shape[0] == plan.local_experts,
        lambda: f"{experts.shape[0]} local experts with a plan of {plan.local_experts}",
        "the plan's",
        "pass all experts of this rank",
    )
    require(
        plan.group_name == group_name or not plan.group_name,
        lambda: f"group {group_name!r} with a plan made in group {plan.group_name!r}",
        "the plan's group",
        "pass the group= of the dispatch that made the plan",
    )


def new_rows(like: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Memory for [rows, cols], of which the rows of a plan are written.

    Zeros where torch looks for NaN in gradients.
    """
    return like.new_zeros(rows, cols) if torch.is_anomaly_enabled() else like.new_empty(rows, cols)


def padded_ids(topk_ids: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """topk_ids [T, k] as int32 [max_tokens, k]; -1 from T on and for numbers that int32 cannot
    hold."""
    ids = topk_ids.new_full((max_tokens, topk_ids.shape[1]), -1, dtype=torch.int32)
    wide = topk_ids.long()  # with an int32, torch would convert 2**31 to int32
    ids[: topk_ids.shape[0]] = torch.where((wide >= 0) & (wide < 1 << 31), wide, -1)
    return ids


def reference_plan(
    everyone: torch.Tensor,
    rank: int,
    num_experts: int,
    tokens: int | None = None,
    nodes: int = 1,
) -> RoutingPlan:
    """The plan of ``rank`` in plain torch, from the ids of all ranks; does not wait for the device.

    ``everyone`` [R, max_tokens, k], -1 for no expert. ``tokens``: T of this rank; None: max_tokens.
    ``nodes``: of equally many ranks, for the order of rows. The plan is valid for any group.
    """
    size, max_tokens, topk = everyone.shape
    local = num_experts // size
    device = everyone.device
    ids = everyone.long()

    entry = torch.arange(size * max_tokens * topk, device=device)
    expert = ids.reshape(-1) - rank * local
    # entries of other ranks are sorted to the end
    expert = torch.where((expert >= 0) & (expert < local), expert, local)
    source, near = entry // max(max_tokens * topk, 1), size // nodes
    step = (rank - source) % near * nodes + source // near
    order = ((expert * size + step) * entry.numel() + entry).argsort()
    offsets = _ends_below(expert, local)
    row_entry = torch.where(entry < offsets[-1], order, -1)
    place = torch.empty_like(entry)
    place[order] = entry
    entry_row = torch.where(expert < local, place, -1)

    own = ids[rank]  # [max_tokens, k]
    fields = (offsets, row_entry, entry_row, own, *_sends(own, size, local))
    plan = _of_fields(fields, max_tokens if tokens is None else tokens, local, rank, size)
    plan.everyone.copy_(everyone)
    return plan


def _sends(own: torch.Tensor, size: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(send_order, send_offsets) of own ids [max_tokens, k] for ``size`` ranks of ``local`` experts
    each."""
    token = torch.arange(own.shape[0], device=own.device)
    there = own.long() - torch.arange(size, device=own.device)[:, None, None] * local
    first = torch.where((there >= 0) & (there < local), there, local).amin(2)  # [R, max_tokens]
    order = (first * own.shape[0] + token).argsort(1)
    return order, torch.stack([_ends_below(lowest, local) for lowest in first])


def _of_fields(
    fields: tuple[torch.Tensor, ...],
    tokens: int,
    local: int,
    rank: int,
    size: int,
    group_name: str = "",
) -> RoutingPlan:
    """The plan with these fields, in the order of the table; the fourth is ids [max_tokens, k]."""
    max_tokens, topk = fields[3].shape
    begins, sizes = layout_of(size, max_tokens, topk, local)
    words = words_of(size, max_tokens, topk, local)
    table = torch.zeros(words, dtype=torch.int32, device=fields[0].device)
    for begin, count, field in zip(begins[:-1], sizes, fields, strict=True):
        table[begin : begin + count] = field.reshape(-1)
    return RoutingPlan(table, tokens, max_tokens, topk, local, rank, size, group_name)


def plan_in_node(plan: RoutingPlan, nodes: int, group_name: str, sends: bool) -> RoutingPlan:
    """The plan of the ranks of this node, for the same rows, where each of them has the tokens of
    all ranks of its rail: token t of node b is number ``b * max_tokens + t``.

    group_name : of the ranks of the node.
    sends : whether send_order and send_offsets are needed; otherwise they are zeros.
    """
    near, local, most, topk = (
        plan.world_size // nodes,
        plan.local_experts,
        plan.max_tokens,
        plan.topk,
    )
    node, index = divmod(plan.rank, near)
    each = max(most * topk, 1)  # choices of a rank
    source, choice = plan.row_entry // each, plan.row_entry % each
    row_entry = (source % near * nodes + source // near) * each + choice
    entry_row = plan.entry_row.view(nodes, near, -1).transpose(0, 1)
    ids = plan.everyone.view(nodes, near, most, topk)[:, index].reshape(-1, topk)
    ids = ids - node * near * local
    ids = torch.where((ids >= 0) & (ids < near * local), ids, -1)
    if sends:
        order, offsets = _sends(ids, near, local)
    else:
        order, offsets = (
            ids.new_zeros(near * nodes * most),
            ids.new_zeros(near * (local + 1)),
        )
    fields = (plan.offsets, row_entry, entry_row, ids, order, offsets)
    return _of_fields(fields, nodes * most, local, index, near, group_name)


def _ends_below(expert: torch.Tensor, experts: int) -> torch.Tensor:
    """How many are below each of 0 to ``experts``; does not wait for the device."""
    return torch.searchsorted(expert.sort().values, torch.arange(experts + 1, device=expert.device))
