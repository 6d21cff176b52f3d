"""A model of weak memory: store buffers, vector clocks, and the last accesses of each cell.

It does what a GPU may do. A plain store becomes visible to others at any later time, and stores of
one program to different addresses become visible in any order. Only a release orders them: earlier
stores of its program are visible first. Copies of one copy engine stay in order. Loads see what has
arrived, and a program sees its own stores.

Signals order data by release and acquire. Self-signaling data
(``device/triton/self_signaling.py``) is polled by volatile loads, which order nothing. A program
that sees such an element knows only that all kernels before the one that stored it have ended on
that rank, and it may write that same element.

A :class:`Violation` is a data race: two accesses to one cell, at least one of them a store, that no
chain of release and acquire orders (found with vector clocks as in FastTrack, PLDI 2009). That
includes a read before the data is there and a slot that is overwritten while it is read. Other
violations are a read of memory that was never written and an access outside of all tensors.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

CELL = 4  # bytes, but 2 where elements have 16 bits
T = TypeVar("T")
Cells: TypeAlias = "np.ndarray | slice | int"  # of a region: their numbers


class Violation(Exception):
    """What exploration found: its ``kind``, a text, and the bytes [low, high) concerned (0, 0: none
    in particular)."""

    def __init__(self, kind: str, text: str, low: int = 0, high: int = 0) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.low, self.high = kind, text, low, high


@dataclass(eq=False)
class Region:
    """Bytes [start, end) that kernels use. ``shared``: bytes must be written before they are
    read."""

    name: str
    start: int
    end: int
    shared: bool = False
    cell_bytes: int = CELL
    writer: np.ndarray | None = None  # int16 per cell: component of the last writer, -1: none
    written: np.ndarray | None = None  # int32 per cell: the clock of that component
    # by component that has read any cell, int32 per cell: its clock at the last read
    reads: dict[int, np.ndarray] = field(default_factory=dict)
    # int32 per cell: serial of the last store, and of the last one that has arrived
    issued: np.ndarray | None = None
    arrived: np.ndarray | None = None
    observer: np.ndarray | None = None  # int16 per cell: component that saw the last store
    # int32 per component: clock of its last read and write of any cell
    last_read: np.ndarray | None = None
    last_written: np.ndarray | None = None

    def watch(self, components: int) -> None:
        """Record accesses from now on."""
        cells = -(-(self.end - self.start) // self.cell_bytes)
        self.issued, self.arrived = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self.observer = np.full(cells, -1, np.int16)
        self.writer = np.full(cells, -1, np.int16)
        self.written = np.zeros(cells, np.int32)
        self.reads = {}
        self.last_read = np.zeros(components, np.int32)
        self.last_written = np.zeros(components, np.int32)

    def cell(self, address: int) -> int:
        return (address - self.start) // self.cell_bytes

    def cells(self, addresses: np.ndarray) -> Cells:
        """The cells of elements: by number, which is quicker, where there is one."""
        if addresses.size == 1:
            return self.cell(int(addresses.flat[0]))
        # numpy's own kind of index
        return ((addresses - np.uint64(self.start)) >> np.uint64(self.cell_bytes // 2)).view(
            np.int64
        )

    def where(self, low: int, high: int) -> str:
        first, last = low - self.start, high - self.start
        return f"{self.name}[{first // self.cell_bytes}:{-(-last // self.cell_bytes)}]"

    def slice_of(self, low: int, high: int) -> slice:
        """The cells of bytes [low, high)."""
        size = self.cell_bytes
        return slice((low - self.start) // size, -(-(high - self.start) // size))


@dataclass(eq=False)
class Store:
    """A pending store: bytes [low, high) of memory change when ``apply`` is called."""

    low: int
    high: int
    apply: Callable[[], object]
    release: bool = False
    clock: np.ndarray | None = None  # what an acquire of this word learns
    region: Region | None = None  # of data: where it arrives
    cells: Cells | None = None
    serial: int = 0


@dataclass(eq=False)
class Writer:
    """A source of ordered stores: a program, or a copy engine. ``component`` is its index in vector
    clocks."""

    name: str
    component: int
    clock: np.ndarray
    pending: list[Store] = field(default_factory=list)
    launch: int = 0  # the launch of this program, see Memory.begin_launch

    def tick(self) -> None:
        self.clock[self.component] += 1

    def learn(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def eligible(self) -> list[int]:
        """Positions of pending stores that may arrive next."""
        found = []
        for i, store in enumerate(self.pending):
            if i == 0 or not (
                store.release
                or any(s.low < store.high and store.low < s.high for s in self.pending[:i])
            ):
                found.append(i)
        return found


class Memory:
    """All regions of a world and the rules above. It does not schedule: ``tasks`` calls it."""

    def __init__(self, components: int) -> None:
        self.components = components
        self.names: list[str] = [""] * components
        self.clocks: dict[int, np.ndarray] = {}  # by word: the clock of its last release
        # by launch: the clock of its rank when it began
        self.launches = [np.zeros(components, np.int32)]
        self.launch_of = [0]  # by serial of a store
        self.synced: set[int] = set()  # words that acquire, release and atomics use: not data
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self.arrived: Callable[[int, int], None] = lambda low, high: None
        self.fail: Callable[[str, str, int, int], Violation] = Violation

    # --- Regions ---

    def add(self, region: Region) -> Region:
        """Add ``region``. Regions that overlap it have been freed and are removed."""
        at = bisect.bisect_left(self._starts, region.start)
        if at and self._regions[at - 1].end > region.start:
            at -= 1
        end = at
        while end < len(self._regions) and self._regions[end].start < region.end:
            end += 1
        self._regions[at:end], self._starts[at:end] = [region], [region.start]
        if region.shared:
            region.watch(self.components)
        return region

    def has(self, start: int, end: int) -> bool:
        return self.find(start, end) is not None

    def find(self, start: int, end: int) -> Region | None:
        """The region that has all of [start, end), if one has."""
        at = bisect.bisect_right(self._starts, start) - 1
        return self._regions[at] if at >= 0 and self._regions[at].end >= end else None

    def apart(self, places: np.ndarray, size: int, task: str) -> Iterator[np.ndarray]:
        """Addresses of elements of ``size`` bytes, split by region: rows may be gathered from
        several regions."""
        left = np.sort(places, axis=None)
        while left.size:
            end = self.region(int(left[0]), int(left[0]) + size, task).end
            yield left[left < end]
            left = left[left >= end]

    def region(self, low: int, high: int, task: str) -> Region:
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0 and high <= self._regions[at].end:
            return self._regions[at]
        raise self.fail(
            "wild access",
            f"{task} accesses {high - low} bytes that are in no tensor of the call",
            low,
            high,
        )

    # --- Rules ---

    def begin_launch(self, clock: np.ndarray) -> int:
        """A kernel starts after all that ``clock`` has seen. Returns the number of the launch."""
        self.launches.append(clock.copy())
        return len(self.launches) - 1

    def observe(self, task: Writer, region: Region, cells: Cells) -> None:
        """A poll of self-signaling data."""
        if region.issued is None or region.arrived is None or region.observer is None:
            return
        if isinstance(cells, int):
            arrived = region.arrived.item(cells)
            task.learn(self.launches[self.launch_of[arrived]])
            if arrived == region.issued.item(cells):
                region.observer[cells] = task.component
            return
        arrived = region.arrived[cells]
        for launch in {self.launch_of[serial] for serial in np.unique(arrived).tolist()}:
            task.learn(self.launches[launch])
        seen = arrived == region.issued[cells]
        region.observer[cells] = np.where(seen, task.component, region.observer[cells])

    def check_read(self, task: Writer, region: Region, cells: Cells) -> None:
        if region.writer is None or region.written is None:
            return
        assert region.last_read is not None and region.last_written is not None, "watched"
        clock = task.clock
        if type(cells) is int:  # most often, and numpy is slow at it
            writer = region.writer.item(cells)
            wrong = (
                region.written.item(cells) > clock.item(writer) if writer >= 0 else region.shared
            )
        else:
            # numpy counts faster than it says whether there are any
            wrong = np.count_nonzero(region.last_written > clock) or (
                region.shared and np.count_nonzero(region.writer[cells] < 0)
            )
        if wrong:
            self._refuse_read(task, region, cells)
        now = clock.item(task.component)
        mine = region.reads.get(task.component)
        if mine is None:
            mine = region.reads[task.component] = np.zeros(region.writer.size, np.int32)
        mine[cells] = now
        region.last_read[task.component] = now

    def _refuse_read(self, task: Writer, region: Region, cells: Cells) -> None:
        """Where some cell is read too early; else nothing."""
        assert region.writer is not None and region.written is not None, "watched"
        cells = slice(cells, cells + 1) if isinstance(cells, int) else cells
        writer = region.writer[cells]
        late = region.written[cells] > task.clock[writer]
        late &= writer >= 0
        if late.any():
            self._race(
                "early read",
                f"{task.name} reads",
                "which nothing orders after the store by",
                region,
                cells,
                late,
                writer,
            )
        if region.shared and (writer < 0).any():
            self._race(
                "early read",
                f"{task.name} reads",
                "which was not written by",
                region,
                cells,
                writer < 0,
                writer,
            )

    def check_write(self, task: Writer, region: Region, cells: Cells) -> None:
        if region.writer is None or region.written is None:
            region.watch(self.components)
        assert (
            region.writer is not None and region.written is not None and region.observer is not None
        ), "watched"
        assert region.last_read is not None and region.last_written is not None, "watched"
        clock, me = task.clock, task.component
        # Nothing in the region is newer than what this writer knows: most often.
        if np.count_nonzero(region.last_written > clock) or np.count_nonzero(
            region.last_read > clock
        ):
            self._refuse_write(task, region, cells)
        now = clock.item(me)
        region.writer[cells] = me
        region.written[cells] = now
        region.last_written[me] = now
        region.observer[cells] = -1

    def _refuse_write(self, task: Writer, region: Region, cells: Cells) -> None:
        """Where some cell is overwritten too early; else nothing."""
        assert region.writer is not None and region.written is not None, "watched"
        assert region.observer is not None, "watched"
        if isinstance(cells, int):
            cells = slice(cells, cells + 1)
        elif not isinstance(cells, slice):
            cells = cells.ravel()  # a block of them may have several dimensions
        writer = region.writer[cells]
        late = region.written[cells] > task.clock[writer]
        late &= (writer >= 0) & (region.observer[cells] != task.component)
        if late.any():
            self._race(
                "overwrite",
                f"{task.name} writes",
                "which nothing orders after the store by",
                region,
                cells,
                late,
                writer,
            )
        assert region.last_read is not None, "watched"
        readers = np.flatnonzero(region.last_read > task.clock)  # those that may have read too late
        if not readers.size:
            return
        reads = np.stack([region.reads[reader][cells] for reader in readers.tolist()])
        unread = (task.clock[readers] < reads.T).reshape(-1, readers.size)
        if unread.any():
            reader = readers[unread.argmax(axis=-1)]
            text = "which nothing orders after the read by"
            self._race(
                "overwrite", f"{task.name} writes", text, region, cells, unread.any(axis=-1), reader
            )

    def _race(
        self,
        kind: str,
        task: str,
        how: str,
        region: Region,
        cells: np.ndarray | slice,
        bad: Any,
        other: np.ndarray,
    ) -> None:
        size = region.cell_bytes
        numbers = np.arange(-(-(region.end - region.start) // size))[cells][bad]
        component = int(np.broadcast_to(other, bad.shape)[bad][0])
        name = self.names[component] if component >= 0 else "any task"
        low = region.start + size * int(numbers.min())
        high = region.start + size * (int(numbers.max()) + 1)
        raise self.fail(kind, f"{task} {region.where(low, high)}, {how} {name}", low, high)

    # --- Stores on their way ---

    def put(self, task: Writer, store: Store) -> None:
        """Add ``store`` to the pending ones."""
        store.serial = len(self.launch_of)
        self.launch_of.append(task.launch)
        if store.region is not None and store.region.issued is not None:
            store.region.issued[store.cells] = store.serial
        task.pending.append(store)

    def arrive(self, task: Writer, at: int) -> Store:
        """Make the pending store at this position visible to all tasks."""
        store = task.pending.pop(at)
        store.apply()
        if store.region is not None and store.region.arrived is not None:
            store.region.arrived[store.cells] = store.serial
        if store.clock is not None:
            self.clocks[store.low] = store.clock
        elif store.low in self.synced:
            # a plain store to a word of signals: nothing is learned from it
            self.clocks.pop(store.low, None)
        self.arrived(store.low, store.high)
        return store

    def settle(self, task: Writer, low: int, high: int) -> None:
        """A program sees its own stores: let those to [low, high) arrive, and what must arrive
        before."""
        while any(s.low < high and low < s.high for s in task.pending):
            last = max(i for i, s in enumerate(task.pending) if s.low < high and low < s.high)
            needed = (
                0
                if task.pending[last].release
                else min(
                    i
                    for i, s in enumerate(task.pending)
                    if s.low < task.pending[last].high and task.pending[last].low < s.high
                )
            )
            self.arrive(task, needed)

    def drain(self, task: Writer) -> None:
        while task.pending:
            self.arrive(task, 0)

    # --- Words ---

    def read_word(self, task: Writer, address: int) -> int:
        self.settle(task, address, address + 4)
        return ctypes.c_int32.from_address(address).value

    def acquire(self, task: Writer, address: int) -> int:
        self.synced.add(address)
        value = self.read_word(task, address)
        clock = self.clocks.get(address)
        if clock is not None:
            task.learn(clock)
        return value

    def release(self, task: Writer, address: int, value: int, ordered: bool = True) -> Store:
        """A store of a signal. ``ordered`` False: without release, as in some mutants."""
        self.synced.add(address)
        word = ctypes.c_int32.from_address(address)

        def apply() -> None:
            word.value = value

        store = Store(address, address + 4, apply, ordered, task.clock.copy() if ordered else None)
        if ordered:
            task.tick()
        self.put(task, store)
        return store

    def exchange(
        self,
        task: Writer,
        addresses: list[int],
        size: int,
        change: Callable[[], T],
        acquires: bool,
        releases: bool,
    ) -> T:
        """An atomic read-modify-write of words. It happens at once, after what its release
        orders."""
        self.synced.update(addresses)
        if releases:
            self.drain(task)
        else:
            self.settle(task, min(addresses), max(addresses) + size)
        mine = task.clock.copy()
        if releases:
            task.tick()
        for address in addresses:
            clock = self.clocks.get(address)
            if releases:
                self.clocks[address] = mine if clock is None else np.maximum(clock, mine)
            if acquires and clock is not None:
                task.learn(clock)
        return change()
