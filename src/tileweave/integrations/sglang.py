"""SGLang: the linear layers of its sequence parallelism call tileweave.

    TILEWEAVE_SGLANG=1 python -m sglang.launch_server ... --tp-size 2 --enable-layernorm-sp

SGLang calls :func:`register` in every process that it starts, by the entry point
``sglang.srt.plugins`` of this package; without the variable it does nothing. It puts hooks around
the two functions through which all linear layers of a prefill go under ``--enable-layernorm-sp``:

============================  ==========================================
function of ``layernorm_sp``  with tileweave
============================  ==========================================
``column_parallel_g_matmul``  :func:`tileweave.all_gather_matmul`
``row_parallel_gbar_matmul``  :func:`tileweave.matmul_reduce_scatter`
============================  ==========================================

Quantised layers, layers with a bias, other dtypes than float16 and bfloat16, and layers for which
SGLang has chosen CUTLASS keep SGLang's function.

The hooks were tested alone, without SGLang's server: see ``docs/integrations/sglang.md``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = ["register"]

VARIABLE = "TILEWEAVE_SGLANG"
MODULE = "sglang.srt.layers.layernorm_sp"
DTYPES = (torch.float16, torch.bfloat16)
Hook = Callable[..., torch.Tensor]
_LOG = logging.getLogger("sglang.tileweave")  # SGLang shows loggers below its own


def register() -> None:
    """Register both hooks with SGLang if ``TILEWEAVE_SGLANG=1``. SGLang applies them."""
    if os.environ.get(VARIABLE) != "1":
        return
    registry = import_module("sglang.srt.plugins.hook_registry")
    unquantised = import_module("sglang.srt.layers.quantization.unquant").UnquantizedLinearMethod
    found = hooks(import_module(MODULE), unquantised)
    for name, hook in found.items():
        registry.HookRegistry.register(f"{MODULE}.{name}", hook, registry.HookType.AROUND)
    _LOG.info("tileweave computes %s", " and ".join(found))


def hooks(layernorm_sp: Any, unquantised: type) -> dict[str, Hook]:
    """The hooks by the name of their function: ``hook(original, linear, x, bias)``.

    Parameters
    ----------
    layernorm_sp : module
        SGLang's module of that name.

    unquantised : type
        SGLang's ``UnquantizedLinearMethod``.
    """

    def takes(linear: Any) -> bool:
        return (
            linear.bias is None
            and type(linear.quant_method) is unquantised
            and linear.weight.dtype in DTYPES
            and not getattr(linear, "_sp_use_cutlass", False)
        )

    def group_name() -> str:
        return layernorm_sp.get_parallel().tp_group.device_group.group_name

    def column(original: Hook, linear: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        if not takes(linear):
            return original(linear, x, bias)
        y = all_gather_matmul(x.contiguous(), linear.weight, group=group_name())
        return y[: layernorm_sp.sp_num_tokens()]

    def row(original: Hook, linear: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        if not takes(linear):
            return original(linear, x, bias)
        missing = -x.shape[0] % layernorm_sp.get_parallel().tp_group.world_size
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
        return matmul_reduce_scatter(x, linear.weight, group=group_name())

    return {"column_parallel_g_matmul": column, "row_parallel_gbar_matmul": row}
