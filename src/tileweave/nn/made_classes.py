"""Subclasses that are made for the class of a module at run time. Copies and pickles of the module
find them again."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


class MadeClass(type):
    """The type of classes made by :func:`make_class`."""


def make_class(
    base: type,
    mixin: type,
    members: dict[str, Any],
    made_by: Callable[..., type],
    *arguments: object,
) -> type:
    """A subclass of ``mixin`` and ``base`` with the name of ``base``.

    Parameters
    ----------
    base : type
        The class of a module.

    mixin : type
        The class in front of it.

    members : dict
        Attributes of the subclass.

    made_by : callable
        A function of a module that returns this class for ``base`` and ``arguments``: a pickle has
        those in place of the class, which no module has.
    """
    if "forward" in members:  # torch.compile limits recompilations, and skips, by code object
        code = members["forward"].__code__
        members["forward"].__code__ = code.replace(co_name=f"forward of {base.__qualname__}")
    # a metaclass of the module's own must stay one
    kind = MadeClass if type(base) in (type, MadeClass) else type(base)
    space = {**members, "__module__": base.__module__, "_made_by": (made_by, (base, *arguments))}
    return kind(base.__name__, (mixin, base), space)


def forward_by(cls: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A forward for a class made of ``cls``: ``call(module, cls.forward, args, kwargs)``, but under
    torch.compile that of ``cls`` itself."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        return call(self, cls.forward, args, kwargs)

    return forward


def _reduce(made: type) -> Any:
    # a class on top of one of these, as of FSDP2, is not made by the same function
    return made.__dict__.get("_made_by", made.__qualname__)


copyreg.pickle(MadeClass, _reduce)
