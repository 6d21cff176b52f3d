"""The gradient's way back: rows of the result's gradient to the tables' owners; their sums are in ``table_sums.py``.

``push_gradient``: rank r stores the columns of owner p's tables, for its own samples, straight into p's slot:

    grad  [b, width]   gradient of the result, own samples          slot [B, D_p]  p's tables side by side, all samples

====================  =====  =====================================  ===================================
signal (int32)        value  notifier                               waiter
====================  =====  =====================================  ===================================
[source, READY]       epoch  program 0 of ``source``                programs about to store to ``source``
                                                                    for the first time in this call
[source, DONE]        epoch  ``source``'s last program to store     the last program, before it leaves
====================  =====  =====================================  ===================================

    ready | push to r+1 | push to r+2 | push to r+3 | own | done of all? | leave || sums (next kernels)

One slot, at an address that the host knows: READY of call n says that the kernels which read the slot of call n-1 have
ended, since they stand before call n on the stream. Program 0 says it before it waits for anybody.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.language.remote import symm_at
from tileweave.language.signal import leave, load_epoch, notify_all, wait

SLICES = tl.constexpr(32)
READY, DONE = tl.constexpr(0), tl.constexpr(1)
COUNTERS = 2  # programs that have stored all they had to; one for each parity of the epoch
ROWS, COLS = 16, 128  # a block that a program of the push moves at once
PROGRAMS_PER_SM = 2  # fill the links, and leave room for the sort beside: eight held its first kernel up for 0.45 ms


@triton.jit
def push_block(
    grad, slot_table, plan, piece, sample, rows_here, first_sample, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One block of rows of one piece: ``plan`` int64 [pieces, 5] = (owner, source column, target column, dim, slot width)."""
    peer = tl.load(plan + piece * 5).to(tl.int32)
    source = tl.load(plan + piece * 5 + 1).to(tl.int32)
    target = tl.load(plan + piece * 5 + 2).to(tl.int32)
    dim = tl.load(plan + piece * 5 + 3).to(tl.int32)
    slot_width = tl.load(plan + piece * 5 + 4)
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


@triton.jit(do_not_specialize=["rank", "rows_here", "first_sample", "units", "blocks"])
def push_gradient_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, units, blocks,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Push blocks in turn, peers' pieces first; count; the last program waits for every peer."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if program == 0:
        tl.store(counters + 1 - (epoch & 1), 0)
        notify_all(signal_table, rank * SLICES + READY, rank, epoch, WORLD_SIZE, False)
    awaited = 1 << rank  # bit p: peer p is ready
    for unit in range(program, units, num_programs):
        piece = unit // blocks
        peer = tl.load(plan + piece * 5).to(tl.int32)
        if (awaited >> peer) & 1 == 0:
            wait(signals, 1, epoch, peer * SLICES + READY, unit, control, report)
            awaited = awaited | (1 << peer)
        push_block(grad, slot_table, plan, piece, unit % blocks * ROWS, rows_here, first_sample, width, ROWS, COLS, ALIGN)
    tl.debug_barrier()
    if tl.atomic_add(counters + (epoch & 1), 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        notify_all(signal_table, rank * SLICES + DONE, rank, epoch, WORLD_SIZE, False)
    if program == num_programs - 1:
        for step in tl.static_range(1, WORLD_SIZE):
            wait(signals, 1, epoch, (rank + step) % WORLD_SIZE * SLICES + DONE, -1, control, report)
    leave(control, epoch, num_programs)


def push_gradient(
    peers: Endpoint,
    plan: torch.Tensor,
    grad: torch.Tensor,
    first_sample: int,
    aligned: int,
    rank: int,
    world_size: int,
    num_sms: int,
) -> None:
    """Launch on the current stream. ``plan``: the pieces of all owners, peers' first; see :func:`push_block`."""
    rows, width = grad.shape
    blocks = triton.cdiv(rows, ROWS)
    units = plan.shape[0] * blocks
    push_gradient_kernel[(max(1, min(units, PROGRAMS_PER_SM * num_sms)),)](
        grad, plan, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report, peers.counters,
        rank, rows, first_sample, width, units, max(blocks, 1),
        WORLD_SIZE=world_size, ROWS=ROWS, COLS=COLS, ALIGN=aligned, num_warps=4,
    )  # fmt: skip
