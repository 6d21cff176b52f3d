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

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from tileweave.errors import PeerTimeout, RankMismatchError
from tileweave.transport.group_store import Conversation, ask_store
from tileweave.transport.nvshmem import RAIL, RAILS, rail_asked
from tileweave.transport.workspace import timeout_seconds

T = TypeVar("T")

_NUMBERED = re.compile(r"(.*?/)(\d+)((?:/.*)?)$")  # topic/number, topic/number/...
_MET, _GIVEN_UP = "met", "given up"  # how a meeting ended
# These decide which meetings a call has, or what moves its data.
_SWITCHES = ("TRITON_INTERPRET", "TILEWEAVE_DEBUG")
_CLOSED_PREFIX = "away|"  # the texts of ranks that have closed their workspace begin with it
MAPPING = "mapping symmetric memory"
MEMORY, HERE, MAPPED = "memory", "here", "mapped"  # subjects of the meetings of a workspace
TUNED = "tuned"  # subject of the meeting before the first call of a matmul
NODES = "nodes"  # of the one before the first call of a group
_DESCRIPTIONS = {
    TUNED: "the first call of a matmul operator",
    NODES: "the first call of a group",
    MEMORY: "the first call of an operator",
    HERE: "an operator that needs more memory",
    MAPPED: "an operator whose memory is mapped",
}

# After a fault, the times when ranks come to the next meeting may differ as much as waits inside a
# kernel may last, up to twice the timeout.
LATE = 2.5
# groups whose workspace this rank has closed and has not made again
_CLOSED: WeakSet[dist.ProcessGroup] = WeakSet()


def meet(text: str, group: dist.ProcessGroup, what: str) -> tuple[int, list[str]]:
    """Collective. The number of this meeting, the same on all ranks, and the texts of all ranks.
    ``what`` names the purpose in errors.

    If only some ranks have closed their workspace, the others raise an error, and those that have
    closed it wait for the next meeting.
    """
    seconds = timeout_seconds() * (LATE if group in _CLOSED else 1.0)
    text = f"{_switches()}|{text}"
    number, texts = ask_store(
        group, what, seconds, lambda talk: _meet(talk, text, group, what, seconds)
    )
    switches, texts = zip(*[text.split("|", 1) for text in texts], strict=True)
    _refuse_switches(switches)
    return number, list(texts)


def _switches() -> str:
    """A digit for each variable: whether those of :data:`_SWITCHES` are on in this process, and
    whether the rail is not NCCL."""
    on = [os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y") for name in _SWITCHES]
    return "".join(str(int(each)) for each in [*on, rail_asked() != RAILS[0]])


def _refuse_switches(switches: Sequence[str]) -> None:
    """Raise the same error on every rank if a variable is on for some ranks only: these make other
    calls."""
    for number, setting in enumerate((*(f"{name}=1" for name in _SWITCHES), f"{RAIL}={RAILS[1]}")):
        on = [rank for rank, each in enumerate(switches) if each[number] == "1"]
        if 0 < len(on) < len(switches):
            raise RankMismatchError(
                f"asked: {setting} on ranks {on} only, of {len(switches)}; allowed: the same on "
                "every rank; remedy: set it for all ranks, or for none"
            )


def _meet(
    talk: Conversation, text: str, group: dist.ProcessGroup, what: str, seconds: float
) -> tuple[int, list[str]]:
    store = dist.PrefixStore("tileweave-meetings", talk.store)
    rank, size, closed_here = dist.get_rank(group), dist.get_world_size(group), group in _CLOSED
    while True:
        talk.allow(seconds)
        # the number is in the store, which may outlive the group and serve the next one
        number = store.add(f"last-of-{rank}", 1)
        keys = [f"{number}/{other}" for other in range(size)]
        if talk.left:  # the store was silent; ranks that read the text below must not go on alone
            _end(store, number, _GIVEN_UP)
        store.set(keys[rank], _CLOSED_PREFIX + text if closed_here else text)
        if talk.wait(keys, store, seconds):
            end = _end(store, number, _MET)
        else:
            absent = next((other for other, key in enumerate(keys) if not store.check([key])), -1)
            end = _end(store, number, _GIVEN_UP)
            if end != _MET:  # else the last rank came just now, and the others rely on this one
                raise PeerTimeout(what, rank, absent, -1, 0, 0, seconds, "meeting")
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
    """The store of ``group`` with renumbered keys ``topic/number/...``: a topic of a round starts
    at 0."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group_of = ref(group)
        self._round = 0
        self._first: dict[str, int] = {}
        self._seconds = 0.0

    def start_round(self, number: int) -> None:
        """Call this before each rendezvous with a new ``number``, the same on all ranks."""
        self._round = number
        self._first.clear()
        self._seconds = timeout_seconds()

    def _ask(self, function: Callable[[Conversation, dist.Store], T]) -> T:
        group = self._group_of()
        assert group is not None, "the meeting of a group ends with it"
        return ask_store(
            group,
            MAPPING,
            self._seconds,
            lambda talk: function(talk, dist.PrefixStore("tileweave-rendezvous", talk.store)),
        )

    def _own(self, key: str) -> str:
        found = _NUMBERED.match(key)
        if found:
            topic, number, rest = found.groups()
            key = f"{topic}{int(number) - self._first.setdefault(topic, int(number))}{rest}"
        return f"{self._round}/{key}"

    def set(self, key: str, value: Any) -> None:
        own = self._own(key)
        self._ask(lambda talk, store: store.set(own, value))

    def add(self, key: str, value: int) -> int:
        own = self._own(key)
        return self._ask(lambda talk, store: store.add(own, value))

    def check(self, keys: Sequence[str]) -> bool:
        own = [self._own(key) for key in keys]
        return self._ask(lambda talk, store: store.check(own))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        own = [self._own(key) for key in keys]
        return self._ask(lambda talk, store: store.multi_get(own))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. ``timeout`` is torch's and is ignored, since it is far too long for us."""
        own, seconds = [self._own(key) for key in keys], self._seconds
        if not self._ask(lambda talk, store: talk.wait(own, store, seconds)):
            rank = dist.get_rank(self._group_of())
            raise PeerTimeout(MAPPING, rank, -1, -1, 0, 0, seconds, "meeting")


class Meeting(Texts):
    """Maps symmetric memory between the ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        rank, seconds = dist.get_rank(group), timeout_seconds()
        count = f"tileweave-workspaces-{rank}"
        number = ask_store(group, MAPPING, seconds, lambda talk: talk.store.add(count, 1))
        self._name = f"tileweave-{group.group_name}-{number}"
        self._messages = Messages(group)
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
