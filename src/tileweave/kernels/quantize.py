"""Quantisation of rows to float8_e4m3fn, with one float32 scale for a row or for 128 elements.

    x      [rows, K]      bf16, fp16 or fp32
    data   [rows, K]      x / scale, rounded to the nearest number of FP8, ties to even
    scale  [rows], or [K/128, rows] of blocks     max |x| / 448 over the elements that share it

Or both in one row, as tokens of experts travel: data, then the scales of its blocks (``Pitch``).

Saturation: quotients are clamped to +-448 before they are rounded, so that no number becomes NaN.
Where max |x| is below ``LEAST``, the scale is ``LEAST`` / 448, so that a row of zeros stays zeros.
NaN or an infinity makes the scale NaN or infinite, and NaN of products with that row or block.
With ``POWERS`` scales are rounded up to powers of two, as recipes of training have them.

One program per row: a row is read once, before any of it is sent. Sends nothing.

Products of a backward sum over rows, and tensor cores read FP8 along the sum only. So x.T of x
[rows, cols] is quantised, too, with one scale for a column of x or for all of it, in two launches
by tiles: the maxima, then the numbers, turned. x is read twice, and written once, as FP8. Both
operands of a gradient of w are turned by the same two launches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tileweave.device.triton.signal import INTERPRETED
from tileweave.kernels.runtime.launch import Call, Launcher, alignment

LEAST = 1e-12  # as torchao has it
GROUP = 128
SMALLEST = tl.constexpr(LEAST)
GREATEST = tl.constexpr(448.0)


@triton.jit
def to_fp8(value):
    """The bits (uint8) of fp32 values in float8_e4m3fn; values are within +-448, or NaN.

    The interpreter's own conversion is wrong for ties, subnormals and NaN, so it is done in
    integers there.
    """
    if INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # a float32 has 20 bits of fraction more, and an exponent that is 120 larger
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # below 2 ** -6 numbers are 2 ** -9 apart, as those of float32 are above 2 ** 14
        small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        found = tl.where(size < 0x3C800000, small, normal)
        found = tl.where(size > 0x7F800000, 0x7F, found)
        return (found | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def greatest_of(values):
    """The largest |value| of each row of [n, GROUP]; NaN if one is NaN, which tl.max drops."""
    size = tl.abs(values)
    missing = tl.max((size != size).to(tl.int32), axis=1)
    return tl.where(missing != 0, float("nan"), tl.max(size, axis=1))


@triton.jit
def quantized(values, greatest, POWERS: tl.constexpr = False):
    """(bits of values / scale, scale) of [n, GROUP], of which row i has ``greatest[i]``."""
    # written so that NaN stays NaN
    largest = tl.where(greatest < SMALLEST, SMALLEST, greatest)
    scale = tl.div_rn(largest, tl.full(largest.shape, GREATEST, tl.float32))
    if POWERS:  # the exponent is one larger unless the fraction is 0; infinity has no fraction
        power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23 << 23
        scale = tl.where(scale == scale, power.to(tl.float32, bitcast=True), scale)
        # exact, and faster than a division: the inverse of these scales is a normal number, or 0
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        quotient = values * tl.broadcast_to(inverse[:, None], values.shape)
    else:
        quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    quotient = tl.where(quotient > GREATEST, GREATEST, quotient)
    return to_fp8(tl.where(quotient < -GREATEST, -GREATEST, quotient)), scale


class Pitch(NamedTuple):
    """Bytes from a row of data to the next; elements from the scale of a row to that of the next,
    and from that of a block."""

    data: int
    scale_row: int
    scale_block: int


@triton.jit(do_not_specialize=["scale_row", "scale_block", "rows"])
def quantize_kernel(
    x,
    other,
    data,
    other_data,
    scale,
    other_scale,
    pitch,
    scale_row,
    scale_block,
    depth,
    rows,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS: tl.constexpr,
    BOTH: tl.constexpr,
):
    """``GROUP`` = ``BLOCK``: one scale for a row, of at most ``BLOCK`` elements; else one for
    ``GROUP`` elements. ``BOTH``: the rows of ``other`` follow those of x, of which there are
    ``rows``."""
    row = tl.program_id(0)
    if BOTH:
        if row >= rows:
            x, data, scale, row = other, other_data, other_scale, row - rows
    begin = row.to(tl.int64) * depth
    data += row.to(tl.int64) * pitch
    scale += row.to(tl.int64) * scale_row
    lane = tl.arange(0, BLOCK)
    if GROUP == BLOCK:
        values = tl.load(x + begin + lane, mask=lane < depth, other=0.0).to(tl.float32)
        values = tl.reshape(values, (1, BLOCK))
        bits, one = quantized(values, greatest_of(values), POWERS)
        tl.store(data + lane, tl.reshape(bits, (BLOCK,)), mask=lane < depth)
        tl.store(scale + tl.arange(0, 1), one)
    else:
        count: tl.constexpr = BLOCK // GROUP
        for first in range(0, depth, BLOCK):
            at = first + lane
            values = tl.load(x + begin + at, mask=at < depth, other=0.0).to(tl.float32)
            values = tl.reshape(values, (count, GROUP))
            bits, each = quantized(values, greatest_of(values), POWERS)
            tl.store(data + at, tl.reshape(bits, (BLOCK,)), mask=at < depth)
            group = first // GROUP + tl.arange(0, count)
            place = group.to(tl.int64) * scale_block
            tl.store(scale + place, each, mask=group * GROUP < depth)


def quantize_launcher(
    rows: int,
    depth: int,
    in_blocks: bool,
    powers: bool = False,
    pitch: Pitch | None = None,
    other_rows: int = 0,
) -> Launcher:
    """Launches for x [rows, depth], contiguous, called with x, data of one byte each, and the
    scales; with ``other_rows`` then with the same of another tensor [other_rows, depth].

    in_blocks : one scale for 128 elements, stored [ceil(depth / 128), rows]; of x alone.
    powers : scales are powers of two.
    pitch : of data and scales; None: they are contiguous.
    """
    pitch = pitch or Pitch(depth, 1, rows)
    block = 2048 if in_blocks else max(triton.next_power_of_2(depth), GROUP)

    def pack(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *more: torch.Tensor) -> Call:
        tensors = x, data, scale, *more
        words = [t.data_ptr() for t in tensors]

        def changing() -> dict[str, Any]:
            other, other_data, other_scale = more or (x, data, scale)
            return {
                "x": x,
                "other": other,
                "data": data.view(torch.uint8),
                "other_data": other_data.view(torch.uint8),
                "scale": scale,
                "other_scale": other_scale,
            }

        return (x.dtype, alignment(words)), words, changing, ()

    fixed = {
        "pitch": pitch.data,
        "scale_row": pitch.scale_row,
        "scale_block": pitch.scale_block,
        "depth": depth,
        "rows": rows,
        "BLOCK": block,
        "GROUP": GROUP if in_blocks else block,
        "POWERS": powers,
        "BOTH": other_rows > 0,
    }
    words = "x", "data", "scale", "other", "other_data", "other_scale"
    return Launcher(
        quantize_kernel,
        rows + other_rows,
        fixed,
        pack,
        words if other_rows else words[:3],
        num_warps=4 if block <= 4096 else min(32, max(8, block // 2048)),
    )


# --- Columns ---


@triton.jit
def maxima_kernel(
    x,
    other,
    greatest,
    rows,
    cols,
    other_cols,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    WHOLE: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Store max |x| of each column, or of all (``WHOLE``), in ``greatest``, which has zeros; with
    ``BOTH`` then those of each column of ``other`` [rows, other_cols].

    As bits of float32 without the sign: of those a NaN is the largest integer, then infinity.
    """
    place = tl.program_id(0)
    if BOTH:
        first = tl.cdiv(cols, TILE_COLS) * tl.cdiv(rows, STEPS * TILE_ROWS)
        if place >= first:
            x, greatest, place, cols = other, greatest + cols, place - first, other_cols
    tiles = tl.cdiv(cols, TILE_COLS)
    col = place % tiles * TILE_COLS + tl.arange(0, TILE_COLS)
    row = place // tiles * (STEPS * TILE_ROWS) + tl.arange(0, TILE_ROWS)
    most = tl.zeros((TILE_ROWS, TILE_COLS), tl.int32)
    for step in tl.static_range(STEPS):  # loads of all steps are queued at once
        at = row + step * TILE_ROWS
        source = x + at.to(tl.int64)[:, None] * cols + col[None, :]
        inside = (at < rows)[:, None] & (col < cols)[None, :]
        values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    found = tl.max(most, axis=0)
    if WHOLE:
        tl.atomic_max(greatest, tl.max(found, axis=0), sem="relaxed")
    else:
        tl.atomic_max(greatest + col, found, mask=col < cols, sem="relaxed")


@triton.jit
def turn_kernel(
    x,
    other,
    greatest,
    data,
    other_data,
    scale,
    other_scale,
    rows,
    cols,
    other_cols,
    pitch,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Store x.T as FP8 in ``data`` [cols, pitch], with zeros from column ``rows`` on, and the
    scale of each of its rows, powers of two, by what :func:`maxima_kernel` found; with ``BOTH``
    then those of ``other``. ``WHOLE``: all scales are equal."""
    place = tl.program_id(0)
    if BOTH:
        first = tl.cdiv(cols, TILE) * tl.cdiv(pitch, TILE)
        if place >= first:
            x, greatest, place, cols = other, greatest + cols, place - first, other_cols
            data, scale = other_data, other_scale
    tiles = tl.cdiv(cols, TILE)
    col = place % tiles * TILE + tl.arange(0, TILE)
    row = place // tiles * TILE + tl.arange(0, TILE)
    source = x + row.to(tl.int64)[:, None] * cols + col[None, :]
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:
        most = tl.load(greatest + tl.zeros((TILE,), tl.int32))
    else:
        most = tl.load(greatest + col, mask=col < cols, other=0)
    bits, each = quantized(tl.trans(values), most.to(tl.float32, bitcast=True), True)
    bits = tl.where((row < rows)[None, :], bits, 0)  # where the scale is NaN they are not
    target = data + col.to(tl.int64)[:, None] * pitch + row[None, :]
    tl.store(target, bits, mask=(col < cols)[:, None] & (row < pitch)[None, :])
    of_columns = place < tiles  # the first of the programs of these columns
    tl.store(scale + col, each, mask=of_columns & (col < cols))


def columns_launchers(
    rows: int, cols: int, pitch: int, whole: bool, other_cols: int
) -> tuple[Launcher, Launcher]:
    """Launches for x [rows, cols] and another tensor [rows, other_cols], contiguous and of one
    dtype. The first is called with both and the maxima, int32 zeros, [cols + other_cols]; the
    second with these, data of one byte each, [cols, pitch] and [other_cols, pitch], and the scales
    of both. Without columns the other tensors may be any.

    pitch : ``rows`` or more.
    whole : one scale for all of x, without another tensor.
    """
    steps, tile_rows, tile_cols, tile = 4, 32, 128, 128

    def pack(*tensors: torch.Tensor) -> Call:
        words = tuple([t.data_ptr() for t in tensors])

        def changing() -> dict[str, Any]:
            x, other, greatest, *made = tensors
            found = {"x": x, "other": other, "greatest": greatest}
            if made:
                found["data"], found["other_data"] = (t.view(torch.uint8) for t in made[:2])
                found["scale"], found["other_scale"] = made[2:]
            return found

        return (tensors[0].dtype, alignment(words)), words, changing, ()

    sizes = {"rows": rows, "cols": cols, "other_cols": other_cols, "WHOLE": whole}
    sizes["BOTH"] = other_cols > 0
    tiles = triton.cdiv(cols, tile_cols) + triton.cdiv(other_cols, tile_cols)
    maxima = Launcher(
        maxima_kernel,
        tiles * triton.cdiv(rows, steps * tile_rows),
        {**sizes, "STEPS": steps, "TILE_ROWS": tile_rows, "TILE_COLS": tile_cols},
        pack,
        ("x", "other", "greatest"),
        num_warps=4,
    )
    turned = Launcher(
        turn_kernel,
        (triton.cdiv(cols, tile) + triton.cdiv(other_cols, tile)) * triton.cdiv(pitch, tile),
        {**sizes, "pitch": pitch, "TILE": tile},
        pack,
        ("x", "other", "greatest", "data", "other_data", "scale", "other_scale"),
        num_warps=8,
    )
    return maxima, turned
