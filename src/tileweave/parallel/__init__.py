"""Tensor parallelism for any ``nn.Module``: styles, and a plan that applies them.

>>> tw.parallelize(model, mesh["tp"])  # Llama-like models: all-reduce form
>>> tw.parallelize(model, mesh["tp"], sequence_parallel=True)  # rows sharded between layers
"""

from __future__ import annotations

from tileweave.parallel.fused import join_projections
from tileweave.parallel.styles import Colwise, Experts, Rowwise, SequenceParallel
from tileweave.parallel.whole_model import parallelize

__all__ = ["Colwise", "Experts", "Rowwise", "SequenceParallel", "join_projections", "parallelize"]
