"""Every operator unfused, in plain torch and torch.distributed: specification, oracle and baseline.

Compositions of a matmul are also what operators run where no fused kernel is faster, and what the
benchmarks compare with. So they are the fastest ones known: results go directly into memory of the
caller (``out``), and so does what is in between if the caller has memory for it.

Rounding of sums over ranks. Partial sums are sent in the dtype of x on every path, so each is
rounded to it before it is added; a partial sum of float16 above 65504 becomes infinite even if the
sum would not be. Fused kernels add in float32 in a fixed order, with bias and residual, and round
once more. They do not round this rank's own partial sum if the sum is computed in the epilogue of a
fused matmul.

Here the own partial sum is rounded too, when its matmul stores it. Then the CPU adds in float32 in
rank order and rounds once more, and NCCL adds in its own order with its own roundings. The bias is
added to one partial sum, in float32, before that is rounded; a residual is added to the rounded
sum, and the result is rounded again. Decision 0019 has a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, silu

from tileweave.errors import require
from tileweave.ops.core import collectives
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.scaled import ScaledExperts, ScaledRows
from tileweave.ops.matmul.products import multiply
from tileweave.ops.matmul.scaled import ScaledProduct
from tileweave.planning.schedules.scatter import Exchange
from tileweave.planning.sharding import EmbeddingLayout, rows_of

LARGE_BYTES = 1 << 21  # of a copy for which other views save more device time than host time


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K], w [n, K], bias [n] -> (gather(x) @ w.T + bias [R * m, n], gather(x) [R * m, K]).

    ``out`` and ``gathered`` get the results, if given.
    """
    gathered = x if group.size() == 1 else collectives.all_gather(x, group, gathered)
    return multiply(gathered, w, bias, out), gathered


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, k], w [N, k], bias [N] -> this rank's rows of the sum over ranks of x @ w.T, plus bias.

    [M / R, N], in ``out`` if given. ``partial``: memory for a partial sum.
    """
    return collectives.reduce_scatter(_partial(x, w, bias, group, partial), group, out)


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [M, k], w [N, k], bias [N], residual [M, N], norm_weight [N] -> (y or its norm, y), both
    [M, N].

    On every rank, y is the sum over ranks of x @ w.T, plus bias, plus residual; its norm is
    RMSNorm(y) * norm_weight, of the rounded y. Without ``norm_weight`` the second is None. ``out``
    and ``residual_out`` get the results, if given.
    """
    to = out if norm_weight is None else residual_out
    partial = _partial(x, w, bias, group, to)
    return _added(partial, residual, norm_weight, norm_eps, group, out, residual_out)


def _added(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    group: dist.ProcessGroup,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum over ranks of a partial sum, plus residual, and its norm; see
    :func:`matmul_all_reduce`."""
    to = out if norm_weight is None else residual_out
    y = collectives.all_reduce(partial, group)
    if residual is not None:
        y = torch.add(y, residual, out=to)
    if to is not None and y is not to:
        y = to.copy_(y)
    if norm_weight is None:
        return y, None
    normed = rms_norm(y, (y.shape[-1],), norm_weight, norm_eps)
    return normed if out is None else out.copy_(normed), y


def _partial(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """This rank's partial sum; that of rank 0 includes the bias, so that it is added once."""
    return multiply(x, w, bias if bias is not None and group.rank() == 0 else None, out)


# --- FP8 operands ---
# ``parts``: FP8 data of x [rows, K], and its scale as it travels (``ops/matmul/scaled.py``). On the
# CPU products are computed in fp32 on the values that operands represent.


def all_gather_scaled_matmul(
    parts: tuple[torch.Tensor, torch.Tensor],
    product: ScaledProduct,
    group: dist.ProcessGroup,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """product(gather(x)) [R * m, n], in ``out`` if given. Data and scales are gathered by a
    collective each."""
    size = group.size()
    if size == 1:
        return product(parts, out)
    data, scale = parts
    # as bytes: gloo, and NCCL before 2.24, have no 8-bit floats
    everyone = collectives.all_gather(data.view(torch.uint8), group).view(data.dtype)
    scales = collectives.all_gather(scale.unsqueeze(0), group)  # [R, ...], as they travel
    return product.of_all_ranks(everyone, scales, out)


def scaled_matmul_reduce_scatter(
    parts: tuple[torch.Tensor, torch.Tensor],
    product: ScaledProduct,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of product(x), plus bias, in ``out`` if given."""
    return collectives.reduce_scatter(_scaled_partial(parts, product, bias, group), group, out)


def scaled_matmul_all_reduce(
    parts: tuple[torch.Tensor, torch.Tensor],
    product: ScaledProduct,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As :func:`matmul_all_reduce`, of product(x)."""
    to = out if norm_weight is None else residual_out
    partial = _scaled_partial(parts, product, bias, group, to)
    return _added(partial, residual, norm_weight, norm_eps, group, out, residual_out)


def _scaled_partial(
    parts: tuple[torch.Tensor, torch.Tensor],
    product: ScaledProduct,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return product._replace(bias=bias if group.rank() == 0 else None)(parts, out)


# --- Exchanges ---


def exchange(
    x: torch.Tensor,
    how: Exchange,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
    got: torch.Tensor | None = None,
) -> torch.Tensor:
    """All-to-all of x [rows, cols]: part p along ``scatter_dim`` goes to rank p.

    Parts that arrive are concatenated along ``gather_dim``, in rank order, in ``out`` if given.
    ``got``: as for :func:`exchange_parts`.
    """
    size = group.size()
    if size == 1:
        return x
    rows, cols = how.part(x.shape[0], x.shape[1], size)
    if how.scatter_dim == 0:
        parts = x.view(size, rows, cols)
    else:
        parts = torch.empty(size, rows, cols, dtype=x.dtype, device=x.device)
        _permute(parts, x.view(rows, size, cols))
    return exchange_parts(parts, how, group, out, got)


def exchange_parts(
    parts: torch.Tensor,
    how: Exchange,
    group: dist.ProcessGroup,
    out: torch.Tensor | None = None,
    got: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`exchange`, for parts that are contiguous already, [R, rows, cols].

    ``got``: memory of that shape for parts as they arrive, if they are concatenated along columns.
    """
    size, rows, cols = parts.shape
    # a tensor of its own: autograd forbids changes in place of a view that an operator returned
    if out is None:
        out = parts.new_empty((size * rows, cols) if how.gather_dim == 0 else (rows, size * cols))
    if how.gather_dim == 0:
        collectives.all_to_all_equal(out.view(parts.shape), parts, group)
        return out
    if got is None:
        got = torch.empty_like(parts)
    collectives.all_to_all_equal(got, parts, group)
    _permute(out.view(rows, size, cols), got)
    return out


def _permute(out: torch.Tensor, x: torch.Tensor) -> None:
    """out [a, b, c] = x [b, a, c], both contiguous, in pieces of 16 bytes where rows have them:
    torch copies what is not contiguous one element at a time."""
    (rows, parts, cols), addresses = out.shape, out.data_ptr() | x.data_ptr()
    row_bytes = cols * out.itemsize
    # dimensions of one element may have any strides
    large = rows > 1 and parts > 1 and rows * parts * row_bytes >= LARGE_BYTES
    if large and (row_bytes | addresses) % 16 == 0:
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x.transpose(0, 1))


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    gather_dim: int,
    out: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K], w [N, K], bias [N] -> x @ w.T + bias, exchanged.

    ``parts``: memory for the product, [R, rows, cols] of the part for each rank.
    """
    how, size = Exchange(scatter_dim, gather_dim), group.size()
    if size == 1:
        return multiply(x, w, bias, out)
    return exchange_parts(_product_in_parts(x, w, bias, how, size, parts), how, group, out)


def _product_in_parts(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    how: Exchange,
    size: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """x @ w.T + bias as [R, rows, cols]: the part for each rank is contiguous.

    If columns are scattered, one matmul per rank.
    """
    rows, cols = how.part(x.shape[0], w.shape[0], size)
    if how.scatter_dim == 0:
        flat = None if out is None else out.view(size * rows, cols)
        return multiply(x, w, bias, flat).view(size, rows, cols)
    xs, ws = x.expand(size, *x.shape), w.view(size, cols, w.shape[1]).transpose(1, 2)
    if bias is None:
        return torch.bmm(xs, ws, out=out)
    return torch.baddbmm(bias.view(size, 1, cols), xs, ws, out=out)


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    gather_dim: int,
    out: torch.Tensor | None = None,
    exchanged: torch.Tensor | None = None,
    got: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], w, bias -> (exchanged x @ w.T + bias, the exchanged x).

    ``out`` and ``exchanged`` get the results, if given; ``got``: as for :func:`exchange_parts`.
    """
    exchanged = exchange(x, Exchange(scatter_dim, gather_dim), group, exchanged, got)
    return multiply(exchanged, w, bias, out), exchanged


# --- Embeddings ---


def embedding_bag(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    batch: int,
    mean: bool,
) -> list[torch.Tensor]:
    """The pooled bags of each table in fp32, [B, D_t]; an index out of range counts as a row of
    zeros."""
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
    """Lookup, all-to-all, and each block into its columns: [b, width].

    ``group`` None: this rank alone.
    """
    pooled = [
        p.to(out_dtype) for p in embedding_bag(tables, indices, offsets, weights, batch, mean)
    ]
    size, rank = len(layout.dims), 0 if group is None else dist.get_rank(group)
    rows = [rows_of(batch, size, peer) for peer in range(size)]
    begin, end = rows[rank]
    empty = torch.empty(0, dtype=out_dtype, device=indices.device)
    sends = [torch.cat([empty, *(p[b:e].reshape(-1) for p in pooled)]) for b, e in rows]
    sizes = [(end - begin) * sum(dims) for dims in layout.dims]
    blocks = sends if group is None else collectives.all_to_all(sends, sizes, group)
    y = torch.empty(end - begin, layout.width, dtype=out_dtype, device=indices.device)
    for block, columns, dims in zip(blocks, layout.columns, layout.dims, strict=True):
        parts = block.split([(end - begin) * dim for dim in dims]) if dims else ()
        for part, column, dim in zip(parts, columns, dims, strict=True):
            y[:, column : column + dim] = part.view(end - begin, dim)
    return y


def gradient_to_owners(
    grad: torch.Tensor, layout: EmbeddingLayout, batch: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[b, width] of each rank's samples -> [B, sum of own dims]: this rank's columns of all
    samples."""
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
    return torch.cat(collectives.all_to_all(sends, sizes, group)).view(batch, width)


# --- Experts ---
# Where torch._grouped_mm takes the operands, the host does not wait for the device, so that a graph
# may capture a call; sizes are bounds.


def _on_host(offsets: torch.Tensor) -> list[int]:
    """Where rows of experts begin, for matmuls of one expert each."""
    require(
        not (offsets.is_cuda and torch.cuda.is_current_stream_capturing()),
        "a CUDA graph of an unfused expert operator that torch._grouped_mm does not take",
        "calls outside graphs, or bfloat16 with rows of 16 bytes",
        "ask tw.explain why the call is not fused, or capture without it",
    )
    return offsets.tolist()


def grouped_matmul(
    rows: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """rows [n, K], experts [E, N, K], offsets [E + 1] -> [n, N]: rows times the weight of their
    expert.

    Rows after the last offset are undefined.
    """
    if _has_grouped_kernel(rows, experts):
        return torch._grouped_mm(rows, experts.transpose(1, 2), offs=offsets[1:])
    out = rows.new_zeros(rows.shape[0], experts.shape[1])
    ends = _on_host(offsets)
    for expert, (begin, end) in enumerate(pairwise(ends)):
        torch.mm(rows[begin:end], experts[expert].t(), out=out[begin:end])
    return out


def grouped_scaled_matmul(
    rows: ScaledRows, experts: ScaledExperts, offsets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As :func:`grouped_matmul`, of FP8 operands: products in fp32 of the numbers that they
    represent, rounded once to ``dtype``."""
    out = torch.zeros(
        rows.data.shape[0], experts.data.shape[1], dtype=dtype, device=rows.data.device
    )
    for expert, (begin, end) in enumerate(pairwise(_on_host(offsets))):
        given = ScaledRows(rows.data[begin:end], rows.scale[begin:end])
        out[begin:end] = given.value() @ experts.value(expert).t()
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """left [n, N], right [n, K] -> [E, N, K]: left.T @ right over the rows of each expert.

    Zeros for an expert without rows.
    """
    if _has_grouped_kernel(left, right):
        return torch._grouped_mm(left.t(), right, offs=offsets[1:])
    ends = _on_host(offsets)
    products = [left[b:e].t() @ right[b:e] for b, e in pairwise(ends)]
    return torch.stack(products)


def _has_grouped_kernel(*operands: torch.Tensor) -> bool:
    """Whether torch._grouped_mm takes these: bf16 on a GPU, with rows of multiples of 16 bytes.

    Otherwise a loop over experts waits for the device.
    """
    return all(
        t.is_cuda
        and t.dtype == torch.bfloat16
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
        and all(stride * 2 % 16 == 0 for stride in t.stride() if stride != 1)
        for t in operands
    )


def gather_rows(
    x: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """x [T, H] of this rank's tokens -> [bound, H]: the token of each row of this rank's experts.

    Undefined after the last row. ``group``: None for this rank alone.
    """
    padded = x
    if plan.tokens < plan.max_tokens:
        padded = x.new_zeros(plan.max_tokens, *x.shape[1:])
        padded[: plan.tokens] = x
    everyone = padded
    if group is not None and plan.world_size > 1:
        everyone = collectives.all_gather(padded, group)
    entry = plan.row_entry.long().clamp(0, max(plan.entries - 1, 0))
    return everyone[torch.div(entry, max(plan.topk, 1), rounding_mode="floor")]


def gather_weights(
    weights: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """topk_weights [T, k] of this rank's tokens -> fp32 [R * max_tokens * k], of all entries.

    0 after the last token of a rank.
    """
    padded = weights.float()
    if plan.tokens < plan.max_tokens:
        padded = weights.new_zeros(plan.max_tokens, plan.topk, dtype=torch.float32)
        padded[: plan.tokens] = weights
    return (padded if plan.world_size == 1 else collectives.all_gather(padded, group)).reshape(-1)


def grouped_matmul_combine(
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Grouped matmul, weighted sums per rank, and their sum over ranks: z [T, H].

    Every rank sends a partial sum for every token, also zeros, so sizes are known without waiting
    for the device.
    """
    return combine_products(grouped_matmul(y, experts, plan.offsets), plan, weights, group)


def combine_products(
    products: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """:func:`grouped_matmul_combine` of rows that are multiplied already, [bound, H]."""
    everyone = None if weights is None else gather_weights(weights, plan, group)
    partial = sums_of_products(products, plan, everyone)
    return collectives.reduce_scatter(partial, group)[: plan.tokens].clone()


def sums_of_tokens(
    y: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, everyone: torch.Tensor | None
) -> torch.Tensor:
    """The weighted sum of each token over this rank's experts, [R * max_tokens, H]: added in fp32
    in order of j, and rounded. ``everyone``: weights of all entries."""
    return sums_of_products(grouped_matmul(y, experts, plan.offsets), plan, everyone)


def sums_of_products(
    products: torch.Tensor, plan: RoutingPlan, everyone: torch.Tensor | None
) -> torch.Tensor:
    """:func:`sums_of_tokens` of rows that are multiplied already, [bound, H]."""
    rows = plan.entry_row.view(-1, plan.topk)
    factors = None if everyone is None else everyone.view(-1, plan.topk)
    partial = products.new_zeros(rows.shape[0], products.shape[1], dtype=torch.float32)
    for j in range(plan.topk):
        here = (rows[:, j] >= 0)[:, None]
        value = products[rows[:, j].clamp(min=0).long()].float()
        value = value if factors is None else value * factors[:, j, None]
        # after the product: a choice without an expert adds 0, whatever its weight
        partial += torch.where(here, value, 0.0)
    return partial.to(products.dtype)


def dispatch_grouped_matmul(
    x: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """x [T, K] -> y [bound, N]: the token of each row times the weight of the row's expert."""
    return grouped_matmul(gather_rows(x, plan, group), experts, plan.offsets)


def swiglu(y: torch.Tensor) -> torch.Tensor:
    """[n, 2 I], rows [gate, up] -> silu(gate) * up [n, I], in fp32, rounded once."""
    gate, up = y.float().chunk(2, -1)
    return (silu(gate) * up).to(y.dtype)


def swiglu_gradient(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the result of :func:`swiglu` [n, I] -> gradient of y [n, 2 I].

    Written out, since autograd records nothing below an operator.
    """
    gate, up = y.float().chunk(2, -1)
    sigmoid, grad = gate.sigmoid(), grad.float()
    return torch.cat(
        [grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], -1
    ).to(y.dtype)
