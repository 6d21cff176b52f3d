"""Layers that call the fused operators, with the parameter names and layouts of stock layers."""

from __future__ import annotations

from tileweave.nn.embedding import ShardedEmbeddingBag
from tileweave.nn.experts import MoE, SoftmaxTopK
from tileweave.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "MoE", "RowParallelLinear", "ShardedEmbeddingBag", "SoftmaxTopK"]
