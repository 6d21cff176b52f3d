"""barrier: no rank passes before every rank of the group has come, on the device, in stream order.

Needed only where a slot's address is frozen, in a CUDA graph, and its copies wait for nobody (``language/meet.py``): a gather
beside another kernel, and what copy engines pull.

==============================  =====  ==========  ================
signal (int32)                  value  notifier    waiter
==============================  =====  ==========  ================
[R * MAX_SLICES + source]       epoch  ``source``  every other rank
==============================  =====  ==========  ================

It reads the epoch of the call that follows and leaves it as it is. One program; stands in front of the call on the same
stream and must have ended before a kernel that fills the device starts, since it needs a multiprocessor of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.language.remote import symm_at
from tileweave.language.signal import load_epoch, notify, wait

MAX_SLICES = tl.constexpr(32)


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(signal_table, signals, control, report, rank, WORLD_SIZE: tl.constexpr):
    epoch = load_epoch(control)
    first = WORLD_SIZE * MAX_SLICES
    for i in tl.static_range(1, WORLD_SIZE):
        notify(symm_at(signal_table, (rank + i) % WORLD_SIZE, tl.int32, 16) + first + rank, epoch)
    for i in tl.static_range(1, WORLD_SIZE):
        wait(signals, 1, epoch, first + (rank + i) % WORLD_SIZE, -1, control, report)


def barrier(peers: Endpoint, world_size: int, rank: int) -> None:
    """Launch on the current stream."""
    barrier_kernel[(1,)](
        peers.signal_table, peers.signals, peers.control, peers.report, rank, WORLD_SIZE=world_size, num_warps=1
    )
