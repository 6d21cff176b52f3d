"""Mutants made from the syntax tree: they are what they say, and exploration finds them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tileweave.errors import InputError
from tileweave.explore import mutants as trees
from tileweave.explore.mutate import HARMLESS, all_mutants, explained, explanations, mutate

# All mutants of this function are found or explained
MEETING = "device/triton/meet.py:come:"


def test_each_kind_has_mutants_and_keys_are_unique() -> None:
    made = all_mutants()
    assert len(made) >= 1500 and {mutant.kind for mutant in made} == set(trees.KINDS)
    assert len({mutant.key for mutant in made}) == len(made)


def test_a_mutant_changes_its_function_and_nothing_else() -> None:
    file = "device/triton/meet.py"
    functions = {place: ast.unparse(node) for place, node in trees.functions(file)}
    for mutant in trees.mutants(file):
        before, after = functions[mutant.place], ast.unparse(trees.mutated(mutant))
        assert before != after
        assert ast.unparse(ast.parse(after).body[0]) == after


def test_keys_do_not_depend_on_lines() -> None:
    assert not any(
        re.search(rf"\b{m.line}\b", m.key.split(": ")[0]) for m in all_mutants("meet.py")
    )


def test_explanations_fit_mutants() -> None:
    keys = [mutant.key for mutant in all_mutants()]
    known = explanations()
    for pattern, why in known:
        assert any(pattern.fullmatch(key) for key in keys), f"{HARMLESS.name}: {pattern.pattern}"
        assert len(why) > 20
    assert explained("no such file", known) == ""


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text(f"{all_mutants(MEETING)[0].key}\nno such mutant\n", "utf-8")
    with pytest.raises(InputError, match="no such mutant"):
        mutate(names=names, show=False)
    with pytest.raises(InputError, match="no such file"):
        mutate(pattern="no such file", show=False)


OTHERS = [{}, {"line": "3"}, {"tried": 1.5}, {"outcome": "lost"}, {"how": None}, {"more": 1}]
JUDGED = {"key": "a", "kind": "wait", "line": 3, "outcome": "found", "how": "", "tried": 3}


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff", b"[" * 5000, *(json.dumps(JUDGED | one).encode() for one in OTHERS)],
)
def test_files_of_others_are_refused(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    with pytest.raises(InputError, match=r"asked: --log .*; allowed: .*; remedy: "):
        mutate(pattern=MEETING, log=log, show=False)
    log.write_bytes(b"\xff")
    for names in (tmp_path, log):
        with pytest.raises(InputError, match=r"asked: --names .*; allowed: .*; remedy: "):
            mutate(names=names, show=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutants_of_a_meeting_are_found() -> None:
    report = mutate(pattern=MEETING, show=False)
    assert len(report.judged) == report.mutants > 5
    assert report.count("found") >= 5 and report.count("explained") <= 2
    assert report.share == 1.0, [one for one in report.judged if one.outcome == "survived"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_few_mutants_are_judged_by_runs_with_absent_ranks() -> None:
    """Pulls wait for flags anyway: only an absent rank shows that this wait is missing."""
    wait = "wait(peers, source * MAX_SLICES + chunk, epoch)"
    report = mutate(pattern=f"device/triton/pull.py:end_of_pulls: {wait} -> pass", show=False)
    assert [one.outcome for one in report.judged] == ["found"], report.judged
    assert "without" in report.judged[0].how
