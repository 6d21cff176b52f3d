"""The fused calls of dispatch_grouped_matmul: the routing plan, then tokens and tiles.

What calls of one shape need is kept. ``dispatch_grouped_matmul.py`` checks the arguments and plans;
tests and the tuner call these functions themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import endpoint, number_of, workspace_of
from tileweave.ops.experts.routing_plan import RoutingPlan, layout_of, words_of
from tileweave.planning.schedules.grouped import DispatchConfig, RoutingCut, routing_cut
from tileweave.transport.workspace import Instance

OP = "dispatch_grouped_matmul"
ROUTING = "dispatch_grouped_matmul.routing"  # its name in errors


def run_routing(
    topk_ids: torch.Tensor,
    num_experts: int,
    max_tokens: int,
    group_name: str,
    cut: RoutingCut | None = None,
) -> RoutingPlan:
    """The plan of topk_ids [T, k], contiguous; all ranks take part.

    ``num_experts``: of all ranks. ``cut``: None: by size.
    """
    workspace = workspace_of(group_name, topk_ids.device)
    transport = workspace.transport
    instance = workspace.instance(ROUTING, "sm")
    size, rank = transport.world_size, transport.rank
    (tokens, topk), experts = topk_ids.shape, num_experts // size
    key = (max_tokens, topk, experts, cut)
    found: Any = instance.cache.get(key)
    if found is None:
        found = _routing_launcher(instance, transport.machine.num_sms, rank, size, *key)
        instance.keep(key, found)
    launcher, words = found
    table = torch.empty(words, dtype=torch.int32, device=topk_ids.device)
    # a hash of integers: the same in every process
    instance.begin(hash((number_of(ROUTING), num_experts, max_tokens, topk)))
    try:
        launcher(topk_ids, table, tokens)
    finally:
        instance.launched()
    return RoutingPlan(table, tokens, max_tokens, topk, experts, rank, size, group_name)


def _routing_launcher(
    instance: Instance,
    num_sms: int,
    rank: int,
    size: int,
    max_tokens: int,
    topk: int,
    experts: int,
    cut: RoutingCut | None,
) -> tuple[Callable[..., None], int]:
    """The launcher of calls of one shape, and the number of words of a table."""
    from tileweave.kernels.experts.routing import launcher

    cut = cut or routing_cut(size, max_tokens, topk)
    # the histogram is in the instance's counters, which have no other use here and are not cleared
    histogram = (
        0
        if cut.launches == 1
        else cut.units(size, max_tokens, topk, num_sms) * (1 << (experts - 1).bit_length())
    )
    instance.reserve(max(size * max_tokens * topk, 1) * 4, histogram)
    begins, _ = layout_of(size, max_tokens, topk, experts)
    peers = endpoint(instance, torch.int32)
    words = words_of(size, max_tokens, topk, experts)
    return launcher(peers, cut, begins, max_tokens, topk, experts, rank, size, num_sms), words


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
        instance.reserve(
            max((plan.world_size - 1) * plan.max_tokens * x.shape[1], 1) * x.element_size(),
            _counters(),
        )
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


def _counters() -> int:
    from tileweave.kernels.experts.dispatch_triton import COUNTERS

    return COUNTERS


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
