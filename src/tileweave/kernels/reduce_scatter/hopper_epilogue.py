"""The epilogue of the Hopper ``matmul_reduce_scatter``: what *multiply* and *store* do with a finished tile, in Gluon.

A tile is handled in *pieces* of 64 columns, which bounds the registers an epilogue needs. See
``hopper.py`` for the partitions and ``triton.py`` for the protocol.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tileweave.device.gluon.matmul import (
    add_parts,
    finish,
    part_offsets,
    part_range,
    place_out,
    share_of,
    unit_range,
)
from tileweave.device.gluon.meet import await_pushed, meet
from tileweave.device.gluon.pull import announce_chunk, end_of_pulls
from tileweave.device.gluon.self_signaling import push_piece, take_marked
from tileweave.device.gluon.signal import (
    FAULT,
    count_in,
    count_last,
    drain_tma_stores,
    leave,
    store_async,
)
from tileweave.device.triton.signal import MAX_SLICES

PIECE = gl.constexpr(
    64
)  # columns that the epilogue handles at once: one swizzled row of shared memory
BOXES = gl.constexpr(2)  # pieces on their way from *multiply* to *store*


class Boxes(NamedTuple):
    """Pieces in shared memory on their way from *multiply* to *store*; barriers say which is ``free``, and which ``full``.

    ``sent`` (*multiply*) and ``turn`` (*store*) count those that went through: the *box turn*.
    """

    pieces: Any
    free: Any
    full: Any


class Slots(NamedTuple):
    """Where pushed tiles go: a slot of this rank, those of all, the call's offset in each, elements from place to place."""

    own: Any
    table: Any
    offset: Any
    place_size: Any


class Spot(NamedTuple):
    """A finished tile: its number, where it stands in a place, its rows and first column, and who owns the first row."""

    tile: Any
    at: Any
    first_row: Any
    row_limit: Any
    col: Any
    home: Any


@gluon.jit
def store_partition(
    out, out_desc, staging_desc, boxes, counters, signal_table, signals, control, report, slot,
    tiles, num_chunks, out_size, num_partitions,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, EXCHANGE: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """One warp: pieces of peers' tiles from shared memory to ``staging``, counted in by tiles; if ``WHOLE``, own ones to out.

    That of the last program ends the call: it waits for [pushed] and puts the counters back to zero. A push has none of this.
    ``EXCHANGE``: ``staging_desc`` is of an own slot; who completes a chunk announces it, and the last program ends the pulls.
    """
    PIECES: gl.constexpr = TILE_N // PIECE
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    rank, rows, chunk_rows, tile_rows = tiles.rank, tiles.rows, tiles.chunk_rows, tiles.tile_rows
    epoch = gl.load(control, volatile=True)
    if not PUSH:
        turn = 0
        share = share_of(tiles, program, num_programs, tiles.num_tiles)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            owner, helpers = part_range(share, tile)
            first_row, row_limit, col = place_out(tiles, tile)
            home = first_row // rows
            stores = program == owner
            if not WHOLE:
                stores = stores & (home != rank)
            if stores:
                row = first_row - home * rows
                place = home - (home > rank).to(gl.int32)
                for piece in gl.static_range(PIECES):
                    mbarrier.wait(boxes.full.index(turn % BOXES), (turn // BOXES) & 1)
                    if home == rank:
                        store_async(
                            out_desc,
                            [row, col * TILE_N + piece * PIECE],
                            boxes.pieces.index(turn % BOXES),
                        )
                    else:
                        store_async(
                            staging_desc, [place * tile_rows * TILE_M + row, col * TILE_N + piece * PIECE],
                            boxes.pieces.index(turn % BOXES),
                        )  # fmt: skip
                    if piece > 0:
                        tma.store_wait(1)
                        mbarrier.arrive(boxes.free.index((turn - 1) % BOXES), count=1)
                    turn += 1
                tma.store_wait(0)
                mbarrier.arrive(boxes.free.index((turn - 1) % BOXES), count=1)
                if home != rank:
                    drain_tma_stores(epoch)
                    chunk = row // TILE_M // chunk_rows
                    counter = counters + num_programs + place * MAX_SLICES + chunk
                    if EXCHANGE:
                        if count_last(
                            counter,
                            gl.minimum(tile_rows - chunk * chunk_rows, chunk_rows)
                            * tiles.tile_cols,
                        ):
                            announce_chunk(signal_table, home, rank, slot, chunk, epoch, WORLD_SIZE)
                    else:
                        if tile == 0:
                            meet(
                                signal_table,
                                signals,
                                rank,
                                epoch,
                                tile,
                                control,
                                report,
                                WORLD_SIZE,
                                1,
                            )
                        count_in(counter)
        drain_tma_stores(epoch)
        if EXCHANGE:
            if program == num_programs - 1:
                end_of_pulls(
                    signals,
                    out,
                    slot,
                    num_chunks,
                    rank,
                    epoch,
                    out_size,
                    control,
                    report,
                    WORLD_SIZE,
                )
        elif (
            program == num_programs - 1
        ):  # the copy engine reads the epoch word and the counters until it has pushed
            await_pushed(signals, epoch, control, report, WORLD_SIZE, 1)
            word = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            for i in gl.static_range(WORLD_SIZE - 1):
                gl.store(counters + num_programs + i * MAX_SLICES + word, word * 0)
    leave(control, epoch, num_partitions)


@gluon.jit
def add_piece(piece, turn, ring, STAGES: gl.constexpr):
    """``piece`` plus what a peer sent for it, from the next buffer of the ring. Returns (piece, ring turn)."""
    index = turn % STAGES
    mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
    piece += ring.a.index(index).load(piece.type.layout).to(gl.float32)
    mbarrier.arrive(ring.empty.index(index), count=1)
    return piece, turn + 1


@gluon.jit
def add_arrived(
    pieces, turn, peers, ring, helped,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile's pieces, plus what helpers made of it, plus what ``peers`` peers sent, all of one and then of the next.

    Returns (pieces, ring turn).
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    summed = ()
    for i in gl.static_range(TILE_N // PIECE):
        summed = summed + (
            add_parts(gl.convert_layout(pieces[i], layout), i * PIECE, helped, TILE_M, TILE_N),
        )
    for _ in range(0, peers):
        before = summed
        summed = ()
        for i in gl.static_range(TILE_N // PIECE):
            piece, turn = add_piece(before[i], turn, ring, STAGES)
            summed = summed + (piece,)
    return summed, turn


@gluon.jit
def hand_over(piece, sent, boxes, dtype: gl.constexpr):
    """Put a piece where *store* takes it. Returns the box turn."""
    mbarrier.wait(boxes.free.index(sent % BOXES), ((sent // BOXES) & 1) ^ 1)
    boxes.pieces.index(sent % BOXES).store(piece.to(dtype))
    fence_async_shared()
    mbarrier.arrive(boxes.full.index(sent % BOXES), count=1)
    return sent + 1


@gluon.jit
def finish_piece(
    piece, first_col, sent, spot, helped, bias, out, boxes, slots, tiles, cols, epoch, control, report,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, SPANS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Columns [first_col, first_col + 64) of a tile that this program owns. Returns the box turn."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    dtype: gl.constexpr = out.dtype.element_ty
    begin, end = tiles.rank * tiles.rows, tiles.rank * tiles.rows + tiles.rows  # own rows
    piece = gl.convert_layout(piece, layout)
    piece = add_parts(piece, first_col, helped, TILE_M, TILE_N)
    if PUSH:
        row = spot.first_row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
        if SPANS or spot.home != tiles.rank:
            push_piece(
                piece, first_col, slots.table, slots.offset, slots.place_size, spot.at, spot.first_row, spot.row_limit,
                tiles.rows, tiles.rank, spot.home, WORLD_SIZE, TILE_N, SPANS, dtype,
            )  # fmt: skip
        last_row = gl.minimum(spot.first_row + TILE_M, spot.row_limit) - 1
        if (spot.first_row < end) & (last_row >= begin):
            offsets = part_offsets(piece, first_col, TILE_N)
            own = ((row >= begin) & (row < end) & (row < spot.row_limit))[:, None] & (offsets >= 0)
            mine = (slots.own + slots.offset + spot.at).to(
                gl.pointer_type(gl.int16), bitcast=True
            ) + offsets
            piece = take_marked(
                piece, mine, slots.place_size, own, 0, tiles.rank, spot.tile, epoch, control, report,
                WORLD_SIZE - 1, MAX_SLICES, dtype,
            )  # fmt: skip
            fault = gl.load(control + FAULT, volatile=True)
            piece = finish(piece, fault, bias, spot.col + first_col, cols, HAS_BIAS)
            store_own(piece, out, begin, spot.first_row, begin, end, spot.col + first_col, cols)
    else:
        if spot.home == tiles.rank:
            fault = gl.load(control + FAULT, volatile=True)
            piece = finish(piece, fault, bias, spot.col + first_col, cols, HAS_BIAS)
        if WHOLE:
            sent = hand_over(piece, sent, boxes, dtype)
        elif spot.home == tiles.rank:
            store_own(piece, out, begin, spot.first_row, begin, end, spot.col + first_col, cols)
        else:
            sent = hand_over(piece, sent, boxes, dtype)
    return sent


@gluon.jit
def store_own(piece, out, shift, first_row, row_begin, row_end, col, cols):
    """Store rows [row_begin, row_end) of a piece; row r goes to row r - ``shift`` of ``out``."""
    rows: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, piece.type.layout)
    row = first_row + gl.arange(0, piece.shape[0], layout=rows)
    index = col + gl.arange(0, piece.shape[1], layout=columns)
    mask = ((row >= row_begin) & (row < row_end))[:, None] & (index < cols)[None, :]
    gl.store(
        out + (row - shift).to(gl.int64)[:, None] * cols + index[None, :],
        piece.to(out.dtype.element_ty),
        mask=mask,
    )


@gluon.jit
def halves(tile):
    """A tile's left and right columns."""
    return tile.reshape((tile.shape[0], 2, tile.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def pieces_of(tile, TILE_N: gl.constexpr):
    """A tile's columns, ``PIECE`` at a time, as a tuple."""
    if TILE_N == 256:
        left, right = halves(tile)
        first, second = halves(left)
        third, fourth = halves(right)
        return first, second, third, fourth
    elif TILE_N == 128:
        left, right = halves(tile)
        return left, right
    else:
        return (tile,)


@gluon.jit
def tile_place(first_row, home, tiles, col, TILE_N: gl.constexpr, SPANS: gl.constexpr):
    """Where a tile stands in a place of a slot, elements; see the Triton kernel's."""
    at = (
        first_row if SPANS else first_row - home * tiles.rows
    ) // tiles.tile_m * tiles.tile_cols + col
    return at.to(gl.int64) * (tiles.tile_m * TILE_N)


@gluon.jit
def finish_part(
    piece, first_col, sent, spot, helped, bias, out, boxes, slots, tiles, cols, epoch, control, report,
    part_rows, w_step, out_pitch, out_step,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """As :func:`finish_piece`, of an exchange (``kernels/all_to_all/scatter_triton.py``): rows of the part of ``spot.home``.

    ``PUSH``: a peer's piece goes to its slot; behind an own one, what peers sent for the same place of their parts is taken out
    of the slot and stored. ``part_rows``: rows that a part really has; ``w_step``, ``out_pitch``, ``out_step``: as there.
    Returns the box turn.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    dtype: gl.constexpr = out.dtype.element_ty
    row = spot.first_row - spot.home * tiles.rows
    col = spot.col + first_col
    piece = gl.convert_layout(piece, layout)
    piece = add_parts(piece, first_col, helped, TILE_M, TILE_N)
    fault = gl.load(control + FAULT, volatile=True)
    piece = finish(piece, fault, bias + spot.home * w_step, col, cols, HAS_BIAS)
    if PUSH:
        if spot.home != tiles.rank:
            push_piece(
                piece, first_col, slots.table, slots.offset, slots.place_size, spot.at, row, part_rows, part_rows, tiles.rank,
                spot.home, WORLD_SIZE, TILE_N, False, dtype,
            )  # fmt: skip
        else:
            store_part(
                piece,
                out + tiles.rank.to(gl.int64) * out_step,
                row,
                part_rows,
                col,
                cols,
                out_pitch,
            )
            zeros = gl.zeros((TILE_M, PIECE), gl.float32, layout)
            offsets = part_offsets(zeros, first_col, TILE_N)
            exists = (row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout)) < part_rows)[
                :, None
            ] & (offsets >= 0)
            for step in gl.static_range(1, WORLD_SIZE):
                source = (tiles.rank + WORLD_SIZE - step) % WORLD_SIZE
                place = source - (source > tiles.rank).to(gl.int32)
                theirs = (
                    slots.own + slots.offset + place.to(gl.int64) * slots.place_size + spot.at
                ).to(gl.pointer_type(gl.int16), bitcast=True)
                value = take_marked(
                    zeros, theirs + offsets, 0, exists, source, WORLD_SIZE, spot.tile, epoch, control, report,
                    1, MAX_SLICES, dtype,
                )  # fmt: skip
                value = gl.where(gl.load(control + FAULT, volatile=True) != 0, float("nan"), value)
                store_part(
                    value,
                    out + source.to(gl.int64) * out_step,
                    row,
                    part_rows,
                    col,
                    cols,
                    out_pitch,
                )
    else:
        sent = hand_over(piece, sent, boxes, dtype)
    return sent


@gluon.jit
def store_part(piece, target, first_row, rows, col, cols, pitch):
    """Store a piece of a part [rows, cols], whose rows stand ``pitch`` apart."""
    r: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    c: gl.constexpr = gl.SliceLayout(0, piece.type.layout)
    row = first_row + gl.arange(0, piece.shape[0], layout=r)
    index = col + gl.arange(0, piece.shape[1], layout=c)
    mask = (row < rows)[:, None] & (index < cols)[None, :]
    gl.store(
        target + row.to(gl.int64)[:, None] * pitch + index[None, :],
        piece.to(target.dtype.element_ty),
        mask=mask,
    )
