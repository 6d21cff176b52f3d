"""What a launch needs to know of one protocol instance. No triton here: ``ops`` makes these before any kernel is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lines(strides: Sequence[int]) -> tuple[int, bool]:
    """(elements from line to line, whether lines run along N) of a weight [N, K], whose lines are contiguous."""
    return (strides[1], True) if strides[1] != 1 and strides[0] == 1 else (strides[0], False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Addresses, signals and epoch of one protocol instance; see ``transport/interface.py``.

    ``slots``: this rank's two slots in the operator's dtype, ``slot_size`` elements each. ``slot_table``,
    ``signal_table``: int64 ``[R]``, where each rank's slots and signals are mapped here. ``signals``, ``control``, ``report``,
    ``counters``: int32.
    """

    slots: torch.Tensor
    slot_size: int
    slot_table: torch.Tensor
    signal_table: torch.Tensor
    signals: torch.Tensor
    control: torch.Tensor
    report: torch.Tensor
    counters: torch.Tensor
