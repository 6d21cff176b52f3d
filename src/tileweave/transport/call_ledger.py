"""The ledger: what each rank calls, written down where its peers read it, so that calls that do not
match are found.

Every rank has a page in memory that all ranks of the host share. Before it launches call n of the
group it writes there, in place n modulo ``PLACES``, the number n and a mark of what it calls (a
checksum of operator, shapes, dtypes, options). Then it looks at what its peers wrote for the calls
that it has not compared yet. Nobody waits: who is first finds nothing and goes on, who comes later
finds the difference before its kernel is launched, and who was first finds it at its next call, or
when its kernel gives up waiting. One 8-byte word is both number and mark, so no order between words
is needed.

A call that breaks off for a reason of this rank alone (no memory, Ctrl-C) has been called by the
others, who wait for it; if this rank then went on, its next call would stand for it, of other data
and without a difference. So it is written down as broken, over the mark that it may have had: who
finds that where its own call did not break is told (decision 0025). What a rank gave up for a peer,
which did not come or called something else, has another mark: only ranks that all did so go on.

Before a call that needs more memory, all ranks map it, in a *set-up*. A rank that needs none would
launch its call while the others wait for it to come. So each rank writes, in the place of the call,
that it is in a set-up, and in which: who finds that a peer is in one that it has not been in, or
has made the call without, is told.

Host only: nothing of this is in a captured graph. An eager call pays for a store, and for a load of
each peer that is in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tileweave.errors import PeerTimeout, RankMismatchError, UnsupportedError

# so many calls may a rank be ahead of another one until some of them are not compared
PLACES = 1024
NBYTES = 8 * PLACES
_NUMBER, _HALF = 0xFFFFFFFF, 1 << 31
_MARK = 0x7FFFFFFF  # the bits that marks of calls have
_BROKEN, _GIVEN_UP = 0, 1  # marks that no call has
_IN_SET_UP = 1 << 31  # marks from here on: not yet made, the rank is in the set-up of that number


class Ledger:
    """One for a workspace. Until :meth:`open`, and without blocks, it compares nothing. ``calls``:
    what this rank wrote. ``set_ups``: those that ended alike on all ranks."""

    def __init__(self) -> None:
        self.calls = self.set_ups = 0
        self.opened = False
        self._rank = -1
        self._pages: list[Any] = []
        self._peers: list[tuple[int, Any]] = []  # rank and page of each other one
        self._compared: list[int] = []  # calls compared, by rank

    def open(self, blocks: Sequence[Any], rank: int) -> None:
        """``blocks``: a writable buffer of ``NBYTES`` zeros of each rank."""
        self.opened, self._rank = True, rank
        self._pages = [memoryview(block).cast("B").cast("Q") for block in blocks]
        self._peers = [(peer, page) for peer, page in enumerate(self._pages) if peer != rank]
        self._compared = [0] * len(blocks)

    def post(self, op: str, mark: int) -> None:
        """Write down that ``op`` is called next, with ``mark``; raise :class:`RankMismatchError` if
        a peer calls another.

        Earlier calls are compared before: who is told of one of those does not make this one, so
        peers must not find it.
        """
        if not self._pages:
            return
        for peer, page in self._peers:
            if self._compared[peer] < self.calls:
                self._compare(op, peer, page, self.calls + 1)
        self.calls = number = self.calls + 1
        place = number % PLACES
        self._pages[self._rank][place] = word = (mark & _MARK) << 32 | number & _NUMBER
        for peer, page in self._peers:
            if page[place] == word and self._compared[peer] == number - 1:  # most often, so first
                self._compared[peer] = number
            else:
                self._compare(op, peer, page, number)

    @contextmanager
    def set_up(self, op: str) -> Iterator[None]:
        """What all ranks do together before the next call is written down, which is of ``op``.

        A peer that has made that call, or has broken it off, does not come:
        :class:`RankMismatchError`. After a :class:`PeerTimeout`, too, if a peer made it; those that
        broke it off may have waited for the same rank.
        """
        self.compare(op)
        if self._pages:
            word = (_IN_SET_UP | self.set_ups & _MARK) << 32 | self.calls + 1 & _NUMBER
            self._pages[self._rank][(self.calls + 1) % PLACES] = word
            self._require_set_up(op, _BROKEN)
        try:
            yield
        except PeerTimeout:
            self._require_set_up(op, _GIVEN_UP + 1)
            raise
        except (RankMismatchError, UnsupportedError):  # all ranks have agreed on it
            self.set_ups += 1
            raise
        self.set_ups += 1

    def _require_set_up(self, op: str, lowest: int) -> None:
        """Raise if a peer has written the next call, with a mark from ``lowest`` on, without the
        set-up of this rank."""
        number = self.calls + 1
        for peer, page in self._peers:
            theirs = page[number % PLACES]
            if (theirs - number) & _NUMBER == 0 and lowest <= theirs >> 32 < _IN_SET_UP:
                self.break_off(False, given_up=True)
                self._refuse(op, peer, number, theirs >> 32 <= _GIVEN_UP, 0)

    def break_off(self, posted: bool, given_up: bool = False) -> None:
        """This rank's last call, or one that it did not come to write down, was not made, for a
        reason of its own.

        ``given_up``: for one of peers.
        """
        if not self._pages:
            return
        self.calls = number = self.calls + (not posted)
        self._pages[self._rank][number % PLACES] = (
            _GIVEN_UP if given_up else _BROKEN
        ) << 32 | number & _NUMBER
        # peers may have been there
        self._compared = [min(compared, number - 1) for compared in self._compared]

    def compare(self, op: str) -> None:
        """Look at what peers have written for the calls that this rank has made."""
        for peer, page in self._peers:
            self._compare(op, peer, page, self.calls)

    def _compare(self, op: str, peer: int, page: Any, current: int) -> None:
        """``current``: the number of the call that this rank is in."""
        last = self.calls
        number = max(self._compared[peer] + 1, last - PLACES + 1)
        while number <= last:
            place = number % PLACES
            theirs = page[place]
            if theirs != self._pages[self._rank][place]:
                ahead = (theirs - number) & _NUMBER
                if ahead == 0:
                    if theirs >> 32 >= _IN_SET_UP and (theirs >> 32) - _IN_SET_UP < self.set_ups:
                        # it was in that one with this rank, and has not written what it did next
                        break
                    self._refuse(op, peer, number, theirs >> 32 <= _GIVEN_UP, current - number)
                if ahead >= _HALF:  # an older call stands there: the peer has not come so far
                    break
            number += 1  # the same, or overwritten by a peer that is far ahead
        self._compared[peer] = number - 1

    def _refuse(self, op: str, peer: int, number: int, theirs_broke: bool, ago: int) -> None:
        what = (
            f"{op} on rank {self._rank}"
            if ago == 0
            else f"a call on rank {self._rank}, {ago} before its last one,"
        )
        where, remedy = (
            f"rank {peer} calls something else",
            f"look at what rank {peer} passes (TILEWEAVE_DEBUG=1 shows it)",
        )
        if theirs_broke or self._pages[self._rank][number % PLACES] >> 32 <= _GIVEN_UP:
            broke, made = (peer, self._rank) if theirs_broke else (self._rank, peer)
            what, where = (
                f"{op} on rank {self._rank}",
                f"a call of rank {broke} broke off that rank {made} made",
            )
            remedy = f"look at what rank {broke} raised"
        raise RankMismatchError(
            f"asked: {what} where {where}; allowed: the same operators in the same order, with the same shapes, dtypes and "
            f"options on every rank; remedy: {remedy}, then tileweave.close(group), and call again on every rank"
        )

    def close(self) -> None:
        self._pages.clear()
        self._peers.clear()
