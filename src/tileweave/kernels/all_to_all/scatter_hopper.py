"""The Hopper twin of ``matmul_all_to_all``: launches of ``matmul_reduce_scatter_hopper``, as an exchange.

Read ``kernels/all_to_all/scatter_triton.py`` for the protocol, and ``kernels/reduce_scatter/hopper.py`` for the partitions.
A part is its own descriptor of the result: TMA clips its ragged rows and columns, also where parts stand side by side.

Limits: rows of x, rows (or columns) of w and of a part at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tileweave.kernels.all_to_all.scatter_triton import steps
from tileweave.kernels.reduce_scatter.hopper import MAPS, WORDS, matmul_reduce_scatter_hopper_kernel
from tileweave.kernels.reduce_scatter.hopper_epilogue import PIECE
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Launches
from tileweave.kernels.runtime.peers import Peers, lines
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange, ScatterSchedule


class Launcher:
    """One shape's launches: descriptors, integers and prepared kernels, kept between calls (``kernels/runtime/launch.py``)."""

    def __init__(
        self, peers: Peers, schedule: ScatterSchedule, config: MatmulConfig, how: Exchange, rows: int, dtype: torch.dtype,
        stride_x: int, strides_w: Sequence[int],
    ) -> None:  # fmt: skip
        self.peers, self.schedule, self.config = peers, schedule, config
        s, c = schedule, config
        self.push = c.transport == "sm"
        self.base = base = peers.slots.data_ptr()
        self.slot_bytes, place_rows = peers.slot_size * dtype.itemsize, s.tile_rows * c.tile_m
        box = [c.tile_m, PIECE.value]
        x_step, w_step, out_pitch, out_step = steps(how, rows, s.cols, s.world_size)
        self.shift = s.rank * out_step * dtype.itemsize  # of the own part in the result
        x_rows, w_rows = (
            s.world_size * n if step else n for n, step in ((rows, x_step), (s.cols, w_step))
        )
        unused = descriptor(base, dtype, [64, 64], 64, box)
        self.slots = (unused, unused)  # nothing comes back through the ring
        self.descriptors = (
            descriptor(base, dtype, [x_rows, s.depth], stride_x, [c.tile_m, c.tile_k]),
            weight(base, dtype, w_rows, s.depth, strides_w, [c.tile_n, c.tile_k]),
            unused if self.push else descriptor(base, dtype, [rows, s.cols], out_pitch, box),
            unused
            if self.push
            else descriptor(base, dtype, [(s.world_size - 1) * place_rows, s.cols], s.cols, box),
        )
        self.part_words = s.num_programs * c.tile_m * c.tile_n if s.has_cut_tiles else 0
        self.integers = (
            peers.slot_size, s.place_elements, s.rows, s.cols,
            rows, x_step, w_step, out_pitch, out_step, s.world_size * rows * s.cols, s.chunks,
            s.num_tiles, min(s.chunk_rows, s.tile_rows), s.team, s.tile_rows, s.tile_cols, s.k_blocks,
            s.world_size, self.push, False, c.tile_m, c.tile_n, c.tile_k, c.group_m, c.num_stages, c.num_warps,
        )  # fmt: skip
        self.depth_first = lines(strides_w)[1]
        # registers as in matmul_reduce_scatter_hopper.py
        self.launches = Launches(
            matmul_reduce_scatter_hopper_kernel, WORDS, MAPS, num_warps=c.num_warps, maxnreg=168
        )

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        slot: int,
    ) -> None:
        """Launch on the current stream; as ``matmul_all_to_all.Launcher``, for what ``descriptors.fits``."""
        peers, s = self.peers, self.schedule
        partials = out
        if self.part_words:
            partials = torch.empty(self.part_words, dtype=torch.float32, device=x.device)
        added, to = out if bias is None else bias, out.data_ptr()
        bias_at = added.data_ptr()
        variant = (to % 16 == 0, bias_at % 16 == 0, bias is None)
        bases = (x.data_ptr(), w.data_ptr(), to + self.shift, self.base + slot * self.slot_bytes)
        if self.push:
            bases = (*bases[:2], self.base, self.base)
        words = (bias_at, to, partials.data_ptr(), slot)

        def arguments() -> tuple[object, ...]:
            x_desc, w_desc, out_desc, staging_desc = based(self.descriptors, bases, x.dtype)
            return (
                x_desc, w_desc, *self.slots, out_desc, staging_desc, added, out, peers.slots, partials, peers.counters,
                peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
                s.rank, slot, *self.integers, bias is not None, s.split_tail, True, self.depth_first, True,
            )  # fmt: skip

        self.launches(s.num_programs, variant, arguments, words, bases)
