"""The arguments of a lookup, which the parts of embedding_bag_all_to_all hand on to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tileweave.planning.sharding import EmbeddingLayout

OP = "embedding_bag_all_to_all"
BACKWARD = f"{OP}_backward"


class Call(NamedTuple):
    """One lookup and exchange, in the order of the operator's arguments.

    Operators take ``layout`` as a flat list.
    """

    tables: Sequence[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    layout: EmbeddingLayout
    batch: int
    mean: bool
    out_dtype: torch.dtype
    group_name: str
