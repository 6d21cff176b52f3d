"""The device words in Gluon for Hopper, and the warp-specialised main loop. The one file that follows Gluon's drift.

A kernel here has partitions, each a set of warps with its own program: *load* (one warp: waits for signals, feeds TMA),
*multiply* (one or two warpgroups: wgmma, epilogue) and, where there is something to move, *move* (two warps: pushes, copies).
Load and multiply share a ring of ``STAGES`` buffers; ``ready[i]`` tells that buffer i is full, ``empty[i]`` that it was read.

The integer maps are those of ``language/tile.py``, compiled as Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tileweave.language import tile as _tile
from tileweave.language.signal import EXPIRE, FAULT, LATE, LEAVERS, NUM_TABLES, TABLE_RANK, TABLE_RANKS, TABLES, TIMEOUT_US

place, place_out, segment, cut, unit_count, unit_range, part_range = (gluon.jit(source) for source in _tile.SOURCES)

# Names that changed between Triton 3.6 and 3.9.
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
block_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def clock(anything):
    """Nanoseconds, ``%globaltimer``. ``anything``: an int32 scalar, since this assembly needs an operand."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [anything], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def drain_tma_stores(anything):
    """Wait until this thread's TMA stores are visible, not only read; see ``signal.drain_tma_stores``."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [anything], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_in(counter):
    """Count this partition's stores in, drained before; see ``signal.count_in``."""
    block_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="sys")


@gluon.jit
def count_last(counter, total):
    """Count this partition's stores in, drained before; whether all are in now: see ``signal.count_last``."""
    block_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == total - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def symm_at(table, peer, dtype: gl.constexpr):
    """Pointer to ``dtype`` at the start of ``peer``'s symmetric buffer; see ``remote.symm_at``."""
    return gl.load(table + peer).to(gl.pointer_type(dtype), bitcast=True)


@gluon.jit
def notify(signal, epoch):
    """Store ``epoch`` in ``signal`` behind this partition's plain stores; see ``signal.notify``."""
    block_barrier()
    gl.atomic_xchg(signal, epoch, sem="release", scope="sys")


@gluon.jit
def notify_all(signal_table, offset, rank, epoch, WORLD_SIZE: gl.constexpr, OWN: gl.constexpr, WARPS: gl.constexpr):
    """:func:`notify` every peer at ``offset`` of its signals, one lane a peer: one fence in time, not R - 1."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    count: gl.constexpr = WORLD_SIZE if OWN else WORLD_SIZE - 1
    index = gl.arange(0, 32, layout=lane)
    table = gl.load(signal_table + (rank + (0 if OWN else 1) + index) % WORLD_SIZE)
    signals = table.to(gl.pointer_type(gl.int32), bitcast=True) + offset
    block_barrier()
    gl.atomic_xchg(signals, index * 0 + epoch, mask=index < count, sem="release", scope="sys")


@gluon.jit
def expire(control, report, signal, unit, expected, seen):
    """Each thread by itself, without a barrier; see ``signal.expire``."""
    gl.inline_asm_elementwise(
        EXPIRE, "=r,l,l,r,r,r,r", [control + FAULT, report, expected * 0 + signal, expected * 0 + unit, expected, seen],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def words_of(first, last, stride, COUNT: gl.constexpr, SPREAD: gl.constexpr, WARPS: gl.constexpr):
    """Where the signals stand that :func:`spin` polls, some of them twice."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    WORDS: gl.constexpr = SPREAD * COUNT if SPREAD * COUNT > 32 else 32
    number = gl.arange(0, WORDS, layout=lane)
    return gl.minimum(first + number // COUNT, last) * stride + number % COUNT


@gluon.jit
def _lag(seen, epoch, EXACT: gl.constexpr):
    """Below zero where a wait must go on; see ``signal._lag``."""
    return gl.minimum(seen - epoch, epoch - seen) if EXACT else seen - epoch


@gluon.jit
def are_there(
    signals, first, last, stride, epoch, COUNT: gl.constexpr, SPREAD: gl.constexpr, WARPS: gl.constexpr, EXACT: gl.constexpr
):  # fmt: skip
    """Whether :func:`spin` would return at once; in front of work that only a wait leaves time for."""
    index = words_of(first, last, stride, COUNT, SPREAD, WARPS)
    return gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0) >= 0


@gluon.jit
def spin(
    signals, first, last, stride, epoch, unit, control, report, COUNT: gl.constexpr, SPREAD: gl.constexpr, WARPS: gl.constexpr,
    LIMIT: gl.constexpr = TIMEOUT_US, EXACT: gl.constexpr = False,
):  # fmt: skip
    """Poll until all of ``signals[s * stride : s * stride + COUNT]`` for s in [first, last] have reached ``epoch``.

    All words are polled at once, ``SPREAD`` * ``COUNT`` of them (powers of two, ``SPREAD`` > last - first). It orders
    nothing yet: after it, :func:`acquire`. ``EXACT``: data of a later call will not do; see ``signal.wait``.
    """
    index = words_of(first, last, stride, COUNT, SPREAD, WARPS)
    lag = gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0)
    if lag < 0:
        limit = gl.load(control + LIMIT, volatile=True).to(gl.int64) * 1000
        started = clock(lag)
        while (lag < 0) & (clock(lag) - started <= limit):
            limit = gl.load(control + LIMIT, volatile=True).to(gl.int64) * 1000  # a fault ends waits that have begun, too
            lag = gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0)
        if lag < 0:
            seen = gl.load(signals + index, volatile=True)
            lags = _lag(seen, epoch, EXACT)
            late = gl.min(gl.where(lags == gl.min(lags, axis=0), index, 0x7FFFFFFF), axis=0)
            expire(control, report, late, unit, epoch, gl.max(gl.where(index == late, seen, -0x80000000), axis=0))


@gluon.jit
def acquire(epoch):
    """Behind :func:`spin`: later loads, TMA's too, see what was stored before the signals seen.

    Both fences are the narrow ones. ``fence.acq_rel`` and ``fence.proxy.async`` without a state space wait for all that the
    multiprocessor has under way: 3 us in front of a tile, 7 beside pushes (decision 0089).
    """
    gl.inline_asm_elementwise(
        "fence.acquire.sys; fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [epoch], dtype=gl.int32, is_pure=False, pack=1
    )
    block_barrier()


@gluon.jit
def wait(
    signals, first, epoch, unit, control, report, COUNT: gl.constexpr, WARPS: gl.constexpr, EXACT: gl.constexpr = False
):  # fmt: skip
    """:func:`spin` on ``signals[first : first + COUNT]``, then :func:`acquire`; see ``signal.wait``."""
    spin(signals, first, first, 1, epoch, unit, control, report, COUNT, 1, WARPS, EXACT=EXACT)
    acquire(epoch)


@gluon.jit
def leave(control, epoch, num_partitions):
    """End of a partition that has read the epoch; the last one of the grid advances it; see ``signal.leave``."""
    fault = gl.load(control + FAULT, volatile=True)
    block_barrier()
    left = gl.atomic_add(control + LEAVERS, 1, sem="acq_rel", scope="gpu")
    if left % LATE == num_partitions - 1:
        if fault + left // LATE != 0:  # as ``signal.advance``
            ranks, rank = gl.load(control + TABLE_RANKS), gl.load(control + TABLE_RANK)
            for i in gl.static_range(NUM_TABLES):
                table = (control + TABLES + 2 * i).to(gl.pointer_type(gl.int64), bitcast=True)
                table = gl.load(table).to(gl.pointer_type(gl.int64), bitcast=True)
                for peer in range(0, ranks):
                    gl.store(table + peer, gl.load(table + rank))
        gl.store(control + LEAVERS, 0)
        gl.store(control, epoch + 1)


@gluon.jit
def stamp(trace, row, column, epoch, TRACE: gl.constexpr):
    """Write the time into ``trace[row, column]``; see ``language/trace.py``."""
    if TRACE:
        gl.store(trace + row * 4 + column, clock(epoch))


@gluon.jit
def label(trace, row, value, TRACE: gl.constexpr):
    if TRACE:
        gl.store(trace + row * 4 + 3, value.to(gl.int64))


@gluon.jit
def make_ring(
    a_desc, b_desc, TILE_M: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr = 1
):  # fmt: skip
    """Shared memory of the ring: (a buffers, b buffers, empty, ready). ``ARRIVALS``: how often a buffer is said to be full."""
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_M, TILE_K], a_desc.dtype)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, TILE_M, TILE_K], a_layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=ARRIVALS)
    return a_ring, b_ring, empty, ready


@gluon.jit
def load_weight(desc, col, k, bar, buffer, DEPTH_FIRST: gl.constexpr):
    """Ask TMA for a K block of b from column ``col`` on; ``desc`` is of [N, K], or of [K, N] where ``DEPTH_FIRST``."""
    if DEPTH_FIRST:
        load_async(desc, [k, col], bar, buffer)
    else:
        load_async(desc, [col, k], bar, buffer)


@gluon.jit
def load_expert(desc, expert, cols, depth, col, k, bar, buffer, DEPTH_FIRST: gl.constexpr):
    """:func:`load_weight` from the weight of ``expert``: experts stand one behind the other in ``desc``."""
    if DEPTH_FIRST:
        load_weight(desc, col, expert * depth + k, bar, buffer, DEPTH_FIRST)
    else:
        load_weight(desc, expert * cols + col, k, bar, buffer, DEPTH_FIRST)


@gluon.jit
def load_slot(slot0_desc, slot1_desc, slot, row, col, bar, buffer):
    """Ask TMA for a block of the slot that is used: there is a descriptor of each, and no choice between descriptors."""
    if slot == 0:
        load_async(slot0_desc, [row, col], bar, buffer)
    else:
        load_async(slot1_desc, [row, col], bar, buffer)


@gluon.jit
def depth_by_cols(buffer, DEPTH_FIRST: gl.constexpr):
    """A buffer of b as wgmma takes it, [TILE_K, TILE_N]."""
    if DEPTH_FIRST:
        return buffer
    else:
        return buffer.permute((1, 0))


@gluon.jit
def multiply_tile(
    turn, num_blocks, a_ring, b_ring, empty, ready, control,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, GATHERED: gl.constexpr = False,
    DEPTH_FIRST: gl.constexpr = False, LATE: gl.constexpr = False,
):  # fmt: skip
    """Multiply ``num_blocks`` >= 1 K blocks from the ring. Returns (fp32 tile, turn, fault).

    ``GATHERED``: rows of a came by ``cp.async``, through the generic proxy, so wgmma reads them behind a proxy fence.
    ``DEPTH_FIRST``: buffers of b are [TILE_K, TILE_N] and not [TILE_N, TILE_K].

    One wgmma stays in flight: buffer i is released when block i+1 is under way. ``fault`` is read behind the first full
    buffer, so it is set if this tile's wait ran out of time, and the load costs nothing. ``LATE``: behind the last one, since
    *load* waits in front of later blocks, too.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE_N, 16])
    zero = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
    index = turn % STAGES
    mbarrier.wait(ready.index(index), (turn // STAGES) & 1)
    if GATHERED:
        fence_async_shared()
    fault = gl.load(control + FAULT, volatile=True)
    acc = warpgroup_mma(
        a_ring.index(index), depth_by_cols(b_ring.index(index), DEPTH_FIRST), zero, use_acc=False, is_async=True
    )
    turn += 1
    for _ in range(1, num_blocks):
        index = turn % STAGES
        mbarrier.wait(ready.index(index), (turn // STAGES) & 1)
        if GATHERED:
            fence_async_shared()
        acc = warpgroup_mma(a_ring.index(index), depth_by_cols(b_ring.index(index), DEPTH_FIRST), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
        turn += 1
    if LATE:
        fault = gl.load(control + FAULT, volatile=True)
    tile = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
    return tile, turn, fault


@gluon.jit
def finish(tile, fault, bias, col, cols, HAS_BIAS: gl.constexpr):
    """Epilogue on registers: bias in fp32, NaN where a wait ran out of time. ``col``: first column of ``tile``."""
    if HAS_BIAS:
        column: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
        index = col + gl.arange(0, tile.shape[1], layout=column)
        tile += gl.load(bias + index, mask=index < cols, other=0.0).to(gl.float32)[None, :]
    return gl.where(fault != 0, float("nan"), tile)


@gluon.jit
def store_masked(tile, out, row, row_limit, col, cols):
    """Plain stores of the rows and columns that exist: ragged tiles, and pitches that TMA cannot have."""
    rows: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    r = row + gl.arange(0, tile.shape[0], layout=rows)
    c = col + gl.arange(0, tile.shape[1], layout=columns)
    mask = (r < row_limit)[:, None] & (c < cols)[None, :]
    pointers = out + r.to(gl.int64)[:, None] * cols + c[None, :]
    gl.store(pointers, tile.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def store_tma(tile, desc, buffer, row, col):
    """Store through shared memory by TMA; returns while the store is under way. Before a signal, drain it fully."""
    tma.store_wait(0)
    buffer.store(tile.to(desc.dtype))
    fence_async_shared()
    store_async(desc, [row, col], buffer)


@gluon.jit
def part_offsets(tile, first_col, TILE_N: gl.constexpr):
    """Where a tile's elements stand in ``partials``: 8 x 8 blocks, since a warp holds those, so that a warp's access is
    256 contiguous bytes. ``tile``: [TILE_M, any width] whose first column is ``first_col`` of the whole."""
    rows: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    r = gl.arange(0, tile.shape[0], layout=rows)
    c = first_col + gl.arange(0, tile.shape[1], layout=columns)
    return (r // 8 * (8 * TILE_N) + r % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[None, :]


@gluon.jit
def give_part(tile, partials, counters, at, cut_tile, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Helper's end of a cut tile: put the part (fp32) in place ``at`` and count it in; see ``matmul.give_part``."""
    gl.store(partials + at.to(gl.int64) * (TILE_M * TILE_N) + part_offsets(tile, 0, TILE_N), tile)
    block_barrier()
    gl.atomic_add(counters + cut_tile, 1, sem="release", scope="gpu")


@gluon.jit
def await_parts(counters, cut_tile, helpers):
    """Owner's wait for its helpers, lower programs of this grid; leaves the counter at zero for the next call."""
    while gl.atomic_add(counters + cut_tile, 0, sem="acquire", scope="gpu") < helpers:
        pass
    block_barrier()
    gl.store(counters + cut_tile, 0)


@gluon.jit
def add_parts(tile, first_col, partials, at, helpers, crew, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Add the helpers' parts of these columns, in program order downwards from place ``at``, ``crew`` apart."""
    offsets = part_offsets(tile, first_col, TILE_N)
    for below in range(1, helpers + 1):
        tile += gl.load(partials + (at - below * crew).to(gl.int64) * (TILE_M * TILE_N) + offsets)
    return tile


@gluon.jit
def store_half(
    half, first_col, fault, bias, out, out_desc, buffer, partials, at, helpers, crew, first_row, row_limit, col, cols, by_tma,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Columns [first_col, ...) of a finished tile: add helpers' parts, bias, round once, store."""
    half = add_parts(half, first_col, partials, at, helpers, crew, TILE_M, TILE_N)
    half = finish(half, fault, bias, col + first_col, cols, HAS_BIAS)
    if by_tma:
        store_tma(half, out_desc, buffer, first_row, col + first_col)
    else:
        store_masked(half, out, first_row, row_limit, col + first_col, cols)


@gluon.jit
def store_tile(
    tile, fault, bias, out, out_desc, buffer, partials, at, helpers, crew, first_row, row_limit, col, cols, total_rows,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr, OUT_TMA: gl.constexpr,
):  # fmt: skip
    """Epilogue of the program that owns a tile, in two halves where its shared-memory image would be too large."""
    width: gl.constexpr = TILE_N // HALVES
    by_tma = OUT_TMA and ((first_row + TILE_M <= row_limit) | (row_limit == total_rows))
    if HALVES == 2:
        low, high = tile.reshape((TILE_M, 2, width)).permute((0, 2, 1)).split()
        store_half(
            low, 0, fault, bias, out, out_desc, buffer, partials, at, helpers, crew, first_row, row_limit, col, cols, by_tma,
            TILE_M, TILE_N, HAS_BIAS,
        )  # fmt: skip
        store_half(
            high, width, fault, bias, out, out_desc, buffer, partials, at, helpers, crew, first_row, row_limit, col, cols,
            by_tma, TILE_M, TILE_N, HAS_BIAS,
        )  # fmt: skip
    else:
        store_half(
            tile, 0, fault, bias, out, out_desc, buffer, partials, at, helpers, crew, first_row, row_limit, col, cols, by_tma,
            TILE_M, TILE_N, HAS_BIAS,
        )  # fmt: skip
