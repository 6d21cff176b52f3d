"""Shared by property-based tests: strategies, operands with unusual alignment and strides, and the
check of a result.

Hypothesis draws in the test process, and a world of two makes each call. Examples are few, since
kernels are interpreted, and are not shrunk, since a world is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.matmul_cases import AG, AR, EPS, RS
from tests.support.worlds import Member, World

import tileweave as tw

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 65504.0)
Planted = tuple[tuple[int, int, float], ...]  # (rank, index, value)

sizes = st.one_of(st.integers(0, 3), st.integers(4, 40))
dtypes = st.sampled_from(sorted(TOLERANCE))
offsets = st.integers(0, 7)  # elements by which a tensor starts off a 16-byte boundary
planted = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=3
).map(tuple)


def for_any(strategy: st.SearchStrategy, count: int, check: Callable[[Any], None]) -> None:
    """Run ``check`` on ``count`` examples, the same ones each time, or on TILEWEAVE_PROPERTIES
    times as many for a longer search."""
    few = settings(
        max_examples=count * int(os.environ.get("TILEWEAVE_PROPERTIES", "1")),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    few(given(strategy)(lambda example: check(example)))()


def in_world(world: World, function: Callable[[Member, Any], None]) -> Callable[[Any], None]:
    """A check that ``function`` reports no error on any rank. An exception ends a world, and there
    are more examples."""

    def check(example: Any) -> None:
        found = world.run(attempt, function.__module__, function.__name__, example)
        assert not any(found), f"{example}: {found}"

    return check


def attempt(me: Member, module: str, name: str, example: object) -> str:
    from importlib import import_module

    try:
        getattr(import_module(module), name)(me, example)
    except (AssertionError, tw.TileweaveError, RuntimeError, ValueError) as error:
        return f"rank {me.rank}: {type(error).__name__}: {error}"
    return ""


def with_gaps(values: torch.Tensor, offset: int, gap: int = 0) -> torch.Tensor:
    """``values`` in memory that starts at element ``offset``, with ``gap`` elements between rows if
    it is a matrix."""
    rows, cols = values.shape if values.dim() == 2 else (1, values.numel())
    storage = torch.empty(offset + rows * (cols + gap) + 1, dtype=values.dtype)
    storage.fill_(float("nan") if values.is_floating_point() else -99)
    view = storage[offset : offset + rows * (cols + gap)].view(rows, cols + gap)[:, :cols]
    return (
        view.copy_(values.reshape(rows, cols))
        if values.dim() == 2
        else view[0].copy_(values.flatten()).view(values.shape)
    )


def write_special_values(tensors: list[torch.Tensor], what: Planted) -> None:
    """Write values at indices of the tensors of the ranks, which are contiguous."""
    for owner, place, value in what:
        if tensors[owner].numel():
            tensors[owner].view(-1)[place % tensors[owner].numel()] = value


def check_result(
    got: torch.Tensor, want: torch.Tensor, scale: float, parts: torch.Tensor | None = None
) -> None:
    """Check that ``got`` is ``want`` (fp64) within its dtype: NaN and infinities where they must
    be, and nowhere else.

    ``parts`` [parts, ...] are values that were rounded before they were added. Where one of them is
    finite but exceeds the dtype, the sum is not checked.
    """
    assert got.shape == want.shape, f"{tuple(got.shape)}, not {tuple(want.shape)}"
    limit, name = torch.finfo(got.dtype).max, str(got.dtype).removeprefix("torch.")
    near = lambda t: t.isfinite() & (t.abs() > 0.99 * limit)  # noqa: E731 - rounding decides whether this is infinite
    unsure = near(want) & (want.abs() < 1.01 * limit)
    if parts is not None:
        unsure |= near(parts).any(0)
    want = torch.where(want.abs() > limit, want.sign() * float("inf"), want)
    got, want = got.double()[~unsure], want[~unsure]
    assert torch.equal(got.isnan(), want.isnan()), "NaN where it must be, and nowhere else"
    infinite, finite = want.isinf(), want.isfinite()
    assert torch.equal(got[infinite], want[infinite]), "infinities with their signs"
    error = float((got - want)[finite].abs().max()) / scale if finite.any() else 0.0
    assert error <= TOLERANCE[name], f"error {error}"


def scale_of(*tensors: torch.Tensor | None) -> float:
    """1 + the largest finite absolute value."""
    largest = [
        float(t.double().nan_to_num(0, 0, 0).abs().max())
        for t in tensors
        if t is not None and t.numel()
    ]
    return 1.0 + max(largest, default=0.0)


# --- Matmul operators ---


@dataclass(frozen=True)
class Example:
    """One call.

    ``rows`` are those of a shard of x or y, or all rows for an all-reduce. ``cols`` and ``depth``
    are per rank. ``between`` is the size of a dimension between rows and columns (0: none).
    ``offset`` is by how many elements x, w and the results are off a 16-byte boundary. ``gap`` is
    between rows of w. ``second`` asks for the second result: gathered input, or norm.
    """

    op: str
    rows: int
    cols: int
    depth: int
    between: int
    dtype: str
    bias: bool
    residual: bool
    into: bool
    second: bool
    offset: tuple[int, int, int]
    gap: int
    planted: Planted

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def inner(self) -> int:
        """Rows of the matrix per row of x."""
        return max(self.between, 1)

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (rows, self.between, cols) if self.between else (rows, cols)

    def x_rows(self, size: int) -> int:
        return self.rows * size if self.op == RS else self.rows


def examples(op: str) -> st.SearchStrategy[Example]:
    return st.builds(
        Example,
        op=st.just(op),
        rows=sizes,
        cols=sizes,
        depth=st.one_of(sizes, st.sampled_from([64, 65, 127, 500, 4099])),
        between=st.sampled_from([0, 0, 0, 1, 2, 3]),
        dtype=dtypes,
        bias=st.booleans(),
        residual=st.booleans() if op == AR else st.just(False),
        into=st.booleans(),
        second=st.booleans() if op != RS else st.just(False),
        offset=st.tuples(offsets, offsets, offsets),
        gap=st.integers(0, 5),
        planted=planted,
    ).map(
        lambda e: (
            Example(**{**vars(e), "second": False}) if e.op == AG and e.into and e.second else e
        )
    )


@dataclass
class Drawn:
    """Matrices of one call: x and w of every rank, shared operands, and the result in fp64 with its
    parts."""

    x: list[torch.Tensor]
    w: list[torch.Tensor]
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm_weight: torch.Tensor | None
    want: torch.Tensor
    parts: torch.Tensor | None


def drawn(example: Example, rank: int, size: int) -> Drawn:
    e, dtype = example, example.torch_dtype
    rows, generator = e.x_rows(size) * e.inner, torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x = [random(rows, e.depth).to(dtype) for _ in range(size)]
    write_special_values(x, e.planted)
    w = [random(e.cols, e.depth).div(max(e.depth, 1) ** 0.5).to(dtype) for _ in range(size)]
    biases = [random(e.cols).to(dtype) for _ in range(size)]
    bias = biases[rank if e.op == AG else 0] if e.bias else None
    parts = None
    if e.op == AG:
        want = torch.cat(x).double() @ w[rank].double().t()
    else:
        parts = torch.stack([a.double() @ b.double().t() for a, b in zip(x, w, strict=True)])
        want = parts.sum(0)
    if bias is not None:
        want = want + bias.double()
        # one of them has the bias
        parts = None if parts is None else torch.cat([parts, parts + bias.double()])
    residual = random(rows, e.cols).to(dtype) if e.residual else None
    norm_weight = random(e.cols).to(dtype) if e.op == AR and e.second else None
    if e.op == RS:
        mine = slice(rank * e.rows * e.inner, (rank + 1) * e.rows * e.inner)
        want, parts = want[mine], parts[:, mine] if parts is not None else None
    if residual is not None and parts is not None:
        # unfused, the sum is rounded before the residual is added
        parts = torch.cat([parts, want[None]])
        want = want + residual.double()
    return Drawn(x, w, bias, residual, norm_weight, want, parts)


def check_call(me: Member, example: Example) -> None:
    e, d = example, drawn(example, me.rank, me.world_size)
    at_x, at_w, at_out = e.offset
    out_rows = d.want.shape[0] // e.inner
    x = with_gaps(d.x[me.rank].view(e.shape(e.x_rows(me.world_size), e.depth)).contiguous(), at_x)
    w = with_gaps(d.w[me.rank], at_w, e.gap)
    blank = lambda: with_gaps(  # noqa: E731
        torch.full(e.shape(out_rows, e.cols), float("nan"), dtype=x.dtype), at_out
    )
    options: dict[str, Any] = {"out": blank()} if e.into else {}
    if e.op == AG:
        options["return_gathered"] = e.second
    if d.residual is not None:
        options["residual"] = with_gaps(
            d.residual.view(e.shape(e.x_rows(me.world_size), e.cols)), at_w
        )
    if d.norm_weight is not None:
        options |= {"norm_weight": d.norm_weight, "norm_eps": EPS} | (
            {"residual_out": blank()} if e.into else {}
        )
    found = getattr(tw, e.op)(x, w, d.bias, **options)
    y, second = found if isinstance(found, tuple) else (found, None)
    assert isinstance(second, torch.Tensor) == e.second and y.dtype == x.dtype
    assert y.shape == e.shape(out_rows, e.cols), f"{tuple(y.shape)}"
    if e.into:
        assert y is options["out"] and second is options.get("residual_out"), (
            "out= is what comes back"
        )
    scale = scale_of(*d.x, d.residual)
    flat = y.reshape(d.want.shape)
    if not e.second:
        return check_result(flat, d.want, scale, d.parts)
    assert second is not None
    if e.op == AG:
        check_result(flat, d.want, scale)
        assert torch.equal(
            second.reshape(-1).view(torch.uint8), torch.cat(d.x).view(-1).view(torch.uint8)
        ), "bit by bit"
        return None
    kept = second.reshape(d.want.shape)
    check_result(kept, d.want, scale, d.parts)
    assert d.norm_weight is not None
    k = kept.double()  # the input of the norm is the rounded sum
    normed = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + EPS) * d.norm_weight.double()
    return check_result(flat, normed, scale_of(normed))


def alias_error(me: Member, example: tuple[str, str, int]) -> str:
    """Pass ``out=`` in the storage of an input, overlapping or not. Return the error, "" if there
    is none."""
    op, which, shift = example
    rows = 4
    storage = torch.zeros(4096)
    inputs = {"x": torch.ones(rows, 8), "w": torch.ones(6, 8), "bias": torch.ones(6)}
    out_rows = {AG: rows * me.world_size, RS: rows // me.world_size, AR: rows}[op]
    if op == AR:
        inputs |= {
            "residual": torch.ones(rows, 6),
            "norm_weight": torch.ones(6),
            "residual_out": torch.ones(rows, 6),
        }
    inputs[which] = storage[: inputs[which].numel()].view(inputs[which].shape).copy_(inputs[which])
    out = storage[shift : shift + out_rows * 6].view(out_rows, 6)
    try:
        getattr(tw, op)(**inputs, out=out)
    except tw.InputError as error:
        return str(error)
    return ""
