"""Gradients, layers, experts and tables in a subgroup: ranks 0 and 2 of three."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import backward
from tests.support import moe_layer as moe
from tests.support.calls import run_either
from tests.support.matmul_cases import AG, AR, IN, OUT, RS, Case
from tests.support.tolerances import assert_norm_near
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, MoE, RowParallelLinear, ShardedEmbeddingBag
from tileweave.nn.shards import local

MEMBERS = (0, 2)
DENSE = ((AG, None), (RS, None), (AR, None), (OUT, (1, 0)), (IN, (0, 1)))


def in_the_group(me: Member, body: Callable[..., None], *args: object) -> None:
    """Run ``body(me, group, rank, size)`` on the members; all ranks wait for them."""
    group = me.group(*MEMBERS)
    if group is not None:
        body(me, group, dist.get_rank(group), len(MEMBERS), *args)
    me.barrier()


def gradients(me: Member, group: dist.ProcessGroup, rank: int, size: int, case: Case) -> None:
    leaves = backward.draw_leaves(case, rank, size, me.device, "xwbrn")
    c, _ = backward.coefficients(case, rank, size, me.device)
    options = {**leaves.options(), **case.options(), "group": group}
    backward.weighted_sum(case.op, leaves.x, leaves.w, leaves.bias, options, c, None).backward()
    want = backward.expected_gradients(case, rank, size, me.device)
    for name in ("x", "w", "bias"):
        assert_norm_near(
            getattr(leaves, name).grad, getattr(want, name), 1e-5, f"rank {rank}, {case.op}: {name}"
        )


@pytest.mark.parametrize(
    "case",
    [Case(7, 18, 40, bias=True, op=op, how=how) for op, how in DENSE],
    ids=lambda case: case.op,
)
def test_gradients_in_a_subgroup(worlds: Worlds, case: Case) -> None:
    worlds("gloo", 3).run(in_the_group, gradients, case)


def layers(me: Member, group: dist.ProcessGroup, rank: int, size: int) -> None:
    torch.manual_seed(3)
    up, down = torch.nn.Linear(8, 12 * size), torch.nn.Linear(12 * size, 8)
    x, rows, cols = (
        torch.randn(5 * size, 8),
        slice(5 * rank, 5 * rank + 5),
        slice(12 * rank, 12 * rank + 12),
    )
    want = down(up(x))
    first, second = (
        ColumnParallelLinear.from_linear(up, group=group),
        RowParallelLinear.from_linear(down, group=group),
    )
    y = second(first(x[rows]))
    want.sum().backward()
    y.sum().backward()
    assert torch.allclose(y, want[rows], atol=1e-5)
    assert torch.allclose(local(first.weight.grad), up.weight.grad[cols], atol=1e-4)
    whole = RowParallelLinear.from_linear(down, group=group, scatter=False)
    assert torch.allclose(whole(up(x)[:, cols].contiguous()), want, atol=1e-5)


def experts(me: Member, group: dist.ProcessGroup, rank: int, size: int) -> None:
    layer = moe.Layer((4,))
    state = moe.whole_state(layer, size)
    module = MoE(layer.hidden, layer.width, layer.experts * size, layer.topk, group=group)
    module.load_whole_state_dict(state)
    xs = [
        torch.randn(4, layer.hidden, generator=torch.Generator().manual_seed(r))
        for r in range(size)
    ]
    leaves = {name: t.double().requires_grad_() for name, t in state.items()}
    ys = [moe.whole_layer(leaves, x.double(), layer) for x in xs]
    torch.stack([y.square().sum() for y in ys]).sum().backward()
    y = module(xs[rank])
    y.square().sum().backward()
    moe.verify_near(y, ys[rank].detach(), layer, "y")
    mine = slice(rank * layer.experts, (rank + 1) * layer.experts)
    for name in ("down_proj", "gate_up_proj"):
        moe.verify_near(
            local(getattr(module.experts, name).grad),
            leaves[f"experts.{name}"].grad[mine],
            layer,
            name,
        )


def tables(me: Member, group: dist.ProcessGroup, rank: int, size: int) -> None:
    module = ShardedEmbeddingBag([tw.TableSpec(f"t{i}", 6, 4, 1.0) for i in range(3)], group=group)
    whole = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    module.load_tables(whole)
    values = [
        torch.randint(0, 6, (6,), generator=torch.Generator().manual_seed(9 + r))
        for r in range(size)
    ]
    y = module(torch.ones(6, dtype=torch.int64), values[rank])
    leaves = [t.double().requires_grad_() for t in whole]
    outs = [
        torch.cat([leaves[t][values[r][2 * t : 2 * t + 2]] for t in range(3)], 1)
        for r in range(size)
    ]
    torch.stack([out.square().sum() for out in outs]).sum().backward()
    y.square().sum().backward()
    assert_norm_near(y, outs[rank].detach(), 1e-6, "y")
    for shard, weight in zip(module.plan.of_rank(rank), module.weights(), strict=True):
        want = leaves[shard.table].grad[:, shard.column : shard.column + shard.dim]
        assert_norm_near(weight.grad, want, 1e-5, f"gradient of table {shard.table}")


@pytest.mark.parametrize("body", [layers, experts, tables], ids=lambda body: body.__name__)
def test_modules_in_a_subgroup(worlds: Worlds, body: Callable[..., None]) -> None:
    worlds("gloo", 3).run(in_the_group, body)


def a_thread_a_group(me: Member) -> list[bool]:
    """First calls, which meet on the host, and later ones."""
    groups, w = [dist.new_group([0, 1]) for _ in range(2)], torch.ones(8, 16)

    def rows(number: int) -> bool:
        right = True
        for n in range(6):
            x = torch.full((4 + 4 * number, 16), me.rank + n + 10.0 * number)
            y = tw.all_gather_matmul(x, w, group=groups[number])
            right &= torch.equal(y, torch.cat([x - me.rank, x - me.rank + 1]) @ w.t())
        return right

    with ThreadPoolExecutor(2) as pool, mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="6"):
        found = list(pool.map(rows, range(2)))
    for group in groups:
        tw.close(group)
    return found


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreted", "unfused"])
def test_threads_with_own_groups_do_not_block_each_other(worlds: Worlds, interpreted: bool) -> None:
    """A rank that waits occupies the connection to the store."""
    assert run_either(worlds("gloo", 2), interpreted, a_thread_a_group) == [[True, True]] * 2
