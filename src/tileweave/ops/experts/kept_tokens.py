"""Tokens that arrived in a dispatch, kept for the backward, and the token of each row, from them.

Kept tokens are [(R - 1) * max_tokens, K]: those of rank-1, rank-2, ... mod R, on the fused and the
unfused path. A graph of a compiler may outlive its process, and does not know which path that one
took.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tileweave.ops.core import collectives
from tileweave.ops.experts.routing_plan import RoutingPlan


def new_kept(x: torch.Tensor, plan: RoutingPlan, keep: bool) -> torch.Tensor:
    """Memory for kept tokens; empty without ``keep``."""
    return x.new_empty((plan.world_size - 1) * plan.max_tokens if keep else 0, x.shape[1])


def receive(x: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """x [T, K] of this rank's tokens -> the tokens of all other ranks, by an all-gather."""
    if plan.world_size == 1:
        return new_kept(x, plan, True)
    everyone = collectives.all_gather(_padded(x, plan), group).view(
        plan.world_size, plan.max_tokens, x.shape[1]
    )
    return torch.cat([everyone[plan.rank - step] for step in range(1, plan.world_size)])


def rows_of(x: torch.Tensor, kept: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[bound, K]: the token of each row, from x [T, K] and ``kept``; undefined after the last row.

    In plain torch; the kernel is in ``kernels/experts/rows.py``.
    """
    most = max(plan.max_tokens, 1)
    token = plan.row_entry.long().clamp(0, max(plan.entries - 1, 0)) // plan.topk
    step = (plan.rank - token // most) % plan.world_size
    return torch.cat([_padded(x, plan), kept])[step * most + token % most]


def _padded(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """x as [max_tokens, K]."""
    return pad(x, (0, 0, 0, plan.max_tokens - plan.tokens))
