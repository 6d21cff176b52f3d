"""What the matmul operators share before their kernels run: checks of operands, and one plan for each signature.

Names of sizes are the operators' own: x [rows, K] of this rank, w [cols, K] in ``torch.nn.Linear`` layout, bias [cols].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist

from tileweave.config import Plan, Problem
from tileweave.errors import InputError, require
from tileweave.ops.registry import (
    agree,
    debugging,
    group_of,
    interpreting,
    machine_of,
    mark_of,
    workspace_of,
)
from tileweave.topology import Machine
from tileweave.transport.workspace import REGISTRY

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Planner = Callable[[Problem, Machine, bool], Plan]
Tensors = tuple[torch.Tensor | None, ...]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [rows, K], without a copy."""
    if x.dim() == 2:
        return x
    require(x.dim() > 2, lambda: f"x of shape {tuple(x.shape)}", "[m, ..., K]", "add a row dimension")
    require(x.is_contiguous(), lambda: f"x with strides {x.stride()}", "a contiguous x", "pass x.contiguous()")
    return x.flatten(0, -2)


def check_operands(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *others: torch.Tensor | None) -> None:
    """Raise :class:`InputError` on the rank that made the mistake, before anything is sent.

    ``others`` share dtype and device with x; :func:`check_shape` is for their shapes.
    """
    shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}"
    require(x.dim() == 2 and w.dim() == 2, shapes, "x [m, K] and w [n, K]", "reshape to two dimensions")
    require(x.shape[1] == w.shape[1], shapes, "equal K, the last dimension of both", "transpose w to Linear layout [n, K]")
    check_tensors(x, w, bias, *others)


def check_tensors(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *others: torch.Tensor | None) -> None:
    """:func:`check_operands` but for the shapes of x and w."""
    tensors = [t for t in (x, w, bias, *others) if t is not None]
    dtypes = f"x {x.dtype}, w {w.dtype}" + "".join(f", {t.dtype}" for t in tensors[2:])
    require(x.dtype in DTYPES, dtypes, "float16, bfloat16, float32", "convert x and w")
    require(all(t.dtype == x.dtype for t in tensors), dtypes, "one dtype for all tensors", "convert to x.dtype")
    devices = ", ".join(str(t.device) for t in tensors)
    require(all(t.device == x.device for t in tensors), devices, "one device", "move all tensors to x.device")
    require(x.is_contiguous(), f"x with strides {x.stride()}", "a contiguous x", "pass x.contiguous()")
    either = w.stride(1) == 1 or w.shape[1] <= 1 or (w.stride(0) == 1 and w.stride(1) >= w.shape[0])
    require(either, f"w with strides {w.stride()}", "contiguous rows or columns", "pass w.contiguous()")
    check_shape("bias", bias, (w.shape[0],), "one bias for each row of w")


def check_shape(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], remedy: str) -> None:
    """``tensor``, if there is one, has this shape and is contiguous."""
    if tensor is not None:
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
        require(fits, f"{name} {tuple(tensor.shape)} with strides {tensor.stride()}", f"{shape}, contiguous", remedy)


def check_like_x(name: str, tensor: torch.Tensor, x: torch.Tensor, allowed: str) -> None:
    """``tensor`` can be seen as rows, as x is: its dimensions between the first and the last are those of x."""
    dimensions = x.dim()
    fits = tensor.dim() == dimensions and tensor.is_contiguous() and (dimensions == 2 or tensor.shape[1:-1] == x.shape[1:-1])
    if not fits:  # the text of it takes longer than the checks
        asked = f"{name} {tuple(tensor.shape)} with strides {tensor.stride()} for x {tuple(x.shape)}"
        require(fits, asked, f"{allowed}, contiguous", f"allocate {name} with that shape")


def check_out(out: torch.Tensor, x: torch.Tensor, allowed: str, *inputs: torch.Tensor | None) -> None:
    """What ``out=`` must be before it can be seen as rows; :func:`check_shape` does the rest."""
    check_like_x("out", out, x, allowed)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, out, *inputs)):
        require(False, "out= with tensors that require gradients", "one of them", "drop out=, or call under torch.no_grad()")


def refuse_alias(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """A tile is stored while others are still read: the result needs memory of its own."""
    place = out.untyped_storage().data_ptr()
    for t in inputs:
        if t is not None and t.untyped_storage().data_ptr() == place and out.numel():
            require(False, "out= in the storage of an input", "memory of its own", "allocate out")


def plan_for(planner: Planner, x: torch.Tensor, rows: int, cols: int, size: int, depth: int | None = None) -> Plan:
    """What ``planner`` says of this call, the same on every rank. ``rows``: as :class:`Problem` counts them; ``depth``: x's."""
    depth = x.shape[1] if depth is None else depth
    return _plan(planner, size, rows, cols, depth, x.dtype, machine_of(x.device), interpreting())


@lru_cache(maxsize=4096)
def _plan(
    planner: Planner, size: int, rows: int, cols: int, depth: int, dtype: torch.dtype, machine: Machine, interpreted: bool
) -> Plan:
    problem = Problem(size, rows, cols, depth, dtype.itemsize, str(dtype).removeprefix("torch."))
    return planner(problem, machine, interpreted)


def accept(
    op: str,
    group_name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    others: Tensors,
    results: Tensors,
    options: object,
    check: Callable[[int], None],
    plan: Callable[[int], Plan],
) -> Plan:
    """Check the arguments and plan the call: once for each signature of a fused call, since host time counts.

    ``others``: what else is read; with x, w and ``options`` ranks must agree on it. ``results``: the caller's memory,
    checked too. ``check(world_size)`` raises, ``plan(world_size)`` decides.
    """
    workspace = REGISTRY.find(group_name, x.device)
    signature = (
        op, options, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in others],
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in results],
    )  # fmt: skip
    chosen = None if workspace is None else workspace.accepted.get(signature)
    if chosen is not None and not debugging():
        return chosen
    group = group_of(group_name)
    shapes = [None if t is None else list(t.shape) for t in (x, w, *others)]
    common = {"op": op, "shapes": shapes, "dtype": str(x.dtype), "options": options}
    if debugging():  # before the checks: a rank whose input is refused must not leave the others waiting
        agree(group, common)
    size = dist.get_world_size(group)
    check(size)
    chosen = plan(size)
    if chosen.config is not None:
        workspace = workspace_of(group_name, x.device)
        chosen = workspace.accepted[signature] = replace(chosen, mark=mark_of(common), world_size=size)
    return chosen


def operands_for_warmup(
    rows: int, cols: int, depth: int, dtype: torch.dtype, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, depth] and w [cols, depth] of zeros, on the current GPU unless ``device`` says otherwise."""
    if not all(isinstance(size, int) and size >= 0 for size in (rows, cols, depth)):
        raise InputError(
            f"asked: warmup({rows!r}, {cols!r}, {depth!r}); allowed: whole numbers; remedy: pass sizes of this rank's x and w"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    return torch.zeros(rows, depth, dtype=dtype, device=where), torch.zeros(cols, depth, dtype=dtype, device=where)
