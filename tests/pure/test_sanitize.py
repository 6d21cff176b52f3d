"""``tools/sanitize.py``: what it reads in the output of compute-sanitizer, and which kernels it
knows."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "sanitize.py"
CLEAN = "....\n4 passed in 12.30s\n========= ERROR SUMMARY: 0 errors\n"
WRONG = CLEAN.replace("0 errors", "3 errors") + "========= ERROR SUMMARY: 2 errors\n"
RACE = """....
3 passed, 1 skipped in 9.00s
========= Error: Race reported between Write access at a_kernel+0x10 and Read access at a_kernel
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture(scope="module")
def sanitize():
    spec = spec_from_file_location("sanitize", TOOL)
    assert spec is not None and spec.loader is not None
    module = sys.modules["sanitize"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_are_counted(sanitize) -> None:
    run = sanitize.Run("memcheck", "tests/gpu", "test_a.py")
    clean, wrong = (sanitize.read(run, text) for text in (CLEAN, WRONG))
    assert (clean.wrong(set()), clean.summaries, clean.tests) == (0, 1, "4 passed in 12.30s")
    assert clean.ended
    assert (wrong.wrong(set()), wrong.summaries) == (5, 2)
    assert sanitize.read(run, f"== {CLEAN}").tests == "4 passed in 12.30s"
    assert not sanitize.read(run, "killed").ended
    assert not sanitize.read(run, "4 passed in 12.30s").ended  # the tool looked at nothing


def test_races_count_in_triton_kernels_of_the_package(sanitize) -> None:
    found = sanitize.read(sanitize.Run("racecheck", "tests/gpu", "test_a.py"), RACE)
    assert found.hazards == {"a_kernel": 1} and found.ended
    assert found.wrong({"a_kernel"}) == 1 and found.wrong({"another_kernel"}) == 0


def test_every_test_file_is_a_run_of_each_tool(sanitize) -> None:
    todo = sanitize.runs(list(sanitize.TOOLS), list(sanitize.SUITES))
    files = {f"{run.suite}/{run.file}" for run in todo}
    there = {str(path.relative_to(sanitize.ROOT)) for path in sanitize.ROOT.glob("tests/multi/t*")}
    assert there < files and len(todo) == len(sanitize.TOOLS) * len(files)


def test_kernels_are_known(sanitize) -> None:
    known = sanitize.kernels()
    assert known["grouped_matmul_combine_kernel"] == "triton"
    assert len(known) > 25 and set(known.values()) == {"triton", "gluon"}
