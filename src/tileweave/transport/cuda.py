"""Symmetric memory on GPUs, allocated by torch; ``copy_engine.py`` has the copies.

Only this file, ``rendezvous.py`` and ``nvshmem.py`` use ``torch.distributed._symmetric_memory``, a
private API that changes between releases. We use it to allocate, to exchange handles and to learn
the addresses of peers. Signals, epochs and waits are ours: torch's signal pad is shared by
everything on a handle, and two streams that use it can deadlock.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tileweave.errors import UnsupportedError
from tileweave.planning.machine import Machine
from tileweave.planning.topology import Topology
from tileweave.transport.copy_engine import CopyEngine, capture_of, current_handle
from tileweave.transport.host_memory import share
from tileweave.transport.interface import Copy, Sending, SymmetricBuffer, Watcher
from tileweave.transport.lasting_memory import lasting
from tileweave.transport.nodes import part_of
from tileweave.transport.nvshmem import RAIL, Heap, heap_of, rail_asked
from tileweave.transport.rail import NcclRail
from tileweave.transport.rendezvous import Meeting
from tileweave.transport.torch_collectives import agree_on_mapping, agree_on_memory
from tileweave.transport.workspace import kernels_allowed


@lru_cache(maxsize=8)
def describe(index: int) -> Machine:
    """The :class:`Machine` of CUDA device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    backend = "hip" if torch.version.hip else "cuda"
    return Machine(
        properties.name,
        backend,
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        kernels_allowed(),
        _why_unreachable(index),
    )


def _why_unreachable(index: int) -> str:
    """Why device ``index`` cannot map the memory of other devices; "" if it can map that of all
    devices that this process sees."""
    others = [
        other
        for other in range(torch.cuda.device_count())
        if other != index and not torch.cuda.can_device_access_peer(index, other)
    ]
    if not others:
        return ""
    return (
        f"GPU {index} has no peer access to GPU {', '.join(map(str, others))} (see tileweave "
        "doctor); CUDA_VISIBLE_DEVICES hides GPUs that take no part"
    )


_LOG = logging.getLogger("tileweave")
# torch.cuda's function asks first whether torch was built with CUDA
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class LaunchOrder:
    """The order of our launches on one device, across streams and groups.

    Two kernels that each fill the device and wait for peers must not run at the same time in
    different orders on different ranks. So all our launches on a device are serialized.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.handle: int | None = None
        self.end: torch.cuda.Event | None = None  # of the last launch, if it was recorded
        self._several = False  # streams, so far
        self._event: torch.cuda.Event | None = None  # recorded again and again

    def enter(self, handle: int) -> torch.cuda.Stream:
        """Order what follows on the current stream after the last launch. Returns that stream.

        ``handle`` is the handle of the current stream; to get it costs a tenth of getting the
        stream itself.
        """
        end, self.end = self.end, None
        if self.stream is not None and handle == self.handle:
            return self.stream
        current = torch.cuda.current_stream()
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            current.wait_event(end) if end is not None else current.wait_stream(self.stream)
        self._several = self.stream is not None
        self.stream, self.handle = current, handle
        return current

    def leave(self) -> None:
        """Record the end of the last launch, so that the next one on another stream waits for no
        more. Until a second stream is used none is recorded, and that one waits for all of the
        first."""
        if self._several and not torch.cuda.is_current_stream_capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
            self._event.record()
            self.end = self._event


_LAUNCH_ORDERS: dict[int, LaunchOrder] = {}


def enter_launch_order(index: int) -> LaunchOrder:
    """Order the work queued next on the current stream after our last launch on device ``index``,
    and our next launch after that work."""
    order = _LAUNCH_ORDERS.get(index) or _LAUNCH_ORDERS.setdefault(index, LaunchOrder())
    order.enter(current_handle(index))
    return order


def leave_launch_order(index: int) -> None:
    """Call this after a launch. Launches on other streams need not wait for what is queued on this
    stream later, because that waits for no peer."""
    order = _LAUNCH_ORDERS.get(index)
    if order is not None:
        order.leave()


class CudaTransport:
    """Implements :class:`tileweave.transport.interface.Transport` over NVLink (or PCIe) peer
    memory."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, topology: Topology | None = None
    ) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.topology = topology or Topology.one_node(self.world_size)
        self._index = device.index
        self.machine = describe(self._index)
        self._require_peer_access()
        self._meeting = Meeting(group, device)
        self._engines = [CopyEngine(device)]
        self._rail: NcclRail | None = None
        self.watch: Watcher | None = None
        self._launch_order = _LAUNCH_ORDERS.setdefault(self._index, LaunchOrder())

    def _require_peer_access(self) -> None:
        if dist.get_backend(self.group) == "gloo":
            raise UnsupportedError(
                "asked: fused operators on CUDA tensors with a gloo group; "
                "allowed: a group that has an NCCL backend; "
                "remedy: init_process_group('nccl') or 'cpu:gloo,cuda:nccl'"
            )

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        if rail_asked() == "nvshmem":
            return self._part_of_heap(nbytes)
        local, failure = None, ""
        try:
            local = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        except RuntimeError as error:  # also torch.OutOfMemoryError
            failure = f"{type(error).__name__}: {error}"
        agree_on_memory(nbytes, failure, "", self._meeting.exchange)
        assert local is not None, "agree_on_memory raises if this rank failed"
        # torch allocates two words per rank
        handle = lasting(partial(self._meeting.rendezvous, local), self.device)
        if handle is None:
            failure = (
                f"asked: {nbytes} bytes that all ranks can map; "
                "allowed: devices with peer access on one host; "
                "remedy: check `nvidia-smi topo -m`, or use the unfused operators"
            )
        torch.cuda.synchronize(self.device)
        agree_on_mapping(failure, self._meeting.exchange)
        assert handle is not None, "a rank that fails does not agree"
        addresses = tuple(
            handle.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(self.world_size)
        )
        return SymmetricBuffer(local, addresses, handle)

    def _part_of_heap(self, nbytes: int) -> SymmetricBuffer:
        heap = self.heap()
        begin, failure = heap.take(nbytes)
        places = agree_on_memory(nbytes, failure, str(begin), self.exchange)
        bases = [heap.bases[dist.get_global_rank(self.group, r)] for r in range(self.world_size)]
        near = self.topology.near(self.rank)
        failure = "" if all(bases[r] for r in near) else f"{RAIL}=nvshmem maps no memory of a peer"
        agree_on_mapping(failure, self.exchange)
        addresses = tuple(
            base + int(place) if rank in near else 0
            for rank, (base, place) in enumerate(zip(bases, places, strict=True))
        )
        return SymmetricBuffer(heap.local[begin : begin + nbytes], addresses, heap)

    def heap(self) -> Heap:
        mapped = self.topology.nodes < self.world_size
        return heap_of(self.group, self.device, mapped, self.exchange)

    def exchange(self, text: str) -> list[str]:
        return self._meeting.exchange(text)

    def rail(self) -> NcclRail:
        if self._rail is None:
            group, ranks = self.group, self.topology.rail(self.rank)
            if len(ranks) < self.world_size:  # else a second communicator would only be colder
                group = part_of(group, ranks, "rail", self._meeting, self.device)
            self._rail = NcclRail(group, self.device, self.group)
        return self._rail

    def inside(self) -> str:
        near = self.topology.near(self.rank)
        return part_of(self.group, near, "inside", self._meeting, self.device).group_name

    def share(self, nbytes: int) -> dict[int, mmap.mmap]:
        near = self.topology.near(self.rank)
        try:
            return share(nbytes, self.rank, near, self._meeting.exchange)
        except UnsupportedError as error:  # the same on all ranks
            _LOG.warning(
                "ranks share no host memory, so calls that do not match end in a timeout: %s",
                error,
            )
            return {}

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        self._meeting.barrier()  # NCCL would wait ten minutes for a missing rank

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
        sending: Sending | None = None,
    ) -> None:
        assert sending is None, "no plan takes the path between nodes on GPUs"
        while len(self._engines) <= queue:
            self._engines.append(CopyEngine(self.device))
        self._engines[queue].push(copies, source, launch, capturing)
        if self.watch is not None:
            self.watch(copies, 0, 0)

    def join(self, queue: int = 0) -> None:
        self._engines[queue].join()

    def order(self) -> torch.cuda.Stream:
        return self._launch_order.enter(current_handle(self._index))

    capturing = staticmethod(_capturing)

    def capture_number(self) -> int:
        return capture_of(current_handle(self._index)) if _capturing() else 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group; torch frees symmetric memory with its last tensor."""
        self._meeting.close()
