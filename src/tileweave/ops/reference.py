"""Every operator unfused, in plain torch and torch.distributed: the specification, the oracle and the baseline.

Rounding of sums over ranks. Partials travel in x's dtype on every path, so each is rounded to it before it is added; a partial
of fp16 above 65504 becomes infinite even where the sum would not be. Fused kernels add in fp32 in a fixed order, bias and
residual with them, and round once more; the own partial they do not round where the sum is made in the epilogue of a matmul
of ours. Here the own one is rounded, too, when its matmul stores it; then the CPU adds in fp32 in rank order and rounds once
more, and NCCL adds in an order and with roundings of its own. The bias enters one partial, in fp32, before that is rounded; a
residual is added to the rounded sum, and the result rounded again. A table: ``docs/decisions/0051``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch.nn.functional import linear, rms_norm, silu

from tileweave.errors import RankMismatchError
from tileweave.ops.routing_plan import RoutingPlan
from tileweave.schedule_scatter import Exchange
from tileweave.sharding import EmbeddingLayout, rows_of
from tileweave.transport.collectives import agree, all_gather_flat, all_to_all_flat, reduce_scatter_flat


def in_line(x: torch.Tensor) -> None:
    """Put the collective that follows in the line of our launches on x's device.

    NCCL's kernels wait for peers and need multiprocessors, as ours do: side by side, in different orders on different ranks,
    they would wait for each other for ever.
    """
    if x.is_cuda:
        from tileweave.transport.cuda import enter_line

        enter_line(x.device)


def out_of_line(x: torch.Tensor) -> None:
    """What follows on this stream waits for no peer, so a collective or launch of ours on another stream may run beside it."""
    if x.is_cuda:
        from tileweave.transport.cuda import leave_line

        leave_line(x.device)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order."""
    gathered, work = begin_all_gather(x, group)
    if work is not None:
        work.wait()
    return gathered


def begin_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`all_gather`, beside what is queued next: the result, and what to wait for."""
    in_line(x)
    x, gathered = x.contiguous(), x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    if x.device.type == "cpu":  # last, so that who has no memory leaves nobody in the collective
        agree(f"a gather of {tuple(x.shape)} {x.dtype}", group)  # gloo ends the process where sizes differ
    return gathered, all_gather_flat(gathered, x, group=group, async_op=True)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks, in ``out`` if given."""
    y, work = begin_reduce_scatter(x, group, out)
    if work is not None:
        work.wait()
    return y


def begin_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`reduce_scatter`, beside what is queued next where there is a GPU: the result, and what to wait for."""
    size = dist.get_world_size(group)
    if size == 1 or x.device.type == "cpu":
        rows = x.shape[0] // size
        own = slice(dist.get_rank(group) * rows, (dist.get_rank(group) + 1) * rows)
        y = x if size == 1 else _sum_of_all(x, group, own)
        return y if out is None else out.copy_(y), None
    in_line(x)
    if out is None:
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return out, reduce_scatter_flat(out, x.contiguous(), group=group, async_op=True)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, on every rank; x may be overwritten."""
    if dist.get_world_size(group) == 1:
        return x
    if x.device.type == "cpu":
        return _sum_of_all(x, group, slice(None))
    in_line(x)
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    out_of_line(x)
    return x


def _sum_of_all(x: torch.Tensor, group: dist.ProcessGroup, rows: slice) -> torch.Tensor:
    """These rows of the sum over ranks, in fp32 (fp64 stays) and in rank order: gloo's own way differs between releases."""
    everyone = all_gather(x, group).view(dist.get_world_size(group), *x.shape)[:, rows]
    total = everyone[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in everyone[1:]:
        total = total + part
    return total.to(x.dtype)


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K], w [n, K], bias [n] -> (gather(x) @ w.T + bias [R * m, n], gather(x) [R * m, K])."""
    gathered = x if dist.get_world_size(group) == 1 else all_gather(x, group)
    return linear(gathered, w, bias), gathered


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, k], w [N, k], bias [N] -> this rank's rows of the sum over ranks of x @ w.T, plus bias: [M / R, N], or ``out``."""
    return reduce_scatter(_partial(x, w, bias, group), group, out)


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [M, k], w [N, k], bias [N], residual [M, N], norm_weight [N] -> (y or its norm, y), [M, N] on every rank.

    y is the sum over ranks of x @ w.T, plus bias, plus residual; its norm is RMSNorm(y) * norm_weight of y as rounded.
    Without ``norm_weight`` the second is None.
    """
    y = all_reduce(_partial(x, w, bias, group), group)
    if residual is not None:
        y = y + residual
    if norm_weight is None:
        return y, None
    return rms_norm(y, (y.shape[-1],), norm_weight, norm_eps), y


def _partial(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum; rank 0's has the bias, so that it is added once."""
    return linear(x, w, bias if dist.get_rank(group) == 0 else None)


# --- Exchanges ---


def exchange(x: torch.Tensor, how: Exchange, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of [rows, cols]: part p along ``scatter_dim`` to rank p; what came stands along ``gather_dim``, by rank."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    rows, cols = how.part(x.shape[0], x.shape[1], size)
    parts = x if how.scatter_dim == 0 else x.view(rows, size, cols).transpose(0, 1)
    counts = [rows * cols] * size
    got = all_to_all_whole(parts.reshape(-1), counts, counts, group).view(size, rows, cols)
    y = x.new_empty(size * rows, cols) if how.gather_dim == 0 else x.new_empty(rows, size * cols)
    # a tensor of its own: autograd refuses to let a view that an operator returns be changed
    y.view(size, rows, cols).copy_(got) if how.gather_dim == 0 else y.view(rows, size, cols).copy_(got.transpose(0, 1))
    return y


def matmul_all_to_all(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int
) -> torch.Tensor:
    """x [M, K], w [N, K], bias [N] -> the exchanged x @ w.T + bias."""
    return exchange(linear(x, w, bias), Exchange(scatter_dim, gather_dim), group)


def all_to_all_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], w, bias -> (exchanged x @ w.T + bias, the exchanged x)."""
    exchanged = exchange(x, Exchange(scatter_dim, gather_dim), group)
    return linear(exchanged, w, bias), exchanged


# --- Embeddings ---


def all_to_all(sends: list[torch.Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Flat ``sends[p]`` to rank p; what each rank sent here, flat, of ``sizes`` elements. Any dtype."""
    whole = torch.cat([t.reshape(-1) for t in sends])
    return list(all_to_all_whole(whole, [t.numel() for t in sends], sizes, group).split(sizes))


def all_to_all_whole(whole: torch.Tensor, split: list[int], sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """:func:`all_to_all` of pieces that stand one behind the other, flat; so does what comes back."""
    in_line(whole)
    got = whole.new_empty(sum(sizes))
    if whole.device.type == "cpu":
        agree(f"an all-to-all of {whole.dtype}", group)
        _agree_on_parts(split, sizes, group)
    if whole.dtype.itemsize == 2:  # as bytes, since gloo knows no halves
        sizes_in_bytes, split_in_bytes = [2 * n for n in sizes], [2 * n for n in split]
        all_to_all_flat(got.view(torch.uint8), whole.view(torch.uint8), sizes_in_bytes, split_in_bytes, group=group)
    else:
        all_to_all_flat(got, whole, sizes, split, group=group)
    out_of_line(whole)
    return got


def _agree_on_parts(split: list[int], sizes: list[int], group: dist.ProcessGroup) -> None:
    """Raise the same error on every rank if one sends another what that does not expect: gloo would end the process."""
    told = all_gather(torch.tensor([split, sizes], device="cpu"), group).view(len(split), 2, len(split)).tolist()
    for sender, receiver in product(range(len(split)), repeat=2):
        sent, expected = told[sender][0][receiver], told[receiver][1][sender]
        if sent != expected:
            raise RankMismatchError(
                f"asked: rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}; allowed: the same "
                "operator and sizes that fit on every rank; remedy: look at what these ranks pass"
            )


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


# --- Experts. No host sync where torch._grouped_mm takes the operands, so that a graph may capture it; sizes are bounds. ---


def grouped_matmul(rows: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows [n, K], experts [E, N, K], offsets [E + 1] -> [n, N]: each expert's rows times its weight; others undefined."""
    if _has_grouped_kernel(rows, experts):
        return torch._grouped_mm(rows, experts.transpose(1, 2), offs=offsets[1:])
    out = rows.new_zeros(rows.shape[0], experts.shape[1])
    ends = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        torch.mm(rows[begin:end], experts[expert].t(), out=out[begin:end])
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """left [n, N], right [n, K] -> [E, N, K]: left.T @ right over each expert's rows; zero where it has none."""
    if _has_grouped_kernel(left, right):
        return torch._grouped_mm(left.t(), right, offs=offsets[1:])
    ends = offsets.tolist()
    products = [left[b:e].t() @ right[b:e] for b, e in pairwise(ends)]
    return torch.stack(products)


def _has_grouped_kernel(*operands: torch.Tensor) -> bool:
    """bf16 on a GPU, with rows of whole 16 bytes; elsewhere a loop over experts, which waits for the device."""
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 and t.numel() > 0
        and all(stride * 2 % 16 == 0 for stride in t.stride() if stride != 1)
        for t in operands
    )  # fmt: skip


def gather_rows(x: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """x [T, H] of own tokens -> [bound, H]: the token of each row of this rank's experts; undefined past the last."""
    padded = x
    if plan.tokens < plan.max_tokens:
        padded = x.new_zeros(plan.max_tokens, *x.shape[1:])
        padded[: plan.tokens] = x
    everyone = padded if plan.world_size == 1 else all_gather(padded, group)
    entry = plan.row_entry.long().clamp(0, max(plan.entries - 1, 0))
    return everyone[torch.div(entry, max(plan.topk, 1), rounding_mode="floor")]


def gather_weights(weights: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """topk_weights [T, k] of own tokens -> fp32 [R * max_tokens * k], of all entries; 0 past a rank's tokens."""
    padded = weights.float()
    if plan.tokens < plan.max_tokens:
        padded = weights.new_zeros(plan.max_tokens, plan.topk, dtype=torch.float32)
        padded[: plan.tokens] = weights
    return (padded if plan.world_size == 1 else all_gather(padded, group)).reshape(-1)


def grouped_matmul_combine(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Grouped matmul, weighted sums per rank in fp32 in order of j, rounded, and their sum over ranks: z [T, H].

    Every rank sends a partial for every token, zeros too: the size is known without asking the device.
    """
    products = grouped_matmul(y, experts, plan.offsets)
    rows = plan.entry_row.view(-1, plan.topk)
    everyone = None if weights is None else gather_weights(weights, plan, group).view(-1, plan.topk)
    partial = torch.zeros(rows.shape[0], experts.shape[1], dtype=torch.float32, device=y.device)
    for j in range(plan.topk):
        here = (rows[:, j] >= 0)[:, None]
        value = products[rows[:, j].clamp(min=0).long()].float()
        value = value if everyone is None else value * everyone[:, j, None]
        partial += torch.where(here, value, 0.0)  # last: what has no expert counts for nothing, whatever its weight
    return reduce_scatter(partial.to(y.dtype), group)[: plan.tokens].clone()


def dispatch_grouped_matmul(
    x: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """x [T, K] -> y [bound, N]: the token of each row of this rank's experts times its expert's weight."""
    return grouped_matmul(gather_rows(x, plan, group), experts, plan.offsets)


def swiglu(y: torch.Tensor) -> torch.Tensor:
    """[n, 2 I], rows [gate, up] -> silu(gate) * up [n, I], in fp32, rounded once."""
    gate, up = y.float().chunk(2, -1)
    return (silu(gate) * up).to(y.dtype)


def swiglu_gradient(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`swiglu`'s result [n, I] -> of y [n, 2 I]; written out, since below autograd nothing is recorded."""
    gate, up = y.float().chunk(2, -1)
    share, grad = gate.sigmoid(), grad.float()
    return torch.cat([grad * up * share * (1 + gate * (1 - share)), grad * gate * share], -1).to(y.dtype)
