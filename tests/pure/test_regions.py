"""Regions of symmetric memory: which call gets which, and when a region is free again."""

from __future__ import annotations

import gc
import mmap
import os
from random import Random
from unittest.mock import Mock

import pytest
import torch

from tileweave.transport.regions import _LENT, Regions


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


def test_a_result_that_a_capture_writes_to_is_lent_no_more() -> None:
    """Each replay writes there, also after the caller has dropped the result."""
    regions = Regions(3)
    region, _ = regions.choose(0)
    regions.held.add(region)
    regions.order(region, Mock(), 7)
    regions.order(region, Mock(), 8)  # of the first graph still
    regions.held.clear()
    assert regions.captured == {region: 7}
    assert regions.choose(0) == regions.choose(8) == (1, True)
    assert regions.choose(7) == (region, True)


@pytest.mark.parametrize("seed", range(50))
def test_results_alive_at_once_have_regions_of_their_own(seed: int) -> None:
    """Also those that replays of graphs write again, as long as one result of a graph is alive."""
    random, regions = Random(seed), Regions(4)
    alive: list[tuple[int, int]] = []  # (region, capture) of results
    graphs: dict[int, set[int]] = {}  # the regions that replays write
    stream = Mock()
    for step in range(200):
        if alive and random.random() < 0.4:
            region, _ = alive.pop(random.randrange(len(alive)))
            regions.held.discard(region)
        capture = random.choice([0, step // 20 + 1])
        if alive and random.random() < 0.2:
            region, lends = random.choice(alive)[0], False  # as ``out``
        else:
            region, lends = regions.choose(capture)
            assert region not in [one for one, _ in alive], "a result that is alive is overwritten"
        regions.order(region, stream, capture)
        if capture and region < regions.count - 1:
            graphs.setdefault(capture, set()).add(region)
        if lends:
            assert region < regions.count - 1, "copies are made out of the last one"
            for number, written in graphs.items():
                assert number == capture or region not in written, "a replay overwrites it"
            regions.held.add(region)
            alive.append((region, capture))
    assert len(regions.captured) < regions.count


def test_a_region_is_written_after_all_that_reads_it() -> None:
    """Peers write there once the stream of the next call has come to it."""
    first, second, regions = Mock(), Mock(), Regions(2)
    for stream in (first, first, second, second):
        regions.order(1, stream)
    first.wait_stream.assert_not_called()
    second.wait_stream.assert_called_once_with(first)


def test_region_is_free_after_its_last_tensor() -> None:
    regions, memory = Regions(2), torch.zeros(8)
    before = dict(_LENT)
    lent = regions.lend(1, memory[4:])
    assert len(_LENT) == len(before) + 1
    part = lent[1:3]
    del lent
    gc.collect()
    assert regions.held == {1} and part.data_ptr() == memory[5:].data_ptr()
    del part
    gc.collect()
    assert not regions.held
    assert before == _LENT, "a fork would copy memory that may be gone"
    lent = regions.lend(0, memory[:4])
    _LENT.clear()  # as in a forked process, and for results on GPUs
    del lent
    gc.collect()
    assert not regions.held


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared host memory here")
def test_forked_process_keeps_its_results() -> None:
    """The parent lends the regions again, on both sides of one page, and peers write there."""
    memory = torch.frombuffer(mmap.mmap(-1, 3 * mmap.PAGESIZE), dtype=torch.float32)
    regions, page = Regions(3), mmap.PAGESIZE // 4
    places = [memory[10:20], memory[page - 5 : page + 5], memory[page + 5 : 3 * page]]
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
