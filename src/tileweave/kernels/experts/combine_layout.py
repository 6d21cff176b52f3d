"""What the kernels of ``grouped_matmul_combine`` share: local counters, and entries of a slot.

A call counts in one of two sets of counters, by parity of the epoch. ``word`` is chunk * groups +
group, at most 30::

    [WEIGHTS]                            programs that have pushed their part of the weights
    [TILES + chunk]                      tiles of a chunk that are stored
    [SENT + peer * MAX_SLICES + word]    blocks of a group that are stored in a peer's slot
    [LISTED]                             Hopper: programs that have listed their part of the rows
    [TICKETS], [TICKETS + MAX_SLICES]    Hopper: early tickets, and late tickets, that were drawn
    [DRAWN]                              Hopper: tiles that were drawn

The Hopper kernel's four counters are the last of the MAX_SLICES words of peers 0 to 3 in [SENT],
which no group uses: one in each cache line.

Integer arithmetic only, so that the same source serves Triton and Gluon: ``SOURCES``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.device.triton.signal import MAX_SLICES

_UNUSED = MAX_SLICES.value - 1
_SENT = 32

WEIGHTS = tl.constexpr(0)
TILES = tl.constexpr(1)
SENT = tl.constexpr(_SENT)
LISTED = tl.constexpr(_SENT + _UNUSED)
TICKETS = tl.constexpr(_SENT + MAX_SLICES.value + _UNUSED)
DRAWN = tl.constexpr(_SENT + 3 * MAX_SLICES.value + _UNUSED)
COUNTER_WORDS = tl.constexpr(_SENT + 8 * MAX_SLICES.value)


def index_of(peer, owner):
    """The index of ``peer`` among the peers of ``owner``, in order of ranks: of its entry in a slot
    of ``owner``."""
    return peer - (peer > owner).to(tl.int32)


def chunk_columns(chunk, tile_cols, chunk_cols):
    """How many of ``tile_cols`` tile columns a chunk has: ``chunk_cols``, or fewer in the last."""
    return tl.minimum(tile_cols - chunk * chunk_cols, chunk_cols)


SOURCES = (index_of, chunk_columns)
index_of, chunk_columns = (triton.jit(source) for source in SOURCES)
