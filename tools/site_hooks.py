"""Hooks of mkdocs, for `make site`.

Pages are also read as files of the repository, so they link to files outside of docs/. Here such a
link leads to a copy: Markdown as a page, anything else as text. A picture is a link to itself,
since wide ones have to be enlarged on a phone. The page of commands gets what `--help` says.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {ROOT / name: name.lower() for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
PICTURE = re.compile(r"(!\[[^\]]*\]\(([^)\s]+\.png)\))")
FOLDER = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)\)")
COMMANDS = "<!-- commands -->"
TABLES = re.compile(r"measured|results/|files/")  # pages that would bury what one looks for


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files outside of docs/ that pages link to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=path.read_text("utf-8")))
    linked = {
        target
        for source in (*DOCS.rglob("*.md"), *PAGES)
        for _, link, _ in LINK.findall(source.read_text("utf-8"))
        if (target := _target(link, source)) is not None and _copied(target)
    }
    for target in sorted(linked):
        text = target.read_text("utf-8")
        files.append(File.generated(config, _copy_of(target), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the copies, and fill in the commands."""
    uri = page.file.src_uri
    if TABLES.match(uri):
        page.meta["search"] = {"exclude": True}
    elif uri.startswith("reference/"):
        page.meta["search"] = {"boost": 8}
    elif uri.startswith(("guides/", "integrations/", "start/")):
        page.meta["search"] = {"boost": 2}
    source = next((path for path, name in PAGES.items() if name == uri), DOCS / uri)

    def lead(found: re.Match[str]) -> str:
        target = _target(found[2], source)
        if target is None:
            return found[0]
        if target.is_relative_to(DOCS):
            where = target.relative_to(DOCS).as_posix()
        elif target in PAGES:
            where = PAGES[target]
        elif _copied(target):
            where = _copy_of(target)
        else:
            return found[0]
        return f"{found[1]}{os.path.relpath(where, os.path.dirname(uri) or '.')}{found[3]}"

    def folder(found: re.Match[str]) -> str:
        """A link to a folder, which a site cannot show, as its text."""
        is_link = "://" not in found[2] and (source.parent / found[2]).is_dir()
        return found[1] if is_link else found[0]

    text = PICTURE.sub(r"[\1](\2)", markdown)
    text = LINK.sub(lead, FOLDER.sub(folder, text))
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def _target(link: str, source: Path) -> Path | None:
    """The file that a link of ``source`` leads to; None if it is no file of the repository."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = (source.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _copied(target: Path) -> bool:
    return not target.is_relative_to(DOCS) and target not in PAGES


def _copy_of(target: Path) -> str:
    """Text, which browsers show instead of saving it."""
    return f"files/{target.relative_to(ROOT).as_posix()}.txt"


def commands() -> str:
    """All commands with their options, from the command line itself."""
    import typer.main

    from tileweave.commands.app import app
    from tileweave.commands.simulate import app as simulator

    parts = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if name == "simulate":
            group: Any = typer.main.get_command(simulator)
            parts.append(f"## simulate\n\n{_plain(command.help)}\n")
            parts += [_command(f"simulate {each}", one) for each, one in group.commands.items()]
        else:
            parts.append(_command(name, command))
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    rows = [
        f"| {_names(each)} | {_plain(getattr(each, 'help', '')).replace('|', chr(92) + '|')} | "
        f"{_default(each)} |"
        for each in command.params
        if each.name != "help"
    ]
    table = "\n".join(["| option | meaning | default |", "|---|---|---|", *rows]) if rows else ""
    level = "###" if " " in name else "##"
    return f"{level} {name}\n\n{_plain(command.help)}\n\n{table}\n"


def _names(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = [name if name.startswith("-") else name.upper() for name in names]
    return ", ".join(f"`{name}`" for name in shown)


def _default(parameter: Any) -> str:
    value = parameter.default
    known = isinstance(value, bool | int | float | str | Path) and value != ""
    return f"`{value}`" if known else ""


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()
