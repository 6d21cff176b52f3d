"""tw.parallelize on models of transformers with experts, and with parameters that are neither
linear layers nor norms: against the unsplit model."""

from __future__ import annotations

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.tiny_models import apart, tiny_model, whole
from tests.support.worlds import Member, World
from torch.distributed.tensor import Shard

import tileweave as tw
from tileweave.errors import InputError

pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
pytestmark = pytest.mark.timeout(300)

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # with a shared expert and its gate
    "Qwen2Moe": FOUR | {"shared_expert_intermediate_size": 8},
    # whose shared experts get rows that are flattened
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    # with biases, and a sink for each head
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    # with keys that all heads share
    "DeepseekV2": {
        **{"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 4},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "n_shared_experts": 1},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    },
    # whose attention stays whole
    "Olmoe": FOUR,
}
IDS = torch.randint(3, 37, (2, 6), generator=torch.Generator().manual_seed(1))


def built(kind: str, **options: Any) -> Any:
    return tiny_model(kind, "ForCausalLM", 0, SIZES | MODELS[kind] | options)


def trained(model: Any, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    y = model(IDS, labels=IDS, use_cache=False, **options)
    (y.loss + y.logits.square().mean()).backward()
    return y.logits, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def compared(part: Any, reference: Any, **options: Any) -> dict[str, float]:
    (y, own), (want, wanted) = trained(part, **options), trained(reference, **options)
    assert own.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    return {
        "logits": apart(y, want),
        "gradients": max(float((own[n] - g).abs().max()) for n, g in wanted.items()) / largest,
    }


def used(me: Member, kind: str, sequence: bool) -> tuple[dict[str, float], int, bool]:
    reference = built(kind)
    part: Any = tw.parallelize(built(kind), sequence_parallel=sequence)
    found = compared(part, reference)
    experts = [n for n, p in part.named_parameters() if n.endswith("experts.down_proj")]
    by_expert = sum(part.get_parameter(n).placements == (Shard(0),) for n in experts)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    same = sequence or torch.equal(
        part.generate(IDS, **options), reference.generate(IDS, **options)
    )
    return found, by_expert, same


@pytest.mark.parametrize("sequence", [False, True], ids=["all-reduce", "sequence"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_gradients_and_tokens(pair: World, kind: str, sequence: bool) -> None:
    for found, sharded, same in pair.run(used, kind, sequence, timeout=100):
        assert sharded == (1 if kind in ("DeepseekV2", "Ernie4_5_Moe") else 2)  # layers
        assert same
        assert max(found.values()) < 1e-5, found


def saved(me: Member, folder: str) -> dict[str, bool]:
    """Experts in checkpoints of both kinds, in a copy, and in a step of an optimizer."""
    reference = built("Mixtral")
    part: Any = tw.parallelize(built("Mixtral"))
    part.save_pretrained(f"{folder}/whole")
    dist.barrier()
    back = type(reference).from_pretrained(f"{folder}/whole").state_dict()
    found = {
        "save_pretrained": all(torch.equal(back[n], p) for n, p in reference.state_dict().items())
    }
    dcp.save(part.state_dict(), checkpoint_id=f"{folder}/sharded")
    other: Any = built("Mixtral")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    tw.parallelize(other)
    dcp.load(state := other.state_dict(), checkpoint_id=f"{folder}/sharded")
    other.load_state_dict(state)
    logits = reference(IDS).logits
    for name, model in (("dcp", other), ("copy", copy.deepcopy(part))):
        found[name] = apart(model(IDS).logits, logits) < 1e-5
    models = (part, reference)
    for model in models:
        trained(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.AdamW(model.parameters(), 0.01).step()
    # Adam's first step is the sign of the gradient, so the smallest ones differ
    found["step"] = apart(*(model(IDS).logits for model in models)) < 1e-3
    return found


def test_checkpoints_copies_and_a_step(pair: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in pair.run(saved, str(Path(folder))):
            assert all(found.values()) and len(found) == 4, found


def compiled(me: Member) -> dict[str, float]:
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1}
    part: Any = tw.parallelize(built("Mixtral", **one))
    model = torch.compile(part, backend="aot_eager", fullgraph=True)
    reference = built("Mixtral", **one)
    (y, own), (want, wanted) = trained(model), trained(reference)
    own = {name.removeprefix("_orig_mod."): g for name, g in own.items()}
    worst = max(apart(own[name], g) for name, g in wanted.items())
    return {"logits": apart(y, want), "gradients": worst}


def test_compiles_as_one_graph(pair: World) -> None:
    for found in pair.run(compiled, timeout=100):
        assert max(found.values()) < 1e-4, found


def balanced(me: Member) -> tuple[dict[str, float], str]:
    """The loss of the routers: right in the all-reduce form, refused with own rows."""
    asked = {"output_router_logits": True}
    found = compared(tw.parallelize(built("Mixtral")), built("Mixtral"), **asked)
    try:
        rows: Any = tw.parallelize(built("Mixtral"), sequence_parallel=True)
        rows(IDS, **asked)
        return found, "taken"
    except InputError as error:
        return found, str(error)


def test_loss_of_routers(pair: World) -> None:
    for found, error in pair.run(balanced):
        assert max(found.values()) < 1e-5, found
        assert error.startswith("asked: output_router_logits of Mixtral"), error


def uneven(me: Member) -> tuple[dict[str, float], list[str], str]:
    """Three experts over two ranks stay whole, and a plan that shards them is refused."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("tileweave")
    log.addHandler(handler)
    try:
        part = tw.parallelize(built("Mixtral", num_local_experts=3))
    finally:
        log.removeHandler(handler)
    found = compared(part, built("Mixtral", num_local_experts=3))
    try:
        tw.parallelize(
            built("Mixtral", num_local_experts=3), plan={"model.layers.*.mlp.experts": "experts"}
        )
        return found, said, "taken"
    except InputError as error:
        return found, said, str(error)


def test_experts_that_ranks_cannot_share(pair: World) -> None:
    for found, said, error in pair.run(uneven):
        assert max(found.values()) < 1e-5, found
        assert said == [
            f"model.layers.{i}.mlp.experts stays whole on every rank: 3 experts over 2 ranks"
            for i in range(2)
        ]
        assert error.startswith("asked: model.layers.0.mlp.experts"), error
