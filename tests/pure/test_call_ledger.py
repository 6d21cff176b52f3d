"""The ledger of calls between two and three ranks in one process: ranks that are first, late, or
far ahead."""

from __future__ import annotations

import random

import pytest

import tileweave as tw
from tileweave.transport.call_ledger import NBYTES, PLACES, Ledger


def ledgers(size: int) -> list[Ledger]:
    blocks = {rank: bytearray(NBYTES) for rank in range(size)}
    found = [Ledger() for _ in range(size)]
    for rank, ledger in enumerate(found):
        ledger.open(blocks, rank)
    return found


def test_ledger_without_memory_compares_nothing() -> None:
    alone, closed = Ledger(), ledgers(2)[0]
    closed.close()
    for ledger in (alone, closed):
        ledger.post("op", 7)
        ledger.compare("op")


def test_a_call_is_written_down_before_it_is_compared() -> None:
    """Otherwise two ranks that come at the same time would both find nothing."""
    blocks, ledger, seen = {rank: bytearray(NBYTES) for rank in range(2)}, Ledger(), list[int]()

    class Page:
        def __getitem__(self, place: int) -> int:
            seen.append(ledger.entry & 0xFFFFFFFF)
            return 0

    ledger.open(blocks, 0)
    ledger._peers = [(1, Page())]
    ledger.post("op", 7)
    assert seen == [1]


def test_set_ups_that_fail_alike_count() -> None:
    """All ranks have been in them, so a rank that finds a peer there goes on."""
    ledger = ledgers(2)[0]
    for error, count in ((tw.RankMismatchError("a"), 1), (tw.UnsupportedError("b"), 2)):
        with pytest.raises(type(error)), ledger.set_up("op"):
            raise error
        assert ledger.set_ups == count
    with pytest.raises(MemoryError), ledger.set_up("op"):
        raise MemoryError
    assert ledger.set_ups == 2, "a failure of this rank alone"


def test_a_call_that_was_given_up_for_a_peer_has_a_mark_of_its_own() -> None:
    first, second = ledgers(2)
    first.break_off(False, given_up=True)
    second.break_off(False, given_up=True)
    assert first.entry == second.entry == 1 << 32 | 1
    first.break_off(False)
    assert first.entry == 2


def test_closed_ledger_keeps_no_memory() -> None:
    """Shared memory is unmapped when nothing refers to it."""
    blocks, ledger = {rank: bytearray(NBYTES) for rank in range(2)}, Ledger()
    ledger.open(blocks, 0)
    with pytest.raises(BufferError):
        blocks[1].append(0)
    ledger.close()
    for block in blocks.values():
        block.append(0)  # raises while a view of it exists


@pytest.mark.parametrize("seed", range(8))
def test_equal_calls_match_in_any_order(seed: int) -> None:
    order, found = random.Random(seed), ledgers(3)
    left = [3 * PLACES] * 3
    while any(left):
        rank = order.choice([r for r in range(3) if left[r]])
        # also further ahead than the ledger has entries
        for _ in range(min(left[rank], order.choice([1, 2, 50, 2 * PLACES]))):
            left[rank] -= 1
            found[rank].post("op", 3 * PLACES - left[rank])
    for ledger in found:
        ledger.compare("op")


@pytest.mark.parametrize("before", [0, 1, PLACES - 1, PLACES, 5 * PLACES + 3])
def test_ledger_mismatch_raises_on_both_ranks(
    before: int,
) -> None:
    first, second = ledgers(2)
    for number in range(before):
        first.post("op", number)
        second.post("op", number)
    first.post("op", 10)
    with pytest.raises(
        tw.RankMismatchError, match=r"asked: an_op on rank 1 where rank 0 .*allowed: .*remedy: "
    ):
        second.post("an_op", 11)
    for _ in range(2):  # and again
        with pytest.raises(tw.RankMismatchError, match="rank 0 where rank 1"):
            first.compare("op")


def test_ledger_mismatch_is_found_some_calls_later() -> None:
    first, second = ledgers(2)
    for number in range(20):
        first.post("op", number)
    for number in range(12):
        second.post("op", number)
    with pytest.raises(tw.RankMismatchError):
        second.post("op", 99)
    with pytest.raises(tw.RankMismatchError, match="7 before its last"):
        first.compare("op")


def test_ledger_call_numbers_wrap() -> None:
    first, second = ledgers(2)
    for ledger in (first, second):
        ledger.calls = 2**32 - PLACES - 3
        ledger._compared = dict.fromkeys(range(2), ledger.calls)
    for mark in range(PLACES + 6):
        first.post("op", mark)
        second.post("op", mark)
    assert first.calls > 2**32
    first.post("op", 1)
    with pytest.raises(tw.RankMismatchError):
        second.post("op", 2)


# --- Calls that break off ---


@pytest.mark.parametrize("before", [0, PLACES - 2, PLACES - 1, PLACES])
@pytest.mark.parametrize("posted", [True, False], ids=["begun", "not begun"])
@pytest.mark.parametrize("first", [0, 1], ids=["breaks off first", "second"])
def test_call_broken_off_on_one_rank_raises_on_both(posted: bool, first: int, before: int) -> None:
    """Independent of which rank is first, and also on a rank that compared the call before it broke
    off."""
    broken, made = found = ledgers(2)
    for ledger in found:
        ledger.calls = before
        ledger._compared = dict.fromkeys(range(2), before)
        ledger.post("op", 5)
    if first == 1:
        made.post("op", 6)
    if posted:
        broken.post("op", 6)
    broken.break_off(posted)
    if first == 0:
        broken.post("op", 6)  # goes on before any rank could know
        with pytest.raises(
            tw.RankMismatchError,
            match=r"a call of rank 0 broke off that rank 1 made.*what rank 0 raised",
        ):
            made.post("op", 6)
    with pytest.raises(tw.RankMismatchError, match="a call of rank 0 broke off that rank 1 made"):
        broken.post("op", 6)


def test_mismatch_of_an_earlier_call_does_not_post_the_next() -> None:
    """Otherwise a peer that broke off there, too, a moment later, would wait for it."""
    told, late = ledgers(2)
    told.post("op", 5)
    told.break_off(True)
    late._pages[1][1] = 5 << 32 | 1  # still in that call
    late.calls = 1
    with pytest.raises(tw.RankMismatchError):
        told.post("op", 6)
    assert told.calls == 1
    told.break_off(False)
    late.break_off(True)
    with pytest.raises(tw.RankMismatchError, match="a call of rank 0 broke off"):
        late.post("op", 6)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_call_broken_off_on_every_rank_is_no_mismatch(ahead: int) -> None:
    """At any point of the call, and however far one rank is ahead of the other."""
    found = ledgers(2)
    for ledger, posted in zip(found, (True, False), strict=True):
        ledger.post("op", 5)
        if posted:
            ledger.post("op", 6)
        ledger.break_off(posted)
        for number in range(ahead):
            ledger.post("op", 7 + number)
    for ledger in found:
        ledger.post("op", 20)
        ledger.compare("op")


def test_breaking_off_without_memory_does_nothing() -> None:
    alone = Ledger()
    alone.break_off(False)
    assert alone.calls == 0


def test_mismatch_is_kept_when_the_other_rank_goes_on() -> None:
    """The second rank raised, and called again all the same. A matching call does not hide an
    earlier mismatch."""
    first, second = ledgers(2)
    first.post("op", 10)
    for mark in (11, 12):
        with pytest.raises(tw.RankMismatchError):
            second.post("op", mark)
    with pytest.raises(tw.RankMismatchError, match="rank 0, 1 before its last one, where rank 1"):
        first.post("op", 12)
