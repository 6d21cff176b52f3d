"""Bodies of the embedding tests that CPU and GPU worlds share. The oracle is fp64, table by table, bag by bag in plain loops.

Every rank draws the tables and bags of all ranks from seeds, so what is expected is computed locally.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.near import assert_near
from tests.parity import TOLERANCE, pause, poison_slots
from tests.worlds import Member

import tileweave as tw
from tileweave.ops.embedding_bag_all_to_all_fused import OP, run_fused
from tileweave.ops.registry import name_of, workspace_of
from tileweave.ops.table_gradient import Lookups, sort_beside, table_gradients
from tileweave.sharding import EmbeddingConfig, rows_of

GRADIENT_ERROR = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    """One call. ``dims``: of each rank's tables (ranks past the end have the first ones). ``longest``: of a usual bag."""

    dims: tuple[tuple[int, ...], ...]
    batch: int
    longest: int = 4
    rows: int = 13
    dtype: str = "float32"
    out_dtype: str | None = None
    mode: str = "sum"
    weighted: bool = False
    index_dtype: torch.dtype = torch.int64
    giant: int = 0  # length of one bag that is longer than all others
    stray: bool = False  # some indices are out of range
    shuffled: bool = False  # columns of the result are not in rank order

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def result_dtype(self) -> torch.dtype:
        return getattr(torch, self.out_dtype or self.dtype)

    def dims_of(self, rank: int) -> tuple[int, ...]:
        return self.dims[rank % len(self.dims)]

    def layout(self, size: int) -> tw.EmbeddingLayout:
        plain = tw.EmbeddingLayout.in_rank_order([self.dims_of(rank) for rank in range(size)])
        if not self.shuffled:
            return plain
        spans = [(rank, i, d) for rank in range(size) for i, d in enumerate(self.dims_of(rank))][::-1]
        columns = [[0] * len(self.dims_of(rank)) for rank in range(size)]
        at = 0
        for rank, i, dim in spans:
            columns[rank][i] = at
            at += dim
        return tw.EmbeddingLayout(tuple(map(tuple, columns)), plain.dims)


@dataclass
class Bags:
    """What one rank passes."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def draw(case: Case, rank: int, device: torch.device, seed: int) -> Bags:
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    dims = case.dims_of(rank)
    tables = [torch.randn(case.rows + i, dim, generator=generator).to(case.torch_dtype) for i, dim in enumerate(dims)]
    lengths = torch.randint(0, case.longest + 1, (len(dims) * case.batch,), generator=generator)
    if case.giant and lengths.numel():
        lengths[(seed + rank) % lengths.numel()] = case.giant
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    indices = torch.randint(0, max(case.rows, 1), (int(offsets[-1]),), generator=generator)  # no rows: out of range
    if case.stray and indices.numel():
        indices[::3] = -1
        indices[1::5] = case.rows + 1000
        indices[2::7] = torch.iinfo(case.index_dtype).max
    weights = torch.randn(indices.numel(), generator=generator) if case.weighted else None
    found = [indices.to(case.index_dtype), offsets.to(case.index_dtype)]
    return Bags([t.to(device) for t in tables], *[t.to(device) for t in found], None if weights is None else weights.to(device))


def pooled(bags: Bags, case: Case, tables: list[torch.Tensor] | None = None) -> torch.Tensor:
    """fp64 [B, sum of dims] of one rank, differentiable in ``tables``."""
    columns = []
    tables = [t.double().cpu() for t in bags.tables] if tables is None else tables
    offsets, indices = bags.offsets.tolist(), bags.indices.tolist()
    scales = [1.0] * len(indices) if bags.weights is None else bags.weights.double().tolist()
    for number, table in enumerate(tables):
        rows = []
        for sample in range(case.batch):
            begin, end = offsets[number * case.batch + sample], offsets[number * case.batch + sample + 1]
            total = table.new_zeros(table.shape[1])
            for at in range(begin, end):
                if 0 <= indices[at] < table.shape[0]:
                    total = total + scales[at] * table[indices[at]]
            rows.append(total / max(end - begin, 1) if case.mode == "mean" else total)
        columns.append(torch.stack(rows) if rows else table.new_zeros(0, table.shape[1]))
    return torch.cat(columns, 1) if columns else torch.zeros(case.batch, 0, dtype=torch.float64)


def expected(case: Case, rank: int, size: int, seed: int) -> torch.Tensor:
    begin, end = rows_of(case.batch, size, rank)
    layout = case.layout(size)
    want = torch.full((end - begin, layout.width), float("nan"), dtype=torch.float64)
    for source in range(size):
        block, at = pooled(draw(case, source, torch.device("cpu"), seed), case)[begin:end], 0
        for column, dim in zip(layout.columns[source], layout.dims[source], strict=True):
            want[:, column : column + dim] = block[:, at : at + dim]
            at += dim
    return want


def verify(got: torch.Tensor, case: Case, rank: int, size: int, seed: int, what: str) -> None:
    want = expected(case, rank, size, seed)
    assert got.dtype == case.result_dtype and got.shape == want.shape, f"{what}: {got.dtype} {tuple(got.shape)}"
    relative, absolute = TOLERANCE[str(case.result_dtype).removeprefix("torch.")]
    absolute *= max(case.longest, case.giant**0.5)
    assert_near(got.double().cpu(), want, relative, absolute, what)


def run(
    case: Case, bags: Bags, group: dist.ProcessGroup, config: EmbeddingConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The fused kernel with this cut, whatever the plan would say."""
    return run_fused(
        bags.tables, bags.indices, bags.offsets, bags.weights, case.layout(dist.get_world_size(group)), case.batch,
        case.mode == "mean", case.result_dtype, name_of(group), config, out,
    )  # fmt: skip


def call(case: Case, bags: Bags, size: int, **options: object) -> torch.Tensor:
    """The public operator."""
    options = {"per_sample_weights": bags.weights} | options
    return tw.embedding_bag_all_to_all(
        bags.tables, bags.indices, bags.offsets, batch=case.batch, mode=case.mode, layout=case.layout(size),
        out_dtype=case.result_dtype, **options,
    )  # fmt: skip


# --- Bodies ---


def parity(me: Member, cases: list[Case], config: EmbeddingConfig) -> None:
    """Each case twice, with poisoned regions."""
    group = dist.group.WORLD
    for number, case in enumerate((cases[0], *cases, *cases)):
        instance = workspace_of(name_of(group), me.device).instance(OP, "sm")
        if instance.num_slots and not instance.regions.held:
            poison_slots(instance, False)
        bags = draw(case, me.rank, me.device, number)
        y = run(case, bags, group, config)
        verify(y, case, me.rank, me.world_size, number, f"rank {me.rank}, call {number}, {case}, {config}")
        del y


def public_calls(me: Member, cases: list[Case], path: str) -> None:
    """By the operator's own plan: returned, into ``out=``, and the reference itself."""
    from tileweave.ops import reference

    for seed, case in enumerate(cases):
        bags = draw(case, me.rank, me.device, seed)
        if bags.tables:
            plan = tw.explain(OP, bags.tables, bags.indices, bags.offsets)
            assert plan.path == path, str(plan)
        what = f"rank {me.rank}, {case}"
        y = call(case, bags, me.world_size)
        verify(y, case, me.rank, me.world_size, seed, what)
        out = torch.full_like(y, float("nan"))
        assert call(case, bags, me.world_size, out=out) is out
        verify(out, case, me.rank, me.world_size, seed, f"{what}, out=")
        y.fill_(float("nan"))
        assert call(case, bags, me.world_size, out=y) is y
        verify(y, case, me.rank, me.world_size, seed, f"{what}, out= an earlier result")
        group = dist.group.WORLD if me.world_size > 1 else None
        layout = case.layout(me.world_size)
        mean = case.mode == "mean"
        want = reference.embedding_bag_all_to_all(
            bags.tables, bags.indices, bags.offsets, bags.weights, layout, case.batch, mean, case.result_dtype, group
        )
        verify(want, case, me.rank, me.world_size, seed, f"{what}, the reference")


def layout_by_default(me: Member, case: Case) -> None:
    bags = draw(case, me.rank, me.device, 3)
    y = tw.embedding_bag_all_to_all(bags.tables, bags.indices, bags.offsets, batch=case.batch, out_dtype=case.result_dtype)
    verify(y, case, me.rank, me.world_size, 3, f"rank {me.rank}")
    changed = replace(case, dims=case.dims[::-1])  # where this rank has the same tables as before, others may not
    bags = draw(changed, me.rank, me.device, 4)
    y = tw.embedding_bag_all_to_all(bags.tables, bags.indices, bags.offsets, batch=case.batch, out_dtype=case.result_dtype)
    verify(y, changed, me.rank, me.world_size, 4, f"rank {me.rank}, with other tables")


def many_calls(
    me: Member,
    cases: list[Case],
    config: EmbeddingConfig,
    count: int,
    seconds: float,
    stall: Callable[[float, int], object] | None = None,
) -> None:
    """Calls of changing size, each rank late in turn, results held for random times: nobody may overwrite them."""
    group, order = dist.group.WORLD, random.Random(7)
    keep = random.Random(100 + me.rank)  # ranks hold their results differently long
    held: list[tuple[int, Case, torch.Tensor]] = []
    drawn = [order.choice(cases) for _ in range(count)]
    prepared = [draw(case, me.rank, me.device, 1000 + n) for n, case in enumerate(drawn)]
    for n, (case, bags) in enumerate(zip(drawn, prepared, strict=True)):
        late = n // 2 % me.world_size == me.rank
        if late and n % 2 == 0:
            pause(me.device, seconds)
        if late and n % 2 and stall is not None:
            with stall(seconds, n):
                held.append((n, case, run(case, bags, group, config)))
        else:
            held.append((n, case, run(case, bags, group, config)))
        while held and keep.random() < 0.5:
            seed, older, y = held.pop(keep.randrange(len(held)))
            verify(y, older, me.rank, me.world_size, 1000 + seed, f"rank {me.rank}, call {seed}, looked at after {n}")
            del y
    tw.synchronize()
    for n, case, y in held:
        verify(y, case, me.rank, me.world_size, 1000 + n, f"rank {me.rank}, call {n}, looked at in the end")


def results_are_lent(me: Member, case: Case, config: EmbeddingConfig) -> None:
    """No copy while a region is free; a copy when none is; free again when the last view is gone."""
    group = dist.group.WORLD
    tw.close(group)
    bags = draw(case, me.rank, me.device, 0)
    first, second = run(case, bags, group, config), run(case, bags, group, config)
    instance = workspace_of(name_of(group), me.device).instance(OP, "sm")
    begin, end = instance.slots.data_ptr(), instance.slots.data_ptr() + instance.slots.numel()
    third = run(case, bags, group, config)
    inside = [begin <= y.data_ptr() < end for y in (first, second, third)]
    assert inside == [True, True, False], f"two regions are lent, then results are copied: {inside}"
    where, row = first.data_ptr(), first[0]
    del first
    gc.collect()
    assert run(case, bags, group, config).data_ptr() != where, "a row of the first result is still held"
    del row
    gc.collect()
    assert run(case, bags, group, config).data_ptr() == where, "the region was free again"
    for what, y in (("second", second), ("third", third)):
        verify(y, case, me.rank, me.world_size, 0, f"rank {me.rank}: {what}")


# --- Gradients ---


def expected_gradients(case: Case, rank: int, size: int, seed: int) -> list[torch.Tensor]:
    """fp64 gradients of this rank's tables of the sum over ranks of (y * c).sum()."""
    bags = draw(case, rank, torch.device("cpu"), seed)
    tables = [t.double().requires_grad_() for t in bags.tables]
    mine, layout, loss = pooled(bags, case, tables), case.layout(size), torch.zeros((), dtype=torch.float64)
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
    return torch.randn(end - begin, case.layout(size).width, generator=generator).to(case.result_dtype).to(device)


def gradients(me: Member, cases: list[Case], sparse: bool = False, backend: str | None = None) -> None:
    """Dense or sparse gradients of the tables and of the weights against fp64; with and without division by R."""
    for seed, case in enumerate(cases):
        bags = draw(case, me.rank, me.device, seed)
        c = coefficients(case, me.rank, me.world_size, me.device)
        for divide in (False, True):
            for t in (*bags.tables, *([] if bags.weights is None else [bags.weights])):
                t.requires_grad_()
                t.grad = None

            def loss(c: torch.Tensor, bags: Bags = bags, case: Case = case, divide: bool = divide) -> torch.Tensor:
                y = call(case, bags, me.world_size, gradient="sparse" if sparse else "dense", divide_gradient=divide)
                return (y * c).sum()

            (loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend))(c).backward()
            factor = 1 / me.world_size if divide else 1.0
            for number, (table, want) in enumerate(
                zip(bags.tables, expected_gradients(case, me.rank, me.world_size, seed), strict=True)
            ):
                what = f"rank {me.rank}, {case}, table {number}, divide {divide}"
                assert table.grad is not None and table.grad.is_sparse == sparse and table.grad.dtype == table.dtype, what
                near(table.grad.to_dense(), want * factor, GRADIENT_ERROR[case.dtype], what)
            if bags.weights is not None:
                near(bags.weights.grad, weight_gradient(case, me, seed) * factor, GRADIENT_ERROR[case.dtype], "weights")


def by_copy_engines(me: Member, check: Callable[..., None], *arguments: object) -> None:
    """``check`` with all gradients carried by copy engines, however small they are."""
    from tileweave.ops import embedding_bag_all_to_all_fused as fused

    with mock.patch.object(fused, "gradient_carrier", return_value="copy_engine"):
        check(me, *arguments)
    assert (fused.BACKWARD, "copy_engine") in workspace_of(name_of(None), me.device).instances


def weight_gradient(case: Case, me: Member, seed: int) -> torch.Tensor:
    bags = draw(case, me.rank, torch.device("cpu"), seed)
    want, layout = torch.zeros(bags.indices.numel(), dtype=torch.float64), case.layout(me.world_size)
    offsets = bags.offsets.tolist()
    for owner in range(me.world_size):
        begin, end = rows_of(case.batch, me.world_size, owner)
        c = coefficients(case, owner, me.world_size, torch.device("cpu")).double()
        for number, (column, table) in enumerate(zip(layout.columns[me.rank], bags.tables, strict=True)):
            for sample in range(begin, end):
                for at in range(offsets[number * case.batch + sample], offsets[number * case.batch + sample + 1]):
                    index = int(bags.indices[at])
                    if 0 <= index < table.shape[0]:
                        want[at] = table[index].double() @ c[sample - begin, column : column + table.shape[1]]
    return want


def near(got: torch.Tensor, want: torch.Tensor, error: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}"
    off = (got.detach().double().cpu() - want).norm()
    assert off <= error * want.norm() + 1e-12, f"{what}: off by {float(off / want.norm()):.2e}"


def fused_steps(me: Member, case: Case, kind: str) -> None:
    """Three steps in place against torch's own arithmetic in fp64 on the expected gradients; then the same bits again."""
    found = []
    for _ in range(2):
        bags = draw(case, me.rank, me.device, 0)
        for t in bags.tables:
            t.requires_grad_()
        states = [torch.zeros(t.shape[0], device=me.device) for t in bags.tables] if kind == "adagrad" else []
        optimizer = tw.FusedOptimizer(kind, torch.full((1,), 0.1, device=me.device), states)
        c = coefficients(case, me.rank, me.world_size, me.device)
        want = [t.detach().double().cpu() for t in bags.tables]
        moments = [torch.zeros(t.shape[0], dtype=torch.float64) for t in want]
        grads = expected_gradients(case, me.rank, me.world_size, 0)  # linear: the same in every step
        for _ in range(3):
            (call(case, bags, me.world_size, optimizer=optimizer) * c).sum().backward()
            for table, grad, moment in zip(want, grads, moments, strict=True):
                moment += grad.square().mean(1)
                table -= 0.1 * (grad / (moment.sqrt() + 1e-8)[:, None] if kind == "adagrad" else grad)
        for number, (table, right) in enumerate(zip(bags.tables, want, strict=True)):
            assert table.grad is None, "a fused step leaves no gradient"
            near(table, right, GRADIENT_ERROR[case.dtype], f"rank {me.rank}, {kind}, table {number}")
        found.append([t.detach().clone() for t in bags.tables])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "steps are not the same bits each time"


def sums_of_runs(me: Member, shifts: tuple[int, ...]) -> None:
    """Table rows that are looked up 1 to 33 times, so that runs of equal rows end in, at and behind tiles of 8; exact."""
    runs = (3, 1, 8, 9, 2, 16, 17, 1, 15, 24, 7, 25, 1, 1, 33, 5)
    for shift in shifts:  # where in a tile the runs begin
        counts = [torch.tensor([*[1] * shift, *runs]), torch.tensor(runs[::-1])]
        batch = max(int(c.sum()) for c in counts)
        generator = torch.Generator().manual_seed(shift)
        rows = [torch.arange(c.numel()).repeat_interleave(c)[torch.randperm(int(c.sum()), generator=generator)] for c in counts]
        lengths = torch.cat([(torch.arange(batch) < r.numel()).long() for r in rows])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        grad = torch.randint(-8, 8, (batch, 12), generator=generator).float()
        tables = [
            torch.randint(-8, 8, (c.numel(), dim), generator=generator).float() for c, dim in zip(counts, (8, 4), strict=True)
        ]
        want = [t.double() for t in tables]
        for table, chosen, columns in zip(want, rows, grad.double().split([8, 4], 1), strict=True):
            table.index_add_(0, chosen, columns[: chosen.numel()], alpha=-0.25)
        lookups = Lookups(torch.cat(rows).to(me.device), offsets.to(me.device), None, batch, False)
        tables = [t.to(me.device) for t in tables]
        ordered = sort_beside(tables, lookups, True)
        rate = torch.full((1,), 0.5, device=me.device)
        assert table_gradients(grad.to(me.device), tables, lookups, ordered, 0.5, "sgd", (), rate) == []
        for table, right in zip(tables, want, strict=True):
            assert torch.equal(table.double().cpu(), right), f"shift {shift}: rows {(table.cpu() != right).any(1).nonzero()}"


# --- Input distribution, modules ---


def distribution(me: Member, features: list[list[int]], count: int, samples: int, weighted: bool) -> None:
    """Every rank rebuilds what it must get from all ranks' jagged tensors."""

    def jagged(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank + 5)
        lengths = torch.randint(0, 5, (count * samples,), generator=generator)
        values = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
        return lengths, values, values * 0.5 + rank

    lengths, values, weights = (t.to(me.device) for t in jagged(me.rank))
    first = tw.begin_distribute_indices(lengths, values, features, weights=weights if weighted else None)
    fewer = lengths[: count * (samples // 2)]
    other = tw.distribute_indices(fewer, values[: int(fewer.sum())], features)
    indices, offsets, scales = first.finish()
    assert other[0].numel() == int(other[1][-1]), "lists of other lengths between the halves"
    everyone = [jagged(rank) for rank in range(me.world_size)]
    want: list[float] = []
    ends = [0]
    for feature in features[me.rank]:
        for other, data, scale in everyone:
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), other.cumsum(0)])
            for sample in range(feature * samples, (feature + 1) * samples):
                chosen = slice(int(starts[sample]), int(starts[sample + 1]))
                want += (scale if weighted else data)[chosen].tolist()
                ends.append(ends[-1] + chosen.stop - chosen.start)
    assert offsets.tolist() == ends
    assert (indices if scales is None else scales).tolist() == want


def sharded_embedding_bag(me: Member, optimizer: str | None) -> None:
    """The module against whole nn.EmbeddingBag tables on one device: outputs and the tables after steps."""
    from tileweave.nn import ShardedEmbeddingBag

    specs = [tw.TableSpec("a", 11, 8, 2), tw.TableSpec("b", 7, 16, 40), tw.TableSpec("c", 30, 4, 1)]
    samples, count = 3, len(specs)
    module = ShardedEmbeddingBag(specs, device=me.device, optimizer=optimizer, learning_rate=0.1)
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(s.rows, s.dim, generator=generator) for s in specs]
    module.load_tables([w.to(me.device) for w in whole])
    bags = [torch.nn.EmbeddingBag.from_pretrained(w.double(), freeze=False, mode="sum") for w in whole]
    assert "rank 0:" in module.plan.explain()
    jagged = []
    for rank in range(me.world_size):
        draws = torch.Generator().manual_seed(50 + rank)
        lengths = torch.randint(0, 4, (count, samples), generator=draws)
        counts = zip(specs, lengths.sum(1).tolist(), strict=True)
        jagged.append((lengths, [torch.randint(0, spec.rows, (n,), generator=draws) for spec, n in counts]))
    lengths, values = jagged[me.rank]
    y = module(lengths.view(-1).to(me.device), torch.cat(values).to(me.device))
    outs = []
    for number, bag in enumerate(bags):
        column = [bag(v[number], torch.cat([torch.zeros(1, dtype=torch.int64), n[number].cumsum(0)[:-1]])) for n, v in jagged]
        outs.append(torch.stack(column))
    want = torch.cat(outs, -1)
    near(y, want[me.rank].detach(), 1e-6, f"rank {me.rank}: output")
    y.square().sum().backward()
    want.square().sum().backward()
    for table, weight, bag in zip(range(count), module.whole_tables(), bags, strict=True):
        grad = bag.weight.grad
        if optimizer is None:
            continue
        step = 0.1 * grad
        if optimizer == "adagrad":
            parts = [s for s in module.plan.shards if s.table == table]
            step = torch.cat(
                [0.1 * g / (g.square().mean(1).sqrt() + 1e-8)[:, None] for g in grad.split([s.dim for s in sorted(
                    parts, key=lambda s: s.column)], 1)], 1
            )  # fmt: skip
        near(weight, bag.weight.detach() - step, 1e-5, f"rank {me.rank}, table {table} after a step of {optimizer}")
    if optimizer is None:
        for shard, parameter in zip(module.plan.of_rank(me.rank), module.parameters(), strict=True):
            grad = bags[shard.table].weight.grad[:, shard.column : shard.column + shard.dim]
            near(parameter.grad, grad, 1e-5, f"rank {me.rank}: gradient of {shard}")


# --- Bad input ---


def bad_input(me: Member) -> None:
    table = torch.zeros(5, 4, device=me.device)
    indices = torch.tensor([0, 1], device=me.device)
    offsets = torch.tensor([0, 1, 2], device=me.device)
    layout = tw.EmbeddingLayout.in_rank_order([(4,)] * me.world_size)

    def ask(tables=(table,), i=indices, o=offsets, **options: object) -> None:
        tw.embedding_bag_all_to_all(list(tables), i, o, **({"layout": layout} | options))

    wrong: list[tuple[str, Callable[[], object]]] = [
        ("mode", lambda: ask(mode="max")),
        ("gradient", lambda: ask(gradient="adam")),
        ("batch=", lambda: ask(tables=())),
        ("offsets", lambda: ask(batch=7)),
        ("two dimensions", lambda: ask(tables=(table[0],))),
        ("contiguous", lambda: ask(tables=(torch.zeros(4, 5, device=me.device).t(),))),
        ("int32 or int64", lambda: ask(i=indices.float())),
        ("float16", lambda: ask(tables=(table.double(),))),
        ("layout", lambda: ask(layout=tw.EmbeddingLayout.in_rank_order([(8,)] * me.world_size))),
        ("each column once", lambda: ask(layout=replace(layout, columns=((0,),) * me.world_size))),
        ("per_sample_weights", lambda: ask(per_sample_weights=torch.zeros(3, device=me.device))),
        ("strides \\[\\(2,\\), \\(1,\\)\\]; allowed: contiguous", lambda: ask(i=indices.repeat_interleave(2)[::2])),
        ("a rate that is a float", lambda: ask(optimizer=tw.FusedOptimizer("sgd", 0.1))),  # type: ignore[arg-type]
        ("adagrad", lambda: ask(optimizer=tw.FusedOptimizer("adagrad", torch.ones(1, device=me.device)))),
        ("contiguous", lambda: ask(out=torch.zeros(9, 9, device=me.device))),
    ]
    for said, attempt in wrong:
        with pytest.raises(tw.InputError, match=said):
            attempt()
    ask()


def out_of_range_raises(me: Member, odd: int) -> None:
    """In debug mode every rank raises, and the next call is fine."""
    table = torch.zeros(5, 4, device=me.device)
    offsets = torch.tensor([0, 1, 2], device=me.device)
    for wrong in ([0, 5], [-1, 2]):
        indices = torch.tensor(wrong if me.rank == odd else [0, 1], device=me.device)
        kind = tw.InputError if me.rank == odd else tw.RankMismatchError
        with pytest.raises(kind, match=f"{min(wrong)} to {max(wrong)} in table 0"):
            tw.embedding_bag_all_to_all([table], indices, offsets)
        tw.embedding_bag_all_to_all([table], indices.clamp(0, 4), offsets)
