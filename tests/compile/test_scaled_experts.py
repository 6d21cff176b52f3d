"""The kernels of experts with FP8 operands, compiled without a GPU: registers, wgmma of e4m3 and
TMA."""

from __future__ import annotations

import functools
import os
import re

import pytest
import torch
from tests.compile.harness import Compiled, offline

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from triton import knobs

from tileweave.kernels.experts import scaled, scaled_hopper

FP8 = torch.float8_e4m3fn
EXPERTS, ROWS, COLS, DEPTH = 4, 1024, 784, 400


def packed(rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of rows in one buffer."""
    blocks = -(-depth // 128)
    both = torch.zeros(rows, -(-(depth + 4 * blocks) // 16) * 16, dtype=torch.uint8)
    return both.view(FP8)[:, :depth], both.view(torch.float32)[:, depth // 4 :][:, :blocks]


@functools.cache
def compile_grouped(target: str, hopper: bool) -> Compiled:
    x, x_scale = packed(ROWS, DEPTH)
    w = torch.zeros(EXPERTS, COLS, DEPTH, dtype=torch.uint8).view(FP8)
    w_scale = torch.zeros(EXPERTS, -(-COLS // 128), -(-DEPTH // 128))
    y = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    strides = x_scale.stride()
    sizes = scaled.Sizes(x.stride(0), *strides, EXPERTS, COLS, DEPTH, ROWS)
    make = scaled_hopper.launcher if hopper else scaled.launcher
    with knobs.compilation.scope(), offline(target) as launched:
        knobs.compilation.disable_line_info = True
        make(sizes, 132)(x, x_scale, w, w_scale, y, offsets)
    return launched[0]


def test_grouped_hopper_fits() -> None:
    compiled = compile_grouped("sm_90", True)
    ptx = compiled.ptx or ""
    print(compiled.registers, compiled.spills, compiled.shared_bytes)
    assert (compiled.registers, compiled.spills, compiled.fits_shared) == (168, 0, True)
    assert set(re.findall(r"wgmma\.mma_async\S+", ptx)) == {
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
    }
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_grouped_triton_fits(target: str) -> None:
    compiled = compile_grouped(target, False)
    print(compiled.registers, compiled.spills, compiled.shared_bytes)
    assert compiled.fits_shared and compiled.spills is not None and compiled.spills <= 64
