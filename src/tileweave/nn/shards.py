"""Parameters that know which part of the whole tensor they are: DTensors on the mesh of a group.

Checkpoints, optimizers, gradient clipping and FSDP2 read mesh and placement of a DTensor; kernels
read its local tensor.
"""

from __future__ import annotations

import math
import sys
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.errors import require
from tileweave.nn.loss_scaling import share_overflow
from tileweave.ops.core.operator import refuse_transformed
from tileweave.ops.core.recorded import recorded
from tileweave.ops.core.registry import Group, group_of, name_of

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def check_sizes(layer: str, least: int, **sizes: int) -> None:
    """Raise :class:`InputError` for sizes of a layer that no tensor can have, of ``least`` to
    2**31 - 1."""
    require(
        all(least <= size < 2**31 for size in sizes.values()) and math.prod(sizes.values()) < 2**59,
        lambda: f"{layer} of {', '.join(f'{name}={size}' for name, size in sizes.items())}",
        f"sizes of {least} or more, below 2**31, and fewer than 2**59 elements",
        "pass the sizes of the whole layer",
    )


def fits_weight(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the last dimension of x is the second one of ``weight``, and both can be
    multiplied."""
    same = x.device == weight.device and x.is_complex() == weight.is_complex()
    return same and x.dim() > 0 and x.shape[-1] == weight.shape[1]


def described(t: torch.Tensor) -> str:
    """Shape, dtype and device of a tensor, for errors."""
    return f"a tensor {tuple(t.shape)} of {t.dtype} on {t.device}"


def is_read_by(package: str) -> bool:
    """Whether a module of ``package`` reads the attribute whose getter calls this. Others, such as
    ``inspect.getmembers`` and ``torch.jit``, read all attributes."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(package)


def in_backward() -> bool:
    """Whether a backward runs on this thread, in which a checkpoint inside the forward of a module
    runs a part of that forward again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def mesh_of(group: Group | None, device: torch.device) -> DeviceMesh:
    """``group`` if it is a mesh, else a mesh of one dimension over its ranks. Not collective.

    Parameters
    ----------
    device
        device of the parameters; meta: they will be on the device that the group communicates on.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    name = name_of(group)
    if isinstance(group, DeviceMesh):
        return group
    found, kind = group_of(name), device.type
    if kind == "meta":
        kind = "cpu" if dist.get_backend(found) == "gloo" else "cuda"
    with unset_fake_temporarily():  # a mesh reads the numbers of its ranks
        return DeviceMesh.from_group(found, kind)


def sharded(
    shard: torch.Tensor,
    mesh: DeviceMesh,
    placement: Placement,
    shape: tuple[int, ...] | None = None,
) -> nn.Parameter:
    """A parameter whose local tensor is ``shard``.

    ``shape``: of the whole, contiguous tensor, cut as DTensor does. None: shards have equal shapes.
    """
    from torch.distributed.tensor import DTensor

    share_overflow()
    whole: dict[str, Any] = {}
    if shape is not None:
        strides = torch.empty(shape, device="meta").stride()
        whole = {"shape": torch.Size(shape), "stride": strides}
    return nn.Parameter(DTensor.from_local(shard, mesh, [placement], run_check=False, **whole))


def distributed(
    whole: nn.Parameter, mesh: DeviceMesh, placement: Placement, source: int | None = None
) -> nn.Parameter:
    """The parameter ``whole``, which every rank has, with this placement.

    ``source``: the rank of the mesh whose values are taken. None: each rank takes its own, and
    nothing is sent.
    """
    from torch.distributed.tensor import distribute_tensor

    share_overflow()
    # a copy: the shard must not keep the storage of the whole tensor
    part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=source).clone()
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def is_dtensor(t: object) -> bool:
    """Whether ``t`` is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def local(parameter: Any) -> Any:
    """The local tensor of a DTensor, with its gradient; other tensors and None as they are."""
    if not is_dtensor(parameter):
        if parameter is not None and not torch.compiler.is_compiling():
            refuse_transformed("a layer", [parameter])
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local()
    if torch.is_grad_enabled() and parameter.requires_grad:
        refuse_transformed("a layer", [parameter])
        # a subclass may have no local tensor
        return _to_local(parameter) if _is_plain(parameter) else parameter.to_local()
    return parameter._local_tensor  # 0.1 us in place of 3


def _is_plain(parameter: Any) -> bool:
    """Whether a DTensor is of no subclass."""
    from torch.distributed.tensor import DTensor

    return type(parameter) is DTensor


def _forward(ctx: Any, parameter: Any) -> torch.Tensor:
    shard = parameter._local_tensor
    ctx.spec, ctx.stride = parameter._spec, shard.stride()
    return shard.view_as(shard)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    spec = ctx.spec
    if grad.stride() != ctx.stride:  # what the spec says would not be true
        grad = grad.new_empty_strided(grad.shape, ctx.stride).copy_(grad)
    if torch.is_grad_enabled():  # create_graph=True
        whole = {"shape": spec.shape, "stride": spec.stride}
        return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False, **whole)
    made: Any = DTensor  # a copy: torch may change what it finds in it
    return made(grad, copy(spec), requires_grad=False)


# to_local() finds out anew what the whole gradient looks like, which takes 30 to 80 us. It is as
# the parameter.
_to_local = recorded("ToLocal", _forward, _backward)


class ShardedModule(nn.Module):
    """Base class of layers whose parameters are DTensors.

    Their state_dict has DTensors under the names of the stock layer. ``load_state_dict`` takes
    DTensors of any placement, and whole plain tensors, of which each rank takes its shard.
    """

    def prepared(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """``state`` with what is loaded as it should be loaded."""
        return state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = self.prepared(dict(state_dict), prefix)
        for name, parameter in self._parameters.items():
            given = known.get(prefix + name)
            if parameter is None or not is_dtensor(parameter) or is_dtensor(given):
                continue
            if not isinstance(given, torch.Tensor):  # torch refuses it
                continue
            if given.shape != parameter.shape:
                known.pop(prefix + name)
                error_msgs.append(
                    f"asked: {prefix}{name} {tuple(given.shape)}; allowed: the whole tensor "
                    f"{tuple(parameter.shape)}, or a DTensor; remedy: pass the state_dict of the "
                    "whole layer, or load with torch.distributed.checkpoint"
                )
                continue
            known[prefix + name] = _distributed_like(given, parameter)
        # a tensor of a wrong shape is reported above, not as missing
        found: list[str] = []
        super()._load_from_state_dict(
            known, prefix, local_metadata, strict, found, unexpected_keys, error_msgs
        )
        missing_keys.extend(name for name in found if name not in state_dict)


def _distributed_like(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    placements = parameter.placements
    return distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None)
