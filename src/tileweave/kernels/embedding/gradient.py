"""The gradient's way back: rows of the result's gradient to the tables' owners, summed there while the next tables travel.

Rank r stores the columns of owner p's tables, for its own samples, straight into p's slot; sums (``table_sums.py``) read them
there, and those of their own rank's samples where they were made:

    grad  [b, width]   gradient of the result, own samples          slot [B, D_p]  p's tables side by side, all samples
    slot of p [first sample of r + s, columns of table t there] = grad of r [s, columns of t in the result]

One launch. An owner's tables travel in ``GROUPS`` groups, in the order in which sorted positions name them, the first table by
itself. One program *watches* what comes; all others *sum*, some tiles of positions each, when their table's group is there:

    carriers  | group 0 to r+1, r+2, r+3 | group 1 | ... | group 7 |
    watcher   group 0 of all here? | 1? | ... | 7? | leave
    sums           | tiles of group 0 | group 1 | ...                            || sum_runs (next kernel)

Who carries, two transports:

``"copy_engine"``  columns of a table, or of several that stand side by side, row after row; a signal behind each group. The
    copies take no multiprocessor, and little time from sums: 485 us of sums take 530 beside 335 of copies (decision 0033).
``"sm"``  lower programs, *candidates*: those push that find themselves on one of ``EVERY`` multiprocessors, and the ``LEAST``
    lowest wherever they are; the others leave at once. Stores to peers that wait for a link hold up all loads and stores of
    their multiprocessor: pushed from everywhere, gradients took as long beside the sums as before them. Tickets are dealt, so
    any number of candidates may push. For pieces too small or too narrow for copy engines.

====================  ======  ========================================  ===========================================
word (int32)          value   written by                                waited for by
====================  ======  ========================================  ===========================================
[source, READY]       epoch   "sm": program 0 of ``source``             pushers about to store to ``source`` for the
                                                                        first time in this call; program 0 of a rank
                                                                        with no ticket
[met, source]         epoch   "copy_engine": the watcher of ``source``  the watchers of all, before copies go
[source, DONE + g]    epoch   ``source``'s copy engine; "sm": the       the watcher, group by group
                              pusher that counts the last ticket of
                              group g, also to its own rank. Of a group
                              with no ticket, program 0; where there is
                              none at all, when every peer is READY
counters[ARRIVED]     g + 1   the watcher: groups up to g of all        sums of tables of group g
                              sources are in this rank's slot
                      0       ``sum_runs``, behind all sums             (the next call begins so)
counters[GATE]        1       the watcher, when all ranks have met      own copy engine, before its first copy
[pushed] (own)        epoch   own copy engine, behind its last copy     the watcher, before gate and epoch move
====================  ======  ========================================  ===========================================

Counters of tickets dealt and stored are in two sets by parity of the epoch; program 0 clears that of the next call.

One slot, at an address that the host knows: READY, or the meeting, of call n says that the kernels which read the slot of call
n-1 have ended, since they stand before call n on the stream. Both are said before anybody is waited for.

Nobody is stuck: pushers and program 0 wait for READY alone, which waits for nothing; copies for the meeting; the watcher and
the sums for lower programs, of which the ``LEAST`` lowest push whatever the others do, for own copies, and other ranks.

Where there are no sums (no lookup here, or weights' gradients, which want tables as they were), carriers and watcher alone, and
own rows go into the slot too; behind them ``poison_kernel``, and behind all that reads the slot ``refuse_kernel``.

After a time-out sums are NaN. Nothing is stored to peers and no group is said to be done, so they run out of time as well; but
copies go. A rank whose time has run out says that to all, for good (``or_gone``), and who has summed looks whether someone did:
the copies of that one's next call may have come too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.device.triton.meet import await_all, await_pushed, come, or_gone, refuse_gone
from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.signal import (
    MEETING_US,
    call_done,
    count_in,
    faulted,
    leave,
    load_epoch,
    multiprocessor,
    notify_all,
    poison,
    wait,
)
from tileweave.kernels.embedding.table_sums import sum_tiles
from tileweave.kernels.runtime.endpoint import Endpoint

SLICES = tl.constexpr(32)
READY, DONE = tl.constexpr(0), tl.constexpr(1)
GROUPS = tl.constexpr(8)
# Counters. SET words for each parity of the epoch: tickets stored of each group, tickets dealt. Behind them those of the table.
DEALT, SET = tl.constexpr(8), tl.constexpr(16)
ARRIVED, GATE, COUNTERS = tl.constexpr(32), tl.constexpr(33), 34
ROWS, COLS = (
    8,
    128,
)  # a ticket is ROWS rows of a piece; COLS columns for each warp are moved at once
CANDIDATES = 32  # programs a multiprocessor that may push, where one has one warp: as many as fit, and again as many
EVERY = 16  # of that many multiprocessors one pushes, where sums want the others
PIECE = tl.constexpr(7)  # words of a piece
LEAST = tl.constexpr(4)  # programs that push wherever they are


@triton.jit
def push_block(
    grad, slot_table, piece, sample, rows_here, first_sample, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One block of rows of one piece.

    ``piece``: its row of the plan, int64 [pieces, PIECE] = (owner, source column, target column, dim, slot width, group,
    pieces of that group).
    """
    peer = tl.load(piece).to(tl.int32)
    source = tl.load(piece + 1).to(tl.int32)
    target = tl.load(piece + 2).to(tl.int32)
    dim = tl.load(piece + 3).to(tl.int32)
    slot_width = tl.load(piece + 4)
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
        values = tl.load(
            grad + (row.to(tl.int64) * width)[:, None] + (source + col)[None, :], mask=mask
        )
        places = (
            base
            + ((first_sample + row).to(tl.int64) * slot_width)[:, None]
            + (target + col)[None, :]
        )
        tl.store(places, values, mask=mask)


@triton.jit
def count_group(
    signal_table,
    control,
    counters,
    rank,
    group,
    tickets,
    all_tickets,
    epoch,
    WORLD_SIZE: tl.constexpr,
):
    """This program has stored ``tickets`` more of ``group``; who counts the last one tells every rank, if all are stored."""
    tl.debug_barrier()
    stored = tl.atomic_add(
        counters + (epoch & 1) * SET + group, tickets, sem="acq_rel", scope="gpu"
    )
    if stored + tickets == all_tickets:
        notify_all(
            signal_table,
            rank * SLICES + DONE + group,
            rank,
            call_done(control, epoch),
            WORLD_SIZE,
            True,
        )


@triton.jit
def push_tickets(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, tickets, blocks, epoch,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A pusher: tickets as they come, group by group, peers' pieces first. ``blocks``: tickets of a piece."""
    dealt = counters + (epoch & 1) * SET + DEALT
    awaited = 1 << rank  # bit p: peer p is ready
    group = rank * 0
    stored = rank * 0  # tickets of ``group`` that no one has been told of
    of_group = rank * 0
    ticket = tl.atomic_add(dealt, 1, sem="relaxed", scope="gpu")
    while ticket < tickets:
        following = tl.atomic_add(dealt, 1, sem="relaxed", scope="gpu")
        piece = plan + ticket // blocks * PIECE
        if tl.load(piece + 5).to(tl.int32) > group:
            if stored > 0:
                count_group(
                    signal_table,
                    control,
                    counters,
                    rank,
                    group,
                    stored,
                    of_group,
                    epoch,
                    WORLD_SIZE,
                )
            group = tl.load(piece + 5).to(tl.int32)
            stored = rank * 0
        peer = tl.load(piece).to(tl.int32)
        if (awaited >> peer) & 1 == 0:
            wait(signals, 1, epoch, peer * SLICES + READY, ticket, control, report, MEETING_US)
            awaited = awaited | (1 << peer)
            if faulted(control) != 0:  # who is late may still sum what is in its slot
                rows_here = rows_here * 0
        sample = ticket % blocks * ROWS
        push_block(
            grad, slot_table, piece, sample, rows_here, first_sample, width, ROWS, COLS, ALIGN
        )
        stored += 1
        of_group = tl.load(piece + 6).to(tl.int32) * blocks
        ticket = following
    if stored > 0:
        count_group(
            signal_table, control, counters, rank, group, stored, of_group, epoch, WORLD_SIZE
        )


@triton.jit
def push_groups(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, tickets, blocks, silent, candidates,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """A candidate: it pushes if it stands where one should, or is one of the lowest. ``silent``: bits of empty groups."""
    program = tl.program_id(0)
    epoch = load_epoch(control)
    if program == 0:
        tl.store(counters + (1 - (epoch & 1)) * SET + tl.arange(0, SET), tl.zeros((SET,), tl.int32))
        notify_all(signal_table, rank * SLICES + READY, rank, epoch, WORLD_SIZE, False)
        if tickets == 0:  # no pusher finds out whether peers come, and who has given up is not done
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                wait(signals, 1, epoch, peer * SLICES + READY, -1, control, report, MEETING_US)
        for group in range(0, GROUPS):
            if (silent >> group) & 1 == 1:
                notify_all(
                    signal_table,
                    rank * SLICES + DONE + group,
                    rank,
                    call_done(control, epoch),
                    WORLD_SIZE,
                    True,
                )
    if (program < LEAST) | (multiprocessor() % EVERY == 0):
        push_tickets(
            grad, plan, slot_table, signal_table, signals, control, report, counters,
            rank, rows_here, first_sample, width, tickets, blocks, epoch, WORLD_SIZE, ROWS, COLS, ALIGN,
        )  # fmt: skip
    leave(control, epoch, candidates + 1)


@triton.jit
def watch(
    signal_table, signals, counters, control, report, rank, candidates,
    WORLD_SIZE: tl.constexpr, SUMS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The watcher: say to this device's sums which groups of all sources have come."""
    epoch = load_epoch(control)
    if COPIES:
        come(signal_table, rank, or_gone(epoch, control), WORLD_SIZE)
        await_all(signals, rank, epoch, -1, control, report, WORLD_SIZE)
        count_in(counters + GATE)
    for group in range(0, GROUPS):
        for source in tl.static_range(WORLD_SIZE):
            if not COPIES:
                wait(signals, 1, epoch, source * SLICES + DONE + group, -1, control, report)
            elif source != rank:
                wait(
                    signals,
                    1,
                    epoch,
                    source * SLICES + DONE + group,
                    -1,
                    control,
                    report,
                    EXACT=True,
                )
        if SUMS:
            tl.atomic_xchg(counters + ARRIVED, group + 1, sem="release", scope="gpu")
    if COPIES:
        await_pushed(signals, epoch, control, report, WORLD_SIZE)
        tl.store(counters + GATE, 0)
        if faulted(control) != 0:
            come(signal_table, rank, or_gone(epoch, control), WORLD_SIZE)
    leave(control, epoch, candidates + 1)


UNSPECIALIZED = ["rank", "rows_here", "first_sample", "tickets", "blocks", "silent", "candidates"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def push_gradient_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, tickets, blocks, silent, candidates,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Pushers and a watcher, and no sums."""
    if COPIES or tl.program_id(0) >= candidates:
        watch(
            signal_table,
            signals,
            counters,
            control,
            report,
            rank,
            candidates,
            WORLD_SIZE,
            False,
            COPIES,
        )
    else:
        push_groups(
            grad, plan, slot_table, signal_table, signals, control, report, counters,
            rank, rows_here, first_sample, width, tickets, blocks, silent, candidates,
            WORLD_SIZE, ROWS, COLS, ALIGN, 1,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "factor", "tables", "tiles"])
def push_and_sum_kernel(
    grad, plan, slot_table, signal_table, signals, control, report, counters,
    rank, rows_here, first_sample, width, tickets, blocks, silent, candidates,
    slot, slot_width, keys, bags, scales, places, meta, partials, rate, epsilon, factor, count, last_key, batch, tables, tiles,
    WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PUSH_ALIGN: tl.constexpr,
    EVERY: tl.constexpr, COPIES: tl.constexpr, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Pushers of ``grad``, a watcher, and a program for ``STEPS`` tiles of positions."""
    program = tl.program_id(0)
    if program > candidates:
        sum_tiles(
            program - candidates - 1, tiles, slot, slot_width, grad, width, first_sample, rows_here, keys, bags, scales, places,
            meta, partials, rate, epsilon, factor, counters, control, report, count, last_key, batch, tables,
            STEPS, GROUPS, ARRIVED, DTYPE, BLOCK_D, TILE, KIND, SCALED, ALIGN,
        )  # fmt: skip
    elif COPIES or program == candidates:
        watch(
            signal_table,
            signals,
            counters,
            control,
            report,
            rank,
            candidates,
            WORLD_SIZE,
            True,
            COPIES,
        )
    else:
        push_groups(
            grad, plan, slot_table, signal_table, signals, control, report, counters,
            rank, rows_here, first_sample, width, tickets, blocks, silent, candidates,
            WORLD_SIZE, ROWS, COLS, PUSH_ALIGN, EVERY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def poison_kernel(slot, control, size, BLOCK: tl.constexpr):
    """Behind a push alone: after a time-out nothing that the slot holds may pass for right."""
    if faulted(control) != 0:
        poison(slot, size, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def refuse_kernel(signals, control, report, rank, WORLD_SIZE: tl.constexpr):
    """Behind the last reader of what copy engines brought: see :func:`refuse_gone`."""
    refuse_gone(signals, rank, load_epoch(control) - 1, control, report, WORLD_SIZE)


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that is about to leave: all that a launch needs but for the sums.

    grad : here. plan : pieces of all owners, by group, see :func:`push_block`; silent : bits of groups that have none.
    slot : [B, sum of own dims], where peers' gradients arrive. columns : first one in ``grad`` of each of this rank's tables.
    first_sample : of this rank, among all. aligned : elements that columns and dims are multiples of (16 bytes), else 1.
    candidates : programs that may push; none by copy engines, which ``beside`` sets off around a launch.
    """

    peers: Endpoint
    grad: torch.Tensor
    plan: torch.Tensor
    silent: int
    slot: torch.Tensor
    columns: tuple[int, ...]
    first_sample: int
    aligned: int
    rank: int
    world_size: int
    candidates: int
    beside: Callable[[Callable[[], None]], None] | None = None

    def arrived(self) -> torch.Tensor:
        """The counter on which sums wait."""
        return self.peers.counters[ARRIVED.value :]

    def launch(self, summing: int = 0, sums: Sequence[object] = (), **options: Any) -> None:
        """On the current stream. ``sums``: arguments of ``sum_rows`` from the slot on, for ``summing`` programs; behind them
        ``sum_runs`` has to set the counter ``ARRIVED`` to zero."""
        if self.beside is None:
            self._launch(summing, sums, options)
        else:
            self.beside(lambda: self._launch(summing, sums, options))

    def launch_alone(self) -> None:
        """:meth:`launch` for others that read the slot; :meth:`end_alone` behind them."""
        self.launch()
        if self.slot.numel():
            poison_kernel[(1,)](self.slot, self.peers.control, self.slot.numel(), BLOCK=1024)

    def end_alone(self) -> None:
        """What was read is right, or a time-out is reported."""
        if self.beside is not None:
            peers = self.peers
            refuse_kernel[(1,)](
                peers.signals, peers.control, peers.report, self.rank, WORLD_SIZE=self.world_size
            )

    def _launch(self, summing: int, sums: Sequence[object], options: dict[str, Any]) -> None:
        peers, (rows, width) = self.peers, self.grad.shape
        blocks = triton.cdiv(rows, ROWS)
        tickets = self.plan.shape[0] * blocks
        silent = self.silent if tickets else (1 << GROUPS.value) - 1
        candidates = 0
        if self.beside is None:
            candidates = max(
                1, min(tickets, self.candidates if summing else self.candidates // 8)
            )  # alone: of four warps
        common = (
            self.grad, self.plan, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
            peers.counters, self.rank, rows, self.first_sample, width, tickets, max(blocks, 1), silent, candidates,
        )  # fmt: skip
        shape = {"WORLD_SIZE": self.world_size, "ROWS": ROWS, "COPIES": self.beside is not None}
        if summing:
            shape |= {
                "COLS": COLS * options["num_warps"],
                "PUSH_ALIGN": self.aligned,
                "EVERY": EVERY,
            }
            push_and_sum_kernel[(candidates + 1 + summing,)](*common, *sums, **shape, **options)
        else:
            push_gradient_kernel[(candidates + 1,)](
                *common, **shape, COLS=COLS, ALIGN=self.aligned, num_warps=4
            )
