"""Parse PTX text into instructions, basic blocks, loops and the origin of addresses.

Only what `ptx_lint` needs: which instruction can run before which, which ones share a loop, and
which kernel parameter an address comes from. This is not a general PTX parser: operands stay text,
types are not checked, calls are opaque, and each .entry or .func is a separate graph.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Facts = frozenset[tuple[Any, ...]]
Origin = tuple[int, int]
"""(index of a kernel parameter, 0 for the parameter's own value or 1 for what was loaded through
it)"""

_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")
_PIECES = re.compile(r"[;{}]|[^;{}]+")
_HEAD = re.compile(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$]+)")
_ENDS = ("ret", "exit", "trap")
_ORDERED = frozenset(
    ("ld", "st", "red", "atom", "multimem", "cp", "bar", "barrier", "fence", "membar")
)
_NO_RESULT = (
    "st",
    "red",
    "bar",
    "barrier",
    "bra",
    "brx",
    "fence",
    "membar",
    "cp",
    "call",
    "mbarrier",
    "setmaxnreg",
)


@dataclass(eq=False)
class Instruction:
    """One statement. ``scope`` is the path of braces around it: labels in inline assembly are local
    to its braces."""

    line: int
    text: str
    opcode: str
    predicate: str | None
    operands: str
    scope: tuple[int, ...]
    block: int = -1
    position: int = -1

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at '.' and '::', modifiers in their order."""
        return tuple(re.split(r"::|\.", self.opcode))

    @cached_property
    def _set_of_parts(self) -> frozenset[str]:
        return frozenset(self.parts)

    def has(self, *modifiers: str) -> bool:
        return self._set_of_parts.issuperset(modifiers)

    @property
    def is_ordered(self) -> bool:
        """Whether this touches memory, or orders what does. All else is most of a kernel."""
        return not _ORDERED.isdisjoint(self._set_of_parts)

    @cached_property
    def _names(self) -> tuple[list[str], list[str]]:
        """Names written and names read: PTX puts the result first, vector results in braces."""
        depth, cut = 0, len(self.operands)
        for i, char in enumerate(self.operands):
            depth += (char in "{[(") - (char in "}])")
            if char == "," and depth == 0:
                cut = i
                break
        first, rest = _NAME.findall(self.operands[:cut]), _NAME.findall(self.operands[cut:])
        return ([], first + rest) if self.parts[0] in _NO_RESULT else (first, rest)

    @property
    def writes(self) -> list[str]:
        return self._names[0]

    @property
    def reads(self) -> list[str]:
        return self._names[1]

    @property
    def address(self) -> list[str]:
        """Names that make the global address: of a copy into shared memory the second bracket, else
        the first."""
        brackets = re.findall(r"\[([^\]]*)\]", self.operands)
        at = 1 if re.match(r"cp\..*\bshared\b.*\bglobal\b", self.opcode) else 0
        return _NAME.findall(brackets[at].split(",")[0]) if at < len(brackets) else []


@dataclass(eq=False)
class Block:
    index: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    header: int
    blocks: frozenset[int]


class _Labels:
    """Where labels point, by scope, and the tables of indirect branches."""

    def __init__(self) -> None:
        self.at: dict[tuple[tuple[int, ...], str], int] = {}
        self.tables: dict[str, list[str]] = {}
        self.last = ""

    def targets(self, branch: Instruction) -> list[int]:
        names = [n for n in _NAME.findall(branch.operands) if not n.startswith("%")]
        names = [t for n in names for t in self.tables.get(n, [n])]
        found = []
        for name in names:
            scope = branch.scope
            while (scope, name) not in self.at and scope:
                scope = scope[:-1]
            if (scope, name) not in self.at:
                raise ValueError(f"line {branch.line}: no label {name!r} for {branch.text!r}")
            found.append(self.at[scope, name])
        return found


def is_fork(ins: Instruction) -> bool:
    """Whether this is the barrier of all warps with which warp-specialized kernels start and end
    their partitions."""
    return ins.opcode == "barrier.sync" and ins.operands.strip() == "1"


class Function:
    """The graph of one .entry or .func."""

    def __init__(
        self, name: str, threads: int | None, instructions: list[Instruction], labels: _Labels
    ) -> None:
        self.name = name
        self.threads = threads
        self.instructions = instructions
        self.blocks: list[Block] = []
        starts = {0, *labels.at.values()}
        for i, ins in enumerate(instructions):
            if is_fork(ins):
                starts |= {i, i + 1}
            elif ins.parts[0] in ("bra", "brx", *_ENDS):
                starts.add(i + 1)
        order = sorted(s for s in starts if s < len(instructions))
        number = {start: n for n, start in enumerate(order)}
        for n, (start, end) in enumerate(zip(order, [*order[1:], len(instructions)], strict=True)):
            self.blocks.append(Block(n, instructions[start:end]))
            for position, ins in enumerate(instructions[start:end]):
                ins.block, ins.position = n, position
        for block in self.blocks:
            last = block.instructions[-1]
            kind = last.parts[0]
            following = (
                [number[t] for t in labels.targets(last) if t in number]
                if kind in ("bra", "brx")
                else []
            )
            leaves = kind == "brx" or (kind in ("bra", *_ENDS) and last.predicate is None)
            if not leaves and block.index + 1 < len(self.blocks):
                following.append(block.index + 1)
            block.successors = list(dict.fromkeys(following))
            for s in block.successors:
                self.blocks[s].predecessors.append(block.index)

    # ---- loops and order

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, smallest first; back edges to one header make one loop."""
        every = frozenset(range(len(self.blocks)))
        dominators = [frozenset([0])] + [every] * (len(self.blocks) - 1)
        changed = True
        while changed:
            changed = False
            for block in self.blocks[1:]:
                above = [dominators[p] for p in block.predecessors]
                new = (
                    frozenset.intersection(*above) | {block.index}
                    if above
                    else frozenset([block.index])
                )
                if new != dominators[block.index]:
                    dominators[block.index], changed = new, True
        bodies: dict[int, set[int]] = {}
        for block in self.blocks:
            for header in set(block.successors) & dominators[block.index]:
                body = bodies.setdefault(header, {header})
                stack = [block.index]
                while stack:
                    at = stack.pop()
                    if at not in body:
                        body.add(at)
                        stack.extend(self.blocks[at].predecessors)
        return sorted(
            (Loop(h, frozenset(b)) for h, b in bodies.items()), key=lambda loop: len(loop.blocks)
        )

    def innermost_loop(self, *instructions: Instruction) -> Loop | None:
        """The smallest loop around all of the instructions."""
        blocks = {ins.block for ins in instructions}
        return next((loop for loop in self.loops if blocks <= loop.blocks), None)

    def runs_before(self, first: Instruction, then: Instruction, loop: Loop | None) -> bool:
        """Whether ``then`` can run after ``first`` in the same iteration of ``loop`` (in the same
        call, if None)."""
        if first.block == then.block and first.position < then.position:
            return True
        seen: set[int] = set()
        stack = [first.block]
        while stack:
            for s in self.blocks[stack.pop()].successors:
                if s in seen or (loop is not None and (s == loop.header or s not in loop.blocks)):
                    continue
                if s == then.block:
                    return True
                seen.add(s)
                stack.append(s)
        return False

    @cached_property
    def _ordered(self) -> list[list[Instruction]]:
        return [[ins for ins in block.instructions if ins.is_ordered] for block in self.blocks]

    def flow(
        self, step: Callable[[Facts, Instruction], Facts]
    ) -> Iterator[tuple[Instruction, Facts]]:
        """Forward "may" analysis: instructions that touch or order memory, and what holds before on
        at least one path."""
        entering: dict[int, Facts] = {0: frozenset()}
        work = [0]
        while work:
            block = self.blocks[work.pop()]
            facts = entering[block.index]
            for ins in self._ordered[block.index]:
                facts = step(facts, ins)
            for s in block.successors:
                merged = entering.get(s, frozenset()) | facts
                if s not in entering or merged != entering[s]:
                    entering[s] = merged
                    work.append(s)
        for index in sorted(entering):
            facts = entering[index]
            for ins in self._ordered[index]:
                yield ins, facts
                facts = step(facts, ins)

    # ---- barriers

    @cached_property
    def _one_warp_blocks(self) -> frozenset[int]:
        """Blocks run by one warp alone: a 32-thread kernel, or a partition that has no barrier but
        that of the warp.

        A partition is what can be reached from after a fork. Partitions may share blocks (LLVM
        merges equal tails): those count as one warp's only if all that share them do.
        """
        if self.threads == 32:
            return frozenset(range(len(self.blocks)))
        forks = {b.index for b in self.blocks if is_fork(b.instructions[0])}
        alone: set[int] = set()
        crowded: set[int] = set()
        for entry in {s for fork in forks for s in self.blocks[fork].successors} - forks:
            part, stack = {entry}, [entry]
            while stack:
                reached = set(self.blocks[stack.pop()].successors) - forks - part
                part |= reached
                stack.extend(reached)
            inside = [ins for at in part for ins in self.blocks[at].instructions]
            wide = any(ins.parts[0] in ("bar", "barrier") and not ins.has("warp") for ins in inside)
            (crowded if wide else alone).update(part)
        return frozenset(alone - crowded)

    def is_barrier(self, ins: Instruction) -> bool:
        """Whether the instruction makes the warps of its CTA or partition wait for each other."""
        if ins.parts[0] not in ("bar", "barrier"):
            return False
        if ins.has("warp"):
            return ins.block in self._one_warp_blocks
        return ins.has("sync") or ins.has("red") or ins.has("cluster", "wait")

    # ---- where addresses come from

    @cached_property
    def _origins(self) -> dict[str, frozenset[Origin]]:
        """Parameters that flow into each register, ignoring order and, as conservative, any select
        or merge."""
        parameter = re.compile(re.escape(self.name) + r"_param_(\d+)$")
        origins: dict[str, frozenset[Origin]] = {}

        def of(name: str) -> frozenset[Origin]:
            match = None if name.startswith("%") else parameter.match(name)
            return frozenset([(int(match[1]), 0)]) if match else origins.get(name, frozenset())

        steps = [
            (
                ins.writes,
                [n for n in ins.reads if not n.startswith("%p")],
                ins.parts[0] in ("ld", "atom") and not ins.has("param"),
            )
            for ins in self.instructions  # what travels through shared memory is not followed
            if ins.writes and not (ins.parts[0] in ("ld", "ldmatrix") and ins.has("shared"))
        ]
        changed = True
        while changed:
            changed = False
            for writes, reads, loads in steps:
                found: frozenset[Origin] = frozenset().union(*map(of, reads))
                if not found:
                    continue
                if loads:
                    found = frozenset((p, 1) for p, _ in found)
                for name in writes:
                    if not found <= origins.get(name, frozenset()):
                        origins[name], changed = origins.get(name, frozenset()) | found, True
        return origins

    def origin(self, ins: Instruction) -> frozenset[Origin]:
        """Parameters the global address of a load or store is made of; empty if it cannot be
        told."""
        return frozenset().union(*(self._origins.get(n, frozenset()) for n in ins.address))


@functools.lru_cache(maxsize=64)
def parse(ptx: str) -> tuple[Function, ...]:
    """All .entry and .func bodies of a PTX module; kept, since one is looked at many times."""
    lines = [line.split("//")[0] for line in re.sub(r"/\*.*?\*/", "", ptx).split("\n")]
    functions, at = [], 0
    while at < len(lines):
        head = _HEAD.search(lines[at])
        if not head:
            at += 1
            continue
        start = at
        while at < len(lines) and not re.search(r"[{;]", lines[at]):
            at += 1
        if at == len(lines) or ";" in lines[at].split("{")[0]:
            at += 1  # a declaration without a body
            continue
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", " ".join(lines[start : at + 1]))
        instructions, labels, at = _body(lines, at)
        if instructions:
            functions.append(
                Function(head[1], int(threads[1]) if threads else None, instructions, labels)
            )
    return tuple(functions)


def _body(lines: list[str], at: int) -> tuple[list[Instruction], _Labels, int]:
    """Statements from the line with the opening brace on, and the number of the line after the
    closing one."""
    instructions: list[Instruction] = []
    labels = _Labels()
    scope: tuple[int, ...] = ()
    scopes = vector = 0
    statement, begun, opened = "", at, False
    while at < len(lines):
        text = lines[at] if opened else lines[at][lines[at].index("{") :]
        if re.match(r"\s*\.loc\b", text):
            at += 1
            continue
        for piece in [*_PIECES.findall(text), "\n"]:
            if piece == "{" and not statement.strip():
                opened, scopes, scope = True, scopes + 1, (*scope, scopes)
            elif piece == "}" and vector == 0:
                scope, statement = scope[:-1], ""
                if not scope:
                    return instructions, labels, at + 1
            elif piece == ";":
                _end(statement.strip(), begun, scope, instructions, labels)
                statement = ""
            else:
                vector += (piece == "{") - (piece == "}")
                if not statement.strip():
                    begun = at
                statement += piece
                while (label := _LABEL.match(statement)) is not None:
                    labels.at[scope, label[1]] = len(instructions)
                    labels.last = label[1]
                    statement = statement[label.end() :]
        at += 1
    raise ValueError("PTX ends inside a function")


def _end(
    statement: str,
    line: int,
    scope: tuple[int, ...],
    instructions: list[Instruction],
    labels: _Labels,
) -> None:
    if statement.startswith(".branchtargets"):
        labels.tables[labels.last] = _NAME.findall(statement[len(".branchtargets") :])
        return
    match = re.match(r"(?:@!?\s*([\w$%]+)\s+)?([a-z]\S*)\s*(.*)", statement, re.DOTALL)
    if match:  # else a directive
        text = re.sub(r"\s+", " ", statement)
        instructions.append(Instruction(line + 1, text, match[2], match[1], match[3], scope))
