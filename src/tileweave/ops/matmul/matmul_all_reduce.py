"""matmul_all_reduce: multiply by this rank's part of K, sum over ranks on every rank; residual,
RMSNorm.

============  =======  ==============================================================
x             [M, k]   this rank's columns of the input, k = K/R; [..., k] also works
w             [N, k]   this rank's columns of a Linear weight
bias          [N]      optional; added once
residual      [M, N]   optional; added to the sum
norm_weight   [N]      optional; then the result is normalised
y             [M, N]   sum over ranks of x @ w.T, plus bias, plus residual
normed        [M, N]   RMSNorm(y) * norm_weight, of the rounded y
============  =======  ==============================================================

All arguments but x and w have the same values on every rank, and so has the result.

forward : few rows, one fused kernel (``kernels/all_reduce/one_shot.py``); more, a matmul and a
launch that sums (``reduce_by_cublas.py``); many, a reduce-scatter that stores its rows at all
peers, too (``all_reduce_by_tiles.py``); or matmul, all-reduce, addition and norm where that is
faster.

backward : nothing is sent. Gradients of the result must be the same on every rank, as they are when
all ranks go on with the same computation (tensor parallelism). Then gx = gy @ w and gw = gy.T @ x
need this rank's operands only, and gradients of bias, residual and norm_weight are the same on
every rank. A loss that differs between ranks needs ``matmul_reduce_scatter``, or an all-reduce of
gy before. With ``main_grad``, gw is added to it by an operator of its own, for compilers.

Sources: GEMV + all-reduce in one kernel, arXiv 2305.06942; residual and norm as in vLLM's
``fused_add_rms_norm``, with results in memory of their own.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.dtensors import takes_dtensors
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    Group,
    contiguous,
    define,
    group_of,
    name_of,
)
from tileweave.ops.core.spec import Backward, OperatorSpec
from tileweave.ops.matmul import scaled_calls as calls
from tileweave.ops.matmul import scaled_operators as fp8
from tileweave.ops.matmul import scaled_training as training
from tileweave.ops.matmul.backward import add_product
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_like_x,
    check_main_grad,
    check_operands,
    check_shape,
    check_traced,
    out_as_rows,
    plan_for,
)
from tileweave.ops.matmul.known_calls import call_again, unflatten
from tileweave.ops.matmul.matmul_all_reduce_fused import OP, run_fused
from tileweave.ops.matmul.warmup import (
    Rows,
    Warmed,
    as_fp8,
    call_for_warmup,
    operands_for_warmup,
    scales_for_warmup,
    warm_up,
)
from tileweave.planning.matmul import plan_matmul_all_reduce
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.topology import Topology

EPS = 1e-6

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")
_ALLOWED = "[..., N]"  # of results and residual


@takes_dtensors(None, x=-1, w=1, bias=None, residual=None, norm_weight=None)
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = EPS,
    group: Group | None = None,
    main_grad: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    quantize_out: str | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Multiply by this rank's columns of a weight and sum over ranks, on every rank.

    Optionally add a residual and normalise. bfloat16 and float16 on CUDA (float32 unfused), also
    float32 on the CPU, and FP8 with scales. Partial sums of ranks are rounded to the dtype of the
    result (in float16, those above 65504 become infinite), added in float32 in a fixed order, with
    bias and residual, and rounded again. For the rounding of the unfused path see
    ``ops/reference.py``.

    Parameters
    ----------
    x : [M, k] or [..., k]
        This rank's columns of the input, the same shape on every rank. Copied if not contiguous.

    w : [N, k], rows contiguous
        This rank's columns of a Linear weight, in the dtype of x; the same shape on every rank.

    bias : [N], optional
        Added once. The same values on every rank.

    residual : [M, N] or [..., N], optional
        Added once. The same values on every rank. Copied in each call if not contiguous.

    norm_weight : [N], optional
        Weight of RMSNorm, which is applied to the sum. The same values on every rank.

    norm_eps : float
        Added to the mean square in RMSNorm, at least 0. The same on every rank.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    main_grad : [N, k], optional
        In the backward the gradient of w is added to it, in float32, and the gradient of w is None.
        float32, contiguous. For Megatron-LM's ``gradient_accumulation_fusion``.

    x_scale : float32 tensor, optional
        For FP8 operands: x is float8_e4m3fn, and represents data times scale. One element, for the
        whole tensor; [..., 1], for rows of x; or [..., ceil(k/128)], for 128 elements of a row.
        ``tileweave.quantize`` makes it. k is a multiple of 16. No gradients.

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

    quantize_out : "row" or "block", optional
        The norm becomes FP8, with a scale per row or per 128 columns: what ``tileweave.quantize``
        makes of it. For the next layer in decoding. Needs ``norm_weight``; operands may have 16
        bits or FP8. No gradients.

    out : [M, N] or [..., N], contiguous, optional
        Memory for the first result. Not with gradients, nor with ``main_grad``.

    residual_out : [M, N] or [..., N], contiguous, optional
        Memory for the second result, with ``out`` and ``norm_weight``.

    Returns
    -------
    y : [..., N]
        Without ``norm_weight``: sum over ranks of x @ w.T, plus bias, plus residual.
    (normed, residual_out) : pair of [..., N]
        With ``norm_weight``: residual_out is that y, the residual of the next layer, and normed is
        RMSNorm(residual_out) * norm_weight, computed in float32 from the rounded residual_out.
    (data, scale, residual_out) : [..., N], [..., 1] or [..., ceil(N/128)], [..., N]
        With ``quantize_out``: normed as FP8 data and float32 scales.

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
    Nothing is sent in the backward: gradients of the result must be the same on every rank, as in
    tensor parallelism. Sources: arXiv 2305.06942; vLLM's ``fused_add_rms_norm``.
    """
    normed = norm_weight is not None
    if not normed:
        norm_eps = EPS  # unused: ranks need not agree on it
    plain = main_grad is x_scale is w_scale is quantize is quantize_out is out_dtype is None
    if plain and fast_accum is False and type(norm_eps) is float:
        args = (bias, residual, norm_weight), (out, residual_out), norm_eps, norm_eps
        found = call_again(OP, _run, group, x, w, *args, flatten=residual is out is None)
        if found is not None:
            y = unflatten(found[0], x)
            return (y, unflatten(found[1], x)) if normed else y
    name = name_of(group)
    more = (residual, norm_weight, out, residual_out, norm_eps, main_grad)
    rows, given, flat, flat_residual = check_own(OP, name, _as_called, x, w, bias, *more)
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None and scaling.trains:
        names = ("residual", "norm_weight", "out", "main_grad", "quantize_out")
        values = (residual, norm_weight, out, main_grad, quantize_out)
        refused: dict[str, object] = dict(zip(names, values, strict=True))
        return training.call(OP, x, w, bias, scaling, name, refused)
    if scaling is not None or quantize_out is not None:
        scaling = scaling or calls.Scaling()
        refused = {"main_grad": main_grad}
        call = check_own(OP, name, calls.as_called, OP, x, w, scaling, out, _ALLOWED, refused)
        added = (bias, given, norm_weight, norm_eps)
        found = fp8.all_reduce(call, added, flat_residual, name, quantize_out or "")
        if out is not None:
            return out if residual_out is None else (out, residual_out)
        assert found is not None, "only the .out form returns nothing"
        y, scale, kept = found
        shape = (*x.shape[:-1], w.shape[0])
        if quantize_out:
            scale = scale if x.dim() == 2 else scale.reshape(*x.shape[:-1], -1)
            return y.view(shape), scale, kept.view(shape)
        return (y.view(shape), kept.view(shape)) if normed else y.view(shape)
    operands = (rows, w, bias, given, norm_weight, norm_eps, name)
    if out is not None:
        _INTO_OUT(*operands, out=flat, residual_out=flat_residual)
        return out if residual_out is None else (out, residual_out)
    y, kept = _OPERATOR(*operands, main_grad)
    if x.dim() > 2:
        shape = (*x.shape[:-1], w.shape[0])
        y, kept = y.view(shape), kept.view(shape) if normed else kept
    return (y, kept) if normed else y


def _as_called(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_eps: float = EPS,
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return x, residual, out and residual_out as rows. Raises for what those no longer show."""
    rows = as_rows(x, w, OP)
    if main_grad is not None:
        require(out is None, "out= with main_grad=", "one of them", "drop out=")
        check_main_grad([w], [main_grad])
    if residual is not None:
        residual = contiguous(residual, "residual", OP)
        if x.dim() > 2:
            check_like_x("residual", residual, x, _ALLOWED)
            residual = residual.flatten(0, -2)
    if norm_weight is not None and (norm_eps is None or not 0 <= norm_eps < inf):
        require(
            False,
            f"norm_eps={norm_eps}",
            "a number, at least 0 and finite",
            "pass what the model has, such as 1e-6",
        )
    if out is None and residual_out is None:
        return rows, residual, None, None
    normed, given = norm_weight is not None, (out is not None) + (residual_out is not None)
    if out is None or given != 1 + normed:
        asked = f"{given} of out= and residual_out= {'with' if normed else 'without'} norm_weight"
        require(
            False,
            asked,
            "both with norm_weight, out= alone without",
            "allocate what the call returns",
        )
    inputs = (w, bias, residual, norm_weight)
    flat = out_as_rows(out, x, _ALLOWED, *inputs)
    return (
        rows,
        residual,
        flat,
        out_as_rows(residual_out, x, _ALLOWED, *inputs, name="residual_out"),
    )


def check_inputs(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    check_operands(x, w, bias, residual, norm_weight, out, residual_out)
    streams = w.stride(1) == 1 or w.shape[1] <= 1  # what the one-shot kernel reads
    require(
        streams, lambda: f"w with strides {w.stride()}", "contiguous rows", "pass w.contiguous()"
    )
    paired = out is None or (residual_out is None) == (norm_weight is None)
    require(
        paired,
        "residual_out without norm_weight, or the reverse",
        "both or neither",
        "allocate what the call returns",
    )
    shape = (x.shape[0], w.shape[0])
    check_shape("residual", residual, shape, "one value for each of the result")
    check_shape("norm_weight", norm_weight, (w.shape[0],), "one weight for each row of w")
    check_shape("out", out, shape, "allocate out with that shape")
    check_shape("residual_out", residual_out, shape, "allocate residual_out with that shape")


def plan(x: torch.Tensor, w: torch.Tensor, ranks: Topology) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank."""
    return plan_for(plan_matmul_all_reduce, x, x.shape[0], w.shape[0], ranks)


def _forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    group_name: str,
    main_grad: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if main_grad is not None:
        check_main_grad([w], [main_grad])
    inputs = (x, w, bias, residual, norm_weight)
    chosen = accept(
        OP,
        group_name,
        x,
        w,
        (bias, residual, norm_weight),
        (out, residual_out),
        norm_eps,
        lambda size: check_inputs(*inputs, out, residual_out),
        lambda ranks: plan(x, w, ranks),
    )
    optional = bias, residual, norm_weight
    return _run(chosen, group_name, x, w, *optional, norm_eps, out, residual_out)


def _run(
    chosen: Plan[MatmulConfig],
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call of plan ``chosen``."""
    if chosen.config is None:
        y, kept = reference.matmul_all_reduce(
            x, w, bias, group_of(group_name), residual, norm_weight, norm_eps, out, residual_out
        )
        return y, kept
    y = x.new_empty(x.shape[0], w.shape[0]) if out is None else out
    kept = torch.empty_like(y) if residual_out is None and norm_weight is not None else residual_out
    run_fused(x, w, bias, residual, norm_weight, norm_eps, y, kept, group_name, chosen)
    return y, kept


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    group_name: str,
    main_grad: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_traced(lambda: check_main_grad([w], [] if main_grad is None else [main_grad]))
    check_traced(lambda: check_inputs(x, w, bias, residual, norm_weight, out, residual_out))
    y = x.new_empty(x.shape[0], w.shape[0])
    return y, x.new_empty(0) if norm_weight is None else torch.empty_like(y)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    # main_grad is not saved: later calls add to it before this backward runs
    x, w, bias, residual, norm_weight, ctx.norm_eps, ctx.group_name, ctx.main_grad = inputs
    ctx.optional = bias is not None, residual is not None, norm_weight is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, norm_weight, output[1] if norm_weight is not None else None)


def _gradients(
    ctx: Any, grad: torch.Tensor | None, grad_kept: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients in plain torch, which compilers can trace, since nothing is sent.

    The gradient of the weight is added to ``ctx.main_grad`` if there is one.
    """
    x, w, norm_weight, kept = ctx.saved_tensors
    has_bias, has_residual, has_norm = ctx.optional
    need_x, need_w, need_bias, need_residual, need_norm = ctx.needs_input_grad[:5]
    g_norm, none = None, (None,) * len(ctx.needs_input_grad)
    if has_norm:
        grad, g_norm = _through_norm(grad, grad_kept, norm_weight, kept, ctx.norm_eps)
    if grad is None:
        return none
    g_w = None
    if need_w and ctx.main_grad is not None:
        torch.ops.tileweave.add_product(ctx.main_grad, grad, x)
    elif need_w:
        g_w = grad.t() @ x
    return (
        grad @ w if need_x else None,
        g_w,
        grad.sum(0) if has_bias and need_bias else None,
        grad if has_residual and need_residual else None,
        g_norm if need_norm else None,
        *none[5:],
    )


def _through_norm(
    grad: torch.Tensor | None,
    grad_kept: torch.Tensor | None,
    weight: torch.Tensor,
    kept: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of y and of the weight from those of ``weight * y / rms(y)`` and of y; sums in
    fp32."""
    if grad is None:
        return grad_kept, None
    y, g = kept.float(), grad.float()
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    unit = y * scale
    weighted = g * weight.float()
    g_y = scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    if grad_kept is not None:
        g_y = g_y + grad_kept.float()
    return g_y.to(kept.dtype), (g * unit).sum(0).to(weight.dtype)


def explain(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    group: Group | None = None,
    main_grad: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> Plan:
    """Return the plan of a call with these tensors: which path it takes, and why. Sends nothing."""
    rows, given, flat, flat_residual = _as_called(
        x, w, bias, residual, norm_weight, out, residual_out, main_grad=main_grad
    )
    scaling = calls.scaling_of(x_scale, w_scale, quantize, out_dtype, fast_accum)
    if scaling is not None:
        if scaling.trains:
            return training.explain(OP, x, w, bias, scaling, group)
        call = calls.as_called(OP, x, w, scaling, out, _ALLOWED, {"main_grad": main_grad})
        return fp8.explain(OP, call, bias, group)
    check_inputs(rows, w, bias, given, norm_weight, flat, flat_residual)
    return plan(rows, w, known_topology_of(name_of(group)))


def warmup(
    rows: Rows,
    cols: int,
    depth: int,
    *,
    norm: bool = False,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scaling: str | None = None,
    device: torch.device | str | None = None,
    group: Group | None = None,
) -> Warmed:
    """Reserve memory and compile for x [rows, depth] and w [cols, depth], so that a capture may
    follow. Collective.

    ``norm``: for calls with residual and norm_weight, which have another kernel. ``backward``: also
    run the backward. ``scaling``: of FP8 operands; see :func:`tileweave.warmup`.
    """
    x, w = operands_for_warmup(rows, cols, depth, dtype, device)
    w = as_fp8(w, scaling)
    made = torch.bfloat16 if x.dtype == fp8.FP8 else x.dtype
    residual = x.new_zeros(x.shape[0], cols, dtype=made) if norm else None
    weight = x.new_ones(cols, dtype=made) if norm else None

    def call(part: torch.Tensor, back: bool) -> None:
        own = None if residual is None else residual[: part.shape[0]]
        more = {"residual": own, "norm_weight": weight, **scales_for_warmup(part, w, scaling)}
        call_for_warmup(matmul_all_reduce, part, w, back, group=group, **more)

    def planned(part: torch.Tensor) -> Plan[MatmulConfig]:
        return explain(part, w, group=group, **scales_for_warmup(part, w, scaling))

    return warm_up(rows, x, call, planned, backward, group)


def _define_more() -> None:
    define("add_product(Tensor(a!) main_grad, Tensor grad, Tensor rows) -> ()", add_product)
    fp8.define_reduce()
    training.define_training(OP)


SPEC = OperatorSpec(
    call=matmul_all_reduce,
    arguments="Tensor x, Tensor w, Tensor? bias, Tensor? residual, Tensor? norm_weight,"
    " float norm_eps, str group_name",
    options="Tensor? main_grad=None",
    results="(Tensor, Tensor)",
    out="Tensor(a!) out, Tensor(b!)? residual_out",
    forward=_forward,
    fake=_fake,
    explain=explain,
    warmup=warmup,
    backward=Backward(_setup_context, _gradients),
    reference=reference.matmul_all_reduce,
    kernel="tileweave.kernels.all_reduce.one_shot",
    define_more=_define_more,
)
