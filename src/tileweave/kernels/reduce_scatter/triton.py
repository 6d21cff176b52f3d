"""matmul_reduce_scatter: out[m, N] = this rank's rows of the sum over ranks of x[M, k] @ w[N, k].T,
plus bias, in one launch.

    x        [M, k]       this rank's columns of the input, k = K/R
    w        [N, k]
    out      [m, N]       m = M/R
    slot     [R-1, ...]   one of two, by parity of the epoch; part i has the i-th peer's partial
                          sums of this rank's rows
    staging  [R-1, m, N]  local, copy engines only: partial sums on their way out

What is written where. A partial sum of a peer's rows goes into this rank's part of that peer's
slot, which no other rank writes. Own tiles are never sent: the program that computed one adds the
peers' partial sums to its accumulator, in fp32 and in a fixed order (pushes: by rank; copies: in
order of arrival, rank-1, rank-2, ...), adds the bias, rounds once and stores the result. There are
two transports:

``"copy_engine"``  tiles are stored in ``staging`` and counted. A copy engine that waits for the
    count of a chunk copies it to its owner (row-major, padded to whole tiles and to rows of
    ``pitch``), then a signal. Own tiles wait for that signal.
``"sm"``  tiles are stored directly into the slot (tile by tile, whole, in 8 x 8 blocks). They are
    self-signaling data, see ``device/triton/self_signaling.py``: no signal, no fence.

====================  =====  ===============================  ======================================
signal (int32)        value  notifier                         waiter ("copy_engine")
====================  =====  ===============================  ======================================
[source, chunk]       epoch  copy engine of ``source``        own tiles of that chunk
[met, source]         epoch  the program of ``source`` that   the program of every rank that stored
                             stored tile 0                    tile 0, before it counts that tile
[pushed] (own)        epoch  own copy engine, after its last  the last program, before counters and
                             push                             epoch change
counter [peer, chunk] tiles  programs, once per tile; local   own copy engine; zero between calls
====================  =====  ===============================  ======================================

    rank r   | tiles of r+1 ... | tiles of r+2 ... | tiles of r+3 ... | own tiles, sums |
    link                        | to r+1 ......... | to r+2 ......... | to r+3 ......... |
                                ^ all ranks meet: copies begin together (``device/triton/meet.py``)

Why no slot is overwritten: own rows need data of every peer in every call. So when call n ends on
this rank, each peer has begun call n and has ended call n-1, the last reader of the slot (and
writer of its zeros) that call n+1 writes. Once an instance was captured in a CUDA graph, its
copy-engine calls all use slot 0: the copies of call n begin when all ranks have met in it, hence
have ended call n-1, which read that slot last. Because ranks meet, a copy engine's signal is of
this very call. A signal of a later call means that its rank gave this one up, which counts as a
time-out (``EXACT``). ``staging`` belongs to one call, which ends after [pushed], hence after the
copies.

Why no rank waits for ever: pushes of a tile come before any wait of that tile, and in the order of
tiles remote ones come before own ones; tile 0, a remote one, waits only for tiles 0 of peers. A
program waits for tiles that *any* program of a peer makes, so all programs must be resident at the
same time: as many as the device has multiprocessors, no more. Under the interpreter, where programs
run in turn, there is one program, or tiles span shards (then the same program of the peer made the
tile).

Tiles that do not fill a last wave are cut along K, as in ``all_gather_matmul``.

An all-reduce by tiles (``GATHER``) is this with a gather. A slot has a *mirror* of the whole result
[M, N] after the peers' parts. Own tiles are stored in ``out`` and in this rank's rows of the mirror
of every peer. The program that completes a chunk of own tiles tells all peers. After its tiles each
program copies its share of the peers' rows from the mirror into the result, chunk by chunk::

    rank r   | tiles of r+1 ... | tiles of r+2 ... | own tiles, sums          | copy |
    link                        | to r+1 ......... | to r+2 ... own tiles ... |

====================  =====  ===============================  ======================================
signal (int32)        value  notifier                         waiter
====================  =====  ===============================  ======================================
counter [R-1, chunk]  tiles  programs, once per own tile      the program that completes the chunk;
                                                              zero between calls
[source, REDUCED +    epoch  the program of ``source`` that   every program, before it copies rows
chunk]                       completed the chunk              of that chunk
====================  =====  ===============================  ======================================

Why no mirror is overwritten: an own tile of call n+1 is stored when the partial sums of all peers
for it have come. So each peer is in its call n+1, and its call n, the last one that read its
mirror, has ended. After a time-out that does not hold, so from then on a rank neither stores in
mirrors nor announces: a late peer gets the rows of its own call, or waits in vain and reports that.
Why no rank waits for ever: announcements follow own tiles, which wait for partial sums only, and
programs wait for announcements after all their tiles. The last rank may own fewer rows than the
others (``Sizes.height``).

FP8 operands (``SCALED``): a partial sum is multiplied by this rank's scales before it is rounded.
Those of x are [M], or [K/128, M] of blocks, those of w [N], or [N/128, K/128].

Limits: x contiguous along K, w along K or (``DEPTH_FIRST``, as backward reads it; not FP8) along N;
fp32 accumulation; partial sums travel in the dtype of the result.

Sources: FLUX (arXiv 2406.06858), fused GEMM + reduce-scatter by tiles; stream-K (arXiv 2301.03598).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton import signal
from tileweave.device.triton.matmul import (
    BlockScales,
    give_part,
    matmul_tile,
    part_offsets,
    take_parts,
)
from tileweave.device.triton.peers import (
    await_pushed,
    faulted,
    leave,
    load_epoch,
    meet,
    notify_all,
    slots_at,
    take_marked,
    wait,
)
from tileweave.device.triton.self_signaling import put_marked
from tileweave.device.triton.signal import MAX_SLICES, REDUCED, count_in, count_last
from tileweave.device.triton.tiles import OwnerTiles, part_range, place_out, share_of, unit_range
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers, lines, memory_of_parts
from tileweave.kernels.scaling import Scales, Scaling
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import ScatterSchedule


class Tensors(NamedTuple):
    """Operands and results of a call. A call without ``bias``, ``staging``, ``partials`` or
    ``residual`` passes any other tensor there, which is not read."""

    x: Any
    w: Any
    bias: Any
    out: Any
    staging: Any
    partials: Any
    residual: Any


class Sizes(NamedTuple):
    """Numbers that belong to the shape.

    place_size : elements of a slot for one peer.

    rows, cols : of ``out``.

    pitch : elements from row to row of ``staging`` and of what was copied.

    depth : columns of ``x``.

    stride_x, stride_w : elements from row to row of ``x``, and of ``w`` (``DEPTH_FIRST``: from
        column to column).

    height : rows of ``x``; at most ``rows`` of each rank.
    """

    place_size: Any
    rows: Any
    cols: Any
    pitch: Any
    depth: Any
    stride_x: Any
    stride_w: Any
    height: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PUSH : the transport is ``"sm"``: programs store partial sums in the slots of peers. Otherwise
        they store them in ``staging``, and copy engines copy them.

    SPANS : a tile is taller than a shard, so that its rows have several owners. Only with ``PUSH``.

    SPLIT_TAIL : tiles that do not fill a last wave are cut along K.

    EVEN_K : the depth is a multiple of ``TILE_K``.

    DEPTH_FIRST : ``w`` is contiguous along N.

    HAS_RESIDUAL : a residual of the own rows is added.

    GATHER : an all-reduce by tiles: own rows are stored at all peers, too.

    BLOCK : elements of peers' rows that a program of ``GATHER`` copies at once.

    SCALED : 0 for 16-bit operands; FP8: 1 for scales of rows and columns, 2 for scales of blocks.

    X_STEP, W_STEP : elements from one scale of a row to the next: 0 where a tensor has one scale.

    PROMOTE : products of FP8 are added to fp32 sums after each K block.
    """

    WORLD_SIZE: int
    PUSH: bool
    SPANS: bool
    SPLIT_TAIL: bool
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    DEPTH_FIRST: bool
    HAS_BIAS: bool = False
    HAS_RESIDUAL: bool = False
    GATHER: bool = False
    BLOCK: int = 1024
    SCALED: int = 0
    X_STEP: int = 1
    W_STEP: int = 1
    PROMOTE: bool = False


@triton.jit
def tile_place(first_row, home, tiles, col, TILE_N: tl.constexpr, SPANS: tl.constexpr):
    """``"sm"``: the first element of a tile in a rank's part of a slot. ``home``: the owner of the
    tile's first row."""
    row = first_row if SPANS else first_row - home * tiles.rows
    at = row // tiles.tile_m * tiles.tile_cols + col
    return at.to(tl.int64) * (tiles.tile_m * TILE_N)


@triton.jit
def push_partial(
    acc, peers, slot_offset, at, row, row_limit, rank, sizes, dtype: tl.constexpr, C: tl.constexpr
):
    """Store the rows of peers in their slots, marked. ``row`` [TILE_M]: global rows."""
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    within = part_offsets(TILE_M, TILE_N)
    value = acc.to(dtype)
    first = row // sizes.rows
    for i in tl.static_range(1, WORLD_SIZE):
        owner = (rank + i) % WORLD_SIZE
        mine = (first == owner) & (row < row_limit)
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            place = rank - (rank > owner).to(tl.int32)
            slot = slots_at(peers, owner, dtype) + slot_offset
            target = slot + place.to(tl.int64) * sizes.place_size + at
            put_marked(target + within, value, mine[:, None] & (tl.arange(0, TILE_N) >= 0)[None, :])


@triton.jit
def store_rows(value, target, row, col, cols, mask, pitch=None):
    """Store rows ``row`` and columns ``col`` of ``target``, whose rows are ``pitch`` or ``cols``
    elements apart, where ``mask`` [rows] holds."""
    if pitch is None:
        pitch = cols
    tl.store(
        target + row.to(tl.int64)[:, None] * pitch + col[None, :],
        value,
        mask=mask[:, None] & (col < cols)[None, :],
    )


@triton.jit
def await_copied(peers, chunk, rank, epoch, tile, WORLD_SIZE: tl.constexpr):
    """Wait until copy engines have brought this chunk of every peer."""
    for i in tl.static_range(1, WORLD_SIZE):
        signal.wait(
            peers.signals + chunk,
            1,
            epoch,
            (rank + i) % WORLD_SIZE * MAX_SLICES,
            tile,
            peers.control,
            peers.report,
            EXACT=True,
        )


@triton.jit
def add_copied(acc, slot, row, col, slot_rows, rank, sizes, WORLD_SIZE: tl.constexpr):
    """``acc`` plus what copy engines brought of these rows (within their owner), in order of
    arrival. ``slot_rows``: rows of ``slot`` for one peer."""
    mask = (row < sizes.rows)[:, None] & (col < sizes.cols)[None, :]
    for step in tl.static_range(1, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        place = source - (source > rank).to(tl.int32)
        rows = slot + (place * slot_rows + row).to(tl.int64)[:, None] * sizes.pitch
        acc += tl.load(rows + col[None, :], mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def announce_own(peers, num_programs, tiles, first_row, epoch, C: tl.constexpr):
    """Count a tile of this rank's rows. The program that counts the last one of a chunk tells all
    peers, if nothing timed out."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    chunk = (first_row - tiles.rank * tiles.rows) // C.TILE_M // tiles.chunk_rows
    height = tl.minimum(tiles.tile_rows - chunk * tiles.chunk_rows, tiles.chunk_rows)
    counter = peers.counters + num_programs + (WORLD_SIZE - 1) * MAX_SLICES + chunk
    if count_last(counter, height * tiles.tile_cols):
        if faulted(peers) == 0:
            index = tiles.rank * MAX_SLICES + REDUCED + chunk
            notify_all(peers, index, tiles.rank, epoch, WORLD_SIZE, False)


@triton.jit
def take_gathered(out, peers, slot_offset, tiles, sizes, epoch, C: tl.constexpr):
    """Copy the peers' rows from the mirror into the result, chunk by chunk as they come; NaN after
    a time-out. Programs take blocks in turn. ``out``: the own rows of the result."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    rank, rows, cols = tiles.rank, tiles.rows, sizes.cols
    whole = out - tl.cast(rank, tl.int64) * rows * cols
    mirror = peers.slots + slot_offset + (WORLD_SIZE - 1) * sizes.place_size
    height = tiles.chunk_rows * C.TILE_M
    for chunk in range(0, tl.cdiv(tiles.tile_rows, tiles.chunk_rows)):
        for step in range(1, WORLD_SIZE):
            source = (rank + WORLD_SIZE - step) % WORLD_SIZE
            wait(peers, source * MAX_SLICES + REDUCED + chunk, epoch)
            fault = faulted(peers) != 0
            there = tl.minimum(rows, sizes.height - source * rows)  # the last rank may have fewer
            first = chunk * height
            count = (tl.minimum(first + height, there) - first) * cols  # or fewer than none
            at = tl.cast(source * rows + first, tl.int64) * cols
            for begin in range(tl.program_id(0) * C.BLOCK, count, tl.num_programs(0) * C.BLOCK):
                index = begin + tl.arange(0, C.BLOCK)
                value = tl.load(mirror + at + index, mask=index < count, other=0.0)
                value = tl.where(fault, float("nan"), value)
                tl.store(whole + at + index, value, mask=index < count)


@triton.jit
def end_of_copies(peers, counters, epoch, WORLD_SIZE: tl.constexpr):
    """Wait until the copy engine has pushed, since it reads the epoch and the ``counters`` of
    chunks of peers. Then reset these counters to zero. Programs may still count in the counters of
    own rows, which follow them."""
    await_pushed(peers, epoch, WORLD_SIZE)
    words = tl.arange(0, 8 * MAX_SLICES)
    inside = words < (WORLD_SIZE - 1) * MAX_SLICES
    tl.store(counters + words, tl.zeros_like(words), mask=inside)


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
    tensors,
    scales,
    peers,
    rank,
    slot,
    sizes,
    num_tiles,
    chunk_rows,
    team,
    tile_rows,
    tile_cols,
    k_blocks,
    C: tl.constexpr,
):
    """Compute, push, add; see the module's docstring for the protocol.

    ``slot``: the one that copy engines write; a push takes it from the epoch. ``chunk_rows``: tile
    rows of a chunk. ``num_tiles`` to ``k_blocks``: of ``ScatterSchedule``. ``scales``: a ``Scales``
    of FP8 operands, else None.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    TILE_M: tl.constexpr = C.TILE_M
    TILE_N: tl.constexpr = C.TILE_N
    x, w, out, partials = tensors.x, tensors.w, tensors.out, tensors.partials
    counters, rows, cols = peers.counters, sizes.rows, sizes.cols
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        rows,
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
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    slot_offset = tl.cast(slot, tl.int64) * peers.slot_size
    dtype: tl.constexpr = out.dtype.element_ty
    share = share_of(tiles, program, num_programs, num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, tile_col = place_out(tiles, tile)
        row_limit = tl.minimum(row_limit, sizes.height)
        row = first_row + tl.arange(0, TILE_M)
        col = tile_col * TILE_N + tl.arange(0, TILE_N)
        read = tl.minimum(row, row_limit - 1)
        a_rows = x + read.to(tl.int64) * sizes.stride_x
        if C.SCALED == 2:
            of_cols = scales.w + (tile_col * TILE_N // 128) * k_blocks
            of_blocks = BlockScales(scales.x + read, sizes.height, of_cols)
        else:
            of_blocks = None
        acc = matmul_tile(
            a_rows,
            w,
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
            PROMOTE=C.PROMOTE,
            scales=of_blocks,
        )
        owner, helpers = part_range(share, tile)
        if program != owner:
            give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                acc = take_parts(acc, partials, counters, 0, share, tile, helpers, TILE_M, TILE_N)
            if C.SCALED == 1:
                of_rows = tl.load(scales.x + row * C.X_STEP, mask=row < row_limit, other=0.0)
                of_cols = tl.load(scales.w + col * C.W_STEP, mask=col < cols, other=0.0)
                acc = acc * of_rows[:, None] * of_cols[None, :]
            home = first_row // rows
            within = row - rank * rows
            own = (within >= 0) & (within < rows) & (row < row_limit)
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, C.SPANS)
            if C.PUSH:
                push_partial(acc, peers, slot_offset, at, row, row_limit, rank, sizes, dtype, C)
            if (not C.PUSH) and (home != rank):
                place = home - (home > rank).to(tl.int32)
                staged = place * (tile_rows * TILE_M) + row - home * rows
                value, mask = acc.to(dtype), row < row_limit
                store_rows(value, tensors.staging, staged, col, cols, mask, sizes.pitch)
                chunk = (first_row - home * rows) // TILE_M // chunk_rows
                if tile == 0:
                    meet(peers, rank, epoch, tile, WORLD_SIZE)
                count_in(counters + num_programs + place * MAX_SLICES + chunk)
            if tl.max(own.to(tl.int32), axis=0) > 0:
                if C.PUSH:
                    acc = take_marked(
                        peers,
                        acc,
                        peers.slots + slot_offset + at + part_offsets(TILE_M, TILE_N),
                        sizes.place_size,
                        own[:, None] & (col >= 0)[None, :],
                        0,
                        rank,
                        tile,
                        epoch,
                        WORLD_SIZE - 1,
                    )
                else:
                    chunk = (first_row - rank * rows) // TILE_M // chunk_rows
                    await_copied(peers, chunk, rank, epoch, tile, WORLD_SIZE)
                    slot_at = peers.slots + slot_offset
                    slot_rows = tile_rows * TILE_M
                    acc = add_copied(acc, slot_at, within, col, slot_rows, rank, sizes, WORLD_SIZE)
                if C.HAS_BIAS:
                    bias = tl.load(tensors.bias + col, mask=col < cols, other=0.0)
                    acc += bias.to(tl.float32)[None, :]
                if C.HAS_RESIDUAL:
                    at_row = within.to(tl.int64)[:, None] * cols
                    mask = own[:, None] & (col < cols)[None, :]
                    residual = tensors.residual + at_row + col[None, :]
                    acc += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
                acc = tl.where(faulted(peers) != 0, float("nan"), acc)
                store_rows(acc.to(dtype), out, within, col, cols, own)
                if C.GATHER:
                    own = own & (faulted(peers) == 0)
                    mirror = slot_offset + (WORLD_SIZE - 1) * sizes.place_size
                    mirror += tl.cast(rank, tl.int64) * rows * cols
                    for i in tl.static_range(1, WORLD_SIZE):
                        theirs = slots_at(peers, (rank + i) % WORLD_SIZE, dtype) + mirror
                        store_rows(acc.to(dtype), theirs, within, col, cols, own)
            if C.GATHER:
                if home == rank:  # though the last rank's last tiles may have no rows
                    announce_own(peers, num_programs, tiles, first_row, epoch, C)
    if C.GATHER:
        take_gathered(out, peers, slot_offset, tiles, sizes, epoch, C)
    if not C.PUSH:
        if program == num_programs - 1:
            end_of_copies(peers, counters + num_programs, epoch, WORLD_SIZE)
    leave(peers, epoch, num_programs)


# What changes between the launches of one shape.
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "slot")
SCALED_WORDS = (*WORDS[:-1], *(f"scales.{name}" for name in Scales._fields), "slot")


def scheduled(s: ScatterSchedule) -> dict[str, int]:
    """The arguments, by name, that say which program computes what; all kernels over a
    :class:`ScatterSchedule` have them."""
    return {
        "rank": s.rank,
        "num_tiles": s.num_tiles,
        "chunk_rows": min(s.chunk_rows, s.tile_rows),
        "team": s.team,
        "tile_rows": s.tile_rows,
        "tile_cols": s.tile_cols,
        "k_blocks": s.k_blocks,
    }


def launcher(
    peers: Peers,
    schedule: ScatterSchedule,
    config: MatmulConfig,
    stride_x: int,
    strides_w: Sequence[int],
    scaling: Scaling | None = None,
    gathered: int = 0,
) -> Launcher:
    """Launches for one shape.

    The launcher is called with (x, w, bias or None, out, staging or None, slot, mirrors, residual
    or None, scales of x and w if they are FP8, memory of parts or None); the caller checks them.
    ``slot``: the one that a copy-engine call uses; a push reads it from the epoch.

    scaling : of FP8 operands.

    gathered : 0, or for an all-reduce by tiles the rows of its result; ``out`` has those of this
        rank. Only there are ``mirrors``, the addresses of this rank's rows in the mirrors of peers
        rank + 1, rank + 2, ..., which the Hopper kernel needs, and ``residual``, of the size of
        ``out``, which is added to the result.
    """
    s, c = schedule, config
    stride_w, depth_first = lines(strides_w)
    choices = Choices(
        WORLD_SIZE=s.world_size,
        PUSH=c.transport == "sm",
        SPANS=s.spans_shards,
        SPLIT_TAIL=s.split_tail,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        EVEN_K=s.depth % c.tile_k == 0,
        DEPTH_FIRST=depth_first,
        GATHER=gathered > 0,
    )
    if scaling is not None:
        choices = choices._replace(**scaling.choices(c))
    part_elements = s.part_elements

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        staging: torch.Tensor | None,
        slot: int,
        mirrors: Sequence[int] = (),
        residual: torch.Tensor | None = None,
        scales: Sequence[torch.Tensor] = (),
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        given = (x, w, bias, out, staging, partials, residual)
        tensors = Tensors(*[out if tensor is None else tensor for tensor in given])
        words = [tensor.data_ptr() for tensor in (*tensors, *scales)]

        def changing() -> dict[str, Any]:
            chosen = choices._replace(
                HAS_BIAS=bias is not None,
                HAS_RESIDUAL=residual is not None,
            )
            given = Scales(*scales) if scales else None
            return {"tensors": tensors, "scales": given, "slot": slot, "C": chosen}

        absent = bias is None, residual is None
        return (*absent, alignment(words)), (*words, slot), changing, ()

    height = gathered or s.world_size * s.rows
    fixed = {
        "peers": peers,
        "sizes": Sizes(
            s.place_elements, s.rows, s.cols, s.pitch, s.depth, stride_x, stride_w, height
        ),
        **scheduled(s),
    }
    return Launcher(
        matmul_reduce_scatter_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS if scaling is None else SCALED_WORDS,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
