"""Ranks on several nodes whose matmuls run while chunks travel (``ops/matmul/over_nodes.py``): what
crosses is a task of its own, and the ranks of a node have a workspace of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tileweave.explore.ranks import ModelTransport, Rank, World
from tileweave.planning.topology import Topology
from tileweave.transport.interface import SymmetricBuffer
from tileweave.transport.workspace import PART, REGISTRY

PIECES = 2  # a part of a transfer arrives in so many


class SpanningTransport(ModelTransport):
    """:class:`tileweave.transport.interface.Spanning` of one rank."""

    def __init__(self, world: World, rank: Rank, sent: dict[tuple[int, int, int], bytes]) -> None:
        super().__init__(world, rank)
        self._sent = sent
        self._rail: ModelRail | None = None

    def rail(self) -> ModelRail:
        if self._rail is None:
            self._rail = ModelRail(self._world, self._world.ranks[self.rank], self._sent)
        return self._rail

    def inside(self) -> str:
        me = self._world.ranks[self.rank]
        name = f"{me.group}{PART}inside"
        made = InsideTransport(self._world, me)
        REGISTRY.get(name, self.device, lambda: made).ledger.open({}, made.rank)
        return name


class InsideTransport(ModelTransport):
    """The transport of the ranks of a node: these have numbers of their own."""

    def __init__(self, world: World, rank: Rank) -> None:
        super().__init__(world, rank)
        self._near, self._global = world.topology.near(rank.rank), rank.rank
        self.rank, self.world_size = self._near.index(rank.rank), len(self._near)
        self.topology = Topology.one_node(self.world_size)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        made = super().allocate(nbytes)
        return SymmetricBuffer(made.local, tuple(made.addresses[rank] for rank in self._near))

    def push(self, copies: Any, source: int = 0, queue: int = 0, *_: Any, **__: Any) -> None:
        assert queue == 1, "pushes concurrent with other kernels"
        self._world.push_second(self._world.ranks[self._global], copies, source)

    def join(self, queue: int = 0) -> None:
        self._world.join(self._world.ranks[self._global], queue)


class ModelRail:
    """:class:`tileweave.transport.interface.Rail`: transfers run one after the other in a task. A
    transfer orders nothing but its data.

    sent : by sender, number of the transfer, and receiver.
    """

    def __init__(self, world: World, rank: Rank, sent: dict[tuple[int, int, int], bytes]) -> None:
        self._world, self._rank, self._sent = world, rank, sent
        self._ranks = world.topology.rail(rank.rank)
        self._far = [other for other in self._ranks if other != rank.rank]
        self._network = rank.engines[-1]  # pushes here have one lane
        self._queued: list[Callable[[], None]] = []
        self._begun = self._done = self._number = 0
        self._awaited = False

    def agree(self, call: int) -> Mapping[int, int]:
        return {}

    def begin(self, transfer: Callable[[], None]) -> Callable[[], None]:
        self._queued.append(transfer)
        self._begun += 1
        number = self._begun
        self._rank.host.tick()
        if self._network.state == "idle":
            self._world.tasks.start(self._network, self._run)
        self._world.tasks.point()
        return lambda: self._wait(number)

    def join(self) -> None:
        self._wait(self._begun)

    def _run(self) -> None:
        while self._queued:
            self._queued.pop(0)()
            self._done += 1
            self._number += 1
            if self._awaited:  # else the host may wait for something else
                self._world.tasks.unblock(self._rank.host)

    def _wait(self, number: int) -> None:
        self._awaited = True
        while self._done < number:
            self._world.tasks.block()
        self._awaited = False
        self._rank.host.learn(self._network.clock)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        places = dict(zip(self._ranks, out, strict=True))
        self._swap(dict.fromkeys(self._far, x), {rank: places[rank] for rank in self._far})
        out[self._ranks.index(self._rank.rank)].copy_(x)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        given, places = (dict(zip(self._ranks, parts, strict=True)) for parts in (x, out))
        del given[self._rank.rank], places[self._rank.rank]
        self._swap(given, places)

    def all_to_all_parts(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        given, places = (dict(enumerate(t.split(n))) for t, n in ((x, sent), (out, received)))
        self._swap(
            {rank: part for rank, part in given.items() if sent[rank]},
            {rank: part for rank, part in places.items() if received[rank]},
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = {rank: torch.full_like(x, float("nan")) for rank in self._far}
        self._swap(dict.fromkeys(self._far, x), parts)
        parts[self._rank.rank] = x.clone()
        self._world.tasks.point()
        x.copy_(torch.stack([parts[rank] for rank in self._ranks]).float().sum(0))

    def _swap(self, given: dict[int, torch.Tensor], places: dict[int, torch.Tensor]) -> None:
        """Send ``given``, by receiver; what arrives goes to ``places``, by sender."""
        point, me, tasks = self._world.tasks.point, self._rank.rank, self._world.tasks
        for other, data in given.items():
            point()
            self._sent[me, self._number, other] = _bytes_of(data)
            tasks.unblock(self._world.ranks[other].engines[-1])
        for other, place in places.items():
            key = other, self._number, me
            while key not in self._sent:
                tasks.block()
            data = self._sent.pop(key)
            fits = place.is_contiguous() and place.numel() * place.element_size() == len(data)
            assert fits, f"{len(data)} bytes into {tuple(place.shape)}"
            step = max(len(data) // PIECES, 1)
            for begin in range(0, len(data), step):
                point()
                piece = data[begin : begin + step]
                ctypes.memmove(place.data_ptr() + begin, piece, len(piece))


def _bytes_of(x: torch.Tensor) -> bytes:
    assert x.is_contiguous(), "NCCL takes contiguous tensors"
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())


_SENT: WeakKeyDictionary[World, dict[tuple[int, int, int], bytes]] = WeakKeyDictionary()


def spanning(world: World, rank: int) -> SpanningTransport:
    """A transport of this rank over nodes, in place of the one that it has."""
    return SpanningTransport(world, world.ranks[rank], _SENT.setdefault(world, {}))
