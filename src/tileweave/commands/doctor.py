"""``tileweave doctor``: what this machine has, what will run on it, and why the rest will not.

Starts no process and no process group, and never fails: what cannot be found out is reported.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave.bench.environment import nccl_version, version_of
from tileweave.bench.samples import samples_of
from tileweave.errors import InputError
from tileweave.planning.machine import CPU, Machine
from tileweave.planning.problem import why_no_kernel
from tileweave.transport.nodes import host_name
from tileweave.transport.nvshmem import RAIL, why_missing
from tileweave.transport.workspace import kernels_allowed

LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)
_TROUBLE = (
    RuntimeError,
    OSError,
    ImportError,
    AttributeError,
    ValueError,
    TypeError,
    AssertionError,
)
_OPTIONAL = {
    "typer": "the commands",
    "rich": "the commands",
    "matplotlib": "pictures",
    "numpy": "interpreted kernels, hence the demo without GPUs",
    "greenlet": "tileweave fuzz",
    "simpy": "tileweave simulate",
    "pyyaml": "tileweave simulate",
    "protobuf": "traces of tileweave simulate",
}


@dataclass(frozen=True)
class Fact:
    """One line. ``good``: None if the value is neither good nor bad."""

    name: str
    value: str
    good: bool | None = None


@dataclass
class Diagnosis:
    """Facts by section, the peer-access matrix (empty without GPUs), and what will run."""

    software: list[Fact] = field(default_factory=list)
    devices: list[Fact] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    verdicts: list[Fact] = field(default_factory=list)


def diagnose() -> Diagnosis:
    """Examine this machine."""
    found = Diagnosis()
    found.software = _software()
    count = _guarded(torch.cuda.device_count, 0)
    found.devices = _devices(count)
    found.peer_access = [[i == j or _peer(i, j) for j in range(count)] for i in range(count)]
    linked = all(all(row) for row in found.peer_access)
    machine = machine_here()
    found.verdicts = _verdicts(count, linked, machine)
    return found


def _guarded(question: Callable[[], Any], otherwise: Any) -> Any:
    """The answer, or ``otherwise`` if the question fails as drivers and builds do."""
    try:
        return question()
    except _TROUBLE:
        return otherwise


def _peer(one: int, other: int) -> bool:
    return bool(_guarded(lambda: torch.cuda.can_device_access_peer(one, other), False))


def machine_here() -> Machine:
    """What plans know about this machine."""
    from tileweave.transport.cuda import describe

    count = _guarded(torch.cuda.device_count, 0)
    return _guarded(lambda: describe(0), CPU) if count else CPU


def _software() -> list[Fact]:
    facts = [
        Fact(
            "python",
            f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            True,
        ),
        Fact("tileweave", version_of("tileweave") or "not installed, run from its source"),
        Fact("torch", torch.__version__, _at_least(torch.__version__, LEAST_TORCH)),
    ]
    triton = version_of("triton")
    new_enough = triton is not None and _at_least(triton, LEAST_TRITON)
    facts.append(Fact("triton", triton or "missing: no kernel can run", new_enough))
    facts.append(Fact("CUDA of torch", torch.version.cuda or "none: a CPU build"))
    facts.append(Fact("NCCL of torch", (nccl_version() if torch.version.cuda else None) or "none"))
    facts.append(
        Fact("distributed", "available" if dist.is_available() else "missing", dist.is_available())
    )
    for name, purpose in _OPTIONAL.items():
        version = version_of(name)
        facts.append(
            Fact(name, version or f"missing; needed for {purpose}", None if version else False)
        )
    return facts


def _at_least(version: str, least: tuple[int, int]) -> bool:
    parts = version.split("+")[0].split(".")[:2]
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) >= least


def _devices(count: int) -> list[Fact]:
    facts = []
    driver = _guarded(lambda: ctypes.CDLL("libcuda.so.1") is not None, False)
    facts.append(
        Fact(
            "NVIDIA driver",
            "found" if driver else "none (libcuda.so.1 cannot be loaded)",
            driver or None,
        )
    )
    for index in range(count):
        properties = _guarded(lambda index=index: torch.cuda.get_device_properties(index), None)
        if properties is None:
            facts.append(Fact(f"GPU {index}", "cannot be queried", False))
            continue
        facts.append(
            Fact(
                f"GPU {index}",
                f"{properties.name}, sm_{properties.major}{properties.minor}, "
                f"{properties.multi_processor_count} multiprocessors, "
                f"{properties.total_memory / 2**30:.0f} GiB",
                properties.major >= 8,
            )
        )
    if not count:
        facts.append(Fact("GPUs", "none"))
    facts.append(
        Fact(
            "CPU cores",
            str(
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ),
        )
    )
    shm = Path("/dev/shm")
    free = _guarded(lambda: shutil.disk_usage(shm).free, 0)
    usable = shm.is_dir() and os.access(shm, os.W_OK)
    text = (
        f"/dev/shm, {free / 2**20:.0f} MiB free"
        if usable
        else "no /dev/shm: the temporary folder is used, slower"
    )
    facts.append(Fact("shared host memory", text, usable))
    facts.append(Fact("NVLink multicast", "not needed"))
    facts += [_nodes(), _nvshmem()]
    for name in sorted(os.environ):
        if name.startswith("TILEWEAVE_") or name == "TRITON_INTERPRET":
            facts.append(Fact(name, os.environ[name]))
    return facts


def _nodes() -> Fact:
    """The nodes of the job that this process is in, as far as its environment tells. Operators find
    the nodes of a group at its first call."""
    name, here = "nodes", f"this one is {host_name()}"
    sizes = [os.environ.get(word, "") for word in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if not all(text.isdecimal() and int(text) for text in sizes):
        return Fact(name, f"{here}; no torchrun tells of others")
    ranks, each = map(int, sizes)
    nodes = -(-ranks // each)
    between = "" if nodes == 1 else "; in groups over several, see docs/guides/several-nodes.md"
    return Fact(name, f"{nodes} node{'s' * (nodes > 1)} x {each} by torchrun, {here}{between}")


def _nvshmem() -> Fact:
    """Whether ``TILEWEAVE_RAIL=nvshmem`` could be used."""
    missing = _guarded(why_missing, "this torch has no symmetric memory")
    if missing:
        return Fact("NVSHMEM", f"not here: {missing}; NCCL moves data between nodes")
    asked = f"{RAIL}=nvshmem has it move data between nodes; never run across a network"
    return Fact("NVSHMEM", f"found; {asked}")


def _verdicts(count: int, linked: bool, machine: Machine) -> list[Fact]:
    """What will run here, and why the rest will not. Plans only if there are compiled kernels."""
    compiled = _compiled(count, linked, machine)
    verdicts = [_interpreted(), compiled, _kernels(machine)]
    if compiled.good:
        size = min(count, 8)
        for op in tw.OPERATORS:
            for what, planned in samples_of(op).typical:
                plan = _guarded(lambda planned=planned: str(planned(size, machine)), "unknown")
                verdicts.append(Fact(what, plan))
    return verdicts


def _kernels(machine: Machine) -> Fact:
    """Which kernels may run here."""
    name = "kernels in use"
    try:
        allowed = kernels_allowed()
    except InputError as error:
        return Fact(name, str(error), False)
    if machine.backend == "cpu":
        return Fact(name, "the portable ones, which are written in Triton")
    if machine.hopper:
        return Fact(name, "those for Hopper (Gluon) and the portable ones (Triton)")
    left_out = f"TILEWEAVE_KERNELS={allowed}" if machine.arch == 90 else "made for sm_90"
    return Fact(name, f"the portable ones (Triton); those for Hopper are not: {left_out}")


def _interpreted() -> Fact:
    name = "interpreted kernels (demo, tests)"
    triton, numpy = version_of("triton"), version_of("numpy")
    if sys.platform == "win32":
        return Fact(name, "no: ranks share memory by POSIX means", False)
    if not triton or not numpy:
        missing = "triton" if not triton else "numpy"
        return Fact(name, f"no: {missing} is missing; remedy: pip install {missing}", False)
    return Fact(name, "yes, any number of ranks up to 8: tileweave demo --device cpu", True)


def _compiled(count: int, linked: bool, machine: Machine) -> Fact:
    name = "compiled kernels"
    if count < 2:
        reason = "one GPU, and a group needs one for each rank" if count else "no GPU"
        return Fact(name, f"no: {reason}; operators on CPU tensors run unfused", False)
    if not linked:
        return Fact(
            name,
            "no: some GPUs cannot access each other's memory (see the matrix), so all calls run "
            "unfused; remedy: CUDA_VISIBLE_DEVICES with GPUs that can, or `nvidia-smi topo -p2p r`",
            False,
        )
    if machine.backend == "cuda" and machine.arch < 80:
        return Fact(name, f"no: sm_{machine.arch} is below sm_80", False)
    lacking = _lacking()
    if lacking:
        return Fact(name, f"no: {lacking}", False)
    # the condition of the planners of all operators with matmuls
    unfused = why_no_kernel("bfloat16", machine)
    of_what = (
        f"embeddings fused; experts unfused, and matmuls unless `tileweave tune` measured them: "
        f"{unfused}"
        if unfused
        else "bf16 and fp16 fused, fp32 unfused"
    )
    return Fact(name, f"yes: worlds of 2 to {min(count, 8)} ranks, {of_what}", True)


def _lacking() -> str:
    """What software compiled kernels need and do not have here; "" if nothing is missing."""
    for package, version, least in (
        ("torch", torch.__version__, LEAST_TORCH),
        ("triton", version_of("triton"), LEAST_TRITON),
    ):
        wanted = ".".join(map(str, least))
        if version is None:
            return f"{package} is missing; remedy: pip install '{package}>={wanted}'"
        if not _at_least(version, least):
            return (
                f"{package} {version} is older than {wanted}; "
                f"remedy: pip install '{package}>={wanted}'"
            )
    if not _guarded(lambda: __import__("torch.distributed._symmetric_memory") is not None, False):
        return "this torch has no symmetric memory"
    return ""
