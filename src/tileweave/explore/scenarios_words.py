"""Device functions that a kernel of a user calls, or whose edges the sizes of operators seldom
meet, in small kernels of their own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.device.triton.peers import notify, wait
from tileweave.device.triton.remote import put_rows
from tileweave.device.triton.self_signaling import unmarked
from tileweave.explore.ranks import World
from tileweave.explore.scenarios_local import Found, Local
from tileweave.explore.scenarios_workspace import equal
from tileweave.kernels.all_reduce.collective import Shards
from tileweave.ops.core.registry import endpoint

BLOCK = tl.constexpr(16)


@triton.jit
def tell_kernel(peers, peer, index, epoch, awaited):
    notify(peers, peer, index, epoch)
    wait(peers, awaited, epoch)


@triton.jit
def rows_kernel(target, source, end, width, target_pitch, source_pitch):
    put_rows(target, source, 0, end, width, target_pitch, source_pitch, BLOCK)


@triton.jit
def unmarked_kernel(x, out):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, unmarked(tl.load(x + lane)))


def words(world: World, rank: int, seed: int) -> Found:
    instance = world.workspace(rank).instance("told", "sm")
    instance.reserve(64)
    peers: Any = endpoint(instance, torch.float32)
    peer, epoch = (rank + 1) % world.size, 2**31 - 1 - seed
    source = (rank - 1) % world.size
    tell_kernel[(1,)](peers, peer, rank * 32 + seed, epoch, source * 32 + seed)
    yield equal("what it was told", int(instance.signals[source * 32 + seed]), epoch)
    yield equal("others", instance.signals[rank * 32 : rank * 32 + 32].tolist(), [0] * 32)

    end = (1, 16, 17, 33)[seed % 4]
    source, target = torch.arange(64.0), torch.zeros(64)
    want = torch.zeros(64)
    for i in range(end):
        want[i // 5 * 7 + i % 5] = source[i // 5 * 6 + i % 5]
    for name, tensor in (("source", source), ("target", target)):
        world.know(rank, name, tensor)
    rows_kernel[(1,)](target, source, end, 5, 7, 6)
    yield "rows", target, want

    x = torch.tensor([-0.0, 0.0, -1.5, 2.0] * 4)
    out = torch.full((16,), 7.0)
    unmarked_kernel[(1,)](x, out)
    bits = out.view(torch.int32).tolist()
    yield equal("one zero", bits, (x + 0.0).view(torch.int32).tolist())

    for cols in range(1, 70):
        own = Shards.of_columns(3, cols, world.size).cols
        busy = -(-cols // own)
        yield equal(
            f"{cols} columns",
            (own * world.size >= cols, busy >= world.size - 1 or cols < world.size),
            (True,) * 2,
        )


SCENARIOS = (Local("words", words),)
