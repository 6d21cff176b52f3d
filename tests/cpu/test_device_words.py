"""Device functions in a user's own kernel: what the documentation promises outside of the
operators."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from tests.support.worlds import Member, World, Worlds

from tileweave.device.interpreter import words as interpreted
from tileweave.device.triton.meet import meet
from tileweave.device.triton.remote import get, put, symm_at
from tileweave.device.triton.signal import (
    clock,
    consume_token,
    faulted,
    fence,
    leave,
    leave_early,
    load_epoch,
    notify,
    wait,
)
from tileweave.errors import PeerTimeout
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.protocol import (
    EPOCH,
    FAULT,
    LEAVERS,
    MAX_SLICES,
    MEETING_US,
    PUSHED_US,
    TABLE_RANK,
    TABLE_RANKS,
    TABLES,
    TIMEOUT_US,
)
from tileweave.transport.workspace import Instance


@triton.jit
def exchange_kernel(
    mine,
    received,
    pulled,
    slots,
    slot_table,
    signal_table,
    signals,
    control,
    report,
    rank,
    size,
    slot_size,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every rank stores its elements at every peer, waits for theirs, and copies them out of its
    slot."""
    epoch = load_epoch(control)
    slot = (epoch & 1) * slot_size
    for i in tl.static_range(1, WORLD_SIZE):
        peer = (rank + i) % WORLD_SIZE
        put(symm_at(slot_table, peer, tl.float32, 16) + slot + rank * size, mine, 0, size, BLOCK)
    put(slots + slot + rank * size, mine, 0, size, BLOCK)
    fence()
    for i in tl.static_range(1, WORLD_SIZE):
        notify(symm_at(signal_table, (rank + i) % WORLD_SIZE, tl.int32, 4) + rank * 32, epoch)
    for i in tl.static_range(1, WORLD_SIZE):
        peer = (rank + i) % WORLD_SIZE
        token = wait(signals, 1, epoch, peer * 32, i, control, report)
        begin = consume_token(peer * size, token)
        put(received + peer * size, slots + slot + begin, 0, size, BLOCK)
        get(
            pulled + peer * size,
            symm_at(slot_table, peer, tl.float32, 16) + slot + begin,
            0,
            size,
            BLOCK,
        )
    leave(control, epoch, tl.num_programs(0))


@triton.jit
def wait_kernel(signals, control, report, seen, first, COUNT: tl.constexpr):
    epoch = load_epoch(control)
    began = clock()
    token = wait(signals, COUNT, epoch, first, 7, control, report)
    tl.store(seen, consume_token(epoch, token))
    tl.store(seen + 1, faulted(control))
    tl.store(seen + 2, (clock() >= began).to(tl.int32))
    leave(control, epoch, tl.num_programs(0))


@triton.jit
def leave_kernel(control, programs, EARLY: tl.constexpr):
    epoch = load_epoch(control)
    if EARLY:
        leave_early(control, epoch, programs)
    else:
        leave(control, epoch, programs)


@triton.jit
def meet_kernel(signal_table, signals, control, report, rank, WORLD_SIZE: tl.constexpr):
    epoch = load_epoch(control)
    meet(signal_table, signals, rank, epoch, -1, control, report, WORLD_SIZE)
    leave(control, epoch, tl.num_programs(0))


def meetings(me: Member) -> None:
    """No rank passes before all have arrived. A rank that is a call ahead has given up the others,
    and they report it."""
    instance = Instance("meet", CpuTransport(dist.group.WORLD))
    where = (instance.signal_table, instance.signals, instance.control, instance.report, me.rank)
    for call in range(1, 4):
        me.barrier()
        if me.rank == call % me.world_size:
            time.sleep(0.1)
        began = time.monotonic()
        meet_kernel[(1,)](*where, WORLD_SIZE=me.world_size)
        waited = time.monotonic() - began
        assert me.rank == call % me.world_size or waited > 0.05, "the others wait for the late rank"
    words = instance.signals[MAX_SLICES * me.world_size :][: me.world_size]
    assert words.tolist() == [3] * me.world_size
    me.barrier()
    if me.rank == 0:
        words.fill_(4)
        words[1] = 7  # as after timeouts: rank 1 is in call 7, this one in call 4
        with pytest.raises(Exception, match="expected 4, saw 7"):
            meet_kernel[(1,)](*where, WORLD_SIZE=me.world_size)
        with pytest.raises(PeerTimeout, match="rank 1") as caught:
            instance.check()
        assert (caught.value.expected, caught.value.seen) == (4, 7)
    me.barrier()
    instance.transport.close()


def test_ranks_meet_before_they_pass(world: World) -> None:
    world.run(meetings)


def exchange(me: Member, size: int, calls: int) -> None:
    """Rank 0 sleeps after each wait. The others run ahead, into the other slot, and must not touch
    this one."""
    from tileweave.device.interpreter.words import OBSERVERS

    instance = Instance("exchange", CpuTransport(dist.group.WORLD))
    instance.reserve(me.world_size * size * 4)
    events: list[str] = []

    def note(event: str, details: dict[str, int]) -> None:
        events.append(event)
        if event == "waited" and me.rank == 0:
            time.sleep(0.01)

    OBSERVERS.append(note)
    try:
        for n in range(calls):
            everyone = [
                torch.arange(size) + 1000.0 * r + 10_000.0 * n for r in range(me.world_size)
            ]
            received, pulled = (torch.full((me.world_size, size), float("nan")) for _ in range(2))
            exchange_kernel[(1,)](
                everyone[me.rank],
                received,
                pulled,
                instance.slots.view(torch.float32),
                instance.slot_table,
                instance.signal_table,
                instance.signals,
                instance.control,
                instance.report,
                me.rank,
                size,
                instance.slot_bytes // 4,
                WORLD_SIZE=me.world_size,
                BLOCK=16,
            )
            for peer in range(me.world_size):
                if peer != me.rank:
                    assert torch.equal(received[peer], everyone[peer]), (
                        f"call {n}: put by {peer}: {received[peer]}"
                    )
                    assert torch.equal(pulled[peer], everyone[peer]), (
                        f"call {n}: got from {peer}: {pulled[peer]}"
                    )
            assert int(instance.control[EPOCH]) == n + 2, "one step a call"
    finally:
        OBSERVERS.remove(note)
    each = calls * (me.world_size - 1)
    assert (events.count("notify"), events.count("wait"), events.count("waited")) == (
        each,
        each,
        each,
    )
    me.barrier()
    instance.transport.close()


def test_exchange_through_slots(world: World) -> None:
    world.run(exchange, 21, 12)


def one_rank(me: Member) -> Instance:
    instance = Instance("wait", CpuTransport(dist.group.WORLD))
    instance.control[TIMEOUT_US] = 200_000
    return instance


def launch_wait(instance: Instance, first: int, count: int, num_programs: int = 1) -> list[int]:
    seen = torch.full((3,), -7, dtype=torch.int32)
    wait_kernel[(num_programs,)](
        instance.signals, instance.control, instance.report, seen, first, COUNT=count
    )
    return seen.tolist()


def waits_compare_across_the_wrap(me: Member) -> None:
    instance = one_rank(me)
    top, bottom = 2**31 - 1, -(2**31)
    small = ((5, 5), (5, 6), (5, 5 + 2**30))
    for epoch, signal in (
        *small,
        (top, top),
        (top, bottom),
        (top - 1, bottom + 3),
        (bottom, bottom),
    ):
        instance.control[EPOCH] = epoch
        instance.signals[:4] = signal
        assert launch_wait(instance, 0, 4) == [epoch, 0, 1], f"{signal} has reached {epoch}"
        assert int(instance.control[EPOCH]) == (epoch + 1 + 2**31) % 2**32 - 2**31, (
            "the epoch wraps too"
        )
    instance.check()


def test_waits_compare_across_the_wrap(worlds: Worlds) -> None:
    worlds("gloo", 1).run(waits_compare_across_the_wrap)


def the_last_program_advances_the_epoch(me: Member) -> None:
    instance = one_rank(me)
    instance.signals.fill_(100)
    for n, count in enumerate((1, 3, 8)):
        launch_wait(instance, 0, 1, num_programs=count)
        assert int(instance.control[EPOCH]) == 2 + n, f"{count} programs are one call"
        assert int(instance.control[LEAVERS]) == 0


def last_program_sees_a_fault(me: Member) -> None:
    """Also if it has read FAULT before that was set: the count of programs that have left says
    so."""
    instance, table = one_rank(me), torch.zeros(2, dtype=torch.int64)
    instance.control[TABLES : TABLES + 4] = torch.tensor([table.data_ptr()] * 2).view(torch.int32)
    instance.control[TABLE_RANKS], instance.control[TABLE_RANK] = 2, 0
    for call, (time_outs, early) in enumerate(product((0, 1), (False, True)), start=2):
        table[0], table[1] = 5, 6
        # two have left, the third read FAULT before
        instance.control[LEAVERS] = 2 + time_outs * interpreted.protocol.LATE
        leave_kernel[(1,)](instance.control, 3, EARLY=early)
        assert table.tolist() == [5, 5 if time_outs else 6]
        assert (int(instance.control[LEAVERS]), int(instance.control[EPOCH])) == (0, call)


def test_last_program_sees_a_fault(worlds: Worlds) -> None:
    worlds("gloo", 1).run(last_program_sees_a_fault)


def test_the_last_program_advances_the_epoch(worlds: Worlds) -> None:
    worlds("gloo", 1).run(the_last_program_advances_the_epoch)


def a_wait_that_runs_out_of_time(me: Member, late: int, count: int) -> None:
    """One of several signals is late: the report names it, and later waits do not wait again."""
    for epoch, seen in ((5, 4), (5, 4 - 2**30), (-(2**31), 2**31 - 1), (1, 0)):
        instance = one_rank(me)
        instance.control[EPOCH] = epoch
        instance.signals.fill_(epoch)
        instance.signals[late] = seen
        started = time.monotonic()
        with pytest.raises(Exception, match=f"signal {late}"):
            launch_wait(instance, 0, count)
        assert 0.2 <= time.monotonic() - started < 1.5
        assert int(instance.control[FAULT]) == 1
        assert int(instance.control[TIMEOUT_US]) == int(instance.control[MEETING_US]) == 0, (
            "later waits return at once"
        )
        assert int(instance.control[PUSHED_US]) > 0, "but for those for own copies"
        with pytest.raises(PeerTimeout) as caught:
            instance.check()
        error = caught.value
        assert (error.unit, error.expected, error.seen) == (7, epoch, seen)
        assert error.peer == late // MAX_SLICES


@pytest.mark.parametrize(("late", "count"), [(0, 1), (0, 4), (3, 4), (31, 32)])
def test_wait_times_out(worlds: Worlds, late: int, count: int) -> None:
    worlds("gloo", 1).run(a_wait_that_runs_out_of_time, late, count)


def waits_look_at_their_words_only(me: Member) -> None:
    instance = one_rank(me)
    instance.signals.fill_(0)
    instance.signals[8:12] = 1
    assert launch_wait(instance, 8, 4) == [1, 0, 1]
    instance.check()


def test_waits_read_only_their_signals(worlds: Worlds) -> None:
    worlds("gloo", 1).run(waits_look_at_their_words_only)
