"""tw.parallelize divides the numbers of heads that attentions have as attributes, if a trial shows
that they are no more than that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import compare, ids_of, model
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw
from tileweave.errors import InputError


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class Heads(nn.Module):
    """An attention whose numbers of heads are attributes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.n_heads, self.head_dim, self.d_model = kind, 4, 4, 16
        self.n_kv_heads = 2 if kind == "keys" else 4
        self.wq, self.wo = nn.Linear(16, 16), nn.Linear(16, 16)
        self.wk, self.wv = (nn.Linear(16, self.n_kv_heads * 4) for _ in range(2))
        if kind == "no head_dim":
            self.head_features = self.head_dim  # takes part in no count
            del self.head_dim

    def features(self) -> int:
        return self.head_features if self.kind == "no head_dim" else self.head_dim

    def forward(self, hidden_states: torch.Tensor, scale: float, cache: Any = None) -> torch.Tensor:
        x, heads = hidden_states, (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = (
            layer(x).view(x.shape[0], -1, n, self.features()).transpose(1, 2)
            for layer, n in zip((self.wq, self.wk, self.wv), heads, strict=True)
        )
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, scale=scale)
        if self.kind == "divisor":
            y = y / self.n_heads
        if self.kind == "slopes":
            y = y * torch.arange(1, self.n_heads + 1)[:, None, None]
        if self.kind == "draws":
            y = y + torch.randn(())
        y = y.transpose(1, 2).reshape(*x.shape[:2], -1)
        if self.kind == "features":
            y = y.view(*x.shape[:2], self.d_model)
        if self.kind == "check":
            assert x.shape[2] == self.d_model
        shape = (*x.shape[:2], 16) if self.kind == "features of all" else x.shape
        return self.wo(y.view(shape) if self.kind.startswith("features of") else y)


class OfOneTensor(Heads):
    """As ``Heads("features")``, which is tried at once."""

    def __init__(self) -> None:
        super().__init__("features")

    def forward(self, hidden_states: torch.Tensor, scale: float = 0.5) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_states, scale)


def made(kind: str) -> Any:
    found = model()
    for layer in found.layers:
        layer.self_attn = Heads(kind)
    torch.manual_seed(1)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found


KINDS = ("", "keys", "features", "check", "no head_dim", "features of x")


def right(me: Member, kind: str, sequence: bool) -> None:
    part = tw.parallelize(made(kind), sequence_parallel=sequence)
    attention = part.layers[0].self_attn
    assert attention.n_heads == 4 // me.world_size
    assert attention.n_kv_heads == (2 if kind == "keys" else 4) // me.world_size
    compare(part, made(kind))
    assert attention.d_model == (16 // me.world_size if kind == "features" else 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence", [False, True])
def test_attributes_with_heads(world: World, kind: str, sequence: bool) -> None:
    run_either(world, False, right, kind, sequence)


def keys_of_all_ranks(me: Member) -> None:
    """Two heads of keys on four ranks: each rank has one of both."""
    part = tw.parallelize(made("keys"))
    attention = part.layers[0].self_attn
    assert (attention.n_heads, attention.n_kv_heads) == (1, 1)
    compare(part, made("keys"))


def test_fewer_heads_of_keys_than_ranks(worlds: Worlds) -> None:
    worlds("gloo", 4).run(keys_of_all_ranks)


def refused(me: Member) -> list[str]:
    found = [refusal(tw.parallelize(made(kind)), ids_of()) for kind in ("divisor", "slopes")]
    found.append(refusal(tw.parallelize(made("features of all")), ids_of()))
    found.append(refusal(tw.parallelize(made("draws")), ids_of()))
    part, x = tw.parallelize(made("")), torch.ones(2, 6, 16)
    attention: Any = part.layers[0].self_attn
    found.append(refusal(attention, x, 0.5, cache=object()))
    attention(x, 0.5)  # a trial
    attention(x, 0.5, cache=object())
    unchecked = made("")
    found.append(refusal(tw.parallelize, unchecked, check=False))
    assert unchecked.layers[0].self_attn.n_heads == 4
    return found


class OfClass(Heads):
    n_heads = 4  # of the class: another model may have it


def of_class() -> Any:
    model = made("")
    for layer in model.layers:
        layer.self_attn.__class__ = OfClass
        del layer.self_attn.n_heads
    return model


def by_attributes_of_a_class(me: Member) -> None:
    part = tw.parallelize(of_class())
    compare(part, of_class())
    assert (part.layers[0].self_attn.n_heads, OfClass.n_heads) == (2, 4)


def test_attributes_of_a_class(world: World) -> None:
    run_either(world, False, by_attributes_of_a_class)


class Joined(Heads):
    """Queries, keys and values of one layer."""

    def __init__(self) -> None:
        super().__init__("")
        self.wqkv = nn.Linear(16, 48)
        del self.wq, self.wk, self.wv

    def forward(self, hidden_states: torch.Tensor, scale: float, cache: Any = None) -> torch.Tensor:
        parts = self.wqkv(hidden_states).chunk(3, -1)
        shape = (*hidden_states.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(q, k, v, scale=scale)
        return self.wo(y.transpose(1, 2).flatten(2))


def by_style_objects(me: Member, kind: str) -> None:
    def build() -> Any:
        found = made("keys" if kind == "keys" else "")
        for layer in found.layers if kind == "joined" else ():
            torch.manual_seed(2)
            layer.self_attn = Joined()
        return found

    parts = {"parts": {"q": 16, "k": 16, "v": 16}} if kind == "joined" else {}
    column = tw.parallel.Colwise(**parts)
    plan = {"layers.*.self_attn.w[qkv]*": column, "layers.*.self_attn.wo": tw.parallel.Rowwise()}
    part = tw.parallelize(build(), plan=plan)
    assert part.layers[0].self_attn.n_heads == 2
    if kind == "joined":  # parameters have other names
        torch.testing.assert_close(part(ids_of()), build()(ids_of()), atol=1e-4, rtol=1e-4)
    else:
        compare(part, build())


@pytest.mark.parametrize("kind", ["", "keys", "joined"])
def test_style_objects(world: World, kind: str) -> None:
    run_either(world, False, by_style_objects, kind)


def at_once(me: Member) -> None:
    module = nn.ModuleDict({"attention": OfOneTensor()})
    reference = OfOneTensor()
    reference.load_state_dict(module["attention"].state_dict())
    part: Any = tw.parallelize(module)["attention"]
    assert (part.n_heads, part.d_model) == (2, 8)
    x = torch.ones(2, 6, 16)
    assert torch.allclose(part(x), reference(x), atol=1e-5)


def test_a_module_of_one_tensor(world: World) -> None:
    run_either(world, False, at_once)


GIVEN = "layers.0.self_attn over 2 ranks with n_heads = 2 of 4, n_kv_heads = 2 of 4, "
NAMED = (
    GIVEN + "whose forward computes something else from a part",
    GIVEN + "whose forward computes something else from a part",
    GIVEN + "whose forward raised RuntimeError: shape",
    GIVEN + "in a call that cannot be tried; allowed: a first call with tensors",
    GIVEN + "in a call that cannot be tried; allowed: a first call with tensors",
    "layers.0.self_attn, whose forward takes n_heads = 4, the heads of all ranks",
)


def test_attributes_that_are_more_than_heads(world: World) -> None:
    for errors in run_either(world, False, refused):
        for error, named in zip(errors, NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
            assert "remedy" in error


def compiled(me: Member) -> None:
    """A compiled call makes no trial, so it waits for a call that does."""
    part = tw.parallelize(made("divisor"))
    with pytest.raises(Exception, match="cannot be tried"):
        torch.compile(part, backend="eager", fullgraph=True)(ids_of())
    with pytest.raises(InputError, match="computes something else"):
        torch.compile(part, backend="eager")(ids_of())
    part = tw.parallelize(made(""))
    part(ids_of())
    compare(part, made(""), torch.compile(part, backend="eager", fullgraph=True))


def test_compiled_attributes_with_heads(world: World) -> None:
    world.run(compiled, timeout=100)
