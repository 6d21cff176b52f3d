"""Faults planted in expert operators whose tokens cross once per node; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

OVER, PLAN = "ops/experts/over_nodes.py", "ops/experts/routing_plan.py"
DISPATCH, COMBINE = "dispatch_grouped_matmul/over nodes", "grouped_matmul_combine/over nodes"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "tokens of other nodes are used before they arrived",
        OVER,
        "all_gather(found, padded))()",
        "all_gather(found, padded))",
        DISPATCH,
    ),
    Mutant(
        "sums of other nodes are added before they arrived",
        OVER,
        "all_to_all(arrived, parts))()",
        "all_to_all(arrived, parts))",
        COMBINE,
    ),
    Mutant(
        "tokens are kept as of the node before",
        OVER,
        "tokens[begin + plan.max_tokens :]",
        "tokens[begin:others]",
        DISPATCH,
    ),
    Mutant(
        "own tokens in the place of the first node",
        OVER,
        "torch.cat([kept[:begin], padded, kept[begin:others]])",
        "torch.cat([padded, kept[:others]])",
        DISPATCH,
    ),
    Mutant(
        "the sum of the first node in place of the own",
        OVER,
        "own, tokens = parts[ways.node]",
        "own, tokens = parts[0]",
        COMBINE,
    ),
    Mutant(
        "experts of a node numbered as those of the first",
        PLAN,
        "ids = ids - node * near * local",
        "ids = ids - 0 * local",
        COMBINE,
    ),
    Mutant(
        "choices of the rank before in the node",
        PLAN,
        "[:, index].reshape(-1, topk)",
        "[:, index - 1].reshape(-1, topk)",
        DISPATCH,
    ),
    Mutant(
        "entries of the node keep their numbers",
        PLAN,
        "(source % near * nodes + source // near) * each",
        "source * each",
        DISPATCH,
    ),
    Mutant(
        "rows of entries in the order of all ranks",
        PLAN,
        "plan.entry_row.view(nodes, near, -1).transpose(0, 1)",
        "plan.entry_row.view(nodes, near, -1)",
        COMBINE,
    ),
    Mutant(
        "of two nodes the own part of what arrived is added",
        "ops/core/ways.py",
        "arrived[1 - node], out=out",
        "arrived[node], out=out",
        COMBINE,
    ),
)
