"""Arguments of public functions that have a type which their annotations do not allow."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from tileweave.errors import InputError, TileweaveError, require
from tileweave.ops.core.debug_agreement import check_own
from tileweave.ops.core.registry import Group, name_of

P = ParamSpec("P")
T = TypeVar("T")
# what Python and torch raise for an argument that has another type than they take
RAISED = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# no type or shape of an argument is the reason for these, most of which are RuntimeErrors
OF_OTHER_REASONS = (
    TileweaveError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    torch.distributed.DistError,
)


def checks_types(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: where it raises because of the type of an argument, raise
    :class:`InputError` instead. Calls that raise nothing pay for no check."""

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RAISED as error:
            refuse_types(error, call, args, kwargs)
            raise

    return checked


def checks_types_first(call: Callable[P, T]) -> Callable[P, T]:
    """As :func:`checks_types`, but before the call: of what is stored, such as the arguments of a
    module."""

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _require_types(call, args, kwargs)
        return call(*args, **kwargs)

    return checked


def refuse_types(
    raised: Exception,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtensors: Sequence[str] = (),
) -> None:
    """After ``call`` raised one of ``RAISED``: raise :class:`InputError`, which peers learn of, if
    an argument has a type that its annotation does not allow. Nothing while torch traces. The group
    is the argument of this name, or that of the layer of which ``call`` is a method. ``dtensors``:
    the names of arguments that may be DTensors.

    ``raised`` is its cause: it may have another reason, where such a type happens to work.
    """
    if isinstance(raised, OF_OTHER_REASONS) or torch.compiler.is_compiling():
        return
    from tileweave.ops.core.dtensors import refuse_dtensors  # which imports this module

    def check(*_: object) -> None:
        given = _require_types(call, args, kwargs)
        refuse_dtensors(**{name: given[name] for name in given if name not in dtensors})

    names = signature(call).parameters
    layer = args[0] if "self" in names and args else None
    group = kwargs.get("group", getattr(layer, "group_name", None))
    try:
        if ("group" in names or group is not None) and isinstance(group, Group | None):
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            check_own(call.__name__, name_of(group), check, *tensors[:1])
        else:
            check()
    except TileweaveError as error:
        raise error from raised


@contextmanager
def reading(asked: str, allowed: str, remedy: str) -> Iterator[None]:
    """Context of code that reads nested data of a user: what that raises becomes
    :class:`InputError` with these three parts."""
    try:
        yield
    except RAISED as error:
        if isinstance(error, OF_OTHER_REASONS):
            raise
        raise InputError(f"asked: {asked}; allowed: {allowed}; remedy: {remedy}") from error


def _require_types(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by name, all of types that are allowed."""
    try:
        given = signature(call).bind(*args, **kwargs).arguments
    except TypeError:  # Python's own error says which argument is missing or unknown
        return {}
    hints = get_type_hints(call, globalns={}, localns=_Names(call))
    for name, value in given.items():
        if name == "device" and isinstance(value, str):
            require(
                _is_device(value),
                f"{call.__qualname__} with device={value!r:.60}",
                "a device of torch",
                'pass "cpu", "cuda" or "meta"',
            )
        if name in hints:
            _require_type(
                f"{call.__qualname__} with", name, value, call.__annotations__[name], hints
            )
    return given


def _require_type(
    asked: str, name: str, value: Any, annotation: str, hints: Mapping[str, Any]
) -> None:
    """Raise :class:`InputError` unless ``value`` has a type that ``annotation`` allows, and fields
    of our own classes in it have theirs."""
    require(
        _fits(value, hints[name]),
        lambda: f"{asked} {name}={_described(value)}",
        f"{name}: {annotation}",
        "pass one of these types; tensors have strides, whole numbers 64 bits",
    )
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if is_dataclass(one) and type(one).__module__.startswith("tileweave."):
            types = get_type_hints(type(one), localns=_Names(type(one)))
            for part in fields(one):
                inside = f"{asked} {name}, a {type(one).__name__} with"
                _require_type(inside, part.name, getattr(one, part.name), str(part.type), types)


class _Names(dict[str, Any]):
    """The names that annotations of ``call``, a function or a class, use; ``Any`` for what is
    imported for type checkers only."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._of_module = vars(sys.modules[call.__module__])

    def __missing__(self, name: str) -> Any:
        return self._of_module.get(name, vars(builtins).get(name, Any))


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the type ``hint``. Flags may also be whole numbers or None."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint is bool:
        return isinstance(value, Integral | torch.SymBool | None) or type(value).__name__ == "bool"
    whole = isinstance(value, Integral) and hint in (int, float)
    if whole and not -(2**63) <= int(value) < 2**63:
        return False
    if hint is int:
        return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real | torch.SymFloat | torch.SymInt)
    if origin is tuple:
        several = inner[-1:] == (...,)
        return isinstance(value, tuple) and all(_fits(v, inner[0]) for v in value if several)
    if origin in (dict, Mapping):
        return isinstance(value, origin) and all(
            _fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items()
        )
    if origin in (Sequence, list, Iterable):
        whole = isinstance(value, (str, bytes, Mapping)) or hasattr(value, "dtype")
        if whole or not isinstance(value, Iterable):
            return False
        known = value[:1] if isinstance(value, range) else value  # which may be very long
        return not isinstance(known, Sequence) or all(_fits(v, inner[0]) for v in known)
    kind = origin or hint
    if isinstance(value, torch.Tensor) and not _is_plain(value):
        return False
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _is_plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r:.60} ({type(value).__name__})"
    layout = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
    return f"a tensor of {value.dtype}, {layout}"
