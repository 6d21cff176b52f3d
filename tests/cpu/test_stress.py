"""`tileweave check --stress` on a small scale: it runs without GPUs, and finds wrong results."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from unittest import mock

import pytest
import torch

import tileweave as tw
from tileweave.launcher import Member, launch


def everything(member: Member) -> tuple[tuple[int, int], set[str], list[int]]:
    """All operators, past both wraps of the epochs: (wrong, moves), operators, and the epochs at
    the end."""
    from tileweave.commands import stress

    quick = {"_DATA": 1, "_BELOW_WRAP": 3, "_BATCH": 20, "_POISONED": 1.0}
    with ExitStack() as stack:
        for name, value in quick.items():
            stack.enter_context(mock.patch.object(stress, name, value))
        run = stress.Stress(member, 2)
        outcome = run.run(60, 150.0)
    epochs = [
        int(i.control[0])
        for lane in run.lanes
        for w in run._workspaces(lane)
        for i in w.instances.values()
    ]
    member.barrier()
    tw.close()
    return (outcome.wrong + outcome.other_bits, outcome.moves), set(outcome.counts), epochs


def wrong_on_one_rank(member: Member, wrong_rank: int) -> tuple[int, int, int]:
    from tileweave.bench.samples import samples_of
    from tileweave.commands import stress

    subject = samples_of("all_gather_matmul").subject
    call, made = type(subject).call, [0]

    def sometimes_wrong(self, operands, group, *rest, **named):
        result = call(self, operands, group, *rest, **named)
        made[0] += 1
        # after the calls whose results others are compared with
        if member.rank == wrong_rank and made[0] > 20:
            result[0].view(-1)[-1] += 1000 if made[0] % 2 else 0
        return result

    with (
        mock.patch.object(type(subject), "call", sometimes_wrong),
        mock.patch("tileweave.OPERATORS", ("all_gather_matmul",)),
    ):
        outcome = stress.stress(member, 30, 3, 100.0)
    assert outcome.moves == outcome.asked and f"{outcome.wrong} wrong" in str(outcome)
    # the output of --json
    assert json.loads(json.dumps(asdict(outcome)))["counts"] == {"all_gather_matmul": 30}
    return outcome.calls, outcome.wrong, outcome.other_bits


def both(member: Member) -> tuple:
    return everything(member), wrong_on_one_rank(member, 1)


@pytest.mark.timeout(250)
def test_stress_runs_every_operator_and_finds_a_wrong_rank() -> None:
    (right, ops, epochs), (calls, wrong, other_bits) = launch(
        both, world_size=2, device_type="cpu", seconds=220
    )
    assert right == (0, 60)
    assert ops == set(tw.OPERATORS)
    assert any(0 <= epoch < 100 for epoch in epochs), f"some have wrapped to 0: {epochs}"
    assert all(-5 <= epoch < 100 for epoch in epochs), epochs
    assert (calls, other_bits) == (60, 0)
    assert wrong > 0


@pytest.mark.parametrize("wrap", [2**31, 2**32])
def test_stress_moves_epochs_to_the_wrap(wrap: int) -> None:
    from tileweave.commands.stress import _near_the_wrap
    from tileweave.transport.protocol import EPOCH

    for epoch in (5, 6, -7, -8):
        instance = mock.Mock(
            control=torch.tensor([epoch, 0, 0, 0], dtype=torch.int32),
            signals=torch.zeros(4, dtype=torch.int32),
        )
        _near_the_wrap(mock.Mock(instances={("op", "sm"): instance}), wrap)
        moved = int(instance.control[EPOCH])
        assert wrap - 160 < moved % 2**32 < wrap - 140
        assert moved % 2 == epoch % 2
        assert set(instance.signals.tolist()) == {moved - 1}
