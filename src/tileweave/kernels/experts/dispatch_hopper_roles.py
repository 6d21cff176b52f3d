"""Roles that both Hopper kernels of ``dispatch_grouped_matmul`` have: multiplying, pushing, waiting, in Gluon.

See ``dispatch_hopper.py`` and ``dispatch_hopper_ordered.py`` for the partitions they make up, and
``dispatch_triton.py`` for the protocol.

Tiles are tickets (``device/gluon/tickets.py``): whoever feeds the ring, *gather* in one kernel, *load* in the other, draws
them. So tiles that share weights begin at almost the same time, also after some have waited for a peer (decision 0011).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileweave.device.gluon.matmul import Helped, multiply_tile, store_tile
from tileweave.device.gluon.signal import acquire, block_barrier, leave, notify_all, spin, symm_at
from tileweave.device.gluon.tickets import take
from tileweave.kernels.experts.tiles import SOURCES

# These are those of ``dispatch_triton.py``, whose kernel runs on the same instance: they must be alike.
MAX_BLOCKS = gl.constexpr(32)  # signal words of a source
# Counters of a call: tickets for tiles, pushed blocks, tickets for units of rows. There are two sets, by parity of the epoch.
TICKETS, PUSHED, UNITS, SET = gl.constexpr(0), gl.constexpr(1), gl.constexpr(33), gl.constexpr(34)
PUSH_WARPS = gl.constexpr(2)
UNSPECIALIZED = [
    "rank", "max_tokens", "topk", "experts", "block_experts", "blocks", "num_producers", "tile_cols", "k_blocks",
]  # fmt: skip

first_expert, walk_to, place_in_expert = (gluon.jit(source) for source in SOURCES)


@gluon.jit
def row_steps(row_entry, row, max_tokens, topk, rank, WORLD_SIZE: gl.constexpr):
    """How far down the ranks the tokens of ``row`` come from, one or many."""
    return (rank + WORLD_SIZE - gl.load(row_entry + row) // topk // max_tokens) % WORLD_SIZE


@gluon.jit
def wait_steps(
    signals, block, nearest, farthest, rank, epoch, tile, control, report, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Wait for ``block`` from the ranks ``nearest`` to ``farthest`` steps down, but for this rank. ``tile``: for the report."""
    for step in range(gl.maximum(nearest, 1), farthest + 1):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        spin(signals + block, source, source, MAX_BLOCKS, epoch, tile, control, report, 1, 1, WARPS)
    acquire(epoch)


@gluon.jit
def await_all(signals, blocks, program, rank, epoch, control, report, WORLD_SIZE: gl.constexpr):
    """The last program: wait for the last block of all other ranks, without which a call may not end."""
    farthest = gl.where(
        program == gl.num_programs(0) - 1, WORLD_SIZE - 1, 0
    )  # the others wait for nobody
    wait_steps(
        signals, blocks - 1, 1, farthest, rank, epoch, -1, control, report, WORLD_SIZE, PUSH_WARPS
    )


@gluon.jit
def all_have(signals, block, rank, epoch, WORLD_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Whether all other ranks have signalled ``block``; orders nothing.

    A word for each lane, and the least over all lanes: every lane gets the same answer, though the words change meanwhile.
    Scalar loads would be one for each lane, and lanes that disagree part for ever at the next barrier.
    """
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    source = (rank + 1 + gl.arange(0, 32 * WARPS, layout=lane) % (WORLD_SIZE - 1)) % WORLD_SIZE
    return (
        gl.min(gl.load(signals + source * MAX_BLOCKS + block, volatile=True) - epoch, axis=0) >= 0
    )


@gluon.jit
def multiply_partition(
    y, y_desc, y_buffer, ring, line, offsets, control, experts, cols, tile_cols,
    k_blocks, num_partitions,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    HALVES: gl.constexpr, BY_TMA: gl.constexpr, DEPTH_FIRST: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """The warpgroups: multiply each tile from the ring, then store its rows."""
    epoch = gl.load(control, volatile=True)
    turn = 0
    count = 0
    tile = take(count, line, WARPS)
    walk = walk_to(
        first_expert(offsets, tile_cols, TILE_M), tile, offsets, experts, tile_cols, TILE_M
    )
    while walk.expert < experts:
        first_row, col = place_in_expert(walk, tile, tile_cols, TILE_M, GROUP_M)
        acc, turn, fault = multiply_tile(
            turn, k_blocks, ring, control, TILE_M, TILE_N, STAGES, WARPS, GATHERED, DEPTH_FIRST
        )
        store_tile(  # no bias, no helpers; -1: a tile that reaches past its expert never goes by TMA
            acc, fault, y, y, y_desc, y_buffer, Helped(y, epoch * 0, 0, 1), first_row, walk.end, col * TILE_N, cols, -1,
            TILE_M, TILE_N, HALVES, False, BY_TMA,
        )  # fmt: skip
        count += 1
        tile = take(count, line, WARPS)
        walk = walk_to(walk, tile, offsets, experts, tile_cols, TILE_M)
    tma.store_wait(0)
    leave(control, epoch, num_partitions)


@gluon.jit
def push_to(
    x, send_order, send_offsets, slot_table, slot_offset, peer, place, first, last, max_tokens, experts, depth, program,
    num_producers, BLOCK: gl.constexpr,
):  # fmt: skip
    """This program's share of the tokens whose lowest expert on ``peer`` is in [first, last), into its slot at ``place``."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [PUSH_WARPS], [0])
    bounds = send_offsets + peer * (experts + 1)
    target = (
        symm_at(slot_table, peer, x.dtype.element_ty)
        + slot_offset
        + place * max_tokens.to(gl.int64) * depth
    )
    for index in range(gl.load(bounds + first) + program, gl.load(bounds + last), num_producers):
        row = gl.load(send_order + peer * max_tokens + index).to(gl.int64) * depth
        for column in range(0, depth, BLOCK):
            at = column + gl.arange(0, BLOCK, layout=layout)
            mask = at < depth
            value = gl.load(gl.multiple_of(x + row + at, [16]), mask=mask)
            gl.store(gl.multiple_of(target + row + at, [16]), value, mask=mask)


@gluon.jit
def push_tokens(
    x, send_order, send_offsets, slot_table, signal_table, counters, slot_offset, rank, max_tokens, experts, depth,
    block_experts, blocks, program, num_producers, epoch, WORLD_SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Producer, if this program is one: its share of the own tokens, block by block; who is the last in one signals it."""
    if program < num_producers:
        for block in range(0, blocks):
            first = block * block_experts
            last = gl.minimum(first + block_experts, experts)
            for i in gl.static_range(1, WORLD_SIZE):
                push_to(
                    x, send_order, send_offsets, slot_table, slot_offset, (rank + i) % WORLD_SIZE, i - 1, first, last,
                    max_tokens, experts, depth, program, num_producers, BLOCK,
                )  # fmt: skip
            block_barrier()
            pushed = counters + (epoch & 1) * SET + PUSHED + block
            if gl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == num_producers - 1:
                notify_all(
                    signal_table,
                    rank * MAX_BLOCKS + block,
                    rank,
                    epoch,
                    WORLD_SIZE,
                    False,
                    PUSH_WARPS,
                )


@gluon.jit
def clear_counters(counters, epoch, program):
    """Program 0: zero what the next call counts."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [PUSH_WARPS], [0])
    if program == 0:
        at = gl.arange(0, 64, layout=lanes)
        gl.store(counters + (1 - (epoch & 1)) * SET + at, at * 0, mask=at < SET)
