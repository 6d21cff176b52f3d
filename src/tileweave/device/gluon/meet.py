"""Ranks that begin to send at the same time, and the end of their copies, in Gluon.

Counterparts of ``device/triton/meet.py``; read that first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.signal import acquire, expire, notify_all, spin, words_of
from tileweave.device.triton.signal import MAX_SLICES, MEETING_US, PUSHED_US


@gluon.jit
def meet(
    signal_table,
    signals,
    rank,
    epoch,
    unit,
    control,
    report,
    WORLD_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Tell every rank that this one has come, and wait until all have; see ``meet.meet``."""
    first: gl.constexpr = WORLD_SIZE * MAX_SLICES
    notify_all(signal_table, first + rank, rank, epoch, WORLD_SIZE, True, WARPS)
    begin, end = rank * 0 + first, rank * 0 + first + WORLD_SIZE - 1
    spin(signals, begin, end, 1, epoch, unit, control, report, 1, 8, WARPS, MEETING_US)
    index = words_of(begin, end, 1, 1, 8, WARPS)
    leads = gl.load(signals + index, volatile=True) - epoch
    lead = gl.max(leads, axis=0)
    if lead > 0:
        further = gl.min(gl.where(leads == lead, index, 0x7FFFFFFF), axis=0)
        expire(control, report, further, unit, epoch, lead + epoch)
    acquire(epoch)


@gluon.jit
def await_pushed(signals, epoch, control, report, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """The own copy engine has done the last copy of this call; see ``meet.await_pushed``."""
    pushed: gl.constexpr = WORLD_SIZE * MAX_SLICES + WORLD_SIZE
    spin(
        signals,
        epoch * 0 + pushed,
        epoch * 0 + pushed,
        1,
        epoch,
        -1,
        control,
        report,
        1,
        1,
        WARPS,
        PUSHED_US,
    )
    acquire(epoch)
