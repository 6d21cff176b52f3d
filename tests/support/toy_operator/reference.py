"""The toy operator in plain torch: its specification."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops.core import collectives


def scale_all_reduce(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over ranks of x [m, n], times w [n], plus bias [n]."""
    y = collectives.all_reduce(x, group) * w
    return y if bias is None else y + bias
