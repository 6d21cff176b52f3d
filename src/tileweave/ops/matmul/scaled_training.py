"""FP8 training of dense layers: x and w have 16 bits and gradients, and are quantised in each call.

``torch.ops.tileweave.all_gather_quantized_matmul``, ``quantized_matmul_reduce_scatter`` and
``quantized_matmul_all_reduce``, which the public functions call with ``quantize=`` the name of a
recipe. Names and scales are those of torchao's ``Float8LinearConfig``; torchtitan has them, too:

======================  ==================  ===================  ====================
recipe                  y = x @ w.T         gx = gy @ w          gw = gy.T @ x
======================  ==================  ===================  ====================
``rowwise``             rows of x, of w     rows of gy, of w.T   rows of gy.T, of x.T
``rowwise_with_gw_hp``  rows of x, of w     rows of gy, all w    16 bits
======================  ==================  ===================  ====================

Scales are maxima / 448, rounded up to powers of two, so that to multiply by them is exact. Each is
of what one rank has: of w, and of x of a row-parallel layer, one for each rank's part.

forward : the operators of ``scaled_operators.py``; x is quantised before it is sent.

input gradient : their dual. all_gather_matmul scatters partial sums of 16 bits. Where a
reduce-scatter's gradient gy is also needed for gw, it is gathered once, with 16 bits, and each
shard is quantised as it arrives; else with 8.

weight gradient : x, or gy, is gathered with 16 bits, since its columns span the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops.core import collectives
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    define,
    first_derivative,
    group_of,
    name_of,
    rank_and_size,
)
from tileweave.ops.matmul import scaled_operators as scaled
from tileweave.ops.matmul.backward import GatherBackward
from tileweave.ops.matmul.concurrent_gather import begin_gather_of_backward, too_large
from tileweave.ops.matmul.inputs import as_rows, check_traced
from tileweave.ops.matmul.quantize import quantize_columns, quantize_rows
from tileweave.ops.matmul.scaled import (
    ALIGN,
    FP8,
    OUT_DTYPES,
    RECIPES,
    Scaled,
    ScaledProduct,
    as_sent,
)
from tileweave.ops.matmul.scaled_calls import Scaling, check_flag
from tileweave.planning.problem import Plan

AG, RS, AR = scaled.AG, scaled.RS, scaled.AR
NAMES = {
    AG: "all_gather_quantized_matmul",
    RS: "quantized_matmul_reduce_scatter",
    AR: "quantized_matmul_all_reduce",
}
ROWWISE, _ = RECIPES


# --- Quantisation and products of a recipe ---


def by_rows(t: torch.Tensor) -> Scaled:
    """t [rows, K] with a scale for each row."""
    data, scale = quantize_rows(t.contiguous(), "row", powers=True)
    return Scaled(data, scale.view(-1, 1), "row")


def by_columns(t: torch.Tensor) -> Scaled:
    """t.T with a scale for each of its rows; zeros pad them to a multiple of 16."""
    data, scale = quantize_columns(t)
    return Scaled(data, scale.view(-1, 1), "row")


def multiply(
    x: Scaled, w: Scaled, dtype: torch.dtype, fast_accum: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] @ w.T [K, N], rounded to ``dtype``."""
    product = ScaledProduct(w, None, x.kind, dtype, fast_accum)
    return product((x.data, as_sent(x.scale, x.kind)), out)


class Recipe(NamedTuple):
    """The matmuls of a backward, and of a layer that sends nothing."""

    name: str
    fast_accum: bool

    def plan(self, op: str, x: torch.Tensor, w: torch.Tensor, group_name: str) -> Plan:
        """The plan of ``op`` of x and w once they are quantised."""
        scales = scaled.scales_of("row", "row", self.fast_accum)
        return scaled.plan(op, x, w, known_topology_of(group_name), scales, FP8)

    def turned(self, w: torch.Tensor) -> Scaled:
        """w [N, K] as it multiplies gradients of the result: w.T [K, N]."""
        if self.name == ROWWISE:
            return by_columns(w)
        return Scaled(*quantize_columns(w, whole=True), "tensor")

    def input_gradient(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """grad [M, N] @ w [N, K]."""
        return multiply(by_rows(grad), self.turned(w), grad.dtype, self.fast_accum)

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad.T [N, M] @ x [M, K]."""
        if self.name != ROWWISE:
            return grad.t() @ x
        return multiply(by_columns(grad), by_columns(x), grad.dtype, self.fast_accum)


def _scaled(call: Callable[..., Any], x: Scaled, w: Scaled, *more: Any) -> Any:
    """An operator with FP8 operands."""
    return call(x.data, x.scale, w.data, w.scale, *more)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Checks ---


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> None:
    """Raise :class:`InputError` for operands that do not fit, before anything is sent."""
    tensors = [t for t in (x, w, bias) if t is not None]
    require(
        x.dtype in OUT_DTYPES.values() and all(t.dtype == x.dtype for t in tensors),
        lambda: f"{', '.join(str(t.dtype) for t in tensors)} with quantize={recipe!r}",
        "x, w and bias of bfloat16, or all of float16",
        "convert them, as layers of tileweave.nn do under torch.autocast; with an FP8 w pass "
        "quantize='row'",
    )
    require(
        all(t.device == x.device for t in tensors),
        lambda: ", ".join(str(t.device) for t in tensors),
        "one device",
        "move all tensors to x.device",
    )
    require(
        x.dim() == 2 and w.dim() == 2 and x.shape[1] == w.shape[1],
        lambda: f"x {tuple(x.shape)}, w {tuple(w.shape)}",
        "x [m, K] and w [n, K], with equal K",
        "transpose w to Linear layout [n, K]",
    )
    require(
        w.shape[0] % ALIGN == 0 and w.shape[1] % ALIGN == 0,
        lambda: f"w {tuple(w.shape)} with quantize={recipe!r}",
        f"[n, K] with multiples of {ALIGN}, which FP8 tensor cores need",
        "pad the layer, or leave it in 16 bits",
    )
    require(
        bias is None or tuple(bias.shape) == (w.shape[0],),
        lambda: f"bias {tuple(bias.shape) if bias is not None else ()}",
        f"{(w.shape[0],)}",
        "one bias for each row of w",
    )


def as_called(
    op: str,
    x: torch.Tensor,
    w: Any,
    bias: Any,
    scaling: Scaling,
    unsupported: dict[str, object],
) -> torch.Tensor:
    """x of a public call as rows. Raises for arguments that do not go with a recipe."""
    unsupported = {**unsupported, "x_scale": scaling.x_scale, "w_scale": scaling.w_scale}
    for name, value in unsupported.items():
        require(
            value is None or value is False,
            f"{name}= with quantize={scaling.quantize!r}",
            "calls without it",
            f"drop {name}=",
        )
    require(
        isinstance(w, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor)),
        f"w of type {type(w).__name__}, bias of type {type(bias).__name__} with "
        f"quantize={scaling.quantize!r}",
        "one tensor each",
        "make one call for each weight, or concatenate them",
    )
    check_flag(scaling)
    rows = as_rows(x, w, op)
    require(
        scaling.out_dtype in (None, x.dtype),
        f"out_dtype={scaling.out_dtype} of x {x.dtype} with quantize={scaling.quantize!r}",
        "the dtype of x",
        "drop out_dtype=",
    )
    _check(rows, w, bias, scaling.quantize or "")
    return rows


# --- Forward ---


def _rows(op: str, rows: int, size: int) -> int:
    """Rows of the result for x of so many."""
    return {AG: rows * size, RS: rows // size, AR: rows}[op]


def _forward(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    recipe: str,
    fast_accum: bool,
) -> torch.Tensor:
    _check(x, w, bias, recipe)
    data, weight = by_rows(x), by_rows(w)
    if op == AR and not group_name:  # a layer that sends nothing
        y = multiply(data, weight, x.dtype, fast_accum)
        return y if bias is None else y.add_(bias)
    plain = None if bias is None else bias.detach().contiguous()
    more = (group_name, _name_of(x.dtype), fast_accum, "")
    if op == AR:
        return _scaled(scaled.reduce, data, weight, plain, None, None, scaled.EPS, "", *more)[0]
    return _scaled(scaled.gather if op == AG else scaled.scatter, data, weight, plain, *more)


def _fake(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    recipe: str,
    _fast_accum: bool,
) -> torch.Tensor:
    check_traced(lambda: _check(x, w, bias, recipe))
    size = 1 if op == AR else dist.get_world_size(group_of(group_name))
    return x.new_empty(_rows(op, x.shape[0], size), w.shape[0])


# --- Backward ---


@dataclass(slots=True)
class _ScaledGatherBackward(GatherBackward):
    """The backward with the matmuls of a recipe."""

    recipe: Recipe = field(kw_only=True)

    def scatters_fused(self, grad: torch.Tensor, w: torch.Tensor) -> bool:
        return self.recipe.plan(RS, grad, w.t(), self.group_name).config is not None

    def multiply_and_scatter(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        more = (None, self.group_name, _name_of(grad.dtype), self.recipe.fast_accum, "")
        return _scaled(scaled.scatter, by_rows(grad), self.recipe.turned(w), *more)

    def multiply(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.recipe.input_gradient(grad, w)

    def weight_gradient(self, grad: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        return self.recipe.weight_gradient(grad, gathered)


def _gather_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    group_name: str,
    recipe: str,
    fast_accum: bool,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    how = Recipe(recipe, fast_accum)
    call = _ScaledGatherBackward([grad], None, x, [w], None, group_name, recipe=how)
    gx, (gw,), _ = call.run(need_x, [need_w])
    return gx, gw, grad.sum(0) if need_bias else grad.new_empty(0)


def _scatter_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    group_name: str,
    recipe: str,
    fast_accum: bool,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    group, how, grad = group_of(group_name), Recipe(recipe, fast_accum), grad.contiguous()
    gx, gw, gb = (grad.new_empty(0) for _ in range(3))
    gathered = None
    if need_x and need_w:
        gx, gathered = _gather_and_multiply(grad, w, group_name, how)
    elif need_x:
        more = (None, group_name, _name_of(grad.dtype), fast_accum, "")
        gx = _scaled(scaled.gather, by_rows(grad), how.turned(w), *more)
    elif need_w:
        gathered = collectives.all_gather(grad, group)
    if need_w and gathered is not None:
        gw = how.weight_gradient(gathered, x)
    if need_bias:
        gb = collectives.all_reduce(grad.sum(0), group) if gathered is None else gathered.sum(0)
    return gx, gw, gb


def _gather_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, group_name: str, how: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gather(grad) @ w, gather(grad)) for grad [m, N] and w [N, K]: each shard is quantised and
    multiplied as copy engines bring it, where a gather of FP8 would be fused."""
    size, (rows, cols), depth = rank_and_size(group_name)[1], grad.shape, w.shape[1]
    chosen = how.plan(AG, grad, w.t(), group_name)
    if chosen.config is None or too_large(grad):
        gathered = collectives.all_gather(grad, group_of(group_name))
        return how.input_gradient(gathered, w), gathered
    turned = how.turned(w)
    gx, gathered = grad.new_empty(size * rows, depth), grad.new_empty(size * rows, cols)
    places = gx.view(size, rows, depth), gathered.view(size, rows, cols)
    gathering = begin_gather_of_backward(grad, group_name)
    try:
        for source, (shard,) in gathering.shards():
            into, kept = (place[source] for place in places)
            multiply(by_rows(shard), turned, grad.dtype, how.fast_accum, into)
            kept.copy_(shard)
    finally:  # also when memory runs out: the next gather would find the signals of this one
        gathering.end(gx, gathered)
    return gx, gathered


def _reduce_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    _group_name: str,
    recipe: str,
    fast_accum: bool,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    """Nothing is sent: gradients of the result are the same on every rank."""
    how, empty = Recipe(recipe, fast_accum), grad.new_empty(0)
    return (
        how.input_gradient(grad, w) if need_x else empty,
        how.weight_gradient(grad, x) if need_w else empty,
        grad.sum(0) if need_bias else empty,
    )


# --- Registration, and public calls ---


def _fake_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    _group_name: str,
    _recipe: str,
    _fast_accum: bool,
    *needed: bool,
) -> tuple[torch.Tensor, ...]:
    likely = torch.empty_like(x), w.new_empty(w.shape), w.new_empty(w.shape[0])
    return tuple(
        like if needs else grad.new_empty(0) for like, needs in zip(likely, needed, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, ctx.group_name, ctx.recipe, ctx.fast_accum = inputs
    ctx.save_for_backward(x, w)


def define_training(op: str) -> None:
    """Define the operator of a recipe that goes with ``op``, and its backward."""
    name = NAMES[op]
    backward = {AG: _gather_backward, RS: _scatter_backward, AR: _reduce_backward}[op]

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        options = (ctx.group_name, ctx.recipe, ctx.fast_accum)
        found = operator(f"{name}_backward")(grad, *ctx.saved_tensors, *options, *needed)
        given = [g if needs else None for g, needs in zip(found, needed, strict=True)]
        return (*given, None, None, None)

    options = "str group_name, str recipe, bool fast_accum"
    define(
        f"{name}(Tensor x, Tensor w, Tensor? bias, {options}) -> Tensor",
        partial(_forward, op),
        partial(_fake, op),
        first_derivative(name, gradients),
        _setup_context,
    )
    define(
        f"{name}_backward(Tensor grad, Tensor x, Tensor w, {options}, bool need_x, bool need_w,"
        " bool need_bias) -> (Tensor, Tensor, Tensor)",
        backward,
        _fake_backward,
    )


def call(
    op: str,
    x: torch.Tensor,
    w: Any,
    bias: Any,
    scaling: Scaling,
    name: str,
    unsupported: dict[str, object],
) -> torch.Tensor:
    """``op`` of operands of 16 bits by recipe ``scaling.quantize``. ``unsupported``: arguments that
    do not go with one, by name."""
    rows = check_own(op, name, as_called, op, x, w, bias, scaling, unsupported)
    size = rank_and_size(name)[1]
    if op == RS:
        scaled.check_rows(x.shape[0], size)
    y = operator(NAMES[op])(rows, w, bias, name, scaling.quantize, bool(scaling.fast_accum))
    if x.dim() == 2:
        return y
    return y.view(_rows(op, x.shape[0], size), *x.shape[1:-1], y.shape[-1])


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    """x [..., K] @ w.T + bias by a recipe, on this rank alone."""
    rows = as_called(AR, x, w, bias, Scaling(quantize=recipe), {})
    y = operator(NAMES[AR])(rows, w, bias, "", recipe, False)
    return y.view(*x.shape[:-1], w.shape[0])


def explain(op: str, x: torch.Tensor, w: Any, bias: Any, scaling: Scaling, group: Any) -> Plan:
    """The plan of a forward by a recipe."""
    rows = as_called(op, x, w, bias, scaling, {})
    if op == RS:
        scaled.check_rows(x.shape[0], rank_and_size(name_of(group))[1])
    how = Recipe(scaling.quantize or "", bool(scaling.fast_accum))
    return how.plan(op, rows, w, name_of(group))
