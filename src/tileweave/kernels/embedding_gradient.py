"""The gradient's way back: rows of the result's gradient to the tables' owners, summed there while the next tables travel.

Rank r stores the columns of owner p's tables, for its own samples, straight into p's slot; sums (``table_sums.py``) read them
there, and those of their own rank's samples where they were made:

    grad  [b, width]   gradient of the result, own samples          slot [B, D_p]  p's tables side by side, all samples

One launch. Lower programs *push*, an owner's tables in ``GROUPS`` groups, in the order in which sorted positions name them; one
program *watches* what comes; all further ones *sum*, some tiles of positions each, when the group of their table is there:

    pushers   ready? | group 0 to r+1, r+2, r+3 | group 1 | ... | group 7 | leave
    watcher   group 0 of all here? | 1? | ... | 7? | leave
    sums           | tiles of group 0 | group 1 | ...                            || sum_runs (next kernel)

====================  ======  ========================================  ===========================================
word (int32)          value   written by                                waited for by
====================  ======  ========================================  ===========================================
[source, READY]       epoch   program 0 of ``source``                   pushers about to store to ``source`` for the
                                                                        first time in this call
[source, DONE + g]    epoch   ``source``'s last pusher to have stored   the watcher, group by group
                              group g; own ones too
counters[ARRIVED]     g + 1   the watcher: groups up to g of all        sums of tables of group g
                              sources are in this rank's slot
                      0       ``sum_runs``, behind all sums             (the next call begins so)
====================  ======  ========================================  ===========================================

One slot, at an address that the host knows: READY of call n says that the kernels which read the slot of call n-1 have
ended, since they stand before call n on the stream. Program 0 says it before it waits for anybody.

Nobody is stuck: pushers wait for READY alone, which waits for nothing; the watcher and the sums for lower programs and other
ranks. Sums fill the device, but only with what the pushers, dispatched before them, leave.

Where there are no sums (no lookup here, or weights' gradients, which want tables as they were), pushers and watcher alone, and
own rows go into the slot too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.kernels.table_sums import sum_tiles
from tileweave.language.remote import symm_at
from tileweave.language.signal import leave, load_epoch, notify_all, wait

SLICES = tl.constexpr(32)
READY, DONE = tl.constexpr(0), tl.constexpr(1)
GROUPS = tl.constexpr(8)
# Programs that have stored all they had to of a group, for each parity of the epoch; and what the sums look at.
ARRIVED, COUNTERS = tl.constexpr(16), 17
ROWS, COLS = 8, 128  # a block that a pusher moves at once: of 16 rows, sums had 20 registers fewer beside it
WARPS_PER_SM = 4  # that push: enough to fill the links, and room for what stands beside


@triton.jit
def push_block(
    grad, slot_table, plan, piece, sample, rows_here, first_sample, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One block of rows of one piece.

    ``plan`` int64 [pieces, 6] = (owner, source column, target column, dim, slot width, group).
    """
    peer = tl.load(plan + piece * 6).to(tl.int32)
    source = tl.load(plan + piece * 6 + 1).to(tl.int32)
    target = tl.load(plan + piece * 6 + 2).to(tl.int32)
    dim = tl.load(plan + piece * 6 + 3).to(tl.int32)
    slot_width = tl.load(plan + piece * 6 + 4)
    if ALIGN > 1:
        source = tl.multiple_of(source, ALIGN)
        target = tl.multiple_of(target, ALIGN)
        dim = tl.multiple_of(dim, ALIGN)
        slot_width = tl.multiple_of(slot_width, ALIGN)
    base = symm_at(slot_table, peer, grad.dtype.element_ty, 16)
    row = sample + tl.arange(0, ROWS)
    for begin in range(0, dim, COLS):
        col = begin + tl.arange(0, COLS)
        mask = (row < rows_here)[:, None] & (col < dim)[None, :]
        values = tl.load(grad + (row.to(tl.int64) * width)[:, None] + (source + col)[None, :], mask=mask)
        places = base + ((first_sample + row).to(tl.int64) * slot_width)[:, None] + (target + col)[None, :]
        tl.store(places, values, mask=mask)


@triton.jit
def count_group(signal_table, counters, rank, group, epoch, pushers, WORLD_SIZE: tl.constexpr):
    """This program stores nothing of ``group`` any more; the last one to say so tells every rank."""
    tl.debug_barrier()
    if tl.atomic_add(counters + (epoch & 1) * GROUPS + group, 1, sem="acq_rel", scope="gpu") == pushers - 1:
        notify_all(signal_table, rank * SLICES + DONE + group, rank, epoch, WORLD_SIZE, True)


@triton.jit
def push_groups(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks, pushers, epoch,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A pusher: blocks in turn, group by group, peers' pieces first."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(counters + (1 - (epoch & 1)) * GROUPS + tl.arange(0, GROUPS), tl.zeros((GROUPS,), tl.int32))
        notify_all(signal_table, rank * SLICES + READY, rank, epoch, WORLD_SIZE, False)
    awaited = 1 << rank  # bit p: peer p is ready
    group = rank * 0
    for unit in range(program, units, pushers):
        piece = unit // blocks
        while group < tl.load(plan + piece * 6 + 5).to(tl.int32):
            count_group(signal_table, counters, rank, group, epoch, pushers, WORLD_SIZE)
            group += 1
        peer = tl.load(plan + piece * 6).to(tl.int32)
        if (awaited >> peer) & 1 == 0:
            wait(signals, 1, epoch, peer * SLICES + READY, unit, control, report)
            awaited = awaited | (1 << peer)
        push_block(grad, slot_table, plan, piece, unit % blocks * ROWS, rows_here, first_sample, width, ROWS, COLS, ALIGN)
    while group < GROUPS:
        count_group(signal_table, counters, rank, group, epoch, pushers, WORLD_SIZE)
        group += 1


@triton.jit
def watch(signals, counters, epoch, control, report, WORLD_SIZE: tl.constexpr, SUMS: tl.constexpr):
    """The watcher: say to this device's sums which groups of all sources have come."""
    for group in range(0, GROUPS):
        for source in tl.static_range(WORLD_SIZE):
            wait(signals, 1, epoch, source * SLICES + DONE + group, -1, control, report)
        if SUMS:
            tl.atomic_xchg(counters + ARRIVED, group + 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["rank", "rows_here", "first_sample", "units", "blocks"])
def push_gradient_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Pushers and a watcher, and no sums."""
    epoch = load_epoch(control)
    pushers = tl.num_programs(0) - 1
    if tl.program_id(0) < pushers:
        push_groups(
            grad, plan, slot_table, signal_table, signals, control, report, counters,
            rank, rows_here, first_sample, width, units, blocks, pushers, epoch, WORLD_SIZE, ROWS, COLS, ALIGN,
        )  # fmt: skip
    else:
        watch(signals, counters, epoch, control, report, WORLD_SIZE, False)
    leave(control, epoch, pushers + 1)


@triton.jit(do_not_specialize=["rank", "rows_here", "first_sample", "units", "blocks", "pushers", "factor", "tables", "tiles"])
def push_and_sum_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks, pushers,
    slot, slot_width, keys, bags, scales, places, meta, partials, rate, epsilon, factor, count, last_key, batch, tables, tiles,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PUSH_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Pushers of ``grad``, a watcher, and a program for ``STEPS`` tiles of positions."""
    program = tl.program_id(0)
    if program > pushers:
        sum_tiles(
            program - pushers - 1, tiles, slot, slot_width, grad, width, first_sample, rows_here, keys, bags, scales, places,
            meta, partials, rate, epsilon, factor, counters, control, report, count, last_key, batch, tables,
            STEPS, GROUPS, ARRIVED, DTYPE, BLOCK_D, TILE, KIND, SCALED, ALIGN,
        )  # fmt: skip
    else:
        epoch = load_epoch(control)
        if program < pushers:
            push_groups(
                grad, plan, slot_table, signal_table, signals, control, report, counters,
                rank, rows_here, first_sample, width, units, blocks, pushers, epoch, WORLD_SIZE, ROWS, COLS, PUSH_ALIGN,
            )  # fmt: skip
        else:
            watch(signals, counters, epoch, control, report, WORLD_SIZE, True)
        leave(control, epoch, pushers + 1)


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that is about to leave: all that a launch needs but for the sums.

    grad : here. plan : pieces of all owners, by group, see :func:`push_block`. slot : [B, sum of own dims], where peers'
    gradients arrive. columns : of this rank's tables in ``grad``. warps : that push, at most.
    """

    peers: Endpoint
    grad: torch.Tensor
    plan: torch.Tensor
    slot: torch.Tensor
    columns: tuple[int, ...]
    first_sample: int
    aligned: int
    rank: int
    world_size: int
    warps: int

    def arrived(self) -> torch.Tensor:
        """The counter on which sums wait."""
        return self.peers.counters[ARRIVED.value :]

    def launch(self, summing: int = 0, sums: Sequence[object] = (), **options: Any) -> None:
        """On the current stream. ``sums``: arguments of ``sum_rows`` from the slot on, for ``summing`` programs; behind them
        ``sum_runs`` has to set the counter ``ARRIVED`` to zero."""
        peers, (rows, width) = self.peers, self.grad.shape
        blocks = triton.cdiv(rows, ROWS)
        units = self.plan.shape[0] * blocks
        common = (
            self.grad, self.plan, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
            peers.counters, self.rank, rows, self.first_sample, width, units, max(blocks, 1),
        )  # fmt: skip
        shape = {"WORLD_SIZE": self.world_size, "ROWS": ROWS, "COLS": COLS}
        num_warps = options["num_warps"] if summing else 4
        pushers = max(1, min(units, self.warps // num_warps))
        if summing:
            push_and_sum_kernel[(pushers + 1 + summing,)](*common, pushers, *sums, **shape, PUSH_ALIGN=self.aligned, **options)
        else:
            push_gradient_kernel[(pushers + 1,)](*common, **shape, ALIGN=self.aligned, num_warps=num_warps)
