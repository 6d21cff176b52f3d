"""The rivals of matmul operators with FP8 operands: those of 16-bit ones, with ``torch._scaled_mm``
in place of a matmul, and the fused operators that torch has for scaled operands.

Operands are drawn in the dtype of the result and quantised; results are compared with fp32 of the
numbers that FP8 operands represent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

import tileweave as tw
from tileweave.bench.cases import Case
from tileweave.bench.rivals import (
    TORCH,
    AllGatherMatmulRivals,
    Call,
    MatmulAllReduceRivals,
    MatmulReduceScatterRivals,
    Rivals,
)
from tileweave.bench.subjects import Operands, worst_of
from tileweave.launcher import Member
from tileweave.ops import reference
from tileweave.ops.matmul.scaled import Scaled, ScaledProduct, as_sent
from tileweave.planning import choices
from tileweave.planning.problem import Plan

WEIGHTS = {"tensor": "tensor", "row": "row", "block": "tile"}  # kinds of x -> of w


def quantized(t: torch.Tensor, kind: str) -> Scaled:
    """t [rows, K] as FP8 operand; ``kind`` as ``tw.quantize`` has it."""
    return Scaled(*tw.quantize(t.contiguous(), kind), "block" if kind == "tile" else kind)


class ScaledRivals(Rivals):
    """What the operators share. ``x``: the operand of this rank; ``products``: by each weight."""

    def _draw(self, seed: int) -> Operands:
        """Operands whose ``rows`` and ``columns`` are what FP8 represents."""
        drawn, kind = super()._draw(seed), self.case.kind
        parts = self.size if drawn.rows.shape[1] > drawn.x.shape[1] else 1  # along K
        rows = [quantized(part, kind).value() for part in drawn.rows.chunk(parts, 1)]
        columns = [quantized(part, WEIGHTS[kind]).value() for part in drawn.columns.chunk(parts, 1)]
        return replace(drawn, rows=torch.cat(rows, 1), columns=torch.cat(columns, 1))

    def _weights(self) -> list[Any]:
        kind = self.case.kind
        self.x = quantized(self.operands.x, kind)
        self.parts = self.x.data, as_sent(self.x.scale, kind)
        kept = [quantized(w, WEIGHTS[kind]) for w in super()._weights()]
        fast = self.case.keeps_sums
        self.products = [ScaledProduct(w, None, kind, self.dtype, fast) for w in kept]
        return kept

    def ours(self) -> Call:
        operator: Any = getattr(tw, self.case.op)
        x, ws = self.x, cycle(self.weights)
        fixed = {"out_dtype": self.dtype, "group": self.group, "out": self.out}
        fixed["fast_accum"] = self.case.keeps_sums

        def call() -> object:
            w: Any = next(ws)
            return operator(x.data, w.data, x_scale=x.scale, w_scale=w.scale, **fixed)

        return call

    def plan(self) -> Plan:
        w, fast = self.weights[0], self.case.keeps_sums
        given = {"x_scale": self.x.scale, "w_scale": w.scale, "out_dtype": self.dtype}
        return tw.explain(
            self.case.op, self.x.data, w.data, group=self.group, fast_accum=fast, **given
        )

    def gemm(self) -> Call:
        products, parts, kind = cycle(self.products), self.parts, self.case.kind
        if self.operands.rows.shape[0] > parts[0].shape[0]:  # of an all-gather
            gathered = quantized(self.operands.rows, kind)
            parts = gathered.data, as_sent(gathered.scale, kind)
        out = self.out.new_empty(parts[0].shape[0], self.products[0].cols)
        return lambda: next(products)(parts, out)

    def errors(self) -> tuple[float, float]:
        against_fp32, against_unfused = [], []
        for attempt in range(2):
            if attempt:
                self.operands = self._draw(4242)
                self.weights = self._weights()
            self.out.fill_(float("nan"))
            self.ours()()  # a new function begins with the first weight
            tw.synchronize(self.group)
            got = self.out.clone()
            with choices.forced(self.case.op, None):
                self.ours()()
            tw.synchronize(self.group)
            against_fp32.append(self.subject.error(self.operands, got))
            difference = (got.float() - self.out.float()).norm() / self.out.float().norm()
            against_unfused.append(difference.item())
        return worst_of(against_fp32), worst_of(against_unfused)

    def torch_scaled(self, name: str) -> Any:
        """The operator of torch of this name, or None and a note."""
        self.symmetric(1)  # registers torch's operators, which have workspaces of their own
        if self.case.kind == "block":
            self.missing[TORCH] = "torch's fused operators take no scales of blocks"
            return None
        if self.operands.rows.shape[0] % (16 * self.size):
            self.missing[TORCH] = "shards are no multiples of 16 rows: cuBLAS may refuse them"
            return None
        return self.torch_operator(name, TORCH)

    def given_to_torch(self) -> list[tuple[torch.Tensor, ...]]:
        """Each weight, the scale of x and its own, as torch's fused operators take them."""
        if self.case.kind == "tensor":
            return [(w.data.t(), self.x.scale.view(()), w.scale.view(())) for w in self.weights]
        return [(w.data.t(), self.x.scale, w.scale.view(1, -1)) for w in self.weights]


class ScaledGatherRivals(ScaledRivals, AllGatherMatmulRivals):
    """FP8 data and scales are gathered."""

    def unfused(self) -> Call:
        parts, group, out = self.parts, self.group, torch.empty_like(self.out)
        products = cycle(self.products)
        return lambda: reference.all_gather_scaled_matmul(parts, next(products), group, out)

    def torch_fused(self) -> Call | None:
        operator = self.torch_scaled("fused_all_gather_scaled_matmul")
        if operator is None:
            return None
        given, name = cycle(self.given_to_torch()), self.group.group_name
        x, dtype, fast = self.x.data, self.dtype, self.case.keeps_sums

        def call() -> object:
            w, of_x, of_w = next(given)
            return operator(x, [w], of_x, [of_w], 0, name, [None], [None], [dtype], [fast])

        return call

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        data = self.x.data.view(self.dtype)  # half as many elements
        local, handle = self.symmetric(self.size * data.shape[0], data.shape[1])
        rows = slice(self.rank * data.shape[0], (self.rank + 1) * data.shape[0])
        return [(data, target[rows]) for target in self.others(handle, local.shape)]


class ScaledScatterRivals(ScaledRivals, MatmulReduceScatterRivals):
    """Partial sums have the dtype of the result."""

    def unfused(self) -> Call:
        parts, group, out = self.parts, self.group, torch.empty_like(self.out)
        products, run = cycle(self.products), reference.scaled_matmul_reduce_scatter
        return lambda: run(parts, next(products), None, group, out)

    def torch_fused(self) -> Call | None:
        operator = self.torch_scaled("fused_scaled_matmul_reduce_scatter")
        if operator is None:
            return None
        given, name = cycle(self.given_to_torch()), self.group.group_name
        x, dtype, fast = self.x.data, self.dtype, self.case.keeps_sums
        shape = [x.shape[0], self.products[0].cols]

        def call() -> object:
            w, of_x, of_w = next(given)
            more = {"out_dtype": dtype, "use_fast_accum": fast}
            return operator(x, w, of_x, of_w, "sum", 0, 0, name, shape, **more)

        return call


class ScaledReduceRivals(ScaledRivals, MatmulAllReduceRivals):
    """As of a reduce-scatter; torch has no fused operator."""

    torchs = ()

    def makers(self) -> dict[str, Callable[[], Call | None]]:
        return Rivals.makers(self)

    def unfused(self) -> Call:
        parts, group, out = self.parts, self.group, torch.empty_like(self.out)
        products, run = cycle(self.products), reference.scaled_matmul_all_reduce
        return lambda: run(parts, next(products), None, None, None, 0.0, group, out)


@dataclass(frozen=True)
class RivalsOf:
    """Makes the rivals of a case, by whether it has FP8 operands."""

    plain: type[Rivals]
    scaled: type[Rivals]

    @property
    def torchs(self) -> tuple[str, ...]:
        """Operators of torch among the rivals of any case."""
        return self.plain.torchs

    def __call__(self, case: Case, member: Member, names: tuple[str, ...], seed: int) -> Rivals:
        return (self.scaled if case.scales else self.plain)(case, member, names, seed)
