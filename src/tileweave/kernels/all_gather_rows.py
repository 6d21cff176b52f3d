"""all_gather_rows: gathered[M, K] = x[m, K] of all ranks, in one launch; for a matmul of the vendor's library behind it.

    x     [m, K]       own shard, m = M/R          gathered [M, K], local
    slot  [R-1, m, K]  one of two, by parity of the epoch; place i holds the shard of the i-th peer

Who writes, who reads. A program takes blocks of the own shard to every peer's slot, into this rank's place, and to the own
``gathered``; then it takes the same blocks of all peers from the own slot to ``gathered``. There is no signal and no fence:
data announces itself (``language/marked.py``), so what was minus zero comes out as zero.

    program p | push block p to all | push block p + P to all | ... | take block p of all | take block p + P of all | ...

Why no slot is overwritten: every rank needs data of every peer in every call, so when my call n ends each peer has begun call
n, hence ended n-1, the last reader of the slot (and writer of its zeros) that call n+1 writes.
Why nobody is stuck: a program pushes before it waits, and waits for the same program of peers.

Why beside a fused kernel: below a thousand rows a shard's way is short, and the library's matmul is faster than ours by
more than that. Nothing overlaps; see docs/decisions/0011.
Limits: x contiguous. Source: NCCL's LL protocol.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileweave.config import MatmulConfig
from tileweave.kernels.endpoint import Endpoint
from tileweave.kernels.launch import Prepared, hooked, prepare
from tileweave.language.marked import expected_zero, put_marked, take_each
from tileweave.language.remote import symm_at
from tileweave.language.signal import faulted, leave, load_epoch
from tileweave.schedule import cdiv

MAX_SLICES = tl.constexpr(32)


@triton.jit(do_not_specialize=["rank"])
def all_gather_rows_kernel(
    x, gathered, slots, slot_table, control, report, rank, slot_size, size,
    WORLD_SIZE: tl.constexpr, PEERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``size``: elements of a shard. ``PEERS``: a power of two, R-1 or more."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = load_epoch(control)
    slot_offset = (epoch & 1).to(tl.int64) * slot_size
    dtype: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    for begin in range(program * BLOCK, size, num_programs * BLOCK):
        at = begin + lane
        value = tl.load(x + at, mask=at < size)
        for i in tl.static_range(1, WORLD_SIZE):
            peer = (rank + i) % WORLD_SIZE
            place = (rank - (rank > peer).to(tl.int32)).to(tl.int64) * size
            put_marked(symm_at(slot_table, peer, dtype, 16) + slot_offset + place + at, value, at < size)
        tl.store(gathered + tl.cast(rank, tl.int64) * size + at, value, mask=at < size)
    peer = tl.arange(0, PEERS)
    source = (peer + (peer >= rank).to(tl.int32)).to(tl.int64)
    for begin in range(program * BLOCK, size, num_programs * BLOCK):
        at = begin + lane
        mask = (peer < WORLD_SIZE - 1)[:, None] & (at < size)[None, :]
        pointers = slots + slot_offset + peer.to(tl.int64)[:, None] * size + at[None, :]
        value = take_each(pointers, mask, rank, begin // BLOCK, epoch, control, report, MAX_SLICES)
        value = tl.where(faulted(control) != 0, float("nan"), expected_zero(value)).to(dtype)
        tl.store(gathered + source[:, None] * size + at[None, :], value, mask=mask)
    leave(control, epoch, num_programs)


WORDS = ("x", "gathered")  # what changes between the launches of one shape


class Launcher:
    """One shape's launches of this kernel; ``ops`` keeps one for each shape, and checks the arguments."""

    def __init__(self, peers: Endpoint, world_size: int, rank: int, programs: int, config: MatmulConfig) -> None:
        self.peers, self.world_size, self.rank, self.programs, self.config = peers, world_size, rank, programs, config
        self.prepared: dict[tuple[object, ...], Prepared | None] = {}

    def __call__(self, x: torch.Tensor, gathered: torch.Tensor) -> None:
        """Launch on the current stream. ``gathered`` [M, K], contiguous like x."""
        words = (x.data_ptr(), gathered.data_ptr())
        variant = (x.numel(), *(at % 16 == 0 for at in words))
        prepared = self.prepared.get(variant)
        if prepared is not None and not hooked():
            return prepared(words)
        peers, block = self.peers, self.config.tile_m * self.config.tile_n
        programs = min(self.programs, cdiv(x.numel(), block))
        arguments = (
            x, gathered, peers.slots, peers.slot_table, peers.control, peers.report, self.rank, peers.slot_size, x.numel(),
            self.world_size, triton.next_power_of_2(self.world_size - 1), block,
        )  # fmt: skip
        compiled = all_gather_rows_kernel[(programs,)](*arguments, num_warps=self.config.num_warps)
        if variant not in self.prepared:
            self.prepared[variant] = prepare(compiled, programs, arguments, WORDS)
        return None
