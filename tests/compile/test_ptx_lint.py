"""The lint accepts kernels that keep the protocol's order and finds one planted fault each, on the
output of this triton.

Newer compilers repair some faults themselves (a barrier before a release atomic, a full drain after
a descriptor store). Those cases are asserted against the PTX text, so that they hold at both ends
of the supported range. Every rule also has a fault that no compiler repairs.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compile.harness import Compiled, compile_kernel
from tests.compile.ptx_lint import (
    LOAD_AFTER_WAIT,
    PROXY_FENCE,
    STORE_BEFORE_SIGNAL,
    Violation,
    lint,
    operations,
)

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from tests.compile import lint_kernels as kernels
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

HALF = torch.empty(1024, 1024, dtype=torch.bfloat16)
WORDS = torch.zeros(256, dtype=torch.int32)
TABLE = torch.zeros(8, dtype=torch.int64)
EPOCH = 3


def rules_broken(found: list[Violation]) -> set[str]:
    return {v.rule for v in found}


# ---- store-before-signal


def push(form: str, barrier: bool) -> Compiled:
    return compile_kernel(kernels.push_kernel, (1,), HALF, HALF, WORDS, EPOCH, form, barrier, 1024)


@pytest.mark.parametrize("form", ["atomic", "release", "fence"])
def test_a_barrier_between_stores_and_signal_passes(form: str) -> None:
    compiled = push(form, barrier=True)
    seen = operations(compiled)
    assert len(seen.signals) == 1 and seen.stores
    assert lint(compiled) == []


@pytest.mark.parametrize("form", ["release", "fence"])
def test_a_signal_without_barrier_is_caught(form: str) -> None:
    compiled = push(form, barrier=False)
    (signal,) = operations(compiled).signals
    found = lint(compiled)
    assert (
        found
        and rules_broken(found) == {STORE_BEFORE_SIGNAL}
        and {v.line for v in found} == {signal}
    )
    assert lint(compiled, rules=[LOAD_AFTER_WAIT, PROXY_FENCE]) == []


@pytest.mark.parametrize("form", ["release", "fence"])
def test_only_the_report_itself_speaks_for_no_data(form: str) -> None:
    planted = push(form, barrier=False)

    def with_report(instead_of: str) -> SimpleNamespace:
        return SimpleNamespace(
            ptx=planted.ptx,
            params=["report" if name == instead_of else name for name in planted.params],
        )

    assert (
        lint(with_report("signal")) == []
        and operations(with_report("signal")).signals == operations(planted).signals
    )
    for other in ("x", "slot"):
        assert lint(with_report(other)) == lint(planted) != []


def test_a_release_atomic_without_barrier_is_caught_unless_the_compiler_adds_it() -> None:
    planted = push("atomic", barrier=False)
    assert planted.ptx is not None
    assert bool(lint(planted)) == ("bar.sync" not in planted.ptx)
    stripped = re.sub(r"bar\.sync[^;]*;", "", planted.ptx)
    assert rules_broken(lint(stripped)) == {STORE_BEFORE_SIGNAL}


def test_a_fence_before_the_barrier_does_not_release_what_came_before_the_barrier() -> None:
    found = lint(push("fence_too_early", barrier=True))
    assert rules_broken(found) == {STORE_BEFORE_SIGNAL} and "fence" in found[0].text


def test_a_descriptor_store_is_drained_before_its_signal() -> None:
    tiles = TensorDescriptor.from_tensor(HALF, [64, 64])

    def push_descriptor(drain: bool) -> Compiled:
        return compile_kernel(
            kernels.push_descriptor_kernel, (1,), tiles, tiles, WORDS, EPOCH, 5, drain, 64
        )

    right, planted = push_descriptor(True), push_descriptor(False)
    assert len(operations(right).bulk_stores) == 1
    assert lint(right, guarded=()) == []
    assert planted.ptx is not None
    drained = re.search(r"bulk\.wait_group\s", planted.ptx) is not None
    assert bool(lint(planted, guarded=())) == (not drained)
    only_read = re.sub(r"bulk\.wait_group\s", "bulk.wait_group.read ", planted.ptx)
    assert "not drained" in lint(only_read, guarded=())[0].text


def gluon_push(drain: str | int, barrier: bool = True) -> Compiled:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    slot = GluonDescriptor.from_tensor(HALF, [64, 64], layout)
    return compile_kernel(kernels.gluon_push_kernel, (1,), slot, WORDS, EPOCH, 5, drain, barrier)


def test_tma_stores_need_a_full_drain_and_then_a_barrier() -> None:
    right = gluon_push(drain=0)
    assert len(operations(right).bulk_stores) == 2
    assert lint(right) == []
    assert "not drained" in lint(gluon_push(drain="read"))[0].text
    assert "between the drain" in lint(gluon_push(drain=0, barrier=False))[0].text


def test_groups_left_open_must_be_declared() -> None:
    one_open, two_open = gluon_push(drain=1), gluon_push(drain=2)
    assert len(lint(one_open)) == 1 and lint(one_open, open_groups=1) == []
    assert len(lint(two_open)) == 2 and len(lint(two_open, open_groups=1)) == 1
    assert lint(two_open, open_groups=2) == []
    assert lint(gluon_push(drain="read"), open_groups=1), "a read-only wait drains no group at all"


def test_stores_that_no_signal_speaks_for_must_be_named() -> None:
    never_drained = gluon_push(drain="read")
    assert lint(never_drained) and lint(never_drained, unsignalled=["signal"])
    assert lint(never_drained, unsignalled=["slot_desc"]) == []
    assert operations(never_drained, unsignalled=["slot_desc"]).bulk_stores == ()
    with pytest.raises(ValueError, match="no parameter 'out_desc': the kernel has slot_desc"):
        lint(never_drained, unsignalled=["out_desc"])


# ---- load-after-wait and proxy-fence


def gather_matmul(wait: str, fence: bool) -> Compiled:
    tiles = TensorDescriptor.from_tensor(HALF, [128, 64])
    return compile_kernel(
        kernels.gather_matmul_kernel,
        (1,),
        tiles,
        tiles,
        HALF,
        WORDS,
        EPOCH,
        5,
        1024,
        wait,
        fence,
        128,
        num_stages=3,
    )


def test_a_wait_per_tile_with_a_proxy_fence_passes() -> None:
    compiled = gather_matmul("tile", fence=True)
    seen = operations(compiled)
    assert len(seen.waits) == 1 and len(seen.guarded_loads) == 6, (
        "two prologue stages and the loop, of a and b"
    )
    assert lint(compiled) == []
    assert len(operations(compiled, guarded=["a_desc"]).guarded_loads) == 3


def test_a_missing_proxy_fence_is_caught() -> None:
    compiled = gather_matmul("tile", fence=False)
    assert compiled.ptx is not None and "fence.proxy.async.shared::cta" in compiled.ptx, (
        "which is not enough"
    )
    assert rules_broken(lint(compiled, guarded=["a_desc"])) == {PROXY_FENCE}
    assert lint(compiled, rules=[STORE_BEFORE_SIGNAL, LOAD_AFTER_WAIT]) == []


@pytest.mark.parametrize("wait", ["k_unused", "k_sometimes"])
def test_loads_pipelined_above_their_wait_are_caught(wait: str) -> None:
    compiled = gather_matmul(wait, fence=False)
    assert operations(compiled).waits
    found = lint(compiled, rules=[LOAD_AFTER_WAIT], guarded=["a_desc"])
    assert len(found) >= 2, "at least the two prologue stages of a"


@pytest.mark.parametrize("wait", ["tile", "k_unused"])
def test_pointer_loads_are_held_to_the_same_order(wait: str) -> None:
    compiled = compile_kernel(
        kernels.gather_matmul_pointer_kernel,
        (1,),
        HALF,
        HALF,
        HALF,
        WORDS,
        EPOCH,
        5,
        1024,
        wait,
        64,
        num_stages=3,
    )
    assert operations(compiled, guarded=["a"]).guarded_loads
    found = lint(compiled, guarded=["a"])
    assert rules_broken(found) == (set() if wait == "tile" else {LOAD_AFTER_WAIT})


def reduce(early: bool = False, relaxed: bool = False, fence: bool = False) -> Compiled:
    return compile_kernel(
        kernels.reduce_kernel,
        (1,),
        torch.empty(512),
        TABLE,
        torch.empty(512),
        WORDS,
        EPOCH,
        early,
        relaxed,
        fence,
        512,
    )


def test_guards_tell_peer_data_from_local_data() -> None:
    right = reduce()
    assert lint(right, guarded=["*slots"]) == []
    assert rules_broken(lint(right)) == {LOAD_AFTER_WAIT}, (
        "without guards the local operand counts, too"
    )
    assert rules_broken(lint(reduce(early=True), guarded=["*slots"])) == {LOAD_AFTER_WAIT}
    assert lint(right, guarded=["x"]) != [], "the named operand is read before the wait"
    with pytest.raises(ValueError, match="no parameter 'slot': the kernel has x, slots, out"):
        lint(right, guarded=["*slot"])


def test_a_relaxed_wait_needs_a_fence() -> None:
    assert operations(reduce(relaxed=True, fence=True)).waits
    assert lint(reduce(relaxed=True, fence=True), guarded=["*slots"]) == []
    found = lint(reduce(relaxed=True), guarded=["*slots"])
    assert rules_broken(found) == {LOAD_AFTER_WAIT} and "no fence" in found[0].text
    assert not operations(reduce(relaxed=True)).waits


# ---- partitions


def specialised(fence: bool = True, late: bool = False, barrier: bool = True) -> Compiled:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    a = GluonDescriptor.from_tensor(HALF, [64, 64], layout)
    return compile_kernel(
        kernels.specialised_kernel, (1,), a, HALF, WORDS, WORDS, EPOCH, 5, fence, late, barrier
    )


def test_a_one_warp_partition_may_use_the_warp_barrier() -> None:
    compiled = specialised()
    seen = operations(compiled)
    assert (len(seen.signals), len(seen.waits), len(seen.guarded_loads)) == (1, 1, 1)
    assert compiled.ptx is not None and "bar.warp.sync" in compiled.ptx
    assert lint(compiled) == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ({"fence": False}, PROXY_FENCE),
        ({"late": True}, LOAD_AFTER_WAIT),
        ({"barrier": False}, STORE_BEFORE_SIGNAL),
    ],
)
def test_faults_inside_a_partition_are_caught(fault: dict[str, Any], rule: str) -> None:
    assert rule in rules_broken(lint(specialised(**fault), rules=[rule]))


# ---- the graph itself, on PTX written by hand

SKELETON = """
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
.reqntid 128
{{
    .reg .pred %p<4>;
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    {body}
    ret;
}}
"""


def lint_body(body: str, **options: Any) -> list[Violation]:
    return lint(SKELETON.format(body=body), **options)


def test_a_barrier_on_one_path_only_is_not_enough() -> None:
    body = """st.global.b32 [%rd1], %r1;
    @%p1 bra $L_skip;
    {barrier}
    $L_skip: {after}
    red.release.sys.global.add.u32 [%rd2], 1;"""
    assert lint_body(body.format(barrier="bar.sync 0;", after=""))
    assert lint_body(body.format(barrier="bar.warp.sync -1;", after="bar.sync 0;")) == []
    assert lint_body(body.format(barrier="", after="bar.warp.sync -1;"))


def test_a_store_of_the_previous_iteration_counts() -> None:
    body = """$L_loop: {top}
    red.release.sys.global.add.u32 [%rd2], 1;
    st.global.v4.b32 [%rd1], {{%r1, %r2, %r3, %r4}};
    @%p1 bra $L_loop;"""
    assert lint_body(body.format(top=""))
    assert lint_body(body.format(top="bar.sync 0;")) == []


def test_indirect_branches_and_local_labels_are_followed() -> None:
    body = """st.global.b32 [%rd1], %r1;
    $L_table: .branchtargets $L_a, $L_b;
    brx.idx %r2, $L_table;
    $L_a: bar.sync 0; bra.uni $L_end;
    $L_b: {{ poll: ld.shared.b32 %r3, [%r4]; @%p1 bra poll; }} {{ poll: @%p2 bra poll; }} {barrier}
    $L_end: st.release.sys.global.b32 [%rd2], 1;"""
    assert lint_body(body.format(barrier=""))
    assert lint_body(body.format(barrier="bar.sync 0;")) == []


def test_partitions_may_share_a_tail() -> None:
    """As LLVM merges equal ends of two partitions. Here the first is one warp, the second two."""
    push = "st.global.b32 [%rd1], %r1; {barrier} red.release.sys.global.add.u32 [%rd2], 1;"
    by_warp, by_two = (
        push.format(barrier="bar.warp.sync -1;"),
        push.format(barrier="bar.sync 2, 64;"),
    )
    body = """$L_idle: barrier.sync 1;
    $L_table: .branchtargets $L_one, $L_two;
    brx.idx %r2, $L_table;
    $L_one: barrier.sync 1; {one}
    bra.uni $L_tail;
    $L_two: barrier.sync 1; {two} bar.sync 2, 64;
    $L_tail: {tail} barrier.sync 1;
    bra.uni $L_idle;"""
    assert lint_body(body.format(one=by_warp, two=by_two, tail="mov.u32 %r9, 0;")) == []
    assert len(lint_body(body.format(one=by_warp, two=by_warp, tail="mov.u32 %r9, 0;"))) == 1, (
        "of two warps"
    )
    assert len(lint_body(body.format(one=by_warp, two=by_two, tail=by_warp))) == 1, "of two again"


def test_narrower_scopes_are_checked_on_request() -> None:
    body = "st.global.b32 [%rd1], %r1; atom.add.acq_rel.gpu.global.u32 %r2, [%rd2], 1;"
    assert lint_body(body) == []
    assert rules_broken(lint_body(body, scopes=["sys", "gpu"])) == {STORE_BEFORE_SIGNAL}
    poll = (
        "$L_poll: ld.volatile.global.b32 %r1, [%rd1]; setp.ne.b32 %p1, %r1, 0; @%p1 bra "
        "$L_poll; {fence}"
    )
    body = poll + " ld.global.b32 %r2, [%rd2];"
    assert lint_body(body.format(fence=""), scopes=["gpu"], guarded=[1])
    for scope in ("gpu", "sys"):
        assert (
            lint_body(body.format(fence=f"fence.acq_rel.{scope};"), scopes=["gpu"], guarded=[1])
            == []
        )


def test_a_guarded_load_in_a_kernel_without_waits_is_caught() -> None:
    body = "ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1];"
    assert rules_broken(lint_body(body, guarded=[0])) == {LOAD_AFTER_WAIT}
    assert lint_body(body, guarded=[1]) == [] and lint_body(body) == []


def test_unknown_rules_are_named() -> None:
    with pytest.raises(
        ValueError, match="known are store-before-signal, load-after-wait, proxy-fence"
    ):
        lint_body("", rules=["order"])
