"""matmul_reduce_scatter: multiply by this rank's share of K, sum over ranks, and keep this rank's
rows of the sum.

=====  =======  =====================================================================
x      [M, k]   this rank's columns of the input, k = K/R; [M, ..., k] also works
w      [N, k]   this rank's columns of a Linear weight
bias   [N]      optional; the same values on every rank, added once
y      [m, N]   rows of this rank of sum over ranks of x @ w.T, plus bias; m = M/R
=====  =======  =====================================================================

forward : one fused kernel (``kernels/reduce_scatter/triton.py``), or matmul then reduce-scatter
    where that is faster.
dgrad   : gx = gather(gy) @ w, which is ``all_gather_matmul``, the dual operator.
wgrad   : gw = gather(gy).T @ x. The gathered gradient comes with dgrad, so nothing is sent again.
dbias   : gather(gy) summed over rows: every rank's rows, so that the bias stays the same on every rank.

Source of the idea: FLUX, arXiv 2406.06858; the dual pair as in Megatron-LM sequence parallelism,
arXiv 2205.05198.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.registry import group_of, log_fallback, name_of, rank_and_size
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.matmul.backward import gather_and_multiply
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_operands,
    check_shape,
    check_traced,
    explain_matmul,
    out_as_rows,
    plan_for,
    warmup_matmul,
)
from tileweave.ops.matmul.matmul_reduce_scatter_fused import OP, run_fused
from tileweave.planning.matmul import plan_matmul_reduce_scatter
from tileweave.planning.problem import MatmulConfig, Plan


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by this rank's columns of a weight, and keep this rank's rows of the sum over ranks.

    Parameters
    ----------
    x : [M, k] or [M, ..., k], contiguous, M a multiple of the group's size; the same shape on every
        rank.
    w : [N, k], rows or columns contiguous, in ``torch.nn.Linear`` layout; the same shape on every
        rank.
    bias : [N] of the full layer, the same on every rank, or None. Added once.
    group : the ranks that share the sum; None is the default group. A group's name is accepted too.
    out : where to put the result, [M / R, ..., N], contiguous; not with gradients.

    Returns
    -------
    y [M / R, ..., N]: dimension 0 is scattered. bf16 and fp16 on CUDA (fp32 unfused), also fp32 on
    the CPU. Ranks' partials are rounded to x's dtype (of fp16, those above 65504 to infinity),
    added in fp32 in a fixed order, and rounded again; for the own partial, and for the unfused
    path, see ``ops/reference.py``.

    Gradients: of x and w as if all ranks' rows went into one loss; that of ``bias`` is summed over
    the group.

    Raises
    ------
    InputError (a ValueError) for what does not fit; PeerTimeout if a peer does not call in time;
    CaptureError under CUDA-graph capture without an earlier call or ``tw.warmup``.
    """
    name = name_of(group)
    rows, flat = check_own(OP, name, _as_called, x, w, bias, out, name)
    if out is not None:
        torch.ops.tileweave.matmul_reduce_scatter.out(rows, w, bias, name, out=flat)
        return out
    y = torch.ops.tileweave.matmul_reduce_scatter(rows, w, bias, name)
    if x.dim() > 2:
        y = y.view(x.shape[0] // rank_and_size(name)[1], *x.shape[1:-1], w.shape[0])
    return y


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and out as rows; raises for what those do not show."""
    rows = as_rows(x, w)
    if x.dim() > 2:
        _check_rows(x.shape[0], rank_and_size(group_name)[1])
    return rows, out_as_rows(out, x, "[M / R, ..., N]", w, bias)


def _check_rows(rows: int, size: int) -> None:
    require(
        rows % size == 0,
        lambda: f"{rows} rows over {size} ranks",
        "a multiple of the group's size",
        "pad the rows, or use matmul_all_reduce",
    )


def check_inputs(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, size: int
) -> None:
    """Raise :class:`InputError` on the rank that made the mistake, before anything is sent."""
    check_operands(x, w, bias, out)
    _check_rows(x.shape[0], size)
    check_shape("out", out, (x.shape[0] // size, w.shape[0]), "allocate out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, size: int) -> Plan[MatmulConfig]:
    """The path of this call, the same on every rank."""
    return plan_for(plan_matmul_reduce_scatter, x, x.shape[0] // size, w.shape[0], size)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias,),
        (out,),
        "",
        lambda size: check_inputs(x, w, bias, out, size),
        lambda size: plan(x, w, size),
    )
    if chosen.config is None:
        log_fallback(OP, chosen)
        return reference.matmul_reduce_scatter(x, w, bias, group_of(group_name), out)
    rows = x.shape[0] // chosen.world_size
    y = x.new_empty(rows, w.shape[0]) if out is None else out
    run_fused(x, w, bias, y, group_name, chosen)
    return y


def _fake(x, w, bias, group_name, *, out=None):
    size = dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, out, size))
    return x.new_empty(x.shape[0] // size, w.shape[0])


def _backward(grad, x, w, group_name, need_x, need_w, need_bias):
    """Gradients of x, w, bias (empty where not needed). The gradient is gathered once, by dgrad
    where there is one."""
    group = group_of(group_name)
    grad = grad.contiguous()
    gx, gw, gb = (grad.new_empty(0) for _ in range(3))
    gathered = None
    if need_x:
        gx, gathered = gather_and_multiply(grad, w, group_name, keep=need_w or need_bias)
    elif need_w:
        gathered = collectives.all_gather(grad, group)
    if need_w and gathered is not None:
        gw = gathered.t() @ x
    if need_bias:
        gb = collectives.all_reduce(grad.sum(0), group) if gathered is None else gathered.sum(0)
    return gx, gw, gb


def _like(grad, x, w, group_name):
    rows = dist.get_world_size(group_of(group_name)) * grad.shape[0]
    gx = grad.new_empty(rows, w.shape[1])
    return gx, w.new_empty(w.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x, w, _, ctx.group_name = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


def _passed(ctx, grad):
    return grad, *ctx.saved_tensors, ctx.group_name


explain = explain_matmul(_as_called, check_inputs, plan)
SPEC = OperatorSpec(
    call=matmul_reduce_scatter,
    arguments="Tensor x, Tensor w, Tensor? bias, str group_name",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup_matmul(matmul_reduce_scatter, explain),
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor? x, Tensor w, str group_name",
        of=("x", "w", "bias"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.matmul_reduce_scatter,
    kernel="tileweave.kernels.reduce_scatter.triton",
    dual="all_gather_matmul",
    traced="waits",
)
