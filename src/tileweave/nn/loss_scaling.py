"""Overflow that one rank finds in its shard of a gradient is known to all ranks.

``torch.amp.GradScaler`` skips a step with infinite gradients. DTensor sums up what ranks found, but
only if the first gradient of the optimizer is sharded. The first parameter of most models is an
embedding, which is replicated here: the rank with the overflow would skip the step, and no other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def share_overflow() -> None:
    """Let DTensor see the sharded gradients of a ``GradScaler`` first."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    stock = handlers.get(unscale)
    if stock is None:
        return

    def sharded_first(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients = sorted(args[0], key=_replicated_dimensions)
        return stock(op, (gradients, *args[1:]), kwargs)

    handlers[unscale] = sharded_first


def _replicated_dimensions(gradient: Any) -> int:
    return sum(placement.is_replicate() for placement in getattr(gradient, "placements", ()))
