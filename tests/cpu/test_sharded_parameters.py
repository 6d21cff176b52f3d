"""Shards are DTensors: checkpoints re-shard them, clipping counts them once, DDP refuses them,
FSDP2 and operators take them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.calls import refusal
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tileweave as tw
from tileweave.nn.shards import local
from tileweave.parallel.joined import JoinedTensor


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def error_of(call: Callable[..., object], *args: object) -> str:
    """The text of the error that a call raises, ours or one of torch, or ""."""
    try:
        call(*args)
    except (tw.TileweaveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def mlp(group: object = None, **how: bool) -> nn.Sequential:
    """The shards of :func:`whole_mlp`."""
    layers = whole_mlp()
    column = {"gather": how["scatter"]} if how else {}
    return nn.Sequential(
        tw.nn.ColumnParallelLinear.from_linear(layers[0], group=group, **column),
        layers[1],
        tw.nn.RowParallelLinear.from_linear(layers[2], group=group, **how),
    )


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))


# --- Checkpoints ---


def checkpoints(me: Member, folder: str) -> None:
    saved = mlp()
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    wanted = dict(whole_mlp().named_parameters())
    loaded = mlp()
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(whole(parameter), wanted[name]), name
    plain = {name: torch.zeros_like(t) for name, t in whole_mlp().state_dict().items()}
    dcp.load(plain, checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (me.world_size,))
    other = {n: distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)]) for n, t in plain.items()}
    dcp.load(other, checkpoint_id=folder)
    for name, t in plain.items():
        assert torch.equal(t, wanted[name]) and torch.equal(whole(other[name]), wanted[name]), name


def test_checkpoints_are_resharded(world: World, tmp_path: Path) -> None:
    world.run(checkpoints, str(tmp_path))


def whole_states(me: Member) -> str:
    wanted, module = whole_mlp().state_dict(), mlp()
    full = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(full[name], t) for name, t in wanted.items())
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    module.load_state_dict(wanted)
    assert all(torch.equal(whole(t), wanted[name]) for name, t in module.state_dict().items())
    replicated = {
        n: t.redistribute(placements=[Replicate()]) for n, t in mlp().state_dict().items()
    }
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    module.load_state_dict(replicated)
    for name, t in module.state_dict().items():
        assert t.placements == mlp().state_dict()[name].placements, name
        assert torch.equal(whole(t), wanted[name]), name
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(whole(t), wanted[name]) for name, t in copied.state_dict().items())
        assert torch.equal(copied(rows_of(me.rank)), module(rows_of(me.rank)))
    shard = {name: t.to_local() for name, t in module.state_dict().items()}
    return error_of(module.load_state_dict, shard)


def test_whole_states_are_loaded_and_shards_refused(world: World) -> None:
    for error in world.run(whole_states):
        assert "allowed: the whole tensor (12, 8)" in error, error


# --- Training ---


def clipped(me: Member) -> list[float]:
    module, reference = mlp(), whole_mlp()
    module(rows_of(me.rank)).square().sum().backward()
    reference(torch.cat([rows_of(r) for r in range(me.world_size)])).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (module, reference)]
    for m in (module, reference):
        torch.optim.AdamW(m.parameters(), 0.1).step()
    for (name, got), want in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert_near(whole(got), want, 1e-5, 1e-5, name)
    return [float(whole(norm)) for norm in norms]


def test_gradients_are_clipped_by_the_norm_of_all_shards(world: World) -> None:
    for norm, wanted in world.run(clipped):
        assert norm == pytest.approx(wanted, rel=1e-5)


def data_parallel(me: Member) -> list[str]:
    return [error_of(DistributedDataParallel, module) for module in (mlp(), tw.nn.MoE(8, 8, 4, 2))]


def test_data_parallel_refuses_shards(world: World) -> None:
    for errors in world.run(data_parallel):
        assert all(errors), errors


def fully_sharded(me: Member) -> None:
    """FSDP2 on one dimension of a mesh, shards on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, part = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    module, reference = mlp(mesh["tp"]), whole_mlp()
    fully_shard(module, mesh=mesh["dp"])
    module(rows_of(2 * data + part)).square().sum().backward()
    (sum(reference(rows_of(r)).square().sum() for r in range(4)) / 2).backward()
    for (name, got), want in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert_near(whole(got.grad), want.grad, 1e-5, 1e-5, name)


def test_fully_sharded_in_two_dimensions(worlds: Worlds) -> None:
    worlds("gloo", 4).run(fully_sharded)


# --- The all-reduce form ---


def all_reduce_form(me: Member, compiled: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    module, reference = mlp(scatter=False), whole_mlp()
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    y, wanted = call(mine), reference(theirs)
    assert_near(y, wanted, 1e-5, 1e-5, "y")
    for result in (y, wanted):
        result.square().sum().backward()
    assert_near(mine.grad, theirs.grad, 1e-5, 1e-5, "gradient of x")
    for (name, got), want in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert_near(whole(got.grad), want.grad, 1e-5, 1e-5, name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_all_reduce_form_has_whole_input_gradients(world: World, compiled: bool) -> None:
    world.run(all_reduce_form, compiled)


def rows_in_dimension_one(me: Member) -> None:
    column = tw.nn.ColumnParallelLinear.from_linear(whole_mlp()[0], dim=1)
    row = tw.nn.RowParallelLinear.from_linear(whole_mlp()[2], dim=1)
    x = torch.randn(2, 3 * me.world_size, 8, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(me.world_size, 1)[me.rank].requires_grad_()
    y, reference = row(column(mine).relu()), x.clone().requires_grad_()
    wanted = whole_mlp()(reference)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert_near(y, wanted.chunk(me.world_size, 1)[me.rank], 1e-5, 1e-5, "y")
    assert_near(mine.grad, reference.grad.chunk(me.world_size, 1)[me.rank], 1e-5, 1e-5, "gradient")


def test_rows_in_dimension_one(world: World) -> None:
    world.run(rows_in_dimension_one)


# --- Operators on DTensors ---


def operators(me: Member) -> list[str]:
    mesh, x, w = init_device_mesh("cpu", (me.world_size,)), torch.randn(4, 6), torch.randn(8, 6)
    for t in (x, w):
        dist.broadcast(t, 0)
    b = torch.arange(8.0)

    def cut(t: torch.Tensor, *dims: int | None) -> list[DTensor]:
        places = [[Replicate() if dim is None else Shard(dim)] for dim in dims]
        return [distribute_tensor(t, mesh, place).requires_grad_() for place in places]

    (x0, x1), (w0, w1), (b0, bias) = cut(x, 0, 1), cut(w, 0, 1), cut(b, 0, None)
    calls = [
        (tw.all_gather_matmul, x0, w0, b0, Shard(1)),
        (tw.matmul_reduce_scatter, x1, w1, bias, Shard(0)),
        (tw.matmul_all_reduce, x1, w1, bias, Replicate()),
    ]
    for call, a, weight, offset, place in calls:
        leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
        y, want = call(a, weight, offset), nn.functional.linear(*leaves)
        assert y.placements == (place,), call.__name__
        plain = call(a.to_local(), weight, offset)
        assert not isinstance(plain, DTensor) and torch.equal(plain, y.to_local()), call.__name__
        plain = call(a.to_local(), weight.to_local(), offset)
        assert not isinstance(plain, DTensor) and torch.equal(plain, y.to_local()), call.__name__
        assert_near(y.full_tensor(), want, 1e-5, 1e-5, call.__name__)
        grads = torch.autograd.grad(y.square().sum(), (a, weight, offset))
        wanted = torch.autograd.grad(want.square().sum(), leaves)
        for got, gradient in zip(grads, wanted, strict=True):
            assert_near(got.full_tensor(), gradient, 1e-5, 1e-5, call.__name__)
    several = tw.all_gather_matmul(x0, [w0, w0], [b0, None])
    wanted = [nn.functional.linear(x, w, b), nn.functional.linear(x, w)]
    for y, want in zip(several, wanted, strict=True):
        assert y.placements == (Shard(1),)
        assert_near(y.full_tensor(), want, 1e-5, 1e-5, "several weights")
    wide = init_device_mesh("cpu", (1, me.world_size), mesh_dim_names=("dp", "tp"))
    far = DTensor.from_local(x, wide, [Replicate(), Replicate()])
    return [
        refusal(tw.all_gather_matmul, x1, w0),
        refusal(tw.matmul_all_reduce, x1, w0),
        refusal(tw.all_gather_matmul, far, w0),
        refusal(tw.all_gather_matmul, x0, w0, return_gathered=True),
    ]


def test_operators_take_dtensors_that_fit_and_refuse_others(world: World) -> None:
    for errors in world.run(operators):
        assert all(e.startswith("InputError: asked:") and "remedy:" in e for e in errors), errors
        assert "redistribute" in errors[0] and "redistribute" in errors[1], errors


def plain_only(me: Member) -> dict[str, list[str]]:
    """Errors of operators that take plain tensors, for a DTensor in each place."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    x, w, experts = torch.ones(4, 6), torch.ones(8, 6), torch.ones(2, 8, 6)
    ids = torch.zeros(4, 1, dtype=torch.int64)

    def refusals(call: Callable[..., object], *args: torch.Tensor, **options: object) -> list[str]:
        return [
            refusal(
                call,
                *args[:i],
                DTensor.from_local(args[i], mesh, [Shard(0)], run_check=False),
                *args[i + 1 :],
                **options,
            )
            for i in range(len(args))
        ]

    to_columns = {"scatter_dim": 0, "gather_dim": 1}
    rows, plan = tw.dispatch_grouped_matmul(x, experts, ids)
    found = {
        "exchange after": refusals(tw.matmul_all_to_all, x, w, w[:, 0], **to_columns),
        "exchange before": refusals(tw.all_to_all_matmul, x, w.repeat(1, 2), **to_columns),
        "dispatch": refusals(tw.dispatch_grouped_matmul, x, experts, ids),
        "combine": refusals(lambda *a: tw.grouped_matmul_combine(*a, plan), rows, experts),
        "bags": refusals(lambda t: tw.embedding_bag([t], ids[:, 0], torch.arange(5)), w),
    }
    y = tw.matmul_all_to_all(x, w, **to_columns)
    assert y.shape == (2, 16), "a call works afterwards"
    return found


def test_other_operators_refuse_dtensors(world: World) -> None:
    for found in world.run(plain_only):
        for name, errors in found.items():
            for error in errors:
                assert error.startswith("InputError: asked:"), (name, error)
                assert "as a DTensor" in error and ".to_local()" in error, (name, error)


def meshes(me: Member) -> list[str]:
    mesh = init_device_mesh("cpu", (1, me.world_size), mesh_dim_names=("dp", "tp"))
    layer = tw.nn.ColumnParallelLinear(8, 4, group=mesh["tp"])
    assert layer.weight.device_mesh is mesh["tp"] or layer.weight.device_mesh == mesh["tp"]
    assert isinstance(layer, nn.Linear) and isinstance(mesh, DeviceMesh)
    return [refusal(lambda: tw.nn.RowParallelLinear(8, 4, group=mesh))]


def test_a_group_may_be_one_dimension_of_a_mesh(world: World) -> None:
    for (error,) in world.run(meshes):
        assert "of 2 dimensions" in error and "mesh[dimension]" in error, error


def gradients_of_shards(me: Member) -> None:
    """What a layer does with a parameter has the gradients of to_local(), also second ones."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    generator = torch.Generator().manual_seed(0)
    for shape, place in (((4, 6), Shard(0)), ((4, 6), Shard(1)), ((3, 2), Replicate())):
        parameter = nn.Parameter(
            distribute_tensor(torch.randn(shape, generator=generator), mesh, [place])
        )
        found, wanted = local(parameter), parameter.to_local()
        assert torch.equal(found, wanted)
        grad = torch.randn(wanted.shape, generator=generator)
        turned = grad.t().contiguous().t()  # the same numbers in another layout
        (want,) = torch.autograd.grad(wanted, parameter, grad)
        for given in (grad, turned):
            (got,) = torch.autograd.grad(found, parameter, given, retain_graph=True)
            assert isinstance(got, DTensor) and got._spec == want._spec
            assert got._spec is not parameter._spec
            assert torch.equal(got.to_local(), want.to_local())
            assert got.to_local().stride() == want.to_local().stride()
        cubes = local(parameter).pow(3).sum()
        (first,) = torch.autograd.grad(cubes, parameter, create_graph=True)
        (second,) = torch.autograd.grad(first.to_local().sum(), parameter)
        assert torch.allclose(second.to_local(), 6 * wanted)


def test_layers_read_parameters_as_to_local_does(world: World) -> None:
    world.run(gradients_of_shards)


def joined(me: Member) -> str:
    mesh = init_device_mesh("cpu", (me.world_size,))
    part = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
    return error_of(local, nn.Parameter(JoinedTensor([part, part])))


def test_tensors_without_a_local_tensor_are_refused(world: World) -> None:
    assert all(error.startswith("InputError: asked: ") for error in world.run(joined))
