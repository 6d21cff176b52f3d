"""Worlds of 2 and 4 processes whose operators run unfused, over gloo: whole models, quickly.

Two models of transformers also run with interpreted kernels. A file of tests is skipped where its
framework is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.worlds import World

# A rank may wait for another one that still compiles or imports, with nothing in any cache.
UNFUSED = {"TRITON_INTERPRET": "0", "WORLD_ENDS_WELL": "1", "TILEWEAVE_TIMEOUT": "120"}


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    """Two ranks that run unfused."""
    world = World("gloo", 2, UNFUSED)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four ranks that run unfused."""
    world = World("gloo", 4, UNFUSED)
    yield world
    world.close()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[World]:
    """Two ranks that interpret the kernels."""
    world = World("gloo", 2)
    yield world
    world.close()
