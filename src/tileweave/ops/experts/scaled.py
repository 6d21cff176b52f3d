"""FP8 operands of the expert operators: how rows and experts with scales of blocks are checked,
packed and multiplied.

==========  =================================  =================================================
rows        [n, K] float8_e4m3fn               tokens, or rows of a plan
x_scale     [n, ceil(K/128)] float32           one scale for 128 elements of a row
experts     [E, N, K] float8_e4m3fn            contiguous
w_scale     [E, ceil(N/128), ceil(K/128)]      one scale for 128 x 128 of a weight; contiguous
==========  =================================  =================================================

A token travels *packed*: K bytes of data, then its scales, then as many bytes as make the row a
multiple of 16. So one store sends it, and one signal announces it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from tileweave.errors import require
from tileweave.ops.core.registry import interpreting, machine_of
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.matmul.inputs import check_shape, refuse_alias
from tileweave.ops.matmul.quantize import quantize_rows
from tileweave.ops.matmul.scaled import ALIGN, BLOCK, FP8, OUT_DTYPES, blocks
from tileweave.planning.candidates import FP8_ARCH
from tileweave.planning.schedules.grouped import packed_pitch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tileweave.kernels.runtime.launch import Launcher

QUANTIZE = "block"  # what ``quantize=`` may be


class ScaledRows(NamedTuple):
    """Rows [n, K] of FP8, and their scales [n, ceil(K/128)]; both may have any pitch."""

    data: torch.Tensor
    scale: torch.Tensor

    def value(self) -> torch.Tensor:
        """The numbers that they represent, in float32."""
        depth = self.data.shape[1]
        return self.data.float() * self.scale.repeat_interleave(BLOCK, 1)[:, :depth]


class ScaledExperts(NamedTuple):
    """Weights [E, N, K] of FP8, and their scales [E, ceil(N/128), ceil(K/128)]."""

    data: torch.Tensor
    scale: torch.Tensor

    def value(self, expert: int) -> torch.Tensor:
        """The numbers that the weight of one expert represents, [N, K] in float32."""
        (cols, depth), scale = self.data.shape[1:], self.scale[expert]
        wide = scale.repeat_interleave(BLOCK, 0)[:cols].repeat_interleave(BLOCK, 1)[:, :depth]
        return self.data[expert].float() * wide


# --- Tokens as they travel ---


def packed(x: torch.Tensor, x_scale: torch.Tensor | None) -> torch.Tensor:
    """Rows x [n, K] as they travel, [n, pitch] of bytes. Without ``x_scale`` x has 16 or 32 bits
    and is quantised."""
    (rows, depth), pitch = x.shape, packed_pitch(x.shape[1])
    if x_scale is not None:
        parts = [x.view(torch.uint8), x_scale.contiguous().view(torch.uint8)]
        parts.append(parts[0].new_zeros(rows, pitch - depth - 4 * blocks(depth)))
        return torch.cat(parts, 1)
    out = torch.empty(rows, pitch, dtype=torch.uint8, device=x.device)
    if x.numel() and (x.is_cuda or interpreting()):
        scale = out.view(torch.float32)[:, depth // 4 :]
        _pack_launcher(rows, depth, pitch, x.get_device())(x, out, scale)
    elif x.numel():
        data, scale = quantize_rows(x, QUANTIZE)
        return packed(data, scale.t())
    return out


def unpacked(rows: torch.Tensor, depth: int) -> ScaledRows:
    """Views of packed rows [n, pitch]."""
    scale = rows.view(torch.float32)[:, depth // 4 : depth // 4 + blocks(depth)]
    return ScaledRows(rows.view(FP8)[:, :depth], scale)


@lru_cache(maxsize=1024)
def _pack_launcher(rows: int, depth: int, pitch: int, _device: int) -> Launcher:
    from tileweave.kernels.quantize import Pitch, quantize_launcher

    return quantize_launcher(rows, depth, True, pitch=Pitch(pitch, pitch // 4, 1))


# --- Rows times the weights of their experts ---


def multiply_rows(
    rows: ScaledRows, experts: ScaledExperts, offsets: torch.Tensor, y: torch.Tensor
) -> None:
    """y [n, N] = rows times the weight of their expert, in one launch that sends nothing. On a GPU,
    or in the interpreter. Rows after the last offset are not written."""
    count, cols, depth = *y.shape, rows.data.shape[1]
    if not (count and cols and depth and experts.data.shape[0]):
        y.zero_()
        return
    data = rows.data
    if data.data_ptr() % ALIGN or data.stride(0) % ALIGN:
        data = data.contiguous()
    w = experts.data if experts.data.data_ptr() % ALIGN == 0 else experts.data.clone()
    strides = (data.stride(0), *rows.scale.stride())
    launch = _launcher(*strides, w.shape[0], cols, depth, count, data.get_device())
    launch(data, rows.scale, w, experts.scale, y, offsets)


@lru_cache(maxsize=1024)
def _launcher(
    pitch: int,
    scale_row: int,
    scale_block: int,
    experts: int,
    cols: int,
    depth: int,
    bound: int,
    device: int,
) -> Callable[..., None]:
    from tileweave.kernels.experts import scaled

    sizes = scaled.Sizes(pitch, scale_row, scale_block, experts, cols, depth, bound)
    if device < 0:
        return scaled.launcher(sizes, 0)
    machine = machine_of(torch.device("cuda", device))
    if machine.hopper:
        from tileweave.kernels.experts import scaled_hopper

        return scaled_hopper.launcher(sizes, machine.num_sms)
    return scaled.launcher(sizes, machine.num_sms)


# --- Checks ---


def check_scales_given(
    scale: torch.Tensor | None, w_scale: torch.Tensor | None, quantize: str, name: str
) -> None:
    """Raise :class:`InputError` unless ``w_scale`` is given, and either the scale of the rows or
    ``quantize``."""
    require(
        quantize in ("", QUANTIZE),
        f"quantize={quantize!r}",
        "'block' or None: experts have scales of blocks",
        "pass quantize='block'",
    )
    require(
        w_scale is not None and (scale is None) == bool(quantize),
        lambda: (
            f"{name}_scale {'missing' if scale is None else 'given'}, "
            f"w_scale {'missing' if w_scale is None else 'given'}, quantize={quantize or None!r}"
        ),
        f"w_scale, and either {name}_scale or quantize='block'",
        "pass the scales that the operands were quantised with",
    )


def check_scaled_experts(
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    experts: torch.Tensor,
    w_scale: torch.Tensor | None,
    quantize: str,
    out_dtype: str,
    name: str,
) -> None:
    """Raise :class:`InputError` for operands that do not fit, before anything is sent. ``name``: of
    the rows, x or y."""

    def operands() -> str:
        return (
            f"{name} {tuple(rows.shape)} {rows.dtype}, experts {tuple(experts.shape)} "
            f"{experts.dtype}, quantize={quantize or None!r}"
        )

    wide = rows.dtype in (torch.bfloat16, torch.float16, torch.float32)
    require(
        experts.dtype == FP8 and (wide if quantize else rows.dtype == FP8),
        operands,
        f"{name} and experts of float8_e4m3fn; with quantize= {name} of 16 or 32 bits",
        "quantise experts by tw.quantize(w, 'tile') each, and pass quantize='block'",
    )
    check_scales_given(scale, w_scale, quantize, name)
    require(
        out_dtype in OUT_DTYPES,
        f"out_dtype={out_dtype}",
        ", ".join(OUT_DTYPES),
        "pass torch.bfloat16 or torch.float16",
    )
    require(
        rows.dim() == 2 and experts.dim() == 3 and rows.shape[1] == experts.shape[2],
        operands,
        f"{name} [n, K] and experts [E_local, N, K]",
        "stack the experts' Linear weights",
    )
    assert w_scale is not None, "refused above"
    local, cols, depth = experts.shape
    require(
        cols % ALIGN == 0 and depth % ALIGN == 0,
        operands,
        f"N and K that are multiples of {ALIGN}, which tensor cores need",
        "pad experts with zeros",
    )
    # no rows are contiguous, whatever their strides
    in_rows = rows.stride(1) == 1 or depth <= 1 or rows.numel() == 0
    require(
        experts.is_contiguous() and in_rows,
        lambda: (
            f"{name} with strides {rows.stride()}, experts with strides {experts.stride()} of "
            "float8_e4m3fn"
        ),
        "contiguous experts, and contiguous rows: tensor cores read FP8 along K only",
        "pass .contiguous()",
    )
    of_w = (local, blocks(cols), blocks(depth))
    scales: list[tuple[str, torch.Tensor, tuple[int, ...]]] = [("w_scale", w_scale, of_w)]
    if scale is not None:
        scales.append((f"{name}_scale", scale, (rows.shape[0], blocks(depth))))
    for of, given, shape in scales:
        fits = tuple(given.shape) == shape and given.dtype == torch.float32
        if not fits:  # formatting sizes would specialize them while torch traces
            require(
                False,
                f"{of} {tuple(given.shape)} {given.dtype}",
                f"{shape} float32: one for 128 of K, of a weight for 128 x 128",
                "pass the scales that tw.quantize returned, w_scale of all experts stacked",
            )
    require(
        w_scale.is_contiguous(),
        lambda: f"w_scale with strides {w_scale.stride()}",
        "a contiguous w_scale",
        "pass w_scale.contiguous()",
    )
    machine = machine_of(rows.device)
    require(
        machine.backend != "cuda" or machine.arch >= FP8_ARCH,
        lambda: f"FP8 experts on {machine.name}, of compute capability {machine.arch / 10}",
        f"{FP8_ARCH / 10} or more, whose tensor cores take FP8",
        "pass operands of 16 bits",
    )


def check_placed(
    plan: RoutingPlan,
    out: torch.Tensor | None,
    like: tuple[int, int, torch.dtype],
    *tensors: torch.Tensor | None,
) -> None:
    """Raise :class:`InputError` unless all tensors are where the plan is, which is whole, and
    ``out`` has the rows, columns and dtype of ``like`` and memory of its own."""
    (rows, cols, dtype) = like
    where = plan.table.device
    given = [t for t in (*tensors, out) if t is not None]
    require(
        all(t.device == where for t in given),
        lambda: ", ".join(str(t.device) for t in given),
        f"{where}, the device of the plan",
        "move all tensors to one device",
    )
    if not (plan.table.dtype == torch.int32 and plan.table.numel() == plan.words):
        require(
            False,
            f"a plan of {plan.table.numel()} words",
            f"one of {plan.words} words for {plan.max_tokens} tokens, k = {plan.topk}",
            "pass what dispatch_grouped_matmul returned",
        )
    if out is not None:
        require(
            out.dtype == dtype,
            lambda: f"out of {out.dtype}",
            f"{dtype}, that of the result",
            "allocate it so, or pass out_dtype=",
        )
        check_shape("out", out, (rows, cols), "allocate out with that shape")
        refuse_alias((out,), (*tensors, plan.table))
