"""Worlds of GPUs of this host: 2, 3 and 4 ranks, as many as there are."""

from __future__ import annotations

import pytest
from tests.worlds import World, Worlds, gpu_ranks

LARGEST = max(2, min(4, gpu_ranks()))


@pytest.fixture(params=range(2, LARGEST + 1), ids="world{}".format)
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("nccl", request.param)


@pytest.fixture
def largest(worlds: Worlds) -> World:
    """One world of all ranks: for what takes long and does not depend on the size."""
    return worlds("nccl", LARGEST)
