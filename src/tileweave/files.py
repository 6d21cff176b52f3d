"""Files of the user, read and written. What goes wrong with a file is an :class:`InputError` that
names it: it is no file, may not be read, is too large, is no text in UTF-8, or is not JSON.

No torch, no triton.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tileweave.errors import InputError

MOST_BYTES = 1 << 28  # of a text; results of benches have less than 1 MB
_LONGEST = 200  # characters of a path or value that a message repeats
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character outside 16 bits


def short(value: object, most: int = _LONGEST) -> str:
    """``value`` as messages repeat it: begin and end of what is long."""
    text = str(value)
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]}... ({len(text)} characters) ...{text[-half // 2 :]}"


def read_text(path: Path, what: str, allowed: str, remedy: str, most: int = MOST_BYTES) -> str:
    """The contents of a text file of at most ``most`` bytes. ``what`` begins the message, such as
    "results in"."""
    try:
        return read_bytes(path, what, allowed, remedy, most).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _refused(what, path, f"no text in UTF-8: {error}", allowed, remedy) from None


def read_bytes(path: Path, what: str, allowed: str, remedy: str, most: int | None = None) -> bytes:
    """The contents of a file. A pipe or device is refused: reading it may never end."""
    try:
        there = os.stat(path)
        why = _why_not(there, most)
        if not why:
            return Path(path).read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:  # a NUL in the name
        why = str(error)
    raise _refused(what, path, why, allowed, remedy)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name. What cannot be known counts as there, so that reading
    it says why."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _why_not(there: os.stat_result, most: int | None) -> str:
    if stat.S_ISDIR(there.st_mode):
        return "a folder"
    if not stat.S_ISREG(there.st_mode):
        return "a pipe or a device"
    return f"{there.st_size} bytes" if most is not None and there.st_size > most else ""


def read_json(path: Path, what: str, allowed: str, remedy: str) -> Any:
    """The contents of a JSON file."""
    return parse_json(
        read_text(path, what, allowed, remedy), f"{what} {short(path)}", allowed, remedy
    )


def parse_json(text: str, where: str, allowed: str, remedy: str) -> Any:
    """The value of a JSON text. Names that occur twice are refused, since only one of their values
    would count; so is text that cannot be written again."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        said = "nested too deep" if isinstance(error, RecursionError) else short(error)
        raise InputError(
            f"asked: {where}, which is not JSON: {said}; allowed: {allowed}; remedy: {remedy}"
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{short(repr(twice), 60)} is there twice")
    return found


def write_text(path: Path, text: str) -> None:
    """Write a text file, as a whole."""
    with writing(path):
        path.write_text(text, "utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written inside is an :class:`InputError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from None
    except ValueError as error:
        if "null" not in str(error):  # of a name
            raise
        raise unwritable(path, str(error)) from None


def unwritable(path: Path, why: str) -> InputError:
    """The error for what cannot be written."""
    return InputError(
        f"asked: to write {short(path)} ({why}); allowed: a file in a folder that may be written, "
        "with room for it; remedy: name another"
    )


def _refused(what: str, path: Path, why: str, allowed: str, remedy: str) -> InputError:
    return InputError(
        f"asked: {what} {short(path)}, which cannot be read ({why}); allowed: {allowed}; "
        f"remedy: {remedy}"
    )
