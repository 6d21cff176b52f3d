"""Faults planted in the expert operators; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import Mutant

GC = "grouped_matmul_combine/"
COMBINE = "kernels/experts/combine_triton.py"
PARTITIONS = GC + "partitions"  # of the Hopper kernel, as ``partitions.py`` runs them
TASKS, ORDER = (
    "kernels/experts/combine_hopper_tasks.py",
    "kernels/experts/combine_hopper_tickets.py",
)

_NOTIFY = "signal = signals_at(peers, peer) + rank * MAX_SLICES + 1 + chunk * groups + group\n"
_WAIT = "                wait(peers, word, current.epoch, group)\n"
_WEIGHTS = "wait(peers, peer * MAX_SLICES + WEIGHTS, epoch, task)"
_AWAIT = (
    "        await_count(counter, tile_rows * chunk_columns(chunk, tile_cols, cut.chunk_cols))\n"
)
_COUNT = '            tl.atomic_add(counts + TILES + chunk, 1, sem="release", scope="gpu")\n'
_WORD = "+ 1 + chunk * cut.groups + group\n"
_GROUPS = "for group in range(0, cut.groups):"
_MADE = "            while made <= chunk:\n"
_LATE = "        before = ticket  # sends before this ticket\n"
_TURNED = "        ticket = (ticket + sends) % (sends + 2 * own)\n"
_TILES = "                counter = counts + TILES + made\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("combine: no program waits for tiles", COMBINE, _AWAIT, "", GC, count=2),
    Mutant(
        "combine: tiles of the chunk before are enough",
        COMBINE,
        "counter, tile_rows",
        "counter, 0 * tile_rows",
        GC,
        count=2,
    ),
    Mutant(
        "combine: tiles are counted without a release",
        COMBINE,
        _COUNT,
        _COUNT.replace("release", "relaxed"),
        GC,
    ),
    Mutant("combine: results do not wait for peers", COMBINE, _WAIT, "                pass\n", GC),
    Mutant(
        "combine: results wait for the last call",
        COMBINE,
        _WAIT,
        _WAIT.replace("epoch", "epoch - 1"),
        GC,
    ),
    Mutant(
        "combine: results wait for the next peer only",
        COMBINE,
        _WAIT,
        "                if step == 1:\n    " + _WAIT,
        GC,
    ),
    Mutant("combine: sums do not wait for weights", COMBINE, _WEIGHTS, "pass", GC + "roles"),
    Mutant(
        "combine: sums wait for old weights",
        COMBINE,
        _WEIGHTS,
        _WEIGHTS.replace("epoch", "epoch - 1"),
        GC + "roles",
    ),
    Mutant(
        "combine: a group is signalled by its first block",
        COMBINE,
        "group, count):",
        "group, 1):",
        GC + "several",
    ),
    Mutant(
        "combine: blocks are counted without acquire and release",
        COMBINE,
        'sem="acq_rel"',
        'sem="relaxed"',
        GC,
    ),
    Mutant(
        "combine: a signal goes to the wrong word",
        COMBINE,
        _NOTIFY,
        _NOTIFY.replace("+ 1 + chunk", "+ chunk"),
        GC,
    ),
    Mutant(
        "combine: a signal of a group where a chunk would be",
        COMBINE,
        _NOTIFY,
        _NOTIFY.replace("chunk * groups", "chunk * cut.chunks"),
        GC,
    ),
    Mutant(
        "combine: results wait for groups where chunks would be",
        COMBINE,
        _WORD,
        "+ 1 + group * cut.chunks + chunk\n",
        GC,
    ),
    Mutant(
        "combine: results of as many groups as there are chunks",
        COMBINE,
        _GROUPS,
        _GROUPS.replace("groups", "chunks"),
        GC,
    ),
    Mutant(
        "combine: one slot", COMBINE, "slot_offset = parity.to", "slot_offset = (0 * parity).to", GC
    ),
    Mutant(
        "combine: weights of one slot",
        COMBINE,
        "weights_base + parity.to",
        "weights_base + (0 * parity).to",
        GC + "roles",
    ),
    Mutant(
        "combine: counts are not cleared",
        COMBINE,
        "    if program == 0:\n",
        "    if program < 0:\n",
        GC,
    ),
    Mutant(
        "combine: counts of this call are cleared",
        COMBINE,
        "counters + (1 - parity) * COUNTER_WORDS",
        "counters + parity * COUNTER_WORDS",
        GC,
    ),
    Mutant(
        "combine: partials into another rank's place",
        COMBINE,
        "index = index_of(rank, peer)",
        "index = 0 * rank",
        GC,
    ),
    Mutant(
        "combine: a stale partial of a rank without an expert of the token",
        COMBINE,
        "mask = (there & (",
        "mask = ((",
        GC,
    ),
    Mutant(
        "combine: the next expert's rows are overwritten",
        COMBINE,
        "(row < walk.end)[:",
        "(row <= walk.end)[:",
        GC,
    ),
    # --- partitions, and the order of their tickets ---
    Mutant(
        "tickets: late ones do not wait for tiles",
        TASKS,
        _MADE,
        _MADE.replace("chunk", "chunk - 9 * late"),
        PARTITIONS,
    ),
    Mutant(
        "tickets: only the tiles of their chunk",
        TASKS,
        _TILES,
        "                made = chunk + 0\n" + _TILES,
        PARTITIONS,
    ),
    Mutant(
        "tickets: results do not wait for peers",
        TASKS,
        "if word >= heard:",
        "if word > 99:",
        PARTITIONS,
    ),
    Mutant(
        "tickets: one signal is taken for two",
        TASKS,
        "heard = word + 1",
        "heard = word + 2",
        PARTITIONS,
    ),
    Mutant(
        "tickets: one counter",
        TASKS,
        "TICKETS + late * MAX_SLICES",
        "TICKETS + late * 0",
        PARTITIONS,
    ),
    Mutant(
        "tickets: lists are counted without a release",
        TASKS,
        'LISTED, 1, sem="release"',
        'LISTED, 1, sem="relaxed"',
        PARTITIONS,
    ),
    Mutant(
        "tickets: a signal of a group where a chunk would be",
        TASKS,
        "word = chunk * cut.groups + group\n",
        "word = chunk * cut.chunks + group\n",
        PARTITIONS,
    ),
    Mutant(
        "tickets: results wait for groups where chunks would be",
        TASKS,
        "chunk * cut.groups + step // cut.group_blocks",
        "step // cut.group_blocks * cut.chunks + chunk",
        PARTITIONS,
    ),
    Mutant(
        "tickets: a group is signalled by its first block",
        TASKS,
        "word, group_size):",
        "word, 1):",
        PARTITIONS,
    ),
    Mutant(
        "tickets: the last chunk is finished before it is sent",
        ORDER,
        _LATE,
        _TURNED + _LATE,
        PARTITIONS,
    ),
    Mutant(
        "tickets: the last chunk is never sent",
        ORDER,
        "chunk = chunks - 1\n",
        "chunk = chunks - 2\n",
        PARTITIONS,
    ),
    Mutant(
        "tickets: a block is left over",
        ORDER,
        "count = sends + own\n",
        "count = sends + own - 1\n",
        PARTITIONS,
    ),
    Mutant(
        "tickets: a chunk is finished before it is sent",
        ORDER,
        "chunk = chunk - 1",
        "chunk = chunk + 1",
        PARTITIONS,
    ),
    Mutant(
        "tickets: a chunk is finished twice",
        ORDER,
        "chunk = chunk - 1",
        "chunk = chunk + 0",
        PARTITIONS,
    ),
)
