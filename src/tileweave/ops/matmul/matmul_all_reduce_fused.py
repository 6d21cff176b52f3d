"""The fused call of matmul_all_reduce: one shot for few rows, cuBLAS and one launch that reduces
(``reduce_by_cublas.py``), or one launch that copy engines serve (``all_reduce_by_tiles.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.all_reduce_by_tiles import Operands, reduce_by_tiles
from tileweave.ops.matmul.inputs import ready
from tileweave.ops.matmul.matmul_reduce_scatter_fused import scaled_parts
from tileweave.ops.matmul.products import NOTHING, Added, Plain, Product
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.transport.workspace import Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.runtime.launch import Launcher
    from tileweave.kernels.scaling import Scaling
    from tileweave.ops.matmul.reduce_by_cublas import MultiplyThenReduce
    from tileweave.ops.matmul.scaled import ScaledProduct

OP = "matmul_all_reduce"
ONE_SHOT = "one_shot"  # an instance of its own: its slots have another layout


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """Make the fused call of plan ``chosen``: x [M, k], w [N, k]; residual, out, residual_out [M,
    N]."""
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    added = NOTHING
    if not (bias is residual is norm_weight is None):
        added = Added(bias, residual, norm_weight, norm_eps)
    if config.transport == "copy_engine":
        reduce_by_tiles(Operands(x, w), added, out, residual_out, group_name, chosen)
    elif config.kernel != "library":
        _run_one_shot(Operands(x, w), added, out, residual_out, group_name, chosen)
    elif config.transport == "sm":
        run_library((x,), Plain(w, None), added, out, residual_out, group_name, chosen)
    else:
        from tileweave.ops.matmul import over_nodes

        over_nodes.reduce(x, w, added, out, residual_out, group_name, chosen)


def run_scaled(
    x: tuple[torch.Tensor, ...],
    product: ScaledProduct,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """:func:`run_fused` of FP8 operands: x, its data and scales as they travel, and what it is
    multiplied by."""
    config = chosen.config
    assert config is not None, "run_scaled needs a fused plan"
    if config.kernel == "library":
        run_library(x, product, added, out, residual_out, group_name, chosen)
        return
    run = reduce_by_tiles if config.transport == "copy_engine" else _run_one_shot
    operands = Operands(*scaled_parts(x, product, out.dtype, config))
    run(operands, added, out, residual_out, group_name, chosen)


def _run_one_shot(
    operands: Operands,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """As ``reduce_by_tiles``, of few rows."""
    x, w, scaling, scales = operands
    bias, residual, norm_weight, norm_eps, _ = added
    norm = norm_weight is not None
    key = norm, scaling
    made = ready(chosen, key, group_name, _one_shot, x, w, norm, chosen.config, scaling)
    instance, launch = made
    instance.begin(chosen.checksum)
    try:
        launch(x, w, bias, residual, norm_weight, norm_eps, out, residual_out, scales)
    finally:
        instance.launched()


def run_library(
    x: tuple[torch.Tensor, ...],
    product: Product,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
    scale: torch.Tensor | None = None,
) -> None:
    """A call whose matmul is ``product``, by cuBLAS. x: its parts, the first [M, k]. ``scale``:
    with ``added.quantize``, gets the scales of ``out``."""
    made = ready(chosen, "library", group_name, _make_by_cublas, x[0], product, chosen.config)
    instance, call = made
    call(instance, x, product, added, out, residual_out, chosen.checksum, scale)


def _make_by_cublas(
    workspace: Workspace, x: torch.Tensor, product: Product, config: MatmulConfig
) -> tuple[Instance, MultiplyThenReduce]:
    from tileweave.ops.matmul.reduce_by_cublas import multiply_then_reduce

    return multiply_then_reduce(workspace, x.shape[0], product, OP, x.shape[0], config)


def _one_shot(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    norm: bool,
    config: MatmulConfig,
    scaling: Scaling | None = None,
) -> tuple[Instance, Launcher]:
    instance = workspace.instance(OP, ONE_SHOT)
    dtype = x.dtype if scaling is None else scaling.out_dtype
    key = (x.shape, x.stride(0), w.shape[0], w.stride(0), dtype, norm, config, scaling)
    launch = instance.cache.get(key)
    if launch is None:
        from tileweave.kernels.all_reduce.one_shot import launcher

        size, (rows, depth), cols = workspace.transport.world_size, x.shape, w.shape[0]
        places, width = size * config.team, -(-cols // config.tile_n) * config.tile_n
        elements = places * width * config.tile_m
        instance.reserve(elements * dtype.itemsize, 2)
        launch = launcher(
            endpoint(instance, dtype),
            size,
            workspace.transport.rank,
            (rows, cols, depth),
            x.stride(0),
            w.stride(0),
            norm,
            config,
            scaling,
        )
        instance.keep(key, launch)
    return instance, launch  # type: ignore[return-value]
