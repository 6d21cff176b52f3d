"""Shared by CPU and GPU tests: fused calls against fp64, under every kind of disturbance.

``matmul_cases.py`` has the cases and the oracle of all matmul operators.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import torch
import torch.distributed as dist
from tests.support.matmul_cases import AG, AR, EPS, IN, OUT, RS, Call, Case, prepare
from tests.support.worlds import Member

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.machine import Machine
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.protocol import EPOCH, LEAVERS
from tileweave.transport.workspace import Instance

# --- Reaching in ---


@contextmanager
def programs(group: dist.ProcessGroup, device: torch.device, count: int | None) -> Iterator[None]:
    """Give the kernels ``count`` programs, as if the device had that many multiprocessors (None:
    unchanged)."""
    workspace = workspace_of(name_of(group), device)
    before = workspace.transport.machine

    def become(machine: Machine) -> None:
        workspace.transport.machine = machine
        for instance in workspace.instances.values():
            # what calls of one shape share depends on the number of multiprocessors
            instance.cache.clear()

    if count is not None:
        become(replace(before, num_sms=count))
    try:
        yield
    finally:
        become(before)


def run(call: Call, group: dist.ProcessGroup, config: MatmulConfig) -> None:
    """Run the fused kernel with this config instead of the planned one."""
    plan, name, o = Plan("fused", "a test asks for it", config), name_of(group), call.operands
    run_fused = import_module(
        f"tileweave.ops.matmul.{AG if call.case.op == IN else call.case.op}_fused"
    ).run_fused
    how = None if call.case.how is None else Exchange(*call.case.how)
    if call.case.op == AG:
        run_fused(o.x, o.w, o.bias, call.out, call.second, name, plan)
    elif call.case.op == RS:
        run_fused(o.x, o.w, o.bias, call.out, name, plan)
    elif call.case.op == OUT:
        run_fused(o.x, o.w, o.bias, call.out, how, name, plan)
    elif call.case.op == IN:
        run_fused(o.x, o.w, o.bias, call.out, None, name, plan, how=how)
    else:
        run_fused(
            o.x, o.w, o.bias, o.residual, o.norm_weight, EPS, call.out, call.second, name, plan
        )


def instance_of(
    group: dist.ProcessGroup, device: torch.device, op: str, config: MatmulConfig
) -> Instance:
    kind = "one_shot" if op == AR and config.shots == 1 else config.transport
    if config.kernel == "library" and config.transport == "sm":
        kind = "library"
    elif config.transport == "copy_engine" and (op == AR or config.kernel == "library"):
        kind = "gather"
    return workspace_of(name_of(group), device).instance(op, kind)


def poison_slots(instance: Instance, marked: bool) -> None:
    """Fill the slots of this rank with bytes that are NaN in every dtype. Collective, between
    calls.

    Slots of self-signaling data (``marked``, see ``device/triton/self_signaling.py``) must be zero
    between calls instead.
    """
    instance.transport.synchronize()
    instance.transport.barrier()
    if marked:
        left = int(instance.slots.count_nonzero())
        assert not left, f"{left} bytes of data that announces itself were not taken, or not wiped"
    else:
        instance.slots.fill_(255)
    instance.transport.synchronize()
    instance.transport.barrier()


def pause(device: torch.device, seconds: float) -> None:
    """Delay this rank: its device if it has one, after the work that is queued, else its
    process."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        time.sleep(seconds)


# --- Bodies ---


def parity(
    me: Member, cases: list[Case], config: MatmulConfig, num_programs: int | None = None
) -> None:
    """Run each case with poisoned slots and results. Run the first one also before there are slots
    to poison."""
    group = dist.group.WORLD
    with programs(group, me.device, num_programs):
        for number, case in enumerate((cases[0], *cases)):
            if number > 0:
                marked = config.transport == "sm" and (
                    config.kernel == "library" or case.op not in (AG, IN)
                )
                poison_slots(instance_of(group, me.device, case.op, config), marked)
            call = prepare(case.fit(config), me.rank, me.world_size, me.device, number)
            run(call, group, config)
            call.verify(f"rank {me.rank}, {config!r}, programs {num_programs}, call {number}")
            instance = instance_of(group, me.device, case.op, config)
            # of a one-shot norm: the word after the count is an epoch
            gate = int(config.shots == 1 and case.op == AR)
            assert not instance.counters[: instance.counters.numel() - gate].any(), (
                "counters are zero between calls"
            )
            assert int(instance.control[LEAVERS]) == 0, "so is the count of programs that left"


def many_calls(
    me: Member,
    cases: list[Case],
    config: MatmulConfig,
    count: int,
    seconds: float,
    num_programs: int | None = None,
    stall: Callable[[float, int], object] | None = None,
) -> None:
    """Make ``count`` calls of changing shape. In each, a different rank is ``seconds`` late. All
    checks follow the last call.

    ``stall(seconds, n)`` is a context that delays this rank inside the call, while the others run
    ahead as far as they can.
    """
    group = dist.group.WORLD
    order = random.Random(7)
    drawn = [order.choice(cases).fit(config) for _ in range(count)]
    calls = [
        prepare(case, me.rank, me.world_size, me.device, 1000 + n) for n, case in enumerate(drawn)
    ]
    with programs(group, me.device, num_programs):
        for n, call in enumerate(calls):
            late = n // 2 % me.world_size == me.rank
            if late and n % 2 == 0:
                pause(me.device, seconds)
            if late and n % 2 and stall is not None:
                with stall(seconds, n):
                    run(call, group, config)
            else:
                run(call, group, config)
    tw.synchronize()
    for n, call in enumerate(calls):
        call.verify(f"rank {me.rank}, call {n} of {count}, {config.transport}")


def calls_around_the_wrap(me: Member, case: Case, config: MatmulConfig) -> None:
    """The epoch passes 2**31 - 1. Signals wrap to negative numbers, which must not affect waits."""
    group, case = dist.group.WORLD, case.fit(config)
    call = prepare(case, me.rank, me.world_size, me.device, 0)
    run(call, group, config)  # now slots are allocated
    instance = instance_of(group, me.device, case.op, config)
    instance.transport.synchronize()
    instance.transport.barrier()
    instance.control[EPOCH] = 2**31 - 3
    instance.signals.fill_(2**31 - 4)
    instance.transport.synchronize()
    instance.transport.barrier()
    for n in range(6):
        call = prepare(case, me.rank, me.world_size, me.device, 100 + n)
        run(call, group, config)
        call.verify(f"rank {me.rank}, call {n} around the wrap")
    instance.transport.synchronize()
    epoch = int(instance.control[EPOCH])
    assert epoch == -(2**31) + 3, f"the epoch is {epoch}"
    instance.transport.barrier()
    tw.close()


def two_groups(
    me: Member, members: list[int], case: Case, config: MatmulConfig, count: int
) -> None:
    """Call on the world and on a subgroup alternately, also on two streams. Each has its own
    epoch."""
    world, part = dist.group.WORLD, me.group(*members)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if me.device.type == "cuda" else None
    done: list[tuple[str, Call]] = []
    for n in range(count):
        for which, group in enumerate((world, part)):
            # the subgroup has fewer calls than the world
            if group is None or (which == 1 and n % 3 == 2):
                continue
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            call = prepare(case.fit(config), rank, size, me.device, 10 * n + which)
            if (n + me.rank) % 4 == 0:
                pause(me.device, 0.003)
            if streams is None:
                run(call, group, config)
            else:
                streams[which].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[which]):
                    run(call, group, config)
            done.append((f"rank {me.rank}, group {which}, call {n}", call))
    tw.synchronize()
    for what, call in done:
        call.verify(what)
    me.barrier()


def subgroup(me: Member, members: list[int], case: Case, config: MatmulConfig) -> None:
    """Only a subgroup calls. Ranks in the group differ from ranks in the world."""
    group = me.group(*members)
    if group is not None:
        for n in range(3):
            call = prepare(case.fit(config), dist.get_rank(group), len(members), me.device, n)
            run(call, group, config)
            call.verify(f"rank {me.rank} of the world, call {n} in {members}")
    me.barrier()
