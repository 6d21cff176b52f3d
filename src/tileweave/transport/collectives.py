"""torch's collectives under the names that this torch has (2.13 renamed the flat ones), and a bounded wait for them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tileweave.errors import PeerTimeout
from tileweave.transport.workspace import timeout_seconds

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_flat = dist.all_to_all_single


def wait_bounded(work: dist.Work | None, what: str, rank: int) -> None:
    """Wait for a collective no longer than ``TILEWEAVE_TIMEOUT``: torch's own default is 10 to 30 minutes."""
    seconds = timeout_seconds()
    try:
        if work is not None:
            work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise PeerTimeout(what, rank, -1, -1, 0, 0, seconds) from error
