"""Faults planted in matmul_all_to_all and all_to_all_matmul; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import BARRIER, PARITY, REGISTRY, Mutant

OUT, IN = "matmul_all_to_all/", "all_to_all_matmul/"
PULLED, PULLS = "kernels/all_to_all/scatter_triton.py", "ops/matmul/matmul_all_to_all_fused.py"
PULL = "device/triton/pull.py"
SOURCES, PUSHES, REMOTE = (
    "kernels/all_to_all/gather_triton.py",
    "ops/matmul/all_gather_matmul_fused.py",
    "device/triton/remote.py",
)
WORDS, LAUNCH = "device/triton/signal.py", "kernels/all_to_all/exchange.py"

_FLAG = "    notify(signals + (1 + slot) * (WORLD_SIZE * MAX_SLICES) + WORLD_SIZE + 1 + mine, 1)\n"
_DONE = "    await_pushed(peers, epoch, WORLD_SIZE)\n"
_RESET = "    tl.store(flags + words, tl.zeros_like(words), mask=inside)\n"
_COUNT = (
    "                if count_last(counters + num_programs + place * MAX_SLICES + chunk, "
    "tiles_of_chunk):\n"
)
_TOKEN = "token = wait(peers, index, epoch, unit.tile, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)"
_KEPT = "                wait(peers, index, epoch, COUNT=C.NUM_SLICES, EXACT=not C.PUSH)\n"

MUTANTS: tuple[Mutant, ...] = (
    # --- matmul_all_to_all ---
    Mutant(
        "a chunk is pulled without its flag",
        PULLS,
        "offset, flag, 1, lane",
        "offset, flag, 0, lane",
        OUT + "copy",
        2,
    ),
    Mutant("pulls of all calls from one slot", REGISTRY, PARITY, "return 0", OUT + "copy engine"),
    Mutant(
        "captured pulls without a barrier",
        REGISTRY,
        BARRIER,
        "",
        OUT + "copy engine, captured",
    ),
    Mutant(
        "pulled from another's place",
        PULLS,
        "place = s.rank - (s.rank > source)",
        "place = 0",
        OUT + "copy engine",
    ),
    Mutant("one flag for both slots", PULL, "(1 + slot) *", "(1 + 0) *", OUT + "copy engine", 2),
    Mutant("a flag is not set", PULL, _FLAG, "", OUT + "copy engine"),
    Mutant("flags move before the last pull", PULL, _DONE, "", OUT + "copy engine", 2),
    Mutant("flags are not zeroed", PULL, _RESET, "", OUT + "copy engine"),
    Mutant(
        "every tile announces its chunk",
        PULLED,
        _COUNT,
        _COUNT.replace("if ", "if 1 + "),
        OUT + "copy engine",
    ),
    Mutant(
        "the first tile announces its chunk", WORDS, "== total - 1", "== 0", OUT + "copy engine"
    ),
    Mutant(
        "a tile of several is counted without a release",
        WORDS,
        'sem="acq_rel", scope="gpu") == total',
        'sem="relaxed", scope="gpu") == total',
        OUT + "copy engine",
    ),
    Mutant(
        "counts of chunks stay",
        WORDS,
        "    if last:\n        tl.store(counter, 0)\n",
        "",
        OUT + "copy engine",
    ),
    Mutant(
        "a part to the wrong peer",
        PULLED,
        "slots_at(peers, home, dtype",
        "slots_at(peers, (home + 1) % WORLD_SIZE, dtype",
        OUT + "sm",
    ),
    Mutant(
        "a part is taken from another's place",
        PULLED,
        "(source - (source > rank)",
        "(source - (source < rank)",
        OUT + "sm",
    ),
    Mutant(
        "the last peer's part is not taken",
        PULLED,
        "for i in tl.static_range(1, WORLD_SIZE):",
        "for i in tl.static_range(1, WORLD_SIZE - 1):",
        OUT + "sm",
    ),
    # --- all_to_all_matmul ---
    Mutant("a source is not awaited", SOURCES, _TOKEN, "token = 0", IN),
    Mutant(
        "a source's first chunk is awaited for all",
        SOURCES,
        "MAX_SLICES + unit.first_row // chunk_rows",
        "MAX_SLICES",
        IN + "copy",
    ),
    Mutant(
        "one slice of a source is awaited",
        SOURCES,
        _TOKEN,
        _TOKEN.replace("C.NUM_SLICES", "1"),
        IN + "sm",
    ),
    Mutant("the call before is awaited", SOURCES, _TOKEN, _TOKEN.replace("epoch", "epoch - 1"), IN),
    Mutant(
        "parts go by rank, not by arrival",
        SOURCES,
        "remote = tl.cast(step - 1, tl.int64) * rows * depth",
        "remote = source.to(tl.int64) * rows * depth",
        IN,
    ),
    Mutant(
        "what is kept waits for one chunk",
        SOURCES,
        "range(0, num_chunks)",
        "range(0, 1)",
        IN + "copy engine, kept",
    ),
    Mutant(
        "what is kept does not wait",
        SOURCES,
        _KEPT,
        "                pass\n",
        IN + "copy engine, kept",
    ),
    Mutant(
        "every peer gets the next one's part",
        REMOTE,
        "source + peer.to(tl.int64) * step",
        "source + (peer.to(tl.int64) + 1) * step",
        IN + "sm",
    ),
    Mutant(
        "chunks share one signal",
        PUSHES,
        "layout.data(rank, chunk)",
        "layout.data(rank)",
        IN + "copy engine",
    ),
    Mutant(
        "copied parts all to the first rows",
        PUSHES,
        "(place * rows + begin) * width",
        "(place * rows) * width",
        IN + "copy engine",
    ),
    # --- the launch that precedes or follows cuBLAS ---
    Mutant("one slot for parts", LAUNCH, "(epoch & 1)", "(epoch & 0)", IN + "library"),
    Mutant(
        "parts into the neighbour's index",
        LAUNCH,
        "(source > reader)",
        "(source < reader)",
        IN + "library",
    ),
    Mutant(
        "the last peer gets no part",
        LAUNCH,
        "tl.static_range(1, WORLD_SIZE)",
        "tl.static_range(1, WORLD_SIZE - 1)",
        IN + "library",
    ),
    Mutant(
        "a part is stored as the neighbour's",
        LAUNCH,
        "place >= rank",
        "place > rank",
        OUT + "library",
    ),
)
