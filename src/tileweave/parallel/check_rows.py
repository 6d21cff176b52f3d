"""Which parts of a model work on the rows of one rank, in the sequence-parallel form."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from tileweave.errors import InputError, require
from tileweave.nn.linear import ParallelLinear
from tileweave.nn.shards import is_dtensor
from tileweave.parallel.norms import is_norm
from tileweave.parallel.plans import (
    BY_HEAD,
    OWN_HEADS,
    SUMS,
    UNTOUCHED,
    Block,
    is_of_experts,
    is_summed,
)
from tileweave.parallel.styles import Colwise, Experts, LatentKeys, Rowwise
from tileweave.parallel.trial import UNFIT

_ROWS = 3  # of an input that is made up
# Modules that compute each row for itself.
_BY_ROW = (
    *(nn.Linear, nn.Dropout, nn.Identity),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus),
)


def has_own_rows(path: str, roots: list[str]) -> bool:
    """Whether the module at ``path`` has the rows of one rank: one of ``roots``, blocks of lists or
    the model, what is in it, or the list of those. All else has all rows."""
    return any(
        not root or f"{path}.".startswith(f"{root}.") or path == root.rpartition(".")[0]
        for root in roots
    )


def check_own_rows(
    roots: list[tuple[str, nn.Module]],
    blocks: list[Block],
    styles: dict[str, Any],
    routed: tuple[str, ...],
    lora: Iterable[str],
    gathers: bool,
    counting: Iterable[str] = (),
) -> dict[str, str]:
    """The paths of modules in ``roots``, whose activations are this rank's rows, that take all rows
    instead, and why: parts of them are not known to work row by row. Raises :class:`InputError` for
    a part without such a module around it.

    Parameters
    ----------
    roots : list of (path, module)
        The blocks of the model's lists, or the model.

    routed : tuple of str
        What :func:`routed_parts` returns.

    lora : iterable of str
        The paths of LoRA around layers of the plan.

    gathers : bool
        Whether modules may take all rows. False: raise for them, too.

    counting : iterable of str
        With ``gathers``: paths of blocks that take the number of rows from their input; see
        :func:`counts_rows`.
    """
    found: dict[str, str] = {}
    for path in counting:
        if any(path.startswith(f"{root}." if root else "") for root, _ in roots if root != path):
            found[path] = "its forward takes the number of rows from its input"
    for path in sorted(styles):  # ranks may have other orders
        style = styles[path]
        inner = has_own_rows(path, [root for root, _ in roots])
        by_row = is_summed(style)
        if isinstance(style, (Colwise, Rowwise, Experts)):
            by_row = style.sequence_dim is not None
            require(
                by_row or not inner,
                f"{path}: {style!r} with sequence_parallel=True, whose input is this rank's rows",
                "a style with sequence_dim",
                "pass sequence_dim=1 (or that of this call) to the style",
            )
        require(
            inner or not by_row,
            f"{path}: {style!r} with sequence_parallel=True, whose input has all rows: it is not "
            f"in {', '.join(dict.fromkeys(root.rpartition('.')[0] for root, _ in roots))}",
            "a style without sequence_dim, or none",
            "leave sequence_dim out of the style, or the style out of the plan",
        )
    styles = {**styles, **dict.fromkeys(lora, SUMS[0])}
    inside = {block.path for block in blocks}
    sharded = {p for p, s in styles.items() if s not in UNTOUCHED and not isinstance(s, LatentKeys)}
    seen: set[nn.Module] = set()  # blocks may share modules, which have the path of the first one
    for root, module in roots:
        for name, part in module.named_modules(prefix=root, memo=seen):
            by_head = BY_HEAD if name in inside else ()  # as check_block found them
            own = {n: p for n, p in part._parameters.items() if p is not None}
            has = [p for n, p in own.items() if n not in by_head]
            if not has or name in sharded or all(is_dtensor(p) for p in has):
                continue
            parent, _, last = name.rpartition(".")
            if is_norm(part) or (parent in inside and last in OWN_HEADS):
                continue
            if isinstance(part, (nn.Embedding, ParallelLinear)) or _styled_above(name, styles):
                continue
            if name.startswith((*routed, *(f"{path}." for path in found))):
                continue
            start = len(root) + 1 if root else 0
            if part is not module and _is_row_by_row(part):
                continue
            if parent != root and _is_row_by_row(module.get_submodule(parent[start:])):
                continue
            above = _module_in(module, root, name) if gathers else None
            if above is not None:
                found[above] = "its plan does not have all of its layers"
                continue
            raise InputError(
                f"asked: sequence_parallel=True with {name}, a {type(part).__name__} which the "
                "plan does not have; allowed: layers of the plan, and norms, which work row by "
                "row: an attention or a convolution would see a part of the sequence; remedy: "
                "sequence_parallel=False, or pass plan={...} with "
                f'"{name}": "sequence_parallel" if it computes each row for itself'
            )
    return {
        path: why
        for path, why in found.items()
        if not any(path.startswith(f"{other}.") for other in found)
    }


def _is_row_by_row(module: nn.Module) -> bool:
    """Whether ``module`` is a plain sequence of layers that compute each row for itself, such as
    those of a modulation, or scales features, as a trial shows."""
    if type(module) is nn.Sequential:
        return all(type(child) in _BY_ROW or is_norm(child) for child in module)
    sizes = {tuple(p.shape) for p in module.parameters()}
    if any(True for _ in module.children()) or len(sizes) != 1 or len(*sizes) != 1:
        return False
    return _agrees_by_row(module, *(size for (size,) in sizes))


def _agrees_by_row(module: nn.Module, features: int) -> bool:
    """Whether ``module`` computes for two halves of some rows what it does for all of them."""
    x = _drawn(module, 1, 6, features)
    try:
        with torch.no_grad():
            whole, *parts = (_first(module(t.clone())) for t in (x, *x.chunk(2, dim=1)))
            return torch.allclose(torch.cat(parts, dim=1), whole, rtol=0.02, atol=1e-3)
    except UNFIT:  # it asks for more than rows
        return False


def _module_in(block: nn.Module, root: str, path: str) -> str | None:
    """The path of the outermost module in a block, below lists, that is ``path`` or around it and
    has modules in it, such as an attention."""
    name = root
    for step in path[len(root) + 1 if root else 0 :].split(".") if path != root else ():
        block, name = block.get_submodule(step), f"{name}.{step}" if name else step
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            called = type(block).forward is not nn.Module.forward  # else other methods are
            return name if called and any(True for _ in block.children()) else None
    return None


def _styled_above(path: str, styles: dict[str, Any]) -> bool:
    """Whether a module around ``path`` has a style for parts that work row by row."""
    return any(path.startswith(f"{p}.") and is_summed(style) for p, style in styles.items())


def routed_parts(model: nn.Module, styles: dict[str, Any]) -> tuple[str, ...]:
    """What paths begin with, of parts of modules around experts that compute each row for itself:
    a router, a shared expert."""
    return tuple(
        f"{path.rpartition('.')[0]}."
        for path, style in styles.items()
        if is_of_experts(style) and _takes_rows(model, path)
    )


def _takes_rows(model: nn.Module, experts: str) -> bool:
    """Whether the module around ``experts`` computes each row for itself. It is tried, with a
    number for each token in place of its experts."""
    module: Any = model.get_submodule(experts.rpartition(".")[0])
    stacked: Any = model.get_submodule(experts)
    hidden = stacked.down_proj.shape[2 if stacked.is_transposed else 1]
    if next(module.parameters()).is_meta:
        return True
    copied = _copy_of(module)
    setattr(copied, experts.rpartition(".")[2], _EachToken())
    return _agrees_by_row(copied, hidden)


def counts_rows(model: nn.Module, block: Block, size: int, dim: int) -> bool:
    """Whether the module of ``block`` takes the number of rows, in dimension ``dim``, from its
    input. It has the rows of one rank, while its layers return those of all ``size`` ranks.

    It is tried with the same rows on every rank, so that all rows are copies of those, and with
    its input for each argument that it must have.
    """
    module: Any = model.get_submodule(block.path)
    if next(module.parameters()).is_meta:
        return False
    features = module.get_submodule(block.columns[0]).in_features
    x = _drawn(module, *((1, _ROWS) if dim else (_ROWS, 1)), features)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        p
        for p in signature(module.forward).parameters.values()
        if p.default is Parameter.empty and p.kind in kinds
    ]
    try:
        with torch.no_grad():
            copied = _copy_of(module)
            every = torch.cat([x] * size, dim)
            wanted = _first(copied(*[every] * len(needed))).narrow(dim, 0, _ROWS)
    except UNFIT:  # it takes something else
        return False
    for name in block.columns:
        _set(copied, name, _Gathering(copied.get_submodule(name), size, dim))
    _set(copied, block.row, _Scattering(copied.get_submodule(block.row), size, dim))
    try:
        with torch.no_grad():
            found = _first(copied(*[x] * len(needed)))
        return found.shape != wanted.shape or not torch.allclose(found, wanted, 0.02, 1e-3)
    except UNFIT:
        return True


def _drawn(module: nn.Module, *shape: int) -> torch.Tensor:
    """Random numbers as the parameters of ``module`` are, the same on every rank."""
    first = next(module.parameters())
    drawn = torch.Generator(first.device).manual_seed(0)
    return torch.randn(shape, generator=drawn, device=first.device).to(first.dtype)


def _copy_of(module: nn.Module) -> Any:
    """A copy of ``module`` with its parameters, as in inference."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    return copy.deepcopy(module, memo).eval()


def _set(module: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)


class _Gathering(nn.Module):
    """A column-parallel layer where all ranks have the same rows."""

    def __init__(self, layer: nn.Module, size: int, dim: int) -> None:
        super().__init__()
        self.layer, self.size, self.dim = layer, size, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x] * self.size, self.dim))


class _Scattering(_Gathering):
    """A row-parallel layer, of which this rank has the first rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).chunk(self.size, self.dim)[0]


def _first(y: Any) -> torch.Tensor:
    return y[0] if isinstance(y, tuple) else y


class _EachToken(nn.Module):
    """In place of experts: a number for each of a token's experts, times their weights."""

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        return x * ((ids + 1) * weights).sum(-1, keepdim=True).to(x.dtype)
