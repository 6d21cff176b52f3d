"""Adapters of PEFT around linear layers: the matrices of LoRA are sharded as their layer is.

=================  =========================  ==========================  ==========================
layer              A                          B                           what is sent
=================  =========================  ==========================  ==========================
column-parallel    replicated                 output features sharded     gradient of A x: rank of A
row-parallel       input features sharded     replicated                  A x: rank of A
=================  =========================  ==========================  ==========================

In the sequence-parallel form they gather and scatter rows where their layer does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.nn.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    class_path,
    multiply,
)
from tileweave.nn.shards import is_dtensor
from tileweave.parallel.fused import SplitLinear, is_adapter
from tileweave.parallel.plans import Block, is_column, is_row
from tileweave.parallel.shared_input import SharedColumn

LORA = "peft.tuners.lora.layer"
BASE = "base_layer"


def is_plain_lora(module: Any) -> bool:
    """Whether ``module`` is LoRA around an ``nn.Linear``, without variants such as DoRA."""
    return (
        type(module).__module__ == LORA
        and type(module).__name__ == "Linear"
        and not getattr(module, "lora_variant", {})
        and not any(getattr(module, "use_dora", {}).values())
        and not module.fan_in_fan_out
        and not module.merged
        and all(type(m) is nn.Linear for m in (*module.lora_A.values(), *module.lora_B.values()))
    )


def take_base_layers(
    model: nn.Module, styles: dict[str, Any], blocks: list[Block]
) -> tuple[dict[str, Any], list[Block], list[str]]:
    """``styles`` and ``blocks`` with the layer in each LoRA in place of the LoRA, and the paths of
    those."""
    lora = [
        path
        for path, module in model.named_modules()
        if is_plain_lora(module) and (is_column(styles.get(path)) or is_row(styles.get(path)))
    ]

    def inner(path: str) -> str:
        return f"{path}.{BASE}" if path in lora else path

    inside = tuple(f"{path}." for path in lora)
    taken = {inner(p): style for p, style in styles.items() if not p.startswith(inside or "\0")}
    renamed = []
    for block in blocks:
        start = len(block.path) + 1 if block.path else 0
        paths = [f"{block.path}." * bool(block.path) + n for n in (*block.columns, block.row)]
        *columns, row = [inner(path)[start:] for path in paths]
        renamed.append(replace(block, columns=tuple(columns), row=row))
    return taken, renamed, lora


class OwnColumn(ColumnParallelLinear):
    """B of a layer that shares its module's gather: nothing is sent, and the gradient of its input
    is a partial sum, as that of the gathered input is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return multiply(input, *self.parts())


def shard_lora(module: Any, mesh: DeviceMesh, source: int | None) -> None:
    """Shard the matrices of a LoRA whose layer is sharded."""
    base: Any = module.base_layer
    base._hf_tp_plan = None  # PEFT may ask for it now
    for name in module.lora_A:
        a, b = module.lora_A[name], module.lora_B[name]
        if isinstance(base, RowParallelLinear):
            RowParallelLinear.take_over(a, mesh, source, scatter=base.scatter, dim=base.dim)
        elif base.gather and isinstance(base, SharedColumn):
            options = {"gather": False, "dim": 0, "save_gathered": False, "copies": base.copies}
            OwnColumn.take_over(b, mesh, source, **options)
        else:
            options = {"gather": base.gather, "dim": base.dim, "save_gathered": False}
            ColumnParallelLinear.take_over(b, mesh, source, **options, copies=base.copies)


def has_sharded_lora(module: Any) -> bool:
    """Whether no adapter was added to ``module``, a LoRA, after it was sharded."""
    adapters = getattr(module, "lora_A", None)
    return adapters is not None and all(is_dtensor(a.weight) for a in adapters._modules.values())


def why_not_sharded(module: nn.Module, name: str) -> str | None:
    """Why the layer ``name`` of ``module``, which was sharded, is not any more; None: it is."""
    part: Any = module
    for child in name.split("."):
        part = part._modules.get(child)
        if part is None or isinstance(part, ParallelLinear):  # None: LoRA was unloaded
            return None
        if is_adapter(part) and not all(map(is_dtensor, part.parameters())):
            break
    else:
        inner = part.children() if isinstance(part, SplitLinear) else [getattr(part, BASE, None)]
        if all(isinstance(layer, ParallelLinear) for layer in inner):
            return None
    return (
        f"which became a {class_path(part)} after tileweave.parallelize; allowed: LoRA of PEFT "
        "that was added before it, without variants such as DoRA; remedy: add or load adapters "
        "first (get_peft_model, PeftModel.from_pretrained), then call tileweave.parallelize; merge "
        "other adapters into the whole model (merge_and_unload), or leave this layer out of "
        "target_modules"
    )
