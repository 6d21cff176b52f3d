"""The routing plan of a mixture of experts, made on the device in one launch: exchange of ids, stable counting sort, send lists.

    topk_ids  [T, k]                  own choices, -1: none
    slot      [R, max_tokens * k]     one of two, by parity of the epoch: the ids of every rank, -1 past their T
    fields    see ``ops/routing_plan.py``: offsets, row_entry, entry_row, topk_ids, send_order, send_offsets

Who writes, who reads. The first ``SLICES`` programs write this rank's ids into the slot of every rank, the own one too, and
signal each. Every program sorts, and so reads the ids of all ranks.

==================  =====  ===============================  ============================
signal (int32)      value  notifier                         waiter
==================  =====  ===============================  ============================
[source, slice]     epoch  program ``slice`` of ``source``  every program, before it sorts
==================  =====  ===============================  ============================

    rank r   | push ids | send lists (own ids only) | wait for all | count, place |

Why no slot is overwritten: every rank signals every peer in every call and every program waits for all of them, so when my call
n ends each peer has begun call n, hence ended n-1, the last reader of the slot that call n+1 writes.

Why nobody is stuck: pushing waits for nobody, and pushers are the lowest programs.

The sort has no second launch and no atomics: who places the entries of one expert in one part of the entries counts by itself
what stands before them, with one pass over all ids. That reads more (E_local + parts passes over R * max_tokens * k ids, from
L2), and saves launches, which is what counts when few tokens are decoded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.kernels.endpoint import Endpoint
from tileweave.language.remote import symm_at
from tileweave.language.signal import leave, load_epoch, notify_all, wait

MAX_SLICES = tl.constexpr(32)
BLOCK = 8192  # ids that a program looks at at once
SEND_BLOCK = 256  # tokens
NUM_WARPS = 8


@triton.jit
def push_ids(
    ids, own_ids, slot_table, signal_table, slot_offset, rank, size, valid, piece, epoch,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put slice ``piece`` of the own ids into every rank's slot, -1 from ``valid`` on, and signal each."""
    for block in range(piece, tl.cdiv(size, BLOCK), SLICES):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(ids + at, mask=at < valid, other=-1).to(tl.int32)
        tl.store(own_ids + at, value, mask=at < size)
        for step in tl.static_range(WORLD_SIZE):
            target = symm_at(slot_table, (rank + step) % WORLD_SIZE, tl.int32, 16) + slot_offset + rank * size
            tl.store(target + at, value, mask=at < size)
    notify_all(signal_table, rank * MAX_SLICES + piece, rank, epoch, WORLD_SIZE, True)


@triton.jit
def sort_expert(
    ids, offsets, row_entry, entry_row, rank, size, expert, part, parts, experts,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place the entries of a local expert that stand in one part of all entries. ``ids`` [R, size], of every rank.

    Entries are looked at in the order of rows, source by source from the own rank down. A part is a number of blocks.
    """
    per_source = tl.cdiv(size, BLOCK)
    blocks = per_source * WORLD_SIZE
    first, last = part * blocks // parts, (part + 1) * blocks // parts
    counts = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, blocks):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        before = expert + tl.where(block < first, 1, 0)  # this expert's own entries count in earlier parts only
        counts += ((local >= 0) & (local < before)).to(tl.int32)
    row = tl.sum(counts, axis=0)
    if part == 0:
        tl.store(offsets + expert, row)
    for block in range(first, last):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        mine = (local == expert) & (at < size)
        chosen = mine.to(tl.int32)
        rows = row + tl.cumsum(chosen, axis=0) - chosen
        entry = source * size + at
        tl.store(row_entry + rows, entry, mask=mine)
        tl.store(entry_row + entry, rows, mask=mine)
        if expert == 0:
            tl.store(entry_row + entry, -1, mask=((local < 0) | (local >= experts)) & (at < size))
        row += tl.sum(chosen, axis=0)
    if (part == parts - 1) & (expert == experts - 1):
        tl.store(offsets + experts, row)


@triton.jit
def list_sends(
    ids, send_order, send_offsets, tokens, max_tokens, topk, peer, expert, experts,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The own tokens whose lowest expert on ``peer`` is its ``expert``, behind those with a lower one. ``ids`` [T, k], own."""
    choice = tl.arange(0, TOPK)
    counts = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, tokens, BLOCK):
        lowest = _lowest(ids, begin, tokens, topk, choice, peer, experts, TOPK, BLOCK)
        counts += (lowest < expert).to(tl.int32)
    place = tl.sum(counts, axis=0)
    tl.store(send_offsets + peer * (experts + 1) + expert, place)
    for begin in range(0, tokens, BLOCK):
        lowest = _lowest(ids, begin, tokens, topk, choice, peer, experts, TOPK, BLOCK)
        chosen = (lowest == expert).to(tl.int32)
        places = place + tl.cumsum(chosen, axis=0) - chosen
        tl.store(send_order + peer * max_tokens + places, begin + tl.arange(0, BLOCK), mask=chosen != 0)
        place += tl.sum(chosen, axis=0)
    if expert == experts - 1:
        tl.store(send_offsets + peer * (experts + 1) + experts, place)


@triton.jit
def _lowest(ids, begin, tokens, topk, choice, peer, experts, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest of ``peer``'s experts that each token of a block has chosen, as it counts them; ``experts`` if none."""
    token = begin + tl.arange(0, BLOCK)
    mask = (token < tokens)[:, None] & (choice < topk)[None, :]
    local = tl.load(ids + token[:, None] * topk + choice[None, :], mask=mask, other=-1).to(tl.int32) - peer * experts
    return tl.min(tl.where((local >= 0) & (local < experts), local, experts), axis=1)


@triton.jit(do_not_specialize=["rank", "tokens", "max_tokens", "topk", "experts", "parts"])
def moe_routing_kernel(
    topk_ids, offsets, row_entry, entry_row, own_ids, send_order, send_offsets, slots, slot_size,
    slot_table, signal_table, signals, control, report, rank, tokens, max_tokens, topk, experts, parts,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    """Push, list, wait, sort; see the module's docstring."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    size = max_tokens * topk
    for piece in range(program, SLICES, num_programs):
        push_ids(
            topk_ids, own_ids, slot_table, signal_table, slot_offset, rank, size, tokens * topk, piece, epoch,
            WORLD_SIZE, SLICES, BLOCK // 8,
        )  # fmt: skip
    for unit in range(program, WORLD_SIZE * experts, num_programs):
        list_sends(
            topk_ids, send_order, send_offsets, tokens, max_tokens, topk, unit // experts, unit % experts, experts,
            TOPK, SEND_BLOCK,
        )  # fmt: skip
    for step in range(0, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        wait(signals, SLICES, epoch, source * MAX_SLICES, -1, control, report)
    for unit in range(program, experts * parts, num_programs):
        sort_expert(
            slots + slot_offset, offsets, row_entry, entry_row, rank, size, unit // parts, unit % parts, parts, experts,
            WORLD_SIZE, BLOCK,
        )  # fmt: skip
    leave(control, epoch, num_programs)


def launch(
    peers: Endpoint,
    topk_ids: torch.Tensor,
    fields: tuple[torch.Tensor, ...],
    tokens: int,
    max_tokens: int,
    experts: int,
    rank: int,
    world_size: int,
    num_sms: int,
) -> None:
    """Launch on the current stream. ``fields``: those of the plan, in its order. ``experts``: of a rank."""
    topk = topk_ids.shape[1]
    size = max_tokens * topk
    block = min(BLOCK, max(1024, triton.next_power_of_2(size)))
    most = 2 * num_sms
    parts = max(1, min(most // experts, world_size * triton.cdiv(size, block)))
    slices = 8 if size >= 8 * block // 8 else 1
    programs = max(1, min(most, max(experts * parts, world_size * experts)))
    moe_routing_kernel[(programs,)](
        topk_ids, *fields, peers.slots, peers.slot_size,
        peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
        rank, tokens, max_tokens, topk, experts, parts,
        WORLD_SIZE=world_size, SLICES=slices, TOPK=triton.next_power_of_2(topk), BLOCK=block, SEND_BLOCK=SEND_BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
