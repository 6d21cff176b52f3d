"""matmul_all_to_all and all_to_all_matmul between GPUs: the planned kernels, late ranks, graphs,
groups, an absent peer.

There are few variants, since most of the time here is compilation. ``test_all_to_all_matmul.py``
has tests of the second operator only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import backward, behaviour, gpu_behaviour, parity
from tests.support.matmul_cases import IN, OUT, Case
from tests.support.worlds import World, one_shot

from tileweave.planning.machine import H200
from tileweave.planning.matmul import plan_all_to_all_matmul, plan_matmul_all_to_all
from tileweave.planning.problem import MatmulConfig, Problem

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
PLANNERS = {OUT: plan_matmul_all_to_all, IN: plan_all_to_all_matmul}
PATHS = {
    op: planner(Problem(4, 520, 512, 256, 2, "float16"), H200, False).path
    for op, planner in PLANNERS.items()
}
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's")

TRITON = MatmulConfig("triton", "sm", 64, 128, 64, 3, 4)
TRITON_COPIED = replace(TRITON, transport="copy_engine", num_slices=2)
HOPPER = MatmulConfig("hopper", "sm", 128, 128, 64, 4, 8)
COPIED = replace(HOPPER, transport="copy_engine", num_slices=4)
LIBRARY = MatmulConfig("library", "sm", 16, 128, 64, 1, 8)
each_kernel = pytest.mark.parametrize(
    ("op", "config"),
    [
        *((op, config) for op in (OUT, IN) for config in (TRITON, TRITON_COPIED)),
        *(
            pytest.param(op, config, marks=on_hopper)
            for op in (OUT, IN)
            for config in (HOPPER, COPIED)
        ),
        *((op, LIBRARY) for op in (OUT, IN)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.kernel}-{value.transport}",
)
both = pytest.mark.parametrize("op", [OUT, IN])
HOWS = [(0, 0), (0, 1), (1, 0), (1, 1)]
ULYSSES = {OUT: (1, 0), IN: (0, 1)}


def case(
    op: str,
    rows: int,
    cols: int,
    depth: int,
    dtype: str = "bfloat16",
    how: tuple[int, int] | None = None,
    **more: bool,
) -> Case:
    return Case(rows, cols, depth, dtype, op=op, how=how or ULYSSES[op], **more)


@each_kernel
def test_parity(largest: World, op: str, config: MatmulConfig) -> None:
    """Odd rows, large parts, and columns and depths that tiles do not divide. Integers must be
    exact."""
    shapes = ((63, 320, 256), (1024, 640, 512), (1021, 200, 200))
    cases = [
        case(op, *shape, how=how, bias=True, integers=n != 1)
        for n, shape in enumerate(shapes)
        for how in HOWS
    ]
    largest.run(parity.parity, cases, config, timeout=250)


@both
def test_parity_in_each_world(world: World, op: str) -> None:
    cases = [case(op, rows, 256, 256, "float16", integers=rows == 48) for rows in (48, 160)]
    world.run(parity.parity, cases, COPIED if IS_HOPPER else TRITON, timeout=120)


@both
def test_public_calls(largest: World, op: str) -> None:
    cases = [case(op, 16, 512, 256, bias=True), case(op, 520, 512, 256, "float16", bias=True)]
    largest.run(behaviour.public_calls, cases, PATHS[op], timeout=120)
    largest.run(behaviour.public_calls, [case(op, 16, 64, 100, "float32", bias=True)], "unfused")


@both
def test_dimensions(largest: World, op: str) -> None:
    largest.run(behaviour.many_dimensions, case(op, 48, 256, 128, bias=True), timeout=120)
    largest.run(behaviour.empty_dimensions, "bfloat16", op, ULYSSES[op])


@both
def test_same_bits_on_every_call(largest: World, op: str) -> None:
    largest.run(behaviour.same_bits_twice, case(op, 520, 512, 256), timeout=120)


@each_kernel
def test_many_calls_with_late_ranks(largest: World, op: str, config: MatmulConfig) -> None:
    cases = [
        case(op, rows, 256, 128, how=how)
        for rows, how in ((16, (1, 0)), (64, (0, 1)), (160, (0, 0)), (128, (1, 1)))
    ]
    largest.run(parity.many_calls, cases, config, 250, 0.0005, timeout=200)


@both
def test_the_epoch_wraps_around(largest: World, op: str) -> None:
    for config in (TRITON, TRITON_COPIED):
        largest.run(parity.calls_around_the_wrap, case(op, 64, 256, 128), config, timeout=120)


@both
def test_two_groups_on_two_streams(largest: World, op: str) -> None:
    largest.run(parity.two_groups, [0, 1], case(op, 64, 256, 128), TRITON_COPIED, 20, timeout=120)


@both
@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_replays_with_changing_inputs(largest: World, op: str, rows: int) -> None:
    largest.run(gpu_behaviour.replay_and_call, case(op, rows, 256, 128, bias=True), 60, timeout=200)


@both
def test_capture_without_warmup(largest: World, op: str) -> None:
    largest.run(gpu_behaviour.capture_without_warmup, case(op, 16, 64, 64), timeout=100)


@both
def test_gradients(largest: World, op: str) -> None:
    cases = [case(op, 64, 256, 128, how=how, bias=True) for how in HOWS]
    largest.run(backward.gradients, cases, timeout=120)
    largest.run(backward.gradients, cases[1:2], "xwb", "inductor", timeout=200)


@both
def test_opcheck(largest: World, op: str) -> None:
    largest.run(behaviour.opcheck, case(op, 16, 128, 64, bias=True), timeout=200)


@each_kernel
def test_a_peer_that_never_calls(op: str, config: MatmulConfig) -> None:
    ends = one_shot(
        "nccl", 2, gpu_behaviour.calls_without_peer, case(op, 128, 512, 256), config, 1, timeout=150
    )
    gpu_behaviour.check_timed_out(ends, op)
