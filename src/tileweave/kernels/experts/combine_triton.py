"""grouped_matmul_combine: z[t] = sum over j of weight[t, j] * (row of (t, j)) @ experts[its expert].T, in one launch.

    y        [bound, I]          rows of this rank's experts, sorted by expert; see ``ops/experts/routing_plan.py``
    experts  [E_local, H, I]     products [bound, H] local: y's rows times their expert, rounded to y's dtype
    weights  [T, k] fp32         of own tokens, or none (1)      z [T, H] own tokens
    slot     [R-1, max_tokens, H]  one of two, by parity of the epoch: place i holds the i-th peer's *partials*, the sums over
                                 its experts of own tokens; behind them weights [R, max_tokens * k] fp32 of the peers' tokens
    plan     entry_row [R * max_tokens * k]: the row of choice j of token t of a rank, at (rank * max_tokens + t) * k + j; -1:
             not here. offsets [E_local + 1]: first row of each expert. topk_ids [max_tokens, k]: own choices

Who writes, who reads. H is cut into *chunks* of columns; tokens into *blocks*, and blocks into a few *groups*. Three roles,
by program id, each waiting for lower ids and other ranks only:

*multiply*  programs [0, G): push their share of the weights to all peers; then tiles, chunk by chunk, in a chunk expert by
            expert. A stored tile is counted in [tiles, chunk].
*reduce*    programs [G, G + S): chunk by chunk, once all of its tiles are counted: for each peer, next rank first, and each
            block of its tokens: gather a token's rows (at most k), times weights, add in fp32 in order of j, round once,
            store in the peer's slot. A token with no expert here is skipped. The last block of a group to be stored signals.
*finish*    the last F programs: blocks of own tokens: own rows are reduced on the spot, peers' partials are added in rank
            order in fp32, the sum is rounded once into z. Which ranks have a partial of a token ``topk_ids`` says.

==========================  =====  ======================================  =========================================
signal (int32)              value  notifier                                waiter
==========================  =====  ======================================  =========================================
[source, 0]                 epoch  ``source``'s last program to have       *reduce*, before its first token of
                                   pushed its share of the weights         ``source``
[source, 1 + chunk, group]  epoch  ``source``'s last program to have       *finish*, before blocks of that group
                                   stored a block of that group
==========================  =====  ======================================  =========================================

    G programs  | weights | chunk 0 tiles    | chunk 1 tiles    | ... |
    S programs                               | chunk 0 to peers | chunk 1 to peers | ...
    F programs                                                  | z of chunk 0     | z of chunk 1 | ... | leave

Why no slot is overwritten: every rank signals every (chunk, group) to every peer in every call, also where it has nothing to
store, and *finish* waits for all of them; so when my call n ends each peer has begun call n, hence ended n-1, the last reader
of the slot that call n+1 writes. The weights of call n+1 go into the same slot, by the same argument.

Counters (local): one set for each parity of the epoch. Program 0 clears the other set, which nobody uses: its last call has
ended, its next has not begun. So the counts of a call start from zero with no launch of their own.

Why nobody is stuck: *multiply* waits for nobody. *reduce* waits for own *multiply* and for weights, which *multiply* of a
peer pushes. *finish* waits for own *multiply* and for *reduce* of the peers. Each role waits for those above it only, here and
elsewhere, and they are lower programs.

Limits: at most 31 pairs of chunk and group; y's rows contiguous; fp32 accumulation; partials travel in y's dtype.
Sources: Triton-distributed and Comet (arXiv 2502.19811) order a MoE's tiles by columns so that the combine may begin early;
DeepEP sums per rank before it sends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import matmul_tile
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.signal import (
    MAX_SLICES,
    faulted,
    leave,
    load_epoch,
    notify,
    notify_all,
    wait,
)
from tileweave.kernels.experts.tiles import first_expert, place_in_expert, walk_to
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig, CombineCut, partial_bytes
from tileweave.planning.schedules.grouped import GroupedProblem

WEIGHTS = tl.constexpr(0)  # word, and counter, of the weights; those of chunks follow
TILES = tl.constexpr(
    1
)  # counters: [WEIGHTS], [TILES + chunk], then [SENT + peer * MAX_SLICES + chunk * groups + group]
SENT = tl.constexpr(32)
COUNTER_WORDS = tl.constexpr(32 * 9)
COUNTERS = 2 * 32 * 9
PUSH_BLOCK = tl.constexpr(1024)


@triton.jit
def is_last(counter, count):
    """Count this program's stores in; whether it was the last of ``count``, and then all their stores are visible to it."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1


@triton.jit
def await_count(counter, count):
    """Wait for lower programs of this grid; their stores are visible afterwards. Ends without a bound: they wait for nobody."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def push_weights(
    weights, counts, slot_table, signal_table, offset, rank, size, place, epoch, program, programs, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Share ``program`` of ``programs`` of own weights into place ``rank`` of every peer's slot; the last to do so signals."""
    for begin in range(program * PUSH_BLOCK, size, programs * PUSH_BLOCK):
        at = begin + tl.arange(0, PUSH_BLOCK)
        value = tl.load(weights + at, mask=at < size)
        for step in tl.static_range(1, WORLD_SIZE):
            target = (
                symm_at(slot_table, (rank + step) % WORLD_SIZE, tl.float32, 16)
                + offset
                + rank * place
            )
            tl.store(target + at, value, mask=at < size)
    if is_last(counts + WEIGHTS, programs):
        notify_all(signal_table, rank * MAX_SLICES + WEIGHTS, rank, epoch, WORLD_SIZE, False)


@triton.jit
def chunk_columns(chunk, cols, chunk_cols, TILE_N: tl.constexpr):
    """How many tile columns a chunk has: ``chunk_cols``, the last one maybe fewer."""
    return tl.minimum((cols + TILE_N - 1) // TILE_N - chunk * chunk_cols, chunk_cols)


@triton.jit
def count_tile_rows(offsets, experts, EXPERTS: tl.constexpr, TILE_M: tl.constexpr):
    """Tile rows of all experts; ``EXPERTS``: a power of two that is not below ``experts``."""
    index = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + index, mask=index < experts, other=0)
    end = tl.load(offsets + index + 1, mask=index < experts, other=0)
    return tl.sum((end - begin + TILE_M - 1) // TILE_M, axis=0)


@triton.jit
def multiply_role(
    y, w, offsets, products, counts, program, programs, experts, cols, depth, chunks, chunk_cols,
    stride_y, stride_e, stride_w,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
):  # fmt: skip
    """Tiles of all chunks, every ``programs``-th is this program's."""
    tile = program
    for chunk in range(0, chunks):
        tile_cols = chunk_columns(chunk, cols, chunk_cols, TILE_N)
        walk = walk_to(
            first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
        )
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
            tile_col += chunk * chunk_cols
            row = first_row + tl.arange(0, TILE_M)
            a_rows = y + tl.minimum(row, walk.end - 1).to(tl.int64) * stride_y
            acc = matmul_tile(
                a_rows, w + walk.expert.to(tl.int64) * stride_e, stride_w, tile_col, cols, depth, 0, tl.cdiv(depth, TILE_K),
                TILE_M, TILE_N, TILE_K, EVEN_K, DEPTH_FIRST=DEPTH_FIRST,
            )  # fmt: skip
            col = tile_col * TILE_N + tl.arange(0, TILE_N)
            place = products + row.to(tl.int64)[:, None] * cols + col[None, :]
            tl.store(
                place,
                acc.to(products.dtype.element_ty),
                mask=(row < walk.end)[:, None] & (col < cols)[None, :],
            )
            tl.debug_barrier()
            tl.atomic_add(counts + TILES + chunk, 1, sem="release", scope="gpu")
            tile += programs
            walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
        tile -= walk.next_tile  # of all experts


@triton.jit
def sum_rows(
    products, entry_row, weights, source, token, col, col_limit, cols, max_tokens,
    TOPK: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """fp32 [TOKENS, COLS]: weighted rows of tokens of ``source`` added in order of j; and which tokens have a row here.

    ``weights``: those of ``source``. A token of ``max_tokens`` or more has none.
    """
    acc = tl.zeros((TOKENS, COLS), tl.float32)
    here = token < 0
    for j in tl.static_range(TOPK):
        row = tl.load(
            entry_row + (source * max_tokens + token) * TOPK + j, mask=token < max_tokens, other=-1
        )
        found = row >= 0
        value = tl.load(
            products + row.to(tl.int64)[:, None] * cols + col[None, :],
            mask=found[:, None] & (col < col_limit)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if WEIGHTED:
            value *= tl.load(weights + token * TOPK + j, mask=found, other=0.0)[:, None]
        acc += value
        here = here | found
    return acc, here


@triton.jit
def reduce_role(
    products, entry_row, offsets, counts, slot_table, signal_table, signals, control, report,
    program, programs, experts, cols, chunks, chunk_cols, max_tokens, groups, group_blocks, blocks,
    slot_offset, weights_offset, weights_place, rank, epoch,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Partials of the peers' tokens, every ``programs``-th block is this program's."""
    tile_rows = count_tile_rows(offsets, experts, EXPERTS, TILE_M)
    dtype: tl.constexpr = products.dtype.element_ty
    for chunk in range(0, chunks):
        await_count(
            counts + TILES + chunk, tile_rows * chunk_columns(chunk, cols, chunk_cols, TILE_N)
        )
        first_col = chunk * chunk_cols * TILE_N
        col_limit = tl.minimum(first_col + chunk_cols * TILE_N, cols)
        for task in range(program, blocks * (WORLD_SIZE - 1), programs):
            peer = (rank + 1 + task // blocks) % WORLD_SIZE
            block = task % blocks
            if WEIGHTED:
                if chunk == 0:  # later chunks give this program the same tasks
                    wait(signals, 1, epoch, peer * MAX_SLICES + WEIGHTS, task, control, report)
            weights = (
                symm_at(slot_table, rank, tl.float32, 16) + weights_offset + peer * weights_place
            )
            place = rank - (rank > peer).to(tl.int32)
            token = block * TOKENS + tl.arange(0, TOKENS)
            target = symm_at(slot_table, peer, dtype, 16) + slot_offset
            target += (place * max_tokens + token).to(tl.int64)[:, None] * cols
            fault = faulted(
                control
            )  # weights that never came: what was made with old ones must not pass for right
            for begin in range(first_col, col_limit, COLS):
                col = begin + tl.arange(0, COLS)
                acc, here = sum_rows(
                    products,
                    entry_row,
                    weights,
                    peer,
                    token,
                    col,
                    col_limit,
                    cols,
                    max_tokens,
                    TOPK,
                    WEIGHTED,
                    TOKENS,
                    COLS,
                )
                acc = tl.where(fault != 0, float("nan"), acc)
                tl.store(
                    target + col[None, :],
                    acc.to(dtype),
                    mask=here[:, None] & (col < col_limit)[None, :],
                )
            group = block // group_blocks
            count = tl.minimum(group_blocks, blocks - group * group_blocks)
            if is_last(counts + SENT + peer * MAX_SLICES + chunk * groups + group, count):
                notify(
                    symm_at(signal_table, peer, tl.int32, 4)
                    + rank * MAX_SLICES
                    + 1
                    + chunk * groups
                    + group,
                    epoch,
                )


@triton.jit
def finish_role(
    products, entry_row, offsets, topk_ids, weights, out, counts, slots, signals, control, report,
    program, programs, experts, cols, chunks, chunk_cols, tokens, max_tokens, groups, group_blocks, slot_offset, rank, epoch,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Results of own tokens, every ``programs``-th block of a group is this program's."""
    tile_rows = count_tile_rows(offsets, experts, EXPERTS, TILE_M)
    blocks = (tokens + TOKENS - 1) // TOKENS
    for chunk in range(0, chunks):
        await_count(
            counts + TILES + chunk, tile_rows * chunk_columns(chunk, cols, chunk_cols, TILE_N)
        )
        first_col = chunk * chunk_cols * TILE_N
        col_limit = tl.minimum(first_col + chunk_cols * TILE_N, cols)
        for group in range(0, groups):
            for step in tl.static_range(1, WORLD_SIZE):
                word = (rank + step) % WORLD_SIZE * MAX_SLICES + 1 + chunk * groups + group
                wait(signals, 1, epoch, word, group, control, report)
            for block in range(
                group * group_blocks + program,
                tl.minimum((group + 1) * group_blocks, blocks),
                programs,
            ):
                token = block * TOKENS + tl.arange(0, TOKENS)
                for begin in range(first_col, col_limit, COLS):
                    col = begin + tl.arange(0, COLS)
                    finish_block(
                        products, entry_row, topk_ids, weights, out, slots, control, token, tokens, max_tokens, col, col_limit,
                        cols, experts, slot_offset, rank, WORLD_SIZE, TOPK, WEIGHTED, TOKENS, COLS,
                    )  # fmt: skip


@triton.jit
def finish_block(
    products, entry_row, topk_ids, weights, out, slots, control, token, tokens, max_tokens, col, col_limit, cols, experts,
    slot_offset, rank,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """z of a block of own tokens and some columns: partials added in rank order, rounded once."""
    own, _ = sum_rows(
        products,
        entry_row,
        weights,
        rank,
        token,
        col,
        col_limit,
        cols,
        max_tokens,
        TOPK,
        WEIGHTED,
        TOKENS,
        COLS,
    )
    acc = tl.zeros((TOKENS, COLS), tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        there = token < 0
        for j in tl.static_range(TOPK):
            expert = tl.load(topk_ids + token * TOPK + j, mask=token < tokens, other=-1)
            there = there | ((expert >= source * experts) & (expert < source * experts + experts))
        place = source - (rank < source).to(tl.int32)
        mask = (there & (token * 0 + rank != source))[:, None] & (col < col_limit)[None, :]
        row = (place * max_tokens + token).to(tl.int64)[:, None] * cols
        part = tl.load(slots + slot_offset + row + col[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        acc += tl.where(token * 0 + rank == source, 1.0, 0.0)[:, None] * own + part
    acc = tl.where(faulted(control) != 0, float("nan"), acc)
    target = out + token.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(
        target,
        acc.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (col < col_limit)[None, :],
    )


UNSPECIALIZED = [
    "rank", "tokens", "max_tokens", "chunks", "chunk_cols", "groups", "group_blocks", "num_multiply", "num_reduce",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def grouped_matmul_combine_kernel(
    y, w, offsets, entry_row, topk_ids, weights, products, out, slots, counters, slot_table, signal_table, signals, control,
    report, rank, slot_size, weights_base, weights_slot, tokens, max_tokens, experts, cols, depth, stride_y, stride_e, stride_w,
    chunks, chunk_cols, groups, group_blocks, num_multiply, num_reduce,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    DEPTH_FIRST: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Dispatch the roles; see the module's docstring for the protocol."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    parity = epoch & 1
    slot_offset = parity.to(tl.int64) * slot_size
    weights_offset = weights_base + parity.to(tl.int64) * weights_slot
    weights_place = max_tokens * TOPK
    counts = counters + parity * COUNTER_WORDS
    if program == 0:
        word = tl.arange(0, 512)
        tl.store(
            counters + (1 - parity) * COUNTER_WORDS + word,
            tl.zeros_like(word),
            mask=word < COUNTER_WORDS,
        )
    if program < num_multiply:
        if WEIGHTED:
            push_weights(
                weights, counts, slot_table, signal_table, weights_offset, rank, tokens * TOPK, weights_place, epoch,
                program, num_multiply, WORLD_SIZE,
            )  # fmt: skip
        multiply_role(
            y, w, offsets, products, counts, program, num_multiply, experts, cols, depth, chunks, chunk_cols,
            stride_y, stride_e, stride_w, TILE_M, TILE_N, TILE_K, GROUP_M, EVEN_K, DEPTH_FIRST,
        )  # fmt: skip
    elif program < num_multiply + num_reduce:
        reduce_role(
            products, entry_row, offsets, counts, slot_table, signal_table, signals, control, report,
            program - num_multiply, num_reduce, experts, cols, chunks, chunk_cols, max_tokens, groups, group_blocks,
            (max_tokens + TOKENS - 1) // TOKENS, slot_offset, weights_offset, weights_place, rank, epoch,
            WORLD_SIZE, TOPK, WEIGHTED, EXPERTS, TILE_M, TILE_N, TOKENS, COLS,
        )  # fmt: skip
    else:
        finish_role(
            products, entry_row, offsets, topk_ids, weights, out, counts, slots, signals, control, report,
            program - num_multiply - num_reduce, num_programs - num_multiply - num_reduce, experts, cols, chunks, chunk_cols,
            tokens, max_tokens, groups, group_blocks, slot_offset, rank, epoch,
            WORLD_SIZE, TOPK, WEIGHTED, EXPERTS, TILE_M, TILE_N, TOKENS, COLS,
        )  # fmt: skip
    leave(control, epoch, num_programs)


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
) -> None:
    """Launch on the current stream; ``ops`` checks the arguments. ``experts``: contiguous along I or along H."""
    s, c, cut = shape, config, CombineCut.of(shape, config)
    depth_first = experts.stride(2) != 1
    slot_bytes = peers.slot_size * out.element_size()
    multiply = max(
        1,
        num_sms * c.programs_per_sm
        - (c.num_reduce + c.num_finish if c.programs_per_sm == 1 else 0),
    )
    grouped_matmul_combine_kernel[(multiply + c.num_reduce + c.num_finish,)](
        y, experts, offsets, entry_row, topk_ids, offsets if weights is None else weights, products, out, peers.slots,
        peers.counters, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
        rank, peers.slot_size, partial_bytes(s) // 4, slot_bytes // 4, out.shape[0], s.max_tokens, s.experts, s.cols, s.depth,
        y.stride(0), experts.stride(0), experts.stride(2) if depth_first else experts.stride(1),
        cut.chunks, cut.chunk_cols, cut.groups, cut.group_blocks, multiply, c.num_reduce,
        WORLD_SIZE=s.world_size, TOPK=s.topk, WEIGHTED=weights is not None, EXPERTS=triton.next_power_of_2(s.experts),
        TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, GROUP_M=c.group_m, EVEN_K=s.depth % c.tile_k == 0,
        DEPTH_FIRST=depth_first, TOKENS=c.block_tokens, COLS=c.block_cols, num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
