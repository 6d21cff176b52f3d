"""The kernels of matmul_reduce_scatter and matmul_all_reduce, compiled without a GPU: do they fit,
do they keep the protocol?

As `test_all_gather_kernels.py`, whose tools these tests use. What is new is data that announces
itself: it has neither signals nor waits that the lint could order. So its stores must be whole
words, and whoever takes it must poll with volatile loads.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled, on_targets
from tests.compile.ptx_cfg import Instruction, parse
from tests.compile.ptx_lint import PROXY_FENCE, STORE_BEFORE_SIGNAL, lint, operations
from tests.compile.test_all_gather_kernels import (
    DEPTH,
    NVIDIA,
    RANK,
    REGISTERS,
    STACK,
    TENSOR_CORE,
    WORLD_SIZE,
    compile_one,
    endpoint,
    weight,
    writes_to_peers,
)

from tileweave.kernels.all_reduce import collective as exchange
from tileweave.kernels.all_reduce import one_shot
from tileweave.kernels.all_reduce.norm import norm_launcher
from tileweave.kernels.reduce_scatter import hopper
from tileweave.kernels.reduce_scatter import triton as plain
from tileweave.kernels.runtime.descriptors import fits
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.matmul.matmul_reduce_scatter_fused import FusedCall
from tileweave.planning.candidates import PLANNED
from tileweave.planning.machine import H200
from tileweave.planning.matmul import scatter_schedule_for
from tileweave.planning.problem import MatmulConfig, Problem

COLS = 512
WORDS = re.compile(r"st\.global(\.v\d)?\.b(32|64|128)")  # at least 4 bytes at once


WHICH = "bias", "depth_first", "gathered"


@dataclass(frozen=True)
class Case:
    """One variant of matmul_reduce_scatter. ``rows`` of an owner: do tiles span owners; ``cols``:
    can TMA store; ``gathered``: of an all-reduce by tiles, with a residual."""

    config: MatmulConfig
    rows: int
    bias: bool = False
    depth_first: bool = False
    cols: int = COLS
    gathered: bool = False

    @property
    def push(self) -> bool:
        return self.config.transport == "sm"

    def __str__(self) -> str:
        c = self.config
        parts = [c.kernel, c.transport, f"{c.tile_m}x{c.tile_n}x{c.tile_k}", f"{c.num_warps}w"]
        parts += (
            ["cut"] * c.split_tail
            + ["spans"] * (self.rows < c.tile_m)
            + ["odd"] * (self.cols % 8 > 0)
        )
        return "-".join([*parts, *(name for name in WHICH if getattr(self, name))])


SMALL = MatmulConfig("triton", "sm", 64, 64, 32, num_stages=3, num_warps=4)
LIBRARY = MatmulConfig("library", "sm", 16, 128, 64, num_stages=1, num_warps=4)
TRITON_CASES = (
    Case(SMALL, rows=256),
    Case(SMALL, rows=256, depth_first=True),
    Case(SMALL, rows=16, bias=True),
    Case(replace(SMALL, transport="copy_engine"), rows=256, bias=True),
    Case(replace(SMALL, transport="copy_engine"), rows=256, gathered=True),
)


def planned_cases() -> list[Case]:
    """The candidates of the planner, once for each Hopper kernel that differs: slices and teams are
    arguments, not code. Where a config takes any number of rows, tiles may span owners."""

    def cases(op: str, *all_rows: int) -> list[Case]:
        found = [
            Case(replace(config, num_slices=2, team=1), rows, bias=True)
            for config in PLANNED[op].configs
            for rows in all_rows
            if config.kernel == "hopper" and config.fits_rows(rows)
        ]
        return list(dict.fromkeys(found))

    scattered = cases("matmul_reduce_scatter", 256, 32)
    copied = [case for case in scattered if not case.push]
    odd = [replace(case, cols=COLS - 4) for case in copied]
    turned = replace(copied[0], depth_first=True)  # as backward runs it
    gathered = [replace(case, gathered=True) for case in cases("matmul_all_reduce", 256)]
    return [*scattered, *odd, turned, *gathered]


HOPPER_CASES = planned_cases()


@functools.cache
def compile_case(case: Case, target: str = "sm_90") -> Compiled:
    c, dtype = case.config, torch.bfloat16
    schedule = scatter_schedule_for(
        Problem(WORLD_SIZE, case.rows, case.cols, DEPTH, 2, ""), c, RANK, H200
    )
    peers = endpoint(schedule.slot_elements, dtype)
    rows = WORLD_SIZE * case.rows
    x, w = torch.empty(rows, DEPTH, dtype=dtype), weight(case.cols, DEPTH, dtype, case.depth_first)
    out = torch.empty(case.rows, case.cols, dtype=dtype)
    bias = torch.empty(case.cols, dtype=dtype) if case.bias else None
    staging = (
        None if case.push else torch.empty((WORLD_SIZE - 1) * schedule.place_elements, dtype=dtype)
    )
    gathered = rows - 1 if case.gathered else 0
    if c.kernel == "hopper":
        whole, more = fits(out), (case.gathered, None, gathered)
        launcher = hopper.launcher(peers, schedule, c, dtype, DEPTH, w.stride(), whole, *more)
    else:
        launcher = plain.launcher(peers, schedule, c, DEPTH, w.stride(), None, gathered)
    mirrors = (0,) * (WORLD_SIZE - 1)
    residual = torch.empty_like(out) if case.gathered else None
    return compile_one(lambda: launcher(x, w, bias, out, staging, 0, mirrors, residual), target)


ONE_SHOTS = [config for config in PLANNED["matmul_all_reduce"].configs if config.kernel == "triton"]


@functools.cache
def compile_one_shot(
    norm: bool, target: str = "sm_90", config: MatmulConfig = ONE_SHOTS[1]
) -> Compiled:
    """With everything that may follow the sum, or with nothing."""
    if target not in ("sm_90", "sm_100"):
        # their shared memory has no room for Hopper's stages
        config = replace(config, num_stages=2)
    dtype = torch.bfloat16
    x, w = torch.empty(4, DEPTH, dtype=dtype), torch.empty(COLS, DEPTH, dtype=dtype)
    out = torch.empty(4, COLS, dtype=dtype)
    vector = torch.empty(COLS, dtype=dtype)
    peers = endpoint(WORLD_SIZE * config.tile_m * COLS, dtype)
    launcher = one_shot.launcher(
        peers, WORLD_SIZE, RANK, (4, COLS, DEPTH), DEPTH, DEPTH, norm, config
    )
    extras = (vector, torch.empty_like(out), vector, 1e-6, out, torch.empty_like(out))
    return compile_one(
        lambda: launcher(x, w, *(extras if norm else (None, None, None, 0.0, out, None))), target
    )


@functools.cache
def compile_exchange(
    reduce: bool, gather: bool, target: str = "sm_90", one_shot: bool = False
) -> Compiled:
    """With bias and residual where something is reduced."""
    dtype = torch.bfloat16
    x, out = (torch.empty(WORLD_SIZE * 16, COLS, dtype=dtype) for _ in range(2))
    if not reduce:
        shards = exchange.Shards.in_a_row(16 * COLS)
    elif gather:
        shards = exchange.Shards.of_columns(16 * WORLD_SIZE, COLS, WORLD_SIZE)
    elif one_shot:
        shards = exchange.Shards.of_all(16 * WORLD_SIZE, COLS)
    else:
        shards = exchange.Shards.of_rows(16, COLS)
    peers = endpoint(exchange.slot_elements(shards, WORLD_SIZE, reduce, gather, one_shot), dtype)
    launcher = exchange.launcher(peers, WORLD_SIZE, RANK, shards, 132, LIBRARY, reduce, gather)
    extras = (torch.empty(COLS, dtype=dtype), torch.empty_like(out)) if reduce else ()
    return compile_one(lambda: launcher(x, out, *extras), target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_norm_compiles(target: str) -> None:
    out = torch.empty(16, COLS, dtype=torch.bfloat16)
    compiled = compile_one(lambda: norm_launcher(16, COLS)(out, out[0], 1e-6, out), target)
    assert compiled.spills is not None and compiled.spills <= STACK


# ---- what is compiled fits the device


# (reduces, gathers, in one shot)
EXCHANGES = {
    "rs": (True, False, False),
    "ag": (False, True, False),
    "ar": (True, True, False),
    "ar_one_shot": (True, False, True),
}


@pytest.mark.parametrize(("kind", "target"), on_targets(list(EXCHANGES)))
def test_the_exchange_fits_every_target(kind: str, target: str) -> None:
    reduce, gather, one_shot = EXCHANGES[kind]
    compiled = compile_exchange(reduce, gather, target, one_shot)
    assert compiled.name == "exchange_kernel"
    assert compiled.registers is not None and compiled.registers <= 168
    assert compiled.spills is not None and compiled.spills <= STACK
    if compiled.ptx:
        moved = re.findall(r"\b(?:ld|st)(?:\.volatile)?\.global\.v4\.b32", compiled.ptx)
        assert len(moved) >= 2 * WORLD_SIZE, "what travels goes 16 bytes at a time"


@pytest.mark.parametrize(("case", "target"), on_targets(TRITON_CASES), ids=str)
def test_the_triton_kernel_fits_every_target(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    assert compiled.name == "matmul_reduce_scatter_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= STACK
    assert TENSOR_CORE[target] in (compiled.ptx or str(compiled.asm["amdgcn"]))


@pytest.mark.parametrize(("norm", "target"), on_targets([False, True]), ids=str)
def test_the_one_shot_kernel_fits_every_target(norm: bool, target: str) -> None:
    compiled = compile_one_shot(norm, target)
    assert compiled.name == "matmul_all_reduce_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= STACK
    assert ("mma" if compiled.ptx else "v_mfma") in (compiled.ptx or str(compiled.asm["amdgcn"]))


@pytest.mark.parametrize("config", ONE_SHOTS, ids=str)
def test_each_planned_one_shot_kernel_fits(config: MatmulConfig) -> None:
    assert config.shots == 1
    compiled = compile_one_shot(False, "sm_90", config)
    assert compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills <= STACK


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_the_hopper_kernel_fits_in_each_configuration(case: Case) -> None:
    compiled = compile_case(case)
    assert compiled.name == "matmul_reduce_scatter_hopper_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= REGISTERS
    assert compiled.spills is not None and compiled.spills <= STACK
    assert "wgmma.mma_async" in str(compiled.ptx)


# ---- what is compiled keeps the protocol


def loads_of(compiled: Compiled, name: str) -> list[Instruction]:
    """Loads whose address comes from a parameter."""
    origin = (compiled.params.index(name), 0)
    functions = parse(str(compiled.ptx))
    return [
        ins
        for f in functions
        for ins in f.instructions
        if ins.parts[0] == "ld" and origin in f.origin(ins)
    ]


def branches_behind_clocks(ptx: str) -> list[int]:
    """For each look at the clock: conditional branches up to the next barrier."""
    behind = [ptx[look.end() :] for look in re.finditer("%globaltimer", ptx)]
    return [
        len(re.findall(r"@!?%p\d+\s+bra", re.split(r"\bbar(?:rier)?\.sync", text)[0]))
        for text in behind
    ]


def check_marked(compiled: Compiled, receivers: int, waits: int = 0) -> None:
    """Pushed in words, polled with volatile loads, and every signal (of a report, of a count)
    behind its barrier.

    Polls meet at a barrier: no thread may leave them by its own clock. ``waits``: those for
    signals, which have none.
    """
    branches = branches_behind_clocks(str(compiled.ptx))
    assert len(branches) - 3 * waits == 2 * branches.count(0) > 0, (
        f"a clock decides before threads agree: {branches}"
    )
    stores = list(writes_to_peers(compiled, "slot_table"))
    assert stores and len(stores) % receivers == 0, f"{len(stores)} stores to {receivers} peers"
    assert {ins.opcode for ins in stores if not WORDS.fullmatch(ins.opcode)} == set()
    loads = loads_of(compiled, "slots")
    assert loads and [ins.text for ins in loads if not ins.has("volatile")] == []
    # Marked data is no signal's affair: what is checked here are the stores of a report, and of
    # parts of a tile.
    assert operations(compiled, guarded=()).signals
    assert [
        str(v)
        for v in lint(compiled, rules=[STORE_BEFORE_SIGNAL], guarded=(), scopes=["sys", "gpu"])
    ] == []


def check_counted(compiled: Compiled, announces: bool = False) -> None:
    """With copy engines: tiles are counted after their stores, and what came is read after the
    wait for it. ``announces``: chunks of own rows, too."""
    arrived = [name for name in ("slot0_desc", "slot1_desc", "slots") if name in compiled.params]
    # read when the kernel has ended
    kept = [name for name in ("out_desc",) if name in compiled.params]
    seen = operations(compiled, guarded=arrived, unsignalled=kept)
    assert len(seen.waits) >= 3, "to meet, for a chunk, and for the copy engine"
    assert len(seen.signals) >= 2 + len(seen.waits), (
        "a meeting's, the count, and a report for each wait"
    )
    told = len(list(writes_to_peers(compiled, "signal_table")))
    assert told == 1 + announces, "a meeting's, and that of a chunk of own rows"
    assert seen.guarded_loads
    stores = list(writes_to_peers(compiled, "slot_table"))
    by_address = announces and "slot0_desc" not in compiled.params  # else through descriptors
    assert bool(stores) == by_address, "the copy engine writes partial sums, the kernel own rows"
    assert [str(v) for v in lint(compiled, guarded=arrived, unsignalled=kept)] == []


def one_of_a_kind(cases: list[Case]) -> list[Case]:
    """The smallest case for each path through the kernel: tile sizes change how often instructions
    stand there, not which."""
    large_first = sorted(
        cases,
        key=lambda c: (c.config.tile_m * c.config.tile_n, not c.config.split_tail),
        reverse=True,
    )
    return list(
        {(c.push, c.rows < c.config.tile_m, c.cols, c.gathered): c for c in large_first}.values()
    )


LINTED = on_targets(TRITON_CASES, NVIDIA) + [(c, "sm_90") for c in one_of_a_kind(HOPPER_CASES)]


@pytest.mark.parametrize(("case", "target"), LINTED, ids=str)
def test_the_protocol_is_all_there_and_in_order(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    if case.push:  # in Gluon one store may serve all owners: its pointers differ by rows
        check_marked(compiled, 1 if case.config.kernel == "hopper" else WORLD_SIZE - 1)
    else:
        check_counted(compiled, case.gathered)


@pytest.mark.parametrize(("norm", "target"), on_targets([False, True], NVIDIA), ids=str)
def test_the_one_shot_kernel_keeps_the_protocol(norm: bool, target: str) -> None:
    compiled = compile_one_shot(norm, target)
    check_marked(compiled, WORLD_SIZE, waits=1)
    assert len(operations(compiled, guarded=(), scopes=["sys"]).waits) == 1, (
        "of the norm programs, for all tiles"
    )


def test_the_checks_would_notice() -> None:
    pushed, copied = HOPPER_CASES[0], next(case for case in HOPPER_CASES if not case.push)
    ptx = str(compile_case(pushed).ptx)
    for wrong in (
        ptx.replace("st.global.b32", "st.global.b16"),
        ptx.replace("ld.volatile.global", "ld.global"),
    ):
        with pytest.raises(AssertionError):
            check_marked(replace(compile_case(pushed), ptx=wrong), 1)
    compiled = compile_case(copied)
    for rule, taken in (
        (STORE_BEFORE_SIGNAL, "cp.async.bulk.wait_group 0;"),
        (PROXY_FENCE, "fence.proxy.async.global;"),
    ):
        wrong, count = re.subn(re.escape(taken), "", str(compiled.ptx))
        found = lint(
            replace(compiled, ptx=wrong),
            guarded=["slot0_desc", "slot1_desc"],
            unsignalled=["out_desc"],
        )
        assert count and rule in {violation.rule for violation in found}


# ---- which kernel a rank takes


@pytest.mark.parametrize("push", [True, False], ids=["sm", "copy_engine"])
def test_what_tma_cannot_reach_takes_the_triton_kernel(push: bool) -> None:
    config = next(case.config for case in HOPPER_CASES if case.push == push)
    schedule = scatter_schedule_for(
        Problem(WORLD_SIZE, 256, COLS, DEPTH, 2, ""), config, RANK, H200
    )
    peers = endpoint(schedule.slot_elements, torch.bfloat16)
    copies = () if push else ((), ())
    call = FusedCall(None, peers, schedule, config, copies, 0, {})  # type: ignore[arg-type] - launches nothing
    x, w, out = (
        torch.empty(rows, cols, dtype=torch.bfloat16)
        for rows, cols in ((1024, DEPTH), (COLS, DEPTH), (256, COLS))
    )

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """The same, 2 bytes off a 16-byte boundary."""
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor)

    def chosen(*operands: torch.Tensor) -> Launcher:
        launcher = call.launcher(*operands)
        assert isinstance(launcher, Launcher)
        return launcher

    for operands in ((moved(x), w), (x, moved(w))):
        assert chosen(*operands, out).kernel is plain.matmul_reduce_scatter_kernel
    whole, parts = chosen(x, w, out), chosen(x, w, moved(out))
    for launcher, own in ((whole, True), (parts, push)):
        assert launcher.kernel is hopper.matmul_reduce_scatter_hopper_kernel
        choices = launcher._pack(x, w, None, out, None, 0)[2]()["C"]
        assert own == choices.WHOLE, "what no TMA can store is stored by the warps that multiply"
    assert whole is not parts, "each choice is kept under its own key"
