"""The kernels of matmul_all_to_all and all_to_all_matmul, compiled without a GPU: do they fit, do
they keep the protocol?

As `test_all_gather_kernels.py` and `test_reduction_kernels.py`, whose tools these tests use. New
are chunks that peers pull: stored, drained, counted; the last program to count one signals its
owner, and a copy engine there, which waits for a flag, reads them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tests.compile.harness import Compiled, on_targets
from tests.compile.ptx_lint import lint, operations
from tests.compile.test_all_gather_kernels import (
    DEPTH,
    NVIDIA,
    RANK,
    REGISTERS,
    STACK,
    TENSOR_CORE,
    WORLD_SIZE,
    broken,
    compile_one,
    endpoint,
    peer_data,
    seen_in,
    signals_to_peers,
    weight,
    writes_to_peers,
)
from tests.compile.test_reduction_kernels import check_marked, loads_of

from tileweave.kernels.all_gather import hopper as all_gather_matmul_hopper
from tileweave.kernels.all_gather import triton as all_gather_matmul
from tileweave.kernels.all_to_all import exchange
from tileweave.kernels.all_to_all import scatter_hopper as matmul_all_to_all_hopper
from tileweave.kernels.all_to_all import scatter_triton as matmul_all_to_all
from tileweave.ops.matmul.all_gather_matmul_fused import _cut
from tileweave.planning.candidates import PLANNED
from tileweave.planning.machine import H200
from tileweave.planning.matmul import scatter_schedule_for
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.scatter import Exchange

M, N = 1024, 2048
HOWS = tuple(Exchange(scatter, gather) for scatter in (0, 1) for gather in (0, 1))
QKV, PROJECTION = Exchange(1, 0), Exchange(0, 1)
ODD = 1000  # columns of a part: rows of 16 bytes, the last K block of which is not full
# no candidate since decision 0014
PUSHED = MatmulConfig("hopper", "sm", 64, 128, 128, num_stages=4, num_warps=4)


@dataclass(frozen=True)
class Case:
    """One variant of either operator."""

    op: str
    config: MatmulConfig
    how: Exchange
    bias: bool = False
    kept: bool = False
    depth: int = DEPTH
    depth_first: bool = False

    @property
    def push(self) -> bool:
        return self.config.transport == "sm"

    def __str__(self) -> str:
        c = self.config
        extras = [name for name in ("bias", "kept", "depth_first") if getattr(self, name)]
        extras += [f"k{self.depth}"] * (self.depth != DEPTH)
        shape = f"{c.tile_m}x{c.tile_n}x{c.tile_k}-{c.num_warps}w"
        return "-".join(
            [
                self.op,
                c.kernel,
                c.transport,
                shape,
                f"{self.how.scatter_dim}{self.how.gather_dim}",
                *extras,
            ]
        )


OUT, IN = "matmul_all_to_all", "all_to_all_matmul"
SMALL = MatmulConfig("triton", "sm", 64, 64, 32, num_stages=3, num_warps=4)
TRITON_CASES = (
    Case(OUT, SMALL, QKV, bias=True),
    Case(OUT, replace(SMALL, transport="copy_engine"), PROJECTION, bias=True),
    Case(IN, SMALL, Exchange(1, 1), kept=True),
    Case(IN, replace(SMALL, transport="copy_engine"), PROJECTION, bias=True),
    Case(IN, SMALL, Exchange(0, 0)),
)


def planned_cases() -> list[Case]:
    """The candidates of both, once for each kernel that differs: slices and teams are arguments,
    not code."""
    alike = {
        "num_slices": 4,
        "num_producers": 32,
        "team": 1,
        "band_sources": 1,
        "own_first": True,
        "group_m": 8,
    }
    cases = [
        Case(op, replace(config, **alike), QKV if op == OUT else PROJECTION, bias=True)
        for op in (OUT, IN)
        for config in PLANNED[op].configs
        if config.kernel == "hopper"
    ]
    copied, pushed = (
        next(c for c in cases if c.op == IN and c.push == push) for push in (False, True)
    )
    ragged = [
        replace(copied, depth=ODD),
        replace(copied, depth=ODD, depth_first=True),
        replace(pushed, depth=ODD),
    ]
    return list(dict.fromkeys([Case(OUT, PUSHED, QKV, bias=True), *cases, *ragged]))


HOPPER_CASES = planned_cases()


@functools.cache
def compile_case(case: Case, target: str = "sm_90") -> Compiled:
    c, dtype = case.config, torch.bfloat16
    x, bias = (
        torch.empty(M, case.depth, dtype=dtype),
        torch.empty(N, dtype=dtype) if case.bias else None,
    )
    if case.op == OUT:
        w = torch.empty(N, case.depth, dtype=dtype)
        rows, cols = case.how.part(M, N, WORLD_SIZE)
        schedule = scatter_schedule_for(
            Problem(WORLD_SIZE, rows, cols, case.depth, 2, ""), c, RANK, H200
        )
        peers = endpoint(schedule.slot_elements, dtype)
        common = (peers, schedule, c, case.how, rows)
        if c.kernel == "hopper":
            launcher = matmul_all_to_all_hopper.launcher(*common, dtype, case.depth, w.stride())
        else:
            launcher = matmul_all_to_all.launcher(*common, case.depth, w.stride())
        out = torch.empty(case.how.result(M, N, WORLD_SIZE), dtype=dtype)
        return compile_one(lambda: launcher(x, w, bias, out, 0), target)
    rows, depth = case.how.result(M, case.depth, WORLD_SIZE)
    w, out = weight(N, depth, dtype, case.depth_first), torch.empty(rows, N, dtype=dtype)
    rank = SimpleNamespace(rank=RANK, world_size=WORLD_SIZE, machine=H200)
    schedule, parts = _cut(x, w, c, case.how, rank)  # type: ignore[arg-type]
    peers = endpoint(x.numel(), dtype)
    if c.kernel == "hopper":
        launch = all_gather_matmul_hopper.launcher(peers, schedule, c, dtype, w.stride(), parts)
    else:
        launch = all_gather_matmul.launcher(peers, schedule, c, parts)
    kept = torch.empty(rows, depth, dtype=dtype) if case.kept else None
    return compile_one(lambda: launch(x, w, bias, out, kept, 0), target)


@pytest.mark.parametrize(("how", "target"), on_targets([QKV, PROJECTION]), ids=str)
def test_the_launch_next_to_cublas_moves_16_bytes_at_once(how: Exchange, target: str) -> None:
    """Also where rows of a part are at odd multiples of 16 bytes: of 8 elements."""
    depth = WORLD_SIZE * 264
    x, out = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in ((M, depth), how.result(M, depth, WORLD_SIZE))
    )
    config = MatmulConfig("library", "sm", 16, 128, 64, num_stages=1, num_warps=8)
    peers = endpoint(x.numel(), x.dtype)
    launch = exchange.launcher(peers, WORLD_SIZE, RANK, (M, depth), how, 2, 132, config)
    compiled = compile_one(lambda: launch(x, out), target)
    assert compiled.name == "exchange_parts_kernel"
    assert compiled.registers is not None and compiled.registers <= 168
    assert compiled.spills is not None and compiled.spills <= STACK
    if compiled.ptx:
        check_marked(compiled, WORLD_SIZE - 1)
        moved = re.findall(r"\b(?:ld|st)(?:\.volatile)?\.global\.v4\.b32", compiled.ptx)
        # pushed, the own part, and what is taken: loaded, zeros, stored
        assert len(moved) >= 2 * (WORLD_SIZE - 1) + 2 + 3


@pytest.mark.parametrize(("case", "target"), on_targets(TRITON_CASES), ids=str)
def test_the_triton_kernel_fits_every_target(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    assert compiled.name == (
        "matmul_all_to_all_kernel" if case.op == OUT else "all_gather_matmul_kernel"
    )
    assert compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= STACK
    assert TENSOR_CORE[target] in (compiled.ptx or str(compiled.asm["amdgcn"]))


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_the_hopper_kernel_fits_in_each_configuration(case: Case) -> None:
    compiled = compile_case(case)
    assert "hopper" in compiled.name and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= REGISTERS
    assert compiled.spills is not None and compiled.spills <= STACK
    assert "wgmma.mma_async" in str(compiled.ptx)


# ---- what is compiled keeps the protocol


def check_announced(compiled: Compiled) -> None:
    """Chunks that peers pull: flag and signal behind drained, counted stores; waits with a bound,
    no store to a peer's slot."""
    seen = operations(
        compiled, guarded=(), unsignalled=[n for n in ("out_desc",) if n in compiled.params]
    )
    assert len(seen.waits) >= 2, "for a chunk's announcement, and for the own copy engine"
    assert signals_to_peers(compiled, seen) == 2, "a flag, and a signal"
    assert list(writes_to_peers(compiled, "slot_table")) == []
    found = lint(
        compiled, guarded=(), unsignalled=[n for n in ("out_desc",) if n in compiled.params]
    )
    assert [str(v) for v in found] == []


def one_of_a_kind() -> list[Case]:
    large_first = sorted(
        HOPPER_CASES, key=lambda c: c.config.tile_m * c.config.tile_n, reverse=True
    )
    return list({(c.op, c.push): c for c in large_first}.values())


LINTED = on_targets(TRITON_CASES, NVIDIA) + [(case, "sm_90") for case in one_of_a_kind()]


@pytest.mark.parametrize(("case", "target"), LINTED, ids=str)
def test_the_protocol_is_all_there_and_in_order(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    if case.op == OUT and case.push:
        check_marked(compiled, 1)
    elif case.op == OUT:
        check_announced(compiled)
    else:
        guarded = peer_data(compiled)
        seen = seen_in(compiled, guarded)
        assert len(seen.waits) >= 1 + 2 * (not case.push) and len(seen.guarded_loads) > 0
        assert signals_to_peers(compiled, seen) == 1, "a push's or a meeting's"
        assert broken(compiled, guarded) == []
        stores = list(writes_to_peers(compiled, "slot_table"))
        assert bool(stores) == case.push and len(stores) % (WORLD_SIZE - 1) == 0
        assert {
            ins.opcode
            for ins in stores
            if "v4.b32" not in ins.opcode and "v2.b64" not in ins.opcode
        } == set()


def test_who_adds_parts_asks_whether_their_helpers_ran_out_of_time() -> None:
    """Of a tile cut along exchanged K the owner may have what it needs, and a helper not: its part
    must not pass for right."""
    cases = [c for c in one_of_a_kind() if c.op == IN and c.config.split_tail]
    assert cases
    for compiled in map(compile_case, cases):
        of_counters, of_control, of_parts = (
            loads_of(compiled, name) for name in ("counters", "control", "partials")
        )
        awaited = min(ins.line for ins in of_counters if ins.has("acquire"))
        added = min(ins.line for ins in of_parts if ins.line > awaited)
        assert [ins for ins in of_control if ins.has("volatile") and awaited < ins.line < added], (
            "the fault, behind the wait"
        )


def test_the_checks_would_notice() -> None:
    copied = next(case for case in HOPPER_CASES if case.op == OUT and not case.push)
    compiled = compile_case(copied)
    for taken in (r"\bcp\.async\.bulk\.wait_group 0;", r"\bbarrier\.sync\b.*;"):
        wrong, count = re.subn(taken, "", str(compiled.ptx))
        assert count
        with pytest.raises(AssertionError):
            check_announced(replace(compiled, ptx=wrong))
