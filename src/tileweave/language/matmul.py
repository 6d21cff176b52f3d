"""The matmul main loop in plain Triton, and the sum of a tile's parts; every operator's kernel is built on these.

An operator differs in what happens before (which rows, what to wait for: its prologue hands over row pointers) and after
(where the accumulator goes: its epilogue receives it). The loop is the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.language.signal import INTERPRETED
from tileweave.language.tile import part_range


@triton.jit
def matmul_tile(
    a_rows,
    w,
    stride_w,
    tile_col,
    cols,
    depth,
    k_begin,
    k_end,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """fp32 ``[TILE_M, TILE_N]``: rows at ``a_rows`` (pointers ``[TILE_M]``) times rows of ``w [N, K]`` over K blocks
    [k_begin, k_end).

    Rows and columns out of range must point at something readable: what they compute is not stored.
    """
    n = (tile_col * TILE_N + tl.arange(0, TILE_N)) % cols
    k = tl.arange(0, TILE_K)
    w_rows = w + n.to(tl.int64) * stride_w
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for block in range(k_begin, k_end):
        index = block * TILE_K + k
        if EVEN_K:
            a = tl.load(a_rows[:, None] + index[None, :])
            b = tl.load(w_rows[:, None] + index[None, :])
        else:
            inside = (index < depth)[None, :]
            a = tl.load(a_rows[:, None] + index[None, :], mask=inside, other=0.0)
            b = tl.load(w_rows[:, None] + index[None, :], mask=inside, other=0.0)
        if INTERPRETED:  # the interpreter multiplies bf16 as bit patterns
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b.trans(1, 0), acc, input_precision="ieee")
    return acc


@triton.jit
def sum_parts(
    acc,
    partials,
    counters,
    tile,
    program,
    num_whole,
    k_blocks,
    tail_span,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Put one part of a cut tile beside the others; the program that comes last gets their sum.

    Returns ``(sum, last)``. The sum is taken in program order whoever is last, so results are the same in every run.
    Nobody waits: each counts itself in, and the one that completes the count does the rest. ``partials`` is fp32
    ``[2 * programs, TILE_M * TILE_N]``, ``counters`` int32 per cut tile, zero between calls.
    """
    cut = tile - num_whole
    first, final = part_range(tile, num_whole, k_blocks, tail_span)
    within = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
    size = TILE_M * TILE_N
    mine = partials + (program * 2 + (program * tail_span // k_blocks != cut)).to(tl.int64) * size
    tl.store(mine + within, acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + cut, 1, sem="acq_rel", scope="gpu") + 1
    last = arrived == final - first + 1
    if last:
        tl.debug_barrier()
        tl.store(counters + cut, 0)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for other in range(first, final + 1):
            theirs = partials + (other * 2 + (other * tail_span // k_blocks != cut)).to(tl.int64) * size
            acc += tl.load(theirs + within)
    return acc, last
