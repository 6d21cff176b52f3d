"""What the commands need to know about each operator: one module per operator, with ``SAMPLES``.

``check``, ``check --stress``, ``demo``, ``doctor``, ``bench`` and ``trace`` list no operators. They
ask :func:`samples_of` for those in ``tileweave.OPERATORS``. A module is imported when it is needed;
the description of the operator names it (``ops/core/spec.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tileweave.bench.subjects import Shape
from tileweave.errors import InputError
from tileweave.ops.core.registration import spec_of
from tileweave.planning.machine import Machine
from tileweave.planning.problem import Plan


@dataclass(frozen=True, slots=True)
class Bar:
    """Targets for the ratios of a block: for their geometric mean, and for each. ``most``: each at
    most."""

    mean: float | None = None
    worst: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Shapes of ``check``: ``shapes`` once each, ``changing`` often in random order, ``captured``
    in graphs."""

    shapes: tuple[Shape, ...]
    changing: tuple[Shape, ...]
    captured: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Stressed:
    """Shapes of ``check --stress``: of the world, and of a group of two ranks. Every second has a
    bias."""

    world: tuple[Shape, ...]
    part: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class DemoCase:
    """Several calls of one operator.

    ``shape``: sizes of one rank. ``drawn``: whether the picture shows its trace. ``second``: with
    the second result, the gathered input or the sum before the norm (the recorded call has one
    result). ``late_seconds``: how much later than the others the last rank makes the recorded call.
    """

    op: str
    name: str
    shape: Shape
    dtype: torch.dtype
    bias: bool = False
    second: bool = False
    drawn: bool = False
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Benched:
    """How ``bench`` runs an operator, and how it shows the report. Several operators share one.

    ``run(member, options)`` is called on every rank; ``rivals``: names of what can be timed.
    ``baselines``: those that compute the same without tileweave's kernels, the unfused path first.
    ``random_rivals``: what is timed for random cases unless told otherwise.
    """

    run: Callable[..., dict[str, Any]]
    rivals: tuple[str, ...]
    tables_of: Callable[[dict[str, Any], int], list[Table]]
    plot: Callable[[dict[str, Any], Path], None]
    baselines: tuple[str, ...] = ()
    random_rivals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """One operator for the commands.

    Parameters
    ----------
    subject : Subject
        Operands, calls, recordings and checks: ``subjects.Subject``.

    check_on_gpu, check_on_cpu, stress_on_gpu, stress_on_cpu
        Shapes, as ``subject.draw`` reads them. Interpreted kernels take few and small ones.

    demo : callable
        ``demo(on_gpu, world_size)`` returns the cases of the demo.

    bench, cases, smoke, quick
        The bench; its cases of real layers, its tiny cases, and a regular expression that matches
        the names of a short list.

    random : callable, optional
        ``random(count, seed, smoke)`` draws cases; see ``random_cases.py``. None: there are none.

    rival : class
        Makes the functions that are timed.

    bars : dict
        Block of cases -> metric (named as in ``run.judge``) -> target.

    shared : tuple of str
        Which of ``rows``, ``cols`` and ``depth`` of a whole problem are split over ranks, for
        operators that are benched or traced by those sizes.

    traced : pair of (int, int, int)
        ``rows``, ``cols`` and ``depth`` of a whole problem that ``trace`` and ``report`` record
        unless told otherwise, without GPUs and with them.

    typical : callable
        What ``doctor`` shows: the text of a problem, and its plan for a number of ranks of a
        machine.

    self_signaling : bool
        The operator has self-signaling data, so its slots must be zero before a call. Otherwise
        they may have any content.

    measured : bool
        The operator has a section in docs/measured.md.
    """

    subject: Any  # a Subject, over operands of its own type
    check_on_gpu: Checked
    check_on_cpu: Checked
    stress_on_gpu: Stressed
    stress_on_cpu: Stressed
    demo: Callable[[bool, int], list[DemoCase]]
    bench: Benched
    cases: list[Any]
    smoke: list[Any]
    quick: str
    rival: Any
    bars: dict[str, dict[str, Bar]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    traced: tuple[tuple[int, int, int], tuple[int, int, int]] = (
        (128, 256, 128),
        (4096, 8192, 4096),
    )
    typical: tuple[tuple[str, Callable[[int, Machine], Plan]], ...] = ()
    self_signaling: bool = False
    measured: bool = True
    random: Callable[[int, int, bool], list[Any]] | None = None

    def random_cases(self, count: int, seed: int, smoke: bool) -> list[Any]:
        """Random cases, as :attr:`random` draws them."""
        if self.random is None:
            raise InputError(
                f"asked: random cases of {self.subject.op}; allowed: of operators whose samples "
                "draw some; remedy: choose cases by name"
            )
        return self.random(count, seed, smoke)


def samples_of(op: str) -> Samples:
    """The samples of an operator; raises :class:`InputError` if there is no such operator."""
    return import_module(spec_of(op).samples or f"tileweave.bench.samples.{op}").SAMPLES


def shapes(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    """Shapes of these sizes."""
    return tuple(Shape(*each) for each in sizes)


def of_rows(rows: tuple[int, ...], cols: int, depth: int) -> tuple[Shape, ...]:
    """Shapes that differ in their rows."""
    return tuple(Shape(each, cols, depth) for each in rows)
