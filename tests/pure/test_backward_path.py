"""The path of the backward of all_gather_matmul, for tensors without data."""

from __future__ import annotations

import pytest
import torch

from tileweave.ops.matmul import backward
from tileweave.ops.matmul.backward import GatherBackward
from tileweave.planning.problem import MOST_ELEMENTS

FUSED, OVERLAPPED = "_scatter_fused", "_overlapped"


def path(monkeypatch: pytest.MonkeyPatch, elements: int, need_w: bool, kept: bool) -> str:
    """The path for x with this number of elements, where dgrad is fused."""
    taken: list[str] = []
    monkeypatch.setattr(backward, "scatters_fused", lambda *_: True)
    for name, more in ((FUSED, None), (OVERLAPPED, [None])):
        monkeypatch.setattr(
            GatherBackward, name, lambda *_, n=name, more=more: taken.append(n) or (None, more)
        )
    x, w = torch.empty(elements // 256, 256, device="meta"), torch.empty(8, 256, device="meta")
    grad = torch.empty(2 * x.shape[0], 8, device="meta")
    gathered = torch.empty(2 * x.shape[0], 256, device="meta") if kept else None
    GatherBackward([grad], None, x, [w], gathered, "").run(True, [need_w])
    return taken[0]


@pytest.mark.parametrize(("need_w", "kept"), [(True, False), (True, True), (False, False)])
def test_backward_path_of_gathers_beyond_32_bits(
    monkeypatch: pytest.MonkeyPatch, need_w: bool, kept: bool
) -> None:
    """Programs step past the end of a shard by one block each. Above that number of elements the
    index would overflow."""
    gathers = need_w and not kept
    assert path(monkeypatch, MOST_ELEMENTS, need_w, kept) == FUSED
    assert path(monkeypatch, MOST_ELEMENTS + 256, need_w, kept) == (
        OVERLAPPED if gathers else FUSED
    )
