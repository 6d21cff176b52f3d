"""Data that announces itself, in Gluon: the twin of ``marked.py``; read that first.

A tile stands in a slot as its warps hold it, in 8 x 8 blocks (:func:`tileweave.language.hopper.part_offsets`), so that
registers go to a peer, and come from a slot, in whole 128-byte lines.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.language.hopper import TIMEOUT_US, clock, expire, part_offsets

MINUS_ZERO = gl.constexpr(-(2**15))


@gluon.jit
def put_marked(pointers, value, mask):
    """Store ``value`` (2 bytes an element) where a peer polls for it; a zero goes as minus zero. ``pointers``: int16."""
    bits = value.to(gl.int16, bitcast=True)
    gl.store(pointers, gl.where(bits == 0, MINUS_ZERO, bits), mask=mask)


@gluon.jit
def expected_zero(value):
    """``value`` with plus zero for minus zero."""
    return gl.where(value == 0.0, 0.0, value.to(gl.float32)).to(value.dtype)


@gluon.jit
def _sum_marked(acc, pointers, stride, mask, COUNT: gl.constexpr, dtype: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    missing = gl.zeros(acc.shape, gl.int32, layout)
    for i in gl.static_range(COUNT):
        at = gl.multiple_of(pointers + i * stride, [1, 16])
        bits = gl.load(at, mask=mask, other=MINUS_ZERO, volatile=True)
        missing = gl.where(bits == 0, 1, missing)
        acc += bits.to(dtype, bitcast=True).to(gl.float32)
    return acc, gl.max(gl.max(missing, axis=1), axis=0)


@gluon.jit
def take_marked(
    acc, pointers, stride, mask, first_peer, skip, unit, epoch, control, report,
    COUNT: gl.constexpr, SIGNALS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the parts at ``pointers + i * stride``, i = 0 .. COUNT-1, in that order; see ``marked.take_marked``."""
    total, missing = _sum_marked(acc, pointers, stride, mask, COUNT, dtype)
    if missing > 0:
        limit = gl.load(control + TIMEOUT_US, volatile=True).to(gl.int64) * 1000
        started = clock(missing)
        while (missing > 0) & (clock(missing) - started <= limit):
            total, missing = _sum_marked(acc, pointers, stride, mask, COUNT, dtype)
        if missing > 0:
            late = first_peer
            for i in gl.static_range(COUNT):
                bits = gl.load(pointers + i * stride, mask=mask, other=MINUS_ZERO, volatile=True)
                if gl.max(gl.max(gl.where(bits == 0, 1, 0), axis=1), axis=0) > 0:
                    late = first_peer + i + (first_peer + i >= skip).to(gl.int32)
            expire(control, report, late * SIGNALS, unit, epoch, epoch - 1)
    layout: gl.constexpr = acc.type.layout
    zeros = gl.zeros(acc.shape, gl.int16, layout)
    for i in gl.static_range(COUNT):
        gl.store(gl.multiple_of(pointers + i * stride, [1, 16]), zeros, mask=mask)
    return total


@gluon.jit
def piece_offsets(row, col, first_col, TILE_M: gl.constexpr, PIECE: gl.constexpr):
    """Where rows and columns of a tile's piece stand in a slot: piece by piece, each row by row. ``col``: in the piece."""
    return (row * PIECE + first_col * TILE_M)[:, None] + col[None, :]


@gluon.jit
def push_box(
    box, first_col, slot_table, offset, first_row, row_begin, row_end, peer,
    TILE_M: gl.constexpr, PIECE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows [row_begin, row_end) (global) of a piece, from shared memory to element ``offset`` of ``peer``'s buffer, marked.

    A few rows at a time: this partition has few registers.
    """
    STEP: gl.constexpr = 16 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    base = (gl.load(slot_table + peer) + 2 * offset).to(gl.pointer_type(gl.int16), bitcast=True)
    col = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    for start in gl.static_range(0, TILE_M, STEP):
        row = start + gl.arange(0, STEP, layout=gl.SliceLayout(1, layout))
        inside = (first_row + row >= row_begin) & (first_row + row < row_end)
        value = box.slice(start, STEP, dim=0).load(layout)
        # the hint must stand where the pointers are made, or inlining loses it, and stores are of single elements
        pointers = gl.multiple_of(base + piece_offsets(row, col, first_col, TILE_M, PIECE), [1, 16])
        put_marked(pointers, value, inside[:, None])
