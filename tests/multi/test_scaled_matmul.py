"""Matmul operators with FP8 operands between GPUs, by each candidate of the planner."""

from __future__ import annotations

import pytest
import torch
from tests.support.scaled_cases import AG, AR, FP8, KINDS, RS, Case, check, in_one_shot
from tests.support.worlds import Member, World

from tileweave.ops.matmul.scaled_operators import scales_of
from tileweave.planning import choices
from tileweave.planning.candidates import PLANNED, candidates
from tileweave.planning.machine import H200
from tileweave.planning.problem import Problem

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.multi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not IS_HOPPER, reason="the candidates are those of Hopper"),
]


def by_each_candidate(me: Member, op: str) -> None:
    """With two kinds of scales: each is another kernel, and to compile them takes most of the
    time."""
    rows, cols, depth = 256, 512, 384
    dtype = str(FP8).removeprefix("torch.")
    for number, (of_x, of_w) in enumerate(KINDS[1::2]):
        scales = scales_of(of_x, of_w, False)
        problem = Problem(me.world_size, rows, cols, depth, 1, dtype, scales=scales)
        whole = rows * me.world_size if op == RS else rows
        case = Case(op, whole, cols, depth, (of_x, of_w), bias=number % 2 == 0, norm=op == AR)
        for config in (None, *candidates(op, problem, H200)):
            with choices.forced(op, config):
                first = check(case, me, number)
                check(case, me, number + 9)
                again = check(case, me, number)
            assert torch.equal(first, again), f"{config}, {case}: other bits the second time"


@pytest.mark.parametrize("op", [AG, RS, AR])
def test_each_candidate(largest: World, op: str) -> None:
    largest.run(by_each_candidate, op, timeout=280)


def test_few_rows_in_one_shot(world: World) -> None:
    configs = [config for config in PLANNED[AR].fp8 if config.kernel == "triton"]
    world.run(in_one_shot, configs, timeout=280)
