"""Launching one compiled kernel many times: its parameters are kept in memory, and a launch writes
the few that change.

Triton's own path looks at every argument of every launch and encodes every tensor descriptor anew,
which for the kernels here takes 20 us of host time and more. :func:`prepare` does that once; a
launch of what it returns is one call of the driver, with the addresses that changed.

What a parameter block looks like is the compiler's affair; ``tests/compile`` holds :func:`layout`
against its PTX.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime import driver as active

WORDS = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "pointer": ctypes.c_uint64,
}
MAP, MAP_BYTES = "map", 128
_SCRATCH = (
    "global_scratch",
    "profile_scratch",
)  # end every block; null, since a kernel that needs them is not prepared
_MAX_MAPS = 64  # addresses of which tensor maps are kept: weights come again, activations often do


def limit_registers(most: int) -> dict[str, int]:
    """The launch option that holds a kernel to ``most`` registers a thread, where its compiler has
    one."""
    if knobs.runtime.interpret or active.active.get_current_target().backend != "cuda":
        return {}
    return {"maxnreg": most}


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _launch_function() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


@lru_cache(maxsize=1)
def _map_offset() -> int | None:
    """Where Triton's object around a tensor map has the map: at its end, after a header. None if
    that changed."""
    from triton.backends.nvidia import driver

    size = getattr(getattr(driver, "PyCUtensorMap", None), "__basicsize__", 0)
    return size - MAP_BYTES if size in (192, 256) else None  # Triton 3.9, 3.6


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``value`` of argument ``name``, taken apart as the compiler does: the members of tuples depth
    first, by dotted names (``peers.control``)."""
    if not isinstance(value, tuple):
        yield name, value
        return
    for member, inner in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
        yield from leaves(f"{name}.{member}", inner)


def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, or their kinds, without tuples."""
    return dict(leaf for name, value in arguments.items() for leaf in leaves(name, value))


def layout(signature: Mapping[str, Any]) -> dict[str, str] | None:
    """Parameter -> kind of a kernel for NVIDIA, in order; None where an argument is of a kind not
    known here.

    ``kind`` is :data:`MAP` or one of :data:`WORDS`. A tensor descriptor is a map, its sizes, its
    strides. Constants take no place.
    """
    found: dict[str, str] = {}
    for name, kind in flat(signature).items():
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            return None
        if kind.startswith("tensordesc<"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            found[name] = MAP
            found |= {f"{name}.shape{i}": "i32" for i in range(rank)}
            found |= {f"{name}.stride{i}": "i64" for i in range(rank)}
        elif kind.startswith("*"):
            found[name] = "pointer"
        elif kind in WORDS:
            found[name] = kind
        else:
            return None
    return found | dict.fromkeys(_SCRATCH, "pointer")


# What one launch is given; see Launcher. A plain tuple, since one is made for each launch:
#   whatever Triton specialises for in this launch,
#   values of the words that change,
#   what makes the arguments that are not fixed, by name,
#   base addresses of the descriptors that change.
Call = tuple[Hashable, Sequence[int], Callable[[], Mapping[str, Any]], Sequence[int]]


def alignment(addresses: Sequence[int]) -> Hashable:
    """What Triton specialises for in these addresses: which are multiples of 16; True if all
    are."""
    return reduce(or_, addresses) & 15 == 0 or tuple(at % 16 == 0 for at in addresses)


class Planned(NamedTuple):
    """A launch that was not made; see :func:`collect_launches`."""

    kernel: Any
    programs: int
    arguments: Sequence[Any]
    options: Mapping[str, int]

    def compile(self) -> Any:
        """Compile the kernel for these arguments, if it was not yet, and return it."""
        return self.kernel.run(*self.arguments, grid=(self.programs,), warmup=True, **self.options)

    def memory(self) -> dict[int, int]:
        """The memory that the arguments keep: address and bytes."""
        values = (value for each in self.arguments for _, value in leaves("", each))
        tensors = (getattr(value, "base", value) for value in values)
        kept = [each.untyped_storage() for each in tensors if hasattr(each, "untyped_storage")]
        return {storage.data_ptr(): storage.nbytes() for storage in kept}


def fits(kernel: Any) -> bool:
    """Whether the current GPU has the shared memory that a compiled kernel needs."""
    driver = active.active
    has = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    return kernel.metadata.shared <= has


class _Collecting(threading.local):
    launches: list[Planned] | None = None


_COLLECTING = _Collecting()


@contextmanager
def collect_launches() -> Iterator[list[Planned]]:
    """Collect what launchers that are made inside would launch from this thread, in place of
    launching it."""
    _COLLECTING.launches = launches = []
    try:
        yield launches
    finally:
        _COLLECTING.launches = None


class Launcher:
    """Launches of one kernel for one shape: the first of each variant by Triton, later ones from
    what it was given then.

    kernel : the jit function.

    programs : how many programs a launch has.

    fixed : the arguments, by name, that are the same in every launch.

    pack : makes a :class:`Call` of the tensors that the launcher is called with.

    words, maps : dotted names of the arguments that change from launch to launch: pointers and
        numbers, and descriptors of which the base address changes; see :func:`prepare`.

    options : of Triton: ``num_warps`` and the like.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        fixed: Mapping[str, Any],
        pack: Callable[..., Call],
        words: Sequence[str],
        maps: Sequence[str] = (),
        **options: int,
    ) -> None:
        self.kernel, self.programs, self.fixed, self._pack = kernel, programs, fixed, pack
        self._names, self._options = (words, maps), options
        self.prepared: dict[Hashable, Prepared | None] = {}

    def __call__(self, *given: Any) -> None:
        """Launch on the current stream."""
        variant, words, changing, addresses = self._pack(*given)
        prepared = self.prepared.get(variant)
        if prepared is not None and not hooked():
            prepared(words, addresses)
            return
        named = {**self.fixed, **changing()}
        arguments = [named[name] for name in self.kernel.arg_names]
        if _COLLECTING.launches is not None:
            _COLLECTING.launches.append(
                Planned(self.kernel, self.programs, arguments, self._options)
            )
            return
        compiled = self.kernel[(self.programs,)](*arguments, **self._options)
        if variant not in self.prepared:
            self.prepared[variant] = prepare(compiled, self.programs, arguments, *self._names)


def hooked() -> bool:
    """Whether a hook listens to Triton's launches (a profiler): then launches take Triton's
    path."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def prepare(
    compiled: Any,
    programs: int,
    arguments: Sequence[Any],
    words: Sequence[str],
    maps: Sequence[str] = (),
) -> Prepared | None:
    """What later launches of ``compiled`` over ``programs`` programs need; None where only Triton's
    path can launch it.

    Parameters
    ----------
    compiled : what a launch of a jit function returned.
    arguments : all that it was launched with, in order.
    words : names of the arguments that change from launch to launch, pointers and numbers. Their
        alignment, which the kernel was specialised for, may not change.
    maps : names of descriptors of which the base address changes, with the same alignment, and
        nothing else.
    """
    metadata = getattr(compiled, "metadata", None)
    if (
        metadata is None
        or metadata.target.backend != "cuda"
        or not isinstance(compiled.function, int)
    ):
        return None  # interpreted, another maker's device, or no device at all
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size or _map_offset() is None:
        return None
    signature = compiled.src.signature
    kinds = layout(signature)
    if kinds is None or list(kinds.values()).count(MAP) != len(metadata.tensordesc_meta or ()):
        return None
    return Prepared(
        compiled, programs, kinds, dict(zip(signature, arguments, strict=True)), words, maps
    )


class Prepared:
    """A kernel with its parameters in place; see :func:`prepare`. For one thread at a time."""

    def __init__(
        self,
        compiled: Any,
        programs: int,
        kinds: Mapping[str, str],
        arguments: Mapping[str, Any],
        words: Sequence[str],
        maps: Sequence[str],
    ) -> None:
        self._compiled, metadata = (
            compiled,
            compiled.metadata,
        )  # the module is there as long as this object is
        self._parameters = (ctypes.c_void_p * len(kinds))()
        self._config = _Config(
            (programs, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared, None, None, 0
        )
        # what the driver's function takes: addresses and a handle
        self._call = (
            ctypes.addressof(self._config),
            compiled.function,
            ctypes.addressof(self._parameters),
            None,
        )
        self._launch, driver = _launch_function(), active.active
        self._stream, self._device = driver.get_current_stream, driver.get_current_device()
        values, described = _expand(arguments), iter(metadata.tensordesc_meta or ())
        self._words = ctypes.create_string_buffer(8 * len(kinds))
        self._tables: dict[str, _Maps] = {}
        # words are adjacent, those that change first: they are written at once
        places = {name: place for place, name in enumerate(dict.fromkeys((*words, *kinds)))}
        for index, (name, kind) in enumerate(kinds.items()):
            value = values.get(name)
            if kind == MAP:
                self._tables[name] = table = _Maps(index, value, next(described))
                self._parameters[index] = table.make(value.base.data_ptr())
            else:
                at, value = (
                    8 * places[name],
                    value.data_ptr() if hasattr(value, "data_ptr") else value or 0,
                )
                struct.pack_into(_format(kind), self._words, at, value)
                self._parameters[index] = ctypes.addressof(self._words) + at
        self._maps = [self._tables[name] for name in maps]
        self._pack = struct.Struct("".join(_format(kinds[name]) for name in words)).pack_into

    def __call__(self, words: Sequence[int], addresses: Sequence[int] = ()) -> None:
        """Launch on the current stream: values of the changing words, base addresses of the
        changing descriptors."""
        self._pack(self._words, 0, *words)
        if self._maps:
            parameters = self._parameters
            for table, address in zip(self._maps, addresses, strict=True):
                parameters[table.index] = table.known.get(address) or table.make(address)
        self._config.stream = self._stream(self._device)
        status = self._launch(*self._call)
        if status:
            raise RuntimeError(
                f"the driver refused to launch {self._compiled.name}: "
                f"cuLaunchKernelEx returned {status}"
            )


def _format(kind: str) -> str:
    """Of ``struct``: a word of this kind in 8 bytes."""
    word = WORDS[kind]
    return f"{word._type_}{8 - ctypes.sizeof(word)}x"


def _expand(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, and the sizes and strides of descriptors by the names :func:`layout` gives
    them."""
    found = flat(arguments)
    for name, value in list(found.items()):
        if hasattr(value, "block_shape"):
            found |= {f"{name}.shape{i}": size for i, size in enumerate(value.shape)}
            found |= {f"{name}.stride{i}": stride for i, stride in enumerate(value.strides)}
    return found


class _Maps:
    """The tensor maps of one descriptor argument, by base address. ``known``: their addresses;
    ``index``: of the argument."""

    def __init__(self, index: int, descriptor: Any, metadata: Mapping[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        utils = active.active.utils
        # Triton 3.6 knows one kind of map
        self._fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        self._before = (
            metadata["swizzle"],
            metadata["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]],
        )
        self._after = (
            metadata["block_size"],
            descriptor.shape,
            descriptor.strides,
            int(descriptor.padding == "nan"),
        )
        self.index, self._offset = index, _map_offset() or 0
        self.known: dict[int, int] = {}
        self._made: list[object] = []

    def make(self, address: int) -> int:
        """The map of ``address``, which is not known yet."""
        if len(self.known) >= _MAX_MAPS:
            self.known.clear()
            self._made.clear()
        self._made.append(self._fill(address, *self._before, *self._after))
        place = self.known[address] = id(self._made[-1]) + self._offset
        return place
