"""Stable counting sorts of ids, for routing plans of many tokens, and the push of ids before them.

What is sorted are *items* by *key*: the choices of all ranks by local expert, for rows; own tokens,
once for each rank, by the lowest expert that they have there, for what is sent there. A choice is a
token with one id, so the same code sorts both. Items are cut into *units* of ``span`` blocks of
BLOCK; a row of ``histogram`` (``peers.counters``) is how many items of a unit have each key.

    count_kernel   first programs  | push own ids to all, signal |
                   others          | count own tokens | wait for a source, count its ids |
    place_kernel   all             | sum the histogram up to a unit | place its items | leave

Which rank writes, and which reads: as in ``routing.py``. The first ``SLICES`` programs push; a unit
that counts the ids of a source waits for all slices of that source; every source has a unit, so a
call ends only after it has seen a signal of every peer.

==================  =====  ===========================  ==============================
signal (int32)      value  notifier                     waiter
==================  =====  ===========================  ==============================
[source, slice]     epoch  program ``slice`` of source  programs that count its ids
==================  =====  ===========================  ==============================

Why no slot is overwritten: the last reader of the slot of call n-1 is its ``place_kernel``, which
alone advances the epoch. My call n+1 writes that slot, and my call n has ended: each peer has
signaled n, so it has begun n, after its ``place_kernel`` of n-1.

``histogram`` is local: ``count_kernel`` writes every row before ``place_kernel``, the next launch
on the stream, reads it, so it is never cleared.

Why no rank waits for ever: pushing does not wait, the lowest programs push, and ``place_kernel``
does not wait.

Source of the idea: the counting sort of radix sorts on GPUs (histogram, scan, scatter), for one
digit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileweave.device.triton.peers import leave, load_epoch, notify_all, slots_at, wait
from tileweave.device.triton.signal import MAX_SLICES

PUSH_BLOCK = tl.constexpr(1024)  # ids
HISTOGRAM_BLOCK = tl.constexpr(4096)  # counts that a program adds up at once


class Tensors(NamedTuple):
    """What a call is about.

    topk_ids : ``[T, k]``, own choices, int32 or int64.

    offsets, row_entry, entry_row, own_ids, send_order, send_offsets : int32, the fields of the plan
        (``ops/experts/routing_plan.py``); ``own_ids`` takes the own choices.
    """

    topk_ids: Any
    offsets: Any
    row_entry: Any
    entry_row: Any
    own_ids: Any
    send_order: Any
    send_offsets: Any


class Sizes(NamedTuple):
    """Tokens of a rank at most, choices of a token, experts of a rank, and rows at most."""

    max_tokens: Any
    topk: Any
    experts: Any
    bound: Any


class Items(NamedTuple):
    """``count`` items of ``topk`` ids each, which are sorted by the experts of rank ``owner``."""

    ids: Any
    count: Any
    topk: Any
    owner: Any
    experts: Any


class Order(NamedTuple):
    """Where a sort puts its results; see :func:`_place_unit`."""

    offsets: Any
    ordered: Any
    placed: Any
    first_item: Any
    limit: Any


class Choices(NamedTuple):
    """Decided when the kernels are compiled.

    SLICES : programs that push.

    EXPERTS, TOPK : powers of two, at least the experts of a rank, and the choices of a token.

    BLOCK : items that a program looks at at once.
    """

    WORLD_SIZE: int
    SLICES: int
    EXPERTS: int
    TOPK: int
    BLOCK: int


@triton.jit
def as_expert(ids):
    """Ids as int32; an id that int32 cannot hold is no expert's."""
    if ids.dtype.primitive_bitwidth == 64:
        ids = tl.where((ids >= 0) & (ids < 1 << 31), ids, -1)
    return ids.to(tl.int32)


@triton.jit
def push_ids(tensors, peers, slot_offset, rank, size, valid, piece, epoch, C: tl.constexpr):
    """Put slice ``piece`` of the own ids into every rank's slot, -1 from ``valid`` on, and signal
    each."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    for block in range(piece, tl.cdiv(size, PUSH_BLOCK), C.SLICES):
        at = block * PUSH_BLOCK + tl.arange(0, PUSH_BLOCK)
        value = as_expert(tl.load(tensors.topk_ids + at, mask=at < valid, other=-1))
        tl.store(tensors.own_ids + at, value, mask=at < size)
        for step in tl.static_range(WORLD_SIZE):
            slot = slots_at(peers, (rank + step) % WORLD_SIZE, tl.int32) + slot_offset
            tl.store(slot + rank * size + at, value, mask=at < size)
    notify_all(peers, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, True)


@triton.jit
def lowest_expert(items, begin, NONE: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest of the owner's experts that each item of a block has chosen, counted from 0;
    ``NONE``, at least ``items.experts``, if it has none.

    ``TOPK``: a power of two, at least ``items.topk``.
    """
    item, choice = begin + tl.arange(0, BLOCK), tl.arange(0, TOPK)
    mask = (item < items.count)[:, None] & (choice < items.topk)[None, :]
    chosen = tl.load(items.ids + item[:, None] * items.topk + choice[None, :], mask=mask, other=-1)
    local = as_expert(chosen) - items.owner * items.experts
    return tl.min(tl.where((local >= 0) & (local < items.experts), local, NONE), axis=1)


@triton.jit
def _count_unit(
    items,
    counts,
    part,
    span,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many items of a unit, the ``part``-th of ``items``, have each key; ``counts``: the unit's
    row of the histogram."""
    expert = tl.arange(0, EXPERTS)
    found = tl.zeros((EXPERTS,), tl.int32)
    for block in range(part * span, (part + 1) * span):
        keys = lowest_expert(items, block * BLOCK, EXPERTS, TOPK, BLOCK)
        found += tl.sum((keys[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts + expert, found)


@triton.jit
def _place_unit(
    items,
    counts,
    order,
    unit,
    units,
    part,
    span,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Place the items of unit ``unit`` of ``units`` that are sorted together; ``counts``: their
    rows of the histogram.

    It is the ``part``-th unit of ``items``: choices are sorted over all sources, and ``items`` are
    those of one. ``order.ordered[place]`` = ``order.first_item`` + item, for places below
    ``order.limit``; with ``INVERSE`` also ``order.placed[item]`` = place, -1 where it has none. The
    first unit stores ``order.offsets`` [experts + 1].
    """
    expert = tl.arange(0, EXPERTS)
    ROWS: tl.constexpr = HISTOGRAM_BLOCK // EXPERTS
    total, start = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, units, ROWS):
        row = begin + tl.arange(0, ROWS)
        found = tl.load(
            counts + row[:, None] * EXPERTS + expert[None, :], mask=(row < units)[:, None], other=0
        )
        total += tl.sum(found, axis=0)
        start += tl.sum(tl.where((row < unit)[:, None], found, 0), axis=0)
    below = tl.cumsum(total, axis=0) - total
    start += below
    if unit == 0:
        tl.store(
            order.offsets + expert, tl.minimum(below, order.limit), mask=expert < items.experts
        )
        tl.store(order.offsets + items.experts, tl.minimum(tl.sum(total, axis=0), order.limit))
    for block in range(part * span, (part + 1) * span):
        keys = lowest_expert(items, block * BLOCK, EXPERTS, TOPK, BLOCK)
        item = block * BLOCK + tl.arange(0, BLOCK)
        chosen = keys[:, None] == expert[None, :]
        at = tl.arange(0, BLOCK)
        # Each pair is compared: a scan over [BLOCK, EXPERTS] took 214 registers at 64 experts where
        # this takes 175 (decision 0026).
        before = tl.sum(
            ((keys[:, None] == keys[None, :]) & (at[:, None] > at[None, :])).to(tl.int32), axis=1
        )
        place = tl.where(
            keys < items.experts, before + tl.sum(tl.where(chosen, start[None, :], 0), axis=1), -1
        )
        tl.store(
            order.ordered + place,
            order.first_item + item,
            mask=(place >= 0) & (place < order.limit),
        )
        if INVERSE:
            tl.store(
                order.placed + item,
                tl.where(place < order.limit, place, -1),
                mask=item < items.count,
            )
        start += tl.sum(chosen.to(tl.int32), axis=0)


_SAME = ["rank", "tokens", "max_tokens", "topk", "experts", "bound", "span"]


@triton.jit(do_not_specialize=_SAME)
def count_kernel(
    tensors, tokens, peers, rank, max_tokens, topk, experts, bound, span, C: tl.constexpr
):
    """Push and count; see the module's docstring. Both kernels take the same arguments."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    SLICES: tl.constexpr = C.SLICES
    program = tl.program_id(0)
    epoch = load_epoch(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    size = max_tokens * topk
    row_units = tl.cdiv(size, span * C.BLOCK)
    send_units = tl.cdiv(max_tokens, span * C.BLOCK)
    if program < SLICES:
        push_ids(tensors, peers, slot_offset, rank, size, tokens * topk, program, epoch, C)
    else:
        rows = WORLD_SIZE * row_units
        # own tokens first: that needs no peer
        for at in range(
            program - SLICES, rows + WORLD_SIZE * send_units, tl.num_programs(0) - SLICES
        ):
            unit = (at + rows) % (rows + WORLD_SIZE * send_units)
            counts = peers.counters + unit * C.EXPERTS
            if unit >= rows:
                peer, part = (unit - rows) // send_units, (unit - rows) % send_units
                own = Items(tensors.topk_ids, tokens, topk, peer, experts)
                _count_unit(own, counts, part, span, C.EXPERTS, C.TOPK, C.BLOCK)
            else:
                source = (rank + WORLD_SIZE - unit // row_units) % WORLD_SIZE
                wait(peers, source * MAX_SLICES, epoch, COUNT=SLICES)
                ids = peers.slots + slot_offset + source * size
                came = Items(ids, size, 1, rank, experts)
                _count_unit(came, counts, unit % row_units, span, C.EXPERTS, 1, C.BLOCK)


@triton.jit(do_not_specialize=_SAME)
def place_kernel(
    tensors, tokens, peers, rank, max_tokens, topk, experts, bound, span, C: tl.constexpr
):
    """Place what ``count_kernel`` has counted; rows in the order of sources from the own rank
    down."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    epoch = load_epoch(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    size = max_tokens * topk
    row_units = tl.cdiv(size, span * C.BLOCK)
    send_units = tl.cdiv(max_tokens, span * C.BLOCK)
    rows = WORLD_SIZE * row_units
    for unit in range(tl.program_id(0), rows + WORLD_SIZE * send_units, tl.num_programs(0)):
        if unit < rows:
            source = (rank + WORLD_SIZE - unit // row_units) % WORLD_SIZE
            first = source * size
            _place_unit(
                Items(peers.slots + slot_offset + first, size, 1, rank, experts),
                peers.counters,
                Order(tensors.offsets, tensors.row_entry, tensors.entry_row + first, first, bound),
                unit,
                rows,
                unit % row_units,
                span,
                C.EXPERTS,
                1,
                C.BLOCK,
                True,
            )
        else:
            peer, part = (unit - rows) // send_units, (unit - rows) % send_units
            _place_unit(
                Items(tensors.topk_ids, tokens, topk, peer, experts),
                peers.counters + (rows + peer * send_units) * C.EXPERTS,
                Order(
                    tensors.send_offsets + peer * (experts + 1),
                    tensors.send_order + peer * max_tokens,
                    tensors.entry_row,
                    0,
                    max_tokens,
                ),
                part,
                send_units,
                part,
                span,
                C.EXPERTS,
                C.TOPK,
                C.BLOCK,
                False,
            )
    leave(peers, epoch, tl.num_programs(0))
