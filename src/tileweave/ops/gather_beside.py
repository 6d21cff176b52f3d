"""An all-gather by copy engines beside whatever runs meanwhile, for backward: x is gathered while the input gradient is made.

NCCL's kernels need multiprocessors, so they may not run beside a kernel that fills the device and waits for peers (decision
0052); copy engines may. What arrives stays in symmetric memory, where the weight gradient reads it: decision 0058.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.config import MOST_ELEMENTS
from tileweave.errors import CaptureError
from tileweave.kernels.endpoint import Endpoint
from tileweave.ops.registry import await_frozen_slot, copy_slot, endpoint, mark_of, workspace_of
from tileweave.schedule import push_order
from tileweave.transport.base import EPOCH, Copies, Copy
from tileweave.transport.workspace import CALL, GATHER, MAX_SLICES, Instance

OP = "all_gather_matmul"
LINE = 1  # of copies: those of the kernel beside us do not queue behind ours


@dataclass(slots=True)
class _Call:
    """What gathers of one shape share."""

    endpoint: Endpoint
    slots: tuple[torch.Tensor, ...]  # [R m, K] each
    copies: tuple[Copies, ...]
    mark: int


@dataclass(slots=True)
class Gathering:
    """An all-gather under way; see :func:`begin_gather`."""

    _instance: Instance
    _x: torch.Tensor
    _call: _Call
    _whole: torch.Tensor
    _capturing: bool

    def wait(self) -> torch.Tensor:
        """gather(x) [R m, K], until the next gather on this device: read it on this stream, and keep no view of it."""
        from tileweave.kernels.await_shards import await_shards

        instance = self._instance
        transport = instance.transport
        try:
            await_shards(
                self._call.endpoint, self._x, self._whole, transport.world_size, transport.rank, transport.machine.num_sms
            )
        finally:
            # As in push_beside: the kernel on a device ends behind our pushes anyway.
            if self._capturing or not self._whole.is_cuda:
                transport.join(LINE)
            instance.launched()
        CALL.posted = False  # it has been made: what breaks off from here on is what follows
        return self._whole


def too_large(x: torch.Tensor) -> bool:
    """Whether the kernel of a gather, which counts the elements of a shard in 32 bits, cannot take x."""
    return x.numel() > MOST_ELEMENTS


def begin_gather(x: torch.Tensor, group_name: str) -> Gathering:
    """Send x [m, K], contiguous, the same shape on every rank and not :func:`too_large`, to all.

    One gather at a time, and each must be waited for.
    """
    workspace = workspace_of(group_name, x.device)
    transport = workspace.transport
    try:
        instance = workspace.instance(OP, GATHER)
        call = instance.cache.get((x.shape, x.dtype)) or _prepare(instance, x)
    except CaptureError as error:
        raise CaptureError(
            f"asked: the backward of {OP} under CUDA-graph capture, whose gather of x {tuple(x.shape)} has no memory yet; "
            f"allowed: a capture behind a backward as large; remedy: call tw.warmup({OP!r}, ..., backward=True) before it"
        ) from error
    assert isinstance(call, _Call), "its key has a shape, endpoints have a dtype alone"
    capturing = instance.begin(call.mark)
    slot = copy_slot(instance)
    await_frozen_slot(instance, call.endpoint)
    transport.push(call.copies[slot], x.data_ptr(), LINE)
    instance.calls += 1
    return Gathering(instance, x, call, call.slots[slot], capturing)


def _prepare(instance: Instance, x: torch.Tensor) -> _Call:
    transport, nbytes = instance.transport, x.numel() * x.element_size()
    rank, size = transport.rank, transport.world_size
    instance.reserve(size * nbytes)
    epoch = instance.control.data_ptr() + 4 * EPOCH
    slots, pushes = [], []
    for slot in (0, 1):
        begin = slot * instance.slot_bytes
        slots.append(instance.slots[begin : begin + size * nbytes].view(x.dtype).view(size * x.shape[0], x.shape[1]))
        copies = []
        for peer in push_order(rank, size):
            copies.append(Copy(instance.slot_addresses[peer] + begin + rank * nbytes, 0, nbytes))
            copies.append(Copy(instance.signal_addresses[peer] + 4 * rank * MAX_SLICES, epoch, 4))
        copies.append(Copy(instance.signal_addresses[rank] + 4 * (size * MAX_SLICES + size), epoch, 4))
        pushes.append(Copies(copies))
    mark = mark_of({"op": "gather", "shapes": [list(x.shape)], "dtype": str(x.dtype)})
    call = _Call(endpoint(instance, x.dtype), tuple(slots), tuple(pushes), mark)
    instance.keep((x.shape, x.dtype), call)
    return call
