"""Which ranks of a group share memory: found out at its first call, and the same on all ranks.

Each rank tells the others, through the store of the group, where it runs; ranks that tell the same
are a node. Where a rank runs is ``NCCL_HOSTID`` if that is set, as it is for NCCL. Else it is the
name of the host, the number of its boot, and the process namespace: ranks that do not see each
other's processes cannot map each other's memory. ``launcher.launch(nodes=2)`` sets ``NCCL_HOSTID``
and so makes two nodes of one host.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tileweave.planning.topology import Topology
from tileweave.transport.rendezvous import NODES, Texts, meet, require_alike
from tileweave.transport.workspace import PART, REGISTRY

HOST_ID = "NCCL_HOSTID"
_FIRST = "the first call of a group"
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_FOUND: WeakKeyDictionary[dist.ProcessGroup, Topology] = WeakKeyDictionary()
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


def host_name() -> str:
    """Where this process runs, for people: ``NCCL_HOSTID``, or the name of the host."""
    return os.environ.get(HOST_ID) or socket.gethostname()


def host_identity() -> str:
    """Where this process runs: a short text, the same in processes that may share memory."""
    given = os.environ.get(HOST_ID)
    parts = [given] if given else [socket.gethostname(), _boot(), _process_namespace()]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _boot() -> str:
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return ""


def _process_namespace() -> str:
    try:
        return os.readlink(_NAMESPACE)
    except OSError:
        return ""


def agree_on_topology(group: dist.ProcessGroup) -> Topology:
    """The topology of ``group``. Collective before the first call of the group, free after it
    until the group is closed.

    Raises
    ------
    PeerTimeout
        A rank does not come in time.
    """
    agreed = REGISTRY.agreed(group.group_name)
    if NODES not in agreed or group not in _FOUND:
        texts = meet(f"{NODES}|{host_identity()}", group, _FIRST)[1]
        require_alike(texts)
        _FOUND[group] = Topology.of_hosts([text.partition("|")[2] for text in texts])
        agreed.add(NODES)
    return _FOUND[group]


def known_topology(group: dist.ProcessGroup) -> Topology:
    """The topology of ``group``, if its ranks have agreed on it; before that, as if all of them
    shared memory. Not collective."""
    return _FOUND.get(group) or Topology.one_node(dist.get_world_size(group))


def part_of(
    group: dist.ProcessGroup, ranks: Sequence[int], what: str, texts: Texts, device: torch.device
) -> dist.ProcessGroup:
    """The group of these ranks of ``group``, this one among them. Collective over ``group`` the
    first time, when all ranks of it make their parts ``what``, free after it.

    ``dist.new_group`` must be called by all ranks of the world for each part, or names it by the
    number of groups that a rank is in, which may differ between ranks.

    Raises
    ------
    PeerTimeout
        A rank does not come in time.
    """
    parts = _PARTS.setdefault(group, {})
    if what not in parts:
        texts.barrier()
        with _without_split() as world:
            name = f"{group.group_name}{PART}{what}-{texts.number}-{ranks[0]}"
            global_ranks = [dist.get_global_rank(group, rank) for rank in ranks]
            parts[what], _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank(group)),
                global_ranks,
                c10d.Backend(dist.get_backend_config(group)),
                c10d._get_process_group_store(world),
                name,  # type: ignore[arg-type]
                timeout=_timeout_of(group, device),
            )
            c10d._world.pg_group_ranks[parts[what]] = {
                rank: at for at, rank in enumerate(global_ranks)
            }
    return parts[what]


@contextmanager
def _without_split() -> Iterator[dist.ProcessGroup]:
    """Have NCCL make communicators that only their own ranks wait for. From a group with a bound
    device torch would split them, and all ranks of the world would have to come."""
    world = dist.group.WORLD
    assert world is not None, "there is a group, so there is a world"
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield world
    finally:
        world.bound_device_id = device


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None) or c10d.default_pg_timeout
