"""all_gather_matmul of several weights, of a different number of columns on each rank, and with
gradients added to ``main_grad``: the torch operator ``tileweave::all_gather_matmul_list``.

==========  ==================  ================================================================
x           [m, K]              shard of the rows, as in ``all_gather_matmul``
w           list of [n_i, K]    this rank's rows of Linear weights
bias        list of [n_i]       empty list: none; an empty tensor: none for that weight
main_grad   list of [n_i, K]    empty list: none
cols        list of int         largest n_i of any rank, where ranks differ; else empty list
y           list of [M, n_i]    gather(x) @ w_i.T + bias_i
gathered    [M, K]              gather(x)
==========  ==================  ================================================================

forward : the fused kernel multiplies by the weight with the most columns, since x arrives during
its longest matmul; it also stores gather(x), which matmuls of torch multiply by the other weights.

backward : ``backward.GatherBackward``, with one gather of x and one reduce-scatter for all weights.

ranks with fewer columns : every rank plans with ``cols``, so that all run the same protocol. A rank
without columns multiplies by a weight of one row of zeros, since the kernel waits for shards only
in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import define, group_of, log_fallback, refuse_second_derivative
from tileweave.ops.matmul.all_gather_matmul_fused import OP, run_fused
from tileweave.ops.matmul.backward import GatherBackward
from tileweave.ops.matmul.inputs import (
    accept,
    as_rows,
    check_main_grad,
    check_operands,
    check_traced,
    plan_for,
    plan_now,
)
from tileweave.planning.matmul import plan_all_gather_matmul
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.topology import Topology

Tensors = list[torch.Tensor]

_BACKWARD = operator(f"{OP}_list_backward")
_BACKWARD_INTO = operator(f"{OP}_list_backward.into")


def most_columns(w: Tensors, cols: list[int]) -> int:
    """Which weight the fused kernel multiplies by: the one with the most columns."""
    sizes = cols or [each.shape[0] for each in w]
    return sizes.index(max(sizes))


@dataclass(slots=True)
class Operands:
    """Arguments of a public call as the operator takes them: one of each per weight, or none."""

    rows: torch.Tensor
    w: Tensors
    bias: Tensors
    main_grad: Tensors
    cols: list[int]


def as_operands(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None,
    main_grad: torch.Tensor | Sequence[torch.Tensor] | None,
    cols: int | Sequence[int] | None,
    out: torch.Tensor | None,
) -> Operands:
    """Return the arguments of a public call as lists. Raises for what those no longer show."""
    require(
        out is None,
        "out= with several weights, cols= or main_grad=",
        "out= with one weight alone",
        "drop out=",
    )
    weights = [w] if isinstance(w, torch.Tensor) else list(w)
    biases = [bias] if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    into = [main_grad] if isinstance(main_grad, torch.Tensor) else list(main_grad or ())
    given = [] if cols is None else cols if isinstance(cols, Sequence) else [cols]
    most = [*given]
    for number in most:
        require(
            isinstance(number, (int, torch.SymInt)) and number >= 0,
            lambda number=number: f"cols={number!r}",
            "whole numbers",
            "pass the largest n of any rank",
        )
    require(len(weights) > 0, "no weights", "one weight or more", "pass a weight")
    require(
        all(isinstance(each, torch.Tensor) for each in weights),
        lambda: f"w of types {', '.join(type(each).__name__ for each in weights)}",
        "tensors",
        "pass a torch.Tensor for each weight",
    )
    rows = as_rows(x, weights[0], OP)
    own = [] if bias is None else [x.new_empty(0) if b is None else b for b in biases]
    check_counts(weights, own, into, most)
    check_main_grad(weights, into)
    return Operands(rows, weights, own, into, most)


def check_counts(
    w: Sequence[object],
    bias: Sequence[object],
    main_grad: Sequence[object],
    cols: Sequence[object],
) -> None:
    """Raise :class:`InputError` if there is not one of each for each weight."""
    for name, given in (("bias", bias), ("main_grad", main_grad), ("cols", cols)):
        require(
            len(given) in (0, len(w)),
            lambda name=name, given=given: f"{name} of {len(given)} for {len(w)} weights",
            "one for each weight",
            f"pass as many in {name}= as there are weights",
        )


def check_inputs(x: torch.Tensor, w: Tensors, bias: Tensors, cols: list[int]) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    for each, own in zip(w, _present(w, bias), strict=True):
        check_operands(x, each, own)
    for each, most in zip(w, cols, strict=False):
        require(
            each.shape[0] <= most,
            lambda each=each, most=most: f"w {tuple(each.shape)} with cols={most}",
            "w [n, K] with n at most cols",
            "pass the largest n of any rank as cols=, the same on every rank",
        )


def _present(w: Tensors, bias: Tensors) -> list[torch.Tensor | None]:
    """The bias of each weight; None for an empty one."""
    return [b if b.numel() else None for b in bias] or [None] * len(w)


def plan(x: torch.Tensor, w: Tensors, cols: list[int], ranks: Topology) -> Plan[MatmulConfig]:
    """The plan of the fused call, the same on every rank."""
    most = max(cols or [each.shape[0] for each in w])
    return plan_for(plan_all_gather_matmul, x, x.shape[0], most, ranks)


def _forward(
    x: torch.Tensor,
    w: Tensors,
    bias: Tensors,
    main_grad: Tensors,
    group_name: str,
    return_gathered: bool,
    cols: list[int],
) -> tuple[Tensors, torch.Tensor]:
    check_counts(w, bias, main_grad, cols)
    check_main_grad(w, main_grad)
    at, biases = most_columns(w, cols), _present(w, bias)
    sizes = tuple(cols or [each.shape[0] for each in w])
    chosen = accept(
        OP,
        group_name,
        x,
        w[at],
        (*biases, *w[:at], *w[at + 1 :]),
        (None,),
        ("list", return_gathered, len(cols), *sizes),
        lambda size: check_inputs(x, w, bias, cols),
        lambda ranks: plan(x, w, cols, ranks),
        [list(x.shape)],
    )
    keep = return_gathered or len(w) > 1
    y, gathered = _multiply(x, w[at], biases[at], group_name, chosen, keep)
    rest = {i: linear(gathered, w[i], biases[i]) for i in range(len(w)) if i != at}
    if not return_gathered:
        gathered = x.new_empty(0)
    elif gathered is x:
        gathered = x.clone()
    return [y if i == at else rest[i] for i in range(len(w))], gathered


def _multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gather(x) @ w.T + bias, and gather(x) if ``keep``."""
    if chosen.config is None:
        log_fallback(OP, chosen)
        return reference.all_gather_matmul(x, w, bias, group_of(group_name))
    chosen = plan_now(chosen)
    rows, columns = chosen.world_size * x.shape[0], w.shape[0]
    gathered = x.new_empty(rows, x.shape[1]) if keep else None
    if columns == 0:
        w, bias = w.new_zeros(1, w.shape[1]), None
    y = x.new_empty(rows, w.shape[0])
    run_fused(x, w, bias, y, gathered, group_name, chosen)
    return (
        y if columns else y.new_empty(rows, 0),
        x.new_empty(0) if gathered is None else gathered,
    )


def _fake(
    x: torch.Tensor,
    w: Tensors,
    bias: Tensors,
    main_grad: Tensors,
    group_name: str,
    return_gathered: bool,
    cols: list[int],
) -> tuple[Tensors, torch.Tensor]:
    check_traced(lambda: check_inputs(x, w, bias, cols))
    check_traced(lambda: check_main_grad(w, main_grad))
    rows = dist.get_world_size(group_of(group_name)) * x.shape[0]
    gathered = x.new_empty(rows, x.shape[1]) if return_gathered else x.new_empty(0)
    return [x.new_empty(rows, each.shape[0]) for each in w], gathered


def _backward(
    grads: list[torch.Tensor | None],
    grad_gathered: torch.Tensor | None,
    x: torch.Tensor,
    w: Tensors,
    gathered: torch.Tensor | None,
    group_name: str,
    cols: list[int],
    need_x: bool,
    need_w: list[bool],
    need_bias: list[bool],
    main_grad: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """Gradients of x, and of each weight and bias; an empty tensor for one that is not needed."""
    used = [most for most, grad in zip(cols, grads, strict=False) if grad is not None]
    call = GatherBackward(grads, grad_gathered, x, w, gathered, group_name, sum(used), main_grad)
    gx, gw, contiguous = call.run(need_x, need_w)
    gb = [
        None if grad is None or not needs else grad.sum(0)
        for grad, needs in zip(contiguous, need_bias, strict=False)
    ]
    empty = x.new_empty(0)  # a list of torch has no None
    gw, gb = ([empty if g is None else g for g in found] for found in (gw, gb))
    return empty if gx is None else gx, gw, gb


def _backward_into(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_backward`, for weight gradients that are added to ``main_grad``, the last
    argument.

    Returns those of the biases concatenated: torch cannot compile operators that change one list
    and return another.
    """
    gx, _, gb = _backward(*args)
    return gx, torch.cat([args[2].new_empty(0), *gb])


def _fake_backward(
    grads: list[torch.Tensor | None],
    grad_gathered: torch.Tensor | None,
    x: torch.Tensor,
    w: Tensors,
    gathered: torch.Tensor | None,
    group_name: str,
    cols: list[int],
    need_x: bool,
    need_w: list[bool],
    need_bias: list[bool],
) -> tuple[torch.Tensor, Tensors, Tensors]:
    empty = x.new_empty
    gw = [
        empty(each.shape) if needs and grad is not None else empty(0)
        for each, needs, grad in zip(w, need_w, grads, strict=True)
    ]
    gb = [empty(size) for size in _bias_sizes(w, grads, need_bias)]
    return torch.empty_like(x) if need_x else empty(0), gw, gb


def _fake_backward_into(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gx, _, gb = _fake_backward(*args[:-1])
    return gx, args[2].new_empty(sum(each.shape[0] for each in gb))


def _bias_sizes(
    w: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], need_bias: Sequence[bool]
) -> list[int]:
    return [
        0 if grad is None or not needs else each.shape[0]
        for each, grad, needs in zip(w, grads, need_bias, strict=False)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensors, torch.Tensor]) -> None:
    # main_grad is not saved: later calls add to it before this backward runs
    x, w, _, ctx.main_grad, ctx.group_name, ctx.keep, ctx.cols = inputs
    # a result that the loss does not use must not cost a product
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *w, *((output[1],) if ctx.keep else ()))


def _gradients(
    ctx: Any, grads: list[torch.Tensor | None], grad_gathered: torch.Tensor | None
) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # create_graph=True
        refuse_second_derivative(OP)
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    grad_gathered = grad_gathered if ctx.keep else None
    none = [None] * len(ctx.main_grad), None, None, None if ctx.cols else []
    if grad_gathered is None and all(grad is None for grad in grads):
        return None, [None] * len(need_w), [None] * len(need_bias), *none
    x, *w = ctx.saved_tensors
    gathered = w.pop() if ctx.keep else None
    given = (grads, grad_gathered, x, w, gathered, ctx.group_name, ctx.cols)
    needed = (need_x, list(need_w), list(need_bias))
    if ctx.main_grad:
        gx, whole = _BACKWARD_INTO(*given, *needed, ctx.main_grad)
        gw, gb = [None] * len(w), whole.split(_bias_sizes(w, grads, need_bias))
    else:
        gx, gw, gb = _BACKWARD(*given, *needed)
    # a gradient of a result that is not used, or one that went to main_grad
    absent = [grad is None or bool(ctx.main_grad) for grad in grads]
    return (
        gx if need_x else None,
        [None if no or not need else g for g, need, no in zip(gw, need_w, absent, strict=True)],
        [
            None if grad is None or not need else g
            for g, need, grad in zip(gb, need_bias, grads, strict=False)
        ],
        *none,
    )


def define_operator() -> None:
    """Define the operator and its backward."""
    define(
        "all_gather_matmul_list(Tensor x, Tensor[] w, Tensor[] bias, Tensor[] main_grad,"
        " str group_name, bool return_gathered, int[] cols) -> (Tensor[], Tensor)",
        _forward,
        _fake,
        _gradients,
        _setup_context,
    )
    arguments = (
        "Tensor?[] grads, Tensor? grad_gathered, Tensor x, Tensor[] w, Tensor? gathered,"
        " str group_name, int[] cols, bool need_x, bool[] need_w, bool[] need_bias"
    )
    name = "all_gather_matmul_list_backward"
    define(f"{name}({arguments}) -> (Tensor, Tensor[], Tensor[])", _backward, _fake_backward)
    define(
        f"{name}.into({arguments}, Tensor(a!)[] main_grad) -> (Tensor, Tensor)",
        _backward_into,
        _fake_backward_into,
    )
