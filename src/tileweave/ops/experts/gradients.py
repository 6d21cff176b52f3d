"""Gradients of grouped_matmul_combine.

The gradient of rows is the dual operator, the gradient of experts a grouped matmul, the gradient of
combine weights one dot product per row. Where the dual operator is fused, so is all of this: rows
after the last of the plan are neither read nor written, and the host waits for nothing.
torch.distributed makes two small exchanges: combine weights to the ranks of the experts, and their
gradients back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.registry import group_of, interpreting, machine_of
from tileweave.ops.experts import over_nodes
from tileweave.ops.experts.routing_plan import RoutingPlan, new_rows, plan_grouped
from tileweave.planning.schedules.grouped import DispatchConfig, plan_dispatch


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
    """Gradients of y, experts and weights from that of z [T, H]; empty where not needed."""
    group = group_of(group_name)
    ge, gw = grad.new_empty(0), grad.new_empty(0)
    everyone = None if weights is None else reference.gather_weights(weights, plan, group)
    ranks = known_topology_of(group_name)
    config = plan_grouped(plan_dispatch, plan, experts.transpose(1, 2), ranks).config
    if config is not None and config.nodes > 1:
        op, needs = "gradient of grouped_matmul_combine", int(need_weights)
        with over_nodes.arriving(op, grad, experts, plan, needs) as (tokens, near):
            if everyone is not None:
                everyone = over_nodes.entries_in_node(everyone, plan, near)
            gy, right, dots, rows = _gradient_of_rows(
                tokens, y, experts, near, everyone, config, need_experts, need_weights
            )
            dots = over_nodes.entries_of_all(dots, plan, near)
    else:
        gy, right, dots, rows = _gradient_of_rows(
            grad, y, experts, plan, everyone, config, need_experts, need_weights
        )
    if need_weights:
        gw = _sums_to_owners(dots, plan, group)
    if need_experts:
        ge = gradient_of_experts(rows, right, plan.offsets)
    return gy if need_y else grad.new_empty(0), ge, gw


def gradient_of_experts(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """left [n, N], right [n, K], offsets [E + 1] -> [E, N, K]: left.T @ right over the rows of each
    expert.

    Zeros for an expert without rows.
    """
    machine = machine_of(left.device)
    if machine.hopper:
        from tileweave.kernels.experts import weight_gradient_hopper as grouped_outer_hopper

        if grouped_outer_hopper.takes(left, right):
            return grouped_outer_hopper.grouped_outer(left, right, offsets, machine.num_sms)
    product = reference.grouped_outer(left, right, offsets).contiguous()
    if left.is_cuda or interpreting():  # a grouped matmul of cuBLAS may leave these undefined
        from tileweave.kernels.experts.rows import zero_unused

        zero_unused(product, offsets)
    return product


def _gradient_of_rows(
    grad: torch.Tensor,
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    everyone: torch.Tensor | None,
    config: DispatchConfig | None,
    keep: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gy, y times the weights, dots by entry, rows of grad) by the dual operator.

    ``keep``: also what the gradient of experts needs. Ranks must agree on ``need_weights``: those
    gradients are exchanged, and a rank that does not need them would leave the others waiting.
    """
    if config is None or config.kernel == "library":
        sent = plan.world_size > 1
        rows = reference.gather_rows(grad, plan, group_of(plan.group_name) if sent else None)
        g = reference.grouped_matmul(rows, experts.transpose(1, 2), plan.offsets)
        return *_weigh_rows(g, y, everyone, plan), rows
    y = y.contiguous()
    from tileweave.kernels.experts import rows as expert_rows
    from tileweave.ops.experts.dispatch_grouped_matmul_fused import run_fused

    g = new_rows(y, plan.bound, experts.shape[2])
    peers, rows = run_fused(
        grad, experts.transpose(1, 2), plan, g, plan.group_name, config, needs=int(need_weights)
    )
    if rows is None and keep:  # before the next call writes over them
        rows = expert_rows.gather_rows(grad, peers, plan.fields, *plan.sizes)
    weighted = torch.empty_like(y) if keep and everyone is not None else None
    dots = expert_rows.weigh_rows(g, y, everyone, weighted, plan.fields, plan.local_experts)
    return g, y if weighted is None else weighted, dots, g if rows is None else rows


def _weigh_rows(
    g: torch.Tensor, y: torch.Tensor, everyone: torch.Tensor | None, plan: RoutingPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """g, y [bound, I], weights of all entries -> (weight * g, weight * y, dot of g and y by entry
    in fp32).

    Entries without a row get 0.
    """
    row = plan.entry_row.long()
    dots = torch.where(row >= 0, (g.float() * y.float()).sum(1)[row.clamp(min=0)], 0.0)
    if everyone is None:
        return g, y, dots
    factor = everyone[plan.row_entry.long().clamp(0, plan.entries - 1)][:, None]
    return (g.float() * factor).to(g.dtype), (y.float() * factor).to(y.dtype), dots


def _sums_to_owners(
    dots: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """One number per entry -> [T, k] of this rank's tokens, from the ranks of the experts.

    A rank has 0 for entries of other ranks' experts.
    """
    return collectives.reduce_scatter(dots.view(-1, plan.topk), group)[: plan.tokens].contiguous()
