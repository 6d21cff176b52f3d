"""await_shards: the shards that copy engines of all ranks push into a slot in this call are there; then the call ends.

For an all-gather beside another kernel (``ops/gather_beside.py``), which may fill the device: copies need no multiprocessor.

    slot   [R, shard]   one of two, by the host's count of calls; shard s in place s. The own one its rank stores itself.

==============================  =====  ====================================  ==============================
signal (int32)                  value  notifier                              waiter
==============================  =====  ====================================  ==============================
[source * MAX_SLICES]           epoch  ``source``'s copy engine, behind its  this kernel, on every other rank
                                       shard
[R * MAX_SLICES + R]            epoch  own copy engine, behind its last      this kernel: the copies have read the
                                       push                                  epoch word, so it may move
==============================  =====  ====================================  ==============================

    main stream  ┬ own shard into the slot | a kernel of another instance | await_shards | what reads the slot
    side stream  └▶ shard ▶ r+1, signal | ▶ r+2, signal | ▶ r+3, signal, [pushed]

Why no slot is overwritten: what reads the slot of my call n stands before call n+1 on the main stream, hence before my signals
of call n+1. A peer ends its call n+1 behind those, and only then pushes for call n+2, the next one with that slot.

One program, which waits for other ranks only. Where a wait ran out of time, a row of NaN makes each product over rows NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.language.signal import faulted, leave, load_epoch, wait

MAX_SLICES = tl.constexpr(32)
BLOCK = 1024


@triton.jit(do_not_specialize=["rank", "width"])
def await_shards_kernel(slot, signals, control, report, rank, width, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    epoch = load_epoch(control)
    for i in tl.static_range(1, WORLD_SIZE):
        wait(signals, 1, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES, -1, control, report)
    wait(signals, 1, epoch, WORLD_SIZE * MAX_SLICES + WORLD_SIZE, -1, control, report)
    if faulted(control) != 0:
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(slot + at, float("nan"), mask=at < width)
    leave(control, epoch, 1)


def await_shards(peers: Endpoint, whole: torch.Tensor, world_size: int, rank: int) -> None:
    """Launch on the current stream; ``whole``: the slot of this call, as rows."""
    await_shards_kernel[(1,)](
        whole, peers.signals, peers.control, peers.report, rank, whole.shape[1], WORLD_SIZE=world_size, BLOCK=BLOCK, num_warps=4
    )
