"""Chunks that peers' copy engines pull, in Gluon, for one warp: twins of words in ``kernels/all_to_all/scatter_triton.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.meet import await_pushed
from tileweave.device.gluon.signal import FAULT, block_barrier, notify, symm_at, wait
from tileweave.device.triton.signal import MAX_SLICES


@gluon.jit
def announce_chunk(signal_table, peer, rank, slot, chunk, epoch, WORLD_SIZE: gl.constexpr):
    """The flag that the peer's copy engine waits for, then the signal; see ``matmul_all_to_all.announce_chunk``."""
    signals = symm_at(signal_table, peer, gl.int32)
    mine = rank * MAX_SLICES + chunk
    notify(signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1 + mine, 1)
    notify(signals + mine, epoch)


@gluon.jit
def faulted(control):
    """Whether a wait of this rank ran out of time: one answer for all lanes, though another partition may say so meanwhile."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return (
        gl.max(gl.load(control + FAULT + gl.arange(0, 32, layout=lane) * 0, volatile=True), axis=0)
        != 0
    )


@gluon.jit
def set_flags(flags, value, WORLD_SIZE: gl.constexpr):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, 32, layout=lane)
    for source in gl.static_range(WORLD_SIZE):
        gl.store(flags + source * MAX_SLICES + word, word * 0 + value)


@gluon.jit
def end_of_pulls(
    signals, out, slot, num_chunks, rank, epoch, out_size, control, report, WORLD_SIZE: gl.constexpr
):  # fmt: skip
    """The last program: all chunks were announced, all pulls are done, flags are zero; or else the result is NaN."""
    flags = signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        for chunk in range(0, num_chunks):
            wait(signals, source * MAX_SLICES + chunk, epoch, -1, control, report, 1, 1)
    if faulted(control):  # let the copies go: what they bring is overwritten below
        set_flags(flags, 1, WORLD_SIZE)
        block_barrier()
    await_pushed(signals, epoch, control, report, WORLD_SIZE, 1)
    if faulted(
        control
    ):  # it may be that which ran out: a peer that came late has zeroed a flag of this call
        set_flags(flags, 1, WORLD_SIZE)
        block_barrier()
        await_pushed(signals, epoch, control, report, WORLD_SIZE, 1)
    set_flags(flags, 0, WORLD_SIZE)
    if faulted(control):
        word = gl.arange(0, 256, layout=gl.BlockedLayout([8], [32], [1], [0]))
        for begin in range(0, out_size, 256):
            nan = (word * 0).to(gl.float32) + float("nan")
            gl.store(out + begin + word, nan.to(out.dtype.element_ty), mask=begin + word < out_size)
