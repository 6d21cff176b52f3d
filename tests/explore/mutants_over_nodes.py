"""Faults planted in matmuls whose chunks travel between nodes; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AG, AR, RS, Mutant

OVER = "ops/matmul/over_nodes.py"
GATHER, SCATTER, REDUCE = AG + "over nodes", RS + "over nodes", AR + "over nodes"
_SUMS = (
    "            for node in ways.others:\n"
    "                _sum_in_node(ways, owned[node, :, begin_:end], w, None, sums[node])\n"
)
_BEGIN = "            wait = ways.rail.begin(_bind(ways.rail.all_to_all, arrived, sums))\n"
_GATHERED = "own, target, wait = traveling\n    wait()\n"


MUTANTS: tuple[Mutant, ...] = (
    # --- all-gather ---
    Mutant(
        "a chunk of another node is multiplied before it arrived",
        OVER,
        "arrived, wait in arriving:\n            wait()",
        "arrived, wait in arriving:\n            pass",
        GATHER,
    ),
    Mutant(
        "chunks of another node are stored as the first",
        OVER,
        "place = places[node, :, begin_:end]",
        "place = places[node, :, : end - begin_]",
        GATHER,
    ),
    Mutant(
        "the first rows of x travel each time",
        OVER,
        "arrived, x[begin_:end])",
        "arrived, x[: end - begin_])",
        GATHER,
    ),
    Mutant(
        "chunks arrive in the memory of the first",
        OVER,
        "arrived = x.new_empty(ways.nodes, end - begin_, x.shape[1])",
        "count = ways.nodes * (end - begin_) * x.shape[1]\n"
        "            arrived = x.new_empty(ways.nodes, end - begin_, x.shape[1]) if not arriving "
        "else arriving[0][2].view(-1)[:count].view(ways.nodes, end - begin_, x.shape[1])",
        GATHER,
    ),
    Mutant(
        "gathered chunks of another node are stored as the first",
        OVER,
        "kept[node, :, begin_:end]",
        "kept[node, :, : end - begin_]",
        GATHER + ", gathered",
    ),
    Mutant(
        "rows of a node in the places of its other ranks",
        OVER,
        "            use(index, part)\n",
        "            use(-1 - index, part)\n",
        GATHER,
    ),
    # --- reduce-scatter ---
    Mutant(
        "node sums are added before they arrived",
        OVER,
        "arrived, wait in traveling:\n            wait()",
        "arrived, wait in traveling:\n            pass",
        SCATTER,
    ),
    Mutant("node sums travel before they are made", OVER, _SUMS + _BEGIN, _BEGIN + _SUMS, SCATTER),
    Mutant(
        "node sums of all chunks in the same memory",
        OVER,
        _SUMS,
        "            if traveling:\n"
        "                sums = traveling[0][2].view(-1)[: sums.numel()].view_as(sums)\n" + _SUMS,
        SCATTER,
    ),
    Mutant(
        "node sums go to nodes in the reverse order",
        OVER,
        "None, sums[node]",
        "None, sums[-1 - node]",
        SCATTER,
    ),
    Mutant("each node sums the rows of the first", OVER, "owned[ways.node]", "owned[0]", SCATTER),
    Mutant(
        "the bias is added to each node sum",
        OVER,
        "w, None, sums[node]",
        "w, bias, sums[node]",
        SCATTER,
    ),
    Mutant(
        "of each rank of a node the rows of the first",
        OVER,
        "self.rows[begin // rows]",
        "self.rows[0]",
        SCATTER,
    ),
    # --- all-reduce ---
    Mutant(
        "node sums are used before they are reduced",
        OVER,
        _GATHERED,
        _GATHERED.replace("    wait()\n", ""),
        REDUCE,
    ),
    Mutant(
        "the bias is added once per node",
        OVER,
        "added.bias if first else None",
        "added.bias",
        REDUCE,
    ),
    Mutant(
        "rows that ranks do not share equally are left out",
        OVER,
        "[*chunks, slice(rows - each, rows)] if rows % each else chunks",
        "chunks",
        REDUCE,
    ),
    Mutant(
        "sums of a node in the places of its other ranks",
        OVER,
        "places[index].copy_(part)",
        "places[-1 - index].copy_(part)",
        REDUCE,
    ),
)
