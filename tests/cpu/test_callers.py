"""What callers pass besides plain tensors: inputs of any strides, meshes as groups."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import call_unfused, refusal, run_either
from tests.support.matmul_cases import AG, AR, IN, OUT, RS
from tests.support.worlds import Member, World, Worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear

import tileweave as tw
from tileweave.kernels.runtime import compile_all as compiling
from tileweave.kernels.runtime import launch as launching
from tileweave.ops.core import registry
from tileweave.ops.matmul import warmup as warmups
from tileweave.planning.problem import Plan

EXCHANGE = {"scatter_dim": 0, "gather_dim": 1}


@pytest.fixture(params=[2, 3], ids="world{}".format)
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", request.param)


# --- Any strides ---


def strided(me: Member) -> None:
    """Inputs that are not contiguous give the bits and gradients of contiguous ones, and are logged
    once."""
    rows, depth, said = 2 * me.world_size, 3 * me.world_size, []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("tileweave")
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)  # and not by a patch: a logger keeps what it is enabled for
    whole = torch.randn(2, rows, 2 * depth)
    views = (whole[0, :, ::2], whole[0, :, :depth], whole.transpose(0, 1)[..., :depth])
    with mock.patch.object(registry, "_SAID", set()):
        for op in (AG, RS, AR, OUT, IN):
            for view in views:
                options = EXCHANGE if op in (OUT, IN) else {}
                k = depth * me.world_size if op == IN else depth
                w = torch.randn(5, k)
                plain, odd = view.contiguous().requires_grad_(), view.detach().requires_grad_()
                assert not odd.is_contiguous()
                want, found = (getattr(tw, op)(x, w, **options) for x in (plain, odd))
                assert torch.equal(want, found), (op, view.stride())
                weights = torch.randn_like(want)
                (want * weights).sum().backward()
                (found * weights).sum().backward()
                assert torch.equal(plain.grad, odd.grad), (op, view.stride())
        x, w = torch.ones(rows, depth), torch.ones(5, depth)
        residual = torch.randn(5, rows).t()
        assert torch.equal(
            tw.matmul_all_reduce(x, w, residual=residual),
            tw.matmul_all_reduce(x, w, residual=residual.contiguous()),
        )
        ids, experts = torch.zeros(4, 1, dtype=torch.int64), torch.randn(1, 5, 8)
        tokens = torch.randn(8, 4).t()
        y, plan = tw.dispatch_grouped_matmul(tokens, experts, ids)
        want, _ = tw.dispatch_grouped_matmul(tokens.contiguous(), experts, plan=plan)
        rows = int(plan.offsets[-1])
        assert torch.equal(y[:rows], want[:rows])
    log.removeHandler(listener)
    log.setLevel(level)
    copies = [text for text in said if "copies" in text]
    assert len(copies) == len(set(copies)) == 7, copies


def test_inputs_of_any_strides(world: World) -> None:
    world.run(call_unfused, strided)


# --- Meshes ---


def meshes(me: Member) -> list[str]:
    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("tp",))
    grid = init_device_mesh("cpu", (1, me.world_size), mesh_dim_names=("dp", "tp"))
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    want = tw.all_gather_matmul(x, w)
    compiled = torch.compile(
        lambda group: tw.all_gather_matmul(x, w, group=group), fullgraph=True, backend="eager"
    )
    for group in (mesh, grid["tp"]):
        assert torch.equal(tw.all_gather_matmul(x, w, group=group), want)
        assert tw.explain(AG, x, w, group=group).path == tw.explain(AG, x, w).path
        assert torch.equal(compiled(group), want)
    tw.close(mesh)
    return [refusal(tw.all_gather_matmul, x, w, group=grid)]


def test_a_mesh_as_group(worlds: Worlds) -> None:
    for (said,) in worlds("gloo", 2).run(meshes):
        assert "2 dimensions" in said and "mesh[dimension]" in said, said


# --- Several weights, sequences in dimension 1, uneven columns ---

DEPTH = 8


@dataclass(frozen=True)
class Columns:
    """One call of all_gather_matmul over weights of these numbers of rows.

    shape : of the shard of x, without K. uneven : the last rank has fewer columns, or none.
    used : the results in the loss. frozen : weights without a gradient. alone : w is one tensor.
    """

    n: tuple[int, ...] = (5, 17, 3)
    shape: tuple[int, ...] = (4,)
    bias: tuple[int, ...] = ()
    gather_dim: int = 0
    gathered: bool = False
    uneven: bool = False
    used: tuple[int, ...] = (0, 1, 2)
    frozen: tuple[int, ...] = ()
    x_frozen: bool = False
    main_grad: bool = False
    dtype: torch.dtype = torch.float32

    def columns(self, rank: int, size: int) -> list[int]:
        """The rows of each weight of a rank. Uneven: of n * size - 1, cut as DTensor does."""
        if not self.uneven:
            return list(self.n)
        return [min(max(n * size - 1 - rank * n, 0), n) for n in self.n]


def random(*sizes: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(c: Columns, rank: int, size: int) -> tuple[torch.Tensor, list, list, list]:
    """x, weights, biases and the coefficients of the loss of a rank."""
    seed, columns = 1000 * rank, c.columns(rank, size)
    x = random(*c.shape, DEPTH, seed=seed, dtype=c.dtype).requires_grad_(not c.x_frozen)
    w = [
        random(n, DEPTH, seed=seed + i + 1, dtype=c.dtype).requires_grad_(i not in c.frozen)
        for i, n in enumerate(columns)
    ]
    bias = [
        random(n, seed=seed + i + 50, dtype=c.dtype).requires_grad_() if i in c.bias else None
        for i, n in enumerate(columns)
    ]
    whole = list(c.shape)
    whole[c.gather_dim] *= size
    factors = [
        random(*whole, n, seed=seed + i + 90, dtype=c.dtype)
        for i, n in enumerate([*columns, DEPTH])
    ]
    return x, w, bias, factors


def call(c: Columns, x: torch.Tensor, w: list, bias: list, **options: object) -> tuple:
    """The results as a list, and gather(x)."""
    if c.uneven:
        options["cols"] = c.columns(0, dist.get_world_size())
    given = bias if any(b is not None for b in bias) else None
    found = tw.all_gather_matmul(
        x, w, given, return_gathered=c.gathered, gather_dim=c.gather_dim, **options
    )
    return found if c.gathered else (found, None)


def loss_of(c: Columns, y: list, gathered: torch.Tensor | None, factors: list) -> torch.Tensor:
    total = sum((y[i] * factors[i].to(y[i].dtype)).sum() for i in c.used if i < len(y))
    if gathered is not None:
        total = total + (gathered * factors[-1].to(gathered.dtype)).sum()
    return total


def step(c: Columns, x: torch.Tensor, w: list, bias: list, factors: list, **options: object):
    y, gathered = call(c, x, w, bias, **options)
    return loss_of(c, y, gathered, factors), y, gathered


def columns(me: Member, c: Columns, backend: str | None = None) -> None:
    """Results and gradients against one process in fp64."""
    everyone = [leaves(c, rank, me.world_size) for rank in range(me.world_size)]
    doubles = [
        (
            x.detach().double().requires_grad_(),
            [t.detach().double().requires_grad_() for t in w],
            [None if t is None else t.detach().double().requires_grad_() for t in bias],
        )
        for x, w, bias, _ in everyone
    ]
    gathered = torch.cat([x for x, _, _ in doubles], dim=c.gather_dim)
    wants = [
        [linear(gathered, a, b) for a, b in zip(w, bias, strict=True)] for _, w, bias in doubles
    ]
    losses = [
        loss_of(c, want, gathered if c.gathered else None, factors)
        for want, (*_, factors) in zip(wants, everyone, strict=True)
    ]
    torch.stack(losses).sum().backward()
    x, w, bias, factors = everyone[me.rank]
    options = {}
    if c.main_grad:
        options["main_grad"] = [torch.ones(t.shape) for t in w]
    run = step
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True, backend=backend)
    loss, y, kept = run(c, x, w, bias, factors, **options)
    near = partial(torch.testing.assert_close, check_dtype=False, **TOLERANCES[c.dtype])
    for got, want in zip(y, wants[me.rank], strict=True):
        near(got.double(), want)
    if c.gathered:
        near(kept.double(), gathered)
    if not loss.requires_grad:
        return
    loss.backward()
    mine = doubles[me.rank]
    if not c.x_frozen:
        near(x.grad.double(), mine[0].grad)
    for i, (own, right) in enumerate(zip(w, mine[1], strict=True)):
        expected = i in c.used and i not in c.frozen
        if c.main_grad:
            assert own.grad is None
            near(options["main_grad"][i].double(), 1 + (right.grad if expected else 0 * right))
        else:
            if expected:
                near(own.grad.double(), right.grad)
            elif backend is None:
                assert own.grad is None, (c, i)
            else:  # compilers fill in zeros
                assert own.grad is None or not own.grad.any(), (c, i)
    for i in c.bias:
        if i in c.used:
            near(bias[i].grad.double(), mine[2][i].grad)


TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-1},
}
SEVERAL = [
    Columns(),
    Columns(bias=(0, 2), shape=(2, 3)),
    Columns(gathered=True, bias=(0, 1, 2)),
    Columns(used=(1,), bias=(0, 1)),
    Columns(used=(0, 2), gathered=True),
    Columns(used=(), gathered=True),
    Columns(frozen=(0, 2), bias=(0,)),
    Columns(frozen=(0, 1, 2)),
    Columns(x_frozen=True),
    Columns(n=(6,), used=(0,), bias=(0,)),
    Columns(dtype=torch.bfloat16),
]


COMPILED = Columns(used=(0, 2), shape=(3, 4), gather_dim=1, gathered=True, uneven=True, bias=(1, 2))


def several(me: Member, cases: list[Columns], backend: str | None = None) -> None:
    for case in cases:
        columns(me, case, backend)


@pytest.mark.parametrize("interpreted", [True, False])
def test_several_weights(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, several, SEVERAL)


def test_several_weights_compiled(worlds: Worlds) -> None:
    worlds("gloo", 2).run(several, [SEVERAL[1], COMPILED], "aot_eager", timeout=120)


SEQUENCES = [
    Columns(shape=(3, 4), gather_dim=1, bias=(1,)),
    Columns(n=(6,), used=(0,), shape=(3, 2, 2), gather_dim=1, gathered=True),
]
UNEVEN = [
    Columns(uneven=True, bias=(0, 1, 2)),
    Columns(n=(6,), used=(0,), uneven=True, gathered=True, bias=(0,)),
    Columns(n=(1,), used=(0,), uneven=True, bias=(0,)),
    Columns(n=(1, 4), uneven=True, used=(0,)),
    Columns(n=(1, 4), uneven=True, used=(0, 1), shape=(3, 4), gather_dim=1),
]
ADDED = [
    Columns(main_grad=True),
    Columns(main_grad=True, used=(2,), dtype=torch.bfloat16, shape=(3, 4), gather_dim=1),
    Columns(main_grad=True, n=(6,), used=(0,), uneven=True, gathered=True),
    Columns(main_grad=True, frozen=(1,), x_frozen=True),
]


@pytest.mark.parametrize("interpreted", [True, False])
def test_sequences_uneven_columns_and_main_grad(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, several, [*SEQUENCES, *UNEVEN, *ADDED])


@dataclass(frozen=True)
class Sums:
    """One call of matmul_reduce_scatter: x [*shape, k]; uneven, main_grad, dtype as above."""

    shape: tuple[int, ...]
    k: int = 6
    scatter_dim: int = 0
    uneven: bool = False
    main_grad: bool = False
    dtype: torch.dtype = torch.float32


def sums(me: Member, cases: list[Sums]) -> None:
    """matmul_reduce_scatter against one process in fp64: the result and all gradients."""
    for c in cases:
        size = me.world_size
        shape = list(c.shape)
        shape[c.scatter_dim] *= size
        ks = Columns(n=(c.k,), uneven=c.uneven)
        every = []
        for rank in range(size):
            (k,) = ks.columns(rank, size)
            x = random(*shape, k, seed=rank, dtype=c.dtype)
            every.append((x, random(5, k, seed=rank + 20, dtype=c.dtype)))
        doubles = [[t.double().requires_grad_() for t in pair] for pair in every]
        bias = random(5, seed=40, dtype=c.dtype)
        right = bias.double().requires_grad_()
        total = sum(x @ w.t() for x, w in doubles) + right
        factors = random(*shape, 5, seed=41, dtype=c.dtype)
        (total * factors.double()).sum().backward()
        x, w, bias = (t.requires_grad_() for t in (*every[me.rank], bias))
        options = {"scatter_dim": c.scatter_dim, "depth": c.k if c.uneven else None}
        if c.main_grad:
            options["main_grad"] = torch.ones(w.shape)
        y = tw.matmul_reduce_scatter(x, w, bias, **options)
        own = lambda t: t.chunk(size, c.scatter_dim)[me.rank]  # noqa: B023, E731
        near = partial(torch.testing.assert_close, check_dtype=False, **TOLERANCES[c.dtype])
        near(y.double(), own(total))
        (y * own(factors)).sum().backward()
        near(x.grad.double(), doubles[me.rank][0].grad)
        near(bias.grad.double(), right.grad)
        if c.main_grad:
            assert w.grad is None
            near(options["main_grad"].double(), 1 + doubles[me.rank][1].grad)
        else:
            near(w.grad.double(), doubles[me.rank][1].grad)


SUMS = [
    Sums((3, 4), scatter_dim=1),
    Sums((2, 3, 2), scatter_dim=1, main_grad=True, uneven=True),
    Sums((4,), uneven=True),
    Sums((4,), k=1, uneven=True),
    Sums((4,), main_grad=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("interpreted", [True, False])
def test_sums_of_sequences_uneven_depths_and_main_grad(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, sums, SUMS)


def layouts(me: Member) -> None:
    """Sequences in dimension 1: with one sequence nothing is copied, and ``out=`` has the layout of
    the result."""
    x, w, size = torch.randn(1, 4, 8), torch.randn(6, 8), me.world_size
    y = tw.all_gather_matmul(x, w, gather_dim=1)
    assert y.shape == (1, 4 * size, 6) and y.is_contiguous()
    with mock.patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("copied")):
        tw.all_gather_matmul(x, w, gather_dim=1)
        # a function by element of a result keeps its layout
        pairs = tw.all_gather_matmul(torch.randn(4, 2, 8).transpose(0, 1), w, gather_dim=1)
        z = tw.matmul_reduce_scatter(pairs.relu(), w[:, :6], scatter_dim=1)
    assert z.shape == (2, 4, 6)
    x = torch.randn(2, 4, 8)
    out = torch.empty(4 * size, 2, 6).transpose(0, 1)
    assert tw.all_gather_matmul(x, w, gather_dim=1, out=out) is out
    assert torch.equal(out, tw.all_gather_matmul(x, w, gather_dim=1))
    far, of = x.to("meta"), w.to("meta")
    first, second = tw.all_gather_matmul(far, [of, of[:3]], gather_dim=1, cols=[6, 4])
    assert first.shape == (2, 4 * size, 6) and second.shape == (2, 4 * size, 3)
    assert first.stride() == tw.all_gather_matmul(x, w, gather_dim=1).stride()
    assert tw.matmul_reduce_scatter(far, of, scatter_dim=1, depth=9).shape == (2, 4 // size, 6)
    plan = tw.explain(AG, x, [w[:2], w], gather_dim=1)
    assert "weight 1 of 2 has the most columns" in plan.reason, plan
    assert plan.config == tw.explain(AG, x, w, gather_dim=1).config


def test_layouts_of_sequences(worlds: Worlds) -> None:
    worlds("gloo", 2).run(layouts)


def layouts_of_gradients(me: Member) -> None:
    """Attentions of torch may keep their backward for one layout of the gradient (cuDNN)."""
    w = torch.randn(6, 8)
    calls = (
        lambda x: tw.matmul_reduce_scatter(x, w, scatter_dim=1),
        lambda x: tw.all_gather_matmul(x, w, gather_dim=1),
        lambda x: tw.all_gather_matmul(x, [w, w[:2]], gather_dim=1)[0],
        torch.compile(lambda x: tw.matmul_reduce_scatter(x, w, scatter_dim=1), backend="aot_eager"),
    )
    for call in calls:
        for made in (torch.zeros(2, 4, 8), torch.zeros(4, 2, 8).transpose(0, 1)):
            found: list[torch.Tensor] = []
            x = made.requires_grad_().view_as(made)
            x.register_hook(found.append)
            call(x).square().sum().backward()
            assert found[0].stride() == x.stride(), call


def test_gradients_have_the_layout_of_x(worlds: Worlds) -> None:
    worlds("gloo", 2).run(layouts_of_gradients, timeout=60)


def added_by_compiled_code(me: Member) -> None:
    torch._dynamo.reset()
    x, w, factors = (random(4, 8, seed=n, dtype=torch.float32) for n in range(3))
    w = w.requires_grad_()
    added = [torch.ones(4, 8) for _ in range(6)]

    def loss(into: torch.Tensor, summed: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        y = tw.all_gather_matmul(x, w, main_grad=into)
        z = tw.matmul_reduce_scatter(factors, w, main_grad=summed)
        u = tw.matmul_all_reduce(factors, w, main_grad=reduced)
        return y.square().sum() + z.square().sum() + u.square().sum()

    for function, into in (
        (loss, added[:3]),
        (torch.compile(loss, fullgraph=True, backend="aot_eager"), added[3:]),
    ):
        for _ in range(2):  # later calls add to it before the first backward runs
            function(*into).backward()
    assert w.grad is None or not w.grad.any()
    for eager, compiled in zip(added[:3], added[3:], strict=True):
        torch.testing.assert_close(eager, compiled)
        assert not torch.equal(eager, torch.ones(4, 8))


def test_main_grad_compiled(worlds: Worlds) -> None:
    worlds("gloo", 2).run(added_by_compiled_code)


# --- Warm-up for many numbers of rows ---


def warmed(me: Member) -> None:
    """Each call is made once, the largest first, after all of them were made over a transport that
    sends nothing. Later calls are right."""
    made: list[int] = []
    compiled: list[int] = []
    launch = launching.Launcher.__call__

    def noted(self: launching.Launcher, *given: torch.Tensor) -> None:
        made.append(given[0].shape[0])
        launch(self, *given)

    def compile_all(launches: list[launching.Planned], rank: int, size: int) -> list[str]:
        compiled.append(len(launches))
        made.clear()  # the launches until now were not made
        return [launch.kernel.__name__ for launch in launches]

    sizes, options = [2, 8, 70, 4], {"dtype": torch.float32, "device": "cpu"}
    size = me.world_size
    with (
        mock.patch.object(launching.Launcher, "__call__", noted),
        mock.patch.object(compiling, "compile_all", compile_all),
    ):
        for op in (AG, RS, AR, OUT, IN):
            how = EXCHANGE if op in (OUT, IN) else {}
            rows = sizes if op in (AG, AR) else [n * size for n in sizes]
            plans = tw.warmup(op, rows, 6 * size, 8 * size, **options, **how)
            assert list(plans) == rows and compiled.pop() == len(made) == 4, (op, made)
            assert all(plan.path == "fused" for plan in plans.values())
            assert made == sorted(made, reverse=True), (op, made)
            made.clear()
    plans = tw.warmup(AR, range(1, 4), 6, 8, norm=True, backward=True, **options)
    assert list(plans) == [1, 2, 3]
    plans = tw.warmup(AG, [3, 2], [4, 6], 8, backward=True, **options)
    assert "weight 1 of 2" in plans[3].reason
    assert isinstance(tw.warmup(AR, 2, 6, 8, **options), Plan)
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    assert torch.equal(tw.matmul_all_reduce(x, w), torch.full((4, 6), 8.0 * size))
    assert "rows=[]" in refusal(tw.warmup, AR, [], 6, 8)
    assert "rows=[1, -1]" in refusal(tw.warmup, AR, [1, -1], 6, 8)


def test_warmup_of_many_rows(world: World) -> None:
    world.run(warmed)


def compiled_in_parts(me: Member) -> None:
    """Calls that keep more memory than they may are compiled before more calls are made. Kernels
    are returned by call, and what calls share counts once."""
    parts: list[int] = []
    memories: list[dict[int, int]] = []
    x, w = torch.ones(64, 256), torch.ones(512, 256)

    def compile_all(launches: list[launching.Planned], rank: int, size: int) -> list[str]:
        parts.append(len(launches))
        memories.extend(launch.memory() for launch in launches)
        return [f"{len(parts)}.{number}" for number in range(len(launches))]

    def compiled(most: float) -> list[list[str]]:
        parts.clear()
        with (
            mock.patch.object(compiling, "compile_all", compile_all),
            mock.patch.object(warmups, "most_kept", return_value=most),
        ):
            calls = [partial(tw.all_gather_matmul, x, each) for each in (w, w, *others)]
            return warmups.compile_calls(registry.name_of(None), x.device, calls)

    others = [w.clone() for _ in range(4)]
    assert compiled(math.inf) == [[f"1.{number}"] for number in range(6)] and parts == [6]
    first, second, third, *_ = memories
    at, other = w.untyped_storage().data_ptr(), others[0].untyped_storage().data_ptr()
    assert first[at] == second[at] == third[other] == w.nbytes and at not in third
    assert first != second, "of results that differ"
    three = sum((first | second | third).values())
    kernels = [f"{part}.{number}" for part in (1, 2) for number in range(3)]
    assert compiled(three - 1) == [[kernel] for kernel in kernels] and parts == [3, 3, 0]
    assert compiled(0) == [[f"{part}.0"] for part in range(1, 7)] and parts == [1] * 6 + [0]


def test_what_waits_to_be_compiled_keeps_little_memory(world: World) -> None:
    world.run(compiled_in_parts)


# --- What is refused ---

X, W = torch.ones(4, 8), torch.ones(6, 8)
REFUSED = {
    "no weights": lambda: tw.all_gather_matmul(X, []),
    "bias of 1 for 2 weights": lambda: tw.all_gather_matmul(X, [W, W], [None]),
    "cols of 1 for 2 weights": lambda: tw.all_gather_matmul(X, [W, W], cols=6),
    r"w \(6, 8\) with cols=5": lambda: tw.all_gather_matmul(X, W, cols=5),
    "w of types Tensor, NoneType": lambda: tw.all_gather_matmul(X, [W, None]),
    "cols=2.5": lambda: tw.all_gather_matmul(X, W, cols=2.5),
    "out= with several": lambda: tw.all_gather_matmul(X, [W], out=torch.ones(8, 6)),
    "w.*6, 7": lambda: tw.all_gather_matmul(X, [W, torch.ones(6, 7)]),
    "main_grad .*4, 8": lambda: tw.all_gather_matmul(X, W, main_grad=torch.ones(4, 8)),
    "gather_dim=2": lambda: tw.all_gather_matmul(X[None], W, gather_dim=2),
    "gather_dim=1 with x of 2 dimensions": lambda: tw.all_gather_matmul(X, W, gather_dim=1),
    "whose memory has the order": lambda: tw.all_gather_matmul(
        X[None].expand(3, 4, 8), W, gather_dim=1, out=torch.ones(3, 8, 6)
    ),
    "scatter_dim=-1": lambda: tw.matmul_reduce_scatter(X[None], W, scatter_dim=-1),
    r"x \(4, 8\) with depth=7": lambda: tw.matmul_reduce_scatter(X, W, depth=7),
    "depth='all'": lambda: tw.matmul_reduce_scatter(X, W, depth="all"),
    "out= with depth=": lambda: tw.matmul_reduce_scatter(X, W, depth=8, out=torch.ones(2, 6)),
    "main_grad .*float16": lambda: tw.matmul_reduce_scatter(X, W, main_grad=W.half()),
}


def refused(me: Member) -> dict[str, str]:
    """On the last rank alone: an error must be found before anything is sent."""
    said = {}
    for pattern, function in REFUSED.items():
        if me.rank == me.world_size - 1:
            said[pattern] = refusal(function)
        tw.close()
        me.barrier()
    return said


def test_refusals_of_one_rank(worlds: Worlds) -> None:
    for pattern, text in worlds("gloo", 2).run(refused)[-1].items():
        assert text.startswith("InputError: asked: "), (pattern, text)
        assert re.search(pattern, text), (pattern, text)


def disagreeing(me: Member) -> list[str]:
    """What ranks compare does not depend on whether they compare it before or after sending."""
    said = []
    patch = mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1", TILEWEAVE_TIMEOUT="3")
    for function in (
        lambda odd: tw.all_gather_matmul(X, W[: 6 - me.rank], cols=6 + odd),
        lambda odd: tw.all_gather_matmul(X, [W, W[: 3 + odd]]),
        lambda odd: tw.matmul_reduce_scatter(X, W, depth=8 + odd),
        lambda odd: tw.all_gather_matmul(X, W, cols=6) if odd else tw.all_gather_matmul(X, W),
    ):
        with patch:
            function(0)
            said.append(refusal(function, int(me.rank == 1)))
    return said


def test_ranks_that_disagree(worlds: Worlds) -> None:
    for texts in worlds("gloo", 2).run(disagreeing):
        assert all(text.startswith("RankMismatchError") for text in texts), texts


def check_operator(me: Member) -> None:
    """Without the compiler's part, which other tests have."""
    x, w, bias, _ = leaves(Columns(bias=(0, 1, 2)), me.rank, me.world_size)
    op, name = torch.ops.tileweave.all_gather_matmul_list.default, registry.name_of(None)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for args in ((w, [], [], name, False, []), (w, bias, [], name, True, [5, 17, 3])):
        torch.library.opcheck(op, (x, *args), test_utils=utils)


def test_opcheck(worlds: Worlds) -> None:
    worlds("gloo", 2).run(check_operator, timeout=100)
