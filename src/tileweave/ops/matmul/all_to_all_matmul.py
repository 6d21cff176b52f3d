"""all_to_all_matmul: cut x into one part per rank, exchange the parts, and multiply what arrived.

=========  ==========================  ====================================================
x          [M, K]                      of this rank; [M, ..., K] also works
x'         [M/R, K] or [M, K/R] parts  from all ranks, in rank order along ``gather_dim``
w          [N, columns of x']          a Linear weight
bias       [N]                         optional
y          [rows of x', N]             x' @ w.T + bias
=========  ==========================  ====================================================

``scatter_dim=0, gather_dim=1`` is the output projection of Ulysses-style sequence parallelism: x
has all tokens and this rank's heads, [M, K]; y has this rank's tokens, from all heads, [M / R, N],
and w is [N, R * K].

forward : one fused kernel (``kernels/all_to_all/gather_triton.py``), or, where that is faster, one
launch that exchanges parts and then cuBLAS, or all-to-all, a permutation and matmul.

input gradient : gx = exchange back(gy @ w), which is ``matmul_all_to_all``, the dual operator, with
the two dimensions swapped.

weight gradient : gw = gy.T @ x'. x' is kept in place of x. It has the same size, so nothing is sent
again and no memory is lost.

bias gradient : gy summed over rows.

Sources: fused GEMM + all-to-all, arXiv 2305.06942; DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.dtensors import refuse_dtensors
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.matmul.all_gather_matmul_fused import EXCHANGED as OP
from tileweave.ops.matmul.all_gather_matmul_fused import run_fused
from tileweave.ops.matmul.backward import multiply_and_exchange
from tileweave.ops.matmul.exchange_inputs import (
    as_exchange,
    check_divides,
    explain_exchange,
    warmup_exchange,
)
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_shape,
    check_tensors,
    check_traced,
    out_as_rows,
    plan_for,
)
from tileweave.ops.matmul.known_calls import call_again
from tileweave.planning.matmul import plan_all_to_all_matmul
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange
from tileweave.planning.topology import Topology

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")


@checks_types
def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scatter_dim: int,
    gather_dim: int,
    group: Group | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exchange parts of x, and multiply what arrives: part p of x along ``scatter_dim`` goes to
    rank p.

    bfloat16 and float16 on CUDA (float32 unfused), also float32 on the CPU. Sums are computed in
    float32 and rounded once.

    Parameters
    ----------
    x : [M, K] or [M, ..., K]
        With the same shape on every rank. All dimensions but the last are
        flattened to rows.
        Copied in each call if it is not contiguous.

    w : [N, K'], rows or columns contiguous
        Weight in ``torch.nn.Linear`` layout, with the dtype of x and the same shape on every rank.
        K' is the number of columns of the exchanged x.

    bias : [N], optional
        Added to each row, with the dtype of x.

    scatter_dim : int
        0 splits the rows of x (M must be a multiple of the world size R), 1 its columns (K must be
        one).

    gather_dim : int
        0 concatenates the R parts that arrive along rows, 1 along columns (along K'); in rank
        order.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    out : contiguous, optional
        Memory for the result, with its shape. Not with gradients.

    Returns
    -------
    y : [M', ..., N]
        With the dtype of x. M' = M / R for dimensions (0, 1), R * M for (1, 0), M for (0, 0) and
        (1, 1).

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
    Sources: arXiv 2305.06942; DeepSpeed Ulysses, arXiv 2309.14509.
    """
    if type(scatter_dim) is type(gather_dim) is int:
        options = (scatter_dim, gather_dim, False)
        found = call_again(OP, _run, group, x, w, (bias,), (out,), options, *options)
        if found is not None:
            return found[0]
    name = name_of(group)
    how, rows, flat = check_own(
        OP, name, _as_called, x, w, bias, scatter_dim, gather_dim, out, name
    )
    if out is not None:
        _INTO_OUT(rows, w, bias, scatter_dim, gather_dim, name, out=flat)
        return out
    keep = torch.is_grad_enabled() and w.requires_grad
    y, _ = _OPERATOR(rows, w, bias, scatter_dim, gather_dim, name, keep)
    if x.dim() > 2:
        lead, _ = how.result(x.shape[0], x.shape[-1], rank_and_size(name)[1])
        y = y.view(lead, *x.shape[1:-1], w.shape[0])
    return y


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    out: torch.Tensor | None,
    group_name: str,
) -> tuple[Exchange, torch.Tensor, torch.Tensor | None]:
    """Return the exchange, and x and out as rows. Raises for what those no longer show."""
    refuse_dtensors(x=x, w=w, bias=bias, out=out)
    how, rows = as_exchange(scatter_dim, gather_dim), as_rows(x, w, OP)
    if x.dim() > 2:
        check_divides(how, x.shape[0], x.shape[-1], rank_and_size(group_name)[1], "x")
    return how, rows, out_as_rows(out, x, "[rows, ..., N] of the result", w, bias)


def check_inputs(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    how: Exchange,
    out: torch.Tensor | None,
    size: int,
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""

    def shapes() -> str:
        return f"x {tuple(x.shape)}, w {tuple(w.shape)} over {size} ranks"

    require(
        x.dim() == 2 and w.dim() == 2, shapes, "x [M, K] and w [N, K']", "reshape to two dimensions"
    )
    check_divides(how, x.shape[0], x.shape[1], size, "x")
    rows, depth = how.result(x.shape[0], x.shape[1], size)
    if (
        w.shape[1] != depth
    ):  # formatting sizes in a message would specialize them while torch traces
        require(False, shapes, f"w [N, {depth}]", "w has the columns of the exchanged x")
    check_tensors(x, w, bias, out)
    check_shape("out", out, (rows, w.shape[0]), "allocate out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, how: Exchange, ranks: Topology) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank."""
    rows, depth = how.part(x.shape[0], x.shape[1], ranks.size)
    return plan_for(plan_all_to_all_matmul, x, rows, w.shape[0], ranks, depth)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    keep: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    how = as_exchange(scatter_dim, gather_dim)
    options = (scatter_dim, gather_dim, keep)
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias,),
        (out,),
        options,
        lambda size: check_inputs(x, w, bias, how, out, size),
        lambda ranks: plan(x, w, how, ranks),
    )
    return _run(chosen, group_name, x, w, bias, scatter_dim, gather_dim, keep, out)


def _run(
    chosen: Plan[MatmulConfig],
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    keep: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call of plan ``chosen``."""
    if chosen.config is None:
        y, exchanged = reference.all_to_all_matmul(
            x, w, bias, group_of(group_name), scatter_dim, gather_dim, out
        )
        if not keep:
            return y, None
        return y, exchanged.clone() if exchanged is x else exchanged
    kept, how = None, as_exchange(scatter_dim, gather_dim)
    if keep:
        kept = x.new_empty(*how.result(x.shape[0], x.shape[1], chosen.world_size))
    return run_fused(x, w, bias, out, kept, group_name, chosen, how=how), kept


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    keep: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    how, size = Exchange(scatter_dim, gather_dim), dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, how, out, size))
    rows, depth = how.result(x.shape[0], x.shape[1], size)
    return x.new_empty(rows, w.shape[0]), x.new_empty(rows, depth) if keep else x.new_empty(0)


def _backward(
    grad: torch.Tensor,
    exchanged: torch.Tensor | None,
    w: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w and bias; None for one that is not needed."""
    back = Exchange(scatter_dim, gather_dim).reverse
    grad = grad.contiguous()
    gx = multiply_and_exchange(grad, w, back, group_name) if need_x else None
    assert exchanged is not None or not need_w, "kept where the weight requires a gradient"
    gw = None if exchanged is None or not need_w else grad.t() @ exchanged
    return gx, gw, grad.sum(0) if need_bias else None


def _like(
    grad: torch.Tensor,
    exchanged: torch.Tensor | None,
    w: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size, back = (
        dist.get_world_size(group_of(group_name)),
        Exchange(scatter_dim, gather_dim).reverse,
    )
    gx = grad.new_empty(back.result(grad.shape[0], w.shape[1], size))
    return gx, w.new_empty(w.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, w, _, *ctx.how, keep = inputs
    ctx.set_materialize_grads(False)
    if output[1] is not None:
        ctx.mark_non_differentiable(output[1])
    require(
        keep or not ctx.needs_input_grad[1],
        "keep=False with a weight that requires a gradient",
        "keep=True",
        "call tileweave.all_to_all_matmul",
    )
    ctx.save_for_backward(w, output[1] if ctx.needs_input_grad[1] else None)


def _passed(ctx: Any, grad: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...] | None:
    w, exchanged = ctx.saved_tensors
    return None if grad is None else (grad, exchanged, w, *ctx.how)


explain = explain_exchange(_as_called, check_inputs, plan)
SPEC = OperatorSpec(
    call=all_to_all_matmul,
    arguments="Tensor x, Tensor w, Tensor? bias, int scatter_dim, int gather_dim, str group_name",
    options="bool keep=False",
    results="(Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup_exchange(
        all_to_all_matmul, explain, lambda how, rows, depth, size: how.result(rows, depth, size)[1]
    ),
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor? exchanged, Tensor w, int scatter_dim, int gather_dim,"
        " str group_name",
        of=("x", "w", "bias"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.all_to_all_matmul,
    kernel="tileweave.kernels.all_to_all.gather_triton",
    dual="matmul_all_to_all",
)
