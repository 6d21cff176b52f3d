"""The routing plan of a mixture of experts, made on the device: ids exchanged, sorted, send lists.

    topk_ids  [T, k]                  own choices, -1: none
    slot      [R, max_tokens * k]     one of two, by parity of the epoch: the ids of every rank, -1 past their T
    entry     (source * max_tokens + t) * k + j: choice j of token t of a rank, hence a place in the slot
    row       an entry whose expert is on this rank, sorted: row_entry [row] = entry, entry_row [entry] = row
    fields    see ``ops/experts/routing_plan.py``: offsets, row_entry, entry_row, topk_ids, send_order, send_offsets

Few tokens take one launch, the kernel below; many take the two of ``sort.py``. Both write the same fields, by the same
signals, and read the same slots; ``schedule_grouped.routing_cut`` chooses, the same on all ranks.

Who writes, who reads, in one launch. The first program writes this rank's ids into the slot of every rank, the own one too, and
signals each. Every program sorts, and so reads the ids of all ranks.

==================  =====  ===========================  ============================
signal (int32)      value  notifier                     waiter
==================  =====  ===========================  ============================
[source, 0]         epoch  the first program of source  every program, before it sorts
==================  =====  ===========================  ============================

    program 0  | push ids | send lists (own ids only) | wait for all | count, place |
    others                | send lists (own ids only) | wait for all | count, place |

Why no slot is overwritten: every rank signals every peer in every call and every program waits for all of them, so when my call
n ends each peer has begun call n, hence ended n-1, the last reader of the slot that call n+1 writes.

Why nobody is stuck: pushing waits for nobody, and it is the lowest program that pushes.

After a time-out the sort goes on with what the slot holds, maybe ids of an earlier call, and no NaN shows it in integers: the
host raises ``PeerTimeout`` when this instance is next called, or in ``tw.synchronize`` (on the CPU at once).

One launch has no histogram: who places the entries of one expert in one part of the entries counts by itself what stands before
them, with one pass over all ids. That reads more (E_local * (parts + 1) passes over R * max_tokens * k ids, from L2), and saves
launches, which is what counts when few tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tileweave.device.triton.signal import leave, load_epoch, wait
from tileweave.kernels.experts.sort import (
    MAX_SLICES,
    count_kernel,
    lowest_expert,
    place_kernel,
    push_ids,
)
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.grouped import RoutingCut

SEND_BLOCK = tl.constexpr(256)  # tokens
NUM_WARPS = 8


@triton.jit
def sort_expert(
    ids, offsets, row_entry, entry_row, rank, size, expert, part, parts, experts,
    bound, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place the entries of a local expert that stand in one part of all entries. ``ids`` [R, size], of every rank.

    Entries are looked at in the order of rows, source by source from the own rank down: R * size of them in blocks of BLOCK,
    dealt evenly to ``parts`` parts. ``bound``, all entries, is only met where ids change under the sort, after a time-out.
    """
    per_source = tl.cdiv(size, BLOCK)
    blocks = per_source * WORLD_SIZE
    first, last = part * blocks // parts, (part + 1) * blocks // parts
    counts = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, blocks):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        before = expert + tl.where(
            block < first, 1, 0
        )  # this expert's own entries count in earlier parts only
        counts += ((local >= 0) & (local < before)).to(tl.int32)
    row = tl.sum(counts, axis=0)
    if part == 0:
        tl.store(offsets + expert, tl.minimum(row, bound))
    for block in range(first, last):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        mine = (local == expert) & (at < size)
        chosen = mine.to(tl.int32)
        rows = row + tl.cumsum(chosen, axis=0) - chosen
        entry = source * size + at
        tl.store(row_entry + rows, entry, mask=mine & (rows < bound))
        tl.store(entry_row + entry, tl.where(rows < bound, rows, -1), mask=mine)
        if expert == 0:
            tl.store(entry_row + entry, -1, mask=((local < 0) | (local >= experts)) & (at < size))
        row += tl.sum(chosen, axis=0)
    if (part == parts - 1) & (expert == experts - 1):
        tl.store(offsets + experts, tl.minimum(row, bound))


@triton.jit
def list_sends(
    ids, send_order, send_offsets, tokens, max_tokens, topk, peer, expert, experts,
    NONE: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The own tokens whose lowest expert on ``peer`` is its ``expert``, behind those with a lower one. ``ids`` [T, k], own."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, tokens, BLOCK):
        lowest = lowest_expert(ids, begin, tokens, topk, peer, experts, NONE, TOPK, BLOCK)
        counts += (lowest < expert).to(tl.int32)
    place = tl.sum(counts, axis=0)
    tl.store(send_offsets + peer * (experts + 1) + expert, place)
    for begin in range(0, tokens, BLOCK):
        lowest = lowest_expert(ids, begin, tokens, topk, peer, experts, NONE, TOPK, BLOCK)
        chosen = (lowest == expert).to(tl.int32)
        places = place + tl.cumsum(chosen, axis=0) - chosen
        tl.store(
            send_order + peer * max_tokens + places, begin + tl.arange(0, BLOCK), mask=chosen != 0
        )
        place += tl.sum(chosen, axis=0)
    if expert == experts - 1:
        tl.store(send_offsets + peer * (experts + 1) + experts, place)


@triton.jit(do_not_specialize=["tokens", "rank", "max_tokens", "topk", "experts", "bound", "parts"])
def moe_routing_kernel(
    topk_ids, offsets, row_entry, entry_row, own_ids, send_order, send_offsets, tokens,
    slots, slot_size, slot_table, signal_table, signals, control, report, histogram,
    rank, max_tokens, topk, experts, bound, parts,
    WORLD_SIZE: tl.constexpr, SLICES: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push, list, wait, sort; see the module's docstring. Arguments as those of ``sort.py``: some are not used here."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    size = max_tokens * topk
    if program == 0:
        push_ids(
            topk_ids, own_ids, slot_table, signal_table, slot_offset, rank, size, tokens * topk, 0, epoch, WORLD_SIZE, 1
        )  # fmt: skip
    for unit in range(program, WORLD_SIZE * experts, num_programs):
        list_sends(
            topk_ids, send_order, send_offsets, tokens, max_tokens, topk, unit // experts, unit % experts, experts,
            EXPERTS, TOPK, SEND_BLOCK,
        )  # fmt: skip
    for step in range(0, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        wait(signals, 1, epoch, source * MAX_SLICES, -1, control, report)
    for unit in range(program, experts * parts, num_programs):
        sort_expert(
            slots + slot_offset, offsets, row_entry, entry_row, rank, size, unit // parts, unit % parts, parts, experts, bound,
            WORLD_SIZE, BLOCK,
        )  # fmt: skip
    leave(control, epoch, num_programs)


WORDS = (
    "topk_ids",
    "offsets",
    "row_entry",
    "entry_row",
    "own_ids",
    "send_order",
    "send_offsets",
    "tokens",
)  # change by call


class Launcher:
    """Launches for one shape; ``ops`` keeps one for each.

    ``begins``: where the fields begin in a plan's table, int32 words. ``experts``: of a rank. ``divided``, the last integer of
    the kernels: the parts of one launch, or the span of two. ``peers.counters`` is the histogram.
    """

    def __init__(
        self, peers: Peers, cut: RoutingCut, begins: Sequence[int], max_tokens: int, topk: int, experts: int,
        rank: int, world_size: int, num_sms: int,
    ) -> None:  # fmt: skip
        self.begins, most, size = begins[:-1], 2 * num_sms, max_tokens * topk
        if cut.launches == 1:
            divided = max(1, min(most // experts, world_size * triton.cdiv(size, cut.block)))
            programs = max(1, min(most, experts * max(divided, world_size)))
            self.kernels = [(Launches(moe_routing_kernel, WORDS, num_warps=NUM_WARPS), programs)]
        else:
            divided = cut.span(world_size * size, num_sms)
            units = min(most, cut.units(world_size, max_tokens, topk, num_sms))
            count, place = (
                Launches(kernel, WORDS, num_warps=NUM_WARPS)
                for kernel in (count_kernel, place_kernel)
            )
            self.kernels = [(count, cut.slices + units), (place, units)]
        self.arguments = (
            peers.slots, peers.slot_size, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
            peers.counters, rank, max_tokens, topk, experts, world_size * size, divided, world_size, cut.slices,
            triton.next_power_of_2(experts), triton.next_power_of_2(topk), cut.block,
        )  # fmt: skip

    def __call__(self, topk_ids: torch.Tensor, table: torch.Tensor, tokens: int) -> None:
        """Launch on the current stream: topk_ids [tokens, k] -> the plan's ``table``."""
        at, address = topk_ids.data_ptr(), table.data_ptr()
        variant = (topk_ids.dtype, (at | address) % 16 == 0)
        words = (at, *(address + 4 * begin for begin in self.begins), tokens)

        def arguments() -> tuple[object, ...]:
            return topk_ids, *(table[begin:] for begin in self.begins), tokens, *self.arguments

        for launches, programs in self.kernels:
            launches(programs, variant, arguments, words)
