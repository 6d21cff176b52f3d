"""The part of the Hopper ``grouped_matmul_combine`` that runs concurrently with its matmul, in
Gluon: lists of rows, and blocks of tokens that are reduced or finished.

``combine_hopper.py`` describes the partitions, ``combine_triton.py`` the protocol. Blocks of tokens
are *tickets*: peers' blocks to be reduced and sent, own blocks to be reduced and finished. They are
drawn one by one from two counters, one for early and one for late tickets, by whichever partition
has time. With C chunks, and a bar between *stretches*:

    early  peers' blocks of chunk 0 | of chunk 1, own blocks of chunk 0 | ...
               | of C - 2, own of C - 3
           drawn by *reduce*, then by all
    late   peers' blocks of chunk C - 1, evenly among own blocks of chunk C - 2
               | own blocks of chunk C - 1
           drawn by *multiply*, when it is out of tiles

So what peers wait for goes first, and own blocks are finished when peers have sent theirs long ago.
After the matmul, links and memory work at the same time, and the tickets that are left go to the
warps that take a quarter of the time per ticket; otherwise the call would wait for two warps that
drew one of the last tickets.

Why no rank waits for ever: peers' blocks wait for own tiles only. Own blocks of a chunk wait for
the peers' tickets that send blocks of that chunk to this rank, which are in an earlier stretch on
every rank. A partition that holds two tickets works off the earlier one first. So of all tickets
that are not done, those of the earliest stretch are being worked on, and wait for no other ticket.

Sums wait for memory, so what is needed is loaded before any of it is used: four rows of each token
that a thread holds (decision 0028).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.peers import faulted, notify_all, signals_at, slots_at
from tileweave.device.gluon.signal import acquire, block_barrier, notify, spin
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.kernels.experts import combine_hopper_tickets as combine_tickets
from tileweave.kernels.experts import combine_layout
from tileweave.kernels.experts.combine_layout import (
    COUNTER_WORDS,
    LISTED,
    SENT,
    TICKETS,
    TILES,
    WEIGHTS,
)

count_tickets, place_ticket = (gluon.jit(source) for source in combine_tickets.SOURCES)
index_of, chunk_columns = (gluon.jit(source) for source in combine_layout.SOURCES)

AHEAD = gl.constexpr(4)  # rows of a token that are loaded at once
HELD = gl.constexpr(2)  # tokens that a thread sums at once
# An entry of ``lengths`` is how many rows a token has on this rank, at most MAX_ROWS of
# ``planning/combine.py``, and from bit OWNERS on which ranks have rows of it.
LENGTH = gl.constexpr(255)
OWNERS = gl.constexpr(8)


class Tensors(NamedTuple):
    """Pointers of a call; see ``combine_triton.Tensors``.

    rows, factors : for each token of all ranks, its rows on this rank and their weights, without
        gaps; int32 and fp32 [R * max_tokens, k].

    lengths : int32 [R * max_tokens]; see :data:`LENGTH`.
    """

    products: Any
    rows: Any
    factors: Any
    lengths: Any
    offsets: Any
    entry_row: Any
    topk_ids: Any
    weights: Any
    out: Any


class Cut(NamedTuple):
    """Sizes of a shape, and how tokens and columns are cut up.

    tokens, max_tokens : own tokens; the most that a rank has.

    experts, cols, depth : E_local, H, I.

    chunks, chunk_cols : chunks of columns; tile columns of a chunk, except perhaps the last.

    k_blocks : blocks of I.

    groups, group_blocks : groups of blocks of tokens; blocks of a group, except perhaps the last.

    blocks : blocks of ``max_tokens``.
    """

    tokens: Any
    max_tokens: Any
    experts: Any
    cols: Any
    depth: Any
    chunks: Any
    chunk_cols: Any
    k_blocks: Any
    groups: Any
    group_blocks: Any
    blocks: Any


class Current(NamedTuple):
    """The call that is running: the own rank, its number, and its set of counters."""

    rank: Any
    epoch: Any
    counts: Any


class Block(NamedTuple):
    """A block of tokens of ``source``, by number, and a chunk of columns, from ``first_col`` up to
    ``col_limit``. ``limit``: how many tokens there are."""

    source: Any
    number: Any
    limit: Any
    first_col: Any
    col_limit: Any


@gluon.jit
def is_last(counter, count):
    """See ``combine_triton.is_last``."""
    block_barrier()
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1


@gluon.jit
def await_count(counter, count):
    """Wait for other programs of this grid, which are all resident; afterwards their stores are
    visible."""
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    block_barrier()


@gluon.jit
def clear_other_counts(counters, parity, WARPS: gl.constexpr):
    """Zero the counters of the next call, which nothing uses now."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    word = gl.arange(0, 512, layout=lane)
    gl.store(counters + (1 - parity) * COUNTER_WORDS + word, word * 0, mask=word < COUNTER_WORDS)


@gluon.jit
def push_weights(
    weights,
    peers,
    cut,
    current,
    weights_offset,
    program,
    programs,
    C: gl.constexpr,
    WARPS: gl.constexpr,
):
    """As ``combine_triton.push_weights``, but also into the own slot."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    BLOCK: gl.constexpr = 256
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    size = cut.tokens * C.TOPK
    stride = cut.max_tokens * C.TOPK
    rank = current.rank
    for begin in range(program * BLOCK, size, programs * BLOCK):
        at = begin + gl.arange(0, BLOCK, layout=lane)
        value = gl.load(weights + at, mask=at < size)
        for step in gl.static_range(WORLD_SIZE):
            slot = slots_at(peers, (rank + step) % WORLD_SIZE, gl.float32)
            target = slot + weights_offset + rank * stride
            gl.store(target + at, value, mask=at < size)
    if is_last(current.counts + WEIGHTS, programs):
        index = rank * MAX_SLICES + WEIGHTS
        notify_all(peers, index, rank, current.epoch, WORLD_SIZE, True, WARPS)


@gluon.jit
def list_rows(
    tensors,
    peers,
    cut,
    current,
    weights_offset,
    program,
    programs,
    C: gl.constexpr,
    WARPS: gl.constexpr,
):
    """For each token of all ranks: its rows on this rank, in order of j and without gaps, their
    weights, and how many there are.

    For own tokens also which ranks have a row: bit OWNERS + r of the length. Counts in at [LISTED],
    which tickets wait for.
    """
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TOPK: gl.constexpr = C.TOPK
    BLOCK: gl.constexpr = 32 * WARPS
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rank, tokens, max_tokens = current.rank, cut.tokens, cut.max_tokens
    rows, factors = tensors.rows, tensors.factors
    if C.WEIGHTED:
        spin(
            peers.signals,
            0,
            WORLD_SIZE - 1,
            MAX_SLICES,
            current.epoch,
            -1,
            peers.control,
            peers.report,
            COUNT=1,
            SPREAD=8,
            WARPS=WARPS,
        )
        acquire(current.epoch)
    weights = slots_at(peers, rank, gl.float32) + weights_offset
    total = WORLD_SIZE * max_tokens
    for begin in range(program * BLOCK, total, programs * BLOCK):
        token = begin + gl.arange(0, BLOCK, layout=lane)
        own = token - rank * max_tokens
        length = token * 0
        owners = token * 0
        for j in gl.static_range(TOPK):
            row = gl.load(tensors.entry_row + token * TOPK + j, mask=token < total, other=-1)
            found = row >= 0
            gl.store(rows + token * TOPK + length, row, mask=found)
            if C.WEIGHTED:
                factor = gl.load(weights + token * TOPK + j, mask=found, other=0.0)
                gl.store(factors + token * TOPK + length, factor, mask=found)
            length += found.to(gl.int32)
            exists = (own >= 0) & (own < tokens)
            expert = gl.load(tensors.topk_ids + own * TOPK + j, mask=exists, other=-1)
            owner = gl.maximum(expert, 0) // cut.experts
            owners = owners | gl.where(expert >= 0, 1 << owner, 0)
        gl.store(tensors.lengths + token, length + (owners << OWNERS), mask=token < total)
        if C.WEIGHTED:
            # after a list's end: rows loaded there are zeros, and 0 * NaN would be NaN
            for j in gl.static_range(TOPK):
                unused = (j >= length) & (token < total)
                gl.store(factors + token * TOPK + j, length * 0.0, mask=unused)
    block_barrier()
    gl.atomic_add(current.counts + LISTED, 1, sem="release", scope="gpu")


@gluon.jit
def load_entry(entries, base, here, i, TOPK: gl.constexpr):
    """Entry ``i`` of the lists that begin at ``base``; zero where there can be none."""
    return gl.load(entries + base + i, mask=here & (i < TOPK), other=0)


@gluon.jit
def load_entries(entries, base, here, i, TOPK: gl.constexpr, AHEAD: gl.constexpr):
    """AHEAD entries of the lists that begin at ``base``, from ``i`` on."""
    found = (load_entry(entries, base, here, i, TOPK),)
    for j in gl.static_range(1, AHEAD):
        found = found + (load_entry(entries, base, here, i + j, TOPK),)
    return found


@gluon.jit
def load_list(tensors, first, token, limit, C: gl.constexpr, AHEAD: gl.constexpr):
    """Of tokens ``first + token``: their entry of ``lengths``, and the first AHEAD rows and factors
    of their lists, whether used or not."""
    TOPK: gl.constexpr = C.TOPK
    here = token < limit
    base = (first + token) * TOPK
    length = gl.load(tensors.lengths + first + token, mask=here, other=0)
    rows = load_entries(tensors.rows, base, here, 0, TOPK, AHEAD)
    if C.WEIGHTED:
        factors = load_entries(tensors.factors, base, here, 0, TOPK, AHEAD)
    else:
        one = token.to(gl.float32) * 0 + 1
        factors = (one,)
        for _ in gl.static_range(1, AHEAD):
            factors = factors + (one,)
    return length, rows, factors


@gluon.jit
def load_row(products, row, here, col, inside, cols):
    """Columns ``col`` of rows of products; zeros where ``here`` or ``inside`` is false."""
    pointers = products + row.to(gl.int64)[:, None] * cols + col[None, :]
    return gl.load(gl.multiple_of(pointers, [1, 16]), mask=here[:, None] & inside, other=0.0)


@gluon.jit
def add_rows(acc, products, length, first, rows, factors, col, inside, cols, AHEAD: gl.constexpr):
    """``acc`` plus AHEAD weighted rows of each token, its entries from ``first`` on. All are loaded
    before any is used."""
    values = (load_row(products, rows[0], length > first, col, inside, cols),)
    for j in gl.static_range(1, AHEAD):
        values = values + (load_row(products, rows[j], length > first + j, col, inside, cols),)
    for j in gl.static_range(AHEAD):
        acc += values[j].to(gl.float32) * factors[j][:, None]
    return acc


@gluon.jit
def sum_rows(
    tensors,
    base,
    length,
    rows,
    factors,
    col,
    inside,
    cols,
    C: gl.constexpr,
    AHEAD: gl.constexpr,
    layout: gl.constexpr,
):
    """fp32 [tokens, columns]: weighted rows of tokens added in order of their lists, which begin at
    ``base`` and of which ``rows`` and ``factors`` are the first AHEAD entries."""
    TOPK: gl.constexpr = C.TOPK
    products = tensors.products
    acc = gl.zeros((length.shape[0], col.shape[0]), gl.float32, layout)
    acc = add_rows(acc, products, length, 0, rows, factors, col, inside, cols, AHEAD)
    if TOPK > AHEAD:
        for first in range(AHEAD, gl.max(length, axis=0), AHEAD):
            here = length > first
            rows = load_entries(tensors.rows, base, here, first, TOPK, AHEAD)
            if C.WEIGHTED:
                factors = load_entries(tensors.factors, base, here, first, TOPK, AHEAD)
            acc = add_rows(acc, products, length, first, rows, factors, col, inside, cols, AHEAD)
    return acc


@gluon.jit
def reduce_block(
    tensors,
    peers,
    cut,
    block,
    target,
    partials,
    C: gl.constexpr,
    FINISH: gl.constexpr,
    SUB: gl.constexpr,
    COLS: gl.constexpr,
    AHEAD: gl.constexpr,
    layout: gl.constexpr,
):
    """Sums of the rows that a block of tokens has on this rank, stored in rows of ``target``.

    ``FINISH``: they are own tokens; the peers' ``partials`` are added in rank order, and tokens
    without a row are zero. ``SUB``, ``COLS``: tokens and columns that are summed at once.
    """
    TOPK: gl.constexpr = C.TOPK
    TOKENS: gl.constexpr = C.TOKENS
    source, cols = block.source, cut.cols
    # also if weights never came: sums with old ones must not pass for results
    fault = faulted(peers)
    first = source * cut.max_tokens
    end = gl.minimum((block.number + 1) * TOKENS, block.limit)
    token = block.number * TOKENS + gl.arange(0, SUB, layout=gl.SliceLayout(1, layout))
    for begin in range(block.number * TOKENS, end, SUB):
        entry, rows, factors = load_list(tensors, first, token, end, C, AHEAD)
        length = entry & LENGTH
        for left in range(block.first_col, block.col_limit, COLS):
            col = left + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
            inside = (col < block.col_limit)[None, :]
            base = (first + token) * TOPK
            acc = sum_rows(
                tensors, base, length, rows, factors, col, inside, cols, C, AHEAD, layout
            )
            if FINISH:
                acc = add_partials(
                    acc, partials, cut, source, entry >> OWNERS, token, col, inside, C
                )
                stored = token < end
            else:
                stored = length > 0
            acc = gl.where(fault != 0, float("nan"), acc)
            pointers = target + token.to(gl.int64)[:, None] * cols + col[None, :]
            pointers = gl.multiple_of(pointers, [1, 16])
            gl.store(pointers, acc.to(target.dtype.element_ty), mask=stored[:, None] & inside)
        token += SUB


@gluon.jit
def add_partials(own, partials, cut, rank, owners, token, col, inside, C: gl.constexpr):
    """The peers' partials and the own one, added in rank order; bit r of ``owners``: rank r has
    one."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    layout: gl.constexpr = own.type.layout
    acc = gl.zeros(own.shape, gl.float32, layout)
    for source in gl.static_range(WORLD_SIZE):
        there = (((owners >> source) & 1) > 0) & (token * 0 + source != rank)
        row = index_of(source, rank) * cut.max_tokens + token
        part = load_row(partials, row, there, col, inside, cut.cols).to(gl.float32)
        acc += gl.where(source == rank, own, part)
    return acc


@gluon.jit
def serve_tickets(
    tensors,
    peers,
    cut,
    current,
    programs,
    C: gl.constexpr,
    COLS: gl.constexpr,
    WARPS: gl.constexpr,
    KINDS: gl.constexpr,
    AHEAD: gl.constexpr = AHEAD,
):
    """Reduce and finish blocks until there are none. ``KINDS``: 1 to draw early tickets, 2 to
    draw the late ones after them. ``COLS``: columns that are summed at once; ``AHEAD``: rows of
    each token that are loaded at once.

    The program that stores the last block of a (chunk, group) for a peer signals it.
    """
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    EXPERTS: gl.constexpr = C.EXPERTS
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TOKENS: gl.constexpr = C.TOKENS
    ACROSS: gl.constexpr = WARPS if COLS // 256 > WARPS else COLS // 256
    SUB: gl.constexpr = HELD * (WARPS // ACROSS)
    layout: gl.constexpr = gl.BlockedLayout([HELD, 8], [1, 32], [WARPS // ACROSS, ACROSS], [1, 0])
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rank, epoch, counts = current.rank, current.epoch, current.counts
    slot_offset = (epoch & 1).to(gl.int64) * peers.slot_size
    experts, cols, chunk_cols, blocks = cut.experts, cut.cols, cut.chunk_cols, cut.blocks
    dtype: gl.constexpr = tensors.products.dtype.element_ty
    index = gl.arange(0, EXPERTS, layout=lane)
    first_rows = gl.load(tensors.offsets + index, mask=index < experts, other=0)
    ends = gl.load(tensors.offsets + index + 1, mask=index < experts, other=0)
    tile_rows = gl.sum((ends - first_rows + TILE_M - 1) // TILE_M, axis=0)
    tile_cols = (cols + TILE_N - 1) // TILE_N

    own_blocks = (cut.tokens + TOKENS - 1) // TOKENS
    peer_blocks = (WORLD_SIZE - 1) * blocks
    made = 0  # all tiles of the chunks before this one are known to be stored
    # 1 + the last (chunk, group) that all peers are known to have sent; own blocks come in order
    heard = 0
    await_count(counts + LISTED, programs)
    for late in range(0, KINDS):
        tickets = counts + TICKETS + late * MAX_SLICES
        count = count_tickets(late, cut.chunks, peer_blocks, own_blocks)
        ticket = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        while ticket < count:
            following = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
            is_send, chunk, step = place_ticket(ticket, late, cut.chunks, peer_blocks, own_blocks)
            # one by one: a chunk of fewer tiles than programs may be complete before the last chunk
            while made <= chunk:
                counter = counts + TILES + made
                tiles = tile_rows * chunk_columns(made, tile_cols, chunk_cols)
                await_count(counter, tiles * C.SHARERS)
                made += 1
            first_col = chunk * chunk_cols * TILE_N
            col_limit = gl.minimum(first_col + chunk_cols * TILE_N, cols)
            if is_send:
                peer = (rank + 1 + step // blocks) % WORLD_SIZE
                number = step % blocks
                slot = slots_at(peers, peer, dtype) + slot_offset
                slot += index_of(rank, peer).to(gl.int64) * cut.max_tokens * cols
                block = Block(peer, number, cut.max_tokens, first_col, col_limit)
                reduce_block(
                    tensors,
                    peers,
                    cut,
                    block,
                    slot,
                    peers.slots,
                    C,
                    False,
                    SUB,
                    COLS,
                    AHEAD,
                    layout,
                )
                group = number // cut.group_blocks
                word = chunk * cut.groups + group
                group_size = gl.minimum(cut.group_blocks, blocks - group * cut.group_blocks)
                if is_last(counts + SENT + peer * MAX_SLICES + word, group_size):
                    notify(signals_at(peers, peer) + rank * MAX_SLICES + 1 + word, epoch)
            else:
                word = chunk * cut.groups + step // cut.group_blocks
                if word >= heard:
                    for i in gl.static_range(1, WORLD_SIZE):
                        source = (rank + i) % WORLD_SIZE
                        spin(
                            peers.signals + 1 + word,
                            source,
                            source,
                            MAX_SLICES,
                            epoch,
                            step,
                            peers.control,
                            peers.report,
                            COUNT=1,
                            SPREAD=1,
                            WARPS=WARPS,
                        )
                    acquire(epoch)
                    heard = word + 1
                block = Block(rank, step, cut.tokens, first_col, col_limit)
                partials = peers.slots + slot_offset
                reduce_block(
                    tensors,
                    peers,
                    cut,
                    block,
                    tensors.out,
                    partials,
                    C,
                    True,
                    SUB,
                    COLS,
                    AHEAD,
                    layout,
                )
            ticket = following
