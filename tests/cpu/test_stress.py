"""`tileweave check --stress` in small: it runs where there are no GPUs, and it notices."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tileweave.launcher import Member, launch


def small(member: Member, wrong_rank: int) -> tuple[int, int, int, int]:
    from tileweave import stress
    from tileweave.bench.subjects import SUBJECTS

    subject = SUBJECTS["all_gather_matmul"]
    call, made = type(subject).call, [0]

    def sometimes_wrong(self, operands, group, *rest, **named):
        result = call(self, operands, group, *rest, **named)
        made[0] += 1
        if member.rank == wrong_rank and made[0] > 40:  # behind the calls that make what others are compared with
            result[0].view(-1)[-1] += 1000 if made[0] % 2 else 0
        return result

    with mock.patch.object(type(subject), "call", sometimes_wrong), mock.patch("tileweave.OPERATORS", ("all_gather_matmul",)):
        outcome = stress.stress(member, 40, 3, 100.0)
    assert outcome.moves == outcome.asked and f"{outcome.wrong} wrong" in str(outcome)
    return outcome.calls, outcome.wrong, outcome.other_bits, outcome.world_size


def test_stress_notices() -> None:
    calls, wrong, other_bits, size = launch(small, 1, world_size=2, device_type="cpu", seconds=100)
    assert size == 2
    assert calls == 80
    assert other_bits == 0
    assert wrong > 0


def everything(member: Member) -> tuple[int, int, set[str], list[int]]:
    """All operators, beyond both wraps of the epochs."""
    from tileweave import stress

    with mock.patch.object(stress, "_BELOW_WRAP", 4), mock.patch.object(stress, "_BATCH", 20), mock.patch.object(
        stress, "_POISONED", 1.0
    ):  # fmt: skip
        run = stress.Stress(member, 2)
        outcome = run.run(60, 100.0)
    epochs = [int(i.control[0]) for lane in run.lanes for w in run._workspaces(lane) for i in w.instances.values()]
    return outcome.wrong + outcome.other_bits, outcome.moves, set(outcome.counts), epochs


def test_every_operator_in_disorder() -> None:
    import tileweave as tw

    wrong, moves, ops, epochs = launch(everything, world_size=2, device_type="cpu", seconds=100)
    assert (wrong, moves) == (0, 60)
    assert ops == set(tw.OPERATORS)
    assert any(0 <= epoch < 100 for epoch in epochs), f"some have wrapped to 0: {epochs}"
    assert all(-5 <= epoch < 100 for epoch in epochs), epochs


@pytest.mark.parametrize("wrap", [2**31, 2**32])
def test_epochs_are_moved_to_the_wrap_and_keep_their_slot(wrap: int) -> None:
    from tileweave.stress import _near_the_wrap
    from tileweave.transport.base import EPOCH

    for epoch in (5, 6, -7, -8):
        instance = mock.Mock(
            control=torch.tensor([epoch, 0, 0, 0], dtype=torch.int32), signals=torch.zeros(4, dtype=torch.int32)
        )
        _near_the_wrap(mock.Mock(instances={("op", "sm"): instance}), wrap)
        moved = int(instance.control[EPOCH])
        assert wrap - 160 < moved % 2**32 < wrap - 140
        assert moved % 2 == epoch % 2
        assert set(instance.signals.tolist()) == {moved - 1}
