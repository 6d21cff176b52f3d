"""Symmetric memory lent to callers: which slot of an instance holds a result that somebody still
has.

A result that peers store into is handed out as it stands. Its tensor has a storage of its own
(through DLPack), and when the last tensor on that storage is gone the region is free again, in the
order of the stream on which it was made: unlike torch's allocator we are not told of
``record_stream``, so who reads a result on another stream keeps it until that one is done. A region
that a CUDA graph was captured with is that capture's for ever: the graph will write there again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack


@dataclass
class Regions:
    """The slots [0, count) of one allocation, from the side of who lends them.

    ``held``: somebody has the result. ``captured``: a graph was captured with it. ``streams``: by
    region, that of the last call that had it, on which its result was copied, or read for as long
    as somebody held it.
    """

    count: int
    held: set[int] = field(default_factory=set)
    captured: set[int] = field(default_factory=set)
    streams: dict[int, Any] = field(default_factory=dict)

    def choose(self, capturing: bool) -> tuple[int, bool]:
        """A region for the next result, and whether it may be lent; otherwise the result must be
        copied out of it.

        One free region is never lent, so that there is always a place to land. A capture gets none
        that another one had: whose graph is replayed later writes over what the other's user still
        has.
        """
        free = [k for k in range(self.count) if k not in self.held and k not in self.captured]
        lends = len(free) > 1
        if lends and capturing:
            self.captured.add(free[0])
        return free[0] if lends else free[-1], lends

    def order(self, region: int, stream: Any) -> None:
        """Peers may write to ``region`` as soon as ``stream`` comes to what it is given next:
        behind all that reads it now.

        The line of launches does not say so, it ends with a kernel; what reads its result may still
        run, on the stream of that.
        """
        last = self.streams.get(region, stream)
        if last != stream:
            stream.wait_stream(last)
        self.streams[region] = stream

    def lend(self, region: int, place: torch.Tensor) -> torch.Tensor:
        """``place``, which is ``region``, as a tensor with a storage of its own; held until the
        last user lets go."""
        self.held.add(region)
        lent = place.detach()
        weakref.finalize(lent, self.held.discard, region)
        return torch.from_dlpack(to_dlpack(lent))
