"""Skip tests marked `gpu` or `multi` where GPUs are too few; mark the `fast` ones; keep the worlds
of the session."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from tests.support.fork_server import SELDOM
from tests.support.worlds import ON_ONE_GPU, Worlds, gpu_ranks

GPUS_NEEDED = {"gpu": 1, "multi": 2}
# in tests/cpu and tests/explore; all tests without kernels are fast, too
FAST = ("test_public_calls", "test_each_operator_once")
# the longest ones, a minute and more: no process may begin one when others have nothing left to do
FIRST = (
    "explore/test_explore.py",
    "cpu/test_commands.py",
    "compile/test_embedding_kernels.py",
    "cpu/test_examples.py",
    "compile/test_all_gather_kernels.py",
    "explore/test_mutate.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-gpu",
        type=int,
        metavar="RANKS",
        help="tests marked multi with worlds of up to RANKS on one GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    # no test plans by what the user has tuned
    os.environ["TILEWEAVE_CACHE"] = tempfile.mkdtemp(prefix="tileweave-tests-")
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("tileweave", deadline=None)  # other processes take CPU time
        settings.load_profile("tileweave")
    if ranks := config.getoption("--one-gpu"):
        os.environ[ON_ONE_GPU] = str(ranks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count()
    items.sort(key=_turn)
    for item in items:
        if _is_fast(item):
            item.add_marker(pytest.mark.fast)
        needed = max(
            (count for marker, count in GPUS_NEEDED.items() if item.get_closest_marker(marker)),
            default=0,
        )
        if needed > (gpu_ranks() if present else 0):
            item.add_marker(
                pytest.mark.skip(reason=f"needs at least {needed} GPU(s), found {present}")
            )
        elif ON_ONE_GPU in os.environ and item.get_closest_marker("own_gpu"):
            item.add_marker(pytest.mark.skip(reason="ranks share a GPU here"))


def _turn(item: pytest.Item) -> int:
    """When the file of ``item`` begins; files of one turn stay in the order of their names."""
    name = f"{item.path.parent.name}/{item.path.name}"
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _is_fast(item: pytest.Item) -> bool:
    if item.path.parent.name == "pure":
        return not item.path.name.startswith("test_sim_")
    return item.path.parent.name in ("cpu", "explore") and getattr(item, "originalname", "") in FAST


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects stay: garbage collection has a tenth of them left to scan
    gc.set_threshold(SELDOM)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TILEWEAVE_CACHE"], ignore_errors=True)
    gc.unfreeze()  # else the compiler's binding reports all that is left as leaks


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of ranks, started on first use: ``worlds("gloo", 3).run(function, *args)``."""
    found = Worlds()
    yield found
    found.close()
