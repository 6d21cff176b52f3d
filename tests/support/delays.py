"""Delays inside calls of a CPU world: contexts that ``parity.many_calls`` takes as ``stall``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from tileweave.transport.interface import Copy


@contextmanager
def stall_in_the_kernel(seconds: float, n: int, period: int = 4) -> Iterator[None]:
    """Delay this rank at one in ``period`` signals and ends of waits, while the others run ahead as
    far as they can."""
    from tileweave.device.interpreter.words import OBSERVERS

    events: list[str] = []

    def stall(event: str, details: dict[str, int]) -> None:
        if event in ("notify", "waited"):
            events.append(event)
            if len(events) % period == n % period:
                time.sleep(seconds)

    OBSERVERS.append(stall)
    try:
        yield
    finally:
        OBSERVERS.remove(stall)


@contextmanager
def slow_copies(seconds: float, n: int) -> Iterator[None]:
    """Make each copy take this long, so that data, signals and the concurrent kernel drift
    apart."""
    from tileweave.transport.cpu import CpuTransport

    copy_all = CpuTransport._copy_all

    def slowly(
        transport: CpuTransport, copies: Sequence[Copy], source: int, abandoned: threading.Event
    ) -> None:
        for copy in copies:
            time.sleep(seconds)
            copy_all(transport, [copy], source, abandoned)

    with mock.patch.object(CpuTransport, "_copy_all", slowly):
        yield


@contextmanager
def stall_in_the_copy_engine(seconds: float, n: int) -> Iterator[None]:
    """Delay the copies of this rank one by one, and its kernel after some waits."""
    with slow_copies(seconds / 4, n), stall_in_the_kernel(seconds, n):
        yield
