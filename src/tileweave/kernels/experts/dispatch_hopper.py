"""``dispatch_grouped_matmul`` for Hopper: the same protocol, warp-specialized in Gluon.

Read ``dispatch_triton.py`` first: equation, signals, timeline and proof are there and hold here.
What differs:

- There are three partitions: *gather* waits, loads the rows of a tile from where they are, 16 bytes
  per lane by ``cp.async``, and asks TMA for weights; *multiply* runs wgmma and the epilogue; *push*
  sends own tokens, in the first programs, concurrently with the other two.
- *gather* draws the number of a tile (``counters``) and hands it to *multiply* through shared
  memory; *push* draws none.
- A buffer of the ring is full when TMA has brought the weights and every lane of *gather* its part
  of the rows: each lane's arrival follows its copies (``cp.async.mbarrier.arrive``), so *gather*
  never waits for its own copies.
- Once every peer has signaled its last block, after which all its tokens are here, *gather* polls
  no signal any more.

Limits: K a multiple of ``tile_k``; experts one after the other, rows at multiples of 16 bytes. With
``DEPTH_FIRST`` a buffer of the ring is [TILE_K, TILE_N], which wgmma reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tileweave.device.gluon.matmul import claim, load_expert, make_ring
from tileweave.device.gluon.peers import leave, load_epoch
from tileweave.device.gluon.signal import acquire
from tileweave.device.gluon.tickets import deal, make_deal
from tileweave.kernels.experts.dispatch_hopper_roles import (
    PUSH_WARPS,
    UNSPECIALIZED,
    Choices,
    Operands,
    Sizes,
    Tensors,
    Weight,
    all_have,
    await_all,
    clear_counters,
    first_expert,
    multiply_partition,
    place_in_expert,
    push_tokens,
    row_sources,
    row_steps,
    wait_steps,
    walk_to,
)
from tileweave.kernels.experts.dispatch_triton import SET, TICKETS, Launch, depth_first, pitch_of
from tileweave.kernels.experts.dispatch_triton import launcher as triton_launcher
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import DispatchConfig, dispatch_counts
from tileweave.transport import protocol

GATHER_WARPS = gl.constexpr(2)
GATHER_REGISTERS = gl.constexpr(96)
PUSH_BLOCK = 4096  # elements of a token that *push* has in flight: 64 per thread
MAX_REGISTERS = 168  # per thread, when a program begins

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def gather_partition(
    tensors, w_desc, operands, peers, rank, sizes, num_partitions, C: gl.constexpr
):
    """For each tile wait for its sources, then keep the ring full."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_K: gl.constexpr = C.TILE_K
    LANES: gl.constexpr = TILE_K // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [GATHER_WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    ring, deals = operands.ring, operands.deals
    offsets, experts, tile_cols = tensors.offsets, sizes.experts, sizes.tile_cols
    epoch = load_epoch(peers)
    slot = peers.slots + (epoch & 1).to(gl.int64) * peers.slot_size
    k = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, layout))
    place = gl.arange(0, TILE_M, layout=row_layout)
    turn = 0
    acquire(epoch)
    # whether all tokens are here, and acquired by the ``wait_steps`` of the tile that found it so
    arrived = False
    tickets = peers.counters + (epoch & 1) * SET + TICKETS
    count = 0
    tile = deal(tickets, count, deals, GATHER_WARPS)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        # rows past the end repeat the last
        row = gl.minimum(first_row + gl.arange(0, TILE_M, layout=row_layout), walk.end - 1)
        pointers = row_sources(tensors, slot, row, rank, sizes, WORLD_SIZE)
        if not arrived:
            arrived = all_have(peers, rank, sizes.blocks - 1, epoch, WORLD_SIZE, GATHER_WARPS)
            nearest = row_steps(tensors, first_row, rank, sizes, WORLD_SIZE)
            last = gl.minimum(first_row + TILE_M, walk.end) - 1
            farthest = row_steps(tensors, last, rank, sizes, WORLD_SIZE)
            wait_steps(
                peers,
                rank,
                walk.expert // sizes.block_experts,
                nearest,
                farthest,
                epoch,
                tile,
                WORLD_SIZE,
                GATHER_WARPS,
            )
        there = (first_row + place < walk.end)[:, None]
        for block in range(0, sizes.k_blocks):
            at = claim(ring, turn, TILE_N * TILE_K * 2, C.STAGES)
            load_expert(
                w_desc,
                walk.expert,
                sizes.weight.cols,
                sizes.weight.depth,
                col * TILE_N,
                block * TILE_K,
                ring.ready.index(at),
                ring.b.index(at),
                C.DEPTH_FIRST,
            )
            source = gl.multiple_of(pointers[:, None] + (block * TILE_K + k)[None, :], [1, 16])
            copy_async(ring.a.index(at), source, there)
            async_copy.mbarrier_arrive(ring.ready.index(at), increment_count=False)
            turn += 1
        count += 1
        tile = deal(tickets, count, deals, GATHER_WARPS)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave(peers, epoch, num_partitions)


@gluon.jit
def push_partition(tensors, peers, rank, sizes, num_partitions, C: gl.constexpr):
    """Two warps: this program's part of the own tokens; finally, in the last program, wait for all
    ranks."""
    program = gl.program_id(0)
    epoch = load_epoch(peers)
    clear_counters(peers, epoch, program)
    slot_offset = (epoch & 1).to(gl.int64) * peers.slot_size
    push_tokens(tensors, peers, rank, sizes, slot_offset, program, epoch, C)
    await_all(peers, rank, sizes.blocks, program, epoch, C.WORLD_SIZE)
    leave(peers, epoch, num_partitions)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_hopper_kernel(
    w_desc,
    y_desc,
    tensors,
    peers,
    rank,
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
    ring = make_ring(w_desc, w_desc, C.TILE_M, C.TILE_K, C.STAGES, 32 * GATHER_WARPS + 1)
    y_buffer = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    operands = Operands(ring, y_buffer, make_deal())
    parts = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (multiply_partition, (tensors, y_desc, operands, peers, sizes, parts, C)),
            (gather_partition, (tensors, w_desc, operands, peers, rank, sizes, parts, C)),
            (push_partition, (tensors, peers, rank, sizes, parts, C)),
        ],
        [GATHER_WARPS, PUSH_WARPS],
        [GATHER_REGISTERS, GATHER_REGISTERS],
    )


# what changes between launches
WORDS = tuple(f"tensors.{name}" for name in Tensors._fields)
MAPS = ("w_desc", "y_desc")


def takes(x: torch.Tensor, w: torch.Tensor, config: DispatchConfig) -> bool:
    """Whether this kernel can run these operands; if not, the Triton kernel does, which has the
    same protocol."""
    whole = w.transpose(1, 2) if depth_first(w) else w
    pitch = whole.stride(1) * w.element_size()
    return (
        w.shape[2] % config.tile_k == 0
        and w.stride(0) == whole.shape[1] * whole.stride(1)
        and pitch % 16 == 0
        and (x.data_ptr() | w.data_ptr()) % 16 == 0
    )


def arguments(
    peers: Peers,
    config: DispatchConfig,
    rank: int,
    world_size: int,
    max_tokens: int,
    topk: int,
    bound: int,
    w: torch.Tensor,
    num_sms: int,
    gathered: bool,
) -> tuple[int, dict[str, Any], Choices]:
    """(programs, arguments that are the same in every launch, choices) for one shape, of this
    kernel or of the one that orders rows."""
    c, (experts, cols, depth) = config, w.shape
    counts = dispatch_counts(c, experts, cols, bound, num_sms, protocol.MAX_SLICES)
    programs, producers, per_block, tile_cols = counts
    fixed = {
        "peers": peers,
        "rank": rank,
        "max_tokens": max_tokens,
        "topk": topk,
        "experts": experts,
        "weight": Weight(cols, depth, pitch_of(w)),
        "block_experts": per_block,
        "blocks": cdiv(experts, per_block),
        "num_producers": producers,
        "tile_cols": tile_cols,
        "k_blocks": cdiv(depth, c.tile_k),
    }
    choices = Choices(
        WORLD_SIZE=world_size,
        PUSH_BLOCK=PUSH_BLOCK,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        STAGES=c.num_stages,
        WARPS=c.num_warps,
        HALVES=2 if c.tile_m * c.tile_n > 128 * 128 else 1,
        GATHERED=gathered,
        DEPTH_FIRST=depth_first(w),
    )
    return programs, fixed, choices


def packing(choices: Choices, bound: int, w: torch.Tensor) -> Callable[..., Call]:
    """What packs (x, w, y, fields of the plan) of this shape; see :class:`Launcher`."""
    c, (experts, cols, depth) = choices, w.shape
    turned, whole = c.DEPTH_FIRST, cols * w.element_size() % 16 == 0
    shape, tile = [experts * cols, depth], [c.TILE_N, c.TILE_K]
    if turned:
        shape, tile = [experts * depth, cols], [c.TILE_K, c.TILE_N]
    stride = w.stride(2 if turned else 1)

    def pack(
        x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: Sequence[torch.Tensor]
    ) -> Call:
        offsets, row_entry, _, _, send_order, send_offsets = fields
        tensors = Tensors(x, y, offsets, row_entry, send_order, send_offsets)
        words = [t.data_ptr() for t in tensors]
        weight, by_tma = w.data_ptr(), whole and words[1] % 16 == 0
        # Where TMA cannot store y, its descriptor is of w: it must be of something, and the kernel
        # does not use it.
        target = words[1] if by_tma else weight

        def changing() -> dict[str, Any]:
            size = [bound, cols] if by_tma else [experts * cols, depth]
            half = [c.TILE_M, c.TILE_N // c.HALVES]
            return {
                "w_desc": descriptor(weight, w.dtype, shape, stride, tile),
                "y_desc": descriptor(target, y.dtype, size, size[1], half),
                "tensors": tensors,
                "C": c._replace(BY_TMA=by_tma),
            }

        return alignment(words), words, changing, (weight, target)

    return pack


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
    """Launches for one shape, as ``dispatch_triton.launcher``: of this kernel for what it
    :func:`takes`."""
    common = (rank, world_size, max_tokens, topk, bound, w, num_sms)
    programs, fixed, choices = arguments(peers, config, *common, gathered=True)
    plain = triton_launcher(peers, portable(config), *common)
    gather = Launcher(
        dispatch_grouped_matmul_hopper_kernel,
        programs,
        fixed,
        packing(choices, bound, w),
        WORDS,
        MAPS,
        num_warps=config.num_warps,
        maxnreg=MAX_REGISTERS,
    )

    def launch(
        x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: Sequence[torch.Tensor]
    ) -> None:
        (gather if takes(x, w, config) else plain)(x, w, y, fields)

    return launch


def portable(c: DispatchConfig, fp8: bool = False) -> DispatchConfig:
    """A config for the Triton kernel that works for any shape."""
    rows = min(c.tile_m, 128)
    warps = 8 if rows == 128 else 4
    depth = 128 if fp8 else 64
    return DispatchConfig(
        "triton", rows, 128, depth, 3, warps, c.group_m, signal_blocks=c.signal_blocks
    )
