"""The state between calls: memory that grows, what captured graphs keep, caches, the registry. One
rank, whose transport only notes what it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tileweave.device.interpreter import words as interpreted
from tileweave.errors import CaptureError, InputError, PeerTimeout
from tileweave.explore.ranks import World
from tileweave.explore.scenarios_local import Found, Local
from tileweave.planning.machine import CPU, KERNELS
from tileweave.planning.topology import Topology
from tileweave.transport import protocol, workspace
from tileweave.transport.interface import SymmetricBuffer
from tileweave.transport.shared_fault import SharedFault
from tileweave.transport.workspace import Instance, Registry, Workspace

CPU_DEVICE = torch.device("cpu")


class Noting:
    """A transport of rank 1 of 3 whose peers are absent. ``asked``: what it was asked for."""

    def __init__(self) -> None:
        self.device, self.machine, self.rank, self.world_size = CPU_DEVICE, CPU, 1, 3
        self.topology = Topology.one_node(3)
        self.watch = None
        self.asked: list[str] = []
        self.captures = False

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        self.asked.append(f"allocate {nbytes}")
        local = torch.zeros(nbytes, dtype=torch.uint8)
        return SymmetricBuffer(local, tuple(local.data_ptr() + r for r in range(3)))

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def capturing(self) -> bool:
        return self.captures

    def capture_number(self) -> int:
        return int(self.captures)

    def order(self) -> str:
        return "stream"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("barrier", "synchronize", "close"):
            raise AttributeError(name)
        return lambda *_, **__: self.asked.append(name)

    def since(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


class Pages:
    """A ledger that notes posts and calls that broke off."""

    def __init__(self) -> None:
        self.calls, self.posts, self.broken, self.opened = 0, [], [], True

    @contextmanager
    def set_up(self, op: str) -> Iterator[None]:
        yield

    def compare(self, op: str) -> None:
        self.posts.append(f"compare {op}")

    def post(self, op: str, mark: int) -> None:
        self.calls += 1
        self.posts.append(f"{op} {mark}")

    def break_off(self, *what: object) -> None:
        self.broken.append(what)

    def close(self) -> None:
        self.posts.append("close")


_AS_WANTED, _OTHER = torch.tensor([True]), torch.tensor([False])


def equal(name: str, got: object, want: object) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A result that is no tensor."""
    return f"{name}: {got}, not {want};", _AS_WANTED if got == want else _OTHER, _AS_WANTED


def raised(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def limits(world: World, rank: int, seed: int) -> Found:
    cases = {"": 30.0, "0.001": 1e-3, "2000": 2000.0, "2.5e1": 25.0}
    refused = ("0.0005", "2000.5", "1_0", "soon", "-1")
    before = {name: os.environ.pop(f"TILEWEAVE_{name}", None) for name in ("TIMEOUT", "KERNELS")}
    try:
        for text, seconds in cases.items():
            os.environ["TILEWEAVE_TIMEOUT"] = text
            yield equal("time-out", workspace.timeout_seconds(), seconds)
        for text in refused:
            os.environ["TILEWEAVE_TIMEOUT"] = text
            yield equal(text, raised(InputError, workspace.timeout_seconds), True)
        del os.environ["TILEWEAVE_TIMEOUT"]
        yield equal("kernels", workspace.kernels_allowed(), KERNELS[0])
        for name in KERNELS:
            os.environ["TILEWEAVE_KERNELS"] = name
            yield equal("kernels", workspace.kernels_allowed(), name)
        os.environ["TILEWEAVE_KERNELS"] = "none"
        yield equal("kernels", raised(InputError, workspace.kernels_allowed), True)
    finally:
        for name, value in before.items():
            os.environ.pop(f"TILEWEAVE_{name}", None)
            if value is not None:
                os.environ[f"TILEWEAVE_{name}"] = value
    words = workspace.first_words(2000.0)
    yield equal("first epoch", words[protocol.EPOCH], 1)
    yield equal("words", len(words), protocol.CONTROL_WORDS)
    low = [workspace.first_words(0.8)[w] for w in (3, 4, 5)]
    yield equal("limits", low, [900000, 800000, 1600000])
    yield equal("highest limits", words[3:6], [2**31 - 1, 2000000000, 2**31 - 1])


def growth(world: World, rank: int, seed: int) -> Found:
    transport: Any = Noting()
    workspace.CALL.posted = True
    one = Instance("op", transport, None, copied=bool(seed % 2))
    yield equal("posted", workspace.CALL.posted, False)
    signals = 4 * protocol.SignalLayout(3).num_words
    yield equal("begin", transport.since(), [f"allocate {signals}"])
    yield equal("signals", one.signals.numel(), protocol.SignalLayout(3).num_signals)
    yield equal("flags", one.flags.numel(), 2 * 3 * protocol.MAX_SLICES)
    one.cache["made"] = 1
    one.reserve(1500, 3)
    asked = ["synchronize", "synchronize", "barrier", "allocate 4096"]
    yield equal("growth", transport.since(), asked)
    yield equal("sizes", (one.slot_bytes, one.num_slots, one.counters.numel()), (2048, 2, 3))
    yield equal("bytes", one.nbytes, signals + 4096)
    yield equal("caches", (one.cache, one.version), ({}, 2))
    tables = one.control[protocol.TABLES : protocol.RECORD].view(torch.int64).tolist()
    addresses = [one.slot_table.data_ptr(), one.signal_table.data_ptr()]
    yield equal("tables", tables, [0, 0] if seed % 2 else addresses)
    ranks = one.control[[protocol.TABLE_RANK, protocol.TABLE_RANKS]].tolist()
    yield equal("ranks of tables", ranks, [0, 0] if seed % 2 else [1, 3])
    yield equal("regions", one.regions.count, 2)
    for size in ((2048, 3, 2), (100, 0, 1)):
        one.reserve(*size)
        yield equal("what fits", transport.since(), [])
    counters = one.counters
    one.reserve(2049, 0)
    yield equal("slots", transport.since(), ["synchronize", "barrier", "allocate 6144"])
    yield equal("counters stay", one.counters is counters, True)
    one.reserve(10, 0, 3)
    yield equal("more slots", (one.slot_bytes, one.num_slots, one.regions.count), (3072, 3, 3))
    transport.since()
    one.cache["made"], cache = 1, one.cache
    one.reserve(3072, 4, 3)
    yield equal("counters", (one.counters.numel(), one.num_slots), (4, 3))
    yield equal("and nothing else", (transport.since(), cache), (["synchronize"], {}))
    yield equal("the same cache", one.cache is cache, True)
    counters = one.counters
    one.reserve(3500, 4)
    yield equal("as many counters", one.counters is counters, True)
    transport.captures = True
    for more in ((5000, 0, 2), (10, 9, 2), (10, 0, 4)):
        yield equal("under capture", raised(CaptureError, lambda m=more: one.reserve(*m)), True)
    one.reserve(3000, 4, 3)
    yield from _captured(one, transport, seed)


def _captured(one: Any, transport: Any, seed: int) -> Found:
    """What a captured call keeps."""
    slots, counters = one._slots, one.counters
    one.cache["made"] = 1
    kept = one.cache
    yield equal("capturing", one.begin(), True)
    yield equal("captured", one.captured, True)
    one.begin()
    held = [kept, slots, one.slot_table, counters]
    yield equal("held once", [any(h is k for h in one._held) for k in held], [True] * 4)
    yield equal("held", len(one._held), 4)
    transport.captures = False
    yield equal("later", (one.begin(), one.captured), (False, True))
    one.reserve(9000, 0)
    yield equal("a graph's cache", (kept, one.cache), ({"made": 1}, {}))
    small = one.scratch(100)
    yield equal("scratch", (small.numel(), one.scratch(60).data_ptr()), (100, small.data_ptr()))
    more = one.scratch(150)
    yield equal("doubled", (more.numel(), one.scratch(200).data_ptr()), (150, more.data_ptr()))
    large = one.scratch(1000)
    yield equal("large", large.data_ptr() == one.scratch(1000).data_ptr(), True)
    parts = [h for h in one._held if isinstance(h, torch.Tensor) and h.dtype == torch.uint8]
    yield equal("old scratch is kept", [p.numel() for p in parts], [100, 200])
    one.close()
    yield equal("closed", (kept, one.cache, one._held), ({}, {}, []))


def caches(world: World, rank: int, seed: int) -> Found:
    transport: Any = Noting()
    one, most = Instance("op", transport), workspace.MOST_KEPT
    transport.since()
    for key in range(most):
        one.keep(key, key)
    yield equal("kept", (len(one.cache), transport.since()), (most, []))
    transport.captures = True
    one.keep("captured", 1)
    yield equal("while capturing", len(one.cache), most + 1)
    transport.captures = False
    one.keep("more", 1)
    yield equal("emptied", (one.cache, transport.since()), ({"more": 1}, ["synchronize"]))
    version = one.version
    lists = [one.until_memory_moves(key) for key in range(4 * most)]
    yield equal("outside", (lists[0], lists[-1], one.version), ([0], [4 * most - 1], version))
    transport.captures = True
    lists.append(one.until_memory_moves("captured"))
    yield equal("outside while capturing", (lists[0], one.version), ([0], version))
    transport.captures = False
    last = one.until_memory_moves("last")
    yield equal("outside, emptied", (lists[0], last, one.version), ([], ["last"], version + 1))
    yield equal("before it is emptied", transport.since(), ["synchronize"])
    one.reserve(10)
    yield equal("memory moved", last, [])
    bounded = workspace.BoundedCache()
    for key in range(most):
        bounded[key] = key
    yield equal("bounded", len(bounded), most)
    bounded["more"] = 1
    yield equal("bounded, emptied", dict(bounded), {"more": 1})


def calls(world: World, rank: int, seed: int) -> Found:
    transport: Any = Noting()
    ledger: Any = Pages()
    one = Instance("op", transport, ledger)
    workspace.CALL.posted = False
    one.begin(5)
    yield equal("posted", (ledger.posts, workspace.CALL.posted), (["op 5"], True))
    one.begin()
    yield equal("not compared", ledger.posts, ["op 5"])
    with mock.patch.object(Pages, "post", side_effect=InputError):
        yield equal("refused", raised(InputError, lambda: one.begin(5)), True)
    yield equal("not posted", workspace.CALL.posted, False)
    transport.captures = True
    one.begin(5)
    yield equal("after a capture", ledger.posts, ["op 5", "op 6"])
    one.begin(0, 0)
    yield equal("captured regions have no stream", one.regions.streams, {})
    transport.captures = False
    one.reserve(10, 0, 3)
    one.begin(0, 2)
    yield equal("regions", one.regions.streams, {2: "stream"})
    one.launched()
    layout, report = one.layout, one.report
    for signal, peer in ((layout.data(2, 4), 2), (layout.met(0), 0), (layout.pushed, -1)):
        report[protocol.REPORT_SET], report[protocol.REPORT_SIGNAL] = 1, signal
        report[protocol.REPORT_UNIT], report[protocol.REPORT_EXPECTED] = 7, 9
        for call in (one.begin, one.launched, one.check):
            try:
                call()
                told = None
            except PeerTimeout as error:
                told = error.peer
            yield equal("named", told, peer)
    one.interpreted = False
    one.launched()
    report.zero_()
    one.check()
    begun = Workspace(transport)
    begun.ledger = ledger
    yield equal("one instance", begun.instance("a", "sm") is begun.instance("a", "sm"), True)
    kinds = [begun.instance("a", kind)._copied for kind in ("sm", *workspace.COPIED)]
    yield equal("kinds", kinds, [False, True, True, True])
    transport.captures = True
    yield equal("first", raised(CaptureError, lambda: begun.instance("b", "sm")), True)
    begun.instance("a", "sm")
    begun.instance("a", "sm").report[protocol.REPORT_SET] = 1
    yield equal("checked", raised(PeerTimeout, begun.check), True)
    other = begun.instance("a", workspace.NODES)
    yield equal("of the group", raised(PeerTimeout, other.begin), True)
    begun.instance("a", "sm").report.zero_()
    begun.check()

    class Broken:
        def check(self) -> None:
            raise PeerTimeout("rail", 0, 1, 2, 3, 4, 5.0)

    rail: Any = Broken()
    begun.rail = rail
    yield equal("rail", raised(PeerTimeout, begun.check), True)
    begun.rail = None
    far: Any = Noting()
    far.topology = Topology((0, 1, 1))
    over = Workspace(far)
    yield equal("over nodes", raised(InputError, lambda: over.instance("op", "sm")), True)
    spread = over.instance("op", workspace.NODES)
    own = spread.signal_addresses[1]
    table = [own - 4, own, spread.signal_addresses[2]]
    yield equal("ranks of other nodes", spread.signal_table.tolist(), table)
    begun.accepted["key"] = 1  # type: ignore[assignment]
    transport.since()
    begun.close()
    yield equal("closed", transport.since(), ["synchronize", "close"])
    yield equal("empty", (begun.instances, dict(begun.accepted)), ({}, {}))
    yield equal("ledger", ledger.posts[-2:], ["compare the last operator", "close"])


def registry(world: World, rank: int, seed: int) -> Found:
    ours, made, groups = Registry(), [], [_Group() for _ in range(3)]

    def make() -> Any:
        made.append(Noting())
        return made[-1]

    first = ours.get("a", CPU_DEVICE, make)
    yield equal("one", (ours.get("a", CPU_DEVICE, make) is first, len(made)), (True, 1))
    yield equal("no ledger", ours.find("a", CPU_DEVICE), None)
    first.ledger = ledger = Pages()  # type: ignore[assignment]
    yield equal("found", ours.find("a", CPU_DEVICE) is first, True)
    yield equal("unknown", ours.find("b", CPU_DEVICE), None)
    ours.belongs("a", groups[0])
    ours.belongs("a", groups[0])
    yield equal("known group", ours.find("a", CPU_DEVICE) is first, True)
    yield equal("no group of torch's", ours.known("a"), None)
    with _existing(groups[0]):
        yield equal("a group of torch's", ours.known("a") is groups[0], True)
        resolved = []
        ours.look_up("a", resolved.append)
        yield equal("looked up before", resolved, [])
    asked = []
    ours.look_up("a", lambda name: asked.append(name) or groups[0])
    yield equal("looked up again", asked, ["a"])
    plans = ours.accepted("c", CPU_DEVICE)
    plans["key"] = 1
    yield equal("plans", ours.accepted("c", CPU_DEVICE) is plans, True)
    ours.forget_plans()
    yield equal("plans are forgotten", dict(ours.accepted("c", CPU_DEVICE)), {})

    other = Workspace(make())
    with ours.replaced("a", CPU_DEVICE, other):
        yield equal("replaced", ours._workspaces["a", CPU_DEVICE] is other, True)
    with ours.replaced("z", CPU_DEVICE, other):
        pass
    yield equal("as before", [*ours._workspaces], [("a", CPU_DEVICE)])
    yield equal("the same", ours._workspaces["a", CPU_DEVICE] is first, True)
    second = ours.get("b", CPU_DEVICE, make)
    first.accepted["key"] = 1  # type: ignore[assignment]
    ours.break_off("a", CPU_DEVICE, True, None)
    ours.break_off("a", CPU_DEVICE, False, PeerTimeout("op", 0, 1, 0, 1, 0, 1.0))
    ours.break_off("b", CPU_DEVICE, False, ValueError())
    yield equal("broken", ledger.broken, [(True, False), (False, True)])
    yield equal("told", ours.broken_off("a"), "2 that broke off, 1 of them given up")
    yield equal("nothing", ours.broken_off("c"), "")
    ours.opened("a", CPU_DEVICE)
    yield equal("later", ledger.broken[2:], [(False, False), (False, True)])
    with ours.set_aside("a"):
        yield equal("aside", [name for name, _ in ours._workspaces], ["b"])
        aside = ours.get("a", CPU_DEVICE, make)
    yield equal("back", ours._workspaces["a", CPU_DEVICE] is first, True)
    yield equal("its plans", dict(first.accepted), {})
    closed: Any = aside.transport
    yield equal("the other is closed", "close" in closed.asked, True)
    yield equal("still told", ours.broken_off("a"), "2 that broke off, 1 of them given up")
    for one in made:
        one.since()
    ours.synchronize("b")
    told: list[Any] = [first.transport, second.transport]
    yield equal("synchronized", [t.since() for t in told], [[], ["synchronize"]])
    ours.synchronize()
    yield equal("all", [t.since() for t in told], [["synchronize"]] * 2)
    ours.accepted("b", CPU_DEVICE)
    first.instance("x", "sm").report[protocol.REPORT_SET] = 1
    ours.check("b")
    yield equal("checked", raised(PeerTimeout, lambda: ours.check("a")), True)
    yield equal("checked, all", raised(PeerTimeout, ours.check), True)
    yield equal("in turn", raised(PeerTimeout, lambda: ours.synchronize("a")), True)
    ours.belongs("a", groups[0])
    with _existing(groups[1]):
        ours.belongs("a", groups[1])
        yield equal("another group", ours.known("a") is groups[1], True)
    yield equal("its workspaces", [name for name, _ in ours._workspaces], ["b"])
    ours.belongs("b", groups[2])
    ours.get(f"b{workspace.PART}inside", CPU_DEVICE, make)
    ours.close("b")
    yield equal("closed", (ours._workspaces, [*ours._groups]), ({}, ["a"]))
    yield equal("forgotten", (ours.broken_off("b"), len(ours._accepted)), ("", 1))
    ours.close()
    left = ours._workspaces, ours._groups, ours._accepted, ours._broken
    yield equal("all closed", left, ({}, {}, {}, {}))
    yield from _forked(ours, groups)


def _forked(ours: Registry, groups: list[Any]) -> Found:
    """In a forked process nothing of the parent's is used."""
    told: list[Any] = []
    before, os.register_at_fork = os.register_at_fork, lambda **calls: told.append(calls)
    try:
        new = Registry()
    finally:
        os.register_at_fork = before
    yield equal("told by the system", told, [{"after_in_child": new._forked}])
    ours.belongs("a", groups[0])
    ours.get("a", CPU_DEVICE, Noting)  # type: ignore[arg-type]
    ours._forked()
    yield equal("a fork", (ours._workspaces, ours._groups), ({}, {}))
    yield equal("a parent's", raised(InputError, lambda: ours.belongs("a", groups[0])), True)
    ours.belongs("a", groups[1])
    yield equal("own groups", [*ours._groups.values()], [groups[1]])


@contextmanager
def _existing(group: object) -> Iterator[None]:
    """torch knows ``group``."""
    groups: Any = workspace._world.pg_map
    before = workspace._world
    changed: Any = SimpleNamespace(pg_map=_Same(group, groups))
    workspace._world = changed
    try:
        yield
    finally:
        workspace._world = before


class _Group:
    """A process group; equal to itself only."""


class _Same:
    """Has one group."""

    def __init__(self, group: object, groups: object) -> None:
        self.group = group

    def __contains__(self, group: object) -> bool:
        return group is self.group


def waits(world: World, rank: int, seed: int) -> Found:
    """Interpreted waits that end in time, or too late, with a clock of their own."""
    transport: Any = Noting()
    fault = SharedFault(transport)
    other, control, third = (
        fault.control_block(op, t, workspace.first_words(t))
        for op, t in (("other", 2.0), ("op", 1.0), ("third", 3.0))
    )
    report = fault.report
    signals = torch.tensor([4, 0, 6, -(2**31)], dtype=torch.int32)
    interpreted.HostMemory().release(signals.data_ptr() + 4, 5)
    yield equal("released", signals.tolist(), [4, 5, 6, -(2**31)])
    tables = torch.tensor([[11, 22], [33, 44]])
    words = torch.tensor([tables[0].data_ptr(), tables[1].data_ptr()])
    control[protocol.TABLES : protocol.RECORD] = words.view(torch.int32)
    control[protocol.TABLE_RANKS], control[protocol.TABLE_RANK] = 2, 1
    first, block, told = control.clone(), control.data_ptr(), report.data_ptr()
    unused = other.clone(), third.clone()
    pauses: list[int] = []

    class Clock(interpreted.HostMemory):
        def seconds(self) -> float:
            return 0.3 * len(pauses)

        def pause(self, polls: int) -> None:
            pauses.append(polls)

    before, interpreted.MEMORY = interpreted.MEMORY, Clock()
    here, at = signals.data_ptr(), third.data_ptr()

    def queued() -> None:
        interpreted.wait(here, 1, 7, 2, 8, at, told)

    try:
        interpreted.wait(here, 2, 5, 1, 7, block, told)
        interpreted.wait(here, 1, 2**31 - 1, 3, 7, block, told)
        interpreted.refuse_later(here, 5, 1, 7, block, told)
        interpreted.wait_here(here, 4, 0, 7, block, told)
        yield equal("in time", (pauses, report.tolist()), ([], [0] * protocol.REPORT_WORDS))
        late: dict[str, Callable[[], object]] = {
            "wait": lambda: interpreted.wait(here, 3, 5, 0, 7, block, told),
            "meeting": lambda: interpreted.wait(here, 1, 5, 0, 7, block, told, 4),
            "exact": lambda: interpreted.wait(here, 2, 5, 1, 7, block, told, EXACT=True),
            "here": lambda: interpreted.wait_here(here, 5, 0, 7, block, told),
            "later": lambda: interpreted.refuse_later(here, 5, 2, 7, block, told),
            "expire": lambda: interpreted.expire(block, told, 0, 7, 5, 4),
        }
        polls = {"wait": 4, "meeting": 4, "exact": 4, "here": 4, "later": 0, "expire": 0}
        for name, call in late.items():
            pauses.clear()
            yield equal(name, raised(interpreted.WaitExpired, call), True)
            signal = 2 if name in ("exact", "later") else 0
            yield equal(name, report[:6].tolist(), [1, signal, 7, 5, int(signals[signal]), 1])
            yield equal(name, fault.reporter, ("op", 1.0))
            left = [each[2:6].tolist() for each in (other, third)]
            yield equal("waits of others", left, [[0, 0, 0, 4000000], [0, 0, 0, 6000000]])
            yield equal(name, len(pauses), polls[name])
            limits = [int(control[word]) for word in (2, 3, 4, 5)]
            yield equal(name, limits, [1, 0, 0, 2000000])
            yield equal(name, int(control[protocol.LEAVERS]), protocol.LATE)
            again = raised(
                interpreted.WaitExpired, lambda: interpreted.expire(block, told, 9, 9, 9, 9)
            )
            yield equal("in the same call", (again, int(control[1])), (True, protocol.LATE))
            after = raised(interpreted.WaitExpired, queued)
            yield equal("a queued call", (after, len(pauses)), (True, polls[name] + 1))
            yield equal("its fault", third[1:3].tolist(), [protocol.LATE, 1])
            yield equal("the first report", report[:6].tolist()[1:3], [signal, 7])
            for each, words in ((control, first), (other, unused[0]), (third, unused[1])):
                each.copy_(words)
            fault._head[protocol.FAULT] = 0
            report.zero_()
        signals[1] = -7
        yield equal("zero", int(interpreted.must_wait(4, 5, False)), 1)
        for programs in (2, 2, 2):
            interpreted.leave(block, 2**31 - 1, programs)
        leavers, epoch = int(control[protocol.LEAVERS]), int(control[protocol.EPOCH])
        yield equal("left", (leavers, epoch, tables.tolist()), (1, -(2**31), [[11, 22], [33, 44]]))
        control[protocol.LEAVERS] += protocol.LATE
        yield equal("last", bool(interpreted.last_to_leave(block, 2)), True)
        interpreted.advance(block, 9, 1)
        yield equal("own memory", (int(control[0]), tables.tolist()), (10, [[22, 22], [44, 44]]))
    finally:
        interpreted.MEMORY = before


SCENARIOS = (
    Local("waits", waits),
    Local("limits of waits", limits),
    Local("memory grows", growth),
    Local("caches", caches),
    Local("calls", calls),
    Local("registry", registry),
)
