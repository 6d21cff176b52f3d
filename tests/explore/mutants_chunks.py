"""Faults planted in matmul_all_reduce in chunks of rows; see ``mutants.py``."""

from __future__ import annotations

from tests.explore.mutants import AR, Mutant

KERNEL, CALL = "kernels/all_reduce/gather_rows.py", "ops/matmul/all_reduce_in_chunks.py"
_ALL = "range(1, WORLD_SIZE):\n        source"
_ALL_REDUCED = "            call.launches.all_reduced()\n            transport"
_PULL = "            transport.push(chunk.pulls[slot], sums.data_ptr(), QUEUE)\n"
_JOIN = "        transport.join(QUEUE)\n        joined = True\n"
CHUNKS = AR + "in chunks"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rows are pulled before all are reduced",
        KERNEL,
        "        wait(peers, source, epoch, -1, 1, MEETING_US)\n",
        "        pass\n",
        CHUNKS,
    ),
    Mutant(
        "rows are pulled when one peer has reduced them",
        KERNEL,
        _ALL,
        _ALL.replace("WORLD_SIZE", "2"),
        CHUNKS,
    ),
    Mutant(
        "a rank does not say that it has reduced its rows",
        KERNEL,
        "    come(peers, rank, epoch, WORLD_SIZE)\n",
        "",
        CHUNKS,
    ),
    Mutant(
        "a rank says so before it has left the chunk before",
        KERNEL,
        "come(peers, rank, epoch,",
        "come(peers, rank, epoch + 1,",
        CHUNKS,
    ),
    Mutant(
        "the epoch of a chunk stands still",
        KERNEL,
        "    leave(peers, epoch, 1)\n",
        "",
        CHUNKS,
    ),
    Mutant(
        "the end refuses a rank that is a call ahead",
        KERNEL,
        "refuse_later(peers, following,",
        "refuse_later(peers, following - 1,",
        CHUNKS,
    ),
    Mutant(
        "rows are pulled before the wait",
        CALL,
        "            call.launches.all_reduced()\n" + _PULL,
        _PULL + "            call.launches.all_reduced()\n",
        CHUNKS,
    ),
    Mutant(
        "a chunk is pulled without a wait",
        CALL,
        _ALL_REDUCED,
        "            transport",
        CHUNKS,
    ),
    Mutant(
        "rows are pulled from the slot of the other parity",
        CALL,
        "chunk.pulls[slot]",
        "chunk.pulls[1 - slot]",
        CHUNKS,
    ),
    Mutant(
        "rows of all chunks in one place",
        CALL,
        "        at += nbytes\n",
        "",
        CHUNKS,
    ),
    Mutant(
        "pulled rows in another's place",
        CALL,
        "begin + peer * mine)",
        "begin + rank * mine)",
        CHUNKS,
    ),
    Mutant(
        "pulls of rows that the last chunk has, too",
        CALL,
        "min(mine, limit - first)",
        "mine",
        CHUNKS,
    ),
    Mutant(
        "a call ends before its pulls",
        CALL,
        _JOIN,
        "        joined = True\n",
        CHUNKS,
    ),
    Mutant(
        "a call joins the other queue",
        CALL,
        _JOIN,
        _JOIN.replace("QUEUE", ""),
        CHUNKS,
    ),
)
