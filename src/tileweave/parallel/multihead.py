"""torch's ``nn.MultiheadAttention``, with the heads of one rank.

Its projections are one parameter, which no layer has. They move into a linear layer, ``in_proj``,
that is split and sharded as the fused layers of other attentions are. The forward is written anew,
since torch's reads that parameter. Names and shapes in state dicts stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from tileweave.errors import require
from tileweave.ops.core.registry import rank_and_size
from tileweave.ops.core.replicated import gather_parts, gather_to_read
from tileweave.parallel.attentions import QKV

LAYER = "in_proj"


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """An attention of which each rank has some heads. Called as ``nn.MultiheadAttention``.

    The weights that it returns are those of all heads, gathered or averaged over ranks.
    """

    in_proj: Any  # a layer for each of QKV
    out_proj: Any

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batched = query.dim() == 3
        layers = [getattr(self.in_proj, name) for name in QKV]
        q, k, v = (
            self._by_head(layer(x), batched)
            for layer, x in zip(layers, (query, key, value), strict=True)
        )
        require(
            attn_mask is not None or not is_causal,
            "nn.MultiheadAttention with is_causal=True and without attn_mask",
            "the mask, of which is_causal says that it is causal",
            "pass nn.Transformer.generate_square_subsequent_mask(rows)",
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(q, k, attn_mask, key_padding_mask)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = dropout((scores if mask is None else scores + mask).softmax(-1), p)
            y = weights @ v
        else:
            y = scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = y.transpose(1, 2).flatten(2)  # [batch, rows, features]
        if not batched:
            y = y.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
            weights = weights if batched else weights.squeeze(0)
        return self.out_proj(y), weights

    def _by_head(self, x: torch.Tensor, batched: bool) -> torch.Tensor:
        """As [batch, heads, rows, features of a head]."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """What is added to the scores of this rank's heads: both masks, or None."""
        batch, heads, rows, _ = q.shape
        keys, mask = k.shape[2], None
        if attn_mask is not None:
            shape = (rows, keys) if attn_mask.dim() == 2 else (batch * self.num_heads, rows, keys)
            _require_shape("attn_mask", attn_mask, shape)
            mask = _added(attn_mask, q.dtype)
            if attn_mask.dim() == 3:
                rank, _ = rank_and_size(self.out_proj.group_name)
                mask = mask.unflatten(0, (batch, -1)).narrow(1, rank * heads, heads)
        if key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
            _require_shape("key_padding_mask", padding, (batch, keys))
            padding = _added(padding, q.dtype)[:, None, None]
            mask = padding if mask is None else mask + padding
        return mask

    def _of_all_heads(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        own = weights.mean(1, keepdim=True) if average else weights
        # a use of them in a block sees the rows of one rank
        gather = gather_to_read if self.out_proj.scatter else gather_parts
        every = gather(own, 1, self.out_proj.group_name)
        return every.mean(1) if average else every

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        for kind in ("weight", "bias"):
            whole = state_dict.pop(f"{prefix}{LAYER}_{kind}", None)
            if whole is not None:
                state_dict[f"{prefix}{LAYER}.{kind}"] = whole
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


def _require_shape(name: str, mask: torch.Tensor, shape: tuple[int, ...]) -> None:
    require(
        tuple(mask.shape) == shape,
        f"nn.MultiheadAttention with {name} {tuple(mask.shape)}",
        f"{shape}, those of all heads",
        "pass such a mask",
    )


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers that are added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def check_whole(model: nn.Module, paths: Iterable[str], sharded: set[str]) -> None:
    """Raise :class:`InputError` if one of ``paths`` is a layer of an attention of torch that is not
    among those with the paths ``sharded``."""
    for path in paths:
        above = path.rpartition(".")[0]
        require(
            above in sharded or not isinstance(model.get_submodule(above), nn.MultiheadAttention),
            f"a style for {path} of an nn.MultiheadAttention",
            f'"colwise" for {above}.{LAYER}, all of its projections, and "rowwise" for '
            f"{above}.out_proj, with one weight for queries, keys and values and without bias_k, "
            "bias_v and add_zero_attn",
            "pass a plan with both, or without this attention",
        )


class TakenApart:
    """A context in which the projections of a model's attentions are layers, so that a plan can
    name them. At its end those that are not in ``sharded``, which has paths, are put together."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._taken = [(path, m) for path, m in model.named_modules() if _fits(m)]
        self.sharded: set[str] = set()

    def __enter__(self) -> TakenApart:
        for _, module in self._taken:
            _take_apart(module)
        return self

    def __exit__(self, *error: object) -> None:
        for path, module in self._taken:
            if path not in self.sharded:
                _put_together(module)
        for part in self._model.modules():
            if isinstance(part, nn.TransformerEncoder) and any(map(_is_sharded, part.modules())):
                part.use_nested_tensor = False  # what its own kernels take


def _fits(module: Any) -> bool:
    """Whether ``module`` is an attention of torch with one weight for queries, keys and values and
    without numbers of its own for each head."""
    return (
        type(module) is nn.MultiheadAttention
        and module._parameters.get("in_proj_weight") is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, ShardedMultiheadAttention)


def _take_apart(module: Any) -> None:
    weight, bias = module.in_proj_weight, module.in_proj_bias
    with torch.device("meta"):
        layer = nn.Linear(module.embed_dim, 3 * module.embed_dim, bias is not None)
    layer.weight, layer.bias = weight, bias
    # None keeps torch's encoder from its own kernels, which would read these
    module.in_proj_weight = module.in_proj_bias = None
    module._modules = {LAYER: layer.train(module.training), **module._modules}
    module.__class__ = ShardedMultiheadAttention


def _put_together(module: Any) -> None:
    layer = module._modules.pop(LAYER)
    module.in_proj_weight, module.in_proj_bias = layer.weight, layer.bias
    module.__class__ = nn.MultiheadAttention
