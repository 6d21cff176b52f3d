"""The kernels of grouped_matmul_combine, compiled without a GPU: they fit the device, and keep the
protocol.

Uses the tools of `test_all_gather_kernels.py`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled
from tests.compile.ptx_lint import STORE_BEFORE_SIGNAL, lint, operations
from tests.compile.test_all_gather_kernels import (
    NVIDIA,
    RANK,
    TENSOR_CORE,
    WORLD_SIZE,
    compile_one,
    endpoint,
    writes_to_peers,
)

from tileweave.kernels.experts import combine_hopper as hopper
from tileweave.kernels.experts import combine_triton as plain
from tileweave.planning.combine import CombineConfig, slot_bytes
from tileweave.planning.schedules.grouped import GroupedProblem

PROBLEM = GroupedProblem(WORLD_SIZE, 64, 4, 4, 512, 256, 2, "bfloat16")


@dataclass(frozen=True)
class Case:
    """One variant of the kernel. ``depth_first``: experts as backward reads them."""

    config: CombineConfig
    depth_first: bool = False
    weighted: bool = True

    def __str__(self) -> str:
        c = self.config
        return (
            f"{c.kernel}-{c.tile_m}x{c.tile_n}x{c.tile_k}"
            + "-turned" * self.depth_first
            + "-plain" * (not self.weighted)
        )


TRITON = (
    Case(CombineConfig("triton", 16, 64, 128, 2, 4, 1, 4, 1, 1, 512)),
    Case(
        CombineConfig("triton", 64, 64, 32, 2, 4, 4, 4, 2, 2, 512), depth_first=True, weighted=False
    ),
)
HOPPER = (
    Case(CombineConfig("hopper", 128, 256, 64, 4, 8, 8, 4, 7, 16, 1024)),
    Case(
        CombineConfig("hopper", 128, 256, 64, 4, 8, 8, 4, 7, 16, 1024),
        depth_first=True,
        weighted=False,
    ),
)
STACK = 400  # bytes; spilled values are read once per block of tokens or tile


@functools.cache
def compile_case(case: Case, target: str = "sm_90") -> Compiled:
    p, c, dtype = PROBLEM, case.config, torch.bfloat16
    bound = p.world_size * p.max_tokens * min(p.topk, p.experts)
    y, products = torch.empty(bound, p.depth, dtype=dtype), torch.empty(bound, p.cols, dtype=dtype)
    experts = torch.empty(p.experts, p.cols, p.depth, dtype=dtype)
    if case.depth_first:
        experts = torch.empty(p.experts, p.depth, p.cols, dtype=dtype).transpose(1, 2)
    offsets, entry_row, ids = (
        torch.zeros(n, dtype=torch.int32) for n in (p.experts + 1, bound, p.max_tokens * p.topk)
    )
    weights = torch.zeros(p.max_tokens, p.topk) if case.weighted else None
    out = torch.empty(p.max_tokens, p.cols, dtype=dtype)
    peers = endpoint(slot_bytes(p) // 2, dtype)
    tensors = (y, experts, offsets, entry_row, ids, weights, products, out)
    if c.kernel == "hopper":
        launcher = hopper.launcher(peers, p, c, RANK, 132, dtype, case.depth_first, bound, p.depth)
        return compile_one(lambda: launcher(*tensors), target)
    return compile_one(lambda: plain.launch(peers, *tensors, p, c, RANK, 132), target)


@pytest.mark.parametrize(
    ("case", "target"), [*((TRITON[0], t) for t in TARGETS), (TRITON[1], "sm_90")], ids=str
)
def test_the_triton_kernel_fits_every_target(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    assert compiled.name == "grouped_matmul_combine_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= 64
    assert case.config.tile_m == 16 or TENSOR_CORE[target] in (
        compiled.ptx or str(compiled.asm["amdgcn"])
    )


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_the_hopper_kernel_fits(case: Case) -> None:
    compiled = compile_case(case)
    assert compiled.name == "grouped_matmul_combine_hopper_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 168
    assert compiled.spills is not None and compiled.spills <= STACK
    assert "wgmma.mma_async" in str(compiled.ptx)


LINTED = [(TRITON[0], target) for target in NVIDIA] + [(case, "sm_90") for case in HOPPER]


@pytest.mark.parametrize(("case", "target"), LINTED, ids=str)
def test_the_protocol_is_all_there_and_in_order(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    rows = [ins.opcode for ins in writes_to_peers(compiled, "slot_table")]
    assert "st.global.v4.b32" in rows, "partials travel 16 bytes at once"
    seen = operations(compiled, guarded=["slots"])
    assert len(seen.signals) >= 2 and len(seen.waits) >= WORLD_SIZE - 1, "of each peer's groups"
    assert seen.guarded_loads
    assert [str(v) for v in lint(compiled, guarded=["slots"])] == []


def test_the_lint_would_notice() -> None:
    for case in (TRITON[0], HOPPER[0]):
        ptx, taken = re.subn(r"\bbar\.(?:warp\.)?sync[^;]*;", "", str(compile_case(case).ptx))
        ptx, more = re.subn(r"\bbarrier\.sync[^;]*;", "", ptx)
        assert taken + more
        found = {v.rule for v in lint(replace(compile_case(case), ptx=ptx), guarded=["slots"])}
        assert STORE_BEFORE_SIGNAL in found
