"""A mixture of experts whose experts are sharded over a group: a layer as in Mixtral, Qwen3-MoE or
DeepSeek models."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, silu

from tileweave.errors import require
from tileweave.nn.linear import fill_shard, under_autocast
from tileweave.ops.core.registry import group_of, name_of
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.swiglu import swiglu


class SoftmaxTopK(nn.Module):
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

    device, dtype : optional
        of ``weight``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        logits = linear(x.to(dtype), self.weight.to(dtype))
        weights, ids = logits.float().softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True) if self.normalize else weights, ids

    def extra_repr(self) -> str:
        return f"experts={self.weight.shape[0]}, top_k={self.top_k}, normalize={self.normalize}"


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases: the shared expert. It is replicated and
    computes own tokens only."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, False, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """This rank's experts, stacked: ``gate_up_proj`` [E / R, 2 I, H] (gate rows, then up rows) and
    ``down_proj`` [E / R, H, I]."""

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        group_name: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.group_name = group_name
        self.gate_up_proj = nn.Parameter(
            torch.empty(count, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(count, hidden_size, intermediate_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            fill_shard(parameter, 1 / math.sqrt(parameter.shape[2]), self.group_name)


class MoE(nn.Module):
    """``sum over its k experts of weight * expert(x)`` for each token, plus a shared expert.

    Tokens and experts are sharded over the group; the shared expert is optional.

    ==============================  ==================  ======================================
    gate.weight                     [E, H]              router; the same on every rank
    experts.gate_up_proj            [E / R, 2 I, H]     SwiGLU experts of this rank, stacked
    experts.down_proj               [E / R, H, I]
    shared_experts.*_proj.weight    as in nn.Linear     optional; the same on every rank
    x                               [..., H]            this rank's tokens
    y                               [..., H]            of the same shape and dtype
    ==============================  ==================  ======================================

    Names and layouts are those of ``Qwen3MoeSparseMoeBlock`` and ``MixtralSparseMoeBlock`` of
    transformers 5 (experts stacked), and of ``DeepseekV3MoE`` for the shared expert.
    :meth:`load_whole_state_dict` reads the state_dict of such a block.

    Parameters
    ----------
    hidden_size : int
        H, the size of a token.

    intermediate_size : int
        I, the inner size of an expert.

    num_experts : int
        E, the experts of all ranks; a multiple of R.

    top_k : int
        k, the experts per token.

    shared_intermediate_size : int
        inner size of the shared expert; 0: no shared expert.

    normalize : bool
        scale the k softmax weights of a token to a sum of 1 (``norm_topk_prob``).

    router : nn.Module, optional
        replaces :class:`SoftmaxTopK`. It maps x [T, H] to (weights [T, k] fp32, ids [T, k]). Ids
        count the experts of all ranks; -1 is no expert.

    max_tokens : int, optional
        the largest number of tokens on any rank, the same on all ranks. None: all ranks pass the
        same number of tokens.

    group : ProcessGroup, optional
        the ranks that share the experts; None is the default group.

    device, dtype : optional
        of the parameters.

    Raises
    ------
    InputError
        if ``num_experts`` is not a multiple of R, ``top_k`` is larger, or x does not fit. For
        other errors of a call see ``tileweave.dispatch_grouped_matmul`` and
        ``tileweave.grouped_matmul_combine``.

    Notes
    -----
    Use the same seed on all ranks before making the layer. Router and shared expert are replicated
    and are then equal on all ranks. Experts are drawn with a generator per rank and differ.

    Gradients of experts are complete: they include the tokens of all ranks. Gradients of router and
    shared expert include own tokens only; sum them over the group as for any replicated parameter.
    Either all ranks run backward or none does, and x requires a gradient on all ranks or on none,
    also on ranks without tokens; see ``tileweave.dispatch_grouped_matmul``.

    Between the two matmuls each tensor of rows has R * max_tokens * k rows, however tokens are
    routed.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int = 0,
        normalize: bool = True,
        router: nn.Module | None = None,
        max_tokens: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group_name = name_of(group)
        self.world_size = dist.get_world_size(group_of(self.group_name))
        self.hidden_size, self.num_experts, self.max_tokens = hidden_size, num_experts, max_tokens
        asked = f"{num_experts} experts over {self.world_size} ranks, top_k={top_k}"
        fits = num_experts % self.world_size == 0 and 0 < top_k <= num_experts
        require(
            fits,
            asked,
            "a multiple of the world size, and top_k from 1 to the number of experts",
            "choose another group",
        )
        if router is None:
            router = SoftmaxTopK(hidden_size, num_experts, top_k, normalize, device, dtype)
        self.gate = router
        count = num_experts // self.world_size
        self.experts = Experts(
            count, hidden_size, intermediate_size, self.group_name, device, dtype
        )
        self.shared_experts = None
        if shared_intermediate_size:
            self.shared_experts = GatedMLP(hidden_size, shared_intermediate_size, device, dtype)

    def load_whole_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state_dict of the whole layer, with all experts stacked; each rank takes its
        own.

        Raises
        ------
        InputError
            if an ``experts.*`` tensor does not have all E experts.
        """
        first = dist.get_rank(group_of(self.group_name)) * (self.num_experts // self.world_size)
        mine = slice(first, first + self.num_experts // self.world_size)
        stacked = {name: tensor for name, tensor in state.items() if name.startswith("experts.")}
        # a shard, or the tensor of another layer, would be sliced, too, and fit on some ranks
        for name, tensor in stacked.items():
            require(
                tensor.dim() > 0 and tensor.shape[0] == self.num_experts,
                f"{name} {tuple(tensor.shape)}",
                f"all {self.num_experts} experts of the layer, stacked",
                "pass the state_dict of the whole layer, or this rank's own to load_state_dict",
            )
        self.load_state_dict({**state, **{name: tensor[mine] for name, tensor in stacked.items()}})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fits = x.dim() > 0 and x.shape[-1] == self.hidden_size
        require(
            fits,
            lambda: f"x {tuple(x.shape)}",
            f"[..., {self.hidden_size}]",
            "pass tokens of hidden_size",
        )
        # an x of two dimensions stays a view, which may have any strides
        tokens = x.reshape(-1, self.hidden_size).contiguous()
        weights, ids = self.gate(tokens)
        rows, up, down = under_autocast(tokens, self.experts.gate_up_proj, self.experts.down_proj)
        y, plan = dispatch_grouped_matmul(
            rows, up, ids.contiguous(), group=self.group_name, max_tokens=self.max_tokens
        )
        z = grouped_matmul_combine(
            swiglu(y, plan), down, plan, weights.contiguous(), group=self.group_name
        )
        if self.shared_experts is not None:
            z = z + self.shared_experts(tokens)
        return z.view(x.shape)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, experts={self.num_experts} / {self.world_size} ranks"
        )
