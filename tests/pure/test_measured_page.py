"""docs/measured.md is what the module that writes it makes of the results now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tileweave.bench.measured_page import HEAD, MACHINE, _ratio, markdown, summary
from tileweave.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "machine"), [("measured.md", MACHINE), ("measured-2xH100.md", "2xH100")]
)
def test_page_matches_the_results(name: str, machine: str) -> None:
    assert (DOCS / name).read_text("utf-8") == markdown(DOCS / "results", machine)


def test_a_losing_case_is_bold() -> None:
    page = markdown(DOCS / "results", "2xH100").split("## grouped_matmul_combine")[1]
    row = next(line for line in page.splitlines() if line.startswith("| deepseek-v3-t1024 |"))
    assert "**0.98**" in row


def test_page_explains_bold() -> None:
    assert "Bold:\nslower than a rival by half a percent or more." in HEAD
    results = " ".join((DOCS / "results.md").read_text("utf-8").split())
    assert "in bold what loses half a percent or more: [measured](measured.md)" in results
    assert [_ratio("over_torch", ratio) for ratio in (0.99, 0.9949, 0.9951)] == [
        "**0.99**",
        "**0.99**",
        "1.00",
    ]


def test_summaries_match_the_results() -> None:
    page = (DOCS / "performance.md").read_text("utf-8")
    tables = re.findall(
        r"^<!-- summary of (\S+) -->\n(.*?)^<!-- end -->$", page, re.MULTILINE | re.DOTALL
    )
    assert tables
    for pattern, table in tables:
        assert table == summary(DOCS / "results", pattern)


def test_a_summary_shows_losses_and_wrong_results(tmp_path: Path) -> None:
    case = {"block": "large", "right": True, "over_best": 0.9, "over_unfused": None}
    slow = case | {"name": "slow"}
    fast = case | {"name": "fast", "over_best": 1.6}
    wrong = case | {"name": "wrong", "block": "small", "right": False}
    later = {"date": "2026-11-27T01:00:00"}
    earlier = {"date": "2026-11-26T01:00:00"}
    report = {"op": "all_gather_matmul", "cases": [slow, wrong], "environment": later}
    (tmp_path / "one.json").write_text(json.dumps(report), "utf-8")
    # the earlier run of a case does not count, however fast it was
    report = report | {"cases": [slow | {"over_best": 2.0}, fast], "environment": earlier}
    (tmp_path / "another.json").write_text(json.dumps(report), "utf-8")
    large, small = summary(tmp_path, "*.json").splitlines()[2:]
    assert large == "| `all_gather_matmul`, large, eager | 2 |  | 1.20 (**0.90**) |  |"
    assert "**WRONG** | 1 |" in small
    with pytest.raises(InputError):
        summary(tmp_path, "two*.json")


def test_the_last_figures_of_a_case_count(tmp_path: Path) -> None:
    """Whatever order a file system lists reports in, and also in folders with the same names."""

    def write(name: str, *ratios: float) -> None:
        cases = [
            {"block": "large", "name": "one", "right": True, "over_best": ratio} for ratio in ratios
        ]
        place = {"date": "2026-11-27T01:00:00+00:00"}
        report = {"op": "all_gather_matmul", "cases": cases, "environment": place}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(report), "utf-8")

    def shown() -> str:
        return summary(tmp_path, "*.json").splitlines()[2]

    write("run-b.json", 1.5, 1.25)
    write("run.json", 2.0)
    write("another.json", 3.0)
    assert "| 1 |  | 1.25 (1.25) |" in shown()
    write("later/run.json", 1.75)
    write("run-b.json", 1.5)
    assert "| 1 |  | 1.50 (1.50) |" in shown()
    (tmp_path / "run.json").unlink()
    (tmp_path / "run-b.json").unlink()
    (tmp_path / "another.json").unlink()
    assert "| 1 |  | 1.75 (1.75) |" in shown()
    write("run.json")
    assert "| 1 |  | 1.75 (1.75) |" in shown(), "another folder's report has this name"
