"""Links in the documents have targets, and decisions that the sources name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = sorted(
    page for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name != "README.md"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
DECISION = re.compile(r"\bdecisions?\s+(?:#\s*)?(\d{4})(?:(?:,| and|, and)\s+(\d{4}))?")


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken(document: Path) -> list[str]:
    found = []
    for link in LINK.findall(document.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (document.parent / path) if path else document
        wrong_anchor = (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))
        )
        if not target.exists() or wrong_anchor:
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, here\n[1](page.md#a-title-here) [2](#a-title) [3](other.md) [4](https://example.org)\n",
        "utf-8",
    )
    assert broken(page) == ["#a-title", "other.md"]


def test_decisions_are_few_and_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")
    assert 30 <= len(PAGES) <= 45
    assert [page.name[:4] for page in PAGES] == [f"{number + 1:04}" for number in range(len(PAGES))]
    for page in PAGES:
        title = page.read_text("utf-8").splitlines()[0]
        assert (
            f"[{page.name[:4]}]({page.name}) | {title.removeprefix(f'# {page.name[:4]} ')} |"
            in index
        )


def test_decisions_have_four_parts() -> None:
    for page in PAGES:
        parts = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences", "What was refused"], page.name


def test_named_decisions_exist() -> None:
    numbers = {page.name[:4] for page in PAGES}
    sources = [
        path
        for folder in ("src", "tests", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    texts = {path: path.read_text("utf-8") for path in [*sources, *DOCUMENTS]}
    named = [
        (path, number)
        for path, text in texts.items()
        for found in DECISION.findall(text)
        for number in found
        if number
    ]
    assert len(named) >= 30
    assert [f"{path}: {number}" for path, number in named if number not in numbers] == []
