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
from tileweave.ops.registry import agree, debugging, group_of, name_of
from tileweave.ops.table_gradient import on_device

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_FAULTS = ("", "another number of values than its lengths sum up to", "lengths below 0", "lengths below 0")


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
    lengths : [F * b] integers, b samples on each rank (the same number); F is one more than the highest feature that is named.
    values : [sum(lengths)], any integer.
    features : for each rank, the feature of each of its tables, in the order of its tables; a feature may go to several.
    weights : [sum(lengths)], travels along.

    Returns
    -------
    (indices [N], offsets [T * B + 1] of int64, weights [N] or None) for this rank's T tables and the global batch B = R * b.

    Raises
    ------
    InputError for what does not fit: on the rank that made the mistake, before anything is sent; where only the device knows
    (lengths and values that do not agree), on every rank, naming the rank. Lengths of other numbers of samples, or other
    features, on some rank: only with ``TILEWEAVE_DEBUG=1``.
    """
    group = group_of(name_of(group))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if debugging():  # before the checks: a rank whose input is refused must not leave the others waiting
        dtypes = [str(values.dtype), None if weights is None else str(weights.dtype)]
        common = {"features": list(map(list, features)), "lengths": lengths.numel(), "dtypes": dtypes}
        agree(group, lengths.device, {"op": "distribute_indices", **common})
    count = _check_inputs(lengths, values, features, weights, size)
    samples = lengths.numel() // count
    table = lengths.view(count, samples).long()
    starts = torch.zeros(count + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(table.sum(1), 0, out=starts[1:])
    fault = (starts[-1:] != values.numel()) + 2 * (lengths < 0).any()  # only the device knows: an index in _FAULTS

    wanted = tuple(f for mine in features for f in mine)  # pieces stand one behind the other, rank by rank
    pieces = table.index_select(0, on_device(wanted, lengths.device)).view(-1).split([len(mine) * samples for mine in features])
    whole = torch.cat([part for piece in pieces for part in (piece, fault)])
    own = len(features[rank])
    got = all_to_all_whole(whole, [len(mine) * samples + 1 for mine in features], [own * samples + 1] * size, group)
    arrived = got.view(size, -1)[:, :-1].reshape(size, own, samples)  # [source, table, sample]
    per_segment = arrived.sum(2)
    told = torch.cat([got.view(size, -1)[:, -1], starts, per_segment.sum(1)]).tolist()  # the one wait for the device
    faults, cuts, incoming = told[:size], told[size : size + count + 1], told[size + count + 1 :]
    asked = ", ".join(f"rank {source}: {_FAULTS[fault]}" for source, fault in enumerate(faults) if fault)
    require(not asked, asked, "lengths from 0 on, and as many values as they sum up to", "pass all values of all bags")

    def send(data: torch.Tensor) -> torch.Tensor:
        pieces = torch.cat([data[cuts[f] : cuts[f + 1]] for f in wanted])
        split = [sum(cuts[f + 1] - cuts[f] for f in mine) for mine in features]
        return all_to_all_whole(pieces, split, incoming, group)[order]

    order = _table_order(per_segment, sum(incoming))
    flat = arrived.transpose(0, 1).reshape(-1)  # [table, source, sample]: all samples of a table side by side
    offsets = torch.zeros(flat.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(flat, 0, out=offsets[1:])
    return send(values), offsets, None if weights is None else send(weights)


def _check_inputs(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    weights: torch.Tensor | None,
    size: int,
) -> int:
    """The number of features; raises on the rank that made the mistake, before anything is sent."""
    require(len(features) == size, f"features of {len(features)} ranks", f"{size} ranks", "give each rank a list")
    named = [f for mine in features for f in mine]
    require(bool(named), "no features", "one at least", "name the features")
    require(min(named) >= 0, f"features {sorted(set(named))}", "numbers from 0 on", "count features from 0")
    count = max(named) + 1
    fits = lengths.dim() == 1 and lengths.is_contiguous() and lengths.dtype in INTEGERS
    require(fits, f"lengths {lengths.dtype} {tuple(lengths.shape)}", "[F * b] integers", "flatten feature by feature")
    asked = f"{lengths.numel()} lengths of {count} features"
    require(lengths.numel() % count == 0, asked, "F * b of them", "give every feature a length for every sample")
    fits = values.dim() == 1 and values.dtype in INTEGERS and values.device == lengths.device
    asked = f"values {values.dtype} {tuple(values.shape)} on {values.device}"
    require(fits, asked, f"one dimension, integers, on {lengths.device}", "flatten feature by feature")
    if weights is not None:
        fits = weights.shape == values.shape and weights.is_floating_point() and weights.device == values.device
        asked = f"weights {weights.dtype} {tuple(weights.shape)} on {weights.device}"
        require(fits, asked, "a floating number for each value, beside it", "pass as many as there are values")
    return count


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
