"""What ``tw.parallelize`` finds out about modules on one rank: layers that compute several
projections, state under their names, norms of heads, and numbers of heads in a forward."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from tileweave.errors import InputError
from tileweave.nn.linear import class_path
from tileweave.parallel import checks, join_projections
from tileweave.parallel.attentions import ATTENTIONS, Attention, role
from tileweave.parallel.checks import counts_heads
from tileweave.parallel.fused import FusedLayer, OwnHeads, SplitLinear, fused_layer, split
from tileweave.parallel.heads import counts_of
from tileweave.parallel.plans import Block, recognise
from tileweave.parallel.trial import _class_of as watched_class


def module_of(**layers: nn.Module) -> Any:
    made: Any = nn.Module()
    for name, layer in layers.items():
        made.add_module(name, layer)
    return made


# --- Layers that compute several projections ---


class MLP(nn.Module):
    def __init__(self, inner: int, out: int, mixes: bool = False) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(4, out), nn.Linear(inner, 4)
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate).flip(-1) * up if self.mixes else silu(gate) * up)


@pytest.mark.parametrize(
    ("mlp", "found"),
    [
        (MLP(6, 12), {"gate_proj": 6, "up_proj": 6}),
        (MLP(7, 15), "an equal projection"),  # an odd number of features
        (MLP(5, 12), "an equal projection"),  # halves that the next layer does not take
        (MLP(6, 12, mixes=True), "does not treat features one by one"),
    ],
)
def test_gated_mlps_that_can_be_split(mlp: MLP, found: Any) -> None:
    layer = fused_layer(module_of(mlp=mlp), "mlp", "gate_up_proj", 2)
    if isinstance(found, str):
        assert isinstance(layer, str) and found in layer
    else:
        assert layer == FusedLayer("mlp", "gate_up_proj", "down_proj", found)
        assert layer.columns == ("gate_up_proj.gate_proj", "gate_up_proj.up_proj")


def attention(heads: int = 4, kv_heads: int = 2, features: int = 64) -> Any:
    made = module_of(qkv_proj=nn.Linear(16, features), o_proj=nn.Linear(32, 16))
    made.head_dim, made.num_key_value_heads = 8, kv_heads
    made.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, eps=1)
    return made


def test_attentions_that_can_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module_of(attention=attention())
    layer = fused_layer(model, "attention", "qkv_proj", 2)
    assert layer == "the forward of Module is not known to take heads of one rank"
    known = ATTENTIONS["transformers.models.phi3.modeling_phi3.Phi3Attention"]
    monkeypatch.setitem(ATTENTIONS, class_path(model.attention), known)
    layer = fused_layer(model, "attention", "qkv_proj", 2)
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    assert layer == FusedLayer("attention", "qkv_proj", "o_proj", sizes)
    for other in (attention(heads=3), attention(kv_heads=1), attention(features=63)):
        reason = fused_layer(module_of(attention=other), "attention", "qkv_proj", 2)
        assert reason == "its features are not those of its heads"
    assert "known to take heads" in str(fused_layer(model, "attention", "o_proj", 2))
    assert fused_layer(model, "attention", "norm", 2) == "it is a builtins.NoneType"
    config = model.attention.config
    split(model, layer, 2)
    own = model.attention.config
    assert isinstance(own, OwnHeads) and own.eps == 1
    assert (own.num_attention_heads, own.num_key_value_heads) == (2, 1)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert counts_of(model.attention, 1, 2) == {"num_key_value_heads": (2, 1)}
    assert isinstance(model.attention.qkv_proj, SplitLinear)


@pytest.mark.parametrize(
    "name",
    [
        *("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv", "wqkv", "W_pack", "to_qkv"),
        *("fused_qkv", "qkv_linear", "gate_up_proj", "gate_up", "w13"),
    ],
)
def test_no_fused_layer_is_cut_into_equal_parts(name: str) -> None:
    """These names, of several frameworks, are those of layers with several projections."""
    model = module_of(block=module_of(**{name: nn.Linear(8, 24), "o_proj": nn.Linear(8, 8)}))
    with pytest.raises(InputError, match=rf"block\.{name}, which computes several projections"):
        recognise(model, 2)


# --- State under the names of fused layers ---


def test_parameters_of_projections_are_joined() -> None:
    linear = nn.Linear(4, 6)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    alone, nested = SplitLinear(linear, {"a": 2, "b": 4}), nn.Linear(6, 3, bias=False)
    model = module_of(up=alone, down=nested)
    gradients = {"up.a.weight": torch.ones(2, 4), "up.b.weight": torch.zeros(4, 4)}
    found = join_projections(model, {**gradients, "up.a.bias": torch.ones(2), "other": 3})
    # one of two biases stays as it is
    assert {*found} == {"up.weight", "up.a.bias", "other"} and found["other"] == 3
    assert torch.equal(found["up.weight"], torch.cat([*gradients.values()]))
    for name, whole in (("weight", weight), ("bias", bias)):
        joined = alone.state_dict()[name]
        assert torch.equal(joined, whole) and not joined.requires_grad
        joined = join_projections(alone, {f"{part}.{name}": t for part, t in parts_of(alone, name)})
        assert torch.equal(joined[name], whole) and not joined[name].requires_grad
    # a projection that became another module keeps its parameters
    alone.b = module_of(inner=alone.b)
    assert {*alone.state_dict()} == {"a.weight", "a.bias", "b.inner.weight", "b.inner.bias"}


def test_a_layer_of_one_part_keeps_its_parameters() -> None:
    """As of heads whose q, k and v are next to each other."""
    weight = torch.ones(6, 4)
    model = SplitLinear(nn.Linear(4, 6, bias=False), {"heads": 6})
    model.load_state_dict({"weight": weight})
    assert torch.equal(model.heads.weight, weight)
    assert [*model.state_dict()] == ["weight"] and torch.equal(model.state_dict()["weight"], weight)
    assert torch.equal(join_projections(model, {"heads.weight": weight})["weight"], weight)
    state = {"heads.weight": {"step": torch.tensor(3.0), "exp_avg": weight}}
    found = join_projections(model, {"state": state, "param_groups": []})["state"]["weight"]
    assert found["step"] == 3 and torch.equal(found["exp_avg"], weight)


def parts_of(module: SplitLinear, kind: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(getattr(module, name), kind)) for name in module.names]


def test_states_of_optimizers_are_joined() -> None:
    model = module_of(up=SplitLinear(nn.Linear(4, 6, bias=False), {"a": 2, "b": 4}))
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.full((rows, 4), value), "flag": name}
        for name, rows, value in (("up.a.weight", 2, 1.0), ("up.b.weight", 4, 2.0))
    }
    names = ["first", "up.a.weight", "up.b.weight", "last"]
    found = join_projections(
        model, {"state": state, "param_groups": [{"params": names, "lr": 0.1}]}
    )
    assert found["param_groups"] == [{"params": ["first", "up.weight", "last"], "lr": 0.1}]
    assert [*found["state"]] == ["up.weight"]
    joined = found["state"]["up.weight"]
    assert joined["step"].shape == () and joined["step"] == 7 and joined["flag"] == "up.a.weight"
    assert joined["exp_avg"].tolist() == [[1.0] * 4] * 2 + [[2.0] * 4] * 4


# --- Heads ---


@pytest.mark.parametrize(
    ("norm", "refused"),
    [
        (nn.LayerNorm(8), ""),  # of one head
        (nn.LayerNorm(32), "features, those of all heads"),
        (nn.LayerNorm(16), "features, those of all heads"),  # of the keys
        (nn.RMSNorm((4, 8)), "features, those of all heads"),
        (nn.LayerNorm(12), ""),
        (nn.ModuleList([nn.LayerNorm(8)]), "a list of norms"),
    ],
)
def test_norms_of_heads(norm: nn.Module, refused: str) -> None:
    module = module_of(q=nn.Linear(16, 32), k=nn.Linear(16, 16), inner=nn.Linear(16, 12))
    module.head_dim = 8
    block = Block("attention", ("q", "k", "inner.x"), "o")
    if refused:
        with pytest.raises(InputError, match=refused):
            checks._check_norm_of_heads("attention.norm", norm, module, block)
    else:
        checks._check_norm_of_heads("attention.norm", norm, module, block)
    # with one head, its features are all
    module.head_dim = 32
    if isinstance(norm, nn.LayerNorm) and norm.weight.numel() == 32:
        checks._check_norm_of_heads("attention.norm", norm, module, block)


def test_what_is_not_between_the_layers_of_a_block() -> None:
    """A norm of as many features as the last layer returns: between the layers it would be an
    error."""
    block, scale = Block("attention", ("q",), "o"), nn.Module()
    scale.weight = nn.Parameter(torch.ones(16))
    model = module_of(q=nn.Linear(16, 32), o=nn.Linear(32, 16))

    def around(child: nn.Module, module: Any = model, *styled: str) -> bool:
        return checks._is_around(child, "attention.child", module, block, {*styled})

    assert around(nn.LayerNorm(16)) and around(nn.RMSNorm(16))
    assert not around(nn.LayerNorm(32)) and not around(nn.LayerNorm((1, 16)))
    assert not around(nn.BatchNorm1d(16)) and not around(scale)
    assert around(scale, model, "attention.child.q")
    assert not around(scale, model, "attention.child", "attention.children.q")


class Counting(nn.Module):
    """Takes numbers of heads from attributes, in its forward or in what that calls."""

    def __init__(self, **counts: Any) -> None:
        super().__init__()
        self.__dict__.update(counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x).view(self.n_head, self.nh, self.head_dim, self.num_head_groups)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*[self.num_kv_heads for _ in range(self.layers)])

    def unused(self) -> int:
        return self.other_heads


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"n_head": 4}, True),
        ({"nh": 4}, True),
        ({"num_kv_heads": 2}, True),
        ({"config": SimpleNamespace(n_head=4)}, True),
        ({"n_head": 1, "config": SimpleNamespace(n_head=4)}, False),  # its own attribute counts
        ({"n_head": True, "nh": "4"}, False),
        ({"head_dim": 4, "num_head_groups": 4, "other_heads": 4, "layers": 4}, False),
        ({}, False),
    ],
)
def test_numbers_of_heads_in_a_forward(counts: dict[str, Any], found: bool) -> None:
    assert counts_heads(Counting(**counts)) is found


def of_heads(sizes: dict[str, int], **attributes: Any) -> Any:
    """An attention with linear layers of these sizes, whose forward may take numbers of heads."""
    made: Any = Counting(**attributes)
    for name, size in sizes.items():
        made.add_module(name, nn.Linear(16, size))
    return made


@pytest.mark.parametrize(
    ("sizes", "attributes", "ranks", "refused"),
    [
        ({"q": 32, "k_proj": 16}, {"head_dim": 8}, 2, ""),
        (
            {"q": 32, "k_proj": 16},
            {"head_dim": 8},
            4,
            "16 features, heads of 8, over 4 ranks",
        ),
        ({"q": 32, "k_proj": 16}, {"head_size": 8}, 4, "attention.k_proj: 16 features, heads of 8"),
        ({"q": 32, "k_proj": 16}, {"attention_head_size": 8}, 4, "attention.k_proj: 16 features"),
        ({"q": 32, "k_proj": 16}, {}, 4, ""),
        # a gate with a number for each head; keys have none
        ({"q": 32, "gate": 4}, {"head_dim": 8}, 2, ""),
        ({"q": 64, "gate": 4}, {"head_dim": 8}, 2, "attention.gate: 4 features"),
        ({"q": 48, "gate": 6}, {"head_dim": 8}, 4, "attention.q: 48 features"),
        ({"q": 32, "k_proj": 4}, {"head_dim": 8}, 2, "attention.k_proj: 4 features"),
        # heads of all ranks
        ({"q": 32}, {"head_dim": 8, "n_head": 4}, 2, r"set \S*attention.n_head = 2"),
        ({"q": 32}, {"head_dim": 8, "n_head": 2}, 2, ""),
        ({"q": 32}, {"n_head": 4}, 2, "takes n_head = 4, the heads of all ranks .q has 32"),
        ({"q": 32}, {"n_head": 5}, 2, ""),
        ({"q": 32, "k_proj": 16}, {"head_dim": 8, "num_kv_heads": 2}, 2, "k_proj has 16 features"),
        ({"q": 32, "k_proj": 16}, {"head_dim": 8, "num_kv_heads": 4}, 2, ""),
    ],
)
def test_heads_of_one_rank(
    sizes: dict[str, int], attributes: dict[str, Any], ranks: int, refused: str
) -> None:
    module = of_heads(sizes, **attributes)
    blocks = [(module, Block("attention", tuple(sizes), "o"))]
    inner = Block("layer", tuple(f"attention.{name}" for name in sizes), "o", within="attention")
    blocks.append((module_of(attention=module), inner))
    for each, block in blocks:
        if refused:
            with pytest.raises(InputError, match=refused):
                checks._check_heads(each, block, ranks, {})
        else:
            checks._check_heads(each, block, ranks, {})


@pytest.mark.parametrize(
    ("sizes", "attributes", "ranks", "counts"),
    [
        ({"q": 32}, {"n_head": 4}, 2, {"n_head": (4, 2)}),
        ({"q": 48}, {"n_head": 6}, 4, {}),  # no whole heads
        ({"q": 32}, {"head_dim": 8, "n_head": 2}, 2, {}),  # of one rank
        ({"q": 32, "k_proj": 16}, {"head_dim": 8, "num_kv_heads": 2}, 4, {"num_kv_heads": (2, 1)}),
        ({"q": 32}, {"n_head": True}, 2, {}),
    ],
)
def test_numbers_of_heads_to_share(
    sizes: dict[str, int], attributes: dict[str, Any], ranks: int, counts: dict[str, Any]
) -> None:
    module, block = of_heads(sizes, **attributes), Block("attention", tuple(sizes), "o")
    module.o = nn.Linear(sizes["q"], 16)
    assert checks.attributes_to_share(module, block, ranks) == (counts, {}, False)
    objects = counts if "head_dim" in attributes else {}
    alone = replace(block, shares=False)
    assert checks.attributes_to_share(module, alone, ranks) == (objects, {}, False)
    inner = Block("layer", tuple(f"attention.{name}" for name in sizes), "o", within="attention")
    around = module_of(attention=module, o=module.o)
    inside = {f"attention.{name}": numbers for name, numbers in counts.items()}
    assert checks.attributes_to_share(around, inner, ranks) == (inside, {}, False)
    for name in counts:  # in its configuration
        module.config = SimpleNamespace(**{name: vars(module).pop(name)})
    configured = {f"config.{name}": numbers for name, numbers in counts.items()}
    assert checks.attributes_to_share(module, block, ranks) == (configured, {}, False)


def test_features_of_the_input_to_share() -> None:
    """Where all layers take as many features as the heads have, divided by the ranks."""
    module = module_of(q=nn.Linear(16, 16), k_proj=nn.Linear(16, 8), o=nn.Linear(16, 16))
    block = Block("attention", ("q", "k_proj"), "o")
    assert checks.attributes_to_share(module, block, 2)[2]
    assert not checks.attributes_to_share(module, block, 3)[2]
    module.k_proj = nn.Linear(8, 8)
    assert not checks.attributes_to_share(module, block, 2)[2]


@pytest.mark.parametrize(
    ("layers", "sizes", "row", "copies"),
    [
        ({"c_attn": (16, 48), "c_proj": (16, 16)}, (16, 16, 16), "c_proj", 1),
        ({"wqkv": (16, 32), "wo": (16, 16), "head_dim": 4}, (16, 8, 8), "wo", 1),
        ({"wqkv": (16, 24), "wo": (16, 16), "head_dim": 4}, (16, 4, 4), "wo", 2),
        ({"qkv": (16, 32), "proj": (16, 16), "norm": (16, 16)}, None, "", 1),  # which one is it?
        ({"qkv": (16, 33), "proj": (16, 16)}, None, "", 1),
        ({"qkv": (16, 16), "proj": (16, 16)}, None, "", 1),
        ({"qkv": (16, 48), "proj": (16, 8)}, None, "", 1),
        ({"gate_up": (16, 48), "down": (16, 16)}, None, "", 1),
    ],
)
def test_projections_of_one_layer_are_guessed(
    layers: dict[str, Any], sizes: tuple[int, ...] | None, row: str, copies: int
) -> None:
    attributes = {n: v for n, v in layers.items() if isinstance(v, int)}
    made = {n: nn.Linear(*v) for n, v in layers.items() if n not in attributes}
    model, name = module_of(attention=module_of(**made)), next(iter(made))
    for key, value in attributes.items():
        setattr(model.attention, key, value)
    assert isinstance(fused_layer(model, "attention", name, 2), str), "no trial is made"
    found = fused_layer(model, "attention", name, 2, guess=True)
    if sizes is None:
        assert isinstance(found, str)
        return
    assert isinstance(found, FusedLayer) and found.guessed and found.row == row
    assert tuple(found.sizes.values()) == sizes
    assert found.copies == ({} if copies == 1 else {"k_proj": copies, "v_proj": copies})


def test_attentions_that_are_known_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    module, block = of_heads({"qkv": 96}, head_dim=8, n_head=12), Block("at", ("qkv",), "o")
    with pytest.raises(InputError, match="takes n_head = 12, the heads of all ranks"):
        checks._check_heads(module, block, 12, {})
    monkeypatch.setitem(ATTENTIONS, class_path(module), Attention())
    checks._check_heads(module, block, 12, {})
    assert counts_heads(of_heads({}))
    # q, k and v of a head next to each other are one part
    monkeypatch.setitem(ATTENTIONS, class_path(module), Attention("qkv", "o"))
    checks._check_heads(module, block, 4, {})
    with pytest.raises(InputError, match="96 features, heads of 24, over 12 ranks"):
        checks._check_heads(module, block, 12, {})


def test_names_of_keys() -> None:
    for name in ("num_kv_heads", "key", "V_Value", "k_proj", "v_proj", "wk", "wv"):
        assert checks._of_keys(name)
    for name in ("q_proj", "wq", "num_heads", "query"):
        assert not checks._of_keys(name)


# --- Names ---


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("q", "q q_proj Wq W_Q w_query to_q query queries fc_q q_linear query_layer linear_q qs"),
        ("k", "k key keys k_lin to_k W_K key_proj proj_k attn_k k_mat"),
        ("v", "v val value values v_net valueProj value_projection dense_v"),
        ("", "o proj qk qkv c_attn kv quantize vision q_norm kernel question v1"),
    ],
)
def test_roles_by_names(kind: str, names: str) -> None:
    assert {name: role(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_each_made_class_has_a_code_of_its_own() -> None:
    """torch.compile compiles one code a few times only, for all classes that have it."""
    forwards = [watched_class(kind).forward for kind in (nn.Linear, nn.ReLU, nn.GELU)]
    assert len({id(forward.__code__) for forward in forwards}) == 3
    assert len({forward.__code__ for forward in forwards}) == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_mlp_in_a_sequence_is_found_on_any_device(device: str) -> None:
    with torch.device(device):
        made = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        mixed = nn.Sequential(nn.Linear(8, 12), nn.Softmax(-1), nn.Linear(12, 8))
        found, fused = recognise(module_of(a=made, b=mixed), 2, guess=True)
    assert found == [Block("a", ("1",), "3", shares=False, guessed=True)] and not fused
