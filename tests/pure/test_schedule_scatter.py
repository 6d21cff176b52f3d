"""Tiles that are sent to owners: each partial tile is computed once, in the order of sending, and
the device's function agrees with the host's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_int32 import Int32

from tileweave.planning.schedules.gather import push_order
from tileweave.planning.schedules.scatter import ScatterSchedule

thorough = settings(max_examples=200, derandomize=True)


@st.composite
def scatter_schedules(draw: st.DrawFn) -> ScatterSchedule:
    world_size = draw(st.integers(2, 8))
    return ScatterSchedule(
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        rows=draw(st.integers(1, 300)),
        cols=draw(st.integers(1, 150)),
        depth=draw(st.integers(1, 600)),
        tile_m=draw(st.sampled_from([16, 32, 64])),
        tile_n=draw(st.sampled_from([16, 32, 64])),
        tile_k=draw(st.sampled_from([16, 32, 64])),
        group_m=draw(st.integers(1, 9)),
        num_programs=draw(st.integers(1, 24) | st.just(132)),
        split_tail=draw(st.booleans()),
        team=draw(st.sampled_from([1, 1, 2, 3, 4])),
        chunk_rows=draw(st.integers(1, 8) | st.just(1 << 20)),
    )


@thorough
@given(scatter_schedules())
def test_each_partial_is_in_one_tile(schedule: ScatterSchedule) -> None:
    covered: Counter[tuple[int, int]] = Counter()
    for first_row, row_limit, col in map(schedule.place, range(schedule.num_tiles)):
        covered.update(
            (row, col) for row in range(first_row, min(first_row + schedule.tile_m, row_limit))
        )
    rows = schedule.world_size * schedule.rows
    assert covered == Counter(
        (row, col) for row in range(rows) for col in range(schedule.tile_cols)
    )


def turns_of(schedule: ScatterSchedule) -> list[tuple[int, int]]:
    """(owner, chunk) in the expected order: owner by owner, the own ones last."""
    owners = [*push_order(schedule.rank, schedule.world_size), schedule.rank]
    return [(owner, chunk) for owner in owners for chunk in range(schedule.chunks)]


@thorough
@given(scatter_schedules())
def test_owners_follow_push_order_with_own_tiles_last(
    schedule: ScatterSchedule,
) -> None:
    tiles = [schedule.place(tile) for tile in range(schedule.num_tiles)]
    if schedule.spans_shards:
        other = replace(schedule, rank=(schedule.rank + 1) % schedule.world_size)
        assert tiles == [other.place(tile) for tile in range(other.num_tiles)], (
            "the same on every rank"
        )
        return
    owners = [first_row // schedule.rows for first_row, _, _ in tiles]
    order = [(owner, schedule.chunk_bounds(chunk)) for owner, chunk in turns_of(schedule)]
    assert owners == [
        owner for owner, (first, end) in order for _ in range((end - first) * schedule.tile_cols)
    ]
    assert all(
        limit == (owner + 1) * schedule.rows
        for owner, (_, limit, _) in zip(owners, tiles, strict=True)
    )


@thorough
@given(scatter_schedules())
def test_chunks_are_computed_in_order(schedule: ScatterSchedule) -> None:
    """The tiles of one copy are computed at the same time, and their number is the one that the
    copy waits for."""
    bounds = [schedule.chunk_bounds(chunk) for chunk in range(schedule.chunks)]
    assert [row for first, end in bounds for row in range(first, end)] == list(
        range(schedule.tile_rows)
    )
    if schedule.spans_shards:
        return
    tile = 0
    for owner, chunk in turns_of(schedule):
        first, end = bounds[chunk]
        count = (end - first) * schedule.tile_cols
        step = (owner - schedule.rank - 1) % schedule.world_size
        assert [schedule.turn(tile + i) for i in range(count)] == [
            (step, chunk, i) for i in range(count)
        ]
        places = [schedule.place(tile + i) for i in range(count)]
        rows = {
            (first_row - owner * schedule.rows) // schedule.tile_m for first_row, _, _ in places
        }
        assert rows == set(range(first, end))
        assert len(set(places)) == count
        tile += count
    assert tile == schedule.num_tiles


@thorough
@given(scatter_schedules())
def test_a_slot_has_room_for_every_peer(schedule: ScatterSchedule) -> None:
    padded = schedule.tile_rows * schedule.tile_m * schedule.tile_cols * schedule.tile_n
    assert schedule.place_elements >= padded, "rows of whole tiles, row-major, fit there, too"
    assert schedule.place_elements >= schedule.tile_rows * schedule.tile_m * schedule.cols
    peers = (schedule.world_size - 1) * schedule.place_elements
    assert schedule.slot_elements == peers


@thorough
@given(scatter_schedules())
def test_each_k_block_of_each_partial_is_done_once(schedule: ScatterSchedule) -> None:
    units = [unit for program in range(schedule.num_programs) for unit in schedule.units(program)]
    done = Counter((unit.tile, k) for unit in units for k in range(unit.k_begin, unit.k_end))
    assert done == Counter(
        (tile, k) for tile in range(schedule.num_tiles) for k in range(schedule.k_blocks)
    )


def device_place_out(s: ScatterSchedule, tile: int) -> tuple[int, int, int]:
    """What the kernels compute with ``device/triton/tiles.py:place_out``. They get ``chunk_rows``
    limited to ``tile_rows``."""
    from tileweave.device.triton import tiles as device

    place_out = next(source for source in device.SOURCES if source.__name__ == "place_out")
    numbers = (
        s.rank,
        s.world_size,
        s.rows,
        s.tile_m,
        s.group_m,
        s.num_tiles,
        min(s.chunk_rows, s.tile_rows),
        s.team,
        s.tile_rows,
        s.tile_cols,
        s.k_blocks,
    )
    return place_out(device.OwnerTiles(*map(Int32, numbers), s.split_tail), Int32(tile))


@pytest.mark.skipif(find_spec("triton") is None, reason="device/triton/tiles.py needs triton")
@thorough
@given(scatter_schedules())
def test_device_maps_owner_tiles_like_the_host(schedule: ScatterSchedule) -> None:
    for tile in range(schedule.num_tiles):
        assert device_place_out(schedule, tile) == schedule.place(tile)


@pytest.mark.skipif(find_spec("triton") is None, reason="device/triton/tiles.py needs triton")
def test_the_largest_scatter_fits_int32() -> None:
    schedule = ScatterSchedule(
        7, 8, 32768, 131072, 65536, 64, 64, 32, 8, 132, True, team=2, chunk_rows=16
    )
    for tile in (0, 1, schedule.num_tiles // 2, schedule.num_tiles - 1):
        assert device_place_out(schedule, tile) == schedule.place(tile)
