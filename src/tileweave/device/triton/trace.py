"""Time stamps from inside a kernel: when each unit of work waited, computed and ended. Compiled out
when off.

A trace is int64 ``[rows, 4]`` on the device. Rows ``[0, num_slices)`` belong to slices that a rank
pushed: begin, end, 0, slice. Then each program has ``max_units`` rows, one for each unit of work:
begin of its wait, end of its wait, end of the unit, tile + 1 (0: no unit). Times are nanoseconds of
the device's clock. ``profile/trace.py`` decodes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.signal import clock


@triton.jit
def stamp(trace, row, column, TRACE: tl.constexpr):
    """Write the time into ``trace[row, column]``."""
    if TRACE:
        tl.store(trace + row * 4 + column, clock())


@triton.jit
def label(trace, row, value, TRACE: tl.constexpr):
    """Write which slice or tile a row is about."""
    if TRACE:
        tl.store(trace + row * 4 + 3, tl.cast(value, tl.int64))
