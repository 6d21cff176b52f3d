"""Blocks of a kernel as numpy arrays instead of the tensors of Triton's interpreter: the same
kernels run several times faster.

Triton's interpreter checks types and shapes of every operation as its compiler does, which takes
30 us each. Tests elsewhere check that (``tests/cpu``, ``tests/compile``); exploration needs only
the values. This file has the most frequent operations. All others are converted, done by Triton's
interpreter (``long_way``), and converted back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from tileweave.explore.scalars import Scalar, Truth, plain

_NUMPY = {
    tl.int1: np.bool_,
    tl.int8: np.int8,
    tl.int16: np.int16,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint8: np.uint8,
    tl.uint16: np.uint16,
    tl.uint32: np.uint32,
    tl.uint64: np.uint64,
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
_ARRAYS = (np.ndarray, np.generic)
_POINTER = tl.pointer_type
_CONSTEXPR = tl.constexpr
_INT64 = np.dtype(np.int64)
_TRITON = {np.dtype(value): key for key, value in _NUMPY.items()}


class Block:
    """``data`` is an array or a numpy scalar, which is never changed. Pointers are int64 addresses.
    ``special``: Triton's type where the array has another one, as of pointers."""

    __slots__ = ("data", "special")

    def __init__(self, data: Any, special: tl.dtype | None = None) -> None:
        self.data = data
        self.special = special

    @property
    def dtype(self) -> tl.dtype:
        return _TRITON[self.data.dtype] if self.special is None else self.special

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def handle(self) -> Block:  # read by interpreted device functions
        return self

    def __getitem__(self, where: Any) -> Block:
        where = (
            tuple(None if plain(w) is None else w for w in where)
            if isinstance(where, tuple)
            else where
        )
        return type(self)(self.data[where], self.special)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
        dtype = plain(dtype)
        if dtype == self.dtype:
            return self
        if dtype.is_ptr() or self.dtype.is_ptr():
            return Block(self.data.astype(np.int64), dtype)
        if plain(bitcast) and dtype in _NUMPY and self.dtype in _NUMPY:
            return Block(np.asarray(self.data).view(_NUMPY[dtype])[()], dtype)
        if plain(bitcast) or dtype not in _NUMPY or self.dtype not in _NUMPY:
            return from_triton(to_triton(self).to(dtype, bitcast=bitcast))
        return Block(self.data.astype(_NUMPY[dtype]), dtype)

    def trans(self, *axes: Any) -> Block:
        return type(self)(
            self.data.T
            if len(axes) <= 2 and self.data.ndim == 2
            else np.transpose(self.data, axes),
            self.special,
        )

    T = property(trans)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Block:
        return Block(-self.data, self.special)

    def __invert__(self) -> Block:
        return Block(~self.data, self.special)

    def __getattr__(self, name: str) -> Any:
        """Other methods of ``tl.tensor``, by Triton's interpreter."""
        if name.startswith("_") or name == "value" or not hasattr(tl.tensor, name):
            raise AttributeError(name)
        member = getattr(to_triton(self), name)
        return long_way(member) if callable(member) else from_triton(member)


class Coded(Block):
    """A block of bf16 or FP8, which numpy has no type for. ``data`` is the bits. It computes what
    Triton's interpreter computes."""

    __slots__ = ()


def block(data: Any, special: tl.dtype | None) -> Block:
    """A block of what loads and Triton give."""
    return kind_of(special)(data, special)


def kind_of(special: tl.dtype | None) -> type[Block]:
    return Block if special is None or special in _NUMPY or special.is_ptr() else Coded


def to_triton(value: Any) -> Any:
    """A block as a tensor of the interpreter; other values unchanged."""
    if isinstance(value, tuple):
        return tuple(to_triton(v) for v in value)
    if not isinstance(value, Block):
        return _bare(value)
    data = np.asarray(value.data)
    if value.dtype.is_ptr():
        data = data.astype(np.uint64)
    handle = triton_interpreter.TensorHandle(data if data.ndim else data.reshape(1), value.dtype)
    return tl.tensor(
        handle, tl.block_type(value.dtype, list(data.shape)) if data.ndim else value.dtype
    )


def from_triton(value: Any) -> Any:
    """A tensor of the interpreter as a block; other values unchanged."""
    if isinstance(value, (tuple, tl.tuple)):
        return tuple(from_triton(v) for v in value)
    if not isinstance(value, tl.tensor):
        return value
    kind: Any = value.type
    data, dtype = value.handle.data, value.dtype.scalar
    if dtype.is_ptr():
        data = data.astype(np.int64)
    if not kind.is_block():
        data = data.reshape(-1)[0]
    return block(data, special(dtype))


def long_way(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return from_triton(
            function(*map(to_triton, args), **{k: to_triton(v) for k, v in kwargs.items()})
        )

    return call


def _bare(value: Any) -> Any:
    if isinstance(value, Block):
        return value.data
    if isinstance(value, Scalar):
        return bool(value) if isinstance(value, Truth) else int(value)
    return value


def _values(a: Any, b: Any) -> tuple[Any, Any]:
    """Both operands for numpy; large Python integers become int64 if the other is an array."""
    a, b = _bare(plain(a)), _bare(plain(b))
    if type(b) is int and not -(2**31) <= b < 2**31 and isinstance(a, _ARRAYS):
        b = np.int64(b)
    if type(a) is int and not -(2**31) <= a < 2**31 and isinstance(b, _ARRAYS):
        a = np.int64(a)
    return a, b


def _divide_to_zero(a: Any, b: Any) -> Any:
    return np.floor_divide(a - np.fmod(a, b), b)  # of a multiple of b: exact, so nothing is rounded


def special(dtype: Any) -> tl.dtype | None:
    """``dtype`` for a block: None where its array has that type, too."""
    return None if dtype in _NUMPY else dtype


def _other(self: Block, other: Any) -> Any:
    """The second operand of ``self`` for numpy. The most frequent cases first, and without a call
    of a scalar's own methods, which are slow."""
    kind = type(other)
    if kind is _CONSTEXPR:
        other = other.value
        kind = type(other)
    if kind is Scalar or kind is int:
        number = int(other)
        return number if -(2**31) <= number < 2**31 else np.int64(number)
    return _values(self, from_triton(other) if isinstance(other, tl.tensor) else other)[1]


def _binary(
    function: Callable[[Any, Any], Any], swapped: bool = False
) -> Callable[[Block, Any], Block]:
    def method(self: Block, other: Any) -> Block:
        return Block(
            function(self.data, other.data if type(other) is Block else _other(self, other))
        )

    def swapped_method(self: Block, other: Any) -> Block:
        return Block(
            function(other.data if type(other) is Block else _other(self, other), self.data)
        )

    return swapped_method if swapped else method


def _shift_pointer(sign: int, function: Callable[[Any, Any], Any]) -> Callable[[Block, Any], Block]:
    def method(self: Block, other: Any) -> Block:
        mine = self.special
        if type(other) is not Block:
            if type(mine) is not _POINTER:
                return Block(function(self.data, _other(self, other)))
            offset = _other(self, other)
            if type(offset) is int:
                return Block(self.data + sign * _element_bytes(mine) * offset, mine)
        else:
            if type(mine) is not _POINTER:
                if type(other.special) is not _POINTER:
                    return Block(function(self.data, other.data))
                return method(other, self)
            offset = other.data
        if offset.dtype is not _INT64:
            offset = offset.astype(_INT64)
        return Block(self.data + sign * _element_bytes(mine) * offset, mine)

    return method


# by identity, since types compute their size anew each time
_BYTES: dict[int, tuple[tl.dtype, int]] = {}


def _element_bytes(pointer: Any) -> int:
    element = pointer.element_ty
    found = _BYTES.get(id(element))
    if found is None:
        found = _BYTES[id(element)] = (element, element.primitive_bitwidth // 8)
    return found[1]


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "truediv": np.true_divide,
    "floordiv": _divide_to_zero,
    "mod": np.fmod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
for _name, _function in _ARITHMETIC.items():
    setattr(Block, f"__{_name}__", _binary(_function))
    setattr(Block, f"__r{_name}__", _binary(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Block, f"__{_name}__", _binary(getattr(operator, _name)))
for _name, _sign in {"add": 1, "sub": -1}.items():
    setattr(Block, f"__{_name}__", _shift_pointer(_sign, getattr(operator, _name)))
Block.__radd__ = _shift_pointer(1, operator.add)  # type: ignore[attr-defined]
Block.__rsub__ = _binary(operator.sub, swapped=True)  # type: ignore[attr-defined]
Block.__hash__ = None  # type: ignore[assignment]


def _by_triton(name: str) -> Callable[..., Any]:
    return lambda self, *other: long_way(getattr(tl.tensor, name))(self, *other)


# Python asks these before those of blocks, also of a block on the left
for _name in (*_ARITHMETIC, "add", "sub"):
    setattr(Coded, f"__{_name}__", _by_triton(f"__{_name}__"))
    setattr(Coded, f"__r{_name}__", _by_triton(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):
    setattr(Coded, f"__{_name}__", _by_triton(f"__{_name}__"))
Coded.__hash__ = None  # type: ignore[assignment]


# --- Loads and stores ---


def is_one(mask: Any) -> bool | None:
    """Whether a single element is loaded or stored; None where the mask is a block."""
    mask = plain(mask)
    if isinstance(mask, Block):
        return bool(mask.data) if not mask.data.ndim else None
    return mask is None or bool(mask)


def instead(other: Any, special: tl.dtype | None) -> Any:
    """What a load of such elements gives where its mask is off."""
    if other is None:
        return 0
    if isinstance(other, Block) and type(other) is not Coded:
        other = other.data
    elif not isinstance(other, Block):
        other = plain(other)
    if kind_of(special) is Coded:
        return (other if type(other) is Coded else Block(np.float32(other))).to(special).data
    return other


def places(pointer: Block, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Addresses in the type that the interpreter uses, and their mask."""
    data = pointer.data
    places = data.view(np.uint64) if data.ndim else np.array([data], np.uint64)
    mask = plain(mask)
    if mask is None:
        return places, everywhere(places.shape)
    inside = mask.data if isinstance(mask, Block) else bool(mask)
    if type(inside) is np.ndarray and inside.shape == places.shape and inside.dtype == np.bool_:
        return places, inside
    return places, np.full(places.shape, inside, np.bool_)


@lru_cache(maxsize=512)
def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    """The mask of a load or store without one."""
    return np.ones(shape, np.bool_)


@lru_cache(maxsize=512)
def nothing(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """What loads give outside of their mask, if nothing else is said."""
    return np.zeros(shape, kind)


# --- Functions of Triton's language ---


def _arange(start: Any, end: Any) -> Block:
    first, last = plain(start), plain(end)
    if first >= last:
        raise ValueError(f"tl.arange({first}, {last}) is empty, which Triton refuses")
    return Block(np.arange(first, last, dtype=np.int32))


def _full(shape: Any, value: Any, dtype: Any) -> Any:
    dtype = plain(dtype)
    if dtype not in _NUMPY:
        return from_triton(
            to_triton(Block(np.full(_shape(shape), _values(value, 0)[0], np.float32))).to(dtype)
        )
    return Block(np.full(_shape(shape), _values(value, 0)[0], _NUMPY[dtype]))


def _zeros(shape: Any, dtype: Any) -> Any:
    return _full(shape, 0, dtype)


def _shape(shape: Any) -> tuple[int, ...]:
    shape = plain(shape)
    return (
        tuple(int(plain(s)) for s in shape)
        if isinstance(shape, (tuple, list, tl.tuple))
        else (int(shape),)
    )


def _cast(value: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
    value = plain(value)
    if isinstance(value, (Scalar, Block)):
        return (
            value.to(plain(dtype))
            if isinstance(value, Scalar)
            else value.to(dtype, bitcast=bitcast)
        )
    if isinstance(value, int) and plain(dtype).is_int():
        return Scalar(value)
    return Block(np.asarray(value, _NUMPY[plain(dtype)])[()])


def _where(condition: Any, x: Any, y: Any) -> Any:
    condition = plain(condition)
    if type(condition) is Block and type(x) is Block and type(y) is Block and x.special is None:
        return Block(np.where(condition.data, x.data, y.data), y.special)
    if isinstance(condition, (bool, np.bool_, Truth)):
        chosen = x if condition else y
        if type(x) is Block and type(y) is Block and x.data.shape == y.data.shape:
            return chosen
        blocks = [v for v in (x, y) if isinstance(v, Block)]
        if (
            not blocks
            or blocks[0].dtype.is_ptr()
            or (isinstance(chosen, Block) and all(b.shape == chosen.shape for b in blocks))
        ):
            return chosen
        condition = np.asarray(condition)
    else:
        condition = condition.data
    if type(x) is Coded or type(y) is Coded:
        return long_way(getattr(tl, "where" + LONG))(Block(condition), x, y)
    pointers = [v.dtype for v in (x, y) if isinstance(v, Block) and v.dtype.is_ptr()]
    a, b = _values(x, y)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, (int, float)) and isinstance(other, _ARRAYS):
            kind = (
                other.dtype
                if not (isinstance(one, float) and other.dtype.kind in "iub")
                else np.dtype(np.float32)
            )
            a, b = (np.asarray(one, kind), b) if one is a else (a, np.asarray(one, kind))
    return Block(np.where(condition, a, b), pointers[0] if pointers else None)


def _extreme(
    name: str, function: Callable[[Any, Any], Any], scalar: Callable[[int, int], int]
) -> Callable[..., Any]:
    def word(x: Any, y: Any, propagate_nan: Any = None) -> Any:
        x, y = plain(x), plain(y)
        if type(x) is Coded or type(y) is Coded:
            return long_way(getattr(tl, name + LONG))(x, y)
        if isinstance(x, int) and isinstance(y, int):
            return Scalar(scalar(int(x), int(y)))
        return Block(np.asarray(function(*_values(x, y)))[()])

    return word


def _dot(a: Block, b: Block, acc: Block | None = None, **options: Any) -> Block:
    if type(a) is Coded or type(b) is Coded:
        return long_way(getattr(tl, "dot" + LONG))(a, b, acc, **options)
    product = np.matmul(a.data, b.data, dtype=np.float32)
    return Block(product if acc is None else acc.data + product)


def _broadcast_to(value: Any, *shape: Any) -> Block:
    wanted = _shape(shape[0] if len(shape) == 1 else shape)
    value = value if isinstance(value, Block) else Block(np.asarray(value, np.int32))
    return type(value)(np.broadcast_to(value.data, wanted), value.special)


def _reduction(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def word(value: Any, axis: Any = None, *rest: Any, **named: Any) -> Any:
        if not isinstance(value, Block) or rest or named or value.dtype not in _NUMPY:
            return long_way(getattr(tl, name + LONG))(value, axis, *rest, **named)
        kind = value.data.dtype if value.data.dtype.itemsize >= 4 else None
        found = function(value.data, axis=plain(axis))
        return Block(np.asarray(found, kind)[()])

    return word


LONG = "_the_long_way"
LONG_WORDS = ("sum", "max", "where", "dot", "minimum", "maximum")


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _multiple_of(value: Any, of: Any) -> Any:
    """A promise to the compiler, which is checked: of a pointer it is about bytes."""
    numbers = value.data if isinstance(value, Block) else plain(value)
    least = plain(of)
    if isinstance(least, int) and not (
        isinstance(numbers, tuple) or np.all(np.mod(numbers, least) == 0)
    ):
        raise ValueError(f"tl.multiple_of({numbers}, {least}) is not true")
    return value


WORDS: dict[str, Callable[..., Any]] = {
    "arange": _arange,
    "full": _full,
    "zeros": _zeros,
    "cast": _cast,
    "where": _where,
    "dot": _dot,
    "minimum": _extreme("minimum", np.minimum, min),
    "maximum": _extreme("maximum", np.maximum, max),
    "broadcast_to": _broadcast_to,
    "zeros_like": lambda like: (
        type(like)(np.zeros_like(like.data), like.special) if isinstance(like, Block) else Scalar(0)
    ),
    "multiple_of": _multiple_of,
    "max_contiguous": _same,
    "max_constancy": _same,
    "assume": lambda *_: None,
    "debug_barrier": lambda: None,
    "sum": _reduction("sum", np.sum),
    "max": _reduction("max", np.fmax.reduce),  # drops NaN, as GPUs do
}
