"""A kernel of your own with tileweave's device functions: heat diffusion on a torus that is split
into bands of rows, one per rank.

    python examples/neighbour_exchange.py [ranks]   # on two GPUs, else in Triton's interpreter

A step needs the four neighbours of each point, so it needs one row of the rank above and one of the
rank below. The first two programs push those rows. The rows in between need no other rank and hide
the transfer. The last two programs wait.

    x, y  [rows, WIDTH]  own band before and after the step
    slot  [2, WIDTH]     the row above the band and the row below it; the parity of the epoch
                         chooses one of two slots

==============  =====  =======================================  ===================================
signal (int32)  value  notifier, after its row                  waiter
==============  =====  =======================================  ===================================
[source, side]  epoch  the rank above (side 0) or below (1)     the program of the first (last) row
==============  =====  =======================================  ===================================

Why no slot is overwritten: a rank pushes to two ranks and waits for the same two. When its step n
ends, both have begun step n and have ended step n-1, which read the slot that step n+1 writes.
"""

import argparse
import time

import torch
import triton
import triton.language as tl

import tileweave as tw
from tileweave.bench.subjects import worst
from tileweave.device.triton.peers import faulted, leave, load_epoch, notify, slots_at, wait
from tileweave.device.triton.remote import put
from tileweave.errors import require
from tileweave.launcher import Member, default_device_type, default_world_size, end_with, launch
from tileweave.ops.core.registry import endpoint, name_of, workspace_of
from tileweave.transport.protocol import MAX_SLICES
from tileweave.transport.workspace import Instance

WORDS = tl.constexpr(MAX_SLICES)  # signals per source
ROWS, COLS, STEPS, RATE = 8, 256, 20, 0.2


@triton.jit
def push_border(
    x, peers, slot, side, rank, rows, epoch, WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Producer. Side 0: the last row to the rank below, as the row above its band. Side 1: the
    first row to the rank above, as the row below its band."""
    peer = (rank + WORLD_SIZE + 1 - 2 * side) % WORLD_SIZE
    target = slots_at(peers, peer, x.dtype.element_ty) + slot + side * WIDTH
    put(target, x + (1 - side) * (rows - 1) * WIDTH, 0, WIDTH, WIDTH)
    notify(peers, peer, rank * WORDS + side, epoch)


@triton.jit
def diffuse_kernel(x, y, peers, rank, rows, rate, WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """y = x + rate * (the four neighbours - 4 x), one row per program, the border rows last."""
    program = tl.program_id(0)
    epoch = load_epoch(peers)
    slot = (epoch & 1) * peers.slot_size
    if program < 2:
        push_border(x, peers, slot, program, rank, rows, epoch, WORLD_SIZE, WIDTH)
    row, side = program + 1, -1
    col = tl.arange(0, WIDTH)
    halo = tl.zeros((WIDTH,), x.dtype.element_ty)
    if program >= rows - 2:
        side = program - (rows - 2)
        row = side * (rows - 1)
        source = (rank + WORLD_SIZE - 1 + 2 * side) % WORLD_SIZE
        wait(peers, source * WORDS + side, epoch, program)
        halo = tl.load(peers.slots + slot + side * WIDTH + col)
    above = tl.where(side == 0, halo, tl.load(x + (row + rows - 1) % rows * WIDTH + col))
    below = tl.where(side == 1, halo, tl.load(x + (row + 1) % rows * WIDTH + col))
    left = tl.load(x + row * WIDTH + (col + WIDTH - 1) % WIDTH)
    right = tl.load(x + row * WIDTH + (col + 1) % WIDTH)
    here = tl.load(x + row * WIDTH + col)
    result = here + rate * (above + below + left + right - 4 * here)
    result = tl.where(faulted(peers) != 0, float("nan"), result)
    tl.store(y + row * WIDTH + col, result)
    leave(peers, epoch, tl.num_programs(0))


def diffuse(x: torch.Tensor, y: torch.Tensor, instance: Instance) -> None:
    """One step from ``x`` to ``y`` (two rows or more). There is no barrier and no host
    synchronization, so a CUDA graph may capture it."""
    (rows, width), transport = x.shape, instance.transport
    instance.reserve(2 * width * x.element_size())
    instance.begin()
    peers = endpoint(instance, x.dtype)
    try:
        size = transport.world_size
        diffuse_kernel[(rows,)](
            x, y, peers, transport.rank, rows, RATE, WORLD_SIZE=size, WIDTH=width
        )
    finally:
        instance.check()  # raises PeerTimeout if a neighbour did not come


def simulate(member: Member) -> float:
    """Many steps on this rank's band. Returns the largest difference on any rank from the whole
    torus in fp64."""
    torch.manual_seed(0)  # all ranks draw the same torus
    torus = torch.randn(member.world_size * ROWS, COLS, dtype=torch.float64)
    x = torus.chunk(member.world_size)[member.rank].to(member.device, torch.float32).contiguous()
    y = torch.empty_like(x)
    instance = workspace_of(name_of(member.group), member.device).instance("diffuse", "sm")
    for step in range(STEPS):
        if step % member.world_size == member.rank:
            # each rank is late in turn, so that a missing wait shows in the result
            time.sleep(0.02)
        diffuse(x, y, instance)
        x, y = y, x
        torus += RATE * (
            sum(torus.roll(shift, dim) for dim in (0, 1) for shift in (-1, 1)) - 4 * torus
        )
    tw.synchronize(member.group)
    error = (x.cpu().double() - torus.chunk(member.world_size)[member.rank]).abs().max().item()
    tw.close()
    return worst(error, member.device, member.group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("ranks", nargs="?", help="2 to 8; default: two")
    asked = parser.parse_args().ranks
    require(asked is None or asked.isdecimal(), f"{asked!r} ranks", "a number", "pass a number")
    kind = default_device_type()
    ranks = default_world_size(kind, None if asked is None else int(asked), most=2)
    error = launch(simulate, world_size=ranks, device_type=kind)
    if error is None:  # under torchrun rank 0 has it
        return 0
    print(f"{ranks} ranks, {STEPS} steps: largest error {error:.1e}")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    end_with(main)
