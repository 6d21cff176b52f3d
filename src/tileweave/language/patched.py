"""Triton's interpreter without what it does over and over: two thirds of its time in our kernels.

It looks through its whole language and patches it anew at every call of every device function, 3 ms each; it makes the same
table of types and the same tuple of a shape at every operation; it does sums and products of integers again in 64 bits, to
compare, and then ignores the outcome (``device_assert`` does nothing without ``debug``). Here the language is patched once a
launch, from a list; types and shapes are kept; nothing is compared in vain. What kernels compute, and every check of it, is
Triton's.

Private parts of the interpreter are touched here and in ``explore/interpreter.py``; they are the same in Triton 3.6 to 3.9,
and ``signal.py`` leaves other versions as they are.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_ABSENT = object()
_patch_as_triton_does = triton_interpreter._patch_lang
_call_as_triton_does = triton_interpreter.InterpretedFunction.__call__
_numpy_type_as_triton_does = triton_interpreter._get_np_dtype


class _Writing(triton_interpreter._LangPatchScope):
    """Writes down what is patched, while it is patched: (where, name, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches: list[tuple[Any, str, object]] = []

    def set_attr(self, obj: object, name: str, value: object) -> None:
        self.patches.append((obj, name, value))
        super().set_attr(obj, name, value)


def _patches_of_triton() -> list[tuple[Any, str, object]]:
    """For a function that sees all of the language, as our kernels and Triton's own standard library do."""

    def sees_both() -> None: ...

    writing = _Writing()
    usual, triton_interpreter._LangPatchScope = triton_interpreter._LangPatchScope, lambda: writing
    try:
        _patch_as_triton_does(FunctionType(sees_both.__code__, {"tl": tl, "core": tl.core}))
    finally:
        triton_interpreter._LangPatchScope = usual
        writing.restore()
    return writing.patches


class Language:
    """Triton's language in this process: patched while somebody runs a kernel, from whichever thread."""

    def __init__(self) -> None:
        self._patches: list[tuple[Any, str, object]] = []
        self._before: list[tuple[Any, str, object]] = []
        self._users = 0
        self._lock = threading.Lock()

    def patch(self) -> Language:
        """Stands for Triton's ``_patch_lang``; as many ``restore`` as there were ``patch`` end it."""
        with self._lock:
            if self._users == 0:
                self._patches = self._patches or _patches_of_triton()
                for where, name, value in self._patches:
                    self._before.append((where, name, getattr(where, name, _ABSENT)))
                    setattr(where, name, value)
            self._users += 1
        return self

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            while self._users == 0 and self._before:
                where, name, value = self._before.pop()
                if value is _ABSENT:
                    delattr(where, name)
                else:
                    setattr(where, name, value)


LANGUAGE = Language()
_NUMPY_TYPES: dict[int, tuple[object, object]] = {}  # by identity: hashing one of Triton's types is slow


def _numpy_type(dtype: Any) -> object:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    found = _NUMPY_TYPES.get(id(scalar))
    if found is None:
        found = (scalar, _numpy_type_as_triton_does(scalar))
        if len(_NUMPY_TYPES) < 1000:  # pointer types are made anew; none is forgotten, so no identity comes back
            _NUMPY_TYPES[id(scalar)] = found
    return found[1]


@lru_cache(maxsize=4096)
def _shape(*sizes: int) -> tuple[object, object]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _tensor(self: Any, handle: object, type: Any) -> None:
    """``tl.tensor.__init__``, with the tuple of a shape made once."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(*(type.shape if type.is_block() else ()))


def _call(self: Any, *args: object, **kwargs: object) -> object:
    """``InterpretedFunction.__call__``: a kernel, or the host, calls a device function."""
    try:
        return _call_as_triton_does(self, *args, **kwargs)  # patches the language first, and would leave it so
    finally:
        LANGUAGE.restore()


def patch_once() -> None:
    """Take this process's interpreter over, for good."""
    triton_interpreter._patch_lang = lambda fn: LANGUAGE.patch()
    triton_interpreter.InterpretedFunction.__call__ = _call
    triton_interpreter._get_np_dtype = _numpy_type
    tl.tensor.__init__ = _tensor
    builder = triton_interpreter.interpreter_builder
    if not builder.options.debug:  # each sum is done again in 64 bits, compared, and nobody asked for the outcome
        builder.options = replace(builder.options, sanitize_overflow=False)
