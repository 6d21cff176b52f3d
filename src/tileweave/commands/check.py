"""``tileweave check``: are the operators right on the devices of this machine?

There are four checks per operator, in worlds of 2, 3 and 4 ranks as devices allow: shapes (odd
ones, every dtype, bias, gathered, ``out=``); hundreds of calls of changing size, with each rank
late in turn and no wait between calls; two groups at once; and CUDA graphs replayed with changing
inputs. Each call has new data, and outputs are filled with NaN before, so stale slots and early
signals are found. Without GPUs the kernels are interpreted, and counts are small.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.table import Table

import tileweave as tw
from tileweave.bench.console import Steps
from tileweave.bench.run import short
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import (
    TOLERANCE,
    Draw,
    Operands,
    Shape,
    Subject,
    poisoned,
    worst,
    worst_of,
)
from tileweave.launcher import Member

_BATCH = 50  # calls that are queued before their results are checked


@dataclass(frozen=True)
class CheckRow:
    """One check: the worst error over all calls and ranks, as a fraction of the tolerance."""

    op: str
    world_size: int
    name: str
    calls: int
    share: float
    paths: str
    seconds: float

    @property
    def right(self) -> bool:
        return self.share <= 1.0


@dataclass
class _Pending:
    """A call that was made; ``verify`` compares its result once it is complete."""

    subject: Subject
    operands: Operands
    out: torch.Tensor
    second: torch.Tensor | None = None

    def share(self) -> float:
        return (
            self.subject.error(self.operands, self.out, self.second)
            / TOLERANCE[self.operands.x.dtype]
        )


class Checker:
    """The checks of one operator on one rank. Every method is collective."""

    def __init__(self, member: Member, op: str, calls: int) -> None:
        self.member, self.op, self.calls = member, op, calls
        samples = samples_of(op)
        self.subject = samples.subject
        self.sizes = samples.check_on_gpu if member.on_gpu else samples.check_on_cpu
        self.dtypes = (
            (torch.bfloat16, torch.float16) if member.on_gpu else (torch.float32, torch.float16)
        )
        self.paths: set[str] = set()

    def names(self) -> list[str]:
        graphs = ["graph replayed"] if self.member.on_gpu else []
        return ["shapes", "late ranks", "two groups", *graphs]

    def run(self, name: str) -> CheckRow:
        started = time.monotonic()
        self.paths = set()
        checks = {
            "shapes": self.shapes,
            "late ranks": self.late_ranks,
            "two groups": self.two_groups,
            "graph replayed": self.graph_replayed,
        }
        shares = list(checks[name]())
        tw.synchronize()
        share = worst(worst_of(shares), self.member.device, self.member.group)
        paths, seconds = ", ".join(sorted(self.paths)), time.monotonic() - started
        return CheckRow(self.op, self.member.world_size, name, len(shares), share, paths, seconds)

    def _draw(
        self, shape: Shape, dtype: torch.dtype, seed: int, group: dist.ProcessGroup, bias: bool
    ) -> Operands:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        draw = Draw(dtype, self.member.device, rank, size, seed, bias)
        operands = self.subject.draw(shape, draw)
        self.paths.add(short(self.subject.explain(operands, group)))
        return operands

    def _call(
        self, operands: Operands, group: dist.ProcessGroup, into: bool, second: bool = False
    ) -> _Pending:
        place = poisoned(operands.out_shape, operands.x.dtype, self.member.device) if into else None
        return _Pending(self.subject, operands, *self.subject.call(operands, group, place, second))

    def shapes(self) -> Iterator[float]:
        """Every shape: plain; with bias and ``out=``; in the other dtype with bias and second
        result; in fp32."""
        group, (first, second) = self.member.group, self.dtypes
        # dtype, bias, out=, second result: few enough that compiling them does not take longer than
        # running them
        variants = [
            (first, False, False, False),
            (first, True, True, False),
            (second, True, False, True),
        ]
        if self.member.on_gpu:
            variants.append((torch.float32, True, True, False))
        for number, (shape, variant) in enumerate(product(self.sizes.shapes, variants)):
            dtype, bias, into, second = variant
            for again in range(2):  # both slots
                operands = self._draw(shape, dtype, 2 * number + again, group, bias)
                yield self._call(operands, group, into, second).share()

    def late_ranks(self) -> Iterator[float]:
        """Calls of changing size; one rank after the other is late, and results are not read in
        between."""
        group, order = self.member.group, random.Random(7)
        shapes = [order.choice(self.sizes.changing) for _ in range(self.calls)]
        for first in range(0, self.calls, _BATCH):
            batch = [
                self._draw(shape, self.dtypes[0], 5000 + first + n, group, bias=False)
                for n, shape in enumerate(shapes[first : first + _BATCH])
            ]
            pending = []
            for n, operands in enumerate(batch):
                if (first + n) % self.member.world_size == self.member.rank:
                    self.member.pause(1e-3 if self.member.on_gpu else 2e-2)
                pending.append(self._call(operands, group, into=True))
            yield from [call.share() for call in pending]

    def two_groups(self) -> Iterator[float]:
        """The world and a smaller group alternate, each with its own epochs; on GPUs on two
        streams."""
        members = [0, 1]
        part: Any = dist.new_group(
            members
        )  # on ranks that are no members, new_group returns a marker
        mine = [self.member.group] + ([part] if self.member.rank in members else [])
        streams = [torch.cuda.Stream() for _ in mine] if self.member.on_gpu else None
        pending = []
        for n in range(max(self.calls // 5, 6)):
            for which, group in enumerate(mine):
                if which == 1 and n % 3 == 2:  # the smaller group makes fewer calls than the world
                    continue
                shape = self.sizes.changing[(n + which) % len(self.sizes.changing)]
                operands = self._draw(shape, self.dtypes[0], 9000 + 2 * n + which, group, bias=True)
                if (n + self.member.rank) % 4 == 0:
                    self.member.pause(1e-3)
                if streams is None:
                    pending.append(self._call(operands, group, into=True))
                    continue
                streams[which].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[which]):
                    pending.append(self._call(operands, group, into=True))
        self.member.barrier()
        yield from [call.share() for call in pending]
        if self.member.rank in members:
            tw.close(part)
        self.member.barrier()

    def graph_replayed(self) -> Iterator[float]:
        """Two calls in one CUDA graph, replayed with other inputs; sometimes an eager call in
        between."""
        group = self.member.group
        for shape in self.sizes.captured:
            operands = self._draw(shape, self.dtypes[0], 1, group, bias=False)
            outs = [
                poisoned(operands.out_shape, self.dtypes[0], self.member.device) for _ in range(2)
            ]
            self._call(operands, group, into=True)  # makes the workspace, compiles
            self.member.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for out in outs:
                    self.subject.call(operands, group, out)
            pending = []
            for n in range(max(self.calls // 5, 10)):
                fresh = self._draw(shape, self.dtypes[0], 20000 + n, group, bias=False)
                operands.x.copy_(fresh.x)
                operands.w.copy_(fresh.w)
                for out in outs:
                    out.fill_(math.nan)
                if n % self.member.world_size == self.member.rank:
                    self.member.pause(5e-4)
                graph.replay()
                pending += [_Pending(self.subject, fresh, out.clone()) for out in outs]
                if n % 7 == 3:
                    pending.append(self._call(fresh, group, into=True))
                if len(pending) >= _BATCH:
                    yield from [call.share() for call in pending]
                    pending = []
            yield from [call.share() for call in pending]
            self.member.barrier()
            del graph


def check(member: Member, calls: int) -> list[CheckRow]:
    """Every check of every operator in this world; collective. Only rank 0 shows progress."""
    checkers = [Checker(member, op, calls) for op in tw.OPERATORS]
    rows = []
    total = sum(len(checker.names()) for checker in checkers)
    with Steps(f"check, world {member.world_size}", total, show=member.rank == 0) as steps:
        for checker in checkers:
            for name in checker.names():
                steps.now(f"world {member.world_size}, {checker.op}: {name}")
                rows.append(checker.run(name))
                verdict = "ok" if rows[-1].right else "[bold red]WRONG[/]"
                steps.done(
                    f"{verdict}, {rows[-1].calls} calls, "
                    f"worst error {rows[-1].share:.2g} of what is allowed"
                )
    member.barrier()
    tw.close()
    return rows


def table_of(rows: list[CheckRow]) -> Table:
    """The rows as a table."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in (
        "operator",
        "world",
        "check",
        "calls per rank",
        "error / allowed",
        "seconds",
        "",
        "paths taken",
    ):
        numeric = name in ("world", "calls per rank", "error / allowed", "seconds")
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=name != "paths taken"
        )
    for row in rows:
        verdict = "[green]ok[/]" if row.right else "[bold red]WRONG[/]"
        table.add_row(
            row.op,
            str(row.world_size),
            row.name,
            str(row.calls),
            f"{row.share:.2g}",
            f"{row.seconds:.1f}",
            verdict,
            row.paths,
        )
    return table


def note_on(paths: Iterable[str]) -> list[str]:
    """A note if only unfused paths were checked. ``paths``: of each case, or several separated by
    commas."""
    taken = {path for several in paths for path in several.split(", ")}
    if taken != {"unfused"}:
        return []
    return ["note: every path taken is unfused: torch and its collectives were checked, no kernel"]
