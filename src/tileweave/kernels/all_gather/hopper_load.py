"""The *load* partition of the Hopper ``all_gather_matmul`` and ``all_to_all_matmul``: it waits for
shards and feeds TMA.

Read ``triton.py`` for the protocol and ``hopper.py`` for the partitions and the tuples. ``turn``
counts buffers of the ring that were filled (``device/gluon/matmul.py``). Rows past a shard's end
are those of the next one, or zeros: their products are not stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon import signal
from tileweave.device.gluon.matmul import (
    claim,
    load_part,
    load_slot,
    load_weight,
    place,
    segment,
    share_of,
    unit_range,
)
from tileweave.device.gluon.peers import are_there, leave, load_epoch, spin
from tileweave.device.gluon.signal import acquire, label, load_async, stamp
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.device.triton.tiles import Unit


class Operands(NamedTuple):
    """Descriptors of what TMA loads: x (the own part, where there are parts), both slots, and w."""

    x: Any
    slot0: Any
    slot1: Any
    w: Any


@gluon.jit
def load_rows(operands, buffer, bar, first_row, k, rows, rank, slot, C: gl.constexpr):
    """Ask TMA for one K block of a tile's rows: from x for the own shard, else from the slot."""
    row = first_row
    own = False
    if not C.SPANS:
        source = first_row // rows
        row -= source * rows
        own = source == rank
        if source != rank:
            row += (rank + C.WORLD_SIZE - source - 1) % C.WORLD_SIZE * rows
    if own:
        load_async(operands.x, [row, k], bar, buffer)
    else:
        load_slot(operands.slot0, operands.slot1, slot, row, k, bar, buffer)


@gluon.jit
def load_shards(
    turn,
    arrived,
    operands,
    ring,
    peers,
    trace,
    record,
    slot,
    rank,
    rows,
    unit,
    epoch,
    C: gl.constexpr,
):
    """Wait for the shards a unit's rows are in, then load its K blocks.

    Returns (ring turn, sources that have arrived). Weights are loaded ahead only where there is
    something to wait for: to fill the ring with them, the last tile must have left it.
    """
    # how many sources a poll has room for, a power of two; one where no tile spans shards
    SPREAD: gl.constexpr = (8 if C.WORLD_SIZE > 4 else 4) if C.SPANS else 1
    block_bytes: gl.constexpr = (C.TILE_M + C.TILE_N) * C.TILE_K * C.ITEMSIZE
    last_row = gl.minimum(unit.first_row + C.TILE_M, unit.row_limit) - 1
    first, last = unit.first_row // rows, last_row // rows
    needed = (2 << last) - (1 << first)  # bits first to last
    ahead = 0
    if (needed & arrived) != needed:
        if not are_there(
            peers, first, last, MAX_SLICES, epoch, C.NUM_SLICES, SPREAD, 1, not C.PUSH
        ):
            ahead = gl.minimum(unit.k_end - unit.k_begin, C.STAGES)
            for step in range(0, ahead):
                at = claim(ring, turn + step, block_bytes, C.STAGES)
                load_weight(
                    operands.w,
                    unit.col * C.TILE_N,
                    (unit.k_begin + step) * C.TILE_K,
                    ring.ready.index(at),
                    ring.b.index(at),
                    C.DEPTH_FIRST,
                )
            spin(
                peers,
                first,
                last,
                MAX_SLICES,
                epoch,
                unit.tile,
                C.NUM_SLICES,
                SPREAD,
                1,
                EXACT=not C.PUSH,
            )
        acquire(epoch)
        arrived = arrived | needed
        for step in range(0, ahead):
            at = (turn + step) % C.STAGES
            load_rows(
                operands,
                ring.a.index(at),
                ring.ready.index(at),
                unit.first_row,
                (unit.k_begin + step) * C.TILE_K,
                rows,
                rank,
                slot,
                C,
            )
    stamp(trace, record, 1, epoch, C.TRACE)
    turn += ahead
    for block in range(unit.k_begin + ahead, unit.k_end):
        at = claim(ring, turn, block_bytes, C.STAGES)
        load_weight(
            operands.w,
            unit.col * C.TILE_N,
            block * C.TILE_K,
            ring.ready.index(at),
            ring.b.index(at),
            C.DEPTH_FIRST,
        )
        load_rows(
            operands,
            ring.a.index(at),
            ring.ready.index(at),
            unit.first_row,
            block * C.TILE_K,
            rows,
            rank,
            slot,
            C,
        )
        turn += 1
    return turn, arrived


@gluon.jit
def load_sources(
    turn,
    arrived,
    operands,
    ring,
    peers,
    chunk,
    slot,
    rank,
    rows,
    k_blocks,
    unit,
    epoch,
    C: gl.constexpr,
):
    """``GATHER_K``: load a unit's K blocks, which go through parts by order of arrival; wait for
    each part once.

    ``chunk``: the one that the tile's rows are in, which the bits of ``arrived`` are about.
    """
    block_bytes: gl.constexpr = (C.TILE_M + C.TILE_N) * C.TILE_K * C.ITEMSIZE
    signals = peers.signals + chunk  # each source's first signal of this chunk
    blocks = k_blocks // C.WORLD_SIZE  # of a source
    for block in range(unit.k_begin, unit.k_end):
        step = block // blocks
        source = (rank + C.WORLD_SIZE - step) % C.WORLD_SIZE
        k = block % blocks * C.TILE_K
        at = claim(ring, turn, block_bytes, C.STAGES)
        if C.RAGGED:
            load_part(
                operands.w,
                unit.col * C.TILE_N,
                source,
                k,
                ring.ready.index(at),
                ring.b.index(at),
                C.DEPTH_FIRST,
            )
        else:
            load_weight(
                operands.w,
                unit.col * C.TILE_N,
                source * blocks * C.TILE_K + k,
                ring.ready.index(at),
                ring.b.index(at),
                C.DEPTH_FIRST,
            )
        if ((arrived >> source) & 1) == 0:
            signal.spin(
                signals,
                source,
                source,
                MAX_SLICES,
                epoch,
                unit.tile,
                peers.control,
                peers.report,
                C.NUM_SLICES,
                1,
                1,
                EXACT=not C.PUSH,
            )
            acquire(epoch)
            arrived = arrived | (1 << source)
        if step == 0:
            load_async(operands.x, [unit.first_row, k], ring.ready.index(at), ring.a.index(at))
        else:
            load_slot(
                operands.slot0,
                operands.slot1,
                slot,
                (step - 1) * rows + unit.first_row,
                k,
                ring.ready.index(at),
                ring.a.index(at),
            )
        turn += 1
    return turn, arrived


@gluon.jit
def load_partition(
    operands,
    ring,
    peers,
    trace,
    slot,
    rank,
    tiles,
    max_units,
    chunk_rows,
    num_partitions,
    C: gl.constexpr,
):
    """One warp: for each unit wait for its shards, then keep the ring full."""
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    record = C.NUM_SLICES + program * max_units
    turn = 0
    arrived = 0  # bit s: the shard of rank s is where it will be read
    if not C.SPANS:
        arrived = 1 << rank
    chunk = -1  # GATHER_K: the chunk of rows that the bits of arrived are about
    for part in range(0, tiles.num_segments):
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            tile += first_tile
            first_row, row_limit, col = place(tiles, tile)
            unit = Unit(tile, first_row, row_limit, col, k_begin, k_end)
            label(trace, record, tile + 1, C.TRACE)
            stamp(trace, record, 0, epoch, C.TRACE)
            if C.GATHER_K:
                if first_row // chunk_rows != chunk:
                    chunk = first_row // chunk_rows
                    arrived = 1 << rank
                turn, arrived = load_sources(
                    turn,
                    arrived,
                    operands,
                    ring,
                    peers,
                    chunk,
                    slot,
                    rank,
                    tiles.rows,
                    tiles.k_blocks,
                    unit,
                    epoch,
                    C,
                )
            else:
                turn, arrived = load_shards(
                    turn,
                    arrived,
                    operands,
                    ring,
                    peers,
                    trace,
                    record,
                    slot,
                    rank,
                    tiles.rows,
                    unit,
                    epoch,
                    C,
                )
            record += 1
    leave(peers, epoch, num_partitions)
