"""Symmetric memory on one host without a GPU: files in shared memory, mapped by every rank of the group.

Each file has an unguessable name and mode 0600, and is unlinked as soon as all ranks have mapped it, so that
nothing outlives the processes, also if they crash. The copy engine is a thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from tileweave.topology import CPU
from tileweave.transport.base import Copy, SymmetricBuffer, Watcher
from tileweave.transport.collectives import all_gather_flat, wait_bounded

_TOKEN_BYTES = 24


def _directory() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class CpuTransport:
    """Implements :class:`tileweave.transport.base.Transport` over shared host memory and a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.device = torch.device("cpu")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.machine = CPU
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="tileweave-copy-engine")
        self._pushed: Future[None] | None = None
        self._abandoned = threading.Event()  # the kernel whose counters copies wait for has raised
        self.watch: Watcher | None = None
        self._maps: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        token = secrets.token_bytes(_TOKEN_BYTES)
        path = self._path(token)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
            mine = mmap.mmap(descriptor, nbytes)
            tokens = torch.empty(self.world_size, _TOKEN_BYTES, dtype=torch.uint8)
            own = torch.frombuffer(bytearray(token), dtype=torch.uint8)
            self._wait(all_gather_flat(tokens.view(-1), own, group=self.group, async_op=True))
            mapped = [mine if r == self.rank else self._map(bytes(tokens[r].tolist())) for r in range(self.world_size)]
            self.barrier()
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
        self._maps += mapped
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in mapped]
        return SymmetricBuffer(views[self.rank], tuple(v.data_ptr() for v in views), views)

    def _path(self, token: bytes) -> Path:
        return _directory() / f"tileweave-{token.hex()}"

    def _map(self, token: bytes) -> mmap.mmap:
        descriptor = os.open(self._path(token), os.O_RDWR)
        try:
            return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def barrier(self) -> None:
        self._wait(dist.barrier(group=self.group, async_op=True))

    def _wait(self, work: dist.Work | None) -> None:
        wait_bounded(work, "barrier", self.rank)

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def push(self, copies: Sequence[Copy], source: int = 0) -> None:
        self._pushed = self._engine.submit(self._copy_all, copies, source)

    def push_beside(self, launch: Callable[[], None], copies: Sequence[Copy], source: int = 0) -> None:
        self._abandoned.clear()
        self.push(copies, source)  # first: the interpreter's launch returns when the kernel has ended
        launched = False
        try:
            launch()
            launched = True
        finally:
            if not launched:
                self._abandoned.set()

    def _copy_all(self, copies: Sequence[Copy], source: int) -> None:
        begin = time.perf_counter_ns()
        for copy in copies:
            while copy.counter and ctypes.c_int32.from_address(copy.counter).value < copy.count:
                if self._abandoned.wait(2e-4):
                    return
            ctypes.memmove(copy.target, copy.source or source + copy.offset, copy.nbytes)
        if self.watch is not None:
            self.watch(copies, begin, time.perf_counter_ns())

    def join(self) -> None:
        if self._pushed is not None:
            self._pushed.result()
            self._pushed = None

    def order(self) -> None:
        """Calls on the CPU are synchronous, hence already in order."""

    def capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.join()

    def close(self) -> None:
        self._engine.shutdown(wait=True)
        self._maps.clear()
