"""The contract between operators and symmetric memory.

A *symmetric buffer* is the same number of bytes on each rank, mapped by all ranks of its node. A
transfer writes data into a *slot* of a peer's buffer, then a *signal* there: an int32 word that
takes the *epoch*, the number of the call.

These guarantees hold:

- Allocation is collective, in the same order on every rank, and ends in a barrier. When it returns,
  the memory of every peer is mapped and signals are zero.
- A signal is written after the data it announces. A program that has seen ``signal >= epoch`` may
  read that data.
- In every call each rank signals every peer and waits for all peers before the call ends. So when
  call n of a rank is complete, each peer has begun call n and has ended call n-1, and what call n-1
  read may be overwritten. Slots alternate: call n+1 writes where call n-1 wrote. No barrier is
  needed.
- Epochs are in device memory and the device advances them, so each replay of a captured graph has
  new epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tileweave.planning.machine import Machine
    from tileweave.planning.topology import Topology
    from tileweave.transport.nvshmem import Heap


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """Symmetric memory, as this rank sees it.

    local : the bytes of this rank, uint8.
    addresses : where the bytes of each rank are mapped here, in rank order; 0 for a rank of another
        node.
    handle : the object that keeps the memory of peers mapped.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    handle: object = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy between two addresses that are mapped on this rank: a push or a pull.

    target, source : addresses. 0 is the address that is given to ``Transport.push``, plus
        ``offset``.
    nbytes : bytes per row.
    offset : in bytes, added to the address that is given.
    counter, count : if ``counter`` is not 0, it is an address on this device; the copy begins after
        the int32 there has reached ``count``.
    lane : copies of a lane run in order; lanes run concurrently. The last copy of a push is in lane
        0 and follows all others.
    rows, target_pitch, source_pitch : number of rows, and bytes from row to row.
    aside : only the last copy of a push need follow this one; the next copy of its lane may pass
        it.
    """

    target: int
    source: int
    nbytes: int
    offset: int = 0
    counter: int = 0
    count: int = 0
    lane: int = 0
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0
    aside: bool = False

    def ends(self, given: int) -> tuple[int, int]:
        """(target, source) if a push is given the address ``given``."""
        return self.target or given + self.offset, self.source or given + self.offset

    def pieces(self, given: int) -> Iterator[tuple[int, int]]:
        """(target, source) of each row."""
        target, source = self.ends(given)
        for row in range(self.rows):
            yield target + row * self.target_pitch, source + row * self.source_pitch


class Copies(tuple[Copy, ...]):
    """Copies that serve many calls, so that a transport may prepare them.

    kept : an address whose memory is there as long as the transport; a push need not look whether
        it still is. 0: none.
    """

    kept = 0

    @cached_property
    def pitched(self) -> bool:
        """Whether any of them has several rows."""
        return any(copy.rows > 1 for copy in self)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What calls of one shape exchange with the ranks of their rail, chunk by chunk.

    chunks : bytes [begin, end) of each chunk that is sent; one of the same size arrives from each
        other rank of the rail.
    targets : for each chunk, where it arrives in memory of this rank (uint8), by rank of the rail
        without this one.
    arrived : for each chunk, copies of words in memory of this rank that announce it.
    """

    chunks: tuple[tuple[int, int], ...]
    targets: tuple[tuple[torch.Tensor, ...], ...]
    arrived: tuple[tuple[Copy, ...], ...]


@dataclass(frozen=True, slots=True)
class Sending:
    """The crossing of one call.

    data : uint8, contiguous: what chunks are parts of.
    call : a number for this call; ranks of a rail exchange theirs first.
    agrees : ``agrees(calls)``, with the numbers of the other ranks by rank: whether they make the
        same call. If not, nothing more is exchanged.
    """

    crossing: Crossing
    data: torch.Tensor
    call: int
    agrees: Callable[[Mapping[int, int]], bool]


Watcher = Callable[[Sequence[Copy], int, int], None]


class Rail(Protocol):
    """Collectives of the ranks with the index of this one inside their nodes: on a GPU by NCCL, or
    by NVSHMEM if asked, on a stream of their own; on the CPU by gloo, done when they begin.

    A rank that does not come is a ``PeerTimeout``; NCCL has its own time-out.
    Tensors are contiguous and of the same shape on all ranks.
    """

    def agree(self, call: int) -> Mapping[int, int]:
        """Tell the others a number for the call that follows, and return theirs, by rank. Empty on
        GPUs, where the host does not wait for peers."""
        ...

    def begin(self, transfer: Callable[[], None]) -> Callable[[], None]:
        """Have ``transfer()``, which calls one of the methods below, run after the work queued so
        far and concurrently with work queued later. Returns what orders later work after it.
        Transfers run in the order in which they were begun."""
        ...

    def join(self) -> None:
        """Order later work after all transfers."""
        ...

    def check(self) -> None:
        """Raise what earlier transfers found wrong, if that is known here."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [N, ...] = x of all N nodes."""
        ...

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Part p of x [N, ...] goes to node p; part p of ``out``, of the same shape, comes from
        it. The own parts are not used and not defined."""
        ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = its sum over all nodes."""
        ...

    def all_to_all_parts(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Among all ranks of the group: ``sent[p]`` elements of x to rank p, ``received[p]`` of
        ``out`` from it, both flat. Collective the first time."""
        ...


class Transport(Protocol):
    """What ``cuda.py`` and ``cpu.py`` provide for one (group, device)."""

    device: torch.device
    rank: int
    world_size: int
    machine: Machine
    topology: Topology
    # called after each push with its copies and the times when they began and ended (0: unknown)
    watch: Watcher | None

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Collective. A zeroed symmetric buffer, mapped on every rank of its node when this
        returns."""
        ...

    def share(self, nbytes: int) -> Mapping[int, Any]:
        """Collective. Zeroed host memory of each rank of this node, mapped here, by rank; empty if
        they share none."""
        ...

    def barrier(self) -> None:
        """Barrier of the group on the host, for set-up and growth only. It also waits for the work
        queued on this device."""
        ...

    def host_visible(self, words: int) -> torch.Tensor:
        """Zeroed int32 words that kernels can write and the host can read without
        synchronization."""
        ...

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
        sending: Sending | None = None,
    ) -> None:
        """Queue ``copies`` on copy engines, after the work queued so far and concurrently with the
        work queued later.

        copies : pass :class:`Copies` if they serve many calls; that costs the host least. Copies
            inside one device must be single words, because larger ones may need multiprocessors,
            which a waiting kernel occupies.
        source : the address for copies whose source or target is 0; it may differ in each call.
        queue : pushes of one queue run in order; queues do not wait for each other.
        launch : queues a kernel that runs concurrently with the copies and whose counters they may
            wait for. If it raises, no copy waits.
        capturing: whether the current stream is being captured into a CUDA graph; None: ask.
        sending : what is exchanged with other nodes concurrently. ``copies`` may wait for the words
            that announce chunks.
        """
        ...

    def join(self, queue: int = 0) -> None:
        """Order the work queued later after the last :meth:`push` of ``queue``, and after what it
        sent to other nodes."""
        ...

    def order(self) -> torch.cuda.Stream | None:
        """Order this call after the last one on this device, even one on another stream. Returns
        the stream of this call."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        ...

    def capture_number(self) -> int:
        """A number of the capture that the current stream is in, which no other capture of this
        process has; 0: it is not being captured."""
        ...

    def synchronize(self) -> None:
        """Wait until all work queued on this device is done."""
        ...

    def close(self) -> None:
        """Release all memory. Not collective: it must work when a peer is gone."""
        ...


class Spanning(Transport, Protocol):
    """A transport whose group may be on several nodes."""

    group: dist.ProcessGroup

    def rail(self) -> Rail:
        """What reaches other nodes. Collective the first time."""
        ...

    def inside(self) -> str:
        """The name of the group of the ranks of this node. Collective the first time."""
        ...

    def heap(self) -> Heap:
        """The memory of NVSHMEM, for a rail that uses it. Collective the first time."""
        ...

    def exchange(self, text: str) -> list[str]:
        """Collective. The texts of all ranks of the group, see ``rendezvous.Texts``."""
        ...
