"""torch's collectives under the names that this torch has (2.13 renamed the flat ones), and a bounded wait for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tileweave.errors import PeerTimeout, RankMismatchError, UnsupportedError
from tileweave.transport.workspace import timeout_seconds

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_flat = dist.all_to_all_single

T = TypeVar("T", int, str)
_TEXT_BYTES = 512  # of a rank
_MEMORY = "memory|"  # how the text of a rank begins that makes room


def wait_bounded(work: dist.Work | None, what: str, rank: int) -> None:
    """Wait for a collective no longer than ``TILEWEAVE_TIMEOUT``: torch's own default is 10 to 30 minutes."""
    seconds = timeout_seconds()
    try:
        if work is not None:
            work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise PeerTimeout(what, rank, -1, -1, 0, 0, seconds) from error


def gather_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Collective: the texts of all ranks, ASCII. gloo takes a CPU device only.

    Of one that is longer than ``_TEXT_BYTES`` the beginning and a checksum of all: texts that differ still do.
    """
    block = text.encode("ascii", "replace")
    if len(block) > _TEXT_BYTES:
        block = block[: _TEXT_BYTES - 20] + b"... crc32 %08x" % zlib.crc32(block)
    block = block.ljust(_TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(device)
    everyone = torch.empty(dist.get_world_size(group) * _TEXT_BYTES, dtype=torch.uint8, device=device)
    wait_bounded(all_gather_flat(everyone, mine, group=group, async_op=True), "barrier", dist.get_rank(group))
    return [bytes(row.tolist()).rstrip(b"\0").decode("ascii") for row in everyone.view(-1, _TEXT_BYTES).cpu()]


def the_odd(values: Sequence[T]) -> tuple[T, list[int]]:
    """What most ranks have, and the ranks that have something else: alike on every rank, also where there is no majority."""
    common = max(sorted(set(values)), key=values.count)
    return common, [rank for rank, value in enumerate(values) if value != common]


def agree(text: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective: raise the same :class:`RankMismatchError` on every rank if their texts, ASCII, differ."""
    texts = gather_texts(text, group, device if dist.get_backend(group) != "gloo" else torch.device("cpu"))
    texts = ["the first call of an operator" if text.startswith(_MEMORY) else text for text in texts]
    common, odd = the_odd(texts)
    if odd:
        differences = "; ".join(f"rank {rank}: {texts[rank]}" for rank in odd)
        raise RankMismatchError(
            f"asked: {differences}, where the other ranks have {common}; allowed: the same operator, shapes, dtypes "
            f"and options on every rank; remedy: look at what rank {odd[0]} passes"
        )


def agree_on_memory(nbytes: int, failure: str, place: str, exchange: Callable[[str], list[str]]) -> list[str]:
    """Collective, while symmetric memory is made: every rank says how much it wants, what failed ("": nothing), and where.

    ``exchange`` brings all ranks' texts. Returns the places, by rank. If a rank failed or sizes differ, every rank raises the
    same error at once: nobody is left in a collective that others have given up, and nobody writes past a peer's end.
    """
    texts = exchange(f"{_MEMORY}{nbytes}|{failure[:60]}|{place}")
    others = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if not text.startswith(_MEMORY)]
    if others:
        raise RankMismatchError(
            f"asked: {'; '.join(others)}, where the other ranks call an operator for the first time; allowed: the same "
            "operators in the same order, with the same options, on every rank; remedy: look at what these ranks call"
        )
    rows = [text.removeprefix(_MEMORY).split("|", 2) for text in texts]
    failed = [f"rank {rank}: {row[0]} bytes, {row[1]}" for rank, row in enumerate(rows) if row[1]]
    if failed:
        raise UnsupportedError(
            f"asked: memory that all ranks can map ({'; '.join(failed)}); allowed: what that rank has free; "
            "remedy: free some there, or call with smaller shapes"
        )
    sizes = [int(row[0]) for row in rows]
    common, odd = the_odd(sizes)
    if odd:
        asked = ", ".join(f"rank {rank}: {sizes[rank]} bytes" for rank in odd)
        raise RankMismatchError(
            f"asked: {asked}, where the other ranks reserve {common}; allowed: the same operator, shapes, dtypes and options "
            f"on every rank; remedy: look at what rank {odd[0]} passes (TILEWEAVE_DEBUG=1 compares all of it)"
        )
    return [row[2] for row in rows]
