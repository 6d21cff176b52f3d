"""The all-gather of ``all_gather_matmul`` where ranks are on several nodes: what crosses between
nodes, and what copy engines push inside them. The kernel is that of one node
(``kernels/all_gather/triton.py``), which waits for a chunk of a source where it waited for a shard.

N nodes of L ranks. Rank (a, l) is number l of node a. Its *rail* is ranks (b, l) of all nodes b.

    network       chunk c of x to (b, l) for all other nodes b, and chunk c of (b, l) into the own
                  slot; then word [(b, l), c] of the own signals, then ``here[b, c]``
    copy engine   chunk c of x to the own node, each followed by its signal; then chunk c of (b, l),
                  from the own slot to the other ranks of the node, when ``here[b, c]`` is set

==================  =====  ====================================  ===================================
word (int32)        value  notifier                              waiter
==================  =====  ====================================  ===================================
[source, c]         epoch  copy engine of ``source``, if on      tiles with rows of that chunk
                           this node; else of the rank of its
                           rail here, or the own network
[met, source]       epoch  program 0 of ``source``; for a rank   program 0
                           of another node this rank itself
counter [gate]      1      program 0, when the ranks of the      own copy engine, before its first
                           node have met                         push
counter [here b c]  1      own network                           own copy engine, before it pushes
                                                                 that chunk on
[pushed] (own)      epoch  own copy engine, after its last push  the last program
==================  =====  ====================================  ===================================

Why no slot is overwritten: memory of a rank is written by the copy engines of its node and by its
own network. The first are as on one node: the ranks of a node meet in every call before they push,
so each has ended the last call, and they wait for each other's signals. The second is queued by
this rank, after its last call ended, and its call ends after it. What copy engines read in the own
slot, the network wrote in this call (``here``); the last of them comes before [pushed], and so
before the end of the call. The network reads x, and the call ends after that, too.

Why no rank waits for ever: the network waits for the other ranks of the rail to begin their
networks, which they do when they make the call, before they wait for anything. Copy engines wait
for the meeting of the node, which waits for calls only, and then for the own network. Tiles wait
for networks and copy engines. So the order is call, network, copy engine, tile, and nothing waits
against it. A rank that does not come is a time-out of the kernel; the exchanges of its rail end by
themselves or are left (``transport/rail.py``).

``here`` is set back to 0 by the copy engine's last copies but one: the network writes it again in
the next call only, and nothing else reads it.

Chunks: parts of whole tiles, at most ``MatmulConfig.num_slices``. Tiles of other nodes are computed
chunk by chunk (``TileSchedule.per_node``), since all sources of another node arrive at the same
time, each over its own rail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tileweave.errors import require
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import Parts, TileSchedule, cdiv, slot_place
from tileweave.planning.topology import Topology
from tileweave.transport.interface import Copies, Copy, Crossing
from tileweave.transport.lasting_memory import lasting
from tileweave.transport.workspace import Instance


def parts_over_nodes(
    schedule: TileSchedule, config: MatmulConfig, ranks: Topology, depth: int
) -> Parts:
    """The layout of the shards, with the chunks that travel by themselves."""
    require(
        ranks.nodes > 1 and ranks.per_node > 0 and config.kernel == "triton",
        f"the path between nodes by {config.kernel} kernel in a group of {ranks}",
        "nodes of equally many ranks, which follow each other, and the triton kernel",
        "let the operator plan its call",
    )
    rows = schedule.chunk_tiles * config.tile_m
    count = cdiv(schedule.rows, rows)
    return Parts(schedule.rank, schedule.world_size, depth, depth, chunk_rows=rows, chunks=count)


def counters_over_nodes(ranks: Topology, chunks: int) -> int:
    """Counters that :func:`push_over_nodes` needs, besides those of the kernel."""
    return (ranks.nodes - 1) * chunks + 1


def push_over_nodes(
    instance: Instance, gate: int, schedule: TileSchedule, parts: Parts, itemsize: int, slot: int
) -> tuple[Copies, Crossing]:
    """What copy engines push in a call, and what crosses between nodes, for one of the slots.

    gate : the number of the counter that holds copies back until the ranks of the node have met;
        those of :func:`counters_over_nodes` follow it.
    """
    ranks, rank, size = instance.transport.topology, parts.rank, parts.world_size
    width = parts.depth * itemsize
    step, end = parts.chunk_rows * width, schedule.rows * width
    chunks = [(begin, min(begin + step, end)) for begin in range(0, end, step)]
    mates = _next_first(ranks.near(rank), rank)
    far = [source for source in ranks.rail(rank) if source != rank]

    def place(at: int, source: int) -> int:
        """Where the shard of ``source`` begins, in bytes from the first slot of rank ``at``."""
        index = slot_place(at, source, size, spans_shards=False)
        return slot * instance.slot_bytes + index * schedule.rows * width

    def push(source: int, chunk: int, counter: int = 0) -> list[Copy]:
        """A chunk to the other ranks of the node: of x, or of what arrived in the own slot, when
        ``counter`` says so."""
        begin, end = chunks[chunk]
        arrived = instance.slot_addresses[rank] + place(rank, source) + begin if counter else 0
        found = []
        for mate in mates:
            target = instance.slot_addresses[mate] + place(mate, source) + begin
            offset = 0 if arrived else begin
            found.append(Copy(target, arrived, end - begin, offset, counter, int(counter > 0)))
            found.append(instance.signal_copy(mate, instance.layout.data(source, chunk)))
        return found

    first = instance.counters.data_ptr() + 4 * (gate + 1)
    here = {
        (source, chunk): first + 4 * (node * len(chunks) + chunk)
        for node, source in enumerate(far)
        for chunk in range(len(chunks))
    }
    zero, one = first + 4 * len(here), _one(instance)
    copies = [copy for chunk in range(len(chunks)) for copy in push(rank, chunk)]
    for chunk in range(len(chunks)):
        for source in far:
            copies += push(source, chunk, here[source, chunk])
    # where a node has one rank nothing is pushed on, but the next call must find zeros
    copies += [Copy(word, zero, 4, counter=word, count=1) for word in here.values()]
    copies.append(instance.signal_copy(rank, instance.layout.pushed))
    # where nothing is pushed, the end waits for the gate, since the last program closes it again
    first_push = 0 if mates else -1
    opened = instance.counters.data_ptr() + 4 * gate
    copies[first_push] = replace(copies[first_push], counter=opened, count=1)
    slots = instance.slots
    targets = tuple(
        tuple(slots[place(rank, source) + begin : place(rank, source) + end] for source in far)
        for begin, end in chunks
    )
    arrived = tuple(
        tuple(
            word
            for source in far
            for word in (
                instance.signal_copy(rank, instance.layout.data(source, chunk)),
                Copy(here[source, chunk], one, 4),
            )
        )
        for chunk in range(len(chunks))
    )
    return Copies(copies), Crossing(tuple(chunks), targets, arrived)


def _next_first(ranks: Sequence[int], rank: int) -> list[int]:
    """``ranks`` without this one, those after it first, so that no rank has two senders at a
    time."""
    at = ranks.index(rank)
    return [*ranks[at + 1 :], *ranks[:at]]


def _one(instance: Instance) -> int:
    """The address of a word that is 1."""
    found = instance.cache.get("one")
    if found is None:
        device = instance.transport.device
        found = lasting(lambda: torch.ones(1, dtype=torch.int32, device=device), device)
        instance.cache["one"] = found
    assert isinstance(found, torch.Tensor), "no other value has that key"
    return found.data_ptr()
