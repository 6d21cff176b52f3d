"""exchange: an all-gather, reduce-scatter, all-reduce or all-to-all of what stands in memory, in one launch; beside a
library's matmul.

    x      local: the own shard (all-gather), or all R shards in a row
    out    local: all R shards; the own one of a reduce-scatter
    slot   one of two, by parity of the epoch: [R-1, size] partials of the own shard, or finished shards of the peers; an
           all-reduce has both, in that order; place i belongs to the i-th peer in order of ranks

A shard is ``size`` elements in a row. Those of an all-reduce may begin within a row of x, and the last ones may be shorter, or
empty. Who writes, who reads: a program has the same blocks of every shard. ``REDUCE``: it stores its blocks of a peer's shard
in that peer's slot; of the own shard it takes what peers stored, adds it to its own in fp32, in order of ranks, then bias and
residual if there are any, and rounds once. ``GATHER``: it stores the own shard's finished blocks in every peer's slot, and
takes theirs. Both are an all-reduce, neither is an all-to-all: blocks of a peer's shard go to that peer, and what peers stored
for this rank is taken as it is. There is no signal and no fence: data announces itself (``device/triton/self_signaling.py``).

    program p | REDUCE: push blocks of r+1, r+2, r+3 | take, add, store: own blocks; GATHER: push them to all | take theirs |

Why no slot is overwritten: every rank needs data of every peer in every call, so when my call n ends each peer has begun call
n, hence ended n-1, the last reader of the slot (and writer of its zeros) that call n+1 writes. Where the own shard is empty,
nothing comes for it, but finished shards do; a peer that has an empty one waits for mine. Two that are empty send each other
nothing.
Why nobody is stuck: a program pushes before it waits, and waits for the same program of peers.

Limits: x and out contiguous, of one dtype, in which partials travel; of all but a reduce-scatter, minus zero comes out as
zero, so that all ranks have the same bits. Sources: NCCL's LL protocol; two-shot all-reduce.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.self_signaling import expected_zero, put_marked, take_each, take_marked
from tileweave.device.triton.signal import faulted, leave_early, load_epoch
from tileweave.errors import require
from tileweave.kernels.runtime.endpoint import Endpoint
from tileweave.kernels.runtime.launch import Launches
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv

MAX_SLICES = tl.constexpr(
    32
)  # signal words of each rank: here only the report, which names a peer by one, needs them


@triton.jit
def place_of(source, reader):
    """The place of ``source`` among the peers of ``reader``."""
    return (source - (source > reader).to(tl.int32)).to(tl.int64)


@triton.jit
def push_partials(
    x, slot_table, slot_offset, at, size, total, rank, fault, WORLD_SIZE: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Elements ``at`` of every peer's shard into that peer's slot. ``fault``: as it was at the begin; then none are sent."""
    for i in tl.static_range(1, WORLD_SIZE):
        owner = (rank + i) % WORLD_SIZE
        begin = owner.to(tl.int64) * size
        mask = (at < tl.where(fault == 0, size, 0)) & (begin + at < total)
        value = tl.load(x + begin + at, mask=mask)
        put_marked(
            symm_at(slot_table, owner, dtype, 16) + slot_offset + place_of(rank, owner) * size + at,
            value,
            mask,
        )


@triton.jit
def push_finished(value, slot_table, slot_offset, at, mask, size, rank, WORLD_SIZE: tl.constexpr):
    """A block of the own shard into every peer's slot. ``slot_offset``: of finished shards."""
    for i in tl.static_range(1, WORLD_SIZE):
        peer = (rank + i) % WORLD_SIZE
        target = (
            symm_at(slot_table, peer, value.dtype, 16) + slot_offset + place_of(rank, peer) * size
        )
        put_marked(target + at, value, mask)


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(
    x, bias, residual, out, slots, slot_table, control, report, rank, slot_size, size, total, cols,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, BLOCK: tl.constexpr, REDUCE: tl.constexpr, GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """``size``: elements of a shard; ``total``: of all; ``cols``: of a row, for the bias. ``PEERS``: a power of two >= R-1."""
    SCATTER: tl.constexpr = REDUCE or not GATHER  # x has all shards
    EACH: tl.constexpr = GATHER or not REDUCE  # out has
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    epoch = load_epoch(control)
    fault = faulted(
        control
    )  # of an earlier call: then nothing is pushed, see ``matmul_all_reduce.exchange``
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    finished = slot_offset + (WORLD_SIZE - 1) * size if REDUCE else slot_offset
    dtype: tl.constexpr = x.dtype.element_ty
    own = tl.cast(rank, tl.int64) * size
    lane = tl.arange(0, BLOCK)
    if SCATTER:
        for begin in range(program * BLOCK, size, step):
            push_partials(
                x,
                slot_table,
                slot_offset,
                begin + lane,
                size,
                total,
                rank,
                fault,
                WORLD_SIZE,
                dtype,
            )
        leave_early(control, epoch, tl.num_programs(0))
    for begin in range(program * BLOCK, size, step):
        at = begin + lane
        mask = (at < size) & (own + at < total)
        if REDUCE:
            acc = tl.load(x + own + at, mask=mask, other=0.0).to(tl.float32)
            parts = slots + slot_offset + at[None, :]
            acc = take_marked(
                acc[None, :], parts, size, mask[None, :], 0, rank, begin // BLOCK, epoch, control, report, WORLD_SIZE - 1,
                MAX_SLICES,
            )  # fmt: skip
            acc = tl.reshape(acc, (BLOCK,))
            if HAS_BIAS:
                acc += tl.load(bias + (own + at) % cols, mask=mask, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                acc += tl.load(residual + own + at, mask=mask, other=0.0).to(tl.float32)
            value = acc.to(dtype)
        elif SCATTER:
            value = tl.load(x + own + at, mask=mask)
        else:
            value = tl.load(x + at, mask=mask)
        if EACH:
            value = expected_zero(value)
        if GATHER:
            push_finished(
                value,
                slot_table,
                finished,
                at,
                mask & (at < tl.where(fault == 0, size, 0)),
                size,
                rank,
                WORLD_SIZE,
            )
        if EACH:
            tl.store(out + own + at, value, mask=mask)
        else:
            tl.store(out + at, value, mask=mask)
    if EACH:
        if not SCATTER:
            leave_early(control, epoch, tl.num_programs(0))
        peer = tl.arange(0, PEERS)
        source = (peer + (peer >= rank).to(tl.int32)).to(tl.int64)[:, None] * size
        for begin in range(program * BLOCK, size, step):
            at = (begin + lane)[None, :]
            mask = (peer < WORLD_SIZE - 1)[:, None] & (at < size) & (source + at < total)
            pointers = slots + finished + peer.to(tl.int64)[:, None] * size + at
            value = take_each(
                pointers, mask, rank, begin // BLOCK, epoch, control, report, MAX_SLICES
            )
            tl.store(out + source + at, expected_zero(value), mask=mask)


WORDS = ("x", "bias", "residual", "out")  # what changes between the launches of one shape
WARPS = 8  # of all programs of an all-reduce on a multiprocessor, about
ALIGN = 8  # elements: where a shard of an all-reduce may begin


def slot_elements(size: int, world_size: int, reduce: bool, gather: bool) -> int:
    """Elements of a slot for shards of ``size`` elements."""
    return (world_size - 1) * size * max(1, reduce + gather)


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments.

    ``total``: elements of all shards, of ``size`` each. ``cols``: elements of a row.
    """

    def __init__(
        self, peers: Endpoint, world_size: int, rank: int, total: int, size: int, cols: int, num_sms: int,
        config: MatmulConfig, reduce: bool, gather: bool,
    ) -> None:  # fmt: skip
        self.peers, self.config = peers, config
        self.block = config.tile_m * config.tile_n
        beside = max(1, WARPS // config.num_warps) if reduce and gather else 1
        self.programs = min(num_sms * beside, cdiv(size, self.block))
        self.sizes = (rank, peers.slot_size, size, total, cols)
        self.constants = (
            world_size,
            triton.next_power_of_2(world_size - 1),
            self.block,
            reduce,
            gather,
        )
        self.launches = Launches(exchange_kernel, WORDS, num_warps=config.num_warps)

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Launch on the current stream."""
        held = [x, out if bias is None else bias, out if residual is None else residual, out]
        words = tuple(t.data_ptr() for t in held)
        variant = (bias is None, residual is None, *(at % 16 == 0 for at in words))

        def arguments() -> tuple[object, ...]:
            require(
                x.is_contiguous() and out.is_contiguous(),
                "rows with gaps",
                "contiguous x and out",
                "call .contiguous()",
            )
            peers = self.peers
            return (
                *held, peers.slots, peers.slot_table, peers.control, peers.report, *self.sizes, *self.constants,
                bias is not None, residual is not None,
            )  # fmt: skip

        self.launches(self.programs, variant, arguments, words)
