"""Operands, calls and checks of each operator, which ``bench``, ``check`` and ``demo`` share.

Every rank generates the operands of all ranks from seeds, so the expected result is computed
locally in fp32, without code that is tested. ``bench/samples`` maps operators to subjects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.planning.problem import Plan
from tileweave.profile.record import Recording, record, record_call, start_record

# Largest ||got - want|| / ||want|| against fp32, by dtype of the operands.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_CHUNK_ROWS = 2048
_EPS = 1e-6
Second = torch.Tensor | None


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank: ``rows`` of its shard (all, if rows are not sharded), ``cols`` and K of
    its weight."""

    rows: int
    cols: int
    depth: int

    def __str__(self) -> str:
        return f"{self.rows}, {self.cols}, {self.depth}"


@dataclass(frozen=True)
class Operands:
    """What one rank passes. Its result is ``rows @ columns.T`` plus bias, with operands of all
    ranks."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    rows: torch.Tensor
    columns: torch.Tensor
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.columns.shape[0]

    @property
    def out_bytes(self) -> int:
        return self.out_shape[0] * self.out_shape[1] * self.x.element_size()

    def to(self, device: torch.device) -> Operands:
        """A copy on ``device``."""
        return Operands(*copied([getattr(self, f.name) for f in fields(self)], device))


@dataclass(frozen=True)
class Draw:
    """What random operands depend on besides their shape: dtype and device, this rank and the
    number of ranks of the group, the seed, and whether there is a bias."""

    dtype: torch.dtype
    device: torch.device
    rank: int
    size: int
    seed: int
    bias: bool = False

    @property
    def ranks(self) -> range:
        return range(self.size)

    def normal(self, shape: tuple[int, ...], scale: float, *stream: int) -> torch.Tensor:
        """Normal numbers, the same for the same seed and stream."""
        return normal(shape, scale, self.dtype, self.device, self.seed, *stream)

    def biases(self, count: int, *stream: int) -> torch.Tensor | None:
        """A bias of ``count`` elements, or None if none is asked for."""
        return self.normal((count,), 1.0, *stream) if self.bias else None


class Subject(Protocol):
    """One operator for the commands."""

    op: str

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        """Random operands of one rank, the same for the same seed."""
        ...

    def call(
        self,
        operands: Operands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, Second]:
        """Call the operator through its public function; with ``second``, for its second result
        too."""
        ...

    def explain(self, operands: Operands, group: dist.ProcessGroup) -> Plan:
        """The plan of :meth:`call`."""
        ...

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        """One recorded call."""
        ...

    def error(self, operands: Operands, got: torch.Tensor, second: Second = None) -> float:
        """``||got - want|| / ||want||`` against fp32 (fp64 on the CPU), the larger of both
        results; NaN if a value is NaN."""
        ...


def recorded(subject: Any, operands: Any, group: dist.ProcessGroup, sent: int) -> Recording:
    """Record a call of ``subject``, in which this rank sends ``sent`` bytes."""
    return record_call(
        lambda: subject.call(operands, group)[0],
        subject.explain(operands, group),
        operands.x.device,
        sent,
        group,
    )


class _Matmul:
    """What the matmul operators share."""

    op: str
    options: ClassVar[dict[str, int]] = {}  # keyword arguments of a call besides operands

    def call(
        self,
        operands: Operands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, Second]:
        o = operands
        return getattr(tw, self.op)(o.x, o.w, o.bias, group=group, out=out, **self.options), None

    def explain(self, operands: Operands, group: dist.ProcessGroup) -> Plan:
        return tw.explain(self.op, operands.x, operands.w, group=group, **self.options)

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        return recorded(self, operands, group, self._sent(operands, dist.get_world_size(group)))

    def _sent(self, operands: Operands, size: int) -> int:
        """Bytes that one of ``size`` ranks sends."""
        return (size - 1) * operands.out_bytes // size

    def error(self, operands: Operands, got: torch.Tensor, second: Second = None) -> float:
        columns = wide(operands.columns)
        difference = torch.zeros((), dtype=torch.float64, device=got.device)
        norm = difference.clone()
        for begin in range(0, got.shape[0], _CHUNK_ROWS):
            part = slice(begin, begin + _CHUNK_ROWS)
            want = wide(operands.rows[part]) @ columns.t()
            if operands.bias is not None:
                want += wide(operands.bias)
            norm += want.square().sum(dtype=torch.float64)
            difference += (wide(got[part]) - want).square().sum(dtype=torch.float64)
        return (difference / norm).sqrt().item()


class AllGatherMatmul(_Matmul):
    """x [m, K], w [n, K], bias [n]; rows of all ranks times this rank's columns.

    Second result: the gathered input.
    """

    op = "all_gather_matmul"

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        shards = [draw.normal((shape.rows, shape.depth), 1.0, r, 0) for r in draw.ranks]
        w = draw.normal((shape.cols, shape.depth), shape.depth**-0.5, draw.rank, 1)
        bias = draw.biases(shape.cols, draw.rank, 2)
        return Operands(shards[draw.rank].clone(), w, bias, torch.cat(shards), w)

    def call(
        self,
        operands: Operands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, Second]:
        x, w, bias = operands.x, operands.w, operands.bias
        result = tw.all_gather_matmul(x, w, bias, group=group, return_gathered=second, out=out)
        return result if isinstance(result, tuple) else (result, None)

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        return record(operands.x, operands.w, operands.bias, group=group)

    def start(self, operands: Operands, group: dist.ProcessGroup) -> Callable[[], Recording]:
        """Queue :meth:`record` without a wait for the device; the function that it returns waits.
        Only operators whose kernel stamps its tiles have this method."""
        return start_record(operands.x, operands.w, operands.bias, group=group)

    def error(self, operands: Operands, got: torch.Tensor, second: Second = None) -> float:
        if second is not None and not torch.equal(second, operands.rows):
            return math.inf
        return super().error(operands, got)


def _draw_sum(
    shape: Shape, rows: int, mine: slice, draw: Draw
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """x [rows, k], w [N, k] and bias [N] of this rank; and of all ranks, concatenated along K, rows
    ``mine`` of x and w."""
    scale = (shape.depth * draw.size) ** -0.5
    xs = [draw.normal((rows, shape.depth), 1.0, r, 0) for r in draw.ranks]
    ws = [draw.normal((shape.cols, shape.depth), scale, r, 1) for r in draw.ranks]
    parts = torch.cat([x[mine] for x in xs], 1)
    return xs[draw.rank], ws[draw.rank], draw.biases(shape.cols, 2), parts, torch.cat(ws, 1)


class MatmulReduceScatter(_Matmul):
    """x [M, k], w [N, k], bias [N]; this rank's rows of the sum over ranks."""

    op = "matmul_reduce_scatter"

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        mine = slice(draw.rank * shape.rows, (draw.rank + 1) * shape.rows)
        return Operands(*_draw_sum(shape, shape.rows * draw.size, mine, draw))

    def _sent(self, operands: Operands, size: int) -> int:
        return (size - 1) * operands.out_bytes


class MatmulAllReduce(_Matmul):
    """x [M, k], w [N, k], bias [N]; the sum over ranks on every rank.

    Second result: with residual and norm, the sum before the norm.
    """

    op = "matmul_all_reduce"

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        return Operands(
            *_draw_sum(shape, shape.rows, slice(None), draw),
            residual=draw.normal((shape.rows, shape.cols), 1.0, 3),
            norm_weight=draw.normal((shape.cols,), 1.0, 4),
        )

    def call(
        self,
        operands: Operands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, Second]:
        o = operands
        if not second:
            y = tw.matmul_all_reduce(o.x, o.w, o.bias, group=group, out=out)
            assert isinstance(y, torch.Tensor), "without a norm there is one result"
            return y, None
        y, kept = tw.matmul_all_reduce(
            o.x,
            o.w,
            o.bias,
            residual=o.residual,
            norm_weight=o.norm_weight,
            norm_eps=_EPS,
            group=group,
            out=out,
            residual_out=None if out is None else poisoned(o.out_shape, o.x.dtype, o.x.device),
        )
        return y, kept

    def _sent(self, operands: Operands, size: int) -> int:
        # the least that an all-reduce can send: a reduce-scatter and an all-gather
        return 2 * (size - 1) * operands.out_bytes // size

    def error(self, operands: Operands, got: torch.Tensor, second: Second = None) -> float:
        if second is None:
            return super().error(operands, got)
        assert operands.residual is not None and operands.norm_weight is not None, (
            "draw() makes both"
        )
        want = wide(operands.rows) @ wide(operands.columns).t() + wide(operands.residual)
        if operands.bias is not None:
            want += wide(operands.bias)
        normed = (
            want
            * torch.rsqrt(want.square().mean(-1, keepdim=True) + _EPS)
            * wide(operands.norm_weight)
        )
        pairs = ((got, normed), (second, want))
        return worst_of([((wide(a) - b).norm() / b.norm()).item() for a, b in pairs])


class MatmulAllToAll(_Matmul):
    """QKV of Ulysses-style sequence parallelism; each rank has the whole weight.

    x [m, K] of this rank's tokens, w [R * n, K]; n columns of this rank, for all tokens.
    """

    op = "matmul_all_to_all"
    options: ClassVar = {"scatter_dim": 1, "gather_dim": 0}

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        cols = shape.cols * draw.size
        shards = [draw.normal((shape.rows, shape.depth), 1.0, r, 0) for r in draw.ranks]
        w = draw.normal((cols, shape.depth), shape.depth**-0.5, 1)
        mine = w[draw.rank * shape.cols : (draw.rank + 1) * shape.cols]
        x = shards[draw.rank].clone()
        return Operands(x, w, draw.biases(cols, 2), torch.cat(shards), mine)

    def error(self, operands: Operands, got: torch.Tensor, second: Second = None) -> float:
        bias, mine = operands.bias, operands.columns
        if bias is not None:
            first = int(mine.storage_offset() - operands.w.storage_offset()) // max(
                mine.shape[1], 1
            )
            bias = bias[first : first + mine.shape[0]]
        return super().error(replace(operands, bias=bias), got)


class AllToAllMatmul(_Matmul):
    """Output projection of Ulysses-style sequence parallelism; each rank has the whole weight.

    x [R * m, k], all tokens and this rank's heads, w [N, R * k] -> [m, N].
    """

    op = "all_to_all_matmul"
    options: ClassVar = {"scatter_dim": 0, "gather_dim": 1}

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        depth = shape.depth * draw.size
        xs = [draw.normal((shape.rows * draw.size, shape.depth), 1.0, r, 0) for r in draw.ranks]
        w = draw.normal((shape.cols, depth), depth**-0.5, 1)
        mine = slice(draw.rank * shape.rows, (draw.rank + 1) * shape.rows)
        rows = torch.cat([x[mine] for x in xs], 1)
        return Operands(xs[draw.rank].clone(), w, draw.biases(shape.cols, 2), rows, w)

    def _sent(self, operands: Operands, size: int) -> int:
        return (size - 1) * operands.x.nbytes // size


def copied(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[Any]:
    """Copies of tensors on ``device``."""
    return [None if t is None else t.to(device, copy=True) for t in tensors]


def wide(t: torch.Tensor) -> torch.Tensor:
    """``t`` in the precision of expected results: fp64 on the CPU, fp32 on a device."""
    return t.double() if t.is_cpu else t.float()


def normal(
    shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device, *seed: int
) -> torch.Tensor:
    """Normal numbers from a separate generator: a failed graph capture breaks the default one."""
    mixed = 0
    for part in seed:
        mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
    generator = torch.Generator(device).manual_seed(mixed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory filled with NaN, so that elements that were not written are found."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def worst_of(values: Iterable[float]) -> float:
    """The largest value; NaN counts as infinity."""
    return max(math.inf if math.isnan(value) else value for value in values)


def worst(value: float, device: torch.device, group: dist.ProcessGroup) -> float:
    """Collective: the largest ``value`` over ranks; NaN counts as infinity."""
    mine = torch.tensor([worst_of([value])], dtype=torch.float64, device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return mine.item()
