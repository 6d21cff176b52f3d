"""all_gather_matmul: out[M, N/R] = gather(x)[M, K] @ w[N/R, K].T + bias, in one launch, no barrier.

    x     [m, K]       own shard, m = M/R; never copied on its own rank
    slot  [R-1, m, K]  one of two, by parity of the epoch; place i holds the shard of rank-1-i
    w     [N/R, K]     out [M, N/R]     gathered [M, K] if asked for

Who writes, who reads. Rank r's shard goes into the slots of the R-1 peers, and nobody else writes there. Either the copy
engines push it (``transport="copy_engine"``: one chunk, one signal for each peer), or the first ``num_producers``
programs of this kernel do (``"sm"``: ``NUM_SLICES`` slices, one signal each). A tile waits for the shards its rows are in.

==================  =====  ====================================  ==========================================
signal (int32)      value  notifier                              waiter
==================  =====  ====================================  ==========================================
[source, slice]     epoch  rank ``source``, behind that slice    tiles with rows of that source
[pushed] (own)      epoch  own copy engine, behind its last push last program to leave, before the epoch moves
==================  =====  ====================================  ==========================================

    rank r   | push to r+1 | push to r+2 | push to r+3 |
    tiles    | own shard ......... | rank r-1 ......... | rank r-2 ......... | rank r-3 ......... | cut tiles |
                                   ^ wait, once a tile; long arrived

Why no slot is overwritten: every rank signals every peer in every call and each source's rows are in some tile, so when
my call n ends I have call n's signals of all peers: each has begun call n, hence ended n-1, the last reader of the slot
that call n+1 writes. It leans on stream order; a captured copy-engine call, whose slot a graph freezes, has a barrier.

Why nobody is stuck: a producer pushes before it waits, producers are the lowest programs (they start first), and waits
are for other ranks' producers only. Under the interpreter one program is the producer and runs first.

Waves: programs take whole tiles in turn; tiles that do not fill a last wave are cut along K (``language/tile.py``).
Limits: x and w contiguous along K; fp32 accumulation; cut tiles are summed in a fixed order.
Sources: FLUX (arXiv 2406.06858) for tile-level waits and order; stream-K (arXiv 2301.03598) for the tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.config import MatmulConfig
from tileweave.kernels.endpoint import Endpoint
from tileweave.language.matmul import matmul_tile, sum_parts
from tileweave.language.remote import get, put_all, symm_at
from tileweave.language.signal import consume_token, faulted, leave, load_epoch, notify, wait
from tileweave.language.tile import place, unit_count, unit_range
from tileweave.language.trace import label, stamp
from tileweave.schedule import TileSchedule, slice_bounds

MAX_SLICES = tl.constexpr(32)
PUSH_BLOCK = 2048  # elements that a producer moves at once: 16 bytes a thread with 8 warps


@triton.jit
def push_shard(
    x, slot_table, signal_table, rank, slot_offset, size, slice_size, epoch, program, num_producers, trace,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Producer: push this program's slices of the own shard to every peer, and signal each."""
    for piece in range(program, NUM_SLICES, num_producers):
        stamp(trace, piece, 0, TRACE)
        begin = piece * slice_size
        end = tl.minimum(begin + slice_size, size)
        put_all(slot_table, rank, WORLD_SIZE, slot_offset, size, x, begin, end, x.dtype.element_ty, BLOCK)
        for i in tl.static_range(1, WORLD_SIZE):
            peer = (rank + i) % WORLD_SIZE
            notify(symm_at(signal_table, peer, tl.int32, 16) + rank * MAX_SLICES + piece, epoch)
        stamp(trace, piece, 1, TRACE)
        label(trace, piece, piece, TRACE)


@triton.jit
def wait_sources(
    signals, first_row, row_limit, rows, rank, epoch, tile, control, report, TILE_M: tl.constexpr, NUM_SLICES: tl.constexpr
):  # fmt: skip
    """Wait for every shard but the own that rows [first_row, first_row + TILE_M) are in. Returns a token."""
    token = tl.cast(0, tl.int32)
    last_row = tl.minimum(first_row + TILE_M, row_limit) - 1
    for source in range(first_row // rows, last_row // rows + 1):
        if source != rank:
            token = wait(signals, NUM_SLICES, epoch, source * MAX_SLICES, tile, control, report)
    return token


@triton.jit
def row_pointers(x, slot, first_row, row_limit, rows, depth, rank, WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr):
    """Pointers to gathered rows: the own ones in ``x``, the others in the slot. Rows past the limit repeat the last."""
    row = tl.minimum(first_row + tl.arange(0, TILE_M), row_limit - 1)
    source = row // rows
    within = (row % rows).to(tl.int64) * depth
    index = (rank + WORLD_SIZE - source - 1) % WORLD_SIZE
    remote = slot + index.to(tl.int64) * rows * depth + within
    return tl.where(source == rank, x + within, remote)


@triton.jit
def copy_gathered(
    x, slot, gathered, signals, rank, size, share, program, epoch, control, report,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hand the gathered input back: each program copies its share of every shard, locally."""
    begin = program * share
    end = tl.minimum(begin + share, size)
    get(gathered + rank.to(tl.int64) * size, x, begin, end, BLOCK)
    for step in range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        wait(signals, NUM_SLICES, epoch, source * MAX_SLICES, -1, control, report)
        get(gathered + source.to(tl.int64) * size, slot + (step - 1) * size.to(tl.int64), begin, end, BLOCK)


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
    tl.store(out + row.to(tl.int64)[:, None] * cols + col[None, :], acc.to(out.dtype.element_ty), mask=mask)


UNSPECIALIZED = [
    "rank", "slot", "num_producers", "num_tiles", "num_whole", "tail_span", "tile_rows", "tile_cols", "k_blocks", "max_units",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_kernel(
    x, w, bias, out, gathered, slots, partials, counters,
    slot_table, signal_table, signals, control, report, trace,
    rank, slot, slot_size, rows, cols, depth, stride_w, slice_size, share_size, num_producers,
    num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks, max_units,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, PUSH: tl.constexpr, PUSH_BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATHERED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Dispatch the roles; see the module's docstring for the protocol."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * slot_size
    if PUSH:
        if program < num_producers:
            push_shard(
                x, slot_table, signal_table, rank, slot_offset, rows * depth, slice_size, epoch, program, num_producers,
                trace, WORLD_SIZE, NUM_SLICES, PUSH_BLOCK, TRACE,
            )  # fmt: skip
    whole, units = unit_count(program, num_programs, num_tiles, num_whole, k_blocks, tail_span)
    for index in range(0, units):
        record = NUM_SLICES + program * max_units + index
        tile, k_begin, k_end = unit_range(
            index, whole, program, num_programs, num_tiles, num_whole, k_blocks, tail_span
        )
        first_row, row_limit, col = place(tile, rank, WORLD_SIZE, rows, TILE_M, tile_rows, tile_cols, GROUP_M)
        label(trace, record, tile + 1, TRACE)
        stamp(trace, record, 0, TRACE)
        token = wait_sources(signals, first_row, row_limit, rows, rank, epoch, tile, control, report, TILE_M, NUM_SLICES)
        stamp(trace, record, 1, TRACE)
        k_begin = consume_token(k_begin, token)
        a_rows = row_pointers(x, slots + slot_offset, first_row, row_limit, rows, depth, rank, WORLD_SIZE, TILE_M)
        acc = matmul_tile(a_rows, w, stride_w, col, cols, depth, k_begin, k_end, TILE_M, TILE_N, TILE_K, EVEN_K)
        if k_end - k_begin == k_blocks:
            store_tile(acc, out, bias, first_row, row_limit, col, cols, control, TILE_M, TILE_N, HAS_BIAS)
        else:
            total, last = sum_parts(
                acc, partials, counters, tile, program, num_whole, k_blocks, tail_span, TILE_M, TILE_N
            )
            if last:
                store_tile(total, out, bias, first_row, row_limit, col, cols, control, TILE_M, TILE_N, HAS_BIAS)
        stamp(trace, record, 2, TRACE)
    if GATHERED:
        copy_gathered(
            x, slots + slot_offset, gathered, signals, rank, rows * depth, share_size, program, epoch, control, report,
            WORLD_SIZE, NUM_SLICES, PUSH_BLOCK,
        )  # fmt: skip
    if not PUSH:  # the copy engine reads the epoch word: it must have pushed before the word moves
        pushed = WORLD_SIZE * MAX_SLICES + WORLD_SIZE
        if program == num_programs - 1:
            wait(signals, 1, epoch, pushed, -1, control, report)
    leave(control, epoch, num_programs)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    peers: Endpoint,
    schedule: TileSchedule,
    config: MatmulConfig,
    slot: int,
    trace: torch.Tensor | None = None,
) -> None:
    """Launch on the current stream; the arguments are checked by ``ops``.

    ``slot``: which slot a copy-engine call uses; an in-kernel push reads it from the epoch.
    """
    push = config.transport == "sm"
    slices = config.num_slices if push else 1
    size = x.numel()
    cut = schedule.num_whole < schedule.num_tiles
    partials = out
    if cut:
        words = 2 * schedule.num_programs * config.tile_m * config.tile_n
        partials = torch.empty(words, dtype=torch.float32, device=x.device)
    all_gather_matmul_kernel[(schedule.num_programs,)](
        x, w, out if bias is None else bias, out, out if gathered is None else gathered,
        peers.slots, partials, peers.counters,
        peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
        peers.control if trace is None else trace,
        schedule.rank, slot, peers.slot_size, schedule.rows, schedule.cols, schedule.depth, w.stride(0),
        slice_bounds(size, slices, 0, PUSH_BLOCK)[1], slice_bounds(size, schedule.num_programs, 0, PUSH_BLOCK)[1],
        min(config.num_producers, schedule.num_programs),
        schedule.num_tiles, schedule.num_whole, schedule.tail_span, schedule.tile_rows, schedule.tile_cols,
        schedule.k_blocks, schedule.max_units(),
        WORLD_SIZE=schedule.world_size, NUM_SLICES=slices, PUSH=push, PUSH_BLOCK=PUSH_BLOCK,
        TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k, GROUP_M=config.group_m,
        EVEN_K=schedule.depth % config.tile_k == 0, HAS_BIAS=bias is not None, GATHERED=gathered is not None,
        TRACE=trace is not None, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
