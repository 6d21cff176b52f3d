"""``tileweave tune`` and ``tw.warmup(tune=True)`` with interpreted kernels: the whole path."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.cpu.test_tuned_choices import cache_of
from tests.support.calls import refusal
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.errors import UnsupportedError
from tileweave.kernels.runtime import launch as launching
from tileweave.launcher import Member as Launched

pytest.importorskip("rich")
pytest.importorskip("typer")
runner = pytest.importorskip("typer.testing").CliRunner()

from tileweave.bench.rivals import OURS  # noqa: E402
from tileweave.bench.samples import samples_of  # noqa: E402
from tileweave.bench.subjects import TOLERANCE, Draw, Shape  # noqa: E402
from tileweave.commands.app import app  # noqa: E402
from tileweave.ops.core.registry import machine_of, name_of  # noqa: E402
from tileweave.ops.core.tuned_choices import key_of  # noqa: E402
from tileweave.planning import cache, choices  # noqa: E402
from tileweave.planning.candidates import TUNABLE, candidates  # noqa: E402
from tileweave.planning.measurements import Measurement  # noqa: E402
from tileweave.planning.problem import SCALES, Plan, Problem  # noqa: E402
from tileweave.planning.schedules.scatter import Exchange  # noqa: E402
from tileweave.transport.workspace import REGISTRY  # noqa: E402
from tileweave.tune import measure, run  # noqa: E402
from tileweave.tune.call import case_of, problem_of_call  # noqa: E402
from tileweave.tune.measure import problem_of  # noqa: E402
from tileweave.tune.shapes import of_sizes  # noqa: E402

ON_CPU = ("--device", "cpu", "--world", "2", "--repeats", "1", "--dtype", "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tune(*words: str, code: int = 0) -> str:
    done = runner.invoke(app, ["tune", *words, *ON_CPU])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done.output


def plans_of_calls(me: Member, folder: str) -> list[str]:
    """Plans before and after calls of a process that has read no cache; results are right."""
    found, w = [], torch.ones(24, 32)
    with cache_of(Path(folder)):
        for rows in (8, 20, 9):
            x = torch.ones(rows, 32)
            found.append(tw.explain("matmul_all_reduce", x, w).summary)
            assert torch.equal(tw.matmul_all_reduce(x, w), torch.full((rows, 24), 64.0))
            found.append(tw.explain("matmul_all_reduce", x, w).summary)
    return found


@pytest.mark.slow
def test_shapes_are_measured_kept_and_planned_by(
    worlds: Worlds, tmp_path: Path, own_cache: Path
) -> None:
    found = tmp_path / "found.json"
    (tmp_path / "shapes").write_text("8 24 64\n20 24 64\n8 24 65  # the same after rounding\n")
    said = tune(
        "matmul_all_reduce", "--shapes", str(tmp_path / "shapes"), "--json", str(found), code=0
    )
    assert "2 shapes tuned" in said and "kept in" in said
    rows = json.loads(found.read_text())["rows"]
    assert [row["sizes"] for row in rows] == [[8, 24, 64], [20, 24, 64]]
    for row in rows:
        assert row["us"] <= row["us_unfused"] and row["us"] <= row["us_before"]
        assert row["candidates"] >= 2 and row["wrong"] == []
    (path,) = cache.files()
    measured = cache.read(path)[1]
    assert [one.problem.rows for one in measured] == [8, 20]
    assert all(None in one.us and len(one.us) >= 2 for one in measured)
    assert "matmul_all_reduce" in runner.invoke(app, ["tune", "--show"]).output
    for *tuned, _, untuned in worlds("gloo", 2).run(plans_of_calls, str(own_cache)):
        assert len(tuned) == 4 and all(plan.endswith(": measured") for plan in tuned), tuned
        assert "interpreted" in untuned


def test_each_candidate_is_timed_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own config is forced when it is checked and timed; one that is wrong has no time, and one
    at the bound of the error is right."""
    op, device = "matmul_all_reduce", torch.device("cpu")
    member: Any = SimpleNamespace(world_size=2, device=device, group="group", rank=0)
    case, checked, ran, said, names = of_sizes(op, 8, 16, 32, "float32"), [], [], [], []
    right, wrong = candidates(op, problem_of(case, 2), machine_of(device))[:2]
    bound = TOLERANCE[torch.float32]

    def errors() -> list[float]:
        checked.append(config := choices.forced_config(op))
        return [0.0, 2 * bound if config == wrong else bound]

    def call() -> None:
        ran.append(choices.forced_config(op))

    def timed(functions: Any, group: object, on: object, **options: object) -> dict[str, Any]:
        assert (group, on) == ("group", device)
        more = {"settle": True, "within": measure._NEAR}
        assert options == {"repeats": 3, "graph": True, "progress": said.append, **more}
        names.extend(functions)
        for function in functions.values():
            function()
        return {name: SimpleNamespace(median_us=float(at)) for at, name in enumerate(functions)}

    made = SimpleNamespace(functions={OURS: call}, errors=errors, dtype=torch.float32)
    samples = SimpleNamespace(rival=lambda *given: given == (case, member, (OURS,), 7) and made)
    forget = mock.Mock()
    monkeypatch.setattr(measure, "samples_of", lambda name: {op: samples}[name])
    monkeypatch.setattr(measure, "worst", lambda error, on, group: error)
    monkeypatch.setattr(measure, "forget_case", forget)
    monkeypatch.setattr(measure, "measure", timed)
    found, refused = measure.measure_case(member, case, 7, (right, wrong), 3, said.append)
    assert (checked, ran) == ([None, right, wrong], [None, right])
    assert said == [f"checks candidate {number} of 3" for number in (1, 2, 3)]
    assert found.us == {None: 0.0, right: 1.0} and refused == {wrong: 2 * bound}
    assert names == ["unfused", f"1: {right}"]
    forget.assert_called_once_with(member)


def on_one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A member for ``run``, with what ranks tell each other taken from this process."""
    monkeypatch.setattr(run, "_of_rank_0", lambda member, mine: mine)
    monkeypatch.setattr(run, "rank_0_says", lambda member, mine: mine)
    return SimpleNamespace(world_size=2, device=torch.device("cpu"), group="group", rank=0)


def test_times_that_no_file_can_keep_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    member, op = on_one_rank(monkeypatch), "matmul_all_reduce"
    problem = problem_of(of_sizes(op, 8, 16, 32, "float32"), 2)
    first, second = candidates(op, problem, machine_of(member.device))[:2]
    third = replace(first, tile_m=2 * first.tile_m)
    times = {None: 2.006, first: math.nan, second: 0.004, third: 0.013}
    kept = run._as_on_rank_0(member, Measurement(op, problem, times))
    assert kept == Measurement(op, problem, {None: 2.01, third: 0.01})
    with pytest.raises(UnsupportedError, match="leave out this shape"):
        run._as_on_rank_0(member, Measurement(op, problem, times | {None: 0.001}))


@pytest.mark.parametrize("planned", [True, False], ids=["fused before", "unfused before"])
def test_a_shape_is_measured_with_all_candidates_and_its_plan(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, op = on_one_rank(monkeypatch), "matmul_all_reduce"
    case = of_sizes(op, 8, 16, 32, "float32")
    problem = problem_of(case, 2)
    possible = candidates(op, problem, machine_of(member.device))
    before = replace(possible[0], tile_m=possible[0].tile_m * 2) if planned else None
    tried = (*possible, before) if planned else possible
    measured = {None: 4.0, possible[0]: 2.0, possible[1]: 3.0}
    found = Measurement(op, problem, measured | ({before: 8.0} if planned else {}))
    large = replace(possible[0], num_stages=9)
    measured_now = measure.Found(found, {possible[1]: 1.0})
    measuring, add, said = mock.Mock(return_value=measured_now), mock.Mock(), mock.Mock()
    monkeypatch.setattr(run, "measure_case", measuring)
    monkeypatch.setattr(run, "_plan", lambda *_: Plan("fused", "", before))
    assert run._candidates(case, member) == (before, tried)
    monkeypatch.setattr(run, "_plan", lambda *_: Plan("fused", "", before, captured=possible[1]))
    assert run._candidates(case, member) == (possible[1], tried), "times are those in graphs"
    monkeypatch.setattr(run.tuned_choices, "add", add)
    kept, row = run.tune_case(member, run.Tried(case, before, tried, (large,)), 7, 3, said)
    measuring.assert_called_once_with(member, case, 7, tried, 3, said)
    add.assert_called_once_with(member.device, 2, [found])
    assert kept == found
    assert row == run.Row(
        op,
        case.name,
        (8, 16, 32),
        run._named(before),
        run._named(possible[0]),
        8.0 if planned else 4.0,
        2.0,
        4.0,
        len(tried) + 2,
        (run._named(possible[1]),),
        (run._named(large),),
    )
    assert row.gain == row.us_before / 2


def test_candidates_of_several_shapes_are_compiled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shape once, before it is measured; every call has its own config. One whose kernel does
    not fit the GPU is not tried."""
    member, op, said = on_one_rank(monkeypatch), "matmul_all_reduce", mock.Mock()
    cases = [of_sizes(op, rows, 16, 32, "float32") for rows in range(1, run.AHEAD + 3)]
    known = candidates(op, problem_of(cases[0], 2), machine_of(member.device))
    chunks = replace(known[0], kernel="library", transport="nodes")  # waits for other nodes
    known = (*known, chunks)
    made: list[Any] = []
    compiled: list[int] = []

    def rival(case: Any, *_: object) -> Any:
        return SimpleNamespace(
            functions={OURS: lambda: made.append((case, choices.forced_config(op)))}
        )

    def large_at(case: Any) -> Any:  # another one for each case
        return known[cases.index(case) % (len(known) - 1)]

    def compiles(name: str, on: object, calls: Any) -> list[list[str]]:
        assert (name, on) == ("name", member.device)
        before = len(made)
        for each in calls:
            each()
        compiled.append(len(made))
        return [
            ["small", "large" if config == large_at(case) else "small"]
            for case, config in made[before:]
        ]

    monkeypatch.setattr(run, "_candidates", lambda case, _: (known[1], known))
    monkeypatch.setattr(measure, "name_of", {"group": "name"}.get)
    monkeypatch.setattr(measure, "forget_case", forget := mock.Mock())
    monkeypatch.setattr(measure, "samples_of", lambda name: SimpleNamespace(rival=rival))
    monkeypatch.setattr(measure, "compile_calls", compiles)
    monkeypatch.setattr(measure, "worst", lambda error, on, group: error)
    monkeypatch.setattr(launching, "fits", lambda kernel: kernel == "small")
    for case, tried in zip(cases, run.compiled_cases(member, cases, said), strict=True):
        assert case in {case for case, _ in made}
        left = tuple(config for config in known if config != large_at(case))
        assert tried == run.Tried(case, known[1], left, (large_at(case),))
    each = len(known) - 1
    assert made == [(case, config) for case in cases for config in known[:-1]]
    assert compiled == [run.AHEAD * each, len(cases) * each]
    assert forget.mock_calls == [mock.call(member)] * 2
    assert said.mock_calls == [
        mock.call(f"compiles the candidates of {count} shapes") for count in (run.AHEAD, 2)
    ]


def test_tuning_tells_what_it_does_and_ends_in_time(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of 10 s each, for 20 s: the third one is left out."""
    member, op = on_one_rank(monkeypatch), "matmul_all_reduce"
    cases = tuple(of_sizes(op, rows, 16, 32, "float32") for rows in (8, 12, 16))
    clock, said = [0.0], mock.MagicMock()
    steps = said.__enter__.return_value
    row = run.Row(op, "name", (8, 16, 32), "unfused", "triton push", 3.0, 2.0, 3.0, 2)

    def tuned(member: Any, tried: Any, seed: int, repeats: int, tell: object) -> tuple[Any, Any]:
        assert (tried, seed, repeats, tell) == (cases[seed].name, len(merged), 4, steps.detail)
        clock[0] += 10.0
        return tried, row

    merged: list[Any] = []
    monkeypatch.setattr(
        run, "Steps", lambda title, total, show: (total, show) == (3, True) and said
    )
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(run, "tune_case", tuned)
    compiled = mock.Mock(return_value=(case.name for case in cases))
    monkeypatch.setattr(run, "compiled_cases", compiled)
    monkeypatch.setattr(run.tuned_choices, "agree", agree := mock.Mock())
    monkeypatch.setattr(run.cache, "merge", lambda key, found: merged.append((key, *found)))
    outcome = run.tune(member, run.Options(cases, 4, 20.0))
    key = key_of(member.device, 2)
    agree.assert_called_once_with("group", member.device)
    assert merged == [(key, cases[0].name), (key, cases[1].name)]
    assert outcome == run.Outcome(
        [row, row], [f"{op} {cases[2].name}"], str(cache.path_of(key)), 20.0
    )
    compiled.assert_called_once_with(member, [*cases], steps.detail)
    left = ("", ", about 20 s left", ", about 10 s left")
    assert steps.now.mock_calls == [
        mock.call(f"{op} {case.name}{rest}") for case, rest in zip(cases, left, strict=True)
    ]
    done = mock.call("triton push, 2.0 us, 1.50 times as fast as unfused")
    assert steps.done.mock_calls == [done, done, mock.call("skipped: out of time")]


def tuned_without_a_place(me: Member, folder: str) -> str:
    case = of_sizes("matmul_all_reduce", 8, 16, 32, "float32")
    measuring = mock.patch.object(run, "tune_case", side_effect=AssertionError("measured"))
    with cache_of(Path(folder)), measuring:  # it is known before
        return refusal(run.tune, Launched(me.rank, me.world_size, me.device), run.Options((case,)))


def test_tuning_ends_on_every_rank_where_results_cannot_be_kept(
    worlds: Worlds, own_cache: Path
) -> None:
    own_cache.mkdir()
    path = cache.path_of(key_of(torch.device("cpu"), 2))
    path.write_text("{}")
    for said in worlds("gloo", 2).run(tuned_without_a_place, str(own_cache)):
        assert str(path) in said and "tileweave tune --clear" in said
    assert path.read_text() == "{}"


def warmed_up(me: Member, folder: str) -> list[object]:
    """Ranks 0 and 1 tune in a group of their own; rank 2 takes no part."""
    group = me.group(0, 1)
    with cache_of(Path(folder)):
        return [] if group is None else warm_up(group)


def warm_up(group: dist.ProcessGroup) -> list[object]:
    x, w = torch.ones(8, 32), torch.ones(24, 32)
    tw.matmul_all_reduce(x, w, group=group)
    workspace = REGISTRY.find(name_of(group), x.device)
    on_cpu: Any = {"tune": True, "dtype": torch.float32, "device": "cpu", "group": group}
    plans = tw.warmup("matmul_all_reduce", [8, 20], 24, 32, **on_cpu)
    assert isinstance(plans, dict)
    found: list[object] = [[plan.summary.endswith(": measured") for plan in plans.values()]]
    found.append(REGISTRY.find(name_of(group), x.device) is workspace)
    y = tw.matmul_all_reduce(x, w, group=group)
    assert torch.equal(y, torch.full((8, 24), 64.0))
    with mock.patch.object(choices, "install", side_effect=AssertionError("tuned twice")):
        tw.warmup("matmul_all_reduce", 8, 24, 32, **on_cpu)
    found.append([one.problem.rows for one in cache.read(cache.files()[0])[1]])
    tw.warmup("all_gather_matmul", 4, 8, 16, backward=True, **on_cpu)
    found.append(sorted({one.op for one in cache.read(cache.files()[0])[1]}))
    fp8 = on_cpu | {"dtype": torch.float16, "scaling": "row"}
    plan: Any = tw.warmup("all_gather_matmul", 4, 16, 32, **fp8)
    found.append(plan.summary.endswith(": measured"))
    found.append([one.problem.scales for one in cache.read(cache.files()[0])[1]].count("row"))
    return [*found, refusal(tw.warmup, "embedding_bag_all_to_all", tune=True).partition(";")[0]]


def test_warmup_tunes_when_asked(worlds: Worlds, own_cache: Path) -> None:
    *members, outside = worlds("gloo", 3).run(warmed_up, str(own_cache), timeout=110)
    for found in members:
        assert found[:3] == [[True, True], True, [8, 20]]
        assert found[3] == ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
        assert found[4:6] == [True, 1]
        assert found[6] == "InputError: asked: warmup('embedding_bag_all_to_all', tune=True)"
    assert outside == []


def test_problems_of_fp8_have_their_scales() -> None:
    for op, scales in product(TUNABLE[:3], SCALES):
        problem = problem_of_call(op, 12, 16, 32, 2, torch.float16, Exchange(0, 1), scales)
        assert (problem.dtype, problem.itemsize, problem.scales) == ("float8_e4m3fn", 1, scales)
        case = case_of(op, problem, "float16")
        assert case.dtype == "float16" and problem_of(case, 2) == problem
        assert scales == case.kind + ("+fast" if case.keeps_sums else "")


@pytest.mark.parametrize("op", TUNABLE)
def test_problem_of_a_call_is_the_one_that_is_planned(op: str) -> None:
    """Sizes of x and w of a rank, for a shard of 6 rows, 10 columns and K = 14 of two ranks."""
    rows, cols, depth = 6, 10, 14
    how = Exchange(1, 0) if op == "matmul_all_to_all" else Exchange(0, 1)
    call = {
        "matmul_reduce_scatter": (2 * rows, cols, depth),
        "matmul_all_to_all": (rows, 2 * cols, depth),
        "all_to_all_matmul": (2 * rows, cols, depth),
    }.get(op, (rows, cols, depth))
    problem = problem_of_call(op, *call, 2, torch.float16, how)
    assert problem == Problem(2, rows, cols, depth, 2, "float16")
    assert problem_of(case_of(op, problem), 2) == problem
    draw = Draw(torch.float32, torch.device("cpu"), 0, 2, 1)
    operands = samples_of(op).subject.draw(Shape(rows, cols, depth), draw)
    assert (operands.x.shape[0], operands.w.shape[0], operands.x.shape[1]) == call
