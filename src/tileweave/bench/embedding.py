"""The bench of embedding_bag_all_to_all: rivals, lower bounds and a table.

===============  ==================================================================================
tileweave        the public operator: lookup, stores to owners, nothing afterwards
torch            ``F.embedding_bag`` over one concatenated table, NCCL all-to-all, ``cat`` into rows
lookup+a2a+cat   the lookup kernel of tileweave, NCCL all-to-all, ``cat``: the rest of the gain is
                 layout and overlap
lookup+a2a       the same without ``cat``: without the gain of the layout
lookup           the lookup kernel alone; also timed alone: ``a2a``, ``cat``, ``F.embedding_bag``
===============  ==================================================================================

Lower bounds: bytes of rows read at 4.2 TB/s, bytes sent to peers at 350 GB/s. Gains as differences
of times: ``layout`` = cat, ``lookup`` = F.embedding_bag - lookup kernel, ``overlap`` = (lookup +
a2a) - tileweave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import tileweave as tw
from tileweave.bench.console import Steps
from tileweave.bench.embedding_cases import OP, EmbeddingCase
from tileweave.bench.report import marked, median, new_table, number
from tileweave.bench.run import METHOD, Options, host_us, run_cases, time_all
from tileweave.bench.samples import Benched
from tileweave.bench.subjects import TOLERANCE, worst
from tileweave.launcher import Member
from tileweave.ops import reference
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.sharding import EmbeddingLayout, Shard, TableSpec, rows_of
from tileweave.profile.metrics import geometric_mean, speed_up
from tileweave.transport.torch_collectives import all_to_all_flat

OURS, TORCH, UNFUSED, NO_CAT = "tileweave", "torch", "lookup+a2a+cat", "lookup+a2a"
LOOKUP, EMBEDDING_BAG, ALL_TO_ALL, CAT = "lookup", "F.embedding_bag", "a2a", "cat"
RIVALS = (OURS, TORCH, UNFUSED, NO_CAT, LOOKUP, EMBEDDING_BAG, ALL_TO_ALL, CAT)
HBM, LINK = 4.2e12, 3.5e11


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """Uniform numbers in [-1, 1), fast to make for tens of gigabytes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)


class EmbeddingRivals:
    """The callables of one case, over the same tables and indices."""

    def __init__(
        self, case: EmbeddingCase, member: Member, names: tuple[str, ...], seed: int
    ) -> None:
        self.case, self.member, self.group = case, member, member.group
        self.device, self.rank, self.size = member.device, member.rank, member.world_size
        self.dtype = getattr(torch, case.dtype)
        specs = case.specs(self.size)
        if case.multi_hot:
            plan = tw.plan_sharding(specs, self.size, self.dtype.itemsize)
            self.layout, self.shards = plan.layout(), plan.of_rank(self.rank)
        else:
            ranks = range(self.size)
            self.layout = EmbeddingLayout.in_rank_order([[case.dim] * case.tables for _ in ranks])
            self.shards = tuple(
                Shard(self.rank * case.tables + i, 0, case.dim, self.rank)
                for i in range(case.tables)
            )
        self.poolings = [int(specs[s.table].pooling) for s in self.shards]
        self._make_tables(specs)
        self.sets = [
            self._bags(seed + 17 * n) for n in range(3 if member.on_gpu else 1)
        ]  # so that no call finds its rows in L2
        begin, end = rows_of(case.batch, self.size, self.rank)
        self.width, self.samples = sum(s.dim for s in self.shards), end - begin
        self.pooled = torch.empty(case.batch, self.width, dtype=self.dtype, device=self.device)
        counts = [rows_of(case.batch, self.size, r) for r in range(self.size)]
        self.split = [(e - b) * self.width for b, e in counts]
        self.sizes = [self.samples * sum(dims) for dims in self.layout.dims]
        self.received = torch.empty(sum(self.sizes), dtype=self.dtype, device=self.device)
        self.rows = torch.empty(
            self.samples, self.layout.width, dtype=self.dtype, device=self.device
        )
        self.turn = 0
        self.functions = {
            name: function for name, function in self._makers().items() if name in names
        }

    def _make_tables(self, specs: list[TableSpec]) -> None:
        """One allocation per width, so that F.embedding_bag can look up all tables of a width at
        once."""
        self.tables: list[torch.Tensor] = []
        self.whole: dict[int, torch.Tensor] = {}
        first: dict[int, int] = {}
        for dim in sorted({s.dim for s in self.shards}):
            rows = sum(specs[s.table].rows for s in self.shards if s.dim == dim)
            self.whole[dim] = random_bits((rows, dim), self.dtype, self.device, 100 + self.rank)
            first[dim] = 0
        self.first: list[int] = []
        for shard in self.shards:
            begin = first[shard.dim]
            self.first.append(begin)
            first[shard.dim] = begin + specs[shard.table].rows
            self.tables.append(self.whole[shard.dim][begin : first[shard.dim]])

    def _bags(
        self, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """indices, offsets, and those of F.embedding_bag for each width."""
        generator = torch.Generator(self.device).manual_seed(seed * 31 + self.rank)
        batch, parts = self.case.batch, []
        for pooling in self.poolings:
            shape = (batch * pooling,)
            parts.append(
                torch.randint(0, self.case.rows, shape, generator=generator, device=self.device)
            )
        lengths = torch.cat([torch.full((batch,), n, device=self.device) for n in self.poolings])
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        by_width = []
        for dim in self.whole:
            mine = [i for i, s in enumerate(self.shards) if s.dim == dim]
            flat = torch.cat([parts[i] + self.first[i] for i in mine])
            ends = torch.cat(
                [torch.full((batch,), self.poolings[i], device=self.device) for i in mine]
            ).cumsum(0)
            by_width.append((flat, torch.cat([ends.new_zeros(1), ends])))
        return torch.cat(parts), offsets, by_width

    def _next(self) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        self.turn = (self.turn + 1) % len(self.sets)
        return self.sets[self.turn]

    def fused(self) -> torch.Tensor:
        indices, offsets, _ = self._next()
        return tw.embedding_bag_all_to_all(
            self.tables,
            indices,
            offsets,
            batch=self.case.batch,
            layout=self.layout,
            out_dtype=self.dtype,
            group=self.group,
        )

    def lookup(self) -> torch.Tensor:
        indices, offsets, _ = self._next()
        return tw.embedding_bag(self.tables, indices, offsets, out=self.pooled)

    def embedding_bag(self) -> None:
        """Results sorted by table. The copy into sample-major order is left out, which favours this
        rival."""
        for (flat, offsets), table in zip(self._next()[2], self.whole.values(), strict=True):
            torch.nn.functional.embedding_bag(
                flat, table, offsets, mode="sum", include_last_offset=True
            )

    def exchange(self) -> None:
        all_to_all_flat(
            self.received, self.pooled.view(-1), self.sizes, self.split, group=self.group
        )

    def cat(self) -> None:
        blocks = [
            b.view(self.samples, -1)
            for b, n in zip(self.received.split(self.sizes), self.sizes, strict=True)
            if n
        ]
        torch.cat(blocks, 1, out=self.rows)

    def _makers(self) -> dict[str, Callable[[], object]]:
        def then(*steps: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                for step in steps:
                    step()

            return run

        return {
            OURS: self.fused,
            TORCH: then(self.embedding_bag, self.exchange, self.cat),
            UNFUSED: then(self.lookup, self.exchange, self.cat),
            NO_CAT: then(self.lookup, self.exchange),
            LOOKUP: self.lookup,
            EMBEDDING_BAG: self.embedding_bag,
            ALL_TO_ALL: self.exchange,
            CAT: self.cat,
        }

    def floors(self) -> tuple[float, float]:
        """Microseconds on the slowest rank: to read rows from HBM, and to send vectors over the
        link."""
        read = (
            sum(n * s.dim for n, s in zip(self.poolings, self.shards, strict=True))
            * self.case.batch
            * self.dtype.itemsize
        )
        sent = self.width * (self.case.batch - self.samples) * self.dtype.itemsize
        slowest = [worst(bound, self.device, self.group) for bound in (read / HBM, sent / LINK)]
        return slowest[0] * 1e6, slowest[1] * 1e6

    def error(self) -> float:
        """Collective: the largest relative error of three calls on this rank.

        Regions are filled with NaN before each call. Compared are the first samples that each rank
        sends; all values must be finite.
        """
        seen = [self._error_of_a_call() for _ in range(3)]
        return math.inf if any(math.isnan(e) for e in seen) else max(seen)

    def _error_of_a_call(self) -> float:
        instance = workspace_of(name_of(self.group), self.device).instances.get((OP, "sm"))
        if instance is not None:
            instance.transport.barrier()
            instance.slots.fill_(255)
            instance.transport.barrier()
        y = self.fused()
        indices, batch = self.sets[self.turn][0], self.case.batch
        shares = [rows_of(batch, self.size, r) for r in range(self.size)]
        chosen = torch.cat([torch.arange(b, min(b + 64, e), device=self.device) for b, e in shares])
        parts, lengths, at = [], [], 0
        for pooling in self.poolings:
            parts.append(
                indices[at : at + batch * pooling].view(batch, pooling)[chosen].reshape(-1)
            )
            lengths += [pooling] * chosen.numel()
            at += batch * pooling
        ends = torch.tensor([0, *lengths], device=self.device).cumsum(0)
        pooled = reference.embedding_bag(
            self.tables, torch.cat(parts), ends, None, chosen.numel(), False
        )
        begin, end = shares[self.rank]
        mine = (chosen >= begin) & (chosen < end)
        want = self._gather(torch.cat(pooled, 1))[mine]
        got = y[chosen[mine] - begin].float()
        return (
            float((got - want).norm() / want.norm()) if bool(torch.isfinite(y).all()) else math.inf
        )

    def _gather(self, pooled: torch.Tensor) -> torch.Tensor:
        """[samples, width] in fp32, the columns of all ranks."""
        rows = torch.zeros(pooled.shape[0], self.layout.width, device=self.device)
        at = 0
        for column, dim in zip(
            self.layout.columns[self.rank], self.layout.dims[self.rank], strict=True
        ):
            rows[:, column : column + dim] = pooled[:, at : at + dim]
            at += dim
        dist.all_reduce(rows, group=self.group)
        return rows


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Collective; the report is complete on rank 0 only."""
    method = f"{METHOD}, three sets of uniform indices in turn"
    return run_cases(member, options, method, _bench_case)


def _bench_case(
    member: Member, case: EmbeddingCase, options: Options, seed: int, steps: Steps
) -> dict[str, Any]:
    steps.detail("draws tables")
    rivals = EmbeddingRivals(case, member, options.rivals or RIVALS, seed)
    indices, offsets, _ = rivals.sets[0]
    plan = tw.explain(OP, rivals.tables, indices, offsets, group=member.group)
    steps.detail("compiles and checks")
    member.barrier()
    error, (read, sent) = worst(rivals.error(), member.device, member.group), rivals.floors()
    entry: dict[str, Any] = {
        **asdict(case),
        "plan": str(plan),
        "error": error,
        "right": error <= TOLERANCE[rivals.dtype],
        "floor_read_us": read,
        "floor_sent_us": sent,
        "host_us": math.nan,
        "times": {},
        "missing": {},
    }
    if entry["right"]:
        entry["times"] = time_all(rivals.functions, member, options, case.graph, steps)
        entry["host_us"] = host_us(member, rivals.functions)
    return entry | judge(entry)


def judge(entry: dict[str, Any]) -> dict[str, float]:
    """Ratios and the parts of the gain; NaN if a time is missing."""
    of = partial(median, entry)
    return {
        "over_torch": speed_up(of(TORCH), of(OURS)),
        "over_unfused": speed_up(of(UNFUSED), of(OURS)),
        "gain_lookup_us": of(EMBEDDING_BAG) - of(LOOKUP),
        "gain_layout_us": of(UNFUSED) - of(NO_CAT),
        "gain_overlap_us": of(NO_CAT) - of(OURS),
        "lookup_share": entry["floor_read_us"] * HBM / 4.8e12 / of(LOOKUP)
        if of(LOOKUP) > 0
        else math.nan,
        "over_floor": of(OURS) / max(entry["floor_read_us"], entry["floor_sent_us"]),
    }


_RATIOS = {"/torch": "over_torch", "/unfused": "over_unfused"}
_DERIVED = {"+layout": "gain_layout_us", "+lookup": "gain_lookup_us", "+overlap": "gain_overlap_us"}
_HEADINGS = {UNFUSED: "unfused", NO_CAT: "no cat", EMBEDDING_BAG: "F.e_bag"}


def tables_of(report: dict[str, Any], width: int) -> list[Table]:
    """One table, in microseconds unless stated."""
    device = report["environment"].get("device", "")
    title = (
        f"{OP}; world {report['world_size']}, {device}; us, slowest rank, median of repeats; "
        "peak: bytes read by our lookup over 4.8 TB/s; read, link: floors; +: parts of the gain"
    )
    times = [name for name in RIVALS if any(name in c["times"] for c in report["cases"])]
    columns = ["case", *times, "peak", "read", "link", *_DERIVED, *_RATIOS, "host us", "error"]
    table = new_table(title, columns, _HEADINGS)
    for case in report["cases"]:
        if not case["right"]:
            table.add_row(case["name"], "[bold red]WRONG[/]")
            continue
        cells = [case["name"]]
        cells += [number(median(case, name)) for name in times]
        cells += [
            number(case["lookup_share"], 2),
            number(case["floor_read_us"]),
            number(case["floor_sent_us"]),
        ]
        cells += [number(case[key]) for key in _DERIVED.values()]
        cells += [marked(case[key], 1.0) for key in _RATIOS.values()]
        cells += [number(case.get("host_us")), f"{case['error']:.0e}"]
        table.add_row(*cells)
    table.add_section()
    blanks = [""] * (len(columns) - 5)
    right = [c for c in report["cases"] if c["right"]]
    for name, summarise in (
        ("geometric mean", geometric_mean),
        ("worst", lambda v: min(v, default=math.nan)),
    ):
        values = [
            summarise([c[key] for c in right if math.isfinite(c[key])]) for key in _RATIOS.values()
        ]
        table.add_row(name, *blanks, *[number(v, 2) for v in values], style="bold")
    return [table]


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the times of each case over the larger of its two lower bounds, as bars. Needs
    matplotlib."""
    from tileweave.profile.plot import plot_over

    plot_over(
        report,
        path,
        "the larger floor",
        lambda case: max(case["floor_read_us"], case["floor_sent_us"]),
    )


BENCHED = Benched(
    bench,
    RIVALS,
    tables_of,
    plot,
    baselines=(UNFUSED, TORCH),
    random_rivals=(OURS, UNFUSED, TORCH),
)
