"""What programs of an all-gather do when shards have arrived: tiles wait for them, and the gathered
input is copied out of the slot. ``triton.py`` has the protocol and the tuple of choices ``C``."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tileweave.device.triton.peers import wait
from tileweave.device.triton.remote import get
from tileweave.device.triton.signal import MAX_SLICES


@triton.jit
def wait_sources(peers, unit, rows, chunk_rows, rank, epoch, C: tl.constexpr):
    """Wait for every shard that a tile's rows are in and that is not read from x; where ranks are
    on several nodes, for the chunk of the shard.

    Returns a token for ``consume_token``.
    """
    token = tl.cast(0, tl.int32)
    last_row = tl.minimum(unit.first_row + C.TILE_M, unit.row_limit) - 1
    for source in range(unit.first_row // rows, last_row // rows + 1):
        if C.SPANS or source != rank:
            signal = source * MAX_SLICES
            if C.PER_NODE:  # chunks have whole tiles
                signal += (unit.first_row - source * rows) // chunk_rows
            token = wait(peers, signal, epoch, unit.tile, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)
    return token


@triton.jit
def copy_gathered(
    x, slot, gathered, peers, rank, sizes, num_chunks, program, epoch, C: tl.constexpr
):
    """Return the gathered input: each program copies its part of every shard, locally."""
    size = sizes.rows * sizes.depth
    begin = program * sizes.copy_size
    end = tl.minimum(begin + sizes.copy_size, size)
    get(gathered + rank.to(tl.int64) * size, x, begin, end, C.PUSH_BLOCK)
    for step in range(1, C.WORLD_SIZE):
        source = (rank + C.WORLD_SIZE - step) % C.WORLD_SIZE
        if C.PER_NODE:
            for chunk in range(num_chunks):
                wait(peers, source * MAX_SLICES + chunk, epoch, EXACT=True)
        else:
            wait(peers, source * MAX_SLICES, epoch, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)
        place = source if C.SPANS else step - 1
        get(
            gathered + source.to(tl.int64) * size,
            slot + place.to(tl.int64) * size,
            begin,
            end,
            C.PUSH_BLOCK,
        )


@triton.jit
def own_or_slot(x, slot, remote, is_own):
    """``x`` where ``is_own``, else ``slot + remote``: where a shard is read."""
    if is_hip():
        # its pointer analysis in Triton 3.6 cannot choose between two bases: go from one base to
        # the other
        itemsize: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
        apart = (x.to(tl.int64) - slot.to(tl.int64)) // itemsize
        base = slot + tl.where(is_own, apart, remote)
    else:
        base = tl.where(is_own, x, slot + remote)  # a choice between scalars keeps the alignment
    return base
