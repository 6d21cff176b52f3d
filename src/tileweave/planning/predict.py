"""The time of a candidate, in closed form from the pieces in ``costs.py``.

A fused kernel multiplies tiles in waves while shards arrive or leave. It ends when the last wave
has ended, or when the last shard has come and what needs it is multiplied, whichever is later.
``sim/tiles.py`` simulates the same with events, from the same pieces. No torch, no triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tileweave.planning.candidates import PLANNED
from tileweave.planning.costs import Costs, norm
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.gather import cdiv

# of a copy of a slice of an all-reduce, beyond its bytes: its wait and its signal (H200)
_SLICE_COPY_SECONDS = 10e-6
# from the last store of reduced rows until programs of peers copy them (four H200)
_LAST_ROWS_SECONDS = 20e-6
# Of the link rate: of a launch that communicates after or before cuBLAS, and of each step of one
# that reduces and gathers. From 4 MB on, on two H100, two and four H200: mostly 0.53 to 0.61
# (single shapes 0.39 to 0.72), and 0.63 to 0.76. The calibration has the rate of few rows.
_EXCHANGE_FRACTION, _REDUCE_FRACTION = 0.6, 0.68
# Of kernels whose shards copy engines move, as fitted to 2,700 times of two H100, two and four H200
# (errors have a standard deviation of 13 %, of 16 % with the calibration's): bytes that L2 feeds to
# tiles, per byte from memory, and the exponent of the norm of feeding and multiplying, which slow
# each other down long before they are equal.
_FEED, _FEED_NORM = 5.0, 1.6
# One shot, as fitted to 790 times of two H100, two and four H200 (in the mean 7 % off): the launch
# until data of peers has come, beyond tiles; each tile besides its bytes; of the rate of memory;
# from a load until its data is in shared memory; rows of w that begin inside a line of 128 bytes,
# each block of K of which touches one more; and with w first, the rate of a multiprocessor over
# that with x first, and again from a load until its data is in shared memory.
_ONE_SHOT_SECONDS, _ONE_SHOT_TILE_SECONDS = 3.5e-6, 2.2e-6
_ONE_SHOT_MEMORY, _LOAD_SECONDS, _PARTIAL_LINES = 0.87, 1.3e-6, 1.05
_W_FIRST, _W_FIRST_LOAD = 1.8, 1.0e-6
_SHARED_BYTES, _WARPS = 227 << 10, 64  # of a multiprocessor, for programs at the same time
_OVERLAP = 3.0  # exponent of the norm of times that overlap
GATHERS = ("all_gather_matmul", "all_to_all_matmul")  # what communicates before the matmul


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does: a matmul [m, k] @ [k, n], and ``nbytes`` that it receives.

    steps : how often ``nbytes`` crosses the links, one after the other: 2 for an all-reduce.
    """

    m: int
    n: int
    k: int
    nbytes: float
    steps: int = 1


def work_of(op: str, p: Problem) -> Work:
    """The work of a problem as the planner of ``op`` counts it."""
    size, rows, cols, depth = p.world_size, p.rows, p.cols, p.depth
    peers = (size - 1) * (p.itemsize if op in GATHERS else p.out_itemsize)
    if op == "all_gather_matmul":
        return Work(size * rows, cols, depth, float(peers * rows * depth))
    if op == "matmul_reduce_scatter":
        return Work(size * rows, cols, depth, float(peers * rows * cols))
    if op == "matmul_all_reduce":
        return Work(rows, cols, depth, peers * rows * cols / size, 2)
    if op == "matmul_all_to_all":
        return Work(rows, size * cols, depth, float(peers * rows * cols))
    return Work(rows, cols, size * depth, float(peers * rows * depth))


def seconds(op: str, p: Problem, c: MatmulConfig | None, costs: Costs, link_rate: float) -> float:
    """Predicted seconds of a call in a CUDA graph with config ``c``; None: unfused."""
    w = work_of(op, p)
    if c is None:
        whole = w.nbytes * p.world_size / (p.world_size - 1)
        return costs.matmul(w.m, w.n, w.k, p.itemsize) + costs.nccl(
            PLANNED[op].collective, p.world_size, whole, link_rate
        )
    if c.kernel == "library" and c.transport == "sm":
        if op == "matmul_all_reduce" and c.shots == 1:  # whole partial sums to all others
            w = replace(w, nbytes=w.nbytes * p.world_size, steps=1)
        return _launch_and_cublas(p, w, costs, link_rate)
    if c.kernel == "library":
        if op in GATHERS:
            return _cublas_per_shard(p, w, costs, link_rate)
        return _send_shards(p, w, costs, link_rate)
    if op == "matmul_all_reduce" and c.transport == "sm":
        return _one_shot(p, w, c, costs, link_rate)
    return _fused(op, p, w, c, costs, link_rate)


def host_seconds(c: MatmulConfig | None, world_size: int) -> float:
    """Host time of an eager call, where it is longer than that of the unfused path: no such call is
    faster. Measured on five hosts of two H200: medians from 77 to 193 us for two shards of cuBLAS,
    above 130 on four of them."""
    if c is None or c.kernel != "library" or c.transport == "sm":
        return 0.0
    return 90e-6 * world_size


def _launch_and_cublas(p: Problem, w: Work, costs: Costs, link_rate: float) -> float:
    fraction = _REDUCE_FRACTION if w.steps == 2 else _EXCHANGE_FRACTION
    one = costs.c.exchange_latency + w.nbytes / (fraction * link_rate)
    return costs.matmul(w.m, w.n, w.k, p.itemsize) + costs.c.gap + w.steps * one


def _cublas_per_shard(p: Problem, w: Work, costs: Costs, link_rate: float) -> float:
    c, size = costs.c, p.world_size
    each = w.nbytes / (size - 1) / (c.copy_fraction * link_rate)
    product = costs.matmul(w.m // size, w.n, w.k, p.itemsize) * (1.0 + c.corun)
    done = product
    for step in range(1, size):
        done = max(done, c.copy_latency + step * each + c.signal) + c.gap + product
    return done + c.gap


def _send_shards(p: Problem, w: Work, costs: Costs, link_rate: float) -> float:
    """Products of the peers' rows, each sent while the next is computed, then the own one and the
    sum, which reads all partial sums."""
    c, size = costs.c, p.world_size
    each = w.nbytes / (size - 1) / (c.copy_fraction * link_rate)
    product = costs.matmul(w.m // size, w.n, w.k, p.itemsize) * (1.0 + c.corun)
    sent = 0.0
    for step in range(1, size):
        sent = max(sent, step * (product + c.gap) + c.copy_latency) + each
    summed = costs.stream((size + 1) * (w.m // size) * w.n * p.out_itemsize)
    return max(sent + c.signal, size * (product + c.gap)) + summed


def _one_shot(p: Problem, w: Work, config: MatmulConfig, costs: Costs, link_rate: float) -> float:
    """Each program streams its part of the rows of w of one tile, and sends its sums to all others.
    Loads of the programs that share a multiprocessor overlap; its last program decides."""
    device, lines = costs.device, _PARTIAL_LINES if p.depth * p.itemsize % 128 else 1.0
    ring = (config.tile_m + config.tile_n) * config.tile_k * p.itemsize * config.num_stages
    programs = cdiv(cdiv(w.n, config.tile_n) * config.team, device.num_sms)  # of a multiprocessor
    fit = max(1, min(_SHARED_BYTES // (ring + 1024), _WARPS // config.num_warps))
    ahead = max(config.num_stages - 1, 1) / config.num_stages  # what is loaded while one multiplies
    in_flight = min(fit, programs) * ring * ahead
    part = config.tile_n * w.k / config.team * p.itemsize * lines
    w_first = config.tile_m < 64 <= config.tile_n  # as device/triton/matmul.py chooses
    rate = costs.c.matmul_stream * (_W_FIRST if w_first else 1.0)
    load = _W_FIRST_LOAD if w_first else _LOAD_SECONDS
    stream = norm(_OVERLAP, part / rate, part * load / in_flight)
    memory = (w.n * w.k * lines + w.m * w.n) * p.itemsize
    return (
        _ONE_SHOT_SECONDS
        + norm(
            _OVERLAP,
            programs * stream + cdiv(programs, fit) * _ONE_SHOT_TILE_SECONDS,
            memory / (_ONE_SHOT_MEMORY * device.memory_rate),
        )
        + w.nbytes * p.world_size * config.team / (_EXCHANGE_FRACTION * link_rate)
    )


def _fused(
    op: str, p: Problem, w: Work, config: MatmulConfig, costs: Costs, link_rate: float
) -> float:
    c, size = costs.c, p.world_size
    tiles = _Tiles(op, p, w, config, costs)
    multiply = tiles.seconds(tiles.count)
    copied = config.transport == "copy_engine"
    latency = c.copy_latency if copied else c.push_latency
    rate = (c.copy_fraction if copied else c.push_fraction) * link_rate
    if op == "matmul_all_reduce" and copied:
        slices = min(config.num_slices, cdiv(cdiv(w.m, size), config.tile_m))
        push = w.nbytes / slices / rate + (size - 1) * _SLICE_COPY_SECONDS
        pushed = multiply / (size * slices) + slices * push
        # own rows are multiplied last, each slice when the partial sums of all peers are there
        last = (slices - 1) * push / (size - 1)
        begun = max(multiply * (size - 1) / size, pushed - last)
        stored = begun + w.nbytes / (c.push_fraction * link_rate)
        bound = max(multiply, pushed, stored)
        bound += _LAST_ROWS_SECONDS + costs.stream(2.0 * w.nbytes)  # peers' rows are copied
        return c.fused_launch + latency + bound
    # slices of a shard are copies of their own; a gathered shard is one copy
    slices = 1
    if op != "all_gather_matmul":
        tile_rows = cdiv(p.rows, config.tile_m)
        slices = cdiv(tile_rows, cdiv(tile_rows, config.num_slices))
    queued = slices * c.copy_queued if copied else 0.0
    each = queued + w.nbytes / (size - 1) / rate
    if op == "all_to_all_matmul":  # all ranks have a part of every row
        own = multiply / (max(config.num_slices, 2) if copied else size)
        return c.fused_launch + max(multiply, latency + (size - 1) * each + c.signal + own)
    bound = multiply
    for shard in range(1, size):
        if op in GATHERS:  # the shard arrives, then it and all later ones are multiplied
            arrived = latency + shard * each + c.signal
            bound = max(bound, arrived + tiles.seconds((size - shard) * tiles.of_shard))
        else:  # the shard is multiplied, then it and all later ones are sent
            sent = latency + (size - shard) * each + c.signal
            bound = max(bound, tiles.seconds(shard * tiles.of_shard / slices) + sent)
    return c.fused_launch + bound


class _Tiles:
    """The tiles of a fused kernel, with nothing to wait for.

    count, of_shard : tiles in all, and of the rows (or columns) of one rank.
    """

    def __init__(self, op: str, p: Problem, w: Work, config: MatmulConfig, costs: Costs) -> None:
        tile_m, tile_n, sms = config.tile_m, config.tile_n, costs.device.num_sms
        rows, cols = w.m, cdiv(w.n, tile_n)
        if op == "matmul_all_to_all":  # parts are of columns
            cols = p.world_size * cdiv(p.cols, tile_n)
        elif op != "all_to_all_matmul":
            rows = cdiv(w.m, p.world_size)
        tile_rows = cdiv(w.m, rows) * cdiv(rows, tile_m)
        if rows < tile_m:  # only then tiles span shards
            tile_rows = cdiv(w.m, tile_m)
        self.count = tile_rows * cols
        self.of_shard = self.count / p.world_size
        self._active = min(self.count, sms)
        self._cut = config.split_tail and (self.count > sms or config.kernel == "hopper")
        if self._cut:
            self._active = sms
        in_flight = (tile_m + tile_n) * config.tile_k * p.itemsize * config.num_stages
        rate = min(
            costs.memory_rate,
            self._active * costs.c.matmul_stream,
            self._active * in_flight / 1.2e-6,
        )
        nbytes = (w.m * w.k + w.n * w.k) * p.itemsize + w.m * w.n * p.out_itemsize
        self._memory = nbytes / rate / self.count
        self._costs, self._config, self._k, self._itemsize = costs, config, w.k, p.itemsize
        self._one = self._wave(self._active)
        self._slower = 1.0 + costs.c.corun

    def _wave(self, active: int) -> float:
        """A tile while ``active`` multiprocessors have one."""
        costs, config, k = self._costs, self._config, self._k
        tile = config.tile_m, config.tile_n, k
        if config.transport != "copy_engine":
            return costs.fused_block(*tile, active, self._itemsize, 0.0) + costs.c.fused_tile
        multiply = costs.fused_block(*tile, 0, self._itemsize, 0.0)
        nbytes = (config.tile_m + config.tile_n) * k * self._itemsize * active
        feed = nbytes / (_FEED * costs.device.memory_rate)
        return norm(_FEED_NORM, multiply, feed) + costs.c.fused_tile

    def seconds(self, tiles: float) -> float:
        """Of so many tiles, in whole waves unless the last ones are cut along K. L2 feeds a last
        wave of few tiles faster."""
        if self._cut:
            waves = tiles / self._active * self._one
        else:
            whole, last = divmod(math.ceil(tiles), self._active)
            waves = whole * self._one + (self._wave(last) if last else 0.0)
        return max(waves, tiles * self._memory) * self._slower
