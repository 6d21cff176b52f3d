"""Operands, calls and checks of embedding_bag_all_to_all for ``check`` and ``demo``; see
``subjects.Subject``.

A shape is (samples per rank, tables per rank, columns per table). Lengths of bags depend on the
shape only, and some are empty, so that a captured call can be replayed with other tables and
indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.ops import reference
from tileweave.planning.problem import Plan
from tileweave.planning.sharding import EmbeddingLayout, rows_of
from tileweave.profile.record import Recording

if TYPE_CHECKING:
    from tileweave.bench.subjects import Shape

_ROWS = 97


@dataclass(frozen=True)
class EmbeddingOperands:
    """``x`` [T, rows, D] tables, ``w`` [N] indices, ``bias`` [N] per-sample weights.

    ``others``: those of all ranks.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    offsets: torch.Tensor
    others: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    rank: int

    @property
    def batch(self) -> int:
        return (self.offsets.numel() - 1) // self.x.shape[0]

    @property
    def out_shape(self) -> tuple[int, int]:
        begin, end = rows_of(self.batch, len(self.others), self.rank)
        return end - begin, len(self.others) * self.x.shape[0] * self.x.shape[2]


class EmbeddingBagAllToAll:
    op = "embedding_bag_all_to_all"

    def draw(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        size: int,
        seed: int,
        bias: bool,
    ) -> EmbeddingOperands:
        lengths = torch.arange(shape.cols * shape.rows * size, device=device) * 7 % 5
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        total = int(offsets[-1])
        everyone = []
        for source in range(size):
            generator = torch.Generator(device).manual_seed(1_000_003 * seed + source)
            tables = torch.randn(
                shape.cols, _ROWS, shape.depth, generator=generator, device=device
            ).to(dtype)
            indices = torch.randint(0, _ROWS, (total,), generator=generator, device=device)
            weights = torch.randn(total, generator=generator, device=device) if bias else None
            everyone.append((tables, indices, weights))
        x, w, b = everyone[rank]
        return EmbeddingOperands(x.clone(), w.clone(), b, offsets, everyone, rank)

    def call(
        self,
        operands: EmbeddingOperands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, None]:
        tables = list(operands.x.unbind(0))
        layout = EmbeddingLayout.in_rank_order(
            [[operands.x.shape[2]] * len(tables)] * len(operands.others)
        )
        with torch.no_grad():
            y = tw.embedding_bag_all_to_all(
                tables,
                operands.w,
                operands.offsets,
                per_sample_weights=operands.bias,
                layout=layout,
                group=group,
                out=out,
            )
        return y, None

    def explain(self, operands: EmbeddingOperands, group: dist.ProcessGroup) -> Plan:
        return tw.explain(
            self.op, list(operands.x.unbind(0)), operands.w, operands.offsets, group=group
        )

    def record(self, operands: EmbeddingOperands, group: dist.ProcessGroup) -> Recording:
        """Record what was sent, and two signals per peer: the kernel has no stamps."""
        size, (rows, width) = dist.get_world_size(group), operands.out_shape
        sent = (operands.batch - rows) * (width // size) * operands.x.element_size()
        return Recording(
            self.explain(operands, group), self.call(operands, group)[0], [], sent, 2 * (size - 1)
        )

    def error(self, operands: EmbeddingOperands, got: torch.Tensor, second: object = None) -> float:
        begin, end = rows_of(operands.batch, len(operands.others), operands.rank)
        blocks = []
        for tables, indices, weights in operands.others:
            blocks += reference.embedding_bag(
                tables.unbind(0), indices, operands.offsets, weights, operands.batch, False
            )
        want = torch.cat(blocks, 1)[begin:end]
        # a rank may own empty bags only
        return float((got.float() - want).norm() / want.norm().clamp(min=1e-30))
