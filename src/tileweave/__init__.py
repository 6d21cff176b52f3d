"""tileweave: PyTorch operators that overlap communication and computation, tile by tile.

>>> import tileweave as tw
>>> # x [M/R, K], w [N/R, K] -> y [M, N/R]
>>> y = tw.all_gather_matmul(x, w, bias, group=group)
>>> # x [M, K/R], w [N, K/R] -> z [M/R, N]
>>> z = tw.matmul_reduce_scatter(y, w2, group=group)
>>> # x [M, K/R], w [N, K/R] -> z [M, N]
>>> z = tw.matmul_all_reduce(y, w2, group=group)
>>> # x [S/R, K], w [N, K] -> y [S, N/R]
>>> y = tw.matmul_all_to_all(x, w, scatter_dim=1, gather_dim=0, group=group)
>>> # x [S, K/R], w [N, K] -> z [S/R, N]
>>> z = tw.all_to_all_matmul(y, w2, scatter_dim=0, gather_dim=1, group=group)

The public interface is the names of this module. ``torch.ops.tileweave.*`` are the same operators
for graphs and compilers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tileweave import nn as nn
from tileweave import ops as ops
from tileweave.errors import (
    CaptureError,
    InputError,
    PeerTimeout,
    RankMismatchError,
    TileweaveError,
    UnsupportedError,
)
from tileweave.ops.core.argument_types import checks_types as _checks_types
from tileweave.ops.core.registration import SPECS as _SPECS
from tileweave.ops.core.registration import TUNERS as _TUNERS
from tileweave.ops.core.registration import explain, warmup
from tileweave.ops.core.registry import Group as _Group
from tileweave.ops.core.registry import name_of as _name_of
from tileweave.ops.core.replicated import copy_to_group
from tileweave.ops.embedding.bag_all_to_all import embedding_bag, embedding_bag_all_to_all
from tileweave.ops.embedding.distribute_indices import (
    IndicesOnTheirWay,
    begin_distribute_indices,
    distribute_indices,
)
from tileweave.ops.embedding.inputs import FusedOptimizer
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.all_to_all_matmul import all_to_all_matmul
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul.matmul_all_to_all import matmul_all_to_all
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter
from tileweave.ops.matmul.quantize import quantize
from tileweave.planning.sharding import EmbeddingLayout, ShardingPlan, TableSpec, plan_sharding
from tileweave.transport.workspace import REGISTRY as _REGISTRY

if _TYPE_CHECKING:
    from tileweave import parallel as parallel
    from tileweave.parallel import parallelize as parallelize

__version__ = "0.2.0"
# Names of all operators: a view, which also shows operators that are registered later.
OPERATORS = _SPECS.keys()


def _tune(*args: object, **kwargs: object) -> None:
    """What ``warmup(tune=True)`` does first."""
    from tileweave.bench.prerequisites import need

    need("tileweave.warmup(tune=True)", "rich")
    from tileweave.tune.call import tune_call

    tune_call(*args, **kwargs)  # type: ignore[arg-type]


_TUNERS.append(_tune)
plan_sharding = _checks_types(plan_sharding)  # planning does not know torch
plan_sharding.__module__ = __name__  # where pickle finds it


def close(group: _Group | None = None) -> None:
    """Release the workspaces of a group. Not collective: usable after a peer died.

    A later call makes a new workspace, which is collective. CUDA graphs that were captured before
    must not be replayed any more, since the memory they write to is released: capture them again.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh or str, optional
        A group, its name, or a DeviceMesh of one dimension. None: all groups.
    """
    _REGISTRY.close(_named(group))


def synchronize(group: _Group | None = None) -> None:
    """Wait for queued work, and raise if a peer did not arrive in a call.

    On a GPU a call returns before its kernel has run. A late peer is reported here, by the next
    call, or by NaN in the result.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh or str, optional
        A group, its name, or a DeviceMesh of one dimension. None: all groups.

    Raises
    ------
    PeerTimeout
        A peer did not arrive in time in some call.
    """
    _REGISTRY.synchronize(_named(group))


def __getattr__(name: str) -> _Any:
    """``parallel`` and ``parallelize``, which import DTensor: 0.5 s that other users do not wait
    for."""
    if name not in ("parallel", "parallelize"):
        raise AttributeError(f"module 'tileweave' has no attribute {name!r}")
    from importlib import import_module

    package = import_module("tileweave.parallel")
    return package if name == "parallel" else package.parallelize


def _named(group: _Group | None) -> str | None:
    """The name of ``group``. A name is returned as it is: its group may no longer exist while its
    workspace does."""
    return group if group is None or isinstance(group, str) else _name_of(group)


__all__ = [
    "OPERATORS",
    "CaptureError",
    "EmbeddingLayout",
    "FusedOptimizer",
    "IndicesOnTheirWay",
    "InputError",
    "PeerTimeout",
    "RankMismatchError",
    "RoutingPlan",
    "ShardingPlan",
    "TableSpec",
    "TileweaveError",
    "UnsupportedError",
    "all_gather_matmul",
    "all_to_all_matmul",
    "begin_distribute_indices",
    "close",
    "copy_to_group",
    "dispatch_grouped_matmul",
    "distribute_indices",
    "embedding_bag",
    "embedding_bag_all_to_all",
    "explain",
    "grouped_matmul_combine",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "nn",
    "ops",
    "parallel",
    "parallelize",
    "plan_sharding",
    "quantize",
    "swiglu",
    "synchronize",
    "warmup",
]
