"""Heads of attentions: the numbers of them on one rank, and keys and values that ranks share.

Each rank has whole heads. With fewer heads of keys and values than ranks, consecutive ranks compute
the same one: those with the query heads that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from itertools import combinations
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.parallel.attentions import (
    features_of_head,
    known_attention,
    role,
    takes_equal_parts,
)
from tileweave.parallel.fused import FusedLayer, OwnHeads, copies_of
from tileweave.parallel.plans import Block
from tileweave.parallel.styles import Colwise

# Attributes with the number of query heads that use one head of keys and values.
GROUPS = ("num_key_value_groups", "n_rep")

# Numbers of all ranks and of one, by name of the attribute: also "config.n_head".
Counts = dict[str, tuple[int, int]]


class Form(NamedTuple):
    """How a module takes the heads of one rank.

    counts : attributes that become numbers of one rank.
    narrow : the features of its input become as many as one rank has of its heads, too. Only its
        linear layers take them; the forward reads their number.
    """

    counts: Counts
    narrow: bool = False


def head_size(module: Any) -> int | None:
    """Features of a head of the linear layers of ``module``, or of all that is next to each other
    there; None if it does not tell."""
    known = known_attention(module)
    if known is not None and known.layer and takes_equal_parts(module, known.layer):
        return known.together(module)
    return features_of_head(module)


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
        if any(role(part) in ("k", "v") for part in name.split(".")):  # LoRA has names inside
            style, features = styles.get(dot + name), getattr(layer, "out_features", 0)
            own = isinstance(style, Colwise)
            found[dot + name] = style.copies_of("") if own else copies_of(features, head, size)
    copies = {*found.values()}
    return found if len(copies) == 1 and copies != {1} else {}


@dataclass(frozen=True)
class Heads:
    """shared : how many ranks compute the same heads of a layer, by path; others: one.
    counts : the attributes of modules that are numbers of heads, by path.
    guessed : paths of modules of which a trial must confirm the form.
    others : other forms that a trial may confirm in place of the attributes, by path, by order.
    """

    shared: dict[str, int]
    counts: dict[str, Counts]
    guessed: set[str] = field(default_factory=set)
    others: dict[str, tuple[Form, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: Iterable[Block],
        fused: Iterable[FusedLayer],
        styles: Mapping[str, Any],
        size: int,
    ) -> Heads:
        """The heads of the attentions in ``blocks`` and around ``fused``, over ``size`` ranks."""
        parts = [(block.path, shared_keys(model, block, styles, size)) for block in blocks]
        parts += [(layer.path, layer.copies_by_path()) for layer in fused]
        found: dict[str, dict[str, int]] = {}
        for path, own in parts:  # a module may be an attention and an MLP
            found.setdefault(path, {}).update(own)
        counts = {
            path: counts_of(model.get_submodule(path), max(own.values(), default=1), size)
            for path, own in found.items()
        }
        return cls({path: n for own in found.values() for path, n in own.items()}, counts)

    def guess(self, path: str, counts: Counts, features: Counts, narrows: bool) -> None:
        """Let a module count the heads of one rank by these attributes, too, if a trial confirms
        it. Else the trial looks for the form that it must have: any of them, with or without those
        that are features of all heads, and, if it ``narrows``, with fewer features of its input."""
        known = self.counts.get(path, {})
        chosen = [c for n in range(len(counts), -1, -1) for c in combinations(counts.items(), n)]
        tries = [known | dict(c) | more for c in chosen for more in ({}, features)]
        forms = [Form(each, narrow) for narrow in (False, True)[: 1 + narrows] for each in tries]
        self.others[path] = tuple(form for form in forms if form != Form(known | counts))
        if counts:
            self.counts[path] = known | counts
            self.guessed.add(path)

    def widen(self, path: str) -> None:
        """Leave out forms with fewer features of the input: the layers take others themselves."""
        self.others[path] = tuple(form for form in self.others[path] if not form.narrow)


def counts_of(module: Any, copies: int, size: int) -> Counts:
    """The attributes of an attention that are numbers of heads, of all of ``size`` ranks and of
    one, of which ``copies`` compute the same keys and values."""
    known = known_attention(module)
    ranks = dict.fromkeys(GROUPS, copies) if copies > 1 else {}
    ranks |= dict.fromkeys(known.counts if known else (), size)
    whole = {name: getattr(module, name) for name in ranks if hasattr(module, name)}
    return {name: (count, max(1, count // ranks[name])) for name, count in whole.items()}


class OwnHeadsOf:
    """A hook of an attention, which gives it the part of an argument that is for the heads of this
    rank.

    name, place : of the argument: [batch, heads, ...], [batch x heads, ...] or [heads, ...].
    heads : of all ranks.
    """

    def __init__(self, name: str, place: int, heads: int, mesh: DeviceMesh) -> None:
        self.name, self.place, self.heads = name, place, heads
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: self._own(kwargs[self.name])}
        if len(args) > self.place:
            own = self._own(args[self.place])
            return (*args[: self.place], own, *args[self.place + 1 :]), kwargs
        return args, kwargs

    def _own(self, given: Any) -> Any:
        if given is None:
            return None
        if given.dim() == 4:  # [batch, heads, ...]; a mask may be for any head
            of_any = given.shape[1] == 1
            return given if of_any else given.chunk(self.size, 1)[self.rank]
        return given.unflatten(0, (-1, self.heads)).chunk(self.size, 1)[self.rank].flatten(0, 1)


def take_own_heads(module: nn.Module, counts: Counts, mesh: DeviceMesh) -> None:
    """Let ``module`` count the heads of one rank, and take what is for them."""
    known = known_attention(module)
    if known is not None and known.by_head:
        *names, heads = known.by_head
        places = [*signature(type(module).forward).parameters]
        for name in names:
            hook = OwnHeadsOf(name, places.index(name) - 1, counts[heads][0], mesh)
            module.register_forward_pre_hook(hook, with_kwargs=True)
    for name, (_, own) in counts.items():
        set_number(module, name, own)


def set_number(module: nn.Module, name: str, number: int) -> None:
    """Set an attribute of ``module``, of a module in it or of its configuration, such as
    "config.n_head". The configuration of other modules stays."""
    owner: Any = module
    *path, last = name.split(".")
    for step in path:
        inner = getattr(owner, step)
        if not isinstance(inner, (nn.Module, OwnHeads)):
            inner = OwnHeads(inner)
            setattr(owner, step, inner)
        owner = inner
    setattr(owner, last, number)
