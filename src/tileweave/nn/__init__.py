"""Layers that call the fused operators, with the parameter names and layouts of stock layers."""

from __future__ import annotations

from tileweave.nn.embedding import ShardedEmbeddingBag
from tileweave.nn.experts import MoE
from tileweave.nn.linear import ColumnParallelLinear, RowParallelLinear
from tileweave.nn.replicated import replicate
from tileweave.nn.routers import SigmoidTopK, SoftmaxTopK

__all__ = [
    "ColumnParallelLinear",
    "MoE",
    "RowParallelLinear",
    "ShardedEmbeddingBag",
    "SigmoidTopK",
    "SoftmaxTopK",
    "replicate",
]
