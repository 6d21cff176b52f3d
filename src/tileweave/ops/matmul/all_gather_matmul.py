"""all_gather_matmul: gather the row shards of x from all ranks and multiply by this rank's columns.

=========  ==========  ====================================================
x          [m, K]      shard of the rows, m = M/R; [m, ..., K] also works
w          [n, K]      this rank's rows of a Linear weight, n = N/R
bias       [n]         optional
y          [M, n]      gather(x) @ w.T + bias
gathered   [M, K]      gather(x), in memory of its own
=========  ==========  ====================================================

forward : one fused kernel (``kernels/all_gather/triton.py``), or all-gather then matmul where that
is faster.

input gradient : gx = reduce_scatter(gy @ w), which is ``matmul_reduce_scatter``, the dual operator.

weight gradient : gw = gy.T @ gather(x). x is gathered again, so that only the shard is kept. With
``return_gathered=True`` the gathered input is kept, R times the memory of x, and nothing is sent
again. Where the input gradient is not fused, both collectives overlap: x is gathered while the
input gradient is computed, gx is scattered while the weight gradient is computed.

bias gradient : gy summed over rows.

Sources: FLUX, arXiv 2406.06858; the pair of dual operators as in Megatron-LM sequence parallelism,
arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.dtensors import takes_dtensors
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.matmul import all_gather_matmul_list as several
from tileweave.ops.matmul import scaled_calls as calls
from tileweave.ops.matmul import scaled_operators as fp8
from tileweave.ops.matmul import scaled_training as training
from tileweave.ops.matmul.all_gather_matmul_fused import OP, run_fused
from tileweave.ops.matmul.all_gather_matmul_list import as_operands
from tileweave.ops.matmul.backward import GatherBackward
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_operands,
    check_shape,
    check_traced,
    out_as_rows,
    plan_for,
    plan_now,
    sequence_first,
)
from tileweave.ops.matmul.known_calls import call_again, unflatten
from tileweave.ops.matmul.warmup import warmup_matmul
from tileweave.planning.matmul import plan_all_gather_matmul
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.topology import Topology

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")
_OF_LISTS = operator(f"{OP}_list")
_ALLOWED = "[R * m, ..., n]"  # of out


@takes_dtensors(-1, x=0, w=0, bias=0)
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: Group | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    cols: int | Sequence[int] | None = None,
    main_grad: torch.Tensor | Sequence[torch.Tensor] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Multiply the row shards of all ranks by this rank's weight: ``gather(x) @ w.T + bias``.

    bfloat16 and float16 on CUDA (float32 unfused), also float32 on the CPU, and FP8 with scales.
    Sums are computed in float32.

    Parameters
    ----------
    x : [m, K] or [m, ..., K]
        Row shard of this rank, with the same shape on every rank. Gathered along dimension 0.
        Copied in each call if it is not contiguous.

    w : [n, K], or a list of [n_i, K], rows or columns contiguous
        Weight in ``torch.nn.Linear`` layout, with the dtype of x and, without ``cols``, the same
        shape on every rank. Of several weights the fused kernel multiplies by the one with the most
        columns and stores gather(x); matmuls of torch multiply that by the others. The backward has
        one gather and one reduce-scatter for all. Weights that are parts of one tensor are faster
        as that tensor, with ``y.split``.

    bias : [n], or a list of [n_i] or None, optional
        Added to each row, with the dtype of x.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    return_gathered : bool
        Also return gather(x). The backward then keeps it and sends nothing again.

    gather_dim : 0 or 1
        1: x is [B, s, ..., K] and is gathered along s. Results are views of memory in the order
        [S, B, ..., n], which are not copied. x is copied once, unless B is 1 or x is such a view
        itself, like a function by element of a result. The gradient of y is copied alike.

    cols : int, or a list of int, optional
        The largest n of any rank, the same on every rank, for ranks whose weights have different
        numbers of rows: a dimension that R does not divide, cut as DTensor's ``Shard`` does. A rank
        may have none.

    main_grad : [n, K], or a list of [n_i, K], optional
        In the backward the gradient of w is added to it, and the gradient of w is None. float32,
        contiguous; on a GPU one matmul adds its float32 sums. For Megatron-LM's
        ``gradient_accumulation_fusion``.

    x_scale : float32 tensor, optional
        For FP8 operands: x is float8_e4m3fn, and represents data times scale. One element, for the
        whole tensor; [m, ..., 1], for rows of x; or [m, ..., ceil(K/128)], for 128 elements of a
        row. ``tileweave.quantize`` makes it. K is a multiple of 16. No gradients.

    w_scale : float32 tensor, optional
        The same of w, for FP8 operands. One element; [1, n], for columns of the result; or
        [ceil(n/128), ceil(K/128)], for 128 x 128 elements of w. n is a multiple of 16.

    quantize : str, optional
        ``"row"`` or ``"block"``: x has 16 or 32 bits, w is FP8: x is quantised, once per row, with
        a scale per row or per 128 elements, before it is sent. In place of ``x_scale``.
        ``"rowwise"`` or ``"rowwise_with_gw_hp"``: for FP8 training. x and w have 16 bits and
        gradients, and are quantised in the call and in its backward by torchao's recipe of that
        name.

    out_dtype : torch.dtype, optional
        With FP8 operands: bfloat16 or float16, the dtype of the result and of all other operands.
        Default: that of x with ``quantize``, otherwise bfloat16.

    fast_accum : bool
        With FP8 operands, for scales of tensors and rows: faster sums that tensor cores round to
        fewer bits than float32 has.

    out : [R * m, ..., n], contiguous, optional
        Memory for the result of one weight. Not with gradients, nor with ``return_gathered``,
        ``cols`` or ``main_grad``. With ``gather_dim=1`` its memory has the order [S, B, ..., n].

    Returns
    -------
    y : [R * m, ..., n], or a list of [R * m, ..., n_i]
        The product, with the dtype of x; of FP8 operands with ``out_dtype``.
    gathered : [R * m, ..., K]
        Only with ``return_gathered``. Where cuBLAS multiplies after a gather by our kernel, minus
        zero in x is plus zero here.

    Raises
    ------
    InputError
        (a ValueError) A shape, dtype, device or memory layout that the operator does not take.
        Raised before anything is sent.
    RankMismatchError
        (an InputError) Ranks called different operators, or the same one with other arguments.
    PeerTimeout
        A peer does not call in time.
    CaptureError
        CUDA-graph capture without an earlier call of the same size or ``tw.warmup``.

    Notes
    -----
    Source: FLUX, arXiv 2406.06858.
    """
    plain = cols is main_grad is x_scale is w_scale is quantize is out_dtype is None
    if plain and gather_dim == 0 and return_gathered is fast_accum is False:
        found = call_again(OP, _run, group, x, w, (bias,), (out,), "", False, flatten=out is None)
        if found is not None:
            return unflatten(found[0], x)
    name = name_of(group)
    if gather_dim != 0:
        turned, into = check_own(OP, name, sequence_first, x, out, "gather_dim", gather_dim)
        found = all_gather_matmul(
            turned,
            w,
            bias,
            group=name,
            return_gathered=return_gathered,
            cols=cols,
            main_grad=main_grad,
            x_scale=calls.sequence_first(x_scale, x),
            w_scale=w_scale,
            quantize=quantize,
            out_dtype=out_dtype,
            fast_accum=fast_accum,
            out=into,
        )
        return _batch_first(found) if out is None else out
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None:
        refused = {"cols": cols, "main_grad": main_grad, "return_gathered": return_gathered}
        if scaling.trains:
            return training.call(OP, x, w, bias, scaling, name, {**refused, "out": out})
        call = check_own(OP, name, calls.as_called, OP, x, w, scaling, out, _ALLOWED, refused)
        return fp8.all_gather(call, bias, x, name, out)
    if cols is not None or main_grad is not None or isinstance(w, (list, tuple)):
        o = check_own(OP, name, as_operands, x, w, bias, main_grad, cols, out)
        y, gathered = _OF_LISTS(o.rows, o.w, o.bias, o.main_grad, name, return_gathered, o.cols)
        y = [_unflatten(each, x, o.rows, name) for each in y]
        y = y[0] if isinstance(w, torch.Tensor) else y
        return (y, _unflatten(gathered, x, o.rows, name)) if return_gathered else y
    rows, flat = check_own(OP, name, _as_called, x, w, bias, out, name, return_gathered)
    if out is not None:
        _INTO_OUT(rows, w, bias, name, out=flat)
        return out
    y, gathered = _OPERATOR(rows, w, bias, name, return_gathered)
    y = _unflatten(y, x, rows, name)
    return (y, _unflatten(gathered, x, rows, name)) if return_gathered else y


def _unflatten(
    result: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, group_name: str
) -> torch.Tensor:
    """A result [R * m, n] of the rows of x [m, ..., K] as [R * m, ..., n]."""
    if x.dim() == 2:
        return result
    each = rows.shape[0] // max(x.shape[0], 1)  # rows per index of dimension 0
    first = result.shape[0] // each if each else rank_and_size(group_name)[1] * x.shape[0]
    return result.view(first, *x.shape[1:-1], result.shape[-1])


def _batch_first(found: Any) -> Any:
    """Results [S, B, ...] as views [B, S, ...]."""
    if isinstance(found, torch.Tensor):
        return found.transpose(0, 1)
    return type(found)(_batch_first(each) for each in found)


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    _group_name: str,
    return_gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and out as rows. Raises for what those no longer show."""
    if bias is not None and not isinstance(bias, torch.Tensor):
        said = f"bias={bias!r:.60} ({type(bias).__name__}) with one w"
        require(False, said, "a tensor or None; a list with a list of weights", "pass one bias")
    rows, flat = as_rows(x, w, OP), out_as_rows(out, x, _ALLOWED, w, bias)
    if return_gathered:
        require(out is None, "out= with return_gathered=True", "one of them", "drop out=")
    return rows, flat


def check_inputs(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, size: int
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    check_operands(x, w, bias, out)
    check_shape("out", out, (size * x.shape[0], w.shape[0]), "allocate out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, ranks: Topology) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank."""
    return plan_for(plan_all_gather_matmul, x, x.shape[0], w.shape[0], ranks)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    return_gathered: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias,),
        (out,),
        "gathered" if return_gathered else "",
        lambda size: check_inputs(x, w, bias, out, size),
        lambda ranks: plan(x, w, ranks),
    )
    return _run(chosen, group_name, x, w, bias, return_gathered, out)


def _run(
    chosen: Plan[MatmulConfig],
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call of plan ``chosen``."""
    if chosen.config is None:
        y, gathered = reference.all_gather_matmul(x, w, bias, group_of(group_name), out)
        if not return_gathered:
            return y, None
        return y, gathered.clone() if gathered is x else gathered
    chosen = plan_now(chosen)
    rows = chosen.world_size * x.shape[0]
    gathered = x.new_empty(rows, x.shape[1]) if return_gathered else None
    return run_fused(x, w, bias, out, gathered, group_name, chosen), gathered


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    return_gathered: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, out, size))
    rows = size * x.shape[0]
    y = x.new_empty(rows, w.shape[0])
    return y, x.new_empty(rows, x.shape[1]) if return_gathered else x.new_empty(0)


def _backward(
    grad: torch.Tensor,
    grad_gathered: torch.Tensor | None,
    x: torch.Tensor,
    w: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w and bias; None for one that is not needed."""
    call = GatherBackward([grad], grad_gathered, x, [w], gathered, group_name)
    gx, (gw,), _ = call.run(need_x, [need_w])
    return gx, gw, grad.sum(0) if need_bias else None


def _like(
    grad: torch.Tensor,
    grad_gathered: torch.Tensor | None,
    x: torch.Tensor,
    w: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), w.new_empty(w.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, w, _, ctx.group_name, ctx.keep = inputs
    # a gathered input that the loss does not use must not cost a reduce-scatter
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, *((output[1],) if ctx.keep else ()))


def _passed(
    ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None
) -> tuple[Any, ...] | None:
    x, w, *kept = ctx.saved_tensors
    if grad is None:
        if grad_gathered is None:
            return None
        grad = grad_gathered.new_zeros(grad_gathered.shape[0], w.shape[0])
    gathered = kept[0] if kept else None
    return grad, grad_gathered if ctx.keep else None, x, w, gathered, ctx.group_name


def explain(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: Group | None = None,
    *,
    gather_dim: int = 0,
    cols: int | Sequence[int] | None = None,
    main_grad: torch.Tensor | Sequence[torch.Tensor] | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> Plan:
    """The plan of a call; of several weights, that of the fused kernel."""
    if gather_dim != 0:
        x_scale = calls.sequence_first(x_scale, x)
        x, out = sequence_first(x, out, "gather_dim", gather_dim)
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None:
        refused = {"cols": cols, "main_grad": main_grad}
        if scaling.trains:
            return training.explain(OP, x, w, bias, scaling, group)
        call = calls.as_called(OP, x, w, scaling, out, _ALLOWED, refused)
        return fp8.explain(OP, call, bias, group)
    if cols is None and main_grad is None and isinstance(w, torch.Tensor):
        name, one = name_of(group), cast(torch.Tensor | None, bias)  # a list is refused
        rows, flat = _as_called(x, w, one, out, name)
        check_inputs(rows, w, one, flat, rank_and_size(name)[1])
        return plan(rows, w, known_topology_of(name))
    o = as_operands(x, w, bias, main_grad, cols, out)
    several.check_inputs(o.rows, o.w, o.bias, o.cols)
    chosen = several.plan(o.rows, o.w, o.cols, known_topology_of(name_of(group)))
    if len(o.w) == 1:
        return chosen
    first = several.most_columns(o.w, o.cols)
    more = f"weight {first} of {len(o.w)} has the most columns; the others follow by torch.mm"
    return replace(chosen, reason=f"{chosen.reason}; {more}")


def _define_more() -> None:
    several.define_operator()
    fp8.define_gather()
    training.define_training(OP)


SPEC = OperatorSpec(
    call=all_gather_matmul,
    arguments="Tensor x, Tensor w, Tensor? bias, str group_name",
    options="bool return_gathered=False",
    results="(Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup_matmul(all_gather_matmul, explain),
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor? grad_gathered, Tensor x, Tensor w, Tensor? gathered,"
        " str group_name",
        of=("x", "w", "bias"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.all_gather_matmul,
    kernel="tileweave.kernels.all_gather.triton",
    dual="matmul_reduce_scatter",
    define_more=_define_more,
)
