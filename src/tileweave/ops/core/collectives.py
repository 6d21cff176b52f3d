"""Collectives as operators queue them.

On a GPU they take part in the launch order of the fused kernels. On the CPU ranks first compare
what they ask for: gloo ends the process where ranks ask for different things. Gloo also has no
collectives for 2-byte floats and no fixed order of sums, so both are done here.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tileweave.errors import RankMismatchError
from tileweave.transport.torch_collectives import (
    agree,
    all_gather_flat,
    all_to_all_flat,
    queue_all_gather,
    queue_all_reduce,
    queue_all_to_all,
    queue_reduce_scatter,
    reduce_scatter_flat,
)

if TYPE_CHECKING:
    from tileweave.transport.cuda import LaunchOrder


@lru_cache(maxsize=1)
def _cuda() -> Any:
    """``transport.cuda``, which loads torch's symmetric memory; an import takes 1 us per call."""
    return import_module("tileweave.transport.cuda")


def enter_launch_order_of(x: torch.Tensor) -> LaunchOrder | None:
    """Put the collective that follows into the launch order of fused kernels on x's device. Returns
    that order; None on the CPU.

    Kernels of NCCL wait for peers and need multiprocessors, as fused kernels do. If they ran
    concurrently, in different orders on different ranks, they could wait for each other for ever.
    """
    return _cuda().enter_launch_order(x.get_device()) if x.is_cuda else None


def leave_launch_order_of(x: torch.Tensor) -> None:
    """End the turn of this stream in the launch order on x's device.

    What follows on this stream waits for no peer, so a collective or a fused kernel on another
    stream may run concurrently.
    """
    if x.is_cuda:
        _cuda().leave_launch_order(x.get_device())


def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order, in ``out`` if given.

    On a GPU it is queued on the current stream. The stream of NCCL costs two events between
    streams.
    """
    if x.is_cpu:
        return _begin_all_gather(x, group, out, async_op=False)[0]
    enter_launch_order_of(x)
    x = x.contiguous()
    if out is None:
        out = _for_all(x, group)
    queue_all_gather(out, x, group)
    return out


def begin_all_gather(
    x: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin :func:`all_gather`: return the result, and the work to wait for before it is read."""
    return _begin_all_gather(x, group, None, async_op=True)


def _begin_all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None, async_op: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    enter_launch_order_of(x)
    x = x.contiguous()
    if out is None:
        out = _for_all(x, group)
    if x.is_cpu:  # after the allocation: if that fails, no peer waits for this rank
        # gloo ends the process where sizes differ
        agree(f"a gather of {tuple(x.shape)} {x.dtype}", group)
    return out, all_gather_flat(out, x, group=group, async_op=async_op)


def _for_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Memory for the shards of all ranks."""
    rows, *rest = x.shape
    return x.new_empty(group.size() * rows, *rest)


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks, in ``out`` if
    given. Queued as :func:`all_gather` is."""
    size = group.size()
    if size == 1 or x.is_cpu:
        rows = x.shape[0] // size
        own = slice(group.rank() * rows, (group.rank() + 1) * rows)
        y = x if size == 1 else _sum_of_all(x, group, own)
        return y if out is None else out.copy_(y)
    enter_launch_order_of(x)
    if out is None:
        rows, *rest = x.shape
        out = x.new_empty(rows // size, *rest)
    queue_reduce_scatter(out, x.contiguous(), group)
    return out


def begin_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin :func:`reduce_scatter`: return the result, and the work to wait for before it is read;
    on the CPU the result is there on return."""
    size = group.size()
    if size == 1 or x.is_cpu:
        return reduce_scatter(x, group), None
    enter_launch_order_of(x)
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return out, reduce_scatter_flat(out, x.contiguous(), group=group, async_op=True)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, on every rank; x may be overwritten."""
    if group.size() == 1:
        return x
    if x.is_cpu:
        return _sum_of_all(x, group, slice(None))
    order = enter_launch_order_of(x)
    x = x.contiguous()
    queue_all_reduce(x, group)
    if order is not None:
        order.leave()
    return x


def _sum_of_all(x: torch.Tensor, group: dist.ProcessGroup, rows: slice) -> torch.Tensor:
    """These rows of the sum over ranks, added in rank order in fp32 (fp64 stays fp64).

    The order in which gloo adds differs between its releases.
    """
    everyone = all_gather(x, group).view(dist.get_world_size(group), *x.shape)[:, rows]
    total = everyone[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in everyone[1:]:
        total = total + part
    return total.to(x.dtype)


def all_to_all_equal(got: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send part p of [R, ...] to rank p; store in ``got`` what each rank sent here, of the same
    size. Both contiguous."""
    if parts.is_cpu:
        agree(f"an all-to-all of {tuple(parts.shape)} {parts.dtype}", group)
        _all_to_all(got.view(-1), parts.view(-1), group)
        return
    order = enter_launch_order_of(parts)
    queue_all_to_all(got, parts, group)
    if order is not None:
        order.leave()


def _all_to_all(
    got: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *counts: list[int]
) -> None:
    """All-to-all of flat tensors. ``counts``: elements received and sent per rank; without, the
    same for all."""
    enter_launch_order_of(whole)
    if whole.dtype.itemsize == 2:  # as bytes, since gloo has no 2-byte floats
        got, whole, counts = (
            got.view(torch.uint8),
            whole.view(torch.uint8),
            tuple([2 * n for n in c] for c in counts),
        )
    all_to_all_flat(got, whole, *counts, group=group)
    leave_launch_order_of(whole)


def all_to_all(
    sends: list[torch.Tensor], sizes: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send flat ``sends[p]`` to rank p; return what each rank sent here, flat. Any dtype.

    ``sizes``: the number of elements that each rank sends here.
    """
    whole = torch.cat([t.reshape(-1) for t in sends])
    return list(all_to_all_whole(whole, [t.numel() for t in sends], sizes, group).split(sizes))


def all_to_all_whole(
    whole: torch.Tensor, split: list[int], sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """As :func:`all_to_all`, with the pieces for all ranks concatenated in ``whole``, and so in the
    result."""
    got = whole.new_empty(sum(sizes))
    if whole.device.type == "cpu":
        agree(f"an all-to-all of {whole.dtype}", group)
        _agree_on_parts(split, sizes, group)
    _all_to_all(got, whole, group, sizes, split)
    return got


def _agree_on_parts(split: list[int], sizes: list[int], group: dist.ProcessGroup) -> None:
    """Raise the same error on every rank if one rank sends another a number of elements that it
    does not expect.

    Gloo would end the process.
    """
    told = (
        all_gather(torch.tensor([split, sizes], device="cpu"), group)
        .view(len(split), 2, len(split))
        .tolist()
    )
    for sender, receiver in product(range(len(split)), repeat=2):
        sent, expected = told[sender][0][receiver], told[receiver][1][sender]
        if sent != expected:
            raise RankMismatchError(
                f"asked: rank {sender} sends {sent} elements to rank {receiver}, "
                f"which expects {expected}; allowed: the same operator and sizes that fit on "
                "every rank; remedy: look at what these ranks pass"
            )


def exchange_numbers(
    mine: tuple[int, ...], device: torch.device, group: dist.ProcessGroup
) -> list[tuple[int, ...]]:
    """The integers of each rank, by rank; ranks may have different numbers of them. Waits for the
    device."""
    where = device if dist.get_backend(group) != "gloo" else torch.device("cpu")
    counts = all_gather(torch.tensor([len(mine)], device=where), group).tolist()
    padded = torch.tensor(
        [*mine, *[0] * (max(counts) - len(mine))], dtype=torch.int64, device=where
    )
    rows = (
        all_gather(padded, group).view(len(counts), -1).tolist()
        if max(counts)
        else [[] for _ in counts]
    )
    return [tuple(row[:count]) for row, count in zip(rows, counts, strict=True)]
