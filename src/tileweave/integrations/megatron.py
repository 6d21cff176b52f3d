"""Megatron-core: layers of a specification whose linear layers call tileweave.

>>> from tileweave.integrations.megatron import get_gpt_layer_spec
>>> model = GPTModel(config, get_gpt_layer_spec(), ...)

A model of Megatron-core is built from a specification, which names the class of each part.
:func:`with_tileweave` copies one and replaces three classes by subclasses, of which only the
computation differs: initialization, checkpoints (``sharded_state_dict``) and gradients of
replicated parameters are Megatron's.

=========================  ===================  ==================================================
class                      sequence parallel    with tileweave
=========================  ===================  ==================================================
``ColumnParallelLinear``   yes                  :func:`tileweave.all_gather_matmul`
``RowParallelLinear``      yes                  :func:`tileweave.matmul_reduce_scatter`
``RowParallelLinear``      no                   :func:`tileweave.matmul_all_reduce`
``MoELayer``               either               :func:`tileweave.dispatch_grouped_matmul` and
                                                :func:`tileweave.grouped_matmul_combine`
=========================  ===================  ==================================================
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tileweave.errors import InputError, require
from tileweave.ops.core.argument_types import reading
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter

try:
    from megatron.core import tensor_parallel as _tp
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_layer as _moe
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tileweave.integrations._megatron_experts import DTYPES, MoELayer, warn_once
except ImportError as error:
    raise InputError(
        "asked: tileweave.integrations.megatron; allowed: with megatron-core 0.16; "
        f"remedy: pip install 'tileweave[megatron]' ({error})"
    ) from error


__all__ = ["get_gpt_layer_spec", "with_tileweave"]


def get_gpt_layer_spec(*args: Any, **options: Any) -> ModuleSpec:
    """``get_gpt_layer_local_spec`` of Megatron-core, with the layers of this module.

    Parameters
    ----------
    *args : Any
        As Megatron's function takes them: ``num_experts``, ``qk_layernorm`` and others.

    **options : Any
        The same, by name.

    Returns
    -------
    ModuleSpec
        For ``GPTModel``.

    Raises
    ------
    InputError
        megatron-core has another version than 0.16 (on import), or nothing can be replaced.
    """
    return with_tileweave(get_gpt_layer_local_spec(*args, **options))


def with_tileweave(spec: Any) -> Any:
    """A copy of ``spec`` in which tileweave's layers replace Megatron's own.

    Parameters
    ----------
    spec : ModuleSpec
        A specification of local layers. Classes that are not Megatron-core's own, such as those of
        Transformer Engine, stay as they are.

    Returns
    -------
    ModuleSpec
        The copy.

    Raises
    ------
    InputError
        Nothing in ``spec`` can be replaced.
    """
    replaced: list[str] = []
    with reading(f"a {type(spec).__name__}", "a ModuleSpec", "call get_gpt_layer_local_spec"):
        found = _walk(copy.deepcopy(spec), replaced)
    require(
        bool(replaced),
        "a specification without Megatron-core's ColumnParallelLinear or RowParallelLinear",
        "one of local layers",
        "build it with get_gpt_layer_local_spec; Transformer Engine's layers cannot be replaced",
    )
    return found


def _walk(part: Any, replaced: list[str]) -> Any:
    if isinstance(part, ModuleSpec):
        part.module = _walk(part.module, replaced)
        if part.submodules is not None:
            for name, inner in vars(part.submodules).items():
                setattr(part.submodules, name, _walk(inner, replaced))
        return part
    if isinstance(part, type) and part in _REPLACED_BY:
        replaced.append(part.__name__)
        return _REPLACED_BY[part]
    return part


# --- Layers ---


class ColumnParallelLinear(_tp.ColumnParallelLinear):
    """With sequence parallelism the gather and the matmul are one operator. Without it the input is
    the same on all ranks, and nothing is sent in the forward: Megatron's own."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.sequence_parallel or not _takes(
            self, self.weight if weight is None else weight
        ):
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        bias = None if self.skip_bias_add else self.bias
        operand, main_grad = _with_main_grad(self, weight)
        y = all_gather_matmul(input_, operand, bias, group=self.tp_group, main_grad=main_grad)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            y = _tp.gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_tp.RowParallelLinear):
    """The matmul and the reduce-scatter, or the all-reduce, are one operator.

    The bias is added after it: Megatron sums the gradients of parameters of sequence parallelism
    itself.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.input_is_parallel or not _takes(self, self.weight):
            return super().forward(input_)
        operand, main_grad = _with_main_grad(self, self.weight)
        multiply: Any = matmul_reduce_scatter if self.sequence_parallel else matmul_all_reduce
        y = multiply(input_, operand, group=self.tp_group, main_grad=main_grad)
        if self.skip_bias_add or self.bias is None:
            return y, self.bias if self.skip_bias_add else None
        return y + self.bias, None


_REPLACED_BY: dict[Any, Any] = {
    _tp.ColumnParallelLinear: ColumnParallelLinear,
    _tp.RowParallelLinear: RowParallelLinear,
    _moe.MoELayer: MoELayer,
}


def _takes(layer: Any, weight: torch.Tensor) -> bool:
    """Whether the operators take this layer; a warning says why not, once per reason."""
    reason = _why_stock(layer, weight)
    if reason:
        warn_once(f"{type(layer).__name__} keeps the forward of Megatron-core: {reason}")
    return reason is None


def _why_stock(layer: Any, weight: torch.Tensor) -> str | None:
    config = layer.config
    if layer.is_expert:
        return "it belongs to an expert"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute"
    if config._cpu_offloading_context is not None:
        return "activations are offloaded to the CPU"
    if not layer.gradient_accumulation_fusion:
        return None
    if hasattr(weight, "__fsdp_param__"):
        return "gradient_accumulation_fusion under Megatron-FSDP"
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype != torch.float32:
        return f"main_grad is {main_grad.dtype}"
    return None


def _with_main_grad(layer: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight to pass, and where its gradient is added (``gradient_accumulation_fusion``)."""
    main_grad = getattr(weight, "main_grad", None) if layer.gradient_accumulation_fusion else None
    if main_grad is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return weight, None
    return _AddedToMainGrad.apply(weight), main_grad


class _AddedToMainGrad(torch.autograd.Function):
    """Tells Megatron that the gradient of the weight is in ``main_grad``.

    Its data-parallel wrapper acts on the hook of ``weight.grad``, so it needs some tensor there. It
    looks at ``grad_added_to_main_grad`` to know that the tensor has no meaning.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
