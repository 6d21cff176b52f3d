"""Measured tables are data: any content is a table, or an InputError that says what is wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from tileweave.errors import InputError
from tileweave.planning.problem import Problem
from tileweave.planning.stored import read_config
from tileweave.sim.tables import Entry, nearest, read_entries

CONFIG = {
    "kernel": "triton",
    "transport": "sm",
    "tile_m": 64,
    "tile_n": 64,
    "tile_k": 64,
    "num_stages": 3,
    "num_warps": 4,
}
ENTRY = {"rows": 64, "cols": 64, "depth": 64, "us": None, "config": CONFIG}


def table(**changes: object) -> str:
    return json.dumps({"entries": [{**ENTRY, **changes}]})


def test_sound_table_is_read() -> None:
    (entry,) = read_entries(table(us=3.5), "here")
    assert isinstance(entry, Entry)
    assert (entry.us, entry.config.tile_m, entry.config.num_slices, entry.world_size) == (
        3.5,
        64,
        32,
        4,
    )
    assert read_entries(table(world_size=2), "here")[0].world_size == 2


WRONG = {
    "not_json": "{",
    "code": "__import__('os').system('true')",
    "a_list": "[]",
    "no_entries": "{}",
    "empty": json.dumps({"entries": []}),
    "an_entry_that_is_none": json.dumps({"entries": [3]}),
    "a_field_is_missing": json.dumps({"entries": [{"rows": 64}]}),
    "an_unknown_field": table(extra=1),
    "rows_are_text": table(rows="64"),
    "rows_are_huge": table(rows=2**40),
    "an_unknown_flag": table(extra=True),
    "rows_are_zero": table(rows=0),
    "rows_are_negative": table(rows=-1),
    "a_world_of_one": table(world_size=1),
    "a_world_that_is_true": table(world_size=True),
    "rows_are_true": table(rows=True),
    "time_is_not_a_number": table(us=float("nan")),
    "time_is_without_end": table(us=float("inf")),
    "stages_are_true": table(config={**CONFIG, "num_stages": True}),
    "a_tile_that_is_no_power": table(config={**CONFIG, "tile_m": 48}),
    "an_unknown_kernel": table(config={**CONFIG, "kernel": "../../kernel"}),
    "a_flag_that_is_text": table(config={**CONFIG, "split_tail": "yes"}),
    "config_is_a_list": table(config=[]),
    "config_misses_a_field": table(config={"kernel": "triton"}),
    "config_has_a_dunder": table(config={**CONFIG, "__class__": "x"}),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_wrong_table_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"asked: .*allowed: .*remedy: "):
        read_entries(text, "here")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*ENTRY, *CONFIG, "entries"]), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.one_of(ANYTHING, st.fixed_dictionaries({"entries": st.lists(ANYTHING, max_size=3)})))
def test_any_json_value_is_a_table_or_refused(data: object) -> None:
    with suppress(InputError):
        assert all(isinstance(entry, Entry) for entry in read_entries(json.dumps(data), "here"))


BY_COPY_ENGINES = read_config({**CONFIG, "transport": "copy_engine"}, "here")


def test_equal_shapes_prefer_the_same_world_size() -> None:
    two, four = (Entry(1024, 512, 512, None, BY_COPY_ENGINES, size) for size in (2, 4))
    for size, near in ((2, two), (3, four), (4, four), (8, four)):
        p = Problem(size, 1024 // size, 512, 512, 2, "bfloat16")
        assert nearest("all_gather_matmul", p, (two, four)) is near


def test_nearest_shape_is_decided_mostly_by_rows() -> None:
    far, near, farther = (
        Entry(*sizes, None, BY_COPY_ENGINES)
        for sizes in ((2048, 512, 512), (1024, 1536, 512), (1024, 512, 2560))
    )
    for op, rows in (("all_gather_matmul", 256), ("matmul_all_reduce", 1024)):
        p = Problem(4, rows, 512, 512, 2, "bfloat16")
        for shapes, nearer in (((far, near, farther), near), ((farther, far), far)):
            assert nearest(op, p, shapes) is nearer


def test_an_entry_whose_config_cannot_run_is_passed_over() -> None:
    copied = Entry(128, 512, 512, None, BY_COPY_ENGINES)
    pushed = replace(copied, rows=4096, config=replace(BY_COPY_ENGINES, transport="sm"))
    p = Problem(4, 32, 512, 512, 2, "bfloat16")
    assert nearest("matmul_all_to_all", p, (copied, pushed)) is pushed
    with pytest.raises(InputError, match=r"asked: matmul_all_to_all of 128 rows.*remedy"):
        nearest("matmul_all_to_all", p, (copied,))
