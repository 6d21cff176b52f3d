"""exchange: an all-gather, reduce-scatter, all-reduce or all-to-all of a finished product, in one
launch that follows cuBLAS.

    x     local: the own shard (all-gather), or all R shards in a row
    out   local: all R shards; of a reduce-scatter the own one
    slot  one of two, by parity of the epoch: [R-1, size] partial sums of the own shard, or finished
          shards of the peers; an all-reduce has both, in that order. Index i belongs to the i-th
          peer in order of ranks

A shard is ``size`` consecutive elements. Those of an all-reduce may begin inside a row of x, and
the last ones may be shorter, or empty.

Which rank writes, and which reads: a program has the same blocks of every shard. ``REDUCE``: it
stores its blocks of a peer's shard in that peer's slot. Of the own shard it takes what peers
stored, adds it to its own in fp32, in order of ranks, then bias and residual if there are any, and
rounds once. ``GATHER``: it stores the own shard's finished blocks in every peer's slot, and takes
theirs. Both are an all-reduce. Neither is an all-to-all: blocks of a peer's shard go to that peer,
and what peers stored for this rank is taken as it is. There is no signal and no fence: the data is
self-signaling (``device/triton/self_signaling.py``).

    program p | REDUCE: push blocks of r+1, r+2, r+3 | take, add, store own blocks; GATHER: push
    them
              | to all | take theirs |

Why no slot is overwritten: every rank needs data of every peer in every call. So when my call n
ends, each peer has begun call n and has ended call n-1, which was the last reader of the slot (and
writer of its zeros) that call n+1 writes. Where the own shard is empty, nothing comes for it, but
finished shards do; a peer whose shard is empty waits for mine. Two ranks with empty shards send
each other nothing.

Why no rank waits for ever: a program pushes before it waits, and waits for the same program of
peers.

Limits: x and out are contiguous and of one dtype, in which partial sums travel; minus zero comes
out as zero, except in a reduce-scatter, so that all ranks have the same bits. Sources: NCCL's LL
protocol; two-shot all-reduce.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import (
    faulted,
    leave_early,
    load_epoch,
    slots_at,
    take_each,
    take_marked,
)
from tileweave.device.triton.self_signaling import expected_zero, put_marked
from tileweave.errors import require
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv


class Tensors(NamedTuple):
    """What a call is about; ``bias`` and ``residual`` are any tensor where there is none."""

    x: Any
    bias: Any
    residual: Any
    out: Any


class Shards(NamedTuple):
    """Elements of a shard, of all shards, and of a row (for the bias)."""

    size: Any
    total: Any
    cols: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled. ``PEERS``: a power of two, at least R - 1."""

    WORLD_SIZE: int
    PEERS: int
    BLOCK: int
    REDUCE: bool
    GATHER: bool
    HAS_BIAS: bool = False
    HAS_RESIDUAL: bool = False


@triton.jit
def place_of(source, reader):
    """The place of ``source`` among the peers of ``reader``."""
    return (source - (source > reader).to(tl.int32)).to(tl.int64)


@triton.jit
def push_partials(
    x,
    peers,
    slot_offset,
    at,
    shards,
    rank,
    fault,
    WORLD_SIZE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Elements ``at`` of every peer's shard into that peer's slot. ``fault``: as it was when the
    kernel began; then none are sent."""
    for i in tl.static_range(1, WORLD_SIZE):
        owner = (rank + i) % WORLD_SIZE
        begin = owner.to(tl.int64) * shards.size
        mask = (at < tl.where(fault == 0, shards.size, 0)) & (begin + at < shards.total)
        value = tl.load(x + begin + at, mask=mask)
        slot = slots_at(peers, owner, dtype) + slot_offset
        put_marked(slot + place_of(rank, owner) * shards.size + at, value, mask)


@triton.jit
def push_finished(value, peers, slot_offset, at, mask, size, rank, WORLD_SIZE: tl.constexpr):
    """A block of the own shard into every peer's slot. ``slot_offset``: of finished shards."""
    for i in tl.static_range(1, WORLD_SIZE):
        peer = (rank + i) % WORLD_SIZE
        slot = slots_at(peers, peer, value.dtype) + slot_offset
        put_marked(slot + place_of(rank, peer) * size + at, value, mask)


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(tensors, peers, rank, shards, C: tl.constexpr):
    """See the module's docstring."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    BLOCK: tl.constexpr = C.BLOCK
    PEERS: tl.constexpr = C.PEERS
    SCATTER: tl.constexpr = C.REDUCE or not C.GATHER  # x has all shards
    EACH: tl.constexpr = C.GATHER or not C.REDUCE  # out has
    x, out, size = tensors.x, tensors.out, shards.size
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    epoch = load_epoch(peers)
    # of an earlier call: then nothing is pushed, see ``one_shot.exchange``
    fault = faulted(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    finished = slot_offset + (WORLD_SIZE - 1) * size if C.REDUCE else slot_offset
    dtype: tl.constexpr = x.dtype.element_ty
    own = tl.cast(rank, tl.int64) * size
    lane = tl.arange(0, BLOCK)
    if SCATTER:
        for begin in range(program * BLOCK, size, step):
            push_partials(
                x, peers, slot_offset, begin + lane, shards, rank, fault, WORLD_SIZE, dtype
            )
        leave_early(peers, epoch, tl.num_programs(0))
    for begin in range(program * BLOCK, size, step):
        at = begin + lane
        mask = (at < size) & (own + at < shards.total)
        if C.REDUCE:
            acc = tl.load(x + own + at, mask=mask, other=0.0).to(tl.float32)
            parts = peers.slots + slot_offset + at[None, :]
            acc = take_marked(
                peers,
                acc[None, :],
                parts,
                size,
                mask[None, :],
                0,
                rank,
                begin // BLOCK,
                epoch,
                WORLD_SIZE - 1,
            )
            acc = tl.reshape(acc, (BLOCK,))
            if C.HAS_BIAS:
                bias = tl.load(tensors.bias + (own + at) % shards.cols, mask=mask, other=0.0)
                acc += bias.to(tl.float32)
            if C.HAS_RESIDUAL:
                acc += tl.load(tensors.residual + own + at, mask=mask, other=0.0).to(tl.float32)
            value = acc.to(dtype)
        elif SCATTER:
            value = tl.load(x + own + at, mask=mask)
        else:
            value = tl.load(x + at, mask=mask)
        if EACH:
            value = expected_zero(value)
        if C.GATHER:
            sent = mask & (at < tl.where(fault == 0, size, 0))
            push_finished(value, peers, finished, at, sent, size, rank, WORLD_SIZE)
        if EACH:
            tl.store(out + own + at, value, mask=mask)
        else:
            tl.store(out + at, value, mask=mask)
    if EACH:
        if not SCATTER:
            leave_early(peers, epoch, tl.num_programs(0))
        peer = tl.arange(0, PEERS)
        source = (peer + (peer >= rank).to(tl.int32)).to(tl.int64)[:, None] * size
        for begin in range(program * BLOCK, size, step):
            at = (begin + lane)[None, :]
            mask = (peer < WORLD_SIZE - 1)[:, None] & (at < size) & (source + at < shards.total)
            pointers = peers.slots + finished + peer.to(tl.int64)[:, None] * size + at
            value = take_each(peers, pointers, mask, rank, begin // BLOCK, epoch)
            tl.store(out + source + at, expected_zero(value), mask=mask)


WORDS = tuple(f"tensors.{name}" for name in Tensors._fields)  # what changes between launches
WARPS = 8  # of all programs of an all-reduce on a multiprocessor, about
ALIGN = 8  # elements: where a shard of an all-reduce may begin


def slot_elements(size: int, world_size: int, reduce: bool, gather: bool) -> int:
    """Elements of a slot for shards of ``size`` elements."""
    return (world_size - 1) * size * max(1, reduce + gather)


def launcher(
    peers: Peers,
    world_size: int,
    rank: int,
    shards: Shards,
    num_sms: int,
    config: MatmulConfig,
    reduce: bool,
    gather: bool,
    most_programs: int | None = None,
) -> Launcher:
    """Launches for one shape, called with (x, out, bias or None, residual or None); the caller
    checks them.

    most_programs : fewer than the device has room for, where another kernel runs concurrently. The
        same on every rank.
    """
    block = config.tile_m * config.tile_n
    per_sm = max(1, WARPS // config.num_warps) if reduce and gather else 1
    choices = Choices(world_size, triton.next_power_of_2(world_size - 1), block, reduce, gather)

    def pack(
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Call:
        added = Tensors(
            x, out if bias is None else bias, out if residual is None else residual, out
        )
        words = [t.data_ptr() for t in added]

        def changing() -> dict[str, Any]:
            require(
                x.is_contiguous() and out.is_contiguous(),
                "rows with gaps",
                "contiguous x and out",
                "call .contiguous()",
            )
            chosen = choices._replace(HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None)
            return {"tensors": added, "C": chosen}

        aligned = [word % 16 == 0 for word in words]
        return Call((bias is None, residual is None, *aligned), words, changing)

    programs = min(most_programs or num_sms * per_sm, num_sms * per_sm, cdiv(shards.size, block))
    fixed = {"peers": peers, "rank": rank, "shards": shards}
    return Launcher(exchange_kernel, programs, fixed, pack, WORDS, num_warps=config.num_warps)
