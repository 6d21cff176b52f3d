"""The matmul operators with FP8 operands: ``torch.ops.tileweave.all_gather_scaled_matmul``,
``scaled_matmul_reduce_scatter`` and ``scaled_matmul_all_reduce``.

The public functions of the operators call these where a call has scales: x and w as in the file of
the operator, their scales as in ``scaled.py``. What differs:

all_gather_matmul : FP8 data and its scales are sent, half the bytes of 16-bit numbers, under one
    signal. Scales may differ between ranks, whatever their kind.

matmul_reduce_scatter, matmul_all_reduce : x and w are those of this rank's part of K, with scales
    of their own. Partial sums are rounded to the dtype of the result, sent, and added in float32 in
    rank order, as of 16-bit operands.

``quantize`` : x has 16 or 32 bits and is quantised once, by a kernel, before anything is sent.

``quantize_out`` of matmul_all_reduce : the norm becomes FP8, in the launch of the norm where cuBLAS
    and one launch make the sum, else in one more. Operands may have 16 bits then.

No gradients: calls with tensors that require them are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    Group,
    define,
    group_of,
    log_fallback,
    machine_of,
    name_of,
    rank_and_size,
)
from tileweave.ops.matmul import (
    all_gather_matmul_fused,
    matmul_all_reduce_fused,
    matmul_reduce_scatter_fused,
)
from tileweave.ops.matmul.inputs import (
    accept,
    check_operands,
    check_shape,
    check_traced,
    plan_for,
    plan_now,
)
from tileweave.ops.matmul.products import Added, Plain
from tileweave.ops.matmul.quantize import quantize_rows
from tileweave.ops.matmul.scaled import (
    FP8,
    OUT_DTYPES,
    Call,
    Scaled,
    ScaledProduct,
    aligned,
    as_sent,
    blocks,
    check_scaled,
    kinds_of,
    refuse_gradients,
)
from tileweave.planning.candidates import FP8_ARCH
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_matmul_all_reduce,
    plan_matmul_reduce_scatter,
)
from tileweave.planning.problem import FAST, MatmulConfig, Plan
from tileweave.planning.topology import Topology

AG, RS, AR = all_gather_matmul_fused.OP, matmul_reduce_scatter_fused.OP, matmul_all_reduce_fused.OP
NAMES = {
    AG: "all_gather_scaled_matmul",
    RS: "scaled_matmul_reduce_scatter",
    AR: "scaled_matmul_all_reduce",
}
EPS = 1e-6


# --- What the three have in common ---


def _kind(x: torch.Tensor, x_scale: Any, w: torch.Tensor, w_scale: Any, quantize: str) -> Any:
    """The kinds of the scales of x and w."""
    if x_scale is not None:
        return kinds_of(x_scale, w_scale, x.shape[0], w.shape[0], x.shape[1])
    made = x.new_empty(x.shape[0], -(-x.shape[1] // 128) if quantize == "block" else 1)
    return kinds_of(made, w_scale, x.shape[0], w.shape[0], x.shape[1])


def _parts(
    x: torch.Tensor, x_scale: torch.Tensor | None, kind: str, quantize: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data of x, and its scale as it travels."""
    if x_scale is None:
        return quantize_rows(x, quantize)
    return aligned(x), as_sent(x_scale, kind)


class Planned(NamedTuple):
    """A checked call: its plan, its matmul, and what of x is multiplied."""

    chosen: Plan[MatmulConfig]
    product: Any
    parts: Any


def _prepare(
    op: str,
    call: Call,
    bias: torch.Tensor | None,
    others: tuple[torch.Tensor | None, ...],
    results: tuple[torch.Tensor | None, ...],
    group_name: str,
    check: Callable[[int], None],
    options: object = "",
) -> Planned:
    """Check and plan a call, and quantise x where it asks for that. Operands without scales have 16
    or 32 bits.

    others : what is added to the result.
    results : memory of the caller for the results.
    """
    x, w, w_scale = call.x, call.w, call.w_scale

    def checked(size: int) -> None:
        check(size)
        if w_scale is not None:
            kind, _ = _kind(x, call.x_scale, w, w_scale, call.quantize)
            check_device(x.device, kind)

    refuse_gradients(x, call.x_scale, w, w_scale, bias, *others, *results)
    chosen = accept(
        op,
        group_name,
        x,
        w,
        (call.x_scale, w_scale, bias, *others),
        results,
        ("fp8", call.out_dtype, call.fast_accum, call.quantize, options),
        checked,
        lambda ranks: plan(op, x, w.shape[0], ranks, _scales(call), w.dtype),
    )
    if w_scale is None:
        return Planned(chosen, Plain(w, None), (x,))
    of_x, of_w = _kind(x, call.x_scale, w, w_scale, call.quantize)
    added = bias if op == AG else None
    dtype = OUT_DTYPES[call.out_dtype]
    product = ScaledProduct(Scaled(w, w_scale, of_w), added, of_x, dtype, call.fast_accum)
    return Planned(chosen, product, _parts(x, call.x_scale, of_x, call.quantize))


def check_device(device: torch.device, kind: str) -> None:
    """Raise :class:`InputError` for a device that has no FP8, or none with scales of ``kind``."""
    machine = machine_of(device)
    require(
        machine.backend != "cuda" or machine.arch >= FP8_ARCH,
        lambda: f"FP8 operands on {machine.name}, of compute capability {machine.arch / 10}",
        f"{FP8_ARCH / 10} or more, whose tensor cores take FP8",
        "pass operands of 16 bits",
    )
    require(
        machine.backend != "cuda" or machine.hopper or kind != "block",
        lambda: f"scales of blocks on {machine.name}, of compute capability {machine.arch / 10}",
        "9.0, for which cuBLAS has them",
        "quantise by rows",
    )


def plan(
    op: str,
    x: torch.Tensor,
    cols: int,
    ranks: Topology,
    scales: str,
    dtype: torch.dtype = FP8,
) -> Plan[MatmulConfig]:
    """The plan of a call with FP8 operands, the same on every rank.

    cols : of the result.
    scales : as ``Problem`` has them; "" without FP8 operands.
    dtype : of w.
    """
    planner = {
        AG: plan_all_gather_matmul,
        RS: plan_matmul_reduce_scatter,
        AR: plan_matmul_all_reduce,
    }[op]
    rows = x.shape[0] // ranks.size if op == RS else x.shape[0]
    return plan_for(planner, x, rows, cols, ranks, dtype=dtype, scales=scales)


def scales_of(of_x: str, of_w: str, fast_accum: bool) -> str:
    """The scales of a :class:`Problem`, by the kinds of those of x and w."""
    kind = "row" if "row" in (of_x, of_w) else of_x
    return kind + FAST if fast_accum else kind


def _scales(call: Call) -> str:
    if call.w_scale is None:
        return ""
    of_x, of_w = _kind(call.x, call.x_scale, call.w, call.w_scale, call.quantize)
    return scales_of(of_x, of_w, call.fast_accum)


def check_rows(rows: int, size: int) -> None:
    require(
        rows % size == 0,
        lambda: f"{rows} rows over {size} ranks",
        "a multiple of the group's size",
        "pad the rows, or use matmul_all_reduce",
    )


# --- all_gather_matmul and matmul_reduce_scatter ---


def _rows_of_result(op: str, rows: int, size: int) -> int:
    return size * rows if op == AG else rows // size


def _check_rows_and_out(op: str, call: Call, bias: torch.Tensor | None, size: int) -> None:
    check_scaled(call, bias, call.out)
    if op == RS:
        check_rows(call.x.shape[0], size)
    shape = (_rows_of_result(op, call.x.shape[0], size), call.w.shape[0])
    check_shape("out", call.out, shape, "allocate out with that shape")


def _forward(
    op: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    out_dtype: str,
    fast_accum: bool,
    quantize: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    call = Call(x, x_scale, w, w_scale, out, out_dtype, fast_accum, quantize)

    def check(size: int) -> None:
        _check_rows_and_out(op, call, bias, size)

    made = _prepare(op, call, bias, (), (out,), group_name, check)
    if op == AG:
        return run_gather(made, group_name, out)
    return run_scatter(made, bias, group_name, out)


def run_gather(made: Planned, group_name: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Make a call of all_gather_matmul, and return its result, in ``out`` if given."""
    chosen, product, parts = made
    if chosen.config is None:
        log_fallback(AG, chosen)
        return reference.all_gather_scaled_matmul(parts, product, group_of(group_name), out)
    return all_gather_matmul_fused.run_scaled(parts, product, out, group_name, plan_now(chosen))


def run_scatter(
    made: Planned, bias: torch.Tensor | None, group_name: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Make a call of matmul_reduce_scatter, and return its result, in ``out`` if given."""
    chosen, product, parts = made
    if chosen.config is None:
        log_fallback(RS, chosen)
        return reference.scaled_matmul_reduce_scatter(
            parts, product, bias, group_of(group_name), out
        )
    y = out
    if y is None:
        rows = parts[0].shape[0] // chosen.world_size
        y = parts[0].new_empty(rows, product.cols, dtype=product.dtype)
    matmul_reduce_scatter_fused.run_scaled(parts, product, bias, y, group_name, plan_now(chosen))
    return y


def _fake(
    op: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    out_dtype: str,
    fast_accum: bool,
    quantize: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    call = Call(x, x_scale, w, w_scale, out, out_dtype, fast_accum, quantize)
    size = dist.get_world_size(group_of(group_name))
    check_traced(lambda: _check_rows_and_out(op, call, bias, size))
    rows = _rows_of_result(op, x.shape[0], size)
    return x.new_empty(rows, w.shape[0], dtype=OUT_DTYPES[out_dtype])


# --- matmul_all_reduce ---


def _check_reduce(
    call: Call,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quantize_out: str,
) -> None:
    if call.w_scale is None:
        check_operands(call.x, call.w, bias, residual, norm_weight)
    else:
        check_scaled(call, bias, residual, norm_weight, call.out, residual_out)
    require(
        quantize_out in ("", "row", "block"),
        f"quantize_out={quantize_out!r}",
        "'row', 'block' or None",
        "pass one of these",
    )
    require(
        not quantize_out or (norm_weight is not None and call.out is None),
        "quantize_out= without norm_weight, or with out=",
        "a norm to quantise, without out=",
        "pass norm_weight and drop out=, or call tw.quantize",
    )
    require(
        call.out is None or (residual_out is None) == (norm_weight is None),
        "residual_out without norm_weight, or the reverse",
        "both or neither",
        "allocate what the call returns",
    )
    shape = (call.x.shape[0], call.w.shape[0])
    check_shape("residual", residual, shape, "one value for each of the result")
    check_shape("norm_weight", norm_weight, shape[1:], "one weight for each row of w")
    check_shape("out", call.out, shape, "allocate out with that shape")
    check_shape("residual_out", residual_out, shape, "allocate residual_out with that shape")


def reduce(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    quantize_out: str,
    group_name: str,
    out_dtype: str,
    fast_accum: bool,
    quantize: str,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    call = Call(x, x_scale, w, w_scale, out, out_dtype, fast_accum, quantize)
    made = _prepare(
        AR,
        call,
        bias,
        (residual, norm_weight),
        (out, residual_out),
        group_name,
        lambda _: _check_reduce(call, bias, residual, norm_weight, residual_out, quantize_out),
        (norm_eps, quantize_out),
    )
    added = Added(bias, residual, norm_weight, norm_eps, quantize_out)
    config, (rows, _), cols = made.chosen.config, x.shape, w.shape[0]
    if quantize_out and config is not None and config.kernel == "library":  # by that of the norm
        kept = residual_out
        if kept is None:
            kept = x.new_empty(rows, cols, dtype=made.product.dtype)
        data = x.new_empty(rows, cols, dtype=torch.uint8)
        shape = (rows,) if quantize_out == "row" else (blocks(cols), rows)
        scale = x.new_empty(shape, dtype=torch.float32)
        matmul_all_reduce_fused.run_library(
            made.parts, made.product, added, data, kept, group_name, made.chosen, scale
        )
        return data.view(FP8), _scale_of(scale, quantize_out), kept
    y, kept = run_reduce(made, added, group_name, out, residual_out)
    return _as_returned(y, kept, quantize_out)


def run_reduce(
    made: Planned,
    added: Added,
    group_name: str,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make a call of matmul_all_reduce with a result that is not quantised: (result, what is kept
    for the residual), in the memory of the caller if given."""
    chosen, product, parts = made
    config, rows = chosen.config, parts[0].shape[0]
    if config is None:
        log_fallback(AR, chosen)
        more = group_of(group_name), out, residual_out
        return reference.scaled_matmul_all_reduce(parts, product, *added[:4], *more)
    shape, dtype = (rows, product.cols), product.dtype
    y = parts[0].new_empty(shape, dtype=dtype) if out is None else out
    kept = residual_out
    if kept is None and added.norm_weight is not None:
        kept = torch.empty_like(y)
    if config.kernel == "library" or len(parts) > 1:
        matmul_all_reduce_fused.run_scaled(parts, product, added, y, kept, group_name, chosen)
    else:  # operands of 16 bits
        given = parts[0], product.w, *added[:4]
        matmul_all_reduce_fused.run_fused(*given, y, kept, group_name, chosen)
    return y, kept


def _as_returned(
    y: torch.Tensor, kept: torch.Tensor | None, quantize_out: str
) -> tuple[torch.Tensor, ...]:
    """(result, scale, residual), empty where there is none."""
    kept = y.new_empty(0) if kept is None else kept
    if not quantize_out:
        return y, y.new_empty(0, dtype=torch.float32), kept
    data, scale = quantize_rows(y, quantize_out)
    return data, _scale_of(scale, quantize_out), kept


def _scale_of(sent: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales as they are stored, as those of an operand x."""
    return sent.view(-1, 1) if kind == "row" else sent.t()


def _fake_reduce(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    quantize_out: str,
    group_name: str,
    out_dtype: str,
    fast_accum: bool,
    quantize: str,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    call = Call(x, x_scale, w, w_scale, out, out_dtype, fast_accum, quantize)
    check_traced(
        lambda: _check_reduce(call, bias, residual, norm_weight, residual_out, quantize_out)
    )
    (rows, _), cols = x.shape, w.shape[0]
    y = x.new_empty(rows, cols, dtype=x.dtype if w_scale is None else OUT_DTYPES[out_dtype])
    kept = y.new_empty(0) if norm_weight is None else torch.empty_like(y)
    if not quantize_out:
        return y, y.new_empty(0, dtype=torch.float32), kept
    shape = (rows,) if quantize_out == "row" else (-(-cols // 128), rows)
    scale = x.new_empty(shape, dtype=torch.float32)
    return torch.empty_like(y, dtype=FP8), _scale_of(scale, quantize_out), kept


# --- Public calls, and registration ---


def all_gather(
    call: Call, bias: Any, x: torch.Tensor, name: str, out: torch.Tensor | None
) -> torch.Tensor:
    """``all_gather_matmul`` of ``call``; x and out as they were passed."""
    y = _invoke(AG, call, (bias, name))
    return _shaped(y, x, out, rank_and_size(name)[1] * x.shape[0] if x.dim() > 2 else 0)


def reduce_scatter(
    call: Call, bias: Any, x: torch.Tensor, name: str, out: torch.Tensor | None
) -> torch.Tensor:
    """``matmul_reduce_scatter`` of ``call``; x and out as they were passed."""
    if x.dim() > 2:
        check_rows(x.shape[0], rank_and_size(name)[1])
    y = _invoke(RS, call, (bias, name))
    return _shaped(y, x, out, x.shape[0] // rank_and_size(name)[1] if x.dim() > 2 else 0)


def _shaped(
    y: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor | None, first: int
) -> torch.Tensor:
    if out is not None:
        return out
    assert y is not None, "only the .out form returns nothing"
    return y if x.dim() == 2 else y.view(first, *x.shape[1:-1], y.shape[-1])


def all_reduce(
    call: Call,
    added: tuple[Any, ...],
    residual_out: torch.Tensor | None,
    name: str,
    quantize_out: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """``matmul_all_reduce`` of ``call`` and ``added`` (bias, residual, norm_weight, norm_eps):
    (result, its scale with ``quantize_out``, residual)."""
    return _invoke(AR, call, (*added, quantize_out, name), residual_out=residual_out)


def _invoke(op: str, call: Call, more: tuple[Any, ...], **results: Any) -> Any:
    name = NAMES[op]
    options = (call.out_dtype, call.fast_accum, call.quantize)
    args = (call.x, call.x_scale, call.w, call.w_scale, *more, *options)
    of_fp8 = call.w.dtype == FP8 or call.x_scale is not None or call.quantize or call.fast_accum
    if call.w_scale is None and (op != AR or of_fp8):
        check_scaled(call, None)  # what the schema has no place for
    if call.out is None:
        return operator(name)(*args)
    return operator(f"{name}.out")(*args, out=call.out, **results)


def explain(op: str, call: Call, bias: Any, group: Group | None) -> Plan:
    """The plan of a call. ``bias``: also what else is added to the result is checked by calls."""
    if op == AR:
        check_scaled(call, bias)
    else:
        _check_rows_and_out(op, call, bias, rank_and_size(name_of(group))[1])
    ranks = known_topology_of(name_of(group))
    return plan(op, call.x, call.w.shape[0], ranks, _scales(call), call.w.dtype)


def _define(op: str, more: str, results: str, outs: str, forward: Any, fake: Any) -> None:
    name, of_w = NAMES[op], "Tensor? w_scale" if op == AR else "Tensor w_scale"
    arguments = (
        f"Tensor x, Tensor? x_scale, Tensor w, {of_w}, Tensor? bias, {more}str group_name,"
        " str out_dtype, bool fast_accum, str quantize"
    )
    define(f"{name}({arguments}) -> {results}", forward, fake)
    define(f"{name}.out({arguments}, *, {outs}) -> ()", forward, fake)


def define_gather() -> None:
    """Define ``all_gather_scaled_matmul``."""
    _define(AG, "", "Tensor", "Tensor(a!) out", partial(_forward, AG), partial(_fake, AG))


def define_scatter() -> None:
    """Define ``scaled_matmul_reduce_scatter``."""
    _define(RS, "", "Tensor", "Tensor(a!) out", partial(_forward, RS), partial(_fake, RS))


def define_reduce() -> None:
    """Define ``scaled_matmul_all_reduce``."""
    _define(
        AR,
        "Tensor? residual, Tensor? norm_weight, float norm_eps, str quantize_out, ",
        "(Tensor, Tensor, Tensor)",
        "Tensor(a!) out, Tensor(b!)? residual_out",
        reduce,
        _fake_reduce,
    )
