"""route_tokens: the routing plan of the tokens of all ranks (``routing_plan.py``).

Ranks exchange the ids of their tokens, and each sorts the rows of its experts: with
``kernels/experts/routing.py``, or in plain torch after an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops.core import collectives
from tileweave.ops.core.debug_agreement import check_together
from tileweave.ops.core.nodes import machine_in, topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    debugging,
    define,
    endpoint,
    group_of,
    interpreting,
    number_of,
    rank_and_size,
    workspace_of,
)
from tileweave.ops.experts.dispatch_grouped_matmul_fused import OP
from tileweave.ops.experts.routing_plan import (
    RoutingPlan,
    layout_of,
    padded_ids,
    reference_plan,
    words_of,
)
from tileweave.planning.schedules.grouped import RoutingCut, routes_fused, routing_cut
from tileweave.transport.workspace import Instance

ROUTING = "dispatch_grouped_matmul.routing"  # its name in errors
_ID_DTYPES = (torch.int32, torch.int64)
_ROUTE = operator("route_tokens")


def make_plan(topk_ids: torch.Tensor, experts: int, max_tokens: int, name: str) -> RoutingPlan:
    """The plan of ids [T, k], by the operator ``route_tokens``. ``experts``: how many each rank
    has."""
    rank, size = rank_and_size(name)
    table = _ROUTE(topk_ids, experts, max_tokens, name)
    return RoutingPlan(
        table, topk_ids.shape[0], max_tokens, topk_ids.shape[1], experts, rank, size, name
    )


def _route(topk_ids: torch.Tensor, experts: int, max_tokens: int, group_name: str) -> torch.Tensor:
    rank, size = rank_and_size(group_name)
    if debugging():
        signature = {"max_tokens": max_tokens, "topk": topk_ids.shape[1], "experts": experts}
        check = partial(_check_routing, topk_ids, experts, max_tokens, size, True)
        check_together(OP, group_name, signature, check)
    else:
        _check_routing(topk_ids, experts, max_tokens, size, False)
    ranks = topology_of(group_of(group_name), topk_ids.device)
    machine = machine_in(ranks, topk_ids.device)
    if routes_fused(size, machine, interpreting()) and max_tokens:
        return run_routing(topk_ids, size * experts, max_tokens, group_name).table
    ids = padded_ids(topk_ids, max_tokens)
    everyone = (
        ids[None]
        if size == 1
        else collectives.all_gather(ids, group_of(group_name)).view(size, *ids.shape)
    )
    nodes = ranks.nodes if ranks.per_node else 1
    return reference_plan(everyone, rank, size * experts, nodes=nodes).table


def _check_routing(
    topk_ids: torch.Tensor, experts: int, max_tokens: int, size: int, wait: bool
) -> None:
    """Raise :class:`InputError` for ids that do not fit.

    ``wait``: also check that all experts exist, for which the host waits for the device.
    """

    def asked() -> str:
        return (
            f"topk_ids {tuple(topk_ids.shape)} {topk_ids.dtype}, max_tokens {max_tokens}, "
            f"{experts} experts on {size} ranks"
        )

    def strided() -> str:
        return f"topk_ids {tuple(topk_ids.shape)} with strides {topk_ids.stride()}"

    require(topk_ids.dtype in _ID_DTYPES, asked, "int32 or int64", "convert them")
    require(
        topk_ids.is_contiguous(), strided, "contiguous int32 or int64", "pass topk_ids.contiguous()"
    )
    require(
        topk_ids.shape[0] <= max_tokens,
        asked,
        "at most max_tokens tokens",
        "raise max_tokens on every rank",
    )
    require(experts > 0 and topk_ids.shape[1] > 0, asked, "at least one of each", "pass some")
    entries = size * max_tokens * topk_ids.shape[1]
    require(entries < 1 << 30, asked, "fewer than 2**30 choices in all", "split the batch")
    if wait and topk_ids.numel():
        least, most = int(topk_ids.min()), int(topk_ids.max())
        fits = least >= -1 and most < size * experts
        require(
            fits, lambda: f"experts {least} to {most}", f"-1 to {size * experts - 1}", "fix the ids"
        )


def _route_fake(
    topk_ids: torch.Tensor, experts: int, max_tokens: int, group_name: str
) -> torch.Tensor:
    words = words_of(rank_and_size(group_name)[1], max_tokens, topk_ids.shape[1], experts)
    return topk_ids.new_empty(words, dtype=torch.int32)


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


define(
    "route_tokens(Tensor topk_ids, int experts, SymInt max_tokens, str group_name) -> Tensor",
    _route,
    _route_fake,
)
