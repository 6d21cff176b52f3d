"""The Hopper twin of ``all_gather_matmul``: the same protocol and schedule, warp-specialised in Gluon.

Read ``kernels/all_gather/triton.py`` first: equation, signals, timeline and proof are there and hold here. What differs:

- Three partitions in each program: *load* waits for the shards of a tile and feeds TMA, *multiply* runs wgmma and the epilogue.
  *move*, beside them, pushes the own shard (``"sm"``), or meets the other ranks and opens the gate (``"copy_engine"``), and
  copies the gathered input out. *multiply* of the last program waits for [pushed]. Each partition leaves by itself.
- While it waits for a shard, *load* has already asked for the weights of that tile: they depend on nobody.
- ``EXCHANGE`` (``kernels/all_to_all/gather_triton.py``): the descriptor of x is one of the own part. Where parts stand side by side
  (``GATHER_K``), *load* asks for a K block's weights, then waits for its source, once for each chunk of rows.
- Stores go by TMA where the tile has all its rows, or ends where ``out`` does (TMA clips), and rows of ``out`` are at multiples
  of 16 bytes; else they are plain masked stores. No signal follows them.

Limits: 2 bytes an element; rows of x and w (or columns of w, ``DEPTH_FIRST``) at multiples of 16 bytes; ``GATHER_K``: the depth
of a part a multiple of ``tile_k``, which ``planning/matmul.py`` sees to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon.matmul import (
    Helped,
    await_parts,
    give_part,
    make_ring,
    multiply_tile,
    part_range,
    place,
    segment,
    share_of,
    store_tile,
    unit_range,
)
from tileweave.device.gluon.meet import await_pushed
from tileweave.device.gluon.signal import FAULT, leave, stamp
from tileweave.device.triton.tiles import Tiles
from tileweave.kernels.all_gather.hopper_load import load_partition
from tileweave.kernels.all_gather.hopper_move import move_partition
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, slice_bounds


@gluon.jit
def multiply_partition(
    out, out_desc, out_buffer, bias, partials, counters, ring, signals, control, report, trace, tiles, cols, max_units,
    num_partitions, WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr,
    OUT_TMA: gl.constexpr, TRACE: gl.constexpr, GATHER_K: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """The warpgroups: multiply each unit from the ring, then store it or hand it to the tile's owner."""
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = gl.load(control, volatile=True)
    record = NUM_SLICES + program * max_units
    turn = 0
    for part in range(0, tiles.num_segments):
        base = part * num_programs
        first_tile, count = segment(tiles, part)
        share = share_of(tiles, program, num_programs, count)
        for index in range(0, share.units):
            number, k_begin, k_end = unit_range(share, index)
            first_row, row_limit, col = place(tiles, first_tile + number)
            tile, turn, fault = multiply_tile(
                turn, k_end - k_begin, ring, control, TILE_M, TILE_N, STAGES, WARPS,
                DEPTH_FIRST=DEPTH_FIRST, LATE=GATHER_K,
            )  # fmt: skip
            owner, helpers = part_range(share, number)
            if program != owner:
                give_part(tile, partials, counters, base, share, number, TILE_M, TILE_N)
            else:
                if helpers > 0:
                    await_parts(counters, base, share, number, helpers)
                    fault = gl.load(
                        control + FAULT, volatile=True
                    )  # helpers waited for what this program did not need
                helped = Helped(partials, base + program, helpers, share.team)
                store_tile(
                    tile, fault, bias, out, out_desc, out_buffer, helped, first_row, row_limit, col * TILE_N, cols,
                    tiles.rows * tiles.world_size, TILE_M, TILE_N, HALVES, HAS_BIAS, OUT_TMA,
                )  # fmt: skip
            stamp(trace, record, 2, epoch, TRACE)
            record += 1
    tma.store_wait(0)
    if not PUSH:  # the copy engine reads the epoch word: it must have pushed before the word moves
        if program == num_programs - 1:
            await_pushed(signals, epoch, control, report, WORLD_SIZE, WARPS)
            gl.store(counters + tiles.num_segments * num_programs, 0)
    leave(control, epoch, num_partitions)


UNSPECIALIZED = [  # rows, too: Triton 3.6 fails on this kernel where it knows that there is one
    "rank", "slot", "rows", "num_producers", "num_tiles", "num_segments", "band_sources", "lead", "team", "tile_rows",
    "tile_cols", "k_blocks", "max_units", "chunk_rows", "num_chunks",
]  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_hopper_kernel(
    x_desc, slot0_desc, slot1_desc, w_desc, out_desc, x, bias, out, gathered, slots, partials, counters,
    slot_table, signal_table, signals, control, report, trace,
    rank, slot, slot_size, rows, cols, size, slice_size, share_size, num_producers,
    num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols, k_blocks, max_units,
    depth, x_step, x_pitch, chunk_rows, num_chunks,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, BLOCK: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, SPANS: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr, GATHERED: gl.constexpr,
    OUT_TMA: gl.constexpr, SPLIT_TAIL: gl.constexpr, TRACE: gl.constexpr, EXCHANGE: gl.constexpr, GATHER_K: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions; *move* ends at once where there is nothing to move."""
    MOVE_WARPS: gl.constexpr = 4 if WARPS == 4 else 2  # what fits into 12 warps of 168 registers
    ring = make_ring(x_desc, w_desc, TILE_M, TILE_K, STAGES)
    out_buffer = gl.allocate_shared_memory(
        out_desc.dtype, out_desc.block_type.shape, out_desc.layout
    )
    num_partitions = gl.num_programs(0) * 3
    line = band_sources  # sources in the line of tiles. GATHER_K: 1, which band_sources is: Triton 3.6 fails on the constant
    if not GATHER_K:
        line = WORLD_SIZE
    tiles = Tiles(
        rank % line, line, rows, TILE_M, GROUP_M, num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols,
        k_blocks, SPLIT_TAIL,
    )  # fmt: skip
    gate = counters + num_segments * gl.num_programs(0)
    gl.warp_specialize(
        [
            (multiply_partition, (
                out, out_desc, out_buffer, bias, partials, counters, ring, signals, control,
                report, trace, tiles, cols, max_units, num_partitions, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N, STAGES,
                WARPS, HALVES, HAS_BIAS, OUT_TMA, TRACE, GATHER_K, DEPTH_FIRST,
            )),
            (load_partition, (
                x_desc, slot0_desc, slot1_desc, w_desc, ring, signals, control, report, trace,
                slot, rank, tiles, max_units, chunk_rows, num_partitions, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N,
                TILE_K, SPANS, STAGES, TRACE, GATHER_K, DEPTH_FIRST,
            )),
            (move_partition, (
                x, gathered, slots, slot_table, signal_table, signals, gate, control, report, trace, slot, slot_size, rank,
                size, slice_size, share_size, num_producers, depth, x_step, x_pitch, num_chunks, num_partitions, WORLD_SIZE,
                NUM_SLICES, PUSH, GATHERED, SPANS, BLOCK, MOVE_WARPS, TRACE, EXCHANGE, GATHER_K,
            )),
        ],
        [1, MOVE_WARPS],
        [40, 40 if WARPS == 8 else 72],
    )  # fmt: skip


# What changes between the launches of one shape; the bases of the descriptors, in the order of Launcher.descriptors.
WORDS = ("x", "bias", "out", "gathered", "partials", "trace", "slot")
MAPS = ("x_desc", "w_desc", "out_desc")


class Launcher:
    """One shape's launches: descriptors, integers and prepared kernels, kept between calls (``kernels/runtime/launch.py``)."""

    def __init__(
        self, peers: Peers, schedule: TileSchedule, config: MatmulConfig, dtype: torch.dtype,
        strides_w: Sequence[int],
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts = parts or Parts(
            schedule.rank, schedule.world_size, schedule.depth, schedule.depth
        )
        self.peers, self.schedule, self.config = peers, schedule, config
        push, s, c = config.transport == "sm", schedule, config
        self.size, self.programs = s.rows * parts.depth, s.num_programs
        self.shift = parts.rank * parts.step * dtype.itemsize  # of the own part in x
        self.slices = c.num_slices if push else 1
        block = (
            4096 if c.num_warps == 4 else 2048
        )  # elements that the move partition has in flight: 32 a thread
        halves = 2 if c.tile_n == 256 else 1
        row_tile, pitch = [c.tile_m, c.tile_k], parts.depth
        slot_rows = s.rows * (parts.world_size - 1) if parts.side_by_side else s.slot_rows
        self.base = base = peers.slots.data_ptr()
        self.slots = [
            descriptor(
                base + i * peers.slot_size * dtype.itemsize,
                dtype,
                [slot_rows, pitch],
                pitch,
                row_tile,
            )
            for i in (0, 1)
        ]
        x_desc = descriptor(base, dtype, [s.rows, pitch], parts.pitch, row_tile)
        w_desc = weight(base, dtype, s.cols, s.depth, strides_w, [c.tile_n, c.tile_k])
        self.depth_first = lines(strides_w)[1]
        self.pitch_fits = s.cols * dtype.itemsize % 16 == 0
        out_tile = [c.tile_m, c.tile_n // halves]
        shape = [s.rows * s.world_size, s.cols] if self.pitch_fits else [s.rows, s.depth]
        self.descriptors = (x_desc, w_desc, descriptor(base, dtype, shape, shape[1], out_tile))
        self.part_words = (
            s.num_segments * self.programs * c.tile_m * c.tile_n if s.has_cut_tiles else 0
        )
        self.integers = (
            s.rows, s.cols, self.size, slice_bounds(self.size, self.slices, 0, block)[1],
            slice_bounds(self.size, self.programs, 0, block)[1], min(c.num_producers, self.programs),
            s.num_tiles, s.num_segments, s.band_sources, s.lead, s.team, s.tile_rows, s.tile_cols, s.k_blocks, s.max_units(),
            parts.depth, parts.step, parts.pitch, parts.chunk_rows, parts.chunks,
        )  # fmt: skip
        spans = s.spans_shards and not parts.side_by_side
        self.constants = (
            parts.world_size, self.slices, push, block, c.tile_m, c.tile_n, c.tile_k, spans, c.group_m,
            c.num_stages, c.num_warps, halves,
        )  # fmt: skip
        # 12 warps share the registers: 8 + 1 + 2, or 4 + 1 + 4, each sum rounded up to whole warpgroups
        self.launches = Launches(
            all_gather_matmul_hopper_kernel, WORDS, MAPS, num_warps=c.num_warps, maxnreg=168
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gathered: torch.Tensor | None,
        slot: int,
        trace: torch.Tensor | None = None,
    ) -> None:
        """Launch on the current stream; as ``all_gather_matmul.Launcher``, for what ``descriptors.fits``."""
        to = out.data_ptr()
        by_tma = self.pitch_fits and to % 16 == 0
        partials = out
        if self.part_words:
            partials = torch.empty(self.part_words, dtype=torch.float32, device=x.device)
        added, kept = out if bias is None else bias, out if gathered is None else gathered
        stamps = self.peers.control if trace is None else trace
        bias_at, gathered_at = added.data_ptr(), kept.data_ptr()
        variant = (
            to % 16 == 0,
            bias_at % 16 == 0,
            gathered_at % 16 == 0,
            bias is None,
            gathered is None,
            trace is None,
        )
        bases = (x.data_ptr() + self.shift, w.data_ptr(), to if by_tma else self.base)
        words = (
            x.data_ptr(),
            bias_at,
            to,
            gathered_at,
            partials.data_ptr(),
            stamps.data_ptr(),
            slot,
        )

        def arguments() -> tuple[object, ...]:
            peers = self.peers
            x_desc, w_desc, out_desc = based(self.descriptors, bases, x.dtype)
            return (
                x_desc, *self.slots, w_desc, out_desc, x, added, out, kept, peers.slots, partials, peers.counters,
                peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, stamps,
                self.parts.rank, slot, peers.slot_size, *self.integers, *self.constants,
                bias is not None, gathered is not None, by_tma, self.schedule.split_tail, trace is not None,
                self.parts.exchange, self.parts.side_by_side, self.depth_first,
            )  # fmt: skip

        self.launches(self.programs, variant, arguments, words, bases)
