"""matmul_all_reduce in one shot: out[M, N] = sum over ranks of x[M, k] @ w[N, k].T for few rows, in
one launch; then, if requested, + bias, + residual, and an RMSNorm of each row.

    x     [M, k]                 M at most TILE_M, k = K/R
    w     [N, k]
    slot  [R, TEAM, tiles, tile] one of two, by parity of the epoch; part [i, j] has the partial
                                 sums of program j of rank i

What is written where. Each column tile has a team of programs, mostly one; few columns have too few
tiles to read w as fast as memory can. Each program streams its part along K of the tile's rows of
w, rounds its partial sum and stores it into its part of the slots of all ranks, its own included.
The last program of a team polls for the partial sums of the tile by all programs of all ranks.
Every rank sums the same numbers in the same order, in fp32, and rounds once: results are equal on
all ranks, bit by bit. The data is self-signaling (``device/triton/self_signaling.py``): no signal,
no fence.

======================  =====  ===========================  ========================================
signal (int32, local)   value  notifier                     waiter
======================  =====  ===========================  ========================================
counters[0] (``NORM``)  tiles  the last of each team        none: the last of all resets it to zero
counters[1] (``NORM``)  epoch  the last of all              norm programs, for all tiles
======================  =====  ===========================  ========================================

    last of a team | stream w | push to all | poll, sum, bias, residual | (NORM: store, count) |
    others         | stream w | push to all |
    norm programs                                                               | a row each |

Why no slot is overwritten: every tile needs data of every peer. So when call n ends on this rank,
each peer has begun call n and has ended call n-1, the last reader of the slot (and writer of its
zeros) that call n+1 writes. The epoch may advance while programs still poll: the next call starts
when this one has ended (``leave_early``).

Why no rank waits for ever: a program pushes before it waits, and waits for lower programs, and for
those with the same numbers on peers; norm programs have the highest numbers. So programs need not
be resident at the same time, and the interpreter may run them in turn.

With more programs than fit at the same time, early tiles travel while later ones stream.

FP8 operands (``SCALED``): a partial sum is multiplied by this rank's scales before it is rounded.
Those of x are [M], or [K/128, M] of blocks, those of w [N], or [N/128, K/128].

Limits: M <= TILE_M; x and w contiguous along K; partial sums travel in the dtype of the result. For
more rows, two shots need fewer bytes: see ``collective.py``.

Source: GEMV + all-reduce fused in one kernel, arXiv 2305.06942.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import BlockScales, matmul_tile
from tileweave.device.triton.peers import (
    faulted,
    leave,
    leave_early,
    load_epoch,
    slots_at,
    take_marked,
)
from tileweave.device.triton.self_signaling import expected_zero, put_marked
from tileweave.device.triton.signal import PUSHED_US, notify, wait
from tileweave.errors import require
from tileweave.kernels.all_reduce.norm import BLOCK as NORM_BLOCK
from tileweave.kernels.all_reduce.norm import norm_row
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.kernels.scaling import Scales, Scaling
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv

# Rows of a tile from which on programs leave after the result: earlier was slower (decision 0015).
AT_THE_END = tl.constexpr(64)


class Tensors(NamedTuple):
    """Operands and results of a call; any tensor where there is none.

    kept : [M, N], where the sum goes that is normalised into ``out``.
    """

    x: Any
    w: Any
    bias: Any
    residual: Any
    norm_weight: Any
    out: Any
    kept: Any


class Sizes(NamedTuple):
    """Numbers that belong to the shape.

    place_size : elements of a slot for one program of each team of one rank.

    cols : of ``out``.

    depth : columns of ``x``.

    stride_x, stride_w : elements from row to row.

    k_blocks : blocks of ``TILE_K`` along the depth.
    """

    place_size: Any
    cols: Any
    depth: Any
    stride_x: Any
    stride_w: Any
    k_blocks: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    TEAM : programs that multiply a tile, each a part of K.

    EVEN_K : the depth is a multiple of ``TILE_K``.

    FEW_ROWS : the tile has more rows than x.

    NORM : further programs, as many as rows, normalise the sum, ``NORM_BLOCK`` columns at a time.

    SCALED, X_STEP, W_STEP, PROMOTE : of FP8 operands, as in ``reduce_scatter/triton.py``.
    """

    WORLD_SIZE: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    TEAM: int
    EVEN_K: bool
    FEW_ROWS: bool
    HAS_BIAS: bool
    HAS_RESIDUAL: bool
    NORM: bool
    NORM_BLOCK: int
    SCALED: int = 0
    X_STEP: int = 1
    W_STEP: int = 1
    PROMOTE: bool = False


@triton.jit
def push(acc, within, mask, slots, place, place_size, C: tl.constexpr):
    """Store this program's partial sums into a place in the slots of all ranks, this one included.

    ``within``: elements of a tile, from where places begin. ``slots``: where the slots of all ranks
    begin. ``place_size``: elements of a place.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    for i in tl.static_range(WORLD_SIZE):
        target = tl.multiple_of(slots[i], 16) + place.to(tl.int64) * place_size
        put_marked(target + within, acc, mask)


@triton.jit
def multiply(tensors, scales, sizes, rows, tile, part, C: tl.constexpr):
    """fp32 [TILE_M, TILE_N]: the products of a tile by program ``part`` of its team."""
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    row = tl.arange(0, TILE_M)
    col = tile * TILE_N + tl.arange(0, TILE_N)
    x_rows = tensors.x + row.to(tl.int64) * sizes.stride_x
    k_begin = part * sizes.k_blocks // C.TEAM
    k_end = (part + 1) * sizes.k_blocks // C.TEAM
    if C.SCALED == 2:
        of_cols = scales.w + (tile * TILE_N // 128) * sizes.k_blocks
        of_blocks = BlockScales(scales.x + tl.minimum(row, rows - 1), rows, of_cols)
    else:
        of_blocks = None
    if C.SCALED == 1:  # loaded here: a load after the matmul takes 0.6 us
        of_rows = tl.load(scales.x + row * C.X_STEP, mask=row < rows, other=0.0)
        of_cols = tl.load(scales.w + col * C.W_STEP, mask=col < sizes.cols, other=0.0)
    acc = matmul_tile(
        x_rows,
        tensors.w,
        sizes.stride_w,
        tile,
        sizes.cols,
        sizes.depth,
        k_begin,
        k_end,
        TILE_M,
        TILE_N,
        C.TILE_K,
        C.EVEN_K,
        rows,
        C.FEW_ROWS,
        PROMOTE=C.PROMOTE,
        scales=of_blocks,
    )
    if C.SCALED == 1:
        acc = acc * of_rows[:, None] * of_cols[None, :]
    return acc


@triton.jit(do_not_specialize=["rank", "rows", "num_tiles"])
def matmul_all_reduce_kernel(
    tensors, scales, peers, rank, rows, sizes, num_tiles, eps, C: tl.constexpr
):
    """Teams of column tiles, then norm programs; see the module's docstring for the protocol.
    ``scales``: a ``Scales`` of FP8 operands, or None."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    TEAM: tl.constexpr = C.TEAM
    out, kept, cols = tensors.out, tensors.kept, sizes.cols
    dtype: tl.constexpr = out.dtype.element_ty
    counters = peers.counters
    program = tl.program_id(0)
    epoch = load_epoch(peers)
    fault = faulted(peers)
    if program < num_tiles * TEAM:
        # Where the slots of all ranks begin, the next rank's first. Loaded here: a load after the
        # matmul takes 0.6 us.
        slots = ()
        for i in tl.static_range(1, WORLD_SIZE + 1):
            slots = slots + (slots_at(peers, (rank + i) % WORLD_SIZE, dtype),)
        tile, part = program // TEAM, program % TEAM
        row = tl.arange(0, TILE_M)
        col = tile * TILE_N + tl.arange(0, TILE_N)
        acc = multiply(tensors, scales, sizes, rows, tile, part, C)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        # on their way while data travels
        if C.HAS_BIAS:
            bias = tl.load(tensors.bias + col, mask=col < cols, other=0.0).to(tl.float32)
        if C.HAS_RESIDUAL:
            residual = tl.load(tensors.residual + at, mask=mask, other=0.0).to(tl.float32)
        within = (
            (epoch & 1).to(tl.int64) * peers.slot_size
            + tile.to(tl.int64) * (TILE_M * TILE_N)
            + (row * TILE_N)[:, None]
            + tl.arange(0, TILE_N)[None, :]
        )
        # After a time-out of an earlier call no wait holds this rank, and it may be two calls ahead
        # of a rank that still polls this slot: so it pushes nothing.
        sent = (row < tl.where(fault == 0, rows, 0))[:, None] & (col >= 0)[None, :]
        push(acc.to(dtype), within, sent, slots, rank * TEAM + part, sizes.place_size, C)
        if TILE_M < AT_THE_END:
            leave_early(peers, epoch, tl.num_programs(0))
        if part == TEAM - 1:
            acc = take_marked(
                peers,
                tl.zeros((TILE_M, TILE_N), tl.float32),
                peers.slots + within,
                sizes.place_size,
                (row < rows)[:, None] & (col >= 0)[None, :],
                0,
                WORLD_SIZE,
                tile,
                epoch,
                WORLD_SIZE * TEAM,
                TEAM,
            )
            if C.HAS_BIAS:
                acc += bias[None, :]
            if C.HAS_RESIDUAL:
                acc += residual
            result = expected_zero(acc.to(dtype))
            if C.NORM:
                tl.store(kept + at, result, mask=mask)
                tl.debug_barrier()
                if tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
                    tl.store(counters, 0)
                    notify(counters + 1, epoch)
            else:
                tl.store(out + at, result, mask=mask)
        if TILE_M >= AT_THE_END:
            leave(peers, epoch, tl.num_programs(0))
    else:
        # A limit that no fault shortens: tiles come, then with NaN.
        wait(counters, 1, epoch, 1, -1, peers.control, peers.report, PUSHED_US)
        normed = program - num_tiles * TEAM
        norm_row(normed, kept, tensors.norm_weight, out, cols, eps, C.NORM_BLOCK)
        leave(peers, epoch, tl.num_programs(0))


# What changes between the launches of one shape.
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "eps")
SCALED_WORDS = (*WORDS[:-1], *(f"scales.{name}" for name in Scales._fields), "eps")


def launcher(
    peers: Peers,
    world_size: int,
    rank: int,
    shape: tuple[int, int, int],
    stride_x: int,
    stride_w: int,
    norm: bool,
    config: MatmulConfig,
    scaling: Scaling | None = None,
) -> Launcher:
    """Launches for one ``shape`` (M, N, k), called with (x, w, bias or None, residual or None, norm
    weight or None, eps, out, kept or None, scales of x and w if they are FP8); the caller checks
    them.

    norm : whether there is a norm weight. ``kept`` gets the sum that is normalised into ``out``.

    scaling : of FP8 operands.
    """
    c, (rows, cols, depth) = config, shape
    require(
        rows <= c.tile_m,
        f"one shot of {rows} rows",
        f"a tile's, {c.tile_m}",
        "a configuration of the library's matmul",
    )
    num_tiles = cdiv(cols, c.tile_n)

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        kept: torch.Tensor | None,
        scales: Sequence[torch.Tensor] = (),
    ) -> Call:
        given = (x, w, bias, residual, norm_weight, out, kept)
        tensors = Tensors(*[out if tensor is None else tensor for tensor in given])
        words = [tensor.data_ptr() for tensor in (*tensors, *scales)]

        def changing() -> dict[str, Any]:
            choices = Choices(
                WORLD_SIZE=world_size,
                TILE_M=c.tile_m,
                TILE_N=c.tile_n,
                TILE_K=c.tile_k,
                TEAM=c.team,
                EVEN_K=depth % c.tile_k == 0,
                FEW_ROWS=rows < c.tile_m,
                HAS_BIAS=bias is not None,
                HAS_RESIDUAL=residual is not None,
                NORM=norm,
                NORM_BLOCK=NORM_BLOCK,
            )
            if scaling is not None:
                choices = choices._replace(**scaling.choices(c))
            given = Scales(*scales) if scales else None
            return {"tensors": tensors, "scales": given, "eps": eps, "C": choices}

        variant = (bias is None, residual is None, alignment(words))
        return variant, (*words, eps), changing, ()

    place_size = num_tiles * c.tile_m * c.tile_n
    fixed = {
        "peers": peers,
        "rank": rank,
        "sizes": Sizes(place_size, cols, depth, stride_x, stride_w, cdiv(depth, c.tile_k)),
        "rows": rows,
        "num_tiles": num_tiles,
    }
    return Launcher(
        matmul_all_reduce_kernel,
        num_tiles * c.team + (rows if norm else 0),
        fixed,
        pack,
        WORDS if scaling is None else SCALED_WORDS,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
