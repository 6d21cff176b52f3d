"""Meetings of one group to map symmetric memory, whatever else its members did before.

torch (2.11 to 2.13) numbers the messages of a rendezvous by a counter of the process, not of the group. After a
rendezvous that only some ranks of a group took part in, say for a sub-group, the next one of the whole group looks for
messages under different numbers and waits for ever (pytorch issue 196082). It waits as long for a rank that never comes.

So :class:`Meeting` hands torch a group of its own whose store counts messages from the first one of each rendezvous, and
waits no longer than ``TILEWEAVE_TIMEOUT``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _get_process_group_store

from tileweave.errors import PeerTimeout
from tileweave.transport.workspace import timeout_seconds

_NUMBERED = re.compile(r"(.*?/)(\d+)((?:/.*)?)$")  # topic/number, topic/number/...


class Messages(dist.Store):
    """``store`` with keys ``topic/number/...`` renumbered: each topic of a round starts at 0."""

    def __init__(self, store: dist.Store, what: str, rank: int) -> None:
        super().__init__()
        self._store, self._what, self._rank = store, what, rank
        self._round = 0
        self._first: dict[str, int] = {}
        self._seconds = 0.0

    def start_round(self) -> None:
        """Before each rendezvous, on every rank."""
        self._round += 1
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

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._own(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._own(key) for key in keys])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._own(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get([self._own(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; ``timeout`` is torch's and far too long for us."""
        try:
            self._store.wait([self._own(key) for key in keys], timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise PeerTimeout(self._what, self._rank, -1, -1, 0, 0, self._seconds) from error


class Meeting:
    """What maps symmetric memory between the ranks of ``group``. Collective to make, and in every rendezvous."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        rank, store = dist.get_rank(group), _get_process_group_store(group)
        number = store.add(f"tileweave-meetings-{rank}", 1)  # in the group's own store: the same on all its ranks
        self._name = f"tileweave-{group.group_name}-{number}"
        self._messages = Messages(dist.PrefixStore(self._name, store), "mapping symmetric memory", rank)
        self._group = dist.ProcessGroup(self._messages, rank, dist.get_world_size(group))
        if hasattr(dist.ProcessGroup, "use_pg_for_symm_mem_rendezvous"):  # torch 2.13 asks the group's backend about it
            kinds, backend = dist.ProcessGroup.BackendType, group._get_backend(device)
            kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
            self._group.bound_device_id = group.bound_device_id  # else the backend would be told to forget it
            self._group._register_backend(device, kind, backend)
            self._group._set_default_backend(kind)
        _register_process_group(self._name, self._group)  # type: ignore[arg-type]

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks. Through the store: a rank that never comes ends the wait in time, which NCCL might not."""
        self._messages.start_round()
        self._messages.set(f"text-of-{self._group.rank()}", text)
        return [self._messages.get(f"text-of-{rank}").decode() for rank in range(self._group.size())]

    def rendezvous(self, local: torch.Tensor) -> Any:
        """torch's handle on ``local`` (from ``symm_mem.empty``) of every rank; None where it cannot be mapped."""
        self._messages.start_round()
        return symm_mem.rendezvous(local, self._name)  # type: ignore[arg-type]

    def close(self) -> None:
        _unregister_process_group(self._name)  # type: ignore[arg-type]
