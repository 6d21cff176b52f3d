"""tw.parallelize on models of transformers whose projections are one layer, of random
configurations: against the unsplit model."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.tiny_models import apart, tiny_model, whole
from tests.support.worlds import Member, World
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tileweave as tw
from tileweave.errors import InputError

pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
pytestmark = pytest.mark.timeout(300)
SECONDS = 240
MODELS = ("Phi3", "GPTNeoX", "Glm", "Glm4", "OPT")
# q, k and v of one layer, heads counted by attributes, numbers for each head among the arguments
KNOWN = (
    "GPT2",
    "OpenAIGPT",
    "Bloom",
    "Falcon",
    "Mpt",
    "GPTBigCode",
    "CodeGen",
    "GPTJ",
    "XGLM",
    "Persimmon",
)


def known(kind: str, seed: int) -> Any:
    """A model whose attention is in ``parallel/attentions.py``, for two ranks."""
    draw = random.Random(f"{kind} {seed}")
    heads, head = 2 * draw.choice([1, 2, 3]), draw.choice([4, 8])
    hidden, attention = heads * head, draw.choice(["eager", "sdpa"])
    options: dict[str, Any] = {"vocab_size": 37, "pad_token_id": 0, "n_layer": 2}
    if kind == "Falcon":
        grouped, alibi = draw.random() < 0.4, draw.random() < 0.4
        options |= {"num_hidden_layers": 2, "hidden_size": hidden, "num_attention_heads": heads}
        options |= {"new_decoder_architecture": grouped, "alibi": alibi and not grouped}
        options |= {"multi_query": draw.random() < 0.5, "bias": draw.random() < 0.5}
        options |= {"num_kv_heads": 2 if grouped else heads}
        options |= {"parallel_attn": grouped or draw.random() < 0.5}
    elif kind == "Persimmon":
        options |= {"num_hidden_layers": 2, "hidden_size": 2 * hidden, "num_attention_heads": heads}
        options |= {"intermediate_size": 40, "qk_layernorm": draw.random() < 0.5}
    elif kind == "Bloom":
        options |= {"hidden_size": hidden, "n_head": heads}
    elif kind == "Mpt":
        options |= {"d_model": hidden, "n_layers": 2, "n_heads": heads, "max_seq_len": 64}
    elif kind == "CodeGen":  # four groups of heads
        options |= {"n_embd": 4 * hidden, "n_head": 4 * heads, "rotary_dim": 4, "n_ctx": 64}
    elif kind == "XGLM":
        options |= {"d_model": hidden, "attention_heads": heads, "num_layers": 2, "ffn_dim": 40}
    elif kind == "GPTJ":
        options |= {"n_embd": hidden, "n_head": heads, "rotary_dim": 4, "n_positions": 64}
    else:
        options |= {"n_embd": hidden, "n_head": heads, "n_positions": 64}
    if kind == "GPTBigCode":
        options |= {"multi_query": draw.random() < 0.5}
    if kind in ("OpenAIGPT", "Bloom", "Mpt", "XGLM"):
        attention = "eager"
    options |= {"attn_implementation": attention, "bos_token_id": 1, "eos_token_id": 2}
    task = "LMHeadModel" if kind in ("GPT2", "OpenAIGPT") else "ForCausalLM"
    return tiny_model(kind, task, seed, options)


def built(kind: str, seed: int) -> Any:
    if kind in KNOWN:
        return known(kind, seed)
    draw = random.Random(f"{kind} {seed}")
    kv_heads, head = draw.choice([1, 2, 4, 6]), draw.choice([4, 8, 16])
    heads = kv_heads * draw.choice([2, 4] if kv_heads == 1 else [1, 2, 3])
    options = {
        "vocab_size": 37,
        "hidden_size": heads * head,
        "intermediate_size": 2 * draw.randint(9, 30),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": draw.choice(["eager", "sdpa"]),
    }
    if kind == "OPT":
        options["ffn_dim"] = options.pop("intermediate_size")
    elif kind == "GPTNeoX":
        options["use_parallel_residual"] = draw.choice([False, True])
    else:
        options["num_key_value_heads"] = kv_heads
    if kind == "Phi3":
        options["original_max_position_embeddings"] = 64
    elif kind not in ("GPTNeoX", "OPT"):
        options |= {"head_dim": head, "hidden_size": 8 * draw.randint(2, 6)}
    return tiny_model(kind, "ForCausalLM", seed, options)


def compared(me: Member, kind: str, seed: int, sequence: bool) -> dict[str, Any]:
    reference = built(kind, seed)
    part = tw.parallelize(built(kind, seed), sequence_parallel=sequence)
    ids = torch.randint(3, 37, (2, 6), generator=torch.Generator().manual_seed(seed))
    options = {} if kind == "OpenAIGPT" else {"use_cache": False}
    y, want = part(ids, **options).logits, reference(ids, **options).logits
    for result in (y, want):
        result.square().mean().backward()
    gradients = {name: p.grad for name, p in part.named_parameters()}
    gradients = tw.parallel.join_projections(part, gradients)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    assert gradients.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    found = {
        "logits": apart(y, want),
        # the true gradient of a bias of keys is 0
        "gradients": max(
            float((whole(gradients[name]) - g).abs().max()) / largest for name, g in wanted.items()
        ),
        "sharded": sum(isinstance(m, tw.nn.RowParallelLinear) for m in part.modules()),
    }
    if not sequence:
        options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        found["generated"] = torch.equal(
            part.generate(ids, **options), reference.generate(ids, **options)
        )
    return found


CASES = [(kind, sequence) for kind in (*MODELS, *KNOWN) for sequence in (False, True)]
CASES.remove(("OPT", True))  # its MLP takes rows of all samples, [B S, H]: an error


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "sequence"), CASES)
def test_logits_gradients_and_tokens(pair: World, kind: str, seed: int, sequence: bool) -> None:
    for found in pair.run(compared, kind, seed, sequence, timeout=SECONDS):
        assert found.pop("sharded") == 4  # of 2 layers: attention and MLP
        assert found.pop("generated", True)
        assert max(found.values()) < 1e-5, found


def resharded(me: Member, folder: str) -> dict[str, Any]:
    """A checkpoint of two ranks, with the state of the optimizer, on two ranks and on one."""
    part = tw.parallelize(built("Phi3", 0))
    optimizer = torch.optim.AdamW(part.parameters(), 0.01)
    ids = torch.arange(3, 15).view(2, 6)
    part(ids).logits.square().mean().backward()
    optimizer.step()
    saved = dict(zip(("model", "optimizer"), get_state_dict(part, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    groups = [dist.new_group([rank]) for rank in range(me.world_size)]
    result = {}
    for ranks, group in ((2, None), (1, groups[me.rank])):
        other = tw.parallelize(built("Phi3", 0), group)
        again = torch.optim.AdamW(other.parameters(), 0.01)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
        dcp.load(state, checkpoint_id=folder, no_dist=ranks == 1)
        set_state_dict(
            other,
            again,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        pairs = list(zip(part.parameters(), other.parameters(), strict=True))
        result[f"weights on {ranks}"] = all(torch.equal(whole(a), whole(b)) for a, b in pairs)
        result[f"moments on {ranks}"] = all(
            torch.equal(whole(optimizer.state[a]["exp_avg"]), whole(again.state[b]["exp_avg"]))
            for a, b in pairs
        )
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return result


def test_checkpoints_are_resharded(pair: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in pair.run(resharded, str(Path(folder) / "saved"), timeout=SECONDS):
            assert all(found.values()) and len(found) == 4, found


def refused(me: Member) -> list[str]:
    import transformers

    small = {"vocab_size": 37, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    gpt2 = {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4}
    odd = {**small, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 40}
    odd |= {"num_key_value_heads": 1, "pad_token_id": 0}
    found = []
    for kind, options in (
        ("GPT2", gpt2 | {"add_cross_attention": True}),
        ("GPT2", gpt2 | {"n_head": 1}),
        ("GPTNeoXJapanese", small | {"intermediate_multiple_size": 2}),
        ("Phi3", odd),
        ("GPTNeoX", {**small, "num_attention_heads": 1, "intermediate_size": 40}),
    ):
        config = getattr(transformers, f"{kind}Config")(**options)
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        try:
            tw.parallelize(getattr(transformers, name)(config))
            found.append("taken")
        except InputError as error:
            found.append(str(error))
    return found


def test_other_fused_projections_are_refused_by_name(pair: World) -> None:
    named = (
        "transformer.h.0.crossattention.c_attn, which computes",
        "transformer.h.0.attn.c_attn: 32 features of q_proj, heads of 32, over 2 ranks",
        "gpt_neox_japanese.layers.1.attention, which has the parameter",
        "model.layers.0.self_attn.qkv_proj: 24 features of q_proj",
        "gpt_neox.layers.0.attention.query_key_value: 96 features",
    )
    for errors in pair.run(refused, timeout=SECONDS):
        for error, name in zip(errors, named, strict=True):
            assert error.startswith("asked:") and name in error, (name, error)


def bert(kind: str) -> Any:
    """Whose attention has its projections in two modules."""

    sizes = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    options = {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
    return tiny_model(kind, "ForSequenceClassification", 0, sizes | options)


def classified(me: Member, kind: str, sequence: bool) -> dict[str, Any]:
    reference = bert(kind)
    part: Any = tw.parallelize(bert(kind), sequence_parallel=sequence)
    ids = torch.randint(3, 37, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}
    y, want = part(**given), reference(**given)
    for result in (y, want):
        result.loss.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    largest = max(float(g.abs().max()) for g in wanted.values())
    return {
        "logits": apart(y.logits, want.logits),
        "gradients": max(
            float((whole(p.grad) - wanted[name]).abs().max()) / largest
            for name, p in part.named_parameters()
        ),
        "sharded": sum(isinstance(m, tw.nn.RowParallelLinear) for m in part.modules()),
    }


@pytest.mark.parametrize("sequence", [False, True], ids=["all-reduce", "sequence"])
@pytest.mark.parametrize("kind", ["Bert", "Electra"])
def test_encoders(pair: World, kind: str, sequence: bool) -> None:
    for found in pair.run(classified, kind, sequence, timeout=SECONDS):
        assert found.pop("sharded") == 4
        assert max(found.values()) < 1e-5, found


def translator(seed: int) -> Any:
    """An encoder and a decoder with cross attention, and biases everywhere."""
    import transformers

    options: dict[str, Any] = {"vocab_size": 37, "d_model": 16, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 24}
    config = transformers.M2M100Config(**options)
    torch.manual_seed(seed)
    return transformers.M2M100ForConditionalGeneration(config).eval()


def translated(me: Member) -> tuple[dict[str, Any], str]:
    reference = translator(0)
    part: Any = tw.parallelize(translator(0))
    ids, target = torch.randint(3, 37, (2, 2, 6), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "decoder_input_ids": target}
    y, want = part(**given).logits, reference(**given).logits
    for result in (y, want):
        result.square().mean().backward()
    largest = max(float(p.grad.abs().max()) for p in reference.parameters())
    pairs = zip(part.parameters(), reference.parameters(), strict=True)
    found = {
        "logits": apart(y, want),
        "gradients": max(float((whole(p.grad) - q.grad).abs().max()) for p, q in pairs) / largest,
        "sharded": sum(isinstance(m, tw.nn.RowParallelLinear) for m in part.modules()),
    }
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found["generated"] = torch.equal(
        part.generate(ids, **options), reference.generate(ids, **options)
    )
    try:
        rows: Any = tw.parallelize(translator(0), sequence_parallel=True)
        rows(**given)
        return found, "taken"
    except InputError as error:
        return found, str(error)


def test_cross_attention(pair: World) -> None:
    """Right in the all-reduce form; with own rows an error that says so."""
    for found, error in pair.run(translated, timeout=SECONDS):
        assert found.pop("sharded") == 5  # attention and MLP of both, and the cross attention
        assert found.pop("generated")
        assert max(found.values()) < 1e-5, found
        assert error.startswith("asked: model.decoder.layers.0.encoder_attn.k_proj"), error
        assert "for a cross attention, sequence_parallel=False" in error
