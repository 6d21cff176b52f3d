"""The sizes of a call (Problem), how its kernel divides them (MatmulConfig), and what runs (Plan).

No torch, no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Generic, Literal, TypeVar

from tileweave.planning.machine import Machine

TransportName = Literal["copy_engine", "sm", "nodes"]
KernelName = Literal["triton", "hopper", "library"]
C = TypeVar("C")  # the config of an operator
FUSED_WORLD_SIZES = range(2, 9)
# Limit on the elements of a shard: programs index equal parts of it, rounded up to whole blocks.
MOST_ELEMENTS = 2**31 - 2**22


class _CachedHash:
    """Keeps the hash of a frozen dataclass, because configs are in the keys of every call."""

    __slots__ = ("_hash",)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:  # the first time, or in the process that unpickled it
            found = hash(tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore
            object.__setattr__(self, "_hash", found)
            return found


@dataclass(frozen=True, slots=True)
class MatmulConfig(_CachedHash):
    """How a fused matmul is divided into tiles, stages and transfers.

    kernel : whose main loop runs. ``"library"`` is cuBLAS in launches of its own: with transport
        ``"sm"``, our kernels communicate before or after it; with ``"copy_engine"``, the rows of
        each rank are multiplied by a launch of their own, and copy engines bring them before
        (all-gather), or send the products (reduce-scatter).
    transport : how data reaches peers. ``"nodes"``: chunks cross to other nodes by NCCL (gloo on
        the CPU), copy engines push inside the node; with ``"library"`` cuBLAS multiplies one chunk
        while others travel, with ``"triton"`` tiles wait for chunks (all-gather on the CPU only).
    tile_m, tile_n, tile_k : the tile that a program computes at once, in elements.
    num_stages : K blocks of operands in flight.
    num_warps : warps that multiply.
    group_m : tile rows that share columns of w in L2; see ``schedules.gather.grouped``.
    num_slices : slices of a shard that have signals of their own. A producer pushes one at a time
        (all-gather, ``"sm"``); a copy engine copies one at a time (reduce-scatter and all-reduce,
        ``"copy_engine"``); one crosses to other nodes at a time (``"nodes"``).
    num_producers : programs that push (``"sm"``). They are few, so that all of them are resident
        whatever else runs.
    split_tail : cut the tiles that do not fill a last wave along K.
    band_sources : sources of an all-gather whose tiles form one band.
    cut_bands : whether each band is a segment with waves of its own; see
        ``schedules.gather.TileSchedule``.
    team : programs that share columns of w in the tiles that are cut along K; in one shot (kernel
        ``"triton"``), programs that multiply each tile, cut along K.
    own_first : compute the own shard alone before the bands; otherwise it is in the first band.
    shots : of an all-reduce. 1: every rank sums all partial sums. 2 (``"library"`` only): each
        rank sums its part and sends the result to the others, which is fewer bytes from three ranks
        on.
    """

    kernel: KernelName
    transport: TransportName
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    num_slices: int = 32
    num_producers: int = 32
    split_tail: bool = True
    band_sources: int = 1
    cut_bands: bool = False
    team: int = 1
    own_first: bool = True
    shots: int = 2

    __hash__ = _CachedHash.__hash__

    @property
    def multiplies_chunks(self) -> bool:
        """Whether cuBLAS multiplies chunks that travel between nodes."""
        return self.kernel == "library" and self.transport == "nodes"

    def fits_rows(self, rows: int) -> bool:
        """Whether its transport can move shards of ``rows`` rows: copy engines need a tile or
        more."""
        return self.transport == "sm" or rows >= self.tile_m

    def __str__(self) -> str:
        """The summary that a plan shows; repr has every field."""
        if self.multiplies_chunks:
            return f"cuBLAS on each chunk as NCCL moves them, at most {self.num_slices} chunks"
        if self.kernel == "library" and self.transport == "copy_engine":
            return "cuBLAS on each shard, which copy engines move"
        if self.kernel == "library":
            shots = ", one shot" if self.shots == 1 else ""
            return f"cuBLAS, then one launch by tiles of {self.tile_m}x{self.tile_n}{shots}"
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        text = f"{self.kernel} kernel, {self.transport} transport, {tile}, {self.num_stages} stages"
        if self.transport == "copy_engine" and self.num_slices < 32:
            text += f", {self.num_slices} slices"
        if self.shots == 1:
            return f"{text}, cut along K in {self.team}" if self.team > 1 else text
        return f"{text}, tail cut along K" if self.split_tail else text


FAST = "+fast"
# Kinds of the scales of x: of a tensor (w likewise), of rows, of blocks; with fast_accum.
SCALES = ("tensor", "row", "block", f"tensor{FAST}", f"row{FAST}")


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one call: ``rows`` per shard, local ``cols`` of the output, ``depth`` = K,
    ``itemsize``, the bytes of an element of x and w, and ``nodes``, into which ranks are divided
    equally. ``scales``: of FP8 operands, one of :data:`SCALES`; "" if they are not known."""

    world_size: int
    rows: int
    cols: int
    depth: int
    itemsize: int
    dtype: str
    nodes: int = 1
    scales: str = ""

    @property
    def keeps_sums(self) -> bool:
        """Whether tensor cores may keep the sums of FP8 products."""
        return self.scales.endswith(FAST)

    @property
    def fp8(self) -> bool:
        """Whether x and w are FP8, with scales."""
        return self.itemsize == 1

    @property
    def out_itemsize(self) -> int:
        """Bytes of an element of the result, and of a partial sum as it is sent."""
        return max(self.itemsize, 2)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A candidate of a call.

    config : None for the unfused path.
    predicted_us : microseconds by the cost model, corrected by measurements nearby.
    measured_us : microseconds, where a tuner measured exactly this problem here.
    host_us : microseconds of the host that an eager call takes at least.
    """

    config: MatmulConfig | None
    predicted_us: float
    measured_us: float | None = None
    host_us: float = 0.0

    @property
    def captured_us(self) -> float:
        """In a CUDA graph: what was measured, otherwise what is predicted."""
        return self.predicted_us if self.measured_us is None else self.measured_us

    @property
    def expected_us(self) -> float:
        """Of an eager call."""
        return max(self.captured_us, self.host_us)

    def __str__(self) -> str:
        name = "unfused" if self.config is None else str(self.config)
        times = f"predicted {self.predicted_us:.1f} us"
        if self.measured_us is not None:
            times += f", measured {self.measured_us:.1f} us"
        if self.host_us > self.captured_us:
            times += f"; eager {self.host_us:.1f} us, by the time of the host"
        return f"{name}: {times}"


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """What a call will do, and why.

    path : ``"fused"``, ``"unfused"`` or ``"local"`` (a group of one rank).
    reason : why, as text.
    config : :class:`MatmulConfig`, ``DispatchConfig``, ``CombineConfig`` or ``EmbeddingConfig``;
        None if the operator's own kernel does not run.
    checksum : of what ranks must agree on; set once the arguments of the call were checked.
    world_size : number of ranks; set at the same time.
    candidates : all that could have been chosen, fastest first, where times were compared.
    captured : the config of calls in CUDA graphs, if another one is faster there; None: ``config``.
    """

    path: Literal["fused", "unfused", "local"]
    reason: str
    config: C | None = None
    checksum: int = field(default=0, compare=False, repr=False)
    world_size: int = field(default=0, compare=False, repr=False)
    candidates: tuple[Predicted, ...] = field(default=(), compare=False, repr=False)
    captured: C | None = None

    @property
    def graph_config(self) -> C | None:
        """The config of calls in CUDA graphs."""
        return self.config if self.captured is None else self.captured

    @property
    def summary(self) -> str:
        """The choice and its reason in one line."""
        cut = "" if self.config is None else f", {self.config}"
        graph = "" if self.captured is None else f"; in a CUDA graph {self.captured}"
        return f"{self.path}{cut}: {self.reason}{graph}"

    def __str__(self) -> str:
        return "\n  ".join([self.summary, *map(str, self.candidates)])


def why_unfused(
    world_size: int, sizes: tuple[int, ...], machine: Machine, interpreting: bool
) -> str | None:
    """Why no fused operator can run for this world size and these sizes; None if one may."""
    if world_size not in FUSED_WORLD_SIZES:
        return f"world size {world_size} is above {FUSED_WORLD_SIZES[-1]}"
    if min(sizes) == 0:
        return "a dimension is zero"
    if machine.backend == "cpu" and not interpreting:
        return "on the CPU torch is faster than interpreted kernels (TRITON_INTERPRET=1 runs those)"
    return machine.unreachable or None


def why_no_kernel(dtype: str, machine: Machine) -> str | None:
    """Why no kernel is known to be faster on this GPU than the unfused path; None if one is."""
    if dtype == "float32":
        return "float32 is not a tensor-core dtype"
    if machine.arch == 90 and not machine.hopper:
        return (
            f"TILEWEAVE_KERNELS={machine.kernels} leaves out the kernels for Hopper, and no "
            "measurement shows the others ahead"
        )
    if not machine.hopper:
        return f"no measurement shows the fused kernel ahead on {machine.name}"
    return None
