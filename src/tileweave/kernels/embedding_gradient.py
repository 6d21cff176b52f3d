"""The gradient's way back: rows of the result's gradient to the tables' owners, then a deterministic sum for each table row.

``push_gradient``: rank r stores the columns of owner p's tables, for its own samples, straight into p's slot:

    grad  [b, width]   gradient of the result, own samples          slot [B, D_p]  p's tables side by side, all samples

====================  =====  =====================================  ===================================
signal (int32)        value  notifier                               waiter
====================  =====  =====================================  ===================================
[source, READY]       epoch  program 0 of ``source``                programs about to store to ``source``
                                                                    for the first time in this call
[source, DONE]        epoch  ``source``'s last program to store     the last program, before it leaves
====================  =====  =====================================  ===================================

    ready | push to r+1 | push to r+2 | push to r+3 | own | done of all? | leave || sum_rows, sum_runs (next kernels)

One slot, at an address that the host knows: READY of call n says that the kernels which read the slot of call n-1 have
ended, since they stand before call n on the stream. Program 0 says it before it waits for anybody.

``sum_rows``, ``sum_runs``: positions of all bags sorted by table row make runs of equal rows. A program takes ``TILE``
positions and sums each run inside, all runs at once; a run that crosses tiles leaves partial sums, which the second kernel
adds in order. The sum is then applied: as a gradient's row, or as a step of SGD or of row-wise Adagrad in place. Nothing
depends on timing, so the same bits each time, also for a row that is looked up a million times.

Limits: sums in fp32. Out-of-range indices sort last and are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.kernels.embedding_lookup import TYPES
from tileweave.kernels.endpoint import Endpoint
from tileweave.language.remote import symm_at
from tileweave.language.signal import leave, load_epoch, notify_all, wait

SLICES = tl.constexpr(32)
READY, DONE = tl.constexpr(0), tl.constexpr(1)
COUNTERS = 2  # programs that have stored all they had to; one for each parity of the epoch
ROWS, COLS = 16, 128  # a block that a program of the push moves at once
DENSE, SPARSE, SGD, ADAGRAD = 0, 1, 2, 3
KEYS = 512  # positions whose keys a program finds
GROUP = 32  # tiles in which a program looks for long runs


@triton.jit
def push_block(
    grad, slot_table, plan, piece, sample, rows_here, first_sample, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One block of rows of one piece: ``plan`` int64 [pieces, 5] = (owner, source column, target column, dim, slot width)."""
    peer = tl.load(plan + piece * 5).to(tl.int32)
    source = tl.load(plan + piece * 5 + 1).to(tl.int32)
    target = tl.load(plan + piece * 5 + 2).to(tl.int32)
    dim = tl.load(plan + piece * 5 + 3).to(tl.int32)
    slot_width = tl.load(plan + piece * 5 + 4)
    if ALIGN > 1:
        source = tl.multiple_of(source, ALIGN)
        target = tl.multiple_of(target, ALIGN)
        dim = tl.multiple_of(dim, ALIGN)
        slot_width = tl.multiple_of(slot_width, ALIGN)
    base = symm_at(slot_table, peer, grad.dtype.element_ty, 16)
    row = sample + tl.arange(0, ROWS)
    for begin in range(0, dim, COLS):
        col = begin + tl.arange(0, COLS)
        mask = (row < rows_here)[:, None] & (col < dim)[None, :]
        values = tl.load(grad + (row.to(tl.int64) * width)[:, None] + (source + col)[None, :], mask=mask)
        places = base + ((first_sample + row).to(tl.int64) * slot_width)[:, None] + (target + col)[None, :]
        tl.store(places, values, mask=mask)


@triton.jit(do_not_specialize=["rank", "rows_here", "first_sample", "units", "blocks"])
def push_gradient_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Push blocks in turn, peers' pieces first; count; the last program waits for every peer."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if program == 0:
        tl.store(counters + 1 - (epoch & 1), 0)
        notify_all(signal_table, rank * SLICES + READY, rank, epoch, WORLD_SIZE, False)
    awaited = 1 << rank  # bit p: peer p is ready
    for unit in range(program, units, num_programs):
        piece = unit // blocks
        peer = tl.load(plan + piece * 5).to(tl.int32)
        if (awaited >> peer) & 1 == 0:
            wait(signals, 1, epoch, peer * SLICES + READY, unit, control, report)
            awaited = awaited | (1 << peer)
        push_block(grad, slot_table, plan, piece, unit % blocks * ROWS, rows_here, first_sample, width, ROWS, COLS, ALIGN)
    tl.debug_barrier()
    if tl.atomic_add(counters + (epoch & 1), 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        notify_all(signal_table, rank * SLICES + DONE, rank, epoch, WORLD_SIZE, False)
    if program == num_programs - 1:
        for step in tl.static_range(1, WORLD_SIZE):
            wait(signals, 1, epoch, (rank + step) % WORLD_SIZE * SLICES + DONE, -1, control, report)
    leave(control, epoch, num_programs)


def push_gradient(
    peers: Endpoint,
    plan: torch.Tensor,
    grad: torch.Tensor,
    first_sample: int,
    aligned: int,
    rank: int,
    world_size: int,
    num_sms: int,
) -> None:
    """Launch on the current stream. ``plan``: the pieces of all owners, peers' first; see :func:`push_block`."""
    rows, width = grad.shape
    blocks = triton.cdiv(rows, ROWS)
    units = plan.shape[0] * blocks
    push_gradient_kernel[(max(1, min(units, 8 * num_sms)),)](
        grad, plan, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, peers.counters,
        rank, rows, first_sample, width, units, max(blocks, 1),
        WORLD_SIZE=world_size, ROWS=ROWS, COLS=COLS, ALIGN=aligned, num_warps=4,
    )  # fmt: skip


# --- Sums of runs ---


@triton.jit
def table_of(meta, table, tables, last_key, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """(target, first key, end of keys, dim, column in the slot, state, row of values) of a table.

    ``meta`` int64 [T, 6] = (target's address, first key, dim, column in the slot, state's address, row of values).
    """
    word = meta + table * 6
    target = tl.load(word).to(tl.pointer_type(DTYPE), bitcast=True)
    dim = tl.load(word + 2).to(tl.int32)
    source = tl.load(word + 3)
    if ALIGN > 1:
        target = tl.multiple_of(target, 16)
        dim = tl.multiple_of(dim, ALIGN)
        source = tl.multiple_of(source, ALIGN)
    high = tl.load(word + 7, mask=table + 1 < tables, other=last_key)
    state = tl.load(word + 4).to(tl.pointer_type(tl.float32), bitcast=True)
    return target, tl.load(word + 1), high, dim, source, state, tl.load(word + 5)


@triton.jit
def columns(dim, here, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask [BLOCK_D] of the first ``dim`` columns, or of none."""
    limit = tl.where(here, dim, 0)
    if ALIGN > 1:
        limit = tl.multiple_of(limit, ALIGN)
    return tl.arange(0, BLOCK_D) < limit


@triton.jit
def target_of(
    target, state, places, at, row, values, dim, here, BLOCK_D: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr
):
    """(row of the target, weights [BLOCK_D], moment) of a run that will be applied; asked for before its sum is there."""
    col = tl.arange(0, BLOCK_D)
    if KIND == 1:
        row = tl.load(places + at, mask=here, other=0).to(tl.int64) - values
    weight = tl.load(target + row * dim + col, mask=columns(dim, here & (KIND >= 2), ALIGN, BLOCK_D), other=0.0)
    return row, weight, tl.load(state + row, mask=here & (KIND == 3), other=0.0)


@triton.jit
def apply(
    total, found, target, state, dim, rate, epsilon, here,
    BLOCK_D: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Put the finished sum ``total`` [BLOCK_D] where ``found``, from :func:`target_of`, says, by KIND, if ``here``."""
    col = tl.arange(0, BLOCK_D)
    mask = columns(dim, here, ALIGN, BLOCK_D)
    row, weight, moment = found
    value = total
    if KIND == 2:
        value = weight.to(tl.float32) - rate * total
    if KIND == 3:
        moment += tl.sum(tl.where(mask, total * total, 0.0), axis=0) / tl.maximum(dim, 1).to(tl.float32)
        tl.store(state + row, moment, mask=here)
        value = weight.to(tl.float32) - rate * total / (tl.sqrt(moment) + epsilon)
    tl.store(target + row * dim + col, value.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "num_bags", "last_key", "steps"])
def keys_kernel(indices, offsets, firsts, keys, bags, count, num_bags, batch, last_key, steps, BLOCK: tl.constexpr):
    """Of each position: the bag that it is in, by bisection, and its table row's key; ``last_key`` where there is none.

    ``firsts`` int64 [T + 1]: the first key of each table.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bag = tl.zeros((BLOCK,), tl.int32)
    for step in range(0, steps):
        probe = bag + (1 << (steps - 1 - step))
        begin = tl.load(offsets + probe, mask=inside & (probe <= num_bags), other=0).to(tl.int64)
        bag = tl.where((probe <= num_bags) & (begin <= at), probe, bag)
    here = inside & (bag < num_bags) & (tl.load(offsets).to(tl.int64) <= at)
    table = bag // batch
    first = tl.load(firsts + table, mask=here, other=0)
    index = tl.load(indices + at, mask=inside, other=-1).to(tl.int64)
    here = here & (index >= 0) & (first + index < tl.load(firsts + table + 1, mask=here, other=0))
    tl.store(keys + at, tl.where(here, first + index, last_key).to(keys.dtype.element_ty), mask=inside)
    tl.store(bags + at, bag, mask=inside)


@triton.jit
def gradient_at(
    grad, scales, at, bag, lowest, slot_width, source, dim, here,
    BLOCK_D: tl.constexpr, SCALED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_D]: the gradient of ``bag``, looked up at position ``at``; its table's first bag is ``lowest``."""
    place = (bag - lowest).to(tl.int64) * slot_width + source
    mask = columns(dim, here, ALIGN, BLOCK_D)
    row = tl.load(grad + place + tl.arange(0, BLOCK_D), mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        row *= tl.load(scales + at, mask=here, other=0.0)
    return row


@triton.jit
def words_from(words, at, count, other, NUMBER: tl.constexpr):
    """``NUMBER`` scalars from place ``at`` on; ``other`` past the end."""
    found = ()
    for i in tl.static_range(NUMBER):
        found = found + (tl.load(words + at + i, mask=at + i < count, other=other),)
    return found


@triton.jit
def add_range(
    total, grad, keys, bags, scales, key, begin, end, lowest, slot_width, source, dim,
    BLOCK_D: tl.constexpr, SCALED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``total`` plus the gradients at those of the positions [begin, end) that are of the run of ``key``; four in flight."""
    for at in range(begin, end, 4):
        for i in tl.static_range(4):
            here = tl.load(keys + at + i, mask=at + i < end, other=-1) == key
            bag = tl.load(bags + at + i, mask=here, other=0)
            total += gradient_at(grad, scales, at + i, bag, lowest, slot_width, source, dim, here, BLOCK_D, SCALED, ALIGN)
    return total


@triton.jit(do_not_specialize=["factor", "tables"])
def sum_rows_kernel(
    grad, keys, bags, scales, places, meta, partials, rate, epsilon, factor,
    count, last_key, batch, tables, slot_width,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Sum and apply the runs that open in tile ``program``, the last of them to its end in the next tile.

    A run that goes on behind the next tile is *long*: the tiles in which it goes on leave a partial sum each in ``partials``
    [tiles, BLOCK_D], the first of them also of what stands in the tile where it opens. All rows of a tile are in flight at
    once, and with them the first behind it and the weights that its steps will change.
    """
    AHEAD: tl.constexpr = 4 if TILE > 4 else TILE  # rows of the last run in the next tile that are in flight with the tile's
    first = tl.program_id(0).to(tl.int64) * TILE
    col = tl.arange(0, BLOCK_D)
    step = tl.load(rate)
    key = words_from(keys, first, count, last_key, TILE + AHEAD)
    bag = words_from(bags, first, count, 0, TILE + AHEAD)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    long_before = tl.load(keys + first - TILE - 1, mask=first > TILE, other=-1)
    behind = tl.load(keys + first + 2 * TILE, mask=first + 2 * TILE < count, other=-1)
    # The run at the tile's begin, if it opened before; and the one at its end, if it opens here and goes on.
    last = key[TILE - 1]
    led = before == key[0]
    led_on = long_before == key[0]
    led_long = led & (led_on | (key[TILE] == key[0]))
    goes_on = (key[TILE] == last) & ((led == 0) | (last != key[0]))
    long = goes_on & (behind == last)
    short = goes_on & (long == 0)

    # Nearly always all rows of a tile are of one table: what follows from that is worked out once for each table.
    table = bag[0] // batch
    final = tl.where(last < last_key, bag[TILE - 1] // batch, tables - 1)
    final = tl.where(key[0] < last_key, final, -1)
    while table <= final:
        target, low, high, dim, source, state, values = table_of(meta, table, tables, last_key, DTYPE, ALIGN)
        lowest = table * batch
        vectors = ()
        found = ()
        for i in tl.static_range(TILE + AHEAD):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            read = mine & ((others == 0) | led_long) if i < TILE else mine & short & (key[i] == last)
            vectors = vectors + (
                gradient_at(grad, scales, first + i, bag[i], lowest, slot_width, source, dim, read, BLOCK_D, SCALED, ALIGN),
            )
            if i < TILE:
                ends = (key[i] != key[i + 1]) | short if i == TILE - 1 else key[i] != key[i + 1]
                ends = ends & mine & (others == 0)
                found = found + (
                    target_of(target, state, places, first + i, key[i] - low, values, dim, ends, BLOCK_D, KIND, ALIGN),
                )
        total = tl.zeros((BLOCK_D,), tl.float32)
        opens = first - tl.where(led_long & (led_on == 0) & (key[0] >= low) & (key[0] < high), TILE, 0)
        total = add_range(
            total, grad, keys, bags, scales, key[0], opens, first, lowest, slot_width, source, dim, BLOCK_D, SCALED, ALIGN
        )
        for i in tl.static_range(TILE):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            if i > 0:
                total = tl.where(key[i] == key[i - 1], total, 0.0)
            total += vectors[i]
            if i == TILE - 1:
                for j in tl.static_range(AHEAD):
                    total += vectors[TILE + j]
                more = short & mine & (key[TILE + AHEAD - 1] == last)
                rest = tl.where(more, tl.minimum(first + 2 * TILE, count), 0)
                total = add_range(
                    total, grad, keys, bags, scales, last, first + TILE + AHEAD, rest, lowest, slot_width, source, dim,
                    BLOCK_D, SCALED, ALIGN,
                )  # fmt: skip
                leaves = mine & others & led_long
                ends = mine & (others == 0) & ((key[i] != key[i + 1]) | short)
            else:
                leaves = mine & others & led_long & (key[i] != key[i + 1])
                ends = mine & (others == 0) & (key[i] != key[i + 1])
            apply(total * factor, found[i], target, state, dim, step, epsilon, ends, BLOCK_D, KIND, ALIGN)
            place = partials + tl.program_id(0).to(tl.int64) * BLOCK_D + col
            tl.store(place, total * factor, mask=columns(BLOCK_D, leaves, 1, BLOCK_D))
        table += 1


@triton.jit(do_not_specialize=["tables"])
def sum_runs_kernel(
    keys, bags, places, meta, partials, rate, epsilon, count, last_key, batch, tables,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, FLIGHT: tl.constexpr,
    GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The long runs that open in GROUP tiles, one after the other: their partial sums in order of tiles, and apply."""
    lane = tl.arange(0, GROUP)
    end = (tl.program_id(0).to(tl.int64) * GROUP + lane + 1) * TILE
    there = end + TILE < count
    opening = tl.load(keys + end - 1, mask=there, other=last_key)
    behind = tl.load(keys + end + TILE, mask=there, other=last_key)
    before = tl.load(keys + end - TILE - 1, mask=there & (end > TILE), other=-1)
    pending = (there & (opening < last_key) & (behind == opening) & (before != opening)).to(tl.int32)
    col = tl.arange(0, BLOCK_D)
    flight = tl.arange(0, FLIGHT)
    while tl.max(pending, axis=0) > 0:
        chosen = tl.min(tl.where(pending > 0, lane, GROUP), axis=0)
        pending = tl.where(lane == chosen, 0, pending)
        tile = tl.program_id(0).to(tl.int64) * GROUP + chosen
        at = tile * TILE + TILE - 1
        key = tl.load(keys + at)
        table = tl.load(bags + at) // batch
        target, low, _, dim, _, state, values = table_of(meta, table, tables, last_key, DTYPE, ALIGN)
        found = target_of(target, state, places, at, key - low, values, dim, key < last_key, BLOCK_D, KIND, ALIGN)
        total = tl.zeros((BLOCK_D,), tl.float32)
        further = tile + 1
        more = 1
        while more > 0:
            tiles = further + flight
            goes = tl.load(keys + tiles * TILE, mask=tiles * TILE < count, other=last_key) == key
            rows = tl.load(partials + (tiles * BLOCK_D)[:, None] + col[None, :], mask=goes[:, None], other=0.0)
            total += tl.sum(rows, axis=0)
            further += FLIGHT
            more = tl.min(goes.to(tl.int32), axis=0)
        apply(total, found, target, state, dim, tl.load(rate), epsilon, key < last_key, BLOCK_D, KIND, ALIGN)


def find_keys(
    indices: torch.Tensor, offsets: torch.Tensor, firsts: torch.Tensor, last_key: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, bags int32) by position; see :func:`keys_kernel`. Keys of int32 where they fit: half of what a sort moves."""
    count, num_bags = indices.numel(), offsets.numel() - 1
    keys = torch.empty(count, dtype=torch.int32 if last_key < 1 << 31 else torch.int64, device=indices.device)
    bags = torch.empty(count, dtype=torch.int32, device=indices.device)
    if count:
        keys_kernel[(triton.cdiv(count, KEYS),)](
            indices, offsets, firsts, keys, bags, count, num_bags, batch, last_key, num_bags.bit_length(),
            BLOCK=KEYS, num_warps=4,
        )  # fmt: skip
    return keys, bags


def sum_rows(
    grad: torch.Tensor,
    keys: torch.Tensor,
    bags: torch.Tensor,
    scales: torch.Tensor | None,
    places: torch.Tensor | None,
    meta: torch.Tensor,
    rate: torch.Tensor | None,
    epsilon: float,
    factor: float,
    last_key: int,
    batch: int,
    dtype: torch.dtype,
    widest: int,
    kind: int,
    aligned: int,
    tile: int = 8,
) -> None:
    """Launch both kernels on the current stream.

    grad : [B, slot width], the result's gradient in columns of this rank's tables.
    keys, bags (int32), scales : [N], by table row: its number over all tables (``last_key``: out of range), the bag, a
        factor of its own. factor : of all sums.
    places : [N], with SPARSE the row of the values; else None. meta : see :func:`apply`.
    aligned : elements that all addresses, dims and columns are multiples of (16 bytes), else 1.
    """
    count = keys.numel()
    if not count:
        return
    block, tiles = triton.next_power_of_2(max(widest, 1)), triton.cdiv(count, tile)
    partials = torch.empty(tiles * block, dtype=torch.float32, device=grad.device)
    where = keys if places is None else places
    step = partials if rate is None else rate
    warps = min(max(block // 128, 1), 8)
    shape = {"DTYPE": TYPES[dtype], "BLOCK_D": block, "TILE": tile, "KIND": kind, "ALIGN": aligned, "num_stages": 1}
    sum_rows_kernel[(tiles,)](
        grad, keys, bags, partials if scales is None else scales, where, meta, partials, step, epsilon, factor,
        count, last_key, batch, meta.shape[0], grad.stride(0), SCALED=scales is not None, num_warps=warps, **shape,
    )  # fmt: skip
    sum_runs_kernel[(triton.cdiv(tiles, GROUP),)](
        keys, bags, where, meta, partials, step, epsilon, count, last_key, batch, meta.shape[0],
        FLIGHT=16, GROUP=GROUP, num_warps=4, **shape,
    )  # fmt: skip
