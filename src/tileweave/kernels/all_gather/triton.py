"""all_gather_matmul: out[M, N/R] = gather(x)[M, K] @ w[N/R, K].T + bias, in one launch; no tile waits for a barrier.

    x     [m, K]       own shard, m = M/R; read where it is
    slot  [R-1, m, K]  one of two, by parity of the epoch; place i holds the shard of rank-1-i
    w     [N/R, K]     out [M, N/R]     gathered [M, K] if asked for

Who writes, who reads. Rank r's shard goes into its own place of each peer's slot, where nobody else writes. Either the copy
engines push it (``transport="copy_engine"``: one chunk, one signal for each peer), or the first ``num_producers``
programs of this kernel do (``"sm"``: ``NUM_SLICES`` slices, one signal each). A tile waits for the shards its rows are in.

==================  =====  =====================================  ==========================================
signal (int32)      value  notifier                               waiter
==================  =====  =====================================  ==========================================
[source, slice]     epoch  rank ``source``, behind that slice     tiles with rows of that source
[met, source]       epoch  program 0 of ``source``                program 0 of every rank ("copy_engine")
counter [gate]      1      program 0, when all ranks have met     own copy engine, before its first push
[pushed] (own)      epoch  own copy engine, behind its last push  the last program, before gate and epoch move
==================  =====  =====================================  ==========================================

[source, slice] is word ``source * MAX_SLICES + slice``; [met] and [pushed] follow all of these (``device/triton/meet.py``). The gate
is the counter behind those of cut tiles.

    rank r   | push to r+1 | push to r+2 | push to r+3 |             (copy engines begin together: ``device/triton/meet.py``)
    tiles    | own shard ......... | rank r-1 ......... | rank r-2 ......... | rank r-3 ......... | cut tiles |
                                   ^ wait, once a tile; long arrived

Why no slot is overwritten: every rank signals every peer in every call and each source's rows are in some tile, so when
my call n ends I have call n's signals of all peers: each has begun call n, hence ended n-1, the last reader of the slot
that call n+1 writes. It leans on stream order. Once an instance was captured in a CUDA graph, its copy-engine calls all use
slot 0: the copies of call n go when all ranks have met in it, hence ended n-1, which read that slot last. Since ranks meet, a
copy engine's signal is of this very call; one of a later call says that its rank gave this one up: a time-out (``EXACT``).

Why nobody is stuck: producers push before they wait, and are the lowest programs (they start first). Copy engines wait for the
gate only, which program 0 opens before it waits for a tile. Tiles wait for producers or copy engines of other ranks (where
``SPANS``, for own producers, too), owners of cut tiles for lower programs, the last program for the own copy engine. Under the
interpreter one program is the producer and runs first.

Waves: programs take whole tiles in turn; tiles that do not fill a last wave are cut along K (``device/triton/tiles.py``).
Small shards: where a tile is taller than a shard (``SPANS``, only ``"sm"``) a slot has all R shards in rank order, the own
one too, and is signalled by this rank to itself: then one load fetches a tile's rows.

Limits: x contiguous along K, w along K or (``DEPTH_FIRST``, as backward reads it) along N; fp32
accumulation; cut tiles are summed in a fixed order.
Sources: FLUX (arXiv 2406.06858) for tile-level waits and order; stream-K (arXiv 2301.03598) for the tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from tileweave.device.triton.matmul import give_part, matmul_tile, take_parts
from tileweave.device.triton.meet import await_pushed, meet
from tileweave.device.triton.remote import get, put_all
from tileweave.device.triton.signal import (
    MAX_SLICES,
    consume_token,
    count_in,
    faulted,
    leave,
    load_epoch,
    notify_all,
    wait,
)
from tileweave.device.triton.tiles import Tiles, part_range, place, segment, share_of, unit_range
from tileweave.device.triton.trace import label, stamp
from tileweave.kernels.all_to_all.gather_triton import copy_exchanged, multiply_sources, push_parts
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, slice_bounds

PUSH_BLOCK = 2048  # elements that a producer moves at once: 16 bytes a thread with 8 warps


@triton.jit
def push_shard(
    x, slot_table, signal_table, rank, slot_offset, size, slice_size, epoch, program, num_producers, trace,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Producer: push this program's slices of the own shard to every peer, and signal each."""
    for piece in range(program, NUM_SLICES, num_producers):
        stamp(trace, piece, 0, TRACE)
        begin = piece * slice_size
        end = tl.minimum(begin + slice_size, size)
        put_all(slot_table, rank, WORLD_SIZE, slot_offset, size, x, begin, end, SPANS, BLOCK)
        notify_all(signal_table, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, SPANS)
        stamp(trace, piece, 1, TRACE)
        label(trace, piece, piece, TRACE)


@triton.jit
def wait_sources(
    signals, first_row, row_limit, rows, rank, epoch, tile, control, report,
    TILE_M: tl.constexpr, NUM_SLICES: tl.constexpr, SPANS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Wait for every shard that rows [first_row, first_row + TILE_M) are in and that is not read from x. Returns a token."""
    token = tl.cast(0, tl.int32)
    last_row = tl.minimum(first_row + TILE_M, row_limit) - 1
    for source in range(first_row // rows, last_row // rows + 1):
        if SPANS or source != rank:
            token = wait(
                signals, NUM_SLICES, epoch, source * MAX_SLICES, tile, control, report, EXACT=EXACT
            )
    return token


@triton.jit
def row_pointers(
    x, slot, first_row, row_limit, rows, depth, x_pitch, rank,
    WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile's rows: in ``x`` (rows ``x_pitch`` apart) for the own shard, else in the slot. Rows past the limit
    repeat the last."""
    row = tl.minimum(first_row + tl.arange(0, TILE_M), row_limit - 1)
    if SPANS:
        pointers = slot + row.to(tl.int64) * depth
    else:
        source = first_row // rows
        within = (row - source * rows).to(tl.int64) * tl.where(source == rank, x_pitch, depth)
        place = (rank + WORLD_SIZE - source - 1) % WORLD_SIZE
        remote = place.to(tl.int64) * rows * depth
        if is_hip():  # its pointer analysis in Triton 3.6 cannot choose between two bases: go from one to the other
            apart = (x.to(tl.int64) - slot.to(tl.int64)) // (
                x.dtype.element_ty.primitive_bitwidth // 8
            )
            pointers = slot + tl.where(source == rank, apart, remote) + within
        else:
            pointers = (
                tl.where(source == rank, x, slot + remote) + within
            )  # scalars: keeps the alignment known
    return pointers


@triton.jit
def copy_gathered(
    x, slot, gathered, signals, rank, size, share, program, epoch, control, report,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Hand the gathered input back: each program copies its share of every shard, locally."""
    begin = program * share
    end = tl.minimum(begin + share, size)
    get(gathered + rank.to(tl.int64) * size, x, begin, end, BLOCK)
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        wait(signals, NUM_SLICES, epoch, source * MAX_SLICES, -1, control, report, EXACT=EXACT)
        place = source if SPANS else step - 1
        get(
            gathered + source.to(tl.int64) * size,
            slot + place.to(tl.int64) * size,
            begin,
            end,
            BLOCK,
        )


@triton.jit
def store_tile(
    acc, out, bias, first_row, row_limit, tile_col, cols, control,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Epilogue: bias, rounding once, masked store; NaN if a wait of this rank ran out of time."""
    row = first_row + tl.arange(0, TILE_M)
    col = tile_col * TILE_N + tl.arange(0, TILE_N)
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(faulted(control) != 0, float("nan"), acc)
    mask = (row < row_limit)[:, None] & (col < cols)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * cols + col[None, :],
        acc.to(out.dtype.element_ty),
        mask=mask,
    )


UNSPECIALIZED = [
    "rank", "slot", "num_producers", "num_tiles", "num_segments", "band_sources", "lead", "team", "tile_rows", "tile_cols",
    "k_blocks",
    "max_units", "chunk_rows", "num_chunks",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_kernel(
    x, w, bias, out, gathered, slots, partials, counters,
    slot_table, signal_table, signals, control, report, trace,
    rank, slot, slot_size, rows, cols, depth, stride_w, slice_size, share_size, num_producers,
    num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols, k_blocks, max_units,
    x_step, x_pitch, chunk_rows, num_chunks,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, PUSH: tl.constexpr, PUSH_BLOCK: tl.constexpr,
    SPANS: tl.constexpr, SPLIT_TAIL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATHERED: tl.constexpr, TRACE: tl.constexpr,
    EXCHANGE: tl.constexpr, GATHER_K: tl.constexpr, DEPTH_FIRST: tl.constexpr,
):  # fmt: skip
    """Dispatch the roles; see the module's docstring for the protocol, ``kernels/all_to_all/gather_triton.py`` for ``EXCHANGE``, ``GATHER_K``.

    ``slot``: the one that copy engines write; a push (``PUSH``) takes it from the epoch. In elements: ``slot_size``;
    ``stride_w``, from line to line of w; ``slice_size``, which a producer pushes between two signals; ``share_size``, which
    each program copies of each shard into ``gathered``. ``num_tiles`` to ``k_blocks``: of ``TileSchedule``; ``x_step`` to
    ``num_chunks``: of ``Parts``. ``max_units``: rows of ``trace`` that a program has.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * slot_size
    if PUSH:
        if program < num_producers:
            if EXCHANGE:
                push_parts(
                    x, slot_table, signal_table, rank, slot_offset, rows, depth, x_step, x_pitch, slice_size, epoch, program,
                    num_producers, trace, WORLD_SIZE, NUM_SLICES, SPANS, PUSH_BLOCK, TRACE,
                )  # fmt: skip
            else:
                push_shard(
                    x, slot_table, signal_table, rank, slot_offset, rows * depth, slice_size, epoch, program, num_producers,
                    trace, WORLD_SIZE, NUM_SLICES, SPANS, PUSH_BLOCK, TRACE,
                )  # fmt: skip
    elif program == 0:
        meet(signal_table, signals, rank, epoch, -1, control, report, WORLD_SIZE)
        count_in(counters + num_segments * num_programs)
    own = x
    if EXCHANGE:
        own = x + rank.to(tl.int64) * x_step
    record = NUM_SLICES + program * max_units
    tiles = Tiles(
        0 if GATHER_K else rank, 1 if GATHER_K else WORLD_SIZE, rows, TILE_M, GROUP_M, num_tiles, num_segments, band_sources,
        lead, team, tile_rows, tile_cols, k_blocks, SPLIT_TAIL,
    )  # fmt: skip
    for part in range(0, num_segments):
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            first_row, row_limit, col = place(tiles, first_tile + tile)
            label(trace, record, first_tile + tile + 1, TRACE)
            stamp(trace, record, 0, TRACE)
            if GATHER_K:
                acc = multiply_sources(
                    own, slots + slot_offset, w, stride_w, col, cols, rows, depth, x_pitch, first_row, rank, k_begin, k_end,
                    signals, chunk_rows, epoch, first_tile + tile, control, report,
                    WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, EVEN_K, DEPTH_FIRST, not PUSH,
                )  # fmt: skip
            else:
                token = wait_sources(
                    signals, first_row, row_limit, rows, rank, epoch, first_tile + tile, control, report,
                    TILE_M, NUM_SLICES, SPANS, not PUSH,
                )  # fmt: skip
                stamp(trace, record, 1, TRACE)
                a_rows = row_pointers(
                    own,
                    slots + slot_offset,
                    first_row,
                    row_limit,
                    rows,
                    depth,
                    x_pitch,
                    rank,
                    WORLD_SIZE,
                    TILE_M,
                    SPANS,
                )
                acc = matmul_tile(
                    a_rows, w, stride_w, col, cols, depth, consume_token(k_begin, token), k_end, TILE_M, TILE_N, TILE_K, EVEN_K,
                    DEPTH_FIRST=DEPTH_FIRST,
                )  # fmt: skip
            owner, helpers = part_range(share, tile)
            if program != owner:
                give_part(acc, partials, counters, part * num_programs, share, tile, TILE_M, TILE_N)
            else:
                if helpers > 0:
                    acc = take_parts(
                        acc,
                        partials,
                        counters,
                        part * num_programs,
                        share,
                        tile,
                        helpers,
                        TILE_M,
                        TILE_N,
                    )
                store_tile(
                    acc,
                    out,
                    bias,
                    first_row,
                    row_limit,
                    col,
                    cols,
                    control,
                    TILE_M,
                    TILE_N,
                    HAS_BIAS,
                )
            stamp(trace, record, 2, TRACE)
            record += 1
    if GATHERED and EXCHANGE:
        copy_exchanged(
            own, slots + slot_offset, gathered, signals, rank, rows, depth, x_pitch, share_size, num_chunks, program, epoch,
            control, report, WORLD_SIZE, NUM_SLICES, SPANS, GATHER_K, PUSH_BLOCK, not PUSH,
        )  # fmt: skip
    if GATHERED and not EXCHANGE:
        copy_gathered(
            x, slots + slot_offset, gathered, signals, rank, rows * depth, share_size, program, epoch, control, report,
            WORLD_SIZE, NUM_SLICES, SPANS, PUSH_BLOCK, not PUSH,
        )  # fmt: skip
    if not PUSH:  # the copy engine reads the epoch word: it must have pushed before the word moves
        if program == num_programs - 1:
            await_pushed(signals, epoch, control, report, WORLD_SIZE)
            tl.store(counters + num_segments * num_programs, 0)
    leave(control, epoch, num_programs)


# What changes between the launches of one shape.
WORDS = ("x", "w", "bias", "out", "gathered", "partials", "trace", "slot")


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape and stride of w, and checks the arguments."""

    def __init__(
        self,
        peers: Peers,
        schedule: TileSchedule,
        config: MatmulConfig,
        parts: Parts | None = None,
    ) -> None:
        s, c = schedule, config
        parts = parts or Parts(s.rank, s.world_size, s.depth, s.depth)
        self.peers, self.schedule, self.config, self.parts = peers, schedule, config, parts
        self.push = c.transport == "sm"
        self.slices, size = c.num_slices if self.push else 1, s.rows * parts.depth
        self.part_words = (
            s.num_segments * s.num_programs * c.tile_m * c.tile_n if s.has_cut_tiles else 0
        )
        self.integers = (
            slice_bounds(size, self.slices, 0, PUSH_BLOCK)[1], slice_bounds(size, s.num_programs, 0, PUSH_BLOCK)[1],
            min(c.num_producers, s.num_programs),
            s.num_tiles, s.num_segments, s.band_sources, s.lead, s.team, s.tile_rows, s.tile_cols, s.k_blocks, s.max_units(),
            parts.step, parts.pitch, parts.chunk_rows, parts.chunks,
            parts.world_size, self.slices, self.push, PUSH_BLOCK, s.spans_shards and not parts.side_by_side, s.split_tail,
            c.tile_m, c.tile_n, c.tile_k, c.group_m, parts.depth % c.tile_k == 0,
        )  # fmt: skip
        self.launches = Launches(
            all_gather_matmul_kernel, WORDS, num_warps=c.num_warps, num_stages=c.num_stages
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gathered: torch.Tensor | None,
        slot: int,
        trace: torch.Tensor | None = None,
    ) -> None:
        """Launch on the current stream. ``slot``: which one a copy-engine call uses; a push reads it from the epoch."""
        peers, s = self.peers, self.schedule
        partials = out
        if self.part_words:
            partials = torch.empty(self.part_words, dtype=torch.float32, device=x.device)
        added, kept = out if bias is None else bias, out if gathered is None else gathered
        tensors = (x, w, added, out, kept, partials, peers.control if trace is None else trace)
        words = [tensor.data_ptr() for tensor in tensors]
        variant = (
            *[word % 16 == 0 for word in words],
            bias is None,
            gathered is None,
            trace is None,
        )

        def arguments() -> tuple[object, ...]:
            stride_w, depth_first = lines(w.stride())
            return (
                *tensors[:5], peers.slots, partials, peers.counters,
                peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, tensors[6],
                self.parts.rank, slot, peers.slot_size, s.rows, s.cols, self.parts.depth, stride_w, *self.integers,
                bias is not None, gathered is not None, trace is not None, self.parts.exchange, self.parts.side_by_side,
                depth_first,
            )  # fmt: skip

        self.launches(s.num_programs, variant, arguments, (*words, slot))
