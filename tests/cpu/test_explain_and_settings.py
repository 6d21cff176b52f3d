"""tw.explain with the arguments of a call, environment settings, sizes of tw.warmup."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.cpu import (
    test_bad_input,
    test_matmul_all_reduce,
    test_matmul_all_to_all,
    test_matmul_reduce_scatter,
)
from tests.support.calls import refusal
from tests.support.matmul_cases import AG, AR, IN, OUT, RS
from tests.support.worlds import Member, Worlds
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tileweave.transport.cpu import CpuTransport

ROUND = {
    AG: {},
    RS: {},
    AR: {},
    OUT: {"scatter_dim": 1, "gather_dim": 0},
    IN: {"scatter_dim": 0, "gather_dim": 1},
}


def calls(size: int) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Operator -> arguments of a call with all options of the operator."""
    x, w, bias = torch.randn(4, 3, 8), torch.randn(6, 8), torch.randn(6)  # x of three dimensions
    experts, ids = torch.randn(2, 6, 8), torch.arange(8, dtype=torch.int32).view(4, 2) % (2 * size)
    tables, offsets = [torch.randn(5, 4)], torch.arange(2 * size + 1)
    y, plan = tw.dispatch_grouped_matmul(torch.randn(4, 8), experts, ids)
    exchange = {"scatter_dim": 1, "gather_dim": 0}
    return {
        "all_gather_matmul": ((x, w, bias), {"return_gathered": True}),
        "matmul_reduce_scatter": ((x, w, bias), {}),
        "matmul_all_reduce": (
            (x, w),
            {"residual": torch.randn(4, 3, 6), "norm_weight": torch.ones(6)},
        ),
        "matmul_all_to_all": ((x, w), {"bias": bias, **exchange}),
        "all_to_all_matmul": ((x, torch.randn(6, 8 // size)), {"bias": bias, **exchange}),
        "dispatch_grouped_matmul": ((torch.randn(4, 8), experts, ids), {"max_tokens": 5}),
        "grouped_matmul_combine": (
            (y, torch.randn(2, 8, 6), plan),
            {"topk_weights": torch.rand(4, 2)},
        ),
        "embedding_bag_all_to_all": (
            (tables, torch.arange(2 * size) % 5, offsets),
            {"batch": 2 * size, "mode": "mean"},
        ),
    }


def explained(me: Member) -> None:
    asked = calls(me.world_size)
    assert set(asked) == set(tw.OPERATORS)
    for op, (args, more) in asked.items():
        for given in (more, more | {"group": None}):
            plan = tw.explain(op, *args, **given)
            assert plan.path == "fused", (op, str(plan))
            getattr(tw, op)(*args, **given)
    experts, ids = asked["dispatch_grouped_matmul"][0][1:]
    x, plan = torch.randn(4, 8), asked["grouped_matmul_combine"][0][2]
    by_number, by_plan = (
        tw.explain("dispatch_grouped_matmul", x, experts, 2),
        tw.explain("dispatch_grouped_matmul", x, experts, plan=plan),
    )
    assert (
        str(by_number)
        == str(by_plan)
        == str(tw.explain("dispatch_grouped_matmul", x, experts, ids))
    )


def test_explain_takes_what_a_call_takes(worlds: Worlds) -> None:
    worlds("gloo", 2).run(explained)


# --- explain refuses the shapes and dtypes that a call refuses ---

# and options: neither shape nor dtype
OF_MEMORY = ("out_is_x", "out_is_w", "out_is_bias", "out_and_gathered")


def wrong_calls(size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The tables of wrong calls, for all dense operators."""

    def zeros(
        op: str, shapes: Mapping[Any, tuple[int, ...] | None], **options: int
    ) -> Callable[[], object]:
        return lambda: getattr(tw, op)(
            **{
                name: None if shape is None else torch.zeros(shape)
                for name, shape in shapes.items()
            },
            **options,
        )

    for name, (call, _) in test_bad_input.WRONG.items():
        if name not in OF_MEMORY:
            yield f"{AG}: {name}", partial(call, size)
    for name, (shapes, _) in test_matmul_reduce_scatter.WRONG.items():
        yield f"{RS}: {name}", zeros(RS, dict(zip(("x", "w", "bias", "out"), shapes, strict=True)))
    for name, (changes, _) in test_matmul_all_reduce.WRONG.items():
        yield f"{AR}: {name}", zeros(AR, {"x": (4, 8), "w": (6, 8), **changes})
    for name, (op, shapes, how, _) in test_matmul_all_to_all.WRONG.items():
        given = dict(zip(("x", "w", "bias", "out"), shapes, strict=True))
        yield f"{op}: {name}", zeros(op, given, scatter_dim=how[0], gather_dim=how[1])
    yield (
        f"{AR}: w_is_in_columns",
        lambda: tw.matmul_all_reduce(torch.zeros(4, 8), torch.zeros(8, 6).t()),
    )
    for op, options in {RS: {}, AR: {}, OUT: {"scatter_dim": 0, "gather_dim": 0}}.items():
        yield (
            f"{op}: float64",
            lambda op=op, options=options: getattr(tw, op)(
                torch.zeros(4, 8).double(), torch.zeros(6, 8).double(), **options
            ),
        )


def refused_without_a_call(me: Member, how: str) -> list[str]:
    """Wrong calls that are not refused. torch refuses some tensors without data before tileweave
    gets them."""
    with ExitStack() as stack:
        if how == "explained":
            for op in (AG, RS, AR, OUT, IN):
                stack.enter_context(mock.patch.object(tw, op, partial(tw.explain, op)))
        else:
            stack.enter_context(FakeTensorMode())
        return [
            name
            for name, call in wrong_calls(me.world_size)
            if not refusal(call).startswith("InputError: asked: ")
        ]


@pytest.mark.parametrize("how", ["explained", "fake"])
def test_explain_refuses_what_a_call_refuses(worlds: Worlds, how: str) -> None:
    assert worlds("gloo", 2).run(refused_without_a_call, how) == [[], []]


def of_rows_that_only_data_tells(me: Member) -> bool:
    """Compiled: the call checks what depends on such a size."""
    w = torch.randn(6, 8)

    def some(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return tw.matmul_reduce_scatter(x[keep], w)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, keep = torch.randn(6, 8), torch.arange(6) > 1
        return torch.equal(
            torch.compile(some, fullgraph=True, backend="aot_eager")(x, keep), some(x, keep)
        )


def test_explain_with_data_dependent_rows(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(of_rows_that_only_data_tells) == [True, True]


def graphs_of_rows(me: Member) -> dict[tuple[str, int], int]:
    """How often each operator is compiled for seven numbers of rows, with x of two and of three
    dimensions."""
    found = {}
    for op, options in ROUND.items():
        for between in ((), (3,)):
            torch._dynamo.reset()
            graphs: list[object] = []
            w = torch.randn(6, 8 * me.world_size if op == IN else 8)
            call = torch.compile(
                lambda x, residual=None, op=op, w=w, given=options: getattr(tw, op)(
                    x,
                    w,
                    torch.ones(6),
                    **({} if residual is None else {"residual": residual}),
                    **given,
                ),
                fullgraph=True,
                backend=lambda module, _, graphs=graphs: graphs.append(module) or module.forward,
            )
            for rows in range(4, 18, 2):
                call(
                    torch.randn(rows, *between, 8),
                    *([torch.randn(rows, *between, 6)] if op == AR else []),
                )
            found[op, 2 + len(between)] = len(graphs)
    return found


def test_any_number_of_rows_compiles_twice(worlds: Worlds) -> None:
    for found in worlds("gloo", 2).run(graphs_of_rows, timeout=100):
        assert set(found.values()) <= {1, 2}, found


# --- Captures ---


def captured_backward(me: Member, op: str, options: dict[str, int], backward: bool) -> str:
    """The error of a backward during a capture, after a warmup."""
    size, (m, n, k) = me.world_size, (64, 48, 32)
    tw.close()
    me.barrier()
    of_cpu: dict[str, Any] = {
        "dtype": torch.float32,
        "device": "cpu",
        "backward": backward,
        **options,
    }
    tw.warmup(op, m, n, k, **of_cpu)
    depth = size * k if op == IN else k
    x, w = torch.randn(m, k, requires_grad=True), torch.randn(n, depth, requires_grad=True)
    with mock.patch.object(CpuTransport, "capturing", return_value=True):
        said = refusal(lambda: getattr(tw, op)(x, w, **options).sum().backward())
    me.barrier()
    tw.close()
    me.barrier()
    return said


@pytest.mark.parametrize("op", ROUND)
def test_a_warmup_with_backward_prepares_it(worlds: Worlds, op: str) -> None:
    assert worlds("gloo", 2).run(captured_backward, op, ROUND[op], True) == ["", ""]


def test_a_captured_backward_names_its_warmup(worlds: Worlds) -> None:
    for said in worlds("gloo", 2).run(captured_backward, AG, {}, False):
        assert said.startswith("CaptureError") and "backward=True" in said, said


def settings(me: Member) -> None:
    x, w = torch.randn(2, 8), torch.randn(6, 8)
    for text in ("true", "yes", "2"):
        with mock.patch.dict(os.environ, TILEWEAVE_DEBUG=text):
            assert f"TILEWEAVE_DEBUG={text!r}" in refusal(tw.all_gather_matmul, x, w)
    for text in ("", "0", "1"):
        with mock.patch.dict(os.environ, TILEWEAVE_DEBUG=text):
            assert not refusal(tw.all_gather_matmul, x, w)


def test_invalid_setting_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 1).run(settings)


def test_warmup_refuses_invalid_sizes() -> None:
    with pytest.raises(tw.InputError, match="'8'"):
        tw.warmup("all_gather_matmul", 4, "8", 8, device="cpu")


def test_warmup_refuses_invalid_dtypes_and_devices() -> None:
    with pytest.raises(tw.InputError, match="'float32'"):
        tw.warmup("matmul_reduce_scatter", 4, 8, 8, dtype="float32", device="cpu")
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(tw.InputError, match="warmup on cuda"),
    ):
        tw.warmup("matmul_all_to_all", 4, 8, 8, device="cuda", scatter_dim=0, gather_dim=0)


def no_tensors(me: Member) -> None:
    x, how = torch.zeros(4, 8), {"scatter_dim": 0, "gather_dim": 0}
    for op, options in {AG: {}, RS: {}, AR: {}, OUT: how, IN: how}.items():
        for given in ((x, None), ([[1.0]], x), (None, x)):
            assert "InputError: asked: x of type" in refusal(getattr(tw, op), *given, **options)


def test_non_tensors_are_refused(worlds: Worlds) -> None:
    worlds("gloo", 1).run(no_tensors)


def bags_without_an_end(me: Member) -> None:
    """As ``torch.nn.EmbeddingBag`` takes them: one bag would be lost silently."""
    table, indices = torch.randn(5, 4), torch.arange(5)
    offsets = torch.tensor([0, 2, 3])
    for call in (tw.embedding_bag, tw.embedding_bag_all_to_all):
        assert "offsets that end with N" in refusal(call, [table], indices, offsets)
        assert not refusal(call, [table], indices, torch.tensor([0, 2, 3, 5]))


def test_offsets_end_with_the_number_of_indices(worlds: Worlds) -> None:
    worlds("gloo", 1).run(bags_without_an_end)
