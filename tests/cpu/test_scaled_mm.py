"""What ``torch._scaled_mm`` is given for FP8 operands, against the rules of its source for CUDA.

The CPU's own ``torch._scaled_mm`` takes more, so a double takes its place: it refuses what torch
2.11's checks and cuBLAS refuse, and multiplies by the scales that cuBLAS would read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tileweave.ops.matmul import scaled
from tileweave.ops.matmul.quantize import _in_torch, quantize_both_columns, quantize_columns
from tileweave.ops.matmul.scaled import Scaled, ScaledProduct, _by_cublas, as_sent, from_sent

FP8 = torch.float8_e4m3fn


def apart(scale: torch.Tensor, sizes: tuple[int, int], strides: tuple[int, int]) -> bool:
    """``check_size_stride`` of both dimensions."""
    each = zip(scale.shape, scale.stride(), sizes, strides, strict=True)
    return all(a == size and (size <= 1 or step == want) for a, step, size, want in each)


def as_read(scale: torch.Tensor, pitch: int) -> torch.Tensor:
    """A scale [outer, K/128] of blocks where cuBLAS reads it: its second stride is ``pitch``."""
    outer, count = scale.shape
    reach = scale.as_strided((outer + (count - 1) * pitch,), (1,)) if pitch else scale.flatten()
    at = torch.arange(outer)[:, None] + torch.arange(count)[None] * pitch
    return reach[at]


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    count, blocks = -(-k // 128), -(-n // 128)
    tensors = [t for t in (a, b, scale_a, scale_b, bias, out) if t is not None]
    assert all(t.data_ptr() % 16 == 0 for t in tensors), "cuBLAS: not aligned"
    assert k % 16 == 0 and n % 16 == 0 and a.stride() == (k, 1), "a"
    assert b.stride(0) == 1 and b.stride(1) >= k and b.stride(1) % 16 == 0, "b"
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.numel() == scale_b.numel() == 1:
        of_a, of_b = scale_a.view(1, 1), scale_b.view(1, 1)
    elif tuple(scale_a.shape) == (m, 1) and tuple(scale_b.shape) == (1, n):
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        of_a, of_b = scale_a, scale_b.t()
    else:
        assert apart(scale_a, (m, count), (1, m)), "scale_a of 1 x 128"
        assert m % 4 == 0, "cuBLAS: rows of scales are a multiple of 16 bytes apart"
        assert bias is None and not use_fast_accum
        of_a, turned = as_read(scale_a, m), scale_b.t()
        if apart(turned, (n, count), (1, n)):
            of_b = as_read(turned, n)
        else:
            # releases of torch want one or the other
            for pitch in (count, -(-count // 4) * 4):
                assert apart(turned, (blocks, count), (pitch, 1)), "scale_b of 128 x 128"
            of_b = turned.repeat_interleave(128, 0)[:n]
        of_a, of_b = (s.repeat_interleave(128, 1)[:, :k] for s in (of_a, of_b))
    y = (a.float() * of_a) @ (b.t().float() * of_b).t()
    y = (y if bias is None else y + bias.float()).to(out_dtype)
    return y if out is None else out.copy_(y)


def moved(t: torch.Tensor, to: int) -> torch.Tensor:
    """A copy of t that begins ``to`` bytes after a multiple of 16."""
    memory = torch.empty(t.numel() * t.element_size() + 32, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + to
    part = memory[begin : begin + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return part.copy_(t)


def of_16_rows(a: torch.Tensor, b: torch.Tensor, **given: Any) -> torch.Tensor:
    """As above, with kernels for multiples of 16 rows only."""
    if a.shape[0] % 16:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")
    return scaled_mm(a, b, **given)


KINDS = [("tensor", "tensor"), ("tensor", "row"), ("row", "tensor"), ("row", "row")]


@pytest.mark.parametrize("kinds", [*KINDS, ("block", "tile")], ids="-".join)
@pytest.mark.parametrize("function", [scaled_mm, of_16_rows], ids=["any rows", "16 rows"])
def test_what_scaled_mm_is_given(
    function: Callable[..., torch.Tensor],
    kinds: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", function)
    monkeypatch.setattr(scaled, "_PADDED", set())
    torch.manual_seed(0)
    sizes = [(6, 256, 640), (1, 16, 16), (8, 144, 1024), (5, 48, 80), (4, 128, 128), (3, 272, 896)]
    for (m, n, k), off in product(sizes, (0, 4)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        (x8, sx), (w8, sw) = _in_torch(x, kinds[0]), _in_torch(w, kinds[1])
        of_x, of_w = kinds[0], kinds[1].replace("tile", "block")
        given = [moved(t, off) for t in (x8, as_sent(sx, of_x), w8, sw)]
        bias = moved(torch.randn(n).bfloat16(), off)
        w_of = Scaled(given[2], given[3], of_w)
        call = ScaledProduct(w_of, bias, of_x, torch.bfloat16, of_x != "block")
        want = Scaled(x8, sx, of_x).value().double() @ Scaled(w8, sw, of_w).value().double().t()
        for out in (None, moved(torch.empty(m, n, dtype=torch.bfloat16), off)):
            operand = Scaled(given[0], from_sent(given[1], of_x), of_x)
            got = _by_cublas(operand, call, out).double()
            error = (got - want - bias.double()).norm() / want.norm()
            assert got.shape == (m, n) and error < 8e-3, f"{m, n, k, off}: {error:.1e}"


def test_other_errors_of_scaled_mm_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    (x8, sx), (w8, sw) = (_in_torch(torch.ones(rows, 32), "row") for rows in (5, 16))
    call = ScaledProduct(Scaled(w8, sw, "row"), None, "row", torch.bfloat16)
    with pytest.raises(RuntimeError, match="illegal"):
        _by_cublas(Scaled(x8, sx, "row"), call, None)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_rows_of_a_shard_are_as_scaled_mm_reads_them(kind: str) -> None:
    """A rank's 6 of 18 rows: their scales begin in the middle of 16 bytes."""
    x, w = torch.randn(18, 256), torch.randn(32, 256)
    (x8, sx), (w8, sw) = _in_torch(x, kind), _in_torch(w, "tile" if kind == "block" else kind)
    call = ScaledProduct(Scaled(w8, sw, kind), None, kind, torch.bfloat16)
    whole = call((x8, as_sent(sx, kind)))
    for rank in range(3):
        data, sent = call.rows_of((x8, as_sent(sx, kind)), rank * 6, 6)
        assert data.data_ptr() % 16 == sent.data_ptr() % 16 == 0
        assert torch.equal(call((data, sent)), whole[rank * 6 : rank * 6 + 6])


def test_columns_of_any_number_of_rows_are_multiplied() -> None:
    """Gradients of weights are sums over rows, of which tensor cores take multiples of 16."""
    for rows in (5, 16, 33):
        x, y = torch.randn(rows, 32).bfloat16(), torch.randn(rows, 48).bfloat16()
        data, scale, other, other_scale = quantize_both_columns(x, y)
        assert data.shape == (32, -(-rows // 16) * 16) and scale.shape == (32, 1)
        assert other.shape == (48, data.shape[1]) and other_scale.shape == (1, 48)
        for t, *found in ((x, data, scale.t()), (y, other, other_scale)):
            assert all(map(torch.equal, found, quantize_columns(t)))


def test_a_weight_with_rows_between_multiples_of_16_is_refused() -> None:
    from tileweave.errors import InputError
    from tileweave.ops.matmul.scaled import Call, check_scaled

    x, w = torch.zeros(4, 32).to(FP8), torch.zeros(16, 40).to(FP8)[:, :32]
    with pytest.raises(InputError, match="multiple of 16 apart"):
        check_scaled(Call(x, torch.ones(1), w, torch.ones(1), None, "bfloat16", False, ""), None)


def test_what_quantize_returns_has_no_gradient() -> None:
    from tileweave import quantize

    for kind in ("tensor", "row", "block", "tile"):
        found = quantize(torch.randn(4, 32, requires_grad=True), kind)
        assert not any(t.requires_grad for t in found), kind
