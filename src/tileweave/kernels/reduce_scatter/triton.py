"""matmul_reduce_scatter: out[m, N] = rows of this rank of sum over ranks of x[M, k] @ w[N, k].T, + bias, in one launch.

    x        [M, k]       own columns of the input, k = K/R        w [N, k]    out [m, N], m = M/R
    slot     [R-1, ...]   one of two, by parity of the epoch; place i holds the i-th peer's partial of this rank's rows
    staging  [R-1, m, N]  local, copy engines only: partials on their way out

Who writes, who reads. A partial tile of rows of a peer goes into that peer's slot, into this rank's place, and nobody else
writes there; own tiles are never sent: the program that computed one adds the peers' partials to its accumulator, in fp32
and in a fixed order (pushes: by rank; copies: by order of arrival, rank-1, rank-2, ...), adds the bias, rounds once and stores
the result. Two transports:

``"copy_engine"``  tiles are stored in ``staging`` and counted in; a copy engine that waits for a chunk's count takes the
    chunk to its owner (row-major, padded to whole tiles and to rows of ``pitch``), a signal behind it. Own tiles wait for it.
``"sm"``  tiles are stored straight into the slot (tile by tile, whole, in 8 x 8 blocks), and announce themselves: see
    ``device/triton/self_signaling.py``. No signal, no fence.

====================  =====  =====================================  =============================================
signal (int32)        value  notifier                               waiter ("copy_engine")
====================  =====  =====================================  =============================================
[source, chunk]       epoch  copy engine of ``source``              own tiles of that chunk
[met, source]         epoch  who has stored tile 0 of ``source``    the same of every rank, before it counts that tile in
[pushed] (own)        epoch  own copy engine, behind its last push  the last program, before counters and epoch move
counter [peer, chunk] tiles  programs, a tile each; local           own copy engine; zero between calls
====================  =====  =====================================  =============================================

    rank r   | tiles of r+1 ... | tiles of r+2 ... | tiles of r+3 ... | own tiles, adding what came |
    link                        | to r+1 ......... | to r+2 ......... | to r+3 ......... |
                                ^ all ranks meet: copies begin together (``device/triton/meet.py``)

Why no slot is overwritten: own rows need data of every peer in every call, so when my call n ends, each peer has begun call
n, hence ended n-1, the last reader of the slot (and writer of its zeros) that call n+1 writes. Once an instance was captured
in a CUDA graph, its copy-engine calls all use slot 0: the copies of call n go when all ranks have met in it, hence ended n-1,
which read that slot last. Since ranks meet, a copy engine's signal is of this very call; one of a later call says that its rank
gave this one up: a time-out (``EXACT``). ``staging`` is of one call, which ends behind [pushed], hence behind the copies.

Why nobody is stuck: pushes of a tile come before any wait of that tile, and in the order of tiles remote ones come before
own ones; tile 0, a remote one, waits only for tiles 0 of peers. A program waits for tiles that *any* program of a peer makes,
so all programs must be resident at once: as many as the device has multiprocessors, no more. Under the interpreter, where
programs run in turn: one program, or tiles that span shards (then the same program of the peer made it).

Tiles that do not fill a last wave are cut along K, as in ``all_gather_matmul``.
Limits: x contiguous along K, w along K or (``DEPTH_FIRST``, as backward reads it) along N; fp32 accumulation;
partials travel in x's dtype.
Sources: FLUX (arXiv 2406.06858), fused GEMM + reduce-scatter by tiles; stream-K (arXiv 2301.03598).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import give_part, matmul_tile, part_offsets, take_parts
from tileweave.device.triton.meet import await_pushed, meet
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.self_signaling import put_marked, take_marked
from tileweave.device.triton.signal import MAX_SLICES, count_in, faulted, leave, load_epoch, wait
from tileweave.device.triton.tiles import OwnerTiles, part_range, place_out, share_of, unit_range
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import ScatterSchedule


@triton.jit
def tile_place(first_row, home, tiles, col, TILE_N: tl.constexpr, SPANS: tl.constexpr):
    """``"sm"``: the first element of a tile in a place of a slot; ``home``: owner of its first row."""
    at = (
        first_row if SPANS else first_row - home * tiles.rows
    ) // tiles.tile_m * tiles.tile_cols + col
    return at.to(tl.int64) * (tiles.tile_m * TILE_N)


@triton.jit
def push_partial(
    acc, slot_table, slot_offset, place_size, at, row, row_limit, rows, rank,
    WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Store the rows of peers in their slots, marked. ``row`` [TILE_M]: global rows."""
    within = part_offsets(TILE_M, TILE_N)
    value = acc.to(dtype)
    first = row // rows
    for i in tl.static_range(1, WORLD_SIZE):
        owner = (rank + i) % WORLD_SIZE
        mine = (first == owner) & (row < row_limit)
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            place = rank - (rank > owner).to(tl.int32)
            target = (
                symm_at(slot_table, owner, dtype, 16)
                + slot_offset
                + place.to(tl.int64) * place_size
                + at
            )
            put_marked(target + within, value, mine[:, None] & (tl.arange(0, TILE_N) >= 0)[None, :])


@triton.jit
def store_rows(value, target, row, col, cols, mask, pitch=None):
    """Store a tile's rows ``row`` and columns ``col`` of ``target``, ``pitch`` or ``cols`` apart, where ``mask`` holds."""
    if pitch is None:
        pitch = cols
    tl.store(
        target + row.to(tl.int64)[:, None] * pitch + col[None, :],
        value,
        mask=mask[:, None] & (col < cols)[None, :],
    )


@triton.jit
def add_copied(
    acc, slot, row, row_limit, col, cols, pitch, place_rows, rank, WORLD_SIZE: tl.constexpr
):
    """``acc`` plus what copy engines brought of these rows (within their owner), in the order in which it comes."""
    mask = (row < row_limit)[:, None] & (col < cols)[None, :]
    for step in tl.static_range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        place = source - (source > rank).to(tl.int32)
        pointers = slot + (place * place_rows + row).to(tl.int64)[:, None] * pitch + col[None, :]
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def end_of_copies(signals, counters, epoch, control, report, WORLD_SIZE: tl.constexpr):
    """The copy engine reads the epoch word and the counters: it must have pushed before they move."""
    await_pushed(signals, epoch, control, report, WORLD_SIZE)
    words = tl.arange(0, 8 * MAX_SLICES)
    tl.store(counters + words, tl.zeros_like(words), mask=words < (WORLD_SIZE - 1) * MAX_SLICES)


UNSPECIALIZED = [
    "rank",
    "slot",
    "num_tiles",
    "chunk_rows",
    "team",
    "tile_rows",
    "tile_cols",
    "k_blocks",
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def matmul_reduce_scatter_kernel(
    x, w, bias, out, staging, slots, partials, counters, slot_table, signal_table, signals, control, report,
    rank, slot, slot_size, place_size, rows, cols, pitch, depth, stride_x, stride_w, num_tiles, chunk_rows, team, tile_rows,
    tile_cols, k_blocks,
    WORLD_SIZE: tl.constexpr, PUSH: tl.constexpr, SPANS: tl.constexpr, SPLIT_TAIL: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPTH_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute, push, add; see the module's docstring for the protocol.

    ``slot``: the one that copy engines write; a push (``PUSH``) takes it from the epoch. In elements: ``slot_size``;
    ``place_size``, of a slot for one peer; ``pitch``, from row to row of staging and of what was copied. ``chunk_rows``: tile
    rows of a chunk. ``SPANS``: a tile is taller than a shard. ``num_tiles`` to ``k_blocks``: of ``ScatterSchedule``.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * slot_size
    dtype: tl.constexpr = out.dtype.element_ty
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        rows,
        TILE_M,
        GROUP_M,
        num_tiles,
        chunk_rows,
        team,
        tile_rows,
        tile_cols,
        k_blocks,
        SPLIT_TAIL,
    )
    share = share_of(tiles, program, num_programs, num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, tile_col = place_out(tiles, tile)
        row = first_row + tl.arange(0, TILE_M)
        col = tile_col * TILE_N + tl.arange(0, TILE_N)
        a_rows = x + tl.minimum(row, row_limit - 1).to(tl.int64) * stride_x
        acc = matmul_tile(
            a_rows,
            w,
            stride_w,
            tile_col,
            cols,
            depth,
            k_begin,
            k_end,
            TILE_M,
            TILE_N,
            TILE_K,
            EVEN_K,
            DEPTH_FIRST=DEPTH_FIRST,
        )
        owner, helpers = part_range(share, tile)
        if program != owner:
            give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                acc = take_parts(acc, partials, counters, 0, share, tile, helpers, TILE_M, TILE_N)
            home = first_row // rows
            within = row - rank * rows
            own = (within >= 0) & (within < rows) & (row < row_limit)
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, SPANS)
            if PUSH:
                push_partial(
                    acc,
                    slot_table,
                    slot_offset,
                    place_size,
                    at,
                    row,
                    row_limit,
                    rows,
                    rank,
                    WORLD_SIZE,
                    TILE_M,
                    TILE_N,
                    dtype,
                )
            if (not PUSH) and (home != rank):
                place = home - (home > rank).to(tl.int32)
                line = place * (tile_rows * TILE_M) + row - home * rows
                store_rows(acc.to(dtype), staging, line, col, cols, row < row_limit, pitch)
                chunk = (first_row - home * rows) // TILE_M // chunk_rows
                if tile == 0:
                    meet(signal_table, signals, rank, epoch, tile, control, report, WORLD_SIZE)
                count_in(counters + num_programs + place * MAX_SLICES + chunk)
            if tl.max(own.to(tl.int32), axis=0) > 0:
                if PUSH:
                    acc = take_marked(
                        acc, slots + slot_offset + at + part_offsets(TILE_M, TILE_N), place_size,
                        own[:, None] & (col >= 0)[None, :], 0, rank, tile, epoch, control, report, WORLD_SIZE - 1, MAX_SLICES,
                    )  # fmt: skip
                else:
                    chunk = (first_row - rank * rows) // TILE_M // chunk_rows
                    for i in tl.static_range(1, WORLD_SIZE):
                        wait(
                            signals + chunk,
                            1,
                            epoch,
                            (rank + i) % WORLD_SIZE * MAX_SLICES,
                            tile,
                            control,
                            report,
                            EXACT=True,
                        )
                    acc = add_copied(
                        acc,
                        slots + slot_offset,
                        within,
                        rows,
                        col,
                        cols,
                        pitch,
                        tile_rows * TILE_M,
                        rank,
                        WORLD_SIZE,
                    )
                if HAS_BIAS:
                    acc += tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
                acc = tl.where(faulted(control) != 0, float("nan"), acc)
                store_rows(acc.to(dtype), out, within, col, cols, own)
    if not PUSH:
        if program == num_programs - 1:
            end_of_copies(signals, counters + num_programs, epoch, control, report, WORLD_SIZE)
    leave(control, epoch, num_programs)


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments."""

    def __init__(self, peers: Peers, schedule: ScatterSchedule, config: MatmulConfig) -> None:
        self.peers, self.schedule, self.config = peers, schedule, config

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        staging: torch.Tensor | None,
        slot: int,
    ) -> None:
        """Launch on the current stream. ``slot``: which one a copy-engine call uses; a push reads it from the epoch."""
        peers, s, c = self.peers, self.schedule, self.config
        partials = out
        if s.has_cut_tiles:
            partials = torch.empty(
                s.num_programs * c.tile_m * c.tile_n, dtype=torch.float32, device=x.device
            )
        stride_w, depth_first = lines(w.stride())
        matmul_reduce_scatter_kernel[(s.num_programs,)](
            x, w, out if bias is None else bias, out,
            out if staging is None else staging, peers.slots, partials, peers.counters, peers.slot_table, peers.signal_table,
            peers.signals, peers.control, peers.report,
            s.rank, slot, peers.slot_size, s.place_elements, s.rows, s.cols, s.pitch, s.depth, x.stride(0), stride_w,
            s.num_tiles, min(s.chunk_rows, s.tile_rows), s.team, s.tile_rows, s.tile_cols, s.k_blocks,
            WORLD_SIZE=s.world_size, PUSH=c.transport == "sm", SPANS=s.spans_shards, SPLIT_TAIL=s.split_tail,
            TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, GROUP_M=c.group_m, EVEN_K=s.depth % c.tile_k == 0,
            HAS_BIAS=bias is not None, DEPTH_FIRST=depth_first, num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
