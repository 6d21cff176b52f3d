"""Faults of matmul_all_reduce in one shot; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AR, Mutant

ONE_SHOT = "kernels/all_reduce/one_shot.py"
_EARLY = "            leave_early(peers, epoch, tl.num_programs(0))\n"

MUTANTS = (
    Mutant("one shot with one slot", ONE_SHOT, "(epoch & 1).to", "(epoch & 0).to", AR + "one shot"),
    Mutant(
        "one shot forgets a rank",
        ONE_SHOT,
        "static_range(WORLD_SIZE):",
        "static_range(WORLD_SIZE - 1):",
        AR + "one shot",
    ),
    Mutant("one shot leaves twice", ONE_SHOT, _EARLY, _EARLY + _EARLY, AR + "one shot"),
    Mutant("one shot never leaves", ONE_SHOT, _EARLY, "            pass\n", AR + "one shot"),
    Mutant(
        "one shot into one place",
        ONE_SHOT,
        "place.to(tl.int64) * place_size",
        "0 * place_size",
        AR + "one shot",
    ),
    Mutant(
        "a team in one place",
        ONE_SHOT,
        "slots, rank * TEAM + part",
        "slots, rank * TEAM",
        AR + "one shot, teams",
    ),
    Mutant(
        "the sum of a team lacks a part",
        ONE_SHOT,
        "WORLD_SIZE * TEAM,",
        "WORLD_SIZE * TEAM - 1,",
        AR + "one shot, teams",
    ),
    Mutant(
        "each of a team sums",
        ONE_SHOT,
        "if part == TEAM - 1:",
        "if part == part:",
        AR + "one shot, teams",
    ),
    Mutant(
        "a part of a team begins a block late",
        ONE_SHOT,
        "k_begin = part * sizes.k_blocks // C.TEAM",
        "k_begin = part * sizes.k_blocks // C.TEAM + part",
        AR + "one shot, teams",
    ),
    Mutant(
        "one scale of FP8 for all rows",
        ONE_SHOT,
        "scales.x + row * C.X_STEP",
        "scales.x + row * 0",
        AR + "one shot, FP8",
    ),
    Mutant(
        "scales of the first FP8 block for all columns",
        ONE_SHOT,
        "scales.w + (tile * TILE_N // 128) * sizes.k_blocks",
        "scales.w",
        AR + "one shot, FP8, blocks",
    ),
    Mutant(
        "norms do not wait for the sum",
        ONE_SHOT,
        "        wait(counters",
        "        0 and wait(counters",
        AR + "one shot, norm",
    ),
    Mutant(
        "a tile is counted without a release",
        ONE_SHOT,
        'sem="acq_rel"',
        'sem="relaxed"',
        AR + "one shot, norm",
    ),
    Mutant(
        "norms begin a tile early",
        ONE_SHOT,
        "== num_tiles - 1:",
        "== num_tiles - 2:",
        AR + "one shot, norm",
    ),
    Mutant(
        "the count of tiles is not reset",
        ONE_SHOT,
        "                    tl.store(counters, 0)\n",
        "",
        AR + "one shot, norm",
    ),
)
