"""Configs that were measured on this machine, or that a caller forces. They precede predictions.

A tuner measures candidates of a problem: it forces one after the other (:func:`forced`), and
installs the fastest (:func:`install`). All ranks must install the same choices. No torch, no
triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tileweave.planning.problem import MatmulConfig, Problem


@dataclass(frozen=True, slots=True)
class Choice:
    """The config that was measured fastest for ``problem``.

    op : the operator.
    problem : its sizes, as the operator's planner counts them.
    config : None for the unfused path.
    us : time in microseconds; None if it is not known.
    """

    op: str
    problem: Problem
    config: MatmulConfig | None
    us: float | None = None


_INSTALLED: dict[tuple[str, Problem], Choice] = {}
_FORCED: dict[str, MatmulConfig | None] = {}
_ON_CHANGE: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Have ``forget`` called whenever choices change: it drops plans that were kept."""
    _ON_CHANGE.append(forget)


def _changed() -> None:
    for forget in _ON_CHANGE:
        forget()


def install(choices: Iterable[Choice]) -> None:
    """Plan these problems as measured from now on. Later choices of a problem replace earlier."""
    _INSTALLED.update({(choice.op, choice.problem): choice for choice in choices})
    _changed()


def clear() -> None:
    """Forget all installed choices."""
    _INSTALLED.clear()
    _changed()


def installed(op: str) -> tuple[Choice, ...]:
    """All installed choices of ``op``."""
    return tuple(choice for (name, _), choice in _INSTALLED.items() if name == op)


def find(op: str, problem: Problem) -> Choice | None:
    """The forced config of ``op``, or the one that was measured for exactly this problem."""
    if op in _FORCED:
        return Choice(op, problem, _FORCED[op])
    return _INSTALLED.get((op, problem))


@contextmanager
def forced(op: str, config: MatmulConfig | None) -> Iterator[None]:
    """Plan every call of ``op`` with ``config`` (None: unfused) inside this context, on each rank
    that enters it."""
    _FORCED[op] = config
    _changed()
    try:
        yield
    finally:
        del _FORCED[op]
        _changed()
