"""Shared host memory as a transport: a rank stores at an address of a peer, and the peer finds the
value in its own memory."""

from __future__ import annotations

import ctypes
import gc
import time

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World, Worlds

from tileweave.planning.machine import CPU
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.interface import Copy, SymmetricBuffer


def word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def check_buffer(transport: CpuTransport, buffer: SymmetricBuffer, nbytes: int) -> None:
    rank, size = transport.rank, transport.world_size
    assert buffer.local.dtype == torch.uint8
    assert buffer.local.numel() == nbytes
    assert buffer.local.data_ptr() == buffer.addresses[rank]
    assert len(set(buffer.addresses)) == size
    assert not buffer.local.any(), "a new buffer is zero"
    transport.barrier()
    for peer in range(size):
        ctypes.c_uint8.from_address(buffer.addresses[peer] + nbytes - 1 - rank).value = (
            100 + 10 * peer + rank
        )
    transport.barrier()
    found = [int(buffer.local[nbytes - 1 - source]) for source in range(size)]
    assert found == [100 + 10 * rank + source for source in range(size)], (
        "bytes of all ranks, each in its place"
    )
    transport.barrier()


def memory(me: Member) -> None:
    transport = CpuTransport(dist.group.WORLD)
    assert (transport.rank, transport.world_size, transport.machine) == (
        me.rank,
        me.world_size,
        CPU,
    )
    assert not transport.capturing()
    buffers = []
    for nbytes in (me.world_size, 4096, 4097, 1_000_003):
        buffers.append(transport.allocate(nbytes))
        check_buffer(transport, buffers[-1], nbytes)
    starts = [buffer.addresses[me.rank] for buffer in buffers]
    assert all(start % 16 == 0 for start in starts)
    transport.close()
    for buffer in buffers:  # a buffer that is still referenced may be read
        assert int(buffer.local[-1]) == 100 + 10 * me.rank
    me.barrier()


def test_memory(world: World) -> None:
    world.run(memory)


def memory_of_a_subgroup(me: Member, members: list[int]) -> None:
    group = me.group(*members)
    if group is not None:
        transport = CpuTransport(group)
        assert transport.rank == members.index(me.rank)
        assert transport.world_size == len(members)
        check_buffer(transport, transport.allocate(512), 512)
        transport.close()
    me.barrier()


def test_memory_of_a_subgroup(worlds: Worlds) -> None:
    worlds("gloo", 4).run(memory_of_a_subgroup, [1, 3])


def copy_engine(me: Member) -> None:
    """Copies run in order, concurrently with later work. join() waits for all of them."""
    transport = CpuTransport(dist.group.WORLD)
    count, repeats = 50_000, 20
    data, flags = transport.allocate(4 * count), transport.allocate(256)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    source = torch.empty(count, dtype=torch.int32)
    number = torch.zeros(1, dtype=torch.int32)
    for n in range(1, repeats):
        source.fill_(100 * n + me.rank)
        number.fill_(n)
        data_then_flag = [
            Copy(data.addresses[right], 0, 4 * count),  # from the tensor that the push gets
            Copy(flags.addresses[right], number.data_ptr(), 4),
        ]
        transport.push(data_then_flag, source.data_ptr())
        deadline = time.monotonic() + 10
        while word(flags.addresses[me.rank]).value < n:
            assert time.monotonic() < deadline, "the flag never came"
        wanted = 100 * n + left
        assert torch.equal(
            data.local.view(torch.int32), torch.full((count,), wanted, dtype=torch.int32)
        ), f"step {n}"
        transport.join()
        transport.barrier()
    transport.push([Copy(data.addresses[right], source.data_ptr(), 4 * count)] * 50)
    transport.synchronize()
    transport.join()
    transport.barrier()
    transport.close()


def test_copy_engine(world: World) -> None:
    world.run(copy_engine)


def mappings_go_with_their_buffer(me: Member) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum("tileweave-" in line for line in lines)

    gc.collect()
    before = mapped()
    transport = CpuTransport(dist.group.WORLD)
    buffer = transport.allocate(8192)
    assert mapped() == before + me.world_size, "own memory and every peer's"
    me.barrier()
    transport.close()
    del buffer, transport
    gc.collect()
    assert mapped() == before, "memory outlives close() and its last tensor"


def test_mappings_are_freed_with_their_buffer(worlds: Worlds) -> None:
    worlds("gloo", 2).run(mappings_go_with_their_buffer)


def host_words(me: Member) -> None:
    words = CpuTransport(dist.group.WORLD).host_visible(8)
    assert words.dtype == torch.int32
    assert words.tolist() == [0] * 8


def test_host_visible_memory(worlds: Worlds) -> None:
    worlds("gloo", 2).run(host_words)


@pytest.mark.parametrize("size", [1])
def test_a_world_of_one(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(memory)
