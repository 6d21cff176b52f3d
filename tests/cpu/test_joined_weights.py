"""The weight of a fused layer in state dicts (``JoinedTensor``): what it is made of, what can be
done with it, and what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.support.calls import refusal
from tests.support.worlds import Member, World, Worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tileweave.parallel.joined import JoinedTensor, Shards


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def joined(mesh: Any, *rows: int, seed: int = 0) -> tuple[JoinedTensor, list[torch.Tensor]]:
    """A tensor of projections with these rows, and the whole projections."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(count, 3, generator=generator) for count in rows]
    return JoinedTensor([distribute_tensor(part, mesh, [Shard(0)]) for part in whole]), whole


def shards_of_ranks(me: Member) -> None:
    """Each shard is where the whole tensor has it, and shares the memory of its projection."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    made, parts = joined(mesh, 4, 1, 6)
    whole = torch.cat(parts)
    assert made.shape == whole.shape and made.stride() == whole.stride()
    assert not made.requires_grad and torch.equal(made.full_tensor(), whole)
    local: Any = made._local_tensor
    offsets, shards = local.local_offsets(), local.local_shards()
    assert [offset for offset, _ in offsets] == ([0, 4, 5] if me.rank == 0 else [2, 8])
    for (row, column), shard in zip(offsets, shards, strict=True):
        assert column == 0 and torch.equal(shard, whole[row : row + len(shard)])
    made.parts[0].to_local().zero_()
    assert not shards[0].any()
    # torch's wrapper of shards has the default dtype, on the CPU
    for dtype, device in ((torch.float16, "cpu"), (torch.float32, "meta")):
        part = DTensor.from_local(torch.ones(2, 3, dtype=dtype, device=device), mesh, [Shard(0)])
        other = JoinedTensor([part, part])
        for each in (other, other._local_tensor, other.detach()):
            assert (each.dtype, each.device.type) == (dtype, device)
    # rank 1 has no rows at all: one shard without elements
    alone: Any = joined(mesh, 1, 1)[0]._local_tensor
    sizes = [len(shard) for shard in alone.local_shards()]
    assert sizes == ([1, 1] if me.rank == 0 else [0])
    empty = local.new_empty(whole.shape)
    assert isinstance(empty, Shards) and empty.local_offsets() == offsets
    assert local.new_empty(whole.shape, dtype=torch.float16).dtype == torch.float16
    assert [shard.shape for shard in empty.local_shards()] == [shard.shape for shard in shards]
    assert "full_tensor()" in refusal(torch.add, local, 1)


def test_shards_are_where_the_whole_tensor_has_them(world: World) -> None:
    world.run(shards_of_ranks)


def uses(me: Member) -> None:
    mesh = init_device_mesh("cpu", (me.world_size,))
    made, parts = joined(mesh, 4, 2)
    whole = torch.cat(parts)
    for placements in (None, [Replicate()], [Shard(0)], [Shard(1)]):
        for on in (None, mesh):
            placed = made.redistribute(on, placements)
            assert list(placed.placements) == (placements or [Replicate()])
            assert type(placed) is DTensor and torch.equal(placed.full_tensor(), whole)
    # kept as projections
    for kept in (made.detach(), made.clone(), made.to(torch.float64)):
        assert isinstance(kept, JoinedTensor) and len(kept.parts) == 2
        assert torch.equal(kept.full_tensor(), whole.to(kept.dtype))
    assert kept.dtype == kept.full_tensor().dtype == torch.float64
    new = made.new_empty(made.shape, dtype=torch.float64)
    assert isinstance(new, JoinedTensor) and [len(part) for part in new.parts] == [4, 2]
    assert new.dtype == torch.float64
    # equal on all ranks, of the same projections
    assert torch.equal(made, joined(mesh, 4, 2)[0])
    assert not torch.equal(made, joined(mesh, 4, 2, seed=1)[0])
    changed = made.clone()
    changed.parts[1].to_local().zero_()
    assert not torch.equal(made, changed)
    # copies have memory of their own, and what was one tensor is one afterwards
    first, second = copy.deepcopy([made, made])
    assert first is second and isinstance(first, JoinedTensor)
    first.parts[0].to_local().zero_()
    assert torch.equal(made.full_tensor(), whole)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert isinstance(read, JoinedTensor) and torch.equal(read.full_tensor(), whole)


def test_what_can_be_done_with_a_joined_weight(world: World) -> None:
    world.run(uses)


def refused(me: Member) -> list[str]:
    mesh = init_device_mesh("cpu", (me.world_size,))
    made, parts = joined(mesh, 4, 2)
    other = joined(mesh, 2, 4)[0]
    whole = distribute_tensor(torch.cat(parts), mesh, [Shard(0)])
    return [
        refusal(made.to_local),
        refusal(made.sum),
        refusal(made.new_empty, (5, 3)),
        refusal(torch.equal, made, other),
        refusal(torch.equal, made, whole),
        refusal(torch.add, made, made),
    ]


def test_what_cannot_is_refused_on_every_rank(world: World) -> None:
    for errors in world.run(refused):
        for error in errors:
            assert error.startswith("InputError: asked:") and "full_tensor()" in error, error
