"""The fused call of matmul_all_to_all: instance, slot, launch, pulls.

What calls of one shape need is made once and kept. ``matmul_all_to_all.py`` checks the arguments
and plans; tests and the tuner call :func:`run_fused` themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.registry import (
    await_frozen_slot,
    copy_slot,
    endpoint,
    parts_of_eager_calls,
    push_with_launch,
)
from tileweave.ops.matmul.inputs import ready
from tileweave.planning.matmul import scatter_schedule_for
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.gather import arrival_order, cdiv
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.protocol import MAX_SLICES
from tileweave.transport.workspace import Instance, Workspace

if TYPE_CHECKING:
    from tileweave.ops.matmul.exchange_launch import ExchangeLaunch

OP = "matmul_all_to_all"


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    how: Exchange,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """Make the fused call of plan ``chosen``: x [M, K], w [N, K]; the shape of out depends on
    ``how``."""
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    if config.kernel == "library":
        _, exchange = ready(chosen, "library", group_name, _make_exchange, x, w, how, config)
        exchange.after_multiply(x, w, bias, out, chosen.checksum)
        return
    aligned = (x.data_ptr() | w.data_ptr() | out.data_ptr()) & 15 == 0
    instance, (call, launch) = ready(chosen, aligned, group_name, _make, x, w, out, how, config)
    capturing = instance.begin(chosen.checksum)
    summed_in = None if capturing else call.summed_in
    if config.transport == "sm":
        try:
            launch(x, w, bias, out, 0, summed_in)
        finally:
            instance.launched()
        return
    slot = copy_slot(instance)
    await_frozen_slot(instance, call.endpoint)
    push_with_launch(
        instance,
        partial(launch, x, w, bias, out, slot, summed_in),
        call.copies[slot],
        out.data_ptr(),
        capturing,
    )


def _make_exchange(
    workspace: Workspace, x: torch.Tensor, w: torch.Tensor, how: Exchange, config: MatmulConfig
) -> tuple[Instance, ExchangeLaunch]:
    from tileweave.ops.matmul.exchange_launch import exchange_launch

    shape = x.shape[0], w.shape[0]
    call = exchange_launch(workspace, OP, shape, x.dtype, how, config, False)
    return call.instance, call


def _make(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    how: Exchange,
    config: MatmulConfig,
) -> tuple[Instance, tuple[_FusedCall, Callable[..., None]]]:
    call = _fused_call(workspace, x, w, how, config)
    return call.instance, (call, call.launcher(x, w, out))


@dataclass(slots=True)
class _FusedCall:
    """What calls of one shape share; made once, to save host time.

    ``rows``: of a part, without padding.
    """

    instance: Instance
    endpoint: Peers
    schedule: ScatterSchedule
    config: MatmulConfig
    how: Exchange
    rows: int
    copies: tuple[Copies, ...]  # of a call with copy engines, per slot
    launchers: dict[tuple[object, ...], Callable[..., None]]
    summed_in: torch.Tensor | None  # parts of tiles in eager calls

    def launcher(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
        """The kernel of this rank. Ranks may choose differently, by alignment: both kernels have
        the same protocol."""
        key = ((x.data_ptr() | w.data_ptr() | out.data_ptr()) & 15 == 0, x.stride(0), w.stride())
        found = self.launchers.get(key)
        if found is None:
            found = self.launchers[key] = self._make(x, w, out)
        return found

    def _make(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
        common = (self.endpoint, self.schedule, self.config, self.how, self.rows)
        if self.config.kernel == "hopper":
            from tileweave.kernels.all_to_all.scatter_hopper import launcher as hopper_launcher
            from tileweave.kernels.runtime.descriptors import fits

            if fits(x, w, out) and self.schedule.cols * x.element_size() % 16 == 0:
                return hopper_launcher(*common, x.dtype, x.stride(0), w.stride())
        from tileweave.kernels.all_to_all.scatter_triton import launcher

        return launcher(*common, x.stride(0), w.stride())


def _fused_call(
    workspace: Workspace, x: torch.Tensor, w: torch.Tensor, how: Exchange, config: MatmulConfig
) -> _FusedCall:
    transport = workspace.transport
    instance = workspace.instance(OP, config.transport)
    key = (x.shape, w.shape[0], x.dtype, how, config)
    call = instance.cache.get(key)
    if call is None:
        size, itemsize = transport.world_size, x.element_size()
        rows, cols = how.part(x.shape[0], w.shape[0], size)
        padded = cdiv(rows, config.tile_m) * config.tile_m
        problem = Problem(size, padded, cols, x.shape[1], itemsize, "")
        schedule = scatter_schedule_for(problem, config, transport.rank, transport.machine)
        instance.reserve(schedule.slot_elements * itemsize, schedule.num_programs + 8 * MAX_SLICES)
        copies = ()
        if config.transport == "copy_engine":
            copies = tuple(_pulls(instance, schedule, how, rows, itemsize, slot) for slot in (0, 1))
        call = _FusedCall(
            instance,
            endpoint(instance, x.dtype),
            schedule,
            config,
            how,
            rows,
            copies,
            {},
            parts_of_eager_calls(instance, schedule.part_elements),
        )
        instance.keep(key, call)
    return call  # type: ignore[return-value]


def _pulls(
    instance: Instance, s: ScatterSchedule, how: Exchange, rows: int, itemsize: int, slot: int
) -> Copies:
    """Each chunk of each peer once it is ready, followed by a signal to this rank itself.

    Peers by order of arrival, one copy lane per peer.
    """
    width = s.cols * itemsize
    pitch = width if how.gather_dim == 0 else width * s.world_size
    copies = []
    for lane, source in enumerate(arrival_order(s.rank, s.world_size)[1:]):
        place = s.rank - (s.rank > source)
        base = (
            instance.slot_addresses[source]
            + slot * instance.slot_bytes
            + place * s.tile_rows * s.tile_m * width
        )
        target = source * (rows * width if how.gather_dim == 0 else width)
        for chunk in range(s.chunks):
            begin, end = (min(tile * s.tile_m, rows) for tile in s.chunk_bounds(chunk))
            flag = instance.signals.data_ptr() + 4 * instance.layout.flag(slot, source, chunk)
            at, offset = base + begin * width, target + begin * pitch
            if how.gather_dim == 0:
                copies.append(Copy(0, at, (end - begin) * width, offset, flag, 1, lane))
            else:
                copies.append(Copy(0, at, width, offset, flag, 1, lane, end - begin, pitch, width))
    copies.append(instance.signal_copy(s.rank, instance.layout.pushed))
    return Copies(copies)
