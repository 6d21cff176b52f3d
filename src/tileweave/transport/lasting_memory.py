"""Memory that outlives the call that allocates it.

The call may be part of the warm-up of ``torch.compile(mode="reduce-overhead")``. What its thread
allocates then comes from memory of the graph, and torch raises an error if any of it is still there
after the warm-up, except results. So another thread allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(make: Callable[[], T], device: torch.device) -> T:
    """What ``make`` returns. What it allocates on ``device`` is memory of no graph."""
    if not _may_warm_up(device):
        return make()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def allocate() -> T:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(allocate).result()


def _may_warm_up(device: torch.device) -> bool:
    """Whether a graph may be about to be captured. Under a capture, memory must be that of the
    graph; while tracing, tensors have no data, and only this thread makes such."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    return type(torch.empty(0, device=device)) is torch.Tensor
