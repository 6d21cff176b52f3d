"""all_to_all_matmul: cases that its dual does not have. ``test_matmul_all_to_all.py`` has the other
tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support import parity
from tests.support.matmul_cases import IN, Case, prepare
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.ops import reference
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul.all_gather_matmul_fused import run_fused
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange


def kept(
    me: Member, how: tuple[int, int], config: MatmulConfig, scale: int = 1, dtype: str = "float32"
) -> None:
    """The kernel returns the exchanged x, which wgrad needs, bit by bit. Tiles span sources where
    there are few rows."""
    exchange, group = Exchange(*how), dist.group.WORLD
    assert group is not None
    for number, rows in enumerate((20 * scale, 3 * scale)):
        if config.transport == "copy_engine" and rows < config.tile_m and how[1] == 0:
            continue
        cols, depth = (9, 20) if scale == 1 else (136, 192)
        call = prepare(
            Case(rows, cols, depth, dtype, op=IN, how=how, bias=True),
            me.rank,
            me.world_size,
            me.device,
            number,
        )
        want = reference.exchange(call.x, exchange, group)
        got = torch.full_like(want, float("nan"))
        run_fused(
            call.x,
            call.w,
            call.bias,
            call.out,
            got,
            name_of(group),
            Plan("fused", "", config),
            how=exchange,
        )
        call.verify(f"rank {me.rank}, {how}, {rows} rows")
        assert torch.equal(got, want), f"rank {me.rank}, {how}, {rows} rows: another exchanged x"


SM = MatmulConfig("triton", "sm", 16, 32, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)


@pytest.mark.parametrize(
    "config",
    [SM, replace(SM, transport="copy_engine"), replace(SM, kernel="library")],
    ids=lambda config: f"{config.kernel}-{config.transport}",
)
@pytest.mark.parametrize(
    "how", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=lambda how: f"{how[0]}{how[1]}"
)
def test_the_exchanged_input(worlds: Worlds, how: tuple[int, int], config: MatmulConfig) -> None:
    worlds("gloo", 3).run(kept, how, config)


def test_parts_smaller_than_a_k_block(worlds: Worlds) -> None:
    """K blocks end at the end of each source's part, not at the end of K."""
    config = MatmulConfig("triton", "sm", 16, 32, 32, 1, 4, num_slices=4, num_producers=1)
    worlds("gloo", 3).run(
        parity.parity,
        [Case(5, 17, 20, op=IN, how=(0, 1)), Case(5, 17, 33, op=IN, how=(1, 1))],
        config,
    )


def infinite_next_to_a_part(
    me: Member, config: MatmulConfig, depth: int, dtype: str = "float32"
) -> None:
    """The last K block of a part must not see the columns of w after it: zero times infinity is
    NaN."""
    group = dist.group.WORLD
    assert group is not None
    case = Case(config.tile_m, 40, depth, dtype, op=IN, how=(0, 1), integers=True)
    for number in range(2):
        call = prepare(case, me.rank, me.world_size, me.device, number)
        call.x.fill_(1.0)
        call.w[:, depth::depth] = float("inf")
        parity.run(call, group, config)
        tw.synchronize()
        assert bool((call.out == float("inf")).all()), f"rank {me.rank}: {call.out[0, :4]}"


def test_infinite_weights_of_the_next_part(worlds: Worlds) -> None:
    worlds("gloo", 3).run(infinite_next_to_a_part, replace(SM, tile_k=32), 20)
