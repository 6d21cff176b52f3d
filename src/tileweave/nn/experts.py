"""A mixture of experts whose experts are sharded over a group: a layer as in Mixtral, Qwen3-MoE or
DeepSeek models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, pad, relu, silu

from tileweave.errors import require
from tileweave.nn.linear import fill_shard, under_autocast
from tileweave.nn.moe_configs import options_of
from tileweave.nn.replicated import make_replicated
from tileweave.nn.routers import SigmoidTopK, SoftmaxTopK
from tileweave.nn.shards import ShardedModule, is_dtensor, local, mesh_of, sharded
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.replicated import copy_to_group, gather_parts, own_part
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu

# Functions of an expert's rows [gate, up]; names of transformers' ``hidden_act``.
ACTIVATIONS = {
    "silu": silu,
    "swiglu": silu,
    "gelu": gelu,
    "geglu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}
CLAMPED = "clamped_swiglu"  # of gpt-oss
ALPHA, LIMIT = 1.702, 7.0
_ACTIVATION = "hidden_act"  # in the metadata of a state_dict


def activate(y: torch.Tensor, plan: RoutingPlan, hidden_act: str) -> torch.Tensor:
    """The activation of each row [gate, up] of ``plan``; undefined rows stay undefined."""
    if hidden_act in ("silu", "swiglu"):
        return swiglu(y, plan)
    gate, up = y.chunk(2, -1)
    if hidden_act == CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * (ALPHA * gate).sigmoid() * (up + 1)).contiguous()
    return (ACTIVATIONS[hidden_act](gate) * up).contiguous()


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` without biases: the shared expert. It is replicated and
    computes own tokens only."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.act = ACTIVATIONS[hidden_act]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, False, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, False, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Experts(ShardedModule):
    """All experts, stacked, DTensors sharded by expert: ``gate_up_proj`` [E, 2 I, H] (gate rows,
    then up rows) and ``down_proj`` [E, H, I]; with biases also ``gate_up_proj_bias`` [E, 2 I] and
    ``down_proj_bias`` [E, H].

    Each rank has ``each`` = ceil(E / R) experts in order, the last ranks fewer or none.
    """

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        group: Group | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        from torch.distributed.tensor import Shard

        super().__init__()
        self.group_name, self.hidden_size = name_of(group), hidden_size
        self.intermediate_size = intermediate_size
        rank, size = rank_and_size(self.group_name)
        self.each = -(-count // size)
        mine = max(min(self.each, count - rank * self.each), 0)
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (2 * intermediate_size, hidden_size),
            "down_proj": (hidden_size, intermediate_size),
        }
        if bias:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        for name, shape in shapes.items():
            shard = torch.empty(mine, *shape, device=device, dtype=dtype)
            mesh = mesh_of(group, shard.device)
            setattr(self, name, sharded(shard, mesh, Shard(0), (count, *shape)))
        self.reset_parameters()

    def padded(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard`` of a parameter with experts of zeros, which no token has: operators take as
        many on each rank."""
        missing = self.each - shard.shape[0]
        return pad(shard, (0, 0) * (shard.dim() - 1) + (0, missing)) if missing else shard

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                inner = self.hidden_size if "gate_up" in name else self.intermediate_size
                fill_shard(local(parameter), 1 / math.sqrt(inner), self.group_name)


class MoE(nn.Module):
    """``sum over its k experts of weight * expert(x)`` for each token, plus a shared expert.

    Tokens and experts are sharded over the group; the shared expert is optional.

    ==============================  ==================  ======================================
    gate.weight                     [E, H]              router; the same on every rank
    experts.gate_up_proj            [E, 2 I, H]         experts, stacked; ceil(E / R) on each rank
    experts.down_proj               [E, H, I]
    experts.gate_up_proj_bias       [E, 2 I]            with ``bias``
    experts.down_proj_bias          [E, H]
    shared_experts.*_proj.weight    as in nn.Linear     optional; the same on every rank
    x                               [..., H]            tokens, this rank's or of all ranks
    y                               [..., H]            of the same shape and dtype
    ==============================  ==================  ======================================

    Parameters are DTensors, ``Shard(0)`` for experts and ``Replicate()`` for router and shared
    expert.

    Names and layouts are those of ``Qwen3MoeSparseMoeBlock`` and ``MixtralSparseMoeBlock`` of
    transformers 5 (experts stacked), and of ``DeepseekV3MoE`` for the shared expert.
    ``load_state_dict`` reads the state_dict of such a block. It does not have the activation: make
    the layer with :meth:`from_config`, or pass the ``hidden_act`` of the configuration. The
    state_dict of an MoE has it in its metadata, and another activation is refused.

    Parameters
    ----------
    hidden_size : int
        H, the size of a token.

    intermediate_size : int
        I, the inner size of an expert.

    num_experts : int
        E, the experts of all ranks. If it is not a multiple of R, the last ranks have fewer than
        ceil(E / R) or none, and copy their experts in each call, padded with zeros.

    top_k : int
        k, the experts per token.

    shared_intermediate_size : int
        inner size of the shared expert; 0: no shared expert.

    hidden_act : str
        activation of experts: "silu" (SwiGLU), "gelu" or "gelu_pytorch_tanh" (GeGLU), "relu", or
        "clamped_swiglu" (of gpt-oss, with gate rows before up rows).

    bias : bool
        whether experts have biases.

    tokens : str
        "own": each rank has its tokens. "replicated": all ranks have the same tokens, as after a
        tensor-parallel attention; each computes a slice of them, and results are gathered.

    normalize : bool
        scale the k softmax weights of a token to a sum of 1 (``norm_topk_prob``).

    router : nn.Module, optional
        replaces :class:`SoftmaxTopK`, such as :class:`SigmoidTopK`. It maps x [T, H] to (weights
        [T, k] fp32, ids [T, k]). Ids count the experts of all ranks; -1 is no expert.

    max_tokens : int, optional
        the largest number of tokens on any rank, the same on all ranks. None: all ranks pass the
        same number of tokens.

    group : ProcessGroup, DeviceMesh of one dimension, or str, optional
        the ranks that share the experts; None is the default group.

    device, dtype : optional
        of the parameters.

    Raises
    ------
    InputError
        if ``top_k`` is larger than ``num_experts``, the activation is unknown or not that of a
        loaded state_dict, or x does not fit. For other errors of a call see
        ``tileweave.dispatch_grouped_matmul`` and ``tileweave.grouped_matmul_combine``.

    Notes
    -----
    Use the same seed on all ranks before making the layer. Router and shared expert are replicated
    and are then equal on all ranks. Experts are drawn with a generator per rank and differ.

    All gradients are complete: those of experts include the tokens of all ranks, those of router
    and shared expert are summed over ranks in backward.
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
        hidden_act: str = "silu",
        bias: bool = False,
        tokens: str = "own",
        normalize: bool = True,
        router: nn.Module | None = None,
        max_tokens: int | None = None,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group_name = name_of(group)
        self.world_size = dist.get_world_size(group_of(self.group_name))
        self.hidden_size, self.num_experts, self.max_tokens = hidden_size, num_experts, max_tokens
        require(
            0 < top_k <= num_experts,
            f"{num_experts} experts, top_k={top_k}",
            "top_k from 1 to the number of experts",
            "pass num_experts_per_tok of the model",
        )
        known = (*ACTIVATIONS, CLAMPED)[: len(ACTIVATIONS) + (not shared_intermediate_size)]
        require(
            hidden_act in known,
            f"hidden_act={hidden_act!r}",
            ", ".join(known),
            "pass one of these, or call the operators with an activation of yours",
        )
        require(
            tokens in ("own", "replicated"),
            f"tokens={tokens!r}",
            '"own" or "replicated"',
            "pass one",
        )
        self.hidden_act, self.tokens = hidden_act, tokens
        if router is None:
            router = SoftmaxTopK(hidden_size, num_experts, top_k, normalize, device, dtype)
        self.gate = router
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, bias, group, device, dtype
        )
        self.shared_experts = None
        if shared_intermediate_size:
            self.shared_experts = GatedMLP(
                hidden_size, shared_intermediate_size, hidden_act, device, dtype
            )
        # each rank applies them to its own tokens
        mesh = mesh_of(group, next(self.experts.parameters()).device)
        for module in (self.gate, self.shared_experts):
            if module is not None:
                make_replicated(module, mesh, sums=True)
        self.register_state_dict_post_hook(_note_activation)

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        tokens: str = "own",
        max_tokens: int | None = None,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MoE:
        """The layer of a model's configuration: sizes, router, shared expert and activation.

        Parameters
        ----------
        config : mapping or object with attributes
            As in transformers, of model_type "mixtral", "qwen3_moe" or "deepseek_v3".

        tokens, max_tokens, group, device, dtype
            As of the class.

        Raises
        ------
        InputError
            If the model is another one, something is missing, or ``hidden_act`` is an activation
            that the layer does not compute.
        """
        sizes, options = options_of(config)
        kinds = {"device": device, "dtype": dtype}
        sigmoid = options.pop("sigmoid", None)
        if sigmoid is not None:
            hidden_size, _, count, top_k = sizes
            options["router"] = SigmoidTopK(hidden_size, count, top_k, **sigmoid, **kinds)
        return cls(*sizes, tokens=tokens, max_tokens=max_tokens, group=group, **options, **kinds)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        theirs = local_metadata.get(_ACTIVATION)
        require(
            theirs is None or _same_activation(theirs, self.hidden_act),
            f"the state_dict of a layer with hidden_act={theirs!r}, {prefix or 'the layer'} with "
            f"{self.hidden_act!r}",
            "the same activation",
            f"make the layer with hidden_act={theirs!r}",
        )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def load_whole_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state_dict of the whole layer, with all experts stacked; each rank takes its
        own. As ``load_state_dict``, with another error.

        Raises
        ------
        InputError
            if an ``experts.*`` tensor does not have all E experts.
        """
        for name, tensor in state.items():
            require(
                not name.startswith("experts.")
                or is_dtensor(tensor)
                or (tensor.dim() > 0 and tensor.shape[0] == self.num_experts),
                f"{name} {tuple(tensor.shape)}",
                f"all {self.num_experts} experts of the layer, stacked",
                "pass the state_dict of the whole layer",
            )
        self.load_state_dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fits = x.dim() > 0 and x.shape[-1] == self.hidden_size
        require(
            fits,
            lambda: f"x {tuple(x.shape)}",
            f"[..., {self.hidden_size}]",
            "pass tokens of hidden_size",
        )
        # an x of two dimensions stays a view, which may have any strides
        tokens = x.reshape(-1, self.hidden_size)
        if self.tokens == "own":
            return self._own_tokens(tokens.contiguous(), None).view(x.shape)
        rank, size = rank_and_size(self.group_name)
        count = tokens.shape[0]
        each = -(-count // size)
        mine = own_part(pad(tokens, (0, 0, 0, each * size - count)), 0, self.group_name)
        y = self._own_tokens(mine, count - rank * each)
        return gather_parts(y, 0, self.group_name)[:count].view(x.shape)

    def _own_tokens(self, tokens: torch.Tensor, count: int | None) -> torch.Tensor:
        """The layer for this rank's tokens, of which only the first ``count`` are tokens."""
        experts, act = self.experts, self.hidden_act
        weights, ids = self.gate(tokens)
        if count is not None:
            beyond = torch.arange(ids.shape[0], device=ids.device) >= count
            ids = ids.masked_fill(beyond[:, None], -1)
        ids, weights = ids.contiguous(), weights.contiguous()
        shards = (experts.padded(local(w)) for w in (experts.gate_up_proj, experts.down_proj))
        rows, up, down = under_autocast(tokens, *shards)
        y, plan = dispatch_grouped_matmul(
            rows, up, ids, group=self.group_name, max_tokens=self.max_tokens
        )
        biases = experts._parameters.get("gate_up_proj_bias")
        if biases is not None:
            y = y + _bias_of_rows(experts.padded(local(biases)), plan).to(y.dtype)
        z = grouped_matmul_combine(
            activate(y, plan, act), down, plan, weights, group=self.group_name
        )
        if biases is not None:
            shard = experts.padded(local(experts.down_proj_bias))
            z = z + _bias_of_tokens(shard, ids, weights, self.group_name).to(z.dtype)
        return z if self.shared_experts is None else z + self.shared_experts(tokens)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, "
            f"experts={self.num_experts} / {self.world_size} ranks, "
            f"hidden_act={self.hidden_act!r}, tokens={self.tokens!r}"
        )


def _same_activation(one: str, other: str) -> bool:
    if one in ACTIVATIONS and other in ACTIVATIONS:
        return ACTIVATIONS[one] is ACTIVATIONS[other]
    return one == other


def _note_activation(
    module: nn.Module, _state: object, _prefix: str, local_metadata: dict[str, Any]
) -> None:
    local_metadata[_ACTIVATION] = module.hidden_act


def _bias_of_rows(bias: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[E / R, N] -> [bound, N]: the bias of each row's expert, 0 for undefined rows, whose gradient
    is then left out."""
    rows = torch.arange(plan.bound, dtype=torch.int32, device=bias.device)
    expert = torch.searchsorted(plan.offsets[1:], rows, right=True)
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[expert]


def _bias_of_tokens(
    bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group_name: str
) -> torch.Tensor:
    """[E / R, N] -> [T, N]: the weighted sum of the biases of each token's experts.

    Biases of all experts are small: they are gathered, so that no second combine is needed.
    """
    everyone = copy_to_group(gather_parts(bias, 0, group_name), group_name)
    chosen = weights.new_zeros(ids.shape[0], everyone.shape[0])
    used = weights.masked_fill(ids < 0, 0)
    chosen = chosen.scatter_add(1, ids.long().clamp(min=0), used)
    return chosen.to(everyone.dtype) @ everyone
