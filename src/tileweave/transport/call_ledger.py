"""The ledger: each rank records its calls where its peers can read them, so that calls that do not
match are found.

Every rank has a page in memory that all ranks of its node share. Before a rank launches call n of
the group, it writes the number n and a checksum of the call (operator, shapes, dtypes, options)
into entry n modulo ``PLACES`` of its page. Then it compares the entries of its peers for all calls
that it has not compared yet. It never waits. The first rank finds nothing and goes on. A later rank
finds the difference before it launches its kernel, and the first rank finds it at its next call, or
when its kernel stops waiting. Number and checksum are one 8-byte word, so no order between words is
needed.

A call may fail for a reason of one rank alone (no memory, Ctrl-C) while its peers made it and wait
for that rank. If that rank then went on, its next call would be taken for the failed one, with
other data and without a visible difference. So the entry is marked as broken: a rank that finds it
where its own call did not fail raises an error (decision 0025). A call that a rank gave up for a
peer, which did not come or called something else, has a mark of its own: ranks go on together only
if all of them gave the call up.

Before a call that needs more memory all ranks map it, in a *set-up*. A rank that needs none would
launch its call while the others wait for it. So each rank writes into the entry of the call that it
is in a set-up, and which one: a rank that finds a peer in a set-up that it has not been in, or that
has made the call without one, raises an error.

This runs on the host only and is not part of a captured graph. An eager call costs one store, and
one load per peer that is in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tileweave.errors import PeerTimeout, RankMismatchError, UnsupportedError

# A rank may be this many calls ahead of another before some calls are not compared.
PLACES = 1024
NBYTES = 8 * PLACES
_NUMBER, _HALF = 0xFFFFFFFF, 1 << 31
_MARK = 0x7FFFFFFF  # the bits of a checksum
_BROKEN, _GIVEN_UP = 0, 1  # checksums that no call has
# from here on: the call is not yet made, and the rank is in the set-up of that number
_IN_SET_UP = 1 << 31


class Ledger:
    """The ledger of one workspace. It compares nothing before :meth:`open` or without blocks.
    ``calls`` counts the calls that this rank recorded, ``set_ups`` those that ended alike on all
    ranks."""

    def __init__(self) -> None:
        self.calls = self.set_ups = 0
        self.opened = False
        self._rank = -1
        self._pages: dict[int, Any] = {}  # by rank
        self._peers: list[tuple[int, Any]] = []  # rank and page of each peer
        self._compared: dict[int, int] = {}  # number of calls compared, by rank

    def open(self, blocks: Mapping[int, Any], rank: int) -> None:
        """``blocks`` has a writable buffer of ``NBYTES`` zeros for each rank whose calls are
        compared; without blocks none are."""
        self.opened, self._rank = True, rank
        self._pages = {at: memoryview(block).cast("B").cast("Q") for at, block in blocks.items()}
        self._peers = [(peer, page) for peer, page in self._pages.items() if peer != rank]
        self._compared = dict.fromkeys(blocks, 0)

    def post(self, op: str, mark: int) -> None:
        """Record that ``op`` is called next, with checksum ``mark``. Raise
        :class:`RankMismatchError` if a peer calls something else.

        Earlier calls are compared first: if one of them differs, this call is not made, so peers
        must not find it.
        """
        if not self._pages:
            return
        own, compared, last = self._pages[self._rank], self._compared, self.calls
        place = last % PLACES
        for peer, page in self._peers:
            if compared[peer] < last:
                # most often a peer was late by one call, so first
                if compared[peer] == last - 1 and page[place] == own[place]:
                    compared[peer] = last
                else:
                    self._compare(op, peer, page, last + 1)
        self.calls = number = last + 1
        place = number % PLACES
        own[place] = word = (mark & _MARK) << 32 | number & _NUMBER
        for peer, page in self._peers:
            theirs = page[place]
            if compared[peer] == last and theirs == word:
                compared[peer] = number
            elif (theirs - number) & _NUMBER < _HALF:  # the peer has made this call, or a later one
                self._compare(op, peer, page, number)

    @contextmanager
    def set_up(self, op: str) -> Iterator[None]:
        """What all ranks do together before the next call, which is of ``op``, is recorded.

        A peer that has made that call without a set-up, or whose call failed, does not come:
        :class:`RankMismatchError`. After a :class:`PeerTimeout` it is raised, too, if a peer made
        the call; peers whose call failed may have waited for the same rank.
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
        """Raise if a peer has recorded the next call, with a mark from ``lowest`` on, without the
        set-up of this rank."""
        number = self.calls + 1
        for peer, page in self._peers:
            theirs = page[number % PLACES]
            if (theirs - number) & _NUMBER == 0 and lowest <= theirs >> 32 < _IN_SET_UP:
                self.break_off(False, given_up=True)
                self._refuse(op, peer, number, theirs >> 32 <= _GIVEN_UP, 0)

    def break_off(self, posted: bool, given_up: bool = False) -> None:
        """Record that a call of this rank failed for a reason of its own: the last one if it was
        ``posted``, else the next one.

        ``given_up``: the reason is a peer.
        """
        if not self._pages:
            return
        self.calls = number = self.calls + (not posted)
        self._pages[self._rank][number % PLACES] = (
            _GIVEN_UP if given_up else _BROKEN
        ) << 32 | number & _NUMBER
        # peers may have compared it before
        self._compared = {r: min(done, number - 1) for r, done in self._compared.items()}

    @property
    def entry(self) -> int:
        """The entry of the last call; 0 if it was not recorded. For peers that cannot read it."""
        return self._pages[self._rank][self.calls % PLACES] if self._pages else 0

    def hear(self, entries: Mapping[int, int]) -> bool:
        """Note the entries of ranks that share no memory with this one, by rank. Whether they
        are that of the last call here."""
        own = self.entry
        for rank, entry in entries.items():
            if rank in self._pages and entry:
                self._pages[rank][entry % PLACES] = entry
        return all(entry == own for entry in entries.values())

    def compare(self, op: str) -> None:
        """Compare what peers have recorded for the calls that this rank has made."""
        for peer, page in self._peers:
            self._compare(op, peer, page, self.calls)

    def _compare(self, op: str, peer: int, page: Any, current: int) -> None:
        """``current`` is the number of the call that this rank is in."""
        last = self.calls
        number = max(self._compared[peer] + 1, last - PLACES + 1)
        while number <= last:
            place = number % PLACES
            theirs = page[place]
            if theirs != self._pages[self._rank][place]:
                ahead = (theirs - number) & _NUMBER
                if ahead == 0:
                    if theirs >> 32 >= _IN_SET_UP and (theirs >> 32) - _IN_SET_UP < self.set_ups:
                        # it was in that set-up with this rank, and has not recorded its next call
                        break
                    self._refuse(op, peer, number, theirs >> 32 <= _GIVEN_UP, current - number)
                if ahead >= _HALF:  # the entry is of an older call: the peer is not there yet
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
            f"asked: {what} where {where}; allowed: the same operators in the same order, with the "
            f"same shapes, dtypes and options on every rank; remedy: {remedy}, then "
            "tileweave.close(group), and call again on every rank"
        )

    def close(self) -> None:
        self._pages.clear()
        self._peers.clear()
