"""tw.parallelize tries the modules around sharded layers: what mixes features or heads of ranks is
refused with the path, on every rank, and what does not is right."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tests.cpu.test_parallelize import MLP, Attention, compare, filled, ids_of, model
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn import functional as f

import tileweave as tw
from tileweave.parallel import trial


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class Between(MLP):
    """One of many functions between the layers of an MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__(16, 24)
        self.kind = kind
        if kind == "glu":
            self.down_proj = nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_proj(x) * self.up_proj(x)
        if self.kind == "softmax":
            y = y.softmax(-1)
        if self.kind == "glu":
            y = f.glu(y, -1)
        if self.kind == "norm":
            y = f.layer_norm(y, y.shape[-1:])
        if self.kind == "size":
            y = y / y.shape[-1]
        if self.kind == "features of all":
            y = y * torch.ones(24)
        if self.kind == "pairs":  # of neighbours: whole on each rank
            y = y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return self.down_proj(y)


class Heads(Attention):
    """An attention with something for each head."""

    def __init__(self, kind: str) -> None:
        super().__init__(16, 4, 4, 4)
        self.kind = kind
        del self.q_norm

    def forward(self, hidden_states: torch.Tensor, scale: float) -> torch.Tensor:
        batch, rows, _ = hidden_states.shape
        shape = (batch, rows, 4, -1) if self.kind == "number of heads" else (batch, rows, -1, 4)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = scale * q @ k.mT
        if self.kind == "slopes":
            scores = scores * torch.arange(1, 5)[: q.shape[1], None, None]
        scores = scores.softmax(1 if self.kind == "over heads" else -1)
        return self.o_proj((scores @ v).transpose(1, 2).flatten(2))


class Apart(nn.Module):
    """Layers that are not children of one module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, inner = kind, nn.PReLU() if kind == "between" else nn.GELU()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), inner), nn.Linear(24, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parts[0](x)
        return self.parts[1](y.softmax(-1) if self.kind == "softmax" else y)


class Averaged(Between):
    """Returns an average over features, too."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.up_proj(x)
        return self.down_proj(y * self.gate_proj(x)), y.mean()


APART = {"layers.*.mlp.parts.0.0": "colwise", "layers.*.mlp.parts.1": "rowwise"}
MLPS = ("softmax", "glu", "norm", "size", "features of all")
ATTENTIONS = ("number of heads", "slopes", "over heads")


def changed(kind: str) -> Any:
    made = model()
    for layer in made.layers:
        if kind in ("heads", *ATTENTIONS):
            layer.self_attn = Heads(kind)
        else:
            layer.mlp = Between(kind)
    torch.manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def apart(kind: str) -> Any:
    made = model()
    for layer in made.layers:
        layer.mlp = Apart(kind)
    return made


def refused(me: Member) -> list[str]:
    """Modules of one tensor at once, others in their first call; each also with rows sharded."""
    found = []
    for kind in MLPS:
        found.append(refusal(tw.parallelize, changed(kind)))
    for kind in ATTENTIONS:
        for sequence in (False, True):
            part = tw.parallelize(changed(kind), sequence_parallel=sequence)
            found.append(refusal(part, ids_of()))
    later: Any = tw.parallelize(model())
    later.layers[1].mlp.up_proj = nn.Linear(16, 24)
    hooked: Any = model()
    first = nn.parallel.DistributedDataParallel(model())
    hooked.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    only = tw.parallelize(model(), plan={"layers.*.mlp.up_proj": "colwise"})
    whole = dict(model().named_parameters())
    averaged = model()
    averaged.layers[0].mlp = Averaged("average")
    rows = {"layers.*.mlp.*_proj": tw.parallel.Colwise(), "layers.*.mlp.down_proj": "rowwise"}
    return [
        *found,
        refusal(later, ids_of()),
        refusal(tw.parallelize, hooked),
        refusal(tw.parallelize, first),
        refusal(nn.parallel.DistributedDataParallel, tw.parallelize(model())),
        refusal(only, ids_of()),
        refusal(tw.parallelize, apart("softmax"), None, dict(APART)),
        refusal(tw.parallelize, apart("between"), None, dict(APART)),
        refusal(tw.parallelize, averaged),
        refusal(tw.parallelize, model(), None, rows, sequence_parallel=True),
        refusal(torch.func.functional_call, tw.parallelize(model()), whole, (ids_of(),)),
    ]


NAMED = (
    *["layers.0.mlp over 2 ranks, whose forward"] * len(MLPS),
    *["layers.0.self_attn over 2 ranks, whose forward"] * 2 * len(ATTENTIONS),
    "layers.1.mlp.up_proj, which became a torch.nn.modules.linear.Linear",
    "layers.0.mlp.up_proj, which has forward hooks",
    "a model, a DistributedDataParallel",
    "DistributedDataParallel around Model, whose layers, such as layers.0.self_attn.q_proj",
    "layers.0.mlp over 2 ranks, whose forward raised RuntimeError: The size of tensor",
    "layers.0.mlp over 2 ranks, whose forward",
    "layers.0.mlp, which has parameters in layers.0.mlp.parts.0.1",
    "layers.0.mlp over 2 ranks, whose forward",
    "layers.0.mlp.gate_proj: Colwise(sequence_dim=None",
    "layers.0.self_attn.q_proj with a weight (16, 16)",
)


def test_what_mixes_parts_of_ranks_is_named(world: World) -> None:
    for errors in run_either(world, False, refused):
        for error, named in zip(errors, NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
            assert "remedy" in error


class Deep(nn.Module):
    """As nanoGPT: parts in a ModuleDict, whose embedding the head uses directly."""

    def __init__(self) -> None:
        super().__init__()
        inner = model()
        parts: Any = {"embed": inner.embed, "blocks": inner.layers, "norm": inner.norm}
        self.parts: Any = nn.ModuleDict(parts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.parts.embed(ids)
        for block in self.parts.blocks:
            x = block(x)
        return f.linear(self.parts.norm(x), self.parts.embed.weight)


def right(me: Member) -> None:
    compare(tw.parallelize(changed("pairs")), changed("pairs"))
    compare(tw.parallelize(changed("heads")), changed("heads"))
    torch.manual_seed(0)
    reference = apart("neither")
    part = apart("neither")
    part.load_state_dict(reference.state_dict())
    compare(tw.parallelize(part, plan=dict(APART)), reference)
    for sequence in (False, True):
        compare(tw.parallelize(Deep(), sequence_parallel=sequence), Deep())
    unchecked = tw.parallelize(changed("softmax"), check=False)
    assert unchecked(ids_of()).shape == (2, 6, 12)


def test_what_does_not_is_right(world: World) -> None:
    run_either(world, False, right)


def note(seen: list[Any], *given: Any) -> None:
    seen.append(given)


def test_a_trial_leaves_no_trace(world: World) -> None:
    run_either(world, False, untouched)


def untouched(me: Member) -> None:
    """Random numbers, buffers, modes and hooks of the model are as without a trial."""
    states = []
    for check in (False, True):
        part = changed("heads")
        seen: list[Any] = []
        for layer in part.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5), nn.BatchNorm1d(6))
            layer.mlp[1].register_forward_hook(partial(note, seen))
        tw.parallelize(part, check=check)
        torch.manual_seed(3)
        y = part(ids_of())
        states.append((y, torch.get_rng_state(), part.layers[0].mlp[2].running_mean, len(seen)))
        assert all(module.training for module in part.modules())
    for without, tried in zip(*states, strict=True):
        assert torch.equal(without, tried) if isinstance(tried, torch.Tensor) else without == tried


class Counted(nn.Module):
    """An MLP with a table that a trial must not copy. Notes its calls."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 128), nn.Linear(128, 8)
        self.table, self.fails = nn.Parameter(torch.zeros(1, 8)), fails
        Counted.calls.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls.append((x.numel(), self.table))
        if len(Counted.calls) == self.fails:
            raise torch.OutOfMemoryError("out of memory")
        return self.down(self.up(x + self.table))


def test_a_trial_for_many_ranks_is_small() -> None:
    module = Counted()
    tried = trial.modules_to_try(module, ["up"], ["down"], 64)[""]
    trial.try_made_up_input(module, tried, {})
    assert tried.done
    assert len(Counted.calls) == 7  # three with all heads, three of ranks, one with gradients
    for elements, table in Counted.calls:
        assert elements == 2 * 3 * 8 and table is module.table


@pytest.mark.parametrize("call", [1, 5], ids=["all heads", "those of a rank"])
def test_a_trial_without_memory_refuses_nothing(call: int) -> None:
    module = Counted(call)
    tried = trial.modules_to_try(module, ["up"], ["down"], 4)[""]
    trial.try_made_up_input(module, tried, {})
    assert len(Counted.calls) == call and not tried.done


def test_a_trial_for_one_rank_is_right() -> None:
    module = Counted()
    tried = trial.modules_to_try(module, ["up"], ["down"], 1)[""]
    trial.try_made_up_input(module, tried, {})
    assert tried.done and len(Counted.calls) == 5


class Biased(Heads):
    """Adds a bias to all scores, which is not its own."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, scale: float, bias: Any = None
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=bias["of"], scale=scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Weighted(MLP):
    """Takes its input between its layers, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x) * x.mean(-1, keepdim=True))


class Giver(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.kind = nn.Embedding(12, 16), kind
        self.bias = nn.Parameter(torch.ones(6, 6))
        self.blocks = nn.ModuleList(Given(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, {"of": self.bias})
        return x


class Given(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.part = Biased("") if kind == "bias" else Weighted(16, 24)

    def forward(self, x: torch.Tensor, bias: Any) -> torch.Tensor:
        return x + (self.part(x, 0.5, bias) if isinstance(self.part, Biased) else self.part(x))


def giver(kind: str) -> Giver:
    return filled(lambda: Giver(kind))


def with_gradients(me: Member, kind: str) -> list[str]:
    """Each rank had the gradient by its own heads or features, without an error."""
    part, reference = tw.parallelize(giver(kind)), giver(kind)
    with torch.no_grad():
        torch.testing.assert_close(part(ids_of()), reference(ids_of()), atol=1e-5, rtol=1e-4)
    compiled = torch.compile(tw.parallelize(giver(kind)), backend="eager")
    found = [refusal(part, ids_of()), refusal(tw.parallelize(giver(kind)), ids_of())]
    part = tw.parallelize(giver(kind), sequence_parallel=True)  # gradients of all that are summed
    y, want = part(ids_of()), reference(ids_of())
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-4)
    for result in (y, want):
        result.square().mean().backward()
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            own: Any = part.get_parameter(name).grad
            torch.testing.assert_close(own.full_tensor(), parameter.grad, atol=1e-5, rtol=1e-4)
    return found if kind == "bias" else [*found, refusal(compiled, ids_of())]


@pytest.mark.parametrize("kind", ["bias", "input"])
def test_gradients_of_what_is_used_between_layers(world: World, kind: str) -> None:
    name = {"bias": 2, "input": 0}[kind]
    for errors in run_either(world, False, with_gradients, kind):
        for error in errors:
            assert f"blocks.0.part with argument {name}, which needs a gradient" in error, error
