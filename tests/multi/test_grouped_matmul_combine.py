"""grouped_matmul_combine and nn.MoE between GPUs: both kernels, late ranks, graphs, gradients, an
absent peer.

Kernels compile for each dtype and config, which is most of the time here, so there are few cases.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import combine, gpu_behaviour
from tests.support import moe_layer as moe
from tests.support.experts import Case
from tests.support.moe_layer import Layer
from tests.support.worlds import Member, World, one_shot

import tileweave as tw
from tileweave.planning.combine import CombineConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]

TRITON = CombineConfig(
    "triton",
    16,
    64,
    64,
    3,
    4,
    2,
    chunks=2,
    groups=2,
    block_tokens=2,
    block_cols=128,
    num_reduce=4,
    num_finish=4,
)
HOPPER = CombineConfig(
    "hopper", 128, 256, 64, 4, 8, 8, chunks=2, groups=4, block_tokens=8, block_cols=1024
)
HOPPER_RUNS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
FASTEST = HOPPER if HOPPER_RUNS else TRITON
configs = pytest.mark.parametrize(
    "config", [TRITON, HOPPER] if HOPPER_RUNS else [TRITON], ids=lambda c: c.kernel
)

BASE = Case((70,), experts=4, topk=3, depth=192, cols=640, dtype="bfloat16")
CASES = [
    replace(BASE, routing=routing)
    for routing in ("even", "skewed", "one_expert", "one_rank", "holes", "no_choices")
]
UNEVEN = [
    replace(BASE, tokens=(40, 0, 150)),
    replace(BASE, tokens=(1,), topk=4),
    replace(BASE, tokens=(300,), cols=520),
]


@configs
def test_parity(largest: World, config: CombineConfig) -> None:
    largest.run(combine.parity, [*CASES, *UNEVEN], config, timeout=300)


@configs
def test_weights_in_backward_layout(largest: World, config: CombineConfig) -> None:
    largest.run(combine.parity, [BASE, UNEVEN[2]], config, True, False, timeout=300)


def test_in_each_world(world: World) -> None:
    world.run(combine.parity, [replace(BASE, dtype="float16")], TRITON, timeout=200)


@configs
def test_many_calls_with_late_ranks(largest: World, config: CombineConfig) -> None:
    cases = [replace(BASE, tokens=(5, 1)), BASE, replace(BASE, tokens=(2, 0, 130))]
    largest.run(combine.many_calls, cases, config, 60, 0.0005, timeout=300)


def replay(me: Member, case: Case, replays: int) -> None:
    """Calls in a graph, replayed with other operands of the same routing, between eager calls."""
    drawn = [combine.prepare(case, me.rank, me.world_size, me.device, 0) for _ in range(2)]
    tw.warmup(combine.OP, drawn[0].y, drawn[0].experts, drawn[0].plan, drawn[0].weights)
    graph = torch.cuda.CUDAGraph()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        zs = [tw.grouped_matmul_combine(c.y, c.experts, c.plan, c.weights) for c in drawn]
    want = combine.expected(case, me.rank, me.world_size, 0)
    for n in range(replays):
        if n % me.world_size == me.rank:
            combine.pause(me.device, 0.0005)
        for number, c in enumerate(drawn):  # doubled weights in every rank double the result
            c.weights.mul_(2.0 if (n + number) % 2 == 0 else 0.5)
        graph.replay()
        kept = [z.clone() for z in zs]
        torch.cuda.synchronize()
        scales = [float(2.0 if n % 2 == 0 else 1.0), float(0.5 if n % 2 == 0 else 1.0)]
        for scale, z in zip(scales, kept, strict=True):
            combine.verify(z, want * scale, case, f"rank {me.rank}, replay {n}")
        if n % 3 == 0:
            eager = combine.prepare(case, me.rank, me.world_size, me.device, 7)
            z = tw.grouped_matmul_combine(eager.y, eager.experts, eager.plan, eager.weights)
            combine.verify(
                z,
                combine.expected(case, me.rank, me.world_size, 7),
                case,
                f"eager after replay {n}",
            )
    me.barrier()
    del graph
    tw.close()


@pytest.mark.parametrize("tokens", [4, 400], ids=["few", "many"])
def test_replays(largest: World, tokens: int) -> None:
    largest.run(replay, replace(BASE, tokens=(tokens,)), 8, timeout=300)


def test_gradients(largest: World) -> None:
    largest.run(combine.gradients, [BASE, UNEVEN[0]], timeout=300)


def test_bad_input(largest: World) -> None:
    largest.run(combine.bad_input, replace(BASE, dtype="float32"), timeout=200)


def test_moe(largest: World) -> None:
    layers = [
        Layer((64,), hidden=256, width=128, experts=4, topk=3, shared=128, dtype="bfloat16"),
        Layer((600, 0, 200), hidden=256, width=128, experts=2, topk=2, dtype="bfloat16"),
    ]
    largest.run(moe.layer_over_ranks, layers, timeout=300)


def call_without(me: Member, absent: int) -> dict | None:
    calls = [combine.prepare(BASE, me.rank, me.world_size, me.device, seed) for seed in (0, 1)]

    def call(number: int) -> torch.Tensor:
        return combine.fused(me, calls[number], FASTEST)

    return gpu_behaviour.call_without_peer(me, absent, call, lambda z: bool(z.isnan().any()))


def test_a_peer_that_never_calls() -> None:
    ends = one_shot("nccl", 2, call_without, 1, timeout=200)
    assert ends[0].value == {"op": combine.OP, "peer": 1, "poisoned": True}, ends
