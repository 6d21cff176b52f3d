"""Replayed traces and network files: groups and messages by placement of ranks, dependences that
are kept or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tileweave.commands.simulate import app
from tileweave.errors import InputError
from tileweave.planning.costs import Costs, load_calibration
from tileweave.sim import astra, chakra, training
from tileweave.sim.chakra import COLL, COMP, RECV, SEND, Node
from tileweave.sim.collectives import Group, bulk, collective_time, group_on
from tileweave.sim.machine import Cluster, Network, make_cluster, with_gpus
from tileweave.sim.replay import cluster_for, replay
from tileweave.sim.step import Timeline
from tileweave.sim.workload import Scenario, simulate

C = load_calibration().coefficients
MEM_LOAD = 2


def written(folder: Path, *ranks: list[Node]) -> list[Path]:
    paths = [folder / f"t.{rank}.et" for rank in range(len(ranks))]
    for path, nodes in zip(paths, ranks, strict=True):
        with path.open("wb") as target:
            chakra.write_trace(target, nodes)
    return paths


def comp(number: int, after: list[int], micros: int = 1000) -> Node:
    return Node(number, f"comp {number}", COMP, after, micros)


def coll(
    number: int, after: list[int], kind: str = "all_to_all", size: int = 1 << 30, group: str = ""
) -> Node:
    attributes = {"comm_type": chakra.COLLECTIVES[kind], "comm_size": size} | (
        {"pg_name": group} if group else {}
    )
    return Node(number, f"coll {number}", COLL, after, 0, 0, attributes)


def sent(
    number: int,
    kind: int,
    source: int,
    target: int,
    after: list[int],
    tag: int = 0,
    size: int = 1 << 28,
) -> Node:
    ends = {"comm_src": source, "comm_dst": target, "comm_tag": tag, "comm_size": size}
    return Node(number, f"message {number}", kind, after, 0, 0, ends)


def replayed(folder: Path, *ranks: list[Node], network: str = "ib-400") -> Timeline:
    paths = written(folder, *ranks)
    return replay(paths, cluster_for(paths, "h200", network, None), C)


# --- Groups ---


def test_groups_are_priced_by_placement_of_their_ranks(tmp_path: Path) -> None:
    two = make_cluster("h200", nodes=2)
    assert group_on(two, [0, 8]) == Group(1, 2) and group_on(two, range(4)) == Group(4)
    assert group_on(two, range(16)) == Group(8, 2)
    with pytest.raises(InputError, match=r"3 ranks, of which nodes have \[1, 2\].*as many on each"):
        group_on(two, [6, 7, 8])
    groups = {"1": [0, 8], "2": [0, 1]}
    (tmp_path / "comm_group.json").write_text(json.dumps(groups), "utf-8")
    times = {name: replayed(tmp_path, [coll(0, [], group=name)]).seconds for name in groups}
    assert times["1"] == pytest.approx(
        collective_time("all_to_all", float(1 << 30), Group(1, 2), two, C)
    )
    assert times["1"] > 3 * times["2"]
    with pytest.raises(
        InputError, match=r"group '3' of node coll 0; allowed: groups of comm_group.json"
    ):
        replayed(tmp_path, [coll(0, [], group="3")])


def test_step_over_two_nodes_includes_gradient_time(tmp_path: Path) -> None:
    work = training.by_name("llama2-70b", tp=8, global_batch=2)
    scenario = Scenario("train", work, make_cluster("h200", "ib-100", 2))
    found = simulate(scenario, "fused")
    paths = chakra.export(found, tmp_path, detail="tasks")[:-1]
    assert replay(paths, scenario.cluster, C).seconds == pytest.approx(found.seconds, rel=0.1)
    faster = replay(paths, make_cluster("h200", "ib-800", 2), C)
    assert faster.seconds < 0.5 * found.seconds


# --- Messages ---


def test_received_messages_were_sent(tmp_path: Path) -> None:
    sender, receiver = (
        [comp(0, []), sent(1, SEND, 0, 1, [0])],
        [sent(0, RECV, 0, 1, []), comp(1, [0])],
    )
    found = replayed(tmp_path, sender, receiver)
    wire = bulk(C).latency + (1 << 28) / (450e9 * bulk(C).fraction)
    assert found.seconds == pytest.approx(2e-3 + wire, rel=1e-6)
    for lost in ([sender, [comp(1, [])]], [[comp(0, [])], receiver]):
        with pytest.raises(
            InputError, match=r"messages from rank 0 to 1.*as many sent as received"
        ):
            replayed(tmp_path, *lost)


def test_messages_between_nodes_take_the_network(tmp_path: Path) -> None:
    ranks: list[list[Node]] = [[] for _ in range(9)]
    ranks[0], ranks[8] = [sent(0, SEND, 0, 8, [])], [sent(0, RECV, 0, 8, [])]
    assert replayed(tmp_path, *ranks).seconds == pytest.approx(5e-6 + (1 << 28) / 47e9)
    with pytest.raises(InputError, match=r"from rank 0 to 77.*two of 16"):
        replayed(tmp_path, [sent(0, SEND, 0, 77, [])], *ranks[1:])
    with pytest.raises(
        InputError,
        match="from rank 0 to 8, in the trace of rank 1; allowed: from or to its own rank",
    ):
        replayed(tmp_path, [], *ranks[:-1])


def test_messages_in_both_directions_do_not_deadlock(tmp_path: Path) -> None:
    """Receives are listed first; the sends that they answer come later in the file."""
    one = [sent(0, RECV, 1, 0, []), comp(1, [0]), comp(2, []), sent(3, SEND, 0, 1, [2])]
    other = [sent(0, RECV, 0, 1, []), comp(1, [0]), sent(2, SEND, 1, 0, [1])]
    found = replayed(tmp_path, one, other)
    wire = bulk(C).latency + (1 << 28) / (450e9 * bulk(C).fraction)
    assert found.seconds == pytest.approx(3e-3 + 2 * wire, rel=1e-6)


def test_rank_that_waits_for_a_message_can_send(tmp_path: Path) -> None:
    first = [sent(0, RECV, 1, 0, []), comp(1, []), sent(2, SEND, 0, 2, [1])]
    late, last = (
        [comp(0, [], 10_000), sent(1, SEND, 1, 0, [0])],
        [sent(0, RECV, 0, 2, []), comp(1, [0], 12_000)],
    )
    found = replayed(tmp_path, first, late, last)
    assert found.seconds == pytest.approx(
        13e-3 + bulk(C).latency + (1 << 28) / (450e9 * bulk(C).fraction), rel=1e-6
    )


def test_replayed_pipeline_has_its_bubble(tmp_path: Path) -> None:
    work = training.by_name("llama2-70b", tp=1, pp=8, global_batch=1)
    scenario = Scenario("train", work, make_cluster("h200"))
    found = simulate(scenario, "fused")
    paths = chakra.export(found, tmp_path, detail="tasks")[:-1]
    assert replay(paths, scenario.cluster, C).seconds == pytest.approx(found.seconds, rel=0.01)


# --- Dependences ---


def test_dependences_through_unmodelled_nodes_are_kept(tmp_path: Path) -> None:
    plain = replayed(tmp_path, *[[comp(0, []), coll(1, [0])]] * 2).seconds
    assert plain > 2e-3
    through = replayed(tmp_path, *[[comp(0, []), Node(1, "load", MEM_LOAD, [0]), coll(2, [1])]] * 2)
    assert (
        through.seconds == pytest.approx(plain)
        and "2 nodes that are no computation" in through.notes[0]
    )
    assert replayed(tmp_path, *[[coll(1, [0]), comp(0, [])]] * 2).seconds == pytest.approx(plain)
    assert replayed(
        tmp_path, *[[comp(0, []), comp(1, []), coll(2, [0])]] * 2
    ).seconds == pytest.approx(plain), "as listed"
    for nodes, said in (
        ([coll(1, [77])], "node coll 1 waits for 77, which is not there"),
        ([comp(0, [1]), comp(1, [0])], "nodes that wait for each other"),
        ([comp(0, []), comp(0, [])], "several nodes with the same number"),
    ):
        with pytest.raises(InputError, match=said):
            replayed(tmp_path, nodes)


# --- Export to ASTRA-sim ---


def test_exported_groups_are_numbered_and_gathers_sized_per_rank(tmp_path: Path) -> None:
    """std::stoi parses names of groups, and CommunicatorGroup needs numbers above 0."""
    work = training.by_name("llama2-70b", tp=2, global_batch=2, seq=512)
    found = simulate(
        Scenario(
            "train",
            replace(work, model=replace(work.model, layers=2)),
            with_gpus(make_cluster(), 4),
        ),
        "fused",
    )
    paths = chakra.export(found, tmp_path)
    groups = json.loads((tmp_path / "comm_group.json").read_text("utf-8"))
    assert sorted(map(int, groups)) == list(range(1, len(groups) + 1))
    assert sorted(groups.values()) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    nodes = chakra.read_trace(paths[0].read_bytes())[1]
    gathers = [
        node
        for node in nodes
        if node.attributes.get("comm_type") == chakra.COLLECTIVES["all_gather"]
    ]
    sizes = {
        # what a fused operator gathers is exported in four pieces
        int(part.nbytes / part.ranks / (4 if part.axis == "tp" else 1))
        for task in found.tasks
        for part in task.parts
        if part.collective == "all_gather"
    }
    assert {node.attributes["comm_size"] for node in gathers} == sizes
    whole = replayed(tmp_path, [coll(0, [], "all_gather", 1 << 26, "1")]).seconds
    assert whole == pytest.approx(
        collective_time("all_gather", float(1 << 27), Group(2), make_cluster("h200"), C)
    )


def test_a_served_replica_has_as_many_npus_as_traces(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "serve",
            "llama3-70b",
            "--tp",
            "4",
            "--seq",
            "128",
            "--no-sensitivity",
            "--export",
            str(tmp_path),
        ],
    )
    assert done.exit_code == 0 and len(list(tmp_path.glob("*.et"))) == 4
    assert "npus_count: [ 4 ]" in (tmp_path / "network.yml").read_text("utf-8")


@pytest.mark.parametrize(
    ("topology", "leaf", "thin"), [("fat_tree", 16, 1), ("fat_tree", 2, 4), ("rail", 16, 1)]
)
def test_oversubscription_applies_to_uplinks_only(topology: str, leaf: int, thin: int) -> None:
    over = 4.0 if topology == "fat_tree" else 1.0
    cluster = make_cluster(
        "h200", Network("n", 50e9, 0.9, 5e-6, topology, leaf=leaf, oversubscription=over), 4
    )  # type: ignore[arg-type]
    rates = astra.network_of(cluster, Costs(cluster.device))["bandwidth"]
    assert rates[1] == pytest.approx(45e9 / thin / 2**30, rel=1e-3)


# --- Import from ASTRA-sim ---


def read(
    folder: Path, topology: str, counts: str, rates: str, latencies: str, device: str = "h200"
) -> Cluster:
    text = (
        f"topology: [ {topology} ]\nnpus_count: [ {counts} ]\nbandwidth: [ {rates} ]\nlatency: "
        f"[ {latencies} ]\n"
    )
    (folder / "n.yml").write_text(text, "utf-8")
    made = make_cluster(device)
    return astra.read_network(folder / "n.yml", made.device, Costs(made.device))


def test_network_rates_are_read_from_the_file(tmp_path: Path) -> None:
    """A large all-to-all within the node runs at the rate of the file. A mesh has a link of that
    rate to each peer."""
    for kind, links in (("Switch", 1), ("FullyConnected", 3)):
        found = read(tmp_path, kind, "4", "50", "500")
        assert (found.gpus_per_node, found.nodes) == (4, 1)
        seconds = collective_time("all_to_all", 4 * 2.0**30, Group(4), found, C)
        assert seconds == pytest.approx(3 / 50 / links, rel=0.1)
    rings = read(tmp_path, "Ring, Ring", "4, 8", "50, 50", "500, 500")
    assert (rings.gpus_per_node, rings.dims, rings.network.latency) == (
        1,
        (4, 8),
        pytest.approx(5e-7),
    )


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (("Switch", "2, 4", "100", "500"), r"lists of \[1, 2\] items"),
        (
            ("Switch, Ring, Switch", "2, 4, 2", "100, 50, 10", "500, 500, 500"),
            "nothing else is modelled",
        ),
        (
            ("Switch, Switch, Switch", "2, 4, 2", "100, 50, 10", "500, 500, 500"),
            "nothing else is modelled",
        ),
        (("Switch, FullyConnected", "2, 4", "100, 50", "500, 500"), "nothing else is modelled"),
        (("Ring, Switch", "2, 4", "100, 50", "500, 500"), "nothing else is modelled"),
        (
            ("Switch, Ring, Ring", "2, 4, 2", "100, 50, 10", "500, 500, 500"),
            "one of each for all rings",
        ),
        (
            ("Switch, Ring, Ring", "2, 4, 2", "100, 50, 50", "500, 500, 900"),
            "one of each for all rings",
        ),
    ],
)
def test_unmodelled_networks_are_refused(
    tmp_path: Path, network: tuple[str, str, str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read(tmp_path, *network)


def test_a_network_has_an_npu_for_each_trace(tmp_path: Path) -> None:
    paths = written(tmp_path, [coll(0, [])], [coll(0, [])])
    command = ["replay", *map(str, paths), "--network-file", str(tmp_path / "n.yml")]
    read(tmp_path, "Switch", "4", "50", "500")
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, InputError) and "traces of 2 ranks on the 4 NPUs" in str(
        done.exception
    )
    read(tmp_path, "Switch", "2", "50", "500")
    assert (
        "the latency inside a node is the calibration's" in CliRunner().invoke(app, command).output
    )
    done = CliRunner().invoke(app, [*command, "--gpus-per-node", "2"])
    assert isinstance(done.exception, InputError) and "one of both" in str(done.exception)


def test_replay_reports_what_was_not_measured(tmp_path: Path) -> None:
    paths = [str(path) for path in written(tmp_path, [coll(0, [])], [coll(0, [])])]
    assert "transferred" not in CliRunner().invoke(app, ["replay", *paths]).output
    told = (
        CliRunner()
        .invoke(app, ["replay", *paths, "--device", "b200", "--gpus-per-node", "1"])
        .output
    )
    assert (
        "b200: fractions of peak of an H200 are assumed" in told and "between nodes: rates" in told
    )
