"""Hugging Face transformers: tensor-parallel and expert-parallel models that call tileweave.

>>> import tileweave.integrations.transformers as tileweave_transformers
>>> tileweave_transformers.enable()
>>> model = AutoModelForCausalLM.from_pretrained(
...     name, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
... )

transformers keeps its parallel layers in a registry, by name: a model's plan says "rowwise", and
the registry has the class that shards the weight and replaces the forward of the module.
:func:`enable` replaces entries of that registry, under the same names, since PEFT and transformers
itself compare names. Parameters stay DTensors of transformers: loading, saving, FSDP, LoRA and
optimizers are its own.

===================  ==========================================================================
registry entry       with tileweave
===================  ==========================================================================
``rowwise``          one :func:`tileweave.matmul_all_reduce`, for an unquantised ``nn.Linear``
                     and for fine-grained FP8 (``FP8Linear`` with blocks of 128 x 128)
experts              :func:`tileweave.dispatch_grouped_matmul`, the activation, and
                     :func:`tileweave.grouped_matmul_combine`: ``ep_implementation="tileweave"``
                     from transformers 5.21 on; before, every expert-parallel plan
all others           as they are
===================  ==========================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tileweave.errors import InputError, require
from tileweave.integrations import _scaled_linear as fp8
from tileweave.integrations._experts import ExpertParallel
from tileweave.nn.linear import under_autocast
from tileweave.nn.shards import local
from tileweave.ops.core.argument_types import checks_types_first
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce

try:
    from transformers.distributed import tensor_parallel as _tp
except ImportError as error:
    raise InputError(
        "asked: tileweave.integrations.transformers; allowed: with transformers 5.17 or newer; "
        f"remedy: pip install 'tileweave[transformers]' ({error})"
    ) from error

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:  # transformers before 5.21
    EPImplementationInterface = None

__all__ = ["enable", "disable"]

EP_NAME = "tileweave"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOG = logging.getLogger("tileweave")


@dataclass
class _Settings:
    """What :func:`enable` changed, and with what."""

    stock: dict[str, Any] = field(default_factory=dict)  # registry entries before
    max_tokens: int | None = None
    warned: set[str] = field(default_factory=set)


_SETTINGS = _Settings()


@checks_types_first
def enable(*, experts: bool = True, max_tokens: int | None = None) -> None:
    """Let models that are loaded from now on call tileweave. A second call changes only options.

    Parameters
    ----------
    experts : bool
        Also expert parallelism. From transformers 5.21 on this makes the name "tileweave" known to
        ``DistributedConfig(ep_implementation=...)``, and changes nothing else. Before 5.21 there is
        no such name: every model that is loaded with ``enable_expert_parallel=True`` calls
        tileweave.

    max_tokens : int, optional
        The largest number of tokens that a rank has in a forward, the same on all ranks. Only where
        ranks of an expert-parallel group have different batches (``ep_size > tp_size``). None: the
        ranks compare their numbers in each layer, which waits for the device.

    Raises
    ------
    InputError
        transformers is too old, or an option is not valid.
    """
    require(
        hasattr(_tp, "RowwiseParallel") and hasattr(_tp.RowwiseParallel, "install_forward"),
        f"transformers {version('transformers')}",
        "5.17 or newer, tested with 5.17.0 and 5.24.0",
        "pip install 'tileweave[transformers]'",
    )
    require(
        max_tokens is None or max_tokens > 0,
        f"max_tokens={max_tokens}",
        "None or a positive number",
        "pass the largest number of tokens of any rank",
    )
    _SETTINGS.max_tokens = max_tokens
    _register("rowwise", Rowwise())
    if not experts:
        return
    if EPImplementationInterface is not None:
        EPImplementationInterface.register(EP_NAME, _expert_parallel)
    else:
        _register("ep_router", _tp.TensorParallelLayer())  # ids of experts and weights as they are
        _register("moe_tp_experts", Experts())


def disable() -> None:
    """Restore the registry of transformers. Models that were loaded before keep what they have."""
    for name, style in _SETTINGS.stock.items():
        _tp.ALL_PARALLEL_STYLES.register(name, style)
    _SETTINGS.stock.clear()
    if EPImplementationInterface is not None:
        EPImplementationInterface._global_mapping.pop(EP_NAME, None)


def _register(name: str, style: Any) -> None:
    styles = _tp.ALL_PARALLEL_STYLES
    if name not in _SETTINGS.stock:
        _SETTINGS.stock[name] = styles[name]
        styles.register(name, style)


def _warn_once(text: str) -> None:
    if text not in _SETTINGS.warned:
        _SETTINGS.warned.add(text)
        _LOG.warning("%s", text)


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """The tensor-parallel group of ``mesh``."""
    names = mesh.mesh_dim_names or ()
    require(
        mesh.ndim == 1 or "tp" in names,
        lambda: f"a mesh of {mesh.ndim} dimensions, named {names}",
        'one dimension, or one of the name "tp"',
        'pass mesh["..."] of the tensor-parallel dimension',
    )
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


# --- Tensor parallelism ---


class Rowwise(_tp.RowwiseParallel):
    """The style "rowwise" whose matmul and all-reduce are one operator.

    Modules that the operator does not take keep the forward of transformers: quantised ones other
    than fine-grained FP8, other modules than ``nn.Linear``, and input features that the ranks
    cannot share evenly. A warning says so, once a reason.
    """

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        group = _group_of(mesh)
        super().install_forward(module, mesh)
        if fp8.is_fp8_linear(module):
            return self._install_fp8(module, mesh, group)
        reason = _why_stock(module, dist.get_world_size(group))
        if reason is None:
            module.forward = _row_parallel_forward(module, mesh, group.group_name, module.forward)
        else:
            _warn_stock(module, reason)
        return module

    def _install_fp8(self, module: Any, mesh: Any, group: dist.ProcessGroup) -> nn.Module:
        reason = fp8.why_stock(module, dist.get_world_size(group))

        def warn(reason: str) -> None:
            _warn_stock(module, reason)

        if reason is None:
            made = fp8.row_parallel_forward(module, mesh, group.group_name, module.forward, warn)
            module.forward = made
        else:
            warn(reason)
        return module


def _warn_stock(module: nn.Module, reason: str) -> None:
    _warn_once(f"rowwise {type(module).__name__} keeps the forward of transformers: {reason}")


def _why_stock(module: Any, size: int) -> str | None:
    """Why ``module`` cannot call the operator; None: it can."""
    if getattr(module, "_hf_quantized_needs_local_tp", False):
        return "it is quantised"
    if type(module).forward is not nn.Linear.forward:
        return "it is no nn.Linear"
    if module.weight is None or module.weight.dtype not in DTYPES:
        return "its weight is not float16, bfloat16 or float32"
    features = module.weight.shape[1]  # of all ranks: it is a DTensor
    if features % size:
        return f"its {features} input features over {size} ranks are uneven"
    return None


def _row_parallel_forward(
    module: Any, mesh: Any, group: str, stock: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        # a quantiser may have replaced the weight after the style was installed
        if module.weight.dtype not in DTYPES or x.dtype not in DTYPES:
            _warn_stock(module, f"its weight is {module.weight.dtype}, its input {x.dtype}")
            return stock(x)
        if isinstance(x, DTensor):
            x = x.redistribute(mesh, [Shard(-1)]).to_local()
        operands = under_autocast(x.contiguous(), local(module.weight), local(module.bias))
        return matmul_all_reduce(*operands, group=group)

    return forward


# --- Expert parallelism ---


def _expert_parallel(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> ExpertParallel:
    """What ``ep_implementation="tileweave"`` makes of a module of experts (transformers 5.21)."""
    shared = tp_mesh.get_group() if tp_mesh.size() > 1 else None
    return ExpertParallel(experts, ep_mesh.get_group(), shared, _SETTINGS.max_tokens)


class Experts(_tp.MoeExpertsParallel):
    """The style "moe_tp_experts" before transformers 5.21: expert parallelism where experts are
    sharded by expert, else as it is."""

    def install_forward(self, module: nn.Module, mesh: Any, **options: Any) -> nn.Module:
        by_expert = any(
            isinstance(p, DTensor) and p.placements == (Shard(0),)
            for p in module.parameters(recurse=False)
        )
        if not by_expert:
            return super().install_forward(module, mesh, **options)
        group = _group_of(mesh)
        experts = ExpertParallel(module, group, group)

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            with self.context_around_forward(module, mesh):
                return experts(local(hidden_states), top_k_index, local(top_k_weights))

        module.forward = forward
        return module
