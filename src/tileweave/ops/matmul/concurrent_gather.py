"""An all-gather by copy engines that runs concurrently with other work.

In the backward x is gathered while the input gradient is computed; in the forward cuBLAS multiplies
one shard after the other. Kernels of NCCL need multiprocessors, so they may not run concurrently
with a kernel that fills the device and waits for peers (decision 0020); copy engines may. What
arrives stays in symmetric memory, where matmuls read it: decisions 0020, 0016.

A shard may have several parts, which arrive under one signal: FP8 data, and its scales. The first
is sent from where it is. The others, which are small, are first copied to memory of the call, since
copies know one address that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tileweave.errors import CaptureError
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import (
    await_frozen_slot,
    checksum_of,
    copy_slot,
    endpoint,
    workspace_of,
)
from tileweave.planning.problem import MOST_ELEMENTS
from tileweave.planning.schedules.gather import arrival_order, push_order
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.workspace import CALL, GATHER, Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.all_gather.await_shards import ShardLaunches

OP = "all_gather_matmul"
QUEUE = 1  # copy queue of its own: copies of the concurrent kernel do not wait for these
ALIGN = 16  # bytes: where parts after the first begin
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class GatherCall:
    """What gathers of one shape share."""

    endpoint: Peers
    slots: tuple[torch.Tensor, ...]  # [R m, K] each, of the first part
    # per slot: (rank, the parts of its shard) of all peers, by order of arrival
    shards: tuple[tuple[tuple[int, Tensors], ...], ...]
    staged: Tensors  # where copy engines read the own parts after the first
    copies: tuple[Copies, ...]
    checksum: int
    launches: ShardLaunches


@dataclass(slots=True)
class Gathering:
    """An all-gather that :func:`begin_gather` began. Call :meth:`wait`, or :meth:`shards` and
    :meth:`end`."""

    _instance: Instance
    _x: Tensors
    _call: GatherCall
    _slot: int
    _capturing: bool

    def wait(self) -> torch.Tensor:
        """Return gather(x) [R * m, K] of a shard of one part, valid until the next gather on this
        device.

        Read it on this stream, and keep no view of it.
        """
        whole = self._call.slots[self._slot]
        self._end(lambda: self._call.launches.await_all(self._x[0], whole))
        return whole

    def shards(self) -> Iterator[tuple[int, Tensors]]:
        """Yield (rank, the parts of its shard) by order of arrival, this rank's first.

        Work that is queued next finds the shard there. Call :meth:`end` after the last.
        """
        yield self._instance.transport.rank, self._x
        for source, shard in self._call.shards[self._slot]:
            self._call.launches.await_shard(source)
            yield source, shard

    def end(self, *made: torch.Tensor) -> None:
        """End the gather, after all work that reads :meth:`shards`; in place of :meth:`wait`.

        After a timeout, ``made``, the tensors that were computed from shards, become NaN.
        """
        self._end(lambda: self._call.launches.end_gather(made))

    def _end(self, launch: Callable[[], None]) -> None:
        instance, launched = self._instance, False
        try:
            launch()
            launched = self._x[0].is_cuda
        finally:
            # As in push_with_launch: on a GPU the kernel ends after the pushes anyway. Without it,
            # later work could store in the memory of x that copies still read.
            if self._capturing or not launched:
                instance.transport.join(QUEUE)
            instance.launched()
        CALL.posted = False  # the call has been made: later failures are of later calls


def too_large(x: torch.Tensor) -> bool:
    """Whether x is too large for a gather: its kernel counts elements of a shard in 32 bits."""
    return x.numel() > MOST_ELEMENTS


def begin_gather(x: torch.Tensor, group_name: str) -> Gathering:
    """Begin to send x [m, K] to all ranks.

    One gather at a time; each must be waited for, or ended.

    Parameters
    ----------
    x : [m, K], contiguous
        The same shape on every rank, and not :func:`too_large`.

    group_name : str
        The name of the group.

    Raises
    ------
    CaptureError
        CUDA-graph capture without an earlier call of that size.
    """
    made = gather_of(workspace_of(group_name, x.device), (x,))
    return begin(*made, (x,))


def gather_of(workspace: Workspace, x: Tensors) -> tuple[Instance, GatherCall]:
    """What gathers of shards with parts of these shapes share."""
    instance = workspace.instance(OP, GATHER)
    key = tuple((part.shape, part.dtype) for part in x)
    call = instance.cache.get(key) or _prepare(instance, x, key)
    assert isinstance(call, GatherCall), "keys of endpoints have no shape"
    return instance, call


def begin(instance: Instance, call: GatherCall, x: Tensors, checksum: int = 0) -> Gathering:
    """As :func:`begin_gather`, with what :func:`gather_of` returned.

    x : the parts of the shard.
    checksum : of what ranks must agree on; 0: of the shape and dtype of x.
    """
    capturing = instance.begin(checksum or call.checksum)
    slot = copy_slot(instance)
    await_frozen_slot(instance, call.endpoint)
    for place, part in zip(call.staged, x[1:], strict=True):
        place.copy_(part)
    instance.transport.push(call.copies[slot], x[0].data_ptr(), QUEUE, None, capturing)
    instance.calls += 1
    return Gathering(instance, x, call, slot, capturing)


def begin_gather_of_backward(x: torch.Tensor, group_name: str) -> Gathering:
    """As :func:`begin_gather`; its CaptureError says what a capture of a backward needs."""
    try:
        return begin_gather(x, group_name)
    except CaptureError as error:
        raise CaptureError(
            f"asked: the backward of {OP} under CUDA-graph capture, whose gather of x "
            f"{tuple(x.shape)} has no memory yet; allowed: a capture after a backward of that "
            f"size; remedy: call tw.warmup({OP!r}, ..., backward=True) before it"
        ) from error


def _prepare(instance: Instance, x: Tensors, key: object) -> GatherCall:
    from tileweave.kernels.all_gather.await_shards import shard_launches

    transport, first = instance.transport, x[0]
    shape = first.shape
    rank, size = transport.rank, transport.world_size
    each = [part.numel() * part.element_size() for part in x]  # bytes
    steps = [each[0], *(-(-nbytes // ALIGN) * ALIGN for nbytes in each[1:])]
    starts = [0]  # of each part of all ranks in a slot
    for step in steps:
        starts.append(-(-(starts[-1] + size * step) // ALIGN) * ALIGN)
    instance.reserve(starts[-1] if len(x) > 1 else size * each[0])

    def place(slot: int, part: int, source: int) -> int:
        return slot * instance.slot_bytes + starts[part] + source * steps[part]

    def parts_of(slot: int, source: int) -> Tensors:
        begins = [place(slot, part, source) for part in range(len(x))]
        return tuple(
            instance.slots[begin : begin + nbytes].view(part.dtype).view(part.shape)
            for begin, nbytes, part in zip(begins, each, x, strict=True)
        )

    with torch.inference_mode(False):  # later calls write to them
        staged = tuple(torch.empty_like(part) for part in x[1:])
    sources = [0, *(part.data_ptr() for part in staged)]
    slots, shards, pushes = [], [], []
    for slot in (0, 1):
        begin = slot * instance.slot_bytes
        whole = instance.slots[begin : begin + size * each[0]].view(first.dtype)
        slots.append(whole.view(size * shape[0], *shape[1:]))
        shards.append(
            tuple((source, parts_of(slot, source)) for source in arrival_order(rank, size)[1:])
        )
        copies = []
        for peer in push_order(rank, size):
            for part, nbytes in enumerate(each):
                target = instance.slot_addresses[peer] + place(slot, part, rank)
                copies.append(Copy(target, sources[part], nbytes))
            copies.append(instance.signal_copy(peer, instance.layout.data(rank)))
        copies.append(instance.signal_copy(rank, instance.layout.pushed))
        pushes.append(Copies(copies))
    described = {"op": "gather", "shapes": [list(shape)], "dtype": str(first.dtype)}
    if len(x) > 1:
        described["parts"] = [[list(part.shape), str(part.dtype)] for part in x[1:]]
    peers = endpoint(instance, first.dtype)
    launches = shard_launches(peers, size, rank, shape, transport.machine.num_sms)
    call = GatherCall(
        peers,
        tuple(slots),
        tuple(shards),
        staged,
        tuple(pushes),
        checksum_of(described),
        launches,
    )
    instance.keep(key, call)
    return call
