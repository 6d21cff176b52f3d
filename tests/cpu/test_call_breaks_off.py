"""Calls that fail on some ranks for a local reason: no data of another call is taken for theirs;
two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from tests.support.calls import refusal, unfused
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.ops.matmul import all_gather_matmul as gather_host
from tileweave.ops.matmul import matmul_all_reduce as all_reduce_host
from tileweave.ops.matmul import matmul_reduce_scatter as scatter_host
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.workspace import Instance

HOSTS = {
    "all_gather_matmul": gather_host,
    "matmul_reduce_scatter": scatter_host,
    "matmul_all_reduce": all_reduce_host,
}
# transports: copies, copies, in the kernel
CALLS = (("all_gather_matmul", 128), ("matmul_reduce_scatter", 128), ("matmul_all_reduce", 2))


@pytest.fixture
def world(worlds: Worlds):
    return worlds("gloo", 2)


def step(me: Member, op: str, rows: int, seed: int) -> str:
    """One call on data of ``seed``: "right", "WRONG", or the name of the error."""
    draw = torch.Generator().manual_seed(seed)
    rows = rows if op == "all_gather_matmul" else 2 * rows
    xs, ws = (torch.randint(-3, 4, (2, size, 16), generator=draw).float() for size in (rows, 8))
    products = xs @ ws.transpose(1, 2)
    wanted = {
        "all_gather_matmul": lambda: xs.flatten(0, 1) @ ws[me.rank].t(),
        "matmul_reduce_scatter": lambda: products.sum(0).chunk(2)[me.rank],
        "matmul_all_reduce": lambda: products.sum(0),
    }
    try:
        y = getattr(tw, op)(xs[me.rank].clone(), ws[me.rank])
    except (tw.TileweaveError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "right" if torch.equal(y, wanted[op]()) else "WRONG"


@contextmanager
def breaks_off(op: str, where: str) -> Iterator[None]:
    """Inside, calls of ``op`` end in an error that only this rank knows."""
    with ExitStack() as patches:
        if where == "no memory for the result":
            patches.enter_context(
                mock.patch.object(HOSTS[op], "run_fused", side_effect=torch.OutOfMemoryError)
            )
        elif where in REFUSES:  # what is refused is no call like an earlier one
            patches.enter_context(mock.patch.object(HOSTS[op], "call_again", return_value=None))
            patches.enter_context(
                mock.patch.object(HOSTS[op], REFUSES[where], side_effect=tw.InputError)
            )
        elif where == "no memory after begin":
            patches.enter_context(
                mock.patch.object(CpuTransport, "order", side_effect=torch.OutOfMemoryError)
            )
        else:
            begin = Instance.begin

            def interrupted(self: Instance, mark: int = 0) -> bool:
                begin(self, mark)
                raise KeyboardInterrupt

            patches.enter_context(mock.patch.object(Instance, "begin", interrupted))
        yield


REFUSES = {"refused": "_as_called", "refused in the operator": "accept"}
WHERE = ("no memory for the result", "no memory after begin", "interrupted", *REFUSES)


def within_a_second(me: Member, body: Callable[..., list[str]], *arguments: object) -> list[str]:
    """The timeout is read when a workspace is created."""
    tw.close()
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="1"):
        found = body(me, *arguments)
    tw.close()
    return [*found, step(me, "all_gather_matmul", 4, 20)]


def one_rank_goes_on(me: Member, op: str, rows: int, where: str) -> list[str]:
    found = [step(me, op, rows, seed) for seed in (0, 1)]
    with ExitStack() as patches:
        if me.rank == 0:
            patches.enter_context(breaks_off(op, where))
        found.append(step(me, op, rows, 2))
    # as a loop that catches it and takes the next batch
    while found[-1] == "right" or (me.rank == 0 and len(found) == 3):
        found.append(step(me, op, rows, len(found)))
        if len(found) > 8:
            break
    return found


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("op", "rows"), CALLS)
def test_mismatch_raises_after_a_call_broke_off_on_one_rank(
    world, op: str, rows: int, where: str
) -> None:
    for rank, found in enumerate(world.run(within_a_second, one_rank_goes_on, op, rows, where)):
        assert "WRONG" not in found, (rank, found)
        assert found[:2] == ["right"] * 2 and found[-1] == "right", (rank, found)
        assert found[-2] in ("RankMismatchError", "PeerTimeout") and len(found) <= 5, (rank, found)


def both_go_on(me: Member, op: str, rows: int, places: list[str]) -> list[str]:
    found = [step(me, op, rows, 0)]
    with breaks_off(op, places[me.rank]):
        found.append(step(me, op, rows, 1))
    return found + [step(me, op, rows, seed) for seed in (2, 3, 4)]


@pytest.mark.parametrize("places", [(0, 0), (1, 1), (0, 1)], ids=["before", "in", "before and in"])
@pytest.mark.parametrize(("op", "rows"), CALLS)
def test_calls_work_after_all_ranks_broke_off(
    world, op: str, rows: int, places: tuple[int, int]
) -> None:
    """All ranks fail before they have begun, which is where most memory is allocated. Otherwise the
    rank that begins second raises."""
    for found in world.run(
        within_a_second, both_go_on, op, rows, [WHERE[place] for place in places]
    ):
        assert found[0] == found[-1] == "right" and "WRONG" not in found
        if places == (0, 0):
            assert found[1:5] == ["OutOfMemoryError", "right", "right", "right"]


def first_call_breaks_off(me: Member, op: str, rows: int) -> list[str]:
    found = []
    if me.rank == 0:
        with breaks_off(op, WHERE[0]):
            found.append(step(me, op, rows, 0))
    return found + [step(me, op, rows, seed) for seed in (1, 2)]


@pytest.mark.parametrize(("op", "rows"), CALLS)
def test_first_call_broken_off_on_one_rank(world, op: str, rows: int) -> None:
    for rank, found in enumerate(world.run(within_a_second, first_call_breaks_off, op, rows)):
        assert "WRONG" not in found and found[-1] == "right", (rank, found)
        assert found[1 - rank] == "RankMismatchError" or "PeerTimeout" in found, (rank, found)


def one_rank_goes_on_unfused(me: Member) -> list[str]:
    """Ranks compare calls on the host before each call, so a mismatch is raised within a second."""
    with unfused(me), mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="5"):
        found = [step(me, op, 4, 0) for op, _ in CALLS]
        for both in (True, False):
            if both or me.rank == 0:
                with mock.patch.object(
                    torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError
                ):
                    found.append(step(me, "all_gather_matmul", 4, 1))
            found.append(step(me, "all_gather_matmul", 4, 2))
        tw.close()
        return [*found, step(me, "all_gather_matmul", 4, 3)]


def test_unfused_call_broken_off_on_one_rank(world) -> None:
    first, second = world.run(one_rank_goes_on_unfused)
    assert first == [
        *["right"] * 3,
        "OutOfMemoryError",
        "right",
        "OutOfMemoryError",
        "RankMismatchError",
        "right",
    ]
    assert second == [*["right"] * 3, "OutOfMemoryError", "right", "RankMismatchError", "right"]


def one_rank_captures(me: Member, op: str) -> list[str]:
    found = [step(me, op, 128, seed) for seed in (0, 1)]
    with mock.patch.object(CpuTransport, "capturing", return_value=me.rank == 0):
        found.append(step(me, op, 128, 2))
    return found + [step(me, op, 128, seed) for seed in (3, 4)]


@pytest.mark.parametrize("op", [op for op, rows in CALLS if rows == 128])
def test_capture_on_one_rank_raises(world, op: str) -> None:
    """A graph freezes its slot, so the other ranks would write to another slot, or read it."""
    for rank, found in enumerate(world.run(within_a_second, one_rank_captures, op)):
        assert "WRONG" not in found and found[-1] == "right", (rank, found)
        assert "RankMismatchError" in found or "PeerTimeout" in found, (rank, found)


def refuse_alone(me: Member, debug: str, tracing: bool) -> float:
    """The other rank does not call, so that this one would report its error in vain."""
    x = torch.zeros(8)  # one dimension: refused by the public function
    patches, began = (
        mock.patch.dict(os.environ, TILEWEAVE_DEBUG=debug, TILEWEAVE_TIMEOUT="2"),
        time.monotonic(),
    )
    with patches, mock.patch.object(torch.compiler, "is_compiling", return_value=tracing):
        assert not me.rank or refusal(tw.all_gather_matmul, x, torch.zeros(4, 8)).startswith(
            "InputError"
        )
    waited = time.monotonic() - began
    tw.close()
    return waited


@pytest.mark.parametrize(
    ("debug", "tracing", "waits"), [("0", False, False), ("1", True, False), ("1", False, True)]
)
def test_refusing_rank_waits_for_peers_if_debugging(
    world, debug: str, tracing: bool, waits: bool
) -> None:
    assert (world.run(refuse_alone, debug, tracing)[1] > 1) == waits
