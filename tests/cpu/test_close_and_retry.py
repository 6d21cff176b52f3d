"""The usual recovery after a fault: `except: tw.close()`, and the same call again, on every rank,
whenever each gets there."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import SLACK, on_path, refusal
from tests.support.fork_server import FULL_END
from tests.support.matmul_cases import Case, prepare
from tests.support.worlds import Member, one_shot

import tileweave as tw

SECONDS = 2.0
CASE, LARGER = Case(18, 18, 40), Case(90, 18, 40)
VICTIM = 1
ALIVE = {"TILEWEAVE_TIMEOUT": str(SECONDS), FULL_END: "1"}


def call(me: Member, number: int, case: Case = CASE) -> None:
    operands = prepare(case, me.rank, me.world_size, me.device, number)
    operands.verify(f"call {number}", tw.all_gather_matmul(operands.x, operands.w))


def called_until_right(me: Member, attempts: int, attempt: Callable[[int], None]) -> list[str]:
    """Errors of all attempts, up to the first that succeeds."""
    said: list[str] = []
    while len(said) < attempts and (not said or said[-1]):
        said.append(refusal(attempt, len(said)))
        if said[-1]:
            tw.close()
    return said


def raises_once(me: Member, what: str) -> dict[str, object]:
    """Rank 1 raises in the first attempt, before its call. Every rank closes and calls again."""
    with on_path(me, what != "unfused"):
        return _raises_once(me, what)


def _raises_once(me: Member, what: str) -> dict[str, object]:
    if what != "first call":
        call(me, 0)
        me.barrier()
    started = time.monotonic()

    def attempt(number: int) -> None:
        if me.rank == VICTIM and number == 0:
            raise tw.TileweaveError("planted")
        call(me, 1, LARGER if what == "growth" else CASE)

    said = called_until_right(me, 2, attempt)
    taken = time.monotonic() - started
    if said[-1]:
        return {"said": said, "taken": taken}
    for number in range(2, 5):
        call(me, number)
    me.barrier()
    tw.close()
    return {"said": said, "taken": taken}


def check_raised_once(
    what: str, others: tuple[str, ...], extra: dict[str, str] = ALIVE
) -> list[str]:
    ends = one_shot("gloo", 3, raises_once, what, extra={**ALIVE, **extra}, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    found = [end.value for end in ends]
    for rank, each in enumerate(found):
        first, *rest = each["said"]
        assert rest in ([""], []), f"rank {rank}: {each['said']}"
        assert first.startswith("TileweaveError: planted" if rank == VICTIM else others), (
            f"rank {rank}: {first}"
        )
        assert each["taken"] < SECONDS * 9 / 8 + SLACK, f"rank {rank}: {each['taken']:.1f} s"
    return [each["said"][0] for each in found]


def test_retry_after_a_fault_in_a_kernel() -> None:
    """Rank 1 allocates memory again immediately. Its peers follow when their waits for data have
    timed out."""
    for rank, text in enumerate(check_raised_once("kernel", ("PeerTimeout: all_gather_matmul",))):
        assert rank == VICTIM or "epoch" in text


def test_retry_where_memory_grows() -> None:
    """Rank 1 creates a workspace while its peers wait for it in theirs. They raise immediately, and
    it goes on waiting."""
    said = check_raised_once("growth", ("PeerTimeout: mapping symmetric memory",))
    assert all(
        f"rank {VICTIM}, which has closed its workspace" in text
        for rank, text in enumerate(said)
        if rank != VICTIM
    )


def test_retry_before_the_first_call() -> None:
    """A rank that raised leaves nothing behind: if it calls again in time, it is merely late."""
    check_raised_once("first call", ("",))


def test_retry_where_calls_are_compared() -> None:
    check_raised_once("kernel", ("PeerTimeout: all_gather_matmul",), {"TILEWEAVE_DEBUG": "1"})


def test_retry_unfused() -> None:
    """A collective that was given up would stay in torch's group, and end the process in the next
    one."""
    check_raised_once("unfused", ("",))


def comes_late(me: Member, interpreted: bool) -> list[str]:
    """Rank 1 is busy for longer than any rank waits. Then all call again as soon as they can."""
    with on_path(me, interpreted):
        return _comes_late(me, interpreted)


def _comes_late(me: Member, interpreted: bool) -> list[str]:
    call(me, 0)
    me.barrier()

    def attempt(number: int) -> None:
        if number == 0 and me.rank == VICTIM:
            time.sleep(3 * SECONDS if interpreted else 1.5 * SECONDS)
            raise tw.TileweaveError("planted")
        call(me, 1)

    said = called_until_right(me, 6, attempt)
    if said[-1]:
        return said
    for number in range(2, 5):
        call(me, number)
    me.barrier()
    return said


def check_late(interpreted: bool) -> list[list[str]]:
    ends = one_shot("gloo", 3, comes_late, interpreted, extra=ALIVE, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    said = [end.value for end in ends]
    assert said[VICTIM] == ["TileweaveError: planted", ""], (
        "a late rank goes on to where its peers are"
    )
    return [said[rank] for rank in range(3) if rank != VICTIM]


def test_retry_of_ranks_that_gave_up_before_the_last_arrived() -> None:
    for *failed, right in check_late(True):
        assert right == "" and all(text.startswith("PeerTimeout: ") for text in failed), failed


def test_retry_of_unfused_calls_given_up_before_the_last_arrived() -> None:
    for *failed, right in check_late(False):
        assert right == "" and failed
        for text in failed:
            assert (
                text.startswith("PeerTimeout: a gather of (18, 40) torch.float32: rank ")
                and f"for rank {VICTIM}" in text
            )
            assert "epoch" not in text and "tileweave.close(group)" in text


def meets_alone(me: Member) -> list[str]:
    """Rank 1 gives up several meetings in a row. Then the others arrive, once."""
    group, x, w = dist.group.WORLD, torch.ones(4, 8), torch.ones(4, 8)
    call(me, 0)
    me.barrier()
    tw.close()
    if me.rank != VICTIM:
        time.sleep(6 * SECONDS)
        return [refusal(tw.all_gather_matmul, x, w, group=group)]
    return called_until_right(me, 6, lambda number: tw.all_gather_matmul(x, w, group=group))


def test_texts_of_abandoned_meetings_are_ignored() -> None:
    ends = one_shot("gloo", 3, meets_alone, extra=ALIVE, timeout=60)
    first, *others = [ends[rank].value for rank in (VICTIM, 0, 2)]
    assert others == [[""], [""]], others
    *failed, right = first
    assert (
        right == ""
        and len(failed) == 2
        and all(text.startswith("PeerTimeout: the first call of a group") for text in failed)
    ), first


def loses_the_end_of_a_meeting(me: Member, module: str) -> list[str]:
    """All ranks meet, but rank 1 has given up just before it learns so."""
    where = import_module(module)
    meet, lost = where.meet, []

    def lose(*args: object) -> object:
        found = meet(*args)
        if me.rank == VICTIM and not lost:
            lost.append(True)
            raise tw.PeerTimeout("planted", me.rank, -1, -1, 0, 0, SECONDS, "store")
        return found

    with mock.patch.object(where, "meet", lose):
        said = called_until_right(me, 4, lambda _: call(me, 0))
    me.barrier()
    tw.close()
    return said


@pytest.mark.parametrize(
    "module", ["tileweave.transport.nodes", "tileweave.ops.core.tuned_choices"]
)
def test_ranks_meet_again_where_one_lost_the_end_of_a_meeting(module: str) -> None:
    ends = one_shot("gloo", 2, loses_the_end_of_a_meeting, module, extra=ALIVE)
    for end in ends:
        assert end.value[-1] == "" and len(end.value) > 1, end.value
