"""``tileweave check --soak``: random calls for a time, with planted delays and faults.

Every move draws an operator, one of its shapes, a dtype, a group, whether there is a bias and
``out=``, and data. All ranks make that call, several times: on GPUs eagerly and as a replayed CUDA
graph. The data of all ranks is drawn on the CPU from seeds, and every result is compared with fp64
of that data, computed there: nothing of the call is used. Of results with the same bits, one is
compared for all.

Delays are planted all the time. Faults are planted on request, on one rank while all make a move:

``stop``    it stops before one of the calls, now and then for longer than a wait may last
``starve``  its process gets a small part of its time; on a GPU its device also has other work
``kill``    its process is killed; then a new world goes on

A fault is *told* if every other rank gets the right result, or one of our errors in time; a stop
that is longer than a wait may last, only with an error. Stops and kills hit fused calls: torch's
collectives wait for as long as torch's own time-out. After an error all ranks close their
workspaces and make the move again, until it is right.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.environment import environment
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE, Draw, Shape, poisoned
from tileweave.errors import InputError, TileweaveError, require
from tileweave.files import write_text
from tileweave.launcher import DeviceType, Member, RankFailure, launch

FAULTS = ("stop", "starve", "kill")
SECONDS = 3.0  # TILEWEAVE_TIMEOUT of a soak
# seconds from the first call of a move until which an error must come
_IN_TIME = 1.2 * SECONDS + 2.0
_THREADS = 4  # of the CPU per rank, for exact results of GPUs
_REPEATS, _REPEATS_ON_GPU = 3, 12  # calls of a move, eager ones and replays alike
_SLEEPY, _LONGEST = 0.2, 2e-3  # fraction of calls before which a rank sleeps; for how long at most
_ATTEMPTS = 8  # of a move, after faults
_SETTLED = 1000  # calls after which descriptors, maps and memory must stay as they are
_MOVES_OF_A_SHAPE = 20  # before that, on GPUs, where the kernels of each shape and dtype are loaded
_MORE_MEMORY = 0.05  # fraction by which memory may grow after that


@dataclass(frozen=True)
class Wish:
    """What the user asks for.

    calls : how many moves; 0: as many as the time permits.
    seconds : how long all worlds together may last.
    shapes : how many shapes are drawn, of all operators together.
    faults : kinds of faults, see :data:`FAULTS`.
    every : seconds between two faults.
    """

    calls: int
    seconds: float
    seed: int
    shapes: int
    faults: tuple[str, ...] = ()
    every: float = 8.0


@dataclass
class Fault:
    """A planted fault: how long it lasted, what each other rank saw ("": the right result), and the
    longest time that a rank waited for it, in seconds."""

    kind: str
    victim: int
    seconds: float
    seen: list[str] = field(default_factory=list)
    waited: float = 0.0
    told: bool = True


@dataclass
class Report:
    """The counts of a soak over all worlds.

    ``footprint``: (calls, descriptors, maps, MiB) of rank 0 at several times in one world. After
    ``settled`` calls it must not grow.
    """

    world_size: int
    seed: int
    seconds: float = 0.0
    worlds: int = 0
    moves: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    footprint: list[tuple[int, int, int, int]] = field(default_factory=list)
    settled: int = _SETTLED

    @property
    def growth(self) -> str:
        """Which parts of the footprint grew after the first calls; "" if none did."""
        late = [each for each in self.footprint if each[0] >= self.settled]
        if len(late) < 2:
            return ""
        names = ("descriptors", "maps", "MiB of memory")
        limits = (late[0][1], late[0][2], late[0][3] * (1 + _MORE_MEMORY))
        grown = [
            f"{name}: {late[0][at]} after {late[0][0]} calls, {late[-1][at]} after {late[-1][0]}"
            for at, (name, limit) in enumerate(zip(names, limits, strict=True), 1)
            if late[-1][at] > limit
        ]
        return "; ".join(grown)

    @property
    def right(self) -> bool:
        told = all(fault.told for fault in self.faults)
        return bool(self.moves) and told and not (self.wrong or self.unexpected or self.growth)

    def __str__(self) -> str:
        told = sum(fault.told for fault in self.faults)
        longest = max((fault.waited for fault in self.faults), default=0.0)
        return (
            f"world {self.world_size}, seed {self.seed}: {self.checked} results checked against "
            f"fp64 in {self.moves} moves, {self.seconds:.0f} s, {self.worlds} worlds: "
            f"{len(self.wrong)} wrong, {len(self.unexpected)} errors without a fault; "
            f"{len(self.faults)} faults, {told} told, after {longest:.1f} s at most; "
            f"growth: {self.growth or 'none'}"
        )


@dataclass(frozen=True)
class Move:
    """What all ranks draw alike."""

    op: str
    shape: Shape
    dtype: torch.dtype
    seed: int
    bias: bool
    into: bool
    pair: bool  # in the group of the first two ranks


@dataclass(frozen=True)
class Attempt:
    """How a move went on one rank: the error, seconds, and what is wrong of its results."""

    said: str
    waited: float
    wrong: list[str]


class Soak:
    """The part of one rank in one world. Every method is collective."""

    def __init__(self, member: Member, wish: Wish, report: Report, folder: str) -> None:
        self.member, self.wish, self.report, self.folder = member, wish, report, Path(folder)
        world = 7919 * wish.seed + report.worlds
        self.shared, self.own = random.Random(world), random.Random(31 * world + member.rank + 1)
        self.pool = _pool(wish, member.on_gpu)
        # ranks agree here whether a move was right on all of them
        self.control: Any = dist.new_group(backend="gloo")
        self.pair: Any = dist.new_group([0, 1])
        self.repeats = _REPEATS_ON_GPU if member.on_gpu else _REPEATS
        if member.on_gpu:
            seen = _MOVES_OF_A_SHAPE * wish.shapes * self.repeats
            report.settled = max(_SETTLED, seen)
        self.counts: Counter[str] = Counter()
        self.stop: tuple[int, float] | None = None  # in how many calls to stop, and for how long
        self.began = self.fault_at = self.called_at = time.monotonic()

    def run(self, seconds: float) -> Report:
        """Moves until time is up, the calls are made, or a rank is killed."""
        report, deadline = self.report, self.began + seconds
        while not self._all(time.monotonic() > deadline, any_rank=True):
            if self.wish.calls and report.moves >= self.wish.calls:
                break
            kind = self._fault_due()
            if kind == "kill":
                return self._kill()  # the last thing that this world does
            if kind:
                self._suffer(kind)
            else:
                self._until_right(self._draw(), None)
            report.moves += 1
            if report.moves % 100 == 0 and not self.wish.faults:
                self._weigh()
        report.counts = dict(Counter(report.counts) + self.counts)
        report.checked += self._sum(sum(self.counts.values()))
        self.member.barrier()
        tw.close()
        return report

    # --- Moves ---

    def _draw(self) -> Move:
        choice = self.shared
        op, shape = choice.choice(self.pool)
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        return Move(
            op,
            shape,
            choice.choice(dtypes),
            seed=choice.randrange(1 << 30),
            bias=choice.random() < 0.5,
            into=choice.random() < 0.5,
            pair=choice.random() < 0.3,
        )

    def _until_right(self, move: Move, fault: Fault | None) -> None:
        """Make a move; after errors close and make it again."""
        for _ in range(_ATTEMPTS):
            said, wrong = "", []
            try:
                wrong = self._make(move)
            except TileweaveError as error:
                said = _told_by(error)
            mine = Attempt(said, time.monotonic() - self.called_at, wrong)
            everyone = [mine] * self.member.world_size
            dist.all_gather_object(everyone, mine, group=self.control)
            self._note(move, fault, everyone)
            if not any(each.said for each in everyone):
                return
            tw.close()
        self.report.unexpected.append(f"{move}: not right after {_ATTEMPTS} attempts")

    def _note(self, move: Move, fault: Fault | None, everyone: list[Attempt]) -> None:
        """What the ranks saw in an attempt."""
        for rank, each in enumerate(everyone):
            self.report.wrong += [f"{move}: rank {rank}: {text}" for text in each.wrong]
            if each.said and fault is None:
                self.report.unexpected.append(f"{move}: rank {rank}: {each.said}")
            if each.said and fault is not None and rank != fault.victim:
                fault.seen.append(each.said)
                fault.waited = max(fault.waited, each.waited)

    def _make(self, move: Move) -> list[str]:
        """What is wrong of the results of this rank."""
        if move.pair and self.member.rank > 1:
            return []
        group: Any = self.pair if move.pair else self.member.group
        rank = dist.get_rank(group)
        subject, size = samples_of(move.op).subject, dist.get_world_size(group)
        draw = Draw(move.dtype, torch.device("cpu"), rank, size, move.seed, move.bias)
        exact = subject.draw(move.shape, draw)
        operands = exact.to(self.member.device)

        def blank() -> torch.Tensor:
            return poisoned(operands.out_shape, move.dtype, self.member.device)

        results = []
        self.called_at = time.monotonic()
        for _ in range(self.repeats):
            self._sleep()
            results.append(subject.call(operands, group, blank() if move.into else None)[0])
        # unfused expert operators cannot be captured where the host reads their offsets
        fused = self.member.on_gpu and subject.explain(operands, group).path == "fused"
        if fused and move.into:
            results += self._replays(subject, operands, group, blank())
        self.member.synchronize()
        tw.synchronize()
        self.counts[move.op] += len(results)
        shares = [
            subject.error(exact, got.cpu()) / TOLERANCE[move.dtype] for got in different(results)
        ]
        # the tolerance is for the mean over many elements; in a few, partial sums that were rounded
        # may cancel
        limit = 1.0 + 4.0 / max(results[0].numel(), 1) ** 0.5
        return [
            f"error {share:.3g} of {limit:.3g} allowed" for share in shares if not share <= limit
        ]

    def _replays(
        self, subject: Any, operands: Any, group: dist.ProcessGroup, out: torch.Tensor
    ) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            subject.call(operands, group, out)
        for _ in range(self.repeats):
            out.fill_(float("nan"))
            self._sleep()
            graph.replay()
            found.append(out.clone())
        torch.cuda.synchronize()
        return found

    def _sleep(self) -> None:
        """What comes before a call: often nothing, now and then a delay, or the planted stop."""
        if self.stop is not None:
            calls, seconds = self.stop
            self.stop = (calls - 1, seconds) if calls else None
            if not calls:
                _stop_here(seconds)
        if self.own.random() < _SLEEPY:
            length = self.own.random() * _LONGEST
            if self.own.random() < 0.5:
                self.member.pause(length)
            else:
                time.sleep(length)

    # --- Faults ---

    def _fault_due(self) -> str:
        """The kind of the next fault, if it is time for one on every rank."""
        if not self.wish.faults:
            return ""
        due = self._all(time.monotonic() - self.fault_at > self.wish.every, any_rank=False)
        if not due:
            return ""
        self.fault_at = time.monotonic()
        return self.shared.choice(self.wish.faults)

    def _suffer(self, kind: str) -> None:
        victim = self.shared.randrange(self.member.world_size)
        seconds = self.shared.choice((0.3, 0.8, 2.5)) * SECONDS if kind == "stop" else 1.5
        fault = Fault(kind, victim, seconds)
        suffers = victim == self.member.rank
        if kind == "stop":
            move = self._draw_warm()
            replayed = self.member.on_gpu and move.into
            before = self.shared.randrange(self.repeats * (1 + replayed))
            self.stop = (before, seconds) if suffers else None
            self._until_right(move, fault)
        else:
            began, helper = time.monotonic(), _starve(seconds) if suffers else None
            while self._all(time.monotonic() - began < seconds, any_rank=True):
                self._until_right(self._draw(), fault)
            if helper is not None:
                helper.wait()
        ours = all(said.startswith(("PeerTimeout", "RankMismatchError")) for said in fault.seen)
        must = kind == "stop" and seconds > _IN_TIME
        fault.told = ours and fault.waited < _IN_TIME and bool(fault.seen or not must)
        self.report.faults.append(fault)

    def _kill(self) -> Report:
        """Rank 0 writes down what was seen so far; the others, what they see of the victim."""
        victim = self.shared.randrange(1, self.member.world_size)
        move = self._draw_warm()
        self.report.counts = dict(Counter(self.report.counts) + self.counts)
        self.report.checked += self._sum(sum(self.counts.values()))
        self.counts.clear()
        if self.member.rank == 0:
            self._write("report", self.report)
        if victim == self.member.rank:
            _shell(f"sleep 0.05; kill -KILL {os.getpid()}")
        said, began = "", time.monotonic()
        while not said and time.monotonic() - began < 60.0:
            try:
                self._make(move)
            except TileweaveError as error:
                said = _told_by(error)
        fault = Fault("kill", victim, 0.0, [said], time.monotonic() - self.called_at)
        fault.told = said.startswith("PeerTimeout") and fault.waited < _IN_TIME
        self._write(f"killed-{self.member.rank}", fault)
        tw.close()
        return self.report

    def _write(self, name: str, value: Report | Fault) -> None:
        """Write a file for the main process, as a whole: this one may be killed."""
        draft = self.folder / f"{name}.draft"
        draft.write_text(json.dumps(asdict(value)))
        draft.rename(draft.with_suffix(".json"))

    def _draw_warm(self) -> Move:
        """A move of all ranks whose calls are fused, and whose kernels are compiled."""
        for _ in range(1000):
            move = self._draw()
            if move.pair:
                continue
            me, subject = self.member, samples_of(move.op).subject
            draw = Draw(move.dtype, me.device, me.rank, me.world_size, 0, move.bias)
            operands = subject.draw(move.shape, draw)
            if subject.explain(operands, me.group).path == "fused":
                self._until_right(move, None)
                return move
        raise InputError(
            "asked: a soak with stops or kills; allowed: where operators are fused; "
            "remedy: leave stop and kill out of --faults"
        )

    # --- What ranks agree on, and what they use ---

    def _all(self, mine: bool, any_rank: bool) -> bool:
        """Whether ``mine`` is true on all ranks, or on any of them."""
        word = torch.tensor([int(mine)])
        kind = dist.ReduceOp.MAX if any_rank else dist.ReduceOp.MIN
        dist.all_reduce(word, op=kind, group=self.control)
        return bool(word.item())

    def _sum(self, mine: int) -> int:
        word = torch.tensor([mine])
        dist.all_reduce(word, group=self.control)
        return int(word.item())

    def _weigh(self) -> None:
        gc.collect()
        with open("/proc/self/maps") as lines:
            maps = sum(1 for _ in lines)
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[1])
        self.report.footprint.append(
            (
                self.report.moves * self.repeats,
                len(os.listdir("/proc/self/fd")),
                maps,
                pages * resource.getpagesize() >> 20,
            )
        )


def _told_by(error: TileweaveError) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def different(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results without those that have the same bits as an earlier one."""
    found: list[torch.Tensor] = []
    for result in results:
        words = result.contiguous().view(torch.uint8)
        if not any(torch.equal(words, each.contiguous().view(torch.uint8)) for each in found):
            found.append(result)
    return found


def _pool(wish: Wish, on_gpu: bool) -> list[tuple[str, Shape]]:
    """The shapes of a soak: as many for each operator, of all sizes up to a limit."""
    draw, ops = random.Random(wish.seed), list(tw.OPERATORS)
    found = []
    for number in range(wish.shapes):
        op = ops[number % len(ops)]
        embedding = op.startswith("embedding")
        if on_gpu:
            largest = (300, 6, 160) if embedding else (700, 1024, 1024)
        else:
            largest = (6, 3, 12) if embedding else (40, 48, 64)
        found.append((op, Shape(*(max(1, round(most ** draw.random())) for most in largest))))
    return found


def _shell(script: str) -> subprocess.Popen[bytes]:
    """A process that does this to the one that calls, and then ends."""
    return subprocess.Popen(["sh", "-c", script])


def _stop_here(seconds: float) -> None:
    """Stop this process; another one makes it go on."""
    pid = os.getpid()
    waker = _shell(f"sleep {seconds}; kill -CONT {pid}")
    os.kill(pid, signal.SIGSTOP)
    waker.wait()


def _starve(seconds: float) -> subprocess.Popen[bytes]:
    """A process that stops this one for most of the time, while its device has other work."""
    pid = os.getpid()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):  # queued work, which is not waited for
            a = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
            for _ in range(int(seconds * 2000)):
                a = a @ a
    return _shell(
        f"for i in $(seq {max(int(seconds / 0.06), 1)}); do kill -STOP {pid}; sleep 0.05; "
        f"kill -CONT {pid}; sleep 0.01; done"
    )


def _in_world(member: Member, wish: Wish, report: Report, folder: str, seconds: float) -> Report:
    torch.set_num_threads(min(torch.get_num_threads(), _THREADS))
    return Soak(member, wish, report, folder).run(seconds)


def soak(kind: DeviceType, size: int, wish: Wish) -> Report:
    """Worlds one after another, each until a rank is killed, until time is up."""
    unknown = [fault for fault in wish.faults if fault not in FAULTS]
    require(not unknown, f"--faults {', '.join(unknown)}", ", ".join(FAULTS), "name some of these")
    report, began = Report(size, wish.seed), time.monotonic()
    while True:
        left = wish.seconds - (time.monotonic() - began)
        done = wish.calls and report.moves >= wish.calls
        if report.worlds and (left < 1.0 or done or report.unexpected):
            break
        report.worlds += 1
        with tempfile.TemporaryDirectory(prefix="tileweave-soak-") as folder:
            try:
                found = launch(
                    _in_world,
                    wish,
                    report,
                    folder,
                    left,
                    world_size=size,
                    device_type=kind,
                    seconds=left + 300.0,
                    extra={"TILEWEAVE_TIMEOUT": str(SECONDS)},
                    grace=_IN_TIME + 2.0,
                )
            except RankFailure as error:
                found = _after_a_kill(Path(folder), size, str(error))
        if found is None:  # another rank of torchrun
            return report
        report = found
    report.seconds = time.monotonic() - began
    return report


def _after_a_kill(folder: Path, size: int, error: str) -> Report:
    """What the ranks of a world wrote down of which one was killed; raises if none was."""
    written = folder / "report.json"
    if not written.exists():
        raise RankFailure(error)
    values = json.loads(written.read_text())
    values["faults"] = [Fault(**each) for each in values["faults"]]
    report = Report(**values)
    told = [Fault(**json.loads(path.read_text())) for path in sorted(folder.glob("killed-*.json"))]
    fault = Fault("kill", told[0].victim if told else -1, 0.0)
    fault.seen = [text for each in told for text in each.seen]
    fault.waited = max((each.waited for each in told), default=0.0)
    fault.told = len(told) == size - 1 and all(each.told for each in told)
    report.faults.append(fault)
    return report


def print_report(report: Report, screen: Any, file: Path | None) -> bool:
    """The report on ``screen`` and, with the environment, in ``file``. Whether all was right."""
    for name, count in sorted(report.counts.items()):
        screen.print(f"{name}: {count} results on rank 0", markup=False)
    for fault in report.faults:
        seen = Counter(text.partition(":")[0] for text in fault.seen)
        told = "told" if fault.told else "NOT TOLD"
        screen.print(
            f"{fault.kind} of rank {fault.victim}, {fault.seconds:.1f} s: {told}, "
            f"{dict(seen) or 'right results'}",
            markup=False,
        )
    for line in (*report.wrong[:20], *report.unexpected[:20]):
        screen.print(line, markup=False, style="red", soft_wrap=True)
    screen.print(str(report), markup=False, soft_wrap=True)
    if file is not None:
        text = json.dumps({"environment": environment(), **asdict(report)}, indent=1)
        write_text(file, text + "\n")
    return report.right
