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
import math
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from tileweave.errors import InputError
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import FUSED_WORLD_SIZES, MatmulConfig, Problem
from tileweave.planning.table import read_config

FORMAT = 1
_LOCK_SECONDS = 20.0
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}
_CLEAR = "tileweave tune --clear, then tune again"


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


@dataclass(frozen=True, slots=True)
class Tuned:
    """The times of one problem, in microseconds, by config; None is the unfused path."""

    op: str
    problem: Problem
    times: tuple[tuple[MatmulConfig | None, float], ...]

    def time_of(self, config: MatmulConfig | None) -> float | None:
        return next((us for known, us in self.times if known == config), None)

    @property
    def measurement(self) -> Measurement:
        return Measurement(self.op, self.problem, dict(self.times))


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


def text_of(key: Key, entries: Iterable[Tuned]) -> str:
    """The content of a file: the same text for the same results."""
    ordered = sorted(entries, key=lambda e: (e.op, *(str(v) for v in asdict(e.problem).values())))
    rows = [
        {
            "op": entry.op,
            **{name: getattr(entry.problem, name) for name in _PROBLEM},
            "times": [
                {"config": None if config is None else _fields(config), "us": us}
                for config, us in entry.times
            ],
        }
        for entry in ordered
    ]
    return json.dumps({"format": FORMAT, "key": asdict(key), "entries": rows}, indent=1) + "\n"


_PROBLEM = tuple(field.name for field in fields_of(Problem))


def _fields(config: MatmulConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields_of(MatmulConfig)}


def parse(text: str, where: str, key: Key | None = None) -> tuple[Key, tuple[Tuned, ...]]:
    """The key and the results in ``text``, after a check of all fields.

    where : the name of the text in errors.
    key : the key that the text must have; None: any.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(where, f"which is not JSON ({error})") from None
    if not isinstance(data, dict) or set(data) != {"format", "key", "entries"}:
        raise _broken(where, "without format, key and entries")
    if data["format"] != FORMAT:
        raise _broken(where, f"of format {data['format']!r}, not {FORMAT}")
    found = _key(data["key"], where)
    if key is not None and found != key:
        raise _broken(where, f"of {found}, not of {key}")
    if not isinstance(data["entries"], list):
        raise _broken(where, "whose entries are no list")
    entries = tuple(
        _entry(raw, found.world_size, f"{where}, entry {number}")
        for number, raw in enumerate(data["entries"])
    )
    if len({(entry.op, entry.problem) for entry in entries}) < len(entries):
        raise _broken(where, "with a problem twice")
    return found, entries


def _broken(where: str, what: str) -> InputError:
    return InputError(
        f"asked: the tuned results in {where}, {what}; allowed: a file as tileweave tune writes "
        f"it; remedy: {_CLEAR}"
    )


def _key(raw: object, where: str) -> Key:
    names = {field.name for field in fields_of(Key)}
    if not isinstance(raw, dict) or set(raw) != names:
        raise _broken(where, f"whose key is not of {', '.join(sorted(names))}")
    for name, value in raw.items():
        number = name in ("num_sms", "world_size")
        if type(value) is not (int if number else str):
            raise _broken(where, f"with {name} = {value!r}")
    return Key(**raw)


def _entry(raw: object, world_size: int, where: str) -> Tuned:
    if not isinstance(raw, dict) or set(raw) != {"op", "times", *_PROBLEM}:
        raise _broken(where, f"which has not op, times, {', '.join(_PROBLEM)}")
    sizes = {name: raw[name] for name in ("rows", "cols", "depth")}
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value < 2**31:
            raise _broken(where, f"with {name} = {value!r}")
    fits = raw["world_size"] == world_size and world_size in FUSED_WORLD_SIZES
    if type(raw["world_size"]) is not int or not fits:
        raise _broken(where, f"with world_size = {raw['world_size']!r}")
    if not isinstance(raw["op"], str) or not raw["op"].isidentifier():
        raise _broken(where, f"with op = {raw['op']!r}")
    known = isinstance(raw["dtype"], str) and type(raw["itemsize"]) is int
    if not known or raw["itemsize"] != _ITEMSIZES.get(raw["dtype"]):
        raise _broken(where, f"with {raw['itemsize']!r} bytes per {raw['dtype']!r}")
    times = raw["times"]
    if not isinstance(times, list) or not times:
        raise _broken(where, "without times")
    found = tuple(_time(time, where) for time in times)
    configs = [config for config, _ in found]
    if None not in configs or len(set(configs)) < len(configs):
        raise _broken(where, "without one time of the unfused path, or with a config twice")
    return Tuned(raw["op"], Problem(**{name: raw[name] for name in _PROBLEM}), found)


def _time(raw: object, where: str) -> tuple[MatmulConfig | None, float]:
    if not isinstance(raw, dict) or set(raw) != {"config", "us"}:
        raise _broken(where, "with a time that is not of config and us")
    us = raw["us"]
    if type(us) not in (int, float) or not 0 < us < math.inf:
        raise _broken(where, f"with us = {us!r}")
    if raw["config"] is None:
        return None, float(us)
    try:
        return read_config(raw["config"], where), float(us)
    except InputError as error:
        raise _broken(where, f"with a config that no kernel has ({error})") from None


# --- Files ---


def read(path: Path, key: Key | None = None) -> tuple[Key | None, tuple[Tuned, ...]]:
    """The key and the results in a file; None and () if there is no file."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None, ()
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(str(path), f"which cannot be read ({error})") from None
    return parse(text, str(path), key)


def files() -> list[Path]:
    """All files of the cache, of any key."""
    return sorted(folder().glob("*.json"))


def clear() -> list[Path]:
    """Remove all files, broken ones too. Returns what was removed."""
    found = files()
    for path in found:
        path.unlink(missing_ok=True)  # not its lock, which a writer may hold
    return found


def require_writable(key: Key) -> None:
    """Raise :class:`InputError` before anything is measured if results could not be kept."""
    path = path_of(key)
    with _locked(path):
        read(path, key)


def merge(key: Key, entries: Iterable[Tuned]) -> Path:
    """Add results to the file of ``key``. They replace earlier ones of the same problems."""
    path = path_of(key)
    with _locked(path):
        known = {(entry.op, entry.problem): entry for entry in read(path, key)[1]}
        known |= {(entry.op, entry.problem): entry for entry in entries}
        _replace(path, text_of(key, known.values()))
    return path


def _replace(path: Path, text: str) -> None:
    """Write ``text`` so that readers find the old file or the new one, whole."""
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """No other process writes to ``path`` inside. The lock ends with the process that holds it."""
    import fcntl  # there is none on Windows, where no kernel runs

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise InputError(
            f"asked: to keep tuned results in {path.parent} ({error.strerror}); allowed: a folder "
            "that may be written; remedy: set TILEWEAVE_CACHE to one"
        ) from None
    with lock:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"asked: to write {path}, which another process locks for more than "
                        f"{_LOCK_SECONDS:g} s; allowed: one writer at a time; remedy: end that "
                        "process, or set TILEWEAVE_CACHE to another folder"
                    ) from None
                time.sleep(0.05)
        yield
