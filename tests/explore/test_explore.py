"""Interleavings of the real kernels: no violation is found, and every planted fault is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from tests.explore.find_mutants import MUTANTS
from tests.explore.numpy_blocks_agree import (
    found_in_each_operator,
    found_while_clocks_leap,
    report_of_irreproducible_failure,
    triton_and_blocks_agree,
)
from tests.explore.partitions import found_in_partitions
from tests.explore.pushers import programs_that_push

from tileweave import OPERATORS
from tileweave.errors import InputError
from tileweave.explore.absent import FORGOTTEN, found_in_cases
from tileweave.explore.fuzz import COSTS, STRATEGIES, _replay, _scenarios, fuzz, pool, replay

pytestmark = pytest.mark.timeout(400)  # many take a minute of CPU, on cores that others use, too
ROOT = Path(__file__).parents[2]
# `make fuzz` explores twenty times as many
INTERLEAVINGS, DIFFERENT = 5000, 4700
SEEDS = 5020  # rounding changes the number by a few
WORKERS = max(min(os.cpu_count() or 1, 4), 2)


@pytest.fixture(scope="module")
def worker() -> Iterator[Executor]:
    """One process for all tests that need a worker of exploration: starting one takes seconds."""
    with pool(1) as processes:
        yield processes


@pytest.fixture(scope="module")
def fuzzers() -> Iterator[None]:
    """Processes for all that ``fuzz`` and ``replay`` do here."""
    where = import_module("tileweave.explore.fuzz")
    with (
        pool(WORKERS) as processes,
        mock.patch.object(where, "pool", return_value=nullcontext(processes)),
    ):
        yield


@pytest.fixture(scope="module")
def absence() -> Iterator[Executor]:
    """A process for cases with absent ranks, which replace functions of kernels."""
    with pool(1) as processes:
        yield processes


def test_there_are_enough_mutants() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


@pytest.mark.parametrize("name", ["docs/testing.md", "docs/reliability.md", "CHANGELOG.md"])
def test_documents_state_the_number_of_mutants(name: str) -> None:
    said = re.findall(r"(\d+) planted faults", (ROOT / name).read_text("utf-8"))
    assert said == [str(len(MUTANTS))]


def test_costs_are_those_of_scenarios(worker: Executor) -> None:
    assert set(COSTS) <= set(worker.submit(_scenarios, "").result())


def test_each_operator_once(worker: Executor) -> None:
    """For the edit loop; ``test_interleavings`` covers all of this, too."""
    operators, found = worker.submit(found_in_each_operator).result()
    assert set(OPERATORS) <= set(operators) and found == []


def test_triton_and_blocks_agree(worker: Executor) -> None:
    assert worker.submit(triton_and_blocks_agree).result() == []


def test_programs_of_some_multiprocessors_push(worker: Executor) -> None:
    """Of every two multiprocessors one, and the lowest program of each rank."""
    might, did = worker.submit(programs_that_push).result()
    assert {p for _, _, p in might} == {0, 1}
    assert did == {(m, r, p) for m, r, p in might if p == 0 or (p + r) % m % 2 == 0}
    assert did < might


def test_schedules_do_not_depend_on_time(worker: Executor) -> None:
    assert worker.submit(found_while_clocks_leap).result() == []


def test_irreproducible_failure_is_reported(worker: Executor) -> None:
    told = worker.submit(report_of_irreproducible_failure).result()
    assert told.startswith("error: once\nreplay: ") and "did not fail again" in told


def test_concurrent_partitions() -> None:
    with pool(1) as processes:
        assert processes.submit(found_in_partitions, 3).result() == []


@pytest.mark.parametrize("how", ["named", "everywhere", "moments"])
def test_absent_ranks_are_named_and_every_call_ends(how: str, absence: Executor) -> None:
    assert absence.submit(found_in_cases, how).result() == []


@pytest.mark.parametrize("fault", FORGOTTEN)
def test_faults_that_concern_paused_ranks_are_found(fault: str, absence: Executor) -> None:
    assert absence.submit(found_in_cases, FORGOTTEN[fault][0], fault).result()


@pytest.mark.parametrize("how", ["paused", "reading"])
def test_paused_rank_is_not_overwritten(how: str, absence: Executor) -> None:
    """After those with faults in the same process, of which nothing is left."""
    assert absence.submit(found_in_cases, how).result() == []


def test_processes_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # another pool of this file is open
    with pool(1) as processes:
        assert processes.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.usefixtures("fuzzers")
def test_replay(worker: Executor) -> None:
    assert replay("all_gather_matmul/sm@2:walk:1") == ""
    with pytest.raises(InputError, match="asked: seed"):
        worker.submit(_replay, "all_gather_matmul/sm@2:walk").result()
    for wrong in (
        "no such scenario@2:walk:1",
        "all_gather_matmul/sm@2:luck:1",
        "all_gather_matmul/sm@1:walk:1",
        "all_gather_matmul/sm@two:walk:1",
        "all_gather_matmul/sm@2:walk:-1",
    ):
        with pytest.raises(InputError, match="asked: seed") as caught:
            worker.submit(_replay, wrong).result()
        assert str(caught.value).count("asked: ") == 1, "one error, not one inside another"


@pytest.mark.usefixtures("fuzzers")
def test_progress_ends_at_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    report = fuzz(20, "all_gather_matmul/sm, spans", workers=1)
    told = [
        tuple(map(int, found)) for found in re.findall(r"s +(\d+)/(\d+) ", capsys.readouterr().out)
    ]
    assert report.interleavings >= 8, "each strategy has one, of each of two scenarios"
    assert told == [(number, told[-1][1]) for number in range(1, told[-1][1] + 1)]


@pytest.mark.usefixtures("fuzzers")
def test_unknown_scenarios_are_refused() -> None:
    with pytest.raises(InputError, match="all_gather_matmul/sm"):
        fuzz(100, "no such operator", workers=1, show=False)


# --- With as many processes as cores ---


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fuzzers")
def test_interleavings() -> None:
    report = fuzz(SEEDS, workers=WORKERS, show=False)
    assert not report.story, report.story
    assert report.interleavings >= INTERLEAVINGS and report.distinct >= DIFFERENT, (
        f"{report.interleavings} seeds gave {report.distinct} different schedules"
    )
    assert {strategy for _, _, strategy in report.runs} == set(STRATEGIES)
    assert {world for _, world, _ in report.runs} == {2, 3, 4}
    over_nodes = sum(n for (name, _, _), n in report.runs.items() if "over nodes" in name)
    assert over_nodes > INTERLEAVINGS // 6
    assert min(report.payloads[kind] for kind in ("half", "special")) > INTERLEAVINGS // 10
    assert min(report.multiprocessors[count] for count in (1, 2, 3)) > INTERLEAVINGS // 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_mutant_is_found() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.explore.find_mutants"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {line["mutant"]: line for line in lines if "mutant" in line}
    assert set(results) == {mutant.name for mutant in MUTANTS}, done.stderr[-3000:]
    survivors = [result for result in results.values() if not result["found"]]
    assert not survivors, survivors
