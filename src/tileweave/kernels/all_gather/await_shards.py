"""await_shards: the shards that copy engines of all ranks push into a slot in this call are there; then the call ends.

For an all-gather beside other kernels (``ops/matmul/concurrent_gather.py``), which may fill the device: copies need no multiprocessor.
``await_shards`` stands behind them and makes the slot whole. Or each shard is used by a kernel of its own, the own one where it
is: then ``await_shard`` stands in front of that of a peer's shard, and ``end_gather`` behind the last.

    x      [shard]      own
    slot   [R, shard]   one of two, by the host's count of calls; shard s in place s, the own one by this kernel

==============================  =====  ====================================  ==============================
signal (int32)                  value  notifier                              waiter
==============================  =====  ====================================  ==============================
[source * MAX_SLICES]           epoch  ``source``'s copy engine, behind its  ``await_shards``, or ``await_shard``
                                       shard                                 and ``end_gather``
[R * MAX_SLICES + R]            epoch  own copy engine, behind its last      who ends the call: the copies have
                                       push                                  read the epoch word, so it may move
==============================  =====  ====================================  ==============================

    main stream  ┬ a kernel of another instance | await_shards: own shard into the slot, wait | what reads the slot
    main stream  ┬ own shard | await_shard | shard of r-1 | await_shard | shard of r-2 | ... | end_gather
    side stream  └▶ shard ▶ r+1, signal | ▶ r+2, signal | ▶ r+3, signal, [pushed]

Why no slot is overwritten: what reads the slot of my call n stands before call n+1 on the main stream, hence before my signals
of call n+1. A peer ends its call n+1 behind those, and only then pushes for call n+2, the next one with that slot. So a signal
of n+2 in call n says that its rank gave this one up: a time-out. Once the instance was captured in a CUDA graph, its calls all
use slot 0, each with a barrier in front of its copies (``kernels/runtime/barrier.py``).

Programs copy a share each; the first one waits, for other ranks and the own copy engine only. After a time-out a row of NaN in
the own shard, which nobody else stores to, makes each product over rows NaN; ``end_gather`` fills what was made of shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tileweave.device.triton.meet import await_pushed
from tileweave.device.triton.signal import (
    MAX_SLICES,
    advance,
    faulted,
    last_to_leave,
    load_epoch,
    poison,
    refuse_later,
    wait,
)
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv

BLOCK = 4096


@triton.jit
def await_source(signals, control, report, epoch, word):
    """Until the shard whose signal is ``word`` is there."""
    wait(signals, 1, epoch, word, -1, control, report)
    refuse_later(
        signals, epoch + 1, word, -1, control, report
    )  # it gave us up, and was in this slot again


@triton.jit(do_not_specialize=["rank", "size", "width"])
def await_shards_kernel(
    x, slot, signals, control, report, rank, size, width, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``size``: elements of a shard, ``width``: of one of its rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = load_epoch(control)
    lane = tl.arange(0, BLOCK)
    own = slot + tl.cast(rank, tl.int64) * size
    for begin in range(program * BLOCK, size, programs * BLOCK):
        mask = begin + lane < size
        tl.store(own + begin + lane, tl.load(x + begin + lane, mask=mask), mask=mask)
    if program == 0:
        for i in tl.static_range(1, WORLD_SIZE):
            await_source(
                signals, control, report, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES
            )
        await_pushed(signals, epoch, control, report, WORLD_SIZE)
    if last_to_leave(control, programs):
        fault = faulted(control)
        if (
            fault != 0
        ):  # when all own rows have been stored; what peers still push lands in other places
            poison(own, width, BLOCK)
        advance(control, epoch, fault)


def await_shards(
    peers: Peers, x: torch.Tensor, whole: torch.Tensor, world_size: int, rank: int, programs: int
) -> None:
    """Launch at most ``programs`` on the current stream. x: the own shard [m, K]; ``whole``: this call's slot, [R m, K]."""
    await_shards_kernel[(min(programs, cdiv(x.numel(), BLOCK)),)](
        x, whole, peers.signals, peers.control, peers.report, rank, x.numel(), x.shape[1], WORLD_SIZE=world_size, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["source"])
def await_shard_kernel(signals, control, report, source):
    await_source(signals, control, report, load_epoch(control), source * MAX_SLICES)


@triton.jit(do_not_specialize=["rank", "size", "more_size"])
def end_gather_kernel(
    out, more, signals, control, report, rank, size, more_size, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``size``, ``more_size``: elements of ``out``, ``more``. Shards are there, unless a user of one could not be queued."""
    epoch = load_epoch(control)
    for i in tl.static_range(1, WORLD_SIZE):
        await_source(
            signals, control, report, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES
        )
    await_pushed(signals, epoch, control, report, WORLD_SIZE)
    if last_to_leave(control, 1):
        fault = faulted(control)
        if fault != 0:
            poison(out, size, BLOCK)
            poison(more, more_size, BLOCK)
        advance(control, epoch, fault)


class ShardLaunches:
    """Launches of ``await_shard`` and ``end_gather`` on one instance, on the current stream, a program each."""

    def __init__(self, peers: Peers, world_size: int, rank: int) -> None:
        self.peers, self.world_size, self.rank = peers, world_size, rank
        self.waits = Launches(await_shard_kernel, ("source",), num_warps=1)
        self.ends = Launches(end_gather_kernel, ("out", "more", "size", "more_size"), num_warps=8)

    def await_shard(self, source: int) -> None:
        """What is queued behind this finds the shard of rank ``source`` in the slot."""
        peers = self.peers
        self.waits(1, None, lambda: (peers.signals, peers.control, peers.report, source), (source,))

    def end_gather(self, made: Sequence[torch.Tensor]) -> None:
        """The call ends when all shards have come. ``made`` of them: one tensor or two, contiguous; NaN after a time-out."""
        out, more, peers = made[0], made[-1], self.peers
        words = (out.data_ptr(), more.data_ptr(), out.numel(), more.numel())
        variant = (
            out.dtype,
            *(at % 16 == 0 for at in words[:2]),
            *(size < 2**31 for size in words[2:]),
        )

        def arguments() -> tuple[object, ...]:
            return (
                out,
                more,
                peers.signals,
                peers.control,
                peers.report,
                self.rank,
                *words[2:],
                self.world_size,
                BLOCK,
            )

        self.ends(1, variant, arguments, words)
