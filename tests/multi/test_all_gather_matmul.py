"""all_gather_matmul between GPUs: both kernels and transports, late ranks, graphs, two groups, an absent peer.

Kernels compile for each new configuration and shape class, which is most of the time here: shapes are few on purpose.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests import behaviour, parity
from tests.parity import Case
from tests.worlds import Member, World, one_shot

import tileweave as tw
from tileweave.config import MatmulConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TRITON = MatmulConfig("triton", "sm", 64, 128, 64, 3, 4)
HOPPER = MatmulConfig("hopper", "sm", 128, 128, 64, 4, 8)
HOPPER_SMALL = MatmulConfig("hopper", "sm", 64, 128, 64, 4, 4)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

kernels = pytest.mark.parametrize(
    "config",
    [TRITON, pytest.param(HOPPER, marks=pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's"))],
    ids=lambda config: config.kernel,
)
transports = pytest.mark.parametrize("transport", ["sm", "copy_engine"])

# Rows of a shard, columns of a rank, K. With 4 ranks M is 4, 64, 252, 512, 4096 and 4 x 1021.
SHAPES = {
    "one_row": (1, 256, 512),
    "under_a_tile": (16, 256, 512),
    "odd_rows": (63, 320, 256),
    "whole_tiles": (128, 512, 1024),
    "large": (1024, 1280, 1024),
    "all_odd": (1021, 100, 200),
    "unaligned": (33, 65, 101),  # TMA cannot read these: the Triton kernel steps in
}


@kernels
@transports
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parity(largest: World, config: MatmulConfig, transport: str, shape: tuple[int, int, int]) -> None:
    cases = [Case(*shape, "bfloat16", bias=True, integers=integers) for integers in (False, True)]
    largest.run(parity.parity, cases, replace(config, transport=transport), timeout=120)


@kernels
@transports
def test_parity_in_each_world(world: World, config: MatmulConfig, transport: str) -> None:
    """Also with the gathered input, in the other dtype."""
    cases = [Case(rows, 256, 256, "float16", gathered=True, integers=rows == 48) for rows in (48, 160)]
    world.run(parity.parity, cases, replace(config, transport=transport), timeout=120)


@pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's")
def test_parity_of_a_small_tile(largest: World) -> None:
    largest.run(parity.parity, [Case(16, 384, 512, "bfloat16", bias=True)], HOPPER_SMALL, timeout=120)


def test_public_calls(world: World) -> None:
    cases = [Case(16, 256, 512, "bfloat16", bias=True), Case(520, 256, 512, "float16", bias=True)]
    world.run(behaviour.public_calls, cases, "fused", timeout=120)


def test_float32_runs_unfused(largest: World) -> None:
    largest.run(behaviour.public_calls, [Case(16, 64, 100, "float32", bias=True)], "unfused")


def test_dimensions(largest: World) -> None:
    largest.run(behaviour.many_dimensions, Case(48, 128, 256, "bfloat16", bias=True), timeout=120)
    largest.run(behaviour.empty_dimensions, "bfloat16")


@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_close_frees_at_once(largest: World, rows: int) -> None:
    largest.run(behaviour.close_frees_at_once, Case(rows, 128, 256, "bfloat16", bias=True), timeout=100)


# --- Time ---


@kernels
@transports
def test_many_calls_with_late_ranks(largest: World, config: MatmulConfig, transport: str) -> None:
    cases = [Case(rows, 128, 256, "bfloat16") for rows in (16, 48, 64, 128)]
    largest.run(parity.many_calls, cases, replace(config, transport=transport), 500, 0.0005, timeout=200)


@transports
def test_the_epoch_wraps_around(largest: World, transport: str) -> None:
    config = replace(TRITON, transport=transport)
    largest.run(parity.calls_around_the_wrap, Case(48, 128, 256, "bfloat16"), config, timeout=120)


@kernels
@transports
def test_two_groups_on_two_streams(largest: World, config: MatmulConfig, transport: str) -> None:
    case = Case(48, 128, 256, "bfloat16")
    largest.run(parity.two_groups, [0, 1], case, replace(config, transport=transport), 20, timeout=120)


def test_subgroups(largest: World) -> None:
    """Groups that share some of their ranks: these have met others before, and more often than the rest."""
    if largest.size < 4:
        pytest.skip("needs 4 GPUs")
    for members in ([0, 1], [1, 3], [0, 1, 2, 3], [1, 2, 3]):
        largest.run(parity.subgroup, members, Case(48, 128, 256, "bfloat16"), TRITON, timeout=60)


def call_after_a_rendezvous_of_its_own(me: Member, case: Case) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    tw.close()
    alone = me.group(0)
    if alone is not None:  # rank 0: torch counts this, and the other ranks know nothing of it
        symm_mem.rendezvous(symm_mem.empty(64, device=me.device), alone)
    call = parity.prepare(case, me.rank, me.world_size, me.device, 12)
    call.verify(f"rank {me.rank}", tw.all_gather_matmul(call.x, call.w))


def test_a_rank_with_a_history_of_its_own(largest: World) -> None:
    """Needs what test_subgroups needs, with two GPUs."""
    largest.run(call_after_a_rendezvous_of_its_own, Case(16, 128, 256, "bfloat16"), timeout=60)


# --- Graphs ---


def replay_and_call(me: Member, case: Case, replays: int) -> None:
    """A graph with two calls, replayed with fresh inputs; eager calls in between, some ranks late."""
    first, second = (parity.prepare(case, me.rank, me.world_size, me.device, n) for n in range(2))
    dtype = case.torch_dtype
    tw.warmup("all_gather_matmul", case.rows, case.cols, case.depth, dtype=dtype)
    before = tw.all_gather_matmul(first.x, first.w, first.bias)
    first.verify("before the capture", before)
    graph = torch.cuda.CUDAGraph()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y1 = tw.all_gather_matmul(first.x, first.w, first.bias)
        y2 = tw.all_gather_matmul(second.x, second.w, second.bias)
    kept = []
    for n in range(replays):
        if n % me.world_size == me.rank:
            parity.pause(me.device, 0.0005)
        fresh = [parity.prepare(case, me.rank, me.world_size, me.device, 100 + 2 * n + i) for i in range(2)]
        for held, call in zip((first, second), fresh, strict=True):
            held.x.copy_(call.x)
            held.w.copy_(call.w)
            held.bias.copy_(call.bias)
        graph.replay()
        kept += [(f"replay {n}", fresh[0], y1.clone()), (f"replay {n}, second call", fresh[1], y2.clone())]
        if n % 3 == 0:
            eager = parity.prepare(case, me.rank, me.world_size, me.device, 1000 + n)
            kept.append((f"eager after replay {n}", eager, tw.all_gather_matmul(eager.x, eager.w, eager.bias)))
        if len(kept) > 50:
            tw.synchronize()
            for what, call, y in kept:
                call.verify(f"rank {me.rank}, {what}", y)
            kept.clear()
    tw.synchronize()
    for what, call, y in kept:
        call.verify(f"rank {me.rank}, {what}", y)
    me.barrier()
    del graph
    tw.close()  # what follows in this world starts without a captured call behind it


@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_replays_with_changing_inputs(world: World, rows: int) -> None:
    """Small shards are pushed by the kernel, large ones by copy engines, whose addresses the graph freezes."""
    replays = 100 if world.size > 2 or torch.cuda.device_count() < 3 else 20
    world.run(replay_and_call, Case(rows, 128, 256, "bfloat16", bias=True), replays, timeout=200)


def capture_without_warmup(me: Member) -> None:
    tw.close()
    x = torch.zeros(16, 64, dtype=torch.bfloat16, device=me.device)
    w = torch.zeros(32, 64, dtype=torch.bfloat16, device=me.device)
    torch.cuda.synchronize()
    me.barrier()
    with (
        pytest.raises(tw.CaptureError, match=r"tw\.warmup"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        tw.all_gather_matmul(x, w)
    me.barrier()
    tw.all_gather_matmul(x, w)
    torch.cuda.synchronize()
    larger = torch.zeros(256, 64, dtype=torch.bfloat16, device=me.device)
    torch.cuda.synchronize()
    me.barrier()
    with (
        pytest.raises(tw.CaptureError, match=r"tw\.warmup"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        tw.all_gather_matmul(larger, w)
    call = parity.prepare(Case(16, 32, 64, "bfloat16"), me.rank, me.world_size, me.device, 9)
    call.verify("after refused captures", tw.all_gather_matmul(call.x, call.w))


def test_capture_without_warmup(largest: World) -> None:
    largest.run(capture_without_warmup, timeout=100)


# --- Gradients, compilers, modules ---


def test_gradients(world: World) -> None:
    cases = [Case(64, 128, 256, "bfloat16", bias=True, gathered=gathered) for gathered in (False, True)]
    world.run(behaviour.gradients, cases, timeout=120)


def test_what_backward_keeps(largest: World) -> None:
    largest.run(behaviour.what_backward_keeps, Case(64, 128, 256, "bfloat16", bias=True))


def test_compiled(largest: World) -> None:
    cases = [Case(64, 128, 256, "bfloat16", bias=True, gathered=gathered) for gathered in (False, True)]
    largest.run(behaviour.gradients, cases, "xwb", "inductor", timeout=200)


def test_opcheck(largest: World) -> None:
    largest.run(behaviour.opcheck, Case(16, 64, 128, "bfloat16", bias=True), timeout=200)


def test_column_parallel_linear(largest: World) -> None:
    largest.run(behaviour.column_parallel_linear, Case(64, 128, 256, "bfloat16", bias=True), True, timeout=100)


# --- A peer that never comes ---

SECONDS = 3.0


def call_without(me: Member, config: MatmulConfig, absent: int) -> dict[str, object] | None:
    case, group = Case(64, 256, 512, "bfloat16").fit(config), dist.group.WORLD
    for seconds in (60.0, SECONDS):  # the first round compiles, and may take its time
        me.barrier()
        tw.close()
        os.environ["TILEWEAVE_TIMEOUT"] = str(seconds)
        for n in range(3):
            call = parity.prepare(case, me.rank, me.world_size, me.device, n)
            parity.run(call, group, config)
        tw.synchronize()
        call.verify(f"rank {me.rank}, while all call")
    me.barrier()
    if me.rank == absent:
        time.sleep(SECONDS + 4.0)
        return None
    call = parity.prepare(case, me.rank, me.world_size, me.device, 99)
    call.out.zero_()
    torch.cuda.synchronize()
    started = time.monotonic()
    parity.run(call, group, config)
    with pytest.raises(tw.PeerTimeout) as caught:
        tw.synchronize()
    taken = time.monotonic() - started
    with pytest.raises(tw.PeerTimeout):
        parity.run(call, group, config)
    poisoned = bool(call.out.isnan().any())
    tw.close()
    error = caught.value
    return {
        "taken": taken,
        "rank": error.rank,
        "peer": error.peer,
        "lag": error.expected - error.seen,
        "poisoned": poisoned,
    }


@pytest.mark.parametrize(
    "config",
    [
        TRITON,
        pytest.param(
            replace(HOPPER, transport="copy_engine"),
            marks=pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's"),
        ),
    ],
    ids=lambda config: config.kernel,
)
def test_a_peer_that_never_calls(config: MatmulConfig) -> None:
    ends = one_shot("nccl", 2, call_without, config, 1, timeout=150)
    assert [end.exit_code for end in ends] == [0, 0], ends
    seen = ends[0].value
    assert SECONDS <= seen["taken"] < SECONDS + 2.0, seen
    assert (seen["rank"], seen["peer"], seen["lag"], seen["poisoned"]) == (0, 1, 1, True), seen


def first_call_without(me: Member, absent: int) -> float | None:
    os.environ["TILEWEAVE_TIMEOUT"] = str(SECONDS)
    if me.rank == absent:
        time.sleep(SECONDS + 4.0)
        return None
    call = parity.prepare(Case(64, 256, 512, "bfloat16"), me.rank, me.world_size, me.device, 99)
    started = time.monotonic()
    with pytest.raises(tw.PeerTimeout, match="mapping symmetric memory"):
        tw.all_gather_matmul(call.x, call.w)
    return time.monotonic() - started


def test_a_peer_that_never_comes_to_the_first_call() -> None:
    """Memory is mapped in the first call: torch's own rendezvous would wait for half an hour."""
    ends = one_shot("nccl", 2, first_call_without, 1, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert SECONDS <= ends[0].value < SECONDS + 2.0, ends


def ranks_disagree(me: Member) -> str:
    os.environ["TILEWEAVE_DEBUG"] = "1"
    try:
        x = torch.zeros(17 if me.rank == 1 else 16, 64, dtype=torch.bfloat16, device=me.device)
        w = torch.zeros(32, 64, dtype=torch.bfloat16, device=me.device)
        with pytest.raises(tw.RankMismatchError) as caught:
            tw.all_gather_matmul(x, w)
    finally:
        del os.environ["TILEWEAVE_DEBUG"]
    return str(caught.value)


def test_ranks_that_disagree(largest: World) -> None:
    texts = largest.run(ranks_disagree)
    assert len(set(texts)) == 1
    if largest.size > 2:  # of two, either may be called the odd one
        assert "rank 1" in texts[0]
