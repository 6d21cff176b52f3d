"""Replicated parameters of any module: DTensors outside of forward, plain tensors inside, with
their gradients summed over a group where each rank has a part of the rows or heads."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.nn.made_classes import make_class
from tileweave.nn.shards import (
    ShardedModule,
    distributed,
    in_backward,
    is_dtensor,
    local,
    mesh_of,
)
from tileweave.ops.core.argument_types import checks_types_first
from tileweave.ops.core.registry import Group, name_of
from tileweave.ops.core.replicated import copy_to_group


@checks_types_first
def replicate(module: nn.Module, *, group: Group | None = None, sums: bool) -> nn.Module:
    """Make the parameters of a module replicated DTensors, and sum their gradients over a group.

    For layers next to those of this package, such as norms: their gradients come from the rows of
    one rank. And torch's optimizers with ``foreach``, which is the default on GPUs, refuse
    parameters of which some are DTensors and some are not.

    Parameters
    ----------
    module : torch.nn.Module
        Changed in place, with all modules in it. Parameters that are DTensors already stay as they
        are. The values of each rank are kept: they have to be equal.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks: a group, its name, or a DeviceMesh of one dimension. None: the default group.

    sums : bool
        True: each rank applies the module to its own rows, or to its own heads, so that gradients
        are partial sums, which are summed over the ranks. False: all ranks apply it to the same
        rows.

    Returns
    -------
    torch.nn.Module
        ``module``. Its parameters are DTensors; while its forward runs they are plain tensors.

    Raises
    ------
    InputError
        (a ValueError) ``group`` is neither a group, its name, nor a DeviceMesh of one dimension.
    """
    parameter = next(module.parameters(), None)
    if parameter is not None:
        make_replicated(module, mesh_of(group, parameter.device), sums)
        plain_in_parents(module)
    return module


def make_replicated(
    module: nn.Module,
    mesh: DeviceMesh,
    sums: bool,
    known: dict[nn.Parameter, nn.Parameter] | None = None,
    source: int | None = None,
) -> None:
    """Make the parameters of ``module`` and of the modules in it replicated DTensors, in place.

    ``module.weight`` is the parameter, a DTensor; while forward runs it is the plain tensor that
    forward expects. Parameters that are DTensors already stay as they are.

    Parameters
    ----------
    sums : bool
        Gradients are partial sums: each rank applies the module to its own rows, or to its own
        heads. They are summed over the ranks.

    known : dict, optional
        New parameters by the old ones, so that parameters which modules share stay shared.

    source : int, optional
        The rank whose values are taken. None: ranks have equal values.
    """
    from torch.distributed.tensor import Replicate

    known = {} if known is None else known
    for part in module.modules():
        names = [
            name for name, p in part._parameters.items() if p is not None and not is_dtensor(p)
        ]
        for name in names:
            old = part._parameters[name]
            assert old is not None, "selected above"
            if old not in known:
                known[old] = distributed(old, mesh, Replicate(), source)
            part._parameters[name] = known[old]
        if names:
            part.__class__ = _class_of(type(part), tuple(names))
            part._sums_over = name_of(mesh) if sums else ""  # type: ignore[assignment]
            part._running = Running()  # type: ignore[assignment]


def plain_in_parents(module: nn.Module) -> None:
    """Let ``module`` and modules in it use replicated parameters of modules in them, as in
    ``linear(x, self.parts.embed.weight)``: those are plain tensors while any forward runs.

    Those whose gradients are summed are so while the forward of their parent runs: elsewhere their
    gradients would not be partial sums.
    """
    running = Running()
    for part in module.modules():
        if hasattr(part, "_running") and not part._sums_over:
            part._running = running  # type: ignore[assignment]
    for part in module.modules():
        counters: list[Any] = [
            child._running
            for child in part.children()
            if hasattr(child, "_running") and child._sums_over
        ]
        if any(getattr(m, "_running", None) is running for m in part.modules() if m is not part):
            counters.append(running)
        if counters:
            hooks = RunningHooks(counters)
            part.register_forward_pre_hook(hooks.before)
            part.register_forward_hook(hooks.after, always_call=True)


class Running:
    """How many forwards run, one in another, in which parameters are plain tensors."""

    def __init__(self) -> None:
        self.forwards = 0


class RunningHooks:
    """The hooks of a module. A copy of the module has its own, with the copied counters."""

    def __init__(self, counters: list[Any]) -> None:
        self.counters = counters

    def before(self, *_: Any) -> None:
        for counter in self.counters:
            counter.forwards += 1

    def after(self, *_: Any) -> None:
        for counter in self.counters:
            counter.forwards -= 1


@cache
def _class_of(cls: Any, names: tuple[str, ...]) -> type:
    """The subclass of ``cls`` whose parameters of these names are plain tensors in forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._running.forwards += 1
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self._running.forwards -= 1

    properties = {name: property(_getter(name)) for name in names}
    members = {**properties, "forward": forward}
    return make_class(cls, ShardedModule, members, _class_of, names)


def _getter(name: str) -> Any:
    def parameter(self: Any) -> Any:
        if name not in self._parameters:  # it was deleted
            raise AttributeError(name)
        value = self._parameters[name]
        if value is None or not (self._running.forwards or in_backward()):
            return value
        plain = local(value)
        return copy_to_group(plain, self._sums_over) if self._sums_over else plain

    return parameter
