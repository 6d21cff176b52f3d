"""The grouped matmul of FP8 of ``scaled.py`` for Hopper: TMA, and two warpgroups that share a tile
(``device/gluon/scaled_matmul.py``).

0.72 to 1.06 of ``_scaled_mm``'s rate without experts, and 1.53 times our kernel for 16 bits, as
measured on an H200.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon.matmul import claim, make_ring
from tileweave.device.gluon.scaled_matmul import (
    SHARE,
    SHARERS,
    WIDTH,
    RowScales,
    multiply_share,
    store_share,
)
from tileweave.device.gluon.signal import load_async
from tileweave.kernels.experts import tiles as grouped_tiles
from tileweave.kernels.experts.scaled import WORDS, Sizes, Tensors
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.kernels.runtime.launch import Call, Launcher, alignment

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in grouped_tiles.SOURCES)

TILE_M, TILE_N, TILE_K, STAGES, GROUP_M = 128, 256, 128, 4, 8
# of a warpgroup that multiplies, which both partitions are; of the warp that loads
MULTIPLY_REGISTERS, LOAD_REGISTERS = gl.constexpr(232), gl.constexpr(40)
MAX_REGISTERS = 168  # per thread, when a program begins


class Choices(NamedTuple):
    """Decided when the kernel is compiled. ``BY_TMA``: y is at a multiple of 16 bytes."""

    TILE_M: int
    TILE_N: int
    TILE_K: int
    STAGES: int
    GROUP_M: int
    BY_TMA: bool


@gluon.jit
def load_partition(x_desc, w_desc, ring, offsets, sizes, C: gl.constexpr):
    """One warp: keeps the ring full."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    experts, cols = sizes.experts, sizes.cols
    tile_cols = (cols + TILE_N - 1) // TILE_N
    turn = 0
    tile = gl.program_id(0)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        row, tile_col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        col = walk.expert * cols + tile_col * TILE_N
        for block in range((sizes.depth + C.TILE_K - 1) // C.TILE_K):
            at = claim(ring, turn, (TILE_M + TILE_N) * C.TILE_K, C.STAGES)
            ready = ring.ready.index(at)
            load_async(x_desc, [row, block * C.TILE_K], ready, ring.a.index(at))
            load_async(w_desc, [col, block * C.TILE_K], ready, ring.b.index(at))
            turn += 1
        tile += gl.num_programs(0)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)


@gluon.jit
def multiply_partition(y_desc, box, ring, tensors, sizes, WHICH: gl.constexpr, C: gl.constexpr):
    """One warpgroup: multiplies its rows of each tile, then stores them."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    offsets, experts, cols = tensors.offsets, sizes.experts, sizes.cols
    tile_cols = (cols + TILE_N - 1) // TILE_N
    scale_cols = (cols + WIDTH - 1) // WIDTH
    k_blocks = (sizes.depth + C.TILE_K - 1) // C.TILE_K
    rows = RowScales(tensors.x_scale, sizes.scale_row, sizes.scale_block, sizes.bound)
    turn = 0
    tile = gl.program_id(0)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        row, tile_col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        row += WHICH * SHARE
        w_scale = tensors.w_scale + walk.expert.to(gl.int64) * scale_cols * k_blocks
        low, high, turn = multiply_share(
            turn,
            k_blocks,
            ring,
            rows,
            w_scale,
            row,
            tile_col * (TILE_N // WIDTH),
            scale_cols,
            C.STAGES,
            WHICH,
        )
        col = tile_col * TILE_N
        store_share(low, high, turn * 0, tensors.y, y_desc, box, row, walk.end, col, cols, C.BY_TMA)
        tile += gl.num_programs(0)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    tma.store_wait(0)


@gluon.jit
def grouped_scaled_hopper_kernel(x_desc, w_desc, y_desc, tensors, sizes, C: gl.constexpr):
    """Start the partitions."""
    ring = make_ring(x_desc, w_desc, C.TILE_M, C.TILE_K, C.STAGES, 1, SHARERS)
    box0 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    box1 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    gl.warp_specialize(
        [
            (multiply_partition, (y_desc, box0, ring, tensors, sizes, 0, C)),
            (multiply_partition, (y_desc, box1, ring, tensors, sizes, 1, C)),
            (load_partition, (x_desc, w_desc, ring, tensors.offsets, sizes, C)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


MAPS = ("x_desc", "w_desc", "y_desc")


def launcher(sizes: Sizes, num_sms: int) -> Launcher:
    """Launches for one shape, called with the tensors of ``scaled.Tensors``. x and w are at
    multiples of 16 bytes."""
    s = sizes
    tiles = min(s.bound, s.experts + s.bound // TILE_M) * -(-s.cols // TILE_N)
    choices = Choices(TILE_M, TILE_N, TILE_K, STAGES, GROUP_M, True)

    def pack(
        x: torch.Tensor,
        x_scale: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        y: torch.Tensor,
        offsets: torch.Tensor,
    ) -> Call:
        tensors = Tensors(x, x_scale, w, w_scale, y, offsets)
        words = [t.data_ptr() for t in tensors]
        by_tma = words[4] % 16 == 0
        # where TMA cannot store y, its descriptor, which the kernel does not use, is of x
        target = words[4] if by_tma else words[0]

        def changing() -> dict[str, Any]:
            return {
                "x_desc": descriptor(
                    words[0], x.dtype, [s.bound, s.depth], s.pitch, [TILE_M, TILE_K]
                ),
                "w_desc": descriptor(
                    words[2], w.dtype, [s.experts * s.cols, s.depth], s.depth, [TILE_N, TILE_K]
                ),
                "y_desc": descriptor(
                    target, y.dtype, [s.bound, s.cols], s.cols, [SHARE.value, WIDTH.value]
                ),
                "tensors": tensors,
                "C": choices._replace(BY_TMA=by_tma),
            }

        return (y.dtype, alignment(words)), words, changing, (words[0], words[2], target)

    return Launcher(
        grouped_scaled_hopper_kernel,
        max(1, min(num_sms, tiles)),
        {"sizes": sizes},
        pack,
        WORDS,
        MAPS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
