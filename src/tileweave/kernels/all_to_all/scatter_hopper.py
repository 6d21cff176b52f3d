"""The Hopper launches of ``matmul_all_to_all``: the kernel of ``matmul_reduce_scatter``, as an
exchange.

Read ``kernels/all_to_all/scatter_triton.py`` for the protocol, and
``kernels/reduce_scatter/hopper.py`` for the partitions. A part has its own descriptor of the
result: TMA clips its ragged rows and columns, also where parts are next to each other.

Limits: rows of x, rows (or columns) of w and of a part at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tileweave.kernels.all_to_all.scatter_triton import steps
from tileweave.kernels.reduce_scatter.hopper import (
    MAPS,
    MIRRORS,
    WORDS,
    Sizes,
    Tensors,
    choices_of,
    matmul_reduce_scatter_hopper_kernel,
)
from tileweave.kernels.reduce_scatter.hopper_epilogue import PIECE
from tileweave.kernels.reduce_scatter.triton import scheduled
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Call, Launcher
from tileweave.kernels.runtime.peers import Peers, memory_of_parts
from tileweave.kernels.scaling import Scales
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule


def launcher(
    peers: Peers,
    schedule: ScatterSchedule,
    config: MatmulConfig,
    how: Exchange,
    rows: int,
    dtype: torch.dtype,
    stride_x: int,
    strides_w: Sequence[int],
) -> Launcher:
    """Launches for one shape, called as those of ``scatter_triton.launcher``, for what
    ``descriptors.fits``."""
    s, c = schedule, config
    push = c.transport == "sm"
    choices = choices_of(s, c, strides_w)._replace(EXCHANGE=True, SPANS=False)
    base, slot_bytes = peers.slots.data_ptr(), peers.slot_size * dtype.itemsize
    box = [c.tile_m, PIECE.value]
    x_step, w_step, out_pitch, out_step = steps(how, rows, s.cols, s.world_size)
    shift = s.rank * out_step * dtype.itemsize  # of the own part in the result
    x_rows = s.world_size * rows if x_step else rows
    w_rows = s.world_size * s.cols if w_step else s.cols
    unused = descriptor(base, dtype, [64, 64], 64, box)
    x_desc = descriptor(base, dtype, [x_rows, s.depth], stride_x, [c.tile_m, c.tile_k])
    w_desc = weight(base, dtype, w_rows, s.depth, strides_w, [c.tile_n, c.tile_k])
    out_desc = staging_desc = unused
    if not push:
        slot_rows = (s.world_size - 1) * s.tile_rows * c.tile_m
        out_desc = descriptor(base, dtype, [rows, s.cols], out_pitch, box)
        staging_desc = descriptor(base, dtype, [slot_rows, s.cols], s.cols, box)
    descriptors = (x_desc, w_desc, out_desc, staging_desc)
    part_elements = s.part_elements

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        slot: int,
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        added, to = out if bias is None else bias, out.data_ptr()
        bias_at = added.data_ptr()
        bases = (x.data_ptr(), w.data_ptr(), to + shift, base + slot * slot_bytes)
        if push:
            bases = (*bases[:2], base, base)

        def changing() -> dict[str, Any]:
            return {
                **dict(zip(MAPS, based(descriptors, bases), strict=True)),
                "tensors": Tensors(added, out, partials, Scales(out, out)),
                "slot": slot,
                "C": choices._replace(HAS_BIAS=bias is not None),
            }

        variant = (to % 16 == 0, bias_at % 16 == 0, bias is None)
        return variant, (bias_at, to, partials.data_ptr(), slot), changing, bases

    out_size = s.world_size * rows * s.cols
    fixed = {
        "slot0_desc": unused,  # nothing comes back through the ring
        "slot1_desc": unused,
        **dict.fromkeys(MIRRORS, unused),
        "residual_desc": unused,
        "peers": peers,
        "sizes": Sizes(s.place_elements, s.cols, 0, out_size, x_step, w_step, out_pitch, out_step),
        "rows": rows,
        **scheduled(s),
    }
    # registers as for matmul_reduce_scatter
    return Launcher(
        matmul_reduce_scatter_hopper_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS,
        MAPS,
        num_warps=c.num_warps,
        maxnreg=168,
    )
