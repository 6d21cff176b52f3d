"""Products of FP8 by cuBLAS, of any number of rows: it has no kernel for some of them."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("of_x", "of_w", "fast"),
    [
        ("row", "row", True),
        ("row", "row", False),
        ("tensor", "tensor", True),
        ("block", "tile", False),
    ],
)
def test_any_number_of_rows(of_x: str, of_w: str, fast: bool) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    from tileweave import quantize
    from tileweave.ops.matmul.scaled import Scaled, ScaledProduct, as_sent

    torch.manual_seed(0)
    w8, w_scale = quantize(torch.randn(1040, 2048, device="cuda"), of_w)
    w = Scaled(w8, w_scale, of_w.replace("tile", "block"))
    product = ScaledProduct(w, None, of_x, torch.bfloat16, fast)
    for rows in (1, 2, 3, 5, 7, 16, 17, 101):
        x8, x_scale = quantize(torch.randn(rows, 2048, device="cuda"), of_x)
        want = Scaled(x8, x_scale, of_x).value().double() @ w.value().double().t()
        out = torch.full((rows, 1040), float("nan"), device="cuda", dtype=torch.bfloat16)
        for y in (
            product((x8, as_sent(x_scale, of_x))),
            product((x8, as_sent(x_scale, of_x)), out),
        ):
            error = float((y.double() - want).norm() / want.norm())
            assert y.shape == want.shape and error < 8e-3, f"{rows} rows: {error:.1e}"
        assert y is out


@pytest.mark.parametrize("whole", [False, True])
def test_columns_are_quantised_as_by_torch(whole: bool) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8")
    from tileweave.ops.matmul.quantize import (
        _in_torch,
        quantize_both_columns,
        quantize_columns,
    )

    torch.manual_seed(0)
    for rows, cols in ((5, 48), (130, 272), (2048, 4096), (1000, 14336)):
        x = torch.randn(rows, cols, device="cuda").bfloat16()
        x *= torch.exp2(torch.arange(cols, device="cuda") % 9 - 5.0)
        if not whole:
            x[:, 1], x[2, 3], x[3, 5] = 0, float("nan"), float("-inf")
        data, scale = quantize_columns(x, whole)
        want, wide = _in_torch(x if whole else x.t(), "tensor" if whole else "row", powers=True)
        want = torch.nn.functional.pad((want.t() if whole else want).float(), (0, -rows % 16))
        wide = wide.view(1, -1).expand(1, cols)
        assert torch.equal(scale.nan_to_num(7.0), wide.nan_to_num(7.0)), (rows, cols)
        assert torch.equal(data.float().nan_to_num(7.0), want.nan_to_num(7.0)), (rows, cols)
        if not whole:  # two at once: the same bits
            other = x[:, 16:32] * 3
            made = quantize_both_columns(x, other)
            for t, *found in ((x, made[0], made[1].t()), (other, *made[2:])):
                for a, b in zip(found, quantize_columns(t), strict=True):
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (rows, cols)
