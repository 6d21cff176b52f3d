"""Gradients of tables, or a step, from the gradients of pooled vectors, on the rank that has the
tables.

``grad`` [B, sum of local dims] has the gradient of this rank's columns for all samples. Positions
of all bags are sorted by table row (a stable sort), runs of equal rows are summed in order
(``kernels/embedding/table_sums.py``), and each sum is applied once:

========  ===================================================================================
dense     a tensor of the table's shape
sparse    a coalesced COO tensor; its size depends on data, so the host waits for the device
sgd       ``w -= rate * g`` in place, for rows that were looked up
adagrad   row-wise: ``m += mean(g * g)``; ``w -= rate * g / (sqrt(m) + epsilon)``, m fp32 [rows]
========  ===================================================================================

The fused steps are those of FBGEMM's EXACT_SGD and EXACT_ROWWISE_ADAGRAD: duplicates are summed
before the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tileweave.transport.lasting_memory import lasting

if TYPE_CHECKING:
    from tileweave.kernels.embedding.gradient import Push

KINDS = ("dense", "sparse", "sgd", "adagrad")


class Update(NamedTuple):
    """What is made of gradients, one of ``KINDS``. A step in place also has a rate; "adagrad" a
    state of each table and epsilon."""

    kind: str
    states: Sequence[torch.Tensor] = ()
    rate: torch.Tensor | None = None
    epsilon: float = 0.0


@dataclass(frozen=True, slots=True)
class Lookups:
    """The bags of this rank's tables: indices, offsets and weights of a lookup."""

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    batch: int
    mean: bool

    def bags(self) -> torch.Tensor:
        """[N] int64: the bag of each position; -1 or past the last for positions in no bag."""
        positions = torch.arange(
            self.indices.numel(), device=self.indices.device, dtype=self.offsets.dtype
        )
        return torch.searchsorted(self.offsets, positions, right=True) - 1

    def scales(self, bags: torch.Tensor) -> torch.Tensor | None:
        """[N] fp32: factor of each position's gradient; None if all are 1."""
        found = None if self.weights is None else self.weights.float()
        if self.mean and self.offsets.numel() > 1:  # without bags there are no lengths
            lengths = (self.offsets[1:] - self.offsets[:-1]).clamp(min=1)
            found = 1.0 / lengths.float()[bags.clamp(0, lengths.numel() - 1)]
        return found


# tensors that captured graphs read, kept until the process ends
_IN_GRAPHS: dict[int, torch.Tensor] = {}


def on_device(words: tuple, device: torch.device) -> torch.Tensor:
    """``words`` as an int64 tensor, made once.

    A copy from the host makes the host wait for all that was queued before.
    """
    found = _on_device(words, device)
    if type(found) is not torch.Tensor:  # while tracing, a tensor without data: for this call only
        _on_device.cache_clear()
    keep_for_graphs(found)
    return found


def copied(words: Any, device: torch.device) -> torch.Tensor:
    """``words`` as an int64 tensor that outlives this call."""
    made = torch.tensor(words, dtype=torch.int64, device="cpu")
    return lasting(functools.partial(made.to, device), device)


_on_device = functools.lru_cache(128)(copied)


def keep_for_graphs(words: torch.Tensor) -> None:
    """Keep ``words`` for a graph that is being captured: the cache may drop them."""
    if words.is_cuda and torch.cuda.is_current_stream_capturing():
        _IN_GRAPHS[id(words)] = words


def used_on(stream: torch.cuda.Stream, *tensors: torch.Tensor | None) -> None:
    """Record that ``stream`` uses these tensors of another stream, so that their memory is not
    reused before."""
    for t in tensors:
        if t is not None:
            t.record_stream(stream)


def keys_in_torch(
    tables: Sequence[torch.Tensor], lookups: Lookups, first: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, bags) of each position in plain torch; see ``kernels/embedding/table_sums.py``."""
    bags = lookups.bags()
    here = (bags >= 0) & (bags < len(tables) * lookups.batch)
    table = bags.clamp(0, max(len(tables) * lookups.batch - 1, 0)) // max(lookups.batch, 1)
    begins = on_device(tuple(first), bags.device)
    here &= (lookups.indices >= 0) & (lookups.indices < begins[table + 1] - begins[table])
    return torch.where(here, begins[table] + lookups.indices, first[-1]), bags


@dataclass(frozen=True, slots=True)
class SortedLookups:
    """Positions sorted by table row: what sums of gradients need, and what can be computed before
    them.

    keys : [N]
        Table row over all tables, ascending; ``first[-1]`` where there is none.

    bags : [N]
        The bag of each position.

    scales : [N] fp32, or None
        The factor of each position.

    first : list of int
        The first key of each table, and the end.

    ready : event, or None
        Recorded after the sort, on another stream.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    scales: torch.Tensor | None
    first: list[int]
    ready: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait for the sort."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            used_on(torch.cuda.current_stream(), self.keys, self.bags, self.scales)


def sort_lookups(tables: Sequence[torch.Tensor], lookups: Lookups, compiled: bool) -> SortedLookups:
    """Sort positions by table row, stably, on the current stream."""
    if not tables:
        nothing = lookups.indices.new_empty(0)
        return SortedLookups(nothing, nothing, None, [0])
    first = [0]
    for table in tables:
        first.append(first[-1] + table.shape[0])
    if compiled:
        from tileweave.kernels.embedding.table_sums import find_keys

        firsts = on_device(tuple(first), lookups.indices.device)
        keys, bags = find_keys(lookups.indices, lookups.offsets, firsts, first[-1], lookups.batch)
    else:
        keys, bags = keys_in_torch(tables, lookups, first)
    keys, order = torch.sort(keys, stable=True)
    scales = lookups.scales(bags)
    return SortedLookups(keys, bags[order], None if scales is None else scales[order], first)


@functools.lru_cache(32)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def sort_concurrently(
    tables: Sequence[torch.Tensor], lookups: Lookups, compiled: bool
) -> SortedLookups:
    """Start :func:`sort_lookups` concurrently with what is queued next on the current stream.

    For example with a push of gradients, which uses links and not multiprocessors.
    """
    if not lookups.indices.is_cuda or not tables:
        return sort_lookups(tables, lookups, compiled)
    stream = _side_stream(lookups.indices.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = sort_lookups(tables, lookups, compiled)
        ready = torch.cuda.Event()
        ready.record()
    used_on(stream, lookups.indices, lookups.offsets, lookups.weights)
    return replace(found, ready=ready)


class Part(NamedTuple):
    """Tables whose gradients are there after ``wait()``; see ``gradient_over_nodes.py``. ``held``
    is read by others until the end of the call."""

    tables: slice
    wait: Callable[[], None]
    held: torch.Tensor


def table_gradients(
    grad: torch.Tensor,
    tables: Sequence[torch.Tensor],
    lookups: Lookups,
    ordered: SortedLookups,
    factor: float,
    update: Update,
    compiled: bool = True,
    push: Push | None = None,
    parts: Sequence[Part] = (),
) -> list[torch.Tensor]:
    """Return the gradients of ``tables`` (dense, sparse), or none after a step in place (sgd,
    adagrad).

    ordered : the lookups by table row, from :func:`sort_concurrently`.

    compiled : use Triton kernels; otherwise plain torch, which is faster on the CPU.

    push : sends ``grad``, launched with the sums.

    parts : tables whose gradients come one part after another, all of them; else all are there.
    """
    if not tables:
        return []
    ordered.wait()
    keys, first, kind = ordered.keys, ordered.first, update.kind
    columns = [0]
    for table in tables:
        columns.append(columns[-1] + table.shape[1])
    if not compiled:
        for part in parts:
            part.wait()
        return _in_torch(grad, tables, lookups.batch, ordered, columns, factor, update)
    from tileweave.kernels.embedding.table_sums import (
        ADAGRAD,
        DENSE,
        SGD,
        SPARSE,
        Numbers,
        Positions,
        sum_rows,
    )

    number = {"dense": DENSE, "sparse": SPARSE, "sgd": SGD, "adagrad": ADAGRAD}[kind]
    places, rows, ends = None, None, [0] * (len(tables) + 1)
    targets: list[torch.Tensor] = list(tables)
    if kind == "dense":
        targets = [torch.zeros_like(table) for table in tables]
    elif kind == "sparse":
        opens = torch.ones_like(keys, dtype=torch.bool)
        opens[1:] = keys[1:] != keys[:-1]
        opens &= keys < first[-1]
        places = torch.cumsum(opens, 0) - 1
        rows = keys[opens].long()
        ends = torch.searchsorted(rows, on_device(tuple(first), keys.device)).tolist()
        targets = [t.new_empty(ends[i + 1] - ends[i], t.shape[1]) for i, t in enumerate(tables)]
    addresses = [state.data_ptr() for state in update.states] or [0] * len(tables)
    own = [0] * len(tables) if push is None else push.columns
    words = [
        (t.data_ptr(), first[i], tables[i].shape[1], columns[i], own[i], addresses[i], ends[i])
        for i, t in enumerate(targets)
    ]
    widest = max(table.shape[1] for table in tables)
    elements = 16 // min(tables[0].element_size(), grad.element_size())
    whole = all(t.shape[1] % elements == 0 for t in tables) and all(
        t.data_ptr() % 16 == 0 for t in (grad, *targets)
    )
    whole = whole and (push is None or push.aligned > 1)
    numbers = Numbers(update.epsilon, keys.numel(), first[-1], lookups.batch)
    # before the waits: making one may wait for the device
    metas = [on_device(_of_part(words, part), grad.device) for part in parts or (None,)]
    for part, meta in zip(parts or (None,), metas, strict=True):
        if part is not None:
            part.wait()
        positions = Positions(keys, ordered.bags, ordered.scales, places, meta, rate=update.rate)
        sum_rows(
            grad,
            positions,
            numbers,
            factor,
            tables[0].dtype,
            widest,
            number,
            elements if whole else 1,
            push=push,
        )
    if kind == "sparse" and rows is not None:
        return [
            _coo(rows[ends[i] : ends[i + 1]] - first[i], targets[i], t)
            for i, t in enumerate(tables)
        ]
    return targets if kind == "dense" else []


def _of_part(words: list[tuple[int, ...]], part: Part | None) -> tuple[tuple[int, ...], ...]:
    """What a launch for these tables is told: the others have no columns."""
    if part is None:
        return tuple(words)
    mine = range(len(words))[part.tables]
    return tuple(word if i in mine else (*word[:2], 0, *word[3:]) for i, word in enumerate(words))


def _coo(rows: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        rows[None], values, table.shape, is_coalesced=True, check_invariants=False
    )


def _in_torch(
    grad: torch.Tensor,
    tables: Sequence[torch.Tensor],
    batch: int,
    ordered: SortedLookups,
    columns: list[int],
    factor: float,
    update: Update,
) -> list[torch.Tensor]:
    """The same in plain torch, in order of positions, so deterministic on the CPU."""
    keys, bags, scales, first = ordered.keys, ordered.bags, ordered.scales, ordered.first
    kind, states, rate, epsilon = update
    found = []
    for number, table in enumerate(tables):
        mine = (keys >= first[number]) & (keys < first[number + 1])
        values = grad[bags[mine] % batch, columns[number] : columns[number + 1]].float()
        if scales is not None:
            values = values * scales[mine][:, None]
        rows, where = torch.unique_consecutive(keys[mine] - first[number], return_inverse=True)
        total = values.new_zeros(rows.numel(), table.shape[1]).index_add_(0, where, values) * factor
        if kind == "dense":
            found.append(torch.zeros_like(table).index_copy_(0, rows, total.to(table.dtype)))
        elif kind == "sparse":
            found.append(_coo(rows, total.to(table.dtype), table))
        else:
            assert rate is not None, "a fused step has a rate"
            step = rate * total
            if kind == "adagrad":
                states[number].index_add_(0, rows, total.square().sum(1) / max(table.shape[1], 1))
                step = step / (states[number][rows].sqrt() + epsilon)[:, None]
            table.index_copy_(0, rows, (table[rows].float() - step).to(table.dtype))
    return found


def weight_gradients(
    grad: torch.Tensor, tables: Sequence[torch.Tensor], lookups: Lookups, factor: float
) -> torch.Tensor:
    """[N]: the gradient of per-sample weights: dot product of vector and gradient; 0 where out of
    range."""
    assert lookups.weights is not None, "only asked for where there are weights"
    found = torch.zeros(lookups.indices.numel(), dtype=torch.float32, device=grad.device)
    bags, column, chunk = lookups.bags(), 0, 1 << 16
    for number, table in enumerate(tables):
        here = (
            (bags // max(lookups.batch, 1) == number)
            & (lookups.indices >= 0)
            & (lookups.indices < table.shape[0])
        )
        for positions in here.nonzero().flatten().split(chunk):
            vectors = table[lookups.indices[positions].long()].float()
            slices = grad[bags[positions] % lookups.batch, column : column + table.shape[1]].float()
            found[positions] = (vectors * slices).sum(1) * factor
        column += table.shape[1]
    return found.to(lookups.weights.dtype)
