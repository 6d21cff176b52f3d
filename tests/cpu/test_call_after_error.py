"""Calls after an error or after another mode of torch, and destroyed groups; two ranks."""

from __future__ import annotations

import gc
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import unfused
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.nn import MoE, ShardedEmbeddingBag
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul import backward as operator
from tileweave.planning.sharding import TableSpec
from tileweave.transport import host_memory
from tileweave.transport.cpu import CpuTransport
from tileweave.transport.workspace import REGISTRY


@pytest.fixture
def world(worlds: Worlds):
    return worlds("gloo", 2)


def error_of_gradient(me: Member, seed: int) -> float:
    """Gradient of the weight, which reads x of both ranks."""
    draw = torch.Generator().manual_seed(seed)
    xs, w, c = (torch.randn(*shape, generator=draw) for shape in ((2, 4, 16), (8, 16), (8, 8)))
    w.requires_grad_()
    (tw.all_gather_matmul(xs[me.rank].clone().requires_grad_(), w) * c).sum().backward()
    assert w.grad is not None
    return float((w.grad - c.t() @ xs.view(8, 16)).norm() / w.grad.norm())


def gradients_after_an_error(me: Member) -> list[float]:
    """Memory runs out between sending and waiting of a gather. Then copies of a peer are late."""
    before = error_of_gradient(me, 1)
    out_of_memory = mock.patch.object(
        operator, "multiply_and_scatter", side_effect=torch.OutOfMemoryError
    )
    with out_of_memory, pytest.raises(torch.OutOfMemoryError):
        error_of_gradient(me, 2)
    copy = CpuTransport._copy_all

    def late(self: CpuTransport, *args: object) -> None:
        time.sleep(0.2 * me.rank)
        copy(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(CpuTransport, "_copy_all", late):
        return [before, *(error_of_gradient(me, seed) for seed in (3, 4))]


def test_gather_left_by_an_error_is_waited_for(world) -> None:
    assert max(max(errors) for errors in world.run(gradients_after_an_error)) < 1e-5


def calls_broken_off_by_a_dual(me: Member) -> str:
    """Memory runs out in the reduce-scatter of a backward, on all ranks."""
    tw.close()
    error_of_gradient(me, 1)
    dual = "tileweave.ops.matmul.matmul_reduce_scatter_fused.ready"
    out_of_memory = mock.patch(dual, side_effect=torch.OutOfMemoryError)
    with out_of_memory, pytest.raises(torch.OutOfMemoryError):
        error_of_gradient(me, 2)
    found = REGISTRY.broken_off(name_of(None))
    tw.close()
    return found


def test_error_of_a_dual_is_recorded_once(world) -> None:
    assert set(world.run(calls_broken_off_by_a_dual)) == {"1 that broke off, 0 of them given up"}


def calls_after_failed_growth(me: Member) -> list[str]:
    w, found = torch.ones(8, 16), []
    tw.close()

    def rows_of(rows: int) -> str:
        try:
            return str(tw.all_gather_matmul(torch.ones(rows, 16), w).sum().item())
        except tw.TileweaveError as error:
            return type(error).__name__

    found.append(rows_of(4))
    if me.rank == 1:
        with mock.patch.object(
            host_memory, "_make", side_effect=OSError(28, "No space left on device")
        ):
            found.append(rows_of(40))
    else:
        found.append(rows_of(40))
    return [*found, rows_of(4), rows_of(40)]


def test_smaller_calls_work_after_failed_growth(world) -> None:
    """As the error says: for sums of ones, 2 R rows x 8 columns x 16."""
    wanted = ["1024.0", "UnsupportedError", "1024.0", "10240.0"]
    assert world.run(calls_after_failed_growth) == [wanted] * 2


def training_after_inference(me: Member) -> float:
    layer = tw.nn.ColumnParallelLinear(16, 8)
    tw.close()
    with torch.inference_mode():
        layer(torch.ones(4, 16))
    layer(torch.ones(40, 16)).sum().backward()
    assert layer.weight.grad is not None
    return float(layer.weight.grad.to_local().min())


def test_memory_grows_after_inference_mode(world) -> None:
    assert world.run(training_after_inference) == [80.0] * 2


def frozen_bags(me: Member) -> list[object]:
    """There is one table, so one rank has none and cannot see that it is frozen."""
    bags = ShardedEmbeddingBag([TableSpec("t", 6, 4, 1.0)])
    lengths, values, found = torch.ones(3, dtype=torch.int64), torch.arange(3), []
    holder = torch.nn.Sequential(bags)
    for trained in (False, True):
        holder.requires_grad_(trained)
        y = bags(lengths, values)
        found.append(y.requires_grad)
        (y.sum() + torch.zeros(1, requires_grad=True)).sum().backward()
    bags.load_state_dict(bags.state_dict())
    return [*found, sorted(bags.state_dict()), len(list(bags.parameters()))]


def test_rank_without_tables_knows_that_others_are_frozen(world) -> None:
    with_table, without = sorted(world.run(frozen_bags), key=lambda found: -len(found[2]))
    assert with_table == [False, True, ["embedding_bags.t.weight"], 1] and without == [
        False,
        True,
        [],
        1,
    ]


def wrong_width(me: Member) -> str:
    with pytest.raises(tw.InputError, match=r"\[\.\.\., 16\]"):
        MoE(16, 16, 4, 2)(torch.ones(4, 8))
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        moe, x = MoE(16, 16, 4, 4, dtype=torch.float32), torch.randn(4, 16, dtype=torch.float32)
        with unfused(me):
            sums = moe(x)
    finally:
        torch.set_default_dtype(torch.float32)
    with unfused(me):
        return "" if torch.equal(sums, moe(x)) else "sums depend on the default dtype"


def test_experts_refuse_wrong_widths_and_ignore_default_dtype(world) -> None:
    assert world.run(wrong_width) == ["", ""]


def groups_held(me: Member) -> int:
    before = len(REGISTRY._groups)
    for _ in range(3):
        group = dist.new_group([0, 1])
        tw.all_gather_matmul(torch.ones(4, 16), torch.ones(8, 16), group=group)
        tw.close(group)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return len(REGISTRY._groups) - before


def test_destroyed_groups_are_freed(world) -> None:
    assert world.run(groups_held) == [0, 0]
