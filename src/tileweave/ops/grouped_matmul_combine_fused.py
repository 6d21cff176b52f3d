"""The fused call of grouped_matmul_combine: instance, memory, launch. The operator's file checks the arguments and plans."""

from __future__ import annotations

import torch

from tileweave.config_combine import CombineConfig, CombineShape
from tileweave.ops.registry import endpoint, interpreting, workspace_of
from tileweave.ops.routing_plan import RoutingPlan
from tileweave.transport.workspace import REGISTRY

OP = "grouped_matmul_combine"


def shape_of(plan: RoutingPlan, experts: torch.Tensor) -> CombineShape:
    """The sizes of a call; the same on every rank."""
    dtype = experts.dtype
    return CombineShape(
        plan.world_size, plan.max_tokens, plan.topk, plan.local_experts, experts.shape[1], experts.shape[2], dtype.itemsize,
        str(dtype).removeprefix("torch."),
    )  # fmt: skip


def run_fused(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    config: CombineConfig,
) -> None:
    """The fused call itself. y [bound, I], experts [E_local, H, I], weights [T, k] fp32; out [T, H]."""
    from tileweave.kernels import grouped_matmul_combine as kernel

    workspace = REGISTRY.find(group_name, y.device) or workspace_of(group_name, y.device)
    transport = workspace.transport
    shape = shape_of(plan, experts)
    instance = workspace.instance(OP, "sm")
    instance.reserve(shape.slot_bytes, kernel.COUNTERS)
    instance.begin()
    peers = endpoint(instance, y.dtype)
    products = torch.empty(y.shape[0], shape.cols, dtype=y.dtype, device=y.device)
    try:
        launch = kernel.launch
        if config.kernel == "hopper":
            from tileweave.kernels.descriptors import fits

            if fits(y, out) and experts.data_ptr() % 16 == 0:
                from tileweave.kernels.grouped_matmul_combine_hopper import launch
        launch(
            peers, y, experts, plan.offsets, plan.entry_row, plan.topk_ids, weights, products, out, shape, config,
            transport.rank, transport.machine.num_sms,
        )  # fmt: skip
    finally:
        if interpreting():
            instance.check()
