"""exchange: an all-gather, or a reduce-scatter or all-reduce of a finished product, in one launch
before or after cuBLAS.

    x     local: the own shard (all-gather), or all R shards
    out   local: all R shards; of a reduce-scatter the own one
    slot  one of two, by parity of the epoch: [R-1, shard] partial sums of the own shard, or
          finished shards of the peers; an all-reduce has both, in that order. Index i belongs to
          the i-th peer in order of ranks

A shard is a rectangle of rows and columns (:class:`Shards`): of an all-reduce some columns of all
rows, of which the last shard may have fewer, or none. Programs take blocks of it.

Which rank writes, and which reads: a program has the same blocks of every shard. ``REDUCE``: it
stores its blocks of a peer's shard in that peer's slot. Of the own shard it takes what peers
stored, adds it to its own in fp32, in order of ranks, then bias and residual if there are any, and
rounds once. ``GATHER``: it stores the own shard's finished blocks in every peer's slot, and takes
theirs. Both are an all-reduce. There is no signal and no fence: the data is self-signaling
(``device/triton/self_signaling.py``).

``ONE_SHOT``, with ``REDUCE``, is an all-reduce, too: every rank has the whole for its shard. All
ranks add in order of ranks, so that they have the same bits; from three ranks on the own partial
sums take that order through a place in the own slot, [R, shard].

    program p | REDUCE: push blocks of r+1, r+2, r+3 | take, add, store own blocks; GATHER: push
    them
              | to all | take theirs |

``SPLIT``, of an all-gather: a shard has two parts, FP8 data and its scales, which are sent as words
of 32 bits; out has the first parts of all ranks, then the second ones.

Why no slot is overwritten: every rank needs data of every peer in every call. So when my call n
ends, each peer has begun call n and has ended call n-1, which was the last reader of the slot (and
writer of its zeros) that call n+1 writes. Where the own shard is empty, nothing comes for it, but
finished shards do; a peer whose shard is empty waits for mine. Two ranks with empty shards would
send each other nothing: so few columns are summed in one shot.

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
from tileweave.device.triton.self_signaling import expected_zero, put_marked, unmarked
from tileweave.errors import require
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv


class Tensors(NamedTuple):
    """What a call is about; ``bias`` and ``residual`` are any tensor where there is none.
    ``SPLIT``: the second part of the own shard is in ``bias``."""

    x: Any
    bias: Any
    residual: Any
    out: Any


class Shards(NamedTuple):
    """Where the shards of ranks are.

    rows, cols : of a shard.
    width : columns of x and of the result, elements from row to row.
    col_step : columns from one rank's shard to the next one's; 0 where each has all.
    x_step, out_step : elements from shard to shard in x, and in the result and a residual.
    split : elements of the first part of a shard (``SPLIT``).
    """

    rows: Any
    cols: Any
    width: Any
    col_step: Any
    x_step: Any
    out_step: Any
    split: Any = 0

    @classmethod
    def in_a_row(cls, size: int, split: int = 0) -> Shards:
        """``size`` consecutive elements each, of which the first ``split`` are one part if not 0;
        x is the own shard."""
        return cls(1, size, size, 0, 0, size, split)

    @classmethod
    def of_rows(cls, rows: int, cols: int) -> Shards:
        """Of a matrix [R * rows, cols]: the result is the own rows."""
        return cls(rows, cols, cols, 0, rows * cols, 0)

    @classmethod
    def of_columns(cls, rows: int, cols: int, world_size: int) -> Shards:
        """Of a matrix [rows, cols]: each rank has as many of the columns, the last ones fewer or
        none, and the result is all."""
        own = cdiv(cdiv(cols, world_size), ALIGN) * ALIGN
        if own * (world_size - 1) >= cols:
            own = cdiv(cols, world_size)
        return cls(rows, own, cols, own, own, own)

    @classmethod
    def of_all(cls, rows: int, cols: int) -> Shards:
        """A matrix [rows, cols] that is the shard of every rank: for one shot."""
        return cls(rows, cols, cols, 0, 0, 0)


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PEERS : a power of two, at least R - 1.
    ROWS, COLS : of a block.
    OWN_PLACE : the own partial sums go through the own slot.
    """

    WORLD_SIZE: int
    PEERS: int
    ROWS: int
    COLS: int
    REDUCE: bool
    GATHER: bool
    ONE_SHOT: bool = False
    OWN_PLACE: bool = False
    HAS_BIAS: bool = False
    HAS_RESIDUAL: bool = False
    SPLIT: bool = False


@triton.jit
def place_of(source, reader):
    """The place of ``source`` among the peers of ``reader``."""
    return (source - (source > reader).to(tl.int32)).to(tl.int64)


@triton.jit
def block_of(number, lane, shards, C: tl.constexpr):
    """Rows and columns of the elements of a block."""
    ROWS: tl.constexpr = C.ROWS
    COLS: tl.constexpr = C.COLS
    across = tl.cdiv(shards.cols, COLS)
    row = (number // across) * ROWS + lane // COLS
    return row, (number % across) * COLS + lane % COLS


@triton.jit
def inside(row, col, source, shards):
    """Whether an element is in the shard of ``source``."""
    return (
        (row < shards.rows) & (col < shards.cols) & (source * shards.col_step + col < shards.width)
    )


@triton.jit
def push_partials(
    x, peers, slot_offset, row, col, shards, rank, fault, C: tl.constexpr, dtype: tl.constexpr
):
    """Elements of every peer's shard into that peer's slot. ``fault``: as it was when the kernel
    began; then none are sent."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    FIRST: tl.constexpr = 0 if C.OWN_PLACE else 1
    size = tl.cast(shards.rows, tl.int64) * shards.cols
    for i in tl.static_range(FIRST, WORLD_SIZE):
        owner = (rank + i) % WORLD_SIZE
        mask = inside(row, col, owner, shards) & (row < tl.where(fault == 0, shards.rows, 0))
        begin = owner.to(tl.int64) * shards.x_step
        value = tl.load(x + begin + row.to(tl.int64) * shards.width + col, mask=mask)
        slot = slots_at(peers, owner, dtype) + slot_offset
        place = rank.to(tl.int64) if C.OWN_PLACE else place_of(rank, owner)
        put_marked(slot + place * size + row * shards.cols + col, value, mask)


@triton.jit
def push_finished(value, peers, slot_offset, at, mask, size, rank, WORLD_SIZE: tl.constexpr):
    """A block of the own shard into every peer's slot. ``slot_offset``: of finished shards."""
    for i in tl.static_range(1, WORLD_SIZE):
        peer = (rank + i) % WORLD_SIZE
        slot = slots_at(peers, peer, value.dtype) + slot_offset
        put_marked(slot + place_of(rank, peer) * size + at, value, mask)


@triton.jit
def reduced(
    tensors, peers, slot_offset, row, col, mask, shards, rank, unit, epoch, C: tl.constexpr
):
    """Elements of the own shard, summed over ranks, with bias and residual; in fp32."""
    x, own = tensors.x, rank.to(tl.int64)
    BLOCK: tl.constexpr = C.ROWS * C.COLS
    PLACES: tl.constexpr = C.WORLD_SIZE if C.OWN_PLACE else C.WORLD_SIZE - 1
    if C.OWN_PLACE:
        acc = tl.zeros((BLOCK,), tl.float32)
        skip = PLACES
    else:
        begin = x + own * shards.x_step + row.to(tl.int64) * shards.width
        acc = tl.load(begin + col, mask=mask, other=0.0).to(tl.float32)
        skip = rank
    acc = take_marked(
        peers,
        acc[None, :],
        peers.slots + slot_offset + (row * shards.cols + col)[None, :],
        tl.cast(shards.rows, tl.int64) * shards.cols,
        mask[None, :],
        0,
        skip,
        unit,
        epoch,
        PLACES,
    )
    acc = tl.reshape(acc, (BLOCK,))
    if C.HAS_BIAS:
        bias = tensors.bias + own * shards.col_step
        acc += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    if C.HAS_RESIDUAL:
        residual = tensors.residual + own * shards.out_step + row.to(tl.int64) * shards.width
        acc += tl.load(residual + col, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def load_own(tensors, row, col, mask, shards, C: tl.constexpr):
    """Elements of the own shard of an all-gather."""
    if C.SPLIT:
        first = tl.load(tensors.x + col, mask=mask & (col < shards.split), other=0.0)
        second = tensors.bias + (col - shards.split)
        return tl.where(
            col < shards.split,
            first,
            tl.load(second, mask=mask & (col >= shards.split), other=0.0),
        )
    else:
        return tl.load(tensors.x + row.to(tl.int64) * shards.width + col, mask=mask)


@triton.jit
def result_of(out, source, row, col, shards, C: tl.constexpr):
    """Where the result has elements of the shard of ``source``."""
    if C.SPLIT:
        WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
        first = source.to(tl.int64) * shards.split
        second = source.to(tl.int64) * (shards.cols - shards.split)
        second += tl.cast(shards.split, tl.int64) * (WORLD_SIZE - 1)
        return out + tl.where(col < shards.split, first, second) + col
    else:
        target = out + source.to(tl.int64) * shards.out_step
        return target + row.to(tl.int64) * shards.width + col


@triton.jit
def settled(value, C: tl.constexpr):
    """``value`` with one zero only, so that all ranks have the same bits."""
    if C.SPLIT:
        return unmarked(value)
    else:
        return expected_zero(value)


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(tensors, peers, rank, shards, C: tl.constexpr):
    """See the module's docstring."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    ROWS: tl.constexpr = C.ROWS
    COLS: tl.constexpr = C.COLS
    PEERS: tl.constexpr = C.PEERS
    PLACES: tl.constexpr = WORLD_SIZE if C.OWN_PLACE else WORLD_SIZE - 1
    x, out = tensors.x, tensors.out
    program, step = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(shards.rows, ROWS) * tl.cdiv(shards.cols, COLS)
    size = tl.cast(shards.rows, tl.int64) * shards.cols
    epoch = load_epoch(peers)
    # of an earlier call: then nothing is pushed, see ``one_shot.py``
    fault = faulted(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    finished = slot_offset + PLACES * size if C.REDUCE else slot_offset
    dtype: tl.constexpr = x.dtype.element_ty
    own = rank.to(tl.int64)
    lane = tl.arange(0, ROWS * COLS)
    if C.REDUCE:
        for number in range(program, blocks, step):
            row, col = block_of(number, lane, shards, C)
            push_partials(x, peers, slot_offset, row, col, shards, rank, fault, C, dtype)
        leave_early(peers, epoch, step)
    for number in range(program, blocks, step):
        row, col = block_of(number, lane, shards, C)
        mask = inside(row, col, rank, shards)
        if C.REDUCE:
            acc = reduced(
                tensors, peers, slot_offset, row, col, mask, shards, rank, number, epoch, C
            )
            value = acc.to(dtype)
        else:
            value = load_own(tensors, row, col, mask, shards, C)
        if C.GATHER or C.ONE_SHOT:
            value = settled(value, C)
        if C.GATHER:
            sent = mask & (row < tl.where(fault == 0, shards.rows, 0))
            at = row * shards.cols + col
            push_finished(value, peers, finished, at, sent, size, rank, WORLD_SIZE)
        tl.store(result_of(out, own, row, col, shards, C), value, mask=mask)
    if C.GATHER:
        if not C.REDUCE:
            leave_early(peers, epoch, step)
        peer = tl.arange(0, PEERS)[:, None]
        source = peer + (peer >= rank).to(tl.int32)
        for number in range(program, blocks, step):
            row, col = block_of(number, lane, shards, C)
            row, col = row[None, :], col[None, :]
            mask = (peer < WORLD_SIZE - 1) & inside(row, col, source, shards)
            pointers = peers.slots + finished + peer.to(tl.int64) * size + row * shards.cols + col
            value = take_each(peers, pointers, mask, rank, number, epoch)
            target = result_of(out, source, row, col, shards, C)
            tl.store(target, settled(value, C), mask=mask)


WORDS = tuple(f"tensors.{name}" for name in Tensors._fields)  # what changes between launches
# Of all programs on a multiprocessor. Local memory limits large exchanges: with 8 warps an
# all-reduce of 2048 x 8192 on two H200 took 139 us, with 32 warps 115.
WARPS = 32
ALIGN = 16  # elements: where a shard of an all-reduce begins


def slot_elements(
    shards: Shards, world_size: int, reduce: bool, gather: bool, one_shot: bool = False
) -> int:
    """Elements of a slot."""
    places = (world_size - 1) * max(1, reduce + gather) + _own_place(one_shot, world_size)
    return places * shards.rows * shards.cols


def _own_place(one_shot: bool, world_size: int) -> bool:
    """Of two numbers the sum does not depend on the order."""
    return one_shot and world_size > 2


def launcher(
    peers: Peers,
    world_size: int,
    rank: int,
    shards: Shards,
    num_sms: int,
    config: MatmulConfig,
    reduce: bool,
    gather: bool,
) -> Launcher:
    """Launches for one shape, called with (x, out, bias or None, residual or None); the caller
    checks them. Blocks have as many elements as the tile of ``config``. Of shards of two parts the
    second one is given as bias.

    reduce, gather : what is done; with ``config.shots`` 1 and ``reduce`` alone, for shards
        :meth:`Shards.of_all`, an all-reduce.
    """
    rows = min(config.tile_m, triton.next_power_of_2(shards.rows))
    cols = config.tile_m * config.tile_n // rows
    one_shot = reduce and not gather and shards.x_step == 0
    choices = Choices(
        world_size,
        triton.next_power_of_2(world_size - 1),
        rows,
        cols,
        reduce,
        gather,
        one_shot,
        _own_place(one_shot, world_size),
        SPLIT=shards.split > 0,
    )

    def pack(
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Call:
        start, to = x.data_ptr(), out.data_ptr()
        words = (
            start,
            to if bias is None else bias.data_ptr(),
            to if residual is None else residual.data_ptr(),
            to,
        )

        def changing() -> dict[str, Any]:
            require(
                x.is_contiguous() and out.is_contiguous(),
                "rows with gaps",
                "contiguous x and out",
                "call .contiguous()",
            )
            chosen = choices._replace(
                HAS_BIAS=bias is not None and not choices.SPLIT, HAS_RESIDUAL=residual is not None
            )
            added = Tensors(
                x, out if bias is None else bias, out if residual is None else residual, out
            )
            return {"tensors": added, "C": chosen}

        return (bias is None, residual is None, alignment(words)), words, changing, ()

    blocks = cdiv(shards.rows, rows) * cdiv(shards.cols, cols)
    programs = min(num_sms * max(1, WARPS // config.num_warps), blocks)
    fixed = {"peers": peers, "rank": rank, "shards": shards}
    return Launcher(exchange_kernel, programs, fixed, pack, WORDS, num_warps=config.num_warps)
