"""Experts of torchtitan: tokens are sent to their experts, and results summed, inside the grouped
matmuls.

torchtitan's ``RoutedExperts`` calls a token dispatcher, experts, and the dispatcher again. Here the
dispatcher only passes on the tokens and where they go, and the experts do the rest. Router, shared
experts, parameters and checkpoints stay torchtitan's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.config.override import derive
from torchtitan.models.common import moe as _moe
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss import moe as _gpt_oss

from tileweave.nn.gated_experts import bias_of_rows, bias_of_tokens
from tileweave.nn.shards import local
from tileweave.ops.core.registry import name_of
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.swiglu import swiglu

DTYPE = torch.bfloat16  # of experts, as torchtitan's own
_LOG = logging.getLogger("tileweave")


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a call go.

    ids : [T, k], experts of each token.
    scores : [T, k], float32, the weights of the sum over a token's experts.
    group : the ranks that share the experts.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    group: Any


class TokenDispatcher(AllToAllTokenDispatcher):
    """Passes on tokens [T, D] as they are. Without expert parallelism it is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[Any, Any, Any]:
        if self.ep_mesh is None:
            return super().dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        group = self.ep_mesh.get_group()
        return x_TD, Routing(topk_expert_ids_TK, topk_scores_TK, group), None

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: Any,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        if self.ep_mesh is None:
            return super().combine(routed_output_RD, metadata, x_TD)
        if spmd.is_type_checking():
            spmd.assert_type(routed_output_RD, spmd.get_local_type(x_TD))
        return routed_output_RD


class GroupedExperts(_moe.GroupedExperts):
    """SwiGLU experts in bfloat16, as torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(_moe.GroupedExperts.Config):
        pass

    def forward(self, x: torch.Tensor, routing: Any) -> torch.Tensor:
        if not isinstance(routing, Routing):
            return super().forward(x, routing)
        with spmd.no_typecheck():
            # one gather of tokens for both, so the two weights are copied together
            gate_up = torch.cat([local(self.w1_EFD).to(DTYPE), local(self.w3_EFD).to(DTYPE)], dim=1)
            y, plan = _sent(x, gate_up, routing)
            return _summed(swiglu(y, plan), local(self.w2_EDF), plan, routing, x)


class GptOssGroupedExperts(_gpt_oss.GptOssGroupedExperts):
    """Experts of gpt-oss: biases, and the clamped SwiGLU, in bfloat16 as torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(_gpt_oss.GptOssGroupedExperts.Config):
        pass

    def forward(self, x: torch.Tensor, routing: Any) -> torch.Tensor:
        if not isinstance(routing, Routing):
            return super().forward(x, routing)
        with spmd.no_typecheck():
            y, plan = _sent(x, local(self.mlp1_weight_EGD).to(DTYPE), routing)
            y = y + bias_of_rows(local(self.mlp1_bias_EG), plan).to(y.dtype)
            rows = _gpt_oss.swiglu(y, limit=self.swiglu_limit).contiguous()
            z = _summed(rows, local(self.mlp2_weight_EDF), plan, routing, x)
            ids, scores = routing.ids.contiguous(), routing.scores.float().contiguous()
            bias = local(self.mlp2_bias_ED).float()
            return z + bias_of_tokens(bias, ids, scores, name_of(routing.group)).type_as(z)


def _sent(x: torch.Tensor, weight: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Any]:
    ids = routing.ids.contiguous()
    return dispatch_grouped_matmul(x.to(DTYPE), weight, ids, group=routing.group)


def _summed(
    rows: torch.Tensor, weight: torch.Tensor, plan: Any, routing: Routing, x: torch.Tensor
) -> torch.Tensor:
    scores = routing.scores.float().contiguous()
    z = grouped_matmul_combine(rows, weight.to(DTYPE), plan, scores, group=routing.group)
    return z.type_as(x)


_REPLACED_BY: dict[type, Any] = {
    _moe.GroupedExperts.Config: GroupedExperts.Config,
    _gpt_oss.GptOssGroupedExperts.Config: GptOssGroupedExperts.Config,
}


def with_tileweave(config: Any) -> Any:
    """The configuration of routed experts that call tileweave. One that it does not take is
    returned as it is, with a warning."""
    reason = _why_stock(config)
    if reason is not None:
        _LOG.warning("routed experts stay torchtitan's: %s", reason)
        return config
    experts, dispatcher = config.inner_experts, config.token_dispatcher
    return replace(
        config,
        inner_experts=derive(experts, _REPLACED_BY[type(experts)]),
        token_dispatcher=derive(dispatcher, TokenDispatcher.Config),
    )


def _why_stock(config: Any) -> str | None:
    if type(config.inner_experts) not in _REPLACED_BY:
        return f"the experts are {type(config.inner_experts).__qualname__}"
    if type(config.token_dispatcher) is not AllToAllTokenDispatcher.Config:
        return f"the token dispatcher is {type(config.token_dispatcher).__qualname__}"
    return None
