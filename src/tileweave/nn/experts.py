"""A mixture of experts whose experts are sharded over a group: a layer as in Mixtral, Qwen3-MoE or
DeepSeek models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from tileweave.errors import require
from tileweave.nn.gated_experts import ACTIVATIONS, CLAMPED, Experts
from tileweave.nn.moe_configs import MODELS, fp8_of, options_of
from tileweave.nn.replicated import make_replicated
from tileweave.nn.routers import SigmoidTopK, SoftmaxTopK
from tileweave.nn.scaled_experts import FP8Experts, dequantized, scale_of
from tileweave.nn.shards import check_sizes, is_dtensor, mesh_of
from tileweave.ops.core.argument_types import checks_types, checks_types_first, reading
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.core.replicated import gather_parts, own_part
from tileweave.ops.matmul.scaled import FP8

_ACTIVATION = "hidden_act"  # in the metadata of a state_dict


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


class MoE(nn.Module):
    """``sum over its k experts of weight * expert(x)`` for each token, plus a shared expert.

    Tokens and experts are sharded over the group; the shared expert is optional.

    ==============================  ==================  ======================================
    gate.weight                     [E, H]              router; the same on every rank
    experts.gate_up_proj            [E, 2 I, H]         experts, stacked; ceil(E / R) on each rank
    experts.down_proj               [E, H, I]
    experts.gate_up_proj_bias       [E, 2 I]            with ``bias``
    experts.down_proj_bias          [E, H]
    experts.*_proj_scale_inv        [E, N/128, K/128]   with ``fp8``: of 128 x 128, rounded up
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

    fp8 : str, optional
        "block": experts are float8_e4m3fn with a float32 scale for 128 x 128 of a weight, for
        inference; tokens are quantised in each call, with a scale for 128 elements, before they are
        sent. Weights of 16 or 32 bits that are loaded are quantised, each rank its own. Router,
        biases and shared expert keep ``dtype``, and results have the dtype of x. Calls with
        gradients are refused. See also :meth:`quantize_experts`.

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

    device : torch.device, optional
        device of the parameters.

    dtype : torch.dtype, optional
        dtype of the parameters.

    Raises
    ------
    InputError
        if ``top_k`` is larger than ``num_experts``, the activation is unknown or not that of a
        loaded state_dict, x does not fit, or with ``fp8`` sizes are no multiples of 16 or a call
        needs gradients. For other errors of a call see
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

    @checks_types_first
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
        fp8: str | None = None,
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
        fits = min(hidden_size, intermediate_size) > 0 and shared_intermediate_size >= 0
        require(
            fits and (max_tokens is None or max_tokens >= 0),
            f"hidden_size={hidden_size}, intermediate_size={intermediate_size}, "
            f"shared_intermediate_size={shared_intermediate_size}, max_tokens={max_tokens}",
            "sizes of 1 or more; 0 or more of the shared expert and of tokens",
            "pass the sizes of the model",
        )
        sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * intermediate_size}
        check_sizes("a MoE layer", 1, **sizes, num_experts=num_experts)
        check_sizes("a shared expert", 0, shared_intermediate_size=shared_intermediate_size)
        require(
            hidden_act in ACTIVATIONS or (hidden_act == CLAMPED and not shared_intermediate_size),
            f"hidden_act={hidden_act!r}, shared_intermediate_size={shared_intermediate_size}",
            f"{', '.join(ACTIVATIONS)}; without a shared expert also {CLAMPED}",
            "pass one of these, or call the operators with an activation of yours",
        )
        require(
            tokens in ("own", "replicated"),
            f"tokens={tokens!r}",
            '"own" or "replicated"',
            "pass one",
        )
        require(
            fp8 in (None, "block"),
            f"fp8={fp8!r}",
            "'block' or None: experts have scales of blocks",
            'pass fp8="block"',
        )
        self.hidden_act, self.tokens = hidden_act, tokens
        if router is None:
            router = SoftmaxTopK(hidden_size, num_experts, top_k, normalize, device, dtype)
        self.gate = router
        self.experts = (Experts if fp8 is None else FP8Experts)(
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
    @checks_types_first
    def from_config(
        cls,
        config: object,
        *,
        fp8: str | None = None,
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

        fp8 : str, optional
            As of the class. None: as the configuration has it: "block" where its
            ``quantization_config`` is fine-grained FP8 in blocks of 128 x 128.

        tokens, max_tokens, group, device, dtype
            As of the class.

        Raises
        ------
        InputError
            If the model is another one, something is missing, ``hidden_act`` is an activation that
            the layer does not compute, or experts are quantised in another way.
        """
        with reading(
            f"the layer of a configuration, a {type(config).__name__}, with other values",
            f"one of transformers, of model_type {', '.join(map(repr, MODELS))}",
            "pass the configuration of the language model",
        ):
            sizes, options = options_of(config)
            options["fp8"] = fp8 or fp8_of(config)
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
        if self.shared_experts is not None:
            for name, _ in self.shared_experts.named_parameters():
                _dequantize_in(state_dict, f"{prefix}shared_experts.{name}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def quantize_experts(self) -> MoE:
        """Make experts of 16 or 32 bits those of a layer with ``fp8="block"``, each rank its own,
        and return the layer. Memory for both is needed meanwhile. No effect on FP8 experts.

        Raises
        ------
        InputError
            if hidden or intermediate size is no multiple of 16.
        """
        if not isinstance(self.experts, FP8Experts):
            self.experts = FP8Experts.of(self.experts)
        return self

    @checks_types
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

    @checks_types
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
        routed = self.gate(tokens)
        require(
            isinstance(routed, (tuple, list))
            and [isinstance(t, torch.Tensor) and t.layout is torch.strided for t in routed]
            == [True, True],
            lambda: f"a router that returns {type(routed).__name__} {routed!r:.60}",
            "(weights [T, k], ids [T, k])",
            "return these two tensors from its forward",
        )
        weights, ids = routed
        if count is not None:
            beyond = torch.arange(ids.shape[0], device=ids.device) >= count
            ids = ids.masked_fill(beyond[:, None], -1)
        ids, weights = ids.contiguous(), weights.contiguous()
        z = self.experts.run(tokens, ids, weights, self.max_tokens, self.hidden_act)
        if self.shared_experts is None:
            return z
        shared = self.shared_experts(tokens.to(self.shared_experts.up_proj.weight.dtype))
        return z + shared.to(z.dtype)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, "
            f"experts={self.num_experts} / {self.world_size} ranks, "
            f"hidden_act={self.hidden_act!r}, tokens={self.tokens!r}"
            + (", fp8='block'" if isinstance(self.experts, FP8Experts) else "")
        )


def _same_activation(one: str, other: str) -> bool:
    if one in ACTIVATIONS and other in ACTIVATIONS:
        return ACTIVATIONS[one] is ACTIVATIONS[other]
    return one == other


def _dequantize_in(state: Any, name: str) -> None:
    """Replace an FP8 weight of a state_dict by the numbers that it represents."""
    weight = state.get(name)
    if weight is None or weight.dtype != FP8:
        return
    scale = state.pop(scale_of(name), None)
    require(
        scale is not None,
        f"{name} of float8_e4m3fn without {scale_of(name)}",
        "both",
        "pass the state_dict of the whole layer",
    )
    state[name] = dequantized(weight, scale)


def _note_activation(
    module: nn.Module, _state: object, _prefix: str, local_metadata: dict[str, Any]
) -> None:
    local_metadata[_ACTIVATION] = module.hidden_act
