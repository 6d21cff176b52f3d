"""Dropout in the all-reduce form: ranks with other random numbers would go on with other
activations, where all take them to be the same."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from tileweave.errors import require
from tileweave.nn.shards import local
from tileweave.ops.core.registry import group_of


def check_numbers(model: nn.Module, parts: list[nn.Module], group_name: str) -> None:
    """Let ranks compare the states of their generators in the first call of ``model`` in training,
    if ``parts`` of it have dropout that sees activations of all ranks."""
    dropping = {part for module in parts for part in module.modules() if _drops(part)}
    path = next((path for path, part in model.named_modules() if part in dropping), None)
    if path is not None:
        model.register_forward_pre_hook(_FirstCall(path, group_name).before)


def _drops(module: Any) -> bool:
    """Whether ``module`` is a dropout, or has the probability of one. In an attention each rank may
    drop what it wants of its own heads."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0 and "drop" in name and "att" not in name
        for name, value in vars(module).items()
    )


class _FirstCall:
    """The hook of a model. A copy of the model has its own."""

    def __init__(self, path: str, group_name: str) -> None:
        self.path, self.group_name, self.done = path, group_name, False

    def before(self, model: nn.Module, _: Any) -> None:
        if self.done or not model.training or torch.compiler.is_compiling():
            return
        parameter = local(next(model.parameters()))
        device = parameter.device
        if parameter.is_meta or hasattr(parameter, "fake_mode"):
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self.done = True
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        own = torch.tensor([zlib.crc32(bytes(state.tolist()))], device=device)
        group = group_of(self.group_name)
        all_of = own.new_empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(all_of, own, group=group)
        require(
            bool((all_of == own).all()),
            f"training of {type(model).__name__}, which has dropout in {self.path or 'it'}, with "
            "random generators in other states on other ranks of the tensor-parallel group",
            "the same state, since all ranks drop the same activations",
            "call torch.manual_seed with the same seed on all ranks of the group before the first "
            "call, or pass sequence_parallel=True to tileweave.parallelize",
        )
