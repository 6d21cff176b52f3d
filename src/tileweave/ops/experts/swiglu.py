"""swiglu: silu(gate) * up between the two matmuls of experts, on the rows of a plan."""

from __future__ import annotations

from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import define, first_derivative, interpreting
from tileweave.ops.experts.routing_plan import RoutingPlan, new_rows
from tileweave.ops.matmul.inputs import DTYPES

_SWIGLU = operator("swiglu")


def swiglu(y: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """silu(gate) * up of each row of ``plan``.

    Parameters
    ----------
    y : [bound, 2 I], contiguous, float16, bfloat16 or float32
        Rows [gate, up], as ``dispatch_grouped_matmul`` returns them.

    plan : RoutingPlan
        The plan that was returned with y.

    Returns
    -------
    [bound, I]
        Computed in float32 and rounded once. Rows from ``plan.offsets[-1]`` on are not read, and
        undefined, and so are those rows of the gradient of y: sums over rows must leave them out
        (see :func:`dispatch_grouped_matmul`).

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
    return _SWIGLU(y, plan.table, plan.local_experts)


def _runs_compiled(y: torch.Tensor) -> bool:
    return y.is_cuda or interpreting()


def _forward(y: torch.Tensor, offsets: torch.Tensor, experts: int) -> torch.Tensor:
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
