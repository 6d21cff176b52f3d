"""What a plan cannot do with a model, found before anything is changed.

A part of the model that the plan does not name must not see a part of the activations without it
being known: its results or its gradients would be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import getattr_static
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tileweave.errors import InputError, require
from tileweave.nn.linear import ParallelLinear, class_path, is_linear
from tileweave.nn.shards import is_dtensor
from tileweave.parallel.attentions import HEAD_SIZES, features_of_head, known_attention, role
from tileweave.parallel.experts import check_experts
from tileweave.parallel.fused import (
    FusedLayer,
    check_parts,
    is_adapter,
)
from tileweave.parallel.heads import Counts, head_size
from tileweave.parallel.norms import is_norm
from tileweave.parallel.plans import (
    BY_HEAD,
    COLUMN,
    EXPERTS,
    OWN_HEADS,
    ROW,
    SUMS,
    UNTOUCHED,
    Block,
    block_of,
    is_column,
    is_of_experts,
    is_row,
)
from tileweave.parallel.styles import Colwise
from tileweave.parallel.trial import Tried


def uses_of(model: nn.Module) -> Counter[Any]:
    """How many modules have each parameter."""
    return Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)


def check_styles(
    model: nn.Module, styles: dict[str, Any], size: int, shared: dict[str, int]
) -> None:
    """Raise :class:`InputError` for a module whose style does not fit it.

    ``shared``: how many ranks compute the same features of a layer, by path.
    """
    uses = uses_of(model)
    for path, style in styles.items():
        module: Any = model.get_submodule(path)
        if isinstance(style, str):
            allowed = (COLUMN, ROW, EXPERTS, *SUMS, *UNTOUCHED)
            require(style in allowed, f"{path}: style {style!r}", ", ".join(allowed), "pass one")
        if is_of_experts(style):
            check_experts(path, module, size)
        copies = shared.get(path, 1)
        if isinstance(style, Colwise):
            copies = style.copies_of("")
            if style.parts is not None:
                check_parts(path, module, style.parts, size, style.all_copies())
        if not is_column(style) and not is_row(style):
            continue
        _check_own_weight(path, module, uses)
        features = "out_features" if is_column(style) else "in_features"
        require(
            getattr(module, features) * copies % size == 0,
            f"{path}: {features}={getattr(module, features)} over {size} ranks",
            "a multiple of the world size",
            "choose fewer ranks, or pass a plan without it",
        )


def _check_own_weight(path: str, module: Any, uses: Counter[Any]) -> None:
    """Raise :class:`InputError` unless ``module`` is a plain ``nn.Linear`` whose weight no other
    module has."""
    check_plain(path, module)
    require(
        uses[module.weight] == 1,
        f"{path}, whose weight another module has, too",
        "a weight of its own",
        "pass a plan without it: shared weights stay whole",
    )


def check_no_wrapper(model: nn.Module) -> None:
    """Raise :class:`InputError` for a wrapper that keeps the parameters that it found."""
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    for path, module in model.named_modules():
        require(
            not isinstance(module, kinds),
            f"{path or 'a model'}, a {type(module).__name__}",
            "a model without it, which would keep the parameters of before",
            "call tileweave.parallelize first, with one dimension of a mesh, then "
            "torch.distributed.fsdp.fully_shard with the other one",
        )


def check_hooks(model: nn.Module, paths: list[str]) -> None:
    """Raise :class:`InputError` for a layer with hooks, which would see a part of its tensors."""
    for path in paths:
        module = model.get_submodule(path)
        require(
            not (module._forward_hooks or module._forward_pre_hooks),
            f"{path}, which has forward hooks",
            "layers without hooks: those would see and change the features of one rank",
            "register them on the module around it, after tileweave.parallelize if they only "
            "read, or pass check=False",
        )


def check_plain(path: str, module: Any) -> None:
    """Raise :class:`InputError` unless ``module`` is a plain ``nn.Linear``."""
    require(
        not isinstance(module, ParallelLinear),
        f"{path}, which is sharded already",
        "a model that is not sharded",
        "call tileweave.parallelize once, or pass a plan without it",
    )
    require(
        not is_dtensor(module._parameters.get("weight")),
        f"{path}, whose weight is a DTensor already",
        "a model that is not sharded",
        "call tileweave.parallelize first, then fully_shard or others",
    )
    require(
        not is_adapter(module),
        f"{path}, an adapter of PEFT ({class_path(module)})",
        "LoRA around an nn.Linear, without variants such as DoRA and not merged",
        "merge it into the model first (merge_and_unload), use plain LoRA, or pass a plan without "
        "it",
    )
    require(
        is_linear(module),
        f"{path}, a {class_path(module)}",
        "torch.nn.Linear itself: a subclass may compute something else, as quantised ones do",
        "parallelize before that module is replaced, put an nn.Linear with the same result in its "
        "place, or pass a plan without it",
    )
    require(
        isinstance(module._parameters.get("weight"), nn.Parameter),
        f"{path}, whose weight is computed from other parameters (weight_norm, spectral_norm, "
        "pruning)",
        "a weight that is a parameter",
        "remove that first, as with torch.nn.utils.remove_weight_norm, or pass a plan without it",
    )


def check_fused(
    model: nn.Module, layer: FusedLayer, styles: dict[str, Any], whole: set[str], size: int
) -> FusedLayer:
    """Raise :class:`InputError` for a layer of several projections that cannot be split. Returns
    it, and whether it takes the input of its module.

    ``styles``, ``whole``: as of :func:`check_block`.
    """
    module: Any = model.get_submodule(layer.path)
    # heads are those of its parts, which are checked below
    block = check_block(model, block_of(layer), styles, whole, size, {}, of_heads=False)
    paths = [f"{layer.path}.{name}" if layer.path else name for name in (layer.name, layer.row)]
    uses = uses_of(model)
    for path in paths:
        _check_own_weight(path, model.get_submodule(path), uses)
    head = features_of_head(module) or 1
    check_parts(paths[0], model.get_submodule(paths[0]), layer.sizes, size, layer.copies, head)
    return replace(layer, shares=block.shares)


def check_block(
    model: nn.Module,
    block: Block,
    styles: dict[str, Any],
    whole: set[str],
    size: int,
    shared: dict[str, int],
    counted: Iterable[str] = (),
    of_heads: bool = True,
) -> Block:
    """Raise :class:`InputError` if the module of ``block`` has parts of which it is not known what
    they see, or takes the heads of all ranks. Returns it, and whether its layers share its input.

    ``whole``: paths that the plan of transformers leaves whole. ``shared``: how many ranks compute
    the same features of a layer, by path. ``counted``: attributes of the module that become the
    heads of one rank. ``of_heads``: check the numbers of heads, too.
    """
    module = model.get_submodule(block.path)
    dot = f"{block.path}." if block.path else ""
    copies = {name: shared[dot + name] for name in block.columns if dot + name in shared}
    if block.shares and of_heads:  # else it has style objects: its plan says which heads a rank has
        _check_heads(module, block, size, copies, counted)
    layers = (*block.columns, block.row)
    known = {*layers, *(name.partition(".")[0] for name in layers)}
    paths = {dot + name for name in (*block.columns, block.row)}
    styled = {p for p, s in styles.items() if p not in paths and s != EXPERTS} | whole
    for name in (name for name, p in module._parameters.items() if p is not None):
        require(
            block.path in styled or _is_by_head(module, name, block),
            f"a plan for {block.path or type(module).__name__}, which has the parameter "
            f"{dot}{name} itself",
            "parameters of modules in it",
            f"put it into a module of its own, or {_SAY}",
        )
    around = False
    for name, part in module.named_modules() if block.within else ():
        # norms next to the row-parallel layer take its output, or fail a trial
        after = is_norm(part) and name.rpartition(".")[0] == block.row.rpartition(".")[0]
        inside = name.partition(".")[0] in {block.within, block.row.partition(".")[0]}
        if inside and any(True for _ in part.parameters(recurse=False)) and name not in layers:
            _refuse_unless(after or "lora_" in name, dot + name, block, module)
    for name, child in module.named_children():
        path = dot + name
        if not any(True for _ in child.parameters()) or name in known:
            continue
        if name in OWN_HEADS:
            _check_norm_of_heads(path, child, module, block)
        elif path in styled:
            continue
        elif _is_around(child, path, module, block, styled):
            around = True
        else:
            _refuse_unless(False, path, block, module)
    # with ``within`` that part has an input of its own, which its layers share
    return replace(block, shares=block.shares and bool(block.within or not around))


def _refuse_unless(known: bool, path: str, block: Block, module: nn.Module) -> None:
    require(
        known,
        f"a plan for {block.path or type(module).__name__}, which has {path} with parameters",
        ", ".join((*block.columns, block.row, *OWN_HEADS)),
        _SAY,
    )


def _is_by_head(module: Any, name: str, block: Block) -> bool:
    """Whether the parameter ``name`` of an attention has a number for each of its heads."""
    head = getattr(module, "head_dim", None)
    features = module.get_submodule(block.columns[0]).out_features
    shape = module._parameters[name].shape
    return name in BY_HEAD and isinstance(head, int) and shape == (features // head,)


def check_between(model: nn.Module, tried: Tried, styled: set[str]) -> None:
    """Raise :class:`InputError` for a part with parameters in a module whose layers are not all its
    children, unless its plan names that part."""
    module: Any = model.get_submodule(tried.path)
    dot = f"{tried.path}." if tried.path else ""
    layers = {*tried.columns, *tried.rows}
    if not tried.rows or not any("." in name for name in layers):
        return
    block = Block(tried.path, tried.columns, tried.rows[0])
    for name, part in module.named_modules():
        known = name in layers or any(f"{name}.".startswith(f"{p}.") for p in tried.inner)
        above = any(f"{dot}{name}.".startswith(f"{path}.") for path in styled)
        if known or above or not any(p is not None for p in part._parameters.values()):
            continue
        if (
            is_adapter(part)
            or "lora_" in name
            or _is_around(part, dot + name, module, block, set())
        ):
            continue
        raise InputError(
            f"asked: a plan for {tried.path or type(module).__name__}, which has parameters in "
            f"{(dot + name).rstrip('.') or 'it'}; allowed: {', '.join(sorted(layers))}; "
            f"remedy: {_SAY}"
        )


_SAY = (
    'pass plan={...} with a style for it: "sequence_parallel" if each rank has only a part of its '
    'input (its heads, its features or its rows), "replicated" if each rank has all of it'
)


def _check_norm_of_heads(path: str, norm: nn.Module, module: Any, block: Block) -> None:
    features = {getattr(module, name).out_features for name in block.columns if "." not in name}
    require(
        not any(isinstance(part, nn.ModuleList) for part in norm.modules()),
        f"{path}, a list of norms",
        "one norm, which each rank applies to its heads",
        "pass a plan without this attention",
    )
    for parameter in norm.parameters():
        require(
            not features & {parameter.shape[-1:].numel(), parameter.numel()}
            or parameter.numel() == getattr(module, "head_dim", None),
            f"{path} over {tuple(parameter.shape)} features, those of all heads",
            "norms of one head each",
            "pass a plan without this attention",
        )


def _is_around(child: nn.Module, path: str, module: Any, block: Block, styled: set[str]) -> bool:
    """Whether ``child`` is surely not between the layers of ``block``: a part with layers of its
    own in the plan, or a norm of as many features as the result has. Between the layers such a norm
    would be an error, not another number."""
    if any(other.startswith(f"{path}.") for other in styled):
        return True
    row: Any = module.get_submodule(block.row)
    shapes = [tuple(p.shape) for p in child.parameters()]
    return is_norm(child) and all(shape == (row.out_features,) for shape in shapes)


# --- Heads ---


def _check_heads(
    module: Any, block: Block, size: int, copies: dict[str, int], counted: Iterable[str] = ()
) -> None:
    if block.within:
        module = module.get_submodule(block.within)
        counted = [name.removeprefix(f"{block.within}.") for name in counted]
    head = head_size(module)
    columns = [name.removeprefix(f"{block.within}.") for name in block.columns]
    of_heads = module.get_submodule(columns[0]).out_features
    for name, ranks in zip(columns, (copies.get(name, 1) for name in block.columns), strict=True):
        features = module.get_submodule(name).out_features
        # such as a gate with a number for each head; one key head may have as many features
        by_head = head is not None and not _of_keys(name) and role(name) not in ("k", "v")
        by_head = by_head and features * (head or 0) == of_heads and features % size == 0
        require(
            head is None or features * ranks // size % head == 0 or by_head,
            f"{block.taking}.{name}: {features} features, heads of {head}, over {size} ranks",
            "whole heads on every rank, or ranks that are a multiple of the heads of keys, values",
            "choose fewer ranks, or pass a plan without this attention",
        )
    for name, value, layer, features in _heads_of_all(module, _out_features(module, columns)):
        require(
            name in counted,
            f"a plan for {block.path or type(module).__name__}, whose forward takes {name} = "
            f"{value}, the heads of all ranks ({layer} has {features} features)",
            "a forward that takes the number of heads from shapes, or from an attribute with "
            "those of one rank",
            f"set {block.taking or 'the model'}.{name} = {value // size} (and others like it) "
            "before this call, or pass a plan without this attention",
        )


def attributes_to_share(
    module: Any, block: Block, size: int, sizes: Mapping[str, int] | None = None
) -> tuple[Counts, Counts, bool]:
    """Attributes of the module of ``block``, which is not a known attention, that its forward takes
    as the heads of all ranks, or as the features of those; with the numbers of all ranks and of
    one. And whether it may take the features of its input for those. A trial must confirm that
    they are no more.

    ``sizes``: features of each projection, where one layer computes them all.
    """
    of_heads = module.get_submodule(block.row).in_features
    dot = f"{block.within}." if block.within else ""
    columns = [name.removeprefix(dot) for name in block.columns]
    inner = module.get_submodule(block.within)
    if any("." in name for name in columns):
        return {}, {}, False
    if not block.shares and head_size(inner) is None:  # they may be those of one rank already
        return {}, {}, False
    of_layers = dict(sizes or _out_features(inner, columns))
    heads = {dot + name: number for name, number, *_ in _heads_of_all(inner, of_layers, of_heads)}
    features = {dot + name: number for name, number in _numbers_in_forward(inner)}
    features = {name: number for name, number in features.items() if number == of_heads}
    inputs = {inner.get_submodule(name).in_features for name in columns}
    narrows = block.shares and not dot and inputs == {of_heads} and of_heads % size == 0
    return _of_one_rank(heads, size), _of_one_rank(features, size), narrows


def _out_features(module: nn.Module, layers: Iterable[str]) -> dict[str, int]:
    found: dict[str, Any] = {name: module.get_submodule(name) for name in layers}
    return {name: layer.out_features for name, layer in found.items()}


def _of_one_rank(numbers: dict[str, int], size: int) -> Counts:
    """The numbers of all ranks and of one."""
    return {
        name: (value, max(1, value // size))
        for name, value in numbers.items()
        if value % size == 0 or size % value == 0
    }


def _heads_of_all(
    module: Any, of_layers: Mapping[str, int], of_heads: int = 0
) -> Iterator[tuple[str, int, str, int]]:
    """Attributes with the heads of all ranks that the forward of a module takes, which is not a
    known attention: the name, the number, and a layer that has so many, with its features.
    ``of_layers``: the features of each layer. ``of_heads``: those of all heads, where layers
    compute more than one projection."""
    if known_attention(module):
        return
    head = head_size(module)
    for name, value in _heads_in_forward(module):
        of_keys = _of_keys(name)
        sizes = {
            layer: features
            for layer, features in of_layers.items()
            if not of_keys or _of_keys(layer) or role(layer) in ("k", "v")
        }
        if of_heads and not _of_keys(name):
            sizes[""] = of_heads
        for layer, features in sizes.items():
            one = features // value if head is None else head
            if value * one == features:
                yield name, value, layer, features


def counts_heads(module: nn.Module) -> bool:
    """Whether the forward of ``module`` takes numbers of heads from attributes, which may be those
    of one rank."""
    return known_attention(module) is not None or any(True for _ in _heads_in_forward(module))


def _of_keys(name: str) -> bool:
    return any(word in name.lower() for word in ("kv", "key", "value", "k_", "v_", "wk", "wv"))


def _heads_in_forward(module: Any) -> Iterator[tuple[str, int]]:
    """Those of :func:`_numbers_in_forward` that are numbers of heads, by their names."""
    for path, value in _numbers_in_forward(module):
        name = path.rpartition(".")[2]
        words = name.lower()
        counts = "head" in words and not any(w in words for w in ("dim", "size", "mask", "group"))
        if name not in HEAD_SIZES and (counts or name in ("h", "nh")):
            yield path, value


def _numbers_in_forward(module: Any) -> Iterator[tuple[str, int]]:
    """Attributes of ``module``, or of a configuration that it has, that its forward takes, and that
    are whole numbers above 1: "n_head", "config.n_head"."""
    if known_attention(module):
        return
    # functions that a forward calls may take the configuration
    names = sorted({*_names_in(type(module), "forward", set()), "config"})
    for name in names:
        inner = vars(module).get(name, getattr_static(type(module), name, None))
        if type(inner) is int and inner > 1:
            yield name, inner
        if name not in vars(module) or isinstance(inner, torch.Tensor):
            continue
        for other in names:
            number = getattr(inner, other, None)
            if type(number) is int and number > 1 and getattr(module, other, None) is None:
                yield f"{name}.{other}", number


def _names_in(kind: type, method: str, seen: set[str]) -> set[str]:
    """Names of attributes in ``method`` and in the methods of ``kind`` that it calls."""
    seen.add(method)
    names: set[str] = set()
    for function in _definitions(kind, method):
        code = getattr(function, "__code__", None)
        if code is not None and getattr(nn.Module, method, None) is not function:
            names |= {*_names_of(code)}
        if "super" not in names:
            break
    for name in [name for name in names if name not in seen and hasattr(kind, name)]:
        names |= _names_in(kind, name, seen)
    return names


def _definitions(kind: type, method: str) -> Iterator[Any]:
    """The functions of that name in ``kind`` and its bases, without decorators."""
    for base in kind.__mro__:
        function: Any = base.__dict__.get(method)
        function = getattr(function, "__func__", function)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if function is not None:
            yield function


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)
