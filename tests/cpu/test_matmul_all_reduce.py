"""matmul_all_reduce in CPU worlds, interpreted where its plan is fused."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import backward, behaviour, parity
from tests.support.calls import refusal
from tests.support.delays import stall_in_the_kernel
from tests.support.matmul_cases import AR, EPS, Case, has_kernel, prepare
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.ops import reference
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig

PATH = "fused" if has_kernel(AR) else "unfused"


def case(rows: int, cols: int, depth: int, dtype: str = "float32", **more: bool) -> Case:
    return Case(rows, cols, depth, dtype, op=AR, **more)


FULL = case(7, 18, 40, bias=True, residual=True, norm=True)
PUBLIC = [
    case(5, 17, 70, bias=True),
    case(1, 64, 40, bias=True, residual=True, norm=True),
    case(33, 9, 40, residual=True, integers=True),
    case(12, 16, 16, "float16", norm=True),
    case(2, 35, 8, "bfloat16", bias=True, residual=True, norm=True),
    case(1, 1, 9, "bfloat16", bias=True, integers=True),
]


def test_public_calls(world: World) -> None:
    world.run(behaviour.public_calls, PUBLIC, PATH)


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(behaviour.public_calls, PUBLIC, "local")


def test_subgroups(worlds: Worlds) -> None:
    worlds("gloo", 4).run(behaviour.public_calls_in_a_subgroup, [1, 3], FULL)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_many_dimensions(world: World, norm: bool) -> None:
    world.run(behaviour.many_dimensions, case(12, 10, 32, bias=True, residual=norm, norm=norm))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_empty_dimensions(worlds: Worlds, dtype: str) -> None:
    worlds("gloo", 3).run(behaviour.empty_dimensions, dtype, AR)


def test_weight_in_a_larger_tensor(worlds: Worlds) -> None:
    worlds("gloo", 3).run(behaviour.weight_in_a_larger_tensor, case(6, 20, 40, bias=True))


def test_same_bits_on_every_call(world: World) -> None:
    world.run(behaviour.same_bits_twice, replace(FULL, dtype="float16"))


def many_shapes(me: Member) -> None:
    """Random shapes, the same on every rank."""

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(
        st.integers(0, 9),
        st.integers(1, 40),
        st.integers(0, 70),
        st.booleans(),
        st.booleans(),
        st.integers(0, 99),
    )
    def try_one(rows: int, cols: int, depth: int, bias: bool, norm: bool, seed: int) -> None:
        drawn = case(
            rows, cols, depth, bias=bias, residual=seed % 2 == 1, norm=norm, integers=not norm
        )
        call = prepare(drawn, me.rank, me.world_size, me.device, seed)
        call.verify(f"rank {me.rank}", *behaviour.invoke(drawn, call.operands))

    try_one()


def test_many_shapes(worlds: Worlds) -> None:
    worlds("gloo", 2).run(many_shapes)


# --- Gradients and tools ---


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients(world: World, dtype: str) -> None:
    cases = [
        case(7, 18, 40, bias=True),
        FULL,
        case(20, 18, 40, residual=True),
        case(3, 18, 40, norm=True),
    ]
    world.run(backward.gradients, [replace(each, dtype=dtype) for each in cases])


@pytest.mark.parametrize("wanted", ["x", "w", "b", "r", "n", "xr", "wn", "bn"])
def test_gradients_of_some_inputs(worlds: Worlds, wanted: str) -> None:
    worlds("gloo", 3).run(backward.gradients, [FULL], wanted)


def test_gradients_through_one_result(worlds: Worlds) -> None:
    worlds("gloo", 3).run(backward.gradients_through_one_result, FULL)


def test_backward_sends_nothing(worlds: Worlds) -> None:
    """Backward keeps x, the weight, the weight of the norm and the input of the norm."""
    worlds("gloo", 3).run(backward.backward_collectives, FULL, {}, 7 * 40 + 7 * 18 + 18)


def finite_differences(me: Member) -> None:
    """The reference itself against finite differences in fp64, through the sum, the residual and
    the norm."""
    call = prepare(
        case(2, 3, 4, bias=True, residual=True, norm=True), me.rank, me.world_size, me.device, 1
    )
    c, d = (
        torch.randn(2, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for n in (0, 1)
    )
    names = call.operands.names()
    wide = {name: getattr(call.operands, name).double() for name in names}
    leaves = {name: getattr(call.operands, name).clone().requires_grad_() for name in names}
    y, kept = tw.matmul_all_reduce(**leaves, norm_eps=EPS)
    ((y * c.float()).sum() + (kept * d.float()).sum()).backward()
    step = 1e-6
    for name in names:
        for owner in range(me.world_size if name in ("x", "w") else 1):
            # a replicated number changes on every rank
            moves = me.rank == owner or name not in ("x", "w")
            for index in range(wide[name].numel()):
                losses = []
                for sign in (1, -1):
                    moved = {key: value.clone() for key, value in wide.items()}
                    moved[name].view(-1)[index] += sign * step * moves
                    x, w, bias = (moved.pop(key) for key in ("x", "w", "bias"))
                    y, kept = reference.matmul_all_reduce(
                        x, w, bias, dist.group.WORLD, **moved, norm_eps=EPS
                    )
                    losses.append(((y * c).sum() + (kept * d).sum()).item())
                slope = (losses[0] - losses[1]) / (2 * step)
                if moves:
                    got = leaves[name].grad.view(-1)[index].item()
                    assert abs(got - slope) < 2e-4 * (1 + abs(slope)), (
                        f"{name}, element {index}: {got}, {slope}"
                    )


def test_finite_differences(worlds: Worlds) -> None:
    worlds("gloo", 2).run(finite_differences)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients(worlds: Worlds, backend: str) -> None:
    worlds("gloo", 2).run(backward.gradients, [case(7, 18, 40, bias=True), FULL], "xwbrn", backend)


def test_compiled_with_changing_rows(worlds: Worlds) -> None:
    worlds("gloo", 2).run(
        behaviour.compiled_with_changing_rows, case(7, 18, 40, bias=True), "aot_eager"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(behaviour.opcheck, FULL, timeout=100)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_row_parallel_linear(world: World, bias: bool) -> None:
    world.run(behaviour.row_parallel_linear, case(7, 18, 40, bias=bias))


# --- Bad input ---

X, W, Y = (4, 8), (6, 8), (4, 6)
WRONG = {
    "k_differs": ({"w": (6, 9)}, r"4, 8.*6, 9"),
    "bias_is_too_long": ({"bias": (7,)}, r"7,.*6,"),
    "residual_is_transposed": ({"residual": (6, 4)}, r"residual \(6, 4\).*\(4, 6\)"),
    "residual_lost_a_dimension": ({"x": (2, 2, 8), "residual": Y}, "residual"),
    "norm_weight_is_too_short": ({"norm_weight": (5,)}, r"norm_weight \(5,\).*\(6,\)"),
    "out_is_transposed": ({"out": (6, 4)}, r"out.*4, 6"),
    "out_lost_a_dimension": ({"x": (2, 2, 8), "out": Y}, "out"),
    "out_of_two": ({"norm_weight": (6,), "out": Y}, "residual_out"),
    "residual_out_without_norm": ({"out": Y, "residual_out": Y}, "without norm_weight"),
    "residual_out_alone": ({"norm_weight": (6,), "residual_out": Y}, "residual_out"),
    "one_dimension": ({"x": (8,)}, r"\(8,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(worlds: Worlds, name: str) -> None:
    changes, pattern = WRONG[name]
    worlds("gloo", 2).run(behaviour.check_refusal, AR, {"x": X, "w": W, **changes}, pattern)


def test_out_in_an_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(behaviour.check_alias_is_refused, AR, (8, 8), (4, 8), (8, 4))


def results_in_one_place(me: Member) -> list[str]:
    """The error of two results with a norm, of which one overlaps an input, or the other result."""
    memory, (x, w, ones) = torch.zeros(256), (torch.zeros(4, 8), torch.zeros(6, 8), torch.ones(6))
    y, z, own = memory[:24].view(4, 6), memory[24:48].view(4, 6), torch.zeros(4, 6)
    calls: list[dict[str, torch.Tensor]] = [
        {"out": own, "residual_out": y, "residual": z},
        {"out": y, "residual_out": own, "residual": z},
        {"out": y, "residual_out": z},
    ]
    return [refusal(tw.matmul_all_reduce, x, w, norm_weight=ones, **given) for given in calls]


def test_overlapping_results_are_named(worlds: Worlds) -> None:
    wanted = [
        "residual_out= in the storage of an input",
        "out= in the storage of an input",
        "residual_out= in the storage of out=",
    ]
    for said in worlds("gloo", 2).run(results_in_one_place):
        for found, text in zip(said, wanted, strict=True):
            assert found.startswith(f"InputError: asked: {text}"), found


def what_eps_is(me: Member) -> dict[str, str]:
    x, w, ones = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    said = {
        str(eps): refusal(tw.matmul_all_reduce, x, w, norm_weight=ones, norm_eps=eps)
        for eps in (None, -1.0, math.nan, math.inf)
    }
    own = 1e-6 * (1 + me.rank)
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        said["of_no_norm"] = refusal(tw.matmul_all_reduce, x, w, norm_eps=own)
        said["differs"] = refusal(tw.matmul_all_reduce, x, w, norm_weight=ones, norm_eps=own)
        said["differs_from_a_mistake"] = refusal(
            tw.matmul_all_reduce, x, w, norm_weight=ones, norm_eps=-1.0 if me.rank else EPS
        )
    return said


def test_norm_eps_is_compared_between_ranks(worlds: Worlds) -> None:
    first, second = worlds("gloo", 2).run(what_eps_is)
    for said in (first, second):
        assert not said.pop("of_no_norm") and said.pop("differs").startswith("RankMismatchError")
    assert first.pop("differs_from_a_mistake").startswith("RankMismatchError")
    for said in (first, second):
        assert all(text.startswith("InputError: asked: norm_eps=") for text in said.values()), said


def test_mismatched_calls_raise_on_every_rank(worlds: Worlds) -> None:
    texts = worlds("gloo", 3).run(behaviour.mismatch_error, AR)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0] and AR in texts[0]


# --- The protocol, with the fused kernels ---

fused = pytest.mark.skipif(
    not has_kernel(AR), reason="the kernels of matmul_all_reduce are not there"
)
CONFIG = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
ONE_SHOT = MatmulConfig("triton", "sm", 16, 32, 16, 1, 4, shots=1)
PROGRAMS = 5
SHAPES = {
    "one_of_all": (1, 1, 1),
    "a_vector": (1, 70, 33),
    "sixteen": (16, 64, 32),
    "odd": (5, 17, 70),
    "two_shot": (67, 40, 50),
    "tall": (135, 3, 20),
    "deep": (3, 35, 200),
}


@fused
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parity(worlds: Worlds, size: int, shape: tuple[int, int, int]) -> None:
    cases = [
        case(*shape, bias=True, residual=True, norm=True),
        case(*shape, "float16", integers=True),
    ]
    worlds("gloo", size).run(parity.parity, cases, CONFIG, None if size == 3 else PROGRAMS)


@fused
@pytest.mark.parametrize("team", [1, 3])  # with a team of 3 some of SHAPES have fewer K blocks
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [s for s in SHAPES.values() if s[0] <= ONE_SHOT.tile_m], ids=str)
def test_parity_of_one_shot(
    worlds: Worlds, size: int, shape: tuple[int, int, int], team: int
) -> None:
    cases = [
        case(*shape, bias=True, residual=True, norm=True),
        case(*shape, "float16", integers=True),
    ]
    config = replace(ONE_SHOT, team=team, tile_n=ONE_SHOT.tile_n if team == 1 else 64)
    worlds("gloo", size).run(parity.parity, cases, config)


def amid_nan(rows: int, cols: int) -> torch.Tensor:
    """Random numbers, with NaN before and after them in memory."""
    memory = torch.full((rows * cols + 128,), math.nan)
    return memory[64 : 64 + rows * cols].view(rows, cols).normal_()


def one_shot_amid_nan(me: Member) -> None:
    for rows in (1, 5, ONE_SHOT.tile_m):
        x, w = amid_nan(rows, 13), amid_nan(20, 13)
        with choices.forced(AR, ONE_SHOT):
            y = tw.matmul_all_reduce(x, w)
        right, _ = reference.matmul_all_reduce(x, w, None, dist.group.WORLD)
        assert torch.allclose(y, right, atol=1e-5)


@fused
def test_one_shot_reads_nothing_but_its_operands(world: World) -> None:
    """K ends inside a block, whose other elements must not be multiplied, not even by zero."""
    world.run(one_shot_amid_nan)


@fused
@pytest.mark.parametrize("size", [2, 3])
def test_one_shot_after_cublas(worlds: Worlds, size: int) -> None:
    cases = [case(37, 24, 33, bias=True, residual=True, norm=True), case(1, 40, 8, "float16")]
    worlds("gloo", size).run(parity.parity, cases, replace(CONFIG, shots=1), PROGRAMS)


BY_TILES = MatmulConfig("triton", "copy_engine", 16, 32, 16, 1, 4, num_slices=3)


@fused
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_by_tiles(worlds: Worlds, size: int, slices: int) -> None:
    """Slices of whole tiles and others, and fewer tiles than slices; a last rank with fewer rows,
    and with a tile less than the others."""
    cases = [
        case(66 * size, 24, 33, bias=True, residual=True, norm=True),
        case(16 * size, 17, 20, "float16", integers=True),
        case(65 * size - 1, 40, 8, "bfloat16", norm=True),
    ]
    cases += [case(16 * size + 1, 20, 24)]
    config = replace(BY_TILES, num_slices=slices)
    worlds("gloo", size).run(parity.parity, cases, config)


def other_strides(me: Member, case: Case, config: MatmulConfig) -> None:
    """Calls of one size, with lines of the weight along K and along N, and rows of x apart."""
    for number in range(3):
        call = prepare(case, me.rank, me.world_size, me.device, number)
        x, w = call.operands.x, call.operands.w
        if number == 1:
            w = w.t().contiguous().t()
        if number == 2:
            x = x.new_zeros(x.shape[0], x.shape[1] + 8)[:, : x.shape[1]].copy_(x)
        call = replace(call, operands=replace(call.operands, x=x, w=w))
        parity.run(call, dist.group.WORLD, config)
        call.verify(f"rank {me.rank}, call {number}")


@fused
def test_by_tiles_of_operands_with_other_strides(worlds: Worlds) -> None:
    worlds("gloo", 2).run(other_strides, case(66, 24, 40), BY_TILES)


def equal_bits(me: Member, case: Case, config: MatmulConfig) -> None:
    call = prepare(case, me.rank, me.world_size, me.device, 0)
    parity.run(call, dist.group.WORLD, config)
    results = [torch.empty_like(call.out) for _ in range(me.world_size)]
    dist.all_gather(results, call.out)
    assert all(torch.equal(result, results[0]) for result in results)


@fused
@pytest.mark.parametrize(
    "config", [BY_TILES, replace(CONFIG, shots=1)], ids=["by_tiles", "one_shot"]
)
def test_ranks_have_the_same_bits(worlds: Worlds, config: MatmulConfig) -> None:
    """Also where every rank adds for itself."""
    worlds("gloo", 3).run(equal_bits, case(97, 17, 64, "float16"), config)


@fused
@pytest.mark.parametrize("kernel", ["library", "triton"])
def test_sums_in_one_shot_are_in_rank_order(worlds: Worlds, kernel: str) -> None:
    config = replace(CONFIG, kernel=kernel, shots=1)
    worlds("gloo", 3).run(behaviour.sums_in_rank_order, AR, config)


@fused
def test_many_calls_by_tiles_with_late_ranks(worlds: Worlds) -> None:
    cases = [
        case(96, 17, 24),
        case(150, 20, 33, residual=True, norm=True),
        case(97, 9, 20, bias=True),
    ]
    worlds("gloo", 3).run(parity.many_calls, cases, BY_TILES, 8, 0.004, None, stall_in_the_kernel)


@fused
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(worlds: Worlds, dtype: str) -> None:
    cases = [
        case(9, 33, 50, dtype, bias=True),
        case(70, 9, 90, dtype, integers=True, residual=True),
    ]
    worlds("gloo", 4).run(parity.parity, cases, CONFIG)


@fused
def test_many_calls_with_late_ranks(world: World) -> None:
    cases = [
        case(5, 17, 24),
        case(1, 20, 33, residual=True, norm=True),
        case(70, 9, 60),
        case(18, 7, 20, bias=True),
    ]
    count = {2: 20, 3: 12, 4: 8}[world.size]
    world.run(parity.many_calls, cases, CONFIG, count, 0.004, None, stall_in_the_kernel)


@fused
def test_the_epoch_wraps_around(world: World) -> None:
    world.run(parity.calls_around_the_wrap, case(18, 20, 40), CONFIG)


@fused
@pytest.mark.parametrize(("size", "members"), [(3, [0, 1]), (4, [1, 3])])
def test_two_groups_at_once(worlds: Worlds, size: int, members: list[int]) -> None:
    worlds("gloo", size).run(parity.two_groups, members, case(7, 18, 40, bias=True), CONFIG, 7)


@fused
def test_a_subgroup(worlds: Worlds) -> None:
    worlds("gloo", 4).run(parity.subgroup, [0, 2, 3], case(20, 18, 40), CONFIG)
