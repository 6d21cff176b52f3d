"""Kernels on one rank, whose memory and that of its peers is laid out by hand: what they wait for,
what they tell peers and store there, and what they leave after a fault, when waits go on at once.

Explored ranks that stop come to few of these moments; here each is a few launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from tileweave.device.interpreter import words as interpreted
from tileweave.device.triton import meet, self_signaling, signal
from tileweave.device.triton.peers import load_epoch, take_marked
from tileweave.device.triton.tiles import OwnerTiles
from tileweave.errors import InputError
from tileweave.explore.ranks import World
from tileweave.explore.results import unwritten
from tileweave.explore.scenarios import triton_config, whole_numbers
from tileweave.explore.scenarios_local import Found, Local
from tileweave.explore.scenarios_workspace import Noting, equal, raised
from tileweave.kernels.all_gather import arrivals
from tileweave.kernels.all_gather import triton as gathers
from tileweave.kernels.all_gather.await_shards import shard_launches
from tileweave.kernels.all_reduce import collective
from tileweave.kernels.all_to_all import exchange
from tileweave.kernels.all_to_all import scatter_triton as parts
from tileweave.kernels.embedding import bag_all_to_all as bags
from tileweave.kernels.embedding.lookup import constants
from tileweave.kernels.quantize import quantize_launcher
from tileweave.kernels.reduce_scatter import triton as scatters
from tileweave.ops.core.registry import endpoint
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule
from tileweave.planning.sharding import EmbeddingConfig
from tileweave.planning.topology import Topology
from tileweave.transport import protocol
from tileweave.transport.interface import SymmetricBuffer
from tileweave.transport.protocol import FAULT, MAX_SLICES, MEETING_US, REDUCED, TIMEOUT_US
from tileweave.transport.workspace import Instance

RANK, SIZE, EPOCH = 1, 3, 1
BLOCK, PARTS = tl.constexpr(16), tl.constexpr(2)


class Lone(Noting):
    """A transport of one rank with the memory of all. ``buffers``: of each allocation, that of each
    rank."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__()
        self.world, self.world_size, self.topology = world, size, Topology.one_node(size)
        self.buffers: list[list[torch.Tensor]] = []

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        every = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.world_size)]
        for rank, part in enumerate(every):
            self.world.know(0, f"memory {len(self.buffers)} of rank {rank}", part)
        self.buffers.append(every)
        return SymmetricBuffer(every[self.rank], tuple(part.data_ptr() for part in every))


class Alone:
    """An instance of rank 1 of ``size``. ``missed``: the signals that waits did not find."""

    def __init__(self, world: World, nbytes: int, counters: int = 1, size: int = SIZE) -> None:
        self.world, self.missed = world, list[int]()
        self.transport: Any = Lone(world, size)
        self.instance = one = Instance("alone", self.transport)
        one.reserve(nbytes, counters)
        for name in ("signal_table", "slot_table", "control", "report", "counters"):
            world.know(0, name, getattr(one, name))
        self.peers: Any = endpoint(one, torch.float32)

    def know(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.world.know(0, "operand", tensor)

    def fail(self) -> None:
        """As after a time-out."""
        for word, value in ((FAULT, 1), (TIMEOUT_US, 0), (MEETING_US, 0)):
            self.instance.control[word] = value

    def words(self, rank: int) -> torch.Tensor:
        """Signals and flags of a rank."""
        return self.transport.buffers[0][rank].view(torch.int32)

    def slots(self, rank: int) -> torch.Tensor:
        return self.transport.buffers[-1][rank].view(torch.float32)

    def told(self) -> dict[tuple[int, int], int]:
        """(peer, number) of each signal and flag that peers were told, and its value."""
        others = [rank for rank in range(self.transport.world_size) if rank != RANK]
        return {
            (rank, number): int(self.words(rank)[number])
            for rank in others
            for number in self.words(rank).nonzero().flatten().tolist()
        }

    def _wait(
        self, signals, count, epoch, first, unit, control, report, LIMIT=TIMEOUT_US, EXACT=False
    ):
        base, begin, number, expected = map(interpreted._value, (signals, first, count, epoch))
        for index in range(begin, begin + number):
            seen = ctypes.c_int32.from_address(base + 4 * index).value
            if interpreted.must_wait(seen, expected, EXACT):
                self._expire(control, report, index)
        return interpreted._scalar(0)

    def _expire(self, control: object, report: object, index: object, *_: object) -> None:
        self.missed.append(interpreted._value(index))
        self.fail()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Waits whose signal is not there set the fault and go on at once, as on a GPU."""
        with ExitStack() as stack:
            for module, name, instead in (
                (signal, "wait", self._wait),
                (meet, "wait", self._wait),
                (self_signaling, "expire", self._expire),
            ):
                stack.enter_context(mock.patch.object(module, name, instead))
            yield


@triton.jit
def take_kernel(peers, out):
    lane = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((1, BLOCK), tl.float32)
    epoch = load_epoch(peers)
    total = take_marked(peers, acc, peers.slots + lane, BLOCK, lane < 12, 0, 1, 7, epoch, PARTS)
    tl.store(out + lane, total)


@triton.jit
def announce_kernel(peers, num_programs, tiles, first_row, C: tl.constexpr):
    scatters.announce_own(peers, num_programs, tiles, first_row, load_epoch(peers), C)


@triton.jit
def gathered_kernel(peers, out, tiles, slot, sizes, C: tl.constexpr):
    at = tl.cast(slot, tl.int64) * peers.slot_size
    scatters.take_gathered(out, peers, at, tiles, sizes, load_epoch(peers), C)


@triton.jit
def copy_kernel(x, gathered, peers, rank, sizes, num_chunks, C: tl.constexpr):
    arrivals.copy_gathered(
        x, peers.slots, gathered, peers, rank, sizes, num_chunks, 0, load_epoch(peers), C
    )


def alone(body: Callable[[World, int], Found]) -> Callable[[World, int, int], Found]:
    """What ``body(world, seed)`` yields, on one rank: what is patched is of the process."""

    def on_rank_0(world: World, rank: int, seed: int) -> Found:
        if rank == 0:
            yield from body(world, seed)

    return on_rank_0


def _first(one: Alone) -> list[int]:
    """The first signals of peers, in the order of arrival."""
    return [(RANK + SIZE - i) % SIZE * MAX_SLICES for i in range(1, SIZE)]


def words(world: World, seed: int) -> Found:
    """Data that does not come, and the signals of chunks."""
    one, out = Alone(world, 4 * 32), torch.zeros(16)
    one.know(out)
    one.fail()
    one.slots(RANK)[:32] = 1.0
    one.slots(RANK)[16 + 3] = 0.0
    with one.going_on():
        take_kernel[(1,)](one.peers, out)
    yield equal("who is late", one.missed, [2 * MAX_SLICES])
    yield "a sum without a part", out, torch.full((16,), float("nan"))

    tiles = OwnerTiles(RANK, SIZE, 48, 16, 1, 18, 2, 1, 3, 2, 1, False)
    choices: Any = scatters.Choices(
        SIZE, False, False, False, 16, 16, 16, 1, True, False, GATHER=True
    )
    chunk = RANK * MAX_SLICES + REDUCED + 1
    for fault in (False, True):
        one = Alone(world, 4 * 32, 2 + 8 * MAX_SLICES)
        if fault:
            one.fail()
        counters = torch.zeros(2 + 8 * MAX_SLICES, dtype=torch.int32)
        counters[2 + (SIZE - 1) * MAX_SLICES + 1] = 1
        announce_kernel[(1,)](one.peers, 2, tiles, 48 + 32, choices)
        yield equal("told early", one.told(), {})
        yield "a counter of own tiles", one.instance.counters, counters
        announce_kernel[(1,)](one.peers, 2, tiles, 48 + 32, choices)
        told = {(peer, chunk): EPOCH for peer in (0, 2)}
        yield equal("told", one.told(), {} if fault else told)
        yield "counters", one.instance.counters, torch.zeros_like(counters)

    yield from _gathered(world, seed)


def _gathered(world: World, seed: int) -> Found:
    """Rows that peers have stored in the mirror, or not."""
    tiles = OwnerTiles(RANK, SIZE, 48, 16, 1, 18, 2, 1, 3, 2, 1, False)
    choices: Any = scatters.Choices(
        SIZE, False, False, False, 16, 16, 16, 1, True, False, GATHER=True, BLOCK=16
    )
    fewer, cols, slot = (31, 1, 40)[seed % 3], (1, 5)[seed // 3 % 2], seed // 6 % 2
    rows, place = 3 * 48 - fewer, 32
    sizes = scatters.Sizes(place, 48, cols, cols, 16, 16, 16, rows)
    for fault in (False, True):
        whole = unwritten(torch.zeros(rows, cols))
        one = Alone(world, 4 * (2 * place + 3 * 48 * cols))
        one.know(whole)
        mirror = one.slots(RANK)[slot * one.peers.slot_size + 2 * place :]
        mirror[: rows * cols] = whole_numbers((rows * cols,), "mirror", seed)
        if not fault:
            one.instance.signals.fill_(EPOCH)
        with one.going_on():
            gathered_kernel[(1,)](one.peers, whole[48:96], tiles, slot, sizes, choices)
        late = [at + REDUCED + chunk for chunk in (0, 1) for at in _first(one)]
        yield equal("chunks that are waited for", one.missed[:4], late if fault else [])
        want = mirror[: rows * cols].view(rows, cols).clone()
        want[48:96] = 555.0
        of_peers = torch.cat([want[:48], want[96:]])
        got = torch.cat([whole[:48], whole[96:]])
        yield "peers' rows", got, of_peers * float("nan") if fault else of_peers
        yield "own rows", whole[48:96], want[48:96]


def shards(world: World, seed: int) -> Found:
    """Gathers of which a shard does not come, or comes again."""
    rows, width = 2, (5, 16, 20)[seed % 3]
    for failed in (True, False):
        one = Alone(world, 4 * SIZE * rows * width)
        x = whole_numbers((rows, width), "x", seed).clone()
        whole = unwritten(torch.zeros(SIZE * rows, width))
        out, more = unwritten(torch.zeros(3, 7)), unwritten(torch.zeros(2, width))
        one.know(x, whole, out, more)
        launches = shard_launches(one.peers, SIZE, RANK, (rows, width), 1)
        one.instance.signals.fill_(0 if failed else EPOCH)
        want = torch.full_like(whole, 555.0)
        want[RANK * rows : (RANK + 1) * rows] = x
        if failed:
            want[RANK * rows] = float("nan")
        with one.going_on():
            launches.await_all(x, whole)
        yield "own rows", whole, want
        yield equal("shards that are late", one.missed[:2], _first(one) if failed else [])
        one.instance.control[protocol.EPOCH] = EPOCH
        with one.going_on():
            launches.end_gather([out, more])
        for result in (out, more):
            yield "made of shards", result, torch.full_like(result, float("nan") if failed else 555)

    chunks = 2
    size = rows * width
    choices: Any = gathers.Choices(
        SIZE, 1, False, 16, False, False, 16, 16, 16, 1, True, False, False, PER_NODE=1
    )
    sizes = gathers.Sizes(rows, 4, width, width, size, size, 0, width)
    for later in (0, 1):
        one, gathered = Alone(world, 4 * SIZE * size), unwritten(torch.zeros(SIZE, size))
        x = whole_numbers((size,), "own", seed).clone()
        one.know(x, gathered)
        one.instance.signals.fill_(EPOCH + later)
        one.slots(RANK)[: 2 * size] = whole_numbers((2 * size,), "peers", seed)
        first, second = one.slots(RANK)[: 2 * size].clone().view(2, size)
        with one.going_on():
            copy_kernel[(1,)](x, gathered, one.peers, RANK, sizes, chunks, choices)
        late = [at + chunk for at in _first(one) for chunk in range(chunks)]
        yield equal("chunks of a later call", one.missed, late if later else [])
        yield "gathered", gathered, torch.stack([first, x, second])


def pushes(world: World, seed: int) -> Found:
    """After a fault a rank pushes nothing, and spoils its own result and nothing else."""
    one, how = Alone(world, 4 * 2 * 32), Exchange(seed % 2, seed // 2 % 2)
    shape = (6, 12)
    x = whole_numbers(shape, "x", seed) + 4
    out = unwritten(torch.zeros(how.result(*shape, SIZE)))
    one.know(x, out)
    launch = exchange.launcher(one.peers, SIZE, RANK, shape, how, 4, 1, triton_config("sm"))
    one.fail()
    with one.going_on():
        launch(x, out)
    yield (
        "what peers got",
        torch.stack([one.slots(r) for r in (0, 2)]),
        torch.zeros_like(torch.stack([one.slots(r) for r in (0, 2)])),
    )

    one = Alone(world, 4 * 16, bags.COUNTERS)
    made, cut = constants([], (), 4, 4, EmbeddingConfig()), EmbeddingConfig()
    samples = bags.Samples(3, 2, 4, 3)  # the second rank has one, the third none
    launch = bags.launcher(one.peers, RANK, SIZE, samples, 0, made, False, 1, cut)
    empty = torch.zeros(0, dtype=torch.int64)
    one.fail()
    with one.going_on():
        launch(empty, empty, torch.zeros(1, dtype=torch.int64), None, 1)
    want = torch.zeros_like(one.slots(RANK))
    begin = one.peers.slot_size
    want[begin : begin + 4] = float("nan")
    yield "the own region", one.slots(RANK), want

    yield from _by_tiles(world, seed)


def _by_tiles(world: World, seed: int) -> Found:
    """The own rows of an all-reduce by tiles: into the result, and the mirrors of peers."""
    config = triton_config("copy_engine")
    schedule = ScatterSchedule(RANK, SIZE, 16, 16, 16, 16, 16, 16, 1, 1)
    mirror = schedule.slot_elements + torch.arange(48 * 16).view(48, 16)  # indices in a slot
    for fault in (False, True):
        one = Alone(world, 4 * (schedule.slot_elements + 48 * 16), 1 + 8 * MAX_SLICES)
        x, w = whole_numbers((48, 16), "x", seed).clone(), whole_numbers((16, 16), "w").clone()
        whole = torch.zeros(48, 16)
        staging, at = torch.zeros(2 * 256), seed % 2 * one.peers.slot_size + mirror
        one.know(x, w, whole, staging)
        launch = scatters.launcher(one.peers, schedule, config, 16, w.stride(), None, 48)
        # kernels multiply them by the columns of tiles, in 32 bits
        how = Exchange(0, 0)
        exchanged = parts.launcher(one.peers, schedule, config, how, 16, 16, w.stride())
        each = [made.fixed["chunk_rows"] for made in (launch, exchanged)]
        yield equal("tile rows of a chunk", each, [1, 1])
        if fault:
            one.fail()
        else:
            one.instance.signals.fill_(EPOCH)
        with one.going_on():
            launch(x, w, None, whole[16:32], staging, seed % 2)
        want = (x @ w.t())[16:32]
        yield "own rows", whole[16:32], want * float("nan") if fault else want
        for peer in (0, 2):
            kept = torch.zeros(48, 16)
            kept[16:32] = 0.0 if fault else want
            yield "a mirror", one.slots(peer)[at], kept
        chunk, meeting = RANK * MAX_SLICES + REDUCED, SIZE * MAX_SLICES + RANK
        told = {(peer, meeting): EPOCH for peer in (0, 2)}
        if not fault:
            told |= {(peer, chunk): EPOCH for peer in (0, 2)}
        yield equal("told", one.told(), told)
        yield equal("counters", int(one.instance.counters.count_nonzero()), 0)


def sums(world: World, seed: int) -> Found:
    """Zeros of sums by tiles of any shape, and what their launches take."""
    config = triton_config("sm")
    for size, everywhere in ((3, False), (2, True), (2, False)):
        rows, cols = (4, 8) if seed % 2 else (300, 1)  # more rows than a block has elements
        shape = collective.Shards.of_all if everywhere else collective.Shards.of_rows
        one = Alone(world, 4 * size * rows * cols, size=size)
        launch = collective.launcher(
            one.peers, size, RANK, shape(rows, cols), 4, config, True, False
        )
        x = torch.full((rows if everywhere else size * rows, cols), -0.0)
        out = unwritten(torch.zeros(rows, cols))
        one.know(x, out)
        one.slots(RANK).fill_(-0.0)
        launch(x, out)
        # a sum of minus zeros is one; what all ranks have is no minus zero, since a peer may have 0
        signs = torch.signbit(out)
        yield "minus zeros", signs, torch.full_like(signs, not everywhere)
        gaps = torch.zeros(rows, 2 * cols)[:, :cols], unwritten(torch.zeros(rows, cols))
        for one_of, other in (gaps, gaps[::-1]):
            refused = raised(InputError, partial(launch, one_of, other))
            yield equal("rows with gaps", refused, True)
    of = collective.Shards.of_rows(5, 8)
    places = [
        collective.slot_elements(of, size, True, gather, shot) // 40
        for size, gather, shot in ((3, False, False), (3, False, True), (2, False, True))
    ]
    yield equal("places of a slot", places, [2, 3, 1])
    from tileweave.ops.matmul.reduce_by_cublas import _launchers

    one = Alone(world, 4, size=8)
    for cols in (5, 9, 10, 13, 18, 64):
        launch, *_ = _launchers(one.instance, (3, cols), torch.float32, 3, config)
        cut = launch.fixed["shards"]
        empty = sum(rank * cut.col_step >= cols for rank in range(8))
        yield equal(f"ranks without any of {cols} columns", empty < 2, True)
    wide = quantize_launcher(1, 1 << 18, False)
    yield equal("warps", wide._options["num_warps"], 32)


SCENARIOS = (
    Local("words of one rank", alone(words)),
    Local("shards of one rank", alone(shards)),
    Local("pushes of one rank", alone(pushes)),
    Local("sums of one rank", alone(sums)),
)
