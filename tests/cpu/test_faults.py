"""Faults on one rank of three: what the others see, how soon, and that the next call or the next
group works.

Faults that all processes survive follow each other in one world, each between good calls. A process
that dies has its own world, and the survivors go on in a new group.
"""

from __future__ import annotations

import gc
import mmap
import os
import re
import resource
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import parity
from tests.support.calls import SLACK, refusal
from tests.support.fork_server import FULL_END
from tests.support.matmul_cases import Case, prepare
from tests.support.worlds import Member, one_shot

import tileweave as tw
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.host_memory import _make

# TILEWEAVE_TIMEOUT, long enough for good calls on busy cores; and how much later an error may come
SECONDS = 3.0
STUCK = 2.5 * SECONDS
VICTIM = 1
CASE, LARGER = Case(18, 18, 40), Case(90, 18, 40)
SM = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1)
COPY_ENGINE = MatmulConfig(
    "triton", "copy_engine", 16, 16, 16, 1, 4, group_m=2, num_slices=4, num_producers=1
)
ALIVE = {"TILEWEAVE_TIMEOUT": str(SECONDS), FULL_END: "1"}


# --- Leftovers ---

# in the environment of every process of these worlds, and of their children
MARK = "TILEWEAVE_FAULTY_WORLD"


def processes_with(mark: str) -> dict[int, str]:
    """All processes of this user whose environment has ``mark``, whatever their parent is now: pid,
    command."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "comm").read_text().strip()
        except OSError:  # of another user, or gone
            continue
    return found


def dead_children() -> list[str]:
    """Zombies: processes that have ended, and that this one has not waited for."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = place.read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            found.append(name)
    return found


@pytest.fixture(scope="module")
def marked() -> Iterator[str]:
    mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
    with mock.patch.dict(os.environ, dict([mark.split("=")])):
        yield mark


@pytest.fixture(autouse=True)
def no_leftovers(marked: str) -> Iterator[None]:
    """No process with any parent, no zombie, no named shared memory. Unnamed memory is freed with
    its processes."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not processes_with(marked), "processes outlive their world"
    assert not dead_children(), "zombies"
    left = [
        name
        for name in set(os.listdir("/dev/shm")) - before
        if "tileweave" in name or "torch" in name
    ]
    assert not left, "shared memory with a name"


def leavings(me: Member) -> int:
    """How many buffers in shared memory this rank still maps after all workspaces are closed; it
    should be none."""
    gc.collect()
    return buffers_mapped_by_me()


def mapped_by_me() -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line for line in lines if "memfd:tileweave-" in line]


def buffers_mapped_by_me() -> int:
    return len({line.split()[4] for line in mapped_by_me()})  # by inode


def test_leftovers_would_be_found(marked: str) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while process.pid not in processes_with(marked) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the child has its own environment
        assert process.pid in processes_with(marked)
        process.kill()
        while not dead_children() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dead_children() and process.pid not in processes_with(marked)
    finally:
        process.kill()
        process.wait()
    token = secrets.token_hex(8)
    descriptor = _make(token, 4096)
    count = buffers_mapped_by_me()
    with mmap.mmap(descriptor, 4096):
        assert buffers_mapped_by_me() == count + 1
    os.close(descriptor)


def good_call(
    me: Member, group: dist.ProcessGroup, config: MatmulConfig, number: int = 0, case: Case = CASE
) -> None:
    call = prepare(case, dist.get_rank(group), dist.get_world_size(group), me.device, number)
    parity.run(call, group, config)
    call.verify(f"rank {me.rank}, good call {number}")


def world_call(me: Member, case: Case = CASE) -> None:
    good_call(me, dist.group.WORLD, SM, 7, case)


@contextmanager
def at_event(event: str, action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` once, when the kernel of this rank reaches ``event``."""
    from tileweave.device.interpreter.words import OBSERVERS

    armed = [True]

    def observer(seen: str, details: dict[str, int]) -> None:
        if seen == event and armed:
            armed.clear()
            action()

    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)


# --- Faults that all ranks survive: the victim does this while the others make the same good call
# ---


def raises_before_the_call(me: Member) -> None:
    tw.all_gather_matmul(
        torch.zeros(18, 40, dtype=torch.float64), torch.zeros(18, 40, dtype=torch.float64)
    )


def has_no_memory_for_the_result(me: Member) -> None:
    call = prepare(CASE, me.rank, me.world_size, me.device, 0)
    with mock.patch(
        "tileweave.ops.matmul.all_gather_matmul.run_fused",
        side_effect=torch.OutOfMemoryError("planted"),
    ):
        tw.all_gather_matmul(call.x, call.w)


def has_no_memory_to_share(me: Member) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        world_call(me, LARGER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def is_stuck_in_a_kernel(me: Member) -> None:
    with at_event("notify", lambda: time.sleep(STUCK)):
        world_call(me)
    world_call(me)  # the others have given up: what the late rank sees


def calls_another_operator(me: Member) -> None:
    """At the first call. For calls that were all made before, see
    :func:`calls_in_another_order`."""
    x, w = torch.zeros(18, 40), torch.zeros(18, 40)
    (tw.matmul_reduce_scatter if me.rank == VICTIM else tw.all_gather_matmul)(x, w)


def calls_another_shape_first(me: Member) -> None:
    world_call(me, Case(34, 18, 40))


def compares(me: Member) -> None:
    """With TILEWEAVE_DEBUG=1, ranks compare their arguments before anything is sent. This shape
    fits the allocated memory."""
    rows = 17 if me.rank == VICTIM else 18
    with mock.patch.dict(os.environ, {"TILEWEAVE_DEBUG": "1"}):
        tw.all_gather_matmul(torch.zeros(rows, 40), torch.zeros(18, 40))


def calls_what_fits(me: Member) -> None:
    """As :func:`compares`, but compared by the ledger alone: all shapes were called before, and no
    memory grows."""
    operands = {rows: (torch.zeros(rows, 40), torch.zeros(18, 40)) for rows in (17, 18)}
    for rows in (18, 17, 18):
        tw.all_gather_matmul(*operands[rows])
    tw.all_gather_matmul(*operands[17 if me.rank == VICTIM else 18])


def calls_in_another_order(me: Member) -> None:
    x, w = torch.zeros(18, 40), torch.zeros(18, 40)
    ops = [tw.matmul_reduce_scatter, tw.matmul_all_reduce]
    for op in ops:
        op(x, w)
    ops[me.rank == VICTIM](x, w)


def grows(me: Member) -> None:
    world_call(me, LARGER)


def goes_home(me: Member) -> None:
    tw.close()


@dataclass(frozen=True)
class Live:
    """``victim``, ``others``: what they do. ``own``, ``seen``: what they see then ("": nothing).
    ``fresh``: in the first call."""

    victim: Callable[[Member], None]
    own: str
    seen: str
    others: Callable[[Member], None] = world_call
    fresh: bool = False


LEDGER = (
    "RankMismatchError: asked: .*rank 1 where rank",
    "RankMismatchError: asked: .* where rank 1 calls something else",
)
MISSED = "PeerTimeout: all_gather_matmul"
LIVE = {
    "an exception on one rank": Live(
        raises_before_the_call, "InputError: asked: .*float64", MISSED
    ),
    "no memory for a result": Live(
        has_no_memory_for_the_result, "OutOfMemoryError: planted", MISSED
    ),
    "no memory to share": Live(
        has_no_memory_to_share, *["UnsupportedError: .*rank 1: "] * 2, grows
    ),
    "stuck in a kernel": Live(is_stuck_in_a_kernel, MISSED, MISSED),
    "another operator": Live(
        calls_another_operator,
        *["RankMismatchError: asked: "] * 2,
        calls_another_operator,
        fresh=True,
    ),
    "closed while in use": Live(goes_home, "", MISSED),
    "another shape at a first call": Live(
        calls_another_shape_first, *["RankMismatchError: asked: rank 1"] * 2, fresh=True
    ),
    "another shape, compared": Live(compares, *["RankMismatchError: asked: rank 1"] * 2, compares),
    "another shape that fits": Live(calls_what_fits, *LEDGER, calls_what_fits),
    "another order of operators": Live(calls_in_another_order, *LEDGER, calls_in_another_order),
}


def suffer(me: Member, name: str) -> dict[str, object]:
    """One fault between good calls. Return what this rank saw, and after how many seconds."""
    fault = LIVE[name]
    if not fault.fresh:
        call = prepare(CASE, me.rank, me.world_size, me.device, 0)
        tw.all_gather_matmul(call.x, call.w)  # ranks meet before the first public call
        good_call(me, dist.group.WORLD, SM)
        good_call(me, dist.group.WORLD, COPY_ENGINE)
    me.barrier()
    seen, started = "", time.monotonic()
    try:
        (fault.victim if me.rank == VICTIM else fault.others)(me)
    except (tw.TileweaveError, torch.OutOfMemoryError) as error:
        seen = f"{type(error).__name__}: {error}"
    taken = time.monotonic() - started
    tw.close()
    me.barrier()
    good_call(me, dist.group.WORLD, SM, 1)
    good_call(me, dist.group.WORLD, COPY_ENGINE, 2)
    tw.close()
    me.barrier()
    return {"seen": seen, "taken": taken, "left": leavings(me)}


def suffer_all(me: Member) -> dict[str, dict[str, object]]:
    found = {}
    for name in LIVE:
        found[name] = suffer(me, name)
        print(time.strftime("%X"), name, found[name], flush=True)
    return found


@pytest.fixture(scope="module")
def suffered(marked: str) -> list[dict[str, dict[str, object]]]:
    ends = one_shot("gloo", 3, suffer_all, extra=ALIVE, timeout=100)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    found = [end.value for end in ends]
    for rank, each in enumerate(found):  # -s shows the figures of docs/reliability.md
        print(
            f"rank {rank}:",
            ", ".join(f"{name} {seen['taken']:.2f} s" for name, seen in each.items()),
        )
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", LIVE, ids=[name.replace(" ", "_") for name in LIVE])
def test_fault_that_all_ranks_survive(
    suffered: list[dict[str, dict[str, object]]], name: str
) -> None:
    fault = LIVE[name]
    for rank, found in enumerate(suffered):
        seen, taken = str(found[name]["seen"]), float(found[name]["taken"])  # type: ignore[arg-type]
        wanted = fault.own if rank == VICTIM else fault.seen
        assert re.match(wanted, seen, re.DOTALL) if wanted else not seen, f"rank {rank}: {seen!r}"
        assert found[name]["left"] == 0, f"rank {rank} still maps {found[name]['left']} buffers"
        late = STUCK + SECONDS if rank == VICTIM and "stuck" in name else SECONDS
        assert taken < late + SLACK, f"rank {rank} knew after {taken:.1f} s"
        if rank != VICTIM and fault.seen == MISSED:
            assert f"rank {rank} waited" in seen and "work unit" in seen, seen
    if fault.seen == MISSED:
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
    """The Python interpreter shuts down while another thread is inside a kernel that waits for late
    peers."""
    inside = threading.Event()
    with at_event("wait", inside.set):
        threading.Thread(target=world_call, args=(me,), daemon=True).start()
        assert inside.wait(SECONDS)


DEADLY = {is_killed: -signal.SIGKILL, exits_at_once: 3, returns_from_main: 0}


def outlive(me: Member, fault: Callable[[Member], None]) -> dict[str, object]:
    """Call until a rank is missing, and then what is next in the program: calls of other instances,
    which do not wait for it again. Then make a new group of the survivors."""
    group = dist.group.WORLD
    x, w = torch.zeros(18, 40), torch.zeros(18, 40)
    good_call(me, group, SM)
    good_call(me, group, COPY_ENGINE)
    tw.matmul_reduce_scatter(x, w)
    me.barrier()
    if me.rank == VICTIM:
        fault(me)
        return {}
    time.sleep(0.3 if fault is returns_from_main else 0.0)
    seen, started = "", time.monotonic()
    try:
        # a rank that was signalled before the end may finish that call, and one more
        for number in range(3):
            started = time.monotonic()
            good_call(me, group, SM, 7 + number)
    except tw.PeerTimeout as error:
        seen = str(error)
    queued = [
        refusal(good_call, me, group, COPY_ENGINE, 11),
        refusal(tw.matmul_reduce_scatter, x, w),
    ]
    taken = time.monotonic() - started
    tw.close()
    survivors = [rank for rank in range(me.world_size) if rank != VICTIM]
    rest = dist.new_group(survivors, use_local_synchronization=True)
    assert isinstance(rest, dist.ProcessGroup)
    for number in range(3):
        good_call(me, rest, SM, 20 + number)
        good_call(me, rest, COPY_ENGINE, 30 + number)
    tw.close()
    return {"seen": seen, "queued": queued, "taken": taken, "left": leavings(me)}


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.__name__)
def test_rank_that_ends(fault: Callable[[Member], None]) -> None:
    ends = one_shot("gloo", 3, outlive, fault, extra=ALIVE, timeout=60)
    assert ends[VICTIM].exit_code == DEADLY[fault], ends[VICTIM]
    for rank in (0, 2):
        assert ends[rank].exit_code == 0, ends[rank].answer
        found = ends[rank].value
        assert "all_gather_matmul" in found["seen"] and f"rank {rank} waited" in found["seen"], (
            found
        )
        assert found["queued"] == [f"PeerTimeout: {found['seen']}"] * 2, found
        assert found["taken"] < SECONDS + SLACK, found
        assert found["left"] == 0, found
    assert any(f"for rank {VICTIM}" in ends[rank].value["seen"] for rank in (0, 2))


def use_again(me: Member) -> None:
    """The default group is destroyed and made again, with the ranks in another order. Nothing of
    the old one is used."""
    store = dist.distributed_c10d._get_default_store()
    good_call(me, dist.group.WORLD, SM)
    me.barrier()
    dist.destroy_process_group()
    with pytest.raises(tw.InputError, match="default group"):
        tw.all_gather_matmul(torch.zeros(18, 40), torch.zeros(18, 40))
    rank = me.world_size - 1 - me.rank
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=me.world_size
    )
    again = Member(rank, me.world_size, me.device)
    for number in range(4):
        good_call(again, dist.group.WORLD, SM, number)
    dist.barrier()
    assert buffers_mapped_by_me() == 3 * me.world_size, (
        "ledger, signals, slots of the new group; nothing of the old"
    )


def test_group_destroyed_and_made_again() -> None:
    ends = one_shot("gloo", 3, use_again, extra=ALIVE, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.answer for end in ends]
    for end in ends:
        assert end.answer.ok, end.answer.value
