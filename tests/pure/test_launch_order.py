"""The order of launches on a device across streams, which are fakes that record what they wait
for."""

from __future__ import annotations

from unittest import mock

import pytest

from tileweave.transport import cuda
from tileweave.transport.regions import Regions


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} after all of {other.name}")

    def wait_event(self, event: Event) -> None:
        self.notes.append(f"{self.name} after {event.where}")


class Event:
    current: Stream
    where = ""

    def record(self) -> None:
        self.where = f"the launch on {Event.current.name}"


def launches(steps: list[str], capturing: bool = False) -> list[str]:
    """Which streams wait for what, after steps such as "a" (a launch on stream a) and "a." (it has
    ended; more follows)."""
    notes: list[str] = []
    streams = {name: Stream(name, notes) for name in "abc"}
    order = cuda.LaunchOrder()
    for step in steps:
        Event.current = streams[step[0]]
        with (
            mock.patch.object(cuda.torch.cuda, "current_stream", return_value=streams[step[0]]),
            mock.patch.object(
                cuda.torch.cuda, "is_current_stream_capturing", return_value=capturing
            ),
            mock.patch.object(cuda.torch.cuda, "Event", Event),
        ):
            order.enter(ord(step[0]))
            if step.endswith("."):
                order.leave()
    return notes


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (["a", "a"], []),
        (["a.", "a"], []),
        (["a", "b"], ["b after all of a"]),
        # a second stream for the first time: until then no end was recorded
        (["a.", "b"], ["b after all of a"]),
        (["a.", "b.", "a"], ["b after all of a", "a after the launch on b"]),
        (["a.", "b.", "b", "a"], ["b after all of a", "a after all of b"]),
        (["a.", "b", "c"], ["b after all of a", "c after all of b"]),
        (
            ["a.", "b.", "a.", "b."],
            ["b after all of a", "a after the launch on b", "b after the launch on a"],
        ),
    ],
)
def test_launches_are_ordered_across_streams(steps: list[str], found: list[str]) -> None:
    assert launches(steps) == found


def test_region_is_rewritten_after_its_readers() -> None:
    """The launch order lets a launch pass work that follows the last launch. This does not hold
    where peers overwrite a region that such work still copies or reads."""
    notes: list[str] = []
    a, b = Stream("a", notes), Stream("b", notes)
    regions = Regions(3)
    for stream in (a, a, b, b, a):
        regions.order(0, stream)
    regions.order(1, b)
    assert notes == ["b after all of a", "a after all of b"]


def test_region_of_a_capture_waits_for_its_own_readers_only() -> None:
    """A stream under capture cannot wait for one that is not."""
    notes: list[str] = []
    a, b, c = (Stream(name, notes) for name in "abc")
    regions = Regions(3)
    regions.order(0, a)
    for stream in (b, b, c):
        region, _ = regions.choose(7)
        regions.order(region, stream, 7)
    assert notes == ["c after all of b"]
    regions.held.add(1)  # the result of an earlier call, which this one writes into
    regions.order(1, a)
    regions.order(1, b, 7)
    assert notes == ["c after all of b"]
    regions.order(1, c, 7)
    assert notes[1:] == ["c after all of b"]
    regions.order(2, a)  # copied from, never lent: each capture may use it
    for number in (8, 9):
        regions.order(2, b, number)
    assert regions.captured == {0: 7, 1: 7}


def test_enter_returns_the_current_stream() -> None:
    streams, order = [Stream(name, []) for name in "ab"], cuda.LaunchOrder()
    for number in (0, 0, 1):
        with (
            mock.patch.object(cuda.torch.cuda, "current_stream", return_value=streams[number]),
            mock.patch.object(cuda.torch.cuda, "is_current_stream_capturing", return_value=False),
        ):
            assert order.enter(number) is streams[number]


def test_capture_waits_for_no_other_stream() -> None:
    assert launches(["a.", "b", "c"], capturing=True) == []
