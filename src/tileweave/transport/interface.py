"""The contract between operators and the memory that all ranks of a group can see.

A *symmetric buffer* is the same number of bytes on each rank, mapped by all. One transfer is data
into a *slot* of a peer's buffer, then a *signal* there: an int32 word that takes the *epoch*, the
number of the call.

What holds, and who relies on it:

- Allocation is collective, in the same order on every rank, and ends in a barrier: when it returns,
  every peer's memory is mapped and signals are zero.
- A signal is written after the data it announces; who has seen ``signal >= epoch`` may read that
  data.
- In every call every rank signals every peer and waits for all of them before the call ends. So
  when call n of a rank is complete, each peer has begun call n, hence ended n-1: what call n-1 read
  may be overwritten. Slots alternate, call n+1 writes where call n-1 wrote, and no barrier is
  needed.
- Epochs live in device memory and the device advances them, so a captured graph replays with fresh
  ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from tileweave.planning.machine import Machine

# Words of an instance's control block (int32, local to a rank, see ``device/triton/signal.py``).
# Limits of waits, microseconds. TIMEOUT_US: for data, an eighth more than peers have to come; 0
# after a fault, so that a call with many waits ends. MEETING_US: for peers to come; it runs out
# first, so that the report names who is late and not who waits for that one, too. PUSHED_US: for
# own copies, which may begin only then; a kernel must not end before them.
EPOCH, LEAVERS, FAULT, TIMEOUT_US, MEETING_US, PUSHED_US = 0, 1, 2, 3, 4, 5
# How many ranks the tables have whose addresses (int64) stand from TABLES on, and which is the own
# one: kernels that push look peers up there, and the end of a call with a fault makes all of them
# lead to the own rank. 0: copies go, tables stay.
TABLE_RANKS, TABLE_RANK, TABLES, NUM_TABLES = 6, 7, 8, 2
CONTROL_WORDS = TABLES + 2 * NUM_TABLES
# Words of a fault report (int32, in memory the host can read while kernels run).
REPORT_SET, REPORT_SIGNAL, REPORT_UNIT, REPORT_EXPECTED, REPORT_SEEN = 0, 1, 2, 3, 4
REPORT_WORDS = 8


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """``local``: this rank's bytes (uint8). ``addresses``: where each rank's copy is mapped here,
    by group rank.

    ``handle``: what keeps the peers' bytes mapped.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    handle: object = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of ``nbytes`` from ``source`` to ``target``, addresses mapped on this rank: a push,
    or a pull.

    Copies of one ``lane`` follow each other; lanes run beside each other, but for the last copy of
    a push, which follows all and is of lane 0. ``source`` or ``target`` 0: what a push is given,
    ``offset`` bytes into it. ``counter``, an address on this device, if not 0: not before the int32
    there has reached ``count``. ``rows``: so many pieces of ``nbytes``, pitches apart, in bytes.
    ``aside``: only the last copy of a push need follow it, so the next one of its lane may pass it.
    """

    target: int
    source: int
    nbytes: int
    offset: int = 0
    counter: int = 0
    count: int = 0
    lane: int = 0
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0
    aside: bool = False

    def ends(self, given: int) -> tuple[int, int]:
        """(target, source) where a push is given the address ``given``."""
        return self.target or given + self.offset, self.source or given + self.offset

    def pieces(self, given: int) -> Iterator[tuple[int, int]]:
        """(target, source) of each row."""
        target, source = self.ends(given)
        for row in range(self.rows):
            yield target + row * self.target_pitch, source + row * self.source_pitch


class Copies(tuple[Copy, ...]):
    """Copies that serve many calls: a transport may make something of them."""

    @cached_property
    def pitched(self) -> bool:
        """Whether one of them has several rows."""
        return any(copy.rows > 1 for copy in self)


Watcher = Callable[[Sequence[Copy], int, int], None]


class Transport(Protocol):
    """What ``cuda.py`` and ``cpu.py`` both provide for one (group, device)."""

    device: torch.device
    rank: int
    world_size: int
    machine: Machine
    # told of each push: its copies, when the copy engine began and ended (0: not known)
    watch: Watcher | None

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Collective: a zeroed symmetric buffer, mapped on every rank when this returns."""
        ...

    def share(self, nbytes: int) -> Sequence[Any]:
        """Collective: zeroed host memory of every rank, mapped here, by rank; empty where ranks of
        a group share none."""
        ...

    def barrier(self) -> None:
        """Host-side rendezvous of the group; set-up and growth only. Work queued before it is
        complete after it."""
        ...

    def host_visible(self, words: int) -> torch.Tensor:
        """Zeroed int32 words that kernels can write and the host can read without synchronising."""
        ...

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
    ) -> None:
        """Copy engine: do ``copies``, lane by lane in order, behind what is queued now and beside
        what is queued later.

        The same copies serve many calls, from (or to) another ``source`` each time; :class:`Copies`
        cost the host least. Pushes of one ``line`` follow each other, those of another do not wait
        for them. Inside one device only single words: larger copies there may need its
        multiprocessors, which a waiting kernel holds. ``launch`` queues a kernel, beside which the
        copies run and for whose counters they may wait. If it raises, none waits.
        """
        ...

    def join(self, queue: int = 0) -> None:
        """Order what is queued later behind the last :meth:`push` of ``line``."""
        ...

    def order(self) -> torch.cuda.Stream | None:
        """Order this call behind the last one on this device, also if that was on another stream;
        the stream of this one."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on this device is done."""
        ...

    def close(self) -> None:
        """Release what this object holds. Not collective: it must work when a peer is gone."""
        ...
