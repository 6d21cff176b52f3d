"""Every exception tileweave raises on purpose: what was asked, what is allowed, and the remedy."""

from __future__ import annotations

from collections.abc import Callable


class TileweaveError(Exception):
    """Base class, so that a caller can catch everything of ours with one name."""


class InputError(TileweaveError, ValueError):
    """A tensor, group or option does not fit the operator. Raised before anything is sent."""


class RankMismatchError(InputError):
    """Ranks called different operators, or the same one with arguments that do not match; ``TILEWEAVE_DEBUG=1`` shows them."""


class CaptureError(TileweaveError, RuntimeError):
    """A call under CUDA-graph capture needed memory that does not exist yet."""


class UnsupportedError(TileweaveError, RuntimeError):
    """This machine cannot run what was asked, and a fallback would not be what was asked."""


class PeerTimeout(TileweaveError, RuntimeError):
    """A peer's signal did not arrive within the configured time.

    Attributes
    ----------
    op, rank, peer : which operator, who waited, and for whom (-1: a barrier or own copies, where it is not known for whom).
    unit : the index of the waiting unit of work (a tile, or ``-1`` for a barrier).
    expected, seen : the epoch that was awaited and the one that stood in the signal.
    """

    def __init__(self, op: str, rank: int, peer: int, unit: int, expected: int, seen: int, seconds: float) -> None:
        self.op, self.rank, self.peer, self.unit = op, rank, peer, unit
        self.expected, self.seen, self.seconds = expected, seen, seconds
        whom = f"rank {peer}" if peer >= 0 else "some rank of its group"
        where = "at a barrier" if unit < 0 else f"in work unit {unit}"
        super().__init__(
            f"{op}: rank {rank} waited {seconds:g} s for {whom} {where} (expected epoch {expected}, saw {seen}), which "
            "did not call the same operator in time: it died, raised, called something else, or is late. "
            "Remedy: find out what that rank did; raise TILEWEAVE_TIMEOUT (seconds) if it is only late. "
            "The workspace of this group is no longer usable: tileweave.close(group), then call again on every rank."
        )

    def __reduce__(self) -> tuple[type[PeerTimeout], tuple[str, int, int, int, int, int, float]]:
        """Launchers and process pools pickle what a rank raised."""
        return PeerTimeout, (self.op, self.rank, self.peer, self.unit, self.expected, self.seen, self.seconds)


def require(condition: bool, asked: str | Callable[[], str], allowed: str, remedy: str) -> None:
    """Raise :class:`InputError` with the three parts that every message of ours has.

    ``asked`` may be made only then; where ``torch.compile`` traces it must be: a text about a size fixes that size.
    """
    if not condition:
        asked = asked if isinstance(asked, str) else asked()
        raise InputError(f"asked: {asked}; allowed: {allowed}; remedy: {remedy}")
