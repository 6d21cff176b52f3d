"""distribute_indices: from all features of this rank's samples to all samples of this rank's
features.

A rank owns the features whose tables it has. Jagged tensors have the layout of TorchRec's
KeyedJaggedTensor: ``lengths`` [F * b], sorted by feature, then by sample; ``values`` [sum of
lengths] in the same order. The results are what ``embedding_bag_all_to_all`` takes.

There are two all-to-alls, of lengths and of values. The sizes of the second depend on data, so the
host waits for the device once. Two separate calls avoid this wait:

- ``begin_distribute_indices``, for batch n + 2: lengths are sent; what arrives, and its sums, are
  copied to host memory.
- ``finish``, for batch n + 1, a step later: the host waits for those, values are sent, and pieces
  are put into the order of tables.

Unfused, since an index is a few bytes for each row of hundreds of bytes that it fetches.

Source: the input distribution of TorchRec (KJTAllToAll), and its two halves in
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
from torch._compile import _disable_dynamo  # torch.compiler.disable would import Dynamo now

from tileweave.errors import RankMismatchError, require
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.collectives import all_to_all_whole
from tileweave.ops.core.debug_agreement import breaking_off
from tileweave.ops.core.registry import Group, agree, debugging, group_of, interpreting, name_of
from tileweave.ops.embedding.table_gradient import on_device, used_on

if TYPE_CHECKING:
    from tileweave.kernels.embedding.jagged import Layout

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = tuple(product(INTEGERS, (None, *FLOATS)))  # of values and weights; None: no weights
Distributed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@checks_types
def distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: Group | None = None,
) -> Distributed:
    """Send each feature's indices to the ranks that have its table, or parts of it.

    Parameters
    ----------
    lengths : [F * b] integers
        Number of values of each feature and sample, for b samples on each rank (the same number). F
        is one more than the highest feature in ``features``.

    values : [sum(lengths)] integers
        Indices, of one dtype on all ranks.

    features : sequence of sequences of int
        For each rank, the feature of each of its tables, in the order of its tables. A feature may
        go to several ranks.

    weights : [sum(lengths)], optional
        Per-sample weights, float16, bfloat16, float32 or float64, of one dtype on all ranks. On all
        ranks or on none.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    Returns
    -------
    indices : [N]
        For this rank's T tables and the global batch B = R * b.
    offsets : [T * B + 1], int64
        Where each bag begins.
    weights : [N] or None
        The weights of the indices.

    Raises
    ------
    InputError
        (a ValueError) Arguments that do not fit: on the rank that passed them, before anything is
        sent. What only the device knows (lengths and values that do not agree): on every rank, with
        the number of the rank.
    RankMismatchError
        On every rank: ranks differ in the dtype of values or of weights, or only some have weights.
        A different number of samples, or different features, on some rank: only with
        ``TILEWEAVE_DEBUG=1``.
    PeerTimeout
        A peer does not call in time.

    Notes
    -----
    Source: TorchRec's KJTAllToAll.
    """
    return begin_distribute_indices(
        lengths, values, features, weights=weights, group=group
    ).finish()


@_disable_dynamo
@checks_types
def begin_distribute_indices(
    lengths: torch.Tensor,
    values: torch.Tensor,
    features: Sequence[Sequence[int]],
    *,
    weights: torch.Tensor | None = None,
    group: Group | None = None,
) -> IndicesOnTheirWay:
    """Begin :func:`distribute_indices` without waiting for the device; ``finish()`` of the result
    ends it.

    Takes the same arguments. What the host can see is checked here, the rest by ``finish()``. Both
    halves are collective. Call ``finish()`` on the same stream, or on one that is ordered after it.
    Compilers trace neither half, since sizes depend on data.

    Parameters
    ----------
    lengths : [F * b] integers
        Number of values of each feature and sample, for b samples on each rank (the same number). F
        is one more than the highest feature in ``features``.

    values : [sum(lengths)] integers
        Indices, of one dtype on all ranks.

    features : sequence of sequences of int
        For each rank, the feature of each of its tables, in the order of its tables. A feature may
        go to several ranks.

    weights : [sum(lengths)], optional
        Per-sample weights, float16, bfloat16, float32 or float64, of one dtype on all ranks. On all
        ranks or on none.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    Returns
    -------
    IndicesOnTheirWay
        Call its ``finish()``.

    Raises
    ------
    InputError
        (a ValueError) Arguments that do not fit, before anything is sent.
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
    # also around the checks: a rank that refuses its input must not leave the others waiting
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
    # the last word of a message has both
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
    """Kept, since batches of a training loop have the same layout."""
    from tileweave.kernels.embedding.jagged import Layout

    pieces = [(feature, owner) for owner, mine in enumerate(features) for feature in mine]
    until = accumulate(len(mine) for mine in features)
    words = features[rank], *zip(*pieces, strict=True), until
    mine, wanted, owners, tables = (on_device(tuple(w), device) for w in words)
    return Layout(mine, wanted, owners, tables, count, rank)


@dataclass(frozen=True, slots=True)
class IndicesOnTheirWay:
    """A distribution that :func:`begin_distribute_indices` began: its lengths were sent, its values
    were not. Call :meth:`finish` to get the indices.
    """

    # told, in host memory once ready: per rank, the number of values of each feature, then the
    # number of values passed, times len(KINDS), plus the index of their kind. leaving and arriving:
    # pieces of values, see kernels/embedding/jagged.py. steps: that module, or InTorch.

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
        """Wait for ``told``, send the values, and return what :func:`distribute_indices` returns.

        ``allowed``: dtypes of values. Others are refused on every rank, before they are sent.
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
        """Send ``data``. ``split`` [owner][table], ``incoming`` [source][table]: elements of each
        piece."""
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
    """What the kernels do, in plain torch: on the CPU without interpreted kernels."""

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
    """Check dtypes of all ranks; raises on every rank."""

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
            f"asked: {told()}; allowed: the same on every rank; remedy: convert them, "
            "and pass weights on all ranks or on none"
        )
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(kinds[0][0] in allowed, told, f"{names} values", "convert the values")


def _check_sums(sums: Sequence[Sequence[int]], passed: Sequence[int]) -> None:
    """Check ``sums`` [source][feature] against ``passed``; raises on every rank, naming the wrong
    one."""
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
    """Return the number of features; raise for bad arguments, before anything is sent."""
    require(
        len(features) == size,
        f"features of {len(features)} ranks",
        f"{size} ranks",
        "give each rank a list",
    )
    named = [f for mine in features for f in mine]
    require(bool(named), "no features", "at least one", "name the features")
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
    asked = (
        f"values {values.dtype} {tuple(values.shape)} with strides {values.stride()} "
        f"on {values.device}"
    )
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
        asked = (
            f"weights {weights.dtype} {tuple(weights.shape)} with strides {weights.stride()} "
            f"on {weights.device}"
        )
        allowed = (
            "a float16, bfloat16, float32 or float64 for each value, contiguous, "
            f"on {values.device}"
        )
        require(
            fits and weights.is_contiguous(), asked, allowed, "pass as many as there are values"
        )
        tracked = torch.is_grad_enabled() and weights.requires_grad
        remedy = (
            "detach them, or require gradients of the weights that are returned, which "
            "embedding_bag_all_to_all differentiates"
        )
        require(
            not tracked,
            "weights that require a gradient, which is not sent back",
            "weights that do not",
            remedy,
        )
    return count
