"""Mutants of kernels and transports, made from their syntax trees: each is one small fault in a
signal, a wait, a slot or parity, a select, or a count.

Only the standard library is used: nothing here is run. ``mutate`` runs them.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1]
# What exploration runs as it is. Gluon kernels and transports of devices cannot be interpreted;
# signal.py and nvshmem.py have bodies in words.py instead, and tests/compile reads their code.
PLACES = ("kernels", "device/triton", "device/interpreter/words.py", "transport/workspace.py")
NEVER = re.compile(
    r"hopper|compile_all|launch\.py|descriptors|trace|/record|__init__|/signal\.py|/nvshmem\.py"
)
KINDS = ("signal", "wait", "slot", "select", "count")
SIGNALS = re.compile(
    r"^(notify|come$|meet$|advance|leave|count_|tell|announce|signal_copy|release|poison|stamp_|"
    r"atomic_|put_marked|expire|store$|free|append)"
)
WAITS = re.compile(r"^(wait|await|refuse|barrier|block_barrier|acquire$|fence$|faulted|poll|join$)")
# arguments that say where something is or what it does for reports, and not which call or word
POINTERS = re.compile(
    r"^(peers|signals|signal_table|control|report|counters|tensors|instance|unit|C|sizes|self)$"
)
SLOTS = re.compile(r"slot|parity|half|epoch|captured")
LESS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
LESS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


@dataclass(frozen=True)
class Place:
    """A function of the package. ``name`` is its qualified name; ``first`` and ``line`` are the
    lines of its first decorator and of its ``def``."""

    file: str
    name: str
    first: int
    line: int


@dataclass(frozen=True)
class Mutant:
    """One fault: node ``index`` of the walk through the function becomes its variant ``variant``.

    ``key`` names it without line numbers, so that it stays the same where other lines move.
    """

    place: Place
    kind: str
    key: str
    line: int
    index: int
    variant: int


def files() -> list[str]:
    """The files that have mutants."""
    found = []
    for place in PLACES:
        path = SOURCE / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(SOURCE).as_posix()
            if not NEVER.search(name):
                found.append(name)
    return found


@lru_cache(maxsize=128)
def functions(file: str) -> tuple[tuple[Place, ast.FunctionDef], ...]:
    """Functions and methods of a file; what is defined inside a function belongs to it. They are
    shared: change a copy."""

    def of(body: list[ast.stmt], prefix: str) -> Iterator[tuple[Place, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from of(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                first = min((d.lineno for d in node.decorator_list), default=node.lineno)
                yield Place(file, prefix + node.name, first, node.lineno), node

    return tuple(of(ast.parse((SOURCE / file).read_text("utf-8")).body, ""))


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file, in the order of the source."""
    for place, function in functions(file):
        told = Counter[str]()
        for index, node in enumerate(_walk(function)):
            before, seen = ast.unparse(node), set[str]()
            for variant, (kind, changed) in enumerate(variants(node)):
                after = ast.unparse(changed)
                if after in seen or after == before:
                    continue
                seen.add(after)
                text = f"{_short(before)} -> {_short(after)}"
                told[text] += 1
                number = f" #{told[text]}" if told[text] > 1 else ""
                key = f"{file}:{place.name}: {text}{number}"
                yield Mutant(place, kind, key, node.lineno, index, variant)


def mutated(mutant: Mutant) -> ast.FunctionDef:
    """The function of ``mutant`` with its fault."""
    function = next(node for place, node in functions(mutant.place.file) if place == mutant.place)
    node = _walk(function)[mutant.index]
    return replaced(function, mutant.index, list(variants(node))[mutant.variant][1])


def statements(function: ast.FunctionDef) -> list[int]:
    """The indices of statements in the walk through ``function``."""
    return [i for i, node in enumerate(_walk(function)) if isinstance(node, ast.stmt)]


@lru_cache(maxsize=4096)
def _statements_of(place: Place) -> list[int]:
    return statements(next(node for one, node in functions(place.file) if one == place))


def statement_of(mutant: Mutant) -> int:
    """The index of the statement that ``mutant`` changes, or that has the expression it changes:
    the walk visits that of a compound statement before the statements inside."""
    return max(index for index in _statements_of(mutant.place) if index <= mutant.index)


def noted(function: ast.FunctionDef, numbers: dict[int, int], note: str) -> ast.FunctionDef:
    """A copy of ``function`` that calls ``note`` with its number before each of its
    statements."""
    whole = copy.deepcopy(function)
    of = {
        id(node): number
        for i, node in enumerate(_walk(whole))
        if (number := numbers.get(i)) is not None
    }

    class Note(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            changed = self.generic_visit(node)
            if id(node) not in of:
                return changed
            call = ast.Call(ast.Name(note, ast.Load()), [ast.Constant(of[id(node)])], [])
            return [ast.copy_location(ast.Expr(call), node), changed]

    whole.body = [one for node in whole.body for one in _as_list(Note().visit(node))]
    return ast.fix_missing_locations(whole)


def _as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def replaced(function: ast.FunctionDef, index: int, changed: ast.AST) -> ast.FunctionDef:
    """A copy of ``function`` with another node at ``index`` of its walk."""
    whole = copy.deepcopy(function)
    old = _walk(whole)[index]

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed if node is old else super().visit(node)

    found: ast.FunctionDef = Replace().visit(whole)  # type: ignore[assignment]
    return ast.fix_missing_locations(ast.copy_location(found, function))


def _walk(function: ast.FunctionDef) -> list[ast.expr | ast.stmt]:
    """Statements and expressions of a body, but for its docstring, annotations and defaults."""
    found: list[ast.expr | ast.stmt] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.stmt, ast.expr)):
            found.append(node)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            below = node.body if isinstance(node.body, list) else [node.body]
        elif isinstance(node, ast.AnnAssign):
            below = [node.value] if node.value is not None else []
        elif isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return  # errors say what is wrong, they do nothing
        else:
            below = list(ast.iter_child_nodes(node))
        for child in below:
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                visit(child)

    for statement in function.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            visit(statement)
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:110]}...{text[-47:]}"


def _called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def variants(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """(kind, what replaces ``node``) of each fault at this node."""
    called = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    name = _called(called) if called is not None else ""
    kind = "signal" if SIGNALS.match(name) else "wait" if WAITS.match(name) else ""
    if kind and isinstance(node, ast.Expr):
        yield kind, ast.Pass()
    elif kind and isinstance(node, ast.Assign):
        yield kind, _with(node, "value", ast.Constant(0))
    if isinstance(node, ast.Call):
        if not ast.unparse(node.func).startswith("record."):  # compiled in for traces only
            yield from _of_call(node)
    elif isinstance(node, ast.BinOp):
        yield from _of_arithmetic(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in LESS:
        yield "select", _with(node, "ops", [LESS[type(node.ops[0])]()])
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not _is_debug(node.test):
        if not isinstance(node, ast.While):
            yield "select", _with(node, "test", ast.Constant(True))
        yield "select", _with(node, "test", ast.Constant(False))
    elif isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield "select", rest[0] if len(rest) == 1 else _with(node, "values", rest)
    elif isinstance(node, ast.AugAssign):
        yield "count", ast.Pass()


def _is_debug(test: ast.expr) -> bool:
    return bool(re.search("TRACE|STAMPED", ast.unparse(test)))


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = _called(node)
    if name == "where" and len(node.args) == 3:
        yield "select", node.args[1]
        yield "select", node.args[2]
    if name in ("range", "static_range") and node.args:
        at = 1 if len(node.args) > 1 else 0
        for place, by in {(0, 1), (at, -1)} if len(node.args) > 1 else ((0, -1),):
            args = [*node.args]
            args[place] = _plus(args[place], by)
            yield "count", _with(node, "args", args)
    if name == "cdiv" and len(node.args) == 2:
        yield "count", ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1])
    if name in ("minimum", "maximum", "min", "max") and len(node.args) == 2:
        yield "select", node.args[0]
        yield "select", node.args[1]
    kind = "signal" if SIGNALS.match(name) else "wait" if WAITS.match(name) else ""
    if kind and name not in ("store", "append", "join"):
        for i, argument in enumerate(node.args):
            if not _points(argument):
                for by in (1, -1):
                    args = [*node.args]
                    args[i] = _plus(argument, by)
                    yield kind, _with(node, "args", args)
    for i, keyword in enumerate(node.keywords):
        value = keyword.value
        changed: ast.expr | None = None
        if keyword.arg == "mask" and name != "load":
            changed = ast.Constant(None)
        elif keyword.arg == "sem":
            changed = ast.Constant("relaxed")
        elif keyword.arg == "EXACT":
            changed = ast.UnaryOp(ast.Not(), value)
        elif keyword.arg in ("COUNT", "FIRST"):
            changed = _plus(value, -1 if keyword.arg == "COUNT" else 1)
        if changed is not None and ast.dump(changed) != ast.dump(value):
            keywords = [*node.keywords]
            keywords[i] = ast.keyword(keyword.arg, changed)
            yield (kind or "select"), _with(node, "keywords", keywords)


def _of_arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    text, two = ast.unparse(node), node.right
    if isinstance(node.op, ast.BitAnd):
        if isinstance(two, ast.Constant):
            yield "slot", ast.Constant(0)
            yield "slot", ast.Constant(1)
        else:
            yield "select", node.left
            yield "select", node.right
    elif isinstance(node.op, ast.BitOr):
        yield "select", node.left
        yield "select", node.right
    elif isinstance(node.op, ast.BitXor):
        yield "slot", node.left
    elif isinstance(node.op, ast.Mod):
        yield "count", node.left
    elif isinstance(node.op, (ast.Add, ast.Sub)):
        kind = "slot" if SLOTS.search(text) else "count"
        by_number = isinstance(two, ast.Constant) and isinstance(two.value, int)
        if by_number or SLOTS.search(ast.unparse(two)) or SLOTS.search(ast.unparse(node.left)):
            yield kind, node.left


def _points(argument: ast.expr) -> bool:
    """Whether an argument is a place, a text or a type, and no number of a call, a rank or a
    word."""
    if isinstance(argument, ast.Constant):
        return not isinstance(argument.value, int) or isinstance(argument.value, bool)
    text = ast.unparse(argument)
    return bool(
        POINTERS.match(text)
        or isinstance(argument, (ast.Starred, ast.Tuple, ast.List, ast.Lambda, ast.IfExp))
        or re.match(r"^C\.|^[A-Z_]+$|.*(table|pointer|signals|counters|control|report)", text)
    )


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def _plus(value: ast.expr, by: int) -> ast.expr:
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return ast.Constant(value.value + by)
    return ast.BinOp(value, ast.Add() if by > 0 else ast.Sub(), ast.Constant(abs(by)))
