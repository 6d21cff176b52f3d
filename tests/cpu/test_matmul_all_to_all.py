"""matmul_all_to_all and its dual, all_to_all_matmul, in CPU worlds, interpreted where their plan is
fused.

Both share the bodies, the shapes and the four directions of an exchange.
``test_all_to_all_matmul.py`` has cases of the second one only.
"""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import backward, behaviour, parity
from tests.support.delays import stall_in_the_kernel
from tests.support.matmul_cases import IN, OUT, Case, prepare
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.ops import reference
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange

HOWS = [(0, 0), (0, 1), (1, 0), (1, 1)]
ULYSSES = {OUT: (1, 0), IN: (0, 1)}
both = pytest.mark.parametrize("op", [OUT, IN])
ways = pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]}{how[1]}")


def case(
    op: str,
    rows: int,
    cols: int,
    depth: int,
    dtype: str = "float32",
    how: tuple[int, int] | None = None,
    **more: bool,
) -> Case:
    return Case(rows, cols, depth, dtype, op=op, how=how or ULYSSES[op], **more)


def public(op: str) -> list[Case]:
    return [
        case(op, 5, 17, 70, bias=True),
        case(op, 12, 1, 16, "float16", how=(0, 0), bias=True, integers=True),
        case(op, 1, 9, 100, "bfloat16", how=(1, 1)),
    ]


@both
def test_public_calls(worlds: Worlds, op: str) -> None:
    worlds("gloo", 3).run(behaviour.public_calls, public(op), "fused")
    # by copy engines
    worlds("gloo", 2).run(behaviour.public_calls, [case(op, 64, 9, 16, how=(0, 1))], "fused")


@both
def test_a_group_of_one(worlds: Worlds, op: str) -> None:
    worlds("gloo", 1).run(behaviour.public_calls, public(op), "local")


@both
def test_subgroups(worlds: Worlds, op: str) -> None:
    worlds("gloo", 4).run(
        behaviour.public_calls_in_a_subgroup, [1, 3], case(op, 6, 9, 20, bias=True)
    )


@both
@pytest.mark.parametrize("how", [(0, 1), (1, 0)], ids=["01", "10"])
def test_many_dimensions(worlds: Worlds, op: str, how: tuple[int, int]) -> None:
    worlds("gloo", 2).run(behaviour.many_dimensions, case(op, 12, 10, 32, how=how, bias=True))


@both
def test_empty_dimensions(worlds: Worlds, op: str) -> None:
    worlds("gloo", 3).run(behaviour.empty_dimensions, "float16", op, ULYSSES[op])


@both
def test_weight_in_a_larger_tensor(worlds: Worlds, op: str) -> None:
    worlds("gloo", 3).run(behaviour.weight_in_a_larger_tensor, case(op, 6, 10, 20, bias=True))


@both
def test_same_bits_on_every_call(worlds: Worlds, op: str) -> None:
    worlds("gloo", 3).run(behaviour.same_bits_twice, case(op, 7, 9, 20, "float16", bias=True))


def many_shapes(me: Member, op: str) -> None:
    """Random shapes and directions, the same on every rank."""

    @settings(max_examples=16, deadline=None, derandomize=True, database=None)
    @given(
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(0, 40),
        st.sampled_from(HOWS),
        st.booleans(),
        st.integers(0, 99),
    )
    def try_one(
        rows: int, cols: int, depth: int, how: tuple[int, int], bias: bool, seed: int
    ) -> None:
        drawn = case(op, rows, cols, depth, how=how, bias=bias, integers=True)
        call = prepare(drawn, me.rank, me.world_size, me.device, seed)
        call.verify(f"rank {me.rank}", *behaviour.invoke(drawn, call.operands))

    try_one()


@both
def test_many_shapes(worlds: Worlds, op: str) -> None:
    worlds("gloo", 2).run(many_shapes, op)


def there_and_back(me: Member) -> None:
    """An exchange and its reverse leave everything unchanged, and so does Ulysses with identity
    weights."""
    x = torch.arange(24.0 * me.world_size).view(4 * me.world_size, 6) + 1000 * me.rank
    for how in HOWS:
        there = Exchange(*how)
        wide = x if how[0] == 0 else x.repeat(1, me.world_size)
        assert torch.equal(
            reference.exchange(
                reference.exchange(wide, there, dist.group.WORLD), there.reverse, dist.group.WORLD
            ),
            wide,
        )
    one = torch.eye(6 * me.world_size)
    wide = x.repeat(1, me.world_size)
    heads = tw.matmul_all_to_all(wide, one, scatter_dim=1, gather_dim=0)
    assert torch.equal(tw.all_to_all_matmul(heads, one, scatter_dim=0, gather_dim=1), wide)


def test_exchange_and_its_reverse_are_identity(worlds: Worlds) -> None:
    worlds("gloo", 3).run(there_and_back)


# --- Gradients and tools ---


@both
@ways
def test_gradients(worlds: Worlds, op: str, how: tuple[int, int]) -> None:
    cases = [
        case(op, rows, 18, 40, dtype, how=how, bias=bias)
        for rows, bias, dtype in ((7, True, "float32"), (20, False, "float16"))
    ]
    worlds("gloo", 3).run(backward.gradients, cases)


@both
@pytest.mark.parametrize("wanted", ["x", "wb"])
def test_gradients_of_some_inputs(worlds: Worlds, op: str, wanted: str) -> None:
    worlds("gloo", 3).run(backward.gradients, [case(op, 7, 18, 40, bias=True)], wanted)


@both
def test_gradients_in_a_group_of_one(worlds: Worlds, op: str) -> None:
    worlds("gloo", 1).run(backward.gradients, [case(op, 7, 18, 40, bias=True)])


@both
def test_backward_sends_nothing_but_the_fused_dual(worlds: Worlds, op: str) -> None:
    """What wgrad needs was exchanged already, with dgrad or in forward. As much memory as x is
    kept."""
    worlds("gloo", 3).run(
        backward.backward_collectives, case(op, 7, 18, 40, bias=True), {}, 3 * 7 * 40
    )


@both
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_gradients(worlds: Worlds, op: str, backend: str) -> None:
    worlds("gloo", 2).run(backward.gradients, [case(op, 7, 18, 40, bias=True)], "xwb", backend)


@both
def test_compiled_with_changing_rows(worlds: Worlds, op: str) -> None:
    worlds("gloo", 2).run(
        behaviour.compiled_with_changing_rows, case(op, 7, 18, 40, bias=True), "aot_eager"
    )


@both
@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(worlds: Worlds, op: str, size: int) -> None:
    worlds("gloo", size).run(behaviour.opcheck, case(op, 6, 18, 40, bias=True), timeout=100)


# --- Bad input ---

WRONG = {
    "columns_do_not_divide": (
        OUT,
        ((4, 8), (7, 8), None, None),
        (1, 0),
        r"7 columns \(w\) over 2 ranks",
    ),
    "rows_do_not_divide": (OUT, ((5, 8), (6, 8), None, None), (0, 1), r"5 rows over 2 ranks"),
    "k_differs": (OUT, ((4, 8), (6, 9), None, None), (1, 0), r"4, 8.*6, 9"),
    "out_is_not_gathered": (OUT, ((4, 8), (6, 8), None, (4, 6)), (1, 0), r"out.*8, 3"),
    "a_third_dimension": (OUT, ((4, 8), (6, 8), None, None), (2, 0), r"scatter_dim=2"),
    "x_rows_do_not_divide": (IN, ((5, 8), (6, 16), None, None), (0, 1), r"5 rows over 2 ranks"),
    "x_columns_do_not_divide": (
        IN,
        ((4, 7), (6, 8), None, None),
        (1, 0),
        r"7 columns \(x\) over 2 ranks",
    ),
    "w_has_the_columns_of_x": (IN, ((4, 8), (6, 8), None, None), (0, 1), r"w \[N, 16\]"),
    "bias_is_too_long": (IN, ((4, 8), (6, 16), (7,), None), (0, 1), r"7,.*6,"),
    "out_is_too_tall": (IN, ((4, 8), (6, 16), None, (4, 6)), (0, 1), r"out.*2, 6"),
    "one_dimension": (IN, ((8,), (6, 8), None, None), (0, 0), r"\(8,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(worlds: Worlds, name: str) -> None:
    op, (x, w, bias, out), (scatter, gather), pattern = WRONG[name]
    options = {"scatter_dim": scatter, "gather_dim": gather}
    worlds("gloo", 2).run(
        behaviour.check_refusal, op, {"x": x, "w": w, "bias": bias, "out": out}, pattern, options
    )


def test_out_in_an_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(
        behaviour.check_alias_is_refused,
        OUT,
        (8, 8),
        (4, 8),
        (16, 2),
        {"scatter_dim": 1, "gather_dim": 0},
    )


@both
def test_mismatched_calls_raise_on_every_rank(worlds: Worlds, op: str) -> None:
    texts = worlds("gloo", 3).run(behaviour.mismatch_error, op, {"scatter_dim": 0, "gather_dim": 0})
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0] and op in texts[0]


# --- The protocol, with the fused kernels ---

SM = MatmulConfig("triton", "sm", 16, 32, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
COPY_ENGINE = replace(SM, transport="copy_engine")
LIBRARY = replace(SM, kernel="library")
transports = pytest.mark.parametrize(
    "config", [SM, COPY_ENGINE], ids=lambda config: config.transport
)
each_kernel = pytest.mark.parametrize(
    ("op", "config"),
    [(op, config) for op in (OUT, IN) for config in (SM, COPY_ENGINE, LIBRARY)],
    ids=lambda value: value if isinstance(value, str) else f"{value.kernel}-{value.transport}",
)

SHAPES = {
    "one_of_all": (1, 1, 1),
    "odd": (5, 17, 40),
    "exact": (16, 32, 32),
    "ragged_tiles": (20, 40, 18),
    "chunks": (35, 3, 16),
}


@each_kernel
@ways
def test_parity(worlds: Worlds, op: str, config: MatmulConfig, how: tuple[int, int]) -> None:
    cases = [
        case(op, *shape, how=how, bias=n % 2 == 0, integers=n % 2 == 1)
        for n, shape in enumerate(SHAPES.values())
    ]
    worlds("gloo", 3).run(parity.parity, cases, config)


@both
def test_parity_with_few_programs(worlds: Worlds, op: str) -> None:
    """Waves and cut tiles. Programs may run one after the other, as there is no self-signaling
    data."""
    cases = [case(op, 33, 40, 40, how=how, bias=True) for how in ((1, 0), (0, 1))]
    worlds("gloo", 2).run(parity.parity, cases, replace(COPY_ENGINE, tile_k=8), 5)


@each_kernel
def test_dtypes_and_four_ranks(worlds: Worlds, op: str, config: MatmulConfig) -> None:
    cases = [
        case(op, 9, 20, 24, "bfloat16", bias=True),
        case(op, 18, 9, 20, "float16", integers=True),
    ]
    worlds("gloo", 4).run(parity.parity, cases, config)


@each_kernel
def test_many_calls_with_late_ranks(worlds: Worlds, op: str, config: MatmulConfig) -> None:
    cases = [
        case(op, 5, 17, 24),
        case(op, 1, 20, 33, how=(1, 1)),
        case(op, 12, 9, 20, how=(0, 0)),
        case(op, 18, 7, 20),
    ]
    worlds("gloo", 3).run(
        parity.many_calls, cases, replace(config, tile_k=64), 18, 0.004, None, stall_in_the_kernel
    )


@each_kernel
def test_the_epoch_wraps_around(worlds: Worlds, op: str, config: MatmulConfig) -> None:
    worlds("gloo", 2).run(parity.calls_around_the_wrap, case(op, 18, 9, 20), config)


@each_kernel
def test_two_groups_at_once(worlds: Worlds, op: str, config: MatmulConfig) -> None:
    worlds("gloo", 3).run(parity.two_groups, [0, 2], case(op, 7, 18, 20, bias=True), config, 4)


def absent(me: Member, op: str, config: MatmulConfig) -> tuple[str, int] | None:
    """A good call, then one that rank 1 skips. Return which rank the others name."""
    tw.close()
    drawn = case(op, 35, 9, 20)
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="1.5"):
        call = prepare(drawn, me.rank, me.world_size, me.device, 1)
        parity.run(call, dist.group.WORLD, config)
        call.verify(f"rank {me.rank}, while all call")
        error = None
        if me.rank != 1:
            with pytest.raises(tw.PeerTimeout) as caught:
                parity.run(call, dist.group.WORLD, config)
            error = caught.value
    me.barrier()
    tw.close()
    return None if error is None else (error.op, error.peer)


@each_kernel
def test_a_peer_that_never_calls(worlds: Worlds, op: str, config: MatmulConfig) -> None:
    """The bounded wait names the peer. Copies that wait for its flags are released, or the thread
    that makes them would never end."""
    seen = worlds("gloo", 3).run(absent, op, config)
    assert (
        seen[1] is None and {seen[0], seen[2]} <= {(op, 1), (op, 0), (op, 2)} and (op, 1) in seen
    ), seen
