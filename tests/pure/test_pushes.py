"""Pushes of transports: what becomes of copies if the launch raises, and what a join waits for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileweave.ops.matmul import concurrent_gather
from tileweave.ops.matmul.concurrent_gather import QUEUE, Gathering
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.cuda import CudaTransport
from tileweave.transport.interface import Copy

SOON = 10.0  # seconds in which a thread surely goes on
NOT_YET = 0.05


class Rail:
    """Exchanges that take until ``arrived`` is set."""

    def __init__(self) -> None:
        self.arrived, self.told = threading.Event(), []

    def exchange(self, sending: object, gone: object) -> None:
        assert self.arrived.wait(SOON)
        self.told.append(sending)


@pytest.fixture
def transport() -> Iterator[CpuTransport]:
    """Without a group: what a push and a join use."""
    found = object.__new__(CpuTransport)
    found._engine, found._crosser = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    found._pushed = found._crossed = found.watch = None
    found._closed, found._rail = threading.Event(), None
    yield found
    found._closed.set()
    found._engine.shutdown()
    found._crosser.shutdown()


def waiting_copy(counter: ctypes.c_int32, data: torch.Tensor) -> Copy:
    """Copies the first number of ``data`` to the second once ``counter`` is 1."""
    at = data.data_ptr()
    return Copy(at + 4, at, 4, counter=ctypes.addressof(counter), count=1)


def test_copies_are_dropped_if_the_launch_raises(transport: CpuTransport) -> None:
    """Nothing counts for them, and a counter that the next call uses must not set them off."""
    counter, data = ctypes.c_int32(0), torch.tensor([7, 0], dtype=torch.int32)

    def refuse() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        transport.push([waiting_copy(counter, data)], launch=refuse)
    work = transport._pushed
    assert work is not None
    work.result(SOON)  # as join() does, with a limit
    counter.value = 1
    transport.push([])  # the queue goes on
    transport._pushed.result(SOON)  # type: ignore[union-attr]
    assert data.tolist() == [7, 0]


@pytest.mark.parametrize("last", ["copies", "exchange"])
def test_a_join_waits_for_copies_and_for_what_is_exchanged(
    transport: CpuTransport, last: str
) -> None:
    counter, data = ctypes.c_int32(0), torch.tensor([7, 0], dtype=torch.int32)
    rail = Rail()
    transport._rail = rail  # type: ignore[assignment]
    transport.push([waiting_copy(counter, data)], sending="sent")  # type: ignore[arg-type]
    joined = threading.Thread(target=transport.join, daemon=True)
    joined.start()
    end_copies, end_exchange = lambda: setattr(counter, "value", 1), rail.arrived.set
    ends = [end_exchange, end_copies] if last == "copies" else [end_copies, end_exchange]
    ends[0]()
    joined.join(NOT_YET)
    assert joined.is_alive(), f"the {last} had not ended"
    ends[1]()
    joined.join(SOON)
    assert not joined.is_alive()
    assert data.tolist() == [7, 7] and rail.told == ["sent"]


@pytest.mark.parametrize("queue", [0, 1])
def test_each_queue_of_a_gpu_is_pushed_and_joined_by_itself(queue: int) -> None:
    found = object.__new__(CudaTransport)
    told: list[tuple[str, int]] = []
    found.watch = None
    engines: list[Any] = [
        SimpleNamespace(
            push=lambda *_, at=at: told.append(("push", at)),
            join=lambda at=at: told.append(("join", at)),
        )
        for at in range(2)
    ]
    found._engines = engines
    found.push([], queue=queue)
    found.join(queue)
    assert told == [("push", queue), ("join", queue)]
    if not queue:
        found.push([])
        found.join()
        assert told[2:] == told[:2], "the first queue is that of most pushes"


@pytest.mark.parametrize(
    ("device", "capturing", "joins"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", False, 1)]
)
def test_the_queue_of_a_concurrent_gather_is_joined(
    device: str, capturing: bool, joins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the launch that ends it raises, always: no kernel ends after the copies, which read x.
    The other queue is left to the call that pushed on it."""
    joined: list[int] = []
    found = object.__new__(Gathering)
    found._instance = SimpleNamespace(  # type: ignore[assignment]
        transport=SimpleNamespace(join=lambda queue=0: joined.append(queue)),
        launched=lambda: None,
    )
    found._capturing, found._x = capturing, (SimpleNamespace(is_cuda=device == "cuda"),)  # type: ignore[assignment]
    monkeypatch.setattr(concurrent_gather.CALL, "posted", True)
    found._end(lambda: None)
    assert joined == [QUEUE] * joins
    joined.clear()

    def refuse() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        found._end(refuse)
    assert joined == [QUEUE] and QUEUE != 0
