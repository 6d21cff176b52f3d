"""Modules with the stock parameter layout over the fused operators."""

from __future__ import annotations

from tileweave.nn.embedding import ShardedEmbeddingBag
from tileweave.nn.experts import MoE, SoftmaxTopK
from tileweave.nn.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "MoE", "RowParallelLinear", "ShardedEmbeddingBag", "SoftmaxTopK"]
