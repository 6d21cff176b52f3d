"""Code of README and guides runs as it is printed there: Python on two ranks, commands as far as
parsing."""

from __future__ import annotations

import ast
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.support.documents import ROOT, blocks_of, commands_of, program_of, run_page
from tests.support.worlds import World

from tileweave.commands.app import app
from tileweave.commands.simulate import app as simulator

PAGES = (
    "README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for folder in ("start", "guides", "explain")
        for path in (ROOT / "docs" / folder).glob("*.md")
    ),
    "CONTRIBUTING.md",
)
WITH_PYTHON = [name for name in PAGES if program_of((ROOT / name).read_text("utf-8")).strip()]
FRAMEWORKS = sorted((ROOT / "docs" / "integrations").glob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in PAGES),
    *FRAMEWORKS,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "develop").glob("*.md")),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """Two ranks for all pages; each page makes its process group itself."""
    world = World("gloo", 2)
    yield world
    world.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_of_a_page_runs(pair: World, name: str, tmp_path: Path) -> None:
    pair.run(run_page, name, str(tmp_path), free_port(), timeout=90)


def test_all_guides_are_run() -> None:
    """Pages whose blocks are in another language than Python or a shell's would be left out."""
    known = {"", "python", "text"}
    for name in PAGES:
        languages = {block.language for block in blocks_of((ROOT / name).read_text("utf-8"))}
        assert languages <= known, name
    assert len(WITH_PYTHON) >= 12


@pytest.mark.parametrize("page", FRAMEWORKS, ids=lambda page: page.stem)
def test_names_of_an_adapter_exist(page: Path) -> None:
    """Blocks of frameworks need the framework, and run in tests/integrations as whole models. Here:
    they parse, and what they import from tileweave is there."""
    for block in blocks_of(page.read_text("utf-8")):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tileweave."):
                source = ROOT / "src" / f"{(node.module or '').replace('.', '/')}.py"
                defined = {
                    getattr(each, "name", "") for each in ast.parse(source.read_text("utf-8")).body
                }
                assert {alias.name for alias in node.names} <= defined, page


def wrong(line: str) -> str:
    """What is wrong with a command of ours, "" if nothing is, or if it is a command of others."""
    words = shlex.split(line)
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return "" if words[1] in targets else f"no target {words[1]}"
    if words[:1] == ["torchrun"]:
        return ""
    if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
        return "" if (ROOT / words[1]).is_file() or "/" not in words[1] else f"no {words[1]}"
    if words[:3] == ["python", "-m", "tileweave"]:
        words = words[2:]
    if words[:1] in (["tileweave"], [".venv/bin/tileweave"]):
        return _refused(words[1:])
    return ""


def _refused(words: list[str]) -> str:
    known, said = app, words
    if words[:1] == ["simulate"]:
        known, said = simulator, words[1:]
    command: Any = typer.main.get_command(known)
    while getattr(command, "commands", None) and said and not said[0].startswith("-"):
        if said[0] not in command.commands:
            return f"no command {said[0]}"
        command, said = command.commands[said[0]], said[1:]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    asked = {word.split("=")[0] for word in said if word.startswith("--")}
    unknown = sorted(asked - options - {"--help"})
    return f"no {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path) -> None:
    lines = [line for line in commands_of(page.read_text("utf-8")) if _is_ours(line)]
    assert [(line, wrong(line)) for line in lines if wrong(line)] == []


def _is_ours(line: str) -> bool:
    return bool(re.match(r"(make [a-z]|python |tileweave |\.venv/bin/tileweave )", line))


def test_wrong_commands_are_found() -> None:
    assert wrong("tileweave bench matmul_all_reduce --jsn out.json") == "no --jsn"
    assert wrong("tileweave bnch") == "no command bnch"
    assert wrong("make tests") == "no target tests"
    assert wrong("python examples/none.py") == "no examples/none.py"
    assert wrong("tileweave simulate train gpt3-175b --gpus 128 --tp 8 --pp 8") == ""
    assert wrong("tileweave --version") == ""


def test_variables_are_documented() -> None:
    """Each variable that the package reads is on the page of variables, and no other."""
    page = (ROOT / "docs" / "reference" / "variables.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bTILEWEAVE_[A-Z]+\b", text)}
    assert set(re.findall(r"\bTILEWEAVE_[A-Z]+\b", page)) == read


def test_extras_are_real() -> None:
    """Each extra that a page installs is in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^([a-z]+) = \[", section, re.MULTILINE))
    pages = [page.read_text("utf-8") for page in DOCUMENTS]
    named = {
        extra
        for page in pages
        for several in re.findall(r"pip install (?:-e )?'(?:\.|tileweave)\[([a-z,]+)\]", page)
        for extra in several.split(",")
    }
    assert named <= extras
    assert {"cli", "plot", "demo"} <= named
