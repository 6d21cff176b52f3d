"""torch's collectives under the names of the installed torch (2.13 renamed the flat ones), those
that are queued on the current stream, and what ranks agree on before them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from tileweave.errors import UnsupportedError
from tileweave.transport.rendezvous import MAPPED, MEMORY, meet, refuse_differences, require_alike
from tileweave.transport.workspace import REGISTRY

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_flat = dist.all_to_all_single

# The functions of torch.distributed check arguments, log, and look for modes, all in Python: more
# than half of their host time. Those below call the methods of the group, as these functions do.
# Sums of all-reduce and reduce-scatter are what options ask for by default.
_GATHER, _SCATTER, _REDUCE, _EXCHANGE = (
    AllgatherOptions(),
    ReduceScatterOptions(),
    AllreduceOptions(),
    AllToAllOptions(),
)
for _options in (_GATHER, _SCATTER, _REDUCE, _EXCHANGE):
    _options.asyncOp = False


def _finish(work: dist.Work | None) -> None:
    """Some backends do not order their work with the current stream by themselves."""
    if work is not None:
        work.wait()


def queue_all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Queue on the current stream: out = the x of all ranks, concatenated. Both contiguous."""
    _finish(group._allgather_base(out, x, _GATHER))


def queue_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Queue on the current stream: out = this rank's part of the sum of x over ranks. Both
    contiguous."""
    _finish(group._reduce_scatter_base(out, x, _SCATTER))


def queue_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Queue on the current stream: x = its sum over ranks. Contiguous."""
    _finish(group.allreduce([x], _REDUCE))


def queue_all_to_all(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Queue on the current stream: part p of x to rank p; out = the parts that arrive. Both
    contiguous; parts are of one size."""
    _finish(group.alltoall_base(out, x, [], [], _EXCHANGE))


def queue_all_to_all_parts(
    out: torch.Tensor,
    x: torch.Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup,
) -> None:
    """As :func:`queue_all_to_all`, of flat tensors whose parts have these numbers of elements."""
    _finish(group.alltoall_base(out, x, received, sent, _EXCHANGE))


_LONGEST = 512  # characters of the text of a rank


def agree(text: str, group: dist.ProcessGroup, what: str = "") -> None:
    """Collective. Raise the same :class:`RankMismatchError` on every rank if their texts differ.

    ``what`` names the subject in a :class:`PeerTimeout`; "" is the text itself. That error is
    raised if a peer does not come in time, and nothing of it is left in torch's group.

    A text that is too long is replaced by its beginning and a checksum of all of it. The number of
    calls that failed on this rank is part of the text, so ranks where it differs are refused.
    """
    broken = REGISTRY.broken_off(group.group_name)
    if broken:
        what, text = what or text, f"{text} after {broken}"
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 20]}... crc32 {zlib.crc32(text.encode()):08x}"
    require_alike(meet(text, group, what or text)[1])


def agree_on_memory(
    nbytes: int, failure: str, place: str, exchange: Callable[[str], list[str]]
) -> list[str]:
    """Collective. Every rank tells the others how much symmetric memory it wants, what failed (""
    if nothing did), and where its memory is. Returns where the memory of each rank is, in rank
    order.

    ``exchange`` sends a text of this rank and returns those of all ranks. If a rank failed or sizes
    differ, every rank raises the same error at once. So no rank stays in a collective that others
    have given up, and none writes past the end of a peer's memory.
    """
    rows = [
        text.split("|", 3)[1:] for text in exchange(f"{MEMORY}|{nbytes}|{failure[:60]}|{place}")
    ]
    failed = [f"rank {rank}: {row[0]} bytes, {row[1]}" for rank, row in enumerate(rows) if row[1]]
    if failed:
        raise UnsupportedError(
            f"asked: memory that all ranks can map ({'; '.join(failed)}); "
            "allowed: what that rank has free; "
            "remedy: free some there, or call with smaller shapes"
        )
    refuse_differences(
        [f"{row[0]} bytes" for row in rows], " (TILEWEAVE_DEBUG=1 compares all of it)"
    )
    return [row[2] for row in rows]


def agree_on_mapping(failure: str, exchange: Callable[[str], list[str]]) -> None:
    """Collective, after :func:`agree_on_memory`: raise on every rank if one says why it cannot map
    a peer's ("": it can)."""
    failures = [
        text.partition("|")[2] for text in exchange(f"{MAPPED}|{failure}") if text != f"{MAPPED}|"
    ]
    if failures:
        raise UnsupportedError(failure or failures[0])
