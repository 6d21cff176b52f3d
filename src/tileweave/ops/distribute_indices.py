"""distribute_indices: from samples with all features on each rank, to all samples of the features whose tables a rank owns.

Jagged tensors as TorchRec's KeyedJaggedTensor lays them out: ``lengths`` [F * b], feature after feature, in each sample
after sample; ``values`` [sum of lengths] in the same order. What comes out is what ``embedding_bag_all_to_all`` takes.

Two all-to-alls, lengths first; sizes of the second are data, so the host waits for the device once. In two calls it need not:

    begin_distribute_indices  lengths leave | what came, and its sums, to host memory        batch n + 2
    finish                    host waits for those | values leave | pieces into table order  batch n + 1, a step later

Unfused: ids are a few bytes for each row of hundreds of bytes that they fetch.

Source: the input distribution of TorchRec (KJTAllToAll), and its split in two in TrainPipelineSparseDist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops.reference import all_to_all_whole
from tileweave.ops.registry import agree, debugging, group_of, name_of
from tileweave.ops.table_gradient import on_device

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
Distributed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> Distributed:
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
    return begin_distribute_indices(lengths, values, features, weights=weights, group=group).finish()


def begin_distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> IndicesOnTheirWay:
    """The first half of :func:`distribute_indices`, which never waits for the device; ``finish()`` of the result is the other.

    Arguments as there; what the host can see is checked here, the rest by ``finish()``. Both halves are collective. The stream
    that is current here should be so there, or ordered behind it.
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
    sums = table.sum(1)
    # What only the device knows travels with the lengths (decision 0024): by how much values are too few, and lengths below 0.
    faults = torch.stack([sums.sum() - values.numel(), table.clamp(max=0).sum()])

    wanted = tuple(f for mine in features for f in mine)  # pieces stand one behind the other, rank by rank
    pieces = table.index_select(0, on_device(wanted, lengths.device)).view(-1).split([len(mine) * samples for mine in features])
    whole = torch.cat([part for piece in pieces for part in (piece, faults)])
    own = len(features[rank])
    sizes = [len(mine) * samples + 2 for mine in features]
    got = all_to_all_whole(whole, sizes, [own * samples + 2] * size, group).view(size, -1)
    arrived = got[:, :-2].view(size, own, samples)  # [source, table, sample]
    told = torch.cat([got[:, -2:].reshape(-1), sums, arrived.sum(2).view(-1)])
    ready = None
    if told.is_cuda:
        told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
    offsets = torch.zeros(own * size * samples + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(arrived.transpose(0, 1).reshape(-1), 0, out=offsets[1:])  # [table, source, sample]
    return IndicesOnTheirWay(values, weights, offsets, tuple(map(tuple, features)), group, told, ready)


@dataclass(frozen=True, slots=True)
class IndicesOnTheirWay:
    """Lengths have left, values have not; :func:`begin_distribute_indices` returns it.

    ``told``, in host memory once ``ready``: two words of each rank on what is wrong with its lists, the values of each of this
    rank's features, and those that come from each source for each table here.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    offsets: torch.Tensor
    features: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup
    told: torch.Tensor
    ready: torch.cuda.Event | None

    def finish(self) -> Distributed:
        """Wait for ``told``, send the values: (indices, offsets, weights), as :func:`distribute_indices` returns them."""
        if self.ready is not None:
            self.ready.synchronize()
        size, own = len(self.features), len(self.features[dist.get_rank(self.group)])
        told = self.told.tolist()
        few, low = told[: 2 * size : 2], told[1 : 2 * size : 2]
        asked = ", ".join(
            f"rank {source}: {'lengths below 0' if low[source] else 'another number of values than its lengths sum up to'}"
            for source in range(size)
            if low[source] or few[source]
        )
        require(not asked, asked, "lengths from 0 on, and as many values as they sum up to", "pass all values of all bags")
        sums, incoming = told[2 * size : len(told) - size * own], told[len(told) - size * own :]
        indices = self._send(self.values, sums, incoming)
        return indices, self.offsets, None if self.weights is None else self._send(self.weights, sums, incoming)

    def _send(self, data: torch.Tensor, sums: list[int], incoming: list[int]) -> torch.Tensor:
        """``sums``: of each feature here; ``incoming`` [source, table]: of each piece that comes, in the order of arrival."""
        size = len(self.features)
        own = len(incoming) // size
        split = [sum(sums[f] for f in mine) for mine in self.features]
        parts = data.split(sums)
        leaving = torch.cat([parts[f] for mine in self.features for f in mine])
        ends = [0, *accumulate(incoming)]
        got = all_to_all_whole(leaving, split, [ends[(s + 1) * own] - ends[s * own] for s in range(size)], self.group)
        pieces = got.split(incoming) if own else [got]
        return torch.cat([pieces[source * own + table] for table in range(own) for source in range(size)] or [got])


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
