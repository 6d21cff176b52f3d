"""What breaks, on one rank of three: what the others see, how soon, and that the next call, or the next group, works.

Faults that leave all processes alive follow each other in one world, each between good calls. Who dies has a world of its
own, and the survivors go on in a new group.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import parity
from tests.parity import Case
from tests.worlds import Member, one_shot

import tileweave as tw
from tileweave.config import MatmulConfig

SECONDS, SLACK = 2.0, 2.0  # TILEWEAVE_TIMEOUT here, and how much later an error may come
VICTIM = 1
CASE, LARGER = Case(18, 18, 40), Case(90, 18, 40)
SM = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
COPY_ENGINE = MatmulConfig("triton", "copy_engine", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
ALIVE = {"TILEWEAVE_TIMEOUT": str(SECONDS)}


def good_call(me: Member, group: dist.ProcessGroup, config: MatmulConfig, number: int = 0, case: Case = CASE) -> None:
    call = parity.prepare(case, dist.get_rank(group), dist.get_world_size(group), me.device, number)
    parity.run(call, group, config)
    call.verify(f"rank {me.rank}, good call {number}")


def world_call(me: Member, case: Case = CASE) -> None:
    good_call(me, dist.group.WORLD, SM, 7, case)


@contextmanager
def at_event(event: str, action: Callable[[], None]) -> Iterator[None]:
    """``action`` once, when this rank's kernel comes to ``event``."""
    from tileweave.language.interpreted import OBSERVERS

    armed = [True]

    def observer(seen: str, details: dict[str, int]) -> None:
        if seen == event and armed.pop() if armed else False:
            action()

    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)


# --- Faults that everybody survives: what the victim does while the others make the same good call ---


def raises_before_the_call(me: Member) -> None:
    tw.all_gather_matmul(torch.zeros(18, 40, dtype=torch.float64), torch.zeros(18, 40, dtype=torch.float64))


def has_no_memory_for_the_result(me: Member) -> None:
    call = parity.prepare(CASE, me.rank, me.world_size, me.device, 0)
    with mock.patch("tileweave.ops.all_gather_matmul.run_fused", side_effect=torch.OutOfMemoryError("planted")):
        tw.all_gather_matmul(call.x, call.w)


def has_no_memory_to_share(me: Member) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        world_call(me, LARGER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def is_stuck_in_a_kernel(me: Member) -> None:
    with at_event("notify", lambda: time.sleep(SECONDS + 1.0)):
        world_call(me)
    world_call(me)  # the others have given up: what it runs into, late as it is


def calls_another_operator(me: Member) -> None:
    good_call(me, dist.group.WORLD, COPY_ENGINE)  # another protocol instance: what another operator is to these


def calls_another_shape_first(me: Member) -> None:
    world_call(me, Case(34, 18, 40))


def calls_another_shape_later(me: Member) -> None:
    world_call(me, Case(17, 18, 40))


def goes_home(me: Member) -> None:
    tw.close()


Fault = tuple[Callable[[Member], None], type[Exception], str, type[Exception] | None]
# what the victim does, what it sees itself ("" its message), what the others see
LIVE: dict[str, tuple[Callable[[Member], None], str, str]] = {
    "an exception on one rank": (raises_before_the_call, "InputError: asked: .*float64", "PeerTimeout: all_gather_matmul"),
    "no memory for a result": (has_no_memory_for_the_result, "OutOfMemoryError: planted", "PeerTimeout: all_gather_matmul"),
    "no memory to share": (has_no_memory_to_share, r"UnsupportedError: asked: \d+ bytes", "PeerTimeout: barrier"),
    "stuck in a kernel": (is_stuck_in_a_kernel, "PeerTimeout: all_gather_matmul", "PeerTimeout: all_gather_matmul"),
    "another operator": (calls_another_operator, "PeerTimeout: all_gather_matmul", "PeerTimeout: all_gather_matmul"),
    "closed while in use": (goes_home, "", "PeerTimeout: all_gather_matmul"),
    "another shape at the first call": (
        calls_another_shape_first, "RankMismatchError: asked: rank 1", "RankMismatchError: asked: rank 1",
    ),
    "another shape later, checked": (
        calls_another_shape_later, "RankMismatchError: asked: rank 1", "RankMismatchError: asked: rank 1",
    ),
}  # fmt: skip


def suffer(me: Member, name: str) -> dict[str, object]:
    """One fault between good calls; what this rank saw, and after how many seconds."""
    fault, _, _ = LIVE[name]
    if name != "another shape at the first call":
        good_call(me, dist.group.WORLD, SM)
        if name == "another operator":
            good_call(me, dist.group.WORLD, COPY_ENGINE)
    checked = name.endswith("checked")
    me.barrier()
    seen, started = "", time.monotonic()
    try:
        if me.rank == VICTIM:
            fault(me)
        elif name == "no memory to share":
            world_call(me, LARGER)
        elif checked:
            pass
        else:
            world_call(me)
    except (tw.TileweaveError, torch.OutOfMemoryError) as error:
        seen = f"{type(error).__name__}: {error}"
    taken = time.monotonic() - started
    if checked:
        seen, taken = checked_call(me)
    tw.close()
    me.barrier()
    good_call(me, dist.group.WORLD, SM, 1)
    good_call(me, dist.group.WORLD, COPY_ENGINE, 2)
    tw.close()
    me.barrier()
    return {"seen": seen, "taken": taken}


def checked_call(me: Member) -> tuple[str, float]:
    """Under TILEWEAVE_DEBUG=1 ranks compare what they pass before anything is sent."""
    rows = 17 if me.rank == VICTIM else 18
    started = time.monotonic()
    with mock.patch.dict(os.environ, {"TILEWEAVE_DEBUG": "1"}):
        try:
            tw.all_gather_matmul(torch.zeros(rows, 40), torch.zeros(18, 40))
        except tw.TileweaveError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def suffer_all(me: Member) -> dict[str, dict[str, object]]:
    return {name: suffer(me, name) for name in LIVE}


@pytest.fixture(scope="module")
def suffered() -> list[dict[str, dict[str, object]]]:
    ends = one_shot("gloo", 3, suffer_all, extra=ALIVE, timeout=100)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    return [end.value for end in ends]  # type: ignore[misc]


@pytest.mark.parametrize("name", LIVE, ids=[name.replace(" ", "_") for name in LIVE])
def test_a_fault_that_all_survive(suffered: list[dict[str, dict[str, object]]], name: str) -> None:
    import re

    _, own, others = LIVE[name]
    for rank, found in enumerate(suffered):
        seen, taken = str(found[name]["seen"]), float(found[name]["taken"])  # type: ignore[arg-type]
        wanted = own if rank == VICTIM else others
        assert re.match(wanted, seen, re.DOTALL) if wanted else not seen, f"rank {rank}: {seen!r}"
        late = 2 * SECONDS + 1.0 if rank == VICTIM and "stuck" in name else SECONDS
        assert taken < late + SLACK, f"rank {rank} knew after {taken:.1f} s"
        if rank != VICTIM and others.startswith("PeerTimeout: all_gather"):
            assert f"rank {rank} waited" in seen and "work unit" in seen, seen
    if others.startswith("PeerTimeout: all_gather"):
        named = [str(suffered[rank][name]["seen"]) for rank in range(3) if rank != VICTIM]
        assert any(f"for rank {VICTIM}" in text for text in named), named


# --- Faults that end a process ---


def is_killed(me: Member) -> None:
    with at_event("waited", lambda: os.kill(os.getpid(), signal.SIGKILL)):
        world_call(me)


def exits_at_once(me: Member) -> None:
    with at_event("wait", lambda: os._exit(3)):
        world_call(me)


def returns_from_main(me: Member) -> None:
    """The interpreter goes down while another thread is inside a kernel, which waits for peers that come later."""
    inside = threading.Event()
    with at_event("wait", inside.set):
        threading.Thread(target=world_call, args=(me,), daemon=True).start()
        assert inside.wait(SECONDS)


DEADLY = {is_killed: -signal.SIGKILL, exits_at_once: 3, returns_from_main: 0}


def outlive(me: Member, fault: Callable[[Member], None], config: MatmulConfig, notes: str) -> dict[str, object]:
    """Calls until somebody is missing; then a new group of those who are left."""
    group = dist.group.WORLD
    good_call(me, group, SM)
    me.barrier()
    if me.rank == VICTIM:
        fault(me)
        return {}
    time.sleep(0.3 if fault is returns_from_main else 0.0)
    seen, started = "", time.monotonic()
    try:
        for number in range(3):  # who was signalled before the end may finish that call, and one more
            started = time.monotonic()
            good_call(me, group, SM, number)
    except tw.PeerTimeout as error:
        seen = str(error)
    taken = time.monotonic() - started
    tw.close()
    survivors = [rank for rank in range(me.world_size) if rank != VICTIM]
    rest = dist.new_group(survivors, use_local_synchronization=True)
    assert isinstance(rest, dist.ProcessGroup)
    for number in range(3):
        good_call(me, rest, SM, 20 + number)
        good_call(me, rest, config, 30 + number)
    Path(notes).joinpath(f"{me.rank}").write_text("\n".join(os.listdir("/proc/self/fd")))
    tw.close()
    return {"seen": seen, "taken": taken}


def mapped_by_anybody() -> set[str]:
    """Buffers of this library that some process on this machine still maps, by token."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = process.joinpath("maps").read_text().splitlines()
        except OSError:
            continue
        found |= {f"{process.name} {line.split('memfd:')[1]}" for line in lines if "memfd:tileweave-" in line}
    return found


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.__name__)
def test_a_rank_that_ends(fault: Callable[[Member], None], tmp_path: Path) -> None:
    ends = one_shot("gloo", 3, outlive, fault, COPY_ENGINE, str(tmp_path), extra=ALIVE, timeout=60)
    assert ends[VICTIM].exit_code == DEADLY[fault], ends[VICTIM]
    for rank in (0, 2):
        assert ends[rank].exit_code == 0, ends[rank].answer
        found = ends[rank].value
        assert "all_gather_matmul" in found["seen"] and f"rank {rank} waited" in found["seen"], found
        assert found["taken"] < SECONDS + SLACK, found
    assert any(f"for rank {VICTIM}" in ends[rank].value["seen"] for rank in (0, 2))
    assert not list(Path("/dev/shm").glob("tileweave-*")), "nothing ever stands in a directory"


def use_again(me: Member) -> None:
    """The default group is destroyed and made again, with the ranks in another order: nothing of the old one is used."""
    store = dist.distributed_c10d._get_default_store()
    good_call(me, dist.group.WORLD, SM)
    me.barrier()
    dist.destroy_process_group()
    with pytest.raises(tw.InputError, match="default group"):
        tw.all_gather_matmul(torch.zeros(18, 40), torch.zeros(18, 40))
    rank = me.world_size - 1 - me.rank
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=me.world_size)
    again = Member(rank, me.world_size, me.device)
    for number in range(4):
        good_call(again, dist.group.WORLD, SM, number)
    dist.barrier()
    assert len({line.split()[1] for line in mapped_by_me()}) <= 2 * me.world_size, "the old group's memory is gone"


def mapped_by_me() -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line for line in lines if "memfd:tileweave-" in line]


def test_a_group_that_is_destroyed_and_made_again() -> None:
    ends = one_shot("gloo", 3, use_again, extra=ALIVE, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    for end in ends:
        assert end.answer.ok, end.answer.value
