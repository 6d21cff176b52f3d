"""Sums over nodes are added in the order of nodes, so that they do not depend on which node adds
them."""

from __future__ import annotations

import pytest
import torch
from tests.support.tolerances import IN_RANK_ORDER, TO_ADD

from tileweave.ops.core.ways import add_in_order


@pytest.mark.parametrize("node", range(3))
def test_nodes_are_added_in_their_order(node: int) -> None:
    arrived = TO_ADD.clone()[:, None]
    arrived[node] = float("nan")  # the own part is not sent
    out = torch.empty(1, 3)
    add_in_order(TO_ADD[node : node + 1], arrived, node, out)
    assert out.tolist() == [IN_RANK_ORDER]


@pytest.mark.parametrize("node", range(3))
def test_half_precision_is_rounded_once(node: int) -> None:
    parts = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    out = parts[node : node + 1].clone()  # may be the own part itself
    add_in_order(out, parts[:, None].clone(), node, out)
    assert out.tolist() == [[2050.0]]
