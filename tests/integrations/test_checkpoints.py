"""Checkpoints of models that tw.parallelize sharded, under the names and shapes of the stock model:
written by one and read by the other, of random configurations, tied or not, with biases or not."""

from __future__ import annotations

import copy
import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.worlds import Member, World
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tileweave as tw
from tileweave.errors import InputError

transformers = pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
pytestmark = pytest.mark.timeout(200)
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def built(kind: str, seed: int, values: int = 0) -> Any:
    """A model of a random configuration for up to 4 ranks. ``values``: of its weights."""
    draw = random.Random(f"{kind} {seed}")
    kv_heads, head = draw.choice([1, 2, 4, 8]), draw.choice([4, 8])
    heads = 8 * draw.choice([1, 2, 3])
    options: dict[str, Any] = {
        "vocab_size": draw.choice([37, 40]),
        "hidden_size": heads * head,
        "intermediate_size": 4 * draw.randint(5, 15),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": draw.choice([False, True]),
    }
    if kind == "Phi3":
        options["original_max_position_embeddings"] = 64
    elif kind == "Glm4":
        options |= {"head_dim": head, "attention_bias": draw.choice([False, True])}
    else:
        options |= {name: draw.choice([False, True]) for name in ("attention_bias", "mlp_bias")}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**options)
    )
    generator = torch.Generator().manual_seed(values)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model


def whole(t: Any) -> Any:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def differing(found: Any, wanted: Any) -> list[str]:
    """Names whose tensors differ, or that only one of two models or dicts has."""
    found, wanted = (
        m.state_dict() if isinstance(m, torch.nn.Module) else m for m in (found, wanted)
    )
    apart = set(found) ^ set(wanted)
    for name in wanted:
        if name in found and not torch.equal(whole(found[name]), wanted[name]):
            apart.add(name)
    return sorted(apart)


def exchanged(me: Member, kind: str, seed: int, folder: str) -> dict[str, Any]:
    """What differs after each way from or to the stock model: nothing."""
    stock, part = built(kind, seed), tw.parallelize(built(kind, seed))
    result = {"itself": differing(part, stock)}

    def other() -> Any:
        return tw.parallelize(built(kind, seed, 9))

    dcp.save(get_model_state_dict(part), checkpoint_id=f"{folder}/sharded")
    state = built(kind, seed, 9).state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/sharded", no_dist=True)
    result["to one rank"] = differing(state, stock)
    dcp.save(stock.state_dict(), checkpoint_id=f"{folder}/stock")
    model = other()
    dcp.load(model.state_dict(), checkpoint_id=f"{folder}/stock")
    result["from one rank, in place"] = differing(model, stock)
    dcp.async_save(get_model_state_dict(part), checkpoint_id=f"{folder}/later").result()
    model = other()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/later")
    set_model_state_dict(model, state)
    result["saved in the background"] = differing(model, stock)
    model = other()
    set_model_state_dict(model, stock.state_dict(), options=FULL)
    result["whole tensors"] = differing(model, stock)
    model = other()
    model.load_state_dict(copy.deepcopy(part.state_dict()))
    result["a copy"] = differing(model, stock)
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    file.seek(0)
    model = other()
    model.load_state_dict(torch.load(file, weights_only=False))
    result["a file of each rank"] = differing(model, stock)
    full = get_model_state_dict(part, options=FULL)
    result["gathered"] = differing(full, stock)
    if kind != "Llama":
        whole_state = stock.state_dict() if me.rank == 0 else {}
        try:
            set_model_state_dict(other(), whole_state, options=FROM_RANK_0)
            result["from rank 0"] = "taken"
        except InputError:
            result["from rank 0"] = []
        fused = next(t for name, t in part.state_dict().items() if "gate_up" in name)
        try:
            result["sum"] = float(fused.sum())
        except InputError:
            result["sum"] = []
    return result


@pytest.mark.parametrize(("kind", "seed"), [("Phi3", 0), ("Glm4", 1), ("Llama", 2)])
def test_checkpoints_of_and_for_the_stock_model(
    pair: World, kind: str, seed: int, tmp_path: Path
) -> None:
    for found in pair.run(exchanged, kind, seed, str(tmp_path)):
        assert not any(found.values()), found


def optimizers(me: Member, folder: str) -> list[str]:
    """Moments of AdamW, by the names of the stock model: from it, and back to it."""
    stock, part = built("Phi3", 0), tw.parallelize(built("Phi3", 0))
    ids = torch.arange(3, 15).view(2, 6)
    of_stock, of_part = (torch.optim.AdamW(m.parameters(), 0.01) for m in (stock, part))
    stock(ids).logits.square().mean().backward()
    of_stock.step()
    stock.zero_grad()
    wanted = get_optimizer_state_dict(stock, of_stock)
    dcp.save({"o": wanted}, checkpoint_id=f"{folder}/stock")
    state = get_optimizer_state_dict(part, of_part)
    dcp.load(
        {"o": tw.parallel.join_projections(part, state)}, checkpoint_id=f"{folder}/stock"
    )  # which fills state: the memory is shared
    set_optimizer_state_dict(part, of_part, state)
    found = tw.parallel.join_projections(part, get_optimizer_state_dict(part, of_part))
    dcp.save({"o": found}, checkpoint_id=f"{folder}/sharded")
    again = torch.optim.AdamW(stock.parameters(), 0.01)
    state = get_optimizer_state_dict(stock, again)
    dcp.load({"o": state}, checkpoint_id=f"{folder}/sharded", no_dist=True)
    names = [found["param_groups"][0]["params"], wanted["param_groups"][0]["params"]]
    apart = set(names[0]) ^ set(names[1])
    for name, moments in wanted["state"].items():
        for kind, value in moments.items():
            if not torch.equal(whole(found["state"][name][kind]), value):
                apart.add(f"{name} {kind}, sharded")
            if not torch.equal(state["state"][name][kind], value):
                apart.add(f"{name} {kind}, whole")
    return sorted(apart)


def test_state_of_optimizers(pair: World, tmp_path: Path) -> None:
    assert pair.run(optimizers, str(tmp_path)) == [[], []]


def saved(me: Member, folder: str) -> dict[str, Any]:
    """Models that save_pretrained wrote, read by transformers. And an error of rank 0 alone."""
    result = {}
    for kind, seed in (("Llama", 3), ("Llama", 4), ("Phi3", 5)):
        stock = built(kind, seed)
        part = copy.deepcopy(
            tw.parallelize(built(kind, seed), sequence_parallel=bool(seed % 2), src_data_rank=None)
        )
        with torch.no_grad():  # of the copy, not of the model that it was made of
            for m in (stock, part):
                for parameter in m.parameters():
                    parameter.mul_(2)
        where = f"{folder}/{kind}{seed}"
        part.save_pretrained(where, max_shard_size="20KB" if seed == 4 else "1GB")
        back = type(stock).from_pretrained(where)
        result[where] = differing(back, stock)
        dist.barrier()
    try:
        part.save_pretrained("/proc/of-nothing")
        result["not writable"] = "no error"
    except (OSError, RuntimeError):
        result["not writable"] = []
    return result


def test_save_pretrained_writes_whole_weights(pair: World, tmp_path: Path) -> None:
    for found in pair.run(saved, str(tmp_path)):
        assert len(found) == 4 and not any(found.values()), found


def sharded_twice(me: Member, folder: str) -> dict[str, Any]:
    """The same over a mesh of tensor parallelism and FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stock = built("Phi3", 6)

    def made(values: int = 0) -> Any:
        model = tw.parallelize(built("Phi3", 6, values), mesh)
        fully_shard(model.model.layers[0], mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    part = made()
    dcp.save(get_model_state_dict(part), checkpoint_id=f"{folder}/sharded")
    state = built("Phi3", 6, 9).state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/sharded", no_dist=True)
    result = {"to one rank": differing(state, stock)}
    dcp.save(stock.state_dict(), checkpoint_id=f"{folder}/stock")
    other = made(9)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=f"{folder}/stock")
    set_model_state_dict(other, state)
    result["from one rank"] = differing(other, stock)
    part.save_pretrained(f"{folder}/whole")
    back = type(stock).from_pretrained(f"{folder}/whole")
    result["save_pretrained"] = differing(back, stock)
    tw.close()
    return result


def test_on_a_mesh_with_fsdp(four: World, tmp_path: Path) -> None:
    for found in four.run(sharded_twice, str(tmp_path)):
        assert len(found) == 3 and not any(found.values()), found
