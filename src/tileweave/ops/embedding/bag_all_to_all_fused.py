"""The fused calls of embedding_bag_all_to_all: lookup with stores to peers, and the push of
gradients.

``bag_all_to_all.py`` checks the arguments and plans; tests and the tuner call these functions
themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from tileweave.errors import CaptureError
from tileweave.ops.core.collectives import leave_launch_order_of
from tileweave.ops.core.registry import (
    endpoint,
    l2_bytes,
    number_of,
    push_with_launch,
    workspace_of,
)
from tileweave.ops.embedding.call import BACKWARD, OP, Call
from tileweave.ops.embedding.table_gradient import copied, keep_for_graphs
from tileweave.planning.schedules.gather import push_order
from tileweave.planning.sharding import (
    EmbeddingConfig,
    EmbeddingLayout,
    gradient_carrier,
    order_tables,
    rows_of,
)
from tileweave.transport.interface import Copies, Copy
from tileweave.transport.workspace import Instance

if TYPE_CHECKING:
    from tileweave.kernels.embedding.bag_all_to_all import Samples
    from tileweave.kernels.embedding.gradient import Push
    from tileweave.kernels.runtime.launch import Launcher
    from tileweave.kernels.runtime.peers import Peers

REGIONS = 3  # one with the last result, one for the next, and one that is never lent
_MOST_METAS = 64


def meta_of(
    cache: dict,
    tables: Sequence[torch.Tensor],
    columns: Sequence[int],
    device: torch.device,
    capturing: bool,
) -> torch.Tensor:
    """int64 [T, 4] on the device: address, rows, dim and column of each table; kept per set of
    tables."""
    key = tuple((t.data_ptr(), t.shape, c) for t, c in zip(tables, columns, strict=True))
    found = cache.get(key)
    if found is None:
        if capturing:
            raise CaptureError(
                f"asked: {OP} under CUDA-graph capture with tables not seen before; allowed: "
                "tables of an earlier call; remedy: call once with these tables before capturing"
            )
        words = [
            (t.data_ptr(), t.shape[0], t.shape[1], c) for t, c in zip(tables, columns, strict=True)
        ] or [(0, 0, 0, 0)]
        if len(cache) >= _MOST_METAS:
            cache.pop(next(iter(cache)))
        found = cache[key] = copied(words, device)
    keep_for_graphs(found)
    return found


@dataclass(slots=True, eq=False)
class Prepared:
    """What calls with the same tables and the same sizes need, until memory of the instance moves.

    skipped : samples of ranks of other nodes that come before those of this node.

    count : samples of this rank, each a row of ``width`` columns of the result.
    """

    instance: Instance
    peers: Peers
    meta: torch.Tensor
    launch: Launcher
    skipped: int
    count: int
    width: int


def prepare(call: Call, config: EmbeddingConfig, node: int = 0) -> Prepared:
    """What :func:`run_prepared` needs of calls like this one.

    ``node``: of the group, whose ranks have samples and a layout in common with those of other
    nodes. Columns of tables of other nodes are not written.
    """
    from tileweave.kernels.embedding import bag_all_to_all as kernel

    layout, batch, out_dtype, device = call.layout, call.batch, call.out_dtype, call.indices.device
    workspace = workspace_of(call.group_name, device)
    transport = workspace.transport
    instance = workspace.instance(OP, "sm")
    size, first = len(layout.dims), node * transport.world_size
    width, columns = layout.width, layout.columns[first + transport.rank]
    begin, end = rows_of(batch, size, first + transport.rank)
    chunk, skipped = rows_of(batch, size, 0)[1], rows_of(batch, size, first)[0]
    instance.reserve(max(chunk * width, 1) * out_dtype.itemsize, kernel.COUNTERS, REGIONS)
    metas: Any = instance.cache.setdefault("metas", {})
    meta = meta_of(metas, call.tables, columns, device, transport.capturing())
    peers = endpoint(instance, out_dtype)
    samples = kernel.Samples(batch, chunk, width, batch - skipped)
    rows, nbytes = [t.shape[0] for t in call.tables], [t.nbytes for t in call.tables]
    config = order_tables(config, batch, rows, nbytes, l2_bytes(device))
    launch = _launcher(instance, peers, call, columns, samples, config)
    return Prepared(instance, peers, meta, launch, skipped, end - begin, width)


def run_prepared(
    made: Prepared, call: Call, out: torch.Tensor | None, checksum: int, lends: bool
) -> torch.Tensor:
    """Return the result [count, width]: with ``lends`` a free region; if there is none, with
    ``out`` or without ``lends`` a copy."""
    instance, peers = made.instance, made.peers
    region, is_free = _region_of(instance, out), False
    if region is None:
        region, is_free = instance.regions.choose(instance.transport.capture_number())
    if instance.begin(checksum, region):
        keep_for_graphs(made.meta)
    offsets = call.offsets[made.skipped :] if made.skipped else call.offsets
    try:
        made.launch(made.meta, call.indices, offsets, call.weights, region)
    finally:
        instance.launched()
    leave_launch_order_of(call.indices)
    at = region * peers.slot_size
    place = peers.slots[at : at + made.count * made.width].view(made.count, made.width)
    if out is not None:
        return out if out.data_ptr() == place.data_ptr() else out.copy_(place)
    if lends and is_free and place.numel():
        return instance.regions.lend(region, place)
    return place.clone()


def run_fused(
    call: Call,
    config: EmbeddingConfig,
    out: torch.Tensor | None = None,
    checksum: int = 0,
    node: int = 0,
    lends: bool = True,
) -> torch.Tensor:
    """:func:`prepare` and :func:`run_prepared`, for calls that are not prepared."""
    return run_prepared(prepare(call, config, node), call, out, checksum, lends)


def _launcher(
    instance: Instance,
    peers: Peers,
    call: Call,
    columns: tuple[int, ...],
    samples: Samples,
    config: EmbeddingConfig,
) -> Launcher:
    """Launches of such calls, made at the first one."""
    from tileweave.kernels.embedding.bag_all_to_all import launcher
    from tileweave.kernels.embedding.lookup import constants

    tables, mean, weights = call.tables, call.mean, call.weights
    made = constants(tables, columns, samples.width, peers.slots.element_size(), config)
    weighted = None if weights is None else weights.dtype
    kinds = (peers.slots.dtype, call.indices.dtype, call.offsets.dtype, weighted)
    key = (made, samples, mean, kinds)
    found: Any = instance.cache.get(key)
    if found is None:
        t = instance.transport
        found = launcher(
            peers, t.rank, t.world_size, samples, len(tables), made, mean, t.machine.num_sms, config
        )
        instance.keep(key, found)
    return found


def _region_of(instance: Instance, out: torch.Tensor | None) -> int | None:
    """The region that ``out`` is, if it is an earlier result of this instance: peers then store
    into it."""
    if out is None or not out.numel():
        return None
    begin = out.data_ptr() - instance.slots.data_ptr()
    region, within = divmod(begin, instance.slot_bytes)
    return (
        region
        if within == 0 and region in instance.regions.held and region < instance.num_slots
        else None
    )


def run_lookup(
    call: Call, columns: Sequence[int], out: torch.Tensor, config: EmbeddingConfig, cache: dict
) -> None:
    """Bags of this rank's tables by the kernel, without communication, into ``columns`` of ``out``:
    the first of each table, as many as ``out`` has rows."""
    from tileweave.kernels.embedding import lookup as kernel

    tables, indices, offsets, weights = call[:4]
    capturing = indices.is_cuda and torch.cuda.is_current_stream_capturing()
    meta = meta_of(cache, tables, columns, indices.device, capturing)
    bags = kernel.Bags(meta, indices, offsets, weights)
    kernel.launch(bags, tables, tuple(columns), out, call.batch, call.mean, config)


def begin_push(
    grad: torch.Tensor,
    layout: EmbeddingLayout,
    batch: int,
    group_name: str,
    own: bool = False,
    carrier: str = "",
) -> Push:
    """Prepare the push of each rank's gradient rows to the ranks of the tables, group of tables by
    group.

    The slot is symmetric memory: read it on this stream, before the next call. Call
    :func:`end_push` after the launch.

    Parameters
    ----------
    own : bool
        Also store this rank's own rows in the slot, for code that reads the slot. Sums in the same
        launch read them from ``grad``.

    carrier : str, optional
        The transport, "copy_engine" or "sm", the same on all ranks. None: by
        :func:`gradient_carrier`.
    """
    from tileweave.kernels.embedding import gradient as kernel

    grad = grad.contiguous()
    workspace = workspace_of(group_name, grad.device)
    transport = workspace.transport
    carrier = carrier or gradient_carrier(layout, batch, grad.element_size())
    instance = workspace.instance(BACKWARD, carrier)
    dims, rank = [sum(mine) for mine in layout.dims], transport.rank
    instance.reserve(max(batch * max(dims), 1) * grad.element_size(), kernel.COUNTERS, 1)
    key = ("pieces", layout, own)
    found: Any = instance.cache.get(key)
    if found is None:
        pieces, empty = pieces_of(layout, rank, kernel.GROUPS.value, own)
        found = pieces.to(grad.device), empty, hash(tuple(layout.flat()))
        instance.keep(key, found)
    plan, silent, columns_of_all = found
    elements = 16 // grad.element_size()
    numbers = [layout.width, *dims, *sum(layout.columns, ()), *sum(layout.dims, ())]
    aligned = (
        elements if all(n % elements == 0 for n in numbers) and grad.data_ptr() % 16 == 0 else 1
    )
    # A hash of integers: the same in every process. ``own`` may differ between ranks.
    checksum = (
        hash(
            (
                number_of(BACKWARD),
                number_of(grad.dtype),
                batch,
                carrier == "copy_engine",
                columns_of_all,
            )
        )
        or 1
    )
    capturing = instance.begin(checksum)
    peers, columns = endpoint(instance, grad.dtype), layout.columns[rank]
    slot = peers.slots[: batch * dims[rank]].view(batch, dims[rank])
    first, end = rows_of(batch, transport.world_size, rank)
    candidates, concurrently = kernel.CANDIDATES * transport.machine.num_sms, None
    if carrier == "copy_engine":
        copies = _copies(instance, layout, batch, grad.element_size())
        concurrently = partial(
            push_with_launch, instance, copies=copies, given=grad.data_ptr(), capturing=capturing
        )
        # copies within a device may need multiprocessors
        if own and dims[rank]:
            parts = [grad[:, c : c + d] for c, d in zip(columns, layout.dims[rank], strict=True)]
            torch.cat(parts, 1, out=slot[first:end])
    return kernel.Push(
        peers,
        grad,
        plan,
        silent,
        slot,
        columns,
        first,
        aligned,
        rank,
        transport.world_size,
        candidates,
        concurrently,
    )


def _copies(instance: Instance, layout: EmbeddingLayout, batch: int, itemsize: int) -> Copies:
    """Copies of this rank's rows to the owners of their columns, group by group, each followed by a
    signal.

    The last is a signal to this rank itself. Adjacent tables of a group are one copy. The first
    copy waits until all ranks have met.
    """
    from tileweave.kernels.embedding.gradient import DONE, GATE, GROUPS

    key = ("copies", layout, batch, itemsize)
    found: Any = instance.cache.get(key)
    if found is not None:
        return found
    rank, size = instance.transport.rank, instance.transport.world_size
    begin, end = rows_of(batch, size, rank)
    copies = []
    for group, owner in product(range(GROUPS.value), push_order(rank, size)):
        pitch = sum(layout.dims[owner]) * itemsize
        for column, target, dim in (
            spans_of(layout, owner, group, GROUPS.value) if end > begin else []
        ):
            place = instance.slot_addresses[owner] + begin * pitch + target * itemsize
            ends = (place, 0, dim * itemsize, column * itemsize)
            copies.append(
                Copy(
                    *ends,
                    rows=end - begin,
                    target_pitch=pitch,
                    source_pitch=layout.width * itemsize,
                )
            )
        copies.append(instance.signal_copy(owner, instance.layout.data(rank, DONE.value + group)))
    copies.append(instance.signal_copy(rank, instance.layout.pushed))
    copies[0] = replace(copies[0], counter=instance.counters.data_ptr() + 4 * GATE.value, count=1)
    found = Copies(copies)
    instance.keep(key, found)
    return found


def group_of(number: int, tables: int, groups: int) -> int:
    """In which group an owner's table is sent.

    The first table, for which all sums wait, is a group of its own; the rest are divided evenly.
    """
    return 1 + (number - 1) * (groups - 1) // (tables - 1) if number else 0


def tables_of(
    layout: EmbeddingLayout, owner: int, groups: int
) -> Iterator[tuple[int, int, int, int]]:
    """(group, first column in the gradient, in the owner's slot, columns) of each table of an
    owner."""
    target, tables = 0, len(layout.dims[owner])
    for number, (column, dim) in enumerate(
        zip(layout.columns[owner], layout.dims[owner], strict=True)
    ):
        yield group_of(number, tables, groups), column, target, dim
        target += dim


def spans_of(
    layout: EmbeddingLayout, owner: int, group: int, groups: int
) -> list[tuple[int, int, int]]:
    """(first column in the gradient, in the owner's slot, columns) of an owner's tables of a group.

    Adjacent tables are joined.
    """
    found: list[tuple[int, int, int]] = []
    for its, column, target, dim in tables_of(layout, owner, groups):
        if its == group and found and found[-1][0] + found[-1][2] == column:
            found[-1] = (*found[-1][:2], found[-1][2] + dim)
        elif its == group:
            found.append((column, target, dim))
    return found


def end_push(push: Push, group_name: str) -> None:
    """End a push after its launch: what is queued from here on waits for no peer.

    In the interpreter, report waits that timed out.
    """
    if not push.grad.is_cuda and push.concurrently is None:  # with copies the launch has checked
        workspace_of(group_name, push.grad.device).instance(BACKWARD, "sm").check()
    leave_launch_order_of(push.grad)


def pieces_of(
    layout: EmbeddingLayout, rank: int, groups: int, own: bool
) -> tuple[torch.Tensor, int]:
    """The plan of ``push_block``, by group, this rank's ``own`` pieces last; and a bit per empty
    group."""
    size = len(layout.dims)
    rows = [
        (owner, column, target, dim, sum(layout.dims[owner]), group)
        for owner in ((rank + step) % size for step in range(1, size + own))
        for group, column, target, dim in tables_of(layout, owner, groups)
    ]
    rows.sort(key=lambda row: row[-1])  # stable
    counts = Counter(row[-1] for row in rows)
    silent = sum(1 << group for group in range(groups) if not counts[group])
    words = [(*row, counts[row[-1]]) for row in rows]
    return torch.tensor(words, dtype=torch.int64, device="cpu").view(-1, 7), silent
