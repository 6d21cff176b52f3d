"""``tw.parallelize`` with fewer heads of keys and values than ranks: consecutive ranks compute the
same one. Against the unsplit model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cpu.test_parallelize import FORMS, MLP, gradients, ids_of, run_either, whole
from tests.support.worlds import Member, Worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw
from tileweave.errors import InputError
from tileweave.parallel import Colwise, Rowwise

Heads = tuple[int, int, int]  # of queries, of keys and values, features of each


class Attention(nn.Module):
    """``repeats``: as in torchtitan, by an attribute; else shapes tell how often."""

    def __init__(self, hidden: int, sizes: Heads, bias: bool, repeats: bool) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = sizes
        self.repeats, self.n_rep = repeats, heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias)
        self.k_norm = nn.RMSNorm(self.head_dim)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = self.k_norm(k)
        if self.repeats:
            k, v = (t.repeat_interleave(self.n_rep, 1) for t in (k, v))
        y = scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=not self.repeats, scale=scale
        )
        return self.o_proj(y.transpose(1, 2).reshape(*shape[:-2], -1))


class Layer(nn.Module):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.self_attn, self.mlp = Attention(16, *given), MLP(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x), scale=0.5)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layers = nn.ModuleList(Layer(*given) for _ in range(2))
        self.head = nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(sizes: Heads, bias: bool = False, repeats: bool = False) -> Model:
    torch.manual_seed(0)
    made = Model(sizes, bias, repeats)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens(size: int, seed: int = 1) -> torch.Tensor:
    """As many in a row as ranks can share."""
    return ids_of(seed).repeat(1, size)


def compare(part: Any, reference: Any, ids: torch.Tensor) -> None:
    y, want = part(ids), reference(ids)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for result in (y, want):
        result.square().mean().backward()


def drawn(seed: int, size: int) -> tuple[Heads, bool, bool]:
    """Heads that ``size`` ranks share, or that they just have."""
    draw = random.Random(seed)
    shares = [n for n in range(1, size + 1) if size % n == 0]
    kv_heads = draw.choice([*shares[:-1], *shares])
    heads = size * draw.choice([1, 2, 3])
    return (heads, kv_heads, draw.choice([2, 3, 8])), draw.random() < 0.5, draw.random() < 0.5


def over_ranks(me: Member, sequence: bool, seed: int) -> None:
    size = me.world_size
    given = drawn(seed, size)
    part, reference = model(*given), model(*given)
    tw.parallelize(part, sequence_parallel=sequence)
    for _ in range(2):
        compare(part, reference, tokens(size))
        gradients(part, reference)
        for m in (part, reference):
            torch.optim.AdamW(m.parameters(), 0.01).step()
            m.zero_grad()
    state = {name: whole(t) for name, t in part.state_dict().items()}
    other = model(*given)
    other.load_state_dict(state)  # all ranks have the same keys and values
    torch.testing.assert_close(other(tokens(size)), part(tokens(size)), rtol=1e-4, atol=1e-5)
    part.load_state_dict(model(*given).state_dict())
    compare(part, model(*given), tokens(size))


@FORMS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_heads_that_ranks_share(worlds: Worlds, sequence: bool, size: int, seed: int) -> None:
    run_either(worlds("gloo", size), False, over_ranks, sequence, seed)


def in_one_graph(me: Member, sequence: bool) -> None:
    sizes = (4, 1, 4)
    part = tw.parallelize(model(sizes, True, True), sequence_parallel=sequence)
    reference = model(sizes, True, True)
    compare(
        torch.compile(part, backend="aot_eager", fullgraph=True), reference, tokens(me.world_size)
    )
    gradients(part, reference)


@FORMS
def test_shared_heads_are_compiled(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, in_one_graph, sequence)


def with_fused_kernels(me: Member, sequence: bool) -> None:
    sizes = (4, 1, 4)
    part = tw.parallelize(model(sizes), sequence_parallel=sequence)
    compare(part, model(sizes), tokens(me.world_size))


@FORMS
def test_shared_heads_with_fused_kernels(worlds: Worlds, sequence: bool) -> None:
    worlds("gloo", 2).run(with_fused_kernels, sequence)


def with_data_parallelism(me: Member, sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, reference = model((4, 1, 4)), model((4, 1, 4))
    tw.parallelize(part, mesh, sequence_parallel=sequence)
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(part, mesh=mesh["dp"])
    part(tokens(2, mesh.get_local_rank("dp"))).square().mean().backward()
    for r in range(2):
        (reference(tokens(2, r)).square().mean() / 2).backward()
    gradients(part, reference)


@FORMS
def test_shared_heads_fully_sharded_in_the_other_dimension(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 4), False, with_data_parallelism, sequence)


def by_styles(me: Member) -> None:
    """A plan of styles, of layers that are separate or one."""
    keys, sizes = Colwise(copies=2), (4, 1, 4)
    part, reference = model(sizes), model(sizes)
    tw.parallelize(
        part,
        plan={
            "layers.*.self_attn.q_proj": Colwise(),
            "layers.*.self_attn.[kv]_proj": keys,
            "layers.*.self_attn.o_proj": Rowwise(),
        },
    )
    assert "copies=2" in repr(part.get_submodule("layers.0.self_attn.k_proj"))
    compare(part, reference, tokens(2))
    gradients(part, reference)


def test_styles_with_copies(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, by_styles)


class OneLayer(nn.Module):
    """q, k and v of one layer, by the numbers of features that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 24), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = y.split([y.shape[1] - 2, 1, 1], 1)
        y = scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale)
        return self.proj(y.transpose(1, 2).flatten(2))


def of_parts(me: Member) -> None:
    torch.manual_seed(0)
    reference, part = OneLayer(), OneLayer()
    part.load_state_dict(reference.state_dict())
    parts, copies = {"q": 16, "k": 4, "v": 4}, {"k": 2, "v": 2}
    plan = {"qkv": Colwise(parts=parts, copies=copies), "proj": Rowwise()}
    tw.parallelize(part, plan=plan)
    x = torch.randn(2, 3, 16)
    call: Any = part
    assert not call._tried.done
    compare(lambda x: call(x, 0.7), lambda x: reference(x, 0.7), x)
    assert call._tried.done  # in its first call: it takes more than a tensor
    found = tw.parallel.join_projections(part, {n: p.grad for n, p in part.named_parameters()})
    state = part.state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole(found[name]), parameter.grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(whole(state[name]), parameter)


def test_parts_with_copies(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, of_parts)


def refusals(me: Member) -> list[str]:
    found = []
    for sizes in ((8, 3, 4), (6, 2, 4)):
        try:
            tw.parallelize(model(sizes))
        except InputError as error:
            found.append(str(error))
    for copies, parts in ((0, None), ({"k": 2}, None), ({"z": 2}, {"q": 16, "k": 4, "v": 4})):
        try:
            Colwise(copies=copies, parts=parts)
        except InputError as error:
            found.append(str(error))
    wrong = tw.parallelize(model((4, 1, 4), repeats=True))
    attention: Any = wrong.get_submodule("layers.0.self_attn")
    attention.n_rep = 4  # of all ranks
    try:
        wrong(tokens(me.world_size))
    except InputError as error:
        found.append(str(error))
    dist.barrier()
    return found


def test_heads_that_ranks_cannot_share(worlds: Worlds) -> None:
    named = (
        "layers.0.self_attn.k_proj: 12 features, heads of 4, over 4 ranks",
        "layers.0.self_attn.q_proj: 24 features, heads of 4, over 4 ranks",
        "copies=0",
        "copies of k; allowed: the parts: none",
        "copies of z; allowed: the parts: q, k, v",
        "layers.0.self_attn.o_proj of x (2, 24, 16); allowed: this rank's 4 of 16 features",
    )
    for errors in worlds("gloo", 4).run(refusals):
        for error, name in zip(errors, named, strict=True):
            assert error.startswith("asked:") and name in error, (name, error)
