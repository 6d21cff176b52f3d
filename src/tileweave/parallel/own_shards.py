"""Parameters of a module itself that are sharded: DTensors outside of its forward, this rank's
shard inside, where each rank computes some of the heads or experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tileweave.nn.made_classes import make_class
from tileweave.nn.shards import ShardedModule, distributed, local


class OwnShards(ShardedModule):
    """A module whose forward sees shards of some of its parameters."""

    _computes: int


def shard_own(module: Any, names: Iterable[str], mesh: DeviceMesh, source: int | None) -> None:
    """Shard parameters of ``module`` along dimension 0, in place.

    Parameters
    ----------
    source : int, optional
        The rank whose values are taken. None: ranks have equal values.
    """
    names = tuple(names)
    for name in names:
        module._parameters[name] = distributed(module._parameters[name], mesh, Shard(0), source)
    module._computes = 0
    module.__class__ = _class_of(type(module), names)


@cache
def _class_of(cls: Any, names: tuple[str, ...]) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._computes += 1
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self._computes -= 1

    members = {name: property(_getter(name)) for name in names}
    return make_class(cls, OwnShards, {**members, "forward": forward}, _class_of, names)


def _getter(name: str) -> Any:
    def parameter(self: Any) -> Any:
        if name not in self._parameters:  # it was deleted
            raise AttributeError(name)
        value = self._parameters[name]
        return local(value) if self._computes else value

    return parameter
