"""all_to_all_matmul: y = exchanged(x) @ w.T + bias, in one launch: an all-gather in which each rank
receives another part of x.

    x        [M, K]          cut into R parts [rows, depth], part p for rank p: rows scattered
                             (M/R, K), or columns (M, K/R)
    slot     [R-1, rows, depth]  one of two, by parity of the epoch; index i holds the part that
                             came from rank-1-i
    y        parts below each other (``gather_dim`` 0): [R * rows, N], w [N, depth]
             parts side by side (``gather_dim`` 1): [rows, N], w [N, R * depth]

It is ``all_gather_matmul`` except for addresses, so its kernels compute it (``EXCHANGE``): read
``kernels/all_gather/triton.py`` for signals, slots and the proof, which hold here, too. This file
has what differs:

- The own part is read where it is in x: part p begins at element ``p * step``, its rows are
  ``pitch`` elements apart. A producer or a copy engine sends each peer its part.
- Parts below each other: tiles go by sources, as in an all-gather.
- Parts side by side (``GATHER_K``): every tile needs every source. Its K loop goes over sources by
  order of arrival, the own one first, and waits before each. Copy engines send *chunks* of tile
  rows, a signal each, to all peers in turn, and tiles are in order of rows: the first tiles wait
  for the first chunk only, the rest of the exchange overlaps their computation.

    copy engine  | chunk 0 > r+1 | chunk 0 > r+2 | chunk 0 > r+3 | chunk 1 > r+1 | ...
    a tile's K   | own part ............ | part of r-1 ........ | part of r-2 ........ | ...
                                         ^ wait, once per source

==================  =====  ================================  =====================================
signal (int32)      value  notifier                          waiter (``GATHER_K``)
==================  =====  ================================  =====================================
[source, chunk]     epoch  copy engine of ``source``         tiles with rows of that chunk
[source, slice]     epoch  producers of ``source``           every tile, for all slices
                           (``"sm"``)
==================  =====  ================================  =====================================

Every chunk of every source is waited for by some tile, so a call still ends after a signal of each
peer.

Sources: fused GEMM + all-to-all, arXiv 2305.06942; the output projection of DeepSpeed Ulysses,
arXiv 2309.14509.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.matmul import matmul_tile
from tileweave.device.triton.peers import notify_all, wait
from tileweave.device.triton.remote import put_parts, put_rows
from tileweave.device.triton.signal import MAX_SLICES, consume_token
from tileweave.device.triton.trace import label, stamp
from tileweave.kernels.all_gather.arrivals import own_or_slot


@triton.jit
def push_parts(
    x, peers, rank, slot_offset, sizes, epoch, program, num_producers, trace, C: tl.constexpr
):
    """Producer: push this program's slices of every peer's part, and signal each; as
    ``all_gather_matmul.push_shard``."""
    size = sizes.rows * sizes.depth
    for piece in range(program, C.NUM_SLICES, num_producers):
        stamp(trace, piece, 0, C.TRACE)
        begin = piece * sizes.slice_size
        end = tl.minimum(begin + sizes.slice_size, size)
        put_parts(
            peers.slot_table,
            rank,
            C.WORLD_SIZE,
            slot_offset,
            size,
            x,
            sizes.step,
            sizes.pitch,
            sizes.depth,
            begin,
            end,
            C.SPANS,
            C.PUSH_BLOCK,
        )
        notify_all(peers, rank * MAX_SLICES + piece, rank, epoch, C.WORLD_SIZE, C.SPANS)
        stamp(trace, piece, 1, C.TRACE)
        label(trace, piece, piece, C.TRACE)


@triton.jit
def multiply_sources(x, slot, w, peers, unit, sizes, rank, chunk_rows, epoch, C: tl.constexpr):
    """``matmul_tile`` over parts side by side, by order of arrival. ``x``: the own part.

    The K blocks of ``unit`` count through all parts in that order, each of them rounded up to whole
    blocks.
    """
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    rows, depth, stride_w = sizes.rows, sizes.depth, sizes.stride_w
    row = tl.minimum(unit.first_row + tl.arange(0, TILE_M), rows - 1).to(tl.int64)
    blocks = (depth + C.TILE_K - 1) // C.TILE_K
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(unit.k_begin // blocks, (unit.k_end - 1) // blocks + 1):
        source = (rank + C.WORLD_SIZE - step) % C.WORLD_SIZE
        begin = tl.maximum(unit.k_begin - step * blocks, 0)
        end = tl.minimum(unit.k_end - step * blocks, blocks)
        w_part = w + source.to(tl.int64) * depth * (stride_w if C.DEPTH_FIRST else 1)
        if step > 0:
            index = source * MAX_SLICES + unit.first_row // chunk_rows
            token = wait(peers, index, epoch, unit.tile, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)
            begin = consume_token(begin, token)
        # one loop for both, since each has buffers of its own in shared memory
        remote = tl.cast(step - 1, tl.int64) * rows * depth
        part = own_or_slot(x, slot, remote, step == 0)
        acc = matmul_tile(
            part + row * tl.where(step == 0, sizes.pitch, depth),
            w_part,
            stride_w,
            unit.col,
            sizes.cols,
            depth,
            begin,
            end,
            TILE_M,
            TILE_N,
            C.TILE_K,
            C.EVEN_K,
            DEPTH_FIRST=C.DEPTH_FIRST,
            start=acc,
        )
    return acc


@triton.jit
def copy_exchanged(
    x, slot, exchanged, peers, rank, sizes, num_chunks, program, epoch, C: tl.constexpr
):
    """Return the exchanged input: each program copies its elements of every part, locally.

    ``x``: the own part.
    """
    depth = sizes.depth
    size = sizes.rows * depth
    begin = program * sizes.copy_size
    end = tl.minimum(begin + sizes.copy_size, size)
    for step in range(0, C.WORLD_SIZE):
        source = (rank + C.WORLD_SIZE - step) % C.WORLD_SIZE
        target = exchanged + source.to(tl.int64) * (depth if C.GATHER_K else size)
        pitch = depth * C.WORLD_SIZE if C.GATHER_K else depth
        if step == 0:
            put_rows(target, x, begin, end, depth, pitch, sizes.pitch, C.PUSH_BLOCK)
        else:
            for chunk in range(0, num_chunks):
                index = source * MAX_SLICES + chunk
                wait(peers, index, epoch, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)
            place = source if C.SPANS else step - 1
            part = slot + tl.cast(place, tl.int64) * size
            put_rows(target, part, begin, end, depth, pitch, depth, C.PUSH_BLOCK)
