"""What crosses between nodes, between the ranks of a rail: by NCCL between GPUs, by gloo on the
CPU.

With gloo a rail has a group of its own. It is made when memory is first mapped, and ends with the
transport: an exchange that one rank has given up stays in the group, so the next workspace makes
another one. A thread begins the exchanges of a call, waits for one after another, and then writes
the words that announce each. It polls, since the call may be given up meanwhile; an exchange ends
by itself after the time-out.

Before the first chunk the ranks of a rail tell each other which call they are in. If the calls
differ, nothing else is sent, because gloo ends the process if sizes differ. Then the kernel's wait
times out, and the ledger says why.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from tileweave.errors import PeerTimeout
from tileweave.planning.topology import Topology
from tileweave.transport.group_store import ask_store
from tileweave.transport.interface import Sending
from tileweave.transport.rendezvous import MAPPING
from tileweave.transport.torch_collectives import (
    queue_all_gather,
    queue_all_reduce,
    queue_all_to_all,
    queue_all_to_all_parts,
)
from tileweave.transport.workspace import timeout_seconds

_POLL = 2e-4  # seconds


class StreamOfRail:
    """A stream of a GPU for the transfers of a rail."""

    def __init__(self, device: torch.device) -> None:
        # its kernels get multiprocessors before those of a matmul that is queued later
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Event | None = None

    def begin(self, transfer: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            transfer()
            done = self._last = torch.cuda.Event()
            done.record()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def join(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            torch.cuda.current_stream().wait_event(last)


class NcclRail(StreamOfRail):
    """A rail whose ranks are ``group``, in the order of their nodes. ``whole``: the group of all
    nodes."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, whole: dist.ProcessGroup
    ) -> None:
        super().__init__(device)
        self._group, self._whole = group, whole
        self._me = dist.get_rank(group)

    def agree(self, call: int) -> Mapping[int, int]:
        return {}

    def check(self) -> None:
        pass

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        queue_all_gather(out, x, self._group)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self._group.size() == 2:  # as many bytes; over sockets a quarter faster
            queue_all_gather(out, x[1 - self._me], self._group)
        else:
            queue_all_to_all(out, x, self._group)

    def all_reduce(self, x: torch.Tensor) -> None:
        queue_all_reduce(x, self._group)

    def all_to_all_parts(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        queue_all_to_all_parts(out, x, received, sent, self._whole)


class GlooRail:
    """The ranks with the index of this one inside their nodes. Making it is collective; ``number``
    is one that no earlier rail of ``group`` had."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology, number: int) -> None:
        rank = dist.get_rank(group)
        self.ranks = topology.rail(rank)
        self._me = self.ranks.index(rank)
        self._far = [other for other in self.ranks if other != rank]
        # as long as a kernel waits for data, so that an exchange ends when its call does
        self._seconds = timeout_seconds() * 9 / 8
        self._number, self._all = number, group
        self._whole: dist.ProcessGroupGloo | None = None
        self._group = self._connect(f"rail-{number}-{self.ranks[0]}", self._me, len(self.ranks))

    def _connect(self, name: str, rank: int, size: int) -> dist.ProcessGroupGloo:
        """A group of gloo's own. Collective over its ranks."""
        return ask_store(
            self._all,
            MAPPING,
            self._seconds,
            lambda talk: dist.ProcessGroupGloo(
                dist.PrefixStore(f"tileweave-{name}", talk.store),
                rank,
                size,
                timedelta(seconds=self._seconds),
            ),
        )

    def exchange(self, sending: Sending, given_up: Callable[[], bool]) -> None:
        """Send the chunks of a call, and announce those that arrive. Returns early if the call is
        given up, or a rank of the rail is in another call or gone."""
        told = self._told(sending.call, given_up)
        if told is None or not sending.agrees(told):
            return
        crossing, works = sending.crossing, []
        for (begin, end), targets in zip(crossing.chunks, crossing.targets, strict=True):
            chunk, places = sending.data[begin:end], list(targets)
            places.insert(self._me, torch.empty_like(chunk))
            works.append(self._begin(chunk, places))
        for work, announced in zip(works, crossing.arrived, strict=True):
            if not self._done(work, given_up):
                return
            for word in announced:
                ctypes.memmove(word.target, word.source, word.nbytes)

    def agree(self, call: int) -> Mapping[int, int]:
        began = time.monotonic()
        told = self._told(call, lambda: False)
        return self._refuse(began, self._far) if told is None else told

    def _told(self, call: int, given_up: Callable[[], bool]) -> Mapping[int, int] | None:
        """The numbers of the calls that the others are in, by rank; None if one does not come."""
        words = torch.zeros(len(self.ranks), 1, dtype=torch.int64)
        if not self._done(self._begin(torch.tensor([call]), list(words.unbind())), given_up):
            return None
        return {rank: int(words[self.ranks.index(rank)]) for rank in self._far}

    def begin(self, transfer: Callable[[], None]) -> Callable[[], None]:
        transfer()
        return lambda: None

    def join(self) -> None:
        pass

    def check(self) -> None:
        pass

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        began = time.monotonic()
        mine = x.contiguous().view(-1).view(torch.uint8)  # gloo has no 2-byte floats
        places = out.view(len(self.ranks), -1).view(torch.uint8)
        if not self._done(self._begin(mine, list(places.unbind())), lambda: False):
            self._refuse(began, self._far)

    def _refuse(self, began: float, far: list[int]) -> NoReturn:
        """Raise that ``far`` did not come.

        gloo tells at once that a process is gone. But then a rank of this node that calls later
        would find a call that this rank gave up, and not why. So wait as long as for a late rank.
        """
        time.sleep(max(began + timeout_seconds() - time.monotonic(), 0.0))
        me, peer = self.ranks[self._me], far[0] if len(far) == 1 else -1
        what = "an exchange between nodes"
        raise PeerTimeout(what, me, peer, -1, 0, 0, self._seconds, "meeting")

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        far = [at for at in range(len(self.ranks)) if at != self._me]
        everything = x.new_empty(len(self.ranks), len(far), *x.shape[1:])
        self.all_gather(everything, x[far])
        for at in far:
            out[at].copy_(everything[at, self._me - (self._me > at)])

    def all_reduce(self, x: torch.Tensor) -> None:
        everything = x.new_empty(len(self.ranks), *x.shape)
        self.all_gather(everything, x)
        total = everything[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in everything[1:]:
            total = total + part
        x.copy_(total)

    def all_to_all_parts(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        if self._whole is None:
            me, size = dist.get_rank(self._all), dist.get_world_size(self._all)
            self._whole = self._connect(f"all-{self._number}", me, size)
        size, began = x.element_size(), time.monotonic()
        work = self._whole.alltoall_base(  # type: ignore[attr-defined]
            out.view(torch.uint8),
            x.view(torch.uint8),
            [size * count for count in received],
            [size * count for count in sent],
            dist.AllToAllOptions(),
        )
        if not self._done(work, lambda: False):
            self._refuse(began, [])

    def _begin(self, mine: torch.Tensor, places: list[torch.Tensor]) -> dist.Work:
        return self._group.allgather([places], [mine])  # type: ignore[attr-defined]

    def _done(self, work: dist.Work, given_up: Callable[[], bool]) -> bool:
        """Whether an exchange has ended well."""
        while not work.is_completed():
            if given_up():
                return False
            time.sleep(_POLL)
        try:
            return bool(work.wait())
        except RuntimeError:  # a rank is gone, or too late
            return False
