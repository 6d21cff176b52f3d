"""What is no file, cannot be read, is no text or no JSON, or cannot be written: an error that names
it, at once, from everything that reads a file of the user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.calls import refusal

from tileweave.bench import components, measured_page
from tileweave.files import is_there, parse_json, read_text, short, write_text
from tileweave.planning import cache
from tileweave.planning.costs import load_calibration
from tileweave.sim import foresee, packaged
from tileweave.sim.cells import read_cells
from tileweave.sim.document import open_document
from tileweave.sim.machine import make_cluster
from tileweave.sim.replay import read_groups, replay
from tileweave.sim.results import read_report, why_not
from tileweave.tune.shapes import from_file

RESULTS = Path(__file__).parents[2] / "docs" / "results"
REPORT = RESULTS / "all_gather_matmul-4xH200-2026-11-26.json"


def in_three_parts(text: str) -> bool:
    at = [text.find(part) for part in ("asked: ", "; allowed: ", "; remedy: ")]
    return -1 < at[0] < at[1] < at[2] and len(text) < 1000


def folder(at: Path) -> Path:
    at.mkdir()
    return at


def loop(at: Path) -> Path:
    at.symlink_to(at)
    return at


def dangling(at: Path) -> Path:
    at.symlink_to(at.with_name("nothing"))
    return at


def pipe(at: Path) -> Path:
    os.mkfifo(at)
    return at


def large(at: Path) -> Path:
    with at.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    return at


def bytes_of(data: bytes) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        at.write_bytes(data)
        return at

    return make


BAD: dict[str, Callable[[Path], Path]] = {
    "a folder": folder,
    "a loop of links": loop,
    "a link to nothing": dangling,
    "a pipe": pipe,
    "a device": lambda _: Path("/dev/zero"),
    "below a file": lambda at: Path(__file__) / at.name,
    "a long name": lambda at: at.with_name("x" * 300 + at.suffix),
    "a NUL": lambda at: at.with_name(f"a\0b{at.suffix}"),
    "large": large,
    "UTF-16": bytes_of("[]".encode("utf-16")),
    "half a character": bytes_of(b'{"a": "\xc3'),
}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "text": ("x.txt", lambda path: read_text(path, "text", "some", "pass another")),
    "calibration": ("x.json", lambda path: load_calibration(str(path))),
    "cells": ("x.json", lambda path: read_cells([path])),
    "report": ("x.json", read_report),
    "cache": ("x.json", cache.read),
    "shapes": ("x.txt", lambda path: from_file("all_gather_matmul", path, "bfloat16")),
    "document": ("x.yaml", open_document),
    "groups": ("comm_group.json", lambda path: read_groups(path.parent / "step.0.et")),
    "trace": (
        "step.0.et",
        lambda path: replay([path], make_cluster("h200"), load_calibration().coefficients),
    ),
}
ELSEWHERE = ("a device", "below a file", "a long name", "a NUL")  # not the name that is read
# traces may be of any size; groups are read from one name only
PAIRS = [
    (bad, reader)
    for bad in BAD
    for reader in READERS
    if (reader, bad) != ("trace", "large") and not (reader == "groups" and bad in ELSEWHERE)
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(("bad", "reader"), PAIRS)
def test_what_cannot_be_read_is_named(bad: str, reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    said = refusal(read, BAD[bad](tmp_path / name))
    assert said.startswith("InputError") and in_three_parts(said), said


def test_what_is_not_there_is_told_from_what_cannot_be_known(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "none") and is_there(tmp_path)
    assert is_there(loop(tmp_path / "a")) and is_there(tmp_path / ("x" * 300))


TEXTS = {
    "": "",
    "a name twice": '{"a": 1, "b": {"c": 1, "c": 2}}',
    "deep": "[" * 100_000,
    "many digits": "9" * 5000,
    "half a character": '{"a": "\\ud800"}',
    "more than one": "{} {}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_not_json_is_named(name: str) -> None:
    said = refusal(parse_json, TEXTS[name], "results in x", "JSON", "mend it")
    assert "asked: results in x, which is not JSON: " in said and in_three_parts(said), said
    if name == "a name twice":
        assert "'c' is there twice" in said


def test_both_halves_of_a_character_are_text() -> None:
    assert parse_json('["\\ud83d\\ude00"]', "x", "JSON", "mend it") == ["\U0001f600"]


@pytest.mark.parametrize("name", ["folder", "no/folder/x", "a\0b", "x" * 300, "/dev/full"])
def test_what_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    said = refusal(write_text, tmp_path / name, "text")
    assert "asked: to write " in said and in_three_parts(said), said


def test_long_values_are_shortened() -> None:
    assert short("x" * 200) == "x" * 200
    assert short("a" * 500 + "b" * 500) == f"{'a' * 100}... (1000 characters) ...{'b' * 50}"


# --- Results of benches ---

CHANGES: dict[str, Any] = {
    "op": [],
    "world_size": True,
    "environment": "x",
    "environment.date": 3,
    "cases": {},
    "cases.0": None,
    "cases.0.name": 5,
    "cases.0.block": [],
    "cases.0.right": "no",
    "cases.0.graph": 1,
    "cases.0.rows": -8,
    "cases.0.dtype": "int3",
    "cases.0.over_best": float("nan"),
    "cases.0.times": [],
    "cases.0.times.tileweave": 3,
    "cases.0.times.tileweave.median_us": -1.0,
    "cases.0.times.tileweave.repeats_us": ["x"],
}


@pytest.mark.parametrize("place", CHANGES)
def test_results_with_other_values_are_refused_by_all_readers(place: str, tmp_path: Path) -> None:
    report = json.loads(REPORT.read_text("utf-8"))
    assert why_not(report) == ""
    at: Any = report
    *way, last = place.split(".")
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    at[int(last) if isinstance(at, list) else last] = CHANGES[place]
    path = tmp_path / REPORT.name
    path.write_text(json.dumps(report), "utf-8")
    for read in (
        read_report,
        lambda path: read_cells([path]),
        lambda path: measured_page.markdown(path.parent),
        lambda path: measured_page.summary(path.parent, path.name),
    ):
        said = refusal(read, path)
        assert f"with {place} = " in said and in_three_parts(said), said


@pytest.mark.parametrize("missing", ["environment", "cases.0.block", "cases.0.times"])
def test_the_page_names_what_results_lack(missing: str, tmp_path: Path) -> None:
    report = json.loads(REPORT.read_text("utf-8"))
    del (report["cases"][0] if "cases" in missing else report)[missing.rpartition(".")[2]]
    (tmp_path / REPORT.name).write_text(json.dumps(report), "utf-8")
    said = refusal(measured_page.markdown, tmp_path)
    assert f"without {missing.rpartition('.')[2]}" in said and in_three_parts(said), said


@pytest.mark.parametrize("pattern", ["/x", "", "***x", "none*", "x" * 300])
def test_patterns_that_find_nothing_are_named(pattern: str) -> None:
    said = refusal(measured_page.summary, RESULTS, pattern)
    assert "asked: reports " in said and in_three_parts(said), said


# --- Modules that are commands ---

ONE = str(RESULTS / "matmul_all_to_all-4xH200-2026-11-27.json")
COMMANDS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no results": (foresee.main, ("8", "out.md", "none.json")),
    "ranks": (foresee.main, ("99", "out.md", ONE)),
    "out": (foresee.main, ("8", "no/folder/out.md", ONE)),
    "cells": (packaged.main, ("h200", "none.json")),
    "repeats": (components.main, ("--json", "x.json", "--repeats", "0")),
    "seconds": (components.main, ("--json", "x.json", "--seconds", "nan")),
    "json": (components.main, ("--json", "/dev/null/x.json")),
    "page": (measured_page.main, ("none",)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_modules_name_what_they_refuse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["command", *words])
    said = refusal(main)
    assert said.startswith("InputError") and in_three_parts(said), said
    assert list(tmp_path.iterdir()) == []
