"""Sums of pooled vectors' gradients for each table row, applied once: deterministic, with no atomics.

    grad [B, slot width]   gradients in columns of this rank's tables        keys, bags [N]   positions of all bags by table row
    sum of a table row = factor * sum over its positions p, in order: scales[p] * grad[sample of bags[p], its table's columns]

``keys_kernel`` finds the table row and the bag of each position; ``torch.sort`` sorts. Equal keys then make *runs*, and
``sum_rows`` has a *tile* for each ``TILE`` positions: it sums the runs that open there, in order, the last one to its end in
the next tile, and applies each sum: as a gradient's row, or as a step of SGD or of row-wise Adagrad in place. Only a run
that goes on behind the next tile leaves partial sums, which ``sum_runs`` adds in order of tiles. Nothing depends on timing, so
the same bits each time, also for a row that is looked up a million times.

One warp has a tile (more above 128 columns): its rows, and the weights that its steps change, are loaded at once, 16 bytes a
thread of fp32, and added from registers; keys and bags are scalars of the warp.

Limits: sums in fp32. Out-of-range indices sort last and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tileweave.device.triton.meet import refuse_gone
from tileweave.device.triton.signal import PUSHED_US, faulted, load_epoch, wait_here
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


@triton.jit
def table_of(meta, table, tables, last_key, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """(target, first key, end of keys, dim, column in the slot, in the gradient, state, row of values) of a table.

    ``meta`` int64 [T, 7] = (target's address, first key, dim, columns in slot and gradient, state's address, row of values).
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
    return target, tl.load(word + 1), high, dim, slot_column, column, state, tl.load(word + 6)


@triton.jit
def columns(dim, here, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask [BLOCK_D] of the first ``dim`` columns, or of none."""
    limit = tl.where(here, dim, 0)
    if ALIGN > 1:
        limit = tl.multiple_of(limit, ALIGN)
    return tl.arange(0, BLOCK_D) < limit


@triton.jit
def target_of(
    target,
    state,
    places,
    at,
    row,
    values,
    dim,
    here,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """(row of the target, weights [BLOCK_D], moment) of a run that will be applied; asked for before its sum is there.

    ``KIND``: DENSE, SPARSE, SGD or ADAGRAD, here and below by its number.
    """
    col = tl.arange(0, BLOCK_D)
    if KIND == 1:
        row = tl.load(places + at, mask=here, other=0).to(tl.int64) - values
    weight = tl.load(
        target + row * dim + col, mask=columns(dim, here & (KIND >= 2), ALIGN, BLOCK_D), other=0.0
    )
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
        moment += tl.sum(tl.where(mask, total * total, 0.0), axis=0) / tl.maximum(dim, 1).to(
            tl.float32
        )
        tl.store(state + row, moment, mask=here)
        value = weight.to(tl.float32) - rate * total / (tl.sqrt(moment) + epsilon)
    tl.store(target + row * dim + col, value.to(target.dtype.element_ty), mask=mask)


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
    # A difference, since an index may be the largest number that there is.
    here = here & (index >= 0) & (index < tl.load(firsts + table + 1, mask=here, other=0) - first)
    tl.store(
        keys + at, tl.where(here, first + index, last_key).to(keys.dtype.element_ty), mask=inside
    )
    tl.store(bags + at, bag, mask=inside)


@triton.jit
def gradient_at(
    slot, slot_width, slot_column, grad, width, column, first_sample, rows_here, bags, scales, at, lowest, dim, here,
    BLOCK_D: tl.constexpr, SCALED: tl.constexpr, ALIGN: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_D]: the gradient's row at position ``at``; its table's first bag is ``lowest``. Zeros if not ``here``.

    ``OWN``: rows of this rank's samples, [first_sample, first_sample + rows_here), are read where they were made.
    """
    col = tl.arange(0, BLOCK_D)
    sample = (tl.load(bags + at, mask=here, other=0) - lowest).to(tl.int64)
    mask = columns(dim, here, ALIGN, BLOCK_D)
    place = slot + sample * slot_width + slot_column
    if OWN:
        mine = sample - first_sample
        place = tl.where((mine >= 0) & (mine < rows_here), grad + mine * width + column, place)
    row = tl.load(place + col, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        row *= tl.load(scales + at, mask=here, other=0.0)
    return row


@triton.jit
def sum_tile(
    tile, tiles, seen, slot, slot_width, grad, width, first_sample, rows_here, keys, bags, scales, places, meta, partials, rate,
    epsilon, factor, counters, control, report, count, last_key, batch, tables, GROUPS: tl.constexpr, ARRIVED: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Sum and apply the runs that open in ``tile``, the last of them to its end in the next tile.

    A run that goes on behind the next tile is *long*: of it each tile leaves a partial sum in a row of ``partials``
    [tiles + tiles / 2, BLOCK_D]: row ``tile`` where it goes on, row ``tiles + tile / 2`` where it opens; where one opens, none
    opens in the next tile. ``GROUPS`` > 0: tables' gradients come in so many, see ``gradient.py``; ``seen`` of them
    this program knows to be here, and returns how many then. It asks no more than it must: an acquire empties the L1. Its
    limit is the longest: the watcher's waits run out before, and it says that groups are here all the same. Sums
    of groups that did not come in time are NaN, and of all behind them: ``factor``, which is returned, too.
    """
    first = tile.to(tl.int64) * TILE
    col = tl.arange(0, BLOCK_D)
    partial = partials + tile.to(tl.int64) * BLOCK_D + col
    opening = partials + (tiles + tile // 2).to(tl.int64) * BLOCK_D + col
    step = tl.load(rate)
    key = ()
    for i in tl.static_range(TILE + 1):
        key = key + (tl.load(keys + first + i, mask=first + i < count, other=last_key),)
    # The run at the tile's begin, if it opened before; and the one at its end, if it opens here and goes on.
    led = tl.load(keys + first - 1, mask=first > 0, other=-1) == key[0]
    led_before = tl.load(keys + first - TILE - 1, mask=led & (first > TILE), other=-1) == key[0]
    led_long = led & (led_before | (key[TILE] == key[0]))
    last = key[TILE - 1]
    goes_on = (key[TILE] == last) & (last < last_key) & ((led == 0) | (last != key[0]))
    long = goes_on & (
        tl.load(keys + first + 2 * TILE, mask=goes_on & (first + 2 * TILE < count), other=-1)
        == last
    )

    # Nearly always all rows of a tile are of one table: what follows from that is worked out once for each table.
    table = tl.load(bags + first) // batch
    final = tl.load(bags + tl.minimum(first + TILE, count) - 1) // batch
    final = tl.where(key[0] < last_key, tl.where(last < last_key, final, tables - 1), -1)
    while table <= final:
        if GROUPS > 0:
            group = tl.where(
                table > 0, 1 + (table - 1) * (GROUPS - 1) // tl.maximum(tables - 1, 1), 0
            ).to(tl.int32)
            if group >= seen:
                wait_here(
                    counters, group + 1, ARRIVED, table, control, report, PUSHED_US
                )  # the watcher ends first
                seen = group + 1
                factor = tl.where(faulted(control) != 0, float("nan"), factor)
        target, low, high, dim, slot_column, column, state, values = table_of(
            meta, table, tables, last_key, DTYPE, ALIGN
        )
        lowest = table * batch
        vectors = ()
        found = ()
        for i in tl.static_range(TILE):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            read = mine & ((others == 0) | led_long)
            vectors = vectors + (
                gradient_at(
                    slot, slot_width, slot_column, grad, width, column, first_sample, rows_here, bags, scales, first + i,
                    lowest, dim, read, BLOCK_D, SCALED, ALIGN, GROUPS > 0,
                ),
            )  # fmt: skip
            ends = (
                mine & (others == 0) & (key[i] != key[i + 1])
                if i + 1 < TILE
                else mine & (others == 0) & (long == 0)
            )
            found = found + (
                target_of(
                    target,
                    state,
                    places,
                    first + i,
                    key[i] - low,
                    values,
                    dim,
                    ends,
                    BLOCK_D,
                    KIND,
                    ALIGN,
                ),
            )
        total = tl.zeros((BLOCK_D,), tl.float32)
        for i in tl.static_range(TILE):
            mine = (key[i] >= low) & (key[i] < high)
            others = led & (key[i] == key[0])
            if i > 0:
                total = tl.where(key[i] == key[i - 1], total, 0.0)
            total += vectors[i]
            if i + 1 < TILE:
                ends = mine & (key[i] != key[i + 1])
                apply(
                    total * factor,
                    found[i],
                    target,
                    state,
                    dim,
                    step,
                    epsilon,
                    ends & (others == 0),
                    BLOCK_D,
                    KIND,
                    ALIGN,
                )
                tl.store(
                    partial,
                    total * factor,
                    mask=columns(BLOCK_D, ends & others & led_long, 1, BLOCK_D),
                )
        mine = (last >= low) & (last < high)
        others = led & (last == key[0])
        at = first + TILE
        more = mine & goes_on & (long == 0)
        while more:
            for i in tl.static_range(4):
                more = tl.load(keys + at + i, mask=at + i < count, other=last_key) == last
                total += gradient_at(
                    slot, slot_width, slot_column, grad, width, column, first_sample, rows_here, bags, scales, at + i, lowest,
                    dim, more, BLOCK_D, SCALED, ALIGN, GROUPS > 0,
                )  # fmt: skip
            at += 4
        ends = mine & (others == 0) & (long == 0)
        apply(
            total * factor,
            found[TILE - 1],
            target,
            state,
            dim,
            step,
            epsilon,
            ends,
            BLOCK_D,
            KIND,
            ALIGN,
        )
        tl.store(
            partial, total * factor, mask=columns(BLOCK_D, mine & others & led_long, 1, BLOCK_D)
        )
        tl.store(opening, total * factor, mask=columns(BLOCK_D, mine & long, 1, BLOCK_D))
        table += 1
    return seen, factor


@triton.jit
def sum_tiles(
    block, tiles, slot, slot_width, grad, width, first_sample, rows_here, keys, bags, scales, places, meta, partials, rate,
    epsilon, factor, counters, control, report, count, last_key, batch, tables,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, ARRIVED: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """``STEPS`` tiles one after the other: all but the first find their keys, bags and table in the L1."""
    seen = tl.cast(0, tl.int32)
    for step in range(0, STEPS):
        tile = block * STEPS + step
        if tile < tiles:
            seen, factor = sum_tile(
                tile, tiles, seen, slot, slot_width, grad, width, first_sample, rows_here, keys, bags, scales, places, meta,
                partials, rate, epsilon, factor, counters, control, report, count, last_key, batch, tables,
                GROUPS, ARRIVED, DTYPE, BLOCK_D, TILE, KIND, SCALED, ALIGN,
            )  # fmt: skip


@triton.jit(do_not_specialize=["factor", "tables", "tiles"])
def sum_rows_kernel(
    slot, slot_width, keys, bags, scales, places, meta, partials, rate, epsilon, factor, count, last_key, batch, tables, tiles,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A program for ``STEPS`` tiles, of a gradient that is there."""
    sum_tiles(
        tl.program_id(0), tiles, slot, slot_width, slot, 0, 0, 0, keys, bags, scales, places, meta, partials, rate, epsilon,
        factor, keys, keys, keys, count, last_key, batch, tables, STEPS, 0, 0, DTYPE, BLOCK_D, TILE, KIND, SCALED, ALIGN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "tables", "tiles"])
def sum_runs_kernel(
    keys, bags, places, meta, partials, rate, epsilon, arrived, signals, control, report, rank, count, last_key, batch, tables,
    tiles, CLEAR: tl.constexpr, COPIED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, FLIGHT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The long runs that open in GROUP tiles, one after the other: their partial sums in order of tiles, and apply.

    ``CLEAR``: set the counter ``arrived`` of a push to zero, on which the sums before waited. ``COPIED``: of so many ranks,
    copy engines brought what was summed in the call before the epoch's.
    """
    if CLEAR:
        if tl.program_id(0) == 0:
            tl.store(arrived, 0)
            if COPIED > 0:
                refuse_gone(signals, rank, load_epoch(control) - 1, control, report, COPIED)
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
        table = tl.load(bags + at) // batch
        target, low, _, dim, _, _, state, values = table_of(
            meta, table, tables, last_key, DTYPE, ALIGN
        )
        found = target_of(
            target, state, places, at, key - low, values, dim, key < last_key, BLOCK_D, KIND, ALIGN
        )
        total = tl.load(partials + (tiles + tile // 2) * BLOCK_D + col)
        further = tile + 1
        more = 1
        while more > 0:
            those = further + flight
            goes = tl.load(keys + those * TILE, mask=those * TILE < count, other=last_key) == key
            rows = tl.load(
                partials + (those * BLOCK_D)[:, None] + col[None, :], mask=goes[:, None], other=0.0
            )
            total += tl.sum(rows, axis=0)
            further += FLIGHT
            more = tl.min(goes.to(tl.int32), axis=0)
        tl.debug_barrier()  # every warp has read the moment and its copy of the weights before one of them writes
        apply(
            total,
            found,
            target,
            state,
            dim,
            tl.load(rate),
            epsilon,
            key < last_key,
            BLOCK_D,
            KIND,
            ALIGN,
        )


def find_keys(
    indices: torch.Tensor, offsets: torch.Tensor, firsts: torch.Tensor, last_key: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, bags int32) by position; see :func:`keys_kernel`. Keys of int32 where they fit: half of what a sort moves."""
    count, num_bags = indices.numel(), offsets.numel() - 1
    keys = torch.empty(
        count, dtype=torch.int32 if last_key < 1 << 31 else torch.int64, device=indices.device
    )
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
    tile: int = TILE,
    steps: int = STEPS,
    push: Push | None = None,
) -> None:
    """Launch both kernels on the current stream. ``push``: what brings ``grad``, its slot; launched with the sums.

    grad : [B, slot width], the result's gradient in columns of this rank's tables.
    keys, bags (int32), scales : [N], by table row: its number over all tables (``last_key``: out of range), the bag, a
        factor of its own. factor : of all sums.
    places : [N], with SPARSE the row of the values; else None. meta : see :func:`table_of`. rate : a word on the device.
    tile : positions of a tile. steps : tiles of a program. Both as measured (decision 0032).
    aligned : elements that all addresses, dims and columns are multiples of (16 bytes), else 1.
    """
    count = keys.numel()
    if not count:
        if push is not None:
            push.launch()
        return
    block, tiles = triton.next_power_of_2(max(widest, 1)), triton.cdiv(count, tile)
    partials = torch.empty(
        (tiles + (tiles + 1) // 2) * block, dtype=torch.float32, device=grad.device
    )
    where = keys if places is None else places
    step = partials if rate is None else rate
    warps = min(max(block // 128, 1), 8)
    shape = {
        "DTYPE": TYPES[dtype],
        "BLOCK_D": block,
        "TILE": tile,
        "KIND": kind,
        "ALIGN": aligned,
        "num_stages": 1,
    }
    sums = (
        grad, grad.stride(0), keys, bags, partials if scales is None else scales, where, meta, partials, step, epsilon, factor,
        count, last_key, batch, meta.shape[0], tiles,
    )  # fmt: skip
    options = {
        "SCALED": scales is not None,
        "STEPS": steps,
        "num_warps": warps,
        **limit_registers(REGISTERS),
        **shape,
    }
    programs = triton.cdiv(tiles, steps)
    if push is None:
        sum_rows_kernel[(programs,)](*sums, **options)
    else:
        push.launch(programs, sums, **options)
    words, rank, copied = (keys,) * 4, 0, 0
    if push is not None:
        words, rank = (
            (push.arrived(), push.peers.signals, push.peers.control, push.peers.report),
            push.rank,
        )
        copied = push.world_size if push.beside is not None else 0
    sum_runs_kernel[(triton.cdiv(tiles, GROUP),)](
        keys, bags, where, meta, partials, step, epsilon, *words, rank, count, last_key, batch, meta.shape[0], tiles,
        CLEAR=push is not None, COPIED=copied, FLIGHT=16, GROUP=GROUP, num_warps=4, **shape,
    )  # fmt: skip
