"""matmul_all_to_all: multiply, cut the product into one part per rank, and exchange the parts.

=====  ==========================  ====================================================
x      [M, K]                      rows of this rank; [M, ..., K] also works
w      [N, K]                      a Linear weight, the same shape on every rank
bias   [N]                         optional
y      [M/R, N] or [M, N/R] parts  of x @ w.T + bias, from all ranks, in rank order
                                   along ``gather_dim``
=====  ==========================  ====================================================

``scatter_dim=1, gather_dim=0`` is the QKV projection of Ulysses-style sequence parallelism: x has
this rank's tokens and w the heads of all; y has all tokens and this rank's heads, [R * M, N / R].
The rows of a fused w_qkv of grouped queries must be ordered by rank, with each rank's heads of q, k
and v together: ``torch.cat([p for all in zip(q.chunk(R), k.chunk(R), v.chunk(R)) for p in all])``,
and so must its bias. Then y on each rank is its q, k and v, in this order along columns.

forward : one fused kernel (``kernels/all_to_all/scatter_triton.py``), or, where that is faster,
cuBLAS and then one launch that exchanges parts, or matmul, all-to-all and a permutation.

input gradient : gx = exchange back(gy) @ w, which is ``all_to_all_matmul``, the dual operator, with
the two dimensions swapped.

weight gradient : gw = exchange back(gy).T @ x. The input gradient also returns the exchanged
gradient, so nothing is sent again.

bias gradient : exchange back(gy) summed over rows.

Sources: fused GEMM + all-to-all, arXiv 2305.06942; DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.dtensors import refuse_dtensors
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.matmul.backward import exchange_and_multiply
from tileweave.ops.matmul.exchange_inputs import (
    as_exchange,
    check_divides,
    explain_exchange,
    warmup_exchange,
)
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_operands,
    check_shape,
    check_traced,
    out_as_rows,
    plan_for,
)
from tileweave.ops.matmul.known_calls import call_again
from tileweave.ops.matmul.matmul_all_to_all_fused import OP, run_fused
from tileweave.planning.matmul import plan_matmul_all_to_all
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange
from tileweave.planning.topology import Topology

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")


@checks_types
def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scatter_dim: int,
    gather_dim: int,
    group: Group | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply, and exchange parts of the product: part p along ``scatter_dim`` goes to rank p.

    bfloat16 and float16 on CUDA (float32 unfused), also float32 on the CPU. Sums are computed in
    float32 and rounded once.

    Parameters
    ----------
    x : [M, K] or [M, ..., K]
        With the same shape on every rank. All dimensions but the last are
        flattened to rows.
        Copied in each call if it is not contiguous.

    w : [N, K], rows or columns contiguous
        Weight in ``torch.nn.Linear`` layout, with the dtype of x and the same shape on every rank.

    bias : [N], optional
        Added before the exchange, with the dtype of x.

    scatter_dim : int
        0 splits the rows of the product (M must be a multiple of the world size R), 1 its columns
        (then N must be such a multiple).

    gather_dim : int
        0 concatenates the R parts that arrive along rows, 1 along columns; in rank order.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    out : contiguous, optional
        Memory for the result, with its shape. Not with gradients.

    Returns
    -------
    y : [M', ..., N']
        With the dtype of x: [R * M, ..., N / R] for dimensions (1, 0), [M / R, ..., R * N] for (0,
        1), [M, ..., N] for (0, 0) and (1, 1).

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
        options = (scatter_dim, gather_dim)
        found = call_again(OP, _run, group, x, w, (bias,), (out,), options, *options)
        if found is not None:
            return found
    name = name_of(group)
    how, rows, flat = check_own(
        OP, name, _as_called, x, w, bias, scatter_dim, gather_dim, out, name
    )
    if out is not None:
        _INTO_OUT(rows, w, bias, scatter_dim, gather_dim, name, out=flat)
        return out
    y = _OPERATOR(rows, w, bias, scatter_dim, gather_dim, name)
    if x.dim() > 2:
        lead, cols = how.result(x.shape[0], w.shape[0], rank_and_size(name)[1])
        y = y.view(lead, *x.shape[1:-1], cols)
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
    if x.dim() > 2 and w.dim() == 2:
        check_divides(how, x.shape[0], w.shape[0], rank_and_size(group_name)[1], "w")
    return how, rows, out_as_rows(out, x, "[rows, ..., columns] of the result", w, bias)


def check_inputs(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    how: Exchange,
    out: torch.Tensor | None,
    size: int,
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    check_operands(x, w, bias, out)
    check_divides(how, x.shape[0], w.shape[0], size, "w")
    check_shape(
        "out", out, how.result(x.shape[0], w.shape[0], size), "allocate out with that shape"
    )


def plan(x: torch.Tensor, w: torch.Tensor, how: Exchange, ranks: Topology) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank."""
    rows, cols = how.part(x.shape[0], w.shape[0], ranks.size)
    return plan_for(plan_matmul_all_to_all, x, rows, cols, ranks)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    how = as_exchange(scatter_dim, gather_dim)
    options = (scatter_dim, gather_dim)
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
    return _run(chosen, group_name, x, w, bias, scatter_dim, gather_dim, out)


def _run(
    chosen: Plan[MatmulConfig],
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The call of plan ``chosen``."""
    if chosen.config is None:
        group = group_of(group_name)
        return reference.matmul_all_to_all(x, w, bias, group, scatter_dim, gather_dim, out)
    how = as_exchange(scatter_dim, gather_dim)
    if out is None:
        y = x.new_empty(*how.result(x.shape[0], w.shape[0], chosen.world_size))
    else:
        y = out
    run_fused(x, w, bias, y, how, group_name, chosen)
    return y


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    how, size = Exchange(scatter_dim, gather_dim), dist.get_world_size(group_of(group_name))
    check_traced(lambda: check_inputs(x, w, bias, how, out, size))
    return x.new_empty(how.result(x.shape[0], w.shape[0], size))


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w and bias; None for one that is not needed.

    The gradient is exchanged once, by the input gradient where that is needed.
    """
    back = Exchange(scatter_dim, gather_dim).reverse
    grad = grad.contiguous()
    gx = gw = gb = None
    if need_x:
        gx, exchanged = exchange_and_multiply(grad, w, back, group_name, keep=need_w or need_bias)
    else:
        exchanged = reference.exchange(grad, back, group_of(group_name))
    if need_w and exchanged is not None:
        assert x is not None, "kept where the weight requires a gradient"
        gw = exchanged.t() @ x
    if need_bias and exchanged is not None:
        gb = exchanged.sum(0)
    return gx, gw, gb


def _like(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor,
    scatter_dim: int,
    gather_dim: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size, back = (
        dist.get_world_size(group_of(group_name)),
        Exchange(scatter_dim, gather_dim).reverse,
    )
    rows, cols = back.result(grad.shape[0], grad.shape[1], size)
    return grad.new_empty(rows, w.shape[1]), w.new_empty(w.shape), grad.new_empty(cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, *ctx.how = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


def _passed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, *ctx.saved_tensors, *ctx.how


explain = explain_exchange(_as_called, check_inputs, plan)
SPEC = OperatorSpec(
    call=matmul_all_to_all,
    arguments="Tensor x, Tensor w, Tensor? bias, int scatter_dim, int gather_dim, str group_name",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup_exchange(matmul_all_to_all, explain, lambda how, rows, depth, size: depth),
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor? x, Tensor w, int scatter_dim, int gather_dim,"
        " str group_name",
        of=("x", "w", "bias"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.matmul_all_to_all,
    kernel="tileweave.kernels.all_to_all.scatter_triton",
    dual="all_to_all_matmul",
)
