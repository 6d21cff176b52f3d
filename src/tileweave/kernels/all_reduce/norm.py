"""RMSNorm of the rows of a reduced result, as they were rounded, in fp32.

Sends nothing. ``one_shot.py`` has it in its own launch; after ``collective.py`` it is a launch of
its own, because no program of that kernel has a whole row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import tileweave.device.triton.signal  # noqa: F401 - prepares Triton's interpreter
from tileweave.kernels.quantize import GROUP, greatest_of, quantized
from tileweave.kernels.runtime.launch import Call, Launcher, alignment

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

        return alignment(words), (*words, eps), changing, ()

    fixed = {"cols": cols, "BLOCK": BLOCK}
    return Launcher(norm_kernel, rows, fixed, pack, ("y", "weight", "out", "eps"), num_warps=4)


@triton.jit(do_not_specialize=["rows"])
def norm_quantize_kernel(
    y, weight, data, scale, rows, cols, eps, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """RMSNorm of a row of ``y``, rounded to its dtype, and quantised as ``kernels/quantize.py``
    does. ``BLOCK``: at least ``cols``; ``GROUP``: elements that share a scale."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside, begin = lane < cols, row.to(tl.int64) * cols
    value = tl.load(y + begin + lane, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / cols + eps) * gain
    value = tl.reshape(value.to(y.dtype.element_ty).to(tl.float32), (BLOCK // GROUP, GROUP))
    bits, each = quantized(value, greatest_of(value))
    tl.store(data + begin + lane, tl.reshape(bits, (BLOCK,)), mask=inside)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale + group.to(tl.int64) * rows + row, each, mask=group * GROUP < cols)


def norm_quantize_launcher(rows: int, cols: int, in_blocks: bool) -> Launcher:
    """Launches for y [rows, cols], called with (y, weight, eps, data as uint8, scale); ``scale`` is
    [rows], or [ceil(cols / 128), rows] with ``in_blocks``."""

    def pack(
        y: torch.Tensor, weight: torch.Tensor, eps: float, data: torch.Tensor, scale: torch.Tensor
    ) -> Call:
        words = (y.data_ptr(), weight.data_ptr(), data.data_ptr(), scale.data_ptr())

        def changing() -> dict[str, Any]:
            return {"y": y, "weight": weight, "data": data, "scale": scale, "eps": eps}

        return (y.dtype, alignment(words)), (*words, eps), changing, ()

    block = max(triton.next_power_of_2(cols), GROUP)
    fixed = {"rows": rows, "cols": cols, "BLOCK": block, "GROUP": GROUP if in_blocks else block}
    words = ("y", "weight", "data", "scale", "eps")
    warps = 4 if block <= 4096 else 8
    return Launcher(norm_quantize_kernel, rows, fixed, pack, words, num_warps=warps)
