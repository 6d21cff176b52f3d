"""Regions of symmetric memory: which call gets which, and when a region is free again."""

from __future__ import annotations

import gc

import torch

from tileweave.transport.regions import Regions


def test_regions_are_lent_until_one_is_left() -> None:
    regions = Regions(3)
    assert regions.choose(False) == (0, True)
    assert not regions.captured, "no region is reserved except in captures"
    assert [regions.choose(True) for _ in range(2)] == [(0, True), (1, True)], (
        "a capture gets none that another one had"
    )
    assert regions.choose(True) == regions.choose(False) == (2, False), (
        "one is never lent, nor a capture's"
    )
    assert regions.captured == {0, 1}
    regions = Regions(2)
    regions.held.add(0)
    assert regions.choose(False) == (1, False)
    regions.held.clear()
    assert regions.choose(False) == (0, True)


def test_region_is_free_after_its_last_tensor() -> None:
    regions, memory = Regions(2), torch.zeros(8)
    lent = regions.lend(1, memory[4:])
    part = lent[1:3]
    del lent
    gc.collect()
    assert regions.held == {1} and part.data_ptr() == memory[5:].data_ptr()
    del part
    gc.collect()
    assert not regions.held
