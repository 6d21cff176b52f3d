"""What a kernel needs to know of one protocol instance. No triton here: ``ops`` makes these before
any kernel is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


def lines(strides: Sequence[int]) -> tuple[int, bool]:
    """(elements from line to line, whether lines run along N) of a weight [N, K], whose lines are
    contiguous."""
    return (strides[1], True) if strides[1] != 1 and strides[0] == 1 else (strides[0], False)


def memory_of_parts(given: torch.Tensor | None, elements: int, out: torch.Tensor) -> torch.Tensor:
    """Where a launch adds up the parts of tiles that are cut along K: what its call gives, or
    memory of its own; ``out``, which it does not use, if no tile is cut."""
    if given is not None:
        return given
    return out.new_empty(elements, dtype=torch.float32) if elements else out


class Peers(NamedTuple):
    """Slots, signals and control block of one protocol instance, as kernels get them: one argument.

    The device functions of ``device/triton/peers.py`` and ``device/gluon/peers.py`` take it, too.
    Its members never change between the launches of an instance, so that launches can be prepared
    (``kernels/runtime/launch.py``); the rank and the epoch are arguments of their own.

    slots : this rank's two slots, in the operator's dtype.

    slot_size : elements of a slot.

    slot_table, signal_table : int64 ``[R]``, where each rank's slots and signals are mapped here.

    signals : int32, this rank's signals; their layout is ``transport/protocol.py``'s.

    control, report : int32, the control block and the report of a fault; see there.

    counters : int32, what programs of this device count.
    """

    slots: Any
    slot_size: Any
    slot_table: Any
    signal_table: Any
    signals: Any
    control: Any
    report: Any
    counters: Any
