"""The embedding kernels, compiled without a GPU by their own launchers: 16 bytes per access, many
rows in flight, in order.

The kernel of the operator itself reads nothing after a wait (its results are for later kernels), so
the rule of the lint that applies is that of stores before signals.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled, offline, on_targets
from tests.compile.ptx_cfg import parse
from tests.compile.ptx_lint import LOAD_AFTER_WAIT, STORE_BEFORE_SIGNAL, lint, operations

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import triton

from tileweave.kernels.embedding import bag_all_to_all as fused
from tileweave.kernels.embedding import gradient, lookup
from tileweave.kernels.embedding import jagged as pieces
from tileweave.kernels.embedding import table_sums as sums
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.sharding import EmbeddingConfig

WORLD_SIZE, RANK, BATCH = 4, 1, 64
NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))
OLD = triton.__version__.startswith("3.6.")


@dataclass(frozen=True)
class Case:
    """A cut of lookups, over two tables of ``dim`` columns."""

    config: EmbeddingConfig
    dtype: torch.dtype = torch.float32
    dim: int = 128
    weighted: bool = False

    def __str__(self) -> str:
        c = self.config
        return (
            f"{c.bags}x{c.unroll}-{c.num_warps}w-{str(self.dtype)[6:]}-d{self.dim}"
            + "-weighted" * self.weighted
        )


CASES = (
    Case(EmbeddingConfig(16, 4, 4)),
    Case(EmbeddingConfig(16, 2, 4), torch.bfloat16, weighted=True),
    Case(EmbeddingConfig(8, 2, 4), dim=64),
)
ODD = Case(EmbeddingConfig(16, 2, 4), dim=13)


def endpoint(dtype: torch.dtype) -> Peers:
    table, words = torch.zeros(WORLD_SIZE, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32)
    return Peers(
        torch.empty(3 * 65536, dtype=dtype), 65536, table, table, words, words, words, words
    )


def compile_all(launch: Callable[[], object], target: str) -> list[Compiled]:
    with offline(target) as launched:
        launch()
    return launched


@functools.cache
def compile_lookup(case: Case, target: str, is_fused: bool) -> Compiled:
    tables = [torch.empty(100, case.dim, dtype=case.dtype) for _ in range(2)]
    meta, columns = torch.zeros(2, 4, dtype=torch.int64), (0, case.dim)
    indices, offsets = (
        torch.zeros(640, dtype=torch.int64),
        torch.zeros(2 * BATCH + 1, dtype=torch.int64),
    )
    weights = torch.zeros(640) if case.weighted else None
    if is_fused:
        width = WORLD_SIZE * 2 * case.dim
        peers = endpoint(case.dtype)

        def launch() -> None:
            made = lookup.constants(tables, columns, width, case.dtype.itemsize, case.config)
            samples = fused.Samples(BATCH, BATCH // WORLD_SIZE, width, BATCH)
            run = fused.launcher(peers, RANK, WORLD_SIZE, samples, 2, made, False, 132, case.config)
            run(meta, indices, offsets, weights, 0)
    else:
        out = torch.empty(BATCH, 2 * case.dim, dtype=case.dtype)

        def launch() -> None:
            bags = lookup.Bags(meta, indices, offsets, weights)
            lookup.launch(bags, tables, columns, out, BATCH, False, case.config)

    (compiled,) = compile_all(launch, target)
    return compiled


# the second push, and the second sum with a push, use copy engines
NAMES = ["push_gradient_kernel", "push_gradient_kernel", "keys_kernel"]
NAMES += ["sum_rows_kernel", "sum_runs_kernel", *["push_and_sum_kernel", "sum_runs_kernel"] * 2]


@functools.cache
def compile_gradient(target: str, dtype: torch.dtype, kind: int) -> list[Compiled]:
    numbers = torch.zeros(640, dtype=torch.int64)
    aligned = 16 // dtype.itemsize

    def launch() -> None:
        slot = torch.empty(64, 256, dtype=dtype)
        push = gradient.Push(
            endpoint(dtype),
            torch.empty(64, 512, dtype=dtype),
            torch.zeros(3, 7, dtype=torch.int64),
            0,
            slot,
            (0, 0),
            0,
            aligned,
            RANK,
            WORLD_SIZE,
            528,
        )
        copied = replace(push, concurrently=lambda run: run())
        push.launch()
        copied.launch()
        keys, bags = sums.find_keys(
            numbers, torch.zeros(2 * BATCH + 1, dtype=torch.int64), numbers[:3], 200, BATCH
        )
        # in fp32 with a step: other tests look at no other sums with copy engines
        both = kind in (sums.SGD, sums.ADAGRAD) and dtype == torch.float32
        scales, meta = torch.zeros(640), torch.zeros(2, 7, dtype=torch.int64)
        positions = sums.Positions(keys, bags, scales, numbers, meta, rate=torch.zeros(1))
        sizes = sums.Numbers(1e-8, 640, 200, BATCH)
        for bringing in (None, push, copied) if both else (None, push):
            sums.sum_rows(slot, positions, sizes, 0.25, dtype, 128, kind, aligned, push=bringing)

    return compile_all(launch, target)


def fits(compiled: Compiled) -> bool:
    """Registers for three programs of four warps; for 16 of one warp where a warp keeps a tile of
    rows in them."""
    assert compiled.registers is not None and compiled.spills is not None
    most, spilled = 168, 32
    if compiled.name in ("sum_rows_kernel", "push_and_sum_kernel"):
        most, spilled = sums.REGISTERS if compiled.target in NVIDIA else 255, 128
    return compiled.fits_shared and compiled.registers <= most and compiled.spills <= spilled


@pytest.mark.parametrize("is_fused", [False, True], ids=["lookup", "fused"])
@pytest.mark.parametrize(("case", "target"), on_targets([*CASES, ODD]), ids=str)
def test_lookups_fit_every_target(case: Case, is_fused: bool, target: str) -> None:
    assert fits(compile_lookup(case, target, is_fused))


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_fit_every_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # its pass for buffer loads fails on addresses made of integers
    if target not in NVIDIA and OLD:
        monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "0")
    kernels = compile_gradient(target, torch.float32, sums.ADAGRAD)
    assert [k.name for k in kernels] == NAMES
    assert all(map(fits, kernels))


@pytest.mark.parametrize("is_fused", [False, True], ids=["lookup", "fused"])
@pytest.mark.parametrize(("case", "target"), on_targets(CASES, NVIDIA), ids=str)
def test_rows_are_loaded_16_bytes_at_once_and_together(
    case: Case, is_fused: bool, target: str
) -> None:
    """All rows of a step are loaded before any is waited for, twice: adjacent bags, and a single
    long bag."""
    ptx = str(compile_lookup(case, target, is_fused).ptx)
    c = case.config
    loads = c.bags * c.unroll * case.dim * case.dtype.itemsize // 16 // (32 * c.num_warps)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == 2 * loads
    assert not re.search(r"ld\.global\S*\.b16", ptx), "no row is loaded element by element"


@pytest.mark.parametrize(("case", "target"), on_targets(CASES, NVIDIA), ids=str)
def test_stores_to_owners_are_16_bytes_and_signalled(case: Case, target: str) -> None:
    compiled = compile_lookup(case, target, True)
    origin = (compiled.params.index("slot_table"), 1)
    stores = [
        ins
        for function in parse(str(compiled.ptx))
        for ins in function.instructions
        if ins.parts[0] == "st" and origin in function.origin(ins)
    ]
    assert stores and {ins.opcode for ins in stores} == {"st.global.v4.b32"}
    seen = operations(compiled, guarded=())
    assert {ins.line for ins in stores} <= set(seen.stores)
    # READY of a peer, or of each where nothing is stored; and DONE of each.
    assert len(seen.signals) >= 2 and len(seen.waits) == 2 * WORLD_SIZE - 1
    assert lint(compiled, guarded=()) == []


@pytest.mark.parametrize("kind", [sums.DENSE, sums.SPARSE], ids=["dense", "sparse"])
def test_gradients_without_a_step_fit(kind: int) -> None:
    kernels = compile_gradient("sm_90", torch.float32, kind)
    assert [k.name for k in kernels] == NAMES[:-2]
    assert all(map(fits, kernels))


# The protocol is the same with each step and dtype. So each target has those that other tests
# compile for it, and sm_90 both.
STEPS = (
    ("sm_80", torch.float32, sums.ADAGRAD),
    ("sm_90", torch.float32, sums.SGD),
    ("sm_90", torch.bfloat16, sums.SGD),
    ("sm_100", torch.float32, sums.ADAGRAD),
)


def test_gradients_keep_the_protocol() -> None:
    for target, dtype, kind in STEPS:
        push, _, _, rows, _, both, *_ = compile_gradient(target, dtype, kind)
        for kernel in (push, both):
            assert lint(kernel, guarded=()) == []
            assert "st.global.v4.b32" in str(kernel.ptx)
        # READY of a peer, or of each where there is no ticket; and a group of each source.
        assert len(operations(push, guarded=()).waits) == 2 * WORLD_SIZE
        here = ("sys", "gpu")  # the watcher's word is this device's
        lines = str(both.ptx).splitlines()
        waits = operations(both, guarded=(), scopes=here).waits
        # Triton 3.6 passes a count through shared memory, like the ticket that ends the loop: a
        # count, not a wait
        assert len([at for at in waits if ".add." not in lines[at - 1]]) == 2 * WORLD_SIZE + 1
        assert lint(both, guarded=(), scopes=here, rules={LOAD_AFTER_WAIT}) == []
        assert len(re.findall(r"ld\.acquire\.gpu", str(both.ptx))) == 1, (
            "sums ask for their table's group, once a group"
        )
        for kernel in (rows, both):
            assert not re.search(r"\b(?:div|rem)\.s64", str(kernel.ptx)), (
                "a division of 64 bits costs a hundred instructions"
            )
        assert "st.global.v4.b32" in str(rows.ptx)
        assert not re.search(r"\bbar\.sync|st\.shared", str(rows.ptx)), (
            "a tile is one warp's, in its registers"
        )


@pytest.mark.parametrize(
    ("target", "dtype", "kind"), [step for step in STEPS if step[1] == torch.float32], ids=str
)
def test_gradients_by_copy_engines_keep_the_protocol(
    target: str, dtype: torch.dtype, kind: int
) -> None:
    """Data of copy engines is awaited like pushed data, and they do not start before all ranks have
    met."""
    _, watched, _, _, _, _, _, both, runs = compile_gradient(target, dtype, kind)
    here = ("sys", "gpu")  # the watcher's word is this device's
    for kernel in (watched, both):
        assert lint(kernel, guarded=()) == []
    waits = len(operations(watched, guarded=()).waits)
    assert waits == 2 * WORLD_SIZE, (
        "each peer to meet, a group of each source (one is this rank), own copies"
    )
    assert len(operations(both, guarded=(), scopes=here).waits) == waits + 1, (
        "and sums for the watcher"
    )
    assert lint(both, guarded=(), scopes=here, rules={LOAD_AFTER_WAIT}) == []
    assert len(re.findall(r"ld\.acquire\.gpu", str(both.ptx))) == 1, (
        "sums ask for their table's group, once a group"
    )
    assert "%globaltimer" not in str(runs.ptx), "a look, and no wait"


def test_the_lint_would_notice() -> None:
    """With the CTA barriers taken out, stores race with the signal after them."""
    for compiled in (
        compile_lookup(CASES[0], "sm_90", True),
        *(compile_gradient(*step)[0] for step in STEPS),
    ):
        ptx, taken = re.subn(r"\bbar\.(?:warp\.)?sync[^;]*;", "", str(compiled.ptx))
        assert taken
        assert STORE_BEFORE_SIGNAL in {v.rule for v in lint(replace(compiled, ptx=ptx), guarded=())}


@pytest.mark.parametrize(("dtype", "target"), on_targets([torch.int32, torch.int64]), ids=str)
def test_lists_in_pieces_fit_every_target(target: str, dtype: torch.dtype) -> None:
    mine, wanted, owners, tables = map(
        torch.tensor, ([1], [0, 2, 1, 2], [0, 0, 1, 3], [2, 3, 3, 4])
    )
    where, whole = (
        pieces.Layout(mine, wanted, owners, tables, 3, RANK),
        4 * BATCH + WORLD_SIZE * (3 + 1),
    )

    def launch() -> None:
        pieces.pack(
            torch.zeros(3 * BATCH, dtype=dtype), 640, where, torch.zeros(whole, dtype=torch.int64)
        )
        *_, arriving = pieces.unpack(
            torch.zeros(WORLD_SIZE * (BATCH + 3 + 1), dtype=torch.int64), BATCH, where
        )
        pieces.move(torch.zeros(640, dtype=dtype), torch.zeros(640, dtype=dtype), arriving, 640)

    kernels = compile_all(launch, target)
    assert [k.name for k in kernels] == ["pack_kernel", "unpack_kernel", "move_kernel"]
    assert all(map(fits, kernels))
