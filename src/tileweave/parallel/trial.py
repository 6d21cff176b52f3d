"""Modules around sharded layers, tried: does each rank compute its part from its part?

Between its column-parallel and its row-parallel layers a module sees the heads or features of one
rank. A forward that mixes them (a softmax over features, ``glu``), or that counts on those of all
ranks (a hard-coded number of heads, ALiBi slopes), would be wrong, often without an error. So it is
tried: random numbers take the place of the layers' outputs, first those of all ranks, then those of
each rank. The inputs of its row-parallel layers must then be parts of the same tensors.

A forward may take numbers of heads or features from attributes, or from the features of its input.
Which of them must become those of one rank (a ``Form``) is found by trials, too: the first form
that is right is taken, and none if no form is.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from pickle import PicklingError
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tileweave.errors import InputError
from tileweave.nn.linear import ColumnParallelLinear, ParallelLinear
from tileweave.nn.made_classes import forward_by, make_class
from tileweave.nn.replicated import RunningHooks
from tileweave.nn.shards import is_dtensor
from tileweave.ops.core.argument_types import OF_OTHER_REASONS
from tileweave.parallel.adapters import BASE, has_sharded_lora, why_not_sharded
from tileweave.parallel.fused import FOREIGN, SplitLinear
from tileweave.parallel.fused import UNFIT as UNFIT_FORWARD
from tileweave.parallel.heads import Form, set_number
from tileweave.parallel.hooks import (
    BACKWARD,
    FORWARD,
    guard_hooks,
    has_hooks,
    leaves_of,
    mapped,
    tensors_of,
)
from tileweave.parallel.shared_input import SharedColumn, first_part, input_of, with_input
from tileweave.parallel.tried import Tried

UNFIT = (*UNFIT_FORWARD, copy.Error, PicklingError)  # what a copy of a module may raise, too
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 0.05  # of 16-bit dtypes, relative to the largest element
ROWS = 3  # of an input that is made up

# Output features of each projection of a layer, and how many ranks compute the same ones.
Parts = tuple[tuple[int, int], ...]


# --- Which modules ---


def modules_to_try(
    model: nn.Module, columns: list[str], rows: list[str], size: int
) -> dict[str, Tried]:
    """The smallest modules that have a layer of ``rows`` and one of ``columns``, by path."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for row in rows:
        parent = row.rpartition(".")[0]
        while True:
            dot = f"{parent}." if parent else ""
            own = [path for path in columns if path.startswith(dot)]
            called = not isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict))
            if (own and called) or not parent:
                break
            parent = parent.rpartition(".")[0]
        if own:
            found.setdefault(parent, (own, []))[1].append(row)
    made = {}
    for path, (own, ends) in found.items():
        start = len(path) + 1 if path else 0
        inside = [p[start:] for p in found if p != path and (not path or p.startswith(f"{path}."))]
        inner = [p for p in inside if not any(p.startswith(f"{q}.") for q in inside)]
        direct = [p[start:] for p in own if not any(p[start:].startswith(f"{q}.") for q in inner)]
        made[path] = Tried(
            path, tuple(direct), tuple(end[start:] for end in ends), tuple(inner), size
        )
    watched = {path: tried for path, tried in made.items() if tried.columns}
    for column in columns:
        if not any(not path or column.startswith(f"{path}.") for path in watched):
            path, _, name = column.rpartition(".")
            watched[path] = Tried(path, (name,), (), (), size, done=True)
    return watched


def try_made_up_input(model: nn.Module, tried: Tried, parts: Mapping[str, Parts]) -> None:
    """Try a module of the whole model that takes one tensor [batch, rows, features]. Others are
    tried with the input of their first call.

    Parameters
    ----------
    parts : mapping
        The projections of fused layers by path, and of layers that ranks share.
    """
    module: Any = model.get_submodule(tried.path)
    layers = [module.get_submodule(name) for name in tried.columns]
    first = layers[0].weight
    if tried.done or tried.inner or first.is_meta or not _takes_one(module):
        return
    if len({layer.in_features for layer in layers}) != 1:
        return
    dot = f"{tried.path}." if tried.path else ""
    own = {n: parts[dot + n] for n in tried.columns if dot + n in parts}
    drawn = torch.Generator(first.device).manual_seed(0)
    shape = (2, ROWS, layers[0].in_features)
    x = torch.randn(shape, generator=drawn, device=first.device).to(first.dtype)
    outer = _copied(module, tried, own)
    if outer is not None:
        forward = type(module).forward
        tried.done = _Trial(module, tried, *outer, forward, (x,), {}, {}).confirm()


def _takes_one(module: nn.Module) -> bool:
    try:
        given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in given
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    keyword = any(p.default is p.empty and p.kind == p.KEYWORD_ONLY for p in given)
    return len(needed) == 1 and not keyword


# --- The first call ---


class TriedModule(nn.Module):
    """A module whose calls are watched: errors get its path, and the first one is a trial."""

    _tried: Tried


def watch(module: nn.Module, tried: Tried) -> None:
    """Try ``module`` in its first call, with the input of that call."""
    module.__class__ = _class_of(type(module))
    watched: Any = module
    watched._tried = tried
    tried.by_row = any(getattr(module.get_submodule(row), "scatter", False) for row in tried.rows)
    for name in tried.columns:  # of several projections: a layer for each
        split: Any = module.get_submodule(name)
        if isinstance(split, SplitLinear):
            others = [walk for walk in tried.walks if walk != (*name.split("."),)]
            tried.walks = (*others, *((*name.split("."), part) for part in split.names))
    _set_input_parts(watched, tried)


@cache
def _class_of(cls: Any) -> type:
    return make_class(cls, TriedModule, {"forward": _forward_of(cls)}, _class_of)


def _forward_of(cls: Any) -> Callable[..., Any]:
    inner = forward_by(cls, _call)

    @wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._tried.between:
            self._tried.check_gradients(args, kwargs)
        if not self._tried.guessed or self._tried.done:
            return inner(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise self._tried.untried(self)  # without fullgraph this call is made without a graph
        compiles = "torch._dynamo" in sys.modules  # an import of it takes a second
        return (torch.compiler.disable(inner) if compiles else inner)(self, *args, **kwargs)

    return forward


def _call(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tried: Tried = module._tried
    if not _is_unchanged(module, tried):
        dot = f"{tried.path}." if tried.path else ""
        for name in (*tried.columns, *tried.rows):
            reason = why_not_sharded(module, name)
            if reason is not None:
                raise InputError(f"asked: {dot}{name}, {reason}")
        _guard_hooks(module, tried)
    outer, given = None, (args, kwargs)
    guessed = tried.guessed and not tried.done
    if not tried.done and _is_plain(given):
        outer, given = _copied(module, tried, {}), _cloned(given)
        tried.done = not guessed
    if guessed and outer is None:
        raise tried.untried(module)
    confirmed, before = False, tried.form
    every = tried.attributes
    if outer is not None and not tried.inner:  # before the call, which may need other attributes
        trial = _Trial(module, tried, *outer, forward, given[0], given[1], {})
        confirmed = trial.confirm()
        if guessed and not confirmed:
            raise tried.untried(module, trial.why)
        tried.check_gradients(args, kwargs)
    for name, (of_all, own) in every.items() if tried.form != before else ():
        set_number(module, name, own if name in tried.form.counts else of_all)
    if tried.form.narrow and not before.narrow:
        _set_input_parts(module, tried)
        args, kwargs = _narrowed(module, tried, args, kwargs)
    try:
        if outer is None:
            return forward(module, *args, **kwargs)
        with _outputs_of(module, tried.inner) as inner:
            result = forward(module, *args, **kwargs)
    except FOREIGN as error:
        if isinstance(error, OF_OTHER_REASONS):
            raise
        raise tried.refuse(module, f"raised {type(error).__name__}: {error}") from error
    if tried.inner:
        confirmed = _Trial(module, tried, *outer, forward, given[0], given[1], inner).confirm()
        tried.check_gradients(args, kwargs)
    tried.done = confirmed or tried.done
    if not tried.done:
        raise tried.untried(module)
    return result


def _set_input_parts(module: Any, tried: Tried) -> None:
    """Let later calls see as many features of the input as ``tried`` says."""
    if tried.form.narrow:
        module._input_parts = tried.size


def _narrowed(module: nn.Module, tried: Tried, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``module`` in its trial, with fewer features of its input; its linear layers
    keep what they take. Later calls: ``shared_input.py``."""
    key, x = input_of(tried.path, args, kwargs)
    few = first_part(x, tried.size)
    for part in module.modules():
        if isinstance(part, SharedColumn) and part.given is not None and part.given[0] is x:
            part.given = few, part.given[1]
    return with_input(key, few, args, kwargs)


def _is_unchanged(module: nn.Module, tried: Tried) -> bool:
    """Whether all layers are sharded ones without hooks. Each call asks, so it is quick."""
    for names in tried.walks:
        part: Any = module
        for name in names:
            above, part = part, part._modules.get(name)
            if part is None:
                return False
            if name == BASE and not has_sharded_lora(above):
                return False
        if not isinstance(part, ParallelLinear) or has_hooks(part):
            return False
    return True


def _guard_hooks(module: nn.Module, tried: Tried) -> None:
    """Let hooks only read the features of one rank: those before a row-parallel layer, those after
    a column-parallel one, and those of gradients."""
    for name in (*tried.columns, *tried.rows):
        try:
            layer: Any = module.get_submodule(name)
        except AttributeError:  # LoRA that was unloaded
            continue
        column = isinstance(layer, ColumnParallelLinear)
        moves = layer.gather if column else getattr(layer, "scatter", False)
        seen = FORWARD if moves else FORWARD[column : column + 1]
        path = f"{tried.path}.{name}" if tried.path else name
        guard_hooks(layer, path, (*seen, *BACKWARD), "the part of one rank")


def _is_plain(given: Any) -> bool:
    """Whether ``given`` has tensors with elements, and numbers and names, but no objects such as
    caches, which a trial would change."""
    tensors = tensors_of(given)
    simple = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return (
        bool(tensors)
        and all(isinstance(leaf, (torch.Tensor, *simple)) for leaf in leaves_of(given))
        and all(
            t.numel() and not t.is_meta and not hasattr(t, "fake_mode") and not is_dtensor(t)
            for t in tensors
        )
        and not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _cloned(given: Any) -> Any:
    made: dict[int, torch.Tensor] = {}  # what is one tensor stays one

    def clone(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            made[id(t)] = t.detach().clone()
        return made[id(t)]

    return mapped(given, clone)


@contextmanager
def _outputs_of(module: nn.Module, paths: tuple[str, ...]) -> Iterator[dict[str, list[Any]]]:
    """What the modules at ``paths`` return meanwhile."""
    found: dict[str, list[Any]] = {path: [] for path in paths}
    hooks = []
    for path in paths:

        def note(_: Any, args: Any, y: Any, path: str = path) -> None:
            found[path].append(_cloned(y))

        hooks.append(module.get_submodule(path).register_forward_hook(note))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# --- A trial ---


@dataclass
class _Tape:
    """What the layers of one run share. rank: the rank whose part they give; None: all ranks.
    few: the input of the module, if it has as many features as that part."""

    size: int
    rank: int | None = None
    few: torch.Tensor | None = None
    calls: int = 0
    seen: list[torch.Tensor] = field(default_factory=list)  # what row-parallel layers got
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def begin(self, rank: int | None, outputs: dict[str, list[Any]]) -> None:
        self.rank, self.few, self.calls, self.seen = rank, None, 0, []
        self.outputs = {path: list(results) for path, results in outputs.items()}

    def numbers(self, x: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """Random numbers of the dtype that a linear layer makes of x; others in each call of a
        run, the same in each run."""
        kind = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self.calls += 1
        drawn = torch.Generator(x.device).manual_seed(self.calls)
        return torch.randn(shape, generator=drawn, device=x.device).to(dtype)


class _Unfit(RuntimeError):
    """A layer got other features than it has."""


class _Stand(nn.Module):
    """In place of a sharded layer. Its parameters have shapes and dtypes, no values."""

    def __init__(self, layer: Any, tape: _Tape, column: bool, parts: Parts) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.tape, self.column = tape, column
        self.parts = parts or ((layer.out_features, getattr(layer, "copies", 1)),)
        sharded = isinstance(layer, ParallelLinear)
        moves = getattr(layer, "gather", False) and not isinstance(layer, SharedColumn)
        self.moves = sharded and (moves or getattr(layer, "scatter", False))
        self.dim = getattr(layer, "dim", 0)
        self.weight = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")
        bias = layer.bias
        self.bias = None if bias is None else torch.empty_like(self.weight[:, 0])

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        shape = [*x.shape[:-1], self.out_features]
        rank, size = self.tape.rank, self.tape.size
        if not self.column:
            if x.shape[-1] != self.in_features // (1 if rank is None else size):
                raise _Unfit(f"passed {x.shape[-1]} features to its row-parallel layer")
            self.tape.seen.append(x.clone())
            if self.moves:
                shape[self.dim] //= size
            return self.tape.numbers(x, shape)
        if x is not self.tape.few and x.shape[-1] != self.in_features:
            raise _Unfit(f"passed {x.shape[-1]} features to a column-parallel layer")
        if self.moves:
            shape[self.dim] *= size
        y = self.tape.numbers(x, shape)
        if rank is None:
            return y
        found = y.split([features for features, _ in self.parts], -1)
        return torch.cat(
            [
                part.chunk(size // copies, -1)[rank // copies]
                for part, (_, copies) in zip(found, self.parts, strict=True)
            ],
            -1,
        )


class _Replay(nn.Module):
    """In place of a module that is tried by itself: returns what that module returned."""

    def __init__(self, path: str, tape: _Tape) -> None:
        super().__init__()
        self.path, self.tape = path, tape

    def forward(self, *_: Any, **__: Any) -> Any:
        return _cloned(self.tape.outputs[self.path].pop(0))


def _copied(
    module: nn.Module, tried: Tried, parts: dict[str, Parts]
) -> tuple[nn.Module, _Tape] | None:
    """A copy of ``module`` with other modules in place of its sharded layers and of inner ones, and
    the tape of those; None if it cannot be copied."""
    tape = _Tape(tried.size)
    memo = _not_copied(module, tape)
    for name, part in module.named_modules():
        if name in tried.inner:
            memo[id(part)] = _Replay(name, tape)
        elif any(name.startswith(f"{path}.") for path in tried.inner):
            continue
        elif f"{name}.{BASE}" in (*tried.columns, *tried.rows):  # LoRA adds a part of its own
            base: Any = part.get_submodule(BASE)
            memo[id(part)] = _Stand(base, tape, f"{name}.{BASE}" in tried.columns, ())
        elif isinstance(part, ParallelLinear):
            column = isinstance(part, ColumnParallelLinear)
            memo[id(part)] = _Stand(part, tape, column, ())
        elif isinstance(part, SplitLinear):  # its layers are sharded ones
            continue
        elif name in (*tried.columns, *tried.rows):  # the model is not sharded yet
            memo[id(part)] = _Stand(part, tape, name in tried.columns, parts.get(name, ()))
    try:
        made = copy.deepcopy(module, memo).eval()
    except UNFIT:  # a copy may raise anything; the module is not tried then
        return None
    for part in made.modules():  # hooks of users may note what they see
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                in_trial = getattr(hook, "in_trial", None)
                if in_trial is not None:
                    hooks[key] = in_trial
                elif not isinstance(getattr(hook, "__self__", None), RunningHooks):
                    del hooks[key]
    return made, tape


def _not_copied(module: nn.Module, tape: _Tape) -> dict[int, Any]:
    """For ``deepcopy``: a forward does not change parameters, and an embedding may be large."""
    return {id(tape): tape, **{id(p): p for p in module.parameters()}}


@dataclass
class _Trial:
    """A call of ``module``, which is tried on a copy of it with ``tape``."""

    module: nn.Module
    tried: Tried
    copied: nn.Module
    tape: _Tape
    forward: Callable[..., Any]
    args: Any
    kwargs: Any
    inner: dict[str, list[Any]]  # what modules that are tried themselves return
    why: str = ""  # the error of a run of all ranks

    def confirm(self) -> bool:
        """As :meth:`judge`; where it raises an error, again with each of ``tried.others``. The one
        that is right becomes ``tried.form``."""
        tried, first = self.tried, self.tried.form
        for name, (of_all, _) in tried.attributes.items():
            set_number(self.copied, name, of_all)
        try:
            return self.judge()
        except InputError:
            for other in tried.others:
                tried.form = other
                with suppress(InputError):
                    if self.judge():
                        return True
            tried.form = first
            raise

    def judge(self) -> bool:
        """Raise :class:`InputError` if a rank's part does not come from that rank's part. Returns
        whether it could be tried."""
        tried, device = self.tried, tensors_of((self.args, self.kwargs))[0].device
        cuda = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):
            state = torch.random.get_rng_state()
            try:
                whole, results = self._run(None)
                torch.random.set_rng_state(state)
                again, _ = self._run(None)
                torch.manual_seed(1)
                other, others = self._run(None)
            except UNFIT as error:  # it asks for what is not here: its real calls tell
                self.why = f"{type(error).__name__}: {error}"
                return False
            if not whole or not (_alike(whole, again) and _alike(whole, other)):
                return False
            last = tried.size - 1
            for rank in sorted({0, min(1, last), last}):  # others are as the second one
                torch.random.set_rng_state(state)
                try:
                    own, found = self._run(rank)
                except torch.OutOfMemoryError:  # of one rank, maybe
                    return False
                except UNFIT as error:
                    kind = "" if isinstance(error, _Unfit) else f"raised {type(error).__name__}: "
                    raise tried.refuse(self.module, f"{kind}{error}") from error
                parts = [t.chunk(tried.size, -1)[rank] for t in whole]
                # others are heads of one rank, such as a cache
                narrow = tried.form.narrow  # a result may be of that input then
                equal = [(a, b) for a, b in zip(results, found, strict=False) if a.shape == b.shape]
                other_shapes = narrow and len(equal) != max(len(results), len(found))
                same = equal if _alike(results, others) else []
                alike = _alike(parts, own) and all(_alike([a], [b]) for a, b in same)
                if other_shapes or not alike:
                    raise tried.refuse(
                        self.module, "computes something else from a part of the heads or features"
                    )
            with suppress(*UNFIT):  # of a function without a gradient
                tried.between = self._between()
        return True

    def _between(self) -> tuple[int | str, ...]:
        """The arguments on which the inputs of row-parallel layers depend, other than through
        column-parallel ones."""
        args, kwargs = _cloned((self.args, self.kwargs))
        given = {
            name: [t for t in tensors_of(each) if t.is_floating_point()]
            for name, each in (*enumerate(args), *kwargs.items())
        }
        for t in (t for tensors in given.values() for t in tensors):
            t.requires_grad_()
        # hooks around this call, such as those of a checkpoint, must not count what is saved here
        with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
            every, _ = self._run(None, (args, kwargs))
        seen = [t for t in every if t.requires_grad]
        drawn = [torch.randn_like(t) for t in seen]
        found = []
        for name, tensors in given.items() if seen else ():
            if not tensors:
                continue
            grads = torch.autograd.grad(seen, tensors, drawn, retain_graph=True, allow_unused=True)
            if any(grad is not None and bool(grad.any()) for grad in grads):
                found.append(name)
        return tuple(found)

    def _run(
        self, rank: int | None, given: Any = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What row-parallel layers get of a rank, or of all, and what the module returns.
        ``given``: the arguments. None: copies of those of the trial."""
        counts, narrow = self.tried.form if rank is not None else Form({})
        self.tape.begin(rank, self.inner)
        again = copy.deepcopy(self.copied, _not_copied(self.copied, self.tape))
        for name, (_, own) in counts.items():
            set_number(again, name, own)
        args, kwargs = given or _cloned((self.args, self.kwargs))
        if narrow:
            args, kwargs = _narrowed(again, self.tried, args, kwargs)
            self.tape.few = input_of(self.tried.path, args, kwargs)[1]
        y = self.forward(again, *args, **kwargs)
        return self.tape.seen, tensors_of(y)


def _alike(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    if [t.shape for t in wanted] != [t.shape for t in found]:
        return False
    for a, b in zip(wanted, found, strict=True):
        finite = torch.where(a.isfinite(), a, 0).abs()
        near = TOLERANCE.get(a.dtype, COARSE) * float(finite.max()) if a.numel() else 0.0
        if not torch.allclose(a.float(), b.float(), rtol=0, atol=near, equal_nan=True):
            return False
    return True
