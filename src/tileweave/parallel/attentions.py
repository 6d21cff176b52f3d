"""Attentions whose forward is known to be right with the heads of one rank: of transformers, and
torch's own.

Others must take the number of heads from shapes. These take it from attributes, or have one linear
layer for q, k and v.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tileweave.nn.linear import class_path

Sizes = dict[str, int]
QKV = ("q_proj", "k_proj", "v_proj")
# Attributes with the features of one head.
HEAD_SIZES = ("attention_head_size", "head_dim", "head_size", "dim_head", "d_head")
# Usual names of the linear layers that make queries, keys and values, without _ and in lower case.
_NAME = re.compile(
    "(?:w|to|fc|lin|linear|proj|dense|attn)?"
    "(?:(?P<q>q|query|queries)|(?P<k>k|key|keys)|(?P<v>v|val|value|values))"
    "(?:w|fc|s|mat|net|lin|linear|layer|proj|projection)?"
)


def role(name: str) -> str:
    """What a linear layer of a usual name, such as ``w_q`` or ``key_proj``, makes: "q", "k" or "v",
    else ""."""
    found = _NAME.fullmatch(name.lower().replace("_", ""))
    return (found and found.lastgroup) or ""


@dataclass(frozen=True)
class Attention:
    """An attention, by the names of its parts.

    layer, row : the layer that makes q, k and v, if it is one, and the one that takes the result.
    sizes : the features of q, k and v in that layer, by name, if they come one after the other.
        None: those of a head, or of heads with the same keys, are next to each other.
    together : how many features are next to each other then.
    counts : attributes that ranks divide: numbers of heads, or of the features of all heads.
    in_config : the numbers of heads in its configuration are taken, too.
    by_head : arguments with numbers for each head, and last the attribute with the number of heads.
    of_parameters : that layer was made of parameters of the attention itself.
    needs : attributes that versions of transformers lack whose attention is another one.
    """

    layer: str = ""
    row: str = ""
    sizes: Callable[[Any], Sizes | None] = lambda _: None
    together: Callable[[Any], int] = lambda module: 3 * module.head_dim
    counts: tuple[str, ...] = ()
    in_config: bool = False
    by_head: tuple[str, ...] = ()
    of_parameters: bool = False
    needs: tuple[str, ...] = ()


def _equal(features: str) -> Callable[[Any], Sizes]:
    """Sizes of q, k and v that have as many features each as this attribute says."""
    return lambda module: dict.fromkeys(QKV, getattr(module, features))


def _of_config(module: Any) -> Sizes:
    q, kv = module.config.num_attention_heads, module.num_key_value_heads
    return {name: heads * module.head_dim for name, heads in zip(QKV, (q, kv, kv), strict=True)}


def _multi_query(features: str) -> Callable[[Any], Sizes | None]:
    """Sizes where one head of keys serves all heads of queries, which have this many features."""

    def sizes(module: Any) -> Sizes | None:
        grouped = getattr(module, "new_decoder_architecture", False)
        if grouped or not module.multi_query:
            return None
        kv = module.head_dim
        return dict(zip(QKV, (getattr(module, features), kv, kv), strict=True))

    return sizes


def _falcon_group(module: Any) -> int:
    grouped = module.new_decoder_architecture
    queries = module.num_heads // module.num_kv_heads if grouped else 1
    return (queries + 2) * module.head_dim


_PHI3 = Attention("qkv_proj", "o_proj", _of_config, counts=("num_key_value_heads",), in_config=True)
_COUNTS = Attention(counts=("num_heads", "num_key_value_heads"))
_COUNTS_FEATURES = Attention(counts=("num_heads", "embed_dim"))
_MODELS = "transformers.models."
# by module and name of the class
ATTENTIONS = {
    f"{_MODELS}{name}": attention
    for name, attention in {
        "stablelm.modeling_stablelm.StableLmAttention": _COUNTS,
        "whisper.modeling_whisper.WhisperAttention": _COUNTS,
        "opt.modeling_opt.OPTAttention": _COUNTS,
        "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _COUNTS,
        "gptj.modeling_gptj.GPTJAttention": Attention(counts=("num_attention_heads",)),
        "xglm.modeling_xglm.XGLMAttention": _COUNTS_FEATURES,
        "mvp.modeling_mvp.MvpAttention": _COUNTS_FEATURES,
        "phi3.modeling_phi3.Phi3Attention": _PHI3,
        "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAttention": _PHI3,
        "gpt_neox.modeling_gpt_neox.GPTNeoXAttention": Attention(
            "query_key_value", "dense", together=lambda module: 3 * module.head_size
        ),
        "persimmon.modeling_persimmon.PersimmonAttention": Attention(
            "query_key_value", "dense", counts=("num_heads",)
        ),
        "bloom.modeling_bloom.BloomAttention": Attention(
            "query_key_value", "dense", counts=("num_heads",), by_head=("alibi", "num_heads")
        ),
        "falcon.modeling_falcon.FalconAttention": Attention(
            "query_key_value",
            "dense",
            _multi_query("hidden_size"),
            _falcon_group,
            ("num_heads", "num_kv_heads"),
            by_head=("alibi", "attention_mask", "num_heads"),
        ),
        "mpt.modeling_mpt.MptAttention": Attention(
            "Wqkv",
            "out_proj",
            _equal("hidden_size"),
            counts=("n_heads",),
            by_head=("position_bias", "n_heads"),
        ),
        "gpt_bigcode.modeling_gpt_bigcode.GPTBigCodeAttention": Attention(
            "c_attn",
            "c_proj",
            _multi_query("embed_dim"),
            counts=("embed_dim", "num_heads", "num_key_value_groups"),
        ),
        # groups of heads: all queries, then all values, then all keys
        "codegen.modeling_codegen.CodeGenAttention": Attention(
            "qkv_proj",
            "out_proj",
            together=lambda module: 3 * module.embed_dim // module.mp_num,
            counts=("embed_dim", "mp_num"),
            needs=("mp_num",),
        ),
        "gpt2.modeling_gpt2.GPT2Attention": Attention(
            "c_attn", "c_proj", _equal("split_size"), counts=("split_size", "num_heads")
        ),
        "openai.modeling_openai.Attention": Attention(
            "c_attn", "c_proj", _equal("split_size"), counts=("split_size", "n_head")
        ),
    }.items()
}
ATTENTIONS["tileweave.parallel.multihead.ShardedMultiheadAttention"] = Attention(
    "in_proj", "out_proj", _equal("embed_dim"), of_parameters=True
)


def known_attention(module: object) -> Attention | None:
    """What is known about ``module``, if it is one of :data:`ATTENTIONS`."""
    known = ATTENTIONS.get(class_path(module))
    if known is None or not all(hasattr(module, name) for name in known.needs):
        return None
    return known


def features_of_head(module: object) -> int | None:
    """How many features a head of ``module`` has; None if it does not tell."""
    sizes = (getattr(module, name, None) for name in HEAD_SIZES)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def takes_equal_parts(module: object, name: str) -> bool:
    """Whether an equal split of the layer ``name`` of ``module`` gives each rank whole heads."""
    known = known_attention(module)
    return known is not None and known.layer == name and known.sizes(module) is None
