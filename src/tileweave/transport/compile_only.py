"""A transport over which nothing is sent: for calls that are made only to learn which kernels they
would launch.

Addresses of peers are those of this rank. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tileweave.planning.machine import Machine
from tileweave.planning.topology import Topology
from tileweave.transport.interface import Copy, Sending, SymmetricBuffer, Watcher
from tileweave.transport.workspace import REGISTRY, Workspace


class CompileOnlyTransport:
    """Implements :class:`tileweave.transport.interface.Transport` for one rank alone."""

    def __init__(
        self, device: torch.device, rank: int, topology: Topology, machine: Machine
    ) -> None:
        self.device, self.rank, self.topology, self.machine = device, rank, topology, machine
        self.world_size = topology.size
        self.watch: Watcher | None = None

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        local = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return SymmetricBuffer(local, (local.data_ptr(),) * self.world_size)

    def share(self, nbytes: int) -> dict[int, Any]:
        return {}

    def barrier(self) -> None:
        pass

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def push(
        self,
        copies: Sequence[Copy],
        source: int = 0,
        queue: int = 0,
        launch: Callable[[], None] | None = None,
        capturing: bool | None = None,
        sending: Sending | None = None,
    ) -> None:
        if launch is not None:
            launch()

    def join(self, queue: int = 0) -> None:
        pass

    def order(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def capture_number(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def compile_only(
    group_name: str, device: torch.device, rank: int, topology: Topology, machine: Machine
) -> Iterator[None]:
    """Calls of this group on this device use a workspace of their own, over
    :class:`CompileOnlyTransport`."""
    workspace = Workspace(CompileOnlyTransport(device, rank, topology, machine))
    workspace.ledger.open({}, rank)
    try:
        with REGISTRY.replaced(group_name, device, workspace):
            yield
    finally:
        workspace.close()
