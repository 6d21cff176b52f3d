"""``tw.parallelize`` of attentions that are known: q, k and v of one layer, heads counted by
attributes, arguments with numbers for each head, weights [in, out]. Stand-ins for those of
transformers, which ``tests/integrations`` has. Against the unsplit model."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.cpu.test_parallelize import FORMS, ids_of, run_either, whole
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, Worlds
from torch import nn
from torch.nn.functional import gelu

import tileweave as tw
from tileweave.errors import InputError
from tileweave.nn import linear
from tileweave.parallel import join_projections
from tileweave.parallel.attentions import ATTENTIONS, QKV, Attention

Sizes = tuple[int, int, int]  # heads of queries, of keys and values, features of each


class Conv1D(nn.Module):
    """As in transformers: a linear layer with a weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


class Known(nn.Module):
    """Queries, keys and values one after the other, or those that belong together next to each
    other; heads are counted by attributes."""

    def __init__(self, hidden: int, sizes: Sizes, together: bool, turned: bool) -> None:
        super().__init__()
        self.heads, self.keys, self.head_dim = sizes
        self.share, self.together = self.heads // self.keys, together
        features, inner = (self.heads + 2 * self.keys) * self.head_dim, self.heads * self.head_dim
        make: Any = (lambda n, m: Conv1D(m, n)) if turned else nn.Linear
        self.c_attn, self.c_proj = make(hidden, features), make(inner, hidden)

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        y = self.c_attn(x)
        batch, rows = y.shape[:2]
        if self.together:
            y = y.view(batch, rows, self.keys, self.share + 2, self.head_dim)
            q, k, v = y.split([self.share, 1, 1], 3)
        else:
            parts = [n * self.head_dim for n in (self.heads, self.keys, self.keys)]
            q, k, v = y.split(parts, -1)
        q, k, v = (t.reshape(batch, rows, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (k, v))
        bias = slopes.view(batch, self.heads, 1, rows)
        y = ((q @ k.transpose(-1, -2)) * 0.3 + bias).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, rows, self.heads * self.head_dim))


class MLP(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.c_fc = Conv1D(24, 16) if turned else nn.Linear(16, 24)
        self.c_proj = Conv1D(16, 24) if turned else nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(gelu(self.c_fc(x)))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, together: bool, turned: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn, self.mlp = Known(16, sizes, together, turned), MLP(turned)

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), slopes=slopes)
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """``slopes`` [batch x heads, 1, rows] is for the heads of all ranks."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.heads = given[0][0]
        self.embed = nn.Embedding(12, 16)
        self.h = nn.ModuleList(Layer(*given) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, rows = ids.shape
        steps = torch.arange(rows) / rows
        slopes = torch.arange(1, self.heads + 1)[:, None] * steps
        slopes = slopes.repeat(batch, 1).unsqueeze(1)
        x = self.embed(ids)
        for layer in self.h:
            x = layer(x, slopes)
        return x


def model(*given: Any) -> Any:
    torch.manual_seed(0)
    made = Model(*given)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def sizes_of(module: Any) -> dict[str, int] | None:
    if module.together:
        return None
    numbers = (module.heads, module.keys, module.keys)
    return {name: n * module.head_dim for name, n in zip(QKV, numbers, strict=True)}


KNOWN = Attention(
    "c_attn",
    "c_proj",
    sizes_of,
    together=lambda module: (module.share + 2) * module.head_dim,
    counts=("heads", "keys"),
    by_head=("slopes", "heads"),
)


def known() -> Any:
    """The stand-ins are known meanwhile."""
    return patch.dict(ATTENTIONS, {f"{__name__}.Known": KNOWN})


def turned() -> Any:
    return patch.object(linear, "_TURNED", (f"{__name__}.Conv1D",))


def drawn(seed: int, size: int) -> tuple[Sizes, bool, bool]:
    draw = random.Random(seed)
    together, turns = draw.random() < 0.5, draw.random() < 0.7
    shares = [n for n in range(1, size + 1) if size % n == 0]
    keys = size * draw.choice([1, 2]) if together or draw.random() < 0.5 else draw.choice(shares)
    heads = max(size, keys) * draw.choice([1, 2])
    return (heads, keys, draw.choice([2, 3, 4])), together, turns


def gradients(part: nn.Module, reference: nn.Module) -> None:
    found = join_projections(part, {name: p.grad for name, p in part.named_parameters()})
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None, name
        assert_near(whole(found[name]), grad, 1e-4, 2e-5, name)


def same_state(part: nn.Module, reference: nn.Module) -> None:
    state, want = part.state_dict(), reference.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in want.items()}
    for name, t in want.items():
        assert_near(whole(state[name]), t, 1e-5, 1e-5, name)


def over_ranks(me: Member, sequence: bool, seed: int) -> None:
    size = me.world_size
    given = drawn(seed, size)
    ids = ids_of(seed).repeat(1, size)
    with known(), turned():
        part, reference = model(*given), model(*given)
        tw.parallelize(part, sequence_parallel=sequence)
        for _ in range(2):
            y, want = part(ids), reference(ids)
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
            for result in (y, want):
                result.square().mean().backward()
            gradients(part, reference)
            for m in (part, reference):
                torch.optim.SGD(m.parameters(), 0.05).step()  # Adam makes noise of zeros large
                m.zero_grad()
        same_state(part, reference)
        same_state(copy.deepcopy(part), reference)
        state = {name: whole(t).clone() for name, t in part.state_dict().items()}
        part.load_state_dict(model(*given).state_dict())
        same_state(part, model(*given))
        part.load_state_dict(state)
        same_state(part, reference)


@FORMS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_known_attentions(worlds: Worlds, sequence: bool, size: int, seed: int) -> None:
    run_either(worlds("gloo", size), False, over_ranks, sequence, seed)


def with_fused_kernels(me: Member, sequence: bool) -> None:
    with known(), turned():
        part, reference = (model((4, 2, 4), False, True) for _ in range(2))
        tw.parallelize(part, sequence_parallel=sequence)
        ids = ids_of().repeat(1, me.world_size)
        torch.testing.assert_close(part(ids), reference(ids), rtol=1e-4, atol=1e-5)


@FORMS
def test_turned_weights_with_fused_kernels(worlds: Worlds, sequence: bool) -> None:
    worlds("gloo", 2).run(with_fused_kernels, sequence)


def in_checkpoints(me: Member, folder: str) -> None:
    given = (4, 2, 4), False, True
    with known(), turned():
        part = tw.parallelize(model(*given))
        dcp.save({"model": part.state_dict()}, checkpoint_id=folder)
        other = model(*given)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        tw.parallelize(other)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        same_state(other, model(*given))
        plain = {"model": {n: torch.zeros_like(t) for n, t in model(*given).state_dict().items()}}
        dcp.load(plain, checkpoint_id=folder)  # as of a model that is not sharded
        for name, t in model(*given).state_dict().items():
            assert torch.equal(plain["model"][name], t), name


def test_turned_weights_in_checkpoints(worlds: Worlds, tmp_path: Any) -> None:
    run_either(worlds("gloo", 2), False, in_checkpoints, str(tmp_path / "saved"))


def refusals(me: Member) -> list[str]:
    found = []
    with known(), turned():
        for given in (((4, 2, 4), True, False), ((3, 3, 4), True, True), ((2, 2, 4), False, True)):
            try:
                tw.parallelize(model(*given))
            except InputError as error:
                found.append(str(error))
        wrong = model((4, 4, 4), False, False)
        wrong.h[1].attn.c_attn = nn.Linear(16, 40)
        try:
            tw.parallelize(wrong)
        except InputError as error:
            found.append(str(error))
    try:
        tw.parallelize(model((4, 4, 4), False, False), check=False)
    except InputError as error:
        found.append(str(error))
    return found


def test_attentions_that_ranks_cannot_share(worlds: Worlds) -> None:
    named = (
        "h.0.attn.c_attn: 32 features, heads of 16, over 4 ranks",
        "h.0.attn.c_attn: 36 features, heads of 12, over 4 ranks",
        "h.0.attn.c_attn: 8 features of q_proj, heads of 4, over 4 ranks",
        "h.1.attn.c_attn, which computes several projections",
        "h.0.attn.c_attn, which computes several projections",
    )
    for errors in worlds("gloo", 4).run(refusals):
        for error, name in zip(errors, named, strict=True):
            assert error.startswith("asked:") and name in error, (name, error)
