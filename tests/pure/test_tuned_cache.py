"""The cache of tuned results: where it is, every field checked, whole files, several writers."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tileweave.errors import InputError
from tileweave.planning import cache
from tileweave.planning.cache import Key
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import SCALES, MatmulConfig, Problem

OP = "matmul_reduce_scatter"
KEY = Key("NVIDIA H100 80GB HBM3", 132, 2, "580.65", "0.1.0", "2.11.0", "3.6.0", "all")
CONFIG = MatmulConfig("library", "sm", 16, 128, 64, 1, 8)
OTHER = replace(CONFIG, tile_n=256)


def tuned(rows: int, us: float = 10.0, op: str = OP) -> Measurement:
    problem = Problem(2, rows, 4096, 2048, 2, "bfloat16")
    return Measurement(op, problem, {None: 12.0, CONFIG: us, OTHER: 11.5})


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path))
    return tmp_path


def test_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.folder() == tmp_path
    monkeypatch.delenv("TILEWEAVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.folder() == Path("/x/tileweave")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.folder() == Path("/home/someone/.cache/tileweave")


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TILEWEAVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(InputError, match="remedy: set TILEWEAVE_CACHE"):
        cache.folder()


def test_every_part_of_the_key_has_files_of_its_own() -> None:
    others = [
        replace(KEY, **{name: value})
        for name, value in {
            "gpu": "NVIDIA H200",
            "num_sms": 114,
            "world_size": 4,
            "driver": "1",
            "tileweave": "0.2",
            "torch": "2.12",
            "triton": "3.7",
            "kernels": "portable",
        }.items()
    ]
    names = {key.file_name for key in (KEY, *others)}
    assert len(names) == 9 and all("/" not in name for name in names)


def test_results_are_read_as_they_were_written() -> None:
    assert cache.read(cache.path_of(KEY), KEY) == (None, ())
    path = cache.merge(KEY, [tuned(64), tuned(128)])
    assert cache.read(path, KEY) == (KEY, (tuned(64), tuned(128)))
    cache.merge(KEY, [tuned(64, 9.0), tuned(64, op="matmul_all_reduce")])
    found = cache.read(path, KEY)[1]
    assert found == (tuned(64, op="matmul_all_reduce"), tuned(64, 9.0), tuned(128))
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".part"] == []
    assert cache.clear() == [path] and cache.files() == []


def test_equal_results_are_equal_texts() -> None:
    """Ranks compare checksums of these texts, whatever the order in which they measured."""
    one = tuned(64)
    others = [
        replace(one, problem=replace(one.problem, **{name: value}))
        for name, value in {"rows": 128, "cols": 64, "depth": 64, "nodes": 2}.items()
    ]
    half = replace(one.problem, dtype="float16")
    fp8 = replace(one.problem, dtype="float8_e4m3fn", itemsize=1)
    others += [replace(one, problem=p) for p in (half, *(replace(fp8, scales=k) for k in SCALES))]
    others += [tuned(64, op="all_gather_matmul"), tuned(128, op="all_gather_matmul")]
    found = [one, *others]
    assert cache.text_of(KEY, found) == cache.text_of(KEY, reversed(found))
    again = cache.parse(cache.text_of(KEY, found), "a text")[1]
    assert len(again) == len(found) and all(one in again for one in found)


def test_results_over_nodes_are_not_those_of_one() -> None:
    one = tuned(64)
    two = replace(one, problem=replace(one.problem, nodes=2))
    path = cache.merge(KEY, [one, two])
    assert cache.read(path, KEY)[1] == (one, two)


def change(path: tuple[Any, ...], value: object) -> str:
    data = json.loads(cache.text_of(KEY, [tuned(64), tuned(128)]))
    part = data
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return json.dumps(data)


SHAPE = ("measured", 0, "shapes", 0)
CUT = ("measured", 0, "configs", 0)
BROKEN = {
    "nothing": "",
    "half": cache.text_of(KEY, [tuned(64)])[:200],
    "deep": "[" * 100_000,
    "list": "[]",
    "number": "5",
    "more": change(("more",), 1),
    "format": change(("format",), 2),
    "key": change(("key",), []),
    "key of nothing": change(("key",), {}),
    "key of names": change(("key",), [field.name for field in fields(Key)]),
    "key number": change(("key",), 5),
    "gpu number": change(("key", "gpu"), 100),
    "gpu": change(("key", "gpu"), "NVIDIA H200"),
    "sms": change(("key", "num_sms"), "132"),
    "measured": change(("measured",), {}),
    "part": change(("measured", 0), 5),
    "rows": change((*SHAPE, "rows"), 0),
    "twice": change((*SHAPE, "rows"), 128),
    "world": change((*SHAPE, "world_size"), 4),
    "nodes": change((*SHAPE, "nodes"), 3),
    "one node": change((*SHAPE, "nodes"), 1),
    "dtype": change((*SHAPE, "dtype"), "int8"),
    "dtype list": change((*SHAPE, "dtype"), []),
    "no sms": change(("key", "num_sms"), 0),
    "format true": change(("format",), True),
    "a name twice": change(("format",), 1)[:-1] + ', "format": 1}',
    "op": change(("measured", 0, "op"), 3),
    "no times": change((*SHAPE, "us"), []),
    "times no list": change((*SHAPE, "us"), 5),
    "us": change((*SHAPE, "us", 1), float("nan")),
    "us 0": change((*SHAPE, "us", 1), 0),
    "us text": change((*SHAPE, "us", 1), "9"),
    "no unfused": change((*SHAPE, "us", 0), None),
    "kernel": change((*CUT, "kernel"), "cutlass"),
    "tile": change((*CUT, "tile_m"), 48),
    "field": change((*CUT, "colour"), 1),
    "config": change(CUT, []),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_file_is_refused_by_name(text: str) -> None:
    if text != BROKEN["gpu"]:  # of another machine
        with pytest.raises(InputError, match="asked: the tuned results in a text"):
            cache.parse(text, "a text")
    path = cache.path_of(KEY)
    path.write_text(text)
    for use in (lambda: cache.read(path, KEY), lambda: cache.merge(KEY, [tuned(1)])):
        with pytest.raises(InputError) as error:
            use()
        assert str(path) in str(error.value) and "remedy: tileweave tune --clear" in str(
            error.value
        )
    assert path.read_text() == text, "it is kept as it is"
    assert cache.clear() == [path]


def test_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="remedy: set TILEWEAVE_CACHE"):
        cache.require_writable(KEY)


def test_file_that_cannot_be_replaced_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.merge(KEY, [tuned(64)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=OSError(28, "no space")))
        with pytest.raises(InputError, match="no space"):
            cache.merge(KEY, [tuned(128)])
    assert cache.read(path, KEY)[1] == (tuned(64),)
    assert not list(path.parent.glob("*.part")), "no half of a file is left"


def test_writer_that_waits_too_long_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.2)
    path = cache.path_of(KEY)
    with (
        cache._locked(path),
        pytest.raises(InputError, match="another process locks"),
        cache._locked(path),
    ):
        pass
    cache.merge(KEY, [tuned(1)])


def _write_many(first: int) -> None:
    for rows in range(first, first + 8):
        cache.merge(KEY, [tuned(rows)])


def test_writers_at_the_same_time_keep_each_others_results() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(100 * n + 1,)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(cache.read(cache.path_of(KEY), KEY)[1]) == 32


def test_folders_that_cannot_be_used_are_named(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "file").write_text("x")
    for name in ("file", "file/inside", "x" * 300):
        monkeypatch.setenv("TILEWEAVE_CACHE", str(own_folder / name))
        for use in (cache.files, cache.clear, lambda: cache.merge(KEY, [tuned(64)])):
            with pytest.raises(InputError, match=r"asked: to keep .*remedy: set TILEWEAVE_CACHE"):
                use()


def test_what_is_no_file_of_the_cache_is_named(own_folder: Path) -> None:
    (own_folder / "a.json").mkdir()
    with pytest.raises(InputError, match=r"asked: to remove .*a\.json"):
        cache.clear()
    lock = cache.path_of(KEY).with_suffix(".lock")
    os.mkfifo(lock)  # opening it to write would wait for a reader
    with pytest.raises(InputError, match="asked: to keep tuned results"):
        cache.merge(KEY, [tuned(64)])
    lock.unlink()
    other = own_folder / "other"
    other.write_text("precious")
    lock.symlink_to(other)
    cache.merge(KEY, [tuned(64)])
    assert other.read_text() == "precious"
