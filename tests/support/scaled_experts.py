"""Shared by CPU and GPU tests: expert operators with FP8 operands, against fp64 of the numbers that
the operands represent, token by token in plain loops on the CPU."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from tests.support import experts
from tests.support.experts import Case
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.matmul.quantize import _in_torch


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
        self.ids = o.ids
        self.x = o.x * 4.0 ** (rank % 4 - 1)  # scales differ by a lot, and results fit float16
        self.x8, self.x_scale = _in_torch(self.x, "block")
        self.w, self.w_scale = by_tiles(o.experts)
        generator = torch.Generator().manual_seed(seed * 7 + rank)
        inner = case.cols // 2
        v = torch.randn(case.experts, case.depth, inner, generator=generator) * inner**-0.5
        self.v, self.v_scale = by_tiles(v)
        shape = (o.x.shape[0], case.topk)
        self.topk_weights = torch.rand(shape, generator=generator)

    def on(self, device: torch.device) -> Drawn:
        """A copy whose tensors are on ``device``."""
        copied = copy(self)
        for name, t in vars(self).items():
            setattr(copied, name, t.to(device))
        return copied


def check_near(got: torch.Tensor, want: torch.Tensor, bits: int, roundings: int, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    # the interpreter truncates to bf16, which is twice the error
    limit = roundings * 2.0**-bits * max(float(want.norm()), 1e-30)
    error = float((got.double().cpu() - want).norm())
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
        o, want = everyone[me.rank].on(me.device), expected_dispatch(case, everyone, me.rank, seed)
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
        out = torch.full(
            (plan.bound, case.cols), float("nan"), dtype=torch.float16, device=me.device
        )
        half, _ = tw.dispatch_grouped_matmul(
            o.x8, o.w, plan=plan, x_scale=o.x_scale, out_dtype=torch.float16, out=out, **args
        )
        assert half is out
        check_near(half[: len(want)], want, 11, 1, f"{what}, float16")


def layer(
    me: Member, case: Case, everyone: list[Drawn], y: torch.Tensor, plan: Any, half: bool, what: str
) -> None:
    """swiglu and combine of what was dispatched."""
    o, rows = everyone[me.rank].on(me.device), int(plan.offsets[-1])
    plain = tw.swiglu(y, plan)
    data, scale = tw.swiglu(y, plan, quantize="block")
    want8, want_scale = _in_torch(plain[:rows], "block")
    if me.device.type == "cpu":
        assert torch.equal(scale[:rows], want_scale), f"{what}: scales of swiglu"
        assert torch.equal(data[:rows].float(), want8.float()), f"{what}: data of swiglu"
    else:  # two kernels, of which one may round an exponential the other way
        got = value(data[:rows], scale[:rows])
        check_near(got, value(want8, want_scale).cpu(), 10, 1, f"{what}: swiglu")
    # expected: every rank's own values, exchanged, since swiglu of other ranks is not known here
    mine = torch.zeros(plan.bound, case.depth, dtype=torch.float64)
    ends = plan.offsets.tolist()
    for expert in range(case.experts):
        part = slice(ends[expert], ends[expert + 1])
        weight = value(o.v[expert], o.v_scale[expert]).cpu()
        mine[part] = value(data[part], scale[part]).cpu() @ weight.t()
    sums = torch.zeros(me.world_size, case.max_tokens, case.depth, dtype=torch.float64)
    flat = plan.entry_row.view(me.world_size, case.max_tokens, case.topk).tolist()
    for source, tokens in enumerate(flat):
        for token, choices in enumerate(tokens):
            for j, row in enumerate(choices):
                if row >= 0:
                    factor = float(everyone[source].topk_weights[token, j])
                    sums[source, token] += factor * mine[row]
    sums = sums.to(me.device)
    torch.distributed.all_reduce(sums)
    want = sums[me.rank, : plan.tokens].cpu()
    named: dict[str, Any] = {"y_scale": scale, "w_scale": o.v_scale}
    z = tw.grouped_matmul_combine(data, o.v, plan, o.topk_weights, **named)
    assert z.dtype == torch.bfloat16
    check_near(z, want, 8, 3, f"{what}, combine")
    if not half:
        return
    out = torch.full_like(z, float("nan"), dtype=torch.float16)
    named |= {"out_dtype": torch.float16, "out": out}
    assert tw.grouped_matmul_combine(data, o.v, plan, o.topk_weights, **named) is out
    check_near(out, want, 11, 3, f"{what}, combine, float16")
