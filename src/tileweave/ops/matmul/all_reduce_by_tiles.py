"""matmul_all_reduce of many rows in one launch: a matmul_reduce_scatter whose kernel announces own
rows that are done, chunk after chunk, and copy engines that pull those of peers meanwhile.

``kernels/reduce_scatter/triton.py`` has the protocol (``GATHER``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product as pairs
from typing import TYPE_CHECKING

import torch

from tileweave.kernels.all_reduce.norm import norm_launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import copy_slot, push_with_launch
from tileweave.ops.matmul.inputs import ready
from tileweave.ops.matmul.matmul_reduce_scatter_fused import FusedCall, fused_call, pushes
from tileweave.ops.matmul.reduce_by_cublas import Added
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.gather import arrival_order
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.protocol import REDUCED
from tileweave.transport.workspace import GATHER, Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.reduce_scatter.triton import Scaling

OP = "matmul_all_reduce"


@dataclass(frozen=True, slots=True)
class Operands:
    """x [M, k] and w [N, k]; of FP8 with how they are scaled, and their scales."""

    x: torch.Tensor
    w: torch.Tensor
    scaling: Scaling | None = None
    scales: tuple[torch.Tensor, ...] = ()


@dataclass(slots=True)
class _Call:
    """Calls of one shape.

    mirrors : where the own rows are a second time, by slot.
    copies : of eager calls, by slot and address of the staging memory.
    """

    scatter: FusedCall
    begin: int
    rows: int
    mirrors: tuple[torch.Tensor, ...]
    norm: Launcher
    copies: dict[tuple[int, int], Copies] = field(default_factory=dict)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ``tensor`` [M, N] that this rank reduces."""
        return tensor.narrow(0, self.begin, self.rows)

    def copies_of(self, slot: int, staging: int) -> Copies:
        """Pushes of partial sums from ``staging``, then pulls of the peers' rows, by chunk, into
        the result, whose address a push gives. The last is a signal to this rank itself."""
        instance, s = self.scatter.instance, self.scatter.schedule
        itemsize = self.mirrors[0].element_size()
        row_bytes, rows, height = s.cols * itemsize, s.rows, self.scatter.gathered
        mirror = slot * instance.slot_bytes + s.slot_elements * itemsize
        copies = pushes(instance, s, itemsize, slot, staging)
        sources = arrival_order(s.rank, s.world_size)[1:]
        for chunk, source in pairs(range(s.chunks), sources):
            own = min(rows, height - source * rows)  # the last rank may have fewer
            begin, end = (min(tile * s.tile_m, own) for tile in s.chunk_bounds(chunk))
            if begin < end:
                at = instance.slot_addresses[source] + mirror + begin * row_bytes
                offset = (source * rows + begin) * row_bytes
                flag = instance.layout.flag(slot, source, REDUCED + chunk)
                flag = instance.signals.data_ptr() + 4 * flag
                copies.append(Copy(0, at, (end - begin) * row_bytes, offset, flag, 1))
        return Copies([*copies, instance.signal_copy(s.rank, instance.layout.pushed)])


def reduce_by_tiles(
    operands: Operands,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """The sum over ranks of x @ w.T, plus bias, plus residual.

    out : [M, N]. With ``added.norm_weight`` it gets the norm of the sum, and ``residual_out`` the
        sum.
    """
    x, w, bias, residual = operands.x, operands.w, added.bias, added.residual
    sums = out if residual_out is None else residual_out
    aligned = (x.data_ptr() | w.data_ptr()) & 15 == 0, sums.data_ptr() & 15 == 0
    of_residual = None if residual is None else residual.data_ptr() & 15 == 0
    key = (*aligned, of_residual, operands.scaling)
    instance, (call, launch) = ready(
        chosen, key, group_name, _make, x, operands, sums, residual, chosen.config
    )
    capturing = instance.begin(chosen.checksum)
    slot, scatter = copy_slot(instance), call.scatter
    if capturing:
        staging = sums.new_empty(scatter.staging_elements)
        copies = call.copies_of(slot, staging.data_ptr())
    else:
        staging = scatter.staging(sums.dtype)
        place = slot, staging.data_ptr()
        copies = call.copies.get(place)
        if copies is None:
            copies = call.copies[place] = call.copies_of(*place)
    residual = None if residual is None else call.own(residual)
    more = staging, slot, call.mirrors[slot], residual, operands.scales
    kernel = partial(launch, x, w, bias, call.own(sums), *more)
    push_with_launch(instance, kernel, copies, sums.data_ptr(), capturing)
    if added.norm_weight is not None:
        call.norm(sums, added.norm_weight, added.norm_eps, out)


def _make(
    workspace: Workspace,
    x: torch.Tensor,
    operands: Operands,
    sums: torch.Tensor,
    residual: torch.Tensor | None,
    config: MatmulConfig,
) -> tuple[Instance, tuple[_Call, Callable[..., None]]]:
    w, dtype = operands.w, sums.dtype
    instance = workspace.instance(OP, GATHER)
    scatter = fused_call(workspace, x, w, dtype, config, operands.scaling, instance)
    s = scatter.schedule
    key = ("by tiles", x.shape, w.shape[0], dtype, config, operands.scaling)
    call = instance.cache.get(key)
    if call is None:
        begin = s.rank * s.rows
        rows, first = min(s.rows, scatter.gathered - begin), s.slot_elements * dtype.itemsize
        nbytes, firsts = rows * s.cols * dtype.itemsize, (first, first + instance.slot_bytes)
        mirrors = tuple(
            instance.slots[at : at + nbytes].view(dtype).view(rows, s.cols) for at in firsts
        )
        norm = norm_launcher(x.shape[0], s.cols)
        call = _Call(scatter, begin, rows, mirrors, norm)
        instance.keep(key, call)
    assert isinstance(call, _Call), "other keys of this instance have no name in front"
    residual = None if residual is None else call.own(residual)
    return instance, (call, scatter.launcher(x, w, call.own(sums), residual))
