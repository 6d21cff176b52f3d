"""Symmetric memory on one host without a GPU: anonymous shared memory, mapped by every rank of the group.

A buffer is a ``memfd``: it stands in no directory, so nothing can be guessed, opened early, or left behind, however a rank
ends. Peers of the same user open it through ``/proc/<pid>/fd``, and check the token that it carries. It is allocated when it
is made (no SIGBUS later) and sealed against shrinking. The copy engine is a thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from tileweave.errors import UnsupportedError
from tileweave.topology import CPU
from tileweave.transport.base import Copy, SymmetricBuffer, Watcher
from tileweave.transport.collectives import agree_on_memory, gather_texts, wait_bounded

_TOKEN_BYTES = 24


def _make(token: str, nbytes: int) -> int:
    """A descriptor of new shared memory, zeroed, mode 0600; it goes with its last descriptor and mapping."""
    descriptor = os.memfd_create(f"tileweave-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open(place: str, nbytes: int) -> mmap.mmap:
    """Map a peer's buffer, which must be the one it told us of."""
    process, descriptor, token = place.split()
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"asked: memory of process {process} ({error.strerror}); allowed: ranks of one user on one host, which see each "
            "other in /proc; remedy: start them in one container"
        ) from error
    try:
        if not os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:tileweave-{token}"):
            raise UnsupportedError(
                f"asked: memory of process {process}; allowed: what that process made for this group; "
                "remedy: run all ranks of the group on one host"
            )
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


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
        token, descriptor, failure = secrets.token_hex(_TOKEN_BYTES), -1, ""
        try:
            descriptor = _make(token, nbytes)
        except OSError as error:
            failure = error.strerror or str(error)
        try:
            place = f"{os.getpid()} {descriptor} {token}"
            places = agree_on_memory(nbytes, failure, place, lambda text: gather_texts(text, self.group, self.device))
            mine = mmap.mmap(descriptor, nbytes)
            mapped = [mine if r == self.rank else _open(place, nbytes) for r, place in enumerate(places)]
            self.barrier()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._maps += mapped
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in mapped]
        return SymmetricBuffer(views[self.rank], tuple(v.data_ptr() for v in views), views)

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
            for to, at in copy.pieces(source):
                ctypes.memmove(to, at, copy.nbytes)
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
