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
    clean, wrong = (sanitize.read("memcheck", "tests/gpu", text) for text in (CLEAN, WRONG))
    assert (clean.wrong(set()), clean.summaries, clean.tests) == (0, 1, "4 passed in 12.30s")
    assert (wrong.wrong(set()), wrong.summaries) == (5, 2)
    assert sanitize.read("memcheck", "tests/gpu", "killed").summaries == 0


def test_races_count_outside_of_gluon_kernels(sanitize) -> None:
    found = sanitize.read("racecheck", "tests/gpu", RACE)
    assert found.hazards == {"a_kernel": 1} and found.summaries == 1
    assert found.wrong(set()) == 1 and found.wrong({"a_kernel"}) == 0


def test_kernels_are_known(sanitize) -> None:
    known = sanitize.kernels()
    assert known["grouped_matmul_combine_kernel"] == "triton"
    assert len(known) > 25 and set(known.values()) == {"triton", "gluon"}
