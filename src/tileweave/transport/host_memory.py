"""Anonymous memory that the ranks of one host share: one block per rank, mapped by all.

A block is a ``memfd``. It is in no directory, so its name cannot be guessed or opened early, and
nothing is left over however a rank ends. Peers of the same user open it through
``/proc/<pid>/fd`` and check the token in its name. It is allocated when it is made (no SIGBUS
later) and sealed against shrinking.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Sequence

from tileweave.errors import UnsupportedError
from tileweave.transport.torch_collectives import agree_on_mapping, agree_on_memory

_TOKEN_BYTES = 24


def _make(token: str, nbytes: int) -> int:
    """A descriptor of new shared memory, zeroed, mode 0600. The memory is freed with its last
    descriptor and mapping."""
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
    """Map a peer's block and check that it is the one that the peer announced."""
    process, descriptor, token = place.split()
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unavailable(process, error.strerror or str(error)) from error
    try:
        if os.fstat(opened).st_uid != os.geteuid():
            raise _unavailable(process, "it is another user's")
        link = os.readlink(f"/proc/self/fd/{opened}")
        if not link.startswith(f"/memfd:tileweave-{token}"):
            raise _unavailable(process, "something else is there")
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _unavailable(process: str, why: str) -> UnsupportedError:
    """The error if a peer's block cannot be opened: the peer has given up the call, or the ranks
    see different processes in /proc."""
    exists = os.path.exists(f"/proc/{int(process)}")
    gave_up = ", which may have given up this call" if exists else ""
    again = "; if they are, tileweave.close(group), and call again on every rank" if exists else ""
    return UnsupportedError(
        f"asked: memory of process {process} ({why}{gave_up}); allowed: ranks of one user on one "
        "host, which see each other in /proc, while they call; remedy: start them in one container"
        f"{again}"
    )


def share(
    nbytes: int, rank: int, near: Sequence[int], exchange: Callable[[str], list[str]]
) -> dict[int, mmap.mmap]:
    """Collective. A zeroed block of ``nbytes`` of each rank in ``near``, mapped here, by rank.

    near : the ranks that share memory with this one, itself among them.
    exchange : sends a text of this rank and returns those of all ranks.

    Raises on every rank if one of them has no memory, wants another size, or cannot map the block
    of a peer.
    """
    token, descriptor, failure = secrets.token_hex(_TOKEN_BYTES), -1, ""
    mapped: dict[int, mmap.mmap] = {}
    try:
        descriptor = _make(token, nbytes)
    except OSError as error:
        failure = error.strerror or str(error)
    try:
        places = agree_on_memory(nbytes, failure, f"{os.getpid()} {descriptor} {token}", exchange)
        try:
            for r in near:
                mapped[r] = mmap.mmap(descriptor, nbytes) if r == rank else _open(places[r], nbytes)
        except UnsupportedError as error:
            failure = str(error)
        except (OSError, ValueError) as error:  # no address space, no descriptor
            failure = (
                f"asked: {nbytes} bytes of each of {len(near)} ranks, mapped on rank {rank} "
                f"({error}); allowed: what its limits of address space and open files permit "
                "(ulimit -v, ulimit -n); remedy: raise them there, or call with smaller shapes"
            )
        agree_on_mapping(failure, exchange)  # all have mapped it: the descriptor may go
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return mapped
