"""What callers pass besides plain tensors: inputs of any strides, meshes as groups."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from tests.support.calls import refusal, run_either
from tests.support.matmul_cases import AG, AR, IN, OUT, RS
from tests.support.worlds import Member, World, Worlds
from torch.distributed.device_mesh import init_device_mesh

import tileweave as tw
from tileweave.ops.core import registry

EXCHANGE = {"scatter_dim": 0, "gather_dim": 1}


@pytest.fixture(params=[2, 3], ids="world{}".format)
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", request.param)


# --- Any strides ---


def strided(me: Member) -> None:
    """Inputs that are not contiguous give the bits and gradients of contiguous ones, and are logged
    once."""
    rows, depth, said = 2 * me.world_size, 3 * me.world_size, []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("tileweave")
    log.addHandler(listener)
    whole = torch.randn(2, rows, 2 * depth)
    views = (whole[0, :, ::2], whole[0, :, :depth], whole.transpose(0, 1)[..., :depth])
    with (
        mock.patch.object(registry, "_SAID", set()),
        mock.patch.object(log, "level", logging.INFO),
    ):
        for op in (AG, RS, AR, OUT, IN):
            for view in views:
                options = EXCHANGE if op in (OUT, IN) else {}
                k = depth * me.world_size if op == IN else depth
                w = torch.randn(5, k)
                plain, odd = view.contiguous().requires_grad_(), view.detach().requires_grad_()
                assert not odd.is_contiguous()
                want, found = (getattr(tw, op)(x, w, **options) for x in (plain, odd))
                assert torch.equal(want, found), (op, view.stride())
                weights = torch.randn_like(want)
                (want * weights).sum().backward()
                (found * weights).sum().backward()
                assert torch.equal(plain.grad, odd.grad), (op, view.stride())
        x, w = torch.ones(rows, depth), torch.ones(5, depth)
        residual = torch.randn(5, rows).t()
        assert torch.equal(
            tw.matmul_all_reduce(x, w, residual=residual),
            tw.matmul_all_reduce(x, w, residual=residual.contiguous()),
        )
    log.removeHandler(listener)
    copies = [text for text in said if "copies" in text]
    assert len(copies) == len(set(copies)) == 6, copies


@pytest.mark.parametrize("interpreted", [True, False])
def test_inputs_of_any_strides(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, strided)


# --- Meshes ---


def meshes(me: Member) -> list[str]:
    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("tp",))
    grid = init_device_mesh("cpu", (1, me.world_size), mesh_dim_names=("dp", "tp"))
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    want = tw.all_gather_matmul(x, w)
    compiled = torch.compile(
        lambda group: tw.all_gather_matmul(x, w, group=group), fullgraph=True, backend="eager"
    )
    for group in (mesh, grid["tp"]):
        assert torch.equal(tw.all_gather_matmul(x, w, group=group), want)
        assert tw.explain(AG, x, w, group=group).path == tw.explain(AG, x, w).path
        assert torch.equal(compiled(group), want)
    tw.close(mesh)
    return [refusal(tw.all_gather_matmul, x, w, group=grid)]


def test_a_mesh_as_group(world: World) -> None:
    for (said,) in world.run(meshes):
        assert "2 dimensions" in said and "mesh[dimension]" in said, said
