"""Meetings of one group on the host: ranks exchange texts, and map symmetric memory. All waits are
bounded in time.

Texts go through the store of the group and not through a collective. A collective that one rank has
given up stays in torch's group and disturbs the next one; gloo ends the process then. A key of the
store says how a meeting ended. The first rank to write it decides: either all ranks go on from this
meeting, or it was given up, and ranks that come later go on to the next one. So ranks that gave up
at different times meet again.

torch (2.11 to 2.13) numbers the messages of a rendezvous by a counter of the process, not of the
group. After a rendezvous of only some ranks of a group, say of a sub-group, the next one of the
whole group looks for messages under different numbers and waits for ever (pytorch issue 196082). It
also waits for ever for a rank that never comes. So :class:`Meeting` gives torch a group of its own,
whose store counts messages from the first one of each rendezvous and waits no longer than
``TILEWEAVE_TIMEOUT``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _get_process_group_store

from tileweave.errors import PeerTimeout, RankMismatchError
from tileweave.transport.workspace import timeout_seconds

_NUMBERED = re.compile(r"(.*?/)(\d+)((?:/.*)?)$")  # topic/number, topic/number/...
_MET, _GIVEN_UP = "met", "given up"  # how a meeting ended
_CLOSED_PREFIX = "away|"  # the texts of ranks that have closed their workspace begin with it
MAPPING = "mapping symmetric memory"
MEMORY, HERE, MAPPED = "memory", "here", "mapped"  # subjects of the meetings of a workspace
TUNED = "tuned"  # subject of the meeting before the first call of a matmul
_DESCRIPTIONS = {
    TUNED: "the first call of a matmul operator",
    MEMORY: "the first call of an operator",
    HERE: "an operator that needs more memory",
    MAPPED: "an operator whose memory is mapped",
}

# After a fault, the times when ranks come to the next meeting may differ as much as waits inside a
# kernel may last, up to twice the timeout.
LATE = 2.5
_STORES: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
# groups whose workspace this rank has closed and has not made again
_CLOSED: WeakSet[dist.ProcessGroup] = WeakSet()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of ``group``, through a connection of its own. A wait occupies the connection, and
    threads that use other groups would wait, too."""
    found = _STORES.get(group)
    if found is None:
        store = _get_process_group_store(group)
        found = _STORES[group] = store.clone()  # type: ignore[attr-defined]
    return found


def meet(text: str, group: dist.ProcessGroup, what: str) -> tuple[int, list[str]]:
    """Collective. The number of this meeting, the same on all ranks, and the texts of all ranks.
    ``what`` names the purpose in errors.

    If only some ranks have closed their workspace, the others raise an error, and those that have
    closed it wait for the next meeting.
    """
    store = dist.PrefixStore("tileweave-meetings", store_of(group))
    rank, size, closed_here = dist.get_rank(group), dist.get_world_size(group), group in _CLOSED
    seconds = timeout_seconds() * (LATE if closed_here else 1.0)
    while True:
        # the number is in the store, which may outlive the group and serve the next one
        number = store.add(f"last-of-{rank}", 1)
        keys = [f"{number}/{other}" for other in range(size)]
        store.set(keys[rank], _CLOSED_PREFIX + text if closed_here else text)
        end = ""
        try:
            store.wait(keys, timedelta(seconds=seconds))
            end = _end(store, number, _MET)
        except RuntimeError as error:
            end, absent = _give_up(store, number, keys)
            if end != _MET:  # else the last rank came just now, and the others rely on this one
                raise PeerTimeout(what, rank, absent, -1, 0, 0, seconds, "meeting") from error
        finally:
            if not end:  # Ctrl-C, say
                _give_up(store, number, keys)
        texts = [text.decode() for text in store.multi_get(keys)]
        if number > 1:  # all ranks that came to this meeting have read the texts of the last one
            store.delete_key(f"{number - 1}/{rank}")
            if rank == 0:
                store.delete_key(f"{number - 1}/end")
        closed_ranks = [r for r, text in enumerate(texts) if text.startswith(_CLOSED_PREFIX)]
        if end == _GIVEN_UP or (closed_here and len(closed_ranks) < size):
            continue
        if closed_ranks and not closed_here:
            raise PeerTimeout(what, rank, closed_ranks[0], -1, 0, 0, 0.0, "closed")
        return number, [text.removeprefix(_CLOSED_PREFIX) for text in texts]


def _end(store: dist.Store, number: int, wanted: str) -> str:
    """How meeting ``number`` ended: as ``wanted``, unless another rank decided before."""
    return store.compare_set(f"{number}/end", "", wanted).decode()


def _give_up(store: dist.Store, number: int, keys: Sequence[str]) -> tuple[str, int]:
    """How the meeting ended, and the rank that did not come; -1 if that is unknown."""
    with suppress(RuntimeError):  # raised if the store is gone
        absent = next((other for other, key in enumerate(keys) if not store.check([key])), -1)
        return _end(store, number, _GIVEN_UP), absent
    return _GIVEN_UP, -1


def reopened(group: dist.ProcessGroup) -> None:
    """Note that ``group`` has a workspace on this rank again, which was set aside meanwhile."""
    _CLOSED.discard(group)


class Texts:
    """The texts that the ranks of ``group`` exchange while they share one workspace."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.number = group, 0

    def exchange(self, text: str) -> list[str]:
        """Collective. The texts of all ranks. All must begin with the same subject; ``|`` separates
        it from the rest."""
        number, texts = meet(text, self.group, MAPPING)
        require_alike(texts)
        self.number = number
        _CLOSED.discard(self.group)
        return texts

    def barrier(self) -> None:
        self.exchange(HERE)

    def close(self) -> None:
        """Mark the workspace of this rank as closed. Not collective."""
        if self.number:
            _CLOSED.add(self.group)


def require_alike(texts: Sequence[str]) -> None:
    """Raise the same :class:`RankMismatchError` on every rank if the subjects of texts differ."""
    refuse_differences([_DESCRIPTIONS.get(text.partition("|")[0], text) for text in texts])


def refuse_differences(texts: Sequence[str], hint: str = "") -> None:
    """Raise the same :class:`RankMismatchError` on every rank if ``texts`` are not all equal."""
    common = max(sorted(set(texts)), key=texts.count)
    odd = [rank for rank, text in enumerate(texts) if text != common]
    if odd:
        differences = "; ".join(f"rank {rank}: {texts[rank]}" for rank in odd)
        raise RankMismatchError(
            f"asked: {differences}, where the other ranks have {common}; allowed: the same "
            "operator, shapes, dtypes and options on every rank; "
            f"remedy: look at what rank {odd[0]} passes{hint}"
        )


class Messages(dist.Store):
    """``store`` with renumbered keys ``topic/number/...``: each topic of a round starts at 0."""

    def __init__(self, store: dist.Store, what: str, rank: int) -> None:
        super().__init__()
        self._store, self._what, self._rank = store, what, rank
        self._round = 0
        self._first: dict[str, int] = {}
        self._seconds = 0.0

    def start_round(self, number: int) -> None:
        """Call this before each rendezvous with a new ``number``, the same on all ranks."""
        self._round = number
        self._first.clear()
        self._seconds = timeout_seconds()

    def _own(self, key: str) -> str:
        found = _NUMBERED.match(key)
        if found:
            topic, number, rest = found.groups()
            key = f"{topic}{int(number) - self._first.setdefault(topic, int(number))}{rest}"
        return f"{self._round}/{key}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._own(key) for key in keys])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._own(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get([self._own(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. ``timeout`` is torch's and is ignored, since it is far too long for us."""
        try:
            self._store.wait([self._own(key) for key in keys], timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise PeerTimeout(
                self._what, self._rank, -1, -1, 0, 0, self._seconds, "meeting"
            ) from error


class Meeting(Texts):
    """Maps symmetric memory between the ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        rank, store = dist.get_rank(group), store_of(group)
        self._name = f"tileweave-{group.group_name}-{store.add(f'tileweave-workspaces-{rank}', 1)}"
        self._messages = Messages(dist.PrefixStore("tileweave-rendezvous", store), MAPPING, rank)
        self._group = dist.ProcessGroup(self._messages, rank, dist.get_world_size(group))
        # torch 2.13 asks the backend of the group whether to use it
        if hasattr(dist.ProcessGroup, "use_pg_for_symm_mem_rendezvous"):
            kinds, backend = dist.ProcessGroup.BackendType, group._get_backend(device)
            kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
            # otherwise the backend would lose its own
            self._group.bound_device_id = group.bound_device_id
            self._group._register_backend(device, kind, backend)
            self._group._set_default_backend(kind)
        _register_process_group(self._name, self._group)  # type: ignore[arg-type]

    def rendezvous(self, local: torch.Tensor) -> Any:
        """torch's handle on ``local`` (from ``symm_mem.empty``) of all ranks; None if it cannot be
        mapped.

        Call it after an :meth:`exchange`, which makes sure that all ranks are there and sets the
        number.
        """
        import torch.distributed._symmetric_memory as symm_mem

        self._messages.start_round(self.number)
        return symm_mem.rendezvous(local, self._name)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        _unregister_process_group(self._name)  # type: ignore[arg-type]
