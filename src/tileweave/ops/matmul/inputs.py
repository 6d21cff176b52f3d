"""Checks and plans of the matmul operators.

Sizes have the names that operators use: x [rows, K] of this rank, w [cols, K] in
``torch.nn.Linear`` layout, bias [cols].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops.core import tuned_choices
from tileweave.ops.core.debug_agreement import check_together
from tileweave.ops.core.nodes import spans_nodes, topology_of
from tileweave.ops.core.registry import (
    checksum_of,
    contiguous,
    debugging,
    group_of,
    interpreting,
    log_fallback,
    machine_of,
    workspace_of,
)
from tileweave.planning import choices
from tileweave.planning.machine import Machine
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.topology import Topology
from tileweave.transport.workspace import REGISTRY, Instance, Workspace

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Planner = Callable[[Problem, Machine, bool], Plan[MatmulConfig]]
Tensors = tuple[torch.Tensor | None, ...]
T = TypeVar("T")
RESULTS = ("out", "residual_out")  # names of the results of an operator, in order


def as_rows(x: torch.Tensor, w: torch.Tensor, op: str) -> torch.Tensor:
    """x [..., K] as [rows, K], copied if it is not contiguous."""
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
        require(
            False,
            f"x of type {type(x).__name__}, w of type {type(w).__name__}",
            "tensors",
            "pass a torch.Tensor",
        )
    rows = x if x.is_contiguous() else contiguous(x, "x", op)
    if x.dim() == 2:
        return rows
    require(
        x.dim() > 2, lambda: f"x of shape {tuple(x.shape)}", "[m, ..., K]", "add a row dimension"
    )
    return rows.flatten(0, -2)


def sequence_first(
    x: torch.Tensor, out: torch.Tensor | None, name: str, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [B, S, ...] and ``out`` as views [S, B, ...], for option ``name`` = 1.

    The operators gather and scatter rows, hence dimension 0. Their results are views, too, so that
    no result is copied; x is, and its gradient, unless B is 1 or its memory has the order
    [S, B, ...] already.
    """
    require(dim in (0, 1), f"{name}={dim!r}", "0 or 1", f"transpose x, or pass {name}=1")
    fits = isinstance(x, torch.Tensor) and x.dim() >= 3
    require(
        fits,
        lambda: f"{name}=1 with x of {x.dim() if isinstance(x, torch.Tensor) else 'no'} dimensions",
        "x [B, S, ..., K]",
        f"pass {name}=0, or add a dimension for the batch",
    )
    if out is not None:
        fits = out.dim() == x.dim() and out.transpose(0, 1).is_contiguous()
        asked = f"out {tuple(out.shape)} with strides {out.stride()} and {name}=1"
        require(
            fits,
            asked,
            "out [B, S, ..., n] whose memory has the order [S, B, ..., n]",
            "pass torch.empty(S, B, ..., n).transpose(0, 1)",
        )
        out = out.transpose(0, 1)
    turned = x.transpose(0, 1)
    copied = x.is_contiguous() and not turned.is_contiguous()
    if copied and x.requires_grad and torch.is_grad_enabled():
        turned = _ContiguousGradient.apply(x).transpose(0, 1)
    return turned, out


class _ContiguousGradient(torch.autograd.Function):
    """x, whose gradient gets the memory order of x, not [S, B, ...].

    The attention of torch by cuDNN keeps its backward for the next call whose q, k and v have the
    same shapes and strides, and does not look at those of the gradient. A process that has trained
    a layer with and without ``scatter_dim=1`` would get a wrong gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0].contiguous()


def check_operands(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *others: torch.Tensor | None
) -> None:
    """Raise :class:`InputError` for operands that do not fit, before anything is sent.

    ``others`` must have the dtype and device of x; :func:`check_shape` checks their shapes.
    """

    def shapes() -> str:
        return f"x {tuple(x.shape)}, w {tuple(w.shape)}"

    require(
        x.dim() == 2 and w.dim() == 2, shapes, "x [m, K] and w [n, K]", "reshape to two dimensions"
    )
    require(
        x.shape[1] == w.shape[1],
        shapes,
        "equal K, the last dimension of both",
        "transpose w to Linear layout [n, K]",
    )
    check_tensors(x, w, bias, *others)


def check_tensors(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *others: torch.Tensor | None
) -> None:
    """As :func:`check_operands`, without the shapes of x and w."""
    tensors = [t for t in (x, w, bias, *others) if t is not None]

    def dtypes() -> str:
        return f"x {x.dtype}, w {w.dtype}" + "".join(f", {t.dtype}" for t in tensors[2:])

    def devices() -> str:
        return ", ".join(str(t.device) for t in tensors)

    remedy = "convert x and w"
    if x.dtype == torch.float8_e4m3fn:
        remedy += ", or pass x_scale= and w_scale= to an operator that takes them"
    require(x.dtype in DTYPES, dtypes, "float16, bfloat16, float32", remedy)
    require(
        all(t.dtype == x.dtype for t in tensors),
        dtypes,
        "one dtype for all tensors",
        "convert to x.dtype",
    )
    require(
        all(t.device == x.device for t in tensors),
        devices,
        "one device",
        "move all tensors to x.device",
    )
    require(
        x.is_contiguous(),
        lambda: f"x with strides {x.stride()}",
        "a contiguous x",
        "pass x.contiguous()",
    )
    either = w.stride(1) == 1 or w.shape[1] <= 1 or (w.stride(0) == 1 and w.stride(1) >= w.shape[0])
    require(
        either,
        lambda: f"w with strides {w.stride()}",
        "contiguous rows or columns",
        "pass w.contiguous()",
    )
    check_shape("bias", bias, (w.shape[0],), "one bias for each row of w")


def check_shape(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], remedy: str
) -> None:
    """Check that ``tensor``, if given, has this shape and is contiguous."""
    if tensor is not None:
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not fits:  # formatting sizes would specialize them while torch traces
            require(
                fits,
                f"{name} {tuple(tensor.shape)} with strides {tensor.stride()}",
                f"{shape}, contiguous",
                remedy,
            )


def check_main_grad(w: Sequence[torch.Tensor], main_grad: Sequence[torch.Tensor]) -> None:
    """Raise :class:`InputError` for ``main_grad`` that weight gradients cannot be added to."""
    for each, into in zip(w, main_grad, strict=False):
        fits = (
            into.shape == each.shape
            and into.is_contiguous()
            and into.dtype in (torch.float32, each.dtype)
            and into.device == each.device
            and not into.requires_grad
        )
        if not fits:
            require(
                fits,
                f"main_grad {tuple(into.shape)} {into.dtype} on {into.device} with strides "
                f"{into.stride()}, requires_grad={into.requires_grad}, for w {tuple(each.shape)}",
                "the shape and device of w, contiguous, float32 or the dtype of w, without "
                "requires_grad",
                "allocate torch.zeros(w.shape, dtype=torch.float32, device=w.device)",
            )


def check_like_x(name: str, tensor: torch.Tensor, x: torch.Tensor, allowed: str) -> None:
    """Check that ``tensor`` can be viewed as rows: its inner dimensions must be those of x."""
    dimensions = x.dim()
    fits = (
        tensor.dim() == dimensions
        and tensor.is_contiguous()
        and (dimensions == 2 or tensor.shape[1:-1] == x.shape[1:-1])
    )
    if not fits:  # formatting the message takes longer than the checks
        asked = (
            f"{name} {tuple(tensor.shape)} with strides {tensor.stride()} for x {tuple(x.shape)}"
        )
        require(fits, asked, f"{allowed}, contiguous", f"allocate {name} with that shape")


def out_as_rows(
    out: torch.Tensor | None,
    x: torch.Tensor,
    allowed: str,
    *inputs: torch.Tensor | None,
    name: str = "out",
) -> torch.Tensor | None:
    """``out=`` as rows, if given. :func:`check_shape` checks the rest of its shape."""
    if out is None:
        return None
    check_like_x(name, out, x, allowed)
    if torch.is_grad_enabled():
        for t in (x, out, *inputs):
            if t is not None and t.requires_grad:
                require(
                    False,
                    "out= with tensors that require gradients",
                    "one of them",
                    "drop out=, or call under torch.no_grad()",
                )
    return out if x.dim() == 2 else out.flatten(0, -2)


def refuse_alias(results: Tensors, inputs: Tensors) -> None:
    """Refuse results in the memory of inputs: a tile is stored while others are still read."""
    if results[0] is None:
        return
    first = -1
    for at, result in enumerate(results):
        if result is not None:
            place = result.untyped_storage().data_ptr()
            for t in inputs:
                if t is not None and t.untyped_storage().data_ptr() == place and result.numel():
                    require(
                        False,
                        f"{RESULTS[at]}= in the storage of an input",
                        "memory of its own",
                        f"allocate {RESULTS[at]}",
                    )
            if place == first and result.numel():
                require(
                    False,
                    "residual_out= in the storage of out=",
                    "memory of its own",
                    "allocate both",
                )
            first = place


def check_traced(check: Callable[[], None]) -> None:
    """Call ``check()`` for a fake; conditions on sizes that only data will tell are left to the
    call."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    with suppress(GuardOnDataDependentSymNode):
        check()


def plan_for(
    planner: Planner,
    x: torch.Tensor,
    rows: int,
    cols: int,
    ranks: Topology,
    depth: int | None = None,
    dtype: torch.dtype | None = None,
    scales: str = "",
) -> Plan[MatmulConfig]:
    """The plan of this call, the same on every rank.

    ``rows``: as :class:`Problem` counts them. ``depth``, ``dtype``: those of x, unless it is
    quantised first. ``scales``: of FP8 operands.
    """
    depth, dtype = x.shape[1] if depth is None else depth, dtype or x.dtype
    tuned_choices.read(x.device, ranks.size)
    machine = machine_of(x.device)
    return _plan(planner, ranks, rows, cols, depth, dtype, scales, machine, interpreting())


@lru_cache(maxsize=4096)
def _plan(
    planner: Planner,
    ranks: Topology,
    rows: int,
    cols: int,
    depth: int,
    dtype: torch.dtype,
    scales: str,
    machine: Machine,
    interpreted: bool,
) -> Plan:
    if not ranks.per_node:
        return Plan("unfused", spans_nodes(ranks))
    name = str(dtype).removeprefix("torch.")
    problem = Problem(ranks.size, rows, cols, depth, dtype.itemsize, name, ranks.nodes, scales)
    return planner(problem, machine, interpreted)


def _forget_plans() -> None:
    _plan.cache_clear()
    REGISTRY.forget_plans()


choices.on_change(_forget_plans)


@dataclass(frozen=True, slots=True)
class Accepted(Plan[MatmulConfig]):
    """The plan of the calls of one signature, whose arguments were checked.

    workspace : that of their group and device.
    ready : what :func:`ready` keeps.
    captured_plan : the plan of captured calls, if it is another one.
    """

    workspace: Workspace | None = field(default=None, compare=False, repr=False)
    ready: dict[object, tuple[int, Instance, list[Any]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    captured_plan: Accepted | None = field(default=None, compare=False, repr=False)


def plan_now(chosen: Plan[MatmulConfig]) -> Plan[MatmulConfig]:
    """The plan that a call has now: ``chosen``, or its plan of captured calls.

    That one runs in captures, and in the first eager call, which so makes its memory and compiles
    its kernels. A capture without an earlier call keeps to ``chosen``. Ranks must agree on which
    call is the first, so it is told by the checksum: signatures may differ between ranks.
    """
    if type(chosen) is not Accepted or chosen.captured_plan is None or chosen.workspace is None:
        return chosen
    called = chosen.workspace.ready_to_capture
    if chosen.workspace.transport.capturing():
        return chosen.captured_plan if chosen.checksum in called else chosen
    if chosen.checksum in called:
        return chosen
    called[chosen.checksum] = True
    return chosen.captured_plan


def ready(
    chosen: Plan[MatmulConfig],
    key: object,
    group_name: str,
    make: Callable[..., tuple[Instance, T]],
    x: torch.Tensor,
    *more: object,
) -> tuple[Instance, T]:
    """What calls of plan ``chosen`` need of the workspace: an instance, and what was made for it.
    Made once per signature, and again when memory of the instance has moved.

    key : of calls of one signature that need different things, such as other alignment.
    make : ``make(workspace, x, *more)`` makes both.
    """
    if type(chosen) is not Accepted:  # tests, the tuner and the tracer pass plans of their own
        return make(workspace_of(group_name, x.device), x, *more)
    found = chosen.ready.get(key)
    if found is not None and found[0] == found[1].version:
        return found[1], found[2][0]
    instance, made = make(chosen.workspace, x, *more)
    chosen.ready[key] = instance.version, instance, instance.until_memory_moves(made)
    return instance, made


def signature_of(
    op: str, group_name: str, x: torch.Tensor, w: torch.Tensor, more: Tensors, options: object
) -> tuple[dict[object, Accepted], tuple[object, ...]]:
    """Where plans of accepted calls like this one are, and the signature of this one there.
    ``more``: other operands, and results; the rest as for :func:`accept`."""
    device = x.device
    workspace = REGISTRY.find(group_name, device)  # so the device of x is no part of a signature
    if workspace is None:
        accepted = REGISTRY.accepted(group_name, device)
    else:
        accepted = workspace.accepted
    facts: tuple[object, ...] = more
    for t in more:
        if t is not None:  # most often all are None
            facts = tuple([t if t is None else _facts(t) for t in more])
            break
    return accepted, (
        op,
        options,
        x.shape,
        x.stride(),
        x.dtype,
        w.shape,
        w.stride(),
        w.dtype,
        w.get_device(),
        facts,
    )


def accept(
    op: str,
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    others: Tensors,
    results: Tensors,
    options: object,
    check: Callable[[int], None],
    plan: Callable[[Topology], Plan],
    agreed: list[list[int]] | None = None,
) -> Plan:
    """Check the arguments and plan the call, once per signature, to save host time.

    Parameters
    ----------
    op, group_name : str
        Names of the operator and the group.

    x, w, others : tensors
        What the call reads. Ranks must agree on their shapes and on ``options``.

    results : tensors or None
        Memory of the caller, checked too. Its address is no part of the signature, so aliases are
        refused at each call.

    check : callable
        ``check(world_size)`` raises :class:`InputError`.

    plan : callable
        ``plan(topology)`` plans the call.

    agreed : lists of int, optional
        The sizes that ranks must agree on, in place of all shapes of what the call reads.
    """
    accepted, signature = signature_of(op, group_name, x, w, (*others, *results), options)
    chosen = accepted.get(signature)
    debug = debugging()
    if chosen is not None and not debug:
        if results[0] is not None:
            refuse_alias(results, (x, w, *others))
        return chosen
    inputs = (x, w, *others)
    group = group_of(group_name)
    size = dist.get_world_size(group)

    def checked() -> None:
        check(size)
        refuse_alias(results, inputs)

    shapes = agreed or [None if t is None else list(t.shape) for t in inputs]
    # after the checks all dtypes are that of x
    common = {"op": op, "shapes": shapes, "dtype": str(x.dtype), "options": options}
    if debug:
        check_together(op, group_name, common, checked)
    else:
        checked()
    ranks = topology_of(group, x.device)
    unreachable = tuned_choices.agree(group, x.device)
    chosen = Plan("unfused", unreachable) if unreachable else plan(ranks)
    checksum, workspace = 0, None
    if chosen.config is None:
        log_fallback(op, chosen)
    else:
        common["plan"] = repr((chosen.config, chosen.captured))
        checksum = checksum_of(common)
        workspace = workspace_of(group_name, x.device)
        accepted = workspace.accepted
    make = partial(Accepted, chosen.path, chosen.reason, workspace=workspace)
    captured = None if chosen.captured is None else make(chosen.captured, checksum, size)
    made = accepted[signature] = make(chosen.config, checksum, size, captured_plan=captured)
    return made


def _facts(t: torch.Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.get_device()
