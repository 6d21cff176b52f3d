"""torch's collectives under the names that this torch has (2.13 renamed the flat ones), and what
ranks agree on before them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch.distributed as dist

from tileweave.errors import UnsupportedError
from tileweave.transport.rendezvous import MAPPED, MEMORY, meet, refuse_differences, require_alike
from tileweave.transport.workspace import REGISTRY

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_flat = dist.all_to_all_single

_LONGEST = 512  # characters of a rank's text


def agree(text: str, group: dist.ProcessGroup, what: str = "") -> None:
    """Collective: raise the same :class:`RankMismatchError` on every rank if their texts differ.

    ``what`` they are about; "": the text itself.

    Of a text that is too long the beginning and a checksum of all: texts that differ still do. A
    peer that does not come in time is a :class:`PeerTimeout`, and leaves nothing in torch's group.
    Calls that broke off on some ranks only differ.
    """
    broken = REGISTRY.broken_off(group.group_name)
    if broken:
        what, text = what or text, f"{text} behind {broken}"
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 20]}... crc32 {zlib.crc32(text.encode()):08x}"
    require_alike(meet(text, group, what or text)[1])


def agree_on_memory(
    nbytes: int, failure: str, place: str, exchange: Callable[[str], list[str]]
) -> list[str]:
    """Collective, while symmetric memory is made: every rank says how much it wants, what failed
    ("": nothing), and where.

    ``exchange`` brings all ranks' texts. Returns the places, by rank. If a rank failed or sizes
    differ, every rank raises the same error at once: nobody is left in a collective that others
    have given up, and nobody writes past a peer's end.
    """
    rows = [
        text.split("|", 3)[1:] for text in exchange(f"{MEMORY}|{nbytes}|{failure[:60]}|{place}")
    ]
    failed = [f"rank {rank}: {row[0]} bytes, {row[1]}" for rank, row in enumerate(rows) if row[1]]
    if failed:
        raise UnsupportedError(
            f"asked: memory that all ranks can map ({'; '.join(failed)}); allowed: what that rank has free; "
            "remedy: free some there, or call with smaller shapes"
        )
    refuse_differences(
        [f"{row[0]} bytes" for row in rows], " (TILEWEAVE_DEBUG=1 compares all of it)"
    )
    return [row[2] for row in rows]


def agree_on_mapping(failure: str, exchange: Callable[[str], list[str]]) -> None:
    """Collective, behind :func:`agree_on_memory`: raise on every rank if one says why it cannot map
    a peer's ("": it can)."""
    failures = [
        text.partition("|")[2] for text in exchange(f"{MAPPED}|{failure}") if text != f"{MAPPED}|"
    ]
    if failures:
        raise UnsupportedError(failure or failures[0])
