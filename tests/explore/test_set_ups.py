"""Explore calls that fail on some ranks while memory is mapped: no kernel takes data that a peer
sent in another call.

Instances and ledgers are the real ones. Three things are modelled: the meetings on the host; the
kernel, which waits until each rank has launched as many; and time, which may run out for any rank
that waits. A rank makes its next call after an error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import greenlet
import pytest
import torch
from tests.pure.test_workspace import NotingTransport

import tileweave as tw
from tileweave.errors import PeerTimeout, peers_know
from tileweave.transport import protocol
from tileweave.transport.call_ledger import NBYTES, Ledger
from tileweave.transport.interface import SymmetricBuffer
from tileweave.transport.workspace import Instance

CALLS, OPS = 7, ("gather", "scatter")
STAGES = ("before", "barrier", "allocate", "table", "compile", "launch")


class Planted(Exception):
    """A local failure, for example out of memory."""


@dataclass(frozen=True)
class Request:
    """One call of one rank. ``number`` says whose data it is, and is not compared."""

    number: int
    op: str
    nbytes: int
    fails: str = ""  # the stage in which it fails


@dataclass
class Group:
    """Ranks as greenlets. ``impatience``: how often a wait times out although other ranks could go
    on."""

    size: int
    draw: random.Random
    impatience: float
    ended: Counter[str] = field(default_factory=Counter)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)  # what they wait for
    met: dict[int, dict[int, str]] = field(default_factory=dict)  # texts of each meeting, by rank
    # whether a meeting took place; absent: it is not over
    over: dict[int, bool] = field(default_factory=dict)
    last: Counter[int] = field(default_factory=Counter)  # the last meeting of each rank
    # numbers of the calls that each rank launched, by op
    launched: dict[str, list[list[int]]] = field(default_factory=dict)

    def wait(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready`` became true in time. Other ranks go on in the meantime."""
        self.waiting[rank] = ready
        return self.hub.switch()

    def run(self, body: Callable[[int], None]) -> None:
        self.hub = greenlet.getcurrent()
        threads = {
            rank: greenlet.greenlet(lambda _, rank=rank: body(rank), self.hub)
            for rank in range(self.size)
        }
        self.waiting = {rank: lambda: True for rank in threads}
        while alive := [rank for rank, thread in threads.items() if not thread.dead]:
            ready = [rank for rank in alive if self.waiting[rank]()]
            stuck = [rank for rank in alive if rank not in ready]
            if stuck and (not ready or self.draw.random() < self.impatience):
                threads[self.draw.choice(stuck)].switch(False)
            else:
                threads[self.draw.choice(ready)].switch(True)

    def pause(self, rank: int) -> None:
        self.wait(rank, lambda: True)

    def meet(self, rank: int, text: str) -> list[str]:
        """As ``rendezvous.meet``: a rank that waits in vain ends the meeting for all, and later
        ranks go on to the next one."""
        while True:
            self.last[rank] += 1
            number, texts = self.last[rank], self.met.setdefault(self.last[rank], {})
            texts[rank] = text
            came = self.wait(
                rank,
                lambda texts=texts, number=number: len(texts) == self.size or number in self.over,
            )
            took_place = self.over.setdefault(number, len(texts) == self.size)
            if not came and not took_place:
                raise PeerTimeout("mapping", rank, -1, -1, 0, 0, 1.0, "meeting")
            if took_place:
                break
        if len({text.split("|")[0] for text in texts.values()}) > 1:
            raise tw.RankMismatchError("they mean something else")
        return [texts[other] for other in range(self.size)]


class Meeting(NotingTransport):
    """The transport of a rank of a :class:`Group`."""

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__(group.size, rank)
        self.group, self.fails = group, ""

    def stage(self, name: str) -> None:
        self.group.pause(self.rank)
        if self.fails == name:
            raise Planted

    def barrier(self) -> None:
        self.stage("barrier")
        self.group.meet(self.rank, "here")

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        self.stage("allocate")
        sizes = self.group.meet(self.rank, f"memory|{nbytes}")
        if len(set(sizes)) > 1:
            raise tw.RankMismatchError("sizes differ")
        self.group.meet(self.rank, "mapped")
        return super().allocate(nbytes)


class Worker:
    """A rank that makes calls, as operators do, and goes on after an error."""

    def __init__(self, group: Group, rank: int, pages: list[bytearray]) -> None:
        self.group, self.rank = group, rank
        self.transport, self.ledger = Meeting(group, rank), Ledger()
        self.ledger.open(dict(enumerate(pages)), rank)
        self.instances: dict[str, Instance] = {}

    def attempt(self, request: Request) -> None:
        """As ``registry._as_given``, but ``CALL`` is per thread, and here all ranks are in one."""
        self.transport.fails, self.posted, done, given_up = request.fails, False, False, False
        try:
            self.call(request)
            done = True
            self.group.ended["right"] += 1
        except tw.TileweaveError as error:
            done = peers_know(error, self.posted)
            self.group.ended[type(error).__name__] += 1
            given_up = isinstance(error, PeerTimeout)
        except Planted:
            self.group.ended["Planted"] += 1
        finally:
            if not done:
                self.ledger.break_off(self.posted, given_up)

    def call(self, request: Request) -> None:
        self.transport.stage("before")
        calls = self.ledger.calls
        try:
            instance = self.reserve(request)
            instance.begin(2 + request.nbytes + OPS.index(request.op))
        finally:
            self.posted = self.ledger.calls > calls
        self.transport.stage("compile")
        self.transport.stage("launch")
        self.launch(instance, request)
        instance.launched()

    def reserve(self, request: Request) -> Instance:
        instance = self.instances.get(request.op)
        if instance is None:
            instance = self.instances[request.op] = Instance(
                request.op, self.transport, self.ledger
            )
        table = instance._table

        def may_fail(buffer: SymmetricBuffer) -> torch.Tensor:
            self.transport.stage("table")
            return table(buffer)

        instance._table = may_fail  # type: ignore[method-assign]
        instance.reserve(request.nbytes)
        instance._table = table  # type: ignore[method-assign]
        return instance

    def launch(self, instance: Instance, request: Request) -> None:
        """A kernel: it sends its data, waits for that of each peer's corresponding launch, and
        takes it."""
        mine = self.group.launched.setdefault(request.op, [[] for _ in range(self.group.size)])
        epoch = len(mine[self.rank])
        mine[self.rank].append(request.number)
        if not self.group.wait(self.rank, lambda: all(len(numbers) > epoch for numbers in mine)):
            instance.report[protocol.REPORT_SIGNAL], instance.report[protocol.REPORT_SET] = (
                (self.rank + 1) % self.group.size * 32,
                1,
            )
            return
        taken = {numbers[epoch] for numbers in mine}
        assert taken == {request.number}, (
            f"rank {self.rank} in call {request.number} takes data of calls {taken}"
        )


def sequences(draw: random.Random, size: int) -> list[list[Request]]:
    """The calls of each rank: equal but for one fault or two."""
    common = [
        Request(number, draw.choice(OPS), draw.choice((1000, 5000, 9000)))
        for number in range(CALLS)
    ]
    found = [list(common) for _ in range(size)]
    for _ in range(draw.choice((1, 1, 2))):
        rank, number = draw.randrange(size), draw.randrange(CALLS)
        before = found[rank][number]
        if draw.random() < 0.5:
            found[rank][number] = Request(
                number, before.op, draw.choice((1000, 5000, 9000, 20_000))
            )
        else:
            found[rank][number] = Request(number, before.op, before.nbytes, draw.choice(STAGES))
    return found


def explore(size: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    group = Group(size, draw, draw.choice((0.0, 0.0, 0.02, 0.2)))
    pages = [bytearray(NBYTES) for _ in range(size)]
    workers = [Worker(group, rank, pages) for rank in range(size)]
    asked = sequences(draw, size)

    def body(rank: int) -> None:
        for request in asked[rank]:
            workers[rank].attempt(request)

    group.run(body)
    return group.ended


@pytest.mark.parametrize("size", [2, 3])
def test_failed_setup_never_mixes_data_of_calls(size: int) -> None:
    ended: Counter[str] = Counter()
    for seed in range(500):
        ended += explore(size, seed)
    assert set(ended) == {"right", "Planted", "PeerTimeout", "RankMismatchError"}, ended
    assert min(ended.values()) > 100, ended


def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gave up a meeting does not tell its peers, so its next call is taken for the
    abandoned one."""
    known = peers_know
    silent = lambda error, posted: isinstance(error, PeerTimeout) or known(error, posted)  # noqa: E731
    monkeypatch.setitem(globals(), "peers_know", silent)
    with pytest.raises(AssertionError, match="takes data of calls"):
        list(map(explore, [2] * 500, range(500)))
