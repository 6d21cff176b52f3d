"""Operators whose matmul is that of cuBLAS.

One kernel communicates before or after the matmul (``reduce_by_cublas.py`` has those that reduce
its result). This is for sizes where communication is too short to overlap, and cuBLAS is faster
than a matmul that waits for peers (decision 0014). An all-gather may also be multiplied by cuBLAS
one shard at a time, as copy engines bring the shards, where our matmul is slower (decision 0016).
Tables and planners choose (``MatmulConfig.kernel == "library"``, and its transport).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.kernels.all_reduce.collective import Shards, launcher, slot_elements
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.concurrent_gather import GatherCall, begin
from tileweave.ops.matmul.products import Product, Tensors
from tileweave.ops.matmul.scaled import ScaledProduct
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.workspace import Instance, Workspace

INSTANCE = (
    "library"  # an instance of its own: its slots have another layout than those of a fused kernel
)
WORD = 4  # bytes
MOST_KEPT = 16 << 20  # bytes of gather(x): an allocation takes 4 us of 40


@dataclass(slots=True)
class GatherThenMultiply:
    """Calls of one shape: ``y [R * m, n] = product(gather(x [m, K]))``.

    whole : where gather(x) is stored in eager calls that do not return it, if that is small.
    kept : its parts, if x has two.
    """

    instance: Instance
    launch: Launcher
    whole: torch.Tensor | None
    kept: Tensors = ()

    def __call__(
        self,
        x: Tensors,
        product: Product,
        out: torch.Tensor | None,
        gathered: torch.Tensor | None,
        checksum: int = 0,
    ) -> torch.Tensor:
        """Return y, in ``out`` if given; store gather(x) in ``gathered`` if given. x: the parts of
        the own shard."""
        instance, (first, *more) = self.instance, x
        capturing = instance.begin(checksum)
        whole = gathered if gathered is not None else None if capturing else self.whole
        if whole is None:
            whole = _whole_of(x, instance.world_size)
        try:
            if more:  # as words of 32 bits
                self.launch(first.view(torch.float32), whole, *more)
            else:
                self.launch(first, whole)
        finally:
            instance.launched()
        if not more:
            return product((whole,), out)
        data, scales = (
            self.kept if whole is self.whole else _parts_of(whole, x, instance.world_size)
        )
        assert isinstance(product, ScaledProduct), "what takes two parts"
        return product.of_all_ranks(data, scales, out)


def _whole_of(x: Tensors, size: int) -> torch.Tensor:
    """Memory for gather(x); of two parts for both, as words."""
    if len(x) == 1:
        return x[0].new_empty(size * x[0].shape[0], x[0].shape[1])
    return x[1].new_empty(size * (x[0].numel() // WORD + x[1].numel()))


def _parts_of(whole: torch.Tensor, x: Tensors, size: int) -> Tensors:
    """Both parts of gather(x): data [R * m, K], and scales [R, ...] as they travel."""
    (first, scale), end = x, size * x[0].numel() // WORD
    data = whole[:end].view(first.dtype).view(size * first.shape[0], first.shape[1])
    return data, whole[end:].view(size, *scale.shape)


def gather_then_multiply(
    workspace: Workspace, op: str, x: Tensors, config: MatmulConfig
) -> GatherThenMultiply:
    """Make the calls of x, the parts of a shard: one [m, K], or FP8 data and its float32 scales."""
    instance, size = workspace.instance(op, INSTANCE), workspace.transport.world_size
    key = (*((part.shape, part.dtype) for part in x), config)
    call = instance.cache.get(key)
    if call is None:
        launch = _launcher(workspace, instance, config, x)
        nbytes, whole = size * sum(part.numel() * part.element_size() for part in x), None
        if nbytes <= MOST_KEPT:
            # Of no use to any other call while this one needs it: launches of a device are in
            # order, also across streams, and a launch comes after all work of the last one's stream
            kept = instance.scratch(MOST_KEPT)[:nbytes]
            if len(x) == 1:
                whole = kept.view(x[0].dtype).view(size * x[0].shape[0], x[0].shape[1])
            else:
                whole = kept.view(torch.float32)
        views = _parts_of(whole, x, size) if whole is not None and len(x) > 1 else ()
        call = GatherThenMultiply(instance, launch, whole, views)
        instance.keep(key, call)
    return call  # type: ignore[return-value]


def multiply_shards(
    x: Tensors,
    product: Product,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    instance: Instance,
    call: GatherCall,
    checksum: int = 0,
) -> None:
    """As :func:`gather_then_multiply`, one shard at a time, while copy engines bring the next.
    x: the parts of the own shard."""
    sizes = [x[0].shape[0]] * instance.world_size
    places = out.split_with_sizes(sizes)  # chunk() takes half as long again
    kept = () if gathered is None else gathered.split_with_sizes(sizes)
    store = product.repeated()
    gathering = begin(instance, call, x, checksum)
    try:
        for source, shard in gathering.shards():
            store(shard, places[source])
            if kept:
                kept[source].copy_(shard[0])
    finally:  # also when memory runs out: the next gather would find the signals of this one
        gathering.end(out, *(() if gathered is None else (gathered,)))


def _launcher(
    workspace: Workspace, instance: Instance, config: MatmulConfig, x: Tensors
) -> Launcher:
    transport, (first, *more), dtype = workspace.transport, x, x[-1].dtype
    split = first.numel() // WORD if more else 0
    shards = Shards.in_a_row(split + more[0].numel() if more else first.numel(), split)
    size = transport.world_size
    instance.reserve(slot_elements(shards, size, False, True) * dtype.itemsize)
    return launcher(
        endpoint(instance, dtype),
        size,
        transport.rank,
        shards,
        transport.machine.num_sms,
        config,
        False,
        True,
    )
