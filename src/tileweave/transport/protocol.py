"""Every word that ranks and programs signal with, and its number: the one definition.

Kernels (``device/triton/signal.py`` makes ``tl.constexpr`` of these), their interpreted bodies, the
host and the tests all read it. Plain integers: no torch, no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

# --- Signals: int32 words in symmetric memory, one layout for every instance ---

MAX_SLICES = 32  # signals that each source has at each rank, for slices or chunks of its data
# An all-reduce by tiles: chunks from this number on are rows that a rank has reduced, those below
# are partial sums.
REDUCED = MAX_SLICES // 2


@dataclass(frozen=True, slots=True)
class SignalLayout:
    """Which signal has which index, for ``world_size`` ranks.

    ``[source, slice]`` for data, then ``[source]`` for meetings, then ``[pushed]``, which the own
    copy engine sets after its last copy. They are followed by the flags of both slots, ``[slot,
    source, chunk]``: 1 where a peer has a chunk for a copy engine of this rank to pull, else 0.
    """

    world_size: int

    def data(self, source: int, slice_: int = 0) -> int:
        """The signal of a slice or chunk of ``source``'s data."""
        return source * MAX_SLICES + slice_

    def met(self, source: int) -> int:
        """The signal by which ``source`` says that it has come to a meeting."""
        return self.world_size * MAX_SLICES + source

    @property
    def pushed(self) -> int:
        """The signal that the own copy engine sets after its last copy of a call."""
        return self.world_size * MAX_SLICES + self.world_size

    @property
    def num_signals(self) -> int:
        return self.pushed + 1

    def flag(self, slot: int, source: int, chunk: int) -> int:
        """Counted from the first signal, too."""
        return self.num_signals + (slot * self.world_size + source) * MAX_SLICES + chunk

    @property
    def num_words(self) -> int:
        """Signals and flags together."""
        return self.flag(2, 0, 0)

    def source_of(self, signal: int) -> int:
        """The rank that sets ``signal``, of data or of a meeting."""
        first = self.met(0)
        return signal // MAX_SLICES if signal < first else signal - first


# --- The control block of an instance: int32, local to a rank ---

EPOCH = 0  # number of this call
LEAVERS = 1  # programs that have left this call
FAULT = 2  # 1 once a wait has timed out
# Limits of waits in microseconds. For data: the time-out and an eighth; 0 after a fault of any
# instance of the group, so that a call with many waits ends, and so do calls queued after it. For
# meetings: the time-out; it runs out first, so that the report names the rank that is late, and not
# one that waits for it, too. For own copies: twice the time-out, since they may begin only when the
# meeting has timed out, and a kernel must not end before they have.
TIMEOUT_US = 3
MEETING_US = 4
PUSHED_US = 5
# The ranks in the address tables and the own rank; 0 ranks where copy engines bring the data. From
# TABLES on the addresses (int64) of the tables: at the end of a call with a fault all of their
# entries are made to lead to the own rank, so that this rank sends nothing from then on.
TABLE_RANKS = 6
TABLE_RANK = 7
TABLES = 8
NUM_TABLES = 2
# The address (int64) of the record of what programs did; 0: nothing is recorded. Only kernels that
# are compiled with TILEWEAVE_STAMPS=1 look at it.
RECORD = TABLES + 2 * NUM_TABLES
# The address (int64) of the next control block of the group's list, 0 after the last one; that of
# the list's head, of which only FAULT and NEXT are used; the number of this block, for the report.
# See ``shared_fault.py``.
NEXT = RECORD + 2
GROUP = NEXT + 2
MEMBER = GROUP + 2
CONTROL_WORDS = MEMBER + 2

LATE = (
    1 << 20
)  # more than any number of programs: what the first time-out of a call adds to LEAVERS
GONE = 1 << 30  # added to the epoch that a rank meets with once it has given a call up

# --- The report of a group's first fault: int32, in memory that the host can read meanwhile ---

REPORT_SET, REPORT_SIGNAL, REPORT_UNIT, REPORT_EXPECTED, REPORT_SEEN = 0, 1, 2, 3, 4
REPORT_MEMBER = 5  # which control block
REPORT_WORDS = 8

# --- The record: int64 words in local memory. How many entries were written, how many fit, and then
# four words for each entry, see ``device/triton/record.py`` ---

RECORD_HEAD, RECORD_WORDS = 2, 4
BEGAN, LEFT, WAITED = 1, 2, 3  # kinds of entries
HERE, ANY = -1, -2  # in place of a signal: programs of this device; several ranks
