"""Bodies of the mixture-of-experts tests that CPU and GPU worlds share. Every rank draws all ranks' data from seeds.

The oracle works token by token in plain loops over ids, in fp64; nothing of a plan is part of what is expected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.parity import TOLERANCE, pause, poison_slots
from tests.worlds import Member

from tileweave.ops.dispatch_grouped_matmul_fused import OP, ROUTING, run_fused, run_routing
from tileweave.ops.registry import name_of, workspace_of
from tileweave.ops.routing_plan import RoutingPlan, padded_ids, reference_plan
from tileweave.schedule_grouped import DispatchConfig

ROUTINGS = ("even", "skewed", "one_expert", "one_rank", "empty_experts", "holes", "nobody", "repeated")


@dataclass(frozen=True)
class Case:
    """One call. ``tokens``: of each rank (ranks past the end have the first ones). ``experts``: of a rank."""

    tokens: tuple[int, ...]
    experts: int = 3
    topk: int = 2
    depth: int = 24
    cols: int = 40
    routing: str = "even"
    dtype: str = "float32"
    index_dtype: torch.dtype = torch.int64
    spare: int = 0  # max_tokens is this much more than the most tokens

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
    """What one rank passes."""

    x: torch.Tensor
    experts: torch.Tensor
    ids: torch.Tensor


def draw(case: Case, rank: int, size: int, device: torch.device, seed: int) -> Operands:
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    tokens = case.tokens_of(rank)
    x = torch.randn(tokens, case.depth, generator=generator).to(case.torch_dtype)
    experts = torch.randn(case.experts, case.cols, case.depth, generator=generator).to(case.torch_dtype) / case.depth**0.5
    ids = draw_ids(case, tokens, rank, size, seed, generator)
    return Operands(x.to(device), experts.to(device), ids.to(case.index_dtype).to(device))


def draw_ids(case: Case, tokens: int, rank: int, size: int, seed: int, generator: torch.Generator) -> torch.Tensor:
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
    if case.routing == "nobody" or (case.routing == "even" and tokens == 0):
        ids = torch.full_like(ids, -1)
    if case.routing == "repeated":  # a token may choose an expert twice
        ids[:, -1] = ids[:, 0]
    return ids


def everyone(case: Case, size: int, seed: int) -> list[Operands]:
    return [draw(case, rank, size, torch.device("cpu"), seed) for rank in range(size)]


def expected_rows(case: Case, rank: int, size: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """For each local expert its rows in order, as (source, token, choice), by plain loops."""
    drawn = everyone(case, size, seed)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(case.experts)]
    for step in range(size):
        source = (rank - step) % size
        for token, choices in enumerate(drawn[source].ids.tolist()):
            for j, expert in enumerate(choices):
                if expert >= 0 and expert // case.experts == rank:
                    rows[expert % case.experts].append((source, token, j))
    return rows


def expected_y(case: Case, rank: int, size: int, seed: int) -> torch.Tensor:
    """fp64 [rows, N]: each row of the plan in its order, so that order is verified as well."""
    drawn = everyone(case, size, seed)
    y = [
        drawn[source].x[token].double() @ drawn[rank].experts[expert].double().t()
        for expert, rows in enumerate(expected_rows(case, rank, size, seed))
        for source, token, _ in rows
    ]
    return torch.stack(y) if y else torch.zeros(0, case.cols, dtype=torch.float64)


def verify_plan(plan: RoutingPlan, case: Case, rank: int, size: int, seed: int, what: str) -> None:
    rows = expected_rows(case, rank, size, seed)
    flat = [(s * case.max_tokens + t) * case.topk + j for mine in rows for s, t, j in mine]
    ends = [0]
    for mine in rows:
        ends.append(ends[-1] + len(mine))
    assert plan.offsets.tolist() == ends, f"{what}: offsets {plan.offsets.tolist()}, not {ends}"
    assert plan.row_entry[: len(flat)].tolist() == flat, f"{what}: rows"
    where = {entry: row for row, entry in enumerate(flat)}
    assert plan.entry_row.tolist() == [where.get(entry, -1) for entry in range(plan.entries)], f"{what}: entries"
    own = draw(case, rank, size, torch.device("cpu"), seed).ids.tolist()
    none = [[-1] * case.topk] * (case.max_tokens - len(own))
    assert plan.topk_ids.tolist() == own + none, f"{what}: own ids"
    for peer in range(size):
        lowest = [min((e % case.experts for e in c if e >= 0 and e // case.experts == peer), default=None) for c in own]
        order = sorted((low, t) for t, low in enumerate(lowest) if low is not None)
        begins = [sum(low < e for low, _ in order) for e in range(case.experts + 1)]
        assert plan.send_offsets[peer].tolist() == begins, f"{what}: send offsets to {peer}"
        assert plan.send_order[peer, : len(order)].tolist() == [t for _, t in order], f"{what}: send order to {peer}"


def verify_y(y: torch.Tensor, case: Case, rank: int, size: int, seed: int, what: str) -> None:
    want = expected_y(case, rank, size, seed)
    assert y.dtype == case.torch_dtype and y.shape[1] == case.cols, f"{what}: {y.dtype} {tuple(y.shape)}"
    relative, absolute = TOLERANCE[case.dtype]
    got = y[: len(want)].double().cpu()
    torch.testing.assert_close(got, want, rtol=relative, atol=absolute, msg=lambda text: f"{what}: {text}")


# --- Bodies ---


def references(me: Member, cases: list[Case]) -> None:
    """The plain plan against plain loops: what other tests lean on."""
    for seed, case in enumerate(cases):
        ids = torch.stack([padded_ids(o.ids, case.max_tokens) for o in everyone(case, me.world_size, seed)])
        plan = reference_plan(ids, me.rank, case.experts * me.world_size, case.tokens_of(me.rank))
        verify_plan(plan, case, me.rank, me.world_size, seed, f"rank {me.rank}, {case}")


def routing(me: Member, cases: list[Case]) -> None:
    """The kernel's plan, each case twice, with poisoned slots."""
    for seed, case in enumerate((*cases, *cases)):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        poison(me, ROUTING, torch.int32)
        plan = run_routing(o.ids, case.experts * me.world_size, case.max_tokens, name_of(None))
        verify_plan(plan, case, me.rank, me.world_size, seed, f"rank {me.rank}, call {seed}, {case}")


def parity(me: Member, cases: list[Case], config: DispatchConfig) -> None:
    """Routing and matmul, each case twice, with poisoned slots and outputs."""
    for seed, case in enumerate((cases[0], *cases, *cases)):
        o = draw(case, me.rank, me.world_size, me.device, seed)
        poison(me, OP, case.torch_dtype)
        y, plan = fused(me, case, o, config)
        verify_y(y, case, me.rank, me.world_size, seed, f"rank {me.rank}, call {seed}, {case}, {config}")


def fused(me: Member, case: Case, o: Operands, config: DispatchConfig) -> tuple[torch.Tensor, RoutingPlan]:
    """The kernels with this cut, whatever the plan would say; rows that nobody writes are NaN."""
    plan = run_routing(o.ids, case.experts * me.world_size, case.max_tokens, name_of(None))
    y = torch.full((plan.bound, case.cols), float("nan"), dtype=case.torch_dtype, device=me.device)
    run_fused(o.x, o.experts, plan, y, name_of(None), config)
    return y, plan


def poison(me: Member, op: str, dtype: torch.dtype) -> None:
    """Fill the slots of a quiet instance with what must never be read."""
    instance = workspace_of(name_of(None), me.device).instance(op, "sm")
    if instance.num_slots:
        instance.transport.synchronize()
        instance.transport.barrier()
        instance.slots.view(dtype).fill_(float("nan") if dtype.is_floating_point else 2**30)
        instance.transport.synchronize()
        instance.transport.barrier()


def many_calls(me: Member, cases: list[Case], config: DispatchConfig, calls: int, seconds: float, stall=None) -> None:
    """Calls in a row with changing sizes, one rank late after another; checked at the end, so that nobody waits meanwhile."""
    kept = []
    for number in range(calls):
        case = cases[number % len(cases)]
        o = draw(case, me.rank, me.world_size, me.device, number)
        if number % me.world_size == me.rank:
            pause(me.device, seconds)
        if stall is None:
            y, plan = fused(me, case, o, config)
        else:
            with stall(seconds, number):
                y, plan = fused(me, case, o, config)
        kept.append((number, case, y, plan))
    for number, case, y, plan in kept:
        what = f"rank {me.rank}, call {number}, {case}"
        verify_plan(plan, case, me.rank, me.world_size, number, what)
        verify_y(y, case, me.rank, me.world_size, number, what)
