"""Schedules, memory and advice of training: orders are complete, published sizes are met, and what
does not fit is not advised."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tileweave.errors import InputError
from tileweave.sim import training
from tileweave.sim.advise import advise
from tileweave.sim.machine import Cluster, make_cluster, with_gpus
from tileweave.sim.memory import kv_cache, memory_of, training_memory, usable
from tileweave.sim.schedules import Work, in_flight, one_f_one_b, zero_bubble
from tileweave.sim.transformer import Model
from tileweave.sim.workload import Scenario, simulate

SMALL = Model("small", 16, 4096, 16384, 32, 32, 51200, False, 2048, "ours")


def seconds(cluster: Cluster, **fields: Any) -> float:
    work = training.Training(SMALL, **fields)
    return simulate(Scenario("train", work, cluster), "unfused").seconds


def flying(order: list[Work]) -> int:
    """The most forwards of a stage whose backward is still to come."""
    now, most = 0, 0
    for work in order:
        now += {"F": 1, "B": -1, "W": 0}[work.what]
        most = max(most, now)
    return most


@pytest.mark.parametrize(("stages", "micro", "chunks"), [(4, 8, 2), (2, 4, 3), (8, 16, 6)])
def test_interleaved_order_is_complete_and_keeps_what_megatron_keeps(
    stages: int, micro: int, chunks: int
) -> None:
    for stage in range(stages):
        order = list(one_f_one_b(stage, stages, micro, chunks))
        assert sorted(order) == sorted(map(Work._make, product("FB", range(micro), range(chunks))))
        for chunk in range(chunks):  # a backward follows its own forward
            for m in range(micro):
                assert order.index(Work("F", m, chunk)) < order.index(Work("B", m, chunk))
    assert flying(list(one_f_one_b(0, stages, micro, chunks))) / chunks == pytest.approx(
        in_flight(stages, micro, chunks)
    )


def test_zero_bubble_keeps_no_more_than_1f1b() -> None:
    for stage in range(4):
        order = list(zero_bubble(stage, 4, 8))
        assert sorted(order) == sorted((what, m, 0) for what in "FBW" for m in range(8))
        for m in range(8):
            assert order.index(Work("B", m)) < order.index(Work("W", m))
        assert flying(order) == flying(list(one_f_one_b(stage, 4, 8)))


def test_schedules_shorten_the_idle_time() -> None:
    """1F1B is idle for (stages - 1) / micro-batches of its work (arXiv 2104.04473), interleaving
    divides that by its parts, ZB-H1 leaves about a third (arXiv 2401.10241)."""
    cluster = make_cluster("h200", nodes=4)
    fields = {"tp": 8, "pp": 4, "global_batch": 8}
    busy = {"gradients": "bf16", "overlap_gradients": True}
    plain = seconds(cluster, **fields, **busy)
    parts = {v: seconds(cluster, **fields, **busy, virtual_pipeline=v) for v in (2, 4)}
    # work of 8 micro-batches, idle 3 of them
    idle = plain * 3 / 11
    assert plain - parts[2] == pytest.approx(idle / 2, rel=0.3)
    assert plain - parts[4] == pytest.approx(idle * 3 / 4, rel=0.3)
    four = with_gpus(cluster, 4)  # one rank each: nothing that gradients of weights would hide
    fields |= {"tp": 1}
    plain = seconds(four, **fields)
    without = seconds(four, **fields, schedule="zero_bubble")
    assert plain - without == pytest.approx(plain * 3 / 11 * 2 / 3, rel=0.3)


def test_context_parallel_ranks_divide_the_rows_of_a_sequence() -> None:
    cluster = make_cluster("h200")
    one = seconds(cluster, tp=4, global_batch=8, seq=16384)
    two = seconds(cluster, tp=4, global_batch=8, seq=16384, context_parallel=2)
    # twice the micro-batches of half the rows on each rank, and keys and values go around
    assert one < two < 1.2 * one
    with pytest.raises(InputError, match="context_parallel 2 of 2047 tokens"):
        seconds(cluster, tp=4, seq=2047, context_parallel=2)


def test_tensor_parallel_groups_may_span_nodes() -> None:
    cluster = make_cluster("h200", nodes=2)
    assert seconds(cluster, tp=16, global_batch=2) > seconds(cluster, tp=8, global_batch=2)


def test_recomputation_and_unfused_attention_cost_time() -> None:
    cluster = make_cluster("a100")
    fused = seconds(cluster, global_batch=2)
    assert seconds(cluster, global_batch=2, recompute="selective") == fused
    plain = seconds(cluster, global_batch=2, attention="unfused")
    some = seconds(cluster, global_batch=2, attention="unfused", recompute="selective")
    full = seconds(cluster, global_batch=2, attention="unfused", recompute="full")
    assert fused < plain < some < full < 1.4 * plain


def test_sharded_parameters_are_gathered_in_every_pass() -> None:
    """FSDP: three collectives of all parameters for each micro-batch, slow links show them."""
    cluster = replace(make_cluster("h200", "ib-100", 4))
    once = seconds(cluster, tp=1, global_batch=64)
    shared = seconds(cluster, tp=1, global_batch=64, sharding="parameters")
    assert shared > 1.2 * once
    with pytest.raises(InputError, match="sharding parameters with pp 2"):
        seconds(cluster, tp=8, pp=2, sharding="parameters")


# --- Memory ---

# Model, GPUs, tp, pp, micro-batch, virtual stages: GiB of arXiv 2205.05198, figure 1 (as present
# work: sequence parallel, selective recomputation).
PUBLISHED = {
    "22b": ((48, 6144, 64), 8, 8, 1, 4, 1, 55.1),
    "175b": ((96, 12288, 96), 64, 8, 8, 1, 3, 57.9),
    "530b": ((105, 20480, 128), 280, 8, 35, 1, 3, 54.7),
    "1t": ((128, 25600, 160), 512, 8, 64, 1, 1, 59.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_is_as_published(name: str) -> None:
    (layers, hidden, heads), gpus, tp, pp, micro, chunks, gib = PUBLISHED[name]
    model = Model(name, layers, hidden, 4 * hidden, heads, heads, 51200, False, 2048, "2205.05198")
    work = training.Training(
        model,
        tp=tp,
        pp=pp,
        micro_batch=micro,
        global_batch=gpus if pp > 1 else micro,
        virtual_pipeline=chunks,
        recompute="selective",
        attention="unfused",
        sharding="none",
    )
    found = training_memory(work, with_gpus(make_cluster("a100"), gpus))
    assert found.total / 2**30 == pytest.approx(gib, rel=0.06)


def test_bytes_per_parameter_are_those_of_the_distributed_optimizer() -> None:
    """6 + 12 / d in fp32, 4 + 12 / d in bf16; 18 unsharded; all of it shared out by FSDP."""
    cluster = make_cluster("h200", nodes=2)

    def each(**fields: Any) -> float:
        work = training.Training(SMALL, tp=1, recompute="full", **fields)
        found = training_memory(work, cluster).parts
        states = found["weights"] + found["gradients"] + found["optimizer"]
        return states / SMALL.parameters

    assert each() == pytest.approx(6 + 12 / 16)
    assert each(gradients="bf16") == pytest.approx(4 + 12 / 16)
    assert each(sharding="none") == pytest.approx(18.0)
    gathered = 3 * 2.0 * SMALL.layer_parameters / SMALL.parameters
    assert each(sharding="parameters") == pytest.approx(18 / 16 + gathered)


def test_recomputation_and_context_parallelism_need_less_memory() -> None:
    cluster = make_cluster("h200", nodes=2)

    def kept(**fields: Any) -> float:
        work = training.Training(SMALL, tp=4, seq=8192, **fields)
        return training_memory(work, cluster).parts["activations"]

    assert kept(context_parallel=2) == pytest.approx(kept() / 2)
    assert kept(recompute="full") < kept() / 4
    scores = kept(attention="unfused") - kept(attention="unfused", recompute="selective")
    assert scores == pytest.approx(5 * 32 * 8192 * 8192 / 4 * 16)


def test_cache_holds_keys_and_values() -> None:
    # Llama 3 70B: 320 KiB per token in bf16
    assert kv_cache(80, 8 * 128, 1.0) == 320 * 1024


# --- Advice ---


def test_advice_compares_equal_batches_that_fit() -> None:
    cluster = with_gpus(make_cluster("h100"), 16)
    model = replace(SMALL, layers=32, hidden=8192, ffn=28672, heads=64, kv_heads=8, seq=4096)
    work = training.Training(model, tp=8, pp=2, global_batch=16)
    said: list[tuple[int, int]] = []
    found = advise(
        Scenario("train", work, cluster),
        progress=lambda _, done=0, total=0: said.append((done, total)),
    )
    assert all(0 <= done < total for done, total in said), "counted, with an end"
    assert {one.batch for one in found.candidates} == {16} and found.too_large
    assert all(
        memory_of(o.scenario.workload, cluster).fits(cluster.device) for o in found.candidates
    )
    best = min(found.candidates, key=lambda one: one.unfused)
    assert found.best_unfused is best
    assert found.saving == pytest.approx(1 - found.best.fused / best.unfused)
    assert found.best.fused == min(one.fused for one in found.candidates)


def test_advice_says_what_fills_a_memory_that_is_too_small() -> None:
    work = training.by_name("llama3-405b", tp=8, global_batch=8)
    cluster = make_cluster("h100")
    assert not memory_of(work, cluster).fits(cluster.device)
    assert usable(cluster.device) < cluster.device.memory
    with pytest.raises(InputError, match=r"needs least, .* optimizer"):
        advise(Scenario("train", work, cluster))


def test_files_of_different_set_ups_have_different_names() -> None:
    cluster = with_gpus(make_cluster("h100"), 32)
    names = {
        Scenario("train", training.by_name("llama2-70b", **fields), cluster).file_name
        for fields in ({}, {"tp": 4}, {"pp": 2}, {"recompute": "full"}, {"virtual_pipeline": 2})
    }
    assert len(names) == 5 and all(" " not in name for name in names)
