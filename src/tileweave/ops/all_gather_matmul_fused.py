"""The fused call of all_gather_matmul: instance, slot, pushes, launch. What a shape needs is made once and kept.

``all_gather_matmul.py`` checks the arguments and plans; tests, the tuner and the tracer call :func:`run_fused` themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tileweave.config import MatmulConfig, Plan, Problem, schedule_for
from tileweave.errors import require
from tileweave.kernels.endpoint import Endpoint
from tileweave.ops.registry import endpoint, workspace_of
from tileweave.schedule import TileSchedule, push_order, slot_place
from tileweave.transport.base import EPOCH, Copy
from tileweave.transport.workspace import MAX_SLICES, REGISTRY, Instance, Workspace

OP = "all_gather_matmul"


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
    chosen: Plan,
    trace: torch.Tensor | None = None,
) -> None:
    """The fused call itself; tests, the tuner and the tracer come in here with a plan of their own."""
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    workspace = REGISTRY.find(group_name, x.device) or workspace_of(group_name, x.device)
    if config.kernel == "library":
        from tileweave.ops.library_matmul import gather_then_multiply

        gather_then_multiply(workspace, OP, x, w, bias, out, gathered, config)
        return
    transport = workspace.transport
    call = _fused_call(workspace, x, w, config)
    instance = call.instance
    capturing = instance.begin(chosen.mark)
    slot = 0
    pushed = config.transport == "copy_engine"
    if pushed:
        slot = instance.calls & 1
        if instance.captured:
            from tileweave.kernels.barrier import barrier

            slot = 0
            barrier(call.endpoint, transport.world_size, transport.rank)
        transport.push(call.copies[slot], x.data_ptr())
    launched = False
    try:
        call.launcher(x, w)(x, w, bias, out, gathered, slot, trace)
        launched = x.is_cuda
    finally:
        # A kernel on a device ends behind our pushes anyway, it waits for the signal behind the last of them; to wait for
        # an event as well would cost the host 5 us. A capture wants every stream joined that it forked.
        if pushed and (capturing or not launched):
            transport.join()
        if not x.is_cuda:  # a wait that ran out of time has ended the kernel with an error of the interpreter's
            instance.check()


@dataclass(slots=True)
class _FusedCall:
    """What calls of one shape share: made once, since host time counts."""

    instance: Instance
    endpoint: Endpoint
    schedule: TileSchedule
    config: MatmulConfig
    copies: tuple[tuple[Copy, ...], ...]  # of a copy-engine call, by slot
    launchers: dict[tuple[bool, int], Callable[..., None]]

    def launcher(self, x: torch.Tensor, w: torch.Tensor) -> Callable[..., None]:
        """The kernel of this rank. Ranks may differ here (alignment): both kernels speak the same protocol."""
        address = (x.data_ptr() | w.data_ptr()) & 15
        key = (address == 0, w.stride(0))
        found = self.launchers.get(key)
        if found is None:
            found = self.launchers[key] = self._make(x, w)
        return found

    def _make(self, x: torch.Tensor, w: torch.Tensor) -> Callable[..., None]:
        if self.config.kernel == "hopper":
            from tileweave.kernels.all_gather_matmul_hopper import Launcher as HopperLauncher
            from tileweave.kernels.descriptors import fits

            if fits(x, w):
                return HopperLauncher(self.endpoint, self.schedule, self.config, x.dtype, w.stride(0))
        from tileweave.kernels.all_gather_matmul import Launcher

        return Launcher(self.endpoint, self.schedule, self.config)


def _fused_call(workspace: Workspace, x: torch.Tensor, w: torch.Tensor, config: MatmulConfig) -> _FusedCall:
    transport = workspace.transport
    instance = workspace.instance(OP, config.transport)
    key = (x.shape, w.shape[0], x.dtype, id(config))  # the call keeps the config, so the id stays its own
    call = instance.cache.get(key)
    if call is None:
        problem = Problem(transport.world_size, x.shape[0], w.shape[0], x.shape[1], x.element_size(), "")
        schedule = schedule_for(problem, config, transport.rank, transport.machine)
        require(
            config.transport == "sm" or not schedule.spans_shards,
            f"copy_engine with {x.shape[0]} rows a shard and tiles of {config.tile_m}",
            "shards at least as tall as a tile",
            'transport "sm"',
        )
        instance.reserve(schedule.slot_rows * x.shape[1] * x.element_size(), schedule.num_segments * schedule.num_programs)
        copies = ()
        if config.transport == "copy_engine":
            copies = tuple(_copies(instance, schedule, x.numel() * x.element_size(), slot) for slot in (0, 1))
        call = _FusedCall(instance, endpoint(instance, x.dtype), schedule, config, copies, {})
        instance.cache[key] = call
    return call  # type: ignore[return-value]


def _copies(instance: Instance, schedule: TileSchedule, nbytes: int, slot: int) -> tuple[Copy, ...]:
    """The own shard to each peer, a signal behind each, and one to ourselves behind the last."""
    rank, size = schedule.rank, schedule.world_size
    epoch = instance.control.data_ptr() + 4 * EPOCH
    copies = []
    for peer in push_order(rank, size):
        place = slot_place(peer, rank, size, spans_shards=False)
        copies.append(Copy(instance.slot_addresses[peer] + slot * instance.slot_bytes + place * nbytes, 0, nbytes))
        copies.append(Copy(instance.signal_addresses[peer] + 4 * rank * MAX_SLICES, epoch, 4))
    copies.append(Copy(instance.signal_addresses[rank] + 4 * (size * MAX_SLICES + size), epoch, 4))
    return tuple(copies)
