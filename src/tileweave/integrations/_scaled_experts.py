"""Expert-parallel experts of transformers with fine-grained FP8 weights (``FP8Experts``, as
checkpoints of DeepSeek-V3 and Qwen3-MoE have them), for inference.

Weights are float8_e4m3fn with a scale for 128 x 128 of them, ``gate_up_proj_scale_inv`` and
``down_proj_scale_inv``. Tokens are quantised once, before they are sent, with a scale for 128
elements; activations in the launch that computes them, where that is ``silu(gate) * up``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu
from tileweave.ops.matmul.quantize import quantize
from tileweave.ops.matmul.scaled import BLOCK, FP8

_REMEDY = 'load the model with another ep_implementation, such as "auto"'
# What changes silu(gate) * up in ``FP8Experts._apply_gate``.
_CHANGES_GATE = ("gate_softcap", "swiglu_alpha", "limit")


def is_fp8(experts: Any) -> bool:
    """Whether experts are FP8 with scales."""
    return experts.down_proj.dtype == FP8


def is_plain_swiglu(experts: Any) -> bool:
    """Whether the gate of ``FP8Experts`` of transformers is act(gate) * up."""
    try:
        from transformers.integrations.finegrained_fp8 import FP8Experts
    except ImportError:
        return False
    inherited = getattr(FP8Experts, "_apply_gate", None)
    return (
        inherited is not None
        and type(experts)._apply_gate is inherited
        and all(getattr(experts, name, None) is None for name in _CHANGES_GATE)
    )


def check(experts: Any, *tokens: torch.Tensor) -> None:
    """Raise :class:`InputError` for experts that the operators do not take, or a call with
    gradients."""
    size = tuple(getattr(experts, "block_size", None) or ())
    scheme = getattr(experts, "activation_scheme", "dynamic")
    require(
        size == (BLOCK, BLOCK) and scheme == "dynamic" and not experts.has_bias,
        f"{type(experts).__name__} with blocks of {size}, {scheme!r} scales of tokens"
        f"{', biases' if experts.has_bias else ''}",
        f"blocks of {BLOCK} x {BLOCK}, dynamic scales, no biases",
        _REMEDY,
    )
    require(
        not experts.is_transposed and experts.is_concatenated,
        f"{type(experts).__name__} with transposed or interleaved FP8 weights",
        "weights [E, N, K], gate rows before up rows",
        _REMEDY,
    )
    require(
        not (torch.is_grad_enabled() and any(t.requires_grad for t in tokens)),
        "gradients through FP8 experts",
        "inference",
        f"call the model under torch.no_grad(); for training {_REMEDY}",
    )


def compute(
    experts: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    most: int,
    group: dist.ProcessGroup,
    activate: Callable[[torch.Tensor, RoutingPlan], torch.Tensor] | None,
) -> torch.Tensor:
    """The weighted sum of each token's experts. ``activate``: None: silu(gate) * up."""
    check(experts, x, weights)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = getattr(experts, first), experts.down_proj
    # float8_e8m0fnu scales, powers of two, are few
    up_scale = getattr(experts, f"{first}_scale_inv").float()
    down_scale = experts.down_proj_scale_inv.float()
    with torch.no_grad():  # FP8 parameters are frozen, whatever their flags say
        y, plan = dispatch_grouped_matmul(
            x.contiguous(),
            up,
            ids.contiguous(),
            group=group,
            max_tokens=most,
            w_scale=up_scale,
            quantize="block",
        )
        if activate is None:
            data, scale = swiglu(y, plan, quantize="block")
        else:
            data, scale = quantize(activate(y, plan), "block")
        z = grouped_matmul_combine(
            data,
            down,
            plan,
            weights.float().contiguous(),
            group=group,
            y_scale=scale,
            w_scale=down_scale,
            out_dtype=y.dtype,
        )
    return z.to(x.dtype)
