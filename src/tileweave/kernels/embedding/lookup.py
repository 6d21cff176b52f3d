"""embedding_lookup: out[s, columns of t] = sum or mean over bag (t, s) of weight * table_t[index].

On one rank:

    tables   [T] of [rows_t, D_t]  by address: ``meta`` int64 [T, 4] = (address, rows, D, first
                                   column in the result)
    indices  [N]                   table after table, sample after sample; int32 or int64
    offsets  [T * B + 1]           bag (t, s) is indices[offsets[t * B + s] :
                                   offsets[t * B + s + 1]]
    out      [B, width]

A program pools ``BAGS`` bags of one table, ``UNROLL`` rows of each at once. The time depends on how
many rows are in flight: a row of 512 bytes is one 16-byte load of each lane of a warp, and BAGS *
UNROLL such loads are issued before any is used; their indices were loaded one step earlier. Where
one bag is much longer than the others, its rows take the places of all the bags, so that as many
are in flight.

Memory safety: bags are cut to [0, N), and an index outside its table reads nothing and counts as a
vector of zeros. The order of summation depends on the lengths alone: the same bits each time. Sums
are in fp32, rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import tileweave.device.triton.signal  # noqa: F401 - prepares Triton's interpreter
from tileweave.planning.sharding import EmbeddingConfig


class Bags(NamedTuple):
    """The bags of all tables, as the module's docstring has them; ``weights``: one per index."""

    meta: Any
    indices: Any
    offsets: Any
    weights: Any


class Table(NamedTuple):
    """A table on the device: its pointer, rows and columns, and its first column in the result."""

    base: Any
    rows: Any
    dim: Any
    column: Any


class Cut(NamedTuple):
    """Decided when the kernel is compiled.

    ALIGN : elements that addresses, rows and columns are multiples of.

    BLOCK_D : columns that a program pools at once.

    BAGS : bags of a program.

    UNROLL : rows of each bag that are in flight.

    MEAN, WEIGHTED : how vectors of a bag are added.
    """

    ALIGN: int
    BLOCK_D: int
    BAGS: int
    UNROLL: int
    MEAN: bool = False
    WEIGHTED: bool = False


@triton.jit
def table_at(meta, table, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The :class:`Table` with number ``table``."""
    address = tl.load(meta + table * 4)
    base = address.to(tl.pointer_type(DTYPE), bitcast=True)
    dim = tl.load(meta + table * 4 + 2).to(tl.int32)
    column = tl.load(meta + table * 4 + 3).to(tl.int32)
    if ALIGN > 1:
        base = tl.multiple_of(base, 16)
        dim = tl.multiple_of(dim, ALIGN)
        column = tl.multiple_of(column, ALIGN)
    return Table(base, tl.load(meta + table * 4 + 1), dim, column)


@triton.jit
def load_rows(indices, begin, place, length, STRIDE: tl.constexpr, UNROLL: tl.constexpr):
    """Row numbers at ``place``, ``place + STRIDE``, ... of bags: UNROLL tensors, -1 past a bag's
    end."""
    rows = ()
    for step in tl.static_range(UNROLL):
        at = place + step * STRIDE
        rows = rows + (tl.load(indices + begin + at, mask=at < length, other=-1).to(tl.int64),)
    return rows


@triton.jit
def add_rows(acc, table, chosen, weights, position, STRIDE: tl.constexpr, C: tl.constexpr):
    """``acc`` [BAGS, BLOCK_D] plus the vectors of the UNROLL tensors of row numbers ``chosen``, all
    in flight at once."""
    BLOCK_D: tl.constexpr = C.BLOCK_D
    UNROLL: tl.constexpr = C.UNROLL
    col = tl.arange(0, BLOCK_D)
    vectors = ()
    for step in tl.static_range(UNROLL):
        row = chosen[step]
        mask = ((row >= 0) & (row < table.rows))[:, None] & (col < table.dim)[None, :]
        pointers = table.base + (row * table.dim)[:, None] + col[None, :]
        vectors = vectors + (tl.load(pointers, mask=mask, other=0.0),)
    for step in tl.static_range(UNROLL):
        vector = vectors[step].to(tl.float32)
        if C.WEIGHTED:
            row = chosen[step]
            here = (row >= 0) & (row < table.rows)
            scale = tl.load(weights + position + step * STRIDE, mask=here, other=0.0)
            vector *= scale.to(tl.float32)[:, None]
        acc += vector
    return acc


@triton.jit
def pool_bags(table, bags, num_indices, first, count, C: tl.constexpr):
    """fp32 [BAGS, BLOCK_D]: bags [first, first + BAGS) pooled, of which ``count`` exist."""
    BAGS: tl.constexpr = C.BAGS
    BLOCK_D: tl.constexpr = C.BLOCK_D
    UNROLL: tl.constexpr = C.UNROLL
    lane = tl.arange(0, BAGS)
    there = lane < count
    begin = tl.load(bags.offsets + first + lane, mask=there, other=0).to(tl.int64)
    end = tl.load(bags.offsets + first + lane + 1, mask=there, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), num_indices)
    length = tl.maximum(tl.minimum(end, num_indices) - begin, 0).to(tl.int32)
    longest = tl.max(length, axis=0)
    acc = tl.zeros((BAGS, BLOCK_D), tl.float32)
    # UNROLL is 1 where bags have one row on average. BAGS rows of a long one would then take as
    # many registers as the usual way below does; with 8, more programs fit (decision 0032).
    SPREAD: tl.constexpr = 8 if UNROLL == 1 and BAGS > 8 else BAGS
    if (longest > 4 * UNROLL) & (2 * tl.sum(length, axis=0) < longest * BAGS):
        spread = tl.arange(0, SPREAD)
        for bag in range(0, BAGS):
            start = tl.sum(tl.where(lane == bag, begin, 0), axis=0)
            size = tl.sum(tl.where(lane == bag, length, 0), axis=0)
            part = tl.zeros((SPREAD, BLOCK_D), tl.float32)
            for place in range(0, size, UNROLL * SPREAD):
                at = place + spread
                chosen = load_rows(bags.indices, start, at, size, SPREAD, UNROLL)
                part = add_rows(part, table, chosen, bags.weights, start + at, SPREAD, C)
            acc = tl.where((lane == bag)[:, None], tl.sum(part, axis=0)[None, :], acc)
    else:
        chosen = load_rows(bags.indices, begin, 0, length, 1, UNROLL)
        for place in range(0, longest, UNROLL):
            following = load_rows(bags.indices, begin, place + UNROLL, length, 1, UNROLL)
            acc = add_rows(acc, table, chosen, bags.weights, begin + place, 1, C)
            chosen = following
    if C.MEAN:
        acc = acc / tl.maximum(length, 1).to(tl.float32)[:, None]
    return acc


@triton.jit
def store_bags(acc, out, sample, count, width, table, C: tl.constexpr):
    """Round once and store ``count`` pooled vectors into rows [sample, ...) of ``out``, from the
    table's column on."""
    BAGS: tl.constexpr = C.BAGS
    BLOCK_D: tl.constexpr = C.BLOCK_D
    lane = tl.arange(0, BAGS)
    col = tl.arange(0, BLOCK_D)
    pointers = out + ((sample + lane).to(tl.int64) * width)[:, None] + (table.column + col)[None, :]
    mask = (lane < count)[:, None] & (col < table.dim)[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def block_at(number, tables, blocks, run):
    """(table, block of its bags) of a block's number: ``run`` blocks of a table, as many of the
    next one, then more blocks."""
    many = tables * run
    begin = number // many * run
    run = tl.minimum(run, blocks - begin)  # the last ones may be fewer
    within = number % many
    return within // run, begin + within % run


@triton.jit(do_not_specialize=["num_indices", "rows", "run"])
def embedding_lookup_kernel(
    bags,
    out,
    num_indices,
    batch,
    rows,
    tables,
    blocks,
    run,
    width,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """One block of bags of one table per program; the hardware deals programs out, which balances
    lengths. ``batch``: bags of a table, of which the first ``rows`` are pooled."""
    number, block = block_at(tl.program_id(0), tables, blocks, run)
    sample = block * C.BAGS
    table = table_at(bags.meta, number, DTYPE, C.ALIGN)
    first = number.to(tl.int64) * batch + sample
    count = tl.minimum(rows - sample, C.BAGS)
    acc = pool_bags(table, bags, num_indices, first, count, C)
    store_bags(acc, out, sample, count, width, table, C)


TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """How a lookup is compiled: the tables' dtype, the cut, and Triton's options. The same object
    for the same tables, columns and cut: launchers are kept by it."""

    dtype: Any
    cut: Cut
    options: dict[str, int]


def constants(
    tables: Sequence[torch.Tensor],
    columns: tuple[int, ...],
    width: int,
    itemsize: int,
    config: EmbeddingConfig,
) -> Compiled:
    """How a lookup in ``tables`` is compiled, whose result has elements of ``itemsize`` bytes."""
    dtype, dims = tables[0].dtype if tables else torch.float32, tuple(t.shape[1] for t in tables)
    return _constants(
        dtype, dims, all(t.data_ptr() % 16 == 0 for t in tables), columns, width, itemsize, config
    )


@functools.lru_cache(64)
def _constants(
    dtype: torch.dtype,
    dims: tuple[int, ...],
    aligned: bool,
    columns: tuple[int, ...],
    width: int,
    itemsize: int,
    config: EmbeddingConfig,
) -> Compiled:
    elements = 16 // min(dtype.itemsize, itemsize) if dims else 1
    aligned = aligned and all(count % elements == 0 for count in (width, *columns, *dims))
    block_d = triton.next_power_of_2(max((1, *dims)))
    cut = Cut(elements if aligned else 1, block_d, config.bags, config.unroll)
    return Compiled(TYPES[dtype], cut, {"num_warps": config.num_warps, "num_stages": 1})


def launch(
    bags: Bags,
    tables: Sequence[torch.Tensor],
    columns: tuple[int, ...],
    out: torch.Tensor,
    batch: int,
    mean: bool,
    config: EmbeddingConfig,
) -> None:
    """Pool bags of all tables into ``out`` [rows, width] on the current stream: the first ``rows``
    of the ``batch`` bags of each table. ``bags.weights`` may be None."""
    blocks = triton.cdiv(out.shape[0], config.bags)
    if not tables or not blocks:
        return
    made = constants(tables, columns, out.shape[1], out.element_size(), config)
    meta, indices, offsets, weights = bags
    bags = Bags(meta, indices, offsets, indices if weights is None else weights)
    embedding_lookup_kernel[(len(tables) * blocks,)](
        bags,
        out,
        indices.numel(),
        batch,
        out.shape[0],
        len(tables),
        blocks,
        config.run_of(blocks),
        out.shape[1],
        DTYPE=made.dtype,
        C=made.cut._replace(MEAN=mean, WEIGHTED=weights is not None),
        **made.options,
    )
