"""grouped_matmul_combine, in one launch:
z[t] = sum over j of weight[t, j] * (row of (t, j)) @ experts[expert of (t, j)].T

    y        [bound, I]            rows of this rank's experts, sorted by expert
    experts  [E_local, H, I]
    products [bound, H]            local: y's rows times their expert, rounded to y's dtype
    weights  [T, k] fp32           of own tokens, or none (1)
    z        [T, H]                of own tokens
    slot     [R-1, max_tokens, H]  one of two, by parity of the epoch. Entry i has the *partials* of
                                   the i-th peer: sums of own tokens over that peer's experts. After
                                   them: weights [R, max_tokens * k] fp32 of the peers' tokens
    plan (``ops/experts/routing_plan.py``)
        entry_row [R * max_tokens * k]  row of choice j of token t of a rank, at index
                                        (rank * max_tokens + t) * k + j; -1: not on this rank
        offsets   [E_local + 1]         first row of each expert
        topk_ids  [max_tokens, k]       experts that own tokens chose

H is cut into *chunks* of columns, tokens into *blocks*, and blocks into a few *groups*. There are
three roles, by program id. Each waits only for lower program ids and for other ranks:

*multiply*  programs [0, G): push their part of the weights to all peers, then compute tiles, chunk
            by chunk, within a chunk expert by expert. A stored tile is counted in [tiles, chunk].
*reduce*    programs [G, G + S): chunk by chunk, once all of its tiles are counted: for each peer,
            next rank first, and for each block of its tokens: gather a token's rows (at most k),
            multiply by weights, add in fp32 in order of j, round once, store in the peer's slot. A
            token with no expert on this rank is skipped. The program that stores the last block of
            a group sends the signal.
*finish*    the last F programs: for blocks of own tokens, sum own rows, add the peers' partials in
            rank order in fp32, and round the sum once into z. ``topk_ids`` says which ranks have a
            partial of a token.

==========================  =====  =====================================  =========================
signal (int32)              value  notifier                               waiter
==========================  =====  =====================================  =========================
[source, 0]                 epoch  ``source``'s last program to have      *reduce*, before its first
                                   pushed its part of the weights         token of ``source``
[source, 1 + chunk, group]  epoch  ``source``'s last program to have      *finish*, before blocks of
                                   stored a block of that group           that group
==========================  =====  =====================================  =========================

    G programs  | weights | chunk 0 tiles    | chunk 1 tiles    | ... |
    S programs                               | chunk 0 to peers | chunk 1 to peers | ...
    F programs                                                  | z of chunk 0     | ... | leave

Why no slot is overwritten: every rank signals every (chunk, group) to every peer in every call,
even if it has nothing to store, and *finish* waits for all of them. So when call n ends on this
rank, each peer has begun call n, hence ended call n-1, the last reader of the slot that call n+1
writes. The weights of call n+1 go into the same slot, by the same argument.

Counters (local): one set for each parity of the epoch. Program 0 clears the other set, which no
program uses: the last call with it has ended, the next one has not begun. So a call's counts start
from zero without a launch of their own.

Why no rank waits for ever: *multiply* does not wait. *reduce* waits for own *multiply* and for
weights, which a peer's *multiply* pushes. *finish* waits for own *multiply* and for the peers'
*reduce*. Each role waits only for the roles listed above it, on any rank, and those are lower
programs.

Limits: at most 31 pairs of chunk and group; y's rows contiguous; fp32 accumulation; partials travel
in y's dtype.
Sources: Triton-distributed and Comet (arXiv 2502.19811) order the tiles of an MoE by columns so
that the combine can begin early; DeepEP sums on each rank before it sends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import BlockScales, matmul_tile
from tileweave.device.triton.peers import (
    faulted,
    leave,
    load_epoch,
    notify_all,
    signals_at,
    slots_at,
    wait,
)
from tileweave.device.triton.signal import MAX_SLICES, notify
from tileweave.kernels.experts.combine_layout import (
    COUNTER_WORDS,
    SENT,
    TILES,
    WEIGHTS,
    chunk_columns,
    index_of,
)
from tileweave.kernels.experts.tiles import LOW_TILE, first_expert, place_in_expert, walk_to
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig, CombineCut, partial_bytes
from tileweave.planning.schedules.grouped import GroupedProblem

COUNTERS = 2 * COUNTER_WORDS.value  # see ``combine_layout.py``
PUSH_BLOCK = tl.constexpr(1024)


class Tensors(NamedTuple):
    """Pointers of a call; see the module's docstring. ``weights``: any tensor if there are none."""

    y: Any
    experts: Any
    offsets: Any
    entry_row: Any
    topk_ids: Any
    weights: Any
    products: Any
    out: Any
    y_scale: Any = None  # of FP8 rows and experts, as ``scaled.py`` has them
    w_scale: Any = None


class Sizes(NamedTuple):
    """Numbers of a shape, for which Triton specialises the kernel.

    weights_base, weights_slot : in a slot, where the weights begin; fp32 elements of a slot.

    experts, cols, depth : E_local, H, I.

    stride_y, stride_e, stride_w : elements between rows of y, experts, and rows of an expert
        (columns, if it is depth first).

    scale_row, scale_block : of FP8, elements from the scale of a row of y to that of the next, and
        from that of a K block.
    """

    weights_base: Any
    weights_slot: Any
    experts: Any
    cols: Any
    depth: Any
    stride_y: Any
    stride_e: Any
    stride_w: Any
    scale_row: Any = 0
    scale_block: Any = 0


class Cut(NamedTuple):
    """How tokens and columns are cut up; see ``planning.combine.CombineCut``.

    tokens, max_tokens : own tokens; the most that a rank has.

    chunks, chunk_cols : chunks of columns; tile columns of a chunk, except perhaps the last.

    groups, group_blocks : groups of blocks of tokens; blocks of a group, except perhaps the last.
    """

    tokens: Any
    max_tokens: Any
    chunks: Any
    chunk_cols: Any
    groups: Any
    group_blocks: Any


class Current(NamedTuple):
    """The call that is running.

    rank, epoch : the own rank; the number of the call.

    counts : its set of counters.

    slot_offset, weights_offset : where its partials and its weights begin in ``peers.slots``, in
        elements of each.

    weights_stride : elements of the weights of one rank.
    """

    rank: Any
    epoch: Any
    counts: Any
    slot_offset: Any
    weights_offset: Any
    weights_stride: Any


class Choices(NamedTuple):
    """What is decided at compile time.

    EXPERTS : a power of two, at least E_local.

    EVEN_K : I is a multiple of TILE_K.

    DEPTH_FIRST : experts are stored as [I, H], as the backward pass of a dispatch reads them.

    TOKENS, COLS : tokens of a block; columns that are summed at once.

    SCALED : y and experts are FP8; TILE_N and TILE_K are 128.
    """

    WORLD_SIZE: int
    TOPK: int
    WEIGHTED: bool
    EXPERTS: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    DEPTH_FIRST: bool
    TOKENS: int
    COLS: int
    SCALED: bool = False


@triton.jit
def is_last(counter, count):
    """Count this program's stores in. Returns whether it was the last of ``count`` programs; then
    it sees the stores of all of them."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1


@triton.jit
def await_count(counter, count):
    """Wait for lower programs of this grid; afterwards their stores are visible. Without a time
    limit: those programs do not wait."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def push_weights(weights, peers, current, size, program, programs, C: tl.constexpr):
    """Store part ``program`` of ``programs`` of the own weights, ``size`` in all, in every peer's
    slot. The last program to do so signals."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    rank = current.rank
    for begin in range(program * PUSH_BLOCK, size, programs * PUSH_BLOCK):
        at = begin + tl.arange(0, PUSH_BLOCK)
        value = tl.load(weights + at, mask=at < size)
        for step in tl.static_range(1, WORLD_SIZE):
            slot = slots_at(peers, (rank + step) % WORLD_SIZE, tl.float32)
            target = slot + current.weights_offset + rank * current.weights_stride
            tl.store(target + at, value, mask=at < size)
    if is_last(current.counts + WEIGHTS, programs):
        notify_all(peers, rank * MAX_SLICES + WEIGHTS, rank, current.epoch, WORLD_SIZE, False)


@triton.jit
def count_tile_rows(offsets, experts, C: tl.constexpr):
    """Tile rows of all experts."""
    EXPERTS: tl.constexpr = C.EXPERTS
    index = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + index, mask=index < experts, other=0)
    end = tl.load(offsets + index + 1, mask=index < experts, other=0)
    return tl.sum((end - begin + C.TILE_M - 1) // C.TILE_M, axis=0)


@triton.jit
def multiply_role(tensors, sizes, cut, counts, program, programs, C: tl.constexpr):
    """Tiles of all chunks; this program computes every ``programs``-th."""
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    TILE_K: tl.constexpr = C.TILE_K
    GROUP_M: tl.constexpr = C.GROUP_M
    EVEN_K: tl.constexpr = C.EVEN_K
    DEPTH_FIRST: tl.constexpr = C.DEPTH_FIRST
    offsets, products = tensors.offsets, tensors.products
    experts, cols, depth = sizes.experts, sizes.cols, sizes.depth
    all_cols = (cols + TILE_N - 1) // TILE_N
    tile = program
    for chunk in range(0, cut.chunks):
        tile_cols = chunk_columns(chunk, all_cols, cut.chunk_cols)
        start = first_expert(offsets, tile_cols, TILE_M)
        walk = walk_to(start, tile, offsets, experts, tile_cols, TILE_M)
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
            tile_col += chunk * cut.chunk_cols
            row = first_row + tl.arange(0, TILE_M)
            source = tl.minimum(row, walk.end - 1).to(tl.int64)
            expert = walk.expert.to(tl.int64)
            k_blocks = tl.cdiv(depth, TILE_K)
            if C.SCALED:
                scales = BlockScales(
                    tensors.y_scale + source * sizes.scale_row,
                    sizes.scale_block,
                    tensors.w_scale + (expert * all_cols + tile_col) * k_blocks,
                )
            else:
                scales = None
            acc = matmul_tile(
                tensors.y + source * sizes.stride_y,
                tensors.experts + expert * sizes.stride_e,
                sizes.stride_w,
                tile_col,
                cols,
                depth,
                0,
                k_blocks,
                TILE_M,
                TILE_N,
                TILE_K,
                EVEN_K,
                walk.end - first_row,
                TILE_M <= LOW_TILE,
                DEPTH_FIRST,
                scales=scales,
                X_FIRST=C.SCALED,
            )
            col = tile_col * TILE_N + tl.arange(0, TILE_N)
            target = products + row.to(tl.int64)[:, None] * cols + col[None, :]
            mask = (row < walk.end)[:, None] & (col < cols)[None, :]
            tl.store(target, acc.to(products.dtype.element_ty), mask=mask)
            tl.debug_barrier()
            tl.atomic_add(counts + TILES + chunk, 1, sem="release", scope="gpu")
            tile += programs
            walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
        tile -= walk.next_tile  # of all experts


@triton.jit
def sum_rows(tensors, weights, source, token, col, limit, cols, max_tokens, C: tl.constexpr):
    """fp32 [tokens, columns]: weighted rows of tokens of ``source``, added in order of j; and which
    tokens have a row on this rank.

    ``weights``: those of ``source``. There is no token ``max_tokens`` or later. ``limit``: of
    columns.
    """
    TOPK: tl.constexpr = C.TOPK
    TOKENS: tl.constexpr = C.TOKENS
    COLS: tl.constexpr = C.COLS
    acc = tl.zeros((TOKENS, COLS), tl.float32)
    here = token < 0
    for j in tl.static_range(TOPK):
        exists = token < max_tokens
        entry = (source * max_tokens + token) * TOPK + j
        row = tl.load(tensors.entry_row + entry, mask=exists, other=-1)
        found = row >= 0
        mask = found[:, None] & (col < limit)[None, :]
        pointers = tensors.products + row.to(tl.int64)[:, None] * cols + col[None, :]
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if C.WEIGHTED:
            value *= tl.load(weights + token * TOPK + j, mask=found, other=0.0)[:, None]
        acc += value
        here = here | found
    return acc, here


@triton.jit
def reduce_role(tensors, peers, sizes, cut, current, program, programs, C: tl.constexpr):
    """Partials of the peers' tokens; this program makes every ``programs``-th block."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_N: tl.constexpr = C.TILE_N
    TOKENS: tl.constexpr = C.TOKENS
    COLS: tl.constexpr = C.COLS
    dtype: tl.constexpr = tensors.products.dtype.element_ty
    blocks = (cut.max_tokens + TOKENS - 1) // TOKENS  # of a peer's tokens
    rank, epoch, counts, cols = current.rank, current.epoch, current.counts, sizes.cols
    max_tokens, groups = cut.max_tokens, cut.groups
    tile_rows = count_tile_rows(tensors.offsets, sizes.experts, C)
    for chunk in range(0, cut.chunks):
        counter = counts + TILES + chunk
        tile_cols = (cols + TILE_N - 1) // TILE_N
        await_count(counter, tile_rows * chunk_columns(chunk, tile_cols, cut.chunk_cols))
        first_col = chunk * cut.chunk_cols * TILE_N
        col_limit = tl.minimum(first_col + cut.chunk_cols * TILE_N, cols)
        for task in range(program, blocks * (WORLD_SIZE - 1), programs):
            peer = (rank + 1 + task // blocks) % WORLD_SIZE
            block = task % blocks
            if C.WEIGHTED:
                if chunk == 0:  # later chunks give this program the same tasks
                    wait(peers, peer * MAX_SLICES + WEIGHTS, epoch, task)
            weights = slots_at(peers, rank, tl.float32) + current.weights_offset
            weights += peer * current.weights_stride
            index = index_of(rank, peer)
            token = block * TOKENS + tl.arange(0, TOKENS)
            target = slots_at(peers, peer, dtype) + current.slot_offset
            target += (index * max_tokens + token).to(tl.int64)[:, None] * cols
            # if weights never came, sums with old ones must not pass for results
            fault = faulted(peers)
            for begin in range(first_col, col_limit, COLS):
                col = begin + tl.arange(0, COLS)
                acc, here = sum_rows(
                    tensors, weights, peer, token, col, col_limit, cols, max_tokens, C
                )
                acc = tl.where(fault != 0, float("nan"), acc)
                mask = here[:, None] & (col < col_limit)[None, :]
                tl.store(target + col[None, :], acc.to(dtype), mask=mask)
            group = block // cut.group_blocks
            count = tl.minimum(cut.group_blocks, blocks - group * cut.group_blocks)
            if is_last(counts + SENT + peer * MAX_SLICES + chunk * groups + group, count):
                signal = signals_at(peers, peer) + rank * MAX_SLICES + 1 + chunk * groups + group
                notify(signal, epoch)


@triton.jit
def finish_role(tensors, peers, sizes, cut, current, program, programs, C: tl.constexpr):
    """Results of own tokens; this program makes every ``programs``-th block of a group."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_N: tl.constexpr = C.TILE_N
    TOKENS: tl.constexpr = C.TOKENS
    COLS: tl.constexpr = C.COLS
    counts, cols = current.counts, sizes.cols
    tile_rows = count_tile_rows(tensors.offsets, sizes.experts, C)
    blocks = (cut.tokens + TOKENS - 1) // TOKENS
    for chunk in range(0, cut.chunks):
        counter = counts + TILES + chunk
        tile_cols = (cols + TILE_N - 1) // TILE_N
        await_count(counter, tile_rows * chunk_columns(chunk, tile_cols, cut.chunk_cols))
        first_col = chunk * cut.chunk_cols * TILE_N
        col_limit = tl.minimum(first_col + cut.chunk_cols * TILE_N, cols)
        for group in range(0, cut.groups):
            for step in tl.static_range(1, WORLD_SIZE):
                source = (current.rank + step) % WORLD_SIZE
                word = source * MAX_SLICES + 1 + chunk * cut.groups + group
                wait(peers, word, current.epoch, group)
            first = group * cut.group_blocks + program
            last = tl.minimum((group + 1) * cut.group_blocks, blocks)
            for block in range(first, last, programs):
                token = block * TOKENS + tl.arange(0, TOKENS)
                for begin in range(first_col, col_limit, COLS):
                    col = begin + tl.arange(0, COLS)
                    finish_block(tensors, peers, sizes, cut, current, token, col, col_limit, C)


@triton.jit
def finish_block(tensors, peers, sizes, cut, current, token, col, limit, C: tl.constexpr):
    """z of a block of own tokens and some columns: partials added in rank order, rounded once."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TOPK: tl.constexpr = C.TOPK
    TOKENS: tl.constexpr = C.TOKENS
    COLS: tl.constexpr = C.COLS
    rank, experts, cols, out = current.rank, sizes.experts, sizes.cols, tensors.out
    own, _ = sum_rows(tensors, tensors.weights, rank, token, col, limit, cols, cut.max_tokens, C)
    acc = tl.zeros((TOKENS, COLS), tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        there = token < 0
        for j in tl.static_range(TOPK):
            exists = token < cut.tokens
            expert = tl.load(tensors.topk_ids + token * TOPK + j, mask=exists, other=-1)
            there = there | ((expert >= source * experts) & (expert < source * experts + experts))
        index = index_of(source, rank)
        mask = (there & (token * 0 + rank != source))[:, None] & (col < limit)[None, :]
        row = (index * cut.max_tokens + token).to(tl.int64)[:, None] * cols
        slot = peers.slots + current.slot_offset
        part = tl.load(slot + row + col[None, :], mask=mask, other=0.0).to(tl.float32)
        # selected, not multiplied by 0 or 1: 0 * Inf is NaN
        acc += tl.where((token * 0 + rank == source)[:, None], own, part)
    acc = tl.where(faulted(peers) != 0, float("nan"), acc)
    target = out + token.to(tl.int64)[:, None] * cols + col[None, :]
    mask = (token < cut.tokens)[:, None] & (col < limit)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


UNSPECIALIZED = [
    "rank",
    "tokens",
    "max_tokens",
    "chunks",
    "chunk_cols",
    "groups",
    "group_blocks",
    "num_multiply",
    "num_reduce",
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def grouped_matmul_combine_kernel(
    tensors,
    peers,
    rank,
    sizes,
    tokens,
    max_tokens,
    chunks,
    chunk_cols,
    groups,
    group_blocks,
    num_multiply,
    num_reduce,
    C: tl.constexpr,
):
    """Start the roles; see the module's docstring for the protocol."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    parity = epoch & 1
    slot_offset = parity.to(tl.int64) * peers.slot_size
    weights_offset = sizes.weights_base + parity.to(tl.int64) * sizes.weights_slot
    weights_stride = max_tokens * C.TOPK
    counts = peers.counters + parity * COUNTER_WORDS
    current = Current(rank, epoch, counts, slot_offset, weights_offset, weights_stride)
    cut = Cut(tokens, max_tokens, chunks, chunk_cols, groups, group_blocks)
    if program == 0:
        word = tl.arange(0, 512)
        mask = word < COUNTER_WORDS
        other_counts = peers.counters + (1 - parity) * COUNTER_WORDS
        tl.store(other_counts + word, tl.zeros_like(word), mask=mask)
    if program < num_multiply:
        if C.WEIGHTED:
            size = tokens * C.TOPK
            push_weights(tensors.weights, peers, current, size, program, num_multiply, C)
        multiply_role(tensors, sizes, cut, counts, program, num_multiply, C)
    elif program < num_multiply + num_reduce:
        program -= num_multiply
        reduce_role(tensors, peers, sizes, cut, current, program, num_reduce, C)
    else:
        program -= num_multiply + num_reduce
        num_finish = num_programs - num_multiply - num_reduce
        finish_role(tensors, peers, sizes, cut, current, program, num_finish, C)
    leave(peers, epoch, num_programs)


def launch(
    peers: Peers,
    y: torch.Tensor,
    experts: torch.Tensor,
    offsets: torch.Tensor,
    entry_row: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor | None,
    products: torch.Tensor,
    out: torch.Tensor,
    shape: GroupedProblem,
    config: CombineConfig,
    rank: int,
    num_sms: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch on the current stream; ``ops`` checks the arguments. ``experts``: contiguous along I
    or along H. ``scales``: of FP8 y and experts."""
    s, c, cut = shape, config, CombineCut.of(shape, config)
    given = offsets if weights is None else weights
    of_fp8 = (None, None) if scales is None else scales
    tensors = Tensors(y, experts, offsets, entry_row, topk_ids, given, products, out, *of_fp8)
    multiply = num_sms * c.programs_per_sm
    if c.programs_per_sm == 1:
        multiply -= c.num_reduce + c.num_finish
    multiply = max(1, multiply)
    grouped_matmul_combine_kernel[(multiply + c.num_reduce + c.num_finish,)](
        tensors,
        peers,
        rank,
        sizes_of(peers, y, experts, shape, of_fp8[0]),
        out.shape[0],
        s.max_tokens,
        cut.chunks,
        cut.chunk_cols,
        cut.groups,
        cut.group_blocks,
        multiply,
        c.num_reduce,
        choices_of(experts, weights, shape, config),
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )


def sizes_of(
    peers: Peers,
    y: torch.Tensor,
    experts: torch.Tensor,
    shape: GroupedProblem,
    y_scale: torch.Tensor | None = None,
) -> Sizes:
    """:class:`Sizes` of a call."""
    s = shape
    slot_bytes = peers.slot_size * s.out_itemsize
    stride_w = experts.stride(1) if experts.stride(2) == 1 else experts.stride(2)
    return Sizes(
        partial_bytes(s) // 4,
        slot_bytes // 4,
        s.experts,
        s.cols,
        s.depth,
        y.stride(0),
        experts.stride(0),
        stride_w,
        *((0, 0) if y_scale is None else y_scale.stride()),
    )


def choices_of(
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    shape: GroupedProblem,
    config: CombineConfig,
) -> Choices:
    """:class:`Choices` of a call."""
    s, c = shape, config
    return Choices(
        s.world_size,
        s.topk,
        weights is not None,
        triton.next_power_of_2(s.experts),
        c.tile_m,
        c.tile_n,
        c.tile_k,
        c.group_m,
        s.depth % c.tile_k == 0,
        experts.stride(2) != 1,
        c.block_tokens,
        c.block_cols,
        s.fp8,
    )
