"""Worlds of 2, 3 and 4 processes, in which Triton's interpreter runs the kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tests.support.worlds import World, Worlds

collect_ignore_glob = [] if find_spec("triton") and find_spec("numpy") else ["test_*.py"]


@pytest.fixture(params=[2, 3, 4], ids="world{}".format)
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", request.param)
