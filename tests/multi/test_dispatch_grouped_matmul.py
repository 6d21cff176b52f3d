"""dispatch_grouped_matmul between GPUs: parity of both kernels, skew, late ranks, graphs,
gradients, an absent peer.

Kernels compile for each dtype and config, which is most of the time here, so there are few cases.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import experts, gpu_behaviour
from tests.support.experts import Case
from tests.support.worlds import Member, World, one_shot

import tileweave as tw
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.planning.schedules.grouped import DispatchConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

HOPPER = DispatchConfig("hopper", 128, 256, 64, 4, 8, 4, signal_blocks=32)
CUTS = {
    "hopper": HOPPER,
    "ordered": replace(HOPPER, ordered=True),
    "hopper-low": DispatchConfig("hopper", 64, 64, 128, 4, 4, 4, signal_blocks=2),
    "triton": DispatchConfig("triton", 64, 128, 64, 3, 4, 4, 8, 4, 4),
    "triton-low": DispatchConfig("triton", 16, 64, 128, 3, 4, 8, 4, 1, 1),
}
PLAIN = Case((300,), experts=4, topk=3, depth=256, cols=320, dtype="bfloat16")
CASES = [
    PLAIN,
    replace(PLAIN, routing="skewed", tokens=(700, 0, 33), spare=5, index_dtype=torch.int32),
    replace(PLAIN, routing="one_expert", tokens=(257,)),
    replace(PLAIN, routing="empty_experts"),
    replace(PLAIN, routing="no_choices", tokens=(1,)),
    replace(PLAIN, routing="holes", experts=33, topk=8, tokens=(64, 65)),
]
ODD = replace(PLAIN, depth=200, cols=100, dtype="float16", tokens=(90,))


def test_plans_in_one_launch_and_sorted(largest: World) -> None:
    many = [
        replace(PLAIN, tokens=(4001, 3000), topk=8, experts=e, routing="holes")
        for e in (5, 64, 100)
    ]
    largest.run(experts.plans, [*CASES, *many], timeout=200)


@pytest.mark.parametrize("cut", CUTS)
def test_parity(largest: World, cut: str) -> None:
    largest.run(experts.parity, CASES, CUTS[cut], timeout=200)


def test_parity_in_each_world(world: World) -> None:
    world.run(experts.parity, [PLAIN, ODD], HOPPER, timeout=150)


def test_public_calls(largest: World) -> None:
    largest.run(
        experts.public_calls,
        [PLAIN, ODD, replace(PLAIN, tokens=(1,)), replace(PLAIN, tokens=(4000,))],
        "fused",
        timeout=200,
    )


@pytest.mark.parametrize("cut", ["hopper", "triton"])
def test_many_calls_with_late_ranks(largest: World, cut: str) -> None:
    cases = [
        replace(PLAIN, tokens=(n, 3), routing=r)
        for n, r in ((1, "even"), (130, "skewed"), (700, "one_rank"))
    ]
    largest.run(experts.many_calls, cases, CUTS[cut], 60, 0.0005, timeout=200)


def replay(me: Member, case: Case, replays: int) -> None:
    """Two calls in a graph, replayed with other tokens and other ids, hence with other sizes."""
    case = replace(case, tokens=(case.max_tokens,))
    drawn = [experts.draw(case, me.rank, me.world_size, me.device, seed) for seed in (0, 1)]
    for o in drawn:
        tw.dispatch_grouped_matmul(o.x, o.experts, o.ids)
    me.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [tw.dispatch_grouped_matmul(o.x, o.experts, o.ids) for o in drawn]
    for n in range(replays):
        for at, o in enumerate(drawn):
            other = experts.draw(case, me.rank, me.world_size, me.device, 2 * n + at)
            for old, new in ((o.x, other.x), (o.experts, other.experts), (o.ids, other.ids)):
                old.copy_(new)
        if n % me.world_size == me.rank:
            experts.pause(me.device, 0.0005)
        graph.replay()
        torch.cuda.synchronize()
        for at, (y, plan) in enumerate(results):
            what = f"rank {me.rank}, replay {n}"
            experts.verify_plan(plan, case, me.rank, me.world_size, 2 * n + at, what)
            experts.verify_y(y, case, me.rank, me.world_size, 2 * n + at, what)
    me.barrier()
    del graph
    tw.close()


def test_replays_with_changing_routes(largest: World) -> None:
    largest.run(replay, replace(PLAIN, tokens=(40,), routing="holes"), 8, timeout=200)


def test_gradients(largest: World) -> None:
    cases = [
        replace(PLAIN, tokens=(60, 0, 17)),
        replace(PLAIN, tokens=(50,), routing="empty_experts"),
        ODD,
    ]
    largest.run(experts.gradients, cases, timeout=200)


def test_compiled_gradients(largest: World) -> None:
    largest.run(experts.gradients, [replace(PLAIN, tokens=(60,))], "inductor", timeout=200)


def test_swiglu(largest: World) -> None:
    largest.run(experts.swiglu, PLAIN, timeout=100)


def test_bad_input(largest: World) -> None:
    largest.run(experts.bad_input, timeout=100)


def call_without(me: Member, absent: int) -> dict | None:
    case = replace(PLAIN, tokens=(60,))
    o = experts.draw(case, me.rank, me.world_size, me.device, 0)
    plans: list[RoutingPlan] = []

    def call(number: int) -> torch.Tensor:
        how = {"plan": plans[-1]} if number else {"topk_ids": o.ids}
        y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, **how)
        plans.append(plan)
        return y

    def poisoned(y: torch.Tensor) -> bool:
        plan = plans[-1]
        remote = plan.row_entry[: int(plan.offsets[-1])] // case.topk // case.max_tokens != me.rank
        return bool(y[: len(remote)][remote].isnan().all())

    return gpu_behaviour.call_without_peer(me, absent, call, poisoned)


def test_a_peer_that_never_calls() -> None:
    ends = one_shot("nccl", 2, call_without, 1, timeout=150)
    assert ends[0].value == {"op": experts.OP, "peer": 1, "poisoned": True}, ends
