"""Find shared memory in compiled PTX that was initialized as an mbarrier and holds data later.

Why: the memory of a barrier may hold other data only after ``mbarrier.inval``. Gluon's allocator
does not know this: it reuses the memory of a barrier that no wait follows, for a reduction or a
conversion of layouts. That works until the device switches to another process and back, which
restores barriers: the words of a sum then hold the state of a barrier. A program that shares its
GPU by time slices fails within seconds, any other one never does.

What is checked: the constant part of an address, which for the words of a reduction is their
beginning. Barriers that are invalidated anywhere are trusted, since they are the compiler's own.
"""

from __future__ import annotations

import re

_BASE = "global_smem"
# The bytes are states of warps, whose numbers begin after those of the default partition.
_DATA = re.compile(r"\b(ld|st|atom|red)\.(volatile\.)?shared\b(?!\S*\.[bus]8\b).*?\[([^\]]*)\]")
_BARRIER = re.compile(r"\bmbarrier\.(init|inval)\.shared\S* \[([^\]]*)\]")
_BYTES = 8


def _places(ptx: str) -> dict[str, int]:
    """Registers that hold an address in shared memory, by its constant part, and the base
    itself."""
    found = {_BASE: 0}
    for line in map(str.strip, ptx.splitlines()):
        moved = re.match(rf"mov\.[bu]32\s+(%r\d+), {_BASE}(?:\+(\d+))?;", line)
        if moved:
            found[moved[1]] = int(moved[2] or 0)
        added = re.match(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+|-?\d+);", line)
        if added and not {added[2], added[3]}.isdisjoint(found):
            base, more = (added[2], added[3]) if added[2] in found else (added[3], added[2])
            found[added[1]] = found[base] + (0 if more.startswith("%") else int(more))
    return found


def reused_barriers(ptx: str) -> tuple[list[int], int]:
    """Addresses of barriers whose words are loaded or stored as data, and the number of barriers
    with a known address."""
    places = _places(ptx)

    def place(text: str) -> int | None:
        name, _, more = text.replace(" ", "").partition("+")
        return places[name] + int(more or 0) if name in places else None

    barriers: dict[str, set[int | None]] = {"init": set(), "inval": set()}
    data = set()
    for line in ptx.splitlines():
        if barrier := _BARRIER.search(line):
            barriers[barrier[1]].add(place(barrier[2]))
        elif word := _DATA.search(line):
            data.add(place(word[3]))
    kept = {at for at in barriers["init"] - barriers["inval"] if at is not None}
    return sorted(
        at for at in kept if any(word is not None and at <= word < at + _BYTES for word in data)
    ), len(kept)
