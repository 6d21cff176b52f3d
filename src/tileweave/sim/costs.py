"""What one piece of work costs on a device: measured coefficients, scaled to other devices by their
data sheets.

Units: seconds, bytes, elements. Nothing here knows of other ranks except the speed of a transfer.

The matmul is a roofline over waves. A library picks, among many tile shapes, the one whose waves
fit best; a tile takes as long as its multiplications, or as L2 takes to feed it (a p-norm of the
two: near a balance they slow each other down); beside that, memory is read: the longer of both, and
a share of the shorter. Matmuls that last draw the device into its power limit: time grows as (1 + t
/ sustained)^power.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tileweave.errors import InputError, require
from tileweave.planning.schedules.gather import cdiv
from tileweave.sim.machine import Device, presets

REFERENCE = "h200"
# Tile shapes that a matmul library chooses among: rows x columns of the output, as Hopper libraries
# ship them.
_TILES = tuple(
    (m, n) for m in (64, 128, 192, 256, 384) for n in range(32, 257, 32) if m * n <= 256 * 192
)
# all-gathers of 2.1 MB on the fit side repeat slower than behind a matmul, those of 8 MB as fast
SHORT = 2.5e6
_SPLITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Curve:
    """A library's collective of one kind among ``world`` ranks: ``latency`` s; the fraction of link
    rate at ``knots`` bytes.

    Between knots the fraction is a power of the bytes (a line on logarithms); outside them it
    stays.
    """

    kind: str
    world: int
    latency: float
    knots: tuple[float, ...]
    fractions: tuple[float, ...]

    def fraction(self, nbytes: float) -> float:
        """What a message of ``nbytes`` reaches of the link's rate, once begun."""
        right = bisect(self.knots, nbytes)
        if right in (0, len(self.knots)):
            return self.fractions[min(right, len(self.knots) - 1)]
        low, high = self.knots[right - 1 : right + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return self.fractions[right - 1] ** (1.0 - share) * self.fractions[right] ** share


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What was fitted, or read off a measurement; ``data/calibration/*.json`` says from what. See
    :class:`Costs` for use.

    matmul_* : launch s; fractions of peak (flops, memory); feed bytes/s (L2 to all
        multiprocessors); p of the norm; sustained s and power of the power limit; split s for a cut
        along K; tile s for what a tile begins and ends with; overlap: share of the shorter of
        memory and multiplication that does not hide behind the longer; stream: bytes/s of memory
        that one multiprocessor can ask for; again: a short matmul measured again and again, with
        nothing between, has the clock of one that takes so many s.
    fused_* : the fused kernel: s a launch in a graph and eagerly, s a tile (prologue and epilogue),
        s a part handed over, fraction of the library's rate in its main loop, and its feed,
        bytes/s.
    grouped_rate : of grouped matmuls in the expert operators, share of the rate of the other fused
        main loops. grouped_step: s of a combine's program for a block of tokens, if memory and
        links do not take longer for all of them.
    scatter_* : where tiles are pushed as they are made: s a launch, eager likewise; tile: s that a
        program stands still while it stores one to a peer. staged_tile: s that one ends with that
        copy engines take, or that stays. take: s until a piece (64 columns) that one peer stored is
        out of the slot, if memory does not take longer.
    exchange_* : one launch that gathers or scatters beside a library's matmul: latency s, fraction
        of link rate.
    corun : relative slow-down of a matmul while links are busy.
    nccl : a curve for each kind of collective and each world that was measured. nccl_eager: s more
        outside a CUDA graph; repeat: s between two short ones (up to ``SHORT`` bytes) with nothing
        else between them (longer than a gap: why, we have not found; behind a matmul it does not
        show).
    push_* : in-kernel pushes: latency s, fraction of link rate.
    copy_* : copy engines likewise; latency: before the first copy of a call; queued: s each; one:
        the fraction that those of the measured bound reach, beside a matmul.
    signal s : a remote store until its waiter sees it. gap s : between two dependent launches, in a
        graph or queued.
    stream, permute : fraction of memory rate of copying kernels, and of those that read a
        transposed view.
    reduce : s an element that a sum over top-k rows makes. reduce_memory: fraction of memory rate
        that it reads and writes at.
    attention : fraction of the matmul rate.
    lookup_* : torch's embedding lookups: s an element of results, s an element read, and bytes
        beside that as a fraction of memory rate (over 1: some of them hide). own_* : by this
        library's kernel: fraction of memory rate, s a bag. pooled_* : where it stores to peers:
        latency s, p of the norm of reading and sending.
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
    fused_launch: float
    fused_eager: float
    fused_tile: float
    fused_part: float
    fused_rate: float
    fused_feed: float
    grouped_rate: float
    grouped_step: float
    one_shot_launch: float
    scatter_eager: float
    scatter_tile: float
    staged_tile: float
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
    pooled_latency: float
    pooled_norm: float


@dataclass(frozen=True)
class Calibration:
    """Coefficients with their origin: on which device, from which cells, when."""

    name: str
    about: str
    coefficients: Coefficients
    fitted_on: tuple[str, ...] = ()
    not_fitted: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@cache
def load_calibration(path: str | None = None) -> Calibration:
    """A calibration file; by default the one that ships, measured on H200."""
    if path is None:
        found = resources.files("tileweave.sim") / "data" / "calibration" / f"{REFERENCE}.json"
        data = json.loads(found.read_text("utf-8"))
    else:
        data = _calibration_at(Path(path))
    names = {f.name for f in fields(Coefficients)}
    got = set(data["coefficients"])
    require(
        got == names,
        f"calibration with coefficients missing {sorted(names - got)} and unknown {sorted(got - names)}",
        "exactly the fields of sim.costs.Coefficients",
        "make it anew: tileweave simulate calibrate",
    )
    coefficients = dict(data["coefficients"])
    curves = tuple(
        Curve(**one | {name: tuple(one[name]) for name in ("knots", "fractions")})
        for one in coefficients.pop("nccl")
    )
    found = Coefficients(nccl=curves, **coefficients)
    return Calibration(
        data["name"], data["about"], found, tuple(data["fitted_on"]), data["not_fitted"]
    )


def _calibration_at(path: Path) -> dict[str, Any]:
    """What a calibration file holds, as far as its fields have names."""
    remedy = "make one: tileweave simulate calibrate"
    require(path.is_file(), f"calibration {path}", "a file that exists", remedy)
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(
            f"asked: calibration {path}: {error}; allowed: JSON; remedy: {remedy}"
        ) from None
    fields_of = ("name", "about", "coefficients", "fitted_on", "not_fitted")
    known = (
        isinstance(data, dict)
        and set(fields_of) <= set(data)
        and isinstance(data["coefficients"], dict)
    )
    require(known, f"calibration {path}", f"a mapping with {', '.join(fields_of)}", remedy)
    return data


class Costs:
    """Times of single pieces of work on ``device``, by ``coefficients`` measured on H200.

    Another device keeps the measured fractions of its own peaks, and the measured latencies: a
    transfer, no measurement.
    """

    def __init__(self, device: Device, coefficients: Coefficients | None = None) -> None:
        self.device = device
        self.c = c = coefficients or load_calibration().coefficients
        scale = device.flops / presets()["devices"][REFERENCE].flops
        self.flops = c.matmul_flops * device.flops
        self.memory_rate = c.matmul_memory * device.memory_rate
        # L2 feeds tensor cores: scaled with them
        self.feed, self.fused_feed = c.matmul_feed * scale, c.fused_feed * scale
        self._matmuls: dict[tuple[int, int, int, int, bool], float] = {}

    def matmul(self, m: int, n: int, k: int, itemsize: int = 2, again: bool = False) -> float:
        """x [m, k] @ w [n, k].T by the vendor's library, from its launch to its end; ``again``: one
        behind the other, only."""
        key = (m, n, k, itemsize, again)
        if key not in self._matmuls:
            seconds = self._matmul(m, n, k, itemsize)
            busy = min(2.0 * m * n * k / self.flops / seconds, 1.0)
            self._matmuls[key] = self.c.matmul_launch + self.throttled(
                seconds, busy, self.c.matmul_again if again else 0.0
            )
        return self._matmuls[key]

    def _matmul(self, m: int, n: int, k: int, itemsize: int) -> float:
        c, sms = self.c, self.device.num_sms
        nbytes = (m * k + n * k + m * n) * itemsize
        best = float("inf")
        for tile_m, tile_n in _TILES:
            tiles = cdiv(m, tile_m) * cdiv(n, tile_n)
            for split in _SPLITS:
                if split > 1 and tiles * split > sms:
                    break
                active = min(sms, tiles * split)
                one = self.block(tile_m, tile_n, k / split, active, itemsize) + c.matmul_tile
                memory = nbytes / min(self.memory_rate, active * c.matmul_stream)
                # fp32, out and back, in L2
                parts = c.matmul_split + 8.0 * split * m * n / self.feed if split > 1 else 0.0
                best = min(best, self._overlapped(cdiv(tiles * split, sms) * one, memory) + parts)
        return best

    def _overlapped(self, multiply: float, memory: float) -> float:
        """Both at once: the longer, and a share of the shorter."""
        return max(multiply, memory) + self.c.matmul_overlap * min(multiply, memory)

    def block(self, tile_m: int, tile_n: int, k: float, active: int, itemsize: int = 2) -> float:
        """The library's tile over ``k`` on one multiprocessor while ``active`` of them work."""
        multiply = 2 * tile_m * tile_n * k / (self.flops / self.device.num_sms)
        return _norm(
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
    ) -> float:
        """The same in our kernels; ``memory``: s that bytes nobody has read yet take; ``rate``:
        share of their usual one."""
        multiply = (
            2 * tile_m * tile_n * k / (self.flops * self.c.fused_rate * rate / self.device.num_sms)
        )
        feed = (tile_m + tile_n) * k * itemsize * active / self.fused_feed
        return self._overlapped(_norm(self.c.matmul_norm, multiply, feed), memory)

    def throttled(self, seconds: float, busy: float = 1.0, before: float = 0.0) -> float:
        """A time at full clock -> under the power limit. ``busy``: the share of it that tensor
        cores work; ``before``: s of the same in front of it."""
        return seconds * (1.0 + max(seconds, before) / self.c.matmul_sustained) ** (
            self.c.matmul_power * busy
        )

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

    def stream(self, nbytes: float) -> float:
        """An elementwise kernel that reads and writes ``nbytes`` in all."""
        return self.c.gap + nbytes / (self.c.stream * self.device.memory_rate)

    def permuted(self, nbytes: float) -> float:
        """A copy of a transposed view, by torch, of ``nbytes``."""
        return self.c.gap + 2.0 * nbytes / (self.c.permute * self.device.memory_rate)

    def attention(self, flops: float) -> float:
        """Fused attention of ``flops``."""
        return self.c.matmul_launch + flops / (self.c.attention * self.flops)

    def reduce_rows(self, rows: int, terms: int, width: int) -> float:
        """A library's sum of ``terms`` bf16 rows into each of ``rows``: a thread's time for each
        result, which few terms do not shorten, or bytes of rows that lie apart, whichever is
        longer."""
        elements = float(rows * width)
        memory = elements * (terms + 1) * 2 / (self.c.reduce_memory * self.device.memory_rate)
        scale = presets()["devices"][REFERENCE].num_sms / self.device.num_sms
        return self.c.matmul_launch + max(memory, self.c.reduce * elements * scale)

    def lookup(self, bags: float, rows: float, row_bytes: float, itemsize: int = 2) -> float:
        """Pool ``rows`` rows of ``row_bytes`` into ``bags`` bags by torch: a time for each element
        read and made, and bytes."""
        scale = presets()["devices"][REFERENCE].num_sms / self.device.num_sms
        width = row_bytes / itemsize * scale
        one = (self.c.lookup_made * bags + self.c.lookup_read * rows) * width
        return (
            self.c.matmul_launch
            + one
            + rows * row_bytes / (self.c.lookup_memory * self.device.memory_rate)
        )

    def own_lookup(self, bags: float, rows: float, row_bytes: float) -> float:
        """The same by this library's kernel: bytes of rows, results and row numbers; a time a bag,
        which short ones show."""
        return self.c.matmul_launch + self._own_lookup(bags, rows, row_bytes)

    def _own_lookup(self, bags: float, rows: float, row_bytes: float) -> float:
        memory = (rows + bags) * (row_bytes + 8.0) / (self.c.own_memory * self.device.memory_rate)
        scale = presets()["devices"][REFERENCE].num_sms / self.device.num_sms
        return _norm(3.0, memory, self.c.own_bag * bags * scale)

    def pooled(self, bags: float, rows: float, row_bytes: float, sent: float) -> float:
        """That kernel with results stored to peers, which takes ``sent`` s by itself."""
        return self.c.pooled_latency + _norm(
            self.c.pooled_norm, self._own_lookup(bags, rows, row_bytes), sent
        )


def _norm(p: float, *parts: float) -> float:
    top = max(parts)
    return top * sum((part / top) ** p for part in parts) ** (1.0 / p) if top > 0.0 else 0.0
