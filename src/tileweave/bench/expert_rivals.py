"""The expert operators on an all-gather and a reduce-scatter: the rival ``gathered`` of
``experts.py``.

Each token is sent to every other rank once, and a partial sum comes back from each: R - 1 rows per
token, where an all-to-all of choices sends k (R - 1) / R of them. So it sends less if top-k is
above the number of ranks R.

As the unfused path, it is given the routing: choices, weights and positions of rows. Top-k sums are
one pass: by the lookup kernel of tileweave, which reads only rows of this rank, or in a graph by
torch, since there the positions of products change between calls and sizes are bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.expert_cases import COMBINE
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.transport.torch_collectives import all_gather_flat, reduce_scatter_flat

if TYPE_CHECKING:
    from tileweave.bench.expert_cases import ExpertCase
    from tileweave.ops.experts.routing_plan import RoutingPlan

_PIECE = 256  # columns per piece of the lookup kernel


class Gathered:
    """What calls of one case share.

    Memory for the tokens of all ranks, their rows on this rank, partial sums and the result.
    """

    def __init__(
        self, case: ExpertCase, x: torch.Tensor, bound: int, group: dist.ProcessGroup
    ) -> None:
        self.case, self.group = case, group
        tokens = dist.get_world_size(group) * case.tokens
        if case.op == COMBINE:
            self.partial = x.new_empty(tokens, case.cols)
            self.out = x.new_empty(case.tokens, case.cols)
        else:
            self.everyone = x.new_empty(tokens, case.depth)
            self.rows = x.new_empty(bound, case.depth)

    def dispatch(self, x: torch.Tensor, experts: torch.Tensor, order: Order) -> torch.Tensor:
        """All tokens to all ranks, the rows of this rank's experts, the grouped matmul."""
        all_gather_flat(self.everyone, x, group=self.group)
        rows = self.rows[: order.tokens.numel()]
        torch.index_select(self.everyone, 0, order.tokens, out=rows)
        return reference.grouped_matmul(rows, experts, order.plan.offsets)

    def combine(self, x: torch.Tensor, experts: torch.Tensor, order: Order) -> torch.Tensor:
        """The grouped matmul, weighted sums of each token's rows on this rank, their sum over
        ranks."""
        products = reference.grouped_matmul(x, experts, order.plan.offsets)
        if self.case.graph:
            sums = torch.embedding_bag(
                products,
                order.rows,
                order.begins,
                False,
                0,
                False,
                order.weights,
                True,
                products.shape[0] - 1,
            )[0]
        else:
            pieces = (t.view(-1, order.piece) for t in (products, self.partial))
            sums = tw.embedding_bag(
                [next(pieces)],
                order.rows,
                order.begins,
                per_sample_weights=order.weights,
                out=next(pieces),
            ).view_as(self.partial)
        if not x.is_cuda:
            return collectives.reduce_scatter(sums, self.group)
        reduce_scatter_flat(self.out, sums, group=self.group)
        return self.out


class Order:
    """The indices of one routing.

    tokens : of each row of this rank, for a dispatch.

    rows, begins, weights : of a combine: the rows of each token of all ranks, where those of each
    token begin, and the end, and their weights. In a graph each token has k rows, and the last row,
    which no expert has, adds nothing. Otherwise it has those of this rank, once per piece of their
    columns.
    """

    def __init__(
        self,
        case: ExpertCase,
        plan: RoutingPlan,
        rows: int,
        weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.plan, entry = plan, plan.row_entry[:rows].long()
        weights = weights.reshape(-1)  # [R T k] of all entries
        if case.graph:
            assert rows < plan.bound, "one row is left over"
            self.tokens = torch.zeros(plan.bound, dtype=torch.int64, device=entry.device)
            self.tokens[:rows] = entry // case.topk
            found = plan.entry_row.long()
            self.rows = torch.where(found >= 0, found, plan.bound - 1)
            self.begins = torch.arange(0, plan.entries + 1, case.topk, device=entry.device)
            self.weights = weights.to(dtype)  # the kernel of torch takes no others
            return
        self.tokens = entry // case.topk
        self.piece = math.gcd(case.cols, _PIECE)
        pieces = case.cols // self.piece
        row = torch.argsort(entry)  # by token, then choice
        piece = torch.arange(pieces, device=entry.device)
        bag = (self.tokens[row][:, None] * pieces + piece).view(-1)
        order = torch.argsort(bag, stable=True)
        self.rows = (row[:, None] * pieces + piece).view(-1)[order].int()
        self.weights = (
            weights[entry[row]][:, None].expand(-1, pieces).reshape(-1)[order].contiguous()
        )
        counts = torch.bincount(bag, minlength=plan.entries // case.topk * pieces)
        self.begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
