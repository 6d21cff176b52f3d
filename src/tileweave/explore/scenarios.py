"""Scenarios: for each operator a few small cases to explore. A new operator is one entry here.

A scenario calls one operator on one rank of a model world, below the argument checks, and says what
the results must be. Operands are small integers, so results are exact; of matmuls they are in fp32
or in fp16, with NaN and infinities or without (:data:`PAYLOADS`). They differ between calls, so
that data of an older call is not right by chance. Tiles are as small as the interpreter allows,
because its time depends on the number of operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol
from zlib import crc32

import torch
import triton.language as tl

from tileweave.explore.ranks import World
from tileweave.explore.results import unwritten
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.transport.protocol import EPOCH, LEAVERS
from tileweave.transport.workspace import Instance

# Smaller values for constants of kernels that are sized for GPUs, so that a shard of 256 elements
# has several slices.
SMALLER: tuple[tuple[str, str, object], ...] = (
    ("tileweave.kernels.all_gather.triton", "PUSH_BLOCK", 128),
    ("tileweave.kernels.all_gather.await_shards", "BLOCK", 16),
    ("tileweave.kernels.reduce_scatter.sum_shards", "BLOCK", 16),
    ("tileweave.kernels.all_reduce.one_shot", "NORM_BLOCK", 16),
    ("tileweave.kernels.all_reduce.one_shot", "AT_THE_END", tl.constexpr(32)),
    ("tileweave.kernels.all_reduce.norm", "BLOCK", 64),
    ("tileweave.kernels.embedding.jagged", "BLOCK", 4),
    ("tileweave.kernels.embedding.table_sums", "GROUP", 2),
    ("tileweave.kernels.embedding.table_sums", "FLIGHT", 2),
    ("tileweave.kernels.embedding.table_sums", "KEYS", 16),
    ("tileweave.kernels.embedding.gradient", "LEAST", tl.constexpr(1)),  # others push nothing
    ("tileweave.kernels.embedding.gradient", "ROWS", 1),
    ("tileweave.kernels.embedding.gradient", "COLS", 8),
    ("tileweave.kernels.experts.combine_triton", "PUSH_BLOCK", tl.constexpr(4)),
    ("tileweave.kernels.embedding.gradient", "EVERY", 2),
)
# What operands of matmuls are: fp32, fp16, and fp16 with NaN, infinities and minus zero
PAYLOADS = ("whole", "half", "special")
# Sets of operands per shape. A prime, so that all combinations of calls, slots and sets occur.
POOL = 7


@dataclass(frozen=True)
class Drawn:
    """What a seed decides about a run besides its schedule."""

    programs: int
    resident: int | None
    epoch: int
    calls: int
    order: int  # offset into shapes and operands
    payload: str = "whole"  # one of PAYLOADS
    multiprocessors: int = 1  # on which programs of a kernel run, in turn


class Scenario(Protocol):
    """One way to call one operator. ``programs`` are numbers of programs that a kernel may have, at
    most ``ranks.MAX_PROGRAMS``."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def programs(self) -> tuple[int, ...]: ...
    @property
    def resident(self) -> int:
        """How many programs must be resident at once, because others wait for them."""
        ...

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        """Called on every host before the first call. Collective."""
        ...

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Call once. Yields (name, result, what it must equal)."""
        ...

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        """Called after the last call. Yields (name, value, expected value) of numbers that calls
        must restore."""
        ...


def wrap(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


class OneInstance:
    """What scenarios have in common whose calls use one instance of their operator."""

    op: str

    @property
    def instance_kind(self) -> str:
        return "sm"

    def instance(self, world: World, rank: int) -> Instance:
        return world.workspace(rank).instance(self.op, self.instance_kind)

    def first_epoch(self, drawn: Drawn) -> int:
        return drawn.epoch

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        """Make the instance and set its epoch, as after that many calls."""
        instance, epoch = self.instance(world, rank), self.first_epoch(drawn)
        instance.control[EPOCH] = epoch
        instance.signals.fill_(wrap(epoch - 1))
        instance.calls = epoch & 1 ^ 1  # the host's count has a fixed parity relative to the epoch
        world.barrier()

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        instance = self.instance(world, rank)
        yield "epoch", int(instance.control[EPOCH]), wrap(self.first_epoch(drawn) + drawn.calls)
        yield "programs that left", int(instance.control[LEAVERS]), 0


class MatmulInstance(OneInstance):
    """The same of a matmul: its counters are zero after a call, and no signal is early."""

    config: MatmulConfig

    @property
    def instance_kind(self) -> str:
        return instance_of(self.config)

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from super().end(world, rank, drawn)
        instance = self.instance(world, rank)
        yield "counters not at zero", int(instance.counters.count_nonzero()), 0
        ahead = instance.signals - wrap(drawn.epoch + drawn.calls - 1)  # in 32 bits
        yield "signals of calls to come", int((ahead > 0).sum()), 0


@lru_cache(maxsize=4096)
def whole_numbers(shape: tuple[int, ...], *seed: object) -> torch.Tensor:
    """Small integers in fp32, the same for the same seed; never written to."""
    generator = torch.Generator().manual_seed(crc32(repr(seed).encode()))
    return torch.randint(-3, 4, shape, generator=generator).float()


@lru_cache(maxsize=4096)
def operand(payload: str, shape: tuple[int, ...], *seed: object) -> torch.Tensor:
    """:func:`whole_numbers` as ``payload`` says. Where that is "special", one element is NaN, one
    infinite, and zeros are minus zero."""
    whole = whole_numbers(shape, *seed)
    if payload == "whole":
        return whole
    if payload == "special":
        whole = torch.where(whole == 0, -0.0, whole)
        place = crc32(repr(seed).encode()) % whole.numel()
        whole.view(-1)[place] = float("nan")
        whole.view(-1)[place * 7 % whole.numel()] = float("inf")
    return whole.half()


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x w^T, which is exact."""
    return x.float() @ w.float().t()


def same(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Which elements are equal; NaN is equal to NaN."""
    return (got == want) | (got.isnan() & want.isnan())


def added(want: torch.Tensor, turn: int, rank: int) -> torch.Tensor | None:
    """A bias for the columns of every third result, else None; a number for each column."""
    if turn % 3 != 1:
        return None
    return whole_numbers(want.shape[-1:], "bias", rank, turn % POOL).to(want.dtype)


def placed(x: torch.Tensor, turn: int) -> torch.Tensor:
    """A copy of ``x``, after which nothing may be read; of every fifth call it begins where no 16
    bytes do."""
    apart = int(turn % 5 == 3)
    whole = torch.empty(apart + x.numel(), dtype=x.dtype)
    return whole[apart:].view(x.shape).copy_(x)


def sign_of_zeros(out: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """All ranks have one zero: plus."""
    wrong = torch.signbit(out) & (out == 0)
    return "sign of zeros", wrong, torch.zeros_like(wrong)


def laid(w: torch.Tensor, turn: int) -> torch.Tensor:
    """``w`` as it is, or, every other time, contiguous along its first dimension, as backward reads
    it."""
    return w.t().contiguous().t() if turn % 2 else w


def instance_of(config: MatmulConfig) -> str:
    """The kind of instance that calls with ``config`` use."""
    if config.kernel == "library":
        return "library" if config.transport == "sm" else "gather"
    return config.transport


# --- all_gather_matmul ---


@dataclass(frozen=True)
class AllGatherMatmul(MatmulInstance):
    """``shapes``: (rows, cols, K) of a rank, used in turn. ``captured``: as after a graph capture,
    when only slot 0 is used. ``over_nodes``: ranks are on several nodes."""

    name: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]
    gathered: bool = False
    captured: bool = False
    over_nodes: bool = False
    op: str = "all_gather_matmul"
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS

    @property
    def resident(self) -> int:
        return self.config.num_producers if self.config.transport == "sm" else 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.all_gather_matmul_fused import run_fused

        turn = number + drawn.order
        shape = self.shapes[turn % len(self.shapes)]
        seed = turn % POOL
        whole, w, want = gather_operands(drawn.payload, shape, world.size, rank, seed)
        bias = added(want, turn, rank)
        want = want if bias is None else want + bias
        out = unwritten(want, turn)
        gathered = unwritten(whole) if self.gathered else None
        world.transports[rank].captured = self.captured and number > 0
        x = placed(whole[rank * shape[0] : (rank + 1) * shape[0]], turn)
        run_fused(
            x,
            laid(w, number + drawn.order // 2),
            bias,
            out,
            gathered,
            world.ranks[rank].group,
            Plan("fused", "explored", self.config),
        )
        yield "out", out, want
        if gathered is not None:
            yield "gathered", gathered, whole
            if instance_of(self.config) == "library":  # which sends a zero as another one
                yield sign_of_zeros(gathered)


@dataclass(frozen=True)
class ConcurrentGather(MatmulInstance):
    """The all-gather of backward. ``shapes``: (rows, K) of a rank. The result is read late, as by a
    matmul."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    captured: bool = False
    op: str = "all_gather_matmul"
    programs: tuple[int, ...] = (1, 2, 3)
    resident: int = 1
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS

    @property
    def instance_kind(self) -> str:
        return "gather"

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.concurrent_gather import begin_gather

        turn = number + drawn.order
        rows, depth = self.shapes[turn % len(self.shapes)]
        seed = turn % POOL
        whole = operand(drawn.payload, (world.size * rows, depth), "x", seed)
        world.transports[rank].captured = self.captured and number > 0
        x = whole[rank * rows : (rank + 1) * rows].clone()
        gathering = begin_gather(x, world.ranks[rank].group)
        world.tasks.point()
        gathered = gathering.wait()
        world.tasks.point()
        yield "gathered", gathered, whole


@lru_cache(maxsize=4096)
def gather_operands(
    payload: str, shape: tuple[int, int, int], size: int, rank: int, seed: int
) -> tuple[torch.Tensor, ...]:
    rows, cols, depth = shape
    whole = operand(payload, (size * rows, depth), "x", seed)
    w = whole_numbers((cols, depth), "w", rank, seed).to(whole.dtype)
    return whole, w, product(whole, w).to(whole.dtype)


def triton_config(transport: str, **changes: object) -> MatmulConfig:
    tile = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "num_stages": 1, "num_warps": 4}
    options: dict[str, object] = {
        "kernel": "triton",
        **tile,
        "group_m": 1,
        "num_slices": 2,
        "num_producers": 1,
        **changes,
    }
    return MatmulConfig(transport=transport, **options)  # type: ignore[arg-type]


# --- matmul_reduce_scatter, and matmul_all_reduce with cuBLAS ---


@dataclass(frozen=True)
class MatmulReduce(MatmulInstance):
    """``shapes``: (rows of all ranks, cols, K of a rank). ``op``: matmul_reduce_scatter or
    matmul_all_reduce."""

    name: str
    op: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]
    captured: bool = False
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS

    @property
    def resident(self) -> int:
        return max(self.programs)  # a program may wait for any program of a peer

    @property
    def instance_kind(self) -> str:
        by_tiles = self.op == "matmul_all_reduce" and self.config.transport == "copy_engine"
        return "gather" if by_tiles else instance_of(self.config)

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul import matmul_all_reduce_fused, matmul_reduce_scatter_fused

        turn = number + drawn.order
        rows, cols, depth = self.shapes[turn % len(self.shapes)]
        owners = world.size if self.op == "matmul_reduce_scatter" else 1
        shape = (rows // owners * owners, cols, depth)
        seed = turn % POOL
        x, w, total = reduce_operands(drawn.payload, shape, world.size, rank, seed)
        mine = shape[0] // world.size
        want = total if self.op == "matmul_all_reduce" else total[rank * mine : (rank + 1) * mine]
        bias = added(want, turn, 0)
        residual = None
        if bias is not None and self.op == "matmul_all_reduce" and seed % 2:
            residual = whole_numbers(tuple(want.shape), "residual", seed).to(want.dtype)
            residual = placed(residual, turn + 1)
        for more in (bias, residual):
            want = want if more is None else want + more
        out = unwritten(want, turn)
        world.transports[rank].captured = self.captured and number > 0
        x = placed(x, turn)
        group, plan = world.ranks[rank].group, Plan("fused", "explored", self.config)
        w = laid(w, number + drawn.order // 2)
        if self.op == "matmul_all_reduce":
            matmul_all_reduce_fused.run_fused(
                x, w, bias, residual, None, 0.0, out, None, group, plan
            )
            yield sign_of_zeros(out)
        else:
            matmul_reduce_scatter_fused.run_fused(x, w, bias, out, group, plan)
        yield "out", out, want

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from super().end(world, rank, drawn)
        if self.config.transport == "sm":  # what is pushed is taken, and zeros are left
            yield "left in slots", int(self.instance(world, rank).slots.any()), 0


@lru_cache(maxsize=4096)
def reduce_operands(
    payload: str, shape: tuple[int, int, int], size: int, rank: int, seed: int
) -> tuple[torch.Tensor, ...]:
    rows, cols, depth = shape
    xs = [operand(payload, (rows, depth), "x", r, seed) for r in range(size)]
    ws = [whole_numbers((cols, depth), "w", r, seed).to(xs[0].dtype) for r in range(size)]
    total = torch.stack([product(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
    return xs[rank], ws[rank], total.to(xs[0].dtype)


@dataclass(frozen=True)
class OneShot(OneInstance):
    """matmul_all_reduce in one shot, with residual and norm. ``shapes``: (rows, cols, K of a rank);
    rows fit one tile."""

    name: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    norm: bool
    op: str = "matmul_all_reduce"
    # a kernel has as many programs as there are tiles and rows, whatever the device
    programs: tuple[int, ...] = (1,)
    resident: int = 1

    @property
    def payloads(self) -> tuple[str, ...]:
        return PAYLOADS[:1] if self.norm else PAYLOADS

    @property
    def instance_kind(self) -> str:
        return "one_shot"

    def first_epoch(self, drawn: Drawn) -> int:
        # a local word starts at 0, which is before the positive epochs
        return drawn.epoch if drawn.epoch > 0 else 2**31 - 2

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.matmul_all_reduce_fused import run_fused

        turn = number + drawn.order
        shape = self.shapes[turn % len(self.shapes)]
        seed = turn % POOL
        x, w, total = reduce_operands(drawn.payload, shape, world.size, rank, seed)
        residual = whole_numbers(shape[:2], "residual", number) if self.norm else None
        gain = whole_numbers(shape[1:2], "gain") if self.norm else None
        bias = added(total, turn, 0)
        want = total if residual is None else total + residual
        want = want if bias is None else want + bias
        out = unwritten(want, turn)
        kept = unwritten(want) if self.norm else None
        plan = Plan("fused", "explored", self.config)
        x = placed(x, turn)
        run_fused(x, w, bias, residual, gain, 1e-6, out, kept, world.ranks[rank].group, plan)
        if kept is None or gain is None:
            yield "out", out, want
        else:
            yield "sum", kept, want
            yield (
                "norm",
                out.mul(64).round(),
                torch.nn.functional.rms_norm(want, gain.shape, gain, 1e-6).mul(64).round(),
            )

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from super().end(world, rank, drawn)
        instance = self.instance(world, rank)
        yield "tiles that are done", int(instance.counters[0]), 0
        if not self.norm:
            yield "told to norm programs", int(instance.counters[1]), 0
        yield "elements left in slots", int(instance.slots.count_nonzero()), 0


SCENARIOS: tuple[Scenario, ...] = (
    AllGatherMatmul("sm", triton_config("sm"), ((16, 16, 16), (16, 17, 17)), (1, 2, 3)),
    AllGatherMatmul("sm, spans", triton_config("sm"), ((3, 16, 16), (5, 16, 16)), (1, 2)),
    AllGatherMatmul(
        "sm, spans, gathered", triton_config("sm"), ((3, 17, 43), (9, 8, 16)), (2, 3), gathered=True
    ),
    AllGatherMatmul(
        "sm, producers", triton_config("sm", num_producers=2, num_slices=2), ((16, 17, 17),), (2, 3)
    ),
    AllGatherMatmul(
        "sm, more producers", triton_config("sm", num_producers=2), ((16, 17, 17),), (1,)
    ),
    AllGatherMatmul(
        "sm, cut, gathered", triton_config("sm", tile_k=8), ((16, 16, 48),), (2, 3), gathered=True
    ),
    # numbers of tiles and of programs that teams divide, and others
    AllGatherMatmul(
        "sm, teams",
        triton_config("sm", tile_k=8, team=2),
        ((16, 32, 40), (8, 48, 40)),
        (2, 3, 4),
    ),
    AllGatherMatmul(
        "sm, groups", triton_config("sm", group_m=2), ((41, 17, 16), (48, 16, 17)), (2, 3)
    ),
    AllGatherMatmul(
        "copy engine", triton_config("copy_engine"), ((16, 16, 16), (17, 9, 17)), (1, 2)
    ),
    AllGatherMatmul(
        "copy engine, captured",
        triton_config("copy_engine"),
        ((16, 16, 16),),
        (1, 2),
        captured=True,
    ),
    AllGatherMatmul(
        "nodes",
        triton_config("nodes", num_slices=2),
        ((32, 16, 16), (17, 12, 20)),
        (1, 2),
        over_nodes=True,
    ),
    AllGatherMatmul(
        "nodes, many chunks",  # as many as a tile has rows: chunk n is not the one before
        triton_config("nodes", tile_m=4, num_slices=4),
        ((16, 12, 16),),
        (1, 2),
        over_nodes=True,
    ),
    AllGatherMatmul(
        "nodes, gathered",
        triton_config("nodes", num_slices=3),
        ((33, 8, 16),),
        (2, 3),
        gathered=True,
        over_nodes=True,
    ),
    AllGatherMatmul(
        "library",
        triton_config("sm", kernel="library"),
        ((18, 16, 16), (33, 8, 16)),
        (1, 2, 3),
        gathered=True,
    ),
    AllGatherMatmul(
        "by shards",
        triton_config("copy_engine", kernel="library"),
        ((2, 8, 16), (3, 16, 8)),
        (1,),
        gathered=True,
    ),
    AllGatherMatmul(
        "by shards, captured",
        triton_config("copy_engine", kernel="library"),
        ((2, 8, 16),),
        (1,),
        captured=True,
    ),
    ConcurrentGather("concurrent gather", ((2, 16), (1, 17), (1, 8))),
    ConcurrentGather("concurrent gather, captured", ((2, 16),), captured=True),
    MatmulReduce(
        "sm", "matmul_reduce_scatter", triton_config("sm"), ((48, 16, 16), (68, 17, 17)), (1, 2, 3)
    ),
    MatmulReduce(
        "sm, spans",
        "matmul_reduce_scatter",
        triton_config("sm"),
        ((12, 32, 16), (24, 17, 17)),
        (1, 2),
    ),
    MatmulReduce(
        "sm, groups",
        "matmul_reduce_scatter",
        triton_config("sm", group_m=2),
        ((123, 17, 16), (96, 32, 16)),
        (2, 3),
    ),
    MatmulReduce(
        "sm, cut", "matmul_reduce_scatter", triton_config("sm", tile_k=8), ((48, 16, 48),), (2, 3)
    ),
    MatmulReduce(
        "copy engine",
        "matmul_reduce_scatter",
        triton_config("copy_engine"),
        ((64, 16, 16), (70, 17, 17)),
        (1, 2, 3),
    ),
    MatmulReduce(
        "copy engine, captured",
        "matmul_reduce_scatter",
        triton_config("copy_engine"),
        ((64, 16, 16),),
        (1, 2),
        captured=True,
    ),
    MatmulReduce(
        "library",
        "matmul_reduce_scatter",
        triton_config("sm", kernel="library"),
        ((96, 16, 16), (20, 16, 16)),
        (1, 2, 3),
    ),
    MatmulReduce(
        "by shards",
        "matmul_reduce_scatter",
        triton_config("copy_engine", kernel="library"),
        ((12, 16, 16), (5, 17, 16)),
        (1, 2, 3),
    ),
    MatmulReduce(
        "by shards, captured",
        "matmul_reduce_scatter",
        triton_config("copy_engine", kernel="library"),
        ((12, 16, 16),),
        (1, 2),
        captured=True,
    ),
    MatmulReduce(
        "library",
        "matmul_all_reduce",
        triton_config("sm", kernel="library"),
        ((24, 48, 8), (5, 64, 8), (1, 8, 16)),
        (1, 2, 3),
    ),
    MatmulReduce(
        "library, few columns",  # of which three or four ranks would not all have some
        "matmul_all_reduce",
        triton_config("sm", kernel="library"),
        ((5, 2, 8), (20, 1, 8)),
        (1, 2),
    ),
    MatmulReduce(
        "library, one shot",
        "matmul_all_reduce",
        triton_config("sm", kernel="library", shots=1),
        ((24, 16, 16), (5, 32, 16), (1, 8, 16)),
        (1, 2, 3),
    ),
    OneShot("one shot", triton_config("sm", shots=1), ((3, 17, 17), (5, 33, 12)), norm=False),
    OneShot("one shot, tall", triton_config("sm", shots=1, tile_m=32), ((32, 17, 12),), norm=False),
    OneShot("one shot, norm", triton_config("sm", shots=1), ((2, 17, 12), (3, 33, 17)), norm=True),
    OneShot(
        "one shot, teams",
        triton_config("sm", shots=1, tile_n=64, team=2),
        ((3, 17, 33), (5, 70, 8)),
        norm=False,
    ),
    OneShot(
        "one shot, teams, norm", triton_config("sm", shots=1, team=3), ((2, 33, 40),), norm=True
    ),
    MatmulReduce(
        "by tiles",
        "matmul_all_reduce",
        triton_config("copy_engine", num_slices=2),
        ((64, 16, 16), (97, 17, 8)),
        (1, 2),
    ),
    MatmulReduce(
        "by tiles, captured",
        "matmul_all_reduce",
        triton_config("copy_engine", num_slices=3),
        ((65, 8, 16),),
        (1, 2),
        captured=True,
    ),
)
