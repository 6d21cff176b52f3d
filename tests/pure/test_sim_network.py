"""Links and collectives of the simulator: bandwidth allocation, symmetry against an explicit
simulation, closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tileweave.errors import InputError
from tileweave.planning.costs import load_calibration
from tileweave.sim.collectives import Group, Protocol, collective_time, group_of, phases, run_sliced
from tileweave.sim.machine import Cluster, Network, make_cluster, presets, with_gpus
from tileweave.sim.network import Flow, Links, message, share, torus_hops, view
from tileweave.sim.step import between

PLAIN = Protocol(0.0, 1.0, 0.0)
C = load_calibration().coefficients


def network(topology: str, **fields: object) -> Network:
    return Network(topology, 50e9, 1.0, 0.0, topology, **fields)  # type: ignore[arg-type]


def timed(
    kind: str,
    nbytes: float,
    group: Group,
    cluster: Cluster,
    algorithm: str = "auto",
    slices: int = 1,
) -> float:
    env, seen = simpy.Environment(), view(cluster, 1.0)
    links = Links(env, seen.capacities)
    env.run(
        env.process(
            run_sliced(
                env,
                links,
                lambda: phases(kind, nbytes / slices, group, seen, PLAIN, algorithm),
                slices,
            )
        )
    )
    return float(env.now)


def explicit(capacities: dict[str, float], flows: list[tuple[float, list[str]]]) -> float:
    """Simulate every flow by itself over named links."""
    env = simpy.Environment()
    env.run(
        Links(env, capacities).send(
            [Flow(nbytes, dict.fromkeys(path, 1.0)) for nbytes, path in flows]
        )
    )
    return float(env.now)


def test_bandwidth_is_max_min_fair() -> None:
    flows = [Flow(1.0, {"a": 1.0}), Flow(1.0, {"a": 1.0, "b": 1.0}), Flow(1.0, {"b": 1.0})]
    share(flows, {"a": 10.0, "b": 4.0})
    assert [flow.rate for flow in flows] == [8.0, 2.0, 2.0]


@given(
    st.lists(
        st.tuples(st.floats(1, 100), st.sets(st.sampled_from("abcd"), min_size=1)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60)
def test_no_link_is_overfull_and_every_flow_has_a_full_link(
    drawn: list[tuple[float, set[str]]],
) -> None:
    capacities = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 7.0}
    flows = [Flow(nbytes, dict.fromkeys(path, 1.0)) for nbytes, path in drawn]
    share(flows, capacities)
    used = {link: sum(f.rate for f in flows if link in f.loads) for link in capacities}
    assert all(used[link] <= capacities[link] * (1 + 1e-9) for link in capacities)
    for flow in flows:  # max-min: it can grow only by taking from a flow that has no more
        full = [link for link in flow.loads if used[link] >= capacities[link] * (1 - 1e-9)]
        assert any(
            flow.rate >= max(f.rate for f in flows if link in f.loads) * (1 - 1e-9) for link in full
        )


def test_finished_flow_frees_its_bandwidth() -> None:
    env = simpy.Environment()
    links = Links(env, {"a": 2.0})
    short, long = links.send([Flow(1.0, {"a": 1.0})]), links.send([Flow(3.0, {"a": 1.0})])
    env.run(short)
    assert env.now == pytest.approx(1.0)
    env.run(long)
    assert env.now == pytest.approx(2.0)


def test_late_flows_end_too() -> None:
    """A flow ends even if the rest of its time is below the resolution of the clock."""
    env = simpy.Environment(initial_time=1e6)
    links = Links(env, {"a": 3e9, "b": 7e9})
    flows = [
        Flow(1.0 + i / 7, {"a": 1.0} if i % 2 else {"a": 1.0, "b": 3.0}, i * 1e-10)
        for i in range(20)
    ]
    env.run(links.send(flows))
    assert env.now == pytest.approx(1e6) and all(flow.done.triggered for flow in flows)


def test_one_rank_represents_all_of_a_switch() -> None:
    nodes = 6
    cluster = make_cluster("h200", network("fat_tree"), nodes, 1)
    capacities = {f"{way}{n}": 50e9 for way in ("out", "in") for n in range(nodes)}
    flows = [(1e9, [f"out{a}", f"in{b}"]) for a, b in product(range(nodes), repeat=2) if a != b]
    assert timed("all_to_all", 1e9 * nodes, Group(1, nodes), cluster) == pytest.approx(
        explicit(capacities, flows)
    )


@pytest.mark.parametrize("dims", [(4, 3), (5,), (2, 4), (3, 3, 2)])
def test_one_rank_represents_all_of_a_torus(dims: tuple[int, ...]) -> None:
    """Every flow of every rank, routed hop by hop, takes as long as in the folded model."""
    nodes = math.prod(dims)
    cluster = make_cluster("h200", network("torus", dims=dims), nodes, 1)
    places = list(product(*map(range, dims)))
    capacities, flows = {}, []
    for place, axis, way in product(places, range(len(dims)), "+-"):
        capacities[f"{place}{axis}{way}"] = 50e9
    for a, b in product(places, repeat=2):
        at, path = list(a), []
        for axis, side in enumerate(dims):
            way = 1 if 2 * ((b[axis] - a[axis]) % side) <= side else -1
            while at[axis] != b[axis]:
                path.append(f"{tuple(at)}{axis}{'+' if way > 0 else '-'}")
                at[axis] = (at[axis] + way) % side
        if path:
            flows.append((1e9, path))
    assert timed("all_to_all", 1e9 * nodes, Group(1, nodes), cluster) == pytest.approx(
        explicit(capacities, flows)
    )


def test_an_oversubscribed_tree_is_as_slow_as_its_uplinks() -> None:
    cluster = make_cluster("h200", network("fat_tree", leaf=2, oversubscription=4.0), 8, 1)
    leaves = {f"{way}{leaf}": 2 * 50e9 / 4 for way in ("up", "down") for leaf in range(4)}
    capacities = leaves | {f"{way}{n}": 50e9 for way in ("out", "in") for n in range(8)}
    flows = []
    for a, b in product(range(8), repeat=2):
        if a != b:
            far = [f"up{a // 2}", f"down{b // 2}"] if a // 2 != b // 2 else []
            flows.append((1e9, [f"out{a}", f"in{b}", *far]))
    assert timed("all_to_all", 8e9, Group(1, 8), cluster) == pytest.approx(
        explicit(capacities, flows)
    )


@pytest.mark.parametrize(("leaf", "slower"), [(2, 2.0), (1, 4.0), (4, 1.0)])
def test_ring_crosses_uplinks_once_per_leaf(leaf: int, slower: float) -> None:
    cluster = make_cluster("h200", network("fat_tree", leaf=leaf, oversubscription=4.0), 8, 1)
    capacities = {f"{way}{n}": leaf * 50e9 / 4 for way in ("up", "down") for n in range(8 // leaf)}
    capacities |= {f"{way}{n}": 50e9 for way in ("out", "in") for n in range(8)}
    flows = []
    for a in range(8):
        b = (a + 1) % 8
        far = [f"up{a // leaf}", f"down{b // leaf}"] if a // leaf != b // leaf else []
        flows.append((7e9, [f"out{a}", f"in{b}", *far]))
    found = timed("all_gather", 8e9, Group(1, 8), cluster, "ring")
    assert found == pytest.approx(explicit(capacities, flows)) and found == pytest.approx(
        slower * 7e9 / 50e9
    )
    # neighbours: in one leaf, where two have room
    two = timed("all_gather", 8e9, Group(1, 2), cluster, "ring")
    assert two == pytest.approx((1.0 if leaf > 1 else 4.0) * 4e9 / 50e9)


def test_a_message_takes_the_links_between_its_ranks() -> None:
    tree = view(make_cluster("h200", network("fat_tree", leaf=2, oversubscription=4.0), 8), 1.0)
    assert message(tree, 1.0, 0, 3, 7.0).loads == {"up": 1.0, "down": 1.0}
    assert message(tree, 1.0, 0, 8, 7.0).loads == {"nic_out": 1.0, "nic_in": 1.0}  # in its leaf
    # one of the two nodes of a leaf sends out of it
    crossing = message(tree, 1.0, 8, 16, 7.0).loads
    assert crossing == {"nic_out": 1.0, "nic_in": 1.0, "leaf_up": 8.0, "leaf_down": 8.0}
    assert message(tree, 1.0, 0, 32, 7.0).loads["leaf_up"] == 16.0
    shared = view(make_cluster("h200", network("rail", nics=2), 2), 1.0)
    # eight GPUs, two NICs
    assert message(shared, 1.0, 0, 8, 7.0).loads == {"nic_out": 4.0, "nic_in": 4.0}
    (flow,) = between(message(tree, 1.0, 8, 16, 7.0), 1, 2)[0]
    assert flow.loads == {"1:nic_out": 1.0, "2:nic_in": 1.0, "1:leaf_up": 8.0, "2:leaf_down": 8.0}
    torus = view(make_cluster("h200", network("torus", dims=(1, 4)), 4), 1.0)
    assert message(torus, 1.0, 8, 16, 7.0).loads == {"torus1+": 8.0}
    assert message(torus, 1.0, 16, 8, 7.0).loads == {"torus1-": 8.0}


@pytest.mark.parametrize(
    ("topology", "field"),
    [
        ("rail", {"leaf": 4}),
        ("rail", {"oversubscription": 2.0}),
        ("torus", {"nics": 8}),
        ("torus", {"leaf": 4}),
        ("torus", {"oversubscription": 2.0}),
        ("fat_tree", {"dims": (2, 2)}),
        ("rail", {"dims": (2, 2)}),
    ],
)
def test_fields_of_other_topologies_are_refused(topology: str, field: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(field))} of a network that is a {topology}"):
        make_cluster("h200", network(topology, **field), 4)


def test_a_mesh_is_limited_by_its_pairs() -> None:
    device = presets()["devices"]["mi210"]
    cluster = make_cluster(device, nodes=1)
    pair = device.link_rate / 3
    assert timed("all_to_all", 4e9, Group(4), cluster) == pytest.approx(1e9 / pair)
    # three rings share the message, one over each link
    assert timed("all_gather", 4e9, Group(4), cluster, "ring") == pytest.approx(1e9 / pair)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_collectives_inside_a_node_have_their_closed_forms(size: int) -> None:
    cluster = with_gpus(make_cluster("h200"), size)
    one = 1e9 * (size - 1) / size / 450e9
    for kind, times in (
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("all_to_all", 1),
        ("all_reduce", 2),
    ):
        for algorithm in ("direct", "ring") if kind != "all_to_all" else ("direct",):
            assert timed(kind, 1e9, Group(size), cluster, algorithm) == pytest.approx(times * one)


def test_ring_across_nodes_uses_the_nic_more_than_a_hierarchy() -> None:
    cluster = make_cluster("h200", network("fat_tree"), 4, 8)
    ring = timed("all_reduce", 1e9, Group(8, 4), cluster, "ring")
    # one of 8 ranks sends to the next node: its NIC carries the flow of the whole ring, but the
    # model spreads it over the 8 NICs
    assert ring == pytest.approx(2 * 1e9 * 31 / 32 / min(8 * 50e9, 450e9 * 8 / 7))
    hierarchical = timed("all_reduce", 1e9, Group(8, 4), cluster, "hierarchical")
    inside, between = 2 * 1e9 * 7 / 8 / 450e9, 2 * (1e9 / 8) * 3 / 4 / 50e9
    assert hierarchical == pytest.approx(inside + between)


def test_slices_pipeline_through_the_phases() -> None:
    cluster = make_cluster("h200", network("fat_tree"), 4, 8)
    whole, cut = (
        timed("all_reduce", 1e9, Group(8, 4), cluster, "hierarchical", n) for n in (1, 16)
    )
    longest = max(1e9 * 7 / 8 / 450e9, (1e9 / 8) * 3 / 4 / 50e9) * 2
    assert longest < cut < 0.75 * whole


def test_latency_is_per_message_and_grows_with_hops() -> None:
    assert torus_hops((16, 8), (9, 1)) == {"torus0-": 7.0, "torus1+": 1.0}
    cluster = make_cluster("h200", Network("t", 50e9, 1.0, 1e-6, "torus", dims=(16, 8)), 128, 1)
    assert timed("all_to_all", 128.0, Group(1, 128), cluster) == pytest.approx(12e-6, rel=0.02)


def test_both_protocols_are_monotonic() -> None:
    cluster = with_gpus(make_cluster("h200"), 4)
    times = [
        collective_time("all_gather", float(1 << b), Group(4), cluster, C) for b in range(10, 31)
    ]
    assert all(a < b for a, b in zip(times, times[1:]))  # noqa: B905, RUF007
    assert times[-1] / times[-2] == pytest.approx(2.0, rel=0.05)
    assert times[0] > 1e-6


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="a group of 12; allowed: a multiple of the 8"):
        group_of(make_cluster("h200", nodes=2), 12)
    with pytest.raises(InputError, match="h100"):
        make_cluster("h1000")
    with pytest.raises(InputError, match="allowed: the 12 of its sides"):
        make_cluster("h200", network("torus", dims=(3, 4)), 16)


def test_symmetric_all_to_all_cost_is_per_class() -> None:
    """Symmetry: one class of flows on a switch for any number of ranks; on a torus about the sum of
    its sides."""
    counts = []
    for nodes in (64, 1024):
        switch = make_cluster("h200", network("fat_tree"), nodes, 1)
        (flows,) = phases("all_to_all", 1e9, Group(1, nodes), view(switch, 1.0), PLAIN)
        assert len(flows) == 1
        torus = make_cluster("h200", network("torus"), nodes, 1)
        (flows,) = phases("all_to_all", 1e9, Group(1, nodes), view(torus, 1.0), PLAIN)
        counts.append(len(flows))
    assert counts[0] < 64 and counts[1] < 6 * counts[0]  # sides grow fourfold, nodes sixteenfold


@pytest.mark.parametrize(("kind", "times", "hops"), [("all_gather", 1, 15), ("all_reduce", 2, 4)])
def test_nodes_are_pipelined(kind: str, times: int, hops: int) -> None:
    """Chunks pass the links of a node and the NICs at once: the slower of both, plus the steps,
    which an all-reduce takes along a tree."""
    cluster = make_cluster("h200", replace(network("fat_tree"), latency=1e-3), 16)
    nics = times * 8e9 / 8 * 127 / 128 / cluster.network.nic_rate
    assert timed(kind, 8e9, Group(8, 16), cluster) == pytest.approx(nics + times * hops * 1e-3)
    slow = replace(cluster, device=replace(cluster.device, link_rate=50e9))
    inside = times * 8e9 * 7 / 8 / 50e9
    assert timed(kind, 8e9, Group(8, 16), slow) == pytest.approx(inside + times * hops * 1e-3)
