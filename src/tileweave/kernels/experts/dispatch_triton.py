"""dispatch_grouped_matmul: y[row] = x[token of row] @ experts[expert of row].T, tokens from all ranks, in one launch.

    x        [T, K]              own tokens; read where they are
    slot     [R-1, max_tokens, K]  one of two, by parity of the epoch; place i holds tokens of rank-1-i, token t at [i, t]
    experts  [E_local, N, K]     y [bound, N], rows expert by expert as the plan says (``ops/experts/routing_plan.py``)
    plan     row_entry [bound]: row -> entry, (rank * max_tokens + t) * k + j; offsets [E_local + 1]: first row of each expert;
             send_order, send_offsets: for each destination the own tokens by lowest expert there, and where each expert begins

Who writes, who reads. A rank sends each of its tokens once to each other rank that has an expert of it, to a place that needs
no index: [i, t]. Nothing is permuted: the rows of a tile are gathered by their addresses, in x or in the slot. Tokens go
out in the order in which the receiver's tiles need them: by the lowest expert there. Experts are cut into *blocks* of
``block_experts``; behind the tokens whose lowest expert is in block b or before, the sender signals b.

==================  =====  ======================================  =========================================================
signal (int32)      value  notifier                                waiter
==================  =====  ======================================  =========================================================
[source, block]     epoch  ``source``'s program that is the last   tiles of experts in ``block`` with rows from ``source``; the
                           to have pushed its share of the block   last program, for the last block, before it leaves
==================  =====  ======================================  =========================================================

    producers      | push block 0 | push block 1 | ... | tiles ...
    other programs | tiles of expert 0, own rows | expert 0, rows of rank-1 ... | expert 1 ...
                                                 ^ wait, once a tile: long there, if ranks are in step

Rows of an expert begin with the own ones, then follow those of rank-1, rank-2, ...; so a tile has rows of few sources.
Tiles are handed out one by one (``counters``), in the order of experts: weights are shared by who works side by side, and
programs that push, or wait, take fewer.

Why no slot is overwritten: every rank signals every peer in every call, also with nothing to send, and the last program waits
for the last block of all, which is signalled behind all others. So when my call n ends each peer has begun call n, hence
ended n-1, the last reader of the slot that call n+1 writes. The counters are two sets by parity too; program 0 clears those of
the next call.

Why nobody is stuck: pushing waits for nobody and precedes multiplying in every program that does both; waits are for other
ranks' pushes only. Producers are the lowest programs and there are no more programs than multiprocessors, so all of them run.

Limits: x contiguous, experts along K or (``DEPTH_FIRST``, as backward reads them) along N; fp32
accumulation. Rows of y from ``offsets[-1]`` on are not written.
Sources: the expert layout of torch._grouped_mm; tokens once a rank and not once an expert, as DeepEP's dispatch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tileweave.device.triton.matmul import matmul_tile
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.signal import (
    consume_token,
    faulted,
    leave,
    load_epoch,
    notify_all,
    wait,
)
from tileweave.kernels.experts.tiles import first_expert, place_in_expert, walk_to
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.grouped import DispatchConfig, dispatch_counts

MAX_BLOCKS = tl.constexpr(32)  # signal words of a source
TICKETS, PUSHED = tl.constexpr(0), tl.constexpr(1)  # counters of a call: [PUSHED + block]
# Counters of a call; there are two sets. The last word is for ``dispatch_hopper_ordered.py``.
SET = tl.constexpr(MAX_BLOCKS + 2)
COUNTERS = 2 * 34


@triton.jit
def clear_counters(counters, epoch):
    """Program 0: zero what the next call counts."""
    at = tl.arange(0, 64)
    tl.store(counters + (1 - (epoch & 1)) * SET + at, tl.zeros((64,), tl.int32), mask=at < SET)


@triton.jit
def push_tokens(
    x, send_order, send_offsets, slot_table, signal_table, counters, slot_offset, rank, max_tokens, depth, experts,
    block_experts, blocks, program, num_producers, epoch,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Producer: this program's share of the own tokens to the ranks that need them, block by block of their experts."""
    for block in range(0, blocks):
        first = block * block_experts
        last = tl.minimum(first + block_experts, experts)
        most = tl.cast(0, tl.int32)
        for step in tl.static_range(1, WORLD_SIZE):
            bounds = send_offsets + (rank + step) % WORLD_SIZE * (experts + 1)
            most = tl.maximum(most, tl.load(bounds + last) - tl.load(bounds + first))
        for begin in range(program * ROWS, most, num_producers * ROWS):
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                bounds = send_offsets + peer * (experts + 1)
                index = tl.load(bounds + first) + begin + tl.arange(0, ROWS)
                there = index < tl.load(bounds + last)
                token = tl.load(send_order + peer * max_tokens + index, mask=there, other=0).to(
                    tl.int64
                )
                slot = symm_at(slot_table, peer, x.dtype.element_ty, 16) + slot_offset
                slot += (step - 1) * max_tokens.to(tl.int64) * depth
                for column in range(0, depth, WIDTH):
                    at = column + tl.arange(0, WIDTH)
                    mask = there[:, None] & (at < depth)[None, :]
                    within = token[:, None] * depth + at[None, :]
                    tl.store(slot + within, tl.load(x + within, mask=mask, other=0.0), mask=mask)
        tl.debug_barrier()
        pushed = counters + (epoch & 1) * SET + PUSHED + block
        if tl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == num_producers - 1:
            notify_all(signal_table, rank * MAX_BLOCKS + block, rank, epoch, WORLD_SIZE, False)


@triton.jit
def gather_rows(
    x, slot, row_entry, first_row, end, max_tokens, topk, depth, rank,
    WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """(pointers to a tile's rows in x or the slot, how far down the ranks its first and its last row come from).

    ``step`` ranks down: of rank - step, 0: own. Rows past the end repeat the last. ``ALIGNED``: rows are at multiples of 16
    bytes, which the compiler does not see behind a choice of bases.
    """
    row = tl.minimum(first_row + tl.arange(0, TILE_M), end - 1)
    token = tl.load(row_entry + row) // topk
    step = (rank + WORLD_SIZE - token // max_tokens) % WORLD_SIZE
    token = token % max_tokens
    remote = ((step - 1).to(tl.int64) * max_tokens + token) * depth
    own = token.to(tl.int64) * depth
    if is_hip():  # its pointer analysis in Triton 3.6 cannot choose between two bases: go from one to the other
        apart = (x.to(tl.int64) - slot.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
        pointers = slot + tl.where(step == 0, apart + own, remote)
    else:
        pointers = tl.where(step == 0, x + own, slot + remote)
        if ALIGNED:
            pointers = tl.multiple_of(pointers, 16)
    return pointers, tl.min(step, axis=0), tl.max(step, axis=0)


@triton.jit
def wait_steps(
    signals, block, nearest, farthest, rank, epoch, tile, control, report, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Wait for ``block`` from the ranks ``nearest`` to ``farthest`` steps down, but for this rank. Returns a token."""
    token = tl.cast(0, tl.int32)
    for step in range(tl.maximum(nearest, 1), farthest + 1):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        token = wait(signals, 1, epoch, source * MAX_BLOCKS + block, tile, control, report)
    return token


@triton.jit
def store_rows(
    acc, y, first_row, end, tile_col, cols, control, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """Epilogue: rounding once, masked store; NaN if a wait of this rank ran out of time."""
    row = first_row + tl.arange(0, TILE_M)
    col = tile_col * TILE_N + tl.arange(0, TILE_N)
    acc = tl.where(faulted(control) != 0, float("nan"), acc)
    mask = (row < end)[:, None] & (col < cols)[None, :]
    tl.store(
        y + row.to(tl.int64)[:, None] * cols + col[None, :], acc.to(y.dtype.element_ty), mask=mask
    )


UNSPECIALIZED = [
    "rank",
    "max_tokens",
    "topk",
    "experts",
    "block_experts",
    "blocks",
    "num_producers",
    "tile_cols",
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_kernel(
    x, w, y, offsets, row_entry, send_order, send_offsets, slots, slot_table, signal_table, signals, control, report, counters,
    slot_size, rank, max_tokens, topk, experts, cols, depth, stride_expert, stride_w, block_experts, blocks, num_producers,
    tile_cols, k_blocks,
    WORLD_SIZE: tl.constexpr, PUSH_ROWS: tl.constexpr, PUSH_WIDTH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    FEW_ROWS: tl.constexpr, DEPTH_FIRST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Push, then take tiles; see the module's docstring for the protocol."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    if program == 0:
        clear_counters(counters, epoch)
    if program < num_producers:
        push_tokens(
            x, send_order, send_offsets, slot_table, signal_table, counters, slot_offset, rank, max_tokens, depth, experts,
            block_experts, blocks, program, num_producers, epoch, WORLD_SIZE, PUSH_ROWS, PUSH_WIDTH,
        )  # fmt: skip
    tickets = counters + (epoch & 1) * SET + TICKETS
    tile = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        following = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
        a_rows, nearest, farthest = gather_rows(
            x,
            slots + slot_offset,
            row_entry,
            first_row,
            walk.end,
            max_tokens,
            topk,
            depth,
            rank,
            WORLD_SIZE,
            TILE_M,
            ALIGNED,
        )
        token = wait_steps(
            signals,
            walk.expert // block_experts,
            nearest,
            farthest,
            rank,
            epoch,
            tile,
            control,
            report,
            WORLD_SIZE,
        )
        acc = matmul_tile(
            a_rows, w + walk.expert.to(tl.int64) * stride_expert, stride_w, col, cols, depth, consume_token(0, token), k_blocks,
            TILE_M, TILE_N, TILE_K, EVEN_K, walk.end - first_row, FEW_ROWS, DEPTH_FIRST,
        )  # fmt: skip
        store_rows(acc, y, first_row, walk.end, col, cols, control, TILE_M, TILE_N)
        tile = following
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    if program == num_programs - 1:
        wait_steps(
            signals, blocks - 1, 1, WORLD_SIZE - 1, rank, epoch, -1, control, report, WORLD_SIZE
        )
    leave(control, epoch, num_programs)


def depth_first(w: torch.Tensor) -> bool:
    """Whether experts [E_local, N, K] stand in memory as [E_local, K, N]."""
    return w.stride(2) != 1 and w.shape[2] > 1


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments."""

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
        self.peers, self.config = peers, config
        counts = dispatch_counts(c, experts, cols, bound, num_sms, MAX_BLOCKS.value)
        self.programs, producers, per_block, tile_cols = counts
        self.integers = (
            peers.slot_size, rank, max_tokens, topk, experts, cols, depth, w.stride(0), w.stride(2 if depth_first(w) else 1),
            per_block, triton.cdiv(experts, per_block), producers, tile_cols, triton.cdiv(depth, c.tile_k),
        )  # fmt: skip
        width = min(triton.next_power_of_2(depth), 256 * c.num_warps)
        self.constants = (
            world_size, c.push_rows, width, c.tile_m, c.tile_n, c.tile_k, c.group_m, depth % c.tile_k == 0, c.tile_m <= 64,
            depth_first(w),
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: tuple[torch.Tensor, ...]
    ) -> None:
        """Launch on the current stream. ``fields``: those of the plan, in its order."""
        p, c = self.peers, self.config
        offsets, row_entry, _, _, send_order, send_offsets = fields
        dispatch_grouped_matmul_kernel[(self.programs,)](
            x, w, y, offsets, row_entry, send_order, send_offsets, p.slots, p.slot_table, p.signal_table, p.signals, p.control,
            p.report, p.counters, *self.integers, *self.constants,
            (x.data_ptr() | x.shape[1] * x.element_size()) % 16 == 0, num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
