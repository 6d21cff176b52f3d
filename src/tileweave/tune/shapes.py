"""The shapes to tune: from a file, or as sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tileweave.bench.cases import Case
from tileweave.errors import InputError
from tileweave.files import parse_json, read_text, short
from tileweave.tune.measure import problem_of

_MOST = 2**31 - 1
_ALLOWED = "a JSON list of [rows, cols, depth], or lines of three positive numbers"


def from_file(op: str, path: Path, dtype: str) -> list[Case]:
    """The shapes of a file: a JSON list of ``[rows, cols, depth]``, or lines ``rows cols depth``
    with ``#`` for comments. Sizes are those of the whole problem, as for ``tileweave trace``."""
    text = read_text(path, "the shapes in", _ALLOWED, "write it so")
    if text.lstrip().startswith("["):
        rows = parse_json(text, f"the shapes in {short(path)}", _ALLOWED, "write it so")
    else:
        lines = [line.partition("#")[0].replace(",", " ").split() for line in text.splitlines()]
        rows = [[_whole(word) for word in words] for words in lines]
        rows = [row for row in rows if row]
    if not rows:
        raise _refused(path, "without a shape")
    return [_case(op, path, row, dtype) for row in rows]


def _whole(word: str) -> int | str:
    """The number that ``word`` is, of at most ten digits; other words are refused as they are."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 10 else word[:60]


def _case(op: str, path: Path, row: Any, dtype: str) -> Case:
    fits = isinstance(row, list) and len(row) == 3
    if not fits or not all(type(size) is int and 0 < size <= _MOST for size in row):
        raise _refused(path, f"with {short(repr(row), 60)}")
    rows, cols, depth = row
    return of_sizes(op, rows, cols, depth, dtype)


def _refused(path: Path, what: str) -> InputError:
    return InputError(
        f"asked: the shapes in {short(path)}, {what}; allowed: {_ALLOWED}; remedy: write it so"
    )


def of_sizes(op: str, rows: int, cols: int, depth: int, dtype: str) -> Case:
    """The case of a whole problem."""
    name = f"{rows}-{cols}-{depth}"
    return Case(op, name, rows, cols, depth, rows <= 1024, "large", dtype)


def without_repeats(cases: list[Case], world_size: int) -> list[Case]:
    """Each problem once: sizes are rounded down to what ranks share equally."""
    first: dict[tuple[str, object], Case] = {}
    for case in cases:
        first.setdefault((case.op, problem_of(case, world_size)), case)
    return list(first.values())
