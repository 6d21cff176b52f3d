"""``tileweave.warmup`` of the matmul operators: for one number of rows, or for many.

For many, calls are first made over a transport that sends nothing and by launchers that launch
nothing: what they would launch is compiled in parallel. Then each call is made, that with the most
rows first, so that memory is reserved once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.registry import Group, group_of, machine_of, name_of, rank_and_size
from tileweave.ops.matmul.scaled import FP8, RECIPES, blocks
from tileweave.planning.problem import FAST, Plan
from tileweave.transport.compile_only import compile_only

Rows = int | Iterable[int]
Warmed = Plan | dict[int, Plan]


def as_sizes(given: Rows, name: str = "rows") -> list[int]:
    """The sizes that argument ``name`` has, in the order given; raises :class:`InputError`."""
    sizes = [*given] if isinstance(given, Iterable) else [given]
    require(
        bool(sizes) and all(isinstance(n, int) and n >= 0 for n in sizes),
        f"warmup with {name}={given!r}",
        "a whole number, or several",
        "pass the sizes of later calls",
    )
    return sizes


def operands_for_warmup(
    rows: Rows, cols: int, depth: int, dtype: torch.dtype, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [most rows, depth] and w [cols, depth] of zeros, on ``device`` or the current GPU."""
    most = max(as_sizes(rows))
    whole = all(isinstance(size, int) and size >= 0 for size in (cols, depth))
    require(
        whole,
        f"warmup{(rows, cols, depth)!r}",
        "whole numbers",
        "pass sizes of this rank's x and w",
    )
    require(
        isinstance(dtype, torch.dtype),
        f"warmup with dtype={dtype!r}",
        "a torch.dtype",
        "pass the dtype of x and w",
    )
    if device is None:
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else "cpu"
        )
    where = torch.device(device)
    there = where.type != "cuda" or torch.cuda.is_available()
    require(
        there,
        f"warmup on {where}",
        "a device of this machine",
        "pass device='cpu', or look at tileweave doctor",
    )
    with torch.inference_mode(False):  # otherwise they could not require gradients
        return torch.zeros(most, depth, dtype=dtype, device=where), torch.zeros(
            cols, depth, dtype=dtype, device=where
        )


def scales_for_warmup(x: torch.Tensor, w: torch.Tensor, scaling: str | None) -> dict[str, Any]:
    """What a call of x [rows, depth] and FP8 w says about scales; nothing without ``scaling``."""
    if scaling is None:
        return {}
    if scaling in RECIPES:
        return {"quantize": scaling}
    fast, scaling = scaling.endswith(FAST), scaling.removesuffix(FAST)
    fits = isinstance(w, torch.Tensor) and w.dtype == FP8
    require(
        fits and scaling in ("tensor", "row", "block") and (x.dtype == FP8 or scaling != "tensor"),
        f"warmup with scaling={scaling!r} and x {x.dtype}",
        "'tensor', 'row' or 'block' with dtype=torch.float8_e4m3fn; 'row' or 'block' with others",
        "pass the kind of the scales of x",
    )
    (rows, depth), cols = x.shape, w.shape[0]
    of_w = {"tensor": (1,), "row": (1, cols), "block": (blocks(cols), blocks(depth))}[scaling]
    given: dict[str, Any] = {"w_scale": torch.ones(of_w, dtype=torch.float32, device=x.device)}
    if fast:
        given["fast_accum"] = True
    if x.dtype != FP8:
        return {**given, "quantize": scaling}
    of_x = {"tensor": (1,), "row": (rows, 1), "block": (rows, blocks(depth))}[scaling]
    return {**given, "x_scale": torch.ones(of_x, dtype=torch.float32, device=x.device)}


def as_fp8(w: Any, scaling: str | None) -> Any:
    """A weight of zeros for a warmup: FP8 with ``scaling``."""
    keeps = scaling is None or scaling in RECIPES or not isinstance(w, torch.Tensor)
    return w if keeps else w.to(FP8)


def warm_up(
    rows: Rows,
    x: torch.Tensor,
    call: Callable[[torch.Tensor, bool], None],
    plan: Callable[[torch.Tensor], Plan],
    backward: bool,
    group: Group | None,
) -> Warmed:
    """Make the calls of ``rows``, and return the plan of each.

    x : [most rows, depth].
    call : ``call(x, backward)`` makes a call of these rows, also its backward if asked.
    plan : ``plan(x)`` returns its plan.
    """
    if isinstance(rows, int):
        call(x, backward)
        planned = plan(x)
        for _ in range(1, _calls(planned)):
            call(x, backward)
        return planned
    sizes = as_sizes(rows)
    descending = sorted({*sizes}, reverse=True)
    topology_of(group_of(name_of(group)), x.device)  # plans depend on it
    with_kernel = [n for n in descending if has_kernel(plan(x[:n]).config)]
    if with_kernel:
        calls = (
            partial(call, x[:n], False) for n in with_kernel for _ in range(_calls(plan(x[:n])))
        )
        compile_calls(name_of(group), x.device, calls)
    for n in descending:
        for _ in range(_calls(plan(x[:n]))):
            call(x[:n], backward)
    return {n: plan(x[:n]) for n in sizes}


def _calls(plan: Plan) -> int:
    """How many calls make all that a plan needs: the first one runs the plan of CUDA graphs."""
    return 1 if plan.captured is None else 2


def has_kernel(config: object) -> bool:
    """Whether calls of this config can be compiled by this rank alone."""
    return config is not None and not getattr(config, "multiplies_chunks", False)


def compile_calls(
    group_name: str, device: torch.device, calls: Iterable[Callable[[], object]]
) -> list[list[Any]]:
    """Compile the kernels of ``calls`` in parallel. Collective before the first call of the group.

    Each is made once, over a transport that sends nothing, and its kernels are not launched. Their
    plans must be such that :func:`has_kernel`: others would run, and wait for peers. Returns the
    kernels of each call; none where kernels are interpreted.

    What is not yet compiled keeps the tensors of its call: at most a quarter of the GPU's memory,
    then it is compiled before further calls are made.
    """
    from tileweave.kernels.runtime.compile_all import compile_all
    from tileweave.kernels.runtime.launch import collect_launches

    rank, world_size = rank_and_size(group_name)
    machine, ranks = machine_of(device), topology_of(group_of(group_name), device)
    made, most = [], most_kept(device)
    waiting: list[int] = []  # how many launches each call has
    kept: dict[int, int] = {}
    with (
        torch.no_grad(),
        compile_only(group_name, device, rank, ranks, machine),
        collect_launches() as launches,
    ):

        def compile_waiting() -> None:
            kernels = iter(compile_all(launches, rank, world_size))
            made.extend(list(islice(kernels, count)) for count in waiting)
            for each in (launches, waiting, kept):
                each.clear()

        for call in calls:
            before = len(launches)
            call()
            waiting.append(len(launches) - before)
            for launch in launches[before:]:
                kept |= launch.memory()
            if sum(kept.values()) > most:
                compile_waiting()
        compile_waiting()
    return made


def most_kept(device: torch.device) -> float:
    """Bytes that calls may keep until their kernels are compiled."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory / 4


def call_for_warmup(
    call: Callable[..., Any],
    x: torch.Tensor,
    w: torch.Tensor | list[torch.Tensor],
    backward: bool,
    **options: object,
) -> None:
    """Make one call with these operands; with ``backward`` also the backward of them, which has its
    own kernels."""
    if not backward:
        call(x, w, **options)
        return
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().requires_grad_()
        if isinstance(w, list):
            w = [each.detach().requires_grad_() for each in w]
        else:
            w = w.detach().requires_grad_()
        y = call(x, w, **options)
        if isinstance(y, tuple):  # with a second result
            y = y[0]
        torch.stack([each.sum() for each in (y if isinstance(y, list) else [y])]).sum().backward()


def warmup_matmul(
    call: Callable[..., object], explain: Callable[..., Plan]
) -> Callable[..., Warmed]:
    """Make ``warmup`` of an operator over x, w and bias."""

    def warmup(
        rows: Rows,
        cols: Rows,
        depth: int,
        *,
        backward: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        scaling: str | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> Warmed:
        parts = as_sizes(cols, "cols")
        x, whole = operands_for_warmup(rows, sum(parts), depth, dtype, device)
        w = as_fp8(whole if isinstance(cols, int) else list(whole.split(parts)), scaling)

        def made(part: torch.Tensor, back: bool) -> None:
            scales = scales_for_warmup(part, w, scaling)
            call_for_warmup(call, part, w, back, group=group, **scales)

        def planned(part: torch.Tensor) -> Plan:
            return explain(part, w, group=group, **scales_for_warmup(part, w, scaling))

        return warm_up(rows, x, made, planned, backward, group)

    return warmup
