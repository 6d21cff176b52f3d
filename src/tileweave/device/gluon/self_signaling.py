"""Data that announces itself, in Gluon: the twin of ``device/triton/self_signaling.py``; read that first.

A tile stands in a slot as its warps hold it, in 8 x 8 blocks (``hopper_matmul.part_offsets``), so that registers go to a
peer, and come from a slot, in whole 128-byte lines.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import part_offsets
from tileweave.device.gluon.signal import TIMEOUT_US, clock, expire

MINUS_ZERO = gl.constexpr(-(2**15))


@gluon.jit
def put_marked(pointers, value, mask):
    """Store ``value`` (2 bytes an element) where a peer polls for it; a zero goes as minus zero. ``pointers``: int16.

    ``gl.multiple_of`` must stand where the pointers are made: inlining loses it here, and stores would be of single elements.
    """
    bits = value.to(gl.int16, bitcast=True)
    gl.store(pointers, gl.where(bits == 0, MINUS_ZERO, bits), mask=mask)


@gluon.jit
def _sum_marked(acc, pointers, stride, mask, overdue, COUNT: gl.constexpr, dtype: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    missing = gl.zeros(acc.shape, gl.int32, layout) + 2 * overdue
    for i in gl.static_range(COUNT):
        at = gl.multiple_of(pointers + i * stride, [1, 16])
        bits = gl.load(at, mask=mask, other=MINUS_ZERO, volatile=True)
        missing = gl.maximum(missing, (bits == 0).to(gl.int32))
        acc += bits.to(dtype, bitcast=True).to(gl.float32)
    return acc, gl.max(gl.max(missing, axis=1), axis=0)


@gluon.jit
def take_marked(
    acc, pointers, stride, mask, first_peer, skip, unit, epoch, control, report,
    COUNT: gl.constexpr, SIGNALS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the parts at ``pointers + i * stride``, i = 0 .. COUNT-1, in that order; see ``marked.take_marked``.

    But a part that does not come makes no NaN: behind this, callers look at the fault. ``pointers``: int16.
    """
    limit = gl.load(control + TIMEOUT_US, volatile=True).to(gl.int64) * 1000
    total, missing = _sum_marked(acc, pointers, stride, mask, 0, COUNT, dtype)
    if missing > 0:
        started = clock(missing)
        while missing == 1:
            overdue = (clock(missing) - started >= limit).to(gl.int32)
            limit = gl.load(control + TIMEOUT_US, volatile=True).to(gl.int64) * 1000
            total, missing = _sum_marked(acc, pointers, stride, mask, overdue, COUNT, dtype)
        if missing > 1:
            total, missing = _sum_marked(acc, pointers, stride, mask, 0, COUNT, dtype)
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
def push_piece(
    piece, first_col, slot_table, slot_offset, place_size, at, first_row, row_limit, rows, rank, home,
    WORLD_SIZE: gl.constexpr, TILE_N: gl.constexpr, SPANS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Columns of a partial tile into the slots of those who own its rows, but for this rank's. ``rows``: of one owner.

    ``SPANS``: rows may have several owners; else all are of ``home``, a peer.
    """
    slices: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    row = first_row + gl.arange(0, piece.shape[0], layout=slices)
    within = part_offsets(piece, first_col, TILE_N)
    value = piece.to(dtype)
    if SPANS:
        owner = gl.minimum(row // rows, WORLD_SIZE - 1)
        place = rank - (rank > owner).to(gl.int32)
        base = gl.load(slot_table + owner) + 2 * (
            slot_offset + place.to(gl.int64) * place_size + at
        )
        pointers = gl.multiple_of(
            base.to(gl.pointer_type(gl.int16), bitcast=True)[:, None] + within, [1, 16]
        )
        put_marked(pointers, value, ((owner != rank) & (row < row_limit))[:, None] & (within >= 0))
    else:
        place = rank - (rank > home).to(gl.int32)
        base = gl.load(slot_table + home) + 2 * (slot_offset + place.to(gl.int64) * place_size + at)
        pointers = gl.multiple_of(
            base.to(gl.pointer_type(gl.int16), bitcast=True) + within, [1, 16]
        )
        put_marked(pointers, value, (row < row_limit)[:, None] & (within >= 0))
