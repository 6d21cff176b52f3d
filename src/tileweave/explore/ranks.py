"""Ranks made of tasks: a host that calls operators, the programs of its kernels, its copy engines;
and their transport."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tileweave.explore.memory import CELL, Memory, Region, Store
from tileweave.explore.tasks import Strategy, Task, Tasks
from tileweave.planning.machine import CPU, Machine
from tileweave.planning.topology import Topology
from tileweave.transport.interface import Copy, Sending, SymmetricBuffer, Watcher
from tileweave.transport.workspace import REGISTRY, Workspace

MAX_PROGRAMS = 6
LANES = 3  # of copies that run concurrently: one per peer
# tasks of a rank, in this order: programs, host, copy engines, the second queue of copies
COMPONENTS = MAX_PROGRAMS + 1 + LANES + 1
PIECES = 2  # a copy of data arrives in this many parts


@dataclass(eq=False)
class Rank:
    """The tasks of one rank. ``group`` is the name by which operators find its workspace."""

    rank: int
    host: Task
    engines: list[Task]  # one per lane of copies
    second: Task  # copies of the second queue, or what is exchanged with other nodes
    programs: list[Task]
    group: str = ""
    # pushes on the second queue that have not begun: clock of the host, copies, address
    queued: list[tuple[np.ndarray, Sequence[Copy], int]] = field(default_factory=list)


def _open(rank: Rank, transport: Any) -> None:
    """Give ``rank`` a workspace with a ledger that compares nothing."""
    REGISTRY.get(rank.group, transport.device, lambda: transport).ledger.open({}, rank.rank)


class World:
    """R ranks in this process. ``resident`` programs of a rank run at once (None: all), in order of
    their ids, and are on ``multiprocessors`` in turn.
    ``cell_bytes``: of the elements of slots, if less than 4. ``over_nodes``: ranks are on
    several nodes, 2 x 1, 3 x 1 or 2 x 2."""

    def __init__(
        self,
        size: int,
        programs: int,
        strategy: Strategy,
        resident: int | None = None,
        recording: bool = False,
        multiprocessors: int = 1,
        cell_bytes: int = CELL,
        over_nodes: bool = False,
    ) -> None:
        self.size, self.resident = size, resident
        each = (2 if size == 4 else 1) if over_nodes else size
        self.topology = Topology(tuple(rank // each for rank in range(size)))
        self._sent: list[list[bytes]] = [[] for _ in range(size)]  # to other nodes, by rank
        self.multiprocessors, self.cell_bytes = multiprocessors, cell_bytes
        self.memory = Memory(size * COMPONENTS)
        self.tasks = Tasks(self.memory, strategy, recording)
        self.machine = replace(CPU, num_sms=programs)
        self.ranks = [self._rank(r) for r in range(size)]
        self._arrived: list[Task] = []
        self._buffers: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self.kept: list[torch.Tensor] = []
        self.transports = [ModelTransport(self, rank) for rank in self.ranks]
        for rank, transport in zip(self.ranks, self.transports, strict=True):
            rank.group = f"explored rank {rank.rank}"
            _open(rank, transport)

    def _rank(self, rank: int) -> Rank:
        programs = [self.tasks.task(f"rank {rank} program {p}", rank) for p in range(MAX_PROGRAMS)]
        host = self.tasks.task(f"rank {rank} host", rank)
        engines = [
            self.tasks.task(f"rank {rank} copies {lane}" if lane else f"rank {rank} copies", rank)
            for lane in range(LANES)
        ]
        second = self.tasks.task(f"rank {rank} second queue", rank)
        return Rank(rank, host, engines, second, programs)

    def workspace(self, rank: int) -> Workspace:
        found = REGISTRY.find(self.ranks[rank].group, self.transports[rank].device)
        assert found is not None, "every rank has a workspace"
        return found

    def close(self) -> None:
        for rank in self.ranks:
            REGISTRY.close(rank.group)

    def run(self, body: Callable[[int], None]) -> None:
        """Run ``body(rank)`` on every host until all are done."""
        for rank in self.ranks:
            self.tasks.start(rank.host, lambda r=rank.rank: body(r))
        self.tasks.run()

    @property
    def rank(self) -> Rank:
        """The rank of the running task."""
        return self.ranks[self.tasks.running().rank]

    # --- Launches ---

    def launch(self, grid: tuple[int, int, int], body: Callable[[], None]) -> None:
        """Run ``body`` in each program of ``grid``, at most ``MAX_PROGRAMS`` at once. Returns when
        all have ended and their stores are visible."""
        indices = [
            (x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])
        ]
        if not indices:
            raise ValueError("asked: 0 programs, which a GPU refuses; allowed: 1 or more")
        number_of_launch = self.memory.begin_launch(self.rank.host.clock)
        for first in range(0, len(indices), MAX_PROGRAMS):
            some = indices[first : first + MAX_PROGRAMS]
            self._launch(grid, some, number_of_launch, body)

    def _launch(
        self,
        grid: tuple[int, int, int],
        indices: list[tuple[int, int, int]],
        number_of_launch: int,
        body: Callable[[], None],
    ) -> None:
        """Run these programs of a launch."""
        rank, count = self.rank, len(indices)
        waiting, running, left = list(range(count)), set[int](), set(range(count))

        def start_more() -> None:
            while waiting and len(running) < (self.resident or count):
                start(waiting.pop(0))

        def start(number: int) -> None:
            running.add(number)
            task = rank.programs[number]
            task.grid, task.grid_index, task.launch = grid, indices[number], number_of_launch
            task.on_drained = lambda _: drained(number)
            self.tasks.start(task, lambda: program(number))

        def program(number: int) -> None:
            body()
            running.discard(number)
            start_more()

        def drained(number: int) -> None:
            left.discard(number)
            if not left:
                self.tasks.unblock(rank.host)

        start_more()
        while left:
            self.tasks.block()
        for number in range(count):
            rank.programs[number].on_drained = None
            rank.host.learn(rank.programs[number].clock)

    def know(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        """Add memory that kernels may use: their arguments, or what they find by address. Symmetric
        buffers are known already."""
        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes and not self.memory.has(start, start + nbytes):
            cell_bytes = min(tensor.element_size(), CELL)
            known = Region(f"rank {rank} {name}", start, start + nbytes, cell_bytes=cell_bytes)
            self.memory.add(known)
            self.kept.append(tensor)  # so that its address is not used again

    def read(self, rank: int, tensor: torch.Tensor) -> None:
        """The user of ``rank`` reads a result after the call: all of it must be ordered before."""
        low = tensor.data_ptr()
        high = low + tensor.numel() * tensor.element_size()
        if high > low and tensor.is_contiguous():
            self._read(self.ranks[rank].host, low, high)

    def wrote(self, rank: int, tensor: torch.Tensor) -> None:
        """torch wrote ``tensor`` on the stream of this rank, before the kernels that are launched
        next."""
        low = tensor.data_ptr()
        high = low + tensor.numel() * tensor.element_size()
        if high > low:
            host = self.ranks[rank].host
            region = self.memory.region(low, high, host.name)
            self.memory.check_write(host, region, region.slice_of(low, high))

    # --- Host rendezvous ---

    def barrier(self) -> None:
        """Wait for all hosts."""
        me = self.rank.host
        self._arrived.append(me)
        if len(self._arrived) < self.size:
            self.tasks.block()
            return
        together = np.maximum.reduce([host.clock for host in self._arrived])
        for host in self._arrived:
            host.learn(together)
            host.tick()
            if host is not me:
                self.tasks.unblock(host)
        self._arrived = []

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate symmetric memory. Collective, in the same order on each rank."""
        rank = self.rank.rank
        local = torch.zeros(nbytes, dtype=torch.uint8)
        number = len(self._buffers[rank])
        self._buffers[rank].append(local)
        what = "slots" if nbytes % 1024 == 0 else "signals"  # which are an odd number of words
        start = local.data_ptr()
        cell_bytes = self.cell_bytes if what == "slots" else CELL
        name = f"rank {rank} {what} {number}"
        self.memory.add(Region(name, start, start + nbytes, True, cell_bytes))
        self.barrier()
        addresses = tuple(self._buffers[r][number].data_ptr() for r in range(self.size))
        return SymmetricBuffer(local, addresses)

    # --- Copy engines ---

    def push(self, rank: Rank, copies: Sequence[Copy], source: int) -> None:
        """Copies of a lane run in order, lanes run concurrently; the last copy, in lane 0, follows
        all others.

        A copy ``aside`` is in the order of its lane, too: on a GPU it may be later, but not
        earlier.
        """
        lanes = 1 + max(copy.lane for copy in copies)
        first = rank.engines[0]
        for engine in rank.engines[1:lanes]:
            engine.on_drained = lambda _: self.tasks.unblock(first)

        def gather() -> None:
            self._copy_all(first, [copy for copy in copies[:-1] if copy.lane == 0], source)
            for engine in rank.engines[1:lanes]:
                while engine.state != "idle" or engine.pending:
                    self.tasks.block()
                first.learn(engine.clock)
            self._copy_all(first, copies[-1:], source)

        self.tasks.start(first, gather)
        for lane, engine in enumerate(rank.engines[1:lanes], start=1):
            mine = [copy for copy in copies[:-1] if copy.lane == lane]
            self.tasks.start(
                engine, lambda engine=engine, mine=mine: self._copy_all(engine, mine, source)
            )

    def push_second(self, rank: Rank, copies: Sequence[Copy], source: int) -> None:
        """Copies of the second queue run in order, after those of earlier pushes on it. They wait
        for no copy of :meth:`push`, and are ordered after what the host has done by now."""
        assert all(copy.lane == 0 for copy in copies), "lanes are those of the first queue"

        def copy_all_queued() -> None:
            while rank.queued:
                clock, queued, address = rank.queued.pop(0)
                rank.second.learn(clock)
                self._copy_all(rank.second, queued, address)

        rank.queued.append((rank.host.clock.copy(), copies, source))
        rank.host.tick()
        if rank.second.state == "idle":
            self.tasks.start(rank.second, copy_all_queued)

    def cross(self, rank: Rank, sending: Sending) -> None:
        """What the rank exchanges with other nodes, on its second queue, chunk by chunk.

        A rank that receives knows only that the data was sent: nothing else of the sender is
        ordered before. A send may end before it is received.
        """
        network, crossing, sent = rank.second, sending.crossing, self._sent
        others = [r for r in self.topology.rail(rank.rank) if r != rank.rank]

        def exchange() -> None:
            before = len(sent[rank.rank])
            for chunk, (begin, end) in enumerate(crossing.chunks):
                self.tasks.point()
                start = sending.data.data_ptr() + begin
                self._read(network, start, start + end - begin)
                sent[rank.rank].append(ctypes.string_at(start, end - begin))
                for other in others:
                    self.tasks.unblock(self.ranks[other].second)
                for other, place in zip(others, crossing.targets[chunk], strict=True):
                    while len(sent[other]) <= before + chunk:
                        self.tasks.block()
                    self.tasks.point()
                    self._write(network, place.data_ptr(), sent[other][before + chunk])
                for word in crossing.arrived[chunk]:
                    self._signal(network, word.target, word.source)

        self.tasks.start(network, exchange)

    def join(self, rank: Rank, queue: int = 0, crossed: bool = False) -> None:
        """``crossed``: wait for what is exchanged with other nodes, too."""
        for last in [rank.second] if queue else [rank.engines[0]] + [rank.second] * crossed:
            self._join(rank, last)

    def _join(self, rank: Rank, last: Task) -> None:
        last.on_drained = lambda _: self.tasks.unblock(rank.host)
        while last.state != "idle" or last.pending:
            self.tasks.block()
        last.on_drained = None
        rank.host.learn(last.clock)

    def _copy_all(self, engine: Task, copies: Sequence[Copy], source: int) -> None:
        for copy in copies:
            target, start = copy.ends(source)
            if copy.counter:
                self._await(engine, copy.counter, copy.count)
            if copy.nbytes == 4:
                self._signal(engine, target, start)
                continue
            for target, start in copy.pieces(source):
                piece = max(copy.nbytes // (PIECES if copy.rows == 1 else 1) // CELL * CELL, CELL)
                for offset in range(0, copy.nbytes, piece):
                    self.tasks.point()
                    self._copy(
                        engine, target + offset, start + offset, min(piece, copy.nbytes - offset)
                    )

    def _signal(self, engine: Task, target: int, source: int) -> None:
        """Copy one word, after all data that ``engine`` has copied."""
        self.tasks.point()
        value = ctypes.c_int32.from_address(source).value
        self._read(engine, source, source + 4)
        self.tasks.note("copies a signal", target, target + 4, str(value))
        self.memory.release(engine, target, value)

    def _await(self, engine: Task, counter: int, count: int) -> None:
        """The wait of a copy engine for a counter that programs advance."""
        while True:
            self.tasks.point()
            if self.memory.acquire(engine, counter) >= count:
                return
            self.tasks.park((counter, counter + 4))

    def _copy(self, engine: Task, target: int, source: int, nbytes: int) -> None:
        self._read(engine, source, source + nbytes)
        self._write(engine, target, ctypes.string_at(source, nbytes))

    def _write(self, engine: Task, target: int, data: bytes) -> None:
        nbytes = len(data)
        region = self.memory.region(target, target + nbytes, engine.name)
        cells = region.slice_of(target, target + nbytes)
        self.memory.check_write(engine, region, cells)
        self.tasks.note("copies", target, target + nbytes)
        # a release, because a copy engine does its copies in order
        apply = lambda: ctypes.memmove(target, data, nbytes)  # noqa: E731
        self.memory.put(
            engine, Store(target, target + nbytes, apply, release=True, region=region, cells=cells)
        )

    def _read(self, engine: Task, low: int, high: int) -> None:
        if self.memory.has(low, high):
            region = self.memory.region(low, high, engine.name)
            self.memory.check_read(engine, region, region.slice_of(low, high))


class ModelTransport:
    """:class:`tileweave.transport.interface.Transport` of one rank of a :class:`World`."""

    def __init__(self, world: World, rank: Rank) -> None:
        self.device = torch.device("cpu")
        self.rank, self.world_size = rank.rank, world.size
        self.machine: Machine = world.machine
        self.topology = world.topology
        self.watch: Watcher | None = None
        self.captured = self._crossed = False
        self._world = world

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        return self._world.allocate(nbytes)

    def share(self, nbytes: int) -> dict[int, bytearray]:
        return {}  # ranks of one process do not compare calls

    def barrier(self) -> None:
        self._world.barrier()

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
        sending: Sending | None = None,
    ) -> None:
        assert queue in (0, 1), "there are two queues"
        self._crossed = sending is not None
        if sending is not None:
            self._world.cross(self._world.ranks[self.rank], sending)
        push = self._world.push_second if queue else self._world.push
        push(self._world.ranks[self.rank], copies, source)
        if launch is not None:
            launch()

    def join(self, queue: int = 0) -> None:
        self._world.join(self._world.ranks[self.rank], queue, self._crossed)

    def order(self) -> None:
        """Calls are synchronous, so they are in order."""

    def capturing(self) -> bool:
        return self.captured

    def capture_number(self) -> int:
        return int(self.captured)

    def synchronize(self) -> None:
        """Calls are synchronous, so they are done."""

    def close(self) -> None:
        """Nothing to do: the world owns the memory."""
