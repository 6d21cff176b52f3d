"""Ranks that share one GPU: ``pytest tests/multi --one-gpu`` runs the tests of GPU worlds on a
single device.

Each rank is a process with its own context, and the device runs one context at a time, for a
millisecond or two each. So a kernel that waits for a peer occupies the device until its time slice
ends, and then the kernel of the peer runs. Everything takes long and no time means anything, but
kernels, signals, graphs and timeouts are the real ones.

What two ranks on one device cannot have is replaced: torch's symmetric memory by memory that CUDA
IPC maps, and NCCL by gloo. Copies within a device are kernels, and a kernel that fills the device
and waits for them would never end. So ranks treat the device as one with fewer multiprocessors.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import tileweave.transport.cuda as cuda
from tileweave.transport.rendezvous import MAPPED, Meeting

BACKEND = "cpu:gloo,cuda:gloo"
FREE = 8  # multiprocessors left for copies


class Mapped:
    """Replaces torch's handle of symmetric memory: ``local`` and the allocations of the peers."""

    def __init__(self, rank: int, local: torch.Tensor, handles: list[Any]) -> None:
        self._of = [
            local.untyped_storage()
            if peer == rank
            else torch.UntypedStorage._new_shared_cuda(*handle)
            for peer, handle in enumerate(handles)
        ]

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert shape == (1,) and dtype == torch.uint8, (
            "where it begins is all that the transport asks for"
        )
        return torch.empty(0, dtype=dtype, device=self._of[rank].device).set_(
            self._of[rank], 0, shape
        )


def rendezvous(self: Meeting, local: torch.Tensor) -> Mapped:
    """Replaces :meth:`Meeting.rendezvous`."""
    mine = base64.b85encode(pickle.dumps(local.untyped_storage()._share_cuda_())).decode()
    texts = [text.partition("|")[2] for text in self.exchange(f"{MAPPED}|{mine}")]
    return Mapped(
        self._group.rank(), local, [pickle.loads(base64.b85decode(text)) for text in texts]
    )


def install() -> None:
    """Called in a rank before it joins its world."""
    describe = cuda.describe
    cuda.describe = lambda index: replace(describe(index), num_sms=describe(index).num_sms - FREE)  # type: ignore[assignment]
    cuda.symm_mem = SimpleNamespace(empty=torch.empty)  # type: ignore[assignment]
    cuda.CudaTransport._require_peer_access = lambda self: None  # type: ignore[method-assign]
    Meeting.rendezvous = rendezvous  # type: ignore[method-assign]
    barrier = dist.barrier
    # gloo takes no device_ids
    dist.barrier = lambda *args, device_ids=None, **more: barrier(*args, **more)
