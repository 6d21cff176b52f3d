"""The permutation of an unfused exchange: any strides that torch calls contiguous, any width."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tileweave.ops import reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 2, 24), (1, 3, 8), (4, 1, 8), (3, 2, 5), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_permutation(shape: tuple[int, int, int], dtype: torch.dtype, offset: int) -> None:
    rows, parts, cols = shape
    size = rows * parts * cols
    x = torch.arange(size + offset, dtype=torch.float32).to(dtype)[offset:].view(parts, rows, cols)
    out = torch.empty(size, dtype=dtype)
    # strides of dimensions of one element are arbitrary
    strides = [3 if rows == 1 else parts * cols, 3 if parts == 1 else cols, 1]
    out = out.as_strided(shape, strides)
    with mock.patch.object(reference, "LARGE_BYTES", 1):
        reference._permute(out, x)
    assert torch.equal(out, x.transpose(0, 1))
