"""Regions: slots that are lent to callers as results.

Peers store directly into a result, and the caller gets that memory without a copy. Its tensor has a
storage of its own (through DLPack). The region is free again when the last tensor on that storage
is gone, in the order of the stream on which the result was made. Unlike torch's allocator, we do
not see ``record_stream``: a caller that reads a result on another stream must keep it until that
stream is done. A region that a CUDA graph was captured with belongs to that graph for ever, because
each replay writes there. Later calls of the same capture may use it again, as memory of torch's
allocator that is freed during a capture: a replay runs them one after another.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

# where results lie in host memory that ranks share, and their bytes
_LENT: dict[int, tuple[int, int]] = {}
_NUMBERS = itertools.count()
_PIPES: list[tuple[int, int]] = []  # of the fork in progress
_COPYING_SECONDS = 10.0  # the longest that a fork waits for its child


@dataclass
class Regions:
    """The slots [0, count) of one allocation, and which of them are lent.

    held : regions whose result a caller still has.
    captured : for each region that a CUDA graph was captured with, the number of that capture.
    streams : for each region, the stream of the last call that used it. The result was copied or
        read on that stream.
    """

    count: int
    held: set[int] = field(default_factory=set)
    captured: dict[int, int] = field(default_factory=dict)
    streams: dict[int, Any] = field(default_factory=dict)

    def choose(self, capture: int) -> tuple[int, bool]:
        """A region for the next result, and whether it may be lent; if not, the result must be
        copied out of it.

        capture : the number of the capture that the call is in; 0: none.

        One region always stays free, so that the next call has one. Two captures never get the same
        region: the replay of one graph would overwrite a result of the other that is still in use.
        """
        free = [
            k
            for k in range(self.count)
            if k not in self.held and (k not in self.captured or self.captured[k] == capture)
        ]
        lends = len(free) > 1
        if lends and capture and free[0] not in self.captured:
            self.captured[free[0]] = capture
            self.streams.pop(free[0], None)  # a capture cannot wait for work outside of it
        return free[0], lends

    def order(self, region: int, stream: Any, capture: int = 0) -> None:
        """Order the next work of ``stream``, after which peers may write to ``region``, after all
        that reads the region now. In a capture: after what the same capture has queued; a result
        that the caller passed to be written belongs to the graph from then on.

        The order of launches is not enough: it ends with a kernel, and what reads the result of
        that kernel may still run on its stream.
        """
        if capture and self.captured.get(region) != capture:
            if region in self.held and region not in self.captured:  # given as ``out``
                self.captured[region], self.streams[region] = capture, stream
            return
        last = self.streams.get(region, stream)
        if last != stream:
            stream.wait_stream(last)
        self.streams[region] = stream

    def lend(self, region: int, place: torch.Tensor) -> torch.Tensor:
        """``place``, the memory of ``region``, as a tensor with a storage of its own. The region is
        held until that storage is gone."""
        self.held.add(region)
        lent, number = place.detach(), next(_NUMBERS)
        if lent.is_cpu:
            _LENT[number] = (lent.data_ptr(), lent.numel() * lent.itemsize)
        weakref.finalize(lent, self._take_back, region, number)
        return torch.from_dlpack(to_dlpack(lent))

    def _take_back(self, region: int, number: int) -> None:
        _LENT.pop(number, None)
        self.held.discard(region)


# --- Forks ---
# A forked process keeps its results, as it keeps other tensors on the CPU. They are in shared
# memory, so it copies them, and the parent goes on only then.


def _before_fork() -> None:
    if _LENT:
        _PIPES.append(os.pipe())


def _in_parent() -> None:
    if _PIPES:
        copied, mine = _PIPES.pop()
        os.close(mine)
        select.select([copied], [], [], _COPYING_SECONDS)
        os.close(copied)


def _in_child() -> None:
    for begin, nbytes in list(_LENT.values()):
        _own(begin, nbytes)
    _LENT.clear()
    if _PIPES:
        for end in _PIPES.pop():
            os.close(end)


def _own(begin: int, nbytes: int) -> None:
    """Replace the pages of these bytes by memory of this process alone, with the same content."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(begin + nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    content = ctypes.string_at(first, size)
    place = ctypes.CDLL(None).mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    if place(first, size, access, flags, -1, 0) != first:
        raise MemoryError(f"no memory of its own for {size} bytes of a result in a forked process")
    ctypes.memmove(first, content, size)


if hasattr(os, "register_at_fork") and hasattr(os, "memfd_create"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
