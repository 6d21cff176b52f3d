"""Checks before a command starts, so that nothing is missing at its end: packages, folders."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from tileweave.errors import InputError, require
from tileweave.files import writing

PICTURES = (".png", ".pdf", ".svg")


def need(command: str, *packages: str) -> None:
    """Check the packages that ``command`` needs."""
    missing = [name for name in packages if name not in sys.modules and find_spec(name) is None]
    if missing:
        raise InputError(
            f"{command} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def need_kernels(command: str, device_type: str) -> None:
    """Check Triton, and numpy where its interpreter runs."""
    need(command, "triton")
    if device_type == "cpu":
        need(f"{command} without GPUs", "numpy")


def file_for(path: Path | None) -> Path | None:
    """A file that can be written; its folder is made."""
    if path is not None:
        folder_for(path.parent)
        with writing(path):  # a name that is too long
            path.exists()
        require(not path.is_dir(), f"to write {path}, a folder", "a file", "name a file in it")
        writable = not path.exists() or os.access(path, os.W_OK)
        require(writable, f"to write {path}", "a file that may be written", "name another")
    return path


def folder_for(path: Path | None) -> Path | None:
    """A folder that can be written to; made if missing."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InputError(
                f"asked: to write into {path} ({why}); allowed: a folder that exists or "
                "can be made; remedy: name another"
            ) from None
        require(
            os.access(path, os.W_OK | os.X_OK),
            f"to write into {path}",
            "a folder that may be written",
            "name another",
        )
    return path


def picture_for(path: Path | None) -> Path | None:
    """A file for a picture."""
    if path is not None:
        require(
            path.suffix in PICTURES,
            f"a picture {path}",
            f"names that end in {', '.join(PICTURES)}",
            "rename it",
        )
    return file_for(path)
