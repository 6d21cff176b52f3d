"""Compare results with expected values, within tolerances.

``assert_near`` does what ``torch.testing.assert_close`` does. The latter imports all of
``torch.distributed.tensor`` at its first call, which takes more than half a second in every process
of every world.
"""

from __future__ import annotations

import torch

# Largest difference from the result in fp64: (relative, absolute), elementwise; operands are scaled
# for results near 1.
TOLERANCE = {"float32": (1e-5, 1e-5), "float16": (2e-3, 2e-3), "bfloat16": (1.6e-2, 1e-2)}

# Largest relative error (Frobenius norm) of a gradient: sums over all ranks, of products that were
# rounded before.
GRADIENT_ERROR = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}

# Columns of partial sums, a row for each rank. In fp32, rank order gives IN_RANK_ORDER; to begin at
# the own rank changes the first column on rank 2, and to go backwards changes the second one.
TO_ADD = torch.tensor([[1e8, 1, 1e8], [1, 1e8, -1e8], [-1e8, -1e8, 1]])
IN_RANK_ORDER = [0.0, 0.0, 1.0]


def assert_near(
    got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float, what: str
) -> None:
    """Assert |got - want| <= absolute + relative |want|, of tensors with the same shape and dtype.
    Infinities are equal, and NaN differs from everything."""
    assert got.shape == want.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.device == want.device, f"{what}: device {got.device}, expected {want.device}"
    far = ~torch.isclose(got, want, rtol=relative, atol=absolute)
    if not far.any():
        return
    allowed = absolute + relative * want.abs()
    excess = (
        ((got - want).abs() - allowed).nan_to_num(nan=float("inf")).masked_fill(~far, float("-inf"))
    )
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    values = f"got {float(got[at]):.9g}, expected {float(want[at]):.9g} +- {float(allowed[at]):.3g}"
    raise AssertionError(
        f"{what}: {int(far.sum())} of {far.numel()} elements are off, the most at {at}: {values}"
    )


def assert_norm_near(
    got: torch.Tensor | None, want: torch.Tensor, relative: float, what: str
) -> None:
    """Assert |got - want| <= relative |want|, in Frobenius norms, of tensors of one shape. ``got``
    has any dtype and device."""
    assert got is not None, f"{what}: there is none"
    assert got.shape == want.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    want = want.detach().double()
    off, size = float((got.detach().double().to(want.device) - want).norm()), float(want.norm())
    assert off <= relative * size, (
        f"{what}: off by {off:.2e} of {size:.2e}, {relative:.0e} of it is allowed"
    )
