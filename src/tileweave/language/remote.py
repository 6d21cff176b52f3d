"""Peers' memory in Triton: addresses from a table, and tile copies to and from a peer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symm_at(table, peer, dtype: tl.constexpr, alignment: tl.constexpr):
    """Pointer to ``dtype`` at the start of ``peer``'s symmetric buffer, as mapped on this rank.

    ``table`` is int64 ``[R]`` in device memory. ``alignment``, bytes: what the buffer's start is a multiple of; without it
    the compiler would split stores into single elements.
    """
    pointer = tl.load(table + peer).to(tl.pointer_type(dtype), bitcast=True)
    return tl.multiple_of(pointer, alignment)


@triton.jit
def put(target, source, begin, end, BLOCK: tl.constexpr):
    """Store elements [begin, end) of ``source`` (local) at the same places of ``target`` (a peer's).

    Plain stores: a ``notify`` must follow before the peer may read.
    """
    for offset in range(begin, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        mask = index < end
        tl.store(target + index, tl.load(source + index, mask=mask), mask=mask)


@triton.jit
def get(target, source, begin, end, BLOCK: tl.constexpr):
    """Load elements [begin, end) of ``source`` (a peer's, behind a ``wait``) into ``target`` (local)."""
    put(target, source, begin, end, BLOCK)


@triton.jit
def put_all(table, rank, WORLD_SIZE: tl.constexpr, offset, row, source, begin, end, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Store elements [begin, end) of ``source`` to every peer, each block to all peers in turn.

    At peer ``rank + i`` they go to ``offset + (i - 1) * row`` onward: place ``i - 1`` of its slot, see
    ``schedule.slot_index``. Alternating peers block by block keeps all links busy and no receiver with two senders in step.
    """
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < end
        value = tl.load(source + index, mask=mask)
        for i in tl.static_range(1, WORLD_SIZE):
            target = symm_at(table, (rank + i) % WORLD_SIZE, dtype, 16) + offset + tl.cast(row, tl.int64) * (i - 1)
            tl.store(target + index, value, mask=mask)
