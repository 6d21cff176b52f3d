"""What the kernels of ``grouped_matmul_combine`` share: local counters, and entries of a slot.

A call counts in one of two sets of counters, by parity of the epoch. ``word`` is chunk * groups +
group, at most 30::

    [WEIGHTS]                            programs that have pushed their part of the weights
    [TILES + chunk]                      tiles of a chunk that are stored
    [SENT + peer * MAX_SLICES + word]    blocks of a group that are stored in a peer's slot

and those of the Hopper kernel, each in a cache line of its own::

    [LISTED]                             programs that have listed their part of the rows
    [TICKETS], [TICKETS + LINE]          early tickets, and late tickets, that were drawn
    [DRAWN]                              tiles that were drawn

Integer arithmetic only, so that the same source serves Triton and Gluon: ``SOURCES``.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(32)  # words of a cache line
WEIGHTS = tl.constexpr(0)
TILES = tl.constexpr(1)
SENT = tl.constexpr(32)  # 8 peers of MAX_SLICES words
LISTED = tl.constexpr(32 * 9)
TICKETS = tl.constexpr(32 * 10)
DRAWN = tl.constexpr(32 * 12)
COUNTER_WORDS = tl.constexpr(32 * 13)


def index_of(peer, owner):
    """The index of ``peer`` among the peers of ``owner``, in order of ranks: of its entry in a slot
    of ``owner``."""
    return peer - (peer > owner).to(tl.int32)


def chunk_columns(chunk, tile_cols, chunk_cols):
    """How many of ``tile_cols`` tile columns a chunk has: ``chunk_cols``, or fewer in the last."""
    return tl.minimum(tile_cols - chunk * chunk_cols, chunk_cols)


SOURCES = (index_of, chunk_columns)
index_of, chunk_columns = (triton.jit(source) for source in SOURCES)
