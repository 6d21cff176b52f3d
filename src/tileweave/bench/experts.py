"""The bench of the expert operators: rivals, a lower bound and a table.

==========  =====================================================================================
tileweave   the public operator, with the routing plan given
routed      the same, given expert ids: the call makes the plan (dispatch only)
unfused     torch._grouped_mm and NCCL all_to_all_single with sizes known to the host, and the
            permutations that are needed: rows taken by index on both sides, a top-k weighted sum
            after a combine. In a graph sizes are bounds, so rows are padded
gathered    the same on an NCCL all-gather of tokens, or on top-k sums of local rows and an NCCL
            reduce-scatter
no order    as unfused, without taking rows by index. The result is wrong; the time shows the most
            that a better layout could save
matmul      torch._grouped_mm alone
==========  =====================================================================================

Lower bound: the longer of two times. Links: each token once to each rank that has an expert for it,
at 350 GB/s, on the rank that sends or receives most. Matmul: that of the rank with most rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

import tileweave as tw
from tileweave.bench import expert_cases, random_cases
from tileweave.bench.console import Steps
from tileweave.bench.expert_cases import COMBINE, DISPATCH, ExpertCase
from tileweave.bench.expert_rivals import Gathered, Order
from tileweave.bench.report import marked, median, new_table, number
from tileweave.bench.run import METHOD, Options, host_us, run_cases, time_all
from tileweave.bench.samples import Benched, Samples
from tileweave.bench.subjects import TOLERANCE, worst, worst_of
from tileweave.launcher import Member
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.experts.routing_plan import RoutingPlan, reference_plan
from tileweave.profile.metrics import geometric_mean, speed_up

OURS, ROUTED, UNFUSED, NO_ORDER, MATMUL = "tileweave", "routed", "unfused", "no order", "matmul"
GATHERED = "gathered"
RIVALS = (OURS, ROUTED, UNFUSED, GATHERED, NO_ORDER, MATMUL)
_RATIOS = {"over_unfused": UNFUSED, "over_gathered": GATHERED, "over_no_order": NO_ORDER}
LINK = 3.5e11
_SAMPLES = 48


class ExpertRivals:
    """The callables of one case, over the same operands.

    Several routings take turns if the weights would fit the L2.
    """

    def __init__(self, case: ExpertCase, member: Member, names: tuple[str, ...], seed: int) -> None:
        self.case, self.member, self.group = case, member, member.group
        self.device, self.rank, self.size = member.device, member.rank, member.world_size
        self.dtype, self.local = getattr(torch, case.dtype), case.experts // member.world_size
        generator = torch.Generator(self.device).manual_seed(97 * seed + self.rank)
        shape = (self.local, case.cols, case.depth)
        self.experts = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.experts.normal_(0, case.depth**-0.5, generator=generator)
        self.names = names
        self.sets = [_Routing(self, 31 * seed + n) for n in range(3 if case.graph else 1)]
        rows = self.sets[0].plan.bound if case.op == COMBINE else case.tokens
        self.x = torch.empty(rows, case.depth, dtype=self.dtype, device=self.device).normal_(
            generator=generator
        )
        self.shared = (
            Gathered(case, self.x, self.sets[0].plan.bound, self.group)
            if GATHERED in names
            else None
        )
        self.turn = 0
        makers = {
            OURS: self.fused,
            UNFUSED: lambda: self.unfused(True),
            GATHERED: self.gathered,
            MATMUL: self.matmul,
        }
        makers |= {ROUTED: lambda: self.fused(True)} if case.op == DISPATCH else {}
        makers |= {} if case.graph else {NO_ORDER: lambda: self.unfused(False)}
        self.functions: dict[str, Callable[[], object]] = {
            name: f for name, f in makers.items() if name in names
        }
        self.missing = (
            {NO_ORDER: "not in graphs, where sizes are bounds"}
            if case.graph and NO_ORDER in names
            else {}
        )

    def _next(self) -> _Routing:
        self.turn = (self.turn + 1) % len(self.sets)
        return self.sets[self.turn]

    def fused(self, routed: bool = False) -> torch.Tensor:
        r = self._next()
        if self.case.op == COMBINE:
            return tw.grouped_matmul_combine(
                self.x, self.experts, r.plan, r.weights, group=self.group
            )
        if routed:
            return tw.dispatch_grouped_matmul(
                self.x, self.experts, r.ids[self.rank], group=self.group
            )[0]
        return tw.dispatch_grouped_matmul(self.x, self.experts, plan=r.plan, group=self.group)[0]

    def matmul(self) -> torch.Tensor:
        r = self._next()
        rows = self.x[: r.rows] if self.case.op == COMBINE else r.gathered(self.x)
        return reference.grouped_matmul(rows, self.experts, r.plan.offsets)

    def unfused(self, ordered: bool) -> torch.Tensor:
        r = self._next()
        return (
            self._unfused_combine(r, ordered)
            if self.case.op == COMBINE
            else self._unfused_dispatch(r, ordered)
        )

    def gathered(self) -> torch.Tensor:
        r, shared = self._next(), self.shared
        assert shared is not None and r.order is not None, "made if it is among the names"
        if self.case.op == COMBINE:
            return shared.combine(self._rows(r), self.experts, r.order)
        return shared.dispatch(self.x, self.experts, r.order)

    def _rows(self, r: _Routing) -> torch.Tensor:
        """The rows that a combine multiplies: those of the plan; in a graph as many as possible."""
        return self.x if self.case.graph else self.x[: r.rows]

    def _unfused_combine(self, r: _Routing, ordered: bool) -> torch.Tensor:
        rows = reference.grouped_matmul(self._rows(r), self.experts, r.plan.offsets)
        sent = rows.index_select(0, r.leaving) if ordered else rows
        came = self._exchange(sent, r.there, r.here)
        parts = came.index_select(0, r.arriving) if ordered else came[: r.arriving.numel()]
        return torch.bmm(r.factors[:, None], parts.view(*r.factors.shape, -1)).view(
            r.factors.shape[0], -1
        )

    def _unfused_dispatch(self, r: _Routing, ordered: bool) -> torch.Tensor:
        choices = r.arriving.numel()
        sent = self.x.index_select(0, r.tokens) if ordered else r.spare(self.x, choices)
        came = self._exchange(sent, r.here, r.there)
        rows = came.index_select(0, r.by_expert) if ordered else came
        return reference.grouped_matmul(rows, self.experts, r.plan.offsets)

    def _exchange(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        width = rows.shape[1]
        split, sizes = [n * width for n in sends], [n * width for n in receives]
        return collectives.all_to_all_whole(rows.reshape(-1), split, sizes, self.group).view(
            -1, width
        )

    def link_us(self) -> float:
        """The most that any rank sends or receives, at the rate of the link."""
        r = self.sets[0]
        others = torch.ones(self.size, dtype=torch.bool, device=self.device)
        others[self.rank] = False
        tokens_here = (
            (r.plan.entry_row.view(self.size, -1, self.case.topk) >= 0).any(-1).sum(1)[others].sum()
        )
        owners = r.ids[self.rank].long() // self.local
        own_there = torch.stack([(owners == peer).any(-1).sum() for peer in range(self.size)])[
            others
        ].sum()
        width = self.case.cols if self.case.op == COMBINE else self.case.depth
        busier = float(torch.maximum(tokens_here, own_there))
        return worst(busier * width * self.dtype.itemsize / LINK, self.device, self.group) * 1e6

    def error(self) -> float:
        """Collective: the largest relative error of sampled rows of this rank, over all routings.

        Of the operator and of both rivals.
        """
        found = []
        for call in (
            self.fused,
            lambda: self.unfused(True),
            *([self.gathered] if self.shared else []),
        ):
            for _ in self.sets:
                got = call()
                want, pick = self.sets[self.turn].expected(self)
                found.append(
                    float((got[pick].float() - want).norm() / want.norm().clamp(min=1e-30))
                )
        return worst_of(found)


class _Routing:
    """Ids of all ranks, this rank's plan and weights, and indices of rows for the unfused paths."""

    def __init__(self, rivals: ExpertRivals, seed: int) -> None:
        case, size, rank, device = rivals.case, rivals.size, rivals.rank, rivals.device
        generator = torch.Generator(device).manual_seed(seed)
        uniform = torch.rand(size, case.tokens, case.experts, generator=generator, device=device)
        # Gumbel noise: sampling without replacement
        score = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        if case.zipf:
            places = torch.randperm(case.experts, generator=generator, device=device)
            score -= case.zipf * torch.log1p(places.float())
        top = score.topk(case.topk, -1)
        weights = torch.softmax(top.values, -1).float()
        self.ids, self.weights = top.indices.int().contiguous(), weights[rank].contiguous()
        # of the unfused sum; every choice has an expert
        self.factors = self.weights.to(rivals.dtype)
        self.plan: RoutingPlan = reference_plan(self.ids, rank, case.experts)
        self.rows = int(self.plan.offsets[-1])
        self.order = (
            Order(case, self.plan, self.rows, weights, rivals.dtype)
            if GATHERED in rivals.names
            else None
        )
        owner = self.ids[rank].reshape(-1).long() // rivals.local
        choices = case.tokens * case.topk
        entry = self.plan.row_entry[: self.rows].long()
        number = torch.arange(choices, device=device)
        if case.graph:  # sizes are bounds: one row per choice of each rank
            self.here = self.there = [choices] * size
            self.leaving = self.plan.entry_row.clamp(min=0).long()
            self.arriving = owner * choices + number
            self.tokens = (number // case.topk).repeat(size)
            self.by_expert = torch.zeros(self.plan.bound, dtype=torch.int64, device=device)
            self.by_expert[: self.rows] = entry
        else:
            order = torch.argsort(owner, stable=True)  # by destination, then token
            self.here, self.there = (
                torch.bincount(n, minlength=size).tolist() for n in (owner, entry // choices)
            )
            self.leaving = torch.argsort(entry)
            self.arriving = torch.empty_like(order)
            self.arriving[order] = number
            self.tokens = order // case.topk
            self.by_expert = torch.argsort(self.leaving)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of some tokens, as many as the experts of this rank have."""
        if not hasattr(self, "_gathered"):
            self._gathered = x.index_select(
                0, torch.arange(max(self.rows, 1), device=x.device) % x.shape[0]
            )
        return self._gathered

    def spare(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        if not hasattr(self, "_spare"):
            self._spare = x.index_select(0, torch.arange(rows, device=x.device) % x.shape[0])
        return self._spare

    def expected(self, rivals: ExpertRivals) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: (fp32 rows, which) of this rank's result, sampled."""
        case, tokens = rivals.case, rivals.case.tokens
        if case.op == DISPATCH:
            everyone = collectives.all_gather(rivals.x, rivals.group)
            pick = torch.arange(0, self.rows, max(1, self.rows // _SAMPLES), device=rivals.device)
            expert = torch.searchsorted(self.plan.offsets[1:].long(), pick, right=True)
            rows = everyone[self.plan.row_entry[pick].long() // case.topk].float()
            want = [rows[i] @ rivals.experts[e].float().t() for i, e in enumerate(expert.tolist())]
            return torch.stack(want) if want else torch.zeros(
                0, case.cols, device=rivals.device
            ), pick
        pick = torch.arange(0, tokens, max(1, tokens // _SAMPLES), device=rivals.device)
        row = self.plan.entry_row.view(rivals.size, tokens, case.topk)[:, pick].long()
        factors = collectives.all_gather(self.weights, rivals.group).view(
            rivals.size, tokens, case.topk
        )[:, pick]
        total = torch.zeros(rivals.size, len(pick), case.cols, device=rivals.device)
        ends = self.plan.offsets.tolist()
        for expert in range(rivals.local):
            hit = ((row >= ends[expert]) & (row < ends[expert + 1])).nonzero(as_tuple=True)
            values = (
                rivals.x[row[hit]].float()
                @ rivals.experts[expert].float().t()
                * factors[hit][:, None]
            )
            total.index_put_(hit[:2], values, accumulate=True)
        return collectives.reduce_scatter(total.view(-1, case.cols), rivals.group), pick


def bench(member: Member, options: Options) -> dict[str, Any]:
    """Collective; the report is complete on rank 0 only."""
    return run_cases(
        member,
        options,
        f"{METHOD}, random routing and data",
        _bench_case,
    )


def _bench_case(
    member: Member, case: ExpertCase, options: Options, seed: int, steps: Steps
) -> dict[str, Any]:
    steps.detail("draws operands")
    rivals = ExpertRivals(case, member, options.rivals or RIVALS, seed)
    steps.detail("compiles and checks")
    plan = rivals.sets[0].plan
    more = (plan,) if case.op == COMBINE else (case.topk,)
    path = str(tw.explain(case.op, rivals.x, rivals.experts, *more))
    member.barrier()
    error = worst(rivals.error(), member.device, member.group)
    entry: dict[str, Any] = {
        **asdict(case),
        "plan": path,
        "error": error,
        "right": error <= TOLERANCE[rivals.dtype],
        "link_us": rivals.link_us(),
        "busiest_rows": worst(float(rivals.sets[0].rows), member.device, member.group),
        "host_us": math.nan,
        "times": {},
        "missing": rivals.missing,
    }
    if entry["right"]:
        entry["times"] = time_all(rivals.functions, member, options, case.graph, steps)
        entry["host_us"] = host_us(member, rivals.functions)
    ours = median(entry, OURS)
    entry |= {ratio: speed_up(median(entry, rival), ours) for ratio, rival in _RATIOS.items()}
    entry["of_limit"] = speed_up(max(entry["link_us"], median(entry, MATMUL)), ours)
    return entry


def _ratio(entry: dict[str, Any], name: str) -> float:
    """NaN if the report has none: it is older than the rival, or NaN, which JSON does not have."""
    found = entry.get(name)
    return math.nan if found is None else float(found)


def tables_of(report: dict[str, Any], width: int) -> list[Table]:
    """One table, in microseconds unless stated."""
    title = (
        f"{report['op']}; world {report['world_size']}, "
        f"{report['environment'].get('device', '')}; us, slowest rank, "
        "median of repeats; link: floor; limit: the larger of link and matmul, over ours"
    )
    times = [name for name in RIVALS if any(name in c["times"] for c in report["cases"])]
    columns = (
        "case",
        *times,
        "link",
        "limit",
        "/unfused",
        "bar",
        "/gathered",
        "/no order",
        "host us",
        "error",
    )
    table = new_table(title, columns, {})
    for case in report["cases"]:
        if not case["right"]:
            table.add_row(case["name"], "[bold red]WRONG[/]")
            continue
        table.add_row(
            case["name"],
            *[number(median(case, name), 1) for name in times],
            number(case["link_us"]),
            number(_ratio(case, "of_limit"), 2),
            marked(_ratio(case, "over_unfused"), max(case["bar"], 1.0)),
            number(case["bar"], 2),
            marked(_ratio(case, "over_gathered"), 1.0),
            number(_ratio(case, "over_no_order"), 2),
            number(case.get("host_us")),
            f"{case['error']:.0e}",
        )
    means = [
        geometric_mean(_ratio(c, name) for c in report["cases"] if c["right"]) for name in _RATIOS
    ]
    unfused, gathered, no_order = (number(mean, 2) for mean in means)
    table.add_section()
    table.add_row(
        "geometric mean", *[""] * (len(times) + 2), unfused, "", gathered, no_order, style="bold"
    )
    return [table]


def plot(report: dict[str, Any], path: Any) -> None:
    """Plot the times of each case over that of the unfused path, as bars. Needs matplotlib."""
    from tileweave.profile.plot import plot_over

    plot_over(report, path, UNFUSED, lambda case: median(case, UNFUSED))


BENCHED = Benched(
    bench, RIVALS, tables_of, plot, baselines=(UNFUSED, GATHERED), random_rivals=(OURS, UNFUSED)
)


def samples(subject: Any, bars: tuple[float, float, float]) -> Samples:
    """Samples of the operator of ``subject``; ``bars`` as ``expert_cases.cases`` takes them."""
    return Samples(
        subject=subject,
        check_on_gpu=expert_cases.CHECKED_ON_GPU,
        check_on_cpu=expert_cases.CHECKED_ON_CPU,
        stress_on_gpu=expert_cases.STRESSED_ON_GPU,
        stress_on_cpu=expert_cases.STRESSED_ON_CPU,
        demo=expert_cases.demo_of(subject.op),
        bench=BENCHED,
        cases=expert_cases.cases(subject.op, bars),
        smoke=expert_cases.smoke(subject.op),
        quick=expert_cases.QUICK,
        rival=ExpertRivals,
        traced=((16, 64, 32), (4096, 4096, 4096)),
        self_signaling=True,
        random=random_cases.experts(subject.op),
    )
