"""The grouped matmul of FP8 experts, and swiglu that quantises, on one GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "experts", "cols", "depth"),
    [(512, 1, 512, 1024), (777, 5, 384, 1168), (1000, 8, 720, 2880), (64, 3, 2048, 128)],
)
def test_grouped_matmul(rows: int, experts: int, cols: int, depth: int) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies FP8")
    from tileweave.ops.experts.scaled import (
        ScaledExperts,
        ScaledRows,
        multiply_rows,
        packed,
        unpacked,
    )

    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, depth, device="cuda", generator=generator)
    w = torch.randn(experts, cols, depth, device="cuda", generator=generator).to(FP8)
    blocks = -(-cols // 128), -(-depth // 128)
    w_scale = torch.rand(experts, *blocks, device="cuda", generator=generator) + 0.5
    cuts = torch.randint(0, rows - 20, (experts - 1,), device="cuda", generator=generator)
    cuts[:1] = 0  # an expert without rows
    ends = [0, *sorted(cuts.tolist()), rows - 7]
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    weights = ScaledExperts(w, w_scale)
    given = unpacked(packed(x, None), depth)
    apart = ScaledRows(given.data.contiguous(), given.scale.t().contiguous().t())
    want = given.value().double()
    results = []
    for dtype, operand in (
        (torch.bfloat16, given),
        (torch.bfloat16, apart),
        (torch.float16, given),
    ):
        y = torch.full((rows, cols), 7.0, dtype=dtype, device="cuda")
        multiply_rows(operand, weights, offsets, y)
        for expert, (begin, end) in enumerate(pairwise(ends)):
            if begin < end:
                expected = want[begin:end] @ weights.value(expert).double().t()
                error = float((y[begin:end].double() - expected).norm() / expected.norm())
                assert error < (4e-3 if dtype == torch.bfloat16 else 5e-4), (expert, error)
        assert (y[rows - 7 :] == 7.0).all(), "rows after the last were written"
        results.append(y)
    assert torch.equal(results[0], results[1]), "where rows are changes their products"


def test_swiglu_quantizes() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that has FP8")
    from tileweave.kernels.experts.rows import swiglu, swiglu_quantized
    from tileweave.ops.matmul.quantize import quantize_rows

    for width in (80, 720, 2048):
        y = torch.randn(300, 2 * width, device="cuda", dtype=torch.bfloat16) * 10
        y[3, 5] = float("nan")
        offsets = torch.tensor([0, 100, 250], dtype=torch.int32, device="cuda")
        plain = torch.zeros(300, width, device="cuda", dtype=torch.bfloat16)
        swiglu(y, plain, offsets, 2)
        data = torch.zeros(300, width, device="cuda", dtype=torch.uint8)
        scale = torch.zeros(-(-width // 128), 300, device="cuda")
        swiglu_quantized(y, data, scale, offsets, 2)
        want, want_scale = quantize_rows(plain, "block")
        assert torch.equal(data[:250], want.view(torch.uint8)[:250]) and not data[250:].any()
        assert torch.equal(scale.nan_to_num(-1.0)[:, :250], want_scale.nan_to_num(-1.0)[:, :250])
