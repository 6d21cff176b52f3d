"""What was measured on this machine, and what a caller forces.

A tuner measures candidates of a problem: it forces one after the other (:func:`forced`), and
installs their times (:func:`install`). All ranks must install the same. No torch, no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import MatmulConfig, Problem

_INSTALLED: dict[tuple[str, Problem], Measurement] = {}
_FORCED: dict[str, MatmulConfig | None] = {}
_ON_CHANGE: list[Callable[[], None]] = []
_ON_INSTALL: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Have ``forget`` called whenever choices change: it drops what was derived from them."""
    _ON_CHANGE.append(forget)


def on_install(forget: Callable[[], None]) -> None:
    """The same for what is derived from measurements only."""
    _ON_INSTALL.append(forget)


def _changed(installed: bool = False) -> None:
    for forget in (*_ON_INSTALL, *_ON_CHANGE) if installed else _ON_CHANGE:
        forget()


def install(measurements: Iterable[Measurement]) -> None:
    """Plan by these measurements, too, from now on. Later measurements of a problem replace earlier
    ones."""
    _INSTALLED.update({(one.op, one.problem): one for one in measurements})
    _changed(installed=True)


def clear() -> None:
    """Forget all installed measurements."""
    _INSTALLED.clear()
    _changed(installed=True)


def installed(op: str) -> tuple[Measurement, ...]:
    """All installed measurements of ``op``."""
    return tuple(one for (name, _), one in _INSTALLED.items() if name == op)


def find(op: str, problem: Problem) -> Measurement | None:
    """What was installed for exactly this problem."""
    return _INSTALLED.get((op, problem))


def is_forced(op: str) -> bool:
    """Whether :func:`forced` holds for ``op``."""
    return op in _FORCED


def forced_config(op: str) -> MatmulConfig | None:
    """The config that is forced; None: the unfused path."""
    return _FORCED[op]


@contextmanager
def forced(op: str, config: MatmulConfig | None) -> Iterator[None]:
    """Plan every call of ``op`` with ``config`` (None: unfused) inside this context, on each rank
    that enters it. May be nested: the inner one holds."""
    outer = dict(_FORCED)
    _FORCED[op] = config
    _changed()
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(outer)
        _changed()
