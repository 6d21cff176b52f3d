"""Routers of :class:`tileweave.nn.MoE`: which experts a token has, and with which weights."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import linear

from tileweave.errors import require
from tileweave.nn.shards import check_sizes, described, fits_weight, local
from tileweave.ops.core.argument_types import checks_types, checks_types_first


class _Router(nn.Module):
    """A linear layer from tokens to one logit per expert, in the wider dtype of both."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_sizes("a router", 1, hidden_size=hidden_size, num_experts=num_experts)
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        with torch.no_grad():
            nn.init.uniform_(local(self.weight), -bound, bound)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, E] of tokens [T, H]."""
        weight = self.weight
        require(
            fits_weight(x, weight),
            lambda: f"a router of {described(x)}",
            f"tokens [..., {weight.shape[1]}] like its weight, {described(weight)}",
            "pass tokens of hidden_size",
        )
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return linear(x.to(dtype), weight.to(dtype)).float()


class SoftmaxTopK(_Router):
    """The default router: softmax over all experts in fp32, then the k largest weights.

    It maps x [T, H] to (weights [T, k] fp32, ids [T, k] int64). Its ``weight`` [E, H] is the same
    on every rank. Logits are computed in the wider dtype of x and ``weight``, so a router in fp32
    (``moe.gate.float()``) computes in fp32 for tokens in bf16.

    Parameters
    ----------
    hidden_size : int
        H, the size of a token.

    num_experts : int
        E, the experts of all ranks.

    top_k : int
        k, the experts per token.

    normalize : bool
        scale the k weights of a token to a sum of 1.

    device : torch.device, optional
        device of ``weight``.

    dtype : torch.dtype, optional
        dtype of ``weight``.
    """

    @checks_types_first
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, device, dtype)
        require(
            0 < top_k <= num_experts,
            f"{num_experts} experts, top_k={top_k}",
            "top_k from 1 to the number of experts",
            "pass num_experts_per_tok of the model",
        )
        self.top_k, self.normalize = top_k, normalize
        self.reset_parameters()

    @checks_types
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.logits(x).softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True) if self.normalize else weights, ids

    def extra_repr(self) -> str:
        return f"experts={self.weight.shape[0]}, top_k={self.top_k}, normalize={self.normalize}"


class SigmoidTopK(_Router):
    """The router of DeepSeek-V3: sigmoid scores, a bias that only decides the choice, and a limit
    of expert groups per token.

    It maps x [T, H] to (weights [T, k] fp32, ids [T, k] int64). The k experts are those of the
    largest ``sigmoid(logit) + e_score_correction_bias`` in the ``top_groups`` best groups, where
    the score of a group is the sum of its two largest; weights are ``sigmoid(logit)`` of the chosen
    ones.

    Parameters
    ----------
    hidden_size : int
        H, features of a token.

    num_experts : int
        E, experts of all ranks.

    top_k : int
        experts of each token.

    groups : int
        groups of experts of equal size, in order; at least two experts each, unless there is one
        group.

    top_groups : int
        groups that the experts of a token may be in.

    normalize : bool
        scale the k weights of a token to a sum of 1.

    scale : float
        all weights are multiplied by it (``routed_scaling_factor``).

    device : torch.device, optional
        device of ``weight``.

    dtype : torch.dtype, optional
        dtype of ``weight``. ``e_score_correction_bias`` [E] is an fp32 buffer of zeros, for an
        update rule of yours.

    Raises
    ------
    InputError
        if groups do not fit. Source: DeepSeek-V3, arXiv 2412.19437.
    """

    e_score_correction_bias: torch.Tensor

    @checks_types_first
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, device, dtype)
        size = num_experts // max(groups, 1)
        fits = groups >= 1 and groups * size == num_experts and (groups == 1 or size > 1)
        require(
            fits and 1 <= top_groups <= groups and 1 <= top_k <= top_groups * size,
            f"{num_experts} experts in {groups} groups, of which {top_groups}, top_k={top_k}",
            "groups of equal size, of two experts at least, that have top_k experts",
            "pass n_group, topk_group and num_experts_per_tok of the model",
        )
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.normalize, self.scale = normalize, scale
        bias = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.e_score_correction_bias)

    @checks_types
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        if self.groups > 1:
            grouped = choice.unflatten(-1, (self.groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
        ids = choice.topk(self.top_k, -1).indices
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids

    def extra_repr(self) -> str:
        return (
            f"experts={self.weight.shape[0]}, top_k={self.top_k}, groups={self.groups}, "
            f"top_groups={self.top_groups}, normalize={self.normalize}, scale={self.scale}"
        )
