"""Triton's interpreter without what it does over and over: four fifths of its time in our kernels.

It looks through its whole language and patches it anew at every call of every device function, 3 ms
each; it makes the same table of types, the same tuple of a shape, the same name and sizes of a type
at every operation; it seeks what two operands have in common where they are alike; it does sums and
products of integers again in 64 bits, to compare, and then ignores the outcome (``device_assert``
does nothing without ``debug``). Here the language is patched once a launch, from a list; types and
shapes are kept; what is alike is left alone; nothing is compared in vain. What kernels compute, and
every check of it, is Triton's. Memory alone differs: each element is stored once, and where a
load is volatile, loaded once.

Private parts of the interpreter are touched here, in ``operators.py``, which has the operators of
tensors, and in ``explore/interpreter.py``; they are the
same in Triton 3.6 to 3.9, and ``device/triton/signal.py`` leaves other versions as they are.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

from tileweave.device.interpreter.operators import quicker

_ABSENT = object()
_patch_as_triton_does = triton_interpreter._patch_lang
_call_as_triton_does = triton_interpreter.InterpretedFunction.__call__
_numpy_type_as_triton_does = triton_interpreter._get_np_dtype
_unwrapped_as_triton_does = tl.core._unwrap_if_constexpr
_convert_as_triton_does = triton_interpreter._convert_float
_block_type_as_triton_does = tl.block_type.__init__
_with_element_type_as_triton_does = tl.block_type.with_element_ty
_store_as_triton_does = triton_interpreter.InterpreterBuilder.create_masked_store
_load_as_triton_does = triton_interpreter.InterpreterBuilder.create_masked_load
_expand_dims_as_triton_does = triton_interpreter.InterpreterBuilder.create_expand_dims
TensorHandle = triton_interpreter.TensorHandle
_types_equal_as_triton_does = tl.dtype.__eq__
_broadcast_as_triton_does = TritonSemantic.broadcast_impl_value
_operands_as_triton_does = TritonSemantic.binary_op_type_checking_impl


class _Writing(triton_interpreter._LangPatchScope):
    """Writes down what is patched, while it is patched: (where, name, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches: list[tuple[Any, str, object]] = []

    def set_attr(self, obj: object, name: str, value: object) -> None:
        self.patches.append((obj, name, value))
        super().set_attr(obj, name, value)


def _patches_of_triton() -> list[tuple[Any, str, object]]:
    """For a function that sees all of the language, as our kernels and Triton's own standard
    library do."""

    def sees_both() -> None: ...

    writing = _Writing()
    usual, triton_interpreter._LangPatchScope = triton_interpreter._LangPatchScope, lambda: writing
    try:
        _patch_as_triton_does(FunctionType(sees_both.__code__, {"tl": tl, "core": tl.core}))
    finally:
        triton_interpreter._LangPatchScope = usual
        writing.restore()
    # Triton 3.6 takes int() of an array of one element here, which NumPy allows up to 2.3 only
    # where it has dimensions
    return [(where, name, _quick(where, name, value)) for where, name, value in writing.patches]


def _quick(where: Any, name: str, patch: Any) -> object:
    if name == "__index__":
        return _index
    return quicker(name, _direct(patch)) if where is tl.tensor else _direct(patch)


def _index(self: Any) -> int:
    return int(self.handle.data.item())


_GUARD = tl.core.builtin(lambda _semantic: None).__code__


def _direct(patch: Any) -> object:
    """A function of the language without the two functions around it: one notes where it runs, the
    other checks that this was done."""
    member = (getattr(patch, "__kwdefaults__", None) or {}).get("member")
    if getattr(member, "__code__", None) is not _GUARD:
        return patch
    word = member.__wrapped__

    def run(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = triton_interpreter.interpreter_semantic
        return word(*args, **kwargs)

    return run


class Language:
    """Triton's language in this process: patched while a kernel runs, from whichever
    thread."""

    def __init__(self) -> None:
        self._patches: list[tuple[Any, str, object]] = []
        self._before: list[tuple[Any, str, object]] = []
        self._users = 0
        self._lock = threading.Lock()

    def patch(self) -> Language:
        """Stands for Triton's ``_patch_lang``; as many ``restore`` as there were ``patch`` end
        it."""
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
_NUMPY_TYPES: dict[
    int, tuple[object, object]
] = {}  # by identity: hashing one of Triton's types is slow


def _numpy_type(dtype: Any) -> object:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    found = _NUMPY_TYPES.get(id(scalar))
    if found is None:
        found = (scalar, _numpy_type_as_triton_does(scalar))
        if (
            len(_NUMPY_TYPES) < 1000
        ):  # pointer types are made anew; none is forgotten, so no identity comes back
            _NUMPY_TYPES[id(scalar)] = found
    return found[1]


@lru_cache(maxsize=4096)
def _shape(*sizes: int) -> tuple[object, object]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _tensor(self: Any, handle: object, type: Any) -> None:
    """``tl.tensor.__init__``, with the tuple of a shape made once."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(*(type.shape.values if type.is_block() else ()))


@lru_cache(maxsize=4096, typed=True)
def _block(element: str, *sizes: object) -> dict[str, object]:
    """What Triton's block types of these sizes, of elements of this name, have but the type of
    their elements."""
    made = object.__new__(tl.block_type)
    _block_type_as_triton_does(made, element, list(sizes))  # raises where it does
    return {name: value for name, value in vars(made).items() if name != "element_ty"}


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``tl.block_type.__init__``, with sizes looked at, and the name written, once."""
    self.element_ty = element_ty
    sizes = shape.values if isinstance(shape, tl.tuple) else shape
    try:
        known = _block(element_ty.name, *sizes) if isinstance(sizes, list) else None
    except TypeError:  # no sizes: Triton says so
        known = None
    if known is None:
        _block_type_as_triton_does(self, element_ty, shape)
    else:
        vars(self).update(known)


_PLAIN = frozenset((tl.tensor, tl.dtype, int, bool, float, str, type(None)))


def _unwrapped(value: Any) -> Any:
    """``_unwrap_if_constexpr``, which asks four questions of everything."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrapped_as_triton_does(value)


def _types_equal(self: object, other: object) -> bool:
    """``tl.dtype.__eq__``: nearly always asked of a type and itself."""
    return self is other or _types_equal_as_triton_does(self, other)


def _with_element_type(self: Any, scalar_ty: Any) -> object:
    """``tl.block_type.with_element_ty``, with nothing looked at again."""
    if type(self) is not tl.block_type or not isinstance(scalar_ty, tl.dtype):
        return _with_element_type_as_triton_does(self, scalar_ty)
    made = object.__new__(tl.block_type)
    vars(made).update(_block(scalar_ty.name, *self.shape.values))
    made.element_ty = scalar_ty
    return made


def _to_ir(self: Any, builder: Any) -> object:
    """``tl.block_type.to_ir``: in the interpreter most types are their own."""
    element = self.element_ty.to_ir(builder)
    return self if element is self.element_ty else builder.get_block_ty(element, self.shape)


def _expand_dims(self: Any, arg: Any, axis: int) -> object:
    """``InterpreterBuilder.create_expand_dims``, by the reshape that ``np.expand_dims`` ends in."""
    sizes = arg.data.shape
    if not 0 <= axis <= len(sizes):
        return _expand_dims_as_triton_does(self, arg, axis)
    return TensorHandle(arg.data.reshape(*sizes[:axis], 1, *sizes[axis:]), arg.dtype.scalar)


def _splat(value: Any, like: Any) -> object:
    """A scalar in each element of a block."""
    handle = value.handle
    data = np.empty(like.shape.values, _numpy_type(handle.dtype))
    data[...] = handle.data
    return tl.tensor(
        TensorHandle(data, handle.dtype.scalar), like.with_element_ty(value.type.scalar)
    )


def _stretched(block: Any, sizes: list[int]) -> object:
    """A block with its sizes of 1 made larger."""
    handle = block.handle
    if list(block.type.shape.values) == sizes:
        return block
    data = np.broadcast_to(handle.data, sizes)
    return tl.tensor(
        TensorHandle(data, handle.dtype.scalar), tl.block_type(block.type.scalar, sizes)
    )


def _broadcast(self: Any, lhs: Any, rhs: Any) -> object:
    """``TritonSemantic.broadcast_impl_value``: two of one shape are as they should be, a scalar is
    spread over a block."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block():
        mine, theirs = left.shape.values, right.shape.values
        if mine == theirs:
            return lhs, rhs
        if len(mine) == len(theirs) and all(
            a == b or a == 1 or b == 1 for a, b in zip(mine, theirs, strict=True)
        ):
            sizes = [b if a == 1 else a for a, b in zip(mine, theirs, strict=True)]
            return _stretched(lhs, sizes), _stretched(rhs, sizes)
    elif left.is_block():
        return lhs, _splat(rhs, left)
    elif right.is_block():
        return _splat(lhs, right), rhs
    else:
        return lhs, rhs
    return _broadcast_as_triton_does(self, lhs, rhs)


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> object:
    """``TritonSemantic.binary_op_type_checking_impl``: tensors of one type, not pointers, need no
    cast (but to divide)."""
    if (
        type(lhs) is type(rhs) is tl.tensor
        and lhs.dtype is rhs.dtype
        and not div_or_mod
        and not lhs.dtype.is_ptr()
    ):
        return self.broadcast_impl_value(lhs, rhs)
    return _operands_as_triton_does(
        self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    )


@lru_cache(maxsize=16)
def _values_of_bytes(source: Any, target: Any) -> Any:
    """What Triton converts each byte to."""
    return _convert_as_triton_does(np.arange(256, dtype=np.uint8), source, target, None)


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """``_convert_float``: 8 bits have 256 values (fp64 is left to Triton); fp32 and bf16 differ in
    16 bits of the mantissa, but Triton has its own way with subnormals."""
    widths = source.primitive_bitwidth, target.primitive_bitwidth
    if widths in ((8, 16), (8, 32)) and values.dtype.itemsize == 1 and rounding_mode is None:
        return _values_of_bytes(source, target)[values.view(np.uint8)]
    widens = source is tl.bfloat16 and target is tl.float32
    if rounding_mode is None and (widens or (source is tl.float32 and target is tl.bfloat16)):
        bits = values.view(np.uint16 if widens else np.uint32)
        magnitude = bits & (0x7FFF if widens else 0x7FFFFFFF)
        if not ((magnitude != 0) & (magnitude < (0x80 if widens else 0x800000))).any():
            moved = bits.astype(np.uint32) << 16 if widens else (bits >> 16).astype(np.uint16)
            return np.asarray(moved)  # of no dimension it is a number
    return _convert_as_triton_does(values, source, target, rounding_mode)


def _call(self: Any, *args: object, **kwargs: object) -> object:
    """``InterpretedFunction.__call__``: a kernel, or the host, calls a device function."""
    try:
        return _call_as_triton_does(
            self, *args, **kwargs
        )  # patches the language first, and would leave it so
    finally:
        LANGUAGE.restore()


_COPY_TO_HOST = triton_interpreter.GridExecutor._init_args_hst
_COPY_BACK = triton_interpreter.GridExecutor._restore_args_dev


def _is_on_host(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_on_host, value))
    if isinstance(value, torch.Tensor):  # not a subclass, such as a fake tensor: it has no memory
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"
    return not hasattr(value, "base") and not hasattr(value, "data_ptr")


def _on_host(self: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a launch: those on the host as they are.

    Triton copies each storage, by a function that refers to itself. That cycle keeps the memory of
    a launch until the next garbage collection, also where ``close`` has released it.
    """
    if all(map(_is_on_host, (*args, *kwargs.values()))):
        return list(args), dict(kwargs)
    return _COPY_TO_HOST(self, args, kwargs)


def _copied_back(self: Any, args: Any, on_host: Any, kwargs: Any, kwargs_on_host: Any) -> None:
    """What was not copied by :func:`_on_host` need not be copied back."""
    given, used = (*args, *kwargs.values()), (*on_host, *kwargs_on_host.values())
    if any(before is not after for before, after in zip(given, used, strict=True)):
        _COPY_BACK(self, args, on_host, kwargs, kwargs_on_host)


_LOWEST, _END = 4096, 1 << 47  # between which a process has its memory
_WHOLE = (ctypes.c_char * (_END - _LOWEST)).from_address(_LOWEST)
# all memory of this process, as elements of so many bytes
_MEMORY = {size: np.frombuffer(_WHOLE, f"u{size}") for size in (1, 2, 4, 8)}


def _elements(places: Any, itemsize: int) -> tuple[Any, Any] | None:
    """All memory and the elements of it at these addresses; None where NumPy cannot have them."""
    memory = _MEMORY.get(itemsize)
    if memory is None or places.dtype != np.uint64:
        return None
    bits = int(np.bitwise_or.reduce(places, axis=None))
    if bits % itemsize or bits >= _END:
        return None
    return memory, (places - _LOWEST) // itemsize


def _store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> None:
    """``InterpreterBuilder.create_masked_store``, with each element stored once.

    Triton calls C's ``memcpy`` for each, which stores 2, 4 or 8 bytes twice. A kernel of another
    rank may take the element, and clear its place for the next one, between the two.
    """
    places, data, inside = ptrs.data, value.data, mask.data
    if data.shape != places.shape:
        return _store_as_triton_does(self, ptrs, value, mask, *rest)
    if not inside.all():
        places, data = places[inside], data[inside]
        if not places.size:
            return None
    found = _elements(places, data.itemsize)
    if found is None:
        return _store_as_triton_does(self, ptrs, value, mask, *rest)
    memory, which = found
    memory[which] = data.view(memory.dtype)
    return None


def _load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> object:
    """``InterpreterBuilder.create_masked_load``, with each element of a volatile load loaded once.

    Triton calls C's ``memcpy`` for each, which loads 2 bytes as one byte and then as both. A kernel
    of another rank may store the element between the two: then half of it is seen.
    """
    places, inside, is_volatile = ptrs.data, mask.data, rest[-1]
    if not is_volatile or not inside.any():
        return _load_as_triton_does(self, ptrs, mask, other, *rest)
    element = ptrs.get_element_ty()
    dtype = np.dtype(_numpy_type(element))
    found = _elements(places[inside], dtype.itemsize)
    if found is None:
        return _load_as_triton_does(self, ptrs, mask, other, *rest)
    memory, which = found
    data = np.zeros(places.shape, dtype) if other is None else np.array(other.data, dtype)
    data[inside] = memory[which].view(dtype)
    return TensorHandle(data, element)


def _bf16(self: Any, value: float) -> Any:
    """A number in bfloat16."""
    return self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)


def patch_once() -> None:
    """Take this process's interpreter over, for good."""
    triton_interpreter._patch_lang = lambda fn: LANGUAGE.patch()
    triton_interpreter.InterpretedFunction.__call__ = _call
    triton_interpreter.GridExecutor._init_args_hst = _on_host
    triton_interpreter.GridExecutor._restore_args_dev = _copied_back
    triton_interpreter._get_np_dtype = _numpy_type
    tl.tensor.__init__ = _tensor
    tl.block_type.__init__ = _block_type
    tl.block_type.with_element_ty = _with_element_type
    tl.block_type.to_ir = _to_ir
    tl.core._unwrap_if_constexpr = _unwrapped
    triton_interpreter.InterpreterBuilder.create_expand_dims = _expand_dims
    triton_interpreter.InterpreterBuilder.create_masked_store = _store
    triton_interpreter.InterpreterBuilder.create_masked_load = _load
    if not hasattr(triton_interpreter.InterpreterBuilder, "get_bf16"):  # Triton 3.6
        triton_interpreter.InterpreterBuilder.get_bf16 = _bf16
    tl.dtype.__eq__ = _types_equal
    triton_interpreter._convert_float = _convert
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _operands
    builder = triton_interpreter.interpreter_builder
    if (
        not builder.options.debug
    ):  # each sum is done again in 64 bits and compared, and the outcome is not used
        builder.options = replace(builder.options, sanitize_overflow=False)
