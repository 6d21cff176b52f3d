"""The kernels of routing and dispatch, compiled without a GPU: they fit the device, and move 16
bytes per access, in order."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace

import pytest
import torch
from tests.compile.harness import TARGETS, Compiled, offline, on_targets
from tests.compile.ptx_lint import STORE_BEFORE_SIGNAL, lint, operations

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)


from tileweave.kernels.experts import dispatch_hopper as hopper
from tileweave.kernels.experts import dispatch_hopper_ordered as ordered
from tileweave.kernels.experts import dispatch_triton as plain
from tileweave.kernels.experts import routing as moe_routing
from tileweave.kernels.experts import rows as expert_rows
from tileweave.kernels.experts import weight_gradient_hopper as grouped_outer_hopper
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.experts.routing_plan import layout_of
from tileweave.planning.schedules.grouped import DispatchConfig, RoutingCut

WORLD_SIZE, RANK, TOKENS, TOPK, EXPERTS, DEPTH, COLS = 4, 1, 512, 8, 4, 1024, 768
NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))

ONE_LAUNCH, SORT = RoutingCut(1, 4096, 1), RoutingCut(2, 128, 32)
TRITON_CASES = (
    DispatchConfig("triton", 64, 128, 64, 3, 4),
    DispatchConfig("triton", 16, 64, 128, 3, 4, push_rows=1),
)
HOPPER_CASES = (
    DispatchConfig("hopper", 128, 256, 64, 4, 8, signal_blocks=32),
    DispatchConfig("hopper", 128, 128, 64, 6, 8),
    DispatchConfig("hopper", 64, 64, 128, 6, 4, signal_blocks=1),
)
ORDERED_CASES = (DispatchConfig("hopper", 128, 256, 64, 4, 8, signal_blocks=32, ordered=True),)


def endpoint(slot_size: int, dtype: torch.dtype) -> Peers:
    table, words = torch.zeros(WORLD_SIZE, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32)
    return Peers(
        torch.empty(2 * slot_size, dtype=dtype), slot_size, table, table, words, words, words, words
    )


def fields() -> tuple[torch.Tensor, ...]:
    begins, sizes = layout_of(WORLD_SIZE, TOKENS, TOPK, EXPERTS)
    table = torch.zeros(begins[-1], dtype=torch.int32)
    return tuple(
        table[begin : begin + size] for begin, size in zip(begins[:-1], sizes, strict=True)
    )


@functools.cache
def compile_routing(
    target: str, kind: torch.dtype, experts: int = EXPERTS, cut: RoutingCut = ONE_LAUNCH
) -> list[Compiled]:
    peers = endpoint(WORLD_SIZE * TOKENS * TOPK, torch.int32)
    begins, _ = layout_of(WORLD_SIZE, TOKENS, TOPK, experts)
    with offline(target) as launched:
        ids = torch.zeros(TOKENS, TOPK, dtype=kind)
        launch = moe_routing.launcher(
            peers, cut, begins, TOKENS, TOPK, experts, RANK, WORLD_SIZE, 132
        )
        launch(ids, torch.zeros(begins[-1], dtype=torch.int32), TOKENS)
    return launched


@functools.cache
def compile_dispatch(
    config: DispatchConfig, target: str, depth: int = DEPTH, turned: bool = False
) -> Compiled:
    """``turned``: experts as backward reads them."""
    x, w = (
        torch.empty(TOKENS, depth, dtype=torch.bfloat16),
        torch.empty(EXPERTS, COLS, depth, dtype=torch.bfloat16),
    )
    if turned:
        w = torch.empty(EXPERTS, depth, COLS, dtype=torch.bfloat16).transpose(1, 2)
    bound = WORLD_SIZE * TOKENS * TOPK
    y = torch.empty(bound, COLS, dtype=torch.bfloat16)
    peers = endpoint(3 * TOKENS * depth, torch.bfloat16)
    make = (ordered if config.ordered else hopper if config.kernel == "hopper" else plain).launcher
    with offline(target) as launched:
        make(peers, config, RANK, WORLD_SIZE, TOKENS, TOPK, bound, w, 132)(x, w, y, fields())
    return launched[0]


@pytest.mark.parametrize("target", TARGETS)
def test_routing_fits_every_target(target: str) -> None:
    cases = [compile_routing(target, torch.int64), compile_routing(target, torch.int64, 32, SORT)]
    assert [len(launched) for launched in cases] == [1, 2]
    for compiled in (*cases[0], *cases[1]):
        assert compiled.registers is not None and compiled.spills is not None
        assert compiled.fits_shared and compiled.spills <= 64


@pytest.mark.parametrize(("config", "target"), on_targets(TRITON_CASES), ids=str)
def test_dispatch_fits_every_target(config: DispatchConfig, target: str) -> None:
    compiled = compile_dispatch(config, target)
    assert compiled.fits_shared and compiled.spills is not None and compiled.spills <= 16


EITHER_WAY = [(HOPPER_CASES[0], True), (ORDERED_CASES[0], True)]


@pytest.mark.parametrize(
    ("config", "turned"),
    [*((c, False) for c in HOPPER_CASES + ORDERED_CASES), *EITHER_WAY],
    ids=repr,
)
def test_hopper_fits(config: DispatchConfig, turned: bool) -> None:
    compiled = compile_dispatch(config, "sm_90", turned=turned)
    assert (
        compiled.name
        == f"dispatch_grouped_matmul_{'ordered' if config.ordered else 'hopper'}_kernel"
    )
    assert (
        compiled.registers == 168
        and compiled.spills is not None
        and compiled.spills <= 32
        and compiled.fits_shared
    )


@pytest.mark.parametrize("config", [*TRITON_CASES, *HOPPER_CASES], ids=repr)
def test_rows_are_gathered_16_bytes_at_once(config: DispatchConfig) -> None:
    """Weights, too, in the Triton kernel. Nothing is moved by single elements, and tokens by 16
    bytes."""
    ptx = str(compile_dispatch(config, "sm_90").ptx)
    sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+)", ptx))
    assert sizes == {"0x10"}
    assert "st.global.v4.b32" in ptx and not re.search(r"[sl][td]\.global\S*\.b16", ptx)
    if config.kernel == "hopper":
        threads = 32 * hopper.GATHER_WARPS.value
        copies = len(re.findall(r"cp\.async\.cg\.shared\.global", ptx))
        assert copies == config.tile_m * config.tile_k // 8 // threads, "one K block of rows, once"
        assert "cp.async.mbarrier.arrive.noinc" in ptx and "mbarrier.init.shared::cta.b64 [%" in ptx
        assert f", {threads + 1};" in "".join(re.findall(r"mbarrier\.init[^;]*;", ptx))


@pytest.mark.parametrize("config", ORDERED_CASES, ids=repr)
def test_rows_in_order_come_by_tma(config: DispatchConfig) -> None:
    """Rows and weights are read by one load each. The part that sorts rows moves 16 bytes per
    access, and releases what it has stored."""
    ptx = str(compile_dispatch(config, "sm_90").ptx)
    assert (
        len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2
        and "cp.async.cg" not in ptx
    )
    assert (
        "ld.global.v4.b32" in ptx
        and "st.global.v4.b32" in ptx
        and not re.search(r"[sl][td]\.global\S*\.b16", ptx)
    )
    assert "atom.global.gpu.release.exch.b32" in ptx and "fence.proxy.async" in ptx


def test_gradients_of_experts_fit() -> None:
    left, right = (
        torch.empty(640, 256, dtype=torch.bfloat16),
        torch.empty(640, 512, dtype=torch.bfloat16),
    )
    assert grouped_outer_hopper.takes(left, right) and not grouped_outer_hopper.takes(
        left[:, :128], right
    )
    with offline("sm_90") as launched:
        grouped_outer_hopper.grouped_outer(
            left, right, torch.zeros(EXPERTS + 1, dtype=torch.int32), 132
        )
    (compiled,) = launched
    assert compiled.registers == 168 and compiled.spills == 0 and compiled.fits_shared
    assert "wgmma.mma_async" in str(
        compiled.ptx
    ) and "cp.async.bulk.tensor.2d.global.shared" in str(compiled.ptx)


@pytest.mark.parametrize("target", NVIDIA)
def test_plain_kernels_keep_the_protocol(target: str) -> None:
    sort, _ = compile_routing(target, torch.int32, 32, SORT)  # the other kernel does not wait
    for compiled in (
        *compile_routing(target, torch.int32),
        sort,
        *(compile_dispatch(c, t) for c, t in on_targets(TRITON_CASES, NVIDIA) if t == target),
    ):
        seen = operations(compiled, guarded=("slots",))
        assert seen.signals and seen.waits
        assert lint(compiled, guarded=("slots",)) == []


@pytest.mark.parametrize("config", HOPPER_CASES + ORDERED_CASES, ids=repr)
def test_hopper_keeps_the_protocol(config: DispatchConfig) -> None:
    compiled = compile_dispatch(config, "sm_90")
    assert operations(compiled, guarded=("slots",)).signals
    assert lint(compiled, guarded=("slots",)) == []


def test_the_lint_would_notice() -> None:
    for compiled in (
        *compile_routing("sm_90", torch.int32),
        compile_dispatch(TRITON_CASES[0], "sm_90"),
    ):
        ptx, taken = re.subn(r"\bbar\.(?:warp\.)?sync[^;]*;", "", str(compiled.ptx))
        assert taken
        assert STORE_BEFORE_SIGNAL in {
            v.rule for v in lint(replace(compiled, ptx=ptx), guarded=("slots",))
        }


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_on_rows_fit_every_target(target: str) -> None:
    x, kept = (
        torch.empty(TOKENS, DEPTH, dtype=torch.bfloat16),
        torch.empty(3, TOKENS, DEPTH, dtype=torch.bfloat16),
    )
    table, y = fields(), torch.empty(WORLD_SIZE * TOKENS * TOPK, 2 * DEPTH, dtype=torch.bfloat16)
    with offline(target) as launched:
        expert_rows.keep_tokens(
            endpoint(3 * TOKENS * DEPTH, torch.bfloat16), kept, table[2], TOPK, RANK
        )
        expert_rows.gather_rows(x, kept, table, EXPERTS, TOKENS, TOPK, RANK, WORLD_SIZE)
        peers = endpoint(3 * TOKENS * DEPTH, torch.bfloat16)
        factors = torch.zeros(WORLD_SIZE * TOKENS * TOPK)
        expert_rows.gather_rows(x, peers, table, EXPERTS, TOKENS, TOPK, RANK, WORLD_SIZE)
        expert_rows.weigh_rows(y, y, factors, torch.empty_like(y), table, EXPERTS)
        expert_rows.zero_unused(torch.empty(EXPERTS, COLS, DEPTH, dtype=torch.bfloat16), table[0])
        expert_rows.swiglu(y, y[:, :DEPTH].contiguous(), table[0], EXPERTS)
        expert_rows.swiglu_gradient(y[:, :DEPTH].contiguous(), y, y, table[0], EXPERTS)
    assert len(launched) == 7 and all(k.spills == 0 for k in launched)
    if target in NVIDIA:
        wide = [k for k in launched if k.name != "zero_unused_kernel"]
        assert all(
            "st.global.v4.b32" in str(k.ptx) or "st.global.v2.b32" in str(k.ptx) for k in wide
        )
