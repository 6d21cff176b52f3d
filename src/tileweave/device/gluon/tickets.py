"""Tiles as tickets, in Gluon: *load* draws the number of its next tile and passes it to *multiply*.

Consecutive numbers are drawn at almost the same time, so tiles that share operands begin together
and find them in L2. Dealt in turn, tile p + P j to program p, they drift apart: where programs wait
for peers, or where weights are read at the memory's rate for hundreds of microseconds (decision
0011).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileweave.device.gluon.signal import block_barrier


class Deal(NamedTuple):
    """Shared memory for two numbers in transit, and the barriers of each: it was dealt, it was
    taken."""

    numbers: Any
    dealt: Any
    taken: Any


@gluon.jit
def make_deal(TAKERS: gl.constexpr = 1):
    """A :class:`Deal` in which nothing was dealt yet. ``TAKERS``: partitions that take each
    number."""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dealt = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(dealt.index(i), count=1)
        mbarrier.init(taken.index(i), count=TAKERS)
    return Deal(numbers, dealt, taken)


@gluon.jit
def deal(tickets, count, line, WARPS: gl.constexpr):
    """*load*: draw the number of a tile from the counter ``tickets`` and pass it on, as the
    ``count``-th. Returns it.

    Call it when all loads of the previous tile have been issued, and continue until there is no
    such tile: *multiply* takes that number, too.
    """
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tile = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    at = count % 2
    mbarrier.wait(line.taken.index(at), ((count // 2) & 1) ^ 1)
    line.numbers.index(at).store(gl.full([32], 0, gl.int32, lane) + tile)
    block_barrier()
    mbarrier.arrive(line.dealt.index(at), count=1)
    return tile


@gluon.jit
def take(count, line, WARPS: gl.constexpr):
    """*multiply*: the ``count``-th number that was dealt."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = count % 2
    mbarrier.wait(line.dealt.index(at), (count // 2) & 1)
    tile = gl.max(line.numbers.index(at).load(lane), axis=0)
    block_barrier()
    mbarrier.arrive(line.taken.index(at), count=1)
    return tile
