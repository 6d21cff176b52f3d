"""Copies to peers and within a device in Gluon, 16 bytes per thread at once: the counterpart of
``device/triton/remote.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.signal import symm_at


@gluon.jit
def put_all(
    table,
    rank,
    offset,
    size,
    source,
    begin,
    end,
    WORLD_SIZE: gl.constexpr,
    OWN: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Store elements [begin, end) of the own shard into a slot of every peer, block by block; see
    ``remote.put_all``."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    for start in range(begin, end, BLOCK):
        index = start + gl.arange(0, BLOCK, layout=layout)
        mask = index < end
        value = gl.load(source + index, mask=mask)
        for i in gl.static_range(0 if OWN else 1, WORLD_SIZE):
            target = symm_at(table, (rank + i) % WORLD_SIZE, source.dtype.element_ty) + offset
            if OWN:
                target += rank.to(gl.int64) * size
            else:
                target += (i - 1) * size.to(gl.int64)
            gl.store(gl.multiple_of(target + index, [16]), value, mask=mask)


@gluon.jit
def copy_flat(target, source, begin, end, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Copy elements [begin, end), 16 bytes per thread at once."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    for start in range(begin, end, BLOCK):
        index = start + gl.arange(0, BLOCK, layout=layout)
        mask = index < end
        gl.store(target + index, gl.load(source + index, mask=mask), mask=mask)


@gluon.jit
def _rows(start, width, pitch, V: gl.constexpr, WARPS: gl.constexpr):
    """Of V vectors of 8 elements, from element ``start`` on, of a matrix with rows of ``width``
    elements: the number of each one's first element [V, 1], and the elements' offsets [V, 8], with
    rows ``pitch`` apart. ``start``, ``width`` and ``pitch``: multiples of 8."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    word = start // 8 + gl.arange(0, V, layout=gl.SliceLayout(1, layout))
    # the compiler knows of multiples of 16 only
    at = gl.multiple_of((word * 8 // width).to(gl.int64) * pitch + word * 8 % width, [8])
    return word[:, None] * 8, at[:, None] + gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[
        None, :
    ]


@gluon.jit
def copy_rows(
    target,
    source,
    begin,
    end,
    width,
    target_pitch,
    source_pitch,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy elements [begin, end) of a matrix with rows of ``width`` elements (all multiples of 8);
    see ``remote.put_rows``."""
    for start in range(begin, end, BLOCK):
        index, there = _rows(start, width, source_pitch, BLOCK // 8, WARPS)
        _, here = _rows(start, width, target_pitch, BLOCK // 8, WARPS)
        mask = (index < end) & (there >= 0)
        value = gl.load(gl.multiple_of(source + there, [1, 16]), mask=mask)
        gl.store(gl.multiple_of(target + here, [1, 16]), value, mask=mask)


@gluon.jit
def put_parts(
    table,
    rank,
    offset,
    size,
    source,
    step,
    pitch,
    width,
    begin,
    end,
    WORLD_SIZE: gl.constexpr,
    OWN: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Store elements [begin, end) of every peer's part into a slot there; see
    ``remote.put_parts``."""
    for start in range(begin, end, BLOCK):
        index, there = _rows(start, width, pitch, BLOCK // 8, WARPS)
        _, here = _rows(start, width, width, BLOCK // 8, WARPS)
        mask = (index < end) & (there >= 0)
        for i in gl.static_range(0 if OWN else 1, WORLD_SIZE):
            peer = (rank + i) % WORLD_SIZE
            value = gl.load(
                gl.multiple_of(source + peer.to(gl.int64) * step + there, [1, 16]), mask=mask
            )
            target = symm_at(table, peer, source.dtype.element_ty) + offset
            if OWN:
                target += rank.to(gl.int64) * size
            else:
                target += (i - 1) * size.to(gl.int64)
            gl.store(gl.multiple_of(target + here, [1, 16]), value, mask=mask)
