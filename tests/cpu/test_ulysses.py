"""Ulysses: grouped-query attention with tokens sharded before and after it, and heads during it,
against one device.

The module docstring of ``ops/matmul/matmul_all_to_all.py`` gives the order of a fused w_qkv. Here
it is built, used and trained.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import run_either
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, Worlds
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM = 6, 8, 8, 4, 3


def attend(qkv: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """[S, (heads + 2 kv_heads) * DIM], q then k then v, head by head -> [S, heads * DIM];
    causal."""
    q, k, v = (
        t.unflatten(1, (-1, DIM)).transpose(0, 1)
        for t in qkv.split([n * DIM for n in (heads, kv_heads, kv_heads)], 1)
    )
    k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def rank_by_rank(w: torch.Tensor, ranks: int) -> torch.Tensor:
    """The rows of a stock w_qkv, [q; k; v], reordered so that the heads of each rank are
    adjacent."""
    q, k, v = w.split([n * DIM for n in (HEADS, KV_HEADS, KV_HEADS)])
    return torch.cat(
        [
            p
            for parts in zip(q.chunk(ranks), k.chunk(ranks), v.chunk(ranks), strict=True)
            for p in parts
        ]
    )


def draw(tokens: int) -> list[torch.Tensor]:
    """The same on every rank: x of all tokens, w_qkv in stock order, its bias, w_o, and the
    gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    rows = (HEADS + 2 * KV_HEADS) * DIM
    shapes = [(tokens, HIDDEN), (rows, HIDDEN), (rows,), (HIDDEN, HEADS * DIM), (tokens, HIDDEN)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def round_trip(me: Member) -> None:
    size = me.world_size
    *operands, upstream = draw(size * TOKENS)
    leaves = [t.clone().requires_grad_() for t in operands]
    x, w_qkv, bias, w_o = leaves
    want = attend(x @ w_qkv.t() + bias, HEADS, KV_HEADS) @ w_o.t()
    wanted = torch.autograd.grad(want, leaves, upstream)

    mine = slice(me.rank * TOKENS, (me.rank + 1) * TOKENS)
    own = [t.float() for t in (operands[0][mine], *operands[1:])]
    x, w_qkv, bias, w_o = own = [t.clone().requires_grad_() for t in own]
    qkv = tw.matmul_all_to_all(
        x, rank_by_rank(w_qkv, size), rank_by_rank(bias, size), scatter_dim=1, gather_dim=0
    )
    assert qkv.shape == (size * TOKENS, (HEADS + 2 * KV_HEADS) * DIM // size)
    y = tw.all_to_all_matmul(
        attend(qkv, HEADS // size, KV_HEADS // size), w_o, scatter_dim=0, gather_dim=1
    )
    assert_near(y.double(), want[mine], 1e-4, 1e-4, "attention")
    gradients = torch.autograd.grad(y, own, upstream[mine].float())
    assert_near(gradients[0].double(), wanted[0][mine], 1e-4, 1e-4, "the gradient of x")
    for name, found, expected in zip(
        ("w_qkv", "bias", "w_o"), gradients[1:], wanted[1:], strict=True
    ):
        # weights are replicated: each rank has gradients of the products of its own tokens
        dist.all_reduce(found)
        assert_near(found.double(), expected, 1e-4, 1e-3, f"the gradient of {name}")


@pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_matches_one_device(worlds: Worlds, size: int, interpreted: bool) -> None:
    run_either(worlds("gloo", size), interpreted, round_trip)
