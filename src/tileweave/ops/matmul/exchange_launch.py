"""cuBLAS, and an all-to-all in one launch before or after it.

The launch stores parts where they belong (``kernels/all_to_all/exchange.py``), so that cuBLAS reads
and writes whole matrices and nothing is permuted. It is for sizes where communication is too short
to overlap, or where cuBLAS is faster than a matmul that waits for peers (decision 0014). Planners
choose (``MatmulConfig.kernel == "library"``).
"""

from __future__ import annotations

import torch

from tileweave.errors import require
from tileweave.kernels.all_to_all.exchange import launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.cublas import INSTANCE, multiply
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.workspace import Workspace


def exchange_then_multiply(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    exchanged: torch.Tensor | None,
    how: Exchange,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """out = exchanged(x) @ w.T + bias for x [M, K]; stores exchanged(x) in ``exchanged`` if
    given."""
    if exchanged is None:
        size = workspace.transport.world_size
        exchanged = x.new_empty(how.result(x.shape[0], x.shape[1], size))
    _exchange(workspace, op, x, exchanged, how, config, checksum)
    multiply(exchanged, w, bias, out)


def multiply_then_exchange(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    how: Exchange,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """out = x [M, K] @ w [N, K].T + bias, exchanged."""
    product = x.new_empty(x.shape[0], w.shape[0])
    multiply(x, w, bias, product)
    _exchange(workspace, op, product, out, how, config, checksum)


def _exchange(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    out: torch.Tensor,
    how: Exchange,
    config: MatmulConfig,
    checksum: int,
) -> None:
    instance = workspace.instance(op, INSTANCE)
    key = (x.shape, x.dtype, how, config)
    launch = instance.cache.get(key)
    if launch is None:
        require(
            config.transport == "sm",
            f"{op} with cuBLAS and transport {config.transport!r}",
            'transport "sm"',
            "plan one of those",
        )
        transport, itemsize = workspace.transport, x.element_size()
        size = transport.world_size
        instance.reserve((size - 1) * (x.numel() // size) * itemsize)
        launch = launcher(
            endpoint(instance, x.dtype),
            size,
            transport.rank,
            (x.shape[0], x.shape[1]),
            how,
            itemsize,
            transport.machine.num_sms,
            config,
        )
        instance.keep(key, launch)
    instance.begin(checksum)
    try:
        launch(x, out)  # type: ignore[operator]
    finally:
        instance.launched()
