"""The epilogue of the Hopper ``matmul_reduce_scatter``: what *multiply* does with a tile it has finished, in Gluon.

A tile is handled in *pieces* of 64 columns, which bounds the registers an epilogue needs. See
``matmul_reduce_scatter_hopper.py`` for the partitions and ``matmul_reduce_scatter.py`` for the protocol.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tileweave.language.hopper import FAULT, add_parts, finish, part_offsets
from tileweave.language.hopper_marked import expected_zero, push_piece, push_result, take_marked

MAX_SLICES = gl.constexpr(32)
PIECE = gl.constexpr(64)  # columns that the epilogue handles at once: one swizzled row of shared memory
BOXES = gl.constexpr(2)  # pieces on their way from *multiply* to *store*


@gluon.jit
def finish_piece(
    piece, first_col, turn, sent, bias, residual, out, partials, a_ring, empty, ready, boxes, free, full, slots, slot_table,
    control, report, slot_offset, place_size, at, result_at, part_at, helpers, crew, tile, epoch,
    rank, rows, cols, first_row, row_limit, home, col,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, SPANS: gl.constexpr, ALL_REDUCE: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Columns [first_col, first_col + 64) of a tile that this program owns. Returns (ring turn, box turn)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    piece = gl.convert_layout(piece, layout)
    piece = add_parts(piece, first_col, partials, part_at, helpers, crew, TILE_M, TILE_N)
    if PUSH:
        row = first_row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
        if SPANS or home != rank:
            push_piece(
                piece, first_col, slot_table, slot_offset, place_size, at, first_row, row_limit, rows, rank, home,
                WORLD_SIZE, TILE_N, SPANS, dtype,
            )  # fmt: skip
        last_row = gl.minimum(first_row + TILE_M, row_limit) - 1
        if (first_row < rank * rows + rows) & (last_row >= rank * rows):
            offsets = part_offsets(piece, first_col, TILE_N)
            own = ((row >= rank * rows) & (row < rank * rows + rows) & (row < row_limit))[:, None] & (offsets >= 0)
            mine = (slots + slot_offset + at).to(gl.pointer_type(gl.int16), bitcast=True) + offsets
            piece = take_marked(
                piece, mine, place_size, own, 0, rank, tile, epoch, control, report, WORLD_SIZE - 1, MAX_SLICES, dtype
            )
            fault = gl.load(control + FAULT, volatile=True)
            piece = finish(piece, fault, bias, col + first_col, cols, HAS_BIAS)
            if HAS_RESIDUAL:
                index = col + first_col + gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
                place = row.to(gl.int64)[:, None] * cols + index[None, :]
                piece += gl.load(residual + place, mask=own & (index < cols)[None, :], other=0.0).to(gl.float32)
            if ALL_REDUCE:
                value = expected_zero(piece.to(dtype))
                push_result(
                    value, first_col, slot_table, slot_offset + (WORLD_SIZE - 1) * place_size + result_at, own, rank,
                    WORLD_SIZE, TILE_N,
                )  # fmt: skip
                last = gl.minimum(rank * rows + rows, row_limit)
                store_own(value, out, 0, first_row, rank * rows, last, col + first_col, cols)
            else:
                store_own(piece, out, rank * rows, first_row, rank * rows, rank * rows + rows, col + first_col, cols)
    else:
        if home == rank:
            for _ in gl.static_range(WORLD_SIZE - 1):
                index = turn % STAGES
                mbarrier.wait(ready.index(index), (turn // STAGES) & 1)
                piece += a_ring.index(index).load(layout).to(gl.float32)
                mbarrier.arrive(empty.index(index), count=1)
                turn += 1
            fault = gl.load(control + FAULT, volatile=True)
            piece = finish(piece, fault, bias, col + first_col, cols, HAS_BIAS)
        mbarrier.wait(free.index(sent % BOXES), ((sent // BOXES) & 1) ^ 1)
        boxes.index(sent % BOXES).store(piece.to(dtype))
        fence_async_shared()
        mbarrier.arrive(full.index(sent % BOXES), count=1)
        sent += 1
    return turn, sent


@gluon.jit
def store_own(piece, out, shift, first_row, row_begin, row_end, col, cols):
    """Rows [row_begin, row_end) of a piece, at rows ``shift`` less of ``out``."""
    rows: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, piece.type.layout)
    row = first_row + gl.arange(0, piece.shape[0], layout=rows)
    index = col + gl.arange(0, piece.shape[1], layout=columns)
    mask = ((row >= row_begin) & (row < row_end))[:, None] & (index < cols)[None, :]
    gl.store(out + (row - shift).to(gl.int64)[:, None] * cols + index[None, :], piece.to(out.dtype.element_ty), mask=mask)


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
def tile_place(
    first_row, home, rows, tile_rows, tile_cols, col, TILE_M: gl.constexpr, TILE_N: gl.constexpr, SPANS: gl.constexpr
):
    """Where a tile stands in a place of a slot, and in its result part, elements; see the Triton kernel's."""
    if SPANS:
        at = first_row // TILE_M * tile_cols + col
        result = at
    else:
        at = (first_row - home * rows) // TILE_M * tile_cols + col
        result = home * tile_rows * tile_cols + at
    return at.to(gl.int64) * (TILE_M * TILE_N), result.to(gl.int64) * (TILE_M * TILE_N)


@gluon.jit
def take_result(
    results, out, first_row, row_limit, col, rows, cols, rank, result_at, tile, epoch, control, report,
    WORLD_SIZE: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Second shot's end: the rows of a tile that peers own, from the result part of the slot to ``out``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PIECE, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    row = first_row + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(TILE_N // PIECE):
        zeros = gl.zeros((TILE_M, PIECE), gl.float32, layout)
        offsets = part_offsets(zeros, i * PIECE, TILE_N)
        pointers = (results + result_at).to(gl.pointer_type(gl.int16), bitcast=True) + offsets
        for step in gl.static_range(1, WORLD_SIZE):
            owner = (rank + step) % WORLD_SIZE
            begin, end = owner * rows, gl.minimum(owner * rows + rows, row_limit)
            if (first_row < end) & (first_row + TILE_M > begin):
                mask = ((row >= begin) & (row < end))[:, None] & (offsets >= 0)
                value = take_marked(
                    zeros, pointers, 0, mask, owner, WORLD_SIZE, tile, epoch, control, report, 1, MAX_SLICES, dtype
                )
                value = gl.where(gl.load(control + FAULT, volatile=True) != 0, float("nan"), value)
                store_own(expected_zero(value.to(dtype)), out, 0, first_row, begin, end, col + i * PIECE, cols)
