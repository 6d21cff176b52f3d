"""Rank 0 serves the group's store, as it does without an agent, and is slow, stops or dies: the
calls of the other rank end in time, with the right result or an error that names the store.

Rank 1 sends the signals. In each phase all four kinds of call are made: the first call of a group,
a fused call, one that is compared (``TILEWEAVE_DEBUG=1``) and an unfused one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import SLACK, refusal
from tests.support.worlds import STORE_IN_RANK, Member, one_shot

import tileweave as tw
from tileweave.transport.protocol import MEETING_US, PUSHED_US, TIMEOUT_US
from tileweave.transport.workspace import REGISTRY, first_words

SECONDS = 1.0
EXTRA = {STORE_IN_RANK: "1"}
KINDS = {
    "first": {},
    "fused": {},
    "compared": {"TILEWEAVE_DEBUG": "1"},
    "unfused": {"TRITON_INTERPRET": "0"},
}
Said = list[tuple[str, float]]


class Kind:
    """A kind of call, over a group of its own."""

    def __init__(self, name: str) -> None:
        self.environment = KINDS[name]
        self.group = dist.new_group([0, 1])
        if name != "first":
            said = self.call()
            assert not said, said
        found = REGISTRY.find(self.group.group_name, torch.device("cpu"))
        for instance in found.instances.values() if found else ():
            for word in (TIMEOUT_US, MEETING_US, PUSHED_US):  # ranks are prepared without haste
                instance.control[word] = first_words(SECONDS)[word]

    def call(self) -> str:
        x = torch.full((4, 8), float(dist.get_rank()))
        with mock.patch.dict(os.environ, self.environment):
            want = torch.arange(2.0).repeat_interleave(4)[:, None].expand(8, 3) * 8
            return refusal(self._right, x, want)

    def _right(self, x: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(tw.all_gather_matmul(x, torch.ones(3, 8), group=self.group), want):
            raise tw.TileweaveError("wrong")

    def timed(self, **environment: str) -> tuple[str, float]:
        began = time.monotonic()
        with mock.patch.dict(os.environ, environment):
            return self.call(), time.monotonic() - began

    def twice(self) -> Said:
        """A call, and after ``tw.close()`` another one."""
        first = self.timed(TILEWEAVE_TIMEOUT=str(SECONDS))
        tw.close(self.group)
        return [first, self.timed(TILEWEAVE_TIMEOUT=str(SECONDS))]


def is_stopped(process: int) -> bool:
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    while not is_stopped(process):
        time.sleep(0.001)


@contextmanager
def slow(process: int, stopped: float, running: float) -> Iterator[None]:
    """The process runs for a short time, then is stopped, and so on."""
    ended = threading.Event()

    def pulse() -> None:
        while not ended.wait(running):
            os.kill(process, signal.SIGSTOP)
            ended.wait(stopped)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def both_call(me: Member, kinds: dict[str, Kind], disturb: Callable[[], ExitStack]) -> Said:
    found = []
    for kind in kinds.values():
        me.barrier()
        time.sleep(0.1 if me.rank == 1 else 0.0)  # the signal finds rank 0 in its call
        with disturb() if me.rank == 1 else ExitStack():
            found.append(kind.timed())
    return found


def only_rank_1_calls(me: Member, kinds: dict[str, Kind], host: int) -> Said:
    """Rank 0 is stopped. Rank 1 calls, closes, and calls again; later both close and call."""
    found = []
    for kind in kinds.values():
        me.barrier()
        if me.rank == 1:
            stop(host)
            found += kind.twice()
            os.kill(host, signal.SIGCONT)
        me.barrier()
        tw.close(kind.group)
        found.append(kind.timed())
    return found


def suffer(me: Member) -> dict[str, Said]:
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    host = int(pids[0])

    def pulses() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(slow(host, 0.05, 0.01))
        return stack

    def pause() -> ExitStack:
        stack = ExitStack()
        stop(host)
        threading.Timer(SECONDS, os.kill, (host, signal.SIGCONT)).start()
        return stack

    for name in KINDS:
        Kind(name)  # imports and compiles
    tw.close()
    found = {"slow": both_call(me, {name: Kind(name) for name in KINDS}, pulses)}
    found["paused"] = both_call(me, {name: Kind(name) for name in KINDS}, pause)
    found["stopped"] = only_rank_1_calls(me, {name: Kind(name) for name in KINDS}, host)
    kinds = {name: Kind(name) for name in KINDS}
    me.barrier()
    if me.rank == 0:
        os.kill(host, signal.SIGKILL)
    time.sleep(0.3)
    found["dead"] = []
    for kind in kinds.values():
        found["dead"] += kind.twice()
    return found


@pytest.fixture(scope="module")
def suffered() -> dict[str, Said]:
    ends = one_shot("gloo", 2, suffer, extra=EXTRA, timeout=100)
    assert ends[0].exit_code == -signal.SIGKILL, ends[0]
    assert ends[1].exit_code == 0, ends[1]
    return ends[1].value  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["slow", "paused"])
def test_host_of_the_store_is_late(suffered: dict[str, Said], how: str) -> None:
    assert [text for text, _ in suffered[how]] == [""] * len(KINDS)


@pytest.mark.parametrize("how", ["stopped", "dead"])
@pytest.mark.parametrize("kind", KINDS)
def test_host_of_the_store_is_away(suffered: dict[str, Said], how: str, kind: str) -> None:
    each = 3 if how == "stopped" else 2
    at = each * list(KINDS).index(kind)
    said = suffered[how][at : at + each]
    for (text, seconds), again in zip(said[:2], (False, True), strict=True):
        assert text.startswith("PeerTimeout: ") and seconds < SECONDS + SLACK, (text, seconds)
        in_kernel = kind == "fused" and not again
        assert ("epoch" in text) == in_kernel, text
        assert in_kernel or ("the store of its group (127.0.0.1:" in text), text
    if how == "stopped":
        assert said[2][0] == "", "the group works again"
