"""``tileweave check --stress``: thousands of calls in disorder, every result checked.

All ranks follow one random list of moves: operator, shape, operands, group (the world, or a part of it), eager call or
replay of a CUDA graph. Each group has a stream of its own. Each rank sleeps at moments of its own, before a call or behind
it, so that ranks drift apart as far as the protocol lets them. Epochs start just below 2**31. Now and then slots are filled
with NaN, where the protocol does not count on zeros.

The oracle: the first result of each set of operands is compared with fp32; every later one must have the same bits, which is
what the library promises, and costs one comparison on the device. Outputs are full of NaN before. Bits that differ within
the tolerance are counted apart from wrong results.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.screen import Steps
from tileweave.bench.subjects import SUBJECTS, TOLERANCE, Operands, Shape, Subject, poisoned, worst
from tileweave.check import ON_CPU, ON_GPU
from tileweave.launcher import Member
from tileweave.ops.registry import name_of
from tileweave.transport.base import EPOCH
from tileweave.transport.workspace import REGISTRY, Workspace

_BATCH = 64  # moves between two looks at what has gone wrong
_BELOW_WRAP = 150  # calls of an instance until its epoch passes 2**31 - 1
_SLEEPY, _LONGEST = 0.06, 2e-3  # share of moves at which a rank sleeps, and how long at most, seconds
_REPLAYED = 0.25  # share of moves that replay a graph, where there are any
_POISONED = 0.02  # share of batches after which slots are filled with NaN
CLEAN_SLOTS = (
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
)  # operators whose data announces itself in zeroed slots


@dataclass
class Set:
    """Operands of one call, and the result that all calls with them must have."""

    subject: Subject
    operands: Operands
    group: dist.ProcessGroup
    golden: torch.Tensor


@dataclass
class Graph:
    """A captured call over operands that are overwritten before each replay, from sets of the same shape."""

    graph: Any
    operands: Operands
    out: torch.Tensor
    sets: list[Set]


@dataclass
class Lane:
    """A group, its stream, and what can be called there."""

    group: dist.ProcessGroup
    stream: Any
    sets: list[list[Set]] = field(default_factory=list)  # by operator and shape: sets that differ in data only
    graphs: list[Graph] = field(default_factory=list)


@dataclass
class Outcome:
    """Counts of all ranks together. ``wrong``: beyond the tolerance, or NaN; ``other_bits``: right, with other bits."""

    world_size: int
    calls: int
    replays: int
    wrong: int
    other_bits: int
    seconds: float
    counts: Counter[str]

    @property
    def right(self) -> bool:
        return self.wrong == 0 and self.other_bits == 0


class Stress:
    """One rank's part. Every method is collective."""

    def __init__(self, member: Member, seed: int) -> None:
        self.member, self.seed = member, seed
        self.shared, self.own = random.Random(seed), random.Random(1000 * seed + member.rank)
        self.counts: Counter[str] = Counter()
        self.calls = self.replays = self.wrong = self.other_bits = 0
        self.suspects: list[tuple[torch.Tensor, torch.Tensor, Set]] = []  # differs?, what came out, of which set
        self.dtype = torch.bfloat16 if member.on_gpu else torch.float32
        self.lanes = self._lanes()

    def _lanes(self) -> list[Lane]:
        part: Any = dist.new_group([0, 1])
        groups: list[Any] = [self.member.group, part if self.member.rank < 2 else None]
        streams = [torch.cuda.Stream() if self.member.on_gpu else None for _ in groups]
        return [Lane(group, stream) for group, stream in zip(groups, streams, strict=True)]

    # --- Before ---

    def prepare(self) -> None:
        """Draw operands, make the results that all others must equal, capture graphs, move the epochs to the wrap."""
        sizes = ON_GPU if self.member.on_gpu else ON_CPU
        for number, lane in enumerate(self.lanes):
            for op in tw.OPERATORS:
                for shape in sizes[op].changing[:: 1 if self.member.on_gpu else 2]:
                    if lane.group is not None:
                        lane.sets.append([self._set(lane, SUBJECTS[op], shape, 10 * number + n) for n in range(3)])
            self.member.barrier()
        if self.member.on_gpu:
            for lane in self.lanes:
                if lane.group is not None:
                    lane.graphs = [self._capture(lane, sets) for sets in lane.sets[::3] if hasattr(sets[0].operands, "w")]
                self.member.barrier()
        for lane in self.lanes:
            for workspace in self._workspaces(lane):
                _near_the_wrap(workspace)
            self.member.barrier()

    def _set(self, lane: Lane, subject: Subject, shape: Shape, seed: int) -> Set:
        rank, size = dist.get_rank(lane.group), dist.get_world_size(lane.group)
        operands = subject.draw(shape, self.dtype, self.member.device, rank, size, 100 * self.seed + seed, seed % 2 == 0)
        got = subject.call(operands, lane.group, None)[0]
        share = subject.error(operands, got) / TOLERANCE[self.dtype]
        if not share <= 1.0:
            self.wrong += 1
        return Set(subject, operands, lane.group, got.clone())

    def _capture(self, lane: Lane, sets: list[Set]) -> Graph:
        first = sets[0]
        fields = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(first.operands).items()}
        operands = type(first.operands)(**fields)
        out = torch.empty_like(first.golden)
        first.subject.call(operands, lane.group, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first.subject.call(operands, lane.group, out)
        return Graph(graph, operands, out, [s for s in sets if (s.operands.bias is None) == (operands.bias is None)])

    def _workspaces(self, lane: Lane) -> list[Workspace]:
        found = REGISTRY.find(name_of(lane.group), self.member.device) if lane.group is not None else None
        return [] if found is None else [found]

    # --- Moves ---

    def run(self, calls: int, seconds: float) -> Outcome:
        """At least ``calls`` moves of a rank of the first lane, unless time runs out."""
        began, last = time.monotonic(), -1
        self.prepare()
        with Steps(f"stress, world {self.member.world_size}", 20, show=self.member.rank == 0) as steps:
            for move in range(calls):
                self.move()
                if move % _BATCH == _BATCH - 1 or move == calls - 1:
                    self.look()
                    if self._poison_now():
                        self.poison()
                    done = 20 * (move + 1) // calls
                    if done > last:
                        last = done
                        steps.now(f"{move + 1} calls of a rank")
                        steps.done(f"{self.wrong} wrong, {self.other_bits} with other bits")
                    if self._late(began, seconds):
                        break
        return self._outcome(time.monotonic() - began)

    def move(self) -> None:
        """One call, the same on all ranks of its group; a rank that is not in the group only draws the numbers."""
        choice = self.shared
        lane = self.lanes[choice.random() < 0.4]
        which, data, replayed = choice.random(), choice.randrange(3), choice.random() < _REPLAYED
        into = choice.random() < 0.7
        if lane.group is None:
            return
        self._sleep(lane)
        if replayed and lane.graphs:
            self._replay(lane, lane.graphs[int(which * len(lane.graphs))], data)
        else:
            self._call(lane, lane.sets[int(which * len(lane.sets))][data], into)
        self._sleep(lane)

    def _call(self, lane: Lane, chosen: Set, into: bool) -> None:
        place = poisoned(tuple(chosen.golden.shape), self.dtype, self.member.device) if into else None
        with _on(lane.stream):
            if place is not None and lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.default_stream())
            got = chosen.subject.call(chosen.operands, lane.group, place)[0]
            self._compare(got, chosen)
        self.counts[chosen.subject.op] += 1
        self.calls += 1

    def _replay(self, lane: Lane, graph: Graph, data: int) -> None:
        """Graphs stand in the line of launches only as far as streams are ordered: so order them."""
        chosen = graph.sets[data % len(graph.sets)]
        others = [other.stream for other in self.lanes if other is not lane]
        with _on(lane.stream):
            for stream in others:
                lane.stream.wait_stream(stream)
            for name, value in vars(chosen.operands).items():
                if isinstance(value, torch.Tensor):
                    getattr(graph.operands, name).copy_(value)
            graph.out.fill_(math.nan)
            graph.graph.replay()
            self._compare(graph.out.clone(), chosen)
            for stream in others:
                stream.wait_stream(lane.stream)
        self.counts[f"{chosen.subject.op} replayed"] += 1
        self.replays += 1

    def _compare(self, got: torch.Tensor, chosen: Set) -> None:
        self.suspects.append(((got != chosen.golden).any(), got, chosen))

    def _sleep(self, lane: Lane) -> None:
        if self.own.random() < _SLEEPY:
            with _on(lane.stream):
                self.member.pause(self.own.random() * _LONGEST)

    # --- Between ---

    def look(self) -> None:
        """Wait for what is queued; look closely at results that are not what they were."""
        self.member.synchronize()
        tw.synchronize()
        for differs, got, chosen in self.suspects:
            if differs.item():
                share = chosen.subject.error(chosen.operands, got) / TOLERANCE[self.dtype]
                if share <= 1.0:
                    self.other_bits += 1
                else:
                    self.wrong += 1
        self.suspects.clear()

    def _poison_now(self) -> bool:
        return self.shared.random() < _POISONED

    def poison(self) -> None:
        """Fill slots with NaN, between calls."""
        for lane in self.lanes:
            self.member.barrier()
            for workspace in self._workspaces(lane):
                for (op, _), instance in workspace.instances.items():
                    if op not in CLEAN_SLOTS and instance.slot_bytes and not op.startswith("embedding"):
                        instance.slots.fill_(255)
            self.member.barrier()

    def _late(self, began: float, seconds: float) -> bool:
        """Whether time has run out on any rank."""
        return worst(float(time.monotonic() - began > seconds), self.member.device, self.member.group) > 0

    def _outcome(self, seconds: float) -> Outcome:
        mine = torch.tensor([self.calls, self.replays, self.wrong, self.other_bits], device=self.member.device)
        dist.all_reduce(mine, group=self.member.group)
        calls, replays, wrong, other_bits = map(int, mine.tolist())
        return Outcome(self.member.world_size, calls, replays, wrong, other_bits, seconds, self.counts)


def _near_the_wrap(workspace: Workspace) -> None:
    """Let every instance go on as after 2**31 - 150 calls. Between calls, on all ranks."""
    epoch = 2**31 - _BELOW_WRAP
    for instance in workspace.instances.values():
        instance.transport.synchronize()
        epoch += (int(instance.control[EPOCH]) ^ epoch) & 1  # the slot whose turn it is stays the same
        instance.control[EPOCH] = epoch
        instance.signals.fill_(epoch - 1)
        instance.transport.synchronize()


def _on(stream: Any) -> Any:
    return torch.cuda.stream(stream)  # None: a context that does nothing


def stress(member: Member, calls: int, seed: int, seconds: float) -> Outcome:
    """Collective: ``calls`` moves in this world, for at most ``seconds``."""
    outcome = Stress(member, seed).run(calls, seconds)
    member.barrier()
    tw.close()
    return outcome
