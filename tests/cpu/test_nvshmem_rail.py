"""The rail of TILEWEAVE_RAIL=nvshmem: its kernels interpreted, over memory that emulated nodes
share in place of NVSHMEM's."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from tests.cpu.test_matmul_over_nodes import CASES, CHUNKS, right
from tests.cpu.test_nodes import ACROSS, each_operator
from tests.support import parity
from tests.support.calls import refusal
from tests.support.matmul_cases import Case, prepare
from tests.support.nvshmem_on_cpu import nvshmem
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.kernels import rail
from tileweave.ops.core.nvshmem_rail import NvshmemRail
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.core.ways import _ways
from tileweave.transport.nvshmem import RAIL


def rail_here(me: Member) -> NvshmemRail:
    rail = _ways(workspace_of(name_of(None), me.device)).rail
    assert isinstance(rail, NvshmemRail)
    return rail


def matmuls(me: Member) -> None:
    with nvshmem():
        right(me, [CASES[at] for at in (0, 2, 3, 5, 6, 9)], CHUNKS)
        cases = [case for case in CASES if case.integers or case.rows < 4]
        parity.many_calls(me, cases, CHUNKS, 6, 0.004)
        rail_here(me)


def test_matmuls_with_late_ranks(worlds: Worlds) -> None:
    worlds("gloo", 4, 2).run(matmuls)


def operators(me: Member) -> dict[str, str]:
    with nvshmem():
        return each_operator(me, ACROSS, 1)


def test_each_operator(worlds: Worlds) -> None:
    assert worlds("gloo", 2, 2).run(operators)


def collectives(me: Member) -> int:
    """Of three nodes, of sizes that slots divide or not, at addresses that 8 divides or not."""
    with nvshmem(640):
        here, ranks = rail_here(me), range(me.rank % 2, 6, 2)
        for number, (count, dtype) in enumerate(
            [(1, torch.float64), (97, torch.bfloat16), (0, torch.float32)]
        ):
            here.agree(number)
            if me.rank == number % 3:
                time.sleep(0.01)

            def drawn(source: int, dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                draw = torch.Generator().manual_seed(100 * count + source)
                return torch.randint(-9, 9, (3, count), generator=draw).to(dtype)

            mine, at = drawn(me.rank), me.rank // 2
            out = torch.full((3 * count + 1,), 77, dtype=dtype)
            found = out[1:].view(3, count)
            here.all_gather(found, mine[0])
            assert torch.equal(found, torch.stack([drawn(rank)[0] for rank in ranks]))
            here.all_to_all(found, mine)
            for node, rank in enumerate(ranks):
                assert node == at or torch.equal(found[node], drawn(rank)[at])
            total = mine[0].clone()
            here.all_reduce(total)
            assert torch.equal(
                total, torch.stack([drawn(rank)[0] for rank in ranks]).sum(0).to(dtype)
            )
            assert out[0] == 77
            sent = [(me.rank + 2 * r) % 5 * count for r in range(6)]
            got = [(s + 2 * me.rank) % 5 * count for s in range(6)]
            given = torch.arange(sum(sent)).to(dtype) + me.rank
            arrived = torch.empty(sum(got), dtype=dtype)
            here.all_to_all_parts(arrived, given, got, sent)
            for source, part in enumerate(arrived.split(got)):
                begin = sum((source + 2 * r) % 5 * count for r in range(me.rank))
                assert torch.equal(part, torch.arange(begin, begin + len(part)).to(dtype) + source)
        return here._heap._used


def test_collectives_of_three_nodes(worlds: Worlds) -> None:
    assert all(worlds("gloo", 6, 3).run(collectives))


def scatter(me: Member, case: Case = CASES[3]) -> torch.Tensor:
    call = prepare(case, me.rank, me.world_size, me.device, 1)
    group = dist.group.WORLD
    assert group is not None
    parity.run(call, group, CHUNKS)
    call.verify("")
    return torch.ones(1)


def absent(me: Member) -> list[str]:
    with nvshmem(TILEWEAVE_TIMEOUT="0.8"):
        scatter(me)
        said = []
        if me.rank == 0:
            began = time.monotonic()
            said.append(refusal(scatter, me))
            assert 0.8 <= time.monotonic() - began < 2.8
            said.append(refusal(scatter, me))
            said.append(refusal(tw.synchronize))
            x = torch.zeros(300)
            with (
                mock.patch.object(NvshmemRail, "check"),
                mock.patch.object(rail, "expire"),  # which raises on the CPU
            ):
                rail_here(me).all_reduce(x)
            assert x.isnan().all()
        else:
            time.sleep(2)  # and what it puts now must not reach later calls
            said.append(refusal(scatter, me))
        tw.close()
        dist.barrier()
        scatter(me)
        return said


def test_a_rank_that_does_not_come(worlds: Worlds) -> None:
    found = worlds("gloo", 2, 2).run(absent)
    for said in (said for rank in found for said in rank):
        assert said.startswith("PeerTimeout") and "between nodes by NVSHMEM" in said, said


def differ(me: Member) -> str:
    with nvshmem(TILEWEAVE_TIMEOUT="3"):
        scatter(me)
        dist.barrier()
        said = refusal(scatter, me, replace(CASES[3], rows=35 + me.rank))
        tw.close()
        dist.barrier()
        scatter(me)
        return said


def test_calls_that_differ_between_nodes(worlds: Worlds) -> None:
    for said in worlds("gloo", 2, 2).run(differ):
        assert said.startswith("RankMismatchError") and "ranks 0 and 1" in said.replace(
            "ranks 1 and 0", "ranks 0 and 1"
        ), said


def variables(me: Member) -> list[str]:
    said = []
    for value in ("nvshmem" if me.rank else "", "nvshmem", "NCCL"):
        tw.close()
        dist.barrier()
        with mock.patch.dict(os.environ, {RAIL: value}):
            said.append(refusal(scatter, me))
    tw.close()
    dist.barrier()
    return said


def test_the_variable(worlds: Worlds) -> None:
    for some, on_cpu, wrong in worlds("gloo", 2, 2).run(variables):
        assert some.startswith("RankMismatchError: asked: TILEWEAVE_RAIL=nvshmem on ranks [1] only")
        assert on_cpu.startswith("InputError: asked: TILEWEAVE_RAIL=nvshmem for tensors on the CPU")
        assert wrong.startswith("InputError: asked: TILEWEAVE_RAIL='NCCL'; allowed: nccl, nvshmem")
