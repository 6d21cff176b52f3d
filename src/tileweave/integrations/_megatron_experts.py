"""Experts of Megatron-core: tokens are sent to their experts, and results summed, inside the
grouped matmuls.

:class:`MoELayer` keeps the router, shared experts, parameters and checkpoints of Megatron-core. It
replaces what is between: token dispatcher, experts, combine.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer as _MoELayer

from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.swiglu import swiglu

_LOG = logging.getLogger("tileweave")
_WARNED: set[str] = set()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Options of TransformerConfig that the operators do not have: the layer keeps Megatron's forward.
STOCK_WITH = {
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_shared_expert_overlap": False,
    "moe_pad_expert_input_to_capacity": False,
    "overlap_moe_expert_parallel_comm": False,
    "use_te_activation_func": False,
    "add_bias_linear": False,
    "fp8": None,
    "fp4": None,
}


def warn_once(text: str) -> None:
    """Log a warning, unless the same text was logged before."""
    if text not in _WARNED:
        _WARNED.add(text)
        _LOG.warning("%s", text)


class MoELayer(_MoELayer):
    """:func:`tileweave.dispatch_grouped_matmul` and :func:`tileweave.grouped_matmul_combine` over
    the expert-parallel group, in place of Megatron-core's token dispatcher and experts.

    A layer that the operators do not take keeps Megatron-core's forward, with one warning for each
    reason.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        reason = why_stock_experts(self)
        if reason:
            warn_once(f"MoELayer keeps the forward of Megatron-core: {reason}")
        self._ours = reason is None
        return super().forward(*args, **options)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [T, H], and what the router chose for each: probs [T, E]."""
        if not self._ours:
            return super().preprocess(hidden_states, probs, routing_map)
        self._shape, self._chosen = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing: tokens are sent by the first grouped matmul."""
        return (hidden_states, probs) if self._ours else super().dispatch(hidden_states, probs)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The weighted sum of each token's experts, for this rank's tokens."""
        if not self._ours:
            return super().routed_experts_compute(hidden_states, probs)
        chosen: Any = self._chosen
        self._chosen = None
        ids, weights = _top_k(chosen, probs, self.config.moe_router_topk)
        up, down = _weights(self.experts)
        y, plan = dispatch_grouped_matmul(
            hidden_states, up, ids, group=self.ep_group, max_tokens=self._most_tokens(ids)
        )
        rows = swiglu(y, plan) if _is_swiglu(self.config) else _activate(y, self.config)
        return grouped_matmul_combine(rows, down, plan, weights, group=self.ep_group), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Nothing: the second grouped matmul has summed."""
        return output if self._ours else super().combine(output)

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """The shape of the input, and the output of shared experts added."""
        if not self._ours:
            return super().postprocess(output, shared_expert_output)
        output = output.view(self._shape)
        return output if shared_expert_output is None else output + shared_expert_output

    def _most_tokens(self, ids: torch.Tensor) -> int | None:
        """The largest number of tokens of any rank. None: the same number on all ranks."""
        if not self.config.variable_seq_lengths:
            return None
        most = torch.tensor(ids.shape[0], device=ids.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self.ep_group)
        return int(most.item())


def why_stock_experts(layer: Any) -> str | None:
    """Why the operators do not take this layer; None if they do."""
    config, experts = layer.config, layer.experts
    for name, wanted in STOCK_WITH.items():
        found = getattr(config, name, wanted)
        if found != wanted and not (found is None and wanted is False):
            return f"{name} is {found}"
    if not isinstance(experts, (GroupedMLP, SequentialMLP)):
        return f"its experts are {type(experts).__name__}"
    if experts.tp_group.size() > 1:
        return "experts are also sharded by tensor parallelism (expert_tensor_parallel_size)"
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        return "moe_act is recomputed"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"cuda_graph_impl is {config.cuda_graph_impl}"
    dtype = next(experts.parameters()).dtype
    return None if dtype in DTYPES else f"its weights are {dtype}"


def _top_k(chosen: torch.Tensor, probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts [T, E] -> their numbers [T, k], with -1 for dropped ones, and weights."""
    taken, ids = chosen.to(torch.int8).topk(k, dim=1, sorted=False)
    ids, order = ids.sort(dim=1)  # the same bits each time
    taken = taken.gather(1, order) > 0
    weights = probs.float().gather(1, ids).masked_fill(~taken, 0.0)
    return ids.masked_fill(~taken, -1), weights


def _is_swiglu(config: Any) -> bool:
    return (
        config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and getattr(config, "activation_func_clamp_value", None) is None
        and not getattr(config, "glu_linear_offset", 0.0)
    )


def _activate(y: torch.Tensor, config: Any) -> torch.Tensor:
    """The activation as in Megatron-core's ``MLP``, of each row for itself: undefined rows stay
    undefined."""
    if not config.gated_linear_unit:
        return config.activation_func(y)
    gate, linear = y.chunk(2, dim=-1)
    if (most := getattr(config, "activation_func_clamp_value", None)) is not None:
        gate, linear = gate.clamp(max=most), linear.clamp(-most, most)
    return config.activation_func(gate) * (linear + getattr(config, "glu_linear_offset", 0.0))


def _weights(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's weights, [E_local, N, K] each.

    :class:`GroupedMLP` keeps them as [E_local, K, N], which the operators take. Those of
    :class:`SequentialMLP` are copied together in each call.
    """
    if isinstance(experts, GroupedMLP):
        count, hidden = experts.num_local_experts, experts.config.hidden_size
        up = experts.weight1.view(count, hidden, -1)
        down = experts.weight2.view(count, -1, hidden)
        return up.transpose(1, 2), down.transpose(1, 2)
    layers = experts.local_experts
    up = torch.stack([layer.linear_fc1.weight for layer in layers])
    return up, torch.stack([layer.linear_fc2.weight for layer in layers])
