"""What public calls say about FP8 operands, and as the torch operators take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tileweave.errors import require
from tileweave.ops.core.registry import contiguous
from tileweave.ops.matmul.inputs import as_rows, out_as_rows
from tileweave.ops.matmul.scaled import FP8, RECIPES, Call


class Scaling(NamedTuple):
    """What a public call says about FP8; see ``all_gather_matmul``."""

    x_scale: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    quantize: str | None = None
    out_dtype: torch.dtype | None = None
    fast_accum: bool = False

    @property
    def trains(self) -> bool:
        """Whether x and w are quantised in the call, with gradients; see
        ``scaled_training.py``."""
        return self.quantize in RECIPES


def scaling_of(
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    quantize: str | None,
    out_dtype: torch.dtype | None,
    fast_accum: bool = False,
) -> Scaling | None:
    """What a public call says about FP8; None if it has no FP8 operands, and makes none."""
    without = fast_accum is None or fast_accum is False
    if without and x_scale is w_scale is quantize is out_dtype is None:
        return None
    return Scaling(x_scale, w_scale, quantize, out_dtype, fast_accum)


def as_called(
    op: str,
    x: torch.Tensor,
    w: Any,
    scaling: Scaling,
    out: torch.Tensor | None,
    allowed: str,
    unsupported: dict[str, object],
) -> Call:
    """The arguments of a public call, as rows. Raises for what those no longer show.

    ``unsupported``: arguments that FP8 operands do not go with, by name.
    """
    for name, value in unsupported.items():
        require(
            value is None or value is False,
            f"{name}= with FP8 operands",
            "calls without it",
            f"drop {name}=, or pass 16-bit operands",
        )
    require(
        isinstance(w, torch.Tensor),
        f"w of type {type(w).__name__} with scales",
        "one tensor",
        "make one call for each weight, or concatenate them",
    )
    check_flag(scaling)
    require(
        w.dtype == FP8 or scaling.w_scale is not None or scaling.out_dtype in (None, x.dtype),
        f"out_dtype={scaling.out_dtype} of x {x.dtype} and w {w.dtype}",
        "another dtype than that of x with FP8 operands only",
        "drop out_dtype=, or pass FP8 operands",
    )
    rows = as_rows(x, w, op)
    scale = scaling.x_scale
    if scale is not None and x.dim() > 2 and scale.dim() == x.dim():
        scale = contiguous(scale, "x_scale", op).flatten(0, -2)
    dtype = scaling.out_dtype
    if dtype is None:
        dtype = torch.bfloat16 if x.dtype in (FP8, torch.float32) else x.dtype
    return Call(
        rows,
        scale,
        w,
        scaling.w_scale,
        out_as_rows(out, x, allowed, w),
        str(dtype).removeprefix("torch."),
        bool(scaling.fast_accum),
        scaling.quantize or "",
    )


def check_flag(scaling: Scaling) -> None:
    """Raise :class:`InputError` for a ``fast_accum`` that is no flag."""
    require(
        isinstance(scaling.fast_accum, int | None),  # as of other flags
        f"fast_accum={scaling.fast_accum!r:.60}",
        "True or False",
        "pass one of them",
    )


def sequence_first(x_scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The scale of x [B, S, ..., K] for x [S, B, ..., K]."""
    if x_scale is None or x_scale.dim() != x.dim() or x.dim() < 3:
        return x_scale
    return x_scale.transpose(0, 1)
