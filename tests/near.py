"""Comparing results with what is expected, element by element, as ``torch.testing.assert_close`` does.

That one imports all of ``torch.distributed.tensor`` at its first call: more than half a second in every process of every
world.
"""

from __future__ import annotations

import torch


def assert_near(got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float, what: str) -> None:
    """|got - want| <= absolute + relative |want|, of tensors that are alike; infinities equal, NaN near nothing."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.device == want.device, f"{what}: device {got.device}, expected {want.device}"
    far = ~torch.isclose(got, want, rtol=relative, atol=absolute)
    if not far.any():
        return
    allowed = absolute + relative * want.abs()
    excess = ((got - want).abs() - allowed).nan_to_num(nan=float("inf")).masked_fill(~far, float("-inf"))
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    values = f"got {float(got[at]):.9g}, expected {float(want[at]):.9g} +- {float(allowed[at]):.3g}"
    raise AssertionError(f"{what}: {int(far.sum())} of {far.numel()} elements are off, the most at {at}: {values}")
