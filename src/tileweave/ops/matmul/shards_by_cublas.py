"""A reduce-scatter whose matmul is cuBLAS for one rank's rows at a time, while copy engines send
the product before.

``kernels/reduce_scatter/sum_shards.py`` has the protocol. The counterpart of
``cublas.multiply_shards``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.kernels.reduce_scatter.sum_shards import sum_launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import await_frozen_slot, copy_slot, endpoint
from tileweave.ops.matmul.products import Added, Product, Tensors
from tileweave.planning.schedules.gather import push_order
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.workspace import CALL, GATHER, Instance, Workspace

QUEUE = 1


@dataclass(slots=True)
class ShardSums:
    """Calls of one shape: this rank's rows [m, N] of the sum over ranks of product(x).

    slots : per slot, [R, m, N].
    copies : per slot, (rank, copies of the product for its rows), in the order of sending.
    staged : the products of eager calls, [m, N] each, in that order, and the own one. Always the
        same memory, since graphs of copies have its address.
    """

    peers: Peers
    slots: tuple[torch.Tensor, ...]
    copies: tuple[tuple[tuple[int, Copies], ...], ...]
    launch: Launcher
    staged: tuple[torch.Tensor, ...] = ()

    def __call__(
        self,
        instance: Instance,
        x: Tensors,
        product: Product,
        added: Added,
        out: torch.Tensor,
        checksum: int = 0,
    ) -> None:
        """Store the sum, plus bias, in ``out``. x: its parts, for the rows of all ranks in turn;
        ``product.rows_of`` takes those of one."""
        transport, rank, rows = instance.transport, instance.transport.rank, out.shape[0]
        capturing = instance.begin(checksum)
        slot = copy_slot(instance)
        if capturing:
            staged = out.new_empty(instance.world_size, *out.shape).unbind()
        else:
            staged = self.staged or self._stage(instance, out)
        source, store = staged[0].data_ptr(), product.repeated()
        await_frozen_slot(instance, self.peers)
        try:
            for (owner, copies), place in zip(self.copies[slot], staged, strict=False):
                store(product.rows_of(x, owner * rows, rows), place)
                transport.push(copies, source, QUEUE, None, capturing)
            store(product.rows_of(x, rank * rows, rows), staged[-1])
            self.launch(self.slots[slot], staged[-1], added.bias, out)
            instance.calls += 1
            CALL.posted = False  # the call has been made
        finally:
            if capturing or not out.is_cuda:
                transport.join(QUEUE)
            instance.launched()

    @torch.inference_mode(False)  # calls outside of it write to these views
    def _stage(self, instance: Instance, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = instance.world_size * out.numel()
        memory = instance.scratch(count * out.element_size()).view(out.dtype)
        for _, copies in (*self.copies[0], *self.copies[1]):
            copies.kept = memory.data_ptr()
        self.staged = memory.view(instance.world_size, *out.shape).unbind()
        return self.staged


def shard_sums(
    workspace: Workspace, op: str, rows: int, product: Product
) -> tuple[Instance, ShardSums]:
    """Make the calls of ``op`` whose result has ``rows`` rows."""
    instance = workspace.instance(op, GATHER)
    key = (rows, product.cols, product.dtype)
    made = instance.cache.get(key)
    if made is None:
        made = _make(instance, rows, product.cols, product.dtype)
        instance.keep(key, made)
    return instance, made  # type: ignore[return-value]


def _make(instance: Instance, rows: int, cols: int, dtype: torch.dtype) -> ShardSums:
    transport, nbytes = instance.transport, rows * cols * dtype.itemsize
    rank, size = transport.rank, transport.world_size
    instance.reserve(size * nbytes)
    slots, pushes = [], []
    for slot in (0, 1):
        begin = slot * instance.slot_bytes
        whole = instance.slots[begin : begin + size * nbytes].view(dtype)
        slots.append(whole.view(size, rows, cols))
        of_slot = []
        order = push_order(rank, size)
        for at, peer in enumerate(order):
            target = instance.slot_addresses[peer] + begin + rank * nbytes
            copies = [
                Copy(target, 0, nbytes, at * nbytes),
                instance.signal_copy(peer, instance.layout.data(rank)),
            ]
            if at == len(order) - 1:
                copies.append(instance.signal_copy(rank, instance.layout.pushed))
            of_slot.append((peer, Copies(copies)))
        pushes.append(tuple(of_slot))
    peers = endpoint(instance, dtype)
    launch = sum_launcher(peers, size, rank, rows, cols, transport.machine.num_sms)
    return ShardSums(peers, tuple(slots), tuple(pushes), launch)
