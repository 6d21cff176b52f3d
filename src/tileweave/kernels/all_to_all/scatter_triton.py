"""matmul_all_to_all: P = x[M, K] @ w[N, K].T + bias, cut into R parts; part p goes to rank p, in one launch.

    part     [rows, cols]  (M/R, N) where rows are scattered, (M, N/R) where columns are
    out      [R * rows, cols] or [rows, R * cols]: parts of all ranks, in rank order; memory of the caller's own
    slot     [R-1, ...]    one of two, by parity of the epoch; place i holds what goes to ("copy_engine"), or came from ("sm"),
                           the i-th other rank

It is a reduce-scatter without the sum: tiles of peers' parts come first, own ones last (``planning/schedules/scatter.py``), and an own
tile goes straight into ``out``. Parts stand in one line of rows, each padded to whole tiles. Two transports:

``"copy_engine"``  a tile of a peer's part is stored in a slot of *this* rank, row-major. The program that completes a chunk
    of tile rows tells the peer, whose copy engine *pulls* the chunk into its ``out``: addresses of results need not be
    known to anyone else, so they are plain memory, and pitched rows (columns gathered) cost nothing.
``"sm"``  tiles are stored straight into the peer's slot and announce themselves (``device/triton/self_signaling.py``), as in
    ``matmul_reduce_scatter``; the program that made the own tile at the same place takes them out of the slot.

=======================  =====  ======================================  ==================================================
signal (int32)           value  notifier                                waiter ("copy_engine")
=======================  =====  ======================================  ==================================================
counter [place, chunk]   tiles  programs, a tile each; local            who completes it; zero between calls
flag [slot, src, chunk]  1      ``src``, who completed the chunk        own copy engine; zeroed by the last program
[source, chunk]          epoch  the same program                        last program: has a time-out, names who is late
[pushed] (own)           epoch  own copy engine, behind its last pull   last program, before flags and the epoch move
=======================  =====  ======================================  ==================================================

    rank r       | tiles of r+1 ... | tiles of r+2 ... | tiles of r+3 ... | own tiles, into out |
    copy engine                     | from r-1 ....... | from r-2 ....... | from r-3 ....... |

Why there are flags beside signals: a copy engine can wait for a fixed value only, in a graph too, where epochs go on.

Why no slot is overwritten ("copy_engine"): my call ends when it has pulled all parts, so a peer that signals call n+1 has ended
call n, hence read my slot of call n, which I write again in call n+2; by then I have heard of its call n+1. Flags: a peer sets
one of slot n & 1 again in its call n+2, hence behind its n+1, which needed my n+1, hence behind my call n, which zeroed it. A
captured call, whose slot a graph freezes, has a barrier in front (``kernels/runtime/barrier.py``). ("sm"): as in
``kernels/reduce_scatter/triton.py``, since own tiles need data of every peer in every call.

Why nobody is stuck ("copy_engine"): only the last program waits, behind all its tiles; copies wait for kernels of peers, which
wait for nobody before their last tile. A wait that runs out of time sets the flags itself, so that copies go and the kernel
ends; then the result is NaN. ("sm"): as in ``matmul_reduce_scatter``: all programs are resident, under the interpreter one.

Limits: x contiguous along K, w along K or (``DEPTH_FIRST``, as backward reads it) along N; fp32 accumulation;
rounded once. Sources: fused GEMM + all-to-all, arXiv 2305.06942; the exchange of DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import give_part, matmul_tile, part_offsets, take_parts
from tileweave.device.triton.meet import await_pushed
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.self_signaling import put_marked, take_marked
from tileweave.device.triton.signal import (
    MAX_SLICES,
    count_last,
    faulted,
    leave,
    load_epoch,
    notify,
    poison,
    wait,
)
from tileweave.device.triton.tiles import OwnerTiles, part_range, place_out, share_of, unit_range
from tileweave.kernels.reduce_scatter.triton import store_rows, tile_place
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule

POISON_BLOCK = 1024


@triton.jit
def announce_chunk(signal_table, peer, rank, slot, chunk, epoch, WORLD_SIZE: tl.constexpr):
    """Tell ``peer`` that a chunk of its part stands in the slot: the flag its copy engine waits for, then the signal.

    Flags [slot, source, chunk] stand behind all signals, which are [source, chunk], R words to meet by and [pushed].
    """
    signals = symm_at(signal_table, peer, tl.int32, 4)
    mine = rank * MAX_SLICES + chunk
    notify(signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1 + mine, 1)
    notify(signals + mine, epoch)


@triton.jit
def end_of_pulls(
    signals, out, slot, num_chunks, rank, epoch, out_size, control, report,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last program: every chunk has been announced, every pull is done, flags are zero; or else the result is NaN."""
    flags = signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        for chunk in range(0, num_chunks):
            wait(signals, 1, epoch, source * MAX_SLICES + chunk, -1, control, report)
    words = tl.arange(0, 8 * MAX_SLICES)
    inside = words < WORLD_SIZE * MAX_SLICES
    if faulted(control) != 0:  # let the copies go: what they bring is overwritten below
        tl.store(flags + words, tl.full([8 * MAX_SLICES], 1, tl.int32), mask=inside)
    await_pushed(signals, epoch, control, report, WORLD_SIZE)
    if (
        faulted(control) != 0
    ):  # it may be that which ran out: a peer that came late has zeroed a flag of this call
        tl.store(flags + words, tl.full([8 * MAX_SLICES], 1, tl.int32), mask=inside)
        await_pushed(signals, epoch, control, report, WORLD_SIZE)
    tl.store(flags + words, tl.zeros_like(words), mask=inside)
    if faulted(control) != 0:
        poison(out, out_size, BLOCK)


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
    x, w, bias, out, slots, partials, counters, slot_table, signal_table, signals, control, report,
    rank, slot, slot_size, place_size, rows, cols, depth, total_rows, stride_x, stride_w, x_step, w_step,
    out_pitch, out_step, out_size,
    num_tiles, chunk_rows, num_chunks, team, tile_rows, tile_cols, k_blocks,
    WORLD_SIZE: tl.constexpr, PUSH: tl.constexpr, SPLIT_TAIL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute, announce or push, take; see the module's docstring for the protocol.

    ``x_step``, ``w_step``: rows of x and of w from one owner's part to the next one's; one of them is 0. ``out_step``,
    ``out_pitch``: elements of ``out`` from one source's part to the next one's, and from row to row. ``rows``, ``cols``: of a
    part; ``total_rows``: of x; ``chunk_rows``: tile rows of a chunk; ``place_size``: elements of a slot for one peer.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * slot_size
    dtype: tl.constexpr = out.dtype.element_ty
    line_rows = tile_rows * TILE_M  # of a part, padded
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        line_rows,
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
        home = first_row // line_rows
        first = first_row - home * line_rows
        row = first + tl.arange(0, TILE_M)
        col = tile_col * TILE_N + tl.arange(0, TILE_N)
        a_rows = x + tl.minimum(home * x_step + row, total_rows - 1).to(tl.int64) * stride_x
        b_rows = w + (home * w_step).to(tl.int64) * (1 if DEPTH_FIRST else stride_w)
        acc = matmul_tile(
            a_rows, b_rows, stride_w, tile_col, cols, depth, k_begin, k_end, TILE_M, TILE_N, TILE_K, EVEN_K,
            DEPTH_FIRST=DEPTH_FIRST,
        )  # fmt: skip
        owner, helpers = part_range(share, tile)
        if program != owner:
            give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                acc = take_parts(acc, partials, counters, 0, share, tile, helpers, TILE_M, TILE_N)
            if HAS_BIAS:
                acc += tl.load(bias + home * w_step + col, mask=col < cols, other=0.0).to(
                    tl.float32
                )[None, :]
            acc = tl.where(faulted(control) != 0, float("nan"), acc)
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, False)
            inside = part_offsets(TILE_M, TILE_N)
            exists = (row < rows)[:, None] & (col >= 0)[None, :]  # all that is pushed is taken
            place = home - (home > rank).to(tl.int32)
            if home == rank:
                store_rows(
                    acc.to(dtype),
                    out + rank.to(tl.int64) * out_step,
                    row,
                    col,
                    cols,
                    row < rows,
                    out_pitch,
                )
                if PUSH:
                    for i in tl.static_range(1, WORLD_SIZE):
                        source = (rank + WORLD_SIZE - i) % WORLD_SIZE
                        theirs = (source - (source > rank).to(tl.int32)).to(tl.int64) * place_size
                        value = take_marked(
                            tl.zeros((TILE_M, TILE_N), tl.float32), slots + slot_offset + theirs + at + inside, 0, exists,
                            source, WORLD_SIZE, tile, epoch, control, report, 1, MAX_SLICES,
                        )  # fmt: skip
                        target = out + source.to(tl.int64) * out_step
                        store_rows(value.to(dtype), target, row, col, cols, row < rows, out_pitch)
            if PUSH and home != rank:
                mine = (rank - (rank > home).to(tl.int32)).to(tl.int64) * place_size
                target = symm_at(slot_table, home, dtype, 16) + slot_offset + mine + at
                put_marked(target + inside, acc.to(dtype), exists)
            if (not PUSH) and (home != rank):
                store_rows(
                    acc.to(dtype),
                    slots + slot_offset,
                    place * line_rows + row,
                    col,
                    cols,
                    row < rows,
                    cols,
                )
                chunk = first // TILE_M // chunk_rows
                tiles_of_chunk = tl.minimum(tile_rows - chunk * chunk_rows, chunk_rows) * tile_cols
                if count_last(counters + num_programs + place * MAX_SLICES + chunk, tiles_of_chunk):
                    announce_chunk(signal_table, home, rank, slot, chunk, epoch, WORLD_SIZE)
    if not PUSH:
        if program == num_programs - 1:
            end_of_pulls(
                signals,
                out,
                slot,
                num_chunks,
                rank,
                epoch,
                out_size,
                control,
                report,
                WORLD_SIZE,
                BLOCK,
            )
    leave(control, epoch, num_programs)


def steps(how: Exchange, rows: int, cols: int, world_size: int) -> tuple[int, int, int, int]:
    """For parts of [rows, cols]: rows of x, and of w, from part to part; pitch and step in the result."""
    x_step, w_step = (rows, 0) if how.scatter_dim == 0 else (0, cols)
    out_pitch, out_step = (cols, rows * cols) if how.gather_dim == 0 else (world_size * cols, cols)
    return x_step, w_step, out_pitch, out_step


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments.

    ``schedule``: of parts padded to whole tiles; ``rows``: how many a part really has.
    """

    def __init__(
        self,
        peers: Peers,
        schedule: ScatterSchedule,
        config: MatmulConfig,
        how: Exchange,
        rows: int,
    ) -> None:
        self.peers, self.schedule, self.config, self.how, self.rows = (
            peers,
            schedule,
            config,
            how,
            rows,
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
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
        matmul_all_to_all_kernel[(s.num_programs,)](
            x, w, out if bias is None else bias, out, peers.slots, partials, peers.counters, peers.slot_table,
            peers.signal_table, peers.signals, peers.control, peers.report,
            s.rank, slot, peers.slot_size, s.place_elements, self.rows, s.cols, s.depth, x.shape[0], x.stride(0), stride_w,
            *steps(self.how, self.rows, s.cols, s.world_size), out.numel(),
            s.num_tiles, min(s.chunk_rows, s.tile_rows), s.chunks, s.team, s.tile_rows, s.tile_cols, s.k_blocks,
            WORLD_SIZE=s.world_size, PUSH=c.transport == "sm", SPLIT_TAIL=s.split_tail, TILE_M=c.tile_m, TILE_N=c.tile_n,
            TILE_K=c.tile_k, GROUP_M=c.group_m, EVEN_K=s.depth % c.tile_k == 0, HAS_BIAS=bias is not None,
            BLOCK=POISON_BLOCK, DEPTH_FIRST=depth_first, num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
