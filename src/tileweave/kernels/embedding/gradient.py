"""Backward of embedding_bag_all_to_all: rows of the result's gradient go to the tables' owners.

There they are summed while the next tables travel. Rank r stores the columns of owner p's tables,
for its own samples, into p's slot. Sums (``table_sums.py``) read them there, and those of their own
rank's samples where they were made:

    grad  [b, width]  gradient of the result, own samples
    slot  [B, D_p]    p's tables next to each other, all samples
    slot of p [first sample of r + s, columns of table t there] = grad of r [s, columns of t]

One launch. An owner's tables travel in ``GROUPS`` groups, in the order in which sorted positions
name them, the first table by itself. One program *watches* what comes; all others *sum*, some tiles
of positions each, when their table's group is there:

    carriers  | group 0 to r+1, r+2, r+3 | group 1 | ... | group 7 |
    watcher   group 0 of all here? | 1? | ... | 7? | leave
    sums           | tiles of group 0 | group 1 | ...                    || sum_runs_kernel

Two transports carry the gradient:

``"copy_engine"``  columns of a table, or of several that are adjacent, row after row; a signal
    after each group. The copies take no multiprocessor, and little time from sums: 485 us of sums
    take 530 concurrently with 335 us of copies (decision 0033).
``"sm"``  lower programs, the *candidates*. Those on every ``EVERY``-th multiprocessor push, and the
    ``LEAST`` lowest wherever they run; the others leave at once. Stores to peers that wait for
    a link hold up all loads and stores of their multiprocessor: pushed from all multiprocessors,
    gradients took as long during the sums as before them. Tickets are dealt, so any number of
    candidates may push. For pieces too small or too narrow for copy engines.

=================  =====  =====================================  =================================
word (int32)       value  written by                             waited for by
=================  =====  =====================================  =================================
[source, READY]    epoch  "sm": program 0 of ``source``          pushers about to store to
                                                                 ``source`` for the first time in
                                                                 this call; program 0 of a rank
                                                                 with no ticket
[met, source]      epoch  "copy_engine": the watcher of          the watchers of all, before
                          ``source``                             copies go
[source, DONE+g]   epoch  ``source``'s copy engine; "sm": the    the watcher, group by group
                          pusher that counts the last ticket of
                          group g, also to its own rank. Of a
                          group with no ticket, program 0; where
                          there is none at all, when every peer
                          is READY
counters[ARRIVED]  g + 1  the watcher: groups up to g of all     sums of tables of group g
                          sources are in this rank's slot
                   0      ``sum_runs_kernel``, after all sums    (the next call begins so)
counters[GATE]     1      the watcher, when all ranks have met   own copy engine, before its first
                                                                 copy
[pushed] (own)     epoch  own copy engine, after its last copy   the watcher, before gate and
                                                                 epoch move
=================  =====  =====================================  =================================

Counters of tickets dealt and stored are in two sets by parity of the epoch; program 0 clears that
of the next call.

One slot, at an address that the host knows: READY, or the meeting, of call n says that the kernels
which read the slot of call n-1 have ended, since they precede call n on the stream. Both are said
before any wait.

Why no rank waits for ever: pushers and program 0 wait for READY alone, which waits for nothing;
copies for the meeting; the watcher and the sums for lower programs, of which the ``LEAST`` lowest
push whatever the others do, for own copies, and for other ranks.

Where there are no sums (no lookup here, or gradients of weights, which need the tables as they
were), carriers and watcher run alone, and own rows go into the slot too. ``poison_kernel`` follows,
and after all that reads the slot ``refuse_kernel``.

After a time-out sums are NaN. Nothing is stored to peers and no group is said to be done, so their
waits time out as well; but copies go. A rank whose wait timed out tells all ranks, once and for all
(``or_gone``). A rank that has summed checks whether another one did so, since copies of that rank's
next call may have come too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import (
    await_all,
    await_pushed,
    call_done,
    come,
    faulted,
    leave,
    load_epoch,
    notify_all,
    or_gone,
    refuse_gone,
    slots_at,
    wait,
)
from tileweave.device.triton.signal import (
    MAX_SLICES,
    MEETING_US,
    count_in,
    multiprocessor,
    poison,
)
from tileweave.kernels.embedding.table_sums import Source, sum_tiles
from tileweave.kernels.runtime.peers import Peers

READY, DONE = tl.constexpr(0), tl.constexpr(1)
GROUPS = tl.constexpr(8)
# Counters. SET words for each parity of the epoch: tickets stored of each group, tickets dealt.
# After them the counters of the table above.
DEALT, SET = tl.constexpr(8), tl.constexpr(16)
ARRIVED, GATE, COUNTERS = tl.constexpr(32), tl.constexpr(33), 34
# a ticket is ROWS rows of a piece; COLS columns for each warp are moved at once
ROWS, COLS = 8, 128
# programs per multiprocessor that may push, of one warp each: twice as many as fit
CANDIDATES = 32
EVERY = 16  # one of so many multiprocessors pushes; the others are left to the sums
PIECE = tl.constexpr(7)  # words of a piece
LEAST = tl.constexpr(4)  # programs that push wherever they are


class Load(NamedTuple):
    """What a rank pushes.

    grad : [rows_here, width], own samples, the first of which is ``first_sample`` among all.

    plan : pieces of all owners, int64 [pieces, PIECE], see :func:`push_block`.

    tickets : of all pieces; ``blocks`` of each.

    silent : bits of groups without tickets.

    candidates : programs that may push.
    """

    grad: Any
    plan: Any
    rows_here: Any
    first_sample: Any
    width: Any
    tickets: Any
    blocks: Any
    silent: Any
    candidates: Any


class PushCut(NamedTuple):
    """Decided when the kernel is compiled.

    ROWS, COLS : rows of a ticket, columns that are moved at once.

    ALIGN : elements that columns and dims are multiples of.

    EVERY : one of so many multiprocessors pushes.

    COPIES : whether copy engines carry the gradient; then no program pushes.
    """

    WORLD_SIZE: int
    ROWS: int
    COLS: int
    ALIGN: int
    EVERY: int
    COPIES: bool


@triton.jit
def push_block(load, peers, piece, sample, rows_here, C: tl.constexpr):
    """One block of rows of one piece.

    ``piece``: its row of the plan, int64 [pieces, PIECE] = (owner, source column, target column,
    dim, slot width, group, pieces of that group).
    """
    ROWS: tl.constexpr = C.ROWS
    COLS: tl.constexpr = C.COLS
    ALIGN: tl.constexpr = C.ALIGN
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
    base = slots_at(peers, peer, load.grad.dtype.element_ty)
    row = sample + tl.arange(0, ROWS)
    for begin in range(0, dim, COLS):
        col = begin + tl.arange(0, COLS)
        mask = (row < rows_here)[:, None] & (col < dim)[None, :]
        here = load.grad + (row.to(tl.int64) * load.width)[:, None] + (source + col)[None, :]
        values = tl.load(here, mask=mask)
        sample_row = (load.first_sample + row).to(tl.int64)
        there = base + (sample_row * slot_width)[:, None] + (target + col)[None, :]
        tl.store(there, values, mask=mask)


@triton.jit
def count_group(peers, rank, group, tickets, all_tickets, epoch, WORLD_SIZE: tl.constexpr):
    """This program has stored ``tickets`` more of ``group``; the program that counts the last one
    tells every rank, if all are stored."""
    tl.debug_barrier()
    counter = peers.counters + (epoch & 1) * SET + group
    stored = tl.atomic_add(counter, tickets, sem="acq_rel", scope="gpu")
    if stored + tickets == all_tickets:
        index = rank * MAX_SLICES + DONE + group
        notify_all(peers, index, rank, call_done(peers, epoch), WORLD_SIZE, True)


@triton.jit
def push_tickets(load, peers, rank, epoch, C: tl.constexpr):
    """A pusher: tickets as they come, group by group, peers' pieces first."""
    dealt = peers.counters + (epoch & 1) * SET + DEALT
    rows_here = load.rows_here
    awaited = 1 << rank  # bit p: peer p is ready
    group = rank * 0
    stored = rank * 0  # tickets of ``group`` that no rank has been told of
    of_group = rank * 0
    ticket = tl.atomic_add(dealt, 1, sem="relaxed", scope="gpu")
    while ticket < load.tickets:
        following = tl.atomic_add(dealt, 1, sem="relaxed", scope="gpu")
        piece = load.plan + ticket // load.blocks * PIECE
        if tl.load(piece + 5).to(tl.int32) > group:
            if stored > 0:
                count_group(peers, rank, group, stored, of_group, epoch, C.WORLD_SIZE)
            group = tl.load(piece + 5).to(tl.int32)
            stored = rank * 0
        peer = tl.load(piece).to(tl.int32)
        if (awaited >> peer) & 1 == 0:
            wait(peers, peer * MAX_SLICES + READY, epoch, ticket, LIMIT=MEETING_US)
            awaited = awaited | (1 << peer)
            if faulted(peers) != 0:  # a rank that is late may still sum what is in its slot
                rows_here = rows_here * 0
        sample = ticket % load.blocks * C.ROWS
        push_block(load, peers, piece, sample, rows_here, C)
        stored += 1
        of_group = tl.load(piece + 6).to(tl.int32) * load.blocks
        ticket = following
    if stored > 0:
        count_group(peers, rank, group, stored, of_group, epoch, C.WORLD_SIZE)


@triton.jit
def push_groups(load, peers, rank, EVERY: tl.constexpr, C: tl.constexpr):
    """A candidate: it pushes if it runs on a multiprocessor that should, or is one of the
    lowest."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    program = tl.program_id(0)
    epoch = load_epoch(peers)
    if program == 0:
        other = peers.counters + (1 - (epoch & 1)) * SET
        tl.store(other + tl.arange(0, SET), tl.zeros((SET,), tl.int32))
        notify_all(peers, rank * MAX_SLICES + READY, rank, epoch, WORLD_SIZE, False)
        # no pusher finds out whether peers come, and a rank that has given up is not done
        if load.tickets == 0:
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                wait(peers, peer * MAX_SLICES + READY, epoch, -1, LIMIT=MEETING_US)
        for group in range(0, GROUPS):
            if (load.silent >> group) & 1 == 1:
                index = rank * MAX_SLICES + DONE + group
                notify_all(peers, index, rank, call_done(peers, epoch), WORLD_SIZE, True)
    if (program < LEAST) | (multiprocessor() % EVERY == 0):
        push_tickets(load, peers, rank, epoch, C)
    leave(peers, epoch, load.candidates + 1)


@triton.jit
def watch(peers, rank, candidates, SUMS: tl.constexpr, C: tl.constexpr):
    """The watcher: say to this device's sums which groups of all sources have come."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    epoch = load_epoch(peers)
    if C.COPIES:
        come(peers, rank, or_gone(peers, epoch), WORLD_SIZE)
        await_all(peers, rank, epoch, -1, WORLD_SIZE)
        if faulted(peers) != 0:  # before copies go: a peer may still read what they overwrite
            come(peers, rank, or_gone(peers, epoch), WORLD_SIZE)
        count_in(peers.counters + GATE)
    for group in range(0, GROUPS):
        for source in tl.static_range(WORLD_SIZE):
            if not C.COPIES:
                wait(peers, source * MAX_SLICES + DONE + group, epoch)
            elif source != rank:
                wait(peers, source * MAX_SLICES + DONE + group, epoch, EXACT=True)
        if SUMS:
            tl.atomic_xchg(peers.counters + ARRIVED, group + 1, sem="release", scope="gpu")
    if C.COPIES:
        await_pushed(peers, epoch, WORLD_SIZE)
        tl.store(peers.counters + GATE, 0)
    leave(peers, epoch, candidates + 1)


UNSPECIALIZED = ["rank", "rows_here", "first_sample", "tickets", "blocks", "silent", "candidates"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def push_gradient_kernel(
    grad,
    plan,
    peers,
    rank,
    rows_here,
    first_sample,
    width,
    tickets,
    blocks,
    silent,
    candidates,
    C: tl.constexpr,
):
    """Pushers and a watcher, and no sums; see :class:`Load`."""
    if C.COPIES or tl.program_id(0) >= candidates:
        watch(peers, rank, candidates, False, C)
    else:
        load = Load(grad, plan, rows_here, first_sample, width, tickets, blocks, silent, candidates)
        push_groups(load, peers, rank, 1, C)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "factor", "tables", "tiles"])
def push_and_sum_kernel(
    grad,
    plan,
    peers,
    rank,
    rows_here,
    first_sample,
    width,
    tickets,
    blocks,
    silent,
    candidates,
    slot,
    slot_width,
    positions,
    numbers,
    factor,
    tables,
    tiles,
    P: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Pushers of ``grad``, a watcher, and a program for each ``STEPS`` tiles of positions.

    P : how the gradient is pushed, a :class:`PushCut`.

    C : how it is summed, a ``table_sums.Cut``.
    """
    program = tl.program_id(0)
    if program > candidates:
        source = Source(slot, slot_width, grad, width, first_sample, rows_here)
        sum_tiles(
            program - candidates - 1,
            tiles,
            factor,
            source,
            positions,
            numbers,
            peers,
            tables,
            GROUPS,
            ARRIVED,
            DTYPE,
            C,
        )
    elif P.COPIES or program == candidates:
        watch(peers, rank, candidates, True, P)
    else:
        load = Load(grad, plan, rows_here, first_sample, width, tickets, blocks, silent, candidates)
        push_groups(load, peers, rank, P.EVERY, P)


@triton.jit(do_not_specialize=["size"])
def poison_kernel(slot, peers, size, BLOCK: tl.constexpr):
    """After a push alone: after a time-out nothing that the slot holds may pass for right."""
    if faulted(peers) != 0:
        poison(slot, size, BLOCK)


@triton.jit(do_not_specialize=["rank"])
def refuse_kernel(peers, rank, WORLD_SIZE: tl.constexpr):
    """After the last reader of what copy engines brought: see :func:`refuse_gone`."""
    refuse_gone(peers, rank, load_epoch(peers) - 1, WORLD_SIZE)


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that is about to leave: all that a launch needs but for the sums.

    grad : [b, width], on this rank.

    plan : pieces of all owners, by group, see :func:`push_block`.

    silent : bits of groups that have no pieces.

    slot : [B, sum of own dims], where peers' gradients arrive.

    columns : first column in ``grad`` of each of this rank's tables.

    first_sample : of this rank, among all.

    aligned : elements that columns and dims are multiples of (16 bytes), else 1.

    candidates : programs that may push; none where copy engines do.

    concurrently : starts the copies of copy engines around a launch; None: programs push.
    """

    peers: Peers
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
    concurrently: Callable[[Callable[[], None]], None] | None = None

    def arrived(self) -> torch.Tensor:
        """The counter on which sums wait."""
        return self.peers.counters[ARRIVED.value :]

    def launch(self, summing: int = 0, sums: Sequence[object] = (), **options: Any) -> None:
        """On the current stream. ``sums``: arguments of ``sum_rows`` from the slot on, for
        ``summing`` programs; after them ``sum_runs_kernel`` has to set the counter
        ``ARRIVED`` to zero."""
        if self.concurrently is None:
            self._launch(summing, sums, options)
        else:
            self.concurrently(lambda: self._launch(summing, sums, options))

    def launch_alone(self) -> None:
        """:meth:`launch` for others that read the slot; :meth:`end_alone` follows them."""
        self.launch()
        if self.slot.numel():
            poison_kernel[(1,)](self.slot, self.peers, self.slot.numel(), BLOCK=1024)

    def end_alone(self) -> None:
        """To be called after the last reader of the slot: what was read is right, or a time-out is
        reported."""
        if self.concurrently is not None:
            refuse_kernel[(1,)](self.peers, self.rank, WORLD_SIZE=self.world_size)

    def _launch(self, summing: int, sums: Sequence[object], options: dict[str, Any]) -> None:
        rows, width = self.grad.shape
        blocks = triton.cdiv(rows, ROWS)
        tickets = self.plan.shape[0] * blocks
        silent = self.silent if tickets else (1 << GROUPS.value) - 1
        copies = self.concurrently is not None
        candidates = 0
        if not copies:  # alone they have four warps each
            most = self.candidates if summing else self.candidates // 8
            candidates = max(1, min(tickets, most))
        common = (
            self.grad,
            self.plan,
            self.peers,
            self.rank,
            rows,
            self.first_sample,
            width,
            tickets,
            max(blocks, 1),
            silent,
            candidates,
        )
        if summing:
            cols = COLS * options["num_warps"]
            cut = PushCut(self.world_size, ROWS, cols, self.aligned, EVERY, copies)
            push_and_sum_kernel[(candidates + 1 + summing,)](*common, *sums, P=cut, **options)
        else:
            cut = PushCut(self.world_size, ROWS, COLS, self.aligned, 1, copies)
            push_gradient_kernel[(candidates + 1,)](*common, C=cut, num_warps=4)
