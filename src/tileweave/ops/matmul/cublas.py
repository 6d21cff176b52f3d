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
from torch.nn.functional import linear

from tileweave.kernels.all_reduce.collective import Shards, launcher, slot_elements
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.concurrent_gather import GatherCall, begin
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.workspace import Instance, Workspace

INSTANCE = (
    "library"  # an instance of its own: its slots have another layout than those of a fused kernel
)
MOST_KEPT = 16 << 20  # bytes of gather(x): an allocation takes 4 us of 40


@dataclass(slots=True)
class GatherThenMultiply:
    """Calls of one shape: ``y [R * m, n] = gather(x [m, K]) @ w [n, K].T + bias``.

    whole : where gather(x) is stored in eager calls that do not return it, if that is small.
    """

    instance: Instance
    launch: Launcher
    whole: torch.Tensor | None

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        gathered: torch.Tensor | None,
        checksum: int = 0,
    ) -> torch.Tensor:
        """Return y, in ``out`` if given; store gather(x) in ``gathered`` if given."""
        instance = self.instance
        capturing = instance.begin(checksum)
        whole = gathered if gathered is not None else None if capturing else self.whole
        if whole is None:
            whole = x.new_empty(instance.world_size * x.shape[0], x.shape[1])
        try:
            self.launch(x, whole)
        finally:
            instance.launched()
        if out is None:
            return linear(whole, w, bias)  # takes 4 us less than an allocation and mm(out=)
        multiply(whole, w, bias, out)
        return out


def gather_then_multiply(
    workspace: Workspace, op: str, x: torch.Tensor, config: MatmulConfig
) -> GatherThenMultiply:
    """Make the calls of x [m, K]."""
    instance, size = workspace.instance(op, INSTANCE), workspace.transport.world_size
    key = (x.shape, x.dtype, config)
    call = instance.cache.get(key)
    if call is None:
        launch = _launcher(workspace, instance, config, x)
        nbytes, whole = size * x.numel() * x.element_size(), None
        if nbytes <= MOST_KEPT:
            # Of no use to any other call while this one needs it: launches of a device are in
            # order, also across streams, and a launch comes after all work of the last one's stream
            kept = instance.scratch(MOST_KEPT)[:nbytes]
            whole = kept.view(x.dtype).view(size * x.shape[0], x.shape[1])
        call = GatherThenMultiply(instance, launch, whole)
        instance.keep(key, call)
    return call  # type: ignore[return-value]


def multiply_shards(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    instance: Instance,
    call: GatherCall,
    checksum: int = 0,
) -> None:
    """As :func:`gather_then_multiply`, one shard at a time, while copy engines bring the next."""
    rows, columns = x.shape[0], w.t()
    parts = out.view(instance.world_size, rows, out.shape[1]).unbind()
    gathering = begin(instance, call, x, checksum)
    try:
        for source, shard in gathering.shards():
            if bias is None:
                torch.mm(shard, columns, out=parts[source])
            else:
                torch.addmm(bias, shard, columns, out=parts[source])
            if gathered is not None:
                gathered[source * rows : (source + 1) * rows].copy_(shard)
    finally:  # also when memory runs out: the next gather would find the signals of this one
        gathering.end(out, *(() if gathered is None else (gathered,)))


def multiply(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = x @ w.T + bias."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


def _launcher(
    workspace: Workspace, instance: Instance, config: MatmulConfig, x: torch.Tensor
) -> Launcher:
    transport, shards = workspace.transport, Shards.in_a_row(x.numel())
    size = transport.world_size
    instance.reserve(slot_elements(shards, size, False, True) * x.element_size())
    return launcher(
        endpoint(instance, x.dtype),
        size,
        transport.rank,
        shards,
        transport.machine.num_sms,
        config,
        False,
        True,
    )
