"""CUDA graphs of operators over nodes, as far as a CPU shows: what a capture may be asked for."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from tests.cpu.test_nodes import ACROSS
from tests.support.calls import refusal
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE, Draw
from tileweave.ops.core.registry import name_of
from tileweave.transport.cpu import CpuTransport


def captured(me: Member) -> dict[str, tuple[str, str]]:
    """By operator: what a capture says before any call of it, and after one."""
    said, group = {}, dist.group.WORLD
    for op in ACROSS:
        samples = samples_of(op)
        shape = samples.check_on_cpu.shapes[:2][-1]
        draw = Draw(torch.float32, me.device, me.rank, me.world_size, 0)
        operands = samples.subject.draw(shape, draw)
        if op == "grouped_matmul_combine":
            plan = replace(operands.plan, group_name=name_of(group))
            operands = replace(operands, plan=plan)
        tw.close()
        capturing = mock.patch.object(CpuTransport, "capturing", return_value=True)
        with capturing:
            first = refusal(samples.subject.call, operands, group, None, False)
        tw.close()
        samples.subject.call(operands, group, None, False)
        with capturing:
            out, second = samples.subject.call(operands, group, None, False)
        assert samples.subject.error(operands, out, second) <= TOLERANCE[torch.float32]
        said[op] = first, refusal(samples.subject.call, operands, group, None, False)
        tw.close()
    return said


def test_captures_follow_a_call(worlds: Worlds) -> None:
    for said in worlds("gloo", 2, 2).run(captured):
        assert said.keys() == set(ACROSS)
        for op, (first, after) in said.items():
            assert first.startswith("CaptureError: asked: ") and "remedy: " in first, (
                f"{op}: {first}"
            )
            assert after == "", f"{op}: {after}"
