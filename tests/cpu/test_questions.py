"""What is asked beside calls: tw.explain with a call's own arguments, settings, sizes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from tests.calling import refusal
from tests.worlds import Member, Worlds

import tileweave as tw
from tileweave.ops import registry


def calls(size: int) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Operator -> arguments of a call that uses what it has."""
    x, w, bias = torch.randn(4, 3, 8), torch.randn(6, 8), torch.randn(6)  # x of three dimensions
    experts, ids = torch.randn(2, 6, 8), torch.arange(8, dtype=torch.int32).view(4, 2) % (2 * size)
    tables, offsets = [torch.randn(5, 4)], torch.arange(2 * size + 1)
    y, plan = tw.dispatch_grouped_matmul(torch.randn(4, 8), experts, ids)
    exchange = {"scatter_dim": 1, "gather_dim": 0}
    return {
        "all_gather_matmul": ((x, w, bias), {"return_gathered": True}),
        "matmul_reduce_scatter": ((x, w, bias), {}),
        "matmul_all_reduce": ((x, w), {"residual": torch.randn(4, 3, 6), "norm_weight": torch.ones(6)}),
        "matmul_all_to_all": ((x, w), {"bias": bias, **exchange}),
        "all_to_all_matmul": ((x, torch.randn(6, 8 // size)), {"bias": bias, **exchange}),
        "dispatch_grouped_matmul": ((torch.randn(4, 8), experts, ids), {"max_tokens": 5}),
        "grouped_matmul_combine": ((y, torch.randn(2, 8, 6), plan), {"topk_weights": torch.rand(4, 2)}),
        "embedding_bag_all_to_all": ((tables, torch.arange(2 * size) % 5, offsets), {"batch": 2 * size, "mode": "mean"}),
    }


def explained(me: Member) -> None:
    asked = calls(me.world_size)
    assert set(asked) == set(registry._OPERATORS)
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
    assert str(by_number) == str(by_plan) == str(tw.explain("dispatch_grouped_matmul", x, experts, ids))


def test_explain_takes_what_a_call_takes(worlds: Worlds) -> None:
    worlds("gloo", 2).run(explained)


def settings(me: Member) -> None:
    x, w = torch.randn(2, 8), torch.randn(6, 8)
    for text in ("true", "yes", "2"):
        with mock.patch.dict(os.environ, TILEWEAVE_DEBUG=text):
            assert f"TILEWEAVE_DEBUG={text!r}" in refusal(tw.all_gather_matmul, x, w)
    for text in ("", "0", "1"):
        with mock.patch.dict(os.environ, TILEWEAVE_DEBUG=text):
            assert not refusal(tw.all_gather_matmul, x, w)


def test_a_setting_that_is_none_is_refused(worlds: Worlds) -> None:
    worlds("gloo", 1).run(settings)


def test_warmup_refuses_what_is_no_size() -> None:
    with pytest.raises(tw.InputError, match="'8'"):
        tw.warmup("all_gather_matmul", 4, "8", 8, device="cpu")


def bags_without_an_end(me: Member) -> None:
    """As ``torch.nn.EmbeddingBag`` takes them: one bag would be lost, and nobody would say so."""
    table, indices = torch.randn(5, 4), torch.arange(5)
    offsets = torch.tensor([0, 2, 3])
    for call in (tw.embedding_bag, tw.embedding_bag_all_to_all):
        assert "offsets that end with N" in refusal(call, [table], indices, offsets)
        assert not refusal(call, [table], indices, torch.tensor([0, 2, 3, 5]))


def test_offsets_end_with_the_number_of_indices(worlds: Worlds) -> None:
    worlds("gloo", 1).run(bags_without_an_end)
