"""Symmetric memory on GPUs: torch's symmetric memory, and copies by the copy engines.

The only file that touches ``torch.distributed._symmetric_memory``, a private API that changes from release to
release. We use it to allocate, to exchange handles and to learn peers' addresses; signals, epochs and waits are ours
(torch's signal pad is shared by everything on a handle, and two streams on it can dead-lock).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tileweave.errors import UnsupportedError
from tileweave.topology import Machine, preset
from tileweave.transport.base import Copy, SymmetricBuffer, Watcher


@lru_cache(maxsize=8)
def describe(index: int) -> Machine:
    """The :class:`Machine` of CUDA device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    backend = "hip" if torch.version.hip else "cuda"
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return preset(
        properties.name,
        backend,
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        int(shared),
    )


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver, for copies by address: through tensors each would cost 5 us of host time, not 2."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


class Lane:
    """The order of our launches on one device: the stream of the last one.

    Two kernels that each fill a device and wait for peers must not run side by side in different orders on
    different ranks. So all our launches on a device form one line, across streams and groups.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        current = torch.cuda.current_stream()
        if self.stream is not None and self.stream != current and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self.stream)
        self.stream = current


_LANES: dict[int, Lane] = {}


class CudaTransport:
    """Implements :class:`tileweave.transport.base.Transport` over NVLink (or PCIe) peer memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.machine = describe(device.index)
        self._require_peer_access()
        self._side = torch.cuda.Stream(device, priority=-1)
        self._start, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._driver = driver()
        self.watch: Watcher | None = None
        self._lane = _LANES.setdefault(device.index, Lane())

    def _require_peer_access(self) -> None:
        if dist.get_backend(self.group) == "gloo":
            raise UnsupportedError(
                "asked: fused operators on CUDA tensors with a gloo group; allowed: a group that has an NCCL backend; "
                "remedy: init_process_group('nccl') or 'cpu:gloo,cuda:nccl'"
            )

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        local = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device)
        local.zero_()
        handle = symm_mem.rendezvous(local, self.group.group_name)
        if handle is None:
            raise UnsupportedError(
                f"asked: {nbytes} bytes that all ranks can map; allowed: devices with peer access on one host; "
                "remedy: check `nvidia-smi topo -m`, or use the unfused operators"
            )
        addresses = tuple(handle.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(self.world_size))
        self.barrier()
        return SymmetricBuffer(local, addresses, handle)

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def push(self, copies: Sequence[Copy], source: int = 0) -> None:
        self._start.record()
        self._side.wait_event(self._start)
        stream, submit = self._side.cuda_stream, self._driver.cuMemcpyDtoDAsync_v2
        for copy in copies:
            status = submit(copy.target, copy.source or source, copy.nbytes, stream)
            if status:
                raise UnsupportedError(
                    f"asked: a copy of {copy.nbytes} bytes to a peer; allowed: memory that the driver can copy to "
                    f"(cuMemcpyDtoDAsync returned {status}); remedy: check peer access with `tileweave doctor`"
                )
        self._done.record(self._side)
        if self.watch is not None:
            self.watch(copies, 0, 0)

    def join(self) -> None:
        self._done.wait()

    def order(self) -> None:
        self._lane.enter()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Nothing to do: torch frees symmetric memory with its last tensor."""
