"""The cross compiler itself: four targets, resource usage, and a driver that is restored."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from tests.compile.barrier_words import reused_barriers
from tests.compile.harness import TARGETS, Compiled, compile_kernel, offline
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime import driver as active_driver
from triton.tools.tensor_descriptor import TensorDescriptor

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") == "1", reason="interpreted kernels cannot be compiled"
)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, K, scale, BLOCK: tl.constexpr):
    """One output tile of a @ b: enough to need a dot, a pipeline and shared memory on every
    target."""
    rows = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + rows)[None, :])
        b = tl.load(b_ptr + (k + rows)[:, None] * BLOCK + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(
        c_ptr + rows[:, None] * BLOCK + rows[None, :], (acc * scale).to(c_ptr.dtype.element_ty)
    )


@triton.jit
def descriptor_copy_kernel(source_desc, destination_desc, rows, BLOCK: tl.constexpr):
    for row in range(0, rows, BLOCK):
        destination_desc.store([row, 0], source_desc.load([row, 0]))


@gluon.jit
def gluon_copy_kernel(source_ptr, destination_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(destination_ptr + at, gl.load(source_ptr + at))


@gluon.jit
def barrier_and_sum_kernel(
    source_ptr, destination_ptr, BLOCK: gl.constexpr, INIT: gl.constexpr, INVALIDATE: gl.constexpr
):
    """A barrier without a wait, then a sum over all warps, which reuses its memory."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if INIT:
        mbarrier.init(barrier, count=1)
    if INVALIDATE:
        mbarrier.invalidate(barrier)
    gl.store(
        destination_ptr, gl.max(gl.load(source_ptr + gl.arange(0, BLOCK, layout=layout)), axis=0)
    )


def compile_matmul(target: str) -> Compiled:
    x = torch.empty(64, 64, dtype=torch.float16)
    return compile_kernel(
        matmul_kernel, (1,), x, x, x, 256, 0.5, BLOCK=64, target=target, num_warps=4
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles_and_reports_resources(target: str) -> None:
    compiled = compile_matmul(target)
    assert compiled.name == "matmul_kernel" and compiled.target == target
    assert compiled.shared_bytes > 0 and compiled.fits_shared
    assert compiled.registers is not None and 16 <= compiled.registers <= 512
    assert compiled.spills == 0
    if target == "gfx942":
        assert compiled.ptx is None and "mfma" in str(compiled.asm["amdgcn"])
    else:
        assert compiled.ptx is not None and f".target {target}" in compiled.ptx
        assert compiled.params == (
            "a_ptr",
            "b_ptr",
            "c_ptr",
            "K",
            "scale",
            "global_scratch",
            "profile_scratch",
        )


def test_a_starved_kernel_reports_spills() -> None:
    x = torch.empty(128, 128, dtype=torch.float16)
    compiled = compile_kernel(
        matmul_kernel, (1,), x, x, x, 256, 0.5, BLOCK=128, target="sm_80", num_warps=4, maxnreg=32
    )
    assert compiled.registers is not None and compiled.registers <= 32
    assert compiled.spills is not None and compiled.spills > 0


def test_descriptor_arguments_become_tma_on_hopper_and_pointers_on_ampere() -> None:
    x = TensorDescriptor.from_tensor(torch.empty(256, 64, dtype=torch.bfloat16), [64, 64])
    hopper = compile_kernel(descriptor_copy_kernel, (1,), x, x, 256, BLOCK=64)
    assert hopper.ptx is not None and "cp.async.bulk.tensor" in hopper.ptx
    assert (
        hopper.params[:2] == ("source_desc", "source_desc.shape0")
        and "destination_desc" in hopper.params
    )
    ampere = compile_kernel(descriptor_copy_kernel, (1,), x, x, 256, BLOCK=64, target="sm_80")
    assert ampere.ptx is not None and "cp.async.bulk" not in ampere.ptx
    assert {"source_desc", "source_desc.stride1", "destination_desc", "rows"} <= set(ampere.params)


def test_gluon_kernels_compile() -> None:
    x = torch.empty(512)
    compiled = compile_kernel(gluon_copy_kernel, (1,), x, x, BLOCK=512)
    assert compiled.ptx is not None and "ld.global.v4" in compiled.ptx


def test_data_in_the_memory_of_barriers_is_noticed() -> None:
    x = torch.empty(512)
    for init, invalidate, barriers in ((False, False, 0), (True, True, 0)):
        fine = compile_kernel(barrier_and_sum_kernel, (1,), x, x, 512, init, invalidate)
        assert fine.ptx is not None and reused_barriers(fine.ptx) == ([], barriers)
    with pytest.raises(AssertionError, match=r"made mbarriers, at \[0\]"):
        compile_kernel(barrier_and_sum_kernel, (1,), x, x, 512, True, False)


def test_launches_are_recorded_and_touch_nothing() -> None:
    x, y = torch.arange(512.0), torch.zeros(512)
    with offline("sm_90") as launched:
        gluon_copy_kernel[(1,)](x, y, BLOCK=512)
        gluon_copy_kernel[(1,)](x, y, BLOCK=512)
    assert [c.name for c in launched] == ["gluon_copy_kernel"] and launched[0].ptx is not None
    assert launched[0].registers is not None
    assert launched[0].params == (
        "source_ptr",
        "destination_ptr",
        "global_scratch",
        "profile_scratch",
    )
    assert not y.any()


def test_a_launch_too_big_for_the_target_raises() -> None:
    x = torch.empty(64, 64, dtype=torch.float16)
    with offline("sm_80"), pytest.raises(triton.runtime.errors.OutOfResources):
        matmul_kernel[(1,)](x, x, x, 256, 0.5, BLOCK=64, num_stages=13)


def test_the_previous_driver_comes_back() -> None:
    before = active_driver._active
    with offline("sm_90"):
        outer = active_driver._active
        with offline("sm_80"):
            assert active_driver.active.get_current_target().arch == 80
        assert active_driver._active is outer
    assert active_driver._active is before


def test_unknown_targets_are_named() -> None:
    with (
        pytest.raises(ValueError, match="known are sm_80, sm_90, sm_100, gfx942"),
        offline("sm_70"),
    ):
        pass
