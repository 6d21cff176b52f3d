"""Configurations of transformers, as options of :class:`tileweave.nn.MoE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tileweave.errors import require

# The names of a model's inner size and number of experts.
MODELS = {
    "mixtral": ("intermediate_size", "num_local_experts"),
    "qwen3_moe": ("moe_intermediate_size", "num_experts"),
    "deepseek_v3": ("moe_intermediate_size", "n_routed_experts"),
}


def options_of(config: object) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """(hidden_size, intermediate_size, num_experts, top_k) and further options of the layer of
    ``config``; ``sigmoid`` has the options of :class:`tileweave.nn.SigmoidTopK`."""

    def get(name: str) -> Any:
        require(
            name in config if isinstance(config, Mapping) else hasattr(config, name),
            f"a configuration without {name}",
            "one that has it",
            "pass the configuration of the language model",
        )
        return config[name] if isinstance(config, Mapping) else getattr(config, name)

    model = get("model_type")
    require(
        model in MODELS,
        f"the MoE layer of a model of type {model!r}",
        ", ".join(map(repr, MODELS)),
        "make tw.nn.MoE with its sizes, its router and its hidden_act",
    )
    inner, experts = MODELS[model]
    sizes = (get("hidden_size"), get(inner), get(experts), get("num_experts_per_tok"))
    options: dict[str, Any] = {"hidden_act": get("hidden_act")}
    if model == "qwen3_moe":
        options["normalize"] = get("norm_topk_prob")
    if model == "deepseek_v3":
        options["shared_intermediate_size"] = get(inner) * get("n_shared_experts")
        options["sigmoid"] = {
            "groups": get("n_group"),
            "top_groups": get("topk_group"),
            "normalize": get("norm_topk_prob"),
            "scale": get("routed_scaling_factor"),
        }
    return sizes, options


def fp8_of(config: object) -> str | None:
    """The option ``fp8`` of the layer of ``config``, by its ``quantization_config``."""

    def get(of: object, name: str) -> Any:
        return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)

    found = get(config, "quantization_config")
    if found is None or get(found, "dequantize"):
        return None
    method = get(found, "quant_method")
    size, scheme = get(found, "weight_block_size"), get(found, "activation_scheme")
    require(
        getattr(method, "value", method) == "fp8"
        and tuple(size or ()) == (128, 128)
        and scheme in (None, "dynamic"),
        f"experts quantised by {method!s}, blocks {size}, activation_scheme={scheme!r}",
        "fine-grained FP8 in blocks of 128 x 128, with dynamic scales of tokens",
        "load the checkpoint dequantised, and remove quantization_config",
    )
    return "block"
