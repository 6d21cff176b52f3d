"""Arguments of embedding_bag_all_to_all: their checks, the plan of a call, and what ranks must
agree on."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from tileweave.errors import require
from tileweave.ops.core import collectives
from tileweave.ops.core.debug_agreement import breaking_off, check_together
from tileweave.ops.core.nodes import machine_in
from tileweave.ops.core.registry import agree, group_of, interpreting, machine_of
from tileweave.ops.embedding.call import OP, Call
from tileweave.ops.embedding.table_gradient import KINDS
from tileweave.ops.matmul.inputs import refuse_alias
from tileweave.planning.problem import Plan
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout, plan_embedding, rows_of
from tileweave.planning.topology import Topology

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer step that the backward takes, in place of returning gradients.

    Each backward takes a step at once. What works on gradients between a backward and a step sees
    none: unscaling by a GradScaler, clipping by norm, accumulation. Leave the step to an optimizer
    of torch for those.

    Parameters
    ----------
    kind : str
        "sgd", or "adagrad" (row-wise).

    rate : [1], float32
        Learning rate on the device of the tables, so that a schedule can change it also under a
        CUDA graph.

    states : list of [rows], float32
        For "adagrad", the sums of mean squares of each local table; else empty.

    epsilon : float
        Added to the square root in "adagrad".
    """

    kind: str
    rate: torch.Tensor
    states: list[torch.Tensor] = field(default_factory=list)
    epsilon: float = 1e-8


def plan(
    tables: Sequence[torch.Tensor], indices: torch.Tensor, batch: int, ranks: Topology
) -> Plan[EmbeddingConfig]:
    """The plan of a call. The path is the same on every rank; the cut of lookups may differ."""
    row_bytes = max((t.shape[1] * t.element_size() for t in tables), default=16)
    pooling = indices.numel() / max(len(tables) * batch, 1)
    if not ranks.per_node:
        machine = machine_in(ranks, indices.device)
        return plan_embedding(ranks.size, row_bytes, pooling, machine, interpreting())
    machine = machine_of(indices.device)
    return plan_embedding(ranks.size, row_bytes, pooling, machine, interpreting(), ranks.nodes)


def dims_of(tables: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The columns of each table; raises :class:`InputError` if a table is not two-dimensional."""
    require(
        all(t.dim() == 2 for t in tables),
        lambda: _shapes(tables),
        "[rows, D] each",
        "reshape to two dimensions",
    )
    return tuple(int(t.shape[1]) for t in tables)


def _shapes(tables: Sequence[torch.Tensor]) -> str:
    return f"tables {[tuple(t.shape) for t in tables]}"


def exchanged_layout(
    tables: Sequence[torch.Tensor], device: torch.device, name: str
) -> EmbeddingLayout:
    """All ranks' tables in rank order. Collective, and the host waits.

    Exchanged in each call, since a rank cannot know whether tables of other ranks changed.
    """
    dims = dims_of(tables)
    if not name:
        return EmbeddingLayout.in_rank_order([dims])
    asked = f"{OP} inside a compiler or a CUDA-graph capture without a layout"
    hidden = torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )
    require(
        not hidden,
        asked,
        "with one",
        "pass layout=tw.EmbeddingLayout.in_rank_order(dims of every rank)",
    )
    with breaking_off(name, device):
        return EmbeddingLayout.in_rank_order(
            collectives.exchange_numbers(dims, device, group_of(name))
        )


def refuse_shared(stepped: Sequence[torch.Tensor]) -> None:
    """Refuse tables and states of a fused step that share memory, which would take two steps."""
    begins = sorted((t.data_ptr(), t.numel() * t.element_size()) for t in stepped if t.numel())
    shared = any(begin + nbytes > following for (begin, nbytes), (following, _) in pairwise(begins))
    remedy = (
        "look up all features of a table as one table, or leave the step to an optimizer of torch"
    )
    require(
        not shared,
        "a fused step of tables or states that share memory",
        "memory of its own for each",
        remedy,
    )


def versions_of(tables: Sequence[torch.Tensor]) -> list[int]:
    """How often each trained table was changed in place.

    A fused step increments the versions of frozen tables too, which it does not change.
    """
    return [t._version if t.requires_grad else 0 for t in tables]


def step_of(
    tables: Sequence[torch.Tensor], gradient: str, optimizer: FusedOptimizer | None
) -> tuple[str, list[torch.Tensor], torch.Tensor | None, float]:
    """(kind, states, rate, epsilon): how the operator is told what to do with gradients."""
    if optimizer is not None:
        _check_optimizer(tables, optimizer)
    # without tables there is nothing to step, also for compilers
    if optimizer is None or not tables:
        return gradient, [], None, 0.0
    return optimizer.kind, list(optimizer.states), optimizer.rate, optimizer.epsilon


def _check_optimizer(tables: Sequence[torch.Tensor], optimizer: FusedOptimizer) -> None:
    numbers = (optimizer.rate, *optimizer.states)

    def kinds() -> str:
        return (
            f"a rate that is a {type(optimizer.rate).__name__}, "
            f"states {[type(s).__name__ for s in optimizer.states]}"
        )

    fits = all(isinstance(t, torch.Tensor) for t in numbers)
    require(fits, kinds, "tensors", "pass rate=torch.full((1,), 0.01, device=...)")
    states = [(tuple(s.shape), s.dtype) for s in optimizer.states]
    wanted = [((t.shape[0],), torch.float32) for t in tables] if optimizer.kind == "adagrad" else []
    asked = f"optimizer {optimizer.kind!r} with states {states}"
    require(
        optimizer.kind in KINDS[2:] and states == wanted,
        asked,
        f'"sgd", or "adagrad" with states {wanted}',
        "fix them",
    )
    devices = {t.device for t in (*tables[:1], *numbers)}
    fits = len(devices) == 1 and all(t.is_contiguous() for t in numbers)
    fits = fits and optimizer.rate.dtype == torch.float32 and optimizer.rate.numel() == 1

    def numbers_asked() -> str:
        return (
            f"a rate {tuple(optimizer.rate.shape)} {optimizer.rate.dtype}; "
            f"it, states, tables on {sorted(map(str, devices))}"
        )

    require(
        fits,
        numbers_asked,
        "a rate of shape [1], float32; all contiguous and on the device of the tables",
        "move or convert them",
    )
    epsilon = optimizer.epsilon
    require(
        0 <= epsilon < math.inf,
        f"epsilon {epsilon}",
        "a finite number, at least 0",
        "pass a number such as 1e-8",
    )


@functools.lru_cache(64)
def _faults_of(layout: EmbeddingLayout) -> str:
    return layout.invalid_reason()


def check_inputs(call: Call, out: torch.Tensor | None, size: int, rank: int) -> None:
    """Raise :class:`InputError` for arguments that do not fit, before anything is sent."""
    tables, indices, offsets, weights, layout, batch, mean, out_dtype, _ = call

    def kinds() -> str:
        return (
            f"indices {indices.dtype} {tuple(indices.shape)}, "
            f"offsets {offsets.dtype} {tuple(offsets.shape)}"
        )

    def dtypes() -> str:
        return f"tables {[str(t.dtype) for t in tables]}, out_dtype {out_dtype}"

    def places() -> str:
        return f"devices {sorted({str(t.device) for t in (*tables, *lists)})}"

    def strides() -> str:
        return f"{kinds()}, with strides {[t.stride() for t in lists]}"

    lists = [indices, offsets, *([] if weights is None else [weights])]
    dims = dims_of(tables)
    used = {t.dtype for t in tables}
    fits = len(used) <= 1 and out_dtype in DTYPES and used.issubset(DTYPES)
    require(fits, dtypes, "one of float32, float16, bfloat16 for all tables", "convert the tables")
    contiguous = all(t.is_contiguous() for t in tables)
    require(
        contiguous,
        lambda: _shapes(tables),
        "contiguous tables",
        "call .contiguous() once, not each step",
    )
    require(
        all(t.device == indices.device for t in (*tables, *lists)),
        places,
        "one device",
        "move all to one device",
    )
    fits = (
        indices.dim() == offsets.dim() == 1
        and indices.dtype in INDEX_DTYPES
        and offsets.dtype in INDEX_DTYPES
    )
    require(fits, kinds, "one dimension, int32 or int64", "flatten or convert them")
    require(all(t.is_contiguous() for t in lists), strides, "contiguous", "call .contiguous()")
    _check_batch(batch)
    count = len(tables) * batch + 1
    allowed = f"{count} offsets: {len(tables)} tables x {batch} samples + 1"
    require(offsets.numel() == count, kinds, allowed, "append the end")
    check_rising(indices, offsets)
    if weights is not None:
        asked = f"per_sample_weights {tuple(weights.shape)} {weights.dtype}, mean {mean}"
        fits = weights.shape == indices.shape and weights.dtype in DTYPES and not mean
        require(
            fits,
            asked,
            'a float32, float16 or bfloat16 for each index, mode "sum"',
            "fold a mean into the weights",
        )
    require(
        len(layout.dims) == size,
        f"a layout of {len(layout.dims)} ranks",
        f"{size} ranks",
        "make a layout for this group",
    )
    mine = layout.dims[rank]
    require(
        mine == dims,
        lambda: f"tables of dims {dims} where the layout has {mine}",
        "the layout's",
        "fix either",
    )
    faults = _faults_of(layout)
    require(
        not faults,
        f"a layout whose {faults}",
        "each column once",
        "see tw.EmbeddingLayout.in_rank_order",
    )
    check_out(call, out, size, rank)


def _check_batch(batch: int) -> None:
    fits = isinstance(batch, int) and batch >= 0
    allowed = "a whole number, 0 or more"
    require(fits, f"batch {batch!r:.60}", allowed, "pass the number of samples of all ranks")


def check_out(call: Call, out: torch.Tensor | None, size: int, rank: int) -> None:
    """Raise :class:`InputError` for a result that does not fit the call."""
    if out is None:
        return
    begin, end = rows_of(call.batch, size, rank)
    shape = (end - begin, call.layout.width)
    fits = (
        tuple(out.shape) == shape
        and out.is_contiguous()
        and out.dtype == call.out_dtype
        and out.device == call.indices.device
    )
    require(
        fits,
        f"out {tuple(out.shape)} {out.dtype}",
        f"{shape} {call.out_dtype}, contiguous",
        "allocate out like that",
    )
    lists = [call.indices, call.offsets, *([] if call.weights is None else [call.weights])]
    refuse_alias((out,), (*call.tables, *lists))


def check_rising(indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise :class:`InputError` for offsets that fall or leave the indices. Only on the CPU:
    elsewhere the host would wait for the device."""
    if offsets.device.type != "cpu":
        return
    first, last = int(offsets[0]), int(offsets[-1])
    fall = (offsets[1:] < offsets[:-1]).nonzero()
    asked = f"offsets from {first} to {last} for {indices.numel()} indices"
    if fall.numel():
        asked = f"offsets that fall from {int(offsets[fall[0]])} to {int(offsets[fall[0] + 1])}"
    fits = not fall.numel() and first >= 0 and last <= indices.numel()
    require(
        fits,
        asked,
        "offsets that rise from 0 or later, to N at most",
        "pass cumulative lengths of bags, each at least 0",
    )


def count_bags(indices: torch.Tensor, offsets: torch.Tensor, tables: int) -> int:
    """B, from the offsets of ``tables`` tables.

    For one table, any number of offsets would be a valid B, so a missing end would lose a bag: the
    last offset must be N. For several tables, ``indices`` may be longer than all bags: a buffer of
    one size serves many batches in CUDA graphs.
    """
    at_hand = (
        not torch.compiler.is_compiling()
        and type(offsets) is torch.Tensor
        and offsets.device.type == "cpu"
    )
    # elsewhere the host would wait for the device
    if at_hand and tables == 1 and offsets.dim() == 1 and offsets.numel():
        asked = (
            f"offsets {tuple(offsets.shape)} to {int(offsets[-1])} for {indices.numel()} indices"
        )
        require(
            int(offsets[-1]) == indices.numel(),
            asked,
            "offsets that end with N",
            "append the end, or drop what is in no bag",
        )
    return (offsets.numel() - 1) // tables


def find_trouble(
    tables: Sequence[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, batch: int
) -> str:
    """For debugging, waits for the device: what is wrong with the bags; "" if nothing."""
    if indices.numel() != (int(offsets[-1]) if offsets.numel() else 0) or int(offsets[0]) != 0:
        return f"offsets from {int(offsets[0])} to {int(offsets[-1])} for {indices.numel()} indices"
    if bool((offsets[1:] < offsets[:-1]).any()):
        return "offsets that fall"
    ends = offsets[::batch].tolist() if batch else [0] * (len(tables) + 1)
    for number, table in enumerate(tables):
        mine = indices[ends[number] : ends[number + 1]]
        if mine.numel() and not (int(mine.min()) >= 0 and int(mine.max()) < table.shape[0]):
            return (
                f"indices from {int(mine.min())} to {int(mine.max())} in table {number}, "
                f"which has {table.shape[0]} rows"
            )
    return ""


def agree_on_call(call: Call, size: int) -> None:
    """For debugging: raise on all ranks if their arguments do not fit together or an index is out
    of range."""
    tables, indices, offsets, batch = call.tables, call.indices, call.offsets, call.batch

    def check() -> None:
        _check_batch(batch)
        fits = offsets.numel() == len(tables) * batch + 1
        trouble = find_trouble(tables, indices, offsets, batch) if fits else ""
        require(
            not trouble,
            trouble,
            "offsets that rise from 0, indices of rows that exist",
            "fix the bags",
        )

    if size == 1:
        check()
        return
    check_together(OP, call.group_name, {**_alike(call), "mean": call.mean}, check)


def agree_on_gradient(call: Call) -> None:
    """For debugging: raise on all ranks unless all differentiate the same lookup."""
    if len(call.layout.dims) > 1:
        agree(group_of(call.group_name), {"op": f"gradient of {OP}", **_alike(call)})


def _alike(call: Call) -> dict[str, object]:
    return {
        "layout": zlib.crc32(repr(call.layout.flat()).encode()),
        "batch": call.batch,
        "dtype": str(call.out_dtype),
    }
