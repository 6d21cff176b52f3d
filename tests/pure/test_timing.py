"""The timer: which function runs when, by a clock that is simulated."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from tileweave.profile import timing
from tileweave.profile.timing import _Clock


class SimulatedClock(_Clock):
    """Of one rank, whose calls take ``self.us`` microseconds each; as if for a GPU."""

    captures, throttles = False, True
    us: ClassVar[dict[str, float]] = {}
    ran: ClassVar[list[str]] = []

    def barrier(self) -> None:
        self.ran.append("|")

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None] | None, str]:
        raise AssertionError("nothing is captured")

    def time(self, run: Callable[[], None]) -> float:
        begin = len(self.ran)
        self.barrier()
        run()
        return sum(self.us.get(name, 0.0) for name in self.ran[begin:]) * 1e-6

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedClock]:
    monkeypatch.setattr(timing, "_HostClock", SimulatedClock)
    monkeypatch.setattr(SimulatedClock, "ran", [])
    return SimulatedClock


def simulated(clock: type[SimulatedClock], **more: Any) -> tuple[dict[str, timing.Timing], str]:
    """The times of functions that take what ``clock.us`` says, and what ran after their laps were
    prepared; a letter is a lap."""
    functions = {name: partial(clock.ran.append, name) for name in clock.us}
    steps: list[int] = []
    found = timing.measure(
        functions,
        None,  # type: ignore[arg-type]
        torch.device("cpu"),
        progress=lambda text: steps.append(len(clock.ran)) if "prepares" not in text else None,
        **more,
    )
    ran = "".join(clock.ran[steps[0] :])
    return found, re.sub(r"(.)\1+", r"\1", ran)


def test_long_calls_settle_before_they_are_timed(
    clock: type[SimulatedClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laps of the same function, then the one that is timed; short calls at once."""
    monkeypatch.setattr(clock, "us", {"l": 1000.0, "s": 20.0})
    found, ran = simulated(clock, repeats=2, settle=True)
    assert ran == "|l|l|s|s|l|l|"
    assert {name: one.median_us for name, one in found.items()} == pytest.approx(clock.us)
    laps = clock.ran.count("l")
    _, ran = simulated(clock, repeats=2)
    assert ran == "|l|s|s|l|"
    assert laps > 2 * (clock.ran.count("l") - laps)


def test_what_is_far_from_the_fastest_is_timed_once(
    clock: type[SimulatedClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "us", {"a": 100.0, "b": 129.0, "c": 131.0, "d": 900.0})
    found, ran = simulated(clock, repeats=4, within=1.3)
    assert {name: len(one.repeats_us) for name, one in found.items()} == {
        "a": 4,
        "b": 4,
        "c": 1,
        "d": 1,
    }
    assert {name: one.median_us for name, one in found.items()} == pytest.approx(clock.us)
    assert (ran.count("c"), ran.count("d")) == (1, 1)
    found, _ = simulated(clock, repeats=4)
    assert {len(one.repeats_us) for one in found.values()} == {4}
