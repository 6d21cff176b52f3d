"""The Hopper kernel of ``all_gather_matmul``: the same protocol and schedule, warp-specialised in
Gluon.

Read ``kernels/all_gather/triton.py`` first: equation, signals, timeline and proof are there and
hold here. What differs:

- Each program has three partitions: *load* waits for the shards of a tile and feeds TMA, *multiply*
  runs wgmma and the epilogue. Concurrently *move* pushes the own shard (``"sm"``), or meets the
  other ranks and opens the gate (``"copy_engine"``), and copies the gathered input out. *multiply*
  of the last program waits for [pushed]. Each partition leaves by itself.
- While it waits for a shard, *load* has already asked for the weights of that tile: they depend on
  no other rank.
- ``EXCHANGE`` (``kernels/all_to_all/gather_triton.py``): the descriptor of x is one of the own
  part. Where parts are side by side (``GATHER_K``), *load* asks for a K block's weights, then waits
  for its source, once for each chunk of rows.
- FP8 operands (``SCALED``): the same ring, of tiles with twice the elements along K. Scales of rows
  are applied in the epilogue. Those of blocks, and every sum of tiles of up to 128 columns, are
  applied after each 128 of K (``multiply_promoted``).
- Stores go by TMA where the tile has all its rows, or ends where ``out`` does (TMA clips), and rows
  of ``out`` are at multiples of 16 bytes; else they are plain masked stores. No signal follows
  them.

Limits: 2 bytes per element, or 1 of FP8 with w along K; rows of x, of parts and of w (or columns of
w, ``DEPTH_FIRST``) at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon.matmul import (
    BlockScales,
    Helped,
    RowScales,
    await_parts,
    give_part,
    make_ring,
    multiply_promoted,
    multiply_tile,
    part_range,
    place,
    segment,
    share_of,
    store_tile,
    unit_range,
)
from tileweave.device.gluon.peers import await_pushed, faulted, leave, load_epoch
from tileweave.device.gluon.signal import stamp
from tileweave.device.triton.tiles import Tiles
from tileweave.kernels.all_gather.hopper_load import Operands, load_partition
from tileweave.kernels.all_gather.hopper_move import move_partition
from tileweave.kernels.all_gather.triton import scheduled
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers, lines, memory_of_parts
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, slice_bounds


class Tensors(NamedTuple):
    """The tensors of a call that are not only loaded by TMA; ``bias``, ``gathered``, ``partials``,
    ``trace`` and scales are any tensor where there is none."""

    x: Any
    bias: Any
    out: Any
    gathered: Any
    partials: Any
    trace: Any
    x_scale: Any
    own_scale: Any
    w_scale: Any


class Sizes(NamedTuple):
    """Numbers that belong to the shape; Triton may specialise each of them.

    cols : columns of the output.

    size, depth : elements of a shard or part, and of one of its rows.

    slice_size : elements of a shard that a producer pushes between two signals.

    copy_size : elements of each shard that each program copies into ``gathered``.

    step, pitch : of ``Parts``.
    """

    cols: Any
    size: Any
    slice_size: Any
    copy_size: Any
    depth: Any
    step: Any
    pitch: Any


class Choices(NamedTuple):
    """What is decided when the kernel is compiled; see ``triton.py`` for what is not here.

    BLOCK : elements that *move* has in flight.

    STAGES : buffers of the ring.

    WARPS, MOVE_WARPS : of *multiply* and of *move*.

    HALVES : in how many halves a tile is stored: 2 where its image in shared memory would be too
    large.

    RAGGED : parts side by side whose depth is no multiple of ``TILE_K``.

    OUT_TMA : TMA can store rows of ``out``.

    ITEMSIZE : bytes of an element of x and w.
    """

    WORLD_SIZE: int
    NUM_SLICES: int
    PUSH: bool
    BLOCK: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    SPANS: bool
    GROUP_M: int
    STAGES: int
    WARPS: int
    MOVE_WARPS: int
    HALVES: int
    SPLIT_TAIL: bool
    EXCHANGE: bool
    GATHER_K: bool
    DEPTH_FIRST: bool
    RAGGED: bool
    HAS_BIAS: bool = False
    GATHERED: bool = False
    OUT_TMA: bool = False
    TRACE: bool = False
    ITEMSIZE: int = 2
    SCALED: int = 0
    PROMOTE: bool = False


@gluon.jit
def block_scales(tensors, tiles, first_row, row_limit, col, C: gl.constexpr):
    """Where the scales of a tile of FP8 blocks are: those of a shard are [K/128, rows]."""
    source = first_row // tiles.rows
    shard = tensors.x_scale + source.to(gl.int64) * tiles.rows * tiles.k_blocks
    if source == tiles.rank:
        shard = tensors.own_scale
    within = source * tiles.rows
    of_cols = tensors.w_scale + (col * C.TILE_N // 128) * tiles.k_blocks
    return BlockScales(shard, first_row - within, row_limit - within, tiles.rows, of_cols)


@gluon.jit
def row_scales(tensors, tiles, first_row):
    """Where the scales of a tile's rows are, counted from the first row of all."""
    rows = tensors.x_scale
    if first_row // tiles.rows == tiles.rank:
        rows = tensors.own_scale - tiles.rank * tiles.rows
    return RowScales(rows, tensors.w_scale)


@gluon.jit
def multiply_partition(
    tensors,
    out_desc,
    out_buffer,
    peers,
    ring,
    tiles,
    cols,
    max_units,
    num_partitions,
    C: gl.constexpr,
):
    """The warpgroups: multiply each unit from the ring, then store it or hand it to the tile's
    owner."""
    partials, counters = tensors.partials, peers.counters
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = load_epoch(peers)
    record = C.NUM_SLICES + program * max_units
    turn = 0
    for part in range(0, tiles.num_segments):
        base = part * num_programs
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            number, k_begin, k_end = unit_range(share, index)
            first_row, row_limit, col = place(tiles, first_tile + number)
            if C.PROMOTE:
                tile, turn = multiply_promoted(
                    turn,
                    k_begin,
                    k_end - k_begin,
                    ring,
                    block_scales(tensors, tiles, first_row, row_limit, col, C),
                    C.TILE_M,
                    C.TILE_N,
                    C.STAGES,
                    C.WARPS,
                    C.SCALED == 2,
                )
                fault = faulted(peers)
            else:
                tile, turn, fault = multiply_tile(
                    turn,
                    k_end - k_begin,
                    ring,
                    peers.control,
                    C.TILE_M,
                    C.TILE_N,
                    C.STAGES,
                    C.WARPS,
                    DEPTH_FIRST=C.DEPTH_FIRST,
                    LATE=C.GATHER_K,
                )
            owner, helpers = part_range(share, number)
            if program != owner:
                give_part(tile, partials, counters, base, share, number, C.TILE_M, C.TILE_N)
            else:
                if helpers > 0:
                    await_parts(counters, base, share, number, helpers)
                    # helpers waited for what this program did not need
                    fault = faulted(peers)
                helped = Helped(partials, base + program, helpers, share.team)
                store_tile(
                    tile,
                    fault,
                    tensors.bias,
                    tensors.out,
                    out_desc,
                    out_buffer,
                    helped,
                    first_row,
                    row_limit,
                    col * C.TILE_N,
                    cols,
                    tiles.rows * tiles.world_size,
                    C.TILE_M,
                    C.TILE_N,
                    C.HALVES,
                    C.HAS_BIAS,
                    C.OUT_TMA,
                    row_scales(tensors, tiles, first_row),
                    C.SCALED == 1,
                )
            stamp(tensors.trace, record, 2, epoch, C.TRACE)
            record += 1
    tma.store_wait(0)
    # the copy engine reads the epoch: it must have pushed before the epoch moves
    if not C.PUSH:
        if program == num_programs - 1:
            await_pushed(peers, epoch, C.WORLD_SIZE, C.WARPS)
            gl.store(counters + tiles.num_segments * num_programs, 0)
    leave(peers, epoch, num_partitions)


# rows, too: Triton 3.6 fails on this kernel where it knows that there is one
UNSPECIALIZED = [
    "rank",
    "slot",
    "rows",
    "num_producers",
    "num_tiles",
    "num_segments",
    "band_sources",
    "lead",
    "team",
    "tile_rows",
    "tile_cols",
    "k_blocks",
    "max_units",
    "chunk_rows",
    "num_chunks",
]


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_hopper_kernel(
    x_desc,
    slot0_desc,
    slot1_desc,
    w_desc,
    out_desc,
    tensors,
    peers,
    rank,
    slot,
    rows,
    sizes,
    num_producers,
    num_tiles,
    num_segments,
    band_sources,
    lead,
    team,
    tile_rows,
    tile_cols,
    k_blocks,
    max_units,
    chunk_rows,
    num_chunks,
    C: gl.constexpr,
):
    """Dispatch the partitions; *move* ends at once where there is nothing to move.

    The numbers are those of ``all_gather_matmul_kernel``. Descriptors are parameters and no tuple,
    since Triton 3.6 cannot launch them in tuples.
    """
    operands = Operands(x_desc, slot0_desc, slot1_desc, w_desc)
    ring = make_ring(x_desc, w_desc, C.TILE_M, C.TILE_K, C.STAGES)
    out_buffer = gl.allocate_shared_memory(
        out_desc.dtype, out_desc.block_type.shape, out_desc.layout
    )
    num_partitions = gl.num_programs(0) * 3
    # GATHER_K: 1, which band_sources is; Triton 3.6 fails on the constant
    num_sources = band_sources
    if not C.GATHER_K:
        num_sources = C.WORLD_SIZE
    tiles = Tiles(
        rank % num_sources,
        num_sources,
        rows,
        C.TILE_M,
        C.GROUP_M,
        num_tiles,
        num_segments,
        band_sources,
        lead,
        team,
        tile_rows,
        tile_cols,
        k_blocks,
        C.SPLIT_TAIL,
    )
    gate = peers.counters + num_segments * gl.num_programs(0)
    # written out here: a tuple that is assigned to a name would make numbers of constants
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    tensors,
                    out_desc,
                    out_buffer,
                    peers,
                    ring,
                    tiles,
                    sizes.cols,
                    max_units,
                    num_partitions,
                    C,
                ),
            ),
            (
                load_partition,
                (
                    operands,
                    ring,
                    peers,
                    tensors.trace,
                    slot,
                    rank,
                    tiles,
                    max_units,
                    chunk_rows,
                    num_partitions,
                    C,
                ),
            ),
            (
                move_partition,
                (
                    tensors,
                    peers,
                    slot,
                    rank,
                    sizes,
                    gate,
                    num_producers,
                    num_chunks,
                    num_partitions,
                    C,
                ),
            ),
        ],
        [1, C.MOVE_WARPS],
        [40, 40 if C.WARPS == 8 else 72],
    )


# what changes between the launches of one shape; and the descriptors whose bases change
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "slot")
MAPS = ("x_desc", "w_desc", "out_desc")


def launcher(
    peers: Peers,
    schedule: TileSchedule,
    config: MatmulConfig,
    dtype: torch.dtype,
    strides_w: Sequence[int],
    parts: Parts | None = None,
    scaled: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Launcher:
    """Launches for one shape and stride of w, for tensors that ``descriptors.fits``; called as
    those of ``triton.launcher``. ``out_dtype``: that of the result, if not ``dtype``."""
    s, c = schedule, config
    parts = parts or Parts(s.rank, s.world_size, s.depth, s.depth)
    push = c.transport == "sm"
    slices = c.num_slices if push else 1
    size, pitch = s.rows * parts.depth, parts.depth
    # elements that the move partition has in flight: 32 per thread
    block = 4096 if c.num_warps == 4 else 2048
    halves = 2 if c.tile_n == 256 else 1
    ragged = parts.side_by_side and parts.depth % c.tile_k != 0
    depth_w, parts_w = (parts.depth, parts.world_size) if ragged else (s.depth, 1)
    choices = Choices(
        WORLD_SIZE=parts.world_size,
        NUM_SLICES=slices,
        PUSH=push,
        BLOCK=block,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        SPANS=s.spans_shards and not parts.side_by_side,
        GROUP_M=c.group_m,
        STAGES=c.num_stages,
        WARPS=c.num_warps,
        # what fits into 12 warps of 168 registers
        MOVE_WARPS=4 if c.num_warps == 4 else 2,
        HALVES=halves,
        SPLIT_TAIL=s.split_tail,
        EXCHANGE=parts.exchange,
        GATHER_K=parts.side_by_side,
        DEPTH_FIRST=lines(strides_w)[1],
        RAGGED=ragged,
        ITEMSIZE=dtype.itemsize,
        SCALED=scaled,
        PROMOTE=scaled > 0 and c.tile_n <= 128,
    )
    made = out_dtype or dtype
    slot_rows = s.rows * (parts.world_size - 1) if parts.side_by_side else s.slot_rows
    base, row_tile = peers.slots.data_ptr(), [c.tile_m, c.tile_k]
    slot0, slot1 = (
        descriptor(
            base + i * peers.slot_size * dtype.itemsize, dtype, [slot_rows, pitch], pitch, row_tile
        )
        for i in (0, 1)
    )
    pitch_fits = s.cols * made.itemsize % 16 == 0
    out_shape = [s.rows * s.world_size, s.cols] if pitch_fits else [s.rows, s.depth]
    descriptors = (
        descriptor(base, dtype, [s.rows, pitch], parts.pitch, row_tile),
        weight(base, dtype, s.cols, depth_w, strides_w, [c.tile_n, c.tile_k], parts_w),
        descriptor(base, made, out_shape, out_shape[1], [c.tile_m, c.tile_n // halves]),
    )
    fixed = {
        "slot0_desc": slot0,
        "slot1_desc": slot1,
        "peers": peers,
        "rank": parts.rank,
        "rows": s.rows,
        "sizes": Sizes(
            cols=s.cols,
            size=size,
            slice_size=slice_bounds(size, slices, 0, block)[1],
            copy_size=slice_bounds(size, s.num_programs, 0, block)[1],
            depth=parts.depth,
            step=parts.step,
            pitch=parts.pitch,
        ),
        **scheduled(s, c, parts),
    }
    part_elements = s.part_elements
    shift = parts.rank * parts.step * dtype.itemsize  # of the own part in x
    control = peers.control.data_ptr()

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gathered: torch.Tensor | None,
        slot: int,
        trace: torch.Tensor | None = None,
        scales: Sequence[torch.Tensor] | None = None,
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        start, to = x.data_ptr(), out.data_ptr()  # what is not given is out
        bias_at = to if bias is None else bias.data_ptr()
        kept_at = to if gathered is None else gathered.data_ptr()
        stamps_at = control if trace is None else trace.data_ptr()
        ends = (to, to, to) if scales is None else tuple(t.data_ptr() for t in scales)
        words = (start, bias_at, to, kept_at, partials.data_ptr(), stamps_at, *ends, slot)
        by_tma = pitch_fits and to % 16 == 0
        bases = (start + shift, w.data_ptr(), to if by_tma else base)

        def changing() -> dict[str, Any]:
            x_desc, w_desc, out_desc = based(descriptors, bases)
            added, kept = out if bias is None else bias, out if gathered is None else gathered
            stamps, given = peers.control if trace is None else trace, scales or (out, out, out)
            chosen = choices._replace(
                HAS_BIAS=bias is not None,
                GATHERED=gathered is not None,
                OUT_TMA=by_tma,
                TRACE=trace is not None,
            )
            return {
                "x_desc": x_desc,
                "w_desc": w_desc,
                "out_desc": out_desc,
                "tensors": Tensors(x, added, out, kept, partials, stamps, *given),
                "slot": slot,
                "C": chosen,
            }

        aligned = (to % 16 == 0, bias_at % 16 == 0, kept_at % 16 == 0)
        if scales is not None:
            aligned += tuple(end % 16 == 0 for end in ends)
        variant = (*aligned, bias is None, gathered is None, trace is None)
        return variant, words, changing, bases

    # 12 warps share the registers: 8 + 1 + 2, or 4 + 1 + 4, each sum rounded up to whole warpgroups
    return Launcher(
        all_gather_matmul_hopper_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS,
        MAPS,
        num_warps=c.num_warps,
        maxnreg=168,
    )
