"""embedding_bag_all_to_all: out[s, columns of t] = pooled bag (t, s) on the owner of sample s, in one launch, no copy.

    tables, indices, offsets   this rank's tables, the bags of the global batch B; see ``lookup.py``
    regions  [count, b, width] symmetric; a call's result is one of them and is handed to the user as it stands
    b                          samples of a rank: ceil(B / R), the last ranks fewer or none (``sharding.rows_of``)

Who writes, who reads. A program pools bags and stores the vectors straight into the rows of their samples and the columns of
their table, in the *region* that the owner of the samples has announced for this call. Every rank writes its own columns
of every region; the owner's later kernels read it.

====================  =====  =====================================  ===================================================
signal (int32)        value  notifier                               waiter
====================  =====  =====================================  ===================================================
[source, READY]       epoch  program 0 of ``source``, behind the    programs about to store to ``source`` for the first
                             number of its region in [source,       time in this call; a rank that stores nothing, before
                             REGION]                                it says that it is done
[source, DONE]        epoch  ``source``'s program that is the last  the last program, before it leaves
                             to have stored to peers
====================  =====  =====================================  ===================================================

    rank r    | announce | pool | ready? store to r+1 | r+2 | r+3 | own | r+1 | r+2 | ... | done | own | done of all? | leave

After a fault DONE carries the epoch before, so that nobody takes what was not stored for done (``call_done``).

Why nothing is overwritten: a rank announces a region in call n that is in nobody's hands, behind all that was queued
before call n, hence behind the last reader of the region (``transport/regions.py``); peers store to it only after they saw
that. [REGION] at a peer is rewritten in call n+1, which begins after DONE of call n came from that peer, hence after its last
use. So a result may be held for as long as one likes, and a captured graph may have its region frozen.

Why nobody is stuck: program 0 announces before it waits for anybody; all waits are for other ranks, and READY depends on no
wait. DONE of a rank needs all its programs to have passed their last store, and only the last one waits for DONE.

Order: tickets are handed out one by one, so long bags are balanced; they alternate between peers, own blocks between them,
``lag`` rounds later, so that links and memory work all the time and the last stores travel beside own work.

After a time-out the last program to leave writes NaN over the result: a fault ends all waits, so others may still store own
blocks when the last program has heard it. Columns of a peer that comes when it is no longer waited for may land on top.

Limits: one dtype for all tables.
Sources: fused operators (arXiv 2305.06942) for remote-first stores into place; a ticket counter as in stream-ordered queues.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.device.triton.remote import symm_at
from tileweave.device.triton.signal import (
    MAX_SLICES,
    MEETING_US,
    advance,
    call_done,
    faulted,
    last_to_leave,
    load_epoch,
    notify_all,
    poison,
    wait,
)
from tileweave.kernels.embedding.lookup import block_at, pool_bags, store_bags, table_at
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.sharding import EmbeddingConfig, rows_of

READY, DONE, REGION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TICKETS, PASSED = (
    tl.constexpr(0),
    tl.constexpr(1),
)  # counters of a call, in one of two sets by parity of the epoch
COUNTERS = 4
POISON_BLOCK = tl.constexpr(1024)


@triton.jit
def announce(signal_table, counters, rank, region, epoch, WORLD_SIZE: tl.constexpr):
    """Program 0: tell every peer where this call's result stands, and clear the counters of the next call."""
    tl.store(counters + (1 - (epoch & 1)) * 2 + TICKETS, 0)
    tl.store(counters + (1 - (epoch & 1)) * 2 + PASSED, 0)
    for step in tl.static_range(1, WORLD_SIZE):
        word = (
            symm_at(signal_table, (rank + step) % WORLD_SIZE, tl.int32, 4)
            + rank * MAX_SLICES
            + REGION
        )
        tl.store(word, region)
    notify_all(signal_table, rank * MAX_SLICES + READY, rank, epoch, WORLD_SIZE, False)


@triton.jit
def count_passed(
    signal_table, control, counters, rank, epoch, num_programs, WORLD_SIZE: tl.constexpr
):
    """This program stores nothing to peers any more; the last of all to say so signals DONE (``call_done``)."""
    tl.debug_barrier()
    if (
        tl.atomic_add(counters + (epoch & 1) * 2 + PASSED, 1, sem="acq_rel", scope="gpu")
        == num_programs - 1
    ):
        notify_all(
            signal_table,
            rank * MAX_SLICES + DONE,
            rank,
            call_done(control, epoch),
            WORLD_SIZE,
            False,
        )


UNSPECIALIZED = ["rank", "region", "num_indices", "tables", "blocks", "run", "lag", "rows_here"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def embedding_bag_all_to_all_kernel(
    meta, indices, offsets, weights, regions, slot_table, signal_table, signals, control, report, counters,
    rank, region, region_size, num_indices, batch, chunk, tables, blocks, run, lag, width, rows_here,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BAGS: tl.constexpr,
    UNROLL: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Take tickets, pool, store; see the module's docstring for the protocol.

    ``chunk``: samples of a rank but for the last ones, in ``blocks`` of BAGS. ``run``: see ``block_at``. ``lag``: rounds by
    which own blocks are later; a *round* is a ticket for each rank. ``rows_here``: own samples. ``region_size``: elements.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    if program == 0:
        announce(signal_table, counters, rank, region, epoch, WORLD_SIZE)
    tickets = counters + (epoch & 1) * 2 + TICKETS
    rounds = tables * blocks
    total = (rounds + lag) * WORLD_SIZE
    awaited = tl.cast(0, tl.int32)  # bit p: peer p is ready; bit 30: a wait ran out of time
    passed = tl.cast(0, tl.int32)
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        following = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        if (passed == 0) & (ticket >= rounds * WORLD_SIZE):
            count_passed(signal_table, control, counters, rank, epoch, num_programs, WORLD_SIZE)
            passed += 1
        step = ticket % WORLD_SIZE
        peer = (rank + 1 + step) % WORLD_SIZE
        block = ticket // WORLD_SIZE
        if peer == rank:
            block -= lag
        if (block >= 0) & (block < rounds):
            table, block = block_at(block, tables, blocks, run)
            sample = block * BAGS  # among the peer's
            count = tl.minimum(tl.minimum(chunk, batch - peer * chunk) - sample, BAGS)
            base, rows, dim, column = table_at(meta, table, DTYPE, ALIGN)
            first = table.to(tl.int64) * batch + peer * chunk + sample
            first = tl.minimum(
                first, table.to(tl.int64) * batch + batch
            )  # where the last ranks own no samples
            acc = pool_bags(
                base, rows, dim, indices, offsets, weights, num_indices, first, count,
                BLOCK_D, BAGS, UNROLL, MEAN, WEIGHTED,
            )  # fmt: skip
            place = region
            if peer != rank:
                if (awaited >> peer) & 1 == 0:
                    wait(
                        signals,
                        1,
                        epoch,
                        peer * MAX_SLICES + READY,
                        ticket,
                        control,
                        report,
                        MEETING_US,
                    )
                    awaited = awaited | (1 << peer)
                    if faulted(control) != 0:  # where its region is, nobody knows
                        awaited = awaited | (1 << 30)
                place = tl.load(signals + peer * MAX_SLICES + REGION, volatile=True)
                if awaited >= 1 << 30:
                    count = count * 0
            out = (
                symm_at(slot_table, peer, regions.dtype.element_ty, 16)
                + place.to(tl.int64) * region_size
            )
            store_bags(acc, out, sample, count, width, column, dim, BLOCK_D, BAGS)
        ticket = following
    if total == 0:  # no store finds out whether peers come, and who has given up is not done
        for step in tl.static_range(1, WORLD_SIZE):
            wait(
                signals,
                1,
                epoch,
                (rank + step) % WORLD_SIZE * MAX_SLICES + READY,
                -1,
                control,
                report,
                MEETING_US,
            )
    if passed == 0:
        count_passed(signal_table, control, counters, rank, epoch, num_programs, WORLD_SIZE)
    if program == num_programs - 1:
        for step in tl.static_range(1, WORLD_SIZE):
            source = (rank + step) % WORLD_SIZE
            wait(signals, 1, epoch, source * MAX_SLICES + DONE, -1, control, report)
    if last_to_leave(control, num_programs):
        fault = faulted(control)
        if fault != 0:  # own blocks are stored here until the last program leaves
            poison(
                regions + tl.cast(region, tl.int64) * region_size,
                rows_here.to(tl.int64) * width,
                POISON_BLOCK,
            )
        advance(control, epoch, fault)


WORDS = (
    "meta",
    "indices",
    "offsets",
    "weights",
    "region",
    "num_indices",
)  # what changes between launches of one shape


class Launcher:
    """One shape's launches, kept between calls: Triton's own path takes the host as long as the kernel takes the device.

    ``made``: what ``embedding_lookup.constants`` says of ``count`` tables; ``peers.slots`` are the regions.
    """

    def __init__(
        self, peers: Peers, made: dict[str, Any], count: int, batch: int, width: int, mean: bool, rank: int, world_size: int,
        num_sms: int, config: EmbeddingConfig,
    ) -> None:  # fmt: skip
        begin, end = rows_of(batch, world_size, rank)
        chunk = rows_of(batch, world_size, 0)[1]
        blocks = triton.cdiv(chunk, config.bags)
        rounds = count * blocks
        self.programs = max(1, min(num_sms * config.programs_per_sm, rounds * world_size))
        self.peers, self.rank, self.made = peers, rank, made
        self.sizes = (
            batch,
            chunk,
            count,
            blocks,
            config.run_of(blocks),
            min(config.lag, rounds),
            width,
            end - begin,
        )
        self.constants = (
            world_size,
            *(made[name] for name in ("DTYPE", "ALIGN", "BLOCK_D", "BAGS", "UNROLL")),
            mean,
        )
        options = {name: made[name] for name in ("num_warps", "num_stages")}
        self.launches = Launches(embedding_bag_all_to_all_kernel, WORDS, **options)

    def __call__(
        self,
        meta: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        region: int,
    ) -> None:
        """Launch on the current stream. ``region``: where this rank's rows land."""
        held = (meta, indices, offsets, indices if weights is None else weights)
        words, number = tuple(t.data_ptr() for t in held), indices.numel()
        variant = (number < 2**31, *(at % 16 == 0 for at in words))  # what Triton specialises for

        def arguments() -> tuple[object, ...]:
            p = self.peers
            return (
                *held, p.slots, p.slot_table, p.signal_table, p.signals, p.control, p.report, p.counters,
                self.rank, region, p.slot_size, number, *self.sizes, *self.constants, weights is not None,
            )  # fmt: skip

        self.launches(self.programs, variant, arguments, (*words, region, number))
