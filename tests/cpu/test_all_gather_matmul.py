"""all_gather_matmul in CPU worlds: the real kernel, interpreted, over shared host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import backward, behaviour, parity
from tests.support.delays import slow_copies, stall_in_the_copy_engine, stall_in_the_kernel
from tests.support.matmul_cases import RS, Case, has_kernel
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.matmul.concurrent_gather import begin_gather, gather_of
from tileweave.ops.matmul.cublas import multiply_shards
from tileweave.ops.matmul.products import Plain
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.protocol import TIMEOUT_US

SM = MatmulConfig("triton", "sm", 16, 32, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
COPY_ENGINE = MatmulConfig(
    "triton", "copy_engine", 16, 32, 16, 1, 4, group_m=2, num_slices=4, num_producers=1
)

transports = pytest.mark.parametrize(
    "config", [SM, COPY_ENGINE], ids=lambda config: config.transport
)
# one program computes all tiles whole; five leave remaining tiles, which are cut along K
PROGRAMS = 5

SHAPES = {
    "one_of_all": (1, 1, 1),
    "odd": (5, 17, 70),
    "a_row": (1, 70, 33),
    "a_column": (19, 1, 48),
    "exact": (16, 64, 32),
    "under_a_tile": (7, 40, 100),
    "ragged_tiles": (20, 40, 50),
    "tall": (35, 3, 20),
    "deep": (3, 35, 200),
}


shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def cases_of(shape: tuple[int, int, int]) -> list[Case]:
    return [
        Case(*shape, "float32", bias=True, gathered=True),
        Case(*shape, "float16", integers=True),
    ]


@transports
@pytest.mark.parametrize("size", [2, 4])
@shapes
def test_parity(
    worlds: Worlds, size: int, config: MatmulConfig, shape: tuple[int, int, int]
) -> None:
    worlds("gloo", size).run(parity.parity, cases_of(shape), config, PROGRAMS)


@transports
@shapes
def test_parity_by_one_program(
    worlds: Worlds, config: MatmulConfig, shape: tuple[int, int, int]
) -> None:
    worlds("gloo", 3).run(parity.parity, cases_of(shape), config)


@transports
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(world: World, config: MatmulConfig, dtype: str) -> None:
    world.run(
        parity.parity,
        [Case(9, 33, 50, dtype, bias=True), Case(18, 9, 90, dtype, integers=True)],
        config,
        3,
    )


LIBRARY = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
BY_SHARDS = MatmulConfig("library", "copy_engine", 16, 32, 64, 1, 4)
OTHERS = {
    "library": LIBRARY,
    "by_shards": BY_SHARDS,
    "one_slice": MatmulConfig(
        "triton", "sm", 32, 64, 64, 1, 4, group_m=8, num_slices=1, num_producers=1
    ),
    "all_slices": MatmulConfig(
        "triton", "sm", 64, 16, 32, 1, 4, group_m=1, num_slices=32, num_producers=1
    ),
    "no_split": MatmulConfig(
        "triton", "copy_engine", 16, 32, 128, 1, 4, group_m=3, split_tail=False
    ),
    "bands": replace(COPY_ENGINE, band_sources=2, cut_bands=True),
    "teams": replace(COPY_ENGINE, band_sources=8, team=2),
    "own_anywhere": replace(COPY_ENGINE, band_sources=2, cut_bands=True, team=2, own_first=False),
    "bands_by_sm": replace(SM, band_sources=2, cut_bands=True, team=2),
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_other_configurations(worlds: Worlds, config: MatmulConfig) -> None:
    worlds("gloo", 4).run(
        parity.parity, [Case(20, 40, 150, gathered=True, bias=True), Case(2, 5, 200)], config, 4
    )


# --- Time: late ranks, ranks that run ahead, long runs ---


# Rows, columns, K and options change from call to call. A shard of 7200 elements is sent in four
# slices.
PUSHED = [
    Case(5, 17, 24),
    Case(1, 20, 33),
    Case(12, 9, 600, gathered=True),
    Case(18, 7, 20, bias=True),
]
COPIED = [
    Case(16, 17, 24),
    Case(17, 20, 33),
    Case(20, 9, 50, gathered=True),
    Case(18, 7, 20, bias=True),
]


@pytest.mark.parametrize(
    ("config", "cases", "stall"),
    [
        (SM, PUSHED, stall_in_the_kernel),
        (COPY_ENGINE, COPIED, stall_in_the_copy_engine),
        (LIBRARY, PUSHED, stall_in_the_kernel),
        (BY_SHARDS, COPIED, stall_in_the_copy_engine),
    ],
    ids=["sm", "copy_engine", "library", "by_shards"],
)
def test_many_calls_with_late_ranks(
    world: World, config: MatmulConfig, cases: list[Case], stall: object
) -> None:
    count = {2: 20, 3: 12, 4: 8}[world.size]
    world.run(parity.many_calls, cases, replace(config, tile_k=64), count, 0.004, 2, stall)


@pytest.mark.parametrize("config", [COPY_ENGINE, BY_SHARDS], ids=lambda config: config.kernel)
def test_a_slow_copy_engine(world: World, config: MatmulConfig) -> None:
    """Copies that take much longer than the kernel: the kernel must not advance the epoch that they
    still have to send."""
    world.run(
        parity.many_calls, [Case(1, 3, 16), Case(2, 5, 16)], config, 10, 0.1, None, slow_copies
    )


@pytest.mark.parametrize(
    "config", [SM, COPY_ENGINE, BY_SHARDS], ids=lambda config: f"{config.kernel}-{config.transport}"
)
def test_the_epoch_wraps_around(world: World, config: MatmulConfig) -> None:
    world.run(parity.calls_around_the_wrap, Case(18, 20, 40), config)


# --- Groups ---


@transports
@pytest.mark.parametrize(("size", "members"), [(3, [0, 1]), (4, [0, 1]), (4, [1, 3])])
def test_two_groups_at_once(
    worlds: Worlds, config: MatmulConfig, size: int, members: list[int]
) -> None:
    worlds("gloo", size).run(parity.two_groups, members, Case(7, 18, 40, bias=True), config, 7)


@transports
@pytest.mark.parametrize(("size", "members"), [(3, [1, 2]), (4, [1, 3]), (4, [0, 2, 3])])
def test_subgroups(worlds: Worlds, config: MatmulConfig, size: int, members: list[int]) -> None:
    worlds("gloo", size).run(parity.subgroup, members, Case(20, 18, 40, gathered=True), config)


def test_subgroups_through_the_public_call(worlds: Worlds) -> None:
    worlds("gloo", 4).run(behaviour.public_calls_in_a_subgroup, [1, 3], Case(6, 18, 40, bias=True))


# --- The public call ---

PUBLIC = [
    Case(5, 17, 70, bias=True),
    Case(64, 9, 40),  # enough rows for the copy engine
    Case(12, 1, 16, "float16", bias=True),
    Case(1, 9, 100, "bfloat16"),
]


def test_public_calls(world: World) -> None:
    world.run(behaviour.public_calls, PUBLIC, "fused")


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(behaviour.public_calls, PUBLIC, "local")


def test_many_dimensions(world: World) -> None:
    world.run(behaviour.many_dimensions, Case(12, 10, 32, bias=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_empty_dimensions(world: World, dtype: str) -> None:
    world.run(behaviour.empty_dimensions, dtype)


def test_close_frees_at_once(world: World) -> None:
    world.run(behaviour.close_frees_at_once, Case(6, 20, 40, bias=True))


def test_weight_in_a_larger_tensor(world: World) -> None:
    world.run(behaviour.weight_in_a_larger_tensor, Case(6, 20, 40, bias=True))


# --- Gradients and tools ---


def differentiated(dtype: str) -> list[Case]:
    given = ((7, True, False), (20, False, False), (7, True, True), (20, False, True))
    return [
        Case(rows, 18, 40, dtype, bias=bias, gathered=gathered) for rows, bias, gathered in given
    ]


def test_gradients(world: World) -> None:
    world.run(backward.gradients, differentiated("float32"))


def test_gradients_in_half_precision(worlds: Worlds) -> None:
    worlds("gloo", 3).run(backward.gradients, differentiated("float16"))


@pytest.mark.parametrize("wanted", ["x", "w", "b", "xb", "wb"])
def test_gradients_of_some_inputs(worlds: Worlds, wanted: str) -> None:
    worlds("gloo", 3).run(
        backward.gradients,
        [Case(7, 18, 40, bias=True, gathered=kept) for kept in (False, True)],
        wanted,
    )


def test_gradients_in_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(
        backward.gradients, [Case(7, 18, 40, bias=True, gathered=kept) for kept in (False, True)]
    )


def test_backward_collectives(world: World) -> None:
    """Backward keeps the shard and gathers x again, by copy engines concurrently with a fused dual.
    Or it keeps the gathered input, and sends only gx."""
    case = Case(7, 18, 40, bias=True)
    fused = has_kernel(RS)
    sums, gathers = ({}, {}) if fused else ({"begin_reduce_scatter": 1}, {"begin_all_gather": 1})
    world.run(backward.backward_collectives, case, {**gathers, **sums}, 7 * 40)
    world.run(
        backward.backward_collectives, replace(case, gathered=True), sums, 7 * 40 * (1 + world.size)
    )


def gathers_without_rank_0(me: Member, by_shards: bool) -> None:
    """A concurrent gather is right twice. Then one rank is absent, and the others name it."""
    shards = [torch.full((3, 8), float(rank)) for rank in range(me.world_size)]

    def gather(scale: int) -> torch.Tensor:
        mine, name = scale * shards[me.rank], name_of(None)
        if not by_shards:
            return begin_gather(mine, name).wait()
        gathered, out = torch.empty(3 * me.world_size, 8), torch.empty(3 * me.world_size, 2)
        made = gather_of(workspace_of(name, me.device), (mine,))
        multiply_shards((mine,), Plain(torch.ones(2, 8), None), out, gathered, *made)
        return gathered

    for scale in (1, 2):
        assert torch.equal(gather(scale), scale * torch.cat(shards))
    me.barrier()
    if me.rank > 0:
        instance = workspace_of(name_of(None), me.device).instance("all_gather_matmul", "gather")
        instance.control[TIMEOUT_US] = 200_000
        with pytest.raises(tw.PeerTimeout, match="rank 0"):
            gather(1)
    me.barrier()
    tw.close()


@pytest.mark.parametrize("by_shards", [False, True], ids=["whole", "by_shards"])
def test_concurrent_gather_timeout_names_the_absent_rank(worlds: Worlds, by_shards: bool) -> None:
    worlds("gloo", 3).run(gathers_without_rank_0, by_shards)


def test_gradients_through_one_result(worlds: Worlds) -> None:
    worlds("gloo", 3).run(
        backward.gradients_through_one_result, Case(7, 18, 40, bias=True, gathered=True)
    )


def test_same_bits_on_every_call(worlds: Worlds) -> None:
    worlds("gloo", 3).run(behaviour.same_bits_twice, Case(7, 18, 40, "float16", bias=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients(worlds: Worlds, backend: str) -> None:
    cases = [Case(7, 18, 40, bias=True, gathered=kept) for kept in (False, True)]
    worlds("gloo", 2).run(backward.gradients, cases, "xwb", backend)


def test_compiled_with_changing_rows(worlds: Worlds) -> None:
    worlds("gloo", 2).run(
        behaviour.compiled_with_changing_rows, Case(7, 18, 40, bias=True), "aot_eager"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(behaviour.opcheck, Case(6, 18, 40, bias=True), timeout=100)


@pytest.mark.parametrize("save_gathered", [False, True], ids=["gather_again", "save_gathered"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_column_parallel_linear(world: World, bias: bool, save_gathered: bool) -> None:
    world.run(behaviour.column_parallel_linear, Case(7, 18, 40, bias=bias), save_gathered)
