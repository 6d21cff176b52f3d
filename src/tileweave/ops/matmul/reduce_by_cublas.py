"""A matmul by cuBLAS, and one launch that sums its result over ranks: an all-reduce, or a
reduce-scatter.

Chunks of rows or of columns, each reduced while cuBLAS multiplies the next one, were slower at
every size: programs that wait or store over the link take multiprocessors from cuBLAS (2048 x 8192
x 14336 on two H100: 795 us in one chunk, 824 to 1086 us in two or four).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.errors import require
from tileweave.kernels.all_reduce.collective import Shards, launcher, slot_elements
from tileweave.kernels.all_reduce.norm import norm_launcher, norm_quantize_launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.cublas import INSTANCE, MOST_KEPT
from tileweave.ops.matmul.products import Added, Product, Tensors
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.workspace import Instance, Workspace


@dataclass(slots=True)
class MultiplyThenReduce:
    """Calls of one shape: the sum over ranks of product(x), plus bias, plus residual.

    partial : where product(x) is stored in eager calls, if that is small.
    """

    reduce: Launcher
    norm: Launcher
    quantizers: dict[str, Launcher]
    partial: torch.Tensor | None

    def __call__(
        self,
        instance: Instance,
        x: Tensors,
        product: Product,
        added: Added,
        out: torch.Tensor,
        residual_out: torch.Tensor | None = None,
        checksum: int = 0,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Store the sum in ``out``: [M, N], or this rank's rows [M / R, N] of it. With
        ``added.norm_weight`` ``out`` gets the norm of the sum, and ``residual_out`` the sum; with
        ``added.quantize`` ``out`` gets its FP8 data (uint8), and ``scale`` their scales."""
        sums = out if residual_out is None else residual_out
        capturing = instance.begin(checksum)
        try:
            # after begin(): the matmul, too, comes after launches on other streams
            partial = product(x, None if capturing else self.partial)
            self.reduce(partial, sums, added.bias, added.residual)
        finally:
            instance.launched()
        if added.quantize:
            launch = self.quantizers[added.quantize]
            launch(sums, added.norm_weight, added.norm_eps, out, scale)
        elif added.norm_weight is not None:
            self.norm(sums, added.norm_weight, added.norm_eps, out)


def multiply_then_reduce(
    workspace: Workspace,
    rows: int,
    product: Product,
    op: str,
    own_rows: int,
    config: MatmulConfig,
) -> tuple[Instance, MultiplyThenReduce]:
    """Make the calls of ``op`` for ``rows`` rows of x, whose result has ``own_rows`` rows."""
    instance = workspace.instance(op, INSTANCE)
    shape, dtype = (rows, product.cols), product.dtype
    key = (shape, dtype, own_rows, config)
    made = instance.cache.get(key)
    if made is None:
        made = MultiplyThenReduce(*_launchers(instance, shape, dtype, own_rows, config))
        instance.keep(key, made)
    return instance, made  # type: ignore[return-value]


def _launchers(
    instance: Instance,
    shape: tuple[int, int],
    dtype: torch.dtype,
    own_rows: int,
    config: MatmulConfig,
) -> tuple[Launcher, Launcher, dict[str, Launcher], torch.Tensor | None]:
    transport, (rows, cols) = instance.transport, shape
    size, everywhere, one_shot = transport.world_size, own_rows == rows, config.shots == 1
    require(
        everywhere or not one_shot,
        "a reduce-scatter in one shot",
        "an all-reduce",
        "pass a config with shots=2",
    )
    if not everywhere:
        shards = Shards.of_rows(own_rows, cols)
    elif one_shot:
        shards = Shards.of_all(rows, cols)
    else:
        shards = Shards.of_columns(rows, cols, size)
        # two ranks without columns would send each other nothing, and not see that one is absent
        if shards.cols * (size - 2) >= cols:
            shards, one_shot = Shards.of_all(rows, cols), True
    gather = everywhere and not one_shot
    elements = slot_elements(shards, size, True, gather, one_shot)
    instance.reserve(elements * dtype.itemsize)
    reduce = launcher(
        endpoint(instance, dtype),
        size,
        transport.rank,
        shards,
        transport.machine.num_sms,
        config,
        True,
        gather,
    )
    quantizers = {
        kind: norm_quantize_launcher(rows, cols, kind == "block") for kind in ("row", "block")
    }
    partial, nbytes = None, rows * cols * dtype.itemsize
    if nbytes <= MOST_KEPT:  # of no use to any other call, see gather_then_multiply()
        with torch.inference_mode(False):  # calls outside of it write to this view
            partial = instance.scratch(MOST_KEPT)[:nbytes].view(dtype).view(rows, cols)
    return reduce, norm_launcher(rows, cols), quantizers, partial
