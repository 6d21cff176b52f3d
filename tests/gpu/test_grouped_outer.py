"""Weight gradients of experts on a Hopper GPU against fp32 loops: ragged and empty experts, without
rows of other experts."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

ROWS = ([0, 1, 31, 32, 33, 64, 129, 0, 500], [0, 0, 5], [700])


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_grouped_outer_against_loops(rows: list[int], dtype: torch.dtype) -> None:
    from tileweave.kernels.experts.weight_gradient_hopper import grouped_outer, takes

    torch.manual_seed(1)
    total, cols, depth = sum(rows), 384, 328  # depth: a full tile column and a partial one
    left, right = (torch.randn(total + 70, n, device="cuda").to(dtype) for n in (cols, depth))
    left[total:], right[total:] = float("nan"), float("nan")
    offsets = torch.tensor(
        [0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
    )
    assert takes(left, right)
    for _ in range(2):
        got = grouped_outer(left, right, offsets, 132)
        for expert, (begin, end) in enumerate(
            zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ):
            want = left[begin:end].float().t() @ right[begin:end].float()
            assert (got[expert].float() - want).norm() <= 4e-3 * want.norm(), (
                f"expert {expert} of {rows}"
            )


def test_infinite_rows_stay_with_their_expert() -> None:
    from tileweave.kernels.experts.weight_gradient_hopper import grouped_outer

    # the middle expert has fewer rows than a block, the first one ends within a block
    rows = [40, 20, 50]
    left, right = (
        torch.ones(sum(rows), 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    left[60:], right[60:] = float("inf"), float("inf")
    right[40:60] = 2.0
    offsets = torch.tensor([0, 40, 60, 110], dtype=torch.int32, device="cuda")
    got = grouped_outer(left, right, offsets, 132)
    assert (got[0] == 40).all() and (got[1] == 40).all() and not got[2].isfinite().any()
