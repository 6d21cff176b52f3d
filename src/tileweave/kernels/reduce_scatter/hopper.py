"""The Hopper twin of ``matmul_reduce_scatter``: the same protocol and schedule, warp-specialised in Gluon.

Read ``kernels/reduce_scatter/triton.py`` first: equation, signals, timeline and proof are there and hold here. What differs:

- Three partitions: *load* feeds TMA, *multiply* runs wgmma and the epilogue, in pieces of 64 columns, *store* takes pieces
  from shared memory to memory, drains and counts them in, beside the other two.
- ``"copy_engine"``: what copy engines brought for an own tile comes through the same ring as its operands: behind the last K
  block *load* waits for the chunk of one peer after the other and asks for its pieces, *multiply* adds them as they come. So
  the wait and the way from memory are hidden as those of operands are, and behind the last peer's signal stands only that
  peer's part. Ranks meet in *store*.
- ``"sm"``: *multiply* pushes registers and polls for registers, and *store* has nothing to do.
- ``EXCHANGE`` (``kernels/all_to_all/scatter_triton.py``, whose protocol it is then): nothing is added. ``rows`` are those of a part, padded to
  whole tiles; *store* announces chunks to their owners, who pull them, and the last one ends the call.
- Where TMA cannot store to out (``WHOLE`` is False: its rows are not at multiples of 16 bytes), *multiply* stores own tiles.

Limits: 2 bytes an element; rows of x and w (or columns of w, ``DEPTH_FIRST``) at multiples of 16 bytes; ``"copy_engine"``:
``tile_k`` 64, as a piece has columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileweave.device.gluon.matmul import (
    Helped,
    await_parts,
    claim,
    give_part,
    load_slot,
    load_weight,
    make_ring,
    multiply_tile,
    part_range,
    place_out,
    share_of,
    unit_range,
)
from tileweave.device.gluon.signal import acquire, leave, load_async, spin
from tileweave.device.triton.tiles import OwnerTiles
from tileweave.kernels.reduce_scatter.hopper_epilogue import (
    BOXES,
    MAX_SLICES,
    PIECE,
    Boxes,
    Slots,
    Spot,
    add_arrived,
    finish_part,
    finish_piece,
    pieces_of,
    store_partition,
    tile_place,
)
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import ScatterSchedule


@gluon.jit
def load_partition(
    x_desc, w_desc, slot0_desc, slot1_desc, ring, signals, control, report, slot, tiles, x_step, w_step, num_partitions,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    STAGES: gl.constexpr, EXCHANGE: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """One warp: keep the ring full, with operands, then with the peers' pieces of own tiles."""
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    program = gl.program_id(0)
    rank, rows = tiles.rank, tiles.rows
    epoch = gl.load(control, volatile=True)
    turn = 0
    arrived = 0  # bit c: chunk c of own tiles is there from all peers
    share = share_of(tiles, program, gl.num_programs(0), tiles.num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, col = place_out(tiles, tile)
        x_row, w_row = first_row, col * TILE_N
        if EXCHANGE:
            home = first_row // rows
            x_row = first_row - home * rows + home * x_step
            w_row = home * w_step + col * TILE_N
        for block in range(k_begin, k_end):
            at = claim(ring, turn, block_bytes, STAGES)
            load_weight(
                w_desc, w_row, block * TILE_K, ring.ready.index(at), ring.b.index(at), DEPTH_FIRST
            )
            load_async(x_desc, [x_row, block * TILE_K], ring.ready.index(at), ring.a.index(at))
            turn += 1
        if not PUSH and not EXCHANGE:
            owner, helpers = part_range(share, tile)
            if (program == owner) & (first_row // rows == rank):
                row = first_row - rank * rows
                chunk = row // TILE_M // tiles.chunk_rows
                for step in gl.static_range(1, WORLD_SIZE):  # in the order in which they come
                    source = (rank + WORLD_SIZE - step) % WORLD_SIZE
                    if ((arrived >> chunk) & 1) == 0:
                        spin(
                            signals + chunk,
                            source,
                            source,
                            MAX_SLICES,
                            epoch,
                            tile,
                            control,
                            report,
                            1,
                            1,
                            1,
                            EXACT=True,
                        )
                        acquire(epoch)
                    place = source - (source > rank).to(gl.int32)
                    for piece in gl.static_range(TILE_N // PIECE):
                        at = claim(ring, turn, TILE_M * PIECE * 2, STAGES)
                        load_slot(
                            slot0_desc, slot1_desc, slot, place * tiles.tile_rows * TILE_M + row, col * TILE_N + piece * PIECE,
                            ring.ready.index(at), ring.a.index(at),
                        )  # fmt: skip
                        turn += 1
                arrived = arrived | (1 << chunk)
    leave(control, epoch, num_partitions)


@gluon.jit
def multiply_partition(
    out, bias, partials, counters, ring, boxes, slots, slot_table, control, report,
    slot, slot_size, place_size, tiles, cols, part_rows, w_step, out_pitch, out_step, num_partitions,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, SPANS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, EXCHANGE: gl.constexpr, DEPTH_FIRST: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """The warpgroups: multiply each unit from the ring; send it, add what peers sent, or hand it to the tile's owner."""
    program = gl.program_id(0)
    epoch = gl.load(control, volatile=True)
    if PUSH:
        slot = epoch & 1
    places = Slots(slots, slot_table, slot.to(gl.int64) * slot_size, place_size)
    turn = 0
    sent = 0
    share = share_of(tiles, program, gl.num_programs(0), tiles.num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, tile_col = place_out(tiles, tile)
        acc, turn, fault = multiply_tile(
            turn,
            k_end - k_begin,
            ring,
            control,
            TILE_M,
            TILE_N,
            STAGES,
            WARPS,
            DEPTH_FIRST=DEPTH_FIRST,
        )
        owner, helpers = part_range(share, tile)
        if program != owner:
            give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                await_parts(counters, 0, share, tile, helpers)
            home = first_row // tiles.rows
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, SPANS)
            spot = Spot(tile, at, first_row, row_limit, tile_col * TILE_N, home)
            pieces = pieces_of(acc, TILE_N)
            parts = helpers
            if not PUSH and not EXCHANGE:
                peers = (home == tiles.rank).to(gl.int32) * (WORLD_SIZE - 1)
                helped = Helped(partials, program, helpers, share.team)
                pieces, turn = add_arrived(
                    pieces, turn, peers, ring, helped, TILE_M, TILE_N, STAGES, WARPS
                )
                parts = helpers * 0
            rest = Helped(partials, program, parts, share.team)
            for i in gl.static_range(TILE_N // PIECE):
                if EXCHANGE:
                    sent = finish_part(
                        pieces[i], i * PIECE, sent, spot, rest, bias, out, boxes, places, tiles, cols, epoch, control, report,
                        part_rows, w_step, out_pitch, out_step, WORLD_SIZE, PUSH, TILE_M, TILE_N, WARPS, HAS_BIAS,
                    )  # fmt: skip
                else:
                    sent = finish_piece(
                        pieces[i], i * PIECE, sent, spot, rest, bias, out, boxes, places, tiles, cols, epoch, control, report,
                        WORLD_SIZE, PUSH, SPANS, TILE_M, TILE_N, WARPS, HAS_BIAS, WHOLE,
                    )  # fmt: skip
    leave(control, epoch, num_partitions)


UNSPECIALIZED = [
    "rank", "slot", "rows", "part_rows", "num_tiles", "chunk_rows", "num_chunks", "team", "tile_rows", "tile_cols", "k_blocks",
]  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def matmul_reduce_scatter_hopper_kernel(
    x_desc, w_desc, slot0_desc, slot1_desc, out_desc, staging_desc, bias, out, slots, partials, counters,
    slot_table, signal_table, signals, control, report, rank, slot, slot_size, place_size, rows, cols,
    part_rows, x_step, w_step, out_pitch, out_step, out_size, num_chunks,
    num_tiles, chunk_rows, team, tile_rows, tile_cols, k_blocks,
    WORLD_SIZE: gl.constexpr, PUSH: gl.constexpr, SPANS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    TILE_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
    SPLIT_TAIL: gl.constexpr, EXCHANGE: gl.constexpr, DEPTH_FIRST: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions; *store* ends at once where registers go straight to peers."""
    ring = make_ring(x_desc, w_desc, TILE_M, TILE_K, STAGES)
    NUM_BOXES: gl.constexpr = 1 if PUSH else BOXES
    BOX_ROWS: gl.constexpr = 8 if PUSH else TILE_M  # a push needs none
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX_ROWS, PIECE], x_desc.dtype)
    pieces = gl.allocate_shared_memory(x_desc.dtype, [NUM_BOXES, BOX_ROWS, PIECE], box_layout)
    free = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    boxes = Boxes(pieces, free, full)
    if not PUSH:  # the compiler gives memory of unused barriers to sums, and they may come back over those: decision 0036
        for i in gl.static_range(BOXES):
            mbarrier.init(free.index(i), count=1)
            mbarrier.init(full.index(i), count=1)
    num_partitions = gl.num_programs(0) * 3
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        rows,
        TILE_M,
        GROUP_M,
        num_tiles,
        chunk_rows,
        team,
        tile_rows,
        tile_cols,
        k_blocks,
        SPLIT_TAIL,
    )
    gl.warp_specialize(
        [
            (multiply_partition, (
                out, bias, partials, counters, ring, boxes, slots, slot_table, control, report,
                slot, slot_size, place_size, tiles, cols, part_rows, w_step, out_pitch, out_step, num_partitions,
                WORLD_SIZE, PUSH, SPANS, TILE_M, TILE_N, STAGES, WARPS, HAS_BIAS, EXCHANGE, DEPTH_FIRST, WHOLE,
            )),
            (load_partition, (
                x_desc, w_desc, slot0_desc, slot1_desc, ring, signals, control, report,
                slot, tiles, x_step, w_step, num_partitions, WORLD_SIZE, PUSH, TILE_M, TILE_N, TILE_K, STAGES, EXCHANGE,
                DEPTH_FIRST,
            )),
            (store_partition, (
                out, out_desc, staging_desc, boxes, counters, signal_table, signals, control, report, slot,
                tiles, num_chunks, out_size, num_partitions, WORLD_SIZE, PUSH, TILE_M, TILE_N, EXCHANGE, WHOLE,
            )),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


# What changes between the launches of one shape: words, and the bases of descriptors.
WORDS = ("bias", "out", "partials", "slot")
MAPS = ("x_desc", "w_desc", "out_desc", "staging_desc")
NO_PARTS = (0,) * 7  # part_rows ... num_chunks, of an exchange


class Launcher:
    """One shape's launches: descriptors, integers and prepared kernels, kept between calls (``kernels/runtime/launch.py``)."""

    def __init__(
        self, peers: Peers, schedule: ScatterSchedule, config: MatmulConfig, dtype: torch.dtype, stride_x: int,
        strides_w: Sequence[int], whole: bool,
    ) -> None:  # fmt: skip
        self.peers, self.schedule, self.config = peers, schedule, config
        s, c = schedule, config
        self.push = c.transport == "sm"
        self.whole = whole or self.push  # a push has no use for it
        self.base = base = peers.slots.data_ptr()
        box = [c.tile_m, PIECE.value]
        place_rows = s.tile_rows * c.tile_m
        shape = [(s.world_size - 1) * place_rows, s.cols]
        self.depth_first = lines(strides_w)[1]
        slot_bytes = peers.slot_size * dtype.itemsize
        unused = descriptor(base, dtype, [64, 64], 64, box)
        self.slots = tuple(
            unused if self.push else descriptor(base + i * slot_bytes, dtype, shape, s.pitch, box)
            for i in (0, 1)
        )
        self.descriptors = (
            descriptor(
                base, dtype, [s.world_size * s.rows, s.depth], stride_x, [c.tile_m, c.tile_k]
            ),
            weight(base, dtype, s.cols, s.depth, strides_w, [c.tile_n, c.tile_k]),
            unused
            if self.push or not whole
            else descriptor(base, dtype, [s.rows, s.cols], s.cols, box),
            unused if self.push else descriptor(base, dtype, shape, s.pitch, box),
        )
        self.part_words = s.num_programs * c.tile_m * c.tile_n if s.has_cut_tiles else 0
        self.integers = (
            s.num_tiles, min(s.chunk_rows, s.tile_rows), s.team, s.tile_rows, s.tile_cols, s.k_blocks,
        )  # fmt: skip
        self.constants = (
            s.world_size, self.push, s.spans_shards, c.tile_m, c.tile_n, c.tile_k, c.group_m, c.num_stages,
            c.num_warps,
        )  # fmt: skip
        # 12 warps share the registers, or 8: 8 or 4, + 1 + 1, rounded up to whole warpgroups
        self.launches = Launches(
            matmul_reduce_scatter_hopper_kernel, WORDS, MAPS, num_warps=c.num_warps, maxnreg=168
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        staging: torch.Tensor | None,
        slot: int,
    ) -> None:
        """Launch on the current stream; as ``matmul_reduce_scatter.Launcher``, for what ``descriptors.fits``."""
        peers, s = self.peers, self.schedule
        partials = out
        if self.part_words:
            partials = torch.empty(self.part_words, dtype=torch.float32, device=x.device)
        added, to = out if bias is None else bias, out.data_ptr()
        bias_at = added.data_ptr()
        variant = (to % 16 == 0, bias_at % 16 == 0, bias is None)
        stored = self.base if self.push or not self.whole else to
        bases = (
            x.data_ptr(),
            w.data_ptr(),
            stored,
            self.base if staging is None else staging.data_ptr(),
        )
        words = (bias_at, to, partials.data_ptr(), slot)

        def arguments() -> tuple[object, ...]:
            x_desc, w_desc, out_desc, staging_desc = based(self.descriptors, bases, x.dtype)
            return (
                x_desc, w_desc, *self.slots, out_desc, staging_desc, added, out, peers.slots, partials, peers.counters,
                peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
                s.rank, slot, peers.slot_size, s.place_elements, s.rows, s.cols, *NO_PARTS, *self.integers,
                *self.constants, bias is not None, s.split_tail, False, self.depth_first, self.whole,
            )  # fmt: skip

        self.launches(s.num_programs, variant, arguments, words, bases)
