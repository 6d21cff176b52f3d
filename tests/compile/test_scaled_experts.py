"""The kernels of experts with FP8 operands, compiled without a GPU: registers, wgmma of e4m3 and
TMA."""

from __future__ import annotations

import functools
import os
import re

import pytest
import torch
from tests.compile import test_dispatch_kernels as kernels
from tests.compile.harness import Compiled, offline
from tests.compile.ptx_lint import lint, operations

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)


from tileweave.kernels.experts import (
    combine_hopper_scaled,
    combine_triton,
    dispatch_hopper_scaled,
    dispatch_triton,
    rows,
    scaled,
    scaled_hopper,
)
from tileweave.kernels.experts.dispatch_hopper import portable
from tileweave.kernels.quantize import Pitch, quantize_launcher
from tileweave.planning.combine import SCALED_PORTABLE, CombineConfig, plan_combine, slot_bytes
from tileweave.planning.machine import H200
from tileweave.planning.schedules.grouped import DispatchConfig, GroupedProblem, plan_dispatch

FP8 = torch.float8_e4m3fn
FUSED = DispatchConfig(
    "hopper", 128, 256, 128, 4, 4, 8, 64, signal_blocks=32, ordered=True, scaled=True
)
COMBINE = CombineConfig("hopper", 128, 256, 128, 4, 4, 8, 4, 7, 16, 256)
PLAIN = portable(FUSED, fp8=True)
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
    sizes = scaled.Sizes(x.stride(0), strides[0], strides[1], EXPERTS, COLS, DEPTH, ROWS)
    make = scaled_hopper.launcher if hopper else scaled.launcher
    with offline(target) as launched:
        make(sizes, 132)(x, x_scale, w, w_scale, y, offsets)
    return launched[0]


@functools.cache
def compile_dispatch(config: DispatchConfig, target: str) -> Compiled:
    x, _ = packed(kernels.TOKENS, DEPTH)
    w = torch.zeros(kernels.EXPERTS, COLS, DEPTH, dtype=torch.uint8).view(FP8)
    w_scale = torch.zeros(kernels.EXPERTS, -(-COLS // 128), -(-DEPTH // 128))
    bound = kernels.WORLD_SIZE * kernels.TOKENS * kernels.TOPK
    y = torch.empty(bound, COLS, dtype=torch.bfloat16)
    pitch = x.stride(0)
    tokens = torch.zeros(kernels.TOKENS, pitch, dtype=torch.uint8)
    peers = kernels.endpoint(3 * kernels.TOKENS * pitch, torch.uint8)
    sizes = (kernels.RANK, kernels.WORLD_SIZE, kernels.TOKENS, kernels.TOPK, bound)
    make = dispatch_hopper_scaled.launcher if config.scaled else dispatch_triton.launcher
    with offline(target) as launched:
        make(peers, config, *sizes, w, 132)(tokens, w, y, kernels.fields(), w_scale)
    return launched[0]


@functools.cache
def compile_combine(target: str, hopper: bool, config: CombineConfig = SCALED_PORTABLE) -> Compiled:
    p = GroupedProblem(kernels.WORLD_SIZE, 64, 4, EXPERTS, COLS, DEPTH, 1, "float8_e4m3fn")
    bound, dtype, blocks = p.world_size * p.max_tokens * p.topk, torch.bfloat16, -(-DEPTH // 128)
    y = torch.zeros(bound, DEPTH, dtype=torch.uint8).view(FP8)
    w = torch.zeros(EXPERTS, COLS, DEPTH, dtype=torch.uint8).view(FP8)
    y_scale, w_scale = torch.zeros(blocks, bound).t(), torch.zeros(EXPERTS, -(-COLS // 128), blocks)
    products, out = torch.empty(bound, COLS, dtype=dtype), torch.empty(50, COLS, dtype=dtype)
    offsets, entry_row, ids = (
        torch.zeros(n, dtype=torch.int32) for n in (EXPERTS + 1, bound, p.max_tokens * p.topk)
    )
    given = (y, w, offsets, entry_row, ids, torch.zeros(50, p.topk), products, out)
    peers = kernels.endpoint(slot_bytes(p) // 2, dtype)
    with offline(target) as launched:
        if hopper:
            make = combine_hopper_scaled.launcher
            launch = make(peers, p, COMBINE, kernels.RANK, 132, y, y_scale, dtype)
            launch(*given, y_scale, w_scale)
        else:
            scales = (y_scale, w_scale)
            combine_triton.launch(peers, *given, p, config, kernels.RANK, 132, scales=scales)
    return launched[0]


def test_kernels_on_rows_fit_and_move_16_bytes() -> None:
    """Packed tokens are gathered as words; swiglu is quantised where it is computed; tokens are
    quantised into the row that travels."""
    words = torch.zeros(kernels.TOKENS, 256, dtype=torch.int32)
    kept, table = torch.zeros(3 * kernels.TOKENS, 256, dtype=torch.int32), kernels.fields()
    bound = kernels.WORLD_SIZE * kernels.TOKENS * kernels.TOPK
    y = torch.zeros(bound, 2 * 720, dtype=torch.bfloat16)
    data, scale = torch.zeros(bound, 720, dtype=torch.uint8), torch.zeros(6, bound)
    wide = (kernels.EXPERTS, kernels.TOKENS, kernels.TOPK, kernels.RANK, kernels.WORLD_SIZE)
    x, tokens = torch.zeros(8, 7168, dtype=torch.bfloat16), torch.zeros(8, 7392, dtype=torch.uint8)
    with offline("sm_90") as launched:
        rows.gather_rows(words, kept, table, *wide)
        rows.swiglu_quantized(y, data, scale, table[0], kernels.EXPERTS)
        launch = quantize_launcher(8, 7168, True, pitch=Pitch(7392, 1848, 1))
        launch(x, tokens, tokens.view(torch.float32)[:, 1792:])
    assert len(launched) == 3
    for compiled in launched:
        ptx = compiled.ptx or ""
        assert compiled.spills == 0 and "ld.global.v4.b32" in ptx, compiled.name
        assert re.search(r"st\.global(\.v[24])?\.b(32|64)", ptx), compiled.name


def test_combine_hopper_fits_and_keeps_the_protocol() -> None:
    compiled = compile_combine("sm_90", True)
    ptx = compiled.ptx or ""
    assert compiled.registers == 168 and compiled.fits_shared
    # bytes: 112 by Triton 3.6, 136 by 3.9
    assert compiled.spills is not None and compiled.spills <= 136
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2
    seen = operations(compiled, guarded=("slots",))
    assert seen.signals and seen.waits and lint(compiled, guarded=("slots",)) == []


def test_combine_triton_fits_and_keeps_the_protocol() -> None:
    compiled = compile_combine("sm_90", False)
    assert compiled.fits_shared and compiled.spills is not None and compiled.spills <= 64
    seen = operations(compiled, guarded=("slots",))
    assert seen.signals and seen.waits and lint(compiled, guarded=("slots",)) == []


def test_dispatch_hopper_fits_and_keeps_the_protocol() -> None:
    compiled = compile_dispatch(FUSED, "sm_90")
    ptx = compiled.ptx or ""
    assert compiled.registers == 168 and compiled.fits_shared
    # bytes, of warps that move rows: 32 by Triton 3.6, 96 by 3.9
    assert compiled.spills is not None and compiled.spills <= 96
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert not re.search(r"[sl][td]\.global\S*\.b(8|16)\b", ptx), "bytes are moved 16 at a time"
    assert "atom.global.gpu.release.exch.b32" in ptx and "fence.proxy.async" in ptx
    assert operations(compiled, guarded=("slots",)).signals
    assert lint(compiled, guarded=("slots",)) == []


def test_dispatch_triton_fits_and_keeps_the_protocol() -> None:
    compiled = compile_dispatch(PLAIN, "sm_90")
    assert compiled.fits_shared and compiled.spills is not None and compiled.spills <= 64
    seen = operations(compiled, guarded=("slots",))
    assert seen.signals and seen.waits and lint(compiled, guarded=("slots",)) == []


def test_tiles_of_few_rows_keep_bytes_in_flight() -> None:
    """As planned for decoding: as many bytes in flight as with 16 bits, without spills."""
    for tokens, each in ((8, 1), (48, 6)):
        p = GroupedProblem(2, tokens, 8, 64, COLS, DEPTH, 1, "float8_e4m3fn")
        assert p.rows_per_expert == each
        found = []
        if each == 1:
            config = plan_dispatch(p, H200, False).config
            assert config is not None and config.kernel == "triton"
            found.append(compile_dispatch(config, "sm_90"))
        config = plan_combine(p, H200, False).config
        assert config is not None and config.kernel == "triton"
        found.append(compile_combine("sm_90", False, config))
        for compiled in found:
            assert compiled.spills == 0 and compiled.fits_shared
            assert (compiled.shared_bytes or 0) > 75 * 1024, "two programs share a multiprocessor"
            ptx = compiled.ptx or ""
            assert "cp.async.cg.shared.global" in ptx and "mma.sync.aligned.m16n8k" in ptx


def test_grouped_hopper_fits() -> None:
    compiled = compile_grouped("sm_90", True)
    ptx = compiled.ptx or ""
    assert (compiled.registers, compiled.spills, compiled.fits_shared) == (168, 0, True)
    assert set(re.findall(r"wgmma\.mma_async\S+", ptx)) == {
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
    }
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_grouped_triton_fits(target: str) -> None:
    compiled = compile_grouped(target, False)
    assert compiled.fits_shared and compiled.spills is not None and compiled.spills <= 64
