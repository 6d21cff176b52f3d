"""Faults planted in gathers that run concurrently with other kernels; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AG, BARRIER, PARITY, REGISTRY, Mutant

AWAITED, BESIDE = "kernels/all_gather/await_shards.py", "ops/matmul/concurrent_gather.py"
_SHARD = "    await_source(peers, load_epoch(peers), source * MAX_SLICES)\n"
_END = "\n    if last_to_leave(peers, 1)"
_ENDS = "\n    await_pushed(peers, epoch, WORLD_SIZE)" + _END

MUTANTS: tuple[Mutant, ...] = (
    # --- of backward ---
    Mutant(
        "gathered without a wait",
        AWAITED,
        "    wait(peers, index, epoch)\n",
        "",
        AG + "concurrent gather",
    ),
    Mutant(
        "a gather that refuses a rank that is a call ahead",
        AWAITED,
        "epoch + 1, index",
        "epoch, index",
        AG + "concurrent gather",
    ),
    Mutant(
        "the epoch may move before the last push of a gather",
        AWAITED,
        "        await_pushed(peers, epoch, WORLD_SIZE)\n",
        "",
        AG + "concurrent gather",
    ),
    Mutant(
        "the own shard of a gather in another place",
        AWAITED,
        "own = slot + tl.cast(rank, tl.int64) * size",
        "own = slot + tl.cast((rank + 1) % WORLD_SIZE, tl.int64) * size",
        AG + "concurrent gather",
    ),
    Mutant(
        "gathers of all calls in one slot", REGISTRY, PARITY, "return 0", AG + "concurrent gather"
    ),
    Mutant(
        "captured gathers without a barrier",
        REGISTRY,
        BARRIER,
        "",
        AG + "concurrent gather, captured",
    ),
    Mutant(
        "a gathered shard is signalled to the wrong word",
        BESIDE,
        "layout.data(rank)",
        "layout.data(peer)",
        AG + "concurrent gather",
    ),
    Mutant(
        "a gathered shard in the place of its reader",
        BESIDE,
        "[peer] + place(slot, part, rank)",
        "[peer] + place(slot, part, peer)",
        AG + "concurrent gather",
    ),
    # --- under a matmul for each shard ---
    Mutant(
        "a shard is multiplied before it is there", AWAITED, _SHARD, "    pass\n", AG + "by shards"
    ),
    Mutant(
        "the last push of a call by shards is not awaited", AWAITED, _ENDS, _END, AG + "by shards"
    ),
    Mutant(
        "a product in the next place",
        BESIDE,
        "yield source, shard",
        "yield (source + 1) % self._instance.world_size, shard",
        AG + "by shards",
    ),
    Mutant(
        "captured calls by shards without a barrier",
        REGISTRY,
        BARRIER,
        "",
        AG + "by shards, captured",
    ),
)
