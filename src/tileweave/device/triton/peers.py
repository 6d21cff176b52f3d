"""The protocol between ranks, for kernels: what a program tells its peers, and what it waits for.

Each function takes ``peers``, the slots, signals and control block of an instance
(``kernels/runtime/peers.py``), and is ``signal.py``, ``meet.py`` or ``remote.py`` with its
pointers. ``signal.py`` says which function to use when, and what is ordered afterwards.

A program of a kernel whose ranks exchange data reads the epoch, stores into slots of its peers,
notifies them, waits for its peers' signals, and leaves::

    epoch = load_epoch(peers)
    slot = slots_at(peers, peer, dtype) + (epoch & 1) * peers.slot_size
    tl.store(slot + at, value)
    notify(peers, peer, rank * MAX_SLICES, epoch)
    wait(peers, source * MAX_SLICES, epoch)
    leave(peers, epoch, tl.num_programs(0))

Signals are given by index (``transport/protocol.py``), epochs as numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton import meet as meeting
from tileweave.device.triton import remote, self_signaling, signal
from tileweave.device.triton.signal import MAX_SLICES, TIMEOUT_US


@triton.jit
def load_epoch(peers):
    """The number of this call; see ``signal.load_epoch``."""
    return signal.load_epoch(peers.control)


@triton.jit
def slots_at(peers, peer, dtype: tl.constexpr):
    """Pointer to ``dtype`` at the first slot of ``peer``, as mapped on this rank; 16-byte
    aligned."""
    return remote.symm_at(peers.slot_table, peer, dtype, 16)


@triton.jit
def signals_at(peers, peer):
    """Pointer to the first signal of ``peer``, as mapped on this rank."""
    return remote.symm_at(peers.signal_table, peer, tl.int32, 4)


@triton.jit
def notify(peers, peer, index, epoch):
    """Set signal ``index`` of ``peer`` to ``epoch``, after all stores of this program."""
    signal.notify(signals_at(peers, peer) + index, epoch)


@triton.jit
def notify_all(peers, index, rank, epoch, WORLD_SIZE: tl.constexpr, OWN: tl.constexpr):
    """:func:`notify` every peer (``OWN``: this rank, too) at once."""
    signal.notify_all(peers.signal_table, index, rank, epoch, WORLD_SIZE, OWN)


@triton.jit
def wait(
    peers,
    index,
    epoch,
    unit=-1,
    COUNT: tl.constexpr = 1,
    LIMIT: tl.constexpr = TIMEOUT_US,
    EXACT: tl.constexpr = False,
):
    """Wait until signals [``index``, ``index + COUNT``) have reached ``epoch``; see
    ``signal.wait``.

    ``unit``: the waiting unit of work, for the report. Returns a token for ``consume_token``.
    """
    return signal.wait(
        peers.signals, COUNT, epoch, index, unit, peers.control, peers.report, LIMIT, EXACT
    )


@triton.jit
def wait_here(peers, words, value, index, unit, LIMIT: tl.constexpr = TIMEOUT_US):
    """Wait for ``words[index]``, which only programs of this device write; see
    ``signal.wait_here``."""
    signal.wait_here(words, value, index, unit, peers.control, peers.report, LIMIT)


@triton.jit
def refuse_later(peers, epoch, index, unit):
    """A time-out if signal ``index`` is of a later call; see ``signal.refuse_later``."""
    signal.refuse_later(peers.signals, epoch, index, unit, peers.control, peers.report)


@triton.jit
def faulted(peers):
    """Non-zero once a wait of this rank has timed out."""
    return signal.faulted(peers.control)


@triton.jit
def call_done(peers, epoch):
    """The call that a rank says it has done; see ``signal.call_done``."""
    return signal.call_done(peers.control, epoch)


@triton.jit
def leave(peers, epoch, num_programs):
    """End of a program; the last of ``num_programs`` advances the epoch. See ``signal.leave``."""
    signal.leave(peers.control, epoch, num_programs)


@triton.jit
def leave_early(peers, epoch, num_programs):
    """:func:`leave` in the middle of a program; see ``signal.leave_early``."""
    signal.leave_early(peers.control, epoch, num_programs)


@triton.jit
def last_to_leave(peers, num_programs):
    """Whether all other programs have left; then this one must :func:`advance`."""
    return signal.last_to_leave(peers.control, num_programs)


@triton.jit
def advance(peers, epoch, fault):
    """The end of the call that :func:`last_to_leave` found; see ``signal.advance``."""
    signal.advance(peers.control, epoch, fault)


@triton.jit
def come(peers, rank, number, WORLD_SIZE: tl.constexpr):
    """Tell every rank that this one is in call ``number``; see ``meet.come``."""
    meeting.come(peers.signal_table, rank, number, WORLD_SIZE)


@triton.jit
def await_all(peers, rank, epoch, unit, WORLD_SIZE: tl.constexpr):
    """Wait until all ranks have come; see ``meet.await_all``."""
    meeting.await_all(peers.signals, rank, epoch, unit, peers.control, peers.report, WORLD_SIZE)


@triton.jit
def meet(peers, rank, epoch, unit, WORLD_SIZE: tl.constexpr):
    """Tell every rank that this one has come, and wait until all have; see ``meet.meet``."""
    meeting.meet(
        peers.signal_table,
        peers.signals,
        rank,
        epoch,
        unit,
        peers.control,
        peers.report,
        WORLD_SIZE,
    )


@triton.jit
def or_gone(peers, epoch):
    """The number to :func:`come` with where every call has the same slot; see ``meet.or_gone``."""
    return meeting.or_gone(epoch, peers.control)


@triton.jit
def refuse_gone(peers, rank, epoch, WORLD_SIZE: tl.constexpr):
    """A time-out if a peer gave a call up, and may have written to the slot; see
    ``meet.refuse_gone``."""
    meeting.refuse_gone(peers.signals, rank, epoch, peers.control, peers.report, WORLD_SIZE)


@triton.jit
def await_pushed(peers, epoch, WORLD_SIZE: tl.constexpr):
    """Wait until the own copy engine has done the last copy of this call; see
    ``meet.await_pushed``."""
    meeting.await_pushed(peers.signals, epoch, peers.control, peers.report, WORLD_SIZE)


@triton.jit
def take_marked(
    peers,
    acc,
    pointers,
    stride,
    mask,
    first_peer,
    skip,
    unit,
    epoch,
    COUNT: tl.constexpr,
    EACH: tl.constexpr = 1,
):
    """``acc`` plus ``COUNT`` parts that announce themselves; see ``self_signaling.take_marked``."""
    return self_signaling.take_marked(
        acc,
        pointers,
        stride,
        mask,
        first_peer,
        skip,
        unit,
        epoch,
        peers.control,
        peers.report,
        COUNT,
        MAX_SLICES,
        EACH,
    )


@triton.jit
def take_each(peers, pointers, mask, rank, unit, epoch, ROWS: tl.constexpr = 1):
    """``ROWS`` rows of elements from each peer; see ``self_signaling.take_each``."""
    return self_signaling.take_each(
        pointers, mask, rank, unit, epoch, peers.control, peers.report, MAX_SLICES, ROWS
    )
