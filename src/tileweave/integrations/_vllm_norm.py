"""A pass over vLLM's compiled graphs: matmul, all-reduce, residual and RMSNorm become one operator.

=====================================================  ========================================
in the graph                                           becomes
=====================================================  ========================================
``row_linear(x, w, bias, group)``, or                  ``row_linear_norm(x, w, bias, residual,
``all_reduce(mm(x, w.t()), group)``                    weight, eps, group)``
``fused_add_rms_norm(that, residual, weight, eps)``
=====================================================  ========================================

It looks at each norm by itself, and leaves it where it is if the sum is also used elsewhere, if the
norm covers a part of a row only, or if dtypes differ: the operator takes one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Operators:
    """The operators of the graph.

    row_linear : (x, w, bias, group), sums over the ranks of a group.
    all_reduce : (x, group).
    add_norm : (x, residual, weight, eps, variance_size), returns (normed, residual).
    row_linear_norm : (x, w, bias, residual, weight, eps, group), returns the same.
    """

    row_linear: Callable[..., Any]
    all_reduce: Callable[..., Any]
    add_norm: Callable[..., Any]
    row_linear_norm: Callable[..., Any]


def fuse(graph: fx.Graph, operators: Operators) -> int:
    """Replace what fits in ``graph``, in place. Returns the number of norms that were replaced."""
    found = 0
    for norm in list(graph.find_nodes(op="call_function", target=operators.add_norm)):
        arguments = _of_norm(norm)
        linear = None if arguments is None else _linear_of(arguments[0], graph, operators)
        if arguments is None or linear is None:
            continue
        y, residual, weight, eps = arguments
        x, w, bias, group = linear
        if not _alike(x, w, residual, weight):
            continue
        with graph.inserting_before(norm):
            new = graph.call_function(
                operators.row_linear_norm, (x, w, bias, residual, weight, eps, group)
            )
        new.meta.update(norm.meta)
        norm.replace_all_uses_with(new)
        graph.erase_node(norm)
        _erase_unused(graph, y)
        found += 1
    return found


def _of_norm(norm: fx.Node) -> tuple[Any, ...] | None:
    """(x, residual, weight, eps) of a norm over whole rows with a weight."""
    names = ("x", "x_residual", "weight", "epsilon", "variance_size")
    given: dict[str, Any] = {**dict(zip(names, norm.args, strict=False)), **norm.kwargs}
    found: list[Any] = [given.get(name) for name in names]
    x, residual, weight, eps, part = found
    nodes = all(isinstance(node, fx.Node) for node in (x, residual, weight))
    if not nodes or eps is None or part is not None or len(x.users) != 1 or x is residual:
        return None
    return x, residual, weight, eps


def _linear_of(y: fx.Node, graph: fx.Graph, operators: Operators) -> tuple[Any, ...] | None:
    """(x, w, bias, group) if ``y`` is x @ w.T + bias, summed over the ranks of a group."""
    if y.target is operators.row_linear:
        x, w, bias, group = y.args
        return x, w, bias, group
    if y.target is not operators.all_reduce:
        return None
    product, group = y.args
    if not isinstance(product, fx.Node) or product.target is not torch.ops.aten.mm.default:
        return None
    x, turned = product.args
    if len(product.users) != 1 or not isinstance(turned, fx.Node):
        return None
    if turned.target is torch.ops.aten.t.default:
        return x, turned.args[0], None, group
    given: Any = turned.args
    if turned.target is torch.ops.aten.permute.default and [*given[1]] == [1, 0]:
        return x, given[0], None, group
    return None


def _alike(*nodes: fx.Node) -> bool:
    """Whether all have the same 16-bit dtype or float32, as far as the graph says so."""
    kinds = {node.meta["val"].dtype for node in nodes if "val" in node.meta}
    known = all("val" in node.meta for node in nodes)
    return known and len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16, torch.float32}


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what only it used, but no placeholders."""
    if node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase_unused(graph, each)
