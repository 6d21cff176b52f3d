"""The test worlds: a failure on one rank fails the test with the output of every rank, and the next
test gets a new world."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.support.worlds import Member, World, one_shot


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
