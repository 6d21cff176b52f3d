"""What the instances of a group share, so that one wait that times out ends the waits of them all.

Kernels of several instances may be queued on a device, one after the other. Each has limits of its
own in its control block, so without this each would wait for the same absent rank, for the whole
time-out. So a wait that times out sets the limits of data and meetings of every instance of the
group to 0 (``expire`` in ``device/triton/signal.py``). This costs nothing before a time-out: each
wait reads the limit of its own instance in its loop anyway.

Why that is right: another instance sees a time-out that comes early, and no rule of the protocol
depends on how long a time-out is. That instance's ``FAULT`` is set by its own wait when it finds
the limit, not from outside. So the effects of a time-out (NaN; addresses of peers that lead to this
rank) come in the usual order. A call for which everything has come by then is right.

Only the first wait of the group that times out writes the report: the waits that it ends may miss a
rank that is only a moment late. ``FAULT`` of the block below decides which wait is first, and it is
set before any limit of another instance.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import torch

from tileweave.transport import protocol
from tileweave.transport.lasting_memory import lasting

if TYPE_CHECKING:
    from tileweave.transport.interface import Transport


class SharedFault:
    """The report of a group on one device, and a list of its control blocks that kernels can
    follow.

    Attributes
    ----------
    report : int32, readable by the host while kernels run: the first wait that timed out.
    words : the same words, for the host.
    """

    @torch.inference_mode(False)  # calls outside of it write to what is made here
    def __init__(self, transport: Transport) -> None:
        self._device = transport.device
        self.report = transport.host_visible(protocol.REPORT_WORDS)
        # ctypes, because numpy may not be installed
        self.words = (ctypes.c_int32 * protocol.REPORT_WORDS).from_address(self.report.data_ptr())
        # a control block of which only FAULT and NEXT are used
        head = partial(torch.zeros, protocol.CONTROL_WORDS, dtype=torch.int32, device=self._device)
        self._head = lasting(head, self._device)
        self._members: list[tuple[str, float, torch.Tensor]] = []

    @torch.inference_mode(False)
    def control_block(self, op: str, seconds: float, words: list[int]) -> torch.Tensor:
        """A new member's control block on the device, with ``words`` and its links. ``seconds``:
        how long its waits may last. No kernel of the group may run meanwhile."""
        block = torch.tensor(words, dtype=torch.int32)
        block[protocol.NEXT : protocol.NEXT + 2] = self._head[protocol.NEXT : protocol.NEXT + 2].to(
            "cpu"
        )
        block[protocol.GROUP : protocol.GROUP + 2] = _words(self._head.data_ptr())
        block[protocol.MEMBER] = len(self._members)
        block = lasting(partial(block.to, self._device), self._device)
        self._head[protocol.NEXT : protocol.NEXT + 2] = _words(block.data_ptr()).to(self._device)
        self._members.append((op, seconds, block))
        return block

    @property
    def reporter(self) -> tuple[str, float]:
        """The operator that reported, and how long its waits may last, in seconds."""
        op, seconds, _ = self._members[self.words[protocol.REPORT_MEMBER]]
        return op, seconds


def _words(address: int) -> torch.Tensor:
    return torch.tensor([address], dtype=torch.int64).view(torch.int32)
