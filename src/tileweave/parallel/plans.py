"""Plans: which linear layers of a model are sharded, and how.

A plan is recognised by the names of linear layers in one module, or read from a model of Hugging
Face transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tileweave.errors import InputError, require

# Linear layers of one module: those that take its input, and the one that makes its output.
NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, BART, CLIP
    (("wq", "wk", "wv"), "wo"),  # torchtitan, Meta's Llama
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
# One linear layer that computes several of the above: an equal split would mix their features.
FUSED = ("qkv_proj", "gate_up_proj", "c_attn", "query_key_value", "Wqkv", "qkv")
# Norms between the layers of an attention: each rank applies them to its own heads.
OWN_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")
COLUMN, ROW = "colwise", "rowwise"
# Entries of Hugging Face plans whose modules stay whole here, with the same result.
WHOLE = ("colwise_gather_output", "colwise_rep", "replicate", "replicated")
SUMS = ("sequence_parallel", "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class Block:
    """One module and its linear layers, by name."""

    path: str
    columns: tuple[str, ...]
    row: str

    def paths(self) -> dict[str, str]:
        """The kind of each linear layer, by path."""
        dot = f"{self.path}." if self.path else ""
        return {dot + name: COLUMN for name in self.columns} | {dot + self.row: ROW}


def recognise(model: nn.Module) -> list[Block]:
    """The attentions and MLPs of ``model`` whose linear layers have known names.

    Raises :class:`InputError` for a fused layer, and if there are none at all.
    """
    found = []
    for path, module in model.named_modules():
        children = {name for name, child in module.named_children() if not _is_norm(child)}
        for name in sorted(children & set(FUSED)):
            where = f"{path}.{name}" if path else name
            require(
                not isinstance(getattr(module, name), nn.Linear),
                f"a plan for {where}, which computes several projections",
                "one linear layer for each projection",
                "split it into layers named as in Llama, or leave it whole with plan={...}",
            )
        for columns, row in NAMES:
            if children.issuperset((*columns, row)):
                found.append(Block(path, columns, row))
                break
    require(
        bool(found),
        f'plan="auto" for {type(model).__name__}',
        "a model whose linear layers are named "
        + ", ".join(f"{'/'.join(columns)}/{row}" for columns, row in NAMES[:5])
        + ", or one with a plan of transformers",
        'pass plan={"pattern": "colwise" or "rowwise", ...}',
    )
    return found


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def of_transformers(model: nn.Module) -> dict[str, str] | None:
    """The plan that a model of transformers has; None if it has none."""
    own: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    config = getattr(model, "config", None)
    base: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        base = {f"{prefix}.{pattern}": style for pattern, style in base.items()}
    return {**base, **own} or None


def matched(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """The style of each module that a pattern of ``plan`` matches, by path; the last one counts."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, Any] = {}
    for pattern, style in plan.items():
        paths = [name for name in names if fnmatchcase(name, pattern)]
        if not paths:
            raise InputError(
                f"asked: a plan with {pattern!r}; allowed: patterns that match modules of "
                f"{type(model).__name__}; remedy: look at model.named_modules()"
            )
        found.update(dict.fromkeys(paths, style))
    return found


def blocks_of(styles: dict[str, Any]) -> list[Block]:
    """The modules whose linear layers of known names are all in ``styles`` as colwise and
    rowwise."""
    parents = {path.rpartition(".")[0] for path in styles}
    found = []
    for parent in sorted(parents):
        for columns, row in NAMES:
            block = Block(parent, columns, row)
            if all(styles.get(path) == kind for path, kind in block.paths().items()):
                found.append(block)
                break
    return found
