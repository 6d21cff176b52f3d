"""Worlds of two emulated nodes, of which the second dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.support.worlds import Member, one_shot

import tileweave as tw

SECONDS, SLACK = 3.0, 2.0  # the time limit of a wait, and what may pass until it is told


def on_second_node(me: Member) -> bool:
    return me.rank * 2 // me.world_size == 1


def outlive(me: Member, calls: Sequence[Callable[[], object]]) -> tuple[str, float]:
    """Make ``calls`` after the second node has died: the first error, and seconds until it."""
    me.barrier()
    if on_second_node(me):
        os.kill(os.getpid(), signal.SIGKILL)
    for call in calls:
        started = time.monotonic()
        try:
            call()
        except tw.TileweaveError as error:
            taken = time.monotonic() - started
            tw.close()
            return f"{type(error).__name__}: {error}", taken
    return "", 0.0


def survive(size: int, function: Callable[..., tuple[str, float]], *args: object) -> None:
    """Run ``function``, which returns what :func:`outlive` does: each rank of the first node raises
    ``PeerTimeout`` in time."""
    extra = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
    ends = one_shot("gloo", size, function, *args, extra=extra, timeout=60, nodes=2)
    for rank, end in enumerate(ends):
        if rank * 2 // size == 1:
            assert end.exit_code == -signal.SIGKILL
            continue
        seen, taken = end.value  # type: ignore[misc]
        assert seen.startswith("PeerTimeout") and f"rank {rank} waited" in seen, seen
        assert taken < SECONDS + SLACK, f"rank {rank} knew after {taken:.1f} s"
