"""The cache of tuned results: what ``tileweave tune`` measured, in a file per kind of machine.

A file is for one *key*: GPU, number of multiprocessors, world size, driver, versions, and which
kernels may run. Other keys have other files, so that no result is used where it was not measured.
Files are in ``$TILEWEAVE_CACHE``, else ``$XDG_CACHE_HOME/tileweave``, else ``~/.cache/tileweave``.

Every field is checked when a file is read: a file that is not as it was written raises
:class:`InputError` and is never used in part. It is written as a whole: into a temporary file that
then takes its place, under a lock, so that jobs that tune at the same time keep each other's
results. No torch, no triton.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tileweave.errors import InputError
from tileweave.files import is_there, parse_json, read_text, short, writing
from tileweave.planning.measurements import Measurement, read_measurements, write_measurements
from tileweave.planning.problem import Problem

FORMAT = 1
_LOCK_SECONDS = 20.0
_CLEAR = "tileweave tune --clear, then tune again"
_WHAT, _ALLOWED = "the tuned results in", "a file as tileweave tune writes it"


@dataclass(frozen=True, slots=True)
class Key:
    """What tuned results depend on besides the problem."""

    gpu: str
    num_sms: int
    world_size: int
    driver: str
    tileweave: str
    torch: str
    triton: str
    kernels: str

    @property
    def file_name(self) -> str:
        digest = zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.gpu).strip("-") or "device"
        return f"{name}-x{self.world_size}-{digest:08x}.json"


def folder() -> Path:
    """Where the files are."""
    given = os.environ.get("TILEWEAVE_CACHE")
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches) / "tileweave"
    try:
        return Path.home() / ".cache" / "tileweave"
    except RuntimeError:
        raise InputError(
            "asked: the cache of tuned results of a user without a home; allowed: any folder; "
            "remedy: set TILEWEAVE_CACHE to one"
        ) from None


def path_of(key: Key) -> Path:
    return folder() / key.file_name


# --- Text ---


def text_of(key: Key, measured: Iterable[Measurement]) -> str:
    """The content of a file: the same text for the same results."""
    ordered = sorted(measured, key=lambda one: (one.op, one.problem.dtype, _sizes(one.problem)))
    ops = dict.fromkeys(one.op for one in ordered)
    parts = ",\n".join(write_measurements(op, ordered).rstrip() for op in ops)
    return f'{{"format": {FORMAT},\n"key": {json.dumps(asdict(key))},\n"measured": [\n{parts}]}}\n'


def _sizes(p: Problem) -> tuple[int | str, ...]:
    return p.world_size, p.rows, p.cols, p.depth, p.nodes, p.scales


def parse(text: str, where: str, key: Key | None = None) -> tuple[Key, tuple[Measurement, ...]]:
    """The key and the results in ``text``, after a check of all fields.

    where : the name of the text in errors.
    key : the key that the text must have; None: any.
    """
    data = parse_json(text, f"{_WHAT} {where}", _ALLOWED, _CLEAR)
    if not isinstance(data, dict) or set(data) != {"format", "key", "measured"}:
        raise _broken(where, "without format, key and measured")
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise _broken(where, f"of format {short(repr(data['format']), 60)}, not {FORMAT}")
    found = _key(data["key"], where)
    if key is not None and found != key:
        raise _broken(where, f"of {found}, not of {key}")
    if not isinstance(data["measured"], list):
        raise _broken(where, "whose measurements are no list")
    measured: dict[tuple[str, Problem], Measurement] = {}
    for part in data["measured"]:
        try:
            several = read_measurements(json.dumps(part), "of one operator")
        except InputError as error:
            raise _broken(where, f"with parts that are wrong ({error})") from None
        for one in several:
            if one.problem.world_size != found.world_size or (one.op, one.problem) in measured:
                raise _broken(where, f"with {one.problem} of other ranks, or twice")
            measured[one.op, one.problem] = one
    return found, tuple(measured.values())


def _broken(where: str, what: str) -> InputError:
    return InputError(f"asked: {_WHAT} {where}, {what}; allowed: {_ALLOWED}; remedy: {_CLEAR}")


def _key(raw: object, where: str) -> Key:
    names = {field.name for field in fields(Key)}
    if not isinstance(raw, dict) or set(raw) != names:
        raise _broken(where, f"whose key is not of {', '.join(sorted(names))}")
    for name, value in raw.items():
        number = name in ("num_sms", "world_size")
        if type(value) is not (int if number else str) or (number and int(value) < 1):
            raise _broken(where, f"with {name} = {short(repr(value), 60)}")
    return Key(**raw)


# --- Files ---


def read(path: Path, key: Key | None = None) -> tuple[Key | None, tuple[Measurement, ...]]:
    """The key and the results in a file; None and () if there is no file."""
    if not is_there(path):
        return None, ()
    return parse(read_text(path, _WHAT, _ALLOWED, _CLEAR), short(path), key)


def files() -> list[Path]:
    """All files of the cache, of any key."""
    here = folder()
    try:
        names = os.listdir(here)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise _unusable(here, error) from None
    return sorted(here / name for name in names if name.endswith(".json"))


def clear() -> list[Path]:
    """Remove all files, broken ones too. Returns what was removed."""
    found = files()
    for path in found:
        try:
            path.unlink(missing_ok=True)  # not its lock, which a writer may hold
        except OSError as error:
            raise InputError(
                f"asked: to remove {short(path)} ({error.strerror}); allowed: a file in a folder "
                "that may be written; remedy: remove it in another way"
            ) from None
    return found


def require_writable(key: Key) -> None:
    """Raise :class:`InputError` before anything is measured if results could not be kept."""
    path = path_of(key)
    with _locked(path):
        read(path, key)


def merge(key: Key, measured: Iterable[Measurement]) -> Path:
    """Add results to the file of ``key``. They replace earlier ones of the same problems."""
    path = path_of(key)
    with _locked(path):
        _replace(path, text_of(key, merged(read(path, key)[1], measured)))
    return path


def merged(*several: Iterable[Measurement]) -> list[Measurement]:
    """All measurements; later ones of a problem replace earlier ones."""
    return list({(one.op, one.problem): one for each in several for one in each}.values())


def _replace(path: Path, text: str) -> None:
    """Write ``text`` so that readers find the old file or the new one, whole."""
    with writing(path):
        number, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _unusable(here: Path, error: OSError | ValueError) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(
        f"asked: to keep tuned results in {short(here)} ({why}); allowed: a folder that may be "
        "read and written; remedy: set TILEWEAVE_CACHE to one"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """No other process writes to ``path`` inside. The lock ends with the process that holds it."""
    import fcntl  # there is none on Windows, where no kernel runs

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # an error, and no wait, where it is a pipe without a reader
        lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except (OSError, ValueError) as error:
        raise _unusable(path.parent, error) from None
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # a file system without locks
                    raise _unusable(path.parent, error) from None
                if time.monotonic() > deadline:
                    raise InputError(
                        f"asked: to write {path}, which another process locks for more than "
                        f"{_LOCK_SECONDS:g} s; allowed: one writer at a time; remedy: end that "
                        "process, or set TILEWEAVE_CACHE to another folder"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)
