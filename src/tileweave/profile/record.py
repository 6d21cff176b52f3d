"""Record one call: run the fused operator with time stamps, and report what was sent, signaled and
waited for.

Pushes by copy engines have no stamps. On the CPU, where the copy engine is a thread of this
process, :func:`record` notes when it worked. On GPUs ``profile/device.py`` adds them, and signals
are counted when they are queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.registry import group_of, interpreting, name_of, workspace_of
from tileweave.ops.matmul import all_gather_matmul as ag
from tileweave.planning.matmul import schedule_for
from tileweave.planning.problem import Plan, Problem
from tileweave.planning.schedules.gather import TileSchedule, push_order
from tileweave.profile.trace import COPY_ENGINE, Event, Trace, decode, merge
from tileweave.transport.interface import Copy, Transport
from tileweave.transport.protocol import MAX_SLICES

_SIGNAL_BYTES = 4


@dataclass
class Recording:
    """One recorded call, as seen by one rank; ``sent_bytes`` and ``signals`` count what this rank
    sent."""

    plan: Plan
    out: torch.Tensor
    events: list[Event] = field(default_factory=list)
    sent_bytes: int = 0
    signals: int = 0


@dataclass
class _Watched:
    """Observed copies, signals and waits, and when the copy engine (a thread) worked."""

    rank: int
    size: int
    copies: list[Copy] = field(default_factory=list)
    notified: int = 0
    waits: list[Event] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    wait_begin_ns: int = 0

    def observe(self, event: str, details: dict[str, int]) -> None:
        """Called for each signal and wait of an interpreted kernel, which has one program."""
        self.notified += event == "notify"
        now = time.perf_counter_ns()
        if event == "wait":
            self.wait_begin_ns = now
        elif event == "waited" and details["signal"] < self.size * MAX_SLICES:
            source = details["signal"] // MAX_SLICES
            self.waits.append(
                Event(self.rank, 0, "wait", source, self.wait_begin_ns, now, details["unit"])
            )

    def pushed(self, copies: Sequence[Copy], begin_ns: int, end_ns: int) -> None:
        self.copies += copies
        self.begin_ns, self.end_ns = begin_ns, end_ns

    @property
    def data(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.nbytes != _SIGNAL_BYTES]


def record(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Recording:
    """Record one all_gather_matmul with time stamps. Collective and synchronous. There are no
    events if the plan is not fused."""
    return start_record(x, w, bias, group=group)()


def start_record(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], Recording]:
    """Queue the call of :func:`record`. What it returns waits for the device, and makes the
    recording."""
    name = name_of(group)
    size = dist.get_world_size(group_of(name))
    plan = ag.plan(x, w, topology_of(group_of(name), x.device))
    config = plan.config
    if config is None:
        out = ag.all_gather_matmul(x, w, bias, group=name)
        assert isinstance(out, torch.Tensor), "one result without return_gathered"
        sent = (size - 1) * x.numel() * x.element_size() if plan.path == "unfused" else 0
        return partial(Recording, plan, out, sent_bytes=sent)
    transport = workspace_of(name, x.device).transport
    shape, nodes = (x.shape[0], w.shape[0], x.shape[1]), transport.topology.nodes
    problem = Problem(size, *shape, x.element_size(), "", nodes)
    schedule = schedule_for(problem, config, transport.rank, transport.machine)
    pushes = config.transport == "sm"
    slices = config.num_slices if pushes else 1
    producers = min(config.num_producers, schedule.num_programs)
    rows = slices + schedule.num_programs * schedule.max_units()
    stamps = torch.zeros(rows, 4, dtype=torch.int64, device=x.device)
    out = x.new_empty(size * x.shape[0], w.shape[0])
    with _watching(transport) as watched:
        ag.run_fused(x, w, bias, out, None, name, plan, stamps)
        if interpreting():
            transport.synchronize()
    sent = (size - 1) * x.numel() * x.element_size()

    def finish() -> Recording:
        transport.synchronize()
        return _stamped(
            Recording(plan, out, [], sent), watched, stamps, schedule, slices, producers
        )

    return finish


def _stamped(
    made: Recording,
    watched: _Watched,
    stamps: torch.Tensor,
    schedule: TileSchedule,
    slices: int,
    producers: int,
) -> Recording:
    """``made`` with what the kernel stamped and what was watched."""
    config = made.plan.config
    assert config is not None, "a fused plan has a configuration"
    pushes, sent = config.transport == "sm", made.sent_bytes
    events = decode(stamps.tolist(), schedule, slices, producers, sent if pushes else 0)
    # observed one by one; a stamp has only how long a unit waited for all of its sources
    if interpreting():
        events = [event for event in events if event.kind != "wait"] + watched.waits
    if config.transport != "nodes":  # whose copies also push on what others sent
        events += _copy_engine_events(watched)
    signals = watched.notified + len(watched.copies) - len(watched.data)
    if pushes and not interpreting():
        signals = slices * (schedule.world_size - 1)
    return replace(made, events=events, signals=signals)


def record_call(
    call: Callable[[], torch.Tensor],
    plan: Plan,
    device: torch.device,
    sent_bytes: int,
    group: dist.ProcessGroup | None = None,
) -> Recording:
    """Record one call of an operator whose kernel has no stamps. Collective and synchronous.

    Signals and waits are observed only if kernels are interpreted. ``sent_bytes`` is how many bytes
    the call sends.
    """
    if plan.path != "fused":
        return Recording(plan, call(), sent_bytes=sent_bytes if plan.path == "unfused" else 0)
    transport = workspace_of(name_of(group), device).transport
    with _watching(transport) as watched:
        out = call()
        transport.synchronize()
    return Recording(plan, out, watched.waits, sent_bytes, watched.notified)


@contextmanager
def _watching(transport: Transport) -> Iterator[_Watched]:
    """Observe the pushes of ``transport``, and the signals and waits of interpreted kernels."""
    watched = _Watched(transport.rank, transport.world_size)
    transport.watch = watched.pushed
    observers = None
    try:
        if interpreting():
            from tileweave.device.interpreter.words import OBSERVERS

            observers = OBSERVERS
            observers.append(watched.observe)
        yield watched
    finally:
        transport.watch = None
        if observers is not None:
            observers.remove(watched.observe)


def _copy_engine_events(watched: _Watched) -> list[Event]:
    """The copies as consecutive pushes. Only the begin of the first and the end of the last were
    observed."""
    data = [copy for copy in watched.data if copy.nbytes]
    if not data or not watched.end_ns:
        return []
    rank, size = watched.rank, watched.size
    peers = push_order(rank, size)
    total, at, events = sum(copy.nbytes for copy in data), watched.begin_ns, []
    for number, (peer, copy) in enumerate(zip(peers, data, strict=True)):
        end = at + (watched.end_ns - watched.begin_ns) * copy.nbytes // total
        events.append(
            Event(
                rank, COPY_ENGINE, "push", peer, at, end, number, copy.nbytes if peer != rank else 0
            )
        )
        at = end
    return events


def gather(title: str, recording: Recording, group: dist.ProcessGroup | None = None) -> Trace:
    """Collective. The events of all ranks as one trace, on every rank."""
    size = dist.get_world_size(group)
    by_rank: list[Any] = [None] * size
    dist.all_gather_object(by_rank, recording.events, group=group)
    return merge(title, by_rank, shared_clock=interpreting())
