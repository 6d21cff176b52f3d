"""The expert operators with FP8 operands: ``torch.ops.tileweave.dispatch_grouped_scaled_matmul``
and ``grouped_scaled_matmul_combine``.

The public functions of the operators call these where a call has scales. Operands as in
``scaled.py``; what differs from operands of 16 bits:

dispatch_grouped_matmul : tokens are quantised once, before they are sent, and travel packed: K
    bytes and their scales. Ranks may have scales of any size.

grouped_matmul_combine : rows and weights are FP8; products are rounded to the dtype of the result,
    weighted, added and sent as those of 16-bit operands.

Products of each 128 of K are multiplied by their scales and added in float32. No gradients: calls
with tensors that require them are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.debug_agreement import check_together
from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import debugging, define, group_of, interpreting, log_fallback
from tileweave.ops.experts import dispatch_grouped_matmul_fused, grouped_matmul_combine_fused
from tileweave.ops.experts.kept_tokens import receive, rows_of
from tileweave.ops.experts.routing_plan import RoutingPlan, plan_grouped, routing_plan
from tileweave.ops.experts.scaled import (
    ScaledExperts,
    ScaledRows,
    check_placed,
    check_scaled_experts,
    check_scales_given,
    multiply_rows,
    packed,
    unpacked,
)
from tileweave.ops.matmul.inputs import check_shape, check_traced
from tileweave.ops.matmul.scaled import FP8, OUT_DTYPES, refuse_gradients
from tileweave.ops.matmul.scaled_calls import Scaling
from tileweave.planning.combine import plan_combine
from tileweave.planning.schedules.grouped import plan_dispatch

DISPATCH, COMBINE = dispatch_grouped_matmul_fused.OP, grouped_matmul_combine_fused.OP
NAMES = {DISPATCH: "dispatch_grouped_scaled_matmul", COMBINE: "grouped_scaled_matmul_combine"}


def arguments_of(
    op: str,
    x: torch.Tensor,
    experts: torch.Tensor,
    given: Scaling | None,
    out: torch.Tensor | None,
) -> tuple[str, ...] | None:
    """The last arguments of the torch operator for a public call; None for a call without FP8.
    x: y of ``grouped_matmul_combine``.

    Checks only what the operator cannot check: that the tensors it needs are there, and gradients,
    which it does not see while torch traces.
    """
    if given is None:
        return None
    refuse_gradients(x, given.x_scale, experts, given.w_scale, out)
    name, quantize = ("x" if op == DISPATCH else "y"), given.quantize or ""
    check_scales_given(given.x_scale, given.w_scale, quantize, name)
    dtype = given.out_dtype
    if dtype is None:
        dtype = torch.bfloat16 if x.dtype in (FP8, torch.float32) else x.dtype
    out_dtype = str(dtype).removeprefix("torch.")
    return (out_dtype, quantize) if op == DISPATCH else (out_dtype,)


def check_explained(op: str, x: torch.Tensor, experts: torch.Tensor, given: Scaling | None) -> bool:
    """Whether a call has FP8 operands. Raises for operands that do not fit."""
    found = arguments_of(op, x, experts, given, None)
    if given is None or found is None:
        return False
    out_dtype, quantize = found if op == DISPATCH else (*found, "")
    name = "x" if op == DISPATCH else "y"
    check_scaled_experts(x, given.x_scale, experts, given.w_scale, quantize, out_dtype, name)
    return True


def _multiply(
    rows: ScaledRows, experts: ScaledExperts, plan: RoutingPlan, y: torch.Tensor
) -> torch.Tensor:
    """y = rows times the weights of their experts."""
    if y.is_cuda or interpreting():
        multiply_rows(rows, experts, plan.offsets, y)
        return y
    return y.copy_(reference.grouped_scaled_matmul(rows, experts, plan.offsets, y.dtype))


# --- dispatch_grouped_matmul ---


class Dispatch(NamedTuple):
    """The arguments of the torch operator of a dispatch."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    experts: torch.Tensor
    w_scale: torch.Tensor
    table: torch.Tensor
    max_tokens: int
    topk: int
    group_name: str
    out_dtype: str
    quantize: str
    out: torch.Tensor | None = None

    @property
    def plan(self) -> RoutingPlan:
        """The plan of which ``table`` holds the numbers."""
        return routing_plan(
            self.table,
            self.experts,
            self.x.shape[0],
            self.max_tokens,
            self.topk,
            self.group_name,
        )

    def new_result(self, plan: RoutingPlan) -> torch.Tensor:
        """Memory for the result, with its shape and dtype."""
        return self.x.new_empty(plan.bound, self.experts.shape[1], dtype=OUT_DTYPES[self.out_dtype])

    def check(self, plan: RoutingPlan) -> None:
        """Raise :class:`InputError` for what does not fit, before anything is sent."""
        check_scaled_experts(
            self.x,
            self.x_scale,
            self.experts,
            self.w_scale,
            self.quantize,
            self.out_dtype,
            "x",
        )
        require(
            self.x.is_contiguous(),
            lambda: f"x with strides {self.x.stride()}",
            "a contiguous x",
            "pass x.contiguous()",
        )
        like = (plan.bound, self.experts.shape[1], OUT_DTYPES[self.out_dtype])
        check_placed(plan, self.out, like, self.x, self.x_scale, self.experts, self.w_scale)
        if self.x.shape[0] > plan.max_tokens:
            require(
                False,
                f"x of {self.x.shape[0]} tokens",
                f"at most {plan.max_tokens}",
                "pass the ids of these tokens, or their plan",
            )


def dispatch(call: Dispatch) -> torch.Tensor:
    x, experts, plan = call.x, call.experts, call.plan
    refuse_gradients(x, call.x_scale, experts, call.w_scale, call.out)
    if debugging():
        signature = {
            "experts": list(experts.shape),
            "dtype": str(experts.dtype),
            "out_dtype": call.out_dtype,
            "max_tokens": call.max_tokens,
            "topk": call.topk,
        }
        check_together(DISPATCH, call.group_name, signature, partial(call.check, plan))
    else:
        call.check(plan)
    group = group_of(call.group_name)
    chosen = plan_grouped(plan_dispatch, plan, experts, topology_of(group, x.device))
    y = call.new_result(plan) if call.out is None else call.out
    tokens = packed(x, call.x_scale)
    if chosen.config is not None:
        dispatch_grouped_matmul_fused.run_fused(
            tokens, experts, plan, y, call.group_name, chosen.config, w_scale=call.w_scale
        )
        return y
    log_fallback(DISPATCH, chosen)
    kept = receive(tokens, plan, group)
    rows = unpacked(_rows(tokens, kept, plan), x.shape[1])
    return _multiply(rows, ScaledExperts(experts, call.w_scale), plan, y)


def _rows(tokens: torch.Tensor, kept: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[bound, pitch]: the packed token of each row."""
    if not (tokens.is_cuda and plan.bound):
        return rows_of(tokens, kept, plan)
    from tileweave.kernels.experts.rows import gather_rows

    words = tokens.view(torch.int32), kept.view(torch.int32)  # of 4 bytes
    return gather_rows(*words, plan.fields, *plan.sizes).view(torch.uint8)


def _fake_dispatch(call: Dispatch) -> torch.Tensor:
    plan = call.plan
    check_traced(lambda: call.check(plan))
    return call.new_result(plan)


# --- grouped_matmul_combine ---


class Combine(NamedTuple):
    """The arguments of the torch operator of a combine."""

    y: torch.Tensor
    y_scale: torch.Tensor
    experts: torch.Tensor
    w_scale: torch.Tensor
    table: torch.Tensor
    weights: torch.Tensor | None
    tokens: int
    max_tokens: int
    topk: int
    group_name: str
    out_dtype: str
    out: torch.Tensor | None = None

    @property
    def plan(self) -> RoutingPlan:
        """The plan of which ``table`` holds the numbers."""
        return routing_plan(
            self.table, self.experts, self.tokens, self.max_tokens, self.topk, self.group_name
        )

    def new_rows(self, count: int) -> torch.Tensor:
        """Memory for ``count`` rows of the result's size and dtype."""
        return self.y.new_empty(count, self.experts.shape[1], dtype=OUT_DTYPES[self.out_dtype])

    def check(self, plan: RoutingPlan) -> None:
        """Raise :class:`InputError` for what does not fit, before anything is sent."""
        check_scaled_experts(
            self.y, self.y_scale, self.experts, self.w_scale, "", self.out_dtype, "y"
        )
        tensors = (self.y, self.y_scale, self.experts, self.w_scale, self.weights)
        like = (plan.tokens, self.experts.shape[1], OUT_DTYPES[self.out_dtype])
        check_placed(plan, self.out, like, *tensors)
        if self.y.shape[0] != plan.bound or not 0 <= plan.tokens <= plan.max_tokens:
            require(
                False,
                f"y of {self.y.shape[0]} rows, {plan.tokens} tokens",
                f"{plan.bound} rows, at most {plan.max_tokens} tokens",
                "pass y of the same dispatch as the plan",
            )
        if self.weights is not None:
            kind = self.weights.dtype
            require(
                kind == torch.float32,
                f"topk_weights {kind}",
                "float32",
                "pass topk_weights.float()",
            )
            check_shape(
                "topk_weights",
                self.weights,
                (plan.tokens, plan.topk),
                "one weight for each choice of the plan",
            )


def combine(call: Combine) -> torch.Tensor:
    y, experts, weights, plan = call.y, call.experts, call.weights, call.plan
    refuse_gradients(y, call.y_scale, experts, call.w_scale, weights, call.out)
    if debugging():
        common = {
            "sizes": [*experts.shape, call.max_tokens, call.topk],
            "dtype": f"{y.dtype} to {call.out_dtype}",
            "weighted": weights is not None,
        }
        check_together(COMBINE, call.group_name, common, partial(call.check, plan))
    else:
        call.check(plan)
    group = group_of(call.group_name)
    chosen = plan_grouped(plan_combine, plan, experts, topology_of(group, y.device))
    if chosen.config is not None:
        z = call.new_rows(call.tokens) if call.out is None else call.out
        scales = call.y_scale, call.w_scale
        grouped_matmul_combine_fused.run_fused(
            y, experts, plan, weights, z, call.group_name, chosen.config, scales
        )
        return z
    log_fallback(COMBINE, chosen)
    products = call.new_rows(y.shape[0])
    rows = ScaledRows(y, call.y_scale)
    _multiply(rows, ScaledExperts(experts, call.w_scale), plan, products)
    z = reference.combine_products(products, plan, weights, group)
    return z if call.out is None else call.out.copy_(z)


def _fake_combine(call: Combine) -> torch.Tensor:
    plan = call.plan
    check_traced(lambda: call.check(plan))
    return call.new_rows(call.tokens)


# --- Calls, and registration ---


def call(op: str, args: tuple[Any, ...], out: torch.Tensor | None) -> torch.Tensor:
    """Call the torch operator for ``op``; returns out, if given."""
    if out is None:
        return operator(NAMES[op])(*args)
    operator(f"{NAMES[op]}.out")(*args, out=out)
    return out


def _define(name: str, arguments: str, struct: Any, forward: Any, fake: Any) -> None:
    """Define an operator of ``arguments``; ``forward`` and ``fake`` take them as ``struct``."""

    def taking(function: Any) -> Any:
        return lambda *args, out=None: function(struct(*args, out=out))

    run, trace = taking(forward), taking(fake)
    define(f"{name}({arguments}) -> Tensor", run, trace)
    define(f"{name}.out({arguments}, *, Tensor(a!) out) -> ()", run, trace)


def define_dispatch() -> None:
    """Define ``dispatch_grouped_scaled_matmul``."""
    _define(
        NAMES[DISPATCH],
        "Tensor x, Tensor? x_scale, Tensor experts, Tensor w_scale, Tensor table,"
        " SymInt max_tokens, int topk, str group_name, str out_dtype, str quantize",
        Dispatch,
        dispatch,
        _fake_dispatch,
    )


def define_combine() -> None:
    """Define ``grouped_scaled_matmul_combine``."""
    _define(
        NAMES[COMBINE],
        "Tensor y, Tensor y_scale, Tensor experts, Tensor w_scale, Tensor table, Tensor? weights,"
        " SymInt tokens, SymInt max_tokens, int topk, str group_name, str out_dtype",
        Combine,
        combine,
        _fake_combine,
    )
