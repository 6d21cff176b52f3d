"""Operators of the interpreter's tensors on what kernels use them for: two operands of one type, or
a tensor and a number, and an offset of a pointer.

An operator of Triton's interpreter asks what each operand is, converts it, spreads it and makes
four objects, 15 us for two integers; most of an interpreted kernel is index arithmetic. Here the
usual cases go straight to NumPy, in 2 us, and give what Triton would give. All others are left to
Triton: other types, two types, tensors of different rank, errors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Function = Callable[[Any, Any], Any]
_Tensor, _Block, _Pointer, _Constexpr = tl.tensor, tl.block_type, tl.pointer_type, tl.constexpr
_new = object.__new__
# types by identity: Triton compares and hashes them by their names
_INTEGERS: dict[int, tuple[Any, int]] = {
    id(tl.int32): (np.int32, 1 << 31),
    id(tl.int64): (np.int64, 1 << 63),
}
# Triton 3.6 takes numbers outside of these as fp64, and -0.0 as 0.0
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_NUMBERS = frozenset(map(id, (tl.int32, tl.int64, tl.float32)))
_WORDS = frozenset(map(id, (tl.int1, tl.int32, tl.int64)))
_BYTES = {
    id(kind): (kind, max(1, kind.primitive_bitwidth // 8))
    for kind in (tl.int1, tl.int8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
}


@lru_cache(maxsize=4096)
def _integer(value: int, kind: Any) -> np.ndarray:
    """As Triton's interpreter has a scalar. Never changed."""
    made = np.array([value], kind)
    made.flags.writeable = False
    return made


def _handle(data: Any, kind: Any) -> Any:
    made: Any = _new(TensorHandle)
    made.data, made.dtype, made.attr = data, kind, {}
    return made


def _like(tensor: Any, handle: Any) -> Any:
    """A tensor of the type of another one."""
    made: Any = _new(_Tensor)
    made.handle, made.type, made.dtype = handle, tensor.type, tensor.dtype
    made.numel, made.shape = tensor.numel, tensor.shape
    return made


# by identity of the element and by shape: (element, a tensor of that type)
_KNOWN: dict[tuple[int, tuple[int, ...]], tuple[Any, Any]] = {}


def _block(handle: Any, element: Any, shape: tuple[int, ...]) -> Any:
    """A tensor of a block type, which is made once."""
    known = _KNOWN.get((id(element), shape))
    if known is not None:
        return _like(known[1], handle)
    if len(_KNOWN) > 4096:  # each launch has pointer types of its own
        _KNOWN.clear()
    made = _Tensor(handle, _Block(element, list(shape)))
    _KNOWN[id(element), shape] = element, _like(made, None)
    return made


def _made(data: Any, handle: Any, element: Any, like: Any) -> Any:
    """A tensor of ``element``; a block where ``like`` is one."""
    if type(like.type) is not _Block:
        return _Tensor(handle, element)
    if like.dtype is element and like.handle.data.shape == data.shape:
        return _like(like, handle)
    return _block(handle, element, data.shape)


def _shape_of(left: Any, right: Any) -> Any:
    """The operand that has the shape of the result, or would have it if nothing were spread. None
    where Triton is to see to it."""
    if type(left.type) is not _Block:
        return right
    if type(right.type) is _Block and left.handle.data.ndim != right.handle.data.ndim:
        return None
    return left


def _number(value: object, kind: Any) -> Any:
    """A number as an operand of a tensor of this type; None where Triton is to see to it."""
    if type(value) is int:
        known = _INTEGERS.get(id(kind))
        if known is not None and -known[1] <= value < known[1]:
            return _integer(value, known[0])
    elif type(value) is float and kind is tl.float32 and _LEAST <= abs(value) <= _MOST:
        return np.array([value], np.float32)
    return None


def _operator(
    otherwise: Function,
    function: Function,
    kinds: frozenset[int],
    compares: bool = False,
    swapped: bool = False,
) -> Function:
    def run(self: Any, other: Any) -> Any:
        mine = self.dtype
        if id(mine) not in kinds:
            return otherwise(self, other)
        value = other.value if type(other) is _Constexpr else other
        like, own = self, self.handle
        if type(value) is _Tensor:
            if value.dtype is not mine or (like := _shape_of(self, value)) is None:
                return otherwise(self, other)
            right = value.handle.data
        elif (right := _number(value, mine)) is None:
            return otherwise(self, other)
        try:
            data = function(right, own.data) if swapped else function(own.data, right)
        except ValueError:  # shapes that do not fit
            return otherwise(self, other)
        handle = _handle(data, mine if swapped else own.dtype.scalar)
        return _made(data, handle, tl.int1 if compares else mine, like)

    return run


def _addition(otherwise: Function, swapped: bool) -> Function:
    plain = _operator(otherwise, np.add, _NUMBERS, swapped=swapped)

    def run(self: Any, other: Any) -> Any:
        if type(self.dtype) is _Pointer:
            return _moved(self, other) or otherwise(self, other)
        if type(other) is _Tensor and type(other.dtype) is _Pointer:
            return _moved(other, self) or otherwise(self, other)
        return plain(self, other)

    return run


def _moved(pointer: Any, offset: Any) -> Any:
    """Pointers some elements further; None where Triton is to see to it."""
    size = _BYTES.get(id(pointer.dtype.element_ty))
    value = offset.value if type(offset) is _Constexpr else offset
    like = pointer
    if size is None:
        return None
    if type(value) is _Tensor:
        if id(value.dtype) not in _INTEGERS or (like := _shape_of(pointer, value)) is None:
            return None
        by = value.handle.data
    elif (by := _number(value, tl.int32)) is None:
        return None
    try:
        data = pointer.handle.data + size[1] * by.astype(np.uint64)
    except ValueError:  # shapes that do not fit
        return None
    return _made(data, _handle(data, pointer.handle.dtype.scalar), pointer.dtype, like)


_WHOLE_SLICE = slice(None)


def _expansion(otherwise: Function) -> Function:
    """Blocks with further dimensions of size 1: ``[:, None]``."""

    def run(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or type(self.type) is not _Block:
            return otherwise(self, slices)
        sizes = list(self.handle.data.shape)
        for axis, one in enumerate(slices):
            if one is None and axis <= len(sizes):
                sizes.insert(axis, 1)
            elif type(one) is not slice or one != _WHOLE_SLICE:
                return otherwise(self, slices)
        data = self.handle.data.reshape(sizes)
        return _block(_handle(data, self.handle.dtype.scalar), self.dtype, data.shape)

    return run


def _quotient(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


_KINDS: dict[str, tuple[Function, frozenset[int]]] = {
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "floordiv": (_quotient, frozenset(_INTEGERS)),
    "mod": (np.fmod, frozenset(_INTEGERS)),
    "and": (np.bitwise_and, _WORDS),
    "or": (np.bitwise_or, _WORDS),
}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def quicker(name: str, otherwise: Function) -> Function:
    """``otherwise``, or what does the same sooner: a method of ``tl.tensor``."""
    if name == "__getitem__":
        return _expansion(otherwise)
    word = name.strip("_")
    swapped = word.startswith("r") and word[1:] in ("add", *_KINDS)
    word = word[1:] if swapped else word
    if name != f"__{'r' * swapped}{word}__":
        return otherwise
    if word == "add":
        return _addition(otherwise, swapped)
    if word in _COMPARISONS:
        return _operator(otherwise, _COMPARISONS[word], _NUMBERS, compares=True)
    if word in _KINDS:
        return _operator(otherwise, *_KINDS[word], swapped=swapped)
    return otherwise
