"""The fused call of dispatch_grouped_matmul.

What calls of one shape need is kept. ``dispatch_grouped_matmul.py`` checks the arguments and plans;
tests and the tuner call this function themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import endpoint, number_of, workspace_of
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.planning.schedules.grouped import DispatchConfig

OP = "dispatch_grouped_matmul"


def run_fused(
    x: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    y: torch.Tensor,
    group_name: str,
    config: DispatchConfig,
    kept: torch.Tensor | None = None,
    needs: int = 0,
    w_scale: torch.Tensor | None = None,
) -> tuple[Peers, torch.Tensor | None]:
    """Make the fused call: x [T, K], experts [E_local, N, K] -> y [bound, N].

    ``kept`` [R - 1, max_tokens, K] takes those tokens of peers that have an expert here. Until the
    next call they are also in the slot of the endpoint that is returned. The second result is
    [bound, K], the token of each row, if the kernel has gathered them. ``needs``: what else ranks
    must agree on in this call. ``w_scale``: of experts of FP8, with packed tokens x [T, pitch], as
    bytes.
    """
    workspace = workspace_of(group_name, x.device)
    transport = workspace.transport
    instance = workspace.instance(OP, "sm")
    # the number of tokens may differ between calls
    key = (experts.shape, experts.stride(), x.dtype, y.dtype, plan.max_tokens, plan.topk, config)
    found: Any = instance.cache.get(key)
    if found is None:
        from tileweave.kernels.experts.dispatch_triton import COUNTERS

        elements = max((plan.world_size - 1) * plan.max_tokens * x.shape[1], 1)
        instance.reserve(elements * x.element_size(), COUNTERS)
        launcher: Callable[..., torch.Tensor | None] = _launcher(config)(
            endpoint(instance, x.dtype),
            config,
            plan.rank,
            plan.world_size,
            plan.max_tokens,
            plan.topk,
            plan.bound,
            experts,
            transport.machine.num_sms,
        )
        mark = hash((number_of(OP), number_of(x.dtype), *experts.shape, plan.max_tokens, plan.topk))
        found = (launcher, mark)
        instance.keep(key, found)
    instance.begin(found[1] + needs)
    peers = endpoint(instance, x.dtype)
    try:
        scales = () if w_scale is None else (w_scale,)
        rows = found[0](x, experts, y, plan.fields, *scales)
        if kept is not None and kept.numel():
            from tileweave.kernels.experts.rows import keep_tokens

            keep_tokens(peers, kept, plan.entry_row, plan.topk, plan.rank)
    finally:
        instance.launched()
    return peers, rows


def _launcher(config: DispatchConfig) -> Callable[..., Callable[..., torch.Tensor | None]]:
    if config.kernel == "hopper" and config.scaled:
        from tileweave.kernels.experts.dispatch_hopper_scaled import launcher as scaled_launcher

        return scaled_launcher
    if config.kernel == "hopper" and config.ordered:
        from tileweave.kernels.experts.dispatch_hopper_ordered import launcher as ordered_launcher

        return ordered_launcher
    if config.kernel == "hopper":
        from tileweave.kernels.experts.dispatch_hopper import launcher as hopper_launcher

        return hopper_launcher
    from tileweave.kernels.experts.dispatch_triton import launcher

    return launcher
