"""distribute_indices: from samples with all features on each rank, to all samples of the features whose tables a rank owns.

Jagged tensors as TorchRec's KeyedJaggedTensor lays them out: ``lengths`` [F * b], feature after feature, in each sample
after sample; ``values`` [sum of lengths] in the same order. What comes out is what ``embedding_bag_all_to_all`` takes.

Two all-to-alls, lengths first; sizes of the second are data, so the host waits for the device once. Unfused: ids are a
few bytes for each row of hundreds of bytes that they fetch.

Source: the input distribution of TorchRec (KJTAllToAll).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops.reference import all_to_all_whole
from tileweave.ops.registry import group_of, name_of
from tileweave.ops.table_gradient import on_device


def distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Send each feature's ids to the ranks that own (parts of) its table.

    Parameters
    ----------
    lengths : [F * b] integers, b samples on each rank (the same number), F features. values : [sum(lengths)], any integer.
    features : for each rank, the feature of each of its tables, in the order of its tables; a feature may go to several.
    weights : [sum(lengths)], travels along.

    Returns
    -------
    (indices [N], offsets [T * B + 1] of int64, weights [N] or None) for this rank's T tables and the global batch B = R * b.
    """
    group = group_of(name_of(group))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    require(len(features) == size, f"features of {len(features)} ranks", f"{size} ranks", "give each rank a list")
    count = max((f for mine in features for f in mine), default=-1) + 1
    fits = lengths.dim() == 1 and lengths.is_contiguous() and not lengths.is_floating_point()
    require(fits, f"lengths {lengths.dtype} {tuple(lengths.shape)}", "[F * b] integers", "flatten feature by feature")
    require(count > 0, "no features", "one at least", "name the features")
    asked = f"{lengths.numel()} lengths of {count} features"
    require(lengths.numel() % count == 0, asked, "F * b of them", "give every feature a length for every sample")
    samples = lengths.numel() // count
    table = lengths.view(count, samples).long()
    starts = torch.zeros(count + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(table.sum(1), 0, out=starts[1:])

    wanted = tuple(f for mine in features for f in mine)  # pieces stand one behind the other, rank by rank
    asked_for = table.index_select(0, on_device(wanted, lengths.device)).view(-1)
    split, sizes = [len(mine) * samples for mine in features], [len(features[rank]) * samples] * size
    arrived = all_to_all_whole(asked_for, split, sizes, group).view(
        size, len(features[rank]), samples
    )  # [source, table, sample]
    per_segment = arrived.sum(2)
    sizes = torch.cat([starts, per_segment.sum(1)]).tolist()  # the one wait for the device
    cuts, incoming = sizes[: count + 1], sizes[count + 1 :]
    require(cuts[-1] == values.numel(), f"{values.numel()} values", f"{cuts[-1]}, the sum of lengths", "pass all values")

    def send(data: torch.Tensor) -> torch.Tensor:
        pieces = torch.cat([data[cuts[f] : cuts[f + 1]] for f in wanted])
        split = [sum(cuts[f + 1] - cuts[f] for f in mine) for mine in features]
        return all_to_all_whole(pieces, split, incoming, group)[order]

    order = _table_order(per_segment, sum(incoming))
    flat = arrived.transpose(0, 1).reshape(-1)  # [table, source, sample]: all samples of a table side by side
    offsets = torch.zeros(flat.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(flat, 0, out=offsets[1:])
    return send(values), offsets, None if weights is None else send(weights)


def _table_order(segments: torch.Tensor, total: int) -> torch.Tensor:
    """Where each value of the result stands in what arrived. ``segments``: [source, table] values in each piece."""
    flat = segments.reshape(-1)
    begins = flat.cumsum(0) - flat  # by source, then table
    counts = segments.t().reshape(-1)  # by table, then source
    sources = begins.view(segments.shape).t().reshape(-1)
    ends = counts.cumsum(0)
    shift = sources - (ends - counts)
    places = torch.arange(total, device=segments.device)
    # By bisection, not torch.repeat_interleave, which gives a long segment to one block: 0.49 ms for 28 of them.
    return places + shift[torch.searchsorted(ends, places, right=True)]
