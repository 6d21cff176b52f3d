"""The Hopper twin of ``dispatch_grouped_matmul``: the same protocol, warp-specialised in Gluon.

Read ``kernels/experts/dispatch_triton.py`` first: equation, signals, timeline and proof are there and hold here. What differs:

- Three partitions: *gather* waits, brings the rows of a tile from where they are, 16 bytes a lane by ``cp.async``, and asks
  TMA for weights; *multiply* runs wgmma and the epilogue; *push* sends own tokens, in the first programs, beside the other two.
- *gather* draws the number of a tile (``counters``) and hands it to *multiply* through shared memory; *push* draws none.
- A buffer of the ring is full when TMA has brought the weights and every lane of *gather* its part of the rows: each lane's
  arrival is asked for behind its copies (``cp.async.mbarrier.arrive``), so *gather* never waits for what it asked for.
- Once every peer has signalled its last block, behind which all its tokens are here, *gather* looks at no signal any more.

Limits: K a multiple of ``tile_k``; experts one behind the other, rows at multiples of 16 bytes. ``DEPTH_FIRST``: they are
[E_local, K, N] in memory, as backward reads them; a buffer of the ring is then [TILE_K, TILE_N], which wgmma reads as well.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tileweave.device.gluon.matmul import claim, load_expert, make_ring
from tileweave.device.gluon.signal import acquire, leave
from tileweave.device.gluon.tickets import deal, make_deal
from tileweave.kernels.experts.dispatch_hopper_roles import (
    MAX_BLOCKS,
    PUSH_WARPS,
    SET,
    TICKETS,
    UNSPECIALIZED,
    all_have,
    await_all,
    clear_counters,
    first_expert,
    multiply_partition,
    place_in_expert,
    push_tokens,
    row_steps,
    wait_steps,
    walk_to,
)
from tileweave.kernels.experts.dispatch_triton import launcher as TritonLauncher
from tileweave.kernels.experts.dispatch_triton import depth_first
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import DispatchConfig, dispatch_counts

GATHER_WARPS = gl.constexpr(2)
PUSH_BLOCK = 4096  # elements of a token that *push* has in flight: 64 a thread

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def row_addresses(
    x, slot, row_entry, first_row, end, max_tokens, topk, depth, rank, rows: gl.constexpr, WORLD_SIZE: gl.constexpr,
    TILE_M: gl.constexpr,
):  # fmt: skip
    """Pointers to a tile's rows, in x or in the slot; rows past the end repeat the last."""
    row = gl.minimum(first_row + gl.arange(0, TILE_M, layout=rows), end - 1)
    token = gl.load(row_entry + row) // topk
    step = (rank + WORLD_SIZE - token // max_tokens) % WORLD_SIZE
    token = token % max_tokens
    remote = ((step - 1).to(gl.int64) * max_tokens + token) * depth
    return gl.where(step == 0, x + token.to(gl.int64) * depth, slot + remote)


@gluon.jit
def gather_partition(
    x, w_desc, ring, line, counters, offsets, row_entry, slots, signals, control,
    report, slot_size, rank, max_tokens, topk, experts, cols, depth, block_experts, blocks, tile_cols, k_blocks, num_partitions,
    WORLD_SIZE: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """For each tile wait for its sources, then keep the ring full."""
    LANES: gl.constexpr = TILE_K // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [GATHER_WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    epoch = gl.load(control, volatile=True)
    slot = slots + (epoch & 1).to(gl.int64) * slot_size
    k = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, layout))
    place = gl.arange(0, TILE_M, layout=row_layout)
    turn = 0
    acquire(epoch)
    arrived = False  # everything, and acquired by the ``wait_steps`` of the tile that found it so
    tickets = counters + (epoch & 1) * SET + TICKETS
    count = 0
    tile = deal(tickets, count, line, GATHER_WARPS)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
        pointers = row_addresses(
            x,
            slot,
            row_entry,
            first_row,
            walk.end,
            max_tokens,
            topk,
            depth,
            rank,
            row_layout,
            WORLD_SIZE,
            TILE_M,
        )
        if not arrived:
            arrived = all_have(signals, blocks - 1, rank, epoch, WORLD_SIZE, GATHER_WARPS)
            nearest = row_steps(row_entry, first_row, max_tokens, topk, rank, WORLD_SIZE)
            farthest = row_steps(
                row_entry,
                gl.minimum(first_row + TILE_M, walk.end) - 1,
                max_tokens,
                topk,
                rank,
                WORLD_SIZE,
            )
            wait_steps(
                signals, walk.expert // block_experts, nearest, farthest, rank, epoch, tile, control, report, WORLD_SIZE,
                GATHER_WARPS,
            )  # fmt: skip
        there = (first_row + place < walk.end)[:, None]
        for block in range(0, k_blocks):
            at = claim(ring, turn, TILE_N * TILE_K * 2, STAGES)
            load_expert(
                w_desc, walk.expert, cols, depth, col * TILE_N, block * TILE_K, ring.ready.index(at), ring.b.index(at),
                DEPTH_FIRST,
            )  # fmt: skip
            source = gl.multiple_of(pointers[:, None] + (block * TILE_K + k)[None, :], [1, 16])
            copy_async(ring.a.index(at), source, there)
            async_copy.mbarrier_arrive(ring.ready.index(at), increment_count=False)
            turn += 1
        count += 1
        tile = deal(tickets, count, line, GATHER_WARPS)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave(control, epoch, num_partitions)


@gluon.jit
def push_partition(
    x, send_order, send_offsets, slot_table, signal_table, signals, control, report, counters,
    slot_size, rank, max_tokens, experts, depth, block_experts, blocks, num_producers, num_partitions,
    WORLD_SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Two warps: this program's share of the own tokens; at last, in the last program, wait for all ranks."""
    program = gl.program_id(0)
    epoch = gl.load(control, volatile=True)
    clear_counters(counters, epoch, program)
    push_tokens(
        x, send_order, send_offsets, slot_table, signal_table, counters, (epoch & 1).to(gl.int64) * slot_size, rank,
        max_tokens, experts, depth, block_experts, blocks, program, num_producers, epoch, WORLD_SIZE, BLOCK,
    )  # fmt: skip
    await_all(signals, blocks, program, rank, epoch, control, report, WORLD_SIZE)
    leave(control, epoch, num_partitions)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_hopper_kernel(
    w_desc, y_desc, x, y, offsets, row_entry, send_order, send_offsets, slots, slot_table, signal_table, signals, control,
    report, counters,
    slot_size, rank, max_tokens, topk, experts, cols, depth, block_experts, blocks, num_producers, tile_cols, k_blocks,
    WORLD_SIZE: gl.constexpr, PUSH_BLOCK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, BY_TMA: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions."""
    ring = make_ring(w_desc, w_desc, TILE_M, TILE_K, STAGES, 32 * GATHER_WARPS + 1)
    y_buffer = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    line = make_deal()
    num_partitions = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (multiply_partition, (
                y, y_desc, y_buffer, ring, line, offsets, control, experts, cols,
                tile_cols, k_blocks, num_partitions, TILE_M, TILE_N, GROUP_M, STAGES, WARPS, HALVES, BY_TMA, DEPTH_FIRST, True,
            )),
            (gather_partition, (
                x, w_desc, ring, line, counters, offsets, row_entry, slots, signals,
                control, report, slot_size, rank, max_tokens, topk, experts, cols, depth, block_experts, blocks, tile_cols,
                k_blocks, num_partitions, WORLD_SIZE, TILE_M, TILE_N, TILE_K, GROUP_M, STAGES, DEPTH_FIRST,
            )),
            (push_partition, (
                x, send_order, send_offsets, slot_table, signal_table, signals, control, report, counters,
                slot_size, rank, max_tokens, experts, depth, block_experts, blocks, num_producers, num_partitions, WORLD_SIZE,
                PUSH_BLOCK,
            )),
        ],
        [GATHER_WARPS, PUSH_WARPS],
        [GATHER_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip


def takes(x: torch.Tensor, w: torch.Tensor, config: DispatchConfig) -> bool:
    """Whether this kernel can run these operands; if not, the Triton kernel does, which speaks the same protocol."""
    whole = w.transpose(1, 2) if depth_first(w) else w
    pitch = whole.stride(1) * w.element_size()
    return (
        w.shape[2] % config.tile_k == 0 and w.stride(0) == whole.shape[1] * whole.stride(1) and pitch % 16 == 0
        and (x.data_ptr() | w.data_ptr()) % 16 == 0
    )  # fmt: skip


class Launcher:
    """One shape's launches; as ``dispatch_grouped_matmul.Launcher``, for what :func:`takes`."""

    def __init__(
        self,
        peers: Peers,
        config: DispatchConfig,
        rank: int,
        world_size: int,
        max_tokens: int,
        topk: int,
        bound: int,
        w: torch.Tensor,
        num_sms: int,
    ) -> None:
        c, (experts, cols, depth) = config, w.shape
        self.peers, self.config, self.bound = peers, config, bound
        counts = dispatch_counts(c, experts, cols, bound, num_sms, MAX_BLOCKS.value)
        self.programs, producers, per_block, tile_cols = counts
        self.integers = (
            peers.slot_size, rank, max_tokens, topk, experts, cols, depth, per_block, cdiv(experts, per_block),
            producers, tile_cols, cdiv(depth, c.tile_k),
        )  # fmt: skip
        self.halves = 2 if c.tile_m * c.tile_n > 128 * 128 else 1
        self.constants = (
            world_size,
            PUSH_BLOCK,
            c.tile_m,
            c.tile_n,
            c.tile_k,
            c.group_m,
            c.num_stages,
            c.num_warps,
        )
        self.plain = TritonLauncher(
            peers, _portable(c), rank, world_size, max_tokens, topk, bound, w, num_sms
        )

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        """Launch on the current stream. ``fields``: those of the plan, in order. Returns rows in order, if it makes them."""
        if takes(x, w, self.config):
            return self.launch(x, w, y, fields)
        return self.plain(x, w, y, fields)

    def maps(self, w: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any, bool, bool]:
        """(descriptors of w and y, whether TMA can store y, whether experts are depth first).

        Where it cannot, y's is of w: a descriptor must be of something, and the kernel does not use it.
        """
        c, (experts, cols, depth) = self.config, w.shape
        by_tma = cols * y.element_size() % 16 == 0 and y.data_ptr() % 16 == 0
        turned = depth_first(w)
        shape, tile = [experts * cols, depth], [c.tile_n, c.tile_k]
        if turned:
            shape, tile = [experts * depth, cols], [c.tile_k, c.tile_n]
        w_desc = descriptor(w.data_ptr(), w.dtype, shape, w.stride(2 if turned else 1), tile)
        target, shape = (
            (y.data_ptr(), [self.bound, cols])
            if by_tma
            else (w.data_ptr(), [experts * cols, depth])
        )
        y_desc = descriptor(target, y.dtype, shape, shape[1], [c.tile_m, c.tile_n // self.halves])
        return w_desc, y_desc, by_tma, turned

    def launch(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        p = self.peers
        offsets, row_entry, _, _, send_order, send_offsets = fields
        w_desc, y_desc, by_tma, turned = self.maps(w, y)
        dispatch_grouped_matmul_hopper_kernel[(self.programs,)](
            w_desc, y_desc, x, y, offsets, row_entry, send_order, send_offsets, p.slots, p.slot_table, p.signal_table,
            p.signals, p.control, p.report, p.counters, *self.integers, *self.constants, self.halves, by_tma, 96, turned,
            num_warps=self.config.num_warps, maxnreg=168,
        )  # fmt: skip
        return None


def _portable(c: DispatchConfig) -> DispatchConfig:
    """A cut for the Triton kernel that does for any shape."""
    rows = min(c.tile_m, 128)
    return DispatchConfig(
        "triton",
        rows,
        128,
        64,
        3,
        8 if rows == 128 else 4,
        c.group_m,
        signal_blocks=c.signal_blocks,
    )
