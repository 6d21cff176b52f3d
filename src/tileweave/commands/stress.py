"""``tileweave check --stress``: thousands of random calls, every result checked.

All ranks follow one random list of moves: operator, shape, operands, group (the world, or a part of
it), eager call or replay of a CUDA graph. Each group has its own stream. Each rank sleeps at random
times of its own, before or after a call, on its stream or its host, so that ranks drift apart as
far as the protocol allows. Epochs start just below 2**31, where they become negative; half-way they
are set just below 2**32, where they become zero. Sometimes slots are filled with NaN, where the
protocol does not need zeros. Shapes are few, one for each kernel that plans choose, so that
compiling takes less time than the calls.

The oracle: the first result of each set of operands is compared with fp32; every later one must
have the same bits, which tileweave promises, and costs one comparison on the device, read once per
batch. Outputs are filled with NaN before. Different bits within the tolerance are counted
separately from wrong results.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.console import Steps, console
from tileweave.bench.environment import environment
from tileweave.bench.run import short
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE, Draw, Operands, Shape, Subject, poisoned, worst
from tileweave.commands.check import note_on
from tileweave.files import write_text
from tileweave.launcher import DeviceType, Member, launch
from tileweave.ops.core.registry import name_of
from tileweave.transport.protocol import EPOCH
from tileweave.transport.workspace import REGISTRY, Workspace

_DATA = 3  # sets of operands per operator and shape
_BATCH = 64  # moves between two checks for errors
_BELOW_WRAP = 150  # calls of an instance until its epoch wraps
# fraction of moves at which a rank sleeps, and the longest sleep in seconds
_SLEEPY, _LONGEST = 0.06, 2e-3
_REPLAYED = 0.25  # fraction of moves that replay a graph, if there is one
_POISONED = 0.02  # fraction of batches after which slots are filled with NaN
_HOST_SLEEPY = 0.01  # fraction of moves at which its host sleeps


@dataclass
class Set:
    """Operands of one call, and the result that all calls with them must have."""

    subject: Subject
    operands: Operands
    group: dist.ProcessGroup
    golden: torch.Tensor


@dataclass
class Graph:
    """A captured call, whose operands are overwritten before each replay with those of a set."""

    graph: Any
    operands: Operands
    out: torch.Tensor
    sets: list[Set]


@dataclass
class Lane:
    """A group, its stream, and what can be called in it."""

    group: dist.ProcessGroup
    stream: Any
    # per operator and shape: sets that differ only in data
    sets: list[list[Set]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)


@dataclass
class Outcome:
    """The counts of a run, over all ranks.

    ``moves``: calls that all ranks of a group make together, of ``asked``. ``wrong``: beyond the
    tolerance, or NaN; ``other_bits``: right, with other bits. ``prepared``: seconds until the first
    move. ``counts``: per operator, on rank 0. ``paths``: per operator, the paths of its calls,
    separated by commas.
    """

    world_size: int
    seed: int
    asked: int
    moves: int
    calls: int
    replays: int
    wrong: int
    other_bits: int
    seconds: float
    prepared: float
    counts: dict[str, int]
    paths: dict[str, str]

    @property
    def right(self) -> bool:
        return self.wrong == 0 and self.other_bits == 0

    def __str__(self) -> str:
        early = "" if self.moves == self.asked else f" (of {self.asked}: time ran out)"
        return (
            f"world {self.world_size}, seed {self.seed}: {self.moves} calls{early}, "
            f"{self.calls + self.replays} results of all ranks checked, "
            f"{self.replays} of them replays, {self.seconds:.0f} s, "
            f"{self.prepared:.0f} of them to prepare: "
            f"{self.wrong} wrong, {self.other_bits} right with other bits"
        )


class Stress:
    """The part of one rank. Every method is collective."""

    def __init__(self, member: Member, seed: int) -> None:
        self.member, self.seed = member, seed
        self.shared, self.own = random.Random(seed), random.Random(1000 * seed + member.rank)
        self.counts: Counter[str] = Counter()
        self.paths: defaultdict[str, set[str]] = defaultdict(set)
        self.calls = self.replays = self.wrong = self.other_bits = 0
        # whether it differs, the result, its set
        self.suspects: list[tuple[torch.Tensor, torch.Tensor, Set]] = []
        self.dtype = torch.bfloat16 if member.on_gpu else torch.float32
        self.lanes = self._lanes()

    def _lanes(self) -> list[Lane]:
        part: Any = dist.new_group([0, 1])
        groups: list[Any] = [self.member.group, part if self.member.rank < 2 else None]
        streams = [torch.cuda.Stream() if self.member.on_gpu else None for _ in groups]
        return [Lane(group, stream) for group, stream in zip(groups, streams, strict=True)]

    # --- Before ---

    def prepare(self) -> None:
        """Make operands and expected results, capture graphs, and set the epochs close to their
        wrap."""
        for number, lane in enumerate(self.lanes):
            for op in tw.OPERATORS if lane.group is not None else ():
                samples = samples_of(op)
                sizes = samples.stress_on_gpu if self.member.on_gpu else samples.stress_on_cpu
                for which, shape in enumerate((sizes.world, sizes.part)[number]):
                    seeds = [100 * self.seed + 10 * number + n for n in range(_DATA)]
                    lane.sets.append(
                        [
                            self._set(lane, samples.subject, shape, seed, which % 2 == 1)
                            for seed in seeds
                        ]
                    )
            self.member.barrier()
        if self.member.on_gpu:
            for lane in self.lanes:
                if lane.group is not None:
                    lane.graphs = [
                        self._capture(lane, sets) for sets in lane.sets[:: 2 - self.seed % 2]
                    ]
                self.member.barrier()
        self.move_epochs(2**31)

    def move_epochs(self, wrap: int) -> None:
        """Let every instance go on as if it had made almost ``wrap`` calls."""
        for lane in self.lanes:
            self.member.barrier()
            for workspace in self._workspaces(lane):
                _near_the_wrap(workspace, wrap)
            self.member.barrier()

    def _set(self, lane: Lane, subject: Subject, shape: Shape, seed: int, bias: bool) -> Set:
        rank, size = dist.get_rank(lane.group), dist.get_world_size(lane.group)
        draw = Draw(self.dtype, self.member.device, rank, size, seed, bias)
        operands = subject.draw(shape, draw)
        self.paths[subject.op].add(short(subject.explain(operands, lane.group)))
        got = subject.call(operands, lane.group, None)[0]
        share = subject.error(operands, got) / TOLERANCE[self.dtype]
        if not share <= 1.0:
            self.wrong += 1
        return Set(subject, operands, lane.group, got.clone())

    def _capture(self, lane: Lane, sets: list[Set]) -> Graph:
        first = sets[0]
        fields = {
            k: v.clone() if isinstance(v, torch.Tensor) else v
            for k, v in vars(first.operands).items()
        }
        operands = type(first.operands)(**fields)
        out = torch.empty_like(first.golden)
        first.subject.call(operands, lane.group, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first.subject.call(operands, lane.group, out)
        return Graph(graph, operands, out, sets)

    def _workspaces(self, lane: Lane) -> list[Workspace]:
        if lane.group is None:
            return []
        found = REGISTRY.find(name_of(lane.group), self.member.device)
        return [] if found is None else [found]

    # --- Moves ---

    def run(self, calls: int, seconds: float) -> Outcome:
        """Make ``calls`` moves, unless time runs out. Every rank reads all moves, also those of
        other groups."""
        began, step, done = time.monotonic(), max(_BATCH, calls // 20), 0
        with Steps(
            f"stress, world {self.member.world_size}", -(-calls // step), show=self.member.rank == 0
        ) as steps:
            steps.now("compiling, and making the results that all others must equal")
            self.prepare()
            prepared = time.monotonic() - began
            while done < calls and not self._late(began, seconds):
                for _ in range(min(_BATCH, calls - done)):
                    self.move()
                    done += 1
                self.look()
                if self.shared.random() < _POISONED:
                    self.poison()
                if done >= calls // 2 > done - _BATCH:
                    self.move_epochs(2**32)
                outcome = f"{self.wrong} wrong, {self.other_bits} with other bits on rank 0"
                steps.now(f"{done} calls")
                steps.detail(outcome)
                if done % step < _BATCH or done == calls:
                    steps.done(outcome)
        return self._outcome(calls, done, time.monotonic() - began, prepared)

    def move(self) -> None:
        """One call, the same on all ranks of its group; other ranks only draw random numbers."""
        choice = self.shared
        lane = self.lanes[choice.random() < 0.4]
        which = choice.random()
        data = choice.randrange(_DATA)
        replayed = choice.random() < _REPLAYED
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
        place = (
            poisoned(tuple(chosen.golden.shape), self.dtype, self.member.device) if into else None
        )
        with _on(lane.stream):
            if place is not None and lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.default_stream())
            got = chosen.subject.call(chosen.operands, lane.group, place)[0]
            self._compare(got, chosen)
        self.counts[chosen.subject.op] += 1
        self.calls += 1

    def _replay(self, lane: Lane, graph: Graph, data: int) -> None:
        """Replay a graph. Graphs are in the launch order only as far as streams are: so order the
        streams."""
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
        where, length = self.own.random(), self.own.random() * _LONGEST
        if where < _SLEEPY:
            with _on(lane.stream):
                self.member.pause(length)
        elif where > 1.0 - _HOST_SLEEPY:
            time.sleep(length)

    # --- Between ---

    def look(self) -> None:
        """Wait for what is queued; compare with fp32 the results that differ from the expected
        ones."""
        self.member.synchronize()
        tw.synchronize()
        differ = (
            torch.stack([differs for differs, _, _ in self.suspects]).tolist()
            if self.suspects
            else []
        )
        for differs, (_, got, chosen) in zip(differ, self.suspects, strict=True):
            if differs:
                share = chosen.subject.error(chosen.operands, got) / TOLERANCE[self.dtype]
                if share <= 1.0:
                    self.other_bits += 1
                else:
                    self.wrong += 1
        self.suspects.clear()

    def poison(self) -> None:
        """Fill slots with NaN, between calls; not those whose result is still held."""
        signaled = [op for op in tw.OPERATORS if not samples_of(op).self_signaling]
        for lane in self.lanes:
            self.member.barrier()
            for workspace in self._workspaces(lane):
                for (op, kind), instance in workspace.instances.items():
                    if (
                        op in signaled
                        and kind in ("sm", "copy_engine")
                        and instance.slot_bytes
                        and not instance.regions.held
                    ):
                        instance.slots.fill_(255)
            self.member.barrier()

    def _late(self, began: float, seconds: float) -> bool:
        """Whether time has run out on any rank."""
        return (
            worst(float(time.monotonic() - began > seconds), self.member.device, self.member.group)
            > 0
        )

    def _outcome(self, asked: int, moves: int, seconds: float, prepared: float) -> Outcome:
        mine = torch.tensor(
            [self.calls, self.replays, self.wrong, self.other_bits], device=self.member.device
        )
        dist.all_reduce(mine, group=self.member.group)
        calls, replays, wrong, other_bits = map(int, mine.tolist())
        return Outcome(
            world_size=self.member.world_size,
            seed=self.seed,
            asked=asked,
            moves=moves,
            calls=calls,
            replays=replays,
            wrong=wrong,
            other_bits=other_bits,
            seconds=round(seconds, 1),
            prepared=round(prepared, 1),
            counts=dict(self.counts),
            paths={op: ", ".join(sorted(paths)) for op, paths in self.paths.items()},
        )


def _near_the_wrap(workspace: Workspace, wrap: int) -> None:
    """Let every instance go on as after almost ``wrap`` calls. Between calls, on all ranks."""
    for instance in workspace.instances.values():
        instance.transport.synchronize()
        epoch = wrap - _BELOW_WRAP
        # the parity, and so the slot of the next call, stays the same
        epoch += (int(instance.control[EPOCH]) ^ epoch) & 1
        epoch -= 2**32 if epoch >= 2**31 else 0  # as an int32
        instance.control[EPOCH] = epoch
        instance.signals.fill_(epoch - 1)
        instance.transport.synchronize()


def _on(stream: Any) -> Any:
    return torch.cuda.stream(stream)  # None: a context that does nothing


def stress(member: Member, calls: int, seed: int, seconds: float) -> Outcome:
    """Collective: make ``calls`` moves in this world, for at most ``seconds``."""
    outcome = Stress(member, seed).run(calls, seconds)
    member.barrier()
    tw.close()
    return outcome


def run_and_print(
    kind: DeviceType, size: int, calls: int, seed: int, seconds: float, file: Path | None
) -> bool:
    """One world, as large as possible. A hang becomes an error within a minute, so the world always
    ends. Returns whether all was right."""
    # peers may be compiling
    patience = {"TILEWEAVE_TIMEOUT": os.environ.get("TILEWEAVE_TIMEOUT", "60")}
    outcome = launch(
        stress,
        calls,
        seed,
        seconds,
        world_size=size,
        device_type=kind,
        seconds=seconds + 120,
        extra=patience,
    )
    if outcome is None:  # another rank of torchrun
        return True
    screen = console()
    for name, count in sorted(outcome.counts.items()):
        path = f", by {outcome.paths[name]}" if name in outcome.paths else ""
        screen.print(f"{name}: {count} on rank 0{path}", markup=False)
    screen.print(str(outcome), markup=False, soft_wrap=True)
    for line in note_on(outcome.paths.values()):
        screen.print(line)
    if file is not None:
        text = json.dumps({"environment": environment(), **asdict(outcome)}, indent=1)
        write_text(file, text + "\n")
    if not outcome.moves:
        screen.print("[bold red]nothing was checked: time ran out before the first call")
    return outcome.right and outcome.moves > 0
