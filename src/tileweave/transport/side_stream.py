"""A stream for launches that run concurrently with the work of the current stream.

It has a higher priority than torch's streams: its programs take multiprocessors before those of a
kernel that was queued on the current stream at the same time.
"""

from __future__ import annotations

import torch

from tileweave.transport.copy_engine import (
    _check_status,
    _event,
    _SideStream,
    current_handle,
    driver,
)

_ORDER = "the order of two streams"


class SideLaunches:
    """A context: launches inside of it go to the side stream, after the work that the current
    stream has now, and in order.

    :meth:`join` must follow the last of them, also if one raises: memory may be used again by what
    the current stream has next, and a capture must join every stream that it forked.
    """

    def __init__(self, device: torch.device) -> None:
        self._index, self._driver, self._side = device.index, driver(), _SideStream(device)
        self._forked, self._fork = _event(self._side.stream)
        self._begun, self._begin = _event(self._side.stream)
        self._outside: torch.cuda.Stream | None = None
        self._busy = False  # a launch was not joined

    def __enter__(self) -> None:
        cuda, main, side = self._driver, current_handle(self._index), self._side.handle
        status = cuda.cuEventRecord(self._fork, main)
        status = status or cuda.cuStreamWaitEvent(side, self._fork, 0)
        # The current stream goes on only when the side stream does: a kernel that fills the device
        # would otherwise begin first, and keep the launch waiting until it ends.
        status = status or cuda.cuEventRecord(self._begin, side)
        _check_status(status or cuda.cuStreamWaitEvent(main, self._begin, 0), _ORDER)
        self._outside, self._busy = torch.cuda.current_stream(), True
        torch.cuda.set_stream(self._side.stream)

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None, "the context was entered"
        torch.cuda.set_stream(self._outside)

    def join(self) -> None:
        """Order the work queued later on the current stream after what was launched inside."""
        if self._busy:
            self._busy = False
            side = self._side
            status = self._driver.cuEventRecord(side.done, side.handle)
            status = status or self._driver.cuStreamWaitEvent(
                current_handle(self._index), side.done, 0
            )
            _check_status(status, _ORDER)
