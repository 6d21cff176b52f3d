"""The path of the backward of all_gather_matmul, for tensors without data."""

from __future__ import annotations

import importlib

import pytest
import torch

from tileweave.planning.problem import MOST_ELEMENTS

MODULE = importlib.import_module("tileweave.ops.matmul.all_gather_matmul")
FUSED, OVERLAPPED = "_products_fused", "_products_overlapped"


def path(monkeypatch: pytest.MonkeyPatch, elements: int, need_w: bool, kept: bool) -> str:
    """The path for x with this number of elements, where dgrad is fused."""
    taken: list[str] = []
    monkeypatch.setattr(MODULE, "scatters_fused", lambda *_: True)
    for name in (FUSED, OVERLAPPED):
        monkeypatch.setattr(MODULE, name, lambda *_, name=name: taken.append(name) or (None, None))
    x, w = torch.empty(elements // 256, 256, device="meta"), torch.empty(8, 256, device="meta")
    grad = torch.empty(2 * x.shape[0], 8, device="meta")
    gathered = torch.empty(2 * x.shape[0], 256, device="meta") if kept else None
    MODULE._backward(grad, None, x, w, gathered, "", True, need_w, False)
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
