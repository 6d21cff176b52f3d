"""matmul_all_reduce of many rows: chunk after chunk a matmul_reduce_scatter, whose rows copy
engines gather while the next chunk is multiplied.

``kernels/all_reduce/gather_rows.py`` has the protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from tileweave.errors import require
from tileweave.kernels.all_reduce.gather_rows import RowLaunches, row_launches
from tileweave.kernels.all_reduce.norm import norm_launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import copy_slot, endpoint
from tileweave.ops.matmul.inputs import Accepted
from tileweave.ops.matmul.matmul_reduce_scatter_fused import run_fused, run_scaled
from tileweave.ops.matmul.reduce_by_cublas import Added
from tileweave.ops.matmul.scaled import ScaledProduct
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.chunks import chunks_of, fits_chunks
from tileweave.planning.schedules.gather import push_order
from tileweave.transport.interface import Copy
from tileweave.transport.workspace import CALL, Instance, Workspace

if TYPE_CHECKING:
    from tileweave.ops.matmul.cublas import Plain

OP = "matmul_all_reduce"
KIND = "copy_engine"
QUEUE = 1  # copies that wait for tiles of a reduce-scatter do not wait for pulls


class _Chunk(NamedTuple):
    """A chunk of rows.

    begin, end : rows of x and of the result.
    own, rows : this rank's rows of the result.
    mirrors : where the own rows are a second time, by slot.
    pulls : the rows of the peers, by slot. No ``Copies``: a graph would keep the address of the
        caller's memory, which may be freed and mapped again.
    chosen : the plan of its reduce-scatter.
    """

    begin: int
    end: int
    own: int
    rows: int
    mirrors: tuple[torch.Tensor, ...]
    pulls: tuple[tuple[Copy, ...], ...]
    chosen: Accepted


class _Call(NamedTuple):
    """What calls of one shape share."""

    chunks: tuple[_Chunk, ...]
    launches: RowLaunches
    norm: Launcher


def reduce_in_chunks(
    workspace: Workspace,
    x: tuple[torch.Tensor, ...],
    product: Plain | ScaledProduct,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """The sum over ranks of ``product(x)``, plus bias, plus residual.

    x : its parts, the first [M, k], such that ``planning.schedules.chunks.fits_chunks``.

    out : [M, N]. With ``added.norm_weight`` it gets the norm of the sum, and ``residual_out`` the
        sum.
    """
    transport, instance = workspace.transport, workspace.instance(OP, KIND)
    sums = out if residual_out is None else residual_out
    w = product.w.data if isinstance(product, ScaledProduct) else product.w
    # with strides, since plans of chunks keep the launchers of one signature
    key = (x[0].shape, x[0].stride(), w.shape, w.stride(), out.dtype, config)
    call = instance.cache.get(key)
    if call is None:
        call = _make(workspace, instance, x[0].shape[0], product.cols, out.dtype, config)
        instance.keep(key, call)
    assert isinstance(call, _Call), "keys of calls have a shape, keys of endpoints only a dtype"
    capturing, joined = instance.begin(checksum), False
    slot = copy_slot(instance)
    try:
        if instance.captured:
            call.launches.all_reduced()
        for chunk in call.chunks:
            residual, own = added.residual, sums.narrow(0, chunk.own, chunk.rows)
            if residual is not None:
                residual = residual.narrow(0, chunk.own, chunk.rows)
            rows = product.rows_of(x, chunk.begin, chunk.end - chunk.begin)
            more = own, group_name, chunk.chosen, chunk.mirrors[slot], residual
            if isinstance(product, ScaledProduct):
                run_scaled(rows, product, added.bias, *more)
            else:
                run_fused(rows[0], product.w, added.bias, *more)
            call.launches.all_reduced()
            transport.push(chunk.pulls[slot], sums.data_ptr(), QUEUE)
        transport.join(QUEUE)
        joined = True
        call.launches.end(sums)
        instance.calls += 1
        CALL.posted = False  # the call has been made
    finally:
        if capturing and not joined:
            transport.join(QUEUE)  # a capture must join every stream that it forked
        instance.launched()
    if added.norm_weight is not None:
        call.norm(sums, added.norm_weight, added.norm_eps, out)


def _make(
    workspace: Workspace,
    instance: Instance,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    config: MatmulConfig,
) -> _Call:
    transport, itemsize = workspace.transport, dtype.itemsize
    size, rank = transport.world_size, transport.rank
    require(
        fits_chunks(rows, size, config.tile_m),
        f"an all-reduce of {rows} rows on {size} ranks in chunks, tiles of {config.tile_m}",
        f"{size * config.tile_m} rows, {2 * size * config.tile_m} if no multiple of {size}",
        "plan cuBLAS and one launch",
    )
    bounds = chunks_of(rows, config.row_chunks, size, config.tile_m)
    row_bytes = cols * itemsize
    instance.reserve(sum(end - begin for begin, end in bounds) // size * row_bytes)
    slots = [slot * instance.slot_bytes for slot in (0, 1)]
    launches = row_launches(
        endpoint(instance, dtype), size, rank, rows * cols, transport.machine.num_sms
    )
    of_chunk = replace(config, row_chunks=1)
    chunks, at = [], 0  # where the own rows of a chunk are in a slot, which has those of all
    for (begin, end), (limit, _) in zip(bounds, [*bounds[1:], (rows, rows)], strict=True):
        mine = (end - begin) // size
        nbytes = mine * row_bytes
        mirrors = tuple(
            instance.slots[slot + at : slot + at + nbytes].view(dtype).view(mine, cols)
            for slot in slots
        )

        def pull(peer: int, slot: int, first: int, most: int, at: int = at) -> Copy:
            """Of the rows of ``peer``, which begin at ``first``, those that no later chunk has."""
            source = instance.slot_addresses[peer] + slot + at
            return Copy(0, source, most * row_bytes, first * row_bytes)

        firsts = [(peer, begin + peer * mine) for peer in push_order(rank, size)]
        pulls = tuple(
            tuple(pull(peer, slot, first, min(mine, limit - first)) for peer, first in firsts)
            for slot in slots
        )
        chosen = Accepted("fused", "a chunk of an all-reduce", of_chunk, workspace=workspace)
        chunks.append(_Chunk(begin, end, begin + rank * mine, mine, mirrors, pulls, chosen))
        at += nbytes
    return _Call(tuple(chunks), launches, norm_launcher(rows, cols))
