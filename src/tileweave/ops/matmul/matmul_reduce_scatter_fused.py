"""The fused call of matmul_reduce_scatter: instance, slot, launch, pushes.

What calls of one shape need is made once and kept. The operators' files check the arguments and
plan; tests, the tuner and the tracer call :func:`run_fused` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from tileweave.errors import require
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import (
    copy_slot,
    endpoint,
    parts_of_eager_calls,
    push_with_launch,
)
from tileweave.ops.matmul.inputs import ready
from tileweave.ops.matmul.products import NOTHING, Added, Plain, Product
from tileweave.planning.matmul import scatter_schedule_for
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.gather import cdiv, push_order
from tileweave.planning.schedules.scatter import ScatterSchedule
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.protocol import MAX_SLICES, REDUCED
from tileweave.transport.workspace import Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.scaling import Scaling
    from tileweave.ops.matmul.reduce_by_cublas import MultiplyThenReduce
    from tileweave.ops.matmul.scaled import ScaledProduct
    from tileweave.ops.matmul.shards_by_cublas import ShardSums

OP = "matmul_reduce_scatter"


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """Make the fused call of plan ``chosen``: x [M, k], w [N, k]; out [M / R, N]."""
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    if config.kernel != "library":
        _run(x, w, bias, out, group_name, chosen, config, None, ())
    elif config.transport == "nodes":
        from tileweave.ops.matmul import over_nodes

        over_nodes.scatter(x, w, bias, out, group_name, chosen)
    else:
        run_library((x,), Plain(w, None), bias, out, group_name, chosen)


def run_scaled(
    x: tuple[torch.Tensor, ...],
    product: ScaledProduct,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """:func:`run_fused` of FP8 operands: x, its data and scales as they travel, and what it is
    multiplied by."""
    config = chosen.config
    assert config is not None, "the unfused path has no config"
    if config.kernel == "library":
        run_library(x, product, bias, out, group_name, chosen)
        return
    data, w, scaling, scales = scaled_parts(x, product, out.dtype, config)
    _run(data, w, bias, out, group_name, chosen, config, scaling, scales)


def scaled_parts(
    x: tuple[torch.Tensor, ...], product: ScaledProduct, dtype: torch.dtype, config: MatmulConfig
) -> tuple[torch.Tensor, torch.Tensor, Scaling, tuple[torch.Tensor, ...]]:
    """Of FP8 operands of a kernel of ours, with a result of ``dtype``: x, w, how they are scaled,
    and their scales."""
    from tileweave.kernels.scaling import Scaling
    from tileweave.ops.matmul.scaled import check_tile

    check_tile(config, product, True)
    (data, scale), w = x, product.w
    kind, keeps_sums = product.kind, product.fast_accum
    scaling = Scaling(kind == "block", kind == "tensor", w.kind == "tensor", keeps_sums, dtype)
    return data, w.data, scaling, (scale.contiguous(), w.scale)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    chosen: Plan[MatmulConfig],
    config: MatmulConfig,
    scaling: Scaling | None,
    scales: Sequence[torch.Tensor],
) -> None:
    """A call whose kernel is ours."""
    aligned = (x.data_ptr() | w.data_ptr()) & 15 == 0, out.data_ptr() & 15 == 0
    key = (*aligned, scaling)
    instance, (call, launch) = ready(chosen, key, group_name, _make, x, w, out, config, scaling)
    capturing = instance.begin(chosen.checksum)
    if config.transport == "sm":
        summed_in = None if capturing else call.summed_in
        try:
            launch(x, w, bias, out, None, 0, (), None, scales, summed_in)
        finally:
            instance.launched()
        return
    call.launch_and_push(launch, (x, w, bias, out), capturing, None, scales)


def run_library(
    x: tuple[torch.Tensor, ...],
    product: Product,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """A call whose matmul is ``product``, by cuBLAS: of all rows before one launch that reduces,
    or of each rank's rows, which copy engines send. x: its parts, the first [M, k]."""
    config, added = chosen.config, NOTHING if bias is None else Added(bias)
    assert config is not None, "the unfused path has no config"
    if config.transport == "copy_engine":
        made = ready(chosen, "library", group_name, _make_sums, x[0], product, out.shape[0])
        instance, sums = made
        sums(instance, x, product, added, out, chosen.checksum)
        return
    instance, call = ready(
        chosen, "library", group_name, _make_by_cublas, x[0], product, out.shape[0], chosen.config
    )
    call(instance, x, product, added, out, None, chosen.checksum)


def _make_sums(
    workspace: Workspace, _: torch.Tensor, product: Product, rows: int
) -> tuple[Instance, ShardSums]:
    from tileweave.ops.matmul.shards_by_cublas import shard_sums

    return shard_sums(workspace, OP, rows, product)


def _make_by_cublas(
    workspace: Workspace, x: torch.Tensor, product: Product, rows: int, config: MatmulConfig
) -> tuple[Instance, MultiplyThenReduce]:
    from tileweave.ops.matmul.reduce_by_cublas import multiply_then_reduce

    return multiply_then_reduce(workspace, x.shape[0], product, OP, rows, config)


def _make(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    config: MatmulConfig,
    scaling: Scaling | None,
) -> tuple[Instance, tuple[FusedCall, Callable[..., None]]]:
    call = fused_call(workspace, x, w, out.dtype, config, scaling)
    return call.instance, (call, call.launcher(x, w, out))


@dataclass(slots=True)
class FusedCall:
    """What calls of one shape share; made once, to save host time.

    gathered : rows of the result of an all-reduce by tiles; 0 of a reduce-scatter.

    mirrors : of an all-reduce by tiles, by slot: where peers rank + 1, rank + 2, ... get the rows
        of this rank.
    """

    instance: Instance
    endpoint: Peers
    schedule: ScatterSchedule
    config: MatmulConfig
    copies: tuple[Copies, ...]  # of a call with copy engines, per slot
    staging_elements: int  # of a call with copy engines: what peers get
    launchers: dict[tuple[object, ...], Callable[..., None]]
    scaling: Scaling | None = None
    gathered: int = 0
    mirrors: tuple[tuple[int, ...], ...] = ((), ())
    summed_in: torch.Tensor | None = None  # parts of tiles in eager calls
    _staging: torch.Tensor | None = None

    def launch_and_push(
        self,
        launch: Callable[..., None],
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
        capturing: bool,
        residual: torch.Tensor | None,
        scales: Sequence[torch.Tensor],
    ) -> None:
        """Make a call with copy engines. ``operands``: x, w, bias and the result."""
        slot, out = copy_slot(self.instance), operands[-1]
        if capturing:
            staging, summed_in = out.new_empty(self.staging_elements), None
        else:
            staging, summed_in = self.staging(out.dtype), self.summed_in
        more = staging, slot, self.mirrors[slot], residual, scales, summed_in
        kernel = partial(launch, *operands, *more)
        push_with_launch(self.instance, kernel, self.copies[slot], staging.data_ptr(), capturing)

    def staging(self, dtype: torch.dtype) -> torch.Tensor:
        """What peers get in eager calls. Always the same memory: graphs of copies have its address,
        so it may not be freed. The next launch on this device comes after the copies."""
        if self._staging is None:
            self._staging = self._stage(dtype)
        return self._staging

    @torch.inference_mode(False)
    def _stage(self, dtype: torch.dtype) -> torch.Tensor:
        memory = self.instance.scratch(self.staging_elements * dtype.itemsize).view(dtype)
        for copies in self.copies:
            copies.kept = memory.data_ptr()
        return memory

    def launcher(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> Callable[..., None]:
        """The kernel of this rank. Ranks may choose differently, by alignment: both kernels have
        the same protocol. ``residual``: of an all-reduce."""
        key = (
            (x.data_ptr() | w.data_ptr()) & 15 == 0,
            out.data_ptr() & 15 == 0,
            x.stride(0),
            w.stride(),
            None if residual is None else residual.data_ptr() & 15 == 0,
        )
        found = self.launchers.get(key)
        if found is None:
            found = self.launchers[key] = self._make(x, w, out, residual)
        return found

    def _make(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Callable[..., None]:
        if self.config.kernel == "hopper":
            from tileweave.kernels.reduce_scatter.hopper import launcher as hopper_launcher
            from tileweave.kernels.runtime.descriptors import fits

            whole = fits(out)  # otherwise TMA cannot store it
            added = residual is None or (whole and fits(residual))
            if fits(x, w) and added and (whole or not self.gathered):
                return hopper_launcher(
                    self.endpoint,
                    self.schedule,
                    self.config,
                    x.dtype,
                    x.stride(0),
                    w.stride(),
                    whole,
                    residual is not None,
                    self.scaling,
                    self.gathered,
                )
        from tileweave.kernels.reduce_scatter.triton import launcher

        strides = x.stride(0), w.stride()
        common = self.endpoint, self.schedule, self.config
        return launcher(*common, *strides, self.scaling, self.gathered)


def fused_call(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    dtype: torch.dtype,
    config: MatmulConfig,
    scaling: Scaling | None,
    all_reduce: Instance | None = None,
) -> FusedCall:
    """``dtype``: of the result, and of partial sums. ``all_reduce``: the instance of an all-reduce
    by tiles, whose slots have room for the mirror, the rows of all ranks, after the partial
    sums."""
    transport = workspace.transport
    instance = all_reduce or workspace.instance(OP, config.transport)
    key = (x.shape, w.shape[0], x.dtype, config, scaling)
    call = instance.cache.get(key)
    if call is None:
        size = transport.world_size
        rows = cdiv(x.shape[0], size)
        problem = Problem(size, rows, w.shape[0], x.shape[1], x.element_size(), "")
        schedule = scatter_schedule_for(problem, config, transport.rank, transport.machine)
        if config.transport == "copy_engine":
            most = MAX_SLICES if all_reduce is None else REDUCED
            require(
                not schedule.spans_shards and schedule.chunks <= most,
                f"copy_engine with {rows} rows per rank, tiles of {config.tile_m}, "
                f"{schedule.chunks} chunks",
                f"rows of a tile or more, at most {most} chunks",
                'transport "sm"',
            )
        mirrored = 0 if all_reduce is None else size * rows * schedule.cols
        instance.reserve(
            (schedule.slot_elements + mirrored) * dtype.itemsize,
            schedule.num_programs + 8 * MAX_SLICES,
        )
        copies, mirrors = (), ((), ())
        if all_reduce is not None:
            own = (schedule.slot_elements + schedule.rank * rows * schedule.cols) * dtype.itemsize
            mirrors = tuple(
                tuple(
                    instance.slot_addresses[peer] + slot * instance.slot_bytes + own
                    for peer in push_order(schedule.rank, size)
                )
                for slot in (0, 1)
            )
        if config.transport == "copy_engine":
            pushed = instance.signal_copy(schedule.rank, instance.layout.pushed)
            copies = tuple(
                Copies([*pushes(instance, schedule, dtype.itemsize, slot), pushed])
                for slot in (0, 1)
            )
        staged = (size - 1) * schedule.place_elements
        call = FusedCall(
            instance,
            endpoint(instance, dtype),
            schedule,
            config,
            copies,
            staged,
            {},
            scaling,
            0 if all_reduce is None else x.shape[0],
            mirrors,
            parts_of_eager_calls(instance, schedule.part_elements, staged * dtype.itemsize),
        )
        instance.keep(key, call)
    return call  # type: ignore[return-value]


def pushes(instance: Instance, s: ScatterSchedule, itemsize: int, slot: int) -> list[Copy]:
    """Each chunk to its owner once all its tiles are counted, followed by a signal, out of memory
    whose address a push gives.

    Copies run one after the other: otherwise a receiver would have two senders at once (decision
    0002).
    """
    row_bytes = s.pitch * itemsize
    place_bytes = s.tile_rows * s.tile_m * row_bytes
    copies = []
    for owner, chunk in product(push_order(s.rank, s.world_size), range(s.chunks)):
        from_place, to_place = owner - (owner > s.rank), s.rank - (s.rank > owner)
        first, end = s.chunk_bounds(chunk)
        begin, stop = (min(tile * s.tile_m, s.rows) * row_bytes for tile in (first, end))
        counter = instance.counters.data_ptr() + 4 * (
            s.num_programs + from_place * MAX_SLICES + chunk
        )
        target = (
            instance.slot_addresses[owner]
            + slot * instance.slot_bytes
            + to_place * place_bytes
            + begin
        )
        count, offset = (end - first) * s.tile_cols, from_place * place_bytes + begin
        copies.append(Copy(target, 0, stop - begin, offset, counter, count))
        copies.append(instance.signal_copy(owner, instance.layout.data(s.rank, chunk), aside=True))
    return copies
