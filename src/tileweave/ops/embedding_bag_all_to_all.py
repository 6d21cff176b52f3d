"""embedding_bag_all_to_all: pool the bags of the global batch from this rank's tables, each vector to its sample's owner.

=========  =======================  ==============================================================================
tables     T of [rows_t, D_t]       this rank's embedding tables, whole or some columns of them; T and D_t differ by rank
indices    [N]                      rows to pool, table after table, in each sample after sample; int32 or int64
offsets    [T * B + 1]              bag (t, s) is ``indices[offsets[t * B + s] : offsets[t * B + s + 1]]``
y          [B/R, sum of all D]      this rank's samples, columns of all ranks' tables as the layout says
=========  =======================  ==============================================================================

forward : one kernel (``kernels/embedding_bag_all_to_all.py``) that pools and stores to the owner, in place.
backward: gy's columns go straight to the tables' owners (``kernels/embedding_gradient.py``), where the rows of each table
          that were looked up are summed in a fixed order: a dense gradient, a sparse one, or an optimizer's step in place.
weights : gw[i] = table row . gradient of its bag.

Sources: fused embedding + all-to-all, arXiv 2305.06942; the contract of TorchRec's PooledEmbeddingsAllToAll.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.embedding_bag_all_to_all_fused import OP, begin_push, end_push, run_fused, run_lookup
from tileweave.ops.embedding_inputs import (
    FusedOptimizer,
    agree_on_call,
    agree_on_gradient,
    check_inputs,
    count_bags,
    dims_of,
    exchanged_layout,
    refuse_shared,
    step_of,
    versions_of,
)
from tileweave.ops.registry import (
    debugging,
    define,
    group_of,
    interpreting,
    log_fallback,
    machine_of,
    name_of,
    number_of,
    publish,
)
from tileweave.ops.registry import explain as explain_call
from tileweave.ops.table_gradient import KINDS, Lookups, sort_beside, sort_lookups, table_gradients, weight_gradients
from tileweave.sharding import EmbeddingLayout, EmbeddingPlan, plan_embedding

_SAID: set[tuple[str, str]] = set()
_METAS: dict = {}
_ANCHOR = torch.zeros(0, device="cpu", requires_grad=True)  # compilers cannot make a tensor that requires a gradient


def embedding_bag_all_to_all(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    batch: int | None = None,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    layout: EmbeddingLayout | None = None,
    out_dtype: torch.dtype | None = None,
    gradient: str = "dense",
    optimizer: FusedOptimizer | None = None,
    divide_gradient: bool = False,
    group: dist.ProcessGroup | str | None = None,
    anchor: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool bags of the global batch from this rank's tables, and get the pooled vectors of all ranks for own samples.

    Parameters
    ----------
    tables : of one dtype, contiguous [rows, D]; may be empty on some ranks.
    indices : [N], int32 or int64, table by table, sample by sample. offsets : [T * B + 1], of T tables, int32 or int64: where
        bags begin, and N at the end (torch's ``include_last_offset``).
    batch : B, samples of all ranks; needed where this rank has no tables. Rank r owns samples [r * c, (r+1) * c),
        c = ceil(B / R).
    mode : "sum" or "mean". An empty bag gives zeros. per_sample_weights : [N], only with "sum".
    layout : the columns of every rank's tables in y, the same on all ranks. None: rank by rank, table by table, which the ranks
        tell each other in each call, and the host waits for it: pass a layout in a loop.
    out_dtype : of y and of what travels; None: that of the tables.
    gradient : "dense" or "sparse" gradients of the tables; optimizer : step in backward instead, of tables that require it.
        Gradients are for all or for none: a rank without tables takes part in backward whenever gradients are enabled, or,
        given an ``anchor``, if that requires one. A fused step wants memory of its own for each table; and gradients of
        per_sample_weights read the tables in backward, so another lookup's step must not come between (not seen when compiled).
    divide_gradient : gradients of tables and weights over R, as when a loss is a mean over ranks.
    out : an earlier result, which peers then write again, or any contiguous [b, width] tensor; not with gradients.

    Returns
    -------
    y [b, width]. It stands in symmetric memory of its own for as long as anyone holds it; who reads it on another stream
    holds it until that one is done (``record_stream`` does nothing here).

    Raises
    ------
    InputError for what does not fit; with ``TILEWEAVE_DEBUG=1`` also for indices out of range, which otherwise read
    nothing and count as zeros. PeerTimeout, CaptureError as every operator.
    """
    return _call(
        tables, indices, offsets, batch, mode, per_sample_weights, layout, out_dtype, gradient, optimizer, divide_gradient,
        name_of(group), out, anchor,
    )  # fmt: skip


def embedding_bag(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    gradient: str = "dense",
    optimizer: FusedOptimizer | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool bags from several tables at once, on this rank alone: ``torch.nn.functional.embedding_bag`` for many tables.

    tables T of [rows_t, D_t], indices [N], offsets [T * B + 1] as in :func:`embedding_bag_all_to_all`; gives [B, sum of D],
    or table t from ``columns[t]`` on. Other arguments as there.
    """
    layout = None if columns is None else EmbeddingLayout((tuple(columns),), (dims_of(tables),))
    return _call(
        tables, indices, offsets, None, mode, per_sample_weights, layout, out_dtype, gradient, optimizer, False, "", out
    )


def _call(
    tables, indices, offsets, batch, mode, weights, layout, out_dtype, gradient, optimizer, divide, name, out, anchor=None
):  # fmt: skip
    """Both public functions; what depends on the group is checked inside the operator, where compilers do not look."""
    tables = list(tables)
    require(mode in ("sum", "mean"), f"mode {mode!r}", '"sum" or "mean"', "pass one of these")
    require(gradient in KINDS[:2], f"gradient {gradient!r}", '"dense" or "sparse"', "for a fused step pass optimizer=")
    if batch is None:
        require(len(tables) > 0, "no tables and no batch", "batch= where a rank has no tables", "pass batch=")
        batch = count_bags(indices, offsets, len(tables))
    if out_dtype is None:
        require(len(tables) > 0, "no tables and no out_dtype", "out_dtype= where there are none", "pass it")
        out_dtype = tables[0].dtype
    kind, states, rate, epsilon = step_of(tables, gradient, optimizer)
    numbers = (exchanged_layout(tables, indices.device, name) if layout is None else layout).flat()
    common = (tables, indices, offsets, weights, numbers, batch, mode == "mean", out_dtype, name)
    if out is not None:
        mine = [out, *tables] if tables else []  # a rank without tables: what a call returned requires a gradient
        tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (*mine, *([] if weights is None else [weights])))
        require(not tracked, "out= with tensors that require gradients", "one of them", "call under torch.no_grad()")
        torch.ops.tileweave.embedding_bag_all_to_all.out(*common, out=out)
        return out
    if tables:
        anchor = None
    elif anchor is None and torch.is_grad_enabled():  # this rank has to send gradients on, though it has none of its own
        anchor = _ANCHOR.to(indices.device)
    return torch.ops.tileweave.embedding_bag_all_to_all(*common, kind, divide, states, rate, epsilon, anchor)


def plan(tables: Sequence[torch.Tensor], indices: torch.Tensor, batch: int, size: int) -> EmbeddingPlan:
    """The path of this call, the same on every rank; the cut of its lookups is this rank's own."""
    row_bytes = max((t.shape[1] * t.element_size() for t in tables), default=16)
    pooling = indices.numel() / max(len(tables) * batch, 1)
    return plan_embedding(size, row_bytes, pooling, machine_of(indices.device), interpreting())


def _forward(tables, indices, offsets, weights, numbers, batch, mean, out_dtype, group_name, out=None, stepped=()):
    group = group_of(group_name) if group_name else None
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    layout = EmbeddingLayout.unflatten(numbers)
    if debugging():
        agree_on_call(tables, indices, offsets, layout.flat(), batch, mean, out_dtype, group_name, size)
    refuse_shared(stepped)
    check_inputs(tables, indices, offsets, weights, batch, mean, layout, out_dtype, out, size, rank)
    chosen = plan(tables, indices, batch, size)
    if chosen.path == "fused":
        mark = hash((number_of(OP), number_of(out_dtype), batch, mean, *numbers)) or 1  # of integers: the same in every process
        return run_fused(
            tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, chosen.lookup, out, mark
        )
    if chosen.path == "local":
        y = run_lookup(
            tables, indices, offsets, weights, layout.columns[0], layout.width, batch, mean, out_dtype, chosen.lookup, _METAS,
            out,
        )  # fmt: skip
        return y if tables else y.zero_()
    log_fallback(OP, chosen, _SAID)
    group = group if size > 1 else None
    y = reference.embedding_bag_all_to_all(tables, indices, offsets, weights, layout, batch, mean, out_dtype, group)
    return y if out is None else out.copy_(y)


def _implementation(
    tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, gradient, divide, states, rate, epsilon,
    anchor,
):  # fmt: skip
    stepped = (*tables, *states) if gradient in KINDS[2:] else ()
    return _forward(tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, stepped=stepped)


def _implementation_out(tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, *, out):
    _forward(tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, out)


def _fake(
    tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, gradient, divide, states, rate, epsilon,
    anchor,
):  # fmt: skip
    found = EmbeddingLayout.unflatten(layout)
    rank = dist.get_rank(group_of(group_name)) if group_name else 0
    chunk = -(-batch // len(found.dims))  # as rows_of, which would ask how large a batch is that compilers leave open
    begin, end = (torch.sym_min(r * chunk, batch) for r in (rank, rank + 1))
    return indices.new_empty(end - begin, found.width, dtype=out_dtype)


# --- Gradients ---


def _take_gradient(
    grad, tables, indices, offsets, weights, numbers, batch, mean, group_name, kind, divide, states, rate, epsilon,
    need_weights, stepped=None,
):  # fmt: skip
    """``stepped``: the tables with no rows in place of those that take no step; None: all as they are."""
    layout = EmbeddingLayout.unflatten(numbers)
    if debugging():
        agree_on_gradient(grad, numbers, batch, group_name)
    factor = 1.0 / len(layout.dims) if divide else 1.0
    path = plan(tables, indices, batch, len(layout.dims)).path
    compiled = path != "unfused" or indices.is_cuda
    lookups = Lookups(indices, offsets, weights, batch, mean)
    alone = need_weights or not tables  # gradients of weights want the tables as they were
    # Beside what travels alone; sums that stand in one launch with the push wait for the sort at once.
    sort = sort_lookups if path == "fused" and not alone else sort_beside
    stepped = tables if stepped is None else stepped
    ordered = sort(stepped, lookups, compiled)
    gw = grad.new_empty(0)
    if path == "fused":
        push = begin_push(grad, layout, batch, group_name, own=alone)
        mine = push.slot
    else:
        group = group_of(group_name) if len(layout.dims) > 1 else None
        push, mine = None, reference.gradient_to_owners(grad.contiguous(), layout, batch, group)
    try:
        if push is not None and alone:
            push.launch_alone()
        if need_weights:
            gw = weight_gradients(mine, tables, lookups, factor)
        found = table_gradients(
            mine, stepped, lookups, ordered, factor, kind, states, rate, epsilon, compiled, None if alone else push
        )
        if push is not None and alone:
            push.end_alone()
    finally:
        if push is not None:
            end_push(push, group_name)
    return found, gw


def _backward_implementation(
    grad, tables, indices, offsets, weights, layout, batch, mean, group_name, sparse, divide, need_weights
):
    kind = "sparse" if sparse else "dense"
    return _take_gradient(
        grad, tables, indices, offsets, weights, layout, batch, mean, group_name, kind, divide, (), None, 0.0, need_weights
    )


def _backward_fake(grad, tables, indices, offsets, weights, layout, batch, mean, group_name, sparse, divide, need_weights):
    return [torch.empty_like(t) for t in tables], torch.empty_like(weights) if need_weights else grad.new_empty(0)


def _step_implementation(
    grad, tables, states, indices, offsets, weights, layout, batch, mean, group_name, kind, divide, rate, epsilon,
    need_weights, trained,
):  # fmt: skip
    # Without rows all ids are out of range.
    stepped = [table if steps else table[:0] for table, steps in zip(tables, trained, strict=True)]
    return _take_gradient(
        grad, tables, indices, offsets, weights, layout, batch, mean, group_name, kind, divide, states, rate, epsilon,
        need_weights, stepped,
    )[1]  # fmt: skip


def _step_fake(
    grad, tables, states, indices, offsets, weights, layout, batch, mean, group_name, kind, divide, rate, epsilon,
    need_weights, trained,
):  # fmt: skip
    return torch.empty_like(weights) if need_weights else grad.new_empty(0)


def _setup_context(ctx, inputs, output) -> None:
    tables, indices, offsets, weights, ctx.layout, ctx.batch, ctx.mean, _, ctx.group_name = inputs[:9]
    ctx.kind, ctx.divide, states, ctx.rate, ctx.epsilon, anchor = inputs[9:]
    ctx.anchor_dtype = getattr(anchor, "dtype", None)
    ctx.count, ctx.weighted = len(tables), weights is not None
    kept = [indices, offsets, *([weights] if ctx.weighted else [])]
    if ctx.kind in KINDS[2:]:
        ctx.owned = (list(tables), list(states))  # steps change them: not versions of an input, but the tables themselves
        ctx.versions = versions_of(tables)
    else:
        kept += tables
    ctx.save_for_backward(*kept)


def _backward(ctx, grad):
    indices, offsets, *rest = ctx.saved_tensors
    weights = rest.pop(0) if ctx.weighted else None
    need_weights = ctx.weighted and ctx.needs_input_grad[3]
    common = (indices, offsets, weights, ctx.layout, ctx.batch, ctx.mean, ctx.group_name)
    needed = ctx.needs_input_grad[0]
    needed = list(needed) if isinstance(needed, (list, tuple)) else [needed] * ctx.count
    if ctx.kind in KINDS[2:]:
        tables, states = ctx.owned
        stale = need_weights and ctx.versions != versions_of(tables)
        gw = torch.ops.tileweave.embedding_bag_all_to_all_step(
            grad, [t.detach() for t in tables], states, *common, ctx.kind, ctx.divide, ctx.rate, ctx.epsilon, need_weights,
            needed,
        )  # fmt: skip
        # Behind the call, which peers wait for.
        asked = f"{OP}: gradients of per_sample_weights of tables that were changed since, by a step of another lookup, say"
        require(not stale, asked, "tables as the lookup read them", "leave the step to an optimizer of torch's, or call once")
        grads = [None] * ctx.count
    else:
        grads, gw = torch.ops.tileweave.embedding_bag_all_to_all_backward(
            grad, rest, *common, ctx.kind == "sparse", ctx.divide, need_weights
        )
        grads = [g if wanted else None for g, wanted in zip(grads, needed, strict=True)]
    states = [None] * len(ctx.owned[1]) if ctx.kind in KINDS[2:] else []
    # Compilers, who pass tensors of their own, drop a call whose results nobody reads; peers wait for it, so the anchor reads.
    read = gw[:0].to(ctx.anchor_dtype) if ctx.needs_input_grad[-1] and type(grad) is not torch.Tensor else None
    return grads, None, None, gw if need_weights else None, *[None] * 7, states, None, None, read


_ARGUMENTS = (
    "Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, int[] layout, SymInt batch, bool mean,"
    " ScalarType out_dtype, str group_name"
)
define(
    f"embedding_bag_all_to_all({_ARGUMENTS}, str gradient, bool divide, Tensor[] states, Tensor? rate, float epsilon,"
    " Tensor? anchor) -> Tensor",
    _implementation,
    _fake,
    _backward,
    _setup_context,
)
define(f"embedding_bag_all_to_all.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()", _implementation_out)
define(
    "embedding_bag_all_to_all_backward(Tensor grad, Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights,"
    " int[] layout, SymInt batch, bool mean, str group_name, bool sparse, bool divide, bool need_weights)"
    " -> (Tensor[], Tensor)",
    _backward_implementation,
    _backward_fake,
)
define(
    "embedding_bag_all_to_all_step(Tensor grad, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor indices, Tensor offsets,"
    " Tensor? weights, int[] layout, SymInt batch, bool mean, str group_name, str kind, bool divide, Tensor rate,"
    " float epsilon, bool need_weights, bool[] trained) -> Tensor",
    _step_implementation,
    _step_fake,
)


def explain(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    batch: int | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> EmbeddingPlan:
    """Which path a call with these tensors takes, and why. Sends nothing."""
    dims_of(tables)
    batch = (offsets.numel() - 1) // max(len(tables), 1) if batch is None else batch
    return plan(tables, indices, batch, dist.get_world_size(group_of(name_of(group))))


def warmup(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    **options: object,
) -> EmbeddingPlan:
    """Collective: one call with these tables and the largest batch, so that a capture may follow; arguments as the call's."""
    with torch.no_grad():
        embedding_bag_all_to_all(tables, indices, offsets, **options)  # type: ignore[arg-type]
    return explain_call(OP, tables, indices, offsets, **options)  # type: ignore[return-value]


publish(embedding_bag_all_to_all, explain, warmup)
