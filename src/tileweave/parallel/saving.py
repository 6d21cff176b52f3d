"""``save_pretrained`` of sharded models: rank 0 writes whole weights under the stock names.

``save_pretrained`` of transformers gathers what transformers itself has sharded, no other DTensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tileweave.nn.linear import ParallelLinear
from tileweave.nn.made_classes import make_class
from tileweave.nn.replicated import RunningHooks
from tileweave.nn.shards import is_dtensor
from tileweave.parallel.fused import SplitLinear, is_adapter


def save_whole(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` and of models in it gather the weights first."""
    for part in model.modules():
        method = getattr(type(part), "save_pretrained", None)
        if method is not None and is_adapter(part) and not isinstance(part, SavesAdapters):
            part.__class__ = _class_of(type(part), SavesAdapters)
            continue
        takes_state = method is not None and "state_dict" in signature(method).parameters
        if takes_state and not isinstance(part, SavesWhole):
            part.__class__ = _class_of(type(part), SavesWhole)


class SavesWhole:
    """A model of DTensors whose ``save_pretrained`` writes whole weights. All ranks must call it;
    it returns when rank 0 has written them, and raises on all ranks if it could not."""

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        saves = super().save_pretrained  # type: ignore[misc]
        if state_dict is not None or options.get("distributed_checkpoint"):
            return saves(save_directory, is_main_process, state_dict, **options)
        found, meshes = _whole_state(self)
        writes = is_main_process and dist.get_rank() == 0
        with _failing_together(save_directory, meshes):
            return saves(save_directory, is_main_process=writes, state_dict=found, **options)


class SavesAdapters:
    """A model of PEFT, whose ``save_pretrained`` writes the adapters. All ranks must call it."""

    def get_prompt(self, *args: Any, **options: Any) -> Any:
        """The prompt of prompt tuning, which ``generate`` asks for outside of forward."""
        model: Any = self
        hooks = RunningHooks([m._running for m in model.modules() if hasattr(m, "_running")])
        try:
            hooks.before()
            return super().get_prompt(*args, **options)  # type: ignore[misc]
        finally:
            hooks.after()

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Write whole adapters on rank 0, as PEFT does; raise on all ranks if it could not."""
        model: Any = self
        base = {
            f"{path}.weight"
            for path, part in model.named_modules()
            if isinstance(part, (ParallelLinear, SplitLinear)) and "lora_" not in path
        }
        found, meshes = _whole_state(self, base)
        with _failing_together(save_directory, meshes):
            if dist.get_rank() == 0 and options.get("is_main_process", True):
                given = {"state_dict": found, **options}
                super().save_pretrained(save_directory, *args, **given)  # type: ignore[misc]


@cache
def _class_of(cls: type, mixin: type) -> type:
    return make_class(cls, mixin, {}, _class_of, mixin)


def _whole_state(model: Any, but: Collection[str] = ()) -> tuple[dict[str, Any], list[Any]]:
    """The state of ``model`` on the CPU of rank 0, nothing on others; and the meshes it is on.
    Tensors that share memory, such as tied embeddings, stay one. ``but``: names to leave out."""
    writes = dist.get_rank() == 0
    found: dict[str, Any] = {}
    gathered: dict[Any, Any] = {}
    meshes: dict[Any, None] = {}
    for name, value in model.state_dict().items():
        if name in but:
            continue
        key: Any = name
        if is_dtensor(value):
            meshes[value.device_mesh] = None
            shard = getattr(value, "parts", (value,))[0]._local_tensor
            key = (shard.data_ptr(), value.shape, value.stride()) if shard.numel() else name
            if key not in gathered:
                whole = value.full_tensor()
                gathered[key] = whole.cpu() if writes else None
            value = gathered[key]
        elif isinstance(value, torch.Tensor):
            value = value.cpu()
        if writes:
            found[name] = value
    return found, list(meshes)


@contextmanager
def _failing_together(save_directory: Any, meshes: list[Any]) -> Iterator[None]:
    """Raise on all ranks of ``meshes`` if one fails inside; all leave together."""
    failed = True
    try:
        yield
        failed = False
    finally:
        told = any([_any_failed(failed, mesh) for mesh in meshes])
    if told:
        raise RuntimeError(f"another rank could not save to {save_directory}: see its error")


def _any_failed(failed: bool, mesh: Any) -> bool:
    """Whether a rank of ``mesh`` failed."""
    told = torch.tensor(int(failed), device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(told, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return bool(told)
