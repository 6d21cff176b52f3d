"""What stands for the fused kernel of the toy operator: shards are gathered, and added in order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops.core import collectives


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Into ``out`` [m, n]: sums in fp32, rounded once."""
    y = collectives.all_gather(x[None], group).float().sum(0) * w.float()
    out.copy_(y if bias is None else y + bias.float())
