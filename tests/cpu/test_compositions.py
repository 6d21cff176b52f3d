"""A sharded model with what else PyTorch offers: results and gradients of the whole model under the
same, or an error on every rank."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import (
    FORMS,
    MLP,
    Layer,
    Model,
    compare,
    gradients,
    ids_of,
    model,
    whole,
)
from tests.support.calls import refusal, run_either
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.functional import linear
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tileweave as tw
from tileweave.ops.core.registry import name_of
from tileweave.transport.workspace import REGISTRY


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


# --- Right ---


def checkpointed(m: Any, reentrant: bool, **options: Any) -> None:
    for layer in m.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant, **options)


def as_a_whole(m: Any) -> None:
    m.forward = partial(checkpoint, m.forward, use_reentrant=False)


def chosen(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    own = "tileweave" in str(op)
    return CheckpointPolicy.MUST_SAVE if own else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(m: Any) -> None:
    apply_activation_checkpointing(m, check_fn=lambda part: isinstance(part, Layer))


def selective(m: Any) -> None:
    checkpointed(m, False, context_fn=partial(create_selective_checkpoint_contexts, chosen))


def offloaded(m: Any) -> None:
    forward = m.forward

    def call(ids: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return forward(ids)

    m.forward = call


def twice(m: Any) -> None:
    m.register_forward_hook(lambda _, args, y: y.square().mean().backward(retain_graph=True))


def partly_frozen(m: Any) -> None:
    m.layers[0].requires_grad_(False)
    m.layers[1].mlp.gate_proj.requires_grad_(False)
    m.layers[1].self_attn.o_proj.weight.requires_grad_(False)


def replaced_by_hooks(m: Any) -> None:
    m.head.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    m.head.register_forward_hook(lambda _, args, y: y * 2)
    m.norm.register_full_backward_hook(lambda _, into, of: (into[0] * 0.5,))
    m.register_full_backward_pre_hook(lambda _, of: (of[0] * 3,))
    for p in m.parameters():
        p.register_hook(lambda g: g * 2)


def one_block_twice(m: Any) -> None:
    m.layers[1] = m.layers[0]


CHANGES: dict[str, Callable[[Any], None]] = {
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant": partial(checkpointed, reentrant=True),
    "checkpoint of all": as_a_whole,
    "selective": selective,
    "offload": offloaded,
    "backward twice": twice,
    "frozen": partly_frozen,
    "hooks": replaced_by_hooks,
}
BEFORE = {"wrapper": wrapped, "one block twice": one_block_twice, "frozen before": partly_frozen}


def changed(me: Member, name: str, sequence: bool) -> None:
    part, reference = model(), model()
    for m in (part, reference):
        BEFORE.get(name, lambda _: None)(m)
    tw.parallelize(part, sequence_parallel=sequence)
    for m in (part, reference):
        CHANGES.get(name, lambda _: None)(m)
        m(ids_of()).square().mean().backward()
    wanted = dict(reference.named_parameters())
    for at, parameter in part.named_parameters():
        want = wanted[at].grad
        assert (parameter.grad is None) == (want is None), at
        if want is not None:
            assert_near(whole(parameter.grad), want, 1e-4, 1e-5, at)
    assert_near(part(ids_of(2)), reference(ids_of(2)), 1e-4, 1e-5, "y")
    assert not REGISTRY.broken_off(name_of(None))


@FORMS
@pytest.mark.parametrize("name", [*CHANGES, *BEFORE])
def test_modes_of_autograd(world: World, name: str, sequence: bool) -> None:
    run_either(world, False, changed, name, sequence)


def cast(me: Member, sequence: bool) -> None:
    """Autocast around the whole model, and in a part of it."""
    part: Any = tw.parallelize(model(), sequence_parallel=sequence)
    reference: Any = model()
    found = []
    for m in (part, reference):
        m.layers[0].mlp.forward = torch.autocast("cpu", torch.float16)(m.layers[0].mlp.forward)
        y = m(ids_of())
        y.square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            found.append((y, m(ids_of())))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert_near(got.float(), want.float(), 5e-2, 5e-2, str(got.dtype))
    for name, parameter in part.named_parameters():
        want = reference.get_parameter(name).grad
        assert_near(whole(parameter.grad), want, 2e-2, 2e-2, name)


@FORMS
def test_autocast_of_a_part(world: World, sequence: bool) -> None:
    run_either(world, False, cast, sequence)


def stepped(me: Member, sequence: bool, option: str) -> None:
    part: Any = tw.parallelize(model(), sequence_parallel=sequence)
    reference: Any = model()
    for m in (part, reference):
        options: Any = {option: True}
        optimizer = torch.optim.AdamW(m.parameters(), 0.01, **options)
        scaler = torch.amp.GradScaler("cpu", 256.0)
        for batch in range(2):
            optimizer.zero_grad()
            for half in range(2):
                scaler.scale(m(ids_of(2 * batch + half)).square().mean() / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    assert_near(part(ids_of()), reference(ids_of()), 1e-3, 1e-4, option)


@FORMS
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_steps_of_scaled_sums(world: World, sequence: bool, option: str) -> None:
    run_either(world, False, stepped, sequence, option)


def accumulated(me: Member, sequence: bool) -> None:
    """Gradients of several batches, sent by FSDP2 after the last one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, reference = model(), model()
    tw.parallelize(part, mesh, sequence_parallel=sequence)
    checkpointed(part, False)
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp"])
    outer: Any = fully_shard(part, mesh=mesh["dp"])
    for batch in range(3):
        outer.set_requires_gradient_sync(batch == 2)
        part(ids_of(2 * batch + mesh.get_local_rank("dp"))).square().mean().backward()
        losses = [reference(ids_of(2 * batch + rank)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
    gradients(part, reference)


@FORMS
def test_gradients_sent_after_the_last_batch(worlds: Worlds, sequence: bool) -> None:
    run_either(worlds("gloo", 4), False, accumulated, sequence)


# --- A checkpoint inside a forward ---


class Inside(nn.Module):
    """A block that runs a part of its forward again in backward, with parameters of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.full((16,), 0.7)), nn.LayerNorm(16)
        self.mlp, self.reentrant = MLP(16, 24), reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x) * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class OfInside(Model):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(0)
        self.layers, self.reentrant = nn.ModuleList(Inside(reentrant) for _ in range(2)), reentrant

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.norm(x), self.embed.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return checkpoint(self.logits, x, use_reentrant=self.reentrant)


def inside(me: Member, sequence: bool, reentrant: bool) -> None:
    torch.manual_seed(0)
    part = OfInside(reentrant)
    torch.manual_seed(0)
    reference = OfInside(reentrant)
    plan: Any = dict.fromkeys(["layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"], "colwise")
    plan["layers.*.mlp.down_proj"] = "rowwise"
    if sequence:
        plan["layers.*"] = "sequence_parallel"
    compare(tw.parallelize(part, plan=plan, sequence_parallel=sequence), reference)


@FORMS
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_checkpoint_inside_a_forward(world: World, sequence: bool, reentrant: bool) -> None:
    run_either(world, False, inside, sequence, reentrant)


def gathered_before(me: Member, reentrant: bool) -> str:
    """The checkpoint is inside the module whose layers share a gather."""
    part: Any = tw.parallelize(model(), sequence_parallel=True)
    mlp: Any = part.layers[1].mlp
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=reentrant)
    return refusal(part(ids_of()).square().mean().backward)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_checkpoint_after_a_shared_gather_is_refused(world: World, reentrant: bool) -> None:
    for error in run_either(world, False, gathered_before, reentrant):
        assert "asked: layers.1.mlp.gate_proj in backward without its module" in error, error


# --- Transforms and attributes ---


def total(y: Any) -> torch.Tensor:
    return y.sum()


def transformed(me: Member, sequence: bool) -> list[str]:
    part: Any = tw.parallelize(model(1), sequence_parallel=sequence)
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    parameters = dict(part.named_parameters())
    mlp = part.layers[0].mlp

    def loss(given: Any) -> torch.Tensor:
        return functional_call(part, given, (ids_of(),)).sum()

    return [
        refusal(grad(lambda given: total(tw.matmul_reduce_scatter(given, w))), x),
        refusal(grad(lambda given: total(tw.matmul_all_reduce(x, given))), w),
        refusal(grad(lambda given: tw.copy_to_group(given).sum()), x),
        refusal(grad(loss), parameters),
        refusal(vjp, mlp, torch.randn(2, 4, 16)),
        refusal(vmap(mlp), torch.randn(2, 2, 4, 16)),
    ]


@FORMS
def test_transforms_do_not_differentiate(world: World, sequence: bool) -> None:
    for errors in run_either(world, False, transformed, sequence):
        for error in errors:
            assert "UnsupportedError: asked: the gradient of" in error, errors
            assert "torch.func" in error, errors


def mapped(me: Member) -> None:
    part, reference = tw.parallelize(model(1)), model(1)
    ids = torch.stack([ids_of(1), ids_of(2)])
    with torch.no_grad():
        assert_near(vmap(part)(ids), torch.stack([reference(x) for x in ids]), 1e-4, 1e-5, "y")


def test_vmap_without_gradients(world: World) -> None:
    run_either(world, False, mapped)


def read(me: Member, sequence: bool) -> None:
    """Tools that read all attributes: DistributedDataParallel and PEFT ask for some of these."""
    part, reference = tw.parallelize(model(1), sequence_parallel=sequence), model(1)
    for module in part.modules():
        names = dict(inspect.getmembers(module))
        assert "_hf_tp_plan" not in names and "_ddp_params_and_buffers_to_ignore" not in names
    with torch.no_grad():
        traced: Any = torch.jit.trace(part, (ids_of(),), check_trace=False)
        assert_near(traced(ids_of(2)), reference(ids_of(2)), 1e-4, 1e-5, "traced")


@FORMS
def test_all_attributes_may_be_read(world: World, sequence: bool) -> None:
    run_either(world, False, read, sequence)


# --- Blocks that do not run ---


def blocks_removed(me: Member) -> list[str]:
    """What is left would return the rows of one rank, or take all rows for those of one."""
    found = []
    for kept in (slice(0, 2), slice(1, 3), slice(1, 2)):
        part: Any = tw.parallelize(model(3), sequence_parallel=True)
        part.layers = part.layers[kept]
        found.append(refusal(part, ids_of()))
    part, reference = tw.parallelize(model(3), sequence_parallel=True), model(3)
    for m in (part, reference):
        del m.layers[1]
    compare(part, reference)
    x = part.embed(ids_of())  # each block by itself
    for layer in part.layers:
        x = layer(x)
    assert_near(part.head(part.norm(x)), reference(ids_of()), 1e-4, 1e-5, "one by one")
    return found


def test_blocks_that_shard_and_gather_rows_must_run(world: World) -> None:
    for last, first, both in run_either(world, False, blocks_removed):
        assert "asked: Model without layers.2" in last, last
        assert "asked: layers.1 without layers.0" in first, first
        assert "asked: layers.1 without layers.0" in both, both


def skipped(me: Member) -> None:
    """A model that skips its only list is right after a backward, which may run blocks again."""
    part: Any = tw.parallelize(model(), sequence_parallel=True)
    checkpointed(part, False)
    layers, bare = part.layers, model()
    part(ids_of()).square().mean().backward()
    part.layers = bare.layers = nn.ModuleList()
    assert_near(part(ids_of()), bare(ids_of()), 1e-4, 1e-5, "without blocks")
    part.layers = layers
    assert_near(part(ids_of()), model()(ids_of()), 1e-4, 1e-5, "with blocks")


def test_a_list_may_be_skipped(world: World) -> None:
    run_either(world, False, skipped)


# --- Errors of one rank ---


def failing(me: Member, ranks: tuple[int, ...]) -> tuple[str, str]:
    """The second block raises on these ranks. Then they call another model, whose calls have the
    same shapes as those that they left out."""
    part: Any = tw.parallelize(model())
    other, reference = tw.parallelize(model(1)), model(1)

    def fail(*_: Any) -> None:
        if me.rank in ranks:
            raise LookupError("of the user")
        time.sleep(0.5)  # the error comes first: this rank need not wait for the time-out

    part.layers[1].register_forward_pre_hook(fail)
    first = ""
    try:
        part(ids_of())
    except (LookupError, tw.TileweaveError) as error:
        first = f"{type(error).__name__}: {error}"
    me.barrier()
    second = refusal(other, ids_of()) if me.rank in ranks else ""
    me.barrier()
    if len(ranks) < me.world_size:
        tw.close()
    assert_near(other(ids_of()), reference(ids_of()), 1e-4, 1e-5, "afterwards")
    return first, second


def test_calls_after_an_error_of_one_rank_are_refused(world: World) -> None:
    (first, _), (own, second) = world.run(failing, (1,))
    assert own == "LookupError: of the user"
    for error in (first, second):
        assert error.startswith("RankMismatchError: ") and "broke off" in error, (first, second)


def test_calls_after_an_error_of_all_ranks_are_right(world: World) -> None:
    assert world.run(failing, (0, 1)) == [("LookupError: of the user", "")] * 2
