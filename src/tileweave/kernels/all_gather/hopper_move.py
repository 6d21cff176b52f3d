"""The *move* partition of the Hopper ``all_gather_matmul`` and ``all_to_all_matmul``: it pushes,
and copies what arrived.

Read ``triton.py`` for the protocol and ``hopper.py`` for the partitions and the tuples.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.peers import leave, load_epoch, meet, notify_all, wait
from tileweave.device.gluon.remote import copy_flat, copy_rows, put_all, put_parts
from tileweave.device.gluon.signal import count_in, label, stamp
from tileweave.device.triton.signal import MAX_SLICES


@gluon.jit
def push_slices(x, peers, rank, slot_offset, sizes, epoch, num_producers, trace, C: gl.constexpr):
    """Push this program's slices of the own shard, or of every peer's part, and signal each."""
    size = sizes.size
    for piece in range(gl.program_id(0), C.NUM_SLICES, num_producers):
        stamp(trace, piece, 0, epoch, C.TRACE)
        end = gl.minimum((piece + 1) * sizes.slice_size, size)
        if C.EXCHANGE:
            put_parts(
                peers.slot_table,
                rank,
                slot_offset,
                size,
                x,
                sizes.step,
                sizes.pitch,
                sizes.depth,
                piece * sizes.slice_size,
                end,
                C.WORLD_SIZE,
                C.SPANS,
                C.BLOCK,
                C.MOVE_WARPS,
            )
        else:
            put_all(
                peers.slot_table,
                rank,
                slot_offset,
                size,
                x,
                piece * sizes.slice_size,
                end,
                C.WORLD_SIZE,
                C.SPANS,
                C.BLOCK,
                C.MOVE_WARPS,
            )
        notify_all(
            peers, rank * MAX_SLICES + piece, rank, epoch, C.WORLD_SIZE, C.SPANS, C.MOVE_WARPS
        )
        stamp(trace, piece, 1, epoch, C.TRACE)
        label(trace, piece, piece, C.TRACE)


@gluon.jit
def copy_out(target, source, begin, end, depth, target_pitch, source_pitch, C: gl.constexpr):
    """Copy elements [``begin``, ``end``) of a shard, or of a part with rows of ``depth``
    elements."""
    if C.EXCHANGE:
        copy_rows(
            target, source, begin, end, depth, target_pitch, source_pitch, C.BLOCK, C.MOVE_WARPS
        )
    else:
        copy_flat(target, source, begin, end, C.BLOCK, C.MOVE_WARPS)


@gluon.jit
def move_partition(
    tensors,
    peers,
    slot,
    rank,
    sizes,
    gate,
    num_producers,
    num_chunks,
    num_partitions,
    C: gl.constexpr,
):
    """Two or four warps that run concurrently with the matmul.

    They push slices of the own shard and signal each, or, in program 0, open the gate for the copy
    engine when all ranks have met; then they copy the gathered input out.
    """
    x, gathered = tensors.x, tensors.gathered
    program = gl.program_id(0)
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    # here, since what crosses into a partition loses its known alignment
    slot_offset = slot.to(gl.int64) * peers.slot_size
    if C.PUSH:
        if program < num_producers:
            push_slices(x, peers, rank, slot_offset, sizes, epoch, num_producers, tensors.trace, C)
    elif program == 0:
        meet(peers, rank, epoch, -1, C.WORLD_SIZE, C.MOVE_WARPS)
        count_in(gate)
    if C.GATHERED:
        size, depth = sizes.size, sizes.depth
        begin = program * sizes.copy_size
        end = gl.minimum(begin + sizes.copy_size, size)
        # elements from one source's part of the result to the next one's
        apart = depth if C.GATHER_K else size
        pitch = depth * C.WORLD_SIZE if C.GATHER_K else depth
        own = x
        if C.EXCHANGE:
            own = x + rank.to(gl.int64) * sizes.step
        copy_out(
            gathered + rank.to(gl.int64) * apart, own, begin, end, depth, pitch, sizes.pitch, C
        )
        for step in range(1, C.WORLD_SIZE):
            source = (rank + C.WORLD_SIZE - step) % C.WORLD_SIZE
            for chunk in range(0, num_chunks):
                index = source * MAX_SLICES + chunk
                wait(peers, index, epoch, -1, C.NUM_SLICES, C.MOVE_WARPS, EXACT=not C.PUSH)
            at = step - 1
            if C.SPANS:
                at = source
            remote = peers.slots + slot_offset + at * size.to(gl.int64)
            target = gathered + source.to(gl.int64) * apart
            copy_out(target, remote, begin, end, depth, pitch, depth, C)
    leave(peers, epoch, num_partitions)
