"""Workload files: errors name the line, the field and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tileweave.commands.simulate import app
from tileweave.commands.simulate_show import sweep
from tileweave.errors import InputError
from tileweave.planning.costs import Costs
from tileweave.sim import astra, replay
from tileweave.sim.document import parse_document
from tileweave.sim.machine import make_cluster, presets
from tileweave.sim.workload import read_scenario, scenario_of, simulate_all

GOOD = """\
workload: train
model: llama2-70b
tp: 4
pp: 2
global_batch: 64
cluster:
  device: h100
  nodes: 4
  network: {nic_rate: 2e10, fraction: 0.8, latency: 3e-6, topology: rail}
"""

OWN_MODEL = """\
workload: serve
tp: 2
batch: 4
seq: 512
phase: decode
model: {layers: 2, hidden: 1024, ffn: 4096, heads: 16, kv_heads: 16, vocab: 32000, gated: false}
"""

# (text, what the message must say)
BAD = {
    "field": (
        "workload: train\nmodel: llama2-70b\ntpp: 4\n",
        ("line 3", "field tpp", "'tp'", "micro_batch"),
    ),
    "value": (
        "workload: train\nmodel: llama2-70b\n\ntp: 400\n",
        ("line 4", "field tp", "400", "from 1 to 64"),
    ),
    "type": (
        "workload: train\nmodel: llama2-70b\ntp: four\n",
        ("line 3", "field tp", "'four'", "whole number"),
    ),
    "boolean": ("workload: train\nmodel: llama2-70b\ntp: true\n", ("line 3", "field tp", "True")),
    "choice": (
        "workload: trian\nmodel: llama2-70b\n",
        ("line 1", "field workload", "'trian'", "'train'", "dlrm"),
    ),
    "model": (
        "workload: train\nmodel: llama2\n",
        ("line 2", "field model", "llama2-70b", "gpt3-175b"),
    ),
    "missing": ("workload: train\ntp: 2\n", ("line 1", "no field 'model'", "add `model: ...`")),
    "twice": (
        "workload: train\nmodel: llama2-70b\ntp: 2\ntp: 4\n",
        ("line 4", "field tp", "twice"),
    ),
    "inner": (
        "workload: train\nmodel: llama2-70b\ncluster:\n  device: h100\n  nodes: 0\n",
        ("line 5", "field cluster.nodes"),
    ),
    "device": (
        "workload: train\nmodel: llama2-70b\ncluster: {device: h1000}\n",
        ("line 3", "cluster.device", "h100", "mi300x"),
    ),
    "list": ("workload: train\nmodel: [a, b]\n", ("line 2", "field model", "mapping")),
    "scalar": ("workload: train\nmodel: llama2-70b\ntp: [1]\n", ("line 3", "field tp", "a list")),
    "syntax": ("workload: train\nmodel: 'llama2-70b\n", ("line 3", "YAML")),
    "indent": ("workload: train\n  model: x\n", ("line 2", "YAML")),
    "empty": ("", ("line 1", "empty")),
    "no mapping": ("- a\n- b\n", ("line 1", "workload")),
    "no workload": (
        "model: llama2-70b\n",
        ("line 1", "no field 'workload'", "train, serve, moe, dlrm"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_fields_are_named(name: str) -> None:
    text, wanted = BAD[name]
    with pytest.raises(InputError) as caught:
        scenario_of(parse_document(text, "file.yaml"))
    message = str(caught.value)
    assert "file.yaml" in message and "allowed:" in message and "remedy:" in message
    assert all(part in message for part in wanted), message


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD, "utf-8")
    scenario = read_scenario(path)
    assert (scenario.workload.tp, scenario.workload.pp, scenario.workload.model.hidden) == (
        4,
        2,
        8192,
    )  # type: ignore[union-attr]
    assert scenario.cluster.world_size == 32 and scenario.cluster.network.nic_rate == 2e10
    assert scenario.cluster.network.latency == pytest.approx(3e-6)
    with pytest.raises(InputError, match="a YAML file that exists"):
        read_scenario(tmp_path / "none.yaml")


def test_custom_model_runs() -> None:
    result = simulate_all(scenario_of(parse_document(OWN_MODEL, "own.yaml")))
    assert 0 < result.seconds("bound") <= result.seconds("fused") <= result.seconds("unfused")


def test_every_example_runs() -> None:
    files = sorted((Path(__file__).parents[2] / "examples" / "workloads").glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        result = simulate_all(read_scenario(path))
        assert result.seconds("fused") <= result.seconds("unfused") * (1 + 1e-9), path.name


def test_degrees_that_do_not_fit_are_refused() -> None:
    text = "workload: train\nmodel: llama2-70b\ntp: 12\ncluster: {nodes: 4}\n"
    with pytest.raises(InputError, match="tp 12; allowed: a divisor or a multiple of the 8 GPUs"):
        simulate_all(scenario_of(parse_document(text, "f")))
    text = "workload: train\nmodel: llama2-70b\ntp: 8\npp: 3\ncluster: {nodes: 4}\n"
    with pytest.raises(InputError, match="a divisor of the GPUs"):
        simulate_all(scenario_of(parse_document(text, "f")))


def test_every_preset_names_its_source() -> None:
    assert all(len(device.source) > 20 for device in presets()["devices"].values())
    assert {"a100-pcie", "a100", "h800", "h100", "h200", "mi210", "mi300x", "b200"} <= set(
        presets()["devices"]
    )
    rates = {round(network.nic_rate * 8 / 1e9) for network in presets()["networks"].values()}
    assert {100, 200, 400, 800} <= rates


@pytest.mark.parametrize(
    ("device", "network"), [("h200", "ib-400"), ("h200", "torus-200"), ("mi300x", "ib-400")]
)
def test_astra_networks_are_read_back(tmp_path: Path, device: str, network: str) -> None:
    cluster = make_cluster(device, network, 16)
    astra.export(cluster, Costs(cluster.device), tmp_path)
    again = astra.read_network(tmp_path / "network.yml", cluster.device, Costs(cluster.device))
    assert again.device.link_rate == pytest.approx(cluster.device.link_rate, rel=1e-3)
    assert again.device.inside == cluster.device.inside
    assert (again.nodes, again.gpus_per_node, again.network.topology) == (
        16,
        8,
        cluster.network.topology,
    )
    rate = cluster.network.nic_rate * cluster.network.fraction
    assert again.network.nic_rate * again.network.fraction == pytest.approx(rate, rel=1e-3)
    assert again.network.latency == pytest.approx(cluster.network.latency, rel=1e-3)
    (tmp_path / "bad.yml").write_text(
        "topology: [ Rong ]\nnpus_count: [ 4 ]\nbandwidth: [ 1 ]\nlatency: [ 1 ]\n", "utf-8"
    )
    with pytest.raises(InputError, match=r"line 1, field topology.0.*Ring, Switch, FullyConnected"):
        astra.read_network(tmp_path / "bad.yml", cluster.device, Costs(cluster.device))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "--batch", "0"], "batch: asked: 0; allowed: a whole number from 1"),
        (["serve", "--tp", "3"], "tp 3 of llama3-70b; allowed: a divisor of its 64 heads"),
        (["moe", "--tokens", "0"], "tokens: asked: 0"),
        (["moe", "--seq", "0"], "seq: asked: 0"),
        (["dlrm", "--imbalance", "nan"], "imbalance: asked: nan; allowed: a number from 0 to 10"),
    ],
)
def test_options_are_parsed_like_a_file(command: list[str], said: str) -> None:
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, InputError) and said in str(done.exception)


@pytest.mark.parametrize("command", ["train", "serve", "moe", "dlrm", "replay"])
def test_every_option_has_a_help_text(command: str) -> None:
    made = get_command(app).commands[command]  # type: ignore[attr-defined]
    assert not [option.name for option in made.params if not option.help]
    assert ("seq" in {option.name for option in made.params}) == (
        command in ("train", "serve", "moe")
    )
    if command == "train":
        said = CliRunner().invoke(app, ["train", "--recompute", "some"])
        assert said.exit_code == 2 and "full" in said.output


def test_sweep_keeps_the_batch_per_node() -> None:
    text = "workload: train\nmodel: llama2-70b\nglobal_batch: {}\ncluster: {{nodes: 12}}\n"
    found = sweep(scenario_of(parse_document(text.format(24), "x")))
    assert [nodes for nodes, _ in found] == [1, 3, 6, 12, 24]
    assert all(result.samples == 2 * nodes * 4096 for nodes, result in found)
    found = sweep(scenario_of(parse_document(text.format(36 + 12 // 4), "x")))  # 3.25 per node
    assert not found


def test_sweep_of_few_nodes_begins_with_one() -> None:
    found = sweep(
        scenario_of(parse_document("workload: dlrm\nmodel: dlrm-ours\ncluster: {nodes: 3}\n", "x"))
    )
    assert [nodes for nodes, _ in found] == [1, 3, 6]


def test_replay_reports_unreadable_and_doubtful_nodes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "nofile.et")])
    assert isinstance(done.exception, InputError) and "files that exist" in str(done.exception)
    assert isinstance(CliRunner().invoke(app, ["replay", str(tmp_path)]).exception, InputError)
    files = [tmp_path / f"step.{rank}.et" for rank in (0, 1, 1, 3)]
    missing, doubled = replay.doubts(files)
    assert "no file of rank 2, of 4 ranks" in missing and "several files of rank 1" in doubled
    assert not replay.doubts([tmp_path / f"step.{rank}.et" for rank in range(11)])
    (tmp_path / "comm_group.json").write_text(json.dumps({"dp": list(range(6))}), "utf-8")
    assert "no file of ranks 2, 4, 5, of 6 ranks" in replay.doubts(files)[0]
    (tmp_path / "comm_group.json").write_text("[1]", "utf-8")
    with pytest.raises(InputError, match="a mapping of groups"):
        replay.doubts(files)
    assert "not known" in replay.doubts([tmp_path / "a.et", tmp_path / "b.et"])[0]


@pytest.mark.parametrize("text", ["# Tileweave", "{}", "[]", '{"coefficients": 1}'])
def test_invalid_calibration_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text, "utf-8")
    done = CliRunner().invoke(app, ["trust", "--calibration", str(path)])
    assert isinstance(done.exception, InputError) and "asked: calibration" in str(done.exception)


@pytest.mark.parametrize(
    "command", [["dlrm", "--out"], ["dlrm", "--export"], ["trust", "--out"], ["calibrate"]]
)
def test_output_paths_are_checked_before_the_work(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, [*command, str(tmp_path / "file" / "x")])
    assert isinstance(done.exception, InputError) and "to write into" in str(done.exception)
