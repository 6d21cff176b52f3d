"""tw.parallelize on models with parts that a plan does not name: other attentions, parameters of
their own, residuals inside of an MLP. Right in both forms, or refused with the path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import (
    FORMS,
    MLP,
    Attention,
    compare,
    filled,
    ids_of,
    model,
    train_alike,
)
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn.functional import gelu, silu

import tileweave as tw


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class WithResidual(MLP):
    """Uses its input once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x + super().forward(x)


class OtherNames(nn.Module):
    """Layers of unknown names, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = (nn.Linear(16, 16) for _ in range(4))
        self.spread = nn.RMSNorm(4)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        layers, shape = (self.query, self.key, self.value), (*hidden_states.shape[:-1], -1, 4)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        y = nn.functional.scaled_dot_product_attention(self.spread(q), k, v, scale=scale)
        return self.mix(y.transpose(1, 2).flatten(2))


class Scaled(MLP):
    """Has a parameter itself."""

    def __init__(self) -> None:
        super().__init__(16, 24)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.scale * silu(self.gate_proj(x)) * self.up_proj(x))


class Counted(Attention):
    """Takes its number of heads from attributes, as in OPT: with -1 no shape would be wrong."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__(16, 4, 4, 4)
        self.num_heads = heads
        del self.q_norm

    def _split(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(y.shape[0], -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._split(layer(hidden_states)) for layer in layers)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.o_proj(y.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))


class Gated(Attention):
    """A fourth layer takes the input, as in Qwen3-Next, or one with a number for each head."""

    def __init__(self, features: int) -> None:
        super().__init__(16, 4, 4, 4)
        self.gate_proj = nn.Linear(16, features)
        del self.q_norm

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        shape, layers = hidden_states.shape[:2], (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(hidden_states).reshape(*shape, -1, 4).transpose(1, 2) for layer in layers)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        # with rows gathered twice there would be as many numbers, of other heads
        gate = self.gate_proj(hidden_states)
        gate = gate.reshape(*shape, -1, gate.shape[-1] // y.shape[2])
        return self.o_proj((y * gate.sigmoid()).flatten(2))


class OtherUse(nn.Module):
    """Uses the weight of a module in it without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.weight


class OneModule(nn.Module):
    """An attention, and the layers of an MLP in the same module, as in OPT and BART."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.norm1 = Attention(16, 4, 2, 4), nn.LayerNorm(16)
        self.fc1, self.fc2, self.norm2 = nn.Linear(16, 40), nn.Linear(40, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x), scale=0.5)
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class Convolution(nn.Module):
    """Mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x.mT).mT


class Separate(nn.Module):
    """An attention as in BERT, whose layers are in modules of their own, with a norm of each
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = nn.Module(), nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.self, name, nn.Linear(16, 16))
        self.self.norm = nn.RMSNorm(4)
        self.output.dense = nn.Linear(16, 16)


class LookedUp(nn.Module):
    """A gated MLP that needs to know its layer, as in Zamba2."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(16, 48), nn.Linear(24, 16)
        self.numbers = {0: 1}

    def forward(self, x: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        gate, up = (self.gate_up_proj(x) * self.numbers[layer]).chunk(2, -1)  # type: ignore[index]
        return self.down_proj(silu(gate) * up)


def changed(kind: str) -> Any:
    made: Any = model()
    if kind.startswith("gate"):
        made._tp_plan, made.config = GATED, SimpleNamespace()
    for layer in made.layers:
        attention: Any = layer.self_attn
        if kind == "residual":
            layer.mlp = WithResidual(16, 24)
        if kind in ("names", "names, no plan"):
            layer.self_attn = OtherNames()
        if kind == "scale":
            layer.mlp = Scaled()
        if kind in ("heads", "own heads"):
            layer.self_attn = Counted()
        if kind.startswith("gate"):
            layer.self_attn = Gated(4 if kind == "gate of heads" else 16)
        if kind == "norms of each head":  # as in StableLM: zip() would take the first ones
            attention.q_norm = nn.Sequential(nn.ModuleList(nn.RMSNorm(4) for _ in range(4)))
        if kind == "norm of [heads, features]":  # as in Cohere
            attention.q_norm = nn.RMSNorm([4, 4])
        if kind == "looked up":
            layer.mlp = LookedUp()
        if kind == "norm between modules":
            layer.self_attn = Separate()
        if kind == "use of a child":
            layer.mlp = nn.Sequential(OtherUse(), layer.mlp)
        if kind == "convolution":
            layer.mlp = nn.Sequential(Convolution(), layer.mlp)
        if kind == "convolution alone":
            layer.norm3 = nn.Conv1d(16, 16, 1)
        if kind == "batch norm":
            layer.norm3 = nn.BatchNorm1d(16)
        if kind == "norm of all heads":
            layer.self_attn.q_norm = nn.RMSNorm(16)
    if kind == "one module":
        made.layers = nn.ModuleList(OneModule() for _ in made.layers)
    if kind == "plan of the head":  # of transformers, as that of LFM2
        made._tp_plan, made.config = {"head": "colwise_gather_output"}, SimpleNamespace()
    torch.manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


GATED = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v", "gate")},
    "layers.*.self_attn.o_proj": "rowwise",
    **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "rowwise",
}
NAMED: dict[str, Any] = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in ("query", "key", "value")},
    "layers.*.self_attn.mix": "rowwise",
    "layers.*.self_attn.spread": "sequence_parallel",
}
PLANS = {"names": NAMED}


def right(me: Member, kind: str, sequence: bool) -> None:
    part, reference = changed(kind), changed(kind)
    if kind == "own heads":
        for layer in part.layers:
            layer.self_attn.num_heads = 4 // me.world_size
    plan: Any = PLANS.get(kind, "auto")
    if sequence and kind == "names":  # the MLP works row by row
        plan = {**plan, "layers.*.mlp": "sequence_parallel"}
    tw.parallelize(part, plan=plan, sequence_parallel=sequence)
    rows = [m for m in part.modules() if isinstance(m, tw.nn.RowParallelLinear)]
    assert len(rows) == (2 if kind in ("names", "names, no plan") else 4)
    compare(part, reference)


@FORMS
@pytest.mark.parametrize(
    "kind",
    [
        *(
            "names",
            "names, no plan",
            "heads",
            "own heads",
            "one module",
            "plan of the head",
            "gate",
        ),
        *("gate of heads", "use of a child", "convolution"),
    ],
)
def test_other_models(world: World, kind: str, sequence: bool) -> None:
    run_either(world, False, right, kind, sequence)


def test_an_input_that_is_used_for_more(world: World) -> None:
    """Its gradient was the sum over ranks, also of the part that is whole on each."""
    run_either(world, False, right, "residual", False)


REFUSED = {
    "scale": (False, "layers.0.mlp.scale itself"),
    "norm between modules": (False, "layers.0.self_attn.self.norm with parameters"),
    "looked up": (False, "layers.0.mlp.gate_up_proj, which computes several projections"),
    "norms of each head": (False, "layers.0.self_attn.q_norm, a list of norms"),
    "norm of [heads, features]": (False, "layers.0.self_attn.q_norm over (4, 4)"),
    "norm of all heads": (False, "layers.0.self_attn.q_norm over (16,)"),
    "names": (True, "layers.0.mlp.gate_proj, a Linear"),
    "convolution alone": (True, "layers.0.norm3, a Conv1d"),
    "batch norm": (True, "layers.0.norm3, a BatchNorm1d"),
}


def refused(me: Member) -> list[str]:
    found = []
    for kind, (sequence, _) in REFUSED.items():
        made = changed(kind)
        before = [type(m) for m in made.modules()]
        plan = PLANS.get(kind, "auto")
        found.append(refusal(tw.parallelize, made, plan=plan, sequence_parallel=sequence))
        assert [type(m) for m in made.modules()] == before, "changed before it was refused"
    return found


def test_parts_that_would_be_wrong_are_named(world: World) -> None:
    for errors in run_either(world, False, refused):
        for error, (_, named) in zip(errors, REFUSED.values(), strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
            assert "remedy" in error


class Outside(nn.Module):
    """Layers of usual names before and after a list of blocks, where each rank has all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.before, self.after = MLP(16, 24), Attention(16, 4, 2, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids)
        x = x + self.before(x)
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(self.inner.norm(x + self.after(x, 0.5)))


def built_outside() -> Outside:
    return filled(Outside)


def outside(me: Member, sequence: bool) -> list[str]:
    """Their gradients were those of all ranks together."""
    part, reference = built_outside(), built_outside()
    tw.parallelize(part, sequence_parallel=sequence)
    assert part.after.q_proj.weight.to_local().shape[0] == 16 // me.world_size
    train_alike(part, reference, part(ids_of()), reference(ids_of()), 1e-5)
    inside = {"*.layers.*.mlp.[gu]*_proj": "colwise", "*.layers.*.mlp.down_proj": "rowwise"}
    for path in ("inner.layers", "inner.layers.*"):  # the list itself, and its blocks
        summed = {**inside, path: "sequence_parallel"}
        tw.parallelize(built_outside(), plan=summed, sequence_parallel=True)
    others = {"before.up_proj": tw.parallel.Colwise(sequence_dim=1), "before": "sequence_parallel"}
    return [
        refusal(
            tw.parallelize, built_outside(), plan={**inside, path: style}, sequence_parallel=True
        )
        for path, style in others.items()
    ]


@FORMS
def test_layers_outside_of_a_list(world: World, sequence: bool) -> None:
    for errors in run_either(world, False, outside, sequence):
        for error in errors:
            assert error.startswith("InputError: asked: before") and "has all rows" in error, error


class Two(nn.Module):
    """A convolution over rows, in a module that returns two tensors of its rows, or takes two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mix = kind, Convolution()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        y = self.mix(x)
        return (y, 2 * y) if self.kind == "returns two" else y if other is None else y + other


class Rows(nn.Module):
    """A block whose forward takes other rows than those of one rank."""

    def __init__(self, kind: str, mlp: nn.Module) -> None:
        super().__init__()
        self.kind, self.mlp, self.two = kind, mlp, Two(kind)
        self.register_buffer("places", torch.ones(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(x, x + 1) if self.kind == "takes two" else self.two(x)
        if self.kind == "returns two":
            y = y[1]
        if self.kind == "all places":
            y = y * self.places
        return self.mlp(y)


CALLS = {
    "returns two": "layers.0.two with sequence_parallel=True, which returns something else",
    "takes two": "layers.0.two with argument 1, of the shape of its input",
    "all places": "layers.0 with sequence_parallel=True, whose forward raised RuntimeError",
}


def refused_calls(me: Member, kind: str) -> str:
    part: Any = model()
    part.layers = nn.ModuleList(Rows(kind, layer.mlp) for layer in part.layers)
    tw.parallelize(part, sequence_parallel=True)
    return refusal(part, torch.zeros(2, 6, dtype=torch.long))


@pytest.mark.parametrize("kind", CALLS)
def test_other_rows_than_those_of_a_rank(world: World, kind: str) -> None:
    """They were wrong, or an error of torch."""
    for error in run_either(world, False, refused_calls, kind):
        assert error.startswith(f"InputError: asked: {CALLS[kind]}"), error


class Conditioned(nn.Module):
    """A block as of a diffusion transformer: a vector of all rows modulates them."""

    def __init__(self, modulates: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(16), MLP(16, 24)
        self.modulation = (
            nn.Sequential(nn.SiLU(), nn.Linear(16, 16)) if modulates else nn.Identity()
        )

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        scale = self.modulation(given["condition"]).unsqueeze(1)
        h = self.norm(x) * scale
        x = x + self.attention(h, h, h, need_weights=False)[0]
        given["blocks"] += 1
        return x + self.mlp(x) * scale


class Diffusion(nn.Module):
    def __init__(self, modulates: bool) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(3, 16), nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Conditioned(modulates) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, given = self.embed(x), {"condition": self.time(time), "blocks": torch.zeros(())}
        for block in self.blocks:
            x = block(x, given)
        return x * given["blocks"]


def diffusion(modulates: bool) -> Diffusion:
    return filled(lambda: Diffusion(modulates))


def conditioned(me: Member, modulates: bool, sequence: bool) -> None:
    """Each rank had the gradient of the condition by its own rows."""
    part, reference = diffusion(modulates), diffusion(modulates)
    tw.parallelize(part, sequence_parallel=sequence)
    drawn = torch.Generator().manual_seed(1)
    x, time = torch.randn(2, 6, 3, generator=drawn), torch.randn(2, 4, generator=drawn)
    y, want = part(x, time), reference(x, time)
    train_alike(part, reference, y, want, 1e-4)


@FORMS
@pytest.mark.parametrize("modulates", [False, True])
def test_a_condition_of_all_rows(world: World, modulates: bool, sequence: bool) -> None:
    run_either(world, False, conditioned, modulates, sequence)


def unclear(me: Member) -> str:
    part = tw.parallelize(diffusion(False), sequence_parallel=True)
    x, other = torch.randn(2, 6, 16), torch.randn(2, 3, 16, requires_grad=True)
    return refusal(part.blocks[0], x, {"condition": other, "blocks": torch.zeros(())})


def test_another_tensor_of_as_many_rows(world: World) -> None:
    for error in run_either(world, False, unclear):
        assert "blocks.0 with another tensor (2, 3, 16), which needs a gradient" in error, error


def in_sequence() -> nn.Sequential:
    torch.manual_seed(0)
    made = model()
    head = nn.Linear(16, 12)
    return nn.Sequential(made.embed, nn.Dropout(0.0), *made.layers, nn.RMSNorm(16), head)


def sequenced(me: Member, sequence: bool) -> None:
    """Of a model that is itself a sequence, each rank took all rows for its own."""
    part = tw.parallelize(in_sequence(), sequence_parallel=sequence)
    compare(part, in_sequence())


@FORMS
def test_a_model_that_is_a_sequence(world: World, sequence: bool) -> None:
    run_either(world, False, sequenced, sequence)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Beside(nn.Module):
    """Called by another method than its forward, with the rows of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(16), nn.Parameter(torch.ones(16, 16))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ self.weight


class Body(nn.Module):
    """As in vit-pytorch: each layer is a list, and residuals are in this forward."""

    def __init__(self, layers: Any, last: nn.Module) -> None:
        super().__init__()
        parts = ([layer.self_attn, Scale(), layer.mlp] for layer in layers)
        self.layers, self.last = nn.ModuleList(map(nn.ModuleList, parts)), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention, scale, mlp in self.layers:  # type: ignore[misc]
            x = x + scale(attention(x, 0.5))
            x = x + mlp(x)
        last: Any = self.last
        return last.mix(x) if isinstance(last, Beside) else last(x)


class Lists(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        made = model()
        self.embed, self.head = made.embed, nn.Linear(16, 12)
        self.body = Body(made.layers, last)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


class Mean(nn.Module):
    """Of all rows, which is that of one rank's rows here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def lists(last: type[nn.Module]) -> Lists:
    torch.manual_seed(0)
    return Lists(last())


def of_lists(me: Member, sequence: bool) -> list[str]:
    """Hooks of blocks that are lists never ran: gradients were those of all ranks together."""
    part = tw.parallelize(lists(nn.Identity), sequence_parallel=sequence)
    compare(part, lists(nn.Identity))
    if not sequence:
        return []
    alone = nn.ModuleList(nn.ModuleList([layer.self_attn, layer.mlp]) for layer in model().layers)
    return [
        refusal(tw.parallelize(lists(Mean), sequence_parallel=True), ids_of()),
        refusal(tw.parallelize, lists(Beside), sequence_parallel=True),
        refusal(tw.parallelize, alone, sequence_parallel=True),
    ]


@FORMS
def test_layers_that_are_lists(world: World, sequence: bool) -> None:
    named = (
        "body with sequence_parallel=True, which returns (2, 16) for (2, 3, 16)",
        "sequence_parallel=True with body.last, a Beside which the plan does not have",
        "sequence_parallel=True with ModuleList, a list of lists of layers",
    )
    for errors in run_either(world, False, of_lists, sequence):
        assert len(errors) == 3 * sequence
        for error, text in zip(errors, named, strict=False):
            assert text in error, (text, error)
