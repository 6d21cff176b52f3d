"""Bodies of the tests that CPU and GPU worlds share: fused calls against fp64, under every kind of disturbance.

Every rank draws the data of all ranks from seeds, so what is expected is computed locally: nothing that is tested is
part of the oracle. Data is fresh in each call; a stale slot or a stale signal cannot hide behind equal values.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from tests.worlds import Member

import tileweave as tw
from tileweave.config import MatmulConfig, Plan
from tileweave.ops.all_gather_matmul import OP, run_fused
from tileweave.ops.registry import name_of, workspace_of
from tileweave.topology import Machine
from tileweave.transport.base import EPOCH, LEAVERS
from tileweave.transport.workspace import Instance

# Largest difference from the result in fp64: (relative, absolute), elementwise; operands are scaled for results near 1.
TOLERANCE = {"float32": (1e-5, 1e-5), "float16": (2e-3, 2e-3), "bfloat16": (1.6e-2, 1e-2)}


@dataclass(frozen=True)
class Case:
    """One call: rows of a shard, columns of a rank, K. ``integers``: small whole numbers, so results are exact."""

    rows: int
    cols: int
    depth: int
    dtype: str = "float32"
    bias: bool = False
    gathered: bool = False
    integers: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def fit(self, config: MatmulConfig) -> Case:
        """This case, with a tile's rows more where copy engines push: they need shards as tall as a tile."""
        short = config.transport == "copy_engine" and self.rows < config.tile_m
        return replace(self, rows=self.rows + config.tile_m) if short else self


def draw(shape: tuple[int, ...], case: Case, scale: float, device: torch.device, *seed: object) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(hash(seed) % (1 << 62))
    if case.integers:
        return torch.randint(-2, 3, shape, generator=generator, device=device).to(case.torch_dtype)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(case.torch_dtype)


def draw_x(case: Case, rank: int, device: torch.device, seed: int) -> torch.Tensor:
    return draw((case.rows, case.depth), case, 1.0, device, seed, rank, 0)


def draw_w(case: Case, rank: int, device: torch.device, seed: int) -> torch.Tensor:
    return draw((case.cols, case.depth), case, case.depth**-0.5, device, seed, rank, 1)


def draw_bias(case: Case, rank: int, device: torch.device, seed: int) -> torch.Tensor | None:
    return draw((case.cols,), case, 1.0, device, seed, rank, 2) if case.bias else None


@dataclass(frozen=True)
class Call:
    """Operands of one call on one rank, poisoned memory for its results, and what must stand there afterwards."""

    case: Case
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    gathered: torch.Tensor | None
    want: torch.Tensor
    want_gathered: torch.Tensor

    def verify(self, what: str, out: torch.Tensor | None = None, gathered: torch.Tensor | None = None) -> None:
        verify(self.out if out is None else out, self.want, self.case, f"{what}, {self.case}")
        gathered = self.gathered if gathered is None else gathered
        if gathered is not None:
            rows = rows_that_differ(gathered, self.want_gathered)
            assert not rows, f"{what}, {self.case}: gathered differs in rows {rows}"
            assert gathered.shape == self.want_gathered.shape, f"{what}: gathered {tuple(gathered.shape)}"


def prepare(case: Case, rank: int, size: int, device: torch.device, seed: int) -> Call:
    everyone = torch.cat([draw_x(case, r, device, seed) for r in range(size)])
    w, bias = draw_w(case, rank, device, seed), draw_bias(case, rank, device, seed)
    want = everyone.double() @ w.double().t()
    if bias is not None:
        want += bias.double()
    out = torch.full(want.shape, float("nan"), dtype=case.torch_dtype, device=device)
    gathered = torch.full_like(everyone, float("nan")) if case.gathered else None
    return Call(case, draw_x(case, rank, device, seed), w, bias, out, gathered, want, everyone)


def verify(got: torch.Tensor, want: torch.Tensor, case: Case, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == case.torch_dtype, f"{what}: dtype {got.dtype}"
    if case.integers:  # sums of whole numbers are exact in fp32; what is left is one rounding
        rounded = want.to(got.dtype)
        assert torch.equal(got, rounded), f"{what}: not exact in rows {rows_that_differ(got, rounded)}"
        return
    relative, absolute = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute, msg=lambda text: f"{what}: {text}")


def rows_that_differ(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    return (got != want).any(dim=1).nonzero().flatten().tolist()[:20]


# --- Reaching in ---


@contextmanager
def programs(group: dist.ProcessGroup, device: torch.device, count: int | None) -> Iterator[None]:
    """Give the kernels ``count`` programs, as if the device had that many multiprocessors (None: as it is)."""
    workspace = workspace_of(name_of(group), device)
    before = workspace.transport.machine

    def become(machine: Machine) -> None:
        workspace.transport.machine = machine
        for instance in workspace.instances.values():
            instance.cache.clear()  # what calls of one shape share depends on the machine

    if count is not None:
        become(replace(before, num_sms=count))
    try:
        yield
    finally:
        become(before)


def run(call: Call, group: dist.ProcessGroup, config: MatmulConfig) -> None:
    """The fused kernel with this configuration, whatever the plan would say."""
    plan = Plan("fused", "a test asks for it", config)
    run_fused(call.x, call.w, call.bias, call.out, call.gathered, name_of(group), plan)


def instance_of(group: dist.ProcessGroup, device: torch.device, transport: str) -> Instance:
    return workspace_of(name_of(group), device).instance(OP, transport)


def poison_slots(instance: Instance) -> None:
    """Fill this rank's slots with bytes that are NaN in every dtype. Collective, between calls."""
    instance.transport.barrier()
    instance.slots.fill_(255)
    instance.transport.synchronize()
    instance.transport.barrier()


def pause(device: torch.device, seconds: float) -> None:
    """Hold up this rank: its device where it has one, behind what is queued; else its process."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        time.sleep(seconds)


# --- Bodies ---


def parity(me: Member, cases: list[Case], config: MatmulConfig, num_programs: int | None = None) -> None:
    """Each case with poisoned slots and results; the first also before there are any slots to poison."""
    group = dist.group.WORLD
    with programs(group, me.device, num_programs):
        for number, case in enumerate((cases[0], *cases)):
            if number > 0:
                poison_slots(instance_of(group, me.device, config.transport))
            call = prepare(case.fit(config), me.rank, me.world_size, me.device, number)
            run(call, group, config)
            call.verify(f"rank {me.rank}, {config}, programs {num_programs}, call {number}")
            instance = instance_of(group, me.device, config.transport)
            assert not instance.counters.any(), "counters of cut tiles are zero between calls"
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
    """``count`` calls of changing shape; in each one rank comes ``seconds`` late, in turn. Checks come after all calls.

    ``stall(seconds, n)``: a context that holds this rank up inside the call; the others run ahead as far as they may.
    """
    group = dist.group.WORLD
    order = random.Random(7)
    drawn = [order.choice(cases).fit(config) for _ in range(count)]
    calls = [prepare(case, me.rank, me.world_size, me.device, 1000 + n) for n, case in enumerate(drawn)]
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
    """The epoch passes 2**31 - 1: signals wrap to negative numbers and waits must not notice."""
    group, case = dist.group.WORLD, case.fit(config)
    call = prepare(case, me.rank, me.world_size, me.device, 0)
    run(call, group, config)  # now there are slots
    instance = instance_of(group, me.device, config.transport)
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
    assert epoch == -(2**31) + 3, f"the epoch stands at {epoch}"
    instance.transport.barrier()
    tw.close()


def two_groups(me: Member, members: list[int], case: Case, config: MatmulConfig, count: int) -> None:
    """The world and a sub-group in alternation, also on two streams; each with an epoch of its own."""
    world, part = dist.group.WORLD, me.group(*members)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if me.device.type == "cuda" else None
    done: list[tuple[str, Call]] = []
    for n in range(count):
        for which, group in enumerate((world, part)):
            if group is None or (which == 1 and n % 3 == 2):  # the sub-group has fewer calls than the world
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
    """Only a sub-group calls; ranks of the group are not ranks of the world."""
    group = me.group(*members)
    if group is not None:
        for n in range(3):
            call = prepare(case.fit(config), dist.get_rank(group), len(members), me.device, n)
            run(call, group, config)
            call.verify(f"rank {me.rank} of the world, call {n} in {members}")
    me.barrier()
