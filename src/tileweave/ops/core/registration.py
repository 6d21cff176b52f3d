"""Registration of operators with torch, and the answers of ``tileweave.explain`` and
``tileweave.warmup``.

Both are derived from the description of an operator (``spec.py``). What is derived here adds no
Python frame to a call: torch calls ``spec.forward`` itself, and a backward is called once, from the
closure that also refuses second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from tileweave.errors import InputError
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.operator import operator
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
    define(f"{spec.name}.out({spec.arguments}, *, {spec.out}) -> ()", spec.forward, spec.fake)
    if spec.define_more is not None:
        spec.define_more()
    SPECS[spec.name] = spec


def _define_backward(name: str, backward: BackwardOperator) -> None:
    flags = len(backward.of)

    def fake(
        grad: torch.Tensor, *args: Any, main_grad: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        likely = backward.like(grad, *args[:-flags])
        return tuple(
            like if needed and (main_grad is None or of != backward.into) else grad.new_empty(0)
            for of, like, needed in zip(backward.of, likely, args[-flags:], strict=True)
        )

    needs = ", ".join(f"bool need_{of}" for of in backward.of)
    results = ", ".join(["Tensor"] * flags)
    arguments = f"{backward.arguments}, {needs}"
    define(f"{name}_backward({arguments}) -> ({results})", backward.run, fake)
    if backward.into:
        define(
            f"{name}_backward.into({arguments}, *, Tensor(a!) main_grad) -> ({results})",
            backward.run,
            fake,
        )


def _gradients(
    spec: OperatorSpec, backward: Backward | BackwardOperator
) -> Callable[..., tuple[Any, ...]]:
    """What autograd calls: the backward operator, and None for arguments without a gradient."""
    if isinstance(backward, Backward):
        return first_derivative(spec.name, backward.gradients)
    _define_backward(spec.name, backward)
    parameters, passed, name = spec.parameters, backward.passed, spec.name
    places = [parameters.index(of) for of in backward.of]
    none = (None,) * len(parameters)
    run, run_into = operator(f"{name}_backward"), operator(f"{name}_backward.into")

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative(name)
        args = passed(ctx, *grads)
        if args is None:
            return none
        needs_grad = ctx.needs_input_grad  # False for an argument that is None
        needed = [needs_grad[place] for place in places]
        main_grad = ctx.main_grad if backward.into else None
        if main_grad is None:
            found = run(*args, *needed)
        else:
            found = run_into(*args, *needed, main_grad=main_grad)
        result: list[Any] = [*none]
        for of, place, needs, grad in zip(backward.of, places, needed, found, strict=True):
            if needs and (main_grad is None or of != backward.into):
                result[place] = grad
        return tuple(result)

    return gradients


# --- Answers about operators ---


def spec_of(op: str) -> OperatorSpec:
    """The description of the operator of this name; raises :class:`InputError` if there is none."""
    if op not in SPECS:
        raise InputError(
            f"asked: operator {op!r}; allowed: {', '.join(sorted(SPECS))}; "
            "remedy: pass one of these names"
        )
    return SPECS[op]


@checks_types
def explain(op: str, *args: object, **kwargs: object) -> Plan:
    """Return the plan of a call: which path it takes, and why. Sends nothing.

    ``tw.explain("all_gather_matmul", x, w, bias, group=group)`` is about ``tw.all_gather_matmul(x,
    w, bias, group=group)``. Print the result to read it.

    Parameters
    ----------
    op : str
        Name of an operator, one of ``tileweave.OPERATORS``.

    *args : Any
        Arguments as the operator takes them. ``topk_ids`` may be replaced by a number: how many
        experts each token has.

    **kwargs : Any
        The same, by name.

    Returns
    -------
    Plan
        Path (fused, unfused or local), reason and config.

    Raises
    ------
    InputError
        The call would refuse its arguments by shape, dtype or device (also those of ``bias``,
        ``out`` and the like, if given), or there is no such operator.
    """
    spec = spec_of(op)
    given = signature(spec.call).bind_partial(*args, **kwargs).arguments
    return checks_types(spec.explain)(
        **{name: given[name] for name in signature(spec.explain).parameters if name in given}
    )


# Set by the package: the tuner is in a higher layer.
TUNERS: list[Callable[..., None]] = []


@checks_types
def warmup(op: str, *args: object, tune: bool = False, **kwargs: object) -> Plan | dict[int, Plan]:
    """Reserve the memory of an operator and compile its kernels, so that a CUDA graph may capture
    calls. Collective.

    Makes a call on zeros of each size, and returns the plan of calls of that size. Another number
    of rows may take another path, with memory of its own: warm up each size that will be captured.
    ``tw.warmup("matmul_all_reduce", range(1, 513), cols, depth)`` compiles what calls of all these
    rows need in parallel, and then makes them.

    Parameters
    ----------
    op : str
        Name of an operator, one of ``tileweave.OPERATORS``.

    *args : int, range or tensor
        Sizes or tensors of this rank; they depend on the operator:

        all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce:
            ``rows, cols, depth`` of x [rows, depth] and w [cols, depth]; rows is a number, or
            several (a range, a list). For several weights of all_gather_matmul cols is a list.
            matmul_all_reduce also takes ``norm=True``, for calls with ``norm_weight``, which have
            another kernel.
        matmul_all_to_all, all_to_all_matmul:
            the same, with ``scatter_dim=`` and ``gather_dim=``.
        dispatch_grouped_matmul:
            ``tokens, experts, topk``: tokens is ``max_tokens`` of later calls, experts a tensor [E
            / R, N, K]; of FP8 with ``w_scale=``.
        grouped_matmul_combine:
            the arguments of a call: ``y, experts, plan, topk_weights``.
        embedding_bag_all_to_all:
            the arguments of a call, with the largest batch.

    tune : bool, optional
        For matmul operators: first measure which plan is fastest for each size that was not tuned
        before, and use it from now on. That takes about a second per size, and longer where kernels
        must be compiled. Results are kept in a cache of the user (see ``tileweave tune``). Needs
        the extra ``tileweave[cli]``. Default False.

    Other Parameters
    ----------------
    group : ProcessGroup, DeviceMesh or str, optional
        For all operators. None: the default group.

    backward : bool, optional
        For matmul operators: also run the backward of the call, for captures that contain it.
        Default False.

    dtype : torch.dtype, optional
        For matmul operators: dtype of x and w. Default bfloat16.

    scaling : str, optional
        For matmul operators with FP8 operands: the kind of the scales of x, ``"tensor"``,
        ``"row"`` or ``"block"``, with ``dtype=torch.float8_e4m3fn``. With another dtype w is FP8
        and x of that dtype, for calls with ``quantize=``. ``"rowwise"`` or
        ``"rowwise_with_gw_hp"``: both have that dtype, for FP8 training. ``"tensor+fast"`` and
        ``"row+fast"``: for calls with ``fast_accum``. Default: no FP8.

    device : torch.device, optional
        For matmul operators. Default: the current GPU, or the CPU if there is none.

    Returns
    -------
    Plan, or dict of int to Plan
        What :func:`explain` returns for the call; of several numbers of rows, for each.

    Raises
    ------
    InputError
        A size, dtype or device is invalid.
    PeerTimeout
        A rank does not call in time: every rank must call with the same arguments.
    """
    spec = spec_of(op)
    if tune:
        for tuner in TUNERS:
            tuner(op, *args, **kwargs)
    if spec.warmup is not None:
        return checks_types(spec.warmup)(*args, **kwargs)
    with torch.no_grad():
        spec.call(*args, **kwargs)
    return explain(op, *args, **kwargs)
