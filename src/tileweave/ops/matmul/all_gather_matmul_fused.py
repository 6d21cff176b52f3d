"""The fused call of all_gather_matmul: instance, slot, pushes, launch.

What calls of one shape need is made once and kept. ``all_gather_matmul.py`` checks the arguments
and plans; tests, the tuner and the tracer call :func:`run_fused` themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from tileweave.errors import require
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import (
    copy_slot,
    endpoint,
    parts_of_eager_calls,
    push_with_launch,
)
from tileweave.ops.matmul.gather_over_nodes import (
    counters_over_nodes,
    parts_over_nodes,
    push_over_nodes,
)
from tileweave.ops.matmul.inputs import ready
from tileweave.ops.matmul.products import Plain, Product
from tileweave.planning.matmul import exchange_schedule_for, schedule_for
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.gather import Parts, TileSchedule, push_order, slot_place
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.interface import Copies, Copy, Crossing, Sending, Transport
from tileweave.transport.workspace import Instance, Workspace

if TYPE_CHECKING:
    from tileweave.ops.matmul.concurrent_gather import GatherCall
    from tileweave.ops.matmul.cublas import GatherThenMultiply
    from tileweave.ops.matmul.exchange_launch import ExchangeLaunch
    from tileweave.ops.matmul.scaled import ScaledProduct

OP = "all_gather_matmul"
EXCHANGED = "all_to_all_matmul"


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    gathered: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
    trace: torch.Tensor | None = None,
    how: Exchange | None = None,
) -> torch.Tensor:
    """Make the fused call of plan ``chosen``, and return its result, in ``out`` if given. Tests,
    the tuner and the tracer pass plans of their own, with ``out``.

    ``how``: an all-to-all in place of the all-gather; ``gathered`` is then the exchanged x.
    """
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    if config.multiplies_chunks:
        from tileweave.ops.matmul import over_nodes

        if out is None:
            out = x.new_empty(chosen.world_size * x.shape[0], w.shape[0])
        over_nodes.gather(x, w, bias, out, gathered, group_name, chosen)
        return out
    if config.kernel == "library":
        if how is None:
            return run_library((x,), Plain(w, bias), out, gathered, group_name, chosen)
        _, launch = ready(chosen, "library", group_name, _make_exchange, x, how, config)
        return launch.then_multiply(x, w, bias, out, gathered, chosen.checksum)
    if out is None:
        rows = chosen.world_size * x.shape[0]
        if how is not None:
            rows, _ = how.result(x.shape[0], x.shape[1], chosen.world_size)
        out = x.new_empty(rows, w.shape[0])
    source = x.data_ptr()
    aligned = (source | w.data_ptr()) & 15 == 0
    instance, (call, launch) = ready(chosen, aligned, group_name, _make, x, w, config, how, None)
    capturing = instance.begin(chosen.checksum)
    summed_in = None if capturing else call.summed_in
    if config.transport == "copy_engine":
        slot = copy_slot(instance)
        kernel = partial(launch, x, w, bias, out, gathered, slot, trace, None, summed_in)
        push_with_launch(instance, kernel, call.copies[slot], source, capturing)
        return out
    if config.transport == "nodes":
        slot, ledger = copy_slot(instance), instance.ledger
        kernel = partial(launch, x, w, bias, out, gathered, slot, trace)
        data = x.view(-1).view(torch.uint8)
        sending = Sending(call.crossings[slot], data, ledger.entry, ledger.hear)
        push_with_launch(instance, kernel, call.copies[slot], source, capturing, sending)
        return out
    try:
        launch(x, w, bias, out, gathered, 0, trace, None, summed_in)
    finally:
        instance.launched()
    return out


def run_scaled(
    x: tuple[torch.Tensor, torch.Tensor],
    product: ScaledProduct,
    out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> torch.Tensor:
    """Make the call of plan ``chosen`` of FP8 operands: x, its data and scales as they travel, and
    what it is multiplied by. Returns the result, in ``out`` if given."""
    config = chosen.config
    assert config is not None, "the unfused path has no config"
    if config.kernel == "library":
        return run_library(x, product, out, None, group_name, chosen)
    from tileweave.ops.matmul.scaled import check_tile

    check_tile(config, product, False)
    in_blocks = product.kind == "block"
    data, w = x[0], product.w.data
    rows, cols = data.shape[0], w.shape[0]
    if out is None:
        out = data.new_empty(chosen.world_size * rows, cols, dtype=product.dtype)
    scale, of_w = x[1], product.w.scale
    if not in_blocks and scale.numel() != rows:
        scale = scale.expand(rows)
    if not in_blocks and of_w.numel() != cols:
        of_w = of_w.reshape(-1).expand(cols).contiguous()
    source = data.data_ptr()
    aligned = (source | w.data_ptr()) & 15 == 0
    kind = _Scaled(2 if in_blocks else 1, tuple(scale.shape), out.dtype)
    instance, (call, launch) = ready(
        chosen, (aligned, kind), group_name, _make, data, w, config, None, kind
    )
    capturing = instance.begin(chosen.checksum)
    slot = copy_slot(instance)
    own = call.scales[-1]
    own.copy_(scale)
    scales = (call.scales[slot], own, of_w)
    summed_in = None if capturing else call.summed_in
    kernel = partial(launch, data, w, product.bias, out, None, slot, None, scales, summed_in)
    push_with_launch(instance, kernel, call.copies[slot], source, capturing)
    return out


class _Scaled(NamedTuple):
    """What calls with FP8 operands have besides: the kernels' ``SCALED``, the shape of the scales
    of a shard, and the dtype of the result."""

    scaled: int
    shape: tuple[int, ...]
    out_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the scales of a shard."""
        return 4 * math.prod(self.shape)


def run_library(
    x: tuple[torch.Tensor, ...],
    product: Product,
    out: torch.Tensor | None,
    gathered: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> torch.Tensor:
    """A call whose matmul is ``product``, by cuBLAS: of all rows after a gather, or of each shard
    as copy engines bring it. x: the parts of the own shard."""
    config, first = chosen.config, x[0]
    assert config is not None, "the unfused path has no config"
    if config.transport == "sm":
        _, call = ready(chosen, "library", group_name, _make_gather, first, x, config)
        return call(x, product, out, gathered, chosen.checksum)
    if out is None:
        rows = chosen.world_size * first.shape[0]
        out = first.new_empty(rows, product.cols, dtype=product.dtype)
    instance, (multiply, call) = ready(chosen, "library", group_name, _make_shards, first, x)
    multiply(x, product, out, gathered, instance, call, chosen.checksum)
    return out


def _make_gather(
    workspace: Workspace, _: torch.Tensor, x: tuple[torch.Tensor, ...], config: MatmulConfig
) -> tuple[Instance, GatherThenMultiply]:
    from tileweave.ops.matmul.cublas import gather_then_multiply

    call = gather_then_multiply(workspace, OP, x, config)
    return call.instance, call


def _make_exchange(
    workspace: Workspace, x: torch.Tensor, how: Exchange, config: MatmulConfig
) -> tuple[Instance, ExchangeLaunch]:
    from tileweave.ops.matmul.exchange_launch import exchange_launch

    shape = x.shape[0], x.shape[1]
    call = exchange_launch(workspace, EXCHANGED, shape, x.dtype, how, config, True)
    return call.instance, call


def _make_shards(
    workspace: Workspace, _: torch.Tensor, x: tuple[torch.Tensor, ...]
) -> tuple[Instance, tuple[Callable[..., None], GatherCall]]:
    from tileweave.ops.matmul.concurrent_gather import gather_of
    from tileweave.ops.matmul.cublas import multiply_shards

    instance, call = gather_of(workspace, x)
    return instance, (multiply_shards, call)


def _make(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    config: MatmulConfig,
    how: Exchange | None,
    scaled: _Scaled | None,
) -> tuple[Instance, tuple[_FusedCall, Callable[..., None]]]:
    call = _fused_call(workspace, x, w, config, how, scaled)
    return call.instance, (call, call.launcher(x, w))


@dataclass(slots=True)
class _FusedCall:
    """What calls of one shape share; made once, to save host time."""

    instance: Instance
    endpoint: Peers
    schedule: TileSchedule
    parts: Parts
    config: MatmulConfig
    copies: tuple[Copies, ...]  # of a call with copy engines, per slot
    crossings: tuple[Crossing, ...]  # of a call over several nodes, per slot
    launchers: dict[tuple[object, ...], Callable[..., None]]
    scaled: _Scaled | None = None
    # per slot, of all ranks: [R, those of a shard]; then where copy engines read the own ones
    scales: tuple[torch.Tensor, ...] = ()
    summed_in: torch.Tensor | None = None  # parts of tiles in eager calls

    def launcher(self, x: torch.Tensor, w: torch.Tensor) -> Callable[..., None]:
        """The kernel of this rank. Ranks may choose differently, by alignment: both kernels have
        the same protocol."""
        address = (x.data_ptr() | w.data_ptr()) & 15
        key = (address == 0, w.stride())
        found = self.launchers.get(key)
        if found is None:
            found = self.launchers[key] = self._make(x, w)
        return found

    def _make(self, x: torch.Tensor, w: torch.Tensor) -> Callable[..., None]:
        scaled = 0 if self.scaled is None else self.scaled.scaled
        made = None if self.scaled is None else self.scaled.out_dtype
        if self.config.kernel == "hopper":
            from tileweave.kernels.all_gather.hopper import launcher as hopper_launcher
            from tileweave.kernels.runtime.descriptors import fits

            if fits(x, w) and self.parts.depth * x.element_size() % 16 == 0:
                return hopper_launcher(
                    self.endpoint,
                    self.schedule,
                    self.config,
                    x.dtype,
                    w.stride(),
                    self.parts,
                    scaled,
                    made,
                )
        from tileweave.kernels.all_gather.triton import launcher

        return launcher(self.endpoint, self.schedule, self.config, self.parts, scaled)


def _fused_call(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    config: MatmulConfig,
    how: Exchange | None,
    scaled: _Scaled | None,
) -> _FusedCall:
    transport = workspace.transport
    instance = workspace.instance(OP if how is None else EXCHANGED, config.transport)
    key = (x.shape, w.shape[0], x.dtype, how, config, scaled)
    call = instance.cache.get(key)
    if call is None:
        schedule, parts = _cut(x, w, config, how, transport)
        require(
            config.transport == "sm" or parts.side_by_side or not schedule.spans_shards,
            f"copy_engine with {schedule.rows} rows per shard and tiles of {config.tile_m}",
            "shards at least as tall as a tile",
            'transport "sm"',
        )
        slot_rows = (
            schedule.rows * (parts.world_size - 1) if parts.side_by_side else schedule.slot_rows
        )
        require(
            scaled is None or config.transport == "copy_engine",
            f"FP8 operands with transport {config.transport!r}",
            "copy engines",
            "pass such a config, or one of cuBLAS",
        )
        data_bytes = -(-slot_rows * parts.depth * x.element_size() // 16) * 16
        more = 0 if scaled is None else parts.world_size * scaled.nbytes
        gate = schedule.num_segments * schedule.num_programs
        counters, ranks = gate + 1, transport.topology
        if config.transport == "nodes":
            counters += counters_over_nodes(ranks, parts.chunks)
        instance.reserve(data_bytes + more, counters)
        copies, crossings, scales = (), (), ()
        if scaled is not None:
            scales = tuple(
                instance.slots[begin + data_bytes : begin + data_bytes + more]
                .view(torch.float32)
                .view(parts.world_size, *scaled.shape)
                for begin in (0, instance.slot_bytes)
            )
            with torch.inference_mode(False):  # later calls write to it
                scales += (torch.empty(scaled.shape, dtype=torch.float32, device=x.device),)
        if config.transport == "copy_engine":
            nbytes = 0 if scaled is None else scaled.nbytes
            own = scales[-1].data_ptr() if scales else 0
            copies = tuple(
                _copies(
                    instance,
                    instance.counters.data_ptr() + 4 * gate,
                    schedule.rows,
                    parts,
                    x.element_size(),
                    slot,
                    (own, begin + parts.rank * nbytes, nbytes),
                )
                for slot, begin in ((0, data_bytes), (1, instance.slot_bytes + data_bytes))
            )
        if config.transport == "nodes":
            copies, crossings = zip(
                *(
                    push_over_nodes(instance, gate, schedule, parts, x.element_size(), slot)
                    for slot in (0, 1)
                ),
                strict=True,
            )
        peers = endpoint(instance, x.dtype)
        call = _FusedCall(
            instance,
            peers,
            schedule,
            parts,
            config,
            copies,
            crossings,
            {},
            scaled,
            scales,
            parts_of_eager_calls(instance, schedule.part_elements),
        )
        instance.keep(key, call)
    return call  # type: ignore[return-value]


def _cut(
    x: torch.Tensor,
    w: torch.Tensor,
    config: MatmulConfig,
    how: Exchange | None,
    transport: Transport,
) -> tuple[TileSchedule, Parts]:
    """The schedule of tiles, and the layout of the parts of x."""
    rank, size, itemsize = transport.rank, transport.world_size, x.element_size()
    depth = x.shape[1]
    problem = Problem(size, x.shape[0], w.shape[0], depth, itemsize, "")
    if how is None:
        ranks = transport.topology
        problem = replace(problem, nodes=ranks.nodes)
        schedule = schedule_for(problem, config, rank, transport.machine)
        if config.transport == "nodes":
            return schedule, parts_over_nodes(schedule, config, ranks, depth)
        return schedule, Parts(rank, size, depth, depth)
    return exchange_schedule_for(problem, config, how, rank, transport.machine)


def _copies(
    instance: Instance,
    gate: int,
    rows: int,
    parts: Parts,
    itemsize: int,
    slot: int,
    scales: tuple[int, int, int],
) -> Copies:
    """Chunks of this rank's shard, or of its parts, to all peers in turn, each followed by a
    signal.

    The last is a signal to this rank itself. ``gate``: the counter that holds copies back until all
    ranks are in this call. ``scales``: (address, place in the slots of peers, bytes) of this rank's
    scales; no bytes: none. Their place is counted from the first slot.
    """
    rank, size = parts.rank, parts.world_size
    width, pitch = parts.depth * itemsize, parts.pitch * itemsize
    copies = []
    for chunk, peer in product(range(parts.chunks), push_order(rank, size)):
        place = slot_place(peer, rank, size, spans_shards=False)
        begin, end = chunk * parts.chunk_rows, min((chunk + 1) * parts.chunk_rows, rows)
        target = (
            instance.slot_addresses[peer]
            + slot * instance.slot_bytes
            + (place * rows + begin) * width
        )
        start = peer * parts.step * itemsize + begin * pitch
        if scales[2]:
            at = instance.slot_addresses[peer] + scales[1]
            copies.append(Copy(at, scales[0], scales[2]))
        if pitch == width:
            copies.append(Copy(target, 0, (end - begin) * width, start))
        else:
            copies.append(
                Copy(
                    target,
                    0,
                    width,
                    start,
                    rows=end - begin,
                    target_pitch=width,
                    source_pitch=pitch,
                )
            )
        copies.append(instance.signal_copy(peer, instance.layout.data(rank, chunk)))
    copies.append(instance.signal_copy(rank, instance.layout.pushed))
    copies[0] = replace(copies[0], counter=gate, count=1)
    return Copies(copies)
