"""FP8 operands of the matmul operators: an operand is (data, scale), and its value is their
product.

data is float8_e4m3fn, [rows, K]; scale is float32, in one of three layouts:

======  ==============  ==========================  =============================================
kind    scale of x      scale of w                  one scale for
======  ==============  ==========================  =============================================
tensor  one element     one element                 the tensor of this rank
row     [M, 1]          [1, N], also [N, 1]         a row of x, a column of the result
block   [M, ceil(K/     [ceil(N/128), ceil(K/128)]  128 elements of a row of x, 128 x 128 of w
        128)]
======  ==============  ==========================  =============================================

A tensor scale may be paired with a row scale. The largest number of float8_e4m3fn is 448, and it
has NaN but no infinity. Sums are computed in float32; with blocks each 128 of K are multiplied by
their scales before they are added. Scales may have any value: 0 makes zeros, NaN and infinity make
what float32 arithmetic makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tileweave.errors import require
from tileweave.planning.problem import MatmulConfig

FP8 = torch.float8_e4m3fn
GREATEST = 448.0  # of FP8
BLOCK = 128  # elements of K, and rows of w, that share a scale
OUT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
RECIPES = ("rowwise", "rowwise_with_gw_hp")  # of training; scaled_training.py has them
ALIGN = 16  # bytes: of rows, and of where the scales of a shard begin


def blocks(size: int) -> int:
    """How many scales ``size`` elements have."""
    return -(-size // BLOCK)


def kind_of_x(scale: torch.Tensor, rows: int, depth: int) -> str | None:
    """The kind of a scale of x [rows, depth]; None if it has none of the shapes."""
    if scale.numel() == 1 and scale.dim() <= 2 and (rows != 1 or scale.dim() < 2):
        return "tensor"
    shape = tuple(scale.shape)
    if shape == (rows, 1) and blocks(depth) != 1:
        return "row"
    if shape == (rows, blocks(depth)):
        return "block" if blocks(depth) != 1 else "row or block"
    return None


def kind_of_w(scale: torch.Tensor, cols: int, depth: int) -> str | None:
    """The kind of a scale of w [cols, depth]; None if it has none of the shapes."""
    shape = tuple(scale.shape)
    if scale.numel() == 1 and shape != (blocks(cols), blocks(depth)):
        return "tensor"
    if shape == (blocks(cols), blocks(depth)):
        return "block" if scale.numel() != 1 else "tensor or block"
    return "row" if shape in ((1, cols), (cols, 1)) else None


def kinds_of(
    x_scale: torch.Tensor, w_scale: torch.Tensor, rows: int, cols: int, depth: int
) -> tuple[str, str]:
    """The kinds of both scales, which fit each other; raises :class:`InputError` otherwise.

    Where a shape could be two kinds (K up to 128), the other scale decides.
    """
    of_x, of_w = kind_of_x(x_scale, rows, depth), kind_of_w(w_scale, cols, depth)
    if of_x == "row or block":
        of_x = "block" if of_w is not None and of_w.endswith("block") else "row"
    if of_w == "tensor or block":
        of_w = "block" if of_x == "block" else "tensor"
    fits = of_x is not None and of_w is not None and (of_x == "block") == (of_w == "block")
    if not fits:
        require(
            fits,
            f"x_scale {tuple(x_scale.shape)} and w_scale {tuple(w_scale.shape)} for x "
            f"{(rows, depth)} and w {(cols, depth)}",
            f"x_scale of one element or {(rows, 1)} with w_scale of one element or {(1, cols)}, "
            f"or {(rows, blocks(depth))} with {(blocks(cols), blocks(depth))}",
            "make both scales by tw.quantize with kinds that fit",
        )
    assert of_x is not None and of_w is not None, "what fits has a kind"
    return of_x, of_w


def spread(scale: torch.Tensor, kind: str, rows: int, depth: int) -> torch.Tensor:
    """A scale as it multiplies data [rows, depth], by broadcasting."""
    if kind == "tensor":
        return scale.reshape(1, 1)
    if kind == "row":
        return scale.reshape(rows, 1)
    wide = scale.repeat_interleave(BLOCK, 1)[:, :depth]
    if scale.shape[0] == rows:
        return wide
    return wide.repeat_interleave(BLOCK, 0)[:rows]


class Scaled(NamedTuple):
    """An operand: data [rows, K], and its scale, of ``kind``."""

    data: torch.Tensor
    scale: torch.Tensor
    kind: str

    def value(self) -> torch.Tensor:
        """The numbers that it represents, in float32."""
        rows, depth = self.data.shape
        return self.data.float() * spread(self.scale, self.kind, rows, depth)


class ScaledProduct(NamedTuple):
    """Multiplies x by the weight ``w`` [N, K]: x @ w.T + bias, rounded once to ``dtype``.

    ``kind``: of the scales of x. ``fast_accum``: cuBLAS need not add every 128 products of K to a
    float32 sum; for tensor and row scales.
    """

    w: Scaled
    bias: torch.Tensor | None
    kind: str
    dtype: torch.dtype
    fast_accum: bool = False

    @property
    def cols(self) -> int:
        return self.w.data.shape[0]

    def __call__(
        self,
        x: tuple[torch.Tensor, ...],
        out: torch.Tensor | None = None,
        turned: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """x: data [M, K] and its scale, as :func:`as_sent` returns it. Stores in ``out`` if
        given. ``turned``: what :func:`weight_as_read` returned."""
        data, sent = x
        return self.of(Scaled(data, from_sent(sent, self.kind), self.kind), out, turned)

    def of(
        self,
        x: Scaled,
        out: torch.Tensor | None = None,
        turned: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """As a call, of an operand."""
        if x.data.is_cuda and x.data.numel() and self.cols:
            y = _by_cublas(x, self, out, turned)
            return y if out is None or y is out else out.copy_(y)
        y = x.value() @ self.w.value().t()
        if self.bias is not None:
            y += self.bias.float()
        return y.to(self.dtype) if out is None else out.copy_(y)

    def rows_of(
        self, x: tuple[torch.Tensor, ...], begin: int, rows: int
    ) -> tuple[torch.Tensor, ...]:
        """The data of these rows, and their scales."""
        data, sent = x
        if self.kind == "block":
            sent = sent.narrow(1, begin, rows).contiguous()
        elif self.kind == "row":
            sent = aligned(sent.narrow(0, begin, rows))
        return data.narrow(0, begin, rows), sent

    def repeated(self) -> Callable[..., torch.Tensor]:
        """This product, for several calls with ``out``."""
        data = self.w.data
        if not data.is_cuda or not data.numel():
            return self
        return partial(self, turned=weight_as_read(self.w, self.kind))

    def of_all_ranks(
        self, data: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """As a call, of the rows of all ranks: data [R * m, K], and scales [R, ...] as they
        travel."""
        if self.kind == "block":
            return self((data, scales.transpose(0, 1).flatten(1)), out)
        if self.kind == "row":
            return self.of(Scaled(data, scales.view(-1, 1), "row"), out)
        # each rank has its own
        rows = data.shape[0] // scales.shape[0]
        each = scales.view(-1, 1).expand(-1, rows).reshape(-1)
        return self._replace(kind="row")((data, each), out)


def as_sent(scale: torch.Tensor, kind: str) -> torch.Tensor:
    """A scale of x as it travels, and as cuBLAS reads it: [1], [M], or [ceil(K/128), M] of blocks,
    contiguous."""
    return scale.t().contiguous() if kind == "block" else scale.reshape(-1)


def from_sent(sent: torch.Tensor, kind: str) -> torch.Tensor:
    """The scale of x that :func:`as_sent` made ``sent`` of; of blocks a transposed view."""
    if kind == "block":
        return sent.t()
    return sent.view(-1, 1) if kind == "row" else sent


def aligned(t: torch.Tensor) -> torch.Tensor:
    """``t``, copied if it does not begin at a multiple of 16 bytes, which cuBLAS refuses."""
    return t if t.data_ptr() % ALIGN == 0 else t.clone(memory_format=torch.preserve_format)


# Sizes and dtypes of calls with a number of rows for which cuBLAS has no kernel.
_PADDED: set[tuple[object, ...]] = set()


def _by_cublas(
    x: Scaled,
    product: ScaledProduct,
    out: torch.Tensor | None,
    turned: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """The product; of rows padded to a multiple of 16 where cuBLAS has no kernel for their number
    (seen of 5 rows: it refuses them before it queues anything)."""
    (rows, depth), w = x.data.shape, product.w
    turned = turned or weight_as_read(w, x.kind)
    if rows % 16 == 0:
        return _once_by_cublas(x, product, out, turned)
    key = (rows, depth, w.data.shape[0], x.kind, w.kind, product.dtype, product.fast_accum)
    if key not in _PADDED:
        try:
            return _once_by_cublas(x, product, out, turned)
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error):
                raise
            _PADDED.add(key)
    more = -rows % 16
    data = pad(x.data.view(torch.uint8), (0, 0, 0, more)).view(FP8)
    scale = x.scale if x.kind == "tensor" else pad(x.scale.t(), (0, more)).t()
    y = _once_by_cublas(Scaled(data, scale, x.kind), product, None, turned)[:rows]
    return y if out is None else out.copy_(y)


def _once_by_cublas(
    x: Scaled,
    product: ScaledProduct,
    out: torch.Tensor | None,
    turned: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    rows, bias = x.data.shape[0], product.bias
    data, of_x = rows_as_read(x, product.w.kind)
    # cuBLAS adds no bias to a product of blocks
    added = bias if x.kind != "block" else None
    fits = out is not None and data.shape[0] == rows and out.data_ptr() % ALIGN == 0
    y = torch._scaled_mm(
        data,
        turned[0],
        scale_a=of_x,
        scale_b=turned[1],
        bias=None if added is None else aligned(added),
        out_dtype=product.dtype,
        use_fast_accum=product.fast_accum,
        out=out if fits else None,
    )
    if y.shape[0] != rows:
        y = y[:rows]
    if bias is not None and added is None:
        y = y.add_(bias)
    return y


def as_scaled_mm_reads(x: Scaled, w: Scaled) -> tuple[torch.Tensor, ...]:
    """x [M, K], w [K, N] and their scales as ``torch._scaled_mm`` takes them on a GPU: all begin at
    multiples of 16 bytes. With blocks M is padded to a multiple of 4.

    ========  ===============================  ================================================
    kind      scale of x                       scale of w
    ========  ===============================  ================================================
    tensor    []                               []
    row       [M, 1], contiguous               [1, N], contiguous
    block     [M, K/128], strides (1, M)       [K/128, N/128], strides (1, K/128)
    ========  ===============================  ================================================

    Where K/128 is no multiple of 4, cuBLAS wants other strides than torch does, which releases
    check differently. There each row of w has scales of its own, [K/128, N] with strides (N, 1):
    the same numbers.
    """
    data, of_x = rows_as_read(x, w.kind)
    turned, of_w = weight_as_read(w, x.kind)
    return data, turned, of_x, of_w


def rows_as_read(x: Scaled, of_w: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and its scale, as :func:`as_scaled_mm_reads` says. ``of_w``: the kind of the scale of w."""
    rows, depth = x.data.shape
    data, scale = aligned(x.data), x.scale
    if rows == 1:  # whose strides may be any, also those of a column
        data = data.view(-1).view(1, depth)
    if x.kind == "block":
        more = -rows % 4
        if more:
            data = pad(data.view(torch.uint8), (0, 0, 0, more)).view(FP8)
            scale = pad(scale.t(), (0, more)).t()
        return data, aligned(scale)
    return data, _as_read(scale, (rows, 1) if "row" in (x.kind, of_w) else ())


def weight_as_read(w: Scaled, of_x: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w and its scale, as :func:`as_scaled_mm_reads` says. ``of_x``: the kind of the scale of x."""
    cols, scale = w.data.shape[0], w.scale
    turned = aligned(w.data).t()
    if of_x != "block":
        return turned, _as_read(scale, (1, cols) if "row" in (of_x, w.kind) else ())
    if scale.shape[1] % 4:
        return turned, aligned(scale.repeat_interleave(BLOCK, 0)[:cols].t().contiguous())
    return turned, aligned(scale.contiguous()).t()


def _as_read(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A scale of a tensor or of rows in this shape; one of a tensor is repeated."""
    if scale.shape != shape:  # each view takes 1 us
        count = max(shape, default=1)
        if scale.numel() != count:
            scale = scale.reshape(-1).expand(count)
        scale = scale.reshape(shape)
    return aligned(scale.contiguous())


# --- Checks ---


def check_tile(config: MatmulConfig, product: ScaledProduct, quarters: bool) -> None:
    """Raise :class:`InputError` where kernels of ours cannot run ``product`` with the tiles of
    ``config``. ``quarters``: they can add wide tiles in fp32, 64 columns at a time."""
    fits = product.kind != "block" and (product.fast_accum or quarters)
    require(
        config.tile_n <= 128 or fits,
        lambda: (
            f"FP8 operands in tiles of {config.tile_n} columns, scales of kind {product.kind!r}, "
            f"fast_accum={product.fast_accum}"
        ),
        "such tiles with scales of tensors or rows, in all_gather_matmul with fast_accum=True",
        "pass a config with tiles of 128 columns",
    )
    require(
        config.tile_k == BLOCK,
        lambda: f"FP8 operands in tiles of {config.tile_k} of K",
        "tiles of 128",
        "pass such a config, or one of cuBLAS",
    )


class Call(NamedTuple):
    """A public call as the torch operators take it."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    w: torch.Tensor
    w_scale: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: str
    fast_accum: bool
    quantize: str


def check_scaled(call: Call, bias: torch.Tensor | None, *others: torch.Tensor | None) -> None:
    """Raise :class:`InputError` for operands that do not fit, before anything is sent.

    ``others`` must have the dtype of the result and the device of x.
    """
    x, x_scale, w, w_scale, _, out_dtype, fast_accum, quantize = call

    def dtypes() -> str:
        return f"x {x.dtype}, w {w.dtype}, quantize={quantize or None!r}"

    require(
        quantize in ("", "row", "block"),
        f"quantize={quantize!r}",
        ", ".join(map(repr, ("row", "block", *RECIPES))),
        "pass one of these, or nothing with x_scale",
    )
    require(
        w.dtype == FP8 and (x.dtype == FP8) == (not quantize),
        dtypes,
        "x and w float8_e4m3fn, or x of 16 or 32 bits with quantize=",
        "pass tw.quantize(w, kind), and x alike or with quantize=",
    )
    require(
        bool(quantize) or x_scale is not None,
        "x of float8_e4m3fn without x_scale",
        "x_scale and w_scale",
        "pass the scale that x was quantised with",
    )
    require(
        not (quantize and x_scale is not None),
        f"x_scale with quantize={quantize!r}",
        "one of them",
        "drop x_scale: the call makes the scale of x",
    )
    require(
        quantize == "" or x.dtype in (torch.bfloat16, torch.float16, torch.float32),
        dtypes,
        "x of bfloat16, float16 or float32",
        "convert x",
    )
    require(w_scale is not None, "w of float8_e4m3fn without w_scale", "w_scale", "pass w_scale")
    require(
        out_dtype in OUT_DTYPES,
        f"out_dtype={out_dtype}",
        ", ".join(OUT_DTYPES),
        "pass torch.bfloat16 or torch.float16",
    )
    assert w_scale is not None, "refused above"
    _check_shapes(x, w, bias)
    rows, depth = x.shape
    dtype, device = OUT_DTYPES[out_dtype], x.device
    scales = [scale for scale in (x_scale, w_scale) if scale is not None]
    require(
        all(scale.dtype == torch.float32 for scale in scales),
        lambda: f"scales of {', '.join(str(scale.dtype) for scale in scales)}",
        "float32",
        "convert the scales",
    )
    results = [t for t in (bias, *others) if t is not None]
    require(
        all(t.dtype == dtype for t in results),
        lambda: f"bias, residual, norm_weight or out of {[str(t.dtype) for t in results]}",
        f"{dtype}, that of the result",
        "convert them, or pass out_dtype=",
    )
    require(
        all(t.device == device for t in (w, *scales, *results)),
        lambda: ", ".join(str(t.device) for t in (x, w, *scales, *results)),
        "one device",
        "move all tensors to x.device",
    )
    likely = x_scale if x_scale is not None else _scale_like(x, quantize)
    of_x, _ = kinds_of(likely, w_scale, rows, w.shape[0], depth)
    require(
        not (fast_accum and of_x == "block"),
        "fast_accum=True with scales of blocks",
        "it with scales of tensors or rows",
        "drop fast_accum",
    )
    require(
        w_scale.is_contiguous(),
        lambda: f"w_scale with strides {w_scale.stride()}",
        "a contiguous w_scale",
        "pass w_scale.contiguous()",
    )


def _check_shapes(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    require(
        x.dim() == 2 and w.dim() == 2 and x.shape[1] == w.shape[1],
        lambda: f"x {tuple(x.shape)}, w {tuple(w.shape)}",
        "x [m, K] and w [n, K], with equal K",
        "transpose w to Linear layout [n, K]",
    )
    cols, depth = w.shape
    require(
        depth % ALIGN == 0 and cols % ALIGN == 0,
        lambda: f"w {tuple(w.shape)} of float8_e4m3fn",
        f"[n, K] with multiples of {ALIGN}, which tensor cores need",
        "pad w and x with zeros",
    )
    require(
        x.is_contiguous() and (w.numel() == 0 or (w.stride(1) == 1 and _rows_apart(w))),
        lambda: f"x with strides {x.stride()}, w with strides {w.stride()}",
        "a contiguous x, and contiguous rows of w, a multiple of 16 apart: tensor cores read FP8 "
        "along K only",
        "pass .contiguous()",
    )
    require(
        bias is None or (tuple(bias.shape) == (cols,) and bias.is_contiguous()),
        lambda: f"bias {tuple(bias.shape) if bias is not None else ()}",
        f"{(cols,)}, contiguous",
        "one bias for each row of w",
    )


def _rows_apart(w: torch.Tensor) -> bool:
    """Whether rows of w do not overlap, and begin at multiples of 16 bytes as the first does."""
    return w.stride(0) >= w.shape[1] and w.stride(0) % ALIGN == 0


def _scale_like(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor without memory of its own, of the shape of the scale that ``kind`` makes of x."""
    shape = (x.shape[0], blocks(x.shape[1]) if kind == "block" else 1)
    return torch.empty((), dtype=torch.float32, device=x.device).expand(shape)


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Raise :class:`InputError` where a tensor requires a gradient, which FP8 operands do not
    have."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                require(
                    False,
                    "FP8 operands, or an FP8 result, with a tensor that requires gradients",
                    "calls without gradients",
                    "call under torch.no_grad(), or pass bfloat16 operands",
                )
