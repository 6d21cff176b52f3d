"""docs/measured.md is what the module that writes it makes of the results now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileweave.bench.measured_page import HEAD, MACHINE, _ratio, markdown

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "machine"), [("measured.md", MACHINE), ("measured-2xH100.md", "2xH100")]
)
def test_page_matches_the_results(name: str, machine: str) -> None:
    assert (DOCS / name).read_text("utf-8") == markdown(DOCS / "results", machine)


def test_a_losing_case_is_bold() -> None:
    page = markdown(DOCS / "results")
    row = next(line for line in page.splitlines() if line.startswith("| gpt3-fc2-m1024 |"))
    assert "**0.93**" in row


def test_page_explains_bold() -> None:
    assert "Bold:\nslower than a rival by half a percent or more." in HEAD
    results = " ".join((DOCS / "results.md").read_text("utf-8").split())
    assert "in bold what loses half a percent or more: [measured](measured.md)" in results
    assert [_ratio("over_torch", ratio) for ratio in (0.99, 0.9949, 0.9951)] == [
        "**0.99**",
        "**0.99**",
        "1.00",
    ]
