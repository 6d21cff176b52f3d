"""matmul_all_to_all: P = x[M, K] @ w[N, K].T + bias, cut into R parts; part p goes to rank p, in
one launch.

    part     [rows, cols]  (M/R, N) where rows are scattered, (M, N/R) where columns are
    out      [R * rows, cols] or [rows, R * cols]: parts of all ranks, in rank order; plain memory
    slot     [R-1, ...]    one of two, by parity of the epoch; part i goes to ("copy_engine"), or
                           came from ("sm"), the i-th peer

It is a reduce-scatter without the sum: tiles of peers' parts come first, own ones last
(``planning/schedules/scatter.py``), and an own tile goes directly into ``out``. Parts follow each
other in one sequence of rows, each padded to whole tiles. There are two transports:

``"copy_engine"``  a tile of a peer's part is stored in a slot of *this* rank, row-major. The
    program that completes a chunk of tile rows tells the peer, whose copy engine *pulls* the chunk
    into its ``out``. No other rank needs to know the address of a result, so results are plain
    memory, and rows with a pitch (columns gathered) cost nothing.
``"sm"``  tiles are stored directly into the peer's slot and are self-signaling
    (``device/triton/self_signaling.py``), as in ``matmul_reduce_scatter``. The program that made
    the own tile at the same position takes them out of the slot.

=======================  =====  ============================  ====================================
signal (int32)           value  notifier                      waiter ("copy_engine")
=======================  =====  ============================  ====================================
counter [place, chunk]   tiles  programs, once per tile;      the program that completes it; zero
                                local                         between calls
flag [slot, src, chunk]  1      the program of ``src`` that   own copy engine; reset to zero by
                                completed the chunk           the last program
[source, chunk]          epoch  the same program              the last program: its wait has a
                                                              time-out and names the late rank
[pushed] (own)           epoch  own copy engine, after its    the last program, before flags and
                                last pull                     the epoch change
=======================  =====  ============================  ====================================

    rank r       | tiles of r+1 ... | tiles of r+2 ... | tiles of r+3 ... | own tiles, into out |
    copy engine                     | from r-1 ....... | from r-2 ....... | from r-3 ....... |

Why there are flags in addition to signals: a copy engine can wait for a fixed value only, in a
graph too, where epochs advance.

Why no slot is overwritten ("copy_engine"): a call ends when it has pulled all parts. So a peer that
signals call n+1 has ended call n, hence has read this rank's slot of call n, which this rank writes
again in call n+2; by then it has seen the peer's signal of call n+1. Flags: a peer sets one of slot
n & 1 again in its call n+2, hence after its call n+1, which needed this rank's call n+1, hence
after this rank's call n, which reset it to zero. A captured call, whose slot a graph fixes, comes
after a barrier (``kernels/runtime/barrier.py``). ("sm"): as in
``kernels/reduce_scatter/triton.py``, since own tiles need data of every peer in every call.

Why no rank waits for ever ("copy_engine"): only the last program waits, after all its tiles; copies
wait for kernels of peers, which wait for no other rank before their last tile. A wait that times
out sets the flags itself, so that the copies proceed and the kernel ends; then the result is NaN.
("sm"): as in ``matmul_reduce_scatter``: all programs are resident; under the interpreter there is
one.

Limits: x contiguous along K, w along K or (``DEPTH_FIRST``, as backward reads it) along N; fp32
accumulation; rounded once.

Sources: fused GEMM + all-to-all, arXiv 2305.06942; the exchange of DeepSpeed Ulysses, arXiv
2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import give_part, matmul_tile, part_offsets, take_parts
from tileweave.device.triton.peers import (
    faulted,
    leave,
    load_epoch,
    slots_at,
    take_marked,
)
from tileweave.device.triton.pull import announce_chunk, end_of_pulls
from tileweave.device.triton.self_signaling import put_marked
from tileweave.device.triton.signal import MAX_SLICES, count_last
from tileweave.device.triton.tiles import OwnerTiles, part_range, place_out, share_of, unit_range
from tileweave.kernels.reduce_scatter.triton import scheduled, store_rows, tile_place
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers, lines, memory_of_parts
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule

POISON_BLOCK = 1024


class Tensors(NamedTuple):
    """Operands and results of a call; ``bias`` and ``partials`` are any tensor where there is
    none."""

    x: Any
    w: Any
    bias: Any
    out: Any
    partials: Any


class Sizes(NamedTuple):
    """Numbers that belong to the shape.

    place_size : elements of a slot for one peer.

    rows, cols : of a part.

    depth, total_rows : columns and rows of ``x``.

    stride_x, stride_w : elements from row to row of ``x``, and of ``w`` (``DEPTH_FIRST``: from
        column to column).

    x_step, w_step : rows of ``x`` and of ``w`` from one owner's part to the next one's; one of them
        is 0.

    out_pitch, out_step : elements of ``out`` from row to row, and from one source's part to the
        next one's.

    out_size : elements of ``out``.
    """

    place_size: Any
    rows: Any
    cols: Any
    depth: Any
    total_rows: Any
    stride_x: Any
    stride_w: Any
    x_step: Any
    w_step: Any
    out_pitch: Any
    out_step: Any
    out_size: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PUSH : the transport is ``"sm"``: programs store parts of peers in the peers' slots. Otherwise
        they store them in a slot of this rank, and copy engines of the peers pull them.

    SPLIT_TAIL : tiles that do not fill a last wave are cut along K.

    EVEN_K : the depth is a multiple of ``TILE_K``.

    DEPTH_FIRST : ``w`` is contiguous along N.

    BLOCK : elements that are overwritten with NaN at once after a fault.
    """

    WORLD_SIZE: int
    PUSH: bool
    SPLIT_TAIL: bool
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    DEPTH_FIRST: bool
    BLOCK: int
    HAS_BIAS: bool = False


UNSPECIALIZED = [
    "rank",
    "slot",
    "num_tiles",
    "chunk_rows",
    "num_chunks",
    "team",
    "tile_rows",
    "tile_cols",
    "k_blocks",
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def matmul_all_to_all_kernel(
    tensors,
    peers,
    rank,
    slot,
    sizes,
    num_tiles,
    chunk_rows,
    num_chunks,
    team,
    tile_rows,
    tile_cols,
    k_blocks,
    C: tl.constexpr,
):
    """Compute, announce or push, take; see the module's docstring for the protocol.

    ``slot``: the one that peers pull from; a push takes it from the epoch. ``chunk_rows``: tile
    rows of a chunk. ``num_tiles`` to ``k_blocks``: of ``ScatterSchedule``.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    x, w, out, partials = tensors.x, tensors.w, tensors.out, tensors.partials
    counters, rows, cols = peers.counters, sizes.rows, sizes.cols
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * peers.slot_size
    dtype: tl.constexpr = out.dtype.element_ty
    padded_rows = tile_rows * TILE_M  # of a part
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        padded_rows,
        TILE_M,
        C.GROUP_M,
        num_tiles,
        chunk_rows,
        team,
        tile_rows,
        tile_cols,
        k_blocks,
        C.SPLIT_TAIL,
    )
    share = share_of(tiles, program, num_programs, num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, tile_col = place_out(tiles, tile)
        home = first_row // padded_rows
        first = first_row - home * padded_rows
        row = first + tl.arange(0, TILE_M)
        col = tile_col * TILE_N + tl.arange(0, TILE_N)
        x_row = tl.minimum(home * sizes.x_step + row, sizes.total_rows - 1)
        a_rows = x + x_row.to(tl.int64) * sizes.stride_x
        w_row = (home * sizes.w_step).to(tl.int64)
        b_rows = w + w_row * (1 if C.DEPTH_FIRST else sizes.stride_w)
        acc = matmul_tile(
            a_rows,
            b_rows,
            sizes.stride_w,
            tile_col,
            cols,
            sizes.depth,
            k_begin,
            k_end,
            TILE_M,
            TILE_N,
            C.TILE_K,
            C.EVEN_K,
            DEPTH_FIRST=C.DEPTH_FIRST,
        )
        owner, helpers = part_range(share, tile)
        if program != owner:
            give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                acc = take_parts(acc, partials, counters, 0, share, tile, helpers, TILE_M, TILE_N)
            if C.HAS_BIAS:
                mask = col < cols
                bias = tl.load(tensors.bias + home * sizes.w_step + col, mask=mask, other=0.0)
                acc += bias.to(tl.float32)[None, :]
            acc = tl.where(faulted(peers) != 0, float("nan"), acc)
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, False)
            inside = part_offsets(TILE_M, TILE_N)
            exists = (row < rows)[:, None] & (col >= 0)[None, :]  # all that is pushed is taken
            place = home - (home > rank).to(tl.int32)
            if home == rank:
                value = acc.to(dtype)
                target = out + rank.to(tl.int64) * sizes.out_step
                store_rows(value, target, row, col, cols, row < rows, sizes.out_pitch)
                if C.PUSH:
                    for i in tl.static_range(1, WORLD_SIZE):
                        source = (rank + WORLD_SIZE - i) % WORLD_SIZE
                        theirs = (source - (source > rank).to(tl.int32)).to(tl.int64)
                        theirs = theirs * sizes.place_size
                        taken = take_marked(
                            peers,
                            tl.zeros((TILE_M, TILE_N), tl.float32),
                            peers.slots + slot_offset + theirs + at + inside,
                            0,
                            exists,
                            source,
                            WORLD_SIZE,
                            tile,
                            epoch,
                            1,
                        )
                        value = taken.to(dtype)
                        target = out + source.to(tl.int64) * sizes.out_step
                        store_rows(value, target, row, col, cols, row < rows, sizes.out_pitch)
            if C.PUSH and home != rank:
                mine = (rank - (rank > home).to(tl.int32)).to(tl.int64) * sizes.place_size
                target = slots_at(peers, home, dtype) + slot_offset + mine + at
                put_marked(target + inside, acc.to(dtype), exists)
            if (not C.PUSH) and (home != rank):
                value = acc.to(dtype)
                target = peers.slots + slot_offset
                store_rows(value, target, place * padded_rows + row, col, cols, row < rows, cols)
                chunk = first // TILE_M // chunk_rows
                tiles_of_chunk = tl.minimum(tile_rows - chunk * chunk_rows, chunk_rows) * tile_cols
                if count_last(counters + num_programs + place * MAX_SLICES + chunk, tiles_of_chunk):
                    announce_chunk(peers, home, rank, slot, chunk, epoch, WORLD_SIZE)
    if not C.PUSH:
        if program == num_programs - 1:
            end_of_pulls(
                peers, out, sizes.out_size, slot, num_chunks, rank, epoch, WORLD_SIZE, C.BLOCK
            )
    leave(peers, epoch, num_programs)


def steps(how: Exchange, rows: int, cols: int, world_size: int) -> tuple[int, int, int, int]:
    """For parts of [rows, cols]: rows of x, and of w, from part to part; pitch and step in the
    result."""
    x_step, w_step = (rows, 0) if how.scatter_dim == 0 else (0, cols)
    out_pitch, out_step = (cols, rows * cols) if how.gather_dim == 0 else (world_size * cols, cols)
    return x_step, w_step, out_pitch, out_step


# What changes between the launches of one shape.
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "slot")


def launcher(
    peers: Peers,
    schedule: ScatterSchedule,
    config: MatmulConfig,
    how: Exchange,
    rows: int,
    stride_x: int,
    strides_w: Sequence[int],
) -> Launcher:
    """Launches for one shape, called with (x, w, bias or None, out, slot, memory of parts or None);
    the caller checks them. ``slot``: which one a copy-engine call uses; a push reads it from the
    epoch.

    schedule : of parts padded to whole tiles.

    rows : how many a part really has.
    """
    s, c = schedule, config
    stride_w, depth_first = lines(strides_w)
    choices = Choices(
        WORLD_SIZE=s.world_size,
        PUSH=c.transport == "sm",
        SPLIT_TAIL=s.split_tail,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        EVEN_K=s.depth % c.tile_k == 0,
        DEPTH_FIRST=depth_first,
        BLOCK=POISON_BLOCK,
    )
    part_elements = s.part_elements

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        slot: int,
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        tensors = Tensors(x, w, out if bias is None else bias, out, partials)
        words = [tensor.data_ptr() for tensor in tensors]

        def changing() -> dict[str, Any]:
            chosen = choices._replace(HAS_BIAS=bias is not None)
            return {"tensors": tensors, "slot": slot, "C": chosen}

        return (bias is None, alignment(words)), (*words, slot), changing, ()

    x_step, w_step, out_pitch, out_step = steps(how, rows, s.cols, s.world_size)
    sizes = Sizes(
        place_size=s.place_elements,
        rows=rows,
        cols=s.cols,
        depth=s.depth,
        total_rows=s.world_size * rows if x_step else rows,
        stride_x=stride_x,
        stride_w=stride_w,
        x_step=x_step,
        w_step=w_step,
        out_pitch=out_pitch,
        out_step=out_step,
        out_size=s.world_size * rows * s.cols,
    )
    fixed = {
        "peers": peers,
        "sizes": sizes,
        "num_chunks": s.chunks,
        **scheduled(s),
    }
    return Launcher(
        matmul_all_to_all_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
