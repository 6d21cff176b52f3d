"""Row-parallel layers of transformers with fine-grained FP8 weights (``FP8Linear``, as checkpoints
of DeepSeek-V3 have them): one :func:`tileweave.matmul_all_reduce` with scales of blocks.

A weight is float8_e4m3fn, with a float32 scale for 128 x 128 of it; inputs are quantised in the
call, with a scale for 128 elements of a token. transformers does the same, with kernels of its own
and an all-reduce after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tileweave.nn.shards import local
from tileweave.ops.core.registry import machine_of
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul.scaled import ALIGN, BLOCK, FP8, OUT_DTYPES


def is_fp8_linear(module: nn.Module) -> bool:
    """Whether ``module`` is the FP8 layer of transformers itself."""
    try:
        from transformers.integrations.finegrained_fp8 import FP8Linear
    except ImportError:
        return False
    return type(module) is FP8Linear


def why_stock(module: Any, size: int) -> str | None:
    """Why an FP8 layer cannot call the operator; None: it can."""
    if module.weight.dtype != FP8:
        return f"its weight is {module.weight.dtype}"
    if tuple(module.block_size or ()) != (BLOCK, BLOCK):
        return f"its block size is {module.block_size}, not {BLOCK} x {BLOCK}"
    if module.weight_scale_inv.dtype != torch.float32:
        return f"its scales are {module.weight_scale_inv.dtype}"
    if module.activation_scheme != "dynamic":
        return f"its activations are quantised by {module.activation_scheme!r} scales"
    cols, features = module.out_features, module.in_features
    if features % (BLOCK * size) or cols % ALIGN:
        return f"{cols} x {features} features over {size} ranks divide blocks"
    return None


def row_parallel_forward(
    module: Any, mesh: Any, group: str, stock: Callable[..., Any], warn: Callable[[str], None]
) -> Callable[..., Any]:
    """The forward of an FP8 layer: x [..., k] of this rank -> [..., N], the sum over ranks.

    ``stock`` makes calls that the operator does not take, after ``warn(reason)``: those with
    gradients, and on GPUs other than Hopper, for which cuBLAS has no scales of blocks.
    """

    def forward(x: torch.Tensor) -> Any:
        machine = machine_of(x.device)
        if torch.is_grad_enabled() and x.requires_grad:
            reason = "its input needs a gradient"
        elif x.dtype not in OUT_DTYPES.values():
            reason = f"its input is {x.dtype}"
        elif machine.backend == "cuda" and not machine.hopper:
            reason = f"cuBLAS has scales of blocks on Hopper, not on {machine.name}"
        else:
            if isinstance(x, DTensor):
                x = x.redistribute(mesh, [Shard(-1)]).to_local()
            weight, scale, bias = map(local, (module.weight, module.weight_scale_inv, module.bias))
            with torch.no_grad():  # FP8 parameters are frozen, whatever their flags say
                return matmul_all_reduce(
                    x.contiguous(),
                    weight,
                    None if bias is None else bias.to(x.dtype),
                    group=group,
                    w_scale=scale.contiguous(),
                    quantize="block",
                )
        warn(reason)
        return stock(x)

    return forward
