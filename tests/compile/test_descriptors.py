"""Tensor descriptors: what TMA gets of a matrix, and which matrices it can read."""

from __future__ import annotations

import pytest
import torch

from tileweave.kernels.runtime.descriptors import based, fits, weight

WHOLE = torch.zeros(8, 64, dtype=torch.bfloat16)
FLAT = WHOLE.view(-1)


@pytest.mark.parametrize(
    "t", [WHOLE, WHOLE.t(), WHOLE[1:, :40], FLAT.view(64, 8), FLAT.view(2, 256)[:, 8:200].t()]
)
def test_matrices_that_tma_reads(t: torch.Tensor) -> None:
    assert fits(t, WHOLE)


@pytest.mark.parametrize(
    "t", [FLAT[4:60].view(7, 8), FLAT[:480].view(8, 60), FLAT[:480].view(8, 60).t()]
)
def test_matrices_that_tma_does_not_read(t: torch.Tensor) -> None:
    """An address or a stride that is no multiple of 16 bytes."""
    assert not fits(t, WHOLE) and not fits(WHOLE, t)


def test_a_weight_is_described_as_it_stands() -> None:
    stored = torch.zeros(48, 128, dtype=torch.float16)
    rows, lines = stored[:, :64], stored.view(128, 48)[:64].t()
    for w, sizes, stride, tile in (
        (rows, [48, 64], 128, [16, 32]),
        (lines, [64, 48], 48, [32, 16]),
    ):
        found = weight(w.data_ptr(), w.dtype, 48, 64, w.stride(), [16, 32])
        assert (found.shape, found.strides, found.block_shape) == (sizes, [stride, 1], tile)
        assert (found.base.data_ptr(), found.base.dtype) == (stored.data_ptr(), torch.float16)
    held = based([found, found], [16, 32])
    assert [(one.base.data_ptr(), one.base.dtype) for one in held] == [
        (16, torch.float16),
        (32, torch.float16),
    ]
    assert all(one.shape == found.shape for one in held)
