"""An all-gather by copy engines beside whatever runs meanwhile: in backward x is gathered while the
input gradient is made, in forward the library multiplies shard after shard.

NCCL's kernels need multiprocessors, so they may not run beside a kernel that fills the device and
waits for peers (decision 0020); copy engines may. What arrives stays in symmetric memory, where
matmuls read it: decisions 0020, 0016.
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
from tileweave.transport.workspace import CALL, GATHER, Instance

if TYPE_CHECKING:
    from tileweave.kernels.all_gather.await_shards import ShardLaunches

OP = "all_gather_matmul"
QUEUE = 1  # of copies: those of the kernel beside us do not queue behind ours


@dataclass(slots=True)
class _Call:
    """What gathers of one shape share."""

    endpoint: Peers
    slots: tuple[torch.Tensor, ...]  # [R m, K] each
    copies: tuple[Copies, ...]
    mark: int
    launches: ShardLaunches


@dataclass(slots=True)
class Gathering:
    """An all-gather under way; see :func:`begin_gather`."""

    _instance: Instance
    _x: torch.Tensor
    _call: _Call
    _whole: torch.Tensor
    _capturing: bool

    def wait(self) -> torch.Tensor:
        """gather(x) [R m, K], until the next gather on this device: read it on this stream, and
        keep no view of it."""
        from tileweave.kernels.all_gather.await_shards import await_shards

        transport = self._instance.transport
        self._end(
            lambda: await_shards(
                self._call.endpoint,
                self._x,
                self._whole,
                transport.world_size,
                transport.rank,
                transport.machine.num_sms,
            )
        )
        return self._whole

    def shards(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank, its shard [m, K]) by order of arrival, own one first: what is queued next finds it
        there. Then :meth:`end`."""
        rank, size, rows = (
            self._instance.transport.rank,
            self._instance.transport.world_size,
            self._x.shape[0],
        )
        yield rank, self._x
        for source in arrival_order(rank, size)[1:]:
            self._call.launches.await_shard(source)
            yield source, self._whole[source * rows : (source + 1) * rows]

    def end(self, *made: torch.Tensor) -> None:
        """Behind all that reads :meth:`shards`, in place of :meth:`wait`; what was ``made`` of them
        is NaN after a time-out."""
        self._end(lambda: self._call.launches.end_gather(made))

    def _end(self, launch: Callable[[], None]) -> None:
        instance = self._instance
        try:
            launch()
        finally:
            # As in push_with_launch: the kernel on a device ends behind our pushes anyway.
            if self._capturing or not self._whole.is_cuda:
                instance.transport.join(QUEUE)
            instance.launched()
        CALL.posted = False  # it has been made: what breaks off from here on is what follows


def too_large(x: torch.Tensor) -> bool:
    """Whether the kernel of a gather, which counts the elements of a shard in 32 bits, cannot take
    x."""
    return x.numel() > MOST_ELEMENTS


def begin_gather(x: torch.Tensor, group_name: str, mark: int = 0) -> Gathering:
    """Send x [m, K], contiguous, the same shape on every rank and not :func:`too_large`, to all.

    One gather at a time, and each must be waited for, or ended. ``mark``: a checksum of what ranks
    must agree on, if not of x.

    Raises
    ------
    CaptureError under a capture that no call as large went before.
    """
    workspace = workspace_of(group_name, x.device)
    transport = workspace.transport
    instance = workspace.instance(OP, GATHER)
    call = instance.cache.get((x.shape, x.dtype)) or _prepare(instance, x)
    assert isinstance(call, _Call), "its key has a shape, endpoints have a dtype alone"
    capturing = instance.begin(mark or call.mark)
    slot = copy_slot(instance)
    await_frozen_slot(instance, call.endpoint)
    transport.push(call.copies[slot], x.data_ptr(), QUEUE)
    instance.calls += 1
    return Gathering(instance, x, call, call.slots[slot], capturing)


def begin_gather_of_backward(x: torch.Tensor, group_name: str) -> Gathering:
    """:func:`begin_gather`, whose CaptureError says what a capture of backward needs."""
    try:
        return begin_gather(x, group_name)
    except CaptureError as error:
        raise CaptureError(
            f"asked: the backward of {OP} under CUDA-graph capture, whose gather of x {tuple(x.shape)} has no memory yet; "
            f"allowed: a capture behind a backward as large; remedy: call tw.warmup({OP!r}, ..., backward=True) before it"
        ) from error


def _prepare(instance: Instance, x: torch.Tensor) -> _Call:
    from tileweave.kernels.all_gather.await_shards import shard_launches

    transport, nbytes = instance.transport, x.numel() * x.element_size()
    rank, size = transport.rank, transport.world_size
    instance.reserve(size * nbytes)
    slots, pushes = [], []
    for slot in (0, 1):
        begin = slot * instance.slot_bytes
        slots.append(
            instance.slots[begin : begin + size * nbytes]
            .view(x.dtype)
            .view(size * x.shape[0], x.shape[1])
        )
        copies = []
        for peer in push_order(rank, size):
            copies.append(Copy(instance.slot_addresses[peer] + begin + rank * nbytes, 0, nbytes))
            copies.append(instance.signal_copy(peer, instance.layout.data(rank)))
        copies.append(instance.signal_copy(rank, instance.layout.pushed))
        pushes.append(Copies(copies))
    mark = checksum_of({"op": "gather", "shapes": [list(x.shape)], "dtype": str(x.dtype)})
    peers = endpoint(instance, x.dtype)
    call = _Call(peers, tuple(slots), tuple(pushes), mark, shard_launches(peers, size, rank))
    instance.keep((x.shape, x.dtype), call)
    return call
