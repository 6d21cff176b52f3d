"""Shared by CPU and GPU tests: embedding_bag_all_to_all. The oracle uses fp64 and plain loops over
tables and bags.

Every rank draws the tables and bags of all ranks from seeds, so expected results are computed
locally.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from tests.support.parity import pause, poison_slots
from tests.support.tolerances import TOLERANCE, assert_near
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.embedding.bag_all_to_all_fused import run_fused
from tileweave.ops.embedding.call import OP, Call
from tileweave.planning.sharding import EmbeddingConfig, rows_of


@dataclass(frozen=True)
class Case:
    """One call.

    ``dims`` are those of the tables of each rank; ranks past the end have the first ones.
    ``longest`` is the length of the longest ordinary bag.
    """

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
        spans = [(rank, i, d) for rank in range(size) for i, d in enumerate(self.dims_of(rank))][
            ::-1
        ]
        columns = [[0] * len(self.dims_of(rank)) for rank in range(size)]
        at = 0
        for rank, i, dim in spans:
            columns[rank][i] = at
            at += dim
        return tw.EmbeddingLayout(tuple(map(tuple, columns)), plain.dims)


@dataclass
class Bags:
    """The operands that one rank passes."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def draw(case: Case, rank: int, device: torch.device, seed: int) -> Bags:
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    dims = case.dims_of(rank)
    tables = [
        torch.randn(case.rows + i, dim, generator=generator).to(case.torch_dtype)
        for i, dim in enumerate(dims)
    ]
    lengths = torch.randint(0, case.longest + 1, (len(dims) * case.batch,), generator=generator)
    if case.giant and lengths.numel():
        lengths[(seed + rank) % lengths.numel()] = case.giant
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    # no rows: out of range
    indices = torch.randint(0, max(case.rows, 1), (int(offsets[-1]),), generator=generator)
    if case.stray and indices.numel():
        indices[::3] = -1
        indices[1::5] = case.rows + 1000
        indices[2::7] = torch.iinfo(case.index_dtype).max
    weights = torch.randn(indices.numel(), generator=generator) if case.weighted else None
    found = [indices.to(case.index_dtype), offsets.to(case.index_dtype)]
    return Bags(
        [t.to(device) for t in tables],
        *[t.to(device) for t in found],
        None if weights is None else weights.to(device),
    )


def pooled(bags: Bags, case: Case, tables: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The expected result of one rank, fp64 [B, sum of dims], differentiable in ``tables``."""
    columns = []
    tables = [t.double().cpu() for t in bags.tables] if tables is None else tables
    offsets, indices = bags.offsets.tolist(), bags.indices.tolist()
    scales = [1.0] * len(indices) if bags.weights is None else bags.weights.double().tolist()
    for number, table in enumerate(tables):
        rows = []
        for sample in range(case.batch):
            begin = offsets[number * case.batch + sample]
            end = offsets[number * case.batch + sample + 1]
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
    assert got.dtype == case.result_dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}"
    )
    relative, absolute = TOLERANCE[str(case.result_dtype).removeprefix("torch.")]
    absolute *= max(case.longest, case.giant**0.5)
    assert_near(got.double().cpu(), want, relative, absolute, what)


def run(
    case: Case,
    bags: Bags,
    group: dist.ProcessGroup,
    config: EmbeddingConfig,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the fused kernel with this config instead of the planned one."""
    lookup = Call(
        bags.tables,
        bags.indices,
        bags.offsets,
        bags.weights,
        case.layout(dist.get_world_size(group)),
        case.batch,
        case.mode == "mean",
        case.result_dtype,
        name_of(group),
    )
    return run_fused(lookup, config, out)


def call(case: Case, bags: Bags, size: int, **options: object) -> torch.Tensor:
    """Call the public operator."""
    options = {"per_sample_weights": bags.weights} | options
    return tw.embedding_bag_all_to_all(
        bags.tables,
        bags.indices,
        bags.offsets,
        batch=case.batch,
        mode=case.mode,
        layout=case.layout(size),
        out_dtype=case.result_dtype,
        **options,
    )


# --- Bodies ---


def parity(me: Member, cases: list[Case], config: EmbeddingConfig) -> None:
    """Run each case twice, with poisoned regions."""
    group = dist.group.WORLD
    for number, case in enumerate((cases[0], *cases, *cases)):
        instance = workspace_of(name_of(group), me.device).instance(OP, "sm")
        if instance.num_slots and not instance.regions.held:
            poison_slots(instance, False)
        bags = draw(case, me.rank, me.device, number)
        y = run(case, bags, group, config)
        verify(
            y,
            case,
            me.rank,
            me.world_size,
            number,
            f"rank {me.rank}, call {number}, {case}, {config!r}",
        )
        del y


def public_calls(me: Member, cases: list[Case], path: str) -> None:
    """Run the operator with its own plan: returned, into ``out=``, and the reference itself."""
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
            bags.tables,
            bags.indices,
            bags.offsets,
            bags.weights,
            layout,
            case.batch,
            mean,
            case.result_dtype,
            group,
        )
        verify(want, case, me.rank, me.world_size, seed, f"{what}, the reference")


def layout_by_default(me: Member, case: Case) -> None:
    bags = draw(case, me.rank, me.device, 3)
    y = tw.embedding_bag_all_to_all(
        bags.tables, bags.indices, bags.offsets, batch=case.batch, out_dtype=case.result_dtype
    )
    verify(y, case, me.rank, me.world_size, 3, f"rank {me.rank}")
    # this rank has the same tables as before, others may not
    changed = replace(case, dims=case.dims[::-1])
    bags = draw(changed, me.rank, me.device, 4)
    y = tw.embedding_bag_all_to_all(
        bags.tables, bags.indices, bags.offsets, batch=case.batch, out_dtype=case.result_dtype
    )
    verify(y, changed, me.rank, me.world_size, 4, f"rank {me.rank}, with other tables")


def many_calls(
    me: Member,
    cases: list[Case],
    config: EmbeddingConfig,
    count: int,
    seconds: float,
    stall: Callable[[float, int], object] | None = None,
) -> None:
    """Make calls of changing size, with a different rank late each time. Results are held for
    random times, and no call may overwrite them."""
    group, order = dist.group.WORLD, random.Random(7)
    keep = random.Random(100 + me.rank)  # ranks hold their results for different times
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
            verify(
                y,
                older,
                me.rank,
                me.world_size,
                1000 + seed,
                f"rank {me.rank}, call {seed}, looked at after {n}",
            )
            del y
    tw.synchronize()
    for n, case, y in held:
        verify(
            y,
            case,
            me.rank,
            me.world_size,
            1000 + n,
            f"rank {me.rank}, call {n}, looked at in the end",
        )


def results_are_lent(me: Member, case: Case, config: EmbeddingConfig) -> None:
    """Results are not copied while a region is free, and are copied when none is. A region is free
    again after its last view."""
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
    assert run(case, bags, group, config).data_ptr() != where, (
        "a row of the first result is still held"
    )
    del row
    gc.collect()
    assert run(case, bags, group, config).data_ptr() == where, "the region was free again"
    for what, y in (("second", second), ("third", third)):
        verify(y, case, me.rank, me.world_size, 0, f"rank {me.rank}: {what}")


def calls_again(me: Member, case: Case, larger: Case) -> None:
    """Calls with tables and sizes of an earlier one are not checked and planned again: right with
    other memory in the same tables, after a larger call has moved the regions, and with other
    lengths; wrong arguments are refused as they are at first."""
    tw.close()
    bags = draw(case, me.rank, me.device, 0)
    for seed in range(4):
        fresh = draw(case, me.rank, me.device, seed)
        for kept, table in zip(bags.tables, fresh.tables, strict=True):
            if seed % 2:
                kept.copy_(table)
            else:
                kept.data = table  # the same tensor at another address
        again = Bags(bags.tables, fresh.indices, fresh.offsets, fresh.weights)
        y = call(case, again, me.world_size)
        verify(y, case, me.rank, me.world_size, seed, f"rank {me.rank}, call {seed}")
        known = workspace_of(name_of(None), me.device).accepted
        assert (len(known) > 0) == (seed > 0), "the first call makes the workspace"
        if seed == 1:
            moved = draw(larger, me.rank, me.device, 9)
            wide = call(larger, moved, me.world_size)
            verify(wide, larger, me.rank, me.world_size, 9, f"rank {me.rank}, larger")
            del wide
        wrong = [
            {"out": torch.empty_like(y)[:, :-1]},
            {"per_sample_weights": torch.ones(again.indices.numel() + 1, device=me.device)},
        ]
        for options in wrong:
            with pytest.raises(tw.InputError):
                call(case, again, me.world_size, **options)
        if me.device.type == "cpu" and again.tables:
            falling = again.offsets.flip(0).contiguous()
            with pytest.raises(tw.InputError):
                call(case, replace(again, offsets=falling), me.world_size)
        del y


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
        ("whole number", lambda: ask(batch=2.0)),
        (
            "whole number",
            lambda: ask((), indices[:0], offsets[:1], batch=-1, out_dtype=torch.float32),
        ),
        ("two dimensions", lambda: ask(tables=(table[0],))),
        ("contiguous", lambda: ask(tables=(torch.zeros(4, 5, device=me.device).t(),))),
        ("int32 or int64", lambda: ask(i=indices.float())),
        ("float16", lambda: ask(tables=(table.double(),))),
        ("layout", lambda: ask(layout=tw.EmbeddingLayout.in_rank_order([(8,)] * me.world_size))),
        ("each column once", lambda: ask(layout=replace(layout, columns=((0,),) * me.world_size))),
        ("per_sample_weights", lambda: ask(per_sample_weights=torch.zeros(3, device=me.device))),
        (
            "strides \\[\\(2,\\), \\(1,\\)\\]; allowed: contiguous",
            lambda: ask(i=indices.repeat_interleave(2)[::2]),
        ),
        ("a rate that is a float", lambda: ask(optimizer=tw.FusedOptimizer("sgd", 0.1))),  # type: ignore[arg-type]
        (
            "adagrad",
            lambda: ask(optimizer=tw.FusedOptimizer("adagrad", torch.ones(1, device=me.device))),
        ),
        ("contiguous", lambda: ask(out=torch.zeros(9, 9, device=me.device))),
    ]
    for said, attempt in (*wrong, ("", ask), *wrong):  # also what calls before have in common
        if attempt is ask:
            ask()
            ask()
            continue
        with pytest.raises(tw.InputError, match=said):
            attempt()
    ask()


def out_of_range_raises(me: Member, odd: int) -> None:
    """In debug mode every rank raises, and the next call works."""
    table = torch.zeros(5, 4, device=me.device)
    offsets, kept = torch.tensor([0, 1, 2], device=me.device), []
    for wrong in ([0, 5], [-1, 2]):
        indices = torch.tensor(wrong if me.rank == odd else [0, 1], device=me.device)
        kind = tw.InputError if me.rank == odd else tw.RankMismatchError
        with pytest.raises(kind, match=f"{min(wrong)} to {max(wrong)} in table 0"):
            tw.embedding_bag_all_to_all([table], indices, offsets)
        tw.embedding_bag_all_to_all([table], indices.clamp(0, 4), offsets)
        kept.append(len(workspace_of(name_of(None), me.device).instance(OP, "sm")._outside))
    assert kept[0] == kept[1], "calls in debug mode keep what no call finds"
