"""The store of a group, with every call bounded in time.

torch's stores bound ``wait`` and ``get`` alone, and even these wait without a bound for the answer
to a wait that has timed out. If the process that serves the store is stopped, any other call blocks
for ever. So a rank talks to the store on a thread of its own. If the thread is not done in time, it
is left alone together with its connection, and the caller raises :class:`PeerTimeout`. The thread
ends when the store answers or its connection breaks.

Ranks wait for keys by asking again and again. So each request to the store is one that a running
store answers at once, and an error of a request means that the store is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from tileweave.errors import PeerTimeout, TileweaveError
from tileweave.transport.workspace import timeout_seconds

T = TypeVar("T")

GRACE = 1.5  # seconds that the store itself may take in all, beyond the wait for peers
_OFTEN, _SELDOM = 1e-4, 1e-2  # seconds between two requests for the same keys
_CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


class Conversation:
    """What one thread asks the store of a group.

    store : the connection of this rank; only the thread uses it.
    left : whether the caller no longer waits for the result. Peers must then be told.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.store: Any = None
        self.left = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._group = group
        self._thread: threading.Thread | None = None
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """The caller waits this long for peers from now on, and ``TILEWEAVE_TIMEOUT`` for the
        store."""
        self.heard = time.monotonic()
        self._end, self.patience = self.heard + seconds + GRACE, timeout_seconds()

    def left_to_wait(self) -> float:
        """Seconds, 0 if it is too late."""
        return max(min(self.heard + self.patience, self._end) - time.monotonic(), 0.0)

    def begin(self, function: Callable[[Conversation], object]) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="tileweave-store", daemon=True
        )
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Whether the thread ends within ``seconds``.

        Having the result is not enough: a thread that is in torch's C++ while the interpreter exits
        aborts the process.
        """
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True  # Ctrl-C came before it started

    def _run(self, function: Callable[[Conversation], object]) -> None:
        try:
            self.store = _connection(self._group)
            if not self.left:
                self.value = function(self)
        except (TileweaveError, RuntimeError, ValueError, TypeError, OSError) as error:
            self.error = error

    def wait(self, keys: Sequence[str], store: dist.Store, seconds: float) -> bool:
        """Whether all ``keys`` were there in time, and the caller still waits."""
        began = time.monotonic()
        while not self.left:
            if store.check(list(keys)):
                return not self.left  # the answer may have taken longer than the caller waited
            self.heard = time.monotonic()
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            time.sleep(min(max(waited / 8, _OFTEN), _SELDOM, seconds - waited))
        return False


def _connection(group: dist.ProcessGroup) -> dist.Store:
    """A connection of this rank's own: threads that use other groups must not wait for this one."""
    found = _CONNECTIONS.get(group)
    if found is None:
        store = _get_process_group_store(group)
        found = _CONNECTIONS[group] = store.clone()  # type: ignore[attr-defined]
    return found


def ask_store(
    group: dist.ProcessGroup,
    what: str,
    seconds: float,
    function: Callable[[Conversation], T],
) -> T:
    """``function(conversation)``, which runs on a thread of its own.

    ``seconds`` : how long it may wait for peers; it may change that with ``conversation.allow``.
    ``what`` names the purpose in errors. Raises :class:`PeerTimeout` with ``at="store"`` if the
    store does not answer or is gone.
    """
    talk = Conversation(group, seconds)
    ended = False
    try:
        talk.begin(function)
        while not talk.ended(talk.left_to_wait()):
            if not talk.left_to_wait():
                raise _unanswered(group, what, talk.patience)
        ended = True
    finally:
        if not ended:  # also Ctrl-C: the thread tells the peers, if the store still answers
            talk.left = True
            if not talk.ended(min(talk.left_to_wait(), GRACE)):
                _CONNECTIONS.pop(group, None)
    if isinstance(talk.error, RuntimeError) and not isinstance(talk.error, TileweaveError):
        _CONNECTIONS.pop(group, None)
        raise _unanswered(group, what, 0.0) from talk.error
    if talk.error is not None:
        raise talk.error
    return talk.value


def _unanswered(group: dist.ProcessGroup, what: str, seconds: float) -> PeerTimeout:
    return PeerTimeout(what, dist.get_rank(group), -1, -1, 0, 0, seconds, "store", _server(group))


def _server(group: dist.ProcessGroup) -> str:
    """Where the store of ``group`` is served, and by which process, as far as that is known."""
    store: Any = _get_process_group_store(group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return type(store).__name__
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    process = "torchrun's agent" if agent else "rank 0 of the job, or its launcher"
    return f"{store.host}:{store.port}, served by {process}"
