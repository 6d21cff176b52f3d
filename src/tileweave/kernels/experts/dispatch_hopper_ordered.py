"""The Hopper ``dispatch_grouped_matmul`` that lines rows up first: for experts with many rows, whose matmul TMA feeds best.

Read ``kernels/experts/dispatch_triton.py`` first: equation, signals, timeline and proof are there and hold here; *multiply* and
pushing are those of ``dispatch_hopper.py``. What differs:

    rows    [bound, K]   local: the token of each row of the plan, row by row; what TMA loads, and what a caller may keep
    placed  [units]      local, zero before the call: 1 where all ``UNIT`` rows of a unit, or all there are, are in ``rows``

- *move* (two warps of every program): the first programs push own tokens; then all take units of rows, one by one in rising
  order (tickets), wait for the tokens of each, and copy them from x or the slot.
- *load* (one warp): waits until the units of a tile are placed, then keeps the ring full by TMA, rows and weights.

    move  | push own tokens (first programs) | unit 0, own rows | unit 1 ... ^ wait for the block of a source | ...
    load  | wait for the units of a tile     | tile | tile ...

``placed[u]`` is set by who took ticket u, behind its copies, and read by *load* of any program, which acquires it and fences
the proxies before TMA reads the rows. A tile that reaches past its expert's rows also loads rows of the next expert, placed
or not: they make no row that is stored.

Why nobody is stuck: units are taken in rising order by programs that run, and who took one waits for other ranks' pushes only,
which wait for nobody and precede tickets in every program; *load* waits for units only.

Why the copy: a row is read once more and written once, beside a matmul that reads it N / TILE_N times. For Mixtral's experts
the main loop fed by TMA is as fast as ``torch._grouped_mm`` on rows in order; the one that gathers by ``cp.async`` has 0.87 of
that (decision 0027).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon.matmul import claim, load_expert, make_ring
from tileweave.device.gluon.signal import acquire, block_barrier, leave, load_async
from tileweave.device.gluon.tickets import deal, make_deal
from tileweave.kernels.experts.dispatch_hopper import Launcher as HopperLauncher
from tileweave.kernels.experts.dispatch_hopper_roles import (
    PUSH_WARPS,
    SET,
    TICKETS,
    UNITS,
    UNSPECIALIZED,
    all_have,
    await_all,
    clear_counters,
    first_expert,
    multiply_partition,
    place_in_expert,
    push_tokens,
    row_steps,
    wait_steps,
    walk_to,
)
from tileweave.kernels.runtime.descriptors import descriptor
from tileweave.planning.schedules.gather import cdiv

UNIT = gl.constexpr(16)  # rows that are placed, and said to be, at once
AT_ONCE = gl.constexpr(8)  # rows, by
WIDTH = gl.constexpr(1024)  # elements, that *move* has in flight
MOVE_REGISTERS = 152


@gluon.jit
def place_unit(
    x, slot, rows, row_entry, first, total, max_tokens, topk, depth, rank, WORLD_SIZE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Copy the tokens of rows [first, first + UNIT) that there are."""
    for begin in range(first, gl.minimum(first + UNIT, total), AT_ONCE):
        row = begin + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
        there = row < total
        token = gl.load(row_entry + gl.minimum(row, total - 1)) // topk
        step = (rank + WORLD_SIZE - token // max_tokens) % WORLD_SIZE
        token = token % max_tokens
        remote = ((step - 1).to(gl.int64) * max_tokens + token) * depth
        source = gl.where(step == 0, x + token.to(gl.int64) * depth, slot + remote)
        target = rows + row.to(gl.int64) * depth
        for column in range(0, depth, WIDTH):
            at = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            mask = there[:, None] & (at < depth)[None, :]
            value = gl.load(gl.multiple_of(source[:, None] + at[None, :], [1, 16]), mask=mask)
            gl.store(gl.multiple_of(target[:, None] + at[None, :], [1, 16]), value, mask=mask)


@gluon.jit
def place_rows(
    x, slot, rows, placed, row_entry, offsets, tickets, signals, control, report, epoch,
    rank, max_tokens, topk, experts, depth, block_experts, blocks, WORLD_SIZE: gl.constexpr,
):  # fmt: skip
    """Take units until there are none: wait for their tokens, copy them, say so."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PUSH_WARPS, 1], [1, 0])
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [PUSH_WARPS], [0])
    total = gl.load(offsets + experts)
    expert = epoch * 0
    end = gl.load(offsets + 1)
    arrived = False  # everything, and acquired by the ``wait_steps`` of the unit that found it so
    unit = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while unit * UNIT < total:
        following = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        first = unit * UNIT
        last = gl.minimum(first + UNIT, total) - 1
        if not arrived:
            arrived = all_have(signals, blocks - 1, rank, epoch, WORLD_SIZE, PUSH_WARPS)
            while (
                end <= last
            ):  # the last row's expert: a source signals its block behind those before it
                expert += 1
                end = gl.load(offsets + expert + 1)
            row = gl.minimum(first + gl.arange(0, UNIT, layout=lane), last)
            step = row_steps(row_entry, row, max_tokens, topk, rank, WORLD_SIZE)
            wait_steps(
                signals, expert // block_experts, gl.min(step, axis=0), gl.max(step, axis=0), rank, epoch, unit, control,
                report, WORLD_SIZE, PUSH_WARPS,
            )  # fmt: skip
        place_unit(
            x,
            slot,
            rows,
            row_entry,
            first,
            total,
            max_tokens,
            topk,
            depth,
            rank,
            WORLD_SIZE,
            layout,
        )
        block_barrier()
        gl.atomic_xchg(placed + unit, 1, sem="release", scope="gpu")
        unit = following


@gluon.jit
def await_placed(placed, first_row, end, epoch, TILE_M: gl.constexpr):
    """Until rows [first_row, end) of a tile are there; TMA may read them afterwards."""
    WORDS: gl.constexpr = 32 if TILE_M // UNIT < 32 else 2 * TILE_M // UNIT
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = first_row // UNIT
    last = (gl.minimum(first_row + TILE_M, end) - 1) // UNIT
    unit = gl.minimum(first + gl.arange(0, WORDS, layout=lane), last)
    while gl.min(gl.load(placed + unit, volatile=True), axis=0) == 0:
        pass
    acquire(epoch)


@gluon.jit
def load_partition(
    rows_desc, w_desc, ring, line, counters, placed, offsets, control, experts, cols,
    depth, tile_cols, k_blocks, num_partitions,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """One warp: for each tile wait for its rows, then keep the ring full."""
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    epoch = gl.load(control, volatile=True)
    tickets = counters + (epoch & 1) * SET + TICKETS
    turn = 0
    count = 0
    tile = deal(tickets, count, line, 1)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
        await_placed(placed, first_row, walk.end, epoch, TILE_M)
        for block in range(0, k_blocks):
            at = claim(ring, turn, block_bytes, STAGES)
            load_expert(
                w_desc, walk.expert, cols, depth, col * TILE_N, block * TILE_K, ring.ready.index(at), ring.b.index(at),
                DEPTH_FIRST,
            )  # fmt: skip
            load_async(
                rows_desc, [first_row, block * TILE_K], ring.ready.index(at), ring.a.index(at)
            )
            turn += 1
        count += 1
        tile = deal(tickets, count, line, 1)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    leave(control, epoch, num_partitions)


@gluon.jit
def move_partition(
    x, rows, placed, offsets, row_entry, send_order, send_offsets, slots, slot_table, signal_table, signals, control, report,
    counters, slot_size, rank, max_tokens, topk, experts, depth, block_experts, blocks, num_producers, num_partitions,
    WORLD_SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Two warps: push own tokens, place rows; at last, in the last program, wait for all ranks."""
    program = gl.program_id(0)
    epoch = gl.load(control, volatile=True)
    offset = (epoch & 1).to(gl.int64) * slot_size
    clear_counters(counters, epoch, program)
    push_tokens(
        x, send_order, send_offsets, slot_table, signal_table, counters, offset, rank, max_tokens, experts, depth,
        block_experts, blocks, program, num_producers, epoch, WORLD_SIZE, BLOCK,
    )  # fmt: skip
    acquire(epoch)
    place_rows(
        x, slots + offset, rows, placed, row_entry, offsets, counters + (epoch & 1) * SET + UNITS, signals, control,
        report, epoch, rank, max_tokens, topk, experts, depth, block_experts, blocks, WORLD_SIZE,
    )  # fmt: skip
    await_all(signals, blocks, program, rank, epoch, control, report, WORLD_SIZE)
    leave(control, epoch, num_partitions)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_grouped_matmul_ordered_kernel(
    rows_desc, w_desc, y_desc, x, y, rows, placed, offsets, row_entry, send_order, send_offsets, slots, slot_table,
    signal_table, signals, control, report, counters,
    slot_size, rank, max_tokens, topk, experts, cols, depth, block_experts, blocks, num_producers, tile_cols, k_blocks,
    WORLD_SIZE: gl.constexpr, PUSH_BLOCK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, BY_TMA: gl.constexpr,
    MOVE_REGISTERS: gl.constexpr, DEPTH_FIRST: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions."""
    ring = make_ring(rows_desc, w_desc, TILE_M, TILE_K, STAGES)
    y_buffer = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    line = make_deal()
    num_partitions = gl.num_programs(0) * 3
    gl.warp_specialize(
        [
            (multiply_partition, (
                y, y_desc, y_buffer, ring, line, offsets, control, experts, cols,
                tile_cols, k_blocks, num_partitions, TILE_M, TILE_N, GROUP_M, STAGES, WARPS, HALVES, BY_TMA, DEPTH_FIRST, False,
            )),
            (load_partition, (
                rows_desc, w_desc, ring, line, counters, placed, offsets, control,
                experts, cols, depth, tile_cols, k_blocks, num_partitions, TILE_M, TILE_N, TILE_K, GROUP_M, STAGES, DEPTH_FIRST,
            )),
            (move_partition, (
                x, rows, placed, offsets, row_entry, send_order, send_offsets, slots, slot_table, signal_table, signals,
                control, report, counters, slot_size, rank, max_tokens, topk, experts, depth, block_experts, blocks,
                num_producers, num_partitions, WORLD_SIZE, PUSH_BLOCK,
            )),
        ],
        [1, PUSH_WARPS],
        [40, MOVE_REGISTERS],
    )  # fmt: skip


class Launcher(HopperLauncher):
    """One shape's launches; as the gathering kernel's, for what it takes."""

    def launch(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, fields: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        p, c, depth = self.peers, self.config, w.shape[2]
        offsets, row_entry, _, _, send_order, send_offsets = fields
        rows = x.new_empty(self.bound, depth)
        placed = torch.zeros(cdiv(self.bound, UNIT.value), dtype=torch.int32, device=x.device)
        w_desc, y_desc, by_tma, turned = self.maps(w, y)
        rows_desc = descriptor(
            rows.data_ptr(), rows.dtype, [self.bound, depth], depth, [c.tile_m, c.tile_k]
        )
        dispatch_grouped_matmul_ordered_kernel[(self.programs,)](
            rows_desc, w_desc, y_desc, x, y, rows, placed, offsets, row_entry, send_order, send_offsets, p.slots, p.slot_table,
            p.signal_table, p.signals, p.control, p.report, p.counters, *self.integers, *self.constants, self.halves, by_tma,
            MOVE_REGISTERS, turned, num_warps=c.num_warps, maxnreg=168,
        )  # fmt: skip
        return rows
