"""Signals, waits and epochs in Gluon for Hopper: the counterparts of ``device/triton/signal.py``.

The integer maps, compiled as Gluon, are in ``matmul.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon import record
from tileweave.device.triton.signal import (
    EXPIRE,
    FAULT,
    LATE,
    LEAVERS,
    NUM_TABLES,
    TABLE_RANK,
    TABLE_RANKS,
    TABLES,
    TIMEOUT_US,
)

# Names that changed between Triton 3.6 and 3.9.
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
block_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def clock(anything):
    """Nanoseconds, ``%globaltimer``. ``anything``: an int32 scalar, since this assembly needs an
    operand."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [anything], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def drain_tma_stores(anything):
    """Wait until this thread's TMA stores are visible, not only read; see
    ``signal.drain_tma_stores``, and :func:`clock`."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
        "=r,r",
        [anything],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_in(counter):
    """Count this partition's stores in, drained before; see ``signal.count_in``."""
    block_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="sys")


@gluon.jit
def count_last(counter, total):
    """Count this partition's stores in, drained before; whether all are in now: see
    ``signal.count_last``."""
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
    """Store ``epoch`` in ``signal`` after this partition's plain stores; see ``signal.notify``."""
    block_barrier()
    gl.atomic_xchg(signal, epoch, sem="release", scope="sys")


@gluon.jit
def notify_all(
    signal_table,
    offset,
    rank,
    epoch,
    WORLD_SIZE: gl.constexpr,
    OWN: gl.constexpr,
    WARPS: gl.constexpr,
):
    """:func:`notify` every peer at ``offset`` of its signals, one lane a peer: one fence in time,
    not R - 1."""
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
        EXPIRE,
        "=r,l,l,r,r,r,r",
        [control + FAULT, report, expected * 0 + signal, expected * 0 + unit, expected, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def words_of(first, last, stride, COUNT: gl.constexpr, SPREAD: gl.constexpr, WARPS: gl.constexpr):
    """The indices of the signals that :func:`spin` polls, at least one per lane: lanes left over
    poll the last source again."""
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
    signals,
    first,
    last,
    stride,
    epoch,
    COUNT: gl.constexpr,
    SPREAD: gl.constexpr,
    WARPS: gl.constexpr,
    EXACT: gl.constexpr,
):
    """Whether :func:`spin` would return at once; before work that only a wait leaves time
    for."""
    index = words_of(first, last, stride, COUNT, SPREAD, WARPS)
    return gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0) >= 0


@gluon.jit
def spin(
    signals,
    first,
    last,
    stride,
    epoch,
    unit,
    control,
    report,
    COUNT: gl.constexpr,
    SPREAD: gl.constexpr,
    WARPS: gl.constexpr,
    LIMIT: gl.constexpr = TIMEOUT_US,
    EXACT: gl.constexpr = False,
):
    """Poll until all of ``signals[s * stride : s * stride + COUNT]`` for s in [first, last] have
    reached ``epoch``.

    All words are polled at once, ``SPREAD`` * ``COUNT`` of them (powers of two, ``SPREAD`` > last -
    first). It orders nothing yet: after it, :func:`acquire`. ``EXACT``: data of a later call will
    not do; see ``signal.wait``.
    """
    index = words_of(first, last, stride, COUNT, SPREAD, WARPS)
    lag = gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0)
    if lag < 0:
        limit = gl.load(control + LIMIT, volatile=True).to(gl.int64) * 1000
        started = clock(lag)
        while (lag < 0) & (clock(lag) - started <= limit):
            limit = (
                gl.load(control + LIMIT, volatile=True).to(gl.int64) * 1000
            )  # a fault ends waits that have begun, too
            lag = gl.min(_lag(gl.load(signals + index, volatile=True), epoch, EXACT), axis=0)
        record.waited(control, first * stride, unit, lag, started)
        if lag < 0:
            seen = gl.load(signals + index, volatile=True)
            lags = _lag(seen, epoch, EXACT)
            late = gl.min(gl.where(lags == gl.min(lags, axis=0), index, 0x7FFFFFFF), axis=0)
            expire(
                control,
                report,
                late,
                unit,
                epoch,
                gl.max(gl.where(index == late, seen, -0x80000000), axis=0),
            )


@gluon.jit
def acquire(epoch):
    """After :func:`spin`: later loads, TMA's too, see what was stored before the signals seen.
    ``epoch``: any int32.

    Both fences are the narrow ones. ``fence.acq_rel`` and ``fence.proxy.async`` without a state
    space wait for all that the multiprocessor has under way: 3 us before a tile, 7 us concurrently
    with copies (decision 0004).
    """
    gl.inline_asm_elementwise(
        "fence.acquire.sys; fence.proxy.async.global; mov.u32 $0, 0;",
        "=r,r",
        [epoch],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    block_barrier()


@gluon.jit
def wait(
    signals,
    first,
    epoch,
    unit,
    control,
    report,
    COUNT: gl.constexpr,
    WARPS: gl.constexpr,
    EXACT: gl.constexpr = False,
):
    """:func:`spin` on ``signals[first : first + COUNT]``, then :func:`acquire`; see
    ``signal.wait``."""
    spin(signals, first, first, 1, epoch, unit, control, report, COUNT, 1, WARPS, EXACT=EXACT)
    acquire(epoch)


@gluon.jit
def leave(control, epoch, num_partitions):
    """End of a partition that has read the epoch; the last one of the grid advances it; see
    ``signal.leave``."""
    fault = gl.load(control + FAULT, volatile=True)
    block_barrier()
    left = gl.atomic_add(control + LEAVERS, 1, sem="acq_rel", scope="gpu")
    record.left(control, left)
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
    """Write the time into ``trace[row, column]``; see ``device/triton/trace.py``."""
    if TRACE:
        gl.store(trace + row * 4 + column, clock(epoch))


@gluon.jit
def label(trace, row, value, TRACE: gl.constexpr):
    if TRACE:
        gl.store(trace + row * 4 + 3, value.to(gl.int64))
