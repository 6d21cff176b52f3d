"""The *move* partition of the Hopper ``all_gather_matmul`` and ``all_to_all_matmul``: pushes, copies of what came.

Read ``triton.py`` for the protocol and ``hopper.py`` for the partitions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.meet import meet
from tileweave.device.gluon.remote import copy_flat, copy_rows, put_all, put_parts
from tileweave.device.gluon.signal import count_in, label, leave, notify_all, stamp, wait
from tileweave.device.triton.signal import MAX_SLICES


@gluon.jit
def move_partition(
    x, gathered, slots, slot_table, signal_table, signals, gate, control, report, trace,
    slot, slot_size, rank, size, slice_size, share_size, num_producers, depth, x_step, x_pitch, num_chunks, num_partitions,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, GATHERED: gl.constexpr,
    SPANS: gl.constexpr, BLOCK: gl.constexpr, MOVE_WARPS: gl.constexpr, TRACE: gl.constexpr, EXCHANGE: gl.constexpr,
    GATHER_K: gl.constexpr,
):  # fmt: skip
    """Two or four warps beside the matmul: push slices of the own shard and signal each, or, in program 0, open the gate for
    the copy engine when all ranks have met; then copy the gathered input out.

    Elements: ``size`` of a shard or part, ``slice_size`` of a slice, ``share_size`` of a program's share of each shard.
    """
    program = gl.program_id(0)
    epoch = gl.load(control, volatile=True)
    if PUSH:
        slot = epoch & 1
    slot_offset = (
        slot.to(gl.int64) * slot_size
    )  # here, since what crosses into a partition loses its known alignment
    if PUSH:
        if program < num_producers:
            for piece in range(program, NUM_SLICES, num_producers):
                stamp(trace, piece, 0, epoch, TRACE)
                end = gl.minimum((piece + 1) * slice_size, size)
                if EXCHANGE:
                    put_parts(
                        slot_table, rank, slot_offset, size, x, x_step, x_pitch, depth, piece * slice_size, end,
                        WORLD_SIZE, SPANS, BLOCK, MOVE_WARPS,
                    )  # fmt: skip
                else:
                    put_all(
                        slot_table,
                        rank,
                        slot_offset,
                        size,
                        x,
                        piece * slice_size,
                        end,
                        WORLD_SIZE,
                        SPANS,
                        BLOCK,
                        MOVE_WARPS,
                    )
                notify_all(
                    signal_table,
                    rank * MAX_SLICES + piece,
                    rank,
                    epoch,
                    WORLD_SIZE,
                    SPANS,
                    MOVE_WARPS,
                )
                stamp(trace, piece, 1, epoch, TRACE)
                label(trace, piece, epoch * 0 + piece, TRACE)
    elif program == 0:
        meet(signal_table, signals, rank, epoch, -1, control, report, WORLD_SIZE, MOVE_WARPS)
        count_in(gate)
    if GATHERED:
        begin = program * share_size
        end = gl.minimum(begin + share_size, size)
        apart = (
            depth if GATHER_K else size
        )  # from one source's part of the result to the next one's
        pitch = depth * WORLD_SIZE if GATHER_K else depth
        if EXCHANGE:
            own = x + rank.to(gl.int64) * x_step
            copy_rows(
                gathered + rank.to(gl.int64) * apart,
                own,
                begin,
                end,
                depth,
                pitch,
                x_pitch,
                BLOCK,
                MOVE_WARPS,
            )
        else:
            copy_flat(gathered + rank.to(gl.int64) * size, x, begin, end, BLOCK, MOVE_WARPS)
        for step in range(1, WORLD_SIZE):
            source = (rank + WORLD_SIZE - step) % WORLD_SIZE
            for chunk in range(0, num_chunks):
                wait(
                    signals,
                    source * MAX_SLICES + chunk,
                    epoch,
                    -1,
                    control,
                    report,
                    NUM_SLICES,
                    MOVE_WARPS,
                    EXACT=not PUSH,
                )
            at = step - 1
            if SPANS:
                at = source
            remote = slots + slot_offset + at * size.to(gl.int64)
            if EXCHANGE:
                copy_rows(
                    gathered + source.to(gl.int64) * apart,
                    remote,
                    begin,
                    end,
                    depth,
                    pitch,
                    depth,
                    BLOCK,
                    MOVE_WARPS,
                )
            else:
                copy_flat(
                    gathered + source.to(gl.int64) * size, remote, begin, end, BLOCK, MOVE_WARPS
                )
    leave(control, epoch, num_partitions)
