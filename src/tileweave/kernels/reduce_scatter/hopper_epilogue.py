"""The epilogue of the Hopper ``matmul_reduce_scatter``: what *multiply* and *store* do with a
finished tile, in Gluon.

A tile is handled in *pieces* of 64 columns, which bounds the registers an epilogue needs. See
``hopper.py`` for the partitions and ``triton.py`` for the protocol.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tileweave.device.gluon import pull
from tileweave.device.gluon.matmul import (
    BlockScales,
    add_parts,
    finish,
    part_offsets,
    part_range,
    place_out,
    share_of,
    unit_range,
)
from tileweave.device.gluon.peers import (
    await_pushed,
    faulted,
    leave,
    load_epoch,
    meet,
    take_marked,
)
from tileweave.device.gluon.pull import announce_chunk, end_of_pulls
from tileweave.device.gluon.self_signaling import push_piece
from tileweave.device.gluon.signal import (
    acquire,
    count_in,
    count_last,
    drain_tma_stores,
    notify_all,
    spin,
    store_async,
)
from tileweave.device.triton.signal import MAX_SLICES, REDUCED

# Columns that the epilogue handles at once: one swizzled row of shared memory.
PIECE = gl.constexpr(64)
BOXES = gl.constexpr(2)  # pieces on their way from *multiply* to *store*
# Triton 3.6 has another name for it.
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Sizes(NamedTuple):
    """Numbers that belong to the shape; from ``out_size`` on only of an exchange, otherwise 0.

    place_size : elements of a slot for one peer.

    cols : of ``out``, or of a part.

    height : rows of ``x``; 0 of an exchange.


    out_size : elements of the result.

    x_step, w_step, out_pitch, out_step : as in ``all_to_all/scatter_triton.py:Sizes``.
    """

    place_size: Any
    cols: Any
    height: Any
    out_size: Any = 0
    x_step: Any = 0
    w_step: Any = 0
    out_pitch: Any = 0
    out_step: Any = 0


class Boxes(NamedTuple):
    """Pieces in shared memory on their way from *multiply* to *store*; barriers say which is
    ``free``, and which ``full``.

    ``sent`` (*multiply*) and ``turn`` (*store*) count the pieces that went through: the *box turn*.
    """

    pieces: Any
    free: Any
    full: Any


class Spot(NamedTuple):
    """A finished tile.

    tile : its number.

    at : its first element in a rank's part of a slot.

    first_row, row_limit : its rows.

    col : its first column.

    home : the rank that owns the first row.

    of_rows : scales of its rows (``SCALED`` 1); else anything.
    """

    tile: Any
    at: Any
    first_row: Any
    row_limit: Any
    col: Any
    home: Any
    of_rows: Any


class Scales(NamedTuple):
    """Scales of FP8 operands. ``cols``: with ``SCALED`` 1, shared memory for those of the columns
    of a tile [TILE_N]."""

    x: Any
    w: Any
    cols: Any


@gluon.jit
def store_partition(
    tensors,
    out_desc,
    staging_desc,
    mirrors,
    boxes,
    peers,
    slot,
    tiles,
    num_chunks,
    sizes,
    num_partitions,
    C: gl.constexpr,
):
    """One warp: store pieces of peers' tiles from shared memory in ``staging`` and count the tiles;
    if ``WHOLE``, store pieces of own tiles in ``out``, and with ``GATHER`` in the mirrors of peers,
    where the program that completes a chunk of own tiles announces it.

    The warp of the last program ends the call: it waits for [pushed] and resets the counters to
    zero. A push has none of this. ``EXCHANGE``: ``staging_desc`` is of an own slot; the program
    that completes a chunk announces it, and the last program ends the pulls.
    """
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    PIECES: gl.constexpr = TILE_N // PIECE
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    rank, rows, chunk_rows, tile_rows = tiles.rank, tiles.rows, tiles.chunk_rows, tiles.tile_rows
    epoch = load_epoch(peers)
    if not C.PUSH:
        turn = 0
        share = share_of(tiles, program, num_programs, tiles.num_tiles)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            owner, helpers = part_range(share, tile)
            first_row, row_limit, col = place_out(tiles, tile)
            home = first_row // rows
            stores = program == owner
            if not C.WHOLE:
                stores = stores & (home != rank)
            if stores:
                row = first_row - home * rows
                place = home - (home > rank).to(gl.int32)
                sends = home == rank
                if C.GATHER:
                    if sends:
                        sends = not pull.faulted(peers)
                for piece in gl.static_range(PIECES):
                    mbarrier.wait(boxes.full.index(turn % BOXES), (turn // BOXES) & 1)
                    if home == rank:
                        store_async(
                            out_desc,
                            [row, col * TILE_N + piece * PIECE],
                            boxes.pieces.index(turn % BOXES),
                        )
                        if C.GATHER:
                            if sends:
                                for step in gl.static_range(WORLD_SIZE - 1):
                                    store_async(
                                        mirrors[step],
                                        [row, col * TILE_N + piece * PIECE],
                                        boxes.pieces.index(turn % BOXES),
                                    )
                    else:
                        store_async(
                            staging_desc,
                            [place * tile_rows * TILE_M + row, col * TILE_N + piece * PIECE],
                            boxes.pieces.index(turn % BOXES),
                        )
                    if piece > 0:
                        # all but the stores of this piece
                        if C.GATHER and sends:
                            tma.store_wait(WORLD_SIZE)
                        else:
                            tma.store_wait(1)
                        mbarrier.arrive(boxes.free.index((turn - 1) % BOXES), count=1)
                    turn += 1
                tma.store_wait(0)
                mbarrier.arrive(boxes.free.index((turn - 1) % BOXES), count=1)
                if home != rank:
                    drain_tma_stores(epoch)
                    chunk = row // TILE_M // chunk_rows
                    counter = peers.counters + num_programs + place * MAX_SLICES + chunk
                    if C.EXCHANGE:
                        chunk_height = gl.minimum(tile_rows - chunk * chunk_rows, chunk_rows)
                        if count_last(counter, chunk_height * tiles.tile_cols):
                            announce_chunk(peers, home, rank, slot, chunk, epoch, WORLD_SIZE)
                    else:
                        if tile == 0:
                            meet(peers, rank, epoch, tile, WORLD_SIZE, 1)
                        count_in(counter)
                elif C.GATHER:
                    drain_tma_stores(epoch)
                    chunk = row // TILE_M // chunk_rows
                    counter = peers.counters + num_programs + (WORLD_SIZE - 1) * MAX_SLICES + chunk
                    chunk_height = gl.minimum(tile_rows - chunk * chunk_rows, chunk_rows)
                    if count_last(counter, chunk_height * tiles.tile_cols):
                        if not pull.faulted(peers):
                            index = rank * MAX_SLICES + REDUCED + chunk
                            notify_all(peers.signal_table, index, rank, epoch, WORLD_SIZE, False, 1)
        drain_tma_stores(epoch)
        if C.EXCHANGE:
            if program == num_programs - 1:
                end_of_pulls(
                    peers, tensors.out, sizes.out_size, slot, num_chunks, rank, epoch, WORLD_SIZE
                )
        if not C.EXCHANGE:
            # The copy engine reads the epoch and the counters until it has pushed.
            if program == num_programs - 1:
                await_pushed(peers, epoch, WORLD_SIZE, 1)
                word = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
                for i in gl.static_range(WORLD_SIZE - 1):
                    gl.store(peers.counters + num_programs + i * MAX_SLICES + word, word * 0)
    leave(peers, epoch, num_partitions)


@gluon.jit
def await_rows(peers, chunk, first, last, epoch, C: gl.constexpr):
    """Poll until ranks [first, last] have stored this chunk of their rows in the mirror."""
    spin(
        peers.signals + REDUCED + chunk,
        first,
        last,
        MAX_SLICES,
        epoch,
        -1,
        peers.control,
        peers.report,
        1,
        8,
        C.WARPS,
    )


@gluon.jit
def take_gathered(out, peers, slot_offset, tiles, sizes, num_chunks, epoch, C: gl.constexpr):
    """The warpgroups: copy the peers' rows from the mirror into the result; see
    ``triton.take_gathered``."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    BLOCK: gl.constexpr = 32 * C.WARPS * 32
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [C.WARPS], [0])
    rank, rows, cols = tiles.rank, tiles.rows, sizes.cols
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    whole = out - rank.to(gl.int64) * rows * cols
    mirror = peers.slots + slot_offset + (WORLD_SIZE - 1) * sizes.place_size
    height = tiles.chunk_rows * C.TILE_M
    for chunk in range(0, num_chunks):
        if rank > 0:
            await_rows(peers, chunk, 0, rank - 1, epoch, C)
        if rank < WORLD_SIZE - 1:
            await_rows(peers, chunk, rank + 1, WORLD_SIZE - 1, epoch, C)
        acquire(epoch)
        fault = faulted(peers) != 0
        for step in range(1, WORLD_SIZE):
            source = (rank + WORLD_SIZE - step) % WORLD_SIZE
            there = gl.minimum(rows, sizes.height - source * rows)  # the last rank may have fewer
            first = chunk * height
            # TMA stored these rows, so their length is a multiple of 16 bytes
            count = gl.multiple_of((gl.minimum(first + height, there) - first) * cols, 8)
            at = gl.multiple_of((source * rows + first).to(gl.int64) * cols, 8)
            for begin in range(program * BLOCK, count, num_programs * BLOCK):
                index = begin + gl.arange(0, BLOCK, layout=layout)
                value = gl.load(mirror + at + index, mask=index < count, other=0.0)
                value = gl.where(fault, float("nan"), value)
                gl.store(whole + at + index, value, mask=index < count)


@gluon.jit
def piece_buffer(ring, index, dtype: gl.constexpr, C: gl.constexpr):
    """Buffer ``index`` of the ring as what a peer sent: a piece of 16-bit numbers. 128 FP8 of K
    have the bytes of its 64 columns."""
    buffer = ring.a.index(index)
    if C.ITEMSIZE == 2:
        return buffer
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.TILE_M, PIECE], dtype)
        if REINTERPRET:
            return buffer.reinterpret(dtype, [C.TILE_M, PIECE], layout)
        else:
            return buffer._reinterpret(dtype, [C.TILE_M, PIECE], layout)


@gluon.jit
def block_scales(scales, tiles, height, first_row, row_limit, col):
    """Where the scales of a tile of FP8 blocks are: those of x are [K/128, M]."""
    of_cols = scales.w + (col // 128) * tiles.k_blocks
    return BlockScales(scales.x, first_row, row_limit, height, of_cols)


@gluon.jit
def load_scales(scales, first_row, row_limit, col, cols, C: gl.constexpr):
    """Scales of a tile's rows, as its pieces need them, and of its columns, a few per thread.

    They are asked for before the tile is multiplied. Each thread needs all columns, for which it
    has no registers: shared memory has them in between.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    r = first_row + gl.arange(0, C.TILE_M, layout=gl.SliceLayout(1, layout))
    c = col + gl.arange(0, C.TILE_N, layout=gl.BlockedLayout([1], [32], [C.WARPS], [0]))
    of_rows = gl.load(scales.x + r * C.X_STEP, mask=r < row_limit, other=0.0)
    return of_rows, gl.load(scales.w + c * C.W_STEP, mask=c < cols, other=0.0)


@gluon.jit
def scale_piece(piece, first_col: gl.constexpr, spot, scales, C: gl.constexpr):
    """A piece of FP8 products, whose first column in its tile this is, times scales of rows."""
    if C.SCALED == 1:
        columns: gl.constexpr = gl.SliceLayout(0, piece.type.layout)
        of_cols = scales.cols.slice(first_col, PIECE).load(columns)
        return piece * spot.of_rows[:, None] * of_cols[None, :]
    else:
        return piece


@gluon.jit
def add_piece(piece, turn, ring, dtype: gl.constexpr, C: gl.constexpr):
    """``piece`` plus what a peer sent for it, from the next buffer of the ring.

    Returns (piece, ring turn).
    """
    STAGES: gl.constexpr = C.STAGES
    index = turn % STAGES
    mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
    piece += piece_buffer(ring, index, dtype, C).load(piece.type.layout).to(gl.float32)
    mbarrier.arrive(ring.empty.index(index), count=1)
    return piece, turn + 1


@gluon.jit
def add_arrived(pieces, turn, num_peers, ring, helped, spot, out, scales, C: gl.constexpr):
    """A tile's pieces, plus what helpers made of it, times scales if they have some, plus what
    ``num_peers`` peers sent, all of one peer and then of the next.

    Returns (pieces, ring turn).
    """
    WARPS: gl.constexpr = C.WARPS
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    summed = ()
    for i in gl.static_range(TILE_N // PIECE):
        piece = gl.convert_layout(pieces[i], layout)
        piece = add_parts(piece, i * PIECE, helped, TILE_M, TILE_N)
        summed = summed + (scale_piece(piece, i * PIECE, spot, scales, C),)
    for _ in range(0, num_peers):
        before = summed
        summed = ()
        for i in gl.static_range(TILE_N // PIECE):
            piece, turn = add_piece(before[i], turn, ring, out.dtype.element_ty, C)
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
    piece,
    first_col,
    sent,
    spot,
    helped,
    tensors,
    scales,
    boxes,
    peers,
    slot_offset,
    tiles,
    sizes,
    epoch,
    C: gl.constexpr,
):
    """Columns [first_col, first_col + 64) of a tile that this program owns.

    Returns the box turn.
    """
    WARPS: gl.constexpr = C.WARPS
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    bias, out, cols = tensors.bias, tensors.out, sizes.cols
    dtype: gl.constexpr = out.dtype.element_ty
    begin, end = tiles.rank * tiles.rows, tiles.rank * tiles.rows + tiles.rows  # own rows
    piece = gl.convert_layout(piece, layout)
    piece = add_parts(piece, first_col, helped, TILE_M, TILE_N)
    if C.PUSH:
        piece = scale_piece(piece, first_col, spot, scales, C)
        row = spot.first_row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
        if C.SPANS or spot.home != tiles.rank:
            push_piece(
                piece,
                first_col,
                peers,
                slot_offset,
                sizes.place_size,
                spot.at,
                spot.first_row,
                spot.row_limit,
                tiles.rows,
                tiles.rank,
                spot.home,
                WORLD_SIZE,
                TILE_N,
                C.SPANS,
                dtype,
            )
        last_row = gl.minimum(spot.first_row + TILE_M, spot.row_limit) - 1
        if (spot.first_row < end) & (last_row >= begin):
            offsets = part_offsets(piece, first_col, TILE_N)
            own = ((row >= begin) & (row < end) & (row < spot.row_limit))[:, None] & (offsets >= 0)
            slots = (peers.slots + slot_offset + spot.at).to(
                gl.pointer_type(gl.int16), bitcast=True
            )
            piece = take_marked(
                peers,
                piece,
                slots + offsets,
                sizes.place_size,
                own,
                0,
                tiles.rank,
                spot.tile,
                epoch,
                WORLD_SIZE - 1,
                dtype,
            )
            fault = faulted(peers)
            piece = finish(piece, fault, bias, spot.col + first_col, cols, C.HAS_BIAS)
            store_own(piece, out, begin, spot.first_row, begin, end, spot.col + first_col, cols)
    else:
        if spot.home == tiles.rank:
            fault = faulted(peers)
            piece = finish(piece, fault, bias, spot.col + first_col, cols, C.HAS_BIAS)
        if C.WHOLE:
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
    """The first element of a tile in a rank's part of a slot; see ``triton.tile_place``."""
    row = first_row if SPANS else first_row - home * tiles.rows
    at = row // tiles.tile_m * tiles.tile_cols + col
    return at.to(gl.int64) * (tiles.tile_m * TILE_N)


@gluon.jit
def finish_part(
    piece,
    first_col,
    sent,
    spot,
    helped,
    tensors,
    boxes,
    peers,
    slot_offset,
    tiles,
    sizes,
    part_rows,
    epoch,
    C: gl.constexpr,
):
    """As :func:`finish_piece`, of an exchange (``kernels/all_to_all/scatter_triton.py``): rows of
    the part of ``spot.home``.

    ``PUSH``: a peer's piece goes to its slot; after an own one, what peers sent for the same
    position in their parts is taken out of the slot and stored. ``part_rows``: rows that a part
    really has. Returns the box turn.
    """
    WARPS: gl.constexpr = C.WARPS
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16]
    )
    out, cols = tensors.out, sizes.cols
    dtype: gl.constexpr = out.dtype.element_ty
    row = spot.first_row - spot.home * tiles.rows
    col = spot.col + first_col
    piece = gl.convert_layout(piece, layout)
    piece = add_parts(piece, first_col, helped, TILE_M, TILE_N)
    fault = faulted(peers)
    piece = finish(piece, fault, tensors.bias + spot.home * sizes.w_step, col, cols, C.HAS_BIAS)
    if C.PUSH:
        if spot.home != tiles.rank:
            push_piece(
                piece,
                first_col,
                peers,
                slot_offset,
                sizes.place_size,
                spot.at,
                row,
                part_rows,
                part_rows,
                tiles.rank,
                spot.home,
                WORLD_SIZE,
                TILE_N,
                False,
                dtype,
            )
        else:
            target = out + tiles.rank.to(gl.int64) * sizes.out_step
            store_part(piece, target, row, part_rows, col, cols, sizes.out_pitch)
            zeros = gl.zeros((TILE_M, PIECE), gl.float32, layout)
            offsets = part_offsets(zeros, first_col, TILE_N)
            part_row = row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
            exists = (part_row < part_rows)[:, None] & (offsets >= 0)
            for step in gl.static_range(1, WORLD_SIZE):
                source = (tiles.rank + WORLD_SIZE - step) % WORLD_SIZE
                place = source - (source > tiles.rank).to(gl.int32)
                theirs = peers.slots + slot_offset + place.to(gl.int64) * sizes.place_size + spot.at
                theirs = theirs.to(gl.pointer_type(gl.int16), bitcast=True)
                value = take_marked(
                    peers,
                    zeros,
                    theirs + offsets,
                    0,
                    exists,
                    source,
                    WORLD_SIZE,
                    spot.tile,
                    epoch,
                    1,
                    dtype,
                )
                value = gl.where(faulted(peers) != 0, float("nan"), value)
                target = out + source.to(gl.int64) * sizes.out_step
                store_part(value, target, row, part_rows, col, cols, sizes.out_pitch)
    else:
        sent = hand_over(piece, sent, boxes, dtype)
    return sent


@gluon.jit
def store_part(piece, target, first_row, rows, col, cols, pitch):
    """Store a piece of a part [rows, cols], whose rows are ``pitch`` elements apart."""
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
