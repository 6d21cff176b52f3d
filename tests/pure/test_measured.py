"""docs/measured.md says what the results say: it is what the module that writes it makes of them now."""

from __future__ import annotations

from pathlib import Path

from tileweave.bench.measured import markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_results_say() -> None:
    assert (DOCS / "measured.md").read_text("utf-8") == markdown(DOCS / "results")


def test_a_losing_case_is_bold() -> None:
    page = markdown(DOCS / "results")
    row = next(line for line in page.splitlines() if line.startswith("| gpt3-fc2-m1024 |"))
    assert "**0.93**" in row
