"""Workspace: the state that operators keep between calls, one per (group, device).

An :class:`Instance` has slots (two, or as many as an operator asks for), signals, and a control
block whose first word is the epoch. An operator has one per transport, so that copy-engine calls
(whose addresses a graph freezes) and pushes of kernels never share a slot.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import _world

from tileweave.errors import CaptureError, InputError, PeerTimeout, require
from tileweave.planning.machine import KERNELS, Kernels
from tileweave.transport import protocol
from tileweave.transport.call_ledger import Ledger
from tileweave.transport.interface import Copy
from tileweave.transport.lasting_memory import lasting
from tileweave.transport.regions import Regions
from tileweave.transport.shared_fault import SharedFault

if TYPE_CHECKING:
    from tileweave.transport.interface import Rail, SymmetricBuffer, Transport

NODES = "nodes"  # the kind of instance whose data also crosses between nodes
GATHER = "gather"  # the kind of instance of a gather that runs concurrently with other kernels
# kinds whose data copy engines move, by addresses that the host knows and not by address tables
COPIED = ("copy_engine", GATHER, NODES)
PART = "/tileweave-"  # follows the name of a group in those of parts of it
MOST_KEPT = 1024  # entries of a cache that has one for each size of calls
_ALIGN = 1024
_SECONDS = re.compile(r"[0-9]+\.?[0-9]*(e[+-]?[0-9]{1,3})?|\.[0-9]+", re.ASCII)
_SET = protocol.REPORT_SET


class _Call(threading.local):
    """The operator call that this thread is in. ``posted``: whether it is in the ledger."""

    posted = False


CALL = _Call()


def timeout_seconds() -> float:
    """How long a wait may last, in seconds: ``TILEWEAVE_TIMEOUT``, default 30."""
    text = os.environ.get("TILEWEAVE_TIMEOUT") or "30"
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 1e-3 <= seconds <= 2000.0:
        raise InputError(
            f"asked: TILEWEAVE_TIMEOUT={text!r:.60}; allowed: seconds, 0.001 to 2000; "
            "remedy: unset it for the default of 30"
        )
    return seconds


def kernels_allowed() -> Kernels:
    """Which kernels may run: ``TILEWEAVE_KERNELS``, default all. A process reads it once for each
    device (``transport.cuda.describe``)."""
    text = os.environ.get("TILEWEAVE_KERNELS") or "all"
    for name in KERNELS:
        if text == name:
            return name
    raise InputError(
        f"asked: TILEWEAVE_KERNELS={text!r}; allowed: {', '.join(KERNELS)}; "
        "remedy: set one of them, or unset it for all"
    )


def first_words(seconds: float) -> list[int]:
    """The control block before the first call, if a wait may last ``seconds``."""
    limit, words = int(seconds * 1e6), [0] * protocol.CONTROL_WORDS
    words[protocol.EPOCH] = 1
    words[protocol.TIMEOUT_US], words[protocol.MEETING_US], words[protocol.PUSHED_US] = (
        limit + limit // 8,
        limit,
        2 * limit,
    )
    return [min(word, 2**31 - 1) for word in words]


class BoundedCache(dict[Any, Any]):
    """A cache of what can be made again. It is emptied when it has ``MOST_KEPT`` entries, so that
    calls of ever new sizes do not fill memory."""

    def __setitem__(self, key: object, value: object) -> None:
        if len(self) >= MOST_KEPT:
            self.clear()
        super().__setitem__(key, value)


class Instance:
    """Slots, signals and epoch of one operator over one transport.

    Attributes
    ----------
    signals : int32, symmetric: ``[R, MAX_SLICES]`` signals of data, ``[R]`` to meet, and ``[1]``
        for the end of own pushes.
    flags : int32, symmetric, ``[2, R, MAX_SLICES]`` by slot: 1 if a peer has data for a copy engine
        of this rank, else 0.
    signal_table, slot_table : int64 ``[R]``, where the signals and slots of each rank are mapped.
    control : int32, local: the control block, see ``interface.py``.
    report : int32, readable by the host while kernels run: the first wait of the group that timed
        out.
    regions : which slots are lent as results; used only by operators that lend them.
    counters : int32, local, initially zero: what programs of this device count and copy engines
        wait for. The kernel of the operator defines their meaning and resets them; some kernels
        have a set for each parity of the epoch.
    captured : whether a CUDA graph has a call, so that the host does not know the epoch.
    calls : the number of the next call whose copies are pushed; outside of graphs its parity is the
        slot.
    version : changes when addresses change, and with them what was made for calls.
    """

    @torch.inference_mode(False)  # calls outside of it write to what is made here
    def __init__(
        self,
        op: str,
        transport: Transport,
        ledger: Ledger | None = None,
        copied: bool = False,
        fault: SharedFault | None = None,
    ) -> None:
        self.op, self.transport, self.ledger, self._copied = (
            op,
            transport,
            ledger or Ledger(),
            copied,
        )
        self.world_size, self.interpreted = transport.world_size, transport.device.type == "cpu"
        self.layout = protocol.SignalLayout(self.world_size)
        with self._set_up():
            self._signals = transport.allocate(4 * self.layout.num_words)
        words = self._signals.local.view(torch.int32)
        self.signals, self.flags = (
            words[: self.layout.num_signals],
            words[self.layout.num_signals :],
        )
        self.signal_table = self._table(self._signals)
        self._lead_home()
        self._fault = fault or SharedFault(transport)
        self.report, self._report = self._fault.report, self._fault.words
        seconds = timeout_seconds()
        self.control = self._fault.control_block(op, seconds, first_words(seconds))
        self.counters = torch.zeros(0, dtype=torch.int32, device=transport.device)
        self._slots: SymmetricBuffer | None = None
        self._scratch: torch.Tensor | None = None
        self._held: list[object] = []  # memory that graphs read and write
        self.slot_table = torch.zeros(0)
        self.slot_bytes = self.num_slots = 0
        self.regions = Regions(0)
        self.captured = False
        self.calls = 1
        self.cache: dict[object, object] = {}
        self._outside: list[list[object]] = []  # see until_memory_moves
        self.version = 0

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        calls = self.ledger.calls
        try:
            with self.ledger.set_up(self.op):
                yield
        finally:
            CALL.posted = self.ledger.calls > calls

    def _lead_home(self) -> None:
        """Make the signals of a rank of another node lead to this rank's own, so that the kernels'
        meetings are those of a node.

        A rank that comes to a meeting sets word ``met(rank)`` of each rank in the table. For rank p
        of another node that is word ``met(p)`` of its own: p counts as met. What p sends arrives in
        memory of this rank by work that this rank queues, so nothing has to wait for p before it.
        """
        topology, rank = self.transport.topology, self.transport.rank
        if topology.nodes == 1:
            return
        own = self._signals.addresses[rank]
        for peer in set(range(self.world_size)) - set(topology.near(rank)):
            self.signal_table[peer] = own + 4 * (peer - rank)

    def _table(self, buffer: SymmetricBuffer) -> torch.Tensor:
        words, device = torch.tensor(buffer.addresses, dtype=torch.int64), self.transport.device
        return lasting(partial(words.to, device), device)

    @property
    def slots(self) -> torch.Tensor:
        """This rank's slots, uint8 ``[num_slots * slot_bytes]``."""
        assert self._slots is not None, "reserve() comes before slots"
        return self._slots.local

    @property
    def slot_addresses(self) -> tuple[int, ...]:
        assert self._slots is not None, "reserve() comes before slot_addresses"
        return self._slots.addresses

    @property
    def signal_addresses(self) -> tuple[int, ...]:
        return self._signals.addresses

    def signal_copy(self, peer: int, signal: int, aside: bool = False) -> Copy:
        """The copy that sets ``signal`` at ``peer``: 4 bytes from the epoch word."""
        target = self.signal_addresses[peer] + 4 * signal
        return Copy(target, self.control.data_ptr() + 4 * protocol.EPOCH, 4, aside=aside)

    def reserve(self, slot_bytes: int, counters: int = 0, slots: int = 2) -> None:
        """Make room for ``slots`` slots of ``slot_bytes`` each, and for ``counters``. Collective if
        slots grow, so sizes must agree on all ranks.

        Operators that push have two slots, chosen by the parity of the epoch. Those that ask for
        more lend them as regions.
        """
        if (
            counters > self.counters.numel()
            or slot_bytes > self.slot_bytes
            or slots > self.num_slots
        ):
            self._grow(slot_bytes, counters, slots)

    @torch.inference_mode(False)
    def _grow(self, slot_bytes: int, counters: int, slots: int) -> None:
        if counters > self.counters.numel():
            self._refuse_capture("more tile counters")
            self.transport.synchronize()  # copies may still wait for the old ones
            device = self.transport.device
            zeros = partial(torch.zeros, counters, dtype=torch.int32, device=device)
            self.counters = lasting(zeros, device)
            self._forget()
        if slot_bytes <= self.slot_bytes and slots <= self.num_slots:
            return
        slots, slot_bytes = max(slots, self.num_slots), max(slot_bytes, self.slot_bytes)
        self._refuse_capture(
            f"{slots} slots of {slot_bytes} bytes where {self.num_slots} of {self.slot_bytes} exist"
        )
        self.transport.synchronize()
        size = -(-slot_bytes // _ALIGN) * _ALIGN
        with self._set_up():
            self.transport.barrier()
            # if this fails, the next call makes room again
            self._slots, self.slot_bytes, self.num_slots = None, 0, 0
            self._forget()
            self._slots = self.transport.allocate(slots * size)
        self.slot_table = self._table(self._slots)
        self.regions = Regions(slots)
        if not self._copied:
            tables = torch.tensor(
                [self.slot_table.data_ptr(), self.signal_table.data_ptr()], dtype=torch.int64
            )
            words = tables.view(torch.int32).to(self.control.device)
            self.control[protocol.TABLES : protocol.RECORD] = words
            self.control[protocol.TABLE_RANK], self.control[protocol.TABLE_RANKS] = (
                self.transport.rank,
                self.world_size,
            )
        # last: what fails before leaves no slots to a smaller call
        self.slot_bytes, self.num_slots = size, slots

    @torch.inference_mode(False)
    def scratch(self, nbytes: int) -> torch.Tensor:
        """Local memory, uint8 ``[nbytes]``, for what one eager call needs only itself.

        What it replaces is kept, because graphs of copies have its address; it doubles, so that is
        at most as much again.
        """
        found = self._scratch
        if found is None or found.numel() < nbytes:
            made = nbytes
            if found is not None:
                self._held.append(found)
                made = max(made, 2 * found.numel())
            device = self.transport.device
            with torch.inference_mode(False):  # operators of torch may write to it later
                empty = partial(torch.empty, made, dtype=torch.uint8, device=device)
                found = lasting(empty, device)
            self._scratch = found
        return found[:nbytes]

    def keep(self, key: object, value: object) -> None:
        """Put ``value`` into the cache. The cache is emptied first if it is full."""
        if len(self.cache) >= MOST_KEPT and not self.transport.capturing():
            self.transport.synchronize()  # kernels may still read tables that the cache keeps alive
            self._forget()
        self.cache[key] = value

    def until_memory_moves(self, value: object) -> list[object]:
        """A list of ``value``, for caches outside of this instance. It is emptied when ``version``
        changes: what was made for memory that was outgrown would keep that memory mapped."""
        if len(self._outside) >= 4 * MOST_KEPT and not self.transport.capturing():
            self.transport.synchronize()
            self._forget()  # most are of plans that are gone
        self._outside.append([value])
        return self._outside[-1]

    def _forget(self) -> None:
        """Empty the caches, because addresses change; a cache that a graph needs is replaced."""
        self.version += 1
        for kept in self._outside:
            kept.clear()
        self._outside.clear()
        if any(self.cache is one for one in self._held):
            self.cache = {}
        else:
            self.cache.clear()

    def _hold(self) -> None:
        """Keep the memory that a captured graph reads and writes, also after it is replaced."""
        for part in (self.cache, self._slots, self.slot_table, self.counters):
            if not any(part is one for one in self._held):
                self._held.append(part)

    def close(self) -> None:
        """Release everything. Cached objects refer to this instance, so memory would otherwise stay
        until Python collects garbage."""
        for cache in (self.cache, *self._held):
            if isinstance(cache, dict):
                cache.clear()
        self._held.clear()
        self._forget()

    def _refuse_capture(self, what: str) -> None:
        if self.transport.capturing():
            raise CaptureError(
                f"asked: {self.op} under CUDA-graph capture, which needs {what}; allowed: calls "
                "that fit the memory reserved before the capture; "
                "remedy: call tw.warmup(...) before, with each shape that will be captured"
            )

    def begin(self, mark: int = 0, region: int | None = None) -> bool:
        """Begin a call: report an earlier timeout of the group, and order this call after the last
        one on this device. Returns whether the call is being captured into a CUDA graph.

        mark : a checksum of the call, which is compared with those of peers; 0: not compared.
        region : the region of its result, if it has one.
        """
        if self._report[_SET]:
            self.check()
        capturing = self.transport.capturing()
        if capturing:
            self.captured = True
            self._hold()
        if mark:
            ledger = self.ledger
            calls = ledger.calls
            try:
                # a rank that has captured a call uses other slots than one that has not
                ledger.post(self.op, mark + self.captured)
            finally:
                CALL.posted = ledger.calls > calls
        stream = self.transport.order()
        if region is not None:
            self.regions.order(region, stream, self.transport.capture_number())
        return capturing

    def launched(self) -> None:
        """Call this after each launch, even one that raised. An interpreted kernel has ended by
        now; a wait that timed out raised an error of the interpreter, and this one says more.
        Kernels on a device are checked when the next call begins."""
        if self.interpreted:
            self.check()

    def check(self) -> None:
        """Raise :class:`PeerTimeout` if a wait of an earlier call of the group timed out, or the
        :class:`RankMismatchError` that caused it."""
        if not self._report[protocol.REPORT_SET]:
            return
        self.ledger.compare(self.op)  # the peer may have made another call
        rank, signal = self.transport.rank, int(self._report[protocol.REPORT_SIGNAL])
        peer = self.layout.source_of(signal)
        op, seconds = self._fault.reporter
        raise PeerTimeout(
            op,
            rank,
            peer if peer < self.world_size else -1,  # own copies: the late peer is not known
            int(self._report[protocol.REPORT_UNIT]),
            int(self._report[protocol.REPORT_EXPECTED]),
            int(self._report[protocol.REPORT_SEEN]),
            seconds,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank has for this instance."""
        return self._signals.local.numel() + self.num_slots * self.slot_bytes


class Workspace:
    """All instances of one (group, device)."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.ledger = Ledger()
        self._fault: SharedFault | None = None
        self.instances: dict[tuple[str, str], Instance] = {}
        # what is known of calls whose arguments were checked, by signature: plans, and more
        self.accepted: dict[object, Any] = BoundedCache()
        # checksums of calls whose plan in a CUDA graph has run, so that a capture finds its memory
        self.ready_to_capture: dict[int, bool] = BoundedCache()
        self.rail: Rail | None = None  # of calls over nodes, once there was one

    def instance(self, op: str, kind: str) -> Instance:
        """The instance of ``op`` for transport ``kind``. Collective the first time."""
        found = self.instances.get((op, kind))
        if found is None:
            self._require_node(op, kind)
            if self.transport.capturing():
                raise CaptureError(
                    f"asked: the first call of {op} under CUDA-graph capture; allowed: capture "
                    "after the workspace exists; "
                    "remedy: call tw.warmup(...) before, with each shape that will be captured"
                )
            if self._fault is None:
                self._fault = SharedFault(self.transport)
            found = self.instances[op, kind] = Instance(
                op, self.transport, self.ledger, kind in COPIED, self._fault
            )
        return found

    def _require_node(self, op: str, kind: str) -> None:
        """Refuse pushes to ranks of other nodes, whose memory is not mapped here."""
        ranks = self.transport.topology
        require(
            ranks.nodes == 1 or kind == NODES,
            lambda: f"{op} by transport {kind!r} in a group of {ranks}",
            "ranks that share memory, or a path between nodes",
            "let the operator plan its call",
        )

    def check(self) -> None:
        for instance in self.instances.values():
            instance.check()
        if self.rail is not None:
            self.rail.check()
        self.ledger.compare("the last operator")

    def close(self) -> None:
        """Wait for this device, then release all memory. Not collective; it works after a peer
        died.

        Memory must not stay until Python collects garbage: torch ends the process if symmetric
        memory is freed while a CUDA graph is being captured. Cached objects refer to their
        instance, so caches are emptied first.
        """
        self.transport.synchronize()
        for instance in self.instances.values():
            instance.close()
        self.instances.clear()
        self.accepted.clear()
        self.ledger.close()
        self.transport.close()


class Registry:
    """The workspaces of this process, by (group name, device)."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[str, torch.device], Workspace] = {}
        self._groups: dict[str, object] = {}
        # as Workspace.accepted, where there is no workspace: unfused calls need none
        self._accepted: dict[tuple[str, torch.device], BoundedCache] = {}
        # calls that broke off: whether this rank gave them up for its peers
        self._broken: dict[tuple[str, torch.device], list[bool]] = {}
        self._agreed: dict[str, set[str]] = {}
        # the workspaces and groups of the parent, in a forked process
        self._of_parent: list[
            tuple[dict[tuple[str, torch.device], Workspace], dict[str, object]]
        ] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """This process is a copy of a rank and shares its memory, so it must neither use that
        memory nor release it."""
        self._of_parent.append((self._workspaces, self._groups))
        self._workspaces, self._groups = {}, {}

    def belongs(self, group_name: str, group: object) -> None:
        """Note that ``group`` has this name. If a destroyed group had it before, close the
        workspaces of that one, whose ranks may differ."""
        if self._groups.get(group_name) is group:
            return
        if self._of_parent and any(
            group is one for _, groups in self._of_parent for one in groups.values()
        ):
            raise InputError(
                f"asked: an operator over group {group_name!r} in a process forked since; "
                "allowed: in the process that joined the group; "
                "remedy: start processes that call operators by spawn, and join a group in them"
            )
        before = self._groups.setdefault(group_name, group)
        if before is not group:
            self.close(group_name)
            self._groups[group_name] = group

    def look_up(self, group_name: str, resolve: Callable[[str], object]) -> None:
        """:meth:`belongs`, unless the last group of this name still exists. That check takes 0.1
        us, to ``resolve`` the name 0.4 us."""
        if self._groups.get(group_name) not in _world.pg_map:
            self.belongs(group_name, resolve(group_name))

    def agreed(self, group_name: str) -> set[str]:
        """What the ranks of the group have agreed on since it was closed.

        A rank may have given up a meeting in which its peers agreed. It can agree with them only if
        all ranks ask again, as they do after they have closed the group.
        """
        return self._agreed.setdefault(group_name, set())

    def known(self, group_name: str) -> Any:
        """The group of this name, if it was looked up before and still exists. This rank is in
        it."""
        group = self._groups.get(group_name)
        return group if group in _world.pg_map else None

    def find(self, group_name: str, device: torch.device) -> Workspace | None:
        """The workspace; None if there is none, or if its ranks do not share a ledger yet: then the
        next call shares it."""
        found = self._workspaces.get((group_name, device))
        return found if found is not None and found.ledger.opened else None

    def accepted(self, group_name: str, device: torch.device) -> BoundedCache:
        """The plans of calls whose arguments were checked, by signature, while :meth:`find` finds
        no workspace."""
        found = self._accepted.get((group_name, device))
        if found is None:
            found = self._accepted[group_name, device] = BoundedCache()
        return found

    def get(
        self, group_name: str, device: torch.device, make: Callable[[], Transport]
    ) -> Workspace:
        key = (group_name, device)
        found = self._workspaces.get(key)
        if found is None:
            found = self._workspaces[key] = Workspace(make())
        return found

    @contextmanager
    def replaced(
        self, group_name: str, device: torch.device, workspace: Workspace
    ) -> Iterator[None]:
        """Calls of this group on this device use ``workspace``."""
        key = (group_name, device)
        before = self._workspaces.get(key)
        self._workspaces[key] = workspace
        try:
            yield
        finally:
            if before is None:
                del self._workspaces[key]
            else:
                self._workspaces[key] = before

    @contextmanager
    def set_aside(self, group_name: str) -> Iterator[None]:
        """Inside, calls of the group make another workspace, which is closed at the end. Then the
        group has its own one again, with the memory that graphs read and write."""
        kept = {key: one for key, one in self._workspaces.items() if key[0] == group_name}
        broken = {key: calls for key, calls in self._broken.items() if key[0] == group_name}
        for key in kept:
            del self._workspaces[key]
        try:
            yield
        finally:
            self.close(group_name)
            for workspace in kept.values():
                workspace.accepted.clear()  # plans may have changed
            self._workspaces.update(kept)
            self._broken.update(broken)

    def break_off(
        self, group_name: str, device: torch.device, posted: bool, error: BaseException | None
    ) -> None:
        """Note that a call raised an error of this rank alone, which its peers do not know of.
        ``posted``: whether the call is in the ledger."""
        given_up = isinstance(error, PeerTimeout)
        self._broken.setdefault((group_name, device), []).append(given_up)
        found = self.find(group_name, device)
        if found is not None:
            found.ledger.break_off(posted, given_up)

    def opened(self, group_name: str, device: torch.device) -> None:
        """Record the calls that failed before the ledger existed."""
        for given_up in self._broken.get((group_name, device), ()):
            self._workspaces[group_name, device].ledger.break_off(False, given_up)

    def broken_off(self, group_name: str) -> str:
        """The calls of this rank that failed since the group was closed. Peers had as many, or
        wait for some of them."""
        calls = [
            given_up
            for (name, _), calls in self._broken.items()
            if name == group_name
            for given_up in calls
        ]
        return f"{len(calls)} that broke off, {sum(calls)} of them given up" if calls else ""

    def close(self, group_name: str | None = None) -> None:
        """Close the workspaces of one group and its parts, or all. Groups are released, because a
        destroyed group has threads and sockets."""
        for key in [k for k in self._workspaces if _is_of(k[0], group_name)]:
            self._workspaces.pop(key).close()
        for key in [k for k in self._broken if _is_of(k[0], group_name)]:
            del self._broken[key]
        for key in [k for k in self._accepted if _is_of(k[0], group_name)]:
            del self._accepted[key]
        for names in (self._agreed, self._groups):
            for name in [name for name in names if _is_of(name, group_name)]:
                del names[name]

    def check(self, group_name: str | None = None) -> None:
        for key, workspace in self._workspaces.items():
            if group_name in (None, key[0]):
                workspace.check()

    def forget_plans(self) -> None:
        """Have every call planned anew."""
        for workspace in self._workspaces.values():
            workspace.accepted.clear()
        self._accepted.clear()

    def synchronize(self, group_name: str | None = None) -> None:
        for key, workspace in self._workspaces.items():
            if group_name in (None, key[0]):
                workspace.transport.synchronize()
        self.check(group_name)


def _is_of(name: str, group_name: str | None) -> bool:
    """Whether a group of this name is ``group_name`` or a part of it; None: any."""
    return group_name in (None, name) or name.startswith(f"{group_name}{PART}")


REGISTRY = Registry()
