"""Peers' memory in Triton: addresses from a table, and tile copies to and from a peer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symm_at(table, peer, dtype: tl.constexpr, alignment: tl.constexpr):
    """Pointer to ``dtype`` at the start of ``peer``'s symmetric buffer, as mapped on this rank.

    ``table``: the address table, int64 ``[R]`` in device memory. ``alignment``: the start of the
    buffer is a multiple of this many bytes. Without it the compiler would split stores into single
    elements.
    """
    pointer = tl.load(table + peer).to(tl.pointer_type(dtype), bitcast=True)
    return tl.multiple_of(pointer, alignment)


@triton.jit
def put(target, source, begin, end, BLOCK: tl.constexpr):
    """Store elements [begin, end) of ``source`` at the same offsets of ``target``.

    Plain stores: where ``target`` is a peer's, a ``notify`` must follow before the peer may read.
    """
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        mask = index < end
        tl.store(target + index, tl.load(source + index, mask=mask), mask=mask)


@triton.jit
def get(target, source, begin, end, BLOCK: tl.constexpr):
    """:func:`put` with a local ``target``. Where peers wrote ``source``, first ``wait``."""
    put(target, source, begin, end, BLOCK)


@triton.jit
def put_all(
    table,
    rank,
    WORLD_SIZE: tl.constexpr,
    offset,
    size,
    source,
    begin,
    end,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store elements [begin, end) of this rank's shard ``source`` into a slot of every peer.

    The slot starts at element ``offset`` of each peer's buffer and holds shards of ``size``
    elements. ``schedules.gather.slot_place`` has the index of this rank's shard there. ``OWN``: the
    slot has all shards in rank order, that of the receiver, too. ``begin``: a multiple of
    ``BLOCK``. Each block goes to all peers in turn, which keeps all links busy; while ranks are in
    step no receiver has two senders.
    """
    for block in range(begin // BLOCK, (end + BLOCK - 1) // BLOCK):
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < end
        value = tl.load(source + index, mask=mask)
        for i in tl.static_range(0 if OWN else 1, WORLD_SIZE):
            target = symm_at(table, (rank + i) % WORLD_SIZE, source.dtype.element_ty, 16) + offset
            if OWN:
                target += rank.to(tl.int64) * size
            else:
                target += (i - 1) * size.to(tl.int64)
            tl.store(target + index, value, mask=mask)


@triton.jit
def put_rows(target, source, begin, end, width, target_pitch, source_pitch, BLOCK: tl.constexpr):
    """Copy elements [begin, end) of a matrix with rows of ``width`` elements, which have different
    pitches in ``target`` and ``source``."""
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        row, col = (index // width).to(tl.int64), index % width
        value = tl.load(source + row * source_pitch + col, mask=index < end)
        tl.store(target + row * target_pitch + col, value, mask=index < end)


@triton.jit
def put_parts(
    table,
    rank,
    WORLD_SIZE: tl.constexpr,
    offset,
    size,
    source,
    step,
    pitch,
    width,
    begin,
    end,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As :func:`put_all`, but each peer receives another part: the one at element ``peer * step``
    of ``source``, with rows of ``width`` elements, ``pitch`` apart. Parts are stored without
    gaps."""
    for block in range(begin // BLOCK, (end + BLOCK - 1) // BLOCK):
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < end
        at = (index // width).to(tl.int64) * pitch + index % width
        for i in tl.static_range(0 if OWN else 1, WORLD_SIZE):
            peer = (rank + i) % WORLD_SIZE
            place = rank if OWN else i - 1
            target = (
                symm_at(table, peer, source.dtype.element_ty, 16)
                + offset
                + tl.cast(place, tl.int64) * size
            )
            tl.store(
                target + index,
                tl.load(source + peer.to(tl.int64) * step + at, mask=mask),
                mask=mask,
            )
