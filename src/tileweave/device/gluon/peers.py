"""The protocol between ranks, for kernels in Gluon: the counterpart of ``device/triton/peers.py``;
read that first. ``WARPS``: of the partition that calls."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon import meet as meeting
from tileweave.device.gluon import record, self_signaling, signal
from tileweave.device.triton.signal import FAULT, MAX_SLICES, TIMEOUT_US


@gluon.jit
def load_epoch(peers):
    """The number of this call; see ``signal.load_epoch``."""
    epoch = gl.load(peers.control, volatile=True)
    record.began(peers.control, epoch)
    return epoch


@gluon.jit
def slots_at(peers, peer, dtype: gl.constexpr):
    """Pointer to ``dtype`` at the first slot of ``peer``, as mapped on this rank."""
    return signal.symm_at(peers.slot_table, peer, dtype)


@gluon.jit
def signals_at(peers, peer):
    """Pointer to the first signal of ``peer``, as mapped on this rank."""
    return signal.symm_at(peers.signal_table, peer, gl.int32)


@gluon.jit
def notify(peers, peer, index, epoch):
    """Set signal ``index`` of ``peer`` to ``epoch``, after this partition's plain stores."""
    signal.notify(signals_at(peers, peer) + index, epoch)


@gluon.jit
def notify_all(
    peers, index, rank, epoch, WORLD_SIZE: gl.constexpr, OWN: gl.constexpr, WARPS: gl.constexpr
):
    """:func:`notify` every peer (``OWN``: this rank, too) at once."""
    signal.notify_all(peers.signal_table, index, rank, epoch, WORLD_SIZE, OWN, WARPS)


@gluon.jit
def are_there(
    peers,
    first,
    last,
    stride,
    epoch,
    COUNT: gl.constexpr,
    SPREAD: gl.constexpr,
    WARPS: gl.constexpr,
    EXACT: gl.constexpr,
):
    """Whether :func:`spin` would return at once."""
    return signal.are_there(peers.signals, first, last, stride, epoch, COUNT, SPREAD, WARPS, EXACT)


@gluon.jit
def spin(
    peers,
    first,
    last,
    stride,
    epoch,
    unit,
    COUNT: gl.constexpr,
    SPREAD: gl.constexpr,
    WARPS: gl.constexpr,
    LIMIT: gl.constexpr = TIMEOUT_US,
    EXACT: gl.constexpr = False,
):
    """Poll ``COUNT`` signals from each ``stride * s``, s in [``first``, ``last``], until all have
    reached ``epoch``; see ``signal.spin``. It orders nothing: ``acquire`` must follow."""
    signal.spin(
        peers.signals,
        first,
        last,
        stride,
        epoch,
        unit,
        peers.control,
        peers.report,
        COUNT,
        SPREAD,
        WARPS,
        LIMIT,
        EXACT,
    )


@gluon.jit
def wait(
    peers,
    index,
    epoch,
    unit,
    COUNT: gl.constexpr,
    WARPS: gl.constexpr,
    EXACT: gl.constexpr = False,
):
    """Wait until signals [``index``, ``index + COUNT``) have reached ``epoch``; see
    ``signal.wait``."""
    signal.wait(peers.signals, index, epoch, unit, peers.control, peers.report, COUNT, WARPS, EXACT)


@gluon.jit
def faulted(peers):
    """Non-zero once a wait of this rank has timed out."""
    return gl.load(peers.control + FAULT, volatile=True)


@gluon.jit
def leave(peers, epoch, num_partitions):
    """End of a partition; the last one of the grid advances the epoch. See ``signal.leave``."""
    signal.leave(peers.control, epoch, num_partitions)


@gluon.jit
def meet(peers, rank, epoch, unit, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr):
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
        WARPS,
    )


@gluon.jit
def await_pushed(peers, epoch, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Wait until the own copy engine has done the last copy of this call; see
    ``meet.await_pushed``."""
    meeting.await_pushed(peers.signals, epoch, peers.control, peers.report, WORLD_SIZE, WARPS)


@gluon.jit
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
    COUNT: gl.constexpr,
    dtype: gl.constexpr,
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
        dtype,
    )
