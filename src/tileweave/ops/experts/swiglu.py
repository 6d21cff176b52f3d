"""swiglu: silu(gate) * up between the two matmuls of experts, on the rows of a plan; quantised in
the same launch for a second matmul of FP8."""

from __future__ import annotations

from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import define, first_derivative, interpreting
from tileweave.ops.experts.routing_plan import RoutingPlan, new_rows
from tileweave.ops.matmul.inputs import DTYPES
from tileweave.ops.matmul.quantize import quantize_rows
from tileweave.ops.matmul.scaled import FP8, blocks, refuse_gradients

_SWIGLU, _QUANTIZED = operator("swiglu"), operator("swiglu_quantized")


@checks_types
def swiglu(y: torch.Tensor, plan: RoutingPlan, quantize: str | None = None) -> Any:
    """silu(gate) * up of each row of ``plan``, as FP8 with ``quantize``.

    Parameters
    ----------
    y : [bound, 2 I], contiguous, float16, bfloat16 or float32
        Rows [gate, up], as ``dispatch_grouped_matmul`` returns them.

    plan : RoutingPlan
        The plan that was returned with y.

    quantize : ``"block"``, optional
        Quantise the result, as :func:`tileweave.quantize` does: no gradients. None: keep the dtype
        of y.

    Returns
    -------
    [bound, I], or with ``quantize`` (data, scale)
        data [bound, I] is float8_e4m3fn, scale [bound, ceil(I/128)] float32: the y and ``y_scale``
        of :func:`grouped_matmul_combine`. Computed in float32 and rounded once to the dtype of
        y. Rows from ``plan.offsets[-1]`` on are not read, and are undefined in the result and in
        the gradient of y: sums over rows must leave them out (see
        :func:`dispatch_grouped_matmul`).

    Raises
    ------
    InputError
        A shape, dtype or device that does not fit.
    """
    fits = y.dim() == 2 and y.shape[0] == plan.bound and y.device == plan.table.device
    require(
        fits,
        lambda: (
            f"y {tuple(y.shape)} on {y.device} with a plan of {plan.bound} rows "
            f"on {plan.table.device}"
        ),
        "[bound, 2 I] on the device of the plan",
        "pass what dispatch_grouped_matmul returned, both of one call",
    )
    require(
        quantize in (None, "block"),
        f"quantize={quantize!r}",
        "'block' or None",
        "pass one of these",
    )
    of = _SWIGLU if quantize is None else _QUANTIZED
    return of(y, plan.table, plan.local_experts)


def _runs_compiled(y: torch.Tensor) -> bool:
    return y.is_cuda or interpreting()


def check(y: torch.Tensor) -> None:
    """Raise :class:`InputError` for rows that the kernels do not take."""
    asked = f"y {tuple(y.shape)} {y.dtype} with strides {y.stride()}"
    fits = (
        y.dim() == 2
        and y.shape[1] % 2 == 0
        and y.shape[1] > 0
        and y.is_contiguous()
        and y.dtype in DTYPES
    )
    require(
        fits,
        asked,
        "[bound, 2 I], contiguous, float16, bfloat16, float32",
        "pass what dispatch_grouped_matmul returned",
    )


def _forward(y: torch.Tensor, offsets: torch.Tensor, experts: int) -> torch.Tensor:
    check(y)
    if not _runs_compiled(y):
        return reference.swiglu(y)
    from tileweave.kernels.experts import rows as expert_rows

    out = y.new_empty(y.shape[0], y.shape[1] // 2)
    expert_rows.swiglu(y, out, offsets, experts)
    return out


def _fake(y: torch.Tensor, offsets: torch.Tensor, experts: int) -> torch.Tensor:
    return y.new_empty(y.shape[0], y.shape[1] // 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, offsets, ctx.experts = inputs
    ctx.save_for_backward(y, offsets)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    y, offsets = ctx.saved_tensors
    return torch.ops.tileweave.swiglu_backward(grad, y, offsets, ctx.experts), None, None


def _backward_implementation(
    grad: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, experts: int
) -> torch.Tensor:
    grad = grad.contiguous()
    if not _runs_compiled(y):
        return reference.swiglu_gradient(grad, y)
    from tileweave.kernels.experts import rows as expert_rows

    out = new_rows(y, *y.shape)
    expert_rows.swiglu_gradient(grad, y, out, offsets, experts)
    return out


def _backward_fake(
    grad: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, experts: int
) -> torch.Tensor:
    return torch.empty_like(y)


define(
    "swiglu(Tensor y, Tensor offsets, int experts) -> Tensor",
    _forward,
    _fake,
    first_derivative("swiglu", _backward),
    _setup_context,
)
define(
    "swiglu_backward(Tensor grad, Tensor y, Tensor offsets, int experts) -> Tensor",
    _backward_implementation,
    _backward_fake,
)


# --- Quantised ---


def _quantized(y: torch.Tensor, offsets: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    check(y)
    refuse_gradients(y)
    bound, cols = y.shape[0], y.shape[1] // 2
    if not _runs_compiled(y):
        data, scale = quantize_rows(reference.swiglu(y), "block")
        return data, scale.t()
    from tileweave.kernels.experts import rows as expert_rows

    data = y.new_empty(bound, cols, dtype=torch.uint8)
    scale = y.new_empty(blocks(cols), bound, dtype=torch.float32)
    expert_rows.swiglu_quantized(y, data, scale, offsets, experts)
    return data.view(FP8), scale.t()


def _quantized_fake(
    y: torch.Tensor, offsets: torch.Tensor, experts: int
) -> tuple[torch.Tensor, ...]:
    bound, cols = y.shape[0], y.shape[1] // 2
    scale = y.new_empty(blocks(cols), bound, dtype=torch.float32)
    return y.new_empty(bound, cols, dtype=FP8), scale.t()


define(
    "swiglu_quantized(Tensor y, Tensor offsets, int experts) -> (Tensor, Tensor)",
    _quantized,
    _quantized_fake,
)
