"""The time of pieces of work on a device: measured coefficients, scaled to other devices by their
data sheets.

Units are seconds, bytes and elements. Costs do not depend on other ranks, except for transfer
rates.

The matmul is a roofline over waves. cuBLAS chooses, among many tile shapes, the one whose waves fit
best. The time of a tile is a p-norm of its multiplications and of the time that L2 takes to feed
it, since the two slow each other down when they are close. Memory is read concurrently: the time is
the longer of both plus a fraction of the shorter. Long matmuls reach the power limit of the device:
time grows as (1 + t / sustained)^power, up to a
limit.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from tileweave.errors import require
from tileweave.files import read_json, short
from tileweave.planning.machine import Machine
from tileweave.planning.schedules.gather import cdiv

PACKAGED = ("h100", "h200")
REFERENCE = "h200"  # where the coefficients of the simulator were measured
# Tile shapes (rows x columns of the output) that cuBLAS has for Hopper.
_TILES = tuple(
    (m, n) for m in (64, 128, 192, 256, 384) for n in range(32, 257, 32) if m * n <= 256 * 192
)
_OLD_TILES = ((128, 128),)  # of kernels without TMA and wgmma
# Consecutive all-gathers of 2.1 MB (fitted cells) are slower than after a matmul, those of 8 MB are
# not.
SHORT = 2.5e6
_SPLITS = (1, 2, 3, 4, 6, 8)
# Matmuls of FP8, relative to 16-bit operands. Data sheets say 2; torch._scaled_mm of 4096 to 8192
# rows reached 1,340 to 1,490 TFLOP/s on H100.
FP8_RATE = 1.9


class Rates(Protocol):
    """The data sheet of a device.

    flops : dense bf16, flop/s; FP8 has ``FP8_RATE`` times as many.
    memory_rate : bytes/s.
    num_sms : streaming multiprocessors.
    matmul : the fraction of ``flops`` that long matmuls reach, where it is known for the device;
        0: as on H200.
    """

    @property
    def flops(self) -> float: ...
    @property
    def memory_rate(self) -> float: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def matmul(self) -> float: ...


@dataclass(frozen=True, slots=True)
class DataSheet:
    """The :class:`Rates` of a device, and the bytes/s that it sends inside its node."""

    flops: float
    memory_rate: float
    num_sms: int
    link_rate: float
    matmul: float = 0.0


# Data sheets by a part of the device's name; dense bf16. Without NVLink: PCIe.
_SHEETS = {
    "H200": DataSheet(989e12, 4.8e12, 132, 450e9),
    "H100 PCIe": DataSheet(756e12, 2.0e12, 114, 300e9),
    "H100 NVL": DataSheet(835e12, 3.9e12, 132, 300e9),
    "H100": DataSheet(989e12, 3.35e12, 132, 450e9),
    "H800": DataSheet(989e12, 3.35e12, 132, 200e9),
    "H20": DataSheet(148e12, 4.0e12, 78, 450e9),
    "A100": DataSheet(312e12, 2.0e12, 108, 300e9),
    "A800": DataSheet(312e12, 2.0e12, 108, 200e9),
    "L40S": DataSheet(362e12, 0.864e12, 142, 32e9),
    "L40": DataSheet(181e12, 0.864e12, 142, 32e9),
    "L4": DataSheet(121e12, 0.3e12, 58, 32e9),
    "B200": DataSheet(2250e12, 8.0e12, 148, 900e9),
    "B300": DataSheet(2250e12, 8.0e12, 148, 900e9),
    "MI300X": DataSheet(1307e12, 5.3e12, 304, 448e9),
}
DEVICES = tuple(_SHEETS)


def device_of(name: str) -> str | None:
    """The name in :data:`DEVICES` of the GPU that torch calls ``name``; None if it has no sheet."""
    return next((device for device in DEVICES if device in name), None)


def data_sheet(machine: Machine) -> DataSheet:
    """The data sheet of a machine; of one that is not known, that of H100 by its number of
    multiprocessors."""
    device = device_of(machine.name)
    if device is not None:
        sheet = _SHEETS[device]
        return replace(sheet, num_sms=machine.num_sms or sheet.num_sms)
    part = max(machine.num_sms, 1) / HOPPER_SMS
    h100 = _SHEETS["H100"]
    return replace(
        h100,
        flops=h100.flops * part,
        memory_rate=h100.memory_rate * part,
        num_sms=max(machine.num_sms, 1),
    )


HOPPER_FLOPS, HOPPER_SMS = 989e12, 132  # of H200 and H100, which coefficients were measured on


@dataclass(frozen=True, slots=True)
class Curve:
    """An NCCL collective of one kind among ``world`` ranks: ``latency`` in seconds, and fractions
    of the link rate at ``knots`` bytes.

    Between knots the logarithm of the fraction is linear in that of the bytes; outside them it is
    constant.
    """

    kind: str
    world: int
    latency: float
    knots: tuple[float, ...]
    fractions: tuple[float, ...]

    def fraction(self, nbytes: float, faster: float = 1.0) -> float:
        """The fraction of the link rate that a message of ``nbytes`` reaches after its latency, on
        links that are ``faster`` times those of the curve. What it takes beyond the time of a very
        large message is not spent on the wire, hence as long on any link."""
        found = self._fraction(nbytes)
        if faster == 1.0:
            return found
        large = 1.0 / self.fractions[-1]
        return 1.0 / (large + faster * (1.0 / found - large))

    def _fraction(self, nbytes: float) -> float:
        right = bisect(self.knots, nbytes)
        if right in (0, len(self.knots)):
            return self.fractions[min(right, len(self.knots) - 1)]
        low, high = self.knots[right - 1 : right + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return self.fractions[right - 1] ** (1.0 - share) * self.fractions[right] ** share


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients that were fitted or measured; ``calibration/*.json`` has their origin. See
    :class:`Costs` for their use. Times are in seconds, rates in bytes/s.

    matmul_* : of cuBLAS. ``launch``; ``flops`` and ``memory``, fractions of peak; ``feed``, rate of
        L2 to all multiprocessors; ``norm``, the p of the norm; ``sustained`` and ``power`` of the
        power limit; ``split``, time of a cut along K; ``tile``, begin and end of a tile;
        ``overlap``, the fraction of the shorter of memory and multiplication that is not hidden;
        ``stream``, memory rate of one multiprocessor; ``again``: a short matmul that is repeated
        without anything between has the clock rate of a matmul of this duration; ``limit``: at
        most that many times slower than at full clock; ``unaligned``, the rate of multiplications
        where rows of an operand or the result are no multiple of 16 bytes, relative to others:
        TMA, hence wgmma, do not take those.
    fused_* : of fused kernels. ``launch`` in a graph and ``eager``; ``tile``, from the last
        multiplication of a tile to the first of the next, whatever its size; ``part``, a partial
        tile that is passed on; ``rate``, the main loop relative to cuBLAS; ``feed``, rate of L2.
    grouped_rate : main loop of the expert operators relative to the other fused kernels.
    grouped_overlap : the fraction of the shorter of memory and multiplication that the expert
        operators do not hide.
    grouped_step : time of a program of the Triton kernel of the combine for a block of tokens, if
        memory and links are not slower.
    grouped_trip : in the Hopper kernel, time of a thread for eight columns of the rows of two
        tokens: the way to memory and back.
    one_shot_launch, scatter_eager : launches of kernels that push tiles, in a graph and eager.
    scatter_tile : how long a program is blocked while it stores a tile to a peer.
    take : time to read a piece (64 columns) of one peer from the slot, if memory is not slower.
    exchange_* : one launch that gathers or scatters before or after cuBLAS: ``latency``,
        ``fraction`` of the link rate.
    corun : relative slowdown of a matmul while links are busy.
    nccl : a curve for each kind of collective and each measured world size.
    nccl_eager : additional time outside a CUDA graph.
    nccl_repeat : time between two short ones (up to ``SHORT`` bytes) with nothing between them. It
        is longer than a gap for an unknown reason; after a matmul it is not there.
    push_* : pushes by kernels: ``latency``, ``fraction`` of the link rate.
    copy_* : copy engines: ``latency`` before the first copy of a call; ``fraction``; ``queued``,
        time per copy; ``one``, the fraction that the copies of the co-run bound reach; ``wait``, a
        wait for a counter or a flag; ``look``, until a wait that was not satisfied looks again.
    signal : from a remote store until a program there sees it.
    gap : between two dependent launches, in a graph or queued.
    stream, permute : fraction of the memory rate of copying kernels, and of those that read a
        transposed view.
    reduce, reduce_memory : of sums over top-k rows: time per element of the result, and fraction of
        the memory rate.
    attention : fraction of the matmul rate.
    lookup_* : torch's embedding lookups: ``made``, time per element of the result; ``read``, per
        element read; ``memory``, bytes as a fraction of the memory rate (over 1: some are hidden).
    own_* : lookups by tileweave's kernel: ``memory``, fraction of the memory rate; ``bag``, time
        per bag.
    pooled_* : lookups that store to peers: ``latency``; ``norm``, the p of the norm of reading and
        sending; ``trip``, from a load until the next rows of a bag are loaded; ``host``, what the
        host takes for an eager call, of which hosts differ by two.
    """

    matmul_launch: float
    matmul_flops: float
    matmul_memory: float
    matmul_feed: float
    matmul_norm: float
    matmul_sustained: float
    matmul_power: float
    matmul_split: float
    matmul_tile: float
    matmul_overlap: float
    matmul_stream: float
    matmul_again: float
    matmul_limit: float
    matmul_unaligned: float
    fused_launch: float
    fused_eager: float
    fused_tile: float
    fused_part: float
    fused_rate: float
    fused_feed: float
    grouped_rate: float
    grouped_overlap: float
    grouped_step: float
    grouped_trip: float
    one_shot_launch: float
    scatter_eager: float
    scatter_tile: float
    take: float
    exchange_latency: float
    exchange_fraction: float
    corun: float
    nccl: tuple[Curve, ...]
    nccl_eager: float
    nccl_repeat: float
    push_latency: float
    push_fraction: float
    copy_latency: float
    copy_fraction: float
    copy_queued: float
    copy_one: float
    copy_wait: float
    copy_look: float
    signal: float
    gap: float
    stream: float
    permute: float
    reduce: float
    reduce_memory: float
    attention: float
    lookup_made: float
    lookup_read: float
    lookup_memory: float
    own_memory: float
    own_bag: float
    own_l2: float
    own_l2_row: float
    pooled_latency: float
    pooled_norm: float
    pooled_trip: float
    pooled_host: float


@dataclass(frozen=True)
class Calibration:
    """Coefficients with their origin: device, cells and date."""

    name: str
    about: str
    coefficients: Coefficients
    fitted_on: tuple[str, ...] = ()
    not_fitted: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@cache
def load_calibration(path: str | None = None) -> Calibration:
    """A calibration file: a path, or the name of one of this package. None: the one that was
    measured on H200."""
    if path is None or path in PACKAGED:
        found = resources.files("tileweave.planning") / "calibration" / f"{path or REFERENCE}.json"
        data = json.loads(found.read_text("utf-8"))
    else:
        data = _calibration_at(Path(path))
    names = {f.name for f in fields(Coefficients)}
    got = set(data["coefficients"])
    require(
        got == names,
        f"calibration with coefficients missing {sorted(names - got)} "
        f"and unknown {short(sorted(got - names))}",
        "exactly the fields of planning.costs.Coefficients",
        _REMEDY,
    )
    coefficients = dict(data["coefficients"])
    curves = _curves(coefficients.pop("nccl"))
    for name, value in coefficients.items():
        low, high = _range_of(name)
        require(
            _is_number(value, low, high),
            f"calibration with {name} = {short(repr(value), 60)}",
            f"a number from {low:g} to {high:g}",
            _REMEDY,
        )
    found = Coefficients(nccl=curves, **coefficients)
    return Calibration(
        data["name"], data["about"], found, tuple(data["fitted_on"]), data["not_fitted"]
    )


_REMEDY = "make it again: tileweave simulate calibrate"
_COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
# What times are divided by; rates are in bytes/s. Others are seconds, or fractions from 0.
_ROWS_AT_ONCE = 4  # of a bag, by the kernel of lookups
_NORMS = ("matmul_norm", "pooled_norm")
_RATES = ("matmul_feed", "matmul_stream", "fused_feed", "own_l2")
_DIVISORS = ("flops", "memory", "sustained", "limit", "unaligned", "rate", "fraction", "one")
_DIVISORS += ("stream", "permute", "attention")


def _range_of(name: str) -> tuple[float, float]:
    """The values that a coefficient may have: none that makes a time endless, or overflow."""
    if name in _NORMS:
        return 1.0, 1e3
    if name in _RATES:
        return 1e6, 1e18
    return (1e-6 if name.rpartition("_")[2] in _DIVISORS else 0.0), 1e3


def _is_number(value: object, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high  # type: ignore[operator]


def _curves(given: object) -> tuple[Curve, ...]:
    """The curves of NCCL, with every field checked."""
    names = {f.name for f in fields(Curve)}
    several = given if isinstance(given, list) else []
    good = all(isinstance(one, dict) and set(one) == names and _is_curve(**one) for one in several)
    require(
        good and {one["kind"] for one in several} == _COLLECTIVES,
        f"calibration with nccl = {short(given)}",
        f"curves of {', '.join(sorted(_COLLECTIVES))}, each a mapping with {', '.join(names)}: "
        "increasing knots in bytes, and as many fractions above 0",
        _REMEDY,
    )
    return tuple(
        Curve(**one | {name: tuple(one[name]) for name in ("knots", "fractions")})
        for one in several
    )


def _is_curve(kind: object, world: object, latency: object, knots: Any, fractions: Any) -> bool:
    return (
        isinstance(kind, str)
        and type(world) is int
        and 2 <= world < 1 << 20
        and _is_number(latency, 0.0, 1e3)
        and isinstance(knots, list)
        and isinstance(fractions, list)
        and len(knots) == len(fractions) > 0
        and all(_is_number(knot, 1.0, 1e18) for knot in knots)
        and all(_is_number(fraction, 1e-9, 1e3) for fraction in fractions)
        and all(a < b for a, b in pairwise(knots))
    )


def _calibration_at(path: Path) -> dict[str, Any]:
    """The contents of a calibration file, with its top-level fields checked."""
    remedy = "make one: tileweave simulate calibrate"
    data = read_json(path, "calibration", "a JSON file that exists", remedy)
    kinds = {"name": str, "about": str, "coefficients": dict, "fitted_on": list, "not_fitted": dict}
    known = isinstance(data, dict) and all(
        isinstance(data.get(name), kind) for name, kind in kinds.items()
    )
    allowed = ", ".join(f"{name}: {kind.__name__}" for name, kind in kinds.items())
    require(known, f"calibration {short(path)}", f"a mapping with {allowed}", remedy)
    return data


class Costs:
    """Times of single pieces of work on ``device``, by ``coefficients`` measured on H200.

    For other devices the same fractions of their own peaks and the same latencies are assumed; that
    is not measured.

    sustained : whether the device has been multiplying for long before each matmul, as in a step of
        training, so that all of them are at the power limit.
    """

    def __init__(
        self,
        device: Rates,
        coefficients: Coefficients | None = None,
        sustained: bool = False,
    ) -> None:
        self.device, self.sustained = device, sustained
        self.c = c = coefficients or load_calibration().coefficients
        scale = device.flops / HOPPER_FLOPS
        self.flops = (device.matmul or c.matmul_flops) * device.flops
        # a fraction that was measured with long matmuls is that at the power limit
        self.limit = 1.0 if device.matmul else c.matmul_limit
        self.memory_rate = c.matmul_memory * device.memory_rate
        # the rate of L2 is scaled with that of tensor cores, which it feeds
        self.feed, self.fused_feed = c.matmul_feed * scale, c.fused_feed * scale
        self._matmuls: dict[tuple[int, int, int, int, bool], float] = {}

    def matmul(self, m: int, n: int, k: int, itemsize: int = 2, again: bool = False) -> float:
        """x [m, k] @ w [n, k].T by cuBLAS, from launch to end. ``again``: repeated with nothing
        between."""
        key = (m, n, k, itemsize, again)
        if key not in self._matmuls:
            seconds = self._matmul(m, n, k, itemsize)
            rate = self.flops * (FP8_RATE if itemsize == 1 else 1.0)
            busy = min(2.0 * m * n * k / rate / seconds, 1.0)
            self._matmuls[key] = self.c.matmul_launch + self.throttled(
                seconds, busy, self.c.matmul_again if again else 0.0
            )
        return self._matmuls[key]

    def _matmul(self, m: int, n: int, k: int, itemsize: int) -> float:
        c, sms = self.c, self.device.num_sms
        nbytes = (m * k + n * k) * itemsize + m * n * max(itemsize, 2)
        rate, shapes = 1.0, _TILES
        if not is_aligned(n, k, itemsize):  # as much per multiprocessor on any generation
            hopper = HOPPER_FLOPS / HOPPER_SMS
            rate = min(c.matmul_unaligned * hopper / (self.device.flops / sms), 1.0)
            shapes = _OLD_TILES
        best = float("inf")
        for tile_m, tile_n in shapes:
            tiles = cdiv(m, tile_m) * cdiv(n, tile_n)
            for split in _SPLITS:
                if split > 1 and tiles * split > sms:
                    break
                active = min(sms, tiles * split)
                one = self.block(tile_m, tile_n, k / split, active, itemsize, rate) + c.matmul_tile
                memory = nbytes / min(self.memory_rate, active * c.matmul_stream)
                # partial sums in fp32 are written to L2 and read back
                parts = c.matmul_split + 8.0 * split * m * n / self.feed if split > 1 else 0.0
                best = min(best, self._overlapped(cdiv(tiles * split, sms) * one, memory) + parts)
        return best

    def _overlapped(self, multiply: float, memory: float) -> float:
        """Both concurrently: the longer plus a fraction of the shorter."""
        return max(multiply, memory) + self.c.matmul_overlap * min(multiply, memory)

    def block(
        self,
        tile_m: int,
        tile_n: int,
        k: float,
        active: int,
        itemsize: int = 2,
        rate: float = 1.0,
    ) -> float:
        """A tile of cuBLAS over ``k`` on one multiprocessor while ``active`` of them work, at
        ``rate`` times its usual rate."""
        flops = self.flops * rate * (FP8_RATE if itemsize == 1 else 1.0)
        multiply = 2 * tile_m * tile_n * k / (flops / self.device.num_sms)
        return norm(
            self.c.matmul_norm, multiply, (tile_m + tile_n) * k * itemsize * active / self.feed
        )

    def fused_block(
        self,
        tile_m: int,
        tile_n: int,
        k: float,
        active: int,
        itemsize: int,
        memory: float,
        rate: float = 1.0,
        exposed: float | None = None,
    ) -> float:
        """The same in our kernels. ``memory``: seconds to read bytes that are not in L2. ``rate``:
        relative to their usual rate. ``exposed``: the fraction of the shorter
        of multiplication and memory that is not hidden, if not that of cuBLAS."""
        flops = self.flops * self.c.fused_rate * rate * (FP8_RATE if itemsize == 1 else 1.0)
        multiply = 2 * tile_m * tile_n * k / (flops / self.device.num_sms)
        feed = (tile_m + tile_n) * k * itemsize * active / self.fused_feed
        block = norm(self.c.matmul_norm, multiply, feed)
        if exposed is None:
            return self._overlapped(block, memory)
        return max(block, memory) + exposed * min(multiply, memory)

    def throttled(self, seconds: float, busy: float = 1.0, before: float = 0.0) -> float:
        """A time at full clock -> a time under the power limit. ``busy``: the fraction of it in
        which tensor cores work. ``before``: seconds of the same work before it. The clock falls no
        further than by ``limit``: from 2 ms on it is the same."""
        if self.sustained:
            return seconds * self.limit**busy
        slower = (1.0 + max(seconds, before) / self.c.matmul_sustained) ** self.c.matmul_power
        return seconds * min(slower, self.limit) ** busy

    def grouped_matmul(self, groups: int, m: int, n: int, k: int) -> float:
        """``groups`` matmuls [m, k] @ [n, k] in one launch, bf16."""
        if groups * m == 0:
            return 0.0
        sms, best = self.device.num_sms, float("inf")
        for tile_m, tile_n in _TILES:
            tiles = groups * cdiv(m, tile_m) * cdiv(n, tile_n)
            one = self.block(tile_m, tile_n, k, min(sms, tiles)) + self.c.matmul_tile
            best = min(best, cdiv(tiles, sms) * one)
        memory = groups * (m * k + n * k + m * n) * 2 / self.memory_rate
        return self.c.matmul_launch + self.throttled(self._overlapped(best, memory))

    def nccl(self, kind: str, world: int, nbytes: float, link_rate: float) -> float:
        """An NCCL collective of ``nbytes`` on each rank inside a node: of the gathered tensor, of
        the tensor that is reduced, or of what a rank sends to all. By the curve of the nearest
        measured world size."""
        curves = [curve for curve in self.c.nccl if curve.kind == kind]
        curve = min(curves, key=lambda one: abs(math.log(one.world / world)))
        moved = nbytes * (world - 1) / world * (2.0 if kind == "all_reduce" else 1.0)
        return curve.latency + moved / (curve.fraction(nbytes) * link_rate)

    def stream(self, nbytes: float) -> float:
        """An elementwise kernel that reads and writes ``nbytes`` in all."""
        return self.c.gap + nbytes / (self.c.stream * self.device.memory_rate)

    def permuted(self, nbytes: float) -> float:
        """torch's copy of a transposed view of ``nbytes``."""
        return self.c.gap + 2.0 * nbytes / (self.c.permute * self.device.memory_rate)

    def attention(self, flops: float) -> float:
        """Fused attention of ``flops``."""
        return self.c.matmul_launch + flops / (self.c.attention * self.flops)

    def reduce_rows(self, rows: int, terms: int, width: int) -> float:
        """torch's sum of ``terms`` bf16 rows into each of ``rows``: the longer of the time of
        threads, which does not depend on the number of terms, and that of memory."""
        elements = float(rows * width)
        memory = elements * (terms + 1) * 2 / (self.c.reduce_memory * self.device.memory_rate)
        scale = HOPPER_SMS / self.device.num_sms
        return self.c.matmul_launch + max(memory, self.c.reduce * elements * scale)

    def lookup(self, bags: float, rows: float, row_bytes: float, itemsize: int = 2) -> float:
        """torch's pooling of ``rows`` rows of ``row_bytes`` into ``bags`` bags: a time per element
        read and per element of the result, and bytes."""
        scale = HOPPER_SMS / self.device.num_sms
        width = row_bytes / itemsize * scale
        one = (self.c.lookup_made * bags + self.c.lookup_read * rows) * width
        return (
            self.c.matmul_launch
            + one
            + rows * row_bytes / (self.c.lookup_memory * self.device.memory_rate)
        )

    def own_lookup(self, bags: float, rows: float, row_bytes: float, in_l2: float = 0.0) -> float:
        """The same by tileweave's kernel: bytes of rows, results and indices, and a time per bag,
        which matters for short bags.

        in_l2 : the part of the rows that L2 has, since they were read before. 0: all come from
            memory. L2 takes a time per row, too.
        """
        return self.c.matmul_launch + self._own_lookup(bags, rows, row_bytes, in_l2)

    def _own_lookup(self, bags: float, rows: float, row_bytes: float, in_l2: float) -> float:
        scale = HOPPER_SMS / self.device.num_sms
        nbytes = (rows + bags) * (row_bytes + 8.0) - in_l2 * rows * row_bytes
        memory = nbytes / (self.c.own_memory * self.device.memory_rate)
        cache = rows * (row_bytes + self.c.own_l2_row) / self.c.own_l2 * scale if in_l2 else 0.0
        return norm(3.0, memory, cache, self.c.own_bag * bags * scale)

    def pooled(
        self, bags: float, rows: float, row_bytes: float, sent: float, in_l2: float = 0.0
    ) -> float:
        """That kernel with results stored to peers, which alone takes ``sent`` seconds. Rows of a
        bag are loaded a few at a time, one after the other."""
        trips = rows / max(bags, 1.0) / _ROWS_AT_ONCE * self.c.pooled_trip
        own = self._own_lookup(bags, rows, row_bytes, in_l2)
        return self.c.pooled_latency + norm(self.c.pooled_norm, own, sent, trips)


def is_aligned(n: int, k: int, itemsize: int) -> bool:
    """Whether rows of k elements, and those of a result of n columns, are multiples of 16 bytes."""
    return k * itemsize % 16 == 0 and n * max(itemsize, 2) % 16 == 0


def norm(p: float, *parts: float) -> float:
    """The time of parts that overlap: from the longest of them (p infinite) to their sum (p 1)."""
    top = max(parts)
    return top * sum((part / top) ** p for part in parts) ** (1.0 / p) if top > 0.0 else 0.0
