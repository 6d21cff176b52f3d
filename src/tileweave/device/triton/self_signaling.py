"""Self-signaling data: an element of zero bits has not arrived, and a zero travels as minus zero.

For small messages a fence and a signal after the data cost more than the data. So each element is
its own signal: the reader polls the elements themselves and needs no order between them. The
program that takes elements writes zeros back at once, so that they can be polled again when the
slot is used again, two calls later (see *slots* in ``transport/interface.py``: fresh slots are
zero).

==================  ==============================================================================
``mark``            bits of a value as they travel
``put_marked``      store them in a peer's slot; no signal follows
``take_marked``     poll ``COUNT`` parts until all elements have come, add them in order, write
                    zeros back
``take_each``       poll a row of elements from each peer until all have come, write zeros back
``expected_zero``   what a sum may be: a result that must be the same on all ranks has one zero only
``unmarked``        the same for 32 bits that are no number, such as four of FP8
==================  ==============================================================================

Why it is safe: each element is written once per call by one rank, stores of 2 or 4 bytes are not
torn, and the reader's zeros come after its own loads of the same addresses. The writer's next store
to that address comes two calls later, when it has data of this rank's next call, which was sent
after the end of the call that wrote the zeros.

Source of the idea: NCCL's LL protocol (data and flag in one word); "Lamport" buffers of
TensorRT-LLM's all-reduce.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton import record
from tileweave.device.triton.record import ANY, STAMPED
from tileweave.device.triton.signal import TIMEOUT_US, clock, expire, pause


@triton.jit
def mark(value):
    """The bits of ``value`` as integers of its width, never zero: plus zero becomes minus zero."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        return tl.where(bits == 0, tl.full([], -(2**15), tl.int16), bits)
    else:
        bits = value.to(tl.int32, bitcast=True)
        return tl.where(bits == 0, tl.full([], -(2**31), tl.int32), bits)


@triton.jit
def expected_zero(value):
    """``value`` with plus zero for minus zero.

    By its bits: the interpreter compares numbers of bfloat16 by theirs.
    """
    if value.dtype.primitive_bitwidth == 16:
        is_zero = (value.to(tl.int16, bitcast=True) & 0x7FFF) == 0
    else:
        is_zero = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0
    return tl.where(is_zero, tl.zeros_like(value), value)


@triton.jit
def unmarked(value):
    """:func:`expected_zero` by bits: those of ``value`` (fp32) may be any. Of four FP8 numbers, of
    which the last is minus zero and the others are zero, it becomes zero."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -(2**31), tl.zeros_like(bits), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put_marked(pointers, value, mask):
    """Store ``value`` (rounded to the slot's dtype already) where a peer polls for it.

    ``pointers``: in that dtype.
    """
    bits = mark(value)
    tl.store(pointers.to(tl.pointer_type(bits.dtype), bitcast=True), bits, mask=mask)


@triton.jit
def _missing(value, mask):
    """1 for each element that has not come."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = value.to(tl.int32, bitcast=True)
    return tl.where((bits == 0) & mask, 1, 0)


@triton.jit
def _is_overdue(started, limit):
    """By each thread's own clock. A program goes by the maximum over its threads: all of them must
    reach the same barriers."""
    return (clock() - started >= limit).to(tl.int32)


@triton.jit
def _sum_marked(acc, pointers, stride, mask, overdue, COUNT: tl.constexpr):
    """``acc`` plus ``COUNT`` parts, and whether one is missing: 0 no, 1 yes, 2 a thread has timed
    out.

    All loads have been issued before the first result is used.
    """
    missing = tl.zeros(acc.shape, tl.int32) + 2 * overdue
    for i in tl.static_range(COUNT):
        value = tl.load(pointers + i * stride, mask=mask, volatile=True)
        missing = tl.maximum(missing, _missing(value, mask))
        acc += tl.where(mask, value.to(tl.float32), 0.0)
    return acc, tl.max(tl.max(missing, axis=1), axis=0)


@triton.jit
def take_marked(
    acc,
    pointers,
    stride,
    mask,
    first_peer,
    skip,
    unit,
    epoch,
    control,
    report,
    COUNT: tl.constexpr,
    SIGNALS: tl.constexpr,
    EACH: tl.constexpr = 1,
):
    """``acc`` (fp32, 2-D) plus the parts at ``pointers + i * stride``, i = 0 .. COUNT-1, added in
    that order.

    ``mask``: the elements that are sent. Each rank sends ``EACH`` parts, one after the other: part
    i comes from rank ``first_peer + i // EACH``, or from the next one if that is ``skip`` or more:
    the rank that sends none (R: no such rank). A part that has not come in time is reported as that
    rank's (each has ``SIGNALS`` signals), sets the fault, and makes the sum NaN: so callers need
    not look at the fault afterwards, which would be one more load in the latency of small messages.
    """
    # loaded here, concurrently with the data
    limit = tl.load(control + TIMEOUT_US, volatile=True).to(tl.int64) * 1000
    # after a fault of this rank: the data in the slot may be of no call, or of an older one
    gave_up = (limit == 0).to(tl.int32)
    total, missing = _sum_marked(acc, pointers, stride, mask, gave_up, COUNT)
    if missing > 0:
        started = clock()
        polls = 0
        while (missing == 1) & (polls < 1 << 30):
            pause()
            overdue = _is_overdue(started, limit)
            # again: a fault ends waits that have begun, too
            limit = tl.load(control + TIMEOUT_US, volatile=True).to(tl.int64) * 1000
            total, missing = _sum_marked(acc, pointers, stride, mask, overdue, COUNT)
            polls += 1
        if STAMPED:
            record.waited(control, ANY, unit, missing, started)
        if missing > 0:
            total, missing = _sum_marked(acc, pointers, stride, mask, gave_up, COUNT)
        if missing > 0:
            late = tl.cast(first_peer, tl.int32)  # if all have come by now
            for i in tl.static_range(COUNT):
                value = tl.load(pointers + i * stride, mask=mask, volatile=True)
                if tl.max(tl.max(_missing(value, mask), axis=1), axis=0) > 0:
                    late = tl.cast(first_peer, tl.int32) + i // EACH
            if late >= skip:
                late += 1
            expire(control, report, late * SIGNALS, unit, epoch, epoch - 1)
            total += float("nan")
    for i in tl.static_range(COUNT):
        tl.store(pointers + i * stride, tl.zeros(acc.shape, pointers.dtype.element_ty), mask=mask)
    return total


@triton.jit
def _load_each(pointers, mask, overdue):
    """Rows of elements, which of them are missing, and whether any is, as in
    :func:`_sum_marked`."""
    value = tl.load(pointers, mask=mask, volatile=True)
    missing = tl.max(_missing(value, mask) + 2 * overdue, axis=1)
    return value, missing, tl.max(missing, axis=0)


@triton.jit
def take_each(
    pointers,
    mask,
    rank,
    unit,
    epoch,
    control,
    report,
    SIGNALS: tl.constexpr,
    ROWS: tl.constexpr = 1,
):
    """What has come to ``pointers`` [peers * ROWS, n]: ``ROWS`` rows from each of the other ranks,
    in order of ranks.

    ``mask``: the elements that are sent. A rank that is late is reported as in :func:`take_marked`.
    """
    limit = tl.load(control + TIMEOUT_US, volatile=True).to(tl.int64) * 1000
    gave_up = (limit == 0).to(tl.int32)
    value, missing, any_missing = _load_each(pointers, mask, gave_up)
    if any_missing > 0:
        started = clock()
        polls = 0
        while (any_missing == 1) & (polls < 1 << 30):
            pause()
            overdue = _is_overdue(started, limit)
            limit = tl.load(control + TIMEOUT_US, volatile=True).to(tl.int64) * 1000
            value, missing, any_missing = _load_each(pointers, mask, overdue)
            polls += 1
        if STAMPED:
            record.waited(control, ANY, unit, any_missing, started)
        if any_missing > 0:
            value, missing, any_missing = _load_each(pointers, mask, gave_up)
        if any_missing > 0:
            late = tl.max(tl.where(missing > 0, tl.arange(0, missing.shape[0]), -1), axis=0)
            if ROWS > 1:
                late = late // ROWS
            late += (late >= rank).to(tl.int32)
            expire(control, report, late * SIGNALS, unit, epoch, epoch - 1)
            value = tl.full(value.shape, float("nan"), value.dtype)
    tl.store(pointers, tl.zeros(value.shape, value.dtype), mask=mask)
    return value
