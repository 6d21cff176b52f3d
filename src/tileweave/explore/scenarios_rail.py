"""The kernels of the rail by NVSHMEM, both ends of a pair in one rank: they exchange a few messages
of other sizes, units and marks, and what they leave in slots, signals, epochs, control blocks and
reports is compared, word for word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tileweave.device.interpreter import words as interpreted
from tileweave.explore.ranks import World
from tileweave.explore.scenarios_local import Found, Local
from tileweave.explore.scenarios_workspace import Noting, equal, raised
from tileweave.kernels import rail
from tileweave.transport import protocol
from tileweave.transport.shared_fault import SharedFault
from tileweave.transport.workspace import first_words

CHANNELS, SLOT = 3, 240  # bytes of a slot: whole grains of each channel
BEFORE, AFTER = 16, 32  # bytes of each message's memory around it, which must stay as they are
SIGNALS = 2 * CHANNELS  # words of 64 bits
_HEAP = 8 * SIGNALS + SLOT + 2 * SLOT  # signals, staging, slots
LIMIT = 1.0  # seconds, in steps of a quarter


class _Clock(interpreted.HostMemory):
    """Time passes in pauses only. A put takes what its program stored before."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pauses: list[int] = []
        self.expired: list[list[int]] = []

    def put(self, target: int, source: int, nbytes: int, signal: int, value: int) -> None:
        self.world.memory.drain(self.world.tasks.running())
        super().put(target, source, nbytes, signal, value)

    def expire(self, control: object, report: object, *given: object) -> None:
        """As on a GPU, where the kernel goes on."""
        self.expired.append([interpreted._value(one) for one in given])
        assert raised(
            interpreted.WaitExpired, lambda: interpreted.expire(control, report, *given)
        ), "an interpreted wait raises"

    def seconds(self) -> float:
        return 0.25 * len(self.pauses)

    def pause(self, polls: int) -> None:
        self.pauses.append(polls)


class _End:
    """One rank of the pair."""

    def __init__(self, world: World, rank: int, heap: torch.Tensor) -> None:
        transport: Any = Noting()
        self.heap, self.base = heap, heap.data_ptr()
        self.signals = heap[: 8 * SIGNALS].view(torch.int64).view(2, CHANNELS)
        self.staging = heap[8 * SIGNALS :][:SLOT]
        self.slots = heap[8 * SIGNALS + SLOT :].view(2, SLOT)
        self.epochs = torch.zeros(CHANNELS, dtype=torch.int64)
        self.fault = SharedFault(transport)
        words = first_words(LIMIT)
        words[protocol.TIMEOUT_US], words[protocol.MEETING_US] = 1_000_000, 1_250_000
        self.control = self.fault.control_block("rail", LIMIT, words)
        for name in ("heap", "epochs", "control"):
            world.know(rank, f"{name} of an end", getattr(self, name))
        world.know(rank, "report of an end", self.fault.report)

    def put(self, message: torch.Tensor, nbytes: int, unit: int, mark: int, pe: int) -> None:
        rail.launch_of(rail.put_kernel, unit, 0, "", lambda _: None)(
            message.data_ptr() + BEFORE,
            nbytes,
            self.staging.data_ptr(),
            self.slots.data_ptr(),
            SLOT,
            piece_of(nbytes),
            self.signals.data_ptr(),
            self.epochs.data_ptr(),
            mark,
            self.control.data_ptr(),
            pe,
        )

    def take(self, target: torch.Tensor, nbytes: int, unit: int, mark: int) -> None:
        rail.launch_of(rail.take_kernel, unit, 0, "", lambda _: None)(
            target.data_ptr() + BEFORE,
            nbytes,
            self.slots.data_ptr(),
            SLOT,
            piece_of(nbytes),
            self.signals.data_ptr(),
            self.epochs.data_ptr(),
            mark,
            self.control.data_ptr(),
            self.fault.report.data_ptr(),
            5,
        )

    @property
    def told(self) -> list[int]:
        return self.fault.report[:6].tolist()


def piece_of(nbytes: int) -> int:
    return max(-(-nbytes // (CHANNELS * rail.GRAIN)), 1) * rail.GRAIN


def around(nbytes: int) -> torch.Tensor:
    """Memory of a message that ends ``AFTER`` bytes before its own end."""
    return torch.full((BEFORE + nbytes + AFTER,), 9, dtype=torch.uint8)


@contextmanager
def _patched(world: World, ends: list[_End]) -> Iterator[_Clock]:
    """Few channels, small blocks, a clock, and puts to the end with the number that they give."""
    clock = _Clock(world)

    def place(pe: int, address: int) -> int:
        (own,) = (end for end in ends if end.base <= address < end.base + _HEAP)
        return ends[pe].base + address - own.base

    with (
        mock.patch.object(rail, "CHANNELS", CHANNELS),
        mock.patch.object(rail, "_BLOCK", 16),
        mock.patch.object(interpreted, "PLACE_AT", place),
        mock.patch.object(interpreted, "MEMORY", clock),
        mock.patch.object(rail, "expire", clock.expire),
    ):
        yield clock


def transfers(world: World, rank: int, seed: int) -> Found:
    if rank:  # what is patched is of the process
        return
    draw = random.Random(f"rail {seed}")
    heaps = torch.zeros(2, _HEAP, dtype=torch.uint8)
    world.know(rank, "heaps", heaps)
    ends = [_End(world, rank, heap) for heap in heaps]
    slots = torch.zeros(2, 2, SLOT, dtype=torch.uint8)  # what they must hold
    with _patched(world, ends) as clock:
        for number in range(1, 5):
            unit = (8, 4, 2, 1)[(number + seed) % 4]
            sizes = [unit * draw.randint(0, SLOT // unit - 6 * number) for _ in ends]
            if number == 2:
                sizes[seed % 2] = 0
            marks = [(0, 2**32 - 1, draw.getrandbits(32))[(number + seed + i) % 3] for i in (0, 1)]
            sent = [around(size) for size in sizes]
            for i, end in enumerate(ends):
                sent[i][BEFORE : BEFORE + sizes[i]].random_(1, 255)
                # its region ends with the message
                whole = sent[i][: BEFORE + sizes[i]].clone()
                world.know(rank, f"message {number} of {i}", whole)
                end.put(whole, sizes[i], unit, marks[i], 1 - i)
                # all of a piece is put, its end undefined
                slots[1 - i, number & 1, : sizes[i]] = whole[BEFORE:]
                got = ends[1 - i].slots[number & 1, : sizes[i]]
                yield equal("slot", got.tolist(), slots[1 - i, number & 1, : sizes[i]].tolist())
                untouched = ends[1 - i].slots[1 - (number & 1)].tolist()
                yield equal("other slot", untouched, slots[1 - i, 1 - (number & 1)].tolist())
                signals = ends[1 - i].signals[number & 1].tolist()
                yield equal("signals", signals, [number << 32 | marks[i]] * CHANNELS)
                yield equal("epochs", end.epochs.tolist(), [number - 1] * CHANNELS)
            for i, end in enumerate(ends):
                slots[i, number & 1] = end.slots[number & 1]
                size, target = sizes[1 - i], around(sizes[1 - i])
                world.know(rank, f"target {number} of {i}", target)
                end.take(target, size, unit, marks[1 - i])
                yield equal("taken", target.tolist(), sent[1 - i].tolist())
                yield equal("calls", end.epochs.tolist(), [number] * CHANNELS)
                yield equal("time", (clock.pauses, end.told), ([], [0] * 6))
        yield from _faults(world, rank, ends, clock)


def _faults(world: World, rank: int, ends: list[_End], clock: _Clock) -> Found:
    first, second = ends
    message = around(SLOT)
    target = around(SLOT)
    for name, tensor in (("message", message), ("target", target)):
        world.know(rank, name, tensor)
    epochs = first.epochs.tolist()
    first.epochs.copy_(torch.tensor([4, 7, 4]))  # of channels that are not equally far
    first.put(message, SLOT, 8, 3, 1)
    signals = second.signals[0, 1].item(), second.signals[1, [0, 2]].tolist()
    yield equal("channels", signals, (8 << 32 | 3, [5 << 32 | 3] * 2))
    first.epochs.copy_(torch.tensor(epochs))
    first.put(message, SLOT, 8, 3, 1)
    before = second.control.clone()
    second.take(target, SLOT, 8, 4)
    every = sorted(clock.expired), second.told[:2] + second.told[3:]
    yield equal("another call", every, ([[5, c, 5, 5] for c in range(3)], [1, 5, 5, 5, 0]))
    clock.expired.clear()
    told = [second.control[word].item() for word in (1, 2, 3, 4)]
    yield equal("fault", told, [protocol.LATE, 1, 0, 0])
    inside = target[BEFORE : BEFORE + SLOT].tolist(), target[-AFTER:].tolist()
    yield equal("spoilt", inside, ([255] * SLOT, [9] * AFTER))
    yield equal("passed", second.epochs.tolist(), [5] * CHANNELS)
    sent = first.heap.tolist()
    second.put(message, SLOT, 8, 3, 0)
    yield equal("sends nothing", first.heap.tolist(), sent)
    second.control.copy_(before)
    second.control[protocol.FAULT] = 1  # of a transfer before
    second.epochs -= 1
    target.fill_(9)
    second.take(target, SLOT, 8, 3)
    inside = target[BEFORE : BEFORE + SLOT].tolist(), target[-AFTER:].tolist()
    yield equal("spoilt, too", inside, ([255] * SLOT, [9] * AFTER))
    second.epochs -= 1
    target.fill_(9)
    second.take(target, 17, 1, 3)  # blocks of one element
    yield equal("spoilt, 17 bytes", target.tolist(), [9] * 16 + [255] * 17 + [9] * (SLOT + 15))
    clock.expired.clear()
    second.control.copy_(before)
    second.epochs -= 1
    second.signals[1, 2] = 3 << 32 | 3  # one channel is late
    second.take(target, SLOT, 8, 3)
    yield equal("a late channel", clock.expired, [[5, 2, 5, 3]])
    clock.expired.clear()
    clock.pauses.clear()
    first.take(target, SLOT, 8, 3)
    yield equal("late", clock.pauses, [1, 2, 3, 4, 5, 1, 1])
    yield equal("reports", sorted(clock.expired), [[5, c, 5, 3] for c in range(3)])


class _Kernel:
    """A kernel that notes how it is compiled and run."""

    arg_names = ("a", "b", "c", "UNIT", "BLOCK")

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.module = "module"

    def warmup(self, *words: int, **given: Any) -> _Kernel:
        self.made.append((words, given))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.made.append((grid, given))


def launches(world: World, rank: int, seed: int) -> Found:
    """Each variant is compiled, loaded and initialised once."""
    if rank:
        return
    kernel, modules = _Kernel(), list[Any]()
    yield equal("interpreted", rail.is_ready(kernel, 8, 0), True)
    with (
        mock.patch.object(rail, "INTERPRETED", False),
        mock.patch.dict(rail._LAUNCHES, clear=True),
    ):
        yield equal("before", rail.is_ready(kernel, 8, 0), False)
        for unit in (8, 8, 2):
            rail.launch_of(kernel, unit, 0, "library", modules.append)(1, 2, 3)
        yield equal("after", [rail.is_ready(kernel, unit, 0) for unit in (8, 4)], [True, False])
    grid, (words, given) = (rail.CHANNELS, 1, 1), kernel.made[0]
    yield equal("words", (words, given["UNIT"], given["grid"]), ((0, 0, 0), 8, grid))
    yield equal("library", given["extern_libs"], {"libnvshmem_device": "library"})
    yield equal("initialised", modules, ["module", "module"])
    runs = [made for made in kernel.made if made[0] == grid]
    yield equal("runs", runs, [(grid, (1, 2, 3, u, rail._BLOCK)) for u in (8, 8, 2)])


SCENARIOS = (Local("transfers of a rail", transfers), Local("launches of a rail", launches))
