"""The exceptions of tileweave. Messages say what was asked, what is allowed, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Waited = Literal["signal", "meeting", "closed", "store"]


class TileweaveError(Exception):
    """Base class of all exceptions that tileweave raises."""


class InputError(TileweaveError, ValueError):
    """A tensor, group or option does not fit the operator. Raised before anything is sent."""

    def __str__(self) -> str:
        """The message, without the middle of very long words."""
        # not done by a constructor, since Dynamo would have to trace that
        return _LONG_WORD.sub(_shortened, super().__str__())


_LONG_WORD = re.compile(r"\S{401,}")  # of what was asked: no message repeats all of it


def _shortened(word: re.Match[str]) -> str:
    text = word[0]
    return f"{text[:200]}...({len(text)} characters)...{text[-50:]}"


class RankMismatchError(InputError):
    """Ranks called different operators, or the same one with arguments that do not match.
    ``TILEWEAVE_DEBUG=1`` shows the arguments."""


class CaptureError(TileweaveError, RuntimeError):
    """A call under CUDA-graph capture needed memory that does not exist yet."""


class UnsupportedError(TileweaveError, RuntimeError):
    """This machine cannot run what was asked, and there is no fallback that would do the same."""


class PeerTimeout(TileweaveError, RuntimeError):
    """A peer did not come within the configured time.

    Attributes
    ----------
    op : str
        the operator, or what else the rank waited for.

    rank : int
        the rank that waited.

    peer : int
        the rank that it waited for; -1: unknown.

    at : str
        where it waited. ``"signal"``: in a kernel, for a signal of the peer. ``"meeting"``: on the
        host, where memory is mapped and calls are compared. ``"closed"``: on the host, but the peer
        has closed its workspace. ``"store"``: on the host, for the process that serves the store of
        the group, which does not answer (then ``peer`` is -1).

    unit : int
        with ``"signal"``, the index of the unit of work that waited (a tile); -1: at a barrier.

    expected, seen : int
        with ``"signal"``, the epoch that the signal should have had, and the one that it had.

    seconds : float
        how long it waited.

    server : str
        with ``"store"``, the address of the store, and which process serves it.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        peer: int,
        unit: int,
        expected: int,
        seen: int,
        seconds: float,
        at: Waited = "signal",
        server: str = "",
    ) -> None:
        self.op, self.rank, self.peer, self.unit = op, rank, peer, unit
        self.expected, self.seen, self.seconds = expected, seen, seconds
        self.at: Waited = at
        self.server = server
        name = f"rank {peer}" if peer >= 0 else "some rank of its group"
        where = "on the host"
        if at == "signal":
            place = "at a barrier" if unit < 0 else f"in work unit {unit}"
            where = f"{place} (expected epoch {expected}, saw {seen})"
        text = (
            f"waited {seconds:g} s for {name} {where}, which did not call the same operator in "
            "time: it died, raised, called something else, or is late. Remedy: find out what that "
            "rank did; raise TILEWEAVE_TIMEOUT (seconds) if it is only late."
        )
        if at == "closed":
            text = (
                f"met {name}, which has closed its workspace since. "
                "Remedy: find out why that rank closed it."
            )
        if at == "store":
            waited = f"waited {seconds:g} s for" if seconds else "lost its connection to"
            text = (
                f"{waited} the store of its group ({server}), through which ranks meet: the "
                "process that serves it is stopped, slow or gone. Remedy: look at that process; "
                "raise TILEWEAVE_TIMEOUT (seconds) if it is only slow."
            )
        after = (
            "The workspace of this group is no longer usable: "
            "tileweave.close(group), then call again on every rank."
        )
        super().__init__(f"{op}: rank {rank} {text} {after}")

    def __reduce__(
        self,
    ) -> tuple[type[PeerTimeout], tuple[str, int, int, int, int, int, float, Waited, str]]:
        """For pickle, which launchers and process pools use on exceptions of ranks."""
        return PeerTimeout, (
            self.op,
            self.rank,
            self.peer,
            self.unit,
            self.expected,
            self.seen,
            self.seconds,
            self.at,
            self.server,
        )


def peers_know(error: TileweaveError, posted: bool) -> bool:
    """Whether peers need not be told that a call of this rank ended in ``error``. ``posted``: the
    call is in the ledger.

    It was made, or its instance makes none any more; or all ranks raise the same; or what is in the
    ledger differs.
    """
    if isinstance(error, PeerTimeout):
        return error.at == "signal"
    return isinstance(error, UnsupportedError) or (posted and isinstance(error, RankMismatchError))


def require(condition: bool, asked: str | Callable[[], str], allowed: str, remedy: str) -> None:
    """Raise :class:`InputError` with the three parts of our messages if ``condition`` is false.

    ``asked`` may be a function that makes the text only then. Where ``torch.compile`` traces the
    call it must be one, because a text about a size specializes the graph for that size.
    """
    if not condition:
        asked = asked if isinstance(asked, str) else asked()
        raise InputError(f"asked: {asked}; allowed: {allowed}; remedy: {remedy}")
