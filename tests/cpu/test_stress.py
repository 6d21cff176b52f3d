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
    return outcome.calls, outcome.wrong, outcome.other_bits, outcome.world_size


@pytest.mark.parametrize("wrong_rank", [-1, 1])
def test_stress(wrong_rank: int) -> None:
    calls, wrong, other_bits, size = launch(small, wrong_rank, world_size=2, device_type="cpu", seconds=100)
    assert size == 2
    assert calls == 80
    assert other_bits == 0
    assert (wrong > 0) == (wrong_rank >= 0), wrong


def test_epochs_are_moved_to_the_wrap_and_keep_their_slot() -> None:
    from tileweave.stress import _near_the_wrap
    from tileweave.transport.base import EPOCH

    for epoch in (5, 6):
        instance = mock.Mock(
            control=torch.tensor([epoch, 0, 0, 0], dtype=torch.int32), signals=torch.zeros(4, dtype=torch.int32)
        )
        _near_the_wrap(mock.Mock(instances={("op", "sm"): instance}))
        moved = int(instance.control[EPOCH])
        assert 2**31 - 160 < moved < 2**31 - 140
        assert moved % 2 == epoch % 2
        assert set(instance.signals.tolist()) == {moved - 1}
