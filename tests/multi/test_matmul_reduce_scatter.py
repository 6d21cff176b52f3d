"""matmul_reduce_scatter between GPUs: the planned kernels, late ranks, graphs, two groups, an
absent peer.

Each kernel compiles on each rank for each new config, world size, dtype and class of shape, which
is most of the time here, so there are few variants. Kernels are those of the plan, unless a test
says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import backward, behaviour, gpu_behaviour, parity
from tests.support.matmul_cases import RS, Case, has_kernel
from tests.support.worlds import World, gpu_ranks, one_shot

from tileweave.planning.machine import H200
from tileweave.planning.matmul import plan_matmul_reduce_scatter
from tileweave.planning.problem import MatmulConfig, Problem

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Where the plan has no measured config it says so, and the public calls below run unfused.
PATH = plan_matmul_reduce_scatter(Problem(4, 520, 512, 256, 2, "float16"), H200, False).path
fused = pytest.mark.skipif(
    not has_kernel(RS), reason="the kernel of matmul_reduce_scatter is not there"
)
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's")

TRITON = MatmulConfig("triton", "sm", 64, 128, 64, 3, 4)
HOPPER = MatmulConfig("hopper", "sm", 128, 128, 64, 4, 8)
COPIED = replace(HOPPER, transport="copy_engine", num_slices=2)
BY_SHARDS = MatmulConfig("library", "copy_engine", 16, 256, 64, 4, 8)
each_kernel = pytest.mark.parametrize(
    "config",
    [
        TRITON,
        BY_SHARDS,
        pytest.param(HOPPER, marks=on_hopper),
        pytest.param(COPIED, marks=on_hopper),
    ],
    ids=lambda config: f"{config.kernel}-{config.transport}",
)


def case(rows: int, cols: int, depth: int, dtype: str = "bfloat16", **more: bool) -> Case:
    return Case(rows, cols, depth, dtype, op=RS, **more)


# Rows of a shard, columns, K per rank. With 4 ranks M is 252, 4096, 2080 and 4 x 1021.
SHAPES = {
    "odd_rows": (63, 320, 256),
    "large": (1024, 1280, 1024),
    "odd_cols": (520, 1276, 256),
    "all_odd": (1021, 100, 200),
}


@fused
@each_kernel
def test_parity(largest: World, config: MatmulConfig) -> None:
    cases = [
        case(*shape, bias=True, integers=whole)
        for shape in SHAPES.values()
        for whole in (False, True)
    ]
    largest.run(parity.parity, cases, config, timeout=200)


@fused
def test_parity_in_each_world(world: World) -> None:
    cases = [case(rows, 256, 256, "float16", integers=rows == 48) for rows in (48, 160)]
    world.run(parity.parity, cases, HOPPER if IS_HOPPER else TRITON, timeout=120)


def test_public_calls(largest: World) -> None:
    several = (16, "bfloat16"), (520, "float16")
    cases = [case(rows, 512, 256, dtype, bias=True) for rows, dtype in several]
    largest.run(behaviour.public_calls, cases, PATH, timeout=120)
    # odd numbers of columns, for which cuBLAS is slow: the plan may be either
    cases = [case(rows, 508, 256, dtype, bias=True) for rows, dtype in several]
    largest.run(behaviour.public_calls, cases, None, timeout=120)
    largest.run(behaviour.public_calls, [case(16, 64, 100, "float32", bias=True)], "unfused")


def test_same_bits_on_every_call(largest: World) -> None:
    largest.run(behaviour.same_bits_twice, case(520, 512, 256), timeout=120)


def test_dimensions(largest: World) -> None:
    largest.run(behaviour.many_dimensions, case(48, 256, 128, bias=True), timeout=120)
    largest.run(behaviour.empty_dimensions, "bfloat16", RS)


# --- Time ---


@fused
@each_kernel
def test_many_calls_with_late_ranks(largest: World, config: MatmulConfig) -> None:
    cases = [case(rows, 256, 128) for rows in (16, 48, 64, 128)]
    largest.run(parity.many_calls, cases, config, 250, 0.0005, timeout=200)


@fused
def test_the_epoch_wraps_around(largest: World) -> None:
    largest.run(parity.calls_around_the_wrap, case(48, 256, 128), TRITON, timeout=120)


@fused
def test_two_groups_on_two_streams(largest: World) -> None:
    largest.run(parity.two_groups, [0, 1], case(48, 256, 128), TRITON, 20, timeout=120)


# --- Graphs ---


@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_replays_with_changing_inputs(largest: World, rows: int) -> None:
    largest.run(gpu_behaviour.replay_and_call, case(rows, 256, 128, bias=True), 60, timeout=200)


@fused
def test_capture_without_warmup(largest: World) -> None:
    largest.run(gpu_behaviour.capture_without_warmup, case(16, 64, 64), timeout=100)


# --- Gradients, compilers, modules ---


def test_gradients(largest: World) -> None:
    cases = [case(64, 256, 128, bias=True)]
    largest.run(backward.gradients, cases, timeout=120)
    largest.run(backward.gradients, cases, "xwb", "inductor", timeout=200)


def test_opcheck(largest: World) -> None:
    largest.run(behaviour.opcheck, case(16, 128, 64, bias=True), timeout=200)


@pytest.mark.own_gpu  # torch's gather of a whole DTensor crashes with gloo
def test_row_parallel_linear(largest: World) -> None:
    largest.run(behaviour.row_parallel_linear, case(64, 256, 128, bias=True), timeout=100)


@pytest.mark.own_gpu
def test_tensor_parallel_block() -> None:
    """The example on GPUs: the same losses in parallel and on one device."""
    output = behaviour.run_example(
        "tensor_parallel_block.py", "--hidden", "1024", "--tokens", "256", on_gpu=True, seconds=200
    )
    assert "WRONG" not in output


# --- An absent peer ---


@fused
@each_kernel
def test_a_peer_that_never_calls(config: MatmulConfig) -> None:
    ends = one_shot(
        "nccl", 2, gpu_behaviour.calls_without_peer, case(64, 512, 256), config, 1, timeout=150
    )
    gpu_behaviour.check_timed_out(ends, RS)


@fused
@on_hopper
@pytest.mark.skipif(gpu_ranks() < 3, reason="with two ranks there is only one peer")
def test_absent_rank_is_named_by_all() -> None:
    """Copies of present ranks are delayed, too: no wait for one of them may time out first."""
    size = min(gpu_ranks(), 4)
    ends = one_shot(
        "nccl",
        size,
        gpu_behaviour.calls_without_peer,
        case(1024, 1280, 256),
        COPIED,
        1,
        timeout=150,
    )
    gpu_behaviour.check_timed_out(ends, RS)


def test_mismatched_calls_raise_on_every_rank(largest: World) -> None:
    texts = largest.run(behaviour.mismatch_error, RS)
    assert len(set(texts)) == 1
    if largest.size > 2:  # of two ranks, either may be named as the odd one
        assert "rank 1" in texts[0]
