"""The class of a sharded model: refuses DistributedDataParallel, and lets the other ranks know when
its forward raises an error on this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn

from tileweave.errors import InputError, TileweaveError
from tileweave.nn.linear import ParallelLinear
from tileweave.nn.made_classes import forward_by, make_class
from tileweave.nn.shards import in_backward, is_read_by
from tileweave.parallel.own_rows import OwnRows, OwnRowsBlock
from tileweave.transport.workspace import REGISTRY


class ShardedModel:
    """A sharded model. DistributedDataParallel broadcasts and averages parameters, which it cannot
    do with DTensors; with ``device_mesh=`` it would replace them by shards that look whole."""

    _sharded_over: str  # name of the group
    _own_rows: list[OwnRows]  # of each list of blocks with the rows of one rank

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # which it reads first
        if not is_read_by("torch.nn.parallel"):  # by dir() and the like
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        model: Any = self
        path = next(p for p, m in model.named_modules() if isinstance(m, ParallelLinear))
        raise InputError(
            f"asked: DistributedDataParallel around {type(self).__name__}, whose layers, such as "
            f"{path}, are sharded over ranks; allowed: data parallelism that takes DTensors; "
            "remedy: make a mesh of two dimensions, call tileweave.parallelize(model, mesh['tp']), "
            "then torch.distributed.fsdp.fully_shard(model, mesh=mesh['dp'])"
        )


def watch_model(model: nn.Module, group_name: str) -> None:
    """Make ``model``, sharded over the group of this name, a :class:`ShardedModel`."""
    if not isinstance(model, ShardedModel):
        model.__class__ = _class_of(type(model))
    model._sharded_over = group_name  # type: ignore[assignment]
    blocks = [part for part in model.modules() if isinstance(part, OwnRowsBlock)]
    every = dict.fromkeys(rows for block in blocks for rows in block._rows)
    model._own_rows = [*every]  # type: ignore[assignment]


@cache
def _class_of(cls: type) -> type:
    return make_class(cls, ShardedModel, {"forward": forward_by(cls, _call)}, _class_of)


def _call(model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the forward. An error of this rank alone leaves calls to its peers: the next call of this
    rank must not pass for one of them. Rows of this rank must not pass for all rows."""
    told = False
    for rows in model._own_rows:
        rows.open = False
    try:
        result = forward(model, *args, **kwargs)
        told = True
        for rows in model._own_rows:
            if rows.open:
                rows.refuse(type(model).__name__, rows.last)
    except TileweaveError as error:
        told = not isinstance(error, InputError)
        raise
    finally:
        if not told and not in_backward():  # where checkpoints end a forward early
            first = next(model.parameters(), None)
            device = torch.device("cpu") if first is None else first.device
            REGISTRY.break_off(model._sharded_over, device, False, sys.exc_info()[1])
    return result
