"""Fused operators where ranks are on several nodes, by the schedules of their operators
(``ops/matmul/over_nodes.py``, ``ops/experts/over_nodes.py``). Nothing of this was measured between
hosts: predictions.

A transfer is a collective of NCCL among the ranks of a rail, one per node. Inside a node the model
is that of one node. Copies, kernels of NCCL and matmuls do not slow each other down more than they
do in a node.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tileweave.planning.machine import Machine
from tileweave.planning.matmul import plan_all_gather_matmul, plan_matmul_reduce_scatter
from tileweave.planning.problem import Problem
from tileweave.planning.schedules.chunks import GROWING, SHRINKING, chunks_by_weight
from tileweave.sim.collectives import Group

if TYPE_CHECKING:
    from tileweave.sim.operators import ExpertMatmul, Operators


def all_gather_matmul(
    ops: Operators, machine: Machine, group: Group, m: int, n: int, k: int
) -> float:
    """Gather x [m / R, k], then multiply with w [n, k]: own node's rows first, then each chunk of
    the others after it has arrived. Infinite where the plan is unfused."""
    rows = m // group.size
    problem = Problem(group.size, rows, n, k, 2, "bfloat16", group.across)
    config = plan_all_gather_matmul(problem, machine, False).config
    if config is None:
        return math.inf
    done, arrived = _each_rank(ops, group, rows, n, k), 0.0
    for begin, end in chunks_by_weight(rows, config.num_slices, SHRINKING):
        arrived += _rail(ops, group, 2.0 * (end - begin) * k)
        done = max(done, arrived)
        done += (group.across - 1) * _each_rank(ops, group, end - begin, n, k)
    return done + ops.c.signal


def matmul_reduce_scatter(
    ops: Operators, machine: Machine, group: Group, m: int, n: int, k: int
) -> float:
    """x [m, k] @ w [n, k], then the sum over ranks of [m / R, n]: rows of other nodes first, chunk
    by chunk, each summed in the node and sent. Infinite where the plan is unfused."""
    rows = m // group.size
    problem = Problem(group.size, rows, n, k, 2, "bfloat16", group.across)
    config = plan_matmul_reduce_scatter(problem, machine, False).config
    if config is None:
        return math.inf
    done = sent = 0.0
    for begin, end in chunks_by_weight(rows, config.num_slices, GROWING):
        done += (group.across - 1) * _summed(ops, group, end - begin, n, k)
        sent = max(done, sent) + _rail(ops, group, 2.0 * (end - begin) * n)
    done += _summed(ops, group, rows, n, k)
    return max(done, sent) + ops.c.gap + ops.costs.reduce_rows(rows, group.across, n)


def dispatch_grouped(ops: Operators, group: Group, matmul: ExpertMatmul) -> float:
    """Tokens [tokens, depth] cross once per node; then the operator of a node."""
    inside = ops.fused_dispatch_grouped(group.inside, matmul.of_a_node(group.across))
    return _rail(ops, group, 2.0 * matmul.tokens * matmul.depth) + ops.c.gap + inside


def grouped_combine(ops: Operators, group: Group, matmul: ExpertMatmul) -> float:
    """The operator of a node, then a sum of each token from each node, and their sum."""
    inside = ops.fused_grouped_combine(group.inside, matmul.of_a_node(group.across))
    tokens, hidden = matmul.tokens, matmul.cols
    total = ops.costs.reduce_rows(tokens, group.across, hidden)
    return inside + _rail(ops, group, 2.0 * tokens * hidden) + 2.0 * ops.c.gap + total


def _rail(ops: Operators, group: Group, nbytes: float) -> float:
    """An exchange in which each rank gets ``nbytes`` from each other node."""
    return ops.collective("all_gather", group.across * nbytes, Group(1, group.across))


def _each_rank(ops: Operators, group: Group, rows: int, n: int, k: int) -> float:
    """cuBLAS on the rows of each rank of a node as copy engines bring them."""
    if group.inside == 1:
        return ops.costs.matmul(rows, n, k) + ops.c.gap
    return ops.cublas_per_shard(group.inside, group.inside * rows, n, k)


def _summed(ops: Operators, group: Group, rows: int, n: int, k: int) -> float:
    """cuBLAS for the rows of each rank of a node; copy engines take them there, and one launch adds
    them."""
    if group.inside == 1:
        return ops.costs.matmul(rows, n, k) + ops.c.gap
    # as much is copied as for a gather of n columns
    copied = ops.cublas_per_shard(group.inside, group.inside * rows, n, k, sent=n)
    return copied + ops.c.gap + ops.costs.reduce_rows(rows, group.inside, n)
