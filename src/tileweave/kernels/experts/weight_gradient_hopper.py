"""Gradient of experts on Hopper, without communication, summed in fp32 and rounded once:
out[e] = left[rows of e].T @ right[rows of e].

    left   [bound, N]    right  [bound, K]    rows sorted by expert; those of e are
                                              [offsets[e], offsets[e + 1])
    out    [E, N, K]     zeros for an expert without rows

This is a grouped product whose depth is ragged and short: in DeepSeek-V3 (64 experts per rank, 4096
tokens) a tile of out has some 17 blocks of 32 rows, and then 64 KB to write. There are two
partitions. *load* (one warp) keeps a ring of [TILE_R, TILE_M] of left and [TILE_R, TILE_N] of right
full by TMA. *multiply* runs wgmma on both as they are, depth first, and hands a whole tile to TMA,
which writes it during the next tile's matmul. A program takes every ``num_programs``-th tile; an
expert's tiles go in bands, so that programs that run at the same time share rows.

The last block of an expert ends with its last row and begins earlier, in rows that have been
multiplied already. Those rows of left are zeroed in shared memory, and right's are the expert's
own, so nothing of another expert or after the last row is used. Only an expert with fewer than
TILE_R rows is read past its end; then both are zeroed there. If right has an infinite value in rows
that are read twice, it is multiplied by such a zero: the gradient of its expert, infinite anyway,
may be NaN instead.

Limits: bf16 or fp16, contiguous; N a multiple of TILE_M; rows at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tileweave.device.gluon.matmul import claim, make_ring, store_tma
from tileweave.device.gluon.signal import block_barrier, load_async
from tileweave.kernels.runtime.descriptors import descriptor, fits

TILE_M, TILE_N, TILE_R = 128, 256, 32


class Sizes(NamedTuple):
    """Tiles of all experts; tile rows and columns of an expert; N."""

    tiles: Any
    tile_rows: Any
    tile_cols: Any
    cols: Any


class Choices(NamedTuple):
    """What is decided at compile time.

    TILE_M, TILE_N, TILE_R : rows and columns of a tile of out; rows of left and right in a block.

    GROUP_M : tile rows of a band.

    STAGES, WARPS : buffers of the ring; warps of *multiply*.
    """

    TILE_M: int = TILE_M
    TILE_N: int = TILE_N
    TILE_R: int = TILE_R
    GROUP_M: int = 8
    STAGES: int = 6
    WARPS: int = 8


@gluon.jit
def place(tile, sizes, GROUP_M: gl.constexpr):
    """Tile -> (expert, tile row, tile column): within an expert by bands of ``GROUP_M`` tile rows,
    within a band column by column."""
    tile_rows, tile_cols = sizes.tile_rows, sizes.tile_cols
    expert = tile // (tile_rows * tile_cols)
    within = tile % (tile_rows * tile_cols)
    group = within // (GROUP_M * tile_cols)
    rest = within % (GROUP_M * tile_cols)
    tall = gl.minimum(tile_rows - group * GROUP_M, GROUP_M)
    return expert, group * GROUP_M + rest % tall, rest // tall


@gluon.jit
def load_partition(left_desc, right_desc, ring, offsets, sizes, C: gl.constexpr):
    """One warp: keep the ring full."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_R: gl.constexpr = C.TILE_R
    GROUP_M: gl.constexpr = C.GROUP_M
    STAGES: gl.constexpr = C.STAGES
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_R * 2
    turn = 0
    for tile in range(gl.program_id(0), sizes.tiles, gl.num_programs(0)):
        expert, row, col = place(tile, sizes, GROUP_M)
        begin = gl.load(offsets + expert)
        end = gl.load(offsets + expert + 1)
        last = gl.maximum(begin, end - TILE_R)
        for first in range(begin, end, TILE_R):
            at = claim(ring, turn, block_bytes, STAGES)
            start = gl.minimum(first, last)
            load_async(left_desc, [start, row * TILE_M], ring.ready.index(at), ring.a.index(at))
            load_async(right_desc, [start, col * TILE_N], ring.ready.index(at), ring.b.index(at))
            turn += 1


@gluon.jit
def keep_rows(buffer, low, high, TILE_R: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Zero rows of a buffer except [low, high)."""
    LANES: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    row = gl.arange(0, TILE_R, layout=gl.SliceLayout(1, layout))
    value = buffer.load(layout)
    buffer.store(gl.where(((row >= low) & (row < high))[:, None], value, gl.zeros_like(value)))


@gluon.jit
def multiply_partition(out_desc, box, ring, offsets, sizes, C: gl.constexpr):
    """The warpgroups: multiply each tile from the ring, then store it."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_R: gl.constexpr = C.TILE_R
    GROUP_M: gl.constexpr = C.GROUP_M
    STAGES: gl.constexpr = C.STAGES
    WARPS: gl.constexpr = C.WARPS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE_N, 16]
    )
    turn = 0
    for tile in range(gl.program_id(0), sizes.tiles, gl.num_programs(0)):
        expert, row, col = place(tile, sizes, GROUP_M)
        rows = gl.load(offsets + expert + 1) - gl.load(offsets + expert)
        blocks = (rows + TILE_R - 1) // TILE_R
        acc = warpgroup_mma_init(gl.zeros((TILE_M, TILE_N), gl.float32, layout))
        for block in range(0, blocks):
            at = turn % STAGES
            mbarrier.wait(ring.ready.index(at), (turn // STAGES) & 1)
            if (block == blocks - 1) & (rows % TILE_R != 0):
                few = rows < TILE_R
                keep_rows(
                    ring.a.index(at),
                    gl.where(few, 0, TILE_R - rows % TILE_R),
                    gl.where(few, rows, TILE_R),
                    TILE_R,
                    TILE_M,
                    WARPS,
                )
                if few:
                    keep_rows(ring.b.index(at), 0, rows, TILE_R, TILE_N, WARPS)
                fence_async_shared()
                block_barrier()
            acc = warpgroup_mma(
                ring.a.index(at).permute((1, 0)), ring.b.index(at), acc, is_async=True
            )
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(ring.empty.index((turn + STAGES - 1) % STAGES), count=1, pred=block > 0)
            turn += 1
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.empty.index((turn + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
        store_tma(product, out_desc, box, expert * sizes.cols + row * TILE_M, col * TILE_N)
    tma.store_wait(0)


@gluon.jit
def grouped_outer_hopper_kernel(left_desc, right_desc, out_desc, offsets, sizes, C: gl.constexpr):
    """Start the partitions."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_R: gl.constexpr = C.TILE_R
    STAGES: gl.constexpr = C.STAGES
    ring = make_ring(left_desc, right_desc, TILE_R, TILE_M, STAGES)
    box = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    gl.warp_specialize(
        [
            (multiply_partition, (out_desc, box, ring, offsets, sizes, C)),
            (load_partition, (left_desc, right_desc, ring, offsets, sizes, C)),
        ],
        [1],
        [40],
    )


def takes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the kernel can run on these; if not, ``torch._grouped_mm`` does."""
    rows = left.is_contiguous() and right.is_contiguous() and fits(left, right)
    return (
        rows
        and left.dtype in (torch.bfloat16, torch.float16)
        and left.shape[1] % TILE_M == 0
        and left.shape[0] > 0
    )


def grouped_outer(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, num_sms: int
) -> torch.Tensor:
    """left [bound, N], right [bound, K], offsets int32 [E + 1] -> [E, N, K]; see :func:`takes`."""
    (bound, cols), depth, experts = left.shape, right.shape[1], offsets.numel() - 1
    out = left.new_empty(experts, cols, depth)
    left_desc = descriptor(left.data_ptr(), left.dtype, [bound, cols], cols, [TILE_R, TILE_M])
    right_desc = descriptor(right.data_ptr(), left.dtype, [bound, depth], depth, [TILE_R, TILE_N])
    out_desc = descriptor(
        out.data_ptr(), left.dtype, [experts * cols, depth], depth, [TILE_M, TILE_N]
    )
    tile_rows, tile_cols = cols // TILE_M, -(-depth // TILE_N)
    sizes = Sizes(experts * tile_rows * tile_cols, tile_rows, tile_cols, cols)
    choices = Choices()
    grouped_outer_hopper_kernel[(min(num_sms, sizes.tiles),)](
        left_desc,
        right_desc,
        out_desc,
        offsets,
        sizes,
        choices,
        num_warps=choices.WARPS,
        maxnreg=168,
    )
    return out
