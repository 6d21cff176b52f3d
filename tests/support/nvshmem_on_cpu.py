"""NVSHMEM's memory on the CPU: host memory that all ranks map, those of other nodes, too. Kernels
run interpreted, and put by ``memmove``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.device.interpreter import words
from tileweave.kernels import rail
from tileweave.ops.core import nvshmem_rail
from tileweave.transport import host_memory
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.nvshmem import RAIL, Heap

SLOT_BYTES = 4096  # so that messages go in several transfers
_CHANNELS = 2  # since each is interpreted
_HEAP_BYTES = 4 << 20


class SharedHeap(Heap):
    """A heap of one transport of all ranks."""

    def __init__(self, transport: CpuTransport) -> None:
        every = range(transport.world_size)
        blocks = host_memory.share(_HEAP_BYTES, transport.rank, every, transport.exchange)
        views = {rank: torch.frombuffer(block, dtype=torch.uint8) for rank, block in blocks.items()}
        super().__init__(views[transport.rank], [views[rank].data_ptr() for rank in every])
        self.views = views  # keeps them mapped
        words.PLACE_AT = lambda rank, address: self.bases[rank] + address - self.base


@contextmanager
def nvshmem(slot_bytes: int = SLOT_BYTES, **variables: str) -> Iterator[None]:
    """Calls over nodes go by NVSHMEM. Collective: workspaces are closed before and after."""
    tw.close()
    dist.barrier()
    with (
        mock.patch.dict(os.environ, {RAIL: "nvshmem", **variables}),
        mock.patch.object(CpuTransport, "heap", lambda transport: SharedHeap(transport)),
        mock.patch.object(nvshmem_rail, "_SLOT_BYTES", slot_bytes),
        mock.patch.object(nvshmem_rail, "CHANNELS", _CHANNELS),
        mock.patch.object(rail, "CHANNELS", _CHANNELS),
        mock.patch.object(words, "PLACE_AT", words.PLACE_AT),
    ):
        yield
        tw.close()
    dist.barrier()
