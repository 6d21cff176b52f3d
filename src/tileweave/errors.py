"""Every exception tileweave raises on purpose: what was asked, what is allowed, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Waited = Literal["signal", "meeting", "closed"]


class TileweaveError(Exception):
    """Base class, so that a caller can catch everything of ours with one name."""


class InputError(TileweaveError, ValueError):
    """A tensor, group or option does not fit the operator. Raised before anything is sent."""


class RankMismatchError(InputError):
    """Ranks called different operators, or the same one with arguments that do not match;
    ``TILEWEAVE_DEBUG=1`` shows them."""


class CaptureError(TileweaveError, RuntimeError):
    """A call under CUDA-graph capture needed memory that does not exist yet."""


class UnsupportedError(TileweaveError, RuntimeError):
    """This machine cannot run what was asked, and a fallback would not be what was asked."""


class PeerTimeout(TileweaveError, RuntimeError):
    """A peer did not come within the configured time.

    Attributes
    ----------
    op, rank, peer : which operator, or what else was waited for; who waited, and for whom (-1: it
        is not known for whom).
    at : where. "signal": in a kernel, for a peer's signal; "meeting": on the host, where memory is
        mapped and calls are compared; "closed": there, too, but the peer has closed its workspace
        meanwhile.
    unit : of a signal, the index of the waiting unit of work (a tile, or ``-1`` for a barrier).
    expected, seen : of a signal, the epoch that was awaited and the one that stood there.
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
    ) -> None:
        self.op, self.rank, self.peer, self.unit = op, rank, peer, unit
        self.expected, self.seen, self.seconds = expected, seen, seconds
        self.at: Waited = at
        whom = f"rank {peer}" if peer >= 0 else "some rank of its group"
        place = "at a barrier" if unit < 0 else f"in work unit {unit}"
        where = (
            f"{place} (expected epoch {expected}, saw {seen})" if at == "signal" else "on the host"
        )
        late = (
            f"waited {seconds:g} s for {whom} {where}, which did not call the same operator in time: it died, raised, called "
            "something else, or is late. Remedy: find out what that rank did; raise TILEWEAVE_TIMEOUT (seconds) if it is only "
            "late."
        )
        closed = f"met {whom}, which has closed its workspace since. Remedy: find out why that rank closed it."
        after = "The workspace of this group is no longer usable: tileweave.close(group), then call again on every rank."
        super().__init__(f"{op}: rank {rank} {closed if at == 'closed' else late} {after}")

    def __reduce__(
        self,
    ) -> tuple[type[PeerTimeout], tuple[str, int, int, int, int, int, float, Waited]]:
        """Launchers and process pools pickle what a rank raised."""
        return PeerTimeout, (
            self.op,
            self.rank,
            self.peer,
            self.unit,
            self.expected,
            self.seen,
            self.seconds,
            self.at,
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
    """Raise :class:`InputError` with the three parts that every message of ours has.

    ``asked`` may be made only then; where ``torch.compile`` traces it must be: a text about a size
    fixes that size.
    """
    if not condition:
        asked = asked if isinstance(asked, str) else asked()
        raise InputError(f"asked: {asked}; allowed: {allowed}; remedy: {remedy}")
