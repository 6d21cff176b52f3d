"""Chunks that peers' copy engines pull, in Gluon, for one warp: the counterparts of
``device/triton/pull.py``; read that first."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.peers import await_pushed, signals_at, wait
from tileweave.device.gluon.signal import FAULT, block_barrier, notify
from tileweave.device.triton.signal import MAX_SLICES


@gluon.jit
def announce_chunk(peers, peer, rank, slot, chunk, epoch, WORLD_SIZE: gl.constexpr):
    """The flag that the peer's copy engine waits for, then the signal; see
    ``pull.announce_chunk``."""
    signals = signals_at(peers, peer)
    mine = rank * MAX_SLICES + chunk
    notify(signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1 + mine, 1)
    notify(signals + mine, epoch)


@gluon.jit
def faulted(peers):
    """Whether a wait of this rank has timed out: one answer for all lanes, although another
    partition may set the fault meanwhile."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    same = gl.arange(0, 32, layout=lane) * 0
    return gl.max(gl.load(peers.control + FAULT + same, volatile=True), axis=0) != 0


@gluon.jit
def set_flags(flags, value, WORLD_SIZE: gl.constexpr):
    """Set the flags of all sources, for all chunks, to ``value``."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, 32, layout=lane)
    for source in gl.static_range(WORLD_SIZE):
        gl.store(flags + source * MAX_SLICES + word, word * 0 + value)


@gluon.jit
def end_of_pulls(
    peers,
    out,
    out_size,
    slot,
    num_chunks,
    rank,
    epoch,
    WORLD_SIZE: gl.constexpr,
):
    """The last program: all chunks were announced, all pulls are done, flags are zero; or else the
    result is NaN. See ``pull.end_of_pulls``."""
    flags = peers.signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        for chunk in range(0, num_chunks):
            wait(peers, source * MAX_SLICES + chunk, epoch, -1, 1, 1)
    # let the copies proceed: what they bring is overwritten below
    if faulted(peers):
        set_flags(flags, 1, WORLD_SIZE)
        block_barrier()
    await_pushed(peers, epoch, WORLD_SIZE, 1)
    # this wait may have timed out: a peer that was late has reset a flag of this call
    if faulted(peers):
        set_flags(flags, 1, WORLD_SIZE)
        block_barrier()
        await_pushed(peers, epoch, WORLD_SIZE, 1)
    set_flags(flags, 0, WORLD_SIZE)
    if faulted(peers):
        word = gl.arange(0, 256, layout=gl.BlockedLayout([8], [32], [1], [0]))
        for begin in range(0, out_size, 256):
            nan = (word * 0).to(gl.float32) + float("nan")
            gl.store(out + begin + word, nan.to(out.dtype.element_ty), mask=begin + word < out_size)
