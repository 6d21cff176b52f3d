"""Copies by the copy engines of one GPU: one prepared graph per call, or copies queued one by one
while a CUDA graph is captured.

A call of an operator queues 7 to 27 copies, waits and events. Each call of the driver costs the
host 2 us or more, as much as an operator may cost in all. Between calls the copies differ in one
address only. So copies that repeat (``interface.Copies``) are made into a graph that a call
launches (decision 0022). A graph takes 0.1 to 0.8 MB of device memory, so the least recently used
ones are dropped, and sizes that occur once get none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from tileweave.transport.interface import Copies, Copy

_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_WAIT_VALUE = 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32
_MOST_GRAPHS = 128  # per queue
# of the same copies: pushes of an address before it has a graph of its own, and such addresses
_OFTEN, _MOST_FIXED = 2, 8
# CU_STREAM_NON_BLOCKING; a priority above that of torch's own streams
_NON_BLOCKING, _URGENT = 1, -1
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ compares the difference, so counts may wrap

# The handle of the current stream; torch.cuda.current_stream() makes an object around it.
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
                ("x", ctypes.c_size_t),
                ("y", ctypes.c_size_t),
                ("type", ctypes.c_uint),
                ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Block(ctypes.Structure):
    """``CUDA_MEMCPY3D``."""

    _fields_ = (
        *(
            (f"{end}_{name}", kind)
            for end in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t),
                ("y", ctypes.c_size_t),
                ("z", ctypes.c_size_t),
                ("level", ctypes.c_size_t),
                ("type", ctypes.c_uint),
                ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p),
                ("reserved", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
                ("height", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


class _Operation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` for a wait."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class _Operations(ctypes.Structure):
    """``CUDA_BATCH_MEM_OP_NODE_PARAMS``."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("first", ctypes.POINTER(_Operation)),
        ("flags", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver, for copies by address and the events around them. Through torch each of them
    takes twice the host time."""
    library = ctypes.CDLL("libcuda.so.1")
    handle, at, words = ctypes.c_void_p, ctypes.POINTER, ctypes.c_uint64
    # a node, its graph, its dependencies
    node = [at(handle), handle, at(handle), ctypes.c_size_t]
    for name, types in {
        "cuMemcpyDtoDAsync_v2": [words, words, ctypes.c_size_t, handle],
        "cuMemcpy2DAsync_v2": [at(_Pitched), handle],
        "cuStreamWaitValue32_v2": [handle, words, ctypes.c_uint32, ctypes.c_uint],
        "cuEventRecord": [handle, handle],
        "cuStreamWaitEvent": [handle, handle, ctypes.c_uint],
        "cuStreamCreateWithPriority": [at(handle), ctypes.c_uint, ctypes.c_int],
        "cuStreamDestroy_v2": [handle],
        "cuStreamGetCtx": [handle, at(handle)],
        # the last three: the graph and what the next node depends on
        "cuStreamGetCaptureInfo_v2": [handle, at(ctypes.c_int), at(words), *[handle] * 3],
        "cuGraphCreate": [at(handle), ctypes.c_uint],
        "cuGraphAddMemcpyNode": [*node, at(_Block), handle],
        "cuGraphAddBatchMemOpNode": [*node, at(_Operations)],
        "cuGraphInstantiateWithFlags": [at(handle), handle, words],
        "cuGraphExecMemcpyNodeSetParams": [handle, handle, at(_Block), handle],
        "cuGraphLaunch": [handle, handle],
        "cuPointerGetAttribute": [at(words), ctypes.c_int, words],
        "cuGraphExecDestroy": [handle],
        "cuGraphDestroy": [handle],
    }.items():
        getattr(library, name).argtypes = types
    return library


def _allocation(address: int) -> int:
    """A number that the driver gives to the allocation at ``address``, and to no other; 0 for
    memory that is gone. Takes 1 us.

    A graph must not be launched or changed once memory of its copies was freed, even if new memory
    has the same address: the driver crashes. ``torch.cuda.empty_cache()`` frees memory, and every
    capture calls it.
    """
    found = ctypes.c_uint64()
    status = driver().cuPointerGetAttribute(found, _BUFFER_ID, address)
    return 0 if status else found.value


def _check_status(status: int, what: str) -> None:
    if status:
        raise RuntimeError(
            f"the driver refused {what}: it returned {status}; "
            "`tileweave doctor` checks peer access"
        )


def capture_of(stream: int) -> int:
    """The number that the driver gives to the capture of ``stream``, and to no other."""
    capturing, number = ctypes.c_int(), ctypes.c_uint64()
    status = driver().cuStreamGetCaptureInfo_v2(stream, capturing, number, None, None, None)
    _check_status(status, "the number of a capture")
    return number.value


class _Graph:
    """``copies`` as a CUDA graph: lanes run concurrently, and the last copy follows all of them.

    A wait for a counter is a dependency of its own copy only, and a copy ``aside`` is one of the
    last copy only. In the order of the lane a wait takes 2.5 us even if its value is there, and a
    signal takes 2 us (decisions 0013, 0002).

    ``given`` is the address that a push gives; :meth:`point` changes it.
    """

    def __init__(self, copies: Copies, stream: int, given: int) -> None:
        self._driver, self._context = driver(), ctypes.c_void_p()
        self._graph, self._ready = ctypes.c_void_p(), ctypes.c_void_p()
        # copies whose source or target is the address that a push gives
        self._moving: list[tuple[Copy, ctypes.c_void_p, _Block]] = []
        self.given, self.allocation = given, _allocation(given) if given else 0
        what = "a graph of copies to peers"
        _check_status(self._driver.cuStreamGetCtx(stream, self._context), what)
        _check_status(self._driver.cuGraphCreate(self._graph, 0), what)
        ends: dict[int, ctypes.c_void_p] = {}  # the last copy of each lane
        waits: dict[int, ctypes.c_void_p] = {}  # the last wait of each lane
        asides: list[ctypes.c_void_p] = []
        for number, copy in enumerate(copies, start=1):
            before = (
                [*ends.values(), *asides]
                if number == len(copies)
                else [ends[copy.lane]]
                if copy.lane in ends
                else []
            )
            if copy.counter:
                waits[copy.lane] = self._wait(
                    copy, [waits[copy.lane]] if copy.lane in waits else []
                )
                before.append(waits[copy.lane])
            node = self._copy(copy, before)
            if copy.aside:
                asides.append(node)
            else:
                ends[copy.lane] = node
        _check_status(self._driver.cuGraphInstantiateWithFlags(self._ready, self._graph, 0), what)

    def _wait(self, copy: Copy, before: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        wait = _Operation(kind=_WAIT_VALUE, address=copy.counter, value=copy.count, flags=_AT_LEAST)
        about = _Operations(self._context, 1, ctypes.pointer(wait), 0)
        return self._add(self._driver.cuGraphAddBatchMemOpNode, before, about)

    def _copy(self, copy: Copy, before: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        target, source = copy.ends(self.given)
        pitches = {
            f"{end}_pitch": getattr(copy, f"{end}_pitch") or copy.nbytes
            for end in ("source", "target")
        }
        about = _Block(
            source_type=_ON_DEVICE,
            source_device=source,
            source_height=copy.rows,
            target_type=_ON_DEVICE,
            target_device=target,
            target_height=copy.rows,
            width=copy.nbytes,
            rows=copy.rows,
            depth=1,
            **pitches,
        )
        node = self._add(self._driver.cuGraphAddMemcpyNode, before, about, self._context)
        if not (copy.source and copy.target):
            self._moving.append((copy, node, about))
        return node

    def _add(
        self, function: Callable[..., int], before: list[ctypes.c_void_p], *about: object
    ) -> ctypes.c_void_p:
        node = ctypes.c_void_p()
        follows = (ctypes.c_void_p * len(before))(*(other.value for other in before))
        _check_status(
            function(node, self._graph, follows, len(before), *about), "a graph of copies to peers"
        )
        return node

    def point(self, given: int) -> bool:
        """Change the address that a push gives; False if the driver cannot change it in this
        graph, or the memory that the graph has now is gone."""
        if self.given and _allocation(self.given) != self.allocation:
            return False
        for copy, node, about in self._moving:
            about.target_device, about.source_device = copy.ends(given)
            if self._driver.cuGraphExecMemcpyNodeSetParams(self._ready, node, about, self._context):
                return False
        self.given, self.allocation = given, _allocation(given) if given else 0
        return True

    def launch(self, stream: int) -> None:
        status = self._driver.cuGraphLaunch(self._ready, stream)
        if status:
            _check_status(status, "copies to peers")

    def __del__(self) -> None:
        if self._ready:
            self._driver.cuGraphExecDestroy(self._ready)
        if self._graph:
            self._driver.cuGraphDestroy(self._graph)


def _event(stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, int]:
    """An event and its handle; it has one after it was recorded."""
    event = torch.cuda.Event()
    event.record(stream)
    return event, event.cuda_event


class _SideStream:
    """A stream for copies, and an event for its position.

    It is made by the driver. torch hands out the same 32 streams per priority in turns, so the
    caller could have the same one, and copies would be queued after the kernel that waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        made = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check_status(
                driver().cuStreamCreateWithPriority(made, _NON_BLOCKING, _URGENT),
                "a stream for copies",
            )
            self.handle: int = made.value or 0
            self.stream = torch.cuda.ExternalStream(self.handle, device)
            self.event, self.done = _event(self.stream)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            driver().cuStreamDestroy_v2(self.handle)  # what is queued still runs


class _Graphs:
    """The graphs of the same ``copies``: one that is pointed at the address of each push, which
    takes 4 us per copy of data, and some for addresses that come again often."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies  # kept alive, so that their id is not used again
        self._pointed: _Graph | None = None
        self._fixed: dict[int, _Graph] = {}  # by address
        self._moves: dict[int, int] = {}  # by address: how often the first graph was pointed there

    def __len__(self) -> int:
        return len(self._fixed) + (self._pointed is not None)

    def find(self, source: int) -> _Graph | None:
        """The graph that has the memory at this address already."""
        pointed = self._pointed
        if pointed is None or pointed.given != source:
            pointed = self._fixed.get(source)
        if pointed is None or source in (0, self._copies.kept):
            return pointed
        return pointed if pointed.allocation == _allocation(source) else None

    def make(self, source: int, stream: int) -> _Graph:
        """A graph for an address that none has: made, or pointed there."""
        if self._pointed is not None:
            moves = self._moves[source] = self._moves.get(source, 0) + 1
            if moves > _OFTEN and len(self._fixed) < _MOST_FIXED:
                found = self._fixed[source] = _Graph(self._copies, stream, source)
                return found
            if len(self._moves) > _MOST_GRAPHS:
                self._moves.clear()
        if self._pointed is None or not self._pointed.point(source):
            self._pointed = _Graph(self._copies, stream, source)
        return self._pointed


class CopyEngine:
    """One queue of copies that run concurrently with the current stream. Pushes run in order."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._driver = driver()
        self._lanes = [_SideStream(device)]
        self._forked, self._start = _event(self._lanes[0].stream)
        # by copies, and by address too if they are pitched
        self._graphs: dict[tuple[int, int], _Graphs] = {}

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
    ) -> None:
        """Queue ``copies`` after the work that the current stream has now. ``launch`` queues a
        kernel on that stream that runs concurrently with them. ``capturing``: whether that stream
        is being captured; None: ask."""
        if capturing is None:
            capturing = torch.cuda.is_current_stream_capturing()
        graph = None if capturing else self._graph(copies, source)
        lanes = 1 if graph else 1 + max((copy.lane for copy in copies), default=0)
        self._fork(lanes)
        if launch is not None:
            launch()  # before the copies: if it raises, no copy waits for ever
        if graph:
            graph.launch(self._lanes[0].handle)
        else:
            self._submit(copies, source, lanes)

    def _graph(self, copies: Sequence[Copy], source: int) -> _Graph | None:
        """The graph for copies that repeat; None for new ones. The address of pitched copies
        cannot be changed, so they have a graph per address."""
        if not isinstance(copies, Copies):
            return None
        graphs, key = self._graphs, (id(copies), source if copies.pitched else 0)
        known = graphs.pop(key, None)
        if known is None:
            graphs[key] = _Graphs(copies)
            self._drop()
            return None
        graphs[key] = known  # as the newest
        found = known.find(source)
        if found is None:
            before = len(known)
            found = known.make(source, self._lanes[0].handle)
            if len(known) > before:
                self._drop()
        return found

    def _drop(self) -> None:
        """Drop the graphs of the copies that were pushed least recently, if there are too many.
        The driver frees a graph that still runs when it has ended."""
        graphs = self._graphs
        while len(graphs) > _MOST_GRAPHS or sum(map(len, graphs.values())) > _MOST_GRAPHS:
            del graphs[next(iter(graphs))]

    def _fork(self, lanes: int) -> None:
        """Order the side streams after the work queued now."""
        while len(self._lanes) < lanes:
            self._lanes.append(_SideStream(self._device))
        start, await_event = self._start, self._driver.cuStreamWaitEvent
        status = self._driver.cuEventRecord(start, current_handle(self._index))
        for lane in self._lanes[:lanes]:
            status = status or await_event(lane.handle, start, 0)
        if status:
            _check_status(status, "the order of two streams")

    def _submit(self, copies: Sequence[Copy], source: int, lanes: int) -> None:
        """Queue the copies one by one; waits and copies ``aside`` are in the order of their
        lane."""
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
                _check_status(status, f"a copy of {copy.nbytes} bytes to a peer")

    def _submit_rows(self, copy: Copy, target: int, source: int, side: int) -> int:
        about = _Pitched(
            source_type=_ON_DEVICE,
            source_device=source,
            source_pitch=copy.source_pitch,
            target_type=_ON_DEVICE,
            target_device=target,
            target_pitch=copy.target_pitch,
            width=copy.nbytes,
            height=copy.rows,
        )
        return self._driver.cuMemcpy2DAsync_v2(about, side)

    def _gather(self, lanes: int) -> None:
        """Order lane 0, which has the last copy, after the other lanes."""
        first = self._lanes[0]
        for lane in self._lanes[1:lanes]:
            status = self._driver.cuEventRecord(lane.done, lane.handle)
            _check_status(
                status or self._driver.cuStreamWaitEvent(first.handle, lane.done, 0),
                "the order of two streams",
            )

    def join(self) -> None:
        """Order the work queued later on the current stream after the last push."""
        last = self._lanes[0]
        status = self._driver.cuEventRecord(last.done, last.handle)
        status = status or self._driver.cuStreamWaitEvent(current_handle(self._index), last.done, 0)
        _check_status(status, "the order of two streams")
