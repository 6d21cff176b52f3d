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
dgrad   : gx = reduce_scatter(gy @ w), which is ``matmul_reduce_scatter``, the dual operator.
wgrad   : gw = gy.T @ gather(x). x is gathered again, so that nothing but the shard is kept; with
          ``return_gathered=True`` the gathered input is kept, R times the memory of x, and nothing
          is sent again. Where dgrad is not fused both collectives hide: x is gathered beside dgrad,
          gx is scattered beside wgrad.
dbias   : gy summed over rows.

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
from tileweave.ops.matmul.all_gather_matmul_fused import OP, run_fused
from tileweave.ops.matmul.backward import multiply_and_scatter, scatters_fused
from tileweave.ops.matmul.concurrent_gather import begin_gather_of_backward, too_large
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
from tileweave.planning.matmul import plan_all_gather_matmul
from tileweave.planning.problem import MatmulConfig, Plan


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply the row shards of all ranks by this rank's weight: ``gather(x) @ w.T + bias``.

    Parameters
    ----------
    x : [m, K] or [m, ..., K], contiguous; the same shape on every rank. Gathered along dimension 0.
    w : [n, K], rows or columns contiguous, in ``torch.nn.Linear`` layout; the same shape on every
        rank.
    bias : [n], or None.
    group : the ranks that share x; None is the default group. A group's name is accepted too.
    return_gathered : also return gather(x) [R * m, ..., K]; backward then keeps it and sends
        nothing again.
    out : where to put the result, [R * m, ..., n], contiguous; not with gradients, not with
        ``return_gathered``.

    Returns
    -------
    y [R * m, ..., n], or ``(y, gathered)``. bf16 and fp16 on CUDA (fp32 unfused), also fp32 on the
    CPU; sums in fp32.

    Raises
    ------
    InputError (a ValueError) for what does not fit; PeerTimeout if a peer does not call in time;
    CaptureError under CUDA-graph capture without an earlier call or ``tw.warmup``.
    """
    name = name_of(group)
    rows, flat = check_own(OP, name, _as_called, x, w, bias, out, name, return_gathered)
    if out is not None:
        torch.ops.tileweave.all_gather_matmul.out(rows, w, bias, name, out=flat)
        return out
    y, gathered = torch.ops.tileweave.all_gather_matmul(rows, w, bias, name, return_gathered)
    if x.dim() > 2:
        each = rows.shape[0] // max(x.shape[0], 1)  # rows of one of dimension 0
        first = y.shape[0] // each if each else rank_and_size(name)[1] * x.shape[0]
        lead = (first, *x.shape[1:-1])
        y, gathered = (
            y.view(*lead, y.shape[-1]),
            gathered.view(*lead, x.shape[-1]) if return_gathered else gathered,
        )
    return (y, gathered) if return_gathered else y


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    _group_name: str,
    return_gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and out as rows; raises for what those do not show."""
    rows, flat = as_rows(x, w), out_as_rows(out, x, "[R * m, ..., n]", w, bias)
    if return_gathered:
        require(out is None, "out= with return_gathered=True", "one of them", "drop out=")
    return rows, flat


def check_inputs(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, size: int
) -> None:
    """Raise :class:`InputError` on the rank that made the mistake, before anything is sent."""
    check_operands(x, w, bias, out)
    check_shape("out", out, (size * x.shape[0], w.shape[0]), "allocate out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, size: int) -> Plan[MatmulConfig]:
    """The path of this call, the same on every rank."""
    return plan_for(plan_all_gather_matmul, x, x.shape[0], w.shape[0], size)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    return_gathered: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias,),
        (out,),
        "gathered" if return_gathered else "",
        lambda size: check_inputs(x, w, bias, out, size),
        lambda size: plan(x, w, size),
    )
    if chosen.config is None:
        return _unfused(x, w, bias, group_name, out, return_gathered, chosen)
    rows = chosen.world_size * x.shape[0]
    y = x.new_empty(rows, w.shape[0]) if out is None else out
    gathered = x.new_empty(rows, x.shape[1]) if return_gathered else None
    run_fused(x, w, bias, y, gathered, group_name, chosen)
    return y, x.new_empty(0) if gathered is None else gathered


def _unfused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    out: torch.Tensor | None,
    keep: bool,
    chosen: Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    log_fallback(OP, chosen)
    y, gathered = reference.all_gather_matmul(x, w, bias, group_of(group_name), out)
    return y, (gathered.clone() if gathered is x else gathered) if keep else x.new_empty(0)


def _fake(x, w, bias, group_name, return_gathered=False, *, out=None):
    size = dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, out, size))
    rows = size * x.shape[0]
    y = x.new_empty(rows, w.shape[0])
    return y, x.new_empty(rows, x.shape[1]) if return_gathered else x.new_empty(0)


def _backward(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w, need_bias):
    """Gradients of x, w, bias (empty where not needed)."""
    grad = grad.contiguous()
    gathers = need_w and gathered is None
    fused = (
        need_x
        and grad_gathered is None
        and scatters_fused(grad, w, group_name)
        and not (gathers and too_large(x))
    )
    products = _products_fused if fused else _products_overlapped
    gx, gw = products(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w)
    empty = grad.new_empty(0)
    return (
        empty if gx is None else gx,
        empty if gw is None else gw,
        grad.sum(0) if need_bias else empty,
    )


def _products_fused(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w):
    """dgrad in one kernel, x gathered by copy engines beside it: no other kernel may run beside one
    that waits for peers."""
    gathering = begin_gather_of_backward(x, group_name) if need_w and gathered is None else None
    try:
        gx = multiply_and_scatter(grad, w, group_name)
    finally:  # also when memory runs out: a gather that nobody waits for leaves its signals to the next one
        if gathering is not None:
            gathered = gathering.wait()
    return gx, grad.t() @ gathered if need_w else None


def _products_overlapped(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w):
    """torch's matmuls, each beside a collective: x is gathered during dgrad, gx is scattered during
    wgrad."""
    group = group_of(group_name)
    gathering = scattering = gx = gw = None
    if need_w and gathered is None:
        gathered, gathering = collectives.begin_all_gather(x, group)
    if need_x:
        full = grad @ w
        if grad_gathered is not None:
            full += grad_gathered
        gx, scattering = collectives.begin_reduce_scatter(full, group)
    if gathering is not None:
        gathering.wait()
    if need_w:
        gw = grad.t() @ gathered
    if scattering is not None:
        scattering.wait()
    return gx, gw


def _like(grad, grad_gathered, x, w, gathered, group_name):
    return torch.empty_like(x), w.new_empty(w.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x, w, _, ctx.group_name, ctx.keep = inputs
    # a gathered input that the loss does not use must not cost a reduce-scatter
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, *((output[1],) if ctx.keep else ()))


def _passed(ctx, grad, grad_gathered):
    x, w, *kept = ctx.saved_tensors
    if grad is None:
        if grad_gathered is None:
            return None
        grad = grad_gathered.new_zeros(grad_gathered.shape[0], w.shape[0])
    gathered = kept[0] if kept else None
    return grad, grad_gathered if ctx.keep else None, x, w, gathered, ctx.group_name


explain = explain_matmul(_as_called, check_inputs, plan)
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
    traced="stamps",
)
