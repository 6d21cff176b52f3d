"""The warp-specialised main loop for Hopper, in Gluon: the counterpart of
``device/triton/matmul.py``.

A kernel here has partitions, each a set of warps that run their own code: *load* (one warp: waits
for signals, feeds TMA), *multiply* (one or two warpgroups: wgmma, epilogue) and others, such as
*move* (pushes, copies) or *store*. Load and multiply share a :class:`Ring` of ``STAGES`` buffers;
``ready[i]`` says that buffer i is full, ``empty[i]`` that it was read. ``turn`` counts the buffers
that a partition has filled, or read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tileweave.device.gluon.signal import block_barrier, load_async, store_async
from tileweave.device.triton.signal import FAULT
from tileweave.device.triton.tiles import SOURCES

place, place_out, segment, share_of, unit_range, part_range = (
    gluon.jit(source) for source in SOURCES
)


class Ring(NamedTuple):
    """Buffers of operands [STAGES, ...], and their barriers; see the module's docstring."""

    a: Any
    b: Any
    empty: Any
    ready: Any


@gluon.constexpr_function
def matrix(shape):
    """``shape`` of a tile as one of two dimensions; a third is of one element."""
    return [size for size in shape if size != 1] if len(shape) == 3 else list(shape)


@gluon.jit
def make_ring(
    a_desc,
    b_desc,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr = 1,
    READERS: gl.constexpr = 1,
):
    """Shared memory of a :class:`Ring`. ``ARRIVALS``: how many arrivals at ``ready[i]`` fill buffer
    i. ``READERS``: partitions that read a buffer, and arrive at ``empty[i]``. ``b_desc``: of two
    dimensions, or of parts (:func:`load_part`)."""
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_M, TILE_K], a_desc.dtype)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, TILE_M, TILE_K], a_layout)
    b_tile: gl.constexpr = matrix(b_desc.block_type.shape)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_tile, b_desc.dtype)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_tile, b_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=READERS)
        mbarrier.init(ready.index(i), count=ARRIVALS)
    return Ring(a_ring, b_ring, empty, ready)


@gluon.jit
def claim(ring, turn, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """*load*: wait until the buffer of this turn was read, and expect ``BYTES`` in it. Returns its
    index."""
    at = turn % STAGES
    mbarrier.wait(ring.empty.index(at), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(ring.ready.index(at), BYTES)
    return at


@gluon.jit
def load_weight(desc, col, k, bar, buffer, DEPTH_FIRST: gl.constexpr):
    """Ask TMA for a K block of b from column ``col`` on; ``desc`` is of [N, K], or of [K, N] where
    ``DEPTH_FIRST``."""
    if DEPTH_FIRST:
        load_async(desc, [k, col], bar, buffer)
    else:
        load_async(desc, [col, k], bar, buffer)


@gluon.jit
def load_expert(desc, expert, cols, depth, col, k, bar, buffer, DEPTH_FIRST: gl.constexpr):
    """:func:`load_weight` from the weight of ``expert``; ``desc`` is of the weights of all experts,
    one after the other."""
    if DEPTH_FIRST:
        load_weight(desc, col, expert * depth + k, bar, buffer, DEPTH_FIRST)
    else:
        load_weight(desc, expert * cols + col, k, bar, buffer, DEPTH_FIRST)


@gluon.jit
def load_part(desc, col, part, k, bar, buffer, DEPTH_FIRST: gl.constexpr):
    """:func:`load_weight` of a K block of one ``part``, with zeros past its end; ``desc`` is of [N,
    parts, K], or of [parts, K, N] where ``DEPTH_FIRST``."""
    tile = buffer.reshape(desc.block_type.shape)
    if DEPTH_FIRST:
        load_async(desc, [part, k, col], bar, tile)
    else:
        load_async(desc, [col, part, k], bar, tile)


@gluon.jit
def load_slot(slot0_desc, slot1_desc, slot, row, col, bar, buffer):
    """Ask TMA for a block of slot number ``slot``. Each slot has a descriptor, since code cannot
    choose between descriptors."""
    if slot == 0:
        load_async(slot0_desc, [row, col], bar, buffer)
    else:
        load_async(slot1_desc, [row, col], bar, buffer)


@gluon.jit
def depth_by_cols(buffer, DEPTH_FIRST: gl.constexpr):
    """A buffer of b as wgmma takes it, [TILE_K, TILE_N]."""
    if DEPTH_FIRST:
        return buffer
    else:
        return buffer.permute((1, 0))


@gluon.constexpr_function
def accumulator(dtype, TILE_N, WARPS):
    """The layout of a tile that wgmma of operands of ``dtype`` computes: 32 bytes of K at a
    time."""
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[WARPS, 1],
        instr_shape=[16, TILE_N, 256 // dtype.primitive_bitwidth],
    )


@gluon.jit
def multiply_tile(
    turn,
    num_blocks,
    ring,
    control,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    GATHERED: gl.constexpr = False,
    DEPTH_FIRST: gl.constexpr = False,
    LATE: gl.constexpr = False,
):
    """Multiply ``num_blocks`` >= 1 K blocks from the ring. Returns (fp32 tile, turn, fault).

    ``GATHERED``: rows of a were loaded by ``cp.async``, through the generic proxy, so that wgmma
    needs a proxy fence before it reads them. ``DEPTH_FIRST``: buffers of b are [TILE_K, TILE_N] and
    not [TILE_N, TILE_K].

    One wgmma stays in flight: buffer i is released when block i+1 has begun. ``fault`` is read
    after the first buffer is full, so it is set if this tile's wait timed out, and the load costs
    nothing. ``LATE``: it is read after the last one, since *load* waits before later blocks, too.
    """
    layout: gl.constexpr = accumulator(ring.a.dtype, TILE_N, WARPS)
    zero = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
    index = turn % STAGES
    mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
    if GATHERED:
        fence_async_shared()
    fault = gl.load(control + FAULT, volatile=True)
    acc = warpgroup_mma(
        ring.a.index(index),
        depth_by_cols(ring.b.index(index), DEPTH_FIRST),
        zero,
        use_acc=False,
        is_async=True,
    )
    turn += 1
    for _ in range(1, num_blocks):
        index = turn % STAGES
        mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
        if GATHERED:
            fence_async_shared()
        acc = warpgroup_mma(
            ring.a.index(index), depth_by_cols(ring.b.index(index), DEPTH_FIRST), acc, is_async=True
        )
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(ring.empty.index((turn - 1) % STAGES), count=1)
        turn += 1
    if LATE:
        fault = gl.load(control + FAULT, volatile=True)
    tile = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring.empty.index((turn - 1) % STAGES), count=1)
    return tile, turn, fault


class BlockScales(NamedTuple):
    """The scales of FP8 blocks that a unit needs; see ``device/triton/matmul.BlockScales``.

    x, first : pointer to the scales of the shard, [K/128, step], and the tile's first row of it.
    limit : rows of the shard.
    step : elements from one K block's scales to the next.
    w : pointer to that of the first K block of the tile's columns.
    """

    x: Any
    first: Any
    limit: Any
    step: Any
    w: Any


@gluon.jit
def promoted(acc, part, scales, block, SCALED: gl.constexpr):
    """``acc`` plus a K block's products, times their scales where they have some."""
    if SCALED:
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        row = scales.first + gl.arange(0, acc.shape[0], layout=rows)
        # peers wrote some of them: not from a stale cache
        of_rows = gl.load(
            scales.x + block * scales.step + row,
            mask=row < scales.limit,
            other=0.0,
            cache_modifier=".cg",
        )
        return acc + part * (of_rows * gl.load(scales.w + block))[:, None]
    else:
        return acc + part


@gluon.jit
def multiply_promoted(
    turn,
    k_begin,
    num_blocks,
    ring,
    scales,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    SCALED: gl.constexpr,
):
    """:func:`multiply_tile` of FP8, with sums in fp32 after each K block of 128, of which tensor
    cores keep fewer bits. ``SCALED``: products are multiplied by their scales first. Returns (fp32
    tile, turn).

    Two accumulators: while one K block is added, wgmma computes the next. So tiles have at most
    128 x 128 elements for 8 warps.
    """
    layout: gl.constexpr = accumulator(ring.a.dtype, TILE_N, WARPS)
    zero = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
    acc = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
    for step in range(0, num_blocks, 2):
        index = turn % STAGES
        mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
        first = warpgroup_mma(
            ring.a.index(index),
            ring.b.index(index).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        if step + 1 < num_blocks:
            after = (turn + 1) % STAGES
            mbarrier.wait(ring.ready.index(after), ((turn + 1) // STAGES) & 1)
            second = warpgroup_mma(
                ring.a.index(after),
                ring.b.index(after).permute((1, 0)),
                zero,
                use_acc=False,
                is_async=True,
            )
            part = warpgroup_mma_wait(1, deps=(first,))
            mbarrier.arrive(ring.empty.index(index), count=1)
            acc = promoted(acc, part, scales, k_begin + step, SCALED)
            part = warpgroup_mma_wait(0, deps=(second,))
            mbarrier.arrive(ring.empty.index(after), count=1)
            acc = promoted(acc, part, scales, k_begin + step + 1, SCALED)
            turn += 2
        else:
            part = warpgroup_mma_wait(0, deps=(first,))
            mbarrier.arrive(ring.empty.index(index), count=1)
            acc = promoted(acc, part, scales, k_begin + step, SCALED)
            turn += 1
    return acc, turn


@gluon.jit
def multiply_quarter(ring, index, part, never, QUARTER: gl.constexpr):
    """Begin the products of buffer ``index`` with 64 columns. ``part``: what is replaced; so they
    take its registers, and what reads it must come before."""
    columns = ring.b.index(index).slice(QUARTER * 64, 64).permute((1, 0))
    return warpgroup_mma(ring.a.index(index), columns, part, use_acc=never, is_async=True)


@gluon.jit
def read_by(part, total):
    """``part``, whose registers are free once ``total`` was computed from it: no instruction, but
    the compiler keeps that order."""
    return gl.inline_asm_elementwise(
        "", "=f,0,f", [part, total], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def next_quarter(
    total,
    acc,
    ring,
    index,
    never,
    scales,
    block,
    QUARTER: gl.constexpr,
    SCALED: gl.constexpr,
):
    """``total`` plus the older one of two accumulators, and the products that begin in its
    registers."""
    part = warpgroup_mma_wait(1, deps=(acc,))
    total = promoted(total, part, scales, block, SCALED)
    return total, multiply_quarter(ring, index, read_by(part, total), never, QUARTER)


@gluon.jit
def last_quarters(total2, total3, even, odd, ring, index, scales, block, SCALED: gl.constexpr):
    """Both totals plus both accumulators; buffer ``index`` was read then."""
    part = warpgroup_mma_wait(1, deps=(even,))
    total2 = promoted(total2, part, scales, block, SCALED)
    part = warpgroup_mma_wait(0, deps=(odd,))
    mbarrier.arrive(ring.empty.index(index), count=1)
    return total2, promoted(total3, part, scales, block, SCALED)


@gluon.jit
def multiply_in_quarters(
    turn,
    k_begin,
    num_blocks,
    ring,
    left,
    right,
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    SCALED: gl.constexpr,
):
    """:func:`multiply_promoted` of tiles of 256 columns, 64 at a time: two accumulators of 64
    columns fit next to the sums, one that wgmma fills while the other is added. ``left``,
    ``right``: scales of the halves. Returns (four pieces of the tile, turn).

    K blocks in pairs: ptxas makes every wgmma wait for the one before where accumulators are in
    flight from one iteration of a loop to the next.
    """
    layout: gl.constexpr = accumulator(ring.a.dtype, 64, WARPS)
    zero = gl.zeros((TILE_M, 64), gl.float32, layout)
    never = k_begin < 0  # which the compiler does not know
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    for step in range(0, num_blocks - 1, 2):
        index, after, block = turn % STAGES, (turn + 1) % STAGES, k_begin + step
        mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
        even = multiply_quarter(ring, index, zero, never, 0)
        odd = multiply_quarter(ring, index, zero, never, 1)
        sum0, even = next_quarter(sum0, even, ring, index, never, left, block, 2, SCALED)
        sum1, odd = next_quarter(sum1, odd, ring, index, never, left, block, 3, SCALED)
        mbarrier.wait(ring.ready.index(after), ((turn + 1) // STAGES) & 1)
        sum2, even = next_quarter(sum2, even, ring, after, never, right, block, 0, SCALED)
        sum3, odd = next_quarter(sum3, odd, ring, after, never, right, block, 1, SCALED)
        mbarrier.arrive(ring.empty.index(index), count=1)
        block += 1
        sum0, even = next_quarter(sum0, even, ring, after, never, left, block, 2, SCALED)
        sum1, odd = next_quarter(sum1, odd, ring, after, never, left, block, 3, SCALED)
        sum2, sum3 = last_quarters(sum2, sum3, even, odd, ring, after, right, block, SCALED)
        turn += 2
    if num_blocks % 2 == 1:
        index, block = turn % STAGES, k_begin + num_blocks - 1
        mbarrier.wait(ring.ready.index(index), (turn // STAGES) & 1)
        even = multiply_quarter(ring, index, zero, never, 0)
        odd = multiply_quarter(ring, index, zero, never, 1)
        sum0, even = next_quarter(sum0, even, ring, index, never, left, block, 2, SCALED)
        sum1, odd = next_quarter(sum1, odd, ring, index, never, left, block, 3, SCALED)
        sum2, sum3 = last_quarters(sum2, sum3, even, odd, ring, index, right, block, SCALED)
        turn += 1
    return (sum0, sum1, sum2, sum3), turn


class RowScales(NamedTuple):
    """Scales of FP8 operands by rows of x and columns of the result, of all rows and columns."""

    x: Any
    w: Any


@gluon.jit
def scale_tile(tile, scales, first_row, row_limit, col, cols):
    """A tile of products of FP8, whose first row and column these are, times their scales."""
    rows: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    r = first_row + gl.arange(0, tile.shape[0], layout=rows)
    c = col + gl.arange(0, tile.shape[1], layout=columns)
    of_rows = gl.load(scales.x + r, mask=r < row_limit, other=0.0, cache_modifier=".cg")
    of_cols = gl.load(scales.w + c, mask=c < cols, other=0.0)
    return tile * of_rows[:, None] * of_cols[None, :]


@gluon.jit
def finish(tile, fault, bias, col, cols, HAS_BIAS: gl.constexpr):
    """Epilogue on registers: bias in fp32, NaN where a wait timed out. ``col``: first column of
    ``tile``."""
    if HAS_BIAS:
        column: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
        index = col + gl.arange(0, tile.shape[1], layout=column)
        tile += gl.load(bias + index, mask=index < cols, other=0.0).to(gl.float32)[None, :]
    return gl.where(fault != 0, float("nan"), tile)


@gluon.jit
def store_masked(tile, out, row, row_limit, col, cols):
    """Plain stores of the rows and columns that exist: for ragged tiles, and for pitches that TMA
    does not support."""
    rows: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    r = row + gl.arange(0, tile.shape[0], layout=rows)
    c = col + gl.arange(0, tile.shape[1], layout=columns)
    mask = (r < row_limit)[:, None] & (c < cols)[None, :]
    pointers = out + r.to(gl.int64)[:, None] * cols + c[None, :]
    gl.store(pointers, tile.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def store_tma(tile, desc, buffer, row, col):
    """Store through shared memory by TMA; returns before the store is complete. Before a signal,
    drain it fully."""
    tma.store_wait(0)
    buffer.store(tile.to(desc.dtype))
    fence_async_shared()
    store_async(desc, [row, col], buffer)


@gluon.jit
def part_offsets(tile, first_col, TILE_N: gl.constexpr):
    """Offsets of a tile's elements in ``partials``: 8 x 8 blocks, since a warp holds those, so that
    a warp's access is 256 contiguous bytes. ``tile``: [TILE_M, any width], whose first column is
    column ``first_col`` of the whole tile."""
    rows: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    r = gl.arange(0, tile.shape[0], layout=rows)
    c = first_col + gl.arange(0, tile.shape[1], layout=columns)
    return (r // 8 * (8 * TILE_N) + r % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[None, :]


@gluon.jit
def give_part(
    tile, partials, counters, base, share, number, TILE_M: gl.constexpr, TILE_N: gl.constexpr
):
    """The helper's side of a cut tile: store the partial tile (fp32) where the owner finds it, and
    count it in; see ``matmul.give_part``."""
    gl.store(
        partials
        + (base + share.program).to(gl.int64) * (TILE_M * TILE_N)
        + part_offsets(tile, 0, TILE_N),
        tile,
    )
    block_barrier()
    gl.atomic_add(counters + (base + number - share.whole), 1, sem="release", scope="gpu")


@gluon.jit
def give_pieces(
    pieces, partials, counters, base, share, number, TILE_M: gl.constexpr, TILE_N: gl.constexpr
):
    """:func:`give_part` of a tile in pieces of 64 columns."""
    at = partials + (base + share.program).to(gl.int64) * (TILE_M * TILE_N)
    for i in gl.static_range(TILE_N // 64):
        gl.store(at + part_offsets(pieces[i], i * 64, TILE_N), pieces[i])
    block_barrier()
    gl.atomic_add(counters + (base + number - share.whole), 1, sem="release", scope="gpu")


@gluon.jit
def await_parts(counters, base, share, number, helpers):
    """The owner's wait for its helpers, lower programs of this grid; leaves the counter at zero for
    the next call."""
    cut_tile = base + number - share.whole
    while gl.atomic_add(counters + cut_tile, 0, sem="acquire", scope="gpu") < helpers:
        pass
    block_barrier()
    gl.store(counters + cut_tile, 0)


class Helped(NamedTuple):
    """The partial tiles of a tile's helpers: ``helpers`` of them in ``partials``, below the owner's
    index ``at``, ``team`` apart."""

    partials: Any
    at: Any
    helpers: Any
    team: Any


@gluon.jit
def add_parts(tile, first_col, helped, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Add these columns of the helpers' partial tiles, from the highest program down; after
    :func:`await_parts`."""
    offsets = part_offsets(tile, first_col, TILE_N)
    for below in range(1, helped.helpers + 1):
        tile += gl.load(
            helped.partials
            + (helped.at - below * helped.team).to(gl.int64) * (TILE_M * TILE_N)
            + offsets
        )
    return tile


class Output(NamedTuple):
    """Where a tile is stored: ``first_row`` and ``col`` are its first row and column of ``out``.
    ``by_tma``: through ``buffer``, not by plain stores. ``scales``: of FP8 operands, which a tile
    is multiplied by first; anything where there are none."""

    out: Any
    out_desc: Any
    buffer: Any
    bias: Any
    first_row: Any
    row_limit: Any
    col: Any
    cols: Any
    by_tma: Any
    scales: Any


@gluon.jit
def store_half(
    half,
    first_col,
    fault,
    output,
    helped,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr = False,
):
    """Columns [first_col, ...) of a finished tile: add helpers' partial tiles, then scales and
    bias, round once, store."""
    first_row, col = output.first_row, output.col
    half = add_parts(half, first_col, helped, TILE_M, TILE_N)
    if SCALED:
        half = scale_tile(
            half, output.scales, first_row, output.row_limit, col + first_col, output.cols
        )
    half = finish(half, fault, output.bias, col + first_col, output.cols, HAS_BIAS)
    if output.by_tma:
        store_tma(half, output.out_desc, output.buffer, first_row, col + first_col)
    else:
        store_masked(half, output.out, first_row, output.row_limit, col + first_col, output.cols)


@gluon.jit
def store_tile(
    tile,
    fault,
    bias,
    out,
    out_desc,
    out_buffer,
    helped,
    first_row,
    row_limit,
    col,
    cols,
    total_rows,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    HALVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OUT_TMA: gl.constexpr,
    scales=None,
    SCALED: gl.constexpr = False,
):
    """Epilogue of the program that owns a tile, in two halves (``HALVES``) where its image in
    shared memory would be too large.

    ``first_row``, ``col``: the tile's first row and column of ``out``, which has ``total_rows``
    rows and ``cols`` columns. ``OUT_TMA``: TMA can store rows of ``out``. ``SCALED``: the tile is
    multiplied by ``scales`` (:class:`RowScales`) first.
    """
    width: gl.constexpr = TILE_N // HALVES
    by_tma = OUT_TMA and ((first_row + TILE_M <= row_limit) | (row_limit == total_rows))
    output = Output(
        out, out_desc, out_buffer, bias, first_row, row_limit, col, cols, by_tma, scales
    )
    if HALVES == 2:
        low, high = tile.reshape((TILE_M, 2, width)).permute((0, 2, 1)).split()
        store_half(low, 0, fault, output, helped, TILE_M, TILE_N, HAS_BIAS, SCALED)
        store_half(high, width, fault, output, helped, TILE_M, TILE_N, HAS_BIAS, SCALED)
    else:
        store_half(tile, 0, fault, output, helped, TILE_M, TILE_N, HAS_BIAS, SCALED)


@gluon.jit
def runtime(value, like):
    """``value`` as a number that is known when the kernel runs, not when it is compiled: a name
    that a loop or a branch assigns needs one type. ``like``: any number of that type."""
    return like * 0 + value
