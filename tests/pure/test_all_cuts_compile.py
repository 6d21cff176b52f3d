"""Every config that a plan may choose for experts and lookups can be compiled and run on the target
GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import CPU, H200
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch, routes_fused
from tileweave.planning.sharding import config_for

SHARED_BYTES = 232448  # shared memory that one program of Hopper may use
MIXTURE = GroupedProblem(4, 4096, 8, 32, 4096, 1536, 2, "bfloat16")
TOKENS = (1, 2, 4, 8, 9, 16, 17, 64, 65, 256, 257, 1024, 8192, 65536)


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("plan_for", [plan_dispatch, plan_combine], ids=["dispatch", "combine"])
def test_expert_cuts_fit_the_device(plan_for: Callable, tokens: int) -> None:
    for experts in (2, 8, 32, 128):
        cut = plan_for(replace(MIXTURE, max_tokens=tokens, experts=experts), H200, False).config
        assert cut is not None
        assert all(map(power_of_two, (cut.tile_m, cut.tile_n, cut.tile_k, cut.num_warps))), cut
        assert min(cut.tile_m, cut.tile_n, cut.tile_k) >= 16, "tl.dot's least"
        assert (
            cut.tile_m + cut.tile_n
        ) * cut.tile_k * MIXTURE.itemsize * cut.num_stages <= SHARED_BYTES, cut
        assert cut.kernel == "triton" or cut.tile_m in (64, 128), "of a warpgroup, or two"
        if plan_for is plan_combine:
            assert power_of_two(cut.block_cols) and power_of_two(cut.block_tokens), cut


@pytest.mark.parametrize(
    "change",
    [{"cols": 33}, {"cols": 4129}, {"depth": 33}, {"depth": 1537}, {"cols": 4100}],
    ids=str,
)
def test_rows_unreadable_by_tma_use_the_triton_kernel(change: dict[str, int]) -> None:
    plan = plan_combine(replace(MIXTURE, **change), H200, False)
    assert plan.config is not None and plan.config.kernel == "triton"


@pytest.mark.parametrize("row_bytes", [0, 4, 8, 15, 16, 48, 256, 512, 1000, 4096, 1 << 16])
@pytest.mark.parametrize("pooling", [0.0, 1.0, 1.99, 2.0, 3.5, 4.0, 100.0])
def test_lookup_cuts_fit_the_device(row_bytes: int, pooling: float) -> None:
    cut = config_for(row_bytes, pooling)
    assert power_of_two(cut.bags) and power_of_two(cut.num_warps) and cut.programs_per_sm >= 1
    assert 2 <= cut.bags <= 64 and cut.unroll in (1, 2, 4), cut
    in_flight = cut.bags * cut.unroll * -(-row_bytes // 16)
    assert cut.bags in (2, 4) or in_flight <= 16 * 32 * cut.num_warps, "16-byte loads of a thread"


def test_routing_plans_made_by_the_kernel() -> None:
    """Also when interpreted: otherwise no test on a CPU would run this kernel, without a sign of
    it."""
    assert [routes_fused(size, H200, False) for size in (1, 2, 8, 9)] == [False, True, True, False]
    assert routes_fused(2, CPU, True) and not routes_fused(2, CPU, False)
