"""Groups whose ranks do not all share memory: what operators ask before they plan."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from tileweave.ops.core.registry import group_of, machine_of
from tileweave.ops.core.tuned_choices import may_fuse
from tileweave.planning.machine import Machine
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.planning.topology import Topology
from tileweave.transport.nodes import agree_on_topology, known_topology

_MOST_RANKS = 64  # of groups that look for nodes


def topology_of(group: dist.ProcessGroup, device: torch.device) -> Topology:
    """Which ranks of ``group`` share memory. Collective before the first call of a group that may
    be fused, free after it.

    Raises :class:`PeerTimeout` if a rank does not come in time.
    """
    size = dist.get_world_size(group)
    most = FUSED_WORLD_SIZES[-1]  # of a node; larger groups may be on several
    meets = size <= _MOST_RANKS and may_fuse(device, min(size, most))
    return agree_on_topology(group) if meets else Topology.one_node(size)


def known_topology_of(group_name: str, size: int = 1) -> Topology:
    """The same, as far as it is known; before the first call of the group, and for ``size`` ranks
    of a group without a name, as if all ranks shared memory. Not collective."""
    return known_topology(group_of(group_name)) if group_name else Topology.one_node(size)


def machine_in(ranks: Topology, device: torch.device) -> Machine:
    """What plans know of ``device`` for operators without a path between nodes."""
    machine = machine_of(device)
    return replace(machine, unreachable=spans_nodes(ranks)) if ranks.nodes > 1 else machine


def spans_nodes(ranks: Topology) -> str:
    """Why an operator without a path between nodes runs unfused in such a group; "" in a group
    whose ranks share memory."""
    return f"{ranks}: this operator has no path between nodes" if ranks.nodes > 1 else ""
