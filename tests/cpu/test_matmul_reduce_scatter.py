"""matmul_reduce_scatter in CPU worlds, interpreted where its plan is fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import backward, behaviour, parity
from tests.support.delays import stall_in_the_kernel
from tests.support.matmul_cases import RS, Case, has_kernel, prepare
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig

PATH = "fused" if has_kernel(RS) else "unfused"


def case(rows: int, cols: int, depth: int, dtype: str = "float32", **more: bool) -> Case:
    return Case(rows, cols, depth, dtype, op=RS, **more)


PUBLIC = [
    case(5, 17, 70, bias=True),
    case(64, 9, 40),
    case(12, 1, 16, "float16", bias=True, integers=True),
    case(1, 9, 100, "bfloat16"),
    case(3, 35, 8, "bfloat16", bias=True, integers=True),
]


def test_public_calls(world: World) -> None:
    world.run(behaviour.public_calls, PUBLIC, PATH)


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(behaviour.public_calls, PUBLIC, "local")


def test_subgroups(worlds: Worlds) -> None:
    worlds("gloo", 4).run(behaviour.public_calls_in_a_subgroup, [1, 3], case(6, 18, 40, bias=True))


def test_many_dimensions(world: World) -> None:
    world.run(behaviour.many_dimensions, case(12, 10, 32, bias=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_empty_dimensions(worlds: Worlds, dtype: str) -> None:
    worlds("gloo", 3).run(behaviour.empty_dimensions, dtype, RS)


def test_weight_in_a_larger_tensor(worlds: Worlds) -> None:
    worlds("gloo", 3).run(behaviour.weight_in_a_larger_tensor, case(6, 20, 40, bias=True))


def test_same_bits_on_every_call(world: World) -> None:
    world.run(behaviour.same_bits_twice, case(7, 18, 40, "float16", bias=True))


def many_shapes(me: Member) -> None:
    """Random shapes, the same on every rank."""

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(
        st.integers(0, 9), st.integers(0, 40), st.integers(0, 70), st.booleans(), st.integers(0, 99)
    )
    def try_one(rows: int, cols: int, depth: int, bias: bool, seed: int) -> None:
        call = prepare(
            case(rows, cols, depth, bias=bias, integers=True),
            me.rank,
            me.world_size,
            me.device,
            seed,
        )
        call.verify(f"rank {me.rank}", tw.matmul_reduce_scatter(call.x, call.w, call.bias))

    try_one()


def test_many_shapes(worlds: Worlds) -> None:
    worlds("gloo", 2).run(many_shapes)


# --- Gradients and tools ---


def differentiated(dtype: str) -> list[Case]:
    return [case(rows, 18, 40, dtype, bias=bias) for rows, bias in ((7, True), (20, False))]


def test_gradients(world: World) -> None:
    world.run(backward.gradients, differentiated("float32"))


def test_gradients_in_half_precision(worlds: Worlds) -> None:
    worlds("gloo", 3).run(backward.gradients, differentiated("float16"))


@pytest.mark.parametrize("wanted", ["x", "w", "b", "xb", "wb", "xw"])
def test_gradients_of_some_inputs(worlds: Worlds, wanted: str) -> None:
    worlds("gloo", 3).run(backward.gradients, [case(7, 18, 40, bias=True)], wanted)


def test_gradients_in_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(backward.gradients, [case(7, 18, 40, bias=True)])


def test_backward_sends_nothing_but_the_fused_dual(worlds: Worlds) -> None:
    """dgrad passes the gathered gradient on to wgrad and to the bias."""
    worlds("gloo", 3).run(backward.backward_collectives, case(7, 18, 40, bias=True), {}, 3 * 7 * 40)


def finite_differences(me: Member) -> None:
    """The reference itself against finite differences in fp64: torch's gradcheck, through a sum
    over ranks."""
    call = prepare(case(2, 3, 4, bias=True), me.rank, me.world_size, me.device, 1)
    weights = torch.randn(
        2, 3, generator=torch.Generator().manual_seed(me.rank), dtype=torch.float64
    )

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = reference.matmul_reduce_scatter(x, w, call.bias.double(), dist.group.WORLD)
        return collectives.all_reduce((y * weights).sum().view(1), dist.group.WORLD)

    x, w = call.x.double(), call.w.double()
    leaves = [call.x.clone().requires_grad_(), call.w.clone().requires_grad_()]
    (tw.matmul_reduce_scatter(*leaves, call.bias) * weights.float()).sum().backward()
    step = 1e-6
    for which, leaf in enumerate(leaves):
        # one rank changes one number, all ranks see their loss change
        for owner in range(me.world_size):
            for index in range(leaf.numel()):
                sides = []
                for sign in (1, -1):
                    moved = [x.clone(), w.clone()]
                    if me.rank == owner:
                        moved[which].view(-1)[index] += sign * step
                    sides.append(loss(*moved))
                slope = ((sides[0] - sides[1]) / (2 * step)).item()
                if me.rank == owner:
                    assert abs(leaf.grad.view(-1)[index].item() - slope) < 1e-4, (
                        f"operand {which}, element {index}"
                    )


def test_finite_differences(worlds: Worlds) -> None:
    worlds("gloo", 2).run(finite_differences)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients(worlds: Worlds, backend: str) -> None:
    worlds("gloo", 2).run(backward.gradients, [case(7, 18, 40, bias=True)], "xwb", backend)


def test_compiled_with_changing_rows(worlds: Worlds) -> None:
    worlds("gloo", 2).run(
        behaviour.compiled_with_changing_rows, case(7, 18, 40, bias=True), "aot_eager"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(behaviour.opcheck, case(6, 18, 40, bias=True), timeout=100)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_row_parallel_linear(world: World, bias: bool) -> None:
    world.run(behaviour.row_parallel_linear, case(7, 18, 40, bias=bias))


# --- Bad input ---

WRONG = {
    "rows_do_not_divide": (((5, 8), (6, 8), None, None), r"5 rows over 2 ranks"),
    "k_differs": (((4, 8), (6, 9), None, None), r"4, 8.*6, 9"),
    "bias_is_too_long": (((4, 8), (6, 8), (7,), None), r"7,.*6,"),
    "out_is_not_scattered": (((4, 8), (6, 8), None, (4, 6)), r"out.*2, 6"),
    "out_lost_a_dimension": (((4, 3, 8), (6, 8), None, (6, 6)), "out"),
    "three_dimensions_do_not_divide": (((3, 2, 8), (6, 8), None, None), r"3 rows over 2 ranks"),
    "one_dimension": (((8,), (6, 8), None, None), r"\(8,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(worlds: Worlds, name: str) -> None:
    (x, w, bias, out), pattern = WRONG[name]
    worlds("gloo", 2).run(
        behaviour.check_refusal, RS, {"x": x, "w": w, "bias": bias, "out": out}, pattern
    )


def test_out_in_an_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(behaviour.check_alias_is_refused, RS, (8, 8), (4, 8), (4, 4))


def test_mismatched_calls_raise_on_every_rank(worlds: Worlds) -> None:
    texts = worlds("gloo", 3).run(behaviour.mismatch_error, RS)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0] and RS in texts[0]


# --- The protocol, with the fused kernel ---

fused = pytest.mark.skipif(
    not has_kernel(RS), reason="the kernel of matmul_reduce_scatter is not there"
)
SM = MatmulConfig("triton", "sm", 16, 32, 16, 1, 4, group_m=2)
COPY_ENGINE = MatmulConfig("triton", "copy_engine", 16, 32, 16, 1, 4, group_m=2, num_slices=4)
transports = pytest.mark.parametrize(
    "config", [SM, COPY_ENGINE], ids=lambda config: config.transport
)
# only for tiles that span shards: interpreted programs run one after the other, and other tiles
# wait for any program of a peer
PROGRAMS = 5

SHAPES = {
    "one_of_all": (1, 1, 1),
    "odd": (5, 17, 70),
    "a_row": (1, 70, 33),
    "a_column": (19, 1, 48),
    "exact": (16, 64, 32),
    "ragged_tiles": (20, 40, 50),
    "tall": (35, 3, 20),
    "deep": (3, 35, 200),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@fused
@transports
@pytest.mark.parametrize("size", [2, 3, 4])
@shapes
def test_parity(
    worlds: Worlds, size: int, config: MatmulConfig, shape: tuple[int, int, int]
) -> None:
    cases = [case(*shape, bias=True), case(*shape, "float16", integers=True)]
    spans = config.transport == "sm" and shape[0] < config.tile_m
    worlds("gloo", size).run(parity.parity, cases, config, PROGRAMS if spans else None)


BY_SHARDS = MatmulConfig("library", "copy_engine", 16, 32, 16, 1, 4)


@fused
@pytest.mark.parametrize("size", [2, 3])
def test_by_shards(worlds: Worlds, size: int) -> None:
    """cuBLAS multiplies the rows of one rank at a time."""
    cases = [
        case(20, 40, 50, bias=True),
        case(5, 17, 70, "float16", integers=True),
        case(33, 9, 24, "bfloat16", bias=True),
    ]
    worlds("gloo", size).run(parity.parity, cases, BY_SHARDS)
    worlds("gloo", size).run(parity.many_calls, cases[:1], BY_SHARDS, 12, 0.004)


@fused
def test_sums_by_shards_are_in_rank_order(worlds: Worlds) -> None:
    """So that a sum does not depend on which rank has it."""
    worlds("gloo", 3).run(behaviour.sums_in_rank_order, RS, BY_SHARDS)


def in_kept_memory(me: Member, config: MatmulConfig) -> list[float]:
    """Calls of a size after inference_mode, and after a larger size, store in the memory of the
    first one."""
    w, found = torch.ones(24, 8), []
    with choices.forced(RS, config):
        with torch.inference_mode():
            tw.matmul_reduce_scatter(torch.ones(32 * me.world_size, 8), w)
        for rows in (32, 80, 32):
            x = torch.arange(float(rows * me.world_size)).view(-1, 1).expand(-1, 8).contiguous()
            y = tw.matmul_reduce_scatter(x, w)
            want = x.chunk(me.world_size)[me.rank][:, :1] * 8 * me.world_size
            found.append((y - want).abs().max().item())
    return found


@fused
@pytest.mark.parametrize("config", [BY_SHARDS, replace(BY_SHARDS, kernel="triton")], ids=str)
def test_staging_is_kept(worlds: Worlds, config: MatmulConfig) -> None:
    assert worlds("gloo", 2).run(in_kept_memory, config) == [[0.0] * 3] * 2


@fused
@transports
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(worlds: Worlds, config: MatmulConfig, dtype: str) -> None:
    cases = [case(9, 33, 50, dtype, bias=True), case(18, 9, 90, dtype, integers=True)]
    worlds("gloo", 4).run(parity.parity, cases, config)


@fused
@transports
def test_many_calls_with_late_ranks(world: World, config: MatmulConfig) -> None:
    cases = [case(5, 17, 24), case(1, 20, 33), case(12, 9, 60), case(18, 7, 20, bias=True)]
    count = {2: 20, 3: 12, 4: 8}[world.size]
    world.run(
        parity.many_calls,
        cases,
        replace(config, tile_k=64),
        count,
        0.004,
        None,
        stall_in_the_kernel,
    )


@fused
@transports
def test_the_epoch_wraps_around(world: World, config: MatmulConfig) -> None:
    world.run(parity.calls_around_the_wrap, case(18, 20, 40), config)


@fused
@transports
@pytest.mark.parametrize(("size", "members"), [(3, [0, 1]), (4, [1, 3])])
def test_two_groups_at_once(
    worlds: Worlds, config: MatmulConfig, size: int, members: list[int]
) -> None:
    worlds("gloo", size).run(parity.two_groups, members, case(7, 18, 40, bias=True), config, 7)


@fused
@transports
def test_a_subgroup(worlds: Worlds, config: MatmulConfig) -> None:
    worlds("gloo", 4).run(parity.subgroup, [0, 2, 3], case(20, 18, 40), config)
