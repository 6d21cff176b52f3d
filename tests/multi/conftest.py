"""Worlds of GPUs of this host: 2, 3 and 4 ranks, as many as there are GPUs, or as requested where
ranks share one."""

from __future__ import annotations

import os

import pytest
from tests.support.worlds import ON_ONE_GPU, World, Worlds, gpu_ranks


def most() -> int:
    """Called when tests are collected: this file is read before the options of pytest are."""
    return max(2, min(8 if ON_ONE_GPU in os.environ else 4, gpu_ranks()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", range(2, most() + 1), ids="world{}".format, indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("nccl", request.param)


@pytest.fixture
def largest(worlds: Worlds) -> World:
    """One world of all ranks: for slow tests that do not depend on the size."""
    return worlds("nccl", most())
