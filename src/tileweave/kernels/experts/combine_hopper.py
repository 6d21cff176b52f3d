"""The Hopper kernel of ``grouped_matmul_combine``: the same protocol, warp-specialised in Gluon,
with one program per multiprocessor.

Read ``combine_triton.py`` first: the equation, the signals and the proof are there and hold here.
What differs:

- No multiprocessor is given away. Every program has three partitions: *load* feeds TMA, *multiply*
  runs wgmma and stores tiles, *reduce* (two warps) pushes weights, then draws *early* tickets
  (``combine_hopper_tasks.py``) concurrently with the other two. When *multiply* is out of tiles, it
  draws the tickets that *reduce* has left, then the *late* ones: the last chunk, and own blocks of
  the chunk before.
- At the beginning, *reduce* lists the rows that each token has on this rank, without gaps, with
  their weights: most of the k choices are on other ranks, and lists are read once per chunk.
- Tiles are tickets (``device/gluon/tickets.py``), chunk by chunk, so that programs that use the
  same weights read them at the same time.
- A tile whose rows are all of one expert is stored by TMA; a tile that would reach into the rows of
  the next expert, by masked stores. It is counted in after the next tile's matmul, when TMA's
  stores have long drained.
- Lists wait for all ranks' weights, own blocks for the signals of their group. *reduce* of the last
  program also waits for each peer's signal of the last group, so that a call that has no own block
  in some groups, or none at all, still hears from every peer.

Why no rank waits for ever: all programs are resident, so a program may wait for any other. *reduce*
waits for *multiply*, lists and peers. *multiply* does not wait before it has stored its last tile.
Tickets are drawn in one order, and need only earlier tickets, on any rank
(``combine_hopper_tasks.py``).

Limits: rows of y, experts and out at multiples of 16 bytes; experts contiguous; ``DEPTH_FIRST``: I
a multiple of tile_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import (
    claim,
    load_expert,
    make_ring,
    multiply_tile,
    runtime,
    store_masked,
    store_tma,
)
from tileweave.device.gluon.peers import leave, load_epoch, wait
from tileweave.device.gluon.signal import block_barrier, drain_tma_stores, load_async
from tileweave.device.gluon.tickets import deal, make_deal, take
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.kernels.experts import tiles as grouped_tiles
from tileweave.kernels.experts.combine_hopper_tasks import (
    AHEAD,
    HELD,
    Current,
    Cut,
    Tensors,
    chunk_columns,
    clear_other_counts,
    list_rows,
    push_weights,
    serve_tickets,
)
from tileweave.kernels.experts.combine_layout import COUNTER_WORDS, DRAWN, TILES
from tileweave.kernels.runtime.descriptors import based, descriptor
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig, CombineCut, partial_bytes
from tileweave.planning.schedules.grouped import GroupedProblem

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in grouped_tiles.SOURCES)
REDUCE_WARPS = 2
# 12 warps share 65536 registers: 8 that multiply, 1 that loads, 2 that reduce, rounded up to
# warpgroups
REGISTERS, REDUCE_REGISTERS = 168, 152


class Operands(NamedTuple):
    """Tensor descriptors."""

    y: Any
    experts: Any
    products: Any


class Sizes(NamedTuple):
    """Numbers of a shape, for which Triton specialises the kernel; see ``combine_triton.Sizes``."""

    weights_base: Any
    weights_slot: Any
    cols: Any
    depth: Any


class Choices(NamedTuple):
    """What is decided at compile time.

    EXPERTS : a power of two, at least E_local and the threads of *multiply*.

    STAGES, WARPS : buffers of the ring; warps of *multiply*.

    DEPTH_FIRST : experts are stored as [I, H], as the backward pass of a dispatch reads them.

    TOKENS : tokens of a block.

    COLS, LATE_COLS : columns that *reduce* and *multiply* sum at once.

    REDUCE, REDUCE_REGISTERS : warps of *reduce*, and registers of their threads.

    SHARERS : partitions that multiply, each of which counts in its part of a tile.

    MULTIPLY_REGISTERS : of each of several partitions that multiply.

    EARLY : *reduce* draws tickets.

    LATE_AHEAD : rows of a token that *multiply* loads at once.
    """

    WORLD_SIZE: int
    TOPK: int
    WEIGHTED: bool
    EXPERTS: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    STAGES: int
    WARPS: int
    DEPTH_FIRST: bool
    TOKENS: int
    COLS: int
    LATE_COLS: int
    REDUCE: int
    REDUCE_REGISTERS: int
    SHARERS: int = 1
    MULTIPLY_REGISTERS: int = 0
    EARLY: bool = True
    LATE_AHEAD: int = AHEAD.value


@gluon.jit
def load_partition(operands, ring, line, offsets, peers, cut, C: gl.constexpr):
    """One warp: draw tiles, keep the ring full. It has read the epoch before *multiply* gets a
    number, and leaves."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_K: gl.constexpr = C.TILE_K
    GROUP_M: gl.constexpr = C.GROUP_M
    STAGES: gl.constexpr = C.STAGES
    DEPTH_FIRST: gl.constexpr = C.DEPTH_FIRST
    itemsize: gl.constexpr = operands.y.dtype.primitive_bitwidth // 8
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * itemsize
    experts, cols, chunk_cols = cut.experts, cut.cols, cut.chunk_cols
    tickets = peers.counters + (load_epoch(peers) & 1) * COUNTER_WORDS + DRAWN
    all_cols = (cols + TILE_N - 1) // TILE_N
    turn = 0
    drawn = 0
    before = 0  # tiles of the chunks before this one
    tile = deal(tickets, drawn, line, 1)
    for chunk in range(0, cut.chunks):
        tile_cols = chunk_columns(chunk, all_cols, chunk_cols)
        start = first_expert(offsets, tile_cols, TILE_M)
        walk = walk_to(start, tile - before, offsets, experts, tile_cols, TILE_M)
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile - before, tile_cols, TILE_M, GROUP_M)
            col = (tile_col + chunk * chunk_cols) * TILE_N
            for block in range(0, cut.k_blocks):
                at = claim(ring, turn, block_bytes, STAGES)
                ready = ring.ready.index(at)
                k = block * TILE_K
                load_expert(
                    operands.experts,
                    walk.expert,
                    cols,
                    cut.depth,
                    col,
                    k,
                    ready,
                    ring.b.index(at),
                    DEPTH_FIRST,
                )
                load_async(operands.y, [first_row, k], ready, ring.a.index(at))
                turn += 1
            drawn += 1
            tile = deal(tickets, drawn, line, 1)
            walk = walk_to(walk, tile - before, offsets, experts, tile_cols, TILE_M)
        before += walk.next_tile  # of all experts


@gluon.jit
def count_stored(counts, chunk, epoch):
    """Count in the last tile, of ``chunk``, which is in memory then. -1: there is none."""
    drain_tma_stores(epoch)
    block_barrier()
    if chunk >= 0:
        gl.atomic_add(counts + TILES + chunk, 1, sem="release", scope="gpu")


@gluon.jit
def store_products(tile, products, desc, box, first_row, end, col, cols, C: gl.constexpr):
    """Store a tile in two halves, by TMA if all its rows are this expert's."""
    TILE_M: gl.constexpr = C.TILE_M
    WIDTH: gl.constexpr = C.TILE_N // 2
    low, high = tile.reshape((TILE_M, 2, WIDTH)).permute((0, 2, 1)).split()
    if first_row + TILE_M <= end:
        store_tma(low, desc, box, first_row, col)
        store_tma(high, desc, box, first_row, col + WIDTH)
    else:
        store_masked(low, products, first_row, end, col, cols)
        store_masked(high, products, first_row, end, col + WIDTH, cols)


@gluon.jit
def multiply_partition(
    operands, box, ring, line, tensors, peers, rank, cut, num_partitions, C: gl.constexpr
):
    """The warpgroups: tiles, then blocks of tokens."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    GROUP_M: gl.constexpr = C.GROUP_M
    STAGES: gl.constexpr = C.STAGES
    WARPS: gl.constexpr = C.WARPS
    DEPTH_FIRST: gl.constexpr = C.DEPTH_FIRST
    LATE_COLS: gl.constexpr = C.LATE_COLS
    offsets, products, desc = tensors.offsets, tensors.products, operands.products
    experts, cols, chunk_cols = cut.experts, cut.cols, cut.chunk_cols
    epoch = load_epoch(peers)
    counts = peers.counters + (epoch & 1) * COUNTER_WORDS
    all_cols = (cols + TILE_N - 1) // TILE_N
    turn = 0
    drawn = 0
    before = 0
    stored = runtime(-1, epoch)  # the chunk of the last tile that is not counted in
    tile = take(drawn, line, WARPS)
    for chunk in range(0, cut.chunks):
        tile_cols = chunk_columns(chunk, all_cols, chunk_cols)
        start = first_expert(offsets, tile_cols, TILE_M)
        walk = walk_to(start, tile - before, offsets, experts, tile_cols, TILE_M)
        while walk.expert < experts:
            first_row, tile_col = place_in_expert(walk, tile - before, tile_cols, TILE_M, GROUP_M)
            acc, turn, fault = multiply_tile(
                turn,
                cut.k_blocks,
                ring,
                peers.control,
                TILE_M,
                TILE_N,
                STAGES,
                WARPS,
                False,
                DEPTH_FIRST,
            )
            count_stored(counts, stored, epoch)
            col = (tile_col + chunk * chunk_cols) * TILE_N
            store_products(acc, products, desc, box, first_row, walk.end, col, cols, C)
            stored = runtime(chunk, epoch)
            drawn += 1
            tile = take(drawn, line, WARPS)
            walk = walk_to(walk, tile - before, offsets, experts, tile_cols, TILE_M)
        before += walk.next_tile  # of all experts
    count_stored(counts, stored, epoch)
    current = Current(rank, epoch, counts)
    serve_tickets(
        tensors, peers, cut, current, gl.num_programs(0), C, COLS=LATE_COLS, WARPS=WARPS, KINDS=2
    )
    leave(peers, epoch, num_partitions)


@gluon.jit
def reduce_partition(tensors, peers, rank, sizes, cut, num_partitions, C: gl.constexpr):
    """Two warps, concurrently with the matmul: push weights, list rows, then draw early tickets,
    as their tiles are made.

    It may be done before *multiply* is, or still hold a ticket when other programs finish blocks:
    nothing depends on either.
    """
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    WARPS: gl.constexpr = C.REDUCE
    COLS: gl.constexpr = C.COLS
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    epoch = load_epoch(peers)
    parity = epoch & 1
    counts = peers.counters + parity * COUNTER_WORDS
    weights_offset = sizes.weights_base + parity.to(gl.int64) * sizes.weights_slot
    if program == 0:
        clear_other_counts(peers.counters, parity, WARPS)
    current = Current(rank, epoch, counts)
    if C.WEIGHTED:
        weights = tensors.weights
        push_weights(weights, peers, cut, current, weights_offset, program, programs, C, WARPS)
    list_rows(tensors, peers, cut, current, weights_offset, program, programs, C, WARPS)
    if C.EARLY:
        serve_tickets(tensors, peers, cut, current, programs, C, COLS=COLS, WARPS=WARPS, KINDS=1)
    if program == programs - 1:  # also if this rank has no tokens
        for i in gl.static_range(1, WORLD_SIZE):
            index = (rank + i) % WORLD_SIZE * MAX_SLICES + cut.chunks * cut.groups
            wait(peers, index, epoch, -1, 1, WARPS)
    leave(peers, epoch, num_partitions)


UNSPECIALIZED = [
    "rank",
    "tokens",
    "max_tokens",
    "experts",
    "chunks",
    "chunk_cols",
    "k_blocks",
    "groups",
    "group_blocks",
    "blocks",
]


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def grouped_matmul_combine_hopper_kernel(
    y_desc,
    experts_desc,
    products_desc,
    tensors,
    peers,
    rank,
    sizes,
    tokens,
    max_tokens,
    experts,
    chunks,
    chunk_cols,
    k_blocks,
    groups,
    group_blocks,
    blocks,
    C: gl.constexpr,
):
    """Start the partitions."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_K: gl.constexpr = C.TILE_K
    STAGES: gl.constexpr = C.STAGES
    cut = Cut(
        tokens,
        max_tokens,
        experts,
        sizes.cols,
        sizes.depth,
        chunks,
        chunk_cols,
        k_blocks,
        groups,
        group_blocks,
        blocks,
    )
    operands = Operands(y_desc, experts_desc, products_desc)
    ring = make_ring(y_desc, experts_desc, TILE_M, TILE_K, STAGES)
    box = gl.allocate_shared_memory(
        products_desc.dtype, products_desc.block_type.shape, products_desc.layout
    )
    line = make_deal()
    # those that leave; *load* is done with the epoch before *multiply* is
    num_partitions = gl.num_programs(0) * 2
    # in place, since a tuple that is assigned to a name loses what is known at compile time
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (operands, box, ring, line, tensors, peers, rank, cut, num_partitions, C),
            ),
            (load_partition, (operands, ring, line, tensors.offsets, peers, cut, C)),
            (reduce_partition, (tensors, peers, rank, sizes, cut, num_partitions, C)),
        ],
        [1, C.REDUCE],
        [40, C.REDUCE_REGISTERS],
    )


# What changes between launches for one shape.
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "tokens")
MAPS = ("y_desc", "experts_desc", "products_desc")


def late_cols(config: CombineConfig) -> int:
    """Columns that the multiplying warps sum at once: as many as let them take all tokens of a
    block together, so that its lists are read once."""
    threads = HELD.value * config.num_warps
    return triton.next_power_of_2(max(256, 256 * threads // config.block_tokens))


def choices_of(s: GroupedProblem, c: CombineConfig, depth_first: bool = False) -> Choices:
    """:class:`Choices` of a shape with weights, of one partition that multiplies."""
    return Choices(
        WORLD_SIZE=s.world_size,
        TOPK=s.topk,
        WEIGHTED=True,
        EXPERTS=triton.next_power_of_2(max(s.experts, 32 * c.num_warps)),
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        STAGES=c.num_stages,
        WARPS=c.num_warps,
        DEPTH_FIRST=depth_first,
        TOKENS=c.block_tokens,
        COLS=c.block_cols,
        LATE_COLS=late_cols(c),
        REDUCE=REDUCE_WARPS,
        REDUCE_REGISTERS=REDUCE_REGISTERS,
    )


def fixed_arguments(
    peers: Peers, s: GroupedProblem, c: CombineConfig, rank: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments that are the same in every launch for a shape. ``dtype``: of the products."""
    cut, slot_bytes = CombineCut.of(s, c), peers.slot_size * dtype.itemsize
    return {
        "peers": peers,
        "rank": rank,
        "sizes": Sizes(partial_bytes(s) // 4, slot_bytes // 4, s.cols, s.depth),
        "max_tokens": s.max_tokens,
        "experts": s.experts,
        "chunks": cut.chunks,
        "chunk_cols": cut.chunk_cols,
        "k_blocks": triton.cdiv(s.depth, c.tile_k),
        "groups": cut.groups,
        "group_blocks": cut.group_blocks,
        "blocks": cut.blocks,
    }


def new_lists(s: GroupedProblem, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory for ``rows``, ``factors`` and ``lengths`` of :class:`Tensors`."""
    entries = s.world_size * s.max_tokens
    parts = [entries * s.topk, entries * s.topk, entries]
    rows, factors, lengths = torch.empty(sum(parts), dtype=torch.int32, device=device).split(parts)
    return rows, factors.view(torch.float32), lengths


def launcher(
    peers: Peers,
    shape: GroupedProblem,
    config: CombineConfig,
    rank: int,
    num_sms: int,
    dtype: torch.dtype,
    depth_first: bool,
    bound: int,
    stride_y: int,
) -> Launcher:
    """Launches for one shape, called with the tensors of ``combine_triton.launch``.

    depth_first : see :class:`Choices`.

    bound, stride_y : rows of y, and elements between them.
    """
    s, c, base = shape, config, peers.slots.data_ptr()
    experts_shape = [s.experts * s.cols, s.depth]
    experts_tile = [c.tile_n, c.tile_k]
    if depth_first:
        experts_shape, experts_tile = [s.experts * s.depth, s.cols], experts_tile[::-1]
    descriptors = (
        descriptor(base, dtype, [bound, s.depth], stride_y, [c.tile_m, c.tile_k]),
        descriptor(base, dtype, experts_shape, experts_shape[1], experts_tile),
        descriptor(base, dtype, [bound, s.cols], s.cols, [c.tile_m, c.tile_n // 2]),
    )
    choices = choices_of(s, c, depth_first)

    def pack(
        y: torch.Tensor,
        experts: torch.Tensor,
        offsets: torch.Tensor,
        entry_row: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        products: torch.Tensor,
        out: torch.Tensor,
    ) -> Call:
        given = offsets if weights is None else weights
        lists = new_lists(s, y.device)
        tensors = Tensors(products, *lists, offsets, entry_row, topk_ids, given, out)
        pointers = [t.data_ptr() for t in tensors]
        bases = (y.data_ptr(), experts.data_ptr(), pointers[0])

        def changing() -> Mapping[str, Any]:
            based_on = based(descriptors, bases)
            return {
                **dict(zip(MAPS, based_on, strict=True)),
                "tensors": tensors,
                "tokens": out.shape[0],
                "C": choices._replace(WEIGHTED=weights is not None),
            }

        variant = (weights is None, alignment(pointers))
        return variant, [*pointers, out.shape[0]], changing, bases

    fixed = fixed_arguments(peers, s, c, rank, dtype)
    options = {"num_warps": c.num_warps, "maxnreg": REGISTERS}
    kernel = grouped_matmul_combine_hopper_kernel
    return Launcher(kernel, num_sms, fixed, pack, WORDS, MAPS, **options)
