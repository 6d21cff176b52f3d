"""Expert operators with FP8 operands between GPUs: unfused, and by the kernels for Hopper."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.support.experts import Case
from tests.support.moe_layer_fp8 import KINDS, error
from tests.support.scaled_experts import dispatched
from tests.support.worlds import Member, World

import tileweave as tw
from tileweave.ops.experts import scaled_operators
from tileweave.planning.problem import Plan

WITHOUT_FP8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
pytestmark = [
    pytest.mark.multi,
    pytest.mark.timeout(400),
    pytest.mark.skipif(WITHOUT_FP8, reason="needs GPUs that multiply FP8"),
]

HOPPER_RUNS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BASE = Case((300,), experts=4, topk=3, depth=1168, cols=2 * 528, dtype="bfloat16")
CASES = [
    BASE,
    replace(BASE, routing="skewed"),
    replace(BASE, routing="empty_experts", tokens=(40, 0, 150)),
    replace(BASE, routing="holes", experts=9, topk=8),
    *(replace(BASE, tokens=(few,)) for few in (1, 4, 12)),  # other tiles
]


def with_kernels(me: Member, fused: bool) -> None:
    """By the fused kernels, or without them; both slots."""
    plan: Plan = Plan("unfused", "a test asks for it")
    with ExitStack() as stack:
        for name in () if fused else ("plan_dispatch", "plan_combine"):
            stack.enter_context(mock.patch.object(scaled_operators, name, return_value=plan))
        for _ in range(2):
            dispatched(me, CASES)
    tw.close()


@pytest.mark.parametrize("fused", [False, True] if HOPPER_RUNS else [False])
def test_dispatch_swiglu_and_combine(world: World, fused: bool) -> None:
    world.run(with_kernels, fused)


@pytest.mark.parametrize("name", KINDS)
def test_layer(world: World, name: str) -> None:
    # rows that were not quantised would be off by 3e-2
    assert max(world.run(error, KINDS[name], False)) < 1.5e-2
