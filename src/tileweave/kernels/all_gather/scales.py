"""Scales of FP8 operands in the Triton all-gather kernel.

    x_scale    [R, m]   of rows, or [R, K/128, m] of blocks: in the slot, after the data, in rank
                        order; the own place is not used
    own_scale  [m]      or [K/128, m]: those of the own rows, where copy engines read them, too
    w_scale    [N/R]    of columns, or [N/R/128, K/128]

A copy engine sends the scales of a shard before the same signal as its rows. So a program may read
them after the wait for a tile's rows; from L2, since the line may be in a stale cache. The Hopper
kernel has the same in ``hopper.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.matmul import BlockScales


@triton.jit
def scale_tile(acc, tensors, unit, row, col, sizes, rank):
    """A tile of products, times the scales of its rows and columns."""
    source = unit.first_row // sizes.rows
    rows = tl.where(source == rank, tensors.own_scale - rank * sizes.rows, tensors.x_scale)
    of_rows = tl.load(rows + row, mask=row < unit.row_limit, other=0.0, cache_modifier=".cg")
    of_cols = tl.load(tensors.w_scale + col, mask=col < sizes.cols, other=0.0)
    return acc * of_rows[:, None] * of_cols[None, :]


@triton.jit
def block_scales(
    tensors,
    unit,
    sizes,
    rank,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Where the scales of a tile of blocks are."""
    count = tl.cdiv(sizes.depth, TILE_K)
    source = unit.first_row // sizes.rows
    row = tl.minimum(unit.first_row + tl.arange(0, TILE_M), unit.row_limit - 1)
    there = tensors.x_scale + source.to(tl.int64) * sizes.rows * count
    rows = tl.where(source == rank, tensors.own_scale, there) + (row - source * sizes.rows)
    cols = tensors.w_scale + (unit.col * TILE_N // 128).to(tl.int64) * count
    return BlockScales(rows, sizes.rows, cols)
