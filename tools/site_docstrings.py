"""An extension of griffe for the site: docstrings have tables and roles of reStructuredText, which
Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

RULE = re.compile(r"^\s*=+( +=+)+\s*$")
ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


class Docstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """``text`` with simple tables and roles as in Markdown."""
    lines, made = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        if RULE.match(line):
            rest = [number for number, each in enumerate(lines) if RULE.match(each)]
            # a table with a heading has three rules, the second just below the heading
            heading = len(rest) > 1 and rest[0] == 1
            end = rest[1] if heading else rest[0]
            made += ["", *_table(line, lines[:end], heading), ""]
            del lines[: end + 1]
        else:
            made.append(line)
    return re.sub(r"::$", ":", ROLE.sub(r"`\1`", "\n".join(made)), flags=re.MULTILINE)


def _table(rule: str, lines: list[str], heading: bool) -> list[str]:
    spans = [found.span() for found in re.finditer("=+", rule)]
    ends = [begin for begin, _ in spans[1:]] + [None]
    rows: list[list[str]] = []
    for line in lines:
        if RULE.match(line) or not line.strip():
            continue
        cells = [
            line[begin:end].strip().replace("|", "\\|")
            for (begin, _), end in zip(spans, ends, strict=True)
        ]
        if cells[0] or not rows:
            rows.append(cells)
        else:  # goes on with the row above
            rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], cells, strict=True)]
    head = rows.pop(0) if heading else [" "] * len(spans)
    table = [head, ["---"] * len(spans), *rows]
    return [f"| {' | '.join(row)} |" for row in table]
