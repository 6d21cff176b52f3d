"""DistributedDataParallel around a sharded model: an error before it sends anything."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from torch import nn

from tileweave.errors import InputError
from tileweave.nn.linear import ParallelLinear
from tileweave.nn.made_classes import make_class


class RefusesDDP:
    """A sharded model. DistributedDataParallel broadcasts and averages parameters, which it cannot
    do with DTensors; with ``device_mesh=`` it would replace them by shards that look whole."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # which it reads first
        model: Any = self
        path = next(p for p, m in model.named_modules() if isinstance(m, ParallelLinear))
        raise InputError(
            f"asked: DistributedDataParallel around {type(self).__name__}, whose layers, such as "
            f"{path}, are sharded over ranks; allowed: data parallelism that takes DTensors; "
            "remedy: make a mesh of two dimensions, call tileweave.parallelize(model, mesh['tp']), "
            "then torch.distributed.fsdp.fully_shard(model, mesh=mesh['dp'])"
        )


def refuse_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel around ``model`` raise :class:`InputError`."""
    if not isinstance(model, RefusesDDP):
        model.__class__ = _class_of(type(model))


@cache
def _class_of(cls: type) -> type:
    return make_class(cls, RefusesDDP, {}, _class_of)
