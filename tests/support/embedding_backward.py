"""Shared by CPU and GPU tests: gradients of embedding tables and weights, and optimizer steps in
place."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from tests.support.embedding import Bags, Case, call, draw, pooled
from tests.support.tolerances import GRADIENT_ERROR, assert_norm_near
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.embedding.table_gradient import (
    Lookups,
    Update,
    sort_concurrently,
    table_gradients,
)
from tileweave.planning.sharding import rows_of


def expected_gradients(case: Case, rank: int, size: int, seed: int) -> list[torch.Tensor]:
    """fp64 gradients of the tables of this rank, for the loss sum over ranks of (y * c).sum()."""
    bags = draw(case, rank, torch.device("cpu"), seed)
    tables = [t.double().requires_grad_() for t in bags.tables]
    mine = pooled(bags, case, tables)
    layout = case.layout(size)
    loss = torch.zeros((), dtype=torch.float64)
    for owner in range(size):
        begin, end = rows_of(case.batch, size, owner)
        c, at = coefficients(case, owner, size, torch.device("cpu")).double(), 0
        for column, dim in zip(layout.columns[rank], layout.dims[rank], strict=True):
            loss = loss + (mine[begin:end, at : at + dim] * c[:, column : column + dim]).sum()
            at += dim
    if loss.requires_grad:
        loss.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tables]


def coefficients(case: Case, rank: int, size: int, device: torch.device) -> torch.Tensor:
    begin, end = rows_of(case.batch, size, rank)
    generator = torch.Generator().manual_seed(999 + rank)
    return (
        torch.randn(end - begin, case.layout(size).width, generator=generator)
        .to(case.result_dtype)
        .to(device)
    )


def gradients(
    me: Member, cases: list[Case], sparse: bool = False, backend: str | None = None
) -> None:
    """Compare dense or sparse gradients of the tables and of the weights with fp64, with and
    without division by R."""
    for seed, case in enumerate(cases):
        bags = draw(case, me.rank, me.device, seed)
        c = coefficients(case, me.rank, me.world_size, me.device)
        for divide in (False, True):
            for t in (*bags.tables, *([] if bags.weights is None else [bags.weights])):
                t.requires_grad_()
                t.grad = None

            def loss(
                c: torch.Tensor, bags: Bags = bags, case: Case = case, divide: bool = divide
            ) -> torch.Tensor:
                y = call(
                    case,
                    bags,
                    me.world_size,
                    gradient="sparse" if sparse else "dense",
                    divide_gradient=divide,
                )
                return (y * c).sum()

            (loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend))(
                c
            ).backward()
            factor = 1 / me.world_size if divide else 1.0
            for number, (table, want) in enumerate(
                zip(
                    bags.tables, expected_gradients(case, me.rank, me.world_size, seed), strict=True
                )
            ):
                what = f"rank {me.rank}, {case}, table {number}, divide {divide}"
                assert (
                    table.grad is not None
                    and table.grad.is_sparse == sparse
                    and table.grad.dtype == table.dtype
                ), what
                assert_norm_near(
                    table.grad.to_dense(), want * factor, GRADIENT_ERROR[case.dtype], what
                )
            if bags.weights is not None:
                want = weight_gradient(case, me, seed) * factor
                assert_norm_near(
                    bags.weights.grad,
                    want,
                    GRADIENT_ERROR[case.dtype],
                    f"rank {me.rank}, {case}, weights",
                )


def by_copy_engines(me: Member, check: Callable[..., None], *arguments: object) -> None:
    """Run ``check`` with all gradients moved by copy engines, however small they are."""
    from tileweave.ops.embedding import bag_all_to_all_fused as fused

    with mock.patch.object(fused, "gradient_carrier", return_value="copy_engine"):
        check(me, *arguments)
    assert (fused.BACKWARD, "copy_engine") in workspace_of(name_of(None), me.device).instances


def weight_gradient(case: Case, me: Member, seed: int) -> torch.Tensor:
    bags = draw(case, me.rank, torch.device("cpu"), seed)
    want = torch.zeros(bags.indices.numel(), dtype=torch.float64)
    layout = case.layout(me.world_size)
    offsets = bags.offsets.tolist()
    for owner in range(me.world_size):
        begin, end = rows_of(case.batch, me.world_size, owner)
        c = coefficients(case, owner, me.world_size, torch.device("cpu")).double()
        for number, (column, table) in enumerate(
            zip(layout.columns[me.rank], bags.tables, strict=True)
        ):
            for sample in range(begin, end):
                for at in range(
                    offsets[number * case.batch + sample], offsets[number * case.batch + sample + 1]
                ):
                    index = int(bags.indices[at])
                    if 0 <= index < table.shape[0]:
                        want[at] = (
                            table[index].double()
                            @ c[sample - begin, column : column + table.shape[1]]
                        )
    return want


def fused_steps(me: Member, case: Case, kind: str) -> None:
    """Compare three steps in place with torch's own arithmetic in fp64 on the expected gradients.
    Then check that the bits are the same again."""
    found = []
    for _ in range(2):
        bags = draw(case, me.rank, me.device, 0)
        for t in bags.tables:
            t.requires_grad_()
        states = (
            [torch.zeros(t.shape[0], device=me.device) for t in bags.tables]
            if kind == "adagrad"
            else []
        )
        optimizer = tw.FusedOptimizer(kind, torch.full((1,), 0.1, device=me.device), states)
        c = coefficients(case, me.rank, me.world_size, me.device)
        want = [t.detach().double().cpu() for t in bags.tables]
        moments = [torch.zeros(t.shape[0], dtype=torch.float64) for t in want]
        # linear: the same in every step
        grads = expected_gradients(case, me.rank, me.world_size, 0)
        for _ in range(3):
            (call(case, bags, me.world_size, optimizer=optimizer) * c).sum().backward()
            for table, grad, moment in zip(want, grads, moments, strict=True):
                moment += grad.square().mean(1)
                table -= 0.1 * (
                    grad / (moment.sqrt() + 1e-8)[:, None] if kind == "adagrad" else grad
                )
        for number, (table, right) in enumerate(zip(bags.tables, want, strict=True)):
            assert table.grad is None, "a fused step leaves no gradient"
            assert_norm_near(
                table, right, GRADIENT_ERROR[case.dtype], f"rank {me.rank}, {kind}, table {number}"
            )
        found.append([t.detach().clone() for t in bags.tables])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "steps are not the same bits each time"


def sums_of_runs(me: Member, shifts: tuple[int, ...], last: int = 0) -> None:
    """Table rows are looked up 1 to 33 times, so that runs of equal rows end in, at and after tiles
    of 8. Sums are exact.

    ``last``: instead, one row of the last table is looked up so often, and ends all positions.
    """
    runs = (3, 1, 8, 9, 2, 16, 17, 1, 15, 24, 7, 25, 1, 1, 33, 5)
    for shift in shifts:  # where in a tile the runs begin
        counts = [torch.tensor([*[1] * shift, *runs]), torch.tensor(runs[::-1])]
        if last:
            counts = [torch.tensor([8 + shift]), torch.tensor([last])]
        batch = max(int(c.sum()) for c in counts)
        generator = torch.Generator().manual_seed(shift)
        rows = [
            torch.arange(c.numel()).repeat_interleave(c)[
                torch.randperm(int(c.sum()), generator=generator)
            ]
            for c in counts
        ]
        lengths = torch.cat([(torch.arange(batch) < r.numel()).long() for r in rows])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        grad = torch.randint(-8, 8, (batch, 12), generator=generator).float()
        tables = [
            torch.randint(-8, 8, (c.numel(), dim), generator=generator).float()
            for c, dim in zip(counts, (8, 4), strict=True)
        ]
        want = [t.double() for t in tables]
        for table, chosen, columns in zip(want, rows, grad.double().split([8, 4], 1), strict=True):
            table.index_add_(0, chosen, columns[: chosen.numel()], alpha=-0.25)
        lookups = Lookups(torch.cat(rows).to(me.device), offsets.to(me.device), None, batch, False)
        tables = [t.to(me.device) for t in tables]
        ordered = sort_concurrently(tables, lookups, True)
        update = Update("sgd", rate=torch.full((1,), 0.5, device=me.device))
        assert table_gradients(grad.to(me.device), tables, lookups, ordered, 0.5, update) == []
        for table, right in zip(tables, want, strict=True):
            assert torch.equal(table.double().cpu(), right), (
                f"shift {shift}: rows {(table.cpu() != right).any(1).nonzero()}"
            )
