"""Ranks that begin to send at the same time, in Gluon: twin of ``language/meet.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.language.hopper import acquire, notify_all, spin

MAX_SLICES = gl.constexpr(32)


@gluon.jit
def meet(
    signal_table, signals, rank, epoch, unit, control, report, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Tell every rank that this one has come, and wait until all have; see ``meet.meet``."""
    first: gl.constexpr = WORLD_SIZE * MAX_SLICES
    notify_all(signal_table, first + rank, rank, epoch, WORLD_SIZE, True, WARPS)
    spin(signals, rank * 0 + first, rank * 0 + first + WORLD_SIZE - 1, 1, epoch, unit, control, report, 1, 8, WARPS)
    acquire(epoch)
