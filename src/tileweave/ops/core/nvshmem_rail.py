"""The rail of ``TILEWEAVE_RAIL=nvshmem``: kernels put data into memory of the other nodes, in place
of NCCL. It was never run across a network.

Every collective here is an exchange of messages between pairs of ranks. A message that is larger
than a slot goes in several transfers, one after the other. Both ranks of a pair know both sizes, so
they make as many transfers. ``kernels/rail.py`` has the protocol of a pair.

Memory of each rank for N ranks, taken from the heap of the process (``transport/nvshmem.py``):

    signals [N - 1, 2, CHANNELS] of 64 bits | staging | slots [N - 1, 2]

On GPUs NCCL compares nothing. Here each signal has a checksum of the call and of the size, so ranks
of a rail that make different calls raise :class:`RankMismatchError`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from tileweave.errors import CaptureError, PeerTimeout, RankMismatchError
from tileweave.kernels import rail as kernels
from tileweave.kernels.rail import CHANNELS, GRAIN, UNITS
from tileweave.ops.core.ways import add_in_order
from tileweave.transport import protocol
from tileweave.transport.interface import Spanning
from tileweave.transport.lasting_memory import lasting
from tileweave.transport.nvshmem import Heap, device_library, initialise_module
from tileweave.transport.rail import StreamOfRail
from tileweave.transport.shared_fault import SharedFault
from tileweave.transport.torch_collectives import agree_on_memory
from tileweave.transport.workspace import first_words, timeout_seconds

_SLOT_BYTES = 32 << 20  # of all peers together
_OP = "an exchange between nodes by NVSHMEM"


class Message(NamedTuple):
    """``nbytes`` at an address of this rank."""

    address: int
    nbytes: int


def _message(x: torch.Tensor) -> Message:
    assert x.is_contiguous(), "parts of a transfer are contiguous"
    return Message(x.data_ptr(), x.numel() * x.element_size())


class _Pair(NamedTuple):
    """Where the memory of a pair is, in addresses of this rank: ``slots`` and ``signals`` are
    those of this rank, which the peer writes; ``far_slots`` and ``far_signals`` those at the
    peer."""

    pe: int
    slots: int
    signals: int
    far_slots: int
    far_signals: int
    epochs: int


class Pairs:
    """The pairs of this rank with the other ranks of ``ranks``. Making it is collective over the
    group of ``transport``, whose ranks all make one of as many ranks."""

    def __init__(self, transport: Spanning, heap: Heap, ranks: Sequence[int]) -> None:
        me, others = transport.rank, len(ranks) - 1
        grain = GRAIN * CHANNELS
        self.slot_bytes = slot = _SLOT_BYTES // max(others, 1) // grain * grain
        words = 2 * CHANNELS  # of a pair
        signals = -(-8 * words * others // 1024) * 1024
        nbytes = signals + slot + 2 * slot * others
        begin, failure = heap.take(nbytes)
        places = list(map(int, agree_on_memory(nbytes, failure, str(begin), transport.exchange)))
        self.staging = heap.base + begin + signals
        epochs = torch.zeros(max(others, 1), CHANNELS, dtype=torch.int64)
        self._epochs = lasting(lambda: epochs.to(transport.device), transport.device)
        self.of: dict[int, _Pair] = {}
        for number, peer in enumerate(other for other in ranks if other != me):
            mine = [other for other in ranks if other != peer].index(me)  # among the peer's peers
            own, far = heap.base + begin, heap.base + places[peer]
            self.of[peer] = _Pair(
                dist.get_global_rank(transport.group, peer),
                own + signals + slot + 2 * slot * number,
                own + 8 * words * number,
                far + signals + slot + 2 * slot * mine,
                far + 8 * words * mine,
                self._epochs[number].data_ptr(),
            )


class NvshmemRail(StreamOfRail):
    """Implements :class:`tileweave.transport.interface.Rail`. Making it is collective over the
    group of ``transport``."""

    def __init__(self, transport: Spanning) -> None:
        self._interpreted = kernels.INTERPRETED
        if not self._interpreted:
            super().__init__(transport.device)
        self._transport, self._heap = transport, transport.heap()
        self._ranks = transport.topology.rail(transport.rank)
        self._me = self._ranks.index(transport.rank)
        self._rail = Pairs(transport, self._heap, self._ranks)
        every = tuple(range(transport.world_size))
        self._all = self._rail if self._ranks == every else Pairs(transport, self._heap, every)
        self._seconds = timeout_seconds()
        self._fault = SharedFault(transport)  # kernels follow its list
        self._control = self._fault.control_block(_OP, self._seconds, first_words(self._seconds))
        self._report, self._words = self._fault.report, self._fault.words
        self._call = self._transfers = 0
        self._library = "" if self._interpreted else device_library()
        for kernel in (kernels.put_kernel, kernels.take_kernel):
            self._launch_of(kernel, UNITS[0])
        transport.barrier()  # compiling takes some ranks longer

    # --- Faults ---

    def check(self) -> None:
        words = self._words
        if not words[protocol.REPORT_SET]:
            return
        rank, peer = self._transport.rank, int(words[protocol.REPORT_SIGNAL])
        expected, seen = int(words[protocol.REPORT_EXPECTED]), int(words[protocol.REPORT_SEEN])
        if seen >= expected:
            raise RankMismatchError(
                f"asked: calls over nodes that differ on ranks {rank} and {peer}, in transfer "
                f"{expected} between them; allowed: the same operators in the same order, with the "
                "same shapes and dtypes on every rank; remedy: look at what these ranks pass, then "
                "tileweave.close(group), and call again on every rank"
            )
        unit = int(words[protocol.REPORT_UNIT])
        raise PeerTimeout(_OP, rank, peer, unit, expected, seen, self._seconds)

    # --- Rail ---

    def agree(self, call: int) -> Mapping[int, int]:
        self.check()
        self._call, self._transfers = call, 0
        return {}

    def begin(self, transfer: Callable[[], None]) -> Callable[[], None]:
        if not self._interpreted:
            return super().begin(transfer)
        transfer()
        return lambda: None

    def join(self) -> None:
        if not self._interpreted:
            super().join()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        places = out.view(len(self._ranks), *x.shape)
        given = {rank: x for rank in self._far}
        self._swap(self._rail, given, {r: places[at] for at, r in enumerate(self._ranks)})
        places[self._me].copy_(x)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        given, places = (dict(zip(self._ranks, parts.unbind(), strict=True)) for parts in (x, out))
        self._swap(self._rail, given, places)

    def all_reduce(self, x: torch.Tensor) -> None:
        count = len(self._ranks)
        if count == 2:  # as many bytes, in one step
            arrived = x.new_empty(2, *x.shape)
            far = self._far[0]
            self._swap(self._rail, {far: x}, {far: arrived[1 - self._me]})
            add_in_order(x, arrived, self._me, x)
            return
        each = -(-x.numel() // count)
        given = x.new_zeros(count, each)
        given.view(-1)[: x.numel()].copy_(x.view(-1))
        arrived, own = torch.empty_like(given), x.new_empty(each)
        self.all_to_all(arrived, given)
        add_in_order(given[self._me], arrived, self._me, own)
        self.all_gather(arrived, own)
        x.view(-1).copy_(arrived.view(-1)[: x.numel()])

    def all_to_all_parts(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        given, places = (dict(enumerate(t.split(n))) for t, n in ((x, sent), (out, received)))
        me = self._transport.rank
        places[me].copy_(given[me])
        self._swap(self._all, given, places)

    @property
    def _far(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._transport.rank]

    # --- Transfers ---

    def _swap(
        self, pairs: Pairs, given: Mapping[int, torch.Tensor], places: Mapping[int, torch.Tensor]
    ) -> None:
        """Send ``given``, by receiver; what arrives goes to ``places``, by sender."""
        self._transfers += 1
        me = self._transport.rank
        # those after this rank first, so that no rank has two senders at a time
        turn = sorted(pairs.of, key=lambda peer: (peer < me, peer))
        sizes = {peer: (_message(given[peer]), _message(places[peer])) for peer in turn}
        slot, begin = pairs.slot_bytes, 0
        while True:
            left = {
                peer: (_rest(sent, begin, slot), _rest(got, begin, slot))
                for peer, (sent, got) in sizes.items()
                if begin < max(sent.nbytes, got.nbytes)
            }
            if not left:
                return
            for peer, (sent, _) in left.items():
                self._put(pairs, peer, sent, begin)
            for peer in reversed(left):
                self._take(pairs, peer, left[peer][1], begin)
            begin += slot

    def _put(self, pairs: Pairs, peer: int, sent: Message, begin: int) -> None:
        pair = pairs.of[peer]
        self._launch_of(kernels.put_kernel, _unit(sent))(
            *sent,
            pairs.staging,
            pair.far_slots,
            pairs.slot_bytes,
            _piece(sent.nbytes),
            pair.far_signals,
            pair.epochs,
            self._mark(sent, begin),
            self._control.data_ptr(),
            pair.pe,
        )

    def _take(self, pairs: Pairs, peer: int, got: Message, begin: int) -> None:
        pair = pairs.of[peer]
        with self._checked():
            self._launch_of(kernels.take_kernel, _unit(got))(
                *got,
                pair.slots,
                pairs.slot_bytes,
                _piece(got.nbytes),
                pair.signals,
                pair.epochs,
                self._mark(got, begin),
                self._control.data_ptr(),
                self._report.data_ptr(),
                peer,
            )

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """An interpreted kernel has ended by now; its report says more than its error."""
        try:
            yield
        finally:
            if self._interpreted:
                self.check()

    def _mark(self, message: Message, begin: int) -> int:
        """What the two ranks of a transfer must agree on, in 32 bits."""
        what = f"{self._call} {self._transfers} {begin} {message.nbytes}"
        return zlib.crc32(what.encode())

    def _launch_of(self, kernel: object, unit: int) -> kernels.Launch:
        device = self._transport.device.index or 0
        if self._transport.capturing() and not kernels.is_ready(kernel, unit, device):
            raise CaptureError(
                "asked: the first transfer by NVSHMEM of tensors at such addresses under CUDA-"
                "graph capture; allowed: capture after a call that compiled its kernels; "
                "remedy: make the call with these tensors before, on every rank"
            )
        return kernels.launch_of(kernel, unit, device, self._library, initialise_module)


def _rest(message: Message, begin: int, most: int) -> Message:
    """What of ``message`` goes in one transfer."""
    return Message(message.address + begin, min(max(message.nbytes - begin, 0), most))


def _piece(nbytes: int) -> int:
    """Bytes of the message that one channel moves."""
    return max(-(-nbytes // (CHANNELS * GRAIN)), 1) * GRAIN


def _unit(message: Message) -> int:
    """The largest element by which a message can be copied."""
    return next(unit for unit in UNITS if not (message.address | message.nbytes) % unit)
