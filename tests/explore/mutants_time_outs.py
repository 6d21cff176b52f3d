"""Faults planted in how a time-out ends the waits of a group."""

from __future__ import annotations

from tests.explore.mutants import WORDS, Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a time-out ends the waits of its own instance only",
        WORDS,
        "in blocks_after(head):",
        "in [control]:",
        "local/waits$",
    ),
    Mutant(
        "every instance whose wait was ended reports",
        WORDS,
        "if not MEMORY.load(head + 4 * protocol.FAULT):",
        "if True:",
        "local/waits$",
    ),
    Mutant(
        "a new instance drops those before it from the list",
        "transport/shared_fault.py",
        "block[protocol.MEMBER] = len(self._members)",
        "block[protocol.NEXT : protocol.NEXT + 2] = 0\n"
        "        block[protocol.MEMBER] = len(self._members)",
        "local/waits$",
    ),
)
