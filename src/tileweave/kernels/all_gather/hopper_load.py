"""The *load* partition of the Hopper ``all_gather_matmul`` and ``all_to_all_matmul``: it waits for shards and feeds TMA.

Read ``triton.py`` for the protocol and ``hopper.py`` for the partitions. ``turn`` counts buffers
of the ring that were filled (``device/gluon/matmul.py``). Rows past a shard's end are the next one's, or zeros: what they
make is not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import (
    claim,
    load_slot,
    load_weight,
    place,
    segment,
    share_of,
    unit_range,
)
from tileweave.device.gluon.signal import acquire, are_there, label, leave, load_async, spin, stamp
from tileweave.kernels.all_gather.hopper_move import MAX_SLICES


@gluon.jit
def load_rows(
    x_desc, slot0_desc, slot1_desc, buffer, bar, first_row, k, rows, rank, slot,
    WORLD_SIZE: gl.constexpr, SPANS: gl.constexpr,
):  # fmt: skip
    """Ask TMA for one K block of a tile's rows: from x for the own shard, else from the slot."""
    row = first_row
    own = False
    if not SPANS:
        source = first_row // rows
        row -= source * rows
        own = source == rank
        if source != rank:
            row += (rank + WORLD_SIZE - source - 1) % WORLD_SIZE * rows
    if own:
        load_async(x_desc, [row, k], bar, buffer)
    else:
        load_slot(slot0_desc, slot1_desc, slot, row, k, bar, buffer)


@gluon.jit
def load_shards(
    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, ring, signals, control, report, trace,
    record, slot, rank, rows, first_row, last_row, col, k_begin, k_end, tile, epoch,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, TRACE: gl.constexpr, DEPTH_FIRST: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Wait for the shards a unit's rows are in, then load its K blocks. Returns (ring turn, sources that have arrived).

    Weights go ahead only where there is something to wait for: to fill the ring with them, the last tile must have left it.
    ``SPREAD``: how many sources a poll has room for, a power of two; one where no tile spans shards.
    """
    SPREAD: gl.constexpr = (8 if WORLD_SIZE > 4 else 4) if SPANS else 1
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    first, last = first_row // rows, last_row // rows
    needed = (2 << last) - (1 << first)  # bits first to last
    ahead = 0
    if (needed & arrived) != needed:
        if not are_there(signals, first, last, MAX_SLICES, epoch, NUM_SLICES, SPREAD, 1, EXACT):
            ahead = gl.minimum(k_end - k_begin, STAGES)
            for step in range(0, ahead):
                at = claim(ring, turn + step, block_bytes, STAGES)
                load_weight(
                    w_desc,
                    col * TILE_N,
                    (k_begin + step) * TILE_K,
                    ring.ready.index(at),
                    ring.b.index(at),
                    DEPTH_FIRST,
                )
            spin(
                signals,
                first,
                last,
                MAX_SLICES,
                epoch,
                tile,
                control,
                report,
                NUM_SLICES,
                SPREAD,
                1,
                EXACT=EXACT,
            )
        acquire(epoch)
        arrived = arrived | needed
        for step in range(0, ahead):
            at = (turn + step) % STAGES
            load_rows(
                x_desc, slot0_desc, slot1_desc, ring.a.index(at), ring.ready.index(at), first_row,
                (k_begin + step) * TILE_K, rows, rank, slot, WORLD_SIZE, SPANS,
            )  # fmt: skip
    stamp(trace, record, 1, epoch, TRACE)
    turn += ahead
    for block in range(k_begin + ahead, k_end):
        at = claim(ring, turn, block_bytes, STAGES)
        load_weight(
            w_desc,
            col * TILE_N,
            block * TILE_K,
            ring.ready.index(at),
            ring.b.index(at),
            DEPTH_FIRST,
        )
        load_rows(
            x_desc, slot0_desc, slot1_desc, ring.a.index(at), ring.ready.index(at), first_row,
            block * TILE_K, rows, rank, slot, WORLD_SIZE, SPANS,
        )  # fmt: skip
        turn += 1
    return turn, arrived


@gluon.jit
def load_sources(
    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, ring, signals, control, report,
    slot, rank, rows, first_row, col, k_begin, k_end, k_blocks, tile, epoch,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    STAGES: gl.constexpr, DEPTH_FIRST: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """``GATHER_K``: load a unit's K blocks, which go through parts by order of arrival; wait for each part once.

    ``signals``: from the word of this tile's chunk on. Bits of ``arrived`` are for this chunk.
    """
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    blocks = k_blocks // WORLD_SIZE  # of a source
    for block in range(k_begin, k_end):
        step = block // blocks
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        k = block % blocks * TILE_K
        at = claim(ring, turn, block_bytes, STAGES)
        load_weight(
            w_desc,
            col * TILE_N,
            source * blocks * TILE_K + k,
            ring.ready.index(at),
            ring.b.index(at),
            DEPTH_FIRST,
        )
        if ((arrived >> source) & 1) == 0:
            spin(
                signals,
                source,
                source,
                MAX_SLICES,
                epoch,
                tile,
                control,
                report,
                NUM_SLICES,
                1,
                1,
                EXACT=EXACT,
            )
            acquire(epoch)
            arrived = arrived | (1 << source)
        if step == 0:
            load_async(x_desc, [first_row, k], ring.ready.index(at), ring.a.index(at))
        else:
            load_slot(
                slot0_desc,
                slot1_desc,
                slot,
                (step - 1) * rows + first_row,
                k,
                ring.ready.index(at),
                ring.a.index(at),
            )
        turn += 1
    return turn, arrived


@gluon.jit
def load_partition(
    x_desc, slot0_desc, slot1_desc, w_desc, ring, signals, control, report, trace,
    slot, rank, tiles, max_units, chunk_rows, num_partitions, WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr,
    PUSH: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, SPANS: gl.constexpr,
    STAGES: gl.constexpr, TRACE: gl.constexpr, GATHER_K: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """One warp: for each unit wait for its shards, then keep the ring full."""
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = gl.load(control, volatile=True)
    if PUSH:
        slot = epoch & 1
    record = NUM_SLICES + program * max_units
    turn = 0
    arrived = 0  # bit s: the shard of rank s is where it will be read
    if not SPANS:
        arrived = 1 << rank
    chunk = -1  # GATHER_K: the chunk of rows that arrived is about
    for part in range(0, tiles.num_segments):
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            tile += first_tile
            first_row, row_limit, col = place(tiles, tile)
            label(trace, record, tile + 1, TRACE)
            stamp(trace, record, 0, epoch, TRACE)
            if GATHER_K:
                if first_row // chunk_rows != chunk:
                    chunk = first_row // chunk_rows
                    arrived = 1 << rank
                turn, arrived = load_sources(
                    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, ring, signals + chunk,
                    control, report, slot, rank, tiles.rows, first_row, col, k_begin, k_end, tiles.k_blocks, tile, epoch,
                    WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, STAGES, DEPTH_FIRST, not PUSH,
                )  # fmt: skip
            else:
                last_row = gl.minimum(first_row + TILE_M, row_limit) - 1
                turn, arrived = load_shards(
                    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, ring, signals, control,
                    report, trace, record, slot, rank, tiles.rows, first_row, last_row, col, k_begin, k_end, tile, epoch,
                    WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, SPANS, STAGES, TRACE, DEPTH_FIRST, not PUSH,
                )  # fmt: skip
            record += 1
    leave(control, epoch, num_partitions)
