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
from torch.nn.functional import embedding_bag

import tileweave as tw
from tileweave.bench.subjects import copied, recorded, wide
from tileweave.planning.problem import Plan
from tileweave.planning.sharding import EmbeddingLayout, rows_of
from tileweave.profile.record import Recording

if TYPE_CHECKING:
    from tileweave.bench.subjects import Draw, Shape

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

    def to(self, device: torch.device) -> EmbeddingOperands:
        """A copy on ``device``."""
        x, w, bias, offsets = copied((self.x, self.w, self.bias, self.offsets), device)
        others = [tuple(copied(each, device)) for each in self.others]
        return EmbeddingOperands(x, w, bias, offsets, others, self.rank)


class EmbeddingBagAllToAll:
    op = "embedding_bag_all_to_all"

    def draw(self, shape: Shape, draw: Draw) -> EmbeddingOperands:
        device = draw.device
        lengths = torch.arange(shape.cols * shape.rows * draw.size, device=device) * 7 % 5
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        total = int(offsets[-1])
        everyone = []
        for source in draw.ranks:
            generator = torch.Generator(device).manual_seed(1_000_003 * draw.seed + source)
            tables = torch.randn(
                shape.cols, _ROWS, shape.depth, generator=generator, device=device
            ).to(draw.dtype)
            indices = torch.randint(0, _ROWS, (total,), generator=generator, device=device)
            weights = torch.randn(total, generator=generator, device=device) if draw.bias else None
            everyone.append((tables, indices, weights))
        x, w, b = everyone[draw.rank]
        return EmbeddingOperands(x.clone(), w.clone(), b, offsets, everyone, draw.rank)

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
        size, (rows, width) = dist.get_world_size(group), operands.out_shape
        sent = (operands.batch - rows) * (width // size) * operands.x.element_size()
        return recorded(self, operands, group, sent)

    def error(self, operands: EmbeddingOperands, got: torch.Tensor, second: object = None) -> float:
        begin, end = rows_of(operands.batch, len(operands.others), operands.rank)
        blocks, batch = [], operands.batch
        for tables, indices, weights in operands.others:
            for number, table in enumerate(tables.unbind(0)):
                bags = operands.offsets[number * batch : (number + 1) * batch + 1]
                mine = slice(int(bags[0]), int(bags[-1]))
                blocks.append(
                    embedding_bag(
                        indices[mine],
                        wide(table),
                        bags - bags[0],
                        mode="sum",
                        per_sample_weights=None if weights is None else wide(weights[mine]),
                        include_last_offset=True,
                    )
                )
        want = torch.cat(blocks, 1)[begin:end]
        # a rank may own empty bags only
        return float((wide(got) - want).norm() / want.norm().clamp(min=1e-30))
