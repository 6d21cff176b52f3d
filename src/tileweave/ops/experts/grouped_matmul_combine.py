"""grouped_matmul_combine: multiply rows by experts' weights, and sum each token's rows on its rank.

============  ==================  =======================================================
y             [bound, I]          rows of this rank's experts, sorted by expert, in the
                                  order of ``plan``
experts       [E_local, H, I]     this rank's experts, each a Linear weight
topk_weights  [T, k] fp32         of this rank's tokens; None: 1
z             [T, H]              sum over j of topk_weights[t, j] * (row of (t, j)) @
                                  experts[its expert].T
============  ==================  =======================================================

forward : one fused kernel (``kernels/experts/combine_triton.py``); unfused: grouped matmul, sums
per rank, reduce-scatter.

input gradient : g = (gz of a row's token) @ its expert, which is ``dispatch_grouped_matmul``, the
dual operator, with the same plan; gy = weight * g.

weight gradients : of experts, (gz of the rows).T @ (weight * y), a grouped matmul; of topk_weights,
the dot product of g and y of each row, sent to the ranks of the tokens.

Sources: GEMM + all-to-all of fused computation-collective operators, arXiv 2305.06942; sums per
rank before they are sent, as in DeepEP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.debug_agreement import check_own, check_together
from tileweave.ops.core.dtensors import refuse_dtensors
from tileweave.ops.core.nodes import known_topology_of, topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    Group,
    agree,
    debugging,
    group_of,
    log_fallback,
    name_of,
    workspace_of,
)
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.ops.experts import over_nodes
from tileweave.ops.experts import scaled_operators as scaled
from tileweave.ops.experts.gradients import combine_gradients
from tileweave.ops.experts.grouped_matmul_combine_fused import OP, run_fused
from tileweave.ops.experts.routing_plan import RoutingPlan, check_plan, plan_grouped, routing_plan
from tileweave.ops.matmul.inputs import DTYPES, check_shape, refuse_alias
from tileweave.ops.matmul.scaled_calls import scaling_of
from tileweave.planning.combine import CombineConfig, plan_combine
from tileweave.planning.problem import Plan
from tileweave.transport.workspace import REGISTRY

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")


@checks_types
def grouped_matmul_combine(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    topk_weights: torch.Tensor | None = None,
    *,
    group: Group | None = None,
    y_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by their experts' weights, and return the weighted sum of each token's rows to
    its rank.

    bfloat16 and float16 on CUDA (float32 unfused), also float32 on the CPU, and FP8 with scales of
    blocks. Products are rounded to the dtype of the result. Each rank adds the products of a token
    in float32 in order of j and rounds; the token's rank adds these partial sums in float32 in rank
    order, its own unrounded, and rounds once.

    Parameters
    ----------
    y : [bound, I], rows contiguous
        What :func:`dispatch_grouped_matmul` returned, after an activation. Rows from
        ``plan.offsets[-1]`` on are not read.

    experts : [E_local, H, I], contiguous, or the transpose of contiguous [E_local, I, H]
        Weights of this rank's experts, with the dtype of y and the same shape on every rank.

    plan : RoutingPlan
        What the dispatch returned, in the same group.

    topk_weights : [T, k], float32, contiguous, optional
        Weights of the experts of each token. None: all 1.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    y_scale : [bound, ceil(I/128)], float32, optional
        Scales of y, if it is float8_e4m3fn, as ``tw.swiglu(..., quantize="block")`` returns them.

    w_scale : [E_local, ceil(H/128), ceil(I/128)], float32, contiguous, optional
        Scales of experts, if they are float8_e4m3fn (then they must be contiguous): one for each
        128 x 128 of a weight.

    out_dtype : torch.dtype, optional
        bfloat16 or float16, of the result of FP8 operands, and of what is sent. None: bfloat16.

    out : [T, H], contiguous, optional
        Memory for the result. Not with gradients.

    Returns
    -------
    z : [T, H]
        With the dtype of y, or out_dtype. A token without an expert gets 0.

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
    Gradients of y, experts and topk_weights are those of one loss over the tokens of all ranks.
    Either all ranks run the backward or none does. Gradients of topk_weights are sent between
    ranks, so they are required on every rank or on none. Sources: arXiv 2305.06942; DeepEP.
    """
    name = name_of(group)
    check_own(OP, name, _check_call, y, experts, plan, topk_weights, out, name)
    sizes = (plan.table, topk_weights, plan.tokens, plan.max_tokens, plan.topk)
    scaling = scaling_of(y_scale, w_scale, None, out_dtype)
    as_fp8 = check_own(OP, name, scaled.arguments_of, OP, y, experts, scaling, out)
    if as_fp8 is not None:
        return scaled.call(OP, (y, y_scale, experts, w_scale, *sizes, name, *as_fp8), out)
    if out is not None:
        _INTO_OUT(y, experts, *sizes, name, out=out)
        return out
    return _OPERATOR(y, experts, *sizes, name)


def _check_call(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
    name: str,
) -> None:
    """Check what the torch operator does not get."""
    refuse_dtensors(y=y, experts=experts, topk_weights=weights, out=out)
    _check_experts(experts)
    check_plan(plan, experts, name)
    if out is not None:
        tracked = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (y, experts, weights, out)
        )
        require(
            not tracked,
            "out= with tensors that require gradients",
            "one of them",
            "call under torch.no_grad()",
        )


def _check_experts(experts: torch.Tensor) -> None:
    require(
        experts.dim() == 3,
        lambda: f"experts {tuple(experts.shape)}",
        "[E_local, H, I]",
        "stack the experts' Linear weights",
    )


def check_inputs(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    shapes = f"y {tuple(y.shape)}, experts {tuple(experts.shape)}"
    fits = y.dim() == 2 and experts.dim() == 3 and y.shape[1] == experts.shape[2]
    require(
        fits, shapes, "y [bound, I], experts [E_local, H, I]", "stack the experts' Linear weights"
    )
    words = plan.words
    sizes = (
        f"a plan of {plan.max_tokens} tokens, k = {plan.topk}, "
        f"with {plan.table.numel()} words, for {shapes}"
    )
    same = plan.table.numel() == words and plan.table.dtype == torch.int32
    require(same, sizes, "the plan of the dispatch", "pass what dispatch_grouped_matmul returned")
    require(
        y.shape[0] == plan.bound,
        sizes,
        f"y of {plan.bound} rows",
        "pass y of the same dispatch as the plan",
    )
    tensors = [t for t in (y, experts, out) if t is not None]
    dtypes = ", ".join(str(t.dtype) for t in tensors)
    require(
        all(t.dtype == y.dtype for t in tensors) and y.dtype in DTYPES,
        dtypes,
        "one of float16, bfloat16, float32",
        "convert y and experts",
    )
    devices = [t.device for t in (*tensors, plan.table, weights) if t is not None]
    require(
        all(d == y.device for d in devices),
        ", ".join(map(str, devices)),
        "one device",
        "move all to y.device",
    )
    require(
        y.stride(1) == 1 or y.shape[1] <= 1,
        f"y with strides {y.stride()}",
        "contiguous rows",
        "pass y.contiguous()",
    )
    either = experts.is_contiguous() or experts.transpose(1, 2).is_contiguous()
    require(
        either,
        f"experts with strides {experts.stride()}",
        "contiguous, or its transpose",
        "pass experts.contiguous()",
    )
    kind = None if weights is None else weights.dtype
    require(
        kind in (None, torch.float32),
        f"topk_weights {kind}",
        "float32",
        "pass topk_weights.float()",
    )
    check_tokens(y, experts, plan, weights, out)


def check_tokens(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check what may differ between calls of one signature: the number of tokens, and addresses."""
    tokens = plan.tokens
    if not 0 <= tokens <= plan.max_tokens:
        require(
            False,
            f"a plan of {tokens} tokens",
            f"0 to {plan.max_tokens}",
            "pass what dispatch_grouped_matmul returned",
        )
    if weights is not None and not (
        weights.shape == (tokens, plan.topk) and weights.is_contiguous()
    ):
        check_shape(
            "topk_weights", weights, (tokens, plan.topk), "one weight for each choice of the plan"
        )
    if out is not None:
        refuse_alias((out,), (y, experts, weights))
        check_shape("out", out, (tokens, experts.shape[1]), "allocate out with that shape")


def _accept(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
    group_name: str,
) -> Plan[CombineConfig]:
    """Check and plan, once per signature of a fused call.

    T is no part of the signature, since it may differ between batches.
    """
    workspace = REGISTRY.find(group_name, y.device)
    signature = (
        OP,
        plan.max_tokens,
        plan.topk,
        plan.table.shape,
        plan.table.dtype,
        plan.table.device,
        y.shape,
        y.stride(),
        y.dtype,
        y.device,
        experts.shape,
        experts.stride(),
        experts.dtype,
        experts.device,
        *(None if t is None else (t.dtype, t.device) for t in (weights, out)),
    )
    found = None if workspace is None else workspace.accepted.get(signature)
    if found is not None and not debugging():
        check_tokens(y, experts, plan, weights, out)
        return found
    if debugging():
        sizes = [*experts.shape, plan.max_tokens, plan.topk]
        common = {"sizes": sizes, "dtype": str(y.dtype), "weighted": weights is not None}
        check_together(
            OP, group_name, common, partial(check_inputs, y, experts, plan, weights, out)
        )
    else:
        check_inputs(y, experts, plan, weights, out)
    ranks = topology_of(group_of(group_name), y.device)
    chosen = plan_grouped(plan_combine, plan, experts, ranks)
    if chosen.config is not None:
        workspace_of(group_name, y.device).accepted[signature] = chosen
    return chosen


def _forward(
    y: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    max_tokens: int,
    topk: int,
    group_name: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    plan = routing_plan(table, experts, tokens, max_tokens, topk, group_name)
    chosen = _accept(y, experts, plan, weights, out, group_name)
    if chosen.config is None:
        log_fallback(OP, chosen)
        z = reference.grouped_matmul_combine(y, experts, plan, weights, group_of(group_name))
        return z if out is None else out.copy_(z)
    z = y.new_empty(tokens, experts.shape[1]) if out is None else out
    if chosen.config.nodes > 1:
        over_nodes.combine(OP, y, experts, plan, weights, z, chosen.config)
    else:
        run_fused(y, experts, plan, weights, z, group_name, chosen.config)
    return z


def _fake(
    y: torch.Tensor,
    experts: torch.Tensor,
    _table: torch.Tensor,
    _weights: torch.Tensor | None,
    tokens: int,
    *_: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return y.new_empty(tokens, experts.shape[1])


def _backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor | None,
    tokens: int,
    max_tokens: int,
    topk: int,
    group_name: str,
    need_y: bool,
    need_experts: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plan = routing_plan(table, experts, tokens, max_tokens, topk, group_name)
    if debugging():
        agree(group_of(group_name), {"op": f"gradient of {OP}", "of topk_weights": need_weights})
    return combine_gradients(
        grad.contiguous(), y, experts, plan, weights, group_name, need_y, need_experts, need_weights
    )


def _like(
    grad: torch.Tensor, y: torch.Tensor, experts: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, tokens, _, topk, _ = rest
    of_weights = grad.new_empty(tokens, topk, dtype=torch.float32)
    return torch.empty_like(y), experts.new_empty(experts.shape), of_weights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, experts, table, weights, *ctx.sizes = inputs
    ctx.save_for_backward(y, experts, table, weights)


def _passed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, *ctx.saved_tensors, *ctx.sizes


def explain(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    *,
    y_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Plan[CombineConfig]:
    """Return the plan of a call with these tensors: which path it takes, and why. Sends nothing."""
    _check_experts(experts)
    check_plan(plan, experts, plan.group_name)
    scaling = scaling_of(y_scale, w_scale, None, out_dtype)
    if not scaled.check_explained(OP, y, experts, scaling):
        check_inputs(y, experts, plan, None, None)
    ranks = known_topology_of(plan.group_name, plan.world_size)
    return plan_grouped(plan_combine, plan, experts, ranks)


_ARGUMENTS = (
    "Tensor y, Tensor experts, Tensor table, Tensor? weights, SymInt tokens, SymInt max_tokens,"
    " int topk, str group_name"
)
SPEC = OperatorSpec(
    call=grouped_matmul_combine,
    arguments=_ARGUMENTS,
    forward=_forward,
    fake=_fake,
    explain=explain,
    backward=BackwardOperator(
        arguments=f"Tensor grad, {_ARGUMENTS}",
        of=("y", "experts", "weights"),
        setup_context=_setup_context,
        passed=_passed,
        run=_backward,
        like=_like,
    ),
    reference=reference.grouped_matmul_combine,
    kernel="tileweave.kernels.experts.combine_triton",
    dual="dispatch_grouped_matmul",
    define_more=scaled.define_combine,
)
