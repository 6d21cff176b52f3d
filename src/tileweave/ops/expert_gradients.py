"""Gradients of the expert operators: the dual operator for rows, grouped products for weights, sums for combine weights."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops import reference
from tileweave.ops.registry import group_of
from tileweave.ops.routing_plan import RoutingPlan


def combine_gradients(
    grad: torch.Tensor,
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    group_name: str,
    need_y: bool,
    need_experts: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of grouped_matmul_combine for z's gradient [T, H]: of y, experts and weights; empty where not needed."""
    group = group_of(group_name)
    gy, ge, gw = (grad.new_empty(0) for _ in range(3))
    rows = reference.gather_rows(grad, plan, group)
    factors = None
    if weights is not None:
        factors = reference.gather_weights(weights, plan, group)[plan.row_entry.long().clamp(0, plan.entries - 1)]
    weighted = y
    if need_y or need_weights:
        g = reference.grouped_matmul(rows, experts.transpose(1, 2), plan.offsets)
        gy, weighted, dots = weigh_rows(g, y, factors)
        if need_weights:
            gw = sums_to_owners(dots, plan, group)
    elif factors is not None:
        weighted = (y.float() * factors[:, None]).to(y.dtype)
    if need_experts:
        ge = reference.grouped_outer(rows, weighted, plan.offsets)
    return gy, ge, gw


def weigh_rows(
    g: torch.Tensor, y: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """g, y [bound, I], factors [bound] fp32 -> (factor * g, factor * y, dots of g and y, fp32 [bound]), row by row."""
    dots = (g.float() * y.float()).sum(1)
    if factors is None:
        return g, y, dots
    return (g.float() * factors[:, None]).to(g.dtype), (y.float() * factors[:, None]).to(y.dtype), dots


def sums_to_owners(dots: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """A number for each row -> [T, k] of own tokens: each entry's number, from the rank of its expert; 0 without one."""
    row = plan.entry_row.long()
    entries = torch.where(row >= 0, dots[row.clamp(min=0)], 0.0)
    return reference.reduce_scatter(entries.view(-1, plan.topk), group)[: plan.tokens].contiguous()
