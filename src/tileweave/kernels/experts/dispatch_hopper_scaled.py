"""``dispatch_grouped_matmul`` with FP8 operands for Hopper: the ordered kernel, of packed tokens.

Read ``dispatch_hopper_ordered.py`` first: *load*, *move*, units, tickets and the proof hold here.
What differs:

    x, slot, rows   bytes [.., pitch]: K of data, then the scales of each 128 of them; so a token
                    and its scales are pushed, signaled and placed together
    w_scale         [E_local, ceil(N/128), ceil(K/128)] fp32

- Two partitions of four warps multiply, each 64 rows of a tile
  (``device/gluon/scaled_matmul.py``). Both take every number that is dealt, and read every buffer.
- Scales of rows are read where they were placed, after the first buffer of the tile is full: *load*
  acquired them before it asked TMA for that.
- *move* has the registers that two warpgroups of 216 leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileweave.device.gluon.matmul import make_ring
from tileweave.device.gluon.peers import leave, load_epoch
from tileweave.device.gluon.scaled_matmul import (
    SHARE,
    SHARERS,
    WIDTH,
    RowScales,
    load_fault,
    multiply_share,
    store_share,
)
from tileweave.device.gluon.signal import drain_tma_stores
from tileweave.device.gluon.tickets import make_deal, take
from tileweave.kernels.experts.dispatch_hopper import MAX_REGISTERS, arguments, portable
from tileweave.kernels.experts.dispatch_hopper_ordered import (
    UNIT,
    load_partition,
    move_partition,
)
from tileweave.kernels.experts.dispatch_hopper_roles import (
    PUSH_WARPS,
    UNSPECIALIZED,
    Operands,
    Sizes,
    Tensors,
    first_expert,
    place_in_expert,
    walk_to,
)
from tileweave.kernels.experts.dispatch_triton import Launch, pitch_of
from tileweave.kernels.experts.dispatch_triton import launcher as triton_launcher
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import DispatchConfig

MULTIPLY_REGISTERS, LOAD_REGISTERS, MOVE_REGISTERS = (
    gl.constexpr(216),
    gl.constexpr(40),
    gl.constexpr(72),
)


class ScaledPlacement(NamedTuple):
    """Rows in order, as bytes, and which units of them are placed; then scales: those of the rows,
    as float32 that begin with the first of row 0, and those of the experts."""

    rows: Any
    placed: Any
    x_scale: Any
    w_scale: Any


@gluon.jit
def multiply_scaled_partition(
    tensors,
    placement,
    y_desc,
    box,
    operands,
    peers,
    bound,
    sizes,
    num_partitions,
    WHICH: gl.constexpr,
    C: gl.constexpr,
):
    """One warpgroup: multiply its rows of each tile from the ring, then store them."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    offsets, experts, tile_cols = tensors.offsets, sizes.experts, sizes.tile_cols
    ring, k_blocks = operands.ring, sizes.k_blocks
    scale_cols = (sizes.weight.cols + WIDTH - 1) // WIDTH
    rows = RowScales(placement.x_scale, sizes.weight.pitch // 4, 1, bound)
    epoch = load_epoch(peers)
    turn = 0
    count = 0
    tile = take(count, operands.deals, 4)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        first_row += WHICH * SHARE
        # before scales are read, and before the fault: it is set if this tile's wait timed out
        mbarrier.wait(ring.ready.index(turn % C.STAGES), (turn // C.STAGES) & 1)
        fault = load_fault(peers.control)
        low, high, turn = multiply_share(
            turn,
            k_blocks,
            ring,
            rows,
            placement.w_scale + walk.expert.to(gl.int64) * scale_cols * k_blocks,
            first_row,
            col * (TILE_N // WIDTH),
            scale_cols,
            C.STAGES,
            WHICH,
        )
        store_share(
            low,
            high,
            fault,
            tensors.y,
            y_desc,
            box,
            first_row,
            walk.end,
            col * TILE_N,
            sizes.weight.cols,
            C.BY_TMA,
        )
        count += 1
        tile = take(count, operands.deals, 4)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    drain_tma_stores(epoch)
    leave(peers, epoch, num_partitions)


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "bound"])
def dispatch_grouped_matmul_scaled_kernel(
    rows_desc,
    w_desc,
    y_desc,
    tensors,
    placement,
    peers,
    rank,
    bound,
    max_tokens,
    topk,
    experts,
    weight,
    block_experts,
    blocks,
    num_producers,
    tile_cols,
    k_blocks,
    C: gl.constexpr,
):
    """Start the partitions."""
    sizes = Sizes(
        max_tokens, topk, experts, weight, block_experts, blocks, num_producers, tile_cols, k_blocks
    )
    ring = make_ring(rows_desc, w_desc, C.TILE_M, C.TILE_K, C.STAGES, 1, SHARERS)
    box0 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    box1 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    shared = Operands(ring, box0, make_deal(SHARERS))
    parts = gl.num_programs(0) * 4
    gl.warp_specialize(
        [
            (
                multiply_scaled_partition,
                (tensors, placement, y_desc, box0, shared, peers, bound, sizes, parts, 0, C),
            ),
            (
                multiply_scaled_partition,
                (tensors, placement, y_desc, box1, shared, peers, bound, sizes, parts, 1, C),
            ),
            (
                load_partition,
                (tensors, placement, rows_desc, w_desc, shared, peers, sizes, parts, C),
            ),
            (move_partition, (tensors, placement, peers, rank, sizes, parts, C)),
        ],
        [4, 1, PUSH_WARPS],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS, MOVE_REGISTERS],
    )


WORDS = (
    *(f"tensors.{name}" for name in Tensors._fields),
    *(f"placement.{name}" for name in ScaledPlacement._fields),
)
MAPS = ("rows_desc", "w_desc", "y_desc")


def launcher(
    peers: Peers,
    config: DispatchConfig,
    rank: int,
    world_size: int,
    max_tokens: int,
    topk: int,
    bound: int,
    w: torch.Tensor,
    num_sms: int,
) -> Launch:
    """Launches for one shape, called with (packed x, w, y, fields of the plan, w_scale). The Triton
    kernel, which has the same protocol, runs where TMA cannot read w."""
    common = (rank, world_size, max_tokens, topk, bound, w, num_sms)
    programs, fixed, c = arguments(peers, config, *common, gathered=False)
    plain = triton_launcher(peers, portable(config, fp8=True), *common)
    (experts, cols, depth), pitch, units = w.shape, pitch_of(w), cdiv(bound, UNIT.value)

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        fields: Sequence[torch.Tensor],
        w_scale: torch.Tensor,
        rows: torch.Tensor,
        placed: torch.Tensor,
    ) -> Call:
        offsets, row_entry, _, _, send_order, send_offsets = fields
        tensors = Tensors(x, y, offsets, row_entry, send_order, send_offsets)
        scales = rows.view(torch.float32)[:, depth // 4 :]
        placement = ScaledPlacement(rows, placed, scales, w_scale)
        words = [t.data_ptr() for t in (*tensors, *placement)]
        by_tma = words[1] % 16 == 0
        # where TMA cannot store y, its descriptor, which the kernel does not use, is of rows
        first, weight = rows.data_ptr(), w.data_ptr()
        target = words[1] if by_tma else first

        def changing() -> dict[str, Any]:
            box = [SHARE.value, WIDTH.value]
            of_rows, of_w = [c.TILE_M, c.TILE_K], [c.TILE_N, c.TILE_K]
            return {
                "rows_desc": descriptor(first, w.dtype, [bound, depth], pitch, of_rows),
                "w_desc": descriptor(weight, w.dtype, [experts * cols, depth], depth, of_w),
                "y_desc": descriptor(target, y.dtype, [bound, cols], cols, box),
                "tensors": tensors,
                "placement": placement,
                "C": c._replace(BY_TMA=by_tma),
            }

        return (y.dtype, alignment(words)), words, changing, (first, weight, target)

    scaled = Launcher(
        dispatch_grouped_matmul_scaled_kernel,
        programs,
        {**fixed, "bound": bound},
        pack,
        WORDS,
        MAPS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )

    def launch(
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        fields: Sequence[torch.Tensor],
        w_scale: torch.Tensor,
    ) -> None:
        if (x.data_ptr() | w.data_ptr()) % 16:
            plain(x, w, y, fields, w_scale)
            return
        rows = x.new_empty(bound, pitch)
        placed = torch.zeros(units, dtype=torch.int32, device=x.device)
        scaled(x, w, y, fields, w_scale, rows, placed)

    return launch
