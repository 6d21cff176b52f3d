"""Streams of the caller, and tensors that are not on the current device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World

import tileweave as tw
from tileweave.ops.core.registry import name_of
from tileweave.ops.matmul.all_gather_matmul_fused import run_fused
from tileweave.planning.problem import MatmulConfig, Plan

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

COPIED = MatmulConfig("triton", "copy_engine", 64, 128, 64, 3, 4)


def whole(me: Member, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and w of this rank, and the expected product of all rows: small integers."""
    draw = torch.Generator().manual_seed(rows)
    xs = [torch.randint(-2, 3, (rows, 64), generator=draw).bfloat16() for _ in range(me.world_size)]
    w = torch.randint(-2, 3, (256, 64), generator=draw).bfloat16()
    return (
        xs[me.rank].to(me.device),
        w.to(me.device),
        (torch.cat(xs).float() @ w.float().t()).to(me.device),
    )


def on_urgent_streams(me: Member) -> list[bool]:
    """torch cycles through 32 streams of each priority: copies on one of those would be queued
    after the kernel that waits for them."""
    x, w, want = whole(me, 2048)
    plan = Plan("fused", "copies", COPIED, world_size=me.world_size)
    group, found = name_of(dist.group.WORLD), []
    for _ in range(40):
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(run_fused(x, w, None, None, None, group, plan))
        torch.cuda.current_stream().wait_stream(stream)
    return [torch.equal(y.float(), want) for y in found]


def test_copies_do_not_use_streams_of_the_caller(largest: World) -> None:
    for found in largest.run(on_urgent_streams, timeout=120):
        assert found == [True] * 40


def off_the_current_device(me: Member) -> list[bool]:
    found = []
    for rows in (64, 2048):
        x, w, want = whole(me, rows)
        right = tw.all_gather_matmul(x, w)
        with torch.cuda.device((me.device.index + 1) % torch.cuda.device_count()):
            y = tw.all_gather_matmul(x, w)
            gradient = torch.autograd.grad(
                tw.matmul_all_reduce(x.requires_grad_(), w).float().sum(), x
            )[0]
        torch.cuda.synchronize(me.device)
        found += [torch.equal(y, right), torch.equal(y.float(), want), gradient.device == me.device]
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device is always the current one")
def test_operators_run_where_their_tensors_are(largest: World) -> None:
    for found in largest.run(off_the_current_device, timeout=120):
        assert all(found)
