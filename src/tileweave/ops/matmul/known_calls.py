"""Eager calls like an earlier one, around what would find the same again.

Between a public function and its matmul are the name of the group, checks of what the operator's
schema does not show, what is around torch's dispatcher, and the plan. They take the host as long as
the collective and the matmul together. A call without gradients whose signature was accepted
before (``inputs.py: accept``) needs none of that but the plan, and what may have changed since: who
listens to torch, autocast, the current device, the group. All other calls take the long way, which
also raises what is to be raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from tileweave.ops.core import registry
from tileweave.ops.core.operator import TENSORS, plain_on_gpu
from tileweave.ops.core.registry import Group, debugging, reporting
from tileweave.ops.matmul.inputs import Tensors, refuse_alias, signature_of
from tileweave.transport.workspace import REGISTRY

_has_autocast = torch._C._is_any_autocast_enabled


def call_again(
    op: str,
    run: Callable[..., Any],
    group: Group | None,
    x: Any,
    w: Any,
    others: tuple[Any, ...],
    results: tuple[Any, ...],
    options: object,
    *more: object,
    flatten: bool = False,
    divides: bool = False,
) -> Any:
    """``run(chosen, group_name, x, w, *others, *more, *results)``, if the signature of the call was
    accepted before; None for a call that must take the long way.

    The arguments are those of ``accept``. ``flatten``: x may be [m, ..., K], whose rows are
    multiplied; else it is [rows, K]. ``divides``: then m is a multiple of the world size.
    """
    if torch.compiler.is_compiling() or type(x) not in TENSORS or w is None:
        return None
    dimensions = x.dim()
    if dimensions != 2 and (not flatten or dimensions < 2):
        return None
    on_gpu = plain_on_gpu(x, w, *others, *results)
    if on_gpu is None or forward_ad._current_level >= 0 or _has_autocast() or debugging():
        return None
    if on_gpu and x.get_device() != registry._current_device():
        return None
    if group is None:
        group = dist.group.WORLD
    name = group if type(group) is str else getattr(group, "group_name", "")
    known = REGISTRY.known(name)
    if known is None or (known is not group and name is not group):
        return None
    if dimensions > 2:
        if not x.is_contiguous() or x.numel() == 0 or (divides and x.shape[0] % known.size()):
            return None
        x = x.flatten(0, -2)
    accepted, signature = signature_of(op, name, x, w, (*others, *results), options)
    chosen = accepted.get(signature)
    if chosen is None:
        return None
    args = (chosen, name, x, w, *others, *more, *results)
    if results[0] is None:
        return reporting(run, name, x, args, {})
    given = [t for t in results if t is not None]
    counted = [t for t in given if not t.is_inference()]
    if len(counted) < len(given) and not torch.is_inference_mode_enabled():
        return None
    return reporting(_store, name, x, (run, args, results, (x, w, *others), counted), {})


def _store(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    results: Tensors,
    inputs: Tensors,
    counted: list[torch.Tensor],
) -> Any:
    """``run(*args)``, which writes to ``results``: the version counters of ``counted`` know."""
    refuse_alias(results, inputs)
    found = run(*args)
    torch.autograd.graph.increment_version(counted)
    return found


def unflatten(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result [rows, n] of x [m, ..., K], which has elements, as [..., n]: with the inner
    dimensions of x."""
    if x.dim() == 2:
        return y
    inner = x.shape[1:-1]
    return y.view(y.shape[0] // inner.numel(), *inner, y.shape[1])
