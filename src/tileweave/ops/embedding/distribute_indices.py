"""distribute_indices: from samples with all features on each rank, to all samples of the features
whose tables a rank owns.

Jagged tensors as TorchRec's KeyedJaggedTensor lays them out: ``lengths`` [F * b], feature after
feature, in each sample after sample; ``values`` [sum of lengths] in the same order. What comes out
is what ``embedding_bag_all_to_all`` takes.

Two all-to-alls, lengths first; sizes of the second are data, so the host waits for the device once.
In two calls it need not:

    begin_distribute_indices  lengths leave | what came, and its sums, to host memory        batch n + 2
    finish                    host waits for those | values leave | pieces into table order  batch n + 1, a step later

Unfused: ids are a few bytes for each row of hundreds of bytes that they fetch.

Source: the input distribution of TorchRec (KJTAllToAll), and its split in two in
TrainPipelineSparseDist.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once

from tileweave.errors import RankMismatchError, require
from tileweave.ops.core.collectives import all_to_all_whole
from tileweave.ops.core.debug_agreement import breaking_off
from tileweave.ops.core.registry import agree, debugging, group_of, interpreting, name_of
from tileweave.ops.embedding.table_gradient import on_device, used_on

if TYPE_CHECKING:
    from tileweave.kernels.embedding.jagged import Layout

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = tuple(product(INTEGERS, (None, *FLOATS)))  # of values and weights; None: no weights
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
    lengths : [F * b] integers, b samples on each rank (the same number); F is one more than the
        highest feature that is named.
    values : [sum(lengths)], any integer.
    features : for each rank, the feature of each of its tables, in the order of its tables; a
        feature may go to several.
    weights : [sum(lengths)], travels along. On all ranks or on none; like values, of one dtype on
        all ranks.

    Returns
    -------
    (indices [N], offsets [T * B + 1] of int64, weights [N] or None) for this rank's T tables and
    the global batch B = R * b.

    Raises
    ------
    InputError for what does not fit: on the rank that made the mistake, before anything is sent;
    where only the device knows (lengths and values that do not agree), on every rank, naming the
    rank. RankMismatchError, on every rank, where ranks differ in the dtype of values or of weights,
    or in having weights. Lengths of other numbers of samples, or other features, on some rank: only
    with ``TILEWEAVE_DEBUG=1``.
    """
    return begin_distribute_indices(
        lengths, values, features, weights=weights, group=group
    ).finish()


@_disable_dynamo
def begin_distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> IndicesOnTheirWay:
    """The first half of :func:`distribute_indices`, which never waits for the device; ``finish()``
    of the result is the other.

    Arguments as there; what the host can see is checked here, the rest by ``finish()``. Both halves
    are collective. The stream that is current here should be so there, or that one ordered behind
    it. Compilers leave both halves alone: sizes are data.
    """
    name = name_of(group)
    with breaking_off(name, lengths.device):
        return _begin(lengths, values, features, weights, group_of(name))


def _begin(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    weights: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> IndicesOnTheirWay:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # before the checks: a rank whose input is refused must not leave the others waiting
    if debugging():
        dtypes = [str(values.dtype), None if weights is None else str(weights.dtype)]
        common = {
            "features": list(map(list, features)),
            "lengths": lengths.numel(),
            "dtypes": dtypes,
        }
        agree(group, {"op": "distribute_indices", **common})
    count = _check_inputs(lengths, values, features, weights, size)
    owned = tuple(map(tuple, features))
    where, samples = _layout(owned, count, rank, lengths.device), lengths.numel() // count
    if type(where.mine) is not torch.Tensor:  # see on_device
        _layout.cache_clear()
    sizes = [len(mine) * samples + count + 1 for mine in owned]  # of the messages
    steps: Any = InTorch
    if lengths.is_cuda or interpreting():
        from tileweave.kernels.embedding import jagged as steps
    whole = lengths.new_empty(sum(sizes), dtype=torch.int64)
    kind = KINDS.index((values.dtype, None if weights is None else weights.dtype))
    # a message's last word says both
    steps.pack(lengths, values.numel() * len(KINDS) + kind, where, whole)
    got = all_to_all_whole(whole, sizes, [sizes[rank]] * size, group)
    offsets, told, leaving, arriving = steps.unpack(got, samples, where)
    ready = None
    if told.is_cuda:
        told = torch.empty(told.shape, dtype=told.dtype, device="cpu", pin_memory=True).copy_(
            told, non_blocking=True
        )
        ready = torch.cuda.Event()
        ready.record()
    return IndicesOnTheirWay(
        values, weights, offsets, owned, group, steps, told, leaving, arriving, ready
    )


@functools.lru_cache(32)
def _layout(
    features: tuple[tuple[int, ...], ...], count: int, rank: int, device: torch.device
) -> Layout:
    """Kept: a step's batches are alike."""
    from tileweave.kernels.embedding.jagged import Layout

    pieces = [(feature, owner) for owner, mine in enumerate(features) for feature in mine]
    until = accumulate(len(mine) for mine in features)
    words = features[rank], *zip(*pieces, strict=True), until
    mine, wanted, owners, tables = (on_device(tuple(w), device) for w in words)
    return Layout(mine, wanted, owners, tables, count, rank)


@dataclass(frozen=True, slots=True)
class IndicesOnTheirWay:
    """Lengths have left, values have not; :func:`begin_distribute_indices` returns it.

    ``told``, in host memory once ``ready``: for each rank, values of each feature; and values
    passed, times ``len(KINDS)``, plus the number of their kind. ``leaving``, ``arriving`` are
    pieces of values, see ``kernels/embedding/jagged.py``, which is what ``steps`` is, or
    :class:`InTorch`.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    offsets: torch.Tensor
    features: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup
    steps: Any
    told: torch.Tensor
    leaving: torch.Tensor
    arriving: torch.Tensor
    ready: torch.cuda.Event | None

    @_disable_dynamo
    def finish(self, allowed: Sequence[torch.dtype] = INTEGERS) -> Distributed:
        """Wait for ``told``, send the values: (indices, offsets, weights), as
        :func:`distribute_indices` returns them.

        ``allowed``: what values may be; others are refused on every rank, before they are sent.
        """
        with breaking_off(self.group.group_name, self.values.device):
            return self._finish(allowed)

    def _finish(self, allowed: Sequence[torch.dtype]) -> Distributed:
        if self.ready is not None:
            self.ready.synchronize()
            stream = torch.cuda.current_stream()
            used_on(stream, self.values, self.weights, self.offsets, self.leaving, self.arriving)
        size, rank = len(self.features), dist.get_rank(self.group)
        sums = self.told.view(size, -1).tolist()
        said = [divmod(mine.pop(), len(KINDS)) for mine in sums]
        _check_kinds([KINDS[kind] for _, kind in said], allowed)
        _check_sums(sums, [passed for passed, _ in said])
        split = [[sums[rank][f] for f in mine] for mine in self.features]
        incoming = [[theirs[f] for f in self.features[rank]] for theirs in sums]
        indices = self._send(self.values, split, incoming)
        return (
            indices,
            self.offsets,
            None if self.weights is None else self._send(self.weights, split, incoming),
        )

    def _send(
        self, data: torch.Tensor, split: list[list[int]], incoming: list[list[int]]
    ) -> torch.Tensor:
        """``split`` [owner][table], ``incoming`` [source][table]: elements of each piece that
        leaves, that comes."""
        going, coming = [sum(p) for p in split], [sum(p) for p in incoming]
        leaving = data.new_empty(sum(going))
        self.steps.move(
            data, leaving, self.leaving, max((n for pieces in split for n in pieces), default=0)
        )
        got = all_to_all_whole(leaving, going, coming, self.group)
        found = torch.empty_like(got)
        self.steps.move(
            got, found, self.arriving, max((n for pieces in incoming for n in pieces), default=0)
        )
        return found


class InTorch:
    """What the kernels do, without them: on the CPU where nothing is interpreted."""

    @staticmethod
    def pack(lengths: torch.Tensor, passed: int, where: Layout, whole: torch.Tensor) -> None:
        from tileweave.kernels.embedding.jagged import BELOW

        table = lengths.view(where.features, lengths.numel() // where.features).long()
        sums = torch.where((table < 0).any(1), BELOW.value, table.sum(1))
        ends = torch.cat([sums, sums.new_tensor([passed])])
        pieces = table[where.wanted].split(
            torch.bincount(where.owners, minlength=where.tables.numel()).tolist()
        )
        torch.cat([part for mine in pieces for part in (mine.reshape(-1), ends)], out=whole)

    @staticmethod
    def unpack(
        got: torch.Tensor, samples: int, where: Layout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        size, tables = where.tables.numel(), where.mine.numel()
        table = got.view(size, tables * samples + where.features + 1)
        lengths, told = table.split([tables * samples, where.features + 1], 1)
        offsets = got.new_zeros(lengths.numel() + 1)
        torch.cumsum(
            lengths.reshape(size, tables, samples).transpose(0, 1).reshape(-1), 0, out=offsets[1:]
        )
        begins = told[where.rank].cumsum(0) - told[where.rank]
        counts = told[where.rank][where.wanted]
        leaving = torch.stack([begins[where.wanted], counts.cumsum(0) - counts, counts], 1)
        counts = told[:, where.mine]  # [source, table]
        sources = (counts.flatten().cumsum(0) - counts.flatten()).view(size, tables).T.reshape(-1)
        counts = counts.T.reshape(-1)
        return (
            offsets,
            told.reshape(-1),
            leaving,
            torch.stack([sources, counts.cumsum(0) - counts, counts], 1),
        )

    @staticmethod
    def move(data: torch.Tensor, out: torch.Tensor, pieces: torch.Tensor, longest: int) -> None:
        for source, target, count in pieces.tolist():
            out[target : target + count] = data[source : source + count]


def _check_kinds(
    kinds: Sequence[tuple[torch.dtype, torch.dtype | None]], allowed: Sequence[torch.dtype]
) -> None:
    """What every rank knows of all ranks: raises on all of them."""

    def told() -> str:
        named = [
            (str(v).removeprefix("torch."), "no" if w is None else str(w).removeprefix("torch."))
            for v, w in kinds
        ]
        return "; ".join(
            f"rank {rank}: {v} values, {w} weights" for rank, (v, w) in enumerate(named)
        )

    if len(set(kinds)) > 1:
        raise RankMismatchError(
            f"asked: {told()}; allowed: the same on every rank; remedy: convert them, and pass weights on all ranks or on none"
        )
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(kinds[0][0] in allowed, told, f"{names} values", "convert the values")


def _check_sums(sums: Sequence[Sequence[int]], passed: Sequence[int]) -> None:
    """``sums`` [source][feature]. As above: all ranks raise, and name the one that is wrong."""
    from tileweave.kernels.embedding.jagged import BELOW

    wrong = [
        "lengths below 0"
        if BELOW.value in mine
        else "another number of values than its lengths sum up to"
        for mine in sums
    ]
    bad = [
        source
        for source, mine in enumerate(sums)
        if BELOW.value in mine or sum(mine) != passed[source]
    ]
    asked = ", ".join(f"rank {source}: {wrong[source]}" for source in bad)
    require(
        not bad,
        asked,
        "lengths from 0 on, and as many values as they sum up to",
        "pass all values of all bags",
    )


def _check_inputs(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    weights: torch.Tensor | None,
    size: int,
) -> int:
    """The number of features; raises on the rank that made the mistake, before anything is sent."""
    require(
        len(features) == size,
        f"features of {len(features)} ranks",
        f"{size} ranks",
        "give each rank a list",
    )
    named = [f for mine in features for f in mine]
    require(bool(named), "no features", "one at least", "name the features")
    require(
        min(named) >= 0,
        f"features {sorted(set(named))}",
        "numbers from 0 on",
        "count features from 0",
    )
    count = max(named) + 1
    fits = lengths.dim() == 1 and lengths.is_contiguous() and lengths.dtype in INTEGERS
    require(
        fits,
        f"lengths {lengths.dtype} {tuple(lengths.shape)}",
        "[F * b] integers",
        "flatten feature by feature",
    )
    asked = f"{lengths.numel()} lengths of {count} features"
    require(
        lengths.numel() % count == 0,
        asked,
        "F * b of them",
        "give every feature a length for every sample",
    )
    fits = (
        values.dim() == 1
        and values.is_contiguous()
        and values.dtype in INTEGERS
        and values.device == lengths.device
    )
    asked = f"values {values.dtype} {tuple(values.shape)} with strides {values.stride()} on {values.device}"
    require(
        fits,
        asked,
        f"one dimension, contiguous, integers, on {lengths.device}",
        "flatten feature by feature",
    )
    if weights is not None:
        fits = (
            weights.shape == values.shape
            and weights.dtype in FLOATS
            and weights.device == values.device
        )
        asked = f"weights {weights.dtype} {tuple(weights.shape)} with strides {weights.stride()} on {weights.device}"
        allowed = "a float16, bfloat16, float32 or float64 for each value, contiguous, beside it"
        require(
            fits and weights.is_contiguous(), asked, allowed, "pass as many as there are values"
        )
        tracked = torch.is_grad_enabled() and weights.requires_grad
        remedy = "detach them, or let those require it that come out, which embedding_bag_all_to_all differentiates"
        require(
            not tracked,
            "weights that require a gradient, which does not travel back",
            "weights that do not",
            remedy,
        )
    return count
