"""The backward of embedding_bag_all_to_all: gradients of columns to the owners of tables, then to
tables.

There are two operators: ``embedding_bag_all_to_all_backward`` returns gradients of the tables,
``..._step`` changes the tables in place. Both also return the gradient of per-sample weights, which
is empty if it is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.nodes import known_topology_of
from tileweave.ops.core.registry import debugging, define, group_of
from tileweave.ops.embedding import gradient_over_nodes
from tileweave.ops.embedding.bag_all_to_all_fused import begin_push, end_push
from tileweave.ops.embedding.call import OP, Call
from tileweave.ops.embedding.inputs import agree_on_gradient, plan, versions_of
from tileweave.ops.embedding.table_gradient import (
    KINDS,
    Lookups,
    Update,
    sort_concurrently,
    sort_lookups,
    table_gradients,
    weight_gradients,
)
from tileweave.planning.sharding import EmbeddingLayout


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tables, indices, offsets, weights, ctx.layout, ctx.batch, ctx.mean, _, ctx.group_name = inputs[
        :9
    ]
    _, ctx.kind, ctx.divide, states, ctx.rate, ctx.epsilon, anchor = inputs[9:]
    ctx.anchor_dtype = getattr(anchor, "dtype", None)
    ctx.count, ctx.weighted = len(tables), weights is not None
    kept = [indices, offsets, *([weights] if ctx.weighted else [])]
    if ctx.kind in KINDS[2:]:
        # steps change the tables in place, so they are not saved as inputs with a version
        ctx.owned = (list(tables), list(states))
        ctx.versions = versions_of(tables)
    else:
        kept += tables
    ctx.save_for_backward(*kept)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
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
            grad,
            [t.detach() for t in tables],
            states,
            *common,
            ctx.kind,
            ctx.divide,
            ctx.rate,
            ctx.epsilon,
            need_weights,
            needed,
        )
        # Raised after the call, since peers wait for it.
        asked = (
            f"{OP}: gradients of per_sample_weights of tables that were changed since, "
            "for example by a step of another lookup"
        )
        require(
            not stale,
            asked,
            "tables as the lookup read them",
            "leave the step to an optimizer of torch, or call once",
        )
        grads = [None] * ctx.count
    else:
        grads, gw = torch.ops.tileweave.embedding_bag_all_to_all_backward(
            grad, rest, *common, ctx.kind == "sparse", ctx.divide, need_weights
        )
        grads = [g if wanted else None for g, wanted in zip(grads, needed, strict=True)]
    states = [None] * len(ctx.owned[1]) if ctx.kind in KINDS[2:] else []
    # Compilers, which pass tensors of their own class, drop a call whose results are not used.
    # Peers wait for this call, so the gradient of the anchor uses its result.
    read = (
        gw[:0].to(ctx.anchor_dtype)
        if ctx.needs_input_grad[-1] and type(grad) is not torch.Tensor
        else None
    )
    return grads, None, None, gw if need_weights else None, *[None] * 8, states, None, None, read


# --- The two operators ---


def _backward_implementation(
    grad: torch.Tensor,
    tables: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    layout: list[int],
    batch: int,
    mean: bool,
    group_name: str,
    sparse: bool,
    divide: bool,
    need_weights: bool,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    columns = EmbeddingLayout.unflatten(layout)
    call = Call(tables, indices, offsets, weights, columns, batch, mean, grad.dtype, group_name)
    update = Update("sparse" if sparse else "dense")
    return _take_gradient(grad, call, tables, divide, need_weights, update)


def _backward_fake(
    grad: torch.Tensor,
    tables: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *rest: Any,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    *_, need_weights = rest
    gw = torch.empty_like(weights) if weights is not None and need_weights else grad.new_empty(0)
    return [torch.empty_like(t) for t in tables], gw


def _step_implementation(
    grad: torch.Tensor,
    tables: list[torch.Tensor],
    states: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    layout: list[int],
    batch: int,
    mean: bool,
    group_name: str,
    kind: str,
    divide: bool,
    rate: torch.Tensor,
    epsilon: float,
    need_weights: bool,
    trained: list[bool],
) -> torch.Tensor:
    columns = EmbeddingLayout.unflatten(layout)
    call = Call(tables, indices, offsets, weights, columns, batch, mean, grad.dtype, group_name)
    # A table without rows takes no step, since all its indices are out of range.
    stepped = [table if steps else table[:0] for table, steps in zip(tables, trained, strict=True)]
    update = Update(kind, states, rate, epsilon)
    return _take_gradient(grad, call, stepped, divide, need_weights, update)[1]


def _step_fake(
    grad: torch.Tensor,
    tables: list[torch.Tensor],
    states: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *rest: Any,
) -> torch.Tensor:
    *_, need_weights, _ = rest
    return torch.empty_like(weights) if weights is not None and need_weights else grad.new_empty(0)


def _take_gradient(
    grad: torch.Tensor,
    call: Call,
    stepped: Sequence[torch.Tensor],
    divide: bool,
    need_weights: bool,
    update: Update,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gradients of tables, if any are returned, and of weights.

    stepped : the tables; those that take no step are without rows.
    """
    tables, layout, size = call.tables, call.layout, len(call.layout.dims)
    if debugging():
        agree_on_gradient(call)
    factor = 1.0 / size if divide else 1.0
    ranks = known_topology_of(call.group_name, size)
    chosen = plan(tables, call.indices, call.batch, ranks)
    across = chosen.config is not None and chosen.config.nodes > 1
    path = "over nodes" if across else chosen.path
    compiled = chosen.path != "unfused" or call.indices.is_cuda
    lookups = Lookups(call.indices, call.offsets, call.weights, call.batch, call.mean)
    alone = need_weights or not tables  # gradients of weights read tables before a step
    # Sort concurrently with a push that has a launch of its own. Sums that share a launch with the
    # push wait for the sort at once.
    sort = sort_lookups if path == "fused" and not alone else sort_concurrently
    ordered = sort(stepped, lookups, compiled)
    gw = grad.new_empty(0)
    if across:
        with gradient_over_nodes.arriving(grad.contiguous(), call) as (mine, parts):
            if need_weights:
                for part in parts:
                    part.wait()
                gw = weight_gradients(mine, tables, lookups, factor)
                parts = []
            found = table_gradients(mine, stepped, lookups, ordered, factor, update, parts=parts)
        return found, gw
    if path == "fused":
        push = begin_push(grad, layout, call.batch, call.group_name, own=alone)
        mine = push.slot
    else:
        group = group_of(call.group_name) if size > 1 else None
        push, mine = (
            None,
            reference.gradient_to_owners(grad.contiguous(), layout, call.batch, group),
        )
    try:
        if push is not None and alone:
            push.launch_alone()
        if need_weights:
            gw = weight_gradients(mine, tables, lookups, factor)
        with_sums = None if alone else push
        found = table_gradients(
            mine, stepped, lookups, ordered, factor, update, compiled=compiled, push=with_sums
        )
        if push is not None and alone:
            push.end_alone()
    finally:
        if push is not None:
            end_push(push, call.group_name)
    return found, gw


define(
    "embedding_bag_all_to_all_backward(Tensor grad, Tensor[] tables, Tensor indices,"
    " Tensor offsets, Tensor? weights, int[] layout, SymInt batch, bool mean, str group_name,"
    " bool sparse, bool divide, bool need_weights) -> (Tensor[], Tensor)",
    _backward_implementation,
    _backward_fake,
)
define(
    "embedding_bag_all_to_all_step(Tensor grad, Tensor(a!)[] tables, Tensor(b!)[] states,"
    " Tensor indices, Tensor offsets, Tensor? weights, int[] layout, SymInt batch, bool mean,"
    " str group_name, str kind, bool divide, Tensor rate, float epsilon, bool need_weights,"
    " bool[] trained) -> Tensor",
    _step_implementation,
    _step_fake,
)
