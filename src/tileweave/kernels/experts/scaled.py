"""Rows of FP8 times the weight of their expert, with scales of blocks: one rank, nothing is sent.

    x        [n, K]                            FP8; rows sorted by expert, any pitch
    x_scale  [n, K/128]                        fp32; any strides
    w        [E, N, K]                         FP8, contiguous
    w_scale  [E, ceil(N/128), ceil(K/128)]     fp32, contiguous
    y        [n, N]                            bf16 or fp16; rows from offsets[E] on are not written

The products of each 128 of K are multiplied by their scales and added in fp32. Programs take tiles
in turn, in the order of ``tiles.py``. ``scaled_hopper.py`` has the kernel for Hopper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import BlockScales, matmul_tile
from tileweave.kernels.experts.tiles import LOW_TILE, first_expert, place_in_expert, walk_to
from tileweave.kernels.runtime.launch import Call, Launcher, alignment

TILE_N, TILE_K = 128, 128
GROUP_M = 8
INTERPRETED_PROGRAMS = 2


class Tensors(NamedTuple):
    """Pointers; see the module's docstring. ``offsets`` [E + 1]: first row of each expert."""

    x: Any
    x_scale: Any
    w: Any
    w_scale: Any
    y: Any
    offsets: Any


class Sizes(NamedTuple):
    """``pitch``: elements from a row of x to the next. ``scale_row``, ``scale_block``: elements
    from the scale of a row to that of the next, and from that of a K block. ``bound``: n."""

    pitch: Any
    scale_row: Any
    scale_block: Any
    experts: Any
    cols: Any
    depth: Any
    bound: Any


class Choices(NamedTuple):
    """The tile, decided when the kernel is compiled."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int


@triton.jit
def grouped_scaled_kernel(tensors, sizes, C: tl.constexpr):
    """See the module's docstring."""
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    offsets, experts, cols, depth = tensors.offsets, sizes.experts, sizes.cols, sizes.depth
    tile_cols = tl.cdiv(cols, TILE_N)
    k_blocks = tl.cdiv(depth, C.TILE_K)
    tile = tl.program_id(0)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, tile_col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        row = first_row + tl.arange(0, TILE_M)
        source = tl.minimum(row, walk.end - 1).to(tl.int64)
        expert = walk.expert.to(tl.int64)
        scales = BlockScales(
            tensors.x_scale + source * sizes.scale_row,
            sizes.scale_block,
            tensors.w_scale + (expert * tile_cols + tile_col) * k_blocks,
        )
        acc = matmul_tile(
            tensors.x + source * sizes.pitch,
            tensors.w + expert * cols * depth,
            depth,
            tile_col,
            cols,
            depth,
            0,
            k_blocks,
            TILE_M,
            TILE_N,
            C.TILE_K,
            False,
            walk.end - first_row,
            TILE_M <= LOW_TILE,
            scales=scales,
            X_FIRST=True,
        )
        col = tile_col * TILE_N + tl.arange(0, TILE_N)
        mask = (row < walk.end)[:, None] & (col < cols)[None, :]
        target = tensors.y + row.to(tl.int64)[:, None] * cols + col[None, :]
        tl.store(target, acc.to(tensors.y.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)


WORDS = tuple(f"tensors.{name}" for name in Tensors._fields)  # what changes between launches


def pack(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
) -> Call:
    """What a launch of the Triton kernel is given."""
    tensors = Tensors(x, x_scale, w, w_scale, y, offsets)
    words = [t.data_ptr() for t in tensors]
    return (y.dtype, alignment(words)), words, lambda: {"tensors": tensors}, ()


def launcher(sizes: Sizes, num_sms: int) -> Launcher:
    """Launches for one shape, called with the tensors of :class:`Tensors`. No size is 0.
    ``num_sms``: 0 in the interpreter."""
    s, rows = sizes, sizes.bound / sizes.experts
    tile_m = 16 if num_sms == 0 else 128 if rows > 64 else 64 if rows > 16 else 16
    tiles = min(s.bound, s.experts + s.bound // tile_m) * triton.cdiv(s.cols, TILE_N)
    programs = min(2 * num_sms if num_sms else INTERPRETED_PROGRAMS, tiles)
    fixed = {"sizes": sizes, "C": Choices(tile_m, TILE_N, TILE_K, GROUP_M)}
    warps = 8 if tile_m == 128 else 4
    options = {"num_warps": warps, "num_stages": 3}
    return Launcher(grouped_scaled_kernel, programs, fixed, pack, WORDS, **options)
