"""``tools/judge_plans.py``: how much longer plans take than the fastest candidate, and how times
are added to those of the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tools import judge_plans
from tools.judge_plans import Judged, judge
from typer.testing import CliRunner

import tileweave as tw
from tileweave.planning.cache import Key, text_of
from tileweave.planning.candidates import PLANNED
from tileweave.planning.measurements import Measurement, packaged, write_measurements

OP = "all_gather_matmul"
WIDE = [one for one in packaged(OP) if one.device == "H200" and not one.problem.fp8]
KEY = Key("NVIDIA H200", 132, 2, "580.1", "0.2.0", "2.11.0", "3.6.0", "all")


def a_shape() -> Measurement:
    return next(one for one in WIDE if one.problem.world_size == 2 and len(one.us) > 5)


def cache_file(folder: Path, measured: list[Measurement], key: Key = KEY) -> Path:
    path = folder / "cache.json"
    path.write_text(text_of(key, measured), "utf-8")
    return path


def test_a_shape_with_its_own_times_is_planned_right() -> None:
    one = a_shape()
    sm = {c: us for c, us in one.us.items() if c is None or c.transport == "sm"}  # host time is 0
    known = replace(one, us=sm)
    assert judge(known, [*WIDE, known]).ratio == 1.0


def test_left_out_shapes_do_not_know_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates but unfused take 100 times as long here as they do in the neighbourhood."""
    one = a_shape()
    odd = replace(one, us={c: us * (100 if c else 1) for c, us in one.us.items()})
    known = tuple(odd if each is one else each for each in WIDE)
    monkeypatch.setattr(judge_plans, "packaged", lambda op: {OP: known}[op])
    judged = {each.measured.problem: each for each in judge_plans.left_out(OP, progress=False)}
    assert len(judged) == len(WIDE)
    assert judged[one.problem].planned is not None and judged[one.problem].ratio > 10
    assert judge(odd, known).planned is None


def test_fp8_operands_are_judged_by_themselves() -> None:
    """Among their own candidates, of which some have tiles that 16 bits have not."""
    judged = judge_plans.left_out("matmul_all_reduce", progress=False, fp8=True)
    assert judged and all(each.measured.problem.fp8 for each in judged)
    planned = {each.planned for each in judged}
    assert planned <= {None, *PLANNED["matmul_all_reduce"].fp8}
    assert planned - {None, *PLANNED["matmul_all_reduce"].configs}
    assert {each.group[1] for each in judged} == {"H200, FP8"}


def test_mean_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    one = a_shape()
    first, second = [c for c in one.us if c][:2]
    times = replace(one, us={None: 40.0, first: 10.0, second: 20.0})
    judged = [Judged(times, config) for config in (None, first)]
    assert [each.ratio for each in judged] == [4.0, 1.0]
    slow = replace(one, us={None: 10.0, first: 10.2, second: 10.4})
    assert [Judged(slow, config).is_slower for config in slow.us] == [False, False, True]
    judge_plans.show(judged, 1)
    said = capsys.readouterr().out
    assert said.count("2.0000") == 2 and "4.000  all_gather_matmul" in said, said


def test_add_keeps_other_times_and_replaces_the_same(tmp_path: Path) -> None:
    """Shapes that say nothing about others are left out."""
    one = a_shape()
    first, second = [c for c in one.us if c][:2]
    other = replace(one, device="H100", us={None: 7.0})
    before = [replace(one, us={None: 40.0, first: 10.0}), other]
    (tmp_path / f"{OP}.json").write_text(write_measurements(OP, before), "utf-8")
    wider = replace(one.problem, cols=one.problem.cols + 8)
    new = replace(one, problem=wider, us={None: 5.0, first: 6.0})
    alone = replace(new, problem=replace(one.problem, cols=one.problem.cols + 16), us={None: 5.0})
    odd = [
        replace(new, problem=replace(one.problem, **{name: getattr(one.problem, name) + 4}))
        for name in ("cols", "depth")
    ]
    found = [replace(one, us={first: 11.0, second: 12.0, None: 40.0}), alone, new, *odd]
    assert judge_plans.add(found, tmp_path) == {OP: 3}
    text = (tmp_path / f"{OP}.json").read_text("utf-8")
    merged = judge_plans.measurements.read_measurements(text, OP)
    assert [dict(each.us) for each in merged] == [
        {None: 40.0, first: 11.0, second: 12.0},
        {None: 7.0},
        {None: 5.0, first: 6.0},
    ]
    assert [each.device for each in merged] == ["H200", "H100", "H200"]


def test_files_of_the_tuner(tmp_path: Path) -> None:
    """A known shape is not judged, a new one is."""
    one = a_shape()
    new = replace(one, problem=replace(one.problem, cols=one.problem.cols + 8))
    path = cache_file(tmp_path, [replace(each, device="") for each in (one, new)])
    found = judge_plans.read_caches([path])
    assert [each.device for each in found] == ["H200", "H200"]
    judged = judge_plans.new_shapes(found, progress=False)
    assert [each.measured.problem for each in judged] == [new.problem]
    done = CliRunner().invoke(judge_plans.app, ["new", str(path), "--worst", "1"])
    assert (
        done.exit_code == 0 and "above 1.12" in done.output and str(new.problem.cols) in done.output
    )


def test_times_of_an_unknown_device_are_refused(tmp_path: Path) -> None:
    path = cache_file(tmp_path, [replace(a_shape(), device="")], replace(KEY, gpu="GTX 1080"))
    with pytest.raises(tw.InputError, match=r"asked: times of GTX 1080.*remedy: add one"):
        judge_plans.read_caches([path])


def test_an_unknown_operator_is_refused() -> None:
    done = CliRunner().invoke(judge_plans.app, ["left-out", "--op", "matmul"])
    assert done.exit_code == 2 and "allowed are all" in done.output
