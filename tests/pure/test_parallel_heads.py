"""Which ranks compute which heads of keys and values, and the numbers of heads of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tileweave.nn.linear import class_path
from tileweave.parallel.attentions import ATTENTIONS, Attention, known_attention
from tileweave.parallel.fused import copies_of
from tileweave.parallel.heads import Heads, counts_of, head_size, shared_keys
from tileweave.parallel.plans import Block


@pytest.mark.parametrize(
    ("features", "head", "size", "copies"),
    [
        (8, 8, 2, 2),
        (16, 8, 8, 4),
        (16, 8, 2, 1),
        (64, 8, 4, 1),
        (24, 8, 4, 1),  # three heads: four ranks cannot share them evenly
        (12, 8, 4, 1),  # no whole heads
        (0, 8, 4, 1),
        (16, None, 8, 1),
    ],
)
def test_ranks_for_a_head(features: int, head: int | None, size: int, copies: int) -> None:
    assert copies_of(features, head, size) == copies


def attention(sizes: dict[str, int], **attributes: Any) -> Any:
    made: Any = nn.Module()
    for name, size in sizes.items():
        made.add_module(name, nn.Linear(8, size))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"q_proj": 32, "k_proj": 8, "v_proj": 8}, {"k_proj": 4, "v_proj": 4}),
        ({"wq": 32, "wk": 16, "wv": 16}, {"wk": 2, "wv": 2}),
        ({"q_proj": 32, "k_proj": 32, "v_proj": 32}, {}),
        ({"q_proj": 32, "k_proj": 8, "v_proj": 16}, {}),  # of different numbers of heads
        ({"q_proj": 32, "kv_proj": 16}, {}),  # both in one: ranks would have one of them
        ({"gate_proj": 8, "up_proj": 8}, {}),
    ],
)
def test_layers_of_keys_and_values_are_shared(sizes: dict[str, int], found: dict[str, int]) -> None:
    module = attention(sizes, head_dim=8)
    block = Block("", tuple(sizes), "o_proj")
    assert shared_keys(module, block, {}, 4) == found
    outer = attention({})
    outer.add_module("self", module)
    for inner in (
        Block("self", tuple(sizes), "o_proj"),
        Block("", tuple(f"self.{name}" for name in sizes), "o_proj", within="self"),
    ):
        want = {f"self.{name}": copies for name, copies in found.items()}
        assert shared_keys(outer, inner, {}, 4) == want


def test_a_module_that_is_an_attention_and_an_mlp() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    module = attention(dict.fromkeys((*names, "up_proj"), 8), head_dim=8, n_rep=4)
    blocks = [Block("", names, "o_proj"), Block("", ("up_proj",), "down_proj")]
    for order in (blocks, blocks[::-1]):
        found = Heads.of(module, order, [], {}, 2)
        assert found.shared == {"k_proj": 2, "v_proj": 2}
        assert found.counts == {"": {"n_rep": (4, 2)}}


def test_numbers_of_heads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention({}, num_heads=8, num_key_value_heads=2, num_key_value_groups=4, n_rep=4)
    assert counts_of(module, 1, 4) == {}
    groups = {"num_key_value_groups": (4, 2), "n_rep": (4, 2)}
    assert counts_of(module, 2, 4) == groups
    counted = ("num_heads", "num_key_value_heads", "absent")
    monkeypatch.setitem(ATTENTIONS, class_path(module), Attention(counts=counted))
    own = {"num_heads": (8, 2), "num_key_value_heads": (2, 1)}
    assert counts_of(module, 2, 4) == own | groups
    assert counts_of(module, 1, 2) == {"num_heads": (8, 4), "num_key_value_heads": (2, 1)}


def test_an_attention_of_another_version_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Attention(needs=("groups",))
    older, newer = attention({}, num_heads=8), attention({}, num_heads=8, groups=4)
    monkeypatch.setitem(ATTENTIONS, class_path(older), known)
    assert class_path(older) == class_path(newer)
    assert known_attention(older) is None
    assert known_attention(newer) is known


@pytest.mark.parametrize("name", ["head_dim", "head_size", "attention_head_size"])
def test_features_of_a_head(name: str) -> None:
    assert head_size(attention({}, **{name: 8})) == 8
    assert head_size(attention({}, **{name: "8"})) is None
    assert head_size(attention({}, **{name: 0})) is None
