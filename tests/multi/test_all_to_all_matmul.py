"""all_to_all_matmul between GPUs: the exchanged x that a kernel returns.
``test_matmul_all_to_all.py`` has the other tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cpu.test_all_to_all_matmul import infinite_next_to_a_part, kept
from tests.multi.test_matmul_all_to_all import (
    COPIED,
    HOPPER,
    HOWS,
    LIBRARY,
    TRITON,
    on_hopper,
)
from tests.support.worlds import World

from tileweave.planning.problem import MatmulConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]}{how[1]}")
@pytest.mark.parametrize(
    "config",
    [
        TRITON,
        LIBRARY,
        pytest.param(replace(HOPPER, num_slices=8), marks=on_hopper),
        pytest.param(COPIED, marks=on_hopper),
    ],
    ids=lambda config: f"{config.kernel}-{config.transport}",
)
def test_the_exchanged_input(largest: World, how: tuple[int, int], config: MatmulConfig) -> None:
    largest.run(kept, how, config, 8, "bfloat16", timeout=120)


@pytest.mark.parametrize(
    "config",
    [TRITON, pytest.param(HOPPER, marks=on_hopper), pytest.param(COPIED, marks=on_hopper)],
    ids=lambda config: f"{config.kernel}-{config.transport}",
)
def test_infinite_weights_of_the_next_part(largest: World, config: MatmulConfig) -> None:
    largest.run(infinite_next_to_a_part, config, 200, "bfloat16", timeout=120)
