"""The routing plan of a mixture of experts, made on the device: ids exchanged, sorted, send lists.

    topk_ids  [T, k]               own choices, -1: none
    slot      [R, max_tokens * k]  one of two, by parity of the epoch: ids of all ranks, -1 past T
    entry     (source * max_tokens + t) * k + j: choice j of token t of source; an index of the slot
    row       an entry whose expert is on this rank, sorted: row_entry [row] = entry and
              entry_row [entry] = row
    fields    offsets, row_entry, entry_row, topk_ids, send_order, send_offsets; see
              ``ops/experts/routing_plan.py``

Few tokens take one launch, the kernel below; many take the two of ``sort.py``. Both write the same
fields, with the same signals, and read the same slots; ``schedules.grouped.routing_cut`` chooses,
the same on all ranks.

Which rank writes, and which reads, in one launch. The first program writes this rank's ids into the
slot of every rank, its own included, and signals each. Every program sorts, and so reads the ids of
all ranks.

==================  =====  ===========================  ============================
signal (int32)      value  notifier                     waiter
==================  =====  ===========================  ============================
[source, 0]         epoch  the first program of source  every program, before it sorts
==================  =====  ===========================  ============================

    program 0  | push ids | send lists (own ids only) | wait for all | count, place |
    others                | send lists (own ids only) | wait for all | count, place |

Why no slot is overwritten: every rank signals every peer in every call and every program waits for
all of them, so when my call n ends each peer has begun call n, hence ended n-1, the last reader of
the slot that call n+1 writes.

Why no rank waits for ever: pushing does not wait, and the lowest program pushes.

After a time-out the sort continues with what the slot holds, possibly ids of an earlier call, and
integers have no NaN to show it: the host raises ``PeerTimeout`` when this instance is next called,
or in ``tw.synchronize`` (on the CPU at once).

One launch has no histogram: a program that places the entries of one expert in one part of all
entries counts the entries before them itself, with one pass over all ids. That reads more (E_local
* (parts + 1) passes over R * max_tokens * k ids, from L2), but saves a launch, which decides the
time when few tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import leave, load_epoch, wait
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.kernels.experts.sort import (
    Choices,
    Items,
    Sizes,
    Tensors,
    count_kernel,
    lowest_expert,
    place_kernel,
    push_ids,
)
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.grouped import RoutingCut

SEND_BLOCK = tl.constexpr(256)  # tokens
NUM_WARPS = 8


@triton.jit
def sort_expert(ids, tensors, rank, sizes, expert, part, parts, C: tl.constexpr):
    """Place the entries of a local expert that are in one part of all entries.

    ids : ``[R, size]``, of all ranks.

    part, parts : entries are read in the order of rows, source by source from the own rank down:
        R * size of them in blocks of BLOCK, dealt evenly to ``parts`` parts.

    Only where ids change during the sort, after a time-out, are there more rows than
    ``sizes.bound``.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    BLOCK: tl.constexpr = C.BLOCK
    size, experts, bound = sizes.max_tokens * sizes.topk, sizes.experts, sizes.bound
    per_source = tl.cdiv(size, BLOCK)
    blocks = per_source * WORLD_SIZE
    first, last = part * blocks // parts, (part + 1) * blocks // parts
    counts = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, blocks):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        # this expert's own entries count in earlier parts only
        before = expert + tl.where(block < first, 1, 0)
        counts += ((local >= 0) & (local < before)).to(tl.int32)
    row = tl.sum(counts, axis=0)
    if part == 0:
        tl.store(tensors.offsets + expert, tl.minimum(row, bound))
    for block in range(first, last):
        source = (rank + WORLD_SIZE - block // per_source) % WORLD_SIZE
        at = block % per_source * BLOCK + tl.arange(0, BLOCK)
        local = tl.load(ids + source * size + at, mask=at < size, other=-1) - rank * experts
        mine = (local == expert) & (at < size)
        chosen = mine.to(tl.int32)
        rows = row + tl.cumsum(chosen, axis=0) - chosen
        entry = source * size + at
        tl.store(tensors.row_entry + rows, entry, mask=mine & (rows < bound))
        tl.store(tensors.entry_row + entry, tl.where(rows < bound, rows, -1), mask=mine)
        if expert == 0:
            tl.store(
                tensors.entry_row + entry, -1, mask=((local < 0) | (local >= experts)) & (at < size)
            )
        row += tl.sum(chosen, axis=0)
    if (part == parts - 1) & (expert == experts - 1):
        tl.store(tensors.offsets + experts, tl.minimum(row, bound))


@triton.jit
def list_sends(tensors, tokens, sizes, peer, expert, C: tl.constexpr):
    """The own tokens whose lowest expert on ``peer`` is its ``expert``, after those with a lower
    one."""
    own = Items(tensors.topk_ids, tokens, sizes.topk, peer, sizes.experts)
    counts = tl.zeros((SEND_BLOCK,), tl.int32)
    for begin in range(0, tokens, SEND_BLOCK):
        lowest = lowest_expert(own, begin, C.EXPERTS, C.TOPK, SEND_BLOCK)
        counts += (lowest < expert).to(tl.int32)
    place = tl.sum(counts, axis=0)
    tl.store(tensors.send_offsets + peer * (sizes.experts + 1) + expert, place)
    for begin in range(0, tokens, SEND_BLOCK):
        lowest = lowest_expert(own, begin, C.EXPERTS, C.TOPK, SEND_BLOCK)
        chosen = (lowest == expert).to(tl.int32)
        places = place + tl.cumsum(chosen, axis=0) - chosen
        tl.store(
            tensors.send_order + peer * sizes.max_tokens + places,
            begin + tl.arange(0, SEND_BLOCK),
            mask=chosen != 0,
        )
        place += tl.sum(chosen, axis=0)
    if expert == sizes.experts - 1:
        tl.store(tensors.send_offsets + peer * (sizes.experts + 1) + sizes.experts, place)


@triton.jit(do_not_specialize=["tokens", "rank", "max_tokens", "topk", "experts", "bound", "parts"])
def moe_routing_kernel(
    tensors, tokens, peers, rank, max_tokens, topk, experts, bound, parts, C: tl.constexpr
):
    """Push, list, wait, sort; see the module's docstring. Arguments as those of ``sort.py``."""
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    sizes = Sizes(max_tokens, topk, experts, bound)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = load_epoch(peers)
    slot_offset = (epoch & 1).to(tl.int64) * peers.slot_size
    size = max_tokens * topk
    if program == 0:
        push_ids(tensors, peers, slot_offset, rank, size, tokens * topk, 0, epoch, C)
    for unit in range(program, WORLD_SIZE * experts, num_programs):
        list_sends(tensors, tokens, sizes, unit // experts, unit % experts, C)
    for step in range(0, WORLD_SIZE):
        source = (rank + WORLD_SIZE - step) % WORLD_SIZE
        wait(peers, source * MAX_SLICES, epoch)
    for unit in range(program, experts * parts, num_programs):
        ids = peers.slots + slot_offset
        sort_expert(ids, tensors, rank, sizes, unit // parts, unit % parts, parts, C)
    leave(peers, epoch, num_programs)


# what changes between launches
WORDS = (*(f"tensors.{name}" for name in Tensors._fields), "tokens")


def launcher(
    peers: Peers,
    cut: RoutingCut,
    begins: Sequence[int],
    max_tokens: int,
    topk: int,
    experts: int,
    rank: int,
    world_size: int,
    num_sms: int,
) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """Launches for one shape, called with (topk_ids [tokens, k], the plan's table, tokens).

    begins : where the fields begin in a plan's table, in int32 words, and its size.

    experts : of a rank.

    peers : its counters are the histogram.
    """
    most, size = 2 * num_sms, max_tokens * topk
    choices = Choices(
        world_size,
        cut.slices,
        triton.next_power_of_2(experts),
        triton.next_power_of_2(topk),
        cut.block,
    )
    fixed: dict[str, Any] = {
        "peers": peers,
        "rank": rank,
        "max_tokens": max_tokens,
        "topk": topk,
        "experts": experts,
        "bound": world_size * size,
        "C": choices,
    }
    if cut.launches == 1:
        parts = max(1, min(most // experts, world_size * triton.cdiv(size, cut.block)))
        programs = max(1, min(most, experts * max(parts, world_size)))
        kernels = [(moe_routing_kernel, programs)]
        fixed["parts"] = parts
    else:
        units = min(most, cut.units(world_size, max_tokens, topk, num_sms))
        kernels = [(count_kernel, cut.slices + units), (place_kernel, units)]
        fixed["span"] = cut.span(world_size * size, num_sms)

    def packed(call: Call) -> Call:
        return call

    launches = [
        Launcher(kernel, programs, fixed, packed, WORDS, num_warps=NUM_WARPS)
        for kernel, programs in kernels
    ]
    fields = begins[:-1]

    def launch(topk_ids: torch.Tensor, table: torch.Tensor, tokens: int) -> None:
        at, address = topk_ids.data_ptr(), table.data_ptr()
        variant = (topk_ids.dtype, (at | address) % 16 == 0)
        words = (at, *(address + 4 * begin for begin in fields), tokens)

        def changing() -> dict[str, Any]:
            tensors = Tensors(topk_ids, *(table[begin:] for begin in fields))
            return {"tensors": tensors, "tokens": tokens}

        for one in launches:
            one((variant, words, changing, ()))

    return launch
