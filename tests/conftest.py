"""Skips tests marked `gpu` or `multi` where this machine has too few GPUs for them."""

from __future__ import annotations

import pytest
import torch

GPUS_NEEDED = {"gpu": 1, "multi": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count()
    for item in items:
        needed = max((count for marker, count in GPUS_NEEDED.items() if item.get_closest_marker(marker)), default=0)
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs at least {needed} GPU(s), found {present}"))
