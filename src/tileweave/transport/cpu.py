"""Symmetric memory without GPUs: host memory that the ranks of a node share (``host_memory.py``).

The copy engine is a thread. It does all copies one after another, in the order of their list,
whatever their lanes and queues. Another thread exchanges with other nodes (``rail.py``).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from tileweave.errors import InputError
from tileweave.planning.machine import CPU
from tileweave.planning.topology import Topology
from tileweave.transport.host_memory import share
from tileweave.transport.interface import Copy, Sending, SymmetricBuffer, Watcher
from tileweave.transport.nodes import part_of
from tileweave.transport.nvshmem import RAIL, Heap
from tileweave.transport.rail import GlooRail
from tileweave.transport.rendezvous import Texts


class CpuTransport:
    """Implements :class:`tileweave.transport.interface.Transport` over shared host memory and a
    group on the CPU."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology | None = None) -> None:
        self.group = group
        self.device = torch.device("cpu")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.machine = CPU
        self.topology = topology or Topology.one_node(self.world_size)
        self._near = self.topology.near(self.rank)
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="tileweave-copy-engine")
        self._crosser = ThreadPoolExecutor(1, thread_name_prefix="tileweave-rail")
        self._pushed: Future[None] | None = None
        self._crossed: Future[None] | None = None
        self._rail: GlooRail | None = None
        self.watch: Watcher | None = None
        self._closed = threading.Event()
        self._texts = Texts(group)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        # a block is unmapped with its last tensor: nothing else keeps memory that was outgrown
        shared = self.share(nbytes)
        if self.topology.nodes > 1 and self.topology.per_node:
            self.rail()
        views = {r: torch.frombuffer(m, dtype=torch.uint8) for r, m in shared.items()}
        addresses = [views[r].data_ptr() if r in views else 0 for r in range(self.world_size)]
        return SymmetricBuffer(views[self.rank], tuple(addresses), views)

    def rail(self) -> GlooRail:
        if self._rail is None:
            self.barrier()
            self._rail = GlooRail(self.group, self.topology, self._texts.number)  # all are here
            self.barrier()  # a rank that closed it now would fail those that still connect
        return self._rail

    def heap(self) -> Heap:
        raise InputError(
            f"asked: {RAIL}=nvshmem for tensors on the CPU; allowed: for tensors on CUDA devices; "
            "remedy: unset it, then gloo moves the data"
        )

    def exchange(self, text: str) -> list[str]:
        return self._texts.exchange(text)

    def inside(self) -> str:
        return part_of(self.group, self._near, "inside", self._texts, self.device).group_name

    def share(self, nbytes: int) -> dict[int, mmap.mmap]:
        return share(nbytes, self.rank, self._near, self._texts.exchange)

    def barrier(self) -> None:
        self._texts.barrier()

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
        sending: Sending | None = None,
    ) -> None:
        abandoned = threading.Event()  # the kernel whose counters copies wait for has raised
        launched = False
        try:
            if sending is not None:
                assert self._rail is not None, "allocate() comes before a crossing"
                gone = lambda: abandoned.is_set() or self._closed.is_set()  # noqa: E731
                self._crossed = self._crosser.submit(self._rail.exchange, sending, gone)
            self._pushed = self._engine.submit(self._copy_all, copies, source, abandoned)
            if launch is not None:
                # after the copies: an interpreted launch returns when the kernel has ended
                launch()
            launched = True
        finally:
            if not launched:
                abandoned.set()

    def _copy_all(self, copies: Sequence[Copy], source: int, abandoned: threading.Event) -> None:
        begin = 0
        for copy in copies:
            while copy.counter and ctypes.c_int32.from_address(copy.counter).value < copy.count:
                if abandoned.wait(2e-4) or self._closed.is_set():
                    return
            begin = begin or time.perf_counter_ns()
            for to, at in copy.pieces(source):
                ctypes.memmove(to, at, copy.nbytes)
        if self.watch is not None:
            self.watch(copies, begin, time.perf_counter_ns())

    def join(self, queue: int = 0) -> None:
        pushed, crossed = self._pushed, self._crossed
        self._pushed = self._crossed = None
        for work in (pushed, crossed):
            if work is not None:
                work.result()

    def order(self) -> None:
        """Calls on the CPU are synchronous, so they are in order already."""

    def capturing(self) -> bool:
        return False

    def capture_number(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.join()

    def close(self) -> None:
        self._closed.set()  # Ctrl-C may have come where no push knows of its copies
        self._engine.shutdown(wait=True)
        self._crosser.shutdown(wait=True)
        self._rail = None
        self._texts.close()
