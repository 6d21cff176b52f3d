"""Local kernels on the rows of a routing plan (``ops/experts/routing_plan.py``); only the device knows how many: ``offsets[-1]``.

Programs take blocks of rows in turn until there are none, so a plan's bound costs nothing. Rows behind the last are not read
and not written.

Two of them read tokens out of the slot of the dispatch that has just ended, call n; ``load_epoch`` says n + 1 by then. Nobody
writes there meanwhile: they stand on the stream in front of this rank's call n + 1, no peer ends its call n + 1 before it has
a signal of ours, and only its call n + 2 writes the same slot.

=================  ===================================================================================================
``keep_tokens``    copy what the peers sent in the call that just ended, before a later call overwrites it
``gather_rows``    the token of each row, side by side, for the gradient of the experts, from kept tokens or from the slot
``zero_unused``    gradients of experts that have no rows, which a grouped product may leave undefined
``swiglu``         silu(gate) * up of rows [gate, up], and its gradient
``weigh_rows``     gradients of rows times the combine weights of their entries, and the gradients of those
=================  ===================================================================================================
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.signal import load_epoch
from tileweave.kernels.runtime.peers import Peers

PROGRAMS = 1056  # 8 for each multiprocessor of an H200; any number is right
INTERPRETED_PROGRAMS = 2
COPY_ROWS = 4


def _programs(tensor: torch.Tensor, most: int) -> int:
    return max(1, min(PROGRAMS if tensor.is_cuda else INTERPRETED_PROGRAMS, most))


@triton.jit
def keep_tokens_kernel(
    slots, kept, entry_row, control, slot_size, max_tokens, topk, rank, depth,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the tokens that have an expert here out of the slot of the call that has just ended, each to the same place."""
    slot = slots + ((load_epoch(control) - 1) & 1).to(tl.int64) * slot_size
    tokens = (WORLD_SIZE - 1) * max_tokens
    choice = tl.arange(0, TOPK)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        place = block * ROWS + tl.arange(0, ROWS)
        source = (rank + WORLD_SIZE - 1 - place // max_tokens) % WORLD_SIZE
        entry = (source * max_tokens + place % max_tokens)[:, None] * topk + choice[None, :]
        asked = (place < tokens)[:, None] & (choice < topk)[None, :]
        here = tl.max(tl.load(entry_row + entry, mask=asked, other=-1), axis=1) >= 0
        for column in range(0, depth, WIDTH):
            at = column + tl.arange(0, WIDTH)
            within = place.to(tl.int64)[:, None] * depth + at[None, :]
            mask = here[:, None] & (at < depth)[None, :]
            tl.store(kept + within, tl.load(slot + within, mask=mask), mask=mask)


def keep_tokens(
    peers: Peers, kept: torch.Tensor, entry_row: torch.Tensor, topk: int, rank: int
) -> None:
    """kept [R - 1, max_tokens, K] = the tokens that the last call of this instance received; others are not written."""
    places, max_tokens, depth = kept.shape
    keep_tokens_kernel[(_programs(kept, triton.cdiv(places * max_tokens, COPY_ROWS)),)](
        peers.slots, kept, entry_row, peers.control, peers.slot_size, max_tokens, topk, rank, depth,
        WORLD_SIZE=places + 1, TOPK=triton.next_power_of_2(topk), ROWS=COPY_ROWS,
        WIDTH=min(1024, triton.next_power_of_2(depth)),
    )  # fmt: skip


@triton.jit
def gather_rows_kernel(
    x, kept, row_entry, offsets, out, control, slot_size, experts, max_tokens, topk, rank, depth,
    FROM_SLOT: tl.constexpr, WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tokens of rows, own ones from x, those of rank-1-i from place i of ``kept``.

    ``FROM_SLOT``: ``kept`` is both slots, and the one of the call that has just ended is read.
    """
    if FROM_SLOT:
        kept += ((load_epoch(control) - 1) & 1).to(tl.int64) * slot_size
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
            value = tl.load(
                x + token[:, None] * depth + at[None, :], mask=own[:, None] & inside, other=0.0
            )
            value += tl.load(
                kept + remote[:, None] * depth + at[None, :],
                mask=there[:, None] & inside,
                other=0.0,
            )
            tl.store(
                out + row.to(tl.int64)[:, None] * depth + at[None, :],
                value,
                mask=(row < rows)[:, None] & inside,
            )


def gather_rows(
    x: torch.Tensor, kept: torch.Tensor | Peers, fields: tuple[torch.Tensor, ...], experts: int, max_tokens: int, topk: int,
    rank: int, world_size: int,
) -> torch.Tensor:  # fmt: skip
    """[bound, K]: the token of each row of the plan with ``fields``. x [T, K] own tokens; kept [R - 1, max_tokens, K], or the
    instance whose last call received them."""
    offsets, row_entry = fields[0], fields[1]
    in_slot = isinstance(kept, Peers)
    places, control, slot_size = (
        (kept.slots, kept.control, kept.slot_size) if in_slot else (kept, offsets, 0)
    )
    out = x.new_empty(row_entry.numel(), x.shape[1])
    gather_rows_kernel[(_programs(x, triton.cdiv(out.shape[0], COPY_ROWS)),)](
        x, places, row_entry, offsets, out, control, slot_size, experts, max_tokens, topk, rank, x.shape[1],
        FROM_SLOT=in_slot, WORLD_SIZE=world_size, ROWS=COPY_ROWS, WIDTH=min(1024, triton.next_power_of_2(x.shape[1])),
    )  # fmt: skip
    return out


@triton.jit
def zero_unused_kernel(gradient, offsets, size, BLOCK: tl.constexpr):
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
    """Zeros where expert e of gradient [E, ...], contiguous, has no rows."""
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


def swiglu_gradient(
    grad: torch.Tensor, y: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, experts: int
) -> None:
    """grad [bound, I], y [bound, 2 I] -> out [bound, 2 I]."""
    programs, block = _swiglu_grid(y)
    swiglu_gradient_kernel[(programs,)](
        grad, y, out, offsets, experts, y.shape[1] // 2, WIDTH=block
    )


@triton.jit
def weigh_rows_kernel(
    g, y, weights, weighted, row_entry, offsets, dots, experts, width,
    WEIGHTED: tl.constexpr, BOTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row at a time: dots[entry of row] = g . y in fp32; g *= weight, in place; ``BOTH``: weighted = y * weight."""
    for number in range(tl.program_id(0), tl.load(offsets + experts), tl.num_programs(0)):
        row = tl.cast(number, tl.int64) * width
        factor = 1.0
        entry = tl.load(row_entry + number)
        if WEIGHTED:
            factor = tl.load(weights + entry)
        total = tl.zeros((WIDTH,), tl.float32)
        for begin in range(0, width, WIDTH):
            at = begin + tl.arange(0, WIDTH)
            a = tl.load(g + row + at, mask=at < width, other=0.0).to(tl.float32)
            b = tl.load(y + row + at, mask=at < width, other=0.0).to(tl.float32)
            total += a * b
            if WEIGHTED:
                tl.store(g + row + at, (a * factor).to(g.dtype.element_ty), mask=at < width)
            if BOTH:
                tl.store(weighted + row + at, (b * factor).to(g.dtype.element_ty), mask=at < width)
        tl.store(dots + entry, tl.sum(total, axis=0))


def weigh_rows(
    g: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None, weighted: torch.Tensor | None,
    fields: tuple[torch.Tensor, ...], experts: int,
) -> torch.Tensor:  # fmt: skip
    """g, y [bound, I], contiguous; weights fp32 of all entries, None: 1. Gives dots of the rows of g and y, fp32, by entry, 0
    for those that are not here; g *= weights; ``weighted``, if there is one, is y * weights."""
    dots = torch.zeros(fields[2].numel(), dtype=torch.float32, device=g.device)
    weigh_rows_kernel[(_programs(g, g.shape[0]),)](
        g, y, dots if weights is None else weights, y if weighted is None else weighted, fields[1], fields[0], dots, experts,
        g.shape[1], WEIGHTED=weights is not None, BOTH=weighted is not None,
        WIDTH=min(2048, triton.next_power_of_2(g.shape[1])),
    )  # fmt: skip
    return dots
