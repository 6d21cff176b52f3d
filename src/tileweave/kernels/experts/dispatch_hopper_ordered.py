"""``dispatch_grouped_matmul`` for Hopper that puts rows in order first: for experts with many rows,
where TMA pays most.

Read ``dispatch_triton.py`` first: equation, signals, timeline and proof are there and hold here;
*multiply* and pushing are those of ``dispatch_hopper.py``. What differs:

    rows    [bound, K]  local: the token of each row of the plan, row by row; TMA loads them, and
                        the caller may keep them
    placed  [units]     local, zero before the call: 1 where all ``UNIT`` rows of a unit, or as many
                        as there are, are in ``rows``

- *move* (two warps of every program): the first programs push own tokens; then all take units of
  rows, one by one in rising order (tickets), wait for the tokens of each unit, and copy them from x
  or the slot.
- *load* (one warp): waits until the units of a tile are placed, then keeps the ring full by TMA,
  rows and weights.

    move  | push own tokens (first programs) | unit 0, own rows | unit 1 ^ wait for a source | ...
    load  | wait for the units of a tile     | tile | tile ...

``placed[u]`` is set by the program that took ticket u, after its copies, and read by *load* of any
program, which acquires it and fences the proxies before TMA reads the rows. A tile that reaches
past its expert's rows also loads rows of the next expert, placed or not: they do not affect any row
that is stored.

Why no rank waits for ever: units are taken in rising order by programs that run, and a program that
took one waits for pushes of other ranks only, which do not wait and precede tickets in every
program; *load* waits for units only.

Why the copy: a row is read once more and written once, concurrently with a matmul that reads it N /
TILE_N times. For Mixtral's experts the main loop fed by TMA is as fast as ``torch._grouped_mm`` on
rows in order; the one that gathers by ``cp.async`` has 0.87 of that speed (decision 0027).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import claim, load_expert, make_ring
from tileweave.device.gluon.peers import leave, load_epoch
from tileweave.device.gluon.signal import acquire, block_barrier, load_async
from tileweave.device.gluon.tickets import deal, make_deal
from tileweave.kernels.experts.dispatch_hopper import (
    MAPS,
    MAX_REGISTERS,
    WORDS,
    arguments,
    packing,
    portable,
    takes,
)
from tileweave.kernels.experts.dispatch_hopper_roles import (
    PUSH_WARPS,
    UNSPECIALIZED,
    Operands,
    Sizes,
    all_have,
    await_all,
    clear_counters,
    first_expert,
    multiply_partition,
    place_in_expert,
    push_tokens,
    row_sources,
    row_steps,
    wait_steps,
    walk_to,
)
from tileweave.kernels.experts.dispatch_triton import SET, TICKETS, UNITS, Launch
from tileweave.kernels.experts.dispatch_triton import launcher as triton_launcher
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import DispatchConfig

UNIT = gl.constexpr(16)  # rows that are placed, and signaled, at once
AT_ONCE = gl.constexpr(8)  # rows that *move* has in flight
WIDTH = gl.constexpr(1024)  # columns of these: elements, or bytes of packed FP8 rows
MOVE_REGISTERS = gl.constexpr(152)


class Placement(NamedTuple):
    """Rows in order, and which units of them are placed; see the module's docstring."""

    rows: Any
    placed: Any


@gluon.jit
def place_unit(
    tensors,
    slot,
    rows,
    first,
    total,
    rank,
    sizes,
    WORLD_SIZE: gl.constexpr,
    layout: gl.constexpr,
):
    """Copy the tokens of those rows of [first, first + UNIT) that there are."""
    pitch = sizes.weight.pitch
    for begin in range(first, gl.minimum(first + UNIT, total), AT_ONCE):
        row = begin + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
        there = row < total
        source = row_sources(tensors, slot, gl.minimum(row, total - 1), rank, sizes, WORLD_SIZE)
        target = rows + row.to(gl.int64) * pitch
        for column in range(0, pitch, WIDTH):
            at = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            mask = there[:, None] & (at < pitch)[None, :]
            value = gl.load(gl.multiple_of(source[:, None] + at[None, :], [1, 16]), mask=mask)
            gl.store(gl.multiple_of(target[:, None] + at[None, :], [1, 16]), value, mask=mask)


@gluon.jit
def place_rows(tensors, placement, peers, slot, tickets, rank, sizes, epoch, C: gl.constexpr):
    """Take units until there are none: wait for their tokens, copy them, set ``placed``."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    LANE: gl.constexpr = 128 // placement.rows.dtype.element_ty.primitive_bitwidth  # 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, LANE], [1, 32], [PUSH_WARPS, 1], [1, 0])
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [PUSH_WARPS], [0])
    offsets = tensors.offsets
    total = gl.load(offsets + sizes.experts)
    expert = gl.to_tensor(0)
    end = gl.load(offsets + 1)
    # whether all tokens are here, and acquired by the ``wait_steps`` of the unit that found it so
    arrived = False
    unit = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while unit * UNIT < total:
        following = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        first = unit * UNIT
        last = gl.minimum(first + UNIT, total) - 1
        if not arrived:
            arrived = all_have(peers, rank, sizes.blocks - 1, epoch, WORLD_SIZE, PUSH_WARPS)
            # the last row's expert: a source signals its block after those before it
            while end <= last:
                expert += 1
                end = gl.load(offsets + expert + 1)
            row = gl.minimum(first + gl.arange(0, UNIT, layout=lane), last)
            step = row_steps(tensors, row, rank, sizes, WORLD_SIZE)
            wait_steps(
                peers,
                rank,
                expert // sizes.block_experts,
                gl.min(step, axis=0),
                gl.max(step, axis=0),
                epoch,
                unit,
                WORLD_SIZE,
                PUSH_WARPS,
            )
        place_unit(tensors, slot, placement.rows, first, total, rank, sizes, WORLD_SIZE, layout)
        block_barrier()
        gl.atomic_xchg(placement.placed + unit, 1, sem="release", scope="gpu")
        unit = following


@gluon.jit
def await_placed(placed, first_row, end, epoch, TILE_M: gl.constexpr):
    """Wait until rows [first_row, end) of a tile are placed; TMA may read them afterwards."""
    COUNT: gl.constexpr = 32 if TILE_M // UNIT < 32 else 2 * TILE_M // UNIT
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = first_row // UNIT
    last = (gl.minimum(first_row + TILE_M, end) - 1) // UNIT
    unit = gl.minimum(first + gl.arange(0, COUNT, layout=lane), last)
    while gl.min(gl.load(placed + unit, volatile=True), axis=0) == 0:
        pass
    acquire(epoch)


@gluon.jit
def load_partition(
    tensors, placement, rows_desc, w_desc, operands, peers, sizes, num_partitions, C: gl.constexpr
):
    """One warp: for each tile wait for its rows, then keep the ring full."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_K: gl.constexpr = C.TILE_K
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * (w_desc.dtype.primitive_bitwidth // 8)
    ring, deals = operands.ring, operands.deals
    offsets, experts, tile_cols = tensors.offsets, sizes.experts, sizes.tile_cols
    epoch = load_epoch(peers)
    tickets = peers.counters + (epoch & 1) * SET + TICKETS
    turn = 0
    count = 0
    tile = deal(tickets, count, deals, 1)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        await_placed(placement.placed, first_row, walk.end, epoch, TILE_M)
        for block in range(0, sizes.k_blocks):
            at = claim(ring, turn, block_bytes, C.STAGES)
            load_expert(
                w_desc,
                walk.expert,
                sizes.weight.cols,
                sizes.weight.depth,
                col * TILE_N,
                block * TILE_K,
                ring.ready.index(at),
                ring.b.index(at),
                C.DEPTH_FIRST,
            )
            load_async(
                rows_desc, [first_row, block * TILE_K], ring.ready.index(at), ring.a.index(at)
            )
            turn += 1
        count += 1
        tile = deal(tickets, count, deals, 1)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    leave(peers, epoch, num_partitions)


@gluon.jit
def move_partition(tensors, placement, peers, rank, sizes, num_partitions, C: gl.constexpr):
    """Two warps: push own tokens, place rows; finally, in the last program, wait for all ranks."""
    program = gl.program_id(0)
    epoch = load_epoch(peers)
    offset = (epoch & 1).to(gl.int64) * peers.slot_size
    clear_counters(peers, epoch, program)
    push_tokens(tensors, peers, rank, sizes, offset, program, epoch, C)
    acquire(epoch)
    slot = peers.slots + offset
    tickets = peers.counters + (epoch & 1) * SET + UNITS
    place_rows(tensors, placement, peers, slot, tickets, rank, sizes, epoch, C)
    await_all(peers, rank, sizes.blocks, program, epoch, C.WORLD_SIZE)
    leave(peers, epoch, num_partitions)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_ordered_kernel(
    rows_desc,
    w_desc,
    y_desc,
    tensors,
    placement,
    peers,
    rank,
    max_tokens,
    topk,
    experts,
    weight,
    block_experts,
    blocks,
    num_producers,
    tile_cols,
    k_blocks,
    C: gl.constexpr,
):
    """Start the partitions."""
    sizes = Sizes(
        max_tokens, topk, experts, weight, block_experts, blocks, num_producers, tile_cols, k_blocks
    )
    ring = make_ring(rows_desc, w_desc, C.TILE_M, C.TILE_K, C.STAGES)
    y_buffer = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    operands = Operands(ring, y_buffer, make_deal())
    parts = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (multiply_partition, (tensors, y_desc, operands, peers, sizes, parts, C)),
            (
                load_partition,
                (tensors, placement, rows_desc, w_desc, operands, peers, sizes, parts, C),
            ),
            (move_partition, (tensors, placement, peers, rank, sizes, parts, C)),
        ],
        [1, PUSH_WARPS],
        [40, MOVE_REGISTERS],
    )


ORDERED_WORDS = (*WORDS, *(f"placement.{name}" for name in Placement._fields))
ORDERED_MAPS = (*MAPS, "rows_desc")


def launcher(
    peers: Peers,
    config: DispatchConfig,
    rank: int,
    world_size: int,
    max_tokens: int,
    topk: int,
    bound: int,
    w: torch.Tensor,
    num_sms: int,
) -> Launch:
    """Launches for one shape, as ``dispatch_triton.launcher``: of this kernel for what
    ``dispatch_hopper`` takes, and then they return the rows in order [bound, K]."""
    common = (rank, world_size, max_tokens, topk, bound, w, num_sms)
    programs, fixed, choices = arguments(peers, config, *common, gathered=False)
    plain = triton_launcher(peers, portable(config), *common)
    depth, units = w.shape[2], cdiv(bound, UNIT.value)
    tile = [config.tile_m, config.tile_k]
    pack_others = packing(choices, bound, w)

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        fields: Sequence[torch.Tensor],
        rows: torch.Tensor,
        placed: torch.Tensor,
    ) -> Call:
        variant, words, others, addresses = pack_others(x, w, y, fields)
        address = rows.data_ptr()

        def changing() -> dict[str, Any]:
            rows_desc = descriptor(address, rows.dtype, [bound, depth], depth, tile)
            return {
                **others(),
                "placement": Placement(rows, placed),
                "rows_desc": rows_desc,
            }

        # both are allocated for this call, so they are aligned
        words = (*words, address, placed.data_ptr())
        return variant, words, changing, (*addresses, address)

    ordered = Launcher(
        dispatch_grouped_matmul_ordered_kernel,
        programs,
        fixed,
        pack,
        ORDERED_WORDS,
        ORDERED_MAPS,
        num_warps=config.num_warps,
        maxnreg=MAX_REGISTERS,
    )

    def launch(
        x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        if not takes(x, w, config):
            return plain(x, w, y, fields)
        rows = x.new_empty(bound, depth)
        placed = torch.zeros(units, dtype=torch.int32, device=x.device)
        ordered(x, w, y, fields, rows, placed)
        return rows

    return launch
