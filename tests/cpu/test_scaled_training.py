"""FP8 training in CPU worlds: results and gradients of a recipe against fp64 of the same quantised
numbers, worked out here without the code under test."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tests.support.seeds import generator
from tests.support.worlds import Member, Worlds
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tileweave.errors import InputError, RankMismatchError, UnsupportedError
from tileweave.ops.matmul import quantize, scaled_operators, scaled_training
from tileweave.ops.matmul.scaled_training import linear
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (AG, RS, AR)
ROWWISE, HIGH = RECIPES = ("rowwise", "rowwise_with_gw_hp")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One call; ``rows`` of x on a rank."""

    op: str
    recipe: str
    rows: int
    cols: int = 16
    depth: int = 32
    dtype: torch.dtype = torch.bfloat16


def numbers(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator("cpu", *seed)).to(dtype)


def quantised(t: torch.Tensor, dim: int | None) -> torch.Tensor:
    """t as FP8 has it, with a scale for each slice along ``dim``; None: one scale."""
    values = t.double()
    greatest = values.abs().amax() if dim is None else values.abs().amax(dim, True)
    scale = torch.exp2(torch.ceil(torch.log2(greatest.clamp(min=1e-12) / 448.0)))
    return (values / scale).clamp(-448, 448).to(torch.float32).to(FP8).double() * scale


def operands(case: Case, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Of one rank; rows and columns have sizes that differ by a lot."""
    dtype = case.dtype
    x = numbers((case.rows, case.depth), dtype, seed, rank, 0)
    x = x * torch.exp2(5.0 * (torch.arange(case.rows) % 4) - 12)[:, None].to(dtype)
    w = numbers((case.cols, case.depth), dtype, seed, rank, 1)
    bias = numbers((case.cols,), dtype, seed, 0 if case.op != AG else rank, 2)
    w = w * torch.exp2(-6.0 * (torch.arange(case.depth) % 3))[None].to(dtype)
    return {"x": x, "w": w, "bias": bias * 2.0**-12}


def gradient(case: Case, rank: int, size: int, seed: int) -> torch.Tensor:
    """Of the result."""
    rows = {AG: case.rows * size, RS: case.rows // size, AR: case.rows}[case.op]
    g = numbers((rows, case.cols), case.dtype, seed, 0 if case.op == AR else rank, 3)
    return g * torch.exp2(-5.0 * (torch.arange(case.cols) % 4))[None].to(case.dtype)


def apart(got: torch.Tensor, want: torch.Tensor, dims: tuple[int | None, ...]) -> float:
    """The largest relative error of a slice along one of these dimensions; None: of all."""
    each = []
    for dim in dims:
        off, size = (t.norm() if dim is None else t.norm(dim=dim) for t in (got - want, want))
        each.append((off / size).max().item())
    return max(each)


def expected(case: Case, size: int, rank: int, seed: int) -> list[torch.Tensor]:
    """The result, and gradients of x, w and bias."""
    all_of = [operands(case, each, seed) for each in range(size)]
    grads = [gradient(case, each, size, seed) for each in range(size)]
    mine = all_of[rank]
    high = case.recipe == HIGH
    products = [quantised(one["x"], 1) @ quantised(one["w"], 1).t() for one in all_of]
    turned = [quantised(one["w"], None if high else 0) for one in all_of]
    if case.op == AG:
        x = torch.cat([one["x"] for one in all_of])
        y = quantised(x, 1) @ quantised(mine["w"], 1).t()
        back = [quantised(g, 1) @ w for g, w in zip(grads, turned, strict=True)]
        gx, g = torch.stack(back).sum(0).chunk(size)[rank], grads[rank]
    else:
        total = torch.stack(products).sum(0)
        y = total.chunk(size)[rank] if case.op == RS else total
        g = torch.cat(grads) if case.op == RS else grads[rank]
        x, gx = mine["x"], quantised(g, 1) @ turned[rank]
    gw = g.double().t() @ x.double() if high else quantised(g, 0).t() @ quantised(x, 0)
    return [y + mine["bias"].double(), gx, gw, g.double().sum(0)]


@contextmanager
def quantised_by_torch() -> Iterator[None]:
    """Without the quantiser's kernel, which is slow in the interpreter."""
    kept, quantize.interpreting = quantize.interpreting, lambda: False
    try:
        yield
    finally:
        quantize.interpreting = kept


def run(case: Case, me: Member, seed: int, needs: str = "xwb") -> list[torch.Tensor | None]:
    """The result and the gradients that are asked for."""
    given = operands(case, me.rank, seed)
    for name, letter in (("x", "x"), ("w", "w"), ("bias", "b")):
        given[name].requires_grad_(letter in needs)
    y = getattr(tw, case.op)(**given, quantize=case.recipe)
    assert y.dtype == case.dtype
    y.backward(gradient(case, me.rank, me.world_size, seed))
    return [y.detach(), *(given[name].grad for name in ("x", "w", "bias"))]


def check(case: Case, me: Member, seed: int, needs: str = "xwb") -> list[torch.Tensor | None]:
    found = run(case, me, seed, needs)
    wanted = expected(case, me.world_size, me.rank, seed)
    for name, got, want in zip(("y", "gx", "gw", "gb"), found, wanted, strict=True):
        if name != "y" and name[1] not in needs:
            assert got is None, name
            continue
        assert got is not None and got.shape == want.shape, f"{case}: {name}"
        # Partial sums are rounded, and so is the result; sums of a bias are those of torch. Of
        # float16 small rows are subnormal. Columns of y have one large element, whose partial sums
        # may cancel.
        whole = name == "gb" or case.dtype == torch.float16
        dims = (None,) if whole else (None, 1) if name == "y" else (None, 0, 1)
        error = apart(got.double(), want, dims)
        assert error < 2e-2, f"rank {me.rank}, {case}, {name}: error {error:.2e}"
    return found


def every_gradient(me: Member, op: str) -> None:
    """Both recipes, fused and unfused; rows that are no multiple of 16; parts of the gradients."""
    for number, recipe in enumerate(RECIPES):
        rows = 5 if op != RS else 3 * me.world_size
        case = Case(op, recipe, rows)
        with quantised_by_torch():
            check(case, me, number)
        with (
            quantised_by_torch(),
            choices.forced(AG, None),
            choices.forced(RS, None),
            choices.forced(AR, None),
        ):
            first = check(case, me, number)
            for a, b in zip(first, run(case, me, number), strict=True):
                assert a is not None and b is not None and torch.equal(a, b), "other bits"
        for needs in ("x", "wb") if recipe == ROWWISE else ("b", "w"):
            with quantised_by_torch():
                check(replace(case, dtype=torch.float16), me, number, needs)


@pytest.mark.parametrize(("op", "size"), [(AG, 2), (RS, 2), (AR, 2), (AG, 4), (RS, 4)])
def test_every_gradient(worlds: Worlds, op: str, size: int) -> None:
    worlds("gloo", size).run(every_gradient, op)


def placed(t: torch.Tensor, how: str) -> torch.Tensor:
    """The numbers of t with other strides, or where no 16 bytes begin."""
    if how == "turned":
        return t.t().contiguous().t()
    if how == "gaps":
        wide = torch.full((t.shape[0], t.shape[1] + 8), float("nan"), dtype=t.dtype)
        return wide[:, : t.shape[1]].copy_(t)
    memory = torch.empty(t.numel() + 3, dtype=t.dtype)[3 if how == "offset" else 0 :]
    return memory[: t.numel()].view(t.shape).copy_(t)


def called(how: str, case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result of a case by one of :data:`WAYS`."""

    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return getattr(tw, case.op)(x, w, bias, quantize=case.recipe)

    if how == "compile":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    if how.startswith("checkpoint"):
        reentrant = how.endswith("reentrant")
        return checkpoint(call, *given.values(), use_reentrant=reentrant)
    if how == "3d":
        return call(given["x"].reshape(case.rows, 1, -1), given["w"], given["bias"]).flatten(0, 1)
    return call(*given.values())


WAYS = ("plain", "accumulate", "compile", "checkpoint", "checkpoint reentrant", "retain", "3d")
PLACES = ("plain", "turned", "gaps", "offset")


def drawn(me: Member, first: int, count: int) -> None:
    """Random calls: sizes, strides, dtypes, what needs a gradient, and the ways to call."""
    for seed in range(first, first + count):
        draw = random.Random(seed)
        op, rows = draw.choice(OPS), draw.choice((1, 2, 3, 5, 7, 16, 17))
        rows *= me.world_size if op == RS else 1
        cols, depth = draw.choice((16, 48, 144)), draw.choice((16, 32, 144))
        dtype = draw.choice((torch.bfloat16, torch.float16))
        case = Case(op, draw.choice(RECIPES), rows, cols, depth, dtype)
        needs = draw.choice(("xwb", "x", "w", "b", "xw", "wb", "xb"))
        how, places = WAYS[seed % len(WAYS)], draw.choices(PLACES, k=3)
        told = f"seed {seed}: {case}, {how}, {needs}, {places}"
        given = operands(case, me.rank, seed)
        for name, place in zip(("x", "w", "bias"), [*places[:2], "plain"], strict=True):
            given[name] = placed(given[name], place).requires_grad_(name[0] in needs)
        grad = placed(gradient(case, me.rank, me.world_size, seed), places[2])
        times = 1
        with ExitStack() as stack:
            stack.enter_context(quantised_by_torch())
            for one in OPS if draw.random() < 0.5 else ():
                stack.enter_context(choices.forced(one, None))
            y = called(how, case, given)
            y.backward(grad, retain_graph=how == "retain")
            if how in ("accumulate", "retain"):
                (called(how, case, given) if how == "accumulate" else y).backward(grad)
                times = 2
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert torch.equal(called("plain", case, given), y.detach()), told
        wanted = expected(case, me.world_size, me.rank, seed)
        found = [y.detach(), *(t.grad for t in given.values())]
        for name, got, want in zip("yxwb", found, wanted, strict=True):
            if name != "y" and name not in needs:
                assert got is None, f"{told}: gradient of {name}"
                continue
            assert got is not None and got.dtype == dtype, f"{told}: {name}"
            error = apart(got.double() / (1 if name == "y" else times), want, (None,))
            assert error < 2e-2, f"{told}: {name}, error {error:.1e}"


@pytest.mark.parametrize("size", [2, 3])
def test_random_calls(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(drawn, 100 * size, 14)


def exact(me: Member) -> None:
    """Of numbers that FP8 has, results and gradients are those of 16-bit operands."""
    for op, recipe in zip(OPS, (ROWWISE, HIGH, ROWWISE), strict=True):
        rows = 2 * me.world_size
        x = torch.randint(-3, 4, (rows, 32), generator=torch.Generator().manual_seed(me.rank))
        w = torch.randint(-3, 4, (16, 32), generator=torch.Generator().manual_seed(9 + me.rank))
        found: list[torch.Tensor] = []
        for more in ({"quantize": recipe}, {}):
            a, b = (t.bfloat16().requires_grad_() for t in (x, w))
            y = getattr(tw, op)(a, b, **more)
            y.backward(torch.ones_like(y))
            found += [y.detach(), a.grad, b.grad]
        for got, want in zip(found[:3], found[3:], strict=True):
            assert torch.equal(got, want), f"{op} {recipe}"


def test_numbers_of_fp8_are_exact(worlds: Worlds) -> None:
    worlds("gloo", 2).run(exact)


def by_shards(me: Member) -> None:
    """The gradient of a reduce-scatter, quantised shard by shard as copy engines bring it."""
    config = MatmulConfig("library", "copy_engine", 16, 32, 64, 1, 4)
    case = Case(RS, ROWWISE, 16 * me.world_size)
    with choices.forced(AG, config):
        check(case, me, 1)


def test_gradients_that_copy_engines_gather(worlds: Worlds) -> None:
    worlds("gloo", 2).run(by_shards)


def compiled(me: Member) -> None:
    for op in (RS,):
        case = Case(op, ROWWISE, 2 * me.world_size)
        given = operands(case, me.rank, 5)
        g = gradient(case, me.rank, me.world_size, 5)

        def call(x: torch.Tensor, w: torch.Tensor, op: str = op) -> torch.Tensor:
            return getattr(tw, op)(x, w, quantize=ROWWISE) * 2

        found: list[Any] = []
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            x, w = (given[name].clone().requires_grad_() for name in ("x", "w"))
            y = function(x, w)
            y.backward(g)
            found.append((y.detach(), x.grad, w.grad))
        assert all(map(torch.equal, *found)), op


def test_compiled(worlds: Worlds) -> None:
    worlds("gloo", 2).run(compiled)


def powers(me: Member) -> None:
    """The quantiser's kernel and torch agree on scales that are powers of two."""
    x = torch.randn(8, 272) * torch.exp2(torch.arange(8.0) * 9 - 40)[:, None]
    x[1], x[2, 3], x[3, 5], x[4], x[5, 0] = 0, float("nan"), float("inf"), 448.0, 3e38
    for kind in ("row", "block"):
        found = quantize.quantize_rows(x, kind, powers=True)
        data, scale = quantize._in_torch(x, kind, powers=True)
        scale = scale.t() if kind == "block" else scale.view(-1)
        assert torch.equal(found[1].nan_to_num(7.0), scale.nan_to_num(7.0)), kind
        assert torch.equal(found[0].float().nan_to_num(7.0), data.float().nan_to_num(7.0)), kind
        for other in (x.flip(0)[:3] * 3, x[:0]) if kind == "row" else ():  # in one launch
            both, want = quantize.quantize_both_rows(x, other), (x, other)
            for (bits, found_scale), t in zip(both, want, strict=True):
                data, wide = quantize._in_torch(t, kind, powers=True)
                a, b = found_scale.view(-1), wide.view(-1)
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
                assert torch.equal(bits.float().nan_to_num(7.0), data.float().nan_to_num(7.0))
            assert both[0][1].shape == (8,) and both[1][1].shape == (1, len(other))
        finite = scale[scale.isfinite()]
        assert torch.equal(torch.exp2(torch.log2(finite).round()), finite), kind


def turned(me: Member) -> None:
    """The kernels that quantise and turn, and torch, agree: any number of rows, one scale or one
    for each column, NaN and infinity."""
    for rows, cols, dtype in ((5, 48, torch.bfloat16), (130, 144, torch.float16)):
        x = numbers((rows, cols), torch.float32, rows) * torch.exp2(torch.arange(cols) % 9 - 5.0)
        x = x.to(dtype)
        x[:, 1], x[2, 3], x[3, 5], x[4, 7] = 0, float("nan"), float("-inf"), -448.0
        for whole in (False, True):
            finite = x.nan_to_num(1.0, 2.0, 3.0) if whole else x
            data, scale = quantize.quantize_columns(finite, whole)
            with quantised_by_torch():
                found = quantize.quantize_columns(finite, whole)
            want, wide = quantize._in_torch(
                finite if whole else finite.t(), "tensor" if whole else "row", powers=True
            )
            want = torch.nn.functional.pad((want.t() if whole else want).float(), (0, -rows % 16))
            wide = wide.view(1, -1).expand(1, cols)
            for a, b in ((data, scale), found):
                assert torch.equal(b.nan_to_num(7.0), wide.nan_to_num(7.0))
                assert torch.equal(a.float().nan_to_num(7.0), want.nan_to_num(7.0)), (rows, whole)
        other = x[:, 16:32] * 3
        data, scale, of_other, other_scale = quantize.quantize_both_columns(x, other)
        for t, *found in ((x, data, scale.t()), (other, of_other, other_scale)):
            for a, b in zip(found, quantize.quantize_columns(t), strict=True):
                assert torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0)), rows


def test_columns_are_quantised_in_turned_order(worlds: Worlds) -> None:
    worlds("gloo", 1).run(turned)


def test_scales_are_powers_of_two(worlds: Worlds) -> None:
    worlds("gloo", 1).run(powers)


def refusals(me: Member) -> None:
    x, w = torch.zeros(4, 32).bfloat16(), torch.zeros(16, 32).bfloat16()
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ((x.float(), w.float()), {}, "bfloat16"),
        ((x, w.half()), {}, "bfloat16"),
        ((x, w[:12]), {}, "multiples of 16"),
        ((x, w), {"out_dtype": torch.float16}, "out_dtype"),
        ((x, w), {"w_scale": torch.ones(1)}, "w_scale"),
        ((x, w), {"fast_accum": "no"}, "True or False"),
        ((x, w), {"out": torch.zeros(4, 16).bfloat16()}, "out="),
        ((x, w[:0]), {"bias": [x]}, "bias of type list"),
    ]
    for op, (given, more, text) in product(OPS, bad):
        with pytest.raises(InputError, match=text):
            getattr(tw, op)(*given, quantize=ROWWISE, **more)
        tw.close()
    for odd in (x[:3], x[:3].view(3, 1, 32)):
        with pytest.raises(InputError, match="multiple of the group's size"):
            tw.matmul_reduce_scatter(odd, w, quantize=ROWWISE)
        tw.close()
    y = tw.all_gather_matmul(x.requires_grad_(), w, quantize=ROWWISE)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    tw.close()


def test_what_does_not_fit_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(refusals)


def known(me: Member) -> None:
    """A call of a known signature is not checked again, nor planned, in forward or backward."""
    checks, plans = Mock(wraps=scaled_training._check), Mock(wraps=scaled_operators.plan)
    with (
        quantised_by_torch(),
        patch.object(scaled_training, "_check", checks),
        patch.object(scaled_operators, "plan", plans),
    ):
        for op, recipe in product(OPS, RECIPES):
            run(Case(op, recipe, 2 * me.world_size), me, 1)
            checked, planned = checks.call_count, plans.call_count
            assert checked and planned
            run(Case(op, recipe, 2 * me.world_size), me, 2)
            # the backward of a reduce-scatter looks up a plan of a call that it does not make
            assert checks.call_count == checked, op
            assert plans.call_count == planned + (op == RS), op
            with pytest.raises(InputError, match="multiples of 16"):
                run(Case(op, recipe, 2 * me.world_size, cols=24), me, 3)
            tw.close()


def test_calls_are_checked_once_per_signature(worlds: Worlds) -> None:
    worlds("gloo", 2).run(known)


def disagree(me: Member) -> None:
    """Ranks that train by different recipes are told, also where both calls are known."""
    x, w = operands(Case(AG, ROWWISE, 2), me.rank, 1)["x"], torch.ones(16, 32).bfloat16()
    tw.close()
    with quantised_by_torch(), patch.dict(os.environ, TILEWEAVE_TIMEOUT="3"):
        for recipe in RECIPES:
            tw.all_gather_matmul(x, w, quantize=recipe)
        me.barrier()
        with pytest.raises(RankMismatchError):
            tw.all_gather_matmul(x, w, quantize=RECIPES[me.rank])
        tw.close()


def test_recipes_that_differ_between_ranks_are_told(worlds: Worlds) -> None:
    worlds("gloo", 2).run(disagree)


def warmed(me: Member) -> None:
    for op in (AG, RS):
        plan = tw.warmup(op, 4, 16, 32, scaling=ROWWISE, backward=True, device="cpu")
        assert "FP8" in plan.reason, plan  # type: ignore[union-attr]


def test_warmup(worlds: Worlds) -> None:
    worlds("gloo", 2).run(warmed)


def train(layer: Any, recipe: str | None) -> None:
    layer.train_in_fp8(recipe)


class Block(torch.nn.Module):
    """An MLP whose gate and up take the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(32, 64, bias=False)
        self.up_proj = torch.nn.Linear(32, 64, bias=False)
        self.down_proj = torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def layers(me: Member) -> None:
    with quantised_by_torch():
        _layers(me)


def _layers(me: Member) -> None:
    """Layers make the calls of their recipe; what they cannot do is refused, not left out."""
    torch.manual_seed(3)
    whole = torch.nn.Linear(32, 16 * me.world_size).bfloat16()
    turned = torch.nn.Linear(16 * me.world_size, 16).bfloat16()
    x = numbers((4, 32), torch.bfloat16, 1, me.rank)
    for recipe, sends in product(RECIPES, (True, False)):
        up = tw.nn.ColumnParallelLinear.from_linear(whole, gather=sends, fp8=recipe)
        down = tw.nn.RowParallelLinear.from_linear(turned, scatter=sends, fp8=recipe)
        given = x if sends else numbers((4, 32), torch.bfloat16, 2)
        down(up(given)).sum().backward()
        w, bias = (
            part.detach().chunk(me.world_size)[me.rank].requires_grad_()
            for part in (whole.weight, whole.bias)
        )
        v = turned.weight.detach().chunk(me.world_size, 1)[me.rank].requires_grad_()
        if sends:
            h = tw.all_gather_matmul(given, w, bias, quantize=recipe)
            y = tw.matmul_reduce_scatter(h, v, turned.bias.detach(), quantize=recipe)
        else:
            h = linear(given, w, bias, recipe)
            y: Any = tw.matmul_all_reduce(h, v, turned.bias.detach(), quantize=recipe)
        y.sum().backward()
        for layer, want in ((up, w), (down, v)):
            got: Any = layer.weight.grad
            assert want.grad is not None
            assert torch.equal(got.to_local(), want.grad), f"{recipe} {sends}"
            assert recipe in repr(layer)
    with pytest.raises(InputError, match="save_gathered"):
        tw.nn.ColumnParallelLinear(32, 64, save_gathered=True, fp8=ROWWISE)
    with pytest.raises(InputError, match="fp8='row'"):
        tw.nn.ColumnParallelLinear(32, 64, fp8="row")
    with pytest.raises(InputError, match="multiples of 16"):
        tw.nn.RowParallelLinear(24 * me.world_size, 64, fp8=ROWWISE)
    found = []
    for fp8 in (None, ROWWISE):
        torch.manual_seed(4)
        block = tw.parallelize(Block().bfloat16(), sequence_parallel=False)
        for layer in block.children():
            train(layer, fp8)
        found.append(block(numbers((4, 32), torch.bfloat16, 5)).detach().float())
    assert not torch.equal(*found) and (found[0] - found[1]).norm() < 0.1 * found[0].norm()
    block = tw.parallelize(Block().bfloat16(), sequence_parallel=True)
    with pytest.raises(InputError, match="shares the gather"):
        train(block.gate_proj, ROWWISE)


def test_layers(worlds: Worlds) -> None:
    worlds("gloo", 2).run(layers)
