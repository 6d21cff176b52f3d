"""The fused calls of dispatch_grouped_matmul: the routing plan, then tokens and tiles. What a shape needs is kept.

``dispatch_grouped_matmul.py`` checks the arguments and plans; tests and the tuner call these themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileweave.kernels.endpoint import Endpoint
from tileweave.ops.registry import endpoint, workspace_of
from tileweave.ops.routing_plan import RoutingPlan, layout_of
from tileweave.schedule_grouped import DispatchConfig
from tileweave.transport.workspace import REGISTRY, Workspace

OP = "dispatch_grouped_matmul"
ROUTING = "moe_routing"


def _workspace(group_name: str, device: torch.device) -> Workspace:
    return REGISTRY.find(group_name, device) or workspace_of(group_name, device)


def run_routing(topk_ids: torch.Tensor, num_experts: int, max_tokens: int, group_name: str) -> RoutingPlan:
    """The plan of topk_ids [T, k], contiguous; all ranks take part. ``num_experts``: of all ranks."""
    from tileweave.kernels import moe_routing

    workspace = _workspace(group_name, topk_ids.device)
    transport = workspace.transport
    instance = workspace.instance(ROUTING, "sm")
    size, rank = transport.world_size, transport.rank
    (tokens, topk), experts = topk_ids.shape, num_experts // size
    instance.reserve(max(size * max_tokens * topk, 1) * 4)
    instance.begin(hash((num_experts, max_tokens, topk)))  # of integers: the same in every process
    begins, _ = layout_of(size, max_tokens, topk, experts)
    table = torch.empty(begins[-1], dtype=torch.int32, device=topk_ids.device)
    plan = RoutingPlan(table, tokens, max_tokens, topk, experts, rank, size)
    try:
        moe_routing.launch(
            endpoint(instance, torch.int32), topk_ids, plan.fields, tokens, max_tokens, experts, rank, size,
            transport.machine.num_sms,
        )  # fmt: skip
    finally:
        if not topk_ids.is_cuda:
            instance.check()
    return plan


def run_fused(
    x: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    y: torch.Tensor,
    group_name: str,
    config: DispatchConfig,
    kept: torch.Tensor | None = None,
) -> Endpoint:
    """x [T, K], experts [E_local, N, K] -> y [bound, N]; ``kept`` [R - 1, max_tokens, K] takes the peers' tokens that have
    an expert here. They stand in the slot, too, of the endpoint that is returned, until the next call."""
    workspace = _workspace(group_name, x.device)
    transport = workspace.transport
    instance = workspace.instance(OP, "sm")
    key = (x.shape, experts.shape, experts.stride(), x.dtype, plan.max_tokens, plan.topk, id(config))
    found: Any = instance.cache.get(key)
    if found is None:
        instance.reserve(max((plan.world_size - 1) * plan.max_tokens * x.shape[1], 1) * x.element_size(), _counters())
        launcher: Callable[..., None] = _launcher(config)(
            endpoint(instance, x.dtype), config, plan.rank, plan.world_size, plan.max_tokens, plan.topk, plan.bound, experts,
            transport.machine.num_sms,
        )  # fmt: skip
        mark = hash((*experts.shape, plan.max_tokens, plan.topk))
        found = instance.cache[key] = (launcher, mark, config)  # the config is kept, so that its id stays its own
    instance.begin(found[1])
    peers = endpoint(instance, x.dtype)
    try:
        found[0](x, experts, y, plan.fields)
        if kept is not None and kept.numel():
            from tileweave.kernels.expert_rows import keep_tokens

            keep_tokens(peers, kept, plan.entry_row, plan.topk, plan.rank)
    finally:
        if not x.is_cuda:
            instance.check()
    return peers


def _counters() -> int:
    from tileweave.kernels.dispatch_grouped_matmul import COUNTERS

    return COUNTERS


def _launcher(config: DispatchConfig) -> Callable[..., Callable[..., None]]:
    if config.kernel == "hopper":
        from tileweave.kernels.dispatch_grouped_matmul_hopper import Launcher as HopperLauncher

        return HopperLauncher
    from tileweave.kernels.dispatch_grouped_matmul import Launcher

    return Launcher
