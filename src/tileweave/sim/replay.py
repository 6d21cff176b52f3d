"""Replay Chakra traces of some ranks (ours or others'): computation as recorded, communication by
this model.

Every rank is simulated, with a stream for computation and one for communication. A collective takes
as long as among the ranks of its group on their nodes. It begins on each rank when that rank
reaches it, so a late rank does not delay the others. A message takes its time on the sender; the
receiver waits for its end.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tileweave.errors import InputError, require
from tileweave.files import is_there, read_bytes, read_json, short
from tileweave.planning.costs import Coefficients
from tileweave.sim.chakra import COLL, COLLECTIVES, COMP, RECV, SEND, Node, read_trace
from tileweave.sim.collectives import Group, bulk, collective_time, group_on
from tileweave.sim.document import shown
from tileweave.sim.machine import Cluster, Device, Network, make_cluster
from tileweave.sim.network import alone, message, view
from tileweave.sim.step import Part, Step, Timeline

_KINDS: dict[int, Any] = {number: kind for kind, number in COLLECTIVES.items()}
_MODELLED = (COMP, COLL, SEND, RECV)
MOST_RANKS = 1 << 20
_Key = tuple[int, int]  # index of the trace, number of the node


def read_groups(path: Path) -> dict[str, list[int]]:
    """The ranks of groups from comm_group.json in the folder of ``path``, if it exists."""
    side = path.parent / "comm_group.json"
    if not is_there(side):
        return {}
    allowed = "a mapping of groups to lists of different ranks from 0, in JSON"
    remedy = "check which file it is"
    groups = read_json(side, "groups in", allowed, remedy)
    require(isinstance(groups, dict), f"{side}, which is no mapping", allowed, remedy)
    for name, ranks in groups.items():
        good = (
            isinstance(ranks, list)
            and 0 < len(ranks) <= MOST_RANKS
            and all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in ranks)
            and len(set(ranks)) == len(ranks)
        )
        require(good, f"{side}, group {shown(name)}: {shown(ranks)}", allowed, remedy)
    return groups


def _named_ranks(paths: Sequence[Path]) -> list[int]:
    """The numbers at the ends of names (``step.3.et``), of names that end in a number."""
    found = [re.search(r"(\d+)$", path.stem) for path in paths]
    named = [int(match[1][:20]) for match in found if match]
    most = max(named, default=0)
    require(most < MOST_RANKS, f"a trace of rank {most}", f"ranks below {MOST_RANKS}", "rename it")
    return named


def ranks_of(paths: Sequence[Path]) -> list[int]:
    """The rank of each file: the number at the end of its name, or its index if not every name has
    a different number."""
    named = _named_ranks(paths)
    return named if len(set(named)) == len(paths) else list(range(len(paths)))


def world_of(paths: Sequence[Path]) -> int:
    """The world size, by the names of these files and their groups."""
    in_groups = (rank for ranks in read_groups(paths[0]).values() for rank in ranks)
    return max([*ranks_of(paths), *in_groups]) + 1


def doubts(paths: Sequence[Path]) -> list[str]:
    """Notes about the ranks of these files: some missing, some twice."""
    named = _named_ranks(paths)
    ranks = Counter(named)
    if len(named) < len(paths):
        note = (
            "not every file's name ends in a rank (step.3.et): "
            "whether all are there is not known, ranks by order of names"
        )
        return [note] * (len(paths) > 1)
    size = max([*ranks, world_of(paths) - 1]) + 1
    missing = sorted(set(range(size)) - set(ranks))
    doubled = sorted(rank for rank, count in ranks.items() if count > 1)
    notes = []
    if missing:
        notes.append(
            f"no file of {_few(missing)}, of {size} ranks: "
            "what they would delay is not in the result"
        )
    if doubled:
        notes.append(
            f"several files of {_few(doubled)}: "
            "each counts as a rank of its own, ranks by order of names"
        )
    return notes


def _few(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    shown = ", ".join(map(str, ranks[:8])) + more
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def cluster_for(
    paths: Sequence[Path], device: Device | str, network: Network | str, gpus_per_node: int | None
) -> Cluster:
    """A cluster with enough nodes for all ranks."""
    one = make_cluster(device, network, 1, gpus_per_node)
    nodes = math.ceil(world_of(paths) / one.gpus_per_node)
    return make_cluster(device, network, nodes, gpus_per_node)


def replay(
    paths: Sequence[Path],
    cluster: Cluster,
    c: Coefficients,
    progress: Callable[[str], None] = lambda _: None,
) -> Timeline:
    """Traces of some ranks as a timeline on ``cluster``; communication takes its time by the links
    of the cluster and ``c``."""
    traces = []
    for index, path in enumerate(paths):
        progress(f"reads {path.name}, {index + 1} of {len(paths)}")
        data = read_bytes(path, "trace", "a Chakra .et file", "name .et files, such as DIR/*.et")
        traces.append(read_trace(data, short(path))[1])
    found = _Replay(paths, traces, cluster, c)
    progress(f"simulates {len(paths)} ranks")
    return found.run()


class _Replay:
    def __init__(
        self, paths: Sequence[Path], traces: list[list[Node]], cluster: Cluster, c: Coefficients
    ) -> None:
        self.paths, self.traces, self.cluster, self.c = paths, traces, cluster, c
        self.ranks = ranks_of(paths)
        self.there = set(self.ranks)
        # "0" is the group of all ranks, as in ASTRA-sim
        self.groups = {"0": list(range(world_of(paths)))} | read_groups(paths[0])
        self.placed: dict[str, Group] = {}
        self.protocol = bulk(c)
        self.seen = view(cluster, self.protocol.fraction)
        world = world_of(paths)
        fits = f"a network of {cluster.world_size}"
        require(
            world <= cluster.world_size, f"traces of {world} ranks", fits, "a network of as many"
        )
        self.waits = self._waits()
        self.step = Step("replay")

    def run(self) -> Timeline:
        for index, path in enumerate(self.paths):
            self.step.representative(index, 1, path.stem, {})
        tasks: dict[_Key, tuple[int, ...]] = {}  # the tasks that a dependent of a node waits for
        for index, node in self._order():
            after = {task for key in self.waits[index, node.number] for task in tasks[key]}
            passed = node.kind not in _MODELLED  # takes no time, but passes its dependences on
            tasks[index, node.number] = (
                tuple(sorted(after)) if passed else (self._add(index, node, sorted(after)),)
            )
        kinds = Counter(node.kind for nodes in self.traces for node in nodes)
        others = sum(count for kind, count in kinds.items() if kind not in _MODELLED)
        if others:
            self.step.notes.append(
                f"{others} nodes that are no computation, collective or message "
                "(memory, metadata): no time"
            )
        if kinds[COLL]:
            self.step.notes.append(
                "a collective begins on each rank when that rank reaches it: "
                "a late rank does not delay the others"
            )
        return self.step.run()

    def _waits(self) -> dict[_Key, list[_Key]]:
        """What each node waits for: its dependences, and for a received message its send."""
        found: dict[_Key, list[_Key]] = {}
        sent: dict[tuple[int, int, int], list[_Key]] = defaultdict(list)
        received: dict[tuple[int, int, int], list[_Key]] = defaultdict(list)
        for index, nodes in enumerate(self.traces):
            known = {node.number for node in nodes}
            where = f"{self.paths[index]}: "
            require(
                len(known) == len(nodes),
                f"{where}several nodes with the same number",
                "one node per number",
                "write it again",
            )
            for node in nodes:
                for number in node.after:
                    if number not in known:
                        asked = f"{where}node {node.name} waits for {number}, which is not there"
                        raise InputError(
                            f"asked: {asked}; allowed: numbers of nodes in the same file; "
                            "remedy: write it completely"
                        )
                found[index, node.number] = [(index, number) for number in node.after]
                if node.kind in (SEND, RECV):
                    side = sent if node.kind == SEND else received
                    side[
                        (*self._ends(index, node), self._integer(index, node, "comm_tag", 0))
                    ].append((index, node.number))
        for one in {*sent, *received}:
            source, target, tag = one
            # messages of a missing file are not waited for; a note says so
            if {source, target} <= self.there:
                counts = (len(sent[one]), len(received[one]))
                asked = (
                    f"messages from rank {source} to {target}, tag {tag}: "
                    f"{counts[0]} sent, {counts[1]} received"
                )
                require(
                    counts[0] == counts[1],
                    asked,
                    "as many sent as received",
                    "take all files of one run",
                )
                for send, receive in zip(sent[one], received[one], strict=True):
                    found[receive].append(send)
        return found

    def _integer(self, index: int, node: Node, name: str, default: int) -> int:
        """An attribute of a node that must be a number."""
        found = node.attributes.get(name, default)
        require(
            type(found) is int,
            lambda: f"{self.paths[index]}: {name} {shown(found)} of node {shown(node.name)}",
            "a whole number (int64_val)",
            "write the trace again",
        )
        return found

    def _ends(self, index: int, node: Node) -> tuple[int, int]:
        """(source, target) of a message; the own rank if the trace has none."""
        own, world = self.ranks[index], self.cluster.world_size
        ends = [self._integer(index, node, name, own) for name in ("comm_src", "comm_dst")]
        fits = (
            ends[0] != ends[1]
            and all(0 <= end < world for end in ends)
            and ends[node.kind == RECV] == own
        )
        asked = (
            f"{self.paths[index]}: node {node.name}, a message from rank {ends[0]} to {ends[1]}, "
            f"in the trace of rank {own}"
        )
        allowed = f"from or to its own rank, and two of {world} ranks"
        require(
            fits,
            asked,
            allowed,
            "check comm_src and comm_dst, names of files, or the network's size",
        )
        return ends[0], ends[1]

    def _order(self) -> list[tuple[int, Node]]:
        """The nodes of all ranks, each after what it waits for and otherwise as listed, so that
        streams that run in order never deadlock."""
        left = {key: len(waits) for key, waits in self.waits.items()}
        dependents: dict[_Key, list[_Key]] = defaultdict(list)
        for key, waits in self.waits.items():
            for other in waits:
                dependents[other].append(key)
        place = {
            (i, node.number): n
            for i, nodes in enumerate(self.traces)
            for n, node in enumerate(nodes)
        }
        ready = [(place[key], key) for key, count in left.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            at, key = heapq.heappop(ready)
            found.append((key[0], self.traces[key[0]][at]))
            for other in dependents[key]:
                left[other] -= 1
                if not left[other]:
                    heapq.heappush(ready, (place[other], other))
        stuck = [
            f"{self.paths[key[0]].name}: {self.traces[key[0]][place[key]].name}"
            for key, count in left.items()
            if count
        ]
        require(
            not stuck,
            f"nodes that wait for each other, such as {', '.join(stuck[:3])}",
            "no cycles",
            "check data_deps",
        )
        return found

    def _add(self, index: int, node: Node, after: list[int]) -> int:
        """Add a node as a task. Returns the number of the task."""
        size = float(self._integer(index, node, "comm_size", 0))
        require(
            size >= 0.0,
            lambda: f"{self.paths[index]}: comm_size {size:.0f} of node {shown(node.name)}",
            "bytes from 0",
            "write the trace again",
        )
        if node.kind == COMP:
            part = Part(node.name, "compute", node.micros * 1e-6, compute=node.micros * 1e-6)
            return self.step.add(index, "compute", node.name, [part], after)
        if node.kind == COLL:
            return self.step.add(
                index, "comm", node.name, [self._collective(index, node, size)], after, "comm"
            )
        source, target = self._ends(index, node)
        missing = node.kind == RECV and source not in self.there
        seconds = self._message(source, target, size) if node.kind == SEND or missing else 0.0
        part = Part(node.name, "communication", seconds, 0.0, "send", size, 2, "pp")
        # a stream of its own, so that waiting for a message blocks nothing else
        stream = "comm" if node.kind == SEND else f"from {source}"
        return self.step.add(index, stream, node.name, [part], after, "comm")

    def _collective(self, index: int, node: Node, size: float) -> Part:
        number = self._integer(index, node, "comm_type", -1)
        kind = _KINDS.get(number)
        asked = f"{self.paths[index]}: collective {number} of node {node.name}"
        require(kind is not None, asked, ", ".join(COLLECTIVES), "leave it out")
        name = str(node.attributes.get("pg_name") or "0")
        asked = f"{self.paths[index]}: group {name!r} of node {node.name}"
        require(
            name in self.groups,
            asked,
            "groups of comm_group.json, in the folder of the traces",
            "put that file there",
        )
        ranks = self.groups[name]
        # the trace has the size of the part of one rank
        nbytes = size * (len(ranks) if kind == "all_gather" else 1)
        if name not in self.placed:
            self.placed[name] = group_on(self.cluster, ranks)
        seconds = collective_time(kind, nbytes, self.placed[name], self.cluster, self.c)
        return Part(
            node.name, "communication", seconds, 0.0, str(kind), nbytes, len(ranks), "world"
        )

    def _message(self, source: int, target: int, nbytes: float) -> float:
        """Seconds of one message, over the same links as in simulated training."""
        flow = message(self.seen, nbytes, source, target, self.protocol.latency)
        return alone(self.seen, flow)
