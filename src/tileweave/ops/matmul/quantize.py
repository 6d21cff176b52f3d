"""``tileweave.quantize``: a tensor as an FP8 operand (data, scale).

Scales are max |x| / 448 over the elements that share one, and quotients are clamped to +-448
before they are rounded: no number becomes NaN, whatever torch does with those beyond.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tileweave.errors import require
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.registry import interpreting
from tileweave.ops.matmul.scaled import ALIGN, BLOCK, FP8, GREATEST, blocks

if TYPE_CHECKING:
    from tileweave.kernels.runtime.launch import Launcher

LEAST = 1e-12  # the least maximum: zeros keep a scale that is not 0
KINDS = ("tensor", "row", "block", "tile")


@checks_types
def quantize(x: torch.Tensor, kind: str = "row") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to float8_e4m3fn, with float32 scales: ``x`` is about ``data * scale``.

    For operands of ``all_gather_matmul``, ``matmul_reduce_scatter`` and ``matmul_all_reduce``; with
    ``"block"`` and ``"tile"`` also of the operators of experts.

    Parameters
    ----------
    x : [..., K]
        bfloat16, float16 or float32; of ``"tile"`` [N, K].

    kind : str
        Which elements share a scale. ``"tensor"``: all. ``"row"``: those of a row, also of a row of
        a weight [N, K]. ``"block"``: 128 along K. ``"tile"``: 128 x 128, for weights that go with
        ``"block"`` of x.

    Returns
    -------
    data : [..., K]
        float8_e4m3fn: x / scale, clamped to +-448 and rounded to nearest, ties to even.
    scale : [1], [..., 1], [..., ceil(K/128)], or [ceil(N/128), ceil(K/128)]
        float32: the largest absolute value of these elements (at least 1e-12) / 448. NaN and
        infinity make the scale, and so the product, NaN.

    Neither has a gradient.

    Raises
    ------
    InputError
        (a ValueError) Another dtype, shape or kind.
    """
    require(
        kind in KINDS, f"quantize(x, {kind!r})", ", ".join(map(repr, KINDS)), "pass one of these"
    )
    require(
        x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.dim() >= 1,
        f"quantize of {x.dtype} {tuple(x.shape)}",
        "[..., K] of bfloat16, float16 or float32",
        "convert x",
    )
    require(
        kind != "tile" or x.dim() == 2,
        f"quantize of {tuple(x.shape)} by tiles",
        "a weight [N, K]",
        "pass one weight at a time",
    )
    x, depth = x.detach(), x.shape[-1]
    if kind in ("row", "block") and not torch.compiler.is_compiling():
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return quantize(x, kind)
        data, sent = quantize_rows(x.contiguous().view(x.shape[:-1].numel(), depth), kind)
        scale = sent.t() if kind == "block" else sent.view(-1, 1)
        return data.view(x.shape), scale.reshape(*x.shape[:-1], scale.shape[-1])
    return _in_torch(x, kind)


def quantize_rows(
    x: torch.Tensor, kind: str, powers: bool = False, shape: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] by ``"row"`` or ``"block"``: data, and the scale as it travels
    (``scaled.as_sent``), in one launch. ``powers``: scales are powers of two. ``shape``: another
    one for the scale, since each view takes 1 us."""
    (rows, depth), in_blocks = x.shape, kind == "block"
    shape = shape or ((blocks(depth), rows) if in_blocks else (rows,))
    if x.numel() == 0 or not (x.is_cuda or (x.is_cpu and interpreting())):
        data, scale = _in_torch(x, kind, powers)
        return data, scale.t().contiguous() if in_blocks else scale.view(shape)
    data = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
    scale = x.new_empty(shape, dtype=torch.float32)
    _launcher(rows, depth, in_blocks, powers, x.get_device())(x, data, scale)
    return data, scale


def quantize_both_rows(
    x: torch.Tensor, w: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """x [rows, K] and w [cols, K] of one dtype by rows, with scales that are powers of two, in the
    launch of one: data and scales [rows] of x, data and scales [1, cols] of w."""
    (rows, depth), cols = x.shape, w.shape[0]
    if not (x.numel() and w.numel() and (x.is_cuda or interpreting())):
        return quantize_rows(x, "row", True), quantize_rows(w, "row", True, (1, cols))
    of_x, of_w = (
        torch.empty_like(t, dtype=FP8, memory_format=torch.contiguous_format) for t in (x, w)
    )
    x_scale = x.new_empty(rows, dtype=torch.float32)
    w_scale = x.new_empty(1, cols, dtype=torch.float32)
    launch = _launcher(rows, depth, False, True, x.get_device(), cols)
    launch(x, of_x, x_scale, w, of_w, w_scale)
    return (of_x, x_scale), (of_w, w_scale)


def quantize_columns(x: torch.Tensor, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x.T of x [rows, cols] with scales that are powers of two: data [cols, rows], with zeros that
    pad its rows to a multiple of 16, and scales [1, cols]; ``whole``: all equal, by all of x."""
    (rows, cols), more = x.shape, -x.shape[0] % ALIGN
    if x.numel() == 0 or not (x.is_cuda or interpreting()):
        data, scale = _in_torch(x if whole else x.t(), "tensor" if whole else "row", powers=True)
        data = pad((data.t() if whole else data).contiguous().view(torch.uint8), (0, more))
        return data.view(FP8), scale.reshape(1, -1).expand(1, cols).contiguous()
    x = x.contiguous()
    data = x.new_empty(cols, rows + more, dtype=FP8)
    scale = x.new_empty(1, cols, dtype=torch.float32)
    greatest = x.new_zeros(cols, dtype=torch.int32)
    find, turn = _columns_launchers(rows, cols, rows + more, whole, 0, x.get_device())
    find(x, x, greatest)
    turn(x, x, greatest, data, data, scale, scale)
    return data, scale


def quantize_both_columns(
    x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`quantize_columns` of two tensors with equal rows and dtype, in the launches of one:
    data and scales [cols, 1] of x, then data and scales [1, cols] of y."""
    (rows, cols), others, more = x.shape, y.shape[1], -x.shape[0] % ALIGN
    if x.numel() == 0 or not (x.is_cuda or interpreting()):
        data, scale = quantize_columns(x)
        return data, scale.view(-1, 1), *quantize_columns(y)
    x, y = x.contiguous(), y.contiguous()
    data, of_y = (x.new_empty(n, rows + more, dtype=FP8) for n in (cols, others))
    scale = x.new_empty(cols, 1, dtype=torch.float32)
    y_scale = x.new_empty(1, others, dtype=torch.float32)
    greatest = x.new_zeros(cols + others, dtype=torch.int32)
    find, turn = _columns_launchers(rows, cols, rows + more, False, others, x.get_device())
    find(x, y, greatest)
    turn(x, y, greatest, data, of_y, scale, y_scale)
    return data, scale, of_y, y_scale


@lru_cache(maxsize=1024)
def _columns_launchers(
    rows: int, cols: int, pitch: int, whole: bool, others: int, _device: int
) -> tuple[Launcher, Launcher]:
    from tileweave.kernels.quantize import columns_launchers

    return columns_launchers(rows, cols, pitch, whole, others)


@lru_cache(maxsize=1024)
def _launcher(
    rows: int, depth: int, in_blocks: bool, powers: bool, _device: int, others: int = 0
) -> Launcher:
    from tileweave.kernels.quantize import quantize_launcher

    return quantize_launcher(rows, depth, in_blocks, powers, other_rows=others)


def _scale_of(greatest: torch.Tensor, powers: bool) -> torch.Tensor:
    # a tensor, since CUDA multiplies by the rounded inverse of a number
    scale = greatest.clamp(min=LEAST) / torch.full_like(greatest, GREATEST)
    if not powers:
        return scale
    power = ((scale.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)


def _in_torch(
    x: torch.Tensor, kind: str, powers: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    values, depth = x.float(), x.shape[-1]
    if kind == "tensor":
        greatest = values.abs().amax().view(1) if x.numel() else values.new_zeros(1)
        scale = wide = _scale_of(greatest, powers)
    elif kind == "row":
        greatest = values.abs().amax(-1, True) if depth else values.new_zeros(*x.shape[:-1], 1)
        scale = wide = _scale_of(greatest, powers)
    else:
        more = (0, -depth % BLOCK, *((0, -x.shape[0] % BLOCK) if kind == "tile" else ()))
        padded = pad(values.abs(), more).unflatten(-1, (-1, BLOCK)).amax(-1)
        if kind == "tile":
            padded = padded.unflatten(0, (-1, BLOCK)).amax(1)
        scale = _scale_of(padded, powers)
        wide = scale.repeat_interleave(BLOCK, -1)[..., :depth]
        if kind == "tile":
            wide = wide.repeat_interleave(BLOCK, 0)[: x.shape[0]]
    return (values / wide).clamp(-GREATEST, GREATEST).to(FP8), scale
