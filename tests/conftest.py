"""Skips tests marked `gpu` or `multi` where this machine has too few GPUs for them; keeps the worlds of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.worlds import Worlds

GPUS_NEEDED = {"gpu": 1, "multi": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count()
    for item in items:
        needed = max((count for marker, count in GPUS_NEEDED.items() if item.get_closest_marker(marker)), default=0)
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs at least {needed} GPU(s), found {present}"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of ranks, started when a test first asks: ``worlds("gloo", 3).run(function, *args)``."""
    found = Worlds()
    yield found
    found.close()
