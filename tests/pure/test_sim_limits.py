"""What tileweave does not run is not predicted, and impossible inputs are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tileweave.errors import InputError
from tileweave.planning.costs import load_calibration
from tileweave.sim import dlrm, moe, serving, training
from tileweave.sim.cells import holds_cells, read_cells, read_tables
from tileweave.sim.collectives import Group
from tileweave.sim.document import parse_document
from tileweave.sim.machine import Cluster, make_cluster, presets
from tileweave.sim.operators import ExpertMatmul, Lookups, Operators, OpTime
from tileweave.sim.workload import Scenario, read_scenario, scenario_of, simulate_all


def of_ranks(device: str, ranks: int) -> Cluster:
    """A node whose links join ``ranks`` of a known device."""
    known = presets()["devices"][device]
    return make_cluster(replace(known, name="own device", gpus_per_node=ranks))


SIXTEEN = of_ranks("h200", 16)


# --- Groups that tileweave runs unfused ---


def operators(world: int, experts: int) -> dict[str, OpTime]:
    ops, group = Operators(of_ranks("h200", world)), Group(world)
    return {
        "all_gather": ops.all_gather_matmul(world, 4096, 4096, 8192),
        **{
            kind: ops.matmul_scatter(kind, world, 256, 8192, 4096)
            for kind in ("reduce_scatter", "all_reduce", "all_to_all")
        },
        "embedding": ops.embedding_all_to_all(group, Lookups(16384, 8.0, 256.0)),
        "dispatch": ops.dispatch_grouped(group, ExpertMatmul(1024, 4, experts, 4096, 4096)),
        "combine": ops.grouped_combine(group, ExpertMatmul(1024, 4, experts, 4096, 2048)),
    }


def test_operators_are_unfused_above_the_rank_limit() -> None:
    for name, found in operators(16, 32).items():
        assert found.fused == found.unfused, name
    for name, found in operators(8, 32).items():
        assert found.fused < found.unfused or name == "all_to_all", name


def test_unevenly_split_experts_are_unfused() -> None:
    found = operators(8, 4)
    assert all(found[name].fused == found[name].unfused for name in ("dispatch", "combine"))


@pytest.mark.parametrize("kind", ["train", "prefill", "decode", "moe", "dlrm"])
def test_sixteen_ranks_per_node_are_unfused_with_a_note(kind: str) -> None:
    made = {
        "train": lambda: Scenario("train", training.by_name("llama2-70b", tp=16), SIXTEEN),
        "prefill": lambda: Scenario("serve", serving.by_name("llama3-70b", tp=16), SIXTEEN),
        "decode": lambda: Scenario(
            "serve", serving.by_name("llama3-70b", tp=16, phase="decode", batch=16), SIXTEEN
        ),
        "moe": lambda: Scenario("moe", moe.by_name("qwen3-235b", ep=16), SIXTEEN),
        "dlrm": lambda: Scenario("dlrm", dlrm.by_name("dlrm-ours"), SIXTEEN),
    }
    scenario = made[kind]()
    # where rows scattered and gathered are faster than an all-reduce, and nothing is fused
    if kind == "prefill":
        scenario = replace(scenario, cluster=of_ranks("a100", 16))
    found = simulate_all(scenario)
    assert found.seconds("fused") == found.seconds("unfused") >= found.seconds("bound")
    assert any("16 ranks" in note and "unfused" in note for note in found.notes)
    if kind not in ("moe", "dlrm"):
        few = replace(scenario, workload=replace(scenario.workload, tp=8))
        assert not any("unfused" in note for note in simulate_all(few).notes)


def test_serving_is_limited_to_one_node() -> None:
    found = {
        nodes: simulate_all(
            Scenario("serve", serving.by_name("llama3-70b"), make_cluster("h200", nodes=nodes))
        )
        for nodes in (1, 2)
    }
    assert found[1].seconds("fused") == found[2].seconds("fused")
    assert not any("nodes" in note for note in found[1].notes)
    assert [note for note in found[2].notes if "nodes" in note] == [
        "one replica, inside one node: the other nodes change nothing"
    ]


# --- Impossible inputs ---


def test_more_gpus_than_links_join_are_refused() -> None:
    with pytest.raises(InputError, match="16 GPUs per node of h200; allowed: at most the 8"):
        make_cluster("h200", gpus_per_node=16)


def test_rates_in_bits_are_refused() -> None:
    text = (
        "workload: train\nmodel: llama2-70b\ncluster:\n  network:\n    nic_rate: 400e9\n"
        "    fraction: 0.9\n    latency: 5e-6\n    topology: fat_tree\n"
    )
    with pytest.raises(InputError, match=r"line 5, field cluster\.network\.nic_rate.*50e9"):
        scenario_of(parse_document(text, "file.yaml"))


# A file: (its text, what the message must name)
OWN = {
    "bridge without a rate": (
        "workload: dlrm\nmodel: dlrm-ours\ncluster:\n  device: "
        "{flops: 1e15, memory_rate: 1e12, num_sms: 100, memory: 1e10, "
        "link_rate: 1e11, inside: bridge, gpus_per_node: 2, source: x}\n",
        ("line 4", "field cluster.device", "bridge_rate"),
    ),
    "rate without a bridge": (
        "workload: dlrm\nmodel: dlrm-ours\ncluster:\n  device: "
        "{flops: 1e15, memory_rate: 1e12, num_sms: 100, memory: 1e10, "
        "link_rate: 1e11, inside: switch, bridge_rate: 1e11, gpus_per_node: 2, source: x}\n",
        ("line 4", "field cluster.device", "bridge_rate"),
    ),
    "heads": (
        "workload: serve\nmodel: "
        "{layers: 1, hidden: 100, ffn: 64, heads: 64, kv_heads: 8, vocab: 32000}\ntp: 1\n",
        ("line 2", "field model", "hidden 100", "64 heads"),
    ),
    "kv heads": (
        "workload: serve\nmodel: "
        "{layers: 10, hidden: 4096, ffn: 1024, heads: 64, kv_heads: 100, vocab: 3}\ntp: 8\n",
        ("line 2", "kv_heads 100", "64 heads"),
    ),
    "experts' heads": (
        "workload: moe\nmodel: "
        "{layers: 1, hidden: 2, ffn: 1, experts: 1, top_k: 1, heads: 3, kv_heads: 1}\n",
        ("line 2", "hidden 2", "head_dim"),
    ),
    "experts' kv heads": (
        "workload: moe\nmodel: "
        "{layers: 1, hidden: 64, ffn: 64, experts: 4, top_k: 2, heads: 3, kv_heads: 7, "
        "head_dim: 16}\n",
        ("line 2", "kv_heads 7", "3 heads"),
    ),
    "top_k": (
        "workload: moe\nmodel: "
        "{layers: 1, hidden: 64, ffn: 64, experts: 4, top_k: 64, heads: 4, kv_heads: 4}\n",
        ("line 2", "top_k 64", "4 experts"),
    ),
    "bottom": (
        "workload: dlrm\nmodel: "
        "{tables: 3, rows: 9, dim: 8, pooling: 2, batch_per_gpu: 1, dense: 1, bottom: [], "
        "top: [1]}\n",
        ("line 2", "bottom"),
    ),
    "a control character": (
        "workload: train\nmodel: llama2-70b\x01\n",
        ("line 2", "x0001", "YAML"),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_impossible_values_are_refused_with_their_line(name: str) -> None:
    text, wanted = OWN[name]
    with pytest.raises(InputError) as caught:
        scenario_of(parse_document(text, "file.yaml"))
    message = str(caught.value)
    assert message.startswith("file.yaml, line ") and "\n" not in message
    assert all(part in message for part in (*wanted, "asked: ", "allowed: ", "remedy: ")), message


@pytest.mark.parametrize("workload", ["train", "serve"])
@pytest.mark.parametrize("vocab", [3, 50257])
def test_vocabulary_is_padded_to_a_multiple_of_ranks(workload: str, vocab: int) -> None:
    model = f"{{layers: 2, hidden: 1024, ffn: 1024, heads: 8, kv_heads: 8, vocab: {vocab}, seq: 3}}"
    found = simulate_all(
        scenario_of(parse_document(f"workload: {workload}\nmodel: {model}\ntp: 8\n", "x"))
    )
    assert 0 < found.seconds("bound") <= found.seconds("fused") <= found.seconds("unfused")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{\xff}"])
def test_binary_files_are_refused_by_name(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(text)
    for read in (read_scenario, lambda path: read_cells([path]), holds_cells, read_tables, load_of):
        with pytest.raises(InputError, match=r"odd\.json.*; allowed: .*; remedy: ") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def load_of(path: Path) -> object:
    return load_calibration(str(path))
