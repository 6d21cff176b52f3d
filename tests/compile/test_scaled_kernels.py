"""The kernels of FP8 operands, compiled without a GPU: do they fit, and is the cast the one of the
hardware?"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled
from tests.compile.ptx_lint import lint
from tests.compile.test_all_gather_kernels import (
    NVIDIA,
    RANK,
    STACK,
    WORLD_SIZE,
    compile_one,
    endpoint,
)

from tileweave.kernels.all_reduce import collective
from tileweave.kernels.quantize import quantize_launcher
from tileweave.kernels.reduce_scatter.sum_shards import sum_launcher
from tileweave.planning.problem import MatmulConfig

HAVE_FP8 = [target for target in NVIDIA if int(target.removeprefix("sm_").rstrip("a")) >= 89]


@functools.cache
def quantizer(depth: int, in_blocks: bool, target: str = "sm_90") -> Compiled:
    launch = quantize_launcher(8, depth, in_blocks)
    x = torch.empty(8, depth, dtype=torch.bfloat16)
    data = torch.empty(8, depth, dtype=torch.uint8)
    scale = torch.empty(-(-depth // 128) if in_blocks else 1, 8)
    return compile_one(lambda: launch(x, data, scale), target)


@pytest.mark.parametrize("in_blocks", [False, True], ids=["row", "block"])
@pytest.mark.parametrize("target", HAVE_FP8)
def test_the_quantiser_saturates_and_keeps_in_registers(in_blocks: bool, target: str) -> None:
    compiled = quantizer(8192, in_blocks, target)
    assert compiled.spills == 0 and compiled.registers is not None and compiled.registers <= 128
    ptx = compiled.ptx or ""
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx), "the cast of the tensor cores"
    assert "ld.global.v4" in ptx, "rows are read 16 bytes at a time"


@functools.cache
def split_gather(target: str) -> Compiled:
    words, scales = 16 * 512 // 4, 16
    shards = collective.Shards.in_a_row(words + scales, words)
    peers = endpoint(collective.slot_elements(shards, WORLD_SIZE, False, True), torch.float32)
    config = MatmulConfig("library", "sm", 16, 128, 64, 1, 8)
    launch = collective.launcher(peers, WORLD_SIZE, RANK, shards, 132, config, False, True)
    x, scale = torch.empty(words), torch.empty(scales)
    out = torch.empty(WORLD_SIZE * (words + scales))
    return compile_one(lambda: launch(x, out, scale), target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_gather_of_two_parts_fits(target: str) -> None:
    compiled = split_gather(target)
    assert compiled.spills is not None and compiled.spills <= STACK
    assert compiled.registers is not None and compiled.registers <= 168


@functools.cache
def summing(target: str) -> Compiled:
    out = torch.empty(16, 512, dtype=torch.bfloat16)
    launch = sum_launcher(
        endpoint(WORLD_SIZE * 16 * 512, out.dtype), WORLD_SIZE, RANK, 16, 512, 132
    )
    slot = torch.empty(WORLD_SIZE, 16, 512, dtype=out.dtype)
    return compile_one(lambda: launch(slot, out[0], out), target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_sum_of_shards_fits(target: str) -> None:
    compiled = summing(target)
    assert compiled.spills is not None and compiled.spills <= STACK
    if compiled.ptx:
        assert len(re.findall(r"ld\.global\.v4\.b32", compiled.ptx)) >= WORLD_SIZE
        assert not lint(compiled.ptx)
