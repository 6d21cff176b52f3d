"""Which ranks share memory: names of hosts to nodes, rails and texts."""

from __future__ import annotations

import pytest

from tileweave.planning.topology import Topology
from tileweave.transport import nodes


@pytest.mark.parametrize(
    ("hosts", "text", "per_node"),
    [
        ("aaaa", "1 node x 4", 4),
        ("aabb", "2 nodes x 2", 2),
        ("bbaa", "2 nodes x 2", 2),
        ("abc", "3 nodes x 1", 1),
        ("abab", "2 nodes with ranks 0+2, 1+3", 0),
        ("aaab", "2 nodes with ranks 0+1+2, 3", 0),
    ],
)
def test_nodes_of_hosts(hosts: str, text: str, per_node: int) -> None:
    ranks = Topology.of_hosts(tuple(hosts))
    assert (str(ranks), ranks.per_node, ranks.size) == (text, per_node, len(hosts))
    for rank, host in enumerate(hosts):
        assert ranks.near(rank) == tuple(r for r, other in enumerate(hosts) if other == host)


def test_rails_have_one_rank_of_each_node() -> None:
    ranks = Topology.of_hosts(tuple("aaabbb"))
    assert [ranks.rail(rank) for rank in range(6)] == [(0, 3), (1, 4), (2, 5)] * 2


def test_host_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nodes.HOST_ID, raising=False)
    here = nodes.host_identity()
    assert here == nodes.host_identity() and "|" not in here
    for name in ("_boot", "_process_namespace"):
        with monkeypatch.context() as changed:
            changed.setattr(nodes, name, lambda: "another")
            assert nodes.host_identity() != here
    monkeypatch.setenv(nodes.HOST_ID, "a|b")
    given = nodes.host_identity()
    assert given != here and "|" not in given and nodes.host_name() == "a|b"
    monkeypatch.setenv(nodes.HOST_ID, "c")
    assert nodes.host_identity() != given
