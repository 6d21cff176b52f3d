"""Linear layers that compute several projections: ``qkv_proj``, ``gate_up_proj``.

Their output features are those of the projections, one after the other, so an equal split would mix
them. Such a layer becomes a :class:`SplitLinear`, a linear layer for each projection, and each of
them is sharded. The module that calls it must take its share of every projection: an MLP is tried
(:func:`splits_by_feature`), an attention is known (``attentions.py``) or tried (``trial.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tileweave.errors import InputError, require
from tileweave.nn.linear import class_path, is_linear, is_turned, name_features
from tileweave.nn.shards import is_dtensor
from tileweave.ops.core.argument_types import checks_types_first, reading
from tileweave.parallel.attentions import QKV, features_of_head, known_attention
from tileweave.parallel.norms import is_norm

# What a forward with made-up numbers may raise.
FOREIGN = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
UNFIT = (*FOREIGN, AttributeError, LookupError, ArithmeticError, OSError)
# Linear layers that compute several projections: an equal split would mix their features.
FUSED_QKV = (
    *("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv", "wqkv", "W_pack", "to_qkv"),
    *("fused_qkv", "qkv_linear"),
)
FUSED_GATE = ("gate_up_proj", "gate_up", "w13")
FUSED = (*FUSED_QKV, *FUSED_GATE)
GATE_UP = ("gate_proj", "up_proj")
_, KEY, VALUE = QKV


class SplitLinear(nn.Module):
    """Linear layers with one input, whose outputs are concatenated: in place of a fused one.

    Its state_dict has the names and shapes of the fused layer: tensors that share the memory of the
    projections' parameters (:class:`tileweave.parallel.joined.JoinedTensor`). ``load_state_dict``
    takes those, whole tensors, or the parameters of the projections.

    Parameters
    ----------
    fused : nn.Linear, or a module that computes the same
        Its parameters are taken.

    sizes : mapping of str to int
        The output features of each projection, by name, in their order in ``fused``.

    dot : str
        What is between the path of the fused layer and "weight" or "bias" in the state_dict: "_"
        where these are parameters of the module around it.
    """

    def __init__(self, fused: Any, sizes: Mapping[str, int], dot: str = ".") -> None:
        super().__init__()
        self.names, self.dot = tuple(sizes), dot
        self.in_features, self.out_features = fused.in_features, fused.out_features
        self.turned = is_turned(fused)
        biases: Any = [None] * len(sizes)
        if fused.bias is not None:
            biases = fused.bias.detach().split(list(sizes.values()))
        dim = self.dim_of("weight")
        weights = fused.weight.detach().split(list(sizes.values()), dim)
        for name, weight, bias in zip(self.names, weights, biases, strict=True):
            layer: Any = _of_features(fused, weight.shape[dim])
            layer.weight = nn.Parameter(weight, requires_grad=fused.weight.requires_grad)
            if bias is not None:
                trains = fused.bias.requires_grad  # type: ignore[union-attr]
                layer.bias = nn.Parameter(bias, requires_grad=trains)
            self.add_module(name, layer)
        self.train(fused.training)
        self.register_state_dict_post_hook(_under_fused_names)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(input) for name in self.names], dim=-1)

    def whole(self, path: str, kind: str) -> str:
        """The name of a parameter of the fused layer at ``path``."""
        return f"{path}{self.dot}{kind}" if path else kind

    def dim_of(self, kind: str) -> int:
        """The dimension of output features of the "weight" or "bias"."""
        return int(self.turned and kind == "weight")

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the fused layer, as in the state_dict. Not a parameter."""
        return self.state_dict()["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the fused layer, as in the state_dict, or None. Not a parameter."""
        return self.state_dict().get("bias")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module. ``recurse=False`` also gives weight and bias of the fused layer:
        ``set_model_state_dict`` looks there for the names that it sends from rank 0."""
        if not recurse:
            for kind, tensor in self.state_dict().items():
                if kind in ("weight", "bias"):
                    yield self.whole(prefix, kind), tensor
        yield from super().named_buffers(prefix, recurse, remove_duplicate)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        sizes = [getattr(self, name).out_features for name in self.names]
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}.{kind}" for name in self.names]
            whole = state_dict.pop(prefix + kind, None)
            if whole is None:
                continue
            dim = self.dim_of(kind)
            require(
                whole.shape[dim] == sum(sizes),
                f"{prefix}{kind} with {whole.shape[dim]} output features",
                f"{sum(sizes)}: {', '.join(self.names)} have {sizes}",
                "pass the parameters of the whole layer",
            )
            parts: Any = getattr(whole, "parts", ())
            if [part.shape[dim] for part in parts] != sizes:
                whole = whole.full_tensor() if is_dtensor(whole) else whole
                parts = whole.split(sizes, dim)
            state_dict.update(zip(names, parts, strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


def _under_fused_names(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put the parameters of projections in ``state_dict`` together, under the names of the layer.

    Those of a projection that became another module, with LoRA for instance, stay as they are.
    """
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.{kind}" for name in module.names]
        if all(name in state_dict for name in names):
            parts = [state_dict.pop(name) for name in names]
            state_dict[module.whole(prefix[:-1], kind)] = _joined(parts, module.dim_of(kind))


def _of_features(fused: Any, features: int) -> Any:
    """A layer of the class of ``fused``, with so many output features, without memory."""
    with torch.device("meta"):
        if is_turned(fused):
            layer = type(fused)(features, fused.in_features)
            name_features(layer)
            layer.bias = None
            return layer
        return nn.Linear(fused.in_features, features, False)


def _joined(parts: list[Any], dim: int) -> Any:
    """Tensors of projections as one, along ``dim``: DTensors share their memory, plain tensors are
    copied; of anything else, such as a number of steps, the first one."""
    from tileweave.parallel.joined import JoinedTensor

    if is_dtensor(parts[0]):
        return JoinedTensor(parts, dim)
    tensors = isinstance(parts[0], torch.Tensor) and parts[0].ndim
    return torch.cat([part.detach() for part in parts], dim) if tensors else parts[0]


@checks_types_first
def join_projections(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the names of the model before ``parallelize``.

    Layers such as ``qkv_proj`` and ``gate_up_proj`` become a layer for each projection, each with
    parameters of its own. A state_dict of the model has the names of the fused layers already; this
    is for what is named by parameter: the state of an optimizer, or gradients.

    Parameters
    ----------
    model : nn.Module
        A model after :func:`tileweave.parallelize`.

    state : dict
        Tensors by names of parameters, or what ``torch.distributed.checkpoint.state_dict.
        get_optimizer_state_dict`` returns.

    Returns
    -------
    dict
        DTensors of the shapes of the fused layers in place of those of projections, which share
        their memory: ``torch.distributed.checkpoint`` saves them, and loads into ``state``. Plain
        tensors are concatenated. Other entries as they are.
    """
    with reading(
        f"join_projections of a state with the keys {[*state]!r:.200}",
        "tensors by names of parameters, or what get_optimizer_state_dict returns",
        "pass one of these, of this model",
    ):
        return _with_fused_names(model, state)


def _with_fused_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    if set(state) == {"state", "param_groups"}:
        groups = [{**g, "params": _fused_names(model, g["params"])} for g in state["param_groups"]]
        return {"state": _with_fused_names(model, state["state"]), "param_groups": groups}
    joined = dict(state)
    for name, (parts, dim) in _projections(model).items():
        if not all(part in joined for part in parts):
            continue
        values = [joined.pop(part) for part in parts]
        if isinstance(values[0], dict):
            joined[name] = {key: _joined([v[key] for v in values], dim) for key in values[0]}
        else:
            joined[name] = _joined(values, dim)
    return joined


def _projections(model: nn.Module) -> dict[str, tuple[list[str], int]]:
    """The names of parameters that make up each parameter of a fused layer, and along which
    dimension, by its name."""
    return {
        module.whole(path, kind): (
            [f"{path}.{name}.{kind}" if path else f"{name}.{kind}" for name in module.names],
            module.dim_of(kind),
        )
        for path, module in model.named_modules()
        if isinstance(module, SplitLinear)
        for kind in ("weight", "bias")
    }


def _fused_names(model: nn.Module, names: list[str]) -> list[str]:
    """``names`` of parameters, with the one of the fused layer in place of its projections."""
    fused = {part: name for name, (parts, _) in _projections(model).items() for part in parts}
    return list(dict.fromkeys(fused.get(name, name) for name in names))


@dataclass(frozen=True)
class FusedLayer:
    """A fused linear layer of a plan.

    path : of the module that has it.
    name : of the layer in that module.
    row : the name of the linear layer that takes what is computed from it.
    sizes : output features of each projection, by name; none: ranks take equal parts of the layer.
    copies : how many ranks compute the same features of a projection, by name; others: one.
    guessed : a trial must confirm the sizes.
    shares : it takes the input of the module.
    """

    path: str
    name: str
    row: str
    sizes: Mapping[str, int]
    copies: Mapping[str, int] = field(default_factory=dict)
    guessed: bool = False
    shares: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its projections, as seen from the module."""
        return tuple(f"{self.name}.{part}" for part in self.sizes) or (self.name,)

    def copies_by_path(self) -> dict[str, int]:
        """``copies`` by the path of the projection in the model."""
        dot = f"{self.path}." if self.path else ""
        return {f"{dot}{self.name}.{part}": ranks for part, ranks in self.copies.items()}


def fused_layer(
    model: nn.Module, path: str, name: str, size: int, guess: bool = False
) -> FusedLayer | str:
    """The fused layer ``name`` of the module at ``path`` for ``size`` ranks, or why it cannot be
    split. ``guess``: a trial can confirm what is not known."""
    module: Any = model.get_submodule(path)
    layer = getattr(module, name, None)
    if layer is None or not is_linear(layer):
        return f"it is a {class_path(layer)}"
    if name in FUSED_GATE:
        rows = row_after(module, [name])
        if len(rows) != 1 or layer.out_features != 2 * module.get_submodule(rows[0]).in_features:
            return "its features are not those of a gate and of an equal projection"
        return gated_layer(model, path, name, rows[0], size) or (
            f"{type(module).__name__} does not treat features one by one"
        )
    known = known_attention(module)
    sizes = known.sizes(module) if known is not None and known.layer == name else None
    if known is not None and sizes is not None:
        if sum(sizes.values()) != layer.out_features:
            return "its features are not those of its heads"
        ranks = copies_of(sizes[KEY], features_of_head(module), size)
        return FusedLayer(path, name, known.row, sizes, _shared_keys(ranks))
    guessed = _guessed(module, path, name, size) if guess and known is None else None
    if guessed is not None:
        return guessed
    return f"the forward of {type(module).__name__} is not known to take heads of one rank"


def _shared_keys(copies: int) -> dict[str, int]:
    return dict.fromkeys((KEY, VALUE), copies) if copies > 1 else {}


def row_after(module: nn.Module, names: Iterable[str]) -> list[str]:
    """The other linear layers of ``module``, or first ones of a sequence in it, such as
    ``to_out.0``, that return as many features as the first of the layers ``names`` takes."""
    columns = [*names]
    first: Any = module._modules.get(columns[0])
    found = []
    for name, child in module.named_children():
        layer: Any = child
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child):
            name, layer = f"{name}.0", child[0]
        if name not in columns and is_linear(layer) and layer.out_features == first.in_features:
            found.append(name)
    return found


def _guessed(module: Any, path: str, name: str, size: int) -> FusedLayer | None:
    """The layer as queries, keys and values one after the other, of which the queries have as many
    features as the one other linear layer of ``module`` takes; None if there is no such layer."""
    rows = row_after(module, [name])
    if name not in FUSED_QKV or len(rows) != 1:
        return None
    queries = module.get_submodule(rows[0]).in_features
    keys, rest = divmod(getattr(module, name).out_features - queries, 2)
    if rest or keys <= 0:
        return None
    sizes: dict[str, int] = dict(zip(QKV, (queries, keys, keys), strict=True))
    copies = _shared_keys(copies_of(keys, features_of_head(module), size))
    return FusedLayer(path, name, rows[0], sizes, copies, guessed=True)


def gated_layer(model: nn.Module, path: str, name: str, row: str, size: int) -> FusedLayer | None:
    """The layer ``name`` of the module at ``path`` as a gate and an equal projection, the halves of
    its output, if the module computes each feature of the input of ``row`` from the same feature of
    both; else None."""
    module: Any = model.get_submodule(path)
    layer: Any = module._modules.get(name)
    end: Any = module._modules.get(row)
    if layer is None or end is None or not is_linear(layer) or not is_linear(end):
        return None
    half: int = end.in_features
    if layer.out_features != 2 * half or not splits_by_feature(module, name, row, size, 2):
        return None
    return FusedLayer(path, name, row, dict.fromkeys(GATE_UP, half))


def check_parts(
    path: str,
    linear: Any,
    parts: Mapping[str, int],
    size: int,
    copies: Mapping[str, int],
    head: int = 1,
) -> None:
    """Raise :class:`InputError` unless ``linear`` has these output features, and each rank gets its
    share of each part, in whole heads. ``copies``: as of :class:`FusedLayer`."""
    features = getattr(linear, "out_features", None)
    require(
        sum(parts.values()) == features,
        f"{path}: parts {dict(parts)} of {features} output features",
        "parts that make up all output features",
        "give the features of each projection, in their order",
    )
    for name, part in parts.items():
        require(
            part > 0 and part * copies.get(name, 1) % (size * head) == 0,
            f"{path}: {part} features of {name}, heads of {head}, over {size} ranks",
            "a multiple of the world size, and whole heads on every rank",
            "choose fewer ranks, or pass a plan without it",
        )


def copies_of(features: int, head: int | None, size: int) -> int:
    """How many of ``size`` ranks compute the same head of keys or values: 1 with as many heads as
    ranks, or where ranks cannot share heads evenly."""
    heads, rest = divmod(features, head) if head else (0, 0)
    return size // heads if not rest and 0 < heads < size and size % heads == 0 else 1


def is_adapter(module: object) -> bool:
    """Whether ``module`` is one that PEFT puts around another one."""
    return type(module).__module__.startswith("peft.") and isinstance(module, nn.Module)


def refuse_fused(path: str, reason: str) -> None:
    """Raise :class:`InputError` for a fused layer that no rule splits."""
    raise InputError(
        f"asked: a plan for {path}, which computes several projections; allowed: layers that are "
        f"known to be split, but {reason}; remedy: split it into layers named as in Llama, or give "
        "the features of each projection with plan={..., tw.parallel.Colwise(parts={'q': 64, 'k': "
        "32, 'v': 32})}: one part if heads are interleaved; the forward must take the numbers of "
        "heads and features from shapes"
    )


def splits_by_feature(
    module: nn.Module, column: str, row: str, size: int, projections: int
) -> bool:
    """Whether ``module`` computes each feature of the input of ``row`` from the same feature of
    each projection in the output of ``column``. Its forward is tried, with numbers in place of
    both, and without norms that have parameters. Checks of a plan find those between both."""
    tried: Any = copy.copy(module)
    tried._modules = dict(module._modules)
    given = _Given()
    tried._modules[column], tried._modules[row] = given, _After(given)
    for name, child in module.named_children():
        if is_norm(child) and any(True for _ in child.parameters()):  # they may be elsewhere
            tried._modules[name] = nn.Identity()
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        tried.training = False
        with torch.no_grad(), torch.device("cpu"):
            seed = torch.Generator().manual_seed(0)
            numbers = torch.randn(projections, 1, 3, 4 * size, generator=seed)
            x = torch.zeros(1, 3, getattr(module, column).in_features)
            given.value = torch.cat([*numbers], dim=-1)
            whole = tried(x)
            parts = []
            for own in zip(*(each.chunk(size, -1) for each in numbers), strict=True):
                given.value = torch.cat(own, dim=-1)
                parts.append(tried(x))
            return torch.allclose(torch.cat(parts, dim=-1), whole)
    except UNFIT:  # it asks for more
        return False
    finally:
        for part, mode in modes:
            part.training = mode


class _Given(nn.Module):
    """Returns ``value``, whatever it is called with."""

    value: torch.Tensor
    weight = torch.empty(())  # its dtype may be asked for
    called = False

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        self.called = True
        return self.value


class _After(nn.Module):
    """Returns its input, after ``given`` was called."""

    weight = _Given.weight

    def __init__(self, given: _Given) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.given.called:
            raise RuntimeError("called before the other layer")
        self.given.called = False
        return x


def is_fused(module: object, name: str) -> bool:
    """Whether the layer ``name`` of ``module`` computes several projections."""
    known = known_attention(module)
    return name in FUSED or (known is not None and known.layer == name)


class OwnHeads:
    """The configuration of an attention, with the numbers of heads of one rank."""

    def __init__(self, config: Any, **own: int) -> None:
        self._config = config
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._config, name)


def split(model: nn.Module, layer: FusedLayer, size: int) -> None:
    """Put the projections of ``layer`` in its place, and let the module take heads of one rank."""
    if not layer.sizes:
        return
    module: Any = model.get_submodule(layer.path)
    known = known_attention(module)
    dot = "_" if known is not None and known.of_parameters else "."
    setattr(module, layer.name, SplitLinear(getattr(module, layer.name), layer.sizes, dot))
    if known is not None and known.in_config:
        heads = ("num_attention_heads", "num_key_value_heads")
        own = {name: max(1, getattr(module.config, name) // size) for name in heads}
        module.config = OwnHeads(module.config, **own)
