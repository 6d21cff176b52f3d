"""Self-signaling data, in Gluon: the counterpart of ``device/triton/self_signaling.py``; read that
first.

A slot has a tile as its warps hold it, in 8 x 8 blocks (``device/gluon/matmul.py:part_offsets``),
so that registers go to a peer, and come from a slot, in whole lines of 128 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon import record
from tileweave.device.gluon.matmul import part_offsets
from tileweave.device.gluon.signal import TIMEOUT_US, clock, expire
from tileweave.device.triton.record import ANY, STAMPED

MINUS_ZERO = gl.constexpr(-(2**15))


@gluon.jit
def put_marked(pointers, value, mask):
    """Store ``value`` (2 bytes per element) where a peer polls for it; a zero travels as minus
    zero.

    ``pointers``: int16. They must be declared by ``gl.multiple_of`` where they are made: a
    declaration here is lost in inlining, and each store would be of a single element.
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
    acc,
    pointers,
    stride,
    mask,
    first_peer,
    skip,
    unit,
    epoch,
    control,
    report,
    COUNT: gl.constexpr,
    SIGNALS: gl.constexpr,
    dtype: gl.constexpr,
):
    """``acc`` plus the parts at ``pointers + i * stride``, i = 0 .. COUNT-1, in that order; see
    ``self_signaling.take_marked`` in Triton.

    But a part that does not come makes no NaN: callers look at the fault afterwards. ``pointers``:
    int16.
    """
    limit = gl.load(control + TIMEOUT_US, volatile=True).to(gl.int64) * 1000
    total, missing = _sum_marked(acc, pointers, stride, mask, 0, COUNT, dtype)
    if missing > 0:
        started = clock(missing)
        while missing == 1:
            overdue = (clock(missing) - started >= limit).to(gl.int32)
            limit = gl.load(control + TIMEOUT_US, volatile=True).to(gl.int64) * 1000
            total, missing = _sum_marked(acc, pointers, stride, mask, overdue, COUNT, dtype)
        if STAMPED:
            record.waited(control, ANY, unit, missing, started)
        if missing > 1:
            total, missing = _sum_marked(acc, pointers, stride, mask, 0, COUNT, dtype)
        if missing > 0:
            # if all have come by now
            late = first_peer + (first_peer >= skip).to(gl.int32)
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
    piece,
    first_col,
    peers,
    slot_offset,
    place_size,
    at,
    first_row,
    row_limit,
    rows,
    rank,
    home,
    WORLD_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SPANS: gl.constexpr,
    dtype: gl.constexpr,
):
    """Store columns of a partial tile in the slots of the peers that own its rows.

    ``at``: of the tile in this rank's part of a slot. ``rows``: of one owner. ``SPANS``: rows may
    have several owners; otherwise ``home``, a peer, owns all of them.
    """
    slices: gl.constexpr = gl.SliceLayout(1, piece.type.layout)
    row = first_row + gl.arange(0, piece.shape[0], layout=slices)
    within = part_offsets(piece, first_col, TILE_N)
    value = piece.to(dtype)
    if SPANS:
        owner = gl.minimum(row // rows, WORLD_SIZE - 1)
        place = rank - (rank > owner).to(gl.int32)
        base = gl.load(peers.slot_table + owner)
        base += 2 * (slot_offset + place.to(gl.int64) * place_size + at)
        pointers = gl.multiple_of(
            base.to(gl.pointer_type(gl.int16), bitcast=True)[:, None] + within, [1, 16]
        )
        put_marked(pointers, value, ((owner != rank) & (row < row_limit))[:, None] & (within >= 0))
    else:
        place = rank - (rank > home).to(gl.int32)
        base = gl.load(peers.slot_table + home)
        base += 2 * (slot_offset + place.to(gl.int64) * place_size + at)
        pointers = gl.multiple_of(
            base.to(gl.pointer_type(gl.int16), bitcast=True) + within, [1, 16]
        )
        put_marked(pointers, value, (row < row_limit)[:, None] & (within >= 0))
