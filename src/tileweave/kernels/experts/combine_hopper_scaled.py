"""``grouped_matmul_combine`` with FP8 operands for Hopper.

Read ``combine_hopper.py`` first: *load*, *reduce*, tickets and the proof hold here. What differs:

    y, experts   FP8, with scales of blocks as ``scaled.py`` has them
    products     in the dtype of the result, which is also that of what is sent

- Two partitions of four warps multiply, each 64 rows of a tile
  (``device/gluon/scaled_matmul.py``). Both take every number that is dealt, read every buffer, and
  count in their part of each tile, so that a chunk has twice as many counts. When tiles are out,
  each draws tickets by itself.
- *reduce* has the registers that two warpgroups of 224 leave, too few to sum tokens. It pushes
  weights and lists rows; *multiply* draws all tickets, and loads 8 rows of a token at once
  (decision 0044).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import make_ring, runtime
from tileweave.device.gluon.peers import leave, load_epoch
from tileweave.device.gluon.scaled_matmul import (
    SHARE,
    SHARERS,
    WIDTH,
    RowScales,
    multiply_share,
    store_share,
)
from tileweave.device.gluon.tickets import make_deal, take
from tileweave.kernels.experts import tiles as grouped_tiles
from tileweave.kernels.experts.combine_hopper import (
    MAPS,
    REGISTERS,
    UNSPECIALIZED,
    Operands,
    choices_of,
    count_stored,
    fixed_arguments,
    load_partition,
    new_lists,
    reduce_partition,
)
from tileweave.kernels.experts.combine_hopper_tasks import (
    Current,
    Cut,
    Tensors,
    chunk_columns,
    serve_tickets,
)
from tileweave.kernels.experts.combine_layout import COUNTER_WORDS
from tileweave.kernels.runtime.descriptors import based, descriptor
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig
from tileweave.planning.schedules.grouped import GroupedProblem

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in grouped_tiles.SOURCES)


class Scales(NamedTuple):
    """Scales of y: elements from that of a row to that of the next, and from that of a K block;
    ``bound``: rows of y. Those of the experts, contiguous."""

    y: Any
    row: Any
    block: Any
    bound: Any
    w: Any


@gluon.jit
def multiply_scaled_partition(
    operands,
    scales,
    box,
    ring,
    line,
    tensors,
    peers,
    rank,
    cut,
    num_partitions,
    WHICH: gl.constexpr,
    C: gl.constexpr,
):
    """One warpgroup: its rows of tiles, then blocks of tokens."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    GROUP_M: gl.constexpr = C.GROUP_M
    LATE_COLS: gl.constexpr = C.LATE_COLS
    offsets, experts, cols, chunk_cols = tensors.offsets, cut.experts, cut.cols, cut.chunk_cols
    epoch = load_epoch(peers)
    counts = peers.counters + (epoch & 1) * COUNTER_WORDS
    all_cols = (cols + TILE_N - 1) // TILE_N
    scale_cols = (cols + WIDTH - 1) // WIDTH
    rows = RowScales(scales.y, scales.row, scales.block, scales.bound)
    turn = 0
    drawn = 0
    before = 0
    stored = runtime(-1, epoch)  # the chunk of the last tile that is not counted in
    tile = take(drawn, line, 4)
    for chunk in range(0, cut.chunks):
        tile_cols = chunk_columns(chunk, all_cols, chunk_cols)
        start = first_expert(offsets, tile_cols, TILE_M)
        walk = walk_to(start, tile - before, offsets, experts, tile_cols, TILE_M)
        while walk.expert < experts:
            row, tile_col = place_in_expert(walk, tile - before, tile_cols, TILE_M, GROUP_M)
            row += WHICH * SHARE
            tile_col += chunk * chunk_cols
            low, high, turn = multiply_share(
                turn,
                cut.k_blocks,
                ring,
                rows,
                scales.w + walk.expert.to(gl.int64) * scale_cols * cut.k_blocks,
                row,
                tile_col * (TILE_N // WIDTH),
                scale_cols,
                C.STAGES,
                WHICH,
            )
            count_stored(counts, stored, epoch)
            # sums of products become NaN where a wait timed out, products do not
            store_share(
                low,
                high,
                turn * 0,
                tensors.products,
                operands.products,
                box,
                row,
                walk.end,
                tile_col * TILE_N,
                cols,
                True,
            )
            stored = runtime(chunk, epoch)
            drawn += 1
            tile = take(drawn, line, 4)
            walk = walk_to(walk, tile - before, offsets, experts, tile_cols, TILE_M)
        before += walk.next_tile  # of all experts
    count_stored(counts, stored, epoch)
    current = Current(rank, epoch, counts)
    serve_tickets(
        tensors,
        peers,
        cut,
        current,
        gl.num_programs(0),
        C,
        COLS=LATE_COLS,
        WARPS=4,
        KINDS=2,
        AHEAD=C.LATE_AHEAD,
    )
    leave(peers, epoch, num_partitions)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def grouped_matmul_combine_scaled_kernel(
    y_desc,
    experts_desc,
    products_desc,
    tensors,
    scales,
    peers,
    rank,
    sizes,
    tokens,
    max_tokens,
    experts,
    chunks,
    chunk_cols,
    k_blocks,
    groups,
    group_blocks,
    blocks,
    C: gl.constexpr,
):
    """Start the partitions."""
    cut = Cut(
        tokens,
        max_tokens,
        experts,
        sizes.cols,
        sizes.depth,
        chunks,
        chunk_cols,
        k_blocks,
        groups,
        group_blocks,
        blocks,
    )
    operands = Operands(y_desc, experts_desc, products_desc)
    ring = make_ring(y_desc, experts_desc, C.TILE_M, C.TILE_K, C.STAGES, 1, SHARERS)
    dtype: gl.constexpr = products_desc.dtype
    layout: gl.constexpr = products_desc.layout
    box0 = gl.allocate_shared_memory(dtype, products_desc.block_type.shape, layout)
    box1 = gl.allocate_shared_memory(dtype, products_desc.block_type.shape, layout)
    line = make_deal(SHARERS)
    # those that leave; *load* is done with the epoch before the others are
    leaving = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (
                multiply_scaled_partition,
                (operands, scales, box0, ring, line, tensors, peers, rank, cut, leaving, 0, C),
            ),
            (
                multiply_scaled_partition,
                (operands, scales, box1, ring, line, tensors, peers, rank, cut, leaving, 1, C),
            ),
            (load_partition, (operands, ring, line, tensors.offsets, peers, cut, C)),
            (reduce_partition, (tensors, peers, rank, sizes, cut, leaving, C)),
        ],
        [4, 1, C.REDUCE],
        [C.MULTIPLY_REGISTERS, 40, C.REDUCE_REGISTERS],
    )


# What changes between launches for one shape.
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "scales.y", "scales.w", "tokens")


def launcher(
    peers: Peers,
    shape: GroupedProblem,
    config: CombineConfig,
    rank: int,
    num_sms: int,
    y: torch.Tensor,
    y_scale: torch.Tensor,
    dtype: torch.dtype,
) -> Launcher:
    """Launches for one shape, called with the tensors of ``combine_triton.launch`` and the scales
    of y and experts. ``y``, ``y_scale``: of which every call has the shape and strides. ``dtype``:
    of the result."""
    s, c, base = shape, config, peers.slots.data_ptr()
    bound = y.shape[0]
    box = [SHARE.value, WIDTH.value]
    descriptors = (
        descriptor(base, y.dtype, [bound, s.depth], y.stride(0), [c.tile_m, c.tile_k]),
        descriptor(base, y.dtype, [s.experts * s.cols, s.depth], s.depth, [c.tile_n, c.tile_k]),
        descriptor(base, dtype, [bound, s.cols], s.cols, box),
    )
    choices = choices_of(s, c)._replace(
        SHARERS=SHARERS.value,
        MULTIPLY_REGISTERS=224,
        REDUCE_REGISTERS=56,
        EARLY=False,
        LATE_AHEAD=8,
    )
    row, block = y_scale.stride()

    def pack(
        y: torch.Tensor,
        experts: torch.Tensor,
        offsets: torch.Tensor,
        entry_row: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        products: torch.Tensor,
        out: torch.Tensor,
        y_scale: torch.Tensor,
        w_scale: torch.Tensor,
    ) -> Call:
        given = offsets if weights is None else weights
        lists = new_lists(s, y.device)
        tensors = Tensors(products, *lists, offsets, entry_row, topk_ids, given, out)
        pointers = [t.data_ptr() for t in (*tensors, y_scale, w_scale)]
        bases = (y.data_ptr(), experts.data_ptr(), pointers[0])

        def changing() -> Mapping[str, Any]:
            return {
                **dict(zip(MAPS, based(descriptors, bases), strict=True)),
                "tensors": tensors,
                "scales": Scales(y_scale, row, block, bound, w_scale),
                "tokens": out.shape[0],
                "C": choices._replace(WEIGHTED=weights is not None),
            }

        variant = (weights is None, alignment(pointers))
        return variant, [*pointers, out.shape[0]], changing, bases

    return Launcher(
        grouped_matmul_combine_scaled_kernel,
        num_sms,
        fixed_arguments(peers, s, c, rank, dtype),
        pack,
        WORDS,
        MAPS,
        num_warps=4,
        maxnreg=REGISTERS,
    )
