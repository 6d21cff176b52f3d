"""Adapters of PEFT around a model of tw.parallelize: LoRA that is added before is sharded with its
layer, and equal to LoRA around the whole model; what is not possible is an error with the path."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations.test_transformers import IDS, apart, trained, whole, whole_model
from tests.support.calls import refusal
from tests.support.worlds import Member, World

import tileweave as tw

peft = pytest.importorskip("peft", reason="pip install peft", exc_type=ImportError)
pytestmark = pytest.mark.timeout(300)
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
RIGHT: dict[str, tuple[str, dict[str, Any], bool]] = {  # whether rows are sharded, too
    "lora": ("LoraConfig", LORA, False),
    "lora, rows": ("LoraConfig", LORA, True),
    "biases": ("LoraConfig", LORA | {"bias": "lora_only", "lora_bias": True}, False),
    "whole modules": ("LoraConfig", LORA | {"modules_to_save": ["lm_head", "norm"]}, True),
    "head and embedding": (
        "LoraConfig",
        LORA | {"target_modules": ["k_proj", "down_proj", "lm_head", "embed_tokens"]},
        False,
    ),
    "prompts": ("PromptTuningConfig", PROMPT, False),
    "norms": (
        "LNTuningConfig",
        {"target_modules": ["input_layernorm"], "task_type": "CAUSAL_LM"},
        True,
    ),
}


def adapted(kind: str, options: dict[str, Any], base: Any = None) -> Any:
    made = whole_model("llama with biases") if base is None else base
    model = peft.get_peft_model(made, getattr(peft, kind)(**options))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def near(part: Any, reference: Any) -> float:
    part.eval()
    reference.eval()
    with torch.no_grad():
        return apart(part(input_ids=IDS).logits, reference(input_ids=IDS).logits)


def compared(me: Member) -> dict[str, float]:
    found = {}
    for (name, (kind, options, rows)), kv_heads in product(RIGHT.items(), (2, 1)):

        def made(kind: str = kind, options: Any = options, kv_heads: int = kv_heads) -> Any:
            base = whole_model("llama with biases", num_key_value_heads=kv_heads)
            return adapted(kind, options, base)

        name = f"{name}, {kv_heads} heads of keys"
        reference = made()
        part: Any = tw.parallelize(made(), sequence_parallel=rows)
        assert sum(isinstance(m, tw.nn.RowParallelLinear) for m in part.modules()) >= 4
        (loss, gradients), (want, wanted) = trained(part), trained(reference)
        assert gradients.keys() == wanted.keys()
        largest = max(float(g.abs().max()) for g in wanted.values())
        found[f"{name}: loss"] = apart(loss, want)
        found[f"{name}: gradients"] = max(
            float((gradients[n] - g).abs().max()) / largest for n, g in wanted.items()
        )
        found[f"{name}: logits"] = near(part, reference)
    return found


def test_adapters_train_as_around_the_whole_model(pair: World) -> None:
    for found in pair.run(compared, timeout=240):
        assert max(found.values()) < 1e-5, found


def used(me: Member, folder: str) -> dict[str, float]:
    """Merged, unmerged, switched off, saved and loaded, unloaded."""
    reference = adapted("LoraConfig", LORA)
    part: Any = tw.parallelize(adapted("LoraConfig", LORA))
    found: dict[str, float] = {}
    for model in (part, reference):
        model.merge_adapter()
    found["merged"] = near(part, reference)
    wanted = dict(reference.named_parameters())
    found["weights"] = max(apart(whole(p), wanted[n]) for n, p in part.named_parameters())
    for model in (part, reference):
        model.unmerge_adapter()
    found["unmerged"] = near(part, reference)
    with part.disable_adapter(), reference.disable_adapter():
        found["off"] = near(part, reference)
    part.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    base = whole_model("llama with biases")
    found["saved"] = near(peft.PeftModel.from_pretrained(base, f"{folder}/adapter"), reference)
    part.load_adapter(f"{folder}/adapter", "default")
    found["loaded"] = near(part, reference)
    part, reference = part.merge_and_unload(), reference.merge_and_unload()
    found["unloaded"] = near(part, reference)
    part.save_pretrained(f"{folder}/merged")
    dist.barrier()
    found["merged, saved"] = near(type(reference).from_pretrained(f"{folder}/merged"), reference)
    return found


def test_adapters_are_merged_saved_and_loaded(pair: World, tmp_path: Path) -> None:
    for found in pair.run(used, str(tmp_path), timeout=240):
        assert max(found.values()) < 1e-5, found


def refused(me: Member) -> list[str]:
    lora = peft.LoraConfig(**LORA)
    scaled = peft.IA3Config(target_modules=["k_proj", "down_proj"], task_type="CAUSAL_LM")

    def sharded() -> Any:
        return tw.parallelize(whole_model("llama"))

    after = peft.get_peft_model(sharded(), scaled)
    second: Any = tw.parallelize(peft.get_peft_model(whole_model("llama"), lora))
    second.add_adapter("second", lora)
    second.set_adapter("second")
    calls: list[Callable[[], Any]] = [
        lambda: tw.parallelize(adapted("LoraConfig", LORA | {"use_dora": True})),
        lambda: tw.parallelize(peft.get_peft_model(whole_model("llama"), scaled)),
        lambda: peft.get_peft_model(sharded(), lora),
        lambda: after(input_ids=IDS),
        lambda: second(input_ids=IDS),
    ]
    return [refusal(call) for call in calls]


def test_other_adapters_are_refused_by_name(pair: World) -> None:
    named = (
        "layers.0.self_attn.q_proj, an adapter of PEFT",
        "layers.0.self_attn.k_proj, an adapter of PEFT",
        "LoRA around model.layers.0.self_attn.q_proj",
        "layers.0.self_attn.k_proj, which became a peft.tuners.ia3",
        "layers.0.self_attn.q_proj.base_layer, which became a peft.tuners.lora",
    )
    for errors in pair.run(refused, timeout=240):
        for error, name in zip(errors, named, strict=True):
            assert error.startswith("InputError: asked:") and name in error, (name, error)
            assert "remedy" in error
