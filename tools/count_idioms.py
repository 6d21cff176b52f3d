"""Count private idioms in README, documents and public docstrings, per thousand words.

    python tools/count_idioms.py        # a line per page
    python tools/count_idioms.py --show # every place, too

The words are those of the glossary's last section. A test keeps the rate below two.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 2.0  # idioms per thousand words

# For "per": "12 bytes a row", "two tickets a call", "20 us a tile"
_COUNTED = (
    r"\d|us|ms|MB|GB|[KMG]iB|bytes|bits|microseconds|milliseconds|seconds|rows|columns|tiles|tokens|"
    r"tickets|experts|tables|programs|ranks|GPUs|calls|copies|launches|loads|stores|signals|slots|"
    r"words|times|weights|samples|indices|layers|steps|cases|lines|files|once|twice"
)
_UNITS = (
    "rank|peer|call|tile|row|GPU|node|host|program|token|layer|step|expert|bag|launch|sample|second"
)
IDIOMS: dict[str, str] = {
    "who": r"\bwho(?:m|ever)?\b",
    "stands": r"\bst(?:ands?|ood) (?:in|on|at|for|there|behind|beside|above|below|still|here)\b",
    "lies": r"\blies? (?:in|on|at|there|behind|beside|above|below)\b",
    "beside": r"\bbesides?\b(?! the point)",
    "behind": r"\bbehind\b",
    "in front of": r"\bin front of\b",
    "nobody": r"\b(?:nobody|everybody|somebody|anybody)\b",
    "a rank, per rank": rf"\b(?:{_COUNTED}) an? (?:{_UNITS})\b(?! of| has| gets)",
    "the library": r"\bthe library\b(?!'s? name)",
    "twin": r"\btwins?\b",
    "as many": r"\bas many (?:on|of|in|as there)\b",
    "goes by": r"\bgo(?:es)? by (?:copy|the|itself)\b",
    "to come": r"\bto come\b|\bto be had\b",
    "wanted": r"\b(?:was|were) wanted\b",
    "disorder": r"\bin disorder\b|\bbreaks? off\b|\bbroke off\b",
    "word": r"\bdevice words?\b",
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in IDIOMS.items()}


@dataclass(frozen=True)
class Text:
    """A page or docstring without code. ``name``: where it is."""

    name: str
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"[A-Za-z][A-Za-z'-]*", self.text))

    def found(self) -> Iterator[tuple[str, str]]:
        """Each idiom, and the words around it."""
        for name, pattern in PATTERNS.items():
            for match in pattern.finditer(self.text):
                around = self.text[max(match.start() - 40, 0) : match.end() + 40]
                yield name, " ".join(around.split())


def prose(markdown: str) -> str:
    """Markdown without blocks of code, code spans and targets of links."""
    text = re.sub(r"^( *)```.*?^ *```", " ", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", " ", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def documents() -> list[Text]:
    """All pages but generated ones. The glossary's list of words that are not used is not
    counted."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    texts = []
    for path in paths:
        if path.name.startswith("measured") or path.parent.name == "results":
            continue
        text = path.read_text("utf-8")
        if path.name == "glossary.md":
            text = text.split("## Words that are not used")[0]
        texts.append(Text(path.relative_to(ROOT).as_posix(), prose(text)))
    return texts


def docstrings() -> list[Text]:
    """Docstrings of public modules, classes and functions of the package."""
    texts = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        said = "\n\n".join(
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and not getattr(node, "name", "").startswith("_")
        )
        texts.append(Text(path.relative_to(ROOT).as_posix(), re.sub(r"``[^`]*``", " ", said)))
    return texts


def rate(texts: list[Text]) -> float:
    """Idioms per thousand words."""
    return 1000 * sum(len(list(text.found())) for text in texts) / sum(text.words for text in texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--show", action="store_true", help="every place")
    show = parser.parse_args().show
    for title, texts in (("documents", documents()), ("docstrings", docstrings())):
        for text in texts:
            found = list(text.found())
            if found:
                print(f"{text.name}: {len(found)} in {text.words} words")
            for name, around in found if show else []:
                print(f"    {name}: ... {around} ...")
        print(f"{title}: {rate(texts):.2f} per thousand of {sum(t.words for t in texts)} words")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
