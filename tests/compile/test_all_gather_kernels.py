"""The kernels of all_gather_matmul, compiled without a GPU by their own launchers: they fit the
device, and keep the protocol.

Four targets for the Triton kernels, Hopper for its Gluon counterpart in each config that the
planner may choose. The PTX is held to the rules of `ptx_lint`. Before that, it must contain the
signals, waits, and peer stores of the protocol: a lint that sees nothing would find nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled, offline, on_targets
from tests.compile.ptx_cfg import Instruction, parse
from tests.compile.ptx_lint import (
    LOAD_AFTER_WAIT,
    PROXY_FENCE,
    STORE_BEFORE_SIGNAL,
    Operations,
    lint,
    operations,
)

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)


from tileweave.kernels.all_gather import hopper
from tileweave.kernels.all_gather import triton as plain
from tileweave.kernels.all_gather.await_shards import ShardLaunches, shard_launches
from tileweave.kernels.runtime.barrier import barrier
from tileweave.kernels.runtime.descriptors import fits
from tileweave.kernels.runtime.launch import Launcher
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.candidates import PLANNED
from tileweave.planning.machine import H200
from tileweave.planning.matmul import schedule_for
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.gather import Parts

EXAMPLE = Path(__file__).parents[2] / "examples" / "neighbour_exchange.py"
NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))
TENSOR_CORE = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}

WORLD_SIZE, RANK = 4, 1
COLS, DEPTH = 512, 1024  # compiled code depends on what divides sizes, not on how large they are
REGISTERS = 168  # registers per thread for 12 warps of the Hopper kernel
STACK = (
    # bytes: an epilogue may spill a little (144: cut, ragged, with a bias; Triton 3.6), a main loop
    # could not hide in that
    160
)


@dataclass(frozen=True)
class Case:
    """One variant of all_gather_matmul. ``rows`` of a shard decide whether tiles span shards."""

    config: MatmulConfig
    rows: int
    cols: int = COLS
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    gathered: bool = False
    trace: bool = False
    depth_first: bool = False

    @property
    def push(self) -> bool:
        return self.config.transport == "sm"

    @property
    def spans(self) -> bool:
        return self.rows < self.config.tile_m

    def __str__(self) -> str:
        c = self.config
        extras = [
            name for name in ("bias", "gathered", "trace", "depth_first") if getattr(self, name)
        ]
        parts = [
            c.kernel,
            c.transport,
            f"{c.tile_m}x{c.tile_n}x{c.tile_k}",
            f"{c.num_warps}w",
            f"g{c.group_m}",
        ]
        parts += ["cut"] * c.split_tail + ["spans"] * self.spans + ["one-row"] * (self.rows == 1)
        parts += [f"n{self.cols}"] * (self.cols != COLS)
        return "-".join([*parts, *extras, str(self.dtype).removeprefix("torch.")])


SMALL = MatmulConfig("triton", "sm", 64, 64, 32, num_stages=3, num_warps=4)
TRITON_CASES = (
    Case(SMALL, rows=256),
    Case(SMALL, rows=16, bias=True, gathered=True, trace=True),
    Case(SMALL, rows=256, depth_first=True),
    Case(replace(SMALL, transport="copy_engine"), rows=256, gathered=True),
    Case(replace(SMALL, transport="nodes", num_slices=2), rows=256, gathered=True),
)


def planned_cases() -> list[Case]:
    """The candidates of the planner, once for each different kernel: some of a config is arguments,
    not code, and ``group_m`` is one number in the code. Where a config takes shards of any number
    of rows, tiles may span them."""
    alike = {
        "num_slices": 32,
        "num_producers": 32,
        "band_sources": 1,
        "cut_bands": False,
        "team": 1,
        "own_first": True,
        "group_m": 8,
    }
    cases = [
        Case(replace(config, **alike), rows)
        for config in PLANNED["all_gather_matmul"].configs
        for rows in (256, 32)
        if config.kernel == "hopper" and config.fits_rows(rows)
    ]
    return list(dict.fromkeys(cases))


WIDE = Case(MatmulConfig("hopper", "sm", 128, 256, 64, num_stages=4, num_warps=8), rows=256)
NARROW = Case(
    MatmulConfig("hopper", "sm", 128, 64, 128, num_stages=4, num_warps=4, split_tail=False),
    rows=256,
)
COPIED = Case(
    MatmulConfig("hopper", "copy_engine", 128, 128, 64, num_stages=6, num_warps=8), rows=256
)
UNFIT_PITCH = replace(WIDE, cols=COLS + 1, bias=True)
HOPPER_CASES = (
    *planned_cases(),
    replace(NARROW, bias=True, gathered=True, trace=True),
    replace(COPIED, bias=True, gathered=True, trace=True),
    replace(COPIED, dtype=torch.float16),
    replace(
        COPIED,
        config=replace(COPIED.config, tile_n=256, num_stages=4),
        gathered=True,
        depth_first=True,
    ),
    UNFIT_PITCH,
    replace(NARROW, rows=1),
)


# ---- compiling


def endpoint(slot_size: int, dtype: torch.dtype) -> Peers:
    """One protocol instance of this rank, with more signals and counters than any launch here
    needs."""
    table = torch.zeros(WORLD_SIZE, dtype=torch.int64)
    words = torch.zeros(4096, dtype=torch.int32)
    return Peers(
        torch.empty(2 * slot_size, dtype=dtype), slot_size, table, table, words, words, words, words
    )


def compile_one(launch: Callable[[], object], target: str) -> Compiled:
    """The kernel that ``launch`` launches."""
    with offline(target) as launched:
        launch()
    (compiled,) = launched
    return compiled


def weight(cols: int, depth: int, dtype: torch.dtype, depth_first: bool) -> torch.Tensor:
    """[cols, depth], contiguous along either dimension."""
    return (
        torch.empty(depth, cols, dtype=dtype).t()
        if depth_first
        else torch.empty(cols, depth, dtype=dtype)
    )


def launch_of(case: Case) -> tuple[Launcher, tuple[Any, ...]]:
    """A launcher for the case, and its arguments: tensors made anew."""
    c, dtype = case.config, case.dtype
    nodes = 2 if c.transport == "nodes" else 1
    problem = Problem(WORLD_SIZE, case.rows, case.cols, DEPTH, dtype.itemsize, "", nodes)
    schedule = schedule_for(problem, c, RANK, H200)
    parts = Parts(RANK, WORLD_SIZE, DEPTH, DEPTH)
    if nodes > 1:
        parts = replace(parts, chunk_rows=schedule.chunk_tiles * c.tile_m)
    peers = endpoint(schedule.slot_rows * DEPTH, dtype)
    x, w = (
        torch.empty(case.rows, DEPTH, dtype=dtype),
        weight(case.cols, DEPTH, dtype, case.depth_first),
    )
    out = torch.empty(WORLD_SIZE * case.rows, case.cols, dtype=dtype)
    bias = torch.empty(case.cols, dtype=dtype) if case.bias else None
    gathered = torch.empty(WORLD_SIZE * case.rows, DEPTH, dtype=dtype) if case.gathered else None
    trace = torch.zeros(
        c.num_slices + schedule.num_programs * schedule.max_units(), 4, dtype=torch.int64
    )
    if c.kernel == "hopper":
        assert fits(x, w)
        launcher = hopper.launcher(peers, schedule, c, dtype, w.stride())
    else:
        launcher = plain.launcher(peers, schedule, c, parts)
    return launcher, (x, w, bias, out, gathered, 0, trace if case.trace else None)


@functools.cache
def compile_case(case: Case, target: str = "sm_90") -> Compiled:
    launcher, arguments = launch_of(case)
    return compile_one(lambda: launcher(*arguments), target)


@functools.cache
def compile_barrier(target: str) -> Compiled:
    return compile_one(lambda: barrier(endpoint(64, torch.bfloat16), WORLD_SIZE, RANK), target)


def launches_of_shards() -> ShardLaunches:
    peers = endpoint(64, torch.bfloat16)
    return shard_launches(peers, WORLD_SIZE, RANK, (64, DEPTH), 132)


def compile_await(target: str) -> Compiled:
    x, whole = (
        torch.empty(64, DEPTH, dtype=torch.bfloat16),
        torch.empty(WORLD_SIZE * 64, DEPTH, dtype=torch.bfloat16),
    )
    return compile_one(lambda: launches_of_shards().await_all(x, whole), target)


def compile_by_shards(target: str, ends: bool) -> Compiled:
    launches, out = launches_of_shards(), torch.empty(64, DEPTH, dtype=torch.bfloat16)
    return compile_one(
        lambda: launches.end_gather((out, out)) if ends else launches.await_shard(RANK + 1), target
    )


@functools.cache
def compile_example(target: str) -> Compiled:
    spec = importlib.util.spec_from_file_location("neighbour_exchange", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    x, peers = torch.empty(8, 256), endpoint(512, torch.float32)
    return compile_one(
        lambda: example.diffuse_kernel[(8,)](
            x, x, peers, RANK, 8, 0.2, WORLD_SIZE=WORLD_SIZE, WIDTH=256
        ),
        target,
    )


# ---- what is compiled fits the device


@pytest.mark.parametrize(("case", "target"), on_targets(TRITON_CASES), ids=str)
def test_the_triton_kernel_fits_every_target(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    assert compiled.name == "all_gather_matmul_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= 255
    assert compiled.spills is not None and compiled.spills < STACK
    assert TENSOR_CORE[target] in (compiled.ptx or str(compiled.asm["amdgcn"]))


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_the_hopper_kernel_fits_in_each_configuration(case: Case) -> None:
    compiled = compile_case(case)
    assert compiled.name == "all_gather_matmul_hopper_kernel" and compiled.fits_shared
    assert compiled.registers is not None and compiled.registers <= REGISTERS
    assert compiled.spills is not None and compiled.spills < STACK
    assert "wgmma.mma_async" in str(compiled.ptx)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "compile_small", [compile_barrier, compile_example], ids=["barrier", "example"]
)
def test_small_kernels_compile_for_every_target(
    compile_small: Callable[[str], Compiled], target: str
) -> None:
    assert compile_small(target).spills == 0


# ---- what is compiled keeps the protocol

LOCAL = ("out_desc",)  # read after the kernel has ended, without a signal


def peer_data(compiled: Compiled) -> tuple[str, ...]:
    """Parameters at whose addresses stores of peers arrive."""
    return tuple(name for name in ("slot0_desc", "slot1_desc", "slots") if name in compiled.params)


def unsignalled(compiled: Compiled) -> tuple[str, ...]:
    return tuple(name for name in LOCAL if name in compiled.params)


def broken(compiled: Compiled, guarded: Collection[str], scope: str = "sys") -> list[str]:
    return [
        str(v)
        for v in lint(compiled, guarded=guarded, unsignalled=unsignalled(compiled), scopes=[scope])
    ]


def seen_in(compiled: Compiled, guarded: Collection[str], scope: str = "sys") -> Operations:
    return operations(compiled, guarded=guarded, unsignalled=unsignalled(compiled), scopes=[scope])


def writes_to_peers(compiled: Compiled, table: str) -> Iterator[Instruction]:
    """Stores and atomics whose address was loaded from ``table``."""
    origin = (compiled.params.index(table), 1)
    for function in parse(str(compiled.ptx)):
        for ins in function.instructions:
            if ins.parts[0] in ("st", "atom", "red") and origin in function.origin(ins):
                yield ins


def signals_to_peers(compiled: Compiled, seen: Operations) -> int:
    """How many signals are sent to peers; the lint must have seen all of them."""
    written = [ins.line for ins in writes_to_peers(compiled, "signal_table")]
    assert set(written) <= set(seen.signals)
    return len(written)


LINTED = on_targets(TRITON_CASES, NVIDIA) + [(case, "sm_90") for case in HOPPER_CASES]


@pytest.mark.parametrize(("case", "target"), LINTED, ids=str)
def test_the_protocol_is_all_there_and_in_order(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    guarded = peer_data(compiled)
    seen = seen_in(compiled, guarded)
    assert len(seen.waits) >= 1 + case.gathered + 2 * (not case.push), (
        "for tiles; to copy; to meet, and for the copy engine"
    )
    assert len(seen.signals) >= len(seen.waits) + 1, (
        "each wait has a report, and a push or a meeting its signal"
    )
    assert signals_to_peers(compiled, seen) == 1
    assert len(seen.guarded_loads) > case.gathered
    assert seen.bulk_stores == (), "the only bulk stores are those of the output"
    assert broken(compiled, guarded) == []


@pytest.mark.parametrize(("case", "target"), LINTED, ids=str)
def test_the_push_stores_16_bytes_at_once_to_each_peer(case: Case, target: str) -> None:
    compiled = compile_case(case, target)
    stores = list(writes_to_peers(compiled, "slot_table"))
    assert bool(stores) == case.push
    assert len(stores) % (WORLD_SIZE if case.spans else WORLD_SIZE - 1) == 0
    assert {ins.opcode for ins in stores} <= {"st.global.v4.b32"}
    assert {ins.line for ins in stores} <= set(seen_in(compiled, peer_data(compiled)).stores)


@pytest.mark.parametrize(("case", "target"), on_targets(TRITON_CASES, NVIDIA), ids=str)
def test_the_triton_kernel_loads_rows_16_bytes_at_once(case: Case, target: str) -> None:
    """A choice between two pointers may cost their alignment, and with it the software pipeline."""
    compiled = compile_case(case, target)
    lines = str(compiled.ptx).split("\n")
    loads = [lines[line - 1] for line in seen_in(compiled, peer_data(compiled)).guarded_loads]
    assert [text for text in loads if not re.search(r"cp\.async\.cg\.|\.v4\.b32", text)] == []


@pytest.mark.parametrize(
    "case", [c for c in (*TRITON_CASES, *HOPPER_CASES) if c.config.split_tail], ids=str
)
def test_parts_of_a_tile_are_handed_over_in_order(case: Case) -> None:
    """Between programs of one grid: the count of a helper after its partial tile, the loads of the
    owner after the count."""
    compiled = compile_case(case)
    seen = seen_in(compiled, ["partials"], "gpu")
    assert len(seen.signals) >= 2, "the count and the last to leave"
    assert seen.waits and seen.guarded_loads
    assert broken(compiled, ["partials"], "gpu") == []


def test_the_barrier_signals_and_awaits_every_peer() -> None:
    for target in NVIDIA:
        compiled = compile_barrier(target)
        seen = seen_in(compiled, ())
        assert len(seen.waits) == WORLD_SIZE - 1
        assert signals_to_peers(compiled, seen) == 1, "a lane a peer"
        assert broken(compiled, ()) == []


def test_the_gather_of_backward_awaits_every_peer_and_its_own_pushes() -> None:
    for target in TARGETS:
        compiled = compile_await(target)
        if target in NVIDIA:
            assert len(seen_in(compiled, ()).waits) == WORLD_SIZE
            assert compiled.spills == 0 and broken(compiled, ()) == []


@pytest.mark.parametrize(
    ("ends", "waits"), [(False, 1), (True, WORLD_SIZE)], ids=["a shard", "the end"]
)
def test_an_all_gather_by_shards_awaits_each_and_its_own_pushes(ends: bool, waits: int) -> None:
    for target in TARGETS:
        compiled = compile_by_shards(target, ends)
        if target in NVIDIA:
            assert len(seen_in(compiled, ()).waits) == waits
            assert compiled.spills == 0 and broken(compiled, ()) == []


def test_the_example_keeps_the_protocol() -> None:
    for target in NVIDIA:
        compiled = compile_example(target)
        seen = seen_in(compiled, ["slots"])
        assert len(seen.waits) == signals_to_peers(compiled, seen) == 1
        stores = [ins.line for ins in writes_to_peers(compiled, "slot_table")]
        assert stores and set(stores) <= set(seen.stores)
        assert seen.guarded_loads and broken(compiled, ["slots"]) == []


def test_an_output_whose_pitch_tma_cannot_have_is_stored_plainly() -> None:
    fit = replace(UNFIT_PITCH, cols=COLS, bias=False)
    assert operations(compile_case(fit), guarded=()).bulk_stores
    assert operations(compile_case(UNFIT_PITCH), guarded=()).bulk_stores == ()


@pytest.mark.parametrize("case", [*TRITON_CASES, *HOPPER_CASES], ids=str)
def test_no_wait_waits_for_stores(case: Case) -> None:
    """Full fences delay a tile by 3 to 7 us (decision 0004), and a waiter has nothing to
    release."""
    ptx = str(compile_case(case).ptx)
    assert "fence.acquire.sys" in ptx
    assert not re.search(r"fence\.(acq_rel|sc)\.|membar|fence\.proxy\.async;", ptx)


@pytest.mark.parametrize("target", NVIDIA)
def test_fences_that_the_target_has(target: str) -> None:
    """Below sm_90 ptxas silently makes an illegal instruction of the narrow one."""
    for compiled in (compile_case(TRITON_CASES[0], target), compile_example(target)):
        fences = set(re.findall(r"fence\.(acquire|acq_rel)\.sys", str(compiled.ptx)))
        assert fences == ({"acq_rel"} if target == "sm_80" else {"acquire"})


TAKEN_OUT = {
    STORE_BEFORE_SIGNAL: r"\bbar\.(?:warp\.)?sync[^;]*;",
    LOAD_AFTER_WAIT: r"\bfence\.acquire\.sys;",
    PROXY_FENCE: r"\bfence\.proxy\.async\.global;",
}


@pytest.mark.parametrize("rule", TAKEN_OUT)
def test_the_lint_would_notice(rule: str) -> None:
    """The same kernels with one requirement of a rule removed from their PTX. (No TMA in the Triton
    kernel: no proxy.)"""
    for case in (*TRITON_CASES, *HOPPER_CASES[-4:]):
        compiled = compile_case(case)
        ptx, taken = re.subn(TAKEN_OUT[rule], "", str(compiled.ptx))
        assert bool(taken) == (rule != PROXY_FENCE or case.config.kernel == "hopper")
        found = lint(
            replace(compiled, ptx=ptx),
            guarded=peer_data(compiled),
            unsignalled=unsignalled(compiled),
        )
        assert not taken or rule in {violation.rule for violation in found}
