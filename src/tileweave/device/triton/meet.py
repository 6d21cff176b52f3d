"""Ranks that begin to send at the same time.

Each rank sends to the next one first, then to the one after that, and so on: as long as ranks are
in step no receiver has two senders. Nothing in the other waits of a call keeps them in step: what
makes one rank late passes from rank to rank, call by call, and a receiver with two senders gets
both late. Three copies of 8.4 MB from each of four H200 take 110 to 125 us out of step, where the
link alone would take 64 us (decision 0002).

===========================  =====  ============================  ================================
signal (int32)               value  notifier                      waiter
===========================  =====  ============================  ================================
[R * MAX_SLICES + source]    epoch  ``source``                    every rank, before its first copy
[R * MAX_SLICES + R] (own)   epoch  own copy engine, after its    the program that ends the call
                                    last copy                     (:func:`await_pushed`)
===========================  =====  ============================  ================================

A meeting costs a late rank up to the time of the copies, which used to be there when it came, and
nothing where the copies hide under the matmul; the others wait for its data anyway. After it every
rank has begun this call, hence ended the one before: the slot of that call may be written again,
whatever its number.

Why no rank waits for ever: each rank tells that it has come before it waits, and has waited for no
other rank in this call before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.signal import (
    GONE,
    MAX_SLICES,
    MEETING_US,
    PUSHED_US,
    faulted,
    notify_all,
    refuse_later,
    wait,
)


@triton.jit
def come(signal_table, rank, number, WORLD_SIZE: tl.constexpr):
    """Tell every rank that this one is in call ``number``."""
    notify_all(signal_table, WORLD_SIZE * MAX_SLICES + rank, rank, number, WORLD_SIZE, True)


@triton.jit
def await_all(signals, rank, epoch, unit, control, report, WORLD_SIZE: tl.constexpr):
    """Wait until all ranks have come.

    No rank ends this call without copies of this rank, which go after this. So a rank in a later
    call has timed out, and the slot may hold data of that call: this counts as a
    time-out here, too.
    """
    first = WORLD_SIZE * MAX_SLICES
    for i in tl.static_range(1, WORLD_SIZE):
        wait(signals, 1, epoch, first + (rank + i) % WORLD_SIZE, unit, control, report, MEETING_US)
    for i in tl.static_range(1, WORLD_SIZE):
        refuse_later(signals, epoch, first + (rank + i) % WORLD_SIZE, unit, control, report)


@triton.jit
def meet(signal_table, signals, rank, epoch, unit, control, report, WORLD_SIZE: tl.constexpr):
    """Tell every rank that this one has come, and wait until all have. One program of each rank,
    once a call."""
    come(signal_table, rank, epoch, WORLD_SIZE)
    await_all(signals, rank, epoch, unit, control, report, WORLD_SIZE)


@triton.jit
def or_gone(epoch, control):
    """The number to :func:`come` with where every call has the same slot: the epoch, or, after a
    fault, one that no call has.

    Copies of a rank with a fault wait for no meeting, and may land in what a peer still reads:
    :func:`refuse_gone`.
    """
    return tl.where(faulted(control) != 0, epoch + GONE, epoch)


@triton.jit
def refuse_gone(signals, rank, epoch, control, report, WORLD_SIZE: tl.constexpr):
    """After all that reads the slot of call ``epoch``: a time-out if a peer gave a call up, and so
    may have written there."""
    for i in tl.static_range(1, WORLD_SIZE):
        word = WORLD_SIZE * MAX_SLICES + (rank + i) % WORLD_SIZE
        refuse_later(signals, epoch + GONE // 2, word, -1, control, report)


@triton.jit
def await_pushed(signals, epoch, control, report, WORLD_SIZE: tl.constexpr):
    """The own copy engine has done the last copy of this call. Before that no counter, no flag and
    no epoch may move.

    Not even after a time-out, in which copies may only just have begun: so this wait has a limit of
    its own.
    """
    wait(signals, 1, epoch, WORLD_SIZE * MAX_SLICES + WORLD_SIZE, -1, control, report, PUSHED_US)
