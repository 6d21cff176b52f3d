"""From the description of an operator (``spec.py``) to its registration with torch, and to the
answers that ``tileweave.explain`` and ``tileweave.warmup`` give about it.

What is derived here costs a call no Python frame: torch calls ``spec.forward`` as it called a
function that was registered by hand, and a backward is called once, from the same closure that
refuses second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from tileweave.errors import InputError
from tileweave.ops.core.registry import define, first_derivative, refuse_second_derivative
from tileweave.ops.core.spec import Backward, BackwardOperator, OperatorSpec
from tileweave.planning.problem import Plan

# All registered operators by name, in the order of registration.
SPECS: dict[str, OperatorSpec] = {}


def register(spec: OperatorSpec) -> None:
    """Register ``spec`` with torch and with everything that lists operators.

    Raises
    ------
    ValueError if an operator has that name already.
    """
    if spec.name in SPECS:
        raise ValueError(f"an operator {spec.name} is registered already")
    options = f", {spec.options}" if spec.options else ""
    schema = f"{spec.name}({spec.arguments}{options}) -> {spec.results}"
    backward = spec.backward
    if backward is None:
        define(schema, spec.forward, spec.fake)
    else:
        gradients = _gradients(spec, backward)
        define(schema, spec.forward, spec.fake, gradients, backward.setup_context)
    define(
        f"{spec.name}.out({spec.arguments}, *, {spec.out}) -> ()",
        spec.forward,
        _without_result(spec.fake),
    )
    SPECS[spec.name] = spec


def _define_backward(name: str, backward: BackwardOperator) -> None:
    flags = len(backward.of)

    def fake(grad: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        likely = backward.like(grad, *args[:-flags])
        return tuple(
            like if needed else grad.new_empty(0)
            for like, needed in zip(likely, args[-flags:], strict=True)
        )

    needs = ", ".join(f"bool need_{of}" for of in backward.of)
    results = ", ".join(["Tensor"] * flags)
    define(f"{name}_backward({backward.arguments}, {needs}) -> ({results})", backward.run, fake)


def _gradients(
    spec: OperatorSpec, backward: Backward | BackwardOperator
) -> Callable[..., tuple[Any, ...]]:
    """What autograd calls: the backward operator, and None for what has no gradient."""
    if isinstance(backward, Backward):
        return first_derivative(spec.name, backward.gradients)
    _define_backward(spec.name, backward)
    parameters, passed, name = spec.parameters, backward.passed, spec.name
    places = [parameters.index(of) for of in backward.of]
    none = (None,) * len(parameters)
    run = getattr(torch.ops.tileweave, f"{name}_backward").default

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative(name)
        args = passed(ctx, *grads)
        if args is None:
            return none
        # of an argument that is None: False
        needed = [ctx.needs_input_grad[place] for place in places]
        found = run(*args, *needed)
        result: list[Any] = [*none]
        for place, needs, grad in zip(places, needed, found, strict=True):
            if needs:
                result[place] = grad
        return tuple(result)

    return gradients


def _without_result(fake: Callable[..., Any]) -> Callable[..., None]:
    def checked(*args: Any, **kwargs: Any) -> None:
        fake(*args, **kwargs)

    return checked


# --- Answers about operators ---


def spec_of(op: str) -> OperatorSpec:
    """The description of the operator of this name; raises :class:`InputError` if there is none."""
    if op not in SPECS:
        raise InputError(
            f"asked: operator {op!r}; allowed: {', '.join(sorted(SPECS))}; "
            "remedy: pass one of these names"
        )
    return SPECS[op]


def explain(op: str, *args: object, **kwargs: object) -> Plan:
    """Which path a call of ``op`` with these arguments takes, and why; ``print`` it. Sends nothing.

    ``tw.explain("all_gather_matmul", x, w, bias, group=group)`` is about ``tw.all_gather_matmul(x,
    w, bias, group=group)``. In place of topk_ids a number will do: how many experts a token has.

    Raises
    ------
    InputError for what the call would refuse by shape, dtype or device (of ``bias``, ``out`` and
    the like, too, if given), and for operators that do not exist.
    """
    spec = spec_of(op)
    given = signature(spec.call).bind_partial(*args, **kwargs).arguments
    return spec.explain(
        **{name: given[name] for name in signature(spec.explain).parameters if name in given}
    )


def warmup(op: str, *args: object, **kwargs: object) -> Plan:
    """Collective: reserve what ``op`` needs and compile its kernels, so that a CUDA graph may
    capture calls afterwards.

    One call on zeros, of one size; returns the plan of calls of that size. Another row count may go
    another way, with memory of its own: warm up each size to come. A capture that also holds the
    backward of a matmul operator needs ``backward=True``: operands then require gradients, and
    their backward follows. Arguments by operator:

    ==========================================  ===========================================================================
    all_gather_matmul, matmul_reduce_scatter,   rows, cols, depth: of this rank's x [rows, depth] and w [cols, depth]
    matmul_all_reduce                           (``norm=True``: with norm_weight, which is another kernel)
    matmul_all_to_all, all_to_all_matmul        the same, and ``scatter_dim=``, ``gather_dim=``
    dispatch_grouped_matmul                     tokens, experts [E/R, N, K] (a tensor), topk; tokens: max_tokens of calls
    grouped_matmul_combine                      the call's: y, experts, plan, topk_weights
    embedding_bag_all_to_all                    the call's, with the largest batch
    ==========================================  ===========================================================================

    The matmul operators also take ``backward=`` (False), ``dtype=`` (bfloat16) and ``device=`` (the
    current GPU, or the CPU); all take ``group=``.

    Raises
    ------
    InputError for sizes, dtypes and devices that are none; PeerTimeout if a rank does not come:
    every rank calls it alike.
    """
    spec = spec_of(op)
    if spec.warmup is not None:
        return spec.warmup(*args, **kwargs)
    with torch.no_grad():
        spec.call(*args, **kwargs)
    return explain(op, *args, **kwargs)
