"""Calls under conditions that an adversary found: memory that cannot be mapped, Ctrl-C between two
steps of the host, variables that differ between ranks, values whose sign or infinity gets lost."""

from __future__ import annotations

import gc
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import parity
from tests.support.calls import refusal
from tests.support.matmul_cases import Case, prepare
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.planning.problem import MatmulConfig
from tileweave.transport import host_memory

ENGINE = MatmulConfig(
    "triton", "copy_engine", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1
)


def gather(me: Member, rows: int = 4, depth: int = 8) -> None:
    y = tw.all_gather_matmul(torch.full((rows, depth), float(me.rank)), torch.ones(3, depth))
    assert torch.equal(y[:, 0], torch.arange(2.0).repeat_interleave(rows) * depth)


# --- Memory that cannot be mapped ---


def no_address_space() -> ExitStack:
    stack = ExitStack()
    error = OSError(12, "Cannot allocate memory")
    stack.enter_context(mock.patch.object(host_memory.mmap, "mmap", side_effect=error))
    return stack


def no_descriptors() -> ExitStack:
    """One more may be opened: that of the own block, and none of a peer."""
    stack, limits = ExitStack(), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    return stack


FAULTS = {"address space": no_address_space, "descriptors": no_descriptors}


def cannot_map(me: Member, name: str) -> tuple[str, float]:
    tw.close()
    gather(me)
    me.barrier()
    began = time.monotonic()
    with FAULTS[name]() if me.rank == 1 else ExitStack():
        said = refusal(gather, me, 4, 2048)
    taken = time.monotonic() - began
    tw.close()
    me.barrier()
    gather(me, 4, 2048)
    return said, taken


@pytest.mark.parametrize("name", FAULTS)
def test_memory_that_one_rank_cannot_map(worlds: Worlds, name: str) -> None:
    for said, taken in worlds("gloo", 2).run(cannot_map, name):
        assert said.startswith("UnsupportedError: asked: ") and "remedy: " in said, said
        assert "rank 1" in said or "process" in said, said
        assert taken < 5.0, f"known at once, and not after the time-out: {taken:.1f} s"


def held() -> tuple[int, int]:
    """Descriptors, and mappings of memory that ranks share."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return len(os.listdir("/proc/self/fd")), sum("memfd:tileweave" in line for line in lines)


def grows(me: Member) -> list[tuple[int, int]]:
    found = []
    for step in range(1, 10):
        gather(me, 2 * step, 512)
        found.append(held())
    return found


def test_outgrown_memory_is_unmapped(worlds: Worlds) -> None:
    for found in worlds("gloo", 2).run(grows):
        assert found[2] == found[-1], found


# --- Ctrl-C ---


def interrupted_push(me: Member) -> str:
    """On rank 1, after the copies are queued and before the kernel is launched whose counters they
    wait for."""
    call = lambda number: prepare(Case(16, 16, 16), me.rank, 2, me.device, number)  # noqa: E731
    parity.run(call(0), dist.group.WORLD, ENGINE)
    submit = ThreadPoolExecutor.submit

    def interrupted(self: ThreadPoolExecutor, *args: object) -> object:
        submit(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    said = ""
    with mock.patch.object(ThreadPoolExecutor, "submit", interrupted) if me.rank else ExitStack():
        try:
            if me.rank:
                parity.run(call(1), dist.group.WORLD, ENGINE)
        except KeyboardInterrupt:
            said = "KeyboardInterrupt"
    began = time.monotonic()
    tw.close()
    assert time.monotonic() - began < 5.0
    me.barrier()
    gather(me)
    return said


def test_ctrl_c_after_copies_were_queued(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(interrupted_push) == ["", "KeyboardInterrupt"]


# --- Variables that are set on some ranks only, and other lines of the program ---


def with_variable(me: Member, name: str, value: str) -> str:
    tw.close()
    group = dist.new_group([0, 1])  # its first call is the one below
    with mock.patch.dict(os.environ, {name: value} if me.rank == 1 else {}):
        said = refusal(tw.all_gather_matmul, torch.ones(4, 8), torch.ones(3, 8), group=group)
    tw.close()
    me.barrier()
    gather(me)
    return said


@pytest.mark.parametrize(
    ("name", "value", "ranks"), [("TRITON_INTERPRET", "0", [0]), ("TILEWEAVE_DEBUG", "1", [1])]
)
def test_variable_of_one_rank_is_named(
    worlds: Worlds, name: str, value: str, ranks: list[int]
) -> None:
    for said in worlds("gloo", 2).run(with_variable, name, value):
        assert said.startswith(f"RankMismatchError: asked: {name}=1 on ranks {ranks} only"), said


def in_another_order(me: Member) -> tuple[str, str]:
    """Calls of equal shapes: nothing tells them apart but the lines from which they are made."""
    w, x, z = torch.ones(3, 8), torch.ones(4, 8), torch.zeros(4, 8)
    first = lambda: tw.all_gather_matmul(x, w)  # noqa: E731
    second = lambda: tw.all_gather_matmul(z, w)  # noqa: E731
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        calls = (first, second) if me.rank == 0 else (second, first)
        other = refusal(calls[0])
        same = refusal(first)
    tw.close()
    return other, same


def test_calls_of_equal_shape_in_another_order(worlds: Worlds) -> None:
    for other, same in worlds("gloo", 2).run(in_another_order):
        assert other.startswith("RankMismatchError: ") and "test_adverse_calls.py:" in other, other
        assert same == ""


# --- Values ---


def infinite_token(me: Member) -> list[float]:
    """An infinite token on each rank, whose expert is on its own rank."""
    x = torch.ones(2, 8)
    x[0] = float("inf")
    h, plan = tw.dispatch_grouped_matmul(x, torch.ones(2, 16, 8), torch.full((2, 1), 2 * me.rank))
    return tw.grouped_matmul_combine(h, torch.ones(2, 8, 16), plan, torch.ones(2, 1))[:, 0].tolist()


def test_combine_keeps_infinity(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(infinite_token) == [[float("inf"), 128.0]] * 2


def zeros(me: Member, dtype: torch.dtype) -> list[int]:
    """Bits of sums that are zero, in two shots; a rank adds minus zeros to a part of them."""
    x = torch.zeros(32, 8, dtype=dtype)
    if me.rank == 0:
        x[::2] = -0.0
    y = tw.matmul_all_reduce(x, torch.ones(4, 8, dtype=dtype))
    return y.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zeros_are_the_same_on_all_ranks(worlds: Worlds, dtype: torch.dtype) -> None:
    assert worlds("gloo", 2).run(zeros, dtype) == [[0] * 32] * 2


# --- What a backward pass must not write ---


def frozen_experts(me: Member) -> None:
    """Only the weights of choices want a gradient. What autograd saved is not changed."""
    ids = torch.tensor([[0, 2], [3, 1], [2, -1]])
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(me.rank))
    h, plan = tw.dispatch_grouped_matmul(x, torch.ones(2, 24, 8), ids)
    weights = torch.full((3, 2), 0.25, requires_grad=True)
    rows = int(plan.offsets[-1])
    before = h[:rows].clone()
    tw.grouped_matmul_combine(h, torch.ones(2, 8, 24), plan, weights).sum().backward()
    assert torch.equal(h[:rows], before), "the input of the combine"
    want = (24 * 8 * x.double().sum(1))[:, None].expand(3, 2) * (ids >= 0)
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad.double(), want, rtol=1e-4, atol=1e-3)


def test_frozen_experts_leave_their_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(frozen_experts)


def guarded_rows(me: Member) -> None:
    """Widths that are no power of two: nothing is written after the last row."""
    from tileweave.kernels.experts import rows

    offsets, width = torch.tensor([0, 1, 3], dtype=torch.int32), 24
    memory = torch.full((3 * 2 * width + 64,), -7.0)
    out = memory[: 6 * width].view(3, 2 * width)
    rows.swiglu_gradient(torch.ones(3, width), torch.ones(3, 2 * width), out, offsets, 2)
    assert (memory[6 * width :] == -7).all() and (out != -7).all()
    memory.fill_(-7)
    rows.swiglu(torch.ones(3, 2 * width), memory[: 3 * width].view(3, width), offsets, 2)
    assert (memory[3 * width :] == -7).all()


def test_row_kernels_write_no_further(worlds: Worlds) -> None:
    worlds("gloo", 1).run(guarded_rows)
