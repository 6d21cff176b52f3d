"""The fused call of all_gather_matmul: instance, slot, pushes, launch.

What calls of one shape need is made once and kept. ``all_gather_matmul.py`` checks the arguments
and plans; tests, the tuner and the tracer call :func:`run_fused` themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from tileweave.errors import require
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import copy_slot, endpoint, push_with_launch
from tileweave.ops.matmul.inputs import ready
from tileweave.planning.matmul import exchange_schedule_for, schedule_for
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.gather import Parts, TileSchedule, push_order, slot_place
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.interface import Copies, Copy, Transport
from tileweave.transport.workspace import Instance, Workspace

if TYPE_CHECKING:
    from tileweave.ops.matmul.concurrent_gather import GatherCall
    from tileweave.ops.matmul.cublas import GatherThenMultiply, Product
    from tileweave.ops.matmul.exchange_launch import ExchangeLaunch

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
    library = config.kernel == "library"
    if library and how is not None:
        _, launch = ready(chosen, "library", group_name, _make_exchange, x, how, config)
        return launch.then_multiply(x, w, bias, out, gathered, chosen.checksum)
    if library:
        from tileweave.ops.matmul.cublas import Plain

        return run_library((x,), Plain(w, bias), out, gathered, group_name, chosen)
    if out is None:
        rows = chosen.world_size * x.shape[0]
        if how is not None:
            rows, _ = how.result(x.shape[0], x.shape[1], chosen.world_size)
        out = x.new_empty(rows, w.shape[0])
    source = x.data_ptr()
    aligned = (source | w.data_ptr()) & 15 == 0
    instance, (call, launch) = ready(chosen, aligned, group_name, _make, x, w, config, how)
    capturing = instance.begin(chosen.checksum)
    if config.transport == "copy_engine":
        slot = copy_slot(instance)
        kernel = partial(launch, x, w, bias, out, gathered, slot, trace)
        push_with_launch(instance, kernel, call.copies[slot], source, capturing)
        return out
    try:
        launch(x, w, bias, out, gathered, 0, trace)
    finally:
        instance.launched()
    return out


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
) -> tuple[Instance, tuple[_FusedCall, Callable[..., None]]]:
    call = _fused_call(workspace, x, w, config, how)
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
    launchers: dict[tuple[object, ...], Callable[..., None]]

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
        if self.config.kernel == "hopper":
            from tileweave.kernels.all_gather.hopper import launcher as hopper_launcher
            from tileweave.kernels.runtime.descriptors import fits

            if fits(x, w) and self.parts.depth * x.element_size() % 16 == 0:
                return hopper_launcher(
                    self.endpoint, self.schedule, self.config, x.dtype, w.stride(), self.parts
                )
        from tileweave.kernels.all_gather.triton import launcher

        return launcher(self.endpoint, self.schedule, self.config, self.parts)


def _fused_call(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    config: MatmulConfig,
    how: Exchange | None,
) -> _FusedCall:
    transport = workspace.transport
    instance = workspace.instance(OP if how is None else EXCHANGED, config.transport)
    key = (x.shape, w.shape[0], x.dtype, how, config)
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
        instance.reserve(
            slot_rows * parts.depth * x.element_size(),
            schedule.num_segments * schedule.num_programs + 1,
        )
        copies = ()
        if config.transport == "copy_engine":
            gate = instance.counters.data_ptr() + 4 * schedule.num_segments * schedule.num_programs
            copies = tuple(
                _copies(instance, gate, schedule.rows, parts, x.element_size(), slot)
                for slot in (0, 1)
            )
        call = _FusedCall(
            instance, endpoint(instance, x.dtype), schedule, parts, config, copies, {}
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
    problem = Problem(size, x.shape[0], w.shape[0], x.shape[1], itemsize, "")
    if how is None:
        return schedule_for(problem, config, rank, transport.machine), Parts(
            rank, size, x.shape[1], x.shape[1]
        )
    return exchange_schedule_for(problem, config, how, rank, transport.machine)


def _copies(
    instance: Instance, gate: int, rows: int, parts: Parts, itemsize: int, slot: int
) -> Copies:
    """Chunks of this rank's shard, or of its parts, to all peers in turn, each followed by a
    signal.

    The last is a signal to this rank itself. ``gate``: the counter that holds copies back until all
    ranks are in this call.
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
