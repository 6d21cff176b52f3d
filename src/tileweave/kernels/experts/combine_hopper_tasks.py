"""The Hopper ``grouped_matmul_combine`` beside its matmul, in Gluon: lists of rows, blocks that are reduced or finished.

See ``combine_hopper.py`` for the partitions and ``combine_triton.py`` for the protocol. Blocks of tokens
are *tickets*, handed out one by one, by a counter for early and one for late ones, to whoever has time: peers' blocks to be
reduced and sent, own ones to be reduced and finished. With C chunks, a bar between *stretches*:

    early  peers' blocks of chunk 0 | of chunk 1, own blocks of chunk 0 | ... | of C - 2, own of C - 3    *reduce*, then all
    late   peers' blocks of chunk C - 1 evenly among own blocks of chunk C - 2 | own blocks of chunk C - 1    *multiply*,
                                                                                                     when out of tiles

So what peers wait for goes first, and own blocks are finished when peers have long sent theirs. Behind the matmul links and
memory work at the same time, and what is left is dealt to those who take a quarter of the time for a ticket: else the
call would wait for two warps that took one of the last.

Why nobody is stuck: peers' blocks wait for own tiles only, and own blocks of a chunk for the peers' tickets that send blocks of
that chunk here, which are in an earlier stretch, here and elsewhere. Whoever holds two tickets works off the earlier one first,
so of all that are not done those of the earliest stretch are at work, and wait for no other.

Sums wait for memory, so what is needed is asked for before any of it is used: four rows of each token that a thread holds
(decision 0028).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.signal import (
    FAULT,
    acquire,
    block_barrier,
    notify,
    notify_all,
    spin,
    symm_at,
)
from tileweave.kernels.experts import combine_hopper_tickets as combine_tickets

count_tickets, place_ticket = (gluon.jit(source) for source in combine_tickets.SOURCES)

SLICES = gl.constexpr(32)  # signal words of a source
# Counters of a call, as in ``combine_triton.py``. Of the 32 words that each rank has in [SENT] no group uses the last,
# since there are at most 31 pairs of chunk and group: those of ranks 0 to 3 are the Hopper kernel's four counters below.
WEIGHTS = gl.constexpr(0)
TILES = gl.constexpr(1)
SENT = gl.constexpr(32)
LISTED = gl.constexpr(63)  # programs whose share of the lists is made
TICKETS = gl.constexpr(95)  # the early ones; late ones SLICES further
DRAWN = gl.constexpr(159)  # tiles that were drawn
COUNTER_WORDS = gl.constexpr(32 * 9)
AHEAD = gl.constexpr(4)  # rows of a token that are asked for at once
HELD = gl.constexpr(2)  # tokens that a thread sums at once
LENGTH = gl.constexpr(
    255
)  # of a token's entry in ``lengths``: its rows here, at most k; see ``config_combine.MAX_ROWS``
OWNERS = gl.constexpr(8)  # and from this bit on the ranks that have rows of it


@gluon.jit
def is_last(counter, count):
    """See ``grouped_matmul_combine.is_last``."""
    block_barrier()
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1


@gluon.jit
def await_count(counter, count):
    """Wait for other programs of this grid, which are all resident; their stores are visible afterwards."""
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass
    block_barrier()


@gluon.jit
def clear_other_counts(counters, parity, WARPS: gl.constexpr):
    """Zero what the next call counts in; nobody uses it now."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    word = gl.arange(0, 512, layout=lane)
    gl.store(counters + (1 - parity) * COUNTER_WORDS + word, word * 0, mask=word < COUNTER_WORDS)


@gluon.jit
def push_weights(
    weights, counts, slot_table, signal_table, offset, rank, size, place, epoch, program, programs,
    WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Own weights into place ``rank`` of every slot, the own one too; see ``grouped_matmul_combine.push_weights``."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    BLOCK: gl.constexpr = 256
    for begin in range(program * BLOCK, size, programs * BLOCK):
        at = begin + gl.arange(0, BLOCK, layout=lane)
        value = gl.load(weights + at, mask=at < size)
        for step in gl.static_range(WORLD_SIZE):
            target = (
                symm_at(slot_table, (rank + step) % WORLD_SIZE, gl.float32) + offset + rank * place
            )
            gl.store(target + at, value, mask=at < size)
    if is_last(counts + WEIGHTS, programs):
        notify_all(signal_table, rank * SLICES + WEIGHTS, rank, epoch, WORLD_SIZE, True, WARPS)


@gluon.jit
def list_rows(
    entry_row, topk_ids, rows, factors, lengths, counts, slot_table, signals, control, report, weights_offset, rank, experts,
    tokens, max_tokens, epoch, program, programs, WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """For each token of all ranks: its rows here, in order of j and without gaps, their weights, and how many there are.

    Of own tokens also which ranks have a row: bit OWNERS + r of the length. Counts in at [LISTED], which tickets wait for.
    """
    BLOCK: gl.constexpr = 32 * WARPS
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if WEIGHTED:
        spin(signals, 0, WORLD_SIZE - 1, SLICES, epoch, -1, control, report, 1, 8, WARPS)
        acquire(epoch)
    everyone = symm_at(slot_table, rank, gl.float32) + weights_offset
    total = WORLD_SIZE * max_tokens
    for begin in range(program * BLOCK, total, programs * BLOCK):
        token = begin + gl.arange(0, BLOCK, layout=lane)
        own = token - rank * max_tokens
        length = token * 0
        owners = token * 0
        for j in gl.static_range(TOPK):
            row = gl.load(entry_row + token * TOPK + j, mask=token < total, other=-1)
            found = row >= 0
            gl.store(rows + token * TOPK + length, row, mask=found)
            if WEIGHTED:
                factor = gl.load(everyone + token * TOPK + j, mask=found, other=0.0)
                gl.store(factors + token * TOPK + length, factor, mask=found)
            length += found.to(gl.int32)
            expert = gl.load(topk_ids + own * TOPK + j, mask=(own >= 0) & (own < tokens), other=-1)
            owners = owners | gl.where(expert >= 0, 1 << (gl.maximum(expert, 0) // experts), 0)
        gl.store(lengths + token, length + (owners << OWNERS), mask=token < total)
        if WEIGHTED:
            for j in gl.static_range(
                TOPK
            ):  # behind a list's end: rows read there are zeros, and 0 * NaN would be NaN
                gl.store(
                    factors + token * TOPK + j, length * 0.0, mask=(j >= length) & (token < total)
                )
    block_barrier()
    gl.atomic_add(counts + LISTED, 1, sem="release", scope="gpu")


@gluon.jit
def load_entry(entries, base, here, i, TOPK: gl.constexpr):
    """Entry ``i`` of the lists that begin at ``base``; zero where there can be none."""
    return gl.load(entries + base + i, mask=here & (i < TOPK), other=0)


@gluon.jit
def load_entries(entries, base, here, i, TOPK: gl.constexpr):
    """AHEAD entries of the lists that begin at ``base``, from ``i`` on."""
    entry0 = load_entry(entries, base, here, i, TOPK)
    entry1 = load_entry(entries, base, here, i + 1, TOPK)
    entry2 = load_entry(entries, base, here, i + 2, TOPK)
    entry3 = load_entry(entries, base, here, i + 3, TOPK)
    return entry0, entry1, entry2, entry3


@gluon.jit
def load_list(
    rows, factors, lengths, first, token, limit, TOPK: gl.constexpr, WEIGHTED: gl.constexpr
):
    """Of tokens ``first + token``: their entry of ``lengths``, and the first AHEAD entries of their lists, used or not."""
    here = token < limit
    base = (first + token) * TOPK
    length = gl.load(lengths + first + token, mask=here, other=0)
    row0, row1, row2, row3 = load_entries(rows, base, here, 0, TOPK)
    if WEIGHTED:
        factor0, factor1, factor2, factor3 = load_entries(factors, base, here, 0, TOPK)
    else:
        factor0 = token.to(gl.float32) * 0 + 1
        factor1, factor2, factor3 = factor0, factor0, factor0
    return length, row0, row1, row2, row3, factor0, factor1, factor2, factor3


@gluon.jit
def load_row(products, row, here, col, inside, cols):
    """Columns ``col`` of rows of products; zeros where ``here`` or ``inside`` says that there are none."""
    place = gl.multiple_of(products + row.to(gl.int64)[:, None] * cols + col[None, :], [1, 16])
    return gl.load(place, mask=here[:, None] & inside, other=0.0)


@gluon.jit
def add_rows(
    acc, products, length, first, row0, row1, row2, row3, factor0, factor1, factor2, factor3, col, inside, cols
):  # fmt: skip
    """``acc`` plus AHEAD weighted rows of each token, its entries from ``first`` on, which are asked for at once."""
    value0 = load_row(products, row0, length > first, col, inside, cols)
    value1 = load_row(products, row1, length > first + 1, col, inside, cols)
    value2 = load_row(products, row2, length > first + 2, col, inside, cols)
    value3 = load_row(products, row3, length > first + 3, col, inside, cols)
    acc += value0.to(gl.float32) * factor0[:, None]
    acc += value1.to(gl.float32) * factor1[:, None]
    acc += value2.to(gl.float32) * factor2[:, None]
    acc += value3.to(gl.float32) * factor3[:, None]
    return acc


@gluon.jit
def sum_rows(
    products, rows, factors, base, length, row0, row1, row2, row3, factor0, factor1, factor2, factor3, col, inside, cols,
    TOPK: gl.constexpr, WEIGHTED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """fp32 [tokens, columns]: weighted rows of tokens added in order of their lists."""
    acc = gl.zeros((length.shape[0], col.shape[0]), gl.float32, layout)
    acc = add_rows(
        acc,
        products,
        length,
        0,
        row0,
        row1,
        row2,
        row3,
        factor0,
        factor1,
        factor2,
        factor3,
        col,
        inside,
        cols,
    )
    if TOPK > AHEAD:
        for first in range(AHEAD, gl.max(length, axis=0), AHEAD):
            here = length > first
            row0, row1, row2, row3 = load_entries(rows, base, here, first, TOPK)
            if WEIGHTED:
                factor0, factor1, factor2, factor3 = load_entries(factors, base, here, first, TOPK)
            acc = add_rows(
                acc,
                products,
                length,
                first,
                row0,
                row1,
                row2,
                row3,
                factor0,
                factor1,
                factor2,
                factor3,
                col,
                inside,
                cols,
            )
    return acc


@gluon.jit
def reduce_block(
    products, rows, factors, lengths, target, slots, control, source, rank, block, limit, max_tokens, first_col, col_limit,
    cols, FINISH: gl.constexpr, WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, TOKENS: gl.constexpr,
    SUB: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """A block of tokens of ``source``, one chunk of columns: sums of their rows here, stored in rows of ``target``.

    ``FINISH``: they are own tokens; peers' partials, in ``slots``, are added in rank order, and tokens without a row are zero.
    """
    fault = gl.load(
        control + FAULT, volatile=True
    )  # also where weights never came: sums with old ones must not pass for right
    first = source * max_tokens
    end = gl.minimum((block + 1) * TOKENS, limit)
    token = block * TOKENS + gl.arange(0, SUB, layout=gl.SliceLayout(1, layout))
    for begin in range(block * TOKENS, end, SUB):
        entry, row0, row1, row2, row3, factor0, factor1, factor2, factor3 = load_list(
            rows, factors, lengths, first, token, end, TOPK, WEIGHTED
        )
        length = entry & LENGTH
        for left in range(first_col, col_limit, COLS):
            col = left + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
            inside = (col < col_limit)[None, :]
            acc = sum_rows(
                products, rows, factors, (first + token) * TOPK, length, row0, row1, row2, row3,
                factor0, factor1, factor2, factor3, col, inside, cols, TOPK, WEIGHTED, layout,
            )  # fmt: skip
            if FINISH:
                acc = add_partials(
                    acc,
                    slots,
                    entry >> OWNERS,
                    rank,
                    token,
                    max_tokens,
                    col,
                    inside,
                    cols,
                    WORLD_SIZE,
                )
                stored = token < end
            else:
                stored = length > 0
            acc = gl.where(fault != 0, float("nan"), acc)
            place = gl.multiple_of(
                target + token.to(gl.int64)[:, None] * cols + col[None, :], [1, 16]
            )
            gl.store(place, acc.to(target.dtype.element_ty), mask=stored[:, None] & inside)
        token += SUB


@gluon.jit
def add_partials(
    own, slots, owners, rank, token, max_tokens, col, inside, cols, WORLD_SIZE: gl.constexpr
):
    """Peers' partials and the own one in rank order; bit r of ``owners``: rank r has one."""
    layout: gl.constexpr = own.type.layout
    acc = gl.zeros(own.shape, gl.float32, layout)
    for source in gl.static_range(WORLD_SIZE):
        there = (((owners >> source) & 1) > 0) & (token * 0 + source != rank)
        row = (source - (rank < source).to(gl.int32)) * max_tokens + token
        part = load_row(slots, row, there, col, inside, cols).to(gl.float32)
        acc += gl.where(source == rank, own, part)
    return acc


@gluon.jit
def serve_tickets(
    products, rows, factors, lengths, offsets, out, counts, slots, slot_table, signal_table, signals, control, report,
    slot_offset, rank, epoch, experts, cols, chunks, chunk_cols, tokens, max_tokens, groups, group_blocks, blocks, programs,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, EXPERTS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Reduce and finish blocks until there are none. ``PARTS``: 1 for the early tickets, 2 for the late ones as well.

    ``blocks``: of a peer's tokens, max_tokens of them. The last block of a (chunk, group) that is stored for a peer signals it.
    """
    ACROSS: gl.constexpr = WARPS if COLS // 256 > WARPS else COLS // 256
    SUB: gl.constexpr = HELD * (WARPS // ACROSS)
    layout: gl.constexpr = gl.BlockedLayout([HELD, 8], [1, 32], [WARPS // ACROSS, ACROSS], [1, 0])
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    index = gl.arange(0, EXPERTS, layout=lane)
    first_rows = gl.load(offsets + index, mask=index < experts, other=0)
    ends = gl.load(offsets + index + 1, mask=index < experts, other=0)
    tile_rows = gl.sum((ends - first_rows + TILE_M - 1) // TILE_M, axis=0)
    tile_cols = (cols + TILE_N - 1) // TILE_N

    own_blocks = (tokens + TOKENS - 1) // TOKENS
    peer_blocks = (WORLD_SIZE - 1) * blocks
    made = 0  # all chunks before this one are known to be made
    heard = 0  # 1 + the last word (chunk, group) that all peers are known to have sent; own blocks come in order of words
    await_count(counts + LISTED, programs)
    for late in range(0, PARTS):
        tickets = counts + TICKETS + late * SLICES
        count = count_tickets(late, chunks, peer_blocks, own_blocks)
        ticket = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        while ticket < count:
            following = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
            is_send, chunk, step = place_ticket(ticket, late, chunks, peer_blocks, own_blocks)
            while (
                made <= chunk
            ):  # each: one of fewer tiles than programs may be complete before the one in front of it
                await_count(
                    counts + TILES + made,
                    tile_rows * gl.minimum(tile_cols - made * chunk_cols, chunk_cols),
                )
                made += 1
            first_col = chunk * chunk_cols * TILE_N
            col_limit = gl.minimum(first_col + chunk_cols * TILE_N, cols)
            if is_send:
                peer = (rank + 1 + step // blocks) % WORLD_SIZE
                block = step % blocks
                slot = symm_at(slot_table, peer, products.dtype.element_ty) + slot_offset
                slot += (rank - (rank > peer).to(gl.int32)).to(gl.int64) * max_tokens * cols
                reduce_block(
                    products, rows, factors, lengths, slot, slots, control, peer, rank, block, max_tokens, max_tokens,
                    first_col, col_limit, cols, False, WORLD_SIZE, TOPK, WEIGHTED, TOKENS, SUB, COLS, layout,
                )  # fmt: skip
                group = block // group_blocks
                word = chunk * groups + group
                group_size = gl.minimum(group_blocks, blocks - group * group_blocks)
                if is_last(counts + SENT + peer * SLICES + word, group_size):
                    notify(symm_at(signal_table, peer, gl.int32) + rank * SLICES + 1 + word, epoch)
            else:
                word = chunk * groups + step // group_blocks
                if word >= heard:
                    for i in gl.static_range(1, WORLD_SIZE):
                        source = (rank + i) % WORLD_SIZE
                        spin(
                            signals + 1 + word,
                            source,
                            source,
                            SLICES,
                            epoch,
                            step,
                            control,
                            report,
                            1,
                            1,
                            WARPS,
                        )
                    acquire(epoch)
                    heard = word + 1
                reduce_block(
                    products, rows, factors, lengths, out, slots + slot_offset, control, rank, rank, step, tokens, max_tokens,
                    first_col, col_limit, cols, True, WORLD_SIZE, TOPK, WEIGHTED, TOKENS, SUB, COLS, layout,
                )  # fmt: skip
            ticket = following
