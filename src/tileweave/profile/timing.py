"""The timer: it compares functions of one group, interleaved in one run.

It avoids the usual mistakes:

- every rank makes the same number of calls, from a first estimate that all ranks agree on;
- there is a barrier before each repeat, the time of a repeat is that of the slowest rank, and the
  result is the median of repeats;
- functions take turns so that each follows each other one equally often, because the function
  before may leave the chip hot and throttled; and a function of long calls first runs for 40 ms
  without being timed, if asked, so that a few repeats are enough: a GPU at its power limit takes
  as long to reach the clock that this function leaves it;
- times are exchanged after the last repeat, and after the first one if far functions are left out,
  so that no other collective runs between timed regions;
- small functions are captured into a CUDA graph of many calls, so that the host is not timed.

The caller must keep inputs out of the L2: its functions should rotate through several copies of
them. Without a GPU the clock of the host is used, to try the scripts.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

REPEAT_MS = 20.0
MAX_CALLS = 2000
GRAPH_CALLS = 50  # calls in one captured graph; a replay costs the host about one launch
_WARM_UP_CALLS = 3
# Matmuls of 5076 x 18240 x 4736 on two H200, 20 ms each: the first 0.91 times the median, after
# another function up to 1.14 times. Shorter calls wait for memory or the link, below the limit.
_SETTLING_LAPS = 2
_LONG_CALL_US = 200.0
_CAPTURE_ERRORS = (RuntimeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Timing:
    """The times of one call, in microseconds.

    Attributes
    ----------
    median_us, low_us, high_us : median, minimum and maximum over repeats. The time of a repeat is
        the mean over ``calls`` calls on the slowest rank.
    repeats_us : the times of the repeats.
    per_rank_us : the median of each rank.
    calls : calls per repeat.
    graph : whether calls were replayed from a CUDA graph.
    note : why a time is missing, or is not of what was asked for.
    """

    median_us: float
    low_us: float = math.nan
    high_us: float = math.nan
    repeats_us: list[float] = field(default_factory=list)
    per_rank_us: list[float] = field(default_factory=list)
    calls: int = 0
    graph: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class _Lap:
    """A function that is ready to be timed: ``run()`` makes ``calls`` calls, which take about
    :data:`REPEAT_MS` unless their number was given."""

    run: Callable[[], None]
    calls: int
    graph: bool
    note: str = ""

    @property
    def is_long(self) -> bool:
        """Whether a call is so long that a GPU may reach its power limit."""
        return self.calls * _LONG_CALL_US <= REPEAT_MS * 1e3


def measure(
    functions: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    repeats: int = 7,
    iterations: int | None = None,
    graph: bool = False,
    on_capture_failure: Literal["nan", "eager"] = "nan",
    not_capturable: Mapping[str, str] | None = None,
    settle: bool = False,
    within: float | None = None,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Time ``functions`` against each other on all ranks of ``group``. Collective.

    Parameters
    ----------
    functions : name -> one call, with the same names in the same order on every rank.
    repeats : timed repeats of each function.
    iterations : calls per repeat; None: as many as take about 20 ms.
    graph : capture calls in a CUDA graph and time its replay (ignored on the CPU).
    on_capture_failure : the result for a function that cannot be captured: NaN, or the time of
        eager calls with a note.
    not_capturable : name -> reason, for functions whose capture is not tried.
    settle : run a function of long calls before each of its repeats, until the chip has the clock
        that it keeps under this function; on a GPU.
    within : time each function once, and then only those that took at most this many times as long
        as the fastest. The time of the others is that of this one repeat.
    progress : called with what is being prepared or timed.
    """
    clock = (_CudaClock if device.type == "cuda" else _HostClock)(device, group)
    tell = progress or (lambda _: None)
    laps: dict[str, _Lap | None] = {}
    notes: dict[str, str] = {}
    for name, function in functions.items():
        tell(f"prepares {name}")
        calls = iterations or _calls_for(clock, function)
        reason = (not_capturable or {}).get(name, "") if graph and clock.captures else ""
        if graph and clock.captures and not reason:
            laps[name], reason = _captured(clock, function, calls)
            if laps[name] is not None:
                continue
        if reason:
            notes[name] = f"cannot be captured: {reason}"
            if on_capture_failure == "nan":
                laps[name] = None
                continue
            notes[name] = f"eager, {notes[name]}"
        laps[name] = _Lap(_repeat(function, calls), calls, False)
    ready = {name: lap for name, lap in laps.items() if lap is not None}
    seconds: dict[str, list[list[float]]] = {}
    if within is not None and ready:
        tell("compares all")
        seconds = _timed(clock, ready, 1, False, lambda _: None)
        slowest = {name: max(row[0] for row in rows) for name, rows in seconds.items()}
        limit = within * min(slowest.values())
        ready = {name: lap for name, lap in ready.items() if slowest[name] <= limit}
    seconds |= _timed(clock, ready, repeats, settle, tell)
    clock.barrier()
    return {name: _timing(laps[name], seconds.get(name, []), notes.get(name, "")) for name in laps}


def _timed(
    clock: _Clock,
    laps: Mapping[str, _Lap],
    repeats: int,
    settle: bool,
    tell: Callable[[str], object],
) -> dict[str, list[list[float]]]:
    """Seconds of a call, ``[ranks][repeats]``."""
    names = list(laps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        tell(f"repeat {number + 1} of {repeats}")
        for name in (names[place] for place in turn(len(names), number)):
            lap = laps[name]
            if settle and clock.throttles and lap.is_long:
                clock.barrier()
                for _ in range(_SETTLING_LAPS):
                    lap.run()
            seconds[name].append(clock.time(lap.run) / lap.calls)
    return {name: clock.gather(seconds[name]) for name in names}


def turn(count: int, number: int) -> list[int]:
    """The order of ``count`` functions in repeat ``number``. In ``2 * count`` repeats each function
    follows each other one equally often.

    E. J. Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments", 1949.
    """
    zigzag = [place // 2 if place % 2 == 0 else -(place + 1) // 2 for place in range(count)]
    order = [(place + number // 2) % count for place in zigzag]
    return order if number % 2 == 0 else order[::-1]


def _timing(lap: _Lap | None, by_rank: list[list[float]], note: str) -> Timing:
    """``by_rank`` has the seconds of a call, ``[ranks][repeats]``."""
    if lap is None or not by_rank[0]:
        return Timing(math.nan, note=note)
    slowest = [max(column) * 1e6 for column in zip(*by_rank, strict=True)]
    own = [median(row) * 1e6 for row in by_rank]
    return Timing(
        median(slowest), min(slowest), max(slowest), slowest, own, lap.calls, lap.graph, note
    )


def _repeat(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run


def _calls_for(clock: _Clock, function: Callable[[], object]) -> int:
    """Warm up. Returns how many calls take about :data:`REPEAT_MS`, the same on every rank."""
    for _ in range(_WARM_UP_CALLS):
        function()
    estimate = clock.time(_repeat(function, 2)) / 2
    slowest = max(row[0] for row in clock.gather([estimate]))
    return max(2, min(MAX_CALLS, round(REPEAT_MS * 1e-3 / max(slowest, 1e-7))))


def _captured(clock: _Clock, function: Callable[[], object], calls: int) -> tuple[_Lap | None, str]:
    """The function in a graph of up to :data:`GRAPH_CALLS` calls; or None and the reason, if any
    rank cannot capture it."""
    inside = min(calls, GRAPH_CALLS)
    replays = max(1, round(calls / inside))
    replay, reason = clock.capture(_repeat(function, inside))
    failed = any(row[0] for row in clock.gather([0.0 if replay is not None else 1.0]))
    if failed or replay is None:
        return None, reason or "another rank could not capture it"
    replay()  # the first replay uploads the graph
    clock.barrier()
    return _Lap(_repeat(replay, replays), inside * replays, True), ""


class _Clock(ABC):
    """What times functions on the ranks of a group. Methods but ``capture`` are collective."""

    captures: ClassVar[bool]  # whether there are CUDA graphs
    throttles: ClassVar[bool]  # whether the device slows down at its power limit

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.device, self.group = device, group

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, and for what their devices have queued."""

    @abstractmethod
    def time(self, run: Callable[[], None]) -> float:
        """Seconds that ``run`` takes on this rank."""

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None] | None, str]:
        """``run`` as the replay of a graph; or None and the reason why it cannot be captured."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of all ranks, ``[ranks][values]``."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        if values:
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]


class _CudaClock(_Clock):
    """CUDA events on the current stream, after a collective that makes all ranks start together."""

    captures = throttles = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(device, group)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start_signal = torch.zeros(1, device=device)
        # results of captured calls are not used, so that all graphs may share their memory
        self._pool = torch.cuda.graph_pool_handle()

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[], None]) -> float:
        self.barrier()
        # it ends on all devices within microseconds
        dist.all_reduce(self._start_signal, group=self.group)
        self._start.record()
        run()
        self._end.record()
        torch.cuda.synchronize(self.device)
        return self._start.elapsed_time(self._end) * 1e-3

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None] | None, str]:
        current = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the watchdog thread of NCCL may query its events during the capture
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                run()
        except _CAPTURE_ERRORS as error:
            # a capture that fails at its end leaves its stream current, and its pool unusable
            torch.cuda.set_stream(current)
            self._pool = torch.cuda.graph_pool_handle()
            return None, _first_line_of_cause(error)
        return graph.replay, ""


def _first_line_of_cause(error: BaseException) -> str:
    """Of the error that made the capture fail: its end raises another one that says only that."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class _HostClock(_Clock):
    """The clock of the host, for ranks without GPUs."""

    captures = throttles = False

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def time(self, run: Callable[[], None]) -> float:
        self.barrier()
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None] | None, str]:
        return None, "there is no GPU"
