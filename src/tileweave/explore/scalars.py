"""Scalars of a kernel as Python integers, because most of what an interpreted kernel does is index
arithmetic.

Triton's interpreter makes an array of every integer and checks types at every operation, which
takes 30 us each. Here scalars are a subclass of ``int`` whose division truncates, as in Triton.
They do not wrap at 32 bits. Only epochs become that large, and they are wrapped where they are
stored (``device/interpreter/words.py``).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter


def _divide(a: int, b: int) -> int:
    a, b = int(a), int(b)
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _remainder(a: int, b: int) -> int:
    return int(a) - int(b) * _divide(a, b)


class Scalar(int):
    """An integer of a kernel."""

    def to(self, dtype: tl.dtype, *args: object, **kwargs: object) -> Any:
        if dtype.is_int():
            return self
        if dtype.is_ptr():
            from tileweave.explore import blocks  # which are made of scalars

            return blocks.Block(np.int64(self), dtype)
        tensor: Any = triton_interpreter.interpreter_semantic.to_tensor(int(self), False)
        return tensor.to(dtype)


def plain(value: Any, constexpr: type = tl.constexpr) -> Any:
    return value.value if type(value) is constexpr else value


def _binary(function: Callable[[int, int], int], swapped: bool) -> Callable[[Scalar, object], Any]:
    """``function`` is one of ``int``'s own, so that scalars need no conversion."""

    def method(self: Scalar, other: Any) -> Any:
        if type(other) is not Scalar and type(other) is not int:  # these two most often
            other = plain(other)
            if not isinstance(other, int):
                return NotImplemented
        return Scalar(function(self, other))

    def swapped_method(self: Scalar, other: Any) -> Any:
        other = plain(other)
        return Scalar(function(other, self)) if isinstance(other, int) else NotImplemented

    return swapped_method if swapped else method


for _name, _function in {
    "add": int.__add__,
    "sub": int.__sub__,
    "mul": int.__mul__,
    "floordiv": _divide,
    "mod": _remainder,
    "and": int.__and__,
    "or": int.__or__,
    "xor": int.__xor__,
    "lshift": int.__lshift__,
    "rshift": int.__rshift__,
}.items():
    setattr(Scalar, f"__{_name}__", _binary(_function, swapped=False))
    setattr(Scalar, f"__r{_name}__", _binary(_function, swapped=True))


class Truth(Scalar):
    """The result of a comparison of scalars."""

    def __repr__(self) -> str:
        return repr(bool(self))


def _comparison(function: Callable[[int, int], bool]) -> Callable[[Scalar, object], Any]:
    def method(self: Scalar, other: Any) -> Any:
        if type(other) is not Scalar and type(other) is not int:
            other = plain(other)
            if not isinstance(other, int):
                return NotImplemented
        return Truth(function(self, other))

    return method


def _logic(function: Callable[[int, int], int]) -> Callable[[Truth, object], Any]:
    def method(self: Truth, other: object) -> Any:
        other = plain(other)
        if not isinstance(other, int):
            return NotImplemented
        kind = Truth if isinstance(other, (Truth, bool)) else Scalar
        return kind(function(int(self), int(other)))

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Scalar, f"__{_name}__", _comparison(getattr(int, f"__{_name}__")))
for _name in ("and", "or", "xor"):
    setattr(
        Truth, f"__{_name}__", _logic(getattr(operator, f"{_name}_" if _name != "xor" else "xor"))
    )
    setattr(Truth, f"__r{_name}__", getattr(Truth, f"__{_name}__"))
Scalar.__hash__ = int.__hash__
Truth.__invert__ = lambda self: Truth(not self)


def kept(value: object) -> object:
    """The value that an assignment in a kernel stores: integers become scalars, other values are
    unchanged."""
    kind = type(value)
    if kind not in _NOT_KEPT:
        return value
    value = plain(value)
    if type(value) is bool:
        return Truth(value)
    return Scalar(value) if type(value) is int else value


_NOT_KEPT = frozenset((int, bool, tl.constexpr))


class ScalarTransformer(triton_interpreter.ASTTransformer):
    """Triton's rewriting of kernels, but assigned integers become a :class:`Scalar` and not an
    array."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:  # noqa: N802 - ast's name
        self.generic_visit(node)
        call = ast.Call(func=ast.Name(id=KEPT, ctx=ast.Load()), args=[node.value], keywords=[])
        node.value = ast.copy_location(call, node.value)
        return node


KEPT = "_tileweave_kept"
