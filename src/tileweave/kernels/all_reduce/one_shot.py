"""matmul_all_reduce in one shot: out[M, N] = sum over ranks of x[M, k] @ w[N, k].T, for few rows, in one launch; then, if
asked for, + bias, + residual, and an RMSNorm of each row.

    x [M, k]  w [N, k]  k = K/R, M at most a tile    slot [R, tiles, tile]  one of two, by parity of the epoch; a place a rank

Who writes, who reads. One program a column tile: it streams its rows of w, rounds its partial, stores it into its rank's
place in every rank's slot, its own too, and polls for the same tile of all ranks. Every rank sums the same numbers in rank
order, in fp32, and rounds once: results are equal on all ranks, bit by bit. There is no signal and no fence: data announces
itself (``device/triton/self_signaling.py``).

======================  =====  ===========================  =============================================
word (int32, local)     value  notifier                     waiter
======================  =====  ===========================  =============================================
counters[0] (``NORM``)  tiles  tile programs, one each      none: the last of them sets it to zero again
counters[1] (``NORM``)  epoch  the last of them             norm programs, behind all tiles
======================  =====  ===========================  =============================================

    program t | stream w | push to all | poll, sum, bias, residual | (NORM: round, store, count in)
    norm programs                                                    | a row each: RMSNorm |

Why no slot is overwritten: every tile needs data of every peer, so when my call n ends each peer has begun call n, hence ended
n-1, the last reader of the slot (and writer of its zeros) that call n+1 writes. The epoch may move while programs still poll:
the next call starts when this one has ended (``leave_early``).
Why nobody is stuck: a program pushes before it waits, and waits for the same program of peers; norm programs have the
highest numbers and wait for lower ones. So programs need not be resident at once, and the interpreter may run them in turn.

With more programs than fit at once, early tiles travel while later ones stream.
Limits: M <= TILE_M; x and w contiguous along K; partials travel in x's dtype. For more rows two shots are fewer bytes: see
``collective.py``. Source: GEMV + all-reduce fused in one kernel, arXiv 2305.06942.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.device.triton.matmul import matmul_tile
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.self_signaling import expected_zero, put_marked, take_marked
from tileweave.device.triton.signal import (
    MAX_SLICES,
    PUSHED_US,
    faulted,
    leave,
    leave_early,
    load_epoch,
    notify,
    wait,
)
from tileweave.errors import require
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.problem import MatmulConfig

AT_THE_END = tl.constexpr(
    64
)  # rows of a tile from which programs leave behind the result: early was slower (decision 0015)
NORM_BLOCK = 2048  # columns that a norm program reads at once


@triton.jit
def norm_row(row, y, weight, out, cols, eps, BLOCK: tl.constexpr):
    """RMSNorm of one row of ``y`` as it was rounded, in fp32."""
    index = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + index < cols
        value = tl.load(y + row.to(tl.int64) * cols + begin + index, mask=inside, other=0.0).to(
            tl.float32
        )
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    for begin in range(0, cols, BLOCK):
        inside = begin + index < cols
        value = tl.load(y + row.to(tl.int64) * cols + begin + index, mask=inside, other=0.0).to(
            tl.float32
        )
        gain = tl.load(weight + begin + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            out + row.to(tl.int64) * cols + begin + index,
            (value * scale * gain).to(out.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def exchange(
    acc, row, col, rows, slots, peers, slot_offset, place_size, tile, rank, epoch, fault, num_programs, control, report,
    WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Push this rank's partial to all, itself too, and sum what all pushed, in rank order.

    ``place_size``: elements of a slot for one rank. ``fault``: as it was at the begin. After a time-out of an earlier call no
    wait holds this rank, and it may be two calls ahead of one that still polls this slot: so it pushes nothing.
    """
    within = (
        tile.to(tl.int64) * (TILE_M * TILE_N)
        + (row * TILE_N)[:, None]
        + tl.arange(0, TILE_N)[None, :]
    )
    mask = (row < rows)[:, None] & (col >= 0)[None, :]
    value = acc.to(dtype)
    for i in tl.static_range(WORLD_SIZE):
        target = tl.multiple_of(peers[i], 16) + slot_offset + rank.to(tl.int64) * place_size
        put_marked(target + within, value, mask & (row < tl.where(fault == 0, rows, 0))[:, None])
    if TILE_M < AT_THE_END:
        leave_early(control, epoch, num_programs)
    return take_marked(
        tl.zeros((TILE_M, TILE_N), tl.float32), slots + slot_offset + within, place_size, mask, 0, WORLD_SIZE, tile, epoch,
        control, report, WORLD_SIZE, MAX_SLICES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "rows", "num_tiles"])
def matmul_all_reduce_kernel(
    x, w, bias, residual, norm_weight, out, kept, slots, slot_table, counters, control, report,
    rank, slot_size, place_size, rows, cols, depth, stride_x, stride_w, num_tiles, k_blocks, eps,
    WORLD_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr, NORM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Column tiles, then norm programs; see the module's docstring for the protocol."""
    program = tl.program_id(0)
    epoch = load_epoch(control)
    fault = faulted(control)
    if program < num_tiles:
        peers = ()  # where slots of all ranks begin, the next rank's first: asked for here, a load behind the matmul is 0.6 us
        for i in tl.static_range(1, WORLD_SIZE + 1):
            peers = peers + (
                symm_at(slot_table, (rank + i) % WORLD_SIZE, out.dtype.element_ty, 16),
            )
        row = tl.arange(0, TILE_M)
        col = program * TILE_N + tl.arange(0, TILE_N)
        a_rows = x + tl.minimum(row, rows - 1).to(tl.int64) * stride_x
        acc = matmul_tile(
            a_rows,
            w,
            stride_w,
            program,
            cols,
            depth,
            0,
            k_blocks,
            TILE_M,
            TILE_N,
            TILE_K,
            EVEN_K,
            rows,
            True,
        )
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        place = row.to(tl.int64)[:, None] * cols + col[None, :]
        if HAS_BIAS:  # on their way beside the data
            bias_row = tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            more = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        acc = exchange(
            acc, row, col, rows, slots, peers, (epoch & 1).to(tl.int64) * slot_size, place_size, program, rank, epoch,
            fault, tl.num_programs(0), control, report, WORLD_SIZE, TILE_M, TILE_N, out.dtype.element_ty,
        )  # fmt: skip
        if HAS_BIAS:
            acc += bias_row[None, :]
        if HAS_RESIDUAL:
            acc += more
        result = expected_zero(acc.to(out.dtype.element_ty))
        if NORM:
            tl.store(kept + place, result, mask=mask)
            tl.debug_barrier()
            if tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
                tl.store(counters, 0)
                notify(counters + 1, epoch)
        else:
            tl.store(out + place, result, mask=mask)
        if TILE_M >= AT_THE_END:
            leave(control, epoch, tl.num_programs(0))
    else:
        wait(
            counters, 1, epoch, 1, -1, control, report, PUSHED_US
        )  # a limit that no fault cuts short: tiles come, NaN then
        norm_row(program - num_tiles, kept, norm_weight, out, cols, eps, NORM_BLOCK)
        leave(control, epoch, tl.num_programs(0))


# What changes between the launches of one shape.
WORDS = ("x", "w", "bias", "residual", "norm_weight", "out", "kept", "eps")


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments."""

    def __init__(
        self, peers: Peers, world_size: int, rank: int, cols: int, config: MatmulConfig
    ) -> None:
        self.peers, self.world_size, self.rank, self.cols, self.config = (
            peers,
            world_size,
            rank,
            cols,
            config,
        )
        self.num_tiles = -(-cols // config.tile_n)
        self.launches = Launches(
            matmul_all_reduce_kernel,
            WORDS,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        kept: torch.Tensor | None,
    ) -> None:
        """Launch on the current stream. ``kept``: where the sum goes that is normalised into ``out``."""
        peers, c, tensors = self.peers, self.config, (x, w, bias, residual, norm_weight, out, kept)
        held = [out if t is None else t for t in tensors]
        words = [t.data_ptr() for t in held]
        variant = (
            x.shape,
            x.stride(0),
            w.stride(0),
            *(t is None for t in tensors),
            *(at % 16 == 0 for at in words),
        )
        (rows, depth), norm = x.shape, norm_weight is not None

        def arguments() -> tuple[object, ...]:
            asked, remedy = f"one shot of {rows} rows", "a configuration of the library's matmul"
            require(rows <= c.tile_m, asked, f"a tile's, {c.tile_m}", remedy)
            constants = (
                self.world_size, c.tile_m, c.tile_n, c.tile_k, depth % c.tile_k == 0, bias is not None, residual is not None,
                norm, NORM_BLOCK,
            )  # fmt: skip
            return (
                *held, peers.slots, peers.slot_table, peers.counters, peers.control, peers.report, self.rank, peers.slot_size,
                self.num_tiles * c.tile_m * c.tile_n, rows, self.cols, depth, x.stride(0), w.stride(0), self.num_tiles,
                -(-depth // c.tile_k), eps, *constants,
            )  # fmt: skip

        self.launches(self.num_tiles + (rows if norm else 0), variant, arguments, (*words, eps))
