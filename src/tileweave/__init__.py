"""tileweave: PyTorch operators that weave communication tiles into computation tiles.

>>> import tileweave as tw
>>> y = tw.all_gather_matmul(x, w, bias, group=group)   # x [M/R, K], w [N/R, K] -> [M, N/R]
>>> y = tw.matmul_reduce_scatter(y, w2, group=group)    # x [M, K/R], w [N, K/R] -> [M/R, N]
>>> y = tw.matmul_all_reduce(y, w2, group=group)        # x [M, K/R], w [N, K/R] -> [M, N]
>>> y = tw.matmul_all_to_all(x, w, scatter_dim=1, gather_dim=0, group=group)   # x [S/R, K], w [N, K] -> [S, N/R]
>>> y = tw.all_to_all_matmul(y, w2, scatter_dim=0, gather_dim=1, group=group)  # x [S, K/R], w [N, K] -> [S/R, N]

The public face is what this module names. ``torch.ops.tileweave.*`` are the same operators for
graphs and compilers.
"""

from __future__ import annotations

import torch.distributed as _dist

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
from tileweave.ops.core.registration import SPECS as _SPECS
from tileweave.ops.core.registration import explain, warmup
from tileweave.ops.core.registry import name_of as _name_of
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
from tileweave.planning.sharding import EmbeddingLayout, ShardingPlan, TableSpec, plan_sharding
from tileweave.transport.workspace import REGISTRY as _REGISTRY

__version__ = "0.1.0"
# Names of all operators: a view, which shows those that are registered later, too.
OPERATORS = _SPECS.keys()


def close(group: _dist.ProcessGroup | str | None = None) -> None:
    """Release the workspaces of ``group`` (None: all groups). Not collective: usable after a peer
    died.

    A later call makes a new workspace, which is collective. CUDA graphs captured before must not be
    replayed any more: what they write to is gone. Capture them again.
    """
    _REGISTRY.close(_named(group))


def synchronize(group: _dist.ProcessGroup | str | None = None) -> None:
    """Wait for queued work and raise :class:`PeerTimeout` if a peer did not arrive in some call.

    On GPUs a call returns before its kernel ran: a late peer shows here, at the next call, or as
    NaN in the result.
    """
    _REGISTRY.synchronize(_named(group))


def _named(group: _dist.ProcessGroup | str | None) -> str | None:
    """A name as it is: the group may be gone, and what it left may not."""
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
    "plan_sharding",
    "swiglu",
    "synchronize",
    "warmup",
]
