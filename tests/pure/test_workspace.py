"""Workspaces over a transport that records calls: growth, capture, timeouts, close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import Mock

import pytest
import torch

import tileweave as tw
from tileweave.planning.machine import CPU
from tileweave.planning.schedules.gather import TileSchedule
from tileweave.planning.topology import Topology
from tileweave.transport import workspace
from tileweave.transport.interface import Copy, SymmetricBuffer
from tileweave.transport.protocol import (
    EPOCH,
    FAULT,
    LEAVERS,
    MAX_SLICES,
    MEETING_US,
    PUSHED_US,
    REPORT_EXPECTED,
    REPORT_SEEN,
    REPORT_SET,
    REPORT_SIGNAL,
    REPORT_UNIT,
    TIMEOUT_US,
)
from tileweave.transport.workspace import Instance, Registry, Workspace, timeout_seconds

OP = "all_gather_matmul"


class NotingTransport:
    """One rank of ``world_size`` whose peers are absent. ``events`` are the calls it got, in
    order."""

    def __init__(self, world_size: int = 4, rank: int = 1) -> None:
        self.device, self.machine = torch.device("cpu"), CPU
        self.rank, self.world_size = rank, world_size
        self.topology = Topology.one_node(world_size)
        self.is_capturing = False
        self.events: list[str] = []
        self.buffers: list[SymmetricBuffer] = []

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        assert not self.is_capturing, "no memory under capture"
        self.events.append(f"allocate {nbytes}")
        local = torch.zeros(nbytes, dtype=torch.uint8)
        addresses = tuple(local.data_ptr() + r - self.rank for r in range(self.world_size))
        self.buffers.append(SymmetricBuffer(local, addresses))
        return self.buffers[-1]

    def share(self, nbytes: int) -> dict[int, bytearray]:
        return {}

    def barrier(self) -> None:
        self.events.append("barrier")

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
    ) -> None:
        self.events.append("push")

    def join(self, queue: int = 0) -> None:
        self.events.append("join")

    def order(self) -> None:
        self.events.append("order")

    def capturing(self) -> bool:
        return self.is_capturing

    def capture_number(self) -> int:
        return int(self.is_capturing)

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture
def transport() -> NotingTransport:
    return NotingTransport()


@pytest.fixture
def instance(transport: NotingTransport) -> Instance:
    found = Instance(OP, transport)
    transport.events.clear()
    return found


def time_out(instance: Instance, signal: int, unit: int = 5) -> None:
    """What a device writes when a wait times out."""
    instance.report[REPORT_SIGNAL], instance.report[REPORT_UNIT] = signal, unit
    instance.report[REPORT_EXPECTED], instance.report[REPORT_SEEN] = 9, 8
    instance.report[REPORT_SET] = 1


# --- A new instance ---


@pytest.mark.parametrize("size", range(2, 9))
def test_new_instance(size: int) -> None:
    transport = NotingTransport(size, rank=size - 1)
    instance = Instance(OP, transport)
    assert instance.signals.numel() >= size * MAX_SLICES + size + 1, (
        "slices of each source, a barrier, own pushes"
    )
    assert not instance.signals.any(), "signals start below the first epoch"
    assert instance.control[EPOCH] == 1
    assert instance.control[LEAVERS] == 0
    assert instance.control[FAULT] == 0
    assert instance.signal_table.tolist() == list(transport.buffers[0].addresses)
    assert instance.signal_table.dtype == torch.int64
    instance.check()


# --- Growth ---


def test_growth_waits_for_all_ranks_before_freeing(
    instance: Instance, transport: NotingTransport
) -> None:
    instance.reserve(5000)
    assert transport.events[:2] == ["synchronize", "barrier"]
    assert transport.events[2] == f"allocate {2 * instance.slot_bytes}"
    assert instance.slot_bytes >= 5000
    assert instance.slots.numel() == 2 * instance.slot_bytes
    assert instance.slot_table.tolist() == list(instance.slot_addresses)


def test_call_that_fits_allocates_nothing(instance: Instance, transport: NotingTransport) -> None:
    instance.reserve(5000, counters=7)
    slots = instance.slots.data_ptr()
    transport.events.clear()
    for size in (5000, 1, 0, instance.slot_bytes):
        instance.reserve(size, counters=3)
    assert transport.events == []
    assert instance.slots.data_ptr() == slots


def test_growth_drops_views_of_the_old_memory(instance: Instance) -> None:
    instance.reserve(1000)
    instance.cache["a view"] = instance.slots
    instance.reserve(100_000)
    assert instance.cache == {}
    assert instance.slots.numel() == 2 * instance.slot_bytes >= 200_000


def test_counters_are_zero_and_grow_alone(instance: Instance, transport: NotingTransport) -> None:
    instance.reserve(1000, counters=4)
    transport.events.clear()
    instance.reserve(1000, counters=132)
    assert transport.events == ["synchronize"], "counters are local: growing them is not collective"
    assert instance.counters.numel() >= 132
    assert not instance.counters.any()


def test_endpoints_follow_growth_of_counters(instance: Instance) -> None:
    """The pointers of a kernel are kept between calls: they must not be those of the small
    counters."""
    from tileweave.ops.core.registry import endpoint

    instance.reserve(1000, counters=4)
    before = endpoint(instance, torch.float16)
    assert endpoint(instance, torch.float16) is before, "made once"
    instance.reserve(1000, counters=132)
    assert endpoint(instance, torch.float16).counters.numel() >= 132


@pytest.mark.parametrize("size", range(2, 9))
def test_at_most_two_gathered_inputs(size: int) -> None:
    for rows, depth, itemsize in ((1024, 8192, 2), (16, 8192, 2), (1021, 5000, 2), (64, 1024, 4)):
        for tile_m in (16, 2048):  # shards of whole tiles, and tiles that span shards
            schedule = TileSchedule(0, size, rows, 64, depth, tile_m, 64, 64, 1, 1)
            instance = Instance(OP, NotingTransport(size))
            instance.reserve(schedule.slot_rows * depth * itemsize)
            gathered = size * rows * depth * itemsize
            signals = (instance.signals.numel() + instance.flags.numel()) * 4
            limit = 2 * gathered + signals + 2 * 1023  # the last one: slots are rounded up
            assert instance.nbytes <= limit, f"{instance.nbytes} bytes for {gathered} gathered"
            assert signals < 8192


# --- Capture ---


def test_growth_under_capture_names_warmup(instance: Instance, transport: NotingTransport) -> None:
    instance.reserve(1000, counters=4)
    transport.is_capturing = True
    instance.reserve(1000, counters=4)
    for ask in ({"slot_bytes": 100_000}, {"slot_bytes": 1000, "counters": 132}):
        with pytest.raises(
            tw.CaptureError, match=r"asked: all_gather_matmul.*allowed: .*remedy: .*tw\.warmup"
        ):
            instance.reserve(**ask)
    assert instance.slot_bytes < 100_000


def test_a_first_call_under_capture_names_warmup(transport: NotingTransport) -> None:
    workspace = Workspace(transport)
    transport.is_capturing = True
    with pytest.raises(tw.CaptureError, match=r"tw\.warmup"):
        workspace.instance(OP, "sm")
    assert transport.events == []
    transport.is_capturing = False
    workspace.instance(OP, "sm")
    transport.is_capturing = True
    workspace.instance(OP, "sm")


def test_memory_of_a_captured_graph_is_kept(instance: Instance, transport: NotingTransport) -> None:
    """A replay reads and writes the memory of its capture, which growth must not free."""
    instance.reserve(1000, counters=4)
    transport.is_capturing = True
    instance.begin()
    transport.is_capturing = False
    held = [instance.slots.data_ptr(), instance.counters.data_ptr()]
    table = instance.slot_table
    instance.cache["plan of a push"] = torch.zeros(3)
    transport.buffers.clear()
    instance.reserve(100_000, counters=132)
    retired = [kept for kept in instance._held if kept is not None]
    assert any(
        isinstance(kept, SymmetricBuffer) and kept.local.data_ptr() == held[0] for kept in retired
    )
    assert any(isinstance(kept, torch.Tensor) and kept.data_ptr() == held[1] for kept in retired)
    assert any(kept is table for kept in retired), "kernels look peers up there"
    assert any(isinstance(kept, dict) and "plan of a push" in kept for kept in retired)
    assert not instance.cache


def test_memory_without_a_graph_is_freed(
    instance: Instance, transport: NotingTransport, monkeypatch
) -> None:
    """A rank that captured once, and serves ever new sizes, holds the memory of that graph and no
    more."""
    monkeypatch.setattr(workspace, "MOST_KEPT", 4)
    instance.reserve(1000, counters=4)
    transport.is_capturing = True
    instance.begin()
    instance.begin()
    transport.is_capturing = False
    held = list(instance._held)
    assert len(held) == 4
    for size in range(2, 20):
        instance.reserve(1000 * size, counters=4 * size)
        instance.keep(size, object())
    assert (
        all(any(kept is one for one in held) for kept in instance._held)
        and len(instance._held) == 4
    )
    assert len(instance.cache) <= 4


def test_cached_calls_are_bounded(
    instance: Instance, transport: NotingTransport, monkeypatch
) -> None:
    monkeypatch.setattr(workspace, "MOST_KEPT", 4)
    for size in range(4):
        instance.keep(size, object())
    transport.is_capturing = True
    instance.keep("captured", object())
    assert len(instance.cache) == 5 and not transport.events, "a capture cannot wait for the device"
    transport.is_capturing = False
    instance.keep("new", object())
    assert list(instance.cache) == ["new"] and transport.events == ["synchronize"]
    transport.is_capturing = True
    instance.begin()
    transport.is_capturing, graphs = False, instance.cache
    for size in range(4):
        instance.keep(size, object())
    assert any(kept is graphs for kept in instance._held) and len(graphs) == 4, (
        "a graph may read this memory"
    )
    accepted = workspace.BoundedCache()
    for size in range(9):
        accepted[size] = size
    assert len(accepted) <= 4 and accepted[8] == 8


def test_a_captured_call_is_remembered(instance: Instance, transport: NotingTransport) -> None:
    instance.begin()
    assert not instance.captured
    transport.is_capturing = True
    instance.begin()
    transport.is_capturing = False
    instance.begin()
    assert instance.captured, "from then on the host does not know the epoch"
    assert instance.calls == 1, "a call that is only begun takes no slot"
    assert transport.events == ["order"] * 3


# --- Time-outs ---


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.25", 0.25), ("2000", 2000.0), ("1e1", 10.0)]
)
def test_valid_timeouts(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", text)
    assert timeout_seconds() == seconds
    instance = Instance(OP, NotingTransport())
    limits = [int(instance.control[word]) for word in (MEETING_US, TIMEOUT_US, PUSHED_US)]
    assert limits[0] == int(seconds * 1e6), "peers have so long to come, and no longer"
    assert limits[1:] == [min(int(limits[0] * times), 2**31 - 1) for times in (1.125, 2)], (
        "their data, and own copies, longer"
    )
    assert limits[1] > 1.05 * limits[0], "a wait for data times out later than one for a meeting"


@pytest.mark.parametrize(
    "text",
    ["abc", "0", "-1", "nan", "inf", "2000.5", "1 minute", "1e-30", "1_0", "\u0663", "9" * 999],
)
def test_invalid_timeouts_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", text)
    with pytest.raises(
        tw.InputError, match=r"asked: TILEWEAVE_TIMEOUT=.*allowed: .*2000.*remedy: "
    ) as caught:
        timeout_seconds()
    assert len(str(caught.value)) < 250


def test_default_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWEAVE_TIMEOUT", raising=False)
    assert timeout_seconds() == 30.0
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "")
    assert timeout_seconds() == 30.0


@pytest.mark.parametrize("peer", [0, 2, 3])
def test_timeout_names_the_peer_of_the_signal(instance: Instance, peer: int) -> None:
    barrier = instance.world_size * MAX_SLICES
    for signal, unit in (
        (peer * MAX_SLICES, 5),
        (peer * MAX_SLICES + MAX_SLICES - 1, 0),
        (barrier + peer, -1),
    ):
        time_out(instance, signal, unit)
        with pytest.raises(tw.PeerTimeout) as caught:
            instance.check()
        error = caught.value
        assert (error.op, error.rank, error.peer, error.unit) == (OP, 1, peer, unit)
        assert (error.expected, error.seen) == (9, 8)


def test_timeout_is_kept_until_close(transport: NotingTransport) -> None:
    registry = Registry()
    workspace = registry.get("a group", transport.device, lambda: transport)
    time_out(workspace.instance(OP, "sm"), 0)
    begin = workspace.instance(OP, "sm").begin
    for ask in (registry.check, registry.synchronize, lambda: registry.check("a group"), begin):
        with pytest.raises(tw.PeerTimeout):
            ask()
    registry.check("another group")
    registry.close()
    registry.check()


# --- Registry ---


def test_one_workspace_per_group_and_device() -> None:
    made: list[NotingTransport] = []

    def make() -> NotingTransport:
        made.append(NotingTransport())
        return made[-1]

    registry = Registry()
    first = registry.get("a", torch.device("cpu"), make)
    assert registry.get("a", torch.device("cpu"), make) is first
    assert registry.get("b", torch.device("cpu"), make) is not first
    assert first.instance(OP, "sm") is first.instance(OP, "sm")
    assert first.instance(OP, "sm") is not first.instance(OP, "copy_engine"), (
        "a graph freezes slots of one of them"
    )
    assert len(made) == 2


def test_a_workspace_without_a_ledger_is_not_used() -> None:
    """Ranks that gave up while they shared it share it again: else one would compare nothing."""
    registry, device = Registry(), torch.device("cpu")
    made = registry.get("a", device, NotingTransport)
    assert registry.find("a", device) is None
    made.ledger.open({}, 1)
    assert registry.find("a", device) is made and registry.get("a", device, Mock()) is made
    registry.close()


def test_close_one_group_or_all() -> None:
    made = {name: NotingTransport() for name in "abc"}
    registry = Registry()
    for name, transport in made.items():
        registry.get(name, transport.device, lambda transport=transport: transport).instance(
            OP, "sm"
        )
    registry.close("b")
    assert [name for name, transport in made.items() if "close" in transport.events] == ["b"]
    registry.close()
    for transport in made.values():
        assert transport.events.count("close") == 1
        ends = transport.events[transport.events.index("synchronize") :]
        assert ends == ["synchronize", "close"], (
            "work ends before memory is freed, without asking peers"
        )


def test_memory_that_failed_is_asked_for_again() -> None:
    """A smaller call must not find slots that were never there."""
    transport = NotingTransport()
    instance = Instance(OP, transport)
    allocate = transport.allocate

    def none(nbytes: int) -> SymmetricBuffer:
        raise MemoryError

    transport.allocate = none
    with pytest.raises(MemoryError):
        instance.reserve(4096)
    assert (instance.slot_bytes, instance.num_slots) == (0, 0)
    transport.allocate = allocate
    transport.events.clear()
    instance.reserve(1024)
    assert "allocate 2048" in transport.events and instance.slots.numel() == 2048


def test_ranks_agree_again_after_close() -> None:
    """A rank may have given up a meeting in which its peers agreed."""
    registry = Registry()
    registry.agreed("group").add("tuned")
    registry.agreed("other").add("tuned")
    registry.close("group")
    assert not registry.agreed("group") and registry.agreed("other")
