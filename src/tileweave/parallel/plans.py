"""Plans: which linear layers of a model are sharded, and how.

A plan is recognised by the names of linear layers in one module, or read from a model of Hugging
Face transformers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from tileweave.errors import InputError, require
from tileweave.nn.linear import class_path, is_linear
from tileweave.parallel.attentions import known_attention, role, takes_equal_parts
from tileweave.parallel.fused import (
    FUSED,
    FUSED_GATE,
    FUSED_QKV,
    FusedLayer,
    fused_layer,
    gated_layer,
    is_adapter,
    is_fused,
    refuse_fused,
    row_after,
    splits_by_feature,
)
from tileweave.parallel.styles import Colwise, Experts, LatentKeys, Rowwise, SequenceParallel

_LOG = logging.getLogger("tileweave")

# Linear layers of one module: those that take its input, and the one that makes its output.
NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, BART, CLIP
    (("query_key_value",), "dense"),  # GPT-NeoX
    (("wq", "wk", "wv"), "wo"),  # torchtitan, Meta's Llama
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
    (("w12",), "w3"),  # DINOv2
    (("wi_0", "wi_1"), "wo"),  # T5
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),  # GPT-J
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),  # torch.nn.TransformerEncoderLayer
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT
    (("intermediate.dense",), "output.dense"),
)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Norms between the layers of an attention: each rank applies them to its own heads.
OWN_HEADS = (
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"),
    *("query_layernorm", "key_layernorm"),
)
# Parameters of an attention itself with a number for each head: each rank has those of its heads.
BY_HEAD = ("sinks",)
COLUMN, ROW, EXPERTS = "colwise", "rowwise", "experts"
# The entry of Hugging Face plans for an attention with such a parameter.
HAS_BY_HEAD = "local_params"
# Attentions whose keys and values come from one small projection: its last features, those with
# the rotary embedding, go to the heads of each rank directly. These parts see whole rows.
LATENT = "mla_kv_a_proj"
LATENT_PARTS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
# Entries of Hugging Face plans for stacked experts and their parameters: see experts_of.
STACKED = ("moe_tp_experts", "packed_colwise", "packed_rowwise", "moe_identity_expert")
# Entries of Hugging Face plans whose modules stay whole here, with the same result.
WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
    "replicated",
)
UNTOUCHED = ("replicate", "replicated")  # in plans of users, too
SUMS = ("sequence_parallel", "replicated_with_grad_allreduce")


def is_column(style: Any) -> bool:
    """Whether a style, a name or a ParallelStyle, shards output features."""
    return isinstance(style, Colwise) or style == COLUMN


def is_row(style: Any) -> bool:
    """Whether a style shards input features."""
    return isinstance(style, Rowwise) or style == ROW


def is_of_experts(style: Any) -> bool:
    """Whether a style shards stacked experts."""
    return isinstance(style, Experts) or style == EXPERTS


def is_summed(style: Any) -> bool:
    """Whether a style is for a whole module that sees a part, whose gradients are summed."""
    return isinstance(style, SequenceParallel) or style in SUMS


@dataclass(frozen=True)
class Block:
    """One module and its linear layers, by name.

    ``shares``: they take the input of the module. False: the module has other parts, too, such as
    an attention, and its layers take what those made.

    ``within``: the part of the module that has the column-parallel layers, if it is not the module.

    ``guessed``: by layers of unusual names: it stays whole if it does not pass a check.
    """

    path: str
    columns: tuple[str, ...]
    row: str
    shares: bool = True
    within: str = ""
    guessed: bool = False

    @property
    def taking(self) -> str:
        """The path of the module that has the column-parallel layers."""
        return ".".join(part for part in (self.path, self.within) if part)

    def paths(self) -> dict[str, str]:
        """The kind of each linear layer, by path."""
        dot = f"{self.path}." if self.path else ""
        return {dot + name: COLUMN for name in self.columns} | {dot + self.row: ROW}


def block_of(layer: FusedLayer) -> Block:
    """The module of ``layer``, before that is split."""
    return Block(layer.path, (layer.name,), layer.row, layer.shares)


def recognise(
    model: nn.Module, size: int, guess: bool = False
) -> tuple[list[Block], list[FusedLayer]]:
    """The attentions and MLPs of ``model`` whose linear layers have known names; and fused layers.
    ``guess``: a trial can confirm what is not known of those.

    Raises :class:`InputError` for a fused layer that no rule splits, and if there is nothing at
    all.
    """
    found, fused = [], []
    for path, module in model.named_modules():
        children = {
            name
            for name, child in module.named_children()
            if not _is_norm(child) and not isinstance(child, (_ConvNd, *CONTAINERS))
        }
        several = sorted(name for name in children if is_fused(module, name))
        for name in several:
            layer = getattr(module, name)
            known = known_attention(module)
            if known is not None and takes_equal_parts(module, name):
                found.append(Block(path, (name,), known.row))
            elif is_linear(layer) or isinstance(layer, nn.Linear) or is_adapter(layer):
                fused.append(_split_or_refuse(model, path, name, size, guess))
        if several:
            continue
        names = children | {
            f"{name}.{inner}"
            for name, child in module.named_children()
            for inner, part in child.named_children()
            if isinstance(part, nn.Linear)
        }
        before = len(found) + len(fused)
        for columns, row in NAMES:
            if names.issuperset((*columns, row)):
                within = columns[0].rpartition(".")[0]
                block = Block(path, columns, row, within=within)
                layer = _gated(model, block, size)
                if layer is None:
                    found.append(block)
                else:
                    fused.append(layer)
                names -= {*columns, row}
        if guess and before == len(found) + len(fused):
            guessed = _attention(path, module) or _mlp(model, path, size)
            if isinstance(guessed, Block):
                found.append(guessed)
            elif guessed is not None:
                fused.append(guessed)
    known = (*NAMES[:5], (FUSED_GATE, "down_proj"))
    require(
        bool(found or fused),
        f'plan="auto" for {type(model).__name__}',
        "a model whose linear layers are named "
        + ", ".join(f"{'/'.join(columns)}/{row}" for columns, row in known)
        + ", one with a layer for q, k and v named "
        + ", ".join(FUSED_QKV)
        + ", or one with a plan of transformers",
        'pass plan={"pattern": "colwise" or "rowwise", ...}',
    )
    return found, fused


def _attention(path: str, module: nn.Module) -> Block | None:
    """The module at ``path`` as an attention with layers of other names than in ``NAMES``: one each
    for queries, keys and values, and one that takes what heads compute; else None."""
    layers: dict[str, Any] = {name: m for name, m in module.named_children() if is_linear(m)}
    by_role = {role(name): name for name in layers}
    names = [by_role[kind] for kind in "qkv" if kind in by_role]
    if len(names) != 3 or len(layers) not in (3, 4):
        return None
    rows = row_after(module, names)
    # a bias of scores would be that of all heads
    if len(rows) != 1 or any("bias" in name for name in signature(module.forward).parameters):
        return None
    return Block(path, tuple(names), rows[0], guessed=True)


def _mlp(model: nn.Module, path: str, size: int) -> Block | FusedLayer | None:
    """The module at ``path`` as an MLP of two layers of any names, if a trial shows that it
    computes features one by one; else None."""
    module: Any = model.get_submodule(path)
    layers = [(name, layer) for name, layer in module.named_children() if is_linear(layer)]
    if len(layers) != 2:
        return None
    for (column, first), (row, last) in (layers, layers[::-1]):
        inner: int = last.in_features
        known = {*first.parameters(), *last.parameters()}
        norms = [child for child in module.children() if _is_norm(child)]
        known |= {p for n in norms for p in n.parameters() if p.shape == (last.out_features,)}
        fits = first.in_features == last.out_features and inner % size == 0
        if not fits or not known.issuperset(module.parameters()):
            continue
        if first.out_features == inner and splits_by_feature(module, column, row, size, 1):
            return Block(path, (column,), row, shares=False, guessed=True)
        layer = gated_layer(model, path, column, row, size)
        if layer is not None:
            return layer
    return None


def _gated(model: nn.Module, block: Block, size: int) -> FusedLayer | None:
    """The one column-parallel layer of ``block``, if it is a gate and a projection."""
    if len(block.columns) != 1 or block.within:
        return None
    return gated_layer(model, block.path, block.columns[0], block.row, size)


def _split_or_refuse(model: nn.Module, path: str, name: str, size: int, guess: bool) -> FusedLayer:
    layer = fused_layer(model, path, name, size, guess)
    if isinstance(layer, str):
        refuse_fused(f"{path}.{name}" if path else name, layer)
    assert isinstance(layer, FusedLayer), "refused above"
    return layer


def split_fused(
    model: nn.Module,
    styles: dict[str, Any],
    size: int,
    given: dict[str, Any] | None,
    guess: bool = False,
) -> list[FusedLayer]:
    """The fused layers among ``styles``, which are taken out of it, and those that stay whole in
    the plan ``given`` of transformers, if it is one.

    A user's plan is refused where it has a fused layer that no rule splits. transformers' own plan
    is taken as it is: it may know that heads are interleaved. ``guess``: as of :func:`recognise`.
    """
    fused = []
    for path, style in list(styles.items()):
        parent, _, name = path.rpartition(".")
        equal = takes_equal_parts(model.get_submodule(parent), name)
        if equal or given is not None:
            continue
        layer = None
        if style == COLUMN and is_fused(model.get_submodule(parent), name):
            layer = _split_or_refuse(model, parent, name, size, guess)
        elif style == COLUMN:
            near = {p: s for p, s in styles.items() if p.rpartition(".")[0] == parent}
            rows = [p.rpartition(".")[2] for p, s in near.items() if is_row(s)]
            if len(rows) == 1 and len(near) == 2:
                layer = gated_layer(model, parent, name, rows[0], size)
        if layer is not None:
            fused.append(layer)
            del styles[path]
        elif name in FUSED and isinstance(style, Colwise) and style.parts is None:
            refuse_fused(path, "this style has no parts")
    if given is None:
        return fused
    whole = matched(model, {p: s for p, s in given.items() if s in WHOLE}, strict=False)
    for path in whole:
        parent, _, name = path.rpartition(".")
        if name not in FUSED:
            continue
        layer = fused_layer(model, parent, name, size)
        if isinstance(layer, FusedLayer):
            fused.append(layer)
        else:
            _LOG.warning("%s stays whole on every rank: %s", path, layer)
    return fused


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def of_transformers(model: nn.Module) -> dict[str, str] | None:
    """The plan that a model of transformers has, also in a model of PEFT; None if it has none."""
    if is_adapter(model):
        for path, part in model.named_modules():
            if hasattr(type(part), "_tp_plan"):
                given = of_transformers(part) or {}
                return {f"{path}.{pattern}": style for pattern, style in given.items()} or None
        return None
    own: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    config = getattr(model, "config", None)
    base: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        base = {f"{prefix}.{pattern}": style for pattern, style in base.items()}
    return {**base, **own} or None


def matched(model: nn.Module, plan: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    """The style of each module that a pattern of ``plan`` matches, by path; the last one counts.

    Raises :class:`InputError` if ``strict`` and a pattern matches nothing. A plan of transformers
    may be that of another variant of the model, too.
    """
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Any] = {}
    for pattern, style in plan.items():
        paths = [name for name in names if fnmatchcase(name, pattern)]
        if strict and not paths:
            raise InputError(
                f"asked: a plan with {pattern!r}; allowed: patterns that match modules of "
                f"{type(model).__name__}; remedy: look at model.named_modules()"
            )
        found.update(dict.fromkeys(paths, style))
    return found


def take_latent(model: nn.Module, styles: dict[str, Any]) -> None:
    """Give a style to each layer of the kind ``LATENT`` in ``styles``, and to the parts of its
    attention that see whole rows."""
    for path in [path for path, style in styles.items() if style == LATENT]:
        dot = path.rpartition(".")[0] + "."
        attention: Any = model.get_submodule(dot[:-1])
        rotary: Any = getattr(attention, "qk_rope_head_dim", None)
        require(
            isinstance(rotary, int),
            f"{path}, whose attention {class_path(attention)} has no qk_rope_head_dim",
            "an attention with the number of its features with a rotary embedding",
            "pass plan={...} without it",
        )
        styles[path] = LatentKeys(rotary)
        for name in LATENT_PARTS:
            if getattr(attention, name, None) is not None:
                styles.setdefault(dot + name, UNTOUCHED[0])


def blocks_of(styles: dict[str, Any]) -> list[Block]:
    """The modules of ``styles`` that have colwise layers and a rowwise one: of known names, or one
    rowwise layer at the end of all. In the sequence-parallel form the input of such a module is
    gathered once, for all of its colwise layers, unless one has a style object, which may say
    otherwise."""
    children: dict[str, dict[str, str]] = {}
    for path, style in styles.items():
        parent, _, name = path.rpartition(".")
        if is_column(style) or is_row(style):
            children.setdefault(parent, {})[name] = COLUMN if is_column(style) else ROW
    found = []
    for parent in sorted(children):
        left = children[parent]
        dot = f"{parent}." if parent else ""
        shares = all(isinstance(styles[dot + name], str) for name in left)
        blocks = []
        for columns, row in NAMES:
            wanted = {**dict.fromkeys(columns, COLUMN), row: ROW}
            if all(left.get(name) == style for name, style in wanted.items()):
                blocks.append(Block(parent, columns, row, shares))
                left = {name: style for name, style in left.items() if name not in wanted}
        rows = [name for name, style in left.items() if style == ROW]
        others = tuple(name for name in left if name not in rows)
        if len(rows) == 1 and others:
            blocks.append(Block(parent, others, rows[0], shares))
        elif len(blocks) == 1 and others and not rows:  # such as the gate of an attention
            blocks = [replace(blocks[0], columns=(*blocks[0].columns, *others))]
        found += blocks
    return found
