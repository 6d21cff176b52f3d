"""all_to_all_matmul: y = exchanged(x) @ w.T + bias, in one launch: an all-gather in which each rank gets another part.

    x        [M, K]          cut into R parts [rows, depth], part p for rank p: rows scattered (M/R, K), columns (M, K/R)
    slot     [R-1, rows, depth]  one of two, by parity of the epoch; place i holds the part that came from rank-1-i
    y        parts below each other (``gather_dim`` 0): [R * rows, N], w [N, depth]
             parts side by side (``gather_dim`` 1): [rows, N], w [N, R * depth]

It is ``all_gather_matmul`` but for addresses, so its kernels run it (``EXCHANGE``): read that file for signals, slots and the
proof, which hold here, too. This file has what differs:

- The own part is read where it stands in x: part p begins at element ``p * x_step``, its rows are ``x_pitch`` elements apart. A
  producer or a copy engine sends each peer the part that is its.
- Parts below each other: tiles go by sources, as in an all-gather.
- Parts side by side (``GATHER_K``): every tile needs every source. Its K loop goes over sources by order of arrival, the own
  one first, and waits before each. Copy engines send *chunks* of tile rows, a signal each, to all peers in turn, and tiles
  are in order of rows: the first tiles wait for the first chunk only, the rest of the exchange hides behind them.

    copy engine  | chunk 0 > r+1 | chunk 0 > r+2 | chunk 0 > r+3 | chunk 1 > r+1 | ...
    a tile's K   | own part ............ | part of r-1 ........ | part of r-2 ........ | part of r-3 |
                                         ^ wait, once a source

==================  =====  =====================================  =========================================
signal (int32)      value  notifier                               waiter (``GATHER_K``)
==================  =====  =====================================  =========================================
[source, chunk]     epoch  copy engine of ``source``              tiles with rows of that chunk
[source, slice]     epoch  producers of ``source`` (``"sm"``)     every tile, for all slices
==================  =====  =====================================  =========================================

Every chunk of every source is waited for by some tile, so a call still ends behind a signal of each peer.

Sources: fused GEMM + all-to-all, arXiv 2305.06942; the output projection of DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.matmul import matmul_tile
from tileweave.device.triton.remote import put_parts, put_rows
from tileweave.device.triton.signal import MAX_SLICES, consume_token, notify_all, wait
from tileweave.device.triton.trace import label, stamp


@triton.jit
def push_parts(
    x, slot_table, signal_table, rank, slot_offset, rows, depth, x_step, x_pitch, slice_size, epoch, program, num_producers,
    trace, WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Producer: push this program's slices of every peer's part, and signal each; as ``all_gather_matmul.push_shard``."""
    for piece in range(program, NUM_SLICES, num_producers):
        stamp(trace, piece, 0, TRACE)
        begin = piece * slice_size
        end = tl.minimum(begin + slice_size, rows * depth)
        put_parts(
            slot_table,
            rank,
            WORLD_SIZE,
            slot_offset,
            rows * depth,
            x,
            x_step,
            x_pitch,
            depth,
            begin,
            end,
            SPANS,
            BLOCK,
        )
        notify_all(signal_table, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, SPANS)
        stamp(trace, piece, 1, TRACE)
        label(trace, piece, piece, TRACE)


@triton.jit
def multiply_sources(
    x, slot, w, stride_w, tile_col, cols, rows, depth, x_pitch, first_row, rank, k_begin, k_end,
    signals, chunk_rows, epoch, tile, control, report,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr, DEPTH_FIRST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``matmul_tile`` over parts side by side, by order of arrival. ``x``: the own part. K blocks [k_begin, k_end) count
    through all parts in that order, each of them rounded up to whole blocks."""
    row = tl.minimum(first_row + tl.arange(0, TILE_M), rows - 1).to(tl.int64)
    blocks = (depth + TILE_K - 1) // TILE_K
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(k_begin // blocks, (k_end - 1) // blocks + 1):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        begin = tl.maximum(k_begin - step * blocks, 0)
        end = tl.minimum(k_end - step * blocks, blocks)
        w_part = w + source.to(tl.int64) * depth * (stride_w if DEPTH_FIRST else 1)
        if step == 0:
            acc = matmul_tile(
                x + row * x_pitch, w_part, stride_w, tile_col, cols, depth, begin, end, TILE_M, TILE_N, TILE_K, EVEN_K,
                DEPTH_FIRST=DEPTH_FIRST, start=acc,
            )  # fmt: skip
        else:
            word = source * MAX_SLICES + first_row // chunk_rows
            token = wait(signals, NUM_SLICES, epoch, word, tile, control, report, EXACT=EXACT)
            part = slot + ((step - 1) * rows + row) * depth
            acc = matmul_tile(
                part, w_part, stride_w, tile_col, cols, depth, consume_token(begin, token), end, TILE_M, TILE_N, TILE_K,
                EVEN_K, DEPTH_FIRST=DEPTH_FIRST, start=acc,
            )  # fmt: skip
    return acc


@triton.jit
def copy_exchanged(
    x, slot, exchanged, signals, rank, rows, depth, x_pitch, share, num_chunks, program, epoch, control, report,
    WORLD_SIZE: tl.constexpr, NUM_SLICES: tl.constexpr, SPANS: tl.constexpr, GATHER_K: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Hand the exchanged input back: each program copies its share of every part, locally. ``x``: the own part."""
    size = rows * depth
    begin = program * share
    end = tl.minimum(begin + share, size)
    for step in range(0, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        target = exchanged + source.to(tl.int64) * (depth if GATHER_K else size)
        pitch = depth * WORLD_SIZE if GATHER_K else depth
        if step == 0:
            put_rows(target, x, begin, end, depth, pitch, x_pitch, BLOCK)
        else:
            for chunk in range(0, num_chunks):
                wait(
                    signals,
                    NUM_SLICES,
                    epoch,
                    source * MAX_SLICES + chunk,
                    -1,
                    control,
                    report,
                    EXACT=EXACT,
                )
            place = source if SPANS else step - 1
            put_rows(
                target,
                slot + tl.cast(place, tl.int64) * size,
                begin,
                end,
                depth,
                pitch,
                depth,
                BLOCK,
            )
