"""Local kernels on the rows of a routing plan (``ops/experts/routing_plan.py``). Only the device
knows how many rows there are: ``offsets[-1]``.

Programs take blocks of rows in turn until there are none, so that a plan's bound costs nothing.
Rows after the last one are not read and not written.

``keep_tokens`` and ``gather_rows`` read tokens from the slot of the dispatch that has just ended,
call n; ``load_epoch`` says n + 1 by then. No rank writes to it meanwhile: these kernels are on the
stream before this rank's call n + 1, no peer ends its call n + 1 before it has a signal of this
rank, and only its call n + 2 writes to the same slot.

=================  =================================================================================
``keep_tokens``    copy what the peers sent in the last call, before a later call overwrites it
``gather_rows``    the token of each row, in order of rows, for the gradient of the experts; from
                   kept tokens or from the slot
``zero_unused``    zero gradients of experts that have no rows, which a grouped product may leave
                   undefined
``swiglu``         silu(gate) * up of rows [gate, up], and its gradient; the same, quantised
``weigh_rows``     gradients of rows times the combine weights of their entries, and the gradients
                   of those weights
=================  =================================================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import load_epoch
from tileweave.device.triton.signal import load_epoch as load_epoch_at
from tileweave.kernels.quantize import GROUP, greatest_of, quantized
from tileweave.kernels.runtime.peers import Peers

PROGRAMS = 1056  # 8 for each multiprocessor of an H200; any number is correct
INTERPRETED_PROGRAMS = 2
COPY_ROWS = 4


class Sizes(NamedTuple):
    """``max_tokens``: the most that a rank has; ``topk``: choices of a token; ``depth``: columns
    of a token."""

    max_tokens: Any
    topk: Any
    rank: Any
    depth: Any


class KeepChoices(NamedTuple):
    """``TOPK``: a power of two, at least ``topk``; ``ROWS``, ``WIDTH``: tokens and columns that are
    copied at once."""

    WORLD_SIZE: int
    TOPK: int
    ROWS: int
    WIDTH: int


def _programs(tensor: torch.Tensor, most: int) -> int:
    return max(1, min(PROGRAMS if tensor.is_cuda else INTERPRETED_PROGRAMS, most))


@triton.jit
def keep_tokens_kernel(kept, entry_row, peers, sizes, C: tl.constexpr):
    """Copy the tokens that have an expert on this rank from the slot of the last call, each to the
    same index."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TOPK: tl.constexpr = C.TOPK
    ROWS: tl.constexpr = C.ROWS
    WIDTH: tl.constexpr = C.WIDTH
    max_tokens, topk, rank, depth = sizes
    slot = peers.slots + ((load_epoch(peers) - 1) & 1).to(tl.int64) * peers.slot_size
    tokens = (WORLD_SIZE - 1) * max_tokens
    choice = tl.arange(0, TOPK)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        index = block * ROWS + tl.arange(0, ROWS)
        source = (rank + WORLD_SIZE - 1 - index // max_tokens) % WORLD_SIZE
        entry = (source * max_tokens + index % max_tokens)[:, None] * topk + choice[None, :]
        exists = (index < tokens)[:, None] & (choice < topk)[None, :]
        here = tl.max(tl.load(entry_row + entry, mask=exists, other=-1), axis=1) >= 0
        for column in range(0, depth, WIDTH):
            at = column + tl.arange(0, WIDTH)
            within = index.to(tl.int64)[:, None] * depth + at[None, :]
            mask = here[:, None] & (at < depth)[None, :]
            tl.store(kept + within, tl.load(slot + within, mask=mask), mask=mask)


def keep_tokens(
    peers: Peers, kept: torch.Tensor, entry_row: torch.Tensor, topk: int, rank: int
) -> None:
    """kept [R - 1, max_tokens, K] = the tokens that the last call of this instance received and
    that have an expert on this rank; other elements are not written."""
    num_peers, max_tokens, depth = kept.shape
    keep_tokens_kernel[(_programs(kept, triton.cdiv(num_peers * max_tokens, COPY_ROWS)),)](
        kept,
        entry_row,
        peers,
        Sizes(max_tokens, topk, rank, depth),
        KeepChoices(
            num_peers + 1,
            triton.next_power_of_2(topk),
            COPY_ROWS,
            min(1024, triton.next_power_of_2(depth)),
        ),
    )


class GatherTensors(NamedTuple):
    """Pointers; ``kept``: tokens that peers sent, or both slots of an instance."""

    x: Any
    kept: Any
    row_entry: Any
    offsets: Any
    out: Any


class GatherChoices(NamedTuple):
    """``FROM_SLOT``: ``kept`` is both slots, and the one of the last call is read. ``ROWS``,
    ``WIDTH``: rows and columns that are copied at once."""

    FROM_SLOT: bool
    WORLD_SIZE: int
    ROWS: int
    WIDTH: int


@triton.jit
def gather_rows_kernel(tensors, control, slot_size, experts, sizes, C: tl.constexpr):
    """Tokens of rows: own ones from x, those of rank - 1 - i from entry i of ``kept``. ``control``
    and ``slot_size`` are those of the instance, of ``FROM_SLOT`` only."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    ROWS: tl.constexpr = C.ROWS
    WIDTH: tl.constexpr = C.WIDTH
    x, kept, row_entry, offsets, out = tensors
    max_tokens, topk, rank, depth = sizes
    if C.FROM_SLOT:
        kept += ((load_epoch_at(control) - 1) & 1).to(tl.int64) * slot_size
    rows = tl.load(offsets + experts)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        entry = tl.load(row_entry + row, mask=row < rows, other=0)
        token = entry // topk
        step = (rank + WORLD_SIZE - token // max_tokens) % WORLD_SIZE
        token = (token % max_tokens).to(tl.int64)
        own = (step == 0) & (row < rows)
        there = (step != 0) & (row < rows)
        remote = (step - 1).to(tl.int64) * max_tokens + token
        for column in range(0, depth, WIDTH):
            at = column + tl.arange(0, WIDTH)
            inside = (at < depth)[None, :]
            mask = own[:, None] & inside
            mine = tl.load(x + token[:, None] * depth + at[None, :], mask=mask, other=0.0)
            mask = there[:, None] & inside
            value = tl.load(kept + remote[:, None] * depth + at[None, :], mask=mask, other=0.0)
            value = tl.where(own[:, None], mine, value)  # a sum would lose the sign of zero
            mask = (row < rows)[:, None] & inside
            target = out + row.to(tl.int64)[:, None] * depth + at[None, :]
            tl.store(target, value, mask=mask)


def gather_rows(
    x: torch.Tensor,
    kept: torch.Tensor | Peers,
    fields: tuple[torch.Tensor, ...],
    experts: int,
    max_tokens: int,
    topk: int,
    rank: int,
    world_size: int,
) -> torch.Tensor:
    """[bound, K]: the token of each row of the plan with ``fields``. x [T, K]: own tokens; kept
    [R - 1, max_tokens, K], or the instance whose last call received them."""
    offsets, row_entry = fields[0], fields[1]
    in_slot = isinstance(kept, Peers)
    tokens, control, slot_size = kept, offsets, 0
    if isinstance(kept, Peers):
        tokens, control, slot_size = kept.slots, kept.control, kept.slot_size
    depth = x.shape[1]
    out = x.new_empty(row_entry.numel(), depth)
    width = min(1024, triton.next_power_of_2(depth))
    gather_rows_kernel[(_programs(x, triton.cdiv(out.shape[0], COPY_ROWS)),)](
        GatherTensors(x, tokens, row_entry, offsets, out),
        control,
        slot_size,
        experts,
        Sizes(max_tokens, topk, rank, depth),
        GatherChoices(in_slot, world_size, COPY_ROWS, width),
    )
    return out


@triton.jit
def zero_unused_kernel(gradient, offsets, size, BLOCK: tl.constexpr):
    """See :func:`zero_unused`; ``size``: elements of an expert."""
    expert = tl.program_id(0)
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        for begin in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(
                gradient + expert.to(tl.int64) * size + at,
                tl.zeros((BLOCK,), gradient.dtype.element_ty),
                mask=at < size,
            )


def zero_unused(gradient: torch.Tensor, offsets: torch.Tensor) -> None:
    """Zero gradient[e] of each expert e that has no rows; gradient [E, ...] is contiguous."""
    experts, size = gradient.shape[0], gradient[0].numel()
    zero_unused_kernel[(experts, max(1, min(32, triton.cdiv(size, 1024))))](
        gradient, offsets, size, BLOCK=1024
    )


@triton.jit
def swiglu_kernel(y, out, offsets, experts, width, WIDTH: tl.constexpr):
    """out = silu(gate) * up, in fp32, rounded once; a row of y is [gate, up]."""
    blocks = tl.cdiv(width, WIDTH)
    for unit in range(tl.program_id(0), tl.load(offsets + experts) * blocks, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        at = unit % blocks * WIDTH + tl.arange(0, WIDTH)
        gate = tl.load(y + row * 2 * width + at, mask=at < width).to(tl.float32)
        up = tl.load(y + (row * 2 + 1) * width + at, mask=at < width).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["bound"])
def swiglu_quantized_kernel(
    y, data, scale, offsets, experts, bound, width, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """As ``swiglu_kernel``, then rounded to FP8: ``data`` [bound, width], and ``scale`` [width /
    GROUP, bound] of GROUP elements each. What is quantised is the rounded result of that kernel."""
    blocks = tl.cdiv(width, WIDTH)
    count: tl.constexpr = WIDTH // GROUP
    for unit in range(tl.program_id(0), tl.load(offsets + experts) * blocks, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        begin = unit % blocks * WIDTH
        at = begin + tl.arange(0, WIDTH)
        gate = tl.load(y + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
        up = tl.load(y + (row * 2 + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty).to(tl.float32)
        value = tl.reshape(value, (count, GROUP))
        bits, each = quantized(value, greatest_of(value))
        tl.store(data + row * width + at, tl.reshape(bits, (WIDTH,)), mask=at < width)
        group = begin // GROUP + tl.arange(0, count)
        place = group.to(tl.int64) * bound + row
        tl.store(scale + place, each, mask=group * GROUP < width)


@triton.jit
def swiglu_gradient_kernel(grad, y, out, offsets, experts, width, WIDTH: tl.constexpr):
    """out = [d gate, d up] of rows [gate, up]."""
    blocks = tl.cdiv(width, WIDTH)
    for unit in range(tl.program_id(0), tl.load(offsets + experts) * blocks, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        at = unit % blocks * WIDTH + tl.arange(0, WIDTH)
        low, high = row * 2 * width + at, (row * 2 + 1) * width + at
        gate = tl.load(y + low, mask=at < width).to(tl.float32)
        up = tl.load(y + high, mask=at < width).to(tl.float32)
        g = tl.load(grad + row * width + at, mask=at < width).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        d_gate = g * up * share * (1.0 + gate * (1.0 - share))
        tl.store(out + low, d_gate.to(out.dtype.element_ty), mask=at < width)
        tl.store(out + high, (g * gate * share).to(out.dtype.element_ty), mask=at < width)


def _swiglu_grid(y: torch.Tensor) -> tuple[int, int]:
    width = y.shape[1] // 2
    block = min(1024, triton.next_power_of_2(width))
    return _programs(y, y.shape[0] * triton.cdiv(width, block)), block


def swiglu(y: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, experts: int) -> None:
    """y [bound, 2 I] -> out [bound, I]."""
    programs, block = _swiglu_grid(y)
    swiglu_kernel[(programs,)](y, out, offsets, experts, y.shape[1] // 2, WIDTH=block)


def swiglu_quantized(
    y: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor, experts: int
) -> None:
    """y [bound, 2 I] -> data [bound, I] as bytes of FP8, scale [ceil(I/128), bound]."""
    programs, block = _swiglu_grid(y)
    block, width = max(block, GROUP), y.shape[1] // 2
    swiglu_quantized_kernel[(programs,)](
        y, data, scale, offsets, experts, y.shape[0], width, WIDTH=block, GROUP=GROUP
    )


def swiglu_gradient(
    grad: torch.Tensor, y: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, experts: int
) -> None:
    """grad [bound, I], y [bound, 2 I] -> out [bound, 2 I]."""
    programs, block = _swiglu_grid(y)
    swiglu_gradient_kernel[(programs,)](
        grad, y, out, offsets, experts, y.shape[1] // 2, WIDTH=block
    )


class WeighTensors(NamedTuple):
    """Pointers; see :func:`weigh_rows`."""

    g: Any
    y: Any
    weights: Any
    weighted: Any
    row_entry: Any
    offsets: Any
    dots: Any


class WeighChoices(NamedTuple):
    """``WEIGHTED``: there are weights. ``BOTH``: ``weighted`` is written. ``WIDTH``: columns that
    are read at once."""

    WEIGHTED: bool
    BOTH: bool
    WIDTH: int


@triton.jit
def weigh_rows_kernel(tensors, experts, width, C: tl.constexpr):
    """Row by row: dots[entry of row] = g . y in fp32; g *= weight, in place; weighted = y *
    weight."""
    WIDTH: tl.constexpr = C.WIDTH
    g, y, weights, weighted, row_entry, offsets, dots = tensors
    for number in range(tl.program_id(0), tl.load(offsets + experts), tl.num_programs(0)):
        row = tl.cast(number, tl.int64) * width
        factor = 1.0
        entry = tl.load(row_entry + number)
        if C.WEIGHTED:
            factor = tl.load(weights + entry)
        total = tl.zeros((WIDTH,), tl.float32)
        for begin in range(0, width, WIDTH):
            at = begin + tl.arange(0, WIDTH)
            a = tl.load(g + row + at, mask=at < width, other=0.0).to(tl.float32)
            b = tl.load(y + row + at, mask=at < width, other=0.0).to(tl.float32)
            total += a * b
            if C.WEIGHTED:
                tl.store(g + row + at, (a * factor).to(g.dtype.element_ty), mask=at < width)
            if C.BOTH:
                tl.store(weighted + row + at, (b * factor).to(g.dtype.element_ty), mask=at < width)
        tl.store(dots + entry, tl.sum(total, axis=0))


def weigh_rows(
    g: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    weighted: torch.Tensor | None,
    fields: tuple[torch.Tensor, ...],
    experts: int,
) -> torch.Tensor:
    """Returns the dot products of the rows of g and y, fp32, by entry, 0 for entries that are not
    on this rank. Then g *= weights, and weighted = y * weights.

    g, y : [bound, I], contiguous.

    weights : fp32, of all entries. None: 1.

    weighted : like y. None: not wanted.
    """
    dots = torch.zeros(fields[2].numel(), dtype=torch.float32, device=g.device)
    factors = dots if weights is None else weights
    target = y if weighted is None else weighted
    width = g.shape[1]
    choices = WeighChoices(
        weights is not None, weighted is not None, min(2048, triton.next_power_of_2(width))
    )
    weigh_rows_kernel[(_programs(g, g.shape[0]),)](
        WeighTensors(g, y, factors, target, fields[1], fields[0], dots), experts, width, choices
    )
    return dots
