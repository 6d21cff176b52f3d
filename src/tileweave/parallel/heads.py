"""Heads of attentions: the numbers of them on one rank, and keys and values that ranks share.

Each rank has whole heads. With fewer heads of keys and values than ranks, consecutive ranks compute
the same one: those with the query heads that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tileweave.parallel.fused import COUNTED, HEADS, INTERLEAVED, class_path, copies_of
from tileweave.parallel.plans import Block
from tileweave.parallel.styles import Colwise

KEYS = ("k_proj", "v_proj", "wk", "wv", "key", "value", "k_lin", "v_lin")
# Attributes with the number of query heads that use one head of keys and values.
GROUPS = ("num_key_value_groups", "n_rep")

Counts = dict[str, tuple[int, int]]  # numbers of all ranks and of one, by name of the attribute


def head_size(module: Any) -> int | None:
    """Features of a head of the linear layers of ``module``, None if it does not tell."""
    head = getattr(module, "head_dim", getattr(module, "head_size", None))
    head = getattr(module, "attention_head_size", head)
    if not isinstance(head, int) or head < 1:
        return None
    return 3 * head if class_path(module) in INTERLEAVED else head


def shared_keys(
    model: nn.Module, block: Block, styles: Mapping[str, Any], size: int
) -> dict[str, int]:
    """How many ranks compute the same heads of each layer of ``block`` that makes keys or values,
    by path, where it is more than one; it is the same for all of them. Style objects say it
    themselves."""
    head = head_size(model.get_submodule(block.taking))
    dot, found = f"{block.path}." if block.path else "", {}
    for name in block.columns:
        layer = model.get_submodule(dot + name)
        if {*KEYS} & {*name.split(".")}:  # inside of LoRA it has another name
            style, features = styles.get(dot + name), getattr(layer, "out_features", 0)
            own = isinstance(style, Colwise)
            found[dot + name] = style.copies_of("") if own else copies_of(features, head, size)
    copies = {*found.values()}
    return found if len(copies) == 1 and copies != {1} else {}


@dataclass(frozen=True)
class Heads:
    """shared : how many ranks compute the same heads of a layer, by path; others: one.
    counts : the attributes of modules that are numbers of heads, by path.
    """

    shared: dict[str, int]
    counts: dict[str, Counts]

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Iterable[Block], styles: Mapping[str, Any], size: int
    ) -> Heads:
        """The heads of the attentions in ``blocks``, over ``size`` ranks."""
        shared: dict[str, int] = {}
        counts = {}
        for block in blocks:
            own = shared_keys(model, block, styles, size)
            module = model.get_submodule(block.path)
            counts[block.path] = counts_of(module, max(own.values(), default=1), size)
            shared |= own
        return cls(shared, counts)


def counts_of(module: Any, copies: int, size: int) -> Counts:
    """The attributes of an attention that are numbers of heads, of all of ``size`` ranks and of
    one, of which ``copies`` compute the same keys and values."""
    counted = HEADS if class_path(module) in COUNTED else ()
    counts = {n: (getattr(module, n), size) for n in counted if hasattr(module, n)}
    if copies > 1:
        counts |= {n: (getattr(module, n), copies) for n in GROUPS if hasattr(module, n)}
    return {name: (whole, max(1, whole // ranks)) for name, (whole, ranks) in counts.items()}
