"""dispatch_grouped_matmul in CPU worlds: the real kernels, interpreted, over shared host memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.support import experts
from tests.support.calls import call_unfused, unfused
from tests.support.delays import stall_in_the_kernel
from tests.support.experts import ROUTINGS, Case
from tests.support.worlds import Member, Worlds, one_shot

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.schedules.grouped import DispatchConfig

CONFIG = DispatchConfig("triton", 16, 32, 64, 1, 4, 2, 1, 4, 2)

CASES = [Case((5,), depth=16, cols=40, routing=routing) for routing in ROUTINGS]
UNEVEN = [
    Case((5, 0, 9)),
    Case((0, 3), spare=2),
    Case((4,), topk=3, experts=1),
    Case((6,), experts=5, topk=8),
]


def test_references(worlds: Worlds) -> None:
    narrow = [replace(case, index_dtype=torch.int32) for case in UNEVEN]
    worlds("gloo", 3).run(experts.references, [*CASES, *UNEVEN, *narrow])


def test_plans_in_one_launch_and_sorted(worlds: Worlds) -> None:
    worlds("gloo", 2).run(experts.plans, [Case((33, 20), experts=5, topk=3, routing="holes")])


def test_parity(worlds: Worlds) -> None:
    worlds("gloo", 3).run(experts.parity, CASES, CONFIG)


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_tokens_and_experts(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(experts.parity, UNEVEN[size // 4 :: 2], CONFIG)


def test_tiles_of_many_rows_and_half(worlds: Worlds) -> None:
    """Several bands of tile rows in an expert, ragged columns, and K that is no multiple of a
    tile."""
    case = Case(
        (40,), experts=2, topk=2, depth=72, cols=70, dtype="float16", index_dtype=torch.int32
    )
    worlds("gloo", 2).run(experts.parity, [case], CONFIG)


def test_public_calls(worlds: Worlds) -> None:
    worlds("gloo", 2).run(experts.public_calls, [UNEVEN[0], CASES[5]], "fused")
    narrow = replace(CASES[0], index_dtype=torch.int32)
    worlds("gloo", 1).run(experts.public_calls, [CASES[0], narrow], "unfused")
    worlds("gloo", 2).run(call_unfused, experts.public_calls, [CASES[0], narrow], "unfused")


# --- Time ---


def test_many_calls_with_late_ranks(worlds: Worlds) -> None:
    cases = [
        Case((tokens, 2), depth=16, cols=20, routing=routing)
        for tokens, routing in ((1, "even"), (6, "skewed"))
    ]
    worlds("gloo", 3).run(experts.many_calls, cases, CONFIG, 8, 0.004, stall_in_the_kernel)


def wrap(me: Member) -> None:
    case = Case((3,), depth=16, cols=20)
    experts.parity(me, [case], CONFIG)
    instances = [
        workspace_of(name_of(None), me.device).instance(op, "sm")
        for op in (experts.OP, experts.ROUTING)
    ]
    for instance in instances:
        instance.transport.barrier()
        instance.control[0] = 2**31 - 2
        instance.signals.fill_(2**31 - 3)
        instance.counters.zero_()
        instance.transport.barrier()
    experts.parity(me, [case], CONFIG)
    assert all(int(instance.control[0]) < 0 for instance in instances)
    tw.close()


def test_the_epoch_wraps_around(worlds: Worlds) -> None:
    worlds("gloo", 2).run(wrap)


def call_without(me: Member, absent: int) -> str | None:
    case = Case((3,), depth=16, cols=20)
    o = experts.draw(case, me.rank, me.world_size, me.device, 0)
    for seconds in ("20", "2"):  # the first round imports
        me.barrier()
        tw.close()
        os.environ["TILEWEAVE_TIMEOUT"] = seconds
        _, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids)
    me.barrier()
    if me.rank == absent:
        time.sleep(4)
        return None
    with pytest.raises(tw.PeerTimeout) as caught:
        tw.dispatch_grouped_matmul(o.x, o.experts, plan=plan)
    tw.close()
    return f"{caught.value.op} {caught.value.peer}"


def test_a_peer_that_stops_calling() -> None:
    ends = one_shot("gloo", 2, call_without, 1)
    assert [end.value for end in ends] == [f"{experts.OP} 1", None]


# --- Gradients, compilers, bad input ---


def test_gradients(worlds: Worlds) -> None:
    worlds("gloo", 3).run(experts.gradients, [Case((4, 0, 5), depth=16), CASES[4]])


def test_gradients_on_one_rank(worlds: Worlds) -> None:
    worlds("gloo", 1).run(experts.gradients, [CASES[0], CASES[5]])


def test_compiled_gradients(worlds: Worlds) -> None:
    worlds("gloo", 2).run(experts.gradients, [Case((4,), depth=16)], "aot_eager")


def kept_by_the_other_path(me: Member) -> list[bool]:
    """A graph with its backward from a compiler's cache: neither contains which path the process
    that made it took."""
    found = []
    for seed, case in enumerate((Case((4, 2), depth=16), Case((3,), topk=1, experts=1), CASES[4])):
        o = experts.draw(case, me.rank, me.world_size, me.device, seed)
        _, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids, max_tokens=case.max_tokens)
        numbers = (plan.table, plan.max_tokens, plan.topk, name_of(None))
        grad = torch.randn(plan.bound, case.cols)
        op, backward = (
            torch.ops.tileweave.dispatch_grouped_matmul,
            torch.ops.tileweave.dispatch_grouped_matmul_backward,
        )

        def forward(keep=True, o=o, numbers=numbers, op=op):
            return op(o.x, o.experts, *numbers, keep)[1]

        def gradients(kept, o=o, numbers=numbers, grad=grad, backward=backward):
            return backward(grad, o.x, kept, o.experts, *numbers, True, True)

        kept = forward()
        want = gradients(kept)
        with unfused(me):
            other = forward()
            found += [forward(False).shape == (0, case.depth), other.shape == kept.shape]
            found += [
                torch.allclose(*pair, atol=1e-5) for pair in zip(gradients(kept), want, strict=True)
            ]
        found += [
            torch.allclose(*pair, atol=1e-5) for pair in zip(gradients(other), want, strict=True)
        ]
    return found


def test_saved_tensors_match_on_both_paths(worlds: Worlds) -> None:
    assert worlds("gloo", 3).run(kept_by_the_other_path) == [[True] * 18] * 3


def test_swiglu(worlds: Worlds) -> None:
    for size in (1, 2):
        worlds("gloo", size).run(experts.swiglu, CASES[0])


def opcheck(me: Member) -> None:
    case = Case((3,), depth=16, cols=20)
    o = experts.draw(case, me.rank, me.world_size, me.device, 0)
    y, plan = tw.dispatch_grouped_matmul(o.x, o.experts, o.ids)
    numbers = (plan.table, plan.max_tokens, plan.topk, name_of(None))
    ops = torch.ops.tileweave
    torch.library.opcheck(
        ops.route_tokens.default, (o.ids, case.experts, 3, name_of(None)), test_utils=SCHEMAS
    )
    torch.library.opcheck(
        ops.swiglu.default,
        (torch.randn(plan.bound, 20), plan.table, case.experts),
        test_utils=SCHEMAS,
    )
    torch.library.opcheck(
        ops.dispatch_grouped_matmul.out,
        (o.x, o.experts, *numbers),
        {"out": torch.empty_like(y)},
        test_utils=SCHEMAS,
    )
    tensors = (o.x.requires_grad_(), o.experts.requires_grad_())
    torch.library.opcheck(
        ops.dispatch_grouped_matmul.default, (*tensors, *numbers, True), test_utils=SCHEMAS
    )


# values of undefined rows differ
SCHEMAS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_opcheck(worlds: Worlds) -> None:
    worlds("gloo", 2).run(opcheck, timeout=100)


def test_bad_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(experts.bad_input)


def debugging(me: Member) -> None:
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        experts.out_of_range_raises(me, 1)


def test_out_of_range_raises_when_debugging(worlds: Worlds) -> None:
    worlds("gloo", 2).run(debugging)
