"""Stable counting sorts of ids, for routing plans of many tokens, and the push of ids that stands before them: two launches.

What is sorted are *items* by *key*: the choices of all ranks by local expert, for rows; own tokens, once for each rank, by the
lowest expert that they have there, for what is sent there. A choice is a token with one id, so both are the same code. Items
are cut into *units* of ``span`` blocks of BLOCK; a row of ``histogram`` says how many items of a unit have each key.

    count_kernel   first programs  | push own ids to all, signal |
                   others          | count own tokens | wait for a source, count its ids |
    place_kernel   all             | sum the histogram's rows up to the unit | place the unit's items | leave

Who writes, who reads: as in ``routing.py``. The first ``SLICES`` programs push; a unit that counts a source's ids waits for
all of that source's slices; every source has a unit, so a call ends only after it has seen a signal of every peer.

==================  =====  ===============================  ==========================================
signal (int32)      value  notifier                         waiter
==================  =====  ===============================  ==========================================
[source, slice]     epoch  program ``slice`` of ``source``  programs that count the ids of ``source``
==================  =====  ===============================  ==========================================

Why no slot is overwritten: the last reader of the slot of call n-1 is its ``place_kernel``, which alone moves the epoch on.
My call n+1 writes that slot, and my call n has ended: each peer has signalled n, so has begun n, behind its ``place_kernel`` of
n-1.

``histogram`` is this rank's own: ``count_kernel`` writes every row before ``place_kernel``, the next launch on the stream,
reads it, so nobody clears it.

Why nobody is stuck: pushing waits for nobody, pushers are the lowest programs, and ``place_kernel`` does not wait.

Source of the idea: the counting sort of radix sorts on GPUs (histogram, scan, scatter), for one digit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.signal import leave, load_epoch, notify_all, wait

MAX_SLICES = tl.constexpr(32)
PUSH_BLOCK = tl.constexpr(1024)  # ids
HISTOGRAM_BLOCK = tl.constexpr(4096)  # counts that a program adds up at once


@triton.jit
def as_expert(ids):
    """Ids as int32; what that does not hold is no expert's."""
    if ids.dtype.primitive_bitwidth == 64:
        ids = tl.where((ids >= 0) & (ids < 1 << 31), ids, -1)
    return ids.to(tl.int32)


@triton.jit
def push_ids(
    ids, own_ids, slot_table, signal_table, slot_offset, rank, size, valid, piece, epoch,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Put slice ``piece`` of the own ids into every rank's slot, -1 from ``valid`` on, and signal each."""
    for block in range(piece, tl.cdiv(size, PUSH_BLOCK), SLICES):
        at = block * PUSH_BLOCK + tl.arange(0, PUSH_BLOCK)
        value = as_expert(tl.load(ids + at, mask=at < valid, other=-1))
        tl.store(own_ids + at, value, mask=at < size)
        for step in tl.static_range(WORLD_SIZE):
            target = (
                symm_at(slot_table, (rank + step) % WORLD_SIZE, tl.int32, 16)
                + slot_offset
                + rank * size
            )
            tl.store(target + at, value, mask=at < size)
    notify_all(signal_table, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, True)


@triton.jit
def lowest_expert(
    ids,
    begin,
    items,
    topk,
    owner,
    experts,
    NONE: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest of rank ``owner``'s experts that each item of a block has chosen, counted from 0; ``NONE`` if it has none.

    ids [items, topk]; ``TOPK``: a power of two from topk on. NONE: ``experts`` or more. ``experts``: of a rank.
    """
    item, choice = begin + tl.arange(0, BLOCK), tl.arange(0, TOPK)
    mask = (item < items)[:, None] & (choice < topk)[None, :]
    chosen = tl.load(ids + item[:, None] * topk + choice[None, :], mask=mask, other=-1)
    local = as_expert(chosen) - owner * experts
    return tl.min(tl.where((local >= 0) & (local < experts), local, NONE), axis=1)


@triton.jit
def _count_unit(
    ids, counts, part, span, items, topk, owner, experts,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many items of a unit, the ``part``-th of ``ids``, have each key; ``counts``: the unit's row of the histogram."""
    expert = tl.arange(0, EXPERTS)
    found = tl.zeros((EXPERTS,), tl.int32)
    for block in range(part * span, (part + 1) * span):
        keys = lowest_expert(ids, block * BLOCK, items, topk, owner, experts, EXPERTS, TOPK, BLOCK)
        found += tl.sum((keys[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts + expert, found)


@triton.jit
def _place_unit(
    ids, counts, offsets, ordered, placed, first_item, limit, unit, units, part, span, items, topk, owner, experts,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Place the items of unit ``unit`` of ``units`` that are sorted together; ``counts``: their rows of the histogram.

    It is the ``part``-th unit of ``ids``: choices are sorted over all sources, and ``ids`` are those of one.
    ``ordered[place]`` = ``first_item`` + item; with ``INVERSE`` also ``placed[item]`` = place, -1 where it has none. The first
    unit stores ``offsets`` [experts + 1].
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
        tl.store(offsets + expert, tl.minimum(below, limit), mask=expert < experts)
        tl.store(offsets + experts, tl.minimum(tl.sum(total, axis=0), limit))
    for block in range(part * span, (part + 1) * span):
        keys = lowest_expert(ids, block * BLOCK, items, topk, owner, experts, EXPERTS, TOPK, BLOCK)
        item = block * BLOCK + tl.arange(0, BLOCK)
        chosen = keys[:, None] == expert[None, :]
        at = tl.arange(0, BLOCK)
        # each pair compared: a scan over [BLOCK, EXPERTS] took 214 registers at 64 experts where this takes 175 (decision 0026)
        before = tl.sum(
            ((keys[:, None] == keys[None, :]) & (at[:, None] > at[None, :])).to(tl.int32), axis=1
        )
        place = tl.where(
            keys < experts, before + tl.sum(tl.where(chosen, start[None, :], 0), axis=1), -1
        )
        tl.store(ordered + place, first_item + item, mask=(place >= 0) & (place < limit))
        if INVERSE:
            tl.store(placed + item, tl.where(place < limit, place, -1), mask=item < items)
        start += tl.sum(chosen.to(tl.int32), axis=0)


_SAME = ["rank", "tokens", "max_tokens", "topk", "experts", "bound", "span"]


@triton.jit(do_not_specialize=_SAME)
def count_kernel(
    topk_ids, offsets, row_entry, entry_row, own_ids, send_order, send_offsets, tokens,
    slots, slot_size, slot_table, signal_table, signals, control, report, histogram,
    rank, max_tokens, topk, experts, bound, span,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push and count; see the module's docstring. Both kernels take the same arguments."""
    program = tl.program_id(0)
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    size = max_tokens * topk
    row_units = tl.cdiv(size, span * BLOCK)
    send_units = tl.cdiv(max_tokens, span * BLOCK)
    if program < SLICES:
        push_ids(
            topk_ids, own_ids, slot_table, signal_table, slot_offset, rank, size, tokens * topk, program, epoch,
            WORLD_SIZE, SLICES,
        )  # fmt: skip
    else:
        rows = WORLD_SIZE * row_units
        # own tokens first: that needs no peer
        for at in range(
            program - SLICES, rows + WORLD_SIZE * send_units, tl.num_programs(0) - SLICES
        ):
            unit = (at + rows) % (rows + WORLD_SIZE * send_units)
            counts = histogram + unit * EXPERTS
            if unit >= rows:
                peer, part = (unit - rows) // send_units, (unit - rows) % send_units
                _count_unit(
                    topk_ids, counts, part, span, tokens, topk, peer, experts, EXPERTS, TOPK, BLOCK
                )
            else:
                source = (rank + WORLD_SIZE - unit // row_units) % WORLD_SIZE
                wait(signals, SLICES, epoch, source * MAX_SLICES, -1, control, report)
                ids = slots + slot_offset + source * size
                _count_unit(
                    ids, counts, unit % row_units, span, size, 1, rank, experts, EXPERTS, 1, BLOCK
                )


@triton.jit(do_not_specialize=_SAME)
def place_kernel(
    topk_ids, offsets, row_entry, entry_row, own_ids, send_order, send_offsets, tokens,
    slots, slot_size, slot_table, signal_table, signals, control, report, histogram,
    rank, max_tokens, topk, experts, bound, span,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place what ``count_kernel`` has counted; rows in the order of sources from the own rank down."""
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    size = max_tokens * topk
    row_units = tl.cdiv(size, span * BLOCK)
    send_units = tl.cdiv(max_tokens, span * BLOCK)
    rows = WORLD_SIZE * row_units
    for unit in range(tl.program_id(0), rows + WORLD_SIZE * send_units, tl.num_programs(0)):
        if unit < rows:
            source = (rank + WORLD_SIZE - unit // row_units) % WORLD_SIZE
            first = source * size
            _place_unit(
                slots + slot_offset + first, histogram, offsets, row_entry, entry_row + first, first, bound,
                unit, rows, unit % row_units, span, size, 1, rank, experts, EXPERTS, 1, BLOCK, True,
            )  # fmt: skip
        else:
            peer, part = (unit - rows) // send_units, (unit - rows) % send_units
            _place_unit(
                topk_ids, histogram + (rows + peer * send_units) * EXPERTS,
                send_offsets + peer * (experts + 1), send_order + peer * max_tokens, entry_row, 0, max_tokens,
                part, send_units, part, span, tokens, topk, peer, experts, EXPERTS, TOPK, BLOCK, False,
            )  # fmt: skip
    leave(control, epoch, tl.num_programs(0))
