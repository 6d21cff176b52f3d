"""tw.parallelize of models with torch's ``nn.MultiheadAttention``, against the unsplit model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, filled, run_either, train_alike, whole
from tests.support.calls import refusal
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, Worlds
from torch import nn

import tileweave as tw

WIDTH, HEADS, ROWS = 16, 4, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(ROWS)
NUMBERS = torch.zeros(2, ROWS).index_fill_(1, torch.tensor([6, 7]), -torch.inf)
PADDING = torch.tensor([[False] * ROWS, [False] * 5 + [True] * 3])


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder(**options: Any) -> nn.TransformerEncoder:
    options = {"batch_first": True, "dropout": 0.0, **options}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, **options)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class Block(nn.Module):
    """Uses the weights of all heads, and has a mask for each head."""

    def __init__(self, average: bool, batch_first: bool, trains: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.norm, self.average, self.trains = nn.LayerNorm(WIDTH), average, trains
        self.linear1, self.linear2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h, weights = self.attention(
            query=h, key=h, value=h, attn_mask=mask, average_attn_weights=self.average
        )
        if self.trains:
            h = h * weights.square().sum()
        x = x + h * weights.detach().square().sum()
        return x + self.linear2(self.linear1(x).relu())


class Weighing(nn.Module):
    def __init__(
        self, average: bool = True, batch_first: bool = True, trains: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(average, batch_first, trains) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Separate(nn.Module):
    """An attention with an argument each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [
            layer(t).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer, t in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        ]
        y = nn.functional.scaled_dot_product_attention(*heads)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Separate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)


class Threefold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Added() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Case:
    """A model, its input, and the dimension of rows."""

    def __init__(self, make: Callable[[], nn.Module], *args: Any, dim: int = 1, **kw: Any) -> None:
        self.make, self.args, self.kwargs, self.dim = make, args, kw, dim

    def build(self) -> Any:
        return filled(self.make)


BATCH, ROWS_FIRST = drawn(2, ROWS, WIDTH), drawn(ROWS, 2, WIDTH)
PER_HEAD = drawn(2 * HEADS, ROWS, ROWS, seed=2)
CASES = {
    "batch first": Case(encoder, BATCH),
    "rows first": Case(lambda: encoder(batch_first=False), ROWS_FIRST, dim=0),
    "norm first": Case(lambda: encoder(norm_first=True, bias=False), BATCH),
    "causal": Case(encoder, BATCH, mask=CAUSAL, is_causal=True),
    "padding": Case(encoder, BATCH, src_key_padding_mask=PADDING),
    "both masks": Case(encoder, BATCH, mask=CAUSAL, src_key_padding_mask=NUMBERS),
    "without a batch": Case(encoder, BATCH[0], dim=0),
    "weights": Case(Weighing, BATCH, PER_HEAD),
    "weights of heads": Case(lambda: Weighing(False), BATCH, PER_HEAD < -1),
    "weights, rows first": Case(lambda: Weighing(True, False), ROWS_FIRST, PER_HEAD, dim=0),
    "three arguments": Case(Threefold, BATCH),
}


def compare(part: Any, reference: Any, case: Case, call: Any = None) -> None:
    y = (part if call is None else call)(*case.args, **case.kwargs)
    want = reference(*case.args, **case.kwargs)
    train_alike(part, reference, y, want, 1e-4)


def right(me: Member, kind: str, sequence: bool) -> None:
    case = CASES[kind]
    part, reference = case.build(), case.build()
    tw.parallelize(part, sequence_parallel=sequence, sequence_dim=case.dim)
    for _ in range(2):
        compare(part, reference, case)
    compare(copy.deepcopy(part), reference, case)
    layers = [m for m in part.modules() if isinstance(m, tw.nn.ColumnParallelLinear)]
    assert len(layers) >= 6, "q, k and v of two attentions at least"
    assert all(m.weight.to_local().shape[0] * me.world_size == m.weight.shape[0] for m in layers)
    part.eval(), reference.eval()
    with torch.no_grad():  # torch's encoder has kernels of its own for this
        y, want = (m(*case.args, **case.kwargs) for m in (part, reference))
    assert_near(y, want, 1e-4, 1e-5, "without gradients")


@FORMS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", CASES)
def test_attentions_of_torch(worlds: Worlds, kind: str, size: int, sequence: bool) -> None:
    run_either(worlds("gloo", size), False, right, kind, sequence)


def saved(me: Member) -> None:
    case = CASES["batch first"]
    part, reference = case.build(), case.build()
    tw.parallelize(part)
    state, want = part.state_dict(), reference.state_dict()
    assert [*state] == [*want]
    for name, t in want.items():
        assert torch.equal(whole(state[name]), t), name
    other = {name: t + 1 for name, t in want.items()}
    part.load_state_dict(other)
    reference.load_state_dict(other)
    compare(part, reference, case)
    file = io.BytesIO()
    torch.save({name: whole(t) for name, t in part.state_dict().items()}, file)
    file.seek(0)
    encoder().load_state_dict(torch.load(file))


def test_names_and_shapes_in_state_dicts_stay(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, saved)


def compiled(me: Member, kind: str, sequence: bool) -> None:
    case = CASES[kind]
    part = tw.parallelize(case.build(), sequence_parallel=sequence, sequence_dim=case.dim)
    whole_graph = torch.compile(part, backend="aot_eager", fullgraph=True)
    compare(part, case.build(), case, whole_graph)


@FORMS
@pytest.mark.parametrize("kind", ["causal", "weights"])
def test_compiled(worlds: Worlds, kind: str, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, compiled, kind, sequence)


def padded(me: Member, sequence: bool) -> None:
    """torch's encoder packs rows without padding for its own kernels, and returns zeros for
    those."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, batch_first=True)
    reference = nn.TransformerEncoder(layer, 2).eval()
    part = tw.parallelize(copy.deepcopy(reference), sequence_parallel=sequence)
    with torch.no_grad():
        y, want = (m(BATCH, src_key_padding_mask=PADDING) for m in (part, reference))
    assert_near(y[~PADDING], want[~PADDING], 1e-4, 1e-5, "y")


@FORMS
def test_encoders_that_pack_rows(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, padded, sequence)


def translated(me: Member) -> str:
    case = Case(
        lambda: nn.Transformer(WIDTH, HEADS, 2, 2, 40, dropout=0.0, batch_first=True),
        BATCH,
        drawn(2, 6, WIDTH, seed=3),
    )
    part = tw.parallelize(case.build())
    compare(part, case.build(), case)
    return refusal(tw.parallelize(case.build(), sequence_parallel=True), *case.args)


def test_cross_attention(worlds: Worlds) -> None:
    for error in run_either(worlds("gloo", 2), False, translated):
        assert "decoder.layers.0.multihead_attn.in_proj.k_proj of another tensor" in error, error
        assert "for a cross attention, sequence_parallel=False" in error, error


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


class Odd(nn.Module):
    """An attention that stays whole, and an MLP that is sharded."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.mlp(x)


def stays(me: Member) -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        case = Case(lambda options=options: Odd(**options), BATCH)  # type: ignore[misc]
        part = tw.parallelize(case.build())
        assert isinstance(part.mlp.fc1, tw.nn.ColumnParallelLinear)
        assert part.attention.in_proj_weight.to_local().shape == (3 * WIDTH, WIDTH)
        compare(part, case.build(), case)


def with_gradients(me: Member) -> str:
    """Those of weights, whose uses see the rows of one rank."""
    case = Case(lambda: Weighing(trains=True), BATCH, PER_HEAD)
    compare(tw.parallelize(case.build()), case.build(), case)
    y = tw.parallelize(case.build(), sequence_parallel=True)(*case.args)
    return refusal(y.sum().backward)


def test_gradients_of_weights(worlds: Worlds) -> None:
    for error in run_either(worlds("gloo", 2), False, with_gradients):
        assert error.startswith("InputError: asked: a gradient of the weights that"), error


def by_plan(me: Member) -> list[str]:
    case = CASES["batch first"]
    plan: dict[str, Any] = {
        "layers.*.self_attn.in_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
    }
    part = tw.parallelize(case.build(), plan=plan)
    assert part.layers[0].self_attn.in_proj.q_proj.weight.to_local().shape == (WIDTH // 2, WIDTH)
    assert not isinstance(part.layers[0].linear1, tw.nn.ColumnParallelLinear)
    compare(part, case.build(), case)
    made = (
        encoder(num_heads=1)
        if False
        else nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 1, 40, batch_first=True),
            1,
            enable_nested_tensor=False,
        )
    )
    row = {"layers.*.self_attn.out_proj": "rowwise"}
    style = {"layers.*.self_attn.in_proj": tw.parallel.Colwise(), **row}
    found = [refusal(tw.parallelize, made), refusal(tw.parallelize, made, plan=row)]
    found.append(refusal(tw.parallelize, made, plan=style))
    assert type(made.layers[0].self_attn) is nn.MultiheadAttention
    assert [*made.state_dict()] == [*encoder().state_dict()][:12]
    made(BATCH)
    return found


def test_others_stay_whole(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, stays)


def test_a_plan_of_a_user(worlds: Worlds) -> None:
    named = [
        "layers.0.self_attn.in_proj: 16 features of q_proj, heads of 16, over 2 ranks",
        "a style for layers.0.self_attn.out_proj of an nn.MultiheadAttention",
        "layers.0.self_attn.in_proj",
    ]
    for errors in run_either(worlds("gloo", 2), False, by_plan):
        for error, text in zip(errors, named, strict=True):
            assert error.startswith("InputError: asked:") and text in error, (text, error)
