"""Expert operators with FP8 operands in CPU worlds: every path, against fp64 of the numbers that
the operands represent, token by token in plain loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support import experts
from tests.support.calls import call_unfused
from tests.support.experts import ROUTINGS, Case
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.errors import InputError
from tileweave.ops import reference
from tileweave.ops.experts.scaled import ScaledExperts, ScaledRows
from tileweave.ops.matmul.quantize import _in_torch
from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import CPU, H200
from tileweave.planning.schedules import grouped
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch

FP8 = torch.float8_e4m3fn
HIDDEN, INNER = 144, 80  # K of the dispatch, and of the combine; neither is a multiple of 128
CASES = [
    Case((5, 3), depth=HIDDEN, cols=2 * INNER, dtype="bfloat16", routing=routing)
    for routing in ROUTINGS
]
UNEVEN = [
    replace(CASES[0], tokens=(0, 7), spare=2, index_dtype=torch.int32),
    replace(CASES[1], experts=5, topk=8),
    replace(CASES[0], tokens=(19,), experts=1, topk=1, cols=288),
]


def by_tiles(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, N, K] and their scales."""
    data, scale = zip(*(_in_torch(one, "tile") for one in w), strict=True)
    return torch.stack(data), torch.stack(scale)


def wide(scale: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """Scales of blocks as they multiply the data, written without the code under test."""
    if scale.shape[0] != rows:
        scale = scale.double().repeat_interleave(128, 0)[:rows]
    return scale.double().repeat_interleave(128, 1)[:, :depth]


def value(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return data.double() * wide(scale, *data.shape)


class Drawn:
    """Operands of one rank: those of the dispatch, and the second weights."""

    def __init__(self, case: Case, rank: int, size: int, seed: int) -> None:
        o = experts.draw(case, rank, size, torch.device("cpu"), seed)
        self.ids, self.x = o.ids, o.x * 4.0 ** (rank - 1)  # scales that differ by a lot
        self.x8, self.x_scale = _in_torch(self.x, "block")
        self.w, self.w_scale = by_tiles(o.experts)
        generator = torch.Generator().manual_seed(seed * 7 + rank)
        inner = case.cols // 2
        v = torch.randn(case.experts, HIDDEN, inner, generator=generator) * inner**-0.5
        self.v, self.v_scale = by_tiles(v)
        shape = (o.x.shape[0], case.topk)
        self.topk_weights = torch.rand(shape, generator=generator)


def check_near(got: torch.Tensor, want: torch.Tensor, bits: int, roundings: int, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    # the interpreter truncates to bf16, which is twice the error
    limit = roundings * 2.0**-bits * max(float(want.norm()), 1e-30)
    error = float((got.double() - want).norm())
    assert error <= limit, f"{what}: error {error:.2e} > {limit:.2e}"


def expected_dispatch(case: Case, everyone: list[Drawn], rank: int, seed: int) -> torch.Tensor:
    mine = everyone[rank]
    rows = experts.expected_rows(case, rank, len(everyone), seed)
    y = [torch.zeros(0, case.cols, dtype=torch.float64)]
    tokens = [value(one.x8, one.x_scale) for one in everyone]
    for expert, entries in enumerate(rows):
        if entries:
            w = value(mine.w[expert], mine.w_scale[expert])
            y.append(torch.stack([tokens[source][t] for source, t, _ in entries]) @ w.t())
    return torch.cat(y)


def dispatched(me: Member, cases: list[Case]) -> None:
    """Quantised in the call; of the first case also given scales, into out=, float16: by the own
    plan of each call."""
    for seed, case in enumerate(cases):
        everyone = [Drawn(case, rank, me.world_size, seed) for rank in range(me.world_size)]
        o, want = everyone[me.rank], expected_dispatch(case, everyone, me.rank, seed)
        what = f"rank {me.rank}, {case}"
        args: dict[str, Any] = {"w_scale": o.w_scale}
        y, plan = tw.dispatch_grouped_matmul(
            o.x, o.w, o.ids, max_tokens=case.max_tokens, quantize="block", **args
        )
        experts.verify_plan(plan, case, me.rank, me.world_size, seed, what)
        assert y.dtype == torch.bfloat16 and y.shape == (plan.bound, case.cols)
        check_near(y[: len(want)], want, 8, 1, what)
        layer(me, case, everyone, y, plan, seed == 0, what)
        if seed:
            continue
        again, _ = tw.dispatch_grouped_matmul(o.x8, o.w, plan=plan, x_scale=o.x_scale, **args)
        assert torch.equal(again[: len(want)], y[: len(want)]), f"{what}: other bits"
        out = torch.full((plan.bound, case.cols), float("nan"), dtype=torch.float16)
        half, _ = tw.dispatch_grouped_matmul(
            o.x8, o.w, plan=plan, x_scale=o.x_scale, out_dtype=torch.float16, out=out, **args
        )
        assert half is out
        check_near(half[: len(want)], want, 11, 1, f"{what}, float16")


def layer(
    me: Member, case: Case, everyone: list[Drawn], y: torch.Tensor, plan: Any, half: bool, what: str
) -> None:
    """swiglu and combine of what was dispatched."""
    o, rows = everyone[me.rank], int(plan.offsets[-1])
    plain = tw.swiglu(y, plan)
    data, scale = tw.swiglu(y, plan, quantize="block")
    want8, want_scale = _in_torch(plain[:rows], "block")
    assert torch.equal(scale[:rows], want_scale), f"{what}: scales of swiglu"
    assert torch.equal(data[:rows].float(), want8.float()), f"{what}: data of swiglu"
    # expected: every rank's own values, exchanged, since swiglu of other ranks is not known here
    mine = torch.zeros(plan.bound, HIDDEN, dtype=torch.float64)
    ends = plan.offsets.tolist()
    for expert in range(case.experts):
        part = slice(ends[expert], ends[expert + 1])
        mine[part] = value(data[part], scale[part]) @ value(o.v[expert], o.v_scale[expert]).t()
    sums = torch.zeros(me.world_size, case.max_tokens, HIDDEN, dtype=torch.float64)
    flat = plan.entry_row.view(me.world_size, case.max_tokens, case.topk).tolist()
    for source, tokens in enumerate(flat):
        for token, choices in enumerate(tokens):
            for j, row in enumerate(choices):
                if row >= 0:
                    factor = float(everyone[source].topk_weights[token, j])
                    sums[source, token] += factor * mine[row]
    torch.distributed.all_reduce(sums)
    want = sums[me.rank, : plan.tokens]
    named: dict[str, Any] = {"y_scale": scale, "w_scale": o.v_scale}
    z = tw.grouped_matmul_combine(data, o.v, plan, o.topk_weights, **named)
    assert z.dtype == torch.bfloat16
    check_near(z, want, 8, 3, f"{what}, combine")
    if not half:
        return
    out = torch.full(z.shape, float("nan"), dtype=torch.float16)
    named |= {"out_dtype": torch.float16, "out": out}
    assert tw.grouped_matmul_combine(data, o.v, plan, o.topk_weights, **named) is out
    check_near(out, want, 11, 3, f"{what}, combine, float16")


def test_all_routings(worlds: Worlds) -> None:
    worlds("gloo", 2).run(dispatched, CASES)


def test_uneven_tokens_and_experts(worlds: Worlds) -> None:
    worlds("gloo", 3).run(dispatched, UNEVEN)


def test_a_group_of_one(worlds: Worlds) -> None:
    worlds("gloo", 1).run(dispatched, CASES[4:5])


def test_unfused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(call_unfused, dispatched, [CASES[5], UNEVEN[0]])


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs unfused until the kernels have run there; over nodes always."""
    problem = GroupedProblem(2, 1024, 8, 64, 4096, 7168, 1, "float8_e4m3fn")
    for plan in (plan_dispatch, plan_combine):
        assert plan(problem, CPU, True).path == "fused"
        monkeypatch.setattr(grouped, "SCALED_RAN_ON_GPUS", False)
        assert grouped.SCALED_ON_CPUS_ONLY in str(plan(problem, H200, False))
        monkeypatch.setattr(grouped, "SCALED_RAN_ON_GPUS", True)
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
        ((o.x8, o.w), right | {"quantize": "block"}, "16 or 32 bits"),
        ((o.x, o.w), right | {"quantize": "block"}, "x_scale given"),
        ((o.x, o.w), {"w_scale": o.w_scale, "quantize": "row"}, "scales of blocks"),
        ((o.x, o.w.bfloat16()), {"w_scale": o.w_scale, "quantize": "block"}, "float8_e4m3fn"),
        ((o.x8, o.w), right | {"x_scale": o.x_scale[:, :1]}, "x_scale"),
        ((o.x8, o.w), right | {"w_scale": o.w_scale[:, :1]}, "w_scale"),
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
