"""The fused call of grouped_matmul_combine: instance, memory, launch.

``grouped_matmul_combine.py`` checks the arguments and plans.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileweave.ops.core.registry import endpoint, number_of, workspace_of
from tileweave.ops.experts.routing_plan import RoutingPlan, shape_of
from tileweave.planning.combine import SCALED_PORTABLE, CombineConfig, slot_bytes
from tileweave.planning.schedules.grouped import GroupedProblem
from tileweave.transport.workspace import Instance

OP = "grouped_matmul_combine"


def run_fused(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    config: CombineConfig,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Make the fused call: y [bound, I], experts [E_local, H, I], weights [T, k]; out [T, H].

    ``scales``: of FP8 y and experts.
    """
    from tileweave.kernels.experts import combine_triton as kernel

    workspace = workspace_of(group_name, y.device)
    transport = workspace.transport
    shape = shape_of(plan, experts)
    instance = workspace.instance(OP, "sm")
    instance.reserve(slot_bytes(shape), kernel.COUNTERS)
    called = (OP, y.dtype, out.dtype, weights is None)
    products = torch.empty(y.shape[0], shape.cols, dtype=out.dtype, device=y.device)
    # a hash of integers: the same in every process
    instance.begin(hash((*map(number_of, called), *experts.shape, plan.max_tokens, plan.topk)))
    peers = endpoint(instance, out.dtype)
    tensors = (y, experts, plan.offsets, plan.entry_row, plan.topk_ids, weights, products, out)
    try:
        rank, num_sms = transport.rank, transport.machine.num_sms
        hopper = config.kernel == "hopper" and _fits(y, experts, out, config)
        if hopper and scales is not None:
            launch = _scaled_launcher(instance, y, scales[0], out.dtype, shape, config)
            launch(*tensors, *scales)
        elif hopper:
            _launcher(instance, y, experts, shape, config)(*tensors)
        else:
            if config.kernel == "hopper" and scales is not None:
                config = SCALED_PORTABLE
            of_fp8 = {} if scales is None else {"scales": scales}
            kernel.launch(peers, *tensors, shape, config, rank, num_sms, **of_fp8)
    finally:
        instance.launched()


def _fits(y: torch.Tensor, experts: torch.Tensor, out: torch.Tensor, config: CombineConfig) -> bool:
    """Whether TMA can address the operands. Otherwise the Triton kernel runs, which has the same
    protocol."""
    from tileweave.kernels.runtime.descriptors import fits

    along_depth = experts.stride(2) == 1
    whole = experts if along_depth else experts.transpose(1, 2)
    divides = along_depth or experts.shape[2] % config.tile_k == 0
    return divides and whole.is_contiguous() and fits(y, out, whole.flatten(0, 1))


def _launcher(
    instance: Instance,
    y: torch.Tensor,
    experts: torch.Tensor,
    shape: GroupedProblem,
    config: CombineConfig,
) -> Callable[..., None]:
    """Launches of the Hopper kernel for one shape, made once."""
    from tileweave.kernels.experts.combine_hopper import launcher

    depth_first = experts.stride(2) != 1
    key = (shape, config, depth_first, y.shape[0], y.stride(0))
    found = instance.cache.get(key)
    if found is None:
        transport = instance.transport
        found = launcher(
            endpoint(instance, y.dtype),
            shape,
            config,
            transport.rank,
            transport.machine.num_sms,
            y.dtype,
            depth_first,
            y.shape[0],
            y.stride(0),
        )
        instance.keep(key, found)
    return found  # type: ignore[return-value]


def _scaled_launcher(
    instance: Instance,
    y: torch.Tensor,
    y_scale: torch.Tensor,
    dtype: torch.dtype,
    shape: GroupedProblem,
    config: CombineConfig,
) -> Callable[..., None]:
    """Launches of the Hopper kernel for FP8 operands of one shape, made once. ``dtype``: of the
    result."""
    from tileweave.kernels.experts.combine_hopper_scaled import launcher

    key = (shape, config, y.shape[0], y.stride(0), y_scale.stride(), dtype)
    found = instance.cache.get(key)
    if found is None:
        transport = instance.transport
        peers, num_sms = endpoint(instance, dtype), transport.machine.num_sms
        found = launcher(peers, shape, config, transport.rank, num_sms, y, y_scale, dtype)
        instance.keep(key, found)
    return found  # type: ignore[return-value]
