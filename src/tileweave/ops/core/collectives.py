"""Collectives as operators queue them: on a GPU in one line with our launches, on the CPU behind an
agreement.

That is for gloo, which ends the process where ranks ask for different things, and knows neither
halves nor one order of sums.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist

from tileweave.errors import RankMismatchError
from tileweave.transport.torch_collectives import (
    agree,
    all_gather_flat,
    all_to_all_flat,
    reduce_scatter_flat,
)


def in_line(x: torch.Tensor) -> None:
    """Put the collective that follows in the line of our launches on x's device.

    NCCL's kernels wait for peers and need multiprocessors, as ours do: side by side, in different
    orders on different ranks, they would wait for each other for ever.
    """
    if x.is_cuda:
        from tileweave.transport.cuda import enter_launch_order

        enter_launch_order(x.device)


def out_of_line(x: torch.Tensor) -> None:
    """What follows on this stream waits for no peer, so a collective or launch of ours on another
    stream may run beside it."""
    if x.is_cuda:
        from tileweave.transport.cuda import leave_launch_order

        leave_launch_order(x.device)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order."""
    return begin_all_gather(x, group, beside=False)[0]


def begin_all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, beside: bool = True
) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`all_gather`, beside what is queued next: the result, and what to wait for.

    ``beside`` False: on the current stream, and nothing to wait for. NCCL's own stream costs two
    events between streams.
    """
    in_line(x)
    x, gathered = x.contiguous(), x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    if x.device.type == "cpu":  # last, so that who has no memory leaves nobody in the collective
        # gloo ends the process where sizes differ
        agree(f"a gather of {tuple(x.shape)} {x.dtype}", group)
    return gathered, all_gather_flat(gathered, x, group=group, async_op=beside)


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks, in ``out`` if
    given."""
    return begin_reduce_scatter(x, group, out, beside=False)[0]


def begin_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None, beside: bool = True
) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`reduce_scatter`, beside what is queued next where there is a GPU, as
    :func:`begin_all_gather` is."""
    size = dist.get_world_size(group)
    if size == 1 or x.device.type == "cpu":
        rows = x.shape[0] // size
        own = slice(dist.get_rank(group) * rows, (dist.get_rank(group) + 1) * rows)
        y = x if size == 1 else _sum_of_all(x, group, own)
        return y if out is None else out.copy_(y), None
    in_line(x)
    if out is None:
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return out, reduce_scatter_flat(out, x.contiguous(), group=group, async_op=beside)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, on every rank; x may be overwritten."""
    if dist.get_world_size(group) == 1:
        return x
    if x.device.type == "cpu":
        return _sum_of_all(x, group, slice(None))
    in_line(x)
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    out_of_line(x)
    return x


def _sum_of_all(x: torch.Tensor, group: dist.ProcessGroup, rows: slice) -> torch.Tensor:
    """These rows of the sum over ranks, in fp32 (fp64 stays) and in rank order: gloo's own way
    differs between releases."""
    everyone = all_gather(x, group).view(dist.get_world_size(group), *x.shape)[:, rows]
    total = everyone[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in everyone[1:]:
        total = total + part
    return total.to(x.dtype)


def all_to_all_alike(got: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Part p of [R, ...] to rank p; into ``got`` what each rank sent here, as large."""
    if parts.device.type == "cpu":
        agree(f"an all-to-all of {tuple(parts.shape)} {parts.dtype}", group)
    _all_to_all(got.view(-1), parts.view(-1), group)


def _all_to_all(
    got: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *counts: list[int]
) -> None:
    """``counts`` of elements received and sent, by rank; none: the same for all."""
    in_line(whole)
    if whole.dtype.itemsize == 2:  # as bytes, since gloo knows no halves
        got, whole, counts = (
            got.view(torch.uint8),
            whole.view(torch.uint8),
            tuple([2 * n for n in c] for c in counts),
        )
    all_to_all_flat(got, whole, *counts, group=group)
    out_of_line(whole)


def all_to_all(
    sends: list[torch.Tensor], sizes: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Flat ``sends[p]`` to rank p; what each rank sent here, flat, of ``sizes`` elements. Any
    dtype."""
    whole = torch.cat([t.reshape(-1) for t in sends])
    return list(all_to_all_whole(whole, [t.numel() for t in sends], sizes, group).split(sizes))


def all_to_all_whole(
    whole: torch.Tensor, split: list[int], sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`all_to_all` of pieces that stand one behind the other, flat; so does what comes
    back."""
    got = whole.new_empty(sum(sizes))
    if whole.device.type == "cpu":
        agree(f"an all-to-all of {whole.dtype}", group)
        _agree_on_parts(split, sizes, group)
    _all_to_all(got, whole, group, sizes, split)
    return got


def _agree_on_parts(split: list[int], sizes: list[int], group: dist.ProcessGroup) -> None:
    """Raise the same error on every rank if one sends another what that does not expect: gloo would
    end the process."""
    told = (
        all_gather(torch.tensor([split, sizes], device="cpu"), group)
        .view(len(split), 2, len(split))
        .tolist()
    )
    for sender, receiver in product(range(len(split)), repeat=2):
        sent, expected = told[sender][0][receiver], told[receiver][1][sender]
        if sent != expected:
            raise RankMismatchError(
                f"asked: rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}; allowed: the same "
                "operator and sizes that fit on every rank; remedy: look at what these ranks pass"
            )


def exchange_numbers(
    mine: tuple[int, ...], device: torch.device, group: dist.ProcessGroup
) -> list[tuple[int, ...]]:
    """A list of integers of each rank, by rank. Waits for the device."""
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
