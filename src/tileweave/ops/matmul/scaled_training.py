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

forward : on the paths of ``scaled_operators.py``; x is quantised before it is sent. Operands of 16
bits are checked, once per signature; what is made of them needs no further check.

input gradient : the dual operator. all_gather_matmul scatters partial sums of 16 bits. Where a
reduce-scatter's gradient gy is also needed for gw, it is gathered once, with 16 bits, and each
shard is quantised as it arrives; else with 8.

weight gradient : x, or gy, is gathered with 16 bits, since its columns span the ranks.
"""

from __future__ import annotations

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
from tileweave.ops.matmul.inputs import accept, as_rows, check_traced
from tileweave.ops.matmul.products import Added
from tileweave.ops.matmul.quantize import (
    quantize_both_columns,
    quantize_both_rows,
    quantize_columns,
    quantize_rows,
)
from tileweave.ops.matmul.scaled import (
    ALIGN,
    OUT_DTYPES,
    RECIPES,
    Scaled,
    ScaledProduct,
)
from tileweave.ops.matmul.scaled_calls import Scaling, check_flag
from tileweave.planning.problem import Plan
from tileweave.planning.topology import Topology

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
    data, scale = quantize_rows(t.contiguous(), "row", True, (t.shape[0], 1))
    return Scaled(data, scale, "row")


def _sent(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t [rows, K] with a scale for each row, as it travels."""
    return quantize_rows(t.contiguous(), "row", True)


def multiply(
    x: Scaled, w: Scaled, dtype: torch.dtype, fast_accum: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] @ w.T [K, N], rounded to ``dtype``."""
    return ScaledProduct(w, None, x.kind, dtype, fast_accum).of(x, out)


class Recipe(NamedTuple):
    """The matmuls of a recipe."""

    name: str
    fast_accum: bool

    def plan(self, op: str, x: torch.Tensor, cols: int, ranks: Topology) -> Plan:
        """The plan of ``op`` of x and a weight with so many columns of the result, once they are
        quantised."""
        return scaled.plan(op, x, cols, ranks, scaled.scales_of("row", "row", self.fast_accum))

    def accept(
        self,
        op: str,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group_name: str,
        turned: bool = False,
    ) -> Plan:
        """Check and plan a call of ``op`` before x and w are quantised, once per signature.
        ``turned``: x is a gradient, and w multiplies it as :meth:`turned` returns it."""

        def check(size: int) -> None:
            if not turned:
                _check(x, w, bias, self.name)
            if op == RS:
                scaled.check_rows(x.shape[0], size)
            scaled.check_device(x.device, "row")

        options = ("fp8", *self, turned)
        cols = w.shape[1 if turned else 0]

        def plan(ranks: Topology) -> Plan:
            return self.plan(op, x, cols, ranks)

        return accept(op, group_name, x, w, (bias,), (None,), options, check, plan)

    def product(
        self, w: Scaled, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> ScaledProduct:
        """What x with scales of rows is multiplied by."""
        return ScaledProduct(w, bias, "row", dtype, self.fast_accum)

    def turned(self, w: torch.Tensor) -> Scaled:
        """w [N, K] as it multiplies gradients of the result: w.T [K, N]."""
        data, scale = quantize_columns(w, whole=self.name != ROWWISE)
        return Scaled(data, scale, "row")

    def input_gradient(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """grad [M, N] @ w [N, K]."""
        return multiply(by_rows(grad), self.turned(w), grad.dtype, self.fast_accum)

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad.T [N, M] @ x [M, K]."""
        if self.name != ROWWISE:
            return grad.t() @ x
        of_grad, grad_scale, of_x, x_scale = quantize_both_columns(grad, x)
        given, by = Scaled(of_grad, grad_scale, "row"), Scaled(of_x, x_scale, "row")
        return multiply(given, by, grad.dtype, self.fast_accum)


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
    group_name: str,
    unsupported: dict[str, object],
) -> torch.Tensor:
    """x of a public call as rows. Raises for what those no longer show, and for arguments that do
    not go with a recipe; the operator checks the rest, once per signature."""
    refused = *unsupported.items(), ("x_scale", scaling.x_scale), ("w_scale", scaling.w_scale)
    for name, value in refused:
        if value is not None and value is not False:
            require(
                False,
                f"{name}= with quantize={scaling.quantize!r}",
                "calls without it",
                f"drop {name}=",
            )
    if not isinstance(w, torch.Tensor) or not (bias is None or isinstance(bias, torch.Tensor)):
        require(
            False,
            f"w of type {type(w).__name__}, bias of type {type(bias).__name__} with "
            f"quantize={scaling.quantize!r}",
            "one tensor each",
            "make one call for each weight, or concatenate them",
        )
    check_flag(scaling)
    rows = as_rows(x, w, op)
    if scaling.out_dtype not in (None, x.dtype):
        require(
            False,
            f"out_dtype={scaling.out_dtype} of x {x.dtype} with quantize={scaling.quantize!r}",
            "the dtype of x",
            "drop out_dtype=",
        )
    if op == RS and x.dim() > 2:
        scaled.check_rows(x.shape[0], rank_and_size(group_name)[1])
    return rows


# --- Forward ---


def _height(op: str, rows: int, size: int) -> int:
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
    how = Recipe(recipe, fast_accum)
    chosen = how.accept(op, x, w, bias, group_name) if group_name else None
    if chosen is None:  # a layer that sends nothing
        _check(x, w, bias, recipe)
    parts, weight = quantize_both_rows(x.contiguous(), w.contiguous())
    if bias is not None:
        bias = bias.contiguous()
    product = how.product(Scaled(*weight, "row"), x.dtype, bias if op == AG else None)
    if chosen is None:
        y = product(parts)
        return y if bias is None else y.add_(bias)
    made = scaled.Planned(chosen, product, parts)
    if op == AG:
        return scaled.run_gather(made, group_name)
    if op == RS:
        return scaled.run_scatter(made, bias, group_name)
    return scaled.run_reduce(made, Added(bias), group_name)[0]


def _fake(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    recipe: str,
    _fast_accum: bool,
) -> torch.Tensor:
    size = 1 if op == AR else dist.get_world_size(group_of(group_name))

    def check() -> None:
        _check(x, w, bias, recipe)
        if op == RS:
            scaled.check_rows(x.shape[0], size)

    check_traced(check)
    return x.new_empty(_height(op, x.shape[0], size), w.shape[0])


# --- Backward ---


@dataclass(slots=True)
class _ScaledGatherBackward(GatherBackward):
    """The backward with the matmuls of a recipe. ``chosen``: the plan of the reduce-scatter."""

    recipe: Recipe = field(kw_only=True)
    chosen: Plan = field(default=Plan("unfused", ""), kw_only=True)

    def scatters_fused(self, grad: torch.Tensor, w: torch.Tensor) -> bool:
        self.chosen = self.recipe.accept(RS, grad, w, None, self.group_name, turned=True)
        return self.chosen.config is not None

    def multiply_and_scatter(self, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = self.recipe.product(self.recipe.turned(w), grad.dtype)
        made = scaled.Planned(self.chosen, product, _sent(grad))
        return scaled.run_scatter(made, None, self.group_name)

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
) -> tuple[torch.Tensor | None, ...]:
    how = Recipe(recipe, fast_accum)
    call = _ScaledGatherBackward([grad], None, x, [w], None, group_name, recipe=how)
    gx, (gw,), _ = call.run(need_x, [need_w])
    return gx, gw, grad.sum(0) if need_bias else None


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
) -> tuple[torch.Tensor | None, ...]:
    how, grad = Recipe(recipe, fast_accum), grad.contiguous()
    gx = gw = gb = gathered = None
    if need_x and need_w:
        gx, gathered = _gather_and_multiply(grad, w, group_name, how)
    elif need_x:
        chosen = how.accept(AG, grad, w, None, group_name, turned=True)
        product = how.product(how.turned(w), grad.dtype)
        gx = scaled.run_gather(scaled.Planned(chosen, product, _sent(grad)), group_name)
    elif need_w:
        gathered = collectives.all_gather(grad, group_of(group_name))
    if need_w and gathered is not None:
        gw = how.weight_gradient(gathered, x)
    if need_bias and gathered is None:
        gb = collectives.all_reduce(grad.sum(0), group_of(group_name))
    elif need_bias and gathered is not None:
        gb = gathered.sum(0)
    return gx, gw, gb


def _gather_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, group_name: str, how: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gather(grad) @ w, gather(grad)) for grad [m, N] and w [N, K]: each shard is quantised and
    multiplied as copy engines bring it, where a gather of FP8 would be fused."""
    ranks, (rows, cols), depth = known_topology_of(group_name), grad.shape, w.shape[1]
    size = ranks.size
    if how.plan(AG, grad, depth, ranks).config is None or too_large(grad):
        gathered = collectives.all_gather(grad, group_of(group_name))
        return how.input_gradient(gathered, w), gathered
    store = how.product(how.turned(w), grad.dtype).repeated()
    gx, gathered = grad.new_empty(size * rows, depth), grad.new_empty(size * rows, cols)
    into = gx.view(size, rows, depth).unbind()
    kept = gathered.view(size, rows, cols).unbind()
    gathering = begin_gather_of_backward(grad, group_name)
    try:
        for source, (shard,) in gathering.shards():
            store(_sent(shard), into[source])
            kept[source].copy_(shard)
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
) -> tuple[torch.Tensor | None, ...]:
    """Nothing is sent: gradients of the result are the same on every rank."""
    how = Recipe(recipe, fast_accum)
    return (
        how.input_gradient(grad, w) if need_x else None,
        how.weight_gradient(grad, x) if need_w else None,
        grad.sum(0) if need_bias else None,
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
    name, run = NAMES[op], operator(f"{NAMES[op]}_backward")
    backward = {AG: _gather_backward, RS: _scatter_backward, AR: _reduce_backward}[op]

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        options = (ctx.group_name, ctx.recipe, ctx.fast_accum)
        found = run(grad, *ctx.saved_tensors, *options, *needed)
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
    rows = check_own(op, name, as_called, op, x, w, bias, scaling, name, unsupported)
    y = operator(NAMES[op])(rows, w, bias, name, scaling.quantize, bool(scaling.fast_accum))
    if x.dim() == 2:
        return y
    return y.view(_height(op, x.shape[0], rank_and_size(name)[1]), *x.shape[1:-1], y.shape[-1])


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    """x [..., K] @ w.T + bias by a recipe, on this rank alone."""
    rows = as_called(AR, x, w, bias, Scaling(quantize=recipe), "", {})
    y = operator(NAMES[AR])(rows, w, bias, "", recipe, False)
    return y.view(*x.shape[:-1], w.shape[0])


def explain(op: str, x: torch.Tensor, w: Any, bias: Any, scaling: Scaling, group: Any) -> Plan:
    """The plan of a forward by a recipe."""
    name, recipe = name_of(group), scaling.quantize or ""
    rows = as_called(op, x, w, bias, scaling, name, {})
    _check(rows, w, bias, recipe)
    ranks = known_topology_of(name)
    if op == RS:
        scaled.check_rows(rows.shape[0], ranks.size)
    return Recipe(recipe, bool(scaling.fast_accum)).plan(op, rows, w.shape[0], ranks)
