"""Faults planted in embeddings whose vectors and gradients cross between nodes in slices; see
``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

OVER, BACK = "ops/embedding/over_nodes.py", "ops/embedding/gradient_over_nodes.py"
FUSED, SUMS = "ops/embedding/bag_all_to_all_fused.py", "ops/embedding/table_gradient.py"
FORWARD = "embedding_bag_all_to_all/over nodes"
BACKWARD = "embedding_bag_all_to_all_backward/over nodes"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("vectors are placed before they arrived", OVER, "each.wait()", "each.wait", FORWARD),
    Mutant(
        "samples after the node are pooled as those of it",
        OVER,
        "_pool(call, mine, places, end, x[begin:], config)",
        "_pool(call, mine, places, begin, x[begin:], config)",
        FORWARD,
    ),
    Mutant(
        "the node ends with the samples of its first rank",
        OVER,
        "rows[near[-1]][1]  # samples of this node",
        "rows[near[0]][1]",
        FORWARD,
    ),
    Mutant(
        "bags of the first table in each slice",
        OVER,
        "call.offsets[mine.start * call.batch + begin :]",
        "call.offsets[begin:]",
        FORWARD,
    ),
    Mutant(
        "vectors of a slice in the columns of the first",
        OVER,
        "zip(starts[which], dims[which], strict=True)",
        "zip(starts[: len(dims[which])], dims[which], strict=True)",
        FORWARD,
    ),
    Mutant(
        "the first node for all samples",
        FUSED,
        "rows_of(batch, size, first)[0]",
        "rows_of(batch, size, 0)[0]",
        FORWARD,
    ),
    Mutant(
        "columns of the rank of the first node",
        FUSED,
        "layout.columns[first + transport.rank]",
        "layout.columns[transport.rank]",
        FORWARD,
    ),
    Mutant("gradients are used before they arrived", BACK, "done()", "done", BACKWARD),
    Mutant(
        "sums do not wait for their slice",
        SUMS,
        "if part is not None:\n            part.wait()",
        "if part is not None:\n            pass",
        BACKWARD,
    ),
    Mutant(
        "gradients after the node as of samples before it",
        BACK,
        ".copy_(got[begin:])",
        ".copy_(got[: len(mine) - end])",
        BACKWARD,
    ),
    Mutant(
        "each slice in the columns of the first",
        BACK,
        "left, width = sum(dims[: own.start])",
        "left, width = 0",
        BACKWARD,
    ),
    Mutant(
        "the first slice again",
        BACK,
        "tables_of(len(dims), part, parts) for dims",
        "tables_of(len(dims), 0, parts) for dims",
        BACKWARD,
    ),
    Mutant("tables of other slices are summed", SUMS, "if i in mine", "if i not in mine", BACKWARD),
    Mutant(
        "a slice sums all tables",
        SUMS,
        "if part is None:\n        return",
        "if 1:\n        return",
        BACKWARD,
    ),
    Mutant("columns of the first rank of the node", BACK, "at += width", "at += 0", BACKWARD),
    Mutant("a node that pushes nothing", BACK, "push.launch_alone()", "pass", BACKWARD),
    Mutant(
        "samples of the node begin with the last of the node before",
        BACK,
        "mine[begin:end].copy_(push.slot[: end - begin])",
        "mine[max(begin - 1, 0) : end].copy_(push.slot[: end - max(begin - 1, 0)])",
        BACKWARD,
    ),
)
