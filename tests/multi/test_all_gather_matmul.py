"""all_gather_matmul between GPUs: both kernels and transports, late ranks, graphs, two groups, an
absent peer.

Each kernel compiles on each rank for each new config, world size, dtype and class of shape, which
is most of the time here. So there are few variants: tests of a kernel run with both kernels and
transports, tests of the protocol once with each transport.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from tests.support import backward, behaviour, gpu_behaviour, parity
from tests.support.graph_plans import captured_calls
from tests.support.matmul_cases import AG, RS, Case, draw, draw_operands, prepare
from tests.support.tolerances import GRADIENT_ERROR, assert_norm_near
from tests.support.worlds import Member, World, one_shot

import tileweave as tw
from tileweave.planning.problem import MatmulConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="the Gluon kernel is Hopper's")

TRITON = MatmulConfig("triton", "sm", 64, 128, 64, 3, 4)
HOPPER = MatmulConfig("hopper", "sm", 128, 128, 64, 4, 8)
HOPPER_SMALL = MatmulConfig("hopper", "sm", 64, 128, 64, 4, 4)
LIBRARY = MatmulConfig("library", "sm", 16, 128, 64, 1, 4)
BY_SHARDS = replace(LIBRARY, transport="copy_engine")
TRITON_COPIES, HOPPER_COPIES = (
    replace(TRITON, transport="copy_engine"),
    replace(HOPPER, transport="copy_engine"),
)


def name_of(config: MatmulConfig) -> str:
    return f"{config.kernel}-{config.transport}"


def configs(*found: MatmulConfig) -> pytest.MarkDecorator:
    marked = [pytest.param(c, marks=on_hopper if c.kernel == "hopper" else ()) for c in found]
    return pytest.mark.parametrize("config", marked, ids=name_of)


each_kernel_and_transport = configs(
    TRITON, TRITON_COPIES, HOPPER, HOPPER_COPIES, LIBRARY, BY_SHARDS
)
each_transport = configs(TRITON, HOPPER_COPIES) if IS_HOPPER else configs(TRITON, TRITON_COPIES)

# Rows of a shard, columns per rank, K. With 4 ranks M is 4, 252, 4096 and 4 x 1021.
SHAPES = {
    "one_row": (1, 256, 512),
    "odd_rows": (63, 320, 256),
    "large": (1024, 1280, 1024),
    "all_odd": (1021, 100, 200),
}


@each_kernel_and_transport
def test_parity(largest: World, config: MatmulConfig) -> None:
    cases = [
        Case(*shape, "bfloat16", bias=True, integers=whole)
        for shape in SHAPES.values()
        for whole in (False, True)
    ]
    largest.run(parity.parity, cases, config, timeout=200)


@each_transport
def test_parity_in_each_world(world: World, config: MatmulConfig) -> None:
    """Also with the gathered input, in the other dtype."""
    cases = [
        Case(rows, 256, 256, "float16", gathered=True, integers=rows == 48) for rows in (48, 160)
    ]
    world.run(parity.parity, cases, config, timeout=120)


@on_hopper
def test_parity_of_the_triton_kernel_where_tma_cannot_read(largest: World) -> None:
    """TMA cannot read these rows: the Triton kernel runs instead of the Hopper kernel. And a small
    tile."""
    largest.run(
        parity.parity,
        [Case(33, 65, 101, "bfloat16", bias=True, integers=True)],
        HOPPER,
        timeout=120,
    )
    largest.run(
        parity.parity, [Case(16, 384, 512, "bfloat16", bias=True)], HOPPER_SMALL, timeout=120
    )


def test_public_calls(largest: World) -> None:
    sizes = (16, "bfloat16"), (520, "float16")
    for cols, path in ((256, "fused"), (252, None)):  # rows of 252 columns: not aligned for cuBLAS
        cases = [Case(rows, cols, 512, dtype, bias=True) for rows, dtype in sizes]
        largest.run(behaviour.public_calls, cases, path, timeout=120)
    largest.run(behaviour.public_calls, [Case(16, 64, 100, "float32", bias=True)], "unfused")


def test_dimensions(largest: World) -> None:
    largest.run(behaviour.many_dimensions, Case(48, 128, 256, "bfloat16", bias=True), timeout=120)
    largest.run(behaviour.empty_dimensions, "bfloat16")


@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_close_frees_at_once(largest: World, rows: int) -> None:
    largest.run(
        behaviour.close_frees_at_once, Case(rows, 128, 256, "bfloat16", bias=True), timeout=100
    )


# --- Time ---


@each_kernel_and_transport
def test_many_calls_with_late_ranks(largest: World, config: MatmulConfig) -> None:
    cases = [Case(rows, 128, 256, "bfloat16") for rows in (16, 48, 64, 128)]
    largest.run(parity.many_calls, cases, config, 250, 0.0005, timeout=200)


@each_transport
def test_the_epoch_wraps_around(largest: World, config: MatmulConfig) -> None:
    largest.run(parity.calls_around_the_wrap, Case(48, 128, 256, "bfloat16"), config, timeout=120)


@each_transport
def test_two_groups_on_two_streams(largest: World, config: MatmulConfig) -> None:
    largest.run(parity.two_groups, [0, 1], Case(48, 128, 256, "bfloat16"), config, 20, timeout=120)


def test_subgroups(largest: World) -> None:
    """Groups that share some of their ranks: these have met others before, and more often than the
    rest."""
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
    call = prepare(case, me.rank, me.world_size, me.device, 12)
    call.verify(f"rank {me.rank}", tw.all_gather_matmul(call.x, call.w))


def test_ranks_with_different_histories(largest: World) -> None:
    """Covers what test_subgroups covers, with two GPUs."""
    largest.run(call_after_a_rendezvous_of_its_own, Case(16, 128, 256, "bfloat16"), timeout=60)


# --- Graphs ---


@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_replays_with_changing_inputs(largest: World, rows: int) -> None:
    """Small shards are pushed by the kernel, large ones by copy engines. The graph freezes their
    addresses."""
    largest.run(
        gpu_behaviour.replay_and_call,
        Case(rows, 128, 256, "bfloat16", bias=True),
        60,
        timeout=200,
    )


def test_capture_without_warmup(largest: World) -> None:
    largest.run(gpu_behaviour.capture_without_warmup, Case(16, 32, 64, "bfloat16"), timeout=100)


@pytest.mark.parametrize("op", [AG, RS])
@pytest.mark.parametrize("before", [1, 2])
def test_a_plan_of_graphs(largest: World, op: str, before: int) -> None:
    """It runs in the first call, in the capture, and in no other eager call."""
    case = Case(64, 256, 512, "bfloat16", op=op)
    for ran in largest.run(captured_calls, case, before, timeout=100):
        assert ran == ["copy_engine", *["sm"] * (before - 1), "copy_engine", *["sm"] * 6]


def backward_in_a_graph(me: Member, case: Case, replays: int) -> None:
    """Forward and backward in one graph after a warmup only, replayed with fresh inputs and some
    ranks late."""
    tw.close()
    rows, cols, depth = case.x_rows(me.world_size), case.cols, case.depth
    tw.warmup(case.op, rows, cols, depth, dtype=case.torch_dtype, backward=True)
    held = prepare(case, me.rank, me.world_size, me.device, 0).operands
    c = torch.zeros(me.world_size * rows, cols, dtype=case.torch_dtype, device=me.device)
    x, w = held.x.requires_grad_(), held.w.requires_grad_()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = torch.autograd.grad(tw.all_gather_matmul(x, w), (x, w), c)
    for n in range(replays):
        if n % me.world_size == me.rank:
            parity.pause(me.device, 0.0005)
        everyone = [
            draw_operands(case, rank, me.world_size, me.device, 100 + n)
            for rank in range(me.world_size)
        ]
        weights = [
            draw(c.shape, case, 1.0, me.device, 200 + n, rank) for rank in range(me.world_size)
        ]
        with torch.no_grad():
            for into, fresh in zip(
                (x, w, c), (everyone[me.rank].x, everyone[me.rank].w, weights[me.rank]), strict=True
            ):
                into.copy_(fresh)
        graph.replay()
        mine = slice(me.rank * rows, (me.rank + 1) * rows)
        parts = [
            of.double() @ operands.w.double()
            for of, operands in zip(weights, everyone, strict=True)
        ]
        gathered = torch.cat([operands.x for operands in everyone]).double()
        for got, want in zip(
            found,
            (torch.stack(parts).sum(0)[mine], weights[me.rank].double().t() @ gathered),
            strict=True,
        ):
            assert_norm_near(got, want, GRADIENT_ERROR[case.dtype], f"rank {me.rank}, replay {n}")
    tw.synchronize()
    me.barrier()
    del graph
    tw.close()


@pytest.mark.parametrize("rows", [64, 1024], ids=["small", "large"])
def test_a_captured_backward(largest: World, rows: int) -> None:
    """Its gather uses copy engines concurrently with dgrad, in memory that only a backward
    allocates."""
    largest.run(backward_in_a_graph, Case(rows, 512, 1024, "bfloat16"), 12, timeout=200)


# --- Gradients, compilers, modules ---


def test_gradients(largest: World) -> None:
    cases = [
        Case(64, 128, 256, "bfloat16", bias=True, gathered=gathered) for gathered in (False, True)
    ]
    largest.run(backward.gradients, cases, timeout=120)
    largest.run(backward.gradients, cases, "xwb", "inductor", timeout=200)


def test_opcheck(largest: World) -> None:
    largest.run(behaviour.opcheck, Case(16, 64, 128, "bfloat16", bias=True), timeout=200)


@pytest.mark.own_gpu  # torch's gather of a whole DTensor crashes with gloo
def test_column_parallel_linear(largest: World) -> None:
    largest.run(
        behaviour.column_parallel_linear,
        Case(64, 128, 256, "bfloat16", bias=True),
        True,
        timeout=100,
    )


# --- An absent peer ---


@each_transport
def test_a_peer_that_never_calls(config: MatmulConfig) -> None:
    case = Case(64, 256, 512, "bfloat16")
    gpu_behaviour.check_timed_out(
        one_shot("nccl", 2, gpu_behaviour.calls_without_peer, case, config, 1, timeout=150), case.op
    )


def first_call_without(me: Member, absent: int) -> float | None:
    os.environ["TILEWEAVE_TIMEOUT"] = str(gpu_behaviour.SECONDS)
    if me.rank == absent:
        time.sleep(gpu_behaviour.SECONDS + 4.0)
        return None
    call = prepare(Case(64, 256, 512, "bfloat16"), me.rank, me.world_size, me.device, 99)
    started = time.monotonic()
    with pytest.raises(tw.PeerTimeout, match="the first call of a group"):
        tw.all_gather_matmul(call.x, call.w)
    return time.monotonic() - started


def test_absent_peer_in_the_first_call() -> None:
    """Ranks meet and map memory in the first call: torch's own rendezvous would wait for half an
    hour."""
    ends = one_shot("nccl", 2, first_call_without, 1, timeout=60)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert gpu_behaviour.SECONDS <= ends[0].value < gpu_behaviour.SECONDS + 2.0, ends


def test_mismatched_calls_raise_on_every_rank(largest: World) -> None:
    texts = largest.run(behaviour.mismatch_error, AG)
    assert len(set(texts)) == 1
    if largest.size > 2:  # of two ranks, either may be named as the odd one
        assert "rank 1" in texts[0]
