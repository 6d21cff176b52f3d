"""dispatch_grouped_matmul: y[row] = x[token of row] @ experts[expert of row].T, in one launch.

    x        [T, K]                own tokens; read where they are
    slot     [R-1, max_tokens, K]  one of two, by parity of the epoch: tokens of the other ranks,
                                   token t of rank-1-i at [i, t]
    experts  [E_local, N, K]       own experts
    y        [bound, N]            rows for the own experts, expert by expert as the plan says
    plan     row_entry, offsets    entry (rank * max_tokens + t) * k + j of each row, first row of
                                   each expert (``ops/experts/routing_plan.py``)
             send_order,           for each destination the own tokens by lowest expert there, and
             send_offsets          where each expert begins

Which rank writes, and which reads. A rank sends each of its tokens once to each other rank that has
an expert of it, to an address that needs no index: [i, t]. Nothing is permuted: the rows of a tile
are gathered by their addresses, in x or in the slot. Tokens are sent in the order in which the
receiver's tiles need them: by the lowest expert there. Experts are cut into *blocks* of
``block_experts``; after the tokens whose lowest expert is in block b or before, the sender signals
b.

==================  =====  ==============================  =======================================
signal (int32)      value  notifier                        waiter
==================  =====  ==============================  =======================================
[source, block]     epoch  the last program of source to   tiles of experts in ``block`` with rows
                           have pushed its part of the     from source; for the last block the
                           block                           last program, before it leaves
==================  =====  ==============================  =======================================

    producers      | push block 0 | push block 1 | ... | tiles ...
    other programs | tiles of expert 0, own rows | expert 0, rows of rank-1 ... | expert 1 ...
                                                 ^ wait once per tile; no time if ranks are in step

Rows of an expert begin with the own ones, then follow those of rank-1, rank-2, ...; so a tile has
rows of few sources. Tiles are tickets (``counters``), in the order of experts: programs that run at
the same time share weights, and programs that push, or wait, take fewer tiles.

Why no slot is overwritten: every rank signals every peer in every call, also with nothing to send,
and the last program waits for the last block of all peers, which is signaled after all others. So
when my call n ends each peer has begun call n, hence ended n-1, the last reader of the slot that
call n+1 writes. There are two sets of counters by parity, too; program 0 clears those of the next
call.

Why no rank waits for ever: pushing does not wait and precedes multiplying in every program that
does both; waits are for pushes of other ranks only. Producers are the lowest programs and there are
no more programs than multiprocessors, so all of them run.

FP8 tokens are *packed*: x and the slot are bytes [.., pitch], K of data, then the scales of each
128 of them, so that one signal announces both (``ops/experts/scaled.py``). Tiles multiply K blocks
by their scales (``device/triton/matmul.py: BlockScales``).

Limits: x contiguous, experts along K or (``DEPTH_FIRST``) along N; fp32 accumulation. Rows of y
from ``offsets[-1]`` on are not written.

Sources: the expert layout of torch._grouped_mm; each token once per rank and not once per expert,
as DeepEP's dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tileweave.device.triton.matmul import BlockScales, matmul_tile
from tileweave.device.triton.peers import faulted, leave, load_epoch, notify_all, slots_at, wait
from tileweave.device.triton.signal import MAX_SLICES, consume_token
from tileweave.kernels.experts.tiles import LOW_TILE, first_expert, place_in_expert, walk_to
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.grouped import DispatchConfig, dispatch_counts, packed_pitch
from tileweave.transport import protocol

MAX_BLOCKS = MAX_SLICES  # signals of a source
# Counters of a call: tickets for tiles, programs that have pushed each block, tickets for units of
# rows (``dispatch_hopper_ordered.py``). There are two sets, by parity of the epoch.
TICKETS, PUSHED = tl.constexpr(0), tl.constexpr(1)
UNITS = tl.constexpr(1 + protocol.MAX_SLICES)
SET = tl.constexpr(2 + protocol.MAX_SLICES)
COUNTERS = 2 * (2 + protocol.MAX_SLICES)


class Tensors(NamedTuple):
    """What a call is about; ``offsets`` to ``send_offsets`` are fields of the plan. ``w_scale``: of
    FP8, else anything."""

    x: Any
    w: Any
    w_scale: Any
    y: Any
    offsets: Any
    row_entry: Any
    send_order: Any
    send_offsets: Any


class Weight(NamedTuple):
    """Sizes of the experts' weights, which Triton specializes.

    cols, depth : of each weight, N and K.

    pitch : elements from a token to the next.

    stride_expert, stride_line : elements from expert to expert, and from line to line.

    k_blocks : blocks of TILE_K in K.
    """

    cols: Any
    depth: Any
    pitch: Any
    stride_expert: Any
    stride_line: Any
    k_blocks: Any


class Sizes(NamedTuple):
    """Sizes of the routing and of the schedule, which Triton does not specialize.

    max_tokens, topk, experts : tokens of a rank at most, choices of a token, experts of a rank.

    block_experts, blocks : experts between two signals, and signals of a source.

    num_producers, tile_cols : programs that push, and tiles across y.
    """

    max_tokens: Any
    topk: Any
    experts: Any
    block_experts: Any
    blocks: Any
    num_producers: Any
    tile_cols: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PUSH_ROWS, PUSH_WIDTH : tokens, and elements of each, that a producer has in flight.

    EVEN_K : K is a multiple of TILE_K, so loads need no mask along K.

    DEPTH_FIRST : experts are [E_local, K, N] in memory, as the backward pass reads them: the
        input gradient of an operator whose weights are [E_local, N, K].

    SCALED : tokens and experts are FP8; TILE_N and TILE_K are 128.

    ALIGNED : rows of x are at multiples of 16 bytes.
    """

    WORLD_SIZE: int
    PUSH_ROWS: int
    PUSH_WIDTH: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    DEPTH_FIRST: bool
    SCALED: bool = False
    ALIGNED: bool = True


@triton.jit
def clear_counters(peers, epoch):
    """Program 0: zero what the next call counts."""
    at = tl.arange(0, 64)
    zero = tl.zeros((64,), tl.int32)
    tl.store(peers.counters + (1 - (epoch & 1)) * SET + at, zero, mask=at < SET)


@triton.jit
def push_tokens(tensors, peers, rank, sizes, pitch, slot_offset, program, epoch, C: tl.constexpr):
    """Producer: send this program's part of the own tokens, block by block of their experts, to the
    ranks that need them."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    ROWS: tl.constexpr = C.PUSH_ROWS
    WIDTH: tl.constexpr = C.PUSH_WIDTH
    x, max_tokens, experts = tensors.x, sizes.max_tokens, sizes.experts
    for block in range(0, sizes.blocks):
        first = block * sizes.block_experts
        last = tl.minimum(first + sizes.block_experts, experts)
        most = tl.cast(0, tl.int32)
        for step in tl.static_range(1, WORLD_SIZE):
            bounds = tensors.send_offsets + (rank + step) % WORLD_SIZE * (experts + 1)
            most = tl.maximum(most, tl.load(bounds + last) - tl.load(bounds + first))
        for begin in range(program * ROWS, most, sizes.num_producers * ROWS):
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                bounds = tensors.send_offsets + peer * (experts + 1)
                index = tl.load(bounds + first) + begin + tl.arange(0, ROWS)
                there = index < tl.load(bounds + last)
                order = tensors.send_order + peer * max_tokens + index
                token = tl.load(order, mask=there, other=0).to(tl.int64)
                slot = slots_at(peers, peer, x.dtype.element_ty) + slot_offset
                slot += (step - 1) * max_tokens.to(tl.int64) * pitch
                for column in range(0, pitch, WIDTH):
                    at = column + tl.arange(0, WIDTH)
                    mask = there[:, None] & (at < pitch)[None, :]
                    within = token[:, None] * pitch + at[None, :]
                    tl.store(slot + within, tl.load(x + within, mask=mask, other=0), mask=mask)
        tl.debug_barrier()
        pushed = peers.counters + (epoch & 1) * SET + PUSHED + block
        if tl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == sizes.num_producers - 1:
            notify_all(peers, rank * MAX_BLOCKS + block, rank, epoch, WORLD_SIZE, False)


@triton.jit
def gather_rows(tensors, slot, rank, sizes, pitch, first_row, end, C: tl.constexpr):
    """(pointers to a tile's rows in x or the slot, steps down the ranks to the sources of its first
    and its last row).

    ``step`` steps down is rank - step; 0 is the own rank. Rows from ``end`` on repeat the last.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_M: tl.constexpr = C.TILE_M
    x, max_tokens = tensors.x, sizes.max_tokens
    row = tl.minimum(first_row + tl.arange(0, TILE_M), end - 1)
    token = tl.load(tensors.row_entry + row) // sizes.topk
    step = (rank + WORLD_SIZE - token // max_tokens) % WORLD_SIZE
    token = token % max_tokens
    remote = ((step - 1).to(tl.int64) * max_tokens + token) * pitch
    own = token.to(tl.int64) * pitch
    if is_hip():
        # The pointer analysis for AMD in Triton 3.6 cannot choose between two bases: go from one to
        # the other.
        apart = (x.to(tl.int64) - slot.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
        pointers = slot + tl.where(step == 0, apart + own, remote)
    else:
        pointers = tl.where(step == 0, x + own, slot + remote)
        if C.ALIGNED:  # the compiler does not see it through a choice of bases
            pointers = tl.multiple_of(pointers, 16)
    return pointers, tl.min(step, axis=0), tl.max(step, axis=0)


@triton.jit
def wait_steps(peers, rank, block, nearest, farthest, epoch, tile, WORLD_SIZE: tl.constexpr):
    """Wait for ``block`` from the ranks ``nearest`` to ``farthest`` steps down, but not for this
    rank. Returns a token."""
    token = tl.cast(0, tl.int32)
    for step in range(tl.maximum(nearest, 1), farthest + 1):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        token = wait(peers, source * MAX_BLOCKS + block, epoch, tile)
    return token


@triton.jit
def packed_scales(a_rows, tensors, weight, expert, col, tile_cols):
    """The scales of a tile of packed rows of FP8, and of the weight of ``expert``."""
    return BlockScales(
        (a_rows + weight.depth).to(tl.pointer_type(tl.float32)),
        1,
        tensors.w_scale + (expert.to(tl.int64) * tile_cols + col) * weight.k_blocks,
    )


@triton.jit
def store_rows(
    acc, y, peers, first_row, end, tile_col, cols, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """Epilogue: round once, store with a mask; NaN if a wait of this rank has timed out."""
    row = first_row + tl.arange(0, TILE_M)
    col = tile_col * TILE_N + tl.arange(0, TILE_N)
    acc = tl.where(faulted(peers) != 0, float("nan"), acc)
    mask = (row < end)[:, None] & (col < cols)[None, :]
    tl.store(
        y + row.to(tl.int64)[:, None] * cols + col[None, :], acc.to(y.dtype.element_ty), mask=mask
    )


UNSPECIALIZED = ["rank", *Sizes._fields]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_kernel(
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
    C: tl.constexpr,
):
    """Push, then take tiles; see the module's docstring for the protocol."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_M: tl.constexpr = C.TILE_M
    sizes = Sizes(max_tokens, topk, experts, block_experts, blocks, num_producers, tile_cols)
    offsets, cols, depth = tensors.offsets, weight.cols, weight.depth
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    if program == 0:
        clear_counters(peers, epoch)
    if program < num_producers:
        push_tokens(tensors, peers, rank, sizes, weight.pitch, slot_offset, program, epoch, C)
    tickets = peers.counters + (epoch & 1) * SET + TICKETS
    tile = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        following = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        slot = peers.slots + slot_offset
        a_rows, nearest, farthest = gather_rows(
            tensors, slot, rank, sizes, weight.pitch, first_row, walk.end, C
        )
        block = walk.expert // block_experts
        token = wait_steps(peers, rank, block, nearest, farthest, epoch, tile, WORLD_SIZE)
        if C.SCALED:
            scales = packed_scales(a_rows, tensors, weight, walk.expert, col, tile_cols)
            a_rows = a_rows.to(tl.pointer_type(tl.float8e4nv))
        else:
            scales = None
        acc = matmul_tile(
            a_rows,
            tensors.w + walk.expert.to(tl.int64) * weight.stride_expert,
            weight.stride_line,
            col,
            cols,
            depth,
            consume_token(0, token),
            weight.k_blocks,
            TILE_M,
            C.TILE_N,
            C.TILE_K,
            C.EVEN_K,
            walk.end - first_row,
            TILE_M <= LOW_TILE,
            C.DEPTH_FIRST,
            scales=scales,
            X_FIRST=C.SCALED,
        )
        store_rows(acc, tensors.y, peers, first_row, walk.end, col, cols, TILE_M, C.TILE_N)
        tile = following
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    if program == num_programs - 1:
        wait_steps(peers, rank, blocks - 1, 1, WORLD_SIZE - 1, epoch, -1, WORLD_SIZE)
    leave(peers, epoch, num_programs)


WORDS = tuple(f"tensors.{name}" for name in Tensors._fields)  # what changes between launches

# y, given (x, w, y, fields of the plan), of FP8 also the scales of w: rows in order if the kernel
# makes them, else None
Launch = Callable[..., torch.Tensor | None]


def depth_first(w: torch.Tensor) -> bool:
    """Whether experts [E_local, N, K] are [E_local, K, N] in memory."""
    return w.stride(2) != 1 and w.shape[2] > 1


def pitch_of(w: torch.Tensor) -> int:
    """Elements from a token to the next, for experts w [E, N, K]; of FP8, whose tokens are packed,
    bytes."""
    return packed_pitch(w.shape[2]) if w.element_size() == 1 else w.shape[2]


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
    """Launches for one shape, called with (x, w, y, fields of the plan in their order); the caller
    checks them. ``w``: of which every weight has the shape and strides."""
    c, (experts, cols, depth) = config, w.shape
    turned, pitch, fp8 = depth_first(w), pitch_of(w), w.element_size() == 1
    counts = dispatch_counts(c, experts, cols, bound, num_sms, protocol.MAX_SLICES)
    programs, producers, per_block, tile_cols = counts
    blocks = triton.cdiv(experts, per_block)
    k_blocks = triton.cdiv(depth, c.tile_k)
    sizes = Sizes(max_tokens, topk, experts, per_block, blocks, producers, tile_cols)
    choices = Choices(
        WORLD_SIZE=world_size,
        PUSH_ROWS=c.push_rows,
        PUSH_WIDTH=min(triton.next_power_of_2(pitch), (512 if fp8 else 256) * c.num_warps),
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        EVEN_K=depth % c.tile_k == 0,
        DEPTH_FIRST=turned,
        SCALED=fp8,
    )
    fixed = {
        "peers": peers,
        "rank": rank,
        "weight": Weight(cols, depth, pitch, w.stride(0), w.stride(2 if turned else 1), k_blocks),
        **sizes._asdict(),
    }

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        fields: Sequence[torch.Tensor],
        w_scale: torch.Tensor | None = None,
    ) -> Call:
        offsets, row_entry, _, _, send_order, send_offsets = fields
        scale = offsets if w_scale is None else w_scale
        tensors = Tensors(x, w, scale, y, offsets, row_entry, send_order, send_offsets)
        words = [t.data_ptr() for t in tensors]

        def changing() -> dict[str, Any]:
            rows_aligned = words[0] % 16 == 0 and pitch * x.element_size() % 16 == 0
            return {"tensors": tensors, "C": choices._replace(ALIGNED=rows_aligned)}

        return alignment(words), words, changing, ()

    return Launcher(
        dispatch_grouped_matmul_kernel,
        programs,
        fixed,
        pack,
        WORDS,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
