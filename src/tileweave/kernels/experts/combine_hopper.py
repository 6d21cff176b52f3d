"""The Hopper twin of ``grouped_matmul_combine``: the same protocol, warp-specialised in Gluon, a program a multiprocessor.

Read ``kernels/experts/combine_triton.py`` first: equation, signals and proof are there and hold here. What differs:

- No multiprocessor is given away. Every program has three partitions: *load* feeds TMA, *multiply* runs wgmma and stores tiles,
  *reduce* (two warps) pushes weights, then takes *early* tickets (``combine_hopper_tasks.py``) beside the other two. When
  *multiply* is out of tiles it takes those that *reduce* has left, then the *late* ones: the last chunk, and own blocks of the
  one before.
- At the beginning *reduce* lists the rows of each token that are here, without gaps, with their weights: k choices are
  mostly elsewhere, and lists are read once for every chunk.
- Tiles are tickets (``device/gluon/tickets.py``), chunk after chunk: who shares weights reads them together.
- A tile that lies in one expert leaves by TMA; one that would reach into the next expert's rows, by masked stores. It is
  counted in behind the next tile's matmul, when TMA's stores have long drained.
- Lists wait for all ranks' weights, own blocks for the signals of their group. *reduce* of the last program also waits for each
  peer's signal of the last group: so a call that has no own block in some groups, or none at all, still hears from every peer.

All programs are resident, so a program may wait for any other one: *reduce* waits for *multiply*, lists and peers; *multiply*
waits for nobody before it has stored its last tile; tickets are taken in one order, and need only tickets before them, here
and elsewhere (``combine_hopper_tasks.py``).

Limits: rows of y, experts and out at multiples of 16 bytes, experts contiguous; ``DEPTH_FIRST``: I a multiple of tile_k.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import (
    claim,
    load_expert,
    make_ring,
    multiply_tile,
    store_masked,
    store_tma,
)
from tileweave.device.gluon.signal import block_barrier, drain_tma_stores, leave, load_async, wait
from tileweave.device.gluon.tickets import deal, make_deal, take
from tileweave.kernels.experts import tiles as grouped_tiles
from tileweave.kernels.experts.combine_hopper_tasks import (
    COUNTER_WORDS,
    DRAWN,
    HELD,
    MAX_SLICES,
    TILES,
    clear_other_counts,
    list_rows,
    push_weights,
    serve_tickets,
)
from tileweave.kernels.runtime.descriptors import based, descriptor
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig, CombineCut, partial_bytes
from tileweave.planning.schedules.grouped import GroupedProblem

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in grouped_tiles.SOURCES)
REDUCE_WARPS = 2


@gluon.jit
def load_partition(
    y_desc, w_desc, ring, line, offsets, counters, control, experts, cols, depth, chunks, chunk_cols, k_blocks,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """One warp: draw tiles, keep the ring full. It has read the epoch before *multiply* gets a number, and leaves."""
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    tickets = counters + (gl.load(control, volatile=True) & 1) * COUNTER_WORDS + DRAWN
    tile_limit = (cols + TILE_N - 1) // TILE_N
    turn = 0
    drawn = 0
    before = 0  # tiles of the chunks before this one
    tile = deal(tickets, drawn, line, 1)
    for chunk in range(0, chunks):
        tile_cols = gl.minimum(tile_limit - chunk * chunk_cols, chunk_cols)
        walk = walk_to(
            first_expert(offsets, tile_cols, TILE_M),
            tile - before,
            offsets,
            experts,
            tile_cols,
            TILE_M,
        )
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile - before, tile_cols, TILE_M, GROUP_M)
            col = (tile_col + chunk * chunk_cols) * TILE_N
            for block in range(0, k_blocks):
                at = claim(ring, turn, block_bytes, STAGES)
                load_expert(
                    w_desc,
                    walk.expert,
                    cols,
                    depth,
                    col,
                    block * TILE_K,
                    ring.ready.index(at),
                    ring.b.index(at),
                    DEPTH_FIRST,
                )
                load_async(
                    y_desc, [first_row, block * TILE_K], ring.ready.index(at), ring.a.index(at)
                )
                turn += 1
            drawn += 1
            tile = deal(tickets, drawn, line, 1)
            walk = walk_to(walk, tile - before, offsets, experts, tile_cols, TILE_M)
        before += walk.next_tile  # of all experts


@gluon.jit
def count_stored(counts, chunk, epoch):
    """The last tile, of ``chunk``, is in memory: count it in. -1: there is none."""
    drain_tma_stores(epoch)
    block_barrier()
    if chunk >= 0:
        gl.atomic_add(counts + TILES + chunk, 1, sem="release", scope="gpu")


@gluon.jit
def store_products(
    tile, products, desc, box, first_row, end, col, cols, TILE_M: gl.constexpr, TILE_N: gl.constexpr
):
    """A tile in two halves: by TMA where all its rows are this expert's."""
    WIDTH: gl.constexpr = TILE_N // 2
    low, high = tile.reshape((TILE_M, 2, WIDTH)).permute((0, 2, 1)).split()
    if first_row + TILE_M <= end:
        store_tma(low, desc, box, first_row, col)
        store_tma(high, desc, box, first_row, col + WIDTH)
    else:
        store_masked(low, products, first_row, end, col, cols)
        store_masked(high, products, first_row, end, col + WIDTH, cols)


@gluon.jit
def multiply_partition(
    products_desc, box, ring, line, products, rows, factors, lengths, offsets, out, counters, slots,
    slot_table, signal_table, signals, control, report, slot_size, rank, experts, cols, chunks, chunk_cols, k_blocks, tokens,
    max_tokens, groups, group_blocks, blocks, num_partitions,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, EXPERTS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, DEPTH_FIRST: gl.constexpr,
    TOKENS: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """The warpgroups: tiles, then blocks of tokens."""
    epoch = gl.load(control, volatile=True)
    counts = counters + (epoch & 1) * COUNTER_WORDS
    tile_limit = (cols + TILE_N - 1) // TILE_N
    turn = 0
    drawn = 0
    before = 0
    stored = epoch * 0 - 1
    tile = take(drawn, line, WARPS)
    for chunk in range(0, chunks):
        tile_cols = gl.minimum(tile_limit - chunk * chunk_cols, chunk_cols)
        walk = walk_to(
            first_expert(offsets, tile_cols, TILE_M),
            tile - before,
            offsets,
            experts,
            tile_cols,
            TILE_M,
        )
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile - before, tile_cols, TILE_M, GROUP_M)
            acc, turn, fault = multiply_tile(
                turn, k_blocks, ring, control, TILE_M, TILE_N, STAGES, WARPS, False, DEPTH_FIRST
            )
            count_stored(counts, stored, epoch)
            col = (tile_col + chunk * chunk_cols) * TILE_N
            store_products(
                acc, products, products_desc, box, first_row, walk.end, col, cols, TILE_M, TILE_N
            )
            stored = epoch * 0 + chunk
            drawn += 1
            tile = take(drawn, line, WARPS)
            walk = walk_to(walk, tile - before, offsets, experts, tile_cols, TILE_M)
        before += walk.next_tile  # of all experts
    count_stored(counts, stored, epoch)
    serve_tickets(
        products, rows, factors, lengths, offsets, out, counts, slots, slot_table, signal_table, signals, control,
        report, (epoch & 1).to(gl.int64) * slot_size, rank, epoch, experts, cols, chunks, chunk_cols, tokens, max_tokens,
        groups, group_blocks, blocks, gl.num_programs(0), WORLD_SIZE, TOPK, WEIGHTED, EXPERTS, TILE_M, TILE_N, TOKENS, COLS,
        WARPS, 2,
    )  # fmt: skip
    leave(control, epoch, num_partitions)


@gluon.jit
def reduce_partition(
    products, rows, factors, lengths, offsets, entry_row, topk_ids, weights, out, counters, slots, slot_table, signal_table,
    signals, control, report, slot_size, weights_base, weights_slot, rank, experts, cols, chunks, chunk_cols, tokens,
    max_tokens, groups, group_blocks, blocks, num_partitions,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, EXPERTS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Two warps beside the matmul: weights out, lists of rows, then early tickets, as their tiles are made.

    It may be done before *multiply* is, or still be at a ticket when others finish blocks: nobody counts on either.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    epoch = gl.load(control, volatile=True)
    parity = epoch & 1
    counts = counters + parity * COUNTER_WORDS
    weights_offset = weights_base + parity.to(gl.int64) * weights_slot
    if program == 0:
        clear_other_counts(counters, parity, WARPS)
    if WEIGHTED:
        push_weights(
            weights, counts, slot_table, signal_table, weights_offset, rank, tokens * TOPK, max_tokens * TOPK, epoch, program,
            programs, WORLD_SIZE, WARPS,
        )  # fmt: skip
    list_rows(
        entry_row, topk_ids, rows, factors, lengths, counts, slot_table, signals, control, report, weights_offset, rank,
        experts, tokens, max_tokens, epoch, program, programs, WORLD_SIZE, TOPK, WEIGHTED, WARPS,
    )  # fmt: skip
    serve_tickets(
        products, rows, factors, lengths, offsets, out, counts, slots, slot_table, signal_table, signals, control,
        report, parity.to(gl.int64) * slot_size, rank, epoch, experts, cols, chunks, chunk_cols, tokens, max_tokens, groups,
        group_blocks, blocks, programs, WORLD_SIZE, TOPK, WEIGHTED, EXPERTS, TILE_M, TILE_N, TOKENS, COLS, WARPS, 1,
    )  # fmt: skip
    if program == programs - 1:  # also where this rank has no tokens
        for i in gl.static_range(1, WORLD_SIZE):
            wait(
                signals,
                (rank + i) % WORLD_SIZE * MAX_SLICES + chunks * groups,
                epoch,
                -1,
                control,
                report,
                1,
                WARPS,
            )
    leave(control, epoch, num_partitions)


UNSPECIALIZED = [
    "rank", "tokens", "max_tokens", "chunks", "chunk_cols", "k_blocks", "groups", "group_blocks", "blocks", "experts",
]  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def grouped_matmul_combine_hopper_kernel(
    y_desc, w_desc, products_desc, products, rows, factors, lengths, offsets, entry_row, topk_ids, weights, out, slots,
    counters, slot_table, signal_table, signals, control, report,
    rank, slot_size, weights_base, weights_slot, tokens, max_tokens, experts, cols, depth, chunks, chunk_cols, k_blocks, groups,
    group_blocks, blocks,
    WORLD_SIZE: gl.constexpr, TOPK: gl.constexpr, WEIGHTED: gl.constexpr, EXPERTS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    DEPTH_FIRST: gl.constexpr, TOKENS: gl.constexpr, COLS: gl.constexpr, LATE_COLS: gl.constexpr, REDUCE: gl.constexpr,
    REDUCE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions."""
    ring = make_ring(y_desc, w_desc, TILE_M, TILE_K, STAGES)
    box = gl.allocate_shared_memory(
        products_desc.dtype, products_desc.block_type.shape, products_desc.layout
    )
    line = make_deal()
    num_partitions = (
        gl.num_programs(0) * 2
    )  # that leave; *load* is done with the epoch before *multiply* is
    gl.warp_specialize(
        [
            (multiply_partition, (
                products_desc, box, ring, line, products, rows, factors, lengths, offsets, out,
                counters, slots, slot_table, signal_table, signals, control, report, slot_size, rank, experts, cols, chunks,
                chunk_cols, k_blocks, tokens, max_tokens, groups, group_blocks, blocks, num_partitions, WORLD_SIZE, TOPK,
                WEIGHTED, EXPERTS, TILE_M, TILE_N, GROUP_M, STAGES, WARPS, DEPTH_FIRST, TOKENS, LATE_COLS,
            )),
            (load_partition, (
                y_desc, w_desc, ring, line, offsets, counters, control, experts, cols, depth, chunks, chunk_cols, k_blocks,
                TILE_M, TILE_N, TILE_K, GROUP_M, STAGES, DEPTH_FIRST,
            )),
            (reduce_partition, (
                products, rows, factors, lengths, offsets, entry_row, topk_ids, weights, out, counters, slots, slot_table,
                signal_table, signals, control, report, slot_size, weights_base, weights_slot, rank, experts, cols, chunks,
                chunk_cols, tokens, max_tokens, groups, group_blocks, blocks, num_partitions, WORLD_SIZE, TOPK, WEIGHTED,
                EXPERTS, TILE_M, TILE_N, TOKENS, COLS, REDUCE,
            )),
        ],
        [1, REDUCE],
        [40, REDUCE_REGISTERS],
    )  # fmt: skip


# What changes between the launches of one shape.
WORDS = (
    "products",
    "rows",
    "factors",
    "lengths",
    "offsets",
    "entry_row",
    "topk_ids",
    "weights",
    "out",
    "tokens",
)
MAPS = ("y_desc", "w_desc", "products_desc")


def late_cols(c: CombineConfig) -> int:
    """Columns that the multiplying warps sum at once: all tokens of a block side by side, so its lists are read once."""
    return triton.next_power_of_2(max(256, 256 * HELD.value * c.num_warps // c.block_tokens))


class Launcher:
    """One shape's launches: descriptors and prepared kernels, kept between calls (``kernels/runtime/launch.py``)."""

    def __init__(
        self, peers: Peers, shape: GroupedProblem, config: CombineConfig, rank: int, num_sms: int, dtype: torch.dtype,
        depth_first: bool, bound: int, stride_y: int,
    ) -> None:  # fmt: skip
        s, c = shape, config
        self.peers, self.shape, self.rank, self.programs = peers, s, rank, num_sms
        self.base = base = peers.slots.data_ptr()
        self.cut = cut = CombineCut.of(s, c)
        w_shape = [s.experts * s.depth, s.cols] if depth_first else [s.experts * s.cols, s.depth]
        w_tile = [c.tile_k, c.tile_n] if depth_first else [c.tile_n, c.tile_k]
        self.descriptors = (
            descriptor(base, dtype, [bound, s.depth], stride_y, [c.tile_m, c.tile_k]),
            descriptor(base, dtype, w_shape, w_shape[1], w_tile),
            descriptor(base, dtype, [bound, s.cols], s.cols, [c.tile_m, c.tile_n // 2]),
        )
        self.integers = (
            s.max_tokens, s.experts, s.cols, s.depth, cut.chunks, cut.chunk_cols, triton.cdiv(s.depth, c.tile_k), cut.groups,
            cut.group_blocks, cut.blocks,
        )  # fmt: skip
        self.constants = (
            triton.next_power_of_2(max(s.experts, 32 * c.num_warps)), c.tile_m, c.tile_n, c.tile_k, c.group_m, c.num_stages,
            c.num_warps, depth_first, c.block_tokens, c.block_cols, late_cols(c), REDUCE_WARPS, 152,
        )  # fmt: skip
        # 12 warps share 65536 registers: 8 that multiply, 1 that loads, 2 that reduce, rounded up to warpgroups
        self.launches = Launches(
            grouped_matmul_combine_hopper_kernel, WORDS, MAPS, num_warps=c.num_warps, maxnreg=168
        )

    def __call__(
        self,
        y: torch.Tensor,
        experts: torch.Tensor,
        offsets: torch.Tensor,
        entry_row: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        products: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream; as ``grouped_matmul_combine.launch``."""
        peers, s = self.peers, self.shape
        entries = s.world_size * s.max_tokens
        lists = torch.empty(entries * (2 * s.topk + 1), dtype=torch.int32, device=y.device)
        rows, factors, lengths = lists.split([entries * s.topk, entries * s.topk, entries])
        factors = factors.view(torch.float32)
        given = offsets if weights is None else weights
        tensors = (products, rows, factors, lengths, offsets, entry_row, topk_ids, given, out)
        words = tuple(t.data_ptr() for t in tensors)
        variant = (weights is None, *(at % 16 == 0 for at in words))
        bases = (y.data_ptr(), experts.data_ptr(), words[0])

        def arguments() -> tuple[object, ...]:
            slot_bytes = peers.slot_size * y.element_size()
            return (
                *based(self.descriptors, bases, y.dtype), *tensors, peers.slots, peers.counters, peers.slot_table,
                peers.signal_table, peers.signals, peers.control, peers.report, self.rank, peers.slot_size,
                partial_bytes(s) // 4, slot_bytes // 4, out.shape[0], *self.integers, s.world_size, s.topk,
                weights is not None, *self.constants,
            )  # fmt: skip

        self.launches(self.programs, variant, arguments, (*words, out.shape[0]), bases)
