"""Expert operators with FP8 operands in CPU worlds: every path, against fp64 of the numbers that
the operands represent, token by token in plain loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tests.support import experts
from tests.support.calls import call_unfused
from tests.support.experts import ROUTINGS, Case
from tests.support.scaled_experts import Drawn, by_tiles, dispatched
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.errors import InputError
from tileweave.ops import reference
from tileweave.ops.experts import scaled_operators
from tileweave.ops.experts.scaled import ScaledExperts, ScaledRows
from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import CPU, H200
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch

FP8 = torch.float8_e4m3fn
HIDDEN, INNER = 144, 48  # K of the dispatch, and of the combine; neither is a multiple of 128
CASES = [
    Case((5, 3), depth=HIDDEN, cols=2 * INNER, dtype="bfloat16", routing=routing)
    for routing in ROUTINGS
]
UNEVEN = [
    replace(CASES[0], tokens=(0, 7), spare=2, index_dtype=torch.int32),
    replace(CASES[1], experts=5, topk=6),
    # several experts with several columns of scales
    replace(CASES[0], tokens=(9, 19), experts=2, topk=1, cols=288),
]


def test_all_routings(worlds: Worlds) -> None:
    worlds("gloo", 2).run(dispatched, CASES)


def test_uneven_tokens_and_experts(worlds: Worlds) -> None:
    worlds("gloo", 3).run(dispatched, UNEVEN)


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(dispatched, CASES[4:5])


def test_unfused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(call_unfused, dispatched, [CASES[5], UNEVEN[0]])


def test_plans() -> None:
    """Fused in the interpreter and on Hopper, not between nodes."""
    problem = GroupedProblem(2, 1024, 8, 64, 4096, 7168, 1, "float8_e4m3fn")
    for plan in (plan_dispatch, plan_combine):
        assert plan(problem, CPU, True).path == "fused"
        config = plan(problem, H200, False).config
        assert config is not None and (config.kernel, config.tile_k) == ("hopper", 128)
        older = replace(H200, arch=89)
        assert plan(problem, older, False).path == "unfused"
        assert "nodes" in str(plan(replace(problem, nodes=2), CPU, True))


def test_no_rows_are_quantized() -> None:
    for kind, scales in (("row", 1), ("block", 2)):
        data, scale = tw.quantize(torch.zeros(0, 3, 144), kind)
        assert data.shape == (0, 3, 144) and scale.shape == (0, 3, scales)


def unchecked(me: Member) -> None:
    """The kernel against the reference, bit for bit where products are exact."""
    generator = torch.Generator().manual_seed(me.rank)
    offsets = torch.tensor([0, 0, 17, 18, 40], dtype=torch.int32)
    x = torch.randint(-8, 9, (44, 272), generator=generator).to(FP8)
    w = torch.randint(-8, 9, (4, 144, 272), generator=generator).to(FP8)
    powers = 2.0 ** torch.randint(-3, 4, (44, 3), generator=generator)
    w_scale = 2.0 ** torch.randint(-3, 4, (4, 2, 3), generator=generator)
    # rare scales do what float32 arithmetic does
    powers[20, 0], powers[21, 1], powers[22, 2] = 0.0, float("nan"), float("inf")
    powers[23] = 1e-40
    w_scale[2, 1, 0] = float("nan")
    from tileweave.ops.experts.scaled import multiply_rows

    rows, weights = ScaledRows(x, powers), ScaledExperts(w, w_scale)
    want = torch.zeros(40, 144)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        for block in range(3):
            ks, up = slice(128 * block, 128 * block + 128), w_scale[expert, :, block]
            part = x[begin:end, ks].float() @ w[expert, :, ks].float().t()
            want[begin:end] += part * (
                powers[begin:end, block, None] * up.repeat_interleave(128)[:144]
            )
    want = want.half()
    plain = reference.grouped_scaled_matmul(rows, weights, offsets, torch.float16)[:17]
    assert torch.equal(plain.nan_to_num(9.0), want[:17].nan_to_num(9.0))
    y = torch.full((44, 144), 7.0, dtype=torch.float16)
    multiply_rows(rows, weights, offsets, y)
    assert torch.equal(y[:40].nan_to_num(9.0), want.nan_to_num(9.0))
    assert (y[40:] == 7.0).all(), "rows after the last were written"
    assert y[17, 128:].isnan().all() and not y[18:20].isnan().any()


def test_the_grouped_kernel_and_rare_scales(worlds: Worlds) -> None:
    worlds("gloo", 1).run(unchecked)


def refusals(me: Member) -> None:
    case = CASES[0]
    o = Drawn(case, me.rank, me.world_size, 0)
    plan_of: dict[str, Any] = {"max_tokens": case.max_tokens}
    right: dict[str, Any] = {"x_scale": o.x_scale, "w_scale": o.w_scale}
    narrow, n_scale = by_tiles(torch.randn(case.experts, 40, HIDDEN))
    turned = o.w.transpose(1, 2).contiguous().transpose(1, 2)
    bad = [
        ((o.x8, o.w), {"w_scale": o.w_scale}, "x_scale missing"),
        ((o.x8, o.w), {"x_scale": o.x_scale}, "w_scale missing"),
        ((o.x, o.w), right, "float8_e4m3fn"),
        ((o.x8, o.w), {"w_scale": o.w_scale, "quantize": "block"}, "16 or 32 bits"),
        ((o.x, o.w), right | {"quantize": "block"}, "x_scale given"),
        ((o.x, o.w), {"w_scale": o.w_scale, "quantize": "row"}, "scales of blocks"),
        ((o.x, o.w.bfloat16()), {"w_scale": o.w_scale, "quantize": "block"}, "float8_e4m3fn"),
        ((o.x8, o.w), right | {"x_scale": o.x_scale[:, :1]}, "x_scale"),
        ((o.x8, o.w), right | {"w_scale": o.w_scale[..., :1]}, "w_scale"),
        ((o.x8, o.w), right | {"w_scale": o.w_scale.double()}, "float32"),
        ((o.x8, o.w), right | {"out_dtype": torch.float32}, "out_dtype"),
        ((o.x8, narrow), right | {"w_scale": n_scale}, "multiples of 16"),
        ((o.x8, turned), right, "along K"),
        ((o.x8, o.w), {}, "float16, bfloat16, float32"),
    ]
    for (x, w), more, text in bad:
        with pytest.raises(InputError, match=text):
            tw.dispatch_grouped_matmul(x, w, o.ids, **plan_of, **more)
        tw.close()
    with pytest.raises(InputError, match="gradients"):
        tw.dispatch_grouped_matmul(
            o.x.requires_grad_(), o.w, o.ids, w_scale=o.w_scale, quantize="block", **plan_of
        )
    tw.close()
    y, plan = tw.dispatch_grouped_matmul(o.x8, o.w, o.ids, **right, **plan_of)
    data, scale = tw.swiglu(y, plan, quantize="block")
    with pytest.raises(InputError, match="'block' or None"):
        tw.swiglu(y, plan, quantize="row")
    worse = [
        ((data, o.v), {"w_scale": o.v_scale}, "y_scale missing"),
        ((data, o.v), {"y_scale": scale}, "w_scale missing"),
        ((data[:-1], o.v), {"y_scale": scale[:-1], "w_scale": o.v_scale}, "rows"),
        ((data.bfloat16(), o.v), {"y_scale": scale, "w_scale": o.v_scale}, "float8_e4m3fn"),
    ]
    for (a, b), more, text in worse:
        with pytest.raises(InputError, match=text):
            tw.grouped_matmul_combine(a, b, plan, o.topk_weights, **more)
        tw.close()


def test_what_does_not_fit_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(refusals)


def no_tokens_on_one_rank(me: Member) -> bool:
    """Every second column of x: copied where there are tokens."""
    tokens = 2 * (1 - me.rank)
    x = torch.ones(tokens, 64, dtype=torch.bfloat16)[:, ::2]
    w, scale = tw.quantize(torch.ones(16, 32), "tile")
    ids = torch.ones(tokens, 1, dtype=torch.int32)
    y, plan = tw.dispatch_grouped_matmul(
        x, w[None], ids, max_tokens=2, w_scale=scale[None], quantize="block"
    )
    routed = y[: int(plan.offsets[-1])]
    return routed.shape[0] == 2 * me.rank and bool((routed == 32).all())


def test_a_rank_without_tokens_has_any_strides(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(no_tokens_on_one_rank) == [True, True]


def alone(me: Member) -> list[int]:
    """How often a public call of each operator checks its operands; and that the torch operators,
    called without it, check them."""
    case = CASES[0]
    o = Drawn(case, me.rank, me.world_size, 0)
    named: dict[str, Any] = {"w_scale": o.w_scale, "quantize": "block"}
    y, plan = tw.dispatch_grouped_matmul(o.x, o.w, o.ids, max_tokens=case.max_tokens, **named)
    data, scale = tw.swiglu(y, plan, quantize="block")
    given: dict[str, Any] = {"y_scale": scale, "w_scale": o.v_scale}
    checks = Mock(wraps=scaled_operators.check_scaled_experts)
    found = []
    with patch.object(scaled_operators, "check_scaled_experts", checks):
        tw.dispatch_grouped_matmul(o.x, o.w, plan=plan, **named)
        found.append(checks.call_count)
        tw.grouped_matmul_combine(data, o.v, plan, o.topk_weights, **given)
        found.append(checks.call_count)
    numbers = (plan.max_tokens, plan.topk, plan.group_name)
    with pytest.raises(InputError, match="w_scale"):
        torch.ops.tileweave.dispatch_grouped_scaled_matmul(
            o.x, None, o.w, o.w_scale[..., :1], plan.table, *numbers, "bfloat16", "block"
        )
    tw.close()
    with pytest.raises(InputError, match="y_scale"):
        torch.ops.tileweave.grouped_scaled_matmul_combine(
            data, scale[:, :0], o.v, o.v_scale, plan.table, None, plan.tokens, *numbers, "bfloat16"
        )
    tw.close()
    return found


def test_operands_are_checked_once(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(alone) == [[1, 2]] * 2


def compiled(me: Member) -> None:
    case = CASES[0]
    o = Drawn(case, me.rank, me.world_size, 0)

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y, plan = tw.dispatch_grouped_matmul(
            x, o.w, ids, max_tokens=case.max_tokens, w_scale=o.w_scale, quantize="block"
        )
        data, scale = tw.swiglu(y, plan, quantize="block")
        named: dict[str, Any] = {"y_scale": scale, "w_scale": o.v_scale}
        return tw.grouped_matmul_combine(data, o.v, plan, weights, **named) * 2

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(o.x, o.ids, o.topk_weights)
    assert torch.equal(got, call(o.x, o.ids, o.topk_weights))
    fp8: dict[str, Any] = {"w_scale": o.w_scale, "quantize": "block"}
    plan = tw.explain(experts.OP, o.x, o.w, case.topk, max_tokens=case.max_tokens, **fp8)
    warm = tw.warmup(experts.OP, 6, o.w, case.topk, w_scale=o.w_scale)
    assert str(plan) == str(warm) and plan.path == "fused"


def test_compiled_explained_and_warmed(worlds: Worlds) -> None:
    worlds("gloo", 2).run(compiled)
