"""Plans by tuned results: read from the user's cache once per process, and the same on all ranks.

Ranks may have other cache files: another host, another home. If they planned by them, one rank
could run a kernel that waits for peers which run NCCL. So the ranks of a group meet before its
first matmul, in the store of the group. They compare what they would plan by, and where that
differs all use the results of one rank: of one that has called with its own before, else of rank 0.
If two ranks have called with different ones, in other groups, all raise
:class:`RankMismatchError`. The same meeting compares ``TILEWEAVE_KERNELS`` and whether devices
reach each other.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tileweave.errors import InputError, RankMismatchError
from tileweave.ops.core.registry import interpreting, machine_of
from tileweave.planning import cache, choices
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.transport.rendezvous import TUNED, meet, require_alike
from tileweave.transport.workspace import REGISTRY, kernels_allowed

_LOG = logging.getLogger("tileweave")
_DRIVER = Path("/proc/driver/nvidia/version")
_NONE = ""  # the text of no results
_FIRST = "the first matmul of a group"


@dataclass
class _Held:
    """What this process plans by in groups of one size: the text of a cache file.

    agreed : whether a group has planned by it, so that it cannot change any more.
    """

    text: str
    agreed: bool = False

    @property
    def digest(self) -> str:
        return f"{zlib.crc32(self.text.encode()):08x}" if self.text else "none"


_HELD: dict[int, _Held] = {}  # by world size
# groups that have met, and why their calls run unfused; "": they may be fused
_MET: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def key_of(device: torch.device, world_size: int) -> cache.Key:
    """The key of results that are measured on ``device`` in groups of ``world_size`` ranks."""
    machine = machine_of(device)
    return cache.Key(
        machine.name,
        machine.num_sms,
        world_size,
        _driver() if machine.backend == "cuda" else machine.backend,
        _version_of("tileweave"),
        torch.__version__,
        _version_of("triton"),
        kernels_allowed(),
    )


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The version of the NVIDIA driver; that of CUDA that it supports, if it does not tell."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text("utf-8"))
    except OSError:
        found = None
    supported = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")
    return found.group(1) if found else f"CUDA {supported()}"


def read(device: torch.device, world_size: int) -> None:
    """Plan by the user's cache from now on in groups of this size, unless this was called before.

    A file that is broken is not used, and a warning names it. Not collective: :func:`agree` follows
    before a call.
    """
    if world_size in _HELD or not may_fuse(device, world_size):
        return
    text = _NONE
    try:
        key = key_of(device, world_size)
        found = cache.read(cache.path_of(key), key)[1]
        text = cache.text_of(key, found) if found else _NONE
    except InputError as error:
        _LOG.warning("calls are planned without tuned results: %s", error)
    _hold(world_size, _Held(text))


def _hold(world_size: int, held: _Held) -> None:
    before = _HELD.get(world_size)
    _HELD[world_size] = held
    if before is not None and before.text:
        choices.clear()
        for each in _HELD.values():
            _install(each)
    else:
        _install(held)


def _install(held: _Held) -> None:
    if held.text:
        choices.install(_measured(held))


def _measured(held: _Held) -> tuple[Measurement, ...]:
    return cache.parse(held.text, "memory")[1] if held.text else ()


def add(device: torch.device, world_size: int, measured: Iterable[Measurement]) -> None:
    """Plan by these results, too. Every rank of the group that measured them calls this with the
    same ones."""
    read(device, world_size)
    held, key = _HELD[world_size], key_of(device, world_size)
    text = cache.text_of(key, cache.merged(_measured(held), measured))
    _hold(world_size, _Held(text, held.agreed))


def agree(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why every call of ``group`` runs unfused; "" if that depends on the call.

    Collective before the first call of a group, free after it until the group is closed.

    Raises
    ------
    RankMismatchError
        Ranks cannot plan alike.
    PeerTimeout
        A rank does not come in time.
    """
    agreed = REGISTRY.agreed(group.group_name)
    if TUNED in agreed and group in _MET:
        return _MET[group]
    size = dist.get_world_size(group)
    if not may_fuse(device, size):
        return ""
    _MET[group] = _meet(group, device, size)
    agreed.add(TUNED)
    return _MET[group]


def may_fuse(device: torch.device, world_size: int) -> bool:
    """Whether any call may be fused, by facts that all ranks share."""
    return world_size in FUSED_WORLD_SIZES and (device.type == "cuda" or interpreting())


def _meet(group: dist.ProcessGroup, device: torch.device, size: int) -> str:
    read(device, size)
    held, kernels = _HELD[size], kernels_allowed()
    unreachable = machine_of(device).unreachable
    fact = f"{kernels}|{held.digest}|{int(held.agreed)}|{unreachable}"
    texts = meet(f"{TUNED}|{fact}", group, _FIRST)[1]
    require_alike(texts)
    facts = [text.split("|", 4)[1:] for text in texts]
    if len({fact[0] for fact in facts}) > 1:
        named = ", ".join(f"{fact[0]} on rank {rank}" for rank, fact in enumerate(facts))
        raise RankMismatchError(
            f"asked: TILEWEAVE_KERNELS={named}; allowed: the same on every rank; "
            "remedy: set it for all ranks, or for none"
        )
    bound = [rank for rank, fact in enumerate(facts) if fact[2] == "1"]
    digests = {facts[rank][1] for rank in bound} or {fact[1] for fact in facts[:1]}
    if len(digests) > 1:
        raise RankMismatchError(
            f"asked: a group of ranks that have planned by other tuned results ({len(digests)} "
            "kinds) in other groups; allowed: the same results on all ranks; remedy: give all "
            "hosts one TILEWEAVE_CACHE, or run tileweave tune --clear on each"
        )
    if any(fact[1] not in digests for fact in facts):
        leader = (bound or [0])[0]
        mine = held.text if dist.get_rank(group) == leader else _NONE
        texts = meet(f"{TUNED}|{mine}", group, _FIRST)[1]
        require_alike(texts)
        text = texts[leader].partition("|")[2]
        if held.text != text:
            _LOG.info("calls are planned by the tuned results of rank %d", leader)
            _hold(size, _Held(text))
    _HELD[size].agreed = True
    return next((fact[3] for fact in facts if fact[3]), "")
