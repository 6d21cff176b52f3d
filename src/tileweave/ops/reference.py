"""Every operator unfused, in plain torch and torch.distributed: the specification, the oracle and the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tileweave.sharding import EmbeddingLayout, rows_of
from tileweave.transport.collectives import all_gather_flat, all_to_all_flat, reduce_scatter_flat


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order."""
    size = dist.get_world_size(group)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather_flat(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    if x.device.type == "cpu":  # gloo has no bf16 reduce-scatter on every release: sum in fp32
        total = x.float()
        dist.all_reduce(total, group=group)
        return total.view(size, *out.shape)[dist.get_rank(group)].to(x.dtype)
    reduce_scatter_flat(out, x.contiguous(), group=group)
    return out


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K], w [n, K], bias [n] -> (gather(x) @ w.T + bias [R * m, n], gather(x) [R * m, K])."""
    gathered = x if dist.get_world_size(group) == 1 else all_gather(x, group)
    return torch.nn.functional.linear(gathered, w, bias), gathered


def matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [M, k], w [N, k] -> rows of this rank of the sum over ranks of x @ w.T, [M / R, N]."""
    return reduce_scatter(x @ w.t(), group)


# --- Embeddings ---


def all_to_all(sends: list[torch.Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Flat ``sends[p]`` to rank p; what each rank sent here, flat, of ``sizes`` elements. Any dtype."""
    split = [t.numel() for t in sends]
    whole = torch.cat([t.reshape(-1) for t in sends])
    got = whole.new_empty(sum(sizes))
    if whole.dtype.itemsize == 2:  # as bytes, since gloo knows no halves
        sizes_in_bytes, split_in_bytes = [2 * n for n in sizes], [2 * n for n in split]
        all_to_all_flat(got.view(torch.uint8), whole.view(torch.uint8), sizes_in_bytes, split_in_bytes, group=group)
    else:
        all_to_all_flat(got, whole, sizes, split, group=group)
    return list(got.split(sizes))


def exchange_numbers(mine: tuple[int, ...], device: torch.device, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """A list of integers of each rank, by rank. Waits for the device."""
    where = device if dist.get_backend(group) != "gloo" else torch.device("cpu")
    counts = all_gather(torch.tensor([len(mine)], device=where), group).tolist()
    padded = torch.tensor([*mine, *[0] * (max(counts) - len(mine))], dtype=torch.int64, device=where)
    rows = all_gather(padded, group).view(len(counts), -1).tolist() if max(counts) else [[] for _ in counts]
    return [tuple(row[:count]) for row, count in zip(rows, counts, strict=True)]


def embedding_bag(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    batch: int,
    mean: bool,
) -> list[torch.Tensor]:
    """Each table's bags pooled in fp32, [B, D_t]; an index that is out of range counts as a row of zeros."""
    begins, found = offsets.long(), []
    for number, table in enumerate(tables):
        mine = begins[number * batch : (number + 1) * batch + 1]
        lengths = mine.diff()
        rows = indices[mine[0] : mine[-1]].long()
        bags = torch.repeat_interleave(torch.arange(batch, device=rows.device), lengths)
        there = (rows >= 0) & (rows < table.shape[0])
        vectors = table[rows[there]].float()
        if weights is not None:
            vectors = vectors * weights[mine[0] : mine[-1]][there].float()[:, None]
        pooled = vectors.new_zeros(batch, table.shape[1]).index_add_(0, bags[there], vectors)
        found.append(pooled / lengths.clamp(min=1)[:, None] if mean else pooled)
    return found


def embedding_bag_all_to_all(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    layout: EmbeddingLayout,
    batch: int,
    mean: bool,
    out_dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Lookup, all-to-all, and each block into its columns: [b, width]. ``group`` None: this rank alone."""
    pooled = [p.to(out_dtype) for p in embedding_bag(tables, indices, offsets, weights, batch, mean)]
    size, rank = len(layout.dims), 0 if group is None else dist.get_rank(group)
    rows = [rows_of(batch, size, peer) for peer in range(size)]
    begin, end = rows[rank]
    empty = torch.empty(0, dtype=out_dtype, device=indices.device)
    sends = [torch.cat([empty, *(p[b:e].reshape(-1) for p in pooled)]) for b, e in rows]
    sizes = [(end - begin) * sum(dims) for dims in layout.dims]
    blocks = sends if group is None else all_to_all(sends, sizes, group)
    y = torch.empty(end - begin, layout.width, dtype=out_dtype, device=indices.device)
    for block, columns, dims in zip(blocks, layout.columns, layout.dims, strict=True):
        parts = block.split([(end - begin) * dim for dim in dims]) if dims else ()
        for part, column, dim in zip(parts, columns, dims, strict=True):
            y[:, column : column + dim] = part.view(end - begin, dim)
    return y


def gradient_to_owners(
    grad: torch.Tensor, layout: EmbeddingLayout, batch: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[b, width] of each rank's samples -> [B, sum of own dims], the columns of this rank's tables for all samples."""
    size, rank = len(layout.dims), 0 if group is None else dist.get_rank(group)
    empty = grad.new_empty(grad.shape[0], 0)
    sends = [
        torch.cat([empty, *(grad[:, c : c + d] for c, d in zip(cs, ds, strict=True))], 1)
        for cs, ds in zip(layout.columns, layout.dims, strict=True)
    ]
    width = sum(layout.dims[rank])
    if group is None:
        return sends[0].contiguous()
    sizes = [(e - b) * width for b, e in (rows_of(batch, size, peer) for peer in range(size))]
    return torch.cat(all_to_all(sends, sizes, group)).view(batch, width)
