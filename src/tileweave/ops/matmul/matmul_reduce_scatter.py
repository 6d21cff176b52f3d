"""matmul_reduce_scatter: multiply by this rank's part of K, sum over ranks, keep this rank's rows.

=====  =======  =====================================================================
x      [M, k]   this rank's columns of the input, k = K/R; [M, ..., k] also works
w      [N, k]   this rank's columns of a Linear weight
bias   [N]      optional; the same values on every rank, added once
y      [m, N]   rows of this rank of sum over ranks of x @ w.T, plus bias; m = M/R
=====  =======  =====================================================================

forward : one fused kernel (``kernels/reduce_scatter/triton.py``), or matmul then reduce-scatter
where that is faster.

input gradient : gx = gather(gy) @ w, which is ``all_gather_matmul``, the dual operator.

weight gradient : gw = gather(gy).T @ x. The input gradient also returns the gathered gradient, so
nothing is sent again.

bias gradient : gather(gy) summed over rows of all ranks, so that the bias stays the same on every
rank.

Sources: FLUX, arXiv 2406.06858; the pair of dual operators as in Megatron-LM sequence parallelism,
arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.dtensors import takes_dtensors
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.matmul import scaled_calls as calls
from tileweave.ops.matmul import scaled_operators as fp8
from tileweave.ops.matmul import scaled_training as training
from tileweave.ops.matmul.backward import add_product, gather_and_multiply
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_main_grad,
    check_operands,
    check_shape,
    check_traced,
    out_as_rows,
    plan_for,
    plan_now,
    sequence_first,
)
from tileweave.ops.matmul.known_calls import call_again, unflatten
from tileweave.ops.matmul.matmul_reduce_scatter_fused import OP, run_fused
from tileweave.ops.matmul.warmup import warmup_matmul
from tileweave.planning.matmul import plan_matmul_reduce_scatter
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.topology import Topology

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")
_ALLOWED = "[M / R, ..., N]"  # of out


@takes_dtensors(0, x=-1, w=1, bias=None)
def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group | None = None,
    scatter_dim: int = 0,
    depth: int | None = None,
    main_grad: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by this rank's columns of a weight, and keep this rank's rows of the sum over ranks.

    bfloat16 and float16 on CUDA (float32 unfused), also float32 on the CPU, and FP8 with scales.
    Partial sums of ranks are rounded to the dtype of the result (in float16, those above 65504
    become infinite), added in float32 in a fixed order, and rounded again. ``ops/reference.py``
    says how this rank's own partial sum, and those of the unfused path, are rounded.

    Parameters
    ----------
    x : [M, k] or [M, ..., k]
        This rank's columns of the input, with the same shape on every rank. M is a multiple of the
        world size R.
        Copied in each call if it is not contiguous.

    w : [N, k], rows or columns contiguous
        This rank's columns of a weight in ``torch.nn.Linear`` layout, with the dtype of x and the
        same shape on every rank.

    bias : [N], optional
        Added once. The same values on every rank.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    scatter_dim : 0 or 1
        1: x is [B, S, ..., k] and the result [B, S / R, ..., N]. The result is a view of memory in
        the order [S / R, B, ..., N], which is not copied. x is copied once, unless B is 1 or x is
        such a view itself, like a function by element of a result of ``all_gather_matmul`` with
        ``gather_dim=1``. The gradient of y is copied alike. That of x has the memory order of x.

    depth : int, optional
        The largest k of any rank, the same on every rank, for ranks with different numbers of
        columns: a dimension that R does not divide, cut as DTensor's ``Shard`` does. A rank may
        have none.

    main_grad : [N, k], optional
        In the backward the gradient of w is added to it, and the gradient of w is None. float32,
        contiguous; on a GPU one matmul adds its float32 sums. For Megatron-LM's
        ``gradient_accumulation_fusion``.

    x_scale : float32 tensor, optional
        For FP8 operands: x is float8_e4m3fn, and represents data times scale. One element, for the
        whole tensor; [M, ..., 1], for rows of x; or [M, ..., ceil(k/128)], for 128 elements of a
        row. ``tileweave.quantize`` makes it. k is a multiple of 16. No gradients.

    w_scale : float32 tensor, optional
        The same of w, for FP8 operands. One element; [1, N], for columns of the result; or
        [ceil(N/128), ceil(k/128)], for 128 x 128 elements of w. N is a multiple of 16.

    quantize : str, optional
        ``"row"`` or ``"block"``: x has 16 or 32 bits, w is FP8: x is quantised, once per row, with
        a scale per row or per 128 elements. In place of ``x_scale``.
        ``"rowwise"`` or ``"rowwise_with_gw_hp"``: for FP8 training. x and w have 16 bits and
        gradients, and are quantised in the call and in its backward by torchao's recipe of that
        name.

    out_dtype : torch.dtype, optional
        With FP8 operands: bfloat16 or float16, the dtype of the result and of all other operands.
        Default: that of x with ``quantize``, otherwise bfloat16.

    fast_accum : bool
        With FP8 operands, for scales of tensors and rows: faster sums that tensor cores round to
        fewer bits than float32 has.

    out : [M / R, ..., N], contiguous, optional
        Memory for the result. Not with gradients, nor with ``depth`` or ``main_grad``. With
        ``scatter_dim=1`` its memory has the order [S / R, B, ..., N].

    Returns
    -------
    y : [M / R, ..., N]
        Scattered along dimension 0, with the dtype of x; of FP8 operands with ``out_dtype``.

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
    Gradients of x and w are those of one loss over the rows of all ranks; the gradient of ``bias``
    is summed over the group. Source: FLUX, arXiv 2406.06858.
    """
    plain = depth is main_grad is x_scale is w_scale is quantize is out_dtype is None
    if plain and scatter_dim == 0 and fast_accum is False:
        found = call_again(
            OP, _run, group, x, w, (bias,), (out,), "", flatten=out is None, divides=True
        )
        if found is not None:
            return unflatten(found, x)
    name = name_of(group)
    if scatter_dim != 0:
        turned, into = check_own(OP, name, sequence_first, x, out, "scatter_dim", scatter_dim)
        y = matmul_reduce_scatter(
            turned,
            w,
            bias,
            group=name,
            depth=depth,
            main_grad=main_grad,
            x_scale=calls.sequence_first(x_scale, x),
            w_scale=w_scale,
            quantize=quantize,
            out_dtype=out_dtype,
            fast_accum=fast_accum,
            out=into,
        )
        return y.transpose(0, 1) if out is None else out
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None:
        refused = {"depth": depth, "main_grad": main_grad}
        if scaling.trains:
            return training.call(OP, x, w, bias, scaling, name, {**refused, "out": out})
        call = check_own(OP, name, calls.as_called, OP, x, w, scaling, out, _ALLOWED, refused)
        return fp8.reduce_scatter(call, bias, x, name, out)
    rows, flat = check_own(OP, name, _as_called, x, w, bias, out, name, depth, main_grad)
    if out is not None:
        _INTO_OUT(rows, w, bias, name, out=flat)
        return out
    y = _OPERATOR(rows, w, bias, name, depth or 0, main_grad)
    if x.dim() > 2:
        y = y.view(x.shape[0] // rank_and_size(name)[1], *x.shape[1:-1], w.shape[0])
    return y


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    group_name: str,
    depth: int | None = None,
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and out as rows. Raises for what those no longer show."""
    rows = as_rows(x, w, OP)
    if depth is not None or main_grad is not None:
        require(out is None, "out= with depth= or main_grad=", "one of them", "drop out=")
        require(
            depth is None or (isinstance(depth, (int, torch.SymInt)) and depth >= 0),
            lambda: f"depth={depth!r}",
            "a whole number",
            "pass the largest k of any rank",
        )
        check_main_grad([w], [] if main_grad is None else [main_grad])
    if x.dim() > 2:
        _check_rows(x.shape[0], rank_and_size(group_name)[1])
    return rows, out_as_rows(out, x, _ALLOWED, w, bias)


def _check_rows(rows: int, size: int) -> None:
    require(
        rows % size == 0,
        lambda: f"{rows} rows over {size} ranks",
        "a multiple of the group's size",
        "pad the rows, or use matmul_all_reduce",
    )


def check_inputs(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    size: int,
    depth: int = 0,
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    check_operands(x, w, bias, out)
    require(
        not depth or x.shape[1] <= depth,
        lambda: f"x {tuple(x.shape)} with depth={depth}",
        "x [M, k] with k at most depth",
        "pass the largest k of any rank as depth=, the same on every rank",
    )
    _check_rows(x.shape[0], size)
    check_shape("out", out, (x.shape[0] // size, w.shape[0]), "allocate out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, ranks: Topology, depth: int = 0) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank."""
    rows = x.shape[0] // ranks.size
    return plan_for(plan_matmul_reduce_scatter, x, rows, w.shape[0], ranks, depth or x.shape[1])


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    depth: int = 0,
    main_grad: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if main_grad is not None:
        check_main_grad([w], [main_grad])
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias,),
        (out,),
        depth or "",
        lambda size: check_inputs(x, w, bias, out, size, depth),
        lambda ranks: plan(x, w, ranks, depth),
        [[x.shape[0]], [w.shape[0]], [bias is not None]] if depth else None,
    )
    return _run(chosen, group_name, x, w, bias, out)


def _run(
    chosen: Plan[MatmulConfig],
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The call of plan ``chosen``."""
    if chosen.config is None:
        return reference.matmul_reduce_scatter(x, w, bias, group_of(group_name), out)
    rows = x.shape[0] // chosen.world_size
    y = x.new_empty(rows, w.shape[0]) if out is None else out
    if x.shape[1] == 0:  # of a rank without columns: its kernel sends zeros
        x, w = x.new_zeros(x.shape[0], 8), w.new_zeros(w.shape[0], 8)
    run_fused(x, w, bias, y, group_name, plan_now(chosen))
    return y


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    depth: int = 0,
    main_grad: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    size = dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, out, size, depth))
    check_traced(lambda: check_main_grad([w], [] if main_grad is None else [main_grad]))
    return x.new_empty(x.shape[0] // size, w.shape[0])


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor,
    group_name: str,
    depth: int,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w and bias; None for one that is not needed.

    The gradient is gathered once, by the input gradient where that is needed.
    """
    group = group_of(group_name)
    grad = grad.contiguous()
    gx = gw = gb = gathered = None
    if need_x:
        gx, gathered = gather_and_multiply(grad, w, group_name, need_w or need_bias, depth)
    elif need_w:
        gathered = collectives.all_gather(grad, group)
    if need_w and gathered is not None:
        assert x is not None, "kept where the weight requires a gradient"
        if main_grad is None:
            gw = gathered.t() @ x
        else:
            add_product(main_grad, gathered, x)
    if need_bias:
        gb = collectives.all_reduce(grad.sum(0), group) if gathered is None else gathered.sum(0)
    return gx, gw, gb


def _like(
    grad: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, group_name: str, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = dist.get_world_size(group_of(group_name)) * grad.shape[0]
    gx = grad.new_empty(rows, w.shape[1])
    return gx, w.new_empty(w.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    # main_grad is not saved: later calls add to it before this backward runs
    x, w, _, ctx.group_name, ctx.depth, ctx.main_grad = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


def _passed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, *ctx.saved_tensors, ctx.group_name, ctx.depth


def explain(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: Group | None = None,
    *,
    scatter_dim: int = 0,
    depth: int | None = None,
    main_grad: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> Plan:
    """The plan of a call."""
    if scatter_dim != 0:
        x_scale = calls.sequence_first(x_scale, x)
        x, out = sequence_first(x, out, "scatter_dim", scatter_dim)
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None:
        refused = {"depth": depth, "main_grad": main_grad}
        if scaling.trains:
            return training.explain(OP, x, w, bias, scaling, group)
        call = calls.as_called(OP, x, w, scaling, out, _ALLOWED, refused)
        return fp8.explain(OP, call, bias, group)
    name = name_of(group)
    rows, flat = _as_called(x, w, bias, out, name, depth, main_grad)
    check_inputs(rows, w, bias, flat, rank_and_size(name)[1], depth or 0)
    return plan(rows, w, known_topology_of(name), depth or 0)


def _define_more() -> None:
    fp8.define_scatter()
    training.define_training(OP)


SPEC = OperatorSpec(
    call=matmul_reduce_scatter,
    arguments="Tensor x, Tensor w, Tensor? bias, str group_name",
    options="int depth=0, Tensor? main_grad=None",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup_matmul(matmul_reduce_scatter, explain),
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor? x, Tensor w, str group_name, int depth",
        of=("x", "w", "bias"),
        into="w",
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.matmul_reduce_scatter,
    kernel="tileweave.kernels.reduce_scatter.triton",
    dual="all_gather_matmul",
    define_more=_define_more,
)
