"""The test worlds: a failure on one rank fails the test with the output of every rank, and the next
test gets a new world."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import triton
import triton.language as tl
from tests.support.worlds import Member, World, Worlds, one_shot


def identity(me: Member, add: int) -> tuple[int, int, int]:
    return me.rank, me.world_size, me.rank + add


def raises_on(me: Member, rank: int) -> None:
    if me.rank == rank:
        raise KeyError("the reason")
    me.barrier()


def sleeps_on(me: Member, rank: int) -> None:
    if me.rank == rank:
        time.sleep(60)


def dies_on(me: Member, rank: int) -> int:
    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return me.rank


def surroundings(me: Member) -> tuple[str, str]:
    return os.environ["TRITON_INTERPRET"], os.environ["TILEWEAVE_TIMEOUT"]


KINDS: list[str] = []


def note(value: object) -> None:
    KINDS.append(type(value).__name__)


def computed(me: Member) -> tuple[list[list[float]], list[str]]:
    """What a kernel of two programs makes of bf16, which numpy has not, and the kinds of value that
    it works with."""
    x, out = torch.arange(32).bfloat16(), torch.zeros(3, 32)
    halves = torch.zeros(32, dtype=torch.bfloat16)
    KINDS.clear()
    compute[(2,)](x, out, halves, note, BLOCK=16, num_warps=1)
    return [*out.tolist(), halves.tolist()], KINDS[:2]


@triton.jit
def compute(x, out, halves, note: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = tl.program_id(0) * BLOCK + columns
    values = tl.load(x + places, mask=places > 0, other=5.0)
    note(values.to(tl.float32))
    note(values)
    tl.store(out + places, values.to(tl.float32) + values)
    tl.store(out + 32 + places, tl.where(values > 3.0, values, 0.5))
    tl.store(out + 64 + places, tl.maximum(values, 7.0))
    tl.store(halves + places, values.to(tl.float32) + 1.0, mask=columns > 2)
    tl.store(halves + places, 1.5, mask=columns <= 2)


def test_larger_worlds_interpret_kernels_with_quick_arrays(worlds: Worlds) -> None:
    """And worlds of two with Triton's tensors. Both give the same."""
    x = torch.arange(32.0)
    x[0] = 5.0
    last = torch.where(torch.arange(32) % 16 > 2, x + 1, 1.5)
    want = [2 * x, torch.where(x > 3, x, 0.5), x.clamp(7.0), last]
    for size, kinds in ((2, ["tensor", "tensor"]), (3, ["Block", "Coded"])):
        assert worlds("gloo", size).run(computed) == [([y.tolist() for y in want], kinds)] * size


def test_values_are_returned_by_rank(world: World) -> None:
    assert world.run(identity, 10) == [(rank, world.size, rank + 10) for rank in range(world.size)]


def test_failures_report_every_rank() -> None:
    world = World("gloo", 2)
    try:
        with pytest.raises(
            pytest.fail.Exception, match=r"(?s)rank 0.*barrier.*rank 1.*raises_on.*the reason"
        ):
            world.run(raises_on, 1)
        started = time.monotonic()
        with pytest.raises(
            pytest.fail.Exception, match=r"(?s)rank 0: was done.*rank 1: was not done.*in sleeps_on"
        ):
            world.run(sleeps_on, 1, timeout=1.0)
        assert time.monotonic() - started < 30
        with pytest.raises(pytest.fail.Exception, match="rank 1: died, exit code -9"):
            world.run(dies_on, 1)
        assert world.run(identity, 0) == [(0, 2, 0), (1, 2, 1)], "a fresh world for the next test"
    finally:
        world.close()


def test_a_world_for_one_test() -> None:
    ends = one_shot("gloo", 2, dies_on, 1)
    assert (ends[0].value, ends[0].exit_code) == (0, 0)
    assert (ends[1].answer.ok, ends[1].exit_code) == (False, -signal.SIGKILL)
    assert [
        end.value for end in one_shot("gloo", 1, surroundings, extra={"TILEWEAVE_TIMEOUT": "7"})
    ] == [("1", "7")]
