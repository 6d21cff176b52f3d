"""Faults planted in gathers of FP8 operands with their scales, and in sums by shards; see
``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AG, Mutant

FUSED, GATHER = "ops/matmul/all_gather_matmul_fused.py", "ops/matmul/concurrent_gather.py"
EXCHANGE = "kernels/all_reduce/collective.py"
SUMS, SHARDS = "kernels/reduce_scatter/sum_shards.py", "ops/matmul/shards_by_cublas.py"
RS = "matmul_reduce_scatter/by shards"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("scales are not sent", FUSED, "if scales[2]:", "if False:", AG + "FP8, kernel"),
    Mutant(
        "scales of another call are sent", FUSED, "    own.copy_(scale)\n", "", AG + "FP8, kernel"
    ),
    Mutant(
        "the scales of a peer for the own rows",
        "kernels/all_gather/scales.py",
        "source == rank, tensors.own_scale - rank",
        "source != rank, tensors.own_scale - rank",
        AG + "FP8, kernel",
    ),
    Mutant(
        "scales of a shard of another call", GATHER, "place.copy_(part)", "pass", AG + "FP8, by"
    ),
    Mutant(
        "the second part of a shard in the next place",
        EXCHANGE,
        "second = source.to(tl.int64) *",
        "second = (source + 1).to(tl.int64) % WORLD_SIZE *",
        AG + "FP8, library",
    ),
    Mutant(
        "sums before partial sums have come",
        SUMS,
        "        await_source(peers, epoch, (rank + WORLD_SIZE - i) % WORLD_SIZE * MAX_SLICES)\n",
        "        pass\n",
        RS,
    ),
    Mutant(
        "the last push of partial sums is not awaited",
        SUMS,
        "        await_pushed(peers, epoch, WORLD_SIZE)\n",
        "        pass\n",
        RS,
    ),
    Mutant(
        "the own partial sum from the slot",
        SUMS,
        "source == rank, own, part",
        "False, own, part",
        RS,
    ),
    Mutant("partial sums at another rank's place", SHARDS, "begin + rank * nbytes", "begin", RS),
)
