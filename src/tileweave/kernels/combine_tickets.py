"""Which block a ticket of the Hopper ``grouped_matmul_combine`` is; see ``grouped_combine_tasks.py`` for the order and why.

Blocks of a chunk: ``sends`` for peers, at least one, and ``own`` ones that are finished. ``late``: 1 for tickets of the late
counter, 0 for those of the early one. Integer arithmetic only, so that the same source serves Triton and Gluon, as in
``language/tile.py``; the host's twin is ``schedule_grouped.tickets``.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it in sight of every jitted function


def count_tickets(late, chunks, sends, own):
    """How many there are."""
    count = (chunks - 1) * sends
    if late > 0:
        count = sends + chunks * own
    return count


def place_ticket(ticket, late, chunks, sends, own):
    """Ticket -> (whether it is for a peer, chunk, block of that chunk).

    Late: ceil(n * sends / mixed) of the first n tickets are for peers. That rises by 0 or 1 a ticket, from 0 to all at
    ``mixed``. Where it would pass 31 bits, sends stand in front instead.
    """
    early = (chunks - 1) * sends
    is_send = ticket < early
    number = ticket
    if late > 0:
        mixed = sends
        if chunks > 2:
            mixed = sends + (chunks - 2) * own
        if mixed > 46340:  # the root of 2^31
            mixed = sends
        is_send = ticket < sends
        before = ticket  # sends before this ticket
        if ticket >= mixed:
            before = sends
        elif mixed > sends:
            before = (ticket * sends + mixed - 1) // mixed
            is_send = before < ((ticket + 1) * sends + mixed - 1) // mixed
        number = ticket - before
        if is_send:
            number = early + before
    per_chunk = own
    if is_send:
        per_chunk = sends
    return is_send, number // per_chunk, number % per_chunk


SOURCES = (count_tickets, place_ticket)
count_tickets, place_ticket = (triton.jit(source) for source in SOURCES)
