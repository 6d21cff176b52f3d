"""RMSNorm of the rows of a reduced result, as they were rounded, in fp32.

Sends nothing. ``one_shot.py`` has it in its own launch; after ``collective.py`` it is a launch of
its own, because no program of that kernel has a whole row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tileweave.kernels.runtime.launch import Call, Launcher

BLOCK = 2048  # columns that a program reads at once


@triton.jit
def norm_row(row, y, weight, out, cols, eps, BLOCK: tl.constexpr):
    """RMSNorm of one row of ``y`` as it was rounded, in fp32."""
    index = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + index < cols
        rounded = tl.load(y + row.to(tl.int64) * cols + begin + index, mask=inside, other=0.0)
        value = rounded.to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    for begin in range(0, cols, BLOCK):
        inside = begin + index < cols
        rounded = tl.load(y + row.to(tl.int64) * cols + begin + index, mask=inside, other=0.0)
        value = rounded.to(tl.float32)
        gain = tl.load(weight + begin + index, mask=inside, other=0.0).to(tl.float32)
        target = out + row.to(tl.int64) * cols + begin + index
        tl.store(target, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(y, weight, out, cols, eps, BLOCK: tl.constexpr):
    """One row per program."""
    norm_row(tl.program_id(0), y, weight, out, cols, eps, BLOCK)


def norm_launcher(rows: int, cols: int) -> Launcher:
    """Launches for y [rows, cols], called with (y, weight, eps, out); the caller checks them."""

    def pack(y: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Call:
        words = (y.data_ptr(), weight.data_ptr(), out.data_ptr())

        def changing() -> dict[str, Any]:
            return {"y": y, "weight": weight, "out": out, "eps": eps}

        return Call(tuple(word % 16 == 0 for word in words), (*words, eps), changing)

    fixed = {"cols": cols, "BLOCK": BLOCK}
    return Launcher(norm_kernel, rows, fixed, pack, ("y", "weight", "out", "eps"), num_warps=4)
