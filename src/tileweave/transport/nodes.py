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
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tileweave.planning.topology import Topology
from tileweave.transport.rendezvous import NODES, meet, require_alike
from tileweave.transport.workspace import REGISTRY

HOST_ID = "NCCL_HOSTID"
_FIRST = "the first call of a group"
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_FOUND: WeakKeyDictionary[dist.ProcessGroup, Topology] = WeakKeyDictionary()


def host_name() -> str:
    """Where this process runs, for people: ``NCCL_HOSTID``, or the name of the host."""
    return os.environ.get(HOST_ID) or socket.gethostname()


def host_identity() -> str:
    """Where this process runs: the same text in processes that may share memory, a short one."""
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
