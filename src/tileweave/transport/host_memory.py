"""Anonymous memory that the ranks of one host share: a block of each rank, mapped by all.

A block is a ``memfd``: it stands in no directory, so nothing can be guessed, opened early, or left
behind, however a rank ends. Peers of the same user open it through ``/proc/<pid>/fd``, and check
the token that it carries. It is allocated when it is made (no SIGBUS later) and sealed against
shrinking.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable

from tileweave.errors import UnsupportedError
from tileweave.transport.rendezvous import MAPPED
from tileweave.transport.torch_collectives import agree_on_memory

_TOKEN_BYTES = 24


def _make(token: str, nbytes: int) -> int:
    """A descriptor of new shared memory, zeroed, mode 0600; it goes with its last descriptor and
    mapping."""
    descriptor = os.memfd_create(f"tileweave-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open(place: str, nbytes: int) -> mmap.mmap:
    """Map a peer's block, which must be the one it told us of."""
    process, descriptor, token = place.split()
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unavailable(process, error.strerror or str(error)) from error
    try:
        link = os.readlink(f"/proc/self/fd/{opened}")
        if not link.startswith(f"/memfd:tileweave-{token}"):
            raise _unavailable(process, "something else stands there")
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _unavailable(process: str, why: str) -> UnsupportedError:
    """A rank that has given up has let go of its block; ranks that see other processes in /proc
    look at somebody else's."""
    there = os.path.exists(f"/proc/{int(process)}")
    return UnsupportedError(
        f"asked: memory of process {process} ({why}{', which may have given up this call' if there else ''}); allowed: ranks "
        "of one user on one host, which see each other in /proc, while they call; remedy: start them in one container"
        + ("; if they are, tileweave.close(group), and call again on every rank" if there else "")
    )


def share(nbytes: int, rank: int, exchange: Callable[[str], list[str]]) -> list[mmap.mmap]:
    """Collective: a zeroed block of ``nbytes`` of every rank, mapped here, by rank. ``exchange``
    brings all ranks' texts.

    Raises on every rank if one has no memory, wants another size, or cannot map a peer's.
    """
    token, descriptor, failure, mapped = secrets.token_hex(_TOKEN_BYTES), -1, "", []
    try:
        descriptor = _make(token, nbytes)
    except OSError as error:
        failure = error.strerror or str(error)
    try:
        places = agree_on_memory(nbytes, failure, f"{os.getpid()} {descriptor} {token}", exchange)
        try:
            mapped = [
                mmap.mmap(descriptor, nbytes) if r == rank else _open(place, nbytes)
                for r, place in enumerate(places)
            ]
        except UnsupportedError as error:
            failure = str(error)
        answers = exchange(f"{MAPPED}|{failure}")  # all have mapped it: the descriptor may go
        failures = [text.partition("|")[2] for text in answers if text != f"{MAPPED}|"]
        if failures:
            raise UnsupportedError(failure or failures[0])
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return mapped
