"""What is planned: the sizes of a call, the cut of its kernel, and the plan that joins them.

No torch, no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from tileweave.planning.machine import Machine

TransportName = Literal["copy_engine", "sm"]
KernelName = Literal["triton", "hopper", "library"]
C = TypeVar("C")  # how an operator is cut up
FUSED_WORLD_SIZES = range(2, 9)
MOST_ELEMENTS = 2**31 - 2**22  # of a shard: programs take equal shares of it, rounded up to blocks


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How one fused matmul is cut up.

    kernel : whose main loop. "library": the vendor's matmul as launches of its own; ours send or
        gather before or behind it (``"sm"``), or copy engines bring the shards, each of which has a
        matmul of its own (``"copy_engine"``, all-gather).
    tile_m, tile_n, tile_k : the tile a program computes at once, elements.
    num_stages : tiles of K in flight. num_warps : warps that multiply. group_m : tile rows in an L2
        band.
    transport : who pushes.
    num_slices : pieces of a shard that are signalled one by one: what producers push (all-gather,
        ``"sm"``), what a copy engine takes at once (reduce-scatter, ``"copy_engine"``).
    num_producers : programs that push (``"sm"``); few, so that they are resident whatever else
        runs.
    split_tail : cut the tiles that do not fill a last wave along K.
    team : programs that share columns of w in the cut tiles.
    own_first : start with the own shard; without it the bands begin with it.
    shots : of an all-reduce: 1, every rank sums all partials; 2 ("library" alone), owners sum and
        pass the result on.
    band_sources, cut_bands : how many sources follow the own one together, and whether each such
        band fills its own waves; see ``schedule.TileSchedule``.
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

    def fits_rows(self, rows: int) -> bool:
        """Whether its transport takes shards of that many rows: copy engines need a tile of them or
        more."""
        return self.transport == "sm" or rows >= self.tile_m

    def __str__(self) -> str:
        """What a plan says of it; repr has all of it."""
        if self.kernel == "library" and self.transport == "copy_engine":
            return "library matmul of each shard as copy engines bring it"
        if self.kernel == "library":
            return f"library matmul, then one launch by tiles of {self.tile_m}x{self.tile_n}"
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{self.kernel} kernel, {self.transport} transport, {tile}, {self.num_stages} stages"


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of one call: ``rows`` of a shard, local ``cols`` of the output, ``depth`` = K, bytes of
    an element."""

    world_size: int
    rows: int
    cols: int
    depth: int
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """What a call will do.

    path : "fused", "unfused" or "local". config : how the operator's own kernel is cut up, None
        where it does not run: :class:`MatmulConfig`, ``DispatchConfig``, ``CombineConfig`` or
        ``EmbeddingConfig``.
    Once the call was accepted, ``checksum``: a checksum of what ranks must agree on; ``world_size``:
    how many they are.
    """

    path: Literal["fused", "unfused", "local"]
    reason: str
    config: C | None = None
    checksum: int = field(default=0, compare=False, repr=False)
    world_size: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        cut = "" if self.config is None else f", {self.config}"
        return f"{self.path}{cut}: {self.reason}"


def why_unfused(
    world_size: int, sizes: tuple[int, ...], machine: Machine, interpreting: bool
) -> str | None:
    """Why no fused operator runs over more than one rank, on any device; None where one may."""
    if world_size not in FUSED_WORLD_SIZES:
        return f"world size {world_size} is above {FUSED_WORLD_SIZES[-1]}"
    if min(sizes) == 0:
        return "a dimension is zero"
    if machine.backend == "cpu" and not interpreting:
        return "on the CPU torch is faster than interpreted kernels (TRITON_INTERPRET=1 runs those)"
    return None


def why_no_kernel(dtype: str, machine: Machine) -> str | None:
    """Why no kernel on this GPU is known to be ahead; None where one is."""
    if dtype == "float32":
        return "float32 is not a tensor-core dtype"
    if machine.arch != 90:
        return f"no measurement shows the fused kernel ahead on {machine.name}"
    return None
