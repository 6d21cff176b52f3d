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
def load_word(meta, table, word: tl.constexpr, here, ALIGN: tl.constexpr):
    """A word of each table's ``meta``; a multiple of ALIGN where it counts columns of aligned tables."""
    value = tl.load(meta + table * 6 + word, mask=here, other=0)
    if ALIGN > 1:
        value = tl.multiple_of(value, [ALIGN])
    return value


@triton.jit
def apply(
    total, here, row_key, at, table, meta, rate, epsilon,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Put the finished sums ``total`` [TILE, BLOCK_D] of the rows ``here`` where they belong, by KIND.

    ``meta`` int64 [T, 6] = (target's address, first key, dim, column in the slot, state's address, row of values).
    """
    row = row_key.to(tl.int64) - load_word(meta, table, 1, here, 1)
    dim = load_word(meta, table, 2, here, ALIGN)
    col = tl.arange(0, BLOCK_D).to(tl.int64)
    mask = here[:, None] & (col[None, :] < dim[:, None])
    base = load_word(meta, table, 0, here, 1).to(tl.pointer_type(DTYPE), bitcast=True)
    if ALIGN > 1:
        base = tl.multiple_of(base, [16])
    pointers = base[:, None] + (row * dim)[:, None] + col[None, :]
    if KIND == 0:
        tl.store(pointers, total.to(DTYPE), mask=mask)
    elif KIND == 1:
        place = tl.load(at, mask=here, other=0) - load_word(meta, table, 5, here, 1)
        tl.store(base[:, None] + (place * dim)[:, None] + col[None, :], total.to(DTYPE), mask=mask)
    else:
        step = tl.load(rate)
        weight = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if KIND == 3:
            squares = tl.sum(tl.where(mask, total * total, 0.0), axis=1) / tl.maximum(dim, 1).to(tl.float32)
            state = load_word(meta, table, 4, here, 1).to(tl.pointer_type(tl.float32), bitcast=True) + row
            moment = tl.load(state, mask=here, other=0.0) + squares
            tl.store(state, moment, mask=here)
            weight -= step * total / (tl.sqrt(moment) + epsilon)[:, None]
        else:
            weight -= step * total
        tl.store(pointers, weight.to(DTYPE), mask=mask)


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


@triton.jit(do_not_specialize=["factor"])
def sum_rows_kernel(
    grad, keys, bags, scales, places, meta, partials, rate, epsilon, factor,
    count, last_key, batch, slot_width,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of the runs inside tile ``program``: whole runs are applied, others leave ``partials`` [tiles, 2, BLOCK_D].

    Partial 0 is that of the run at the tile's begin, partial 1 that of the run at its end, if that is another.
    """
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    at = first + lane
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=last_key)
    before = tl.load(keys + at - 1, mask=inside & (at > 0), other=-1)
    opens = inside & (key != before) & (key < last_key)
    head = inside & (key < last_key) & ((lane == 0) | (key != before))
    others = tl.load(keys + first + tl.arange(0, TILE), mask=first + tl.arange(0, TILE) < count, other=last_key)
    length = tl.sum((key[:, None] == others[None, :]).to(tl.int32), axis=1)  # sorted: equal keys stand together
    length = tl.where(head, length, 0)
    longest = tl.max(length, axis=0)
    # A run is of one table: what follows from that is worked out once, and the loop has no division.
    bag = tl.load(bags + at, mask=head, other=0)
    table = bag // batch
    dim = load_word(meta, table, 2, head, ALIGN)
    source = load_word(meta, table, 3, head, ALIGN)
    lowest = table * batch
    col = tl.arange(0, BLOCK_D)
    wide = col[None, :] < dim[:, None]
    total = tl.zeros((TILE, BLOCK_D), tl.float32)
    following = tl.load(bags + at + 1, mask=length > 1, other=0)
    for step in range(0, longest, 2):  # two rows of each run in flight
        more = length > step + 1
        low = grad + ((bag - lowest).to(tl.int64) * slot_width + source)[:, None] + col[None, :]
        high = grad + ((following - lowest).to(tl.int64) * slot_width + source)[:, None] + col[None, :]
        even = tl.load(low, mask=(length > step)[:, None] & wide, other=0.0).to(tl.float32)
        odd = tl.load(high, mask=more[:, None] & wide, other=0.0).to(tl.float32)
        if SCALED:
            even *= tl.load(scales + at + step, mask=length > step, other=0.0)[:, None]
            odd *= tl.load(scales + at + step + 1, mask=more, other=0.0)[:, None]
        bag = tl.load(bags + at + step + 2, mask=length > step + 2, other=0)
        following = tl.load(bags + at + step + 3, mask=length > step + 3, other=0)
        total += even
        total += odd
    total *= factor
    after = at + length
    goes_on = head & (lane + length == TILE) & (tl.load(keys + after, mask=head & (after < count), other=last_key) == key)
    whole = opens & (goes_on == 0)
    apply(total, whole, key, places + at, table, meta, rate, epsilon, DTYPE, BLOCK_D, KIND, ALIGN)
    partial = head & (whole == 0)
    which = (tile * 2 + tl.where(lane == 0, 0, 1)).to(tl.int64) * BLOCK_D
    tl.store(partials + which[:, None] + col[None, :], total, mask=partial[:, None])


@triton.jit
def sum_runs_kernel(
    keys, bags, places, meta, partials, rate, epsilon, count, last_key, batch,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, FLIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The run that opens in tile ``program`` and goes on behind it: add its partial sums in order of tiles, and apply."""
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * TILE
    end = first + TILE
    if end < count:
        key = tl.load(keys + end - 1)
        if (key < last_key) & (tl.load(keys + end) == key):
            lane = tl.arange(0, TILE)
            lower = tl.load(keys + first + lane)
            start = tl.min(tl.where(lower == key, lane, TILE), axis=0)
            previous = tl.load(keys + first + start - 1, mask=first + start > 0, other=-1)
            if previous != key:
                col = tl.arange(0, BLOCK_D)
                flight = tl.arange(0, FLIGHT)
                which = (tile * 2 + tl.where(start == 0, 0, 1)).to(tl.int64) * BLOCK_D
                total = tl.load(partials + which + col)
                further = tile.to(tl.int64) + 1
                more = 1
                while more > 0:
                    tiles = further + flight
                    there = tl.load(keys + tiles * TILE, mask=tiles * TILE < count, other=last_key) == key
                    values = tl.load(partials + (tiles * 2 * BLOCK_D)[:, None] + col[None, :], mask=there[:, None], other=0.0)
                    total += tl.sum(values, axis=0)
                    further += FLIGHT
                    more = tl.min(there.to(tl.int32), axis=0)
                one = tl.arange(0, 1)
                at = first + start + one
                apply(
                    total[None, :], one == 0, tl.load(keys + at), places + at, tl.load(bags + at) // batch, meta, rate,
                    epsilon, DTYPE, BLOCK_D, KIND, ALIGN,
                )  # fmt: skip


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
    tile: int = 16,
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
    partials = torch.empty(tiles * 2 * block, dtype=torch.float32, device=grad.device)
    where = keys if places is None else places
    step = partials if rate is None else rate
    shape = {"DTYPE": TYPES[dtype], "BLOCK_D": block, "TILE": tile, "KIND": kind, "ALIGN": aligned}
    sum_rows_kernel[(tiles,)](
        grad, keys, bags, partials if scales is None else scales, where, meta, partials, step, epsilon, factor,
        count, last_key, batch, grad.stride(0), SCALED=scales is not None, num_warps=4, num_stages=1, **shape,
    )  # fmt: skip
    sum_runs_kernel[(tiles,)](
        keys, bags, where, meta, partials, step, epsilon, count, last_key, batch,
        FLIGHT=16, num_warps=4, num_stages=1, **shape,
    )  # fmt: skip
