"""FP8 operands of kernels: how they are scaled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tileweave.planning.problem import MatmulConfig


class Scaling(NamedTuple):
    """How calls with FP8 operands are scaled, and the dtype of their result.

    blocks : scales are of blocks; else of rows of x and of columns of the result.

    x_one, w_one : one scale for all rows of x, or for all columns of the result.

    keeps_sums : tensor cores may keep the sums, as in ``fast_accum``.
    """

    blocks: bool
    x_one: bool
    w_one: bool
    keeps_sums: bool
    out_dtype: torch.dtype

    def choices(self, config: MatmulConfig) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "SCALED": 2 if self.blocks else 1,
            "X_STEP": int(not self.x_one),
            "W_STEP": int(not self.w_one),
            "PROMOTE": config.tile_n <= 128 or not self.keeps_sums,
        }


class Scales(NamedTuple):
    """Scales of FP8 operands."""

    x: Any
    w: Any
