"""An instance under capture, on several streams, after failed growth or a failed launch: over a
transport that records calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.pure.test_workspace import OP, NotingTransport

from tileweave.ops.core.registry import push_with_launch
from tileweave.transport import protocol
from tileweave.transport.interface import Copies
from tileweave.transport.workspace import Instance


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} after {other.name}")


class Streams(NotingTransport):
    current: Stream

    def order(self) -> Stream:
        return self.current


def test_begin_reports_capture() -> None:
    """A capture must join every stream that it forked."""
    transport = NotingTransport()
    instance = Instance(OP, transport)
    assert instance.begin() is False
    transport.is_capturing = True
    assert instance.begin() is True
    transport.is_capturing = False
    assert instance.begin() is False, "a call outside of a capture"


def test_captured_region_waits_for_no_stream() -> None:
    """It belongs to the capture, and a stream outside of the capture cannot be waited for
    inside."""
    transport, notes = Streams(), []
    instance = Instance(OP, transport)
    instance.reserve(64, slots=3)
    for name, capturing in (("a", False), ("b", True), ("c", False)):
        transport.current, transport.is_capturing = Stream(name, notes), capturing
        instance.begin(region=0)
    assert notes == ["c after a"]


def test_failed_growth_keeps_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed growth leaves no slots that a smaller call would take for its own."""
    transport = NotingTransport()
    instance = Instance(OP, transport)
    instance.reserve(4096)
    with monkeypatch.context() as patched:
        patched.setattr(transport, "allocate", lambda nbytes: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            instance.reserve(100_000)
    transport.events.clear()
    instance.reserve(4096)
    assert transport.events == ["synchronize", "barrier", f"allocate {2 * instance.slot_bytes}"]
    assert torch.equal(instance.slots, torch.zeros(2 * instance.slot_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("device", "capturing", "joins"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", False, 1)]
)
def test_concurrent_copies_are_joined_only_where_needed(
    device: str, capturing: bool, joins: int
) -> None:
    """A capture must join every stream that it forked. A kernel on a device ends after the copies
    anyway."""
    transport = NotingTransport()
    transport.device = torch.device(device)
    transport.push = lambda copies, given, queue, launch, capturing: launch()  # type: ignore[method-assign]
    instance, said = (
        SimpleNamespace(
            transport=transport,
            interpreted=device == "cpu",
            calls=1,
            launched=lambda: said.append("launched"),
        ),
        [],
    )
    push_with_launch(instance, lambda: said.append("launch"), Copies([]), 0, capturing)  # type: ignore[arg-type]
    assert said == ["launch", "launched"] and instance.calls == 2
    assert transport.events == ["join"] * joins


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_failed_launch_is_joined_and_not_counted(device: str) -> None:
    transport = NotingTransport()
    transport.device = torch.device(device)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    transport.push = fails  # type: ignore[method-assign]
    instance = SimpleNamespace(
        transport=transport, interpreted=device == "cpu", calls=1, launched=lambda: None
    )
    with pytest.raises(MemoryError):
        push_with_launch(instance, lambda: None, Copies([]), 0, False)  # type: ignore[arg-type]
    assert transport.events == ["join"] and instance.calls == 1


@pytest.mark.parametrize("copied", [False, True])
def test_kernels_find_the_tables_through_the_control_block(copied: bool) -> None:
    """After a fault a rank finds itself instead of its peers there, and sends them nothing more.
    Copy engines use addresses of the host."""
    instance = Instance(OP, NotingTransport(world_size=4, rank=1), copied=copied)
    instance.reserve(64)
    instance.reserve(100_000)
    words = instance.control[protocol.TABLES : protocol.RECORD].view(torch.int64).tolist()
    tables = [instance.slot_table.data_ptr(), instance.signal_table.data_ptr()]
    ranks = (
        int(instance.control[protocol.TABLE_RANK]),
        int(instance.control[protocol.TABLE_RANKS]),
    )
    assert (words, ranks) == (([0, 0], (0, 0)) if copied else (tables, (1, 4)))
