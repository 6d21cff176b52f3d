"""The expert operators where ranks are on several nodes: a token crosses once per node.

N nodes of L ranks, M = ``max_tokens``. Rank (a, l) is number l of node a; its *rail* is ranks
(b, l) of all nodes b.

    dispatch  rail: all-gather of tokens, [M, K] -> [N M, K]
              node: the operator of L ranks, each of which has the N M tokens of its rail
    combine   node: the operator of L ranks: sums [N M, H] over the experts of the node
              rail: all-to-all of these sums, [M, H] to each node; they are added in node order

So a token goes to each other node once, through the rank there with the index of its own rank, and
on to the ranks of its experts over the memory that they share. One sum of a token comes back from
each node, rounded to the dtype of y; sums of nodes are added in float32 and rounded once.

What crosses: M rows from each rank to each other node, whatever is routed. NCCL needs sizes on the
host, and only the device knows which tokens a node needs; to send only those, the host would wait
for the device in each call, and no graph could capture it. With k choices of random experts a node
needs all but (1 - 1 / N)^k of the tokens: of two nodes and k = 8, all but 0.4 %.

The plan of a call is that of all ranks (``routing_plan.py``), so rows have the same experts
and entries as on one node; ``plan_in_node`` renumbers it. Gradients are the same two exchanges:
that of tokens is a combine, that of rows a dispatch.

Streams, and why no rank waits for ever: a transfer follows all work of this rank that was queued
before it, and all later work follows the transfer. So a kernel of NCCL and one that waits for ranks
of the node never run concurrently on a GPU, and each rank of a rail begins its transfers, and each
rank of a node its kernels, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from tileweave.ops import reference
from tileweave.ops.core.registry import number_of
from tileweave.ops.core.ways import Ways, add_in_order, spanning_call
from tileweave.ops.experts.grouped_matmul_combine_fused import run_fused as run_combine
from tileweave.ops.experts.routing_plan import RoutingPlan, plan_in_node
from tileweave.planning.combine import CombineConfig


@contextmanager
def arriving(
    op: str, x: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, needs: int = 0
) -> Iterator[tuple[torch.Tensor, RoutingPlan]]:
    """x [T, K] of this rank's tokens -> those of its rail [N M, K], zeros after the last of a rank,
    and the plan of the node for these. The call of ``op`` lasts as long as the context.

    ``needs``: what else ranks must agree on.
    """
    with _call(op, x, experts, plan, needs) as ways:
        tokens = _of_rail(ways, x, plan)
        yield tokens.flatten(0, 1), plan_in_node(plan, ways.nodes, ways.near, True)


def combine(
    op: str,
    y: torch.Tensor,
    experts: torch.Tensor,
    plan: RoutingPlan,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    config: CombineConfig,
) -> None:
    """y [bound, I], experts [E_local, H, I], weights [T, k] -> out [T, H]."""
    with _call(op, y, experts, plan, int(weights is None)) as ways:
        near = plan_in_node(plan, ways.nodes, ways.near, False)
        factors = None if weights is None else _of_rail(ways, weights, plan).flatten(0, 1)
        if near.world_size == 1:
            flat = None if factors is None else factors.flatten()
            sums = reference.sums_of_tokens(y, experts, near, flat)
        else:
            sums = y.new_empty(near.tokens, experts.shape[1])
            run_combine(y, experts, near, factors, sums, ways.near, config)
        parts = sums.view(ways.nodes, plan.max_tokens, sums.shape[1])
        arrived = torch.empty_like(parts)
        ways.rail.begin(lambda: ways.rail.all_to_all(arrived, parts))()
        own, tokens = parts[ways.node], plan.tokens
        add_in_order(own[:tokens], arrived[:, :tokens], ways.node, out)


@contextmanager
def _call(
    op: str, x: torch.Tensor, experts: torch.Tensor, plan: RoutingPlan, needs: int
) -> Iterator[Ways]:
    agreed = (number_of(op), number_of(x.dtype), *experts.shape, plan.max_tokens, plan.topk, needs)
    with spanning_call(op, plan.group_name, x, hash(agreed) or 1) as ways:
        yield ways


def _of_rail(ways: Ways, x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """x [T, c] of this rank's tokens -> [N, M, c], those of its rail."""
    padded = pad(x, (0, 0, 0, plan.max_tokens - x.shape[0]))
    found = x.new_empty(ways.nodes, *padded.shape)
    ways.rail.begin(lambda: ways.rail.all_gather(found, padded))()
    return found


# --- Tokens kept for the backward ---
# [(R - 1) M, K], as on one node: first those of the other nodes of the rail, in node order, then
# what the ranks of the node sent.


def keep_tokens(kept: torch.Tensor, tokens: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Store ``tokens`` [N M, K], but not this rank's own; returns where those of the node go,
    [L - 1, N M, K]."""
    begin = _own_tokens(plan, tokens.shape[0])
    others = tokens.shape[0] - plan.max_tokens
    kept[:begin].copy_(tokens[:begin])
    kept[begin:others].copy_(tokens[begin + plan.max_tokens :])
    return kept[others:].view(-1, *tokens.shape)


def kept_tokens(
    x: torch.Tensor, kept: torch.Tensor, plan: RoutingPlan, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, RoutingPlan]:
    """What :func:`keep_tokens` stored: the tokens of the rail [N M, K], those of the node, and the
    plan of the node."""
    padded = pad(x, (0, 0, 0, plan.max_tokens - x.shape[0]))
    count = nodes * plan.max_tokens
    begin, others = _own_tokens(plan, count), count - plan.max_tokens
    tokens = torch.cat([kept[:begin], padded, kept[begin:others]])
    return tokens, kept[others:], plan_in_node(plan, nodes, "", False)


def _own_tokens(plan: RoutingPlan, count: int) -> int:
    """Where this rank's own are in ``count`` tokens of its rail."""
    near = plan.world_size * plan.max_tokens // max(count, 1)
    return plan.rank // near * plan.max_tokens


# --- Entries ---


def entries_in_node(values: torch.Tensor, plan: RoutingPlan, near: RoutingPlan) -> torch.Tensor:
    """One value per entry of all ranks, in the order of the entries of the node."""
    nodes = plan.world_size // near.world_size
    return values.view(nodes, near.world_size, -1).transpose(0, 1).reshape(-1)


def entries_of_all(values: torch.Tensor, plan: RoutingPlan, near: RoutingPlan) -> torch.Tensor:
    """The inverse of :func:`entries_in_node`."""
    nodes = plan.world_size // near.world_size
    return values.view(near.world_size, nodes, -1).transpose(0, 1).reshape(-1)
