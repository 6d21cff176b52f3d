"""Connects a model world to Triton's interpreter: launches become tasks, loads and stores become
scheduling points.

Only this file and ``speedups.py`` and ``operators.py`` of ``device/interpreter`` use private parts
of the interpreter. They are the same in Triton 3.6 and 3.9.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import _normalize_ty

from tileweave.device.interpreter import words as interpreted
from tileweave.device.interpreter.speedups import LANGUAGE
from tileweave.device.triton.signal import INTERPRETED
from tileweave.explore import blocks
from tileweave.explore.blocks import Block, Coded
from tileweave.explore.memory import Cells, Region, Store
from tileweave.explore.ranks import COMPONENTS, World
from tileweave.explore.scalars import KEPT, Scalar, ScalarTransformer, kept
from tileweave.explore.scenarios import SMALLER
from tileweave.explore.tasks import Task
from tileweave.explore.variants import launch_checked
from tileweave.kernels.runtime.launch import Launcher, flat

# kernels that choose between pointers in two ways, one of them for AMD's compiler
POINTERS = ("tileweave.kernels.all_gather.arrivals", "tileweave.kernels.experts.dispatch_triton")
TORN = 3  # every third store to shared memory arrives in two parts, one of them a single element
_BUILDER = triton_interpreter.interpreter_builder
_SEM = triton_interpreter._ir.MEM_SEMANTIC
_NATIVE = triton_interpreter._interpreter
_POINTER = tl.pointer_type
Change = tuple[Any, str, Any]  # (object, name of its attribute, value)
_LEAST, _MOST = np.minimum.reduce, np.maximum.reduce  # the methods of arrays are slower


@contextmanager
def exploring(fast: bool = True) -> Iterator[Callable[[World | None], None]]:
    """Take over the interpreter of this process. Yields a function that sets the world in which
    kernels run.

    Triton's interpreter patches its language at every call of every device function, checks
    integers for overflow, and makes arrays of scalars. Here the language is patched once and the
    rest is left out, so a run takes a small part of the time. ``fast`` False keeps the tensors of
    Triton, for comparison in tests.
    """
    if not bool(INTERPRETED.value):
        raise RuntimeError(
            "asked: exploration; allowed: with TRITON_INTERPRET=1 set before triton is imported; "
            "remedy: set it"
        )
    hooks = Hooks(fast)
    words = _words()
    scope = LANGUAGE.patch()
    of_kernels: list[Change] = [
        *((import_module(module), "is_hip", hooks.is_hip) for module in POINTERS),
        *((import_module(module), name, value) for module, name, value in SMALLER),
    ]
    moved = [
        f"{where.__name__}.{name}" for where, name, _ in of_kernels if not hasattr(where, name)
    ]
    assert not moved, f"kernels have no {', '.join(moved)}, which exploration replaces"
    changes: list[Change] = [
        *_calls(hooks),
        (_BUILDER, "create_masked_load", hooks.masked_load),
        (_BUILDER, "create_masked_store", hooks.masked_store),
        (_BUILDER, "create_atomic_rmw", hooks.atomic_rmw),
        (_BUILDER, "create_atomic_cas", hooks.atomic_cas),
        (_BUILDER, "options", replace(_BUILDER.options, sanitize_overflow=False)),
        (interpreted, "MEMORY", hooks),
        (Launcher, "__call__", lambda self, *given: launch_checked(self, given)),
        *of_kernels,
    ]
    if fast:
        changes += _quick_language(hooks, words)
        changes.append((tl, "atomic_add", hooks.word_add(blocks.long_way(tl.atomic_add))))
    before = [(where, name, vars(where).get(name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    # nearly all that an interleaving makes goes with its last reference
    collected, collect = gc.get_threshold(), gc.set_threshold
    collect(50_000, *collected[1:])
    try:
        with warnings.catch_warnings():
            # NaN and infinities are among what is explored
            warnings.simplefilter("ignore", RuntimeWarning)
            yield hooks.enter
    finally:
        for where, name, value in before:
            if value is None:
                delattr(where, name)
            else:
                setattr(where, name, value)
        scope.restore()
        collect(*collected)


def _calls(hooks: Hooks) -> list[Change]:
    """How the host launches kernels, and how kernels call device functions."""
    function = triton_interpreter.InterpretedFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:
            hooks.launch(self.rewrite(), grid, args, kwargs)

    return [
        (function, "run", run),
        (function, "__call__", _caller()),
        (function, "rewritten_fn", {}),
        (triton_interpreter, KEPT, kept),
    ]


def _quick_language(hooks: Hooks, words: list[tuple[Any, str]]) -> list[Change]:
    """Numbers and arrays of exploration in place of Triton's tensors, for these words of its
    language, which has been patched since they were listed."""
    return [
        (triton_interpreter.FunctionRewriter, "ast_transformer", ScalarTransformer()),
        (interpreted, "_scalar", lambda value, dtype=None: Scalar(value)),
        *((where, name, blocks.long_way(getattr(where, name))) for where, name in words),
        *((tl, name + blocks.LONG, getattr(tl, name)) for name in blocks.LONG_WORDS),
        *((tl, name, word) for name, word in blocks.WORDS.items()),
        (tl, "load", hooks.word_load),
        (tl, "store", hooks.word_store),
        (tl, "program_id", lambda axis: Scalar(_BUILDER.grid_idx[axis])),
        (tl, "num_programs", lambda axis: Scalar(_BUILDER.grid_dim[axis])),
    ]


def _caller() -> Callable[..., Any]:
    """How a kernel calls a device function, which Triton looks up by its source."""
    known: dict[Any, Callable[..., Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = known.get(self)
        if function is None:
            function = known[self] = self.rewrite()
        return function(*args, **kwargs)

    return call


def _words() -> list[tuple[Any, str]]:
    """All functions of Triton's language that a kernel may call."""
    kinds = (triton_interpreter.InterpretedFunction,)
    return [
        (module, name)
        for module in (tl, tl.math)
        for name, member in vars(module).items()
        if tl.core.is_builtin(member) or isinstance(member, kinds)
    ]


@lru_cache(maxsize=256)
def _parameters(fn: Callable[..., object]) -> tuple[inspect.Signature, frozenset[str]]:
    kinds = {name: _normalize_ty(kind) for name, kind in inspect.get_annotations(fn).items()}
    return inspect.signature(fn), frozenset(
        name for name, kind in kinds.items() if kind == "constexpr"
    )


def _bound(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, Any]:
    """The arguments of a launch by name; options of the compiler are left out."""
    signature = _parameters(fn)[0]
    if len(args) == len(signature.parameters):  # most often
        return dict(zip(signature.parameters, args, strict=True))
    bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    bound.apply_defaults()
    return bound.arguments


def _sizes(grid: Any, given: dict[str, Any]) -> tuple[int, int, int]:
    wanted: Any = grid(given) if callable(grid) else grid
    x, y, z = (*wanted, 1, 1)[:3]
    return x, y, z


@lru_cache(maxsize=32)
def _pointer_to(dtype: torch.dtype) -> tl.dtype:
    return triton_interpreter._implicit_cvt(torch.empty(0, dtype=dtype)).dtype


def _plain_argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Block(np.int64(value.data_ptr()), _pointer_to(value.dtype))
    if isinstance(value, tuple):
        return triton_interpreter._tuple_create(value, map(_plain_argument, value))
    if isinstance(value, int | float | None):
        return kept(value)
    return triton_interpreter._implicit_cvt(value)


class Hooks(interpreted.HostMemory):
    """What Triton's interpreter calls instead of its own functions, and the memory of interpreted
    device functions."""

    def __init__(self, fast: bool) -> None:
        self._world: World | None = None
        self._argument = _plain_argument if fast else triton_interpreter._implicit_cvt
        self._native_load = _BUILDER.create_masked_load
        self._native_store = _BUILDER.create_masked_store
        self._native_rmw = _BUILDER.create_atomic_rmw
        self._native_cas = _BUILDER.create_atomic_cas

    def enter(self, world: World | None) -> None:
        self._world = world
        if world is not None:
            world.tasks.on_enter = _set_grid

    @property
    def world(self) -> World:
        assert self._world is not None, "kernels run in a world"
        return self._world

    def is_hip(self) -> bool:
        """Both ways to choose between pointers are explored."""
        return self.world.multiprocessors == 2

    def _me(self) -> Task:
        current = self.world.tasks.current
        assert current is not None, "kernels run in tasks"
        return current

    # --- Launches ---

    def launch(
        self,
        fn: Callable[..., None],
        grid: Any,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        arguments = _bound(fn, args, kwargs)
        names: dict[int, str] = {}
        tensors = [
            (name.split(".")[-1], value)
            for name, value in flat(arguments).items()
            if isinstance(value, torch.Tensor)
        ]
        for name, value in tensors:
            names[id(value)] = f"{names[id(value)]}={name}" if id(value) in names else name
        for _, value in tensors:
            self.world.know(self.world.rank.rank, names[id(value)], value)
        given = self.given(fn, arguments)
        sizes = _sizes(grid, given)
        self.world.tasks.note("launches", detail=f"{fn.__name__} {sizes}")
        self.world.launch(sizes, lambda: fn(**given))

    def given(self, fn: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
        """What a kernel sees of these arguments."""
        constexprs = _parameters(fn)[1]
        return {
            name: value if name in constexprs else self._argument(value)
            for name, value in arguments.items()
        }

    # --- Blocks: what the interpreter does for tl.load, tl.store and atomics ---

    def word_load(
        self,
        pointer: Any,
        mask: Any = None,
        other: Any = None,
        boundary_check: Any = (),
        padding_option: Any = "",
        cache_modifier: Any = "",
        eviction_policy: Any = "",
        volatile: Any = False,
    ) -> Any:
        """``tl.load`` of blocks."""
        kind, size, special, made = _kind(pointer.special.element_ty)
        # most often
        if not pointer.data.ndim and size and (one := blocks.is_one(mask)) is not None:
            if not one:
                return made(np.full(1, blocks.instead(other, special), kind)[0], special)
            address = int(pointer.data)
            self._read_one(address, size, bool(blocks.plain(volatile)))
            return made(np.frombuffer(ctypes.string_at(address, size), kind)[0], special)
        places, inside = blocks.places(pointer, mask)
        whole = mask is None or np.count_nonzero(inside) == inside.size
        self._read(places if whole else places[inside], size, bool(blocks.plain(volatile)))
        if whole or other is None:
            outside = blocks.nothing(places.shape, kind)
        else:
            outside = np.full(places.shape, blocks.instead(other, special), kind)
        data = _NATIVE.load(places, inside, outside, kind)
        return made(data if pointer.data.ndim else data[0], special)

    def word_store(
        self,
        pointer: Any,
        value: Any,
        mask: Any = None,
        boundary_check: Any = (),
        cache_modifier: Any = "",
        eviction_policy: Any = "",
    ) -> None:
        """``tl.store`` of blocks."""
        dtype = pointer.special.element_ty
        if mask is not None and not pointer.data.ndim and blocks.is_one(mask) is False:
            return
        places, inside = blocks.places(pointer, mask)
        value = blocks.plain(value)
        kind, size, special, made = _kind(dtype)
        if isinstance(value, Block):
            value = value.to(dtype).data if type(value.special) is not _POINTER else value.data
        elif made is Coded:
            value = blocks.instead(value, special)
        as_stored = (places.shape, kind)
        if type(value) is np.ndarray and (value.shape, value.dtype) == as_stored:
            data = np.ascontiguousarray(value)  # blocks are never changed
        else:
            data = np.full(places.shape, value, kind)
        self._write(places, inside, size, lambda some: _NATIVE.store(places, data, some))

    def word_add(self, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """``tl.atomic_add`` of a word; ``otherwise``, of others."""

        def add(
            pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None
        ) -> Any:
            single = mask is None and type(pointer) is Block and not pointer.data.ndim
            kind: Any = pointer.special if single else None
            if kind is None or kind.element_ty is not tl.int32:
                return otherwise(pointer, val, mask, sem, scope)
            address, more = int(pointer.data), int(val)
            word, how = ctypes.c_int32.from_address(address), blocks.plain(sem) or "acq_rel"

            def change() -> Scalar:
                before = word.value
                word.value = before + more
                return Scalar(before)

            acquires, releases = how in ("acquire", "acq_rel"), how in ("release", "acq_rel")
            return self._exchange([address], 4, acquires, releases, change)

        return add

    def masked_load(
        self, ptrs: Any, mask: Any, other: Any, cache: Any, volatile: Any = False, *rest: Any
    ) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        self._read(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)], size, bool(volatile))
        return self._native_load(ptrs, mask, other, cache, volatile, *rest)

    def masked_store(self, ptrs: Any, value: Any, mask: Any, cache: Any, *rest: Any) -> None:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.array(np.broadcast_to(mask.data, ptrs.data.shape))

        def store(some: np.ndarray) -> None:
            self._native_store(
                ptrs, value, triton_interpreter.TensorHandle(some, tl.int1), cache, *rest
            )

        self._write(ptrs.data, inside, size, store)

    def _read(self, active: np.ndarray, size: int, volatile: bool) -> None:
        """A load from these addresses is about to happen."""
        if not active.size:
            return
        memory = self.world.memory
        low, high = _span(active, size)
        region = memory.find(low, high)
        if region is None:
            for part in memory.apart(active, size, self._me().name):
                self._read(part, size, volatile)
            return
        if region.writer is not None:  # a kernel stores there
            self._read_cells(
                region, low, high, region.cells(active), active.tobytes() if volatile else None
            )

    def _read_one(self, address: int, size: int, volatile: bool) -> None:
        """:meth:`_read` of one element."""
        region = self.world.memory.region(address, address + size, self._me().name)
        if region.writer is not None:
            polled = address.to_bytes(8, sys.byteorder) if volatile else None
            self._read_cells(region, address, address + size, region.cell(address), polled)

    def _read_cells(
        self, region: Region, low: int, high: int, cells: Cells, polled: bytes | None
    ) -> None:
        me, world = self._me(), self.world
        if polled is not None:
            self._poll(me, ("load", polled), low, high)
        world.tasks.point()
        world.memory.settle(me, low, high)
        world.tasks.note("loads", low, high)
        check = world.memory.check_read if polled is None else world.memory.observe
        check(me, region, cells)

    def _write(
        self,
        places: np.ndarray,
        inside: np.ndarray,
        size: int,
        store: Callable[[np.ndarray], object],
    ) -> None:
        """``store(mask)`` stores to some of these addresses; it is called when the store
        arrives."""
        count = np.count_nonzero(inside)
        if not count:
            return
        active = places if count == inside.size else places[inside]
        me, world = self._me(), self.world
        low, high = _span(active, size)
        region = world.memory.region(low, high, me.name)
        world.tasks.point()
        me.polled.clear()
        world.tasks.note("stores", low, high)
        cells = region.cells(active)
        world.memory.check_write(me, region, cells)
        serial = len(world.memory.launch_of)
        if not region.shared or active.size == 1 or serial % TORN:
            world.memory.put(
                me, Store(low, high, lambda: store(inside), region=region, cells=cells)
            )
            return
        alone = np.zeros_like(inside)  # elements of a block may arrive separately
        alone.flat[np.flatnonzero(inside)[serial * 7919 % active.size]] = True
        for some in (alone, inside & ~alone) if serial % 2 else (inside & ~alone, alone):
            part = places[some]
            first, last = _span(part, size)
            world.memory.put(
                me,
                Store(first, last, partial(store, some), region=region, cells=region.cells(part)),
            )

    def atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        return self._atomic(
            ptr, mask.data, sem, lambda: self._native_rmw(op, ptr, val, mask, sem, scope)
        )

    def atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        mask = np.ones(ptr.data.shape, bool)
        return self._atomic(ptr, mask, sem, lambda: self._native_cas(ptr, cmp, val, sem, scope))

    def _atomic(self, ptr: Any, mask: np.ndarray, sem: Any, change: Callable[[], Any]) -> Any:
        active = ptr.data[np.broadcast_to(mask, ptr.data.shape)]
        if not active.size:
            return change()
        acquires = sem in (_SEM.ACQUIRE, _SEM.ACQUIRE_RELEASE)
        releases = sem in (_SEM.RELEASE, _SEM.ACQUIRE_RELEASE)
        size = ptr.get_element_ty().primitive_bitwidth // 8
        return self._exchange(active.flat[:].tolist(), size, acquires, releases, change)

    def _exchange(
        self,
        addresses: list[int],
        size: int,
        acquires: bool,
        releases: bool,
        change: Callable[[], Any],
    ) -> Any:
        """An atomic read-modify-write of these elements by ``change``."""
        me, memory = self._me(), self.world.memory
        low, high = min(addresses), max(addresses) + size
        memory.region(low, high, me.name)
        self._poll(me, ("atomic", *addresses), low, high)
        self.world.tasks.point()
        before = ctypes.string_at(low, high - low)
        result = memory.exchange(me, addresses, size, change, acquires, releases)
        self.world.tasks.note("atomic", low, high)
        if ctypes.string_at(low, high - low) != before:
            me.polled.clear()
            memory.arrived(low, high)
        return result

    def _poll(self, me: Task, key: object, low: int, high: int) -> None:
        """Park the task if it polls the same bytes again and has done nothing since, until they
        change."""
        if key in me.polled:
            if me.patience > 0:
                me.patience -= 1
            else:
                self.world.tasks.park(*me.polled.values())
        me.polled[key] = (low, high)

    # --- Words: what the bodies in ``device/interpreter/words.py`` do ---

    def load(self, address: int) -> int:
        me, memory = self._me(), self.world.memory
        region = memory.region(address, address + 4, me.name)
        memory.check_read(me, region, region.cell(address))
        return memory.read_word(me, address)

    def store(self, address: int, value: int) -> None:
        me, memory = self._me(), self.world.memory
        region = memory.region(address, address + 4, me.name)
        self.world.tasks.point()
        me.polled.clear()
        self.world.tasks.note("stores", address, address + 4, str(value))
        memory.check_write(me, region, region.cell(address))
        word = ctypes.c_int32.from_address(address)
        apply = lambda: setattr(word, "value", value)  # noqa: E731
        memory.put(
            me, Store(address, address + 4, apply, region=region, cells=region.cell(address))
        )

    def acquire(self, address: int) -> int:
        me, memory = self._me(), self.world.memory
        memory.region(address, address + 4, me.name)
        self.world.tasks.point()
        self._awaited = address
        value = memory.acquire(me, address)
        self.world.tasks.note("sees", address, address + 4, str(value))
        return value

    def release(self, address: int, value: int) -> None:
        me = self._me()
        self.world.memory.region(address, address + 4, me.name)
        self.world.tasks.point()
        me.polled.clear()
        self.world.tasks.note("signals", address, address + 4, str(value))
        self.world.memory.release(me, address, value)

    def add(self, address: int, value: int) -> int:
        me, memory = self._me(), self.world.memory
        memory.region(address, address + 4, me.name)
        self.world.tasks.point()
        me.polled.clear()
        self.world.tasks.note("adds", address, address + 4, str(value))
        before = memory.exchange(
            me, [address], 4, lambda: interpreted.HostMemory.add(_PLAIN, address, value), True, True
        )
        memory.arrived(address, address + 4)
        return int(before)

    def pause(self, polls: int) -> None:
        self.world.tasks.park((self._awaited, self._awaited + 4))

    def idle(self) -> None:
        """Nothing to do: the next poll parks if nothing has changed."""

    def multiprocessor(self) -> int:
        """Programs run on multiprocessors in turn; the first one of each rank on another one."""
        me = self._me()
        return (me.component % COMPONENTS + me.rank) % self.world.multiprocessors

    def seconds(self) -> float:
        """Time does not advance: an endless wait is found as a deadlock, and a suspended machine is
        not a failure."""
        return 0.0


class Unscheduled(Hooks):
    """For processes that share memory: programs run one after another, as in Triton's interpreter,
    and nothing checks what they load and store."""

    def __init__(self) -> None:
        super().__init__(fast=True)

    def launch(
        self,
        fn: Callable[..., None],
        grid: Any,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        given = self.given(fn, _bound(fn, args, kwargs))
        _BUILDER.grid_dim = sizes = _sizes(grid, given)
        try:
            for index in np.ndindex(*sizes):
                _BUILDER.grid_idx = index
                fn(**given)
        except RuntimeError as error:  # such as a wait that has timed out; as Triton's interpreter
            raise triton_interpreter.InterpreterError(repr(error)) from error

    def _read(self, active: np.ndarray, size: int, volatile: bool) -> None: ...

    def _read_one(self, address: int, size: int, volatile: bool) -> None: ...

    def _write(
        self,
        places: np.ndarray,
        inside: np.ndarray,
        size: int,
        store: Callable[[np.ndarray], object],
    ) -> None:
        store(inside)

    def install(self) -> None:
        """Take over the interpreter of this process for good."""
        words = _words()
        LANGUAGE.patch()
        for where, name, value in (*_calls(self), *_quick_language(self, words)):
            setattr(where, name, value)


_PLAIN = interpreted.HostMemory()


def _set_grid(task: Task) -> None:
    _BUILDER.grid_idx, _BUILDER.grid_dim = task.grid_index, task.grid


_KINDS: dict[int, tuple[tl.dtype, np.dtype, int, tl.dtype | None, type[Block]]] = {}


def _kind(dtype: tl.dtype) -> tuple[np.dtype, int, tl.dtype | None, type[Block]]:
    """numpy's type of an element, its bytes, what a block says of it, and the class of such
    blocks. Cached by identity, because hashing Triton's types is slow."""
    found = _KINDS.get(id(dtype))
    if found is None:
        kind = np.dtype(triton_interpreter._get_np_dtype(dtype))
        special = blocks.special(dtype)
        found = _KINDS[id(dtype)] = (
            dtype,
            kind,
            dtype.primitive_bitwidth // 8,
            special,
            blocks.kind_of(special),
        )
    return found[1:]


def _span(active: np.ndarray, size: int) -> tuple[int, int]:
    """The bytes [low, high) between the first and the last of these elements."""
    if active.size == 1:
        low = int(active.flat[0])
        return low, low + size
    return int(_LEAST(active, axis=None)), int(_MOST(active, axis=None)) + size
