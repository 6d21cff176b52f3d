"""Faults planted in matmul_all_reduce by tiles; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AR, REDUCE, REDUCED, Mutant

CALL = "ops/matmul/all_reduce_by_tiles.py"
TILES = AR + "by tiles"
_COUNT = "    if count_last(counter, height * tiles.tile_cols):\n"
_PLACE = "peers.counters + num_programs + (WORLD_SIZE - 1) * MAX_SLICES + chunk"
_HEIGHT = "tl.minimum(tiles.tile_rows - chunk * tiles.chunk_rows, tiles.chunk_rows)"
_PEERS = "range(1, WORLD_SIZE):\n                peer"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every own tile announces its chunk",
        REDUCE,
        _COUNT,
        _COUNT.replace("height * tiles.tile_cols", "1"),
        TILES,
    ),
    Mutant(
        "own tiles of all chunks are counted in one",
        REDUCE,
        _PLACE,
        _PLACE.removesuffix(" + chunk"),
        TILES,
    ),
    Mutant(
        "the last chunk has as many tile rows as the others",
        REDUCE,
        _HEIGHT,
        "tiles.chunk_rows",
        TILES,
    ),
    Mutant(
        "one peer only is told of own rows",
        REDUCE,
        _PEERS,
        _PEERS.replace("WORLD_SIZE", "2"),
        TILES,
    ),
    Mutant(
        "own rows are announced as partial sums",
        REDUCE,
        "slot, REDUCED + chunk, epoch",
        "slot, chunk, epoch",
        TILES,
    ),
    Mutant(
        "tiles without rows are not counted",
        REDUCE,
        "if home == rank:  # though",
        "if tl.max(own.to(tl.int32), axis=0) > 0:  # though",
        TILES,
    ),
    Mutant(
        "the mirror is not written",
        REDUCE,
        "own = own & (faulted(peers) == 0)",
        "own = own & (faulted(peers) != 0)",
        TILES,
    ),
    Mutant(
        "rows are pulled before they are announced",
        CALL,
        "offset, flag, 1)",
        "offset, flag, 0)",
        TILES,
    ),
    Mutant(
        "rows are pulled out of the slot of the other parity",
        CALL,
        "mirror = slot * instance.slot_bytes",
        "mirror = (1 - slot) * instance.slot_bytes",
        TILES,
    ),
    Mutant(
        "the mirror begins where partial sums are",
        CALL,
        "+ s.slot_elements * itemsize",
        "",
        TILES,
    ),
    Mutant(
        "pulled rows in another's place",
        CALL,
        "(source * rows + begin)",
        "(s.rank * rows + begin)",
        TILES,
    ),
    Mutant(
        "rows that the last rank does not have are pulled",
        CALL,
        "own = min(rows, height - source * rows)",
        "own = rows",
        TILES,
    ),
    Mutant(
        "pulls of all slots wait for one flag",
        CALL,
        "flag(slot, source, REDUCED + chunk)",
        "flag(0, source, REDUCED + chunk)",
        TILES,
    ),
    Mutant(
        "a rank pulls what the next one has from the one before",
        CALL,
        "instance.slot_addresses[source]",
        "instance.slot_addresses[s.rank]",
        TILES,
    ),
    Mutant(
        "the call ends with its pushes",
        CALL,
        "return Copies([*copies, instance",
        "return Copies([*copies[:-2], instance",
        TILES,
    ),
    Mutant(
        "the end resets counters of own rows, too",
        REDUCE,
        "words < (WORLD_SIZE - 1) * MAX_SLICES",
        "words < WORLD_SIZE * MAX_SLICES",
        TILES,
    ),
    Mutant(
        "partial sums come from the result",
        REDUCED,
        "source = staging and staging + offset",
        "source = 0",
        TILES,
    ),
)
