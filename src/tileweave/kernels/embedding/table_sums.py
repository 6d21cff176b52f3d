"""Sums of pooled vectors' gradients for each table row, applied once: deterministic, no atomics.

    grad [B, slot width]  gradients in columns of this rank's tables
    keys, bags [N]        positions of all bags by table row
    sum of a table row = factor * sum over its positions p, in order:
                         scales[p] * grad[sample of bags[p], its table's columns]

``keys_kernel`` finds the table row and the bag of each position; ``torch.sort`` sorts. Equal keys
then make *runs*, and ``sum_rows_kernel`` has a *tile* for each ``TILE`` positions: it sums the runs
that open there, in order, the last one to its end in the next tile, and applies each sum: as a
gradient's row, or as a step of SGD or of row-wise Adagrad in place. Only a run that goes on after
the next tile leaves partial sums, which ``sum_runs_kernel`` adds in order of tiles. Nothing depends
on timing, so the bits are the same each time, also for a row that is looked up a million times.

One warp has a tile (more above 128 columns): its rows, and the weights that its steps change, are
loaded at once, 16 bytes per thread of fp32, and added from registers; keys and bags are scalars of
the warp.

Limits: sums in fp32. Out-of-range indices sort last and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import faulted, load_epoch, refuse_gone, wait_here
from tileweave.device.triton.signal import PUSHED_US
from tileweave.kernels.embedding.lookup import TYPES
from tileweave.kernels.runtime.launch import limit_registers

if TYPE_CHECKING:
    from tileweave.kernels.embedding.gradient import Push

DENSE, SPARSE, SGD, ADAGRAD = 0, 1, 2, 3
WORDS = tl.constexpr(7)  # of a table in ``meta``
KEYS = 512  # positions whose keys a program finds
STEPS = 4  # tiles of a program
TILE = 8  # positions of a tile
REGISTERS = 128  # a thread: 16 warps a multiprocessor, where the compiler would take 160 and more
GROUP = 32  # tiles in which a program looks for long runs
FLIGHT = 16  # partial sums of a long run that are loaded at once


class Positions(NamedTuple):
    """What is summed, by position in the sorted order, and where sums go.

    keys, bags, scales : [N], see the module's docstring.

    places : [N], with SPARSE the row of the values.

    meta : of tables, see :func:`table_of`.

    partials : fp32 partial sums of long runs, see :func:`sum_tile`.

    rate : fp32, one number: the learning rate of a step.
    """

    keys: Any
    bags: Any
    scales: Any
    places: Any
    meta: Any
    partials: Any = None
    rate: Any = None


class Numbers(NamedTuple):
    """``epsilon`` of Adagrad; how many positions, the key of those that are out of range,
    samples."""

    epsilon: Any
    count: Any
    last_key: Any
    batch: Any


class Source(NamedTuple):
    """Gradients: the slot [B, slot_width], and own rows of ``grad`` [rows_here, width] from sample
    ``first_sample`` on."""

    slot: Any
    slot_width: Any
    grad: Any
    width: Any
    first_sample: Any
    rows_here: Any


class Target(NamedTuple):
    """A table on the device: where its sums go, its keys, columns, state, first row of values."""

    base: Any
    first_key: Any
    end: Any
    dim: Any
    slot_column: Any
    column: Any
    state: Any
    first_row: Any


class Cut(NamedTuple):
    """Decided when the kernel is compiled.

    BLOCK_D : columns that a program sums at once.

    TILE : positions of a tile.

    KIND : DENSE, SPARSE, SGD or ADAGRAD, by its number.

    ALIGN : elements that addresses, columns and dims are multiples of.

    SCALED : whether positions have a factor.

    STEPS : tiles of a program.
    """

    BLOCK_D: int
    TILE: int
    KIND: int
    ALIGN: int
    SCALED: bool = False
    STEPS: int = 1


@triton.jit
def table_of(meta, table, tables, last_key, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The :class:`Target` with number ``table``.

    ``meta`` int64 [T, 7] = (target's address, first key, dim, columns in slot and gradient, state's
    address, row of values).
    """
    word = meta + table * WORDS
    target = tl.load(word).to(tl.pointer_type(DTYPE), bitcast=True)
    dim = tl.load(word + 2).to(tl.int32)
    slot_column = tl.load(word + 3)
    column = tl.load(word + 4)
    if ALIGN > 1:
        target = tl.multiple_of(target, 16)
        dim = tl.multiple_of(dim, ALIGN)
        slot_column = tl.multiple_of(slot_column, ALIGN)
        column = tl.multiple_of(column, ALIGN)
    high = tl.load(word + WORDS + 1, mask=table + 1 < tables, other=last_key)
    state = tl.load(word + 5).to(tl.pointer_type(tl.float32), bitcast=True)
    low, first_row = tl.load(word + 1), tl.load(word + 6)
    return Target(target, low, high, dim, slot_column, column, state, first_row)


@triton.jit
def columns(dim, here, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask [BLOCK_D] of the first ``dim`` columns, or of none."""
    limit = tl.where(here, dim, 0)
    if ALIGN > 1:
        limit = tl.multiple_of(limit, ALIGN)
    return tl.arange(0, BLOCK_D) < limit


@triton.jit
def target_of(target, places, at, row, here, C: tl.constexpr):
    """(row of the target, weights [BLOCK_D], moment) of a run that will be applied; loaded before
    its sum is there."""
    BLOCK_D: tl.constexpr = C.BLOCK_D
    col = tl.arange(0, BLOCK_D)
    if C.KIND == 1:
        row = tl.load(places + at, mask=here, other=0).to(tl.int64) - target.first_row
    mask = columns(target.dim, here & (C.KIND >= 2), C.ALIGN, BLOCK_D)
    weight = tl.load(target.base + row * target.dim + col, mask=mask, other=0.0)
    return row, weight, tl.load(target.state + row, mask=here & (C.KIND == 3), other=0.0)


@triton.jit
def apply(total, found, target, rate, epsilon, here, C: tl.constexpr):
    """Put the finished sum ``total`` [BLOCK_D] where ``found``, from :func:`target_of`, says, by
    KIND, if ``here``."""
    BLOCK_D: tl.constexpr = C.BLOCK_D
    col = tl.arange(0, BLOCK_D)
    mask = columns(target.dim, here, C.ALIGN, BLOCK_D)
    row, weight, moment = found
    value = total
    if C.KIND == 2:
        value = weight.to(tl.float32) - rate * total
    if C.KIND == 3:
        squares = tl.sum(tl.where(mask, total * total, 0.0), axis=0)
        moment += squares / tl.maximum(target.dim, 1).to(tl.float32)
        tl.store(target.state + row, moment, mask=here)
        value = weight.to(tl.float32) - rate * total / (tl.sqrt(moment) + epsilon)
    place = target.base + row * target.dim + col
    tl.store(place, value.to(target.base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "num_bags", "last_key", "steps"])
def keys_kernel(
    indices,
    offsets,
    firsts,
    keys,
    bags,
    count,
    num_bags,
    batch,
    last_key,
    steps,
    BLOCK: tl.constexpr,
):
    """Of each position: the bag that it is in, by bisection, and its table row's key; ``last_key``
    where there is none.

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
    # A difference, since an index may be the largest number that there is.
    here = here & (index >= 0) & (index < tl.load(firsts + table + 1, mask=here, other=0) - first)
    tl.store(
        keys + at, tl.where(here, first + index, last_key).to(keys.dtype.element_ty), mask=inside
    )
    tl.store(bags + at, bag, mask=inside)


@triton.jit
def gradient_at(source, target, positions, at, lowest, here, OWN: tl.constexpr, C: tl.constexpr):
    """fp32 [BLOCK_D]: the gradient's row at position ``at``; its table's first bag is ``lowest``.
    Zeros if not ``here``.

    ``OWN``: rows of this rank's samples are read from ``source.grad``.
    """
    BLOCK_D: tl.constexpr = C.BLOCK_D
    col = tl.arange(0, BLOCK_D)
    sample = (tl.load(positions.bags + at, mask=here, other=0) - lowest).to(tl.int64)
    mask = columns(target.dim, here, C.ALIGN, BLOCK_D)
    place = source.slot + sample * source.slot_width + target.slot_column
    if OWN:
        mine = sample - source.first_sample
        is_own = (mine >= 0) & (mine < source.rows_here)
        own = source.grad + mine * source.width + target.column
        place = tl.where(is_own, own, place)
    row = tl.load(place + col, mask=mask, other=0.0).to(tl.float32)
    if C.SCALED:
        row *= tl.load(positions.scales + at, mask=here, other=0.0)
    return row


@triton.jit
def sum_tile(
    tile,
    tiles,
    seen,
    factor,
    source,
    positions,
    numbers,
    peers,
    tables,
    GROUPS: tl.constexpr,
    ARRIVED: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Sum and apply the runs that open in ``tile``, the last of them to its end in the next tile.

    A run that goes on after the next tile is *long*: each tile leaves a partial sum of it in a row
    of ``partials`` [tiles + tiles / 2, BLOCK_D]: row ``tile`` where it goes on, row ``tiles + tile
    / 2`` where it opens; where one opens, none opens in the next tile.

    ``GROUPS`` > 0: gradients of tables come in that many groups, see ``gradient.py``. ``seen``: how
    many groups this program knows to be here. It waits for a group only if it has to, since an
    acquire empties the L1. Its limit is the longest one: the watcher's waits time out earlier, and
    then the watcher says that the groups are here. Sums of groups that did not come in time, and
    all sums after them, are NaN (``factor``).

    Returns ``seen`` and ``factor`` afterwards.
    """
    TILE: tl.constexpr = C.TILE
    BLOCK_D: tl.constexpr = C.BLOCK_D
    keys, count, last_key = positions.keys, numbers.count, numbers.last_key
    first = tile.to(tl.int64) * TILE
    col = tl.arange(0, BLOCK_D)
    partial = positions.partials + tile.to(tl.int64) * BLOCK_D + col
    opening = positions.partials + (tiles + tile // 2).to(tl.int64) * BLOCK_D + col
    step = tl.load(positions.rate)
    key = ()
    for i in tl.static_range(TILE + 1):
        key = key + (tl.load(keys + first + i, mask=first + i < count, other=last_key),)
    # The run at the tile's begin, if it opened before; and the one at its end, if it opens here and
    # goes on.
    led = tl.load(keys + first - 1, mask=first > 0, other=-1) == key[0]
    led_before = tl.load(keys + first - TILE - 1, mask=led & (first > TILE), other=-1) == key[0]
    led_long = led & (led_before | (key[TILE] == key[0]))
    last = key[TILE - 1]
    goes_on = (key[TILE] == last) & (last < last_key) & ((led == 0) | (last != key[0]))
    there = goes_on & (first + 2 * TILE < count)
    long = goes_on & (tl.load(keys + first + 2 * TILE, mask=there, other=-1) == last)

    # Nearly always all rows of a tile are of one table: what follows from that is worked out once
    # for each table.
    table = tl.load(positions.bags + first) // numbers.batch
    final = tl.load(positions.bags + tl.minimum(first + TILE, count) - 1) // numbers.batch
    final = tl.where(key[0] < last_key, tl.where(last < last_key, final, tables - 1), -1)
    while table <= final:
        if GROUPS > 0:
            group = tl.where(
                table > 0, 1 + (table - 1) * (GROUPS - 1) // tl.maximum(tables - 1, 1), 0
            ).to(tl.int32)
            if group >= seen:
                # the watcher ends first
                wait_here(peers, peers.counters, group + 1, ARRIVED, table, PUSHED_US)
                seen = group + 1
                factor = tl.where(faulted(peers) != 0, float("nan"), factor)
        target = table_of(positions.meta, table, tables, last_key, DTYPE, C.ALIGN)
        low, high = target.first_key, target.end
        lowest = table * numbers.batch
        vectors = ()
        found = ()
        for i in tl.static_range(TILE):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            read = mine & ((others == 0) | led_long)
            at = first + i
            vectors = vectors + (
                gradient_at(source, target, positions, at, lowest, read, GROUPS > 0, C),
            )
            ends = (
                mine & (others == 0) & (key[i] != key[i + 1])
                if i + 1 < TILE
                else mine & (others == 0) & (long == 0)
            )
            found = found + (target_of(target, positions.places, at, key[i] - low, ends, C),)
        total = tl.zeros((BLOCK_D,), tl.float32)
        for i in tl.static_range(TILE):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            if i > 0:
                total = tl.where(key[i] == key[i - 1], total, 0.0)
            total += vectors[i]
            if i + 1 < TILE:
                ends = mine & (key[i] != key[i + 1])
                value = total * factor
                apply(value, found[i], target, step, numbers.epsilon, ends & (others == 0), C)
                goes = ends & others & led_long
                tl.store(partial, total * factor, mask=columns(BLOCK_D, goes, 1, BLOCK_D))
        mine = (last >= low) & (last < high)
        others = led & (last == key[0])
        at = first + TILE
        more = mine & goes_on & (long == 0)
        while more:
            for i in tl.static_range(4):
                more = tl.load(keys + at + i, mask=at + i < count, other=last_key) == last
                total += gradient_at(source, target, positions, at + i, lowest, more, GROUPS > 0, C)
            at += 4
        ends = mine & (others == 0) & (long == 0)
        apply(total * factor, found[TILE - 1], target, step, numbers.epsilon, ends, C)
        goes = mine & others & led_long
        tl.store(partial, total * factor, mask=columns(BLOCK_D, goes, 1, BLOCK_D))
        tl.store(opening, total * factor, mask=columns(BLOCK_D, mine & long, 1, BLOCK_D))
        table += 1
    return seen, factor


@triton.jit
def sum_tiles(
    block,
    tiles,
    factor,
    source,
    positions,
    numbers,
    peers,
    tables,
    GROUPS: tl.constexpr,
    ARRIVED: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """``STEPS`` tiles one after the other: all but the first find their keys, bags and table in the
    L1."""
    seen = tl.cast(0, tl.int32)
    for step in range(0, C.STEPS):
        tile = block * C.STEPS + step
        if tile < tiles:
            seen, factor = sum_tile(
                tile,
                tiles,
                seen,
                factor,
                source,
                positions,
                numbers,
                peers,
                tables,
                GROUPS,
                ARRIVED,
                DTYPE,
                C,
            )


@triton.jit(do_not_specialize=["factor", "tables", "tiles"])
def sum_rows_kernel(
    slot,
    slot_width,
    positions,
    numbers,
    factor,
    tables,
    tiles,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """A program for ``STEPS`` tiles, of a gradient that is there."""
    source = Source(slot, slot_width, slot, 0, 0, 0)
    block = tl.program_id(0)
    sum_tiles(block, tiles, factor, source, positions, numbers, positions, tables, 0, 0, DTYPE, C)


@triton.jit(do_not_specialize=["rank", "tables", "tiles"])
def sum_runs_kernel(
    positions,
    numbers,
    arrived,
    peers,
    rank,
    tables,
    tiles,
    COPIED: tl.constexpr,
    FLIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Add the partial sums of the long runs that open in GROUP tiles, in order of tiles, and apply
    them.

    arrived : after a push, the counter for which the sums waited; it is set to zero.

    COPIED : 0, or the number of ranks if copy engines brought what was summed, in the call before
        that of the epoch.
    """
    TILE: tl.constexpr = C.TILE
    BLOCK_D: tl.constexpr = C.BLOCK_D
    keys, count, last_key = positions.keys, numbers.count, numbers.last_key
    if arrived is not None:
        if tl.program_id(0) == 0:
            tl.store(arrived, 0)
            if COPIED > 0:
                refuse_gone(peers, rank, load_epoch(peers) - 1, COPIED)
    lane = tl.arange(0, GROUP)
    end = (tl.program_id(0).to(tl.int64) * GROUP + lane + 1) * TILE
    there = end + TILE < count
    opening = tl.load(keys + end - 1, mask=there, other=last_key)
    far = tl.load(keys + end + TILE, mask=there, other=last_key)
    before = tl.load(keys + end - TILE - 1, mask=there & (end > TILE), other=-1)
    pending = (there & (opening < last_key) & (far == opening) & (before != opening)).to(tl.int32)
    col = tl.arange(0, BLOCK_D)
    flight = tl.arange(0, FLIGHT)
    while tl.max(pending, axis=0) > 0:
        chosen = tl.min(tl.where(pending > 0, lane, GROUP), axis=0)
        pending = tl.where(lane == chosen, 0, pending)
        tile = tl.program_id(0).to(tl.int64) * GROUP + chosen
        at = tile * TILE + TILE - 1
        key = tl.load(keys + at)
        table = tl.load(positions.bags + at) // numbers.batch
        target = table_of(positions.meta, table, tables, last_key, DTYPE, C.ALIGN)
        found = target_of(target, positions.places, at, key - target.first_key, key < last_key, C)
        total = tl.load(positions.partials + (tiles + tile // 2) * BLOCK_D + col)
        further = tile + 1
        more = 1
        while more > 0:
            those = further + flight
            goes = tl.load(keys + those * TILE, mask=those * TILE < count, other=last_key) == key
            place = positions.partials + (those * BLOCK_D)[:, None] + col[None, :]
            rows = tl.load(place, mask=goes[:, None], other=0.0)
            total += tl.sum(rows, axis=0)
            further += FLIGHT
            more = tl.min(goes.to(tl.int32), axis=0)
        # every warp has read the moment and its copy of the weights before one of them writes
        tl.debug_barrier()
        rate = tl.load(positions.rate)
        apply(total, found, target, rate, numbers.epsilon, key < last_key, C)


def find_keys(
    indices: torch.Tensor, offsets: torch.Tensor, firsts: torch.Tensor, last_key: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, bags int32) by position; see :func:`keys_kernel`. Keys are int32 where they fit: half
    of what a sort moves."""
    count, num_bags = indices.numel(), offsets.numel() - 1
    keys = torch.empty(
        count, dtype=torch.int32 if last_key < 1 << 31 else torch.int64, device=indices.device
    )
    bags = torch.empty(count, dtype=torch.int32, device=indices.device)
    if count:
        keys_kernel[(triton.cdiv(count, KEYS),)](
            indices,
            offsets,
            firsts,
            keys,
            bags,
            count,
            num_bags,
            batch,
            last_key,
            num_bags.bit_length(),
            BLOCK=KEYS,
            num_warps=4,
        )
    return keys, bags


def sum_rows(
    grad: torch.Tensor,
    positions: Positions,
    numbers: Numbers,
    factor: float,
    dtype: torch.dtype,
    widest: int,
    kind: int,
    aligned: int,
    tile: int = TILE,
    steps: int = STEPS,
    push: Push | None = None,
) -> None:
    """Launch both kernels on the current stream. ``push``: what brings ``grad``, its slot; launched
    with the sums.

    grad : [B, slot width], the result's gradient in columns of this rank's tables.
    positions : by table row. Scales, places and rate may be None; partial sums are made here.
    factor : of all sums.
    tile : positions of a tile. steps : tiles of a program. Both as measured (decision 0033).
    aligned : elements that all addresses, dims and columns are multiples of (16 bytes), else 1.
    """
    if not numbers.count:
        if push is not None:
            push.launch()
        return
    block, tiles = triton.next_power_of_2(max(widest, 1)), triton.cdiv(numbers.count, tile)
    partials = torch.empty(
        (tiles + (tiles + 1) // 2) * block, dtype=torch.float32, device=grad.device
    )
    keys, _, scales, places, meta, _, rate = positions
    positions = positions._replace(
        scales=partials if scales is None else scales,
        places=keys if places is None else places,
        partials=partials,
        rate=partials if rate is None else rate,
    )
    warps = min(max(block // 128, 1), 8)
    cut = Cut(block, tile, kind, aligned, scales is not None, steps)
    sums = (positions, numbers, factor, meta.shape[0], tiles)
    options = {
        "DTYPE": TYPES[dtype],
        "C": cut,
        "num_warps": warps,
        "num_stages": 1,
        **limit_registers(REGISTERS),
    }
    programs = triton.cdiv(tiles, steps)
    if push is None:
        sum_rows_kernel[(programs,)](grad, grad.stride(0), *sums, **options)
    else:
        push.launch(programs, (grad, grad.stride(0), *sums), **options)
    sum_runs_kernel[(triton.cdiv(tiles, GROUP),)](
        positions,
        numbers,
        None if push is None else push.arrived(),
        None if push is None else push.peers,
        0 if push is None else push.rank,
        meta.shape[0],
        tiles,
        COPIED=0 if push is None or push.concurrently is None else push.world_size,
        FLIGHT=FLIGHT,
        GROUP=GROUP,
        DTYPE=TYPES[dtype],
        C=cut,
        num_warps=4,
        num_stages=1,
    )
