"""The device's part of ``distribute_indices``: lengths and values in the order in which they leave
and arrive.

    lengths [F * b], values [N]  feature after feature, own samples; F features
    message to an owner of T tables, int64 [T * b + F + 1]: lengths of its tables' features | how
        many values each feature has, BELOW where a length is below 0 | ``passed``, what the rank
        says of all its values: a word that nothing here reads

    pack_kernel    lengths -> messages to all owners                       | all-to-all |
    unpack_kernel  messages from all sources -> offsets, ``told`` (all that the host has to know),
                   and pieces of values
    move_kernel    values -> pieces, owner after owner | all-to-all | pieces, source after source ->
                   table after table

A *piece* is what one rank has of one table: (begin in what is read, begin in what is written,
elements). A message has the sums of all of its sender's features, so no program has to find where a
piece begins by adding up lengths.

One launch each: these run concurrently with a training step, and what they cost is host time
(decision 0034).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import tileweave.device.triton.signal  # noqa: F401 - prepares Triton's interpreter

BELOW = tl.constexpr(-1)  # in place of a feature's sum
PIECE = tl.constexpr(3)  # words of a piece
BLOCK = 2048  # elements that a program has at once
INTEGERS = ["samples", "tables", "world_size", "features", "pieces", "rank", "passed"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank owns what, on the device, all int64. It depends on features alone.

    mine : [T] features of this rank's tables.
    wanted : [P] features of all ranks' tables, rank after rank.
    owners : [P] the rank that owns each of those tables.
    tables : [R] how many tables each rank and all ranks before it have.
    features : F.
    """

    mine: torch.Tensor
    wanted: torch.Tensor
    owners: torch.Tensor
    tables: torch.Tensor
    features: int
    rank: int


@triton.jit
def pack_piece(row, place, samples, BLOCK: tl.constexpr):
    """Lengths of one feature into a message."""
    for begin in range(0, samples, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(
            place + at,
            tl.load(row + at, mask=at < samples, other=0).to(tl.int64),
            mask=at < samples,
        )


@triton.jit
def pack_sum(
    row,
    feature,
    until,
    whole,
    passed,
    samples,
    world_size,
    features,
    BLOCK: tl.constexpr,
    OWNERS: tl.constexpr,
):
    """The sum of one feature's lengths into all messages; and ``passed``, their last word, if it is
    the first feature."""
    total = tl.zeros((BLOCK,), tl.int64)
    least = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, samples, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found = tl.load(row + at, mask=at < samples, other=0).to(tl.int64)
        total += found
        least = tl.minimum(least, found)
    owner = tl.arange(0, OWNERS)
    tail = (
        whole
        + tl.load(until + owner, mask=owner < world_size, other=0) * samples
        + owner * (features + 1)
    )
    word = tl.where(tl.min(least, axis=0) < 0, BELOW, tl.sum(total, axis=0))
    tl.store(tail + feature, tl.zeros((OWNERS,), tl.int64) + word, mask=owner < world_size)
    tl.store(
        tail + features,
        tl.zeros((OWNERS,), tl.int64) + passed,
        mask=owner < tl.where(feature == 0, world_size, 0),
    )


@triton.jit(do_not_specialize=INTEGERS)
def pack_kernel(
    lengths,
    wanted,
    owners,
    until,
    whole,
    passed,
    samples,
    world_size,
    features,
    pieces,
    BLOCK: tl.constexpr,
    OWNERS: tl.constexpr,
):
    """A program for each piece of lengths, which it copies, and for each feature, whose sum it puts
    in all messages.

    ``until`` [R]: tables of an owner and of all before it.
    """
    program = tl.program_id(0)
    if program < pieces:
        row = lengths + tl.load(wanted + program) * samples
        place = program.to(tl.int64) * samples + tl.load(owners + program) * (
            features + 1
        )  # after other pieces, and sums
        pack_piece(row, whole + place, samples, BLOCK)
    else:
        row = lengths + (program - pieces).to(tl.int64) * samples
        pack_sum(
            row,
            program - pieces,
            until,
            whole,
            passed,
            samples,
            world_size,
            features,
            BLOCK,
            OWNERS,
        )


@triton.jit
def sum_below(numbers, order, end):
    """The sum of those ``numbers`` whose place in ``order`` is below ``end``."""
    return tl.sum(tl.where(order < end, numbers, 0), axis=0)


@triton.jit
def store_piece(pieces, number, source, target, count):
    tl.store(pieces + number * PIECE, source)
    tl.store(pieces + number * PIECE + 1, target)
    tl.store(pieces + number * PIECE + 2, count)


@triton.jit
def unpack_piece(
    number,
    got,
    stride,
    sums,
    mine,
    offsets,
    arriving,
    samples,
    tables,
    world_size,
    BLOCK: tl.constexpr,
    ARRIVING: tl.constexpr,
):
    """Piece ``number``, table after table, of those that come: where it goes, and the offsets of
    its bags.

    Values come source after source, and go table after table. ``sums``: where the sums begin in a
    message.
    """
    table, source = number // world_size, number % world_size
    each = tl.arange(0, ARRIVING)
    here = each < tables * world_size
    of, by = each // world_size, each % world_size
    counts = tl.load(
        got + by * stride + sums + tl.load(mine + of, mask=here, other=0), mask=here, other=0
    )
    end = sum_below(counts, each, number)
    begin = sum_below(counts, by * tables + of, source * tables + table)
    store_piece(arriving, number, begin, end, sum_below(counts, each, number + 1) - end)
    row = got + source * stride + table * samples
    place = offsets + number.to(tl.int64) * samples + 1
    for first in range(0, samples, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(row + at, mask=at < samples, other=0)
        tl.store(place + at, end + tl.cumsum(found, axis=0), mask=at < samples)
        end += tl.sum(found, axis=0)


@triton.jit
def leaving_piece(
    number, own, wanted, leaving, features, pieces, LEAVING: tl.constexpr, FEATURES: tl.constexpr
):
    """Piece ``number`` of those that leave; ``own``: sums of this rank's features."""
    each = tl.arange(0, LEAVING)
    counts = tl.load(
        own + tl.load(wanted + each, mask=each < pieces, other=0), mask=each < pieces, other=0
    )
    column = tl.arange(0, FEATURES)
    begin = sum_below(
        tl.load(own + column, mask=column < features, other=0), column, tl.load(wanted + number)
    )
    place = sum_below(counts, each, number)
    store_piece(leaving, number, begin, place, sum_below(counts, each, number + 1) - place)


@triton.jit
def tell(tails, stride, told, world_size, features, FEATURES: tl.constexpr):
    """Store the end of each message, from its sums on, in ``told``, one after the other."""
    word = tl.arange(0, FEATURES)
    for source in range(0, world_size):
        end = tl.load(tails + source * stride + word, mask=word <= features, other=0)
        tl.store(told + source * (features + 1) + word, end, mask=word <= features)


@triton.jit(do_not_specialize=INTEGERS)
def unpack_kernel(
    got,
    mine,
    wanted,
    offsets,
    told,
    leaving,
    arriving,
    samples,
    tables,
    world_size,
    features,
    pieces,
    rank,
    BLOCK: tl.constexpr,
    ARRIVING: tl.constexpr,
    LEAVING: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """A program for each piece that comes, for each that leaves, and one for ``told``.

    ``told`` [R, F + 1]: the ends of all messages. ``leaving`` [P, PIECE], ``arriving`` [T * R,
    PIECE], table after table.
    """
    program = tl.program_id(0)
    sums = tables * samples  # where they begin in a message
    stride = (sums + features + 1).to(tl.int64)
    coming = tables * world_size
    if program < coming:
        unpack_piece(
            program,
            got,
            stride,
            sums,
            mine,
            offsets,
            arriving,
            samples,
            tables,
            world_size,
            BLOCK,
            ARRIVING,
        )
    elif program < coming + pieces:
        leaving_piece(
            program - coming,
            got + rank * stride + sums,
            wanted,
            leaving,
            features,
            pieces,
            LEAVING,
            FEATURES,
        )
    else:
        tl.store(offsets, tl.zeros((), tl.int64))
        tell(got + sums, stride, told, world_size, features, FEATURES)


@triton.jit
def move_kernel(data, out, pieces, BLOCK: tl.constexpr):
    """Program (block, piece): BLOCK elements of a piece from ``data`` to ``out``."""
    piece = pieces + tl.program_id(1) * PIECE
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(piece + 2)
    tl.store(
        out + tl.load(piece + 1) + at, tl.load(data + tl.load(piece) + at, mask=mask), mask=mask
    )


def pack(lengths: torch.Tensor, passed: int, where: Layout, whole: torch.Tensor) -> None:
    """Messages to all owners into ``whole``."""
    pieces, world_size, samples = (
        where.wanted.numel(),
        where.tables.numel(),
        lengths.numel() // where.features,
    )
    pack_kernel[(pieces + where.features,)](
        lengths,
        where.wanted,
        where.owners,
        where.tables,
        whole,
        passed,
        samples,
        world_size,
        where.features,
        pieces,
        BLOCK=BLOCK,
        OWNERS=triton.next_power_of_2(world_size),
        num_warps=8,
    )


def unpack(
    got: torch.Tensor, samples: int, where: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets, told, leaving, arriving) from the messages of all sources; see
    :func:`unpack_kernel`."""
    tables, pieces, world_size = where.mine.numel(), where.wanted.numel(), where.tables.numel()
    coming, ends = tables * world_size, world_size * (where.features + 1)
    offsets = got.new_empty(coming * samples + 1)
    rest = got.new_empty(ends + (pieces + coming) * PIECE.value)
    told, leaving, arriving = rest.split([ends, pieces * PIECE.value, coming * PIECE.value])
    unpack_kernel[(coming + pieces + 1,)](
        got,
        where.mine,
        where.wanted,
        offsets,
        told,
        leaving,
        arriving,
        samples,
        tables,
        world_size,
        where.features,
        pieces,
        where.rank,
        BLOCK=BLOCK,
        ARRIVING=triton.next_power_of_2(max(coming, 1)),
        LEAVING=triton.next_power_of_2(pieces),
        FEATURES=triton.next_power_of_2(where.features + 1),
        num_warps=8,
    )
    return offsets, told, leaving, arriving


def move(data: torch.Tensor, out: torch.Tensor, pieces: torch.Tensor, longest: int) -> None:
    """Each of ``pieces``, the longest of that many elements, from ``data`` to its place in
    ``out``."""
    if longest:
        grid = (triton.cdiv(longest, BLOCK), pieces.numel() // PIECE.value)
        move_kernel[grid](data, out, pieces, BLOCK=BLOCK, num_warps=4)
