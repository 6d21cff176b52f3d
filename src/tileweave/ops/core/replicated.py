"""Functions between tensors that all ranks have and their parts, with the gradients that belong to
them.

====================  ====================================  ==================================
function              forward                               gradient
====================  ====================================  ==================================
copy_to_group         x, the same on every rank             sum over ranks
own_part              this rank's part of such an x         gather of the parts
own_view              the same along dimension 0, a view    gather of the parts
gather_parts          concatenate the parts of all ranks    this rank's part
gather_features       the same along the last dimension     a view of this rank's part
gather_to_read        the same                              refused
====================  ====================================  ==================================

The first is *f* of Megatron-LM, arXiv 1909.08053; the others are its ``scatter_to`` and
``gather_from`` regions.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tileweave.errors import InputError, require
from tileweave.ops.core import collectives
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.operator import operator, refuse_transformed
from tileweave.ops.core.registry import (
    Group,
    define,
    first_derivative,
    group_of,
    name_of,
    rank_and_size,
    refuse_second_derivative,
)


@checks_types
def copy_to_group(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Return x unchanged; its gradient is summed over the ranks of the group.

    Use it where a replicated x enters a layer that computes this rank's output features (the
    all-reduce form of tensor parallelism), and for a replicated parameter that is applied to this
    rank's rows. Works under ``torch.compile(fullgraph=True)``.

    Parameters
    ----------
    x : tensor
        The same on every rank.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that have x: a group, its name, or a DeviceMesh of one dimension. None: the
        default group.

    Returns
    -------
    x : tensor
        A view of x. Its gradient is summed over the ranks of the group: in rank order in float32 on
        the CPU, by NCCL on GPUs.

    Raises
    ------
    InputError
        The group is not one of this rank.

    Notes
    -----
    Nothing is sent in forward. All ranks must run backward. Source: *f* in Megatron-LM, arXiv
    1909.08053.
    """
    name = name_of(group)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if not torch.compiler.is_compiling():
        refuse_transformed("copy_to_group", [x])
    return _Copy.apply(x, name)


def own_part(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """This rank's part of x, which all ranks have, along ``dim``; its size is a multiple of R."""
    return operator("own_part")(x, dim % x.dim(), group_name)


def own_view(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's part of x, which all ranks have, along dimension 0: a view, for weights."""
    rank, size = rank_and_size(group_name)
    _check_parts(x, 0, size)
    rows = x.shape[0] // size
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.narrow(0, rank * rows, rows)
    if not torch.compiler.is_compiling():
        refuse_transformed("own_view", [x])
    return _OwnView.apply(x, rank * rows, rows, group_name)


def gather_parts(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """The parts of all ranks, concatenated along ``dim``; what follows is the same on every
    rank."""
    return operator("gather_parts")(x, dim % x.dim(), group_name)


def gather_features(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """As :func:`gather_parts` along the last dimension. The gradient of x is a view, which a matmul
    takes as it is."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return gather_parts(x, -1, group_name)
    if not torch.compiler.is_compiling():
        refuse_transformed("gather_features", [x])
    return _GatherFeatures.apply(x, group_name)


def gather_to_read(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """As :func:`gather_parts`, where each rank's gradient would be another part of a sum."""
    return operator("gather_to_read")(x, dim % x.dim(), group_name)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative("copy_to_group")
        return torch.ops.tileweave.sum_over_group(grad_outputs[0], ctx.group_name), None


class _OwnView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, begin: int, rows: int, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return x.narrow(0, begin, rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative("own_view")
        whole = torch.ops.tileweave.gather_parts(grad_outputs[0], 0, ctx.group_name)
        return whole, None, None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.features, ctx.group_name = x.shape[-1], group_name
        return torch.ops.tileweave.gather_parts(x, x.dim() - 1, group_name)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative("gather_features")
        rank, _ = rank_and_size(ctx.group_name)
        return grad_outputs[0].narrow(-1, rank * ctx.features, ctx.features), None


def _sum_over_group(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return collectives.all_reduce(
        x.clone(memory_format=torch.contiguous_format), group_of(group_name)
    )


def _own_part(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    rank, size = rank_and_size(group_name)
    _check_parts(x, dim, size)
    rows = x.shape[dim] // size
    return x.narrow(dim, rank * rows, rows).clone(memory_format=torch.contiguous_format)


def _check_parts(x: torch.Tensor, dim: int, size: int) -> None:
    require(
        x.shape[dim] % size == 0,
        lambda: f"x {tuple(x.shape)} in {size} parts along dimension {dim}",
        "a multiple of the world size",
        "pad x",
    )


def _gather_parts(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    parts = collectives.all_gather(x.contiguous()[None], group_of(group_name))
    if any(size != 1 for size in x.shape[:dim]):
        return torch.cat([*parts], dim)
    return parts.view(*x.shape[:dim], parts.shape[0] * x.shape[dim], *x.shape[dim + 1 :])


def _like_part(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    size = rank_and_size(group_name)[1]
    _check_parts(x, dim, size)
    return x.new_empty(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])


def _like_gathered(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    size = rank_and_size(group_name)[1]
    return x.new_empty(*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group_name = inputs


def _gather_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tileweave.gather_parts(grad, ctx.dim, ctx.group_name), None, None


def _own_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tileweave.own_part(grad, ctx.dim, ctx.group_name), None, None


def _refuse_gradient(*_: Any) -> NoReturn:
    raise InputError(
        "asked: a gradient of the weights that nn.MultiheadAttention returns, with "
        "sequence_parallel=True; allowed: weights that are only read, since each rank has a "
        "gradient by its rows; remedy: detach them, or pass sequence_parallel=False to "
        "tileweave.parallelize"
    )


define(
    "sum_over_group(Tensor x, str group_name) -> Tensor",
    _sum_over_group,
    lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format),
)
define(
    "own_part(Tensor x, int dim, str group_name) -> Tensor",
    _own_part,
    _like_part,
    first_derivative("own_part", _gather_gradient),
    _setup_context,
)
define(
    "gather_parts(Tensor x, int dim, str group_name) -> Tensor",
    _gather_parts,
    _like_gathered,
    first_derivative("gather_parts", _own_gradient),
    _setup_context,
)
define(
    "gather_to_read(Tensor x, int dim, str group_name) -> Tensor",
    _gather_parts,
    _like_gathered,
    _refuse_gradient,
    _setup_context,
)
