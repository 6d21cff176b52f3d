"""dispatch_grouped_matmul: send tokens to the ranks of their experts, and multiply by experts'
weights.

=========  ======================  ==========================================================
x          [T, K]                  tokens of this rank; T may differ between ranks, up to
                                   ``max_tokens``
experts    [E_local, N, K]         weights of this rank's experts, each in
                                   ``torch.nn.Linear`` layout; E = R * E_local
topk_ids   [T, k]                  experts of each token, of all ranks, int32 or int64;
                                   -1: none
y          [bound, N]              rows sorted by expert; undefined from row
                                   ``plan.offsets[-1]`` on
=========  ======================  ==========================================================

forward : a routing plan (``route_tokens.py``), then one kernel that sends tokens and
multiplies those that have arrived (``kernels/experts/dispatch_triton.py``). There is no capacity:
bound = R * max_tokens * k, and tensors of rows have this size whatever is routed here. The host
waits for nothing, so a CUDA graph may capture it.

gradient of x : the dual operator: each token gets the sum over its rows of gy @ expert.

gradient of experts : gy.T @ rows per expert. Tokens that arrived in the forward are kept, not sent
again: see ``ops/experts/kept_tokens.py``.

Sources: DeepEP and Comet (arXiv 2502.19811) for sending a token once per rank, and for starting
with experts that are ready.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tileweave.errors import InputError, require
from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.debug_agreement import check_own, check_together
from tileweave.ops.core.dtensors import refuse_dtensors
from tileweave.ops.core.nodes import known_topology_of, topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    Group,
    contiguous,
    debugging,
    group_of,
    log_fallback,
    name_of,
    rank_and_size,
)
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.experts import over_nodes
from tileweave.ops.experts import scaled_operators as scaled
from tileweave.ops.experts.dispatch_grouped_matmul_fused import OP, run_fused
from tileweave.ops.experts.gradients import gradient_of_experts
from tileweave.ops.experts.grouped_matmul_combine_fused import run_fused as run_combine
from tileweave.ops.experts.kept_tokens import new_kept, receive, rows_of
from tileweave.ops.experts.route_tokens import make_plan
from tileweave.ops.experts.routing_plan import RoutingPlan, check_plan, plan_grouped, routing_plan
from tileweave.ops.matmul.inputs import DTYPES, refuse_alias
from tileweave.ops.matmul.scaled_calls import scaling_of
from tileweave.planning.combine import plan_combine
from tileweave.planning.problem import Plan
from tileweave.planning.schedules.grouped import DispatchConfig, plan_dispatch

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")


@checks_types
def dispatch_grouped_matmul(
    x: torch.Tensor,
    experts: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    *,
    group: Group | None = None,
    max_tokens: int | None = None,
    plan: RoutingPlan | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RoutingPlan]:
    """Send each token to the ranks of its experts, and multiply its rows by the experts' weights.

    A token is sent once per rank, and rows are multiplied as they arrive. bfloat16 and float16 on
    CUDA (float32 unfused), also float32 on the CPU, and FP8 with scales of blocks, which sends half
    the bytes. Sums are computed in float32 and rounded once.

    Parameters
    ----------
    x : [T, K]
        Tokens of this rank. T may differ between ranks. Copied if it is not contiguous.

    experts : [E_local, N, K], rows contiguous, or the transpose of contiguous [E_local, K, N]
        Weights of this rank's experts, with the dtype of x and the same shape on every rank.

    topk_ids : [T, k], int32 or int64, contiguous
        Experts of each token. -1 is no expert, and so is any number that is not below E. Not with
        ``plan``.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    max_tokens : int, optional
        The largest number of tokens that any rank has, the same on every rank. None: T, which must
        then be the same on all ranks.

    plan : RoutingPlan, optional
        The plan of an earlier call with the same ids, in the same group; it is not made again.

    x_scale : [T, ceil(K/128)], float32, optional
        Scales of x, if it is float8_e4m3fn: one for each 128 elements of a token.

    w_scale : [E_local, ceil(N/128), ceil(K/128)], float32, contiguous, optional
        Scales of experts, if they are float8_e4m3fn (then they must be contiguous): one for each
        128 x 128 of a weight.

    quantize : ``"block"``, optional
        Instead of x_scale: x has 16 or 32 bits and is quantised once, before it is sent.

    out_dtype : torch.dtype, optional
        bfloat16 or float16, of the result of FP8 operands. None: that of x with ``quantize``, else
        bfloat16.

    out : [bound, N], contiguous, optional
        Memory for the result. Not with gradients.

    Returns
    -------
    y : [bound, N]
        Its rows are those of ``plan``. bound = R * max_tokens * k.
    plan : RoutingPlan
        What ``tw.swiglu`` and ``tw.grouped_matmul_combine`` take.

    Raises
    ------
    InputError
        (a ValueError) Arguments that the operator does not take. Raised before anything is sent.
    RankMismatchError
        (an InputError) Ranks called different operators, or the same one with other arguments.
    PeerTimeout
        A peer does not call in time.
    CaptureError
        CUDA-graph capture without an earlier call of the same size or ``tw.warmup``.

    Notes
    -----
    Memory: y has R * max_tokens * k rows, and so has each tensor of rows that is computed from it,
    and its gradient.

    Rows of y from ``plan.offsets[-1]`` on are undefined, and so are those rows of its gradient:
    sums over rows must leave them out. A bias [E_local, N] of experts is indexed as
    ``torch.cat([bias, zeros])``, so that undefined rows get a bias of zeros, by
    ``torch.searchsorted(plan.offsets[1:], torch.arange(plan.bound, dtype=torch.int32),
    right=True)``.

    All ranks together compute the gradient of x. So x requires a gradient on every rank or on none,
    also where a rank has no tokens (``torch.empty(0, K, requires_grad=True)``), and either all
    ranks run the backward or none does. Otherwise the ranks that run it wait, and raise
    PeerTimeout. The forward does not compare this: ranks may differ if no backward follows, with
    one of them under ``torch.no_grad()`` for example.

    Sources: DeepEP; Comet, arXiv 2502.19811.
    """
    name = name_of(group)
    scaling = scaling_of(x_scale, w_scale, quantize, out_dtype)
    check_own(OP, name, _check_call, x, experts, topk_ids, max_tokens, plan, out, name)
    as_fp8 = check_own(OP, name, scaled.arguments_of, OP, x, experts, scaling, out)
    x = contiguous(x, "x", OP)
    if plan is None:
        assert topk_ids is not None, "checked above: there is a plan or there are ids"
        most = x.shape[0] if max_tokens is None else max_tokens
        plan = make_plan(topk_ids, experts.shape[0], most, name)
    numbers = (plan.table, plan.max_tokens, plan.topk, name)
    if as_fp8 is not None:
        return scaled.call(OP, (x, x_scale, experts, w_scale, *numbers, *as_fp8), out), plan
    if out is not None:
        _INTO_OUT(x, experts, *numbers, out=out)
        return out, plan
    keep = torch.is_grad_enabled() and experts.requires_grad
    y, _ = _OPERATOR(x, experts, *numbers, keep)
    return y, plan


def _check_call(
    x: torch.Tensor,
    experts: torch.Tensor,
    topk_ids: torch.Tensor | None,
    max_tokens: int | None,
    plan: RoutingPlan | None,
    out: torch.Tensor | None,
    name: str,
) -> None:
    """Check which arguments are given together, and what the torch operator does not get."""
    refuse_dtensors(x=x, experts=experts, topk_ids=topk_ids, out=out)
    _check_dimensions(x, experts)
    if plan is None:
        require(
            topk_ids is not None, "neither topk_ids nor plan", "one of them", "pass topk_ids [T, k]"
        )
        assert topk_ids is not None, "see above"
        require(
            topk_ids.dim() == 2,
            lambda: f"topk_ids {tuple(topk_ids.shape)}",
            "[T, k]",
            "add the dimension of choices",
        )
        tokens = topk_ids.shape[0]
    else:
        asked = "plan with topk_ids or max_tokens"
        require(
            topk_ids is None and max_tokens is None,
            asked,
            "the plan alone, which has them",
            "drop them",
        )
        check_plan(plan, experts, name)
        tokens = plan.tokens
    require(
        x.shape[0] == tokens,
        lambda: f"x of {x.shape[0]} tokens with ids of {tokens}",
        "the tokens of these ids",
        "pass x and ids, or the plan, of one batch",
    )
    if out is not None:
        tracked = torch.is_grad_enabled() and (
            x.requires_grad or experts.requires_grad or out.requires_grad
        )
        require(
            not tracked,
            "out= with tensors that require gradients",
            "one of them",
            "call under torch.no_grad()",
        )


# --- Forward ---


def _check_dimensions(x: torch.Tensor, experts: torch.Tensor) -> None:
    require(
        x.dim() == 2 and experts.dim() == 3 and x.shape[1] == experts.shape[2],
        lambda: f"x {tuple(x.shape)}, experts {tuple(experts.shape)}",
        "x [T, K] and experts [E_local, N, K]",
        "transpose the experts to Linear layout [N, K] each",
    )


def check_inputs(
    x: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, out: torch.Tensor | None
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    _check_dimensions(x, experts)
    tensors = (x, experts) if out is None else (x, experts, out)
    where = plan.table.device

    def placed() -> str:
        return ", ".join(f"{t.dtype} on {t.device}" for t in tensors)

    require(x.dtype in DTYPES, placed, "float16, bfloat16, float32", "convert x and experts")
    require(
        all(t.dtype == x.dtype and t.device == where for t in tensors),
        lambda: f"{placed()}, plan on {where}",
        "one dtype and one device",
        "convert to x.dtype on the plan's device",
    )
    require(
        x.is_contiguous(),
        lambda: f"x with strides {x.stride()}",
        "a contiguous x",
        "pass x.contiguous()",
    )
    require(
        experts.stride(2) == 1 or experts.shape[2] <= 1 or experts.transpose(1, 2).is_contiguous(),
        lambda: f"experts with strides {experts.stride()}",
        "contiguous rows, or the transpose of contiguous experts",
        "pass experts.contiguous()",
    )
    words = plan.words
    if not (
        x.shape[0] <= plan.max_tokens
        and plan.table.dtype == torch.int32
        and plan.table.numel() == words
    ):
        asked = f"x of {x.shape[0]} tokens, a plan of {plan.table.numel()} words"
        allowed = f"at most {plan.max_tokens} tokens, {words} words"
        require(False, asked, allowed, "pass the ids of these tokens, or their plan")
    if out is not None:
        shape = (plan.bound, experts.shape[1])
        fits = tuple(out.shape) == shape and out.is_contiguous()
        require(fits, f"out {tuple(out.shape)}", f"{shape}, contiguous", "allocate out like that")
        refuse_alias((out,), (x, experts, plan.table))


def _forward(
    x: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    max_tokens: int,
    topk: int,
    group_name: str,
    keep: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    routed = routing_plan(table, experts, x.shape[0], max_tokens, topk, group_name)
    if debugging():
        signature = {
            "experts": list(experts.shape),
            "dtype": str(x.dtype),
            "max_tokens": max_tokens,
            "topk": topk,
        }
        check_together(OP, group_name, signature, partial(check_inputs, x, experts, routed, out))
    else:
        check_inputs(x, experts, routed, out)
    ranks = topology_of(group_of(group_name), x.device)
    chosen = plan_grouped(plan_dispatch, routed, experts, ranks)
    y = x.new_empty(routed.bound, experts.shape[1]) if out is None else out
    if chosen.config is not None and chosen.config.nodes > 1:
        kept = new_kept(x, routed, keep)
        with over_nodes.arriving(OP, x, experts, routed) as (tokens, near):
            places = over_nodes.keep_tokens(kept, tokens, routed) if keep else None
            _multiply_tokens(tokens, experts, near, y, chosen.config, places)
    elif chosen.config is not None:
        kept = new_kept(x, routed, keep)
        places = kept.view(routed.world_size - 1, max_tokens, x.shape[1]) if keep else None
        _multiply_tokens(x, experts, routed, y, chosen.config, places)
    else:
        log_fallback(OP, chosen)
        received = receive(x, routed, group_of(group_name))
        y.copy_(reference.grouped_matmul(rows_of(x, received, routed), experts, routed.offsets))
        kept = received if keep else new_kept(x, routed, False)
    return y, kept


def _multiply_tokens(
    x: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    y: torch.Tensor,
    config: DispatchConfig,
    kept: torch.Tensor | None,
) -> None:
    """Multiply tokens x [T, K] of each rank of ``plan``, all of which share memory."""
    if config.kernel == "library":  # a group of this rank alone
        rows = rows_of(x, x[:0], plan)
        y.copy_(reference.grouped_matmul(rows, experts, plan.offsets))
    else:
        run_fused(x, experts, plan, y, plan.group_name, config, kept)


def _fake(
    x: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    max_tokens: int,
    topk: int,
    group_name: str,
    keep: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    routed = routing_plan(table, experts, x.shape[0], max_tokens, topk, group_name)
    return x.new_empty(routed.bound, experts.shape[1]), new_kept(x, routed, keep)


# --- Gradients ---


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, experts, table, *ctx.sizes, keep = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise zeros for kept tokens would be written
    require(
        keep or not ctx.needs_input_grad[1],
        "keep=False with experts that require a gradient",
        "keep=True",
        "call tileweave.dispatch_grouped_matmul",
    )
    ctx.shape = output[0].shape
    ctx.save_for_backward(x, experts, table, output[1])


def _passed(ctx: Any, grad: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    x, experts, table, kept = ctx.saved_tensors
    grad = x.new_zeros(ctx.shape) if grad is None else grad  # all ranks take part
    return grad, x, kept, experts, table, *ctx.sizes


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kept: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    max_tokens: int,
    topk: int,
    group_name: str,
    need_x: bool,
    need_experts: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    routed = routing_plan(table, experts, x.shape[0], max_tokens, topk, group_name)
    grad = grad.contiguous()
    empty = grad.new_empty(0)
    dx = _sum_over_rows(grad, experts, routed, group_name) if need_x else empty
    if not need_experts:
        return dx, empty
    ranks = known_topology_of(group_name)
    config = plan_grouped(plan_dispatch, routed, experts, ranks).config
    tokens, near = x, routed
    if config is not None and config.nodes > 1:
        tokens, kept, near = over_nodes.kept_tokens(x, kept, routed, config.nodes)
    if config is None or config.kernel == "library":
        rows = rows_of(tokens, kept, near)
    else:
        from tileweave.kernels.experts.rows import gather_rows

        rows = gather_rows(tokens, kept, near.fields, *near.sizes)
    return dx, gradient_of_experts(grad, rows, routed.offsets)


def _sum_over_rows(
    grad: torch.Tensor, experts: torch.Tensor, routed: RoutingPlan, group_name: str
) -> torch.Tensor:
    """Gradient of x by the dual operator: grad [bound, N], experts [E_local, N, K] -> [T, K]."""
    turned = experts.transpose(1, 2)
    if not turned.is_contiguous():
        turned = experts.contiguous().transpose(1, 2)
    chosen = plan_grouped(plan_combine, routed, turned, known_topology_of(group_name))
    if chosen.config is None:
        return reference.grouped_matmul_combine(grad, turned, routed, None, group_of(group_name))
    dx = grad.new_empty(routed.tokens, experts.shape[2])
    if chosen.config.nodes > 1:
        over_nodes.combine(f"gradient of {OP}", grad, turned, routed, None, dx, chosen.config)
    else:
        run_combine(grad, turned, routed, None, dx, group_name, chosen.config)
    return dx


def _like(
    _grad: torch.Tensor, x: torch.Tensor, _kept: torch.Tensor, experts: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), experts.new_empty(experts.shape)


# --- Plans and warmup ---


def explain(
    x: torch.Tensor,
    experts: torch.Tensor,
    topk_ids: torch.Tensor | int | None = None,
    *,
    max_tokens: int | None = None,
    plan: RoutingPlan | None = None,
    group: Group | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Plan[DispatchConfig]:
    """Return the plan of a call with these tensors: which path it takes, and why. Sends nothing.

    ``topk_ids``: the ids, or how many experts each token has.
    """
    name = name_of(group)
    if isinstance(topk_ids, int):
        topk_ids = torch.empty(x.shape[0], topk_ids, device="meta")
    _check_call(x, experts, topk_ids, max_tokens, plan, None, name)
    scaled.check_explained(OP, x, experts, scaling_of(x_scale, w_scale, quantize, out_dtype))
    if plan is None:
        assert topk_ids is not None, "checked above"
        most, topk = x.shape[0] if max_tokens is None else max_tokens, topk_ids.shape[1]
        plan = RoutingPlan(
            x.new_empty(0), x.shape[0], most, topk, experts.shape[0], *rank_and_size(name)
        )
    return plan_grouped(plan_dispatch, plan, experts, known_topology_of(name))


def warmup(
    tokens: int,
    experts: torch.Tensor,
    topk: int,
    *,
    group: Group | None = None,
    w_scale: torch.Tensor | None = None,
) -> Plan[DispatchConfig]:
    """Make one call of ``tokens`` tokens per rank, so that a capture may follow. Collective.

    ``tokens`` is ``max_tokens`` of later calls. ``w_scale``: of experts of FP8.
    """
    if tokens < 0 or topk < 1:
        raise InputError(
            f"asked: warmup({tokens}, topk={topk}); allowed: tokens >= 0, topk >= 1; "
            "remedy: pass sizes of one rank"
        )
    fp8: dict[str, Any] = {} if w_scale is None else {"w_scale": w_scale, "quantize": "block"}
    dtype = experts.dtype if w_scale is None else torch.bfloat16
    x = experts.new_zeros(tokens, experts.shape[2], dtype=dtype)
    ids = torch.full((tokens, topk), -1, dtype=torch.int32, device=experts.device)
    with torch.no_grad():
        dispatch_grouped_matmul(x, experts, ids, group=group, **fp8)
    return explain(x, experts, topk, group=group, **fp8)


SPEC = OperatorSpec(
    call=dispatch_grouped_matmul,
    arguments="Tensor x, Tensor experts, Tensor table, SymInt max_tokens, int topk, str group_name",
    options="bool keep",
    results="(Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup,
    backward=BackwardOperator(
        arguments="Tensor grad, Tensor x, Tensor kept, Tensor experts, Tensor table,"
        " SymInt max_tokens, int topk, str group_name",
        of=("x", "experts"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.dispatch_grouped_matmul,
    kernel="tileweave.kernels.experts.dispatch_triton",
    dual="grouped_matmul_combine",
    define_more=scaled.define_dispatch,
)
