"""Operands, calls and checks of the expert operators for ``check``, ``demo`` and ``stress``; see
``subjects.Subject``.

A shape is (tokens per rank, columns, K); each rank has two experts, and each token chooses two.
Choices depend on the shape only, so that a captured call can be replayed with other tokens and
weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.subjects import copied, recorded, wide
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.registry import name_of
from tileweave.ops.experts.routing_plan import RoutingPlan, reference_plan
from tileweave.planning.problem import Plan
from tileweave.profile.record import Recording

if TYPE_CHECKING:
    from tileweave.bench.subjects import Draw, Shape

_EXPERTS, _TOPK = 2, 2


@dataclass(frozen=True)
class ExpertOperands:
    """``x``: tokens [T, K], or rows [bound, K] of a combine; ``w`` [2, cols, K]: this rank's
    experts.

    ``bias``: weights [T, k] or None. ``values``: of all ranks' tokens [R * T, K], or of all their
    entries. ``experts``: of all ranks.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    plan: RoutingPlan
    ids: torch.Tensor
    values: torch.Tensor
    experts: torch.Tensor
    out_shape: tuple[int, int]

    def to(self, device: torch.device) -> ExpertOperands:
        """A copy on ``device``, with a plan of its own."""
        tensors = (self.x, self.w, self.bias, self.ids, self.values, self.experts)
        x, w, bias, ids, values, experts = copied(tensors, device)
        plan = reference_plan(ids, self.plan.rank, experts.shape[0])
        return ExpertOperands(x, w, bias, plan, ids, values, experts, self.out_shape)


def _routed(
    tokens: int, rank: int, size: int, device: torch.device
) -> tuple[torch.Tensor, RoutingPlan]:
    """Choices of all ranks [R, T, k], one in eight of them none, and this rank's plan."""
    generator = torch.Generator(device).manual_seed(31 * tokens + size)
    scores = torch.rand(size, tokens, _EXPERTS * size, generator=generator, device=device)
    ids = scores.topk(_TOPK, -1).indices.int()
    ids[scores[..., :_TOPK] < 0.125] = -1
    return ids, reference_plan(ids, rank, _EXPERTS * size)


def _nodes_of(size: int) -> int:
    """The nodes of the default group, if that is the one of ``size`` ranks: rows are sorted by
    them."""
    if not dist.is_initialized() or dist.get_world_size() != size:
        return 1
    ranks = known_topology_of(name_of(None))
    return ranks.nodes if ranks.per_node else 1


class _Experts(ABC):
    """What both operators share."""

    op: str

    def draw(self, shape: Shape, draw: Draw) -> ExpertOperands:
        rank, size, device = draw.rank, draw.size, draw.device
        ids, plan = _routed(shape.rows, rank, size, device)
        generator = torch.Generator(device).manual_seed(1_000_003 * draw.seed + shape.rows)
        experts = (
            torch.randn(
                size * _EXPERTS, shape.cols, shape.depth, generator=generator, device=device
            )
            / shape.depth**0.5
        )
        weights = torch.rand(size, shape.rows, _TOPK, generator=generator, device=device) + 0.1
        values = torch.randn(
            size * shape.rows * self._each(), shape.depth, generator=generator, device=device
        ).to(draw.dtype)
        experts = experts.to(draw.dtype)
        x, out_shape = self._own(values, plan, rank, shape)
        own = experts[rank * _EXPERTS : (rank + 1) * _EXPERTS].clone()
        bias = weights[rank].clone() if draw.bias else None
        return ExpertOperands(x, own, bias, plan, ids, values, experts, out_shape)

    @abstractmethod
    def _each(self) -> int:
        """Values of each token."""

    @abstractmethod
    def _own(
        self, values: torch.Tensor, plan: RoutingPlan, rank: int, shape: Shape
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """What this rank passes of the values, and the shape of its result."""

    @abstractmethod
    def call(
        self,
        operands: ExpertOperands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """The public operator on these operands."""

    @abstractmethod
    def explain(self, operands: ExpertOperands, group: dist.ProcessGroup) -> Plan:
        """The path that :meth:`call` takes."""

    def record(self, operands: ExpertOperands, group: dist.ProcessGroup) -> Recording:
        """Record bytes of tokens that have an expert on a peer."""
        size = dist.get_world_size(group)
        owners = torch.where(operands.ids >= 0, operands.ids // _EXPERTS, operands.plan.rank)
        sent = sum(
            int((owners[operands.plan.rank] == peer).any(-1).sum())
            for peer in range(size)
            if peer != operands.plan.rank
        )
        width = operands.out_shape[1] if self.op == GroupedMatmulCombine.op else operands.x.shape[1]
        nbytes = sent * width * operands.x.element_size()
        return recorded(self, operands, group, nbytes)


class DispatchGroupedMatmul(_Experts):
    op = "dispatch_grouped_matmul"

    def _each(self) -> int:
        return 1

    def _own(self, values, plan, rank, shape):
        return values[rank * shape.rows : (rank + 1) * shape.rows].clone(), (plan.bound, shape.cols)

    def call(self, operands, group, out=None, second=False):
        with torch.no_grad():
            ids = operands.ids[operands.plan.rank].contiguous()
            y, plan = tw.dispatch_grouped_matmul(operands.x, operands.w, ids, group=group, out=out)
            undefined = torch.arange(y.shape[0], device=y.device) >= plan.offsets[-1]
            # so that results can be compared bit by bit
            return y.masked_fill_(undefined[:, None], 0.0), None

    def explain(self, operands, group):
        return tw.explain(self.op, operands.x, operands.w, _TOPK, group=group)

    def error(self, operands: ExpertOperands, got: torch.Tensor, second: object = None) -> float:
        """Of the rows that there are."""
        rank, experts = operands.plan.rank, operands.experts.shape[0]
        nodes = _nodes_of(operands.plan.world_size)
        plan = reference_plan(operands.ids, rank, experts, nodes=nodes)
        rows = int(plan.offsets[-1])
        token = plan.row_entry[:rows].long() // _TOPK
        counts = plan.offsets.long().diff()
        want = wide(got.new_zeros(rows, operands.out_shape[1]))
        expert = torch.repeat_interleave(torch.arange(_EXPERTS, device=got.device), counts)
        for e in range(_EXPERTS):
            want[expert == e] = wide(operands.values[token[expert == e]]) @ wide(operands.w[e]).t()
        return float((wide(got[:rows]) - want).norm() / want.norm().clamp(min=1e-30))


class GroupedMatmulCombine(_Experts):
    op = "grouped_matmul_combine"

    def _each(self) -> int:
        return _TOPK

    def _own(self, values, plan, rank, shape):
        y = torch.zeros(plan.bound, shape.depth, dtype=values.dtype, device=values.device)
        rows = int(plan.offsets[-1])
        y[:rows] = values[plan.row_entry[:rows].long()]
        return y, (shape.rows, shape.cols)

    def call(self, operands, group, out=None, second=False):
        with torch.no_grad():
            return tw.grouped_matmul_combine(
                operands.x, operands.w, operands.plan, operands.bias, group=group, out=out
            ), None

    def explain(self, operands, group):
        return tw.explain(self.op, operands.x, operands.w, operands.plan)

    def error(self, operands: ExpertOperands, got: torch.Tensor, second: object = None) -> float:
        rank, tokens = operands.plan.rank, operands.plan.tokens
        ids = operands.ids[rank].long()
        values = wide(operands.values.view(-1, tokens, _TOPK, operands.values.shape[1])[rank])
        experts = operands.experts.clone()
        experts[rank * _EXPERTS : (rank + 1) * _EXPERTS] = operands.w
        want = wide(torch.zeros_like(got))
        for e in range(experts.shape[0]):
            token, j = (ids == e).nonzero(as_tuple=True)
            factor = 1.0 if operands.bias is None else operands.bias[token, j][:, None]
            want.index_add_(0, token, factor * (values[token, j] @ wide(experts[e]).t()))
        return float((wide(got) - want).norm() / want.norm().clamp(min=1e-30))
