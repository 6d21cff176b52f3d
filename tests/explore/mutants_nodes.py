"""Faults planted in the all-gather between nodes; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AG, ARRIVALS, TILE, Mutant

CROSSING = "ops/matmul/gather_over_nodes.py"
NODES, GATHERED = AG + "nodes", AG + "nodes, gathered"
_DATA = (
    "            found.append("
    "Copy(target, arrived, end - begin, offset, counter, int(counter > 0)))\n"
)
_SIGNAL = (
    "            found.append(instance.signal_copy(mate, instance.layout.data(source, chunk)))\n"
)
_OWN = "copies = [copy for chunk in range(len(chunks)) for copy in push(rank, chunk)]"
_PUSHED = "instance.signal_copy(rank, instance.layout.pushed)"
_SET_BACK = "copies += [Copy(word, zero, 4, counter=word, count=1) for word in here.values()]"

MUTANTS: tuple[Mutant, ...] = (
    # --- pushed on inside the node ---
    Mutant(
        "a chunk is pushed on before it arrived",
        CROSSING,
        "counter, int(counter > 0)",
        "counter, 0",
        NODES,
    ),
    Mutant("a chunk's signal precedes it", CROSSING, _DATA + _SIGNAL, _SIGNAL + _DATA, NODES),
    Mutant(
        "a chunk is announced as the sender's own",
        CROSSING,
        "mate, instance.layout.data(source, chunk)",
        "mate, instance.layout.data(rank, chunk)",
        NODES,
    ),
    Mutant(
        "all chunks of a source have one signal",
        CROSSING,
        "mate, instance.layout.data(source, chunk)",
        "mate, instance.layout.data(source, 0)",
        NODES,
    ),
    Mutant(
        "a chunk in the place that it has at its sender",
        CROSSING,
        "[mate] + place(mate, source)",
        "[mate] + place(rank, source)",
        NODES,
    ),
    Mutant(
        "the first chunk is pushed on each time",
        CROSSING,
        "place(rank, source) + begin if counter",
        "place(rank, source) if counter",
        NODES,
    ),
    Mutant(
        "the first chunk of x is pushed each time",
        CROSSING,
        "offset = 0 if arrived else begin",
        "offset = 0",
        NODES,
    ),
    Mutant(
        "copies of a node that has not met", CROSSING, "counter=opened, count=1", "count=1", NODES
    ),
    Mutant(
        "the end is signalled before the first push",
        CROSSING,
        _OWN,
        _OWN.replace("= [", f"= [{_PUSHED}, *(").replace(")]", "))]"),
        NODES,
    ),
    # --- what the network announces ---
    Mutant(
        "chunks are announced under one signal",
        CROSSING,
        "signal_copy(rank, instance.layout.data(source, chunk))",
        "signal_copy(rank, instance.layout.data(source, 0))",
        NODES,
    ),
    Mutant(
        "chunks are announced by one counter",
        CROSSING,
        "first + 4 * (node * len(chunks) + chunk)",
        "first + 4 * (node * len(chunks))",
        NODES,
    ),
    Mutant("counters are not set back", CROSSING, _SET_BACK, "pass", NODES),
    Mutant(
        "counters are set back before the network sets them",
        CROSSING,
        "Copy(word, zero, 4, counter=word, count=1)",
        "Copy(word, zero, 4)",
        NODES,
    ),
    Mutant(
        "chunks arrive in the place of the first",
        CROSSING,
        "slots[place(rank, source) + begin : place(rank, source) + end]",
        "slots[place(rank, source) : place(rank, source) + end - begin]",
        NODES,
    ),
    Mutant(
        "calls over nodes in one slot",
        CROSSING,
        "return slot * instance.slot_bytes + index",
        "return index",
        NODES,
    ),
    # --- who meets, and what waits ---
    Mutant(
        "a rank waits to meet those of other nodes",
        "transport/workspace.py",
        "own + 4 * (peer - rank)",
        "own",
        NODES,
    ),
    Mutant(
        "tiles wait for the first chunk only",
        ARRIVALS,
        "signal += (unit.first_row - source * rows) // chunk_rows",
        "signal += 0",
        NODES,
    ),
    Mutant(
        "tiles wait for the chunk before theirs",
        ARRIVALS,
        "(unit.first_row - source * rows) // chunk_rows",
        "(unit.first_row - source * rows) // (2 * chunk_rows)",
        NODES,
    ),
    Mutant(
        "the gathered input waits for first chunks only",
        ARRIVALS,
        "for chunk in range(num_chunks)",
        "for chunk in range(1)",
        GATHERED,
    ),
    # --- which tile ---
    Mutant(
        "tiles of all chunks are those of the first",
        TILE,
        "row = chunk * chunk_tiles + row % tall_source",
        "row = row % tall_source",
        NODES,
    ),
    Mutant(
        "tiles of this node twice",
        TILE,
        "step = per_node + 0 * tile",
        "step = 0 * tile",
        NODES,
    ),
)
