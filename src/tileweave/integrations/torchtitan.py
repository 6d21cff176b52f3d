"""torchtitan: its ``dist_gemm`` projections, and its routed experts, call tileweave.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_debugmodel_dist_gemm \
        --override.imports tileweave.integrations.torchtitan.dist_gemm
    torchrun ... -m torchtitan.train --module qwen3 --config qwen3_moe_debug \
        --override.imports tileweave.integrations.torchtitan.experts

torchtitan has modules whose projections include the collectives of sequence parallelism, over
three functions of ``torchtitan/models/common/dist_gemm.py``. This module replaces the three.
Modules, parameters and checkpoints are torchtitan's.

========================  =======================================================
function                  with tileweave
========================  =======================================================
``AllGatherLinear``       :func:`tileweave.all_gather_matmul`
``AllGatherLinearMulti``  one :func:`tileweave.all_gather_matmul` for both weights
``LinearReduceScatter``   :func:`tileweave.matmul_reduce_scatter`
========================  =======================================================

With expert parallelism, routed experts send tokens and sum results inside their grouped matmuls:
:func:`tileweave.dispatch_grouped_matmul` and :func:`tileweave.grouped_matmul_combine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tileweave.errors import InputError
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter

try:
    import spmd_types as spmd
    from torchtitan.config import override
    from torchtitan.models.common import dist_gemm as _seam
    from torchtitan.models.common.moe import RoutedExperts

    from tileweave.integrations import _torchtitan_experts
except ImportError as error:
    raise InputError(
        "asked: tileweave.integrations.torchtitan; allowed: with torchtitan 0.3; "
        f"remedy: pip install 'tileweave[torchtitan]' ({error})"
    ) from error

__all__ = ["enable", "disable", "dist_gemm", "experts"]

_LOG = logging.getLogger("tileweave")
_STOCK = {
    name: getattr(_seam, name)
    for name in ("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter")
}


def _typed(
    call: Callable[[], Any], x: torch.Tensor, group: dist.ProcessGroup, dimension: int
) -> Any:
    """The result of ``call``, of which torchtitan's checker is told the type: that of ``x``, but
    sharded over ``group`` in ``dimension``."""
    if not spmd.is_type_checking():
        return call()
    kind = {**spmd.get_local_type(x), group: spmd.S(dimension)}
    with spmd.no_typecheck():
        result = call()
    for y in result if isinstance(result, (tuple, list)) else (result,):
        spmd.assert_type(y, kind)
    return result


class AllGatherLinear:
    """x [M/R, K], w [N/R, K] -> y [M, N/R], with the ``apply`` of an autograd function."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> torch.Tensor:
        return _typed(lambda: all_gather_matmul(x, w, bias, group=group_name), x, group, 1)


class AllGatherLinearMulti:
    """x [M/R, K], two weights [N/R, K] -> two y [M, N/R], with one gather."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        wa: torch.Tensor,
        wb: torch.Tensor,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> tuple[torch.Tensor, ...]:
        return _typed(lambda: tuple(all_gather_matmul(x, [wa, wb], group=group_name)), x, group, 1)


class LinearReduceScatter:
    """x [M, K/R], w [N, K/R] -> y [M/R, N]."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        group_name: str,
    ) -> torch.Tensor:
        return _typed(lambda: matmul_reduce_scatter(x, w, bias, group=group_name), x, group, 0)


def enable() -> None:
    """Let torchtitan's ``dist_gemm`` modules call tileweave, also those that exist already."""
    for kind in (AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter):
        setattr(_seam, kind.__name__, kind)


def disable() -> None:
    """Restore the functions of torchtitan."""
    for name, kind in _STOCK.items():
        setattr(_seam, name, kind)


@override(
    target=_seam.RowParallelLinear.Config,
    description="collectives of sequence parallelism inside tileweave's matmuls",
)
def dist_gemm(config: Any) -> Any:
    """What ``--override.imports`` names. Configurations stay as they are: see :func:`enable`."""
    enable()
    _LOG.info("torchtitan's dist_gemm projections call tileweave")
    return config


@override(
    target=RoutedExperts.Config,
    description="exchange of tokens inside tileweave's grouped matmuls",
    exact=True,
)
def experts(config: Any) -> Any:
    """What ``--override.imports`` names, for models with experts and expert parallelism.

    Experts in other formats than bfloat16, such as MXFP8, and token dispatchers other than
    "standard" stay torchtitan's, with a warning.
    """
    return _torchtitan_experts.with_tileweave(config)
