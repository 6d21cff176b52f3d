"""The weight of a fused layer in state dicts: one tensor of the fused layer's shape and name, made
of the projections that it was split into.

A rank has rows of each projection, so its part of the whole tensor is not one shard but several.
``torch.distributed.checkpoint`` reads and writes them where they are; nothing is sent or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from tileweave.errors import InputError

ATEN = torch.ops.aten
KEEPS = (ATEN.detach.default, ATEN.clone.default, ATEN._to_copy.default)  # of each projection
# the same, and what else is possible, as users call it
_CONVERSIONS = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
_CONVERT = {getattr(torch.Tensor, name) for name in _CONVERSIONS}
_FUNCTIONS: dict[Any, Any] = {
    torch.Tensor.detach: ATEN.detach.default,
    torch.Tensor.data.__get__: ATEN.detach.default,  # type: ignore[attr-defined]
    torch.Tensor.clone: ATEN.clone.default,
    torch.clone: ATEN.clone.default,
    torch.Tensor.new_empty: ATEN.new_empty.default,
    torch.Tensor.equal: ATEN.equal.default,
    torch.equal: ATEN.equal.default,
}


def refused(what: object) -> InputError:
    """The error of a use of a tensor of projections that is not possible."""
    return InputError(
        f"asked: {what} of a fused layer's weight that is split over ranks; allowed: "
        "full_tensor(), redistribute(), detach(), clone(), to(), load_state_dict and "
        "torch.distributed.checkpoint; remedy: call full_tensor() on all ranks first; pass whole "
        "tensors on every rank in place of broadcast_from_rank0; or use the parameters, one for "
        "each projection"
    )


class Shards(LocalShardsWrapper):
    """This rank's shards of a tensor, for checkpoints only."""

    def __new__(
        cls, local_shards: list[torch.Tensor], local_offsets: list[tuple[int, ...]]
    ) -> Shards:
        # torch's has the default dtype and device, whatever its shards have
        described = LocalShardsWrapper(local_shards, local_offsets)
        first = local_shards[0]
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, described.shape, dtype=first.dtype, device=first.device
        )
        made._local_shards = local_shards
        made._storage_meta = described.storage_metadata()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not ATEN.new_empty.default:  # async_save fills a new one
            raise refused(func)
        given: Any = args[0]
        empty = [shard.new_empty(shard.shape, **(kwargs or {})) for shard in given.local_shards()]
        return Shards(empty, given.local_offsets())


class JoinedTensor(DTensor):
    """Projections one after the other, along one dimension. Shares their memory.

    Parameters
    ----------
    parts : sequence of DTensor
        The projections, with equal meshes.

    dim : int
        The dimension.
    """

    parts: tuple[DTensor, ...]
    along: int  # the dimension

    def __new__(cls, parts: Sequence[DTensor], dim: int = 0) -> JoinedTensor:
        own: Any = tuple(part.detach() for part in parts)
        first: Any = own[0]
        sizes = list(first.shape)
        sizes[dim] = sum(part.shape[dim] for part in own)
        shape = torch.Size(sizes)
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), first.dtype)
        spec = replace(first._spec, tensor_meta=meta)
        made: Any = super().__new__(cls, _shards(own, dim), spec, requires_grad=False)
        made.parts, made.along = own, dim
        return made

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor. All ranks must call this."""
        return torch.cat([part.full_tensor() for part in self.parts], self.along)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Any = None,
        **_: Any,
    ) -> DTensor:
        """The same tensor with other placements. All ranks must call this."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        everywhere = [Replicate()] * mesh.ndim
        whole = DTensor.from_local(self.full_tensor(), mesh, everywhere, run_check=False)
        return whole.redistribute(mesh, everywhere if placements is None else placements)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Not possible: raises :class:`InputError`."""
        raise refused("to_local()")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch 2.11 does not call ``__torch_dispatch__`` of a subclass of DTensor. What is not
        caught here gets to :class:`Shards` there, which refuse it."""
        kwargs = kwargs or {}
        if func in _CONVERT:
            parts = [func(part, *args[1:], **kwargs) for part in args[0].parts]
            return JoinedTensor(parts, args[0].along)
        if func is torch.Tensor.new_empty:  # sizes may be separate arguments
            sizes = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
            args = (args[0], kwargs.pop("size", sizes))
        if func in _FUNCTIONS:
            return cls.__torch_dispatch__(_FUNCTIONS[func], types, args, kwargs)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def apply(number: int) -> Any:
            own = [a.parts[number] if isinstance(a, JoinedTensor) else a for a in args]
            return func(*own, **(kwargs or {}))

        joined = [a for a in args if isinstance(a, JoinedTensor)]
        numbers = range(len(joined[0].parts) if joined else 0)
        if func in KEEPS:
            return JoinedTensor([apply(number) for number in numbers], joined[0].along)
        if func is ATEN.new_empty.default and torch.Size(args[1]) == args[0].shape:
            parts = [part.new_empty(part.shape, **(kwargs or {})) for part in args[0].parts]
            return JoinedTensor(parts, args[0].along)
        shapes = {tuple(part.shape for part in a.parts) for a in joined}
        if func is ATEN.equal.default and len(joined) == 2 and len(shapes) == 1:
            return all([apply(number) for number in numbers])
        raise refused(func)

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedTensor:
        copies: list[Any] = [part.clone() for part in self.parts]
        memo[id(self)] = made = JoinedTensor(copies, self.along)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return JoinedTensor, (self.parts, self.along)


def _shards(parts: Sequence[DTensor], dim: int) -> LocalShardsWrapper:
    """The shards of this rank and where they are in the whole tensor."""
    found, first = [], 0
    for part in parts:
        (chunk,) = part.__create_chunk_list__()
        offsets = [*chunk.offsets]
        offsets[dim] += first
        found.append((part._local_tensor, tuple(offsets)))
        first += part.shape[dim]
    kept = [pair for pair in found if pair[0].numel()] or found[:1]
    return Shards([shard for shard, _ in kept], [offsets for _, offsets in kept])
