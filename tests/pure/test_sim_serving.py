"""Serving as engines do it: host, sampling, own all-reduces, stages, whole requests; expert layers
with DeepEP's exchanges, FP8 and two batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tileweave.errors import InputError
from tileweave.sim import moe, serving, token_exchange
from tileweave.sim.collectives import Group
from tileweave.sim.machine import Cluster, make_cluster
from tileweave.sim.operators import Operators
from tileweave.sim.token_exchange import Tokens, counted_bytes, exchange_time
from tileweave.sim.workload import Scenario, simulate, simulate_all

NODE = make_cluster("h100")
SMALL: dict[str, Any] = {"model": replace(serving.known_model("llama3-70b"), layers=4)}


def seconds(cluster: Cluster = NODE, mode: Any = "unfused", **fields: Any) -> float:
    work = serving.Serving(**{**SMALL, "tp": 4, **fields})
    return simulate(Scenario("serve", work, cluster), mode).seconds


# --- Engines ---


def test_a_request_is_a_prefill_and_the_other_tokens() -> None:
    whole = seconds(phase="generate", batch=8, seq=1000, output=101)
    prefill = seconds(batch=8, seq=1000)
    one = seconds(phase="decode", batch=8, seq=1050)
    assert whole == pytest.approx(prefill + 100 * one, rel=0.02)
    assert seconds(phase="generate", batch=8, seq=1000, output=1) == pytest.approx(
        prefill, rel=1e-3
    )
    result = simulate_all(
        Scenario("serve", serving.Serving(**SMALL, phase="generate", output=10), NODE)
    )
    assert (result.samples, result.unit) == (8 * 10, "tokens")


def test_small_all_reduces_are_an_engine_s_own() -> None:
    """Few rows by one launch, many by NCCL; never slower than NCCL."""
    decode = {"phase": "decode", "batch": 8, "seq": 512}
    assert seconds(**decode) < 0.99 * seconds(**decode, all_reduce="nccl")
    assert seconds(batch=8, seq=4096) == seconds(batch=8, seq=4096, all_reduce="nccl")
    engine, nccl = serving.EngineOperators(NODE), Operators(NODE)
    for size in (1e4, 1e6, 1e8):
        assert engine.collective("all_reduce", size, Group(4)) <= nccl.collective(
            "all_reduce", size, Group(4)
        )
    assert engine.collective("all_gather", 1e4, Group(4)) == nccl.collective(
        "all_gather", 1e4, Group(4)
    )


def test_a_step_has_host_time_sampling_and_logits() -> None:
    work = serving.Serving(**SMALL, phase="decode", batch=64)
    found = simulate(Scenario("serve", work, NODE), "unfused")
    parts = {part.name: part for task in found.tasks for part in task.parts}
    assert parts["host"].seconds >= serving.HOST
    assert parts["gather of logits"].collective == "all_gather"
    assert parts["gather of logits"].nbytes == 64 * 128256 * 2
    assert parts["sampling"].seconds > 64 * 128256 * 16 / NODE.device.memory_rate
    assert found.phases()["host"] == pytest.approx(parts["host"].seconds)


def test_stages_work_on_other_micro_batches_meanwhile() -> None:
    two = make_cluster("h100", nodes=2)
    cut = {"phase": "decode", "batch": 64, "seq": 2048}
    half = seconds(phase="decode", batch=32, seq=2048)
    assert half < seconds(two, **cut, tp=4, pp=2) < 1.5 * half
    # a prefill through two stages: two micro-batches, one of which each stage waits for
    whole, staged = seconds(batch=8, seq=2048), seconds(two, batch=8, seq=2048, pp=2)
    assert 0.7 * whole < staged < 0.9 * whole
    slow = replace(two, network=replace(two.network, nic_rate=1e9))
    far = {"batch": 8, "seq": 2048, "tp": 8, "pp": 2}
    assert seconds(slow, **far) > 1.1 * seconds(two, **far)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 4, "pp": 4}, "tp 4 x pp 4; allowed: at most the 8 GPUs of the cluster"),
        ({"tp": 3, "pp": 2}, "tp 3 with pp 2"),
        ({"output": 3}, "output 3 in phase prefill"),
        ({"phase": "generate"}, "output 0 in phase generate"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        seconds(**fields)


# --- Exchanges of tokens ---

TOKENS = Tokens(4096, 7168, 256, 8, 4)


def test_expected_nodes_and_ranks_match_drawn_routing() -> None:
    import random

    drawn = random.Random(3)
    nodes, ranks = 0, 0
    for _ in range(4000):
        allowed = drawn.sample(range(8), 4)
        experts = drawn.sample([node * 32 + e for node in allowed for e in range(32)], 8)
        nodes += len({expert // 32 for expert in experts})
        ranks += len({expert // 4 for expert in experts})
    group = Group(8, 8)
    assert TOKENS.nodes(group) == pytest.approx(nodes / 4000, rel=0.02)
    assert TOKENS.ranks(group) == pytest.approx(ranks / 4000, rel=0.02)
    assert Tokens(1, 8, 4, 4).ranks(Group(4)) == 4.0


def test_a_token_crosses_to_a_node_once() -> None:
    """Against a row for each expert: fewer bytes by NICs, and FP8 halves those that go out."""
    cluster = make_cluster("h800", nodes=4)
    group = Group(8, 4)
    one = exchange_time("normal", "dispatch", TOKENS, group, cluster, False)
    each = exchange_time("low_latency", "dispatch", TOKENS, group, cluster, False)
    assert one < 0.6 * each
    eight = exchange_time("normal", "dispatch", TOKENS, group, cluster, True)
    assert eight == pytest.approx(one * 0.516, rel=0.02)
    assert exchange_time("normal", "combine", TOKENS, group, cluster, True) == one
    assert counted_bytes("GB/s RDMA", "combine", TOKENS, group, False) == pytest.approx(
        4096 * TOKENS.nodes(group) * 14336
    )


def layers(exchange: str, nodes: int = 4, **fields: Any) -> moe.MoE:
    model = replace(moe.known_experts("deepseek-v3"), layers=5)
    return moe.MoE(model, tokens=8192, exchange=exchange, **fields)  # type: ignore[arg-type]


def of(work: moe.MoE, nodes: int = 4, mode: Any = "unfused") -> float:
    return simulate(Scenario("moe", work, make_cluster("h100", nodes=nodes)), mode).seconds


def test_options_of_engines_each_save_time() -> None:
    nccl, normal = of(layers("nccl")), of(layers("normal"))
    halves = of(layers("normal", two_batch=True))
    eight = of(layers("normal", two_batch=True, fp8=True))
    assert eight < halves < normal < nccl
    assert of(layers("normal", two_batch=True), mode="fused") <= halves * (1 + 1e-9)
    assert of(layers("nccl", fp8=True)) < nccl


def test_latent_attention_shared_experts_and_dense_layers_are_counted() -> None:
    work = layers("normal")
    model = work.model
    assert model.attention_parameters == 187_105_280  # as published, without norms
    assert model.cached == 576
    without = replace(work, model=replace(model, shared=0))
    assert of(without) < of(work)
    dense = simulate(Scenario("moe", work, make_cluster("h100", nodes=4)), "unfused")
    names = [part.name for part in dense.tasks[0].parts]
    assert "dense, up" in names and "second matmul and combine" not in names
    assert len(dense.tasks) == 5
    long = replace(work, phase="decode", tokens=128, seq=8192)
    assert of(long) > 1.1 * of(replace(long, seq=1024))


def test_experts_that_do_not_divide_need_copies() -> None:
    work = replace(layers("low_latency"), tokens=128, phase="decode")
    with pytest.raises(InputError, match="redundant copies"):
        of(work, 9)
    assert of(replace(work, redundant=32), 9) > 0.0
    with pytest.raises(InputError, match="two tokens at least"):
        replace(work, tokens=1, two_batch=True)
    with pytest.raises(InputError, match="dense_layers 9"):
        replace(work.model, dense_layers=9)
    assert set(token_exchange.KERNELS) < set(token_exchange.KINDS)
