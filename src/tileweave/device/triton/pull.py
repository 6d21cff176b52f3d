"""Chunks that peers' copy engines pull out of a slot of this rank.

A chunk is announced by a flag and by a signal. A copy engine waits for the flag, since it can wait
for a fixed value only, in a graph too, where epochs advance. The last program waits for the signal,
with a time-out that names the late rank. Flags [slot, source, chunk] follow all signals, which are
[source, chunk], R for meetings, and [pushed] (``transport/protocol.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.peers import await_pushed, faulted, signals_at, wait
from tileweave.device.triton.signal import MAX_SLICES, notify, poison


@triton.jit
def announce_chunk(peers, peer, rank, slot, chunk, epoch, WORLD_SIZE: tl.constexpr):
    """Tell ``peer`` that a chunk for it is in the slot: the flag that its copy engine waits for,
    then the signal."""
    signals = signals_at(peers, peer)
    mine = rank * MAX_SLICES + chunk
    notify(signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1 + mine, 1)
    notify(signals + mine, epoch)


@triton.jit
def end_of_pulls(
    peers,
    out,
    out_size,
    slot,
    num_chunks,
    rank,
    epoch,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last program: all chunks of each peer have been announced, every pull is done, flags
    are zero; or else the result is NaN."""
    flags = peers.signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        for chunk in range(0, num_chunks):
            wait(peers, source * MAX_SLICES + chunk, epoch)
    words = tl.arange(0, 8 * MAX_SLICES)
    inside = words < WORLD_SIZE * MAX_SLICES
    # let the copies proceed: what they bring is overwritten below
    if faulted(peers) != 0:
        tl.store(flags + words, tl.full([8 * MAX_SLICES], 1, tl.int32), mask=inside)
    await_pushed(peers, epoch, WORLD_SIZE)
    # this wait may have timed out: a peer that was late has reset a flag of this call
    if faulted(peers) != 0:
        tl.store(flags + words, tl.full([8 * MAX_SLICES], 1, tl.int32), mask=inside)
        await_pushed(peers, epoch, WORLD_SIZE)
    tl.store(flags + words, tl.zeros_like(words), mask=inside)
    if faulted(peers) != 0:
        poison(out, out_size, BLOCK)
