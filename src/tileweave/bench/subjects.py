"""How each operator is drawn, called and judged: what ``bench``, ``check`` and ``demo`` share.

Every rank draws the operands of all ranks from seeds, so what must come out is computed locally in fp32 and nothing
that is tested is part of the oracle. A new operator adds one entry to :data:`SUBJECTS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.embedding_subject import EmbeddingBagAllToAll
from tileweave.config import Plan
from tileweave.profile.record import Recording, record

# Largest ||got - want|| / ||want|| against fp32, by dtype of the operands.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's operands: ``rows`` of its shard, ``cols`` of its weight, K."""

    rows: int
    cols: int
    depth: int

    def __str__(self) -> str:
        return f"{self.rows}, {self.cols}, {self.depth}"


@dataclass(frozen=True)
class Operands:
    """What one rank passes, and ``everyone``: x of all ranks, in rank order."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    everyone: torch.Tensor

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.everyone.shape[0], self.w.shape[0]


class Subject(Protocol):
    """One operator, as the commands see it. ``rank`` and ``size`` are those of the group."""

    op: str

    def draw(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, rank: int, size: int, seed: int, bias: bool
    ) -> Operands:
        """Random operands of one rank, the same for the same seed."""
        ...

    def call(
        self, operands: Operands, group: dist.ProcessGroup, out: torch.Tensor | None = None, gathered: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The operator through its public function; the second tensor is what came along if it was asked for."""
        ...

    def explain(self, operands: Operands, group: dist.ProcessGroup) -> Plan:
        """The path that :meth:`call` takes."""
        ...

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        """One call with stamps on."""
        ...

    def error(self, operands: Operands, got: torch.Tensor) -> float:
        """``||got - want|| / ||want||`` against fp32; NaN if anything is NaN."""
        ...


class AllGatherMatmul:
    """x [m, K], w [n, K], bias [n]; every rank's rows times this rank's columns."""

    op = "all_gather_matmul"

    def draw(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, rank: int, size: int, seed: int, bias: bool
    ) -> Operands:
        shards = [normal((shape.rows, shape.depth), 1.0, dtype, device, seed, r, 0) for r in range(size)]
        w = normal((shape.cols, shape.depth), shape.depth**-0.5, dtype, device, seed, rank, 1)
        b = normal((shape.cols,), 1.0, dtype, device, seed, rank, 2) if bias else None
        return Operands(shards[rank].clone(), w, b, torch.cat(shards))

    def call(
        self, operands: Operands, group: dist.ProcessGroup, out: torch.Tensor | None = None, gathered: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, w, bias = operands.x, operands.w, operands.bias
        result = tw.all_gather_matmul(x, w, bias, group=group, return_gathered=gathered, out=out)
        return result if isinstance(result, tuple) else (result, None)

    def explain(self, operands: Operands, group: dist.ProcessGroup) -> Plan:
        return tw.explain(self.op, operands.x, operands.w, group=group)

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        return record(operands.x, operands.w, operands.bias, group=group)

    def error(self, operands: Operands, got: torch.Tensor) -> float:
        w = operands.w.float()
        difference = torch.zeros((), dtype=torch.float64, device=got.device)
        norm = difference.clone()
        for begin in range(0, got.shape[0], _CHUNK_ROWS):
            want = operands.everyone[begin : begin + _CHUNK_ROWS].float() @ w.t()
            if operands.bias is not None:
                want += operands.bias.float()
            norm += want.square().sum(dtype=torch.float64)
            difference += (got[begin : begin + _CHUNK_ROWS].float() - want).square().sum(dtype=torch.float64)
        return (difference / norm).sqrt().item()


SUBJECTS: dict[str, Any] = {subject.op: subject for subject in (AllGatherMatmul(), EmbeddingBagAllToAll())}


def normal(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device, *seed: int) -> torch.Tensor:
    """Normal numbers from a generator of their own (a failed graph capture spoils torch's default one)."""
    mixed = 0
    for part in seed:
        mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
    generator = torch.Generator(device).manual_seed(mixed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory full of NaN, so that what was not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def worst_of(values: Iterable[float]) -> float:
    """The largest; NaN counts as infinity."""
    return max(math.inf if math.isnan(value) else value for value in values)


def worst(value: float, device: torch.device, group: dist.ProcessGroup) -> float:
    """Collective: the largest ``value`` over ranks; NaN counts as infinity."""
    mine = torch.tensor([worst_of([value])], dtype=torch.float64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return mine.item()
