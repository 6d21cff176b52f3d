"""Roles that both Hopper kernels of ``dispatch_grouped_matmul`` have: multiply, push, wait.

See ``dispatch_hopper.py`` and ``dispatch_hopper_ordered.py`` for the partitions that use them, and
``dispatch_triton.py`` for the protocol.

Tiles are tickets (``device/gluon/tickets.py``), drawn by the partition that fills the ring:
*gather* in one kernel, *load* in the other. So tiles that share weights begin at almost the same
time, also after some programs have waited for a peer (decision 0011).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon.matmul import Helped, multiply_tile, store_tile
from tileweave.device.gluon.peers import leave, load_epoch, notify_all, slots_at
from tileweave.device.gluon.signal import acquire, block_barrier, spin
from tileweave.device.gluon.tickets import take
from tileweave.kernels.experts.dispatch_triton import MAX_BLOCKS, PUSHED, SET
from tileweave.kernels.experts.tiles import SOURCES

PUSH_WARPS = gl.constexpr(2)

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in SOURCES)


class Tensors(NamedTuple):
    """What a call is about; ``offsets`` to ``send_offsets`` are fields of the plan."""

    x: Any
    y: Any
    offsets: Any
    row_entry: Any
    send_order: Any
    send_offsets: Any


class Weight(NamedTuple):
    """Columns and depth (N and K) of each expert's weight, and elements from a token to the next
    (bytes of packed FP8), which Triton specializes."""

    cols: Any
    depth: Any
    pitch: Any


class Sizes(NamedTuple):
    """Sizes of the routing, the weights and the schedule.

    max_tokens, topk, experts : tokens of a rank at most, choices of a token, experts of a rank.

    weight : a :class:`Weight`.

    block_experts, blocks : experts between two signals, and signals of a source.

    num_producers, tile_cols : programs that push, and tiles across y.

    k_blocks : blocks of TILE_K in K.
    """

    max_tokens: Any
    topk: Any
    experts: Any
    weight: Any
    block_experts: Any
    blocks: Any
    num_producers: Any
    tile_cols: Any
    k_blocks: Any


class Operands(NamedTuple):
    """What partitions share: the ring of operands, the image of a finished tile in shared memory,
    and the numbers of tiles on their way from the partition that draws them (``deals``)."""

    ring: Any
    y_buffer: Any
    deals: Any


class Choices(NamedTuple):
    """Decided when a kernel is compiled.

    PUSH_BLOCK : elements of a token that a producer has in flight.

    STAGES : buffers of the ring.

    WARPS : of *multiply*.

    HALVES : parts in which a finished tile goes through shared memory.

    GATHERED : rows came by ``cp.async``, which needs a fence before wgmma, and not by TMA.

    BY_TMA : whole tiles are stored by TMA; y has rows at multiples of 16 bytes.

    DEPTH_FIRST : experts are [E_local, K, N] in memory, as the backward pass reads them: the
        input gradient of an operator whose weights are [E_local, N, K].
    """

    WORLD_SIZE: int
    PUSH_BLOCK: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    STAGES: int
    WARPS: int
    HALVES: int
    GATHERED: bool
    BY_TMA: bool = True
    DEPTH_FIRST: bool = False


# sizes of the routing and of the schedule; Triton specializes those of the weight
UNSPECIALIZED = ["rank", *(name for name in Sizes._fields if name != "weight")]


@gluon.jit
def row_steps(tensors, row, rank, sizes, WORLD_SIZE: gl.constexpr):
    """How many steps down the ranks the sources of ``row`` are, one row or many."""
    return (
        rank + WORLD_SIZE - gl.load(tensors.row_entry + row) // sizes.topk // sizes.max_tokens
    ) % WORLD_SIZE


@gluon.jit
def row_sources(tensors, slot, row, rank, sizes, WORLD_SIZE: gl.constexpr):
    """Pointers to the tokens of ``row``, in x or in the slot."""
    token = gl.load(tensors.row_entry + row) // sizes.topk
    step = (rank + WORLD_SIZE - token // sizes.max_tokens) % WORLD_SIZE
    token = token % sizes.max_tokens
    remote = ((step - 1).to(gl.int64) * sizes.max_tokens + token) * sizes.weight.pitch
    return gl.where(step == 0, tensors.x + token.to(gl.int64) * sizes.weight.pitch, slot + remote)


@gluon.jit
def wait_steps(
    peers,
    rank,
    block,
    nearest,
    farthest,
    epoch,
    unit,
    WORLD_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Wait for ``block`` from the ranks ``nearest`` to ``farthest`` steps down, but not for this
    rank. ``unit``: for the report."""
    for step in range(gl.maximum(nearest, 1), farthest + 1):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        spin(
            peers.signals + block,
            source,
            source,
            MAX_BLOCKS,
            epoch,
            unit,
            peers.control,
            peers.report,
            1,
            1,
            WARPS,
        )
    acquire(epoch)


@gluon.jit
def await_all(peers, rank, blocks, program, epoch, WORLD_SIZE: gl.constexpr):
    """The last program: wait for the last block of all other ranks, without which a call may not
    end."""
    # the others wait for no rank
    farthest = gl.where(program == gl.num_programs(0) - 1, WORLD_SIZE - 1, 0)
    wait_steps(peers, rank, blocks - 1, 1, farthest, epoch, -1, WORLD_SIZE, PUSH_WARPS)


@gluon.jit
def all_have(peers, rank, block, epoch, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Whether all other ranks have signaled ``block``; orders nothing.

    Each lane loads one signal, and all lanes take the minimum, so they get the same answer although
    signals change in between. With scalar loads each lane would load each signal by itself, and
    lanes with different answers would wait for each other for ever at the next barrier.
    """
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    source = (rank + 1 + gl.arange(0, 32 * WARPS, layout=lane) % (WORLD_SIZE - 1)) % WORLD_SIZE
    seen = gl.load(peers.signals + source * MAX_BLOCKS + block, volatile=True)
    return gl.min(seen - epoch, axis=0) >= 0


@gluon.jit
def multiply_partition(tensors, y_desc, operands, peers, sizes, num_partitions, C: gl.constexpr):
    """The warpgroups: multiply each tile from the ring, then store its rows."""
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    WARPS: gl.constexpr = C.WARPS
    offsets, experts, tile_cols = tensors.offsets, sizes.experts, sizes.tile_cols
    epoch = load_epoch(peers)
    turn = 0
    count = 0
    tile = take(count, operands.deals, WARPS)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, C.GROUP_M)
        acc, turn, fault = multiply_tile(
            turn,
            sizes.k_blocks,
            operands.ring,
            peers.control,
            TILE_M,
            TILE_N,
            C.STAGES,
            WARPS,
            C.GATHERED,
            C.DEPTH_FIRST,
        )
        # no bias, no helpers; -1: a tile that reaches past its expert never goes by TMA
        store_tile(
            acc,
            fault,
            tensors.y,
            tensors.y,
            y_desc,
            operands.y_buffer,
            Helped(tensors.y, gl.to_tensor(0), 0, 1),
            first_row,
            walk.end,
            col * TILE_N,
            sizes.weight.cols,
            -1,
            TILE_M,
            TILE_N,
            C.HALVES,
            False,
            C.BY_TMA,
        )
        count += 1
        tile = take(count, operands.deals, WARPS)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    tma.store_wait(0)
    leave(peers, epoch, num_partitions)


@gluon.jit
def push_to(
    tensors,
    peers,
    slot_offset,
    peer,
    place,
    first,
    last,
    sizes,
    program,
    PUSH_BLOCK: gl.constexpr,
):
    """This program's part of the tokens whose lowest expert on ``peer`` is in [first, last), into
    tokens ``place`` of its slot."""
    LANE: gl.constexpr = 128 // tensors.x.dtype.element_ty.primitive_bitwidth  # 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([LANE], [32], [PUSH_WARPS], [0])
    x, pitch = tensors.x, sizes.weight.pitch
    bounds = tensors.send_offsets + peer * (sizes.experts + 1)
    target = (
        slots_at(peers, peer, x.dtype.element_ty)
        + slot_offset
        + place * sizes.max_tokens.to(gl.int64) * pitch
    )
    for index in range(
        gl.load(bounds + first) + program, gl.load(bounds + last), sizes.num_producers
    ):
        token = gl.load(tensors.send_order + peer * sizes.max_tokens + index)
        row = token.to(gl.int64) * pitch
        for column in range(0, pitch, PUSH_BLOCK):
            at = column + gl.arange(0, PUSH_BLOCK, layout=layout)
            mask = at < pitch
            value = gl.load(gl.multiple_of(x + row + at, [16]), mask=mask)
            gl.store(gl.multiple_of(target + row + at, [16]), value, mask=mask)


@gluon.jit
def push_tokens(tensors, peers, rank, sizes, slot_offset, program, epoch, C: gl.constexpr):
    """Producer, if this program is one: its part of the own tokens, block by block; the program
    that is the last to have pushed a block signals it."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    PUSH_BLOCK: gl.constexpr = C.PUSH_BLOCK
    if program < sizes.num_producers:
        for block in range(0, sizes.blocks):
            first = block * sizes.block_experts
            last = gl.minimum(first + sizes.block_experts, sizes.experts)
            for i in gl.static_range(1, WORLD_SIZE):
                peer = (rank + i) % WORLD_SIZE
                push_to(
                    tensors,
                    peers,
                    slot_offset,
                    peer,
                    i - 1,
                    first,
                    last,
                    sizes,
                    program,
                    PUSH_BLOCK,
                )
            block_barrier()
            pushed = peers.counters + (epoch & 1) * SET + PUSHED + block
            if gl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == sizes.num_producers - 1:
                index = rank * MAX_BLOCKS + block
                notify_all(peers, index, rank, epoch, WORLD_SIZE, False, PUSH_WARPS)


@gluon.jit
def clear_counters(peers, epoch, program):
    """Program 0: zero what the next call counts."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [PUSH_WARPS], [0])
    if program == 0:
        at = gl.arange(0, 64, layout=lanes)
        zero = gl.zeros([64], gl.int32, lanes)
        gl.store(peers.counters + (1 - (epoch & 1)) * SET + at, zero, mask=at < SET)
