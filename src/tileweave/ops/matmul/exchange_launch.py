"""cuBLAS, and an all-to-all in one launch before or after it.

The launch stores parts where they belong (``kernels/all_to_all/exchange.py``), so that cuBLAS reads
and writes whole matrices and nothing is permuted. It is for sizes where communication is too short
to overlap, or where cuBLAS is faster than a matmul that waits for peers (decision 0014). Planners
choose (``MatmulConfig.kernel == "library"``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileweave.errors import require
from tileweave.kernels.all_to_all.exchange import launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.cublas import INSTANCE, MOST_KEPT
from tileweave.ops.matmul.products import multiply
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.workspace import Instance, Workspace


@dataclass(slots=True)
class ExchangeLaunch:
    """Launches for a matrix of one shape, with a matmul before or after them.

    shape : of the exchanged matrix.
    kept : in eager calls, memory for what is between exchange and matmul and is not returned, if
        it is small.
    """

    instance: Instance
    launch: Launcher
    shape: tuple[int, int]
    kept: torch.Tensor | None

    def then_multiply(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        exchanged: torch.Tensor | None,
        checksum: int,
    ) -> torch.Tensor:
        """Return exchanged(x) @ w.T + bias, in ``out`` if given; store exchanged(x) in
        ``exchanged`` if given."""
        capturing = self.instance.begin(checksum)
        if exchanged is None and not capturing:
            exchanged = self.kept
        if exchanged is None:
            exchanged = x.new_empty(self.shape)
        try:
            self.launch(x, exchanged)
        finally:
            self.instance.launched()
        return multiply(exchanged, w, bias, out)

    def after_multiply(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        checksum: int,
    ) -> None:
        """out = x @ w.T + bias, exchanged."""
        kept = None if self.instance.begin(checksum) else self.kept
        try:
            # after begin(): the matmul, too, comes after launches on other streams
            self.launch(multiply(x, w, bias, kept), out)
        finally:
            self.instance.launched()


def exchange_launch(
    workspace: Workspace,
    op: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    how: Exchange,
    config: MatmulConfig,
    before: bool,
) -> ExchangeLaunch:
    """Make the launches of ``op`` for a matrix of ``shape``, ``before`` a matmul or after it."""
    require(
        config.transport == "sm",
        f"{op} with cuBLAS and transport {config.transport!r}",
        'transport "sm"',
        "plan that one",
    )
    instance, key = workspace.instance(op, INSTANCE), (shape, dtype, how, config)
    call = instance.cache.get(key)
    if call is None:
        transport, size = workspace.transport, workspace.transport.world_size
        elements = shape[0] * shape[1]
        instance.reserve((size - 1) * (elements // size) * dtype.itemsize)
        launch = launcher(
            endpoint(instance, dtype),
            size,
            transport.rank,
            shape,
            how,
            dtype.itemsize,
            transport.machine.num_sms,
            config,
        )
        result, nbytes, kept = how.result(*shape, size), elements * dtype.itemsize, None
        if nbytes <= MOST_KEPT:  # see ``cublas.gather_then_multiply``
            with torch.inference_mode(False):  # calls outside of it write to this view
                kept = instance.scratch(MOST_KEPT)[:nbytes].view(dtype)
                kept = kept.view(result if before else shape)
        call = ExchangeLaunch(instance, launch, result, kept)
        instance.keep(key, call)
    return call  # type: ignore[return-value]
