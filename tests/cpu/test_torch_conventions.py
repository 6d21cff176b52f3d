"""What users of torch expect of any operator: devices, modes, forks, compiled sizes, unusual
choices of experts."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds, one_shot
from torch.autograd import forward_ad

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, MoE, RowParallelLinear
from tileweave.nn.shards import local

PATHS = pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


# --- Experts ---


def draw(me: Member, local_experts: int, tokens: int = 3) -> tuple[torch.Tensor, ...]:
    """x [T, 8] of this rank, and the weights of all experts, [E, 6, 8] and [E, 8, 6]."""
    torch.manual_seed(0)
    size = me.world_size
    x, experts = torch.randn(size, tokens, 8), size * local_experts
    return x[me.rank], torch.randn(experts, 6, 8), torch.randn(experts, 8, 6)


def run_experts(
    me: Member, ids: torch.Tensor, weights: torch.Tensor, local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of two grouped matmuls, and expected results."""
    x, up, down = draw(me, local_experts, ids.shape[0])
    mine = slice(me.rank * local_experts, (me.rank + 1) * local_experts)
    y, plan = tw.dispatch_grouped_matmul(x, up[mine].contiguous(), ids)
    z = tw.grouped_matmul_combine(y, down[mine].contiguous(), plan, weights)
    want = torch.zeros_like(x)
    for token, choices in enumerate(ids.tolist()):
        for j, expert in enumerate(choices):
            if 0 <= expert < up.shape[0]:
                want[token] += weights[token, j] * (down[expert] @ (up[expert] @ x[token]))
    return z, want


def experts_of_all_kinds(me: Member) -> list[bool]:
    often = torch.tensor([[0, 0, 0, 1]] * 3)  # more choices than a rank has experts
    none = torch.tensor([[0, -1], [-1, -1], [1, 5]])
    large = torch.tensor([[2**32, 0], [2**32 + 1, 1], [-(2**63), -7]])
    nan = torch.tensor([[1.0, float("nan")], [float("nan"), float("inf")], [2.0, float("nan")]])
    cases = [(often, torch.full((3, 4), 0.25)), (none, nan), (large, torch.ones(3, 2))]
    return [
        torch.allclose(*run_experts(me, ids, weights, 1), rtol=1e-4, atol=1e-4)
        for ids, weights in cases
    ]


@PATHS
def test_unusual_expert_choices(world: World, interpreted: bool) -> None:
    """Repeated choices, none, ids beyond int32. A NaN weight counts for nothing where there is no
    expert."""
    assert run_either(world, interpreted, experts_of_all_kinds) == [[True] * 3] * 2


def calls_that_differ(me: Member, what: str) -> str:
    x, up, down = draw(me, 1)
    kind = torch.float16 if what == "dtype" and me.rank else torch.bfloat16
    x, up, down = x.to(kind), up[:1].to(kind), down[:1].to(kind)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    if what == "order":
        square = torch.zeros(1, 8, 8, dtype=kind)
        y, plan = tw.dispatch_grouped_matmul(x, square, ids)
        tw.grouped_matmul_combine(y, square, plan, None)  # first calls allocate memory, together
        tw.synchronize()
        dist.barrier()
        if me.rank:
            return refusal(tw.grouped_matmul_combine, y, square, plan, None) or refusal(
                tw.synchronize
            )
        return refusal(tw.dispatch_grouped_matmul, x, square, plan=plan) or refusal(tw.synchronize)
    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    weights = torch.ones(3, 1) if what == "weights" and me.rank else None
    return refusal(tw.grouped_matmul_combine, y, down, plan, weights) or refusal(tw.synchronize)


def told(me: Member, what: str) -> str:
    found = ""
    for _ in range(2):  # the first rank may raise in its next call
        found = found or refusal(lambda: found_or_raise(calls_that_differ(me, what)))
    return found


def found_or_raise(text: str) -> None:
    if text:
        raise tw.TileweaveError(text)


@pytest.mark.parametrize("what", ["dtype", "weights", "order"])
def test_mismatched_expert_calls_raise(what: str) -> None:
    ends = one_shot("gloo", 2, told, what, extra={"TILEWEAVE_TIMEOUT": "5", "WORLD_ENDS_WELL": "0"})
    assert any("RankMismatchError" in str(end.value) for end in ends), ends
    assert all(end.value for end in ends), ends


def all_to_all_of_two_dtypes(me: Member) -> str:
    kind = torch.float16 if me.rank else torch.bfloat16
    x, w = torch.ones(4, 8, dtype=kind), torch.ones(6, 8, dtype=kind)
    return refusal(tw.matmul_all_to_all, x, w, scatter_dim=0, gather_dim=1)


def test_an_unfused_exchange_of_two_dtypes_is_refused(world: World) -> None:
    for error in run_either(world, False, all_to_all_of_two_dtypes):
        assert error.startswith("RankMismatchError") and "float16" in error, error


def without_dimensions(me: Member) -> list[str]:
    x, none, ids = torch.ones(3, 8), torch.tensor(1.0), torch.zeros(3, 1, dtype=torch.int64)
    return [
        refusal(tw.dispatch_grouped_matmul, none, torch.ones(1, 6, 8), ids),
        refusal(tw.dispatch_grouped_matmul, x, none, ids),
        refusal(tw.matmul_all_to_all, torch.ones(2, 2, 8), none, scatter_dim=0, gather_dim=1),
    ]


def test_tensors_without_dimensions_are_refused(world: World) -> None:
    for errors in world.run(without_dimensions):
        assert all(error.startswith("InputError") for error in errors), errors


# --- Devices and modes ---


def on_two_devices(me: Member) -> list[str]:
    x, w = torch.ones(4, 8), torch.ones(6, 8, device="meta")
    column, row, moe = ColumnParallelLinear(8, 4), RowParallelLinear(16, 4), MoE(8, 8, 4, 2)
    for module in (column, row, moe.experts):
        module.to("meta")
    out = torch.empty(8, 6, device="meta")
    return [
        refusal(tw.all_gather_matmul, x, w),
        refusal(tw.all_gather_matmul, x, torch.ones(6, 8), out=out),
        *(refusal(module, x) for module in (column, row, moe)),
    ]


@PATHS
def test_meta_tensors_are_refused(world: World, interpreted: bool) -> None:
    """torch runs the fake then, whose results are uninitialized."""
    for errors in run_either(world, interpreted, on_two_devices):
        assert all(error.startswith("InputError") and "meta" in error for error in errors), errors


def tangents(me: Member) -> list[str]:
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    layer = ColumnParallelLinear(8, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        found = [refusal(tw.all_gather_matmul, dual, w), refusal(layer, dual)]
        found.append(refusal(tw.all_gather_matmul, x, w))

    def call(x: torch.Tensor) -> torch.Tensor:
        return tw.all_gather_matmul(x, w)

    found.append(refusal(torch.func.jvp, call, (x,), (x,)))
    turned = refusal(torch.func.jvp, lambda y: call(x) * y, (torch.ones(1),), (torch.ones(1),))
    return [*found, turned]


def test_forward_mode_is_refused(world: World) -> None:
    for first, second, plain, transformed, elsewhere in world.run(tangents):
        refused = first, second, transformed
        assert all(error.startswith("UnsupportedError") for error in refused), refused
        assert plain == "" and elsewhere == "", (plain, elsewhere)


def dtypes_under_autocast(me: Member) -> list[torch.dtype]:
    found = []
    for given, mode in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        x, w = torch.ones(4, 8, dtype=given), torch.ones(6, 8, dtype=given)
        with torch.autocast("cpu", dtype=mode):
            found.append(tw.all_gather_matmul(x, w).dtype)
    return found


@PATHS
def test_operators_keep_their_dtype_under_autocast(world: World, interpreted: bool) -> None:
    assert (
        run_either(world, interpreted, dtypes_under_autocast)
        == [[torch.float32, torch.bfloat16]] * 2
    )


def changed_in_place(me: Member) -> bool:
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(6, 8, requires_grad=True)
    for dims in ((1, 0), (0, 1), (0, 0)):
        tw.matmul_all_to_all(x, w, scatter_dim=dims[0], gather_dim=dims[1]).relu_().sum().backward()
    MoE(8, 8, 4, 2)(x).relu_().sum().backward()
    return True


@PATHS
def test_results_may_be_modified(world: World, interpreted: bool) -> None:
    assert all(run_either(world, interpreted, changed_in_place))


def gradient_with_anomalies_looked_for(me: Member) -> bool:
    torch.manual_seed(me.rank)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            x, layer = torch.randn(5, 8, requires_grad=True), MoE(8, 8, 4, 2)
            # torch itself cannot look for NaN in DTensors
            plain = {n: local(p.detach()).requires_grad_() for n, p in layer.named_parameters()}
            torch.func.functional_call(layer, plain, (x,)).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return bool(x.grad.isfinite().all())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_experts_pass_anomaly_detection(world: World) -> None:
    assert all(world.run(gradient_with_anomalies_looked_for))


# --- Modules ---


def made_on_meta(me: Member) -> list[float]:
    moe = MoE(8, 8, 4, 2, shared_intermediate_size=8, device="meta").to_empty(device="cpu")
    for parameter in moe.parameters():
        parameter.data.fill_(float("nan"))
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return [float(parameter.detach().abs().max()) for parameter in moe.parameters()]


def test_experts_made_on_meta_can_be_initialised(world: World) -> None:
    for largest in world.run(made_on_meta):
        assert len(largest) == 6 and all(0 < value <= 8**-0.5 for value in largest), largest


def shapes_on_meta(me: Member) -> list[tuple[int, ...]]:
    x = torch.empty(4, 8, device="meta")
    column, row = ColumnParallelLinear(8, 4, device="meta"), RowParallelLinear(16, 6, device="meta")
    return [
        tuple(column(x).shape),
        tuple(row(x).shape),
        tuple(MoE(8, 8, 4, 2, device="meta")(x).shape),
    ]


def test_shapes_on_meta(world: World) -> None:
    assert world.run(shapes_on_meta) == [[(8, 2), (2, 6), (4, 8)]] * 2


def cut_from_frozen(me: Member) -> list[bool]:
    layer = torch.nn.Linear(8, 4).requires_grad_(False)
    layer.bias.requires_grad_(True)
    cut = [ColumnParallelLinear.from_linear(layer), RowParallelLinear.from_linear(layer)]
    return [parameter.requires_grad for module in cut for parameter in (module.weight, module.bias)]


def test_layers_cut_from_frozen_ones_are_frozen(world: World) -> None:
    assert world.run(cut_from_frozen) == [[False, True] * 2] * 2


# --- Compiled ---


def compiled_in_three_dimensions(me: Member) -> list[bool]:
    x, w = torch.randn(4, 2, 8), torch.randn(6, 8)
    calls = [
        tw.matmul_reduce_scatter,
        lambda x, w: tw.matmul_all_to_all(x, w, scatter_dim=0, gather_dim=1),
        lambda x, w: tw.all_to_all_matmul(x, torch.cat((w, w), 1), scatter_dim=0, gather_dim=1),
    ]
    return [
        torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x, w), call(x, w))
        for call in calls
    ]


def test_three_dimensions_compile(world: World) -> None:
    assert run_either(world, False, compiled_in_three_dimensions) == [[True] * 3] * 2


def graphs_of_sizes(me: Member) -> int:
    """How often a layer of experts is compiled for twelve sizes."""
    torch._dynamo.reset()
    layer, graphs = MoE(8, 8, 4, 2, max_tokens=64), []

    def count(module, _):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    with torch.no_grad():
        for tokens in range(2, 14):
            x = torch.randn(tokens, 8)
            assert torch.allclose(compiled(x), layer(x), atol=1e-5)
    return len(graphs)


def test_any_number_of_tokens_compiles_twice(world: World) -> None:
    assert all(found <= 2 for found in run_either(world, False, graphs_of_sizes))


# --- Processes and groups ---


def forked(me: Member) -> tuple[str, bool]:
    x, w = torch.full((2, 8), float(me.rank + 1)), torch.ones(4, 8)
    want = F.linear(
        torch.cat([torch.full((2, 8), float(rank + 1)) for rank in range(me.world_size)]), w
    )
    tw.all_gather_matmul(x, w)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        operator = torch.ops.tileweave.all_gather_matmul  # compiled code calls nothing else
        name = dist.group.WORLD.group_name
        said = [
            refusal(tw.all_gather_matmul, 100 * x, w),
            refusal(operator, 100 * x, w, None, name, False),
        ]
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 4096).decode()
    os.close(reading), os.close(writing)
    return said, all(torch.equal(tw.all_gather_matmul(x, w), want) for _ in range(3))


@PATHS
def test_forked_process_is_refused(world: World, interpreted: bool) -> None:
    for said, right in run_either(world, interpreted, forked):
        assert right and all(
            one.startswith("InputError") and "forked" in one for one in said.split("\n")
        ), said


def after_the_end(me: Member) -> str:
    layer, x = ColumnParallelLinear(8, 4), torch.ones(2, 8)
    layer(x)
    dist.destroy_process_group()
    return refusal(layer, x)


def test_layer_of_a_destroyed_group_is_refused() -> None:
    ends = one_shot("gloo", 2, after_the_end)
    assert all(str(end.value).startswith("InputError") for end in ends), ends


def first_call_of_one(me: Member) -> str:
    """One rank allocates memory for an operator while the other does so for another operator."""
    os.environ["TRITON_INTERPRET"] = "0" if me.rank else "1"
    return refusal(tw.all_gather_matmul, torch.ones(2, 8), torch.ones(4, 8))


def test_concurrent_first_calls_of_different_operators_raise() -> None:
    ends = one_shot(
        "gloo", 2, first_call_of_one, extra={"TILEWEAVE_TIMEOUT": "5", "WORLD_ENDS_WELL": "0"}
    )
    for end in ends:
        assert str(end.value).startswith("RankMismatchError") and "memory|" not in str(end.value), (
            ends
        )


# --- Lookups ---


def results_and_kinds_that_are_none(me: Member) -> list[str]:
    layout = tw.EmbeddingLayout.in_rank_order([(4,)] * 2)
    bags, table = (torch.arange(4), torch.arange(5)), torch.ones(4, 4)
    lookup = partial(tw.embedding_bag_all_to_all, layout=layout)
    said = [
        refusal(lookup, [table], *bags, out=torch.zeros(2, 8, dtype=dtype))
        for dtype in (torch.float16, torch.int32)
    ]
    said += [refusal(lookup, [table], *bags, out=torch.zeros(shape)) for shape in ((3, 8), (2, 9))]
    said.append(refusal(lookup, [table], *bags, out=torch.zeros(8, 2).t()))
    for kind in ("adam", "dense", ""):  # without a step of that name, gradients would go nowhere
        optimizer = tw.FusedOptimizer(kind, torch.ones(1))
        said.append(refusal(lookup, [table.clone().requires_grad_()], *bags, optimizer=optimizer))
    return said


def test_lookups_refuse_wrong_results_and_steps(world: World) -> None:
    for said in world.run(results_and_kinds_that_are_none):
        assert all(text.startswith("InputError: asked: out (") for text in said[:5]), said
        assert all(text.startswith("InputError: asked: optimizer ") for text in said[5:]), said
