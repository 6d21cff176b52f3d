"""The Hopper ``grouped_matmul_combine`` beside its matmul, in Gluon: lists of rows, blocks that are reduced or finished.

See ``grouped_matmul_combine_hopper.py`` for the partitions and ``grouped_matmul_combine.py`` for the protocol. Blocks are
*tickets*, handed out one by one to whoever has time: round c has the blocks of all peers for chunk c, then the own ones for
chunk c - 1, whose partials have had a round to arrive.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.language.hopper import FAULT, acquire, block_barrier, notify, notify_all, spin, symm_at

SLICES = gl.constexpr(32)  # signal words of a source
# Counters of a call, as in ``grouped_matmul_combine.py``; the two behind the chunks' are this file's.
WEIGHTS = gl.constexpr(0)
TILES = gl.constexpr(1)
SENT = gl.constexpr(32)
TICKETS = gl.constexpr(30)
LISTED = gl.constexpr(31)
COUNTER_WORDS = gl.constexpr(32 * 9)
SUB = gl.constexpr(4)  # tokens that a partition holds at once


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
            target = symm_at(slot_table, (rank + step) % WORLD_SIZE, gl.float32) + offset + rank * place
            gl.store(target + at, value, mask=at < size)
    if is_last(counts + WEIGHTS, programs):
        notify_all(signal_table, rank * SLICES + WEIGHTS, rank, epoch, WORLD_SIZE, True, WARPS)


@gluon.jit
def list_rows(
    entry_row, rows, factors, lengths, counts, slot_table, signals, control, report, weights_offset, rank, max_tokens, epoch,
    program, programs, WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """For each token of all ranks: its rows here, in order of j and without gaps, their weights, and how many there are."""
    BLOCK: gl.constexpr = 32 * WARPS
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if WEIGHTED:
        spin(signals, 0, WORLD_SIZE - 1, SLICES, epoch, -1, control, report, 1, 8, WARPS)
        acquire(epoch)
    everyone = symm_at(slot_table, rank, gl.float32) + weights_offset
    total = WORLD_SIZE * max_tokens
    for begin in range(program * BLOCK, total, programs * BLOCK):
        token = begin + gl.arange(0, BLOCK, layout=lane)
        length = token * 0
        for j in gl.static_range(TOPK):
            row = gl.load(entry_row + token * TOPK + j, mask=token < total, other=-1)
            found = row >= 0
            gl.store(rows + token * TOPK + length, row, mask=found)
            if WEIGHTED:
                factor = gl.load(everyone + token * TOPK + j, mask=found, other=0.0)
                gl.store(factors + token * TOPK + length, factor, mask=found)
            length += found.to(gl.int32)
        gl.store(lengths + token, length, mask=token < total)
    block_barrier()
    gl.atomic_add(counts + LISTED, 1, sem="release", scope="gpu")


@gluon.jit
def sum_rows(
    products, rows, factors, lengths, first, token, limit, col, col_limit, cols,
    TOPK: gl.constexpr, WEIGHTED: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """fp32 [SUB, COLS]: weighted rows of tokens ``first + token`` added in order; and how many each has. Two are in flight."""
    length = gl.load(lengths + first + token, mask=token < limit, other=0)
    most = gl.max(length, axis=0)
    acc = gl.zeros((SUB, COLS), gl.float32, layout)
    inside = (col < col_limit)[None, :]
    base = (first + token) * TOPK
    for i in range(0, most, 2):
        here0 = i < length
        here1 = i + 1 < length
        row0 = gl.load(rows + base + i, mask=here0, other=0).to(gl.int64)
        row1 = gl.load(rows + base + i + 1, mask=here1, other=0).to(gl.int64)
        place0 = gl.multiple_of(products + row0[:, None] * cols + col[None, :], [1, 16])
        place1 = gl.multiple_of(products + row1[:, None] * cols + col[None, :], [1, 16])
        value0 = gl.load(place0, mask=here0[:, None] & inside, other=0.0)
        value1 = gl.load(place1, mask=here1[:, None] & inside, other=0.0)
        if WEIGHTED:
            factor0 = gl.load(factors + base + i, mask=here0, other=0.0)
            factor1 = gl.load(factors + base + i + 1, mask=here1, other=0.0)
            acc += value0.to(gl.float32) * factor0[:, None]
            acc += value1.to(gl.float32) * factor1[:, None]
        else:
            acc += value0.to(gl.float32)
            acc += value1.to(gl.float32)
    return acc, length


@gluon.jit
def send_block(
    products, rows, factors, lengths, slot_table, slot_offset, rank, peer, block, max_tokens, first_col, col_limit, cols,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Partials of a block of ``peer``'s tokens, one chunk of columns, into its slot."""
    dtype: gl.constexpr = products.dtype.element_ty
    place = rank - (rank > peer).to(gl.int32)
    slot = symm_at(slot_table, peer, dtype) + slot_offset
    for begin in range(block * TOKENS, gl.minimum((block + 1) * TOKENS, max_tokens), SUB):
        token = begin + gl.arange(0, SUB, layout=gl.SliceLayout(1, layout))
        for left in range(first_col, col_limit, COLS):
            col = left + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
            acc, length = sum_rows(
                products, rows, factors, lengths, peer * max_tokens, token, max_tokens, col, col_limit, cols,
                TOPK, WEIGHTED, COLS, layout,
            )  # fmt: skip
            target = slot + (place * max_tokens + token).to(gl.int64)[:, None] * cols + col[None, :]
            mask = (length > 0)[:, None] & (col < col_limit)[None, :]
            gl.store(gl.multiple_of(target, [1, 16]), acc.to(dtype), mask=mask)


@gluon.jit
def finish_block(
    products, rows, factors, lengths, topk_ids, out, slots, control, slot_offset, rank, block, tokens, max_tokens, experts,
    first_col, col_limit, cols,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """z of a block of own tokens, one chunk of columns: partials added in rank order, rounded once."""
    fault = gl.load(control + FAULT, volatile=True)
    for begin in range(block * TOKENS, gl.minimum((block + 1) * TOKENS, tokens), SUB):
        token = begin + gl.arange(0, SUB, layout=gl.SliceLayout(1, layout))
        owners = token * 0  # bit r: rank r has an expert of the token
        for j in gl.static_range(TOPK):
            expert = gl.load(topk_ids + token * TOPK + j, mask=token < tokens, other=-1)
            owners = owners | gl.where(expert >= 0, 1 << (gl.maximum(expert, 0) // experts), 0)
        for left in range(first_col, col_limit, COLS):
            col = left + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
            inside = (col < col_limit)[None, :]
            own, length = sum_rows(
                products, rows, factors, lengths, rank * max_tokens, token, tokens, col, col_limit, cols,
                TOPK, WEIGHTED, COLS, layout,
            )  # fmt: skip
            acc = gl.zeros((SUB, COLS), gl.float32, layout)
            for source in gl.static_range(WORLD_SIZE):
                if source == rank:
                    acc += own
                else:
                    place = source - (rank < source).to(gl.int32)
                    at = slots + slot_offset + (place * max_tokens + token).to(gl.int64)[:, None] * cols + col[None, :]
                    there = ((owners >> source) & 1) > 0
                    part = gl.load(gl.multiple_of(at, [1, 16]), mask=there[:, None] & inside, other=0.0)
                    acc += part.to(gl.float32)
            acc = gl.where(fault != 0, float("nan"), acc)
            target = out + token.to(gl.int64)[:, None] * cols + col[None, :]
            value = acc.to(out.dtype.element_ty)
            gl.store(gl.multiple_of(target, [1, 16]), value, mask=(token < tokens)[:, None] & inside)


@gluon.jit
def serve_tickets(
    products, rows, factors, lengths, offsets, topk_ids, out, counts, slots, slot_table, signal_table, signals, control, report,
    slot_offset, rank, epoch, experts, cols, chunks, chunk_cols, tokens, max_tokens, groups, group_blocks, blocks, programs,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, EXPERTS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Reduce and finish blocks until there are none."""
    ACROSS: gl.constexpr = WARPS if COLS // 256 > WARPS else COLS // 256
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS // ACROSS, ACROSS], [1, 0])
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    index = gl.arange(0, EXPERTS, layout=lane)
    first_rows = gl.load(offsets + index, mask=index < experts, other=0)
    ends = gl.load(offsets + index + 1, mask=index < experts, other=0)
    tile_rows = gl.sum((ends - first_rows + TILE_M - 1) // TILE_M, axis=0)
    tile_cols = (cols + TILE_N - 1) // TILE_N

    own_blocks = (tokens + TOKENS - 1) // TOKENS
    peer_blocks = (WORLD_SIZE - 1) * blocks
    a_round = peer_blocks + own_blocks
    made = 0  # chunks that are known to be made
    heard = 0  # groups of chunks that peers are known to have sent
    await_count(counts + LISTED, programs)
    ticket = gl.atomic_add(counts + TICKETS, 1, sem="relaxed", scope="gpu")
    while ticket < (chunks + 1) * a_round:
        following = gl.atomic_add(counts + TICKETS, 1, sem="relaxed", scope="gpu")
        step = ticket % a_round
        chunk = ticket // a_round
        if step >= peer_blocks:
            chunk -= 1
        if (chunk >= 0) & (chunk < chunks):
            if chunk >= made:
                await_count(counts + TILES + chunk, tile_rows * gl.minimum(tile_cols - chunk * chunk_cols, chunk_cols))
                made = chunk + 1
            first_col = chunk * chunk_cols * TILE_N
            col_limit = gl.minimum(first_col + chunk_cols * TILE_N, cols)
            if step < peer_blocks:
                peer = (rank + 1 + step // blocks) % WORLD_SIZE
                block = step % blocks
                send_block(
                    products, rows, factors, lengths, slot_table, slot_offset, rank, peer, block, max_tokens, first_col,
                    col_limit, cols, WORLD_SIZE, TOPK, WEIGHTED, TOKENS, COLS, layout,
                )  # fmt: skip
                group = block // group_blocks
                word = chunk * groups + group
                count = gl.minimum(group_blocks, blocks - group * group_blocks)
                if is_last(counts + SENT + peer * SLICES + word, count):
                    notify(symm_at(signal_table, peer, gl.int32) + rank * SLICES + 1 + word, epoch)
            else:
                block = step - peer_blocks
                word = chunk * groups + block // group_blocks
                if word >= heard:
                    for i in gl.static_range(1, WORLD_SIZE):
                        source = (rank + i) % WORLD_SIZE
                        spin(signals + 1 + word, source, source, SLICES, epoch, block, control, report, 1, 1, WARPS)
                    acquire(epoch)
                    heard = word + 1
                finish_block(
                    products, rows, factors, lengths, topk_ids, out, slots, control, slot_offset, rank, block, tokens,
                    max_tokens, experts, first_col, col_limit, cols, WORLD_SIZE, TOPK, WEIGHTED, TOKENS, COLS, layout,
                )  # fmt: skip
        ticket = following
