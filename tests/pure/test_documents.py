"""Links in the documents have targets, decisions that the sources name exist, the reference is
complete, and the English is plain."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
from tools import count_idioms

import tileweave as tw

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = sorted(
    page for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name != "README.md"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CALM = ("tileweave.close", "tileweave.parallel.join_projections")  # nothing to refuse
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
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


def test_pictures_are_told_in_words() -> None:
    """What a picture shows, for readers who do not see it."""
    alone = {
        f"{document.name}: {text}"
        for document in DOCUMENTS
        for text in re.findall(r"!\[([^\]]*)\]", document.read_text("utf-8"))
        if len(text.split()) < 12
    }
    assert alone == set()


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


# --- Plain English ---


def test_documents_and_docstrings_have_few_idioms() -> None:
    for texts in (count_idioms.documents(), count_idioms.docstrings()):
        assert sum(text.words for text in texts) > 20_000
        assert count_idioms.rate(texts) < count_idioms.MOST
    (readme,) = (text for text in count_idioms.documents() if text.name == "README.md")
    assert list(readme.found()) == []


def test_idioms_are_found() -> None:
    said = (
        "It is told to who comes late. 12 bytes a row stand in the slot beside it, behind the "
        "wait; nobody uses the library's twin."
    )
    names = [name for name, _ in count_idioms.Text("page", said).found()]
    assert set(names) == {
        "who",
        "a rank, per rank",
        "stands",
        "beside",
        "behind",
        "nobody",
        "the library",
        "twin",
    }
    code = count_idioms.prose("`who`\n\n```\nbeside\n```\n[text](behind.md)")
    assert list(count_idioms.Text("page", code).found()) == []


# --- The front door ---


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 130
    assert len(text.split()) <= 900
    assert next(number for number, line in enumerate(lines, 1) if line == "```python") < 45
    assert all(
        any(command in line for line in lines[:60]) for command in ("make demo", "make test")
    )


def test_the_version_is_the_same_everywhere() -> None:
    found = {
        "pyproject.toml": r'^version = "(.+)"',
        "CITATION.cff": r"^version: (.+)",
        "src/tileweave/__init__.py": r'^__version__ = "(.+)"',
        "CHANGELOG.md": r"^## \[(\d.+?)\]",
    }
    versions = {
        re.findall(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)[0]
        for name, pattern in found.items()
    }
    assert len(versions) == 1


def test_every_page_is_in_the_site() -> None:
    """Decisions are in their index."""
    listed = set(
        re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    )
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    kept_out = {page for page in pages if page.startswith(("decisions/0", "results/"))}
    assert pages - kept_out == listed - {"contributing.md", "changelog.md", "security.md"}


# --- The reference ---


def documented() -> set[str]:
    """The names that pages of the reference show."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    }


def public_names() -> set[str]:
    """Every public name but modules and the list of operators."""
    packages = {"tileweave": tw, "tileweave.nn": tw.nn, "tileweave.parallel": tw.parallel}
    found = {f"{package}.{name}" for package, module in packages.items() for name in module.__all__}
    modules = {f"tileweave.{name}" for name in ("nn", "ops", "parallel")}
    return found - modules - {"tileweave.OPERATORS", "tileweave.parallel.parallelize"}


def adapters() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """What each adapter names in ``__all__``. Read, not imported: frameworks may be absent."""
    found = {}
    for path in sorted((ROOT / "src/tileweave/integrations").glob("[!_]*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        (names,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        defined = {getattr(node, "name", ""): node for node in tree.body}
        found |= {f"tileweave.integrations.{path.stem}.{name}": defined[name] for name in names}
    return found


def test_every_public_name_is_in_the_reference() -> None:
    assert documented() == public_names() | {*adapters()}
    assert len(adapters()) >= 11


def test_methods_in_the_reference_have_docstrings() -> None:
    """Methods that a page shows, and all class methods: other ways to make an object."""
    shown: dict[str, set[str]] = {}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown |= {
            name: {*members.split(", ")}
            for name, members in re.findall(
                r"^::: (\S+)\n +options:\n +members: \[(.+)\]$",
                page.read_text("utf-8"),
                re.MULTILINE,
            )
        }
    for name in public_names():
        package, _, attribute = name.rpartition(".")
        found = getattr(sys.modules[package], attribute)
        members = {n: v for n, v in vars(found).items()} if isinstance(found, type) else {}
        made = {n for n, v in members.items() if isinstance(v, classmethod) and n[0] != "_"}
        assert made - {"unflatten"} <= shown.get(name, set()), name  # unflatten: of torch.ops
        for each in shown.get(name, set()):
            assert inspect.getdoc(getattr(found, each)), f"{name}.{each}"


@pytest.mark.parametrize("name", sorted(public_names()))
def test_docstring_names_each_parameter_once(name: str) -> None:
    """As the generator of the reference reads it: a paragraph for each parameter of the signature,
    with a type or shape."""
    package, _, attribute = name.rpartition(".")
    found = getattr(sys.modules[package], attribute)
    text = inspect.getdoc(found) or ""
    assert len(text) > 20, name
    said = described(text)
    if isinstance(found, type) and (issubclass(found, Exception) or not said):
        return  # made by the package, not by callers: attributes are described
    assert not_alone(text) == [], f"{name}: one parameter a paragraph, with its type or shape"
    if not isinstance(found, type):
        nothing = inspect.signature(found).return_annotation in (None, "None")
        assert nothing or "\nReturns\n---" in text, f"{name}: what it returns"
        assert name in CALM or "\nRaises\n---" in text, f"{name}: its errors"
    given = [
        each.lstrip("*")
        for each, parameter in inspect.signature(found).parameters.items()
        if not (inspect.isclass(found) and parameter.kind in VARIABLE)
    ]
    assert sorted(said) == sorted({*said}), f"{name}: a parameter twice"
    assert set(given) - {"kwargs"} <= {*said}, f"{name}: without a paragraph"
    if "kwargs" not in given:
        assert {*said} <= set(given), f"{name}: no such parameter"


@pytest.mark.parametrize("name", sorted(adapters()))
def test_docstring_of_an_adapter_names_each_parameter(name: str) -> None:
    found = adapters()[name]
    text = ast.get_docstring(found) or ""
    assert len(text) > 20
    assert not_alone(text) == []
    if isinstance(found, ast.FunctionDef):
        named = [*found.args.args, *found.args.kwonlyargs, found.args.vararg, found.args.kwarg]
        given = {each.arg for each in named if each}
        if given != {"config"}:  # called by torchtitan only
            assert {*described(text)} == given


def test_parameters_that_share_a_paragraph_are_found() -> None:
    text = "Do.\n\nParameters\n---\nx, y : int\n    Both.\n\nz\n    Third.\n\nok : str\n    Last.\n"
    assert not_alone(text) == ["x, y : int", "z"]
    assert described(text) == ["x", "y", "z", "ok"]


def heads(text: str) -> list[str]:
    """The first lines of paragraphs in the sections of parameters of a numpy docstring."""
    sections = re.findall(
        r"^(?:Other )?Parameters\n-+\n(.*?)(?=^\S[^\n]*\n-{3,}$|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return [
        head
        for section in sections
        for head in re.findall(r"^\*{0,2}\w[\w, *]*?(?: : .*)?$", section, re.MULTILINE)
    ]


def not_alone(text: str) -> list[str]:
    """Those with several names, or without a type."""
    return [head for head in heads(text) if not re.match(r"\*{0,2}\w+ : ", head)]


def described(text: str) -> list[str]:
    """Names in the sections of parameters."""
    return [
        name.strip().lstrip("*") for head in heads(text) for name in head.split(" : ")[0].split(",")
    ]
