"""A wait has one barrier that all warps reach: each polls by itself, so they may read different
values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from tests.compile.harness import compile_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileweave.device.gluon import signal as hopper
from tileweave.device.triton.signal import leave, load_epoch, wait

ROOT = Path(__file__).parents[2]


@triton.jit
def waiting_kernel(signals, control, report, epoch, COUNT: tl.constexpr):
    wait(signals, COUNT, epoch, 0, 3, control, report)


@gluon.jit
def hopper_waiting_kernel(signals, control, report, epoch, COUNT: gl.constexpr):
    hopper.wait(signals, epoch * 0, epoch, epoch * 0 + 3, control, report, COUNT, 8)


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("kernel", [waiting_kernel, hopper_waiting_kernel], ids=["triton", "gluon"])
def test_warps_that_run_out_of_time_meet_at_no_barrier(
    kernel: triton.JITFunction, count: int
) -> None:
    words = torch.zeros(64, dtype=torch.int32)
    ptx = str(compile_kernel(kernel, (1,), words, words, words, 5, count, num_warps=8).ptx)
    first, last = ptx.index("ld.volatile"), ptx.index("fence.acquire")
    assert "exch.b32" in ptx[first:last] and "release.sys" in ptx[first:last], "the report"
    assert ptx.count("bar.sync") == 1 and ptx.index("bar.sync") > last


STAMPED = """
from tests.compile.test_waits import *
for kernel in (waiting_kernel, hopper_waiting_kernel, leaving_kernel):
    assert "%smid" in waited_for(kernel), kernel
"""


@triton.jit
def leaving_kernel(signals, control, report, epoch, COUNT: tl.constexpr):
    leave(control, load_epoch(control), COUNT)


def waited_for(kernel: triton.JITFunction) -> str:
    words = torch.zeros(64, dtype=torch.int32)
    return str(compile_kernel(kernel, (1,), words, words, words, 5, 1, num_warps=8).ptx)


def test_entries_of_a_trace_are_compiled_on_demand() -> None:
    for kernel in (waiting_kernel, hopper_waiting_kernel, leaving_kernel):
        assert "%smid" not in waited_for(kernel)
    path = f"{ROOT / 'src'}:{ROOT}"
    environment = {**os.environ, "TILEWEAVE_STAMPS": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", STAMPED], check=True, env=environment, cwd=ROOT)
