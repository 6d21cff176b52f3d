"""The Hopper twin of ``all_gather_matmul``: the same protocol and schedule, warp-specialised in Gluon.

Read ``kernels/all_gather_matmul.py`` first: equation, signals, timeline and proof are there and hold here. What differs:

- Three partitions instead of one program: *load* waits and feeds TMA, *multiply* runs wgmma and the epilogue, *move* pushes
  the own shard (``"sm"``) and copies the gathered input out, beside the other two. Only *load* waits for tiles.
- While it waits for a shard, *load* has already asked for the weights of that tile: they depend on nobody.
- ``EXCHANGE`` (``all_to_all_matmul.py``): the descriptor of x is one of the own part; *load* waits for a source of ``GATHER_K``
  behind its weights, block by block, and asks for each chunk of rows once.
- Stores go by TMA where the tile is whole and the pitch allows it, else as plain masked stores. No signal follows them.

Limits: rows of x and w at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tileweave.config import MatmulConfig
from tileweave.kernels.all_gather_matmul_move import MAX_SLICES, move_partition
from tileweave.kernels.descriptors import Pointer, descriptor
from tileweave.kernels.endpoint import Endpoint
from tileweave.kernels.launch import Prepared, hooked, prepare
from tileweave.language.hopper import (
    acquire,
    await_parts,
    cut,
    give_part,
    label,
    leave,
    load_async,
    make_ring,
    multiply_tile,
    part_range,
    place,
    segment,
    spin,
    stamp,
    store_tile,
    unit_count,
    unit_range,
    wait,
)
from tileweave.schedule import MIN_SPAN as _MIN_SPAN
from tileweave.schedule import Parts, TileSchedule, slice_bounds

MIN_SPAN = gl.constexpr(_MIN_SPAN)


@gluon.jit
def load_rows(
    x_desc, slot0_desc, slot1_desc, buffer, bar, first_row, k, rows, rank, slot,
    WORLD_SIZE: gl.constexpr, SPANS: gl.constexpr,
):  # fmt: skip
    """Ask TMA for one K block of a tile's rows: from x for the own shard, else from the slot."""
    row = first_row
    own = False
    if not SPANS:
        source = first_row // rows
        row -= source * rows
        own = source == rank
        if source != rank:
            row += (rank + WORLD_SIZE - source - 1) % WORLD_SIZE * rows
    if own:
        load_async(x_desc, [row, k], bar, buffer)
    else:
        if slot == 0:
            load_async(slot0_desc, [row, k], bar, buffer)
        else:
            load_async(slot1_desc, [row, k], bar, buffer)


@gluon.jit
def load_shards(
    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report, trace,
    record, slot, rank, rows, first_row, last_row, col, k_begin, k_end, tile, epoch,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Wait for the shards a unit's rows are in, then load its K blocks. Returns (ring turn, sources that have arrived)."""
    SPREAD: gl.constexpr = (8 if WORLD_SIZE > 4 else 4) if SPANS else 1
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    first, last = first_row // rows, last_row // rows
    needed = (2 << last) - (1 << first)
    ahead = 0
    if (needed & arrived) != needed:
        ahead = gl.minimum(k_end - k_begin, STAGES)
        for step in range(0, ahead):
            at = (turn + step) % STAGES
            mbarrier.wait(empty.index(at), (((turn + step) // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(at), block_bytes)
            load_async(w_desc, [col * TILE_N, (k_begin + step) * TILE_K], ready.index(at), b_ring.index(at))
        spin(signals, first, last, MAX_SLICES, epoch, tile, control, report, NUM_SLICES, SPREAD, 1)
        acquire(epoch)
        arrived = arrived | needed
        for step in range(0, ahead):
            at = (turn + step) % STAGES
            load_rows(
                x_desc, slot0_desc, slot1_desc, a_ring.index(at), ready.index(at), first_row,
                (k_begin + step) * TILE_K, rows, rank, slot, WORLD_SIZE, SPANS,
            )  # fmt: skip
    stamp(trace, record, 1, epoch, TRACE)
    turn += ahead
    for block in range(k_begin + ahead, k_end):
        at = turn % STAGES
        mbarrier.wait(empty.index(at), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(at), block_bytes)
        load_async(w_desc, [col * TILE_N, block * TILE_K], ready.index(at), b_ring.index(at))
        load_rows(
            x_desc, slot0_desc, slot1_desc, a_ring.index(at), ready.index(at), first_row,
            block * TILE_K, rows, rank, slot, WORLD_SIZE, SPANS,
        )  # fmt: skip
        turn += 1
    return turn, arrived


@gluon.jit
def load_sources(
    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report,
    slot, rank, rows, first_row, col, k_begin, k_end, k_blocks, tile, epoch,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load a unit's K blocks, which go through parts by order of arrival; wait before the first block of each."""
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    blocks = k_blocks // WORLD_SIZE  # of a source
    for block in range(k_begin, k_end):
        step = block // blocks
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        k = block % blocks * TILE_K
        at = turn % STAGES
        mbarrier.wait(empty.index(at), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(at), block_bytes)
        load_async(w_desc, [col * TILE_N, source * blocks * TILE_K + k], ready.index(at), b_ring.index(at))
        if ((arrived >> source) & 1) == 0:
            spin(signals, source, source, MAX_SLICES, epoch, tile, control, report, NUM_SLICES, 1, 1)
            acquire(epoch)
            arrived = arrived | (1 << source)
        if step == 0:
            load_async(x_desc, [first_row, k], ready.index(at), a_ring.index(at))
        else:
            row = (step - 1) * rows + first_row
            if slot == 0:
                load_async(slot0_desc, [row, k], ready.index(at), a_ring.index(at))
            else:
                load_async(slot1_desc, [row, k], ready.index(at), a_ring.index(at))
        turn += 1
    return turn, arrived


@gluon.jit
def load_partition(
    x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report, trace,
    slot, rank, rows, num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols, k_blocks, max_units,
    chunk_rows, num_partitions, WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, SPANS: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_TAIL: gl.constexpr, TRACE: gl.constexpr, GATHER_K: gl.constexpr,
):  # fmt: skip
    """One warp: for each unit wait for its shards, then keep the ring full."""
    line = band_sources  # where sources stand side by side rows have one: 1, but Triton 3.6 fails if it knows that
    if not GATHER_K:
        line = WORLD_SIZE
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = gl.load(control, volatile=True)
    if PUSH:
        slot = epoch & 1
    record = NUM_SLICES + program * max_units
    turn = 0
    arrived = 0  # bit s: the shard of rank s is where it will be read
    if not SPANS:
        arrived = 1 << rank
    chunk = -1  # of rows, whose arrivals are noted
    for part in range(0, num_segments):
        first_tile, count = segment(part, num_segments, num_tiles, tile_rows * tile_cols, band_sources, lead)
        whole, crew, span = cut(count, num_programs, team, k_blocks, SPLIT_TAIL, MIN_SPAN)
        tiles, units = unit_count(program, num_programs, count, whole, crew, k_blocks, span)
        for index in range(0, units):
            tile, k_begin, k_end = unit_range(index, tiles, program, num_programs, count, whole, crew, k_blocks, span)
            tile += first_tile
            first_row, row_limit, col = place(
                tile, rank % line, line, rows, TILE_M, tile_rows, tile_cols, GROUP_M, band_sources, lead
            )
            label(trace, record, tile + 1, TRACE)
            stamp(trace, record, 0, epoch, TRACE)
            if GATHER_K:
                if first_row // chunk_rows != chunk:
                    chunk = first_row // chunk_rows
                    arrived = 1 << rank
                turn, arrived = load_sources(
                    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals + chunk,
                    control, report, slot, rank, rows, first_row, col, k_begin, k_end, k_blocks, tile, epoch,
                    WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, STAGES,
                )  # fmt: skip
            else:
                last_row = gl.minimum(first_row + TILE_M, row_limit) - 1
                turn, arrived = load_shards(
                    turn, arrived, x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control,
                    report, trace, record, slot, rank, rows, first_row, last_row, col, k_begin, k_end, tile, epoch,
                    WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, SPANS, STAGES, TRACE,
                )  # fmt: skip
            record += 1
    leave(control, epoch, num_partitions)


@gluon.jit
def multiply_partition(
    out, out_desc, out_buffer, bias, partials, counters, a_ring, b_ring, empty, ready, signals, control, report, trace,
    rank, rows, cols, num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols, k_blocks, max_units,
    num_partitions, WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr,
    OUT_TMA: gl.constexpr, SPLIT_TAIL: gl.constexpr, TRACE: gl.constexpr, GATHER_K: gl.constexpr,
):  # fmt: skip
    """The warpgroups: multiply each unit from the ring, then store it or hand it to the tile's owner."""
    line = band_sources  # where sources stand side by side rows have one: 1, but Triton 3.6 fails if it knows that
    if not GATHER_K:
        line = WORLD_SIZE
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    epoch = gl.load(control, volatile=True)
    record = NUM_SLICES + program * max_units
    turn = 0
    for part in range(0, num_segments):
        first_tile, count = segment(part, num_segments, num_tiles, tile_rows * tile_cols, band_sources, lead)
        whole, crew, span = cut(count, num_programs, team, k_blocks, SPLIT_TAIL, MIN_SPAN)
        tiles, units = unit_count(program, num_programs, count, whole, crew, k_blocks, span)
        for index in range(0, units):
            number, k_begin, k_end = unit_range(index, tiles, program, num_programs, count, whole, crew, k_blocks, span)
            first_row, row_limit, col = place(
                first_tile + number, rank % line, line, rows, TILE_M, tile_rows, tile_cols, GROUP_M, band_sources, lead
            )
            tile, turn, fault = multiply_tile(
                turn, k_end - k_begin, a_ring, b_ring, empty, ready, control, TILE_M, TILE_N, STAGES, WARPS
            )
            owner, helpers = part_range(number, program, whole, num_programs, crew, k_blocks, span)
            at = part * num_programs + program
            if program != owner:
                give_part(tile, partials, counters, at, part * num_programs + number - whole, TILE_M, TILE_N)
            else:
                if helpers > 0:
                    await_parts(counters, part * num_programs + number - whole, helpers)
                store_tile(
                    tile, fault, bias, out, out_desc, out_buffer, partials, at, helpers, crew, first_row, row_limit,
                    col * TILE_N, cols, rows * line, TILE_M, TILE_N, HALVES, HAS_BIAS, OUT_TMA,
                )  # fmt: skip
            stamp(trace, record, 2, epoch, TRACE)
            record += 1
    tma.store_wait(0)
    if not PUSH:  # the copy engine reads the epoch word: it must have pushed before the word moves
        if program == num_programs - 1:
            wait(signals, WORLD_SIZE * MAX_SLICES + WORLD_SIZE, epoch, -1, control, report, 1, WARPS)
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
):  # fmt: skip
    """Dispatch the partitions; *move* ends at once where there is nothing to move."""
    MOVE_WARPS: gl.constexpr = 4 if WARPS == 4 else 2  # what fits into 12 warps of 168 registers
    a_ring, b_ring, empty, ready = make_ring(x_desc, w_desc, TILE_M, TILE_K, STAGES)
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    num_partitions = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (multiply_partition, (
                out, out_desc, out_buffer, bias, partials, counters, a_ring, b_ring, empty, ready, signals, control,
                report, trace, rank, rows, cols, num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols,
                k_blocks, max_units, num_partitions, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N, GROUP_M, STAGES, WARPS,
                HALVES, HAS_BIAS, OUT_TMA, SPLIT_TAIL, TRACE, GATHER_K,
            )),
            (load_partition, (
                x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report, trace,
                slot, rank, rows, num_tiles, num_segments, band_sources, lead, team, tile_rows, tile_cols, k_blocks,
                max_units, chunk_rows, num_partitions, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N, TILE_K, SPANS,
                GROUP_M, STAGES, SPLIT_TAIL, TRACE, GATHER_K,
            )),
            (move_partition, (
                x, gathered, slots, slot_table, signal_table, signals, control, report, trace, slot, slot_size, rank,
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
    """One shape's launches: descriptors, integers and prepared kernels, kept between calls (``kernels/launch.py``)."""

    def __init__(
        self, peers: Endpoint, schedule: TileSchedule, config: MatmulConfig, dtype: torch.dtype, stride_w: int,
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts = parts or Parts(schedule.rank, schedule.world_size, schedule.depth, schedule.depth)
        self.peers, self.schedule, self.config = peers, schedule, config
        push, s, c = config.transport == "sm", schedule, config
        self.size, self.programs = s.rows * parts.depth, s.num_programs
        self.shift = parts.rank * parts.step * dtype.itemsize  # of the own part in x
        self.slices = c.num_slices if push else 1
        block = 4096 if c.num_warps == 4 else 2048  # elements that the move partition has in flight: 32 a thread
        halves = 2 if c.tile_n == 256 else 1
        row_tile, pitch = [c.tile_m, c.tile_k], parts.depth
        slot_rows = s.rows * (parts.world_size - 1) if parts.side_by_side else s.slot_rows
        self.base = base = peers.slots.data_ptr()
        self.slots = [
            descriptor(base + i * peers.slot_size * dtype.itemsize, dtype, [slot_rows, pitch], pitch, row_tile) for i in (0, 1)
        ]
        x_desc = descriptor(base, dtype, [s.rows, pitch], parts.pitch, row_tile)
        w_desc = descriptor(base, dtype, [s.cols, s.depth], stride_w, [c.tile_n, c.tile_k])
        self.pitch_fits = s.cols * dtype.itemsize % 16 == 0
        out_tile = [c.tile_m, c.tile_n // halves]
        shape = [s.rows * s.world_size, s.cols] if self.pitch_fits else [s.rows, s.depth]
        self.descriptors = (x_desc, w_desc, descriptor(base, dtype, shape, shape[1], out_tile))
        self.part_words = s.num_segments * self.programs * c.tile_m * c.tile_n if s.has_cut_tiles else 0
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
        self.options = {"num_warps": c.num_warps, "maxnreg": 168}
        self.prepared: dict[tuple[bool, ...], Prepared | None] = {}

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
        variant = (to % 16 == 0, bias_at % 16 == 0, gathered_at % 16 == 0, bias is None, gathered is None, trace is None)
        prepared = self.prepared.get(variant)
        bases = (x.data_ptr() + self.shift, w.data_ptr(), to if by_tma else self.base)
        if prepared is not None and not hooked():
            words = (x.data_ptr(), bias_at, to, gathered_at, partials.data_ptr(), stamps.data_ptr(), slot)
            return prepared(words, bases)
        peers = self.peers
        x_desc, w_desc, out_desc = (
            replace(held, base=Pointer(base, x.dtype)) for held, base in zip(self.descriptors, bases, strict=True)
        )
        arguments = (
            x_desc, *self.slots, w_desc, out_desc, x, added, out, kept, peers.slots, partials, peers.counters,
            peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, stamps,
            self.parts.rank, slot, peers.slot_size, *self.integers, *self.constants,
            bias is not None, gathered is not None, by_tma, self.schedule.split_tail, trace is not None,
            self.parts.exchange, self.parts.side_by_side,
        )  # fmt: skip
        compiled = all_gather_matmul_hopper_kernel[(self.programs,)](*arguments, **self.options)
        if variant not in self.prepared:
            self.prepared[variant] = prepare(compiled, self.programs, arguments, WORDS, MAPS)
        return None
