"""What the two all-to-all operators on matrices share: checks, ``explain`` and ``warmup``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.registry import Group, name_of, rank_and_size
from tileweave.ops.matmul.warmup import (
    Rows,
    Warmed,
    call_for_warmup,
    operands_for_warmup,
    warm_up,
)
from tileweave.planning.problem import Plan
from tileweave.planning.schedules.scatter import Exchange

# by scatter_dim and gather_dim; to make one takes 0.5 us
_EXCHANGES = tuple(tuple(Exchange(scatter, gather) for gather in (0, 1)) for scatter in (0, 1))


def as_exchange(scatter_dim: int, gather_dim: int) -> Exchange:
    """The exchange of these two arguments, checked."""
    if scatter_dim not in (0, 1) or gather_dim not in (0, 1):
        require(
            False,
            f"scatter_dim={scatter_dim}, gather_dim={gather_dim}",
            "0 (rows) or 1 (columns) each",
            "flatten the other dimensions into rows",
        )
    return _EXCHANGES[scatter_dim][gather_dim]


def check_divides(how: Exchange, rows: int, cols: int, size: int, columns_of: str) -> None:
    """Check that the scattered dimension divides by the world size.

    Of x with more than two dimensions, dimension 0 is the rows.
    """
    what, count = ("rows", rows) if how.scatter_dim == 0 else (f"columns ({columns_of})", cols)
    allowed, remedy = "a multiple of the group's size", "pad them, or scatter the other"
    require(count % size == 0, lambda: f"{count} {what} over {size} ranks", allowed, remedy)


def explain_exchange(
    as_called: Callable[..., tuple[Exchange, torch.Tensor, torch.Tensor | None]],
    check: Callable[..., None],
    plan: Callable[..., Plan],
) -> Callable[..., Plan]:
    """Make ``explain`` of an operator over x, w and bias, with the two dimensions.

    ``as_called(x, w, bias, scatter_dim, gather_dim, out, group_name)`` returns the exchange, and x
    and out as rows; ``check(x, w, bias, how, out, size)`` raises; ``plan(x, w, how, size)`` plans.
    """

    def explain(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None = None,
        group: Group | None = None,
        *,
        scatter_dim: int,
        gather_dim: int,
        out: torch.Tensor | None = None,
    ) -> Plan:
        name = name_of(group)
        size = rank_and_size(name)[1]
        how, rows, flat = as_called(x, w, bias, scatter_dim, gather_dim, out, name)
        check(rows, w, bias, how, flat, size)
        return plan(rows, w, how, known_topology_of(name))

    return explain


def warmup_exchange(
    call: Callable[..., object],
    explain: Callable[..., Plan],
    depth_of: Callable[[Exchange, int, int, int], int],
) -> Callable[..., Warmed]:
    """As :func:`warmup.warmup_matmul`, with the two dimensions.

    ``depth_of(how, rows, depth, size)`` is the depth of w for x [rows, depth].
    """

    def warmup(
        rows: Rows,
        cols: int,
        depth: int,
        *,
        scatter_dim: int,
        gather_dim: int,
        backward: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> Warmed:
        x, w = operands_for_warmup(rows, cols, depth, dtype, device)
        of_w = depth_of(
            as_exchange(scatter_dim, gather_dim),
            x.shape[0],
            depth,
            rank_and_size(name_of(group))[1],
        )
        if of_w != depth:
            _, w = operands_for_warmup(0, cols, of_w, dtype, device)
        how: dict[str, Any] = {
            "scatter_dim": scatter_dim,
            "gather_dim": gather_dim,
            "group": group,
        }
        return warm_up(
            rows,
            x,
            lambda part, back: call_for_warmup(call, part, w, back, **how),
            lambda part: explain(part, w, **how),
            backward,
            group,
        )

    return warmup
