"""Operators called with DTensors: the placements that fit, and the refusal of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from tileweave.errors import require
from tileweave.ops.core.argument_types import RAISED, refuse_types
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.registry import name_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

P = ParamSpec("P")
T = TypeVar("T")
Dim = int | None  # the dimension that is sharded; None: replicated
PLAIN = (torch.Tensor, torch.nn.Parameter)


def takes_dtensors(result: Dim, **places: Dim) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate an operator over x, w and bias, so that it takes DTensors on the mesh of its group.

    Arguments are converted with ``to_local``, so gradients of DTensors are DTensors. The result is
    a DTensor if x is one.

    Parameters
    ----------
    result, **places
        the dimension along which the result, and the argument of this name, is sharded; None:
        replicated.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        plain: Callable[..., Any] = call

        @wraps(call)
        def operator(x: Any, w: Any, bias: Any = None, **options: Any) -> Any:
            try:
                if type(x) in PLAIN and type(w) in PLAIN and (bias is None or type(bias) in PLAIN):
                    return plain(x, w, bias, **options)
                return _on_shards(plain, result, places, {"x": x, "w": w, "bias": bias, **options})
            except RAISED as error:
                refuse_types(error, plain, (x, w, bias), options, ("x", "w", "bias"))
                raise

        return operator  # type: ignore[return-value]

    return decorate


def _on_shards(
    call: Callable[..., Any], result: Dim, places: dict[str, Dim], given: dict[str, Any]
) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    found = [t for value in given.values() for t in _each(value) if isinstance(t, DTensor)]
    if not found:  # fake tensors and other subclasses
        return call(**given)
    mesh, group = found[0].device_mesh, given.get("group")
    places = {**places, "x": given.get("gather_dim", places["x"])}
    result = given.get("scatter_dim", result)
    if group is None and mesh.ndim == 1:
        group = mesh.get_group()
    name = given["group"] = name_of(group)

    def shards() -> dict[str, Any]:
        x_is, gathers = isinstance(given["x"], DTensor), given.get("return_gathered", False)
        require(
            not (x_is and gathers),
            "return_gathered=True with x a DTensor",
            "x as a plain tensor",
            "pass x.to_local()",
        )
        return {
            key: type(value)(_local(key, t, places, name) for t in value)
            if isinstance(value, (list, tuple))
            else _local(key, value, places, name)
            for key, value in given.items()
        }

    y = call(**check_own(call.__name__, name, shards))
    if not isinstance(given["x"], DTensor):
        return y

    def wrapped(t: torch.Tensor) -> DTensor:
        place = Replicate() if result is None else Shard(result % t.dim())
        return DTensor.from_local(t, mesh, [place], run_check=False)

    return type(y)(map(wrapped, y)) if isinstance(y, (list, tuple)) else wrapped(y)


def refuse_dtensors(**arguments: Any) -> None:
    """Refuse DTensors as arguments (tensors, lists of them, None) of an operator that takes plain
    tensors only: torch would not say what to pass."""
    for name, value in arguments.items():
        if value is not None and type(value) not in PLAIN:
            for t in _each(value):
                if t is not None and type(t) not in PLAIN:
                    _refuse_dtensor(name, t)


def _refuse_dtensor(name: str, t: Any) -> None:
    from torch.distributed.tensor import DTensor

    require(
        not isinstance(t, DTensor),
        lambda: f"{name} as a DTensor with placements {t.placements}",
        "a plain tensor, this rank's part as the operator describes it",
        f"pass {name}.to_local(), after redistribute() if that is not the part",
    )


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _local(name: str, t: Any, places: dict[str, Dim], group_name: str) -> Any:
    """The local tensor of argument ``name``, if it is a DTensor with the placement that it must
    have."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(t, DTensor):
        return t
    mesh = t.device_mesh
    require(
        mesh.ndim == 1 and mesh.get_group().group_name == group_name,
        f"{name} on a mesh {mesh.mesh_dim_names or tuple(mesh.shape)} of {mesh.ndim} dimensions",
        "a mesh of one dimension over the ranks of group=",
        "pass group=mesh.get_group() of that mesh, or tensors of the submesh",
    )
    require(name in places, f"{name} as a DTensor", "a plain tensor", f"pass {name}.to_local()")
    place = places[name]
    wanted = Replicate() if place is None else Shard(place % t.dim())
    require(
        t.placements == (wanted,),
        f"{name} with placements {t.placements}",
        f"[{wanted}]",
        f"pass {name}.redistribute(placements=[{wanted}])",
    )
    return t.to_local()
