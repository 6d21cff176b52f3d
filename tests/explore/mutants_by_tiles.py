"""Faults planted in matmul_all_reduce by tiles; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AR, REDUCE, REDUCED, Mutant

TILES = AR + "by tiles"
_COUNT = "    if count_last(counter, height * tiles.tile_cols):\n"
_PLACE = "peers.counters + num_programs + (WORLD_SIZE - 1) * MAX_SLICES + chunk"
_HEIGHT = "tl.minimum(tiles.tile_rows - chunk * tiles.chunk_rows, tiles.chunk_rows)"
_ANNOUNCED_ROWS = "wait(peers, source * MAX_SLICES + REDUCED + chunk, epoch)"
_STORES = """\
                    for i in tl.static_range(1, WORLD_SIZE):
                        theirs = slots_at(peers, (rank + i) % WORLD_SIZE, dtype) + mirror
                        store_rows(acc.to(dtype), theirs, within, col, cols, own)
"""
_ANNOUNCES = "                    announce_own(peers, num_programs, tiles, first_row, epoch, C)\n"
_COUNTS = (
    "            if C.GATHER:\n"
    "                if home == rank:  # though the last rank's last tiles may have no rows\n"
    + _ANNOUNCES
)

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
        "notify_all(peers, index, tiles.rank, epoch, WORLD_SIZE, False)",
        "notify_all(peers, index, tiles.rank, epoch, 2, False)",
        TILES,
    ),
    Mutant(
        "own rows are announced as partial sums",
        REDUCE,
        "index = tiles.rank * MAX_SLICES + REDUCED + chunk",
        "index = tiles.rank * MAX_SLICES + chunk",
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
        "mirrors are not written",
        REDUCE,
        "own = own & (faulted(peers) == 0)",
        "own = own & (faulted(peers) != 0)",
        TILES,
    ),
    Mutant(
        "one mirror only is written",
        REDUCE,
        "for i in tl.static_range(1, WORLD_SIZE):\n                        theirs",
        "for i in tl.static_range(1, 2):\n                        theirs",
        TILES,
    ),
    Mutant(
        "own rows are announced before they are stored in mirrors",
        REDUCE,
        _STORES + _COUNTS,
        _ANNOUNCES + _STORES,
        TILES,
    ),
    Mutant(
        "the mirror is that of the slot of the other parity",
        REDUCE,
        "mirror = slot_offset + (WORLD_SIZE - 1) * sizes.place_size",
        "mirror = peers.slot_size - slot_offset + (WORLD_SIZE - 1) * sizes.place_size",
        TILES,
    ),
    Mutant(
        "rows are copied out of the slot of the other parity",
        REDUCE,
        "mirror = peers.slots + slot_offset +",
        "mirror = peers.slots + (peers.slot_size - slot_offset) +",
        TILES,
    ),
    Mutant(
        "the mirror begins where partial sums are",
        REDUCE,
        "mirror = slot_offset + (WORLD_SIZE - 1) * sizes.place_size",
        "mirror = slot_offset + 0 * sizes.place_size",
        TILES,
    ),
    Mutant(
        "rows are copied before they are announced",
        REDUCE,
        _ANNOUNCED_ROWS,
        _ANNOUNCED_ROWS.replace("epoch", "epoch - 1"),
        TILES,
    ),
    Mutant(
        "programs wait for the first chunk of rows only",
        REDUCE,
        _ANNOUNCED_ROWS,
        _ANNOUNCED_ROWS.replace(" + chunk", ""),
        TILES,
    ),
    Mutant(
        "programs wait for rows of the peer before only",
        REDUCE,
        _ANNOUNCED_ROWS,
        _ANNOUNCED_ROWS.replace("source *", "(rank + WORLD_SIZE - 1) % WORLD_SIZE *"),
        TILES,
    ),
    Mutant(
        "rows are copied to another rank's place",
        REDUCE,
        "tl.store(whole + at + index, value,",
        "tl.store(out + index, value,",
        TILES,
    ),
    Mutant(
        "rows that the last rank does not have are copied",
        REDUCE,
        "there = tl.minimum(rows, sizes.height - source * rows)",
        "there = rows",
        TILES,
    ),
    Mutant(
        "the room of a mirror is that of one rank's rows",
        REDUCED,
        "size * rows * schedule.cols",
        "rows * schedule.cols",
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
        "self.copies[slot], staging.data_ptr(), capturing)",
        "self.copies[slot], out.data_ptr(), capturing)",
        TILES,
    ),
)
