"""The routing plan of a mixture of experts: which token rows an expert works on, in which order,
and who sends them.

Experts are sharded: expert e belongs to rank ``e // E_local``, E_local = E / R. An *entry* is one
choice of one token, ``(src * max_tokens + t) * k + j``: choice j of token t of rank ``src``; a
*row* is an entry whose expert is on this rank. Rows stand expert by expert, without gaps; those of
one expert in the order of ranks (rank, rank-1, rank-2, ... mod R), then t, then j. So own tokens
come first, and then what arrives first.

All of it is one int32 tensor, *table*, since an operator returns tensors; the fields are views of
it. There is no capacity and no dropped token: its size is the bound R * max_tokens * k, since a
token may choose one expert k times, and how many rows there are is known on the device only
(``offsets[-1]``). So tensors of rows are bound-sized: a dispatch takes memory for R * max_tokens *
k rows of y, whatever is routed here, and what follows it (an activation, gradients) as many each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.errors import require
from tileweave.ops.core.registry import rank_and_size
from tileweave.planning.schedules.grouped import GroupedProblem

_WORDS = 4  # fields begin at multiples of 16 bytes


@dataclass(frozen=True, eq=False)  # to compare tables would be to wait for the device
class RoutingPlan:
    """Where everything stands; made by ``dispatch_grouped_matmul`` (or :func:`reference_plan`).

    Sizes
    -----
    tokens : T of this rank, at most max_tokens, the bound of all ranks. topk : k. local_experts :
        E_local.
    bound : rows that can be at most: all entries. group_name : of the ranks it was made over; "":
        not known.

    Fields, int32, views of ``table``
    ---------------------------------
    offsets [E_local + 1] : first row of each local expert; ``offsets[-1]`` rows in all. row_entry
    [bound] : the entry of each row; undefined from row ``offsets[-1]`` on. entry_row [R *
    max_tokens * k] : the row of each entry, -1 where its expert is on another rank (or it has
    none). topk_ids [max_tokens, k] : own ids, -1 past T. send_order [R, max_tokens] : for each
    destination the own tokens with an expert there, each once, by lowest expert there,
        then t; undefined behind the last.
    send_offsets [R, E_local + 1] : tokens of send_order whose lowest expert there is below e; the
    last: all.
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
        """Of the table."""
        return layout_of(self.world_size, self.max_tokens, self.topk, self.local_experts)[0][-1]

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


def layout_of(
    world_size: int, max_tokens: int, topk: int, local_experts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(begins, sizes) of the fields in the table, in int32 words; one begin more: the size of the
    table."""
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
        begins.append(begins[-1] + -(-size // _WORDS) * _WORDS)
    return tuple(begins), sizes


def routing_plan(
    table: torch.Tensor,
    experts: torch.Tensor,
    tokens: int,
    max_tokens: int,
    topk: int,
    group_name: str,
) -> RoutingPlan:
    """The plan of an operator's arguments."""
    return RoutingPlan(
        table, tokens, max_tokens, topk, experts.shape[0], *rank_and_size(group_name)
    )


def shape_of(plan: RoutingPlan, cols: int, depth: int, dtype: torch.dtype) -> GroupedProblem:
    """The sizes of a call with weights [E_local, cols, depth]; the same on every rank."""
    return GroupedProblem(
        plan.world_size,
        plan.max_tokens,
        plan.topk,
        plan.local_experts,
        cols,
        depth,
        dtype.itemsize,
        str(dtype).removeprefix("torch."),
    )


def check_plan(plan: RoutingPlan, experts: torch.Tensor, group_name: str) -> None:
    """``plan`` is one of these experts, in this group: nothing in its table says so, and results
    would be wrong in silence."""
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
    """Memory for [rows, cols] of which a plan's rows are written: zeros where torch looks for NaN
    in gradients."""
    return like.new_zeros(rows, cols) if torch.is_anomaly_enabled() else like.new_empty(rows, cols)


def padded_ids(topk_ids: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """topk_ids [T, k] as int32 [max_tokens, k], -1 past T and for what int32 does not hold."""
    ids = topk_ids.new_full((max_tokens, topk_ids.shape[1]), -1, dtype=torch.int32)
    wide = topk_ids.long()  # beside int32, torch makes an int32 of 2**31
    ids[: topk_ids.shape[0]] = torch.where((wide >= 0) & (wide < 1 << 31), wide, -1)
    return ids


def reference_plan(
    everyone: torch.Tensor, rank: int, num_experts: int, tokens: int | None = None
) -> RoutingPlan:
    """The plan of ``rank`` from the ids of all ranks, ``everyone`` [R, max_tokens, k], -1 where
    there is none. Plain torch, no wait for the device.

    ``tokens``: T of this rank; None: max_tokens. Any group takes the plan.
    """
    size, max_tokens, topk = everyone.shape
    local = num_experts // size
    device = everyone.device
    ids = everyone.long()

    entry = torch.arange(size * max_tokens * topk, device=device)
    expert = ids.reshape(-1) - rank * local
    # those of others sort to the end
    expert = torch.where((expert >= 0) & (expert < local), expert, local)
    step = (rank - entry // max(max_tokens * topk, 1)) % size
    order = ((expert * size + step) * entry.numel() + entry).argsort()
    offsets = _ends_below(expert, local)
    row_entry = torch.where(entry < offsets[-1], order, -1)
    place = torch.empty_like(entry)
    place[order] = entry
    entry_row = torch.where(expert < local, place, -1)

    own = ids[rank]  # [max_tokens, k]
    there = own - torch.arange(size, device=device)[:, None, None] * local
    first = torch.where((there >= 0) & (there < local), there, local).amin(2)  # [R, max_tokens]
    send_order = (first * max_tokens + torch.arange(max_tokens, device=device)).argsort(1)
    send_offsets = torch.stack([_ends_below(lowest, local) for lowest in first])

    begins, sizes = layout_of(size, max_tokens, topk, local)
    table = torch.zeros(begins[-1], dtype=torch.int32, device=device)
    fields = (offsets, row_entry, entry_row, own, send_order, send_offsets)
    for begin, count, field in zip(begins[:-1], sizes, fields, strict=True):
        table[begin : begin + count] = field.reshape(-1)
    return RoutingPlan(
        table, max_tokens if tokens is None else tokens, max_tokens, topk, local, rank, size
    )


def _ends_below(expert: torch.Tensor, experts: int) -> torch.Tensor:
    """How many are below each of 0 to ``experts``; nothing waits for the device."""
    return torch.searchsorted(expert.sort().values, torch.arange(experts + 1, device=expert.device))
