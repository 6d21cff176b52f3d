"""Code blocks of Markdown pages, and a function that runs those of one page on a rank."""

from __future__ import annotations

import os
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from markdown_it import MarkdownIt
from tests.support.worlds import Member

import tileweave

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: of its first line of code, from 1."""

    language: str
    line: int
    code: str


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    return [
        Block(token.info.split(" ")[0], token.map[0] + 2, token.content)
        for token in MarkdownIt().parse(text)
        if token.type == "fence" and token.map
    ]


def program_of(text: str) -> str:
    """The Python blocks of a page as one program, whose lines have the numbers of the page."""
    lines: list[str] = []
    for block in blocks_of(text):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run_page(me: Member, name: str, folder: str, port: int) -> None:
    """Run the program of page ``name`` as ``torchrun`` would, in ``folder``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ |= {
        "RANK": str(me.rank),
        "LOCAL_RANK": str(me.rank),
        "WORLD_SIZE": str(me.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder)
    # Triton reads the source of a kernel from its file
    path = Path(folder) / f"{Path(name).stem.replace('-', '_')}{me.rank}.py"
    path.write_text(program_of((ROOT / name).read_text("utf-8")), "utf-8")
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        tileweave.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def commands_of(text: str) -> list[str]:
    """The lines of blocks without a language (shells), without comments and variables before the
    command."""
    lines = [
        line
        for block in blocks_of(text)
        if block.language in ("", "sh", "shell", "console")
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    found = [re.sub(r"\s+#.*", "", part).strip() for line in lines for part in line.split("; ")]
    return [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in found]
