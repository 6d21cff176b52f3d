"""Compile Triton and Gluon kernels for GPUs this machine does not have.

Why: the order of our stores, signals, waits and loads is decided by the compiler, not by the Python
text, and so is whether a kernel fits the registers and shared memory of an SM. Both can be read off
the compiled object, and the compiler itself needs no device: it asks the active Triton driver for a
target and nothing else. So a stub driver that only names a target turns any laptop or CI machine
into a cross compiler.

    compiled = compile_kernel(kernel, (1,), x, y, 1024, BLOCK=128, target="sm_90", num_warps=8)
    compiled.ptx, compiled.registers, compiled.spills, compiled.shared_bytes

    with offline("sm_90") as launched:     # host code that launches on its own
        some_library_launch(x, y)          # CPU tensors; nothing runs
    launched[0].ptx

Limits: nothing is executed, outputs are untouched. The process must run without
``TRITON_INTERPRET``, because that variable replaces kernels by interpreted functions at decoration
time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from tests.compile.barrier_words import reused_barriers
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as active_driver


@dataclass(frozen=True)
class _Machine:
    """Properties of a device for the compiler and the launch checks."""

    target: GPUTarget
    max_shared_bytes: int
    num_sms: int
    max_threads: int = 1024


# Shared memory is the opt-in limit of one block (LDS of one work-group on gfx942).
MACHINES: dict[str, _Machine] = {
    "sm_80": _Machine(GPUTarget("cuda", 80, 32), 163 * 1024, 108),
    "sm_90": _Machine(GPUTarget("cuda", 90, 32), 227 * 1024, 132),
    "sm_100": _Machine(GPUTarget("cuda", 100, 32), 227 * 1024, 148),
    "gfx942": _Machine(GPUTarget("hip", "gfx942", 64), 64 * 1024, 304),
}
TARGETS: tuple[str, ...] = tuple(MACHINES)


def on_targets(cases: Sequence[Any], targets: Sequence[str] = TARGETS) -> list[tuple[Any, str]]:
    """(case, target): each case for sm_90, and every second one for each other target, so that each
    has one other target."""
    others = [target for target in targets if target != "sm_90"]
    return [(case, "sm_90") for case in cases] + [
        (c, t) for i, t in enumerate(others) for c in cases[i % 2 :: 2] or cases[:1]
    ]


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    ``asm`` maps a stage ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco", ...) to its
    text or bytes. ``registers`` is per thread (VGPRs on gfx942). ``spills`` is bytes of stack and
    local memory per thread on NVIDIA (kernels of ours keep nothing else there) and spilled VGPRs on
    gfx942. Both are None when no tool could tell. ``params`` names the parameters of the PTX entry
    in order (a tensor descriptor takes 1 + 2 * rank of them, compile time constants none); a member
    of a named tuple has its name alone. It is empty where names could not be matched. ``signature``
    is argument -> Triton's type.
    """

    name: str
    target: str
    ptx: str | None
    asm: Mapping[str, str | bytes] = field(repr=False)
    registers: int | None
    spills: int | None
    shared_bytes: int
    params: tuple[str, ...] = ()
    signature: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fits_shared(self) -> bool:
        """Whether a block of the target can have this much shared memory."""
        return self.shared_bytes <= MACHINES[self.target].max_shared_bytes


class _Utils:
    """The part of a driver that a launch touches: accept the binary, describe the device."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: str
    ) -> tuple[None, None, int, int, int]:
        # No module handle: what has one is unloaded, when collected, through whatever driver is
        # active by then.
        return None, None, 0, 0, self._machine.max_threads

    def unload_module(self, module: object) -> None:
        return None

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {
            "max_shared_mem": self._machine.max_shared_bytes,
            "multiprocessor_count": self._machine.num_sms,
            "warpSize": self._machine.target.warp_size,
        }


class _StubDriver(DriverBase):
    """A driver that names a target and runs nothing."""

    _serial = itertools.count()

    def __init__(self, target: str) -> None:
        machine = MACHINES[target]
        self._target = machine.target
        self.utils = _Utils(machine)
        # A kernel keeps its binaries and its backend per device. A separate device name per driver
        # separates targets from each other, and from a real GPU's device 0.
        self._device = f"offline:{target}:{next(self._serial)}"

    @classmethod
    def is_active(cls) -> Any:
        return False

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self._device

    def set_current_device(self, device: str) -> None:
        return None

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise RuntimeError(
            "a kernel cannot be timed offline: pass one config, or compile the kernel under "
            "the tuner"
        )

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def offline(target: str = "sm_90") -> Iterator[list[Compiled]]:
    """Make ``target`` the active Triton device; yields the list of kernels launched inside, in
    order of first launch.

    Kernels are compiled without line numbers, which are a quarter of the time and no part of the
    code; so all tests share what the compiler has cached. Launches compile, check shared memory and
    block size against the target, and return without running. On exit the driver that was active
    before is active again.
    """
    if target not in MACHINES:
        raise ValueError(f"unknown target {target!r}: known are {', '.join(TARGETS)}")
    if knobs.runtime.interpret:
        raise RuntimeError(
            "kernels are interpreted in this process: unset TRITON_INTERPRET to compile them"
        )
    launched: list[Compiled] = []
    seen: set[str] = set()
    # of the kernel compiled last; the next one is loaded for the first time
    signature: dict[str, Any] = {}

    def on_compiled(*, compile: Mapping[str, Any], **_: object) -> None:
        signature.clear()
        signature.update(compile["signature"])

    def on_load(
        module: object, function: Any, name: str, metadata_group: dict[str, str], hash: str
    ) -> None:
        if hash not in seen:  # called on every launch, as no module handle is ever kept
            seen.add(hash)
            launched.append(_from_files(target, metadata_group, signature))

    # `reset_active` would look for a real GPU, so the previous value is put back as it was, unset
    # included.
    before, hook_before = active_driver._active, knobs.runtime.jit_post_compile_hook
    active_driver.set_active(_StubDriver(target))
    knobs.runtime.jit_post_compile_hook = on_compiled
    knobs.runtime.kernel_load_end_hook.add(on_load)
    try:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            yield launched
    finally:
        knobs.runtime.kernel_load_end_hook.remove(on_load)
        knobs.runtime.jit_post_compile_hook = hook_before
        active_driver._active = before


def compile_kernel(
    kernel: Any,
    grid: Sequence[int] | Callable[..., Any] = (1,),
    *args: Any,
    target: str = "sm_90",
    **kwargs: Any,
) -> Compiled:
    """Compile ``kernel`` (@triton.jit or @gluon.jit, also under heuristics) for ``target`` and
    describe the result.

    ``args`` and ``kwargs`` are those of a launch, ``num_warps``, ``num_stages`` and ``maxnreg``
    included: CPU tensors, numbers, tensor descriptors made from CPU tensors, or a ``torch.dtype``
    for a pointer. ``grid`` is never used by the compiler. A kernel under an autotuner has no single
    result: pass its ``.fn`` and a config.
    """
    with offline(target):
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
    if not hasattr(compiled, "asm"):
        raise TypeError(
            f"{kernel!r} did not compile to one kernel: pass the jit function itself, not "
            "its autotuner"
        )
    asm = {stage: compiled.asm[stage] for stage in compiled.asm}
    return _describe(
        target, asm, compiled.metadata.name, compiled.metadata.shared, compiled.src.signature
    )


def _from_files(target: str, files: Mapping[str, str], signature: Mapping[str, Any]) -> Compiled:
    """Read a kernel back from the compiler's cache files."""
    asm: dict[str, str | bytes] = {}
    metadata: dict[str, Any] = {}
    for path in map(Path, files.values()):
        stage = path.suffix[1:]
        if stage == "json":
            metadata = json.loads(path.read_text())
        else:
            asm[stage] = path.read_bytes() if stage in ("cubin", "hsaco") else path.read_text()
    return _describe(target, asm, metadata["name"], metadata["shared"], signature)


def _describe(
    target: str,
    asm: Mapping[str, str | bytes],
    name: str,
    shared: int,
    signature: Mapping[str, Any],
) -> Compiled:
    ptx = asm.get("ptx")
    ptx = ptx if isinstance(ptx, str) else None
    if MACHINES[target].target.backend == "cuda":
        cubin = asm.get("cubin")
        registers, spills = _cubin_usage(cubin) if isinstance(cubin, bytes) else (None, None)
    else:
        registers, spills = _amdgcn_usage(str(asm.get("amdgcn", "")))
    params = _param_names(signature, ptx) if ptx is not None else ()
    reused = reused_barriers(ptx)[0] if ptx is not None else []
    if reused:
        raise AssertionError(
            f"{name} keeps data in shared memory that it made mbarriers, at {reused}; see "
            "barrier_words.py"
        )
    return Compiled(name, target, ptx, asm, registers, spills, int(shared), params, dict(signature))


def _cuobjdump() -> Path | None:
    """The dumper of the triton wheel: it has the version of its assemblers, so it can read their
    output."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if path.exists() else None


@functools.lru_cache(maxsize=256)
def _cubin_usage(cubin: bytes) -> tuple[int | None, int | None]:
    tool = _cuobjdump()
    if tool is None:
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [str(tool), "--dump-resource-usage", str(path)],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None, None
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    return (int(used[1]), int(used[2]) + int(used[3])) if used else (None, None)


def _amdgcn_usage(text: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    return int(registers[1]) if registers else None, int(spills[1]) if spills else None


def _param_names(signature: Mapping[str, Any], ptx: str) -> tuple[str, ...]:
    """Names of the PTX entry's parameters, or () where their count is not the one of any layout
    known."""
    entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)\s*(?:\.\w|\{)", ptx, re.DOTALL)
    if not entry or not signature:
        return ()
    count = len(re.findall(r"^\s*\.param", entry[1], re.MULTILINE))
    # With TMA a descriptor is one object, without it is a pointer, its sizes, and one or two flags
    # (by version). Its sizes follow in either case, and two scratch pointers end every entry.
    for flags in (None, 1, 2):
        names = [n for name, kind in signature.items() for n in _expand(name, kind, flags)]
        names += ["global_scratch", "profile_scratch"]
        if len(names) == count:
            return tuple(names)
    return ()


def _expand(name: str, kind: Any, flags: int | None) -> Iterator[str]:
    if isinstance(kind, (tuple, list)):
        # A member of a named tuple has the name that it would have as a parameter of its own.
        names = getattr(kind, "_fields", [f"{name}.{index}" for index in range(len(kind))])
        for member, inner in zip(names, kind, strict=True):
            yield from _expand(member, inner, flags)
    elif str(kind).startswith("tensordesc"):
        block = re.search(r"\[([^\]]*)\]", str(kind))
        rank = block[1].count(",") + 1 if block else 0
        sizes = [f"{name}.shape{i}" for i in range(rank)] + [
            f"{name}.stride{i}" for i in range(rank)
        ]
        yield name
        if flags is not None:
            yield from (*sizes, *(f"{name}.flag{i}" for i in range(flags)))
        yield from sizes
    elif kind != "constexpr":
        yield name
