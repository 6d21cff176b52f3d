"""Shared by CPU and GPU tests: gradients of matmul operators against fp64, and what backward
sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.support.behaviour import invoke
from tests.support.matmul_cases import (
    AG,
    AR,
    PRIVATE,
    Case,
    Operands,
    draw,
    draw_operands,
    expected,
)
from tests.support.tolerances import GRADIENT_ERROR, assert_norm_near
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core import collectives

LETTERS = {"x": "x", "w": "w", "b": "bias", "r": "residual", "n": "norm_weight"}


def draw_leaves(case: Case, rank: int, size: int, device: torch.device, wanted: str) -> Operands:
    operands = draw_operands(case, rank, size, device, 77)
    for letter, name in LETTERS.items():
        tensor = getattr(operands, name)
        if tensor is not None:
            tensor.requires_grad_(letter in wanted)
    return operands


def coefficients(
    case: Case, rank: int, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of each element of the results in the loss of this rank. Ranks have equal weights
    where they have equal results."""
    rows, seed_rank = case.out_rows(size), 0 if case.op == AR else rank
    c = draw((rows, case.out_cols(size)), case, 1.0, device, 88, seed_rank)
    width = case.depth if case.gathered else case.cols
    return c, draw(
        (rows, width), case, 1.0, device, 99, seed_rank
    ) if case.gathered or case.norm else None


def expected_gradients(case: Case, rank: int, size: int, device: torch.device) -> Operands:
    """One process computes in fp64 what all ranks do together. A replicated tensor is one leaf, and
    a replicated loss is one term."""
    everyone = [draw_operands(case, r, size, device, 77) for r in range(size)]
    for operands in everyone:
        for name in operands.names():
            shared = (
                operands is not everyone[0] and case.op not in PRIVATE and name not in ("x", "w")
            )
            leaf = (
                getattr(everyone[0], name)
                if shared
                else getattr(operands, name).double().requires_grad_()
            )
            setattr(operands, name, leaf)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for r in range(1 if case.op == AR else size):
        c, d = coefficients(case, r, size, device)
        y, second = expected(case, everyone, r)
        loss = loss + (y * c).sum()
        if d is not None and second is not None:
            loss = loss + (second * d).sum()
    loss.backward()
    return Operands(
        *(None if tensor is None else tensor.grad for tensor in vars(everyone[rank]).values())
    )


def gradients(
    me: Member, cases: list[Case], wanted: str = "xwbrn", backend: str | None = None
) -> None:
    """Gradients of every operand, through every result; also compiled."""
    for case in cases:
        function: Callable[..., torch.Tensor] = weighted_sum
        if backend is not None:
            torch._dynamo.reset()
            function = torch.compile(weighted_sum, fullgraph=True, backend=backend)
        for again in range(2):
            leaves = draw_leaves(case, me.rank, me.world_size, me.device, wanted)
            c, d = coefficients(case, me.rank, me.world_size, me.device)
            options = {**leaves.options(), **case.options()}
            function(case.op, leaves.x, leaves.w, leaves.bias, options, c, d).backward()
            want = expected_gradients(case, me.rank, me.world_size, me.device)
            for letter, name in LETTERS.items():
                leaf, right = getattr(leaves, name), getattr(want, name)
                what = (
                    f"rank {me.rank}, {case}, {wanted}, {backend}, call {again}: gradient of {name}"
                )
                if leaf is None or letter not in wanted:
                    assert leaf is None or leaf.grad is None, f"{what} was not asked for"
                    continue
                assert leaf.grad.dtype == leaf.dtype, f"{what} has dtype {leaf.grad.dtype}"
                assert_norm_near(leaf.grad, right, GRADIENT_ERROR[case.dtype], what)


def weighted_sum(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    options: dict[str, object],
    c: torch.Tensor,
    d: torch.Tensor | None,
) -> torch.Tensor:
    """A loss in which every element of y has its own weight, and of the second result if ``d`` is
    given."""
    if d is None:
        return (getattr(tw, op)(x, w, bias, **options) * c).sum()
    if op == AG:
        y, second = tw.all_gather_matmul(x, w, bias, return_gathered=True)
    else:
        y, second = getattr(tw, op)(x, w, bias, **options)
    return (y * c).sum() + (second * d).sum()


def gradients_through_one_result(me: Member, case: Case) -> None:
    """A loss that uses one of two results. The gradient of the other one is None, and nothing is
    sent for it."""
    for which in (0, 1):
        leaves = draw_leaves(case, me.rank, me.world_size, me.device, "xwbrn")
        weights = coefficients(case, me.rank, me.world_size, me.device)[which]
        (invoke(case, leaves)[which] * weights).sum().backward()
        everyone = [
            draw_leaves(case, r, me.world_size, me.device, "xwbrn") for r in range(me.world_size)
        ]
        losses = range(1 if case.op == AR else me.world_size)
        terms = [
            (
                expected(case, everyone, r)[which]
                * coefficients(case, r, me.world_size, me.device)[which]
            ).sum()
            for r in losses
        ]
        torch.stack(terms).sum().backward()
        want = everyone[me.rank].x.grad
        assert_norm_near(
            leaves.x.grad,
            want,
            GRADIENT_ERROR[case.dtype],
            f"rank {me.rank}, {case}, result {which}",
        )


def backward_collectives(me: Member, case: Case, wanted: dict[str, int], limit: int) -> None:
    """Collectives that backward calls, by name, and the number of elements that it keeps. ``limit``
    does not count the weight."""
    names = ("begin_all_gather", "begin_reduce_scatter", "all_reduce")
    sent: dict[str, int] = {}
    under_way: list[str] = []  # on the CPU a sum gathers: one collective, not two
    before = [(name, getattr(collectives, name)) for name in names]

    def counting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if not under_way:
                sent[name] = sent.get(name, 0) + 1
            under_way.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                under_way.pop()

        return call

    for name, function in before:
        setattr(collectives, name, counting(name, function))
    try:
        kept: list[torch.Tensor] = []
        leaves = draw_leaves(case, me.rank, me.world_size, me.device, "xwbrn")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y, _ = invoke(case, leaves)
        held = sum(t.numel() for t in {t.data_ptr(): t for t in kept}.values())
        limit += leaves.w.numel()
        assert held <= limit, f"{case}: backward holds {held} elements, at most {limit} are needed"
        sent.clear()
        y.sum().backward()
        assert sent == wanted, f"{case}: backward sent {sent}, expected {wanted}"
    finally:
        for name, function in before:
            setattr(collectives, name, function)
