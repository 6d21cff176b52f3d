"""NVSHMEM as torch's symmetric memory has it, for the rail of ``TILEWEAVE_RAIL=nvshmem``. It ran
on two GPUs of one host as two nodes, never across a network.

Only this file, ``cuda.py`` and ``rendezvous.py`` use ``torch.distributed._symmetric_memory``, a
private API.

torch (2.11 to 2.13) has one backend of symmetric memory in a process, so with this rail all of it
is NVSHMEM's, that inside a node too. NVSHMEM allocates and frees by collectives of *all* ranks of
the job, without a time limit; torch calls them where a tensor is made, and where Python drops it.
So all ranks make one piece of memory, the *heap*, at the first fused call, and nothing is freed
before the process ends. What operators need is taken from it without peers. A part is never given
out twice: a late rank may still put into one that its owner has closed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tileweave.errors import InputError, UnsupportedError, require

RAIL, RAILS = "TILEWEAVE_RAIL", ("nccl", "nvshmem")
MEGABYTES = "TILEWEAVE_NVSHMEM_MB"
_SUBJECT = "memory of NVSHMEM"
_ALIGN = 1024
_NUMBER = 0x7469_6C65  # of the allocation: torch never frees one that has a number
_LOG = logging.getLogger("tileweave")


def rail_asked() -> str:
    """What moves data between nodes on GPUs: ``TILEWEAVE_RAIL``, default NCCL."""
    text = os.environ.get(RAIL) or RAILS[0]
    require(
        text in RAILS,
        lambda: f"{RAIL}={text!r:.60}",
        ", ".join(RAILS),
        "set one of them, or unset it for nccl",
    )
    return text


def heap_bytes() -> int:
    """The size of the heap: ``TILEWEAVE_NVSHMEM_MB``, default 512."""
    text = os.environ.get(MEGABYTES) or "512"
    if not (text.isascii() and text.isdecimal() and 128 <= int(text) <= 1 << 20):
        raise InputError(
            f"asked: {MEGABYTES}={text!r:.60}; allowed: megabytes, 128 to {1 << 20}; "
            "remedy: unset it for 512"
        )
    return int(text) << 20


def device_library() -> str:
    """The path of NVSHMEM's device library. Raises ``RuntimeError`` if torch finds none, and
    ``ImportError`` if this torch does not look for one."""
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    return NvshmemLibFinder.find_device_library()


def why_missing() -> str:
    """Why NVSHMEM cannot be used in this process; "" if it can."""
    import torch.distributed._symmetric_memory as symm_mem

    try:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} has no CUDA"
        if not symm_mem.is_nvshmem_available():
            return f"torch {torch.__version__} is without NVSHMEM, or finds no libnvshmem_host.so"
        device_library()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no NVSHMEM for Triton: {error}"
    except RuntimeError:
        return "no libnvshmem_device.bc (package nvidia-nvshmem-cu13, or NVSHMEM_LIB_DIR)"
    return ""


def initialise_module(module: int) -> None:
    """Give a loaded module (``CUmodule``) the state of NVSHMEM, before its first launch. Not while
    a CUDA graph is captured."""
    from torch._C import _distributed_c10d as library

    library._nvshmemx_cumodule_init(module)


class Heap:
    """The memory of NVSHMEM in this process.

    local : all of it, uint8.
    bases : where that of each rank of the job is mapped here; 0 where it is not.
    """

    def __init__(self, local: torch.Tensor, bases: Sequence[int]) -> None:
        self.local, self.bases = local, tuple(bases)
        self.base = local.data_ptr()
        self._used = 0

    def take(self, nbytes: int) -> tuple[int, str]:
        """Take a part: (where it begins, why it failed or ""). Parts are zeroed. Not collective."""
        begin, size = self._used, -(-nbytes // _ALIGN) * _ALIGN
        if begin + size > self.local.numel():
            return 0, f"{self.local.numel() - begin} are left of {MEGABYTES}"
        self._used += size
        return begin, ""


_HEAPS: list[Heap] = []  # at most one: of this process


def heap_of(
    group: dist.ProcessGroup,
    device: torch.device,
    mapped: bool,
    exchange: Callable[[str], list[str]],
) -> Heap:
    """The heap of this process. Collective over all ranks of the job the first time, when ``group``
    must have all of them.

    mapped : whether some ranks share a node, so that memory of others is mapped.
    exchange : sends a text to the ranks of ``group``, and returns those of all.

    Raises
    ------
    InputError
        The first call is in a group of some ranks only.
    UnsupportedError
        NVSHMEM cannot be used on a rank. The same on all ranks.
    """
    if not _HEAPS:
        ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
        every = dist.get_world_size()
        require(
            ranks == list(range(every)),
            lambda: (
                f"{RAIL}=nvshmem, and a first fused call in a group of {len(ranks)} of {every} "
                "ranks"
            ),
            "a first call in a group of all ranks, which make NVSHMEM's memory together",
            f"make such a call before, or unset {RAIL}",
        )
        nbytes = heap_bytes()
        _agree(exchange, nbytes, why_missing())
        heap, failure = None, ""
        try:
            heap = _make(nbytes, device, mapped)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            failure = f"{type(error).__name__}: {error}"
        _agree(exchange, nbytes, failure)  # all memory is zeroed when this returns
        assert heap is not None, "a rank that fails does not agree"
        _HEAPS.append(heap)
        if dist.get_rank() == 0:
            _LOG.warning(
                "%s=nvshmem: all symmetric memory is NVSHMEM's, %d MB on each rank; this was never "
                "run across a network",
                RAIL,
                nbytes >> 20,
            )
    return _HEAPS[0]


def _agree(exchange: Callable[[str], list[str]], nbytes: int, failure: str) -> None:
    """Raise the same error on all ranks if one of them fails, or sizes differ."""
    texts = exchange(f"{_SUBJECT}|{nbytes >> 20}|{failure[:200]}")
    rows = [text.split("|", 2)[1:] for text in texts]
    failed = [f"rank {rank}: {row[1]}" for rank, row in enumerate(rows) if row[1]]
    if failed:
        raise UnsupportedError(
            f"asked: {RAIL}=nvshmem, but {'; '.join(failed)}; allowed: a torch with NVSHMEM, its "
            f"device library, and {MEGABYTES} of free memory, before other symmetric memory is "
            f"made; remedy: install it, or unset {RAIL} for NCCL"
        )
    sizes = [row[0] for row in rows]
    require(
        len(set(sizes)) == 1,
        lambda: f"{MEGABYTES}={', '.join(sizes)} by rank",
        "the same on every rank",
        "set it for all ranks, or for none",
    )


def _make(nbytes: int, device: torch.device, mapped: bool) -> Heap:
    """Collective over the job."""
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory

    symm_mem.set_backend("NVSHMEM")
    local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, None, _NUMBER)
    local.zero_()
    bases = [0] * dist.get_world_size()
    if mapped:
        world = dist.group.WORLD
        assert world is not None, "there is a group, so there is a world"
        bases = list(symm_mem.rendezvous(local, world.group_name).buffer_ptrs)
    bases[dist.get_rank()] = local.data_ptr()
    torch.cuda.synchronize(device)
    return Heap(local, bases)
