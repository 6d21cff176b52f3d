"""``tileweave report``: the page has what it promises, loads nothing, and opens in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from tileweave import OPERATORS
from tileweave.bench.rivals import CORUN, GEMM, OURS, UNFUSED
from tileweave.commands.app import app
from tileweave.commands.doctor import Diagnosis, Fact
from tileweave.commands.report import is_report
from tileweave.commands.report_page import Contents, page
from tileweave.errors import InputError
from tileweave.profile.trace import Event, in_words, merge

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EMPTY = ("area", "br", "col", "hr", "img", "input", "link", "meta")


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]


def loads_nothing(text: str) -> None:
    """No script, and no address but those in the page."""
    read = Reader(text)
    tags = {tag for tag, _, _ in read.attributes}
    assert not tags & {"script", "link", "iframe", "object", "embed"} and "<script" not in text
    assert "default-src 'none'" in text
    for address in (*read.all("href"), *read.all("src")):
        assert address.startswith(("#", "data:"))
    assert "@import" not in text and not re.findall(r"url\((?!#)", text)
    names = read.all("id")
    assert len(names) == len(set(names))
    assert {link[1:] for link in read.all("href") if link.startswith("#")} <= set(names)


def event(rank: int, kind: Any, peer: int, begin: int, end: int, program: int = 0) -> Event:
    return Event(rank, program, kind, peer, begin, end)


TRACE = merge(
    "all_gather_matmul <of> two ranks",
    [
        [
            event(0, "compute", 0, 0, 400),
            event(0, "wait", 1, 400, 900),
            event(0, "compute", 1, 900, 1000),
        ],
        [event(1, "push", 0, 0, 300), event(1, "compute", 1, 300, 700)],
    ],
    True,
)


def contents(**changed: Any) -> Contents:
    found = Diagnosis(
        software=[Fact("torch", "2.11 & <more>", True)],
        devices=[Fact("GPU 0", "none", None)],
        peer_access=[[True, False], [False, True]],
        verdicts=[Fact("compiled kernels", "no: <one> GPU", False)],
    )
    parts: dict[str, Any] = dict(
        found=found,
        paths=[("all_gather_matmul 1, 2, 3", "unfused: too few <rows>")],
        reports=[],
        traces=[],
        date="2026",
    )
    return Contents(**(parts | changed))


def a_report(**changed: Any) -> dict[str, Any]:
    times = {OURS: 100.0, UNFUSED: 130.0, GEMM: 60.0, CORUN: 80.0}
    case = {
        "name": "a<b>",
        "block": "large",
        "right": True,
        "plan": "fused",
        "times": {name: {"median_us": value} for name, value in times.items()},
    }
    report = {"op": "all_gather_matmul", "world_size": 2, "environment": {"device": "H100 <x>"}}
    return {**report, "device_type": "cuda", "cases": [case | changed]}


def test_page_shows_everything_and_loads_nothing() -> None:
    text = page(contents(reports=[a_report()], traces=[TRACE]))
    loads_nothing(text)
    said = " ".join(Reader(text).text)
    for part in ("2.11 & <more>", "no: <one> GPU", "too few <rows>", "a<b>", "H100 <x>", "<of>"):
        assert part in said
    assert "1.30" in said and "0.80" in said  # the rival over ours, the bound over ours
    assert 'style="width:80%"' in text
    assert "0.60" not in said  # the matmul alone is no rival


def test_a_lost_case_is_marked() -> None:
    slow = {OURS: {"median_us": 100.0}, UNFUSED: {"median_us": 90.0}}
    text = page(contents(reports=[a_report(times=slow)]))
    assert '<span class="lost">0.90</span>' in text
    assert 'lost">' not in page(contents(reports=[a_report()])).partition("large, eager")[2]
    assert "WRONG" in page(contents(reports=[a_report(right=False)]))


def test_without_gpus_the_page_says_so() -> None:
    text = page(contents())
    loads_nothing(text)
    assert "Nothing was timed" in text and "No call was recorded" in text
    smoke = page(contents(reports=[a_report() | {"device_type": "cpu"}]))
    assert "times mean nothing" in smoke


def test_times_that_are_missing_are_blank() -> None:
    times = {OURS: {"median_us": 100.0}, UNFUSED: {"median_us": None}}
    text = page(contents(reports=[a_report(times=times), a_report(times={OURS: {"median_us": 0}})]))
    assert "nan" not in text and "inf" not in text


def test_trace_in_words() -> None:
    exposed, longest, tail = in_words(TRACE)
    assert "rank 0 waited 0.5 us on average, 50.0% of the call" in exposed
    assert "program 0 of rank 0, 0.5 us, for rank 1, from 0.4 us on" in longest
    assert "rank 0 ended last, 0.3 us after" in tail
    hidden = merge("", [[event(0, "compute", 0, 0, 100)], [event(1, "compute", 1, 20, 220)]], False)
    assert in_words(hidden) == [
        "No program waited for a peer.",
        "Rank 1 took longest, 0.2 us; the shortest took 0.1 us.",
    ]
    assert in_words(merge("", [[], []], True)) == ["Nothing was recorded."]


def test_times_have_no_exponent() -> None:
    slow = merge("slow", [[event(0, "wait", 1, 0, 1_500_000_000)], []], True)
    assert "1500 ms" in " ".join(in_words(slow)) and "1500 ms" in page(contents(traces=[slow]))
    assert "e+" not in " ".join(in_words(slow))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        '{"op": "nothing", "cases": []}',
        '{"op": "all_gather_matmul"}',
        '{"op": "all_gather_matmul", "cases": [{"name": "x"}]}',
        '{"op": "all_gather_matmul", "cases": [{"name": "x", "times": {"tileweave": 3}}]}',
        '{"op": ["all_gather_matmul"], "cases": []}',
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text, "utf-8")
    for given in (tmp_path / "bad.json", tmp_path, tmp_path / "none.json"):
        out = str(tmp_path / "report.html")
        done = CliRunner().invoke(app, ["report", "--out", out, "--results", str(given)])
        assert isinstance(done.exception, InputError) and "tileweave bench" in str(done.exception)
        assert not (tmp_path / "report.html").exists()


def test_all_our_results_can_be_shown() -> None:
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.rglob("*.json"))]
    shown = [read for read in reports if is_report(read)]
    assert {read["op"] for read in shown} == set(OPERATORS)
    loads_nothing(page(contents(reports=shown)))


@pytest.mark.slow
def test_report_of_this_machine(tmp_path: Path) -> None:
    """As a user calls it, with interpreted traces; opened in a browser where there is one."""
    out = tmp_path / "report.html"
    results = str(RESULTS / "h100" / "all_gather_matmul-2xH100-2026-11-25.json")
    words = ["report", "--out", str(out), "--results", results, "--world", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and out.name in done.output
    text = out.read_text("utf-8")
    loads_nothing(text)
    assert "Exposed communication" in text and "llama70b-qkv-m2048" in text
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    shown = subprocess.run(
        [browser, *options, "--dump-dom", out.as_uri()], capture_output=True, text=True, timeout=60
    ).stdout
    assert shown.count("<svg") == text.count("<svg") > 3
    assert shown.count("<tr>") == text.count("<tr>")
