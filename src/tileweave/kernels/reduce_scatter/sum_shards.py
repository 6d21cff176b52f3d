"""sum_shards: wait for the partial sums that copy engines of all ranks push in this call, and add
them.

For a reduce-scatter whose matmul is one of cuBLAS for each rank's rows
(``ops/matmul/shards_by_cublas.py``): copy engines send the product for one rank while cuBLAS
computes the next. This kernel is queued after the product for the own rows.

    slot   [R, m, N]   one of two, by the host's count of calls; place s is rank s's partial sum of
                       this rank's rows, where no other rank writes; the own place is not used
    own    [m, N]      this rank's partial sum of them
    out    [m, N]      their sum in rank order in fp32, plus bias, rounded once

=====================  =====  ====================================  ==============================
signal (int32)         value  notifier                              waiter
=====================  =====  ====================================  ==============================
[source * MAX_SLICES]  epoch  ``source``'s copy engine, after its   every program
                              partial sum
[pushed]               epoch  own copy engine, after its last push  the program that leaves last
=====================  =====  ====================================  ==============================

    main stream  | rows of r+1 ┬ rows of r+2 ┬ own rows | sum_shards: wait, add |
    side stream                └▶ r+1, signal └▶ r+2, signal, [pushed]

Why no slot is overwritten: what reads the slot of my call n, this kernel, precedes my products and
signals of call n+1 on the main stream. A peer ends its call n+1 after those signals, and only then
pushes for call n+2, the next one with that slot. Once the instance was captured in a CUDA graph,
its calls all use slot 0, each with a barrier before its first product
(``kernels/runtime/barrier.py``).

Why no rank waits for ever: nothing waits before this kernel, and it waits for copies that need no
multiprocessor. All waits are bounded; after a time-out the result is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import (
    advance,
    await_pushed,
    faulted,
    last_to_leave,
    load_epoch,
)
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.kernels.all_gather.await_shards import await_source
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv

BLOCK = 2048
_CHANGING = "slot", "own", "bias", "out"


@triton.jit(do_not_specialize=["rank"])
def sum_shards_kernel(
    slot,
    own,
    bias,
    out,
    peers,
    rank,
    size,
    cols,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """``slot``: this call's; ``size``: elements of ``out``, which has ``cols`` columns."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = load_epoch(peers)
    for i in tl.static_range(1, WORLD_SIZE):
        await_source(peers, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES)
    fault = faulted(peers)
    lane = tl.arange(0, BLOCK)
    for begin in range(program * BLOCK, size, programs * BLOCK):
        at = begin + lane
        acc = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            part = slot + tl.cast(size, tl.int64) * source
            part = tl.where(source == rank, own, part)
            acc += tl.load(part + at, mask=at < size, other=0.0).to(tl.float32)
        if HAS_BIAS:
            acc += tl.load(bias + at % cols, mask=at < size, other=0.0).to(tl.float32)
        acc = tl.where(fault != 0, float("nan"), acc)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < size)
    if program == 0:
        await_pushed(peers, epoch, WORLD_SIZE)
    if last_to_leave(peers, programs):
        advance(peers, epoch, faulted(peers))


def sum_launcher(
    peers: Peers, world_size: int, rank: int, rows: int, cols: int, programs: int
) -> Launcher:
    """Launches for a result [rows, cols], called with the slot of the call, the own partial sum,
    bias or None, and out."""
    size = rows * cols

    def pack(
        slot: torch.Tensor,
        own: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Call:
        tensors = slot, own, out if bias is None else bias, out
        words = tuple(tensor.data_ptr() for tensor in tensors)

        def changing() -> dict[str, Any]:
            named: dict[str, Any] = dict(zip(_CHANGING, tensors, strict=True))
            return named | {"HAS_BIAS": bias is not None}

        return (bias is None, alignment(words)), words, changing, ()

    fixed = {"peers": peers, "rank": rank, "size": size, "cols": cols}
    fixed |= {"WORLD_SIZE": world_size, "BLOCK": BLOCK}
    count = min(programs, cdiv(size, BLOCK))
    return Launcher(sum_shards_kernel, count, fixed, pack, _CHANGING, num_warps=8)
