"""await_shards: wait for the shards that copy engines of all ranks push in this call.

For an all-gather that runs concurrently with other kernels (``ops/matmul/concurrent_gather.py``),
which may fill the device: copies need no multiprocessor. ``await_shards`` is queued after those
kernels and completes the slot. Or each shard is used by a kernel of its own, the own one where it
is: then ``await_shard`` is queued before the kernel that uses a peer's shard, and ``end_gather``
after the last.

    x      [shard]      own
    slot   [R, shard]   one of two, by the host's count of calls; shard s has index s, this kernel
                        writes the own one

=====================  =====  ====================================  ===========================
signal (int32)         value  notifier                              waiter
=====================  =====  ====================================  ===========================
[source * MAX_SLICES]  epoch  ``source``'s copy engine, after its   ``await_shards``, or
                              shard                                 ``await_shard`` and
                                                                    ``end_gather``
[R * MAX_SLICES + R]   epoch  own copy engine, after its last push  the kernel that ends the
                                                                    call: the copies have read
                                                                    the epoch, so it may move
=====================  =====  ====================================  ===========================

    main stream  ┬ a kernel of another instance | await_shards: own shard, wait | reader of the slot
    main stream  ┬ own shard | await_shard | shard of r-1 | await_shard | ... | end_gather
    side stream  └▶ shard ▶ r+1, signal | ▶ r+2, signal | ▶ r+3, signal, [pushed]

Why no slot is overwritten: what reads the slot of my call n precedes call n+1 on the main stream,
hence precedes my signals of call n+1. A peer ends its call n+1 after those signals, and only then
pushes for call n+2, the next one with that slot. So a signal of n+2 in call n says that its rank
gave this call up: a time-out. Once the instance was captured in a CUDA graph, its calls all use
slot 0, each with a barrier before its copies (``kernels/runtime/barrier.py``).

Why no rank waits for ever: programs copy a part of the shard each; the first one waits, for other
ranks and for the own copy engine only. After a time-out a row of NaN in the own shard, which no
other rank stores to, makes each product over rows NaN; ``end_gather`` fills the results with NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import (
    advance,
    await_pushed,
    faulted,
    last_to_leave,
    load_epoch,
    refuse_later,
    wait,
)
from tileweave.device.triton.signal import MAX_SLICES, poison
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv

BLOCK = 4096


@triton.jit
def await_source(peers, epoch, index):
    """Wait for the shard whose signal has this index."""
    wait(peers, index, epoch)
    # a signal of the next call but one: the rank gave this call up, and wrote to this slot again
    refuse_later(peers, epoch + 1, index, -1)


@triton.jit(do_not_specialize=["rank", "size", "width"])
def await_shards_kernel(
    x, slot, peers, rank, size, width, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """``size``: elements of a shard; ``width``: elements of one of its rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = load_epoch(peers)
    lane = tl.arange(0, BLOCK)
    own = slot + tl.cast(rank, tl.int64) * size
    for begin in range(program * BLOCK, size, programs * BLOCK):
        mask = begin + lane < size
        tl.store(own + begin + lane, tl.load(x + begin + lane, mask=mask), mask=mask)
    if program == 0:
        for i in tl.static_range(1, WORLD_SIZE):
            await_source(peers, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES)
        await_pushed(peers, epoch, WORLD_SIZE)
    if last_to_leave(peers, programs):
        fault = faulted(peers)
        # all own rows have been stored; what peers still push goes to other rows
        if fault != 0:
            poison(own, width, BLOCK)
        advance(peers, epoch, fault)


@triton.jit(do_not_specialize=["source"])
def await_shard_kernel(peers, source):
    await_source(peers, load_epoch(peers), source * MAX_SLICES)


@triton.jit(do_not_specialize=["rank", "size", "more_size"])
def end_gather_kernel(
    out, more, peers, rank, size, more_size, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """``size``, ``more_size``: elements of ``out`` and ``more``. The shards have arrived, unless
    one of the kernels that use them could not be queued."""
    epoch = load_epoch(peers)
    for i in tl.static_range(1, WORLD_SIZE):
        await_source(peers, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES)
    await_pushed(peers, epoch, WORLD_SIZE)
    if last_to_leave(peers, 1):
        fault = faulted(peers)
        if fault != 0:
            poison(out, size, BLOCK)
            poison(more, more_size, BLOCK)
        advance(peers, epoch, fault)


class ShardLaunches(NamedTuple):
    """Launches on one instance for shards of one shape, on the current stream. All but
    ``await_all`` have one program.

    await_all : called with the own shard ``[m, K]`` and this call's slot ``[R m, K]``: stores the
        one in the other, and waits for all other shards.

    await_shard : called with the rank of a shard: kernels queued later find the shard in the slot.

    end_gather : called with the tensors that were made of the shards, one or two, contiguous: the
        call ends when all shards have arrived. After a time-out the tensors are NaN.
    """

    await_all: Launcher
    await_shard: Launcher
    end_gather: Launcher


def shard_launches(
    peers: Peers, world_size: int, rank: int, shape: Sequence[int], programs: int
) -> ShardLaunches:
    """The launches for shards of ``shape`` [m, K], with at most ``programs`` programs."""
    size, width = shape[0] * shape[1], shape[1]

    def pack_all(x: torch.Tensor, whole: torch.Tensor) -> Call:
        words = x.data_ptr(), whole.data_ptr()
        aligned = words[0] % 16 == 0, words[1] % 16 == 0
        return aligned, words, lambda: {"x": x, "slot": whole}, ()

    def pack_wait(source: int) -> Call:
        return None, (source,), lambda: {"source": source}, ()

    def pack_end(made: Sequence[torch.Tensor]) -> Call:
        out, more = made[0], made[-1]
        words = (out.data_ptr(), more.data_ptr(), out.numel(), more.numel())
        variant = (
            out.dtype,
            words[0] % 16 == 0,
            words[1] % 16 == 0,
            words[2] < 2**31,
            words[3] < 2**31,
        )
        return variant, words, lambda: dict(zip(changing, (out, more, *words[2:]), strict=True)), ()

    fixed = {"peers": peers, "rank": rank, "WORLD_SIZE": world_size, "BLOCK": BLOCK}
    changing = ("out", "more", "size", "more_size")
    count = min(programs, cdiv(size, BLOCK))
    sizes = {**fixed, "size": size, "width": width}
    return ShardLaunches(
        Launcher(await_shards_kernel, count, sizes, pack_all, ("x", "slot"), num_warps=8),
        Launcher(await_shard_kernel, 1, {"peers": peers}, pack_wait, ("source",), num_warps=1),
        Launcher(end_gather_kernel, 1, fixed, pack_end, changing, num_warps=8),
    )
