"""embedding_bag_all_to_all: out[s, columns of t] = pooled bag (t, s) on the owner of sample s.

One launch, and no copy of the result.

    tables, indices, offsets   this rank's tables, the bags of the global batch B; see ``lookup.py``
    regions [count, b, width]  symmetric; a call's result is one of them, and the user gets it
    b                          samples of a rank: ceil(B / R), the last ranks fewer or none
                               (``sharding.rows_of``)

Which rank writes, and which reads: a program pools bags and stores the vectors into the rows of
their samples and the columns of their table, in the *region* that the owner of the samples has
announced for this call. Every rank writes its own columns of every region; later kernels of the
owner read it.

================  =====  ==============================  =====================================
signal (int32)    value  notifier                        waiter
================  =====  ==============================  =====================================
[source, READY]   epoch  program 0 of ``source``, after  programs about to store to ``source``
                         the number of its region in     for the first time in this call; a
                         [source, REGION]                rank that stores nothing, before it
                                                         says that it is done
[source, DONE]    epoch  the last program of ``source``  the last program, before it leaves
                         to have stored to peers
================  =====  ==============================  =====================================

    rank r | announce | pool | ready? store to r+1 | r+2 | r+3 | own | ... | done | own | done of
    all?

After a fault DONE carries the epoch before, so that no rank takes what was not stored for done
(``call_done``).

Why nothing is overwritten: the region that a rank announces in call n is held by no caller, and it
is announced after all that was queued before call n, hence after the last reader of the region
(``transport/regions.py``). Peers store to it only after they saw that. [REGION] at a peer is
written again in call n+1, which begins after DONE of call n came from that peer, hence after its
last use. So a result may be held for as long as the caller likes, and a captured graph may have its
region frozen.

Why no rank waits for ever: program 0 announces before it waits; all waits are for other ranks, and
READY depends on no wait. DONE of a rank needs all its programs to have passed their last store, and
only the last one waits for DONE.

Order: tickets are handed out one by one, so that long bags are balanced. They alternate between
peers, with own blocks between them, ``lag`` rounds later, so that links and memory work all the
time and the last stores travel concurrently with own work.

After a time-out the last program to leave writes NaN over the result: a fault ends all waits, so
others may still store own blocks when the last program has seen it. A peer that comes after this
rank has given up may still store its columns over these NaN.

Limits: one dtype for all tables. Sources: fused operators (arXiv 2305.06942) for remote-first
stores into place; a ticket counter as in stream-ordered queues.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import (
    advance,
    call_done,
    faulted,
    last_to_leave,
    load_epoch,
    notify_all,
    signals_at,
    slots_at,
    wait,
)
from tileweave.device.triton.signal import MAX_SLICES, MEETING_US, poison
from tileweave.kernels.embedding.lookup import (
    Bags,
    Compiled,
    block_at,
    pool_bags,
    store_bags,
    table_at,
)
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.sharding import EmbeddingConfig

READY, DONE, REGION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# counters of a call, in one of two sets by parity of the epoch
TICKETS, PASSED = tl.constexpr(0), tl.constexpr(1)
COUNTERS = 4
POISON_BLOCK = tl.constexpr(1024)


class Samples(NamedTuple):
    """Sizes of a call: bags of a table, samples of a rank but for the last ones, the columns of the
    result, and samples of the first of these ranks and all later ones."""

    batch: Any
    chunk: Any
    width: Any
    there: Any


@triton.jit
def announce(peers, rank, region, epoch, WORLD_SIZE: tl.constexpr):
    """Program 0: tell every peer which region this call's result has, and clear the counters of the
    next call."""
    tl.store(peers.counters + (1 - (epoch & 1)) * 2 + TICKETS, 0)
    tl.store(peers.counters + (1 - (epoch & 1)) * 2 + PASSED, 0)
    for step in tl.static_range(1, WORLD_SIZE):
        signals = signals_at(peers, (rank + step) % WORLD_SIZE)
        tl.store(signals + rank * MAX_SLICES + REGION, region)
    notify_all(peers, rank * MAX_SLICES + READY, rank, epoch, WORLD_SIZE, False)


@triton.jit
def count_passed(peers, rank, epoch, num_programs, WORLD_SIZE: tl.constexpr):
    """This program stores nothing to peers any more; the last one of all signals DONE
    (``call_done``)."""
    tl.debug_barrier()
    counter = peers.counters + (epoch & 1) * 2 + PASSED
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        index = rank * MAX_SLICES + DONE
        notify_all(peers, index, rank, call_done(peers, epoch), WORLD_SIZE, False)


UNSPECIALIZED = ["rank", "region", "num_indices", "tables", "blocks", "run", "lag", "rows_here"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def embedding_bag_all_to_all_kernel(
    bags,
    peers,
    rank,
    region,
    num_indices,
    samples,
    tables,
    blocks,
    run,
    lag,
    rows_here,
    WORLD_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Take tickets, pool, store; see the module's docstring for the protocol.

    ``peers.slots`` are the regions. Samples of a rank are in ``blocks`` of BAGS. ``run``: see
    ``block_at``. ``lag``: rounds by which own blocks are later; a *round* is a ticket for each
    rank. ``rows_here``: own samples.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    if program == 0:
        announce(peers, rank, region, epoch, WORLD_SIZE)
    tickets = peers.counters + (epoch & 1) * 2 + TICKETS
    rounds = tables * blocks
    total = (rounds + lag) * WORLD_SIZE
    awaited = tl.cast(0, tl.int32)  # bit p: peer p is ready; bit 30: a wait timed out
    passed = tl.cast(0, tl.int32)
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        following = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        if (passed == 0) & (ticket >= rounds * WORLD_SIZE):
            count_passed(peers, rank, epoch, num_programs, WORLD_SIZE)
            passed += 1
        step = ticket % WORLD_SIZE
        peer = (rank + 1 + step) % WORLD_SIZE
        block = ticket // WORLD_SIZE
        if peer == rank:
            block -= lag
        if (block >= 0) & (block < rounds):
            number, block = block_at(block, tables, blocks, run)
            sample = block * C.BAGS  # among the peer's
            count = tl.minimum(samples.chunk, samples.there - peer * samples.chunk)
            count = tl.minimum(count - sample, C.BAGS)
            table = table_at(bags.meta, number, DTYPE, C.ALIGN)
            first = number.to(tl.int64) * samples.batch + peer * samples.chunk + sample
            # where the last ranks own no samples
            first = tl.minimum(first, number.to(tl.int64) * samples.batch + samples.batch)
            acc = pool_bags(table, bags, num_indices, first, count, C)
            place = region
            if peer != rank:
                if (awaited >> peer) & 1 == 0:
                    wait(peers, peer * MAX_SLICES + READY, epoch, ticket, LIMIT=MEETING_US)
                    awaited = awaited | (1 << peer)
                    if faulted(peers) != 0:  # its region is not known
                        awaited = awaited | (1 << 30)
                place = tl.load(peers.signals + peer * MAX_SLICES + REGION, volatile=True)
                if awaited >= 1 << 30:
                    count = count * 0
            out = slots_at(peers, peer, peers.slots.dtype.element_ty)
            out += place.to(tl.int64) * peers.slot_size
            store_bags(acc, out, sample, count, samples.width, table, C)
        ticket = following
    # no store finds out whether peers come, and a rank that has given up is not done
    if total == 0:
        for step in tl.static_range(1, WORLD_SIZE):
            source = (rank + step) % WORLD_SIZE
            wait(peers, source * MAX_SLICES + READY, epoch, LIMIT=MEETING_US)
    if passed == 0:
        count_passed(peers, rank, epoch, num_programs, WORLD_SIZE)
    if program == num_programs - 1:
        for step in tl.static_range(1, WORLD_SIZE):
            source = (rank + step) % WORLD_SIZE
            wait(peers, source * MAX_SLICES + DONE, epoch)
    if last_to_leave(peers, num_programs):
        fault = faulted(peers)
        if fault != 0:  # own blocks are stored here until the last program leaves
            own = peers.slots + tl.cast(region, tl.int64) * peers.slot_size
            poison(own, rows_here.to(tl.int64) * samples.width, POISON_BLOCK)
        advance(peers, epoch, fault)


# what changes between launches of one shape
WORDS = (*(f"bags.{name}" for name in Bags._fields), "region", "num_indices")


def launcher(
    peers: Peers,
    rank: int,
    world_size: int,
    samples: Samples,
    tables: int,
    made: Compiled,
    mean: bool,
    num_sms: int,
    config: EmbeddingConfig,
) -> Launcher:
    """Launches for one shape, called with (meta, indices, offsets, weights or None, region): the
    region that this rank's rows are stored in.

    ``made``: what ``lookup.constants`` says of the tables.
    """
    here = max(min(samples.chunk, samples.there - rank * samples.chunk), 0)
    blocks = triton.cdiv(samples.chunk, config.bags)
    rounds = tables * blocks

    def pack(
        meta: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        region: int,
    ) -> Call:
        bags = Bags(meta, indices, offsets, indices if weights is None else weights)
        words, number = [t.data_ptr() for t in bags], indices.numel()

        def changing() -> dict[str, Any]:
            cut = made.cut._replace(MEAN=mean, WEIGHTED=weights is not None)
            return {"bags": bags, "region": region, "num_indices": number, "C": cut}

        # what Triton specialises for
        variant = (number < 2**31, weights is None, alignment(words))
        return variant, (*words, region, number), changing, ()

    fixed = {
        "peers": peers,
        "rank": rank,
        "samples": samples,
        "tables": tables,
        "blocks": blocks,
        "run": config.run_of(blocks),
        "lag": min(config.lag, rounds),
        "rows_here": here,
        "WORLD_SIZE": world_size,
        "DTYPE": made.dtype,
    }
    programs = max(1, min(num_sms * config.programs_per_sm, rounds * world_size))
    kernel = embedding_bag_all_to_all_kernel
    return Launcher(kernel, programs, fixed, pack, WORDS, **made.options)
