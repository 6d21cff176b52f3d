"""Any shape, stride, dtype and alignment, and what is not finite: the public call equals fp64, or says what is wrong.

Hypothesis draws in the process of the tests; a world of two makes each call. Examples are few, since kernels are
interpreted, and are not shrunk, since a world is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.worlds import Member, Worlds

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tileweave as tw

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 65504.0)


@dataclass(frozen=True)
class Example:
    """One call. ``offset``: elements by which x, w, out start off a 16-byte boundary; ``gap``: between rows of w."""

    rows: int
    cols: int
    depth: int
    dtype: str
    bias: bool
    result: str  # "new", "out", "gathered"
    offset: tuple[int, int, int]
    gap: int
    planted: tuple[tuple[int, int, float], ...]  # (rank, place, value) in x


def placed(values: torch.Tensor, offset: int, gap: int = 0) -> torch.Tensor:
    """``values`` in memory that starts ``offset`` elements late, with ``gap`` elements between rows."""
    rows, cols = values.shape
    storage = torch.full((offset + rows * (cols + gap) + 1,), float("nan"), dtype=values.dtype)
    view = storage[offset : offset + rows * (cols + gap)].view(rows, cols + gap)[:, :cols]
    return view.copy_(values)


def operands(example: Example, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x of all ranks, w and bias of this one, as drawn; and the result in fp64."""
    dtype = getattr(torch, example.dtype)
    everyone = torch.randn(size, example.rows, example.depth, generator=torch.Generator().manual_seed(1)).to(dtype)
    for owner, place, value in example.planted:
        if everyone[0].numel():
            everyone[owner].view(-1)[place % everyone[0].numel()] = value
    own = torch.Generator().manual_seed(10 + rank)
    w = torch.randn(example.cols, example.depth, generator=own).div(max(example.depth, 1) ** 0.5).to(dtype)
    bias = torch.randn(example.cols, generator=own).to(dtype) if example.bias else None
    gathered = everyone.view(size * example.rows, example.depth)
    want = gathered.double() @ w.double().t()
    return gathered, w, bias, want if bias is None else want + bias.double()


def call(me: Member, example: Example) -> str:
    """What is wrong ("": nothing): a world ends with an exception, and hypothesis has more examples."""
    try:
        check_call(me, example)
    except (AssertionError, tw.TileweaveError, RuntimeError, ValueError) as error:
        return f"rank {me.rank}: {type(error).__name__}: {error}"
    return ""


def check_call(me: Member, example: Example) -> None:
    gathered, w, bias, want = operands(example, me.rank, me.world_size)
    at_x, at_w, at_out = example.offset
    x = placed(gathered[me.rank * example.rows : (me.rank + 1) * example.rows], at_x)
    w = placed(w, at_w, example.gap)
    out = placed(torch.full(want.shape, float("nan"), dtype=x.dtype), at_out) if example.result == "out" else None
    kept = None
    if example.result == "gathered":
        y, kept = tw.all_gather_matmul(x, w, bias, return_gathered=True)
    else:
        y = tw.all_gather_matmul(x, w, bias, out=out)
    assert isinstance(y, torch.Tensor)
    assert out is None or y is out, "out= is what comes back"
    assert y.shape == want.shape and y.dtype == x.dtype, f"{y.shape}, {y.dtype}"
    if kept is not None:
        assert torch.equal(kept.view(torch.uint8), gathered.contiguous().view(torch.uint8)), "gathered, bit by bit"
    got, limit = y.double(), torch.finfo(x.dtype).max
    want = torch.where(want.abs() > limit, want.sign() * float("inf"), want)
    assert torch.equal(got.isnan(), want.isnan()), "NaN where it must be, and nowhere else"
    finite = want.isfinite() & (want.abs() < 0.99 * limit)
    assert torch.equal(got[want.isinf()], want[want.isinf()]), "infinities with their signs"
    scale = 1 + gathered.double().nan_to_num(0, 0, 0).abs().max() if gathered.numel() else 1.0
    error = (got - want)[finite].abs().max() / scale if finite.any() else 0.0
    assert error <= TOLERANCE[example.dtype], f"error {error}"


sizes = st.one_of(st.integers(0, 3), st.integers(4, 40))
EXAMPLES = st.builds(
    Example,
    rows=sizes,
    cols=sizes,
    depth=st.one_of(sizes, st.sampled_from([64, 65, 127, 500, 4099])),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    bias=st.booleans(),
    result=st.sampled_from(["new", "out", "gathered"]),
    offset=st.tuples(*[st.integers(0, 7)] * 3),
    gap=st.integers(0, 5),
    planted=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=3).map(tuple),
)


@pytest.mark.timeout(300)
def test_any_input(worlds: Worlds) -> None:
    world = worlds("gloo", 2)

    @settings(
        max_examples=90,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(EXAMPLES)
    def check(example: Example) -> None:
        assert world.run(call, example) == ["", ""], example

    check()


def aliases(me: Member, which: str, shift: int) -> str:
    """``out=`` in the storage of an input, overlapping or beside it."""
    size = me.world_size
    storage = torch.zeros(4096)
    x, w, bias = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    inputs = {"x": x, "w": w, "bias": bias}
    inputs[which] = storage[: inputs[which].numel()].view(inputs[which].shape).copy_(inputs[which])
    out = storage[shift : shift + size * 4 * 6].view(size * 4, 6)
    try:
        tw.all_gather_matmul(inputs["x"], inputs["w"], inputs["bias"], out=out)
    except tw.InputError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
def test_out_never_shares_memory_with_an_input(worlds: Worlds) -> None:
    world = worlds("gloo", 2)

    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.sampled_from(["x", "w", "bias"]), st.integers(0, 3000))
    def check(which: str, shift: int) -> None:
        for text in world.run(aliases, which, shift):
            assert "storage of an input" in text, f"{which}, {shift}: {text!r}"

    check()


def public_words(me: Member, rows: int, cols: int, depth: int) -> None:
    """explain, warmup, synchronize and close take any sizes, and agree with each other."""
    x, w = torch.zeros(rows, depth), torch.zeros(cols, depth)
    plan = tw.explain("all_gather_matmul", x, w)
    assert tw.warmup("all_gather_matmul", rows, cols, depth, dtype=torch.float32, device="cpu") == plan
    assert plan.path == ("fused" if min(rows, cols, depth) else "unfused"), plan
    layer = tw.nn.ColumnParallelLinear(max(depth, 1), max(cols, 1) * me.world_size, bias=rows % 2 == 0)
    y = layer(torch.zeros(rows, max(depth, 1)))
    assert y.shape == (rows * me.world_size, max(cols, 1))
    tw.synchronize()
    if (rows + cols) % 3 == 0:
        tw.close()
    dist.barrier()


@pytest.mark.timeout(120)
def test_the_other_public_words(worlds: Worlds) -> None:
    world = worlds("gloo", 2)

    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 40))
    def check(rows: int, cols: int, depth: int) -> None:
        world.run(public_words, rows, cols, depth)

    check()
