"""Regions of symmetric memory: which call gets which, and when a region is free again."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from tileweave.transport.regions import Regions


def test_regions_are_lent_until_one_is_left() -> None:
    regions = Regions(3)
    assert regions.choose(0) == (0, True)
    assert not regions.captured, "no region is reserved except in captures"
    assert [regions.choose(capture) for capture in (7, 8)] == [(0, True), (1, True)], (
        "a capture gets none that another one had"
    )
    assert regions.choose(9) == regions.choose(0) == (2, False), (
        "one is never lent, nor a capture's"
    )
    assert regions.captured == {0: 7, 1: 8}
    regions = Regions(2)
    regions.held.add(0)
    assert regions.choose(0) == (1, False)
    regions.held.clear()
    assert regions.choose(0) == (0, True)


def test_a_capture_uses_its_regions_again() -> None:
    regions = Regions(3)
    assert [regions.choose(7) for _ in range(4)] == [(0, True)] * 4, "its results are gone"
    regions.held.add(0)
    assert regions.choose(7) == (1, True), "a result of the capture is held"
    regions.held.clear()
    assert regions.choose(7) == (0, True)
    assert regions.choose(8) == (2, False), "another capture gets none of them"
    assert regions.captured == {0: 7, 1: 7}


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


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared host memory here")
def test_forked_process_keeps_its_results() -> None:
    """The parent lends the regions again, on both sides of one page, and peers write there."""
    memory = torch.frombuffer(mmap.mmap(-1, 3 * mmap.PAGESIZE), dtype=torch.float32)
    regions, page = Regions(3), mmap.PAGESIZE // 4
    places = [memory[10:20], memory[page - 5 : page + 5], memory[page + 5 : 2 * page]]
    for number, place in enumerate(places):
        place.fill_(number + 1)
    lent = [regions.lend(number, place) for number, place in enumerate(places)]
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        kept = [bool((each == number + 1).all()) for number, each in enumerate(lent)]
        lent[0].fill_(7)
        os._exit(0 if all(kept) else 1)
    memory.fill_(-1)
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory == -1).all(), "the process shares nothing that it was lent"
    os.close(begin)
    os.close(go)
