"""Calls of matmul operators with FP8 operands, against fp64 of the numbers that these represent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from tests.support.seeds import generator
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.matmul.quantize import _in_torch  # the kernel is slow in the interpreter
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FP8 = torch.float8_e4m3fn
KINDS = [("tensor", "tensor"), ("tensor", "row"), ("row", "row"), ("block", "tile")]
EPS = 0.05
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One call; ``rows`` of x on a rank. ``kinds``: of x and w; ``quantize``: x of bfloat16."""

    op: str
    rows: int
    cols: int = 48
    depth: int = 160
    kinds: tuple[str, str] = ("row", "row")
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    norm: bool = False
    quantize: bool = False


def numbers(shape: tuple[int, ...], *seed: object) -> torch.Tensor:
    return torch.randn(shape, generator=generator("cpu", *seed))


def value(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """data * scale in fp64, written without the code under test."""
    rows, depth = data.shape
    up = [
        1 if given == size else size if given == 1 else 128
        for given, size in zip(scale.shape, data.shape, strict=True)
    ]
    wide = scale.double().repeat_interleave(up[0], 0).repeat_interleave(up[1], 1)
    return data.double() * wide[:rows, :depth].expand(rows, depth)


def operands(
    case: Case, rank: int, seed: int, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Of one rank; ranks have scales that differ by a lot."""
    x = (numbers((case.rows, case.depth), seed, rank, 0) * 4.0 ** (rank - 1)).bfloat16()
    w = numbers((case.cols, case.depth), seed, rank, 1) * case.depth**-0.5
    found = {}
    of_x, of_w = case.kinds
    found["w"], found["w_scale"] = _in_torch(w, of_w)
    data, scale = _in_torch(x, of_x)
    found["data"], found["scale"] = data, scale.view(1, 1) if of_x == "tensor" else scale
    if case.quantize:
        found["x"] = x
    else:
        found["x"], found["x_scale"] = data, scale
    shared = seed, 0 if case.op != AG else rank
    if case.bias:
        found["bias"] = numbers((case.cols,), *shared, 2).to(case.dtype)
    if case.norm:
        found["residual"] = numbers((case.rows, case.cols), *shared, 3).to(case.dtype)
        found["norm_weight"] = numbers((case.cols,), *shared, 4).to(case.dtype)
    return {name: t.to(device) for name, t in found.items()}


def wide(scale: torch.Tensor, of: str) -> torch.Tensor:
    return scale.view(1, 1) if of == "tensor" else scale


def expected(case: Case, everyone: list[dict[str, torch.Tensor]], rank: int) -> torch.Tensor:
    mine, size = everyone[rank], len(everyone)
    xs = [value(one["data"], one["scale"]) for one in everyone]
    ws = [value(one["w"], wide(one["w_scale"], case.kinds[1])) for one in everyone]
    bias = mine["bias"].double() if case.bias else 0.0
    if case.op == AG:
        return torch.cat(xs) @ ws[rank].t() + bias
    total = torch.stack([x @ w.t() for x, w in zip(xs, ws, strict=True)]).sum(0) + bias
    if case.op == RS:
        return total.view(size, -1, case.cols)[rank]
    if case.norm:
        total = total + mine["residual"].double()
        inverse = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        return total * inverse * mine["norm_weight"].double()
    return total


def invoke(case: Case, given: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    named = {name: t for name, t in given.items() if name not in ("data", "scale")}
    if case.quantize:
        more["quantize"] = case.kinds[0]
    if case.norm:
        more["norm_eps"] = EPS
    torch.set_default_dtype(torch.bfloat16)  # as inference engines do; scales stay float32
    try:
        y = getattr(tw, case.op)(**named, out_dtype=case.dtype, **more)
    finally:
        torch.set_default_dtype(torch.float32)
    return y[0] if isinstance(y, tuple) else y


def check(case: Case, me: Member, seed: int, **more: object) -> torch.Tensor:
    everyone = [operands(case, rank, seed, me.device) for rank in range(me.world_size)]
    got = invoke(case, everyone[me.rank], **more)
    want = expected(case, everyone, me.rank)
    assert got.dtype == case.dtype and got.shape == want.shape, f"{case}: {got.dtype} {got.shape}"
    # Partial sums are rounded to 8 bits (bf16) or 11 (fp16), and so is the result. The interpreter
    # truncates to bf16: by 0.82 of 2**-8 in the mean square, always towards zero, so errors add up.
    narrow = case.dtype == torch.bfloat16
    bits, roundings = 8 if narrow else 11, 1 + (case.op != AG) + case.norm
    each = 0.85 if narrow and me.device.type == "cpu" else 0.75
    error = (got.double() - want).norm() / want.norm()
    assert error < each * roundings * 2.0**-bits, f"rank {me.rank}, {case}: error {error:.2e}"
    return got


def in_one_shot(me: Member, configs: Sequence[MatmulConfig]) -> None:
    """Few rows, in both slots. All ranks get the same bits."""
    for number, (kinds, config) in enumerate(product(KINDS, configs)):
        norm = number % 3 == 0
        rows, depth = (1, 3, config.tile_m)[number % 3], (160, 128, 400)[number % 3]
        case = Case(AR, rows, 176, depth, kinds, torch.float16, bias=norm, norm=norm)
        fast = {"fast_accum": True} if number % 2 and kinds[0] != "block" else {}
        with choices.forced(AR, config):
            first = check(case, me, 7, **fast)
            check(case, me, 8, **fast)
            assert torch.equal(first, check(case, me, 7, **fast)), f"{case}: other bits later"
        everyone = [torch.empty_like(first).float() for _ in range(me.world_size)]
        dist.all_gather(everyone, first.float())
        assert all(torch.equal(one, first.float()) for one in everyone), f"{case}: other bits"
