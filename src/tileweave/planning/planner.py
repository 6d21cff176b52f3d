"""The fastest candidate of a problem by prediction.

The time of a candidate is its closed form (``predict.py``) times a correction: what it was measured
to take for shapes nearby, relative to the closed form there; times of another device count less
(:data:`_OTHER_DEVICE`). Of 1,991 shapes of two H100, two and four H200, each left out of
the measurements in turn, the choice took 1.3 % longer than the fastest candidate in the mean. A
candidate that was never measured on a machine of this kind is not chosen; those of FP8 operands are
predicted with caution (:data:`_UNTRIED`). No torch, no triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from tileweave.planning import choices
from tileweave.planning.candidates import candidates
from tileweave.planning.costs import Costs, DataSheet, data_sheet, load_calibration
from tileweave.planning.machine import Machine
from tileweave.planning.measurements import Measurement, packaged
from tileweave.planning.predict import host_seconds, seconds
from tileweave.planning.problem import MatmulConfig, Predicted, Problem

_OCTAVES = 1.0  # how far measurements reach: the width of a Gaussian
_LOWEST_TILE = 16
_FAR = 0.1  # weight of the median over all measurements
# The more uncertain a prediction is, the longer it is made: of many candidates, the one predicted
# to be fastest is often one whose time is only predicted too short. By ``_RISK`` times half the
# variance of its logarithm: 1 would be the mean of a log-normal time, but a loss counts for more
# than a gain. The variance is that of points nearby, and of one more point with this deviation.
# Where our kernels were measured for 6 shapes (15, 30), 14 (21, 16) of some 2,700 others are
# planned more than 3 % slower than unfused; 70 (61, 38) without this.
_RISK = 4.0
_DEVIATION, _DEVIATION_OF_CUBLAS = 0.25, 0.03
_OTHER_DEVICE = 0.25  # weight of a time of another kind of device
# Weight of a time with FP8 scales of another kind: of cuBLAS, and of our kernels, which are other
# programs with them.
_OTHER_SCALES, _OTHER_SCALES_OF_KERNELS = 0.5, 0.02
# Of a candidate of FP8 operands that was not measured: over its prediction. Shards by
# torch._scaled_mm of a reduce-scatter took 1.02 to 1.14 of their closed form on two H200.
_UNTRIED = 1.12
# Further, of a kernel of ours that adds products in fp32 after each 128 of K.
_PROMOTED = 1.2


@dataclass(frozen=True, slots=True)
class _Point:
    """One measured time of a candidate: at which of the measured shapes, log(measured / closed
    form) on the device that was measured, and how much it counts, apart from where it is."""

    shape: int
    log_ratio: float
    counts: float


class Planner:
    """Predictions for one operator on one machine."""

    def __init__(
        self,
        op: str,
        machine: Machine,
        known: tuple[Measurement, ...],
        akin: tuple[Measurement, ...] = (),
    ) -> None:
        """``akin``: of FP8 operands with scales of another kind, which count less."""
        self.op, self.machine = op, machine
        self.has_fp8 = any(one.problem.fp8 for one in known)
        self._sheet = data_sheet(machine)
        self._points: dict[MatmulConfig | None, list[_Point]] = {}
        self._shapes: list[tuple[tuple[float, ...], float]] = []  # where, and how much it counts
        self._near: tuple[tuple[float, ...], list[float]] | None = None  # weights at the last place
        self._here: dict[Problem, Mapping[MatmulConfig | None, float]] = {}  # us on this device
        for number, one in enumerate((*known, *akin)):
            sheet = (
                data_sheet(Machine(one.device, "cuda", num_sms=0)) if one.device else self._sheet
            )
            counts = 1.0 if sheet == self._sheet else _OTHER_DEVICE
            if counts == 1.0 and number < len(known):
                self._here[one.problem] = one.us
            self._shapes.append((_place(one.problem), counts))
            for config, us in one.us.items():
                ratio = math.log(us * 1e-6 / _closed_form(op, one.problem, config, sheet))
                akin_counts = _OTHER_SCALES if _is_cublas(config) else _OTHER_SCALES_OF_KERNELS
                point = _Point(number, ratio, 1.0 if number < len(known) else akin_counts)
                self._points.setdefault(config, []).append(point)
        self._medians = {
            config: sorted(point.log_ratio for point in points)[len(points) // 2]
            for config, points in self._points.items()
        }

    def closed_form(self, p: Problem, config: MatmulConfig | None) -> float:
        """Seconds by the cost model alone."""
        return _closed_form(self.op, p, config, self._sheet)

    def predict(self, p: Problem, config: MatmulConfig | None) -> float:
        """Seconds of an eager call, of which the host may be the slower part."""
        return max(self.predict_captured(p, config), host_seconds(config, p.world_size))

    def predict_captured(self, p: Problem, config: MatmulConfig | None) -> float:
        """Seconds of a call in a CUDA graph: measured, or corrected by measurements nearby and
        longer the less these agree. Rounded, so that ranks with different math libraries agree."""
        us = self._here.get(p, {}).get(config)
        if us is not None:
            return round(us * 1e-6, 9)
        known, caution = config, 1.0
        if p.fp8 and config is not None and config not in self._points:
            known, caution = _in_16_bits(config), _UNTRIED
            if config.kernel != "library" and not p.keeps_sums:
                caution *= _PROMOTED
        mean, variance = self._log_ratio(p, known)
        device = caution * self.closed_form(p, config) * math.exp(mean + _RISK * variance / 2.0)
        return round(device, 9)

    def _log_ratio(self, p: Problem, config: MatmulConfig | None) -> tuple[float, float]:
        """Mean and variance of log(measured / closed form), by the points nearby."""
        near, weights, total, squares = self._weights(_place(p)), 0.0, 0.0, 0.0
        for point in self._points.get(config, ()):
            weight = near[point.shape] * point.counts
            weights += weight
            total += weight * point.log_ratio
            squares += weight * point.log_ratio**2
        mean = (total + _FAR * self._medians.get(config, 0.0)) / (weights + _FAR)
        around_mean = max(0.0, squares - 2.0 * mean * total + mean**2 * weights)
        one_more = (_DEVIATION_OF_CUBLAS if _is_cublas(config) else _DEVIATION) ** 2
        return mean, (around_mean + one_more) / (weights + 1.0)

    def _weights(self, place: tuple[float, ...]) -> list[float]:
        """How much each measured shape says about this place. Kept, because all candidates ask."""
        if self._near is None or self._near[0] != place:
            found = [
                counts * math.exp(-(math.dist(place, there) ** 2) / (2.0 * _OCTAVES**2))
                for there, counts in self._shapes
            ]
            self._near = place, found
        return self._near[1]

    def predictions(self, p: Problem) -> tuple[Predicted, ...]:
        """All candidates that were measured before, and the unfused path; fastest first. Of FP8
        operands also the other ones of cuBLAS, and kernels that were measured with 16 bits. Of a
        problem that a tuner measured here, only what has a time: others gave wrong results."""
        untried = p.fp8 and self.machine.hopper
        known = [
            c
            for c in candidates(self.op, p, self.machine)
            if c in self._points
            or (untried and (c.kernel == "library" or _in_16_bits(c) in self._points))
        ]
        measured = choices.find(self.op, p)
        times = {} if measured is None else measured.us
        if measured is not None:
            known = [c for c in known if c in times]
        found = [
            Predicted(
                config,
                round(self.predict_captured(p, config) * 1e6, 3),
                times.get(config),
                round(host_seconds(config, p.world_size) * 1e6, 3),
            )
            for config in (None, *known)
        ]
        return tuple(sorted(found, key=lambda one: one.expected_us))


def _closed_form(op: str, p: Problem, config: MatmulConfig | None, sheet: DataSheet) -> float:
    return seconds(op, p, config, _costs_of(sheet), sheet.link_rate)


@cache
def _costs_of(sheet: DataSheet) -> Costs:
    return Costs(sheet, load_calibration("h100").coefficients)


def _is_cublas(config: MatmulConfig | None) -> bool:
    """Whether the matmul is cuBLAS."""
    return config is None or config.kernel == "library"


def _in_16_bits(config: MatmulConfig) -> MatmulConfig:
    """The config whose tiles of 16-bit operands have the bytes of these tiles of FP8."""
    return config if config.kernel == "library" else replace(config, tile_k=config.tile_k // 2)


def _place(p: Problem) -> tuple[float, ...]:
    """Where a problem is, in octaves. Rows and ranks matter most and count double. Fewer rows than
    the lowest tile has take as long as all of them."""
    return (
        2.0 * math.log2(max(p.rows, _LOWEST_TILE)),
        math.log2(p.cols),
        math.log2(p.depth),
        2.0 * math.log2(p.world_size),
    )


@cache
def planner_of(op: str, machine: Machine, fp8: bool = False, scales: str = "") -> Planner:
    """The planner of ``op`` with all that is known of ``machine``. ``fp8``: of calls with FP8
    operands, with these ``scales``."""
    known = packaged(op)
    if not machine.hopper:
        # only what needs no kernel for Hopper is likely to behave as it does there
        known = tuple(
            replace(one, us={c: us for c, us in one.us.items() if _is_cublas(c)}) for one in known
        )
    return planner_by(op, machine, known, choices.installed(op), scales if fp8 else None)


def planner_by(
    op: str,
    machine: Machine,
    known: tuple[Measurement, ...],
    tuned: tuple[Measurement, ...] = (),
    scales: str | None = None,
) -> Planner:
    """The planner of ``op`` by times of this package, ``known``, and of the user's own machine,
    ``tuned``. ``scales``: of calls with FP8 operands; None: of other calls.

    Times of FP8 say nothing about other calls. Those of this package with scales of another kind
    count less (:data:`_OTHER_SCALES`), those of the user's own machine not; but where nothing was
    measured with scales of tensors, those of rows do, which take as long. Those of 16-bit operands
    correct configs that were never measured with these scales.
    """
    measured = (*known, *tuned)
    wide = [one for one in measured if not one.problem.fp8]
    if scales is None:
        return Planner(op, machine, tuple(wide))
    eight = [one for one in measured if one.problem.fp8]
    own = [one for one in eight if one.problem.scales == scales] or [
        one for one in eight if one.problem.scales == scales.replace("tensor", "row")
    ]
    akin = [one for one in known if one.problem.fp8 and one not in own]
    seen = {config for one in own for config in one.us}
    others = [
        replace(one, us={config: us for config, us in one.us.items() if config not in seen})
        for one in wide
    ]
    return Planner(op, machine, (*own, *others), tuple(akin))


choices.on_install(planner_of.cache_clear)
