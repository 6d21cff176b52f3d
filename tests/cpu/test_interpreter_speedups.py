"""The faster Triton interpreter (``device/interpreter/speedups.py``) behaves like Triton's own."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from mmap import mmap
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.support.worlds import ROOT, environment_for


@triton.jit
def weighted(values, weight):
    return tl.sum(values * weight, axis=0) + tl.max(values, axis=0)


@triton.jit
def kernel(x, out, n, SIZE: tl.constexpr):
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(
        x + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=rows[:, None] < n, other=1.0
    )
    narrow = values.to(tl.bfloat16).to(tl.float32)
    tl.store(
        out + rows,
        weighted(tl.dot(narrow, values.trans()), 2.0) + narrow.shape[0] * n,
        mask=rows < n,
    )


@triton.jit
def faulty(x, n):
    tl.store(x + tl.arange(0, 8), tl.arange(0, 4) + n)


@triton.jit
def turns(out, n):
    for turn in range(n):
        tl.store(out + turn, turn + 1)


def said(value: object) -> str:
    """All there is to know about ``value``: the type and the elements of a tensor, the attributes
    of a type."""
    if isinstance(value, tl.tensor):
        data = value.handle.data
        return (
            f"{value.type} of {value.handle.dtype}, shape {value.shape}, {value.numel}: "
            f"{data.dtype} {data.tolist()}"
        )
    if isinstance(value, tl.block_type):
        members = sorted(vars(value).items())
        return f"{ {name: (type(member), str(member)) for name, member in members} }"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} {[said(part) for part in value]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return f"{type(value).__name__} {value}"


def tell(function: Callable[..., object], *args: object) -> str:
    try:
        return said(function(*args))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


ELEMENTS = (
    tl.int1,
    tl.int8,
    tl.uint8,
    tl.int32,
    tl.uint32,
    tl.int64,
    tl.float8e5,
    tl.float16,
    tl.bfloat16,
    tl.float32,
    tl.float64,
)
POINTERS = (
    tl.pointer_type(tl.float32),
    tl.pointer_type(tl.float32),
    tl.pointer_type(tl.int8),
    tl.pointer_type(tl.float32, const=True),
)
SHAPES = ([], [1], [4], [1, 4], [2, 1], [2, 4], [4, 4], [1, 1, 4])


def about_types() -> list[str]:
    """Valid sizes, and invalid ones that equal valid ones."""
    four, two = tl.constexpr(4), tl.constexpr(2)
    right = [
        [4],
        [1, 4],
        [4, 1],
        [four, 2],
        [4, two],
        tl.tuple([4, 2]),
        tl.tuple([four, two]),
        [True, 4],
    ]
    wrong = [
        [4.0],
        [tl.constexpr(4.0)],
        [np.int64(4)],
        [3],
        [0],
        [-4],
        [1 << 21],
        [1 << 11] * 2,
        [[4]],
        ["4"],
        [None],
        [None, 4],
    ]
    odd = [[], (4,), (), None, 4, "44", {4}, tl.tuple([])]
    found = [
        tell(tl.block_type, e, shape)
        for _ in range(2)
        for e in ELEMENTS + POINTERS
        for shape in right + wrong + odd
    ]
    blocks = [tl.block_type(e, [4]) for e in (tl.int32, tl.int32, tl.float32)] + [
        tl.block_type(tl.int32, [2, 2])
    ]
    everything = [
        *ELEMENTS,
        *POINTERS,
        *blocks,
        tl.void,
        tl.constexpr(tl.int32),
        tl.dtype("int32"),
        4,
        None,
        "int32",
    ]
    found += [
        tell(lambda a, b: (a == b, a != b), a, b)
        for a, b in itertools.product(everything, everything)
    ]
    return found + [tell(block.with_element_ty, e) for block in blocks for e in ELEMENTS]


def tensor_of(element: tl.dtype, shape: list[int]) -> tl.tensor:
    from triton.runtime import interpreter

    data = (
        np.arange(1, 1 + int(np.prod(shape)))
        .reshape(shape or [1])
        .astype(interpreter._get_np_dtype(element))
    )
    return tl.tensor(
        interpreter.TensorHandle(data, element), tl.block_type(element, shape) if shape else element
    )


def about_operands() -> list[str]:
    """Operands of each pair of types and of shapes, and numbers, for each kind of operation."""
    from triton.runtime.interpreter import interpreter_semantic as semantic

    def together(a: object, b: object, *flags: bool) -> object:
        left, right = semantic.binary_op_type_checking_impl(a, b, *flags)
        return left, right, left is a, right is b

    kinds = [
        (),
        (True, True),
        (True, False),
        (False, False, True, True),
        (False, False, False, True),
        (True, True, False),
    ]
    each = [tensor_of(element, [4]) for element in ELEMENTS + POINTERS] + [
        tensor_of(tl.int32, []),
        3,
        -3,
        1 << 40,
        2.5,
        True,
        None,
    ]
    found = [
        tell(together, a, b, *kind) for a, b in itertools.product(each, each) for kind in kinds
    ]
    shaped = [
        tensor_of(element, shape)
        for element in (tl.int32, tl.float32, POINTERS[0])
        for shape in SHAPES
    ]
    found += [tell(together, a, b, True, True) for a, b in itertools.product(shaped, shaped)]
    found += [
        tell(semantic.broadcast_impl_value, a, b)
        for a, b in itertools.product(shaped, [*shaped, None])
    ]
    same = tensor_of(tl.int32, [4])
    named = [
        {"div_or_mod": True},
        {"arithmetic_check": False},
        {"allow_lhs_ptr": True, "allow_rhs_ptr": True},
    ]
    for a, options in itertools.product(each, named):
        found.append(tell(partial(semantic.binary_op_type_checking_impl, a, same, **options)))
    return found


def about_conversions() -> list[str]:
    """All values of bf16 and many of fp32, each exponent by itself and with others."""
    from triton.runtime import interpreter

    half = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128)
    mantissas = np.r_[
        0,
        1,
        0x7FFFFF,
        0x400000,
        0x8000,
        0x7FFF,
        0x10000,
        np.random.default_rng(2).integers(0, 1 << 23, 57),
    ]
    single = ((np.arange(512, dtype=np.uint32) << 23)[:, None] | mantissas.astype(np.uint32)).view(
        np.float32
    )
    found = []
    for mode in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        for values, source, target in (
            (half, tl.bfloat16, tl.float32),
            (single, tl.float32, tl.bfloat16),
        ):
            parts = [
                *values,
                values,
                values[1:255].T,
                values[2:9, ::3],
                values[:0],
                values[300, 5:6].reshape(()),
                values[3:4, :1],
            ]
            found += [
                tell(interpreter._convert_float, part, source, target, mode) for part in parts
            ]
            found.append(tell(interpreter._convert_float, values, source, tl.float16, mode))
    return found


def about_words() -> list[str]:
    """Functions of the language with valid and invalid arguments, as functions and as methods; what
    is unwrapped."""
    from triton.runtime import interpreter

    one, four = tl.constexpr(1), tensor_of(tl.int32, [4])
    values = [
        1,
        True,
        1.5,
        None,
        "x",
        one,
        tl.constexpr(one),
        [one, [one]],
        (one, 2),
        tl.tuple([one, four]),
        np.int64(3),
        tl.int32,
        four,
    ]
    found = [tell(tl.core._unwrap_if_constexpr, value) for value in values]
    scope = interpreter._patch_lang(weighted.fn)
    try:
        calls = [
            lambda: tl.arange(0, 4),
            lambda: tl.arange(0, 3),
            lambda: tl.arange(),
            lambda: tl.arange(0, 4, nonsense=1),
            lambda: tl.zeros([4], tl.int32),
            lambda: tl.full([4], 2.5, tl.float32, _semantic=None),
            lambda: 3 - four,
            lambda: four.to(tl.float32),
            lambda: four.to(tl.float32, _semantic=None),
            lambda: four.to(),
            lambda: four[None, :],
            lambda: four / four,
            lambda: four // 2,
            lambda: four % four,
            lambda: four * 2.5,
            lambda: four < four,
            lambda: -four,
            lambda: tl.where(four > 2, four, 0),
            lambda: tl.load(four),
            lambda: four + "x",
            lambda: tl.sum(four, axis=0),
            lambda: four.reshape([2, 2]).trans(),
            lambda: tl.maximum(four, 2),
            lambda: four & one,
            lambda: four[0],
        ]
        return found + [tell(call) for call in calls]
    finally:
        scope.restore()


def about_operators() -> list[str]:
    """Each operator with operands of each two types and shapes, with numbers, and with what it made
    itself."""
    from triton.runtime import interpreter

    operators = [
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
        *(operator.and_, operator.or_, operator.xor, operator.truediv),
        *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    ]
    numbers = [0, 3, -3, 1 << 31, 1 << 40, 1 << 63, 2.5, -0.0, 1e300, True, None, tl.constexpr(5)]
    scope = interpreter._patch_lang(weighted.fn)
    try:
        typed = [tensor_of(element, [4]) for element in ELEMENTS + POINTERS]
        shaped = [
            tensor_of(element, shape)
            for element in (tl.int32, tl.int64, tl.float32, POINTERS[0])
            for shape in SHAPES
        ]
        made = [shaped[3] < 3, (shaped[2] < 3) & (shaped[2] > 0), typed[3][None, :] < 2]
        few = [shaped[0], shaped[2], typed[1]]
        pairs = [
            *itertools.product(typed, typed + numbers),
            *itertools.product(numbers, typed),
            *itertools.product(shaped, shaped),
            *itertools.product(made, made + few + numbers),
            *itertools.product(few, made),
        ]
        places = [
            *((slice(None), None), (None, slice(None)), (None, slice(None), None), (None,), None),
            *((None, None, None, None), (0,), (slice(1, 2), None), [None], (tl.constexpr(None),)),
        ]
        found = [tell(lambda a, w: a[w], a, where) for a in shaped + made for where in places]
        with np.errstate(all="ignore"):
            return found + [tell(one, a, b) for a, b in pairs for one in operators]
    finally:
        scope.restore()


def about_stores() -> list[str]:
    """What memory holds after stores of each size of element, in any order, of which a mask takes
    some; elements that are not aligned, and values of another shape."""
    from types import SimpleNamespace

    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    store = builder.create_masked_store
    hints = [None] * (len(signature(builder.create_store).parameters) - 2)  # more in Triton 3.6
    drawn, found = np.random.default_rng(2), []
    for kind, shape, shift in itertools.product(
        (np.uint8, np.uint16, np.float32, np.int64, bool), ((1,), (7,), (5, 3), (2, 3, 4)), (0, 1)
    ):
        count, size = int(np.prod(shape)), np.dtype(kind).itemsize
        order = drawn.permutation(2 * count)[:count].reshape(shape)
        value = drawn.integers(0, 200, shape).astype(kind)
        for share in (0.0, 0.5, 1.0):
            memory = np.zeros(2 * count * size + shift, np.uint8)
            places = (memory.ctypes.data + shift + order * size).astype(np.uint64)
            parts = places, value, drawn.random(shape) < share
            store(*(SimpleNamespace(data=part) for part in parts), *hints)
            found.append(said(memory))
    scalar = np.array([memory.ctypes.data], np.uint64), np.ones((), np.uint8), np.ones(1, bool)
    store(*(SimpleNamespace(data=part) for part in scalar), *hints)
    return [*found, said(memory)]


def about_loads() -> list[str]:
    """What loads of each type return, volatile or not, of which a mask takes some, with a value for
    the others or without; of elements that are not aligned, too."""
    load, pointers, drawn, found = _load(), tl.pointer_type, np.random.default_rng(3), []
    for element, shape, shift in itertools.product(
        (tl.int1, tl.int8, tl.bfloat16, tl.float32, tl.int64), ((1,), (7,), (5, 3)), (0, 1)
    ):
        count, size = int(np.prod(shape)), max(8, element.primitive_bitwidth) // 8
        memory = drawn.integers(0, 2, 2 * count * size + shift).astype(np.uint8)
        order = drawn.permutation(2 * count)[:count].reshape(shape)
        places = (memory.ctypes.data + shift + order * size).astype(np.uint64)
        for share, given, volatile in itertools.product(
            (0.0, 0.5, 1.0), (False, True), (False, True)
        ):
            mask = drawn.random(shape) < share
            other = load(np.flip(places), pointers(element), mask | True) if given else None
            found.append(said(load(places, pointers(element), mask, other, volatile).data))
    return found


def _load() -> Callable[..., Any]:
    """The interpreter's load of addresses, called with (places, type, mask, other, volatile)."""
    from triton.runtime import interpreter

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    hints = [None] * (len(signature(builder.create_load).parameters) - 2)  # more in Triton 3.6

    def load(places: Any, kind: Any, mask: Any, other: Any = None, volatile: bool = False) -> Any:
        return builder.create_masked_load(
            handle(places, kind), handle(mask, tl.int1), other, *hints, volatile
        )

    return load


def torn_elements() -> int:
    """How many of a million volatile loads return half of an element that another process stores
    meanwhile."""
    shared, value = np.frombuffer(mmap(-1, 64), np.uint16), 0x419F
    places = np.tile(shared.ctypes.data + 2 * np.arange(32, dtype=np.uint64), 32)
    load, mask, torn = _load(), np.ones(1024, bool), 0
    reader, writer = os.getpid(), os.fork()
    if writer == 0:
        while os.getppid() == reader:
            shared[:] = value
            shared[:] = 0
        os._exit(0)
    try:
        for _ in range(1000):
            found = load(places, tl.pointer_type(tl.bfloat16), mask, volatile=True).data
            torn += int(((found != 0) & (found != value)).sum())
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    return torn


TOPICS = (
    about_types,
    about_operands,
    about_conversions,
    about_words,
    about_operators,
    about_stores,
    about_loads,
)


def run(patched: bool) -> dict[str, object]:
    """In its own process: what a kernel computes, what is left of the language, and how often
    Triton patched it."""
    from triton.runtime import interpreter

    patches = 0
    patch = interpreter._patch_lang

    def counting(fn: object) -> object:
        nonlocal patches
        patches += 1
        return patch(fn)

    interpreter._patch_lang = counting
    if patched:
        from tileweave.device.interpreter import speedups as module

        module.patch_once()
    places = (tl, tl.core, tl.math, tl.tensor)
    before = [(place, name, member) for place in places for name, member in vars(place).items()]
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((37, 16)).astype(np.float32))
    out = torch.zeros(37)
    for _ in range(2):
        kernel[(3,)](x, out, 37, SIZE=16)
    counted = torch.zeros(4, dtype=torch.int32)
    if patched:  # Triton 3.6 alone cannot convert what NumPy 2.4 holds to a number
        turns[(1,)](counted, 3)
    told = ""
    try:
        faulty[(1,)](out, 3)
    except interpreter.InterpreterError as error:
        told = str(error)
    changed = [name for place, name, member in before if vars(place)[name] is not member]
    answers = {topic.__name__: topic() for topic in TOPICS}
    return {
        "out": out.tolist(),
        "counted": counted.tolist(),
        "told": told,
        "patches": patches,
        "changed": changed,
        "torn": torn_elements(),
        **answers,
    }


@pytest.fixture(scope="module")
def both() -> list[dict]:
    found = []
    for patched in (True, False):
        code = (
            "import json; from tests.cpu.test_interpreter_speedups import run; "
            f"print(json.dumps(run({patched})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment_for("gloo", {}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found.append(json.loads(done.stdout))
    return found


def test_speedups_compute_the_same(both: list[dict]) -> None:
    ours, tritons = both
    assert ours["out"] == tritons["out"] and any(ours["out"])


def test_loop_bounds_from_kernel_arguments(both: list[dict]) -> None:
    """Triton 3.6 with NumPy 2.4 cannot convert an array of one element to a number, and needs
    :func:`patched._index` for it."""
    assert both[0]["counted"] == [1, 2, 3, 0]


def test_speedups_raise_the_same_errors(both: list[dict]) -> None:
    ours, tritons = both
    assert ours["told"] == tritons["told"] != ""


def test_speedups_leave_the_language_unchanged(both: list[dict]) -> None:
    """Triton scans the language at each call; here that happens once."""
    ours, tritons = both
    assert not ours["changed"]
    assert ours["patches"] == 1 < 3 * 2 * 2 < tritons["patches"]


def test_loads_do_not_tear_elements(both: list[dict]) -> None:
    """Triton's own do, with some C libraries."""
    assert both[0]["torn"] == 0


@pytest.mark.parametrize("topic", [topic.__name__ for topic in TOPICS])
def test_each_speedup_matches_triton(both: list[dict], topic: str) -> None:
    ours, tritons = both
    assert len(ours[topic]) == len(tritons[topic]) > 10
    for number, (mine, own) in enumerate(zip(ours[topic], tritons[topic], strict=True)):
        if "no attribute 'get_bf16'" not in own:  # Triton 3.6 cannot make numbers in bf16
            assert mine == own, f"{topic}, {number}"
    failed = sum("Error: " in own for own in tritons[topic])
    assert topic in ("about_conversions", "about_stores", "about_loads") or 0 < failed < len(
        tritons[topic]
    ), "of each kind"
