"""Matmul operators with FP8 operands in CPU worlds: every path, against fp64 of the numbers that
the operands represent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.scaled_cases import (
    AG,
    AR,
    FP8,
    KINDS,
    RS,
    Case,
    check,
    in_one_shot,
    numbers,
    operands,
)
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.errors import InputError
from tileweave.ops.matmul.quantize import _in_torch  # the kernel is slow in the interpreter
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig


def public_calls(me: Member, op: str) -> None:
    """Every kind of scale by the operator's own plan, unfused, quantised in the call, with out=."""
    for number, kinds in enumerate(KINDS):
        rows = 6 * me.world_size if op == RS else 5 + number
        case = Case(op, rows, kinds=kinds, bias=number % 2 == 0, norm=op == AR and number > 1)
        got = check(case, me, number)
        with choices.forced(op, None):
            check(replace(case, dtype=torch.float16), me, number)
        if kinds in (("row", "row"), ("block", "tile")):
            again = check(replace(case, quantize=True), me, number)
            assert torch.equal(got, again), f"{case}: other bits, quantised in the call"
        else:
            out = torch.full_like(got, float("nan"))
            assert check(case, me, number, out=out) is out
            assert torch.equal(out, got), f"{case}: other bits with out="


@pytest.mark.parametrize("op", [AG, RS, AR])
def test_public_calls(worlds: Worlds, op: str) -> None:
    worlds("gloo", 2).run(public_calls, op)


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(public_calls, AG)


def by_copy_engines(me: Member) -> None:
    """Shards that copy engines bring or take, multiplied one by one or by the Triton kernel, in
    both slots."""
    library = MatmulConfig("library", "copy_engine", 16, 32, 64, 1, 4)
    kernel = MatmulConfig("triton", "copy_engine", 16, 32, 128, 1, 4)
    pushed = replace(kernel, transport="sm")
    calls = [*product((AG, RS), KINDS, (library,)), *product((AG,), KINDS[1:], (kernel,))]
    calls += product((RS,), KINDS, (kernel, pushed))
    calls += product((AR,), KINDS, (kernel,))
    for op, kinds, config in calls:
        # pushed tiles span ranks; of those that copy engines take, the last is not whole; of 67
        # rows the last rank has fewer
        of_rank = 5 if config is pushed else 18
        rows = {AG: 16, RS: of_rank * me.world_size, AR: 67}[op]
        # several columns of scales, each with one for 128 of K and one for the rest
        cols = 144 if kinds == KINDS[-1] and config is pushed else 48
        case = Case(op, rows, cols, kinds=kinds, bias=True, norm=op == AR, dtype=torch.float16)
        with choices.forced(op, config):
            first = check(case, me, 7)
            check(case, me, 8)
            assert torch.equal(first, check(case, me, 7)), f"{case}: other bits the second time"


def test_shards_by_copy_engines(worlds: Worlds) -> None:
    worlds("gloo", 2).run(by_copy_engines)


@pytest.mark.parametrize("size", [2, 3])
def test_few_rows_in_one_shot(worlds: Worlds, size: int) -> None:
    """With w first and with x first, by teams of which some programs have no part of K."""
    tiles = ((16, 32, 1), (16, 64, 1), (16, 64, 4), (16, 128, 2), (32, 64, 2))
    configs = [
        MatmulConfig("triton", "sm", tile_m, tile_n, 128, 1, 4, team=team, shots=1)
        for tile_m, tile_n, team in tiles
    ]
    worlds("gloo", size).run(in_one_shot, configs)


def quantized_norms(me: Member) -> None:
    """quantize_out= is what the quantiser makes of the norm, whatever made the norm."""
    named: dict[str, Any] = {}
    for rows, kind, fp8 in product((5, 20), ("row", "block"), (False, True)):
        case = Case(AR, rows, 144, 160, bias=True, norm=True)
        given = operands(case, me.rank, rows)
        if fp8:
            named = {name: t for name, t in given.items() if name not in ("data", "scale")}
        else:
            x, w = numbers((rows, 160), 1, me.rank), numbers((144, 160), 2, me.rank)
            named = {name: given[name] for name in ("bias", "residual", "norm_weight")}
            named |= {"x": x.bfloat16(), "w": w.bfloat16()}
        normed, kept = tw.matmul_all_reduce(**named)
        data, scale, residual = tw.matmul_all_reduce(**named, quantize_out=kind)
        want, want_scale = _in_torch(normed, kind)
        assert torch.equal(residual, kept)
        assert torch.allclose(scale, want_scale, rtol=1e-6), f"{rows} {kind} {fp8}"
        got, numbers_of = data.float() * spread(scale, rows), want.float()
        assert torch.equal(data.float(), numbers_of), f"{rows} {kind} {fp8}: other data"
        assert (got - normed.float()).norm() < 0.05 * normed.float().norm()
    with pytest.raises(InputError, match="norm_weight"):
        tw.matmul_all_reduce(named["x"], named["w"], quantize_out="row", **scales_of(named))
    tw.close()


def spread(scale: torch.Tensor, rows: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 1)[:, :144] if scale.shape[1] > 1 else scale


def scales_of(named: dict[str, Any]) -> dict[str, Any]:
    return {name: named[name] for name in ("x_scale", "w_scale") if name in named}


def test_quantized_norms(worlds: Worlds) -> None:
    worlds("gloo", 2).run(quantized_norms)


def after_inference(me: Member) -> None:
    """The first call of a size makes memory that later ones write to, in other modes, too."""
    config = MatmulConfig("library", "sm", 16, 32, 64, 1, 4)
    x, w = numbers((2 * me.world_size, 160), me.rank).bfloat16(), numbers((48, 160)).bfloat16()
    w8, w_scale = _in_torch(w, "row")
    scaled: dict[str, Any] = {"w_scale": w_scale, "quantize": "row"}
    for op, (of_w, more) in product((RS, AR), ((w8, scaled), (w, {}))):
        with choices.forced(op, config):
            with torch.inference_mode():
                first = getattr(tw, op)(x, of_w, **more)
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    assert torch.equal(getattr(tw, op)(x, of_w, **more), first), (op, mode)


def test_calls_after_inference_mode(worlds: Worlds) -> None:
    worlds("gloo", 2).run(after_inference)


def more_dimensions(me: Member) -> None:
    """x [B, s, K] gathered or scattered along either dimension."""
    size = me.world_size
    x, w = numbers((2, 4 * size, 160), 1, me.rank), numbers((48, 160), 2, me.rank)
    (data, scale), (w8, w_scale) = _in_torch(x, "block"), _in_torch(w, "tile")
    for op, name in ((AG, "gather_dim"), (RS, "scatter_dim")):
        call = getattr(tw, op)
        got = call(data, w8, x_scale=scale, w_scale=w_scale, **{name: 1})
        turned = data.transpose(0, 1).contiguous(), scale.transpose(0, 1).contiguous()
        want = call(turned[0], w8, x_scale=turned[1], w_scale=w_scale)
        assert torch.equal(got, want.transpose(0, 1)), op
    got = tw.matmul_all_reduce(data, w8, x_scale=scale, w_scale=w_scale)
    want = tw.matmul_all_reduce(
        data.flatten(0, 1), w8, x_scale=scale.flatten(0, 1), w_scale=w_scale
    )
    assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    assert got.shape == (2, 4 * size, 48) and torch.equal(got.flatten(0, 1), want)


def test_more_dimensions(worlds: Worlds) -> None:
    worlds("gloo", 2).run(more_dimensions)


def rare_scales(me: Member) -> None:
    """Scales of 0, NaN, infinity and subnormals do what float32 arithmetic does; every number of
    FP8 arrives."""
    data = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16).contiguous()
    eye = torch.eye(16).to(FP8)
    one = torch.ones(1)
    y = tw.all_gather_matmul(data, eye, x_scale=one, w_scale=one, out_dtype=torch.float16)
    want = data.float() @ eye.float().t()  # a NaN makes its row NaN
    assert torch.equal(y.float().nan_to_num(7.0), torch.cat([want] * me.world_size).nan_to_num(7.0))
    scale = torch.ones(16, 1)
    scale[:5, 0] = torch.tensor([0.0, float("nan"), float("inf"), 1e-40, -0.0])
    plain = torch.ones(16, 16).to(FP8)
    w_scale = torch.full((1, 16), 2.0)
    got = tw.all_gather_matmul(plain, plain, x_scale=scale, w_scale=w_scale)
    want = (scale * 32.0).expand(16, 16).bfloat16().repeat(me.world_size, 1)
    assert torch.equal(got.float().nan_to_num(7.0), want.float().nan_to_num(7.0))


def test_rare_scales(worlds: Worlds) -> None:
    worlds("gloo", 2).run(rare_scales)


def refusals(me: Member) -> None:
    x, scale = _in_torch(numbers((4, 64), 0), "row")
    w, w_scale = _in_torch(numbers((32, 64), 1), "row")
    right: dict[str, Any] = {"x_scale": scale, "w_scale": w_scale}
    wide = torch.zeros(4, 72).to(FP8)
    bad = [
        ((x, w), {"w_scale": w_scale}, "without x_scale"),
        ((x, w), {"x_scale": scale}, "without w_scale"),
        ((x, w), right | {"quantize": "row"}, "quantize"),
        ((x.bfloat16(), w), right, "float8_e4m3fn"),
        ((x, w.bfloat16()), right, "float8_e4m3fn"),
        ((x, w), {"x_scale": scale[:3], "w_scale": w_scale}, "x_scale"),
        ((x, w), {"x_scale": scale.half(), "w_scale": w_scale}, "float32"),
        ((x, w), right | {"out_dtype": torch.float32}, "out_dtype"),
        ((x, w), right | {"bias": torch.zeros(32)}, "that of the result"),
        ((wide, torch.zeros(32, 72).to(FP8)), right, "multiples of 16"),
        ((x.bfloat16(), w), {"w_scale": w_scale, "quantize": "col"}, "'row', 'block', 'rowwise'"),
        ((x, w), {}, "pass x_scale"),
        ((x, w.t().contiguous().t()), right, "along K"),
        ((x, w), right | {"fast_accum": "no"}, "True or False"),
    ]
    # 16-bit operands: what is asked of FP8 ones is not left out
    plain = x.bfloat16(), w.bfloat16()
    asked = {"quantize": "row"}, {"quantize": "block"}, {"fast_accum": True}
    bad += [(plain, more, "float8_e4m3fn") for more in asked]
    bad += [(plain, {"quantize": name}, "'rowwise'") for name in ("rowise", 1)]
    bad += [(plain, {"out_dtype": torch.float16}, "FP8 operands only")]
    for op in (AG, RS, AR):
        for (a, b), more, text in bad:
            with pytest.raises(InputError, match=text):
                getattr(tw, op)(a, b, **more)
            tw.close()
        bias = torch.zeros(32, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(InputError, match="gradients"):
            getattr(tw, op)(x, w, bias, **right)
        tw.close()
    with pytest.raises(InputError, match="main_grad"):
        tw.all_gather_matmul(x, w, main_grad=torch.zeros(32, 64), **right)
    tw.close()


def test_what_does_not_fit_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(refusals)


def compiled(me: Member) -> None:
    case = Case(AG, 8, bias=True)
    given = operands(case, me.rank, 3)

    def call(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = tw.all_gather_matmul(
            x, given["w"], given["bias"], x_scale=scale, w_scale=given["w_scale"]
        )
        return y * 2

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(given["x"], given["x_scale"])
    assert torch.equal(got, call(given["x"], given["x_scale"]))
    plan = tw.explain(
        AG, given["x"], given["w"], x_scale=given["x_scale"], w_scale=given["w_scale"]
    )
    assert plan.path == "fused", plan
    dist.barrier()


def warmed(me: Member) -> None:
    """A warmup makes the calls that it is asked for, and says what they do."""
    options: dict[str, dict[str, Any]] = {AG: {}, RS: {}, AR: {"norm": True}}
    for op, more in options.items():
        for dtype, scaling in ((FP8, "row"), (FP8, "block"), (torch.bfloat16, "row")):
            more |= {"dtype": dtype, "scaling": scaling, "device": "cpu"}
            plans = tw.warmup(op, [8, 6], 32, 160, **more)
            assert isinstance(plans, dict) and "FP8" in plans[8].reason, plans
    with pytest.raises(InputError, match="scaling"):
        tw.warmup(AG, 8, 32, 160, dtype=torch.bfloat16, scaling="tensor", device="cpu")


def test_warmup(worlds: Worlds) -> None:
    worlds("gloo", 2).run(warmed)


def test_compiled_and_explained(worlds: Worlds) -> None:
    worlds("gloo", 2).run(compiled)
