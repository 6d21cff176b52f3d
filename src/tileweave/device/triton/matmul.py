"""The matmul main loop in plain Triton, and how programs exchange the partial tiles of a tile that
is cut along K.

The Triton kernels of operators that multiply are built on these. An operator differs in what
happens before (which rows, what to wait for: its prologue passes row pointers) and after (where the
accumulator goes: its epilogue receives it).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileweave.device.triton.signal import INTERPRETED


class BlockScales(NamedTuple):
    """The scales of FP8 blocks that a tile needs: one for 128 of K (``TILE_K``) of a row, and one
    for 128 x 128 of ``w``.

    rows : pointers [TILE_M] to those of the first K block of the tile's rows.
    step : elements from one K block's to the next.
    cols : pointer to that of the first K block of the tile's columns, which share them.
    """

    rows: Any
    step: Any
    cols: Any


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
    rows=0,
    FEW_ROWS: tl.constexpr = False,
    DEPTH_FIRST: tl.constexpr = False,
    start=None,
    PROMOTE: tl.constexpr = False,
    scales=None,
    X_FIRST: tl.constexpr = False,
):
    """fp32 ``[TILE_M, TILE_N]``: rows at ``a_rows`` (pointers ``[TILE_M]``) times rows of
    ``w [N, K]`` over K blocks [k_begin, k_end).

    Rows that are read must point to readable memory, and columns out of range wrap around: products
    of those out of range are not stored. ``EVEN_K``: ``depth`` is a multiple of TILE_K, so loads
    need no mask along K. ``FEW_ROWS``: just the first ``rows`` rows are read, which saves the
    traffic for the rest of a tile: half of all, where a tile has as many rows as columns.
    ``DEPTH_FIRST``: ``w`` is [K, N], its rows ``stride_w`` apart: a weight as backward reads it.
    ``start``: what the sum begins with. ``PROMOTE``: of FP8, sums are rounded to fp32 after each K
    block; tensor cores keep fewer bits between.

    ``scales``: :class:`BlockScales` of FP8, or None. Each K block is multiplied by its scales
    before it is added. Those of K block ``k_begin`` are read also where there is none to multiply.
    The compiler loads ahead what is multiplied, but not the scales: they are loaded here one block
    ahead, since a load that is waited for takes as long as a block of 16 rows.

    Low and wide tiles are multiplied as w @ x.T, unless ``X_FIRST``: the tensor cores of Hopper
    take at least 64 rows of the first matrix at a time, but as few as 8 columns of the second.
    """
    W_FIRST: tl.constexpr = TILE_M < 64 and TILE_N >= 64 and not X_FIRST
    UNMASKED: tl.constexpr = EVEN_K and scales is None  # with scales only masked loads are measured
    n = (tile_col * TILE_N + tl.arange(0, TILE_N)) % cols
    k = tl.arange(0, TILE_K)
    w_rows = w + n if DEPTH_FIRST else w + n.to(tl.int64) * stride_w
    few = (tl.arange(0, TILE_M) < rows)[:, None]
    if start is None:
        acc = tl.zeros((TILE_N, TILE_M) if W_FIRST else (TILE_M, TILE_N), tl.float32)
    else:
        acc = start.trans(1, 0) if W_FIRST else start
    if scales is not None:  # peers wrote some of them: not from a stale cache
        of_rows = tl.load(scales.rows + k_begin * scales.step, cache_modifier=".cg")
        of_cols = tl.load(scales.cols + k_begin)
    for block in range(k_begin, k_end):
        index = block * TILE_K + k
        inside = (index < depth)[None, :]
        a_at = a_rows[:, None] + index[None, :]
        if DEPTH_FIRST:
            b_at = w_rows[:, None] + index.to(tl.int64)[None, :] * stride_w
        else:
            b_at = w_rows[:, None] + index[None, :]
        if FEW_ROWS and UNMASKED:
            a = tl.load(a_at, mask=few, other=0.0)
        elif FEW_ROWS:
            a = tl.load(a_at, mask=few & inside, other=0.0)
        elif UNMASKED:
            a = tl.load(a_at)
        else:
            a = tl.load(a_at, mask=inside, other=0.0)
        if UNMASKED:
            b = tl.load(b_at)
        else:
            b = tl.load(b_at, mask=inside, other=0.0)
        if INTERPRETED:  # the interpreter multiplies bf16 as bit patterns
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        if scales is not None:
            scale = (of_rows * of_cols)[None, :] if W_FIRST else (of_rows * of_cols)[:, None]
            ahead = tl.minimum(block + 1, k_end - 1)
            of_rows = tl.load(scales.rows + ahead * scales.step, cache_modifier=".cg")
            of_cols = tl.load(scales.cols + ahead)
        if W_FIRST:
            first, second = b, a.trans(1, 0)
        else:
            first, second = a, b.trans(1, 0)
        if scales is not None:
            acc += tl.dot(first, second, input_precision="ieee") * scale
        elif PROMOTE:
            acc += tl.dot(first, second, input_precision="ieee")
        else:
            acc = tl.dot(first, second, acc, input_precision="ieee")
    return acc.trans(1, 0) if W_FIRST else acc


@triton.jit
def part_offsets(TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Offsets of a tile's elements in a slot: 8 x 8 blocks, as warps hold the results of tensor
    cores (``device/gluon/matmul.py``)."""
    row = tl.arange(0, TILE_M)
    col = tl.arange(0, TILE_N)
    return (row // 8 * (8 * TILE_N) + row % 8 * 8)[:, None] + (col // 8 * 64 + col % 8)[None, :]


@triton.jit
def give_part(
    acc, partials, counters, base, share, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """The helper's side of a cut tile, ``tile`` of a segment: store the partial tile where the
    owner finds it, and count it in.

    ``partials`` is fp32, one tile for each program of a segment: a program helps at most once in a
    segment, with the first unit of its span. ``counters`` is int32, zero between calls. ``base``:
    programs of the segments before this one, so that segments share neither partial tiles nor
    counters.
    """
    within = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
    tl.store(partials + (base + share.program).to(tl.int64) * (TILE_M * TILE_N) + within, acc)
    tl.debug_barrier()
    tl.atomic_add(counters + (base + tile - share.whole), 1, sem="release", scope="gpu")


@triton.jit
def take_parts(
    acc, partials, counters, base, share, tile, helpers, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """The owner's side: wait for all helpers, then add their partial tiles in order of programs,
    from the highest down, so that results never depend on timing.

    The wait needs no bound: helpers are lower programs, and each gives its partial tile before it
    takes any in this segment. Their waits for other ranks are bounded.
    """
    cut_tile = base + tile - share.whole
    while tl.atomic_add(counters + cut_tile, 0, sem="acquire", scope="gpu") < helpers:
        pass
    tl.debug_barrier()
    tl.store(counters + cut_tile, 0)
    within = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
    for below in range(1, helpers + 1):
        acc += tl.load(
            partials
            + (base + share.program - below * share.team).to(tl.int64) * (TILE_M * TILE_N)
            + within
        )
    return acc
