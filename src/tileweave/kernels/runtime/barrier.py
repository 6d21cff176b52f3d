"""barrier: no rank passes before every rank of the group has come, on the device, in stream order.

Needed only where a CUDA graph freezes a slot's address and the copies to it wait for no meeting: a
gather that runs concurrently with another kernel, and what copy engines pull. It is the meeting of
``device/triton/meet.py`` by itself: all ranks have begun this call, hence ended the one before,
which read that slot last.

It reads the epoch of the call that it precedes, and leaves it as it is. It has one program, on the
same stream as the call: concurrently with a kernel that fills the device it might never start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.peers import load_epoch, meet
from tileweave.kernels.runtime.peers import Peers


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(peers, rank, WORLD_SIZE: tl.constexpr):
    meet(peers, rank, load_epoch(peers), -1, WORLD_SIZE)


def barrier(peers: Peers, world_size: int, rank: int) -> None:
    """Launch on the current stream."""
    barrier_kernel[(1,)](peers, rank, WORLD_SIZE=world_size, num_warps=1)
