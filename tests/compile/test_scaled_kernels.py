"""The kernels of FP8 operands, compiled without a GPU: do they fit, and is the cast the one of the
hardware?"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tests.compile.harness import Compiled
from tests.compile.ptx_lint import lint
from tests.compile.test_all_gather_kernels import (
    COLS,
    DEPTH,
    RANK,
    STACK,
    WORLD_SIZE,
    compile_one,
    endpoint,
)
from tests.compile.test_reduction_kernels import check_counted, check_marked

from tileweave.kernels.all_gather import hopper
from tileweave.kernels.all_gather import triton as plain
from tileweave.kernels.all_reduce import collective, one_shot
from tileweave.kernels.all_reduce.norm import norm_quantize_launcher
from tileweave.kernels.quantize import columns_launchers, quantize_launcher
from tileweave.kernels.reduce_scatter import hopper as scatter_hopper
from tileweave.kernels.reduce_scatter import triton as scatter_plain
from tileweave.kernels.reduce_scatter.sum_shards import sum_launcher
from tileweave.kernels.scaling import Scaling
from tileweave.planning.candidates import PLANNED
from tileweave.planning.machine import H200
from tileweave.planning.matmul import scatter_schedule_for, schedule_for
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.gather import Parts

TARGET = "sm_90"


def quantizer(depth: int, in_blocks: bool, powers: bool = False) -> Compiled:
    launch = quantize_launcher(8, depth, in_blocks, powers)
    x = torch.empty(8, depth, dtype=torch.bfloat16)
    data = torch.empty(8, depth, dtype=torch.uint8)
    scale = torch.empty(-(-depth // 128) if in_blocks else 1, 8)
    return compile_one(lambda: launch(x, data, scale), TARGET)


@pytest.mark.parametrize(
    ("in_blocks", "powers"),
    [(False, False), (True, False), (False, True)],
    ids=["row", "block", "row-powers"],
)
def test_the_quantiser_saturates_and_keeps_in_registers(in_blocks: bool, powers: bool) -> None:
    compiled = quantizer(8192, in_blocks, powers)
    assert compiled.spills == 0 and compiled.registers is not None and compiled.registers <= 128
    ptx = compiled.ptx or ""
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx), "the cast of the tensor cores"
    assert "ld.global.v4" in ptx, "rows are read 16 bytes at a time"


def test_rows_of_two_tensors_are_read_16_bytes_at_a_time() -> None:
    launch = quantize_launcher(8, 8192, False, True, other_rows=16)
    tensors = []
    for rows in (8, 16):
        x, data = torch.empty(rows, 8192), torch.empty(rows, 8192, dtype=torch.uint8)
        tensors += [x.bfloat16(), data, torch.empty(rows)]
    compiled = compile_one(lambda: launch(*tensors), TARGET)
    assert compiled.spills == 0 and compiled.registers is not None and compiled.registers <= 128
    assert "ld.global.v4" in (compiled.ptx or "") and "st.global.v4" in (compiled.ptx or "")


def test_the_quantiser_keeps_long_rows_in_registers() -> None:
    compiled = quantizer(53248, False)
    assert compiled.spills is not None and compiled.spills <= 192, compiled.spills


@pytest.mark.parametrize(("whole", "others"), [(False, 0), (True, 0), (False, 2048)])
def test_columns_are_read_and_stored_16_bytes_at_a_time(whole: bool, others: int) -> None:
    x, y = (torch.empty(64, n, dtype=torch.bfloat16) for n in (4096, others))
    data, more = (torch.empty(n, 64, dtype=torch.uint8) for n in (4096, others))
    greatest = torch.zeros(4096 + others, dtype=torch.int32)
    scale, scales = torch.empty(4096), torch.empty(others)
    find, turn = columns_launchers(64, 4096, 64, whole, others)
    found = compile_one(lambda: find(x, y, greatest), TARGET)
    turned = compile_one(lambda: turn(x, y, greatest, data, more, scale, scales), TARGET)
    for compiled in (found, turned):
        assert compiled.spills == 0 and compiled.registers is not None
        assert compiled.registers <= 128 and "ld.global.v4" in (compiled.ptx or "")
    assert "relaxed.max.s32" in (found.ptx or "")
    assert "st.global.v4" in (turned.ptx or "")
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", turned.ptx or "")


@pytest.mark.parametrize("in_blocks", [False, True], ids=["row", "block"])
def test_the_quantised_norm_keeps_a_row_in_registers(in_blocks: bool) -> None:
    launch = norm_quantize_launcher(4, 8192, in_blocks)
    y, data = torch.empty(4, 8192, dtype=torch.bfloat16), torch.empty(4, 8192, dtype=torch.uint8)
    scale = torch.empty(64 if in_blocks else 1, 4)
    compiled = compile_one(lambda: launch(y, y[0], 1e-6, data, scale), TARGET)
    assert compiled.spills == 0 and compiled.registers is not None and compiled.registers <= 255
    assert re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", compiled.ptx or "")


def test_the_gather_of_two_parts_fits() -> None:
    words, scales = 16 * 512 // 4, 16
    shards = collective.Shards.in_a_row(words + scales, words)
    peers = endpoint(collective.slot_elements(shards, WORLD_SIZE, False, True), torch.float32)
    config = MatmulConfig("library", "sm", 16, 128, 64, 1, 8)
    launch = collective.launcher(peers, WORLD_SIZE, RANK, shards, 132, config, False, True)
    x, scale = torch.empty(words), torch.empty(scales)
    out = torch.empty(WORLD_SIZE * (words + scales))
    compiled = compile_one(lambda: launch(x, out, scale), TARGET)
    assert compiled.spills is not None and compiled.spills <= STACK
    assert compiled.registers is not None and compiled.registers <= 168


def test_the_sum_of_shards_fits() -> None:
    out = torch.empty(16, 512, dtype=torch.bfloat16)
    launch = sum_launcher(
        endpoint(WORLD_SIZE * 16 * 512, out.dtype), WORLD_SIZE, RANK, 16, 512, 132
    )
    slot = torch.empty(WORLD_SIZE, 16, 512, dtype=out.dtype)
    compiled = compile_one(lambda: launch(slot, out, out[0], out), TARGET)
    assert compiled.spills is not None and compiled.spills <= STACK
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.ptx or "")) >= WORLD_SIZE
    assert [str(violation) for violation in lint(compiled)] == []


WIDE, SQUARE, _ = (c for c in PLANNED["all_gather_matmul"].fp8 if c.kernel == "hopper")
ROWS, BLOCKS = 1, 2  # Choices.SCALED


@pytest.mark.parametrize(
    ("config", "scaled"),
    [(WIDE, ROWS), (SQUARE, ROWS), (SQUARE, BLOCKS), (replace(SQUARE, kernel="triton"), BLOCKS)],
    ids=["wide", "square", "square-blocks", "triton-blocks"],
)
def test_the_all_gather_of_fp8_fits(config: MatmulConfig, scaled: int) -> None:
    rows, kind = 256, torch.float8_e4m3fn
    config = replace(config, num_stages=3) if config.kernel == "triton" else config
    schedule = schedule_for(Problem(WORLD_SIZE, rows, COLS, DEPTH, 1, ""), config, RANK, H200)
    x, w = torch.zeros(rows, DEPTH).to(kind), torch.zeros(COLS, DEPTH).to(kind)
    out = torch.empty(WORLD_SIZE * rows, COLS, dtype=torch.bfloat16)
    sizes = WORLD_SIZE * rows * DEPTH // 128, rows * DEPTH // 128, COLS * DEPTH // 128
    scales = [torch.empty(size) for size in sizes]
    peers = endpoint(schedule.slot_rows * DEPTH, kind)
    if config.kernel == "hopper":
        launch = hopper.launcher(
            peers, schedule, config, kind, w.stride(), None, scaled, torch.bfloat16
        )
    else:
        parts = Parts(RANK, WORLD_SIZE, DEPTH, DEPTH)
        launch = plain.launcher(peers, schedule, config, parts, scaled)
    compiled = compile_one(lambda: launch(x, w, None, out, None, 0, None, scales), TARGET)
    assert compiled.fits_shared, compiled.shared_bytes
    assert compiled.spills is not None and compiled.spills <= STACK
    shape = f"m64n{config.tile_n}k32.f32.e4m3.e4m3"
    assert f"wgmma.mma_async.sync.aligned.{shape}" in (compiled.ptx or "")
    # scales that peers wrote come from L2
    assert re.search(r"ld\.global\.cg", compiled.ptx or "")


SCATTERS = [c for c in PLANNED["matmul_reduce_scatter"].fp8 if c.kernel == "hopper"]
SCATTER_WIDE, SCATTER_SQUARE = (next(c for c in SCATTERS if c.tile_n == n) for n in (256, 128))
PUSHED = MatmulConfig("hopper", "sm", 64, 64, 128, 6, 4, split_tail=False)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (SCATTER_WIDE, ""),
        (SCATTER_WIDE, "gathered"),
        (SCATTER_WIDE, "fast gathered"),
        (replace(SCATTER_WIDE, split_tail=True, team=4), "fast"),
        (SCATTER_SQUARE, ""),
        (SCATTER_SQUARE, "blocks gathered"),
        (PUSHED, ""),
        (replace(SCATTER_SQUARE, kernel="triton"), "blocks"),
        (replace(SCATTER_SQUARE, kernel="triton"), ""),
    ],
    ids=str,
)
def test_the_reduce_scatter_of_fp8_fits(config: MatmulConfig, how: str) -> None:
    blocks, by_tiles, keeps_sums = (word in how for word in ("blocks", "gathered", "fast"))
    rows, kind = 256, torch.float8_e4m3fn
    config = replace(config, num_stages=3) if config.kernel == "triton" else config
    problem = Problem(WORLD_SIZE, rows, COLS, DEPTH, 1, "")
    schedule = scatter_schedule_for(problem, config, RANK, H200)
    x, w = torch.zeros(WORLD_SIZE * rows, DEPTH).to(kind), torch.zeros(COLS, DEPTH).to(kind)
    out, bias = torch.empty(rows, COLS, dtype=torch.bfloat16), torch.empty(COLS)
    staging = torch.empty((WORLD_SIZE - 1) * schedule.place_elements, dtype=out.dtype)
    scales = torch.empty(x.shape[0] * DEPTH // 128), torch.empty(COLS * DEPTH // 128)
    peers = endpoint(schedule.slot_elements, out.dtype)
    scaling = Scaling(blocks, False, False, keeps_sums, out.dtype)
    gathered = WORLD_SIZE * rows if by_tiles else 0
    if config.kernel == "hopper":
        how_made = True, by_tiles, scaling, gathered
        launch = scatter_hopper.launcher(
            peers, schedule, config, kind, DEPTH, w.stride(), *how_made
        )
    else:
        launch = scatter_plain.launcher(peers, schedule, config, DEPTH, w.stride(), scaling)
    given = None if config.transport == "sm" else staging
    mirrors = (0,) * (WORLD_SIZE - 1) if by_tiles else ()
    residual = torch.empty_like(out) if by_tiles else None
    compiled = compile_one(
        lambda: launch(x, w, bias.to(out.dtype), out, given, 0, mirrors, residual, scales), TARGET
    )
    assert compiled.fits_shared, compiled.shared_bytes
    assert compiled.spills is not None and compiled.spills <= STACK
    width = 64 if config.tile_n == 256 and not keeps_sums else config.tile_n
    shape = f"m64n{width}k32.f32.e4m3.e4m3"
    assert f"wgmma.mma_async.sync.aligned.{shape}" in (compiled.ptx or "")
    if config.transport == "sm":
        check_marked(compiled, 1)
    else:
        check_counted(compiled, by_tiles)


ONE_SHOTS = [c for c in PLANNED["matmul_all_reduce"].fp8 if c.kernel == "triton"]


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("config", ONE_SHOTS, ids=str)
def test_the_one_shot_kernel_of_fp8_fits(config: MatmulConfig, blocks: bool) -> None:
    x, w = (torch.zeros(n, DEPTH).to(torch.float8_e4m3fn) for n in (4, COLS))
    out = torch.empty(4, COLS, dtype=torch.bfloat16)
    scales = torch.empty(4 * DEPTH // 128), torch.empty(COLS * DEPTH // 128)
    peers = endpoint(WORLD_SIZE * config.team * config.tile_m * COLS, out.dtype)
    launch = one_shot.launcher(
        *(peers, WORLD_SIZE, RANK, (4, COLS, DEPTH), DEPTH, DEPTH, False, config),
        scaling=Scaling(blocks, False, False, False, out.dtype),
    )
    compiled = compile_one(lambda: launch(x, w, None, None, None, 0.0, out, None, scales), TARGET)
    assert compiled.name == "matmul_all_reduce_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= STACK
    w_first = f"wgmma.mma_async.sync.aligned.m64n{config.tile_m}k32.f32.e4m3.e4m3"
    assert (w_first in (compiled.ptx or "")) == (config.tile_n >= 64)
    check_marked(compiled, WORLD_SIZE, waits=1)
