"""The main loop for FP8 operands with scales of blocks, in Gluon: two warpgroups share a tile.

Tensor cores keep 14 bits of a sum, so each 128 of K are multiplied by their scales and added in
fp32. A tile of 128 x 256 is shared by two partitions of four warps with 64 rows each. A warpgroup
multiplies 128 columns of a K block, adds them, and lets the next 128 columns take their registers;
tensor cores work for the other warpgroup meanwhile. One partition of eight warps would need tiles
of 128 x 128, with 0.8 of the speed: they read more shared memory per product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tileweave.device.gluon.matmul import accumulator, read_by, store_masked, store_tma
from tileweave.device.triton.signal import FAULT

SHARERS = gl.constexpr(2)  # warpgroups of a tile
SHARE = gl.constexpr(64)  # rows of each
WIDTH = gl.constexpr(128)  # columns that are multiplied at once, and that share scales


class RowScales(NamedTuple):
    """Scales of rows: a pointer to the first, and elements to that of the next row, and of the next
    K block. ``limit``: rows that there are."""

    first: Any
    row: Any
    block: Any
    limit: Any


@gluon.jit
def load_scales(pointers, block, there):
    """The scales of rows for a K block. Peers wrote some of them: not from a stale cache."""
    return gl.load(pointers + block, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def multiply_share(
    turn,
    num_blocks,
    ring,
    rows,
    w_scale,
    first_row,
    scale_col,
    scale_cols,
    STAGES: gl.constexpr,
    WHICH: gl.constexpr,
):
    """Multiply ``num_blocks`` >= 1 K blocks of 128 from the ring: the rows of warpgroup ``WHICH``,
    from ``first_row`` on. Returns (128 columns, the next 128, turn).

    ``w_scale``: of this expert, [scale_cols, num_blocks], and ``scale_col`` is that of the first
    columns.
    """
    layout: gl.constexpr = accumulator(ring.a.dtype, WIDTH, 4)
    row = first_row + gl.arange(0, SHARE, layout=gl.SliceLayout(1, layout))
    there = row < rows.limit
    pointers = rows.first + row.to(gl.int64) * rows.row
    left = w_scale + scale_col * num_blocks
    right = w_scale + gl.minimum(scale_col + 1, scale_cols - 1) * num_blocks
    zero = gl.zeros((SHARE, WIDTH), gl.float32, layout)
    low, high, part = zero, zero, zero
    never = num_blocks < 0  # which the compiler does not know
    of_rows = load_scales(pointers, 0, there)
    of_left = gl.load(left)
    of_right = gl.load(right)
    for block in range(num_blocks):
        at = turn % STAGES
        mbarrier.wait(ring.ready.index(at), (turn // STAGES) & 1)
        a = ring.a.index(at).slice(WHICH * SHARE, SHARE)
        b = ring.b.index(at)
        columns = b.slice(0, WIDTH).permute((1, 0))
        part = warpgroup_mma(a, columns, part, use_acc=never, is_async=True)
        s_left = of_rows * of_left
        s_right = of_rows * of_right
        ahead = gl.minimum(block + 1, num_blocks - 1)  # loaded while tensor cores work
        of_rows = load_scales(pointers, ahead * rows.block, there)
        of_left = gl.load(left + ahead)
        of_right = gl.load(right + ahead)
        part = warpgroup_mma_wait(0, deps=(part,))
        low += part * s_left[:, None]
        columns = b.slice(WIDTH, WIDTH).permute((1, 0))
        part = warpgroup_mma(a, columns, read_by(part, low), use_acc=never, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(ring.empty.index(at), count=1)
        high += part * s_right[:, None]
        part = read_by(part, high)
        turn += 1
    return low, high, turn


@gluon.jit
def store_share(low, high, fault, out, out_desc, box, row, end, col, cols, BY_TMA: gl.constexpr):
    """Store both parts, rows from ``row`` up to ``end``; NaN if ``fault``. By TMA, through ``box``,
    where all rows are below ``end`` and it can reach ``out``."""
    low = gl.where(fault != 0, float("nan"), low)
    high = gl.where(fault != 0, float("nan"), high)
    if BY_TMA and row + SHARE <= end:
        store_tma(low, out_desc, box, row, col)
        store_tma(high, out_desc, box, row, col + WIDTH)
    else:
        store_masked(low, out, row, end, col, cols)
        store_masked(high, out, row, end, col + WIDTH, cols)


@gluon.jit
def load_fault(control):
    """Whether a wait of this rank has timed out."""
    return gl.load(control + FAULT, volatile=True)
