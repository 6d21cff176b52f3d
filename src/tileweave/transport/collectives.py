"""torch's collectives under the names that this torch has (2.13 renamed the flat ones), and a bounded wait for them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tileweave.errors import PeerTimeout, RankMismatchError
from tileweave.transport.workspace import timeout_seconds

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait_bounded(work: dist.Work | None, what: str, rank: int) -> None:
    """Wait for a collective no longer than ``TILEWEAVE_TIMEOUT``: torch's own default is 10 to 30 minutes."""
    seconds = timeout_seconds()
    try:
        if work is not None:
            work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise PeerTimeout(what, rank, -1, -1, 0, 0, seconds) from error


def agree_on_size(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective, before symmetric memory is made: raise the same :class:`RankMismatchError` on all ranks if sizes differ.

    Ranks whose shapes differ at the first call, or when memory grows, are found here, before anybody writes past a peer's end.
    """
    mine = torch.tensor([nbytes], dtype=torch.int64, device=device)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    wait_bounded(all_gather_flat(sizes, mine, group=group, async_op=True), "barrier", dist.get_rank(group))
    found: list[int] = sizes.tolist()
    common = max(sorted(set(found)), key=found.count)
    odd = [rank for rank, size in enumerate(found) if size != common]
    if odd:
        asked = ", ".join(f"rank {rank}: {found[rank]} bytes" for rank in odd)
        raise RankMismatchError(
            f"asked: {asked}, where the other ranks reserve {common}; allowed: the same operator, shapes, dtypes and options "
            f"on every rank; remedy: look at what rank {odd[0]} passes (TILEWEAVE_DEBUG=1 compares all of it)"
        )
