"""``tests/support/tolerances.py`` accepts what ``torch.testing.assert_close`` accepts, and nothing
else. Norms accept nothing above their tolerance."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.support.tolerances import assert_near, assert_norm_near

ONE = 1.0 + 2**-20
VALUES = (0.0, -0.0, 1.0, ONE, -1.0, 1.1, 3.0, 1e-7, 1e300, math.inf, -math.inf, math.nan)
LIMITS = ((0.0, 0.0), (1e-5, 1e-5), (0.5, 0.0), (0.0, 0.1), (2**-20, 0.0))


def near(got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> bool:
    try:
        assert_near(got, want, relative, absolute, "")
    except AssertionError:
        return False
    return True


def close(got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> bool:
    try:
        torch.testing.assert_close(got, want, rtol=relative, atol=absolute)
    except AssertionError:
        return False
    return True


def test_values_pass_as_with_torch_assert_close() -> None:
    verdicts = set()
    for one, other, limits in itertools.product(VALUES, VALUES, LIMITS):
        got, want = (torch.tensor([[2.0, value]], dtype=torch.float64) for value in (one, other))
        verdicts.add(near(got, want, *limits))
        assert near(got, want, *limits) == close(got, want, *limits), (one, other, limits)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(1, 3), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(1)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), torch.zeros(3, device="meta")),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}",
)
def test_different_tensors_are_refused(got: torch.Tensor, want: torch.Tensor) -> None:
    assert near(got, want, 1e-5, 1e-5) == close(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize(("odd", "text"), [(1.5, "1.5"), (math.nan, "nan"), (math.inf, "inf")])
def test_the_worst_element_is_shown(odd: float, text: str) -> None:
    want = torch.ones(3, 4, dtype=torch.float64)
    got = want + 1e-9
    got[0, 1], got[2, 3] = 1.25, odd
    with pytest.raises(
        AssertionError, match=rf"it: 2 of 12 elements .* \(2, 3\): got {text}, expected 1 \+- 2e-05"
    ):
        assert_near(got, want, 1e-5, 1e-5, "it")


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (torch.tensor([3.0, 4.06]), "it: off by 6.00e-02 of 5.00e[+]00"),
        (torch.tensor([3.0, math.nan]), "it: off by nan"),
        (torch.tensor([3.0, 4.0, 0.0]), r"it: shape \(3,\), expected \(2,\)"),
        (None, "it: there is none"),
    ],
    ids=["far", "NaN", "shape", "none"],
)
def test_norms_are_relative_to_the_expected_value(got: torch.Tensor | None, text: str) -> None:
    want = torch.tensor([3.0, 4.0])
    for near_enough in (torch.tensor([3.0, 4.04]), want.double()):
        assert_norm_near(near_enough, want, 1e-2, "it")
    assert_norm_near(torch.zeros(2), torch.zeros(2), 1e-2, "nothing off nothing")
    with pytest.raises(AssertionError, match=text):
        assert_norm_near(got, want, 1e-2, "it")
