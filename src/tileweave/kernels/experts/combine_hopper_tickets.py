"""Which block a ticket of the Hopper ``grouped_matmul_combine`` is; ``combine_hopper_tasks.py`` has
the order and the reasons for it.

A chunk has ``sends`` blocks for peers, at least one, and ``own`` blocks that are finished, possibly
none. ``late``: 1 for tickets of the late counter, 0 for those of the early one. Integer arithmetic
only, so that the same source serves Triton and Gluon, as in ``device/triton/tiles.py``; the host's
counterpart is ``planning.schedules.grouped.tickets``.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks it up here


def count_tickets(late, chunks, sends, own):
    """How many tickets a counter has."""
    count = (chunks - 1) * sends
    if chunks > 2:
        count += (chunks - 2) * own
    if late > 0:
        count = sends + own
        if chunks > 1:
            count += own
    return count


def place_ticket(ticket, late, chunks, sends, own):
    """Ticket -> (whether it is for a peer, chunk, block of that chunk).

    Late: ``mixed`` tickets of the last chunk's sends and own blocks of the chunk before, then own
    blocks of the last chunk. Of the first n, ceil(n * sends / mixed) are sends. That rises by 0 or
    1 per ticket, from 0 to all at ``mixed``. If the product would exceed 31 bits, all sends go
    first instead.
    """
    is_send = ticket < sends
    chunk = 0
    block = ticket
    if late > 0:
        first = 0  # chunk that is finished here
        mixed = sends
        if chunks > 1:
            first = chunks - 2
            mixed = sends + own
        if mixed > 46340:  # the root of 2^31
            mixed = sends
        before = ticket  # sends before this ticket
        if ticket >= mixed:
            before = sends
        elif mixed > sends:
            before = (ticket * sends + mixed - 1) // mixed
            is_send = before < ((ticket + 1) * sends + mixed - 1) // mixed
        if is_send:
            chunk = chunks - 1
            block = before
        else:
            chunk = first + (ticket - before) // own
            block = (ticket - before) % own
    elif ticket >= sends:  # a chunk's sends, then own blocks of the chunk before
        chunk = 1 + (ticket - sends) // (sends + own)
        block = (ticket - sends) % (sends + own)
        is_send = block < sends
        if block >= sends:
            chunk = chunk - 1
            block = block - sends
    return is_send, chunk, block


SOURCES = (count_tickets, place_ticket)
count_tickets, place_ticket = (triton.jit(source) for source in SOURCES)
