"""all_gather_matmul: out[M, N/R] = gather(x)[M, K] @ w[N/R, K].T + bias, in one launch; each tile
waits only for the shards that it needs.

    x     [m, K]       own shard, m = M/R; read where it is
    slot  [R-1, m, K]  one of two, by parity of the epoch; index i holds the shard of rank-1-i
    w     [N/R, K]     out [M, N/R]     gathered [M, K] if asked for

Which rank writes what: rank r's shard has an index of its own in each peer's slot, where no other
rank writes. Either the copy engines push it (``transport="copy_engine"``: one chunk, one signal for
each peer), or the first ``num_producers`` programs of this kernel do (``"sm"``: ``NUM_SLICES``
slices, one signal each). A tile waits for the shards its rows are in.

==================  =====  ================================  =====================================
signal (int32)      value  notifier                          waiter
==================  =====  ================================  =====================================
[source, slice]     epoch  rank ``source``, after that       tiles with rows of that source
                           slice
[met, source]       epoch  program 0 of ``source``           program 0 of every rank
                                                             ("copy_engine")
counter [gate]      1      program 0, when all ranks have    own copy engine, before its first
                           met                               push
[pushed] (own)      epoch  own copy engine, after its last   the last program, before gate and
                           push                              epoch move
==================  =====  ================================  =====================================

[source, slice] is signal ``source * MAX_SLICES + slice``; [met] and [pushed] follow all of these
(``device/triton/meet.py``). The gate is the counter after those of cut tiles.

    rank r   | push to r+1 | push to r+2 | push to r+3 |      (copy engines begin together: meet.py)
    tiles    | own shard ...... | rank r-1 ...... | rank r-2 ...... | rank r-3 ...... | cut tiles |
                                ^ wait, once per tile; the shard arrived long ago

Why no slot is overwritten: every rank signals every peer in every call, and each source's rows are
in some tile. So when my call n ends I have call n's signals of all peers: each has begun call n,
hence ended n-1, the last reader of the slot that call n+1 writes. This depends on stream order.
Once an instance was captured in a CUDA graph, its copy-engine calls all use slot 0: the copies of
call n start when all ranks have met in it, hence ended n-1, which read that slot last. Since ranks
meet, a copy engine's signal is of this very call; one of a later call says that its rank gave this
call up: a time-out (``EXACT`` of ``wait``).

Why no rank waits for ever: producers push before they wait, and are the lowest programs, which
start first. Copy engines wait for the gate only, which program 0 opens before it waits for a tile.
Tiles wait for producers or copy engines of other ranks (where ``SPANS``, for own producers, too),
owners of cut tiles for lower programs, the last program for the own copy engine. Under the
interpreter one program is the producer and runs first.

Waves: programs take whole tiles in turn; tiles that do not fill a last wave are cut along K
(``device/triton/tiles.py``).

FP8 operands (``SCALED``, copy engines only): x, slot and w have one byte per element; scales.py.

Limits: x contiguous along K, w along K or, unless FP8, along N (``DEPTH_FIRST``); sums in fp32; the
partial tiles of a cut tile are added in a fixed order.

Ranks on several nodes (``PER_NODE``): ``ops/matmul/gather_over_nodes.py`` has what differs; tiles
wait for chunks of shards, and program 0 meets the ranks of its node.

Sources: FLUX (arXiv 2406.06858) for waits and order by tiles; stream-K (arXiv 2301.03598) for the
last wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import give_part, matmul_tile, take_parts
from tileweave.device.triton.peers import (
    await_pushed,
    faulted,
    leave,
    load_epoch,
    meet,
    notify_all,
)
from tileweave.device.triton.remote import put_all
from tileweave.device.triton.signal import MAX_SLICES, consume_token, count_in
from tileweave.device.triton.tiles import (
    Tiles,
    Unit,
    part_range,
    place,
    place_in_nodes,
    segment,
    share_of,
    unit_range,
)
from tileweave.device.triton.trace import label, stamp
from tileweave.kernels.all_gather.arrivals import copy_gathered, own_or_slot, wait_sources
from tileweave.kernels.all_gather.scales import block_scales, scale_tile
from tileweave.kernels.all_to_all.gather_triton import copy_exchanged, multiply_sources, push_parts
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers, lines, memory_of_parts
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, slice_bounds

PUSH_BLOCK = 2048  # elements that a producer moves at once: 16 bytes per thread with 8 warps


class Tensors(NamedTuple):
    """The tensors of a call. A call without ``bias``, ``gathered``, ``partials``, ``trace`` or
    scales passes any other tensor there, which is not read."""

    x: Any
    w: Any
    bias: Any
    out: Any
    gathered: Any
    partials: Any
    trace: Any
    x_scale: Any
    own_scale: Any
    w_scale: Any


class Sizes(NamedTuple):
    """Numbers that belong to the shape; Triton may specialise each of them.

    rows, depth : of a shard or part.

    cols : of the output.

    stride_w : elements from row to row of w; with ``DEPTH_FIRST`` from column to column.

    slice_size : elements of a shard that a producer pushes between two signals.

    copy_size : elements of each shard that each program copies into ``gathered``.

    step, pitch : of ``Parts``.
    """

    rows: Any
    cols: Any
    depth: Any
    stride_w: Any
    slice_size: Any
    copy_size: Any
    step: Any
    pitch: Any


class Choices(NamedTuple):
    """What is decided when the kernel is compiled.

    NUM_SLICES : signals of each source, or of each chunk of a source.

    PUSH : producers of this kernel push (``"sm"``), and not the copy engines.

    PUSH_BLOCK : elements that one store instruction of a program moves.

    SPANS : a tile is taller than a shard (small shards, only ``"sm"``). A slot then has all R
    shards in rank order, the own one too, which this rank signals to itself: one load fetches a
    tile's rows.

    SPLIT_TAIL : tiles that do not fill a last wave are cut along K.

    EVEN_K : ``depth`` is a multiple of ``TILE_K``.

    TRACE : stamp times into ``trace``.

    EXCHANGE : this is ``all_to_all_matmul`` (``kernels/all_to_all/gather_triton.py``), in which
    each rank receives another part of x.

    GATHER_K : the parts of an all-to-all are side by side, so that every tile needs every source.

    DEPTH_FIRST : w is contiguous along N, as backward reads it.

    SCALED : 0 for 16-bit operands; FP8: 1 for scales of rows and columns, 2 for scales of blocks.

    PROMOTE : products of FP8 are added to fp32 sums after each K block.

    PER_NODE : ranks of a node, where ranks of other nodes share no memory with this one; else 0.
    """

    WORLD_SIZE: int
    NUM_SLICES: int
    PUSH: bool
    PUSH_BLOCK: int
    SPANS: bool
    SPLIT_TAIL: bool
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    EXCHANGE: bool
    GATHER_K: bool
    HAS_BIAS: bool = False
    GATHERED: bool = False
    TRACE: bool = False
    DEPTH_FIRST: bool = False
    SCALED: int = 0
    PROMOTE: bool = False
    PER_NODE: int = 0


@triton.jit
def push_shard(
    x, peers, rank, slot_offset, sizes, epoch, program, num_producers, trace, C: tl.constexpr
):
    """Producer: push this program's slices of the own shard to every peer, and signal each."""
    size = sizes.rows * sizes.depth
    for piece in range(program, C.NUM_SLICES, num_producers):
        stamp(trace, piece, 0, C.TRACE)
        begin = piece * sizes.slice_size
        end = tl.minimum(begin + sizes.slice_size, size)
        put_all(
            peers.slot_table,
            rank,
            C.WORLD_SIZE,
            slot_offset,
            size,
            x,
            begin,
            end,
            C.SPANS,
            C.PUSH_BLOCK,
        )
        notify_all(peers, rank * MAX_SLICES + piece, rank, epoch, C.WORLD_SIZE, C.SPANS)
        stamp(trace, piece, 1, C.TRACE)
        label(trace, piece, piece, C.TRACE)


@triton.jit
def row_pointers(x, slot, unit, sizes, rank, C: tl.constexpr):
    """Pointers to a tile's rows: in ``x``, rows ``pitch`` apart, for the own shard, else in the
    slot. Rows past the limit repeat the last."""
    TILE_M: tl.constexpr = C.TILE_M
    rows, depth = sizes.rows, sizes.depth
    row = tl.minimum(unit.first_row + tl.arange(0, TILE_M), unit.row_limit - 1)
    if C.SPANS:
        pointers = slot + row.to(tl.int64) * depth
    else:
        source = unit.first_row // rows
        within = (row - source * rows).to(tl.int64) * tl.where(source == rank, sizes.pitch, depth)
        place = (rank + C.WORLD_SIZE - source - 1) % C.WORLD_SIZE
        remote = place.to(tl.int64) * rows * depth
        pointers = own_or_slot(x, slot, remote, source == rank) + within
    return pointers


@triton.jit
def multiply_unit(a_rows, tensors, unit, k_begin, sizes, rank, C: tl.constexpr):
    """The K blocks of a unit from ``k_begin`` on, of rows at ``a_rows``."""
    if C.SCALED == 2:
        scales = block_scales(tensors, unit, sizes, rank, C.TILE_M, C.TILE_N, C.TILE_K)
    else:
        scales = None
    return matmul_tile(
        a_rows,
        tensors.w,
        sizes.stride_w,
        unit.col,
        sizes.cols,
        sizes.depth,
        k_begin,
        unit.k_end,
        C.TILE_M,
        C.TILE_N,
        C.TILE_K,
        C.EVEN_K,
        DEPTH_FIRST=C.DEPTH_FIRST,
        PROMOTE=C.PROMOTE,
        scales=scales,
    )


@triton.jit
def store_tile(acc, tensors, peers, unit, sizes, rank, C: tl.constexpr):
    """Epilogue: bias, rounding once, masked store; NaN if a wait of this rank timed out."""
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    out, cols = tensors.out, sizes.cols
    row = unit.first_row + tl.arange(0, TILE_M)
    col = unit.col * TILE_N + tl.arange(0, TILE_N)
    if C.SCALED == 1:
        acc = scale_tile(acc, tensors, unit, row, col, sizes, rank)
    if C.HAS_BIAS:
        acc += tl.load(tensors.bias + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(faulted(peers) != 0, float("nan"), acc)
    mask = (row < unit.row_limit)[:, None] & (col < cols)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * cols + col[None, :],
        acc.to(out.dtype.element_ty),
        mask=mask,
    )


# A kernel that was compiled for one value of these would be compiled again for the next shape.
UNSPECIALIZED = [
    "rank",
    "slot",
    "num_producers",
    "num_tiles",
    "num_segments",
    "band_sources",
    "lead",
    "team",
    "tile_rows",
    "tile_cols",
    "k_blocks",
    "max_units",
    "chunk_rows",
    "num_chunks",
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_kernel(
    tensors,
    peers,
    rank,
    slot,
    sizes,
    num_producers,
    num_tiles,
    num_segments,
    band_sources,
    lead,
    team,
    tile_rows,
    tile_cols,
    k_blocks,
    max_units,
    chunk_rows,
    num_chunks,
    C: tl.constexpr,
):
    """Dispatch the roles; see the module's docstring for the protocol.

    ``slot``: the one that copy engines write; a push (``PUSH``) takes it from the epoch.
    ``num_tiles`` to ``k_blocks``: of ``TileSchedule``; ``chunk_rows``, ``num_chunks``: of
    ``Parts``. ``max_units``: rows of ``trace`` that each program has.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    x, trace = tensors.x, tensors.trace
    partials, counters = tensors.partials, peers.counters
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * peers.slot_size
    if C.PUSH:
        if program < num_producers:
            if C.EXCHANGE:
                push_parts(
                    x, peers, rank, slot_offset, sizes, epoch, program, num_producers, trace, C
                )
            else:
                push_shard(
                    x, peers, rank, slot_offset, sizes, epoch, program, num_producers, trace, C
                )
    elif program == 0:
        meet(peers, rank, epoch, -1, C.WORLD_SIZE)
        count_in(counters + num_segments * num_programs)
    own = x
    if C.EXCHANGE:
        own = x + rank.to(tl.int64) * sizes.step
    record = C.NUM_SLICES + program * max_units
    tiles = Tiles(
        0 if C.GATHER_K else rank,
        1 if C.GATHER_K else C.WORLD_SIZE,
        sizes.rows,
        C.TILE_M,
        C.GROUP_M,
        num_tiles,
        num_segments,
        band_sources,
        lead,
        team,
        tile_rows,
        tile_cols,
        k_blocks,
        C.SPLIT_TAIL,
    )
    for part in range(0, num_segments):
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            tile, k_begin, k_end = unit_range(share, index)
            if C.PER_NODE:
                first_row, row_limit, col = place_in_nodes(
                    tiles, first_tile + tile, C.PER_NODE, chunk_rows // C.TILE_M
                )
            else:
                first_row, row_limit, col = place(tiles, first_tile + tile)
            unit = Unit(first_tile + tile, first_row, row_limit, col, k_begin, k_end)
            label(trace, record, unit.tile + 1, C.TRACE)
            stamp(trace, record, 0, C.TRACE)
            if C.GATHER_K:
                acc = multiply_sources(
                    own,
                    peers.slots + slot_offset,
                    tensors.w,
                    peers,
                    unit,
                    sizes,
                    rank,
                    chunk_rows,
                    epoch,
                    C,
                )
            else:
                token = wait_sources(peers, unit, sizes.rows, chunk_rows, rank, epoch, C)
                stamp(trace, record, 1, C.TRACE)
                a_rows = row_pointers(own, peers.slots + slot_offset, unit, sizes, rank, C)
                k_begin = consume_token(k_begin, token)
                acc = multiply_unit(a_rows, tensors, unit, k_begin, sizes, rank, C)
            owner, helpers = part_range(share, tile)
            if program != owner:
                give_part(
                    acc, partials, counters, part * num_programs, share, tile, C.TILE_M, C.TILE_N
                )
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
                        C.TILE_M,
                        C.TILE_N,
                    )
                store_tile(acc, tensors, peers, unit, sizes, rank, C)
            stamp(trace, record, 2, C.TRACE)
            record += 1
    if C.GATHERED:
        gathered = tensors.gathered
        if C.EXCHANGE:
            copy_exchanged(
                own,
                peers.slots + slot_offset,
                gathered,
                peers,
                rank,
                sizes,
                num_chunks,
                program,
                epoch,
                C,
            )
        else:
            copy_gathered(
                x,
                peers.slots + slot_offset,
                gathered,
                peers,
                rank,
                sizes,
                num_chunks,
                program,
                epoch,
                C,
            )
    # the copy engine reads the epoch: it must have pushed before the epoch moves
    if not C.PUSH:
        if program == num_programs - 1:
            await_pushed(peers, epoch, C.WORLD_SIZE)
            tl.store(counters + num_segments * num_programs, 0)
    leave(peers, epoch, num_programs)


# what changes between the launches of one shape
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "slot")


def scheduled(s: TileSchedule, c: MatmulConfig, parts: Parts) -> dict[str, int]:
    """The arguments, by name, that say which program computes what; both kernels have them."""
    return {
        "num_producers": min(c.num_producers, s.num_programs),
        "num_tiles": s.num_tiles,
        "num_segments": s.num_segments,
        "band_sources": s.band_sources,
        "lead": s.lead,
        "team": s.team,
        "tile_rows": s.tile_rows,
        "tile_cols": s.tile_cols,
        "k_blocks": s.k_blocks,
        "max_units": s.max_units(),
        "chunk_rows": parts.chunk_rows,
        "num_chunks": parts.chunks,
    }


def launcher(
    peers: Peers,
    schedule: TileSchedule,
    config: MatmulConfig,
    parts: Parts,
    scaled: int = 0,
) -> Launcher:
    """Launches for one shape and stride of w; the caller checks the arguments.

    The launcher is called with (x, w, bias or None, out, gathered or None, slot, trace or None,
    scales or None, memory of parts or None). ``slot``: the one that a copy-engine call uses; a push
    takes it from the epoch.
    ``scales``: of FP8 operands, in the order of ``Tensors``. ``scaled``: ``Choices.SCALED``.
    """
    s, c = schedule, config
    push = c.transport == "sm"
    slices = c.num_slices if push else 1
    size = s.rows * parts.depth
    choices = Choices(
        WORLD_SIZE=parts.world_size,
        NUM_SLICES=slices,
        PUSH=push,
        PUSH_BLOCK=PUSH_BLOCK,
        SPANS=s.spans_shards and not parts.side_by_side,
        SPLIT_TAIL=s.split_tail,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        EVEN_K=parts.depth % c.tile_k == 0,
        EXCHANGE=parts.exchange,
        GATHER_K=parts.side_by_side,
        SCALED=scaled,
        PROMOTE=scaled == 1 and c.tile_n <= 128,
        PER_NODE=s.per_node,
    )
    sizes = Sizes(
        rows=s.rows,
        cols=s.cols,
        depth=parts.depth,
        stride_w=0,
        slice_size=slice_bounds(size, slices, 0, PUSH_BLOCK)[1],
        copy_size=slice_bounds(size, s.num_programs, 0, PUSH_BLOCK)[1],
        step=parts.step,
        pitch=parts.pitch,
    )
    fixed = {
        "peers": peers,
        "rank": parts.rank,
        **scheduled(s, c, parts),
    }
    part_elements = s.part_elements

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gathered: torch.Tensor | None,
        slot: int,
        trace: torch.Tensor | None = None,
        scales: Sequence[torch.Tensor] | None = None,
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        added, kept = out if bias is None else bias, out if gathered is None else gathered
        stamps = peers.control if trace is None else trace
        tensors = (x, w, added, out, kept, partials, stamps, *(scales or (out, out, out)))
        words = [tensor.data_ptr() for tensor in tensors]

        def changing() -> dict[str, Any]:
            stride_w, depth_first = lines(w.stride())
            chosen = choices._replace(
                HAS_BIAS=bias is not None,
                GATHERED=gathered is not None,
                TRACE=trace is not None,
                DEPTH_FIRST=depth_first,
            )
            return {
                "tensors": Tensors(*tensors),
                "slot": slot,
                "sizes": sizes._replace(stride_w=stride_w),
                "C": chosen,
            }

        absent = bias is None, gathered is None, trace is None
        variant = (alignment(words), *absent, out.dtype)
        return variant, (*words, slot), changing, ()

    return Launcher(
        all_gather_matmul_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
