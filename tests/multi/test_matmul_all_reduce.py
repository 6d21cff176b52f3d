"""matmul_all_reduce between GPUs: the planned kernels, late ranks, graphs, two groups, an absent
peer.

Each kernel compiles on each rank for each new config, world size, dtype and class of shape, which
is most of the time here, so there are few variants. Kernels are those of the plan, unless a test
says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import backward, behaviour, gpu_behaviour, parity
from tests.support.matmul_cases import AR, Case, has_kernel
from tests.support.worlds import Member, World, one_shot

from tileweave.planning.choices import forced
from tileweave.planning.problem import MatmulConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

PATH = "fused" if has_kernel(AR) else "unfused"
fused = pytest.mark.skipif(
    not has_kernel(AR), reason="the kernel of matmul_all_reduce is not there"
)

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's")

LIBRARY = MatmulConfig("library", "sm", 16, 256, 64, 1, 8, split_tail=False)
ONE_SHOT = MatmulConfig("triton", "sm", 16, 64, 128, 5, 4, shots=1)


def case(rows: int, cols: int, depth: int, dtype: str = "bfloat16", **more: bool) -> Case:
    return Case(rows, cols, depth, dtype, op=AR, **more)


FULL = {"bias": True, "residual": True, "norm": True}
# Rows, columns, K per rank: decoding with one row and with many, then shapes of two steps, and odd
# sizes.
SHAPES = {
    "a_row": (1, 1024, 512),
    "sixteen": (16, 1024, 512),
    "two_shot": (256, 1024, 256),
    "all_odd": (77, 100, 200),
}


@fused
def test_parity(largest: World) -> None:
    cases = [case(*shape, **FULL) for shape in SHAPES.values()] + [
        case(*shape, integers=True) for shape in SHAPES.values()
    ]
    largest.run(parity.parity, cases, LIBRARY, timeout=200)


@fused
@pytest.mark.parametrize(
    ("tile_n", "team"), [(64, 1), (32, 1), (64, 4)], ids=["w first", "x first", "teams"]
)
def test_parity_of_one_shot(largest: World, tile_n: int, team: int) -> None:
    config = replace(ONE_SHOT, tile_n=tile_n, team=team)
    shapes = [shape for shape in SHAPES.values() if shape[0] <= ONE_SHOT.tile_m]
    cases = [case(*shape, **more) for shape in shapes for more in (FULL, {"integers": True})]
    largest.run(parity.parity, cases, config, timeout=200)
    largest.run(parity.many_calls, cases[::2], config, 250, 0.0005, timeout=200)


BY_TILES = MatmulConfig("hopper", "copy_engine", 128, 256, 64, 4, 8, num_slices=4, split_tail=False)


def tile_kernels() -> list[object]:
    square = replace(BY_TILES, tile_n=128, num_stages=6, num_slices=2)
    plain = replace(square, kernel="triton", num_stages=3)
    ids = "wide", "square", "triton"
    marks = on_hopper, on_hopper, ()
    configs = BY_TILES, square, plain
    return [pytest.param(c, marks=m, id=i) for c, m, i in zip(configs, marks, ids, strict=True)]


@fused
@pytest.mark.parametrize("config", tile_kernels())
def test_parity_by_tiles(largest: World, config: MatmulConfig) -> None:
    """Rows that the ranks divide and others, columns that TMA stores and others."""
    shapes = (2048, 1024, 512), (1537, 512, 256), (1027, 520, 200), (1026, 516, 72)
    cases = [case(*shape, **more) for shape in shapes for more in (FULL, {"integers": True})]
    largest.run(parity.parity, cases, config, timeout=200)
    largest.run(parity.many_calls, cases[::2], config, 60, 0.0005, timeout=200)


def replay_forced(me: Member, of: Case, config: MatmulConfig, replays: int) -> None:
    with forced(AR, config):
        gpu_behaviour.replay_and_call(me, of, replays)


@fused
@on_hopper
def test_replays_by_tiles(largest: World) -> None:
    largest.run(replay_forced, case(1301, 512, 128, **FULL), BY_TILES, 40, timeout=200)


@fused
def test_parity_in_each_world(world: World) -> None:
    cases = [case(rows, 256, 256, "float16", integers=rows == 48) for rows in (4, 48)]
    world.run(parity.parity, cases, LIBRARY, timeout=120)


def test_public_calls(largest: World) -> None:
    cases = [
        case(1, 512, 256, **FULL),
        case(16, 512, 256, bias=True),
        case(200, 512, 256, "float16", **FULL),
    ]
    largest.run(behaviour.public_calls, cases, PATH, timeout=120)
    largest.run(behaviour.public_calls, [case(16, 64, 100, "float32", **FULL)], "unfused")


@pytest.mark.parametrize("rows", [1, 200])
def test_same_bits_on_every_call(largest: World, rows: int) -> None:
    largest.run(behaviour.same_bits_twice, case(rows, 512, 256, **FULL), timeout=120)


def test_dimensions(largest: World) -> None:
    largest.run(behaviour.many_dimensions, case(48, 256, 128, **FULL), timeout=120)
    largest.run(behaviour.empty_dimensions, "bfloat16", AR)


# --- Time ---


@fused
def test_many_calls_with_late_ranks(largest: World) -> None:
    cases = [case(rows, 256, 128) for rows in (1, 7, 64, 128)]
    largest.run(parity.many_calls, cases, LIBRARY, 250, 0.0005, timeout=200)


@fused
@pytest.mark.parametrize("rows", [1, 128])
def test_the_epoch_wraps_around(largest: World, rows: int) -> None:
    largest.run(parity.calls_around_the_wrap, case(rows, 256, 128), LIBRARY, timeout=120)


@fused
def test_two_groups_on_two_streams(largest: World) -> None:
    largest.run(parity.two_groups, [0, 1], case(16, 256, 128), LIBRARY, 20, timeout=120)


# --- Graphs ---


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_replays_with_changing_inputs(largest: World, rows: int) -> None:
    largest.run(gpu_behaviour.replay_and_call, case(rows, 256, 128, **FULL), 60, timeout=200)


@fused
def test_capture_without_warmup(largest: World) -> None:
    largest.run(gpu_behaviour.capture_without_warmup, case(16, 64, 64), timeout=100)


# --- Gradients, compilers, modules ---


def test_gradients(largest: World) -> None:
    cases = [case(64, 256, 128, bias=True), case(64, 256, 128, **FULL)]
    largest.run(backward.gradients, cases, timeout=120)
    largest.run(backward.gradients, cases[1:], "xwbrn", "inductor", timeout=200)


def test_opcheck(largest: World) -> None:
    largest.run(behaviour.opcheck, case(16, 128, 64, **FULL), timeout=200)


@pytest.mark.own_gpu  # torch's gather of a whole DTensor crashes with gloo
def test_row_parallel_linear(largest: World) -> None:
    largest.run(behaviour.row_parallel_linear, case(64, 256, 128, bias=True), timeout=100)


# --- An absent peer ---


@fused
@pytest.mark.parametrize(
    ("rows", "config"),
    [(1, LIBRARY), (256, LIBRARY), pytest.param(1025, BY_TILES, marks=on_hopper)],
    ids=["one", "many", "by_tiles"],
)
def test_a_peer_that_never_calls(rows: int, config: MatmulConfig) -> None:
    ends = one_shot(
        "nccl", 2, gpu_behaviour.calls_without_peer, case(rows, 512, 256), config, 1, timeout=150
    )
    gpu_behaviour.check_timed_out(ends, AR)


def test_mismatched_calls_raise_on_every_rank(largest: World) -> None:
    texts = largest.run(behaviour.mismatch_error, AR)
    assert len(set(texts)) == 1
    if largest.size > 2:  # of two ranks, either may be named as the odd one
        assert "rank 1" in texts[0]
