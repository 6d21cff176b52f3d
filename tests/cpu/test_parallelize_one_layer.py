"""``tw.parallelize`` of attentions of users that compute q, k and v in one layer, as in nanoGPT,
timm and gpt-fast: nothing is known about them, so a trial shows what they take. Against the
unsplit model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, MLP, filled, ids_of, run_either, train_alike, whole
from tests.support.calls import refusal
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, Worlds
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import tileweave as tw

WIDTH = 16


class Nano(nn.Module):
    """All numbers are attributes, or features of the input."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = heads, WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.size()
        shape = (batch, rows, self.n_head, width // self.n_head)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, rows, width))


class Timm(nn.Module):
    """Norms of heads, q, k and v in a dimension of their own, a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, WIDTH // 4
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(4), nn.LayerNorm(4), nn.Identity()

    def forward(self, x: torch.Tensor, attn_mask: Any = None) -> torch.Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(x).reshape(batch, rows, 3, self.num_heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        x = scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask)
        return self.proj(self.norm(x.transpose(1, 2).reshape(batch, rows, width)))


class Adjacent(Nano):
    """q, k and v of each head are adjacent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.n_head, 3 * x.shape[2] // self.n_head)
        q, k, v = self.c_attn(x).view(shape).transpose(1, 2).chunk(3, -1)
        y = scaled_dot_product_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Fast(nn.Module):
    """Fewer heads of keys; three inputs, so that the first call is the trial."""

    def __init__(self, keys: int = 2) -> None:
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim, self.dim = 4, keys, WIDTH // 4, WIDTH
        self.wqkv = nn.Linear(WIDTH, (4 + 2 * keys) * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        keys = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, keys, keys], dim=-1)
        q, k, v = (t.view(batch, rows, -1, self.head_dim) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q * angles, k * angles, v))
        share = self.n_head // self.n_local_heads
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, rows, self.dim))


class Residual(Nano):
    """Its input is more than its features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Returned(Nano):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Scaled(Nano):
    """The features of all ranks are in what heads compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj((q + k + v).view(x.shape) / x.shape[2])


class Mixed(Nano):
    """Mixes the features of heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, gate, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj(q.softmax(-1) * gate.sigmoid() * v)


KINDS: dict[str, Any] = {
    "nano": Nano,
    "timm": Timm,
    "adjacent": Adjacent,
    "fast": Fast,
    "one key": lambda: Fast(1),
}


class Block(nn.Module):
    def __init__(self, attention: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.recomputes = attention, MLP(WIDTH, 24), recomputes

    def _attend(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.attn(self.ln_1(x), *more)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            x = x + checkpoint(self._attend, x, *more, use_reentrant=False)  # type: ignore[operator]
        else:
            x = x + self._attend(x, *more)
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, make: Any, recomputes: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, WIDTH)
        self.h = nn.ModuleList(Block(make(), recomputes) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, rows = self.wte(ids), ids.shape[1]
        more = (torch.linspace(0.5, 1.5, 4), torch.ones(rows, rows, dtype=torch.bool).tril())
        for block in self.h:
            x = block(x, *more) if isinstance(block.attn, Fast) else block(x)
        return x


def model(make: Any, recomputes: bool = False) -> Any:
    return filled(lambda: Model(make, recomputes))


def tokens(size: int) -> torch.Tensor:
    return ids_of().repeat(1, size)


def compare(part: Any, reference: Any, ids: torch.Tensor, call: Any = None) -> None:
    y, want = (part if call is None else call)(ids), reference(ids)
    train_alike(part, reference, y, want, 2e-5)


def right(me: Member, kind: str, sequence: bool, recomputes: bool) -> None:
    make, ids = KINDS[kind], tokens(me.world_size)
    part, reference = model(make, recomputes), model(make, recomputes)
    tw.parallelize(part, sequence_parallel=sequence)
    for _ in range(2):
        compare(part, reference, ids)
    layers = [m for m in part.h[0].attn.modules() if isinstance(m, tw.nn.ColumnParallelLinear)]
    assert layers and layers[0].weight.to_local().shape[0] < layers[0].weight.shape[0]
    compare(copy.deepcopy(part), reference, ids)
    state, want = part.state_dict(), reference.state_dict()
    assert {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in want.items()}
    for name, t in want.items():
        assert torch.equal(whole(state[name]), t), name


@FORMS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_attentions_of_one_layer(worlds: Worlds, kind: str, size: int, sequence: bool) -> None:
    run_either(worlds("gloo", size), False, right, kind, sequence, False)


@FORMS
@pytest.mark.parametrize("kind", ["nano", "fast"])
def test_recomputed_attentions(worlds: Worlds, kind: str, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, right, kind, sequence, True)


def compiled(me: Member, sequence: bool) -> None:
    part = tw.parallelize(model(Nano), sequence_parallel=sequence)
    whole_graph = torch.compile(part, backend="aot_eager", fullgraph=True)
    compare(part, model(Nano), tokens(2), whole_graph)


@FORMS
def test_a_compiled_attention_of_one_layer(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, compiled, sequence)


def by_a_plan(me: Member) -> None:
    plan = {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.[gu]*_proj": "colwise",
        "h.*.mlp.down_proj": "rowwise",
    }
    part = tw.parallelize(model(Nano), plan=plan)
    assert (part.h[0].attn.n_head, part.h[0].attn.n_embd) == (2, WIDTH // 2)
    compare(part, model(Nano), tokens(2))


def test_a_plan_of_a_user(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, by_a_plan)


def with_fused_kernels(me: Member, sequence: bool) -> None:
    part = tw.parallelize(model(Nano), sequence_parallel=sequence)
    assert_near(part(tokens(2)), model(Nano)(tokens(2)), 1e-4, 1e-5, "y")


@FORMS
def test_one_layer_with_fused_kernels(worlds: Worlds, sequence: bool) -> None:
    worlds("gloo", 2).run(with_fused_kernels, sequence)


def one_head() -> Nano:
    return Nano(1)


class Gated(nn.Module):
    """An MLP whose first layer has a gate and a projection: halves, or alternating features."""

    def __init__(self, first: str, last: str, halves: bool) -> None:
        super().__init__()
        self.names, self.halves = (first, last), halves
        self.add_module(first, nn.Linear(WIDTH, 48))
        self.add_module(last, nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = (getattr(self, name) for name in self.names)
        y = first(x)
        gate, up = y.chunk(2, -1) if self.halves else (y[..., ::2], y[..., 1::2])
        return last(silu(gate) * up)


def with_gates(me: Member, first: str, last: str, halves: bool, sequence: bool) -> None:
    def build() -> Any:
        made = model(Nano)
        torch.manual_seed(2)
        for block in made.h:
            block.mlp = Gated(first, last, halves)
        return made

    plan = {f"h.*.{first}": "colwise", f"h.*.{last}": "rowwise"}
    plan |= {"h.*.c_attn": "colwise", "h.*.c_proj": "rowwise"}
    for each in ("auto", plan):
        part = tw.parallelize(build(), plan=each, sequence_parallel=sequence)
        layer = getattr(part.h[0].mlp, last)
        assert layer.weight.to_local().shape == (WIDTH, 12)
        compare(part, build(), tokens(2))


@FORMS
@pytest.mark.parametrize(
    ("first", "last", "halves"),
    [
        ("fc1", "fc2", True),
        ("fc1", "fc2", False),
        ("w12", "w3", True),
        ("w13", "w2", True),
        ("gate_up", "down", True),
    ],
)
def test_gated_mlps(worlds: Worlds, first: str, last: str, halves: bool, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, with_gates, first, last, halves, sequence)


REFUSED = (Residual, Returned, Scaled, Mixed, one_head)


def refused(me: Member) -> list[str]:
    found = []
    for make in REFUSED:
        made = model(make)
        before = [(type(m), vars(m).get("n_head")) for m in made.modules()]
        found.append(refusal(tw.parallelize, made))
        after = [(type(m), vars(m).get("n_head")) for m in made.modules()]
        assert before == after, "changed before it was refused"
    part = tw.parallelize(model(Fast))
    attention, x, angles = part.h[0].attn, torch.ones(2, 6, WIDTH), torch.ones(4)
    found.append(refusal(attention, x, angles, torch.ones(5, 5, dtype=torch.bool)))
    found.append(refusal(attention, x, angles, mask=object()))
    attention(x, angles, torch.ones(6, 6, dtype=torch.bool))
    found.append(refusal(tw.parallelize, model(Nano), check=False))
    return found


def test_other_attentions_are_refused(worlds: Worlds) -> None:
    named = ["whose forward"] * len(REFUSED) + [
        "in a call that cannot be tried (RuntimeError: The size of tensor",
        "in a call that cannot be tried; allowed",
        "h.0.attn.c_attn, which computes several projections",
    ]
    for errors in run_either(worlds("gloo", 2), False, refused):
        for error, text in zip(errors, named, strict=True):
            assert error.startswith("InputError: asked:") and text in error, (text, error)
            assert "h.0.attn" in error and "remedy" in error, error
            assert "cannot be tried" in text or "Colwise(parts" in error, error
