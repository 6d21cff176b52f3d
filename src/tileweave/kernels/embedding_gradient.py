"""The gradient's way back: rows of the result's gradient to the tables' owners, summed there while the next tables travel.

``push_gradient``: rank r stores the columns of owner p's tables, for its own samples, straight into p's slot; the sums of
``table_sums.py`` read them:

    grad  [b, width]   gradient of the result, own samples          slot [B, D_p]  p's tables side by side, all samples

An owner's tables travel in ``GROUPS`` groups, in the order in which sorted positions name them. The push has a stream of its
own; the sums, on the caller's, begin when the first group is there and wait for each further one:

    push stream    ready? | group 0 to r+1, r+2, r+3, own | group 1 ... | group 7
                   the last program: | 0 here? | 1 here? | ...
    caller's                        await_first | sums of group 0 | 1 | ... | join

=======================  ============  =====================================  ===================================
word (int32)             value         written by                             waited for by
=======================  ============  =====================================  ===================================
[source, READY]          epoch         program 0 of ``source``                programs about to store to ``source``
                                                                              for the first time in this call
[source, DONE + g]       epoch         ``source``'s last program to have      the last program, which stores nothing,
                                       stored group g, here too               group by group
counters[ARRIVED]        epoch *       the last program: groups up to g of    ``await_first`` for group 0, then the
                         GROUPS + g+1  all sources are in this rank's slot    sums of tables of group g
counters[BASE]           epoch *       ``await_first``                        nobody: the sums stand behind it
                         GROUPS
=======================  ============  =====================================  ===================================

One slot, at an address that the host knows: READY of call n says that the kernels which read the slot of call n-1 have
ended, since they stand before call n on the stream. Program 0 says it before it waits for anybody.

Nobody is stuck: the watching program waits for lower programs and other ranks. Sums fill the device, and wait; they start
only behind ``await_first``, hence when all storing programs here are resident, which need nothing but READY of peers.
``await_first`` counts as one who leaves, so the epoch stands until it has read it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.language.remote import symm_at
from tileweave.language.signal import leave, load_epoch, notify_all, wait

SLICES = tl.constexpr(32)
READY, DONE = tl.constexpr(0), tl.constexpr(1)
GROUPS = tl.constexpr(8)
# Programs that have stored all they had to of a group, for each parity of the epoch; and what the sums look at.
BASE, ARRIVED, COUNTERS = tl.constexpr(16), tl.constexpr(17), 18
ROWS, COLS = 16, 128  # a block that a program of the push moves at once
PROGRAMS_PER_SM = 2  # fill the links, and leave room for the sort beside: eight held its first kernel up for 0.45 ms


@triton.jit
def group_of(table, tables):
    """The group in which an owner's table travels, of its ``tables``."""
    return table * GROUPS // tables


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
def watch(signals, counters, epoch, control, report, WORLD_SIZE: tl.constexpr):
    """Say to this device's sums which groups of all sources have come."""
    for group in range(0, GROUPS):
        for source in tl.static_range(WORLD_SIZE):
            wait(signals, 1, epoch, source * SLICES + DONE + group, -1, control, report)
        tl.atomic_xchg(counters + ARRIVED, epoch * GROUPS + group + 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["rank", "rows_here", "first_sample", "units", "blocks"])
def push_gradient_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Push blocks in turn, group by group, peers' pieces first; the last program watches what comes."""
    program = tl.program_id(0)
    pushers = tl.num_programs(0) - 1
    epoch = load_epoch(control)
    if program == 0:
        tl.store(counters + (1 - (epoch & 1)) * GROUPS + tl.arange(0, GROUPS), tl.zeros((GROUPS,), tl.int32))
        notify_all(signal_table, rank * SLICES + READY, rank, epoch, WORLD_SIZE, False)
    if program < pushers:
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
    else:
        watch(signals, counters, epoch, control, report, WORLD_SIZE)
    leave(control, epoch, pushers + 2)


@triton.jit(do_not_specialize=["pushers"])
def await_first_kernel(counters, control, report, pushers):
    """The first group of all sources is here; tell the sums from where to count, and leave as one of the push."""
    epoch = load_epoch(control)
    wait(counters, 1, epoch * GROUPS + 1, ARRIVED, -1, control, report)
    tl.store(counters + BASE, epoch * GROUPS)
    leave(control, epoch, pushers + 2)


def push_gradient(
    peers: Endpoint,
    plan: torch.Tensor,
    grad: torch.Tensor,
    first_sample: int,
    aligned: int,
    rank: int,
    world_size: int,
    num_sms: int,
) -> Callable[[], None]:
    """Launch on the current stream; what it returns launches ``await_first``, on the stream of the sums.

    ``plan``: the pieces of all owners, by group, peers' first; see :func:`push_block`.
    """
    rows, width = grad.shape
    blocks = triton.cdiv(rows, ROWS)
    units = plan.shape[0] * blocks
    pushers = max(1, min(units, PROGRAMS_PER_SM * num_sms))
    push_gradient_kernel[(pushers + 1,)](
        grad, plan, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, peers.counters,
        rank, rows, first_sample, width, units, max(blocks, 1),
        WORLD_SIZE=world_size, ROWS=ROWS, COLS=COLS, ALIGN=aligned, num_warps=4,
    )  # fmt: skip
    return lambda: await_first_kernel[(1,)](peers.counters, peers.control, peers.report, pushers, num_warps=1)
