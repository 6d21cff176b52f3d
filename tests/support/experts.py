"""Shared by CPU and GPU tests: mixture-of-experts operators. Every rank draws the data of all ranks
from seeds.

The oracle works token by token in plain loops over ids, in fp64. Expected results use no plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.support.parity import pause, poison_slots
from tests.support.tolerances import TOLERANCE, assert_near
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core.registry import group_of, name_of, workspace_of
from tileweave.ops.experts.dispatch_grouped_matmul_fused import OP, run_fused
from tileweave.ops.experts.route_tokens import ROUTING, run_routing
from tileweave.ops.experts.routing_plan import RoutingPlan, padded_ids, reference_plan
from tileweave.planning.schedules.grouped import DispatchConfig, RoutingCut, routing_cut

SORTED = RoutingCut(2, 64, 2)  # so that few tokens are sorted in many units
ROUTINGS = (
    "even",
    "skewed",
    "one_expert",
    "one_rank",
    "empty_experts",
    "holes",
    "no_choices",
    "repeated",
)


@dataclass(frozen=True)
class Case:
    """One call.

    ``tokens`` are those of each rank; ranks past the end have the first ones. ``experts`` is the
    number of experts per rank. ``nodes``: of the world.
    """

    tokens: tuple[int, ...]
    experts: int = 3
    topk: int = 2
    depth: int = 24
    cols: int = 40
    routing: str = "even"
    dtype: str = "float32"
    index_dtype: torch.dtype = torch.int64
    spare: int = 0  # max_tokens exceeds the largest number of tokens by this
    nodes: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def max_tokens(self) -> int:
        return max(self.tokens) + self.spare

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]


@dataclass
class Operands:
    """The operands that one rank passes."""

    x: torch.Tensor
    experts: torch.Tensor
    ids: torch.Tensor


def draw(case: Case, rank: int, size: int, device: torch.device, seed: int) -> Operands:
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    tokens = case.tokens_of(rank)
    x = torch.randn(tokens, case.depth, generator=generator).to(case.torch_dtype)
    experts = (
        torch.randn(case.experts, case.cols, case.depth, generator=generator).to(case.torch_dtype)
        / case.depth**0.5
    )
    ids = draw_ids(case, tokens, rank, size, seed, generator)
    return Operands(x.to(device), experts.to(device), ids.to(case.index_dtype).to(device))


def draw_ids(
    case: Case, tokens: int, rank: int, size: int, seed: int, generator: torch.Generator
) -> torch.Tensor:
    number = case.experts * size
    scores = torch.rand(tokens, number, generator=generator)
    if case.routing == "skewed":
        scores = scores ** torch.arange(1, number + 1)
    if case.routing == "one_rank":
        owner = seed % size
        scores[:, owner * case.experts : (owner + 1) * case.experts] += 1
    if case.routing == "empty_experts":
        scores[:, 1::2] -= 1
    ids = scores.topk(min(case.topk, number), 1).indices
    if ids.shape[1] < case.topk:  # more choices than experts
        ids = torch.cat([ids, ids.new_full((tokens, case.topk - ids.shape[1]), -1)], 1)
    if case.routing == "one_expert":
        ids = torch.full_like(ids, -1)
        ids[:, case.topk // 2] = seed % number
    if case.routing == "holes":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    if case.routing == "no_choices" or (case.routing == "even" and tokens == 0):
        ids = torch.full_like(ids, -1)
    if case.routing == "repeated":  # a token may choose an expert twice
        ids[:, -1] = ids[:, 0]
    return ids


def draw_all_ranks(case: Case, size: int, seed: int) -> list[Operands]:
    return [draw(case, rank, size, torch.device("cpu"), seed) for rank in range(size)]


def sources(rank: int, size: int, nodes: int) -> list[int]:
    """The ranks in the order of rows of an expert of ``rank``."""
    each = size // nodes
    return [node * each + (rank - step) % each for step in range(each) for node in range(nodes)]


def expected_rows(case: Case, rank: int, size: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """The rows of each local expert in order, as (source, token, choice), by plain loops."""
    drawn = draw_all_ranks(case, size, seed)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(case.experts)]
    for source in sources(rank, size, case.nodes):
        for token, choices in enumerate(drawn[source].ids.tolist()):
            for j, expert in enumerate(choices):
                if expert >= 0 and expert // case.experts == rank:
                    rows[expert % case.experts].append((source, token, j))
    return rows


def expected_y(case: Case, rank: int, size: int, seed: int) -> torch.Tensor:
    """Expected rows, fp64 [rows, N], in the order of the plan, so that the order is verified as
    well."""
    drawn = draw_all_ranks(case, size, seed)
    y = [torch.zeros(0, case.cols, dtype=torch.float64)]
    for expert, rows in enumerate(expected_rows(case, rank, size, seed)):
        if rows:
            y.append(_tokens(drawn, rows) @ drawn[rank].experts[expert].double().t())
    return torch.cat(y)


def _tokens(drawn: list[Operands], rows: list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.stack([drawn[source].x[token] for source, token, _ in rows]).double()


def expected_gradients(
    case: Case, rank: int, size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 (dx, dexperts) of ``rank`` for the loss sum over ranks of (y * coefficients)."""
    drawn = draw_all_ranks(case, size, seed)
    dx = torch.zeros(case.tokens_of(rank), case.depth, dtype=torch.float64)
    dexperts = torch.zeros(case.experts, case.cols, case.depth, dtype=torch.float64)
    for owner in range(size):
        rows = expected_rows(case, owner, size, seed)
        c = coefficients(case, sum(map(len, rows)), owner, torch.device("cpu")).double()
        for expert, (mine, grads) in enumerate(zip(rows, c.split([*map(len, rows)]), strict=True)):
            back = grads @ drawn[owner].experts[expert].double()
            for (source, token, _), grad in zip(mine, back, strict=True):
                if source == rank:
                    dx[token] += grad
            if owner == rank and mine:
                dexperts[expert] = grads.t() @ _tokens(drawn, mine)
    return dx, dexperts


def coefficients(case: Case, rows: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 + rank)
    return torch.randn(rows, case.cols, generator=generator).to(case.torch_dtype).to(device)


def verify_plan(plan: RoutingPlan, case: Case, rank: int, size: int, seed: int, what: str) -> None:
    rows = expected_rows(case, rank, size, seed)
    flat = [(s * case.max_tokens + t) * case.topk + j for mine in rows for s, t, j in mine]
    ends = [0]
    for mine in rows:
        ends.append(ends[-1] + len(mine))
    assert plan.offsets.tolist() == ends, f"{what}: offsets {plan.offsets.tolist()}, not {ends}"
    assert plan.row_entry[: len(flat)].tolist() == flat, f"{what}: rows"
    where = {entry: row for row, entry in enumerate(flat)}
    assert plan.entry_row.tolist() == [where.get(entry, -1) for entry in range(plan.entries)], (
        f"{what}: entries"
    )
    own = draw(case, rank, size, torch.device("cpu"), seed).ids.tolist()
    none = [[-1] * case.topk] * (case.max_tokens - len(own))
    assert plan.topk_ids.tolist() == own + none, f"{what}: own ids"
    for peer in range(size):
        lowest = [
            min((e % case.experts for e in c if e >= 0 and e // case.experts == peer), default=None)
            for c in own
        ]
        order = sorted((low, t) for t, low in enumerate(lowest) if low is not None)
        begins = [sum(low < e for low, _ in order) for e in range(case.experts + 1)]
        assert plan.send_offsets[peer].tolist() == begins, f"{what}: send offsets to {peer}"
        assert plan.send_order[peer, : len(order)].tolist() == [t for _, t in order], (
            f"{what}: send order to {peer}"
        )


def verify_y(y: torch.Tensor, case: Case, rank: int, size: int, seed: int, what: str) -> None:
    want = expected_y(case, rank, size, seed)
    assert y.dtype == case.torch_dtype and y.shape[1] == case.cols, (
        f"{what}: {y.dtype} {tuple(y.shape)}"
    )
    relative, absolute = TOLERANCE[case.dtype]
    assert_near(y[: len(want)].double().cpu(), want, relative, absolute, what)


# --- Bodies ---


def plans(me: Member, cases: list[Case]) -> None:
    """Run routing alone: every case in one launch and by the sort, in one instance."""
    for seed, case in enumerate(cases):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        for cut in (routing_cut(2, 1, 1), SORTED):
            poison(me, ROUTING)
            plan = run_routing(
                o.ids, case.experts * me.world_size, case.max_tokens, name_of(None), cut
            )
            verify_plan(plan, case, me.rank, me.world_size, seed, f"rank {me.rank}, {case}, {cut}")


def references(me: Member, cases: list[Case]) -> None:
    """Compare the plain plan with plain loops: other tests rely on it."""
    for seed, case in enumerate(cases):
        ids = torch.stack(
            [padded_ids(o.ids, case.max_tokens) for o in draw_all_ranks(case, me.world_size, seed)]
        )
        plan = reference_plan(ids, me.rank, case.experts * me.world_size, case.tokens_of(me.rank))
        verify_plan(plan, case, me.rank, me.world_size, seed, f"rank {me.rank}, {case}")


def parity(me: Member, cases: list[Case], config: DispatchConfig) -> None:
    """Run routing and matmul with poisoned slots and outputs. Every other plan uses the sort for
    many tokens."""
    for seed, case in enumerate((*cases, cases[0])):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        poison(me, OP)
        poison(me, ROUTING)
        y, plan = fused(me, case, o, config, (None, SORTED)[seed % 2])
        what = f"rank {me.rank}, call {seed}, {case}, {config!r}"
        verify_plan(plan, case, me.rank, me.world_size, seed, what)
        verify_y(y, case, me.rank, me.world_size, seed, what)


def fused(
    me: Member, case: Case, o: Operands, config: DispatchConfig, cut: RoutingCut | None = None
) -> tuple[torch.Tensor, RoutingPlan]:
    """Run the kernels with this config instead of the planned one. Undefined rows are NaN."""
    plan = run_routing(o.ids, case.experts * me.world_size, case.max_tokens, name_of(None), cut)
    y = torch.full((plan.bound, case.cols), float("nan"), dtype=case.torch_dtype, device=me.device)
    run_fused(o.x, o.experts, plan, y, name_of(None), config)
    return y, plan


def poison(me: Member, op: str) -> None:
    """Fill the slots of an idle instance with values that must never be read."""
    instance = workspace_of(name_of(None), me.device).instance(op, "sm")
    if instance.num_slots:
        poison_slots(instance, False)


def many_calls(
    me: Member, cases: list[Case], config: DispatchConfig, calls: int, seconds: float, stall=None
) -> None:
    """Make calls of changing size, with a different rank late each time. Check all results at the
    end, so that no rank waits in between."""
    kept = []
    for number in range(calls):
        case = cases[number % len(cases)]
        o = draw(case, me.rank, me.world_size, me.device, number)
        cut = (None, SORTED)[number // 2 % 2]
        if number % me.world_size == me.rank:
            pause(me.device, seconds)
        if stall is None:
            y, plan = fused(me, case, o, config, cut)
        else:
            with stall(seconds, number):
                y, plan = fused(me, case, o, config, cut)
        kept.append((number, case, y, plan))
    for number, case, y, plan in kept:
        what = f"rank {me.rank}, call {number}, {case}"
        verify_plan(plan, case, me.rank, me.world_size, number, what)
        verify_y(y, case, me.rank, me.world_size, number, what)


def public_calls(me: Member, cases: list[Case], path: str) -> None:
    """Run the operator with its own plan: with ids, with a plan, into ``out=``. The unfused
    operator gives the same rows."""
    from tileweave.ops import reference

    for seed, case in enumerate(cases):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        what = f"rank {me.rank}, {case}"
        assert tw.explain(OP, o.x, o.experts, case.topk, max_tokens=case.max_tokens).path == path
        y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids, max_tokens=case.max_tokens)
        verify_plan(plan, case, me.rank, me.world_size, seed, what)
        verify_y(y, case, me.rank, me.world_size, seed, what)
        out = torch.full_like(y, float("nan"))
        again, same = tw.dispatch_grouped_matmul(o.x, o.experts, plan=plan, out=out)
        assert again is out and same is plan
        verify_y(out, case, me.rank, me.world_size, seed, f"{what}, out=")
        want = reference.dispatch_grouped_matmul(o.x, o.experts, plan, group_of(name_of(None)))
        verify_y(want, case, me.rank, me.world_size, seed, f"{what}, the reference")


def gradients(me: Member, cases: list[Case], backend: str | None = None) -> None:
    """Check dx and dexperts. Undefined rows are never read, so they may be NaN."""
    for seed, case in enumerate(cases):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        rows = sum(map(len, expected_rows(case, me.rank, me.world_size, seed)))
        bound = me.world_size * case.max_tokens * min(case.topk, case.experts)
        c = torch.zeros(bound, case.cols, dtype=case.torch_dtype, device=me.device)
        c[:rows] = coefficients(case, rows, me.rank, me.device)
        o.x.requires_grad_()
        o.experts.requires_grad_()

        def run(x, w, ids, case=case):
            return tw.dispatch_grouped_matmul(x, w, ids, max_tokens=case.max_tokens)[0]

        y = (run if backend is None else torch.compile(run, fullgraph=True, backend=backend))(
            o.x, o.experts, o.ids
        )
        y.backward(c)
        for got, want, which in zip(
            (o.x.grad, o.experts.grad),
            expected_gradients(case, me.rank, me.world_size, seed),
            ("x", "experts"),
            strict=True,
        ):
            assert got is not None and got.dtype == case.torch_dtype
            off = (got.double().cpu() - want).norm()
            limit = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}[case.dtype]
            assert off <= limit * want.norm() + 1e-12, (
                f"rank {me.rank}, {case}: d{which} is off by {float(off)}"
            )


def swiglu(me: Member, case: Case) -> None:
    """Check value and gradient of the defined rows. The others hold NaN and are unchanged."""
    o = draw(case, me.rank, me.world_size, me.device, 0)
    y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids, max_tokens=case.max_tokens)
    rows = int(plan.offsets[-1])
    y = y.clone()
    y[rows:] = float("nan")
    y.requires_grad_()
    z = tw.swiglu(y, plan)
    leaf = y.detach()[:rows].double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    relative, absolute = TOLERANCE[case.dtype]
    assert_near(z[:rows].double(), want, relative, absolute, "value")
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(me.device)
    full = torch.full_like(z, float("nan"))
    full[:rows] = grad
    z.backward(full)
    want.backward(grad.double())
    assert y.grad is not None and leaf.grad is not None
    assert_near(y.grad[:rows].double(), leaf.grad, relative, 4 * absolute, "gradient")


def bad_input(me: Member) -> None:
    x, w = torch.zeros(4, 8, device=me.device), torch.zeros(2, 6, 8, device=me.device)
    ids = torch.zeros(4, 2, dtype=torch.int64, device=me.device)
    _, plan = tw.dispatch_grouped_matmul(x, w, ids)
    call = tw.dispatch_grouped_matmul
    wrong = [
        ("one of them", lambda: call(x, w)),
        ("the plan alone", lambda: call(x, w, ids, plan=plan)),
        (r"\[T, k\]", lambda: call(x, w, ids[0])),
        ("int32 or int64", lambda: call(x, w, ids.float())),
        (
            r"strides \(4, 2\); allowed: contiguous int32.*topk_ids\.contiguous\(\)",
            lambda: call(x, w, ids.repeat(1, 2)[:, ::2]),
        ),
        ("at most max_tokens", lambda: call(x, w, ids, max_tokens=3)),
        ("one of each", lambda: call(x, w, ids[:, :0])),
        ("Linear layout", lambda: call(x, w.transpose(1, 2), plan=plan)),
        ("one dtype", lambda: call(x.half(), w, plan=plan)),
        ("float16", lambda: call(x.double(), w.double(), plan=plan)),
        (
            "x of 5 tokens with ids of 4",
            lambda: call(torch.zeros(5, 8, device=me.device), w, plan=plan),
        ),
        ("a plan of 2", lambda: call(x, w[:1], plan=plan)),
        ("allocate out", lambda: call(x, w, plan=plan, out=torch.zeros(3, 6, device=me.device))),
        (
            "no_grad",
            lambda: call(
                x.clone().requires_grad_(),
                w,
                plan=plan,
                out=torch.zeros(plan.bound, 6, device=me.device),
            ),
        ),
        (r"\[bound, 2 I\]", lambda: tw.swiglu(torch.zeros(4, 5, device=me.device), plan)),
    ]
    for said, attempt in wrong:
        with pytest.raises(tw.InputError, match=said):
            attempt()
    call(x, w, ids)


def out_of_range_raises(me: Member, odd: int) -> None:
    """In debug mode every rank raises, and the next call works."""
    x, w = torch.zeros(2, 8, device=me.device), torch.zeros(1, 6, 8, device=me.device)
    for wrong in (me.world_size, -2):
        ids = torch.tensor([[0], [wrong if me.rank == odd else 0]], device=me.device)
        with pytest.raises(
            tw.InputError if me.rank == odd else tw.RankMismatchError,
            match=f"experts {min(wrong, 0)} to",
        ):
            tw.dispatch_grouped_matmul(x, w, ids)
    tw.dispatch_grouped_matmul(x, w, ids.clamp(0, 0))
