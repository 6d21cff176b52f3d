"""Check the memory order of the tile-and-signal protocol in compiled PTX.

Why: the protocol relies on orders that the compiler may silently undo, and that no test on one fast
machine shows reliably: the stores of all threads before the signal, the loads of the waiter after
its wait, the async proxy after both. PTX shows them without a GPU.

Rules
-----
``store-before-signal``
    A signal is a release write of a signal scope, or a relaxed or volatile one after a fence of
    that scope. On every path to it, each store to global memory since must have been followed by a
    CTA (or partition) barrier; a bulk (TMA) store first by a full ``cp.async.bulk.wait_group``, as
    ``.read`` only says that the source may be reused. For a relaxed signal the barrier has to come
    before the fence. Writes to the parameter ``report`` are no signals of data.
``load-after-wait``
    A wait is an acquire read of a signal scope whose value decides whether its loop ends, or such a
    relaxed or volatile read with a fence after it. Within an iteration of the innermost loop
    around both, a guarded load must not run before a wait without any wait before it: that is how
    a load looks that software pipelining moved up. Nor may it come between a relaxed read and
    its fence. Where guards are named, a function without any wait is reported, too.
``proxy-fence``
    Between an acquire and a guarded bulk load there is a ``fence.proxy.async`` that covers global
    memory.

``guarded`` says which loads carry data that a peer sends: names (or indices) of kernel parameters,
"*name" for memory at addresses loaded from a table. None means every tile load: TMA, ``cp.async``
and vector loads. Kernels that also read local operands before their wait have to name their guarded
parameters. ``unsignalled`` names tensor descriptors whose stores no signal announces, such as those
of an output that is read after the kernel has ended.

What a clean report proves, and what it does not
------------------------------------------------
The walk covers every path of a function, feasible or not, so ``store-before-signal`` and
``proxy-fence`` err on the side of reporting (a thread that releases only its own stores is
reported, too). They do assume that the threads that store take part in the barrier, that the drain
is run by the thread that issued the store, and that the proxy fence is run by the thread that
issues the load: predicates are not followed.

``load-after-wait`` is weaker: it knows order, not which wait belongs to which load. So it misses a
wait for the wrong tile, one wait too few, and a load moved past the second of two waits.

Partitions of a warp-specialized kernel are walked one by one, and order between them through an
mbarrier is trusted. Calls are opaque. An address that went through shared memory has no known
origin (and counts as guarded if it is a tile load). Values, epochs, signal addresses and slots are
not checked. Nothing is checked below PTX: ptxas must keep these orders, and we trust it to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tests.compile.ptx_cfg import Facts, Function, Instruction, Loop, Origin, parse

STORE_BEFORE_SIGNAL = "store-before-signal"
LOAD_AFTER_WAIT = "load-after-wait"
PROXY_FENCE = "proxy-fence"
RULES: tuple[str, ...] = (STORE_BEFORE_SIGNAL, LOAD_AFTER_WAIT, PROXY_FENCE)

_OLDEST = 16  # commit groups are counted up to here


@dataclass(frozen=True)
class Violation:
    """``line`` (1-based) of the PTX where the order breaks, the rule, and what breaks it."""

    line: int
    rule: str
    text: str


@dataclass(frozen=True)
class Operations:
    """Lines that the rules were applied to. Assert on them, since a lint that saw nothing reports
    nothing."""

    signals: tuple[int, ...]
    waits: tuple[int, ...]
    guarded_loads: tuple[int, ...]
    stores: tuple[int, ...]
    bulk_stores: tuple[int, ...]


class HasPtx(Protocol):
    """A compiled kernel: its PTX and the names of the parameters of its entry."""

    @property
    def ptx(self) -> str | None: ...

    @property
    def params(self) -> Sequence[str]: ...


def lint(
    kernel: HasPtx | str,
    *,
    rules: Collection[str] = RULES,
    guarded: Collection[str | int] | None = None,
    unsignalled: Collection[str | int] = (),
    open_groups: int = 0,
    scopes: Collection[str] = ("sys",),
) -> list[Violation]:
    """Violations of ``rules`` in a compiled kernel or PTX text, in line order; empty means none.

    ``open_groups``: how many bulk store groups, counted from the youngest, a signal may leave open
    because it announces older ones. ``scopes``: "gpu" for signals between programs of one grid.
    """
    unknown = set(rules) - set(RULES)
    if unknown:
        raise ValueError(f"unknown rules {sorted(unknown)}: known are {', '.join(RULES)}")
    found: list[Violation] = []
    for protocol in _protocols(kernel, guarded, unsignalled, scopes):
        if STORE_BEFORE_SIGNAL in rules:
            found += _store_before_signal(protocol, open_groups)
        if LOAD_AFTER_WAIT in rules:
            found += _load_after_wait(protocol)
        if PROXY_FENCE in rules:
            found += _proxy_fence(protocol)
    return sorted(set(found), key=lambda v: (v.line, v.rule, v.text))


def operations(
    kernel: HasPtx | str,
    *,
    guarded: Collection[str | int] | None = None,
    unsignalled: Collection[str | int] = (),
    scopes: Collection[str] = ("sys",),
) -> Operations:
    """What `lint` with the same arguments looks at."""
    protocols = _protocols(kernel, guarded, unsignalled, scopes)

    def lines(wanted: Callable[[_Protocol, Instruction], bool]) -> tuple[int, ...]:
        return tuple(
            ins.line for p in protocols for ins in p.function.instructions if wanted(p, ins)
        )

    return Operations(
        signals=tuple(ins.line for p in protocols for ins, _ in p.signals()),
        waits=tuple(sorted(ins.line for p in protocols for ins in p.waits)),
        guarded_loads=lines(lambda p, ins: ins in p.guarded_loads),
        stores=lines(lambda p, ins: p.is_store(ins)),
        bulk_stores=lines(lambda p, ins: p.is_bulk_store(ins)),
    )


# ---- instructions


def _is_global(ins: Instruction) -> bool:
    return not (ins.has("shared") or ins.has("local") or ins.has("param") or ins.has("const"))


def _is_vector(ins: Instruction) -> bool:
    return ins.has("v2") or ins.has("v4") or ins.has("v8")


def is_bulk_store(ins: Instruction) -> bool:
    """A bulk (TMA) copy or reduction from shared to global memory."""
    return (
        ins.parts[0] == "cp"
        and re.match(r"cp\.(reduce\.)?async\.bulk\b.*\bglobal\b.*\bshared\b", ins.opcode)
        is not None
    )


def is_bulk_load(ins: Instruction) -> bool:
    """A bulk (TMA) copy from global to shared memory."""
    return (
        ins.parts[0] == "cp"
        and re.match(r"cp\.async\.bulk\b.*\bshared\b.*\bglobal\b", ins.opcode) is not None
    )


def is_proxy_fence(ins: Instruction) -> bool:
    """A fence between generic and async proxy that covers global memory."""
    return ins.opcode in ("fence.proxy.async", "fence.proxy.async.global")


class _Protocol:
    """One function with its instructions sorted into the protocol's roles."""

    def __init__(
        self,
        function: Function,
        guarded: frozenset[Origin] | None,
        unsignalled: frozenset[Origin],
        scopes: Collection[str],
        report: frozenset[Origin],
    ) -> None:
        self.function = function
        self.report = report
        self.guarded = guarded
        self.unsignalled = unsignalled
        self.scopes = frozenset(scopes)
        # By loop: of each instruction what it reads and writes, and whether it loads or stores
        # shared memory.
        self._steps: dict[Loop, list[tuple[list[str], list[str], bool, bool]]] = {}

    def _in_scope(self, ins: Instruction) -> bool:
        return not self.scopes.isdisjoint(ins.parts)

    def _is_strong(self, ins: Instruction) -> bool:
        """Relaxed in a signal scope; volatile counts, as the memory model gives it system scope."""
        return _is_global(ins) and (
            (ins.has("relaxed") and self._in_scope(ins)) or ins.has("volatile")
        )

    def is_fence(self, ins: Instruction) -> bool:
        wide = ("membar.sys",) if "gpu" not in self.scopes else ("membar.sys", "membar.gl")
        ordered = (
            ins.parts[0] == "fence"
            and (ins.has("acq_rel") or ins.has("sc"))
            and self._in_scope(ins)
        )
        return ordered or ins.opcode in wide

    def ends_poll(self, ins: Instruction) -> bool:
        """A fence that makes an acquire of the reads before it; one for all GPUs has every scope in
        it."""
        return self.is_fence(ins) or (
            ins.has("fence", "sys") and (ins.has("acq_rel") or ins.has("sc") or ins.has("acquire"))
        )

    def is_release(self, ins: Instruction) -> bool:
        writes = ins.parts[0] in ("st", "red", "atom", "multimem") and _is_global(ins)
        return writes and (ins.has("release") or ins.has("acq_rel")) and self._in_scope(ins)

    def is_acquire(self, ins: Instruction) -> bool:
        reads = ins.parts[0] in ("ld", "atom") and _is_global(ins)
        return reads and (ins.has("acquire") or ins.has("acq_rel")) and self._in_scope(ins)

    def is_strong_write(self, ins: Instruction) -> bool:
        return (
            ins.parts[0] in ("st", "red", "atom")
            and self._is_strong(ins)
            and not self.is_store(ins)
        )

    def is_store(self, ins: Instruction) -> bool:
        """Data written to global memory: plain and vector stores, and atomics on floating point."""
        if not _is_global(ins) or self.is_release(ins):
            return False
        if ins.parts[0] in ("st", "multimem"):
            return not ins.has("ld_reduce") and (_is_vector(ins) or not self._is_strong(ins))
        floats = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
        return ins.parts[0] in ("red", "atom") and any(ins.has(f) for f in floats)

    def is_bulk_store(self, ins: Instruction) -> bool:
        """A bulk store that a signal may announce: not one through unsignalled descriptors only."""
        if not is_bulk_store(ins):
            return False
        origin = self.function.origin(ins)
        return not origin or not origin <= self.unsignalled

    def _decides_loop(self, ins: Instruction) -> bool:
        """Whether the value read decides if the innermost loop ends, directly or shared through
        shared memory."""
        loop = self.function.innermost_loop(ins)
        if loop is None:
            return False
        blocks = [self.function.blocks[b] for b in sorted(loop.blocks)]
        if loop not in self._steps:
            inside = (i for b in blocks for i in b.instructions)
            self._steps[loop] = [
                (i.reads, i.writes, i.has("ld", "shared"), i.has("st", "shared")) for i in inside
            ]
        tainted, shared, before = set(ins.writes), False, -1
        while before != (before := len(tainted) + shared):
            for reads, writes, loads, stores in self._steps[loop]:
                if not tainted.isdisjoint(reads) or (shared and loads):
                    tainted.update(writes)
                    shared |= stores
        exits = [b.instructions[-1] for b in blocks if not loop.blocks.issuperset(b.successors)]
        return any(last.predicate in tainted for last in exits)

    @cached_property
    def polls(self) -> frozenset[Instruction]:
        """Relaxed or volatile reads that spin: half a wait, until a fence."""
        reads = [
            i
            for i in self.function.instructions
            if i.parts[0] in ("ld", "atom") and self._is_strong(i)
        ]
        return frozenset(i for i in reads if self._decides_loop(i))

    @cached_property
    def waits(self) -> frozenset[Instruction]:
        """The instruction at which each wait acquires: the spinning read, or the fence after it."""
        spins = {
            i for i in self.function.instructions if self.is_acquire(i) and self._decides_loop(i)
        }
        fences = {
            i for i, polled in self.function.flow(self._poll_step) if polled and self.ends_poll(i)
        }
        return frozenset(spins | fences)

    def _poll_step(self, facts: Facts, ins: Instruction) -> Facts:
        if ins in self.polls:
            return facts | {("polled", ins.line)}
        return frozenset() if self.ends_poll(ins) else facts

    @cached_property
    def guarded_loads(self) -> frozenset[Instruction]:
        return frozenset(i for i in self.function.instructions if self._is_guarded_load(i))

    def _is_guarded_load(self, ins: Instruction) -> bool:
        if ins.parts[0] not in ("ld", "cp"):
            return False
        tile = is_bulk_load(ins) or re.match(r"cp\.async\.c[ag]\b", ins.opcode) is not None
        plain = (
            ins.parts[0] == "ld"
            and ins.has("global")
            and not self.is_acquire(ins)
            and ins not in self.polls
        )
        if not tile and not plain:
            return False
        origin = self.function.origin(ins)
        if self.guarded is None or not origin:
            return tile or _is_vector(ins)
        return not self.guarded.isdisjoint(origin)

    def _signal_step(self, facts: Facts, ins: Instruction) -> Facts:
        """Open stores: ("stored", line), ("bulk", line, groups committed since it), then
        ("drained", line) until a barrier. After a fence: ("fence",), and ("late", line) for the
        stores open when it ran."""
        if self.is_store(ins):
            return facts | {("stored", ins.line)}
        if self.is_bulk_store(ins):
            return facts | {("bulk", ins.line, 0)}
        if ins.opcode == "cp.async.bulk.commit_group":
            return frozenset(
                ("bulk", f[1], min(f[2] + 1, _OLDEST)) if f[0] == "bulk" else f for f in facts
            )
        if ins.opcode == "cp.async.bulk.wait_group":
            open_groups = int(ins.operands)
            return frozenset(
                ("drained", f[1]) if f[0] == "bulk" and f[2] > open_groups else f for f in facts
            )
        if self.function.is_barrier(ins):
            return frozenset(f for f in facts if f[0] not in ("stored", "drained"))
        if self.is_fence(ins):
            late = {("late", f[1]) for f in facts if f[0] in ("stored", "drained")}
            return frozenset(f for f in facts if f[0] != "late") | late | {("fence",)}
        return facts

    def is_report(self, ins: Instruction) -> bool:
        """A write to the report about a timeout, by the thread that wrote the other words: it
        announces no data."""
        origin = self.function.origin(ins)
        return bool(origin) and origin <= self.report

    def signals(self) -> Iterator[tuple[Instruction, Facts]]:
        for ins, facts in self.function.flow(self._signal_step):
            if self.is_release(ins):
                yield ins, frozenset(f for f in facts if f[0] != "late")
            elif self.is_strong_write(ins) and ("fence",) in facts:
                yield ins, facts


def _protocols(
    kernel: HasPtx | str,
    guarded: Collection[str | int] | None,
    unsignalled: Collection[str | int],
    scopes: Collection[str],
) -> list[_Protocol]:
    ptx, params = (kernel, ()) if isinstance(kernel, str) else (kernel.ptx, tuple(kernel.params))
    if ptx is None:
        raise ValueError("the kernel has no PTX: it was not compiled for an NVIDIA target")
    wanted = None if guarded is None else frozenset(_parameter(g, params) for g in guarded)
    silent = frozenset(_parameter(u, params) for u in unsignalled)
    report = frozenset({_parameter("report", params)} if "report" in params else ())
    return [_Protocol(function, wanted, silent, scopes, report) for function in parse(ptx)]


def _parameter(guard: str | int, params: Sequence[str]) -> Origin:
    if isinstance(guard, int):
        return guard, 0
    name = guard.removeprefix("*")
    if name not in params:
        raise ValueError(
            f"no parameter {name!r}: the kernel has {', '.join(params) or 'no known names'}"
        )
    return params.index(name), int(guard != name)


# ---- rules


def _store_before_signal(protocol: _Protocol, open_groups: int) -> Iterator[Violation]:
    reasons = {
        "stored": "no barrier between the store at line {} and",
        "drained": "no barrier between the drain of the bulk store at line {} and",
        "bulk": "the bulk store at line {} is not drained by a full wait_group before",
        "late": "the fence before this signal does not follow a barrier for the store at line {}:",
    }
    for ins, facts in protocol.signals():
        for fact in facts if not protocol.is_report(ins) else ():
            tolerated = fact[0] == "bulk" and fact[2] <= open_groups and open_groups > 0
            if fact[0] in reasons and not tolerated:
                yield Violation(
                    ins.line, STORE_BEFORE_SIGNAL, f"{reasons[fact[0]].format(fact[1])} {ins.text}"
                )


def _load_after_wait(protocol: _Protocol) -> Iterator[Violation]:
    function = protocol.function
    # as when a wait's result was not used
    if protocol.guarded and not protocol.waits and not protocol.polls:
        for load in protocol.guarded_loads:
            yield Violation(
                load.line, LOAD_AFTER_WAIT, f"{function.name} has no wait at all before {load.text}"
            )
    for load in protocol.guarded_loads:
        for wait in protocol.waits:
            loop = function.innermost_loop(load, wait)
            if not function.runs_before(load, wait, loop):
                continue
            if not any(function.runs_before(other, load, loop) for other in protocol.waits):
                yield Violation(
                    load.line,
                    LOAD_AFTER_WAIT,
                    f"runs before the wait at line {wait.line}: {load.text}",
                )
    for ins, polled in function.flow(protocol._poll_step):
        if ins in protocol.guarded_loads:
            for _, line in polled:
                text = f"no fence after the relaxed read at line {line}: {ins.text}"
                yield Violation(ins.line, LOAD_AFTER_WAIT, text)


def _proxy_fence(protocol: _Protocol) -> Iterator[Violation]:
    def step(facts: Facts, ins: Instruction) -> Facts:
        if protocol.is_acquire(ins) or ins in protocol.waits:
            return facts | {("acquired", ins.line)}
        return frozenset() if is_proxy_fence(ins) else facts

    for ins, facts in protocol.function.flow(step):
        if is_bulk_load(ins) and ins in protocol.guarded_loads:
            for _, line in facts:
                yield Violation(
                    ins.line,
                    PROXY_FENCE,
                    f"no proxy fence after the acquire at line {line}: {ins.text}",
                )
