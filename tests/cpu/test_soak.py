"""`tileweave check --soak` on a small scale: it finds wrong results, tells of a killed rank and of
growth."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tileweave.commands.soak import SECONDS, Fault, Report, Soak, Wish, different, soak
from tileweave.launcher import Member, launch


def wrong_on_one_rank(member: Member) -> tuple[list[str], int]:
    """A few moves; then one whose results are wrong on rank 1."""
    from tileweave.bench.samples import samples_of

    wish, report = Wish(4, 60.0, 2, 4), Report(2, 2)
    run = Soak(member, wish, report, "")
    run.run(60.0)
    assert not report.wrong and report.checked > 0, report
    wish = Wish(report.moves + 1, 60.0, 2, 4)
    subject = samples_of(run.pool[0][0]).subject
    call = type(subject).call

    def sometimes_wrong(self, *given, **named):
        result = call(self, *given, **named)
        result[0].view(-1)[0] += 1000 * member.rank
        return result

    run = Soak(member, wish, report, "")
    run.pool = run.pool[:1]
    with mock.patch.object(type(subject), "call", sometimes_wrong):
        run.run(60.0)
    return report.wrong, report.moves


@pytest.mark.timeout(150)
def test_soak_finds_wrong_results_of_any_rank() -> None:
    wrong, moves = launch(wrong_on_one_rank, world_size=2, device_type="cpu", seconds=140)
    assert moves == 5
    assert wrong and all("rank 1: error" in text for text in wrong), wrong


@pytest.mark.timeout(150)
def test_soak_tells_of_a_killed_rank() -> None:
    report = soak("cpu", 2, Wish(0, 1.0, 1, 8, ("kill",), 0.0))
    assert [(fault.kind, fault.victim, fault.told) for fault in report.faults] == [
        ("kill", 1, True)
    ], report
    assert report.faults[0].seen[0].startswith("PeerTimeout"), report


@pytest.mark.timeout(150)
def test_soak_tells_of_a_stop_that_is_longer_than_a_wait_may_last() -> None:
    report = soak("cpu", 2, Wish(0, 1.0, 4, 8, ("stop",), 0.0))
    (fault,) = report.faults
    assert fault.kind == "stop" and fault.seconds > 2 * SECONDS, "choose another seed"
    assert fault.told and fault.seen[0].startswith("PeerTimeout"), report
    assert fault.waited >= SECONDS and report.right, report


def test_soak_judges_faults_and_growth() -> None:
    report = Report(2, 1, moves=1)
    assert report.right
    report.faults.append(Fault("stop", 0, 1.0, told=False))
    assert not report.right
    report = Report(2, 1, moves=1)
    report.footprint = [(300, 60, 900, 400), (1200, 70, 950, 500), (9000, 70, 950, 510)]
    assert report.right and report.growth == ""
    for at, name in enumerate(("descriptors", "maps", "MiB"), 1):
        later = list(report.footprint[-1])
        later[at] += 40
        grown = Report(2, 1, moves=1, footprint=[*report.footprint, tuple(later)])  # type: ignore[list-item]
        assert name in grown.growth and not grown.right
    assert not Report(2, 1).right, "nothing was checked"


def test_soak_leaves_out_only_results_with_the_same_bits() -> None:
    first = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    zero = first.clone()
    zero[1, 0] = -0.0
    assert len(different([first, first.clone(), zero, first.t(), zero.clone()])) == 3
    assert len(different([torch.empty(0, 3), torch.empty(0, 3)])) == 1
