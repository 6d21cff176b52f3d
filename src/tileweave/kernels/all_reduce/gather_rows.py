"""gather_rows: an all-reduce in chunks of rows, by a reduce-scatter and copy engines.

Each chunk of rows is a ``matmul_reduce_scatter`` by copy engines (``kernels/reduce_scatter``), an
instance of its own with its own proof. It stores this rank's rows of the chunk in ``out``, and a
second time in a slot. When all ranks have done that, copy engines of every rank *pull* the rows of
its peers out of their slots into ``out``, while the next chunk is multiplied::

    main stream  | chunk 0 | all reduced | chunk 1 | all reduced | ... | join | end |
    side stream                          | pull 0 ............ | pull 1 ... |

    slot   [M/R, N]   one of two, by the host's count of calls: rows that this rank has reduced,
                      chunk after chunk; peers read them
    out    [M, N]     ordinary memory

=========================  =====  ==========================  ==============
signal (int32)             value  notifier                    waiter
=========================  =====  ==========================  ==============
[R * MAX_SLICES + source]  epoch  ``source``, in its          the same kernel
                                  ``all_reduced_kernel``      of every rank
=========================  =====  ==========================  ==============

Each chunk has an epoch of this instance. ``all_reduced_kernel`` follows the reduce-scatter of its
chunk on the stream, so its signal follows the rows; pulls follow it by an event.

Why no slot is overwritten: a rank's pulls of call n end before its call n ends (the join), and its
call n+1 begins after that. In my call n+1 I wait for a signal of each peer, which it sends in its
call n+1, so it has ended its pulls of call n. My call n+2, which writes the slot of call n, comes
later. Once the instance was captured in a CUDA graph, its calls all use slot 0; each begins with an
``all_reduced_kernel`` of its own, after which every rank has ended the call before.

Rows that two chunks have (the last one may begin a few rows early, so that each rank reduces as
many) are those of the last chunk on every rank: other ranks' copies of the chunk before leave them
out, and on the rank that reduced them there the pull of the last chunk comes later on its stream.
So all ranks have the same bits.

A rank that gave a call up may go on without this one, and overwrite what this one still pulls. So
after the pulls, the end of a call looks whether a peer is further than it can be: at most in its
next call, and waiting there for the signal of this rank. That counts as a time-out.

Why no rank waits for ever: each rank signals before it waits, in kernels of one program that wait
for nothing else; pulls wait for no rank. After a time-out the end of the call fills the result with
NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import come, faulted, leave, load_epoch, refuse_later, wait
from tileweave.device.triton.signal import MAX_SLICES, MEETING_US
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers

BLOCK = 4096


@triton.jit(do_not_specialize=["rank"])
def all_reduced_kernel(peers, rank, WORLD_SIZE: tl.constexpr):
    """Every rank has reduced its rows of the chunk before this kernel ends."""
    epoch = load_epoch(peers)
    come(peers, rank, epoch, WORLD_SIZE)
    for i in tl.static_range(1, WORLD_SIZE):
        source = WORLD_SIZE * MAX_SLICES + (rank + i) % WORLD_SIZE
        wait(peers, source, epoch, -1, 1, MEETING_US)
    leave(peers, epoch, 1)


@triton.jit(do_not_specialize=["rank"])
def end_kernel(out, peers, rank, size, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """After the pulls: NaN in all of ``out`` if what they read may be of no chunk, or of a later
    call."""
    following = load_epoch(peers)
    for i in tl.static_range(1, WORLD_SIZE):
        refuse_later(peers, following, WORLD_SIZE * MAX_SLICES + (rank + i) % WORLD_SIZE, -1)
    tl.debug_barrier()
    if faulted(peers) != 0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        while begin < size:
            at = begin + tl.arange(0, BLOCK)
            tl.store(out + at, float("nan"), mask=at < size)
            begin += step


class RowLaunches(NamedTuple):
    """Launches on one instance, on the current stream.

    all_reduced : after the launch that reduces a chunk; pulls follow.
    end : called with ``out``, contiguous, after all pulls.
    """

    all_reduced: Launcher
    end: Launcher


def row_launches(peers: Peers, world_size: int, rank: int, size: int, num_sms: int) -> RowLaunches:
    """The launches of calls whose result has ``size`` elements."""

    def pack_chunk() -> Call:
        return Call(None, (), dict)

    def pack_end(out: torch.Tensor) -> Call:
        def changing() -> dict[str, Any]:
            return {"out": out}

        return Call(out.data_ptr() % 16 == 0, (out.data_ptr(),), changing)

    fixed = {"peers": peers, "rank": rank, "WORLD_SIZE": world_size}
    end = {**fixed, "size": size, "BLOCK": BLOCK}
    return RowLaunches(
        Launcher(all_reduced_kernel, 1, fixed, pack_chunk, (), num_warps=1),
        Launcher(end_kernel, num_sms, end, pack_end, ("out",), num_warps=8),
    )
