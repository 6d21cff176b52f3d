"""The rivals of matmul operators: callables over the same operands, on one rank and for one case.

==============  ====================================================================================
tileweave       the public operator, with ``out=``
nccl+cublas     the collective and one matmul, one after the other (gloo and torch without GPUs):
                what the operator runs unfused (``ops/reference.py``), with all memory kept
torch fused     ``torch.ops.symm_mem.fused_all_gather_matmul`` or ``fused_matmul_reduce_scatter``
torch one-shot  one matmul into symmetric memory, then torch's all-reduce over it, in which every
                rank reads all others
torch two-shot  the same with torch's all-reduce in two steps: every rank sums a part, then all read
                the parts
gemm            that matmul alone, no communication
co-run bound    the same matmul while copy engines push what the operator must send, without
                dependence: the limit
==============  ====================================================================================

Besides ``transport/cuda.py`` only this file uses torch's private symmetric memory, for the
operators of torch and for the co-run bound. Weights rotate through copies that exceed the L2, for
all rivals; each call takes the next one.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import cycle
from typing import Any, ClassVar

import torch

import tileweave as tw
from tileweave.bench.cases import Case
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import Draw, Operands, Shape, normal, poisoned, worst_of
from tileweave.launcher import Member
from tileweave.ops import reference
from tileweave.ops.core.registration import spec_of
from tileweave.ops.core.registry import l2_bytes
from tileweave.planning.problem import Plan
from tileweave.planning.schedules.scatter import Exchange

OURS = "tileweave"
UNFUSED = "nccl+cublas"
TORCH = "torch fused"
GEMM = "gemm"
CORUN = "co-run bound"
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"
RIVALS = (OURS, UNFUSED, TORCH, ONE_SHOT, TWO_SHOT, GEMM, CORUN)
TORCHS = (TORCH, ONE_SHOT, TWO_SHOT)
_ON_GPU_ONLY = (*TORCHS, CORUN)
_MAX_WEIGHTS = 8
_L2_TIMES = 2.5
Call = Callable[[], object]


class Rivals(ABC):
    """The callables of one case. Making them is collective (symmetric memory).

    ``functions``: name -> one call. ``missing``: name -> why it cannot run here. A subclass per
    operator defines what its matmul reads, its unfused path, which operators of torch are its
    rivals, and what it must push.
    """

    torchs: ClassVar[tuple[str, ...]] = (TORCH,)  # operators of torch among the rivals

    def __init__(self, case: Case, member: Member, names: tuple[str, ...], seed: int) -> None:
        self.case, self.member = case, member
        self.group = member.group
        self.device = member.device
        self.rank = member.rank
        self.size = member.world_size
        self.dtype = getattr(torch, case.dtype)
        self.subject: Any = samples_of(case.op).subject
        self.operands = self._draw(seed)
        self.weights = self._weights()
        self.out = poisoned(self.operands.out_shape, self.dtype, self.device)
        self.missing: dict[str, str] = {}
        self._held: list[object] = []
        makers = self.makers()
        made = {
            name: self._make(name, makers[name])
            for name in RIVALS
            if name in names and name in makers
        }
        self.functions = {name: function for name, function in made.items() if function is not None}

    def makers(self) -> dict[str, Callable[[], Call | None]]:
        """Name -> function that makes the callable."""
        return {OURS: self.ours, UNFUSED: self.unfused, GEMM: self.gemm, CORUN: self.corun}

    def _make(self, name: str, maker: Callable[[], Call | None]) -> Call | None:
        if name in _ON_GPU_ONLY and not self.member.on_gpu:
            self.missing[name] = "needs GPUs"
            return None
        return maker()

    def _draw(self, seed: int) -> Operands:
        shape = Shape(*self.case.shard(self.size))
        return self.subject.draw(shape, Draw(self.dtype, self.device, self.rank, self.size, seed))

    def _weights(self) -> list[torch.Tensor]:
        """The weight, and copies so that together they do not fit the L2."""
        w = self.operands.w
        if not self.member.on_gpu:
            return [w]
        l2 = l2_bytes(self.device) or 60 << 20
        count = min(
            _MAX_WEIGHTS, max(1, round(_L2_TIMES * l2 / (w.numel() * w.element_size()) + 0.5))
        )
        shape, scale = (w.shape[0], w.shape[1]), w.shape[1] ** -0.5
        return [w] + [
            normal(shape, scale, self.dtype, self.device, 77, self.rank, i)
            for i in range(count - 1)
        ]

    def input(self) -> torch.Tensor:
        """The input of the bare matmul."""
        return self.operands.x

    def ours(self) -> Call:
        x, group, out, ws = self.operands.x, self.group, self.out, cycle(self.weights)
        operator, options = spec_of(self.case.op).call, self.subject.options
        return lambda: operator(x, next(ws), group=group, out=out, **options)

    @abstractmethod
    def unfused(self) -> Call:
        """The operator as collectives and matmuls of torch."""

    @abstractmethod
    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(local source, target on a peer) of all that this rank must send, for the bound."""

    def gemm(self) -> Call:
        x, ws = self.input(), cycle([w.t() for w in self.weights])
        out = x.new_empty(x.shape[0], self.operands.w.shape[0])
        return lambda: torch.mm(x, next(ws), out=out)

    def corun(self) -> Call:
        pushes, side, gemm = self.pushes(), torch.cuda.Stream(self.device, priority=-1), self.gemm()

        def call() -> None:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for source, target in pushes:
                    target.copy_(source, non_blocking=True)
            gemm()
            current.wait_stream(side)

        return call

    def torch_operator(self, name: str, rival: str) -> Any:
        """``torch.ops.symm_mem.<name>``, or None and a note if this torch has none.

        Call :meth:`symmetric` first.
        """
        if not hasattr(torch.ops.symm_mem, name):
            self.missing[rival] = f"this torch has no torch.ops.symm_mem.{name}"
            return None
        return getattr(torch.ops.symm_mem, name)

    def symmetric(self, *shape: int) -> tuple[torch.Tensor, Any]:
        """Collective: symmetric memory of ``shape``, and its handle in torch. Registers torch's
        operators."""
        import torch.distributed._symmetric_memory as symm_mem

        with warnings.catch_warnings():  # deprecated in versions that do not need it
            warnings.simplefilter("ignore")
            symm_mem.enable_symm_mem_for_group(self.group.group_name)
        tensor = symm_mem.empty(*shape, dtype=self.dtype, device=self.device)
        handle = symm_mem.rendezvous(tensor, self.group.group_name)
        self._held += [tensor, handle]  # peers copy into it for as long as this object lives
        return tensor, handle

    def others(self, handle: Any, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """The memory of each peer from ``handle``, starting with the next rank."""
        return [
            handle.get_buffer((self.rank + i) % self.size, shape, self.dtype)
            for i in range(1, self.size)
        ]

    def plan(self) -> Plan:
        """The plan of the operator."""
        return self.subject.explain(self.operands, self.group)

    def errors(self) -> tuple[float, float]:
        """Collective: call the operator twice; worst errors on this rank, against fp32 and the
        unfused path.

        Outputs are filled with NaN before; the second call has other data.
        """
        against_fp32, against_unfused = [], []
        for attempt in range(2):
            operands = self.operands if attempt == 0 else self._draw(4242)
            self.out.fill_(float("nan"))
            self.subject.call(operands, self.group, out=self.out)
            tw.synchronize(self.group)
            against_fp32.append(self.subject.error(operands, self.out))
            want = spec_of(self.case.op).reference(
                operands.x, operands.w, None, self.group, **self.subject.options
            )
            want = want[0] if isinstance(want, tuple) else want
            against_unfused.append(((self.out - want).float().norm() / want.float().norm()).item())
        return worst_of(against_fp32), worst_of(against_unfused)


class AllGatherMatmulRivals(Rivals):
    """The matmul is gathered input times weight; every rank pushes its shard to all others."""

    def makers(self) -> dict[str, Callable[[], Call | None]]:
        return {**super().makers(), TORCH: self.torch_fused}

    def input(self) -> torch.Tensor:
        return self.operands.rows

    def unfused(self) -> Call:
        x, group, out = self.operands.x, self.group, torch.empty_like(self.out)
        gathered, ws = torch.empty_like(self.operands.rows), cycle(self.weights)
        return lambda: reference.all_gather_matmul(x, next(ws), None, group, out, gathered)

    def torch_fused(self) -> Call | None:
        shard, _ = self.symmetric(*self.operands.x.shape)
        operator = self.torch_operator("fused_all_gather_matmul", TORCH)
        if operator is None:
            return None
        shard.copy_(self.operands.x)
        ws, name = cycle([w.t() for w in self.weights]), self.group.group_name
        # without the gathered input, as tileweave is called: returning it costs a copy of the own
        # shard, and excludes the path with multicast
        return lambda: operator(shard, [next(ws)], 0, name, return_A=False)

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = self.operands.x
        local, handle = self.symmetric(*self.operands.rows.shape)
        rows = slice(self.rank * x.shape[0], (self.rank + 1) * x.shape[0])
        return [(x, target[rows]) for target in self.others(handle, local.shape)]


class MatmulReduceScatterRivals(Rivals):
    """The matmul is the partial sum; every rank pushes to each other rank the rows that it owns."""

    def makers(self) -> dict[str, Callable[[], Call | None]]:
        return {**super().makers(), TORCH: self.torch_fused}

    def unfused(self) -> Call:
        x, group, out = self.operands.x, self.group, torch.empty_like(self.out)
        partial, ws = x.new_empty(x.shape[0], self.operands.w.shape[0]), cycle(self.weights)
        return lambda: reference.matmul_reduce_scatter(x, next(ws), None, group, out, partial)

    def torch_fused(self) -> Call | None:
        self.symmetric(1)  # the operator has its own workspace; this registers it
        operator = self.torch_operator("fused_matmul_reduce_scatter", TORCH)
        if operator is None:
            return None
        x, ws, name = self.operands.x, cycle([w.t() for w in self.weights]), self.group.group_name
        return lambda: operator(x, next(ws), "sum", 0, name)

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        local, handle = self.symmetric(self.size, *self.out.shape)
        return [(self.out, target[self.rank]) for target in self.others(handle, local.shape)]


class MatmulAllReduceRivals(Rivals):
    """The matmul is the partial sum; a rank sends at least as much as in a reduce-scatter and an
    all-gather.

    That is 2 (R - 1) / R of the result.
    """

    torchs = (ONE_SHOT, TWO_SHOT)

    def makers(self) -> dict[str, Callable[[], Call | None]]:
        return {**super().makers(), ONE_SHOT: self.one_shot, TWO_SHOT: self.two_shot}

    def unfused(self) -> Call:
        x, group, out = self.operands.x, self.group, torch.empty_like(self.out)
        ws = cycle(self.weights)
        return lambda: reference.matmul_all_reduce(x, next(ws), None, group, out=out)

    def one_shot(self) -> Call | None:
        return self._then("one_shot_all_reduce", ONE_SHOT)

    def two_shot(self) -> Call | None:
        return self._then("two_shot_all_reduce_", TWO_SHOT)

    def _then(self, name: str, rival: str) -> Call | None:
        """A matmul into symmetric memory, then torch's all-reduce ``name`` over it."""
        partial, _ = self.symmetric(*self.out.shape)
        operator = self.torch_operator(name, rival)
        if operator is None:
            return None
        x, ws, group = self.operands.x, cycle([w.t() for w in self.weights]), self.group.group_name
        try:
            operator(partial.zero_(), "sum", group)
        except NotImplementedError as error:  # float16 in torch 2.11
            self.missing[rival] = str(error)
            return None

        def call() -> None:
            torch.mm(x, next(ws), out=partial)
            operator(partial, "sum", group)

        return call

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        share = -(-2 * self.out.numel() // self.size)
        local, handle = self.symmetric(self.size, share)
        source = torch.empty(share, dtype=self.dtype, device=self.device)
        return [(source, target[self.rank]) for target in self.others(handle, local.shape)]


class ExchangeRivals(Rivals):
    """A matmul and one all-to-all, with the permutation of columns that torch's all-to-all needs.

    Before it, one matmul per rank writes columns in order; after it they are copied.
    """

    def input(self) -> torch.Tensor:
        return self.operands.x if self.case.op == "matmul_all_to_all" else self.operands.rows

    def unfused(self) -> Call:
        x, group, options = self.operands.x, self.group, self.subject.options
        out, ws = torch.empty_like(self.out), cycle(self.weights)
        how = Exchange(**options)
        if self.case.op == "matmul_all_to_all":
            of_part = how.part(x.shape[0], self.operands.w.shape[0], self.size)
            parts = x.new_empty(self.size, *of_part)
            return lambda: reference.matmul_all_to_all(
                x, next(ws), None, group, **options, out=out, parts=parts
            )
        got = x.new_empty(self.size, *how.part(x.shape[0], x.shape[1], self.size))
        exchanged = x.new_empty(how.result(x.shape[0], x.shape[1], self.size))
        return lambda: reference.all_to_all_matmul(
            x, next(ws), None, group, **options, out=out, exchanged=exchanged, got=got
        )

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = self.operands.x
        shape = (
            (x.shape[0], self.out.shape[1])
            if self.case.op == "matmul_all_to_all"
            else (self.out.shape[0], x.shape[1])
        )
        local, handle = self.symmetric(self.size, *shape)
        source = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return [(source, target[self.rank]) for target in self.others(handle, local.shape)]
