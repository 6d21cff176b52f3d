"""exchange: an all-to-all of the parts of a matrix, in one launch that precedes or follows cuBLAS.

    x     [M, K]           local: R parts [rows, width], part p for rank p, below each other or side
                           by side
    out   [M', K']         local: the parts that arrive, in rank order, below each other or side by
                           side
    slot  [R-1, rows, width]  one of two, by parity of the epoch; index i has the part of the i-th
                           peer in order of ranks

Parts are read and stored in place: each side has a ``Cut``, the distance from part to part and from
row to row. So nothing is permuted before or after. Everything is counted in *vectors* of ``VECTOR``
elements, 16 bytes where rows are multiples of 16 bytes, so that each thread moves 16 bytes at once
and divides once for them.

Which rank writes, and which reads: a program has the same blocks of every part. It stores its
blocks of a peer's part in that peer's slot, copies those of the own part to ``out``, and takes what
peers stored for this rank. There is no signal and no fence: the data is self-signaling
(``device/triton/self_signaling.py``).

    program p | push blocks of r+1, r+2, r+3 | copy own blocks | take blocks of all peers |

Why no slot is overwritten: every rank needs data of every peer in every call. So when my call n
ends, each peer has begun call n and has ended call n-1, which was the last reader of the slot (and
writer of its zeros) that call n+1 writes.

Why no rank waits for ever: a program pushes before it waits, and waits for the same program of
peers.

Limits: minus zero comes out as zero. Source: NCCL's LL protocol.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import faulted, leave_early, load_epoch, slots_at, take_each
from tileweave.device.triton.self_signaling import expected_zero, put_marked
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.scatter import Exchange


class Cut(NamedTuple):
    """Where parts are in a matrix: vectors from part to part, and from row to row of a part."""

    step: Any
    pitch: Any


class Part(NamedTuple):
    """Vectors of a part, and of one of its rows."""

    size: Any
    width: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PEERS : a power of two, at least R - 1.

    BLOCK : vectors of each part that a program moves at once.

    VECTOR : elements of a vector.
    """

    WORLD_SIZE: int
    PEERS: int
    BLOCK: int
    VECTOR: int


@triton.jit
def place_of(source, reader):
    """The index of ``source`` among the peers of ``reader``."""
    return (source - (source > reader).to(tl.int32)).to(tl.int64)


@triton.jit
def elements(vectors, VECTOR: tl.constexpr):
    """The numbers of the elements of ``vectors`` [n]: [n, VECTOR]."""
    return vectors.to(tl.int64)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def in_place(vectors, cut, width):
    """The numbers, in a matrix, of ``vectors`` of its first part, whose rows are of ``width``."""
    return (vectors // width).to(tl.int64) * cut.pitch + vectors % width


@triton.jit(do_not_specialize=["rank"])
def exchange_parts_kernel(x, out, peers, rank, part, cut, joined, C: tl.constexpr):
    """See the module's docstring. ``cut``, ``joined``: where parts are in x and in out."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    BLOCK: tl.constexpr = C.BLOCK
    VECTOR: tl.constexpr = C.VECTOR
    size = part.size
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    epoch = load_epoch(peers)
    # of an earlier call: then nothing is pushed, see ``one_shot.py``
    fault = faulted(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    lane = tl.arange(0, BLOCK)
    for begin in range(program * BLOCK, size, step):
        at = begin + lane
        mask = (at < tl.where(fault == 0, size, 0))[:, None]
        source = elements(in_place(at, cut, part.width), VECTOR)
        target = elements(at, VECTOR)
        for i in tl.static_range(1, WORLD_SIZE):
            peer = (rank + i) % WORLD_SIZE
            value = tl.load(x + peer.to(tl.int64) * cut.step * VECTOR + source, mask=mask)
            slot = slots_at(peers, peer, x.dtype.element_ty) + slot_offset
            put_marked(slot + place_of(rank, peer) * size * VECTOR + target, value, mask)
    leave_early(peers, epoch, tl.num_programs(0))
    # the blocks of all peers, one after the other
    row = tl.arange(0, C.PEERS * BLOCK)
    place = row // BLOCK
    source = (place + (place >= rank).to(tl.int32)).to(tl.int64)
    own = tl.cast(rank, tl.int64)
    for begin in range(program * BLOCK, size, step):
        at = begin + lane
        mask = (at < size)[:, None]
        value = tl.load(
            x + own * cut.step * VECTOR + elements(in_place(at, cut, part.width), VECTOR), mask=mask
        )
        target = own * joined.step + in_place(at, joined, part.width)
        tl.store(out + elements(target, VECTOR), expected_zero(value), mask=mask)
        at = begin + row % BLOCK
        mask = ((place < WORLD_SIZE - 1) & (at < size))[:, None]
        pointers = peers.slots + slot_offset + elements(place.to(tl.int64) * size + at, VECTOR)
        value = take_each(peers, pointers, mask, rank, begin // BLOCK, epoch, BLOCK)
        target = source * joined.step + in_place(at, joined, part.width)
        tl.store(out + elements(target, VECTOR), expected_zero(value), mask=mask)


WORDS = ("x", "out")  # what changes between launches


def launcher(
    peers: Peers,
    world_size: int,
    rank: int,
    shape: tuple[int, int],
    how: Exchange,
    itemsize: int,
    num_sms: int,
    config: MatmulConfig,
) -> Launcher:
    """Launches for x of ``shape``, called with (x, out), both contiguous; the caller checks them.

    A program moves ``tile_m`` x ``tile_n`` elements of each part at once.
    """
    rows, cols = how.part(*shape, world_size)
    vector = gcd(cols, 16 // itemsize)
    width = cols // vector
    size = rows * width
    below, beside = Cut(size, width), Cut(width, width * world_size)
    block = max(1, config.tile_m * config.tile_n // vector)
    choices = Choices(world_size, triton.next_power_of_2(world_size - 1), block, vector)

    def pack(x: torch.Tensor, out: torch.Tensor) -> Call:
        words = (x.data_ptr(), out.data_ptr())
        return alignment(words), words, lambda: {"x": x, "out": out}, ()

    fixed = {
        "peers": peers,
        "rank": rank,
        "part": Part(size, width),
        "cut": below if how.scatter_dim == 0 else beside,
        "joined": below if how.gather_dim == 0 else beside,
        "C": choices,
    }
    programs = min(num_sms, cdiv(size, block))
    return Launcher(exchange_parts_kernel, programs, fixed, pack, WORDS, num_warps=config.num_warps)
