"""Symmetric memory on GPUs: torch's symmetric memory, and copies by the copy engines.

Only this file and ``rendezvous.py`` touch ``torch.distributed._symmetric_memory``, a private API that changes from
release to release. We use it to allocate, to exchange handles and to learn peers' addresses; signals, epochs and waits
are ours (torch's signal pad is shared by everything on a handle, and two streams on it can dead-lock).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tileweave.errors import UnsupportedError
from tileweave.topology import Machine, preset
from tileweave.transport.base import Copy, SymmetricBuffer, Watcher
from tileweave.transport.collectives import agree_on_memory
from tileweave.transport.host_memory import share
from tileweave.transport.rendezvous import Meeting


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


_LOG = logging.getLogger("tileweave")
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference, so it is safe when counts wrap

# The stream's handle alone; torch.cuda.current_stream() makes an object around it.
current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


class _Pitched(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        *(
            (f"{end}_{name}", kind)
            for end in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint), ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )  # fmt: skip


_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver, for copies by address and the events around them: through torch each costs twice the host time."""
    library = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, handle]
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Pitched), handle]
    library.cuStreamWaitValue32_v2.argtypes = [handle, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuEventRecord.argtypes = [handle, handle]
    library.cuStreamWaitEvent.argtypes = [handle, handle, ctypes.c_uint]
    return library


class Lane:
    """The order of our launches on one device: the stream of the last one.

    Two kernels that each fill a device and wait for peers must not run side by side in different orders on
    different ranks. So all our launches on a device form one line, across streams and groups.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.handle: int | None = None
        self.end: torch.cuda.Event | None = None  # of the last launch, where it is known

    def enter(self, handle: int) -> None:
        """``handle``: that of the current stream, which costs a tenth of asking for the stream itself."""
        end, self.end = self.end, None
        if handle == self.handle:
            return
        current = torch.cuda.current_stream()
        if self.stream is not None and not torch.cuda.is_current_stream_capturing():
            current.wait_event(end) if end is not None else current.wait_stream(self.stream)
        self.stream, self.handle = current, handle

    def leave(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self.end = torch.cuda.Event()
            self.end.record()


_LANES: dict[int, Lane] = {}


def enter_line(device: torch.device) -> None:
    """Order what is queued next behind our last launch on ``device``, and our next one behind it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _LANES.setdefault(index, Lane()).enter(current_handle(index))


def leave_line(device: torch.device) -> None:
    """A launch of another stream need not wait for what this stream is given from here on: it waits for no peer."""
    lane = _LANES.get(torch.cuda.current_device() if device.index is None else device.index)
    if lane is not None:
        lane.leave()


def _event(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, int]:
    """An event and its handle, which it has once it was recorded."""
    event = torch.cuda.Event()
    event.record(stream)
    return event, event.cuda_event


class _SideStream:
    """A stream for copies, and an event that marks where it stands."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle: int = self.stream.cuda_stream
        self.event, self.done = _event(self.stream)


class CudaTransport:
    """Implements :class:`tileweave.transport.base.Transport` over NVLink (or PCIe) peer memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._index = device.index
        self.machine = describe(self._index)
        self._require_peer_access()
        self._meeting = Meeting(group, device)
        self._lanes = [_SideStream(device)]
        self._forked, self._start = _event(self._lanes[0].stream)
        self._driver = driver()
        self.watch: Watcher | None = None
        self._lane = _LANES.setdefault(self._index, Lane())

    def _require_peer_access(self) -> None:
        if dist.get_backend(self.group) == "gloo":
            raise UnsupportedError(
                "asked: fused operators on CUDA tensors with a gloo group; allowed: a group that has an NCCL backend; "
                "remedy: init_process_group('nccl') or 'cpu:gloo,cuda:nccl'"
            )

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        local, failure = None, ""
        try:
            local = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        except RuntimeError as error:  # also torch.OutOfMemoryError
            failure = f"{type(error).__name__}: {error}"
        agree_on_memory(nbytes, failure, "", self._meeting.exchange)
        assert local is not None, "who fails does not agree"
        handle = self._meeting.rendezvous(local)
        if handle is None:
            raise UnsupportedError(
                f"asked: {nbytes} bytes that all ranks can map; allowed: devices with peer access on one host; "
                "remedy: check `nvidia-smi topo -m`, or use the unfused operators"
            )
        addresses = tuple(handle.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(self.world_size))
        self.barrier()
        return SymmetricBuffer(local, addresses, handle)

    def share(self, nbytes: int) -> list[mmap.mmap]:
        try:
            return share(nbytes, self.rank, self._meeting.exchange)
        except UnsupportedError as error:  # the same on all ranks
            _LOG.warning("ranks share no host memory, so calls that do not match end in a time-out: %s", error)
            return []

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def push(self, copies: Sequence[Copy], source: int = 0) -> None:
        self._fork()
        self._submit(copies, source)

    def push_beside(self, launch: Callable[[], None], copies: Sequence[Copy], source: int = 0) -> None:
        lanes = 1 + max(copy.lane for copy in copies)
        self._fork(lanes)
        launch()  # first: if it raises, no copy waits for ever
        self._submit(copies, source, lanes)

    def _fork(self, lanes: int = 1) -> None:
        """Order the side streams behind what is queued now."""
        cuda = self._driver
        while len(self._lanes) < lanes:
            self._lanes.append(_SideStream(self.device))
        status = cuda.cuEventRecord(self._start, self._current())
        for lane in self._lanes[:lanes]:
            status = status or cuda.cuStreamWaitEvent(lane.handle, self._start, 0)
        self._checked(status)

    def _submit(self, copies: Sequence[Copy], source: int, lanes: int = 1) -> None:
        submit, await_value = self._driver.cuMemcpyDtoDAsync_v2, self._driver.cuStreamWaitValue32_v2
        handles = [lane.handle for lane in self._lanes]
        for number, copy in enumerate(copies, start=1):
            if lanes > 1 and number == len(copies):
                self._gather(lanes)
            side = handles[copy.lane]
            status = await_value(side, copy.counter, copy.count, _AT_LEAST) if copy.counter else 0
            target, start = copy.ends(source)
            if copy.rows == 1:
                status = status or submit(target, start, copy.nbytes, side)
            else:
                status = status or self._submit_rows(copy, target, start, side)
            if status:
                raise UnsupportedError(
                    f"asked: a copy of {copy.nbytes} bytes to a peer; allowed: memory that the driver can copy to "
                    f"(it returned {status}); remedy: check peer access with `tileweave doctor`"
                )
        if self.watch is not None:
            self.watch(copies, 0, 0)

    def _submit_rows(self, copy: Copy, target: int, source: int, side: int) -> int:
        about = _Pitched(
            source_type=_ON_DEVICE, source_device=source, source_pitch=copy.source_pitch,
            target_type=_ON_DEVICE, target_device=target, target_pitch=copy.target_pitch,
            width=copy.nbytes, height=copy.rows,
        )  # fmt: skip
        return self._driver.cuMemcpy2DAsync_v2(about, side)

    def _gather(self, lanes: int) -> None:
        """Order lane 0 behind the others."""
        cuda, first = self._driver, self._lanes[0]
        for lane in self._lanes[1:lanes]:
            self._checked(cuda.cuEventRecord(lane.done, lane.handle) or cuda.cuStreamWaitEvent(first.handle, lane.done, 0))

    def join(self) -> None:
        cuda = self._driver
        last = self._lanes[0]
        self._checked(cuda.cuEventRecord(last.done, last.handle))
        self._checked(cuda.cuStreamWaitEvent(self._current(), last.done, 0))

    def _current(self) -> int:
        return current_handle(self._index)

    @staticmethod
    def _checked(status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver could not order two streams: error {status}")

    def order(self) -> None:
        self._lane.enter(self._current())

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """torch frees symmetric memory with its last tensor."""
        self._meeting.close()
