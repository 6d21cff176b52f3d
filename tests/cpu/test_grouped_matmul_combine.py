"""grouped_matmul_combine in CPU worlds: the real kernel, interpreted, over shared host memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tests.support import combine
from tests.support.delays import stall_in_the_kernel
from tests.support.experts import Case
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.planning.combine import MAX_ROWS, CombineConfig, plan_combine
from tileweave.planning.machine import H200
from tileweave.planning.schedules.grouped import GroupedProblem

CONFIG = CombineConfig(
    "triton",
    16,
    16,
    32,
    1,
    4,
    2,
    chunks=2,
    groups=2,
    block_tokens=4,
    block_cols=16,
    num_reduce=1,
    num_finish=1,
)
SEVERAL = replace(
    CONFIG, num_reduce=2, num_finish=3, chunks=3, groups=1, block_tokens=2, programs_per_sm=2
)
SMALL = Case((4,), experts=2, depth=16, cols=24)

ROUTINGS = (
    "even",
    "skewed",
    "one_expert",
    "one_rank",
    "empty_experts",
    "holes",
    "no_choices",
    "repeated",
)
CASES = [replace(SMALL, tokens=(3,), routing=routing) for routing in ROUTINGS]
UNEVEN = [
    replace(SMALL, tokens=(3, 0, 6)),
    replace(SMALL, tokens=(0, 3), spare=2),
    replace(SMALL, topk=3, experts=3, depth=20),
]


def test_routings(worlds: Worlds) -> None:
    worlds("gloo", 3).run(combine.parity, CASES, CONFIG)


def test_uneven_tokens_and_experts(worlds: Worlds) -> None:
    worlds("gloo", 3).run(combine.parity, UNEVEN, SEVERAL)


def test_in_each_world(world: World) -> None:
    world.run(combine.parity, [replace(UNEVEN[0], tokens=(2, 0, 3))], CONFIG)


def test_weights_in_backward_layout(worlds: Worlds) -> None:
    worlds("gloo", 2).run(combine.parity, [SMALL, UNEVEN[2]], CONFIG, True, False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(worlds: Worlds, dtype: str) -> None:
    worlds("gloo", 2).run(combine.parity, [replace(SMALL, dtype=dtype)], CONFIG)


def test_sums_are_in_rank_order(worlds: Worlds) -> None:
    worlds("gloo", 3).run(combine.sums_in_rank_order, CONFIG)


def test_many_calls_with_late_ranks(worlds: Worlds) -> None:
    cases = [SMALL, replace(SMALL, tokens=(5, 1)), replace(SMALL, tokens=(2, 0, 4))]
    worlds("gloo", 3).run(combine.many_calls, cases, CONFIG, 7, 0.004, stall_in_the_kernel)


def test_the_epoch_wraps_around(worlds: Worlds) -> None:
    worlds("gloo", 2).run(combine.calls_around_the_wrap, SMALL, CONFIG)


def test_public_calls(worlds: Worlds) -> None:
    worlds("gloo", 2).run(combine.public_calls, [SMALL], "fused")
    worlds("gloo", 1).run(combine.public_calls, [SMALL, UNEVEN[2]], "local")


def test_gradients(worlds: Worlds) -> None:
    worlds("gloo", 3).run(combine.gradients, [CASES[5], UNEVEN[0]])
    worlds("gloo", 1).run(combine.gradients, [SMALL, replace(SMALL, dtype="bfloat16")])
    worlds("gloo", 2).run(combine.gradients, [SMALL], False)


def test_compiled_gradients(worlds: Worlds) -> None:
    worlds("gloo", 2).run(combine.gradients, [SMALL], True, "aot_eager")


def test_opcheck(worlds: Worlds) -> None:
    worlds("gloo", 1).run(combine.opcheck, SMALL, timeout=100)


def test_bad_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(combine.bad_input, SMALL)


def call_without(me: Member, absent: int) -> str | None:
    drawn = [combine.prepare(SMALL, me.rank, me.world_size, me.device, seed) for seed in (0, 1)]
    combine.fused(me, drawn[0], CONFIG)
    me.barrier()
    if me.rank == absent:
        time.sleep(4)
        return None
    with pytest.raises(tw.PeerTimeout) as caught:
        combine.fused(me, drawn[1], CONFIG)
    tw.close()
    return f"{caught.value.op} {caught.value.peer}"


@pytest.mark.parametrize("tokens", [8, 64, 4096])
def test_hopper_kernel_limits_choices_per_token(tokens: int) -> None:
    """The kernel packs the number of rows of a token on this rank into 8 bits, and one more would
    sum none of them."""
    most, beyond = (
        plan_combine(GroupedProblem(8, tokens, topk, 32, 4096, 2048, 2, "bfloat16"), H200, False)
        for topk in (MAX_ROWS, MAX_ROWS + 1)
    )
    assert (
        MAX_ROWS == 255
        and most.config is not None
        and most.config.kernel == "hopper"
        and "Hopper" not in most.reason
    )
    assert beyond.path == "fused" and beyond.config is not None and beyond.config.kernel == "triton"
    assert "k = 256" in beyond.reason and "255 rows per token" in beyond.reason


def test_a_peer_that_stops_calling() -> None:
    ends = one_shot("gloo", 3, call_without, 1, extra={"TILEWEAVE_TIMEOUT": "1.5"})
    assert [end.value for end in ends] == [f"{combine.OP} 1", None, f"{combine.OP} 1"]
